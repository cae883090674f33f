"""The command line of the mode configuration."""

from __future__ import annotations

import argparse
import json
import re
import sys
import warnings
from pathlib import Path

import attrs
import pytest
import torch

from devgraph.api.config.facts import EngineFacts
from devgraph.api.config.flags import add_cli_args
from devgraph.api.config.model import DeviceGraphConfig, DeviceGraphWarning
from devgraph.api.config.older_flags import OLDER_FLAGS
from devgraph.api.config.phase import KEYS, PHASES
from devgraph.api.config.resolve import resolve
from devgraph.api.environment import MODE_VARIABLE
from devgraph.api.errors import ConfigError, ConfigTypeError
from tests.support.config_cases import MODE, PARSER, from_argv, make_parser

SHORTHANDS = (
    "device-graph-mode",
    "disable-device-graph",
    "device-graph-bs",
    "device-graph-max-bs",
)


def test_documentation_names_every_flag_and_key() -> None:
    text = (Path(__file__).parents[2] / "docs" / "modes.md").read_text()
    own = [f"--{phase}-{name}" for phase in PHASES for name in SHORTHANDS]
    for name in [MODE, "--device-graph-config", *own, *(flag.name for flag in OLDER_FLAGS)]:
        assert re.search(re.escape(name) + r"(?![\w-])", text), name


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        (["--device-graph-mode", '{"decode": "ful"}'], ["decode.policy", "Did you mean 'full'?"]),
        (["--device-graph-mode", "{"], ["line 1, column 2"]),
        (["--prefill-device-graph-mode", "peicewise"], ["Did you mean 'piecewise'?"]),
        (["--decode-cuda-graph-backend", "ful"], ["Did you mean 'full'?"]),
        (["--cuda-graph-mode", '{"decod": "full"}'], ["Did you mean 'decode'?"]),
        (["--cuda-graph-config", '{"decode": {"bss": [1]}}'], ["Did you mean 'bs'?"]),
    ],
)
def test_value_that_cannot_be_read_is_refused_with_its_flag(
    argv: list[str], parts: list[str]
) -> None:
    with pytest.raises(ConfigError) as error:
        DeviceGraphConfig.from_args(PARSER.parse_args(argv))
    for part in (argv[0], *parts):
        assert part in str(error.value)


def test_parser_ends_with_a_message_when_a_size_is_no_number(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        PARSER.parse_args(["--cuda-graph-bs", "one"])
    assert "expected integers separated by spaces, got" in capsys.readouterr().err


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
    assert not said


def test_warnings_point_at_the_caller() -> None:
    with pytest.warns(DeviceGraphWarning) as said:
        DeviceGraphConfig.from_args(PARSER.parse_args(["--disable-cuda-graph"]))
    assert [one.filename for one in said] == [__file__]


def test_add_cli_args_twice_changes_nothing() -> None:
    parser = make_parser()
    before = parser.format_help()
    add_cli_args(parser)
    assert parser.format_help() == before


def test_flags_are_added_to_a_group_and_to_nothing_else() -> None:
    parser = argparse.ArgumentParser()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a group in a group is deprecated
        add_cli_args(parser.add_argument_group("graphs"))  # type: ignore[arg-type]
    assert parser.parse_args([MODE, "{}"]).device_graph_mode == "{}"
    with pytest.raises(ConfigTypeError, match="expected an argparse parser"):
        add_cli_args(None)  # type: ignore[arg-type]


def test_add_cli_args_leaves_an_engines_own_flags_alone() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--disable-cuda-graph", action="store_true")
    parser.add_argument("--cuda-graph-bs", type=int, nargs="+", dest="decode_cuda_graph_bs")
    parser.add_argument("--cuda-graph-max-bs", type=int, default=160)
    parser.add_argument("--cuda-graph-config", type=json.loads)
    add_cli_args(parser)
    plain = parser.parse_args([])
    assert vars(plain) == {
        "disable_cuda_graph": False,
        "decode_cuda_graph_bs": None,
        "cuda_graph_max_bs": 160,
        "cuda_graph_config": None,
    }
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


@pytest.mark.parametrize(
    ("given", "part"),
    [
        ({"disable_cuda_graph": "false"}, "--disable-cuda-graph: expected true or false"),
        ({"decode_disable_device_graph": 0}, "device-graph: expected true or false, got 0"),
        ({"decode_device_graph_bs": torch.tensor([])}, "the list is empty"),
        ({"decode_device_graph_bs": torch.tensor([1, 2])}, r"decode.buckets\[0\]"),
    ],
)
def test_option_of_an_engine_with_another_kind_of_value_is_refused(
    given: dict[str, object], part: str
) -> None:
    with pytest.raises(ConfigError, match=part):
        DeviceGraphConfig.from_args(argparse.Namespace(**given))


def test_from_args_accepts_a_mode_that_is_parsed_already() -> None:
    arguments = argparse.Namespace(device_graph_mode={"decode": {"buckets": (1, 2)}})
    assert DeviceGraphConfig.from_args(arguments).decode.buckets == (1, 2)


def test_text_is_parsed_once_and_its_buckets_are_checked_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parsed: list[str] = []
    checked: list[object] = []
    loads, read = json.loads, KEYS["buckets"].read
    monkeypatch.setattr(json, "loads", lambda text, **_: (parsed.append(text), loads(text))[1])
    counting = attrs.evolve(
        KEYS["buckets"], read=lambda value, path: (checked.append(value), read(value, path))[1]
    )
    monkeypatch.setitem(KEYS, "buckets", counting)  # type: ignore[call-overload]
    mode = '{"decode": {"buckets": [2, 1]}, "backends": {"npu": {"prefill": {"buckets": [8]}}}}'
    arguments = PARSER.parse_args([MODE, mode])
    config = DeviceGraphConfig.from_args(arguments).for_backend("npu")
    assert resolve(config, EngineFacts()).effective.prefill.buckets == (8,)
    assert parsed == [mode]
    assert checked == [[2, 1], [8]]


def test_environment_overrides_pyproject_and_every_flag_overrides_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = '[tool.devgraph]\ndecode = {policy = "piecewise", warmup = 3, strict = true}\n'
    (tmp_path / "pyproject.toml").write_text(f'{table}prefill = "full"\n')
    inner = tmp_path / "engine"
    inner.mkdir()
    monkeypatch.chdir(inner)
    monkeypatch.setenv(MODE_VARIABLE, '{"decode": {"policy": "breakable", "warmup": 4}}')
    config, said = from_argv("--disable-cuda-graph", "--decode-device-graph-mode", "full")
    assert config.to_dict() == {
        "decode": {"policy": "full", "warmup": 4, "strict": True},
        "prefill": "disabled",
    }
    for override in (
        "decode.warmup: 4 from DEVGRAPH_MODE overrides 3 from [tool.devgraph] of ",
        "prefill.policy: 'disabled' from --disable-cuda-graph overrides 'full' from [tool.devgraph",
    ):
        assert any(text.startswith(override) for text in said), said
    monkeypatch.delenv(MODE_VARIABLE)
    config, said = from_argv()
    assert config.prefill.policy == "full" and said == []


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ('[tool.devgraph]\ndecode = "ful"', "pyproject.toml: decode.policy: there is no policy"),
        ('[tool.devgraph]\ndecod = "full"', "there is no phase 'decod'"),
        ("[tool.devgraph", "cannot read [tool.devgraph] of "),
    ],
)
def test_wrong_table_of_pyproject_is_refused_with_its_place(
    text: str, part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pyproject.toml").write_text(text)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=re.escape(part)):
        from_argv()


def test_table_of_pyproject_is_refused_where_python_reads_no_toml(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "tomllib", None)
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "x"\n')
    assert from_argv()[1] == []
    (tmp_path / "pyproject.toml").write_text('[tool.devgraph]\ndecode = "full"\n')
    with pytest.raises(ConfigError, match=r"needs Python 3\.11 or newer"):
        from_argv()


def test_wrong_mode_ends_an_engine_with_the_usage_of_its_parser(
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = PARSER.parse_args(["--decode-device-graph-mode", "ful"])
    with pytest.raises(SystemExit):
        DeviceGraphConfig.from_args(arguments, parser=PARSER)
    assert "error: --decode-device-graph-mode: decode.policy: there is no policy 'ful'" in (
        capsys.readouterr().err
    )
