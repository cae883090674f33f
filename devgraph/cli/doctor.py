"""``devgraph doctor``, which reports devices, probed capabilities and missing packages."""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import logging
import os
import platform
import sys
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch

from devgraph import __version__
from devgraph.api.backend import Backend
from devgraph.api.capabilities import Capabilities, hooks
from devgraph.api.capture import Captured, capture
from devgraph.api.config.document import read_file
from devgraph.api.config.facts import EngineFacts
from devgraph.api.config.model import DeviceGraphConfig
from devgraph.api.config.phase import as_object, verify_from_environment
from devgraph.api.config.resolve import resolve
from devgraph.api.environment import MODE_VARIABLE, SWITCHES, applied_by_runners, switch
from devgraph.api.errors import (
    DeviceGraphError,
    HostReadError,
    UpdateUnsupportedError,
    counted,
    did_you_mean,
    format_bytes,
)
from devgraph.api.gates import gate_timeout
from devgraph.api.marks.marks import no_graph, region
from devgraph.api.policy import breaks, compiles, policies
from devgraph.api.registry import (
    OTHER_NAMES,
    BackendInfo,
    backends,
    declaration,
    get_backend,
    installed_version,
)
from devgraph.cli.arguments import check_group
from devgraph.cli.tables import CommandError, print_json, print_table, say, time_text, working
from devgraph.cli.timing import seconds_per_call

logger = logging.getLogger(__name__)

# Distribution, purpose and installation command of each package.
_PACKAGES = (
    ("torch", "everything", "pip install torch (2.11 or newer)"),
    ("transformers", "generate: models and tokenizers", "pip install transformers sentencepiece"),
    ("gguf", "generate: models in GGUF files", "pip install gguf"),
    ("accelerate", "generate: models in GGUF files", "pip install accelerate"),
    ("PyYAML", "configuration and cluster files in YAML", "pip install pyyaml"),
    ("pytest", "conformance suite", "pip install pytest pytest-xdist pytest-timeout hypothesis"),
)


def run(args: argparse.Namespace) -> int:
    """Print the report; return 1 if a probe fails, a setting is invalid, or a backend is absent."""
    found = backends()
    names = [info.name for info in found]
    for name in args.backend or ():
        if name not in names:
            hint = did_you_mean(name, names, OTHER_NAMES)
            raise CommandError(f"no backend {name!r}. {hint}")
    if args.group is not None and args.expect is None:
        raise CommandError("--group needs a plan: add --expect PLAN.json")
    if args.expect is not None:
        return _expect(args)
    wanted = [info for info in found if not args.backend or info.name in args.backend]
    if args.capabilities:
        if args.json:
            way = "use --no-probe --json, which prints the same data under `declared`"
            raise CommandError(f"--capabilities prints tables only; {way}")
        _print_capabilities([info.name for info in wanted])
        return 0
    checked = [_check(info, probe=not args.no_probe) for info in wanted]
    asked_and_missing = [entry for entry in checked if args.backend and not entry["available"]]
    failed = [probe for entry in checked for probe in entry["probes"] if not probe["ok"]]
    report = _report(checked)
    if args.json:
        for entry in checked:
            kind = declaration(entry["name"])
            entry["declared"] = None if kind is None else attrs.asdict(kind.capabilities)
        print_json(report)
    else:
        _print(report, probed=not args.no_probe)
    return 1 if failed or asked_and_missing or report["errors"] else 0


def _expect(args: argparse.Namespace) -> int:
    """Compare this machine with the groups of a plan; return 1 if there is a difference."""
    groups = _planned(args.expect)
    if args.group is not None:
        check_group(args.group, [group["group"] for group in groups], args.expect)
        groups = [group for group in groups if group["group"] == args.group]
    names = args.backend or [info.name for info in backends() if info.available]
    asked = args.group and not args.backend  # A missing backend is then a difference.
    here = [group for group in groups if asked or group["backend"] in names]
    modes = {json.dumps(group.get("effective"), sort_keys=True) for group in here}
    if len(modes) > 1:
        own = ", ".join(group["group"] for group in here)
        raise CommandError(
            f"{args.expect}: this machine can run several groups with different modes ({own}); "
            f"add --group with the name of its group"
        )
    if not here:
        wanted = ", ".join(dict.fromkeys(group["backend"] for group in groups))
        what = "--backend names" if args.backend else "this machine has"
        raise CommandError(
            f"{args.expect}: the plan is for {wanted}, but {what} {', '.join(names)}; "
            f"choose another --group or --backend, or plan again"
        )
    report = {group["group"]: _differences(group) for group in here}
    if args.json:
        print_json(report)
    else:
        for name, differences in report.items():
            say(f"{name}: {'as planned' if not differences else 'NOT as planned'}")
            for line in "\n".join(differences).splitlines():
                say(f"  {line}", style="error")
        lines = [line for found in report.values() for line in found if ": planned " in line]
        names = applied_by_runners()
        keys = (".emulate", ".verify") if names else ()
        applied = [line for line in lines if line.partition(":")[0].endswith(keys)]
        if len(lines) > len(applied):
            unset = "" if os.environ.get(MODE_VARIABLE) else f"{MODE_VARIABLE} is not set: "
            say(f"{unset}devgraph plan --cluster FILE --emit env prints the mode of each node")
        if applied:
            say(f"unset {' and '.join(names)}: runners apply the environment to their mode")
    return 1 if any(report.values()) else 0


def _planned(path: str) -> list[dict[str, Any]]:
    document = as_object(read_file(path), path)
    groups = document.get("groups")
    keys = ("group", "backend", "facts")
    if not isinstance(groups, list) or not all(
        isinstance(group, dict) and all(key in group for key in keys) for group in groups
    ):
        way = "write one to another file with devgraph plan --cluster FILE --json > plan.json"
        raise CommandError(f"{path} is not the plan of a cluster; {way}")
    return [{**group, "devgraph": document.get("devgraph")} for group in groups]


def _differences(group: dict[str, Any]) -> list[str]:
    """Return the differences between a planned group and this machine."""
    differences: list[str] = []
    if group["devgraph"] != __version__:
        differences.append(
            f"devgraph: version {group['devgraph']} in the plan, {__version__} here; install the "
            f"planned version, or plan again"
        )
    if group.get("error"):
        return [*differences, f"the plan itself failed: {group['error']}"]
    try:
        backend = get_backend(group["backend"])
        facts = EngineFacts.from_dict(group["facts"])
        config = DeviceGraphConfig.from_args(argparse.Namespace())
        resolution = resolve(config, facts.on_backend(backend)).in_environment()
        here = resolution.effective.to_dict(everything=True)
    except DeviceGraphError as error:
        return [*differences, str(error)]
    for phase, keys in group["effective"].items():
        differences += [
            f"{phase}.{key}: planned {json.dumps(value)}, here {json.dumps(here[phase].get(key))}"
            for key, value in keys.items()
            if here[phase].get(key) != value
        ]
    return differences


def _print_capabilities(names: Sequence[str]) -> None:
    """Print the declared capabilities of backends. This needs no device."""
    declared = {name: declaration(name) for name in names}
    kinds = [kind for kind in declared.values() if kind is not None]
    fields = [field.name for field in attrs.fields(Capabilities)]
    for start in range(0, len(kinds), 4):  # Four backends fit into 80 columns.
        some = kinds[start : start + 4]
        modes = [json.dumps(dict(kind.recommended_mode)) for kind in some]
        rows = [[name, *(_declared(kind, name) for kind in some)] for name in fields]
        rows.append(["recommended mode", *("the default" if m == "{}" else m for m in modes)])
        print_table("declared capabilities", ("capability", *(kind.name for kind in some)), rows)
    for name in (name for name, kind in declared.items() if kind is None):
        say(f"{name} declares nothing: it is a function, or its package cannot be loaded")
    for kind in kinds:
        for need in dict.fromkeys(kind.needs.values()):
            needy = [name for name, other in kind.needs.items() if other == need]
            say(f"* {kind.name} with {need}: {', '.join(needy)}")
    say()
    table = [(name, ", ".join(hooks(name))) for name in fields if hooks(name)]
    print_table("methods that a vendor implements", ("capability", "methods"), table)


def _declared(kind: type[Backend], name: str) -> str:
    value = getattr(kind.capabilities, name)
    if isinstance(value, tuple):
        text = ", ".join(value)
    elif isinstance(value, bool) or value is None:
        text = "yes" if value else "-"
    else:
        text = f"{value:,}"
    return f"{text} *" if name in kind.needs else text


def _check(info: BackendInfo, *, probe: bool) -> dict[str, Any]:
    """Return the description of a backend and the results of its probes, as JSON values."""
    found = {**attrs.asdict(info), "torch_device": "", "memory": None}
    found |= {"capabilities": {}, "lacks": {}, "details": {}, "probes": []}
    if not info.available:
        return found
    try:
        backend = get_backend(info.name)
        here, everywhere = backend.capabilities, type(backend).capabilities
        memory = backend.memory_info()
        with working(f"capturing on {backend.name}") if probe else contextlib.nullcontext():
            probes = probe_backend(backend) if probe else []
        return found | {
            "torch_device": str(backend.device),
            "memory": None if memory is None else {"free": memory[0], "total": memory[1]},
            "capabilities": attrs.asdict(here),
            # Capabilities that are declared but reduced here, with their requirements.
            "lacks": {
                name: need
                for name, need in backend.needs.items()
                if getattr(here, name) != getattr(everywhere, name)
            },
            "details": backend.details(),
            "probes": probes,
        }
    except Exception as error:  # Other backends must still be reported.
        logger.info("backend %s", info.name, exc_info=True)
        return found | {"available": False, "reason": f"{type(error).__name__}: {error}"}


def _devices() -> list[str]:
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or not torch.accelerator.is_available():
        return []
    namespace = getattr(torch, accelerator.type)
    return [
        f"{accelerator.type}:{index} {namespace.get_device_name(index)}"
        for index in range(torch.accelerator.device_count())
    ]


def _settings() -> dict[str, Any]:
    """Return the mode and variables that runners apply, and the errors in all settings."""
    mode: dict[str, Any] = {}
    errors: list[str] = []

    def read_mode() -> None:
        mode.update(DeviceGraphConfig.from_args(argparse.Namespace()).to_dict())

    readers: list[Callable[[], object]] = [read_mode, verify_from_environment, gate_timeout]
    readers += [functools.partial(switch, name) for name in SWITCHES]
    for read in readers:
        try:
            read()
        except DeviceGraphError as error:
            errors.append(str(error))
    variables = {name: os.environ[name] for name in applied_by_runners()}
    return {"mode": mode, "variables": variables, "errors": errors}


def _report(checked: list[dict[str, Any]]) -> dict[str, Any]:
    packages = {name: installed_version(name) for name, _, _ in _PACKAGES}
    lacking = [row for row in _PACKAGES if packages[row[0]] is None]
    for entry in (entry for entry in checked if not entry["available"]):
        lacking.append((f"backend {entry['name']}", "device graphs", entry["reason"]))
    missing = [{"what": what, "for": purpose, "get": how} for what, purpose, how in lacking]
    machine = {"platform": platform.platform(), "cpus": os.cpu_count(), "devices": _devices()}
    found = {"packages": packages, "missing": missing, "backends": checked, **_settings()}
    return {"devgraph": __version__, "python": platform.python_version(), **machine, **found}


def _print(report: dict[str, Any], *, probed: bool) -> None:
    say(
        f"devgraph {report['devgraph']}, Python {report['python']} ({sys.executable}), "
        f"{report['platform']}, {report['cpus']} CPUs"
    )
    say(f"accelerators: {', '.join(report['devices']) or 'none that torch can see'}")
    if report["mode"]:
        say(f"mode of {MODE_VARIABLE} and [tool.devgraph]: {json.dumps(report['mode'])}")
    for name, value in report["variables"].items():
        if not any(name in error for error in report["errors"]):
            say(f"{name}={value} changes the mode of all runners")
    checked = report["backends"]
    print_table(
        "backends",
        ("name", "available", "device", "memory", "version"),
        [
            (e["name"], e["available"], e["torch_device"] or None, _memory(e), e["version"] or None)
            for e in checked
        ],
    )
    for entry in checked:
        name, probes = entry["name"], entry["probes"]
        if probes:
            print_table(
                f"{name}: captured, replayed and compared with eager",
                ("capability", "declared", "probed", "detail"),
                [(p["name"], p["declared"], p["verdict"], p["detail"]) for p in probes],
            )
        for lacking, need in entry["lacks"].items():
            say(f"  {name}: {lacking} is reduced here; it needs {need}")
        for topic, detail in entry["details"].items():
            say(f"  {name}, {topic}: {detail}")
    present = [(name, version) for name, version in report["packages"].items() if version]
    print_table("packages", ("package", "version"), present)
    missing = [tuple(entry.values()) for entry in report["missing"]]
    print_table("missing packages and backends", ("missing", "purpose", "installation"), missing)
    if probed and all(probe["ok"] for entry in checked for probe in entry["probes"]):
        usable = ", ".join(entry["name"] for entry in checked if entry["available"])
        none = "none of the requested backends is usable here: see the missing packages above"
        say(f"all declared capabilities work on: {usable}" if usable else none)
    for error in report["errors"]:
        say(f"error: {error}", style="error")


def _memory(entry: dict[str, Any]) -> str | None:
    sizes = entry["memory"]
    return sizes and f"{format_bytes(sizes['free'])} free of {format_bytes(sizes['total'])}"


_SIZE = 64


def probe_backend(backend: Backend) -> list[dict[str, Any]]:
    """Probe each capability with a capture; an exception counts as a failure."""
    able = backend.capabilities
    usable = [name for name in policies() if able.piecewise or not compiles(name)]
    probes = [(name, True, functools.partial(_policy, backend, name)) for name in usable]
    for name, run in _PROBES.items():
        probes.append((name, getattr(able, name), functools.partial(run, backend)))
    return [_probe(*probe) for probe in probes]


class _AnswerIsNo(Exception):
    """The negative result of a probe; the text is the actual behavior."""


def _probe(name: str, declared: bool, run: Callable[[], str]) -> dict[str, Any]:
    works = False
    try:
        detail, works = run(), True
    except _AnswerIsNo as answer:
        detail = str(answer)
    except Exception as error:
        logger.info("probe %s", name, exc_info=True)
        text = str(error).strip().splitlines() or [""]
        detail = f"{type(error).__name__}: {text[0]}"
    verdict = ("works" if declared else "works, not declared") if works else "no"
    ok = works or not declared
    found = {"name": name, "declared": declared, "works": works, "detail": detail}
    return {**found, "ok": ok, "verdict": verdict if ok else "FAILS"}


def _tensors(backend: Backend) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(8, _SIZE, generator=generator).to(backend.device)
    weight = torch.randn(_SIZE, _SIZE, generator=generator).to(backend.device)
    return x, weight


def _require_equal(captured: Captured, host_args: list[dict[str, float]] | None = None) -> None:
    report = captured.prove(cases=2, host_args=host_args)
    if not report.ok:
        raise _AnswerIsNo(str(report.failures[0]))


def _policy(backend: Backend, policy: str) -> str:
    x, weight = _tensors(backend)

    @no_graph()
    def halve(value: torch.Tensor) -> torch.Tensor:
        return value * 0.5

    def step(value: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(value @ weight)
        if breaks(policy):
            hidden = halve(hidden)
        return hidden + value

    with capture(step, x, policy=policy, backend=backend) as captured:
        _require_equal(captured)
        replay = seconds_per_call(captured.replay, backend, calls=20)
        return (
            f"{counted(len(captured.segments), 'segment')}, capture "
            f"{time_text(captured.capture_seconds)}, replay {time_text(replay.wall)}"
        )


def _region_update(backend: Backend) -> str:
    x, _ = _tensors(backend)

    @region(host_args=("factor",), mutates=("out",))
    def scale(value: torch.Tensor, out: torch.Tensor, *, factor: float) -> None:
        torch.mul(value, factor, out=out)

    def step(value: torch.Tensor, *, factor: float) -> torch.Tensor:
        out = torch.empty_like(value)
        scale(value, out, factor=factor)
        return out + 1

    with capture(step, x, backend=backend, host_args={"factor": 2.0}) as captured:
        try:
            captured.replay(factor=3.0)
        except UpdateUnsupportedError:
            raise _AnswerIsNo(
                "new host arguments are refused; the policy breakable accepts them"
            ) from None
        _require_equal(captured, [{"factor": 2.0}, {"factor": 5.0}])
        return "new host arguments change the next replay"


def _rng(backend: Backend) -> str:
    x, _ = _tensors(backend)

    def step(value: torch.Tensor) -> torch.Tensor:
        return value + torch.rand_like(value)

    with capture(step, x, backend=backend) as captured:
        first = captured.replay().clone()
        if torch.equal(first, captured.replay()):
            raise _AnswerIsNo("every replay draws the same numbers")
        _require_equal(captured)
        return "replays draw the same numbers as eager runs"


def _host_read(backend: Backend) -> str:
    x, weight = _tensors(backend)

    def step(value: torch.Tensor) -> torch.Tensor:
        return value @ weight * value[0, 0].item()

    try:
        captured = capture(step, x, backend=backend, warmup=0)
    except Exception as error:
        named = isinstance(error, HostReadError)
        _policy(backend, "full")  # Later captures must work.
        return "refused, with the source line" if named else "refused by the driver"
    captured.close()
    raise _AnswerIsNo("a host read inside a capture freezes its value")


_PROBES = {"region_update": _region_update, "rng": _rng, "refuses_host_reads": _host_read}
