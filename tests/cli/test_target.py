"""Functions named on the command line: their inputs, host arguments and errors."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from devgraph.cli.tables import CommandError
from devgraph.cli.target import find_target, user_code

SOURCE = """
def step(x, *, n=0):
    return x + n

def positional():
    return (1,)

def keywords():
    return {"x": 2}

def both():
    return (3,), {"n": 4}

def neither():
    return 5
"""


def arguments(**given: object) -> argparse.Namespace:
    return argparse.Namespace(**{"inputs": None, "host_arg": [], **given})


@pytest.mark.parametrize(
    ("inputs", "args", "kwargs"),
    [
        (None, (), {}),
        ("positional", (1,), {}),
        ("keywords", (), {"x": 2}),
        ("both", (3,), {"n": 4}),
    ],
)
def test_inputs_are_a_tuple_keywords_or_both(inputs, args, kwargs, tmp_path: Path):
    path = tmp_path / "inputs_of_a_step.py"
    path.write_text(SOURCE)
    target = find_target(arguments(inputs=inputs), f"{path}:step")
    assert (target.args, target.kwargs) == (args, kwargs)
    assert target.fn(3, n=1) == 4


def test_inputs_of_another_form_are_refused(tmp_path: Path):
    path = tmp_path / "inputs_of_another_form.py"
    path.write_text(SOURCE)
    with pytest.raises(CommandError, match="returned a int; it must return a tuple"):
        find_target(arguments(inputs="neither"), f"{path}:step")


def test_host_arguments_are_literals(tmp_path: Path):
    path = tmp_path / "step_with_host_arguments.py"
    path.write_text(SOURCE)
    target = find_target(arguments(host_arg=["n=3", "lengths=[1, 2]"]), f"{path}:step")
    assert target.host_args == {"n": 3, "lengths": [1, 2]}
    with pytest.raises(CommandError, match="not a Python literal"):
        find_target(arguments(host_arg=["n=three"]), f"{path}:step")


@pytest.mark.parametrize("name", ["../step:f", ".step:f", "../folder/step:f"])
def test_module_relative_to_nothing_is_refused_with_the_ways(name: str):
    with pytest.raises(CommandError, match="there is no module .* pass the path of its .py file"):
        find_target(arguments(), name)


def test_exception_of_user_code_is_one_line_with_its_place():
    text = r"the step raised ValueError: first at .*:\d+ \("
    with pytest.raises(CommandError, match=text), user_code("the step"):
        raise ValueError("first\nsecond")
