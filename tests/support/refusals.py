"""Lines that no capture can record, with what their refusal says."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

__all__ = ["READS", "SHAPES", "UNSUPPORTED", "X", "branch"]

X = torch.arange(1.0, 5.0)

INDEX = torch.tensor(1)

MASK = torch.tensor([True, False, True, True])


def branch(x: torch.Tensor) -> torch.Tensor:
    if x.sum() > 0:
        return x
    return -x


# name: (function, what the message must say)
READS: dict[str, tuple[Callable[[torch.Tensor], Any], str]] = {
    "item": (lambda x: x.sum().item(), r"\.item\(\)"),
    "float": (lambda x: float(x.sum()), r"float\(\) of a tensor"),
    "int": (lambda x: int(INDEX + 1), r"int\(\) of a tensor"),
    "bool": (branch, r"bool\(\) of a tensor"),
    "index": (lambda x: x[: INDEX + 1], "index"),
    "scalar index": (lambda x: x[INDEX], "indexing with a scalar tensor"),
    "range": (lambda x: list(range(INDEX + 1)), "index or length"),
    "contains": (lambda x: 1.0 in x, "'in' on a tensor"),
    "max of tensors": (lambda x: max(x[0] * 1, x[1] * 1), r"bool\(\)"),
    "tolist": (lambda x: (x * 2).tolist(), r"\.tolist\(\)"),
    "numpy": (lambda x: x.detach().numpy(), r"\.numpy\(\)"),
    "asarray": (lambda x: memoryview(x.detach().__array__()), "numpy"),
    "cpu": (lambda x: x.cpu(), r"\.cpu\(\)"),
    "print": (lambda x: str(x), r"print\(\)"),
    "repr": (lambda x: repr(x[0]), r"repr\(\)"),
    "format": (lambda x: f"{x[0]:.3f}", "formatting"),
    "equal": (lambda x: torch.equal(x, x), r"torch\.equal"),
    "allclose": (lambda x: torch.allclose(x, x), r"torch\.allclose"),
    "deepcopy": (lambda x: copy.deepcopy(x), "deepcopy"),
    "save": (lambda x: torch.save(x * 2, io.BytesIO()), r"torch\.save\(\) or pickling"),
    "pickle": (lambda x: pickle.dumps([x * 2]), r"torch\.save\(\) or pickling"),
    "apply_": (lambda x: (x * 2).apply_(lambda value: value + 1), r"\.apply_\(\)"),
    "map_": (lambda x: (x * 2).map_(x, lambda left, right: left + right), r"\.map_\(\)"),
    "to cpu": (lambda x: (x * 2).to("cpu"), r"\.to\('cpu'\)"),
    "to cpu by name": (lambda x: x.to(device="cpu", dtype=torch.float64), r"\.to\('cpu'\)"),
    "tensor_split": (lambda x: torch.tensor_split(x, INDEX.view(1)), "tensor_split"),
    "tensor_split of the step": (lambda x: x.tensor_split(INDEX.view(1) + 1), "tensor_split"),
    "dlpack": (lambda x: x.__dlpack__(), "DLPack"),
    "tensor of tensors": (lambda x: torch.tensor([x[0], x[1]]), "list of tensors"),
    "as_tensor of tensors": (lambda x: torch.as_tensor([[x[0]], [x[1]]]), "list of tensors"),
    "is_nonzero": (lambda x: torch.is_nonzero(x[0]), "is_nonzero"),
    "one hot without classes": (lambda x: F.one_hot(INDEX.view(1)), "one_hot"),
    "tensor bound": (lambda x: x.narrow(0, INDEX, 2), "narrow"),
}

SHAPES: dict[str, tuple[Callable[[torch.Tensor], Any], str]] = {
    "nonzero": (lambda x: x.nonzero(), "nonzero"),
    "where": (lambda x: torch.where(x > 2), "nonzero"),
    "argwhere": (lambda x: torch.argwhere(x), "nonzero"),
    "masked_select": (lambda x: x.masked_select(MASK), "masked_select"),
    "mask index": (lambda x: x[MASK], "boolean mask"),
    "mask assignment": (lambda x: (x * 1).__setitem__(MASK, x[1:]), "boolean mask"),
    "unique": (lambda x: torch.unique(x), "unique"),
    "unique_consecutive": (lambda x: torch.unique_consecutive(x), "unique_consecutive"),
    "repeat_interleave": (lambda x: x.repeat_interleave(INDEX.view(1)), "repeat_interleave"),
    "bincount": (lambda x: torch.bincount(INDEX.view(1)), "bincount"),
}

UNSUPPORTED: dict[str, tuple[Callable[[torch.Tensor], Any], str]] = {
    "resize": (lambda x: x.resize_(9), "resize"),
    "resizing out": (lambda x: torch.add(x, 1, out=SHORT), "resize"),
    "sparse result": (lambda x: x.to_sparse(), "sparse"),
    "sparse argument": (lambda x: SPARSE + 1, "sparse"),
}

SHORT = torch.empty(2)

SPARSE = torch.eye(3).to_sparse()
