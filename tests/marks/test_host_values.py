"""Tracked values: consumed, copied, compared, and which of them are keys of their own."""

from __future__ import annotations

import copy
import enum
import pickle
from collections.abc import Callable
from typing import Any, NamedTuple

import attrs
import pytest
import torch

import devgraph as dg
from devgraph.testing.conformance.support import POLICIES, Kit, same
from devgraph.testing.conformance.test_marks import (
    LENGTHS,
    prefix_sum,
    step,
)

WIDTH = 8


class Mode(enum.Enum):
    CAUSAL = 1


@pytest.mark.parametrize("value", [None, Mode.CAUSAL], ids=["none", "enum"])
def test_host_argument_that_code_compares_with_is_is_refused(value: Any):
    with pytest.raises(dg.HostArgumentError, match="'is', which cannot be detected"):
        dg.capture(lambda x, *, n: x * 2, torch.ones(2), backend="cpu", host_args={"n": value})


def test_tensor_as_host_argument_is_refused_with_the_conversion():
    with pytest.raises(dg.HostArgumentError, match=r"host argument 'n' is <Tensor .*n\.item\(\)"):
        given = {"n": torch.tensor(2)}
        dg.capture(lambda x, *, n: x * 2, torch.ones(2), backend="cpu", host_args=given)


def test_default_that_code_compares_with_is_must_be_passed_to_each_replay():
    @dg.region(host_args=("n",))
    def scaled(x, *, n):
        return x * n

    def step(x, *, n=None):
        return scaled(x, n=7 if n is None else n)

    x = torch.ones(2)
    with dg.capture(step, x, backend="cpu", host_args={"n": 2}) as captured:
        with pytest.raises(dg.HostArgumentError, match="missing host arguments: n"):
            captured.replay()
        with pytest.raises(dg.HostArgumentError, match="unknown host argument 'm'. Known: n"):
            captured.prove(host_args=[{"m": 2}])
        assert torch.equal(captured.replay(n=3), step(x, n=3))


@pytest.mark.parametrize("policy", POLICIES)
def test_host_argument_behind_a_tuple_is_named_where_torch_takes_it(policy: str):
    def step(x, *, kv_len):
        return x + torch.full((WIDTH,), kv_len)

    with pytest.raises(dg.FrozenValueError, match="host argument 'kv_len' was consumed by torch's"):
        dg.capture(step, torch.ones(WIDTH), backend="cpu", policy=policy, host_args={"kv_len": 3})


@pytest.mark.parametrize("take", [copy.copy, copy.deepcopy, pickle.dumps])
def test_copying_or_pickling_a_tracked_value_is_refused(take: Callable[[Any], Any]):
    with pytest.raises(dg.FrozenValueError, match="copy or pickle"):
        dg.capture(lambda x, *, n: take(n), torch.ones(2), backend="cpu", host_args={"n": 2})


@dg.region(host_args=("scales",), reduce={"scales": tuple})
def by_kind(x: torch.Tensor, *, scales: tuple[Any, ...]) -> torch.Tensor:
    """A multiplication whose factor depends on the kind of the value, not on its size alone."""
    factor = {bool: 3.0, int: 5.0}.get(type(scales[0]), 1.0)
    return x * factor / scales[0]


def by_kind_step(x: torch.Tensor, *, scales: Any) -> torch.Tensor:
    return by_kind(x + 1, scales=scales) * 2


def test_values_that_python_calls_equal_are_keys_of_their_own() -> None:
    x = torch.randn(4, WIDTH)
    cap = dg.capture(by_kind_step, x, backend="cpu", host_args={"scales": [1]})
    for scales in ([1], [True], [1.0], [1], [-1.0], [True, 1], [True, True], [1, True]):
        x.copy_(torch.randn(x.shape))
        assert torch.equal(cap.replay(scales=scales), by_kind_step(x, scales=scales)), scales
    assert cap.stats()["misses"] == 6  # [1] came back


def test_tensor_as_a_host_value_is_refused() -> None:
    table = torch.randn(4)

    def capture(context: Any) -> None:
        @dg.region(context=context, mutates=("out",))
        def read(x: torch.Tensor, out: torch.Tensor, *, context: Any) -> None:
            out.copy_(x + table)

        dg.capture(read, torch.randn(4), torch.zeros(4), backend="cpu")

    with pytest.raises(dg.HostArgumentError, match="context of .*read is a Tensor.*ordinary arg"):
        capture(lambda: table)
    with pytest.raises(
        dg.HostArgumentError, match="context of .*read is a tuple.*data can change unnoticed"
    ):
        capture(lambda: ("x", table))


def test_signed_zeros_are_keys_of_their_own() -> None:
    @dg.region(host_args=("scale",))
    def scaled(x: torch.Tensor, *, scale: float) -> torch.Tensor:
        return x * scale

    x = torch.ones(4)
    cap = dg.capture(
        lambda x, *, scale: scaled(x, scale=scale) + -0.0,
        x,
        backend="cpu",
        host_args={"scale": 0.0},
    )
    signs = [bool(torch.signbit(cap.replay(scale=scale))[0]) for scale in (-0.0, 0.0, -0.0)]
    assert signs == [True, False, True]


CONSUMING: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "arithmetic": lambda n, x: n // 2,
    "reflected arithmetic": lambda n, x: 2 * n,
    "negation": lambda n, x: -n,
    "comparison": lambda n, x: n > 4,
    "equality": lambda n, x: n == 3,
    "branch": lambda n, x: 1 if n else 2,
    "index": lambda n, x: [1, 2, 3, 4, 5][n],
    "slice of a tensor": lambda n, x: x[:, :n],
    "range": lambda n, x: list(range(n)),
    "int": lambda n, x: int(n),
    "float": lambda n, x: float(n),
    "text": lambda n, x: f"{n}",
    "hash": lambda n, x: {n: 1},
    "factory": lambda n, x: torch.zeros(n, device=x.device),
    "multiplied with a tensor": lambda n, x: x * n,
    "tensor multiplied": lambda n, x: n * x,
    "tensor made of it": lambda n, x: torch.tensor(n),
    "narrow": lambda n, x: x.narrow(1, 0, n),
    "max": lambda n, x: max(n, 3),
    "attribute": lambda n, x: n.bit_length(),
}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", CONSUMING)
def test_consuming_a_host_argument_outside_a_region_names_the_line(
    kit: Kit, policy: str, name: str
) -> None:
    def frozen(x: torch.Tensor, *, length: int) -> torch.Tensor:
        CONSUMING[name](length, x)
        return prefix_sum(x * 2, length=length)

    x = kit.tensor(4, 8)
    with pytest.raises(dg.FrozenValueError, match="length") as caught:
        kit.capture(frozen, x, policy=policy, host_args={"length": 3})
    assert __file__ in str(caught.value)
    captured = kit.capture(step, x, policy=policy, host_args={"length": 3})
    kit.check(captured, step, x, length=3)


@pytest.mark.parametrize("policy", POLICIES)
def test_consuming_a_list_outside_a_region_is_refused(kit: Kit, policy: str) -> None:
    @dg.region(host_args=("lengths",), reduce={"lengths": max})
    def body(x: torch.Tensor, *, lengths: int) -> torch.Tensor:
        return x[:, :lengths].sum(1)

    for use in (len, sum, max, iter, sorted, tuple):

        def frozen(x: torch.Tensor, *, lengths: Any, use: Any = use) -> torch.Tensor:
            use(lengths)
            return body(x, lengths=lengths)

        with pytest.raises(dg.FrozenValueError, match="lengths"):
            kit.capture(
                frozen, kit.tensor(4, 8), policy=policy, host_args={"lengths": [3]}, warmup=0
            )


@pytest.mark.parametrize("policy", POLICIES)
def test_host_argument_under_the_name_of_another_is_refused(kit: Kit, policy: str) -> None:
    def crossed(x: torch.Tensor, *, length: int, other: int) -> torch.Tensor:
        return prefix_sum(x * 2, length=other)

    with pytest.raises(dg.FrozenValueError, match=r"'length'.*'other'") as caught:
        kit.capture(crossed, kit.tensor(4, 8), policy=policy, host_args={"length": 3, "other": 4})
    assert "host_args=('other',)" in str(caught.value)
    assert "derive={'length': lambda other: other}" in str(caught.value)

    @dg.region(host_args=("other",), derive={"length": lambda other: other})  # as it says
    def taking(x: torch.Tensor, *, other: int, length: int) -> torch.Tensor:
        return x[:, :length].sum(1)

    x = kit.tensor(4, 8)
    captured = kit.capture(
        lambda x, *, other: taking(x * 2, other=other), x, policy=policy, host_args={"other": 4}
    )
    same(captured.replay(other=6), (x * 2)[:, :6].sum(1))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("declared", [True, False])
def test_plain_value_for_a_host_argument_is_refused(kit: Kit, policy: str, declared: bool) -> None:
    def plain(x: torch.Tensor, **_: Any) -> torch.Tensor:
        return prefix_sum(x * 2, length=5)

    with pytest.raises(dg.FrozenValueError, match=r"prefix_sum.*length"):
        kit.capture(
            plain,
            kit.tensor(4, 8),
            policy=policy,
            host_args={"length": 3} if declared else None,
        )


@pytest.mark.parametrize("policy", POLICIES)
def test_derived_value_cannot_be_passed_by_the_caller(kit: Kit, policy: str) -> None:
    def given(x: torch.Tensor, *, kv_len: int) -> torch.Tensor:
        return windowed_by_rule(x, kv_len=kv_len, window=3)

    with pytest.raises(dg.HostArgumentError, match=r"window.*derives"):
        kit.capture(given, kit.tensor(4, 8), policy=policy, host_args={"kv_len": 3})


class Signed(NamedTuple):
    """A value whose parts are compared."""

    value: float


@attrs.frozen
class Slotted:
    """The same with slots."""

    value: Any


class Own:
    """The same with a comparison of its own."""

    def __init__(self, value: float) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Own) and self.value == other.value

    def __hash__(self) -> int:
        return hash(self.value)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (complex(0, 0.0), complex(0, -0.0)),
        (complex(1, 0.0), complex(1, -0.0)),
        (frozenset([0.0]), frozenset([-0.0])),
        (frozenset([1]), frozenset([True])),
        (Signed(0.0), Signed(-0.0)),
        (Slotted(0.0), Slotted(-0.0)),
        (Slotted((0.0, Own(1))), Slotted((0.0, Own(1.0)))),
        ("one", "one"),
        (Own(0.0), Own(-0.0)),
    ],
)
def test_values_that_are_equal_and_differ_have_keys_of_their_own(
    kit: Kit, one: Any, other: Any
) -> None:
    """FAULTS 19."""
    seen: list[Any] = []

    @dg.region(host_args=("value",))
    def body(x: torch.Tensor, *, value: Any) -> torch.Tensor:
        seen.append(value)
        return x * 2

    captured = kit.capture(
        lambda x, *, value: body(x, value=value), kit.tensor(4), host_args={"value": one}
    )
    seen.clear()
    captured.replay(value=other)
    assert bool(seen) == (one is not other)


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
    for seed, length in enumerate(LENGTHS):
        kit.check(captured, scaled, x, seed=seed, length=length)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "missing": ({}, "missing.*length"),
    "unknown": ({"length": 3, "lenght": 3}, "'lenght'.*Did you mean 'length'"),
    **{
        repr(value): ({"length": value}, "'length' had the type int at capture")
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


@dg.region(host_args=("kv_len",))
def windowed(x: torch.Tensor, *, kv_len: int) -> torch.Tensor:
    """Reads the last ``kv_len`` columns."""
    return x[:, -kv_len:].sum(1)


def _clamped(x: torch.Tensor, *, kv_len: int) -> torch.Tensor:
    return windowed(x * 2, kv_len=min(kv_len, 4096))


@pytest.mark.parametrize("policy", POLICIES)
def test_clamping_a_host_argument_outside_a_region_is_refused(kit: Kit, policy: str) -> None:
    x = kit.tensor(2, 6000)
    with pytest.raises(dg.FrozenValueError, match="kv_len") as caught:
        kit.capture(_clamped, x, policy=policy, host_args={"kv_len": 512})
    assert "min(kv_len, 4096)" in str(caught.value)
    assert __file__ in str(caught.value)
    assert isinstance(caught.value, ValueError)


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
    for length in LENGTHS:
        kit.check(captured, positional, x, y, length=length)


@dg.region(host_args=("kv_len",), derive={"window": lambda kv_len: min(kv_len, 4096)})
def windowed_by_rule(x: torch.Tensor, *, kv_len: int, window: int = 0) -> torch.Tensor:
    """Reads the last ``window`` columns, which devgraph works out from ``kv_len``."""
    return x[:, :kv_len][:, -window:].sum(1)


def _by_rule(x: torch.Tensor, *, kv_len: int) -> torch.Tensor:
    return windowed_by_rule(x * 2, kv_len=kv_len)


@pytest.mark.parametrize("policy", POLICIES)
def test_window_derived_from_a_host_argument_follows_every_replay(kit: Kit, policy: str) -> None:
    x = kit.tensor(2, 6000)
    captured = kit.capture(_by_rule, x, policy=policy, host_args={"kv_len": 512})
    for kv_len in (5000, 512, 4097, 5999):
        want = (x * 2)[:, :kv_len][:, -min(kv_len, 4096) :].sum(1)
        kit.same(captured.replay(kv_len=kv_len), want, f"the replay with kv_len={kv_len}")


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
    for lengths in ([4, 4], [2], [3, 3, 3], [5, 9], [12], [1]):
        kit.check(captured, reduced, x, lengths=lengths)


def _by_variable(n):
    kind = type(n)
    return 2 if kind is int else 3


@pytest.mark.parametrize(
    "pick",
    [
        lambda n: 2 if type(n) is int else 3,
        lambda n: {int: 2}.get(type(n), 3),
        lambda n: 2 if type(n) in (int, float) else 3,
        _by_variable,
    ],
)
@pytest.mark.parametrize("policy", ["full", "breakable", "piecewise"])
def test_exact_type_of_a_tracked_value_is_refused(policy: str, pick):
    """``type(n) is int`` is false of a tracked value, and the other branch stayed in the graph."""

    @dg.region(host_args=("n",))
    def shifted(x, *, n):
        return x + n if type(n) is int else x

    x = torch.randn(3)
    host = {"n": 2}
    with pytest.raises(dg.FrozenValueError, match="by type\\(n\\)"):
        dg.capture(
            lambda x, *, n: shifted(x * pick(n), n=n),
            x,
            policy=policy,
            backend="cpu",
            host_args=host,
        )
    # A region receives the plain value, and types of other values are nobody's business.
    step = lambda x, *, n: shifted(x * (2 if type(x) is torch.Tensor else 3), n=n)  # noqa: E731
    with dg.capture(step, x, policy=policy, backend="cpu", host_args=host) as captured:
        assert torch.equal(captured.replay(n=7), step(x, n=7))
