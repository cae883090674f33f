"""Random steps: programs of tensor operations and marked functions, as Python source.

Every line of a program was run eagerly while it was written, so that it is known to work; the
programs are short and hold much of what is hard: views, work in place, memory that dies early,
results that share memory, and marked functions that depend on host arguments of every kind.
"""

from __future__ import annotations

import itertools
import linecache
import random
from collections.abc import Callable
from typing import Any

import attrs
import torch

import devgraph as dg

__all__ = ["Program", "make_program"]

WIDTH = 8
WEIGHT = torch.linspace(-1, 1, WIDTH * WIDTH).reshape(WIDTH, WIDTH)
STATE = torch.zeros(WIDTH)
"""What steps close over and write in place."""


def _like(x: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _nothing(*_: Any, **__: Any) -> None:
    return None


@dg.region(host_args=("n",), fake=_like)
def head(x: torch.Tensor, *, n: int) -> torch.Tensor:
    return (x + x[..., :n].sum(-1, keepdim=True)).contiguous()


@dg.region(host_args=("n", "gain"), mutates=("out",), fake=_nothing)
def accumulate(x: torch.Tensor, out: torch.Tensor, *, n: int, gain: float) -> None:
    out.add_(x * gain)
    out[..., :n].mul_(0.5)


@dg.region(host_args=("on",), fake=_like)
def switched(x: torch.Tensor, *, on: bool) -> torch.Tensor:
    """One host value needs more operations than the other."""
    return (x.tanh() * 2 if on else x + 1).contiguous()


@dg.region(host_args=("name",), fake=_like)
def named(x: torch.Tensor, *, name: str) -> torch.Tensor:
    return getattr(torch, name)(x).contiguous()


@dg.region(host_args=("lens",), reduce={"lens": lambda lens: -(-max(lens) // 4) * 4}, fake=_like)
def bucketed(x: torch.Tensor, *, lens: int) -> torch.Tensor:
    return (x - x[..., :lens].amax(-1, keepdim=True)).contiguous()


@dg.region(host_args=("n",), derive={"half": lambda n: n // 2}, mutates=("out",), fake=_nothing)
def halves(out: torch.Tensor, *, n: int, half: int) -> None:
    out[..., half:n].add_(1)


@dg.region(mutates=("x",), fake=lambda x: (_like(x), _like(x)))
def pair(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    x.mul_(0.5)
    return (x + STATE.mean()).contiguous(), (x - 1).contiguous()


@dg.region(host_args=("n", "on"), fake=_like)
def nested(x: torch.Tensor, *, n: int, on: bool) -> torch.Tensor:
    return head(switched(x, on=on), n=n) * 0.5


@dg.no_graph(mutates=("out",), fake=_nothing)
def on_host(out: torch.Tensor) -> None:
    out.mul_(float(out.detach().abs().amax()) / 4 + 0.25)


MARKED = {
    "{c} = head({a}, n=n)": 3,
    "accumulate({a}, {b}, n=n, gain=gain)": 3,
    "{c} = switched({a}, on=on)": 2,
    "{c} = named({a}, name=name)": 2,
    "{c} = bucketed({a}, lens=lens)": 2,
    "halves({a}, n=n)": 2,
    "{c}, {d} = pair({a})": 2,
    "{c} = nested({a}, n=n, on=on)": 2,
    "on_host({a})": 1,
    "graph_break()": 1,
}
"""Lines that call marked functions, with weights."""

PLAIN = {
    "{c} = {a} * 0.5 + {b}": 4,
    "{c} = torch.tanh({a} @ WEIGHT)": 3,
    "{c} = {a}.sum(-1, keepdim=True) + {b}": 2,
    "{c} = torch.cat([{a}, {b}])": 1,
    "{c} = torch.where({a} > 0, {a}, -{b})": 1,
    "{c} = torch.softmax({a}, -1)": 1,
    "{c} = torch.sort({a}, -1)[0]": 1,
    "{c} = {a}.to(torch.float64).mul(2).float()": 1,
    "{c} = torch.zeros_like({a})": 1,
    "{c} = {a}.clone()": 1,
    "{c} = {a}[:, 1:5]": 1,
    "{c} = {a}[0]": 1,
    "{c} = {a}.t()": 1,
    "{c} = {a}.reshape(-1)": 1,
    "{c} = {a}.unsqueeze(0).expand(2, *{a}.shape)": 1,
    "{c} = {a}[::2]": 1,
    "{a}.mul_(0.5)": 2,
    "{a}.add_({b})": 2,
    "{a}[:1].copy_({b}[:1])": 2,
    "torch.add({a}, {b}, out={b})": 1,
    "{a}.clamp_(-2, 2)": 1,
    "STATE.mul_(0.5).add_({a}.mean())": 1,
    "{a} = None": 2,
}


@attrs.frozen(kw_only=True)
class Program:
    """A step, its bound tensors, and what draws its host arguments."""

    source: str
    step: Callable[..., Any]
    inputs: list[torch.Tensor]
    host: Callable[[], dict[str, Any]]

    @property
    def memory(self) -> list[torch.Tensor]:
        """What the step writes besides its outputs."""
        return [*self.inputs, STATE]

    @property
    def needs_breaks(self) -> bool:
        """Whether policy ``full`` has to refuse it."""
        return "on_host(" in self.source


_numbers = itertools.count()


def make_program(rng: random.Random, *, marks: bool = True) -> Program:
    """Return a random program; the same for the same state of ``rng``."""
    rows = rng.randint(1, 4)
    inputs = [torch.randn(rows, WIDTH) for _ in range(rng.randint(1, 3))]
    if rng.random() < 0.3:
        inputs.append(inputs[0][:, 2:6])

    def host() -> dict[str, Any]:
        return {
            "n": rng.randint(1, WIDTH),
            "gain": rng.choice([0.5, 1.0, -0.0, 0.0, 2.5]),
            "on": rng.random() < 0.5,
            "name": rng.choice(["sin", "relu", "abs"]),
            "lens": [rng.randint(1, WIDTH) for _ in range(rng.randint(1, 3))],
        }

    arguments = [f"x{i}" for i in range(len(inputs))]
    body = _Body(dict(zip(arguments, inputs, strict=True)), host())
    wanted, tries = rng.randint(3, 14), 0
    while len(body.lines) < wanted and tries < 200:
        tries += 1
        body.grow(rng, MARKED if marks and rng.random() < 0.4 else PLAIN)
    # Something is always recorded, and something always returned.
    body.lines.append("last = x0 * 2")
    names = [*rng.sample(body.tensors, min(len(body.tensors), rng.randint(0, 3))), "last"]
    rng.shuffle(names)
    returned = rng.choice(
        [", ".join(names), f"{{'a': ({', '.join(names)},), 'b': [{names[0]}, 7, None]}}"]
    )
    lines = [*body.lines, f"return {returned}"]
    source = f"def step({', '.join(arguments)}, *, n, gain, on, name, lens):\n" + "".join(
        f"    {line}\n" for line in lines
    )
    return Program(source=source, step=_compiled(source), inputs=inputs, host=host)


def _compiled(source: str) -> Callable[..., Any]:
    file = f"<fuzz {next(_numbers)}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    namespace = _names()
    exec(compile(source, file, "exec"), namespace)
    step: Callable[..., Any] = namespace["step"]
    return step


def _names() -> dict[str, Any]:
    marked = (head, accumulate, switched, named, bucketed, halves, pair, nested, on_host)
    return {
        "torch": torch,
        "WEIGHT": WEIGHT,
        "STATE": STATE,
        "graph_break": dg.graph_break,
        **{function.__name__: function for function in marked},
    }


class _Body:
    """The lines so far, and what their names hold."""

    def __init__(self, inputs: dict[str, torch.Tensor], host: dict[str, Any]) -> None:
        copies = dict(zip(inputs, _copied(list(inputs.values())), strict=True))
        self._names = {**_names(), **host, **copies, "STATE": STATE.clone()}
        self._inputs = set(inputs)
        self.tensors = list(inputs)
        self.lines: list[str] = []

    def grow(self, rng: random.Random, templates: dict[str, int]) -> None:
        """Add a random line, if it works on these tensors."""
        template = rng.choices(list(templates), list(templates.values()))[0]
        new = {"c": f"v{len(self.lines)}", "d": f"w{len(self.lines)}"}
        line = template.format(a=rng.choice(self.tensors), b=rng.choice(self.tensors), **new)
        dropped = line.partition(" = None")[0] if line.endswith("= None") else None
        if dropped in self._inputs or (dropped and len(self.tensors) < 3):
            return
        names = dict(self._names)
        try:
            exec(line, names)
        except (RuntimeError, IndexError):
            return
        made = [name for name in new.values() if name in names]
        if any(names[name].numel() > 512 for name in made):
            return
        self._names = names
        self.lines.append(line)
        self.tensors += made
        if dropped:
            self.tensors.remove(dropped)


def _copied(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return copies that share memory among themselves as the tensors do."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().clone() for t in tensors}
    return [
        torch.empty(0).set_(
            storages[t.untyped_storage().data_ptr()], t.storage_offset(), t.shape, t.stride()
        )
        for t in tensors
    ]
