"""Capabilities: frozen data, safe defaults, and hooks that exist."""

from __future__ import annotations

import attrs
import pytest

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


@pytest.mark.parametrize("name", NAMES)
def test_every_hook_of_a_capability_is_a_method_of_its_class(name: str):
    for hook in hooks(name):
        kind, method = hook.split(".")
        classes = [getattr(room, kind) for room in ROOMS if hasattr(room, kind)]
        assert classes, kind
        assert callable(getattr(classes[0], method))


def test_capability_that_no_method_implements_has_no_hooks():
    assert hooks("max_streams") == hooks("compilers") == ()
