"""Votes through a page of shared memory: the ranks of one host agree in microseconds.

Each rank writes only its own row of words. A word contains the epoch of its vote and a value in
eight aligned bytes, so a reader that finds the epoch also has the value, regardless of the order in
which the processor executes stores. Votes alternate between two banks of rows. A rank overwrites a
bank only after all ranks have posted to the other bank, and have therefore read the first bank.
"""

from __future__ import annotations

import array
import errno
import fcntl
import mmap
import os
import secrets
import time
from collections.abc import Callable, Sequence

WIDTH = 8
"""Words in a row: one cache line. A longer vote takes several rounds."""

EPOCHS = 2**24 - 2
"""Number of epochs before they restart at 1. It is even, so that the banks still alternate."""

_VALUE_BITS = 40
_ZERO: int = 2 ** (_VALUE_BITS - 1)
"""The value 0 in a word; the epoch is in the upper bits."""

_POLLS = 200  # polls without a pause if every rank has its own processor; 200 us with two ranks

_LOOK_S = 0.1  # seconds between checks of whether the processes of missing ranks still exist

_FOLDER = "/dev/shm"

Finish = Callable[[str], list[int]]
"""A callable that receives the tag of a vote that has begun, and returns the result."""


def create_page(size: int) -> str:
    """Create the page of a host with ``size`` ranks and return the path of its file."""
    path = f"{_FOLDER}/devgraph-{os.getpid()}-{secrets.token_hex(8)}"
    file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        # With a sparse file, lack of memory would kill the first process that writes to the page.
        os.posix_fallocate(file, 0, _bytes_for(size))
    except BaseException:
        os.unlink(path)
        raise
    finally:
        os.close(file)
    return path


def _bytes_for(size: int) -> int:
    """Return the bytes of two banks, each with one row for each rank and one for the result."""
    return 2 * (size + 1) * WIDTH * 8


class SharedVotes:
    """A callable that casts this rank's vote through the shared page of its host.

    Each rank locks one byte of the page's file. The kernel releases the lock when the process ends,
    however it ends.
    """

    def __init__(
        self,
        path: str,
        rank: int,
        size: int,
        *,
        wait: Callable[[Callable[[], bool], str], None],
        names: Sequence[int] | None = None,
        several_hosts: bool = False,
        begin_between_hosts: Callable[[list[int]], Finish] | None = None,
    ) -> None:
        self._rank, self._size, self._wait = rank, size, wait
        self._names = names or range(size)
        """Rank numbers for messages."""
        self._several_hosts = several_hosts
        self._begin_between_hosts = begin_between_hosts
        self._between: tuple[int, Finish] | None = None
        """Epoch and callable of the last vote between hosts, so that an interrupt does not cause a
        second vote."""
        self._epoch = self._begun = 0
        """Epochs of the last complete vote and of the last vote that was begun."""
        self._polls = _POLLS if size <= (os.cpu_count() or 1) else 1
        self._file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, rank)
            page = mmap.mmap(self._file, _bytes_for(size))
        except BaseException:
            os.close(self._file)
            raise
        self._words = memoryview(page).cast("Q")

    def __del__(self) -> None:
        if hasattr(self, "_words"):
            os.close(self._file)

    def __call__(self, tag: str, values: list[int]) -> list[int]:
        """Return the element-wise minimum of ``values`` (at most 39 bits each) over all ranks."""
        lowest: list[int] = []
        for start in range(0, len(values), WIDTH):
            part = values[start : start + WIDTH]
            if self._begun != self._epoch and (posted := self._posted(self._rank)) != self._epoch:
                # An interrupt ended the wait for a vote in which this rank has already posted. Its
                # bank must not be reused before all ranks have posted.
                self._finish(tag, posted)
            self._begun = epoch = self._epoch % EPOCHS + 1  # New memory contains epoch 0.
            self._post(self._rank, epoch, part)
            lowest += self._finish(tag, epoch)[: len(part)]
        return lowest

    def _finish(self, tag: str, epoch: int) -> list[int]:
        """Wait until the vote ``epoch`` is complete and return its result."""
        begin = self._begin_between_hosts
        if begin is None and self._several_hosts:
            result = self._minima(tag, epoch, self._size, self._size + 1)
        else:
            result = self._minima(tag, epoch, 0, self._size)
            if begin is not None:
                if self._between is None or self._between[0] != epoch:
                    self._between = epoch, begin(result)
                result = self._between[1](tag)
                self._post(self._size, epoch, result)
        self._epoch = epoch
        return result

    def _minima(self, tag: str, epoch: int, first: int, end: int) -> list[int]:
        """Wait until the rows ``first`` to ``end - 1`` have ``epoch``, and return their minima."""
        start, stop = self._index(epoch, first), self._index(epoch, end)
        words, look = self._words, time.monotonic() + _LOOK_S
        row_words: list[int] = []

        def is_complete() -> bool:
            nonlocal row_words, look
            row_words = words[start:stop].tolist()
            if min(row_words) >> _VALUE_BITS == epoch == max(row_words) >> _VALUE_BITS:
                return True
            if time.monotonic() > look:
                self._require_alive(epoch)
                look = time.monotonic() + _LOOK_S
            return False

        for _ in range(self._polls):
            if is_complete():
                break
        else:
            self._wait(is_complete, tag)
        zero = _zero_of(epoch)
        return [min(row_words[column::WIDTH]) - zero for column in range(WIDTH)]

    def _index(self, epoch: int, row: int) -> int:
        """Return the index of the first word of a row in the bank of ``epoch``."""
        return (epoch % 2 * (self._size + 1) + row) * WIDTH

    def _posted(self, row: int) -> int:
        """Return the epoch of the last complete row of a rank; 0 before its first vote."""
        epochs = []
        for bank in range(2):
            start = self._index(bank, row)
            in_row = {w >> _VALUE_BITS for w in self._words[start : start + WIDTH].tolist()}
            epochs.append(in_row.pop() if len(in_row) == 1 else 0)
        even, odd = epochs
        return even if odd == 0 or even == odd % EPOCHS + 1 else odd

    def _post(self, row: int, epoch: int, values: list[int]) -> None:
        """Write a row in one copy, which an interrupt cannot split."""
        zero, start = _zero_of(epoch), self._index(epoch, row)
        row_words = [zero + value for value in values] + [zero] * (WIDTH - len(values))
        self._words[start : start + WIDTH] = memoryview(array.array("Q", row_words))

    def _require_alive(self, epoch: int) -> None:
        for rank in range(self._size):
            owes_result = rank == 0 and self._several_hosts
            if rank == self._rank or (self._posted(rank) == epoch and not owes_result):
                continue
            try:
                fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, rank)
            except OSError as error:
                if error.errno not in (errno.EACCES, errno.EAGAIN):
                    raise
            else:
                fcntl.lockf(self._file, fcntl.LOCK_UN, 1, rank)
                raise ProcessLookupError(f"the process of rank {self._names[rank]} has exited")


def _zero_of(epoch: int) -> int:
    """Return the word that contains the value 0 in the vote ``epoch``."""
    return epoch << _VALUE_BITS | _ZERO
