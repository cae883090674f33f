"""Reading a mode from JSON text and from files."""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from devgraph.api.config.model import DeviceGraphConfig, DeviceGraphWarning
from devgraph.api.config.phase import KEYS, PHASES
from devgraph.api.errors import ConfigError, ConfigTypeError
from tests.support.config_cases import MODE, from_file


def test_file_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "engine.json"
    path.write_text('{"device_graph": {"decode": "breakable"}}', encoding="utf-8-sig")
    assert from_file(path).decode.policy == "breakable"


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ('{"decode": "ful"}', ["decode.policy", "'ful'", "piecewise", "Did you mean 'full'?"]),
        ('{"decode": "FULL"}', ["decode.policy", "Did you mean 'full'?"]),
        ('{"decode": "off"}', ["decode.policy", "Did you mean 'disabled'?"]),
        ('{"decod": "full"}', ["phase 'decod'", "prefill", "Did you mean 'decode'?"]),
        ('{"verify": "start"}', ["'verify' is a key of a phase; move it into decode or prefill"]),
        ('{"decode": {"buckts": [1]}}', ["decode", "key 'buckts'", "Did you mean 'buckets'?"]),
        ('{"decode": {"bs": [1]}}', ["key 'bs'", "buckets", "max_bs"]),
        ('{"prefill": {"backend": "full"}}', ["key 'backend'", "policy"]),
        ('{"backends": {"npu": {"prefil": "full"}}}', ["backends.npu", "Did you mean 'prefill'?"]),
        ('{"backends": {"npu": {"decode": "x"}}}', ["backends.npu.decode.policy", "'x'"]),
        ('{"decode": {"buckets": [4, 0]}}', ["decode.buckets[1]", "at least 1", "got 0"]),
        ('{"decode": {"buckets": []}}', ["decode.buckets", "empty", "'disabled'"]),
        ('{"decode": {"max_padding": 0.5}}', ["decode.max_padding", "at least 1", "0.5"]),
        ('{"decode": {"time_budget_s": 0}}', ["decode.time_budget_s", "greater than 0"]),
        ('{"decode": {"compiler": "indctor"}}', ["decode.compiler", "Did you mean 'inductor'?"]),
        ('{"decode": {"capture": "lazi"}}', ["decode.capture", "Did you mean 'lazy'?"]),
        ('{"decode": {"max_padding": NaN}}', ["NaN"]),
        (
            '{"decode": {"executable_budget": 1.0}}',
            ["decode.executable_budget", "nor a share below 1", "1.0"],
        ),
        (
            '{"decode": {"executable_budget": 1.5}}',
            ["decode.executable_budget", "nor a share below 1", "1.5"],
        ),
        ('{"decode": "full", "decode": "disabled"}', ["'decode'", "twice"]),
        ('{"decode": {"buckets": [9], "max_bs": 8}}', ["decode", "9", "max_bs=8"]),
    ],
)
def test_from_json_refuses_what_does_not_exist_and_says_what_does(
    text: str, parts: list[str]
) -> None:
    """FAULTS 33."""
    with pytest.raises(ConfigError) as error:
        DeviceGraphConfig.from_json(text, source=MODE)
    assert str(error.value).startswith(MODE)
    for part in parts:
        assert part in str(error.value)


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("[1]", "expected an object"),
        ('"full"', "expected an object"),
        ('{"decode": false}', "decode.policy"),
        ('{"decode": null}', "decode.policy"),
        ('{"decode": ["full"]}', "decode.policy"),
        ('{"decode": {"buckets": "64"}}', "decode.buckets"),
        ('{"decode": {"buckets": [true]}}', "decode.buckets[0]"),
        ('{"decode": {"max_bs": 8.0}}', "decode.max_bs"),
        ('{"decode": {"max_bs": true}}', "decode.max_bs"),
        ('{"decode": {"strict": 1}}', "decode.strict"),
        ('{"decode": {"max_padding": "2"}}', "decode.max_padding"),
        ('{"backends": ["npu"]}', "backends"),
        ('{"backends": {"npu": "full"}}', "backends.npu"),
    ],
)
def test_from_json_refuses_wrong_kinds_with_the_path(text: str, place: str) -> None:
    """FAULTS 33."""
    with pytest.raises(ConfigTypeError) as error:
        DeviceGraphConfig.from_json(text)
    assert place in str(error.value)
    assert isinstance(error.value, TypeError)


@pytest.mark.parametrize(
    ("text", "line", "column", "rest"),
    [
        ('{"decode": full}', 1, 12, "'full}'"),
        ('{"decode": "full"', 1, 18, "at its end"),
        ('{"decode": "full",\n "prefill" "full"}', 2, 12, "'\"full\"}'"),
        ("", 1, 1, "at its end"),
        ("full", 1, 1, "'full'"),
        ('{"decode": "full"}\n\n}', 3, 1, "'}'"),
    ],
)
def test_broken_json_is_reported_with_line_and_column(
    text: str, line: int, column: int, rest: str
) -> None:
    """FAULTS 33."""
    with pytest.raises(ConfigError, match=f"line {line}, column {column}") as error:
        DeviceGraphConfig.from_json(text)
    assert rest in str(error.value)


@pytest.mark.parametrize("text", ["[" * 5000 + "]" * 5000, '{"a":' * 200_000])
def test_json_that_is_nested_too_deeply_is_refused(text: str) -> None:
    """FAULTS 33."""
    with pytest.raises(ConfigError):
        DeviceGraphConfig.from_json(text)


@pytest.mark.parametrize("text", ['{"decode": NaN}', '{"decode": "full", "decode": "full"}'])
def test_place_of_text_that_json_does_not_have_is_named_once(text: str) -> None:
    with pytest.raises(ConfigError) as error:
        DeviceGraphConfig.from_json(text, source=MODE)
    assert str(error.value).count(MODE) == 1


def test_number_of_thousands_of_digits_is_refused() -> None:
    with pytest.raises(ConfigError, match="mode configuration: .*digits"):
        DeviceGraphConfig.from_json('{"decode": {"max_bs": ' + "9" * 5000 + "}}")


@pytest.mark.parametrize("text", ["full", "{'decode': 'full'}"])
def test_text_that_is_no_json_is_told_how_a_mode_is_written(text: str) -> None:
    with pytest.raises(
        ConfigError, match=r"column \d.*such as '{\"decode\": \"full\"}'; --decode-device"
    ):
        DeviceGraphConfig.from_json(text)


def test_older_policy_names_are_read_with_a_warning_that_names_the_new_one() -> None:
    for name in ("tc_piecewise", "tcpcg"):
        with pytest.warns(DeviceGraphWarning, match=f"'{name}' is the older name.*'piecewise'"):
            config = DeviceGraphConfig.from_json(json.dumps({"prefill": name}))
        assert config.prefill.policy == "piecewise"


@pytest.mark.parametrize("name", ["engine.json", "engine.yaml", "engine.conf"])
def test_from_file_reads_the_device_graph_section(tmp_path: Path, name: str) -> None:
    section = {"decode": "breakable", "backends": {"npu": {"decode": {"buckets": [1, 2]}}}}
    path = tmp_path / name
    if name.endswith("yaml"):
        path.write_text(
            "model: llama\ndevice_graph:\n  decode: breakable\n  backends:\n    npu:\n"
            "      decode: {buckets: [1, 2]}\n"
        )
    else:
        path.write_text(json.dumps({"model": "llama", "device_graph": section}))
    config = from_file(path)
    assert config == DeviceGraphConfig.from_dict(section)
    assert config.decode.explicit == {"policy"}


@pytest.mark.parametrize(
    ("name", "text", "parts"),
    [
        (
            "a.json",
            '{"device_graphs": {}}',
            ["no section 'device_graph', only ['device_graphs']. "],
        ),
        ("a.json", str({f"k{n}": 0 for n in range(999)}).replace("'", '"'), ["'k1'", "..."]),
        ("a.json", '{"device_graph": {"decode": }}', ["line 1, column 29"]),
        ("a.json", "[]", ["expected an object"]),
        ("a.yaml", "device_graph: {decode: ful}\n", ["decode.policy", "Did you mean 'full'?"]),
        (
            "a.yaml",
            "device_graph:\n  decode: off\n",
            ["decode.policy", "is a string, got False", "disabled"],
        ),
        ("a.yaml", "device_graph:\n  decode: full\n  decode: disabled\n", ["twice", "line 3"]),
        ("a.yaml", "device_graph: {decode: [\n", ["invalid YAML in line 2, column 1: expected "]),
        ("a.yaml", "just text\n", ["expected an object"]),
        ("a.yaml", "built: 2020-13-45\n", ["invalid YAML", "month must be in 1..12"]),
        ("a.yaml", "port: !!int x\n", ["invalid YAML", "invalid literal"]),
        ("a.yaml", "built: !!timestamp x\n", ["invalid YAML", "AttributeError"]),
        ("a.yaml", "\0", ["invalid YAML: ReaderError: unacceptable character #x0000"]),
    ],
)
def test_from_file_names_the_file_and_the_place(
    tmp_path: Path, name: str, text: str, parts: list[str]
) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(ConfigError) as error:
        from_file(path)
    for part in (str(path), *parts):
        assert part in str(error.value)
    assert "\n" not in str(error.value)


def test_from_file_refuses_files_that_cannot_be_read(tmp_path: Path) -> None:
    for path in (tmp_path / "missing.json", 5):
        with pytest.raises(ConfigError, match=f"cannot read the file '{path}'"):
            from_file(path)
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="cannot read"):
        from_file(tmp_path / "binary.json")


def test_from_file_without_pyyaml_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "engine.yaml"
    path.write_text("device_graph: {decode: full}\n")
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(ConfigError, match="pip install pyyaml"):
        from_file(path)


def test_json_files_are_read_without_pyyaml(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "engine.json"
    path.write_text('{"device_graph": {"decode": "disabled"}}')
    monkeypatch.setitem(sys.modules, "yaml", None)
    assert from_file(path).decode.policy == "disabled"


@settings(max_examples=200, deadline=None)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from([*PHASES, "backends", *KEYS, "npu", "x"]), inner, max_size=4
            )
        ),
        max_leaves=12,
    )
)
def test_any_document_is_read_or_refused_with_a_config_error(document: object) -> None:
    text = json.dumps(document)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            config = DeviceGraphConfig.from_json(text)
        except ConfigError:
            return
        assert isinstance(document, dict)
        assert DeviceGraphConfig.from_json(config.to_json()) == config
