"""Which pilots to submit, to let go and to end, so that the pool is as asked for; pure.

    intent ─▶ waiting ─▶ running ─▶ (gone)          any of them ─▶ ending ─▶ (gone)
                 ▲──────────┘ requeued by Slurm

The shell asks for one call at a time (`next_call`), does it and tells what came of it, and tells
every answer of Slurm (`looked`). An intent is written down before its job is submitted; one whose
fate is not known counts as a pilot until Slurm has shown it or has had time to.

Invariants: pilots of an entry are never more than its `most` (one that goes and its successor count
as one); a shape that is refused or keeps dying is not tried without end; a job that Slurm does not
know counts as there until it has been unknown for a while.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import msgspec

from flexslurm.control.keeper_values import (
    Call,
    CancelJobs,
    Forget,
    KeptPilot,
    Look,
    PilotEnded,
    PilotStage,
    Present,
    Resize,
    Submit,
)
from flexslurm.control.keeping import Keeping
from flexslurm.slurm.jobs import JobInfo
from flexslurm.slurm.reasons import PendingVerdict, explain, refusal
from flexslurm.slurm.states import EXIT_GIVE_BACK, JobState
from flexslurm.wire.service_dir import Pilot

_NEVER_S = 120.0
"""How long Slurm must say that a job cannot start before another shape is tried."""
_OWN_FAULTS = frozenset({
    JobState.FAILED, JobState.COMPLETED, JobState.OUT_OF_MEMORY, JobState.DEADLINE,
})  # fmt: skip
_NO_FAULT_CODES = (EXIT_GIVE_BACK, 143, -15, -9)
"""Given back, or ended by a signal from outside."""


class PoolKeeper(Keeping):
    """See the module's docstring."""

    # ------------------------------------------------------------------ what to ask of Slurm

    def next_call(self, now: float) -> Call | None:
        """What to ask of Slurm now; an intent is among `pilots` from here on."""
        if now - self._began >= self.settings.unsure_s:  # by then it is seen who serves
            for number in range(len(self.entries)):
                self._shrink(number)
        if now < self._quiet_until:
            return None
        jobs = [job for job, looks in self._strays.items() if looks >= 2]
        jobs += [k.pilot.job_id for k in self.kept.values() if k.cancel and k.pilot.job_id]
        if jobs:
            return CancelJobs(tuple(sorted(jobs)))
        resize = self._resize()
        if resize is not None:
            return resize
        unsure = sum(kept.stage is PilotStage.INTENT for kept in self.kept.values())
        if unsure >= self.settings.most_unsure:
            return None
        return self._successor(now) or self._needed(now)

    def _resize(self) -> Resize | None:
        for kept in self.kept.values():
            nodes = kept.info.nodes if kept.info is not None else ()
            left = tuple(node for node in nodes if node not in kept.part_with)
            if kept.part_with and left and len(left) < len(nodes):
                return Resize(kept.fragment, kept.pilot.job_id, left)
        return None

    def _successor(self, now: float) -> Submit | None:
        """A pilot for the place of one whose walltime ends soon."""
        replaced = {kept.pilot.replaces for kept in self.kept.values()}
        for kept in list(self.kept.values()):
            pilot = kept.pilot
            if kept.stage is not PilotStage.RUNNING or kept.ends_at is None or pilot.fills_hole:
                continue
            if kept.fragment in replaced or pilot.replaces in self.kept:
                continue
            entry = self.entries[pilot.entry]
            walltime_s = None
            if kept.running_since is not None:
                walltime_s = kept.ends_at - kept.running_since
            lead_s = self.waits.lead_s(pilot.entry, walltime_s, entry.handover_s)
            if kept.ends_at - now > lead_s or len(self.staying(pilot.entry)) > self._target(
                pilot.entry
            ):
                continue
            shape = self.trials.choose(now, pilot.entry, len(entry.shapes))
            if shape is not None:
                left = max(kept.ends_at - now, 0.0)
                why = f"{kept.fragment} reaches its walltime in {left:.0f} s"
                return self._submit(now, pilot.entry, shape, why, replaces=kept.fragment)
        return None

    def _needed(self, now: float) -> Submit | None:
        """Of the entries that lack pilots the one that has the fewest: all are filled alike."""
        lacking = []
        for number, entry in enumerate(self.entries):
            there = len(self.staying(number))
            missing = self._target(number) - there
            if missing <= 0 or self.count(number) >= entry.most:
                self._said_stuck.pop(number, None)
            else:
                lacking.append((there, number, missing))
        for _, number, missing in sorted(lacking):
            entry = self.entries[number]
            shape = self.trials.choose(now, number, len(entry.shapes))
            if shape is not None:
                return self._submit(now, number, shape, f"{missing} missing")
            self._say_stuck(now, number)
        return None

    def _say_stuck(self, now: float, number: int) -> None:
        entry = self.entries[number]
        why = self.trials.stuck(now, number, len(entry.shapes))
        if why and self._said_stuck.get(number) != why:
            self._said_stuck[number] = why
            self._tell(f"no more {entry.gpu_type} pilots are submitted for now: {why}", True,
                       what="stopped", entry=number, why=why)  # fmt: skip

    def _submit(self, now: float, number: int, shape: int, why: str, replaces: str = "") -> Submit:
        form, entry = self.entries[number].shapes[shape], self.entries[number]
        pilot = Pilot(
            fragment=self.free_name(entry.gpu_type),
            job_id="",
            partition=entry.partition,
            gpu_type=entry.gpu_type,
            gpus=form.gpus,
            nodes=form.nodes,
            entry=number,
            replaces=replaces,
        )
        return self.begin(now, pilot, why)

    def begin(self, now: float, pilot: Pilot, why: str) -> Submit:
        """Write down that this pilot is about to be submitted."""
        assert pilot.fragment not in self.kept and not pilot.job_id, pilot
        self.kept[pilot.fragment] = KeptPilot(pilot, now)
        self._tell(f"{pilot.fragment} is submitted: {why}", what="submit",
                   fragment=pilot.fragment, why=why)  # fmt: skip
        return Submit(pilot)

    # ------------------------------------------------------------------ what came of a call

    def submitted(self, now: float, fragment: str, job_id: str) -> None:
        kept, self._no_answers = self.kept[fragment], 0
        self._settle(kept, job_id, now)

    def _settle(self, kept: KeptPilot, job_id: str, now: float) -> None:
        """It is known that the intent was carried out."""
        kept.pilot = msgspec.structs.replace(kept.pilot, job_id=job_id)
        kept.stage = PilotStage.ENDING if kept.ending else PilotStage.WAITING
        kept.cancel, kept.since, kept.unsure = bool(kept.ending), now, False

    def refused(self, now: float, fragment: str, said: str) -> None:
        """Slurm said no; nothing was submitted."""
        kept, self._no_answers = self.kept.pop(fragment), 0
        found, pilot = refusal(said), kept.pilot
        shape = self._shape_of(pilot)
        if found.lasting:
            self.trials.give_up(now, pilot.entry, shape, found.sentence)
        else:
            self.trials.fruitless(now, pilot.entry, shape, found.sentence)
        self._tell(f"{fragment}: Slurm refuses it: {found.sentence}", True, what="refused",
                   fragment=fragment, why=found.sentence)  # fmt: skip

    def unanswered(self, now: float, fragment: str) -> None:
        """Nobody knows whether it was submitted: it counts, and Slurm is left in peace."""
        kept = self.kept[fragment]
        kept.unsure, kept.since = True, now
        self.no_answer(now)

    def no_answer(self, now: float) -> None:
        """Slurm does not answer: ask for less, each time twice as long."""
        settings = self.settings
        wait_s = min(settings.retry_s * 2.0 ** min(self._no_answers, 30), settings.retry_most_s)
        self._no_answers += 1
        self._quiet_until = now + wait_s

    def resized(self, fragment: str, nodes: Sequence[str], why_not: str = "") -> None:
        """The job holds these nodes only; or it holds all as before, because Slurm said no."""
        kept = self.kept[fragment]
        gone, kept.part_with = kept.part_with, frozenset()
        words = ", ".join(sorted(gone))
        if why_not:
            self._tell(f"{words} of {fragment} is idle but cannot be given back: {why_not}", True,
                       what="not resized", fragment=fragment, why=why_not)  # fmt: skip
            return
        kept.pilot = msgspec.structs.replace(kept.pilot, nodes=len(nodes))
        if kept.info is not None:
            kept.info = replace(kept.info, nodes=tuple(nodes))
        self._tell(f"{fragment} has given {words} back", what="resized", fragment=fragment,
                   nodes=list(nodes))  # fmt: skip

    def cancelled(self, jobs: Iterable[str]) -> None:
        """Slurm has been told to end them; that they have ended shows later."""
        for job in jobs:
            self._strays.pop(job, None)
        done = set(jobs)
        for kept in self.kept.values():
            kept.cancel = kept.cancel and kept.pilot.job_id not in done

    # ------------------------------------------------------------------ what Slurm says

    def looked(self, now: float, look: Look) -> None:
        """Take an answer about all jobs in."""
        self._find_intents(now, look.ours)
        for kept in list(self.kept.values()):
            info = look.infos.get(kept.pilot.job_id) if kept.pilot.job_id else None
            if info is not None:
                self._heard(now, kept, info)

    def _find_intents(self, now: float, ours: Sequence[JobInfo]) -> None:
        known = {kept.pilot.job_id for kept in self.kept.values()}
        strays: dict[str, int] = {}
        for info in ours:
            fragment = info.name.partition(".")[2]
            if info.id in known or not self._is_pilot(fragment):
                continue
            kept = self.kept.get(fragment)
            if kept is not None and kept.stage is PilotStage.INTENT:
                self._settle(kept, info.id, now)
                self._tell(f"{fragment}: its job {info.id} was submitted all the same")
            else:
                strays[info.id] = self._strays.get(info.id, 0) + 1
                if strays[info.id] == 2:
                    self._tell(f"job {info.id} ({info.name}) is one too many: it is cancelled",
                               True, what="stray", job=info.id)  # fmt: skip
        self._strays = strays
        for kept in list(self.kept.values()):
            late = now - kept.since >= self.settings.unsure_s
            if kept.stage is PilotStage.INTENT and kept.unsure and late:
                del self.kept[kept.fragment]
                why = "its submission had no answer, and no such job has come"
                self.trials.fruitless(now, kept.pilot.entry, self._shape_of(kept.pilot), why)
                self._tell(f"{kept.fragment}: {why}", what="lost intent", fragment=kept.fragment)

    def _is_pilot(self, fragment: str) -> bool:
        gpu_type, _, number = fragment.rpartition("-")
        return number.isdecimal() and any(entry.gpu_type == gpu_type for entry in self.entries)

    def _heard(self, now: float, kept: KeptPilot, info: JobInfo) -> None:
        if not info.known or info.state is JobState.UNKNOWN:
            self._on_unknown(now, kept, info)
            return
        kept.unknown_since, kept.info = None, info
        if info.state.over:
            self._ended(now, kept, f"{info.state} {info.reason}".strip(), info)
            return
        self._on_active(now, kept, info)
        if info.held:
            self._once(kept, "held", f"job {info.id} of {kept.fragment} waits for somebody to "
                       f"release it: {info.reason}")  # fmt: skip
        elif info.state is JobState.PENDING and explain(info.code).verdict is PendingVerdict.NEVER:
            self._once(kept, info.code, f"job {info.id} of {kept.fragment} cannot start: "
                       f"{info.reason}")  # fmt: skip
        if info.orphaned and "orphaned" not in kept.told:
            kept.cancel = True
            self._once(kept, "orphaned", f"job {info.id} of {kept.fragment} has lost its batch "
                       "host and runs without its script: it is cancelled")  # fmt: skip

    def _on_active(self, now: float, kept: KeptPilot, info: JobInfo) -> None:
        running = info.state in (JobState.RUNNING, JobState.COMPLETING, JobState.SUSPENDED)
        kept.ends_at = None if info.end_in_s is None or not running else now + info.end_in_s
        if running and kept.running_since is None:
            kept.running_since = now - (info.started_ago_s or 0.0)
            if kept.running_since >= kept.since:  # else it was submitted by another head
                self.waits.queued(kept.pilot.entry, kept.running_since - kept.since)
            if kept.stage is not PilotStage.ENDING:
                kept.stage = PilotStage.RUNNING
        elif not running and kept.running_since is not None:
            kept.running_since, kept.joined, kept.since = None, False, now  # requeued
            kept.draining = False
            if kept.stage is not PilotStage.ENDING:
                kept.stage = PilotStage.WAITING
        if kept.stage is PilotStage.ENDING:
            self._let_go(kept)
        elif kept.stage is PilotStage.WAITING:
            self._give_way(now, kept, info)

    def _give_way(self, now: float, kept: KeptPilot, info: JobInfo) -> None:
        """A pilot that Slurm does not start makes place for another shape."""
        pilot, waited_s = kept.pilot, now - kept.since
        if pilot.fills_hole:
            if waited_s >= self.settings.hole_s:
                self.end(kept.fragment, f"the hole it was for is gone ({info.reason})")
                self.trials.fruitless(now, pilot.entry, self._shape_of(pilot), "holes are gone")
            return
        entry, shape = self.entries[pilot.entry], self._shape_of(pilot)
        never = explain(info.code).verdict is PendingVerdict.NEVER and waited_s >= _NEVER_S
        if not (never or waited_s >= self.settings.waiting_s):
            return
        if not self.trials.alternative(now, pilot.entry, len(entry.shapes), shape):
            return
        why = f"{pilot.gpus} x {pilot.nodes} has waited {waited_s:.0f} s ({info.reason})"
        self.trials.give_up(now, pilot.entry, shape, why, self.settings.waiting_s)
        self.end(kept.fragment, f"it gives way to another shape: {why}")

    def _on_unknown(self, now: float, kept: KeptPilot, info: JobInfo) -> None:
        if info.known or kept.here:
            return  # a state that cannot be read, or a pilot that speaks for itself
        kept.unknown_since = now if kept.unknown_since is None else kept.unknown_since
        if now - kept.unknown_since >= self.settings.unknown_s:
            self._words.append(PilotEnded(kept.fragment, info.reason))
            self._ended(now, kept, info.reason, None)

    def _ended(self, now: float, kept: KeptPilot, how: str, info: JobInfo | None) -> None:
        del self.kept[kept.fragment]
        self._words.append(Forget(kept.fragment))
        for other in self.kept.values():
            if other.pilot.replaces == kept.fragment:  # the name may become another's
                other.pilot = msgspec.structs.replace(other.pilot, replaces="")
        pilot, shape = kept.pilot, self._shape_of(kept.pilot)
        if kept.drained and not pilot.fills_hole:
            self.away[kept.fragment] = pilot.entry
        if kept.ending:
            self._tell(f"{kept.fragment} has ended: {kept.ending}", what="ended",
                       fragment=kept.fragment, why=kept.ending)  # fmt: skip
            return
        ran_s = 0.0 if kept.running_since is None else now - kept.running_since
        code = None if info is None else info.exit_code
        own = info is not None and info.state in _OWN_FAULTS and code not in _NO_FAULT_CODES
        told = f"{kept.fragment}: job {pilot.job_id} has ended: {how}"
        long = ran_s >= self.settings.quick_death_s
        if (kept.joined or not own) if long else (kept.joined and not own):
            self.trials.lasted(pilot.entry, shape)
        elif not own:
            self.trials.fruitless(now, pilot.entry, shape, how)
        elif self.trials.died(now, pilot.entry, shape, f"{how}, see flexslurm logs"):
            told += f"; {self.trials.of(pilot.entry, shape).why}"
        self._tell(told, True, what="ended", fragment=kept.fragment, why=how)

    # ------------------------------------------------------------------ what the head sees

    def present(self, now: float, fragments: Mapping[str, Present]) -> None:
        """The agents that are here; a successor that is ready relieves the one it replaces."""
        for kept in list(self.kept.values()):
            seen = fragments.get(kept.fragment)
            kept.here, kept.serving = seen is not None, seen is not None and seen.serving
            if seen is None or not seen.ready:
                continue
            if not kept.joined:
                kept.joined = True
                if kept.running_since is not None:
                    self.waits.started(kept.pilot.entry, now - kept.running_since)
            before = self.kept.get(kept.pilot.replaces)
            if before is not None and not before.ending:
                self.end(before.fragment, f"{kept.fragment} has taken its place")
