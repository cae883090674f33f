"""Programs of Python in forks of a process that has imported torch.

Importing torch and its compiler takes five seconds, which is more than most programs of tests. A
fork runs the program as its module ``__main__`` and ends as any interpreter does.
"""

from __future__ import annotations

import atexit
import functools
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["Program", "run_forked", "run_ranks", "start_forked"]

ROOT = Path(__file__).resolve().parents[2]
IMPORTED = ("torch", "torch._dynamo", "devgraph.runners", "devgraph.api.policy.piecewise")


class Program:
    """A running fork, with what it writes in two files."""

    def __init__(self, server: _Server, argv: Sequence[str], env: Mapping[str, str], cwd: str):
        self._server, self._argv = server, list(argv)
        self._folder = tempfile.TemporaryDirectory()
        files = {name: os.path.join(self._folder.name, name) for name in ("out", "err")}
        self.pid = server.ask({"argv": self._argv, "env": dict(env), "cwd": cwd, **files}, 60)

    def wait(self, timeout: float) -> subprocess.CompletedProcess[str]:
        """Return the exit code and what was written; kill the program after ``timeout`` seconds."""
        try:
            code = self._server.ask({"wait": self.pid}, timeout)
        except TimeoutError:
            os.kill(self.pid, signal.SIGKILL)
            self._server.answer(60)
            raise subprocess.TimeoutExpired(self._argv, timeout) from None
        texts = [
            Path(self._folder.name, name).read_text(encoding="utf-8", errors="replace")
            for name in ("out", "err")
        ]
        self._folder.cleanup()
        return subprocess.CompletedProcess(self._argv, code, *texts)


class _Server:
    """The process that is forked; it waits for one program at a time."""

    def __init__(self) -> None:
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        self._process = subprocess.Popen(
            [sys.executable, __file__, *IMPORTED],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            bufsize=0,
        )
        self._lock = threading.Lock()
        atexit.register(self._close)

    def ask(self, request: dict[str, Any], timeout: float) -> int:
        with self._lock:
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            return self.answer(timeout)

    def answer(self, timeout: float) -> int:
        """Return the next number that the process writes."""
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], timeout)
        if not ready:
            raise TimeoutError
        return int(self._process.stdout.readline())

    def _close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


@functools.cache
def _server(pid: int) -> _Server:
    return _Server()


def start_forked(
    *argv: str | Path, env: Mapping[str, str] | None = None, cwd: str | Path | None = None
) -> Program:
    """Start ``python *argv``: ``-c CODE``, ``-m MODULE ARGUMENTS`` or ``FILE ARGUMENTS``."""
    server, where = _server(os.getpid()), str(cwd or os.getcwd())
    return Program(server, [str(one) for one in argv], os.environ if env is None else env, where)


def run_forked(
    *argv: str | Path,
    env: Mapping[str, str] | None = None,
    cwd: str | Path | None = None,
    timeout: float = 300,
) -> subprocess.CompletedProcess[str]:
    """Run ``python *argv`` to its end, as ``start_forked`` describes."""
    return start_forked(*argv, env=env, cwd=cwd).wait(timeout)


def run_ranks(
    *argv: str | Path, ranks: int, env: Mapping[str, str] | None = None, timeout: float = 300
) -> list[subprocess.CompletedProcess[str]]:
    """Run ``ranks`` programs at once, with the variables that torchrun sets."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = str(listener.getsockname()[1])
    common = {**(os.environ if env is None else env), "GLOO_SOCKET_IFNAME": "lo"}
    common |= {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    variables = [{**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]
    programs = [start_forked(*argv, env=one) for one in variables]
    return [program.wait(timeout) for program in programs]


def _serve() -> dict[str, Any]:
    """Fork at each request; return the request in the fork."""
    with os.fdopen(os.dup(0), "rb", buffering=0) as requests:
        answers = os.dup(1)
        for line in iter(requests.readline, b""):
            request = json.loads(line)
            if "wait" in request:
                number = os.waitstatus_to_exitcode(os.waitpid(request["wait"], 0)[1])
            else:
                number = os.fork()
                if not number:
                    os.close(answers)
                    return request
            os.write(answers, f"{number}\n".encode())
    sys.exit()


def _become(request: dict[str, Any]) -> None:
    """Take over the environment, the folder and the files of a program."""
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    for number, path in enumerate((os.devnull, request["out"], request["err"])):
        opened = os.open(path, os.O_CREAT | os.O_APPEND | (os.O_WRONLY if number else 0), 0o600)
        os.dup2(opened, number)
        os.close(opened)
    sys.stdout.reconfigure(write_through=True)  # a program may end without flushing
    inherited = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:1] = [place for place in inherited if place and place not in sys.path[1:]]


def _run(kind: str, *argv: str) -> None:
    if kind == "-c":
        main = types.ModuleType("__main__")
        sys.argv, sys.modules["__main__"] = ["-c", *argv[1:]], main
        sys.path.insert(0, "")
        exec(compile(argv[0], "<string>", "exec"), vars(main))
    elif kind == "-m":
        sys.argv = list(argv)
        sys.path.insert(0, os.getcwd())
        runpy.run_module(argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = [kind, *argv]
        sys.path.insert(0, str(Path(kind).parent))
        runpy.run_path(kind, run_name="__main__")


if __name__ == "__main__":
    for name in sys.argv[1:]:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    wanted = _serve()
    _become(wanted)
    _run(*wanted["argv"])
