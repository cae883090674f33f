"""Put devgraph under SGLang, and take it out again: every place that is changed is in this file."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

from devgraph.api.errors import DeviceGraphError
from devgraph.integrations.engine.installation import Changes, Installed, mode_text, switched
from devgraph.integrations.engine.memory import GraphMemory
from devgraph.integrations.sglang.backends import MODEL, breakable_backend, full_backend, shared
from devgraph.integrations.sglang.modes import EngineMode, engine_mode
from devgraph.integrations.sglang.segments import BREAKS
from devgraph.integrations.sglang.updated import with_region

SWITCH = "DEVGRAPH_SGLANG"
"""Environment variable: unset or 0 leaves SGLang alone, 1 installs, strict installs or refuses."""

SAVER = "sglang.srt.utils.torch_memory_saver_adapter"

# What the backends use of SGLang, by module; a class and what is used of it after a dot.
_USED = {
    f"{MODEL}.runner_backend.full_cuda_graph_backend": "FullCudaGraphBackend.replay",
    f"{MODEL}.runner_backend.breakable_cuda_graph_backend": "BreakableCudaGraphBackend.replay",
    f"{MODEL}.runner_utils.pool": "get_global_graph_memory_pool set_global_graph_memory_pool",
    BREAKS: (
        "BreakableCUDAGraph.replay BreakableCUDAGraphCapture._begin_new_segment "
        "BreakableCUDAGraphCapture._end_current_segment _current_stream_var get_device_module"
    ),
    "sglang.srt.distributed.device_communicators.pynccl_allocator": "set_graph_pool_id",
    "sglang.srt.constants": "GPU_MEMORY_TYPE_CUDA_GRAPH",
    SAVER: "_TorchMemorySaverAdapterReal.pause _TorchMemorySaverAdapterReal.resume",
}


_here = Installed("SGLang", SWITCH)


def install(*, mode: str | None = None, strict: bool = True) -> None:
    """Let SGLang choose devgraph's backends wherever it would choose its own full or breakable.

    Call it before the engine is made, in each of its processes; DEVGRAPH_SGLANG=1 does that.
    Idempotent. Devices for which SGLang has backends of their own keep those.

    Args:
        mode: a mode configuration as JSON; None for the environment's DEVGRAPH_MODE, and without
            that SGLang's own options choose.
        strict: raise if this SGLang cannot be taken over; else warn, and it keeps its own graphs.

    Raises:
        ConfigError: the mode is wrong, is something that SGLang cannot do, or another one than
            devgraph was installed with.
        InstallError: with ``strict``, this SGLang has other places than those that devgraph takes
            over; names the first one that is missing. Nothing is changed then.
    """
    if not _here.repeated(mode=mode):
        text, changes = mode_text(mode), Changes("SGLang 0.5.17 to 0.5.23")
        _here.put(changes, lambda: _change(changes, text), strict=strict, mode=text)


def _change(changes: Changes, mode: str | None) -> None:
    for module, names in _USED.items():
        owner = importlib.import_module(module)
        for name in names.split():
            kind, _, attribute = name.partition(".")
            changes.require(owner, kind)
            changes.require(getattr(owner, kind), *filter(None, [attribute]))
    choice = importlib.import_module(f"{MODEL}.runner_backend.utils")
    changes.change(choice, "FullCudaGraphBackend", full_backend())
    changes.change(choice, "BreakableCudaGraphBackend", breakable_backend())
    radix = importlib.import_module("sglang.srt.layers.radix_attention").RadixAttention
    marked = getattr(radix, "_eager_attention", None)
    if marked is not None:  # 0.5.17 has it elsewhere, and no prefill that is updated
        changes.change(radix, "_eager_attention", with_region(marked))
    saver = importlib.import_module(SAVER)
    for name, ours in (("pause", GraphMemory.release), ("resume", GraphMemory.restore)):
        after = functools.partial(_with_graphs, ours)
        changes.around(saver._TorchMemorySaverAdapterReal, name, after=after)
    if mode is not None:
        platform = importlib.import_module("sglang.srt.platforms").current_platform
        _put_mode(changes, engine_mode(mode, platform.device_name))


def _with_graphs(ours: Callable[[GraphMemory], None], saver: Any, tag: str) -> None:
    """Do ``ours`` beside a method of SGLang's memory ``saver``, if graphs are meant."""
    if tag == importlib.import_module("sglang.srt.constants").GPU_MEMORY_TYPE_CUDA_GRAPH:
        ours(shared().memory)


def _put_mode(changes: Changes, mode: EngineMode) -> None:
    arguments = importlib.import_module("sglang.srt.server_args").ServerArgs
    # Arguments resolve later than they are made, once, in one process; before 0.5.18 as they are.
    name = "resolve_once" if hasattr(arguments, "resolve_once") else "__post_init__"

    def put(self: Any, *_: Any, **__: Any) -> None:
        if not getattr(self, "_resolution_finished", False):
            mode.put_into(self)

    changes.around(arguments, name, before=put, after=lambda self, *_, **__: mode.check(self))
    changes.change(shared().memory, "limits", mode.limits)


def uninstall() -> None:
    """Undo ``install``: engines made afterwards use SGLang's own backends. Idempotent; takes the
    memory of graphs back first, if the engine has released it."""
    _here.take_out(shared().memory)


def plugin() -> None:
    """The entry point of group ``sglang.srt.plugins``: inert unless DEVGRAPH_SGLANG asks for it.

    Raises:
        SystemExit: DEVGRAPH_SGLANG or DEVGRAPH_MODE has no meaning, or devgraph cannot be installed
            under ``strict``; SGLang would only log any other exception and go on without devgraph.
    """
    try:
        asked = switched(SWITCH)
        if asked is not None:
            install(strict=asked == "strict")
    except DeviceGraphError as error:
        raise SystemExit(f"devgraph: {error}") from error


@functools.cache
def platform_class() -> Any:
    """Return the class that an out-of-tree platform derives from."""
    interface: Any = importlib.import_module("sglang.srt.platforms.interface")

    class DeviceGraphPlatform(interface.SRTPlatform):  # type: ignore[misc]
        """A platform of SGLang that captures and replays through devgraph.

        Say the identity of the device, its memory and its attention backend, as for any platform
        of SGLang; the graph runners are SGLang's own, over devgraph's backend of the device.
        """

        _enum = interface.PlatformEnum.OOT
        capabilities = interface.PlatformCapabilities(graph_capture=True)

        def init_backend(self) -> None:
            """Called by SGLang in each worker, before it captures."""
            install()

        def get_graph_runner_cls(self) -> Any:
            return importlib.import_module(f"{MODEL}.runner").DecodeCudaGraphRunner

        def get_full_graph_backend_cls(self) -> Any:
            return full_backend()

    return DeviceGraphPlatform
