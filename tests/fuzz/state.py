"""Random steps over state of every kind, which is mutated between replays.

A step reads a random choice of ``READS`` and writes some of ``WRITES``. It exists twice, each time
with a world of its own: one is captured, its twin runs eagerly. After a mutation of both, a replay
must equal the twin bit for bit, with all state, or be refused with a typed error.
"""

from __future__ import annotations

import collections
import contextvars
import dataclasses
import enum
import functools
import math
import random
import re
import types
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import attrs
import torch
from torch import nn
from torch.nn import functional
from torch.utils import _pytree as pytree

import devgraph as dg

WIDTH = 4

DEVICE = [torch.device("cpu")]
"""The device of the state of all worlds."""


@attrs.frozen
class Read:
    """One way to read state: the code that makes it, an expression, and ways to change it."""

    make: str
    expression: str
    mutations: tuple[str, ...]
    before: str = ""
    """Statements in the step before the expression."""


def _linear(seed: int) -> nn.Linear:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Linear(WIDTH, WIDTH).to(DEVICE[0])


def _vector(seed: int) -> torch.Tensor:
    return torch.randn(WIDTH, generator=torch.Generator().manual_seed(seed)).to(DEVICE[0])


def _generator(seed: int) -> torch.Generator:
    return torch.Generator(DEVICE[0]).manual_seed(seed)


def _default_generators() -> list[Any]:
    """Return what holds the default generator of the CPU and that of the device."""
    on_cpu = DEVICE[0].type == "cpu"
    return [torch] if on_cpu else [torch, torch.get_device_module(DEVICE[0])]


def _random_states() -> list[torch.Tensor]:
    return [space.get_rng_state() for space in _default_generators()]


class Net(nn.Module):
    """A module of a user with parameters, buffers, plain attributes and a branch."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.inner = _linear(seed)
        self.norm = nn.BatchNorm1d(WIDTH).to(DEVICE[0])
        self.drop = nn.Dropout(0.5)
        self.scale = 1.5
        self.blocks = nn.ModuleList([_linear(seed + 1), nn.ReLU()])
        self.register_buffer("offset", _vector(seed + 2))
        self.extra: dict[str, Any] = {"gain": 2.0}

    @property
    def gain(self) -> float:
        return self.extra["gain"] * 0.5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.drop(self.inner(x) * self.scale + self.offset) * self.gain


class Mode(enum.Enum):
    SUM = 1
    MEAN = 2


@dataclasses.dataclass
class Config:
    """Settings as users keep them."""

    gain: float = 2.0
    flags: tuple[int, ...] = (1, 2)
    inner: Any = None


class Holder:
    """An object of a user with class attributes and methods."""

    LEVEL = 3
    table: ClassVar[list[float]] = [1.0, 2.0]

    def __init__(self) -> None:
        self.value = 1.25
        self.cache = _vector(5)

    def read(self) -> torch.Tensor:
        return self.cache * self.value

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.LEVEL + self.table[-1]


class Settings:
    """Settings whose attributes and entries are in a dictionary."""

    def __init__(self, **data: Any) -> None:
        self.data = data

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["data"][name]
        except KeyError:
            raise AttributeError(name) from None

    def __getitem__(self, name: str) -> Any:
        return self.data[name]


class Point(NamedTuple):
    scale: float
    shift: torch.Tensor


def _wrapping(fn: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(fn)
    def wrapper(*args: Any) -> Any:
        return fn(*args) + 1

    return wrapper


class Slotted:
    __slots__ = ("tensor", "value")

    def __init__(self) -> None:
        self.value, self.tensor = 3, _vector(6)


SETTINGS = Read(
    "",
    "x + torch.zeros(WIDTH, device=x.device).add(math.pi).to(x.dtype)",
    (
        "torch.set_default_dtype(torch.float64)",
        "torch.set_default_dtype(torch.float32)",
        "torch.use_deterministic_algorithms(True)",
    ),
)
"""Settings of the process. A capture keeps its own, and a graphed callable follows them."""

READS: tuple[Read, ...] = (
    Read(
        "net = Net(7).eval()",
        "net(x)",
        (
            "net.inner.weight.data.mul_(1.5)",
            "net.inner.weight.data = net.inner.weight.data * 2",
            "net.inner.weight = nn.Parameter(net.inner.weight.detach() + 1)",
            "net.inner = _linear(9)",
            "net.load_state_dict({k: v + 1 for k, v in net.state_dict().items()})",
            "net.load_state_dict({k: v + 1 for k, v in net.state_dict().items()}, assign=True)",
            "net.blocks[0] = _linear(11)",
            "net.blocks.append(nn.Tanh())",
            "net.scale = 2.5",
            "net.scale = float('1.5')",
            "net.train()",
            "net.offset = _vector(12)",
            "net.offset.add_(1)",
            "net.extra['gain'] = 3.0",
            "net.extra = {'gain': 2.0}",
            "net.inner.register_forward_hook(_double)",
            "net.register_forward_pre_hook(_halve)",
            "net.requires_grad_(False)",
            "net.double().float()",
            "net.inner.forward = lambda y: y + 1",
            "net.drop.p = 0.25",
        ),
    ),
    Read(
        "norm = nn.BatchNorm1d(WIDTH).to(DEVICE)",
        "norm(x)",
        (
            "norm.eval()",
            "norm.running_mean.add_(1)",
            "norm.reset_running_stats()",
            "norm.momentum = 0.5",
            "norm.weight = nn.Parameter(_vector(13))",
            "norm.eps = 1e-2",
        ),
    ),
    Read(
        "cache = {'k': _vector(1), 'v': [_vector(2), _vector(3)]}",
        "x + cache['k'] + cache['v'][0] * cache['v'][-1]",
        (
            "cache['k'].mul_(2)",
            "cache['k'] = _vector(21)",
            "cache['v'].append(_vector(22))",
            "cache['v'].reverse()",
            "cache['v'][0] = cache['v'][1]",
            "cache['new'] = _vector(23)",
            "cache['v'] = [t.clone() for t in cache['v']]",
            "cache['k'].resize_(WIDTH)",
            "del cache['v'][1:]",
        ),
    ),
    Read(
        "items = [0.5, 1.5, 2.5]",
        "x * sum(items) + len(items)",
        (
            "items.append(1.0)",
            "items[1] = 9.0",
            "items[:] = [0.5, 1.5, 2.5]",
            "items.reverse()",
            "items.clear()",
        ),
    ),
    Read(
        "config = Config(inner=Config(gain=0.75))",
        "x * config.gain + sum(config.flags) + config.inner.gain",
        (
            "config.gain = 4.0",
            "config.flags = (1, 2)",
            "config.flags = (5,)",
            "config.inner.gain = 0.25",
            "config.inner = Config(gain=0.75)",
            "config.inner = Config(gain=8.0)",
        ),
    ),
    Read(
        "holder = Holder()",
        "holder(x) + holder.read()",
        (
            "holder.value = 5.0",
            "holder.cache.add_(1)",
            "holder.cache = _vector(31)",
            "holder.LEVEL = 7",
            "holder.table = [4.0]",
            "holder.read = lambda: 1.0",
            "holder.unrelated = 3",
        ),
    ),
    Read(
        "slotted = Slotted()",
        "x * slotted.value + slotted.tensor",
        ("slotted.value = 4", "slotted.tensor = _vector(41)", "slotted.tensor.zero_()"),
    ),
    Read(
        "level = 2",
        "x * level",
        ("world['level'] = 5", "world['level'] = 2", "world['level'] = 2.5"),
    ),
    Read(
        "act = functional.relu",
        "act(x)",
        ("world['act'] = torch.tanh", "world['act'] = functional.relu"),
    ),
    Read(
        "mode = Mode.SUM",
        "(x.sum() if mode is Mode.SUM else x.mean())",
        ("world['mode'] = Mode.MEAN", "world['mode'] = Mode.SUM"),
    ),
    Read(
        "names = {'a', 'b'}",
        "(x + 1 if 'a' in names else x - 1)",
        ("names.discard('a')", "names.add('c')", "names.clear()"),
    ),
    Read(
        "window = collections.deque([_vector(51), _vector(52)], maxlen=2)",
        "x + window[0] - window[-1]",
        ("window.append(_vector(53))", "window.rotate(1)", "window[0].add_(2)"),
    ),
    Read(
        "space = types.SimpleNamespace(a=1.0, b=_vector(61))",
        "x * space.a + space.b",
        ("space.a = 2.0", "space.b = _vector(62)", "space.b.mul_(3)", "space.c = 1"),
    ),
    Read(
        "scaled = functools.partial(torch.mul, other=3.0)",
        "scaled(x)",
        (
            "world['scaled'] = functools.partial(torch.mul, other=4.0)",
            "world['scaled'] = functools.partial(torch.mul, other=3.0)",
        ),
    ),
    Read(
        "closed, set_closed = _closure()",
        "closed(x)",
        ("set_closed(9.0)", "set_closed(1.0)"),
    ),
    Read(
        "noise = _generator(71)",
        "x + torch.rand(WIDTH, generator=noise, device=x.device)",
        (
            "noise.manual_seed(72)",
            "torch.rand(3, generator=noise, device=DEVICE)",
            "world['noise'] = _generator(73)",
        ),
    ),
    Read(
        "unused_noise = 0",
        "x + torch.rand(WIDTH, device=x.device)",
        ("torch.manual_seed(74)", "torch.rand(5, device=DEVICE)"),
    ),
    Read(
        "frozen = (1.0, _vector(81))",
        "x * frozen[0] + frozen[1]",
        ("world['frozen'] = (2.0, frozen[1])", "world['frozen'] = (1.0, frozen[1])"),
    ),
    Read(
        "layers = [{'w': _vector(91), 'on': True}, {'w': _vector(92), 'on': False}]",
        "x",
        (
            "layers[1]['on'] = True",
            "layers[0]['on'] = False",
            "layers[0]['w'] = _vector(93)",
            "layers.pop()",
            "layers.append({'w': _vector(94), 'on': True})",
            "layers[0]['w'].mul_(2)",
        ),
        before="for layer in layers:\n        x = x + layer['w'] if layer['on'] else x",
    ),
    Read(
        "numbers = np.arange(4.0, dtype=np.float32)",
        "x + float(numbers[1])",
        ("numbers[1] = 5.0", "numbers[2] = 5.0", "world['numbers'] = numbers * 2"),
    ),
    Read(
        "index = 1\nrows = torch.stack([_vector(1), _vector(2), _vector(3)])",
        "x + rows[index]",
        ("world['index'] = 2", "rows[1].add_(1)", "world['rows'] = rows.clone()"),
    ),
    Read(
        "by_name = types.SimpleNamespace(w0=_vector(3), w1=_vector(4))",
        "x + sum(getattr(by_name, f'w{i}') for i in range(2))",
        ("by_name.w1 = _vector(5)", "by_name.w0.add_(1)"),
    ),
    Read(
        "optional = types.SimpleNamespace(bias=None)",
        "(x if optional.bias is None else x + optional.bias)",
        ("optional.bias = _vector(6)", "optional.bias = None"),
    ),
    Read(
        "class Tuned:\n    factor = 2.0\n    def run(self, x):\n        return x * self.factor\n"
        "tuned = Tuned()",
        "tuned.run(x)",
        ("Tuned.factor = 3.0", "tuned.factor = 4.0", "Tuned.run = lambda self, x: x - 1"),
    ),
    Read(
        "parts = [_linear(101), nn.Tanh()]\nby_key = {'a': _linear(102), 'b': nn.ReLU()}",
        "x",
        (
            "parts[0] = _linear(103)",
            "parts[0].weight.data.mul_(2)",
            "parts[0].weight = nn.Parameter(_linear(104).weight.detach())",
            "parts.reverse()",
            "parts.append(nn.ReLU())",
            "by_key['a'] = _linear(105)",
            "by_key['c'] = nn.ReLU()",
        ),
        before="for module in [*parts, *by_key.values()]:\n        x = module(x)",
    ),
    Read(
        "model = types.SimpleNamespace(config=Config(), bias=_vector(7))\n"
        "engine = types.SimpleNamespace(model=model)",
        "x * engine.model.config.gain + engine.model.bias",
        (
            "engine.model.config.gain = 5.0",
            "engine.model.config = Config()",
            "engine.model = types.SimpleNamespace(config=Config(3.0), bias=engine.model.bias)",
            "engine.model.bias = engine.model.bias * 2",
            "engine.model.bias.mul_(2)",
        ),
    ),
    Read(
        "settings = Settings(gain=2.0, rows=3)",
        "x * settings.gain + settings['rows']",
        ("settings.data['gain'] = 4.0", "settings.data['rows'] = 2", "settings.data['other'] = 1"),
    ),
    Read(
        "layers_by_name = {f'layer_{i}': _vector(110 + i) for i in range(3)}",
        "x + sum(layers_by_name[f'layer_{i}'] for i in range(len(layers_by_name)))",
        (
            "layers_by_name['layer_1'] = _vector(113)",
            "layers_by_name['layer_3'] = _vector(114)",
            "layers_by_name.pop('layer_2')",
            "layers_by_name['layer_0'].neg_()",
        ),
    ),
    Read(
        "ordered = {'a': 2.0, 'b': 3.0}",
        "x * next(iter(ordered.values())) + len(ordered)",
        (
            "ordered['c'] = 1.0",
            "ordered.update(a=5.0)",
            "ordered['a'] = ordered.pop('a')",
            "ordered.clear()",
        ),
    ),
    Read(
        "kept_fn = Holder().read",
        "x + kept_fn()",
        ("kept_fn.__self__.value = 3.0", "world['kept_fn'] = Holder().read"),
    ),
    Read(
        "settings_module = types.ModuleType('users_settings')\nsettings_module.scale = 2.0\n"
        "settings_module.shift = lambda x: x + 1",
        "settings_module.shift(x) * settings_module.scale",
        (
            "settings_module.scale = 3.0",
            "settings_module.shift = lambda x: x - 1",
            "settings_module.other = 1",
        ),
    ),
    Read(
        "variable = contextvars.ContextVar('variable', default=2.0)",
        "x * variable.get()",
        ("variable.set(3.0)", "variable.set(2.0)"),
    ),
    Read(
        "piece = slice(0, 2)\ndtype = torch.float32\nsize = torch.Size([WIDTH])",
        "x.to(dtype)[:, piece].sum() + torch.ones(size, device=x.device)",
        (
            "world['piece'] = slice(1, 4)",
            "world['dtype'] = torch.float64",
            "world['piece'] = slice(0, 2)",
        ),
    ),
    Read(
        "point = Point(1.0, _vector(120))",
        "x * point.scale + point.shift",
        ("world['point'] = point._replace(scale=3.0)", "point.shift.add_(1)"),
    ),
    Read(
        "tied = _linear(130)\nhead = nn.Sequential(tied, nn.ReLU(), tied)",
        "head(x)",
        (
            "tied.weight.data.mul_(0.5)",
            "head[2] = _linear(131)",
            "tied.weight = nn.Parameter(tied.weight.detach() * 2)",
        ),
    ),
    Read(
        "normed = torch.nn.utils.parametrizations.weight_norm(_linear(140))",
        "normed(x)",
        (
            "normed.parametrizations.weight.original0.data.mul_(2)",
            "normed.bias.data.add_(1)",
            "torch.nn.utils.parametrize.remove_parametrizations(normed, 'weight')",
        ),
    ),
    Read(
        "table_of = collections.defaultdict(lambda: 2.0, a=1.0)",
        "x * table_of['a'] + table_of['b']",
        ("table_of['a'] = 3.0", "table_of['c'] = 3.0"),
    ),
    Read(
        "ragged = [[1.0], [2.0, 3.0]]",
        "x + sum(map(sum, ragged))",
        ("ragged[1].append(4.0)", "ragged[0][0] = 9.0", "ragged.append([])", "ragged.pop(0)"),
    ),
    Read(
        "wrapped = _wrapping(lambda x: x * 2)",
        "wrapped(x)",
        (
            "world['wrapped'] = _wrapping(lambda x: x * 3)",
            "wrapped.__wrapped__.__defaults__",
            "world['wrapped'] = _wrapping(lambda x: x * 2)",
        ),
    ),
    Read(
        "queue = [_vector(150), _vector(151)]",
        "x + queue[-1] + max(queue, key=len)",
        ("queue.append(_vector(152))", "queue.insert(0, _vector(153))", "queue[-1].add_(1)"),
    ),
)

WRITES = (
    "counts['steps'].add_(1)",
    "counts['mean'].mul_(0.9).add_(y.mean() * 0.1)",
    "counts['rows'][0] = y.detach().flatten()[:WIDTH]",
)


def _closure() -> tuple[Callable[..., Any], Callable[[float], None]]:
    factor = 1.0

    def use(x: torch.Tensor) -> torch.Tensor:
        return x * factor

    def change(value: float) -> None:
        nonlocal factor
        factor = value

    return use, change


def _double(module: Any, args: Any, result: torch.Tensor) -> torch.Tensor:
    return result * 2


def _halve(module: Any, args: Any) -> Any:
    return tuple(arg / 2 for arg in args)


class World:
    """A step with the state that it reads, in a name space of its own."""

    def __init__(self, source: str, made: list[str], form: str) -> None:
        import numpy as np

        self.names: dict[str, Any] = {
            "collections": collections,
            "contextvars": contextvars,
            "dg": dg,
            "functional": functional,
            "functools": functools,
            "math": math,
            "nn": nn,
            "np": np,
            "torch": torch,
            "types": types,
            "Config": Config,
            "DEVICE": DEVICE[0],
            "Holder": type("Holder", (Holder,), {}),
            "Mode": Mode,
            "Net": Net,
            "Point": Point,
            "Settings": Settings,
            "Slotted": Slotted,
            "WIDTH": WIDTH,
            "_closure": _closure,
            "_double": _double,
            "_generator": _generator,
            "_halve": _halve,
            "_linear": _linear,
            "_vector": _vector,
            "_wrapping": _wrapping,
            "__name__": "tests.fuzz.worlds",
        }
        given = {*self.names}
        for statement in made:
            exec(statement, self.names)
        self._state = [name for name in self.names if name not in given and name != "__builtins__"]
        self._owner: Any = None
        if form == "function":
            exec(source, self.names)
            self.step: Callable[..., Any] = self.names["step"]
            return
        base = nn.Module if form == "module" else object
        attributes = re.compile(rf"(?<![\w.'])({'|'.join(self._state)})\b(?!')")
        source = attributes.sub(r"self.\1", source).replace("def step(x)", "def step(self, x)")
        exec(source, self.names)
        names = {"method": "run", "callable": "__call__", "module": "forward"}
        self._owner = type("Owner", (base,), {names[form]: self.names["step"]})()
        self._hand_over()
        self.step = self._owner.run if form == "method" else self._owner

    def _hand_over(self) -> None:
        """Let the object whose method is the step have the state as attributes."""
        for name in self._state:
            if getattr(self._owner, name, None) is not self.names[name]:
                setattr(self._owner, name, self.names[name])

    def mutate(self, statement: str) -> None:
        exec(statement, self.names, {"world": self.names})
        if self._owner is not None:
            self._hand_over()

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return all state that is numbers, by place."""
        found: dict[str, torch.Tensor] = {}
        for name, value in self.names.items():
            if isinstance(value, nn.Module):
                found |= {f"{name}.{key}": t for key, t in value.state_dict().items()}
            elif isinstance(value, torch.Generator):
                found[name] = value.get_state()
            else:
                leaves = pytree.tree_leaves(getattr(value, "__dict__", value))
                tensors = [t for t in leaves if isinstance(t, torch.Tensor)]
                found |= {f"{name}[{i}]": t for i, t in enumerate(tensors)}
        return found


def make_source(rng: random.Random, reads: list[Read], policy: str, form: str) -> str:
    """Return the source of a step that reads and writes in a random way."""
    lines = []
    for at, read in enumerate(reads):
        lines += [read.before] if read.before else []
        if rng.random() < 0.2 and form == "function":  # in a function that the step names
            lines.append(f"x = x + helper_{at}(x)")
        else:
            lines.append(f"x = x * 0.5 + {read.expression}")
    lines.append("y = x * 1.0")
    lines += rng.sample(WRITES, rng.randint(0, len(WRITES)))
    constant = 3 if policy != "runner" else None  # whose results are tensors alone
    lines.append(rng.choice(["return y", f"return {{'y': y, 'twice': (y * 2, {constant})}}"]))
    helpers = [
        f"{rng.choice(['', '', '@dg.no_graph'] if policy == 'breakable' else [''])}\n"
        f"def helper_{at}(x):\n    return {read.expression}\n"
        for at, read in enumerate(reads)
    ]
    body = "".join(f"    {line}\n" for line in lines)
    return "".join(helpers if form == "function" else ()) + f"def step(x):\n{body}"


class StatePair:
    """A step in graphs and its eager twin."""

    def __init__(
        self, rng: random.Random, fail: Callable[[str], None], backend: str = "cpu"
    ) -> None:
        self._rng, self._fail, self._backend = rng, fail, backend
        DEVICE[0] = dg.get_backend(backend).device
        self.counts = Counter[str]()
        self._way = rng.choice(["full", "full", "breakable", "graphed", "runner"])
        reads = rng.sample(READS, rng.randint(1, 4))
        reads += [SETTINGS] if self._way == "graphed" and rng.random() < 0.3 else []
        self._mutations = [statement for read in reads for statement in read.mutations]
        makes = [read.make for read in reads]
        makes.append(
            "counts = {'steps': torch.zeros((), device=DEVICE), "
            "'mean': torch.zeros((), device=DEVICE), 'rows': torch.zeros(2, WIDTH, device=DEVICE)}"
        )
        self._form = rng.choice(["function", "function", "method", "callable", "module"])
        self.source = make_source(rng, reads, self._way, self._form)
        self._graphed, self._eager = (World(self.source, makes, self._form) for _ in range(2))
        self._done: list[str] = []
        self._run: Callable[[torch.Tensor], Any] | None = None
        self._with_grad = rng.random() < 0.4

    def run(self) -> None:
        """Capture, then replay between mutations."""
        rng, x = self._rng, self._batch()
        with torch.set_grad_enabled(self._with_grad):
            if self._way == "graphed":
                options = {"backend": self._backend, "warmup": rng.randint(0, 1)}
                self._run = dg.graphed(self._graphed.step, **options)
            else:
                try:
                    self._run = self._captured(x)
                except dg.DeviceGraphError as error:
                    self.counts[f"refused capture: {type(error).__name__}"] += 1
                    self._compare_state("after a refused capture")
                    return
                self._compare_state("after the capture")
            for _ in range(rng.randint(3, 10)):
                if rng.random() < 0.5 and not self._mutate():
                    return
                if not self._call():
                    return

    def _captured(self, x: torch.Tensor) -> Callable[[torch.Tensor], Any]:
        step = self._graphed.step
        if self._way != "runner":
            return dg.capture(step, x, policy=self._way, backend=self._backend)
        slots = [dg.InputSlot("x", ("tokens", WIDTH), torch.float32, pad=dg.Pad.zero())]
        runner = dg.DecodeRunner(
            lambda batch: step(batch.x),
            slots,
            backend=self._backend,
            max_requests=len(x),
            config={"buckets": [len(x)]},
            progress=False,
        )
        runner.capture()
        return lambda x: runner.run({"x": x})

    def _batch(self) -> torch.Tensor:
        return torch.randn(3, WIDTH, dtype=torch.float32, device=DEVICE[0])

    def _mutate(self) -> bool:
        statement = self._rng.choice(self._mutations)
        failures = []
        for world in (self._graphed, self._eager):
            try:
                world.mutate(statement)
            except Exception as error:
                failures.append(type(error))
        self._done.append(statement)
        if len(failures) == 1:
            self._fail(f"{self._story()}: the mutation fails in one world only ({failures[0]})")
        return not failures

    def _call(self) -> bool:
        x, before = self._batch(), _random_states()
        try:
            want = self._eager.step(x.clone())
        except Exception:
            return False  # a step that eager cannot run either
        drawn = _random_states()
        for space, state in zip(_default_generators(), before, strict=True):
            space.set_rng_state(state)
        assert self._run is not None
        try:
            with warnings.catch_warnings(record=True) as recaptures:
                warnings.filterwarnings("always", "a replay captured the step again")
                got = self._run(x.clone())
        except dg.DeviceGraphError as error:
            last = self._done[-1] if self._done else "no mutation"
            self.counts[f"refused after {last}: {type(error).__name__}"] += 1
            return False
        except Exception as error:
            self._fail(f"{self._story()}: {type(error).__name__}: {error}")
        self.counts["calls"] += 1
        self.counts["captured again"] += len(recaptures)
        for one, other in zip(pytree.tree_leaves(got), pytree.tree_leaves(want), strict=True):
            same = torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other
            if not same:
                self._fail(f"{self._story()}: the result is {one}, eagerly {other}")
        if not all(map(torch.equal, drawn, _random_states())):
            self._fail(f"{self._story()}: a default generator has another state than eagerly")
        self._compare_state("after a call")
        return True

    def _compare_state(self, when: str) -> None:
        ours, theirs = self._graphed.tensors(), self._eager.tensors()
        if ours.keys() != theirs.keys():
            self._fail(f"{self._story()}: {when}, other state: {ours.keys() ^ theirs.keys()}")
        for place, tensor in ours.items():
            if not torch.equal(tensor, theirs[place]):
                self._fail(f"{self._story()}: {when}, {place} is {tensor}, not {theirs[place]}")

    def _story(self) -> str:
        how = f"{self._way}, {self._form}, grad {self._with_grad}"
        return f"{how}\n{self.source}\nmutations: {'; '.join(self._done)}\n"
