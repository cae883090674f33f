"""Capabilities: the declared features of a backend."""

from __future__ import annotations

from typing import Any

import attrs

from devgraph.api.errors import ConfigTypeError, brief


def _optional(*hooks: str) -> Any:
    """Declare a capability, off by default; ``hooks`` are the methods that implement it."""
    return attrs.field(default=False, metadata={"hooks": hooks})


@attrs.frozen(kw_only=True)
class Capabilities:
    """The features in which backends differ. The defaults declare as little as possible.

    The conformance suite fails if a declared capability does not work, and reports an undeclared
    capability whose tests all pass.
    """

    region_update: bool = _optional("DeviceGraph._record", "DeviceGraph._apply")
    """Host arguments of regions inside one graph can change between replays."""
    async_update: bool = _optional("DeviceGraph._apply")
    """An update runs during its replay; each region waits for a signal from the update."""
    shared_pool: bool = _optional("Backend.make_pool", "Pool.alias")
    """Graphs of one pool share memory, so that many buckets need little more than the largest."""
    rng: bool = _optional("Backend.get_rng_state", "Backend.set_rng_state")
    """Random numbers drawn inside a graph advance with every replay."""
    refuses_host_reads: bool = _optional("DeviceGraph._begin", "Backend.is_host_read")
    """Reading device data on the host inside a capture raises instead of freezing a value."""
    streams: bool = _optional("Backend.side_stream", "TorchBackend.is_unjoined")
    """Work can be forked to side streams inside a capture and joined before its end."""
    capture_error_modes: tuple[str, ...] = ("thread_local",)
    """The supported values of ``capture_error_mode``. The first replaces an unsupported value."""
    concurrent_threads: bool = _optional("DeviceGraph._begin")
    """Other threads may launch and allocate on the device while one thread captures."""
    collectives: bool = _optional("TorchBackend.prepare_stream")
    """Collectives of the device can be captured."""
    piecewise: bool = False
    """Pieces that ``torch.compile`` compiled can be captured."""
    compilers: tuple[str, ...] = ("eager",)
    """Compilers that policy ``piecewise`` may use for a piece."""
    node_counts: bool = _optional("DeviceGraph._size")
    """``DeviceGraph.info()`` reports the number of nodes."""
    node_ranges: bool = _optional("DeviceGraph._nodes_so_far")
    """Nodes can be counted during a capture, so that each node can be assigned to a call."""

    remakes_executables: bool = _optional("DeviceGraph._end")
    """Executables can be evicted to meet the pool's budget, and rebuilt from their graphs.

    On other backends an executable lives as long as its graph, regardless of the budget.
    """
    releasable_memory: bool = _optional("Pool._release", "TorchBackend.make_pages")
    """A pool can release its memory to the device and later map memory at the same addresses."""
    loops: bool = _optional("DeviceGraph._loop")
    """A graph can contain a loop that the device repeats while a tensor is true."""
    gates: bool = _optional("Backend.make_gate_channel")
    """A graph can wait at a gate that the host opens, and signal to the host.

    On other backends a gate mark causes a break, so policy ``full`` refuses it.
    """
    max_streams: int | None = None
    """Maximum number of streams that all captured graphs can use together; None if unlimited."""

    def __attrs_post_init__(self) -> None:
        for field in attrs.fields(Capabilities):
            value, default = getattr(self, field.name), field.default
            kind = int if default is None else type(default)
            if value is not default and type(value) is not kind:
                raise ConfigTypeError(
                    f"capability {field.name} must be of type {kind.__name__}, got {brief(value)}"
                )


def hooks(capability: str) -> tuple[str, ...]:
    """Return the methods that a vendor implements for a capability, as ``Class.method``."""
    field: attrs.Attribute[Any] = attrs.fields_dict(Capabilities)[capability]
    return tuple(field.metadata.get("hooks", ()))
