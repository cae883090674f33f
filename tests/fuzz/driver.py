"""The cases of the fuzzers, by seed: ``python -m tests.fuzz.driver MINUTES [--kind K] [--seed N]``.

``--backend cuda`` takes those that run on a device.

A case returns what it counted and raises ``Mismatch`` for anything that is neither right nor a
typed refusal. Those of the simulated Ascend driver run where torch_npu is loaded, in tests only.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import itertools
import linecache
import random
import resource
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import attrs
import torch
import torch._dynamo
from torch._subclasses import FakeTensorMode
from torch.utils import _pytree as pytree

import devgraph as dg
from devgraph.api.policy.job import UpdateBudget
from devgraph.cpu.metadata import Layout, Metadata
from tests.fuzz.graphed import GraphedPair
from tests.fuzz.runners import SCRATCH, RandomRunner
from tests.fuzz.state import StatePair
from tests.fuzz.steps import (
    IN_PLACE,
    KEPT,
    KINDS,
    MARKED,
    PLAIN,
    SHARING,
    TRASH,
    TYPED,
    WIDTH,
    Drawn,
    Program,
    fill,
    make_program,
)
from tests.sim.hip import unavailable_reason
from tests.support.interrupts import OPERATIONS, Bench, interrupted

__all__ = [
    "ASCEND_FAULTS",
    "CASES",
    "Mismatch",
    "ascend_case",
    "ascend_steps",
    "every_fault",
    "graphed_case",
    "hip_case",
    "run",
]


class Mismatch(AssertionError):
    """Something was wrong, or raised what it should not."""


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _copies(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor.clone() for tensor in tensors]


def _sharing(tensors: list[torch.Tensor]) -> list[int]:
    """Return, for each tensor, the first one whose memory it shares, -1 without elements."""
    starts = [t.untyped_storage().data_ptr() if t.numel() else 0 for t in tensors]
    return [starts.index(start) if start else -1 for start in starts]


def _require_equal(got: list[torch.Tensor], want: list[torch.Tensor], what: str) -> None:
    for index, (one, other) in enumerate(zip(got, want, strict=True)):
        if (one.shape, one.dtype) != (other.shape, other.dtype) or not _same(one, other):
            raise Mismatch(f"{what} {index} is {one}, eagerly {other}")


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are the same bit for bit; all that is no number counts as one."""
    a, b = (t.detach().cpu().resolve_conj().resolve_neg().contiguous() for t in (one, other))
    if a.dtype.is_complex:
        a, b = torch.view_as_real(a), torch.view_as_real(b)
    if a.dtype is torch.bool:  # whose bytes may be any that a view wrote
        return torch.equal(a.view(torch.uint8) != 0, b.view(torch.uint8) != 0)
    if a.dtype.is_floating_point:
        numbers = ~torch.logical_and(a.float().isnan(), b.float().isnan())
        a, b = a[numbers], b[numbers]
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


# Steps.


_EVERYTHING = Drawn(
    plain={**PLAIN, **TYPED, **IN_PLACE}, marked={**MARKED, **SHARING}, kinds=[*KINDS]
)


def compiled_case(seed: int) -> Counter[str]:
    """A random step that can be compiled, also under piecewise."""
    return step_case(seed, drawn=Drawn(), policies=("full", "breakable", "piecewise"))


def step_case(
    seed: int,
    backend: Any = None,
    *,
    drawn: Drawn = _EVERYTHING,
    policies: Sequence[str] = ("full", "breakable"),
) -> Counter[str]:
    """A random step under ``policies``, all in one pool, against eager."""
    rng, counts = _seeded(seed), Counter[str]()
    program = make_program(rng, drawn)
    pool = (backend or dg.get_backend("cpu")).make_pool()
    if rng.choice([None, None, 0]) == 0:
        pool.limit(0)
    captures = []
    for policy in rng.sample(policies, len(policies)):
        TRASH[:] = [_dropped(pool)]
        captured = _captured(program, pool, policy, rng, counts)
        if captured is not None:
            captures.append(captured)
    for _ in range(rng.randint(4, 8) if captures else 0):
        others = [(c, _own(c, program)) for c in captures]
        others = [(c, own, _copies(own)) for c, own in others]
        captured = rng.choice(captures)
        _replay_as_eager(program, captured, program.host(), counts)
        for other, own, before in others:
            if other is not captured:
                _require_equal(own, before, "an output of another capture of the pool")
    rng.shuffle(captures)
    for captured in captures:
        captured.close()
    for left in (TRASH, KEPT):
        left.clear()
    return counts


_BEYOND_HIP = ("expand", "kept(", "spread(", "t_()", "unsqueeze_", "expanded", "@ WEIGHT")
"""What the fake cannot show (``BEYOND_THE_FAKE`` in tests/rocm/test_conformance.py); a vector times
a matrix changes its layout in place."""

_BEYOND_DEVICES = ("float8", "kept(")
"""Missing kernels, and results at an address of their own each time."""

_BEYOND_ASCEND = ("float8", "complex", "conj", "imag", "rotated(", "kept(")
"""What the simulated driver has no kernels for, and results at an address of their own each time,
which no update can bring to the first one."""


def _without(drawn: Drawn, lacking: Sequence[str], **changes: Any) -> Drawn:
    def kept(templates: Mapping[str, int]) -> dict[str, int]:
        return {k: n for k, n in templates.items() if not any(each in k for each in lacking)}

    kinds = [kind for kind in drawn.kinds if kind not in lacking]
    plain, marked = kept(drawn.plain), kept(drawn.marked)
    return attrs.evolve(drawn, plain=plain, marked=marked, kinds=kinds, **changes)


def _device_steps(seed: int, backend: Any, lacking: Sequence[str]) -> Counter[str]:
    """``step_case`` on a stream of the caller's own, with work that forks to another one."""
    space = backend.namespace
    taken = [backend.capture_stream, getattr(backend, "loop_stream", None)]
    made = (space.Stream() for _ in itertools.count())
    here, side = itertools.islice((stream for stream in made if stream not in taken), 2)

    def beside(work: Callable[[], Any]) -> Any:
        current = space.current_stream()
        side.wait_stream(current)
        with space.stream(side):
            done = work()
        current.wait_stream(side)
        return done

    kind = backend.device.type
    drawn = _without(_EVERYTHING, lacking, device=kind, beside=beside)
    with space.stream(here):
        return step_case(seed, backend, drawn=drawn)


def hip_steps(seed: int) -> Counter[str]:
    """A random step over the fake HIP library."""
    from tests.support.fake_hip import on_fake

    with on_fake() as backend:
        return _device_steps(seed, backend, _BEYOND_HIP)


def ascend_steps(seed: int, backend: Any, driver: Any) -> Counter[str]:
    """A random step over the simulated Ascend driver, whose updates and replays may come late."""
    driver.set(update_delay_ms=seed % 3, replay_delay_ms=seed // 3 % 2)
    return _device_steps(seed, backend, _BEYOND_ASCEND)


def _dropped(pool: dg.Pool) -> dg.Captured:
    """Return a capture that nobody closes."""
    x = torch.ones(WIDTH, device=pool.backend.device)
    return dg.capture(lambda x: x * 3 + 1, x, backend=pool.backend, pool=pool)


def _captured(
    program: Program, pool: dg.Pool, policy: str, rng: random.Random, counts: Counter[str]
) -> dg.Captured | None:
    before, host = _copies(program.inputs), program.host()
    budget = UpdateBudget(misses=rng.choice([0, 1, 8]), copies=rng.choice([0, 1, 4]))
    try:
        captured = dg.capture(
            program.step,
            *program.inputs,
            policy=policy,
            backend=pool.backend,
            pool=pool,
            host_args=host,
            budget=budget,
        )
    except Exception as error:
        _require_equal(program.inputs, before, "after the capture, input")
        counts[_allowed(error, program, host, policy)] += 1
        return None
    counts["captured"] += 1
    if policy == "full" and program.needs_breaks:
        raise Mismatch("a function that can never be captured was captured")
    _require_equal(program.inputs, before, "after the capture, input")
    return captured


def _allowed(error: Exception, program: Program, host: dict[str, Any], what: str) -> str:
    """Return how to count ``error``: a refusal, or what the step itself raises."""
    if isinstance(error, dg.DeviceGraphError):
        return f"refused: {what}, {type(error).__name__}"
    try:
        program.step(*program.inputs, **host)
    except type(error):
        return f"raises as eagerly: {what}"
    raise error


def _own(captured: dg.Captured, program: Program) -> list[torch.Tensor]:
    """Return the outputs that no step may write but this one."""
    shared = {tensor.untyped_storage().data_ptr() for tensor in program.memory}
    shared.update(t.untyped_storage().data_ptr() for t in KEPT)  # each step leaves its own
    outputs = _tensors(captured.outputs)
    return [o for o in outputs if o.untyped_storage().data_ptr() not in shared]


def _replay_as_eager(
    program: Program, captured: dg.Captured, host: dict[str, Any], counts: Counter[str]
) -> None:
    memory = program.memory
    for tensor in memory:
        fill(tensor)
    start = _copies(memory)
    # New data for an argument is what is there before the step.
    given = {}
    if torch.rand(()) < 0.3:
        given["x0"] = torch.empty_like(program.inputs[0])
        fill(given["x0"])
    passed = _copies(given.values())  # a replay writes back what the step writes
    try:
        outputs = captured.replay(**given, **host)
    except Exception as error:
        counts[_allowed(error, program, host, "replay")] += 1
        if isinstance(error, dg.UpdateTopologyError):
            _require_equal(memory, start, "after a refused replay, input")
        return
    got = _tensors(outputs)
    sharing, values, written = _sharing([*memory, *got]), _copies(got), _copies(memory)
    for tensor, content in zip(memory, start, strict=True):
        tensor.copy_(content)
    for data in passed:
        program.inputs[0].copy_(data)
    wanted = program.step(*program.inputs, **host)
    want = _tensors(wanted)
    where = f"{captured.policy} with {host}"
    if pytree.tree_structure(outputs) != pytree.tree_structure(wanted):
        raise Mismatch(f"{where}: another structure")
    _require_equal(values, want, f"{where}: output")
    _require_equal(written, memory, f"{where}: input or state")
    _require_equal([*given.values()], program.inputs[: len(given)], f"{where}: new input")
    if sharing != _sharing([*memory, *want]):
        raise Mismatch(f"{where}: {sharing} share memory, eagerly {_sharing([*memory, *want])}")
    counts["replays"] += 1


# Runners.


def runner_case(seed: int) -> Counter[str]:
    """Two random runners in one pool, used in turns, against their steps on the real batch.

    They may share what they are given and return.
    """
    rng, counts = _seeded(seed), Counter[str]()
    backend = dg.get_backend("cpu")
    pool = backend.make_pool()
    runners: list[RandomRunner] = []
    while len(runners) < 2:
        share = runners[0].runner if runners and rng.random() < 0.5 else None
        try:
            policy = rng.choice(["full", "breakable"])
            runners.append(RandomRunner(rng, backend, pool, policy, share))
        except dg.ConfigError:  # the larger one has to come first
            counts["refused: share"] += 1
    for each in runners:
        each.runner.capture()
    for _ in range(rng.randint(8, 16)):
        each = rng.choice(runners)
        action = rng.choices(["run", "invalidate", "suspend", "resume", "idle"], [12, 1, 1, 1, 2])[
            0
        ]
        if action == "invalidate":
            each.runner.invalidate("weights")
            each.runner.capture()
        elif action != "run":
            getattr(each.runner, action)()
        else:
            _run_as_eager(each, rng, counts)
    for each in runners:
        for reason, number in each.runner.stats().eager.items():
            counts[f"eager: {reason}"] += number
        each.runner.close()
    return counts


def _run_as_eager(each: RandomRunner, rng: random.Random, counts: Counter[str]) -> None:
    inputs, host, variant = each.batch()
    given, start = _copies(inputs.values()), each.cache.clone()
    got = each.runner.run(inputs, host_args=host, variant=variant, clone=rng.random() < 0.5)
    values, written = _copies(_tensors(got)), each.cache.clone()
    each.cache.copy_(start)
    want = each.eager(inputs, host, variant)
    where = f"{each.about} with {host}, {variant}, {len(inputs['ids'])} tokens"
    _require_equal(list(inputs.values()), given, f"{where}: input")
    for one, other in zip(values, _tensors(want), strict=True):
        if one.shape != other.shape or not torch.allclose(one, other, rtol=1e-5, atol=1e-5):
            raise Mismatch(f"{where}: {one}, eagerly {other}")
    _require_equal([written[:SCRATCH]], [each.cache[:SCRATCH]], f"{where}: the cache")
    counts["runs"] += 1


# Interrupts.

_bench: list[Bench] = []


def interrupt_case(seed: int) -> Counter[str]:
    """A KeyboardInterrupt at a random place of a random operation."""
    rng, counts = _seeded(seed), Counter[str]()
    if not _bench:
        _bench.extend(map(Bench, (None, 0, 20_000)))
    bench = rng.choice(_bench)
    name = rng.choice(list(OPERATIONS))
    place, n = int(10 ** rng.uniform(0, 3.6)), rng.randint(1, 9)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what a destructor was interrupted in
        if interrupted(lambda: OPERATIONS[name][0](bench, n), place):
            counts[f"interrupted: {name}"] += 1
    bench.check(n)
    return counts


# Faults of drivers.


def hip_case(seed: int) -> Counter[str]:
    """A call of the fake HIP library fails, and all after it is right or refused."""
    from tests.support.fake_hip import on_fake

    with on_fake() as backend:
        fake = backend.fake
        return _fault_case(
            1 + seed % 1000,
            backend,
            order=lambda at: fake.set(fail_call_in=at),
            left=lambda: fake.get("fail_call_in"),
        )


ASCEND_FAULTS = ("fail_stream_in", "fail_capture_in", "fail_capture_end_in", "fail_malloc_in")


def ascend_case(name: str, at: int, backend: Any, driver: Any) -> Counter[str]:
    """The simulated Ascend driver refuses a call, and all after it is right or refused."""
    return _fault_case(
        at,
        backend,
        order=lambda at: driver.set(**{name: at}),
        left=lambda: driver.settings()[name],
    )


def every_fault(case: Callable[[int], Counter[str]]) -> Counter[str]:
    """Run ``case`` with the fault at the first call, the second and so on, while there is one."""
    total, calls = Counter[str](), itertools.count(1)
    while (counts := case(next(calls)))["faults"]:
        total += counts
    return total


def _fault_case(
    at: int, backend: Any, *, order: Callable[[int], None], left: Callable[[], int]
) -> Counter[str]:
    """Capture, replay and update with a fault at call number ``at``, and then once more without.

    On a stream of the caller's own, as engines do: the default stream joins no capture.
    """
    counts, x = Counter[str](), torch.ones(4, 8, device=backend.device)
    with backend.namespace.stream(backend.namespace.Stream()):
        # Under no budget and under one that makes every launch make its executable.
        pool = backend.make_pool()
        if at % 3 == 0:
            pool.limit(0)
        program = _FaultProgram(backend, pool, x)
        order(at)
        for _ in range(2):
            with _refusals(counts):
                program.open()
            for n in (2, 3, 2, 5, 3):
                with _refusals(counts):
                    program.check(n)
        counts["faults"] += left() == 0
        order(0)
        program.close()
        program.open()
        for n in (2, 3, 2):
            program.check(n)
        program.close()
        backend.synchronize()
    return counts


@contextlib.contextmanager
def _refusals(counts: Counter[str]) -> Iterator[None]:
    try:
        yield
    except dg.DeviceGraphError:
        counts["refused"] += 1
    except RuntimeError as error:  # torch's own, with the driver's text
        if not isinstance(error, torch.OutOfMemoryError) and type(error) is not RuntimeError:
            raise
        counts["refused by torch"] += 1


@dg.region(host_args=("n",), mutates=("out",))
def _scale(x: torch.Tensor, out: torch.Tensor, *, n: int) -> None:
    torch.mul(x, float(n), out=out)


def _fault_step(x: torch.Tensor, *, n: int) -> torch.Tensor:
    out = torch.empty_like(x)
    for _ in range(2):
        _scale(x, out, n=n)
        x = out + 1
    return x


class _FaultProgram:
    """A capture under each policy, in one pool."""

    def __init__(self, backend: Any, pool: dg.Pool, x: torch.Tensor) -> None:
        self._backend, self._pool, self._x = backend, pool, x
        self._captured: dict[str, dg.Captured] = {}

    def open(self) -> None:
        for policy in ("full", "breakable"):
            if policy not in self._captured:
                self._captured[policy] = dg.capture(
                    _fault_step,
                    self._x,
                    policy=policy,
                    backend=self._backend,
                    pool=self._pool,
                    host_args={"n": 2},
                    budget=UpdateBudget(misses=100),
                )

    def check(self, n: int) -> None:
        for policy, captured in self._captured.items():
            self._x.add_(0.5)
            got = captured.replay(n=n)
            want = _fault_step(self._x, n=n)
            if not torch.equal(got.cpu(), want.cpu()):
                raise Mismatch(f"{policy} with n={n}: {got}, eagerly {want}")

    def close(self) -> None:
        for captured in self._captured.values():
            captured.close()
        self._captured.clear()


# Graphed callables.


def graphed_case(seed: int, device: str | torch.device = "cpu") -> Counter[str]:
    """Random calls of a graphed module between random mutations."""
    rng = _seeded(seed)

    def fail(text: str) -> None:
        raise Mismatch(text)

    pair = GraphedPair(rng, torch.device(device), fail)
    for _ in range(rng.randint(5, 40)):
        if rng.random() < 0.25:
            pair.mutate()
        pair.call()
    pair.close()
    return pair.counts


# State of every kind.


def state_case(seed: int, backend: str = "cpu") -> Counter[str]:
    """A random step over state that is mutated between replays."""
    rng = _seeded(seed)

    def fail(text: str) -> None:
        raise Mismatch(text)

    pair = StatePair(rng, fail, backend)
    try:
        pair.run()
    finally:
        torch.set_default_dtype(torch.float32)
        torch.use_deterministic_algorithms(False)
    return pair.counts


# The long mode.

_WARM_UP = 0.2
"""The part of the time after which memory counts: until then caches and allocators fill. Only then
is anything compiled: torch keeps up to a MiB of each function that it compiled, as long as a module
or a tensor lives that the function uses (a finalizer of its guards)."""

_SETTLE = 10
"""Seeds between collections of what is garbage in circles. Python alone waits until that is a
quarter of all objects; what then becomes free lies between what stays, and the process grows by
100 KiB a seed though what is in use does not."""


CASES: dict[str, Callable[[int], Counter[str]]] = {
    "steps": step_case,
    "piecewise": compiled_case,
    "runners": runner_case,
    "graphed": graphed_case,
    "state": state_case,
    "interrupts": interrupt_case,
    "hip": hip_case,
    "hip steps": hip_steps,
}


def _cases_on(name: str) -> dict[str, Callable[[int], Counter[str]]]:
    """Return the cases that run on the device of a backend."""
    backend = dg.get_backend(name)
    return {
        "steps": lambda seed: _device_steps(seed, backend, _BEYOND_DEVICES),
        "graphed": lambda seed: graphed_case(seed, backend.device),
        "state": lambda seed: state_case(seed, name),
    }


def _seeded(seed: int) -> random.Random:
    torch.manual_seed(seed)
    return random.Random(seed)


def run(kind: str, seed: int) -> Counter[str]:
    """Run one case; what it raises names the seed, and of a step the source.

    Raises:
        Mismatch: it was wrong, or raised what it should not.
    """
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Casting complex values to real")
            return CASES[kind](seed)
    except Exception as error:
        drawn = {"steps": _EVERYTHING, "piecewise": Drawn()}.get(kind)
        source = make_program(_seeded(seed), drawn).source if drawn else ""
        raise Mismatch(f"{kind}, seed {seed}: {type(error).__name__}: {error}\n{source}") from error


def main() -> int:
    """Run cases until the time is over; print figures, and each mismatch as it comes."""
    parser = argparse.ArgumentParser(description="random work against eager")
    parser.add_argument("minutes", type=float)
    parser.add_argument("--kind", choices=CASES, action="append", help="default: all of them")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="the first one")
    parser.add_argument("--backend", default="cpu")
    arguments = parser.parse_args()
    if arguments.backend != "cpu":
        CASES.clear()
        CASES.update(_cases_on(arguments.backend))
    possible = [kind for kind in CASES if "hip" not in kind or unavailable_reason() is None]
    kinds = arguments.kind or possible
    counts, wrong, cases = Counter[str](), 0, 0
    started, warm, settled, alive = time.monotonic(), 0, 0, Counter[str]()
    for done, seed in enumerate(itertools.count(arguments.seed)):
        over = (time.monotonic() - started) / (60 * arguments.minutes)
        if over > _WARM_UP and not warm:
            warm, settled, alive = done, _resident(), _alive()
            _bench.clear()  # complete ones would make nothing on demand under interrupts
            kinds = [kind for kind in kinds if kind != "piecewise"] or kinds
        if over > 1:
            break
        if done % _SETTLE == 0:
            _collect()
        for kind in kinds:
            cases += 1
            try:
                counts += run(kind, seed)
            except Mismatch as error:
                wrong += 1
                print(error, flush=True)
    for name, number in sorted(counts.items()):
        print(f"{number:9} {name}")
    now = _resident()
    a_seed = (now - settled) / 1024 / max(done - warm, 1)
    print(f"{cases} cases, {wrong} mismatches, {now >> 20} MiB, ", end="")
    print(f"{(now - settled) >> 20} MiB more than after {warm} seeds ({a_seed:.0f} KiB a seed)")
    more = _alive() - alive
    listed = ", ".join(f"{number} {kind}" for kind, number in more.items())
    print(
        f"{alive.total()} objects of devgraph after {warm} seeds, since then {listed or 'no'} more"
    )
    # A new operation or key is remembered once; a leak is one in every case.
    return 1 if wrong or more.total() > max(done - warm, 100) else 0


def _alive() -> Counter[str]:
    """Return how many objects of each class of devgraph there are, with complete benches.

    A bench that is not complete has parts still to make, which are no leak.
    """
    for bench in _bench:
        bench.complete()
    _collect()
    kinds = Counter(map(type, gc.get_objects()))
    ours = {kind: n for kind, n in kinds.items() if str(kind.__module__).startswith("devgraph.")}
    ours.pop(Layout, None)  # of answers, whose number is bounded, as long as one recorder lives
    return Counter({kind.__qualname__: number for kind, number in ours.items()})


def _resident() -> int:
    """Return the bytes that this process holds when all have forgotten what they need not know."""
    torch._dynamo.reset()
    FakeTensorMode.cache_clear()
    linecache.clearcache()  # the sources of random steps
    dg.get_backend("cpu").metadata = Metadata()  # as many answers as there were questions
    _collect()
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def _collect() -> None:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


if __name__ == "__main__":
    raise SystemExit(main())
