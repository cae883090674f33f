"""Identity, declared capabilities and signatures of the backend."""

from __future__ import annotations

import inspect

import attrs
import pytest
import torch

import devgraph as dg
from devgraph.api.backend import poison
from devgraph.testing.conformance.support import Kit, same

MODES = ("global", "thread_local", "relaxed")


def test_backend_names_itself_its_device_and_its_version(kit: Kit) -> None:
    backend = kit.backend
    assert backend.name
    assert isinstance(backend.device, torch.device), "device must be a torch.device"
    assert backend.version
    assert backend.device_name
    assert backend.name in repr(backend)


def test_registry_hands_out_one_backend_per_name(kit: Kit) -> None:
    assert dg.get_backend(kit.backend.name) is kit.backend
    listed = {info.name: info for info in dg.backends()}
    assert listed[kit.backend.name].available


def test_capabilities_are_frozen_data(kit: Kit) -> None:
    capabilities = kit.backend.capabilities
    assert isinstance(capabilities, dg.Capabilities)
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        capabilities.rng = not capabilities.rng  # type: ignore[misc]
    assert capabilities.capture_error_modes, "declare at least one capture_error_mode"
    unknown = sorted(set(capabilities.capture_error_modes) - set(MODES))
    assert not unknown, f"capture_error_modes must be in {MODES}"


def test_signatures_are_those_of_the_torch_proposal(kit: Kit) -> None:
    make = list(inspect.signature(kit.backend.make_graph).parameters)
    context = list(inspect.signature(kit.backend.capture_context).parameters)
    assert make[:1] == ["pool"]
    assert context[:4] == ["graph", "stream", "pool", "capture_error_mode"]


@pytest.mark.parametrize("mode", MODES)
def test_capture_works_in_every_error_mode(kit: Kit, mode: str) -> None:
    x = kit.tensor(8)
    graph = kit.backend.make_graph()
    with kit.backend.capture_context(graph, capture_error_mode=mode):
        y = x * 2
    graph.replay()
    kit.same(y, x * 2)


@pytest.mark.parametrize("name", "float32 float16 bfloat16 int64 int32 uint8 bool".split())
def test_poison_overwrites_every_element(kit: Kit, name: str) -> None:
    tensor = torch.zeros(8, dtype=getattr(torch, name), device=kit.device)
    poison(tensor)
    poisoned = tensor.cpu()
    assert (poisoned.isnan() if tensor.is_floating_point() else poisoned != 0).all()


def test_random_state_is_restored_by_its_setter(kit: Kit) -> None:
    state = kit.backend.get_rng_state()
    first = torch.rand(8, device=kit.device)
    kit.backend.set_rng_state(state)
    same(torch.rand(8, device=kit.device), first)


def test_fence_follows_earlier_work(kit: Kit, pool: dg.Pool) -> None:
    x = kit.tensor(64, 64)
    graph, y = kit.record(lambda: x * 2, pool=pool)
    graph.replay()
    done = kit.backend.fence()
    if done():
        cure = "a backend with an asynchronous launch() needs a fence() that waits for the launch"
        same(y, x * 2, f"{cure}: fence() reports the end of a replay, but its result")
    kit.backend.synchronize()
    assert done() is True
    assert done() is True
