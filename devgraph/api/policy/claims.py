"""What marks claim about their functions, and the eager run that finds out whether it is true.

A policy that compiles a step before it captures one must know what a marked function returns and
writes without running it.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from devgraph.api.buffers import tensors_in
from devgraph.api.errors import CaptureError, HostReadError, RegionError
from devgraph.api.marks.calls import describe
from devgraph.api.marks.host_values import HostSpec
from devgraph.api.marks.marks import Mark, Scope, entered
from devgraph.api.marks.modes import autocast_uncached
from devgraph.api.marks.scopes import captured_call


def described(
    mark: Mark, args: tuple[Any, ...], kwargs: dict[str, Any], host: dict[str, Any]
) -> Any:
    """Return what a marked function returns for arguments that are fake tensors."""
    if mark.fake is None and mark.mutates:
        return None  # the usual shape of a region; the check refuses any other result
    claim = mark.fn if mark.fake is None else mark.fake
    try:
        with autocast_uncached(), _sizes_unnamed(), _Closed() as closed:
            result = closed.stand_in(claim(*args, **kwargs, **host))
            if _of_unknown_shape(result):
                raise HostReadError("the shape of its result depends on device data")
            return result
    except Exception as error:
        reason = next(iter(str(error).strip().splitlines()), "no message")
        reason = f"{type(error).__name__}: {reason}"
        if mark.fake is not None:
            raise CaptureError(
                f"policy 'piecewise' must know what {mark.name} returns without running it, and "
                f"the fake= of its mark raised {reason}. fake= takes what the function takes, "
                f"host arguments ({', '.join(host) or 'none'}) too, on tensors without data."
            ) from error
        raise CaptureError(
            f"policy 'piecewise' must know what {mark.name} returns without running it, and its "
            f"body does not run without data ({reason}). Give its mark fake=, a function of the "
            f"same arguments that returns empty tensors of the result's shape."
        ) from error


def _of_unknown_shape(result: Any) -> bool:
    return any(
        isinstance(size, torch.SymInt) and not size.node.has_hint()
        for tensor in tensors_in(result)
        for size in tensor.shape
    )


def _sizes_unnamed() -> contextlib.AbstractContextManager[None]:
    """Let the body have sizes that depend on data, which the trace would look for in its result."""
    mode = detect_fake_mode()
    if mode is None or mode.shape_env is None:
        return contextlib.nullcontext()
    return mode.shape_env.ignore_fresh_unbacked_symbols()


class _Closed(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Puts a fake tensor in the place of every real one, which the block reaches by closure.

    The mode of fake tensors can be told to take real ones, and then writes some of them.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._known: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            # A tracer's mode would hand out a symbol, which nothing in the step accounts for.
            raise HostReadError("it reads device data on the host")
        args, kwargs = pytree.tree_map(self._leaf, (args, kwargs or {}))
        return func(*args, **kwargs)

    def stand_in(self, result: Any) -> Any:
        """Return ``result`` with tensors without data for the real ones among it."""
        if type(result) in (tuple, list):  # A mark returns no other trees; a torch.Size is none.
            return type(result)(map(self.stand_in, result))
        return self._leaf(result)

    def _leaf(self, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or isinstance(leaf, FakeTensor):
            return leaf
        if id(leaf) not in self._known:
            made = torch.empty_strided(
                leaf.shape,
                leaf.stride(),
                dtype=leaf.dtype,
                device=leaf.device,
                requires_grad=leaf.requires_grad,
            )
            self._known[id(leaf)] = (leaf, made)  # The first holds the identity.
        return self._known[id(leaf)][1]


_Versions = dict[str, list[tuple[int, int]]]
"""Memory and version counter of the tensors in each argument; inference tensors count none."""


class Checking(Scope):
    """What marks mean in the run that checks a step: the body runs, and its claims are compared.

    Host arguments are tracked in this run, as in a capture of another policy.
    """

    def __init__(self, spec: HostSpec) -> None:
        self._spec = spec
        self._host: dict[Mark, dict[str, Any]] = {}

    def call(self, mark: Mark, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        first = mark not in self._host
        args, kwargs, host = captured_call(mark, args, kwargs, self._spec, self._host)
        versions = _versions(mark, args, kwargs) if first else {}
        with entered(None):
            result = mark.fn(*args, **kwargs, **host)
            if first:
                self._compare_writes(mark, versions, _versions(mark, args, kwargs))
            if first and (mark.fake is not None or mark.mutates):
                self._compare(mark, args, kwargs, host, result)
        return result

    @staticmethod
    def _compare_writes(mark: Mark, before: _Versions, after: _Versions) -> None:
        """Raise RegionError unless what was written is what the mark says."""
        told = {memory for name in mark.mutates for memory, _ in before.get(name, ())}
        for name, versions in before.items():
            if any(v not in after[name] and v[0] not in told for v in versions):
                raise RegionError(
                    f"{mark.name} wrote its argument {name!r}, and its mark says that it writes "
                    f"{', '.join(mark.mutates) or 'none'}. Under policy 'piecewise' the mark must "
                    f"tell: mutates={(*mark.mutates, name)!r}."
                )

    @staticmethod
    def _compare(
        mark: Mark, args: tuple[Any, ...], kwargs: dict[str, Any], host: dict[str, Any], result: Any
    ) -> None:
        """Raise RegionError unless the result is of the layout that the mark claims."""
        mode = FakeTensorMode()

        def fake(leaf: Any) -> Any:
            return mode.from_tensor(leaf) if isinstance(leaf, torch.Tensor) else leaf

        args, kwargs = pytree.tree_map(fake, (args, kwargs))
        with mode:
            claimed = described(mark, args, kwargs, host)
        said, got = (str(pytree.tree_map(describe, tree)) for tree in (claimed, result))
        if said != got:
            source = "the fake= of its mark returns" if mark.fake else "a mark with mutates= claims"
            raise RegionError(
                f"{mark.name} returned {got}, and {source} {said}. Under policy 'piecewise' the "
                f"code after it is compiled for that: give the mark a fake= that returns empty "
                f"tensors of the result's layout."
            )


def _versions(mark: Mark, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Versions:
    bound = mark.signature.bind_partial(*args, **kwargs).arguments
    for name, parameter in mark.signature.parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            bound.update(bound.pop(name, {}))
    return {
        name: [
            (leaf.untyped_storage().data_ptr(), leaf._version)
            for leaf in tensors_in(value)
            if leaf.layout is torch.strided and not leaf.is_inference()
        ]
        for name, value in bound.items()
    }
