"""A graph of its own: made, captured, replayed, updated and closed.

Its states, updates and threads are the suite's: ``devgraph/testing/conformance/test_states.py``,
``test_update.py`` and ``test_concurrency.py``.
"""

from __future__ import annotations

from typing import Any

import torch

import devgraph as dg


def test_graph_is_made_captured_replayed_updated_and_closed():
    be = dg.get_backend("cpu")
    assert isinstance(be.capabilities, dg.Capabilities)
    for info in dg.backends():
        assert info.name and info.available == (not info.reason)
        assert isinstance(info.device, str) and isinstance(info.version, str)

    @dg.region(host_args=("kv_len",), mutates=("out",))
    def attention(x: Any, out: Any, *, kv_len: int) -> None:
        out.copy_(x[:, :kv_len].sum(1))

    x, out = torch.randn(4, 1024), torch.empty(4)
    pool = be.make_pool()
    graph = be.make_graph(pool=pool)
    with be.capture_context(graph, host_args={"kv_len": 512}):
        attention(x, out, kv_len=512)
    graph.replay()
    assert torch.equal(out, x[:, :512].sum(1))
    graph.update(kv_len=777)
    graph.replay()
    graph.replay()  # nothing but the last update is repeated
    assert torch.equal(out, x[:, :777].sum(1))
    info = graph.info()
    assert (graph.state, info.regions, info.segments) == ("ready", 1, 1)
    assert info.nodes and info.bytes and info.capture_seconds > 0
    graph.reset()
    assert graph.state == "empty"
    stream, mode = None, "thread_local"
    with be.capture_context(graph, stream, pool, mode):
        y = x + 1
    graph.replay()
    assert torch.equal(y, x + 1)
    graph.close()
    assert graph.state == "closed"
