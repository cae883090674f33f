"""The random generators of a recording, which records draws and refuses state changes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

import torch

from devgraph.api.snapshots import restores_elsewhere

_claims: dict[str, int] = {}
"""The thread whose recording advances torch's default generator, under the key "default"."""


def _claimed() -> bool:
    """Claim the default generator unless another live thread has; return whether that succeeded.

    A thread records one step at a time, so an existing claim of this thread is left over from an
    interrupt.
    """
    here = threading.get_ident()
    holder = _claims.setdefault("default", here)
    if holder != here and all(thread.ident != holder for thread in threading.enumerate()):
        _claims.pop("default", None)
        holder = _claims.setdefault("default", here)
    return holder == here


def _address(generator: torch.Generator) -> int:
    return int(generator._cdata)  # type: ignore[attr-defined]


class _Sequence:
    """The draws from one generator in a recording.

    A recording executes no draw, but advances the generator at each draw. An earlier state that the
    code restores, as ``torch.utils.checkpoint`` does, therefore differs from the current state and
    is detected. A backward pass may restore a state of its forward pass, so a recording starts from
    ``start``, the latest state in the session.
    """

    def __init__(self, generator: torch.Generator, start: torch.Tensor | None) -> None:
        self._generator = generator
        self._original = generator.get_state()
        self._restores = restores_elsewhere()
        if start is not None:
            generator.set_state(start)
        self.advance()

    def advance(self) -> None:
        with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
            torch.empty((), dtype=torch.int64).random_(generator=self._generator)
            self.state = self._generator.get_state()

    def is_set(self) -> bool:
        """Whether the code has set the state since the last check or draw."""
        with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
            before, self.state = self.state, self._generator.get_state()
            # Another thread may have restored the state after its own capture.
            return not torch.equal(before, self.state) and self._restores == restores_elsewhere()

    def end(self) -> None:
        self._generator.set_state(self._original)


class Randomness:
    """The generators of a recording: torch's default generator and the caller's ``known`` ones.

    Only one recording at a time tracks the state of the default generator. Concurrent recordings
    record its draws, but do not refuse changes of its state. ``states`` maps the addresses of
    generators to their latest states in the session. ``refuse`` is called if the code sets a state
    or draws from an unknown generator.
    """

    def __init__(
        self,
        known: Iterable[torch.Generator],
        states: dict[int, torch.Tensor],
        refuse: Callable[[], None],
    ) -> None:
        self._states, self._refuse = states, refuse
        # Keyed by address, because each operation receives a new Python object for its generator.
        self._sequences: dict[int, _Sequence] = {}
        default = torch.default_generator
        self._default = _address(default)
        self._has_claim = _claimed()
        others = (g for g in known if g is not default and g.device.type == "cpu")
        for generator in (*((default,) if self._has_claim else ()), *others):
            address = _address(generator)
            self._sequences[address] = _Sequence(generator, states.get(address))

    def draw(self, generator: torch.Generator | None) -> None:
        """Note a draw from ``generator``; None means the default generator."""
        address = self._default if generator is None else _address(generator)
        if (sequence := self._sequences.get(address)) is not None:
            if sequence.is_set():
                self._refuse()
            sequence.advance()
        elif address != self._default:
            self._refuse()

    def refuse_set_states(self) -> None:
        """At the end of a recording, refuse states that the code has set since the last draws."""
        if any(sequence.is_set() for sequence in self._sequences.values()):
            self._refuse()

    def end(self) -> None:
        """Restore the state of every generator. Idempotent."""
        for address, sequence in self._sequences.items():
            self._states[address] = sequence.state
            sequence.end()
        self._sequences = {}
        if self._has_claim:
            self._has_claim = False
            _claims.pop("default", None)
