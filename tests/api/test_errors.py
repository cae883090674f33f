"""Arguments of another kind or value than the contract asks for: typed errors, before anything is
made.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import devgraph as dg
from devgraph.api.errors import brief, counted, did_you_mean
from devgraph.runners import HostSlot


def test_errors_about_values_and_kinds_are_python_ones():
    errors = [getattr(dg, name) for name in dg.__all__ if name.endswith(("Error", "Lost"))]
    assert len(errors) > 20
    assert all(issubclass(error, dg.DeviceGraphError) for error in errors)
    for error in (dg.InputError, dg.ConfigError, dg.FrozenValueError, dg.UnknownBackendError):
        assert issubclass(error, ValueError)
    for error in (dg.InputTypeError, dg.ConfigTypeError, dg.HostArgumentError):
        assert issubclass(error, TypeError)


def test_errors_name_the_section_that_helps():
    class Refused(dg.CaptureError):
        """As vendors and integrations derive their own."""

    assert dg.HostReadError("x").__notes__ == ["see: devgraph troubleshoot HostReadError"]
    assert Refused("x").__notes__ == ["see: devgraph troubleshoot CaptureError"]
    assert str(Refused("x")) == "x"


X = torch.ones(4)

BE = dg.get_backend("cpu")

SLOT = dg.InputSlot("x", ("tokens",), torch.float32, pad=dg.Pad.zero())


def _capture(fn: Any = lambda x: x + 1, **options: Any) -> Any:
    return dg.capture(fn, X, **{"backend": "cpu", **options})


def _decode(forward: Any = lambda batch: batch.x * 2, inputs: Any = (SLOT,), **options: Any) -> Any:
    return dg.DecodeRunner(forward, inputs, backend="cpu", max_requests=2, **options)


KINDS: dict[str, tuple[Callable[[], Any], str]] = {
    "step": (lambda: _capture(3), "fn must be a function or a module, got 3"),
    "class as step": (lambda: _capture(torch.nn.ReLU), "fn must be a function or a module, got <"),
    "class": (lambda: dg.graphed(torch.nn.ReLU), "takes a function or a module, got <class"),
    "result": (lambda: _capture(X * 2), r"capture(step, x\), not capture(step(x\), x\)"),
    "inputs by name": (
        lambda: _decode().run(x=X),
        r"run takes all inputs in one mapping: run({'x': ...}\)",
    ),
    "option of run": (
        lambda: _decode().run({"x": X}, host_arg={}),
        "There is no option 'host_arg'. Known: accepted, clone, .* Did you mean 'host_args'",
    ),
    "backend": (lambda: _capture(backend=3), "name of a backend must be a string, got 3"),
    "name of a backend": (
        lambda: dg.get_backend(None),
        "name of a backend must be a string, got None",
    ),
    "kwargs": (lambda: _capture(kwargs=[1]), "kwargs must be a mapping"),
    "host_args": (lambda: _capture(host_args=["n"]), "host_args must map names"),
    "pool": (lambda: _capture(pool=3), "make_pool"),
    "pool of a graph": (lambda: BE.make_graph(3), "make_pool"),
    "pool of a runner": (lambda: _decode(pool=3), "make_pool"),
    "graph": (lambda: BE.capture_context(3).__enter__(), "make_graph"),
    "pool of a context": (
        lambda: BE.capture_context(BE.make_graph(), None, 3).__enter__(),
        "make_pool",
    ),
    "region": (lambda: dg.region("n"), "keywords: @dg.region"),
    "no_graph": (lambda: dg.no_graph("n"), "keywords: @dg.no_graph"),
    "forward": (lambda: _decode(3), "step of a runner must be callable: 3"),
    "no forward": (lambda: _decode(None), "step of a runner must be callable: None"),
    "inputs": (lambda: _decode(inputs=None), "list of InputSlot objects, got None"),
    "one input": (lambda: _decode(inputs=SLOT), "list of InputSlot objects"),
    "variant": (lambda: _decode().run({"x": X[:2]}, variant="lora"), "variant is a mapping"),
    "inputs of a run": (lambda: _decode().run([X]), "mapping of slot names"),
    "config": (lambda: _decode(config=dg.DeviceGraphConfig()), "one phase"),
    "host_args of a context": (
        lambda: BE.capture_context(BE.make_graph(), host_args=3).__enter__(),
        "host_args must map names",
    ),
    "name of a host argument": (lambda: _capture(host_args={3: 3}), "must be strings, got 3"),
    "host argument that the step lacks": (
        lambda: _capture(host_args={"n": 3}),
        "takes no keyword argument 'n'",
    ),
    "host_args of a runner": (lambda: _decode(host_args=["n"]), "host_args must map names"),
    "host_args of a run": (
        lambda: _decode().run({"x": X[:2]}, host_args=["n"]),
        "host_args of a run must be a mapping",
    ),
    "host_args of prove": (
        lambda: _capture().prove(host_args={"n": 3}),
        "a list with one mapping per set",
    ),
    "host argument of prove": (
        lambda: _capture().prove(host_args=[{"n": 3}]),
        "unknown host argument 'n'",
    ),
    "names of a mark": (lambda: dg.region(host_args=3)(lambda n: n), "parameter names, got 3"),
    "a name of a mark": (lambda: dg.no_graph(mutates=(3,))(print), "parameter names"),
    "rules of a mark": (lambda: dg.region(reduce=[max])(lambda n: n), "names to functions, got"),
    "rule of a mark": (
        lambda: dg.region(host_args="n", derive={"m": 3})(lambda n, m: n),
        "names to functions",
    ),
    "function of a mark": (lambda: dg.no_graph(fake=3)(print), "fake of a mark must be a function"),
    "backend of a runner": (
        lambda: dg.DecodeRunner(len, [SLOT], backend=None, max_requests=2),
        "name of a backend must be a string, got None",
    ),
    "group of a runner": (lambda: _decode(group=3), "RankGroup or a process group"),
    "variants of a runner": (lambda: _decode(variants=None), "variants is a list of mappings"),
    "name in a variant": (lambda: _decode(variants=[{3: 4}]), "names must be strings"),
    "variant of a decision": (lambda: _decode().can_run(2, variant=3), "variant is a mapping"),
    "decision": (lambda: _decode().run({"x": X[:2]}, decision=3), "the result of can_run or agree"),
    "decision of a vote": (lambda: _decode().agree("yes"), "the result of can_run or agree"),
    "bound tensors": (lambda: _decode(bound=[X]), "bound must be a mapping of names"),
    "bound names": (lambda: _decode(bound={1: X}), "bound must be a mapping of names"),
    "epoch": (lambda: _decode(weights_epoch=3), "weights_epoch must be a function: 3"),
    "switch": (lambda: _decode(idle_dummy=3), "idle_dummy: expected true or false, got 3"),
    "name of a runner": (
        lambda: _decode(name=3),
        "name of a runner must be a non-empty string, got 3",
    ),
    "pad of a slot": (
        lambda: dg.InputSlot("x", "tokens", torch.int64, pad=dg.Pad.fill("a")),
        "must pad with a number, got 'a'",
    ),
    "pad of a host slot": (lambda: HostSlot("tokens", pad=0), "needs pad=Pad.zero"),
    "budget of a pool": (lambda: BE.make_pool().limit("x"), "must be a number, got 'x'"),
    "specs of buffers": (lambda: dg.StaticBuffers({"x": 3}, device="cpu"), "specs must map"),
    "parser": (lambda: dg.add_cli_args(None), "expected an argparse parser, got None"),
    "parsed arguments": (
        lambda: dg.DeviceGraphConfig.from_args(["--disable-cuda-graph"]),
        "expected parsed arguments",
    ),
    "phase of a configuration": (lambda: dg.DeviceGraphConfig(decode=3), "must be one phase"),
    "backend of a configuration": (lambda: dg.DeviceGraphConfig().for_backend(3), "be a string"),
}


@pytest.mark.parametrize("name", KINDS)
def test_argument_of_another_kind_is_a_type_error_of_devgraph(name: str):
    call, told = KINDS[name]
    with pytest.raises(TypeError, match=told.replace("(", r"\(")) as caught:
        call()
    assert isinstance(caught.value, dg.DeviceGraphError)


VALUES: dict[str, tuple[Callable[[], Any], str]] = {
    "policy": (lambda: _capture(policy=None), "no policy None. Known: breakable"),
    "given twice": (
        lambda: _capture(lambda x, n: x + n, kwargs={"n": 1}, host_args={"n": 1}),
        "n: given both in kwargs and in host_args",
    ),
    "budget": (lambda: BE.make_pool().limit(-1), "at least 0, got -1"),
    "cases": (lambda: _capture().prove(cases=1.5), "cases must be an int, got 1.5"),
    "capacity": (
        lambda: dg.DecodeRunner(len, [SLOT], backend="cpu", max_requests=10**12),
        "about 31250000000 decode buckets by default; list the buckets",
    ),
    "shape of a view": (
        lambda: dg.StaticBuffers({"x": ((2,), torch.float32)}, device="cpu").view("x", (-1,)),
        "cannot have the shape",
    ),
    "compiler of another policy": (lambda: _capture(compiler="gcc"), "no compiler 'gcc'. Known"),
    "kind of a compiler": (lambda: _capture(policy="piecewise", compiler=3), "no compiler 3"),
    "width of a decision": (
        lambda: _decode().can_run(2, variant={"width": 0}),
        "width must be a positive int",
    ),
    "cases of a runner": (lambda: _decode().prove(cases=-1), "cases must be at least 0, got -1"),
}


@pytest.mark.parametrize("name", VALUES)
def test_value_that_cannot_work_is_a_value_error_of_devgraph(name: str):
    call, told = VALUES[name]
    with pytest.raises(ValueError, match=told) as caught:
        call()
    assert isinstance(caught.value, dg.DeviceGraphError)


def test_a_number_has_its_noun_in_singular_or_plural_and_a_list_no_name_twice():
    said = [counted(number, "entry") for number in (0, 1, 2, None)]
    assert said == ["0 entries", "1 entry", "2 entries", "? entries"]
    assert did_you_mean("row", ["rows", "x", "x"]) == "Known: rows, x. Did you mean 'rows'?"
    assert did_you_mean("kv", ["kv_len"]) == "Known: kv_len. Did you mean 'kv_len'?"
    assert did_you_mean("k", ["kv_len"]) == "Known: kv_len."


def test_a_message_tells_of_a_tensor_what_it_is_and_none_of_its_data():
    class Cache:
        def __repr__(self) -> str:
            return f"Cache({torch.ones(1000)})"

    cases = [torch.ones(1000), [torch.ones(9), Cache()], {"k": torch.ones(2, 3)}, list(range(999))]
    said = [brief(case) for case in cases]
    assert said[0] == "<Tensor (1000,) torch.float32 on cpu>"
    assert said[1] == "[<Tensor (9,) torch.float32 on cpu>, <Cache>]"
    assert said[2] == "{'k': <Tensor (2, 3) torch.float32 on cpu>}"
    assert len(said[3]) < 40 and brief("x" * 999).endswith("x'") and len(brief("x" * 999)) < 130


BULK = torch.full((3000,), 7.25)
NO_DATA: dict[str, Callable[[], Any]] = {
    "bound": lambda: _decode(bound=[BULK]),
    "inputs": lambda: _decode(inputs=BULK),
    "variants": lambda: _decode(variants=BULK),
    "a variant": lambda: _decode(variants=[{}, {"lora": BULK}]).can_run(1, 1, {"lorra": BULK}),
    "host arguments": lambda: _capture(host_args=BULK),
    "a host argument": lambda: _capture(lambda x, n: x, host_args={"n": 3}).replay(n=BULK),
    "pool": lambda: _capture(pool=BULK),
    "warmup": lambda: _capture(warmup=BULK),
    "a new input": lambda: _capture().replay(BULK),
    "pad": lambda: dg.InputSlot("x", ("tokens",), torch.float32, pad=BULK),
    "output": lambda: _decode(outputs=BULK),
    "configuration": lambda: _decode(config={"max_bs": BULK}),
}


@pytest.mark.parametrize("case", NO_DATA)
def test_no_error_prints_the_data_of_a_tensor(case: str) -> None:
    with pytest.raises(dg.DeviceGraphError) as caught:
        NO_DATA[case]()
    assert "7.25" not in str(caught.value) and len(str(caught.value)) < 600
