"""Pipelines of diffusers in graphs: a tiny one, and a stand-in where diffusers is not installed."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import devgraph as dg
from devgraph.integrations.diffusers import accelerate


class Denoiser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.scale = 1.0

    def forward(self, x: torch.Tensor, timestep: torch.Tensor, return_dict: bool = True) -> Any:
        return (self.linear(x) * self.scale + timestep,)

    def set_adapters(self, scale: float) -> None:
        self.scale = scale


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 8)

    def decode(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).tanh()


class Pipeline:
    def __init__(self) -> None:
        self.transformer, self.vae = Denoiser(), Decoder()

    @torch.no_grad()
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        for step in range(4):
            x = x - self.transformer(x, torch.tensor(float(step)), return_dict=False)[0] * 0.1
        return self.vae.decode(x)

    def disable_lora(self) -> None:
        self.transformer.scale = 0.0


def pair() -> tuple[Pipeline, Pipeline]:
    plain = Pipeline()
    return plain, copy.deepcopy(plain)


def test_pipeline_equals_eager_and_gets_its_methods_back() -> None:
    plain, ours = pair()
    handle = accelerate(ours, backend="cpu")
    with pytest.raises(dg.StateError, match=r"close\(\) of the handle"):
        accelerate(ours, backend="cpu")
    for rows in (1, 2, 1, 2):
        x = torch.randn(rows, 4)
        assert torch.equal(ours(x), plain(x))
    assert {name: found["graphs"] for name, found in handle.stats().items()} == {
        "transformer": 2,
        "vae.decode": 2,
    }
    assert handle.prove().ok
    handle.close()
    handle.close()
    assert "forward" not in vars(ours.transformer)
    assert "decode" not in vars(ours.vae) and "disable_lora" not in vars(ours)


def test_adapters_that_are_switched_or_scaled_close_the_graphs() -> None:
    plain, ours = pair()
    accelerate(ours, backend="cpu")
    x = torch.randn(2, 4)
    for change in ("none", "scale", "none", "off", "none"):
        for pipeline in (plain, ours):
            if change == "scale":
                pipeline.transformer.set_adapters(0.5)
            elif change == "off":
                pipeline.disable_lora()
        for _ in range(3):
            assert torch.equal(ours(x), plain(x))


def test_memory_is_given_back_between_prompts() -> None:
    plain, ours = pair()
    handle = accelerate(ours, backend="cpu")
    x = torch.randn(2, 4)
    for _ in range(3):
        assert torch.equal(ours(x), plain(x))
    captures = handle.stats()["transformer"]["captures"]
    handle.suspend()
    handle.resume()
    assert torch.equal(ours(x), plain(x))
    assert handle.stats()["transformer"]["captures"] == captures
    handle.suspend()
    handle.close()


def test_pipeline_without_denoiser_or_with_offloading_is_refused() -> None:
    with pytest.raises(dg.InputError, match="has no transformer or"):
        accelerate(object(), backend="cpu")
    ours = Pipeline()
    ours.transformer._hf_hook = object()
    with pytest.raises(dg.InputError, match="is offloaded by accelerate"):
        accelerate(ours, backend="cpu")
    with pytest.raises(dg.StateError, match="Run the pipeline first"):
        accelerate(Pipeline(), backend="cpu").prove()


def test_tiny_pipeline_of_diffusers_equals_eager() -> None:
    diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed")
    torch.manual_seed(0)
    transformer = diffusers.DiTTransformer2DModel(
        num_attention_heads=2,
        attention_head_dim=8,
        in_channels=4,
        out_channels=8,
        num_layers=2,
        sample_size=8,
        num_embeds_ada_norm=1000,
    )
    vae = diffusers.AutoencoderKL(block_out_channels=(8,), norm_num_groups=4)
    pipeline = diffusers.DiTPipeline(transformer.eval(), vae.eval(), diffusers.DDIMScheduler())
    pipeline.set_progress_bar_config(disable=True)

    def images(seed: int) -> Any:
        generator = torch.Generator().manual_seed(seed)
        call = pipeline(
            [1, 2], num_inference_steps=4, generator=generator, output_type="np", guidance_scale=2.0
        )
        return torch.from_numpy(call.images)

    want = [images(seed) for seed in range(3)]
    handle = accelerate(pipeline, backend="cpu")
    for seed in range(3):
        assert torch.equal(images(seed), want[seed])
    stats = handle.stats()
    assert stats["transformer"]["replays"] > 5
    assert stats["vae.decode"]["replays"] > 0
