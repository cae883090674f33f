"""The flags of engines before: each means what it meant there."""

from __future__ import annotations

import argparse
import json
import re
import types
import warnings

import pytest

from devgraph.api.config.model import DeviceGraphConfig, DeviceGraphWarning
from devgraph.api.config.older_flags import OLDER_FLAGS
from devgraph.api.config.phase import PHASES
from devgraph.api.errors import ConfigError, ConfigTypeError
from tests.support.config_cases import BOTH_DISABLED, both, from_argv

OLDER_CASES: list[tuple[list[str], dict[str, object]]] = [
    (["--disable-cuda-graph"], BOTH_DISABLED),
    (["--enforce-eager"], BOTH_DISABLED),
    (["--debug-cuda-graph"], {phase: {"emulate": True} for phase in ("decode", "prefill")}),
    (["--disable-cuda-graph-padding"], {"decode": {"max_padding": 1.0}}),
    (["--enable-piecewise-cuda-graph"], {"prefill": "piecewise"}),
    (["--enforce-piecewise-cuda-graph"], {"prefill": "piecewise"}),
    (["--enable-breakable-cuda-graph"], {"prefill": "breakable"}),
    (["--disable-piecewise-cuda-graph"], {"prefill": "disabled"}),
    (["--cuda-graph-sizes", "256"], both("max_bs", 256)),
    (["--cuda-graph-sizes", "4", "2"], both("buckets", [2, 4])),
    (["--max-cudagraph-capture-size", "512"], both("max_bs", 512)),
    (["--cudagraph-capture-sizes", "1", "8"], both("buckets", [1, 8])),
    (["--max-seq-len-to-capture", "8192"], both("max_seq_len", 8192)),
    (["--max-context-len-to-capture", "8192"], both("max_seq_len", 8192)),
    (["--cuda-graph-max-bs", "32"], {"decode": {"max_bs": 32}}),
    (["--cuda-graph-bs", "1", "2", "8"], {"decode": {"buckets": [1, 2, 8]}}),
    (["--piecewise-cuda-graph-max-tokens", "4096"], {"prefill": {"max_bs": 4096}}),
    (["--piecewise-cuda-graph-tokens", "64", "512"], {"prefill": {"buckets": [64, 512]}}),
    (["--piecewise-cuda-graph-compiler", "inductor"], {"prefill": {"compiler": "inductor"}}),
    (["--cuda-graph-tc-compiler", "inductor"], both("compiler", "inductor")),
    (["--cuda-graph-prefill-max-context", "25.6k"], {"prefill": {"max_seq_len": 25600}}),
    (["--context-bucket", "32Ki"], {"prefill": {"max_seq_len": 32768}}),
    (["--cuda-graph-max-seq-len-prefill", "4096"], {"prefill": {"max_seq_len": 4096}}),
    (
        ["--cuda-graph-mode", '{"decode": "full", "prefill": "tcpcg"}'],
        {"decode": "full", "prefill": "piecewise"},
    ),
    (
        [
            "--cuda-graph-config",
            '{"decode": {"backend": "full", "max_bs": 256, "bs": [1, 256]}, "prefill": '
            '{"backend": "tc_piecewise", "tc_compiler": "inductor", "full_prefill_max_req": 16, '
            '"max_context_size": 4096, "max_seq_len": 2048}}',
        ],
        {
            "decode": {"policy": "full", "max_bs": 256, "buckets": [1, 256]},
            "prefill": {
                "policy": "piecewise",
                "compiler": "inductor",
                "max_requests": 16,
                "max_seq_len": 2048,
            },
        },
    ),
    (
        [
            "--compilation-config",
            '{"cudagraph_mode": "FULL", "cudagraph_capture_sizes": [1, 2], '
            '"max_cudagraph_capture_size": 2, "cudagraph_num_of_warmups": 1}',
        ],
        {
            phase: {"policy": "full", "buckets": [1, 2], "max_bs": 2, "warmup": 1}
            for phase in PHASES
        },
    ),
    (["--compilation-config", '{"use_cudagraph": false}'], BOTH_DISABLED),
    (
        ["--compilation-config", '{"full_cuda_graph": true, "backend": "inductor"}'],
        {phase: {"policy": "full", "compiler": "inductor"} for phase in PHASES},
    ),
    (
        ["--compilation-config.cudagraph_mode", "full_decode_only"],
        {"decode": "full", "prefill": "disabled"},
    ),
    (["--compilation-config.cudagraph_capture_sizes", "[4, 1]"], both("buckets", [1, 4])),
    (["--compilation-config.max_cudagraph_capture_size", "64"], both("max_bs", 64)),
    (["--cudagraph-mode", "NONE"], BOTH_DISABLED),
    (["--optimization-level", "2"], {"decode": "full", "prefill": "piecewise"}),
    *[([f"--cuda-graph-backend-{phase}", "breakable"], {phase: "breakable"}) for phase in PHASES],
    *[([f"--{phase}-cuda-graph-backend", "tcpcg"], {phase: "piecewise"}) for phase in PHASES],
    *[([f"--{phase}-cuda-graph-mode", "full"], {phase: "full"}) for phase in PHASES],
    *[([f"--disable-{phase}-cuda-graph"], {phase: "disabled"}) for phase in PHASES],
    *[([f"--{phase}-disable-cuda-graph"], {phase: "disabled"}) for phase in PHASES],
    *[([f"--cuda-graph-max-bs-{phase}", "8"], {phase: {"max_bs": 8}}) for phase in PHASES],
    *[([f"--{phase}-cuda-graph-max-bs", "8"], {phase: {"max_bs": 8}}) for phase in PHASES],
    *[([f"--cuda-graph-bs-{phase}", "8", "4"], {phase: {"buckets": [4, 8]}}) for phase in PHASES],
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
    new = re.sub(r"^.*? use (.*?)\.( Not for devgraph .*)?$", r"\1", older[0])
    words = [word for word in re.split(r" (?=--)|'", new) if word]
    again = [part for word in words for part in ([word] if "{" in word else word.split())]
    assert again[0].startswith("--")
    assert "cuda" not in new
    assert from_argv(*again)[0] == config


ENGINES_OWN = {"--disable-draft-cuda-graph"}


def test_older_cases_cover_the_whole_table() -> None:
    covered = {argv[0] for argv, _ in OLDER_CASES} | ENGINES_OWN
    assert covered == {flag.name for flag in OLDER_FLAGS}


@pytest.mark.parametrize("flag", sorted(ENGINES_OWN))
def test_older_flag_about_something_else_is_named_as_left_to_the_engine(flag: str) -> None:
    config, said = from_argv(flag)
    assert config == DeviceGraphConfig()
    (text,) = said
    assert text.startswith(f"{flag} chooses no graph mode or size. Not for devgraph and left to ")


@pytest.mark.parametrize(
    ("argv", "decode", "prefill"),
    [
        (["-O0"], "disabled", "disabled"),
        (["-O", "1"], "piecewise", "piecewise"),
        (["-O3"], "full", "piecewise"),
        (["--optimization-level", "O2"], "full", "piecewise"),
        (["-O", '{"cudagraph_mode": "FULL"}'], "full", "full"),
        (["-O0", "-cc", '{"cudagraph_mode": "FULL"}'], "full", "full"),
        (["-O3", "--enforce-eager"], "disabled", "disabled"),
    ],
)
def test_optimization_level_is_the_weakest_older_flag(
    argv: list[str], decode: str, prefill: str
) -> None:
    config, said = from_argv(*argv)
    assert (config.decode.policy, config.prefill.policy) == (decode, prefill)
    assert sum("--optimization-level is an older spelling" in text for text in said) == 1


@pytest.mark.parametrize(
    ("mode", "decode", "prefill"),
    [
        ("NONE", "disabled", "disabled"),
        ("PIECEWISE", "piecewise", "piecewise"),
        ("FULL", "full", "full"),
        ("FULL_DECODE_ONLY", "full", "disabled"),
        ("FULL_AND_PIECEWISE", "full", "piecewise"),
    ],
)
def test_compilation_modes_map_to_phases(mode: str, decode: str, prefill: str) -> None:
    for argv in (
        ["-cc", json.dumps({"cudagraph_mode": mode})],
        [f"-cc.cudagraph_mode={mode.lower()}"],
        ["--cudagraph-mode", mode],
    ):
        config, said = from_argv(*argv)
        assert (config.decode.policy, config.prefill.policy) == (decode, prefill)
        assert len(said) == 1


def test_compilation_config_names_the_keys_that_it_leaves_to_the_engine() -> None:
    config, said = from_argv("-cc", '{"mode": 3, "custom_ops": ["all"], "cudagraph_mode": "FULL"}')
    assert config.prefill.policy == "full"
    assert len(said) == 1
    assert "left to the engine: mode, custom_ops" in said[0]
    for text, left in (('{"mode": 3}', "mode"), ("3", "level 3")):
        config, said = from_argv("-cc", text)
        assert config == DeviceGraphConfig()
        assert said == [
            "--compilation-config chooses no graph mode or size. "
            f"Not for devgraph and left to the engine: {left}."
        ]
    _, said = from_argv(
        "--cuda-graph-config", '{"prefill": {"full_prefill_prefix_chunk_tokens": 8}}'
    )
    assert len(said) == 1
    assert "prefill.full_prefill_prefix_chunk_tokens" in said[0]


@pytest.mark.parametrize(
    ("argv", "prefill"),
    [
        (["--enable-breakable-cuda-graph", "--disable-piecewise-cuda-graph"], "disabled"),
        (["--disable-cuda-graph", "--cuda-graph-backend-prefill", "full"], "full"),
        (["--enforce-eager", "--cudagraph-mode", "FULL"], "disabled"),
    ],
)
def test_older_flags_among_themselves_decide_as_in_their_engines(
    argv: list[str], prefill: str
) -> None:
    config, said = from_argv(*argv)
    assert config.prefill.policy == prefill
    assert any("prefill.policy" in text and " overrides " in text for text in said)


def test_capture_sizes_that_are_null_say_nothing() -> None:
    config, _ = from_argv("-cc.cudagraph_capture_sizes", "null")
    assert config.to_dict() == from_argv()[0].to_dict()


def test_from_args_reads_an_engines_own_compilation_object() -> None:
    class Mode:
        name = "FULL_DECODE_ONLY"

    chosen = types.SimpleNamespace(
        cudagraph_mode=Mode(), cudagraph_capture_sizes=[8, 1], cudagraph_num_of_warmups=0
    )
    with pytest.warns(DeviceGraphWarning, match="--compilation-config"):
        config = DeviceGraphConfig.from_args(argparse.Namespace(compilation_config=chosen))
    assert config.to_dict() == {
        "decode": {"policy": "full", "buckets": [1, 8]},
        "prefill": {"policy": "disabled", "buckets": [1, 8]},
    }
    untouched = types.SimpleNamespace(cudagraph_mode=None, cudagraph_num_of_warmups=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        empty = DeviceGraphConfig.from_args(argparse.Namespace(compilation_config=untouched))
    assert empty == DeviceGraphConfig()


@pytest.mark.parametrize("length", ["9" * 400, "9" * 400 + ".5k", "1" + "0" * 15])
def test_length_that_no_sequence_has_is_refused(length: str) -> None:
    with pytest.raises(ConfigError, match="expected a length such as 32768"):
        DeviceGraphConfig.from_args(argparse.Namespace(context_bucket=length))


@pytest.mark.parametrize("key", ["use_cudagraph", "full_cuda_graph"])
def test_switch_of_a_compilation_config_that_is_neither_on_nor_off_is_refused(key: str) -> None:
    with pytest.raises(ConfigTypeError, match=f"{key}: expected true or false, got 0"):
        DeviceGraphConfig.from_args(argparse.Namespace(compilation_config={key: 0}))
