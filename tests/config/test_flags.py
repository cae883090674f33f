"""The command line of the mode configuration: flags, older flags, precedence, warnings."""

from __future__ import annotations

import argparse
import json
import re
import types
import warnings
from pathlib import Path

import pytest

from devgraph.api.config.flags import add_cli_args
from devgraph.api.config.model import DeviceGraphConfig, DeviceGraphWarning
from devgraph.api.config.older_flags import OLDER_FLAGS
from devgraph.api.config.values import KEYS, PHASES
from devgraph.api.errors import ConfigError
from tests.support.config_cases import BOTH_DISABLED, MODE, PARSER, both, from_argv, make_parser

SHORTHANDS = (
    "device-graph-mode",
    "disable-device-graph",
    "device-graph-bs",
    "device-graph-max-bs",
)
OLDER_CASES: list[tuple[list[str], dict[str, object]]] = [
    (["--disable-cuda-graph"], BOTH_DISABLED),
    (["--enforce-eager"], BOTH_DISABLED),
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


ENGINES_OWN = {"--disable-draft-cuda-graph", "--debug-cuda-graph"}


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


def test_documentation_names_every_flag_and_key() -> None:
    text = (Path(__file__).parents[2] / "docs" / "modes.md").read_text()
    own = [f"--{phase}-{name}" for phase in PHASES for name in SHORTHANDS]
    for name in [MODE, "--device-graph-config", *own, *(flag.name for flag in OLDER_FLAGS)]:
        assert re.search(re.escape(name) + r"(?![\w-])", text), name
    for key in KEYS:
        assert f"| `{key}` |" in text, key


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
    ("argv", "parts"),
    [
        (["--device-graph-mode", '{"decode": "ful"}'], ["decode.policy", "Did you mean 'full'?"]),
        (["--device-graph-mode", "{"], ["line 1, column 2"]),
        (["--prefill-device-graph-mode", "peicewise"], ["Did you mean 'piecewise'?"]),
        (["--cuda-graph-backend-decode", "ful"], ["Did you mean 'full'?"]),
        (["--cuda-graph-mode", '{"decod": "full"}'], ["Did you mean 'decode'?"]),
        (["--cuda-graph-config", '{"decode": {"bss": [1]}}'], ["Did you mean 'bs'?"]),
        (["--cudagraph-mode", "FUL"], ["FULL_AND_PIECEWISE", "Did you mean 'FULL'?"]),
        (["--context-bucket", "1.5Ki"], ["32Ki", "'1.5Ki'"]),
        (["--cuda-graph-bs", "one"], ["invalid int value"]),
        (["--optimization-level", "9"], ["from 0 to 3", "'9'"]),
    ],
)
def test_parser_ends_with_a_message_when_a_value_cannot_be_read(
    argv: list[str], parts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        PARSER.parse_args(argv)
    assert ended.value.code == 2
    message = capsys.readouterr().err
    assert message.count(argv[0]) >= 1
    for part in parts:
        assert part in message


@pytest.mark.parametrize(
    ("argv", "part"),
    [
        (["--decode-device-graph-bs", "4", "0"], r"--decode-device-graph-bs: decode.buckets\[1\]"),
        (["--prefill-device-graph-max-bs", "-1"], "prefill.max_bs: expected at least 1, got -1"),
        (["--cuda-graph-max-bs", "0"], "--cuda-graph-max-bs: expected at least 1, got 0"),
    ],
)
def test_from_args_names_the_flag_of_a_bad_number(argv: list[str], part: str) -> None:
    with pytest.raises(ConfigError, match=part):
        DeviceGraphConfig.from_args(PARSER.parse_args(argv))


def test_shorthands_set_their_phase_only() -> None:
    config, said = from_argv(
        *("--prefill-device-graph-mode", "full", "--prefill-device-graph-bs", "512", "64"),
        *("--decode-disable-device-graph", "--decode-device-graph-max-bs", "8"),
    )
    assert config.to_dict() == {
        "decode": {"policy": "disabled", "max_bs": 8},
        "prefill": {"policy": "full", "buckets": [64, 512]},
    }
    assert len(said) == 1
    assert "decode: max_bs=8 from --decode-device-graph-max-bs has no effect" in said[0]


def test_each_level_beats_the_weaker_ones_per_key_with_both_names(tmp_path: Path) -> None:
    path = tmp_path / "mode.json"
    path.write_text('{"device_graph": {"decode": {"policy": "piecewise", "warmup": 7}}}')
    config, said = from_argv(
        *("--device-graph-config", str(path), "--enforce-eager", "--cuda-graph-bs", "1", "2"),
        *("--decode-device-graph-mode", "breakable"),
        *("--device-graph-mode", '{"decode": "full"}'),
    )
    assert config.to_dict() == {
        "decode": {"policy": "full", "buckets": [1, 2], "warmup": 7},
        "prefill": "disabled",
    }
    overrides = [text for text in said if " overrides " in text]
    assert overrides == [
        "decode.policy: 'full' from --device-graph-mode overrides 'piecewise' from "
        f"--device-graph-config {path}",
        "decode.policy: 'full' from --device-graph-mode overrides 'disabled' from --enforce-eager",
        "decode.policy: 'full' from --device-graph-mode overrides 'breakable' from "
        "--decode-device-graph-mode",
    ]
    assert len(said) == len(overrides) + 2


def test_equal_values_from_two_places_are_no_override() -> None:
    _, said = from_argv("--prefill-device-graph-mode", "full", MODE, '{"prefill": "full"}')
    assert said == []


def test_mode_beats_the_switch_of_the_same_phase() -> None:
    config, said = from_argv(
        "--prefill-device-graph-mode", "full", "--prefill-disable-device-graph"
    )
    assert config.prefill.policy == "full"
    assert len(said) == 1
    assert "--prefill-device-graph-mode overrides" in said[0]
    assert "--prefill-disable-device-graph" in said[0]


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


@pytest.mark.parametrize(
    ("flag", "value"), [("--cuda-graph-max-bs", "8"), ("--decode-device-graph-max-bs", "8")]
)
def test_buckets_of_a_stronger_source_raise_a_weaker_maximum(flag: str, value: str) -> None:
    config, said = from_argv(flag, value, MODE, '{"decode": {"buckets": [4, 64]}}')
    assert config.decode.buckets == (4, 64)
    assert config.decode.max_bs == 64
    assert any("the bucket 64" in text and flag in text for text in said)


def test_maximum_of_an_equal_or_stronger_source_leaves_larger_buckets_out() -> None:
    config, said = from_argv("--cuda-graph-bs", "4", "64", MODE, '{"decode": {"max_bs": 8}}')
    assert (config.decode.buckets, config.decode.max_bs) == ((4,), 8)
    assert any("64 from --cuda-graph-bs left out" in text for text in said)
    config, _ = from_argv("--decode-device-graph-bs", "64", "--decode-device-graph-max-bs", "8")
    assert config.decode.buckets == (8,)


def test_backends_part_refines_buckets_and_maximum_of_the_same_text() -> None:
    with pytest.warns(DeviceGraphWarning, match=r"backends\.npu\.decode\.max_bs"):
        config = DeviceGraphConfig.from_json(
            '{"decode": {"max_bs": 8}, "backends": {"npu": {"decode": {"buckets": [64]}}}}'
        )
    assert config.decode.max_bs == 8
    assert config.for_backend("npu").decode.buckets == (64,)
    assert config.for_backend("npu").decode.max_bs == 64


def test_general_part_of_a_stronger_source_beats_a_weaker_part_for_a_backend(
    tmp_path: Path,
) -> None:
    path = tmp_path / "mode.json"
    path.write_text('{"device_graph": {"backends": {"npu": {"prefill": "full"}}}}')
    config, said = from_argv("--device-graph-config", str(path), "--prefill-disable-device-graph")
    assert config.for_backend("npu").prefill.policy == "disabled"
    assert len(said) == 1
    assert "backends.npu.prefill.policy" in said[0]
    assert "--prefill-disable-device-graph overrides" in said[0]
    assert str(path) in said[0]


def test_part_for_a_backend_of_a_stronger_source_overrides_there_with_both_names() -> None:
    mode = '{"backends": {"npu": {"prefill": "full"}}}'
    config, said = from_argv("--prefill-disable-device-graph", MODE, mode)
    assert config.prefill.policy == "disabled"
    assert config.for_backend("npu").prefill.policy == "full"
    assert said == [
        "backends.npu.prefill.policy: on this backend 'full' from --device-graph-mode overrides "
        "'disabled' from --prefill-disable-device-graph"
    ]


def test_warnings_point_at_the_caller() -> None:
    with pytest.warns(DeviceGraphWarning) as said:
        DeviceGraphConfig.from_args(PARSER.parse_args(["--disable-cuda-graph"]))
    assert [one.filename for one in said] == [__file__]


def test_add_cli_args_twice_changes_nothing() -> None:
    parser = make_parser()
    before = parser.format_help()
    add_cli_args(parser)
    assert parser.format_help() == before


def test_add_cli_args_leaves_an_engines_own_flags_alone() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("-c", dest="short")
    parser.add_argument("--disable-cuda-graph", action="store_true")
    parser.add_argument("--cuda-graph-bs", type=int, nargs="+", dest="cuda_graph_bs_decode")
    parser.add_argument("--cuda-graph-max-bs", type=int, default=160)
    parser.add_argument("--cuda-graph-config", type=json.loads)
    parser.add_argument("--compilation-config", default=None)
    add_cli_args(parser)
    plain = parser.parse_args([])
    assert vars(plain) == {
        "short": None,
        "disable_cuda_graph": False,
        "cuda_graph_bs_decode": None,
        "cuda_graph_max_bs": 160,
        "cuda_graph_config": None,
        "compilation_config": None,
    }
    assert parser.parse_args(["-cc"]).short == "c"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        config = DeviceGraphConfig.from_args(plain, parser=parser)
    assert config == DeviceGraphConfig()
    with pytest.warns(DeviceGraphWarning, match="--cuda-graph-max-bs"):
        assert DeviceGraphConfig.from_args(plain).decode.max_bs == 160
    arguments = parser.parse_args(
        ["--cuda-graph-bs", "2", "4", "--cuda-graph-config", '{"prefill": {"backend": "full"}}']
    )
    with pytest.warns(DeviceGraphWarning):
        config = DeviceGraphConfig.from_args(arguments, parser=parser)
    assert config.to_dict() == {"decode": {"buckets": [2, 4]}, "prefill": "full"}


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


def test_from_args_accepts_a_mode_that_is_parsed_already() -> None:
    arguments = argparse.Namespace(device_graph_mode={"decode": {"buckets": (1, 2)}})
    assert DeviceGraphConfig.from_args(arguments).decode.buckets == (1, 2)
