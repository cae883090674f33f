"""``devgraph bench --encoder``: a real vision tower, packed and image by image."""

from __future__ import annotations

import pytest
import torch

from devgraph.cli.arguments import ENCODERS
from devgraph.cli.contenders import Decoder, PackedVision, siglip
from tests.support.cli_programs import run_cli, run_json

SMALL = (
    "bench", "--encoder", "tiny", "--backend", "cpu", "--images", "5", "--repeats", "1",
    "--steps", "1",
)  # fmt: skip


@pytest.mark.parametrize("policy", ["full", "breakable"])
def test_images_of_five_sizes_get_what_the_tower_gives_each_alone(policy):
    """Float32; not bit for bit, because matrix products over more rows may add in another order."""
    shape = ENCODERS["tiny"]
    model = siglip(shape)
    vision = PackedVision(model)
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


def test_every_way_is_timed_on_all_images_and_on_those_of_each_size(capsys):
    data = run_json(capsys, *SMALL, "--policy", "full", "--policy", "breakable")
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
    result = run_cli(capsys, *SMALL)
    assert result.code == 0
    assert "one image of SigLIP (tiny) on " in result.out and "5 images: full" in result.out
    assert "padding" in result.out and "segments" not in result.out
    assert "these figures tell what devgraph adds to a step" in result.out


def test_step_depends_on_token_row_and_length():
    model = Decoder(
        torch.device("cpu"), torch.float32,
        layers=1, hidden=8, heads=2, vocabulary=16, batch=2, window=8,
    )  # fmt: skip
    ids, row = torch.tensor([1, 2]), torch.tensor([3])
    with torch.inference_mode():
        base = model(ids, row, kv_len=4)
        assert torch.equal(model(ids, row, kv_len=4), base)
        assert not torch.equal(model(ids, row, kv_len=5), base)
        assert not torch.equal(model(ids + 1, row, kv_len=4), base)
        assert not torch.equal(model(ids, row + 1, kv_len=4), base)
