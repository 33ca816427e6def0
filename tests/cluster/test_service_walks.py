"""Random walks over gears under load, seeded sampling too: every token is the undisturbed one."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.service_harness import SLOWLY, Ask, Load, finish, oracle, tiny_service, tiny_site
from tests.shift_ground import Ground, ground, layout

pytestmark = [pytest.mark.shared_service, pytest.mark.slow, pytest.mark.timeout(480)]
GPUS, LAYERS = 4, 6
LONG = 60


@pytest.fixture(scope="module")
def walker(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[Ground]:
    """Four virtual GPUs on one node, each with room for several gears."""
    home = tmp_path_factory.mktemp("walks")
    settings = tiny_service(tiny_model, [("a100", GPUS, 1)], lost_after="10s")
    with ground(home, tiny_model, settings, tiny_site(2 * SLOWLY), [], LONG) as walker:
        yield walker


def random_gear(rng: random.Random) -> str:
    """One to three replicas of one to three stages, split unevenly, on at most four GPUs."""
    free = GPUS
    replicas: list[str] = []
    while free and len(replicas) < 3 and (not replicas or rng.random() < 0.4):
        depth = rng.randint(1, min(3, free))
        cuts = [0, *sorted(rng.sample(range(1, LAYERS), depth - 1)), LAYERS]
        stages = []
        for n in range(depth):
            tp = rng.randint(1, min(3, free - (depth - n - 1)))
            stages.append((tp, cuts[n + 1] - cuts[n]))
            free -= tp
        replicas.append(layout(*stages))
    parts = [
        replica if replicas.count(replica) == 1 else f"{replicas.count(replica)}x({replica})"
        for replica in sorted(set(replicas))
    ]
    return " + ".join(parts)


def some_asks(rng: random.Random, count: int) -> list[Ask]:
    """Greedy ones, and ones sampled with a seed, with and without top-p."""
    made = []
    for n in range(count):
        prompt = [rng.randint(1, 200) for _ in range(rng.randint(1, 70))]
        sampling: dict[str, float | int] = {}
        if n % 3:
            sampling = {"temperature": rng.uniform(0.3, 1.2), "seed": rng.randrange(1 << 30)}
        if n % 3 == 2:
            sampling["top_p"] = rng.uniform(0.5, 0.99)
        made.append(Ask(prompt, rng.randint(10, LONG), dict(sampling)))
    return made


@pytest.mark.parametrize("seed", [1, 2])
def test_random_gears_under_load(walker: Ground, tiny_model: Path, seed: int) -> None:
    """Ten random gears one after another, with streams that begin and end all the time."""
    rng = random.Random(seed)
    lines = []
    with Load(walker.service, iter(some_asks(rng, 400)), 5) as load:
        for _ in range(10):
            gear = random_gear(rng)
            before = walker.service.status().epoch
            line = walker.shift_to(gear)
            if walker.service.status().epoch > before:
                lines.append(line)
            time.sleep(rng.uniform(0.0, 0.4))
    asks = load.begun
    assert [ask.error for ask in asks] == [""] * len(asks)
    assert [ask.tokens for ask in asks] == oracle(tiny_model, asks)
    assert [ask.finish for ask in asks] == ["length"] * len(asks)
    for line in lines:
        assert line["outcome"] == "committed", line
    moved, recomputed = (
        sum(float(line[f"sequences_{what}"]) for line in lines) for what in ("moved", "recomputed")
    )
    assert moved > 5, "nothing was under way"
    # One that begins right before the cut-over lacks more than is worth moving in the pause.
    assert recomputed <= moved / 5, lines
    walker.check_clean()


def test_a_real_model_walks_with_its_kv(tmp_path: Path, smollm2: Path) -> None:
    """SmolLM2 in float32: greedy lines through four gears are those of one that stands still."""
    settings = tiny_service(smollm2, [("a100", 3, 1)], lost_after="10s")
    settings["model"] |= {"dtype": "float32"}
    site = tiny_site(a100="1500MB")
    prompts = [[504, 3575, 282, 4649, 314], list(range(1000, 1040))]
    walk = [layout(1, layers=30), layout(1, 1, layers=30), layout(3, layers=30),
            layout(1, 1, 1, layers=30), layout(1, layers=30)]  # fmt: skip

    def asks(tokens: int) -> list[Ask]:
        return [Ask(prompt, tokens) for prompt in prompts]

    with ground(tmp_path, smollm2, settings, site, [], LONG) as real:
        for tokens in (160, 320, 440):  # longer ones where a walk outlasts them
            real.shift_to(walk[0], 90)
            moved = asks(tokens)
            threads = real.service.start(moved)
            lines = []
            for number, gear in enumerate(walk[1:]):
                while any(len(x.tokens) < 3 + 8 * number and x.finish is None for x in moved):
                    assert not any(x.error for x in moved), moved
                    time.sleep(0.01)
                lines.append(real.shift_to(gear))
            lived = all(x.finish is None for x in moved)
            finish(threads, 120)
            if lived and not any(line["sequences_recomputed"] for line in lines):
                break
        assert lived, "the streams were too short"
        still = asks(tokens)
        real.service.run(still, 120)
    assert [ask.error for ask in moved] == ["", ""]
    assert [ask.tokens for ask in moved] == [ask.tokens for ask in still]
    assert [line["sequences_recomputed"] for line in lines] == [0, 0, 0, 0]
    assert all(line["sequences_moved"] == 2 for line in lines), lines
