"""Why a gear is as it is: what binds each pipeline, and the best plan that was not taken."""

from __future__ import annotations

import msgspec

from flexslurm.gear import Gear, Signature
from flexslurm.planner.build import Pipeline
from flexslurm.planner.columns import Column, key_worth
from flexslurm.planner.integer import Programme
from flexslurm.planner.planner import Planner
from flexslurm.planner.problem import Problem, Tier
from flexslurm.planner.solver import Solution
from flexslurm.planner.splits import best_split

WITHOUT_TARGETS = Tier(slo=False)
RUNNER_UP_GAP = 1e-4
"""Where the plan itself is only near the best, its runner-up need be no nearer than this."""
RUNNER_UP_S = 10.0
"""For each pipeline that may be done without; HiGHS needs a fraction of it for a thousand GPUs."""


class Explained(msgspec.Struct, frozen=True):
    """One gear explained, in words."""

    summary: str
    pipelines: tuple[str, ...]
    runner_up: str
    gap: str


def explain(planner: Planner, signature: Signature) -> Explained | None:
    """None where the signature has no gear; `planner.plan` then says why."""
    choice = planner.choose(signature)
    if choice is None:
        return None
    gear = planner.builder.gear(signature, choice.plan, choice.tier, "")
    ordered = sorted(choice.plan, key=lambda c: (-c.tokens_per_s, c.need))
    return Explained(
        summary=_summary(gear, choice),
        pipelines=tuple(
            _pipeline(planner, column, choice.plan[column], choice.tier) for column in ordered
        ),
        runner_up=_runner_up(planner, signature, choice),
        gap=_gap(choice),
    )


def _summary(gear: Gear, choice: Solution) -> str:
    e = gear.estimates
    idle = gear.signature.gpus() - gear.gpus
    left = f"; {idle} GPUs have no use" if idle else ""
    return (
        f"{choice.reason}: {e.tokens_per_s:,.1f} tokens/s, TTFT {_seconds(e.ttft_s)}, "
        f"TPOT {_seconds(e.tpot_s)} with {gear.gpus} of {gear.signature.gpus()} GPUs{left}"
    )


def _pipeline(planner: Planner, column: Column, times: int, tier: Tier) -> str:
    pipeline = planner.builder.pipeline(column, tier)
    stages = " → ".join(f"{s.kind.gpu_type} tp{s.kind.tp} [{s.lo},{s.hi})" for s in pipeline.stages)
    return (
        f"{times}x ({stages}): {pipeline.tokens_per_s:,.1f} tokens/s at batch {pipeline.batch}; "
        f"{_slowest(planner.problem, pipeline)}; {_limit(planner.problem, column, tier)}"
    )


def _slowest(problem: Problem, pipeline: Pipeline) -> str:
    """Which stage sets the pace, and what it spends its time on."""
    depth = len(pipeline.stages)
    slots = -(-pipeline.batch // depth)
    at, stage = max(
        enumerate(pipeline.stages),
        key=lambda item: problem.times(item[1].kind, slots, depth)[item[1].lo, item[1].hi],
    )
    step = float(problem.times(stage.kind, slots, depth)[stage.lo, stage.hi])
    where = f"stage {at} sets the pace ({_seconds(step)} a step"
    if stage.kind in problem.profiles:
        return f"{where}, measured)"
    cost, load = problem.cost(stage.kind, stage.lo, stage.hi), problem.load
    memory = cost.weights_s + cost.experts_s + slots * load.context_tokens * cost.context_s
    compute = slots * (
        load.new_tokens * cost.token_s + load.pairs * cost.pair_s + load.sampled * cost.sampled_s
    )
    parts = {
        "reading weights and KV": memory if memory >= compute else 0.0,
        "arithmetic": compute if compute > memory else 0.0,
        "launches and latency": cost.fixed_s,
        "links": slots * load.new_tokens * cost.link_token_s,
    }
    return f"{where}, most of it {max(parts, key=lambda name: parts[name])})"


def _limit(problem: Problem, column: Column, tier: Tier) -> str:
    """What keeps the batch from being larger."""
    larger = next((b for b in problem.batches(column.depth) if b > column.batch), None)
    if larger is None:
        if column.batch >= problem.limits.max_batch:
            return f"the batch is limited by max_batch {problem.limits.max_batch}"
        return f"the batch is limited by max_batch_tokens {problem.limits.max_batch_tokens}"
    if best_split(problem, column.need, larger, tier) is not None:
        return "a larger batch would not give more"
    if not tier.slo or best_split(problem, column.need, larger, WITHOUT_TARGETS) is None:
        return f"the KV of a batch of {larger} does not fit"
    for name, slo in (
        ("TTFT", msgspec.structs.replace(problem.slo, tpot_s=None)),
        ("TPOT", msgspec.structs.replace(problem.slo, ttft_s=None)),
    ):
        one = problem.with_goal(msgspec.structs.replace(problem.goal, slo=slo))
        if best_split(one, column.need, larger, tier) is None:
            return f"a batch of {larger} would miss the {name} target"
    return f"a batch of {larger} would miss the TTFT and TPOT targets together"


def _runner_up(planner: Planner, signature: Signature, choice: Solution) -> str:
    """The best plan that does without one of the chosen pipelines."""
    solver = planner.solver(choice.tier)
    shapes = [shape for shape, _ in signature.counts]
    best: tuple[int, str] | None = None
    for column in sorted(choice.plan, key=lambda c: c.need):
        others = [c for c in solver.columns if c.need != column.need]
        solved = Programme(others, shapes).solve(
            signature, 0.0 if choice.gap == 0 else RUNNER_UP_GAP, RUNNER_UP_S
        )
        if solved.plan and (best is None or solved.key > best[0]):
            gear = planner.builder.gear(signature, solved.plan, choice.tier, "")
            best = solved.key, gear.layout()
    if best is None:
        return "there is no other plan"
    less = max(0.0, 1 - key_worth(best[0]) / max(key_worth(choice.key), 1e-9))
    return f"runner-up, {less:.1%} less: {best[1]}"


def _gap(choice: Solution) -> str:
    found = key_worth(choice.key)
    if choice.bound_tokens_per_s <= found:
        return "no plan is better"
    return f"no plan is better by more than {choice.bound_tokens_per_s / found - 1:.2%}"


def _seconds(value: float) -> str:
    if value >= 1:
        return f"{value:.2f} s"
    return f"{value * 1e3:.3g} ms" if value >= 1e-3 else f"{value * 1e6:.3g} us"
