"""Attention of vLLM as regions, found by op name and by vLLM's own marks during a capture.

Outside a capture, vLLM calls its ops directly. During a capture, a torch function mode turns each
call of a listed op into a call of a region. vLLM's marks of breaks do the same. Each replay runs
the op, which reads the live metadata from vLLM's forward context.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from devgraph.api.errors import CaptureError
from devgraph.api.marks.marks import is_capturing, region

_CACHE_OPS = ("vllm::unified_kv_cache_update", "vllm::unified_mla_kv_cache_update")
"""Ops that vLLM keeps out of its own piecewise graphs, because metadata has their targets."""


def attention_ops(compilation_config: Any) -> dict[Any, Callable[..., Any]]:
    """Return a region for each registered attention op, by the objects that a mode receives."""
    names: Iterable[str] = dict.fromkeys(
        (*compilation_config._attention_ops, *(compilation_config.splitting_ops or ()), *_CACHE_OPS)
    )
    found: dict[Any, Callable[..., Any]] = {}
    for name in names:
        space, _, op = name.partition("::")
        packet = getattr(getattr(torch.ops, space), op, None)
        if packet is None:  # The op's module is not imported, so no layer of this model uses it.
            continue
        marked = _region_of(packet, name)
        found[packet] = marked
        for overload in packet.overloads():
            found[getattr(packet, overload)] = marked
    return found


def _marks() -> Any:
    """Return vLLM's thread-local object with the breakable capture."""
    from vllm.compilation.breakable_cudagraph import BreakableCUDAGraphCapture

    return BreakableCUDAGraphCapture._tls


def _region_of(op: Any, name: str) -> Callable[..., Any]:
    def attention(*args: Any, **kwargs: Any) -> Any:
        return op(*args, **kwargs)

    attention.__name__ = attention.__qualname__ = name
    return _region(attention)


def _region(body: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``body`` as a region that runs on unwritten inputs during a capture.

    vLLM's own breaks also read unwritten inputs. To write them, each segment would have to run.
    """
    return region(capture_stub=body)(body)


class AttentionBreaks(TorchFunctionMode):
    """A context that turns attention ops and vLLM's marked breaks into regions.

    Inside the context, this object is the thread's breakable capture, which functions marked with
    ``eager_break_during_capture`` call.
    """

    is_devgraph_mode = True

    def __init__(self, regions: dict[Any, Callable[..., Any]]) -> None:
        super().__init__()
        self._regions = regions
        self.calls = 0
        """Number of calls that became a region."""

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
        """Whether vLLM's marks break; false in warm-up runs and inside regions of listed ops."""
        return is_capturing()

    def add_eager(self, body: Callable[[], Any]) -> Any:
        """Run ``body`` now, and in each replay between graphs. vLLM's marks call this method."""
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
        """Raise CaptureError if a model with attention layers called none of the ops.

        The graphs of such a model would contain attention without metadata and give wrong results.
        """
        names = list(layers)
        if names and not self.calls:
            raise CaptureError(
                f"the model has {len(names)} layers with metadata (the first is {names[0]!r}), but "
                f"called none of vLLM's attention ops while it was captured, because the platform "
                f"calls attention directly. Let its opaque_attention_op() return True, or choose a "
                f"prefill mode other than 'breakable'."
            )
