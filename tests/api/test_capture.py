"""``dg.capture``: one meaning under every policy, and what it watches of its arguments."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import devgraph as dg

POLICIES = ("full", "breakable", "piecewise")


@pytest.mark.parametrize("policy", POLICIES)
def test_replaced_entry_of_a_bound_list_or_dict_is_refused(policy: str):
    caches = [torch.randn(2, 2), torch.randn(2, 2)]
    named = {"scale": torch.randn(2, 2)}

    def step(caches, named):
        return caches[0] @ caches[1] * named["scale"]

    with dg.capture(step, caches, named, backend="cpu", policy=policy) as captured:
        caches[1].normal_()
        assert torch.equal(captured.replay(), step(caches, named))
        kept, caches[1] = caches[1], torch.randn(2, 2)
        with pytest.raises(dg.StateError, match=r"entry 1 of a list .* copy_\(\)"):
            captured.replay()
        caches[1] = kept
        del named["scale"]
        with pytest.raises(dg.StateError, match="entry 'scale' of a dict"):
            captured.replay()


def test_capture_shows_what_it_is():
    captured = dg.capture(lambda x: x * 2, torch.ones(2), backend="cpu")
    assert repr(captured) == "<Captured full on cpu: 1 segment>"
    captured.close()
    assert repr(captured) == "<Captured full on cpu: closed>"


@pytest.mark.parametrize("policy", ["full", "breakable"])
def test_capture_has_one_meaning_under_every_policy(policy: str):
    @dg.region(host_args=("kv_len",), derive={"half": lambda kv_len: kv_len // 2})
    def attention(x: Any, *, kv_len: int, half: int) -> Any:
        return x[:, :kv_len].sum(1) - x[:, :half].sum(1)

    def fn(x: Any, scale: Any, *, kv_len: int = 512) -> Any:
        return {"y": attention(x * 2, kv_len=kv_len) * scale}

    x = torch.randn(4, 1024)
    cap = dg.capture(
        fn,
        x,
        kwargs={"scale": torch.tensor(3.0)},
        policy=policy,
        backend="cpu",
        host_args={"kv_len": 512},
    )
    out = cap.replay(kv_len=777)
    assert out["y"] is cap.outputs["y"]
    assert torch.equal(out["y"], fn(x, torch.tensor(3.0), kv_len=777)["y"])
    cap.replay()  # the default of fn, and not the value before
    assert torch.equal(cap.outputs["y"], fn(x, torch.tensor(3.0))["y"])
    assert len(cap.segments) == (1 if policy == "full" else 3)
    assert policy in cap.explain()
    report = cap.prove(cases=3, host_args=[{"kv_len": 5}, {"kv_len": 1000}])
    assert report.ok
    assert report.failures == ()
    assert report.cases == 6
    cap.close()
