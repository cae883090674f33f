"""Number of Python function calls and of files in common operations of devgraph.

    python benchmarks/walks.py [--only NAME ...] [--files] [--json FILE]

Each operation is a *walk*. A call of a Python function is one frame; calls into C do not count. The
output has the number of all frames and of the frames in devgraph's own files. A walk runs on the
CPU reference in the state that its line names. Two unmeasured walks precede it, so that imports and
first uses do not count. ``new_node_key`` runs on the fake HIP library of the tests, so only its
frames in devgraph are meaningful. ``--files`` lists the files of each walk and their frames.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import devgraph as dg
from devgraph.api.config.facts import EngineFacts
from devgraph.api.config.resolve import resolve
from devgraph.api.policy import get_policy

MODE = json.dumps(
    {
        "decode": {"policy": "full", "buckets": [1, 2, 4, 8, 16], "max_bs": 16},
        "prefill": {"policy": "breakable", "buckets": [64, 512]},
        "backends": {"npu": {"prefill": "full"}},
    }
)
ROOT = Path(__file__).parent.parent

Walk = tuple[str, Callable[[], Any]]
"""Description of the measured state, and the call."""


def frames_of(walk: Callable[[], Any]) -> Counter[str]:
    """Return the number of frames that ``walk`` enters, by file of the function."""
    found: Counter[str] = Counter()

    def count(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            found[frame.f_code.co_filename] += 1

    sys.setprofile(count)
    try:
        walk()
    finally:
        sys.setprofile(None)
    found[walk.__code__.co_filename] -= 1  # Exclude the frame of the walk itself.
    return +found


def mode() -> Walk:
    """Parse a mode from a command line, and get the policies of both phases."""
    parser = argparse.ArgumentParser()
    dg.add_cli_args(parser)

    def walk() -> None:
        config = dg.DeviceGraphConfig.from_args(parser.parse_args(["--device-graph-mode", MODE]))
        facts = EngineFacts().on_backend(dg.get_backend("cpu"))
        effective = resolve(config, facts).effective
        for phase in (effective.decode, effective.prefill):
            get_policy(phase.policy)

    return (
        "parse_args, from_args, resolve for cpu, get_policy twice; seven sizes, a part for npu",
        walk,
    )


def capture() -> Walk:
    """Capture and replay without host arguments."""
    x = torch.ones(4, 4)

    def walk() -> None:
        dg.capture(torch.tanh, x, backend="cpu").replay()

    return "dg.capture of one operator with two warm-up runs, then the first replay", walk


@dg.region(host_args=("length",), mutates=("out",))
def _region(x: torch.Tensor, out: torch.Tensor, *, length: int) -> None:
    out.copy_(x * length)


def _layer(x: torch.Tensor, out: torch.Tensor, *, length: int) -> torch.Tensor:
    hidden = torch.tanh(x @ x)
    _region(hidden, out, length=length)
    return torch.relu(out + hidden)


def _step(x: torch.Tensor, out: torch.Tensor, *, length: int) -> torch.Tensor:
    _region(x, out, length=length)
    return out + 1


def _captured(step: Callable[..., Any] = _step) -> dg.Captured:
    x, out = torch.ones(4, 4), torch.zeros(4, 4)
    return dg.capture(step, x, out, backend="cpu", host_args={"length": 3})


def capture_region() -> Walk:
    """Capture a step with one region."""
    return "dg.capture under full of six operators, two of them in a region; two warm-up runs", (
        lambda: _captured(_layer)
    )


def replay() -> Walk:
    """Replay without host arguments."""
    captured = dg.capture(torch.tanh, torch.ones(4, 4), backend="cpu")
    return "Captured.replay() without host arguments, third replay", lambda: captured.replay()


def known_key() -> Walk:
    """Replay a key that has a recording and differs from the previous key."""
    captured = _captured()
    lengths = itertools.cycle((3, 4))
    for _ in range(4):
        captured.replay(length=next(lengths))
    return (
        "Captured.replay(length=...) of a recorded key, after another key",
        lambda: captured.replay(length=next(lengths)),
    )


def repeated_key() -> Walk:
    """Replay the previous key again."""
    captured = _captured()
    for _ in range(3):
        captured.replay(length=4)
    return "Captured.replay(length=...) of the previous key", lambda: captured.replay(length=4)


def new_node_key() -> Walk:
    """Replay a new key on a backend that updates the parameters of nodes."""
    sys.path.insert(0, str(ROOT))
    from tests.sim.hip import Fake
    from tests.sim.hip.backend import FakeBackend

    backend, lengths = FakeBackend(Fake()), itertools.count(4)
    x, out = torch.ones(4, 4), torch.zeros(4, 4)
    captured = dg.capture(_step, x, out, backend=backend, host_args={"length": 3})
    captured.replay(length=3)
    return "Captured.replay(length=...) of a new key, one region, recorded and written", (
        lambda: captured.replay(length=next(lengths))
    )


def _forward(batch: Any) -> torch.Tensor:
    out = torch.zeros(batch.x.shape)
    _region(batch.x, out, length=batch.host.length)
    return out + 1


def decode() -> Walk:
    """Run a step of a runner after several runs."""
    runner = dg.DecodeRunner(
        _forward,
        inputs=[dg.InputSlot("x", ("tokens", 4), torch.float32, pad=dg.Pad.zero())],
        outputs=dg.OutputSlot(rows="requests"),
        host_args={"length": 1},
        config={"policy": "full", "buckets": [4]},
        backend="cpu",
        max_requests=4,
    )
    runner.capture()
    rows = torch.ones(3, 4)
    for _ in range(3):
        runner.run({"x": rows}, host_args={"length": 7})
    return "DecodeRunner.run, 3 rows in a bucket of 4, one slot, the previous host argument", (
        lambda: runner.run({"x": rows}, host_args={"length": 7})
    )


WALKS: dict[str, Callable[[], Walk]] = {
    one.__name__: one
    for one in (
        mode,
        capture,
        capture_region,
        replay,
        known_key,
        repeated_key,
        new_node_key,
        decode,
    )
}


def own(frames: Counter[str]) -> Counter[str]:
    """Return the frames of devgraph's own files."""
    mine = {file: count for file, count in frames.items() if f"{ROOT}/devgraph/" in file}
    return Counter(mine)


def measure(name: str) -> tuple[str, Counter[str]]:
    """Return the measured state of a walk, and the walk's frames by file."""
    state, walk = WALKS[name]()
    walk()
    walk()  # Imports in the first walk clear caches of abstract classes, so walk a second time.
    collecting = gc.isenabled()
    gc.disable()  # A collection may run callbacks of other packages.
    try:
        return state, frames_of(walk)
    finally:
        if collecting:
            gc.enable()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=list(WALKS), default=list(WALKS))
    parser.add_argument("--files", action="store_true", help="also list the files")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    found: dict[str, dict[str, Any]] = {}
    for name in args.only:
        state, frames = measure(name)
        mine = own(frames)
        found[name] = {
            "state": state,
            "frames": frames.total(),
            "own_frames": mine.total(),
            "own_files": len(mine),
        }
        print(
            f"{name:15} {frames.total():5} frames, {mine.total():5} of devgraph in "
            f"{len(mine):2} files: {state}"
        )
        if args.files:
            for file, count in frames.most_common():
                print(f"    {count:5}  {file.removeprefix(str(ROOT) + '/')}")
    if args.json is not None:
        args.json.write_text(json.dumps(found, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
