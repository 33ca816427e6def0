"""The memory that members' cards have, against what gears are planned with; changes nothing.

All cards of a type are planned with one figure. Where some have less, it is the one with which most
bytes are of use: nodes with a card below it are left out, for one bad card must not make all others
small. What cards have beyond the site's figure is not planned with.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from flexslurm.config.size_words import show_bytes

if TYPE_CHECKING:
    from flexslurm.control.members import AgentRecord
    from flexslurm.messages import AgentHello

_MOST_WORDS = 3


@dataclass(frozen=True, slots=True)
class Cards:
    """What is to be known of the memory of the cards that are here."""

    memory: Mapping[str, int] = field(default_factory=dict)
    """Bytes that every card in use has, by type, where that is less than planned with."""
    words: str = ""
    """Which cards have less, and what."""
    left_out: Mapping[str, str] = field(default_factory=dict)
    """Agents that are not used, with the reason."""


def weigh_cards(
    staying: Iterable[AgentRecord], leaving: Iterable[AgentRecord], promised: Mapping[str, int]
) -> Cards:
    """`promised`: bytes by type that gears are planned with; a type without is not looked at.

    Those that must leave decide only where none of their type stays.
    """
    least, going = _least(staying, promised), _least(leaving, promised)
    memory: dict[str, int] = {}
    left_out: dict[str, str] = {}
    words: list[str] = []
    for name in sorted(least.keys() | going.keys()):
        found = [*least.get(name, ()), *going.get(name, ())]
        if all(has >= promised[name] for has, _ in found):
            continue
        level = _level(least.get(name) or going[name])
        if level < promised[name]:
            memory[name] = level
        for bytes_, agent in found:
            if bytes_ < promised[name]:
                words.append(short_words(agent.hello, promised))
            if bytes_ < level:
                left_out[agent.id] = (
                    f"{words[-1]}; with it in use every {name} would be planned as one of "
                    f"{show_bytes(bytes_)}"
                )
    more = f" and {len(words) - _MOST_WORDS} more nodes" if len(words) > _MOST_WORDS else ""
    return Cards(memory, "; ".join(words[:_MOST_WORDS]) + more, left_out)


def _least(
    agents: Iterable[AgentRecord], promised: Mapping[str, int]
) -> dict[str, list[tuple[int, AgentRecord]]]:
    """By type, each node with its smallest card, which counts for no more than is promised."""
    least: dict[str, list[tuple[int, AgentRecord]]] = {}
    for agent in agents:
        hello = agent.hello
        if hello.gpus and hello.gpu_type in promised:
            has = min(*(gpu.memory_bytes for gpu in hello.gpus), promised[hello.gpu_type])
            least.setdefault(hello.gpu_type, []).append((has, agent))
    return least


def _level(found: list[tuple[int, AgentRecord]]) -> int:
    """The figure with which most bytes are of use; the lower of two that are as good."""

    def use(level: int) -> tuple[int, int]:
        gpus = sum(len(agent.hello.gpus) for has, agent in found if has >= level)
        return level * gpus, -level

    return max({has for has, _ in found}, key=use)


def short_words(hello: AgentHello, promised: Mapping[str, int]) -> str:
    """The card of a node that has least, against what is planned with; "" where it has enough."""
    wanted = promised.get(hello.gpu_type, 0)
    least = min(hello.gpus, key=lambda gpu: gpu.memory_bytes, default=None)
    if least is None or least.memory_bytes >= wanted:
        return ""
    return (
        f"GPU {least.index} of {hello.fragment} on {hello.node} has {least.memory_bytes:,} bytes, "
        f"{wanted - least.memory_bytes:,} less than the {wanted:,} of a {hello.gpu_type}"
    )
