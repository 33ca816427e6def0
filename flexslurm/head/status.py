"""The service at a glance, for `flexslurm status`; reads, never changes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from flexslurm.control.events import ShiftReport
from flexslurm.control.holdings import Holdings
from flexslurm.control.members import AgentRecord, AgentState, GpuAt
from flexslurm.control.state import Control
from flexslurm.gear import Slot
from flexslurm.head.installs import InstallFigures, Installs
from flexslurm.head.judging import Judge
from flexslurm.head.ledger import Figures
from flexslurm.head.measuring import measured
from flexslurm.messages import (
    FinishReason,
    FragmentStatus,
    GpuStatus,
    ServiceState,
    StatusAnswer,
)
from flexslurm.wire.service_dir import Pilot

_DECISIONS = 20


@dataclass(frozen=True, slots=True)
class JobView:
    """What Slurm last said of a pilot's job."""

    state: str
    reason: str
    ended: bool
    nodes: tuple[str, ...] = ()
    """Where it runs; of one that has ended, where it ran."""


def status_answer(
    *,
    service: str,
    endpoint: str,
    control: Control,
    figures: Figures,
    pilots: Iterable[Pilot],
    jobs: Mapping[str, JobView],
    stopping: bool,
    now: float,
    started_at: float,
    installs: Installs,
    judge: Judge | None = None,
) -> StatusAnswer:
    """Build the answer; `jobs` by job id."""
    current = control.current
    judge = judge or Judge()
    judgement = judge.judge(now)
    return StatusAnswer(
        service=service,
        head=control.settings.head,
        endpoint=endpoint,
        state=ServiceState.STOPPING if stopping else control.state,
        reason=control.failed or control.reason,
        epoch=control.epoch,
        gear=current.gear if current is not None else None,
        fragments=tuple(_fragments(control, pilots, jobs, installs, now)),
        running=figures.replicas.running,
        waiting=figures.live - figures.replicas.running,
        kv_used=figures.replicas.kv_used,
        finished=sum(
            figures.finished.get(reason, 0) for reason in (FinishReason.STOP, FinishReason.LENGTH)
        ),
        tokens_total=figures.tokens,
        shifts=tuple(_shift(now, report, judge, installs) for report in control.history),
        uptime_s=now - started_at,
        judgement=judgement.words(),
        figures=judgement.figures(),
        decisions=tuple(
            {"s_ago": round(now - one.at_s, 3), "verdict": one.verdict, "reason": one.reason}
            for one in list(control.decisions)[-_DECISIONS:]
        ),
        measured=measured(now, control),
    )


def _shift(
    now: float, report: ShiftReport, judge: Judge, installs: Installs
) -> dict[str, float | str]:
    return {
        "epoch": report.epoch,
        "why": report.why,
        "from": report.before,
        "to": report.after,
        "started_s_ago": round(now - report.started_at, 3),
        "took_s": round(report.took_s, 3),
        "outcome": report.outcome,
        **_kept(report, judge),
        **_moved(report),
        **_installed(installs.figures(report.epoch)),
    }


def _kept(report: ShiftReport, judge: Judge) -> dict[str, float | str]:
    """The throughput that a shift kept, where it is known."""
    kept = judge.kept(report.epoch)
    named = {"kept_during": kept.during, "kept_after": kept.after}
    return {name: round(share, 4) for name, share in named.items() if share is not None}


def _moved(report: ShiftReport) -> dict[str, float | str]:
    figures = report.figures
    return {
        "mode": report.mode,
        "sequences_moved": figures.moved,
        "sequences_recomputed": figures.recomputed,
        "sequences_evicted": report.evicted,
        "kv_bytes": figures.moved_bytes,
        "transfer_s": round(figures.transfer_s, 4),
        "kv_move_s": round(figures.move_s, 4),
        "pause_s": round(figures.pause_s, 4),
        "pause_steps": figures.pause_steps,
    }


def _installed(figures: InstallFigures) -> dict[str, float | str]:
    return {
        "weights_bytes": figures.weights_bytes,
        "moved_bytes": figures.moved_bytes,
        "kept_bytes": figures.kept_bytes,
        "read_bytes": figures.read_bytes,
        "weights_move_s": round(figures.move_s, 4),
        "load_s": round(figures.load_s, 3),
        "groups_s": round(figures.groups_s, 3),
    }


def _fragments(
    control: Control,
    pilots: Iterable[Pilot],
    jobs: Mapping[str, JobView],
    installs: Installs,
    now: float,
) -> Iterable[FragmentStatus]:
    shift = control.shift
    installs.forget_all_but(
        (worker.worker for worker in control.members.workers()),
        shift.epoch if shift is not None else None,
    )
    slots: dict[GpuAt, Slot] = {}
    if control.current is not None:
        slots = {at: slot for slot, at in control.current.placement.items()}
    by_fragment: dict[str, list[AgentRecord]] = {}
    for agent in control.members.agents.values():
        by_fragment.setdefault(agent.hello.fragment, []).append(agent)
    left_out = control.members.cards().left_out
    for pilot in pilots:
        agents = by_fragment.pop(pilot.fragment, [])
        for agent in agents:
            yield _of_agent(agent, control, slots, installs, left_out.get(agent.id, ""), now)
        if not agents:
            drained = pilot.fragment in control.members.draining
            yield _without_agent(pilot, jobs.get(pilot.job_id), drained)
    for agents in by_fragment.values():
        for agent in agents:
            yield _of_agent(agent, control, slots, installs, left_out.get(agent.id, ""), now)


def _without_agent(pilot: Pilot, job: JobView | None, drained: bool) -> FragmentStatus:
    state = "unknown" if job is None else job.state.lower()
    if job is not None and job.ended:
        state = "drained" if drained else "lost"
    return FragmentStatus(
        name=pilot.fragment,
        job_id=pilot.job_id,
        node=",".join(job.nodes) or None if job is not None else None,
        gpu_type=pilot.gpu_type,
        state=state,
        detail=job.reason if job is not None else "Slurm has not been asked yet",
        gpus=tuple(GpuStatus(index=i, worker=None, slot=None) for i in range(pilot.gpus)),
    )


def _of_agent(
    agent: AgentRecord,
    control: Control,
    slots: Mapping[GpuAt, Slot],
    installs: Installs,
    left_out: str,
    now: float,
) -> FragmentStatus:
    """`left_out`: why its cards are not planned with; empty where they are."""
    gpus = tuple(_of_gpu(agent, gpu.index, slots, control.holdings) for gpu in agent.hello.gpus)
    serving = any(gpu.slot for gpu in gpus)
    state = "serving" if serving else "ready"
    detail = installs.detail(worker.worker for worker in agent.workers.values())
    if agent.hello.fragment in control.members.cordoned:
        state = "cordoned"
    elif agent.state is not AgentState.READY:
        state = str(agent.state)
        left = max((agent.leaves_at or now) - now, 0.0)
        detail = agent.failure or f"{agent.leave_source}, {left:.0f} s left"
    if left_out and agent.state is AgentState.READY:
        state, detail = "left out", left_out
    node = f"Slurm: its node is {agent.node_words}" if agent.node_words else ""
    return FragmentStatus(
        name=agent.hello.fragment,
        job_id=agent.hello.job_id,
        node=agent.hello.node,
        gpu_type=agent.hello.gpu_type,
        state=state,
        detail=detail or node,
        gpus=gpus,
    )


def _of_gpu(
    agent: AgentRecord, index: int, slots: Mapping[GpuAt, Slot], holdings: Holdings
) -> GpuStatus:
    worker = agent.workers.get(index)
    name = worker.worker if worker is not None else ""
    slot = slots.get(GpuAt(agent.id, index))
    return GpuStatus(
        index=index,
        worker=worker.worker if worker is not None else None,
        slot=str(slot) if slot is not None else None,
        pid=worker.pid if worker is not None else 0,
        used_bytes=worker.used_bytes if worker is not None else 0,
        epochs=tuple(sorted(held.epoch for held in holdings if held.worker == name)),
    )
