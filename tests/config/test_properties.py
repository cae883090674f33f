"""Properties of the mode configuration: precedence, nothing dropped in silence, round trip."""

from __future__ import annotations

import json
import re
import tempfile
import warnings
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from devgraph.api.config.model import DeviceGraphConfig, Overlay, PhaseConfig
from devgraph.api.config.values import KEYS, PHASES, POLICIES
from devgraph.api.errors import ConfigError
from tests.support.config_cases import BOTH_DISABLED, MODE, both, from_argv

# Sizes and maxima are kept apart so that this property is about precedence alone; how they are
# reconciled has tests of its own above.
SIZES = st.lists(st.integers(1, 64), min_size=1, max_size=4)
MAXIMA = st.integers(64, 9999)
VALUES = {
    "policy": st.sampled_from(POLICIES),
    "buckets": SIZES,
    "max_bs": MAXIMA,
    "warmup": st.integers(0, 5),
    "strict": st.booleans(),
    "max_padding": st.floats(1.0, 8.0),
}
PHASE = st.fixed_dictionaries({}, optional=VALUES)
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
            (["--enforce-eager"], BOTH_DISABLED),
            (["--disable-piecewise-cuda-graph"], {"prefill": "disabled"}),
            (["--enable-breakable-cuda-graph"], {"prefill": "breakable"}),
            (["--cuda-graph-backend-decode", "breakable"], {"decode": "breakable"}),
            (["--cuda-graph-bs", "3", "5"], {"decode": {"buckets": [3, 5]}}),
            (["--cuda-graph-max-bs", "160"], {"decode": {"max_bs": 160}}),
            (["--piecewise-cuda-graph-tokens", "7"], {"prefill": {"buckets": [7]}}),
            (["--cudagraph-capture-sizes", "9"], both("buckets", [9])),
            (["--disable-cuda-graph-padding"], {"decode": {"max_padding": 1.0}}),
            (["--cuda-graph-mode", '{"decode": "full"}'], {"decode": "full"}),
            (["--cudagraph-mode", "PIECEWISE"], dict.fromkeys(PHASES, "piecewise")),
            (["--optimization-level", "3"], {"decode": "full", "prefill": "piecewise"}),
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


def phase_configs() -> st.SearchStrategy[PhaseConfig]:
    optional = {
        "buckets": st.none() | SIZES,
        "max_bs": st.none() | MAXIMA,
        "align": st.integers(1, 16),
        "max_requests": st.none() | st.integers(1, 512),
        "max_seq_len": st.none() | st.integers(1, 1 << 20),
        "max_padding": st.floats(1.0, 100.0),
        "compiler": st.sampled_from(["eager", "inductor"]),
        "capture": st.sampled_from(["eager", "lazy", "background"]),
        "lazy_hits": st.integers(1, 9),
        "warmup": st.integers(0, 9),
        "strict": st.booleans(),
        "memory_budget_bytes": st.none() | st.integers(1, 1 << 40),
        "time_budget_s": st.none() | st.floats(0.001, 1e6),
        "miss_budget": st.none() | st.integers(0, 1000),
    }
    assert {"policy", *optional} == set(KEYS)
    values = st.fixed_dictionaries({"policy": VALUES["policy"]}, optional=optional)
    return st.builds(
        lambda chosen, names: PhaseConfig(**chosen, explicit=names),
        values,
        st.sets(st.sampled_from(list(KEYS))),
    )


@settings(max_examples=150, deadline=None)
@given(
    decode=phase_configs(),
    prefill=phase_configs(),
    overlays=st.dictionaries(st.text(min_size=1, max_size=6), st.tuples(PHASE, PHASE), max_size=2),
)
def test_configurations_built_in_python_round_trip_through_json(
    decode: PhaseConfig,
    prefill: PhaseConfig,
    overlays: dict[str, tuple[dict[str, Any], dict[str, Any]]],
) -> None:
    config = DeviceGraphConfig(
        decode=decode,
        prefill=prefill,
        overlays=tuple(
            Overlay(backend=name, decode=one, prefill=two) for name, (one, two) in overlays.items()
        ),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        again = DeviceGraphConfig.from_json(config.to_json())
    assert again == config
    for phase in PHASES:
        assert again.phase(phase).explicit == config.phase(phase).explicit
    everything = json.loads(config.to_json(everything=True))
    assert list(everything["decode"]) == list(KEYS)


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
