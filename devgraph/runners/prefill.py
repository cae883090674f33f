"""PrefillRunner: steps in which requests differ in length, including mixed batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torch.utils import _pytree as pytree

from devgraph.api.errors import ConfigError, whole
from devgraph.api.marks.gates import in_tail
from devgraph.api.policy import breaks
from devgraph.runners.batch import Batch
from devgraph.runners.buckets import ByTokens
from devgraph.runners.options import Options, RunnerOptions, check_functions
from devgraph.runners.runner import Runner
from devgraph.runners.slots import (
    ROW_PER_REQUEST,
    ROW_PER_TOKEN,
    InputSlot,
    OutputSlot,
    check_slots,
)

if TYPE_CHECKING:
    from typing_extensions import Unpack


class PrefillRunner(Runner):
    """A runner for prefill steps: requests of any length, in a graph for each token bucket.

    Under ``full``, a graph contains the body and the tail, with ``max_requests`` rows for requests.
    Unused rows contain pad values (a length sentinel, ``Pad.last()`` for offsets).

    Under the other policies, a graph contains only the body, which must not depend on the number of
    requests, so that one graph serves batches with any number of requests. Slots with a row per
    request keep their real size. Regions, ``no_graph`` functions and the tail can read these slots
    from the batch. The tail runs eagerly after the replay.

    Args:
        body: receives a ``Batch``; returns tensors with a row per token (see ``hidden``).
        inputs: the input slots, at least one of them with a dim ``"tokens"``.
        tail: receives the results of the body and the batch, and returns the outputs of the step,
            for example the logits of each request's last token. The batch is padded under ``full``,
            but not under the other policies.
        hidden: an ``OutputSlot`` or a tree of them for the results of the body, which are the
            outputs of the step if there is no tail.
        outputs: an ``OutputSlot`` or a tree of them for the results of the tail, under ``full``.
        max_tokens: maximum number of tokens in a step.
        max_requests: number of requests for which static buffers have rows. A step with more
            requests runs eagerly under ``full``. Under the other policies it runs in the graph, and
            its slots with a row per request use new tensors.
        **options: see ``devgraph.runners.options.Options``.

    Raises:
        ConfigError: the declaration is invalid, or ``facts`` contradict an explicit choice.
        CapabilityError: the policy is not available.
    """

    def __init__(
        self,
        body: Callable[[Batch], Any],
        inputs: Sequence[InputSlot],
        *,
        tail: Callable[[Any, Batch], Any] | None = None,
        hidden: Any = ROW_PER_TOKEN,
        outputs: Any = ROW_PER_REQUEST,
        max_tokens: int,
        max_requests: int,
        **options: Unpack[RunnerOptions],
    ) -> None:
        capacity = whole("max_tokens", max_tokens, 1, ConfigError)
        requests = whole("max_requests", max_requests, 1, ConfigError)
        chosen = Options.of("prefill", capacity, options, PrefillRunner)
        settings = chosen.config
        state = chosen.make_state(requests)
        slots = check_slots(inputs, (), None if state is None else state.input)
        if not any(slot.row_dim == "tokens" for slot in slots.values()):
            raise ConfigError("a prefill runner needs an input slot with a dim 'tokens'")
        whole_step = not breaks(settings.policy)
        if not whole_step:
            _check_hidden(hidden, settings.policy)
        if whole_step and settings.max_requests is not None:
            requests = min(requests, settings.max_requests)
        check_functions(body, tail)
        if tail is None and outputs is not ROW_PER_REQUEST:
            raise ConfigError(
                "outputs= declares the results of a tail, but this runner has no tail. Declare the "
                "results of the body with hidden=."
            )
        eager = body if tail is None else _joined(body, tail)
        super().__init__(
            slots=slots,
            function=eager if whole_step else body,
            whole_step=eager,
            tail=None if whole_step else tail,
            outputs=outputs if whole_step and tail is not None else hidden,
            options=chosen,
            capacity=capacity,
            counting=ByTokens("prefill", requests, requests if whole_step else None),
            run_slots=frozenset(
                () if whole_step else (s.name for s in slots.values() if s.by_requests)
            ),
            state=state,
            engine=tuple(filter(None, (body, tail))),
        )


def _joined(
    body: Callable[[Batch], Any], tail: Callable[[Any, Batch], Any]
) -> Callable[[Batch], Any]:
    def whole(batch: Batch) -> Any:
        result = body(batch)
        with in_tail():
            return tail(result, batch)

    return whole


def _check_hidden(hidden: Any, policy: str) -> None:
    """Raise ConfigError if a result of the body has a row for each request."""
    for slot in pytree.tree_leaves(hidden):
        if isinstance(slot, OutputSlot) and slot.rows not in (None, "tokens"):
            raise ConfigError(
                f"under the policy {policy!r} a prefill graph does not depend on the number of "
                f"requests, so the body cannot return a result with rows={slot.rows!r}; compute "
                f"that result in the tail"
            )
