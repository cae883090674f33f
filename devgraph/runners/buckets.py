"""Bucket sizes: the padded batch sizes that a runner captures a graph for, and what they count.

Decode buckets count requests (``ByRequests``), all others count tokens (``ByTokens``). A list is
always ascending and free of duplicates. The defaults end with the maximum, so that no batch within
the capacity is left without one; sizes that somebody named are kept exactly.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal

import attrs

from devgraph.api.errors import ConfigError, ConfigTypeError, InputError, brief, whole
from devgraph.runners.decisions import Reason, Variant, canonical_variant
from devgraph.runners.slots import Size

Phase = Literal["decode", "prefill", "encoder"]
"""What a runner runs. The mode configuration has the first two; an encoder lists its budgets."""

# (first, last, step), last inclusive; None = without end. The steps are those that the serving
# engines of this field converged on: dense where a step is cheap, sparse where padding is.
_RANGES: dict[Phase, tuple[tuple[int, int | None, int], ...]] = {
    "decode": ((1, 1, 1), (2, 2, 1), (4, 12, 4), (16, 256, 8), (272, 511, 16), (512, None, 32)),
    "prefill": (
        (4, 32, 4),
        (48, 256, 16),
        (288, 512, 32),
        (576, 1024, 64),
        (1280, 4096, 256),
        (4608, None, 512),
    ),
}

MOST_DEFAULTS = 8192
"""Default buckets of a phase at most: those of 262,144 requests, or of 4,194,304 tokens."""


def default_buckets(phase: Phase, maximum: int, *, multiple_of: int = 1) -> Buckets:
    """Return the default buckets of a phase up to ``maximum``, which is always the last one.

    With ``multiple_of`` every size is rounded up to a multiple of it (tensor parallelism that
    scatters tokens needs this); the last bucket is then the smallest multiple that holds
    ``maximum``.

    Raises:
        ConfigError: they would be more graphs than anybody captures, of a size mistyped.
    """
    if phase not in _RANGES:
        raise ConfigError(f"{phase} buckets have no defaults: list them, such as [2048, 4096]")
    maximum = whole("the maximum", maximum, 1, ConfigError)
    multiple_of = whole("multiple_of", multiple_of, 1, ConfigError)
    step = _RANGES[phase][-1][2]
    if maximum > MOST_DEFAULTS * step:
        raise ConfigError(
            f"a capacity of {maximum} would have about {maximum // step} {phase} buckets by "
            f"default; name them (buckets=[...]), or lower the capacity to at most "
            f"{MOST_DEFAULTS * step}"
        )
    sizes: set[int] = set()
    for first, last, step in _RANGES[phase]:
        stop = maximum if last is None else min(last, maximum)
        sizes.update(range(first, stop + 1, step))
    top = _round_up(maximum, multiple_of)
    rounded = {_round_up(size, multiple_of) for size in sizes}
    return Buckets(tuple(sorted({size for size in rounded if size < top} | {top})))


class Buckets(tuple[int, ...]):
    """An ascending, non-empty sequence of bucket sizes that answers "which one holds n rows?"."""

    __slots__ = ()

    @classmethod
    def of(
        cls, sizes: Iterable[int] | None, *, phase: Phase, maximum: int, multiple_of: int = 1
    ) -> Buckets:
        """Normalise what a user asked for: None means the defaults of the phase.

        Order and duplicates are put right, and nothing is added. A size that is not a positive
        integer, is over ``maximum`` or is no multiple of ``multiple_of`` raises ``ConfigError``
        (``ConfigTypeError`` for the wrong kind) that names the value.
        """
        if sizes is None:
            return default_buckets(phase, maximum, multiple_of=multiple_of)
        maximum = whole("the maximum", maximum, 1, ConfigError)
        multiple_of = whole("multiple_of", multiple_of, 1, ConfigError)
        top = _round_up(maximum, multiple_of)
        if isinstance(sizes, (str, bytes)) or not isinstance(sizes, Iterable):
            raise ConfigTypeError(
                f"{phase} buckets must be a list of integers such as [1, 2, 8], got {brief(sizes)}"
            )
        chosen = {_bucket(size, phase, maximum, multiple_of, top) for size in sizes}
        if not chosen:
            raise ConfigError(
                f"{phase} buckets are an empty list: name at least one size, or switch graphs off "
                f"with the policy 'disabled'"
            )
        return cls(tuple(sorted(chosen)))

    @property
    def maximum(self) -> int:
        """The largest bucket."""
        return self[-1]

    def at_least(self, rows: int) -> Iterator[int]:
        """Yield the buckets that hold ``rows``, smallest first."""
        yield from self[bisect.bisect_left(self, rows) :]

    def fitting(self, rows: int) -> int | None:
        """Return the smallest bucket that holds ``rows``, or None when all are too small."""
        at = bisect.bisect_left(self, rows)
        return self[at] if at < len(self) else None

    def uncovered(self, capacity: int, max_padding: float) -> list[range]:
        """Return the sizes up to ``capacity`` that no bucket holds with so little padding."""
        found = []
        below = 0
        for size in self:
            found.append(range(below + 1, min(math.ceil(size / max_padding), capacity + 1)))
            below = size
        found.append(range(below + 1, capacity + 1))
        return [sizes for sizes in found if sizes]


def spans(sizes: Iterable[range]) -> str:
    """Return ranges of sizes for people: ``1 to 3, 5 and 9 to 16``."""
    *others, last = (f"{one[0]} to {one[-1]}" if len(one) > 1 else str(one[0]) for one in sizes)
    return f"{', '.join(others)} and {last}" if others else last


def _bucket(size: object, phase: Phase, maximum: int, multiple_of: int, top: int) -> int:
    value = whole(f"a {phase} bucket", size, 1, ConfigError)
    if value > top:
        raise ConfigError(
            f"{phase} bucket {value} is over the capacity of {maximum}: remove it or raise the "
            f"capacity"
        )
    if value % multiple_of:
        raise ConfigError(
            f"{phase} bucket {value} is no multiple of {multiple_of}, which the alignment asks for"
        )
    return value


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


_AS_MANY_ROWS = "Give the slots of 'requests' and 'tokens' as many rows as the batch has"


class ByTokens:
    """Requests differ in length, and buckets count tokens.

    Args:
        phase: for messages.
        requests: the request slots of a graph.
        limit: the most requests of a batch in a graph; None where graphs do not depend on them.
    """

    counts = "tokens"

    def __init__(self, phase: Phase, requests: int, limit: int | None) -> None:
        self.phase: Phase = phase
        self.requests = requests
        self._limit = limit

    def padded(self, bucket: int, options: Mapping[str, Any]) -> Size:
        """Return the size of the graph of a bucket."""
        return Size(self.requests, bucket)

    def size(self, requests: int | None, tokens: int | None, options: Mapping[str, Any]) -> Size:
        """Return the size of a real batch, of which one number may be None: unknown.

        Raises:
            InputError: the numbers do not go together, or one is missing.
        """
        if tokens is None:
            raise InputError(f"{self.phase} needs the number of tokens: can_run(requests, tokens)")
        if requests is None:
            requests = 1 if tokens else 0
        elif not requests and tokens:
            raise InputError(f"{tokens} tokens are of no request. {_AS_MANY_ROWS}")
        return Size(requests, tokens)

    def some(self, rows: int, options: Mapping[str, Any], index: int = 0) -> Size:
        """Return the size of some batch with so many rows of a bucket; ``index`` varies it."""
        return Size(1 + index % min(self.requests, rows), rows)

    def variant(
        self, size: Size, options: Mapping[str, Any], declared: Mapping[Variant, Mapping[str, Any]]
    ) -> Variant | Reason:
        """Return the declared variant of a batch, or why there is none."""
        variant = canonical_variant(options)
        return variant if variant in declared else Reason.UNKNOWN_VARIANT

    def fits(self, size: Size) -> bool:
        """Whether graphs have request slots for all requests of a batch."""
        return self._limit is None or size.requests <= self._limit


class ByRequests(ByTokens):
    """All requests of a batch have as many tokens, the width, and buckets count requests."""

    counts = "requests"

    def padded(self, bucket: int, options: Mapping[str, Any]) -> Size:
        return self.some(bucket, options)

    def some(self, rows: int, options: Mapping[str, Any], index: int = 0) -> Size:
        width = options.get("width", 1)
        return Size(rows, rows * width, width)

    def size(self, requests: int | None, tokens: int | None, options: Mapping[str, Any]) -> Size:
        width = options.get("width", 1)
        if requests is None:
            assert tokens is not None
            if tokens % width:
                raise InputError(
                    f"{tokens} tokens are no whole number of requests of {width} tokens (variant "
                    f"{dict(options)}); batches with mixed widths are prefill"
                )
            requests = tokens // width
        elif tokens is None:
            tokens = requests * width
        elif tokens < requests:
            raise InputError(
                f"{requests} requests have only {tokens} tokens; every request of a decode batch "
                f"has at least one. {_AS_MANY_ROWS}"
            )
        if requests:
            width = tokens // requests if tokens % requests == 0 else None
        return attrs.evolve(super().size(requests, tokens, options), width=width)

    def variant(
        self, size: Size, options: Mapping[str, Any], declared: Mapping[Variant, Mapping[str, Any]]
    ) -> Variant | Reason:
        width = options.get("width", size.width)
        if width is None or size.tokens != size.requests * width:
            return Reason.UNKNOWN_WIDTH
        variant = canonical_variant({**options, "width": width})
        if variant in declared:
            return variant
        others = {**options, "width": None}
        if any(dict(named) | {"width": None} == others for named in declared.values()):
            return Reason.UNKNOWN_WIDTH
        return Reason.UNKNOWN_VARIANT
