"""Several sources about the same settings: who wins, and what is said about it."""

from __future__ import annotations

import json
import re
import tempfile
import warnings
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from devgraph.api.config.model import DeviceGraphConfig, DeviceGraphWarning
from devgraph.api.config.phase import PHASES
from tests.support.config_cases import (
    BOTH_DISABLED,
    MAXIMA,
    MODE,
    PHASE,
    SIZES,
    VALUES,
    from_argv,
)


def test_each_level_beats_the_weaker_ones_per_key_with_both_names(tmp_path: Path) -> None:
    path = tmp_path / "mode.json"
    path.write_text('{"device_graph": {"decode": {"policy": "piecewise", "warmup": 7}}}')
    config, said = from_argv(
        *("--device-graph-config", str(path), "--disable-cuda-graph", "--cuda-graph-bs", "1", "2"),
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
        "decode.policy: 'full' from --device-graph-mode overrides 'disabled' from "
        "--disable-cuda-graph",
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
    assert any("omitted 64 from --cuda-graph-bs" in text for text in said)
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


PHASE_OR_POLICY = PHASE | VALUES["policy"]
DOCUMENT = st.fixed_dictionaries(
    {},
    optional={
        "decode": PHASE_OR_POLICY,
        "prefill": PHASE_OR_POLICY,
        "backends": st.dictionaries(
            st.sampled_from(["npu", "rocm"]),
            st.fixed_dictionaries({}, optional={"decode": PHASE, "prefill": PHASE_OR_POLICY}),
        ),
    },
)
PICKED_OLDER = st.lists(
    st.sampled_from(
        [
            (["--disable-cuda-graph"], BOTH_DISABLED),
            (["--disable-piecewise-cuda-graph"], {"prefill": "disabled"}),
            (["--enable-breakable-cuda-graph"], {"prefill": "breakable"}),
            (["--decode-cuda-graph-backend", "breakable"], {"decode": "breakable"}),
            (["--prefill-disable-cuda-graph"], {"prefill": "disabled"}),
            (["--cuda-graph-bs", "3", "5"], {"decode": {"buckets": [3, 5]}}),
            (["--cuda-graph-max-bs", "160"], {"decode": {"max_bs": 160}}),
            (["--prefill-cuda-graph-bs", "7"], {"prefill": {"buckets": [7]}}),
            (["--cuda-graph-mode", '{"decode": "full"}'], {"decode": "full"}),
        ]
    ),
    unique_by=lambda one: one[0][0],
    max_size=4,
)
SHORTHANDS = st.fixed_dictionaries(
    {},
    optional={
        "--decode-device-graph-mode": VALUES["policy"],
        "--prefill-device-graph-mode": VALUES["policy"],
        "--decode-device-graph-bs": SIZES,
        "--prefill-device-graph-bs": SIZES,
        "--decode-device-graph-max-bs": MAXIMA,
        "--prefill-device-graph-max-bs": MAXIMA,
        "--prefill-disable-device-graph": st.just(True),
    },
)
Place = tuple[str | None, str, str]  # backend, phase, key


def flat(document: dict[str, Any], backend: str | None = None) -> dict[Place, object]:
    """An independent reading of a document: what it says, place by place."""
    found: dict[Place, object] = {}
    for phase, body in document.items():
        if phase == "backends":
            for name, part in body.items():
                found.update(flat(part, name))
            continue
        for key, value in (body if isinstance(body, dict) else {"policy": body}).items():
            value = tuple(sorted(set(value))) if key == "buckets" else value
            found[backend, phase, key] = value
    return found


def shorthand_says(flag: str, value: object) -> dict[Place, object]:
    phase = flag.split("-")[2]
    if flag.endswith("disable-device-graph"):
        return flat({phase: "disabled"})
    key = {"mode": "policy", "max-bs": "max_bs", "bs": "buckets"}[flag.split("graph-")[1]]
    return flat({phase: {key: value}})


def mentions(text: str, name: str) -> bool:
    return re.search(re.escape(name) + r"(?![\w-])", text) is not None


def _check_refined(
    backend: str,
    phase: str,
    key: str,
    value: Any,
    said: list[tuple[int, str, dict[Place, Any]]],
    config: DeviceGraphConfig,
    overrides: list[str],
) -> None:
    """A part for a backend that holds must name the general value of another source it beats."""
    general = getattr(config.phase(phase), key)
    sources = [one for _, one, what in said if what.get((None, phase, key)) == general]
    _, winner = max((level, one) for level, one, what in said if (backend, phase, key) in what)
    if general == value or not sources or winner in sources:
        return
    assert any(
        text.startswith(f"backends.{backend}.{phase}.{key}: on this backend ")
        and any(mentions(text.split(" overrides ")[1], one) for one in sources)
        for text in overrides
    ), (backend, phase, key, overrides)


@settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    file=st.none() | DOCUMENT,
    older=PICKED_OLDER,
    shorthands=SHORTHANDS,
    mode=st.none() | DOCUMENT,
)
def test_precedence_holds_nothing_is_dropped_in_silence_and_text_round_trips(
    file: dict[str, Any] | None,
    older: list[tuple[list[str], dict[str, Any]]],
    shorthands: dict[str, Any],
    mode: dict[str, Any] | None,
) -> None:
    argv: list[str] = []
    said: list[tuple[int, str, dict[Place, object]]] = []  # level, name, what
    for words, meaning in older:
        argv += words
        said.append((1, words[0], flat(meaning)))
    for flag, value in shorthands.items():
        argv.append(flag)
        argv += [] if value is True else map(str, value if isinstance(value, list) else [value])
        said.append((2, flag, shorthand_says(flag, value)))
    if mode is not None:
        argv += [MODE, json.dumps(mode)]
        said.append((3, MODE, flat(mode)))
    with tempfile.TemporaryDirectory() as folder:
        if file is not None:
            path = Path(folder, "mode.json")
            path.write_text(json.dumps({"device_graph": file}))
            argv += ["--device-graph-config", str(path)]
            said.append((0, f"--device-graph-config {path}", flat(file)))
        config, warned = from_argv(*argv)

    def values_at(backend: str | None, phase: str, key: str) -> list[tuple[int, object]]:
        """What may hold: the values of the strongest level that speaks about the place."""
        for level in (3, 2, 1, 0):
            for scope in [backend, None] if backend else [None]:
                found = [
                    what[scope, phase, key]
                    for one, _, what in said
                    if one == level and (scope, phase, key) in what
                ]
                if found:
                    return found
        return [getattr(getattr(DeviceGraphConfig(), phase), key)]

    here = {None: config, **{name: config.for_backend(name) for name in ("npu", "rocm", "cpu")}}
    for backend, view in here.items():
        for phase in PHASES:
            for key in VALUES:
                actual = getattr(view.phase(phase), key)
                allowed = values_at(backend, phase, key)
                assert actual in allowed, (backend, phase, key)
                assert (key in view.phase(phase).explicit) == any(
                    (scope, phase, key) in what for _, _, what in said for scope in (backend, None)
                )

    overrides = [text for text in warned if " overrides " in text]
    for _, name, what in said:
        for (backend, phase, key), value in what.items():
            place = f"{phase}.{key}" if backend is None else f"backends.{backend}.{phase}.{key}"
            if getattr(here[backend].phase(phase), key) != value:
                assert any(
                    text.startswith(f"{place}: ") and mentions(text.split(" overrides ")[1], name)
                    for text in overrides
                ), (place, name, overrides)
            elif backend is not None:
                _check_refined(backend, phase, key, value, said, config, overrides)
    for words, _ in older:
        spelled = [text for text in warned if text.startswith(f"{words[0]} is an older spelling")]
        assert len(spelled) == 1

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        again = DeviceGraphConfig.from_json(config.to_json())
    assert again == config
    assert again.to_json() == config.to_json()
    assert [again.phase(one).explicit for one in PHASES] == [
        config.phase(one).explicit for one in PHASES
    ]
