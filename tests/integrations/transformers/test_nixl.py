"""Handoffs over NIXL, where it is installed: equal bytes, and ends of offers."""

# ruff: noqa: E402  (imports follow the skips where packages are missing)

from __future__ import annotations

import datetime
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers", reason="the transformers integration")
dist = pytest.importorskip("torch.distributed")

import devgraph as dg
from devgraph.integrations.transformers import nixl
from tests.integrations.transformers.test_transport import eventually
from tests.support.handoff_ranks import joined, made_handoff, same


@pytest.fixture
def pair() -> Iterator[Any]:
    pytest.importorskip("nixl._api", reason="NIXL: pip install nixl", exc_type=ImportError)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=datetime.timedelta(seconds=60))
    with joined(store, "nixl", 0, 1), nixl.NixlTransport() as one, nixl.NixlTransport() as other:
        yield one, other


def test_handoffs_arrive_whole_and_end_by_release_or_cancellation(pair: Any) -> None:
    first, second = pair
    for number in range(5):
        handoff = made_handoff(number)
        offer = first.offer(handoff)
        assert same(second.fetch(offer), handoff)
        second.release(offer)
        eventually(lambda: handoff.progress.ended == "released")  # noqa: B023
        eventually(lambda: not first._memory)
    offer = first.offer(handoff := made_handoff())
    handoff.progress.end("cancelled")
    with pytest.raises(dg.HandoffError, match="rank 0 offers no handoff"):
        second.fetch(offer)


def test_transport_without_the_package_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "nixl._api", None)
    with pytest.raises(ImportError, match="pip install nixl"):
        nixl.NixlTransport()
