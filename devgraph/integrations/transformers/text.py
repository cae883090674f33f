"""From token ids to text, piece by piece."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_BROKEN = "\N{REPLACEMENT CHARACTER}"


class TextStream:
    """Turns the tokens of one request into pieces of text as they come.

    A piece is held back while it ends inside a character, and, with stop strings, while it might
    be the beginning of one. The pieces joined are the whole text up to the first stop string.

    Args:
        tokenizer: of transformers, or anything with its ``decode``.
        stop: strings that end the text; they are not part of it.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str] = ()) -> None:
        self._decode = tokenizer.decode
        self._stop = tuple(s for s in stop if s)
        self._tokens: list[int] = []
        # Text of tokens [start:read] was handed on; a token's text depends on the one before it
        # (spaces), so decoding starts a little earlier than what is new.
        self._start = 0
        self._read = 0
        self._held = ""
        self.text = ""
        self.stopped = False
        """Whether a stop string was found."""

    def push(self, token: int) -> str:
        """Add a token and return the text that is certain now (may be empty)."""
        if self.stopped:
            return ""
        self._tokens.append(token)
        new = self._new()
        if not new or new.endswith(_BROKEN):
            return ""
        self._start, self._read = self._read, len(self._tokens)
        return self._emit(new, last=False)

    def finish(self) -> str:
        """Return what was still held back."""
        if self.stopped:
            return ""
        new = self._new()
        self._start = self._read = len(self._tokens)
        return self._emit(new, last=True)

    def _new(self) -> str:
        """Return the text of the tokens that were not handed on yet."""
        before, after = (
            self._decode(self._tokens[self._start : end], skip_special_tokens=True)
            for end in (self._read, None)
        )
        new: str = after[len(before) :]
        return new

    def _emit(self, new: str, *, last: bool) -> str:
        held = self._held + new
        found = [at for at in (held.find(s) for s in self._stop) if at >= 0]
        if found:
            self.stopped = True
            piece, self._held = held[: min(found)], ""
        else:
            keep = 0 if last else self._beginning_of_stop(held)
            piece, self._held = held[: len(held) - keep], held[len(held) - keep :]
        self.text += piece
        return piece

    def _beginning_of_stop(self, held: str) -> int:
        """Return how many characters at the end of ``held`` could become a stop string."""
        longest = max((len(s) for s in self._stop), default=1) - 1
        for size in range(min(longest, len(held)), 0, -1):
            if any(s.startswith(held[-size:]) for s in self._stop):
                return size
        return 0
