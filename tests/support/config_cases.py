"""What the tests of the mode configuration share: readings of command lines, random values."""

from __future__ import annotations

import argparse
import warnings
from typing import Any

from hypothesis import strategies as st

from devgraph.api.config.facts import EngineFacts
from devgraph.api.config.flags import add_cli_args
from devgraph.api.config.model import DeviceGraphConfig, DeviceGraphWarning
from devgraph.api.config.phase import PHASES, PhaseConfig, choices
from devgraph.api.config.resolve import Resolution, resolve

MODE = "--device-graph-mode"


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    add_cli_args(parser)
    return parser


PARSER = make_parser()


def from_argv(*argv: str, **options: Any) -> tuple[DeviceGraphConfig, list[str]]:
    """Parse a command line; return the configuration and the texts of all warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        config = DeviceGraphConfig.from_args(PARSER.parse_args(argv), **options)
    assert all(issubclass(one.category, DeviceGraphWarning) for one in caught)
    return config, [str(one.message) for one in caught]


def from_file(path: object) -> DeviceGraphConfig:
    """Read the section of a file as ``--device-graph-config`` does."""
    return DeviceGraphConfig.from_args(argparse.Namespace(device_graph_config=path))


BOTH_DISABLED = {"decode": "disabled", "prefill": "disabled"}


def both(key: str, value: object) -> dict[str, object]:
    return {phase: {key: value} for phase in PHASES}


# Sizes and maxima are kept apart so that this property is about precedence alone; how they are
# reconciled has tests of its own in tests/config/test_merge.py.
SIZES = st.lists(st.integers(1, 64), min_size=1, max_size=4)
MAXIMA = st.integers(64, 9999)
VALUES = {
    "policy": st.sampled_from(choices()),
    "buckets": SIZES,
    "max_bs": MAXIMA,
    "warmup": st.integers(0, 5),
    "strict": st.booleans(),
    "max_padding": st.floats(1.0, 8.0),
}
PHASE = st.fixed_dictionaries({}, optional=VALUES)


def config_with(phase: str, *, explicit: bool, **values: Any) -> DeviceGraphConfig:
    """One phase with these values, as defaults or as choices; the other phase switched off."""
    other = "prefill" if phase == "decode" else "decode"
    chosen = PhaseConfig(**values)
    assert chosen.explicit == frozenset(values) or not explicit
    config = DeviceGraphConfig(
        **{phase: chosen, other: PhaseConfig(policy="disabled")}  # type: ignore[arg-type]
    )
    if not explicit:
        # The table is tried on values that are nobody's default, too.
        object.__setattr__(config.phase(phase), "explicit", frozenset())
    return config


def resolve_quietly(config: DeviceGraphConfig, facts: EngineFacts, **options: Any) -> Resolution:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return resolve(config, facts, **options)
