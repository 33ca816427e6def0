"""A service on a real Slurm whose streams never pause, and what Slurm's acts come to."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import leaks
import yaml
from submitter_suite import wait

from flexslurm.config.schema import load_section, parse_section
from flexslurm.config.site import Site
from flexslurm.messages import StatusAnswer
from flexslurm.slurm.client import SlurmClient
from flexslurm.slurm.sandbox import Sandbox
from flexslurm.slurm.sandbox_config import SandboxConfig
from flexslurm.wire.journal import read_journal
from tests.service_harness import (
    Ask,
    RunningService,
    oracle,
    running,
    some_asks,
    stream,
    tiny_service,
)

TABLE = "slurm-act"
"""Under this name an act's line goes into the test's report."""


class Load:
    """Streams that follow each other without a pause; every token is compared."""

    def __init__(self, endpoint: Callable[[], str], model: Path, width: int = 3) -> None:
        self._endpoint = endpoint
        self._asks = some_asks(width, 90, seed=3)
        self._expected = oracle(model, self._asks)
        self._now: list[Ask] = [Ask([], 0) for _ in self._asks]
        self._faults: list[str] = []
        self._done = [0] * width
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        self._stop.clear()
        self._threads = [
            threading.Thread(target=self._one, args=(i,), daemon=True)
            for i in range(len(self._asks))
        ]
        for thread in self._threads:
            thread.start()

    def _one(self, index: int) -> None:
        wanted = self._asks[index]
        while not self._stop.is_set() and not self._faults:
            ask = Ask(wanted.prompt, wanted.max_tokens, wanted.sampling)
            self._now[index] = ask
            stream(self._endpoint(), ask)
            if ask.error or ask.finish != "length":
                self._faults.append(f"stream {index} broke: {ask.error or ask.finish}")
            elif ask.tokens != self._expected[index]:
                at = next(i for i, t in enumerate(self._expected[index]) if t != ask.tokens[i])
                self._faults.append(f"stream {index} went another way at token {at}")
            self._done[index] += 1

    def in_the_middle(self, timeout_s: float = 60.0) -> None:
        """Wait until every stream has tokens and none is near its end."""

        def all_are() -> bool:
            self.check()
            return all(3 <= len(ask.tokens) <= ask.max_tokens // 2 for ask in self._now)

        wait(all_are, timeout_s, "all streams are in the middle")

    def check(self) -> None:
        assert self._faults == []

    def finish(self, timeout_s: float = 90.0) -> int:
        """Let the streams end; how many have, all with the right tokens."""
        self._stop.set()
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(deadline - time.monotonic(), 0.0))
        alive = [len(ask.tokens) for ask in self._now if ask.finish is None and not ask.error]
        assert not any(t.is_alive() for t in self._threads), f"streams hang at token {alive}"
        self.check()
        assert min(self._done) >= 1
        return sum(self._done)

    def one_more_each(self, timeout_s: float = 60.0) -> None:
        """Wait until every stream that is under way now has ended, and so has the one after it."""
        before = list(self._done)

        def all_have() -> bool:
            self.check()
            return all(now >= then + 2 for now, then in zip(self._done, before, strict=True))

        wait(all_have, timeout_s, "each stream goes on")


@dataclass
class World:
    """One sandbox, one service in it, and its streams."""

    box: Sandbox
    site: Site
    service: RunningService
    load: Load
    slurm: SlurmClient
    scratch: Path
    urgent: list[str] = field(default_factory=list)

    # ------------------------------------------------------------------------- what is seen

    def journal(self) -> list[dict[str, Any]]:
        return read_journal(self.service.directory.journal)[0]

    def heard(self, fragment: str, since: float, events: Sequence[str]) -> dict[str, Any] | None:
        """The first record of these events about the fragment after a moment."""
        for record in self.journal():
            mine = record.get("fragment") == fragment and record["event"] in events
            if mine and record["at"] >= since:
                return record
        return None

    def state_of(self, status: StatusAnswer, fragment: str) -> str:
        return next((f.state for f in status.fragments if f.name == fragment), "")

    def ready(self, *fragments: str, timeout_s: float = 60.0) -> None:
        """Wait until the service serves and these fragments are there and not leaving."""
        self.service.until(
            lambda status: (
                status.state == "serving"
                and all(self.state_of(status, f) in ("serving", "ready") for f in fragments)
            ),
            timeout_s,
        )

    def node_of(self, fragment: str) -> str:
        job = self.service.job_of(fragment)
        return self.slurm.jobs([job])[job].nodes[0]

    # ------------------------------------------------------------------------------- acts

    def submit_urgent(self, partition: str, node: str, *options: str) -> None:
        """A job of higher priority for the whole node."""
        script = self.scratch / "urgent.sh"
        script.write_text("#!/bin/sh\nexec sleep 600\n")
        job = self.slurm.submit(
            script, f"--partition={partition}", f"--nodelist={node}", "--gres=gpu:a100:1",
            f"--output={self.scratch}/urgent.out", *options,
        )  # fmt: skip
        self.urgent.append(job.base)

    def end_urgent(self) -> None:
        """Cancel those jobs, and wait until nothing of them runs."""
        if not self.urgent:
            return
        self.slurm.cancel(self.urgent)
        wait(
            lambda: all(self.slurm.jobs([job])[job].state.over for job in self.urgent),
            30, f"jobs {self.urgent} end",
        )  # fmt: skip
        self.urgent.clear()

    def act(
        self,
        name: str,
        fragment: str,
        do: Callable[[], object],
        report: Callable[[str, object], None],
        *,
        events: Sequence[str] = ("leaving", "lost"),
        within_s: float = 10.0,
    ) -> dict[str, Any]:
        """Do it in the middle of all streams; returns what the service heard of it first.

        The time from the act to our event goes to the table.
        """
        self.load.start()
        try:
            self.load.in_the_middle()
            began = time.time()
            do()
            wait(
                lambda: self.heard(fragment, began, events) is not None,
                within_s, f"the service hears of it; journal: {self.journal()[-6:]}",
            )  # fmt: skip
            record = self.heard(fragment, began, events)
            assert record is not None
            self.load.one_more_each()
        finally:
            count = self.load.finish()
        told = record.get("source") or record.get("why") or record["event"]
        report(TABLE, f"{name:<34} {record['at'] - began:6.2f} s   {told:<34} {count:3d} streams")
        return record


@contextmanager
def world(
    home: Path,
    model: Path,
    sandbox: str,
    pool: Sequence[tuple[str, str]],
    *,
    memory: str = "1600kB",
    **serving: Any,
) -> Iterator[World]:
    """A sandbox and a service; the pool as (partition, GPU type), a pilot of one GPU each."""
    token = os.environ[leaks.TOKEN_VARIABLE]
    before = leaks.take(token)
    box = Sandbox(home / "box", parse_section(SandboxConfig, sandbox, "sandbox.yaml"))
    box.up()
    try:
        raw = yaml.safe_load(box.site_file.read_text())
        for gpu_type in raw["gpu_types"].values():
            gpu_type["memory"] = memory
        asked = service_of(model, pool, **serving)
        scratch = home / "scratch"
        scratch.mkdir()
        site = load_section(Site, box.site_file)
        with running(home, asked, raw, 90.0, cluster="slurm", look=False) as service:
            load = Load(lambda: service.endpoint, model)
            made = World(box, site, service, load, SlurmClient(site.slurm), scratch)
            try:
                yield made
            finally:
                made.end_urgent()
    finally:
        box.down()
    left = leaks.left_since(before, token)
    assert not left, "the world left behind:\n  " + "\n  ".join(left)


def service_of(model: Path, pool: Sequence[tuple[str, str]], **serving: Any) -> dict[str, Any]:
    asked = tiny_service(model, [(t, 1, 1) for _, t in pool], memory_fraction=1.0, **serving)
    for entry, (partition, _) in zip(asked["pool"], pool, strict=True):
        entry["partition"] = partition
    return asked
