"""The ``devgraph`` program, which runs one command and reports errors on standard error."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import importlib
import io
import logging
import os
import sys
import textwrap
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

from devgraph import __version__
from devgraph.api.config.phase import DeviceGraphWarning
from devgraph.api.environment import AUTOLOAD_WAS_ON, warn_unknown
from devgraph.api.errors import DeviceGraphError, did_you_mean
from devgraph.api.registry import AUTOLOAD
from devgraph.cli.arguments import COMMANDS, Options
from devgraph.cli.tables import CommandError, errors_wrap, note, print_json

logger = logging.getLogger(__name__)

ERROR = 2
_INTERRUPTED = 130
_LEVELS = (logging.WARNING, logging.INFO, logging.DEBUG)
_COLORS = {"always": ("FORCE_COLOR", "NO_COLOR"), "never": ("NO_COLOR", "FORCE_COLOR")}
"""Environment variables of rich to set and to remove, by value of ``--color``."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program with ``argv`` (default: the process's arguments); return the exit code."""
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        # Output encodings may lack characters that occur in model names and texts.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        with _environment(), _messages():
            warn_unknown()
            words = [*(sys.argv[1:] if argv is None else argv)]
            _set_color(words)  # before parsing, because errors of the parser are colored too
            _Parser.as_json = "--json" in words
            if not words:
                _parser().print_help(sys.stderr)
                return ERROR
            if words[:1] == ["help"]:
                words = [*words[1:], "--help"]
            args = _parser().parse_args(words)
            logging.getLogger("devgraph").setLevel(_LEVELS[min(getattr(args, "verbose", 0), 2)])
            return _run(args)
    except KeyboardInterrupt:
        _complain("devgraph: interrupted")
        return _INTERRUPTED


def _set_color(argv: list[str]) -> None:
    for option, value in zip(argv, [*argv, ""][1:], strict=True):
        flag, equals, own = option.partition("=")
        color = own if equals else value
        if color in _COLORS and flag == "--color":
            os.environ[_COLORS[color][0]] = "1"
            os.environ.pop(_COLORS[color][1], None)


@contextlib.contextmanager
def _environment() -> Iterator[None]:
    """Set variables that imports read, unless the user has set them; restore the environment."""
    before = dict(os.environ)
    # Progress bars would mix with piped text. tqdm, which torch imports, reads this variable.
    os.environ.setdefault("TQDM_DISABLE", "1")
    if AUTOLOAD not in os.environ:
        # The registry imports vendor packages by name. With autoload, `import torch` would fail if
        # a package lacks its driver, and doctor could not report that package.
        os.environ.update({AUTOLOAD: "0", AUTOLOAD_WAS_ON: "1"})
    try:
        yield
    finally:
        for name in [*os.environ]:
            if name not in before:
                del os.environ[name]
        os.environ.update(before)


def _run(args: argparse.Namespace) -> int:
    try:
        warnings.filterwarnings("ignore", "Failed to initialize NumPy")  # NumPy is optional.
        # Import only this command and only after parsing, because importing torch takes seconds.
        command: Any = importlib.import_module(f"devgraph.cli.{args.command}")
        code: int = command.run(args)
        if sys.stdout is not None:  # None if the parent closed it
            sys.stdout.flush()
    except BrokenPipeError:
        # The reader (head, less) closed the pipe. Python flushes again at exit and must not raise.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        if getattr(args, "debug", False) and sys.stderr is not None:
            traceback.print_exc()
        text = str(error)
        # The messages of these three types are sufficient. The messages of other types, such as
        # torch's out-of-memory error, need the name of the type.
        if not isinstance(error, (DeviceGraphError, ImportError, OSError)):
            first = (text.strip().splitlines() or [""])[0]
            text = f"{type(error).__name__}: {first} (--debug prints the traceback)"
        notes = () if isinstance(error, CommandError) else getattr(error, "__notes__", ())
        _fail(text, type(error).__name__, as_json=args.json, notes=notes)
        return ERROR
    return code


class _Help(argparse.HelpFormatter):
    """A formatter that does not break the names of options at their hyphens."""

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return textwrap.indent("\n".join(self._split_lines(text, width - len(indent))), indent)


class _Parser(argparse.ArgumentParser):
    """A parser whose errors omit the usage text, which would fill a screen."""

    as_json = False
    """Whether to print errors as JSON."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, formatter_class=_Help, **options)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            names = [str(choice) for choice in action.choices]
            hint = did_you_mean(str(value), names)
            raise argparse.ArgumentError(action, f"{value!r} does not exist. {hint}")

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse all arguments; errors for unknown options refer to the help of the command."""
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            (commands,) = (action for action in self._actions if action.dest == "command")
            assert isinstance(commands.choices, Mapping)
            command = commands.choices[parsed.command]
            known = command._option_string_actions
            close = difflib.get_close_matches(unknown[0], known, n=1, cutoff=0.65)
            hint = f". Did you mean {close[0]!r}?" if close else ""
            command.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
        parsed.json = "json" in parsed
        return parsed

    def error(self, message: str) -> NoReturn:
        hint = f"({self.prog} --help lists the options)"
        _fail(f"{_one_line(message)} {hint}", CommandError.__name__, as_json=self.as_json)
        self.exit(ERROR)


def _parser() -> argparse.ArgumentParser:
    common = _Parser(add_help=False)
    Options(common).common()
    text = "One API for the device graphs of every vendor."
    more = "devgraph help COMMAND lists the options of a command."
    parser = _Parser(prog="devgraph", description=text, epilog=more, parents=[common])
    parser.add_argument("-V", "--version", action="version", version=f"devgraph {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="command", required=True)
    for name, (text, declare) in COMMANDS.items():
        sub = commands.add_parser(name, help=text, description=text, parents=[common])
        declare(Options(sub))
    return parser


class _Handler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        _complain(self.format(record))


@contextlib.contextmanager
def _messages() -> Iterator[None]:
    """Send log records and warnings to stderr as single lines."""
    root = logging.getLogger("devgraph")
    handler = _Handler()
    handler.setFormatter(logging.Formatter("devgraph: %(message)s"))
    before, propagate, plain = root.level, root.propagate, warnings.showwarning
    root.addHandler(handler)
    root.propagate = False

    def show(message: Any, category: Any, *rest: Any, **more: Any) -> None:
        if issubclass(category, DeviceGraphWarning):
            _complain(f"devgraph: warning: {_one_line(message)}")
        else:
            plain(message, category, *rest, **more)

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("always", DeviceGraphWarning)
            warnings.showwarning = show
            yield
    finally:
        root.removeHandler(handler)
        root.setLevel(before)
        root.propagate = propagate


def _fail(text: str, kind: str, *, as_json: bool, notes: Sequence[str] = ()) -> None:
    """Print an error as JSON, in full with ``notes`` (on a terminal), or as one line."""
    if as_json:
        print_json({"error": {"type": kind, "message": _one_line(text)}})
    text = "\n".join([text, *notes]) if errors_wrap() else _one_line(text)
    _complain(f"devgraph: error: {text}", "error")


def _one_line(message: object) -> str:
    return " ".join(str(message).splitlines())


def _complain(text: str, style: str = "") -> None:
    if sys.stderr is not None:
        # If standard error is closed, the exit code is the only report.
        with contextlib.suppress(OSError):
            note(text, style=style)
