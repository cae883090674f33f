"""``devgraph completion``, which prints a completion script for a shell."""

from __future__ import annotations

import argparse
import importlib.metadata
import shlex
from collections.abc import Iterator

from devgraph.api.config.phase import choices
from devgraph.api.registry import BUILT_IN, ENTRY_POINT_GROUP
from devgraph.cli.arguments import COMMANDS, Options
from devgraph.cli.tables import print_json, print_lines

_BASH = """_devgraph() {
  local word="${COMP_WORDS[COMP_CWORD]}" before="${COMP_WORDS[COMP_CWORD-1]}"
  local command="" words="" given
  for given in "${COMP_WORDS[@]:1:$((COMP_CWORD-1))}"; do
    case "$given" in
      %s) command="$given"; break ;;
    esac
  done
  case "$before" in
%s
    *) case "$command" in
%s
    esac ;;
  esac
  COMPREPLY=($(compgen -W "$words" -- "$word"))
}
complete -o default -F _devgraph devgraph"""


def run(args: argparse.Namespace) -> int:
    """Print the script; return 0."""
    script = "\n".join(_fish()) if args.shell == "fish" else _BASH % tuple(_bash())
    if args.shell == "zsh":
        script = f"autoload -U +X bashcompinit && bashcompinit\n{script}"
    if args.json:
        print_json({args.shell: script})
    else:
        print_lines(*script.splitlines())
    return 0


def _actions(command: str) -> Iterator[argparse.Action]:
    """Yield the visible options and arguments of a command; "" stands for the program itself."""
    options = Options(argparse.ArgumentParser())
    options.common()
    if command:
        COMMANDS[command][1](options)
    else:
        options.parser.add_argument("-V", "--version", help="version", action="store_true")
    yield from (one for one in options.parser._actions if one.help != argparse.SUPPRESS)


def _values(action: argparse.Action) -> str:
    """Return the known values of an option or argument, separated by spaces."""
    if action.metavar == "POLICY":
        return " ".join(choices())
    if action.dest == "backend":
        plugins = importlib.metadata.entry_points(group=ENTRY_POINT_GROUP).names
        return " ".join((*BUILT_IN, *sorted(plugins)))
    return " ".join(map(str, action.choices or ()))


def _bash() -> Iterator[str]:
    """Yield the parts of the script: commands, values by option, and words by command."""
    values: dict[str, list[str]] = {}
    words: list[str] = []
    for command in ("", *COMMANDS):
        first = [] if command else [*COMMANDS]
        for action in _actions(command):
            first += action.option_strings or _values(action).split()
            if action.nargs != 0:  # The option takes a value.
                flags = values.setdefault(_values(action), [])
                flags += [flag for flag in action.option_strings if flag not in flags]
        words.append(f"      '{command}') words={shlex.quote(' '.join(first))} ;;")
    yield "|".join(COMMANDS)
    yield "\n".join(f"    {'|'.join(f)}) words={shlex.quote(v)} ;;" for v, f in values.items() if f)
    yield "\n".join(words)


def _fish() -> Iterator[str]:
    for command, (summary, _) in COMMANDS.items():
        about = f"-a {command} -d {shlex.quote(summary)}"
        yield f"complete -c devgraph -f -n __fish_use_subcommand {about}"
        seen = f"complete -c devgraph -n '__fish_seen_subcommand_from {command}'"
        for action in _actions(command):
            known = _values(action)
            values = f" -x -a {shlex.quote(known)}" if known else ""
            for flag in action.option_strings or [""]:
                name = f" -l {flag[2:]}" if flag.startswith("--") else ""
                if name or values:
                    yield seen + name + values
