"""DecodeRunner: steps in which every request has the same number of tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from devgraph.api.errors import ConfigError, ConfigTypeError, brief, whole
from devgraph.runners.batch import Batch
from devgraph.runners.buckets import ByRequests
from devgraph.runners.loop import LOOP_SLOTS, Loop, looped_outputs
from devgraph.runners.options import Options, RunnerOptions, check_functions
from devgraph.runners.runner import Runner
from devgraph.runners.slots import ROW_PER_REQUEST, InputSlot, check_slots

if TYPE_CHECKING:
    from typing_extensions import Unpack


class DecodeRunner(Runner):
    """A runner for decode steps: requests of ``width`` tokens each, in a graph for each bucket.

    Buckets count requests. In the graph of bucket b, a slot has b rows (one for each request),
    b + 1 rows (offsets) or b * width rows (one for each token). Rows after the real rows contain
    pad values.

    Args:
        forward: the step, which receives a ``Batch`` and returns tensors. Padded rows must not
            write real state. The runner may call it any number of times on pad values only.
        inputs: the input slots.
        outputs: an ``OutputSlot`` for all returned tensors, or a tree of slots with the structure
            of the result.
        max_requests: maximum number of requests in a step.
        loop: runs several steps in one launch; see ``Loop``. ``run`` then returns a ``LoopResult``,
            and the batch has an additional slot ``running``.
        **options: see ``devgraph.runners.options.Options``.

    Raises:
        ConfigError: the declaration is invalid, or ``facts`` contradict an explicit choice.
        CapabilityError: the policy is not available.
    """

    def __init__(
        self,
        forward: Callable[[Batch], Any],
        inputs: Sequence[InputSlot],
        *,
        outputs: Any = ROW_PER_REQUEST,
        max_requests: int,
        loop: Loop | None = None,
        **options: Unpack[RunnerOptions],
    ) -> None:
        capacity = whole("max_requests", max_requests, 1, ConfigError)
        if loop is not None and not isinstance(loop, Loop):
            raise ConfigTypeError(f"loop of a decode runner must be a dg.Loop, got {brief(loop)}")
        chosen = Options.of("decode", capacity, options, DecodeRunner)
        width = max(variant.get("width", 1) for variant in chosen.variants.values())
        state = chosen.make_state(capacity, width)
        slots = check_slots(
            inputs, LOOP_SLOTS if loop else (), None if state is None else state.input
        )
        check_functions(forward)
        step = forward if state is None else state.around(forward)
        if loop is not None:
            step = loop.around(step, slots, outputs, ranks=options.get("group") is not None)
            outputs = looped_outputs(outputs)
        super().__init__(
            slots=slots,
            function=step,
            outputs=outputs,
            options=chosen,
            capacity=capacity,
            counting=ByRequests("decode", capacity, None),
            steps_per_launch=loop.steps if loop else 1,
            state=state,
            engine=(forward, *filter(None, [loop.advance, loop.done] if loop else [])),
        )
