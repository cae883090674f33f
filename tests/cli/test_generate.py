"""``devgraph generate``: text, figures and exit codes, with a small model on disk."""

# ruff: noqa: E402  (imports follow the skip where transformers is missing)

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", reason="the transformers integration")
tokenizers = pytest.importorskip("tokenizers", reason="a tokenizer for the small model")

from devgraph.cli import generate
from devgraph.cli.generate import OrderedText
from tests.support.cli_programs import run_cli, run_json
from tests.support.transformers_models import make_model, reference

PROMPTS = ("abcabc", "zz", "The quick brown")
FEW_GRAPHS = (
    *("--decode-device-graph-bs", "1", "2", "4"),
    *("--prefill-device-graph-bs", "8", "16", "24"),
)
"""Sizes that steps of the prompts have, at most eight tokens of padding aside."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a random Llama over bytes, and its tokenizer."""
    path = tmp_path_factory.mktemp("model")
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    words = {character: index for index, character in enumerate(alphabet)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=words, merges=[]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    fast.save_pretrained(path)
    make_model("llama", vocab_size=len(words)).save_pretrained(path)
    return path


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def _argv(
    folder: Path, *more: str, prompts: tuple[str, ...] = PROMPTS, graphs: Sequence[str] = FEW_GRAPHS
) -> list[str]:
    given = [part for prompt in prompts for part in ("--prompt", prompt)]
    return ["generate", "--model", str(folder), "--backend", "cpu", *given, *graphs, *more]


def _expected(folder: Path, prompt: str, new: int) -> list[int]:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return reference(model.eval(), tokenizer(prompt)["input_ids"], new)


def test_tokens_are_those_of_the_models_own_generate(
    folder: Path, capsys: pytest.CaptureFixture[str]
):
    flags = ["--max-requests", "2", "--decode-device-graph-bs", "1", "2"]
    data = run_json(capsys, *_argv(folder, "--max-new-tokens", "9", *flags))
    graphs, eager = data["runs"]
    assert graphs["tokens"] == [_expected(folder, prompt, 9) for prompt in PROMPTS]
    assert eager["tokens"] == graphs["tokens"]
    assert data["same_tokens"] is True
    assert data["backend"] == "cpu"
    assert data["dtype"] == "float32"


def test_what_was_fused_is_told_and_can_be_left_out(
    folder: Path, capsys: pytest.CaptureFixture[str]
):
    argv = _argv(folder, "--max-new-tokens", "3", "--no-compare", "--prefill-disable-device-graph")
    assert "fused: " in run_cli(capsys, *argv).out
    (fused,) = run_json(capsys, *argv)["runs"]
    (plain,) = run_json(capsys, *argv, "--no-fuse")["runs"]
    assert fused["fused"]["norms"] > 0
    assert fused["unfused"] == {}
    assert plain["fused"] is plain["unfused"] is None
    assert plain["tokens"] == fused["tokens"]


def test_counters_add_up_and_say_why_a_step_was_eager(
    folder: Path, capsys: pytest.CaptureFixture[str]
):
    flags = ["--prefill-disable-device-graph", "--decode-device-graph-bs", "1", "4"]
    data = run_json(capsys, *_argv(folder, "--max-new-tokens", "5", *flags))
    graphs, eager = data["runs"]
    prefill, decode = graphs["phases"]
    assert (prefill["phase"], decode["phase"]) == ("prefill", "decode")
    assert prefill["eager"] == {"disabled": prefill["steps"]}
    assert decode["graph_steps"] == decode["steps"] == 4
    assert decode["padded_rows"] == 4  # three requests in the bucket of four, in each of four steps
    assert decode["capture_seconds"] > 0
    assert decode["graph_bytes"] > 0
    assert all(one["graph_steps"] == 0 for one in eager["phases"])
    assert graphs["tokens_per_second"] > 0
    assert graphs["decode_tokens_per_second"] > 0
    assert data["mode"]["requested"]["prefill"]["policy"] == "disabled"


def test_many_buckets_are_listed_in_short(folder: Path, capsys: pytest.CaptureFixture[str]):
    result = run_cli(
        capsys,
        *_argv(
            folder, "--max-new-tokens", "1", "--max-step-tokens", "64", "--no-compare", graphs=()
        ),
    )
    assert "4..32 by 4 48 64 tokens" in result.out


def test_text_and_tables_are_printed(folder: Path, capsys: pytest.CaptureFixture[str]):
    argv = _argv(folder, "--max-new-tokens", "6")
    texts = run_json(capsys, *argv)["runs"][0]["texts"]
    result = run_cli(capsys, *argv)
    assert result.code == 0
    position = -1
    for index, (prompt, text) in enumerate(zip(PROMPTS, texts, strict=True)):
        block = f"[{index + 1}] {prompt}{text}\n\n"
        assert result.out.find(block) > position
        position = result.out.find(block)
    for heading in (
        "requested",
        "effective",
        "steps in graphs",
        "padding",
        "eager steps",
        "memory",
    ):
        assert heading in result.out
    assert "tokens/s" in result.out
    assert "graphs and eager produced the same tokens" in result.out


def test_without_compare_nothing_runs_eagerly(folder: Path, capsys: pytest.CaptureFixture[str]):
    data = run_json(capsys, *_argv(folder, "--max-new-tokens", "3", "--no-compare"))
    assert [one["name"] for one in data["runs"]] == ["graphs"]
    assert data["same_tokens"] is None


@pytest.mark.parametrize(("given", "taken"), [("2", 2), ("2147483647", 4)])
def test_launches_of_several_steps_have_a_row_and_give_the_same_tokens(
    given: str, taken: int, folder: Path, capsys: pytest.CaptureFixture[str]
):
    argv = _argv(folder, "--max-new-tokens", "4", "--steps-per-launch", given)
    data = run_json(capsys, *argv)
    assert data["same_tokens"]
    assert data["runs"][0]["tokens"] == [_expected(folder, prompt, 4) for prompt in PROMPTS]
    several = data["runs"][0]["phases"][2]
    assert (several["name"], several["steps_per_launch"]) == (f"decode by {taken}", taken)
    assert several["graph_steps"] == several["steps"] > 0


def test_counters_hold_all_repeats_and_tokens_those_of_one(
    folder: Path, capsys: pytest.CaptureFixture[str]
):
    data = run_json(capsys, *_argv(folder, "--max-new-tokens", "4", "--repeats", "2"))
    assert [one["name"] for one in data["runs"]] == ["graphs", "eager"]
    assert data["runs"][0]["generated"] == 12
    assert data["runs"][0]["phases"][1]["steps"] == 6


def test_sampling_with_a_seed_repeats_and_compares_equal(
    folder: Path, capsys: pytest.CaptureFixture[str]
):
    argv = _argv(folder, "--max-new-tokens", "4", "--temperature", "0.9")
    first, again = (run_json(capsys, *argv, "--seed", "7") for _ in range(2))
    assert first["runs"][0]["tokens"] == again["runs"][0]["tokens"]
    assert first["same_tokens"] is True
    other = run_json(capsys, *argv, "--seed", "8")
    assert other["runs"][0]["tokens"] != first["runs"][0]["tokens"]
    assert "sampled with --seed" in run_cli(capsys, *argv).out


def test_different_tokens_exit_with_1_and_name_the_place(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    real = generate.Engine.generate

    def wrong_if_eager(engine: Any, prompts: Any, **options: Any) -> Any:
        done = real(engine, prompts, **options)
        if engine.config.decode.policy == "disabled" and len(done) > 1:
            tokens = list(done[1].token_ids)
            tokens[2] = (tokens[2] + 1) % 256
            done[1] = attrs.evolve(done[1], token_ids=tuple(tokens))
        return done

    monkeypatch.setattr(generate.Engine, "generate", wrong_if_eager)
    result = run_cli(capsys, *_argv(folder, "--max-new-tokens", "4"))
    assert result.code == 1
    assert "graphs and eager DIFFER, first in prompt 2 at its token 3" in result.out


@pytest.mark.parametrize("source", ["file", "pipe"])
def test_prompts_come_one_a_line(
    source: str,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    text = "abc\n\n  \nx\u2028z\n"
    path = tmp_path / "prompts.txt"
    path.write_text(text.replace("\n", "\r\n"), encoding="utf-8-sig", newline="")
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    given = {"file": ["--prompts-file", str(path)], "pipe": []}
    data = run_json(capsys, *_argv(folder, "--max-new-tokens", "2", *given[source], prompts=()))
    assert data["prompts"] == ["abc", "x\u2028z"]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--max-new-tokens", "0"], "--max-new-tokens: must be from 1 to"),
        (["--temperature", "-1"], "temperature must be a finite number of at least 0, got -1"),
        (["--temperature", "1", "--seed", "9" * 20], "seed must fit into 64 bits"),
        (["--seed", "1"], "--seed has no effect on greedy requests"),
        (["--backend", "cpuu"], "Did you mean 'cpu'?"),
    ],
)
def test_unusable_request_is_one_clear_error(
    more: list[str], said: str, folder: Path, capsys: pytest.CaptureFixture[str]
):
    result = run_cli(capsys, *_argv(folder, *more))
    assert result.code == 2
    assert said in result.err
    assert len(result.err.splitlines()) == 1


def test_missing_model_and_missing_prompts_are_clear_errors(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    result = run_cli(capsys, *_argv(tmp_path / "nothing", prompts=("a",)))
    assert result.code == 2
    assert "there is no such folder or file" in result.err
    result = run_cli(capsys, *_argv(tmp_path, prompts=("a",)))  # a folder without a model
    assert result.code == 2
    assert "cannot read a model from" in result.err
    monkeypatch.setattr("sys.stdin", io.StringIO("\n\n"))
    result = run_cli(capsys, *_argv(folder, prompts=()))
    assert result.code == 2
    assert "no prompt in standard input" in result.err
    result = run_cli(capsys, *_argv(folder, "--prompts-file", "gone.txt", prompts=()))
    assert result.code == 2
    assert "cannot read gone.txt" in result.err


def test_graph_buckets_larger_than_the_prompts_are_accepted(
    folder: Path, capsys: pytest.CaptureFixture[str]
):
    mode = json.dumps(
        {"decode": {"policy": "full", "buckets": [4]}, "prefill": {"policy": "breakable",
         "buckets": [32]}}
    )  # fmt: skip
    data = run_json(
        capsys,
        *_argv(folder, "--max-new-tokens", "3", "--device-graph-mode", mode, prompts=("abcdefgh",)),
    )
    phases = {one["phase"]: one for one in data["runs"][0]["phases"]}
    assert [one["key"] for one in phases["decode"]["buckets"]] == ["4"]
    assert [one["key"] for one in phases["prefill"]["buckets"]] == ["32"]
    # One request in a bucket of four is more padding than the default limit allows.
    assert phases["decode"]["eager"] == {"padding": 2}


def test_texts_are_printed_in_order_as_they_come(capsys: pytest.CaptureFixture[str]):
    text = OrderedText(["[1] a", "[2] b", "[3] c"])
    for request, piece, last, printed in (
        (1, " later", False, "[1] a"),
        (0, " now", False, " now"),
        (2, " done", True, ""),
        (0, "!", True, "!\n\n[2] b later"),
        (1, ".", True, ".\n\n[3] c done\n\n"),
    ):
        end = "eos" if last else None
        text.add(SimpleNamespace(request_id=request, text=piece, finish_reason=end))
        assert capsys.readouterr().out == printed


def test_piecewise_is_refused_because_the_model_cannot_be_traced(
    folder: Path, capsys: pytest.CaptureFixture[str]
):
    result = run_cli(capsys, *_argv(folder, "--device-graph-mode", '{"prefill": "piecewise"}'))
    assert result.code == 2
    assert "torch.compile cannot trace" in result.err


def test_prompts_are_put_into_the_chat_template_of_the_model(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    argv = ["--max-new-tokens", "3", "--no-compare", "--chat"]
    refused = run_cli(capsys, *_argv(folder, *argv, prompts=("ab",)))
    assert refused.code == 2 and "the model has no chat template" in refused.err
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = "{% for m in messages %}<{{ m['content'] }}>{% endfor %}"
    shutil.copytree(folder, tmp_path / "chat")
    tokenizer.save_pretrained(tmp_path / "chat")
    (run,) = run_json(capsys, *_argv(tmp_path / "chat", *argv, prompts=("ab",)))["runs"]
    assert run["tokens"] == [_expected(folder, "<ab>", 3)]


def test_tables_fit_into_80_columns(folder: Path, capsys: pytest.CaptureFixture[str]):
    argv = _argv(folder, "--max-new-tokens", "2", "--prefill-disable-device-graph")
    out = run_cli(capsys, *argv, columns=80).out
    assert "steps in graphs" in out and "decode tokens/s" in out  # columns, not a list
    assert max(map(len, out.splitlines())) <= 80
