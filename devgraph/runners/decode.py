"""DecodeRunner: steps in which every request has the same number of tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from devgraph.api.backend import Backend
from devgraph.api.config.model import PhaseConfig, phase_config
from devgraph.api.errors import ConfigError, InputError
from devgraph.api.pool import Pool
from devgraph.api.registry import get_backend
from devgraph.runners.base import Runner
from devgraph.runners.batch import Batch
from devgraph.runners.buckets import Buckets
from devgraph.runners.decision import GraphKey, Reason, Variant
from devgraph.runners.entries import Entry, canonical_variant, check_variants
from devgraph.runners.settings import Options, RunnerOptions
from devgraph.runners.slots import ROW_PER_REQUEST, InputSlot, Size, check_slots, whole

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["DecodeRunner"]


class DecodeRunner(Runner):
    """Runs decode steps: ``requests`` requests of ``width`` tokens each, in a graph per bucket.

    Buckets count requests. A graph of bucket b sees b requests and b * width tokens in every
    slot; rows beyond the real ones hold the slots' pad values.

    Args:
        forward: the step; receives a ``Batch`` and returns tensors. It must leave state alone in
            padded rows, and may be called any number of times on pad values alone.
        inputs: the input slots.
        outputs: an ``OutputSlot`` for all returned tensors, or a tree of them as returned.
        variants: what besides the bucket distinguishes graphs; ``width`` is tokens per request.
        host_args: host arguments and their values at capture (or ``HostSlot``s).
        config: a ``PhaseConfig``, a policy name, or a mapping of configuration keys; ``full`` by
            default.
        backend: a backend or its name.
        pool: graph memory to share with other runners; a new one by default.
        group: the ranks that run each step together: None, a ``RankGroup`` or a gloo group.
        max_requests: the most requests of a step.
        **options: see ``Options``: name, strict, debug, bound, weights_epoch, reset_state,
            idle_dummy, progress.

    Raises:
        ConfigError: something in the declaration cannot work.
        CapabilityError: the policy is not available.

    Example::

        decode = DecodeRunner(
            lambda batch: model(batch.input_ids),
            [InputSlot("input_ids", ("tokens",), torch.int64, pad=Pad.zero())],
            max_requests=64,
        )
        decode.capture()
        logits = decode.run({"input_ids": ids})
    """

    phase = "decode"

    def __init__(
        self,
        forward: Callable[[Batch], Any],
        inputs: Sequence[InputSlot],
        *,
        outputs: Any = ROW_PER_REQUEST,
        variants: Sequence[Mapping[str, Any]] = ({},),
        host_args: Mapping[str, Any] | None = None,
        config: PhaseConfig | str | Mapping[str, Any] | None = None,
        backend: str | Backend = "auto",
        pool: Pool | None = None,
        group: Any = None,
        max_requests: int,
        **options: Unpack[RunnerOptions],
    ) -> None:
        settings = phase_config(config, "decode")
        capacity = whole("max_requests", max_requests)
        if not capacity:
            raise ConfigError("max_requests must be at least 1")
        declared = check_variants(variants, with_width=True)
        largest = min(settings.max_bs or capacity, capacity)
        buckets = Buckets.of(
            settings.buckets, phase="decode", maximum=largest, multiple_of=settings.align
        )
        sizes = {
            GraphKey(variant, bucket): _size(bucket, int(named.get("width", 1)))
            for variant, named in declared.items()
            for bucket in (buckets if settings.policy != "disabled" else ())
        }
        widest = max(int(named.get("width", 1)) for named in declared.values())
        super().__init__(
            slots=check_slots(inputs),
            step=forward,
            eager=forward,
            tail=None,
            outputs=outputs,
            variants=declared,
            host_args=host_args,
            config=settings,
            options=Options.of("decode", options),
            backend=backend if isinstance(backend, Backend) else get_backend(backend),
            pool=pool,
            group=group,
            buckets=buckets,
            sizes=sizes,
            largest=_size(buckets.maximum, widest),
            run_slots=frozenset(),
        )

    def _rows(self, size: Size) -> int:
        return size.requests

    def _variant_of(
        self, requests: int, tokens: int, options: Mapping[str, Any]
    ) -> Variant | Reason:
        width = options.get("width")
        if width is None and tokens % requests == 0:
            width = tokens // requests
        if width is None or tokens != requests * width:
            return Reason.UNKNOWN_WIDTH
        declared = self._parts.entries.variants
        variant = canonical_variant({**options, "width": width})
        if variant in declared:
            return variant
        others = {**options, "width": None}
        if any(dict(named) | {"width": None} == others for named in declared.values()):
            return Reason.UNKNOWN_WIDTH
        return Reason.UNKNOWN_VARIANT

    def _fits_requests(self, requests: int) -> bool:
        return True  # Buckets count requests already.

    def _size_of(self, requests: int, tokens: int, options: Mapping[str, Any]) -> Size:
        uniform = requests and tokens % requests == 0
        return Size(requests, tokens, tokens // requests if uniform else None)

    def _infer(self, requests: int | None, tokens: int | None, options: Mapping[str, Any]) -> Size:
        width = options.get("width", 1)
        if requests is None:
            assert tokens is not None
            if tokens % width:
                raise InputError(
                    f"{tokens} tokens are no whole number of requests of {width} tokens (variant "
                    f"{dict(options)}); batches with mixed widths are prefill"
                )
            requests = tokens // width
        elif tokens is not None and 0 < tokens < requests:
            raise InputError(
                f"{requests} requests have only {tokens} tokens; every request of a decode batch "
                f"has at least one. Give the slots of 'requests' and 'tokens' as many rows as the "
                f"batch has"
            )
        return Size(requests, requests * width if tokens is None else tokens)

    def _dummy_size(self, options: Mapping[str, Any]) -> Size:
        return _size(1, options.get("width", 1))

    def _real_size(self, entry: Entry, rows: int, index: int) -> Size:
        return _size(rows, entry.size.width or 1)


def _size(requests: int, width: int) -> Size:
    return Size(requests, requests * width, width)
