"""The check at start in vLLM, which compares graphs with eager runs in dummy steps of runner V2."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from inspect import signature
from typing import Any

import torch

from devgraph.api.process import several_ranks
from devgraph.integrations.engine.steps import tensors
from devgraph.integrations.vllm.layer import current_layer

FORWARDS = "_devgraph_forwards"
"""Attribute of a manager that contains the forward functions of its captures."""
_CHECKED = "_devgraph_checked"
"""Attribute of a runner that is set after its first captures were checked."""
_CONTEXTS = (5, 70)
"""Context lengths of the two dummy batches."""


def comparing_run(run: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``CudaGraphManager.run_fullgraph`` to compare with eager during the check at start."""
    from vllm.config import CUDAGraphMode

    check = current_layer().check

    @functools.wraps(run)
    def run_compared(self: Any, desc: Any) -> Any:
        forward = vars(self).get(FORWARDS, {}).get(desc)
        if not check.running or forward is None:
            return run(self, desc)
        names = ("hidden_states", "aux_hidden_states", "intermediate_tensors")
        buffers = tensors([getattr(self, name, None) for name in names])
        outputs = [buffer[: desc.num_tokens] for buffer in buffers]

        def eager() -> list[torch.Tensor]:
            forward(CUDAGraphMode.NONE)
            return outputs

        def replay() -> list[torch.Tensor]:
            run(self, desc)
            return outputs

        return check.run(desc, eager, replay, shared=True)

    return run_compared


def check_at_start(runner: Any, *_: Any, profile_only: bool = False, **__: Any) -> None:
    """Compare the V2 runner's first graphs with eager runs; drop graphs that differ.

    No request owns cache pages yet, so dummy batches may use all pages.
    """
    check, manager = current_layer().check, runner.cudagraph_manager
    if profile_only or not vars(manager).get(FORWARDS) or hasattr(runner, _CHECKED):
        vars(manager).pop(FORWARDS, None)
        return
    setattr(runner, _CHECKED, True)
    descs = [desc for descs in manager._capture_descs.values() for desc in descs]
    separate = any(map(_decodes, descs))
    if several_ranks() or runner.vllm_config.parallel_config.world_size_across_dp > 1:
        check.skip("several ranks")
    elif not {"context_len", "randomize_inputs"} <= {*signature(runner._dummy_run).parameters}:
        check.skip("the dummy steps of this version of vLLM")
    else:
        with check.started(tensors(runner.kv_caches)):
            for desc in descs:
                phase = "decode" if _decodes(desc) else "prefill"
                if phase in check.phases or not separate:
                    steps = (
                        functools.partial(_dummy_step, runner, manager, desc, c) for c in _CONTEXTS
                    )
                    check.compare(steps)
        for desc in check.failed:
            for known in manager._candidates.values():
                if desc in known:
                    known.remove(desc)
            manager.graphs.pop(desc, None)
        check.finish()
    del vars(manager)[FORWARDS]


def _decodes(desc: Any) -> bool:
    """Whether steps of ``desc`` only decode. If no descriptor does, graphs serve both phases."""
    return desc.uniform_token_count is not None or getattr(desc, "max_query_len", None) is not None


def _dummy_step(runner: Any, manager: Any, desc: Any, context: int) -> None:
    """Run a dummy batch of ``desc``: many requests, or few long ones for the first context."""
    tokens, requests = desc.num_tokens, desc.num_reqs
    if requests is None:
        few = -(-tokens // (runner.max_model_len - context))
        many = max(few, min(tokens, runner.max_num_reqs))
        requests = few if context == _CONTEXTS[0] else many
    asked = dataclasses.replace(desc, num_reqs=requests)
    manager.dispatch = lambda *_, **__: asked
    try:
        runner._dummy_run(tokens, context_len=context, randomize_inputs=True)
    finally:
        del manager.dispatch
