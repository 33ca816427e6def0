"""What is moved first when not all can be moved in time; pure.

Recomputing a sequence costs its linear layers once for every token, and attention once for every
pair of tokens, so what is saved per byte rises with the length: a prefix of p tokens saves
`p + p² / (2 c)` where c is the context at which attention costs as much as the rest. Moving the
longest sequences whole, and of the next one the prefix that still fits, saves most: any other
choice of as many tokens is majorised by this one, and the function is convex.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec


class Candidate(msgspec.Struct, frozen=True):
    """A sequence whose full blocks could be moved."""

    seq_id: str
    blocks: int
    """Full ones, in the order of their positions."""
    bytes_per_block: Mapping[str, int]
    """By source: what that source sends for each block; sources that send nothing are left out."""


class Scheduled(msgspec.Struct, frozen=True):
    """The first `blocks` blocks of a sequence are to be moved."""

    seq_id: str
    blocks: int


def deadline_schedule(
    candidates: Sequence[Candidate],
    budgets: Mapping[str, int],
    block_tokens: int,
    attention_context: float = 8192.0,
) -> tuple[Scheduled, ...]:
    """What to move within the bytes that each source can send in time, best first.

    Sources without a budget are not bounded. `attention_context` is the c above, in tokens. With
    one source, or where every sequence's blocks cost the same, no other choice saves more.
    """
    left = dict(budgets)
    chosen: list[Scheduled] = []

    def rank(one: Candidate) -> tuple[float, int, str]:
        """Tokens of recompute saved for the share of the tightest source's budget, most first."""
        saved = saved_tokens(one.blocks * block_tokens, attention_context)
        share = _share(one, budgets)
        return (-saved / share if share > 0 else float("-inf"), -one.blocks, one.seq_id)

    for one in sorted(candidates, key=rank):
        blocks = _fitting(one, left)
        if blocks <= 0:
            continue
        for source, nbytes in one.bytes_per_block.items():
            if source in left:
                left[source] -= blocks * nbytes
        chosen.append(Scheduled(one.seq_id, blocks))
    return tuple(chosen)


def _share(one: Candidate, budgets: Mapping[str, int]) -> float:
    """Of the budget of the source that has least for it, what the whole sequence takes."""
    shares = (
        nbytes * one.blocks / max(budgets[source], 1)
        for source, nbytes in one.bytes_per_block.items()
        if source in budgets
    )
    return max(shares, default=0.0)


def _fitting(one: Candidate, left: Mapping[str, int]) -> int:
    """How many of its blocks every source can still send."""
    fits = (
        left[source] // nbytes
        for source, nbytes in one.bytes_per_block.items()
        if source in left and nbytes > 0
    )
    return min((one.blocks, *fits))


def saved_tokens(tokens: int, attention_context: float) -> float:
    """Recompute that a prefix of so many tokens saves, in tokens of a short prompt."""
    return tokens + tokens * tokens / (2 * attention_context)


def source_budgets(
    sources: Sequence[str], rate_bytes_per_s: float, seconds: float, reserved: Mapping[str, int]
) -> dict[str, int]:
    """Bytes that each source can send before the deadline, beside what is `reserved` (weights)."""
    whole = int(max(rate_bytes_per_s * seconds, 0.0))
    return {source: max(whole - reserved.get(source, 0), 0) for source in sources}
