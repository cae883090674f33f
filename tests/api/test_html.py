"""Tables for notebooks: text of users is escaped, and every object that has one shows its facts."""

from __future__ import annotations

from xml.etree import ElementTree

import torch

import devgraph as dg
from devgraph.api import html


def _cells(text: str) -> list[str | None]:
    return [cell.text for cell in ElementTree.fromstring(f"<div>{text}</div>").iter("td")]


def test_text_is_escaped_and_none_is_a_dash():
    text = html.table("a < b", ("name",), [("<script>",), (None,)])
    assert _cells(text) == ["<script>", "-"]
    assert "<h1>a &lt; b</h1>" in html.page("a < b", text)


def test_captures_runners_statistics_and_plans_have_tables():
    with dg.capture(lambda x: x * 2, torch.ones(3), backend="cpu") as captured:
        assert {"graph", "capture", "2.0 KiB"} <= {*_cells(captured._repr_html_())}
    runner = dg.DecodeRunner(
        lambda batch: batch.x * 2,
        [dg.InputSlot("x", ("tokens",), torch.float32, pad=dg.Pad.zero())],
        config={"policy": "full", "buckets": [1, 2]},
        backend="cpu",
        max_requests=2,
        progress=False,
    )
    runner.capture()
    runner.run({"x": torch.ones(2)})
    assert _cells(runner._repr_html_()).count("captured") == 2
    assert {"decode", "policy", "memory"} <= {*_cells(runner._repr_html_())}
    assert runner._repr_html_() == runner.stats()._repr_html_()
    runner.close()
    config = dg.DeviceGraphConfig()
    resolution = dg.resolve(config, dg.EngineFacts(lora=True))
    assert {"decode", '"full"', "lora"} <= {*_cells(resolution._repr_html_())}
    mode = dg.DeviceGraphConfig.from_json('{"decode": "full"}')
    groups = [
        {"name": "a", "backend": "cpu", "role": "decode"},
        {"name": "b", "backend": "cpu", "facts": {"weight_offload": True}},
    ]
    good, bad = dg.plan_cluster(mode, {"groups": groups})
    assert "decode" in _cells(good._repr_html_())
    assert "weight-offload" in bad._repr_html_()
