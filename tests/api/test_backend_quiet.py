"""Having the device to oneself: no collections, no memory given back, no other capture."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest
import torch

import devgraph as dg


class Owner:
    """Something that gives back device memory when it goes."""


@pytest.fixture
def backend():
    return dg.get_backend("cpu")


def test_garbage_waits_until_the_outermost_hold_ends(backend):
    thing = Owner()
    gone = weakref.ref(thing)
    with backend.quiet():
        assert not gc.isenabled()
        with backend.quiet():
            backend.bury(thing)
            del thing
        assert not gc.isenabled()
        assert gone() is not None
    assert gc.isenabled()
    assert gone() is None


def test_garbage_of_another_thread_waits_as_well(backend):
    thing = Owner()
    gone = weakref.ref(thing)

    def drop(owner):
        backend.bury(owner)

    with backend.quiet():
        thread = threading.Thread(target=drop, args=(thing,))
        thread.start()
        thread.join(10)
        del thread, thing
        assert gone() is not None
    assert gone() is None


def test_capture_may_begin_while_this_thread_holds_the_device(backend):
    x = torch.ones(4)
    with backend.quiet():
        cap = dg.capture(lambda x: x * 2, x, backend=backend)
    assert torch.equal(cap.replay(), x * 2)


def test_hold_of_another_thread_is_waited_for_and_named(backend, monkeypatch):
    monkeypatch.setattr(backend, "capture_lock_timeout", 0.05)
    refused = []

    def second():
        try:
            with backend.exclusive():
                pass
        except dg.CaptureBusyError as error:
            refused.append(str(error))

    with backend.exclusive():
        thread = threading.Thread(target=second)
        thread.start()
        thread.join(10)
    assert len(refused) == 1
    assert threading.current_thread().name in refused[0]


def test_switched_off_collector_stays_off(backend):
    gc.disable()
    try:
        with backend.quiet():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
