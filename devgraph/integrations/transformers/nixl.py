"""Handoffs over NIXL: the receiver reads the exporter's host memory through UCX."""

from __future__ import annotations

import base64
import contextlib
import time
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from devgraph.api.errors import HandoffError
from devgraph.integrations.transformers.handoff import Handoff
from devgraph.integrations.transformers.transport import Transport, owner_of


class NixlTransport(Transport):
    """A transport in which receivers read registered memory of the exporter.

    The exporter does not take part in transfers. Device tensors are copied through host memory.

    Args:
        group: as for ``TorchTransport``; the group's store contains the headers.
        timeout_s: maximum time to wait for another rank, in seconds.

    Raises:
        ImportError: NIXL is not installed.
        InputError: the store of the group has no queues.
    """

    def __init__(self, group: Any = None, *, timeout_s: float = 30.0) -> None:
        try:
            from nixl._api import nixl_agent, nixl_agent_config
        except ImportError as error:
            raise ImportError("this transport needs NIXL: pip install nixl") from error
        super().__init__(group, timeout_s)
        self._agent = nixl_agent(self._name, nixl_agent_config(backends=["UCX"]))
        self._memory: dict[str, tuple[Tensor, Any]] = {}

    def fetch(self, offer_id: str) -> Handoff:
        owner, rank = owner_of(offer_id)
        with self._reaching(rank, offer_id):
            entry = self._entry(offer_id, rank)
            handoff = Handoff.from_json(entry["header"])
            with self._lock, self._registered(handoff.data):
                self._agent.add_remote_agent(base64.b64decode(entry["agent"]))
                there = [(entry["address"], handoff.nbytes, 0)]
                self._read(handoff.data, self._agent.get_xfer_descs(there, "DRAM"), owner)
            # If the offer ended during the read, the memory may have been overwritten.
            if not self._store.check([offer_id]):
                raise HandoffError(
                    f"rank {rank} ended the handoff {offer_id!r} during its transfer"
                )
        return handoff

    def _read(self, data: Tensor, source: Any, owner: str) -> None:
        end = time.monotonic() + self.timeout_s
        work = self._agent.initialize_xfer(
            "READ", self._agent.get_xfer_descs([data]), source, owner
        )
        state = self._agent.transfer(work)
        while state == "PROC" and time.monotonic() < end:
            time.sleep(1e-4)
            state = self._agent.check_xfer_state(work)
        self._agent.release_xfer_handle(work)
        if state != "DONE":
            raise RuntimeError(f"the NIXL read is in state {state}")

    @contextlib.contextmanager
    def _registered(self, data: Tensor) -> Iterator[None]:
        registration = self._agent.register_memory(data)
        try:
            yield
        finally:
            self._agent.deregister_memory(registration)

    def _publish(self, offer_id: str, handoff: Handoff) -> dict[str, Any]:
        handoff = handoff.progress.handoff or handoff
        if not handoff.is_complete:
            raise HandoffError(
                "NIXL sends only complete handoffs: offer this handoff after its prompt has run"
            )
        handoff.progress.wait(handoff.layers - 1, self.timeout_s)
        data = handoff.data.cpu()
        with self._lock:
            self._memory[offer_id] = data, self._agent.register_memory(data)
            agent = base64.b64encode(self._agent.get_agent_metadata()).decode()
        return {"address": data.data_ptr(), "agent": agent, "header": handoff.to_json()}

    def _withdraw(self, offer_id: str) -> None:
        with self._lock:
            _, registration = self._memory.pop(offer_id)
            self._agent.deregister_memory(registration)
