"""The public contract: every name, called in the way the documents show it."""

from __future__ import annotations

import argparse
import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import devgraph as dg
from tests.support.suite import printed_by

PACKAGE = Path(dg.__file__).parent
ROOMS = ("cuda", "npu", "rocm")
ENGINES = ("vllm", "sglang")  # their interfaces have the names that they have
VENDOR = re.compile(r"(?<![a-z])(cuda|npu|hip|rocm|ascend|nvidia|amd)(?![a-z])", re.IGNORECASE)


def test_every_public_name_exists_and_is_documented():
    for name in dg.__all__:
        value = getattr(dg, name)
        if name != "__version__":
            assert inspect.getdoc(value), f"{name} has no docstring"
    assert set(dg.__all__) <= set(dir(dg))
    with pytest.raises(AttributeError, match="has no attribute 'nonsense'"):
        _ = dg.nonsense


def test_importing_devgraph_loads_no_vendor_module_and_no_torch():
    code = (
        "import sys, devgraph\n"
        "rooms = [m for m in sys.modules if m.startswith('devgraph.') and m.split('.')[1] in "
        "('cpu', 'cuda', 'npu', 'rocm')]\n"
        "others = {'torch', 'torch_npu', 'cuda', 'transformers', 'rich'} & set(sys.modules)\n"
        "print(rooms, sorted(others))\n"
    )
    assert printed_by(code) == "[] []\n"


def test_using_one_backend_loads_no_other_room():
    code = (
        "import sys, devgraph as dg\n"
        "dg.get_backend('cpu')\n"
        "print([m for m in ('torch_npu', 'devgraph.cuda', 'devgraph.npu', 'devgraph.rocm')\n"
        "       if m in sys.modules])\n"
    )
    assert printed_by(code) == "[]\n"


def test_signatures_of_the_contract():
    def names(function: Any) -> list[str]:
        return list(inspect.signature(function).parameters)

    backend = dg.Backend
    assert names(backend.make_graph) == ["self", "pool"]
    context = inspect.signature(backend.capture_context)
    assert list(context.parameters)[1:5] == ["graph", "stream", "pool", "capture_error_mode"]
    assert context.parameters["capture_error_mode"].default == "thread_local"
    capture = inspect.signature(dg.capture).parameters
    first = "fn args kwargs policy backend host_args warmup pool compiler".split()
    assert list(capture)[: len(first)] == first
    defaults = {name: capture[name].default for name in first[2:]}
    assert defaults == {
        "kwargs": None,
        "policy": "full",
        "backend": "auto",
        "host_args": None,
        "warmup": 2,
        "pool": None,
        "compiler": None,
    }
    prove = inspect.signature(dg.Captured.prove).parameters
    assert (prove["cases"].default, prove["host_args"].default) == (3, None)


def test_runners_are_used_as_documented():
    be = dg.get_backend("cpu")
    cfg = dg.DeviceGraphConfig.from_json('{"decode": "full", "prefill": "breakable"}')
    pool = be.make_pool()
    table = torch.randn(32, 8)

    def forward(batch: Any) -> Any:
        rows = table[batch.input_ids] * (batch.slot_mapping >= 0)[:, None]
        return {"hidden": rows, "used": head(rows, kv_len=batch.host.kv_len)}

    @dg.region(host_args=("kv_len",))
    def head(rows: Any, *, kv_len: int) -> Any:
        return rows[:, :kv_len].sum(1)

    decode = dg.DecodeRunner(
        forward,
        inputs=[
            dg.InputSlot("input_ids", ("tokens",), torch.int64, pad=dg.Pad.zero()),
            dg.InputSlot("slot_mapping", ("tokens",), torch.int64, pad=dg.Pad.fill(-1)),
        ],
        outputs={"hidden": dg.OutputSlot(rows="tokens"), "used": dg.OutputSlot(rows="tokens")},
        variants=[{}, {"lora": True}, {"width": 4}],
        host_args={"kv_len": 1},
        config=cfg.decode,
        backend=be,
        pool=pool,
        group=None,
        max_requests=8,
    )
    decode.capture()
    d = decode.can_run(requests=3, tokens=3, variant={})
    assert (d.ok, d.bucket, d.reason) == (True, 4, "graph")
    assert d.key is not None
    d = decode.agree(d)
    ids = torch.tensor([1, 2, 3])
    inputs = {"input_ids": ids, "slot_mapping": torch.tensor([4, -1, 6])}
    out = decode.run(inputs, host_args={"kv_len": 7}, variant={}, decision=None)
    want = table[ids] * torch.tensor([[1.0], [0.0], [1.0]])
    assert torch.equal(out["hidden"], want)
    assert torch.equal(out["used"], want[:, :7].sum(1))
    assert decode.run(None, decision=d) is None
    wide = {name: tensor.repeat_interleave(4) for name, tensor in inputs.items()}
    decode.run(wide, host_args={"kv_len": 2}, variant={"width": 4})
    assert decode.run(inputs, host_args={"kv_len": 2}, variant={"lora": True}, clone=True)
    assert decode.stats().eager == {}
    assert {str(reason.value) for reason in dg.Reason} >= {"graph", "over_largest_bucket"}
    assert decode.plan().buckets
    assert "decode" in decode.explain()
    assert decode.prove().ok
    decode.invalidate("weights")
    decode.suspend()
    decode.resume()
    decode.capture()

    def body(batch: Any) -> Any:
        return table[batch.input_ids]

    prefill = dg.PrefillRunner(
        body,
        inputs=[
            dg.InputSlot("input_ids", ("tokens",), torch.int64, pad=dg.Pad.zero()),
            dg.InputSlot("starts", ("requests+1",), torch.int64, pad=dg.Pad.last()),
        ],
        tail=lambda hidden, batch: hidden[batch.starts[1:] - 1],
        config=cfg.prefill,
        backend=be,
        pool=pool,
        max_tokens=16,
        max_requests=4,
    )
    prefill.capture()
    logits = prefill.run({"input_ids": torch.arange(5), "starts": torch.tensor([0, 2, 5])})
    assert torch.equal(logits, table[[1, 4]])
    prefill.close()
    decode.close()


def test_mode_configuration_goes_through_flags_and_json():
    parser = argparse.ArgumentParser()
    dg.add_cli_args(parser)
    flags = ["--device-graph-mode", '{"decode": "breakable", "backends": {"cpu": {}}}']
    cfg = dg.DeviceGraphConfig.from_args(parser.parse_args(flags))
    assert (cfg.decode.policy, cfg.prefill.policy) == ("breakable", "breakable")
    assert isinstance(cfg.decode, dg.PhaseConfig)
    assert dg.DeviceGraphConfig.from_json(cfg.to_json()) == cfg
    assert cfg.for_backend("cpu").decode.policy == "breakable"


def test_configuration_is_resolved_for_an_engine_and_for_a_cluster():
    cfg = dg.DeviceGraphConfig()
    facts = dg.EngineFacts(weight_offload=True).on_backend(dg.get_backend("cpu"))
    assert dg.resolve(cfg, facts).effective.decode.policy == "disabled"
    with pytest.raises(dg.ConfigError, match="weights that move"):
        dg.resolve(dg.DeviceGraphConfig.from_json('{"decode": "full"}'), facts)
    (group,) = dg.plan_cluster(cfg, {"groups": [{"name": "all", "backend": "npu"}]})
    assert group.resolution.effective.prefill.policy == "full"


# Words.


def _sources() -> Iterator[Path]:
    for path in sorted(PACKAGE.rglob("*.py")):
        room, *rest = path.relative_to(PACKAGE).with_suffix("").parts
        if room not in ROOMS and not set(rest).intersection(ENGINES):
            yield path


def _identifiers(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr


def test_no_identifier_outside_the_vendors_rooms_names_a_vendor():
    found = {
        f"{path.relative_to(PACKAGE)}: {name}"
        for path in _sources()
        for name in _identifiers(ast.parse(path.read_text(encoding="utf-8")))
        if VENDOR.search(re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name))
    }
    assert found == set()


def test_runners_and_the_contract_do_not_mention_a_vendor_at_all():
    allowed = {"registry.py", "older_flags.py"}  # names to register by, and names that others gave
    files = [*(PACKAGE / "runners").glob("*.py"), *(PACKAGE / "api").rglob("*.py")]
    assert len(files) > 50
    found = [
        f"{path.relative_to(PACKAGE)}:{number}: {line.strip()}"
        for path in files
        if path.name not in allowed
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if re.search(r"(?<![a-z])(cuda|npu|hip|rocm)(?![a-z])", line, re.IGNORECASE)
    ]
    assert found == []


def test_device_namespaces_are_spelt_out_in_vendor_rooms_only():
    found = [
        f"{path.relative_to(PACKAGE)}:{node.lineno}: torch.{node.attr}"
        for path in _sources()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute)
        and node.attr in ("cuda", "npu", "xpu")
        and isinstance(node.value, ast.Name)
        and node.value.id == "torch"
    ]
    assert found == []


def test_names_of_the_contract_are_names_of_its_package_too():
    import devgraph.api

    names = set(devgraph.api.__all__)
    assert {"DeviceGraph", "Pool", "get_backend", "backends", "region"} <= names <= set(dg.__all__)
    for name in names:
        assert getattr(devgraph.api, name) is getattr(dg, name)
    with pytest.raises(AttributeError, match="'devgraph.api' has no attribute 'nonsense'"):
        _ = devgraph.api.nonsense


def test_unknown_name_of_the_package_carries_what_a_traceback_suggests_from():
    with pytest.raises(AttributeError) as caught:
        _ = dg.DecodRunner
    assert caught.value.obj is dg
    assert caught.value.name == "DecodRunner"
