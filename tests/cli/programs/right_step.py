"""Right programs of the kinds beside: nothing to report."""

import dataclasses
import types

import torch

import devgraph as dg

seen = []
lazy = types.SimpleNamespace(table=None)
lstm = torch.nn.LSTM(8, 8)
encoder = torch.nn.TransformerEncoderLayer(8, 2, batch_first=True).eval()


@dataclasses.dataclass
class Batch:
    x: torch.Tensor
    cache: torch.Tensor


def inputs():
    return (Batch(torch.ones(4, 8), torch.zeros(4, 8)), torch.nn.BatchNorm1d(8))


@dg.no_graph
def log(h):
    seen.append(h.clone())
    lazy.last = h + 1


def step(batch, norm):
    if lazy.table is None:
        lazy.table = torch.ones(8)
    batch.cache.add_(batch.x)
    with torch.profiler.record_function("norm"):
        h = norm(batch.cache) * lazy.table
    log(h)
    state = {"h": h}
    state["h"] = state["h"] + 1
    h = torch.vmap(torch.sin)(state["h"])
    return encoder(lstm(h.unsqueeze(0))[0]) + torch.rand(8)  # devgraph: ignore[rng]
