"""Tests and benchmarks of one backend in one call: what a change to a device's code has to pass.

Steps are processes of their own, each with a time limit; the outputs lie in a folder as they come,
so that what was measured is kept when the machine goes. With several devices, steps run beside each
other, one at a time per device: then they share the processors, and host times are worth less.
"""

from __future__ import annotations

import argparse
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import attrs

import devgraph as dg

ROOT = Path(__file__).parents[1]
DEVICE_VARIABLES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES")


@attrs.frozen
class Step:
    """One command; ``{python}``, ``{name}``, ``{backend}`` and ``{out}`` are filled in."""

    name: str
    command: str
    seconds: int
    """After which it is ended: about twice what it takes on an H200."""
    backends: tuple[str, ...] = ()
    """The backends that it is made for; any if empty."""


_TESTS = "{python} -m pytest -p no:cacheprovider -q --tb=short -n 6 --devgraph-backend {backend}"
_BENCHMARK = "{python} benchmarks/{name}.py"
STEPS = (
    Step("conformance", f"{_TESTS} --pyargs devgraph.testing.conformance", 180),
    Step("tests", f"{_TESTS} tests -m {{backend}}", 300),
    # Flat memory of the device shows only where no other test takes some.
    Step("soak", f"{_TESTS} -n 0 tests/cuda/test_update.py -k ten_thousand", 60, ("cuda",)),
    Step("update", f"{_BENCHMARK} --json {{out}}/update.json", 300, ("cuda",)),
    Step("foundation", f"{_BENCHMARK} --json {{out}}/foundation.json", 120, ("cuda",)),
    Step("gates", f"{_BENCHMARK} --json {{out}}/gates.json", 600, ("cuda",)),
    Step("piecewise", f"{_BENCHMARK} --json {{out}}/piecewise.json", 240, ("cuda",)),
    Step("generate", f"{_BENCHMARK} --backend {{backend}} --json {{out}}/generate.json", 240),
    Step("run", f"{_BENCHMARK} --backend {{backend}}", 240),
)


def steps_for(backend: str, only: Sequence[str]) -> list[Step]:
    """Return the steps of a backend in their order, or those that ``only`` names."""
    fitting = [step for step in STEPS if backend in (step.backends or (backend,))]
    return [step for step in fitting if not only or step.name in only]


def run_step(step: Step, backend: str, out: Path, device: str | None) -> int:
    """Run one step; return its exit code, 124 if it took too long."""
    fields = {"python": sys.executable, "name": step.name, "backend": backend, "out": str(out)}
    words = [word.format_map(fields) for word in step.command.split()]
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
    if device is not None:
        environment.update(dict.fromkeys(DEVICE_VARIABLES, device))
    log = out / f"{step.name}.txt"
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
    print(f"{step.name}: {code} in {time.perf_counter() - begun:.0f} s: {last[:120]}", flush=True)
    return code


def main() -> int:
    """Run the steps; return 1 if one of them failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, help="folder for the outputs")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--devices", nargs="+", default=[], help="numbers; default: as they are")
    parser.add_argument("--only", nargs="+", default=[], choices=[step.name for step in STEPS])
    args = parser.parse_args()
    backend = dg.get_backend(args.backend)
    steps = steps_for(backend.name, args.only)
    if not steps:
        parser.error(f"no step of {', '.join(args.only)} is made for backend {backend.name}")
    args.out.mkdir(parents=True, exist_ok=True)
    waiting: queue.SimpleQueue[Step] = queue.SimpleQueue()
    for step in steps:
        waiting.put(step)
    print(f"{backend.name} on {backend.device_name}", flush=True)
    codes: dict[str, int] = {}

    def work(device: str | None) -> None:
        while True:
            try:
                step = waiting.get_nowait()
            except queue.Empty:
                return
            codes[step.name] = run_step(step, backend.name, args.out.resolve(), device)

    threads = [threading.Thread(target=work, args=(one,)) for one in args.devices or [None]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return int(any(codes.values()))


if __name__ == "__main__":
    sys.exit(main())
