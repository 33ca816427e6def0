"""A whole head in played time, a pool and a queue: the load brings a pilot and lets it go again."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest
from fake_replica import make_request
from fake_slurm_queue import FakeQueue
from virtual_time import inline

from flexslurm.config.schema import parse_section
from flexslurm.config.service import Service
from flexslurm.config.site import Site
from flexslurm.gear import Estimates, Gear, NoGear, Replica, Signature, Stage
from flexslurm.head.pool import Pool, load_of
from flexslurm.slurm.jobs import JobInfo
from flexslurm.slurm.script import PilotSpec
from flexslurm.slurm.states import JobState
from flexslurm.wire.service_dir import Pilot, Pilots, ServiceDir
from tests.head_world import CONTEXT, HeadWorld
from tests.reshard_cases import BLOCK_TOKENS, LAYERS

SEATS = 4
INTERVAL_S = 5.0
SERVICE = """\
name: chat
model: {path: /m}
pool: [{gpu_type: a, gpus: 1, partition: p, count: 1, min_count: 1, max_count: 2}]
keeping: {high_for: 5s, low_for: 20s}
"""
SITE = "name: s\ngpu_types: {a: {}}\npartitions: {p: {}}\nslurm: {poll_interval: 5s}\n"


def gear_for(signature: str, replicas: int) -> Gear:
    """A replica on each GPU."""
    made = tuple(
        Replica((Stage("a", 1, 0, LAYERS, 64, node),), SEATS, 20, CONTEXT)
        for node in range(replicas)
    )
    estimates = Estimates(280.0 * replicas, 0.1, 0.01, 1000, 1.0)
    return Gear(signature, Signature.parse(signature), BLOCK_TOKENS, made, estimates)


class Cluster:
    """A submitter whose jobs begin at the next look and have an agent, until that is released."""

    def __init__(self, world: HeadWorld) -> None:
        self.world, self.queue = world, FakeQueue()

    def submit(self, spec: PilotSpec) -> str:
        fragment = spec.name.partition(".")[2]
        return self.queue.submit(Pilot(fragment, "", spec.partition, "a", spec.gpus, spec.nodes))

    def survey(self, ids: Sequence[str]) -> tuple[dict[str, JobInfo], tuple[JobInfo, ...]]:
        self.queue.now = self.world.now
        for job in self.queue.alive():
            mine = [a for a in self.world.agents.values() if a.fragment == job.pilot.fragment]
            if job.info.state is JobState.PENDING:
                self.queue.start(job.info.id)
                self.world.join(job.pilot.fragment, job.pilot.gpus)
            elif not any(agent.alive for agent in mine):
                self.queue.end(job.info.id, JobState.COMPLETED, 0)
        return self.queue.survey(list(ids))

    def cancel(self, ids: Sequence[str]) -> None:
        raise AssertionError(f"nothing here is to be killed: {ids}")


class World(HeadWorld):
    """A head as the product's: its pool looks and calls in turn, and ticks with it."""

    def __init__(self, home: Path) -> None:
        super().__init__(seed=7, memory_bytes=64 << 20)
        none = Signature()
        self.planner._known |= {
            none: NoGear(none, "there are no GPUs"),
            Signature.parse("a:1"): gear_for("a:1", 1),
            Signature.parse("a:1x2"): gear_for("a:1x2", 2),
        }
        self.cluster = Cluster(self)
        directory = ServiceDir(home / "svc")
        directory.create()
        directory.write_pilots(Pilots("slurm"))
        service = parse_section(Service, SERVICE, "service.yaml")
        self.pool = Pool(
            service, parse_section(Site, SITE, "site.yaml"), directory, Pilots("slurm"),
            self.cluster, tell=self.later, record=lambda record: None,  # type: ignore[arg-type]
            holds=lambda signature: isinstance(self.planner.choose(signature), Gear),
            now=lambda: self.now,
        )  # fmt: skip
        self.number, self.most = 0, 0
        self.at(INTERVAL_S, self._look)

    def _look(self) -> None:
        self.pool.looked(self.pool.look([p.job_id for p in self.pool.pilots if p.job_id]))
        self.most = max(self.most, len(self.cluster.queue.alive()))
        self.at(INTERVAL_S, self._call)

    def _call(self) -> None:
        call = self.pool.next_call()
        if call is not None:
            asyncio.run(self.pool.run_call(call))
        self.at(INTERVAL_S, self._look)

    def _tick(self) -> None:
        super()._tick()
        current = self.control.current
        serving = current.agents if current is not None else ()
        self.pool.tick(self.control.members, lambda: load_of(self.ledger.figures(), SEATS), serving)

    def load(self, seconds: float, streams: int) -> None:
        """Keep so many requests live."""
        end = self.now + seconds
        while self.now < end:
            while self.ledger.figures().live < streams:
                self.number += 1
                prompt = (1, 2, self.number % 23)
                self.submit(make_request(f"r{self.number}", prompt, 30, seed=self.number))
            self.run(0.1)

    def replicas(self) -> int:
        return len(self.control.current.replicas) if self.control.current is not None else 0


def test_the_load_brings_a_second_pilot_and_lets_it_go_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("asyncio.to_thread", inline)
    world = World(tmp_path)
    world.run_until(lambda: world.serves() and world.replicas() == 1, 60)
    world.load(4, streams=12)
    assert world.pool.keeper.wanted == [1], "a load that has not lasted yet"
    world.load(26, streams=12)
    assert world.serves() and world.replicas() == 2, world.describe()
    busy = [len(driver.running_kv()) for driver in world.effects.replicas.open.values()]
    assert len(busy) == 2 and min(busy) > 0, "both pilots work"
    world.load(15, streams=1)
    assert world.replicas() == 2, "a lull that has not lasted yet"
    world.load(40, streams=1)
    assert world.serves() and world.replicas() == 1, world.describe()
    states = [job.info.state for job in world.cluster.queue.jobs.values()]
    assert states == [JobState.RUNNING, JobState.COMPLETED]
    assert world.most == 2
    assert world.pool.lines() == ("1 of 1 a pilots run (1 to 2)",)
    world.run_until(lambda: world.ledger.empty, 60)
    world.run(5)
    world.check_answers()
    world.check_nothing_left()
