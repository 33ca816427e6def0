"""Workers over real gloo: every split gives the whole model's tokens, and no loss spreads."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from engine_harness import Line, lines_of, prompts_of, reference

from flexslurm.engine.sampling import sample
from flexslurm.messages import (
    ChunkSampling,
    SamplingParams,
    StepFailed,
)
from tests.cluster.engine_world import BLOCK_TOKENS, KV_BLOCKS, Node, World, replica_of

SEEDED = SamplingParams(temperature=0.8, top_p=0.9, seed=11, repetition_penalty=1.1)
PROMPTS = prompts_of(240, (3, 11, 1, 7), seed=5)
WANTED = 9


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    node = Node(tmp_path_factory.mktemp("logs"))
    node.run(node.nursery.start())
    yield node
    node.close()


@pytest.fixture
def world(node: Node, tmp_path: Path) -> Iterator[World]:
    world = World(node, tmp_path)
    yield world
    world.close()
    for started in world.started:
        assert "still open" not in started.log.read_text()
        assert "Traceback" not in started.log.read_text()


@pytest.fixture(scope="module")
def greedy(tiny_model: Path) -> list[list[int]]:
    return reference(tiny_model, PROMPTS, WANTED)


@pytest.fixture(scope="module")
def seeded(tiny_model: Path) -> list[list[int]]:
    """The whole model by transformers, each sequence alone, a token at a time."""
    from transformers import AutoModelForCausalLM

    from flexslurm.engine.tiny import quiet_progress

    with quiet_progress():
        model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype="auto").eval()
    answers = []
    for prompt in PROMPTS:
        answer: list[int] = []
        for position in range(WANTED):
            with torch.inference_mode():
                logits = model(torch.tensor([[*prompt, *answer]])).logits[:, -1]
            sampling = ChunkSampling(
                params=SEEDED, position=position, prompt=tuple(prompt), output=tuple(answer)
            )
            answer.append(sample(logits, [sampling])[0][0])
        answers.append(answer)
    return answers


def lines(params: SamplingParams = SamplingParams(), seed: int = 0) -> list[Line]:  # noqa: B008
    return lines_of(PROMPTS, WANTED, BLOCK_TOKENS, KV_BLOCKS, seed, params)


SPLITS = {
    "1x1": ([6], [1]),
    "2x1": ([2, 4], [1, 1]),
    "3x1": ([1, 3, 2], [1, 1, 1]),
    "1x2": ([6], [2]),
    "1x3": ([6], [3]),
    "2x3": ([4, 2], [3, 3]),
    "2 then 1": ([3, 3], [2, 1]),
    "1 then 3": ([2, 4], [1, 3]),
    "2 then 3": ([3, 3], [2, 3]),
}


@pytest.mark.parametrize("split", SPLITS)
def test_a_split_gives_the_whole_model_s_tokens(
    world: World, tiny_model: Path, greedy: list[list[int]], seeded: list[list[int]], split: str
) -> None:
    layers, tp = SPLITS[split]
    placed = world.install(1, tiny_model, replica_of(layers, tp))
    assert world.drive(placed, lines()) == greedy
    assert world.drive(placed, lines(SEEDED, seed=3)) == seeded
    assert world.retire(placed) < 2.0
    assert world.head.count(StepFailed) == 0
