"""Write the tables of the docs from the outputs of ``device.py``.

    python benchmarks/tables.py OUT [--docs docs]

Each row has a result of devgraph, the result of a peer, and the median, minimum and maximum of
their ratio over all processes. The table of benchmark NAME goes between these two lines of a page:

    <!-- figures NAME -->
    <!-- end of figures -->

Rows of other devices and of other versions of torch are kept.
"""

from __future__ import annotations

import argparse
import collections
import json
import re
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs

BEGIN, END = "<!-- figures {} -->", "<!-- end of figures -->"
HEAD = ("", "measured", "peer", "ratio", "min", "max", "processes", "measured on")
ALIGN = ("---", *["---:"] * 6, "---")
DECODES = (1, 8, 64, 256)


@attrs.frozen
class Pair:
    """Results of devgraph and of a peer for the same work, in the same or separate processes."""

    what: str
    unit: str
    measured: float
    """Result of devgraph, unless ``what`` names another contender."""
    peer: float
    against: str


@attrs.frozen
class Machine:
    """Device, torch version and commit of a measurement."""

    device: str
    torch: str
    commit: str

    @property
    def name(self) -> str:
        """Device and torch version; new rows replace old rows with the same name."""
        short = re.sub(r"^NVIDIA (\S+).*", r"\1", self.device)
        return f"{short}, torch {self.torch}"


Rows = Iterable[Pair]


def foundation(report: Any) -> Rows:
    hand = "torch.cuda.graph"
    if replay := report.get("replay"):
        yield Pair("a replay, host", "us", replay["devgraph"], replay["native"], hand)
    if run := report.get("runner"):
        what = "`DecodeRunner.run` with six inputs, host"
        yield Pair(what, "us", run["run"], run["native"], "a replay")
    if cost := report.get("capture"):
        what = f"capturing {cost['buckets']} decode buckets"
        yield Pair(what, "s", cost["seconds"], cost["hand_seconds"], hand)
        yield Pair("memory of those captures", "MiB", cost["mib"], cost["hand_mib"], hand)


def generate(reports: Any) -> Rows:
    for report in reports:
        work = f"{report['model'].split(',')[0]}, batch {report['batch']}"
        runs = {name: run for name, run in report["runs"].items() if "failed" not in run}
        for peer in ("eager", "dynamic", "static", "unfused"):
            if {"graphs", peer} <= runs.keys():
                ours, theirs = (runs[name]["decode_tokens_per_s"] for name in ("graphs", peer))
                against = peer if peer in ("eager", "unfused") else f"transformers, {peer} cache"
                yield Pair(work, "tokens/s", ours, theirs, against)


def update(report: Any) -> Rows:
    for size, found in report.items():
        real = found["real"]
        for policy in ("full+update", "breakable"):
            for what in ("host", "wall") if "meta" in real else ():
                ours, theirs = (real[name][f"{what}_us"] for name in (policy, "meta"))
                against = "breakable-cuda-graphs"
                yield Pair(f"{size}, `{policy}`, {what}", "us", ours, theirs, against)
        first = found["first"]
        what = f"{size}, first use of a length"
        yield Pair(what, "ms", first["new_ms"], first["eager_ms"], "eager")


def piecewise(report: Any) -> Rows:
    for tokens, found in sorted(report.get("prefill", {}).items(), key=lambda item: int(item[0])):
        for peer in ("breakable", "eager"):
            ours, theirs = (found[name]["wall_ms"] for name in ("piecewise+inductor", peer))
            yield Pair(f"prefill of {tokens} tokens, wall", "ms", ours, theirs, f"`{peer}`")
    names = [f"capture {name}" for name in ("piecewise+inductor", "breakable")]
    if all(name in report for name in names):
        ours, theirs = (report[name]["again_seconds"] for name in names)
        yield Pair("capturing again after `invalidate`", "s", ours, theirs, "`breakable`")
    for name, found in report.items():
        if name.startswith("fixed, "):
            ours, theirs = (found[n]["wall_ms"] for n in ("piecewise", "reduce-overhead"))
            yield Pair(f"512 tokens, {name[7:]}, wall", "ms", ours, theirs, "reduce-overhead")


def gates(rows: Any) -> Rows:
    variants = {"waits": "waits", "both": "waits and signals", "both_during": "opened late"}
    breaks = {"loads": "gates instead of breaks", "sends": "gates instead of breaks, cache sent"}
    for row in rows:
        work = f"{row['shape']}, {row['tokens']} tokens"
        if row["kind"] == "overlap" and "layerwise" in row:
            both = row["step"] + row["transfer"]
            steps = "each of several steps" if row["variant"] == "sequence" else "a step"
            what = f"{work}, {steps} with a transfer layer by layer"
            yield Pair(what, "us", row["layerwise"], both, "one after the other")
        elif "with" in row:
            cost = row["kind"] == "cost"
            what = (variants if cost else breaks)[row["variant"]]
            against = "the graph without" if cost else "`breakable`, host waits"
            yield Pair(f"{work}, {what}", "us", row["with"], row["without"], against)


def economy(report: Any) -> Rows:
    if memory := measured(report, "memory", "budget", "by hand"):
        ours, theirs = memory
        graphs = f"{ours['graphs']} graphs, {ours['used']} of them launched"
        yield Pair(f"{graphs}, with a budget", "MiB", ours["mib"], theirs["mib"], "by hand")
        if steady := ours.get("steady"):
            times = (steady[f"{name}_wall_us"] for name in ("budgeted", "unbudgeted"))
            yield Pair("a replay under a budget, wall", "us", *times, "without")
    for model, plan in report.get("plan", {}).items():
        for phase, found in plan.items() if isinstance(plan, dict) else ():
            what = f"{model}, {phase}, estimate by `plan`"
            yield Pair(what, "MiB", found["planned_mib"], found["taken_mib"], "memory taken")
    if start := measured(report, "start", "warmup 0", "warmup 1"):
        times = (found["first"]["seconds"] for found in start)
        yield Pair('66 buckets in a cold process, `"warmup": 0`', "s", *times, '`"warmup": 1`')
    if first := measured(report, "first", "background", "eager"):
        times = (found["first_token_s"] for found in first)
        yield Pair("first token, captures in the background", "s", *times, "without graphs")
    if isinstance(sleep := report.get("sleep"), dict):
        left = sleep["held_mib"] * (1 - sleep["share_0"])
        yield Pair("graph memory left during sleep", "MiB", left, sleep["held_mib"], "awake")


def measured(report: Any, name: str, *ways: str) -> list[Any]:
    """Return the results of all ``ways``, or an empty list if one of them failed."""
    found = [report.get(name, {}).get(way) for way in ways]
    return found if all(isinstance(one, dict) for one in found) else []


def pace(results: Any) -> Rows:
    by_kind = {one["kind"]: one["us"] for one in results if "kind" in one}
    for kind, times in by_kind.items():
        what, against = f"a replay after {kind}", "a process without devgraph"
        for ours, theirs in zip(times, by_kind["torch"], strict=True) if kind != "torch" else ():
            yield Pair(what, "us", ours, theirs, against)
    for one in results:
        if "act" in one:
            before, *_, after = one["us"]
            what = f"a replay after {len(one['us']) - 1} x {one['act']}"
            yield Pair(f"{what}, recovered", "us", one["recovered"], before, "before")
            yield Pair(f"{what}, not recovered", "us", after, before, "before")


def graphed(report: Any) -> Rows:
    for shape, row in report["shapes"].items():
        for peer in ("eager", "raw", "copies", "torch", "tensordict"):
            if all("us" in row.get(name, {}) for name in ("graphed", peer)):
                names = {"raw": "a raw graph", "copies": "a raw graph with copies"}
                against = names.get(peer, peer)
                yield Pair(shape, "us", row["graphed"]["us"], row[peer]["us"], against)


def handoff(found: Any) -> Rows:
    way = f"{', '.join(found['backends'])}{', direct' if found.get('direct') else ''}"
    alone = "the step alone"
    yield Pair(f"{way}: `admit`", "ms", found["admit_ms"], found["copy_ms"], "a copy of its bytes")
    what = f"{way}: a decode step while handoffs arrive"
    yield Pair(what, "ms", found["step_beside_ms"], found["step_ms"], alone)


def tensor_parallel(report: Any) -> Rows:
    ranks, decode, prefill = (report[name] for name in ("ranks", "decode", "prefill"))
    if "by_hand" in decode:
        what = f"{ranks} ranks, decode, host"
        yield Pair(what, "us", decode["devgraph"], decode["by_hand"], "torch.cuda.graph")
    if "native" in prefill:
        what = f"{ranks} ranks, prefill of {prefill['segments']} segments, host"
        yield Pair(what, "us", prefill["devgraph"], prefill["native"], "a bare loop")
    step = report.get("step", {})
    if step:
        what = f"{ranks} ranks, a decode step, wall"
        yield Pair(what, "us", step["graph"], step["eager"], "eager")
    for name, time in step.items():
        if name.startswith("graph, "):
            what = f"{ranks} ranks, a decode step with a {name[7:]}, wall"
            yield Pair(what, "us", time, step["graph"], "without a vote")
    vote = report.get("vote", {})
    if vote:
        yield Pair(f"{ranks} ranks, `agree`", "us", vote["shared memory"], vote["gloo"], "gloo")


def votes(rows: Any) -> Rows:
    for row in rows:
        what = f"{row['ranks']} ranks, a vote through shared memory"
        yield Pair(what, "us", row["shared_us"], row["gloo_us"], "gloo")


def encoder(report: Any) -> Rows:
    eager: dict[str, float] = {}
    for row in report["rows"]:
        work, _, way = row["name"].partition(": ")
        if way == "eager":
            eager[work] = row["wall"]
        elif work in eager:
            yield Pair(f"{work}, `{way}`", "ms", row["wall"] * 1e3, eager[work] * 1e3, "eager")


def same_number(jobs: Iterable[str], ours: str, theirs: str) -> Iterator[tuple[str, str]]:
    """Yield pairs of jobs of two kinds with the same number, such as ``KIND#2``, ``OTHER#2``."""
    for job in jobs:
        kind, mark, number = job.partition("#")
        if kind == ours:
            yield job, f"{theirs}{mark}{number}"


def vllm(results: Any) -> Rows:
    for runner in ("v2", "v1"):
        for ours, theirs in same_number(results, f"{runner}:devgraph", f"{runner}:default"):
            pair = [results[name] for name in (ours, theirs) if name in results]
            if len(pair) < 2 or any("capture_s" not in one for one in pair):
                continue
            own, label, taken = "vLLM's own layer", runner.upper(), "device_ms"
            if (ranks := pair[0].get("ranks", 1)) > 1:
                label, taken = f"{label}, {ranks} ranks", "least_device_ms"
            for batch in map(str, DECODES):
                if all(taken in one["decode"].get(batch, {}) for one in pair):
                    times = (one["decode"][batch][taken] for one in pair)
                    what = f"{label}, a forward of {batch} on the device"
                    yield Pair(what, "ms", *times, own)
            for label_of, key, unit in (
                ("first captures", "capture_s", "s"),
                ("graph memory", "graph_gib", "GiB"),
            ):
                yield Pair(f"{label}, {label_of}", unit, *(one[key] for one in pair), own)
            for work in pair[0]["prefill"]:
                if work in pair[1]["prefill"]:
                    times = (one["prefill"][work]["ms"] for one in pair)
                    yield Pair(f"{label}, prefill of {work}", "ms", *times, own)


def vllm_pace(results: Any) -> Rows:
    layers = {"default": "vLLM's own layer", "devgraph": "devgraph"}
    for job, found in results.items():
        layer, times = layers.get(job.partition(":")[2].partition("#")[0]), found.get("pace")
        if layer and times:
            for name, what in (
                ("slowed", "after launches on four streams"),
                ("recovered", "then recovered"),
            ):
                measured, before = times[f"{name}_ms"], times["as_it_is_ms"]
                yield Pair(f"{layer}, a forward of 8 {what}", "ms", measured, before, "as it is")


def sglang(report: Any) -> Rows:
    jobs, ranks = report["jobs"], report.get("ranks", 1)
    for mode in ("default", "full"):
        label = f"{mode}, {ranks} ranks" if ranks > 1 else mode
        for ours, theirs in same_number(jobs, f"devgraph:{mode}", f"own:{mode}"):
            if theirs not in jobs:
                continue
            pair, own = (jobs[ours], jobs[theirs]), "SGLang's own layer"
            for call in pair[0]:
                kind, _, size = call.partition(" ")
                if kind in ("decode", "prefill") and call in pair[1]:
                    work = f"{label}, {kind} of {size.replace(' ', 'x')}"
                    yield Pair(work, "ms", *(min(one[call]) for one in pair), own)
            for what, key, unit in (
                ("captures", "capture_s", "s"),
                ("graph memory", "graph_gib", "GiB"),
                ("graph memory after each graph ran", "graph_gib_after", "GiB"),
            ):
                yield Pair(f"{label}, {what}", unit, *(one[key] for one in pair), own)


READERS: dict[str, Callable[[Any], Rows]] = {
    reader.__name__: reader
    for reader in (
        *(foundation, generate, update, piecewise, gates, economy, pace, graphed, handoff),
        *(tensor_parallel, votes, encoder, vllm, vllm_pace, sglang),
    )
}
FILES = {"handoff": ("handoff", "handoff_direct"), "vllm_pace": ("vllm",)}
"""Steps with the results of a table, if the table does not have the name of its step."""


def number(value: float) -> str:
    """Format a number with three significant digits, or with all digits before the point."""
    digits = 2 - len(str(int(abs(value)))) + (abs(value) >= 1)
    return f"{value:,.{max(0, digits if abs(value) >= 1 else 3)}f}"


def lines_of(pairs: Iterable[Pair], machine: Machine) -> Iterator[tuple[str, ...]]:
    """Yield the cells of a row for each work and peer."""
    rows: dict[tuple[str, str], list[Pair]] = collections.defaultdict(list)
    for pair in pairs:
        rows[pair.what, pair.against].append(pair)
    for (what, against), members in rows.items():
        ours = statistics.median(one.measured for one in members)
        peer = statistics.median(one.peer for one in members)
        ratios = sorted(one.measured / one.peer for one in members if one.peer)
        unit = members[0].unit
        shown = [f"{ratio:.3f}" for ratio in (statistics.median(ratios), ratios[0], ratios[-1])]
        yield (
            what,
            f"{number(ours)} {unit}",
            f"{number(peer)} {unit}, {against}",
            *shown,
            str(len(members)),
            f"{machine.name}, {machine.commit}",
        )


def cells_of(line: str) -> tuple[str, ...]:
    return tuple(cell.strip() for cell in line.strip().strip("|").split("|"))


def key_of(cells: Sequence[str]) -> tuple[str, str, str]:
    """Return the work, the peer and the machine of a row, without the commit."""
    return cells[0], cells[2].partition(", ")[2], cells[-1].rpartition(", ")[0]


def merged(old: Iterable[Sequence[str]], new: Iterable[Sequence[str]]) -> list[Sequence[str]]:
    """Merge rows: new rows replace old rows with the same key; rows of one work are adjacent."""
    rows = {key_of(cells): cells for cells in (*old, *new)}
    order = {key[:2]: place for place, key in reversed([*enumerate(rows)])}
    return [rows[key] for key in sorted(rows, key=lambda key: (order[key[:2]], key[2]))]


def written(text: str, name: str, new: Iterable[Sequence[str]]) -> str:
    """Return the text of a page with the new rows merged into its table ``name``, if it exists."""
    begin = BEGIN.format(name)
    before, mark, rest = text.partition(f"{begin}\n")
    if not mark:
        return text
    inside, mark, after = rest.partition(END)
    if not mark:
        raise ValueError(f"{begin!r} has no {END!r} after it")
    old = [cells_of(line) for line in inside.splitlines() if line.startswith("|")][2:]
    table = [f"| {' | '.join(cells)} |" for cells in (HEAD, ALIGN, *merged(old, new))]
    return "\n".join([f"{before}{begin}", "", *table, "", f"{END}{after}"])


def reports_of(out: Path, name: str) -> Iterator[Any]:
    """Yield the outputs of all processes of a benchmark."""
    for step in FILES.get(name, (name,)):
        paths = (*out.glob(f"{step}.json"), *out.glob(f"{step}-*.json"))
        for path in sorted(paths, key=lambda path: (len(path.name), path.name)):
            yield json.loads(path.read_text(encoding="utf-8"))


def write(out: Path, docs: Path) -> list[str]:
    """Write the tables of all results in ``out``; return the names of the changed pages."""
    machine = Machine(**json.loads((out / "machine.json").read_text(encoding="utf-8")))
    tables = {
        name: [*lines_of((pair for one in reports_of(out, name) for pair in read(one)), machine)]
        for name, read in READERS.items()
    }
    changed = []
    for page in sorted(docs.glob("*.md")):
        text = page.read_text(encoding="utf-8")
        new = text
        for name, rows in tables.items():
            new = written(new, name, rows) if rows else new
        if new != text:
            page.write_text(new, encoding="utf-8")
            changed.append(page.name)
    return changed


def main() -> int:
    """Write the tables and print the names of the changed pages."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, help="output folder of device.py")
    parser.add_argument("--docs", type=Path, default=Path(__file__).parents[1] / "docs")
    args = parser.parse_args()
    print("changed:", *(write(args.out, args.docs) or ["nothing"]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
