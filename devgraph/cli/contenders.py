"""What ``bench`` compares: a decode step run eagerly, under every policy, by other packages."""

from __future__ import annotations

import argparse
import functools
import importlib
import importlib.util
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from devgraph.api.backend import Backend
from devgraph.api.capture import Captured, capture
from devgraph.api.errors import CapabilityError, CaptureError, InputError, UpdateError
from devgraph.api.marks.marks import region
from devgraph.api.policy import breaks, compiles, policies
from devgraph.cli.measure import Timing, median, seconds_per_call
from devgraph.cli.tables import working


@attrs.frozen(kw_only=True)
class Row:
    """One way to run the step, and what it costs."""

    name: str
    host: float
    """Seconds until the call returns, median of the repeats."""
    wall: float
    """Seconds until its work is done, in a row of steps."""
    repeats: tuple[Timing, ...]
    difference: float
    """Largest difference from eager's outputs, relative to the largest of those."""
    equal: bool
    """Whether the outputs are right: eager's bit for bit, or, where a compiler chose other kernels,
    to half of the digits of the dtype."""
    capture_seconds: float | None = None
    pool_bytes: int | None = None
    segments: int | None = None
    nodes: int | None = None
    padding: float | None = None
    """Of rows computed in graphs, those without data."""
    eager_packs: int | None = None
    """Packs that ran outside a graph."""
    against: int = 0
    """The row of eager on the same work."""


class Contender:
    """One way to run the step: a call per step with the host argument of that step.

    Args:
        parts: what a call does so many times; figures are of one.
    """

    def __init__(
        self,
        name: str,
        call: Callable[..., Tensor],
        lengths: Callable[[], Iterator[int]],
        captured: Captured | None = None,
        *,
        exact: bool = True,
        parts: int = 1,
    ) -> None:
        self.name = name
        self._parts = parts
        self.exact = exact
        self.memory = None if captured is None else captured.pool.bytes
        self.takes_lengths = (
            captured is None
            or breaks(captured.policy)
            or captured.backend.capabilities.region_update
        )
        self.call = call
        self.captured = captured
        self.timings: list[Timing] = []
        self.equal = False
        self.difference = float("nan")
        self._lengths = lengths

    def time(self, backend: Backend, steps: int) -> None:
        """Time one repeat of ``steps`` steps."""
        lengths, call = self._lengths(), self.call
        spent = seconds_per_call(lambda: call(kv_len=next(lengths)), backend, calls=steps)
        self.timings.append(Timing(spent.host / self._parts, spent.wall / self._parts))

    def compare(self, expected: Tensor, got: Tensor) -> None:
        """Note how far one result is from eager's."""
        largest = expected.abs().max()
        self.difference = float(((got - expected).abs().max() / largest).item())
        if self.exact:
            self.equal = torch.equal(got, expected)
        else:
            self.equal = self.difference <= float(torch.finfo(expected.dtype).eps) ** 0.5

    def row(self) -> Row:
        """Return the medians of all repeats."""
        timing = median(self.timings)
        captured = self.captured
        info = None if captured is None else captured.info()
        return Row(
            name=self.name,
            host=timing.host,
            wall=timing.wall,
            repeats=tuple(self.timings),
            difference=self.difference,
            equal=self.equal,
            capture_seconds=None if captured is None else captured.capture_seconds,
            pool_bytes=self.memory,
            segments=None if info is None else info.segments,
            nodes=None if info is None else info.nodes,
        )


class Compared:
    """What the ways that ran cost."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        """Eager first."""
        self.absent: dict[str, str] = {}
        """Why ways have no row that this backend or machine does not offer."""
        self.failed: dict[str, str] = {}
        """The same of ways that should have worked."""


class Comparison(Compared):
    """One model, its bound arguments, every way to run it, and what those that ran cost."""

    def __init__(self, backend: Backend, shape: Shape, kv_len: int) -> None:
        super().__init__()
        self.backend, self.shape, self.kv_len = backend, shape, kv_len
        self.model = Decoder(shape, backend.device)
        self.ids = torch.arange(shape.batch, device=backend.device) % shape.vocabulary
        self.row = torch.zeros(1, dtype=torch.int64, device=backend.device)
        eager = Contender("eager", self._eager, lambda: itertools.repeat(kv_len))
        self.contenders = [eager]

    def _eager(self, **host: Any) -> Tensor:
        logits: Tensor = self.model(self.ids, self.row, **host)
        return logits

    def add_policies(self, policies: Sequence[str], compilers: Sequence[str]) -> None:
        """Capture the step under each policy, and piecewise with each compiler."""
        for policy in policies:
            declared = self.backend.capabilities.compilers
            chosen = tuple(compilers) or declared
            for compiler in chosen if compiles(policy) else (None,):
                name = policy if compiler is None else f"{policy}, {compiler}"
                try:
                    captured = capture(
                        self.model,
                        self.ids,
                        self.row,
                        policy=policy,
                        backend=self.backend,
                        host_args={"kv_len": self.kv_len},
                        compiler=compiler,
                    )
                except CapabilityError as error:
                    self.absent[name] = str(error)
                except CaptureError as error:
                    self.failed[name] = str(error)
                else:
                    self._add(name, captured, exact=compiler in (None, "eager"))

    def _add(self, name: str, captured: Captured, *, exact: bool) -> None:
        """Add the ways to replay one capture: one length, a few that return, always a new one."""
        kv_len, window = self.kv_len, self.shape.window

        def add(name: str, lengths: Callable[[], Iterator[int]]) -> None:
            way = Contender(name, captured.replay, lengths, captured, exact=exact)
            self.contenders.append(way)

        add(name, lambda: itertools.repeat(kv_len))
        if not breaks(captured.policy) and self.contenders[-1].takes_lengths and window > 1:
            known = [max(1, kv_len - i) for i in range(min(4, kv_len))]
            fresh = itertools.cycle(range(1, window + 1))
            add(f"{name}, 4 lengths in turn", lambda: itertools.cycle(known))
            add(f"{name}, other length each step", lambda: fresh)

    def add_public(self) -> None:
        """Capture the step with the public package for breaks, where it is installed."""
        public = public_breakable(self.backend, self.model, self.ids, self.row, self.kv_len)
        if public is not None:
            way = Contender(_PUBLIC, public, lambda: itertools.repeat(self.kv_len))
            self.contenders.append(way)

    def check(self) -> None:
        """Compare every way with eager on data that no capture saw, and at another length."""
        self.model.fill_caches()  # steps during captures wrote there, and their tokens are no data
        self.ids.copy_((self.ids + 1) % self.shape.vocabulary)
        self.row.fill_(self.kv_len - 1)
        other = max(1, self.kv_len - 1)
        expected = {n: self._eager(kv_len=n).clone() for n in (self.kv_len, other)}
        for contender in self.contenders:
            length = other if contender.takes_lengths else self.kv_len
            contender.compare(expected[length], contender.call(kv_len=length))

    def time(self, steps: int, repeats: int) -> None:
        """Let all take turns and keep their medians."""
        running = self._warm(min(steps, 3))
        for _ in range(repeats):
            for contender in running:
                contender.time(self.backend, steps)
        self.rows = [contender.row() for contender in running]

    def _warm(self, steps: int) -> list[Contender]:
        """Run every way a little, untimed; return those that can run."""
        running = []
        for contender in self.contenders:
            try:
                contender.time(self.backend, steps)
            except UpdateError as error:
                self.absent[contender.name] = str(error)
                continue
            contender.timings.clear()
            running.append(contender)
        return running

    def close(self) -> None:
        """Free all captures."""
        for contender in self.contenders:
            if contender.captured is not None:
                contender.captured.close()


def measure(backend: Backend, shape: Shape, kv_len: int, args: argparse.Namespace) -> Comparison:
    """Return what every way that can run costs."""
    compared = Comparison(backend, shape, kv_len)
    try:
        with working("capturing"):
            compared.add_policies(args.policy or policies(), args.compiler or ())
            compared.add_public()
        compared.check()
        with working("timing"):
            compared.time(args.steps, args.repeats)
    finally:
        compared.close()
    return compared


@attrs.frozen(kw_only=True)
class Shape:
    """Sizes of the model and of its batch."""

    layers: int
    hidden: int
    heads: int
    vocabulary: int
    batch: int
    window: int
    """Rows of the key and value cache of each request."""
    dtype: torch.dtype

    def __attrs_post_init__(self) -> None:
        if self.hidden % self.heads:
            raise InputError(
                f"hidden {self.hidden} is no multiple of {self.heads} heads; choose another size"
            )

    def to_dict(self) -> dict[str, object]:
        """Return the sizes as JSON has them."""
        return {**attrs.asdict(self), "dtype": str(self.dtype).removeprefix("torch.")}


@region(host_args=("kv_len",), mutates=("out",))
def attention(query: Tensor, keys: Tensor, values: Tensor, out: Tensor, *, kv_len: int) -> None:
    """Attend over the first ``kv_len`` rows of the cache; all are ``[batch, heads, rows, dim]``."""
    scores = torch.matmul(query, keys[:, :, :kv_len].transpose(-1, -2))
    weights = torch.softmax(scores * query.shape[-1] ** -0.5, dim=-1)
    out.copy_(torch.matmul(weights, values[:, :, :kv_len]))


class _Layer(nn.Module):
    keys: Tensor
    values: Tensor

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        hidden = shape.hidden
        self.heads = shape.heads
        self.before = nn.RMSNorm(hidden)
        self.qkv = nn.Linear(hidden, 3 * hidden, bias=False)
        self.project = nn.Linear(hidden, hidden, bias=False)
        self.after = nn.RMSNorm(hidden)
        self.up = nn.Linear(hidden, 8 * hidden, bias=False)
        self.down = nn.Linear(4 * hidden, hidden, bias=False)
        rows = (shape.batch, shape.heads, shape.window, hidden // shape.heads)
        self.register_buffer("keys", torch.empty(rows))
        self.register_buffer("values", torch.empty(rows))

    def forward(self, x: Tensor, row: Tensor, *, attend: Callable[..., None]) -> Tensor:
        query, key, value = (
            part.view(x.shape[0], self.heads, 1, -1)
            for part in self.qkv(self.before(x)).chunk(3, dim=-1)
        )
        self.keys.index_copy_(2, row, key)
        self.values.index_copy_(2, row, value)
        out = torch.empty_like(query)
        attend(query, self.keys, self.values, out)
        x = x + self.project(out.view(x.shape[0], -1))
        gate, up = self.up(self.after(x)).chunk(2, dim=-1)
        down: Tensor = self.down(nn.functional.silu(gate) * up)
        return x + down


class Decoder(nn.Module):
    """``layers`` decoder layers with caches, an embedding and a head; random weights, no autograd.

    Args:
        shape: sizes.
        device: where weights and caches are.
    """

    def __init__(self, shape: Shape, device: torch.device) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(shape.vocabulary, shape.hidden)
        self.layers = nn.ModuleList(_Layer(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.hidden)
        self.head = nn.Linear(shape.hidden, shape.vocabulary, bias=False)
        self.requires_grad_(False)
        self.to(device=device, dtype=shape.dtype)
        self.fill_caches()

    def fill_caches(self) -> None:
        """Put the same random keys and values into the caches every time."""
        generator = torch.Generator().manual_seed(0)
        for cache in self.buffers():
            cache.copy_(torch.randn(cache.shape, generator=generator))

    def forward(self, ids: Tensor, row: Tensor, *, kv_len: int) -> Tensor:
        """Return logits ``[batch, vocabulary]`` of one token for each request.

        Args:
            ids: ``[batch]``.
            row: ``[1]``, where in the caches the new keys and values go.
            kv_len: cache rows to attend over.
        """
        return self.step(ids, row, functools.partial(attention, kv_len=kv_len))

    def step(self, ids: Tensor, row: Tensor, attend: Callable[..., None]) -> Tensor:
        """Return what ``forward`` does, with ``attend`` in the place of ``attention``."""
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x, row, attend=attend)
        logits: Tensor = self.head(self.norm(x))
        return logits


_PUBLIC, _MODULE = "breakable-cuda-graphs", "breakable_cuda_graphs"
"""The public package for breaks, and what is imported of it."""


def public_breakable(
    backend: Backend, model: Decoder, ids: Tensor, where: Tensor, kv_len: int
) -> Callable[..., Tensor] | None:
    """Return the step as the package replays it, with its breaks at the same function.

    None without the package or its backend. The length, which the package hands to no eager body,
    is a variable that the body reads.
    """
    if backend.name != "cuda" or importlib.util.find_spec(_MODULE) is None:
        return None
    package = importlib.import_module(_MODULE)
    graph, length = package.BreakableCUDAGraph(), kv_len

    def attend(*tensors: Tensor) -> None:
        attention(*tensors, kv_len=length)

    def replay(*, kv_len: int) -> Tensor:
        nonlocal length
        length = kv_len
        graph.replay()
        return outputs

    streams = torch.get_device_module(ids.device)
    side = streams.Stream()
    side.wait_stream(streams.current_stream())
    with streams.stream(side):
        for _ in range(2):
            model(ids, where, kv_len=kv_len)
    streams.current_stream().wait_stream(side)
    with package.breakable_graph(graph):
        outputs = model.step(ids, where, package.no_graph(attend))
    return replay
