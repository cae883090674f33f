"""A base class whose subclasses in other packages cannot overwrite its state by accident."""

from __future__ import annotations

import dis
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from devgraph.api.errors import BackendError, InputTypeError


class Subclassed:
    """A base that refuses a subclass without a required member, or with an attribute of a base."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        if missing := sorted(getattr(cls, "__abstractmethods__", ())):
            raise BackendError(
                f"{cls.__qualname__} does not implement {', '.join(missing)}. Implement every "
                f"required member in a subclass, as described in docs/backends.md#other-devices."
            )
        return super().__new__(cls)

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if Subclassed in cls.__bases__ or cls.__module__.startswith("devgraph."):
            return
        bases = (base for base in cls.__mro__ if Subclassed in base.__bases__)
        own = {*vars(cls), *_set_by(cls)}
        for base in bases:
            if taken := sorted(own.intersection(_set_by(base))):
                raise InputTypeError(
                    f"{cls.__qualname__} sets {', '.join(taken)}, which {base.__name__} uses for "
                    f"its own state; choose other names"
                )


def _set_by(kind: type) -> Iterator[str]:
    """Yield the attributes that methods of a class set on their first argument."""
    for method in vars(kind).values():
        code = getattr(method, "__code__", None)
        if code is None or not code.co_argcount:
            continue
        steps = (step for step in dis.get_instructions(code) if step.opname != "EXTENDED_ARG")
        for holder, step in pairwise(steps):
            names = holder.argval if isinstance(holder.argval, tuple) else (holder.argval,)
            if step.opname == "STORE_ATTR" and names[-1] == code.co_varnames[0]:
                yield step.argval
