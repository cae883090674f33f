"""Snapshots: saved contents of tensors and states of random generators."""

from __future__ import annotations

import contextlib
import itertools
import math
import threading
from collections import Counter
from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any, NamedTuple

import torch

from devgraph.api.backend import Backend
from devgraph.api.errors import CaptureError
from devgraph.api.tensors import Place, byte_range, describe, has_place, overlaps_itself, place_of

DEFAULT_LIMIT = 2**30
"""Default maximum bytes of the copies of one snapshot."""

_CHUNK = 2**20
"""Number of 64-bit words that are hashed at a time."""


_restores: Counter[int] = Counter()
"""Number of calls of ``Snapshot.restore`` by thread."""


def restores_elsewhere() -> int:
    """Return how often other threads have restored the default random state."""
    here = threading.get_ident()
    return sum(count for thread, count in [*_restores.items()] if thread != here)


class _Saved(NamedTuple):
    name: str
    tensor: torch.Tensor
    place: Place
    memory: torch.Tensor
    """The bytes of the tensor if it is contiguous or overlaps itself, else the tensor itself."""
    content: torch.Tensor | None
    """A copy of ``memory``; None if the tensor is above the limit."""
    digest: torch.Tensor | None
    """A hash of the contents; None if there is a copy."""


class _Rows(NamedTuple):
    """Saved rows of a tensor above the limit."""

    name: str
    tensor: torch.Tensor
    memory: torch.Tensor
    """The tensor as bytes [outer, rows, inner]; not every dtype supports ``index_select``."""
    numbers: torch.Tensor
    """Row numbers of ``content``."""
    content: torch.Tensor


class Part(NamedTuple):
    """A saved tensor, or saved rows of a tensor."""

    name: str
    tensor: torch.Tensor
    now: torch.Tensor
    """The current contents: a view of the tensor, or a copy of its saved rows."""
    saved: torch.Tensor
    rows: torch.Tensor | None
    """Numbers of the saved rows; None for a whole tensor."""


class Snapshot:
    """Saved contents of tensors, and states of random generators including the default ones.

    ``limit`` is the maximum bytes of all copies; None is ``DEFAULT_LIMIT``. Small tensors are saved
    first. ``named`` tensors above the limit are hashed, and ``optional`` ones are not saved.
    """

    def __init__(
        self,
        backend: Backend,
        named: Iterable[tuple[str, torch.Tensor]],
        generators: Iterable[torch.Generator] = (),
        *,
        limit: int | None = None,
        optional: Iterable[tuple[str, torch.Tensor]] = (),
    ) -> None:
        self._backend = backend
        self.random = backend.get_rng_state()
        self._host_random = torch.get_rng_state()
        self._generators = [(generator, generator.get_state()) for generator in generators]
        self._left = self._limit = DEFAULT_LIMIT if limit is None else limit
        self._saved: list[_Saved] = []
        self._rows: list[_Rows] = []
        self._disturbed: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        self._versions: dict[int, int] = {}
        seen: set[int] = set()
        with torch.inference_mode():
            for needed, group in ((True, named), (False, optional)):
                tensors = {id(tensor): (name, tensor) for name, tensor in group}
                for key, (name, tensor) in sorted(tensors.items(), key=lambda item: _size(item[1])):
                    if key not in seen and has_place(tensor):
                        seen.add(key)
                        self._save(name, tensor, needed)

    def beside(self, named: Iterable[tuple[str, torch.Tensor]]) -> Snapshot:
        """Return a snapshot of other tensors with the same limit."""
        return Snapshot(self._backend, (), limit=self._limit, optional=named)

    def _save(self, name: str, tensor: torch.Tensor, needed: bool) -> None:
        # Contiguous tensors are copied as bytes, because not every dtype has a copy kernel.
        flat = tensor.is_contiguous() or overlaps_itself(tensor)
        memory = _bytes_of(tensor) if flat else tensor.detach()
        place, content, digest = place_of(tensor), None, None
        if not tensor.is_inference():
            self._versions[id(tensor)] = tensor._version
        if memory.nbytes <= self._left:
            with contextlib.suppress(torch.OutOfMemoryError):
                content = memory.clone()
                self._left -= memory.nbytes
        if content is None:
            if not needed:
                return
            digest = hash_of(tensor)
        self._saved.append(_Saved(name, tensor, place, memory, content, digest))

    def save_rows(self, rows: torch.Tensor) -> None:
        """Save ``rows`` of each tensor above the limit, and discard rows saved earlier.

        A row number may index the first dimension, the largest dimension, or a pair of adjacent
        dimensions of at least that size (pages of slots). Rows of the last two kinds are not saved
        if they are more than half of the tensor. Row numbers are distinct; those out of range are
        ignored.
        """
        self._rows.clear()
        with torch.inference_mode():
            for name, tensor, _, _, _, digest in self._saved:
                if digest is None or not tensor.dim() or not tensor.is_contiguous():
                    continue
                for axis, width in itertools.product(range(tensor.dim()), (1, 2)):
                    if axis + width > tensor.dim():
                        continue
                    size = math.prod(tensor.shape[axis : axis + width])
                    inside = rows[(rows >= 0) & (rows < size)].to(tensor.device)
                    is_first = (axis, width) == (0, 1)
                    can_be_rows = size >= max(tensor.shape) and 2 * len(inside) <= size
                    if len(inside) and (is_first or can_be_rows):
                        where = f" along dimension {axis}" + f" and {axis + 1}" * (width == 2)
                        where *= not is_first
                        view = tensor.detach().view(math.prod(tensor.shape[:axis]), size, -1)
                        memory = view.view(torch.uint8)
                        content = memory.index_select(1, inside)
                        self._rows.append(_Rows(name + where, tensor, memory, inside, content))

    def disturb(
        self, names: Container[str], positions: Callable[[torch.Tensor, Any], Sequence[int]]
    ) -> None:
        """Change the copies of rows of written floating-point tensors until ``settle``.

        ``restore`` writes the changed copies. Tensors in ``names`` were written without a change of
        their version counter. ``positions`` returns the rows to change, given a tensor and the
        numbers of its saved rows.
        """

        def change(name: str, tensor: torch.Tensor, copy: torch.Tensor, numbers: Any) -> None:
            then, dtype = self._versions.get(id(tensor)), tensor.dtype
            is_written = name in names or (then is not None and then != tensor._version)
            is_wide = dtype.is_floating_point and dtype.itemsize > 1  # has kernels
            if not is_written or not is_wide or overlaps_itself(tensor):
                return
            if rows := {*positions(tensor, numbers)}:
                if numbers is None:
                    copy = copy[None] if copy.dtype is dtype else copy.view(1, len(tensor), -1)
                where = torch.tensor([*rows], device=copy.device)
                before = copy.index_select(1, where)
                self._disturbed.append((copy, where, before))
                # Probabilities stay probabilities, and steps rarely write these numbers.
                values = before.view(dtype)
                values = values * 0.5 + values.ge(0).to(dtype) * 0.74 - 0.37
                copy.index_copy_(1, where, values.view(copy.dtype))

        with torch.inference_mode():
            for name, tensor, _, _, content, _ in self._saved:
                if content is not None:
                    change(name, tensor, content, None)
            for name, tensor, _, numbers, content in self._rows:
                change(name, tensor, content, numbers)

    def settle(self) -> None:
        """Restore the copies from before ``disturb``."""
        with torch.inference_mode():
            for copy, where, before in reversed(self._disturbed):
                copy.index_copy_(1, where, before)
        self._disturbed.clear()

    def parts(self) -> list[Part]:
        """Return the saved parts: whole tensors, and rows of tensors above the limit."""
        parts = []
        with torch.inference_mode():
            for name, tensor, _, _, content, _ in self._saved:
                plain = tensor.detach()
                if content is not None and content.shape != tensor.shape:  # bytes
                    if overlaps_itself(tensor) or tensor.is_conj() or tensor.is_neg():
                        parts.append(Part(name, tensor, _bytes_of(tensor), content, None))
                        continue
                    content = content.view(tensor.dtype)
                if content is not None:
                    parts.append(Part(name, tensor, plain, content.view(tensor.shape), None))
            for name, tensor, memory, rows, saved in self._rows:
                now = memory.index_select(1, rows)
                now, before = (t.view(tensor.dtype).transpose(0, 1) for t in (now, saved))
                parts.append(Part(name, tensor, now.contiguous(), before.contiguous(), rows))
        return parts

    def generators(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return the current and the saved state of each generator except the default."""
        return [(generator.get_state(), state) for generator, state in self._generators]

    def require_places(self) -> None:
        """Raise CaptureError if the memory or the layout of a tensor changed."""
        for name, tensor, place, *_ in self._saved:
            if not is_at(tensor, place):
                raise CaptureError(
                    f"the step changes {name} in place from {tuple(place[2])} strides {place[3]} "
                    f"to {describe(tensor)}, or replaces its memory (t_(), resize_(), set_(), "
                    f"...). A replay would not. Change a view of the tensor instead: "
                    f"view = tensor[...]."
                )

    def written(self, tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Return the members of ``tensors`` whose contents changed."""
        saved = {id(item.tensor): item for item in self._saved}
        with torch.inference_mode():
            return [
                tensor
                for tensor in tensors
                if (item := saved.get(id(tensor))) is not None
                and item.content is not None
                and not same_bytes(item.content, item.memory)
            ]

    def restore(self) -> None:
        """Restore contents and layouts of tensors, and states of generators."""
        _restores[threading.get_ident()] += 1
        self._backend.set_rng_state(self.random)
        torch.set_rng_state(self._host_random)
        for generator, state in self._generators:
            generator.set_state(state)
        self.restore_contents()

    def restore_contents(self) -> None:
        for _, tensor, place, *_ in self._saved:
            if not is_at(tensor, place):
                with torch.inference_mode(tensor.is_inference()), torch.no_grad():
                    tensor.set_(*place)
        with torch.inference_mode():  # inference tensors may only be written in this mode
            for saved in self._saved:
                if saved.content is not None:
                    saved.memory.copy_(saved.content)
            for _, _, memory, numbers, content in self._rows:
                memory.index_copy_(1, numbers, content)

    def require_unwritten(self, culprit: str = "warm-up or capture") -> None:
        """Raise CaptureError if the contents of a tensor above the limit changed."""
        with torch.inference_mode():
            for name, tensor, _, _, _, digest in self._saved:
                if digest is not None and not torch.equal(hash_of(tensor), digest):
                    outside = " outside of the rows that the inputs name" * bool(self._rows)
                    raise CaptureError(
                        f"{culprit} wrote {name}{outside}. Its {tensor.nbytes} bytes are above "
                        f"the limit for copies, so its old values are lost. Choose a pad rule "
                        f"(pad=) with which padded rows write no real state, or raise "
                        f"snapshot_limit=."
                    )


def _size(named: tuple[str, torch.Tensor]) -> int:
    return named[1].nbytes if has_place(named[1]) else 0


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return all memory between the first and the last byte of ``tensor``."""
    (first, last), storage = byte_range(tensor), tensor.untyped_storage()
    flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    flat.set_(storage, first - storage.data_ptr(), (last - first,), (1,))
    return flat


def hash_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a hash of the memory of ``tensor``, one number on its device."""
    memory = _bytes_of(tensor)
    start = min(-memory.storage_offset() % 8, len(memory))
    cut = len(memory) - (len(memory) - start) % 8
    words, weights = memory[start:cut].view(torch.int64), _weights(memory.device)
    total = memory[:start].sum(dtype=torch.int64) * 31 + memory[cut:].sum(dtype=torch.int64)
    for chunk in torch.split(words, _CHUNK):
        total = total * 31 + (chunk * weights[: len(chunk)]).sum()
    return total


def _weights(device: torch.device) -> torch.Tensor:
    count = torch.arange(_CHUNK, device=device, dtype=torch.int64)
    return count * 0x5851F42D4C957F2D + 0x14057B7EF767814F | 1


def same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of equal shape and dtype have equal bytes, compared on their device."""
    plain = [t.resolve_conj().resolve_neg().contiguous().reshape(-1) for t in (one, other)]
    left, right = (t.view(torch.uint8) if t.numel() else t for t in plain)
    return torch.equal(left, right)


def is_at(tensor: torch.Tensor, place: Place) -> bool:
    """Whether ``tensor`` has the memory and the layout of ``place``."""
    storage, *layout = place_of(tensor)
    return storage._cdata == place[0]._cdata and layout == [*place[1:]]
