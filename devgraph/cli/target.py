"""``module:function`` on the command line: finding the function, its inputs, its host arguments."""

from __future__ import annotations

import argparse
import ast
import importlib
import importlib.util
import operator
import sys
from collections.abc import Callable, Iterator, Mapping
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
    """A function of the user with everything needed to call it."""

    name: str
    fn: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    host_args: dict[str, Any]


def find_target(args: argparse.Namespace) -> Target:
    """Import what the arguments name and make the inputs.

    Raises:
        CommandError: there is no such module or function, or the inputs have another form.
    """
    fn = _find(args.target)
    positional, keywords = _inputs(args)
    host_args = {}
    for name, text in by_name("--host-arg", args.host_arg, "kv_len=512").items():
        try:
            host_args[name] = ast.literal_eval(text)
        except Exception as error:  # an unhashable key raises TypeError, a deep nest MemoryError
            raise CommandError(
                f"--host-arg {f'{name}={text}'!r}: {text!r} is no Python literal such as 512, "
                f"[1, 2] or 'x'"
            ) from error
    return Target(name=args.target, fn=fn, args=positional, kwargs=keywords, host_args=host_args)


def _find(text: str, *, module_of: str = "") -> Callable[..., Any]:
    module_name, colon, name = text.rpartition(":")
    module_name = module_name or module_of
    if not module_name or not name or (not colon and not module_of):
        raise CommandError(
            f"{text!r} names no function: write MODULE:FUNCTION, for example engine.step:decode"
        )
    module = _load(module_name)
    try:
        found = operator.attrgetter(name)(module)
    except AttributeError as error:
        known = [key for key, value in vars(module).items() if callable(value) and key[0] != "_"]
        raise CommandError(f"{module_name} has no {name!r}. {did_you_mean(name, known)}") from error
    if not callable(found):
        raise CommandError(f"{text} is a {type(found).__name__}, not a function")
    return found  # type: ignore[no-any-return]


def _load(name: str) -> Any:
    if name.endswith(".py"):
        return _load_file(Path(name))
    here = Path.cwd()
    _importable(here)  # as `python -m` does, for the installed program
    try:
        with user_code(name):
            return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        raise CommandError(
            f"there is no module {name!r} that Python can import from {here}; run this in the "
            f"folder that holds it, or give the path of its .py file"
        ) from error


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
            break  # another module of the name stays what others import
        if getattr(loaded, "__file__", None) == str(file):
            return loaded
    _importable(file.parent)  # what lies beside it, as for a script
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    with user_code(str(path)):
        spec.loader.exec_module(module)
    return module


def _inputs(args: argparse.Namespace) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if args.inputs is None:
        return (), {}
    factory = _find(args.inputs, module_of=args.target.rpartition(":")[0])
    with user_code(args.inputs):
        made = factory()
    if isinstance(made, Mapping):
        return (), dict(made)
    if isinstance(made, tuple):
        if len(made) == 2 and isinstance(made[0], tuple) and isinstance(made[1], Mapping):
            return made[0], dict(made[1])
        return made, {}
    raise CommandError(
        f"{args.inputs} returned a {type(made).__name__}; it must return a tuple of arguments, a "
        f"dictionary of keywords, or a pair of both"
    )


@contextmanager
def user_code(name: str) -> Iterator[None]:
    """Turn an exception of the user's own code into one line that says where it was raised, and
    print what it prints on standard error: the other is for the result, which programs read."""
    try:
        with redirect_stdout(sys.stderr):
            yield
    except (DeviceGraphError, ModuleNotFoundError):
        raise
    except (Exception, SystemExit) as error:  # a script's end is no answer of this program
        own = raising_line(error)
        where = f" at {own.file}:{own.line}" if own else ""
        text = str(error).strip().splitlines() or [""]
        hint = "--debug shows all of it"
        if isinstance(error, TypeError) and own is None:  # the call itself did not fit
            hint = "--inputs MODULE:FUNCTION names what returns its arguments"
        raise CommandError(
            f"{name} raised {type(error).__name__}: {text[0]}{where} ({hint})"
        ) from error
