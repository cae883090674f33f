"""The Ascend room without torch_npu: arguments, codes, budgets and what a host lacks."""

from __future__ import annotations

import gc
import importlib.util
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import devgraph as dg
from devgraph.npu import diagnose
from devgraph.npu.attention import FusedSlotAttention, fused_slot_attention, lengths_of
from devgraph.npu.channel import UpdateChannel
from devgraph.npu.diagnose import Diagnosis
from devgraph.npu.errors import NO_RESOURCE, OTHER_KERNELS, error_code, lost_reason, means
from devgraph.npu.lifetimes import StreamBudget

# Lengths of the attention -----------------------------------------------------------------------


def test_lengths_follow_slots_and_end_with_the_padding():
    spans = (0, 5, 2, 3, 0, 4)  # slot, cached, new
    assert lengths_of(spans, slots=4, tokens=8) == ((2, 2, 2, 6, 8), (7, 0, 0, 4, 0))


def test_lengths_of_no_request_are_all_padding():
    assert lengths_of((), slots=2, tokens=3) == ((0, 0, 3), (0, 0, 0))


@pytest.mark.parametrize("spans", [(1, 0, 1, 0, 0, 1), (0, 0, 1, 0, 0, 1), (2, 0, 1)])
def test_slots_that_do_not_ascend_or_exist_are_refused(spans: tuple[int, ...]):
    with pytest.raises(dg.RegionError, match="must ascend and be below 2"):
        lengths_of(spans, slots=2, tokens=4)


def test_more_tokens_than_query_rows_are_refused():
    with pytest.raises(dg.RegionError, match="5 tokens for 4"):
        lengths_of((0, 0, 5), slots=1, tokens=4)


@pytest.mark.parametrize("version", [1, 2])
def test_operator_gets_lengths_under_the_names_of_its_version(
    monkeypatch: pytest.MonkeyPatch, version: int
):
    calls: list[tuple[str, dict[str, Any]]] = []

    class Operator:
        def __init__(self, name: str) -> None:
            self.name = name

        def out(self, query: torch.Tensor, *pages: torch.Tensor, **arguments: Any) -> None:
            assert [tuple(page.shape) for page in pages] == [(2, 128, 32)] * 2
            calls.append((self.name, arguments))

    class Package:
        def __getattr__(self, name: str) -> Any:
            if name.endswith("get_max_workspace"):
                return lambda *_, **__: torch.empty(7)
            return Operator(name)

    monkeypatch.setitem(sys.modules, "torch_npu", Package())
    attention = FusedSlotAttention(2, 128, version=version, device=torch.device("cpu"))
    query, cache = torch.empty(4, 4, 16), torch.empty(256, 2, 16)
    attention.attend(query, cache, cache, torch.empty(4, 4, 16), scale=0.5, spans=(1, 6, 3))
    [(name, given)] = calls
    lengths = ([0, 3, 4], [0, 9, 0])
    if version == 1:
        assert name == "npu_fused_infer_attention_score"
        assert (given["actual_seq_lengths"], given["actual_seq_lengths_kv"]) == lengths
        assert (given["num_heads"], given["scale"]) == (4, 0.5)
    else:
        assert name == "npu_fused_infer_attention_score_v2"
        assert (given["actual_seq_qlen"], given["actual_seq_kvlen"]) == lengths
        assert (given["num_query_heads"], given["softmax_scale"]) == (4, 0.5)
    assert given["block_table"].tolist() == [[0], [1], [0]]
    assert given["workspace"].numel() == 7
    assert fused_slot_attention.__devgraph_mark__.host_args == ("spans",)


# Codes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("NPU function error: aclrtMemcpy, error code is 107030", 107030),
        ("ACL stream synchronize failed, error code:507046", 507046),
        ("Alloc sq cq fail, ret=1", 207005),
        ("something else", None),
    ],
)
def test_code_is_read_from_the_text_of_an_error(text: str, code: int | None):
    assert error_code(RuntimeError(text)) == code


def test_meaning_is_found_in_what_an_error_was_raised_from():
    try:
        try:
            raise RuntimeError("error code is 207008")
        except RuntimeError as inner:
            raise ValueError("the capture failed") from inner
    except ValueError as outer:
        assert means(outer, NO_RESOURCE)
        assert not means(outer, OTHER_KERNELS)


def test_sticky_codes_mean_a_lost_device_and_others_do_not():
    assert lost_reason(RuntimeError("synchronize, error code is 507015")) is not None
    assert lost_reason(RuntimeError("capture, error code is 107030")) is None
    assert "launch thread ended" in str(
        lost_reason(RuntimeError("The process exits for this inner error, operator Mul"))
    )


# Streams ----------------------------------------------------------------------------------------


class Graph:
    """Something that can be counted."""


def test_budget_counts_graphs_that_live_and_refuses_beyond_its_limit():
    budget, graphs = StreamBudget(limit=2), [Graph(), Graph()]
    for graph in graphs:
        budget.require()
        budget.take(graph)
    with pytest.raises(dg.ResourceError, match=r"limit is 2.*fewer buckets"):
        budget.require()
    del graph
    graphs.pop()
    gc.collect()
    assert budget.left == 1


def test_budget_learns_the_limit_from_a_driver_that_refuses():
    budget, kept = StreamBudget(limit=1800), [Graph() for _ in range(34)]
    for graph in kept:
        budget.take(graph)
    error = budget.exhausted(RuntimeError("error code is 207008"))
    assert "34 graphs" in str(error)
    assert "207008" in str(error)
    assert budget.limit == 34


# The update thread ------------------------------------------------------------------------------


class Namespace:
    """As much of torch.npu as a channel needs."""

    def SyncLaunchStream(self, index: int) -> object:
        return object()

    def set_device(self, index: int) -> None:
        """Nothing to set."""

    def stream(self, stream: object) -> Any:
        return threading.Lock()  # any context manager


def test_jobs_run_in_the_order_they_were_queued_and_raise_where_they_are_awaited():
    channel, ran = UpdateChannel(Namespace(), 0, 5.0), []
    channel.start()
    jobs = [channel.submit(lambda i=i: ran.append(i)) for i in range(50)]

    def fail() -> None:
        raise ValueError("no")

    last = channel.submit(fail)
    channel.finish(jobs[-1], "the update")
    assert ran == list(range(50))
    with pytest.raises(ValueError, match="no"):
        channel.finish(last, "the update")
    channel.stop()


def test_job_that_hangs_is_a_typed_error_within_the_timeout():
    channel, hold = UpdateChannel(Namespace(), 0, 0.3), threading.Event()
    channel.start()
    job = channel.submit(hold.wait)
    with pytest.raises(dg.UpdateError, match=r"not issued within 0\.3 s"):
        channel.finish(job, "the update")
    assert not channel.quiet
    hold.set()
    channel.stop()


class Replay:
    """Regions whose replay is under way until somebody says otherwise."""

    def __init__(self) -> None:
        self.over = False

    def settled(self) -> bool:
        return self.over


def test_settling_waits_for_every_replay_and_returns_them():
    channel, replays = UpdateChannel(Namespace(), 0, 5.0), [Replay(), Replay()]
    for replay in replays:
        channel.watch(replay)
    replays[0].over = True
    timer = threading.Timer(0.1, lambda: setattr(replays[1], "over", True))
    timer.start()
    assert set(channel.settle()) == set(replays)
    assert replays[1].over
    channel.unwatch(replays[0])
    assert channel.watched() == [replays[1]]


def test_watched_replays_may_change_while_another_thread_looks(switching_threads: None):
    channel, replays, end = UpdateChannel(Namespace(), 0, 5.0), [Replay() for _ in range(200)], []

    def launch() -> None:
        while not end:
            for replay in replays:
                channel.watch(replay)
            for replay in replays:
                channel.unwatch(replay)

    thread = threading.Thread(target=launch)
    thread.start()
    try:
        for _ in range(20_000):
            channel.watched()
    finally:
        end.append(True)
        thread.join()


@pytest.fixture
def switching_threads() -> Iterator[None]:
    """Let threads interrupt each other all the time."""
    old = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(old)


def test_channel_whose_thread_ended_refuses_at_once():
    channel = UpdateChannel(Namespace(), 3, 5.0)
    channel.start()
    channel.stop()
    with pytest.raises(dg.UpdateError, match="update thread of npu:3 has ended"):
        channel.submit(lambda: None)


# Hosts ------------------------------------------------------------------------------------------


def diagnosis(**changes: Any) -> Diagnosis:
    facts = {
        "torch": "2.13.0+cpu", "torch_npu": "2.13.0", "missing_libraries": (),
        "toolkit": "/usr/local/Ascend", "devices": 8, "autoload": True,
    }  # fmt: skip
    return Diagnosis(**{**facts, **changes})


def test_complete_host_has_no_problem():
    assert diagnosis().problems == ()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"torch_npu": None}, ["pip install torch-npu==2.13.*", "install CANN"]),
        ({"torch_npu": "2.12.1"}, ["does not belong", "torch-npu==2.13.*", "torch==2.12.*"]),
        (
            {"missing_libraries": ("libascendcl.so",)},
            ["libascendcl.so", "source set_env.sh", "TORCH_DEVICE_BACKEND_AUTOLOAD=0"],
        ),
    ],
    ids=["no-package", "other-version", "no-CANN"],
)
def test_problem_of_a_host_comes_with_the_way_to_fix_it(changes: dict[str, Any], said: list[str]):
    text = str(diagnosis(**changes))
    for part in said:
        assert part in text


def test_host_without_autoload_is_not_told_to_turn_it_off():
    [problem] = diagnosis(missing_libraries=("libhccl.so",), autoload=False).problems
    assert "AUTOLOAD" not in problem


def test_autoload_that_the_command_line_turned_off_is_still_reported(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setenv(diagnose.AUTOLOAD, "0")
    monkeypatch.delenv(diagnose.AUTOLOAD_WAS_ON, raising=False)
    assert not diagnose.diagnose().autoload
    monkeypatch.setenv(diagnose.AUTOLOAD_WAS_ON, "1")
    assert diagnose.diagnose().autoload


@pytest.mark.skipif(
    importlib.util.find_spec("torch_npu") is not None, reason="torch_npu is installed here"
)
def test_get_backend_without_torch_npu_says_how_to_get_it():
    with pytest.raises(dg.BackendUnavailableError, match=r"pip install torch-npu==.*install CANN"):
        dg.get_backend("npu")


def test_doctor_explains_a_torch_npu_that_breaks_import_torch(tmp_path: Path):
    """With autoload on, ``import torch`` fails on such a host; doctor must work all the same."""
    package = tmp_path / "torch_npu"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('libhccl.so: cannot open')\n")
    info = tmp_path / "torch_npu-2.13.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torch_npu\nVersion: 2.13.0\n")
    (info / "entry_points.txt").write_text("[torch.backends]\ntorch_npu = torch_npu:_autoload\n")
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (tmp_path, root)))}
    for name in (diagnose.AUTOLOAD, diagnose.AUTOLOAD_WAS_ON, "LD_LIBRARY_PATH"):
        environment.pop(name, None)
    done = subprocess.run(
        [sys.executable, "-m", "devgraph", "doctor", "--no-probe", "--json", "--backend", "npu"],
        capture_output=True, text=True, env=environment, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    for part in ("libascendcl.so", "source set_env.sh", "TORCH_DEVICE_BACKEND_AUTOLOAD=0"):
        assert part in done.stdout
