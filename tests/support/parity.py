"""Comparing greedy tokens of two devices, where rounding may decide between equals only."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import attrs
import torch

__all__ = ["Tie", "explained_differences"]

Generate = Callable[[Sequence[list[int]], int], list[list[int]]]
"""Prompts and a number of tokens to the greedy tokens that follow each prompt."""


@attrs.frozen
class Tie:
    """A token where two devices may differ: both have nearly the reference's best logits."""

    prompt: int
    at: int
    want: int
    got: int
    gap: float


def explained_differences(
    prompts: Sequence[list[int]],
    want: Sequence[list[int]],
    generate: Generate,
    logits_after: Callable[[list[int]], torch.Tensor],
    *,
    margin: float,
) -> list[Tie]:
    """Return where ``generate`` differs from ``want``; fail unless each place is a tie.

    After a tie it goes on from the reference's own tokens, so that every token is compared.

    Args:
        want: the reference's tokens after each prompt.
        generate: what is compared.
        logits_after: the reference's logits ``[vocabulary]`` after some tokens.
        margin: how far below the best logit those of a tie may be.
    """
    ties = []
    for index, (whole, first) in enumerate(zip(want, generate(prompts, len(want[0])), strict=True)):
        done, got = 0, first
        while (at := _first_difference(whole[done:], got)) is not None:
            place = done + at
            prefix = [*prompts[index], *whole[:place]]
            logits, pair = logits_after(prefix).float(), [whole[place], got[at]]
            gap = float(logits.max() - logits[pair].min())
            assert gap <= margin, (
                f"prompt {index} differs at its token {place}: {got[at]} instead of "
                f"{whole[place]}; the reference's logit of one of them is {gap} below its best"
            )
            ties.append(Tie(index, place, whole[place], got[at], gap))
            done = place + 1
            if done == len(whole):
                break
            (got,) = generate([[*prefix, whole[place]]], len(whole) - done)
    return ties


def _first_difference(want: Sequence[int], got: Sequence[int]) -> int | None:
    assert len(want) == len(got), f"{len(got)} tokens where the reference has {len(want)}"
    return next(
        (i for i, pair in enumerate(zip(want, got, strict=True)) if pair[0] != pair[1]), None
    )
