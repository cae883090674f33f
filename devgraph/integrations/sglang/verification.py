"""The check at start in SGLang: graphs and eager runs are compared on batches for the runners.

The runners load the batches as they do while serving. The batches use cache slots without owners.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools
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

_CONTEXTS = (5, 23)
"""Context lengths of the requests in the two batches of each shape."""


class _Replays:
    """The ``replay`` of a backend in a check at start, and afterwards if the check dropped graphs.

    A dropped graph is replaced by an eager run on the static buffers that the runner has filled.
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
        # During a step, SGLang has replaced the forward method of the layers by the replay.
        runner, module = self._runner, sys.modules[type(self._runner).__module__]
        positions = runner._get_layer_model_positions(batch)
        kwargs = module._build_layer_model_forward_kwargs(runner.layer_model, batch, None)
        with undifferentiated():
            output = self._body(batch.input_ids, positions, batch, **kwargs)
            return runner._pack_qwen_bcg_hc_output(output)


def _first_slot(model_runner: Any) -> int:
    """Return the first slot of the cache after the page for padding."""
    return max(getattr(model_runner.token_to_kv_pool, "page_size", 1), 1)


def _batch(runner: Any, prefixes: list[int], news: list[int] | None) -> Any:
    """Return a batch of requests with prefixes: a decode step, or a prefill of ``news`` tokens."""
    engine: Any = importlib.import_module(f"{MODEL}.forward_batch_info")
    model = runner.model_runner
    table = model.req_to_token_pool.req_to_token
    added = news or [1] * len(prefixes)
    lengths = [prefix + new for prefix, new in zip(prefixes, added, strict=True)]
    first = 1 if len(table) > len(lengths) else 0
    slot = _first_slot(model)
    tails, positions = [], []
    for row, (prefix, length) in enumerate(zip(prefixes, lengths, strict=True), first):
        slots = torch.arange(slot, slot + length, device=table.device)
        table[row, :length] = slots.to(table.dtype)
        tails.append(slots[prefix:])
        positions.append(slots[prefix:] - slot)
        slot += length

    def on_device(values: Any, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.tensor(list(values), dtype=dtype, device=table.device)

    extend: dict[str, Any] = {}
    if news is not None:
        extend = {
            "extend_num_tokens": sum(news),
            "extend_seq_lens": on_device(news, torch.int32),
            "extend_prefix_lens": on_device(prefixes, torch.int32),
            "extend_start_loc": on_device([0, *itertools.accumulate(news)][:-1], torch.int32),
            "extend_prefix_lens_cpu": list(prefixes),
            "extend_seq_lens_cpu": list(news),
            "extend_logprob_start_lens_cpu": list(news),
        }
    mode = engine.ForwardMode.EXTEND if news is not None else engine.ForwardMode.DECODE
    seq_lens, vocabulary = on_device(lengths), model.model_config.vocab_size
    batch = engine.ForwardBatch(
        forward_mode=mode,
        global_forward_mode=mode,
        batch_size=len(lengths),
        input_ids=torch.randint(0, vocabulary, (sum(added),), device=table.device),
        req_pool_indices=on_device(range(first, first + len(lengths))),
        seq_lens=seq_lens,
        orig_seq_lens=seq_lens,
        seq_lens_cpu=torch.tensor(lengths),
        seq_lens_sum=sum(lengths),
        out_cache_loc=torch.cat(tails),
        positions=torch.cat(positions),
        return_logprob=False,
        spec_algorithm=model.spec_algorithm,
        capture_hidden_mode=engine.CaptureHiddenMode.NULL,
        **extend,
    )
    translator = getattr(model, "kv_index_translator", None)
    if translator is not None:
        translator.bind_own_plan(batch)
    prepare = getattr(model, "prepare_dummy_forward_batch", None)
    return batch if prepare is None else prepare(batch)


def _prefills(tokens: int, room: int, most: int) -> Iterator[tuple[list[int], list[int]]]:
    """Yield prefixes and numbers of new tokens: few long requests, and up to ``most`` requests."""
    few = -(-tokens // room)
    for context, wanted in zip(_CONTEXTS, (few, min(tokens, most)), strict=True):
        count = max(wanted, few)
        ends = [tokens * index // count for index in range(count + 1)]
        news = [end - start for start, end in itertools.pairwise(ends)]
        yield [context * (index % 2 + 1) for index in range(count)], news


def check_at_start(phase: str, runner: Any, *_: Any, **__: Any) -> None:
    """Compare the graphs of a runner of ``phase`` with eager runs after their first capture."""
    layer, backend, model = shared(), runner.backend, runner.model_runner
    check, decode = layer.check, phase == "decode"
    if type(runner).__name__ != f"{phase.title()}CudaGraphRunner" or phase in layer.checked:
        return
    if not isinstance(backend, _OnDevgraph):
        return
    layer.checked.add(phase)
    several = decode and getattr(runner, "captured_req_width", 1) != 1
    for stands, reason in (
        (several_ranks(), "several ranks"),
        (several, "several tokens per request"),
        (getattr(model, "lora_manager", None) is not None, "LoRA"),
    ):
        if stands:
            check.skip(reason)
            return
    room = model.model_config.context_len - 2 * _CONTEXTS[1]
    most = 1 if hasattr(backend, "_whole") else 4  # An updated graph is copied for each number.
    cases: list[tuple[list[int], list[int] | None]] = []
    for size in sorted(runner.capture_bs if decode else runner.capture_num_tokens, reverse=True):
        if decode:
            cases += [([context - i % 3 for i in range(size)], None) for context in _CONTEXTS]
        else:
            cases += _prefills(size, room, most)
    requests = max(len(prefixes) for prefixes, _ in cases)
    tokens = max(sum(prefixes) + sum(news or [len(prefixes)]) for prefixes, news in cases)
    replays = vars(backend)["replay"] = _Replays(runner)
    pool = model.token_to_kv_pool
    caches = [*getattr(pool, "k_buffer", ()), *getattr(pool, "v_buffer", ())]
    used = [cache[: _first_slot(model) + tokens] for cache in caches]
    used.append(model.req_to_token_pool.req_to_token[: requests + 1])
    with torch.no_grad(), check.started(used):
        for prefixes, news in cases:
            runner.execute(_batch(runner, prefixes, news))
    replays.dropped = frozenset(check.failed)
    if not replays.dropped:
        del vars(backend)["replay"]
    check.finish()
