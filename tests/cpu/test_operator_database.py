"""Every operator of torch's own database: equal to eager, or refused for a reason in a table."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

from devgraph.api.errors import CaptureError
from tests.support.cpu_capture import record, same, tensors

pytest.importorskip("expecttest", reason="torch's operator database imports it")
invocations: Any = importlib.import_module("torch.testing._internal.common_methods_invocations")
op_db = invocations.op_db
# A step must not seed a generator; this test seeds before each run.
invocations.wrapper_set_seed = lambda op, *args, **kwargs: op(*args, **kwargs)

pytestmark = pytest.mark.slow

SAMPLES = 2
"""Sample inputs of each operator that are run."""

UNWRITTEN = {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty"}
UNWRITTEN |= {"new_empty_strided"}
"""Operators whose results hold whatever the memory held."""

UNSAMPLED = {
    "nn.functional.batch_norm.without_cudnn",
    "torch.ops.aten._efficient_attention_forward",
    "torch.ops.aten._flash_attention_forward",
}
"""Operators that torch has samples of for a GPU only."""

REFUSED: dict[str, str] = {
    "reads device data on the host": """
        allclose corrcoef cov equal istft item narrow nn.functional.gaussian_nll_loss
        nn.functional.one_hot tensor_split
    """,
    "whose shape depends on device data": """
        argwhere bincount combinations index_fill index_put linalg.lstsq linalg.lstsq.grad_oriented
        masked_fill masked_select nn.functional.ctc_loss nonzero prod unique unique_consecutive
    """,
    "boolean mask": """

    """,
    "would resize a tensor": """
        resize_
    """,
    "sparse_csr tensor": """
        sparse.mm.reduce sparse.sampled_addmm
    """,
    "sparse_coo tensor": """
        to_sparse
    """,
    "changes the layout of an argument": """
        as_strided as_strided.partial_views nn.functional.dropout3d squeeze squeeze.multiple t
        transpose unsqueeze
    """,
}
"""Operators of which a sample is refused, by a part of the message."""

ROUNDED = set("linalg.svdvals linalg.eigvalsh linalg.cond norm.nuc ormqr".split())
"""Operators that torch computes on another path under any dispatch mode: it asks for the mode, and
then computes singular vectors too, or an equal gradient in another layout."""

RESIZED = {"addbmm"}
"""Operators whose form in place resizes an argument that is too small, which a replay does not."""


def _dtype_of(op: Any) -> torch.dtype:
    kinds = op.supported_dtypes("cpu")
    order = (torch.float32, torch.float64, torch.complex64, torch.int64, torch.bool)
    return next((kind for kind in order if kind in kinds), next(iter(kinds)))


def _copied(tree: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    def copy(tensor: torch.Tensor) -> torch.Tensor:
        return change(tensor.detach()).requires_grad_(tensor.requires_grad)

    return pytree.tree_map_only(torch.Tensor, copy, tree)


def _samples(op: Any, *, requires_grad: bool) -> Iterator[tuple[Any, ...]]:
    torch.manual_seed(0)
    inputs = op.sample_inputs("cpu", _dtype_of(op), requires_grad=requires_grad)
    for sample, _ in zip(inputs, range(SAMPLES), strict=False):
        yield sample.input, sample.args, sample.kwargs


def _zeros_like(tensor: torch.Tensor) -> torch.Tensor:
    """Return zeros, or a copy of a sparse tensor, which is state of a step and no argument."""
    return torch.zeros_like(tensor) if tensor.layout is torch.strided else tensor.clone()


def _outcome(fn: Callable[..., Any], sample: Any) -> str:
    """Record ``fn`` on zeros, replay it on the sample, and return how it compares with eager.

    Returns "equal", "close", "wrong", or the text of the refusal.

    Returns "" where eager execution refuses the sample.
    """
    torch.manual_seed(1)
    mine = _copied(sample, torch.clone)
    try:
        expected = [out.detach() for out in tensors(fn(*mine))]
    except Exception:
        return ""
    bound = _copied(sample, _zeros_like)
    try:
        tape, outputs = record(lambda: fn(*bound))
    except CaptureError as refusal:
        return str(refusal)
    with torch.no_grad():
        for target, source in zip(tensors(bound), tensors(sample), strict=True):
            if target.layout is torch.strided:
                target.copy_(source)
    torch.manual_seed(1)
    tape.replay()
    pairs = [*zip(tensors(outputs), expected, strict=True)]
    pairs += zip(tensors(bound), tensors(mine), strict=True)
    pairs = [(left, right) for left, right in pairs if right.layout is torch.strided]
    if all(same(left, right) for left, right in pairs):
        return "equal"
    sizes = all(left.shape == right.shape for left, right in pairs)
    return "close" if sizes and all(map(torch.allclose, *zip(*pairs, strict=True))) else "wrong"


def _forward(op: Any) -> Iterator[str]:
    for sample in _samples(op, requires_grad=False):
        yield _outcome(lambda x, args, kwargs: op(x, *args, **kwargs), sample)


def _in_place(op: Any) -> Iterator[str]:
    variant = op.get_inplace()
    for x, args, kwargs in _samples(op, requires_grad=False):
        if variant is not None and isinstance(x, torch.Tensor):
            call = lambda x, args, kwargs: variant(x, *args, **kwargs)  # noqa: E731
            yield _outcome(call, (x, args, kwargs))


def _gradients(op: Any) -> Iterator[str]:
    if not op.supports_autograd or _dtype_of(op) is not torch.float32:
        return

    def step(x: Any, args: Any, kwargs: Any) -> Any:
        outputs = [out for out in tensors(op(x, *args, **kwargs)) if out.requires_grad]
        inputs = [leaf for leaf in tensors((x, args, kwargs)) if leaf.requires_grad]
        grads = torch.autograd.grad([out.sum() for out in outputs], inputs, allow_unused=True)
        return [grad for grad in grads if grad is not None]

    for sample in _samples(op, requires_grad=True):
        yield _outcome(step, sample)


def _name(op: Any) -> str:
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else str(op.name)


OPERATORS = {
    _name(op): op for op in op_db if op.name not in UNWRITTEN and _name(op) not in UNSAMPLED
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("way", [_forward, _in_place, _gradients])
@pytest.mark.parametrize("name", OPERATORS)
def test_operator_equals_eager_or_is_refused_as_the_table_says(
    name: str, way: Callable[[Any], Iterator[str]]
) -> None:
    outcomes = [outcome for outcome in way(OPERATORS[name]) if outcome]
    assert "wrong" not in outcomes or (name in RESIZED and way is _in_place)
    assert "close" not in outcomes or name in ROUNDED
    reasons = [reason for reason, names in REFUSED.items() if name in names.split()]
    for refusal in set(outcomes) - {"equal", "close", "wrong"}:
        assert any(reason in refusal for reason in reasons), refusal
