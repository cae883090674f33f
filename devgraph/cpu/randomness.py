"""The random generators of a recording: recorded draws, and recorded changes of their states."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable

import attrs
import torch

from devgraph.api.snapshots import restores_elsewhere
from devgraph.cpu.metadata import UnrecordableError

Record = Callable[[str, Callable[[], object]], None]
"""A callable that records a call under a name."""

SAVED = "a saved random state"
"""Name of recorded calls that only save a state."""

_claim: dict[str, int] = {}
"""The thread whose recording advances torch's default generator, under the key "default"."""


def _claimed() -> bool:
    """Claim the default generator for this thread unless another live thread has claimed it.

    A thread records one step at a time, so an existing claim of this thread is left over from an
    interrupt.
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

    If the recorded code restores this state later, each replay saves its own state here first.
    """

    generator: torch.Generator
    state: torch.Tensor  # the state in the recording
    is_drawn: bool = False  # whether a draw begins or ends here
    is_needed: bool = False
    saved: torch.Tensor | None = None

    def save(self) -> None:
        if self.is_needed:
            self.saved = self.generator.get_state()

    def restore(self, generator: torch.Generator | None = None) -> None:
        assert self.saved is not None
        (generator or self.generator).set_state(self.saved)


@attrs.define(eq=False)
class _Draw:
    """A recorded draw and the positions before and after it."""

    run: Callable[[], object]
    before: Position
    after: Position

    def __call__(self) -> None:
        self.before.save()
        self.run()
        self.after.save()


class Sequence:
    """The draws of a recording from one generator.

    A recording executes no draw, but advances the generator at each draw. If the code later sets a
    state, as ``torch.utils.checkpoint`` does, the state identifies the draw. A backward pass may
    set a state of its forward pass, so states must be unique in a session. Therefore a recording
    continues from the ``earlier`` positions of the session.
    """

    def __init__(
        self, generator: torch.Generator, record: Record, earlier: Iterable[Position] = ()
    ) -> None:
        self._generator = generator
        self._record = record
        self._original = generator.get_state()
        self._restores = restores_elsewhere()
        self._earlier = [*earlier]
        self.positions: list[Position] = []
        self.now: Position
        if self._earlier:
            generator.set_state(self._earlier[-1].state)
        self._advance()

    def draw(self, run: Callable[[], object]) -> Callable[[], object]:
        """Return the call to record for ``run``, which draws numbers."""
        self.follow()
        before = self.now
        self._advance()
        before.is_drawn = self.now.is_drawn = True
        return _Draw(run, before, self.now)

    def follow(self) -> None:
        """If the code has changed the state since the last draw, record the change."""
        with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
            state = self._generator.get_state()
            if torch.equal(state, self.now.state):
                return
            drawn = (position for position in self._earlier if position.is_drawn)
            for position in (*self.positions, *drawn):
                if torch.equal(state, position.state):
                    self._leave()
                    position.is_needed = True
                    self.now = position
                    self._record("a restored random state", position.restore)
                    return
            seeded = torch.Generator().manual_seed(self._generator.initial_seed()).get_state()
            if not torch.equal(state, seeded):
                if restores_elsewhere() != self._restores:
                    # Another thread restored the state after its own capture.
                    self.now = Position(self._generator, state)
                    return
                raise UnrecordableError(
                    "the step sets the state of a random generator, or another thread draws from "
                    "the generator. Every replay would set the state from capture again. Set the "
                    "state before the replay"
                )
        self._leave()
        self.now = Position(self._generator, state)
        self.positions.append(self.now)
        set_state = self._generator.set_state
        self._record("a random seed", lambda: set_state(state))

    def end(self) -> list[Position]:
        """Restore the state of the generator; return all positions of the session."""
        self._generator.set_state(self._original)
        return [*self._earlier, *self.positions]

    def _leave(self) -> None:
        """Record a save of the current position, because no later draw will save it."""
        self._record(SAVED, self.now.save)

    def _advance(self) -> None:
        with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
            torch.empty((), dtype=torch.int64).random_(generator=self._generator)
            self.now = Position(self._generator, self._generator.get_state())
        self.positions.append(self.now)


@attrs.frozen
class _StandIn:
    """A generator that replaces another generator, which the step seeds."""

    generator: torch.Generator
    state: torch.Tensor  # the state of the original after seeding


class Randomness:
    """The generators of a recording.

    Only one recording at a time tracks the state of torch's default generator. Concurrent
    recordings record draws from that generator, but no changes of its state. The caller owns the
    ``known`` generators.
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
        # By address of the generator, because each operation receives a new Python object.
        self._sequences: dict[int, Sequence] = {}
        self._objects: dict[int, torch.Generator] = {}
        """The Python objects of generators in the user's code."""
        self._unknown: set[int] = set()
        """Generators whose state no seed reproduces, because numbers were drawn from them."""
        self._stand_ins: dict[int, _StandIn] = {}
        self._clones: dict[int, int] = {}
        """Address of each clone, by the address of its stand-in."""
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
        """Store the Python object that the user's code passed."""
        self._objects[_address(generator)] = generator

    def _is_held(self, address: int) -> bool:
        """Whether code outside the step holds a generator, so the step did not create it."""
        # Generators of torch 2.11 do not support weak references.
        return address not in self._objects or sys.getrefcount(self._objects[address]) > 2

    def source(self, generator: torch.Generator | None) -> torch.Generator:
        """Return the generator from which replays draw: ``generator`` itself or a stand-in.

        If nothing has drawn from ``generator`` since it was seeded, replays seed the stand-in. If
        the caller, not the step, seeded the original, ``follow`` raises an error.
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
                    raise UnrecordableError(
                        "the step seeds a generator from which it has drawn. Create a new generator"
                    )
                return stand_in.generator
            if (origin := self._position_of(state)) is not None:
                return self._continued(generator, state, origin)
            seeded = torch.Generator().manual_seed(generator.initial_seed())
            if not torch.equal(seeded.get_state(), state):
                self._unknown.add(_address(generator))
                self._sequences[_address(generator)] = Sequence(generator, self._record)
                return generator
        self._stand_ins[_address(generator)] = _StandIn(seeded, state)
        self._record("a random seed", lambda: seeded.set_state(state))
        self._sequences[_address(seeded)] = Sequence(seeded, self._record)
        return seeded

    def _position_of(self, state: torch.Tensor) -> Position | None:
        """Return the position of a known generator with this ``state``, or None."""
        every = (p for sequence in self._sequences.values() for p in sequence.positions)
        return next((p for p in every if torch.equal(p.state, state)), None)

    def _continued(
        self, generator: torch.Generator, state: torch.Tensor, origin: Position
    ) -> torch.Generator:
        """Return a stand-in for a clone, which continues from a position of another generator."""
        stand_in = torch.Generator()
        stand_in.set_state(state)
        origin.is_needed = True
        if any(sequence.now is origin for sequence in self._sequences.values()):
            self._record(SAVED, origin.save)  # No recorded draw saves this position.
        self._record("a restored random state", lambda: origin.restore(stand_in))
        self._sequences[_address(stand_in)] = Sequence(stand_in, self._record)
        self._clones[_address(stand_in)] = _address(generator)
        self._stand_ins[_address(generator)] = _StandIn(stand_in, state)
        return stand_in

    def draw(self, generator: torch.Generator, run: Callable[[], object]) -> Callable[[], object]:
        """Return the call to record for ``run``, which draws from a result of ``source``."""
        sequence = self._sequences.get(_address(generator))
        if sequence is None:
            return run
        call = sequence.draw(run)
        clone = self._objects.get(self._clones.get(_address(generator), 0))
        if clone is not None:  # Clones of the clone must continue from its current state.
            clone.set_state(sequence.now.state)
            self._stand_ins[_address(clone)] = _StandIn(generator, sequence.now.state)
        return call

    def follow(self) -> None:
        """Record changes of states since the last draws; refuse unsupported use of generators.

        Called at the end of a recording.
        """
        if not all(map(self._is_held, self._unknown)):
            raise UnrecordableError(
                "the step creates a random generator and sets its state, but every replay would "
                "set the same state again. Seed the generator with a number, or create it before "
                "the capture"
            )
        if any(map(self._is_held, self._stand_ins)):
            raise UnrecordableError(
                "the step draws from a generator of the caller that the step seeds, or from which "
                "nothing was drawn before. A replay would not seed it again. Seed the generator "
                "and draw from it once before the capture, create it in the step, or use torch's "
                "default generator"
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
