"""``devgraph doctor``: what is here, what works, what is missing and how to get it."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import sys
from typing import Any

import attrs
import torch

from devgraph import __version__
from devgraph.api.errors import did_you_mean
from devgraph.api.registry import BackendInfo, backends, get_backend
from devgraph.cli.probes import Probe, probe_backend
from devgraph.cli.tables import CommandError, print_json, print_table, say, working
from devgraph.runners.report import format_bytes

__all__ = ["run"]

# Distribution, what it is for, and how to get it.
_PACKAGES = (
    ("torch", "everything", "pip install torch (2.11 or newer)"),
    ("attrs", "everything", "pip install attrs"),
    ("rich", "the command line", "pip install rich"),
    (
        "torch-npu",
        "Ascend NPUs",
        "pip install torch-npu (torch's version), and CANN from the vendor",
    ),
    ("transformers", "generate: models and tokenizers", "pip install transformers sentencepiece"),
    ("gguf", "generate: models in GGUF files", "pip install gguf"),
    ("accelerate", "generate: models in GGUF files", "pip install accelerate"),
    ("matplotlib", "bench --plot", "pip install matplotlib"),
    ("PyYAML", "configuration and cluster files in YAML", "pip install pyyaml"),
    (
        "pytest",
        "the conformance suite",
        "pip install pytest pytest-xdist pytest-timeout hypothesis",
    ),
)


@attrs.frozen(kw_only=True)
class _Checked:
    """One backend and what its small captures gave."""

    info: BackendInfo
    memory: tuple[int, int] | None
    """Free and total bytes."""
    device: str
    probes: tuple[Probe, ...]
    capabilities: dict[str, Any]
    details: dict[str, str]

    def to_dict(self) -> dict[str, Any]:
        memory = None if self.memory is None else {"free": self.memory[0], "total": self.memory[1]}
        return {
            **attrs.asdict(self.info),
            "torch_device": self.device,
            "memory": memory,
            "capabilities": self.capabilities,
            "details": self.details,
            "probes": [
                {**attrs.asdict(probe), "ok": probe.ok, "verdict": probe.verdict}
                for probe in self.probes
            ],
        }


def run(args: argparse.Namespace) -> int:
    """Print the report; 1 when something that a backend declares does not work."""
    found = backends()
    names = [info.name for info in found]
    for name in args.backend or ():
        if name not in names:
            raise CommandError(f"no backend {name!r}. {did_you_mean(name, names)}")
    wanted = [info for info in found if not args.backend or info.name in args.backend]
    checked = [_check(info, probe=not args.no_probe) for info in wanted]
    asked_and_missing = [c for c in checked if args.backend and not c.info.available]
    failed = [probe for one in checked for probe in one.probes if not probe.ok]
    if args.json:
        print_json(_report(checked))
    else:
        _print(checked, probed=not args.no_probe)
    return 1 if failed or asked_and_missing else 0


def _check(info: BackendInfo, *, probe: bool) -> _Checked:
    if not info.available:
        return _Checked(info=info, memory=None, device="", probes=(), capabilities={}, details={})
    backend = get_backend(info.name)
    with working(f"capturing on {info.name}"):
        probes = tuple(probe_backend(backend)) if probe else ()
    return _Checked(
        info=info,
        memory=backend.memory_info(),
        device=str(backend.device),
        probes=probes,
        capabilities=attrs.asdict(backend.capabilities),
        details=backend.details(),
    )


def _version(distribution: str) -> str | None:
    # torch knows better than its metadata which build it is.
    if distribution == "torch":
        return torch.__version__
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _devices() -> list[str]:
    """Return torch's accelerators by name, whichever backend serves them."""
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or not torch.accelerator.is_available():
        return []
    namespace = getattr(torch, accelerator.type)
    return [
        f"{accelerator.type}:{index} {namespace.get_device_name(index)}"
        for index in range(torch.accelerator.device_count())
    ]


def _report(checked: list[_Checked]) -> dict[str, Any]:
    return {
        "devgraph": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "devices": _devices(),
        "packages": {name: _version(name) for name, _, _ in _PACKAGES},
        "missing": [
            {"what": what, "for": purpose, "get": how} for what, purpose, how in _missing(checked)
        ],
        "backends": [one.to_dict() for one in checked],
    }


def _missing(checked: list[_Checked]) -> list[tuple[str, str, str]]:
    rows = [(name, purpose, how) for name, purpose, how in _PACKAGES if _version(name) is None]
    rows += [
        (f"backend {one.info.name}", "device graphs there", one.info.reason)
        for one in checked
        if not one.info.available
    ]
    return rows


def _print(checked: list[_Checked], *, probed: bool) -> None:
    devices = _devices()
    say(
        f"devgraph {__version__}, Python {platform.python_version()} ({sys.executable}), "
        f"{platform.platform()}, {os.cpu_count()} CPUs"
    )
    say(f"accelerators: {', '.join(devices) if devices else 'none that torch can see'}")
    print_table(
        "backends",
        ("name", "available", "device", "memory", "version"),
        [
            (
                one.info.name,
                one.info.available,
                one.info.device or None,
                one.memory
                and f"{format_bytes(one.memory[0])} free of {format_bytes(one.memory[1])}",
                one.info.version or None,
            )
            for one in checked
        ],
    )
    for one in checked:
        if one.probes:
            print_table(
                f"{one.info.name}: captured, replayed and compared with eager",
                ("capability", "declared", "probed", "detail"),
                [(p.name, p.declared, p.verdict, p.detail) for p in one.probes],
            )
            say(f"  declared, not probed here: {_unprobed(one)}")
        for topic, told in one.details.items():
            say(f"  {one.info.name}, {topic}: {told}")
    present = [(name, version) for name, *_ in _PACKAGES if (version := _version(name))]
    print_table("packages", ("package", "version"), present)
    print_table("missing, and how to get it", ("what", "for", "how"), _missing(checked))
    failed = [(one.info.name, p) for one in checked for p in one.probes if not p.ok]
    for name, probe in failed:
        say(f"FAILS on {name}: {probe.name}: {probe.detail}")
    if probed and not failed:
        usable = ", ".join(one.info.name for one in checked if one.info.available)
        if usable:
            say(f"everything that is declared works on: {usable}")
        else:
            say("no backend that was asked for is usable here: see what is missing above")


def _unprobed(one: _Checked) -> str:
    probed = {probe.name for probe in one.probes}
    return ", ".join(
        f"{name}={' '.join(map(str, value)) if isinstance(value, tuple) else value}"
        for name, value in one.capabilities.items()
        if name not in probed
    )
