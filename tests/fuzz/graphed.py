"""Random calls of graphed modules: signatures, grad modes, and mutations between calls."""

from __future__ import annotations

import contextlib
import copy
import random
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

import devgraph as dg

__all__ = ["GraphedPair"]

WIDTH = 4


class Net(nn.Module):
    """A module with weights, buffers that calls update, random numbers and constants."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        kinds = [
            lambda: nn.Linear(WIDTH, WIDTH),
            lambda: nn.BatchNorm1d(WIDTH),
            lambda: nn.Dropout(0.5),
            nn.GELU,
            lambda: nn.LayerNorm(WIDTH),
        ]
        self.layers = nn.ModuleList(rng.choice(kinds)() for _ in range(rng.randint(1, 4)))
        self.register_buffer("calls", torch.zeros(WIDTH))
        self.is_counting = rng.random() < 0.5

    def forward(self, x: Any, scale: Any = 1, *, extra: Any = None, way: str = "add") -> Any:
        parts = x if isinstance(x, tuple | list) else [*x.values()] if isinstance(x, dict) else [x]
        hidden = self.first(parts[0])
        for part in parts[1:]:
            hidden = hidden + part if way == "add" else hidden * part
        if isinstance(scale, int | float):
            hidden = hidden * scale
        for layer in self.layers:
            hidden = layer(hidden)
        if extra is not None:
            hidden = hidden + extra.to(hidden.dtype).sum()
        if self.is_counting:
            self.calls.add_(1)
            hidden = hidden + self.calls
        return {"hidden": hidden, "way": way, "more": (hidden.detach().sum(), scale)}


class GraphedPair:
    """A graphed module beside a copy that runs eagerly; both get all calls and mutations.

    Args:
        rng: source of choices.
        device: where the modules live.
        fail: raises an error with a text.
    """

    def __init__(
        self, rng: random.Random, device: torch.device, fail: Callable[[str], Any]
    ) -> None:
        self._rng, self._device, self._fail = rng, device, fail
        self.counts: Counter[str] = Counter()
        with device:
            self.plain = Net(rng)
        self.ours = copy.deepcopy(self.plain)
        self.options = {
            "max_graphs": rng.choice([1, 2, 8]),
            "warmup": rng.choice([0, 1, 2]),
            "clone": rng.random() < 0.7,
            "policy": rng.choice(["full", "full", "full", "breakable"]),
            "min_speedup": rng.choice([None, None, None, 1000.0, 0.001]),
        }
        if rng.random() < 0.3:
            ours = self.ours
            self.step = dg.graphed(
                lambda *a, **k: ours(*a, **k), backend=device.type, **self.options
            )
            self.call_ours: Any = self.step
        else:
            self.step = dg.graphed(self.ours, backend=device.type, **self.options)
            self.call_ours = self.ours
        self._last = "no change"
        self._signatures = [self._signature() for _ in range(rng.randint(1, 3))]
        self._modes = [self._mode() for _ in range(rng.randint(1, 2))]

    # Choices.

    def _signature(self) -> Callable[[], tuple[tuple[Any, ...], dict[str, Any]]]:
        rng = self._rng
        rows, form = rng.randint(2, 4), rng.choice(["one", "tuple", "dict", "twice", "strided"])
        needs_grad, keyword = rng.random() < 0.3, rng.random() < 0.3
        scale = rng.choice([1, 2, 0.5, True, None, "none", 0.0, -0.0])
        extra = rng.choice([None, torch.int64, torch.float64, torch.bool, torch.float16])
        way = rng.choice(["add", "multiply"])

        def tensor() -> torch.Tensor:
            x = torch.randn(rows, WIDTH, device=self._device)
            if form == "strided":
                x = torch.randn(WIDTH, rows, device=self._device).t()
            return x.requires_grad_(needs_grad)

        def arguments() -> tuple[tuple[Any, ...], dict[str, Any]]:
            x: Any = tensor()
            if form == "tuple":
                x = (x, tensor())
            elif form == "dict":
                x = {"b": x, "a": tensor()}
            elif form == "twice":
                x = [x, x]
            kwargs: dict[str, Any] = {"way": way} if way == "multiply" else {}
            if extra is not None:
                kwargs["extra"] = torch.randint(2, (3,), device=self._device).to(extra)
            if keyword:
                return (), {"x": x, "scale": scale, **kwargs}
            return (x, scale), kwargs

        return arguments

    def _mode(self) -> Callable[[], Any]:
        autocast = torch.autocast(self._device.type, torch.bfloat16)
        modes: list[Any] = [contextlib.nullcontext, torch.no_grad, torch.inference_mode]
        # On the CPU, torch's norms of bfloat16 data with float32 weights have other dtypes than its
        # metadata and its out variants.
        if not any(isinstance(layer, nn.BatchNorm1d | nn.LayerNorm) for layer in self.plain.layers):
            modes.append(lambda: autocast)
        return self._rng.choice(modes)

    def mutate(self) -> None:
        """Change both modules in the same way."""
        rng = self._rng
        kind = rng.choice(
            ["replace", "data", "copy", "load", "train", "part", "freeze", "zero", "step", "drop"]
        )
        self.counts[kind] += 1
        self._last = kind
        name = rng.choice([name for name, _ in self.plain.named_parameters()])
        owner, _, key = name.rpartition(".")
        new = torch.randn_like(self.plain.get_parameter(name))
        on = rng.random() < 0.5
        for net in (self.plain, self.ours):
            weight = net.get_parameter(name)
            if kind == "replace":
                setattr(net.get_submodule(owner), key, nn.Parameter(new.clone()))
            elif kind == "data":
                net.first.weight.data = torch.full_like(net.first.weight, 0.25)
            elif kind == "copy":
                with torch.no_grad():
                    weight.copy_(new)
            elif kind == "load":
                net.load_state_dict({**net.state_dict(), name: new.clone()}, assign=on)
            elif kind == "train":
                net.train(on)
            elif kind == "part":
                net.layers[0].train(on)
            elif kind == "freeze":
                weight.requires_grad_(on)
            elif kind == "zero":
                net.zero_grad(set_to_none=on)
            elif kind == "step":
                torch.optim.SGD(net.parameters(), lr=0.1).step()
            else:
                net.calls = torch.ones_like(net.calls)

    # Calls.

    def call(self) -> None:
        """Call both modules; outputs, gradients, buffers and random numbers must be equal."""
        args, kwargs = self._rng.choice(self._signatures)()
        mode, seed = self._rng.choice(self._modes), self._rng.randint(0, 9)
        has_backward = self._rng.random() < 0.8
        results = []
        for net, run in ((self.plain, self.plain), (self.ours, self.call_ours)):
            own_args, own_kwargs = self._own(args), self._own(kwargs)
            torch.manual_seed(seed)
            with mode(), warnings.catch_warnings():
                warnings.simplefilter("ignore", dg.DeviceGraphWarning)
                result = run(*own_args, **own_kwargs)
            tensors = [*map(torch.Tensor.clone, self._tensors(result))]
            if result["hidden"].requires_grad and has_backward:
                result["hidden"].float().square().sum().backward()
            inputs = self._tensors((own_args, own_kwargs))
            results.append(
                {
                    "outputs": tensors,
                    "constants": (result["way"], result["more"][1], result["hidden"].requires_grad),
                    "gradients of inputs": [t.grad for t in inputs],
                    "gradients": [p.grad for p in net.parameters()],
                    "buffers": [*net.buffers()],
                    "random state": [torch.get_rng_state()],
                }
            )
        self.counts["calls"] += 1
        for what, want in results[0].items():
            got = results[1][what]
            same = want == got if what == "constants" else all(map(self._same, want, got))
            if not same or len(want) != len(got):
                self._fail(
                    f"after {self._last}: {what} of {args}, {kwargs} with {self.options}: {got}, "
                    f"eagerly {want}"
                )

    def _own(self, tree: Any) -> Any:
        """Return a tree with leaf tensors of its own, and repetitions kept."""
        copies: dict[int, torch.Tensor] = {}

        def own(t: torch.Tensor) -> torch.Tensor:
            plain = t.detach()
            strided = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device)
            return copies.setdefault(id(t), strided.copy_(plain).requires_grad_(t.requires_grad))

        return pytree.tree_map_only(torch.Tensor, own, tree)

    @staticmethod
    def _tensors(tree: Any) -> list[torch.Tensor]:
        return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]

    @staticmethod
    def _same(want: torch.Tensor | None, got: torch.Tensor | None) -> bool:
        if want is None or got is None:
            return want is got
        one, other = (
            t.detach().cpu().reshape(-1).contiguous().view(torch.uint8) for t in (want, got)
        )
        return want.dtype == got.dtype and torch.equal(one, other)

    def close(self) -> None:
        """Count the replays and close the graphs."""
        stats = self.step.stats()
        self.counts["replays"] += stats["replays"]
        self.counts["recaptures"] += stats["recaptures"]
        for reason, number in stats["eager"].items():
            self.counts[f"eager {reason}"] += number
        self.step.close()
