"""SGLang's prefill as one graph that is updated for each batch; see docs/sglang.md.

Torch-native attention slices its tensors by lengths on the host, so SGLang breaks graphs at
attention. Here, attention is a region whose key contains the lengths of the batch. All other code
comes from SGLang's breakable prefill.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import sys
import weakref
from collections.abc import Iterator
from typing import Any

import attrs

from devgraph.api.errors import CapabilityError
from devgraph.api.marks.marks import is_capturing, region
from devgraph.api.process import several_ranks
from devgraph.integrations.sglang.segments import BREAKS


def is_torch_native(model_runner: Any) -> bool:
    """Whether prefill uses torch-native attention whose prefill methods are not overridden."""
    chosen = getattr(model_runner, "attn_backend", None)
    attention = type(getattr(chosen, "prefill_backend", chosen))
    loaded = sys.modules.get("sglang.srt.layers.attention.torch_native_backend")
    native = getattr(loaded, "TorchNativeAttnBackend", None)
    extends = ("forward_extend", "_run_sdpa_forward_extend")
    return all(getattr(attention, name, 0) is getattr(native, name, None) for name in extends)


def require_updatable(model_runner: Any) -> None:
    """Raise CapabilityError with the reason if attention cannot be updated."""
    window = getattr(model_runner.attn_backend, "use_sliding_window_kv_pool", False)
    for applies, reason in (
        (several_ranks(), "several ranks would have to capture together while serving"),
        (window, "its sliding windows write to different rows in each batch"),
        (model_runner.model_config.is_encoder_decoder, "cross-attention reads additional lengths"),
        (model_runner.is_draft_worker, "it is a draft model, which was not tested"),
    ):
        if applies:
            raise CapabilityError(
                f"full prefill with torch-native attention needs a graph that is updated for each "
                f"batch, which is not possible for this model: {reason}. Choose breakable."
            )


class _Lengths(tuple[int, ...]):
    """Host integers in place of a tensor whose elements attention reads."""

    @property
    def shape(self) -> tuple[int]:
        return (len(self),)


_ON_HOST = {
    "req_pool_indices": "req_pool_indices",
    "seq_lens": "seq_lens_cpu",
    "extend_prefix_lens": "extend_prefix_lens_cpu",
    "extend_seq_lens": "extend_seq_lens_cpu",
}
"""Attributes that attention indexes by request, with the attributes of their host values."""


@attrs.frozen
class _Step:
    """The batch of one prefill, and the batch's host lengths, which form the key."""

    requests: tuple[_Lengths, ...]
    tokens: int
    batch: weakref.ref[Any] = attrs.field(eq=False)


def _current() -> Any:
    """Return the context variable that contains the capture for SGLang's marks."""
    return importlib.import_module(BREAKS)._current_capture_var


def _step() -> _Step:
    """Return the step of this thread's current batch."""
    from sglang.srt.model_executor.runner_utils.forward_batch import get_forward_batch

    capture = _current().get()
    if is_capturing():  # A capture must not read tensors on the host.
        known: _Step = capture.step
        return known
    batch = get_forward_batch()
    step = _Step(
        tuple(_Lengths(map(int, getattr(batch, name))) for name in _ON_HOST.values()),
        batch.global_num_token_non_padded_cpu,
        weakref.ref(batch),
    )
    if capture is not None:
        capture.step = step
    return step


class WholeCapture:
    """A stand-in for SGLang's capture while a step is captured as one graph."""

    step: _Step

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        """Make this object the capture for SGLang's marks inside the block."""
        token = _current().set(self)
        try:
            yield
        finally:
            _current().reset(token)

    def _end_current_segment(self) -> None:
        raise CapabilityError(
            "SGLang runs more than attention between graphs of this model (eager_on_graph). In one "
            "graph of the whole prefill, each replay would repeat that work with captured values. "
            "Choose breakable."
        )


def with_region(marked: Any) -> Any:
    """Wrap ``_eager_attention`` so that it is a region inside a ``WholeCapture``."""
    from sglang.srt.model_executor.runner_utils.forward_batch import set_forward_batch
    from sglang.srt.model_executor.runner_utils.prefill_graph import prefill_graph_scope

    @region(context=_step)
    def attention(*args: Any, context: _Step, **kwargs: Any) -> None:
        batch = copy.copy(context.batch())
        vars(batch).update(zip(_ON_HOST, context.requests, strict=True))
        scope = prefill_graph_scope(full_graph=False, raw_num_tokens=context.tokens)
        with set_forward_batch(batch), scope:
            marked.__wrapped__(*args, **kwargs)

    def _eager_attention(*args: Any, **kwargs: Any) -> None:
        whole = isinstance(_current().get(), WholeCapture)
        (attention if whole else marked)(*args, **kwargs)

    return _eager_attention
