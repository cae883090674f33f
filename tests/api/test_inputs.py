"""New inputs of a replay: checked, copied in and written back."""

from __future__ import annotations

import enum
from typing import Any

import pytest
import torch

import devgraph as dg
from devgraph.testing.conformance.support import Kit


def test_inputs_are_read_before_any_is_written(kit: Kit) -> None:
    x, y = kit.tensor(3), kit.tensor(3, seed=1)
    captured = kit.capture(lambda x, y: (x * 1, y * 1), x, y)
    old = x.clone(), y.clone()
    got = captured.replay(y, x)
    kit.same(got[0], old[1])
    kit.same(got[1], old[0])


def test_inputs_by_name_and_by_place_are_the_same(kit: Kit) -> None:
    captured = kit.capture(lambda x, y: x - y, kit.tensor(3), kit.tensor(3, seed=1))
    x, y = kit.tensor(3, seed=2), kit.tensor(3, seed=3)
    kit.same(captured.replay(x, y=y), x - y)
    with pytest.raises(dg.InputError, match="given twice"):
        captured.replay(x, x=x)
    with pytest.raises(dg.HostArgumentError, match="z"):
        captured.replay(x, z=y)


def test_call_with_some_of_the_inputs_is_refused(kit: Kit) -> None:
    x, y = kit.tensor(3), kit.tensor(3, seed=1)
    captured = kit.capture(lambda x, y, n, *, z: x * n - y + z[0], x, y, 2, kwargs={"z": [y * 2]})
    new, before = kit.tensor(3, seed=2), [x.clone(), y.clone()]
    for call, missing, way in (
        (lambda: captured(new), "y, z", r"x=\.\.\.\)"),
        (lambda: captured(new, y), "z", r"x=\.\.\., y=\.\.\.\)"),
        (lambda: captured(new, z=[y]), "y", r"x=\.\.\., z=\.\.\.\)"),
        (lambda: captured(x=new), "y, z", "x="),
    ):
        with pytest.raises(dg.InputError, match=rf"missing inputs: {missing}\. .*replay\({way}"):
            call()
        kit.same([x, y], before)
    kit.same(captured(new, y, z=[y]).clone(), new * 2)  # the constant ``n`` may be left out
    for call in (captured, captured.replay, lambda: captured.replay(new)):
        kit.same(call(), new * 2)


@pytest.mark.parametrize(
    "value",
    [
        torch.zeros(4),
        torch.zeros(3, dtype=torch.float64),
        [torch.zeros(3)],
        None,
        3.0,
        torch.zeros(3).to_sparse(),
    ],
    ids=["shape", "dtype", "list", "none", "number", "sparse"],
)
def test_misfit_is_refused_and_changes_nothing(kit: Kit, value: Any) -> None:
    """FAULTS 7."""
    x = kit.tensor(3)
    captured, before = kit.capture(lambda x: x * 2, x), x.clone()
    with pytest.raises(dg.InputError, match="x"):
        captured.replay(value)
    kit.same(x, before)


def test_tensors_that_share_memory_need_data_that_shares_it(kit: Kit) -> None:
    memory = kit.tensor(6)
    captured = kit.capture(lambda x, y: x * 2 + y, memory[:4], memory[2:])
    new = kit.tensor(6, seed=5)
    kit.same(captured.replay(new[:4], new[2:]), new[:4] * 2 + new[2:])
    with pytest.raises(dg.InputError, match="share memory"):
        captured.replay(kit.tensor(4), kit.tensor(4, seed=2))


def test_data_that_the_step_writes_needs_memory_of_its_own(kit: Kit) -> None:
    """FAULTS 8: eager code would read what it wrote in the other input."""
    captured = kit.capture(lambda x, y: x.add_(1) * y, kit.tensor(4), kit.tensor(4, seed=1))
    memory = kit.tensor(6, seed=2)
    for pair in ((memory[:4], memory[2:]), (memory[:4], memory[:4])):
        before = memory.clone()
        with pytest.raises(dg.InputError, match="share memory, and the step writes one of them"):
            captured.replay(*pair)
        kit.same(memory, before)
    kit.same(captured.replay(memory[:4], kit.tensor(4)), memory[:4] * kit.tensor(4))


def _difference(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x - y


def test_mapping_that_the_step_reads_whole_keeps_its_order(kit: Kit) -> None:
    x, y = kit.tensor(2), kit.tensor(2, seed=1)
    whole = kit.capture(lambda d: torch.cat([*d.values()]), {"x": x, "y": y})
    named = kit.capture(lambda d: d["x"] - d["y"], {"x": x, "y": y})
    other = {"y": kit.tensor(2, seed=2), "x": kit.tensor(2, seed=3)}
    unpacked = kit.capture(lambda d: _difference(**d), {"x": x, "y": y})
    kit.same(named.replay(other), other["x"] - other["y"])
    kit.same(unpacked.replay(other), other["x"] - other["y"])
    with pytest.raises(dg.InputError, match=r"order \['y', 'x'\] instead of \['x', 'y'\]"):
        whole.replay(other)


class Way(enum.Enum):
    """A constant among arguments."""

    UP = 1
    DOWN = 2


class Slotted:
    """An object without attributes of its own making."""

    __slots__ = ("x",)

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x


def test_refusal_names_a_way_out_that_fits_the_value(kit: Kit) -> None:
    x = kit.tensor(3)
    captured = kit.capture(lambda x, way: x * way.value, x, Way.UP)
    with pytest.raises(dg.InputError, match=r"'way' is <Way\.DOWN.* and was .*Capture again"):
        captured.replay(x, Way.DOWN)
    with pytest.raises(dg.InputTypeError, match=r"<ndarray \(3,\) .*torch\.as_tensor\(x, dtype"):
        captured.replay(x.cpu().numpy(), Way.UP)
    captured = kit.capture(lambda x: x * 2, x.expand(2, 3))
    with pytest.raises(dg.InputError, match="which is expanded.*Capture with a clone"):
        captured.replay(kit.tensor(2, 3))
    captured = kit.capture(lambda s: s.x * 2, Slotted(x))
    with pytest.raises(dg.InputError, match="pass the tensors"):
        captured.replay(Slotted(x))
    with pytest.raises(dg.InputTypeError, match="on the device 'meta' and has no memory"):
        kit.capture(lambda x: x * 2, torch.empty(3, device="meta"))


class Tagged(torch.Tensor):
    """A subclass with memory of its own."""


def test_input_of_another_class_is_refused(kit: Kit) -> None:
    captured = kit.capture(lambda a: a * 2, kit.tensor(2))
    with pytest.raises(dg.InputTypeError, match="is a Tagged and was a Tensor"):
        captured.replay(kit.tensor(2).as_subclass(Tagged))


def test_attribute_of_a_tensor_is_compared(kit: Kit) -> None:
    def tagged(gain: float) -> Any:
        x = kit.tensor(2).as_subclass(Tagged)
        x.gain = gain
        return x

    captured = kit.capture(lambda a: a.as_subclass(torch.Tensor) * a.gain, tagged(2.0))
    kit.same(captured.replay(tagged(2.0)), kit.tensor(2) * 2)
    with pytest.raises(dg.InputError, match=r"'a.gain' is 5.0 and was 2.0"):
        captured.replay(tagged(5.0))


def test_input_that_would_overwrite_state_is_refused(kit: Kit) -> None:
    """In eager code, an argument is no copy, so it does not overwrite what the step holds."""
    memory = kit.tensor(3, 4)
    captured = kit.capture(lambda x: x + memory.sum(), memory[0])
    for _ in range(2):  # new views of the same memory
        kit.same(captured.replay(memory[0]), memory[0] + memory.sum())
        memory.add_(1)
    before = memory.clone()
    with pytest.raises(dg.InputError, match=r"shares memory with memory, .*Capture with a clone"):
        captured.replay(memory[1])
    kit.same(memory, before)


def test_input_that_the_step_writes_as_state_is_warned_of(kit: Kit) -> None:
    memory, read = kit.tensor(3, 4), kit.tensor(3, 4)

    def step(x: Any) -> Any:
        memory[0].add_(1)
        return x + read[0]

    captured = kit.capture(step, kit.tensor(4))
    for row in (memory[1].clone(), read[1]):
        kit.same(captured.replay(row), row + read[0])
    with pytest.warns(dg.DeviceGraphWarning, match="shares memory with memory, which the step wr"):
        captured.replay(memory[0])


def test_input_that_is_another_window_over_a_bound_tensor_keeps_its_contents(kit: Kit) -> None:
    """As in eager code, only the step writes the memory of the caller."""
    memory = kit.tensor(12)
    captured, before = kit.capture(lambda x: x.cumsum(0), memory[:4]), memory.clone()
    for start in (1, 0, 3, 8):
        kit.same(captured.replay(memory[start : start + 4]), before[start : start + 4].cumsum(0))
        kit.same(memory, before)
    captured = kit.capture(lambda x: x.mul_(2), memory[:4])
    with pytest.raises(dg.InputError, match="shares memory with the bound tensor"):
        captured.replay(memory[1:5])


def test_rows_of_a_tensor_that_the_step_writes_change_as_in_eager_code(kit: Kit) -> None:
    def step(row: Any, x: Any) -> None:
        row.add_(x)

    memory, x = kit.tensor(3, 4), kit.tensor(4)
    want, captured = memory.clone(), kit.capture(step, memory[0], x)
    for row in (0, 1, 2, 1):
        captured(memory[row], x)
        step(want[row], x)
        kit.same(memory, want)


def test_two_arguments_that_the_caller_exchanges_in_turn_change_as_in_eager_code(kit: Kit) -> None:
    def step(source: Any, target: Any) -> None:
        target.copy_(source * 2 + 1)

    pair = [kit.tensor(4), kit.tensor(4)]
    want = [tensor.clone() for tensor in pair]
    captured = kit.capture(step, *pair)
    for turn in (1, -1, 1, 1, -1):
        captured(*pair[::turn])
        step(*want[::turn])
        kit.same(pair, want)


def test_input_of_another_layout_is_warned_of_if_the_step_reads_the_layout(kit: Kit) -> None:
    x = kit.tensor(3, 3)
    captured = kit.capture(lambda x: x * 2 if x.is_contiguous() else x * 3, x)
    with pytest.warns(dg.DeviceGraphWarning, match="'x' differs in is_contiguous"):
        captured.replay(kit.tensor(3, 3).t())
    kit.same(captured.replay(kit.tensor(3, 3).t()), kit.tensor(3, 3).t() * 2)
