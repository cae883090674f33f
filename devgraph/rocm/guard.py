"""Host reads inside a capture, refused where the runtime lets them pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from devgraph.api.errors import HostReadError
from devgraph.api.source import user_line

__all__ = ["HostReadGuard"]

_READS = frozenset(
    {
        "_local_scalar_dense",
        "equal",
        "is_nonzero",
        "item",
        "masked_select",
        "nonzero",
        "unique_consecutive",
        "unique_dim",
        "_unique2",
    }
)
"""Operations whose result, or the shape of it, comes from data on the device."""


class HostReadGuard(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses operations of this thread that read device data on the host, while it is ``on``.

    Before HIP 7.14 such a call inside a capture raises nothing: the host gets what the memory held
    before, and the graph is wrong. The guard stays below user code's own modes and costs a capture
    some microseconds for each operation; replays do not pass it.

    Args:
        is_device: whether a tensor is in device memory.
    """

    def __init__(self, is_device: Callable[[torch.Tensor], bool]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._is_device = is_device
        self.on = False

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Tell torch.compile that this mode may be ignored: it changes no operation."""
        return True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """The same, as newer versions ask for it."""
        return True

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if self.on and self._reads_host(func, args, kwargs):
            raise HostReadError(
                f"{func} reads device data on the host inside a capture, at {user_line()}. A "
                f"replay would not read it again. Keep the value on the device, pass it as a host "
                f"argument, or mark the function @dg.no_graph and capture with policy='breakable'."
            )
        return func(*args, **kwargs)

    def _reads_host(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        name = func.overloadpacket.__name__
        if name in _READS:
            leaves = pytree.tree_leaves(args)
            return any(isinstance(x, torch.Tensor) and self._is_device(x) for x in leaves)
        if name == "copy_":
            waits = not (kwargs.get("non_blocking", False) or args[2:] == (True,))
            return waits and self._is_device(args[1]) and not self._is_device(args[0])
        if name == "_to_copy":
            target = kwargs.get("device")
            waits = not kwargs.get("non_blocking", False)
            return (
                waits
                and target is not None
                and torch.device(target).type == "cpu"
                and self._is_device(args[0])
            )
        return False
