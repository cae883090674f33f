"""Bucket sizes: the padded batch sizes for which a runner captures graphs.

Decode buckets count requests (``ByRequests``); all others count tokens (``ByTokens``). The default
buckets end with the maximum, so that every batch within the capacity has a bucket. Listed sizes are
used unchanged.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal

import attrs

from devgraph.api.config.phase import KEYS
from devgraph.api.errors import ConfigError, InputError, counted, whole
from devgraph.runners.decisions import Reason, Variant, canonical_variant
from devgraph.runners.slots import Size

Phase = Literal["decode", "prefill", "encoder"]
"""Kind of runner. Only the first two are phases of the mode configuration."""

# (first, last, step), last inclusive; None means unbounded. Serving engines use similar steps:
# buckets are dense where padding would be a large share of a step, and sparse where it is small.
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
"""Maximum capacity with default buckets, in multiples of the last step: 262,144 requests or
4,194,304 tokens."""


def default_buckets(phase: Phase, maximum: int, *, multiple_of: int = 1) -> Buckets:
    """Return the default buckets of a phase; the last one is ``maximum``.

    Every size is rounded up to a multiple of ``multiple_of``. Tensor parallelism with scattered
    tokens needs such sizes.

    Raises:
        ConfigError: There would be too many buckets, probably because of a mistyped capacity.
    """
    if phase not in _RANGES:
        raise ConfigError(f"{phase} buckets have no defaults; list them, such as [2048, 4096]")
    maximum = whole("the maximum", maximum, 1, ConfigError)
    multiple_of = whole("multiple_of", multiple_of, 1, ConfigError)
    step = _RANGES[phase][-1][2]
    if maximum > MOST_DEFAULTS * step:
        raise ConfigError(
            f"a capacity of {maximum} would have about {maximum // step} {phase} buckets by "
            f"default; list the buckets (buckets=[...]), or lower the capacity to at most "
            f"{MOST_DEFAULTS * step}"
        )
    sizes: set[int] = set()
    for first, last, step in _RANGES[phase]:
        stop = maximum if last is None else min(last, maximum)
        sizes.update(range(first, stop + 1, step))
    top = round_up(maximum, multiple_of)
    rounded = {round_up(size, multiple_of) for size in sizes}
    return Buckets(tuple(sorted({size for size in rounded if size < top} | {top})))


class Buckets(tuple[int, ...]):
    """An ascending, non-empty sequence of bucket sizes."""

    __slots__ = ()

    @classmethod
    def of(
        cls, sizes: Iterable[int] | None, *, phase: Phase, maximum: int, multiple_of: int = 1
    ) -> Buckets:
        """Return the given sizes, sorted and without duplicates; None means the defaults.

        Raises:
            ConfigError: A size is not positive, is above ``maximum``, or is not a multiple of
                ``multiple_of``.
            ConfigTypeError: A size is not an integer.
        """
        if sizes is None:
            return default_buckets(phase, maximum, multiple_of=multiple_of)
        maximum = whole("the maximum", maximum, 1, ConfigError)
        multiple_of = whole("multiple_of", multiple_of, 1, ConfigError)
        top = round_up(maximum, multiple_of)
        chosen = cls(KEYS["buckets"].read(sizes, f"{phase} buckets"))
        for size in chosen:
            if size > top:
                raise ConfigError(
                    f"{phase} bucket {size} is above the capacity of {maximum}; remove it or raise "
                    f"the capacity"
                )
            if size % multiple_of:
                raise ConfigError(
                    f"{phase} bucket {size} is not a multiple of align={multiple_of}; use "
                    f"{round_up(size, multiple_of)}"
                )
        return chosen

    @property
    def maximum(self) -> int:
        return self[-1]

    def at_least(self, rows: int) -> Iterator[int]:
        """Yield the buckets with room for ``rows``, smallest first."""
        yield from self[bisect.bisect_left(self, rows) :]

    def fitting(self, rows: int) -> int | None:
        """Return the smallest bucket with room for ``rows``, or None if all are too small."""
        return next(self.at_least(rows), None)

    def uncovered(self, capacity: int, max_padding: float) -> list[range]:
        """Return the sizes up to ``capacity`` that exceed all buckets or ``max_padding``."""
        gaps = []
        below = 0
        for size in self:
            gaps.append(range(below + 1, min(math.ceil(size / max_padding), capacity + 1)))
            below = size
        gaps.append(range(below + 1, capacity + 1))
        return [sizes for sizes in gaps if sizes]


def spans(sizes: Iterable[range]) -> str:
    """Return ranges of sizes as text: ``1 to 3, 5 and 9 to 16``."""
    *others, last = (f"{s[0]} to {s[-1]}" if len(s) > 1 else str(s[0]) for s in sizes)
    return f"{', '.join(others)} and {last}" if others else last


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


_AS_MANY_ROWS = "Check the numbers of rows in the slots of 'requests' and 'tokens'."


class ByTokens:
    """The rules for buckets that count tokens, for requests of different lengths."""

    counts = "tokens"

    def __init__(self, phase: Phase, requests: int, limit: int | None) -> None:
        self.phase: Phase = phase
        self.requests = requests
        self._limit = limit

    def padded(self, bucket: int, options: Mapping[str, Any]) -> Size:
        return Size(self.requests, bucket)

    def size(self, requests: int | None, tokens: int | None, options: Mapping[str, Any]) -> Size:
        """Return the size of a batch; if one number is None, it is derived from the other."""
        if tokens is None:
            raise InputError(f"{self.phase} needs the number of tokens: can_run(requests, tokens)")
        if requests is None:
            requests = 1 if tokens else 0
        elif not requests and tokens:
            raise InputError(
                f"the batch has {counted(tokens, 'token')} but no requests. {_AS_MANY_ROWS}"
            )
        return Size(requests, tokens)

    def some(self, rows: int, options: Mapping[str, Any], index: int = 0) -> Size:
        """Return the size of a batch with ``rows``; ``index`` varies the number of requests."""
        most = min(self.requests, rows)
        return Size(most if index == 1 else 1 + max(index - 1, 0) % most, rows)

    def variant(
        self, size: Size, options: Mapping[str, Any], declared: Mapping[Variant, Mapping[str, Any]]
    ) -> Variant | Reason:
        """Return the declared variant of a batch, or the reason why there is none."""
        variant = canonical_variant(options)
        return variant if variant in declared else Reason.UNKNOWN_VARIANT

    def fits(self, size: Size) -> bool:
        """Whether graphs have request slots for all requests of a batch."""
        return self._limit is None or size.requests <= self._limit


class ByRequests(ByTokens):
    """The rules for buckets that count requests, for requests of one width (tokens per request)."""

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
                    f"{counted(tokens, 'token')} cannot be divided into requests of {width} "
                    f"(variant {dict(options)}); run batches of mixed widths in a prefill runner"
                )
            requests = tokens // width
        elif tokens is None:
            tokens = requests * width
        elif "width" in options and tokens != requests * width:
            raise InputError(
                f"variant {dict(options)} needs requests of {width}, but the batch has "
                f"{Size(requests, tokens)}; leave width out to derive it from the batch"
            )
        elif tokens < requests:
            raise InputError(
                f"only {counted(tokens, 'token')} for {counted(requests, 'request')}, but every "
                f"request of a decode batch has at least one. {_AS_MANY_ROWS}"
            )
        if requests:
            width = tokens // requests if tokens % requests == 0 else None
        return attrs.evolve(super().size(requests, tokens, options), width=width)

    def variant(
        self, size: Size, options: Mapping[str, Any], declared: Mapping[Variant, Mapping[str, Any]]
    ) -> Variant | Reason:
        width = options.get("width", size.width)
        if width is None:
            return Reason.UNKNOWN_WIDTH
        variant = canonical_variant({**options, "width": width})
        if variant in declared:
            return variant
        others = {**options, "width": None}
        if any(dict(named) | {"width": None} == others for named in declared.values()):
            return Reason.UNKNOWN_WIDTH
        return Reason.UNKNOWN_VARIANT
