"""Tokens to text in pieces: split characters, spaces, stop strings."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers", reason="the transformers integration")

from devgraph.integrations.transformers.text import TextStream


class ByteTokenizer:
    """One token per UTF-8 byte; a broken character decodes to U+FFFD, as real tokenizers do."""

    def decode(self, tokens: list[int], *, skip_special_tokens: bool) -> str:
        assert skip_special_tokens
        return bytes(tokens).decode("utf-8", errors="replace")


class WordTokenizer:
    """Like sentencepiece: the first word of what is decoded has no space before it."""

    words = ("the", "cat", "sat", "on", "mat")

    def decode(self, tokens: list[int], *, skip_special_tokens: bool) -> str:
        return " ".join(self.words[t] for t in tokens)


def feed(stream: TextStream, tokens: list[int]) -> list[str]:
    return [stream.push(t) for t in tokens]


def test_characters_of_several_tokens_come_whole() -> None:
    text = "naïve 🙂 ok"
    stream = TextStream(ByteTokenizer())
    pieces = feed(stream, list(text.encode()))
    assert "".join(pieces) == text == stream.text
    assert all("\N{REPLACEMENT CHARACTER}" not in piece for piece in pieces)
    assert "🙂" in pieces


def test_words_keep_the_space_before_them() -> None:
    stream = TextStream(WordTokenizer())
    assert feed(stream, [0, 1, 2]) == ["the", " cat", " sat"]


def test_broken_character_at_the_end_is_flushed_by_finish() -> None:
    stream = TextStream(ByteTokenizer())
    assert feed(stream, [ord("a"), 0xC3]) == ["a", ""]
    assert stream.finish() == "\N{REPLACEMENT CHARACTER}"


def test_stop_string_over_token_borders_ends_the_text_before_it() -> None:
    stream = TextStream(ByteTokenizer(), stop=["END", "\n\n"])
    pieces = feed(stream, list(b"some ENDING"))
    assert stream.stopped
    assert "".join(pieces) == "some " == stream.text
    assert stream.finish() == ""


def test_possible_beginning_of_a_stop_string_is_held_back_then_given() -> None:
    stream = TextStream(ByteTokenizer(), stop=["END"])
    assert feed(stream, list(b"aEN")) == ["a", "", ""]
    assert stream.push(ord("x")) == "ENx"
    assert feed(stream, list(b"E")) == [""]
    assert stream.finish() == "E"
    assert stream.text == "aENxE"
    assert not stream.stopped


def test_earliest_stop_string_wins_when_two_match() -> None:
    stream = TextStream(WordTokenizer(), stop=["on mat", "sat"])
    feed(stream, [0, 1, 2, 3, 4])
    assert stream.text == "the cat "
