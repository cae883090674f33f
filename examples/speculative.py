"""Speculative decoding: a verify step with three tokens per request.

The draft tokens of a request are those that followed the last occurrence of its last token. A step
of width 3 verifies two draft tokens per request. All requests of a step have the same width. If a
request has fewer draft tokens, it is padded with tokens that write to a scratch row of the cache,
and their results are ignored. Keys of rejected tokens remain in the cache until the correct tokens
overwrite them, because no earlier token reads them.
"""

from __future__ import annotations

import torch

import devgraph as dg

VOCAB, DIM, SLOTS, MAX_LEN, WIDTH = 31, 32, 4, 64, 3
SCRATCH = SLOTS * MAX_LEN  # the cache row to which padded tokens write; it is never read

torch.manual_seed(0)
torch.set_grad_enabled(False)
embed, place = torch.randn(VOCAB, DIM), torch.randn(MAX_LEN, DIM) * 0.1
qkv, head = torch.randn(DIM, 3 * DIM) * 0.2, torch.randn(DIM, VOCAB)
keys, values = torch.zeros(SCRATCH + 1, DIM), torch.zeros(SCRATCH + 1, DIM)


def step(batch):
    """Return the greedy next token after each token of the batch."""
    x = embed[batch.ids] + place[batch.positions]
    q, k, v = (x @ qkv).chunk(3, dim=-1)
    keys.index_copy_(0, batch.rows, k)
    values.index_copy_(0, batch.rows, v)
    at = torch.arange(MAX_LEN, device=q.device)
    rows = batch.first_rows[:, None] + at  # for each token, the cache rows of its request
    scores = torch.einsum("td,tnd->tn", q, keys[rows]) * DIM**-0.5
    weights = scores.masked_fill(at > batch.positions[:, None], -torch.inf).softmax(-1)
    return ((x + torch.einsum("tn,tnd->td", weights, values[rows])) @ head).argmax(-1)


def slot(name, pad):
    return dg.InputSlot(name, ("tokens",), torch.int64, pad=pad)


decode = dg.DecodeRunner(
    step,
    [
        *(slot(name, dg.Pad.zero()) for name in ("ids", "positions", "first_rows")),
        slot("rows", dg.Pad.fill(SCRATCH)),
    ],
    outputs=dg.OutputSlot(rows="tokens"),
    variants=[{}, {"width": WIDTH}],
    bound={"keys": keys, "values": values},
    backend="cpu",
    max_requests=SLOTS,
    progress=False,
)
decode.capture()


def drafts(text):
    """Return up to WIDTH - 1 tokens that followed the last occurrence of the last token."""
    for at in range(len(text) - 2, -1, -1):
        if text[at] == text[-1]:
            return text[at + 1 : at + WIDTH]
    return []


def run(parts, width):
    """Run ``width`` tokens (slot, position, id) per request; padding has the slot None."""
    inputs = {
        "ids": [token for _, _, token in parts],
        "positions": [at for _, at, _ in parts],
        "first_rows": [(request or 0) * MAX_LEN for request, _, _ in parts],
        "rows": [SCRATCH if r is None else r * MAX_LEN + at for r, at, _ in parts],
    }
    variant = {} if width == 1 else {"width": width}
    tensors = {name: torch.tensor(data) for name, data in inputs.items()}
    return decode.run(tensors, variant=variant).view(-1, width).tolist()


def generate(prompts, new, *, speculate):
    texts = [list(prompt[:1]) for prompt in prompts]
    ends = [len(prompt) + new for prompt in prompts]
    while any(len(text) < end for text, end in zip(texts, ends, strict=True)):
        guesses = [
            prompt[len(text) :][: WIDTH - 1] or (drafts(text) if speculate else [])
            for prompt, text in zip(prompts, texts, strict=True)
        ]
        width = WIDTH if speculate and any(guesses) else 1
        parts = []
        for request, (text, guess) in enumerate(zip(texts, guesses, strict=True)):
            tokens = [text[-1], *guess[: width - 1]]
            parts += [(request, len(text) - 1 + i, token) for i, token in enumerate(tokens)]
            parts += [(None, 0, 0)] * (width - len(tokens))
        for prompt, text, guess, out in zip(
            prompts, texts, guesses, run(parts, width), strict=True
        ):
            for number, token in enumerate(out[: 1 + len(guess[: width - 1])]):
                known = prompt[len(text)] if len(text) < len(prompt) else token
                text.append(known)  # tokens of the prompt override those of the model
                if number < len(guess) and guess[number] != known:
                    break
    return [text[:end] for text, end in zip(texts, ends, strict=True)]


PROMPTS = [[3, 1, 4, 1, 5], [9, 2, 6], [5, 3, 5, 8, 9, 7, 9]]
plain = generate(PROMPTS, 20, speculate=False)
steps = decode.stats().steps
print("same tokens as one at a time:", generate(PROMPTS, 20, speculate=True) == plain)
print(f"steps: {steps} of one token, {decode.stats().steps - steps} with drafts")
print(f"in graphs: {decode.stats().graph_steps} of {decode.stats().steps}")
