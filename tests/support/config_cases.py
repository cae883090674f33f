"""What the tests of the mode configuration share: a parser and a reading of command lines."""

from __future__ import annotations

import argparse
import warnings
from typing import Any

from devgraph.api.config.flags import add_cli_args
from devgraph.api.config.model import DeviceGraphConfig, DeviceGraphWarning
from devgraph.api.config.values import PHASES

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


BOTH_DISABLED = {"decode": "disabled", "prefill": "disabled"}


def both(key: str, value: object) -> dict[str, object]:
    return {phase: {key: value} for phase in PHASES}
