"""What buckets count, and how large batches are: in this decode differs from all other phases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from devgraph.api.errors import InputError
from devgraph.runners.buckets import Phase
from devgraph.runners.decisions import Reason, Variant, canonical_variant
from devgraph.runners.slots import Size


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
        return Size((1 if tokens else 0) if requests is None else requests, tokens)

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
        elif 0 < tokens < requests:
            raise InputError(
                f"{requests} requests have only {tokens} tokens; every request of a decode batch "
                f"has at least one. Give the slots of 'requests' and 'tokens' as many rows as the "
                f"batch has"
            )
        uniform = requests and tokens % requests == 0
        return Size(requests, tokens, tokens // requests if uniform else None)

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
