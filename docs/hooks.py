"""What mkdocs does before it reads the pages.

The README is the front page and other documents of the repository's root are pages too; links to
files that are no page lead to the repository.
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


def on_files(files: Files, config: Any) -> Files:
    """Add the documents of the root as pages."""
    for name, page in PAGES.items():
        text = (ROOT / name).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Let links of a page lead to pages of the site, or else to the repository."""
    if page.is_homepage:
        page.meta["hide"] = ["navigation"]
    folder = ROOT if page.file.src_uri in PAGES.values() else ROOT / "docs"

    def target(match: re.Match[str]) -> str:
        path, hash_, anchor = match.group(1).partition("#")
        place = PurePosixPath((folder / path).resolve().relative_to(ROOT).as_posix())
        if str(place) in PAGES:
            path = PAGES[str(place)]
        elif place.parts[0] == "docs":
            path = str(place.relative_to("docs"))
        else:
            path = f"{config.extra['source']}/blob/main/{place}"
        return f"]({path}{hash_}{anchor})"

    return re.sub(r"\]\((?![a-z]+:|#)([^)\s]+)\)", target, markdown)
