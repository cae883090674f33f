"""Capabilities: frozen data, safe defaults, and hooks that exist."""

from __future__ import annotations

import attrs
import pytest

import devgraph as dg
from devgraph.api import backend, device, graph, pool
from devgraph.api.capabilities import Capabilities, hooks
from devgraph.api.torchlike import base

ROOMS = (backend, device, graph, pool, base)
NAMES = [field.name for field in attrs.fields(Capabilities)]


def test_capabilities_are_frozen_and_their_defaults_declare_nothing():
    capabilities = Capabilities()
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        capabilities.rng = True  # type: ignore[misc]
    assert not any(value is True for value in attrs.asdict(capabilities).values())


@pytest.mark.parametrize(
    ("declared", "kind", "said"),
    [
        ({"rgn": True}, TypeError, "unexpected keyword argument 'rgn'"),
        ({"rng": 1}, dg.ConfigTypeError, "capability rng must be of type bool, got 1"),
        (
            {"compilers": "eager"},
            dg.ConfigTypeError,
            "compilers must be of type tuple, got 'eager'",
        ),
        ({"max_streams": True}, dg.ConfigTypeError, "max_streams must be of type int, got True"),
    ],
)
def test_an_invalid_declaration_is_refused(declared, kind, said):
    with pytest.raises(kind, match=said):
        Capabilities(**declared)
    assert attrs.evolve(Capabilities(max_streams=3), rng=True).max_streams == 3


@pytest.mark.parametrize("name", NAMES)
def test_every_hook_of_a_capability_is_a_method_of_its_class(name: str):
    for hook in hooks(name):
        kind, method = hook.split(".")
        classes = [getattr(room, kind) for room in ROOMS if hasattr(room, kind)]
        assert classes, kind
        assert callable(getattr(classes[0], method))


def test_capability_that_no_method_implements_has_no_hooks():
    assert hooks("max_streams") == hooks("compilers") == ()
