"""``devgraph completion``, which prints a completion script for a shell."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator

from devgraph.cli.arguments import COMMANDS, Options
from devgraph.cli.tables import print_json, print_lines

_BASH = """_devgraph() {
  local word="${COMP_WORDS[COMP_CWORD]}" before="${COMP_WORDS[COMP_CWORD-1]}" words=""
  case "${COMP_WORDS[1]} $before" in
%s
    *) case "${COMP_WORDS[1]}" in
%s
    esac ;;
  esac
  [ "$COMP_CWORD" -eq 1 ] && words=%s
  COMPREPLY=($(compgen -W "$words" -- "$word"))
}
complete -o default -F _devgraph devgraph"""


def run(args: argparse.Namespace) -> int:
    """Print the script; return 0."""
    script = "\n".join(_fish()) if args.shell == "fish" else _bash()
    if args.shell == "zsh":
        script = f"autoload -U +X bashcompinit && bashcompinit\n{script}"
    if args.json:
        print_json({args.shell: script})
    else:
        print_lines(*script.splitlines())
    return 0


def _actions(command: str) -> Iterator[argparse.Action]:
    """Yield the visible options and arguments of a command."""
    parser = argparse.ArgumentParser()
    COMMANDS[command][1](Options(parser))
    for action in parser._actions:
        if action.help != argparse.SUPPRESS:
            yield action


def _bash() -> str:
    values: list[str] = []
    words: list[str] = []
    for command in COMMANDS:
        first: list[str] = []
        for action in _actions(command):
            choices = [str(choice) for choice in action.choices or ()]
            first += action.option_strings or choices
            values += [
                f'    "{command} {flag}") words={shlex.quote(" ".join(choices))} ;;'
                for flag in action.option_strings
                if choices
            ]
        words.append(f"      {command}) words={shlex.quote(' '.join(first))} ;;")
    return _BASH % ("\n".join(values), "\n".join(words), shlex.quote(" ".join(COMMANDS)))


def _fish() -> Iterator[str]:
    for command, (summary, _) in COMMANDS.items():
        about = f"-a {command} -d {shlex.quote(summary)}"
        yield f"complete -c devgraph -f -n __fish_use_subcommand {about}"
        seen = f"complete -c devgraph -n '__fish_seen_subcommand_from {command}'"
        for action in _actions(command):
            choices = " ".join(str(choice) for choice in action.choices or ())
            values = f" -x -a {shlex.quote(choices)}" if choices else ""
            for flag in action.option_strings or [""]:
                name = f" -l {flag[2:]}" if flag.startswith("--") else ""
                if name or values:
                    yield seen + name + values
