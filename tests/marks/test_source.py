"""Lines of the user's code: found on the stack and in tracebacks, never machinery."""

from __future__ import annotations

import functools
import inspect

import pytest
import torch

from devgraph.api.marks.source import (
    SourceLine,
    is_machinery_module,
    node_line,
    raising_line,
    user_line,
)


def _here(offset: int = 0) -> int:
    frame = inspect.currentframe()
    assert frame is not None and frame.f_back is not None
    return frame.f_back.f_lineno + offset


def test_line_of_the_user_is_the_innermost_outside_of_machinery():
    line, number = functools.reduce(lambda found, _: user_line(), [0, 1]), _here()
    assert (line.file, line.line, line.function) == (__file__, number, "<lambda>")
    assert line.text.startswith("line, number = functools.reduce")


def test_line_that_raised_is_that_of_the_user_below_machinery():
    with pytest.raises(RuntimeError) as caught:
        torch.ones(2) @ torch.ones(3)
    number = _here(-1)
    line = raising_line(caught.value)
    assert line is not None and (line.file, line.line) == (__file__, number)
    assert str(line).startswith(f"{__file__}:{number} in test_line_that_raised")


def test_error_that_was_never_raised_has_no_line():
    assert raising_line(ValueError()) is None


@pytest.mark.parametrize(
    ("module", "machinery"),
    [
        ("torch.nn.functional", True),
        ("functools", True),
        ("devgraph.api.graph", True),
        ("devgraph.integrations.transformers.model", False),
        ("devgraph.testing.plugin", False),
        ("model", False),
    ],
)
def test_machinery_is_torch_the_library_and_devgraphs_own_rooms(module: str, machinery: bool):
    assert is_machinery_module(module) is machinery


def test_node_of_a_trace_has_the_line_that_made_it():
    class Node:
        stack_trace = (
            f'  File "{__file__}", line 5, in step\n  File "{torch.__file__}", line 1, in add\n'
        )

    assert node_line(Node()) == SourceLine(__file__, 5, "step", "import functools")
    Node.stack_trace = ""
    assert node_line(Node()) is None


def test_source_line_without_text_is_shown_without_a_colon_at_its_end():
    assert str(SourceLine("model.py", 3, "step", "")) == "model.py:3 in step"
