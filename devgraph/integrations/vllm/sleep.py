"""vLLM's sleep, of both levels: the memory of graphs goes with what vLLM itself gives back, and
comes back with it at the same addresses. The functions return a method of ``Worker`` with that."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from devgraph.integrations.vllm.layer import current_layer


def prepared(init: Callable[..., None]) -> Callable[..., None]:
    """Of ``__init__``: graphs that are captured later lie in memory that can be given back, if the
    engine may sleep."""
    memory = current_layer().memory

    @functools.wraps(init)
    def prepare(self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        # Collectives register with other ranks what lies behind an address, and that changes;
        # vLLM's own option for graphs that sleep keeps them from it.
        alone = vllm_config.parallel_config.world_size_across_dp == 1
        registers = not (alone or getattr(vllm_config, "use_cumem_cudagraph_pool", False))
        memory.releasable = vllm_config.model_config.enable_sleep_mode and not registers
        init(self, vllm_config, *args, **kwargs)

    return prepare


def released(sleep: Callable[..., Any]) -> Callable[..., Any]:
    """Of ``sleep``: graphs too."""
    memory = current_layer().memory

    @functools.wraps(sleep)
    def release(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = sleep(self, *args, **kwargs)
        memory.release()
        return result

    return release


def restored(wake_up: Callable[..., Any]) -> Callable[..., Any]:
    """Of ``wake_up``, with whatever tags: graphs too, and first. If there is no memory for them,
    vLLM still sleeps and can be woken again."""
    memory = current_layer().memory

    @functools.wraps(wake_up)
    def restore(self: Any, *args: Any, **kwargs: Any) -> Any:
        memory.restore()
        return wake_up(self, *args, **kwargs)

    return restore
