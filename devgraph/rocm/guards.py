"""A guard that refuses host reads in a capture, for HIP runtimes that do not report them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._C import DispatchKey

from devgraph.api.marks.host_reads import host_read_error
from devgraph.api.modes import OwnMode
from devgraph.api.tensors import tensors_in

_READS = frozenset(
    """
    _linalg_check_errors _local_scalar_dense _to_sparse _unique _unique2 allclose bincount equal
    masked_select nonzero unique_consecutive unique_dim unique_dim_consecutive
    """.split()
)
"""Operations that must read device data on the host to determine a result or its shape."""

_INDEXED = frozenset({"index", "index_put", "index_put_", "_index_put_impl_"})
"""Operations with a list of indices as second argument. The host counts the elements of a mask."""


class HostReadGuard(OwnMode):
    """A mode that refuses host reads of device data by this thread while it is ``on``.

    Before HIP 7.14, such a read in a capture raises no error: the host reads the previous contents,
    and the graph is wrong. The guard stays below the modes of user code. It adds a few microseconds
    per captured operation, and nothing to replays.
    """

    def __init__(self, is_device: Callable[[torch.Tensor], bool]) -> None:
        super().__init__()
        self._is_device = is_device
        self.on = False

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Return True, so that torch.compile ignores this mode, which changes no operation."""
        return True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True. Newer torch versions call this method instead of ``is_infra_mode``."""
        return True

    def take(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.on and _is_composed(func):
            with self:
                return func.decompose(*args, **kwargs)
        if self.on and self._reads_host(func, args, kwargs):
            raise host_read_error(f"{func} reads device data on the host inside a capture")
        return func(*args, **kwargs)

    def _reads_host(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        name = func.overloadpacket.__name__
        if name in _READS:
            return self._any_on_device(args)
        if name in _INDEXED:
            return self._counts_mask(args)
        if name == "repeat_interleave":
            return kwargs.get("output_size") is None and self._any_on_device(args)
        if name == "histc":
            low, high = (*args[2:4], 0, 0)[:2]  # If equal, torch reads the bounds from the data.
            return low == high and self._any_on_device(args)
        if name == "copy_":
            waits = not (kwargs.get("non_blocking", False) or args[2:] == (True,))
            return waits and self._is_device(args[1]) and not self._is_device(args[0])
        if name == "_to_copy":
            to_host = getattr(kwargs.get("device"), "type", "") == "cpu"
            waits = not kwargs.get("non_blocking", False)
            return to_host and waits and self._is_device(args[0])
        return False

    def _any_on_device(self, args: tuple[Any, ...]) -> bool:
        return any(map(self._is_device, tensors_in(args)))

    def _counts_mask(self, args: tuple[Any, ...]) -> bool:
        """Whether an index on the device is a mask whose true elements the host must count.

        torch executes a write of one host value through one mask as a fill, which needs no count.
        """
        indices = [x for x in args[1] if x is not None]
        masks = [x for x in indices if x.dtype in (torch.bool, torch.uint8) and self._is_device(x)]
        if len(args) < 3 or len(indices) > 1:
            return bool(masks)
        value, accumulate = args[2], args[3:4] == (True,)
        fills = value.numel() == 1 and not self._is_device(value) and not accumulate
        return bool(masks) and not fills


def _is_composed(func: Any) -> bool:
    """Whether an operation consists of other operations, which the guard must check instead.

    Inference mode does not decompose such operations. ROCm builds use the dispatch key CUDA.
    """
    has = func.has_kernel_for_dispatch_key
    return has(DispatchKey.CompositeImplicitAutograd) and not has(DispatchKey.CUDA)
