"""vLLM's attention as regions: found by name and by vLLM's marks while a step is being captured.

Outside a capture nothing stands between vLLM and its ops. Inside one, a torch function mode hands
every call of a listed op to a region, and so does what vLLM itself marks as a break; each replay
then runs the op itself, which reads the live metadata from vLLM's forward context.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from devgraph.api.errors import CaptureError
from devgraph.api.marks.marks import is_capturing, region

_CACHE_OPS = ("vllm::unified_kv_cache_update", "vllm::unified_mla_kv_cache_update")
"""vLLM keeps these out of its own piecewise graphs as well: what they write is in the metadata."""


def attention_ops(compilation_config: Any) -> dict[Any, Callable[..., Any]]:
    """Return a region for each attention op of this vLLM that is registered, by what a torch
    function mode sees.

    Args:
        compilation_config: vLLM's; it lists the attention ops.
    """
    names: Iterable[str] = dict.fromkeys(
        (*compilation_config._attention_ops, *(compilation_config.splitting_ops or ()), *_CACHE_OPS)
    )
    found: dict[Any, Callable[..., Any]] = {}
    for name in names:
        space, _, op = name.partition("::")
        packet = getattr(getattr(torch.ops, space), op, None)
        if packet is None:  # Its module was not imported: no layer of this model uses it.
            continue
        marked = _region_of(packet, name)
        found[packet] = marked
        for overload in packet.overloads():
            found[getattr(packet, overload)] = marked
    return found


def _marks() -> Any:
    """Return where vLLM keeps a thread's breakable capture."""
    from vllm.compilation.breakable_cudagraph import BreakableCUDAGraphCapture

    return BreakableCUDAGraphCapture._tls


def _region_of(op: Any, name: str) -> Callable[..., Any]:
    def attention(*args: Any, **kwargs: Any) -> Any:
        return op(*args, **kwargs)

    attention.__name__ = attention.__qualname__ = name
    return _region(attention)


def _region(body: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``body`` as a region that runs in a capture on what is not written yet, as it does in
    vLLM's own: so that no executable is made before a step needs it."""
    return region(capture_stub=body)(body)


class AttentionBreaks(TorchFunctionMode):
    """While entered, calls of the given ops go to their regions, and what vLLM marks with
    ``eager_break_during_capture`` to one each: this is then the thread's breakable capture, which
    those marks ask for.

    Args:
        regions: from ``attention_ops``.
    """

    def __init__(self, regions: dict[Any, Callable[..., Any]]) -> None:
        super().__init__()
        self._regions = regions
        self.calls = 0
        """Calls that went to a region."""

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
        """Read by vLLM's marks: not in a warm-up, and not inside the region of a listed op."""
        return is_capturing()

    def add_eager(self, body: Callable[[], Any]) -> Any:
        """Run ``body`` now and at every replay, between graphs; vLLM's marks call it."""
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
        """Raise CaptureError if a model with attention ran without calling one of the ops.

        Its attention would have been recorded as it is without metadata, and wrong for ever.
        """
        names = list(layers)
        if names and not self.calls:
            raise CaptureError(
                f"the model has {len(names)} layers with metadata (the first is {names[0]!r}) and "
                f"called none of vLLM's attention ops while it was captured. The platform calls "
                f"attention directly; let its opaque_attention_op() return True, or choose "
                f"another prefill mode than 'breakable'."
            )
