"""Draws a token per row of logits: temperature, top-k, top-p, min-p, one number; keeps no state.

Everything is computed per row and decided by values, never by the order in which a sort happens to
leave equal ones, so neither the batch nor the device changes which tokens are kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from flexslurm.messages import SamplingParams

COLDEST = 1e-5
"""Below this temperature a draw is the best token, to all digits there are."""

# Rows with filters are first judged by their best few tokens; only where those do not settle what
# is kept, more are sorted, and at last the whole row.
_CANDIDATES: tuple[int, ...] = (512, 8192)
# Rows are taken in slices of about this many logits, to bound the memory it takes.
_SLICE_ELEMENTS = 1 << 23


@dataclass(frozen=True, slots=True)
class Candidates:
    """What may be drawn: tokens `[R, M]` in rising order, and their weights `[R, M]` (float64).

    A weight is relative to the row's best token (1.0); 0.0 is filtered out.
    """

    tokens: torch.Tensor
    weights: torch.Tensor


def draw(
    logits: torch.Tensor, params: Sequence[SamplingParams], numbers: Sequence[float]
) -> list[int]:
    """Draw one token per row of `logits` `[R, vocab]`; `numbers` in [0, 1), one per row.

    The distribution is inverted in the order of token ids: the token chosen is the first at which
    the sum of weights passes the number's share of the whole.
    """
    tokens = [0] * len(params)
    step = max(_SLICE_ELEMENTS // logits.shape[1], 1)
    plain = [row for row, p in enumerate(params) if not _filters(p)]
    for first in range(0, len(plain), step):
        rows = plain[first : first + step]
        weights = _weights(logits[rows], [params[row] for row in rows])
        for row, token in zip(rows, _invert(weights, [numbers[r] for r in rows]), strict=True):
            tokens[row] = token
    narrow = [row for row, p in enumerate(params) if _filters(p)]
    for first in range(0, len(narrow), step):
        rows = narrow[first : first + step]
        for kept, own in filtered(logits[rows], [params[row] for row in rows]):
            there = [rows[i] for i in own]
            places = _invert(kept.weights, [numbers[row] for row in there])
            at = torch.tensor(places).to(kept.tokens.device)[:, None]
            for row, token in zip(there, kept.tokens.gather(1, at)[:, 0].tolist(), strict=True):
                tokens[row] = token
    return tokens


def _filters(params: SamplingParams) -> bool:
    return params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0


def filtered(
    logits: torch.Tensor, params: Sequence[SamplingParams]
) -> list[tuple[Candidates, list[int]]]:
    """What each row may draw from, in groups of rows (each with its row numbers)."""
    groups: list[tuple[Candidates, list[int]]] = []
    left, vocab = list(range(len(params))), logits.shape[1]
    for count in (*(n for n in _CANDIDATES if 2 * n < vocab), vocab):
        kept, settled = _keep(logits[left], [params[row] for row in left], count)
        done = [i for i, yes in enumerate(settled) if yes]
        if done:
            own = Candidates(kept.tokens[done], kept.weights[done])
            groups.append((own, [left[i] for i in done]))
        left = [row for row, yes in zip(left, settled, strict=True) if not yes]
        if not left:
            break
    return groups


def _keep(
    logits: torch.Tensor, params: Sequence[SamplingParams], count: int
) -> tuple[Candidates, list[bool]]:
    """Judge the `count` best tokens of each row, and say whether that settles the row.

    In order: the k best; of those the fewest most likely that reach p together; of those what is at
    least min-p times as likely as the best. Tokens as likely as the last one kept are kept too.
    """
    values, tokens = logits.topk(count, dim=-1)
    k = _column([min(p.top_k, count) or count for p in params], logits).long()
    p = _column([p.top_p for p in params], logits)
    least = _column([p.min_p for p in params], logits)
    temperature = _column([p.temperature for p in params], logits)
    wide = values.double()
    weights = ((wide - wide[:, :1]) / temperature).exp()
    kth = weights.gather(1, k - 1)
    kept = torch.where(weights >= kth, weights, 0.0)
    by_k = kth > weights[:, -1:]

    counted = [0 < p.top_k < logits.shape[1] for p in params]
    by_count = _column(counted, logits).bool()
    mass = kept.sum(dim=-1, keepdim=True)
    if count < logits.shape[1] and not all(counted):
        mass = torch.where(by_count, mass, _mass(logits, params))
    better = _mass_of_better(kept)
    # 1.0 is off: sums are rounded, so `better` may reach the whole mass before the last token
    kept = torch.where((p >= 1.0) | (better < p * mass) | (kept == 1.0), kept, 0.0)
    kept = torch.where(kept >= least, kept, 0.0)

    by_p = (weights.cumsum(dim=-1)[:, -1:] >= p * mass) & (p < 1.0)
    settled = torch.where(by_count, by_k, by_p | (weights[:, -1:] < least))
    settled |= count == logits.shape[1]
    order = tokens.sort(dim=-1)
    return Candidates(order.values, kept.gather(1, order.indices)), settled[:, 0].tolist()


def _mass_of_better(weights: torch.Tensor) -> torch.Tensor:
    """For falling weights `[R, M]`: the sum of those strictly above each."""
    before = weights.cumsum(dim=-1) - weights
    first = torch.searchsorted(-weights, -weights)
    return before.gather(1, first.clamp(max=weights.shape[1] - 1))


def _mass(logits: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """The sum of each row's weights, `[R, 1]`."""
    return _weights(logits, params).sum(dim=-1, keepdim=True, dtype=torch.float64)


def _weights(logits: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """Unfiltered weights of whole rows, in float32 or the logits' own wider type."""
    scores = logits.to(torch.promote_types(logits.dtype, torch.float32))
    scores = scores - scores.amax(dim=-1, keepdim=True)
    scores /= _column([p.temperature for p in params], logits).to(scores.dtype)
    return scores.exp_()


def _invert(weights: torch.Tensor, numbers: Sequence[float]) -> list[int]:
    """The first place in each row at which the running sum passes the number's share of it."""
    ladder = weights.cumsum(dim=-1, dtype=torch.float64)
    at = _column(numbers, weights) * ladder[:, -1:]
    found = torch.searchsorted(ladder, at, right=True).clamp_(max=weights.shape[1] - 1)
    # A number a hair below 1 may round up to the whole sum, past the last token that has weight.
    good = weights.gather(1, found) > 0
    places: list[int] = torch.where(good, found, weights.argmax(-1, keepdim=True))[:, 0].tolist()
    return places


def _column(values: Sequence[float], like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64).to(like.device)[:, None]
