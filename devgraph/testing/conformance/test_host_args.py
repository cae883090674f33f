"""Host arguments: tracked while captured, complete and checked at every replay."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

import devgraph as dg
from devgraph.testing.conformance.support import POLICIES, Kit, same


@dg.region(host_args=("length",))
def prefix_sum(x: torch.Tensor, *, length: int) -> torch.Tensor:
    """Sum of the first ``length`` columns: another kernel argument for each length."""
    return x[:, :length].sum(1)


def step(x: torch.Tensor, *, length: int) -> torch.Tensor:
    """One region between two pieces of captured work."""
    return prefix_sum(x * 2, length=length) + 1


def usable_lengths(kit: Kit, policy: str) -> list[int]:
    """The lengths that a replay may use: without update, a graph knows only that of capture."""
    if policy == "full" and not kit.backend.capabilities.region_update:
        return [3]
    return [3, 5, 1, 8, 5, 3]


@pytest.mark.parametrize("policy", POLICIES)
def test_replay_equals_eager_for_every_host_argument(kit: Kit, policy: str) -> None:
    x = kit.tensor(4, 8)
    captured = kit.capture(step, x, policy=policy, host_args={"length": 3})
    for seed, length in enumerate(usable_lengths(kit, policy)):
        kit.check(captured, step, x, seed=seed, length=length)


@pytest.mark.parametrize("policy", POLICIES)
def test_host_argument_may_arrive_in_the_variable_keywords_of_a_region(
    kit: Kit, policy: str
) -> None:
    @dg.region(host_args=("length",))
    def head(x: torch.Tensor, **options: Any) -> torch.Tensor:
        return x[:, : options["length"]].sum(1) * float(options["scale"])

    def scaled(x: torch.Tensor, *, length: int) -> torch.Tensor:
        return head(x * 2, scale=0.5, length=length) + 1

    x = kit.tensor(4, 8)
    captured = kit.capture(scaled, x, policy=policy, host_args={"length": 3})
    for seed, length in enumerate(usable_lengths(kit, policy)):
        kit.check(captured, scaled, x, seed=seed, length=length)


def test_changed_host_argument_is_applied_or_refused_but_never_ignored(kit: Kit) -> None:
    x = kit.tensor(4, 8)
    captured = kit.capture(step, x, host_args={"length": 3})
    if kit.backend.capabilities.region_update:
        kit.check(captured, step, x, length=6)
    else:
        with pytest.raises(dg.UpdateUnsupportedError, match="breakable"):
            captured.replay(length=6)
    kit.check(captured, step, x, length=3)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "missing": ({}, "missing.*length"),
    "unknown": ({"length": 3, "lenght": 3}, "'lenght'.*Did you mean 'length'"),
    **{
        repr(value): ({"length": value}, "'length' was a int at capture")
        for value in (2.5, "3", None, [3], True)
    },
}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", WRONG)
def test_wrong_host_arguments_are_refused_and_nothing_is_sticky(
    kit: Kit, policy: str, name: str
) -> None:
    """FAULTS 19."""
    x = kit.tensor(4, 8)
    captured = kit.capture(step, x, policy=policy, host_args={"length": 3})
    captured.replay(length=3)
    given, text = WRONG[name]
    with pytest.raises(dg.HostArgumentError, match=text) as caught:
        captured.replay(**given)
    assert isinstance(caught.value, TypeError)
    kit.check(captured, step, x, length=3)


@pytest.mark.parametrize("policy", POLICIES)
def test_default_in_the_signature_makes_a_host_argument_optional(kit: Kit, policy: str) -> None:
    def with_default(x: torch.Tensor, *, length: int = 3) -> torch.Tensor:
        return prefix_sum(x * 2, length=length)

    x = kit.tensor(4, 8)
    captured = kit.capture(with_default, x, policy=policy, host_args={"length": 3})
    kit.check(captured, with_default, x)


@pytest.mark.parametrize("policy", POLICIES)
def test_list_that_is_not_reduced_cannot_be_a_key_of_a_graph(kit: Kit, policy: str) -> None:
    """FAULTS 19."""

    @dg.region(host_args=("lengths",))
    def body(x: torch.Tensor, *, lengths: list[int]) -> torch.Tensor:
        return x[:, : max(lengths)].sum(1)

    def listed(x: torch.Tensor, *, lengths: list[int]) -> torch.Tensor:
        return body(x * 2, lengths=lengths)

    x = kit.tensor(4, 8)
    if policy == "full":
        with pytest.raises(dg.HostArgumentError, match=r"lengths.*list.*reduce"):
            kit.capture(listed, x, policy=policy, host_args={"lengths": [3, 1]})
    else:
        captured = kit.capture(listed, x, policy=policy, host_args={"lengths": [3, 1]})
        kit.check(captured, listed, x, lengths=[5, 2])


# Tracked values.


@dg.region(host_args=("kv_len",))
def windowed(x: torch.Tensor, *, kv_len: int) -> torch.Tensor:
    """Reads the last ``kv_len`` columns."""
    return x[:, -kv_len:].sum(1)


@dg.region(host_args=("kv_len",), derive={"window": lambda kv_len: min(kv_len, 4096)})
def windowed_by_rule(x: torch.Tensor, *, kv_len: int, window: int = 0) -> torch.Tensor:
    """Reads the last ``window`` columns, which devgraph works out from ``kv_len``."""
    return x[:, :kv_len][:, -window:].sum(1)


def _clamped(x: torch.Tensor, *, kv_len: int) -> torch.Tensor:
    return windowed(x * 2, kv_len=min(kv_len, 4096))


def _by_rule(x: torch.Tensor, *, kv_len: int) -> torch.Tensor:
    return windowed_by_rule(x * 2, kv_len=kv_len)


@pytest.mark.parametrize("policy", POLICIES)
def test_clamping_a_host_argument_outside_a_region_is_refused(kit: Kit, policy: str) -> None:
    x = kit.tensor(2, 6000)
    with pytest.raises(dg.FrozenValueError, match="kv_len") as caught:
        kit.capture(_clamped, x, policy=policy, host_args={"kv_len": 512})
    assert "min(kv_len, 4096)" in str(caught.value)
    assert __file__ in str(caught.value)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize("policy", POLICIES)
def test_window_derived_from_a_host_argument_follows_every_replay(kit: Kit, policy: str) -> None:
    x = kit.tensor(2, 6000)
    captured = kit.capture(_by_rule, x, policy=policy, host_args={"kv_len": 512})
    updates = policy != "full" or kit.backend.capabilities.region_update
    for kv_len in (5000, 512, 4097, 5999) if updates else (512,):
        want = (x * 2)[:, :kv_len][:, -min(kv_len, 4096) :].sum(1)
        kit.same(captured.replay(kv_len=kv_len), want, f"the replay with kv_len={kv_len}")


def test_raw_capture_takes_the_declared_value_and_refuses_another(kit: Kit) -> None:
    x = kit.tensor(4, 8)
    graph, y = kit.record(lambda: prefix_sum(x * 2, length=3), host_args={"length": 3})
    graph.replay()
    kit.same(y, prefix_sum(x * 2, length=3))
    with pytest.raises(dg.FrozenValueError, match="length"):
        kit.record(lambda: prefix_sum(x * 2, length=4), host_args={"length": 3})


def test_raw_capture_hands_out_tracked_host_arguments(kit: Kit) -> None:
    x = kit.tensor(4, 8)
    prefix_sum(x, length=3)
    graph = kit.backend.make_graph()
    with kit.backend.capture_context(graph, host_args={"length": 3}) as host:
        assert isinstance(host["length"], int)
        y = prefix_sum(x * 2, length=host["length"])
    graph.replay()
    kit.same(y, prefix_sum(x * 2, length=3))


# Derived, reduced and ambient values.


def _bucketed(lengths: list[int]) -> int:
    return -(-max(lengths) // 4) * 4


@dg.region(host_args=("lengths",), reduce={"lengths": _bucketed})
def reduced_prefix(x: torch.Tensor, *, lengths: Any) -> torch.Tensor:
    """Receives the reduced value only."""
    assert isinstance(lengths, int)
    return x[:, :lengths].sum(1)


@pytest.mark.parametrize("policy", POLICIES)
def test_region_receives_the_reduced_value(kit: Kit, policy: str) -> None:
    def reduced(x: torch.Tensor, *, lengths: list[int]) -> torch.Tensor:
        return reduced_prefix(x * 2, lengths=lengths)

    x = kit.tensor(4, 12)
    captured = kit.capture(reduced, x, policy=policy, host_args={"lengths": [3, 1]})
    updates = policy != "full" or kit.backend.capabilities.region_update
    for lengths in ([4, 4], [2], [3, 3, 3], *([[5, 9], [12], [1]] if updates else [])):
        kit.check(captured, reduced, x, lengths=lengths)


@pytest.mark.parametrize("policy", POLICIES)
def test_rules_run_once_per_mark_and_replay(kit: Kit, policy: str) -> None:
    calls: list[str] = []

    def counted_max(lengths: list[int]) -> int:
        calls.append("reduce")
        return max(lengths)

    def counted_half(lengths: list[int]) -> int:
        calls.append("derive")
        return max(lengths) // 2

    @dg.region(
        host_args=("lengths",), reduce={"lengths": counted_max}, derive={"half": counted_half}
    )
    def body(x: torch.Tensor, *, lengths: Any, half: int = 0) -> torch.Tensor:
        return x + x[:, :lengths].sum() + half

    def deep(x: torch.Tensor, *, lengths: list[int]) -> torch.Tensor:
        for _ in range(4):
            x = body(x * 0.5, lengths=lengths)
        return x

    x = kit.tensor(4, 8)
    captured = kit.capture(deep, x, policy=policy, host_args={"lengths": [3]})
    calls.clear()
    captured.replay(lengths=[3])
    assert sorted(calls) == ["derive", "reduce"]


@pytest.mark.parametrize("policy", POLICIES)
def test_ambient_context_is_read_once_per_replay_on_the_replaying_thread(
    kit: Kit, policy: str
) -> None:
    ambient = threading.local()
    reads = []

    def snapshot() -> int:
        reads.append(threading.get_ident())
        return int(ambient.length)

    @dg.region(context=snapshot)
    def body(x: torch.Tensor, *, context: int = 0) -> torch.Tensor:
        return x[:, :context].sum(1)

    def ambiently(x: torch.Tensor) -> Any:
        h = x * 2
        return body(h), body(h + 1)

    x = kit.tensor(4, 8)
    ambient.length = 3
    captured = kit.capture(ambiently, x, policy=policy)
    updates = policy != "full" or kit.backend.capabilities.region_update
    for length in (3, 5, 8, 3) if updates else (3,):
        ambient.length = length
        reads.clear()
        out = captured.replay()
        assert reads == [threading.get_ident()]
        kit.backend.synchronize()
        h = x * 2
        same(out, (h[:, :length].sum(1), (h + 1)[:, :length].sum(1)))


def test_rules_hold_outside_a_capture_too(kit: Kit) -> None:
    x = kit.tensor(2, 12)
    same(reduced_prefix(x, lengths=[3, 1]), x[:, :4].sum(1))
    same(windowed_by_rule(x, kv_len=5), x[:, :5].sum(1))


@pytest.mark.parametrize("policy", POLICIES)
def test_host_argument_may_be_positional_and_between_tensors(kit: Kit, policy: str) -> None:
    @dg.region(host_args=("length",))
    def body(x: torch.Tensor, length: int, y: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return x[:, :length].sum(1) + y[:, 0] * scale

    def positional(x: torch.Tensor, y: torch.Tensor, *, length: int) -> torch.Tensor:
        return body(x * 2, length, y + 1, 0.5)

    x, y = kit.tensor(4, 8), kit.tensor(4, 8, seed=1)
    captured = kit.capture(positional, x, y, policy=policy, host_args={"length": 3})
    for length in usable_lengths(kit, policy):
        kit.check(captured, positional, x, y, length=length)
