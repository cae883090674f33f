"""The forms of the project's prose that no linter knows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support import language

ROOT = Path(__file__).parents[1]
CODE = language.files_of([ROOT / "devgraph"])
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])


@pytest.mark.parametrize("path", [*CODE, *DOCUMENTS], ids=lambda path: str(path.relative_to(ROOT)))
def test_prose_has_none_of_the_forbidden_forms(path: Path):
    assert language.faults(path) == []


@pytest.mark.parametrize(("paths", "most"), [(CODE, 1.0), (DOCUMENTS, 2.0)], ids=["code", "docs"])
def test_vague_words_are_rare_in_all_files_together(paths: list[Path], most: float):
    texts = [text for path in paths for text in language.texts_of(path)]
    vague, words = language.count(texts, {"docstring", "attribute", "comment", "document"})
    assert vague * 1000 <= most * words


def test_numbers_take_the_singular_of_their_noun():
    nouns = "requests|tokens|graphs|steps|segments|nodes|cases|failures|ranks|regions|recordings"
    nouns += "|replays|inputs|arguments|entries|misses|captures|prompts|places|repeats|streams"
    plural = re.compile(rf"\{{(?!_TOKENS|estimate\.phase)[^{{}}!]*[^{{}},]\}} (?:{nouns})\b")
    found = [
        f"{path}: {line}: use counted()"
        for path in CODE
        if "testing" not in path.parts
        for line in path.read_text(encoding="utf-8").splitlines()
        if plural.search(line)
    ]
    assert found == []


def test_forbidden_forms_are_found(tmp_path: Path):
    planted = tmp_path / "planted.py"
    planted.write_text(
        '"""What holds, meanwhile, and what does not."""\n\nlimit = 1\n"""What counts."""\n\n\n'
        'def read():\n    """Return what was read."""\n'
    )
    assert [fault.rpartition(":")[0] for fault in language.faults(planted)] == [
        f"{planted}:4",
        f"{planted}:8",
        f"{planted}: 5 vague words in 13, at most 2",
    ]
