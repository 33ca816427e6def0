"""What Slurm's hooks tell by `flexslurm notify`, as the controller's events; asks nobody."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from flexslurm.config.site import Site
from flexslurm.control.events import Event, PilotGone, PilotLeaving
from flexslurm.control.members import AgentRecord
from flexslurm.messages import NotifyAsk
from flexslurm.slurm.notices import Leaving, LookNow, PilotAt, PilotLost, meaning
from flexslurm.slurm.window import site_window
from flexslurm.wire.service_dir import Pilot


def take_notice(
    ask: NotifyAsk,
    pilots: Iterable[Pilot],
    agents: Iterable[AgentRecord],
    site: Site,
    tell: Callable[[Event], None],
    look_now: Callable[[], None],
) -> None:
    """Tell the controller what the notice means for the pilots it is about."""
    known = list(agents)
    for notice in meaning(ask, [_pilot_at(pilot, known, site) for pilot in pilots]):
        match notice:
            case Leaving(fragment, source, grace_s):
                tell(PilotLeaving(fragment, source, grace_s))
            case PilotLost(fragment, reason):
                tell(PilotGone(fragment, reason))
            case LookNow():
                look_now()


def _pilot_at(pilot: Pilot, agents: Iterable[AgentRecord], site: Site) -> PilotAt:
    mine = [agent.hello for agent in agents if agent.hello.fragment == pilot.fragment]
    warning_s = site_window(pilot.partition, site).warning_s if pilot.partition else 0.0
    return PilotAt(
        fragment=pilot.fragment,
        job_id=pilot.job_id,
        nodes=tuple(hello.node for hello in mine),
        warning_s=warning_s,
        restarts=max((hello.restarts for hello in mine), default=0),
    )
