"""The check at start in SGLang, which compares graphs with eager runs on its own batches.

SGLang's runners load these batches as they do while serving. The batches use unowned cache slots.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools
import operator
import sys
from collections.abc import Iterator
from typing import Any

import torch

from devgraph.api.capture import Captured
from devgraph.api.process import several_ranks
from devgraph.integrations.engine.ledger import EagerReason
from devgraph.integrations.engine.steps import tensors
from devgraph.integrations.sglang.backends import MODEL, _OnDevgraph, shared
from devgraph.integrations.sglang.segments import undifferentiated
from devgraph.runners.inputs import Staging

_CONTEXTS = (5, 23)
"""Base context lengths of the two batches per shape; lengths of requests vary around them."""


class _Replays:
    """A backend's ``replay`` during the check at start, and after it if the check dropped graphs.

    An eager run on the static buffers that the runner has filled replaces each dropped graph.
    """

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._backend = runner.backend
        self._replay = runner.backend.replay
        self.dropped: frozenset[Any] = frozenset()
        layers = getattr(runner, "layer_model", None)
        self._body = None if layers is None else layers.forward

    def __call__(self, key: Any, batch: Any, **options: Any) -> Any:
        if key in self.dropped:
            self._backend._count.eager[EagerReason.VERIFY_FAILED] += 1
            return self._eager(key, batch)
        if not shared().check.running:
            return self._replay(key, batch, **options)
        stored = tensors(self._backend._outputs[key])

        def eager() -> list[torch.Tensor]:
            pairs = zip(tensors(self._eager(key, batch)), stored, strict=True)
            return [found[: len(kept)] if kept.dim() else found for found, kept in pairs]

        graph = getattr(self._backend._graphs[key], "graph", None)
        free = graph.uncounted_misses() if isinstance(graph, Captured) else contextlib.nullcontext()
        with free:
            replay = functools.partial(self._replay, key, batch, **options)
            return shared().check.run(key, eager, replay, shared=True)

    def _eager(self, key: Any, batch: Any) -> Any:
        forward, set_lengths = self._backend._eager_forms[key]
        set_lengths()
        if self._body is None:
            return forward()
        # During a step, SGLang replaces the forward method of the layers with the replay.
        runner, module = self._runner, sys.modules[type(self._runner).__module__]
        positions = runner._get_layer_model_positions(batch)
        kwargs = module._build_layer_model_forward_kwargs(runner.layer_model, batch, None)
        with undifferentiated():
            output = self._body(batch.input_ids, positions, batch, **kwargs)
            return runner._pack_qwen_bcg_hc_output(output)


def _first_slot(model_runner: Any) -> int:
    """Return the first cache slot after the padding page."""
    return max(getattr(model_runner.token_to_kv_pool, "page_size", 1), 1)


def _batch(runner: Any, prefixes: list[int], news: list[int] | None) -> Any:
    """Return requests with prefixes, for a decode step or a prefill of ``news`` tokens."""
    engine: Any = importlib.import_module(f"{MODEL}.forward_batch_info")
    model = runner.model_runner
    table = model.req_to_token_pool.req_to_token
    count, added = len(prefixes), news or [1] * len(prefixes)
    lengths = list(map(operator.add, prefixes, added))
    total, first = sum(lengths), 1 if len(table) > count else 0
    with torch.device("cpu"):
        before, after = torch.tensor([prefixes, lengths])[:, :, None]
        positions = torch.arange(max(lengths)).expand(count, -1)
        slots = positions + (_first_slot(model) + after.cumsum(0) - after)
        is_new = (positions >= before) & (positions < after)
        vocabulary, generator = model.model_config.vocab_size, torch.Generator().manual_seed(total)
        host = {
            "table": slots.masked_fill(positions >= after, 0).to(table.dtype),
            "input_ids": torch.randint(vocabulary, (sum(added),), generator=generator),
            "req_pool_indices": torch.arange(first, first + count),
            "seq_lens": after.flatten(),
            "out_cache_loc": slots[is_new],
            "positions": positions[is_new],
        }
        if news is not None:
            starts = [0, *itertools.accumulate(news)][:-1]
            of_prefill = torch.tensor([news, prefixes, starts], dtype=torch.int32)
            names = ("extend_seq_lens", "extend_prefix_lens", "extend_start_loc")
            host.update(zip(names, of_prefill, strict=True))
    # Separate copies and a loop over requests would take longer than the step.
    staging = Staging(shared().memory.backend, table.device)
    transfer = staging.transfer([(tensor.shape, tensor.dtype) for tensor in host.values()])
    sent = dict(zip(host, transfer([*host.values()]), strict=True))
    rows = sent.pop("table")
    table[first : first + count, : rows.shape[1]] = rows
    extend: dict[str, Any] = {}
    if news is not None:
        extend = {
            "extend_num_tokens": sum(news),
            "extend_prefix_lens_cpu": list(prefixes),
            "extend_seq_lens_cpu": list(news),
            "extend_logprob_start_lens_cpu": list(news),
        }
    mode = engine.ForwardMode.EXTEND if news is not None else engine.ForwardMode.DECODE
    batch = engine.ForwardBatch(
        forward_mode=mode,
        global_forward_mode=mode,
        batch_size=count,
        orig_seq_lens=sent["seq_lens"],
        seq_lens_cpu=host["seq_lens"],
        seq_lens_sum=total,
        return_logprob=False,
        spec_algorithm=model.spec_algorithm,
        capture_hidden_mode=engine.CaptureHiddenMode.NULL,
        **sent,
        **extend,
    )
    translator = getattr(model, "kv_index_translator", None)
    if translator is not None:
        translator.bind_own_plan(batch)
    prepare = getattr(model, "prepare_dummy_forward_batch", None)
    return batch if prepare is None else prepare(batch)


def _run(runner: Any, prefixes: list[int], news: list[int] | None) -> None:
    runner.execute(_batch(runner, prefixes, news))


def _prefills(tokens: int, room: int, most: int) -> Iterator[tuple[list[int], list[int]]]:
    """Yield prefixes and new token counts for few long requests, then for up to ``most``."""
    few = -(-tokens // room)
    for context, wanted in zip(_CONTEXTS, (few, min(tokens, most)), strict=True):
        count = max(wanted, few)
        ends = [tokens * index // count for index in range(count + 1)]
        news = [end - start for start, end in itertools.pairwise(ends)]
        yield [context * (index % 2 + 1) for index in range(count)], news


def check_at_start(phase: str, runner: Any, *_: Any, **__: Any) -> None:
    """After a runner's first capture for ``phase``, compare its graphs with eager runs."""
    layer, backend, model = shared(), runner.backend, runner.model_runner
    check, decode = layer.check, phase == "decode"
    if type(runner).__name__ != f"{phase.title()}CudaGraphRunner" or phase in layer.checked:
        return
    if not isinstance(backend, _OnDevgraph):
        return
    layer.checked.add(phase)
    several = decode and getattr(runner, "captured_req_width", 1) != 1
    for applies, reason in (
        (several_ranks(), "several ranks"),
        (several, "several tokens per request"),
        (getattr(model, "lora_manager", None) is not None, "LoRA"),
    ):
        if applies:
            check.skip(reason)
            return
    room = model.model_config.context_len - 2 * _CONTEXTS[1]
    # An updated graph needs a topology copy for each request count, so use only one count.
    most = 1 if hasattr(backend, "_whole") else 4
    sizes = sorted(runner.capture_bs if decode else runner.capture_num_tokens, reverse=True)
    buckets: list[list[tuple[list[int], list[int] | None]]] = [
        [([context - i % 3 for i in range(size)], None) for context in _CONTEXTS]
        if decode
        else [*_prefills(size, room, most)]
        for size in sizes
    ]
    cases = [case for bucket in buckets for case in bucket]
    requests = max(len(prefixes) for prefixes, _ in cases)
    tokens = max(sum(prefixes) + sum(news or [len(prefixes)]) for prefixes, news in cases)
    replays = vars(backend)["replay"] = _Replays(runner)
    pool = model.token_to_kv_pool
    caches = [*getattr(pool, "k_buffer", ()), *getattr(pool, "v_buffer", ())]
    used = [cache[: _first_slot(model) + tokens] for cache in caches]
    used.append(model.req_to_token_pool.req_to_token[: requests + 1])
    with torch.no_grad(), check.started(used):
        for bucket in buckets:
            check.compare([functools.partial(_run, runner, *case) for case in bucket])
    replays.dropped = frozenset(check.failed)
    if not replays.dropped:
        del vars(backend)["replay"]
    check.finish()
