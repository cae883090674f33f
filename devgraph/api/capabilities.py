"""What a backend can do, as frozen data that is read before anything is built."""

from __future__ import annotations

from typing import Any

import attrs


def _may(*hooks: str) -> Any:
    """A capability, and the methods of a vendor by which it comes about."""
    return attrs.field(default=False, metadata={"hooks": hooks})


@attrs.frozen(kw_only=True)
class Capabilities:
    """The differences between backends, one documented field each; every default is the safe one.

    A vendor declares only what it has proved: the conformance suite fails a declared capability
    that does not work and reports an undeclared one that does.
    """

    region_update: bool = _may("DeviceGraph._record", "DeviceGraph._apply")
    """Host arguments of regions inside one graph can change between replays."""
    async_update: bool = _may("DeviceGraph._apply")
    """An update runs beside the replay that needs it, and every replay needs a signal."""
    shared_pool: bool = _may("Backend.make_pool", "Pool.alias")
    """Graphs of one pool share memory, so that many buckets cost little more than the largest."""
    rng: bool = _may("Backend.get_rng_state", "Backend.set_rng_state")
    """Random numbers drawn inside a graph advance with every replay."""
    refuses_host_reads: bool = _may("DeviceGraph._begin", "Backend.is_host_read")
    """Reading device data on the host inside a capture raises instead of freezing a value."""
    streams: bool = _may("Backend.side_stream", "TorchBackend.is_unjoined")
    """Work can be forked to side streams inside a capture and joined before its end."""
    capture_error_modes: tuple[str, ...] = ("thread_local",)
    """The accepted values of ``capture_error_mode``; the first is the fallback of the others."""
    concurrent_threads: bool = _may("DeviceGraph._begin")
    """Other threads may launch and allocate on the device while one thread captures."""
    collectives: bool = _may("TorchBackend.prepare_stream")
    """Device collectives can be captured."""
    piecewise: bool = _may("Backend.wrap_compiled")
    """``torch.compile`` pieces can be captured on this backend."""
    compilers: tuple[str, ...] = ("eager",)
    """Compilers that piecewise may use for a piece."""
    node_counts: bool = _may("DeviceGraph._size")
    """``DeviceGraph.info()`` reports the number of nodes; else it reports None."""
    node_ranges: bool = _may("DeviceGraph._nodes_so_far")
    """A capture knows how many nodes it has so far, so that those of a call can be told."""

    remakes_executables: bool = _may("DeviceGraph._end")
    """What a graph launches can be dropped for the budget of its pool, and made again from the
    graph; elsewhere it stays as long as the graph, whatever the budget."""
    releasable_memory: bool = _may("Pool._release", "TorchBackend.make_pages")
    """A pool made for it gives its memory back to the device, and gets it back at the same
    addresses, so that its graphs need no capture."""
    loops: bool = _may("DeviceGraph._loop")
    """A graph can hold a loop that the device repeats for as long as a tensor says."""
    max_streams: int | None = None
    """Streams that captured graphs may take in all, or None where it is not a scarce resource."""


def hooks(capability: str) -> tuple[str, ...]:
    """Return the methods that a vendor implements for a capability, as ``Class.method``."""
    field: attrs.Attribute[Any] = attrs.fields_dict(Capabilities)[capability]
    return tuple(field.metadata.get("hooks", ()))
