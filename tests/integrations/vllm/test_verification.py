"""The check at start: graphs compared with eager in the engine's dummy steps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import devgraph as dg
from devgraph.integrations import vllm
from devgraph.integrations.vllm.install import engine_mode
from devgraph.integrations.vllm.layer import current_layer
from devgraph.integrations.vllm.manager import sparing_round
from devgraph.integrations.vllm.verification import check_at_start
from tests.integrations.vllm.test_breaks import Managed
from tests.support.vllm_engine import Engine, Model, engine_of
from tests.support.vllm_engine import rows as rows_of


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    for name in ("DEVGRAPH_MODE", "VLLM_USE_BREAKABLE_CUDAGRAPH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("DEVGRAPH_VERIFY", "start")
    with engine_of("standin", pytest.skip) as found, torch.inference_mode():
        yield found
        vllm.uninstall()


class Unmarked(Model):
    """A model with code that reads the number of requests on the host and has no mark."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        from vllm.forward_context import get_forward_context

        hidden = super().forward(*args, **kwargs)
        metadata = get_forward_context().attn_metadata
        return hidden * getattr(metadata, "requests", 9)


def batch_of(tokens: int, requests: int) -> Any:
    metadata = rows_of(tokens)
    metadata.requests = requests
    return metadata


class Runner:
    """As much of the V2 runner as the check uses."""

    device = torch.device("cpu")
    max_model_len = 1000
    max_num_reqs = 8

    def __init__(self, setup: Managed) -> None:
        self.cudagraph_manager = setup.manager
        self.setup = setup
        self.vllm_config = setup.config
        self.kv_caches = [torch.zeros(3, 4)]
        self.seen: list[tuple[Any, int]] = []

    def _dummy_run(self, tokens: int, *, context_len: int, randomize_inputs: bool) -> None:
        assert randomize_inputs and self.kv_caches[0].any()
        desc = self.cudagraph_manager.dispatch(tokens, tokens, 1)
        self.seen.append((desc, context_len))
        self.setup.fill()
        if desc.cg_mode == self.setup.engine.Mode.FULL:
            self.cudagraph_manager.run_fullgraph(desc)
            return
        descriptor = self.setup.engine.Descriptor(desc.num_tokens)
        metadata = batch_of(tokens, desc.num_reqs)
        with self.setup.engine.step(self.setup.config, desc.cg_mode, descriptor, metadata):
            self.cudagraph_manager.run_pw_graph(self.setup.model, self.setup.inputs(tokens))


def captured(
    engine: Engine,
    monkeypatch: pytest.MonkeyPatch,
    model: Model | None,
    phases: frozenset[str] = frozenset(("decode", "prefill")),
) -> Runner:
    setup = Managed(engine, monkeypatch, breakable=True)
    current_layer().check.phases = phases
    if model is not None:
        setup.model = model
    setup.capture()
    return Runner(setup)


def test_right_graphs_pass_and_the_caches_are_as_before(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = captured(engine, monkeypatch, None)
    check_at_start(runner)
    found = vllm.stats()
    assert (found["checks"], found["failed_checks"]) == (8, 0)
    assert not runner.kv_caches[0].any()
    assert not current_layer().check.running
    # Two batches of two sizes in each mode; those of the first context have few requests.
    requests = [desc.num_reqs for desc, context in runner.seen if context == 5]
    assert requests == [4, 2, 1, 1]
    check_at_start(runner)  # The forward functions are released, so nothing runs.
    runner.setup.manager.release_graphs()
    runner.setup.capture()
    runner.kv_caches[0].fill_(3)  # Requests own the cache by now.
    check_at_start(runner)
    assert runner.kv_caches[0].eq(3).all()
    assert len(runner.seen) == 8


def test_code_without_its_mark_is_found_and_its_steps_run_eagerly(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    runner = captured(engine, monkeypatch, Unmarked())
    current_layer().check.strict = False
    check_at_start(runner)
    assert vllm.stats()["failed_checks"] == 2  # Whole steps have fixed metadata.
    assert "differs in" in caplog.text
    setup, manager = runner.setup, runner.cudagraph_manager
    for requests in (1, 3):
        inputs, metadata = setup.fill(), batch_of(4, requests)
        want = setup.eager(4) * requests / 9
        descriptor = engine.Descriptor(4)
        with engine.step(setup.config, engine.Mode.PIECEWISE, descriptor, metadata):
            torch.testing.assert_close(manager.run_pw_graph(setup.model, inputs), want)
    # Two of the four calls are the second batches of the check.
    assert vllm.stats()["modes"]["breakable"]["eager"]["verify_failed"] == 4


def test_strict_refuses_to_start(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = captured(engine, monkeypatch, Unmarked())
    with pytest.raises(dg.CaptureError, match=r"2 graphs failed the check at start.*Mark the code"):
        check_at_start(runner)


def test_whole_step_that_reads_a_replaced_weight_is_dropped(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = captured(engine, monkeypatch, None)
    current_layer().check.strict = False
    runner.setup.model.weights[0] = torch.zeros_like(runner.setup.model.weights[0])
    check_at_start(runner)
    assert vllm.stats()["failed_checks"] == 4
    manager = runner.cudagraph_manager
    assert not manager.graphs
    setup = runner.setup
    setup.fill()
    assert setup.dispatch(4, 4, 1).cg_mode == engine.Mode.PIECEWISE
    assert torch.equal(setup.run(4, 4, 4), setup.eager(4))


def test_profiling_captures_are_not_checked(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = captured(engine, monkeypatch, None)
    check_at_start(runner, profile_only=True)
    assert not runner.seen


def test_install_adds_the_check_only_if_asked(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    second = engine.v2.GPUModelRunner
    before = second.capture_model
    assert vllm.install(strict=True)
    assert second.capture_model is not before
    vllm.uninstall()
    monkeypatch.setenv("DEVGRAPH_VERIFY", "0")
    assert vllm.install(strict=True)
    assert second.capture_model is before


def test_only_the_phases_of_the_mode_are_checked(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = captured(engine, monkeypatch, None, frozenset(("prefill",)))
    check_at_start(runner)
    assert [desc.cg_mode for desc, _ in runner.seen] == [engine.Mode.PIECEWISE] * 4
    parsed = engine_mode('{"decode": "full", "prefill": {"policy": "full", "verify": "start"}}')
    assert parsed.checked == {"decode", "prefill"}  # DEVGRAPH_VERIFY is the default.


@pytest.mark.parametrize("what", ["ranks", "version", "V1 runner"])
def test_what_cannot_be_checked_is_said(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, what: str
) -> None:
    runner = captured(engine, monkeypatch, None)
    check = current_layer().check

    def attempt() -> None:
        if what == "V1 runner":
            first = engine.runner.GPUModelRunner.__new__(engine.runner.GPUModelRunner)
            first.vllm_config = runner.vllm_config
            sparing_round(lambda self: None)(first)
        else:
            check_at_start(runner)

    if what == "ranks":
        runner.vllm_config.parallel_config.world_size_across_dp = 2
    if what == "version":
        monkeypatch.setattr(Runner, "_dummy_run", lambda self, tokens: None)
    with pytest.raises(dg.CapabilityError, match=f"not possible with .*{what}"):
        attempt()
    check.strict = False
    vars(runner).pop("_devgraph_checked", None)
    attempt()
    assert "graphs are not compared" in caplog.text
    assert vllm.stats()["checks"] == 0
