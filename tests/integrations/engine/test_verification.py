"""One comparison of the check at start, and what it asks of the environment."""

from __future__ import annotations

import itertools
import types
from typing import Any

import pytest
import torch

import devgraph as dg
from devgraph.api.config.model import DeviceGraphConfig
from devgraph.integrations.engine import verification
from devgraph.integrations.engine.verification import StartCheck, phases_to_check


class Backend(types.SimpleNamespace):
    """A device that an error can lose."""

    def __init__(self) -> None:
        super().__init__(device=torch.device("cpu"), lost="", graphs=[], keep_memory=lambda: None)
        self.get_rng_state, self.set_rng_state = torch.get_rng_state, torch.set_rng_state

    def lost_reason(self, error: BaseException) -> str | None:
        return str(error) if "illegal" in str(error) else None


def check() -> StartCheck:
    memory: Any = types.SimpleNamespace(backend=Backend())
    return StartCheck("engine", memory)


def test_lost_device_names_the_graph_and_nothing_else_is_called_on_it() -> None:
    def replay() -> Any:
        raise RuntimeError("illegal memory access")

    made, cache = check(), torch.zeros(3)
    with (
        pytest.raises(dg.DeviceLost, match=r"graph bucket 8 .*unmarked attention.*start a new"),
        made.started([cache]),
    ):
        made.run("bucket 8", lambda: torch.ones(2), replay)
    assert cache.any()  # A lost device cannot write the zeros.


def test_other_errors_pass_and_the_caches_are_zero_afterwards() -> None:
    def replay() -> Any:
        raise RuntimeError("out of paper")

    made, cache, state = check(), torch.zeros(3), torch.get_rng_state()
    small = torch.ones(3).to(torch.float8_e4m3fn)  # torch makes no noise of this type.
    with pytest.raises(RuntimeError, match="out of paper"), made.started([cache, small]):
        assert cache.any()
        made.run("bucket 8", lambda: torch.ones(2), replay)
    assert not (cache + small.float()).any()
    assert not made.running
    assert torch.equal(torch.get_rng_state(), state)


def test_eager_that_differs_from_itself_is_compared_within_tolerance() -> None:
    made = check()
    noise = iter((1e-8, 2e-8, 0.0, 0.0))
    made.run("near", lambda: torch.ones(2) * 1e-3 + next(noise), lambda: torch.ones(2) * 1e-3)
    assert not made.failed
    made.run("far", lambda: torch.ones(2) + next(noise), lambda: torch.ones(2) * 2)
    assert list(made.failed) == ["far"]
    assert made.counts == {"checks": 2, "failed_checks": 0}


def test_bucket_is_read_once_and_only_its_wrong_batches_run_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made, runs, reads = check(), list[str](), list[int]()
    real = verification.read
    monkeypatch.setattr(verification, "read", lambda flags: (reads.append(1), real(flags))[1])

    def batch(name: str, wrong: float) -> Any:
        def run() -> None:
            for piece, replayed in enumerate((torch.ones(2), torch.ones(2) + wrong)):
                runs.append(f"{name}{piece}")
                made.run((name, piece), lambda: torch.ones(2), replayed.clone)

        return run

    with made.started([]):
        made.compare([batch("a", 0.0), batch("b", 0.0)])
        assert (len(reads), runs) == (1, ["a0", "a1", "b0", "b1"])
        made.compare([batch("c", 0.0), batch("d", 1.0)])
        assert runs[4:] == ["c0", "c1", "d0", "d1", "d0", "d1"]
    assert list(made.failed) == [("d", 1)]
    assert made.counts["checks"] == 8


def test_graph_that_differs_only_in_its_first_replay_is_found() -> None:
    made, values = check(), iter((2.0,))
    with made.started([]):
        made.compare(
            [lambda: made.run("g", lambda: torch.ones(2), lambda: torch.ones(2) * next(values, 1))]
        )
    assert made.failed == {"g": "differs only in its first replay"}


def test_eager_that_differs_from_itself_is_tolerated_in_a_bucket() -> None:
    made, noise = check(), itertools.cycle((1e-8, 2e-8))
    with made.started([]):
        made.compare(
            [
                lambda: made.run(
                    "g", lambda: torch.ones(2) * 1e-3 + next(noise), lambda: torch.ones(2) * 1e-3
                )
            ]
        )
    assert not made.failed


def test_changed_inputs_are_reset_for_each_run() -> None:
    made, given = check(), torch.ones(2)
    extra = torch.zeros(2)

    def step() -> torch.Tensor:
        return given.add_(1).clone()

    for name in ("right", "wrong"):
        given.fill_(1)
        made.run(name, step, lambda: step() + extra, [given])
        extra.fill_(1)
        assert given.eq(2).all()  # as after one run
    assert list(made.failed) == ["wrong"]


def test_environment_is_the_default_of_the_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DEVGRAPH_VERIFY", raising=False)
    given = DeviceGraphConfig.from_json('{"decode": {"verify": "start"}}')
    assert phases_to_check(given) == {"decode"}
    assert phases_to_check() == frozenset()
    monkeypatch.setenv("DEVGRAPH_VERIFY", "start")
    assert phases_to_check(given) == phases_to_check() == {"decode", "prefill"}
    monkeypatch.setenv("DEVGRAPH_VERIFY", '{"every": 9}')
    with pytest.raises(dg.ConfigError, match=r"only at start"):
        phases_to_check()
