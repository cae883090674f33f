"""Agreement between ranks, which capture the same graphs in lockstep and replay them together.

In an *exchange*, each rank posts its value under a tag and waits for the values of the others, with
a timeout. Exchanges use a ``torch.distributed`` store, a gloo group or shared memory. If a rank is
late or has exited, an exchange raises an error that names the rank; a device collective would hang.
"""

from __future__ import annotations

import collections
import contextlib
import datetime
import functools
import itertools
import json
import logging
import math
import os
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import torch
import torch.distributed as dist

from devgraph.api.errors import (
    AgreementError,
    ConfigError,
    ConfigTypeError,
    DeviceGraphError,
    GateTimeoutError,
    StateError,
    brief,
    counted,
    whole,
)
from devgraph.runners.decisions import Decision, GraphKey, Reason, Variant

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store
    from torch.distributed import ProcessGroup

    from devgraph.runners.votes import Finish

logger = logging.getLogger(__name__)

_LOOK_S = 0.1  # seconds between checks for failures of other ranks while waiting

_ROLL_CALL_S = 2.0
"""Timeout in seconds of a roll call, in which all waiting ranks answer. Waiting ranks check for a
roll call every ``_LOOK_S``."""

_NEUTRAL = 2**31  # the vote of a rank without a preference

_SPIN_S = 0.002  # seconds of polling without pauses: about one decode step of a small model


class PeerFailed(AgreementError):
    """Another rank aborted an exchange."""


class RankGroup:
    """The ranks that capture and replay together.

    Args:
        store: any ``torch.distributed`` store that all ranks share (``TCPStore``, ``FileStore``,
            ``PrefixStore``, ``HashStore`` between threads); None for a single rank.
        rank: this rank, from 0.
        size: number of ranks.
        timeout_s: maximum time that a rank waits for the others in one exchange. It must exceed
            the time of the slowest capture.
        vote: the engine's own function for votes, called for each step instead of the store. It
            receives a list of ints and returns their element-wise minimum over all ranks.
    """

    def __init__(
        self,
        store: Store | None,
        rank: int,
        *,
        size: int,
        timeout_s: float = 120.0,
        vote: Callable[[list[int]], list[int]] | None = None,
    ) -> None:
        rank, size = whole("rank", rank, 0, ConfigError), whole("size", size, 1, ConfigError)
        if rank >= size:
            raise ConfigError(f"rank {rank} is not in a group of {counted(size, 'rank')}")
        if store is None and size > 1:
            raise ConfigError(f"a group of {counted(size, 'rank')} needs a store that they share")
        if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float):
            raise ConfigTypeError(f"timeout_s must be seconds, got {brief(timeout_s)}")
        if not timeout_s > 0:  # also true for nan
            raise ConfigError(f"timeout_s must be greater than 0, got {timeout_s}")
        if vote is not None and not callable(vote):
            raise ConfigTypeError(f"vote must be a function, got {brief(vote)}")
        self.rank = rank
        self.size = size
        self.timeout_s = timeout_s
        self._store: Any = store
        self._vote: Callable[[str, list[int]], list[int]] = self._store_vote
        if vote is not None:
            self._vote = lambda tag, values: vote(values)
        self._round: collections.Counter[str] = collections.Counter()

    @classmethod
    def from_process_group(
        cls,
        group: ProcessGroup | None = None,
        *,
        timeout_s: float = 120.0,
        shared: bool | Literal["auto"] = "auto",
    ) -> RankGroup:
        """Create a group from a gloo process group.

        The ranks of a host vote through shared memory, and one rank per host votes with the other
        hosts over gloo. All other exchanges use the store of the process group. Every rank of the
        group must call this method.

        Args:
            group: the process group; None means the default group.
            timeout_s: maximum time that a rank waits for the others in one exchange.
            shared: whether to vote through shared memory. "auto" votes over the process group if a
                host has no shared memory or if no host has several ranks. All ranks must pass the
                same value.

        Raises:
            ConfigError: the group has no gloo backend, or ``shared=True`` is impossible.
        """
        from torch._C._distributed_c10d import PrefixStore

        if shared not in (True, False, "auto"):
            raise ConfigError(f"shared must be True, False or 'auto', got {brief(shared)}")
        kind = str(dist.get_backend(group))
        if "gloo" not in kind:
            raise ConfigError(
                f"ranks agree through gloo, but this process group uses {kind!r}; pass a group "
                f"from torch.distributed.new_group(backend='gloo')"
            )
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        store = store_of(group)
        # A serial number separates the exchanges of several RankGroups on one process group.
        serial: list[Any] = [store.add("devgraph/groups", 1) if rank == 0 else None]
        first = 0 if group is None else dist.get_global_rank(group, 0)
        dist.broadcast_object_list(serial, src=first, group=group)
        prefixed = PrefixStore(f"devgraph/{serial[0]}", store)
        ranks = cls(prefixed, rank, size=size, timeout_s=timeout_s)
        # An all-reduce on the host is faster than the store.
        ranks._vote = lambda tag, values: _begin_gloo_vote(ranks, group, values)(tag)
        if shared:
            ranks._share_votes(group, required=shared is True)
        return ranks

    def _share_votes(self, group: ProcessGroup | None, *, required: bool) -> None:
        """Switch votes to shared memory if every host has shared memory."""
        hosts = self.gather("host", _host_id())
        members = [rank for rank in range(self.size) if hosts[rank] == hosts[self.rank]]
        leaders = sorted(hosts.index(host) for host in set(hosts))
        problem = "no host has several ranks" if len(leaders) == self.size else ""
        if "" in hosts:
            problem = f"the host of rank {hosts.index('')} has no shared memory"
        if not problem:
            problem = self._open_page(members, leaders, group)
        if problem and required:
            raise ConfigError(
                f"ranks cannot vote through shared memory: {problem}. Pass shared='auto' to vote "
                f"over the process group instead."
            )
        if problem and len(leaders) < self.size and self.rank == 0:
            logger.warning("ranks vote over the process group: %s", problem)

    def _open_page(self, members: list[int], leaders: list[int], group: ProcessGroup | None) -> str:
        """Open this host's page of shared memory; return the first problem on any rank, or ""."""
        from devgraph.runners import votes  # needs a POSIX system

        path = problem = ""
        if self.rank in leaders:
            try:
                path = votes.create_page(len(members))
            except OSError as error:
                problem = f"rank {self.rank} cannot create a page of shared memory ({error})"
        shared_votes = None
        try:
            page = self.gather("page", path)[members[0]]
            if page:
                try:
                    shared_votes = votes.SharedVotes(
                        page,
                        members.index(self.rank),
                        len(members),
                        wait=self.wait,
                        names=members,
                        several_hosts=len(leaders) > 1,
                        begin_between_hosts=self._votes_of(leaders, group),
                    )
                except OSError as error:
                    problem = f"rank {self.rank} cannot open the page of its host ({error})"
            problem = next(filter(None, self.gather("page problem", problem)), "")
        finally:
            if path:
                os.unlink(path)  # The memory is freed when the last rank closes the file.
        if shared_votes is not None and not problem:
            self._vote = shared_votes
        return problem

    def _votes_of(
        self, leaders: list[int], group: ProcessGroup | None
    ) -> Callable[[list[int]], Finish] | None:
        """Return a callable that begins a vote of ``leaders``; None on all other ranks."""
        if len(leaders) == 1 or self.rank not in leaders:
            return None
        world = [rank if group is None else dist.get_global_rank(group, rank) for rank in leaders]
        between = dist.new_group(world, backend="gloo", use_local_synchronization=True)
        return functools.partial(_begin_gloo_vote, self, between)

    def handshake(self, name: str, facts: Mapping[str, Any]) -> None:
        """Check that all ranks have the same facts.

        Raises:
            AgreementError: a rank has different facts, refused to take part, or did not arrive in
                time. The message names the rank and both values.
        """
        own = json.dumps(dict(facts), sort_keys=True, default=str)
        texts = self.gather(f"{name}/facts", own)
        if len(set(texts)) == 1:
            return
        everyone = [json.loads(text) for text in texts]
        for rank, answer in enumerate(everyone):
            if isinstance(answer, str):
                raise AgreementError(f"rank {rank} of {name} {answer}")
        raise AgreementError(
            f"the ranks of {name} do not agree: {'; '.join(_differences(everyone))}. "
            f"All ranks need the same configuration, and call invalidate() and capture() together."
        )

    def refuse(self, name: str, error: Exception) -> None:
        """Inform the ranks in the handshake ``name`` that this rank does not take part."""
        self.post(f"{name}/facts", json.dumps(f"raised {type(error).__name__}: {error}"))

    def gather(
        self,
        tag: str,
        value: str,
        *,
        escape: str | None = None,
        timeout_s: float | None = None,
        forget: bool = False,
    ) -> list[str]:
        """Return the values of all ranks for ``tag``, in rank order.

        Args:
            tag: the name of the exchange. The n-th use of a tag on one rank matches the n-th use on
                the other ranks.
            value: the value of this rank.
            escape: the tag to which a rank posts if it aborts the exchange.
            timeout_s: the timeout, if it differs from the timeout of the group.
            forget: whether to delete the values of earlier uses, for a tag that is reused without
                limit.

        Raises:
            PeerFailed: a missing rank posted to ``escape``. The message contains its text.
            AgreementError: ranks did not arrive within the timeout. The message names them.
        """
        if self.size == 1:
            return [value]
        key = self._post(tag, value)
        waiting = [rank for rank in range(self.size) if rank != self.rank]
        limit = self.timeout_s if timeout_s is None else timeout_s
        with self._reachable(tag):
            for waited, look in _polling():
                waiting = [rank for rank in waiting if not self._has(f"{key}/{rank}")]
                if not waiting:
                    break
                if look:
                    self._look_for_failures(escape, waiting)
                if waited > limit:
                    raise AgreementError(
                        f"rank {self.rank} waited {limit:g} s at {tag!r} for "
                        f"{_listed(waiting)}, which did not arrive: dead, stuck or late. Check "
                        f"the log there; raise timeout_s if the rank was only slow."
                    )
            if forget:
                self._discard(tag)
            return [
                value if rank == self.rank else self._store.get(f"{key}/{rank}").decode()
                for rank in range(self.size)
            ]

    def post(self, tag: str, value: str) -> None:
        """Publish a value for ``tag`` without waiting for the others."""
        if self.size > 1:
            with contextlib.suppress(Exception):
                self._post(tag, value)

    @contextlib.contextmanager
    def reporting(self, tag: str) -> Iterator[None]:
        """Post an error of the block to ``tag``, as ``raised TYPE: TEXT``."""
        try:
            yield
        except BaseException as error:
            self.post(tag, f"raised {type(error).__name__}: {error}")
            raise

    def minimum(self, tag: str, values: Sequence[int]) -> list[int]:
        """Return the element-wise minimum over all ranks.

        Raises:
            AgreementError: a rank did not vote, or voted on another tag. The message names ranks
                that have exited or are stuck.
        """
        if self.size == 1:
            return list(values)
        code = zlib.crc32(tag.encode())
        try:
            low, high, *minima = self._vote(tag, [code, -code, *values])
        except AgreementError:
            raise
        except Exception as error:
            self._roll_call(tag, f"the vote {tag!r} failed on rank {self.rank} ({error})", error)
        if low != -high:
            raise AgreementError(
                f"rank {self.rank} votes on {tag!r}, but another rank votes on a different tag. "
                f"All ranks must call agree and idle in the same order."
            )
        return minima

    def agree(
        self,
        decision: Decision | None,
        variants: Sequence[Variant],
        name: str,
        *,
        unable: Reason | None = None,
        dummy: bool = False,
        invalid: DeviceGraphError | None = None,
        changed: StateError | None = None,
    ) -> Decision:
        """Return the common decision of all ranks for this step, from a single vote.

        Args:
            decision: the decision of this rank; None if it has no requests.
            variants: the variants of the runner, in the same order on every rank.
            name: the name of the runner.
            unable: the reason why this rank cannot launch a graph for requests of other ranks.
            dummy: whether to run a step even if no rank has requests.
            invalid: the error of this rank because of which no rank can run a step.
            changed: the error of this rank because of which no rank can run a graph.

        Raises:
            GateTimeoutError: an earlier step is invalid on a rank.
            StateError: the state of the step has changed on a rank.
            AgreementError: ranks request different variants, or a rank did not vote.
        """
        if self.size == 1:
            return Decision(Reason.EMPTY_BATCH) if decision is None else decision
        bucket, variant = 0, None
        is_idle = decision is None or decision.reason is Reason.EMPTY_BATCH
        busy = None if is_idle else decision
        if busy is None:
            # Not 0, so that ranks without requests run no step if all ranks have none.
            able = 1 if unable else 3
        else:
            able, unable = 3 if busy.ok else 0, None
            if busy.key is not None:
                bucket, variant = busy.key.bucket, variants.index(busy.key.variant)
        low, high = (_NEUTRAL, _NEUTRAL) if variant is None else (variant, -variant)
        if invalid is not None:
            able = -2 if isinstance(invalid, StateError) else -1
        elif changed is not None:
            able = min(able, 2)  # Lower votes run the step eagerly, which needs no captured state.
        able, bucket, low, high = self.minimum(f"{name}/vote", (able, -bucket, low, high))
        if able == -1:
            raise invalid or GateTimeoutError(
                f"a gate of {name} was not opened on another rank, so the last step is invalid on "
                f"all ranks. The error on that rank names the gate."
            )
        key = None if low == _NEUTRAL else GraphKey(variants[low], -bucket)
        if able > 0 and key is None and (able > 1 or not dummy):
            return Decision(Reason.EMPTY_BATCH)
        if able in (-2, 2):
            raise (changed if invalid is None else invalid) or StateError(
                f"the state of {name} has changed on another rank since its captures, so no rank "
                f"runs this step. The error on that rank names the state."
            )
        if able < 2:
            if busy is None:
                return Decision(unable or Reason.VOTED_EAGER, key)
            return Decision(Reason.VOTED_EAGER, busy.key) if busy.ok else busy
        assert key is not None
        if low != -high:
            raise AgreementError(
                f"the ranks of {name} request different variants in one step: "
                f"{dict(variants[low])} and {dict(variants[-high])}; pass the same variant on all "
                f"ranks"
            )
        return Decision(Reason.GRAPH, key)

    def elect(self, wanted: int | None, name: str, *, ready: bool, state: str) -> int | None:
        """Return the number of the graph that all ranks capture now, from a single vote.

        Args:
            wanted: the number of the graph that this rank proposes to capture, or None.
            name: the name of the runner.
            ready: whether this rank has time for a capture.
            state: a text that identifies the numbering, which must be equal on all ranks.

        Returns:
            The lowest proposed number; None if no rank proposes a graph or a rank is not ready.

        Raises:
            AgreementError: ranks differ in ``state``, or a rank did not vote.
        """
        code, ballot = zlib.crc32(state.encode()), _NEUTRAL if wanted is None else wanted
        # The vote is as long as in ``agree``, so that a rank that calls ``agree`` by mistake
        # receives an error about the tag.
        able, number, low, high = self.minimum(f"{name}/idle", (int(ready), ballot, code, -code))
        if low != -high:
            raise AgreementError(
                f"the ranks of {name} have different buckets left to capture; call capture and "
                f"invalidate at the same point on all ranks"
            )
        return None if not able or number == _NEUTRAL else number

    def wait(self, done: Callable[[], bool], what: str, *, escape: str | None = None) -> None:
        """Wait for work that depends on other ranks, until ``done()`` returns true.

        A collective in a graph has no timeout: if a rank has exited, the device waits forever. Call
        ``group.wait(backend.fence(), "step")`` after the replay and before any call that blocks on
        the device.

        Args:
            done: a function that is polled; it may block briefly.
            what: a name for the work, the same on every rank.
            escape: the tag to which a rank posts if it aborts the work.

        Raises:
            PeerFailed: a rank posted to ``escape``.
            AgreementError: the work did not finish within the timeout, or another rank gave up.
                The message names the ranks that do not answer. The device still waits, so abort
                the communicator.
        """
        everyone = [rank for rank in range(self.size) if rank != self.rank]
        for waited, look in _polling():
            if done():
                return
            why = f"rank {self.rank} waited {waited:.3g} s for {what!r}"
            if look:
                with self._reachable(what):
                    self._look_for_failures(escape, everyone)
                    if self._posted(f"{what}/roll call", everyone):
                        self._roll_call(what, f"{why}, and another rank gave up")
            if waited > self.timeout_s:
                self._roll_call(what, why)

    def _roll_call(self, what: str, why: str, cause: BaseException | None = None) -> NoReturn:
        """Raise an AgreementError that names the ranks that do not answer."""
        try:
            self.gather(f"{what}/roll call", "", timeout_s=min(self.timeout_s, _ROLL_CALL_S))
        except AgreementError as error:
            raise AgreementError(f"{why}. {error}") from cause
        if isinstance(cause, ProcessLookupError):  # A rank exited after it had answered.
            raise AgreementError(f"{why}. Restart all ranks.") from cause
        raise AgreementError(
            f"{why}, although every rank answers, so a device or a connection is stuck. Abort the "
            f"communicator and restart the ranks."
        ) from cause

    def _store_vote(self, tag: str, values: list[int]) -> list[int]:
        texts = self.gather(tag, json.dumps(values), forget=True)
        return [min(column) for column in zip(*map(json.loads, texts), strict=True)]

    def _post(self, tag: str, value: str) -> str:
        self._round[tag] += 1
        key = f"devgraph/{tag}/{self._round[tag]}"
        with self._reachable(tag):
            self._store.set(f"{key}/{self.rank}", value)
        return key

    def _has(self, name: str) -> bool:
        return bool(self._store.check([name]))

    def _posted(self, tag: str, ranks: Sequence[int]) -> dict[int, str]:
        """Return the keys, by rank, of posts to ``tag`` in the round that this rank enters next."""
        key = f"devgraph/{tag}/{self._round[tag] + 1}"
        return {rank: f"{key}/{rank}" for rank in ranks if self._has(f"{key}/{rank}")}

    def _look_for_failures(self, escape: str | None, waiting: list[int]) -> None:
        if escape is not None:
            for rank, key in self._posted(escape, waiting).items():
                raise PeerFailed(f"rank {rank}: {self._store.get(key).decode()}")

    def _discard(self, tag: str) -> None:
        # A rank that completed round n knows that all ranks have left round n - 1.
        done = self._round[tag] - 1
        if done > 0:
            with contextlib.suppress(Exception):
                self._store.delete_key(f"devgraph/{tag}/{done}/{self.rank}")

    @contextlib.contextmanager
    def _reachable(self, tag: str) -> Iterator[None]:
        try:
            yield
        except AgreementError:
            raise
        except Exception as error:
            raise AgreementError(
                f"rank {self.rank} lost the store at {tag!r}, because the process that hosts the "
                f"store, usually rank 0, has exited ({error}). Restart all ranks."
            ) from error


def _begin_gloo_vote(ranks: RankGroup, group: ProcessGroup | None, values: list[int]) -> Finish:
    tensor = torch.tensor(values, dtype=torch.int64, device="cpu")
    work = dist.all_reduce(tensor, op=dist.ReduceOp.MIN, group=group, async_op=True)
    assert work is not None
    moment = datetime.timedelta(seconds=_LOOK_S)

    def done() -> bool:
        try:
            work.wait(moment)
        except RuntimeError:
            if work.is_completed():
                raise
            return False
        return True

    def finish(tag: str) -> list[int]:
        ranks.wait(done, tag)
        return [int(value) for value in tensor.tolist()]

    return finish


def _host_id() -> str:
    """Return an identifier of the host's shared memory, or "" if there is none."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.stat('/dev/shm').st_dev}"
    except OSError:
        return ""


def store_of(group: ProcessGroup | None) -> Any:
    """Return the store of a process group; None means the default group."""
    process_group = dist.group.WORLD if group is None else group
    assert process_group is not None
    if hasattr(process_group, "get_group_store"):
        return process_group.get_group_store()
    return dist.distributed_c10d._get_process_group_store(process_group)


def _polling() -> Iterator[tuple[float, bool]]:
    """Yield the seconds waited and whether to check for failures; pause for at most 10 ms."""
    started, look = time.monotonic(), _LOOK_S
    pauses = itertools.chain.from_iterable([pause] * 20 for pause in (2e-5, 1e-4, 5e-4, 2e-3))
    while True:
        waited = time.monotonic() - started
        yield waited, waited > look
        if waited > look:
            look = waited + _LOOK_S
        time.sleep(next(pauses, 1e-2) if waited > _SPIN_S else 0.0)


def ranks_of(group: Any) -> RankGroup:
    """Convert the ``group`` of a runner (None, a RankGroup or a process group) to a RankGroup."""
    if group is None:
        return RankGroup(None, 0, size=1, timeout_s=math.inf)
    if isinstance(group, RankGroup):
        return group
    if not hasattr(group, "rank") or not hasattr(group, "size"):
        raise ConfigTypeError(
            f"group must be None, a devgraph.runners.RankGroup or a process group of "
            f"torch.distributed, got {brief(group)}"
        )
    return RankGroup.from_process_group(group)


def _listed(ranks: Sequence[int]) -> str:
    listed = ", ".join(map(str, ranks))
    return f"rank {listed}" if len(ranks) == 1 else f"ranks {listed}"


def _differences(everyone: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a text for each fact that differs, with the minority's ranks and both values."""
    differences = []
    names = sorted({name for facts in everyone for name in facts})
    for name in names:
        values = [json.dumps(facts.get(name)) for facts in everyone]
        usual, _ = collections.Counter(values).most_common(1)[0]
        for value in sorted(set(values) - {usual}):
            odd = [rank for rank, have in enumerate(values) if have == value]
            verb = "has" if len(odd) == 1 else "have"
            differences.append(f"{_listed(odd)} {verb} {name}={value}, others {usual}")
    return differences
