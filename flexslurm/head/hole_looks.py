"""Looks for holes in Slurm's schedule, one call at a time, more rarely while there are none."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from flexslurm.config.service import Service
from flexslurm.config.site import Site
from flexslurm.control.keeper import PoolKeeper
from flexslurm.control.keeper_values import Submit
from flexslurm.slurm.backfill import NodeRoom, fill, holes, wanted_from
from flexslurm.slurm.client import SlurmClient
from flexslurm.slurm.command import backoff_s
from flexslurm.slurm.gpu_request import gpu_request
from flexslurm.wire.service_dir import Pilot


class HoleLooks:
    """`step` asks Slurm, and blocks; after the third answer `submission` may find what fits."""

    def __init__(
        self,
        service: Service,
        site: Site,
        client: SlurmClient,
        *,
        now: Callable[[], float] = time.monotonic,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._service, self._site, self._client = service, site, client
        self._now, self._clock = now, clock
        keeping = service.keeping
        self._retry_s, self._retry_most_s = keeping.retry, keeping.retry_most
        self._waits: Iterator[float] = backoff_s(self._retry_s, self._retry_most_s)
        self._next_at = now()
        self._rooms: list[NodeRoom] | None = None
        self._reservations: list[dict[str, str]] | None = None
        self._whole: tuple[list[NodeRoom], dict[str, float]] | None = None

    def due(self, keeper: PoolKeeper) -> bool:
        """Whether the next look has its time, and there may be more pilots at all."""
        room = any(keeper.count(n) < entry.most for n, entry in enumerate(keeper.entries))
        return room and (self._rooms is not None or self._now() >= self._next_at)

    def step(self) -> None:
        """One call. Raises SlurmError."""
        if self._rooms is None:
            self._rooms = self._client.rooms()
        elif self._reservations is None:
            self._reservations = self._client.reservations()
        else:
            wanted = wanted_from(self._reservations, self._client.starts())
            self._whole = (self._rooms, wanted)
            self._rooms = self._reservations = None

    def failed(self) -> None:
        """No answer: from the beginning, later."""
        self._rooms = self._reservations = self._whole = None
        self._next_at = self._now() + next(self._waits)

    def submission(self, now: float, keeper: PoolKeeper) -> Submit | None:
        """A pilot for a hole, of the first entry that has one; of each whole look at most one."""
        if self._whole is None:
            return None
        (rooms, wanted), self._whole = self._whole, None
        for number in range(len(keeper.entries)):
            found = self._pilot(number, now, keeper, rooms, wanted)
            if found is not None:
                self._waits = backoff_s(self._retry_s, self._retry_most_s)
                self._next_at = self._now() + self._retry_s
                return found
        self._next_at = self._now() + next(self._waits)
        return None

    def _pilot(
        self,
        number: int,
        now: float,
        keeper: PoolKeeper,
        rooms: list[NodeRoom],
        wanted: dict[str, float],
    ) -> Submit | None:
        entry, keeping = keeper.entries[number], self._service.keeping
        waiting = any(k.pilot.fills_hole and not k.running_since for k in keeper.of_entry(number))
        if keeper.count(number) >= entry.most or waiting:
            return None
        request = gpu_request(entry.gpu_type, self._site)
        found = holes(rooms, wanted, request, entry.partition or "", self._clock())
        for index, shape in enumerate(entry.shapes):
            trial = keeper.trials.of(number, index)
            if keeper.trials.given_up(now, number, index) or now < trial.not_before:
                continue
            most_s = min(keeping.backfill_most, self._longest(entry.partition))
            fits = fill(found, shape.gpus, shape.nodes, keeping.backfill_least, most_s)
            if fits is not None:
                pilot = Pilot(
                    fragment=keeper.free_name(entry.gpu_type), job_id="",
                    partition=entry.partition, gpu_type=entry.gpu_type, gpus=shape.gpus,
                    nodes=shape.nodes, entry=number, walltime_s=fits.walltime_s,
                    least_s=fits.least_s, fills_hole=True,
                )  # fmt: skip
                why = f"{', '.join(fits.nodes)} is free for {fits.walltime_s / 60:.0f} min"
                return keeper.begin(now, pilot, why)
        return None

    def _longest(self, partition: str | None) -> float:
        """The walltime a partition allows."""
        known = self._site.partitions.get(partition or "")
        longest = known.max_walltime if known is not None else None
        return float("inf") if longest is None else longest
