"""What a runner learnt of its buckets: kept at the end, followed at the next start, no fault."""

from __future__ import annotations

import json
import logging

import pytest
import torch

import devgraph as dg
from devgraph import Reason
from tests.support.runner_steps import X, decode_of, double, double_runner, rows_of_x


def captured_in_order(runner):
    """Return the buckets in the order in which ``idle`` captures them."""
    order: list[int] = []
    while runner.idle():
        order += {graph.key.bucket for graph in runner.graphs.captured} - {*order}
    return order


def background(path, step=double, **options):
    config = {"capture": "background", "learned": str(path)}
    return decode_of(step, (X,), config=config, **options)


def serve(runner, *sizes):
    for size in sizes:
        assert torch.equal(runner.run({"x": rows_of_x(size)}), rows_of_x(size) * 2)


def test_the_next_start_captures_in_the_order_of_use(tmp_path):
    path = tmp_path / "buckets.json"
    with background(path) as first:
        assert captured_in_order(first) == [8, 4, 2, 1], "nothing was learnt"
        serve(first, 2, 2, 2, 1, 4, 4)
    with background(path) as second:
        serve(second, 1)
        assert captured_in_order(second) == [2, 4, 1, 8]


def test_a_bucket_that_could_not_be_captured_comes_last(tmp_path):
    def step(batch):
        if broken and batch.tokens == 8 and dg.is_capturing():
            raise torch.OutOfMemoryError("no memory")
        return batch.x * 2

    broken, path = True, tmp_path / "buckets.json"
    with background(path, step) as first:
        captured_in_order(first)
        assert first.can_run(8).reason is Reason.OUT_OF_MEMORY
        serve(first, 1)
    broken = False
    with background(path, step) as second:
        assert captured_in_order(second) == [1, 4, 2, 8]


def test_runners_of_other_names_learn_apart_in_one_file(tmp_path):
    path = tmp_path / "buckets.json"
    for name, size in (("draft", 1), ("target", 4)):
        with background(path, name=name) as runner:
            serve(runner, size)
    assert len(json.loads(path.read_text())) == 2
    for name, size in (("draft", 1), ("target", 4)):
        with background(path, name=name) as runner:
            assert captured_in_order(runner)[0] == size


@pytest.mark.parametrize("text", ["{", "[1]", '{"a": 1}', "\udcff", "[" * 100_000])
def test_a_file_that_makes_no_sense_is_as_if_nothing_was_learnt(tmp_path, text):
    path = tmp_path / "buckets.json"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    with background(path) as runner:
        assert captured_in_order(runner) == [8, 4, 2, 1]
        serve(runner, 1)
    with background(path) as runner:
        assert captured_in_order(runner)[0] == 1


def test_a_file_that_cannot_be_written_is_only_said(tmp_path, caplog):
    with caplog.at_level(logging.WARNING), background(tmp_path / "no" / "folder.json") as runner:
        serve(runner, 1)
    assert "what was learnt of the buckets is not kept" in caplog.text
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("path", ["a\0b", "/"])
def test_a_path_of_no_file_is_only_said_and_the_graphs_are_closed(path, caplog):
    runner = background(path)
    serve(runner, 1)
    captured_in_order(runner)
    with caplog.at_level(logging.WARNING):
        runner.close()
    assert "what was learnt of the buckets is not kept" in caplog.text
    assert not runner.graphs.captured


def test_a_runner_that_served_nothing_keeps_what_was_known(tmp_path):
    path = tmp_path / "buckets.json"
    with background(path) as runner:
        serve(runner, 2)
    before = path.read_text()
    background(path).close()
    assert path.read_text() == before


def test_a_file_without_background_captures_is_reported():
    with pytest.warns(dg.DeviceGraphWarning, match="learned='f' has no effect"):
        double_runner(config={"learned": "f"})
