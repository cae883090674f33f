"""Gates: points in a step where the device waits for the host or signals to it.

Each replay, or each iteration of a loop in it, is one *epoch* of all gates. A gate that is not
opened before its timeout is *forgotten*. ``Gates`` keeps the state of all epochs on the host. The
``GateChannel`` of a backend makes the device wait and signal.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol

import attrs
from torch.utils._python_dispatch import _disable_current_modes

from devgraph.api.environment import TIMEOUT_VARIABLE
from devgraph.api.errors import (
    CaptureError,
    ExecutableError,
    GateError,
    GateTimeoutError,
    InputError,
    UpdateError,
    did_you_mean,
    finite,
    whole,
)
from devgraph.api.marks.gates import current_turn, entered_gates
from devgraph.api.marks.source import user_line

logger = logging.getLogger(__name__)

_MOST_ERRORS = 64
"""Maximum number of invalid replays whose errors are kept for ``Gate.wait`` and ``Gate.open``."""

Fence = Callable[[], bool]
"""A callable that reports whether the work before an ``open_after`` has finished."""


class GateChannel(Protocol):
    """The device side of the gates of one capture or runner.

    A *place* is an integer that identifies one gate in one iteration of the step's loop. Launches
    are numbered from 1 and run one after another on the device.
    """

    delayed: bool
    """Whether waits happen on the device, so that the host must detect forgotten gates."""

    def begin(self, launch: int | None, opened: Iterable[int], signals: bool) -> None:
        """Begin a launch on the current stream.

        Args:
            launch: number of the launch; None for a launch that is not an epoch and never waits.
            opened: places that do not wait.
            signals: whether the launch signals.
        """

    def end(self, launch: int) -> None:
        """End a launch on the current stream."""

    def wait(self, place: int, timeout: float, recording: bool) -> None:
        """Make the current stream wait at ``place``, or record the wait in the capture."""

    def signal(self, place: int, recording: bool) -> None:
        """Signal ``place`` after the current stream's work, or record the signal in the capture."""

    def open(self, launch: int, places: Iterable[int], fence: Fence | None) -> None:
        """Open places of a launch that has begun, after ``fence`` if there is one.

        The caller has opened all places of earlier launches.
        """

    def after(self, stream: Any) -> Fence:
        """Return a fence after the work queued on ``stream``; None means the current stream."""

    def source(self, stream: Any) -> int:
        """Return the handle of ``stream`` for ``behind``. The call may block."""

    def behind(
        self, launch: int, place: int, source: int
    ) -> tuple[Fence, Callable[[], None]] | None:
        """Prepare an operation on stream ``source`` that opens a place after the work queued there.

        Returns:
            a fence after that work, and a callable that queues the operation. None if the device
            has not begun the launch, because the stream would have to wait for the launch.
        """

    def clear(self) -> None:
        """Let the next launch close all places, after a launch that did not reach all of them."""

    def finished(self) -> int:
        """Return the number of the last launch that has ended."""

    def signalled(self, place: int, launch: int) -> bool:
        """Whether ``place`` was signalled in ``launch``, or the launch has ended."""


@attrs.define(eq=False)
class _Launch:
    number: int
    waits: dict[int, float]
    """Timeout of each place that waits."""
    opened: dict[int, Fence | None]
    unwritten: set[int]
    """Places that the channel has not opened on the device."""
    grows: bool
    """Whether the step is eager, so that its waits are not known in advance."""
    begun: bool = False
    """Whether the channel has begun the launch; an eager step begins with its first mark."""
    since: float | None = None
    """Start of the timeouts: the time at which all gates of earlier launches were open."""

    @property
    def closed(self) -> list[int]:
        """Places that nobody opened, in the order of the step."""
        return [place for place in self.waits if place not in self.opened]

    @property
    def pending(self) -> list[int]:
        """Closed places, and places whose fence is not reached yet."""
        waits = self.waits
        fences = {place: fence for place, fence in self.opened.items() if fence is not None}
        return [p for p in waits if p not in self.opened or (p in fences and not fences[p]())]


@attrs.define
class RecordedMarks:
    """The marks of one recording."""

    waits: dict[int, float] = attrs.field(factory=dict)
    eager: dict[int, float] = attrs.field(factory=dict)
    """Waits in eager bodies of breaks."""
    marks: set[tuple[str, int]] = attrs.field(factory=set)
    """The kind ("wait" or "signal") and the place of each mark."""
    in_breaks: int = 0
    """Number of marks that are reached in breaks."""

    def __bool__(self) -> bool:
        return bool(self.marks)

    @property
    def signals(self) -> bool:
        return any(kind == "signal" for kind, _ in self.marks)


class Gate:
    """A named gate; all methods may be called from any thread."""

    def __init__(self, gates: Gates, name: str, number: int) -> None:
        self._gates = gates
        self.name = name
        self.number = number
        self.next = 1
        """The oldest epoch for which the gate may still be closed."""
        self.taken = 0
        """The last epoch for which ``wait`` was called without ``epoch``."""
        self.kinds: set[str] = set()
        """The marks of this name in the step: "wait", "signal" or both."""

    @property
    def epoch(self) -> int:
        """Epoch of the last replay that was launched; 0 before the first."""
        return self._gates.epoch

    def open(self, *, epoch: int | None = None) -> int:
        """Open the gate for one replay and return its epoch.

        Args:
            epoch: number of the replay, counted from 1; by default the oldest replay, launched or
                not, for which the gate is closed. A gate that is already open stays open.

        Raises:
            GateError: that replay has finished.
            InputError: the step has no ``dg.wait`` of this name.
        """
        self._gates.require(self, "wait")
        return self._gates.open(self, epoch, None)

    def open_after(self, stream: Any = None) -> int:
        """Open the gate when the work now queued on ``stream`` has finished; return the epoch.

        Args:
            stream: a stream of the device; None means the current stream.
        """
        self._gates.require(self, "wait")
        return self._gates.open_after(self, stream)

    def wait(self, timeout: float | None = None, *, epoch: int | None = None) -> int:
        """Wait until the step has signalled, and return the epoch.

        Without ``epoch``, each call waits for the next replay. It skips finished replays except the
        most recent.

        Args:
            timeout: maximum seconds to wait; by default ``gate_timeout`` of the capture or runner.
            epoch: the replay, counted from 1.

        Raises:
            GateTimeoutError: no signal arrived in time, or the replay is invalid because one of its
                gates was not opened.
            GateError: the replay ended without the signal.
            InputError: the step has no ``dg.signal`` of this name.
        """
        self._gates.require(self, "signal")
        return self._gates.wait(self, timeout, epoch)

    def __repr__(self) -> str:
        return f"<Gate {self.name!r} of {self._gates.owner}, epoch {self.epoch}>"


class Gates(Mapping[str, Gate]):
    """The gates of one capture or runner, by name.

    Args:
        backend: the backend of the step.
        owner: name of the capture or runner in messages.
        timeout: seconds until a gate counts as forgotten; the environment sets the default.
        turns: number of iterations of the step's loop.
    """

    def __init__(
        self, backend: Any, owner: str, *, timeout: float | None = None, turns: int = 1
    ) -> None:
        self._backend = backend
        self.owner = owner
        self.timeout = gate_timeout(timeout)
        self._turns = turns
        self._gates: dict[str, Gate] = {}
        self._state = threading.Condition()
        self._channel: GateChannel | None = None
        self._launched = 0
        self._ahead: dict[int, dict[int, Fence | None]] = {}
        """Places opened for future launches, by number of the launch."""
        self._launches: dict[int, _Launch] = {}
        """Launches that may still be running."""
        self._now: _Launch | None = None
        """The launch in progress in this process."""
        self._held_open = 0
        self._errors: dict[int, GateTimeoutError] = {}
        """The errors of the last invalid launches, by number of the launch."""
        self._unseen: GateTimeoutError | None = None
        self.untold: GateTimeoutError | None = None
        """The last error, until the runner reports it to other ranks."""
        self._watch: threading.Thread | None = None
        self.recorded = RecordedMarks()
        """The marks of the last recording."""
        self._unopened: list[int] = []
        self._records = False
        self.complete = False
        """Whether a capture has finished, so that all names are known."""
        self.breaks = not backend.capabilities.gates
        """Whether marks break a capture, because the backend has no gates inside a graph."""

    __hash__ = object.__hash__
    __eq__ = object.__eq__

    # Names.

    def __getitem__(self, name: str) -> Gate:
        gate = self._gates.get(name)
        if gate is None:
            if self.complete:
                known = did_you_mean(str(name), self._gates)
                raise InputError(f"{self.owner} has no gate {name!r}. {known}")
            gate = self._named(name)
        return gate

    def __contains__(self, name: object) -> bool:
        return name in self._gates

    def __iter__(self) -> Iterator[str]:
        return iter(self._gates)

    def __len__(self) -> int:
        return len(self._gates)

    @property
    def channel(self) -> GateChannel:
        if self._channel is None:
            with _disable_current_modes():  # torch.compile traces marks with fake tensors
                self._channel = self._backend.make_gate_channel(self)
            if self._channel.delayed:
                self._backend.gate_sets.add(self)
        return self._channel

    @property
    def epoch(self) -> int:
        """Epoch of the last replay that was launched; 0 before the first."""
        return self._launched * self._turns

    @property
    def idle(self) -> bool:
        """Whether all launches have ended."""
        return self._channel is None or self._channel.finished() >= self._launched

    @property
    def running(self) -> int:
        return 0 if self._now is None else self._now.number

    def _named(self, name: str) -> Gate:
        with self._state:
            return self._gates.setdefault(name, Gate(self, name, len(self._gates)))

    def require(self, gate: Gate, kind: str) -> None:
        """Raise InputError if no mark of this kind has the name of ``gate``."""
        if self.complete and kind not in gate.kinds:
            known = did_you_mean(gate.name, [n for n in self if kind in self._gates[n].kinds])
            raise InputError(f"{self.owner} has no dg.{kind}({gate.name!r}). {known}")

    def name_of(self, place: int) -> str:
        return list(self._gates)[place // self._turns]

    # Marks.

    def reach(self, kind: str, name: str, timeout: float | None, *, recording: bool) -> None:
        """Record a gate mark in a capture, run it in a launch, and ignore it elsewhere."""
        gate = self._gates.get(name) or self._named(name)
        gate.kinds.add(kind)
        place = gate.number * self._turns + current_turn.get()
        seconds = self.timeout if timeout is None else gate_timeout(timeout, "timeout")
        launch, recorded, channel = self._now, self.recorded, self.channel
        if recording or (launch is None and self._records):
            if (kind, place) in recorded.marks:
                raise CaptureError(
                    f"dg.{kind}({name!r}) occurs twice in a capture, at {user_line()}: names must "
                    f"be unique in a step. Add the number of the layer to the name."
                )
            recorded.marks.add((kind, place))
        if recording:
            if kind == "signal":
                channel.signal(place, True)
            else:
                recorded.waits[place] = seconds
                self._unopened.append(place)
                channel.wait(place, seconds, True)
        elif launch is None:
            recorded.in_breaks += self._records
            if kind == "wait" and self._records:
                recorded.eager[place] = seconds
        else:
            if not launch.begun:
                channel.begin(launch.number, (), True)
                launch.begun = True
            self._reach_now(launch, kind, place, seconds)

    def _reach_now(self, launch: _Launch, kind: str, place: int, seconds: float) -> None:
        channel = self.channel
        if kind == "signal":
            channel.signal(place, False)
        else:
            with self._state:
                launch.waits.setdefault(place, seconds)
                fence = launch.opened.get(place)
                is_open = place in launch.opened and (fence is None or fence())
                if not is_open:
                    launch.unwritten.add(place)
            if not is_open:
                channel.wait(place, seconds, False)
                with self._state:
                    self._issue()

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Record the marks of the block, in which a name may occur only once."""
        self.recorded, self._unopened, self._records = RecordedMarks(), [], True
        try:
            yield
        finally:
            self._records = False

    def open_recorded(self) -> None:
        """Let one launch pass the waits that were recorded since the last call."""
        places, self._unopened = self._unopened, []
        if self._now is None and places:
            self.channel.begin(None, places, False)

    def block(self, place: int, timeout: float) -> None:
        """Wait until ``place`` is open in the current launch, or raise GateTimeoutError."""
        launch = self._now
        if launch is None or self._held_open:
            return
        deadline = time.monotonic() + timeout
        with self._state:
            while True:
                fence = launch.opened.get(place)
                if place in launch.opened and (fence is None or fence()):
                    return
                left = deadline - time.monotonic()
                if left <= 0:
                    raise self._expire(launch, place)
                self._state.wait(left if fence is None else min(left, 1e-4))

    # Launches.

    @contextlib.contextmanager
    def held_open(self) -> Iterator[None]:
        """Keep all gates open in the block. Replays in the block do not count as epochs."""
        self._held_open += 1
        try:
            yield
        finally:
            self._held_open -= 1

    @contextlib.contextmanager
    def launch(self, recorded: RecordedMarks | None = None) -> Iterator[None]:
        """Run one step in the block; the caller holds the pool's lock.

        ``recorded`` contains the marks of a capture; None means an eager step, which is an epoch
        only if it has marks.

        Raises:
            GateTimeoutError: a gate of an earlier replay was not opened.
        """
        self.check()
        marks = recorded or RecordedMarks()
        if self._held_open:
            if recorded:
                self.channel.begin(None, marks.waits, False)
            with entered_gates(self):
                yield
            return
        with self._state:
            if self._launches:
                self._prune()
            number = self._launched + 1
            opened = self._ahead.pop(number, {})
            waits = {**marks.waits, **marks.eager}
            launch = _Launch(number, waits, opened, set(marks.waits), grows=recorded is None)
            ready = [p for p, fence in opened.items() if p in marks.waits and fence is None]
            launch.unwritten.difference_update(ready)
            self._launched, self._launches[number] = number, launch
        failure = None
        try:
            if recorded is not None:
                self.channel.begin(number, ready, marks.signals)
                launch.begun = True
                with self._state:
                    self._issue()
            self._now = launch
            with entered_gates(self):
                yield
        except BaseException as error:
            failure = error
            raise
        finally:
            self._now = None
            self._end(launch, failure)

    def _end(self, launch: _Launch, failure: BaseException | None) -> None:
        unlaunched = (
            not launch.begun
            or isinstance(failure, UpdateError)
            or (isinstance(failure, ExecutableError) and not failure.partly)
        )
        with self._state:
            launch.grows = False
            if failure is not None and launch.begun:
                self.channel.clear()
                for place in launch.closed if not unlaunched else ():
                    launch.opened[place] = None
                launch.unwritten.clear()
            if unlaunched:
                del self._launches[launch.number]
                self._errors.pop(launch.number, None)
                self._launched -= 1
                self._ahead[launch.number] = launch.opened
        if not unlaunched:
            self.channel.end(launch.number)
            with self._state:
                self._issue()

    def _prune(self) -> int:
        """Forget launches that have ended; return the number of the last one."""
        done = self.channel.finished()
        for number in [number for number in self._launches if number <= done]:
            del self._launches[number]
        return done

    def _issue(self) -> None:
        """Open places on the device, launch by launch, and start the watch thread if needed."""
        for launch in self._launches.values():
            if not launch.begun:
                break
            if launch.since is None:
                launch.since = time.monotonic()
            by_fence: dict[Fence | None, list[int]] = {}
            for place in launch.unwritten.intersection(launch.opened):
                by_fence.setdefault(launch.opened[place], []).append(place)
            for fence, places in by_fence.items():
                self.channel.open(launch.number, places, fence)
                launch.unwritten.difference_update(places)
            if not launch.waits.keys() <= launch.opened.keys():
                break
        if (
            self._watch is None
            and self.channel.delayed
            and any(launch.pending for launch in self._launches.values())
        ):
            self._watch = threading.Thread(target=self._watch_gates, daemon=True)
            self._watch.start()

    def open(self, gate: Gate, epoch: int | None, fence: Fence | None) -> int:
        if epoch is not None:
            whole("epoch", epoch, 1)
        with self._state:
            done = self._prune()
            if epoch is None:
                epoch = self._oldest_closed(gate, done)
            number, place = self._at(gate, epoch)
            launch, error = self._launches.get(number), self._errors.get(number)
            if error or number <= done:
                why = f" ({error})" if error else ""
                raise GateError(
                    f"gate {gate.name!r} of {self.owner} cannot be opened for replay {epoch}, "
                    f"which has ended{why}. The last replay was {self.epoch}: open the gate for a "
                    f"later replay."
                )
            if self._needs(gate, epoch):
                if launch is None:
                    self._ahead.setdefault(number, {})[place] = fence
                else:
                    launch.opened[place] = fence
                    self._issue()
                    self._state.notify_all()
            return epoch

    def open_after(self, gate: Gate, stream: Any) -> int:
        channel = self.channel
        source = channel.source(stream)
        with self._state:
            done = self._prune()
            later, epoch = gate.next, self._oldest_closed(gate, done)
            number, place = self._at(gate, epoch)
            launch = self._launches.get(number)
            behind = channel.behind(number, place, source) if launch is not None else None
            if launch is None or behind is None:
                gate.next = later
            else:
                launch.opened[place], queue = behind
                launch.unwritten.discard(place)
                self._issue()
                self._state.notify_all()
        if behind is None:
            return self.open(gate, None, channel.after(stream))
        queue()  # outside the lock, because a full stream blocks this call
        return epoch

    def _oldest_closed(self, gate: Gate, done: int) -> int:
        """Return the oldest epoch for which the gate is closed, and advance ``gate.next``.

        ``done`` is the number of the last launch that has ended.
        """
        epoch = max(gate.next, done * self._turns + 1)
        while not self._needs(gate, epoch):
            epoch += 1
        gate.next = epoch + 1
        return epoch

    def _at(self, gate: Gate, epoch: int) -> tuple[int, int]:
        launch, turn = divmod(epoch - 1, self._turns)
        return launch + 1, gate.number * self._turns + turn

    def _needs(self, gate: Gate, epoch: int) -> bool:
        """Whether ``gate`` is closed in ``epoch``, whose replay has not ended."""
        number, place = self._at(gate, epoch)
        launch = self._launches.get(number)
        if launch is None:
            return number > self._launched and place not in self._ahead.get(number, {})
        return place not in launch.opened and (launch.grows or place in launch.waits)

    def wait(self, gate: Gate, timeout: float | None, epoch: int | None) -> int:
        seconds = self.timeout if timeout is None else finite("timeout", timeout)
        deadline, pause, channel = time.monotonic() + seconds, 2e-5, self.channel
        if epoch is not None:
            whole("epoch", epoch, 1)
        else:
            with self._state:
                running = min(channel.finished() + 1, self._launched) * self._turns
                epoch = max(gate.taken + 1, running - self._turns + 1 if running else 1)
                gate.taken = epoch
        number, place = self._at(gate, epoch)
        while True:
            ended = number <= channel.finished()
            if number in self._errors:
                raise self._errors[number]
            if number <= self._launched and channel.signalled(place, number):
                return epoch
            if ended:
                raise GateError(
                    f"replay {epoch} of {self.owner} ended without the signal {gate.name!r}: its "
                    f"step failed, or has no such signal."
                )
            if time.monotonic() > deadline:
                raise GateTimeoutError(
                    f"replay {epoch} of {self.owner} did not signal {gate.name!r} within "
                    f"{seconds:g} s. Launch the replay before the wait, or wait longer (timeout=)."
                )
            time.sleep(pause)
            pause = min(2 * pause, 1e-3)

    # Forgotten gates.

    def check(self) -> None:
        """Raise GateTimeoutError, once, for a replay with a forgotten gate."""
        if self._unseen is not None:
            with self._state:  # The watch thread may add the error of another launch.
                error, self._unseen = self._unseen, None
            raise error

    def _expire(self, launch: _Launch, place: int) -> GateTimeoutError:
        epoch = (launch.number - 1) * self._turns + place % self._turns + 1
        name, late = self.name_of(place), place in launch.opened
        reason = "the stream of its open_after has not finished" if late else "nobody opened it"
        error = GateTimeoutError(
            f"gate {name!r} of {self.owner} was closed for {launch.waits[place]:g} s in replay "
            f"{epoch} ({reason}). The outputs of this replay are invalid. Open the gate with "
            f"gates[{name!r}].open(), or allow more time with gate_timeout= or {TIMEOUT_VARIABLE}."
        )
        self._errors[launch.number] = self.untold = error
        if len(self._errors) > _MOST_ERRORS:
            del self._errors[next(iter(self._errors))]
        logger.error("%s", error)
        return error

    def _watch_gates(self) -> None:
        """Open forgotten gates after their timeout, until no launch waits."""
        while True:
            with self._state:
                self._prune()
                launch = next((x for x in self._launches.values() if x.pending), None)
                if launch is None:
                    self._watch = None
                    return
                now, since = time.monotonic(), launch.since or time.monotonic()
                pending = launch.pending
                late = [p for p in pending if since + launch.waits[p] <= now]
                if late:
                    error = self._expire(launch, late[0])
                    self._unseen = self._unseen or error
                    launch.opened.update(dict.fromkeys(pending))
                    launch.unwritten.difference_update(pending)
                    self.channel.open(launch.number, pending, None)
                    self.channel.clear()
                    self._issue()
                    continue
                times = [t for x in self._launches.values() for t in x.waits.values()]
                pause = min(since - now + min(launch.waits[p] for p in pending), *times)
            time.sleep(max(pause, 1e-3))


class HostGates:
    """A channel that waits on the host, for the CPU reference and for breaks.

    ``record`` records a named callable in this thread's capture; None if gates cause breaks.
    """

    delayed = False

    def __init__(
        self,
        gates: Gates,
        fence: Callable[[Any], Fence],
        record: Callable[[str, Callable[[], object]], None] | None = None,
    ) -> None:
        self._gates, self.after, self._record = gates, fence, record
        self._ended = 0
        self._signals: dict[int, tuple[int, Fence]] = {}

    def begin(self, launch: int | None, opened: Iterable[int], signals: bool) -> None:
        pass

    def end(self, launch: int) -> None:
        self._ended = launch

    def wait(self, place: int, timeout: float, recording: bool) -> None:
        def block() -> None:
            self._gates.block(place, timeout)

        self._run(f"dg.wait({self._gates.name_of(place)!r})", block, recording)

    def signal(self, place: int, recording: bool) -> None:
        def note() -> None:
            self._signals[place] = self._gates.running, self.after(None)

        self._run(f"dg.signal({self._gates.name_of(place)!r})", note, recording)

    def _run(self, name: str, act: Callable[[], object], recording: bool) -> None:
        if not recording:
            act()
        else:
            assert self._record is not None
            self._record(name, act)

    def open(self, launch: int, places: Iterable[int], fence: Fence | None) -> None:
        pass

    def source(self, stream: Any) -> int:
        return 0

    def behind(self, launch: int, place: int, source: int) -> None:
        pass

    def clear(self) -> None:
        pass

    def finished(self) -> int:
        return self._ended

    def signalled(self, place: int, launch: int) -> bool:
        number, fence = self._signals.get(place, (0, bool))
        return number > launch or (number == launch and fence())


def gate_timeout(given: float | None = None, name: str = "gate_timeout") -> float:
    """Return ``given`` or, if it is None, the timeout from the environment, in seconds."""
    if given is None:
        name, text = TIMEOUT_VARIABLE, os.environ.get(TIMEOUT_VARIABLE) or "30"
        try:
            given = float(text)
        except ValueError:
            raise InputError(f"{name} must be seconds, got {text!r}") from None
    if not finite(name, given):
        raise InputError(f"{name} must be more than 0 seconds")
    return float(given)
