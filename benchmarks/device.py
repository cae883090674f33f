"""Tests and benchmarks of one backend in one call: what a change to a device's code has to pass.

    python benchmarks/device.py OUT [--times 3] [--docs docs]

Steps are processes of their own, each with a time limit; the outputs lie in a folder as they come,
so that what was measured is kept when the machine goes. With several devices, steps run beside each
other, one at a time per device: then they share the processors, and host times are worth less.
Steps over two devices come after them. Engines are measured where they can be imported.

``--docs`` writes the tables of the docs from the outputs, as ``tables.py`` does later from the same
folder.
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

# Files beside this one have the names of engines that are looked for.
sys.path[:] = [path for path in sys.path if Path(path).resolve() != Path(__file__).resolve().parent]

ROOT = Path(__file__).parents[1]
DEVICE_VARIABLES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES")


@attrs.frozen
class Step:
    """One command; fields in braces are filled in, ``{json}`` with the file of its figures."""

    name: str
    command: str
    seconds: int
    """After which it is ended: about twice what it takes on an H200."""
    backends: tuple[str, ...] = ()
    """The backends that it is made for; any if empty."""
    ranks: int = 1
    """How many devices it takes."""
    package: str = ""
    """What has to be there."""

    @property
    def measures(self) -> bool:
        """Whether it leaves figures, and so is worth repeating."""
        return "{json}" in self.command


_TESTS = "{python} -m pytest -p no:cacheprovider -q --tb=short -n 6 --devgraph-backend {backend}"
_BENCHMARK = "{python} benchmarks/{name}.py"
_RANKS = "{python} -m torch.distributed.run --standalone --nproc-per-node 2 benchmarks/{name}.py"
_PAIRS = ("default", "devgraph", "default#2", "devgraph#2")
STEPS = (
    Step("conformance", f"{_TESTS} --pyargs devgraph.testing.conformance", 180),
    Step("tests", f"{_TESTS} tests -m {{backend}}", 300),
    # Flat memory of the device shows only where no other test takes some.
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
    Step("votes", f"{_RANKS} --json {{json}}", 60, ("cuda",), ranks=2),
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
    """Return what this machine lacks for a step."""
    if step.package and importlib.util.find_spec(step.package) is None:
        return f"{step.package} is not installed"
    if step.ranks > max(1, torch.accelerator.device_count()):
        return f"it takes {step.ranks} devices"
    return None


def commit() -> str:
    """Return the commit of this checkout, or the version of devgraph where there is none."""
    command = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return dg.__version__
    return done.stdout.strip() or dg.__version__


def run_step(step: Step, backend: str, out: Path, device: str | None, run: int = 1) -> int:
    """Run one step; return its exit code, 124 if it took too long."""
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
    """Run the steps; return 1 if one of them failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, help="folder for the outputs")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--devices", nargs="+", default=[], help="numbers; default: as they are")
    parser.add_argument("--only", nargs="+", default=[], choices=[step.name for step in STEPS])
    parser.add_argument("--times", type=int, default=1, help="processes of each benchmark")
    parser.add_argument("--docs", type=Path, help="folder of the pages whose tables are written")
    parser.add_argument("--commit", help="of the code that runs; default: that of this checkout")
    args = parser.parse_args()
    backend = dg.get_backend(args.backend)
    steps = steps_for(backend.name, args.only)
    if not steps:
        parser.error(f"no step of {', '.join(args.only)} is made for backend {backend.name}")
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
