"""Run all tests and benchmarks of one backend, to check changes of device code.

    python benchmarks/device.py OUT [--times 3] [--docs docs]

Each step is a process with a time limit. Its output is written to the folder OUT at once, so that
results are kept if the machine is lost. With several devices, one step runs on each device at a
time. These steps share the processors, so their host times are less accurate. Steps on two devices
run after all others. Engines are measured if they are installed.

``--docs`` writes the tables of the docs from the outputs. ``tables.py`` can do this later from the
same folder.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import attrs
import tables
import torch

import devgraph as dg

# Files in this folder have the names of engines that this module imports.
sys.path[:] = [path for path in sys.path if Path(path).resolve() != Path(__file__).resolve().parent]

ROOT = Path(__file__).parents[1]
DEVICE_VARIABLES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES")


@attrs.frozen
class Step:
    """One command. Fields in braces are filled in; ``{json}`` is the path of the results file."""

    name: str
    command: str
    seconds: int
    """Time limit, about twice the time of the step on an H200."""
    backends: tuple[str, ...] = ()
    """Supported backends; empty means all."""
    ranks: int = 1
    """Number of devices."""
    package: str = ""
    """Required package."""

    @property
    def measures(self) -> bool:
        """Whether the step writes results, so that ``--times`` repeats it."""
        return "{json}" in self.command


_TESTS = "{python} -m pytest -p no:cacheprovider -q --tb=short -n 6 --devgraph-backend {backend}"
_BENCHMARK = "{python} benchmarks/{name}.py"
_RANKS = "{python} -m torch.distributed.run --standalone --nproc-per-node 2 benchmarks/{name}.py"
_PAIRS = ("default", "devgraph", "default#2", "devgraph#2")
STEPS = (
    Step("conformance", f"{_TESTS} --pyargs devgraph.testing.conformance", 180),
    Step("tests", f"{_TESTS} tests -m {{backend}}", 300),
    # No other test may allocate device memory while this test checks that memory stays constant.
    Step("soak", f"{_TESTS} -n 0 tests/cuda/test_update.py -k ten_thousand", 60, ("cuda",)),
    Step("update", f"{_BENCHMARK} --json {{json}}", 300, ("cuda",)),
    Step("foundation", f"{_BENCHMARK} --json {{json}}", 120, ("cuda",)),
    Step("gates", f"{_BENCHMARK} --json {{json}}", 600, ("cuda",)),
    Step("piecewise", f"{_BENCHMARK} --json {{json}}", 240, ("cuda",)),
    Step("generate", f"{_BENCHMARK} --backend {{backend}} --json {{json}}", 240),
    Step("economy", f"{_BENCHMARK} --backend {{backend}} --json {{json}}", 600, ("cuda",)),
    Step("pace", f"{_BENCHMARK} --serve 3 --json {{json}}", 240, ("cuda",)),
    Step("graphed", f"{_BENCHMARK} --quick --backend {{backend}} --json {{json}}", 300),
    Step("encoder", f"{_BENCHMARK} --backend {{backend}} --dtype bfloat16 --json {{json}}", 180),
    Step("handoff", f"{_BENCHMARK} --backends cpu {{backend}} --json {{json}}", 120, ("cuda",)),
    Step("run", f"{_BENCHMARK} --backend {{backend}}", 240),
    Step(
        "vllm",
        f"{_BENCHMARK} {{out}}/vllm-run --together --captures 0 --deadline 300 --json {{json}} "
        f"--jobs {' '.join(f'v2:{name}' for name in _PAIRS)}",
        600,
        ("cuda",),
        package="vllm",
    ),
    Step(
        "sglang",
        "{python} benchmarks/sglang0523.py --warm --json {json} --jobs own:default "
        "devgraph:default own:default#2 devgraph:default#2 own:full devgraph:full",
        600,
        ("cuda",),
        package="sglang",
    ),
    Step("tensor_parallel", f"{_RANKS} --json {{json}}", 120, ("cuda",), ranks=2),
    Step("votes", "{python} benchmarks/{name}.py --json {json}", 120, ("cuda",)),
    Step(
        "handoff_direct",
        "{python} benchmarks/handoff.py --backends {backend} {backend} --direct --json {json}",
        120,
        ("cuda",),
        ranks=2,
    ),
)


def steps_for(backend: str, only: Sequence[str]) -> list[Step]:
    """Return the steps of a backend in their order, or those that ``only`` names."""
    fitting = [step for step in STEPS if backend in (step.backends or (backend,))]
    return [step for step in fitting if not only or step.name in only]


def missing(step: Step) -> str | None:
    """Return the reason why this machine cannot run a step, or None."""
    if step.package and importlib.util.find_spec(step.package) is None:
        return f"{step.package} is not installed"
    if step.ranks > max(1, torch.accelerator.device_count()):
        return f"it needs {step.ranks} devices"
    return None


def commit() -> str:
    """Return the commit of this checkout, or the version of devgraph outside of a checkout."""
    command = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return dg.__version__
    return done.stdout.strip() or dg.__version__


def run_step(step: Step, backend: str, out: Path, device: str | None, run: int = 1) -> int:
    """Run one step; return its exit code, or 124 after the time limit."""
    name = step.name if run == 1 else f"{step.name}-{run}"
    fields = {"python": sys.executable, "name": step.name, "backend": backend, "out": str(out)}
    fields["json"] = str(out / f"{name}.json")
    words = [word.format_map(fields) for word in step.command.split()]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
    if device is not None:
        environment.update(dict.fromkeys(DEVICE_VARIABLES, device))
    log = out / f"{name}.txt"
    begun = time.perf_counter()
    with log.open("w") as file:
        try:
            code = subprocess.run(
                words,
                cwd=ROOT,
                env=environment,
                stdout=file,
                stderr=subprocess.STDOUT,
                timeout=step.seconds,
                check=False,
            ).returncode
        except subprocess.TimeoutExpired:
            code = 124
    last = (log.read_text(errors="replace").strip().splitlines() or [""])[-1]
    print(f"{name}: {code} in {time.perf_counter() - begun:.0f} s: {last[:120]}", flush=True)
    return code


def main() -> int:
    """Run the steps; return 1 if a step failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, help="folder for the outputs")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--devices", nargs="+", default=[], help="device numbers (default: all)")
    parser.add_argument("--only", nargs="+", default=[], choices=[step.name for step in STEPS])
    parser.add_argument("--times", type=int, default=1, help="number of runs of each benchmark")
    parser.add_argument("--docs", type=Path, help="folder of the pages with tables to write")
    parser.add_argument("--commit", help="commit of the code (default: that of this checkout)")
    args = parser.parse_args()
    backend = dg.get_backend(args.backend)
    steps = steps_for(backend.name, args.only)
    if not steps:
        parser.error(f"no step of {', '.join(args.only)} supports backend {backend.name}")
    out = args.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    machine = tables.Machine(backend.device_name, torch.__version__, args.commit or commit())
    (out / "machine.json").write_text(json.dumps(attrs.asdict(machine)), encoding="utf-8")
    waiting: queue.SimpleQueue[tuple[Step, int]] = queue.SimpleQueue()
    last: list[tuple[Step, int]] = []
    print(f"{backend.name} on {backend.device_name}", flush=True)
    for step in steps:
        if why := missing(step):
            print(f"{step.name}: not run, {why}", flush=True)
            continue
        for run in range(1, 1 + (args.times if step.measures else 1)):
            last.append((step, run)) if step.ranks > 1 else waiting.put((step, run))
    codes: list[int] = []

    def work(device: str | None) -> None:
        while True:
            try:
                step, run = waiting.get_nowait()
            except queue.Empty:
                return
            codes.append(run_step(step, backend.name, out, device, run))

    threads = [threading.Thread(target=work, args=(one,)) for one in args.devices or [None]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    codes += [run_step(step, backend.name, out, None, run) for step, run in last]
    if args.docs:
        print("changed:", *(tables.write(out, args.docs) or ["nothing"]))
    return int(any(codes))


if __name__ == "__main__":
    sys.exit(main())
