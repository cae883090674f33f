"""What each rank does in the tests with real processes, and the prepared process they start from.

``python rank_scenarios.py`` imports everything once, reads requests as JSON lines and forks the
ranks of each: importing torch takes seconds, a fork does not. The ranks meet over a file store and
gloo. See ``test_ranks.py`` for what is expected of them.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from tensor_parallel import Engine, Model, Shape, generate, random_prompts

import devgraph as dg
from devgraph.api.registry import register
from devgraph.runners import RankGroup
from devgraph.runners import capturing as rounds
from devgraph.runners import ranks as ranks_module
from tests.support.rank_clock import Waiting
from tests.support.runner_steps import (
    IDS,
    ROWS,
    CacheStep,
    X,
    cache_inputs,
    decode_of,
    double,
    encode_alone,
    encoder_items,
    encoder_of,
    rows_of_x,
)

Scenario = Callable[[int, RankGroup], Any]

BUCKETS = [1, 2, 4, 8]


def ranked(group: RankGroup, step: Any = double, slots: Any = (X,), **options: Any) -> Any:
    options.setdefault("config", {"buckets": BUCKETS})
    return decode_of(step, slots, group=group, name="decode", **options)


def states(runner: Any) -> dict[str, str]:
    return {str(bucket.bucket): bucket.state for bucket in runner.plan().buckets}


def agree(rank: int, group: RankGroup) -> Any:
    """All are alike; then a step of different sizes, and one in which rank 3 is idle."""
    runner = ranked(group)
    with torch.device("meta"):  # votes are on the host, whatever device a program prefers
        decision = runner.agree(runner.can_run(1 + rank))
    out = runner.run({"x": rows_of_x(1 + rank)}, decision=decision)
    step = CacheStep()
    caching = ranked(group, step, (IDS, ROWS))
    idle = rank == 3
    voted = caching.agree(None if idle else caching.can_run(3))
    caching.run(None if idle else cache_inputs(3), decision=voted)
    return {
        "bucket": decision.bucket,
        "right": torch.equal(out, rows_of_x(1 + rank) * 2),
        "states": states(runner),
        "idle_steps": caching.stats().idle_steps,
        "wrote": bool(step.cache[:31].any()),
    }


def other_buckets(rank: int, group: RankGroup) -> Any:
    ranked(group, config={"buckets": [2, 8] if rank == 2 else BUCKETS})


def missing(rank: int, group: RankGroup) -> Any:
    if rank != 2:
        ranked(group)


def fail_third(rank: int, group: RankGroup) -> Any:
    """Rank 1 has no memory for its third bucket."""
    if rank == 1:
        _fail_third_capture(dg.ResourceError("no streams left"))
    runner = ranked(group)
    out = runner.run({"x": rows_of_x(2)}, decision=runner.agree(runner.can_run(2)))
    return {
        "states": states(runner),
        "right": torch.equal(out, rows_of_x(2) * 2),
        "explained": runner.explain(),
        "eager": runner.stats().eager,
    }


def break_third(rank: int, group: RankGroup) -> Any:
    """The step of rank 1 raises at its third bucket."""
    if rank == 1:
        _fail_third_capture(KeyError("layer 7"))
    ranked(group)


def _fail_third_capture(error: Exception) -> None:
    real, calls = rounds.capture, []

    def capture(step: Any, **options: Any) -> Any:
        calls.append(step)
        if len(calls) >= 3:
            raise error
        return real(step, **options)

    rounds.capture = capture  # this process is this rank's alone


def _killed_in_capture(victim: int) -> Scenario:
    def scenario(rank: int, group: RankGroup) -> Any:
        def step(batch: Any) -> torch.Tensor:
            if rank == victim and batch.tokens == 4 and dg.is_capturing():
                os.kill(os.getpid(), signal.SIGKILL)
            return batch.x * 2

        ranked(group, step)

    return scenario


def _gone_in_a_vote(how: Callable[[int], object]) -> Scenario:
    def scenario(rank: int, group: RankGroup) -> Any:
        runner = ranked(group)
        for turn in range(3):
            if rank == 1 and turn == 2:
                how(rank)
            decision = runner.agree(runner.can_run(2))
            runner.run({"x": rows_of_x(2)}, decision=decision)

    return scenario


def _stick(rank: int) -> None:
    ranks_module.time.leave(rank)  # type: ignore[attr-defined]
    time.sleep(3600)


def shared_items(rank: int, group: RankGroup) -> Any:
    """Items are shared out over the ranks, also fewer than ranks, and come back in order."""
    right, steps, rows = [], [], [0]

    def prepare(batch: Any) -> None:
        rows[0] += int((batch.item_ids >= 0).sum())

    runner = encoder_of(data_parallel=dist.group.WORLD, prepare=prepare)
    for lengths in ((9, 3, 20, 5, 8, 1, 30), (4,), ()):
        items = encoder_items(lengths)
        outputs = runner.run(items)
        alone = [encode_alone(item) for item in items]
        torch.testing.assert_close(outputs, alone, rtol=0, atol=0)
        right.append(len(outputs))
        steps.append(rows[0])
    return {"right": right, "rows": steps}


def failing_items(rank: int, group: RankGroup) -> Any:
    """Rank 1 fails in a pack of its own, then in its items, then has others; then all is well."""
    failing = [False]

    def prepare(batch: Any) -> None:
        if failing[0]:
            raise KeyError("layer 7")

    runner = encoder_of(data_parallel=dist.group.WORLD, prepare=prepare)
    items = encoder_items((9, 3, 20))
    errors = []
    for turn in ("pack", "items", "others", "none"):
        failing[0] = rank == 1 and turn == "pack"
        given = items
        if rank == 1 and turn == "items":
            given = [*items[:2], {}]
        elif rank == 1 and turn == "others":
            given = items[:2]
        try:
            outputs = runner.run(given)
        except (KeyError, dg.DeviceGraphError) as error:
            errors.append(f"{type(error).__name__}: {error}")
    alone = [encode_alone(item) for item in items]
    torch.testing.assert_close(outputs, alone, rtol=0, atol=0)
    return errors


def stuck_device(rank: int, group: RankGroup) -> Any:
    """The device of rank 0 waits for rank 1, which has left the step."""
    if rank == 1:
        os._exit(0)
    group.wait(lambda: False, "step")


@dg.no_graph(mutates=("out",))
def _total(x: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(x)
    dist.all_reduce(out)


def _summing(batch: Any) -> torch.Tensor:
    out = torch.empty_like(batch.x)
    _total(batch.x, out)
    return out + 0


def capture_while_serving(rank: int, group: RankGroup) -> Any:
    """Captures between steps that hold a collective; rank 1 is busy at first."""
    config = {"policy": "breakable", "buckets": [1, 2], "capture": "background"}
    runner = ranked(group, _summing, config=config, max_requests=2)
    captured, sums, x = [], [], torch.full((1, 3), rank + 1.0)
    for turn in range(4):
        out = runner.run({"x": x}, decision=runner.agree(runner.can_run(1)))
        sums.append(out[0, 0].item())
        captured.append(runner.idle(ready=(rank, turn) != (1, 0)))
    return {"captured": captured, "sums": sums, "eager": runner.stats().eager}


def killed_while_serving(rank: int, group: RankGroup) -> Any:
    runner = ranked(group, config={"buckets": BUCKETS, "capture": "background"})
    runner.idle()
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    runner.idle()


def meet_in_a_collective(rank: int, group: RankGroup) -> Any:
    """An all-reduce of the host between segments; rank 1 has no requests and takes part."""
    runner = ranked(group, _summing, config={"policy": "breakable", "buckets": [2]}, max_requests=2)
    busy = rank != 1
    decision = runner.agree(runner.can_run(1) if busy else None)
    out = runner.run({"x": torch.full((1, 3), rank + 1.0)} if busy else None, decision=decision)
    return None if out is None else out[0, 0].item()


def prove_together(rank: int, group: RankGroup) -> Any:
    """Proofs of a step with an all-reduce, before and after rank 1 changes a factor."""
    factor = [1.0]

    def step(batch: Any) -> torch.Tensor:
        out = torch.empty_like(batch.x)
        _total(batch.x * factor[0], out)
        return out + rank

    config = {"policy": "breakable", "buckets": [2, 4]}
    runner = ranked(group, step, config=config, max_requests=4)
    right = runner.prove(cases=3)
    factor[0] += rank
    wrong = runner.prove()
    return {"right": str(right), "cases": right.cases, "causes": wrong.causes}


def prove_alone(rank: int, group: RankGroup) -> Any:
    runner = ranked(group, _summing, config={"policy": "breakable", "buckets": [2]}, max_requests=2)
    if rank == 0:
        runner.prove()


def pairs(rank: int, world: RankGroup) -> Any:
    """Two groups of two ranks with the same runner names, which do not meet each other."""
    both = [dist.new_group([0, 1], backend="gloo"), dist.new_group([2, 3], backend="gloo")]
    group = RankGroup.from_process_group(both[rank // 2], timeout_s=world.timeout_s)
    runner = ranked(group, config={"buckets": [2, 8] if rank < 2 else [4, 8]})
    decision = runner.agree(runner.can_run(2 + rank // 2))
    out = runner.run({"x": rows_of_x(2 + rank // 2)}, decision=decision)
    return [group.rank, group.size, decision.bucket, len(out)]


def full_collective(rank: int, group: RankGroup) -> Any:
    """An all-reduce of the host where one graph would have to hold it."""

    def step(batch: Any) -> torch.Tensor:
        out = batch.x * 2
        dist.all_reduce(out)
        return out

    ranked(group, step, config={"policy": "full", "buckets": [2]}, max_requests=2)


MODE = """{"decode": "full", "prefill": "breakable",
           "backends": {"npu": {"prefill": "full"}, "second": {"prefill": "full"}}}"""


def mixed(rank: int, world: RankGroup, backend: str) -> Any:
    """One mode string, two groups of two ranks on different backends, the same tokens."""
    if backend == "second":
        register("second", _second_backend, replace=True)
    elif backend == "npu":
        from tests.sim.ascend import activate

        activate()
    group = RankGroup(
        dist.PrefixStore(f"group{rank // 2}", world._store),
        rank % 2,
        size=2,
        timeout_s=world.timeout_s,
    )
    shape = Shape(layers=2, heads=4, kv_heads=2, head=8, inner=32, vocab=64, length=24, tokens=64)
    device = dg.get_backend(backend)
    engine = Engine(
        Model(shape, device.device), dg.DeviceGraphConfig.from_json(MODE), device, group
    )
    engine.capture()
    tokens = generate(
        random_prompts(shape), 8, lambda phase, *rest: engine.step(getattr(engine, phase), *rest)
    )
    graphs = {p: getattr(engine, p).stats().graph_steps for p in ("prefill", "decode")}
    policies = [engine.prefill.effective_policy, engine.decode.effective_policy]
    engine.close()
    return {"backend": device.name, "policies": policies, "tokens": tokens, "graphs": graphs}


def _second_backend() -> Any:
    kind = type(dg.get_backend("cpu"))
    return type("Second", (kind,), {"name": "second"})()


def one_group_of_two_vendors(rank: int, group: RankGroup) -> Any:
    register("second", _second_backend, replace=True)
    ranked(group, backend="second" if rank == 3 else "cpu")


SCENARIOS: dict[str, Scenario] = {
    "agree": agree,
    "other_buckets": other_buckets,
    "missing": missing,
    "fail_third": fail_third,
    "break_third": break_third,
    "killed_last": _killed_in_capture(3),
    "killed_first": _killed_in_capture(0),
    "exit_before_vote": _gone_in_a_vote(lambda rank: os._exit(0)),
    "stuck_before_vote": _gone_in_a_vote(_stick),
    "stuck_device": stuck_device,
    "shared_items": shared_items,
    "failing_items": failing_items,
    "capture_while_serving": capture_while_serving,
    "killed_while_serving": killed_while_serving,
    "meet_in_a_collective": meet_in_a_collective,
    "prove_together": prove_together,
    "prove_alone": prove_alone,
    "pairs": pairs,
    "full_collective": full_collective,
    "mixed_second": lambda rank, group: mixed(rank, group, "second" if rank > 1 else "cpu"),
    "mixed_npu": lambda rank, group: mixed(rank, group, "npu" if rank > 1 else "cpu"),
    "two_vendors": one_group_of_two_vendors,
}

PLAIN_STORE = {"mixed_second", "mixed_npu"}
"""Scenarios whose ranks need no process group of all."""


def run_rank(
    name: str, rank: int, size: int, timeout_s: float, folder: str, clock: Waiting
) -> None:
    """Run one rank and leave what it returned or raised in ``folder``."""
    store = dist.FileStore(f"{folder}/store", size)
    clock.enter(rank)
    ranks_module.time = clock  # type: ignore[assignment]  # this process is this rank's alone
    result: dict[str, Any] = {}
    try:
        if name in PLAIN_STORE:
            group = RankGroup(store, rank, size=size, timeout_s=timeout_s)
        else:
            dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
            name, _, path_of_votes = name.partition(" over ")
            if path_of_votes == "two hosts":
                ranks_module._host_id = lambda: f"host {rank // 2}"
            shared: Any = False if path_of_votes == "gloo" else "auto"
            group = RankGroup.from_process_group(timeout_s=timeout_s, shared=shared)
        result["value"] = SCENARIOS[name](rank, group)
    except Exception as error:
        result["error"] = f"{type(error).__name__}: {error}"
    result["waited"] = clock.now[rank]
    path = Path(folder, f"{rank}.json")
    path.with_suffix(".new").write_text(json.dumps(result), encoding="utf-8")
    path.with_suffix(".new").rename(path)


def _fork(
    name: str, size: int, timeout_s: float, folder: str, ranks: list[int], clock: Waiting
) -> dict[int, int]:
    """Fork the ranks; return process numbers by rank."""
    found = {}
    for rank in ranks:
        number = os.fork()
        if number == 0:
            try:
                run_rank(name, rank, size, timeout_s, folder, clock)
            finally:
                # Peers may be gone: an orderly end of the process group would wait for them.
                os._exit(0)
        found[rank] = number
    return found


def _collect(
    children: dict[int, int], stuck: int | None, deadline: float, clock: Waiting
) -> dict[int, str]:
    """Wait for the ranks; return how each ended. Kills what is left at the deadline.

    Args:
        stuck: a rank that is killed as soon as the others have ended.
    """
    ends: dict[int, str] = {}
    while len(ends) < len(children):
        for rank, number in children.items():
            if rank in ends:
                continue
            done, status = os.waitpid(number, os.WNOHANG)
            if done:
                ends[rank] = f"exit {os.waitstatus_to_exitcode(status)}"
                clock.leave(rank)
            elif time.monotonic() > deadline or (rank == stuck and len(ends) == len(children) - 1):
                os.kill(number, signal.SIGKILL)
                os.waitpid(number, 0)
                ends[rank] = "stuck" if rank == stuck else "hang"
        time.sleep(0.01)
    return ends


def serve() -> None:
    """Answer the requests of ``test_ranks.Prepared.run`` until the input ends."""
    with decode_of(CacheStep(), config={"buckets": [1]}, max_requests=1) as runner:
        runner.run(cache_inputs(1))  # torch imports a thousand modules at the first capture
    print("ready", flush=True)
    for line in sys.stdin:
        wanted = json.loads(line)
        with contextlib.ExitStack() as stack:
            folder = wanted.get("folder") or stack.enter_context(tempfile.TemporaryDirectory())
            size, timeout_s, ranks = wanted["size"], wanted["timeout_s"], wanted["ranks"]
            # A vote blocks for a while between two looks: few steps until a rank is late.
            clock = Waiting(multiprocessing.RawArray("d", size), step=0.25)
            children = _fork(wanted["scenario"], size, timeout_s, folder, ranks, clock)
            deadline = time.monotonic() + wanted["limit_s"]
            ends = _collect(children, wanted["stuck"], deadline, clock)
            answer = {}
            for rank, end in ends.items():
                path = Path(folder, f"{rank}.json")
                found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
                answer[rank] = {**found, "end": end}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    if len(sys.argv) > 1:  # one rank that cannot be forked: SCENARIO RANK SIZE TIMEOUT FOLDER
        scenario, rank, size, timeout_s, folder = sys.argv[1:]
        clock = Waiting([0.0] * int(size))  # never sees the others wait: no time passes
        run_rank(scenario, int(rank), int(size), float(timeout_s), folder, clock)
        os._exit(0)
    serve()
