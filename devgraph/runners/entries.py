"""The graphs of a runner: one entry per variant and bucket, captured or not."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from devgraph.api.capture import Captured
from devgraph.api.errors import ConfigError, ConfigTypeError, InputTypeError
from devgraph.runners.buckets import Buckets
from devgraph.runners.decision import Decision, GraphKey, Reason, Variant
from devgraph.runners.slots import Size
from devgraph.runners.stats import BucketStats

__all__ = ["Entries", "Entry", "canonical_variant", "check_variants"]


class Entry:
    """What is known of one graph.

    ``reason`` says why the graph cannot be used while ``captured`` is None; ``dropped`` whether
    that is for good (until the next ``invalidate``).
    """

    def __init__(self, key: GraphKey, size: Size, options: Mapping[str, Any]) -> None:
        self.key = key
        self.size = size
        self.options = options
        """The variant as the engine wrote it."""
        self.captured: Captured | None = None
        self.epoch: Hashable = None
        """The weights epoch of the capture."""
        self.reason = Reason.NOT_CAPTURED
        self.detail = ""
        self.dropped = False
        self.warm = 0
        """Warm-up runs that the first look at the outputs already was."""
        self.wants = 0
        """Steps that ran eagerly because the graph was not captured yet."""
        self.hits = 0
        self.real_rows = 0
        self.bytes = 0
        self.seconds = 0.0

    def drop(self, reason: Reason, detail: str) -> None:
        """Give the graph up, with the reason that steps which wanted it will count."""
        self.close()
        self.reason, self.detail, self.dropped = reason, detail, True

    def forget(self, reason: Reason, detail: str) -> None:
        """Close the graph; it may be captured again."""
        self.close()
        self.reason, self.detail, self.dropped, self.wants = reason, detail, False, 0

    def close(self) -> None:
        """Free the graph. Idempotent."""
        captured, self.captured = self.captured, None
        self.bytes = 0
        if captured is not None:
            captured.close()

    @property
    def state(self) -> str:
        if self.captured is not None:
            return "captured"
        return self.reason.value if self.dropped else "pending"

    def stats(self) -> BucketStats:
        return BucketStats(
            key=str(self.key),
            state=self.state,
            hits=self.hits,
            real_rows=self.real_rows,
            padded_rows=self.hits * self.key.bucket - self.real_rows,
            bytes=self.bytes,
            capture_seconds=self.seconds,
        )


class Entries:
    """All graphs of a runner, and the choice of one for a batch.

    Args:
        variants: the declared variants.
        buckets: the sizes.
        sizes: size of a bucket under a variant.
        max_padding: the most times its rows that a batch may be padded to.
    """

    def __init__(
        self,
        variants: Mapping[Variant, Mapping[str, Any]],
        buckets: Buckets,
        sizes: Mapping[GraphKey, Size],
        max_padding: float,
    ) -> None:
        self.buckets = buckets
        self.variants = dict(variants)
        self._max_padding = max_padding
        self._by_key = {key: Entry(key, size, variants[key.variant]) for key, size in sizes.items()}
        self._order = sorted(
            self._by_key.values(), key=lambda e: (e.size.tokens, e.size.requests), reverse=True
        )

    def __iter__(self) -> Iterator[Entry]:
        """Iterate largest first."""
        return iter(self._order)

    def __len__(self) -> int:
        return len(self._order)

    def __getitem__(self, key: GraphKey) -> Entry:
        return self._by_key[key]

    def get(self, key: GraphKey | None) -> Entry | None:
        return None if key is None else self._by_key.get(key)

    @property
    def captured(self) -> list[Entry]:
        return [entry for entry in self._order if entry.captured is not None]

    @property
    def pending(self) -> list[Entry]:
        """What may still be captured, largest first."""
        return [e for e in self._order if e.captured is None and not e.dropped]

    def largest(self, variant: Variant) -> Entry:
        return self._by_key[GraphKey(variant, self.buckets.maximum)]

    def choose(self, variant: Variant, rows: int) -> Decision:
        """Return the decision for a batch of ``rows`` rows of a declared variant.

        A bucket that was dropped lets its batches use the next larger graph, within the padding
        factor. One that is only not captured yet does not: its batches are what gets it captured.
        """
        exact = self.buckets.fitting(rows)
        if exact is None:
            return Decision.eager(Reason.OVER_LARGEST_BUCKET)
        wanted = self._by_key[GraphKey(variant, exact)]
        if exact > self._max_padding * rows:
            return Decision.eager(Reason.PADDING, wanted.key)
        if wanted.captured is not None:
            return Decision.graph(wanted.key)
        if wanted.dropped:
            for bucket in self.buckets.at_least(exact + 1):
                if bucket > self._max_padding * rows:
                    break
                if self._by_key[GraphKey(variant, bucket)].captured is not None:
                    return Decision.graph(GraphKey(variant, bucket))
        return Decision.eager(wanted.reason, wanted.key)


def canonical_variant(options: Mapping[str, Any]) -> Variant:
    """Return the form of a variant that keys use; InputTypeError if it cannot be a key."""
    if not isinstance(options, Mapping):
        raise InputTypeError(f"a variant is a mapping such as {{'lora': True}}, got {options!r}")
    items = [(k, v) for k, v in options.items() if not (k == "width" and v == 1)]
    variant = tuple(sorted(items, key=lambda item: item[0]))
    try:
        hash(variant)
    except TypeError:
        raise InputTypeError(
            f"variant {dict(options)}: values are part of the graph key and must be hashable"
        ) from None
    return variant


def check_variants(
    variants: Sequence[Mapping[str, Any]], *, with_width: bool
) -> dict[Variant, Mapping[str, Any]]:
    """Return the declared variants by canonical form.

    Raises:
        ConfigError: no variant, a duplicate, a bad ``width``, or a ``width`` where requests differ
            in length. ``ConfigTypeError`` for no mapping. InputTypeError: it cannot be a key.
    """
    found: dict[Variant, Mapping[str, Any]] = {}
    if isinstance(variants, str | Mapping) or not isinstance(variants, Iterable):
        raise ConfigTypeError(
            f"variants is a list of mappings such as [{{}}, {{'lora': True}}], got {variants!r}"
        )
    for options in variants:
        if not isinstance(options, Mapping):
            raise ConfigTypeError(f"a variant is a mapping such as {{'lora': True}}: {options!r}")
        if not all(isinstance(name, str) for name in options):
            raise ConfigTypeError(f"variant {dict(options)}: names must be strings")
        width = options.get("width", 1)
        if isinstance(width, bool) or not isinstance(width, int) or width < 1:
            raise ConfigError(f"variant {dict(options)}: width must be a positive int")
        if "width" in options and not with_width:
            raise ConfigError(
                f"variant {dict(options)}: width is for decode; prefill requests differ in length"
            )
        variant = canonical_variant(options)
        if variant in found:
            raise ConfigError(f"variant {dict(options)} is declared twice")
        found[variant] = options
    if not found:
        raise ConfigError("variants is empty; [{}] declares the one without options")
    return found
