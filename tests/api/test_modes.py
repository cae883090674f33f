"""The modes of a capture, where marked code runs again."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import devgraph as dg

POLICIES = ("full", "breakable", "piecewise")

WIDTH = 8


@pytest.mark.parametrize("policy", POLICIES)
def test_trainable_region_is_captured_and_proven_under_an_outer_autocast(policy: str):
    linear = torch.nn.Linear(WIDTH, WIDTH)

    @dg.region
    def project(x):
        return linear(x)

    def step(x):
        return project(x * 2) + 1

    x = torch.randn(4, WIDTH)
    with torch.autocast("cpu", torch.bfloat16):
        captured = dg.capture(step, x, policy=policy, backend="cpu")
        x.copy_(torch.randn(4, WIDTH))
        assert torch.equal(captured.replay(), step(x))
        with torch.no_grad():
            linear.weight.fill_(1.0)
            torch.clear_autocast_cache()
        assert torch.equal(captured.replay(), step(x))
    assert captured.prove().ok
    captured.close()


@pytest.mark.parametrize("policy", ["full", "breakable"])
def test_torch_works_on_after_a_region_raised_in_an_inference_block(policy: str):
    runs = []

    @dg.region
    def body(x):
        runs.append(1)
        if len(runs) == 2:
            raise MemoryError("out of memory")
        return x * 2

    def step(x):
        with torch.inference_mode():
            return body(x + 1) + 1

    x = torch.randn(3)
    with pytest.raises(MemoryError):
        dg.capture(step, x, policy=policy, backend="cpu", warmup=1)
    assert torch.equal(x + 1, x.clone().add_(1))
    with dg.capture(step, x, policy=policy, backend="cpu") as captured:
        assert torch.equal(captured.replay(), step(x))


def settings_of(x: torch.Tensor) -> torch.Tensor:
    """Add a number that tells the settings apart, of a kind that torch itself does not see."""
    number = (
        1 * (torch.get_default_dtype() is torch.float64)
        + 2 * (not torch._C._get_flash_sdp_enabled())
        + 4 * (torch.get_float32_matmul_precision() == "high")
        + 8 * torch.are_deterministic_algorithms_enabled()
        + 16 * (torch.get_default_device().type == "meta")
        + 32 * (not torch.is_grad_enabled())
    )
    return x + float(number)


@contextlib.contextmanager
def setting(get, put, value):
    before = get()
    put(value)
    try:
        yield
    finally:
        put(before)


class Shift(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        return result + 10 if func is torch.Tensor.add else result


class Lift(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        return result + 10 if func is torch.ops.aten.mul.Tensor else result


SETTINGS = {
    "dtype": lambda: setting(torch.get_default_dtype, torch.set_default_dtype, torch.float64),
    "attention": lambda: sdpa_kernel(SDPBackend.MATH),
    "precision": lambda: setting(
        torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "high"
    ),
    "deterministic": lambda: setting(
        torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms, True
    ),
    "device": lambda: torch.device("meta"),
    "function mode": Shift,
    "dispatch mode": Lift,
    "grad": torch.no_grad,
}


@pytest.mark.parametrize("around", ["mark", "step"])
@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("policy", ["full", "breakable"])
def test_settings_at_a_mark_hold_for_its_body(policy: str, name: str, around: str):
    """FAULTS 50, under ``full`` with new keys, under ``breakable`` in every break."""
    enter = SETTINGS[name]

    @dg.region(host_args=("n",))
    def body(x, *, n):
        return settings_of((x * n).add(1))

    def step(x, *, n):
        with enter() if around == "mark" else contextlib.nullcontext():
            return body(x * 2, n=n) * 3

    x = torch.randn(4)
    outside = enter if around == "step" else contextlib.nullcontext
    with outside():
        captured = dg.capture(step, x, policy=policy, backend="cpu", host_args={"n": 2})
    for n in (3, 2, 5, 3):
        x.copy_(torch.randn(4))
        with outside():
            want = step(x, n=n)
        before = torch.get_default_dtype(), torch._C._get_flash_sdp_enabled()
        assert torch.equal(captured.replay(n=n), want)
        assert before == (torch.get_default_dtype(), torch._C._get_flash_sdp_enabled())
        assert torch._C._len_torch_dispatch_stack() == 0
    captured.close()


def test_setting_that_the_step_changes_is_named():
    before = torch.get_default_dtype()

    def step(x):
        torch.set_default_dtype(torch.float64)
        return x * torch.ones(4)

    try:
        with pytest.warns(dg.DeviceGraphWarning, match=r"get_default_dtype from torch\.float32"):
            dg.capture(step, torch.ones(4), backend="cpu").close()
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_of_a_replay_do_not_reach_breaks(name: str):
    """FAULTS 50."""

    @dg.no_graph
    def body(x):
        return settings_of(x.mul(2).add(1))

    x = torch.randn(4)
    with dg.capture(lambda x: body(x * 2) * 3, x, policy="breakable", backend="cpu") as captured:
        for _ in range(2):
            x.copy_(torch.randn(4))
            want = body(x * 2) * 3
            with SETTINGS[name]():
                captured.replay()
            assert torch.equal(captured.outputs, want)
            assert torch.equal(captured.replay(), want)


@pytest.mark.parametrize("enter", [Shift, lambda: torch.device("meta"), Lift])
def test_piecewise_refuses_a_mark_inside_a_mode(enter):
    """FAULTS 50."""

    @dg.no_graph
    def body(x):
        return x + 1

    def step(x):
        with enter():
            return body(x * 2) + 1

    with pytest.raises(dg.CaptureError, match="breakable"):
        dg.capture(step, torch.randn(4), policy="piecewise", backend="cpu")


def test_order_of_attention_kernels_that_torch_sets_itself_is_no_change_of_the_step():
    order = torch._C._get_sdp_priority_order()

    def step(x):
        torch._C._set_sdp_priority_order(order[::-1])
        return x + 1

    try:
        dg.capture(step, torch.ones(2), backend="cpu")  # a warning would be an error
    finally:
        torch._C._set_sdp_priority_order(order)
