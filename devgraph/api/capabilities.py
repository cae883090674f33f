"""What a backend can do, as frozen data that is read before anything is built."""

from __future__ import annotations

import attrs


@attrs.frozen(kw_only=True)
class Capabilities:
    """The differences between backends, one documented field each; every default is the safe one.

    A vendor declares only what it has proved: the conformance suite fails a declared capability
    that does not work and reports an undeclared one that does.
    """

    region_update: bool = False
    """Host arguments of regions inside one graph can change between replays."""

    async_update: bool = False
    """An update runs beside the replay that needs it, and every replay needs a signal."""

    shared_pool: bool = False
    """Graphs of one pool share memory, so that many buckets cost little more than the largest."""

    rng: bool = False
    """Random numbers drawn inside a graph advance with every replay."""

    refuses_host_reads: bool = False
    """Reading device data on the host inside a capture raises instead of freezing a value."""

    streams: bool = False
    """Work can be forked to side streams inside a capture and joined before its end."""

    capture_error_modes: tuple[str, ...] = ("thread_local",)
    """The accepted values of ``capture_error_mode``; the first is the fallback of the others."""

    concurrent_threads: bool = False
    """Other threads may launch and allocate on the device while one thread captures."""

    collectives: bool = False
    """Device collectives can be captured."""

    piecewise: bool = False
    """``torch.compile`` pieces can be captured on this backend."""

    compilers: tuple[str, ...] = ("eager",)
    """Compilers that piecewise may use for a piece."""

    node_counts: bool = False
    """``DeviceGraph.info()`` reports the number of nodes; else it reports None."""

    max_streams: int | None = None
    """Streams that captured graphs may take in all, or None where it is not a scarce resource."""
