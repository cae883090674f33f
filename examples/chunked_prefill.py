"""Chunked prefill with a paged cache: prompts of any length in steps of eight tokens.

A step contains chunks of several requests. Each token attends to the pages of its request up to its
own position, which includes the chunks of earlier steps. Decode steps run the same code.
"""

from __future__ import annotations

import torch

import devgraph as dg

VOCAB, WIDTH, PAGE, PAGES, MAX_PAGES = 61, 32, 4, 32, 8
SCRATCH = PAGES * PAGE  # the cache row to which padded tokens write; it is never read
BUDGET, MAX_REQUESTS = 8, 4

torch.manual_seed(0)
torch.set_grad_enabled(False)
embed, place = torch.randn(VOCAB, WIDTH), torch.randn(MAX_PAGES * PAGE, WIDTH)
qkv, project = torch.randn(WIDTH, 3 * WIDTH) * 0.2, torch.randn(WIDTH, WIDTH) * 0.2
keys, values = torch.zeros(SCRATCH + 1, WIDTH), torch.zeros(SCRATCH + 1, WIDTH)


@dg.region(mutates=("out",))  # all lengths are on the device, so no update is needed
def attention(q, batch, out):
    token = torch.arange(len(q))
    request = torch.searchsorted(batch.starts[1:].contiguous(), token, right=True)
    request = request.clamp(max=len(batch.table) - 1)  # padded tokens belong to no request
    rows = (batch.table[:, :, None] * PAGE + torch.arange(PAGE)).flatten(1)[request]
    later = torch.arange(MAX_PAGES * PAGE) > batch.positions[:, None]
    scores = torch.einsum("td,tnd->tn", q, keys[rows]) * WIDTH**-0.5
    weights = torch.softmax(scores.masked_fill(later, -torch.inf), dim=-1)
    out.copy_(torch.einsum("tn,tnd->td", weights, values[rows]))


def body(batch):
    x = embed[batch.ids] + place[batch.positions]
    q, k, v = (x @ qkv).chunk(3, dim=-1)
    keys.index_copy_(0, batch.rows, k)
    values.index_copy_(0, batch.rows, v)
    out = torch.empty_like(q)
    attention(q, batch, out)
    return x + torch.tanh(out @ project)


SLOTS = [
    dg.InputSlot(name, dims, torch.int64, pad=pad)
    for name, dims, pad in (
        ("ids", ("tokens",), dg.Pad.zero()),
        ("positions", ("tokens",), dg.Pad.zero()),
        ("rows", ("tokens",), dg.Pad.fill(SCRATCH)),
        ("starts", ("requests+1",), dg.Pad.last()),
        ("table", ("requests", MAX_PAGES), dg.Pad.zero()),
    )
]
common = {"bound": {"keys": keys, "values": values}, "max_requests": MAX_REQUESTS}
common |= {"backend": "cpu", "progress": False}
prefill = dg.PrefillRunner(
    body,
    SLOTS,
    max_tokens=BUDGET,
    tail=lambda hidden, batch: hidden[batch.starts[1:] - 1] @ embed.T,
    config={"policy": "breakable", "buckets": [2, 4, BUDGET]},
    **common,
)
decode = dg.DecodeRunner(lambda batch: body(batch) @ embed.T, SLOTS, share=prefill, **common)
prefill.capture()
decode.capture()


def inputs(parts, texts, tables):  # a part is a tuple of request, first token and end
    tokens = [(one, at) for one, first, last in parts for at in range(first, last)]
    lengths = torch.tensor([0, *(last - first for _, first, last in parts)])
    return {
        "ids": torch.tensor([texts[one][at] for one, at in tokens]),
        "positions": torch.tensor([at for _, at in tokens]),
        "rows": torch.tensor([tables[one][at // PAGE] * PAGE + at % PAGE for one, at in tokens]),
        "starts": lengths.cumsum(0),
        "table": torch.tensor([(tables[one] + [0] * MAX_PAGES)[:MAX_PAGES] for one, *_ in parts]),
    }


def generate(prompts, new):
    texts, done, free = [list(prompt) for prompt in prompts], [0] * len(prompts), [*range(PAGES)]
    tables = [[free.pop() for _ in range(-(-(len(text) + new) // PAGE))] for text in texts]
    while any(at < len(prompt) for at, prompt in zip(done, prompts, strict=True)):
        parts, left = [], BUDGET
        for one, (first, prompt) in enumerate(zip(done, prompts, strict=True)):
            last = min(first + left, len(prompt))
            left -= last - first
            parts += [(one, first, last)] * (last > first)
        outputs = prefill.run(inputs(parts, texts, tables))
        for (one, _, last), logits in zip(parts, outputs, strict=True):
            done[one] = last
            if last == len(prompts[one]):  # earlier chunks do not produce a token
                texts[one].append(int(logits.argmax()))
    for _ in range(new - 1):
        parts = [(one, len(text) - 1, len(text)) for one, text in enumerate(texts)]
        for text, logits in zip(texts, decode.run(inputs(parts, texts, tables)), strict=True):
            text.append(int(logits.argmax()))
    return [text[-new:] for text in texts]


def reference(prompt, new):
    """Generate without a cache, pages or graphs."""
    text = list(prompt)
    for _ in range(new):
        x = embed[text] + place[: len(text)]
        q, k, v = (x @ qkv).chunk(3, dim=-1)
        scores = (q @ k.T * WIDTH**-0.5).masked_fill(torch.ones(len(x), len(x)).triu(1) > 0, -1e9)
        hidden = x + torch.tanh(scores.softmax(-1) @ v @ project)
        text.append(int((hidden[-1] @ embed.T).argmax()))
    return text[-new:]


PROMPTS = [[5, 9, 2] * 6, [7, 11], [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]]
tokens = generate(PROMPTS, 6)
print("same tokens as without chunks:", tokens == [reference(prompt, 6) for prompt in PROMPTS])
for stats in (prefill.stats(), decode.stats()):
    print(f"{stats.name}: {stats.graph_steps} of {stats.steps} steps in graphs")
