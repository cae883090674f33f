"""DEVGRAPH_MODE for SGLang: what it puts into the server's arguments, and what it refuses."""

from __future__ import annotations

import types
from typing import Any

import pytest

import devgraph as dg
from devgraph.integrations import sglang
from devgraph.integrations.sglang import backends
from devgraph.integrations.sglang.modes import engine_mode
from tests.support.sglang_steps import module


@pytest.fixture(params=["when made", "later"])
def made(engine: Any, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Make resolved arguments, as 0.5.17 does when they are made, and later versions afterwards."""
    arguments = module("server_args", "sglang.srt").ServerArgs
    if request.param == "when made":
        monkeypatch.delattr(arguments, "resolve_once")

    def make(**given: Any) -> Any:
        found = arguments(**given)
        if request.param == "later":
            found.resolve_once()
        return found

    return make


def test_named_phases_are_put_in_and_the_others_left_to_sglang(made: Any) -> None:
    sglang.install(mode='{"prefill": {"policy": "full", "buckets": [64, 512], "max_requests": 8}}')
    assert made(cuda_graph_bs_decode=[1, 2]).cuda_graph_config == {
        "decode": {},
        "prefill": {"backend": "full", "bs": [64, 512], "full_prefill_max_req": 8},
    }
    sglang.uninstall()
    assert made().cuda_graph_config is None


def test_memory_is_the_budget_of_what_graphs_launch(engine: Any) -> None:
    sglang.install(mode='{"decode": {"memory": 4096}, "prefill": {"memory": 8192}}')
    first, _ = backends.shared().memory.shared(None)
    assert first.recordings.budget_bytes == 4096
    sglang.uninstall()
    second, _ = backends.shared().memory.shared(None)
    assert (first is not second, second.recordings.budget_bytes) == (True, None)


@pytest.mark.parametrize(
    "given",
    [
        {"cuda_graph_backend_prefill": "breakable"},
        {"disable_cuda_graph": True},
        {"disable_prefill_cuda_graph": True},
        {"cuda_graph_config": {"prefill": {"backend": "breakable"}}},
    ],
)
def test_option_of_sglang_that_contradicts_is_refused(made: Any, given: dict[str, Any]) -> None:
    sglang.install(mode='{"prefill": "full"}')
    with pytest.raises(dg.ConfigError, match="prefill backend=full and SGLang's own options for"):
        made(**given)
    assert made(cuda_graph_backend_prefill="full").cuda_graph_config["prefill"] == {
        "backend": "full"
    }


def test_backend_that_sglang_resolves_otherwise_is_refused(made: Any) -> None:
    sglang.install(mode='{"prefill": "full"}')
    with pytest.raises(dg.ConfigError, match="SGLang allows only disabled"):
        made(allowed="disabled")


def test_arguments_that_were_resolved_in_another_process_stay_as_they_are(engine: Any) -> None:
    sglang.install(mode='{"prefill": "full"}')
    arguments = module("server_args", "sglang.srt").ServerArgs()
    arguments._resolution_finished = True
    arguments.resolve_once()
    assert arguments.cuda_graph_config is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"prefill": "piecewise"}', "no piecewise for prefill in which devgraph could capture"),
        ('{"decode": {"warmup": 3}}', "nothing like warmup of decode"),
        ('{"decode": "ful"}', "Did you mean"),
    ],
)
def test_mode_that_sglang_cannot_do_is_refused(text: str, message: str) -> None:
    with pytest.raises(dg.ConfigError, match=message):
        engine_mode(text, "cpu")


def test_key_that_this_sglang_lacks_is_refused(engine: Any) -> None:
    mode = engine_mode('{"prefill": {"max_seq_len": 64}}', "cpu")
    with pytest.raises(dg.ConfigError, match="no max_seq_len for prefill"):
        mode.put_into(types.SimpleNamespace(cuda_graph_config=None))


def test_overlay_of_the_platform_counts() -> None:
    text = '{"prefill": "full", "backends": {"cpu": {"prefill": "breakable"}}}'
    assert engine_mode(text, "cpu").phases["prefill"] == {"backend": "breakable"}
    assert engine_mode(text, "cuda").phases["prefill"] == {"backend": "full"}
