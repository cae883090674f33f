"""Declarations: input slots, pad rules, output slots, host slots, variants, options; and padding,
what rows hold that no request owns, from the start and behind the steps of a loop.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import devgraph as dg
from devgraph.api.errors import whole
from devgraph.runners import HostSlot, InputSlot, OutputSlot, Pad, Size
from devgraph.runners.slots import check_slots, pad_rows
from tests.support.runner_steps import IDS, decode_of, double, double_runner


def slot(dims=("tokens",), dtype=torch.int64, pad=None, name="x"):
    return InputSlot(name, dims, dtype, pad=pad or Pad.zero())


def test_shape_follows_the_named_dimension():
    size = Size(requests=3, tokens=12, width=4)
    assert slot(("tokens", 7)).shape(size) == (12, 7)
    assert slot((3, "tokens")).shape(size) == (3, 12)
    assert slot(("requests",)).shape(size) == (3,)
    assert slot(("requests+1",)).shape(size) == (4,)
    assert slot((5, 2)).shape(size) == (5, 2)
    assert slot(()).shape(size) == ()


def test_an_unknown_dim_is_refused_with_the_nearest_name():
    with pytest.raises(dg.ConfigError, match="unknown dim 'token' .*Did you mean 'tokens'"):
        slot(("token",))


@pytest.mark.parametrize("dim", [0, -1, 2.0, True, None])
def test_a_dim_that_is_no_positive_int_is_refused(dim):
    with pytest.raises(dg.ConfigError, match="a dim of input slot 'x' must be (an int|at least 1)"):
        slot((dim,))


def test_two_named_dims_are_refused():
    with pytest.raises(dg.ConfigError, match="at most one may be named"):
        slot(("tokens", "requests"))


@pytest.mark.parametrize("name", ["host", "real", "requests", "tokens", "variant", "width"])
def test_a_slot_that_would_hide_a_batch_attribute_is_refused(name):
    with pytest.raises(dg.ConfigError, match=f"hide batch.{name}"):
        slot(name=name)


@pytest.mark.parametrize("name", ["", "two words", "_private", 3])
def test_a_slot_name_that_is_no_identifier_is_refused(name):
    with pytest.raises(dg.ConfigError, match="Python identifier"):
        slot(name=name)


def test_the_pad_rule_is_mandatory():
    with pytest.raises(dg.ConfigTypeError, match=r"'x' needs pad=Pad\.zero\(\)"):
        InputSlot("x", ("tokens",), torch.int64)
    with pytest.raises(dg.ConfigTypeError, match=r"a host slot needs pad=Pad\.zero\(\)"):
        dg.HostSlot("tokens")
    with pytest.raises(dg.ConfigTypeError, match="needs pad="):
        InputSlot("x", ("tokens",), torch.int64, pad=0)


@pytest.mark.parametrize(
    ("dtype", "value"),
    [
        (torch.int32, 2**31),
        (torch.uint8, -1),
        (torch.int64, 0.5),
        (torch.bool, 2),
        (torch.float16, 70000.0),
        (torch.float32, 10**400),
        (torch.int64, 10**400),
        (torch.complex64, 10**400),
        (torch.int64, float("inf")),
    ],
)
def test_a_pad_value_that_the_dtype_cannot_hold_is_refused(dtype, value):
    with pytest.raises(dg.ConfigError, match="cannot represent its pad value"):
        slot(dtype=dtype, pad=Pad.fill(value))


@pytest.mark.parametrize("value", [float("nan"), float("-inf"), -65504.0])
def test_a_floating_pad_value_may_be_special(value):
    assert slot(dtype=torch.float16, pad=Pad.fill(value)).pad.value is value


def test_a_pad_value_that_is_no_number_is_refused():
    with pytest.raises(dg.ConfigTypeError, match="must pad with a number"):
        slot(pad=Pad.fill(torch.tensor(3)))


def test_duplicate_slots_are_refused():
    with pytest.raises(dg.ConfigError, match="'ids' is declared twice"):
        check_slots([IDS, IDS])


def test_inputs_without_a_batch_dimension_are_refused():
    with pytest.raises(dg.ConfigError, match="takes the size of a batch"):
        check_slots([slot((4,))])
    with pytest.raises(dg.ConfigTypeError, match="InputSlot objects"):
        check_slots(["ids"])


def test_a_bad_output_slot_is_refused():
    with pytest.raises(dg.ConfigError, match="unknown rows 'request'.*Did you mean 'requests'"):
        OutputSlot(rows="request")
    with pytest.raises(dg.ConfigError, match="dim of an output slot"):
        OutputSlot(dim=-1)
    with pytest.raises(dg.ConfigTypeError, match="outputs must be an OutputSlot"):
        double_runner(outputs={"y": "requests"}, captured=False)


@pytest.mark.parametrize(
    ("pad", "given", "expected"),
    [
        (Pad.fill(1), [5, 6], (5, 6, 1, 1)),
        (Pad.last(), [5, 6], (5, 6, 6, 6)),
        (Pad.last(3), [], (3, 3, 3, 3)),
    ],
)
def test_a_host_slot_continues_a_list_by_its_pad_rule(pad, given, expected):
    assert HostSlot("requests", pad=pad).padded(given, Size(4, 4)) == expected


def test_a_bad_host_slot_is_refused():
    with pytest.raises(dg.ConfigError, match="unknown dim 'rows'"):
        HostSlot("rows", pad=Pad.zero())


@pytest.mark.parametrize(
    ("variants", "text"),
    [
        ([], "variants is empty"),
        ([{}, {"width": 1}], "declared twice"),
        ([{"width": 0}], "width must be a positive int"),
        ([{"width": True}], "width must be a positive int"),
        ([{"lora": [1]}], "must be hashable"),
        (["lora"], "a variant is a mapping"),
        ([{"lora": True, 1: 2}], "names must be strings"),
    ],
)
def test_bad_variants_are_refused(variants, text):
    with pytest.raises(dg.InputError if "hashable" in text else dg.ConfigError, match=text):
        double_runner(variants=variants, captured=False)


def test_a_variant_of_a_run_whose_names_are_no_strings_is_refused():
    runner = double_runner(captured=False)
    with pytest.raises(dg.InputError, match="names must be strings"):
        runner.can_run(requests=1, variant={"lora": True, 1: 2})


def test_an_unknown_option_is_refused_with_the_nearest_name():
    with pytest.raises(dg.ConfigError, match="Did you mean 'strict'"):
        double_runner(strikt=True, captured=False)


def test_an_unknown_configuration_is_refused():
    with pytest.raises(dg.ConfigError, match="Did you mean 'buckets'"):
        double_runner(config={"bucket": [1]}, captured=False)
    with pytest.raises(dg.ConfigTypeError, match="one phase"):
        double_runner(config=dg.DeviceGraphConfig(), captured=False)
    with pytest.raises(dg.ConfigError, match="policy"):
        double_runner(config="fulll", captured=False)


def test_what_this_version_cannot_do_is_refused_before_anything_is_built():
    with pytest.raises(dg.ConfigError, match="use capture='eager' or strict=False"):
        double_runner(config={"capture": "lazy"}, strict=True, captured=False)


@pytest.mark.parametrize("value", [0, -1, True, 2.5])
def test_a_capacity_that_is_no_positive_int_is_refused(value):
    with pytest.raises(ValueError, match="max_requests"):
        double_runner(max_requests=value, captured=False)


@pytest.mark.parametrize("name", ["items", "keys", "get", "values", "self"])
def test_a_host_argument_whose_name_the_batch_needs_itself_is_refused(name):
    with pytest.raises(dg.ConfigError, match="choose another name"):
        double_runner(host_args={name: 1}, captured=False)


def test_a_host_argument_name_must_be_an_identifier():
    with pytest.raises(dg.ConfigError, match="Python identifier"):
        double_runner(host_args={"kv len": 3}, captured=False)


def test_whole_takes_what_is_an_index():
    assert whole("n", torch.tensor(3)) == 3
    with pytest.raises(dg.InputTypeError, match="n must be an int"):
        whole("n", 3.0)


def test_a_pool_of_another_backend_is_refused():
    backend = dg.get_backend("cpu")
    foreign = type(backend)().make_pool()
    with pytest.raises(dg.StateError, match="belongs to backend"):
        dg.DecodeRunner(
            double,
            [InputSlot("x", ("tokens", 3), torch.float32, pad=Pad.zero())],
            max_requests=4,
            backend=backend,
            pool=foreign,
        )


REAL = torch.tensor([False, True, True, False, True, False])


@pytest.mark.parametrize(
    ("pad", "want"),
    [
        (Pad.fill(-1), [-1, 11, 12, -1, 14, -1]),
        (Pad.last(5), [5, 11, 12, 12, 14, 14]),
    ],
)
def test_rows_that_are_not_real_get_their_pad_values(pad: Pad, want: list[int]) -> None:
    rows = torch.arange(10, 16)
    pad_rows(rows, pad, 0, REAL)
    assert rows.tolist() == want
    wide = torch.arange(10, 16).repeat(2, 1)
    pad_rows(wide, pad, 1, REAL)
    assert wide.tolist() == [want, want]


def _padded_behind(slot: dg.InputSlot, first: Any, done: list[bool], width: int = 1) -> list[Any]:
    """Return what ``slot`` holds in the second step of a loop, after ``done`` of the first."""
    ids = dg.InputSlot("ids", ("tokens",), torch.int64, pad=Pad.zero())
    slots = [slot] if slot.name == "ids" else [ids, slot]
    runner = decode_of(
        lambda batch: getattr(batch, slot.name).clone(),
        slots,
        outputs=dg.OutputSlot(rows=None),
        variants=[{"width": width}],
        config={"buckets": [len(done)]},
        loop=dg.Loop(
            steps=2, advance=lambda batch, out: None, done=lambda batch, out: torch.tensor(done)
        ),
    )
    tokens = torch.arange(len(done) * width)
    inputs = {"ids": tokens, slot.name: torch.tensor(first)}
    outputs = runner.run(inputs, variant={"width": width}).outputs
    return list(outputs[1].tolist())


def test_the_tokens_of_a_request_are_padded_together() -> None:
    slot = dg.InputSlot("ids", ("tokens",), torch.int64, pad=Pad.fill(-1))
    assert _padded_behind(slot, list(range(6)), [False, True, False], 2) == [0, 1, -1, -1, 4, 5]


def test_offsets_stay_up_to_the_last_request_that_goes_on() -> None:
    slot = dg.InputSlot("starts", ("requests+1",), torch.int64, pad=Pad.last())
    done = REAL.logical_not().tolist()
    found = _padded_behind(slot, list(range(0, 14, 2)), done)
    assert found == [0, 2, 4, 6, 8, 10, 10]


def test_a_slot_without_rows_is_left_alone() -> None:
    slot = dg.InputSlot("scale", (2,), torch.float32, pad=Pad.zero())
    assert _padded_behind(slot, [1.0, 1.0], [True, False]) == [1, 1]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"low": 0}, "high of input slot 'n' must be an int, got None"),
        ({"high": 2.5}, "high of input slot 'n' must be an int, got 2.5"),
        ({"low": 3, "high": 3}, "the range 3 to 3"),
        ({"high": 2**40, "dtype": torch.int32}, "the range 0 to 1099511627776"),
        ({"high": 5, "dtype": torch.float32}, "for integers"),
        ({"high": 5, "dims": ("requests+1",)}, "sample= for floating-point data and for offsets"),
        ({"high": 5, "sample": lambda shape, generator: None}, "both a range and sample="),
    ],
)
def test_range_that_cannot_work_is_refused(options, text):
    given = {"dims": ("tokens",), "dtype": torch.int64, "pad": Pad.fill(-1), **options}
    with pytest.raises(dg.ConfigError, match=text):
        InputSlot("n", **given)


def test_range_gives_the_data_of_proofs():
    slot = InputSlot("n", ("tokens",), torch.int16, pad=Pad.fill(-1), low=3, high=6)
    assert not slot.fixed_in_proofs
    drawn = slot.sample((200,), torch.Generator().manual_seed(0))
    assert drawn.dtype is torch.int16
    assert set(drawn.tolist()) == {3, 4, 5}


def test_pad_of_a_dtype_without_numbers_is_zero():
    assert InputSlot("x", ("tokens",), torch.float4_e2m1fn_x2, pad=Pad.zero()).pad.value == 0
    with pytest.raises(dg.ConfigError, match="cannot convert numbers to this dtype, so only 0"):
        InputSlot("x", ("tokens",), torch.float4_e2m1fn_x2, pad=Pad.fill(1))
