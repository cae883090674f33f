"""A check of the project's prose: docstrings, comments, messages and documents.

``python -m tests.support.language PATH...`` prints the faults of files or folders.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

import attrs

VAGUE = re.compile(
    r"\b(?:what|whatever|that which|those that|anew|meanwhile|for want of)\b", re.IGNORECASE
)
SMALL = 2000
"""Files of up to this many words may have two vague words each."""

LONGEST_AVERAGE = 22
"""Maximum average number of words in a sentence of a file."""


@attrs.frozen(kw_only=True)
class Text:
    """One docstring, comment, message or paragraph."""

    line: int
    kind: str
    """``docstring``, ``attribute``, ``comment``, ``message`` or ``document``."""

    words: str


def _docstrings(tree: ast.Module) -> Iterator[Text]:
    holders = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if not isinstance(body, list):
            continue
        for before, statement in zip([None, *body], body, strict=False):
            if not (
                isinstance(statement, ast.Expr)
                and isinstance(statement.value, ast.Constant)
                and isinstance(statement.value.value, str)
            ):
                continue
            if before is None and isinstance(node, holders):
                kind = "docstring"
            elif isinstance(before, (ast.Assign, ast.AnnAssign)):
                kind = "attribute"
            else:
                continue
            yield Text(line=statement.lineno, kind=kind, words=statement.value.value)


def _messages(tree: ast.Module) -> Iterator[Text]:
    documentation = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and id(node) not in documentation
            and len(node.value.split()) >= 4
        ):
            yield Text(line=node.lineno, kind="message", words=node.value)


def _comments(source: str) -> Iterator[Text]:
    start, lines = 0, []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT or re.match(r"#\s*(noqa|type:|!)", token.string):
            continue
        if lines and token.start[0] != start + len(lines):
            yield Text(line=start, kind="comment", words=" ".join(lines))
            lines = []
        if not lines:
            start = token.start[0]
        lines.append(token.string.lstrip("#").strip())
    if lines:
        yield Text(line=start, kind="comment", words=" ".join(lines))


def _paragraphs(source: str) -> Iterator[Text]:
    blank = re.sub(
        r"^```.*?^```|<!--.*?-->",
        lambda code: "\n" * code.group().count("\n"),
        source,
        flags=re.DOTALL | re.MULTILINE,
    )
    for number, line in enumerate(blank.splitlines(), 1):
        if line.strip():
            yield Text(line=number, kind="document", words=re.sub(r"`[^`]*`", "code", line))


def texts_of(path: Path) -> list[Text]:
    """Return the prose of a Python file or a Markdown document."""
    source = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        return list(_paragraphs(source))
    tree = ast.parse(source)
    return [*_docstrings(tree), *_comments(source), *_messages(tree)]


def _sentences(texts: list[Text]) -> list[int]:
    """Return the number of words in each sentence."""
    whole = []
    for text in texts:
        if text.kind == "message" or text.words.lstrip().startswith("|"):
            continue
        whole.append(re.sub(r"``[^`]*``|`[^`]*`", "code", text.words))
    joined = ("\n" if texts and texts[0].kind == "document" else "\n\n").join(whole)
    pieces = re.split(r"(?<=[.!?:])\s+|\n\s*\n|\n\s*(?:[-*|#]|\d+\.)\s*", joined)
    return [len(piece.split()) for piece in pieces if len(piece.split()) > 2]


def count(texts: list[Text], kinds: set[str] | None = None) -> tuple[int, int]:
    """Return the number of vague words and of all words, in all or some kinds of text."""
    chosen = [text.words for text in texts if kinds is None or text.kind in kinds]
    return sum(len(VAGUE.findall(words)) for words in chosen), sum(
        len(words.split()) for words in chosen
    )


def faults(path: Path) -> list[str]:
    """Return the faults of a file's prose, each with its line."""
    texts = texts_of(path)
    found = []
    for text in texts:
        if re.match(r"\s*Return what\b", text.words):
            found.append(f"{path}:{text.line}: begins with 'Return what'")
        if text.kind == "attribute" and re.match(r"\s*What\b", text.words):
            found.append(f"{path}:{text.line}: an attribute begins with 'What'")
    vague, words = count(texts)
    most = max(2, words * (2 if path.suffix == ".md" else 1) // 1000) if words > SMALL else 2
    if vague > most:
        lines = [str(text.line) for text in texts if VAGUE.search(text.words)]
        found.append(f"{path}: {vague} vague words in {words}, at most {most}: {', '.join(lines)}")
    lengths = _sentences(texts)
    if len(lengths) >= 5 and sum(lengths) / len(lengths) > LONGEST_AVERAGE:
        found.append(f"{path}: {sum(lengths) / len(lengths):.1f} words a sentence on average")
    return found


def files_of(places: list[Path]) -> list[Path]:
    """Return the Python files and documents in files and folders."""
    inside = [
        sorted([*place.rglob("*.py"), *place.rglob("*.md")]) if place.is_dir() else [place]
        for place in places
    ]
    return [path for paths in inside for path in paths]


if __name__ == "__main__":
    paths = files_of([Path(place) for place in sys.argv[1:]])
    for path in paths:
        print("\n".join(faults(path)), end="\n" if faults(path) else "")
    totals = [count(texts_of(path)) for path in paths]
    vague, words = (sum(column) for column in zip(*totals, strict=True))
    print(f"{len(paths)} files, {words} words, {1000 * vague / max(words, 1):.2f} vague per 1,000")
