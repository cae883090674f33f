"""Snapshots: saved contents of tensors and states of random generators."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import threading
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator
from typing import NamedTuple

import torch

from devgraph.api.backend import Backend
from devgraph.api.errors import CaptureError
from devgraph.api.tensors import Place, byte_range, describe, has_place, overlaps_itself, place_of

DEFAULT_LIMIT = 2**30
"""Default maximum size of the copies of one snapshot, in bytes."""

_CHUNK = 2**20
"""Number of 64-bit words that are hashed at a time."""

_PERIOD = 65521
"""Length of the noise that replaces zeros. It is a prime, so that rows differ."""

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

RowPlace = tuple[int, tuple[int, ...]]
"""A row of a tensor: a dimension, and an index into it and optionally into the next dimension."""

RowsOf = Callable[[torch.Tensor, "torch.Tensor | None"], Iterable[RowPlace]]
"""A function that returns rows of a saved copy. The second argument contains the numbers of the
saved rows; it is None if the whole tensor was saved."""

_restores: Counter[int] = Counter()
"""Number of calls of ``Snapshot.restore_random`` by thread."""


def restores_elsewhere() -> int:
    """Return how many times other threads have restored the default random state."""
    here = threading.get_ident()
    return sum(count for thread, count in [*_restores.items()] if thread != here)


class _Saved(NamedTuple):
    name: str
    tensor: torch.Tensor
    place: Place
    memory: torch.Tensor
    """The bytes of the tensor if it is contiguous or overlaps itself, otherwise the tensor."""
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
    """Saved contents of tensors, and states of generators, including the default generators.

    ``limit`` is the maximum size of all copies in bytes; None means ``DEFAULT_LIMIT``. Small
    tensors are saved first. Above the limit, ``named`` tensors are hashed and ``optional`` tensors
    are skipped.
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
        self._varied: dict[int, tuple[torch.Tensor, torch.Tensor] | None] = {}
        """The original bits and a mask of the zeros of each varied copy, by address. The value is
        None if the copy has no zeros."""
        self._equal: set[int] = set()
        """The ``id`` of each tensor that is known to equal its copy."""
        self._versions: dict[int, int] = {}
        seen: set[int] = set()
        with torch.inference_mode():
            for needed, group in ((True, named), (False, optional)):
                tensors = {id(tensor): (name, tensor) for name, tensor in group}
                for key, (name, tensor) in sorted(tensors.items(), key=lambda item: _size(item[1])):
                    if key not in seen and has_place(tensor):
                        seen.add(key)
                        self._save(name, tensor, needed)

    @property
    def generators(self) -> list[torch.Generator]:
        return [generator for generator, _ in self._generators]

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

        A row number may index the first dimension, the largest dimension, or two adjacent
        dimensions whose product is not below the largest dimension (pages of slots). Rows of
        the last two kinds are not saved if they make up more than half of the tensor. Row numbers
        are distinct, and those out of range are ignored.
        """
        with torch.inference_mode():
            for saved in self._rows:
                self._put_back_zeros(saved.content.data_ptr())
                saved.memory.index_copy_(1, saved.numbers, saved.content)
            self._rows.clear()
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

    def _copies(self) -> Iterator[tuple[str, torch.Tensor, torch.Tensor, torch.Tensor | None]]:
        """Yield the name and the tensor of each saved part, with a view of its copy.

        If only rows are saved, they are the first dimension of the copy, and the last item contains
        their numbers. Copies of overlapping, quantized and lazily conjugated tensors are bytes.
        """
        for name, tensor, _, _, content, _ in self._saved:
            if content is not None and _is_saved_as_bytes(tensor):
                yield name, tensor, content, None
            elif content is not None:
                yield name, tensor, content.view(tensor.dtype).view(tensor.shape), None
        for name, tensor, _, numbers, content in self._rows:
            yield name, tensor, content.view(tensor.dtype).transpose(0, 1), numbers

    def _written(self, names: Container[str], tensor: torch.Tensor, name: str) -> bool:
        """Whether runs wrote ``tensor``: its name is in ``names``, or its version changed."""
        then = self._versions.get(id(tensor))
        return name in names or (then is not None and then != tensor._version)

    def disturb(self, names: Container[str], rows: RowsOf) -> None:
        """Change ``rows`` in the copies of written floating-point tensors until ``settle``.

        ``restore`` writes the changed copies. ``names`` adds written tensors whose version counter
        did not change.
        """
        with torch.inference_mode():
            for name, tensor, copy, numbers in self._copies():
                dtype = copy.dtype
                is_wide = dtype.is_floating_point and dtype.itemsize > 1  # 8-bit types lack kernels
                if is_wide and self._written(names, tensor, name):
                    for place in rows(copy, numbers):
                        row = row_at(copy, place)
                        self._disturbed.append((tensor, row, row.clone()))
                        self._equal.discard(id(tensor))
                        # The result stays a probability, and steps rarely write these numbers.
                        row.copy_(row * 0.5 + row.ge(0).to(dtype) * 0.74 - 0.37)

    def vary(self, names: Container[str]) -> tuple[bool, list[str]]:
        """Replace zeros in the copies of written floating-point tensors with noise below 1.

        Zeros would hide a wrong factor. ``restore`` writes the noise until ``end_cases``. Return
        whether a copy changed, and the names of other written tensors that are zero.
        """
        changed, constant = False, []
        with torch.inference_mode():
            for name, tensor, copy, _ in self._copies():
                address, dtype = copy.data_ptr(), copy.dtype
                if address in self._varied or not self._written(names, tensor, name):
                    continue
                self._varied[address] = None
                if not dtype.is_floating_point or dtype is torch.float4_e2m1fn_x2:
                    constant += [name] * (not torch.count_nonzero(_bits(copy)))
                    continue
                bits = _bits(copy)
                zeros = bits == 0
                if zeros.any():
                    at = tensor.data_ptr() // tensor.itemsize % _PERIOD  # the same in all views
                    noise = _noise(dtype, tensor.device).roll(-at)
                    noise = noise.repeat(-(-bits.numel() // _PERIOD))[: bits.numel()]
                    bits.copy_(bits.where(~zeros, noise.view(bits.shape)))
                    self._varied[address] = bits, zeros
                    self._equal.discard(id(tensor))
                    changed = True
        return changed, constant

    def _put_back_zeros(self, address: int) -> None:
        if varied := self._varied.pop(address, None):
            bits, zeros = varied
            bits.masked_fill_(zeros, 0)

    def settle(self) -> None:
        """Undo ``disturb``."""
        with torch.inference_mode():
            for tensor, row, before in reversed(self._disturbed):
                row.copy_(before)
                self._equal.discard(id(tensor))
        self._disturbed.clear()

    def end_cases(self) -> None:
        """Undo ``disturb`` and ``vary``, and restore the tensors and generators."""
        self.settle()
        with torch.inference_mode():
            for address in [*self._varied]:
                self._put_back_zeros(address)
        self._equal.clear()
        self.restore()

    def parts(self) -> list[Part]:
        """Return the saved parts: whole tensors, and rows of tensors above the limit."""
        with torch.inference_mode():
            now: list[torch.Tensor] = [
                _bytes_of(tensor) if _is_saved_as_bytes(tensor) else tensor.detach()
                for _, tensor, _, _, content, _ in self._saved
                if content is not None
            ]
            for saved in self._rows:
                rows = saved.memory.index_select(1, saved.numbers).view(saved.tensor.dtype)
                now.append(rows.transpose(0, 1))
            return [
                Part(name, tensor, current, copy, numbers)
                for current, (name, tensor, copy, numbers) in zip(now, self._copies(), strict=True)
            ]

    def changes(self) -> list[Part]:
        """Return the parts that differ from their copies. The device is read once."""
        parts = self.parts()
        with torch.inference_mode():
            flags = read(differs(part.saved, part.now) for part in parts)
        # Restoring a tensor may write to another tensor in the same storage.
        storages = Counter(saved.place[0].data_ptr() for saved in self._saved)
        self._equal = {
            id(part.tensor)
            for part, flag in zip(parts, flags, strict=True)
            if not flag and storages[part.tensor.untyped_storage().data_ptr()] == 1
        }
        return [part for part, flag in zip(parts, flags, strict=True) if flag]

    def generator_states(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return the current and the saved state of each generator except the default."""
        return [(generator.get_state(), state) for generator, state in self._generators]

    def require_places(self) -> None:
        """Raise CaptureError if the memory or the layout of a tensor changed."""
        for name, tensor, place, *_ in self._saved:
            if not is_at(tensor, place):
                raise CaptureError(
                    f"the step changes {name} in place from shape {tuple(place[2])} and strides "
                    f"{place[3]} to {describe(tensor)}, or replaces its memory (t_(), resize_(), "
                    f"set_(), ...). A replay would not. Change a view of the tensor instead: "
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
        self.restore_random()
        self.restore_contents()

    def restore_random(self) -> None:
        _restores[threading.get_ident()] += 1
        self._backend.set_rng_state(self.random)
        torch.set_rng_state(self._host_random)
        for generator, state in self._generators:
            generator.set_state(state)

    def restore_contents(self) -> None:
        for _, tensor, place, *_ in self._saved:
            if not is_at(tensor, place):
                with torch.inference_mode(tensor.is_inference()), torch.no_grad():
                    tensor.set_(*place)
        with torch.inference_mode():  # inference tensors may only be written in this mode
            for saved in self._saved:
                if saved.content is not None and id(saved.tensor) not in self._equal:
                    saved.memory.copy_(saved.content)
            for _, _, memory, numbers, content in self._rows:
                memory.index_copy_(1, numbers, content)
        self._equal.clear()  # Runs may write all tensors.

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


def _is_saved_as_bytes(tensor: torch.Tensor) -> bool:
    lazy = (tensor.is_conj() or tensor.is_neg()) and tensor.is_contiguous()
    # torch crashes if a quantized tensor is compared with a view of bytes.
    return lazy or tensor.is_quantized or overlaps_itself(tensor)


def row_at(tensor: torch.Tensor, place: RowPlace) -> torch.Tensor:
    """Return a view of a row of ``tensor``."""
    axis, indices = place
    for index in indices:
        tensor = tensor.select(axis, index)
    return tensor


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(_WORDS.get(tensor.itemsize, tensor.dtype))


@functools.lru_cache(maxsize=8)
def _noise(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return the bits of noise below 1."""
    generator, cpu = torch.Generator().manual_seed(0), torch.device("cpu")
    noise = torch.rand(_PERIOD, generator=generator, dtype=torch.float32, device=cpu)
    return _bits(noise.to(dtype)).to(device)


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
    """Whether two tensors of equal shape and dtype have equal bytes. The device compares them."""
    return not differs(one, other)


def differs(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return a bool on the device: whether two tensors differ in their dtype, shape or bytes."""
    if one.shape != other.shape or one.dtype is not other.dtype:
        return torch.ones((), dtype=torch.bool, device=one.device)
    words = _WORDS.get(one.itemsize, torch.uint8)
    plain = (t.resolve_conj().resolve_neg().contiguous().view(-1) for t in (one, other))
    left, right = (tensor.view(words) for tensor in plain)
    return left.ne(right).any()


def read(flags: Iterable[torch.Tensor]) -> list[bool]:
    """Return the values of bool tensors on devices; synchronize each device once."""
    flags = [*flags]
    values = dict[int, bool]()
    for device in {flag.device for flag in flags}:
        there = [index for index, flag in enumerate(flags) if flag.device == device]
        found = torch.stack([flags[index] for index in there]).tolist()
        values.update(zip(there, found, strict=True))
    return [values[index] for index in range(len(flags))]


def is_at(tensor: torch.Tensor, place: Place) -> bool:
    """Whether ``tensor`` has the memory and the layout of ``place``."""
    storage, *layout = place_of(tensor)
    return storage._cdata == place[0]._cdata and layout == [*place[1:]]
