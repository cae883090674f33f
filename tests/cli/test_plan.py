"""``devgraph plan``: what a configuration comes to, on this machine and in a cluster."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import devgraph as dg
from devgraph.api.capabilities import Capabilities
from devgraph.api.config.facts import EngineFacts
from devgraph.api.config.phase import PhaseConfig
from devgraph.cli.plan import ModelSizes, estimate
from devgraph.cli.tables import ranges
from devgraph.runners import default_buckets
from tests.support.cli_programs import run_cli, run_json

SIZES = ModelSizes(layers=4, token_bytes=224, logit_bytes=200)


def _phases(data: Any) -> dict[str, Any]:
    return {one["phase"]: one for one in data["estimates"]}


def test_default_plan_has_the_default_policies_and_buckets(capsys: pytest.CaptureFixture[str]):
    data = run_json(capsys, "plan", "--backend", "cpu", "--max-requests", "48")
    phases = _phases(data)
    assert phases["decode"]["policy"] == "full"
    assert phases["prefill"]["policy"] == "breakable"
    assert phases["decode"]["buckets"] == list(default_buckets("decode", 48))
    assert phases["prefill"]["buckets"] == list(default_buckets("prefill", 8192))
    assert data["backend"] == "cpu"
    assert data["rules"] == []


def test_flags_reach_the_plan_and_its_mode_says_the_same(
    capsys: pytest.CaptureFixture[str],
):
    flags = ["--decode-device-graph-bs", "1", "4", "--prefill-disable-device-graph"]
    data = run_json(capsys, "plan", "--backend", "cpu", *flags, "--max-requests", "8")
    assert _phases(data)["decode"]["buckets"] == [1, 4]
    assert _phases(data)["prefill"] == {
        "phase": "prefill",
        "policy": "disabled",
        "buckets": [],
        "variants": 0,
        "graphs": 0,
        "streams": 0,
        "uncovered": "",
        "bytes": 0,
    }
    config = dg.DeviceGraphConfig.from_dict(data["mode"])
    assert config.decode.buckets == (1, 4)
    assert config.prefill.policy == "disabled"


def test_rule_that_fires_is_shown_with_requested_and_effective(
    capsys: pytest.CaptureFixture[str],
):
    result = run_cli(capsys, "plan", "--backend", "cpu", "--fact", "pipeline_parallel=2")
    assert result.code == 0
    rows = {line.split()[0]: line for line in result.out.splitlines() if line.strip()}
    assert "breakable (default)" in rows["requested"]
    assert "disabled" in rows["effective"]
    assert rows["graphs"].split()[-1] == rows["memory"].split()[-1] == "-"  # not 0, not 0 B
    assert "pipeline-parallel" in result.out and "pipeline-parallel" not in result.err


def test_choice_that_a_safety_rule_forbids_is_an_error(capsys: pytest.CaptureFixture[str]):
    result = run_cli(
        capsys, "plan", "--backend", "cpu", "--fact", "weight_offload=true",
        "--decode-device-graph-mode", "full",
    )  # fmt: skip
    assert result.code == 2
    assert "[weight-offload]" in result.err
    assert "decode.policy" in result.err


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--fact", "loras=true"], "Did you mean 'lora'?"),
        (["--fact", "lora"], "write NAME=VALUE"),
        (["--fact", "lora=true", "--fact", "lora=false"], "'lora' is given twice"),
        (["--fact", "backend=npu"], "write --backend npu"),
        (["--fact", "lora=" + "[" * 100_000], "lora: expected true or false"),
        (["--cluster", "nowhere.json"], "--backend is not allowed with --cluster"),
        (["--backend", "auto", "--cluster", ""], "cannot read the file ''"),
        (["--max-requests", "0"], "--max-requests: must be from 1 to"),
        (["--emit", "--json"], "prints the plan: choose one"),
        (["--decode-device-graph-bs", "999"], "above the capacity of 256"),
        (["--backend", "auto", "--cluster", "nowhere.json"], "nowhere.json"),
        (["--model", "nowhere/at/all"], "cannot read a model from 'nowhere/at/all'"),
    ],
)
def test_unusable_request_is_one_clear_error(
    argv: list[str], said: str, capsys: pytest.CaptureFixture[str]
):
    result = run_cli(capsys, "plan", "--backend", "cpu", *argv)
    assert result.code == 2
    assert said in result.err


def test_overlay_for_a_backend_that_is_not_registered_warns(capsys: pytest.CaptureFixture[str]):
    mode = json.dumps({"backends": {"cdua": {"decode": "disabled"}}})
    result = run_cli(capsys, "plan", "--backend", "cpu", "--device-graph-mode", mode)
    assert result.code == 0
    assert "no backend 'cdua' is registered on this node" in result.err
    assert "Did you mean 'cuda'?" in result.err


def test_cluster_is_planned_group_by_group(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "cluster.json"
    path.write_text(
        json.dumps(
            {
                "groups": [
                    {"name": "a", "backend": "npu", "count": 8, "role": "prefill"},
                    {"name": "b", "backend": "cpu", "count": 2, "role": "decode"},
                ]
            }
        ),
        encoding="utf-8",
    )
    mode = json.dumps({"backends": {"npu": {"prefill": "full"}}})
    argv = ["plan", "--cluster", path, "--device-graph-mode", mode]
    data = run_json(capsys, *argv)
    groups = {one["group"]: one for one in data["groups"]}
    policies = {
        name: {phase["phase"]: phase["policy"] for phase in group["estimates"]}
        for name, group in groups.items()
    }
    assert policies == {
        "a": {"decode": "disabled", "prefill": "full"},
        "b": {"decode": "full", "prefill": "disabled"},
    }
    text = run_cli(capsys, *argv).out
    assert "a: 8 x npu" in text
    assert "b: 2 x cpu" in text
    assert "role-prefill" in text


@pytest.fixture
def layers(tmp_path: Path) -> Path:
    """The configuration of a model of 30 layers, and a file of a cluster of two vendors."""
    (tmp_path / "cluster.json").write_text(
        json.dumps({"groups": [{"name": name, "backend": name} for name in ("npu", "cuda")]})
    )
    sizes = {"num_hidden_layers": 30, "hidden_size": 8, "num_attention_heads": 2}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **sizes}))
    pytest.importorskip("transformers", reason="reads a model's configuration")
    return tmp_path


def test_cluster_plan_says_of_a_backend_what_its_node_says(
    layers: Path, capsys: pytest.CaptureFixture[str]
):
    cluster = run_json(capsys, "plan", "--cluster", layers / "cluster.json", "--model", layers)[
        "groups"
    ]
    for group in cluster:
        node = run_json(capsys, "plan", "--backend", group["backend"], "--model", layers)
        assert group["estimates"] == node["estimates"]
        assert group["effective"] == node["effective"]
    streams = {
        group["backend"]: [one["streams"] for one in group["estimates"]] for group in cluster
    }
    assert streams == {"npu": [36, 58], "cuda": [None, None]}


def test_plan_says_where_streams_are_too_few_and_which_mode_is_recommended(
    layers: Path, capsys: pytest.CaptureFixture[str]
):
    argv = ["plan", "--cluster", layers / "cluster.json", "--model", layers]
    chosen = ["--device-graph-mode", '{"prefill": "breakable"}']
    result = run_cli(capsys, *argv, *chosen)
    assert result.code == 1
    error = "npu: 1 x npu: error: the graphs need at least 1,834 streams, and npu has 1,800"
    assert error in result.out
    mode = '{"backends": {"npu": {"prefill": "full"}}}'
    assert mode in result.out
    assert "'breakable' kept, 'full' is preferable" in result.err
    (npu, cuda) = run_json(capsys, *argv, *chosen, code=1)["groups"]
    assert "at least 1,834 streams" in npu["error"]
    assert cuda["error"] is None
    assert "at least 1," not in run_cli(capsys, *argv).out


def test_graphs_with_collectives_need_a_second_stream(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    path = tmp_path / "cluster.json"
    group = {"name": "a", "backend": "npu", "role": "prefill", "tensor_parallel": 2, "count": 2}
    path.write_text(json.dumps({"groups": [group]}))
    [planned] = run_json(capsys, "plan", "--cluster", path)["groups"]
    assert [(one["graphs"], one["streams"]) for one in planned["estimates"]] == [(0, 0), (58, 116)]
    assert planned["facts"]["role"] == "prefill" and planned["facts"]["backend"] == "npu"


def test_plan_marks_settings_that_have_no_effect(capsys: pytest.CaptureFixture[str]):
    decode = {"compiler": "inductor", "miss_budget": 3, "lazy_hits": 5}
    mode = {"decode": decode, "prefill": {"policy": "disabled", "strict": True}}
    out = run_cli(capsys, "plan", "--backend", "cpu", "--device-graph-mode", json.dumps(mode)).out
    keys = ("compiler", "lazy_hits", "miss_budget", "strict")
    rows = [line.split() for line in out.splitlines() if any(f" {key} " in line for key in keys)]
    assert [row[1] for row in rows] == [*keys]
    assert [row[-1] for row in rows] == ["(unused)", "(unused)", "3", "(unused)"]


def test_plan_of_this_machine_applies_the_variables_of_runners(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("DEVGRAPH_EMULATE", "1")
    monkeypatch.setenv("DEVGRAPH_VERIFY", "start")
    result = run_cli(capsys, "plan", "--backend", "cpu", "--json")
    assert "settings from DEVGRAPH_EMULATE and DEVGRAPH_VERIFY" in result.err
    plan = json.loads(result.out)
    assert {one["policy"] for one in plan["estimates"]} == {"emulated"}
    assert plan["effective"]["decode"]["verify"] == "start"
    report = run_json(capsys, "doctor", "--no-probe")
    assert report["variables"] == {"DEVGRAPH_EMULATE": "1", "DEVGRAPH_VERIFY": "start"}
    path = tmp_path / "cluster.json"
    path.write_text('{"groups": [{"name": "a", "backend": "cpu"}]}')
    result = run_cli(capsys, "plan", "--cluster", path, "--emit", "env")
    assert result.err == "" and "true" not in result.out and "start" not in result.out


def test_what_a_vendor_cannot_do_is_refused_where_it_is_not_installed(
    layers: Path, capsys: pytest.CaptureFixture[str]
):
    mode = '{"prefill": {"policy": "piecewise", "compiler": "inductor"}}'
    asked = ["--device-graph-mode", mode]
    cluster = run_cli(capsys, "plan", "--cluster", layers / "cluster.json", *asked)
    node = run_cli(capsys, "plan", "--backend", "npu", *asked)
    assert (cluster.code, node.code) == (1, 2)
    assert "[piecewise-compiler]" in node.err
    assert node.err.strip().removeprefix("devgraph: error: ") in " ".join(cluster.out.split())
    assert "\n- prefill.compiler" in cluster.out  # one line for each choice
    assert "npu: 1 x npu: cannot be planned: the engine cannot run" in cluster.out
    assert "cuda: 1 x cuda" in cluster.out


def test_listed_sizes_are_planned_exactly_and_what_they_leave_out_is_said(
    capsys: pytest.CaptureFixture[str],
):
    argv = ["plan", "--backend", "cpu", "--cuda-graph-bs", "1", "2", "4", "8"]
    assert _phases(run_json(capsys, *argv))["decode"]["buckets"] == [1, 2, 4, 8]
    said = "decode steps of 9 to 256 requests run eagerly: no bucket is at least"
    out = run_cli(capsys, *argv).out
    assert said in out and "other settings" not in out, "the table of phases has the buckets"


def test_encoder_is_planned_beside_the_phases(capsys: pytest.CaptureFixture[str]):
    asked = ("plan", "--backend", "cpu", "--encoder-budgets", "4096", "512")
    data = run_json(capsys, *asked, "--fact", "multimodal=slot")
    (encoder,) = (one for one in data["estimates"] if one["phase"] == "encoder")
    assert (encoder["policy"], encoder["buckets"], encoder["graphs"]) == ("full", [512, 4096], 2)
    assert encoder["uncovered"] == "1 to 255 and 513 to 2047 tokens"
    assert "encoder" in run_cli(capsys, *asked).out


def test_settings_without_effect_here_are_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("DEVGRAPH_MODE", '{"prefill": "disabled"}')
    flags = ["--decode-device-graph-max-bs", "512", "--device-graph-mode", "{}"]
    again = ["--device-graph-mode", '{"prefill": "full"}']
    said = run_cli(capsys, "plan", "--backend", "cpu", *flags, *again).err
    assert "overrides 'disabled' from DEVGRAPH_MODE" in said
    assert "devgraph: the mode includes settings from DEVGRAPH_MODE\n" in said
    assert "decode.max_bs=512 has no effect: the capacity of the runner is 256" in said
    assert "--device-graph-mode is given twice" in said


def test_no_word_of_a_table_is_broken_in_a_narrow_terminal(
    layers: Path, capsys: pytest.CaptureFixture[str]
):
    argv = ["plan", "--cluster", layers / "cluster.json", "--model", layers]
    wide = run_cli(capsys, *argv, columns=200).out
    for columns in (120, 80, 50):
        narrow = run_cli(capsys, *argv, columns=columns).out
        words = narrow.replace("─", "").replace(":", " ").split()
        assert set(words) <= set(wide.replace(":", " ").split())
        assert all(len(line) <= columns for line in narrow.splitlines())


@pytest.mark.parametrize("columns", [80, 100])
def test_lines_of_a_plan_keep_to_the_width(
    columns: int, layers: Path, capsys: pytest.CaptureFixture[str]
):
    mode = ["--device-graph-mode", '{"decode": "full", "prefill": {"align": 8}}']
    argv = ["plan", "--cluster", layers / "cluster.json", "--model", layers, *mode]
    out = run_cli(capsys, *argv, columns=columns).out
    assert out.count("\n") > 20
    assert all(len(line) <= columns for line in out.splitlines())


def test_variants_multiply_graphs_and_widths_multiply_rows():
    def of(phase: Any, *, shared: bool = True, **facts: Any) -> Any:
        return estimate(
            phase,
            PhaseConfig(policy="full", buckets=(1, 2)),
            capacity=2,
            sizes=SIZES,
            capabilities=Capabilities(shared_pool=shared, max_streams=100),
            facts=EngineFacts(**facts),
        )

    plain, lora = of("decode"), of("decode", lora=True)
    both = of("decode", lora=True, speculative_tokens=3)
    assert [(one.variants, one.graphs, one.streams) for one in (plain, lora, both)] == [
        (1, 2, 2),
        (2, 4, 4),
        (4, 8, 8),
    ]
    assert (lora.bytes, both.bytes) == (plain.bytes, 4 * plain.bytes)
    assert of("prefill", speculative_tokens=3).variants == 1
    alone = of("decode", shared=False)
    assert of("decode", shared=False, lora=True, speculative_tokens=3).bytes == 10 * alone.bytes


def test_default_sizes_are_no_reason_for_a_message(capsys: pytest.CaptureFixture[str]):
    assert "run eagerly" not in run_cli(capsys, "plan", "--backend", "cpu").out


def test_backends_without_hardware_say_so(capsys: pytest.CaptureFixture[str]):
    for name in ("npu", "rocm"):
        assert f"{name} never ran on hardware" in run_cli(capsys, "plan", "--backend", name).out
    assert "hardware" not in run_cli(capsys, "plan", "--backend", "cpu").out


def test_group_that_cannot_be_planned_leaves_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    path = tmp_path / "cluster.json"
    bad = {"name": "a", "backend": "npu", "facts": {"weight_offload": True}}
    path.write_text(json.dumps({"groups": [bad, {"name": "b", "backend": "cpu"}]}))
    argv = ["plan", "--cluster", path, "--decode-device-graph-mode", "full"]
    result = run_cli(capsys, *argv)
    assert result.code == 1
    assert "a: 1 x npu: cannot be planned: the engine cannot run" in result.out
    assert "[weight-offload]" in result.out
    assert "b: 1 x cpu" in result.out
    first, second = run_json(capsys, *argv, code=1)["groups"]
    assert "[weight-offload]" in first["error"]
    assert second["effective"]["decode"]["policy"] == "full"
    emitted = run_cli(capsys, *argv, "--emit")
    assert emitted.code == 1
    assert "# a: 1 x npu: cannot be planned" in emitted.out


def test_group_of_an_unknown_backend_leaves_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    path = tmp_path / "cluster.json"
    groups = [{"name": "a", "backend": "nvidia"}, {"name": "b", "backend": "cpu"}]
    path.write_text(json.dumps({"groups": groups}))
    result = run_cli(capsys, "plan", "--cluster", path)
    assert result.code == 1
    assert "a: 1 x nvidia: cannot be planned: backend: there is no backend" in result.out
    assert "Did you mean 'cuda'?" in " ".join(result.out.split())
    assert "b: 1 x cpu" in result.out and "registered as a function" not in result.out
    assert "add --model" not in run_cli(capsys, "plan", "--cluster", path, "--group", "a").out
    first, second = run_json(capsys, "plan", "--cluster", path, code=1)["groups"]
    assert "no backend 'nvidia'" in first["error"] and second["error"] is None
    emitted = run_cli(capsys, "plan", "--cluster", path, "--emit")
    assert emitted.code == 1 and "# a: 1 x nvidia: cannot be planned" in emitted.out
    assert "devgraph: a: 1 x nvidia: cannot be planned" in emitted.err


@pytest.mark.parametrize("form", ["flags", "env"])
def test_emitted_settings_make_the_planned_choices(
    form: str, layers: Path, capsys: pytest.CaptureFixture[str]
):
    argv = ["plan", "--cluster", layers / "cluster.json"]
    planned = {one["backend"]: one for one in run_json(capsys, *argv)["groups"]}
    for backend in planned:
        emitted = run_cli(capsys, *argv, "--emit", form, "--group", backend, columns=40)
        title, line = emitted.out.splitlines()
        assert title == f"# {backend}: 1 x {backend}"
        words = shlex.split(line)
        first = {"flags": "--device-graph-mode", "env": "export"}[form]
        assert words[0] == first
        config = dg.DeviceGraphConfig.from_json(words[1].removeprefix("DEVGRAPH_MODE="))
        assert config.to_dict(everything=True) == planned[backend]["effective"]


def test_variables_of_groups_with_different_modes_need_a_group(
    layers: Path, capsys: pytest.CaptureFixture[str]
):
    """``eval`` keeps the last line, and ignores exit codes and comments."""
    argv = ["plan", "--cluster", layers / "cluster.json", "--emit"]
    result = run_cli(capsys, *argv, "env")
    assert (result.code, result.out) == (2, "")
    assert "groups npu, cuda have different modes" in result.err and "add --group" in result.err
    assert len(run_cli(capsys, *argv, "flags").out.splitlines()) == 4


def test_plan_of_one_group(layers: Path, capsys: pytest.CaptureFixture[str]):
    argv = ["plan", "--cluster", layers / "cluster.json", "--emit", "env", "--group"]
    assert run_cli(capsys, *argv, "cuda").out.splitlines()[0::2] == ["# cuda: 1 x cuda"]
    result = run_cli(capsys, *argv, "cudo")
    assert (result.code, result.out) == (2, "") and "Did you mean 'cuda'?" in result.err
    assert "add --cluster FILE" in run_cli(capsys, "plan", "--group", "cuda").err


@pytest.mark.parametrize("form", ["flags", "env"])
@pytest.mark.parametrize(
    "node",
    [
        {"decode": "disabled", "prefill": "piecewise"},
        {"decode": {"max_bs": 4, "capture": "lazy", "lazy_hits": 9}, "prefill": {"buckets": [8]}},
        {"backends": {"cpu": {"decode": {"warmup": 7, "verify": "start"}, "prefill": "full"}}},
    ],
)
def test_emitted_settings_are_the_plan_whatever_the_node_has(
    form: str,
    node: dict[str, Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    """Every key is emitted, so that each overrides the settings in files of the node."""
    path = tmp_path / "cluster.json"
    path.write_text('{"groups": [{"name": "a", "backend": "cpu"}]}')
    plan = run_cli(capsys, "plan", "--cluster", path, "--json").out
    (tmp_path / "plan.json").write_text(plan)
    [_, line] = run_cli(capsys, "plan", "--cluster", path, "--emit", form).out.splitlines()
    words = shlex.split(line)
    (tmp_path / "pyproject.toml").write_text(f"[tool]\ndevgraph = {_toml(node)}\n")
    monkeypatch.chdir(tmp_path)
    if form == "env":
        name, _, value = words.pop().partition("=")
        monkeypatch.setenv(name, value)
        assert run_cli(capsys, "doctor", "--expect", "plan.json").out == "a: as planned\n"
        words = []
    here = run_cli(capsys, "plan", "--backend", "cpu", "--json", *words)
    assert json.loads(here.out)["effective"] == json.loads(plan)["groups"][0]["effective"]
    assert "has no effect" not in here.err


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {_toml(entry)}" for key, entry in value.items()) + "}"
    return json.dumps(value)


def test_emit_needs_a_cluster(capsys: pytest.CaptureFixture[str]):
    result = run_cli(capsys, "plan", "--backend", "cpu", "--emit")
    assert result.code == 2
    assert "add --cluster FILE" in result.err


def test_facts_beside_a_cluster_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "cluster.json"
    path.write_text('{"groups": [{"name": "a", "backend": "cpu"}]}', encoding="utf-8")
    result = run_cli(capsys, "plan", "--cluster", path, "--fact", "lora=true")
    assert result.code == 2
    assert "state facts per group" in result.err


def test_model_folder_gives_graphs_and_memory(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    transformers = pytest.importorskip("transformers", reason="reads a model's configuration")
    transformers.LlamaConfig(
        num_hidden_layers=4,
        hidden_size=8,
        intermediate_size=32,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=100,
    ).save_pretrained(tmp_path)
    argv = ["--backend", "cpu", "--model", tmp_path, "--max-requests", "4", "--max-tokens", "16"]
    phases = _phases(run_json(capsys, "plan", *argv))
    assert phases["decode"]["graphs"] == 3
    assert phases["prefill"]["graphs"] == 4 * 5
    # bfloat16; the MLP holds 2 * 8 + 3 * 32 numbers a token, a row of logits 100.
    assert phases["decode"]["bytes"] == 4 * 2 * (112 + 100)
    assert phases["prefill"]["bytes"] == 16 * 2 * 112
    assert "graphs and memory estimated" in run_cli(capsys, "plan", *argv).out


@pytest.mark.parametrize(
    ("sizes", "numbers"),
    [
        ({}, 64),  # the MLP: 2 * 8 and 3 * 16
        ({"intermediate_size": [4, 40]}, 136),
        ({"head_dim": [4, 16]}, 144),  # attention: 2 * 8 and 2 * (2 + 2) * 16
    ],
)
def test_largest_layer_counts_where_layers_differ(sizes: dict[str, Any], numbers: int):
    layer = {"hidden_size": 8, "intermediate_size": 16, "num_attention_heads": 2, "vocab_size": 9}
    text = SimpleNamespace(**{**layer, **sizes}, num_hidden_layers=2)
    if "head_dim" in sizes:
        text.per_layer_config = [SimpleNamespace(**layer, head_dim=n) for n in sizes["head_dim"]]
    config = SimpleNamespace(get_text_config=lambda decoder: text)
    assert ModelSizes.from_config(config, 2).token_bytes == 2 * numbers


def test_model_without_attention_is_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    pytest.importorskip("transformers", reason="reads a model's configuration")
    (tmp_path / "config.json").write_text('{"model_type": "mamba"}', encoding="utf-8")
    result = run_cli(capsys, "plan", "--backend", "cpu", "--model", tmp_path)
    assert result.code == 2
    assert "models of type mamba, whose configuration has no num_attention_heads" in result.err


def test_memory_is_the_sum_where_graphs_do_not_share_a_pool():
    config = PhaseConfig(policy="full", buckets=(1, 2))
    shared, apart = (
        estimate(
            "decode",
            config,
            capacity=2,
            sizes=SIZES,
            capabilities=Capabilities(shared_pool=shared),
        )
        for shared in (True, False)
    )
    assert shared.bytes == 2 * SIZES.token_bytes + 2 * SIZES.logit_bytes
    assert apart.bytes == 3 * (SIZES.token_bytes + SIZES.logit_bytes)


def test_streams_are_counted_where_graphs_hold_them():
    config = PhaseConfig(policy="breakable", buckets=(4, 8))
    scarce, plenty = (
        estimate(
            "prefill",
            config,
            capacity=8,
            sizes=SIZES,
            capabilities=Capabilities(max_streams=streams),
        )
        for streams in (100, None)
    )
    assert scarce.graphs == plenty.graphs == 2 * 5
    assert scarce.streams == 10
    assert plenty.streams is None


@pytest.mark.parametrize(
    ("sizes", "text"),
    [
        ([], ""),
        ([7], "7"),
        ([1, 2], "1 2"),
        ([1, 2, 3], "1 2 3"),
        ([1, 2, 4, 8, 12, 16], "1 2 4..16 by 4"),
        ([1, 2, 3, 4, 10], "1..4 by 1 10"),
        ([4, 8, 12, 16, 32, 48, 64, 80], "4..16 by 4 32..80 by 16"),
    ],
)
def test_buckets_are_shown_as_ranges(sizes: list[int], text: str):
    assert ranges(sizes) == text
