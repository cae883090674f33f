"""benchmarks/device.py: every step runs to its end or its limit, and its output is kept.

benchmarks/tables.py: the docs have what the outputs say, and keep what other machines said.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest

PATH = Path(__file__).parents[1] / "benchmarks" / "device.py"


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(sys, "path", [str(PATH.parent), *sys.path])
    spec = importlib.util.spec_from_file_location("device_benchmarks", PATH)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


def test_steps_name_what_exists(device: Any) -> None:
    for step in device.STEPS:
        script = PATH.parent / f"{step.name}.py"
        assert "benchmarks/{name}.py" not in step.command or script.exists()
        assert not step.measures or step.name.split("_direct")[0] in device.tables.READERS
    assert [step.name for step in device.steps_for("cpu", [])] == [
        "conformance", "tests", "generate", "graphed", "encoder", "run",
    ]  # fmt: skip
    lacking = [step.name for step in device.STEPS if step.ranks > 1]
    assert lacking == ["tensor_parallel", "handoff_direct"]


def test_only_steps_of_another_backend_are_an_error_and_no_success(
    device: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    argv = ["device.py", str(tmp_path), "--backend", "cpu", "--only", "soak"]
    monkeypatch.setattr(sys, "argv", argv)
    with pytest.raises(SystemExit) as end:
        device.main()
    assert end.value.code == 2


@pytest.mark.parametrize("devices", [[], ["--devices", "0", "1"]])
def test_failures_and_late_steps_leave_the_others_and_their_output(
    device: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    devices: list[str],
) -> None:
    steps = (
        device.Step("bad", "{python} -c 1/0", 60),
        device.Step("late", "{python} -uc print('begun');__import__('time').sleep(60)", 2),
        device.Step("elsewhere", "{python} -c 1", 60, ("cuda",)),
        device.Step("good", "{python} -c print('{backend}')", 60),
    )
    monkeypatch.setattr(device, "STEPS", steps)
    monkeypatch.setattr(sys, "argv", ["device.py", str(tmp_path), "--backend", "cpu", *devices])
    assert device.main() == 1
    out = capsys.readouterr().out
    assert "bad: 1 in" in out
    assert "late: 124 in" in out
    assert "good: 0 in" in out
    kept = {path.stem: path.read_text() for path in tmp_path.glob("*.txt")}
    assert kept.keys() == {"bad", "late", "good"}
    assert "ZeroDivisionError" in kept["bad"]
    assert kept["late"] == "begun\n"
    assert kept["good"] == "cpu\n"
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--only", "good"])
    assert device.main() == 0


def test_benchmarks_run_as_often_as_asked_and_fill_the_docs(
    device: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    found = "[dict(ranks=2,shared_us=3,gloo_us=30)]"
    program = f"__import__('json').dump({found},open(__import__('sys').argv[1],'w'))"
    steps = (
        device.Step("votes", f"{{python}} -c {program} {{json}}", 60),
        device.Step("good", "{python} -c 1", 60),
        device.Step("engine", "{python} -c 1", 60, package="no_such_engine"),
        device.Step("wide", "{python} -c 1", 60, ranks=99),
    )
    docs = tmp_path / "docs"
    docs.mkdir()
    (docs / "page.md").write_text("Text.\n\n<!-- figures votes -->\n<!-- end of figures -->\n")
    (docs / "other.md").write_text("Nothing.\n")
    monkeypatch.setattr(device, "STEPS", steps)
    argv = ["device.py", str(tmp_path / "out"), "--backend", "cpu", "--times", "3"]
    monkeypatch.setattr(sys, "argv", [*argv, "--docs", str(docs), "--commit", "abc1234"])
    assert device.main() == 0
    out = capsys.readouterr().out
    assert [line.split(":")[0] for line in out.splitlines()[1:]] == [
        "engine", "wide", "votes", "votes-2", "votes-3", "good", "changed",
    ]  # fmt: skip
    assert "engine: not run, no_such_engine is not installed" in out
    assert "changed: page.md" in out
    [row] = [line for line in (docs / "page.md").read_text().splitlines() if "vote through" in line]
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[1:7] == ["3.00 us", "30.0 us, gloo", "0.100", "0.100", "0.100", "3"]
    assert cells[7].endswith(", abc1234")


@pytest.fixture
def tables(device: Any) -> Any:
    return device.tables


def test_tables_keep_other_machines_and_replace_their_own(tables: Any, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("A\n<!-- figures votes -->\n<!-- end of figures -->\nB\n")
    out = tmp_path / "out"
    out.mkdir()

    def run(device: str, torch: str, commit: str, *times: float) -> list[str]:
        machine = {"device": device, "torch": torch, "commit": commit}
        (out / "machine.json").write_text(json.dumps(machine))
        for number, time in enumerate(times):
            found = [{"ranks": 2, "shared_us": time, "gloo_us": 10.0}]
            name = f"votes-{number + 1}" if number else "votes"
            (out / f"{name}.json").write_text(json.dumps(found))
        assert tables.write(out, tmp_path) == ["page.md"]
        text = page.read_text()
        assert text.startswith("A\n<!-- figures votes -->\n")
        assert text.endswith("<!-- end of figures -->\nB\n")
        return [line for line in text.splitlines() if line.startswith("| 2 ranks")]

    [row] = run("NVIDIA H100 80GB HBM3", "2.11.0", "one", 1.0, 4.0, 2.0)
    assert row.endswith(
        "| 2.00 us | 10.0 us, gloo | 0.200 | 0.100 | 0.400 | 3 | H100, torch 2.11.0, one |"
    )
    rows = run("NVIDIA H200", "2.11.0", "one", 1.0)
    assert [line.split("|")[-2].strip() for line in rows] == [
        "H100, torch 2.11.0, one", "H200, torch 2.11.0, one",
    ]  # fmt: skip
    rows = run("NVIDIA H100 80GB HBM3", "2.11.0", "two", 5.0, 5.0, 5.0)
    assert [line.split("|")[-2].strip() for line in rows] == [
        "H100, torch 2.11.0, two", "H200, torch 2.11.0, one",
    ]  # fmt: skip
    assert tables.write(out, tmp_path) == []


SAMPLES: dict[str, tuple[Any, str, float]] = {
    "foundation": (
        {
            "replay": {"native": 4.0, "devgraph": 5.0},
            "runner": {"native": 4.0, "run": 8.0},
            "capture": {
                "buckets": 36, "hand_seconds": 4.0, "seconds": 3.0, "hand_mib": 36, "mib": 4,
            },
        },
        "capturing 36 decode buckets",
        0.75,
    ),
    "generate": (
        [
            {
                "model": "smollm2-135m, random weights",
                "batch": 1,
                "runs": {
                    "graphs": {"decode_tokens_per_s": 600.0},
                    "eager": {"decode_tokens_per_s": 100.0},
                    "static": {"failed": 1},
                },
            }
        ],
        "smollm2-135m, batch 1",
        6.0,
    ),
    "update": (
        {
            "d256": {
                "real": {
                    "meta": {"host_us": 100.0, "wall_us": 10.0},
                    "breakable": {"host_us": 99.0, "wall_us": 10.0},
                    "full+update": {"host_us": 2.0, "wall_us": 8.0},
                },
                "first": {"new_ms": 3.0, "eager_ms": 7.0},
            }
        },
        "d256, `full+update`, host",
        0.02,
    ),
    "piecewise": (
        {
            "device": "one",
            "prefill": {
                "512": {
                    "piecewise+inductor": {"wall_ms": 2.0},
                    "breakable": {"wall_ms": 4.0},
                    "eager": {"wall_ms": 8.0},
                }
            },
            "fixed, one graph": {
                "piecewise": {"wall_ms": 1.0}, "reduce-overhead": {"wall_ms": 4.0},
            },
        },
        "512 tokens, one graph, wall",
        0.25,
    ),
    "gates": (
        [
            {"kind": "cost", "shape": "small", "tokens": 64, "variant": "waits", "with": 3.0,
             "without": 2.0},
            {"kind": "overlap", "shape": "small", "tokens": 64, "variant": "", "error": []},
        ],
        "small, 64 tokens, waits",
        1.5,
    ),
    "economy": (
        {
            "memory": {
                "by hand": {"mib": 100.0},
                "budget": {
                    "graphs": 66, "used": 17, "mib": 25.0,
                    "steady": {"budgeted_wall_us": 9.0, "unbudgeted_wall_us": 9.0},
                },
            },
            "plan": {"qwen3-0.6b": "ended with 1"},
            "start": {"warmup 0": {"first": {"seconds": 2.0}}, "warmup 1": "ended with 1"},
            "sleep": {"held_mib": 100.0, "share_0": 0.75},
        },
        "graph memory left during sleep",
        0.25,
    ),
    "pace": (
        [
            {"kind": "torch", "us": [100.0], "ratio": 1.0},
            {"kind": "decode", "us": [101.0], "ratio": 1.01},
            {"act": "capture", "us": [100.0, 100.0, 111.0], "recovered": 100.0},
        ],
        "a replay after 2 x capture, not recovered",
        1.11,
    ),
    "graphed": (
        {"shapes": {"mlp": {"eager": {"us": 8.0}, "graphed": {"us": 2.0}, "torch": {}}}},
        "mlp",
        0.25,
    ),
    "handoff": (
        {"backends": ["cpu", "cuda"], "direct": False, "admit_ms": 2.0, "copy_ms": 1.0,
         "step_beside_ms": 1.5, "step_ms": 1.0},
        "cpu, cuda: a decode step while handoffs arrive",
        1.5,
    ),
    "tensor_parallel": (
        {
            "ranks": 2,
            "decode": {"devgraph": 1.0, "by_hand": 1.0, "runner": 2.0},
            "prefill": {"devgraph": 3.0, "native": 4.0, "runner": 5.0, "segments": 33},
            "step": {"eager": 9.0, "graph": 3.0, "graph, vote by gloo": 6.0, "speedup": 3.0},
            "vote": {"shared memory": 1.0, "gloo": 9.0},
        },
        "2 ranks, a decode step with a vote by gloo, wall",
        2.0,
    ),
    "votes": (
        [{"ranks": 4, "shared_us": 3.0, "gloo_us": 30.0}],
        "4 ranks, a vote through shared memory",
        0.1,
    ),
    "encoder": (
        {
            "rows": [
                {"name": "64 images: eager", "wall": 0.004},
                {"name": "64 images: full", "wall": 0.001},
            ]
        },
        "64 images, `full`",
        0.25,
    ),
    "vllm": (
        {
            f"v2:{layer}{mark}": {
                "capture_s": seconds, "graph_gib": 0.2, "prefill": {"1x500": {"ms": 4.0}},
                "decode": {"8": {"device_ms": 1.0}},
            }
            for mark in ("", "#2")
            for layer, seconds in (("default", 6.0), ("devgraph", 3.0))
        },
        "V2, first captures",
        0.5,
    ),
    "vllm_pace": (
        {
            "v2:default": {
                "pace": {"as_it_is_ms": 1.0, "slowed_ms": 1.1, "recovered_ms": 0.9},
            },
            "v2:eager": {},
        },
        "vLLM's own layer, a forward of 8 then recovered",
        0.9,
    ),
    "sglang": (
        {
            "jobs": {
                f"{layer}:default{mark}": {
                    "capture_s": 1.0, "graph_gib": 0.5, "graph_gib_after": 0.7,
                    "decode 8": [time, 9.0], "prefill 1 500": [4.0], "equal_tokens": 1, "pace": "1",
                }
                for mark in ("", "#2")
                for layer, time in (("own", 2.0), ("devgraph", 1.0))
            }
        },
        "default, decode of 8",
        0.5,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SAMPLES)
def test_every_benchmark_has_rows(tables: Any, name: str) -> None:
    report, what, ratio = SAMPLES[name]
    assert SAMPLES.keys() == tables.READERS.keys()
    pairs = [*tables.READERS[name](json.loads(json.dumps(report)))]
    members = [pair for pair in pairs if pair.what == what]
    assert len(members) == (2 if name in ("vllm", "sglang") else 1)
    assert {round(pair.measured / pair.peer, 9) for pair in members} == {ratio}


def test_figures_have_three_digits(tables: Any) -> None:
    values = (0.0123, 0.46, 1.3034, 12.345, 123.4, 1234.5)
    assert [tables.number(value) for value in values] == [
        "0.012", "0.460", "1.30", "12.3", "123", "1,234",
    ]  # fmt: skip
