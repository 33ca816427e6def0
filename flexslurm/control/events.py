"""What the controller hears, its settings and its reports, as values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from flexslurm.control.choices import PolicySettings
from flexslurm.control.installed import ReplicaKey
from flexslurm.control.phases import InstallSettings, ShiftOrder
from flexslurm.control.trends import Sample
from flexslurm.control.watch import WatchSettings
from flexslurm.gear import Gear
from flexslurm.messages import Message


@dataclass(frozen=True, slots=True)
class Heard:
    """A message from a member; `sender` is the routing id of its link."""

    sender: str
    message: Message


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


@dataclass(frozen=True, slots=True)
class MoveFigures:
    """What a shift moved, and how long its streams stood still."""

    moved: int = 0
    """Sequences that went on with their KV, whole or in part."""
    recomputed: int = 0
    moved_bytes: int = 0
    """KV that left its GPU."""
    transfer_s: float = 0.0
    """How long pulls ran beside the serving gear."""
    move_s: float = 0.0
    """What the worker that pulled for longest spent on it, in the cut-over too."""
    pause_s: float = 0.0
    """From the pause of the old drivers to the first steps of the new ones."""
    drain_s: float = 0.0
    """Of the pause: until the old drivers were at a step boundary."""
    last_move_s: float = 0.0
    """Of the pause: from there until everything was where it will be."""
    pause_steps: int = 0
    """Steps of the old drivers that were awaited, the longest pipeline's."""
    kv: tuple[tuple[int, int], ...] = ()
    """Of each sequence that kept its KV: its old replica's number in the gear, and its tokens."""


@dataclass(frozen=True, slots=True)
class ReplicaBroken:
    """A driver can no longer get steps done."""

    replica: ReplicaKey
    reason: str


@dataclass(frozen=True, slots=True)
class ShiftPlanned:
    """The answer to `PlanShift`."""

    epoch: int
    order: ShiftOrder


@dataclass(frozen=True, slots=True)
class ParkedAhead:
    """The answer to `ParkAhead`: full blocks are aside that can be."""

    epoch: int


@dataclass(frozen=True, slots=True)
class Parked:
    """The answer to `ParkAll`: all KV is aside that can be."""

    epoch: int


@dataclass(frozen=True, slots=True)
class ParkedAway:
    """The answer to `ParkAway`: all KV is in files that can be."""


@dataclass(frozen=True, slots=True)
class Transferred:
    """The answer to `BeginTransfer`: little is left to move."""

    epoch: int


@dataclass(frozen=True, slots=True)
class CutOver:
    """The answer to `BeginCutover`: everything is where it will be."""

    epoch: int


@dataclass(frozen=True, slots=True)
class MoveFailed:
    """The shell cannot go on with a shift's moves."""

    epoch: int
    reason: str


@dataclass(frozen=True, slots=True)
class ShiftWanted:
    """An operator asks for a gear; None: back to the policy's choice."""

    gear: Gear | None
    reason: str
    at_once: bool = False
    """Without a gear: the best by estimate is gone to first, whatever was measured."""


@dataclass(frozen=True, slots=True)
class GearPlanned:
    """The planner knows more than it did when it was last asked."""


@dataclass(frozen=True, slots=True)
class Measured:
    """An interval has passed, and this is what it showed."""

    sample: Sample


@dataclass(frozen=True, slots=True)
class Switched:
    """`SwitchOver` has been done."""

    epoch: int
    figures: MoveFigures


@dataclass(frozen=True, slots=True)
class Cordon:
    """An operator, or what keeps the pool, takes a pilot out of use or (`cordon` False) back."""

    fragment: str
    cordon: bool
    drain: bool = False
    """It shall end once nothing of it is used."""
    gone: bool = False
    """It has ended, and its cordon with it: the name is free for another."""


@dataclass(frozen=True, slots=True)
class PilotGone:
    """Slurm says that a pilot's job has ended."""

    fragment: str
    reason: str


PREEMPT_TIME = "PreemptTime"
"""A source: the preemption under way that squeue shows, with the grace time that is left."""


@dataclass(frozen=True, slots=True)
class PilotLeaving:
    """Slurm says that it will take a pilot, before the pilot's agents have heard it."""

    fragment: str
    source: str
    grace_s: float
    present: bool = False
    """Only agents that are here are meant: those that come later belong to another run."""


@dataclass(frozen=True, slots=True)
class PilotEnds:
    """Slurm says when a pilot reaches its walltime; told again when that changes."""

    fragment: str
    ends_in_s: float


@dataclass(frozen=True, slots=True)
class PartNode:
    """A node shall be given back, and its pilot go on with the others."""

    node: str


@dataclass(frozen=True, slots=True)
class NodeNoticed:
    """Slurm takes a node out of use, or has it back: what runs there goes on."""

    node: str
    words: str
    """As `draining: bad fan`; empty: it is in use again."""


@dataclass(frozen=True, slots=True)
class PilotStays:
    """Slurm no longer says that it will take a pilot: the preemption was called off."""

    fragment: str
    reason: str


@dataclass(frozen=True, slots=True)
class Unreachable:
    """A message could not be sent: the member's connection is closed."""

    member: str


PilotEvent = PilotGone | PilotLeaving | PilotStays
RollEvent = Heard | Tick | Cordon | PilotEvent | PilotEnds | PartNode | NodeNoticed | Unreachable
ShiftEvent = ShiftPlanned | ParkedAhead | Parked | Transferred | CutOver | MoveFailed | Switched
Event = RollEvent | ShiftEvent | ParkedAway | ReplicaBroken | ShiftWanted | GearPlanned | Measured


@dataclass(frozen=True, slots=True)
class ControlSettings:
    """What a controller is made with; times in seconds."""

    head: str
    """Its incarnation."""
    install: InstallSettings
    policy: PolicySettings
    gpu_types: frozenset[str]
    """Those of the site file; agents with others are refused."""
    beat_s: float = 0.5
    """Between two beats of a member."""
    lost_s: float = 5.0
    """Silence after which a member counts as lost."""
    join_settle_s: float = 1.0
    """Wait this long after a join, so that companions are planned in with it."""
    loss_settle_s: float = 0.1
    """Wait this long after a loss: what dies with it is often told next."""
    max_failures: int = 3
    """Installs that may fail on one agent before it is left out."""
    overstay_s: float = 120.0
    """A member that is still here so long after it had to go stays: its notice was called off.

    Slurm kills within its KillWait, 30 s as a rule; a job has up to a minute more at its limit.
    """
    watch: WatchSettings = field(default_factory=WatchSettings)
    memory_bytes: Mapping[str, int] = field(default_factory=dict)
    """Of a card, by type, as gears are planned with; a type without is taken as it comes."""


@dataclass(slots=True)
class DecisionReport:
    """What the policy said, and when it last said so."""

    at_s: float
    verdict: str
    """`shift`, `stay`, or `wait` where nothing serves."""
    reason: str


@dataclass(slots=True)
class ShiftReport:
    """One line of the history."""

    epoch: int
    why: str
    before: str
    after: str
    started_at: float
    took_s: float
    outcome: str
    mode: str = ""
    evicted: int = 0
    """Sequences that its plan named as having no room in the new gear."""
    figures: MoveFigures = field(default_factory=MoveFigures)
