"""Families of transformers on the engine: as docs/models.md says, and never another token."""

# ruff: noqa: E402  (imports follow the skip where transformers is missing)

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", reason="the transformers integration")

from tests.sim.hip import unavailable_reason
from tests.sim.hip.backend import FakeBackend
from tests.sim.hip.fake import Fake
from tests.support.flash_standin import flash_on_cpu
from tests.zoo.families import families
from tests.zoo.running import GRAPHS, REFUSED, RUNS, UNBUILT, UNCAPTURED, Result, meet
from tests.zoo.table import DOCUMENT, read, table

VERSION, DOCUMENTED = read(DOCUMENT.read_text(encoding="utf-8"))
THE_VERSION = pytest.mark.skipif(
    transformers.__version__ != VERSION, reason=f"docs/models.md is about transformers {VERSION}"
)

SAMPLE = {
    "ArceeForCausalLM",
    "DeepseekV3ForCausalLM",  # latent attention
    "GPT2LMHeadModel",  # learned positions
    "GPTNeoXForCausalLM",  # partial rotary embeddings
    "Gemma2ForCausalLM",  # caps, mixed windows
    "LlamaForCausalLM",
    "MistralForCausalLM",  # windows
    "MixtralForCausalLM",  # experts
    "MoshiForCausalLM",  # a cache that keeps less than its mask shows
    "OPTForCausalLM",  # asks for the length of its cache
    "Qwen3NextForCausalLM",  # recurrent state
    "XGLMForCausalLM",  # attention of its own
}


IN_ALL_MODES = {"LlamaForCausalLM"}
"""Runs in every mode without the slow tests; the other families of the sample run in one."""


@pytest.mark.parametrize("name", sorted(SAMPLE - IN_ALL_MODES))
def test_family_generates_as_the_model_does(name: str) -> None:
    result = meet(name, modes=GRAPHS[:1])
    if transformers.__version__ == VERSION:
        assert result == DOCUMENTED[name]


@pytest.mark.parametrize(
    "name",
    [name if name in IN_ALL_MODES else pytest.param(name, marks=pytest.mark.slow)
     for name in families()],
)  # fmt: skip
def test_family_generates_in_every_mode_as_the_model_does_or_is_refused(name: str) -> None:
    result = meet(name)
    if transformers.__version__ == VERSION:
        assert result == DOCUMENTED[name]


@pytest.mark.skipif(
    unavailable_reason() is not None, reason=f"no fake library: {unavailable_reason()}"
)
@pytest.mark.parametrize(
    ("name", "modes"),
    [
        *((name, GRAPHS[:1]) for name in sorted(SAMPLE - IN_ALL_MODES)),
        *((name, GRAPHS) for name in sorted(IN_ALL_MODES)),
        *(pytest.param(name, GRAPHS[1:], marks=pytest.mark.slow)
          for name in sorted(SAMPLE - IN_ALL_MODES)),
    ],
)  # fmt: skip
def test_family_is_right_where_a_capture_computes_nothing(name: str, modes: Any) -> None:
    # As on a device: what a model kept from its capture alone would be nan for the next step.
    found = meet(name, FakeBackend(Fake()), modes=modes)
    assert found.verdict == DOCUMENTED[name].verdict or transformers.__version__ != VERSION


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "Qwen3_5ForCausalLM"])
def test_family_is_right_where_the_device_reads_lengths(name: str) -> None:
    with flash_on_cpu():
        assert meet(name).verdict == RUNS


@THE_VERSION
def test_document_has_every_family() -> None:
    assert sorted(DOCUMENTED) == families()


def test_document_is_what_the_command_writes() -> None:
    made = table(DOCUMENTED).replace(f"transformers {transformers.__version__}:", "")
    kept = DOCUMENT.read_text(encoding="utf-8").replace(f"transformers {VERSION}:", "")
    assert made == kept


def test_table_is_read_as_it_was_written() -> None:
    results = {
        "A": Result(RUNS),
        "B": Result(RUNS),
        "C": Result(REFUSED, "its attention, alone"),
        "D": Result(UNCAPTURED, "a host read"),
        "E": Result(UNBUILT, "ValueError: no"),
    }
    assert read(table(results)) == (transformers.__version__, results)
    assert read(table({"A": Result(RUNS)}))[1] == {"A": Result(RUNS)}
