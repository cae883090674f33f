"""A torch namespace over the fake: streams, graphs, and torch operations recorded as nodes.

Tensors are CPU tensors. Outside a capture operations run as always. While the current stream
captures, a dispatch mode turns each operation into a node of the fake: contiguous copies and
``zero_`` become copy and fill nodes, everything else a kernel whose one argument is the number of
a remembered call. Nothing is computed then; results hold NaN until a launch runs the call.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from ctypes import c_int64
from types import ModuleType
from typing import Any, ClassVar

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from tests.sim.hip.fake import Fake

__all__ = ["Device", "Recorder"]

_READS = ("_local_scalar_dense", "nonzero", "equal", "is_nonzero")


class _Stream:
    """A stream of the fake; 0 is the default stream."""

    def __init__(self, device: Device, handle: int) -> None:
        self._device = device
        self.cuda_stream = self.stream_id = handle

    def wait_stream(self, other: _Stream) -> None:
        self._device.fake.wait(self.cuda_stream, other.cuda_stream)

    def wait_event(self, event: _Event) -> None:
        """Do nothing: the event's work is done."""

    def synchronize(self) -> None:
        self._device.fake.unsafe(self.cuda_stream)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Stream) and self.cuda_stream == other.cuda_stream

    def __hash__(self) -> int:
        return hash(self.cuda_stream)


class _Event:
    """Work runs when it is launched: what an event is behind is done once it is recorded."""

    def __init__(self, enable_timing: bool = False) -> None:
        self._recorded: float | None = None
        self._timed = enable_timing

    def record(self, stream: _Stream) -> None:
        self._recorded = time.perf_counter()

    def elapsed_time(self, end: _Event) -> float:
        assert self._timed and end._timed
        assert self._recorded is not None and end._recorded is not None
        return 1e3 * (end._recorded - self._recorded)

    def query(self) -> bool:
        return self._recorded is not None


class _MemPool:
    """Counts its users as torch does: itself, and each graph from its capture to its reset."""

    _ids = itertools.count(1)
    users: ClassVar[dict[object, int]] = {}

    def __init__(self) -> None:
        self.id = (0, next(self._ids))
        self.users[self.id] = 1

    def use_count(self) -> int:
        return self.users[self.id]


class _Generator:
    def __init__(self) -> None:
        self.offset = 0

    def get_offset(self) -> int:
        return self.offset

    def set_offset(self, offset: int) -> None:
        self.offset = offset


class _Graph:
    """What torch.cuda.CUDAGraph does, in the order in which it does it."""

    def __init__(self, device: Device, keep_graph: bool = False) -> None:
        self._device, self._keep = device, keep_graph
        self._graph = self._executable = 0
        self._pool: object = None
        self._active = False
        self.random = False

    def capture_begin(self, pool: object = None, capture_error_mode: str = "global") -> None:
        device = self._device
        device.check(device.runtime.hipStreamBeginCapture(device.current.cuda_stream, 1))
        device.capturing[device.current.cuda_stream] = self
        self._active = True
        if pool is not None and self._pool is None:
            self._pool = pool
            _MemPool.users[pool] += 1

    def capture_end(self) -> None:
        device, graph = self._device, ctypes.c_void_p()
        stream = device.current.cuda_stream
        if not self._active:
            raise RuntimeError("captureEnd called with no active captures")  # since torch 2.15
        self._active = False
        device.check(device.runtime.hipStreamEndCapture(stream, ctypes.byref(graph)))
        device.capturing.pop(stream, None)
        self._graph = graph.value or 0
        if not self._keep:
            self.instantiate()

    def instantiate(self) -> None:
        device, made = self._device, ctypes.c_void_p()
        if self._executable:
            device.check(device.runtime.hipGraphExecDestroy(self._executable))
            self._executable = 0
        device.check(
            device.runtime.hipGraphInstantiateWithFlags(
                ctypes.byref(made), self._graph, ctypes.c_ulonglong(1)
            )
        )
        self._executable = made.value or 0

    def replay(self) -> None:
        device = self._device
        if self.random:
            device.seed.fill_(0)
            device.default_generators[0].offset += 4
        device.check(device.runtime.hipGraphLaunch(self._executable, device.current.cuda_stream))

    def raw_cuda_graph(self) -> int:
        return self._graph

    def raw_cuda_graph_exec(self) -> int:
        return self._executable

    def reset(self) -> None:
        device = self._device
        if self._executable:
            device.check(device.runtime.hipGraphExecDestroy(self._executable))
        if self._graph:
            device.check(device.runtime.hipGraphDestroy(self._graph))
        self._graph = self._executable = 0
        if self._pool is not None:
            _MemPool.users[self._pool] -= 1
            self._pool = None

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # as torch's, which warns
            self.reset()


class Device(ModuleType):
    """Stands for the module ``torch.cuda`` of a ROCm build.

    It is a module so that captures do not take its records for state of a step that reaches it:
    they would save tensors whose memory has been freed, and write it again.
    """

    def __init__(self, fake: Fake) -> None:
        super().__init__("fake_device")
        self.fake = fake
        self.runtime: Any = ctypes.CDLL(fake.path)
        for name in ("hipStreamBeginCapture", "hipGraphLaunch"):
            getattr(self.runtime, name).argtypes = (ctypes.c_void_p, ctypes.c_void_p)
        for name in ("hipStreamEndCapture",):
            getattr(self.runtime, name).argtypes = (ctypes.c_void_p, ctypes.c_void_p)
        self.runtime.hipGraphInstantiateWithFlags.argtypes = (
            ctypes.c_void_p,
            ctypes.c_void_p,
            ctypes.c_ulonglong,
        )
        for name in ("hipGraphExecDestroy", "hipGraphDestroy"):
            getattr(self.runtime, name).argtypes = (ctypes.c_void_p,)
        self._streams = [_Stream(self, fake.stream()) for _ in range(32)]
        self._next = itertools.cycle(self._streams)
        self._default = _Stream(self, 0)
        self._here = threading.local()
        self.capturing: dict[int, _Graph] = {}
        self.default_generators = [_Generator()]
        self.seed = torch.zeros(1)
        self.CUDAGraph = lambda keep_graph=False: _Graph(self, keep_graph)
        self.MemPool = _MemPool
        self.Event = _Event
        self.calls: dict[int, Callable[[], None]] = {}
        """What the kernels that were recorded do, by the number that is their argument."""
        self.held: list[torch.Tensor] = []
        """What copies and fills address must not go back to the allocator."""
        self.memory: dict[int, torch.Tensor] = {}
        """What owns the memory of everything that captures made, by address: as on a device, no
        tensor is held that the caller sees."""
        self._kernels: dict[Any, int] = {}
        self._numbers = itertools.count(1)

    @property
    def current(self) -> _Stream:
        """The current stream of the calling thread."""
        stream: _Stream = getattr(self._here, "stream", self._default)
        return stream

    def kernel(self, func: Any) -> int:
        """Return the kernel that stands for a torch operation."""
        if func not in self._kernels:
            self._kernels[func] = self.fake.kernel(self._run, [c_int64])
        return self._kernels[func]

    def remember(self, call: Callable[[], None]) -> int:
        """Return the number by which a kernel finds ``call``."""
        number = next(self._numbers)
        self.calls[number] = call
        return number

    def _run(self, number: int) -> None:
        with _disable_current_modes():
            self.calls[number]()

    def check(self, error: int) -> None:
        self.fake.check(error)

    # torch.cuda's own names.

    def Stream(self, device: object = None, priority: int = 0) -> _Stream:
        return next(self._next)

    def ExternalStream(self, handle: int, device: object = None) -> _Stream:
        return _Stream(self, handle)

    def current_stream(self, device: object = None) -> _Stream:
        return self.current

    def default_stream(self, device: object = None) -> _Stream:
        return self._default

    @contextlib.contextmanager
    def stream(self, stream: _Stream) -> Iterator[None]:
        before, self._here.stream = self.current, stream
        try:
            yield
        finally:
            self._here.stream = before

    def is_current_stream_capturing(self) -> bool:
        status = ctypes.c_int()
        self.runtime.hipStreamIsCapturing.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
        self.check(
            self.runtime.hipStreamIsCapturing(self.current.cuda_stream, ctypes.byref(status))
        )
        return status.value != 0

    @contextlib.contextmanager
    def use_mem_pool(self, pool: object, device: object = None) -> Iterator[None]:
        yield

    @contextlib.contextmanager
    def device(self, device: object) -> Iterator[None]:
        yield

    def memory_snapshot(
        self, mempool_id: object = None, include_traces: bool = True
    ) -> list[dict[str, int]]:
        return []

    def synchronize(self, device: object = None) -> None:
        self.fake.unsafe(self.current.cuda_stream)

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return 1

    def set_device(self, index: int) -> None:
        assert index == 0

    def mem_get_info(self, device: object = None) -> tuple[int, int]:
        return 2**34, 2**35

    def get_device_name(self, device: object = None) -> str:
        return "fake HIP device"

    def get_rng_state(self, device: object = None) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor, device: object = None) -> None:
        torch.set_rng_state(state)


class Recorder(TorchDispatchMode):
    """Records this thread's operations on a capturing stream; the rest runs as always."""

    is_devgraph_mode = True  # it stands for the device, so it is not a mode of the user

    def __init__(self, device: Device) -> None:
        super().__init__()
        self._device = device

    def __torch_dispatch__(
        self, func: Any, types_: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        if not self._device.is_current_stream_capturing() or self._is_metadata(func, name):
            return func(*args, **kwargs)
        if name.startswith(("empty", "new_empty")):
            made = func(*args, **kwargs)
            return made if made.is_meta else self._given(made)
        stream = self._device.current.cuda_stream
        if name in _READS:
            self._device.fake.unsafe(stream)
            return func(*args, **kwargs)
        # Attention has the tag for its dropout, which no decoder has on here.
        if torch.Tag.nondeterministic_seeded in func.tags and "scaled_dot_product" not in name:
            graph = self._device.capturing.get(stream)
            if graph is None:
                raise RuntimeError("offsets were never reserved here")
            graph.random = True
        return self._record(stream, func, name, args, kwargs)

    def _is_metadata(self, func: Any, name: str) -> bool:
        return bool(func.is_view) or name.startswith(("detach", "_unsafe_view"))

    def _given(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return what the caller gets for ``tensor``, whose memory outlives it."""
        if tensor.untyped_storage().nbytes():
            self._device.memory[tensor.untyped_storage().data_ptr()] = tensor
        return _bare(tensor)

    def _kept(self, leaf: Any) -> Any:
        """Return what a node holds of an argument: of what a capture made, no more than where it
        lies."""
        if not isinstance(leaf, torch.Tensor) or leaf.is_conj() or leaf.is_neg():
            return leaf
        made = leaf.untyped_storage().data_ptr() in self._device.memory
        return _bare(leaf) if made else leaf

    def _record(self, stream: int, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        fake = self._device.fake
        if name == "copy_" and self._is_flat_copy(*args[:2]):
            to, source = args[:2]
            self._device.held += [self._kept(to), self._kept(source)]
            fake.copy(stream, to.data_ptr(), source.data_ptr(), to.numel() * to.element_size())
            return to
        if name == "zero_" and args[0].is_contiguous():
            self._device.held.append(self._kept(args[0]))
            fake.fill(stream, args[0].data_ptr(), 0, args[0].numel() * args[0].element_size())
            return args[0]
        results, outputs = self._results(func, args, kwargs)
        args, kwargs = pytree.tree_map(self._kept, (args, kwargs))

        mode = torch.inference_mode if torch.is_inference_mode_enabled() else torch.no_grad
        # A kernel does not depend on the autocast of whoever launches it.
        autocast = functools.partial(
            torch.autocast,
            "cpu",
            torch.get_autocast_dtype("cpu"),
            enabled=torch.is_autocast_enabled("cpu"),
            cache_enabled=False,
        )

        def call() -> None:
            with mode(), autocast():
                got = pytree.tree_leaves(func(*args, **kwargs))
                for output, value in zip(outputs, got, strict=True):
                    if output is not None:
                        output.copy_(value)

        fake.launch(stream, self._device.kernel(func), c_int64(self._device.remember(call)))
        return results

    @staticmethod
    def _is_flat_copy(to: torch.Tensor, source: torch.Tensor) -> bool:
        same = to.dtype == source.dtype and to.shape == source.shape
        same = same and to.is_conj() == source.is_conj() and to.is_neg() == source.is_neg()
        return same and to.is_contiguous() and source.is_contiguous()

    def _results(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, list[Any]]:
        """Return what the caller gets, and for each leaf the buffer that a launch fills."""
        cloned: dict[int, torch.Tensor] = {}

        def clone(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            copy = _copied(leaf)
            cloned[id(copy)] = leaf
            return copy

        state = torch.get_rng_state()
        found = func(*pytree.tree_map(clone, args), **pytree.tree_map(clone, kwargs))
        torch.set_rng_state(state)
        leaves, spec = pytree.tree_flatten(found)
        results, outputs = [], []
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor) and id(leaf) in cloned:
                results.append(cloned[id(leaf)])  # written in place
                outputs.append(None)
            else:
                if isinstance(leaf, torch.Tensor) and leaf.is_floating_point():
                    leaf.fill_(float("nan"))
                is_tensor = isinstance(leaf, torch.Tensor)
                results.append(self._given(leaf) if is_tensor else leaf)
                outputs.append(leaf if is_tensor else None)
        return pytree.tree_unflatten(results, spec), outputs


def _bare(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor over the same memory that does not own it."""
    storage = tensor.untyped_storage()
    bare = torch._C._construct_storage_from_data_pointer(
        storage.data_ptr(), tensor.device, storage.nbytes()
    )
    empty = torch.empty(0, dtype=tensor.dtype)
    return empty.set_(bare, tensor.storage_offset(), tensor.shape, tensor.stride())


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of the same strides; elements that share memory do so in the copy too."""
    shared = [n > 1 and s == 0 for n, s in zip(tensor.shape, tensor.stride(), strict=True)]
    shape = [1 if one else n for one, n in zip(shared, tensor.shape, strict=True)]
    copy = torch.empty_strided(shape, tensor.stride(), dtype=tensor.dtype)
    copy.copy_(tensor.as_strided(shape, tensor.stride()) if any(shared) else tensor)
    return copy.as_strided(tensor.shape, tensor.stride()) if any(shared) else copy
