"""The mode configuration as a value: phases, overlays, round trips."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from devgraph.api.config.model import DeviceGraphConfig, DeviceGraphWarning
from devgraph.api.config.phase import KEYS, PHASES, PhaseConfig, Verify
from devgraph.api.errors import ConfigError, ConfigTypeError
from tests.support.config_cases import MAXIMA, PHASE, SIZES, VALUES, from_argv


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
    with pytest.raises(ConfigTypeError, match="overlays: backends: expected an object with one"):
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


def test_backend_unknown_on_this_node_is_a_warning_and_stays_in_the_configuration() -> None:
    text = '{"backends": {"npuu": {"prefill": "full"}}}'
    hint = "'npuu' is registered.*Known: .*rocm. Did you mean 'npu'"
    with pytest.warns(DeviceGraphWarning, match=hint) as said:
        config = DeviceGraphConfig.from_json(text)
    assert len(said) == 1
    assert said[0].filename == __file__
    assert config.for_backend("npuu").prefill.policy == "full"


def test_configuration_is_hashable_and_survives_pickle() -> None:
    config = DeviceGraphConfig.from_json('{"backends": {"npu": {"decode": {"buckets": [1]}}}}')
    copy = pickle.loads(pickle.dumps(config))
    assert copy == config
    assert hash(copy) == hash(config)


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


def phase_configs() -> st.SearchStrategy[PhaseConfig]:
    optional = {
        "buckets": st.none() | SIZES,
        "max_bs": st.none() | MAXIMA,
        "align": st.integers(1, 16),
        "max_requests": st.none() | st.integers(1, 512),
        "max_padding": st.floats(1.0, 100.0),
        "compiler": st.sampled_from(["eager", "inductor"]),
        "capture": st.sampled_from(["eager", "lazy", "background"]),
        "lazy_hits": st.integers(1, 9),
        "warmup": st.integers(0, 9),
        "strict": st.booleans(),
        "verify": st.sampled_from([None, "start"])
        | st.builds(Verify, start=st.booleans(), every=st.integers(1, 10**6)),
        "emulate": st.booleans(),
        "releasable": st.booleans(),
        "executable_budget": st.none() | st.floats(0, 1, exclude_max=True) | st.integers(2, 10**12),
        "graph_budget_bytes": st.none() | st.integers(1, 1 << 40),
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
        overlays={name: {"decode": one, "prefill": two} for name, (one, two) in overlays.items()},
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        again = DeviceGraphConfig.from_json(config.to_json())
    assert again == config
    for phase in PHASES:
        assert again.phase(phase).explicit == config.phase(phase).explicit
    everything = json.loads(config.to_json(everything=True))
    assert list(everything["decode"]) == list(KEYS)
