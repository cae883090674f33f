"""Hooks of mkdocs, which add the documents in the repository's root to the site.

The README is the front page. Links to files that are not pages become plain text.
"""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}


def on_config(config: Any) -> Any:
    """Show the version at the bottom of each page."""
    source = (ROOT / "devgraph" / "api" / "__init__.py").read_text(encoding="utf-8")
    version = re.search(r'^__version__ = "(.*)"$', source, re.MULTILINE)
    assert version is not None
    config.copyright = f"devgraph {version[1]}"
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add the documents of the root as pages."""
    for name, page in PAGES.items():
        text = (ROOT / name).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Rewrite links to pages of the site, and replace links to other files with their text."""
    if page.is_homepage:
        page.meta["hide"] = ["navigation"]
    folder = ROOT if page.file.src_uri in PAGES.values() else ROOT / "docs"

    def target(match: re.Match[str]) -> str:
        label, path, hash_, anchor = match[1], *match[2].partition("#")
        place = PurePosixPath((folder / path).resolve().relative_to(ROOT).as_posix())
        if str(place) in PAGES:
            path = PAGES[str(place)]
        elif place.parts[0] == "docs":
            path = str(place.relative_to("docs"))
        else:
            return label
        return f"[{label}]({path}{hash_}{anchor})"

    return re.sub(r"\[([^\]]*)\]\((?![a-z]+:|#)([^)\s]+)\)", target, markdown)
