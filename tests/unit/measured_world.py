"""Gears with written-down estimates, and worlds in which a slower one serves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from flexslurm.control.actions import PlanShift
from flexslurm.control.choices import PolicySettings, ShiftPrice
from flexslurm.control.events import ShiftWanted
from flexslurm.gear import Estimates, Gear, NoGear, Replica, Signature, Stage
from tests.unit.control_planners import LAYERS, OneStagePerNode
from tests.unit.control_world import World

POLICY = PolicySettings(min_action_gap_s=0.0, migration_benefit_ratio=1.3)
WINDOW = 300.0


def gear(signature: str, tokens_per_s: float, name: str = "", load_s: float = 1.0) -> Gear:
    """One replica on an allocation, told apart from others by its batch."""
    sized = Signature.parse(signature)
    nodes = sized.nodes()
    cuts = [LAYERS * i // len(nodes) for i in range(len(nodes) + 1)]
    stages = tuple(
        Stage(node.gpu_type, node.gpus, cuts[i], cuts[i + 1], 64, i) for i, node in enumerate(nodes)
    )
    one = Replica(stages, max_batch=int(tokens_per_s), max_batch_tokens=64, max_context=256)
    estimates = Estimates(tokens_per_s, 0.1, 0.01, 1000, load_s)
    return Gear(name or signature, sized, 16, (one,), estimates)


class Table(OneStagePerNode):
    """Gears written down by allocation, and some that were named for use."""

    def __init__(
        self,
        gears: Mapping[str, Gear],
        named: Sequence[Gear] = (),
        prices: Mapping[str, ShiftPrice] | None = None,
    ) -> None:
        super().__init__()
        self.gears = {str(Signature.parse(key)): one for key, one in gears.items()}
        self.named, self.prices = tuple(named), dict(prices or {})

    def choose(self, signature: Signature) -> Gear | NoGear:
        found = self.gears.get(str(signature))
        return found or NoGear(signature, f"nothing is written down for {signature}")

    def options(self, signature: Signature) -> Sequence[Gear]:
        return [one for one in self.named if signature.covers(one.signature)]

    def price(self, ask: PlanShift) -> ShiftPrice:
        return self.prices.get(ask.new.gear.name, ShiftPrice())


SLOW, FAST = gear("a100:2", 100.0, "slow"), gear("a100:2", 200.0, "fast")
SAFE, BOTH = gear("a100:2", 1000.0), gear("a100:2,l40s:2", 1500.0)


def in_slow_gear(policy: PolicySettings = POLICY) -> World:
    """Two gears for the same GPUs; the slower serves, and the choice is the policy's again."""
    world = World(planner=Table({"a100:2": FAST}, [SLOW]), policy=policy)
    world.join("a")
    world.run(3)
    world.take(ShiftWanted(SLOW, "test"))
    world.measure(10, 0.0, busy=0.0, full=0.0)
    world.take(ShiftWanted(None, "test"))
    assert installed(world) == "slow"
    return world


def installed(world: World) -> str:
    assert world.control.current is not None
    return world.control.current.gear.name
