"""``devgraph troubleshoot``, which prints the documentation of an error class."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from devgraph.api.errors import did_you_mean
from devgraph.cli.tables import CommandError, print_json, print_lines, say

_PAGES = (
    Path(__file__).with_name("troubleshooting.md"),
    Path(__file__).parents[2] / "docs" / "troubleshooting.md",
)
"""Paths of the page, in an installed wheel and in a checkout."""


def run(args: argparse.Namespace) -> int:
    """Print a section of the page, or the names of all sections."""
    sections = read_sections()
    if args.section is None:
        if args.json:
            print_json(sections)
        else:
            print_lines(*sections)
        return 0
    start = args.section.lower()
    found = [name for name in sections if name.lower().startswith(start)]
    name = args.section if args.section in sections else found[0] if len(found) == 1 else None
    if name is None and found:
        raise CommandError(f"{args.section!r} is a prefix of several sections: {', '.join(found)}")
    if name is None:
        raise CommandError(f"no section {args.section!r}. {did_you_mean(args.section, sections)}")
    if args.json:
        print_json({name: sections[name]})
        return 0
    # Links within the page become plain text.
    text = re.sub(r"\[([^\]]+)\]\(#\w+\)", r"\1", sections[name])
    text = re.sub(r"\[([^\]]+)\]\((\S+?)\)", r"\1 [\2]", text)
    say(name, style="title")
    say()
    say(re.sub(r"(?<=\S)\n *(?=[^\s|-])", " ", text))
    return 0


def read_sections() -> dict[str, str]:
    """Return the text of each section by heading."""
    page = next((path for path in _PAGES if path.is_file()), None)
    if page is None:
        raise CommandError(f"{_PAGES[0]} is missing; install devgraph again")
    _, *sections = f"\n{page.read_text(encoding='utf-8')}".split("\n## ")
    pairs = (section.partition("\n") for section in sections)
    return {heading.strip(): text.strip() for heading, _, text in pairs}
