"""A pool that nobody keeps: the pilots of one allocation, or of `keeping.enabled: false`.

It stands where `Pool` stands. On an operator's word it starts an ended pilot again; it never
starts, replaces or ends one by itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import msgspec

from flexslurm.config.service import Service
from flexslurm.config.site import Site
from flexslurm.control.events import Cordon, Event
from flexslurm.control.keeper_load import ServiceLoad
from flexslurm.control.keeper_values import Call, Look, Submit
from flexslurm.control.members import Members
from flexslurm.errors import FlexslurmError, ServiceError
from flexslurm.head.pilot_specs import pilot_spec
from flexslurm.slurm.job_names import UNSENT
from flexslurm.slurm.jobs import JobInfo
from flexslurm.slurm.pilot import Submitter
from flexslurm.wire.service_dir import Pilot, ServiceDir

log = logging.getLogger(__name__)

_ENDING_S = 60.0
"""One that is wanted back while it still ends is started again if it has ended by then."""
_MOST_TRIES = 3
"""Where Slurm does not answer."""
_CLOSE_S = 10.0


@dataclass(slots=True)
class _Wish:
    """A pilot that is to be started again."""

    until: float
    """Without an end by then, it has stayed."""
    unsure: bool
    """It may have been submitted already: nobody heard the answer."""
    tries: int = 0


class UnkeptPool:
    """`run_call` and `look` are the poller's, everything else the head's loop's."""

    def __init__(
        self,
        service: Service,
        site: Site,
        directory: ServiceDir,
        cluster: str,
        submitter: Submitter,
        *,
        tell: Callable[[Event], None],
        record: Callable[[dict[str, Any]], None],
        hurry: Callable[[], None] = lambda: None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`hurry`: have the poller come sooner; `tell`, `record` as `Pool`'s."""
        self._service, self._site, self._directory = service, site, directory
        self._cluster, self._submitter = cluster, submitter
        self._tell, self._record, self._hurry, self._now = tell, record, hurry, now
        self._wishes: dict[str, _Wish] = {}
        self._failed: dict[str, str] = {}
        self._infos: dict[str, JobInfo] = {}
        self._here: set[str] = set()
        """Fragments that have agents."""
        self._out: asyncio.Future[None] | None = None
        self._closed = False

    @property
    def pilots(self) -> tuple[Pilot, ...]:
        """As they are written down: the launcher writes too."""
        found = self._directory.pilots()
        return found.pilots if found is not None else ()

    # ------------------------------------------------------------------ for the operator

    def bring_back(self, fragment: str) -> str:
        """Start it again if it has ended, in words; if it ends within a minute, then. Else ''."""
        pilot = next((p for p in self.pilots if p.fragment == fragment), None)
        if pilot is None:
            return ""
        ended = self._has_ended(pilot)
        self._failed.pop(fragment, None)
        self._wishes[fragment] = _Wish(self._now() + _ENDING_S, pilot.job_id == UNSENT)
        self._hurry()
        if not ended:
            return ""
        self._tell(Cordon(fragment, cordon=False, gone=True))
        return f"{fragment} had ended: it is started again"

    def release(self, node: str, members: Members) -> str:
        """Raises ServiceError: a pilot goes whole, or not at all."""
        raise ServiceError(
            f"nobody keeps this pool, so that '{node}' cannot be given back alone",
            hint="flexslurm drain ends a whole pilot; see keeping.enabled",
        )

    def lines(self) -> tuple[str, ...]:
        """What there is to say of pilots that are not there."""
        ended = [pilot.fragment for pilot in self.pilots if self._has_ended(pilot)]
        return tuple(
            f"{name} cannot be started again: {self._failed[name]}"
            if name in self._failed
            else f"{name} is being started again"
            if name in self._wishes
            else f"{name} has ended: flexslurm cordon --undo {name} starts it again"
            for name in ended
        )

    # ------------------------------------------------------------------ for the poller

    def look(self, job_ids: list[str]) -> Look:
        """Ask about all jobs, in one call; blocks. Raises SlurmUnavailable."""
        return Look(self._submitter.states(job_ids), ())

    def looked(self, look: Look) -> None:
        for job_id in look.infos:
            before, info = self._infos.get(job_id), look.infos[job_id]
            if info.known or before is None or not before.state.over:
                self._infos[job_id] = info  # an end is not forgotten when Slurm forgets the job
        for job_id in self._infos.keys() - look.infos.keys():
            del self._infos[job_id]
        pilots = {pilot.fragment: pilot for pilot in self.pilots}
        for fragment, wish in list(self._wishes.items()):
            pilot = pilots.get(fragment)
            stays = pilot is not None and not self._has_ended(pilot) and self._now() >= wish.until
            if pilot is None or stays:
                del self._wishes[fragment]

    def next_call(self) -> Call | None:
        try:
            found = self._directory.pilots() if self._wishes and not self._closed else None
        except ServiceError as error:
            log.warning("nothing is started again now: %s", error.message)
            return None
        if found is None or found.head_job == UNSENT:  # the launcher still writes
            return None
        return next((Submit(p) for p in found.pilots if self._is_due(p)), None)

    def _is_due(self, pilot: Pilot) -> bool:
        return pilot.fragment in self._wishes and self._has_ended(pilot)

    def _has_ended(self, pilot: Pilot) -> bool:
        if pilot.job_id == UNSENT:
            return True
        info = self._infos.get(pilot.job_id)
        if info is None:
            return False
        return info.state.over or (not info.known and pilot.fragment not in self._here)

    async def run_call(self, call: Call) -> None:
        """Goes on to its end when the head's task is cancelled meanwhile.

        Raises nothing of the world: what it raised would end the head.
        """
        assert isinstance(call, Submit), call
        self._out = asyncio.ensure_future(self._start(call.pilot))
        await asyncio.shield(self._out)

    async def _start(self, before: Pilot) -> None:
        fragment, wish = before.fragment, self._wishes.get(before.fragment)
        if wish is None:
            return  # a drain has taken it back just now
        pilot = msgspec.structs.replace(before, job_id=UNSENT)
        spec = pilot_spec(pilot, self._service, self._site, self._directory, self._cluster)
        try:
            self._write(pilot)
            if wish.unsure:
                found = await asyncio.to_thread(self._submitter.find, spec.name)
                job = found[0] if found else ""
            else:
                job = await asyncio.to_thread(self._submitter.submit, spec)
            wish.unsure = bool(job)  # until it is written down
            if job:
                self._write(msgspec.structs.replace(pilot, job_id=job))
        except (FlexslurmError, OSError) as error:
            self._not_started(before, wish, error)
            return
        if not job:
            return  # it is submitted in the next turn
        self._wishes.pop(fragment, None)
        log.info("%s is started again: job %s", fragment, job)
        self._record({"event": "pool", "what": "started again", "fragment": fragment, "job": job})

    def _not_started(self, before: Pilot, wish: _Wish, error: FlexslurmError | OSError) -> None:
        fragment, wish.tries = before.fragment, wish.tries + 1
        if isinstance(error, FlexslurmError) and error.transient and wish.tries < _MOST_TRIES:
            wish.unsure = True
            log.warning("%s is not started again yet: %s", fragment, error.message)
            return
        why = error.message if isinstance(error, FlexslurmError) else str(error)
        self._wishes.pop(fragment, None)
        self._failed[fragment] = why
        log.warning("%s cannot be started again: %s", fragment, why)
        if not wish.unsure:
            with contextlib.suppress(FlexslurmError, OSError):  # the disk may be what failed
                self._write(before)

    def _write(self, pilot: Pilot) -> None:
        """Put it in its place in the list of pilots. Raises OSError, ServiceError."""
        found = self._directory.pilots()
        if found is None:
            raise ServiceError("the service is being stopped")
        pilots = tuple(pilot if p.fragment == pilot.fragment else p for p in found.pilots)
        self._directory.write_pilots(msgspec.structs.replace(found, pilots=pilots))

    # ------------------------------------------------------------------ for the head's loop

    def tick(
        self, members: Members, load: Callable[[], ServiceLoad], serving: Iterable[str]
    ) -> None:
        """Take in who is here, and who is told to go."""
        self._here = {agent.hello.fragment for agent in members.agents.values()}
        for fragment in members.draining & self._wishes.keys():
            del self._wishes[fragment]

    def hold(self) -> None:
        """No more calls from here on."""
        self._closed = True

    async def close(self) -> None:
        """No more calls; wait for the one that is out, so that its job is known to `stop`."""
        self._closed = True
        if self._out is not None:
            await asyncio.wait({self._out}, timeout=_CLOSE_S)
