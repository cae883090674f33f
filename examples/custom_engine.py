"""A custom engine with a tiny decoder, a paged KV cache and continuous batching.

    python examples/custom_engine.py --backend cpu
    python examples/custom_engine.py --decode-device-graph-mode breakable

The script generates with graphs and with eager steps of the same engine, and compares the tokens.
"""

from __future__ import annotations

import argparse
import itertools

import torch

import devgraph as dg

VOCAB, WIDTH, HEADS, LAYERS = 97, 32, 2, 2
PAGE, PAGES, MAX_PAGES = 4, 48, 8  # rows per page, pages of the cache, maximum pages per request
SCRATCH = PAGES * PAGE  # the cache row to which padded tokens write; it is never read
MAX_REQUESTS, MAX_TOKENS = 4, 64


@dg.region(host_args=("pages",), mutates=("out",))
def decode_attention(q, keys, values, table, lengths, out, *, pages):
    """Attend to the first ``pages`` pages of each request; shapes depend on this host value."""
    rows = (table[:, :pages, None] * PAGE + torch.arange(PAGE, device=q.device)).flatten(1)
    beyond = torch.arange(pages * PAGE, device=q.device) >= lengths[:, None]
    scores = torch.einsum("rhd,rnhd->rhn", q, keys[rows]) * q.shape[-1] ** -0.5
    weights = torch.softmax(scores.masked_fill(beyond[:, None], -torch.inf), dim=-1)
    out.copy_(torch.einsum("rhn,rnhd->rhd", weights, values[rows]))


@dg.region(mutates=("out",))
def prefill_attention(q, k, v, batch, out):
    """Compute causal attention within each request.

    Only a region may read ``batch.starts``, because the graphs around the region depend only on the
    number of tokens, not on the number of requests.
    """
    token = torch.arange(q.shape[0], device=q.device)
    request = torch.searchsorted(batch.starts[1:].contiguous(), token, right=True)
    seen = (request[:, None] == request) & (token[:, None] >= token)
    scores = torch.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5
    weights = torch.softmax(scores.masked_fill(~seen, -torch.inf), dim=-1)
    out.copy_(torch.einsum("hqk,khd->qhd", weights, v))


class Model:
    """A decoder with random weights; each layer has a key cache and a value cache."""

    def __init__(self, device):
        generator = torch.Generator().manual_seed(0)

        def weight(*shape):
            return (torch.randn(shape, generator=generator) * shape[0] ** -0.5).to(device)

        self.embedding, self.head = weight(VOCAB, WIDTH) * 8, weight(WIDTH, VOCAB)
        self.places = weight(MAX_PAGES * PAGE, WIDTH) * 4
        self.layers = [(weight(WIDTH, 3 * WIDTH), weight(WIDTH, WIDTH)) for _ in range(LAYERS)]
        cache = (LAYERS, 2, SCRATCH + 1, HEADS, WIDTH // HEADS)
        self.cache = torch.zeros(cache, device=device)

    def step(self, batch, attend):
        x = self.embedding[batch.ids] + self.places[batch.positions]
        for (qkv, project), (keys, values) in zip(self.layers, self.cache, strict=True):
            q, k, v = (x @ qkv).view(-1, 3, HEADS, WIDTH // HEADS).unbind(1)
            keys.index_copy_(0, batch.rows, k)
            values.index_copy_(0, batch.rows, v)
            out = torch.empty_like(q)
            attend(q, k, v, keys, values, out)
            x = x + torch.tanh(out.flatten(1) @ project)
        return x

    def decode(self, batch):
        def attend(q, k, v, keys, values, out):
            pages = batch.host.pages
            decode_attention(q, keys, values, batch.table, batch.lengths, out, pages=pages)

        return self.step(batch, attend) @ self.head

    def prefill(self, batch):
        return self.step(
            batch, lambda q, k, v, keys, values, out: prefill_attention(q, k, v, batch, out)
        )

    def last_logits(self, hidden, batch):
        return hidden[batch.starts[1:] - 1] @ self.head


def slot(name, *dims, pad):
    return dg.InputSlot(name, dims, torch.int64, pad=pad)


class Engine:
    """An engine with continuous batching: requests join and leave between steps."""

    def __init__(self, config, backend):
        self.model, self.device = Model(backend.device), backend.device
        zero = dg.Pad.zero()
        tokens = [
            slot("ids", "tokens", pad=zero),
            slot("positions", "tokens", pad=zero),
            slot("rows", "tokens", pad=dg.Pad.fill(SCRATCH)),
        ]
        common = {
            "backend": backend,
            "pool": backend.make_pool(),  # both runners share memory and one capture stream
            "bound": {
                "cache": self.model.cache
            },  # used in place; a run raises an error if it was moved
            "max_requests": MAX_REQUESTS,
        }
        self.prefill = dg.PrefillRunner(
            self.model.prefill,
            [*tokens, slot("starts", "requests+1", pad=dg.Pad.last())],
            tail=self.model.last_logits,
            config=config.prefill,
            max_tokens=MAX_TOKENS,
            **common,
        )
        self.decode = dg.DecodeRunner(
            self.model.decode,
            [
                *tokens,
                slot("table", "requests", MAX_PAGES, pad=zero),
                slot("lengths", "requests", pad=dg.Pad.fill(1)),
            ],
            host_args={"pages": 1},
            config=config.decode,
            **common,
        )
        self.prefill.capture()
        self.decode.capture()

    def generate(self, prompts, new_tokens):
        """Return ``new_tokens`` greedy tokens for each prompt."""
        texts = [list(prompt) for prompt in prompts]
        ends = [len(prompt) + new_tokens for prompt in prompts]
        waiting, running, free = list(range(len(texts))), [], list(range(PAGES))
        tables = {}
        while waiting or running:
            if waiting and len(running) < MAX_REQUESTS:
                joining = waiting[: MAX_REQUESTS - len(running)]
                waiting = waiting[len(joining) :]
                for one in joining:
                    tables[one] = [free.pop() for _ in range(-(-ends[one] // PAGE))]
                logits = self._prefill(joining, texts, tables)
                running += joining
            else:
                joining = running
                logits = self._decode(running, texts, tables)
            for one, token in zip(joining, logits.argmax(-1).tolist(), strict=True):
                texts[one].append(token)
            for one in [one for one in running if len(texts[one]) == ends[one]]:
                running.remove(one)
                free += tables.pop(one)
        return [text[len(prompt) :] for text, prompt in zip(texts, prompts, strict=True)]

    def _tensor(self, data):
        return torch.tensor(data, device=self.device)

    def _tokens(self, places, texts, tables):
        return {
            "ids": self._tensor([texts[one][at] for one, at in places]),
            "positions": self._tensor([at for _, at in places]),
            "rows": self._tensor([tables[o][at // PAGE] * PAGE + at % PAGE for o, at in places]),
        }

    def _prefill(self, requests, texts, tables):
        places = [(one, at) for one in requests for at in range(len(texts[one]))]
        starts = [0, *itertools.accumulate(len(texts[one]) for one in requests)]
        inputs = self._tokens(places, texts, tables)
        return self.prefill.run({**inputs, "starts": self._tensor(starts)})

    def _decode(self, requests, texts, tables):
        lengths = [len(texts[one]) for one in requests]
        table = [(tables[one] + [0] * MAX_PAGES)[:MAX_PAGES] for one in requests]
        inputs = {
            **self._tokens([(one, len(texts[one]) - 1) for one in requests], texts, tables),
            "table": self._tensor(table),
            "lengths": self._tensor(lengths),
        }
        return self.decode.run(inputs, host_args={"pages": -(-max(lengths) // PAGE)})

    def close(self):
        self.prefill.close()
        self.decode.close()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--backend", default="auto")
    dg.add_cli_args(parser)
    arguments = parser.parse_args()
    backend = dg.get_backend(arguments.backend)
    config = dg.DeviceGraphConfig.from_args(arguments, parser=parser).for_backend(backend.name)
    eager = dg.DeviceGraphConfig.from_json('{"decode": "disabled", "prefill": "disabled"}')
    prompts = [[1, 2, 3], [5] * 9, [7, 11], [13, 17, 19, 23, 29], [31], [2] * 14]
    results = []
    for one in (config, eager):
        engine = Engine(one, backend)
        results.append(engine.generate(prompts, new_tokens=12))
        if one is config:
            for runner in (engine.prefill, engine.decode):
                stats = runner.stats()
                print(
                    f"{stats.phase}: {runner.effective_policy}, {stats.graph_steps} of "
                    f"{stats.steps} steps in graphs, eager: {stats.eager or 'none'}"
                )
        engine.close()
    print("same tokens as eager:", results[0] == results[1])
    return 0 if results[0] == results[1] else 1


if __name__ == "__main__":
    raise SystemExit(main())
