"""The recordings of a pool: which go when the budget is full, and what each takes."""

from __future__ import annotations

from typing import Any

from devgraph.api.pool import Recordings


class _Owner:
    key: object = None


class _Item:
    def __init__(self, size: int) -> None:
        self.bytes = size
        self.closed = False

    def close(self) -> None:
        self.closed = True


class _Thick(_Item):
    def shrink(self) -> None:
        self.bytes = 1


def test_recordings_shrink_before_they_go() -> None:
    owner: Any = _Owner()
    kept = Recordings(10)
    thick = [_Thick(5) for _ in range(3)]
    for key, item in enumerate(thick):
        kept.put(owner, key, item)
    assert [item.bytes for item in thick] == [1, 1, 5]
    assert kept.bytes == 7
    assert kept.evictions == 0
    last = _Item(9)
    kept.put(owner, 3, last)
    assert kept.bytes <= 10
    assert not last.closed
    assert [item.closed for item in thick].count(True) == kept.evictions > 0


def test_recordings_keep_what_the_next_launch_uses_and_the_newest() -> None:
    owner: Any = _Owner()
    kept = Recordings(1)
    used, other, newest = _Item(4), _Item(4), _Item(4)
    owner.key = "used"
    kept.put(owner, "used", used)
    kept.put(owner, "other", other)
    kept.put(owner, "newest", newest)
    assert (used.closed, other.closed, newest.closed) == (False, True, False)


def test_recordings_of_a_dropped_owner_can_go() -> None:
    owner: Any = _Owner()
    owner.key = 0
    kept = Recordings(1)
    first = _Item(4)
    kept.put(owner, 0, first)
    del owner
    other: Any = _Owner()
    kept.put(other, 1, _Item(4))
    assert first.closed


def test_recharge_counts_what_a_recording_takes_now() -> None:
    owner: Any = _Owner()
    kept = Recordings(10)
    grown, old = _Thick(1), _Thick(8)
    kept.put(owner, "old", old)
    kept.put(owner, "grown", grown)
    assert kept.get(owner, "grown") is grown
    grown.bytes = 9
    kept.recharge(grown)
    assert (old.bytes, grown.bytes) == (1, 9)
    assert kept.bytes == 10
    assert kept.room == 0
