"""Runs stages in one process as a pipeline would, with a schedule made to be awkward."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import torch

from flexslurm.engine.arena import Arena
from flexslurm.engine.batch import Batch
from flexslurm.engine.sampling import sample
from flexslurm.engine.stage import LoadedStage, StagePlan, build_stage
from flexslurm.messages import Chunk, ChunkSampling, SamplingParams

GREEDY = SamplingParams()


@dataclass
class Line:
    """One sequence under way."""

    name: str
    prompt: tuple[int, ...]
    wanted: int
    blocks: tuple[int, ...]
    params: SamplingParams = GREEDY
    answer: list[int] = field(default_factory=list)
    stored: int = 0
    """Tokens whose keys and values are in the pages."""

    @property
    def tokens(self) -> tuple[int, ...]:
        return (*self.prompt, *self.answer)

    @property
    def done(self) -> bool:
        return len(self.answer) >= self.wanted


def lines_of(
    prompts: Sequence[Sequence[int]], wanted: int, block_tokens: int, blocks: int, seed: int = 0,
    params: SamplingParams = GREEDY,
) -> list[Line]:  # fmt: skip
    """Sequences with scattered, disjoint block tables."""
    free = list(range(blocks))
    random.Random(seed).shuffle(free)
    lines = []
    for number, prompt in enumerate(prompts):
        count = -(-(len(prompt) + wanted) // block_tokens)
        own, free = tuple(free[:count]), free[count:]
        assert len(own) == count, "the test gives too few blocks"
        lines.append(Line(f"s{number}", tuple(prompt), wanted, own, params))
    return lines


def chunk_of(line: Line, most: int) -> Chunk:
    """The next chunk of at most `most` tokens; it samples when it reaches the last token."""
    new = line.tokens[line.stored : line.stored + most]
    whole = line.stored + len(new) == len(line.tokens)
    sampling = ChunkSampling(
        params=line.params,
        position=len(line.answer),
        prompt=line.prompt if line.params.needs_history else (),
        output=tuple(line.answer) if line.params.needs_history else (),
    )
    chunk = Chunk(
        seq_id=line.name, tokens=new, start=line.stored, blocks=line.blocks,
        sample=sampling if whole else None,
    )  # fmt: skip
    line.stored += len(new)
    return chunk


def step(stages: Sequence[LoadedStage], chunks: Sequence[Chunk]) -> dict[str, int]:
    """One micro-batch through the whole pipeline; the tokens by sequence."""
    batch = Batch.from_chunks(chunks, stages[0].plan.block_tokens)
    hidden: torch.Tensor | None = None
    for stage in stages:
        hidden = stage.forward(batch, hidden)
    assert hidden is not None
    assert hidden.shape[0] == len(batch.sampled)
    found = sample(hidden, [s for _, s in batch.sampled])
    return {name: token for (name, _), (token, _) in zip(batch.sampled, found, strict=True)}


def run(
    stages: Sequence[LoadedStage], lines: Sequence[Line], *, seed: int = 0, most_chunk: int = 7
) -> list[list[int]]:
    """Run all lines to their end: they enter one by one, in chunks of random size, in any order."""
    draw = random.Random(seed)
    waiting, running = list(lines), []
    for _ in range(10_000):
        if waiting and (not running or draw.random() < 0.7):
            running.append(waiting.pop(0))
        running = [line for line in running if not line.done]
        if not running and not waiting:
            return [line.answer for line in lines]
        chosen = [line for line in running if draw.random() < 0.8] or running[:1]
        draw.shuffle(chosen)
        by_name = {line.name: line for line in chosen}
        chunks = [chunk_of(line, draw.randint(1, most_chunk)) for line in chosen]
        for name, token in step(stages, chunks).items():
            by_name[name].answer.append(token)
    raise AssertionError("the run does not end")


def pipeline(
    path: Path, cuts: Sequence[int], arena: Arena, *, dtype: str = "float64", block_tokens: int = 4,
    kv_blocks: int = 64,
) -> list[LoadedStage]:  # fmt: skip
    """Stages of one rank each, cut at these layers: `[0, 2, 6]` gives two."""
    return [
        build_stage(
            StagePlan(
                model=str(path), epoch=number, lo=lo, hi=hi, tp=1, tp_rank=0, dtype=dtype,
                block_tokens=block_tokens, kv_blocks=kv_blocks,
            ),
            arena,
        )
        for number, (lo, hi) in enumerate(pairwise(cuts))
    ]  # fmt: skip


def reference(path: Path, prompts: Sequence[Sequence[int]], wanted: int) -> list[list[int]]:
    """What transformers' generate answers greedily, each prompt alone."""
    from transformers import AutoModelForCausalLM

    from flexslurm.engine.tiny import quiet_progress

    with quiet_progress():
        model = AutoModelForCausalLM.from_pretrained(path, dtype="auto").eval()
    answers = []
    for prompt in prompts:
        ids = torch.tensor([list(prompt)])
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=wanted,
            min_new_tokens=wanted, do_sample=False, pad_token_id=0,
        )  # fmt: skip
        answers.append(out[0, len(prompt) :].tolist())
    return answers


def prompts_of(vocab: int, lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(vocab) for _ in range(length)] for length in lengths]
