"""The flags of engines before: each means what it meant there."""

from __future__ import annotations

import argparse
import re

import pytest

from devgraph.api.config.flags import add_cli_args
from devgraph.api.config.model import DeviceGraphConfig
from devgraph.api.config.older_flags import OLDER_FLAGS, REMOVED_FLAGS
from devgraph.api.config.phase import PHASES
from tests.support.config_cases import BOTH_DISABLED, PARSER, from_argv

OLDER_CASES: list[tuple[list[str], dict[str, object]]] = [
    (["--disable-cuda-graph"], BOTH_DISABLED),
    (["--enable-breakable-cuda-graph"], {"prefill": "breakable"}),
    (["--disable-piecewise-cuda-graph"], {"prefill": "disabled"}),
    (["--cuda-graph-max-bs", "32"], {"decode": {"max_bs": 32}}),
    (["--cuda-graph-bs", "1", "2", "8"], {"decode": {"buckets": [1, 2, 8]}}),
    (
        ["--cuda-graph-mode", '{"decode": "full", "prefill": "tcpcg"}'],
        {"decode": "full", "prefill": "piecewise"},
    ),
    (
        [
            "--cuda-graph-config",
            '{"decode": {"backend": "full", "max_bs": 256, "bs": [1, 256]}, "prefill": '
            '{"backend": "tc_piecewise", "tc_compiler": "inductor", "full_prefill_max_req": 16}}',
        ],
        {
            "decode": {"policy": "full", "max_bs": 256, "buckets": [1, 256]},
            "prefill": {
                "policy": "piecewise",
                "compiler": "inductor",
                "max_requests": 16,
            },
        },
    ),
    *[([f"--{phase}-cuda-graph-backend", "tcpcg"], {phase: "piecewise"}) for phase in PHASES],
    *[([f"--{phase}-disable-cuda-graph"], {phase: "disabled"}) for phase in PHASES],
    *[([f"--{phase}-cuda-graph-max-bs", "8"], {phase: {"max_bs": 8}}) for phase in PHASES],
    *[([f"--{phase}-cuda-graph-bs", "8", "4"], {phase: {"buckets": [4, 8]}}) for phase in PHASES],
]


@pytest.mark.parametrize(("argv", "meaning"), OLDER_CASES, ids=lambda one: str(one)[:60])
def test_older_flag_means_the_same_as_the_new_spelling_that_its_warning_names(
    argv: list[str], meaning: dict[str, object]
) -> None:
    config, said = from_argv(*argv)
    assert config.to_dict() == meaning
    older = [text for text in said if f"{argv[0]} is an older spelling; use " in text]
    assert len(older) == 1
    new = re.sub(r"^.*? use (.*?)\.$", r"\1", older[0])
    words = [word for word in re.split(r" (?=--)|'", new) if word]
    again = [part for word in words for part in ([word] if "{" in word else word.split())]
    assert again[0].startswith("--")
    assert "cuda" not in new
    assert from_argv(*again)[0] == config


def test_older_cases_cover_the_whole_table() -> None:
    assert {argv[0] for argv, _ in OLDER_CASES} == {flag.name for flag in OLDER_FLAGS}
    assert len(OLDER_FLAGS) == 15


@pytest.mark.parametrize(
    "key", ["full_prefill_prefix_chunk_tokens", "max_seq_len", "max_context_size"]
)
def test_key_of_a_variant_or_of_a_length_is_left_to_the_engine(key: str) -> None:
    config, messages = from_argv("--cuda-graph-config", f'{{"prefill": {{"{key}": 8}}}}')
    assert config == DeviceGraphConfig()
    assert messages == [
        "--cuda-graph-config sets no graph mode or size. devgraph ignores "
        f"prefill.{key}, which the engine may use."
    ]


@pytest.mark.parametrize("flag", sorted(REMOVED_FLAGS))
def test_removed_flag_is_an_error_that_names_its_replacement(
    flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        PARSER.parse_args([flag, "1"])
    message = capsys.readouterr().err
    assert f"{flag} was removed: {REMOVED_FLAGS[flag]}" in message
    for name in re.findall(r"--[\w-]+", REMOVED_FLAGS[flag]):
        assert name in PARSER.format_help()


def test_flag_of_an_engine_that_has_a_removed_name_stays_its_own() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--enforce-eager", action="store_true")
    add_cli_args(parser)
    arguments = parser.parse_args(["--enforce-eager"])
    assert arguments.enforce_eager
    assert DeviceGraphConfig.from_args(arguments) == DeviceGraphConfig()


@pytest.mark.parametrize(
    ("argv", "prefill"),
    [
        (["--enable-breakable-cuda-graph", "--disable-piecewise-cuda-graph"], "disabled"),
        (["--disable-cuda-graph", "--prefill-cuda-graph-backend", "full"], "full"),
        (
            ["--prefill-cuda-graph-backend", "full", "--cuda-graph-mode", '{"prefill": "tcpcg"}'],
            "piecewise",
        ),
    ],
)
def test_older_flags_among_themselves_decide_as_in_their_engines(
    argv: list[str], prefill: str
) -> None:
    config, said = from_argv(*argv)
    assert config.prefill.policy == prefill
    assert any("prefill.policy" in text and " overrides " in text for text in said)
