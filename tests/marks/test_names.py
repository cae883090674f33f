"""Names of nodes: what is hooked, by whom, for how long."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

import devgraph as dg
from devgraph.api.marks.names import Names

X = torch.ones(2)


class Layer(nn.Module):
    """Adds one, after what ``inside`` does."""

    def __init__(self, inside=lambda: None):
        super().__init__()
        self.inside = inside

    def forward(self, x):
        self.inside()
        return x + 1


def captured(model, **options):
    return dg.capture(model, X, backend="cpu", **{"name_nodes": model, **options})


def hooks_of(model):
    return [one._forward_hooks or one._forward_pre_hooks for one in model.modules()]


def test_hooks_are_there_during_the_capture_only():
    seen = []
    model = nn.Sequential(Layer(lambda: seen.append(any(hooks_of(model)))))
    captured(model, warmup=2)
    assert seen == [False, False, True]
    assert not any(hooks_of(model))


def test_a_capture_that_fails_leaves_no_hooks():
    left = [2]

    def fail():
        left[0] -= 1
        if left[0] < 0:
            raise ValueError("no")

    model = nn.Sequential(Layer(fail))
    with pytest.raises(ValueError, match="no"):
        captured(model)
    assert not any(hooks_of(model))


def test_calls_of_other_threads_are_not_named():
    other = Layer()

    def elsewhere():
        thread = threading.Thread(target=other, args=(X,))
        thread.start()
        thread.join()

    model = nn.Sequential(Layer(elsewhere), other)
    (graph,) = captured(model).segments
    assert [str(one) for one in graph.ranges] == ["0, node 0", "1, node 1"]


def test_a_module_that_raises_what_the_step_catches_has_ended():
    def fail():
        raise ValueError("no")

    class Trying(nn.Module):
        def __init__(self):
            super().__init__()
            self.failing, self.other = Layer(fail), Layer()

        def forward(self, x):
            try:
                return self.failing(x)
            except ValueError:
                return self.other(x)

    (graph,) = captured(Trying()).segments
    assert [(one.depth, str(one)) for one in graph.ranges] == [(0, "other, node 0")]


def test_marks_are_named_without_a_module_and_nothing_without_being_asked():
    @dg.region()
    def marked(x):
        return x * 2

    model = nn.Sequential(Layer())
    for asked, names in ((True, ["marked"]), (False, [])):
        found = captured(lambda x: marked(model(x)), name_nodes=asked)
        (graph,) = found.segments
        assert [one.name.rpartition(".")[2] for one in graph.ranges] == names
        found.close()
        assert graph.ranges == []


def test_updatable_regions_have_their_nodes_unasked():
    @dg.region(host_args=("k",), mutates=("out",))
    def scaled(x, out, *, k):
        out.copy_(x * k)

    def step(x, out, *, k):
        x = x + 1
        scaled(x, out, k=k)
        return out + 1

    found = dg.capture(step, X, X.clone(), backend="cpu", host_args={"k": 2})
    assert "scaled, nodes 1 to 2" in found.explain()


def test_a_call_without_nodes_has_no_range_and_one_that_is_not_known_has():
    names, counts = Names(True), iter([0, 0, 0, 1, 1, None, 1, 1])
    found = names.begin(lambda: next(counts))
    with names.named("outer"), names.named("empty"):
        pass
    assert [str(one) for one in found] == ["outer, node 0"]
    with names.named("around"), names.named("unknown"):
        pass
    assert [str(one) for one in found[1:]] == ["around, no nodes", "unknown, ? nodes"]


def test_anything_but_a_module_or_a_bool_is_refused():
    with pytest.raises(dg.InputTypeError, match="name_nodes must be True, False or a torch.nn"):
        captured(Layer(), name_nodes="model")
