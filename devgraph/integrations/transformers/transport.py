"""Transports, which send handoffs between processes.

A transport has three operations. The exporter offers a handoff and passes the id of the offer to
the receiver. The receiver fetches the handoff, admits the request, and releases the offer.
``TorchTransport`` uses torch.distributed; ``NixlTransport`` reads the memory of the exporter.
"""

from __future__ import annotations

import contextlib
import datetime
import itertools
import json
import logging
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import attrs
import torch
import torch.distributed as dist
from torch import Tensor

from devgraph.api.errors import (
    HandoffError,
    InputError,
    InputTypeError,
    StateError,
    brief,
    finite,
)
from devgraph.integrations.transformers.handoff import Handoff
from devgraph.runners.ranks import store_of

if TYPE_CHECKING:
    from typing_extensions import Self

logger = logging.getLogger(__name__)

_CHUNK_BYTES = 32 << 20
"""Maximum bytes of a message. After a cancellation, the transfer ends with the current message."""

_MORE, _LAST, _ENDED = range(3)
"""States of a transfer: more parts follow, the next part is the last, or the handoff has ended."""

_FOREVER = datetime.timedelta(days=365)


class Transport:
    """The base class of transports, which keep headers in the store of a process group.

    Each transport has a thread that answers messages of other ranks. Subclasses send the tensors.
    For the arguments, see ``TorchTransport``.
    """

    def __init__(self, group: Any, timeout_s: float) -> None:
        if not dist.is_initialized():
            raise StateError(
                "a transport needs a process group; call torch.distributed.init_process_group first"
            )
        self.rank = dist.get_rank(group)
        self.timeout_s = finite("timeout_s", timeout_s)
        self.closed = False
        self._name = f"{self.rank}-{uuid.uuid4().hex[:12]}"
        self._numbers = itertools.count()
        self._offers: dict[str, Handoff] = {}
        self._lock = threading.Lock()
        # Each thread has its own store client, because a blocked client blocks all its users.
        self._store = _prefixed("devgraph/handoff", store_of(group)).clone()
        inbox = self._store.clone()
        inbox.set_timeout(_FOREVER)
        try:
            self._store.queue_len(self._name)
        except (RuntimeError, NotImplementedError) as error:
            raise InputError(
                f"the store of the group has no queues ({error}); start the group with a TCPStore, "
                f"for example with torchrun"
            ) from error
        self._thread = threading.Thread(
            target=self._answer, args=(inbox,), name="devgraph-handoff", daemon=True
        )
        self._thread.start()

    def offer(self, handoff: Handoff) -> str:
        """Make a handoff available to other processes, and return the id of the offer.

        The offer ends with the handoff: when the receiver releases it, when the exporter releases
        or cancels the request, or when the timeout of the request has passed.
        """
        if not isinstance(handoff, Handoff):
            raise InputTypeError(f"a handoff must be a Handoff, got {brief(handoff)}")
        offer_id = f"{self._name}-{next(self._numbers)}"
        with self._reaching(self.rank):
            self._set(offer_id, handoff)
        with self._lock:
            self._offers[offer_id] = handoff
        handoff.progress.when_ended(lambda: self._end(offer_id))
        return offer_id

    def fetch(self, offer_id: str) -> Handoff:
        """Return an offered handoff. Other threads may run steps of an engine during the call.

        Raises:
            HandoffError: the offer has ended, or the exporter does not answer in time.
        """
        raise NotImplementedError

    def release(self, offer_id: str) -> None:
        """End an offer, so that the exporter's engine frees the slot of the request."""
        owner, rank = owner_of(offer_id)
        with self._lock:
            handoff = self._offers.get(offer_id)
        if handoff is not None:
            handoff.progress.end("released")
        elif owner != self._name:
            with self._reaching(rank, offer_id):
                self._ask(owner, release=offer_id)

    def close(self) -> None:
        """End all offers, and stop the thread. Idempotent."""
        if self.closed:
            return
        self.closed = True
        for offer_id in list(self._offers):
            self._end(offer_id)
        with contextlib.suppress(HandoffError), self._reaching(self.rank):
            self._ask(self._name, close=True)
            self._thread.join(self.timeout_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _publish(self, offer_id: str, handoff: Handoff) -> dict[str, Any]:
        """Make a handoff readable; return additional data for the receiver."""
        raise NotImplementedError

    def _withdraw(self, offer_id: str) -> None:
        """Undo ``_publish``."""

    def _send(self, message: dict[str, Any]) -> None:
        """Answer a message of a receiver in a separate thread."""

    def _entry(self, offer_id: str, rank: int) -> dict[str, Any]:
        """Return the header of an offer and the data of ``_publish``."""
        if not self._store.check([offer_id]):
            raise HandoffError(
                f"rank {rank} offers no handoff {offer_id!r}: it was released or cancelled, or "
                f"its timeout passed"
            )
        return json.loads(self._store.get(offer_id))  # type: ignore[no-any-return]

    def _answer(self, inbox: Any) -> None:
        """Answer the messages of other ranks until this transport closes."""
        while True:
            try:
                text = inbox.queue_pop(self._name)
            except RuntimeError as error:
                if not self.closed:
                    logger.warning("rank %d offers no more handoffs: %s", self.rank, error)
                return
            try:
                message = dict(json.loads(text))
                if "close" in message:
                    return
                if "release" in message:
                    self.release(message["release"])
                else:
                    threading.Thread(
                        target=self._send, args=(message,), name="devgraph-send", daemon=True
                    ).start()
            except Exception as error:
                logger.warning("rank %d ignores a message about a handoff: %r", self.rank, error)

    def _ask(self, owner: str, **message: Any) -> None:
        self._store.queue_push(owner, json.dumps(message))

    def _set(self, offer_id: str, handoff: Handoff) -> None:
        entry = {"header": handoff.to_json()} | self._publish(offer_id, handoff)
        self._store.set(offer_id, json.dumps(entry))
        self._store.check([offer_id])  # set() does not wait for the server, but check() does.

    def _end(self, offer_id: str) -> None:
        with self._lock:
            handoff = self._offers.pop(offer_id, None)
        if handoff is not None:
            self._withdraw(offer_id)
            with contextlib.suppress(HandoffError), self._reaching(self.rank):
                self._store.delete_key(offer_id)

    @contextlib.contextmanager
    def _reaching(self, rank: int, offer_id: str = "") -> Iterator[None]:
        """Convert errors of the store and of connections to errors that name the rank."""
        of = f" of handoff {offer_id!r}" if offer_id else ""
        try:
            yield
        except HandoffError:
            raise
        except RuntimeError as error:
            who = "the store of the group" if rank == self.rank else f"rank {rank}"
            raise HandoffError(
                f"rank {self.rank} cannot reach {who} in the transfer{of}, because {who} has "
                f"ended or did not answer within {self.timeout_s:g} s ({error})"
            ) from error
        except (KeyError, TypeError, ValueError) as error:
            raise HandoffError(
                f"rank {self.rank} cannot read the data{of} from rank {rank} ({error!r})"
            ) from error


class TorchTransport(Transport):
    """A transport that sends headers through the store and tensors by point-to-point messages.

    Each pair of ranks has separate connections, so that a lost rank does not affect other pairs.

    Args:
        group: the process group; None is the default group. Its store must be a TCPStore.
        device: device of fetched tensors. Tensors are sent from device to device if the exporter's
            transport has a device of the same type and torch has a collective library for it.
            Otherwise, they are sent through host memory. None selects the current accelerator, or
            the host for a host group such as gloo. Two ranks on one GPU must use the host.
        timeout_s: maximum time to wait for another rank, in seconds.

    Raises:
        InputError: the store of the group has no queues.
        StateError: torch.distributed is not initialized.
    """

    def __init__(
        self,
        group: Any = None,
        *,
        device: torch.device | str | None = None,
        timeout_s: float = 30.0,
    ) -> None:
        self._peers: dict[str, _Peer] = {}
        super().__init__(group, timeout_s)
        self.device = _device_of(group) if device is None else torch.device(device)

    def fetch(self, offer_id: str) -> Handoff:
        owner, rank = owner_of(offer_id)
        host = self.device.type == "cpu" or _library(self.device) is None
        with self._reaching(rank, offer_id):
            entry = self._entry(offer_id, rank)
            direct = entry["device"] == self.device.type and not host
            handoff = Handoff.from_json(entry["header"], self.device if direct else "cpu")
        with self._lock:
            peer = self._peers.setdefault(f"from {owner}", _Peer())
        with peer.transfer(), self._reaching(rank, offer_id):
            has_ended = self._receive(handoff, offer_id, owner, peer, direct)
            if not handoff.is_complete and not has_ended:
                header = self._entry(offer_id, rank)["header"]
                handoff = attrs.evolve(Handoff.from_json(header), data=handoff.data)
        if has_ended:
            raise HandoffError(
                f"rank {rank} ended the handoff {offer_id!r} during its transfer: its request was "
                f"cancelled or released, or its timeout passed"
            )
        return handoff

    def close(self) -> None:
        super().close()
        for peer in self._peers.values():
            peer.forget()

    def _publish(self, offer_id: str, handoff: Handoff) -> dict[str, Any]:
        return {"device": "cpu" if self.device.type == "cpu" else handoff.data.device.type}

    def _receive(
        self, handoff: Handoff, offer_id: str, owner: str, peer: _Peer, direct: bool
    ) -> bool:
        """Receive the buffer of a handoff; return whether the handoff ended too early."""
        name = f"{owner}>{self._name}>{peer.generation}"
        names = {"send": offer_id, "peer": self._name, "connection": name}
        self._ask(owner, **names, to=self.rank, direct=direct)
        peer.connect(name, 1, self._store, self.timeout_s)
        control = torch.zeros(3, dtype=torch.int64, device="cpu")
        start, state = 0, _MORE
        while state == _MORE:
            peer.receive(control)
            end, total, state = control.tolist()
            if state == _ENDED:
                return True
            # A message that exceeds its buffer would abort the process.
            is_whole = end == total or state == _MORE
            if total != handoff.nbytes or not (start <= end <= total and is_whole):
                raise ValueError(f"bytes to {end} of {total} for a header of {handoff.nbytes}")
            if start < end:
                peer.receive(handoff.data[start:end])
            start = end
        return False

    def _send(self, message: dict[str, Any]) -> None:
        """Send an offered handoff to one rank, or report that the offer has ended."""
        try:
            offer_id, rank = message["send"], message["to"]
            with self._lock:
                handoff = self._offers.get(offer_id)
                peer = self._peers.setdefault(f"to {message['peer']}", _Peer())
            with peer.transfer(), self._reaching(rank, offer_id):
                peer.connect(message["connection"], 0, self._store, self.timeout_s)
                if handoff is None:
                    peer.send(_control(state=_ENDED))
                else:
                    handoff.progress.receiver = f"rank {rank}"
                    self._send_parts(handoff, offer_id, peer, direct=message["direct"])
        except Exception as error:
            logger.warning("rank %d stops sending a handoff: %r", self.rank, error)

    def _send_parts(self, handoff: Handoff, offer_id: str, peer: _Peer, *, direct: bool) -> None:
        start, ready, state, ends = 0, 0, _MORE, handoff.layer_ends
        while state == _MORE:
            if start == ends[ready]:
                ready = handoff.progress.wait(ready, self.timeout_s)
            if handoff.progress.ended is not None:
                peer.send(_control(state=_ENDED))
                return
            if ready == handoff.layers and not handoff.is_complete:
                complete = handoff.progress.handoff
                assert complete is not None
                self._set(offer_id, complete)
                handoff = complete
            end = min(start + _CHUNK_BYTES, ends[ready])
            state = _LAST if ready == handoff.layers and end == ends[-1] else _MORE
            peer.send(_control(end, ends[-1], state))
            if start < end:
                part = handoff.data[start:end]
                peer.send(part if direct else part.cpu())
            start = end


def _control(end: int = 0, total: int = 0, state: int = 0) -> Tensor:
    """Return the message that announces a part of a buffer."""
    return torch.tensor([end, total, state], device="cpu")


class _Peer:
    """The connections to another transport in one direction. The exporter is side 0."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.generation = 0
        self._name = ""
        self._groups: dict[str, Any] = {}

    def connect(self, name: str, side: int, store: Any, timeout_s: float) -> None:
        """Connect through host memory, under a name that both sides use. Idempotent."""
        if self._name == name:
            return
        self._side, self._timeout = side, datetime.timedelta(seconds=timeout_s)
        self._store = _prefixed(name, store.clone())
        self._groups = {"cpu": dist.ProcessGroupGloo(self._store, side, 2, self._timeout)}
        self._name = name

    def send(self, tensor: Tensor) -> None:
        self._wait(self._group(tensor.device).send([tensor], 1 - self._side, 0), tensor.device)

    def receive(self, tensor: Tensor) -> None:
        self._wait(self._group(tensor.device).recv([tensor], 1 - self._side, 0), tensor.device)

    def _group(self, device: torch.device) -> Any:
        if device.type != "cpu":
            torch.accelerator.set_device_index(device.index)  # Each thread has its own index.
        if device.type not in self._groups:
            connect = _library(device)
            assert connect is not None  # Otherwise, both ranks use the host.
            store = _prefixed(device.type, self._store)
            self._groups[device.type] = connect(store, self._side, self._name, self._timeout)
        return self._groups[device.type]

    def _wait(self, work: Any, device: torch.device) -> None:
        if device.type == "cpu":
            work.wait(self._timeout)
            return
        end = time.monotonic() + self._timeout.total_seconds()
        # On a device, wait() blocks only the stream, which never continues if the rank is gone.
        while not work.is_completed():
            if time.monotonic() > end:
                raise RuntimeError("a message did not arrive in time")
            time.sleep(1e-4)
        work.wait()

    @contextlib.contextmanager
    def transfer(self) -> Iterator[None]:
        """Use the connections for one transfer. If it fails, the next transfer reconnects."""
        with self._lock:
            try:
                yield
            except BaseException:
                self.forget()
                raise

    def forget(self) -> None:
        """Drop the connections. The next transfer connects under another name."""
        self.generation += 1
        self._name = ""
        groups, self._groups = self._groups, {}
        for group in groups.values():
            group.abort()  # Otherwise, NCCL keeps its memory and threads until the process ends.


def owner_of(offer_id: str) -> tuple[str, int]:
    """Return the name and the rank of the transport that made an offer."""
    if not isinstance(offer_id, str):
        raise InputTypeError(f"the id of an offer must be a str, got {brief(offer_id)}")
    name, _, number = offer_id.rpartition("-")
    rank, _, unique = name.partition("-")
    if not (rank.isdecimal() and unique and number.isdecimal()):
        raise InputError(f"{offer_id!r} is not the id of an offer")
    return name, int(rank)


def _library(device: torch.device) -> Callable[..., Any] | None:
    """Return a function (store, side, pair, timeout) that connects devices, or None."""
    name = dist.get_default_backend_for_device(device).upper()
    kind, plugin = getattr(dist, f"ProcessGroup{name}", None), dist.Backend._plugins.get(name)
    if kind is None and plugin is None:
        return None

    def connect(store: Any, side: int, pair: str, timeout: datetime.timedelta) -> Any:
        if kind is not None:
            options = kind.Options()
            options._timeout = timeout
            return kind(store, side, 2, options)
        from torch._C._distributed_c10d import _DistributedBackendOptions

        assert plugin is not None
        if not plugin.extended_api:
            return plugin.creator_fn(store, side, 2, timeout)
        options = _DistributedBackendOptions()
        options.store, options.group_rank, options.group_size = store, side, 2
        options.timeout, options.group_id, options.global_ranks_in_group = timeout, pair, [0, 1]
        return plugin.creator_fn(options, None)

    return connect


def _device_of(group: Any) -> torch.device:
    """Return the current accelerator if the group supports it, otherwise the host."""
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or dist.get_backend(group) == "gloo":
        return torch.device("cpu")
    return torch.device(accelerator.type, torch.accelerator.current_device_index())


def _prefixed(prefix: str, store: Any) -> Any:
    from torch._C._distributed_c10d import PrefixStore

    return PrefixStore(prefix, store)
