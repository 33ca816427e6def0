"""Leaf switches: read as Slurm prints them, respected between nodes that are otherwise equal."""

from __future__ import annotations

import numpy as np
import pytest

from flexslurm.errors import ConfigError
from flexslurm.gear import Estimates, Gear, Replica, Signature, Slot, Stage
from flexslurm.planner.leaves import gather, read_leaves
from flexslurm.planner.placement import Current, GpuRef, PhysicalNode, place
from flexslurm.slurm.nodelist import expand

CONF = """
# two leaves and a spine
SwitchName=leaf1 Nodes=gpu[01-04] LinkSpeed=100
switchname=leaf2 nodes=gpu[05-06],big1   # the rest
SwitchName=spine Switches=leaf[1-2]
"""
SHOWN = """\
SwitchName=leaf1 Level=0 LinkSpeed=1 Nodes=gpu[01-04]
SwitchName=leaf2 Level=0 LinkSpeed=1 Nodes=gpu[05-06],big1
SwitchName=spine Level=1 LinkSpeed=1 Nodes=gpu[01-06],big1 Switches=leaf[1-2]
"""


@pytest.mark.parametrize("text", [CONF, SHOWN])
def test_leaves_are_read(text: str) -> None:
    leaves = read_leaves(text, expand)
    assert leaves == {f"gpu0{i}": "leaf1" for i in range(1, 5)} | dict.fromkeys(
        ("gpu05", "gpu06", "big1"), "leaf2"
    )


def test_blocks_are_leaves_too() -> None:
    text = "BlockName=b1 Nodes=a[1-2]\nBlockSizes=2"
    assert read_leaves(text, expand) == {"a1": "b1", "a2": "b1"}


def test_other_lines_are_refused() -> None:
    with pytest.raises(ConfigError, match="is expected") as caught:
        read_leaves("\nNodeName=a1", expand, "t.conf")
    assert (caught.value.file, caught.value.line) == ("t.conf", 2)


def gear_of(*replicas: tuple[int, ...], nodes: int) -> Gear:
    """Replicas with one stage on each of these abstract nodes."""
    return Gear(
        name="g",
        signature=Signature.parse(f"a:1x{nodes}"),
        block_tokens=16,
        replicas=tuple(
            Replica(
                tuple(Stage("a", 1, i, i + 1, 9, node) for i, node in enumerate(stages)),
                8, 64, 128,
            )
            for stages in replicas
        ),
        estimates=Estimates(1.0, 1.0, 1.0, 1, 1.0),
    )  # fmt: skip


def nodes_of(count: int) -> list[PhysicalNode]:
    return [PhysicalNode(f"n{i}", "a", (0,)) for i in range(count)]


def at(gear: Gear, slots: dict[Slot, GpuRef]) -> dict[int, str]:
    return {
        gear.replicas[slot.replica].stages[slot.stage].node: ref.node for slot, ref in slots.items()
    }


def crossings(gear: Gear, node_of: dict[int, str], leaves: dict[str, str]) -> int:
    """How often a replica goes from one leaf switch to another, over all replicas."""
    return sum(len({leaves[node_of[s.node]] for s in r.stages}) - 1 for r in gear.replicas)


def test_replicas_stay_under_a_leaf_where_nodes_are_equal() -> None:
    gear = gear_of((0, 1), (2, 3), (4, 5), nodes=6)
    leaves = {f"n{i}": f"leaf{i % 3}" for i in range(6)}
    apart = place(gear, nodes_of(6))
    together = place(gear, nodes_of(6), leaves=leaves)
    assert crossings(gear, at(gear, apart.slots), leaves) == 3
    assert crossings(gear, at(gear, together.slots), leaves) == 0
    assert len(set(together.slots.values())) == 6


def test_spare_nodes_are_taken_where_they_are_nearer() -> None:
    gear = gear_of((0, 1), nodes=2)
    leaves = {"n0": "x", "n1": "y", "n2": "x"}
    found = gather(gear, {0: "n0", 1: "n1"}, dict.fromkeys(("n0", "n1", "n2"), ("a", 1)), leaves)
    assert {leaves[node] for node in found.values()} == {"x"}


def test_nodes_of_another_kind_are_not_exchanged() -> None:
    gear = gear_of((0, 1), nodes=2)
    movable = {"n0": ("a", 1), "n1": ("a", 1), "n2": ("a", 2)}
    found = gather(gear, {0: "n0", 1: "n1"}, movable, {"n0": "x", "n1": "y", "n2": "x"})
    assert found == {0: "n0", 1: "n1"}


def test_bytes_come_before_switches() -> None:
    """The nodes hold what the gear needs: they stay, though another pair shares a leaf."""
    gear = gear_of((0, 1), nodes=2)
    current = Current(gear, {Slot(0, 0, 0): GpuRef("n0", 0), Slot(0, 1, 0): GpuRef("n1", 0)})
    leaves = {"n0": "x", "n1": "y", "n2": "x", "n3": "x"}

    def kept(slots: object, refs: object) -> np.ndarray:
        return np.eye(2) * 1000

    found = place(gear, nodes_of(4), current, kept, leaves)
    assert found.slots == current.at
    assert found.kept_bytes == 2000
