"""The examples run as they are, and the third-party backend is found by its entry point."""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from devgraph.api.errors import InputError
from tests.support.forked import run_forked, run_ranks
from tests.support.suite import run_suite

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
THIRD_PARTY = EXAMPLES / "thirdparty_backend"


def _run(*argv: str, path: tuple[Path, ...] = ()) -> str:
    """Run Python with ``path`` in front of the import path; return what it printed."""
    inherited = os.environ.get("PYTHONPATH", "")
    places = [str(one) for one in (*path, ROOT)] + ([inherited] if inherited else [])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(places), "OMP_NUM_THREADS": "1"}
    done = run_forked(*argv, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_quickstart_replays_what_eager_computes():
    first, second, *rest = _run(str(EXAMPLES / "quickstart.py")).splitlines()
    assert first == "replay equals eager: True"
    assert second == "9 cases: graphs equal eager bit for bit"
    assert any("region 0: attention" in line for line in rest)


def test_recurrent_model_generates_what_it_does_without_graphs():
    *requests, graphs = _run(str(EXAMPLES / "recurrent.py")).splitlines()
    assert len(requests) == 3
    assert all(line.endswith("last token equals eager: True") for line in requests)
    assert graphs == "decode steps in graphs: 15 of 15"


@pytest.mark.parametrize(
    ("options", "mode"),
    [
        ((), ""),
        (  # A flag is above the variable, and keys that nobody sets are those of the engine.
            ("--layerwise", "--prefill-device-graph-bs", "16", "64"),
            '{"decode": "full", "prefill": {"policy": "breakable", "buckets": [32]}}',
        ),
    ],
    ids=["whole", "layerwise"],
)
def test_mixed_cluster_decodes_in_graphs_with_the_tokens_of_one_process(
    options: tuple[str, ...], mode: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("DEVGRAPH_MODE", mode)
    command = EXAMPLES / "mixed_cluster.py", "--backends", "cpu", "cpu", "--check", *options
    done = run_ranks(*command, ranks=2)
    out = "".join(rank.stdout for rank in done)
    assert [rank.returncode for rank in done] == [0, 0], done
    assert "prefill on cpu: breakable, buckets [16, 64]" in out
    assert "same tokens as one process: True" in out
    table = dict(re.split("  +", line, maxsplit=1) for line in out.splitlines() if "  " in line)
    in_graphs, steps = re.findall(r"\d+", table["decode steps in graphs"])
    assert in_graphs == steps
    assert table["requests"] == "7 length, 1 aborted"
    early, layers = map(int, re.findall(r"\d+", table["layers sent"]))
    # The last of two layers is ready when the step ends.
    assert (0 < early <= layers / 2) if options else (early == 0)


def test_scheduler_orders_tokens_that_the_decode_rank_reports_first(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.syspath_prepend(EXAMPLES)
    messages = [
        {"request": 0, "token": 12, "text": "", "ended": None},
        {"request": 0, "token": 13, "text": "", "ended": "length"},
        {"request": 0, "token": 11, "text": "", "ended": None, "first": True},
        {"role": "prefill"},
        {"role": "decode"},
    ]

    class Store:
        def queue_push(self, receiver: str, text: str) -> None: ...

        def queue_pop(self, receiver: str) -> str:
            return json.dumps(messages.pop(0))

    scheduler = importlib.import_module("mixed_cluster").Scheduler(Store(), ["a prompt"])
    scheduler.run(abort=1)
    assert scheduler.tokens == [[11, 12, 13]]


def test_mixed_cluster_runs_without_graphs_in_an_emergency(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("DEVGRAPH_EMULATE", "1")
    done = run_ranks(EXAMPLES / "mixed_cluster.py", "--backends", "cpu", "cpu", ranks=2)
    assert [rank.returncode for rank in done] == [0, 0], done
    out = "".join(rank.stdout for rank in done)
    assert "decode on cpu: emulated" in out and "decode steps in graphs  0 of" in out


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ((), "start two ranks with torchrun"),
        (("--dtype", "float"), "invalid choice"),
    ],
    ids=["alone", "dtype"],
)
def test_mixed_cluster_says_how_it_is_started(options: tuple[str, ...], said: str):
    command = EXAMPLES / "mixed_cluster.py", "--backends", "cpu", "cpu", *options
    (done,) = run_ranks(*command, ranks=1)
    assert done.returncode == 2 and said in done.stderr


def test_mixed_cluster_names_settings_that_do_not_exist():
    done = run_ranks(EXAMPLES / "mixed_cluster.py", "--backends", "cqu", "cpx", ranks=2)
    assert [rank.returncode for rank in done] == [1, 1], done
    for rank, name in zip(done, ("cqu", "cpx"), strict=True):
        assert f"no backend '{name}'" in rank.stderr and "Traceback" not in rank.stderr


@pytest.mark.slow
def test_mixed_cluster_starts_with_torchrun():
    out = _run(
        *("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
        *(str(EXAMPLES / "mixed_cluster.py"), "--backends", "cpu", "cpu", "--check"),
    )
    assert "same tokens as one process: True" in out


@pytest.mark.slow
def test_mixed_cluster_runs_as_ray_actors():
    pytest.importorskip("ray", reason="Ray: pip install devgraph[ray]")
    out = _run(str(EXAMPLES / "mixed_cluster.py"), "--backends", "cpu", "cpu", "--ray")
    assert re.search(r"^requests +7 length, 1 aborted$", out, re.MULTILINE)


@pytest.mark.slow
def test_mixed_cluster_says_what_one_process_says_with_the_model_of_the_demo():
    loading = pytest.importorskip("devgraph.integrations.transformers.loading")
    pytest.importorskip("accelerate", reason="transformers needs it to read a GGUF file")
    try:
        weights = loading.find_demo()
    except InputError as error:
        pytest.skip(f"the demo model is not here: {error}")
    out = _run(
        *("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
        *(str(EXAMPLES / "mixed_cluster.py"), "--backends", "cpu", "cpu", "--check"),
        *("--model", str(weights)),
    )
    assert "same tokens as one process: True" in out
    assert re.search(r"^handoffs +8$", out, re.MULTILINE)


def test_chunked_prefill_gives_the_tokens_of_whole_prompts():
    lines = _run(str(EXAMPLES / "chunked_prefill.py")).splitlines()
    assert lines == [
        "same tokens as without chunks: True",
        "prefill: 4 of 4 steps in graphs",  # 32 tokens of three prompts, eight at a time
        "decode: 5 of 5 steps in graphs",
    ]


def test_drafts_save_steps_and_change_no_token():
    same, steps, graphs = _run(str(EXAMPLES / "speculative.py")).splitlines()
    assert same == "same tokens as one at a time: True"
    one_token, with_drafts = map(int, re.findall(r"\d+", steps))
    assert with_drafts < one_token
    assert graphs == f"in graphs: {one_token + with_drafts} of {one_token + with_drafts}"


def test_diffusion_pipeline_draws_the_images_of_eager():
    pytest.importorskip("diffusers", reason="diffusers is not installed")
    same, *_, proof = _run(str(EXAMPLES / "diffusion.py")).splitlines()
    assert same == "images equal eager: True"
    assert "graphs equal eager bit for bit" in proof


def test_adapters_are_mixed_and_swapped_under_the_same_graphs():
    *steps, graphs = _run(str(EXAMPLES / "lora.py")).splitlines()
    assert len(steps) == 4 and all(line.endswith("equal eager: True") for line in steps)
    assert graphs == "4 of 4 steps in graphs, 6 graphs"


@pytest.mark.parametrize("name", ["chunked_prefill", "speculative", "lora"])
def test_example_of_one_subject_is_short(name: str):
    assert len((EXAMPLES / f"{name}.py").read_text(encoding="utf-8").splitlines()) <= 120


def test_quickstart_of_the_readme_runs(tmp_path: Path):
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    quick = re.search(r"## A step with host values\n+```python\n(.*?)```", readme, re.DOTALL)
    assert quick is not None
    assert "captured.prove(" in quick.group(1) and "assert report.ok" in quick.group(1)
    path = tmp_path / "quick.py"
    path.write_text(quick.group(1) + "print(y.shape)\n")
    assert _run(str(path)).endswith("\ntorch.Size([8, 64])\n")


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder into which pip installed the third-party package, without any download."""
    # Not imported, nor is its module looked for: both replace a distutils that torch imported.
    for tool in ("pip", "setuptools"):
        try:
            importlib.metadata.version(tool)
        except importlib.metadata.PackageNotFoundError:
            pytest.skip(f"needs {tool} to build and install the package")
    source = tmp_path_factory.mktemp("source") / "thirdparty_backend"
    shutil.copytree(THIRD_PARTY, source, ignore=shutil.ignore_patterns("__pycache__"))
    target = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"),
            *("--no-build-isolation", "--disable-pip-version-check"),
            *("--target", str(target), str(source)),
        ],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return target


@pytest.mark.skipif(
    hasattr(torch, "xpu") and torch.xpu.is_available(), reason="this machine has such a device"
)
def test_third_party_backend_is_listed_with_its_reason(installed: Path):
    text = _run("-m", "devgraph", "doctor", "--no-probe", "--json", path=(installed,))
    found = {one["name"]: one for one in json.loads(text)["backends"]}
    assert found["xpu"]["available"] is False
    assert "torch.xpu sees no device" in found["xpu"]["reason"]


def test_third_party_file_is_as_short_as_promised():
    lines = (THIRD_PARTY / "devgraph_xpu.py").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 60


@pytest.mark.cuda
def test_third_party_code_passes_the_suite_on_a_device(tmp_path: Path):
    """The example's class over the namespace of the device at hand instead of its own."""
    result = run_suite(
        "-p", "tests.support.elsewhere", "--devgraph-backend", "elsewhere", cwd=tmp_path
    )
    outcomes = list(result.outcomes.values())
    assert "failed" not in outcomes, result.text
    assert outcomes.count("passed") > 200


@pytest.mark.parametrize(
    ("flags", "prefill", "decode"),
    [
        ((), "breakable", "full"),
        (
            ("--decode-device-graph-mode", "breakable", "--prefill-device-graph-mode", "full"),
            "full",
            "breakable",
        ),
        (("--decode-disable-device-graph",), "breakable", "disabled"),
    ],
)
def test_custom_engine_generates_in_graphs_what_it_generates_eagerly(
    flags: tuple[str, ...], prefill: str, decode: str
):
    lines = _run(str(EXAMPLES / "custom_engine.py"), "--backend", "cpu", *flags).splitlines()
    assert lines[0].startswith(f"prefill: {prefill}, ")
    assert lines[1].startswith(f"decode: {decode}, ")
    if decode != "disabled":
        assert lines[1].endswith("22 of 22 steps in graphs, eager: none")
    else:
        assert lines[1].endswith("0 of 22 steps in graphs, eager: {'disabled': 22}")
    assert lines[-1] == "same tokens as eager: True"
