"""A tiny diffusion pipeline with random weights, whose denoiser and decoder run in graphs.

    pip install ".[diffusers]"
    python examples/diffusion.py

The calls of ``accelerate`` and ``close`` are the same for real weights on a device.
"""

from __future__ import annotations

import sys

import torch

from devgraph.integrations.diffusers import accelerate

try:
    from diffusers import AutoencoderKL, DDIMScheduler, DiTPipeline, DiTTransformer2DModel
except ImportError as error:
    print(f"this example needs diffusers: {error}")
    sys.exit(0)


def tiny_pipeline() -> DiTPipeline:
    torch.manual_seed(0)
    transformer = DiTTransformer2DModel(
        num_attention_heads=2,
        attention_head_dim=8,
        in_channels=4,
        out_channels=8,
        num_layers=2,
        sample_size=8,
        num_embeds_ada_norm=1000,
    )
    vae = AutoencoderKL(block_out_channels=(8,), norm_num_groups=4)
    pipeline = DiTPipeline(transformer.eval(), vae.eval(), DDIMScheduler())
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def images(pipeline: DiTPipeline, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    output = pipeline([1, 2], num_inference_steps=5, generator=generator, output_type="np")
    return torch.from_numpy(output.images)


def main() -> None:
    pipeline = tiny_pipeline()
    eager = [images(pipeline, seed) for seed in range(2)]

    handle = accelerate(pipeline, backend="cpu")
    in_graphs = [images(pipeline, seed) for seed in range(2)]
    same = all(map(torch.equal, eager, in_graphs))
    print(f"images equal eager: {same}")
    for name, counts in handle.stats().items():
        print(f"{name}: {counts['replays']} replays of {counts['graphs']} graphs")
    handle.suspend()  # releases the memory of the graphs between prompts
    handle.resume()
    print(handle.prove())
    handle.close()


if __name__ == "__main__":
    main()
