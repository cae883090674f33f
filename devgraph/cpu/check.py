"""The check of a step: a recording that continues after a violation and lists all of them."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import attrs

from devgraph.api.errors import (
    CaptureError,
    FrozenValueError,
    HostReadError,
    InputError,
    ResourceError,
    brief,
)
from devgraph.api.marks.host_values import HostSpec, Tracked, exact_types_refused, frozen
from devgraph.api.marks.marks import Mark, Scope, entered
from devgraph.api.marks.scopes import refuse_break_in_backward, split_host_args
from devgraph.api.marks.source import SourceLine, line_of, raising_line, user_line
from devgraph.api.owned import Owned, host_random, without_history
from devgraph.api.process import collector
from devgraph.api.reach import Change, Watch, modules_of, rebinding, set_by_hooks
from devgraph.api.results import refuse_host_values
from devgraph.api.tensors import has_place, memory_of, tensors_in
from devgraph.cpu.memory import BlockPool, is_shortage
from devgraph.cpu.metadata import Metadata
from devgraph.cpu.recorder import Recorder
from devgraph.cpu.violations import Violation

logger = logging.getLogger(__name__)


def check_step(
    metadata: Metadata,
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    host_args: Mapping[str, Any] | None,
) -> list[Violation]:
    """Return the violations in a step; see ``CpuBackend.check``."""
    violations: dict[tuple[object, ...], Violation] = {}

    def note(violation: Violation) -> None:
        place = (violation.kind, violation.op, violation.file, violation.line)
        violations.setdefault(place, violation)

    spec = HostSpec(host_args, fn)
    try:
        owned = Owned(fn, tuple(args), kwargs)
    except InputError as error:
        return [Violation.at(line_of(fn), kind="refused", op="argument", text=str(error))]
    original = Watch([*owned.roots, *owned.arguments.items()], gradients=True)
    try:
        for _ in range(2):
            violations.clear()
            _CheckScope(fn, owned, spec, note, metadata).run()
    except FrozenValueError as error:
        line = raising_line(error) or line_of(fn)
        note(Violation.at(line, kind="host_value", op="host argument", text=str(error)))
    except Exception as error:
        is_known = isinstance(error, CaptureError | ResourceError) or is_shortage(error)
        # After a violation, ignore other errors, because an assumed value may have caused them.
        if not violations and not is_known:
            raise
        logger.info("the check ended early", exc_info=True)
        is_explained = isinstance(error, HostReadError) or any(
            violation.kind in ("refused", "thread") for violation in violations.values()
        )
        if is_known and not is_explained:
            line, name = raising_line(error) or line_of(fn), type(error).__name__
            note(Violation.at(line, kind="refused", op=name, text=str(error)))
    finally:
        original.put_back()
    return list(violations.values())


class _Noted(Tracked):
    """A tracked value that reports each use as a violation and returns the plain value."""

    __slots__ = ("_devgraph_note",)

    def __init__(self, name: str, value: Any, note: Callable[[Violation], None]) -> None:
        super().__init__(name, value)
        object.__setattr__(self, "_devgraph_note", note)

    def _devgraph_consumed(self, how: str, at: SourceLine | None = None) -> None:
        name, at = self._devgraph_name, at or user_line()
        text = str(frozen(name, how))
        self._devgraph_note(Violation.at(at, kind="host_value", op=f"argument {name!r}", text=text))


class _CheckScope(Scope):
    """The scope of one run of a checked step. Functions marked ``no_graph`` run unchecked."""

    def __init__(
        self,
        fn: Callable[..., Any],
        owned: Owned,
        spec: HostSpec,
        note: Callable[[Violation], None],
        metadata: Metadata,
    ) -> None:
        self._fn, self._owned, self._spec, self._note = fn, owned, spec, note
        self._host: dict[Mark, dict[str, Any]] = {}
        self._is_muted = self._has_returned = False
        self._changes: list[Change] = []
        """Attributes and items whose tensors the step replaced, added or removed."""
        self._state: dict[str, str] = {}
        """Descriptions of changed plain values, by path."""
        reached, generators = owned.reached()
        self._recorder = Recorder(
            BlockPool(),
            metadata=metadata,
            arguments=[tensor for _, tensor in owned.tensors],
            reached=[tensor for _, tensor in reached],
            generators=generators,
            on_violation=self._report,
        )
        self._args, self._kwargs, copies = owned.own_arguments()
        self._watch = Watch([*owned.roots, *((item.path, item.copy) for item in copies)])

    def run(self) -> None:
        numbers, spec = host_random(), self._spec
        exact = exact_types_refused() if spec.declared else contextlib.nullcontext()
        with collector.paused(), self._recorder, entered(self), exact:
            host = {name: _Noted(name, value, self._note) for name, value in spec.declared.items()}
            outputs = self._fn(*self._args, **self._kwargs, **host)
            self._has_returned = True
            refuse_host_values(outputs)
            self._recorder.note_outputs(tensors_in(outputs))
        outputs = without_history(outputs)  # Autograd history would keep other results alive.
        self._note_changes()
        for name, state in host_random().items():
            if numbers.get(name, state) != state:
                self._note_state(name, numbers[name][-1], state[-1])
        for violation in self._kept_tensors(outputs):
            self._note(violation)
        where = line_of(self._fn)
        for path, change in self._state.items():
            text = (
                f"the step changes {path} {change}. A replay does not repeat the change, and uses "
                f"the captured value. Keep such state in tensors, or change it outside of the step."
            )
            self._note(Violation.at(where, kind="python_state", op=path, text=text))

    def _report(self, found: Violation) -> None:
        if self._has_returned and found.kind == "seeding":  # found in the caller of the step
            where = line_of(self._fn)
            found = Violation.at(where, kind=found.kind, op=found.op, text=found.text)
        if not self._is_muted:
            self._note(found)

    def _kept_tensors(self, outputs: Any) -> Iterator[Violation]:
        """Yield violations for replaced tensors and for results that outlive the step."""
        modules = modules_of(self._fn)
        held = [tensor.grad for _, tensor in self._owned.everything() if tensor.is_leaf]
        held += [vars(module).get(name) for module in modules for name in set_by_hooks(module)]
        escaping = self._recorder.escaping(tensors_in((outputs, held)))
        where = line_of(self._fn)
        for verb, path, tensors, _ in self._changes:
            memories = [memory_of(tensor) for _, tensor in tensors if has_place(tensor)]
            allocated = [escaping[memory] for memory in memories if memory in escaping]
            if verb == "adds" and allocated:
                continue
            for memory in memories:
                escaping.pop(memory, None)
            text, kind = rebinding(verb, path), "rebinding"
            for source in allocated or [Violation.at(where, kind=kind, op=path, text=text)]:
                yield attrs.evolve(source, kind=kind, op=path, text=text)
        yield from escaping.values()

    def _note_changes(self) -> None:
        """Record the changes that the step made since the last eager body."""
        self._changes += self._watch.changes(self._note_state)

    def _note_state(self, path: str, old: Any, new: Any) -> None:
        self._state[path] = f"from {brief(old)} to {brief(new)}"

    def call(self, mark: Mark, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        host: dict[str, Any] = {}
        if mark.dynamic:
            args, kwargs, host = split_host_args(mark, args, kwargs, self._spec, self._host)
        if mark.kind != "no_graph":
            return mark.fn(*args, **kwargs, **host)
        refuse_break_in_backward(mark.name)
        self._note_changes()
        self._is_muted = True
        try:
            with self._recorder.apart(), entered(None):
                return mark.fn(*args, **kwargs, **host)
        finally:
            self._is_muted = False
            self._watch.settle()

    def graph_break(self) -> None:
        refuse_break_in_backward("dg.graph_break()")
