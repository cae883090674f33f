"""devgraph: one API for the device graphs of every vendor.

Names are bound on first use. Importing devgraph imports neither torch nor a vendor package.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from devgraph.api import HOMES as _API_HOMES
from devgraph.api import __version__ as __version__
from devgraph.api import bound_on_use as _bound_on_use

if TYPE_CHECKING:
    from devgraph.api.backend import Backend as Backend
    from devgraph.api.buffers import StaticBuffers as StaticBuffers
    from devgraph.api.callables import Graphed as Graphed
    from devgraph.api.callables import graphed as graphed
    from devgraph.api.callables import ungraphed as ungraphed
    from devgraph.api.capabilities import Capabilities as Capabilities
    from devgraph.api.capture import Captured as Captured
    from devgraph.api.capture import capture as capture
    from devgraph.api.config.cluster import plan_cluster as plan_cluster
    from devgraph.api.config.facts import EngineFacts as EngineFacts
    from devgraph.api.config.flags import add_cli_args as add_cli_args
    from devgraph.api.config.model import DeviceGraphConfig as DeviceGraphConfig
    from devgraph.api.config.phase import DeviceGraphWarning as DeviceGraphWarning
    from devgraph.api.config.phase import PhaseConfig as PhaseConfig
    from devgraph.api.config.resolve import resolve as resolve
    from devgraph.api.errors import *  # noqa: F403
    from devgraph.api.gates import Gate as Gate
    from devgraph.api.gates import Gates as Gates
    from devgraph.api.graph import DeviceGraph as DeviceGraph
    from devgraph.api.graph import GraphInfo as GraphInfo
    from devgraph.api.graph import GraphState as GraphState
    from devgraph.api.marks.gates import signal as signal
    from devgraph.api.marks.gates import wait as wait
    from devgraph.api.marks.marks import graph_break as graph_break
    from devgraph.api.marks.marks import is_capturing as is_capturing
    from devgraph.api.marks.marks import no_graph as no_graph
    from devgraph.api.marks.marks import region as region
    from devgraph.api.policy.job import UpdateBudget as UpdateBudget
    from devgraph.api.pool import Pool as Pool
    from devgraph.api.prove import Report as Report
    from devgraph.api.registry import BackendInfo as BackendInfo
    from devgraph.api.registry import backends as backends
    from devgraph.api.registry import get_backend as get_backend
    from devgraph.api.registry import register as register
    from devgraph.api.training import make_graphed_callables as make_graphed_callables
    from devgraph.runners import Decision as Decision
    from devgraph.runners import DecodeRunner as DecodeRunner
    from devgraph.runners import EncoderRunner as EncoderRunner
    from devgraph.runners import HostSlot as HostSlot
    from devgraph.runners import InputSlot as InputSlot
    from devgraph.runners import Loop as Loop
    from devgraph.runners import LoopResult as LoopResult
    from devgraph.runners import OutputSlot as OutputSlot
    from devgraph.runners import Pad as Pad
    from devgraph.runners import PrefillRunner as PrefillRunner
    from devgraph.runners import RankGroup as RankGroup
    from devgraph.runners import Reason as Reason
    from devgraph.runners import StateSlot as StateSlot

_HOMES = {
    **_API_HOMES,
    "devgraph.runners": """
        Decision DecodeRunner EncoderRunner HostSlot InputSlot Loop LoopResult OutputSlot Pad
        PrefillRunner RankGroup Reason StateSlot
    """.split(),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = sorted([*_HOME_OF, "__version__"])

__getattr__ = _bound_on_use(__name__, _HOME_OF)


def __dir__() -> list[str]:
    return list(__all__)
