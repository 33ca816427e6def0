"""A service to break in the middle of a shift, and what must hold again after each break."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import leaks
import msgspec
import psutil
import pytest

from flexslurm.cli import launch as launching
from flexslurm.cli import submitting
from flexslurm.cli.ask import ask
from flexslurm.engine import faults
from flexslurm.engine.families import check_model
from flexslurm.engine.ownership import Holding, ShardMap
from flexslurm.messages import GpuStatus, ShiftAnswer, ShiftAsk, StatusAnswer
from tests.service_census import Census, ports_left
from tests.service_harness import (
    Ask,
    RunningService,
    check,
    finish,
    pilots_there,
    running,
    some_asks,
)

BLOCK_TOKENS = 16
LEFT_OPEN = ": still open after"
"""What a worker says of groups that did not close."""


def layout(*stages: int | tuple[int, int], layers: int = 6) -> str:
    """Stages of even depth by their TP degrees; or (tp, layers) each."""
    depths = [s[1] if isinstance(s, tuple) else layers // len(stages) for s in stages]
    tps = [s[0] if isinstance(s, tuple) else s for s in stages]
    ends = [sum(depths[:n]) for n in range(len(depths) + 1)]
    parts = [f"a100 tp{tp} [{ends[n]},{ends[n + 1]})" for n, tp in enumerate(tps)]
    return " → ".join(parts)


@dataclass(frozen=True)
class Seat:
    """A GPU, as `status` shows it."""

    fragment: str
    gpu: GpuStatus


class Ground:
    """One running service, the file of its faults, and its undisturbed tokens."""

    def __init__(
        self,
        service: RunningService,
        model: Path,
        file: Path,
        expected: list[list[int]],
        long: int,
        before: leaks.Snapshot,
    ) -> None:
        """`before`: what there was before the service."""
        self.service, self.expected, self.long = service, expected, long
        self.census = Census(service, before)
        self._file, self._done = file, file.with_name(f"{file.name}.done")
        self._shards = ShardMap(check_model(model), "float64", BLOCK_TOKENS)

    # ------------------------------------------------------------------ faults

    def arm(self, *texts: str) -> None:
        """All processes read it when they next come to a point."""
        self._done.unlink(missing_ok=True)
        part = self._file.with_name(f"{self._file.name}.part")
        part.write_text(", ".join(texts))
        part.replace(self._file)

    def disarm(self) -> None:
        self._file.unlink(missing_ok=True)

    def struck(self) -> list[str]:
        """What was done of the faults, as they were armed."""
        if not self._done.exists():
            return []
        return [line.split(" ", 1)[1] for line in self._done.read_text().splitlines()]

    # ------------------------------------------------------------------ looking

    def seats(self) -> list[Seat]:
        return [Seat(f.name, gpu) for f in self.service.status().fragments for gpu in f.gpus]

    def used(self) -> list[Seat]:
        """GPUs with a slot of the gear that serves, by slot."""
        found = [seat for seat in self.seats() if seat.gpu.slot is not None]
        return sorted(found, key=lambda seat: str(seat.gpu.slot))

    def idle(self) -> list[Seat]:
        return [seat for seat in self.seats() if seat.gpu.slot is None]

    def agent(self, fragment: str, timeout_s: float = 60.0) -> int:
        """Its process id; one that has just ended is submitted again, and waited for."""
        deadline = time.monotonic() + timeout_s
        while not (found := list(self.service.processes(f"--fragment {fragment}"))):
            assert time.monotonic() < deadline, f"no agent of {fragment} came in {timeout_s:.0f} s"
            self.submit_again()
            time.sleep(0.05)
        return found[0]

    # ------------------------------------------------------------------ acting

    def shift_to(self, gear: str, timeout_s: float = 100.0) -> dict[str, float | str]:
        """Go into a gear; the history's line of it."""
        answer = ask(self.service.directory, ShiftAsk(to=gear), 30.0)
        assert isinstance(answer, ShiftAnswer)
        status = self.service.until(lambda s: serves(s, answer.to), timeout_s)
        return status.shifts[-1]

    def ask_for(self, gear: str, timeout_s: float = 30.0) -> None:
        ask(self.service.directory, ShiftAsk(to=gear), timeout_s)

    def begin(self, count: int = 4) -> tuple[list[Ask], list[Any]]:
        asks = some_asks(count, self.long)
        threads = self.service.start(asks)
        deadline = time.monotonic() + 60
        while not all(len(one.tokens) >= 2 for one in asks):
            assert time.monotonic() < deadline and not any(one.error for one in asks), asks
            time.sleep(0.01)
        return asks, threads

    def wait_struck(self, asks: list[Ask], timeout_s: float = 60.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not self.struck():
            assert time.monotonic() < deadline, f"the fault never came; {self.service.status()}"
            time.sleep(0.005)
        assert any(one.finish is None for one in asks), "the streams were too short"

    def strike(self, *texts: str, to: str, count: int = 4) -> list[dict[str, float | str]]:
        """A shift under load with these faults: no stream sees any of it. Lines of its shifts."""
        before = self.service.status().epoch
        asks, threads = self.begin(count)
        self.arm(*texts)
        self.ask_for(to)
        self.wait_struck(asks)
        finish(threads, 60)
        self.disarm()
        check(asks, self.expected[:count])
        status = self.service.until(lambda s: s.state == "serving")
        return [line for line in status.shifts if float(line["epoch"]) > before]

    def mend(self, fragments: int, timeout_s: float = 100.0) -> None:
        """Submit what ended again, and wait until all are there.

        A pilot whose installs failed again and again is ended first, as an operator would.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            self.submit_again()
            status = self.service.until(lambda s: True)
            faulty = [f.job_id for f in status.fragments if f.state == "faulty" and f.job_id]
            self.service.submitter.cancel(faulty)
            if pilots_there(status) == fragments:
                return
            pilots = [(f.name, f.state, f.detail) for f in status.fragments]
            assert time.monotonic() < deadline, f"not all pilots are back: {pilots}"
            time.sleep(0.05)

    def submit_again(self) -> None:
        """Pilots whose jobs are over; one that Slurm has requeued comes back by itself."""
        pilots = self.service.directory.pilots()
        assert pilots is not None
        states = self.service.submitter.states([p.job_id for p in pilots.pilots])
        for pilot in pilots.pilots:
            if states[pilot.job_id].state.over:
                resubmit(self.service, pilot.fragment)

    def relaunch(self) -> None:
        """After the head's death."""
        deadline = time.monotonic() + 60
        while list(self.service.processes("flexslurm.head.main")):
            assert time.monotonic() < deadline, "the head lives"
            time.sleep(0.02)
        submitting.execute(self.service.plan, lambda line: None)
        launching.wait_until_serving(self.service.plan, lambda line: None, 90)

    def restore(self, fragments: int, gear: str) -> None:
        """No fault, all fragments there, this gear, and nothing left of anything else.

        A worker that hangs in the closing of an old epoch is ended a while later, and takes the
        gear that serves by then along: it is gone into again.
        """
        self.disarm()
        for _ in range(3):
            self.mend(fragments)
            self.shift_to(gear)
            self.check_clean()
            if serves(self.service.status(), gear):
                return
        raise AssertionError(f"{gear} does not stay: {self.service.status().shifts[-3:]}")

    # ------------------------------------------------------------------ what must hold

    def check_clean(self, timeout_s: float = 60.0) -> None:
        """Nothing is left of any other epoch; or fail.

        No memory, group, port, thread, descriptor, process or shared memory.
        """
        deadline = time.monotonic() + timeout_s
        while (found := self._left()) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not found, "\n".join(found)

    def _left(self) -> list[str]:
        status = self.service.status()
        found = []
        if status.state != "serving" or status.running or status.waiting or status.kv_used:
            found.append(f"{status.state}, {status.running} run, {status.waiting} wait, "
                         f"{status.kv_used} of KV is in use")  # fmt: skip
        if status.gear is None:
            return [*found, "no gear serves"]
        parts = {
            f"r{r}s{s}t{t}": (self._shards.weights_bytes(Holding.of_slot(one, s, t)), one.gpus)
            for r, one in enumerate(status.gear.replicas)
            for s, stage in enumerate(one.stages)
            for t in range(stage.tp)
        }
        for fragment in status.fragments:
            for gpu in fragment.gpus:
                wanted, gpus = parts.get(str(gpu.slot), (0, 0))
                name = f"{fragment.name} gpu {gpu.index} ({gpu.slot})"
                if gpu.used_bytes != wanted:
                    found.append(f"{name}: {gpu.used_bytes} bytes in use, not {wanted}")
                if len(gpu.epochs) != (gpu.slot is not None):
                    found.append(f"{name}: it holds epochs {gpu.epochs}")
                found += ports_left(name, gpu.pid, grouped=gpus > 1)
        return found or self.census.left(status) or self.census.too_much(status)


def serves(status: StatusAnswer, gear: str) -> bool:
    return status.state == "serving" and status.gear is not None and status.gear.layout() == gear


def resubmit(service: RunningService, fragment: str) -> None:
    """What the keeper of a pool does: a new job for a pilot that has ended."""
    spec = next(spec for pilot, spec in service.plan.pilots if pilot.fragment == fragment)
    job = service.submitter.submit(spec)
    pilots = service.directory.pilots()
    assert pilots is not None
    renewed = tuple(
        msgspec.structs.replace(p, job_id=job) if p.fragment == fragment else p
        for p in pilots.pilots
    )
    service.directory.write_pilots(msgspec.structs.replace(pilots, pilots=renewed))


def leave_after(endpoint: str, ask: Ask, tokens: int) -> None:
    """A client that goes away once it has so many tokens."""
    parts = urlsplit(endpoint)
    connection = HTTPConnection(parts.hostname or "", parts.port or 0, timeout=60)
    body = {
        "model": "tiny", "prompt": ask.prompt, "max_tokens": ask.max_tokens, "stream": True,
        "temperature": 0.0, "ignore_eos": True, "return_token_ids": True, **ask.sampling,
    }  # fmt: skip
    with contextlib.suppress(OSError, HTTPException), contextlib.closing(connection):
        connection.request(
            "POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"}
        )
        for line in connection.getresponse():
            if line.startswith(b"data: {"):
                for choice in json.loads(line[6:]).get("choices", ()):
                    ask.tokens += choice.get("token_ids") or []
            if len(ask.tokens) >= tokens:
                return


@contextmanager
def ground(
    home: Path, model: Path, settings: dict[str, Any], site: dict[str, Any],
    expected: list[list[int]], long: int,
) -> Iterator[Ground]:  # fmt: skip
    """A service whose processes look into a file for faults."""
    file = home / "faults"
    settings["keeping"] = {"enabled": False}  # what ends is submitted again by `mend`
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(faults.VARIABLE, f"@{file}")
        before = leaks.take(os.environ[leaks.TOKEN_VARIABLE])
        with running(home, settings, site) as service:
            made = Ground(service, model, file, expected, long, before)
            made.mend(len(service.plan.pilots))  # it may serve before the last of them has come
            yield made
            logs = sorted(path for path in service.directory.logs.rglob("*") if path.is_file())
            found = [path.name for path in logs if LEFT_OPEN in path.read_text(errors="replace")]
            assert not found, f"workers could not close an epoch's groups: {found}"


def alive(pid: int) -> str:
    """What a process that lives is doing; "" for none, and for one that has ended."""
    try:
        process = psutil.Process(pid)
        status = process.status()
        return "" if status == psutil.STATUS_ZOMBIE else f"{status}: {process.cmdline()}"
    except psutil.NoSuchProcess:
        return ""
