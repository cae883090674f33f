"""The mode configuration: JSON text, files, values in Python."""

from __future__ import annotations

import json
import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest

from devgraph.api.config.model import DeviceGraphConfig, DeviceGraphWarning, Overlay, PhaseConfig
from devgraph.api.config.values import KEYS
from devgraph.api.errors import ConfigError, ConfigTypeError
from tests.support.config_cases import MODE, from_argv


def test_defaults_are_full_decode_and_breakable_prefill_without_any_choice() -> None:
    config, said = from_argv()
    assert (config.decode.policy, config.prefill.policy) == ("full", "breakable")
    assert not config.decode.explicit
    assert not config.prefill.explicit
    assert said == []
    assert config == DeviceGraphConfig.from_json('{"decode": "full", "prefill": "breakable"}')
    assert config.to_json() == "{}"


def test_phases_given_in_python_may_be_policy_names_or_mappings() -> None:
    config = DeviceGraphConfig(decode="breakable", prefill={"buckets": [512, 64]})
    assert config.decode == PhaseConfig(policy="breakable")
    assert (config.prefill.policy, config.prefill.buckets) == ("breakable", (64, 512))
    assert config.decode.explicit == {"policy"}
    assert config.prefill.explicit == {"buckets"}
    assert DeviceGraphConfig.from_json(config.to_json()) == config
    with pytest.raises(ConfigError, match="there is no key 'bukets'.*Did you mean 'buckets'"):
        DeviceGraphConfig(prefill={"bukets": [64]})
    with pytest.raises(ConfigTypeError, match="overlays are Overlay objects, got 3"):
        DeviceGraphConfig(overlays=3)


def test_from_json_reads_strings_objects_and_overlays() -> None:
    config = DeviceGraphConfig.from_json(
        '{"decode": "disabled", "prefill": {"policy": "piecewise", "buckets": [512, 64, 64],'
        ' "compiler": "inductor"}, "backends": {"npu": {"prefill": "full"}}}'
    )
    assert config.decode.policy == "disabled"
    assert config.prefill.buckets == (64, 512)
    assert config.prefill.compiler == "inductor"
    assert config.backends == ("npu",)
    there = config.for_backend("npu")
    assert there.prefill.policy == "full"
    assert there.prefill.buckets == (64, 512)
    assert there.decode.policy == "disabled"
    assert there.backends == ()
    assert config.for_backend("another").prefill == config.prefill


def test_overlay_null_returns_a_key_to_its_default() -> None:
    config = DeviceGraphConfig.from_json(
        '{"decode": {"buckets": [1, 2]}, "backends": {"npu": {"decode": {"buckets": null}}}}'
    )
    assert config.decode.buckets == (1, 2)
    assert config.for_backend("npu").decode.buckets is None
    assert DeviceGraphConfig.from_json(config.to_json()).for_backend("npu").decode.buckets is None


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ('{"decode": "ful"}', ["decode.policy", "'ful'", "piecewise", "Did you mean 'full'?"]),
        ('{"decode": "FULL"}', ["decode.policy", "Did you mean 'full'?"]),
        ('{"decod": "full"}', ["phase 'decod'", "prefill", "Did you mean 'decode'?"]),
        ('{"decode": {"buckts": [1]}}', ["decode", "key 'buckts'", "Did you mean 'buckets'?"]),
        ('{"decode": {"bs": [1]}}', ["key 'bs'", "max_bs", "Did you mean 'buckets'?"]),
        ('{"prefill": {"backend": "full"}}', ["key 'backend'", "Did you mean 'policy'?"]),
        ('{"backends": {"npu": {"prefil": "full"}}}', ["backends.npu", "Did you mean 'prefill'?"]),
        ('{"backends": {"npu": {"decode": "x"}}}', ["backends.npu.decode.policy", "'x'"]),
        ('{"decode": {"buckets": [4, 0]}}', ["decode.buckets[1]", "at least 1", "got 0"]),
        ('{"decode": {"buckets": []}}', ["decode.buckets", "empty", "'disabled'"]),
        ('{"decode": {"max_padding": 0.5}}', ["decode.max_padding", "at least 1", "0.5"]),
        ('{"decode": {"time_budget_s": 0}}', ["decode.time_budget_s", "more than 0"]),
        ('{"decode": {"compiler": "indctor"}}', ["decode.compiler", "Did you mean 'inductor'?"]),
        ('{"decode": {"capture": "lazi"}}', ["decode.capture", "Did you mean 'lazy'?"]),
        ('{"decode": {"max_padding": NaN}}', ["NaN"]),
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
        ("fulll", 1, 1, "'fulll'"),
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


def test_text_that_is_only_a_policy_is_told_how_to_name_a_phase() -> None:
    with pytest.raises(ConfigError, match=r"write '{\"decode\": \"full\"}'"):
        DeviceGraphConfig.from_json("full")


def test_older_policy_names_are_read_with_a_warning_that_names_the_new_one() -> None:
    for name in ("tc_piecewise", "tcpcg"):
        with pytest.warns(DeviceGraphWarning, match=f"'{name}' is the older name.*'piecewise'"):
            config = DeviceGraphConfig.from_json(json.dumps({"prefill": name}))
        assert config.prefill.policy == "piecewise"


def test_backend_unknown_on_this_node_is_a_warning_and_stays_in_the_configuration() -> None:
    text = '{"backends": {"npuu": {"prefill": "full"}}}'
    with pytest.warns(DeviceGraphWarning, match="'npuu' is registered.*Did you mean 'npu'") as said:
        config = DeviceGraphConfig.from_json(text, backends={"cpu", "npu"})
    assert len(said) == 1
    assert said[0].filename == __file__
    assert config.for_backend("npuu").prefill.policy == "full"
    assert DeviceGraphConfig.from_json(text) == config  # without names nothing is checked


def test_phase_config_checks_and_normalises_values_given_in_python() -> None:
    phase = PhaseConfig(policy="full", buckets=[8, 1, 8], max_padding=3)  # type: ignore[arg-type]
    assert phase.buckets == (1, 8)
    assert isinstance(phase.max_padding, float)
    assert phase.explicit == {"policy", "buckets", "max_padding"}
    with pytest.raises(ConfigError, match=r"buckets\[0\]"):
        PhaseConfig(policy="full", buckets=(-1,))
    with pytest.raises(ConfigError, match="bucket 9 is over max_bs=8"):
        PhaseConfig(policy="full", buckets=(9,), max_bs=8)
    with pytest.raises(ConfigError, match=r"backends\.x\.decode: the bucket 9"):
        DeviceGraphConfig(
            decode=PhaseConfig(policy="full", buckets=(9,)),
            overlays=(Overlay(backend="x", decode={"max_bs": 8}),),
        )
    with pytest.raises(ConfigError, match="two overlays"):
        DeviceGraphConfig(overlays=(Overlay(backend="x"), Overlay(backend="x")))


def test_every_key_has_a_field_and_an_explanation() -> None:
    source = Path(sys.modules[PhaseConfig.__module__].__file__ or "").read_text()
    body = source[source.index("class PhaseConfig") : source.index("def to_dict")]
    fields = re.findall(r'^    (\w+): .*\n(?:        .*\n|    \)\n)*    """', body, re.MULTILINE)
    assert fields == [*KEYS, "explicit"]


def test_configuration_is_hashable_and_survives_pickle() -> None:
    config = DeviceGraphConfig.from_json('{"backends": {"npu": {"decode": {"buckets": [1]}}}}')
    copy = pickle.loads(pickle.dumps(config))
    assert copy == config
    assert hash(copy) == hash(config)
    assert copy.origins == config.origins


def test_modules_import_only_the_standard_library_and_attrs() -> None:
    program = (
        "import sys\n"
        "import devgraph.api.config.model, devgraph.api.config.flags, devgraph.api.config.rules\n"
        "import devgraph.api.config.resolve, devgraph.api.config.cluster\n"
        "known = set(sys.stdlib_module_names) | {'attr', 'attrs', 'devgraph'}\n"
        "started = set(sys.argv[1].split(','))\n"
        "other = {name.split('.')[0] for name in sys.modules} - known - started\n"
        "print(sorted(name for name in other if not name.startswith('_')))\n"
    )
    bare = "import sys; print(','.join(name.split('.')[0] for name in sys.modules))"
    root = str(Path(__file__).parents[2])
    started = subprocess.run(
        [sys.executable, "-c", bare], capture_output=True, text=True, check=True, cwd=root
    ).stdout.strip()
    found = subprocess.run(
        [sys.executable, "-c", program, started],
        capture_output=True,
        text=True,
        check=True,
        cwd=root,
    )
    assert found.stdout.strip() == "[]"


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
    config = DeviceGraphConfig.from_file(path)
    assert config == DeviceGraphConfig.from_dict(section)
    assert config.decode.explicit == {"policy"}


@pytest.mark.parametrize(
    ("name", "text", "parts"),
    [
        ("a.json", '{"device_grph": {}}', ["device_grph", "Put the mode configuration under"]),
        ("a.json", '{"device_graph": {"decode": }}', ["line 1, column 29"]),
        ("a.json", "[]", ["expected an object"]),
        ("a.yaml", "device_graph: {decode: ful}\n", ["decode.policy", "Did you mean 'full'?"]),
        ("a.yaml", "device_graph:\n  decode: off\n", ["decode.policy", "'disabled' (in quotes)"]),
        ("a.yaml", "device_graph:\n  decode: full\n  decode: disabled\n", ["twice", "line 3"]),
        ("a.yaml", "device_graph: {decode: [\n", ["broken YAML", "line 2"]),
        ("a.yaml", "just text\n", ["expected an object"]),
    ],
)
def test_from_file_names_the_file_and_the_place(
    tmp_path: Path, name: str, text: str, parts: list[str]
) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(ConfigError) as error:
        DeviceGraphConfig.from_file(path)
    for part in (str(path), *parts):
        assert part in str(error.value)


def test_from_file_refuses_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        DeviceGraphConfig.from_file(tmp_path / "missing.json")
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="cannot read"):
        DeviceGraphConfig.from_file(tmp_path / "binary.json")


def test_from_file_without_pyyaml_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "engine.yaml"
    path.write_text("device_graph: {decode: full}\n")
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(ConfigError, match="pip install pyyaml"):
        DeviceGraphConfig.from_file(path)


def test_json_files_are_read_without_pyyaml(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "engine.json"
    path.write_text('{"device_graph": {"decode": "disabled"}}')
    monkeypatch.setitem(sys.modules, "yaml", None)
    assert DeviceGraphConfig.from_file(path).decode.policy == "disabled"
