"""Clusters of several vendors: one mode string, resolved per group."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest

from devgraph.api.config.cluster import Cluster, GroupPlan, plan_cluster
from devgraph.api.config.model import DeviceGraphConfig
from devgraph.api.errors import ConfigError, ConfigTypeError

DISAGGREGATED: dict[str, Any] = {
    "groups": [
        {
            "name": "prefill",
            "backend": "rocm",
            "count": 16,
            "role": "prefill",
            "tensor_parallel": 8,
        },
        {
            "name": "decode",
            "backend": "cuda",
            "count": 8,
            "role": "decode",
            "facts": {"lora": True},
        },
    ]
}
MODE = '{"decode": "full", "prefill": "breakable", "backends": {"rocm": {"prefill": "full"}}}'


def plan(mode: str, document: dict[str, Any]) -> tuple[GroupPlan, ...]:
    """Plan with every warning an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return plan_cluster(DeviceGraphConfig.from_json(mode), Cluster.from_dict(document))


def group(**values: Any) -> dict[str, Any]:
    return {"groups": [{"name": "g", **values}]}


def test_policy_that_the_backend_recommends_is_logged_with_its_group(
    caplog: pytest.LogCaptureFixture,
) -> None:
    plan("{}", group(backend="npu"))
    assert "group g: prefill.policy" in caplog.text


def test_one_mode_string_serves_prefill_on_one_vendor_and_decode_on_another() -> None:
    found = plan(MODE, DISAGGREGATED)
    there = {
        one.group.name: (
            one.group.backend,
            one.resolution.effective.decode.policy,
            one.resolution.effective.prefill.policy,
        )
        for one in found
    }
    assert there == {
        "prefill": ("rocm", "disabled", "full"),
        "decode": ("cuda", "full", "disabled"),
    }
    assert found[0].group.facts.collectives
    assert not found[1].group.facts.collectives


@pytest.mark.parametrize("suffix", [".json", ".yaml"])
def test_cluster_is_read_from_json_and_yaml(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"cluster{suffix}"
    text = (
        "groups:\n"
        "  - {name: prefill, backend: rocm, count: 16, role: prefill, tensor_parallel: 8}\n"
        "  - {name: decode, backend: cuda, count: 8, role: decode, facts: {lora: true}}\n"
    )
    path.write_text(json.dumps(DISAGGREGATED) if suffix == ".json" else text)
    assert Cluster.from_file(path) == Cluster.from_dict(DISAGGREGATED)
    config = DeviceGraphConfig.from_json(MODE)
    planned = plan_cluster(config, Cluster.from_file(path))
    assert plan_cluster(config, path) == plan_cluster(config, str(path)) == planned
    assert plan_cluster(config, DISAGGREGATED) == planned


def test_group_has_devices_of_one_vendor_whose_collectives_they_share() -> None:
    """FAULTS 31."""
    members = [{"backend": "cuda", "count": 2}, {"backend": "npu", "count": 2}]
    for mixed in ({"members": members}, {"backend": ["cuda", "npu"], "tensor_parallel": 4}):
        with pytest.raises(ConfigError, match=r"groups\[0\]"):
            plan("{}", group(**mixed))


def test_conflicts_are_listed_for_every_group() -> None:
    document = {
        "groups": [
            {"name": "a", "backend": "cuda", "facts": {"weight_offload": True}},
            {"name": "b", "backend": "npu", "facts": {"attention": "never"}},
        ]
    }
    document["groups"].append({"name": "c", "backend": "cpu"})
    first, second, third = plan('{"decode": "full"}', document)
    assert "[weight-offload]" in str(first.error)
    assert "[attention-decode]" in str(second.error)
    with pytest.raises(ConfigError, match="weight-offload"):
        _ = first.resolution
    assert first.to_dict()["error"] == str(first.error)
    assert third.error is None
    assert third.resolution.effective.decode.policy == "full"


@pytest.mark.parametrize(("name", "near"), [("ascend", "npu"), ("nvidia", "cuda")])
def test_a_backend_that_is_not_registered_is_the_error_of_its_group(name: str, near: str) -> None:
    other = {"name": "b", "backend": "cpu"}
    first, second = plan(MODE, {"groups": [*group(backend=name)["groups"], other]})
    assert f"there is no backend '{name}'" in str(first.error)
    assert f"Did you mean '{near}'?" in str(first.error)
    assert second.error is None and second.resolution.effective.decode.policy == "full"


def test_plan_as_data_names_groups_backends_and_rules() -> None:
    first = json.loads(json.dumps(plan(MODE, DISAGGREGATED)[0].to_dict()))
    assert (first["group"], first["backend"], first["count"], first["role"]) == (
        "prefill",
        "rocm",
        16,
        "prefill",
    )
    assert first["effective"]["prefill"]["policy"] == "full"
    assert {one["rule"] for one in first["rules"]} == {"role-prefill", "full-prefill"}


@pytest.mark.parametrize(
    ("document", "kind", "part"),
    [
        ([], ConfigTypeError, "expected an object"),
        (None, ConfigTypeError, r"expected an object, got an empty value \(null\)"),
        ({}, ConfigTypeError, "the key 'groups' is missing"),
        ({"groups": None}, ConfigTypeError, "non-empty list of groups, got an empty value"),
        ({"groups": []}, ConfigTypeError, "groups: expected a non-empty list"),
        ({"group": []}, ConfigError, "Did you mean 'groups'"),
        (group(), ConfigTypeError, r"groups\[0\]: the key 'backend' is missing"),
        (group(backend=None), ConfigTypeError, r"groups\[0\].backend: .* got an empty value"),
        (
            group(backend="cuda", tensor_parallel=8),
            ConfigError,
            "1 device cannot be divided into sets of 8; add count: 8 to the group",
        ),
        (group(backend="cuda", rle="both"), ConfigError, r"groups\[0\].*Did you mean 'role'"),
        (group(backend="cuda", tp=2), ConfigError, "Did you mean 'tensor_parallel'"),
        (group(backend="cuda", role="decod"), ConfigError, "Did you mean 'decode'"),
        (group(backend="cuda", count=0), ConfigError, r"groups\[0\].count: expected at least 1"),
        (group(backend="cuda", count=True), ConfigTypeError, "count: expected an integer"),
        (
            group(backend="cuda", count=6, tensor_parallel=4),
            ConfigError,
            "6 devices cannot be divided",
        ),
        (group(backend="cuda", collectives="yes"), ConfigTypeError, "collectives"),
        (group(backend="cuda", facts={"loar": True}), ConfigError, "Did you mean 'lora'"),
        (group(backend="cuda", facts={"role": "both"}), ConfigError, "in the group itself"),
        (group(backend="cuda", vendor="nvidia"), ConfigError, r"groups\[0\].*no key 'vendor'"),
        (group(backend=""), ConfigTypeError, r"groups\[0\].backend: .* got an empty string"),
        (
            {"groups": [{"name": "a", "backend": "cpu"}] * 2},
            ConfigError,
            "groups: two groups are named 'a'",
        ),
        (
            {"groups": [{"name": "a\nexport X=1", "backend": "cpu"}]},
            ConfigError,
            r"groups\[0\].name: 'a\\nexport X=1' contains a line break",
        ),
        ({"groups": [{"backend": "x"}]}, ConfigTypeError, r"groups\[0\]: the key 'name'"),
    ],
)
def test_bad_cluster_files_are_refused_with_the_path(
    document: Any, kind: type[Exception], part: str
) -> None:
    with pytest.raises(kind, match=part):
        Cluster.from_dict(document, source="cluster.yaml")
