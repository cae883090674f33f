"""Stand-ins with fewer kernels: same results, only inside steps, and only where they are equal."""

# ruff: noqa: E402  (imports follow the skip where transformers is missing)

from __future__ import annotations

import copy
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", reason="the transformers integration")

from torch import nn
from torch.overrides import TorchFunctionMode

from devgraph.api.errors import CaptureError
from devgraph.api.marks import marks
from devgraph.integrations.transformers import fusion as fusion_module
from devgraph.integrations.transformers.fusion import Fusion, OperationTrace, replaced
from devgraph.integrations.transformers.probe import probe
from tests.support.transformers_models import FAMILIES, make_model, reference


def fusion_of(model: Any) -> Fusion:
    return Fusion(probe(model).trace)


def logits(model: Any, length: int = 9) -> torch.Tensor:
    ids = torch.randint(0, 200, (1, length), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        return model(input_ids=ids, use_cache=False).logits


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_results_are_equal_to_rounding(family: str) -> None:
    model = make_model(family)
    want = logits(model)
    fusion = fusion_of(model)
    with fusion.active():
        got = logits(model)
    torch.testing.assert_close(got, want, atol=2e-4, rtol=2e-4)
    torch.testing.assert_close(logits(model), want, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize(
    ("family", "counts"),
    [
        ("llama", {"projections": 10, "norms": 5, "rotary": 1}),
        ("qwen3", {"projections": 10, "norms": 9, "rotary": 1}),
        # Its norms scale by one plus the weight, which is another function.
        ("gemma3", {"projections": 20, "norms": 0, "rotary": 1}),
        ("gpt2", {"projections": 0, "norms": 0, "rotary": 0}),
        ("mixtral", {"projections": 6, "norms": 5, "rotary": 1}),
        ("opt", {"projections": 6, "norms": 0, "rotary": 0}),
        ("gpt_neox", {"projections": 0, "norms": 0, "rotary": 1}),
    ],
)
def test_what_is_replaced_in_each_family(family: str, counts: dict[str, int]) -> None:
    assert fusion_of(make_model(family)).counts == counts


def test_what_is_not_replaced_is_counted_with_its_reason() -> None:
    assert fusion_of(make_model("llama")).unfused == {}
    gemma = fusion_of(make_model("gemma3"))
    why = "Gemma3RMSNorm: it differs from the RMS norm of torch"
    assert gemma.unfused == {why: 25}


class Turned(nn.Module):
    """Calls the rotary function of its module in the way that a test says."""

    def __init__(self, *shapes: tuple[int, ...], **options: Any) -> None:
        super().__init__()
        self.shapes, self.options = shapes, options

    def forward(self, seed: int = 0) -> Any:
        generator = torch.Generator().manual_seed(seed)
        given = (torch.randn(shape, generator=generator) for shape in self.shapes)
        return apply_rotary_pos_emb(*given, **self.options)


def halves(q: Any, k: Any, cos: Any, sin: Any, unsqueeze_dim: int = 1) -> Any:
    home = transformers.models.gpt_neox.modeling_gpt_neox
    return home.apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim)


def pairs(q: Any, k: Any, cos: Any, sin: Any, unsqueeze_dim: int = 1) -> Any:
    """Turns neighbors, not halves."""
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return q * cos + q.roll(1, -1) * sin, k * cos + k.roll(1, -1) * sin


def picky(q: Any, k: Any, cos: Any, sin: Any, positions: Any = None) -> Any:
    return halves(q, k, cos, sin)


apply_rotary_pos_emb = halves

WHOLE = ((1, 4, 3, 8), (1, 2, 3, 8), (1, 3, 8), (1, 3, 8))
PARTIAL = ((1, 4, 3, 8), (1, 2, 3, 8), (1, 3, 2), (1, 3, 2))
ROWS = ((1, 3, 4, 8), (1, 3, 2, 8), (1, 3, 4), (1, 3, 4))


@pytest.mark.parametrize(
    ("function", "shapes", "options", "why"),
    [
        (halves, WHOLE, {}, None),
        (halves, PARTIAL, {}, None),
        (halves, ROWS, {"unsqueeze_dim": 2}, None),
        (pairs, WHOLE, {}, "computes another rotation"),
        (picky, WHOLE, {"positions": None}, "does not accept these arguments"),
        (lambda q, k, cos, sin: q, WHOLE, {}, "does not return query and key"),
    ],
    ids=["whole", "partial", "rows-first", "pairs", "other-argument", "one-result"],
)
def test_rotary_function_is_replaced_where_it_was_seen_to_be_equal(
    monkeypatch: pytest.MonkeyPatch, function: Any, shapes: Any, options: Any, why: str | None
) -> None:
    monkeypatch.setitem(globals(), "apply_rotary_pos_emb", function)
    model = Turned(*shapes, **options)
    trace = OperationTrace(model)
    with trace.recording():
        model()
    fusion = Fusion(trace)
    assert fusion.counts["rotary"] == (why is None)
    assert [why in reason for reason in fusion.unfused] == ([] if why is None else [True])
    want = model(seed=1)
    with fusion.active():
        assert (apply_rotary_pos_emb is function) == (why is not None)
        torch.testing.assert_close(model(seed=1), want)


def test_rotary_call_of_a_form_that_was_not_compared_runs_as_written() -> None:
    model = Turned(*WHOLE)
    trace = OperationTrace(model)
    with trace.recording():
        model()
    model.shapes = PARTIAL
    want = model()
    with Fusion(trace).active():
        got = model()
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_norm_with_another_argument_runs_as_written() -> None:
    class GatedRMSNorm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.eps = nn.Parameter(torch.ones(4)), 1e-6

        def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
            return x * gate

    norm = GatedRMSNorm()
    trace = OperationTrace(nn.ModuleList([norm]))
    with trace.recording():
        norm(torch.ones(2, 4), torch.ones(2, 4))
    fusion = Fusion(trace)
    assert fusion.counts["norms"] == 0
    assert list(fusion.unfused.values()) == [1]


def test_stand_ins_are_gone_outside_steps_also_after_an_error() -> None:
    model = make_model("llama")
    fusion = fusion_of(model)
    home = transformers.models.llama.modeling_llama
    original = home.apply_rotary_pos_emb
    with pytest.raises(RuntimeError, match="boom"), fusion.active():
        assert home.apply_rotary_pos_emb is not original
        assert "forward" in model.model.norm.__dict__
        raise RuntimeError("boom")
    assert home.apply_rotary_pos_emb is original
    assert not any("forward" in m.__dict__ for m in model.modules())


VIEWS = "view transpose permute split_with_sizes unsqueeze as_strided".split()
ATTRIBUTES = "__get__ stride storage_offset untyped_storage".split()


class Calls(TorchFunctionMode):
    """Counts the torch functions that Python code calls, views and attributes left out."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += getattr(func, "__name__", "") not in (*VIEWS, *ATTRIBUTES)
        return func(*args, **(kwargs or {}))


def test_fewer_operations_run_in_a_step() -> None:
    model = make_model("llama", num_hidden_layers=6)
    fusion = fusion_of(model)
    with Calls() as plain:
        logits(model)
    with fusion.active(), Calls() as fused:
        logits(model)
    assert fused.count < 0.6 * plain.count


def test_projections_store_nothing_twice_and_values_stay(tmp_path: Path) -> None:
    model = make_model("llama", attention_bias=True)
    want = {name: p.detach().clone() for name, p in model.named_parameters()}
    fusion_of(model).close()
    attention = model.model.layers[0].self_attn
    for kind in ("weight", "bias"):
        storages = {
            getattr(layer, kind).untyped_storage().data_ptr()
            for layer in (attention.q_proj, attention.k_proj, attention.v_proj)
        }
        assert len(storages) == 1
    model.save_pretrained(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    for held in (model, again, copy.deepcopy(model)):
        for name, parameter in held.named_parameters():
            assert torch.equal(parameter, want[name])


def test_second_use_of_a_model_shares_the_joined_weights() -> None:
    model = make_model("llama", attention_bias=True)
    first = fusion_of(model)
    addresses = [p.data_ptr() for p in model.parameters()]
    second = fusion_of(model)
    assert [p.data_ptr() for p in model.parameters()] == addresses
    want = logits(model)
    first.close()
    with second.active():
        torch.testing.assert_close(logits(model), want, atol=2e-4, rtol=2e-4)


def test_weights_overwritten_in_place_are_seen() -> None:
    model, other = make_model("llama"), make_model("llama", seed=5)
    fusion = fusion_of(model)
    model.load_state_dict(other.state_dict())
    with fusion.active():
        got = logits(model)
    torch.testing.assert_close(got, logits(other), atol=2e-4, rtol=2e-4)


def test_replaced_weights_are_joined_again_before_a_step() -> None:
    model, other = make_model("llama"), make_model("llama", seed=5)
    fusion = fusion_of(model)
    for layer, source in zip(model.model.layers, other.model.layers, strict=True):
        layer.self_attn.k_proj.weight = source.self_attn.k_proj.weight
        layer.mlp.up_proj.weight.data = source.mlp.up_proj.weight.data.clone()
    want = logits(model)
    with fusion.active():
        torch.testing.assert_close(logits(model), want, atol=2e-4, rtol=2e-4)


def test_replaced_weights_are_refused_inside_a_capture() -> None:
    model = make_model("llama")
    fusion = fusion_of(model)
    model.model.layers[1].mlp.gate_proj.weight.data = torch.ones(64, 48)
    with (
        marks.entered(marks.Scope()),
        pytest.raises(CaptureError, match="were replaced"),
        fusion.active(),
    ):
        pass


def test_layers_of_a_group_called_with_another_tensor_use_their_own_weights() -> None:
    model = make_model("llama")
    fusion = fusion_of(model)
    mlp = model.model.layers[0].mlp
    x, y = torch.randn(2, 1, 3, 48)
    with torch.no_grad():
        want = mlp.gate_proj(x), mlp.up_proj(y)
        with fusion.active():
            got = mlp.gate_proj(x), mlp.up_proj(y)
    torch.testing.assert_close(got, want)


def test_norm_that_scales_by_one_plus_weight_is_left_alone_whatever_its_weight() -> None:
    model = make_model("gemma3")
    with torch.no_grad():
        for module in model.modules():
            if type(module).__name__ == "Gemma3RMSNorm":
                nn.init.normal_(module.weight, 0.5)
    assert fusion_of(model).counts["norms"] == 0


def test_generate_of_transformers_is_untouched() -> None:
    model = make_model("llama")
    prompt = [1, 2, 3, 4]
    want = reference(model, prompt, 12)
    fusion_of(model)
    assert reference(model, prompt, 12) == want


@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (3, 1), (1, 1)])
@pytest.mark.parametrize("dim", [1, 2])
def test_heads_of_one_projection_are_joined_without_a_copy(
    tokens: int, heads: int, kv_heads: int, dim: int
) -> None:
    size = 8
    joined = torch.randn(1, tokens, (heads + 2 * kv_heads) * size)
    sizes = [heads * size, kv_heads * size, kv_heads * size]
    q, k, v = (part.view(1, tokens, -1, size).transpose(2, dim) for part in joined.split(sizes, -1))
    both = fusion_module._joined_heads(q, k, dim)
    assert both.data_ptr() == joined.data_ptr()
    assert torch.equal(both, torch.cat((q, k), dim))
    # Not side by side: a copy, and right all the same.
    for other in (v, torch.randn_like(k)):
        apart = fusion_module._joined_heads(q, other, dim)
        assert apart.data_ptr() != joined.data_ptr()
        assert torch.equal(apart, torch.cat((q, other), dim))


def test_projections_that_share_a_weight_with_others_are_left_alone() -> None:
    model = make_model("llama", num_hidden_layers=3)
    first, second, _ = model.model.layers
    second.self_attn.q_proj.weight = first.self_attn.q_proj.weight
    want = logits(model)
    fusion = fusion_of(model)
    assert fusion.counts["projections"] == 9
    for _ in range(2):
        with fusion.active():
            torch.testing.assert_close(logits(model), want, atol=2e-4, rtol=2e-4)
    assert second.self_attn.q_proj.weight is first.self_attn.q_proj.weight


def test_steps_of_two_models_in_two_threads_leave_the_rotary_function_as_it_was() -> None:
    home = sys.modules[type(make_model("llama")).__module__]
    original = home.apply_rotary_pos_emb
    fusions = [fusion_of(make_model("llama", seed=seed)) for seed in range(2)]
    order: list[str] = []
    began = threading.Event()

    def step() -> None:
        began.set()
        with fusions[1].active():
            order.append("second")

    other = threading.Thread(target=step)
    with fusions[0].active():
        other.start()
        assert began.wait(60)
        order.append("first")
    other.join()
    assert order == ["first", "second"]
    assert home.apply_rotary_pos_emb is original


def test_stand_ins_pass_the_checks_of_their_owner_and_leave_nothing() -> None:
    """Even where one is the property of a configuration that sets those of its parts."""
    config = transformers.Emu3TextConfig(pad_token_id=3)
    layer = nn.Linear(2, 2)
    before = dict(vars(config)), dict(vars(layer)), config._attn_implementation
    changes = [
        (config, "pad_token_id", None),
        (config, "_attn_implementation", "another"),
        (layer, "forward", len),
    ]
    with pytest.raises(ZeroDivisionError), replaced(changes):
        assert config.pad_token_id is None
        assert config._attn_implementation == "another"
        assert layer.forward is len
        raise ZeroDivisionError
    assert (dict(vars(config)), dict(vars(layer)), config._attn_implementation) == before
