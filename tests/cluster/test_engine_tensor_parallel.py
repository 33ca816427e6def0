"""Tensor-parallel stages over real process groups give exactly transformers' tokens."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any

import pytest
from engine_harness import prompts_of, reference

from flexslurm.engine.families import check_model
from flexslurm.engine.tiny import TINY_FAMILIES
from tests.cluster.engine_ranks import KEY

TinyModels = Callable[..., Path]
RANKS = 3
WANTED = 6


class Ranks:
    """The forked ranks; a call goes to the first `count` of them at once."""

    def __init__(self, links: list[Connection]) -> None:
        self._links = links

    def call(self, count: int, name: str, *arguments: object) -> list[Any]:
        for link in self._links[:count]:
            link.send((name, arguments))
        answers = []
        for rank, link in enumerate(self._links[:count]):
            assert link.poll(200), f"rank {rank} does not answer {name}"
            answers.append(link.recv())
        for rank, (ok, value) in enumerate(answers):
            assert ok, f"rank {rank}: {name}\n{value}"
        return [value for _, value in answers]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory, root: Path) -> Iterator[Ranks]:
    place = tmp_path_factory.mktemp("ranks")
    with Listener(str(place / "s"), family="AF_UNIX", authkey=KEY) as listener:
        environment = os.environ | {"PYTHONPATH": f"{root}:{root / 'tests'}"}
        command = [sys.executable, "-m", "tests.cluster.engine_ranks"]
        with (
            (place / "said").open("wb") as said,
            subprocess.Popen(
                [*command, str(RANKS), str(place / "s"), str(place / "store")],
                env=environment,
                stdout=said,
                stderr=subprocess.STDOUT,
            ) as process,
        ):
            links: dict[int, Connection] = {}
            try:
                for _ in range(RANKS):
                    link = listener.accept()
                    links[link.recv()] = link
                yield Ranks([links[rank] for rank in range(RANKS)])
            finally:
                for link in links.values():
                    link.send(None)
                    link.close()
                if len(links) < RANKS:
                    process.kill()
                assert process.wait(200) == 0, (place / "said").read_text()
    # DeepSpeed prints what it finds in a model, gloo who is connected: not on our output.
    assert (place / "said").read_text() == ""


@pytest.fixture(scope="module")
def answers(tiny_models: TinyModels) -> Callable[[Path], tuple[list[list[int]], list[list[int]]]]:
    kept: dict[Path, tuple[list[list[int]], list[list[int]]]] = {}

    def get(path: Path) -> tuple[list[list[int]], list[list[int]]]:
        if path not in kept:
            prompts = prompts_of(240, (1, 14, 6))
            kept[path] = prompts, reference(path, prompts, WANTED)
        return kept[path]

    return get


@pytest.mark.parametrize("tp", [2, 3])
@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_tokens_parts_and_memory(
    family: str, tp: int, ranks: Ranks, tiny_models: TinyModels, answers
) -> None:
    """Three KV heads over two ranks are cut 2 + 1; opt and gpt_neox have six."""
    path = tiny_models(family)
    prompts, wanted = answers(path)
    cuts = (0, 2, 6)
    ranks.call(tp, "build", str(path), cuts, tp)
    for found in ranks.call(tp, "answers", prompts, WANTED, tp):
        assert found == wanted
    _check_cover(ranks.call(tp, "parts"), tp)
    _check_heads(ranks.call(tp, "kv_heads"), check_model(path).num_kv_heads)
    for memory in ranks.call(tp, "memory", str(path)):
        assert len(memory) == len(cuts) - 1
        for weights, weights_estimate, kv, kv_estimate, rest in memory:
            assert (weights, kv, rest) == (weights_estimate, kv_estimate, 0)
    assert ranks.call(tp, "close") == [0] * tp


def _check_cover(by_rank: list[list[Any]], tp: int) -> None:
    """Every tensor is covered exactly once along its dim, or held whole by every rank."""
    cut = 0
    for same in zip(*by_rank, strict=True):
        layer, name, shape, dim, _ = same[0]
        assert all(part[:4] == same[0][:4] for part in same)
        ranges = [part[4] for part in same]
        if dim is None:
            assert ranges == [(0, shape[0])] * tp, (layer, name)
            continue
        cut += 1
        edges = [0, *(stop for _, stop in ranges)]
        assert [start for start, _ in ranges] == edges[:-1], (layer, name)
        assert edges[-1] == shape[dim], (layer, name)
    assert cut > 0


def _check_heads(by_rank: list[list[tuple[int, int]]], heads: int) -> None:
    """The ranks of each stage have the model's KV heads in order, each once."""
    for stage in zip(*by_rank, strict=True):
        assert [head for first, last in stage for head in range(first, last)] == list(range(heads))


@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        ("llama", {"heads": 8, "kv_heads": 4, "hidden": 64, "intermediate": 100}),
        ("qwen2", {"heads": 2, "kv_heads": 2, "hidden": 36, "intermediate": 151}),
        ("opt", {"heads": 4, "kv_heads": 4, "hidden": 40, "intermediate": 50}),
        ("opt", {"heads": 4, "kv_heads": 4, "hidden": 40, "intermediate": 52}),
        ("gpt_neox", {"heads": 5, "kv_heads": 5, "hidden": 40, "intermediate": 131}),
    ],
)
def test_odd_sizes(
    family: str, sizes: dict[str, int], ranks: Ranks, tiny_models: TinyModels, answers
) -> None:
    """Widths that no degree divides, cut by heads and evenly."""
    path = tiny_models(family, layers=2, **sizes)
    prompts, wanted = answers(path)
    most = min(sizes["kv_heads"], RANKS)
    for tp in range(2, most + 1):
        ranks.call(tp, "build", str(path), (0, 1, 2), tp)
        assert ranks.call(tp, "answers", prompts, WANTED, tp) == [wanted] * tp
        _check_cover(ranks.call(tp, "parts"), tp)
        for memory in ranks.call(tp, "memory", str(path)):
            for weights, weights_estimate, kv, kv_estimate, rest in memory:
                assert (weights, kv, rest) == (weights_estimate, kv_estimate, 0)


@pytest.mark.parametrize("cuts", [(0, 6), (0, 1, 6)])
def test_tied_heads(cuts: tuple[int, ...], ranks: Ranks, tiny_models: TinyModels, answers) -> None:
    """The head is a view of the embedding where both are, a transposed slice elsewhere."""
    path = tiny_models("llama", tied=True)
    prompts, wanted = answers(path)
    ranks.call(2, "build", str(path), cuts, 2)
    assert ranks.call(2, "answers", prompts, WANTED, 0) == [wanted] * 2
    for memory in ranks.call(2, "memory", str(path)):
        for weights, weights_estimate, *_ in memory:
            assert weights == weights_estimate


def test_degrees_follow_each_other_in_one_process(ranks: Ranks, tiny_model: Path, answers) -> None:
    """DeepSpeed keeps state on its classes: no degree may leave a trace in the next."""
    prompts, wanted = answers(tiny_model)
    for tp in (3, 1, 2, 3):
        ranks.call(tp, "build", str(tiny_model), (0, 6), tp)
        assert ranks.call(tp, "answers", prompts, WANTED, 0) == [wanted] * tp
        sizes = ranks.call(tp, "sizes")
        assert all(found == sizes[0] for found in sizes), "every rank knows every rank's share"


@pytest.mark.slow
def test_a_real_model_in_float32(ranks: Ranks) -> None:
    from transformers import AutoTokenizer

    path = os.environ.get("FLEXSLURM_TEST_MODEL")
    if path is None:
        pytest.skip("FLEXSLURM_TEST_MODEL names no checkpoint")
    tokenizer, layers = AutoTokenizer.from_pretrained(path), check_model(path).num_layers
    prompts = [tokenizer(text)["input_ids"] for text in ("The capital of France is", "Once upon")]
    wanted = reference(Path(path), prompts, 10)
    for tp, cuts in ((2, (0, layers)), (3, (0, layers // 3, layers))):
        ranks.call(tp, "build", path, cuts, tp, "float32")
        assert ranks.call(tp, "answers", prompts, 10, 1) == [wanted] * tp
        for memory in ranks.call(tp, "memory", path):
            assert all(m[0] == m[1] and m[2] == m[3] for m in memory)
    assert ranks.call(RANKS, "close") == [0] * RANKS


def test_forked_ranks_may_use_threads(ranks: Ranks) -> None:
    assert ranks.call(RANKS, "threads", 2) == [600] * RANKS
