"""benchmarks/encoder.py: a vision tower, packed and image by image."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path
from types import ModuleType
from unittest import mock

import pytest
import torch

pytest.importorskip("transformers", reason="has the vision tower")

PATH = Path(__file__).parents[1] / "benchmarks" / "encoder.py"


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("encoder_benchmark", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


encoder = load()
SMALL = "--encoder tiny --backend cpu --images 5 --repeats 1 --steps 1".split()


def printed(capsys, *argv):
    with mock.patch.dict(os.environ, {"COLUMNS": "400"}):
        assert encoder.main([*SMALL, *argv]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("policy", ["full", "breakable"])
def test_images_of_five_sizes_get_what_the_tower_gives_each_alone(policy):
    """Float32; not bit for bit, because matrix products over more rows may add in another order."""
    shape = encoder.ENCODERS["tiny"]
    model = encoder.siglip(shape)
    vision = encoder.PackedVision(model)
    generator = torch.Generator().manual_seed(1)
    images = [
        torch.randn(3, 4 * grid, 4 * grid, generator=generator)
        for grid in (8, 2, 3, 4, 6, 8, 3, 2, 2, 4) * 2
    ]
    with torch.inference_mode():
        runner = vision.runner(shape["budgets"], backend="cpu", config=policy)
        outputs = runner.run([vision.item(image) for image in images])
        for image, output in zip(images, outputs, strict=True):
            alone = model(pixel_values=image[None], interpolate_pos_encoding=True)
            torch.testing.assert_close(output, alone.last_hidden_state[0], rtol=1e-5, atol=2e-6)
        stats = runner.stats()
        assert stats.eager == {} and stats.padding_ratio < 0.25
        assert runner.prove(cases=1).ok


def test_every_way_is_timed_on_all_images_and_on_those_of_each_size(capsys, tmp_path):
    path = tmp_path / "encoder.json"
    printed(capsys, "--policy", "full", "--policy", "breakable", "--json", str(path))
    data = json.loads(path.read_text())
    works = ["5 images", *(f"1 images, {side}x{side}" for side in (8, 12, 16, 24, 32))]
    names = [f"{work}: {way}" for work in works for way in ("eager", "full", "breakable")]
    assert [row["name"] for row in data["rows"]] == names
    for row in data["rows"]:
        assert row["equal"] and 0 < row["host"] <= row["wall"]
        assert row["wall_ratio"] == 1 or "eager" not in row["name"]
        assert (row["padding"] is None) == ("eager" in row["name"])
    assert data["title"] == f"one image of SigLIP (tiny) on {data['device']}"
    assert data["shape"]["dtype"] == "float32"


def test_table_says_what_the_figures_are_on_the_cpu(capsys):
    out = printed(capsys)
    assert "one image of SigLIP (tiny) on " in out and "5 images: full" in out
    assert "padding" in out
    assert "figures show the overhead of devgraph" in out
