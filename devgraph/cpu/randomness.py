"""The random generators of a recording: draws are recorded, and so are changes of their state."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable

import attrs
import torch

from devgraph.api.snapshots import restores_elsewhere
from devgraph.cpu.metadata import UnrecordableError

Record = Callable[[str, Callable[[], object]], None]
"""Records a call under a name."""

SAVED = "a saved random state"
"""Name of the calls that change no generator."""

_claim: dict[str, int] = {}
"""The thread whose recording moves torch's default generator, under the key "default"."""


def _claimed() -> bool:
    """Claim the default generator for this thread unless another live thread has it.

    An interrupt may leave a claim behind. A thread records one step at a time, so it may replace
    its own claim.
    """
    here = threading.get_ident()
    holder = _claim.setdefault("default", here)
    if holder != here and all(thread.ident != holder for thread in threading.enumerate()):
        _claim.pop("default", None)
        holder = _claim.setdefault("default", here)
    return holder == here


def _address(generator: torch.Generator) -> int:
    return int(generator._cdata)  # type: ignore[attr-defined]


@attrs.define(eq=False)
class Position:
    """A state of a generator between two draws of a recording.

    A replay saves its own state there if the recorded code returns to the position.
    """

    generator: torch.Generator
    state: torch.Tensor  # the state in the recording
    is_drawn: bool = False  # whether a draw begins or ends there
    is_needed: bool = False
    saved: torch.Tensor | None = None

    def save(self) -> None:
        if self.is_needed:
            self.saved = self.generator.get_state()

    def restore(self) -> None:
        assert self.saved is not None
        self.generator.set_state(self.saved)


@attrs.define(eq=False)
class _Draw:
    """A recorded draw, between two positions."""

    run: Callable[[], object]
    before: Position
    after: Position

    def __call__(self) -> None:
        self.before.save()
        self.run()
        self.after.save()


class Sequence:
    """The random numbers that a recording takes from one generator.

    A recording draws nothing, but it moves the generator at each draw. A state that the code sets,
    as ``torch.utils.checkpoint`` does, therefore identifies its draw. A recording continues from
    the ``earlier`` positions of its session, so that all states differ, because a backward may set
    the states of its forward.
    """

    def __init__(
        self, generator: torch.Generator, record: Record, earlier: Iterable[Position] = ()
    ) -> None:
        self._generator = generator
        self._record = record
        self._original = generator.get_state()
        self._restores = restores_elsewhere()
        self._earlier = [*earlier]
        self._positions: list[Position] = []
        self._now: Position
        if self._earlier:
            generator.set_state(self._earlier[-1].state)
        self._advance()

    def draw(self, run: Callable[[], object]) -> Callable[[], object]:
        """Return ``run``, which draws numbers, as the call to record."""
        self.follow()
        before = self._now
        self._advance()
        before.is_drawn = self._now.is_drawn = True
        return _Draw(run, before, self._now)

    def follow(self) -> None:
        """Record the changes of the state that the code made since the last draw."""
        with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
            state = self._generator.get_state()
            if torch.equal(state, self._now.state):
                return
            drawn = (position for position in self._earlier if position.is_drawn)
            for position in (*self._positions, *drawn):
                if torch.equal(state, position.state):
                    self._leave()
                    position.is_needed = True
                    self._now = position
                    self._record("a restored random state", position.restore)
                    return
            seeded = torch.Generator().manual_seed(self._generator.initial_seed()).get_state()
            if not torch.equal(state, seeded):
                if restores_elsewhere() != self._restores:
                    # Another thread has restored the state after its own capture.
                    self._now = Position(self._generator, state)
                    return
                raise UnrecordableError(
                    "the step sets the state of a random generator, or another thread draws from "
                    "it. A replay would set the state of capture again. Set it before the replay"
                )
        self._leave()
        self._now = Position(self._generator, state)
        self._positions.append(self._now)
        set_state = self._generator.set_state
        self._record("a random seed", lambda: set_state(state))

    def end(self) -> list[Position]:
        """Restore the state of the generator; return all positions of the session."""
        self._generator.set_state(self._original)
        return [*self._earlier, *self._positions]

    def _leave(self) -> None:
        """Record that the position may be needed later: no draw follows that would save it."""
        self._record(SAVED, self._now.save)

    def _advance(self) -> None:
        with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
            torch.empty((), dtype=torch.int64).random_(generator=self._generator)
            self._now = Position(self._generator, self._generator.get_state())
        self._positions.append(self._now)


@attrs.frozen
class _StandIn:
    """A generator for the draws from another one, which the step seeds."""

    generator: torch.Generator
    state: torch.Tensor  # the state of the original when it was seeded


class Randomness:
    """The generators of a recording.

    Only one recording at a time follows torch's default generator. The others record draws from it
    and do not see changes of its state. The caller owns the ``known`` generators.
    """

    def __init__(
        self,
        record: Record,
        known: Iterable[torch.Generator] = (),
        positions: dict[int, list[Position]] | None = None,
    ) -> None:
        self._record = record
        self._positions = {} if positions is None else positions
        """The positions of earlier recordings of the session, by the address of the generator."""
        # By the address of the generator, because each operation gets an object of its own.
        self._sequences: dict[int, Sequence] = {}
        self._objects: dict[int, torch.Generator] = {}
        """The objects by which the user's code holds generators."""
        self._unknown: set[int] = set()
        """Generators that had drawn before: no seed produces their state."""
        self._stand_ins: dict[int, _StandIn] = {}
        self._has_claim = _claimed()
        if self._has_claim:
            known = (torch.default_generator, *known)
        for generator in known:
            is_claimed = generator is not torch.default_generator or self._has_claim
            if generator.device.type == "cpu" and is_claimed:
                address = _address(generator)
                earlier = self._positions.get(address, ())
                self._sequences[address] = Sequence(generator, record, earlier)

    def note(self, generator: torch.Generator) -> None:
        """Note the object by which the user's code holds a generator."""
        self._objects[_address(generator)] = generator

    def _is_held(self, address: int) -> bool:
        """Whether the user's code holds a generator. If so, the step did not make it."""
        # Generators of torch 2.11 support no weak references.
        return address not in self._objects or sys.getrefcount(self._objects[address]) > 2

    def source(self, generator: torch.Generator | None) -> torch.Generator:
        """Return the generator that replays draw from in place of ``generator``.

        If nothing has drawn from the generator, either the step or the caller seeded it. A stand-in
        that every replay seeds takes its place, and ``follow`` refuses a generator of the caller.
        """
        if generator is None or _address(generator) == _address(torch.default_generator):
            return torch.default_generator
        if _address(generator) in self._sequences:
            return generator
        with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
            state = generator.get_state()
            stand_in = self._stand_ins.get(_address(generator))
            if stand_in is not None:
                if not torch.equal(state, stand_in.state):
                    raise UnrecordableError("the step seeds a generator that it has drawn from")
                return stand_in.generator
            seeded = torch.Generator().manual_seed(generator.initial_seed())
            if not torch.equal(seeded.get_state(), state):
                self._unknown.add(_address(generator))
                self._sequences[_address(generator)] = Sequence(generator, self._record)
                return generator
        self._stand_ins[_address(generator)] = _StandIn(seeded, state)
        self._record("a random seed", lambda: seeded.set_state(state))
        self._sequences[_address(seeded)] = Sequence(seeded, self._record)
        return seeded

    def draw(self, generator: torch.Generator, run: Callable[[], object]) -> Callable[[], object]:
        """Return ``run``, which draws from a ``source``, as the call to record."""
        sequence = self._sequences.get(_address(generator))
        return run if sequence is None else sequence.draw(run)

    def follow(self) -> None:
        """Record the changes of states since the last draws, and refuse; called at the end."""
        if not all(map(self._is_held, self._unknown)):
            raise UnrecordableError(
                "the step makes a random generator and sets its state, which a replay would set "
                "again as it is now. Seed it by a number, or make it before the capture"
            )
        if any(map(self._is_held, self._stand_ins)):
            raise UnrecordableError(
                "the step draws from a generator of the caller's that it seeds, or that nothing "
                "has drawn from. A replay would not seed it again. Seed the generator before the "
                "capture and draw from it once, make it in the step, or use torch's default one"
            )
        for sequence in self._sequences.values():
            sequence.follow()

    def end(self) -> None:
        """Restore the state of every generator. Idempotent."""
        for address, sequence in self._sequences.items():
            self._positions[address] = sequence.end()
        self._sequences = {}
        if self._has_claim:
            self._has_claim = False
            _claim.pop("default", None)
