"""What a policy may spend, in the middle of serving, on host arguments that it has not seen."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Hashable

import attrs

from devgraph.api.errors import InputError, InputTypeError, brief, finite, whole


@attrs.frozen(kw_only=True)
class UpdateBudget:
    """Limits of policy ``full`` on recording and capturing for new host arguments.

    A recording costs about as much host time as two steps that break, and every later step with
    the same key saves nearly one. The defaults bound what a trace without repeated keys loses.

    Raises:
        InputError: a limit is out of range; InputTypeError: it is of another kind.
    """

    misses: int = 8
    """Keys that may be recorded when they are first seen; each replay of a recorded key earns one
    back. Past it, a key is recorded when it is seen again, and the step breaks until then."""
    recent: int = 64
    """How many keys that were not recorded are remembered as seen."""
    copies: int = 4
    """Topology copies: whole-graph captures for keys that need other nodes."""
    copy_seconds: float = 2.0
    """Time that capturing them may take in all; ``math.inf`` sets no limit."""
    may_capture: Callable[[], bool] | None = None
    """Asked before a copy or a broken form is captured in a replay; it answers False while outputs
    of the pool are leased, or where ranks have to agree first. None allows it, unless the capture
    was given ``before_break``: then other ranks take part, and none captures alone."""

    def __attrs_post_init__(self) -> None:
        for name, least in (("misses", 0), ("recent", 1), ("copies", 0)):
            whole(name, getattr(self, name), least)
        if self.copy_seconds != math.inf:
            finite("copy_seconds", self.copy_seconds)
        if self.may_capture is not None and not callable(self.may_capture):
            raise InputTypeError(f"may_capture must be a function, got {brief(self.may_capture)}")

    @staticmethod
    def of(value: UpdateBudget | None) -> UpdateBudget:
        """Return ``value``, or the defaults for None.

        Raises:
            InputError: it is something else.
        """
        if value is None:
            return _DEFAULTS
        if not isinstance(value, UpdateBudget):
            raise InputError(f"budget must be an UpdateBudget or None, not {brief(value)}")
        return value


_DEFAULTS = UpdateBudget()


class MissBudget:
    """Decides whether a new key is worth a recording."""

    def __init__(self, budget: UpdateBudget) -> None:
        self._budget = budget
        self._left = budget.misses
        self._seen: OrderedDict[Hashable, None] = OrderedDict()

    def earn(self) -> None:
        """Note a replay of a recorded key."""
        if self._left < self._budget.misses:
            self._left += 1

    def allows(self, key: Hashable) -> bool:
        """Whether to record ``key`` now; remembers it if not."""
        if key in self._seen:
            del self._seen[key]
            return True
        if self._left > 0:
            self._left -= 1
            return True
        self._seen[key] = None
        if len(self._seen) > self._budget.recent:
            self._seen.popitem(last=False)
        return False
