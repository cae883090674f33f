"""EncoderRunner: items of different lengths (images, audio) packed into token budgets."""

from __future__ import annotations

import bisect
import contextlib
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs
import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from devgraph.api.config.phase import count
from devgraph.api.errors import (
    AgreementError,
    ConfigError,
    ConfigTypeError,
    InputError,
    InputTypeError,
    brief,
    note,
)
from devgraph.runners.batch import Batch
from devgraph.runners.buckets import Buckets, ByTokens
from devgraph.runners.decisions import canonical_variant
from devgraph.runners.options import Options, RunnerOptions
from devgraph.runners.outputs import OutputStore
from devgraph.runners.ranks import RankGroup, store_of
from devgraph.runners.runner import Runner
from devgraph.runners.slots import ROW_PER_TOKEN, InputSlot, OutputSlot, Pad, Size, check_slots

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from typing_extensions import Unpack

_TRIED = 4  # number of budgets, from the largest, for which packing is tried

_ENCODED = "encoded"
"""Tag under which ranks of ``data_parallel`` report that their outputs are ready."""

_TIMEOUT_S = 1800.0
"""Timeout of a report in seconds. It is long, because a rank may have to capture graphs first."""

_ITEM_IDS = InputSlot("item_ids", ("tokens",), torch.int32, pad=Pad.fill(-1))
_OFFSETS = InputSlot("offsets", ("requests+1",), torch.int32, pad=Pad.last())
_BY_ITEM = ("tokens", "requests")


class EncoderRunner(Runner):
    """A runner for encoders: items of different lengths, packed into one graph per token budget.

    The items of a pack occupy adjacent rows, and attention must not cross their borders.
    ``batch.item_ids`` (int32) contains the item number of each row, and -1 in padding.
    ``batch.offsets`` (int32) contains the first row of each item and the end of the last item. A
    graph has ``max_items + 1`` offsets; unused offsets repeat the last used offset. Items take the
    place of requests: ``batch.requests`` is the maximum number of items in a pack.

    ``run`` packs by first fit, longest item first, and chooses the budget with the fewest padded
    rows. It never splits an item. An item above the largest budget runs alone and eagerly. To
    capture graphs of the exact item sizes, list a budget for each size, and set ``max_items=1``,
    ``capture="lazy"``, ``max_padding=1`` and ``max_graphs``.

    Args:
        forward: Receives a ``Batch`` of packed rows and returns tensors with a row per token or
            per item. Padded rows must not affect other rows.
        inputs: The slots of an item's data, with a dim ``"tokens"``, or ``"requests"`` for one row
            per item. Pass in ``bound`` the tensors that all items use.
        budgets: Rows of the graphs. ``buckets`` of the configuration replaces them, and ``max_bs``
            limits them.
        max_items: Maximum number of items in a pack. ``max_requests`` of the configuration limits
            this number.
        outputs: An ``OutputSlot`` for all returned tensors, or a tree of slots like the result.
        data_parallel: A ``torch.distributed`` group whose ranks divide the items by tokens. Each
            rank has all weights, calls ``run`` with the same items, and receives every output, or
            an error that names a failed rank. The group must support tensors of the runner's
            device, and its ranks must create their encoders in the same order.
        **options: See ``Options``. The ranks of ``group`` run every pack together.

    Raises:
        ConfigError: The declaration is invalid.
        CapabilityError: The policy is not available.

    Example::

        encoder = EncoderRunner(
            lambda batch: vision(batch.patches, batch.item_ids),
            [InputSlot("patches", ("tokens", 588), torch.float16, pad=Pad.zero())],
            budgets=[1024, 4096],
            max_items=16,
        )
        encoder.capture()
        features = encoder.run([{"patches": patches} for patches in images])
    """

    def __init__(
        self,
        forward: Callable[[Batch], Any],
        inputs: Sequence[InputSlot],
        *,
        budgets: Sequence[int],
        max_items: int,
        outputs: Any = ROW_PER_TOKEN,
        data_parallel: ProcessGroup | None = None,
        **options: Unpack[RunnerOptions],
    ) -> None:
        sizes = Buckets.of(budgets, phase="encoder", maximum=2**63)
        capacity = sizes.maximum
        chosen = Options.of("encoder", capacity, options, EncoderRunner)
        settings = chosen.config
        if chosen.state:
            raise ConfigError("an encoder runner keeps no state between runs; leave state= out")
        most = count(max_items, "max_items")
        most = min(most, settings.max_requests or most)
        if settings.buckets is None:
            top = settings.max_bs or capacity
            bounded = tuple(sorted({min(size, top) for size in sizes}))
            settings = attrs.evolve(settings, buckets=bounded, explicit=settings.explicit)
            chosen = attrs.evolve(chosen, config=settings)
        own = (_ITEM_IDS, _OFFSETS)
        slots = check_slots(inputs, own)
        self._item_slots = [n for n, s in slots.items() if s.real is None and s not in own]
        _check_by_item([slots[name] for name in self._item_slots], outputs)
        self._shares = None if data_parallel is None else _Shares(data_parallel)
        super().__init__(
            slots=slots,
            function=forward,
            outputs=outputs,
            options=chosen,
            capacity=capacity,
            counting=ByTokens("encoder", most, most),
            implied=_even_layout,
        )

    def run(  # type: ignore[override]  # takes items instead of a batch
        self,
        items: Sequence[Mapping[str, Any]],
        *,
        host_args: Mapping[str, Any] | None = None,
        variant: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Encode ``items`` and return the output of each.

        Later runs do not overwrite outputs. Outputs of one pack are views of one copy, which is
        freed with the last of these outputs.

        Args:
            items: For each item a mapping of slot names to tensors with the rows of the item, on
                the device or on the host.
            host_args: A value for every declared host argument. All packs receive the same values.
                ``prepare`` can return values that depend on the pack.
            variant: As for ``can_run``.

        Returns:
            For each item the step's result, with the item's rows only.

        Raises:
            InputError, InputTypeError, HostArgumentError: The data is invalid; a note names the
                item.
            AgreementError: Another rank of ``data_parallel`` failed, or received other items.
            StateError, DeviceGraphError, DeviceLost: As in ``Runner.run``.
        """
        shares, results = self._shares, dict[int, Any]()
        with contextlib.nullcontext() if shares is None else shares.ranks.reporting(_ENCODED):
            data = self._admitted(items)
            lengths = [length for length, _ in data]
            options = self.graphs.checked_variant(variant)
            mine = range(len(data)) if shares is None else shares.of(lengths)[shares.rank]
            if not data:  # An empty run is counted.
                self._run_pack((), data, host_args, options)
            for pack in self._packs(mine, lengths, options):
                out = self._run_pack(pack, data, host_args, options)
                parts = self._step.outputs.by_item(out, [lengths[item] for item in pack])
                results.update(zip(pack, parts, strict=True))
        if shares is not None:
            return shares.gathered(results, lengths, self._step.outputs)
        return [results[item] for item in range(len(data))]

    def _admitted(
        self, items: Sequence[Mapping[str, Any]]
    ) -> list[tuple[int, dict[str, torch.Tensor]]]:
        """Return the rows and the checked data of each item."""
        if isinstance(items, Mapping | torch.Tensor) or not isinstance(items, Iterable):
            raise InputTypeError(
                f"run of an encoder takes a list of items, each a mapping of slot names to "
                f"tensors, got {brief(items)}"
            )
        self._require_open("run")
        arena, slots = self._step.inputs, self._item_slots
        lead = next(name for name in slots if arena.slots[name].dims[0] == "tokens")
        admitted = []
        for index, item in enumerate(items):
            try:
                arena.require(item, slots)
                rows = next(iter(getattr(item[lead], "shape", ())), 0)
                size = Size(1, rows)
                data = {n: arena.admit_one(arena.slots[n], item[n], size) for n in slots}
                if not rows:
                    raise InputError(f"input {lead!r} of an item has no rows")
            except (InputError, InputTypeError) as error:
                note(error, f"in item {index} of {self._name}")
                raise
            admitted.append((rows, data))
        return admitted

    def _packs(
        self, mine: Sequence[int], lengths: Sequence[int], options: Mapping[str, Any]
    ) -> list[list[int]]:
        variant = canonical_variant(options)
        lost = {g.key.bucket for g in self.graphs if g.dropped and g.key.variant == variant}
        kept = [size for size in self.buckets if size not in lost] or self.buckets
        most = self.graphs.counting.requests
        return packed(mine, lengths, kept, most, max_padding=self._config.max_padding)

    def _run_pack(
        self,
        pack: Sequence[int],
        data: Sequence[tuple[int, Mapping[str, torch.Tensor]]],
        host_args: Mapping[str, Any] | None,
        options: Mapping[str, Any],
    ) -> Any:
        lengths = [data[item][0] for item in pack]
        decision = None
        if self._ranks.size > 1:  # Agree before anything that can fail on this rank only.
            decision = self.agree(self.can_run(len(pack), sum(lengths), options))
        inputs: Mapping[str, torch.Tensor] = self._step.inputs.views(Size(0, 0))
        if pack:
            rows = {n: self._joined([data[i][1][n] for i in pack]) for n in self._item_slots}
            inputs = {**rows, **_layout(lengths)}
        return super().run(
            inputs, host_args=host_args, variant=options, decision=decision, clone=True
        )

    def _joined(self, rows: list[torch.Tensor]) -> torch.Tensor:
        if len(rows) == 1:
            return rows[0]
        if len({tensor.device for tensor in rows}) > 1:
            rows = [tensor.to(self.backend.device, non_blocking=True) for tensor in rows]
        return torch.cat(rows)


def _layout(lengths: Sequence[int]) -> dict[str, torch.Tensor]:
    """Return the item numbers and offsets of a pack, on the host."""
    counts = torch.tensor(lengths, dtype=torch.int64, device="cpu")
    ids = torch.arange(len(lengths), dtype=torch.int32, device="cpu").repeat_interleave(counts)
    offsets = [0, *itertools.accumulate(lengths)]
    return {
        _ITEM_IDS.name: ids,
        _OFFSETS.name: torch.tensor(offsets, dtype=torch.int32, device="cpu"),
    }


def _even_layout(size: Size) -> dict[str, torch.Tensor]:
    """Return the item numbers and offsets of a pack of ``size`` with items of similar lengths."""
    length, longer = divmod(size.tokens, size.requests)
    return _layout([length + (item < longer) for item in range(size.requests)])


def _check_by_item(slots: Sequence[InputSlot], outputs: Any) -> None:
    """Raise ConfigError for slots and outputs whose rows do not belong to items."""
    dims = [slot.dims[0] if slot.axis == 0 else None for slot in slots]
    for slot, dim in zip(slots, dims, strict=True):
        if dim not in _BY_ITEM:
            raise ConfigError(
                f"input slot {slot.name!r} of an encoder has dims {slot.dims}, but the first must "
                f"be 'tokens', or 'requests' for one row per item. Pass data of all items in bound="
            )
    if "tokens" not in dims:
        raise ConfigError("an encoder runner needs an input slot with a dim 'tokens'")
    for slot in pytree.tree_leaves(outputs):
        if isinstance(slot, OutputSlot) and slot.rows not in _BY_ITEM:
            raise ConfigError(
                f"an output of an encoder has rows={slot.rows!r}, but must have rows of items: "
                f"declare rows='tokens' or rows='requests'"
            )


def packed(
    items: Sequence[int],
    lengths: Sequence[int],
    budgets: Sequence[int],
    max_items: int,
    *,
    max_padding: float,
) -> list[list[int]]:
    """Divide ``items`` into packs that each fit into a budget.

    For each of the largest budgets, try first fit, longest item first. The best packing has the
    fewest packs whose padding exceeds ``max_padding``, then the fewest rows. If there are still
    such packs, also try to divide the items evenly. An item above the largest budget is packed
    alone.
    """
    most = budgets[-1]
    order = sorted(items, key=lambda item: -lengths[item])
    alone = list(itertools.takewhile(lambda item: lengths[item] > most, order))
    rest = order[len(alone) :]

    def cost(packs: list[list[int]]) -> tuple[int, int, int]:
        rows = [sum(lengths[item] for item in pack) for pack in packs]
        sizes = [budgets[bisect.bisect_left(budgets, count)] for count in rows]
        eager = sum(size > max_padding * count for size, count in zip(sizes, rows, strict=True))
        return eager, sum(sizes), len(packs)

    def fitted(budget: int, even: int = 0) -> list[list[int]]:
        packs: list[list[int]] = [[] for _ in range(even)]
        room = [budget] * even
        for item in rest:
            fits = (i for i in range(len(packs)) if room[i] >= lengths[item])
            free = (i for i in fits if len(packs[i]) < max_items)
            index = max(free, key=room.__getitem__, default=None) if even else next(free, None)
            if index is None:
                index = len(packs)
                packs.append([])
                room.append(budget)
            packs[index].append(item)
            room[index] -= lengths[item]
        return packs

    usable = [budget for budget in budgets[-_TRIED:] if rest and lengths[rest[0]] <= budget]
    tried = {budget: fitted(budget) for budget in usable}
    best = min(tried.values(), key=cost, default=[])
    if cost(best)[0]:
        evenly = (fitted(budget, len(packs)) for budget, packs in tried.items())
        best = min([best, *evenly], key=cost)
    return sorted([*([item] for item in alone), *map(sorted, filter(None, best))])


class _Shares:
    """The division of items among the ranks of a ``data_parallel`` group."""

    def __init__(self, group: ProcessGroup) -> None:
        from torch._C._distributed_c10d import PrefixStore

        if not isinstance(group, dist.ProcessGroup):
            raise ConfigTypeError(
                f"data_parallel must be a process group of torch.distributed, got {brief(group)}"
            )
        self._group = group
        self.rank, self._size = dist.get_rank(group), dist.get_world_size(group)
        store = store_of(group)
        number = store.add(f"devgraph/encoders of {self.rank}", 1)
        own = PrefixStore(f"devgraph/encoder {number}", store)
        self.ranks = RankGroup(own, self.rank, size=self._size, timeout_s=_TIMEOUT_S)

    def of(self, lengths: Sequence[int]) -> list[list[int]]:
        """Return the items of each rank: longest first, each to the rank with the fewest tokens.

        If there are fewer items than ranks, the remaining ranks encode the shortest item too,
        because they need an output to know its shapes.
        """
        shares: list[list[int]] = [[] for _ in range(self._size)]
        tokens = [0] * self._size
        order = sorted(range(len(lengths)), key=lambda item: -lengths[item])
        for item in order:
            rank = tokens.index(min(tokens))
            shares[rank].append(item)
            tokens[rank] += lengths[item]
        return [share or order[-1:] for share in shares]

    def gathered(
        self, own: Mapping[int, Any], lengths: Sequence[int], outputs: OutputStore
    ) -> list[Any]:
        """Return the output of every item; the ranks exchange each tensor with one all-gather."""
        texts = self.ranks.gather(_ENCODED, f"has items of {lengths} rows", forget=True)
        odd = [rank for rank, text in enumerate(texts) if text != texts[self.rank]]
        if odd:
            # The collective would hang or mix the bytes of different items.
            raise AgreementError(
                f"rank {odd[0]} {texts[odd[0]]}, but rank {self.rank} {texts[self.rank]}; pass the "
                f"same items on all ranks"
            )
        if not lengths:
            return []
        shares = self.of(lengths)
        mine = shares[self.rank]
        sizes = [Size(1, length) for length in lengths]
        layout = outputs.layout_of(own[mine[0]], sizes[mine[0]])
        flat = {item: pytree.tree_leaves(own[item]) for item in mine}
        leaves: list[list[Any]] = [[None] * len(layout.leaves) for _ in lengths]
        for index, leaf in enumerate(layout.leaves):
            if leaf is None:
                continue
            counts = [leaf.nbytes_for(size) for size in sizes]
            most = max(sum(counts[item] for item in share) for share in shares)
            data = torch.cat([flat[item][index].reshape(-1) for item in mine]).view(torch.uint8)
            sent = F.pad(data, (0, most - len(data)))  # All transports can send bytes.
            received = [torch.empty_like(sent) for _ in shares]
            dist.all_gather(received, sent, group=self._group)
            for share, block in zip(shares, received, strict=True):
                start = 0
                for item in share:
                    part, start = block[start : start + counts[item]], start + counts[item]
                    leaves[item][index] = part.view(leaf.dtype).view(leaf.shape_for(sizes[item]))
        return [pytree.tree_unflatten(parts, layout.spec) for parts in leaves]
