"""Keeps the pool: does what the pool keeper decides, one call to Slurm at a time; decides nothing.

What is about to be submitted is written down before, and its job's id after. The poller looks in
between: of two calls in a row one is always a look.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec

from flexslurm.config.service import Service
from flexslurm.config.site import Site
from flexslurm.control.events import Cordon, Event, PartNode, PilotGone
from flexslurm.control.keeper import PoolKeeper
from flexslurm.control.keeper_load import LoadJudge, ServiceLoad, pool_lines, resize
from flexslurm.control.keeper_values import (
    Call,
    CancelJobs,
    Drain,
    Forget,
    Look,
    PilotEnded,
    Present,
    Resize,
    SeekHoles,
    Submit,
    Tell,
)
from flexslurm.control.members import AgentRecord, AgentState, Members, signature_of
from flexslurm.errors import FlexslurmError, ServiceError
from flexslurm.gear import Gear, NoGear, Signature
from flexslurm.head.hole_looks import HoleLooks
from flexslurm.head.ledger import Figures
from flexslurm.head.pilot_specs import entries_of, keeper_settings, load_settings, pilot_spec
from flexslurm.head.unkept import UnkeptPool
from flexslurm.slurm.job_names import UNSENT
from flexslurm.slurm.pilot import SlurmSubmitter, Submitter
from flexslurm.wire.service_dir import Pilot, Pilots, ServiceDir

log = logging.getLogger(__name__)

_LAUNCH_S = 30.0
"""How long the launcher may take to write down the head's own job."""
_CLOSE_S = 10.0
_LOAD_EVERY_S = 1.0
_SEE_EVERY_S = 0.2


class Pool:
    """The keeper's hands. `run_call` is the poller's, everything else the head's loop's."""

    def __init__(
        self,
        service: Service,
        site: Site,
        directory: ServiceDir,
        pilots: Pilots,
        submitter: Submitter,
        *,
        tell: Callable[[Event], None],
        record: Callable[[dict[str, Any]], None],
        holds: Callable[[Signature], bool] = lambda signature: True,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`record` writes to the journal; `tell` takes events for the controller.

        `holds`: whether an allocation can hold the model.
        """
        self._service, self._site, self._directory = service, site, directory
        self._cluster, self._submitter = pilots.cluster, submitter
        self._tell, self._record, self._now, self._holds = tell, record, now, holds
        self.keeper = PoolKeeper(
            entries_of(service), keeper_settings(service, site), pilots.pilots, now(),
            pilots.wanted, pilots.drained,
        )  # fmt: skip
        self._judge = LoadJudge(load_settings(service))
        self._began, self._settled, self._closed = now(), False, False
        self._counted_off = bool(pilots.wanted)
        """Whether what is said to drain now has been counted off, by the head before this one."""
        self._written = (pilots.pilots, pilots.wanted, pilots.drained)
        self._out: asyncio.Future[Any] | None = None
        self._submitting = ""
        self._holes: HoleLooks | None = None
        if service.keeping.backfill and isinstance(submitter, SlurmSubmitter):
            self._holes = HoleLooks(service, site, submitter.client, now=now)
        self._parting: set[tuple[str, str]] = set()
        """Nodes that are to be given back, with their fragments, and whose agents are here."""
        self._load_at = self._seen_at = float("-inf")

    # ------------------------------------------------------------------ for the poller

    @property
    def pilots(self) -> tuple[Pilot, ...]:
        return self.keeper.pilots()

    def look(self, job_ids: list[str]) -> Look:
        """Ask Slurm about all jobs, in one call; blocks. Raises SlurmUnavailable."""
        infos, ours = self._submitter.survey(job_ids)
        return Look(infos, ours)

    def looked(self, look: Look) -> None:
        self.keeper.looked(self._now(), look)
        self._say()
        self._write()

    def next_call(self) -> Call | None:
        if self._closed or not self._is_settled():
            return None
        now = self._now()
        call = self.keeper.next_call(now)
        if call is not None or self._holes is None:
            return call
        fill = self._holes.submission(now, self.keeper)
        if fill is not None:
            return fill
        if self._holes.due(self.keeper):
            return SeekHoles()
        return None

    def _is_settled(self) -> bool:
        """Whether the launcher has written its last: from here on the list is ours."""
        if not self._settled:
            pilots = self._directory.pilots()
            launching = pilots is not None and pilots.head_job == UNSENT
            self._settled = not launching or self._now() - self._began > _LAUNCH_S
        return self._settled

    async def run_call(self, call: Call) -> None:
        """Do one call, and tell the keeper what came of it."""
        self._say()
        match call:
            case Submit(pilot):
                await self._submit(pilot)
            case CancelJobs(jobs):
                await self._cancel(jobs)
            case Resize():
                await self._resize(call)
            case SeekHoles():
                await self._seek()
        self._say()
        self._write()

    async def _submit(self, pilot: Pilot) -> None:
        if not self._write():
            self.keeper.refused(self._now(), pilot.fragment, "it cannot be written down")
            return
        service, site, directory = self._service, self._site, self._directory
        spec = pilot_spec(pilot, service, site, directory, self._cluster)
        self._submitting = pilot.fragment
        try:
            job = await self._in_thread(self._submitter.submit, spec)
        except FlexslurmError as error:
            self._submitting = ""
            if error.transient:
                self.keeper.unanswered(self._now(), pilot.fragment)
            else:
                self.keeper.refused(self._now(), pilot.fragment, error.message)
            return
        self._submitted(job)

    def _submitted(self, job: str) -> None:
        self.keeper.submitted(self._now(), self._submitting, job)
        log.info("%s is job %s", self._submitting, job)
        self._submitting = ""

    async def _cancel(self, jobs: tuple[str, ...]) -> None:
        try:
            await self._in_thread(self._submitter.cancel, jobs)
        except FlexslurmError as error:
            log.warning("cannot cancel %s now: %s", ", ".join(jobs), error.message)
            self.keeper.no_answer(self._now())
        else:
            self.keeper.cancelled(jobs)

    async def _resize(self, call: Resize) -> None:
        try:
            await self._in_thread(self._submitter.resize, call.job, call.nodes)
        except FlexslurmError as error:
            if error.transient:
                self.keeper.no_answer(self._now())
            else:
                self.keeper.resized(call.fragment, (), error.message)
        else:
            self.keeper.resized(call.fragment, call.nodes)

    async def _seek(self) -> None:
        assert self._holes is not None
        try:
            await self._in_thread(self._holes.step)
        except FlexslurmError as error:
            log.info("no holes can be seen now: %s", error.message)
            self._holes.failed()

    def release(self, node: str, members: Members) -> str:
        """Begin to give a node back; what follows, in words. Raises ServiceError for no node."""
        agents = [agent for agent in members.agents.values() if agent.hello.node == node]
        if not agents:
            known = ", ".join(sorted({agent.hello.node for agent in members.agents.values()}))
            raise ServiceError(f"there is no node '{node}' in the service", hint=f"it has {known}")
        whole = [a.hello.fragment for a in agents if self._is_alone(a, members)]
        for fragment in {agent.hello.fragment for agent in agents} - set(whole):
            kept = self.keeper.kept.get(fragment)
            if kept is not None and kept.info is not None and kept.info.batch_host == node:
                raise ServiceError(
                    f"the script of {fragment} runs on '{node}': without it the job is an orphan",
                    hint=f"release another of its nodes, or all of it: flexslurm drain {fragment}",
                )
        for fragment in whole:
            self._tell(Cordon(fragment, cordon=True, drain=True))
        if len(whole) < len(agents):
            self._parting |= {
                (a.hello.fragment, node) for a in agents if a.hello.fragment not in whole
            }
            self._tell(PartNode(node))
            return f"{node}: it is given back once nothing of it is used; its pilot goes on"
        return f"{node}: its pilot ends once nothing of it is used"

    def _is_alone(self, agent: AgentRecord, members: Members) -> bool:
        """Whether no other node of its pilot is to stay."""
        others = members.of_fragment(agent.hello.fragment)
        return all(a is agent or a.parting for a in others)

    async def _in_thread(self, act: Callable[..., Any], *arguments: Any) -> Any:
        """A call that goes on to its end when the head's task is cancelled meanwhile."""
        self._out = asyncio.ensure_future(asyncio.to_thread(act, *arguments))
        return await asyncio.shield(self._out)

    def hold(self) -> None:
        """No more calls from here on."""
        self._closed = True

    async def close(self) -> None:
        """No more calls; wait for the one that is out, so that its job is known to `stop`."""
        self._closed = True
        if self._out is None:
            return
        await asyncio.wait({self._out}, timeout=_CLOSE_S)
        failed = self._out.exception() if self._out.done() else None
        if self._out.done() and failed is None and self._submitting:
            self._submitted(self._out.result())
            self._write()

    # ------------------------------------------------------------------ for the head's loop

    def tick(
        self, members: Members, load: Callable[[], ServiceLoad], serving: Iterable[str]
    ) -> None:
        """Take in who is here and how busy the service is; call it a few times a second."""
        now = self._now()
        if now < self._seen_at + _SEE_EVERY_S:
            return
        self._seen_at = now
        self.keeper.present(now, _present(members, self.keeper.kept, set(serving)))
        for fragment, kept in self.keeper.kept.items():
            if fragment in members.draining:
                self.keeper.drained_by_hand(fragment, before=self._counted_off)
            elif kept.drained:
                self.keeper.taken_back(fragment)
        self._counted_off = False
        self._part(members)
        if now >= self._load_at + _LOAD_EVERY_S:
            self._load_at = now
            step, why = self._judge.take(now, load())
            if step and not self._service.keeping.backfill:
                resize(self.keeper, step, why, lambda name: self._may_spare(now, name, members))
        for fragment in [f for f in members.cordoned if f in self._forgotten(members)]:
            self._tell(Cordon(fragment, cordon=False, gone=True))
        self._say()
        self._write()

    def _may_spare(self, now: float, fragment: str, members: Members) -> bool:
        """While there are requests the model stays where they find it."""
        left = (agent for agent in members.usable() if agent.hello.fragment != fragment)
        return self._judge.idle(now) or self._holds(signature_of(left))

    def _part(self, members: Members) -> None:
        """Nodes whose agents have ended are taken out of their jobs."""
        here = {(agent.hello.fragment, agent.hello.node) for agent in members.agents.values()}
        for fragment, node in sorted(self._parting - here):
            self._parting.discard((fragment, node))
            if fragment in self.keeper.kept:
                self.keeper.part(fragment, node)

    def bring_back(self, fragment: str) -> str:
        """Submit another for one that was drained and has ended, in words; '' where it was not."""
        if not self.keeper.bring_back(fragment):
            return ""
        # the next of this name is not to be drained as it was
        self._tell(Cordon(fragment, cordon=False, gone=True))
        return f"{fragment} had ended: another is submitted in its place"

    def lines(self) -> tuple[str, ...]:
        """How the pool is, for people."""
        return pool_lines(self.keeper, self._now())

    def _forgotten(self, members: Members) -> set[str]:
        """Cordoned names that no pilot and no agent bears: the next one is another."""
        here = {agent.hello.fragment for agent in members.agents.values()}
        return members.cordoned - here - self.keeper.kept.keys()

    def _say(self) -> None:
        for word in self.keeper.words():
            match word:
                case Tell(text, warning, record):
                    log.log(logging.WARNING if warning else logging.INFO, "%s", text)
                    if record is not None:
                        self._record(dict(record))
                case Drain(fragment, _):
                    self._tell(Cordon(fragment, cordon=True, drain=True))
                case PilotEnded(fragment, why):
                    self._tell(PilotGone(fragment, why))
                case Forget():
                    pass  # its cordon ends with its last agent, in `tick`

    def _write(self) -> bool:
        """Write down what there is, where it is another than before; whether it is on disk."""
        keeper = self.keeper
        state = (keeper.pilots(), tuple(keeper.wanted), dict(keeper.away))
        if state == self._written or not self._is_settled():
            return state == self._written
        try:
            before = self._directory.pilots()
            if before is None:
                return False  # `stop` has taken it away
            made = msgspec.structs.replace(
                before, pilots=state[0], wanted=state[1], drained=state[2]
            )
            self._directory.write_pilots(made)
        except (OSError, FlexslurmError) as error:
            log.warning("the list of pilots cannot be written: %s", error)
            return False
        self._written = state
        return True


def open_pool(
    service: Service,
    site: Site,
    directory: ServiceDir,
    pilots: Pilots,
    submitter: Submitter,
    *,
    tell: Callable[[Event], None],
    record: Callable[[dict[str, Any]], None],
    choose: Callable[[Signature], Gear | NoGear],
    hurry: Callable[[], None] = lambda: None,
) -> Pool | UnkeptPool:
    """The pool of a service. An allocation is what it is: nobody keeps that.

    `choose`: the gear for an allocation; `hurry`: have the poller come sooner.
    """
    if pilots.cluster == "allocation" or not service.keeping.enabled:
        return UnkeptPool(
            service, site, directory, pilots.cluster, submitter,
            tell=tell, record=record, hurry=hurry,
        )  # fmt: skip
    return Pool(
        service, site, directory, pilots, submitter, tell=tell, record=record,
        holds=lambda signature: isinstance(choose(signature), Gear),
    )  # fmt: skip


def load_of(figures: Figures, max_batch: int) -> ServiceLoad:
    """The ledger's figures as the load."""
    totals = figures.replicas
    return ServiceLoad(
        running=totals.running,
        waiting=max(figures.live - totals.running, 0),
        seats=totals.replicas * max_batch,
        kv_used=totals.kv_used,
    )


def _present(members: Members, kept: Mapping[str, Any], serving: set[str]) -> dict[str, Present]:
    """Fragments of which there are agents; ready when each of its nodes has one that may serve."""
    by_fragment: dict[str, list[AgentRecord]] = {}
    for agent in members.agents.values():
        by_fragment.setdefault(agent.hello.fragment, []).append(agent)
    found = {}
    for fragment, agents in by_fragment.items():
        if fragment in kept:
            whole = len(agents) >= kept[fragment].pilot.nodes
            ready = whole and all(agent.state is AgentState.READY for agent in agents)
            found[fragment] = Present(ready, any(agent.id in serving for agent in agents))
    return found
