"""Device graphs for pipelines of diffusers; see docs/graphed.md.

This module does not import diffusers: a pipeline is any object with a denoiser (``transformer`` or
``unet``) and, optionally, a ``vae``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from devgraph.api.backend import Backend
from devgraph.api.callables import Graphed, graphed, ungraphed
from devgraph.api.errors import InputError, StateError, brief
from devgraph.api.prove import Report
from devgraph.api.registry import get_backend

_DENOISERS = ("transformer", "transformer_2", "unet")
_ADAPTER_CALLS = """
load_lora_weights unload_lora_weights fuse_lora unfuse_lora set_adapters enable_lora disable_lora
enable_adapters disable_adapters add_adapter delete_adapters
""".split()
"""Methods that change adapters or their scales, which are constants in a graph."""


class Accelerated:
    """The graphed parts of a pipeline, as returned by ``accelerate``."""

    def __init__(self, pipeline: Any, backend: Backend, vae: bool, options: Any) -> None:
        self._pool = backend.make_pool(releasable=backend.capabilities.releasable_memory)
        self._undo: list[Callable[[], Any]] = []
        self.steps: dict[str, Graphed] = {}
        """The graphed callables by name: ``transformer``, ``unet``, ``vae.decode``."""
        found = ((name, getattr(pipeline, name, None)) for name in _DENOISERS)
        denoisers: dict[str, Any] = {name: module for name, module in found if module is not None}
        if not denoisers:
            raise InputError(
                f"{brief(pipeline)} has no {' or '.join(_DENOISERS)}. Graph its modules with "
                f"dg.graphed(module)."
            )
        for name, module in denoisers.items():
            if hasattr(module, "_hf_hook"):
                raise InputError(
                    f"{name} is offloaded by accelerate, which moves the weights in each call. "
                    f"Move the pipeline to the device with pipeline.to() instead."
                )
            if isinstance(getattr(module, "forward", None), Graphed):
                raise StateError(
                    f"{name} is graphed already. Call close() of the handle that accelerate "
                    f"returned, or dg.ungraphed(pipeline.{name}), first."
                )
        for name, module in denoisers.items():
            self.steps[name] = graphed(module, pool=self._pool, **options)
            self._undo.append(functools.partial(ungraphed, module))
            self._forget_graphs_at_adapter_calls(module)
        decoder: Any = getattr(pipeline, "vae", None) if vae else None
        if hasattr(decoder, "decode"):
            self.steps["vae.decode"] = decoder.decode = graphed(
                decoder.decode, pool=self._pool, **options
            )
            self._undo.append(functools.partial(delattr, decoder, "decode"))
        self._forget_graphs_at_adapter_calls(pipeline)

    def _forget_graphs_at_adapter_calls(self, owner: Any) -> None:
        """Close all graphs after each call of a method of ``owner`` that changes adapters."""
        for name in _ADAPTER_CALLS:
            method = getattr(owner, name, None)
            if callable(method):
                setattr(owner, name, self._then_invalidate(method))
                self._undo.append(functools.partial(delattr, owner, name))

    def _then_invalidate(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                return method(*args, **kwargs)
            finally:
                self.invalidate()

        return call

    def stats(self) -> dict[str, dict[str, Any]]:
        """Return the counters of each part, by the part's name."""
        return {name: step.stats() for name, step in self.steps.items()}

    def prove(self, cases: int = 3) -> Report:
        """Compare the graphs with eager runs; see ``Graphed.prove``.

        Raises:
            StateError: no part has a graph yet.
        """
        captured = [step for step in self.steps.values() if step.stats()["graphs"]]
        if not captured:
            raise StateError("no part of the pipeline has a graph yet. Run the pipeline first.")
        return Report.merged(step.prove(cases) for step in captured)

    def invalidate(self) -> None:
        """Close all graphs. Later calls capture again."""
        for step in self.steps.values():
            step.invalidate()

    def suspend(self) -> None:
        """Release the memory of the graphs until ``resume``, for example between prompts.

        Backends without releasable memory close the graphs instead.
        """
        if self._pool.releasable:
            self._pool.release()
        else:
            self.invalidate()

    def resume(self) -> None:
        """Restore the memory of the graphs.

        Raises:
            ResourceError: the device has too little memory. The call can be repeated.
        """
        if self._pool.releasable:
            self._pool.restore()

    def close(self) -> None:
        """Close all graphs and restore the methods of the pipeline. Idempotent."""
        self.resume()
        while self._undo:
            self._undo.pop()()
        for step in self.steps.values():
            step.close()


def accelerate(
    pipeline: Any, *, vae: bool = True, backend: str | Backend = "auto", **options: Any
) -> Accelerated:
    """Run the denoiser and the decoder of a diffusers pipeline in graphs.

    Each shape is captured at its second call. If the pipeline or the denoiser loads, removes,
    scales or switches adapters (LoRA), the graphs are closed, and later calls capture again.

    Args:
        pipeline: a pipeline on the device of the backend.
        vae: also run ``pipeline.vae.decode`` in graphs.
        backend: name of the backend, or a backend.
        **options: further arguments of ``dg.graphed``, such as ``min_speedup=1.05``.

    Raises:
        InputError: the pipeline has no denoiser, or it is offloaded.
    """
    device = backend if isinstance(backend, Backend) else get_backend(backend)
    return Accelerated(pipeline, device, vae, options)
