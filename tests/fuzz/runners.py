"""Random runners: slots, pads, outputs, variants, buckets and policies around one step."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import torch

import devgraph as dg

__all__ = ["RandomRunner"]

WIDTH, VOCAB, SCRATCH = 8, 20, 63
"""``SCRATCH`` is the row of the cache that pad values point to."""


@dg.region(host_args=("n",), mutates=("out",), fake=lambda *_, **__: None)
def attend(hidden: torch.Tensor, out: torch.Tensor, *, n: int) -> None:
    out.copy_(hidden)
    out[:, :n].add_(hidden[:, :n].sum(-1, keepdim=True))


class RandomRunner:
    """A runner, the step that it runs, and random batches for it.

    Results depend on every real row, on the cache and on the host argument, row by row, so that
    padding must not show.
    """

    def __init__(
        self, rng: random.Random, backend: Any, pool: dg.Pool, policy: str, share: Any = None
    ) -> None:
        self._rng = rng
        self.cache = torch.randn(SCRATCH + 1, WIDTH)
        self._table = torch.randn(VOCAB, WIDTH)
        self._weight = torch.randn(WIDTH, 4)
        self._prefill = rng.random() < 0.4
        self._extras = [name for name in ("bias", "mask", "scale") if rng.random() < 0.5]
        self._form = rng.choice(["tensor", "dict", "nested"])
        self.capacity = rng.choice([3, 6, 12])
        self.variants: list[dict[str, Any]] = [{}]
        if rng.random() < 0.4:
            self.variants.append({"lora": True})
        if not self._prefill and rng.random() < 0.5:
            self.variants.append({"width": rng.choice([2, 3])})
        buckets = rng.sample(range(1, self.capacity + 1), rng.randint(1, 3))
        config = {
            "policy": policy,
            "buckets": buckets,
            "capture": rng.choice(["eager", "eager", "lazy", "background"]),
            "max_padding": rng.choice([2.0, 8.0]),
            "executable_budget": rng.choice([None, None, 0, 4000]),
        }
        options: dict[str, Any] = {
            "outputs": self._outputs(),
            "variants": self.variants,
            "host_args": {"n": 3},
            "config": config,
            "backend": backend,
            "pool": pool,
            "progress": False,
            "bound": {"cache": self.cache},
            "share": share,
        }
        if self._prefill:
            # Graphs of this phase that are not whole depend on the number of tokens only.
            self.runner: Any = dg.PrefillRunner(
                self._body,
                self._slots(),
                tail=self._tail,
                max_tokens=self.capacity * 2,
                max_requests=self.capacity,
                **options,
            )
        else:
            self.runner = dg.DecodeRunner(
                lambda batch: self._tail(self._body(batch), batch),
                self._slots(),
                max_requests=self.capacity,
                **options,
            )
        self.about = f"{type(self.runner).__name__} {config} {self.variants} {self._extras}"

    def _slots(self) -> list[dg.InputSlot]:
        every = {
            "ids": (("tokens",), torch.int64, dg.Pad.zero()),
            "rows": (("tokens",), torch.int64, dg.Pad.fill(SCRATCH)),
            "bias": (("tokens", WIDTH), torch.float32, dg.Pad.zero()),
            "mask": (("tokens",), torch.bool, dg.Pad.fill(True)),
            "scale": (("requests",), torch.float32, dg.Pad.fill(1.0)),
            "starts": (("requests+1",), torch.int64, dg.Pad.last()),
        }
        names = ["ids", "rows", *self._extras, *(["starts"] if self._prefill else [])]
        self._rng.shuffle(names)
        return [dg.InputSlot(n, every[n][0], every[n][1], pad=every[n][2]) for n in names]

    def _outputs(self) -> Any:
        requests = dg.OutputSlot(rows="requests")
        tokens = dg.OutputSlot(rows="tokens")
        if self._form == "tensor":
            return requests
        if self._form == "dict":
            return {"logits": requests, "hidden": tokens}
        return (requests, [tokens])

    def _body(self, batch: Any) -> torch.Tensor:
        hidden = self._table[batch.ids] + 0.5 * self.cache[batch.rows]
        if "bias" in self._extras:
            hidden = hidden + batch.bias
        if "mask" in self._extras:
            hidden = torch.where(batch.mask[:, None], hidden, -hidden)
        self.cache.index_copy_(0, batch.rows, hidden)
        out = torch.empty_like(hidden)
        attend(hidden, out, n=batch.host.n)
        return out * 2 if batch.variant.get("lora") else out

    def _tail(self, hidden: torch.Tensor, batch: Any) -> Any:
        if self._prefill:
            picked = hidden[(batch.starts[1:] - 1).clamp(min=0)]
        else:
            picked = hidden.reshape(batch.requests, -1, WIDTH).sum(1)
        if "scale" in self._extras:
            picked = picked * batch.scale[:, None]
        logits = (picked[:, :, None] * self._weight).sum(1)
        if self._form == "tensor":
            return logits
        if self._form == "dict":
            return {"logits": logits, "hidden": hidden}
        return logits, [hidden]

    def batch(self) -> tuple[dict[str, torch.Tensor], dict[str, Any], dict[str, Any]]:
        """Return random inputs, host arguments and variant, now and then too many for a graph."""
        rng = self._rng
        variant = rng.choice(self.variants)
        width = variant.get("width", 1)
        requests = rng.randint(1, self.capacity + (rng.random() < 0.1))
        counts = [rng.randint(1, 2) if self._prefill else width for _ in range(requests)]
        tokens = sum(counts)
        inputs = {
            "ids": torch.randint(VOCAB, (tokens,)),
            "rows": torch.randperm(SCRATCH)[:tokens],
            "bias": torch.randn(tokens, WIDTH),
            "mask": torch.rand(tokens) < 0.5,
            "scale": torch.randn(requests),
            "starts": torch.tensor([0, *counts]).cumsum(0),
        }
        wanted = {"ids", "rows", *self._extras, *(["starts"] if self._prefill else [])}
        return {k: v for k, v in inputs.items() if k in wanted}, {"n": rng.randint(1, 8)}, variant

    def eager(
        self, inputs: dict[str, torch.Tensor], host: dict[str, Any], variant: dict[str, Any]
    ) -> Any:
        """Run the step itself on the batch as it is."""
        tokens = len(inputs["ids"])
        batch = SimpleNamespace(
            **inputs,
            host=SimpleNamespace(**host),
            variant=variant,
            requests=tokens // variant.get("width", 1),
        )
        return self._tail(self._body(batch), batch)
