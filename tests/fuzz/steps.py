"""Random steps: programs of tensor operations and marked functions, as Python source.

Every line of a program was run eagerly while it was written, so that it is known to work; the
programs are short and hold much of what is hard: views, work in place, memory that dies early,
results that share memory, and marked functions that depend on host arguments of every kind.
"""

from __future__ import annotations

import functools
import itertools
import linecache
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import torch

import devgraph as dg

__all__ = [
    "IN_PLACE",
    "KEPT",
    "KINDS",
    "MARKED",
    "PLAIN",
    "SHARING",
    "TRASH",
    "TYPED",
    "WIDTH",
    "Drawn",
    "Program",
    "fill",
    "make_program",
]

WIDTH = 8
AMBIENT = [1]
"""What a region reads that is no argument."""
KEPT: list[Any] = []
"""Where a region leaves its last result."""
TRASH: list[Any] = []
"""What a step drops while it runs: graphs, in a capture as well."""


@functools.cache
def _weight(device: str) -> torch.Tensor:
    return torch.linspace(-1, 1, WIDTH * WIDTH).reshape(WIDTH, WIDTH).to(device)


@functools.cache
def _state(device: str) -> torch.Tensor:
    """Return what steps close over and write in place."""
    return torch.zeros(WIDTH).to(device)


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
    x = x * 1.0  # a dtype of its own for each value would be refused
    return (x.tanh() * 2 if on else x + 1).contiguous()


@dg.region(host_args=("name",), fake=_like)
def named(x: torch.Tensor, *, name: str) -> torch.Tensor:
    return getattr(torch, name)(x * 1.0).contiguous()


@dg.region(host_args=("lens",), reduce={"lens": lambda lens: -(-max(lens) // 4) * 4}, fake=_like)
def bucketed(x: torch.Tensor, *, lens: int) -> torch.Tensor:
    return (x - x[..., :lens].amax(-1, keepdim=True)).contiguous()


@dg.region(host_args=("n",), derive={"half": lambda n: n // 2}, mutates=("out",), fake=_nothing)
def halves(out: torch.Tensor, *, n: int, half: int) -> None:
    out[..., half:n].add_(1)


@dg.region(mutates=("x",), fake=lambda x: (_like(x), _like(x)))
def pair(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    x.mul_(0.5)
    return (x + _state(x.device.type).mean()).contiguous(), (x - 1).contiguous()


@dg.region(host_args=("n", "on"), fake=_like)
def nested(x: torch.Tensor, *, n: int, on: bool) -> torch.Tensor:
    return head(switched(x, on=on), n=n) * 0.5


@dg.region(host_args=("n",))
def passed(x: torch.Tensor, *, n: int) -> torch.Tensor:
    """A view of the argument, which it writes."""
    x[..., :n].mul_(2)
    return x[..., 1:3]


@dg.region(host_args=("n",))
def same_twice(x: torch.Tensor, *, n: int) -> tuple[torch.Tensor, torch.Tensor]:
    out = x + n
    return out, out


@dg.region(host_args=("gain",))
def overlapping(x: torch.Tensor, *, gain: float) -> list[torch.Tensor]:
    out = x * gain
    return [out[..., 1:], out]


@dg.region(host_args=("n",))
def scalar(x: torch.Tensor, *, n: int) -> torch.Tensor:
    return x[..., :n].sum()


@dg.region(host_args=("n",))
def nothing_of(x: torch.Tensor, *, n: int) -> torch.Tensor:
    return (x * n)[:0]


@dg.region(host_args=("n",))
def compared(x: torch.Tensor, *, n: int) -> torch.Tensor:
    return x > n / 8


@dg.region(host_args=("gain",))
def rotated(x: torch.Tensor, *, gain: float) -> torch.Tensor:
    return (x.to(torch.complex64) * complex(0, gain)).conj()


@dg.region(host_args=("n",))
def spread(x: torch.Tensor, *, n: int) -> torch.Tensor:
    return x[..., :n].sum(-1, keepdim=True).expand_as(x)


@dg.region(context=lambda: AMBIENT[0])
def ambient(x: torch.Tensor, *, context: int) -> torch.Tensor:
    return x * context


@dg.region(host_args=("n",))
def kept(x: torch.Tensor, *, n: int) -> torch.Tensor:
    KEPT[:] = [x - n]
    return KEPT[0]


@dg.region(host_args=("n",))
def of_state(x: torch.Tensor, *, n: int) -> torch.Tensor:
    """What it closes over."""
    state = _state(x.device.type)
    state[:n].add_(1)
    return state[2:]


@dg.no_graph
def turned(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    out = x * float(x.detach().abs().amax() > 0.5)
    return out, out[..., None]


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

SHARING = {
    "{c} = passed({a}, n=n)": 2,
    "{c}, {d} = same_twice({a}, n=n)": 1,
    "{c}, {d} = overlapping({a}, gain=gain)": 2,
    "{c} = scalar({a}, n=n)": 1,
    "{c} = nothing_of({a}, n=n)": 1,
    "{c} = compared({a}, n=n)": 1,
    "{c} = rotated({a}, gain=gain)": 1,
    "{c} = spread({a}, n=n)": 1,
    "{c} = ambient({a})": 2,
    "{c} = kept({a}, n=n)": 1,
    "{c} = of_state({a}, n=n)": 1,
    "{c}, {d} = turned({a})": 1,
    "{c} = beside(lambda {a}={a}: head({a}, n=n) * 2)": 1,
}
"""Lines whose marked functions torch.compile cannot take: results that share memory, or have
another shape than their argument."""

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


TYPED = {
    "{c} = {a} > {b}": 2,
    "{c} = {a}.bool()": 1,
    "{c} = {a} & {b}": 1,
    "{c} = {a}.to(torch.complex64) * (1 + 2j)": 2,
    "{c} = {a}.conj()": 2,
    "{c} = {a}.imag": 2,
    "{c} = torch.view_as_real({a})": 1,
    "{c} = {a}.to(torch.float8_e4m3fn)": 1,
    "{c} = {a}.float()": 2,
    "{c} = {a}.to(torch.bfloat16)": 1,
    "{c} = {a}.view(torch.int32)": 1,
    "{c} = {a}.mean()": 1,
    "{c} = {a}[:0]": 1,
    "{c} = {a}.contiguous()": 1,
    "{c} = {a}.detach()": 1,
    "{c} = {a}.cumsum(-1)": 1,
    "{c}, {d} = {a}.chunk(2, -1)": 1,
    "{c} = {a}.reshape(-1).unfold(0, 3, 1)": 1,
    "{c} = torch.full((2,), 3.0, device=DEVICE)": 1,
    "{c} = torch.empty_like({a}).copy_({b})": 1,
    "{a}.zero_()": 1,
    "{a}[..., :2] = {b}[..., :2]": 1,
    "torch._foreach_add_([{a}, {b}], 1)": 1,
    "{c} = beside(lambda {a}={a}: {a} + 1)": 1,
    "{c} = beside(lambda {a}={a}, {b}={b}: {a}.mul_(0.5) + {b})": 2,
    "TRASH.clear()": 1,
}
"""Lines of other dtypes and layouts, on other streams, and one that drops a graph."""

IN_PLACE = {"{a}.t_()": 1, "{a}.unsqueeze_(0)": 1}
"""Lines that change the layout of a tensor that is no argument."""

KINDS: dict[str, Callable[[int], torch.Tensor]] = {
    "bool": lambda rows: torch.zeros(rows, WIDTH, dtype=torch.bool),
    "int64": lambda rows: torch.zeros(rows, WIDTH, dtype=torch.int64),
    "half": lambda rows: torch.zeros(rows, WIDTH, dtype=torch.float16),
    "complex": lambda rows: torch.zeros(rows, WIDTH, dtype=torch.complex64),
    "float8": lambda rows: torch.zeros(rows, WIDTH, dtype=torch.float8_e4m3fn),
    "empty": lambda rows: torch.zeros(0, WIDTH),
    "scalar": lambda rows: torch.zeros(()),
    "turned": lambda rows: torch.zeros(WIDTH, rows).t(),
    "expanded": lambda rows: torch.zeros(1, WIDTH).expand(rows, WIDTH),
    "every other": lambda rows: torch.zeros(2 * rows, WIDTH)[1::2],
}
"""Arguments besides plain ones."""


@attrs.frozen(kw_only=True)
class Drawn:
    """What programs may hold on one kind of device."""

    device: str = "cpu"
    plain: Mapping[str, int] = PLAIN
    marked: Mapping[str, int] = MARKED
    kinds: Sequence[str] = ()
    beside: Callable[[Callable[[], Any]], Any] = lambda work: work()
    """Does work on another stream that forks from the current one and joins it."""


@attrs.frozen(kw_only=True)
class Program:
    """A step, its bound tensors, and what draws its host arguments."""

    source: str
    step: Callable[..., Any]
    inputs: list[torch.Tensor]
    host: Callable[[], dict[str, Any]]
    memory: list[torch.Tensor]
    """What the step may write besides its outputs: all that its arguments lie in, and what it
    closes over."""

    @property
    def needs_breaks(self) -> bool:
        """Whether policy ``full`` has to refuse it."""
        return "on_host(" in self.source or "turned(" in self.source


_numbers = itertools.count()


def make_program(rng: random.Random, drawn: Drawn) -> Program:
    """Return a random program; the same for the same state of ``rng``."""
    rows, device = rng.randint(1, 4), drawn.device
    inputs = [torch.randn(rows, WIDTH, device=device) for _ in range(rng.randint(1, 3))]
    for kind in rng.sample(drawn.kinds, min(len(drawn.kinds), rng.randint(0, 2))):
        made = KINDS[kind](rows)
        inputs.append(_copied([made], device)[0])
    storages = {t.untyped_storage().data_ptr(): t for t in inputs}.values()
    memory = [_whole(tensor) for tensor in storages]
    if rng.random() < 0.3:
        inputs.append(inputs[0][:, 2:6])

    def host() -> dict[str, Any]:
        AMBIENT[0] = rng.randint(1, 4)
        return {
            "n": rng.randint(1, WIDTH),
            "gain": rng.choice([0.5, 1.0, -0.0, 0.0, 2.5]),
            "on": rng.random() < 0.5,
            "name": rng.choice(["sin", "tanh", "abs"]),
            "lens": [rng.randint(1, WIDTH) for _ in range(rng.randint(1, 3))],
        }

    arguments = [f"x{i}" for i in range(len(inputs))]
    for tensor in memory:
        fill(tensor)
    body = _Body(dict(zip(arguments, inputs, strict=True)), host(), drawn)
    wanted, tries = rng.randint(3, 14), 0
    while len(body.lines) < wanted and tries < 200:
        tries += 1
        body.grow(rng, drawn.marked if rng.random() < 0.4 else drawn.plain)
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
    return Program(
        source=source,
        step=_compiled(source, drawn),
        inputs=inputs,
        host=host,
        memory=[*memory, _state(device)],
    )


def fill(tensor: torch.Tensor) -> None:
    """Write random numbers."""
    real = torch.randn(tensor.shape)
    if tensor.dtype is torch.bool:
        tensor.copy_(real > 0)
    elif tensor.dtype is torch.complex64:
        tensor.copy_(torch.complex(real, torch.randn(tensor.shape)))
    else:
        tensor.copy_((real if tensor.is_floating_point() else real * 4).to(tensor.dtype))


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return all the memory that ``tensor`` is part of."""
    size = tensor.untyped_storage().nbytes() // tensor.itemsize
    return tensor.as_strided((size,), (1,), 0)


def _compiled(source: str, drawn: Drawn) -> Callable[..., Any]:
    file = f"<fuzz {next(_numbers)}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    namespace = _names(drawn)
    exec(compile(source, file, "exec"), namespace)
    step: Callable[..., Any] = namespace["step"]
    return step


def _names(drawn: Drawn) -> dict[str, Any]:
    marked = (head, accumulate, switched, named, bucketed, halves, pair, nested, on_host)
    marked += (passed, same_twice, overlapping, scalar, nothing_of, compared, rotated, spread)
    marked += (ambient, kept, of_state, turned)
    return {
        "torch": torch,
        "DEVICE": drawn.device,
        "WEIGHT": _weight(drawn.device),
        "STATE": _state(drawn.device),
        "TRASH": TRASH,
        "beside": drawn.beside,
        "graph_break": dg.graph_break,
        **{function.__name__: function for function in marked},
    }


class _Body:
    """The lines so far, and what their names hold."""

    def __init__(self, inputs: dict[str, torch.Tensor], host: dict[str, Any], drawn: Drawn) -> None:
        # On the CPU, which raises where a device is lost.
        copies = dict(zip(inputs, _copied(list(inputs.values()), "cpu"), strict=True))
        names = _names(attrs.evolve(drawn, device="cpu", beside=lambda work: work()))
        self._names = {**names, **host, **copies, "STATE": names["STATE"].clone()}
        self._inputs = set(inputs)
        self.tensors = list(inputs)
        self.lines: list[str] = []

    def grow(self, rng: random.Random, templates: Mapping[str, int]) -> None:
        """Add a random line, if it works on these tensors."""
        template = rng.choices(list(templates), list(templates.values()))[0]
        new = {"c": f"v{len(self.lines)}", "d": f"w{len(self.lines)}"}
        line = template.format(a=rng.choice(self.tensors), b=rng.choice(self.tensors), **new)
        dropped = line.partition(" = None")[0] if line.endswith("= None") else None
        if dropped in self._inputs or (dropped and len(self.tensors) < 3):
            return
        names = dict(self._names)
        if template in IN_PLACE and any(
            names[line.partition(".")[0]] is names[name] for name in (*self._inputs, "STATE")
        ):
            return
        try:
            exec(line, names)
        except (RuntimeError, IndexError, TypeError, ValueError, SyntaxError):
            return
        made = [name for name in new.values() if name in names]
        if any(names[name].numel() > 512 for name in made):
            return
        self._names = names
        self.lines.append(line)
        self.tensors += made
        if dropped:
            self.tensors.remove(dropped)


def _copied(tensors: list[torch.Tensor], device: str) -> list[torch.Tensor]:
    """Return copies that share memory among themselves as the tensors do."""
    memories = {t.untyped_storage().data_ptr(): _whole(t).to(device, copy=True) for t in tensors}
    return [
        memories[t.untyped_storage().data_ptr()].as_strided(t.shape, t.stride(), t.storage_offset())
        for t in tensors
    ]
