"""Runs a trial on this node's GPUs: times steps of stages, and leaves no process behind.

One process for each rank of the tensor-parallel group, forked from one that has imported
everything. The parent tells all ranks each step and takes the slowest's time; it never computes.
"""

from __future__ import annotations

import contextlib
import os
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any

import msgspec

from flexslurm.engine.prctl import die_with_parent
from flexslurm.engine.trial import (
    FIRST,
    INNER,
    Measurement,
    Probe,
    Run,
    Trial,
    TrialLoad,
    TrialOutcome,
    chunks_of,
    opening,
)
from flexslurm.errors import DeadlineExceeded, EnvironmentFault, FlexslurmError
from flexslurm.messages import Chunk

_BUILD_S = 600.0
_FEWEST, _MOST = 4, 15
"""Rounds of one measurement."""
_ENOUGH_S = 0.5

Say = Callable[[str], None]


class Rank:
    """One rank: its arena, its group, and the stage that is tried."""

    def __init__(self, trial: Trial, rank: int, store: Path) -> None:
        import torch

        from flexslurm.engine.arena import Arena
        from flexslurm.engine.groups import start_default_world, td

        torch.set_num_threads(int(os.environ.get("FLEXSLURM_WORKER_THREADS", "1")))
        self._trial, self._rank = trial, rank
        self._device = torch.device("cuda:0" if trial.device == "cuda" else "cpu")
        start_default_world(self._device)
        self._arena = Arena(trial.arena_bytes, self._device)
        self._store = td.FileStore(str(store), -1)
        self._group: Any = None
        self._stages: dict[str, tuple[Any, Any]] = {}
        """Stage and pacer, by role."""

    def build(self, run: Run, epoch: int) -> float:
        """Build and fill a stage, and put something into all of its blocks; seconds to build."""
        from flexslurm.engine.pacing import Pacer
        from flexslurm.engine.stage import StagePlan, build_stage

        trial = self._trial
        plan = StagePlan(
            model=trial.model, epoch=epoch, lo=run.lo, hi=run.hi, tp=trial.tp,
            tp_rank=self._rank, dtype=trial.dtype, block_tokens=trial.block_tokens,
            kv_blocks=run.kv_blocks,
        )  # fmt: skip
        group = self._formed()
        began = time.monotonic()
        stage = build_stage(plan, self._arena, group)
        took_s = time.monotonic() - began
        self._stages[run.role] = stage, Pacer(None, time.sleep)
        for chunks in opening(run.kv_blocks):
            self._forward(run.role, chunks)
        self._stages[run.role] = stage, Pacer(run.pacing, time.sleep)
        return took_s

    def _formed(self) -> Any:
        if self._trial.tp == 1:
            return None
        if self._group is None:
            from flexslurm.engine.groups import Group, Network

            name = "trial"
            self._group = Group(
                name, self._rank, self._trial.tp, Network(self._device, "127.0.0.1")
            )
            self._group.form(self._store)
        return self._group.handle

    def step(self, role: str, load: TrialLoad) -> float:
        """One step as a worker does it; seconds from its input to its result."""
        stage, _ = self._stages[role]
        chunks = chunks_of(load, self._trial.block_tokens, stage.info.vocab_size)
        return self._forward(role, chunks)

    def _forward(self, role: str, chunks: Sequence[Chunk]) -> float:
        import torch

        from flexslurm.engine.batch import Batch
        from flexslurm.engine.pacing import StepWork
        from flexslurm.engine.sampling import sample

        stage, pacer = self._stages[role]
        batch = Batch.from_chunks(chunks, self._trial.block_tokens, self._device)
        hidden = None
        if not stage.is_first:
            hidden = torch.ones_like(stage.empty_hidden(batch.tokens_count))
        self._settle()
        began = time.monotonic()
        pacer.begin(waited=True)
        out = stage.forward(batch, hidden)
        if stage.is_last and batch.sampled and self._rank == 0:
            sample(out, [sampling for _, sampling in batch.sampled])
        self._settle()
        pacer.end(StepWork.of(chunks))
        return time.monotonic() - began

    def _settle(self) -> None:
        if self._device.type == "cuda":
            import torch

            torch.cuda.synchronize(self._device)


class Ranks:
    """The forked ranks; a call goes to all of them, and the slowest's answer counts."""

    def __init__(self, trial: Trial, store: Path) -> None:
        self._trial = trial
        self._pids: list[int] = []
        self._links: list[Connection] = []
        for rank in range(trial.tp):
            ours, theirs = Pipe()
            parent = os.getpid()
            pid = os.fork()
            if pid == 0:
                ours.close()
                os._exit(_serve(trial, rank, store, theirs, parent))
            theirs.close()
            self._pids.append(pid)
            self._links.append(ours)

    def call(self, name: str, *arguments: Any, timeout_s: float) -> float:
        """Raises what a rank raised, and DeadlineExceeded when one does not answer."""
        for one in self._links:
            with contextlib.suppress(BrokenPipeError):  # its end is noticed below
                one.send((name, arguments))
        end = time.monotonic() + timeout_s
        answers: list[float] = []
        left: list[Any] = list(self._links)
        while left:
            ready = wait(left, max(0.0, end - time.monotonic()))
            if not ready:
                ranks = ", ".join(str(self._links.index(link)) for link in left)
                raise DeadlineExceeded(f"rank {ranks} did not answer '{name}' in {timeout_s:g} s")
            for link in ready:
                answers.append(self._answer(link, name))
                left.remove(link)
        return max(answers)

    def _answer(self, link: Any, name: str) -> float:
        try:
            found = link.recv()
        except EOFError:
            raise EnvironmentFault(
                f"the process of rank {self._links.index(link)} ended during '{name}'",
                hint="was it out of memory? the trial's log has its last words",
            ) from None
        if isinstance(found, Exception):  # the others may wait for this rank: no time is lost
            raise found
        assert isinstance(found, float)
        return found

    def close(self) -> None:
        """End the processes at once: they hold nothing that matters."""
        for pid in self._pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid in self._pids:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)
        for link in self._links:
            link.close()


def _serve(trial: Trial, rank: int, store: Path, link: Connection, parent: int) -> int:
    die_with_parent(parent)
    if trial.device == "cuda":
        os.environ["CUDA_VISIBLE_DEVICES"] = _card(rank)
    try:
        me: Rank | Exception = Rank(trial, rank, store)
    except Exception as error:  # noqa: BLE001 - told at the first call
        me = error
    while True:
        name, arguments = link.recv()
        if isinstance(me, Exception):
            link.send(_told(me))
            continue
        try:
            link.send(getattr(me, name)(*arguments))
        except Exception as error:  # noqa: BLE001 - the parent tells it
            link.send(_told(error))


def _told(error: Exception) -> Exception:
    """The error as one that can be sent."""
    if isinstance(error, FlexslurmError):
        return error
    return EnvironmentFault(f"a step of the trial failed: {type(error).__name__}: {error}")


def _card(rank: int) -> str:
    given = os.environ.get("CUDA_VISIBLE_DEVICES", "").strip()
    cards = given.split(",") if given else [str(n) for n in range(rank + 1)]
    return cards[rank] if rank < len(cards) else "none"


# ------------------------------------------------------------------------------- measuring


def measure(trial: Trial, ranks: Ranks, say: Say) -> TrialOutcome:
    """Build all stages, and time the steps while there is time."""
    measured: list[Measurement] = []
    layers = {run.role: run.layers for run in trial.runs}
    for epoch, run in enumerate(trial.runs, start=1):
        say(f"building layers [{run.lo},{run.hi})")
        seconds = ranks.call("build", run, epoch, timeout_s=_BUILD_S)
        measured.append(Measurement(run.role, run.layers, seconds))
    end = time.monotonic() + trial.budget_s
    for done, probe in enumerate(trial.probes):
        if time.monotonic() > end:
            return TrialOutcome(tuple(measured), len(trial.probes) - done)
        seconds, one_s = _times(ranks, probe, trial)
        measured.append(Measurement(probe.role, layers[probe.role], seconds, probe.load, one_s))
        load = probe.load
        say(
            f"[{done + 1}/{len(trial.probes)}] {load.phase}, {load.batch} x {load.new} tokens of "
            f"{load.context}: {probe.role} {seconds * 1e3:.3f} ms, one layer {one_s * 1e3:.3f} ms"
        )
    return TrialOutcome(tuple(measured))


def _times(ranks: Ranks, probe: Probe, trial: Trial) -> tuple[float, float]:
    """Median seconds of a step on its stage and on one layer, done in turn, after one round."""
    plain = msgspec.structs.replace(probe.load, sampled=False)
    one = INNER if any(run.role == INNER for run in trial.runs) else FIRST
    steps = ((probe.role, probe.load), (one, plain))
    times: tuple[list[float], list[float]] = ([], [])
    began = time.monotonic()
    for number in range(1 + _MOST):
        for (role, load), mine in zip(steps, times, strict=True):
            seconds = ranks.call("step", role, load, timeout_s=trial.step_timeout_s)
            if number > 0:
                mine.append(seconds)
        if number >= _FEWEST and time.monotonic() - began > _ENOUGH_S:
            break
    return statistics.median(times[0]), statistics.median(times[1])


@contextlib.contextmanager
def _scratch() -> Iterator[Path]:
    """A place for the store through which the ranks meet: of this node, this user's alone."""
    with tempfile.TemporaryDirectory(prefix="flexslurm-trial-") as place:
        yield Path(place) / "store"


def run(trial: Trial, say: Say) -> TrialOutcome:
    """Measure, and end every process; errors become part of the outcome."""
    from flexslurm.engine.backend import warm_up

    say("importing torch, DeepSpeed and transformers")
    try:
        warm_up(trial.device)
        with _scratch() as store:
            ranks = Ranks(trial, store)
            try:
                return measure(trial, ranks, say)
            finally:
                ranks.close()
    except FlexslurmError as error:
        return TrialOutcome(error=error.message, hint=error.hint, kind=type(error).__name__)
