"""Functions named on the command line, with their inputs and host arguments."""

from __future__ import annotations

import argparse
import ast
import importlib
import importlib.util
import operator
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

import attrs

from devgraph.api.errors import DeviceGraphError, did_you_mean
from devgraph.api.marks.source import raising_line
from devgraph.cli.arguments import by_name
from devgraph.cli.tables import CommandError


@attrs.frozen(kw_only=True)
class Target:
    """A user function with its arguments."""

    name: str
    fn: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    host_args: dict[str, Any]


def find_target(args: argparse.Namespace, name: str) -> Target:
    """Import the function ``name`` (MODULE:FUNCTION), and create its inputs."""
    fn = _find(name)
    positional, keywords = _inputs(args, module=name.rpartition(":")[0])
    host_args = _literals(args.host_arg)
    return Target(name=name, fn=fn, args=positional, kwargs=keywords, host_args=host_args)


def _literals(given: Sequence[str]) -> dict[str, Any]:
    """Parse the values of ``--host-arg`` as Python literals."""
    values = {}
    for name, text in by_name("--host-arg", given, "kv_len=512").items():
        try:
            values[name] = ast.literal_eval(text)
        except Exception as error:  # literal_eval raises many types of errors.
            why = f"{text!r} is not a Python literal such as 512, [1, 2] or 'x'"
            raise CommandError(f"--host-arg {f'{name}={text}'!r}: {why}") from error
    return values


def _find(text: str, *, module_of: str = "") -> Callable[..., Any]:
    module_name, colon, name = text.rpartition(":")
    module_name = module_name or module_of
    if not module_name or not name or (not colon and not module_of):
        example = "write MODULE:FUNCTION, such as engine.step:decode"
        raise CommandError(f"{text!r} does not name a function: {example}")
    module = _load(module_name)
    try:
        function = operator.attrgetter(name)(module)
    except AttributeError as error:
        known = [key for key, value in vars(module).items() if callable(value) and key[0] != "_"]
        raise CommandError(f"{module_name} has no {name!r}. {did_you_mean(name, known)}") from error
    if not callable(function):
        way = "; --inputs names a function that returns the arguments" if module_of else ""
        raise CommandError(f"{text} is a {type(function).__name__}, not a function{way}")
    return function  # type: ignore[no-any-return]


def _load(name: str) -> Any:
    if name.endswith(".py"):
        return _load_file(Path(name))
    here = Path.cwd()
    ways = "run devgraph in the folder of the module, or pass the path of its .py file"
    absent = f"there is no module {name!r} that Python can import from {here}; {ways}"
    if name.startswith("."):  # Python would resolve the name relative to a package.
        raise CommandError(absent)
    _importable(here)  # like `python -m`; the installed program does not add this folder
    try:
        with user_code(name):
            return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        raise CommandError(absent) from error


def _importable(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


def _load_file(path: Path) -> Any:
    if not path.is_file():
        raise CommandError(f"there is no file {path}")
    file = path.resolve()
    for name in (path.stem, f"{path.stem}_of_{file.parent.name}"):
        loaded = sys.modules.get(name)
        if loaded is None:
            break  # The name is free, so no module is replaced.
        if getattr(loaded, "__file__", None) == str(file):
            return loaded
    _importable(file.parent)  # Like a script, the file may import its neighbors.
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    with user_code(str(path)):
        spec.loader.exec_module(module)
    return module


def _inputs(args: argparse.Namespace, *, module: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if args.inputs is None:
        return (), {}
    factory = _find(args.inputs, module_of=module)
    with user_code(args.inputs):
        inputs = factory()
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    if isinstance(inputs, tuple):
        if len(inputs) == 2 and isinstance(inputs[0], tuple) and isinstance(inputs[1], Mapping):
            return inputs[0], dict(inputs[1])
        return inputs, {}
    wanted = "it must return a tuple of arguments, a dict of keywords, or a pair (tuple, dict)"
    raise CommandError(f"{args.inputs} returned a {type(inputs).__name__}; {wanted}")


@contextmanager
def user_code(name: str) -> Iterator[None]:
    """Report exceptions of user code with their lines; redirect the code's output to stderr."""
    try:
        with redirect_stdout(sys.stderr):
            yield
    except (DeviceGraphError, ModuleNotFoundError):
        raise
    except (Exception, SystemExit) as error:  # A SystemExit of a script must not end this program.
        own = raising_line(error)
        where = f" at {own.file}:{own.line}" if own else ""
        text = str(error).strip().splitlines() or [""]
        hint = "--debug prints the traceback"
        if isinstance(error, TypeError) and own is None:  # The arguments do not fit.
            hint = (
                "--inputs MODULE:FUNCTION names a function that returns the arguments, and "
                "--host-arg NAME=VALUE passes a host argument"
            )
        said = f"{type(error).__name__}: {text[0]}{where}"
        raise CommandError(f"{name} raised {said} ({hint})") from error
