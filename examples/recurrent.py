"""A recurrent model in graphs: chunked prompts and decode steps share the state of requests."""

from __future__ import annotations

from typing import Any

import torch

import devgraph as dg

VOCAB, WIDTH = 64, 32
STATE = [dg.StateSlot("hidden", (WIDTH,), torch.float32)]
IDS = dg.InputSlot("ids", ("tokens",), torch.int64, pad=dg.Pad.zero(), high=VOCAB)
STARTS = dg.InputSlot("starts", ("requests+1",), torch.int64, pad=dg.Pad.last())

torch.manual_seed(0)
torch.set_grad_enabled(False)
embed = torch.nn.Embedding(VOCAB, WIDTH)
cell = torch.nn.GRUCell(WIDTH, WIDTH)
head = torch.nn.Linear(WIDTH, VOCAB)


def step(batch: Any) -> torch.Tensor:
    """Advance every request by one token."""
    hidden = cell(embed(batch.ids), batch.state.hidden[batch.state_slots])
    batch.state.hidden.index_copy_(0, batch.state_slots, hidden)
    return head(hidden).argmax(-1)


@dg.no_graph(mutates=("out",))
def scan(x: torch.Tensor, batch: Any, out: torch.Tensor) -> None:
    """Advance every request by its chunk; runs eagerly between two graphs."""
    starts, state = batch.starts.tolist(), batch.state.hidden
    for slot, first, last in zip(batch.state_slots.tolist(), starts[:-1], starts[1:], strict=True):
        for token in range(first, last):
            state[slot] = out[token] = cell(x[token], state[slot])


def chunk(batch: Any) -> torch.Tensor:
    x = embed(batch.ids)
    out = torch.empty_like(x)
    scan(x, batch, out)
    return head(out).argmax(-1)


options = {"state": STATE, "max_requests": 3, "backend": "cpu"}
prefill = dg.PrefillRunner(chunk, [IDS, STARTS], max_tokens=8, **options)
decode = dg.DecodeRunner(step, [IDS], share=prefill, **options)
prefill.capture()
decode.capture()

for slot, prompt in ((2, [5, 9, 11, 2, 40, 7]), (0, [1, 2]), (2, [33, 8, 8, 60, 8])):
    decode.assign(slot)  # zeroes the state for a new request
    for first in range(0, len(prompt), 4):
        ids = torch.tensor(prompt[first : first + 4])
        inputs = {"ids": ids, "starts": torch.tensor([0, len(ids)])}
        tokens = [int(prefill.run(inputs, state_slots=[slot])[-1])]
    while len(tokens) < 6:
        tokens += decode.run({"ids": torch.tensor(tokens[-1:])}, state_slots=[slot]).tolist()
    hidden = torch.zeros(WIDTH)
    for token in (*prompt, *tokens[:-1]):
        hidden = cell(embed.weight[token], hidden)
    print(slot, tokens, "last token equals eager:", tokens[-1] == int(head(hidden).argmax()))
print("decode steps in graphs:", decode.stats().graph_steps, "of", decode.stats().steps)
