"""``devgraph bench`` on the backend in ``--backend`` or on every backend of this machine.

The options are those of ``devgraph bench``. If the public package breakable-cuda-graphs is
installed, it is timed on the same step.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

import devgraph as dg
from devgraph.cli import app, bench
from devgraph.cli.decoder import Decoder, attention

PACKAGE, MODULE = "breakable-cuda-graphs", "breakable_cuda_graphs"
"""Name and module of the public package for breaks."""


def public_breakable(
    backend: dg.Backend, model: Decoder, ids: Tensor, where: Tensor, kv_len: int
) -> Callable[..., Tensor] | None:
    """Capture the step with the public package, with breaks at the same function.

    The package passes no arguments to eager bodies, so the body reads the length from a variable.

    Returns:
        The replay, or None if the package is missing or does not support the backend.
    """
    if backend.name != "cuda" or importlib.util.find_spec(MODULE) is None:
        return None
    package = importlib.import_module(MODULE)
    graph, length = package.BreakableCUDAGraph(), kv_len

    @package.no_graph
    def eager(*tensors: Tensor) -> None:
        attention(*tensors, kv_len=length)

    def attend(*tensors: Tensor, kv_len: int) -> None:
        eager(*tensors)

    def replay(*, kv_len: int) -> Tensor:
        nonlocal length
        length = kv_len
        graph.replay()
        return outputs

    streams = torch.get_device_module(ids.device)
    side = streams.Stream()
    side.wait_stream(streams.current_stream())
    with streams.stream(side):
        for _ in range(2):
            model(ids, where, kv_len=kv_len)
    streams.current_stream().wait_stream(side)
    with package.breakable_graph(graph):
        outputs = model(ids, where, kv_len=kv_len, attend=attend)
    return replay


def main(argv: Sequence[str]) -> int:
    """Time the step on one backend or on all; return the largest exit code."""
    names = [info.name for info in dg.backends() if info.available]
    if any(word.split("=")[0] == "--backend" for word in argv):
        runs = [list(argv)]
    else:
        runs = [["--backend", name, *argv] for name in names]
    peers = {PACKAGE: public_breakable}
    return max(bench.run(app._parser().parse_args(["bench", *run]), peers) for run in runs)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
