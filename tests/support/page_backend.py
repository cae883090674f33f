"""The classes of docs/backends.md, completed by a recorder of torch operations on the CPU.

A conformance run loads this module with ``-p``; it registers the backend as ``other``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map_only

import devgraph as dg
from devgraph.api.capabilities import Capabilities
from devgraph.api.executable import Call, Recording
from devgraph.api.graph import DeviceGraph
from devgraph.api.marks.source import user_line
from devgraph.api.modes import OwnMode

PAGE = Path(__file__).parents[2] / "docs" / "backends.md"
_DRAWS = torch.Tag.nondeterministic_seeded
_IN_PLACE = ("lift_fresh", "detach", "t_", "transpose_", "set_", "resize_")


def _of_page() -> dict[str, Any]:
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.S | re.M)
    space: dict[str, Any] = {}
    for block in blocks:
        if "class Other" in block:
            exec(block, space)
    return space


class _Recorder(OwnMode):
    """Records operations without running them."""

    def __init__(self, pool: Any) -> None:
        super().__init__()
        self.pool = pool
        self.operations: list[Any] = []
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)

    def take(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        devices = {tensor.device.type for tensor in tensors}
        if "meta" in devices or torch.device("meta") == kwargs.get("device"):
            return func(*args, **kwargs)
        if _DRAWS in func.tags and "scaled_dot" not in str(func):
            raise dg.CaptureError(f"{func} draws random numbers in a capture, at {user_line()}")
        schema = func._schema
        is_view = not schema.is_mutable and any(one.alias_info for one in schema.returns)
        if is_view or func._overloadpacket.__name__ in _IN_PLACE:
            return func(*args, **kwargs)
        kept = tree_map_only(torch.Tensor, lambda t: self.pool.alias(t.detach()), (args, kwargs))
        if schema.is_mutable:
            self.operations.append((func, *kept, None))
            return _written(schema, args, kwargs)
        with self.fake:
            real = self.fake.from_tensor
            there = tree_map_only(
                torch.Tensor, lambda t: real(t, static_shapes=True), (args, kwargs)
            )
            shapes = func(*there[0], **there[1])
        result = tree_map_only(torch.Tensor, self._placed, shapes)
        if "empty" not in func._overloadpacket.__name__:
            places = tree_map_only(torch.Tensor, self.pool.alias, result)
            self.operations.append((func, *kept, places))
        return result

    def _placed(self, like: torch.Tensor) -> Any:
        empty = torch.empty_strided(like.size(), like.stride(), dtype=like.dtype)
        return self.pool.place(empty)


def _written(schema: Any, args: Any, kwargs: Any) -> Any:
    """Return the arguments that an operation in place returns."""
    given = dict(zip((one.name for one in schema.arguments), args, strict=False)) | kwargs
    aliased = {
        frozenset(one.alias_info.before_set): given[one.name]
        for one in schema.arguments
        if one.alias_info is not None and one.name in given
    }
    results = [aliased[frozenset(one.alias_info.before_set)] for one in schema.returns]
    return results[0] if len(results) == 1 else tuple(results) or None


def _single(tensor: torch.Tensor) -> torch.Tensor:
    """Return one element along each expanded dimension."""
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    ends = (slice(0, 1) if stride == 0 and size > 1 else slice(None) for size, stride in sizes)
    return tensor[tuple(ends)] if tensor.dim() else tensor


def _launch_of(operations: Sequence[Any]) -> Call:
    def launch() -> None:
        with torch.no_grad(), torch._C._DisableAutocast():
            for func, args, kwargs, places in operations:
                results = tree_leaves(func(*args, **kwargs))
                for place, result in zip(tree_leaves(places), results, strict=False):
                    if isinstance(place, torch.Tensor):
                        _single(place).copy_(_single(result))

    return Call(launch)


@attrs.define
class _Operations(Recording):
    operations: Sequence[Any]

    @property
    def bytes(self) -> int:
        return 64 * len(self.operations)


class OtherGraph(DeviceGraph):
    recorder: _Recorder | None = None
    operations: tuple[Any, ...] = ()

    def _begin(self, mode: str) -> None:
        self.recorder = _Recorder(self.pool)
        self.recorder.__enter__()

    def _stop(self) -> None:
        recorder, self.recorder = self.recorder, None
        if recorder is not None:
            recorder.__exit__(None, None, None)
            self.operations = tuple(recorder.operations)

    def _end(self) -> Any:
        self._stop()
        return _launch_of(self.operations)

    def _abort(self) -> None:
        self._stop()
        self._free()

    def _free(self) -> None:
        self.operations = ()

    def _size(self) -> tuple[int, int]:
        return len(self.operations), 0

    def _region_begin(self, call: Any) -> None:
        assert self.recorder is not None
        call.note = len(self.recorder.operations)

    def _region_end(self, call: Any) -> None:
        assert self.recorder is not None
        call.note = slice(call.note, len(self.recorder.operations))

    def _record(self, host: Any) -> Recording:
        operations = list(self.operations)
        for call in reversed(self.calls):
            with _Recorder(self.pool) as recorder:
                call.run(host[call.mark])
            new, old = recorder.operations, self.operations[call.note]
            if [func for func, *_ in new] != [func for func, *_ in old]:
                raise dg.UpdateTopologyError(f"{call.mark.name} needs other operations")
            operations[call.note] = new
        return _Operations(operations)

    def _apply(self, recording: Any) -> None:
        self.use(_launch_of(recording.operations))


class PageBackend(_of_page()["OtherBackend"]):  # type: ignore[misc]
    name = "other"
    device = torch.device("cpu")
    graph_type = OtherGraph
    capabilities = Capabilities(node_counts=True, shared_pool=True, region_update=True)

    def synchronize(self) -> None:
        """Nothing runs asynchronously."""


dg.register("other", PageBackend, replace=True)
