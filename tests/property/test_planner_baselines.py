"""Plans are never worse than what a person would do by hand; on 2,000 pools with `-m long`."""

from __future__ import annotations

import itertools
import random

import pytest

from flexslurm.gear import Shape, Signature
from flexslurm.planner.columns import key_worth
from flexslurm.planner.model_spec import ModelSpec
from flexslurm.planner.planner import Planner
from flexslurm.planner.problem import Tier
from flexslurm.planner.published import config_of
from flexslurm.planner.topology import Topology
from flexslurm.planner.workload import Goal, Slo, Workload
from tests.property.planner_brute_force import BruteForce, Group

TYPES = ("h100", "a100-80", "a100-40", "l40s", "l4", "t4")
MODELS = ("llama-3.1-8b", "llama-2-13b", "qwen2.5-72b", "llama-3.1-70b", "mistral-7b")


class ByHand:
    """Three plans anyone would think of first, valued by the cost model."""

    def __init__(self, brute: BruteForce, signature: Signature) -> None:
        self.brute, self.signature = brute, signature
        self.layers = brute.spec.num_layers
        brute.slo = brute.context = True

    def value(self, order: tuple[Group, ...], shares: list[float]) -> float:
        """A pipeline whose stages take layers in proportion to their shares."""
        if len(order) > self.layers:
            return 0.0
        total, at, borders = sum(shares), 0.0, [0]
        for number, share in enumerate(shares, start=1):
            at += share * self.layers / total
            left = len(shares) - number
            borders.append(min(max(round(at), borders[-1] + 1), self.layers - left))
        borders[-1] = self.layers
        if any(a >= b for a, b in itertools.pairwise(borders)):
            return 0.0
        return self.brute._split(order, tuple(borders))

    def single_pipeline(self) -> float:
        """One pipeline over everything, layers split equally: by node, and by GPU."""
        most = self.brute.spec.max_tp()
        nodes = tuple((n.gpu_type, min(n.gpus, most)) for n in self.signature.nodes())
        gpus = tuple((n.gpu_type, 1) for n in self.signature.nodes() for _ in range(n.gpus))
        return max(self.value(order, [1.0] * len(order)) for order in (nodes, gpus))

    def equal_replicas(self) -> float:
        """Each type for itself: as many equal pipelines of equal groups as fit."""
        total = 0.0
        for name in {shape.gpu_type for shape, _ in self.signature.counts}:
            nodes = [n.gpus for n in self.signature.nodes() if n.gpu_type == name]
            best = 0.0
            for tp in (1, 2, 4, 8):
                groups = sum(gpus // tp for gpus in nodes)
                if tp > self.brute.spec.max_tp():
                    continue
                for depth in range(1, min(groups, 12) + 1):
                    one = self.value(((name, tp),) * depth, [1.0] * depth)
                    best = max(best, groups // depth * one)
            total += best
        return total

    def greedy_by_memory(self) -> float:
        """Largest memory first, one GPU a stage, until the model fits; again with what is left."""
        spec, goal = self.brute.spec, self.brute.goal
        memory = self.brute.topology.gpu
        left = sorted(
            (n.gpu_type for n in self.signature.nodes() for _ in range(n.gpus)),
            key=lambda name: -memory(name).memory_bytes,
        )
        need = spec.weight_bytes() + spec.kv_bytes_per_token() * goal.workload.tokens
        total = 0.0
        while left:
            taken: list[str] = []
            held = 0
            while left and held < need:
                taken.append(left.pop(0))
                held += goal.limits.arena_bytes(memory(taken[-1]).memory_bytes)
            shares = [float(memory(name).memory_bytes) for name in taken]
            total += self.value(tuple((name, 1) for name in taken), shares)
        return total


def pool(rng: random.Random, most: int) -> Signature:
    types = rng.sample(TYPES, rng.randint(1, 3))
    shapes: list[Shape] = []
    for name in types:
        shapes += [Shape(name, rng.choice([1, 2, 3, 4, 4, 5, 7, 8]))] * rng.randint(1, 4)
    while sum(shape.gpus for shape in shapes) > most:
        shapes.pop(rng.randrange(len(shapes)))
    return Signature.of(shapes)


def never_worse(seed: int, most: int) -> None:
    rng = random.Random(seed)
    spec = ModelSpec.from_config(config_of(rng.choice(MODELS)))
    signature = pool(rng, most)
    goal = Goal(
        Workload(rng.choice([128, 1000, 4000]), rng.choice([32, 256, 1000])),
        Slo(tpot_s=rng.choice([None, None, 0.1]), ttft_s=rng.choice([None, 5.0])),
    )
    topology = Topology.from_catalogue(TYPES)
    planner = Planner(spec, topology, goal, signature)
    choice = planner.solver(Tier()).choose(signature)
    by_hand = ByHand(BruteForce(spec, topology, goal), signature)
    found = key_worth(choice.key)
    for name in ("single_pipeline", "equal_replicas", "greedy_by_memory"):
        baseline = getattr(by_hand, name)()
        assert found >= baseline * (1 - 1e-6) - 0.01, (name, str(signature), spec.name, goal)


@pytest.mark.parametrize("seed", range(24))
def test_never_worse_than_by_hand(seed: int) -> None:
    never_worse(seed, most=16)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_never_worse_than_by_hand_on_a_hundred_pools(seed: int) -> None:
    for number in range(40):
        never_worse(2_000_000 + seed * 1000 + number, most=12 + number)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(1800)  # 40 s each on an idle core, 13 min for all of them
@pytest.mark.parametrize("seed", range(20))
def test_never_worse_than_by_hand_on_thousands_of_pools(seed: int) -> None:
    for number in range(100):
        never_worse(1_000_000 + seed * 1000 + number, most=12 + number % 40)
