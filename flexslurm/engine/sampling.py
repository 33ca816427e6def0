"""From logits to tokens; never keeps state between steps and never draws from a global generator.

Order: log probabilities are taken from the model's own distribution, before anything is changed
(as vLLM and OpenAI report them). Then bias, suppressed tokens, repetition, presence and frequency
penalties; then greedy, or temperature, top-k, top-p, min-p (transformers' order and tie rules) and
a draw. The draw inverts the cumulative distribution in token order at one uniform number that
depends on `(seed, position)` only, so a sequence gets the same token alone, in any batch, and after
a move.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch

from flexslurm.engine.drawing import COLDEST, draw
from flexslurm.engine.philox import uniform
from flexslurm.messages import ChunkSampling, TokenLogprobs

Sampled = tuple[int, TokenLogprobs | None]


def sample(logits: torch.Tensor, samplings: Sequence[ChunkSampling]) -> list[Sampled]:
    """Choose one token per row of `logits` `[S, vocab]`; `samplings` in the order of the rows.

    `logits` is left as it is.
    """
    assert logits.shape[0] == len(samplings)
    if not samplings:
        return []
    with torch.inference_mode():
        changed = _adjusted(logits, samplings)
        tokens = _choose(changed, samplings)
        return [
            (token, _logprobs(logits[row], token, s.params.logprobs))
            for row, (token, s) in enumerate(zip(tokens, samplings, strict=True))
        ]


def _choose(logits: torch.Tensor, samplings: Sequence[ChunkSampling]) -> list[int]:
    tokens: list[int] = logits.argmax(dim=-1).tolist()
    rows = [row for row, s in enumerate(samplings) if s.params.temperature >= COLDEST]
    if rows:
        own = [samplings[row] for row in rows]
        numbers = [uniform(s.params.seed, s.position) for s in own]
        drawn = draw(logits[rows], [s.params for s in own], numbers)
        for row, token in zip(rows, drawn, strict=True):
            tokens[row] = token
    return tokens


# ------------------------------------------------------------------- changes to the logits


def _adjusted(logits: torch.Tensor, samplings: Sequence[ChunkSampling]) -> torch.Tensor:
    """The logits with bias, suppression and penalties; the same tensor where nothing asks."""
    touched = [row for row, s in enumerate(samplings) if _asks(s)]
    if not touched:
        return logits
    changed = logits.clone()
    for row in touched:
        _adjust_row(changed[row], samplings[row])
    return changed


def _asks(sampling: ChunkSampling) -> bool:
    params = sampling.params
    return bool(params.logit_bias or sampling.suppress or params.needs_history)


def _adjust_row(row: torch.Tensor, sampling: ChunkSampling) -> None:
    """Change one row in place; tokens outside the vocabulary are ignored."""
    params, vocab = sampling.params, row.shape[0]
    if params.needs_history:
        _penalise(row, sampling)
    if params.logit_bias:
        bias = {token: b for token, b in params.logit_bias.items() if 0 <= token < vocab}
        row.index_add_(0, _ids(bias, row), row.new_tensor(list(bias.values())))
    suppressed = [token for token in sampling.suppress if 0 <= token < vocab]
    if suppressed:
        row[_ids(suppressed, row)] = float("-inf")


def _penalise(row: torch.Tensor, sampling: ChunkSampling) -> None:
    """Repetition over prompt and answer; presence and frequency over the answer alone.

    Repetition divides a positive logit and multiplies a negative one (transformers' rule); the
    other two subtract, once per token and once per occurrence (OpenAI's rule).
    """
    params, vocab = sampling.params, row.shape[0]
    output = Counter(token for token in sampling.output if 0 <= token < vocab)
    if params.repetition_penalty != 1.0:
        seen = set(output) | {token for token in sampling.prompt if 0 <= token < vocab}
        if seen:
            at = _ids(sorted(seen), row)
            old, penalty = row[at], params.repetition_penalty
            row[at] = torch.where(old < 0, old * penalty, old / penalty)
    if output and (params.presence_penalty or params.frequency_penalty):
        at = _ids(output, row)
        counts = row.new_tensor(list(output.values()))
        row[at] -= params.presence_penalty + params.frequency_penalty * counts


def _ids(
    tokens: Sequence[int] | dict[int, float] | Counter[int], like: torch.Tensor
) -> torch.Tensor:
    return torch.tensor(list(tokens), dtype=torch.int64).to(like.device)


# ------------------------------------------------------------------- reporting


def _logprobs(row: torch.Tensor, token: int, count: int) -> TokenLogprobs | None:
    """Log probabilities of the unchanged distribution: the chosen token's and the best `count`."""
    if count < 0:
        return None
    wide = row.to(torch.promote_types(row.dtype, torch.float32)).log_softmax(dim=-1)
    own = float(wide[token])
    if count == 0:
        return TokenLogprobs(own)
    values, tokens = wide.topk(min(count, wide.shape[0]))
    return TokenLogprobs(own, tuple(zip(tokens.tolist(), values.tolist(), strict=True)))
