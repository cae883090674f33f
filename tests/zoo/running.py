"""One family on the engine, and what became of it."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import attrs
import torch

import devgraph as dg
from devgraph.api.backend import Backend
from devgraph.api.errors import HostReadError
from devgraph.integrations.transformers import Engine
from devgraph.integrations.transformers.probe import UnsupportedModelError
from tests.support.transformers_models import reference
from tests.zoo.families import VOCABULARY, build, quiet

LENGTHS = (1, 90, 17, 40, 5)
NEW = 6

# (decode, prefill, fuse): each policy serves each phase, and one pair runs unfused too. Piecewise
# is missing: torch.compile cannot trace a model whose attention is devgraph's.
GRAPHS = (
    ("full", "breakable", True),
    ("full", "breakable", False),
    ("breakable", "full", True),
)
MODES = (("disabled", "disabled", True), *GRAPHS)

RUNS = "runs"
REFUSED = "refused"
# Known only when a graph is captured; with the policy ``disabled`` the model runs.
UNCAPTURED = "refused by its first capture"
UNBUILT = "cannot be built here"


@attrs.frozen
class Result:
    """What became of a family, one of the four above, and why."""

    verdict: str
    reason: str = ""


def meet(
    name: str,
    device: str | Backend = "cpu",
    dtype: torch.dtype = torch.float32,
    modes: Sequence[tuple[str, str, bool]] = (),
) -> Result:
    """Build the family ``name`` and run it under each of ``modes``.

    On the reference its tokens are those of the model's own ``generate``; on a device, whose
    kernels round by the number of rows, those of the same engine without graphs.

    Args:
        device: a backend or its name.
        modes: policies of decode and of prefill, and whether modules are fused. The default is
            every mode.

    Raises:
        AssertionError: the engine generated another token than the model.
        Exception: the engine failed otherwise than by refusing the model.
    """
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(3, VOCABULARY, (n,), generator=generator).tolist() for n in LENGTHS]
    backend = dg.get_backend(device) if isinstance(device, str) else device
    alone = backend.name == "cpu"

    def made() -> Any:
        # A new one each time: what a model keeps from its first run of a size, each has to make.
        return build(name).to(backend.device, dtype)

    with quiet():
        try:
            model = made()
            want = [reference(model, prompt, NEW) for prompt in prompts] if alone else []
        except Exception as error:
            return Result(UNBUILT, f"{type(error).__name__}: {_line(error)}")
        for decode, prefill, fuse in modes or (MODES if alone else GRAPHS):
            policies = decode, prefill
            try:
                if not alone:
                    with _engine(made(), backend, *policies, fuse=fuse, emulate=True) as engine:
                        want = _tokens(engine, prompts)
                engine = _engine(made(), backend, *policies, fuse=fuse)
            except UnsupportedModelError as error:
                return Result(REFUSED, _why(error))
            with engine:
                try:
                    engine.capture()
                except HostReadError as error:
                    return Result(UNCAPTURED, str(error).split(", at ")[0])
                if backend.device.type == "cpu":  # where results do not depend on the rows
                    engine.suspend()
                    got = _tokens(engine, prompts)
                    assert got == want, f"{name}, eagerly after captures, fuse {fuse}"
                    engine.resume()
                got = _tokens(engine, prompts)
            assert got == want, f"{name}, decode {decode}, prefill {prefill}, fuse {fuse}"
    return Result(RUNS)


def _tokens(engine: Engine, prompts: list[list[int]]) -> list[list[int]]:
    return [list(one.token_ids) for one in engine.generate(prompts, max_new_tokens=NEW)]


def _engine(
    model: Any, backend: Backend, decode: str, prefill: str, *, fuse: bool, emulate: bool = False
) -> Engine:
    mode: dict[str, dict[str, Any]] = {
        "decode": {"policy": decode, "buckets": [1, 2]},
        "prefill": {"policy": prefill, "buckets": [2, 16, 64]},  # one as large as in decode
    }
    for phase in mode.values():
        if phase["policy"] == "disabled":
            del phase["buckets"]
        elif emulate:
            phase["emulate"] = True
    return Engine(
        model,
        backend=backend,
        # Fewer slots than prompts, and fewer tokens a step than the longest prompt has.
        max_requests=2,
        max_len=max(LENGTHS) + NEW,
        max_step_tokens=64,
        config=dg.DeviceGraphConfig.from_json(json.dumps(mode)),
        fuse=fuse,
    )


def _line(error: Exception) -> str:
    # The last lines of a validation say what is wrong, the first that something is.
    return " ".join(str(error).replace("|", "/").split())[-200:]


def _why(error: UnsupportedModelError) -> str:
    """Return why in words that are the same for all families that are refused for it."""
    reason = str(error).split(" cannot run on device graphs here: ")[1].split(". Use a causal")[0]
    reason = re.sub(r"\b[A-Z]\w*(Attention|MLA)\b", "its attention", reason)
    return re.sub(r"\blayer \d+\b", "a layer", " ".join(reason.split()))
