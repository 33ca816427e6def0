"""A real small model in float32: tokens equal to transformers'; skipped where none is named.

Set FLEXSLURM_TEST_MODEL to a checkpoint directory, such as that of SmolLM2-135M-Instruct.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from engine_harness import lines_of, pipeline, reference, run

from flexslurm.engine.arena import Arena
from flexslurm.engine.checkpoint import check_files
from flexslurm.engine.families import check_model
from flexslurm.engine.footprint import stage_bytes

PROMPTS = ("The capital of France is", "Once upon a time, in a small village by", "def add(a, b):")
WANTED = 16


@pytest.fixture(scope="module")
def model() -> Path:
    path = os.environ.get("FLEXSLURM_TEST_MODEL")
    if path is None:
        pytest.skip("FLEXSLURM_TEST_MODEL names no checkpoint")
    return Path(path)


@pytest.fixture(scope="module")
def expected(model: Path) -> tuple[list[list[int]], list[list[int]]]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    prompts = [tokenizer(text)["input_ids"] for text in PROMPTS]
    return prompts, reference(model, prompts, WANTED)


@pytest.fixture
def arena() -> Iterator[Arena]:
    one = Arena(4 << 30)
    yield one
    one.close()


@pytest.mark.parametrize("parts", [1, 3])
def test_tokens_are_those_of_transformers(
    parts: int, model: Path, expected: tuple[list[list[int]], list[list[int]]], arena: Arena
) -> None:
    info = check_model(model)
    assert check_files(info) > 0
    prompts, wanted = expected
    layers = info.num_layers
    cuts = [layers * part // parts for part in range(parts + 1)]
    stages = pipeline(model, cuts, arena, dtype="float32", block_tokens=16, kv_blocks=16)
    assert run(stages, lines_of(prompts, WANTED, 16, 16), most_chunk=6) == wanted
    taken = [stage_bytes(info, s.plan.lo, s.plan.hi, 1, 0, "float32") for s in stages]
    assert [stage.weights_bytes for stage in stages] == taken


def anonymous_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


def test_memory_grows_by_what_the_arena_says(model: Path, arena: Arena) -> None:
    info = check_model(model)
    half = [0, info.num_layers // 2]
    pipeline(model, half, arena, dtype="float32", block_tokens=256, kv_blocks=8)[0].close()
    before = anonymous_bytes()
    stage = pipeline(model, half, arena, dtype="float32", block_tokens=256, kv_blocks=512)[0]
    assert stage.kv_bytes > 1 << 30, "untouched, and so not resident"
    grown = anonymous_bytes() - before
    assert stage.weights_bytes - (1 << 20) < grown < stage.weights_bytes + (24 << 20)
    stage.close()
    assert anonymous_bytes() - before < 24 << 20
