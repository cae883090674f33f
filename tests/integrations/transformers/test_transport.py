"""Handoffs between processes: equal bytes, ends of either side at any time, and no leaks."""

# ruff: noqa: E402  (imports follow the skip where transformers is missing)

from __future__ import annotations

import contextlib
import datetime
import gc
import json
import logging
import os
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers", reason="the transformers integration")
dist = pytest.importorskip("torch.distributed")

import devgraph as dg
from devgraph.api.errors import InputError, InputTypeError, StateError
from devgraph.integrations.transformers import TorchTransport
from devgraph.integrations.transformers import transport as module
from tests.support.handoff_ranks import joined, made_handoff, same

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch without distributed")

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def store() -> Any:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=datetime.timedelta(seconds=120))


@pytest.fixture(autouse=True)
def _local(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")


@pytest.fixture
def pair(store: Any, request: pytest.FixtureRequest) -> Iterator[Any]:
    """Two transports of one process; the receiver waits for five seconds."""
    name = request.node.name
    with joined(store, name, 0, 1), TorchTransport() as first, TorchTransport(timeout_s=5) as other:
        yield first, other


def eventually(is_true: Any) -> None:
    end = time.monotonic() + 20
    while not is_true():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_transport_without_a_process_group_is_refused() -> None:
    with pytest.raises(StateError, match="call torch.distributed.init_process_group first"):
        TorchTransport()


def test_handoff_arrives_whole_and_its_release_ends_it(pair: Any) -> None:
    first, second = pair
    for number in range(3):
        handoff = made_handoff(number)
        offer = first.offer(handoff)
        fetched = second.fetch(offer)
        assert same(fetched, handoff)
        assert fetched.to_json() == handoff.to_json()
        assert handoff.progress.receiver == "rank 0"
        assert handoff.progress.ended is None
        second.release(offer)
        eventually(lambda: handoff.progress.ended == "released")  # noqa: B023
        eventually(lambda: not first._offers)
        with pytest.raises(dg.HandoffError, match="rank 0 offers no handoff"):
            second.fetch(offer)


def test_exporter_that_releases_or_cancels_withdraws_the_offer(pair: Any) -> None:
    first, second = pair
    for end in ("released", "cancelled"):
        handoff = made_handoff()
        offer = first.offer(handoff)
        handoff.progress.end(end)
        with pytest.raises(dg.HandoffError, match="released or cancelled"):
            second.fetch(offer)
    offer = first.offer(handoff := made_handoff())
    first.release(offer)
    assert handoff.progress.ended == "released"
    second.release(offer)  # Ended already.


def test_layers_travel_when_they_are_ready(pair: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_CHUNK_BYTES", 100)
    first, second = pair
    handoff = made_handoff()
    handoff.progress.ready = 1
    offer = first.offer(handoff)
    fetched: list[Any] = []
    thread = threading.Thread(target=lambda: fetched.append(second.fetch(offer)))
    thread.start()
    eventually(lambda: handoff.progress.receiver)
    time.sleep(0.05)
    assert not fetched
    with handoff.progress.changed:
        handoff.progress.ready = 2
        handoff.progress.changed.notify_all()
    thread.join(20)
    assert same(fetched[0], handoff)
    first.release(offer)


def test_layerwise_handoff_arrives_with_its_first_token(pair: Any) -> None:
    first, second = pair
    complete = made_handoff()
    handoff = attrs.evolve(complete, token_ids=complete.token_ids[:-1])
    handoff.progress.ready = 1
    offer = first.offer(handoff)
    threading.Timer(0.2, handoff.progress.complete, [complete, lambda: True]).start()
    fetched = second.fetch(offer)
    assert same(fetched, complete)
    assert fetched.to_json() == complete.to_json()
    first.release(offer)


def test_request_that_is_cancelled_in_transfer_is_named_and_the_next_one_arrives(pair: Any) -> None:
    first, second = pair
    handoff = made_handoff()
    handoff.progress.ready = 1
    offer = first.offer(handoff)
    threading.Timer(0.2, handoff.progress.end, ["cancelled"]).start()
    with pytest.raises(dg.HandoffError, match="ended the handoff .* during its transfer"):
        second.fetch(offer)
    offer = first.offer(handoff := made_handoff(1))
    assert same(second.fetch(offer), handoff)
    first.release(offer)


def test_late_layer_times_out_on_the_receiver_and_the_next_handoff_arrives(pair: Any) -> None:
    first, second = pair
    handoff = made_handoff()
    handoff.progress.ready = 1
    offer = first.offer(handoff)
    with pytest.raises(dg.HandoffError, match="rank 0 cannot reach .* within 5 s"):
        second.fetch(offer)
    handoff.progress.end("cancelled")
    offer = first.offer(handoff := made_handoff(1))
    assert same(second.fetch(offer), handoff)
    first.release(offer)


def test_handoffs_in_both_directions_from_several_threads(pair: Any) -> None:
    wrong: list[Any] = []

    def many(source: TorchTransport, target: TorchTransport, seed: int) -> None:
        for number in range(10):
            handoff = made_handoff(seed + number)
            offer = source.offer(handoff)
            if not same(target.fetch(offer), handoff):
                wrong.append(offer)
            target.release(offer)

    first, second = pair
    threads = [
        threading.Thread(target=many, args=(*sides, seed))
        for seed, sides in enumerate([(first, second), (second, first)] * 2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong
    eventually(lambda: not first._offers and not second._offers)


def test_ended_offers_keep_no_memory(pair: Any) -> None:
    first, second = pair
    handoff = made_handoff()
    alive = weakref.ref(handoff)
    offer = first.offer(handoff)
    assert same(second.fetch(offer), handoff)
    second.release(offer)
    del handoff
    eventually(lambda: gc.collect() >= 0 and alive() is None)


@pytest.mark.parametrize("given", [None, 5, b"0-a-1"])
def test_arguments_of_other_types_are_refused(pair: Any, given: Any) -> None:
    for call in (pair[0].offer, pair[0].fetch, pair[0].release):
        with pytest.raises(InputTypeError):
            call(given)


def test_ids_of_offers_are_checked(pair: Any) -> None:
    for given in ("", "7", "a-b-c", "0--1"):
        with pytest.raises(InputError, match="is not the id of an offer"):
            pair[1].fetch(given)


WRONG_SIZES = [{"cached": 1}, {"cached": 90}, {"kv_heads": [0, 0], "states": [{}, {}]}]


@pytest.mark.parametrize("change", WRONG_SIZES, ids=["smaller", "larger", "empty"])
def test_header_of_another_size_than_its_data_is_refused(pair: Any, change: Any) -> None:
    """gloo aborts the process if a message is larger than its buffer."""
    first, second = pair
    offer = first.offer(made_handoff())
    entry = json.loads(first._store.get(offer))
    entry["header"] = json.dumps(json.loads(entry["header"]) | change)
    first._store.set(offer, json.dumps(entry))
    with pytest.raises(dg.HandoffError, match="cannot read the data .*1664 of 1664"):
        second.fetch(offer)
    assert same(second.fetch(first.offer(made_handoff(1))), made_handoff(1))


@pytest.mark.parametrize(
    "text", [b"\x80\x04K\x01.", b"[]", b"5", b'{"header": "{}"}', b'{"send": 5}']
)
def test_data_that_cannot_be_read_is_refused_and_the_next_handoff_arrives(
    pair: Any, text: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = pair
    offer = first.offer(made_handoff())
    first._store.set(offer, text)
    with pytest.raises(dg.HandoffError, match="cannot read the data of handoff"):
        second.fetch(offer)
    with caplog.at_level(logging.WARNING):
        first._store.queue_push(first._name, text)
        eventually(lambda: "a handoff" in caplog.text)
    offer = first.offer(handoff := made_handoff(1))
    assert same(second.fetch(offer), handoff)
    second.release(offer)
    eventually(lambda: handoff.progress.ended == "released")


def test_last_layer_without_tensors_waits_for_the_first_token(pair: Any) -> None:
    first, second = pair
    fields = {"kv_heads": (2, None), "states": ({}, {})}
    handoff = attrs.evolve(made_handoff(), **fields)
    handoff = attrs.evolve(
        handoff, data=handoff.data[: handoff.layer_ends[-1]], token_ids=handoff.token_ids[:-1]
    )
    handoff.progress.ready = 1
    offer = first.offer(handoff)
    thread = threading.Timer(
        0.3,
        lambda: handoff.progress.complete(attrs.evolve(handoff, token_ids=tokens), lambda: True),
    )
    tokens = (*handoff.token_ids, 3)
    thread.start()
    assert second.fetch(offer).token_ids == tokens


def test_store_without_queues_is_refused(tmp_path: Path) -> None:
    files = dist.FileStore(str(tmp_path / "store"), 1)
    with (
        joined(files, "files", 0, 1),
        pytest.raises(InputError, match="has no queues .* start the group with a TCPStore"),
    ):
        TorchTransport()


class Peer:
    """A process that imports once and forks itself for each part that a test orders."""

    def __init__(self, port: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.handoff_ranks", str(port)],
            stdin=subprocess.PIPE,
            cwd=ROOT,
            env={**os.environ, "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": os.pathsep.join(sys.path)},
            text=True,
        )
        self._is_used = False

    def order(self, part: str, prefix: str) -> None:
        self._is_used = True
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([part, prefix]) + "\n")
        self._process.stdin.flush()

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        if not self._is_used:  # Its imports may take longer than any test.
            self._process.kill()
        assert (self._process.wait(60) == 0) == self._is_used


@pytest.fixture(scope="module", autouse=True)  # It imports beside the first tests.
def peer(store: Any) -> Iterator[Peer]:
    made = Peer(store.port)
    yield made
    made.close()


@contextlib.contextmanager
def beside(store: Any, peer: Peer, part: str) -> Iterator[tuple[TorchTransport, Any]]:
    """Join a group with a process that runs ``part``; yield a transport and a store."""
    peer.order(part, part)
    with joined(store, part, 0, 2), TorchTransport(timeout_s=3) as transport:
        yield transport, dist.PrefixStore(part, store)


@pytest.mark.parametrize("part", ["offers_and_dies", "dies_in_transfer"])
def test_exporter_that_dies_is_named_and_the_receiver_goes_on(
    store: Any, peer: Peer, part: str
) -> None:
    """FAULTS 54."""
    with beside(store, peer, part) as (transport, words), TorchTransport() as other:
        offer = words.get("offer").decode()
        with pytest.raises(dg.HandoffError, match="rank 0 cannot reach rank 1 in the transfer"):
            transport.fetch(offer)
        transport.release(offer)
        offer = other.offer(handoff := made_handoff())
        assert same(transport.fetch(offer), handoff)


def test_exporter_that_dies_after_a_transfer_leaves_the_handoff(store: Any, peer: Peer) -> None:
    """FAULTS 54."""
    with beside(store, peer, "dies_after_transfer") as (transport, words):
        offer = words.get("offer").decode()
        fetched = transport.fetch(offer)
        words.set("fetched", "")
        assert same(fetched, made_handoff())
        transport.release(offer)


def test_receiver_that_dies_is_named_and_the_exporter_goes_on(
    store: Any, peer: Peer, caplog: pytest.LogCaptureFixture
) -> None:
    """FAULTS 54."""
    with beside(store, peer, "fetches_and_dies") as (transport, words), TorchTransport() as other:
        handoff = made_handoff()
        handoff.progress.ready = 1
        offer = transport.offer(handoff)
        words.set("offer", offer)
        eventually(lambda: handoff.progress.receiver == "rank 1")
        words.set("sending", "")
        time.sleep(0.3)
        with caplog.at_level(logging.WARNING), handoff.progress.changed:
            handoff.progress.ready = 2
            handoff.progress.changed.notify_all()
        eventually(lambda: "cannot reach rank 1 in the transfer" in caplog.text)
        assert same(other.fetch(offer), handoff)
        transport.release(offer)
        assert not transport._offers
