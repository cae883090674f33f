"""Regions for vLLM's attention ops, and for functions that vLLM marks as breaks.

During a capture, a torch function mode turns each call of an attention op into a region, and marked
functions become regions too. In each replay, the region runs and reads the metadata of the current
batch from vLLM's forward context. Outside captures, vLLM calls its ops directly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from devgraph.api.errors import CaptureError
from devgraph.api.marks.marks import is_capturing, region

_CACHE_OPS = ("vllm::unified_kv_cache_update", "vllm::unified_mla_kv_cache_update")
"""Ops outside vLLM's piecewise graphs, because metadata selects the rows that they write."""


def attention_ops(compilation_config: Any) -> dict[Any, Callable[..., Any]]:
    """Return a region for each registered attention op, keyed by the op and by each overload."""
    names: Iterable[str] = dict.fromkeys(
        (*compilation_config._attention_ops, *(compilation_config.splitting_ops or ()), *_CACHE_OPS)
    )
    found: dict[Any, Callable[..., Any]] = {}
    for name in names:
        space, _, op = name.partition("::")
        packet = getattr(getattr(torch.ops, space), op, None)
        if packet is None:  # Its module is not imported, so the model does not use the op.
            continue
        marked = _region_of(packet, name)
        found[packet] = marked
        for overload in packet.overloads():
            found[getattr(packet, overload)] = marked
    return found


def _marks() -> Any:
    """Return vLLM's thread-local object whose ``active`` is the current breakable capture."""
    from vllm.compilation.breakable_cudagraph import BreakableCUDAGraphCapture

    return BreakableCUDAGraphCapture._tls


def _region_of(op: Any, name: str) -> Callable[..., Any]:
    def attention(*args: Any, **kwargs: Any) -> Any:
        return op(*args, **kwargs)

    attention.__name__ = attention.__qualname__ = name
    return _region(attention)


def _region(body: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``body`` as a region that also runs during a capture, on unset inputs.

    To set the inputs, each segment would have to run. vLLM's own breaks also run on unset inputs.
    """
    return region(capture_stub=body)(body)


class AttentionBreaks(TorchFunctionMode):
    """A context manager that turns attention ops and vLLM's marked breaks into regions.

    In the context, this object is the thread's breakable capture, whose methods are called by
    functions marked with ``eager_break_during_capture``.
    """

    is_devgraph_mode = True

    def __init__(self, regions: dict[Any, Callable[..., Any]]) -> None:
        super().__init__()
        self._regions = regions
        self.calls = 0
        """Number of calls that became regions."""

    def __enter__(self) -> Any:
        _marks().active = self
        mode: Any = super()
        return mode.__enter__()

    def __exit__(self, *error: Any) -> None:
        mode: Any = super()
        mode.__exit__(*error)
        _marks().active = None

    @property
    def _capturing(self) -> bool:
        """Whether vLLM's marks break the step: not in warm-up runs or inside other regions."""
        return is_capturing()

    def add_eager(self, body: Callable[[], Any]) -> Any:
        """Run ``body`` now, and between graphs in each replay. vLLM's marks call this method."""
        self.calls += 1
        return _region(body)()

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        marked = self._regions.get(func)
        if marked is None:
            return func(*args, **(kwargs or {}))
        self.calls += 1
        return marked(*args, **(kwargs or {}))

    def require_calls(self, layers: Iterable[str]) -> None:
        """Raise CaptureError if the model has attention layers but called none of the ops.

        Graphs of such a model would contain attention without metadata and return wrong results.
        """
        names = list(layers)
        if names and not self.calls:
            raise CaptureError(
                f"the model has {len(names)} layers with metadata (the first is {names[0]!r}), but "
                f"called none of vLLM's attention ops while it was captured, because the platform "
                f"calls attention directly. Let the platform's opaque_attention_op() return True, "
                f"or choose a prefill mode other than 'breakable'."
            )
