"""Requests that move between the simulated device and the CPU reference, in either direction."""

# ruff: noqa: E402  (imports follow the skip where transformers is missing)

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers", reason="the transformers integration")

from devgraph.integrations.transformers import Engine, Handoff, SamplingParams
from tests.npu.test_generate import engine, small_llama
from tests.sim.ascend import Driver
from tests.support.forked import run_ranks

pytest_plugins = ["tests.sim.ascend.plugin"]

ROOT = Path(__file__).parents[2]
PROMPT, NEW = [5, 6, 7, 8, 9, 3, 1], 12


def begin(engine: Engine, **options: Any) -> tuple[Handoff, list[int]]:
    request = engine.add_request(PROMPT, max_new_tokens=NEW, **options)
    tokens: list[int] = []
    while not tokens:
        tokens += [event.token for event in engine.step()]
    return engine.export(request), tokens


def moved(handoff: Handoff, source: Engine) -> Handoff:
    """Return a handoff as a transport delivers it, and release its request."""
    received = Handoff.from_json(handoff.to_json())
    received.data.copy_(handoff.data)
    handoff.progress.end("released")
    source.step()
    return received


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_cache_is_equal_bit_for_bit_after_npu_cpu_npu(
    driver: Driver, backend: Any, dtype: torch.dtype
) -> None:
    model = small_llama().to(dtype)
    with (
        engine(model, "cpu", "breakable", max_requests=5, max_len=192) as on_cpu,
        engine(small_llama().to(dtype).to("npu"), backend, "full") as on_npu,
    ):
        on_npu.capture()
        (alone,) = on_cpu.generate([PROMPT], max_new_tokens=NEW)
        first, tokens = begin(on_npu)
        backend.synchronize()
        there = on_cpu.export(on_cpu.admit(moved(first, on_npu)))
        back = on_npu.export(on_npu.admit(moved(there, on_cpu)))
        backend.synchronize()
        for name, tensor in back.tensors.items():
            assert torch.equal(tensor.cpu(), first.tensors[name].cpu()), name
        reference, same = begin(on_cpu)
        assert same == tokens
        for name, tensor in reference.tensors.items():
            limit = 1e-5 if dtype == torch.float32 else 1e-2
            torch.testing.assert_close(first.tensors[name].cpu(), tensor, rtol=limit, atol=limit)
        continued = on_npu.admit(moved(back, on_npu))
        while on_npu.has_work:
            tokens += [e.token for e in on_npu.step() if e.request_id == continued]
        assert tokens == list(alone.token_ids)
        stats = on_npu.decode.stats()
        assert stats.steps == NEW - 1
        assert stats.graph_steps == NEW - 1


def test_sampled_request_continues_on_the_other_backend_by_seed_and_draws(
    driver: Driver, backend: Any
) -> None:
    sampling = SamplingParams(temperature=0.8, seed=4)
    with (
        engine(small_llama(), "cpu", "breakable") as on_cpu,
        engine(small_llama().to("npu"), backend, "full") as on_npu,
    ):
        handoff, _ = begin(on_npu, sampling=sampling)
        received = moved(handoff, on_npu)
        runs: list[list[int]] = []
        for _ in range(2):
            on_cpu.admit(received)
            runs.append([])
            while on_cpu.has_work:
                runs[-1] += [event.token for event in on_cpu.step()]
        assert len(runs[0]) == NEW - 1
        assert runs[0] == runs[1]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_example_prefills_on_npu_and_decodes_on_cpu(driver: Driver, dtype: str) -> None:
    done = run_ranks(
        *(ROOT / "examples" / "mixed_cluster.py", "--backends", "npu", "cpu"),
        *("--check", "--dtype", dtype),
        ranks=2,
    )
    assert [rank.returncode for rank in done] == [0, 0], done
    out = "".join(rank.stdout for rank in done)
    assert "prefill on npu: full, buckets [16, 64]" in out
    assert "decode on cpu: full, buckets [1, 2, 4, 8]" in out
    rounded = "same tokens as one process: False, but only where rounding decides"
    assert "same tokens as one process: True" in out or (dtype == "bfloat16" and rounded in out)
    (line,) = [line for line in out.splitlines() if line.startswith("decode steps")]
    *_, in_graphs, _, steps = line.split()
    assert in_graphs == steps
