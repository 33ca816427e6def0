"""The demo's story: serve, stream, lose a pilot in the middle, go on, get it back; then figures.

Nothing is canned: every figure comes from the streams' own clocks and the head's own history.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import click
import msgspec
import yaml

from flexslurm.cli.ask import ask_status
from flexslurm.cli.demo_cluster import DemoCluster, wait_for
from flexslurm.cli.demo_streams import StreamRun, open_streams, questions
from flexslurm.cli.endings import endings_wait
from flexslurm.cli.show import picture
from flexslurm.errors import DeadlineExceeded, FlexslurmError, ServiceError
from flexslurm.messages import ServiceState, StatusAnswer
from flexslurm.wire.service_dir import ServiceDir

STREAMS = 6
TOKENS = 64
_STREAMS_S = 300.0
"""The longest that all streams may take, the change in their midst included."""
_POOL_S = 60.0
"""How long the last pilots may take to come, when the service serves with the first."""
_LAUNCH_ENDS_S = 30.0
"""What a launch that is told to end may take to cancel what it has submitted."""
_KEEP = "run it with --keep and read the head's log"
_MEMORY = {"a100": "240MiB", "l40s": "330MiB"}
"""So little that the model needs several GPUs, as a large model does on real ones."""


class StoryFigures(msgspec.Struct, kw_only=True):
    """What the demo measured."""

    cluster: str
    requests: int
    completed: int
    tokens_equal: bool
    preemptions: int
    longest_gap_s: float
    recovery_s: float
    """From the moment the old gear paused to the moment the new one served."""
    gear_before: str
    gear_after: str
    gear_returned: str
    notice_to_serving_s: float
    """From the preempting job's submission to the new gear serving."""
    undisturbed_longest_gap_s: float


@dataclass
class Story:
    """One run of the demo."""

    cluster: DemoCluster
    home: Path
    model: Path
    started_at: float = 0.0

    def tell(self, line: str = "") -> None:
        stamp = f"{time.monotonic() - self.started_at:6.1f}s  " if line else ""
        click.echo(f"{stamp}{line}")

    def run(self) -> StoryFigures:
        """Everything, from an empty machine to the figures; cleans up in any case."""
        self.started_at = time.monotonic()
        directory = ServiceDir(self.home / "service")
        try:
            site = self._site(self.cluster.up())
            self.tell(f"the cluster is up ({self.cluster.name})")
            self._launch(site, directory)
            return self._act(directory)
        finally:
            self._clean(directory)

    def _site(self, site_file: Path) -> Path:
        site = yaml.safe_load(site_file.read_text())
        for name, memory in _MEMORY.items():
            site["gpu_types"][name]["memory"] = memory
        path = self.home / "site.yaml"
        path.write_text(yaml.safe_dump(site, sort_keys=False))
        return path

    def _launch(self, site: Path, directory: ServiceDir) -> None:
        service = self.home / "demo.yaml"
        service.write_text(yaml.safe_dump(self._service(), sort_keys=False))
        words = [
            "launch", str(service), "--site", str(site), "--service-dir", str(directory.path),
            "--cluster", "slurm" if self.cluster.name == "slurm" else "local",
        ]  # fmt: skip
        self.tell("$ flexslurm launch demo.yaml --site site.yaml")
        command = [sys.executable, "-P", "-m", "flexslurm", *words]
        code = _run(command)
        if code != 0:
            raise ServiceError(f"the launch failed with exit code {code}", hint=_KEEP)

    def _service(self) -> dict[str, object]:
        pool = [
            {"partition": "scavenge", "gpu_type": "a100", "gpus": 2, "count": 2},
            {"partition": "scavenge", "gpu_type": "l40s", "gpus": 2, "count": 1},
        ]
        return {
            "name": "demo",
            "model": {"path": str(self.model), "dtype": "float32", "name": "smollm2"},
            "pool": pool,
            "serving": {
                "block_tokens": 16, "max_batch": 16, "max_batch_tokens": 128, "max_context": 512,
            },
            "workload": {"prompt_tokens": 32, "output_tokens": TOKENS},
            "decisions": {"min_action_gap_sec": 0, "migration_benefit_ratio": 1.0},
        }  # fmt: skip

    # ------------------------------------------------------------------ the acts

    def _act(self, directory: ServiceDir) -> StoryFigures:
        before = self._serving(directory)
        self.tell(f"{STREAMS} streams without disturbance, to compare with")
        calm = self._stream(before)
        self.tell("the same streams again; the first one, as it comes:")
        printer = _Printer()
        runs, threads = open_streams(before.endpoint, self._bodies(), printer.take)
        ends_at = time.monotonic() + _STREAMS_S
        wait_for(lambda: all(len(run.tokens) >= 8 or run.error for run in runs), 60.0)
        taken_at, victim = time.monotonic(), self._preempt(directory, printer)
        after = self._await_shift(directory, before.epoch, printer)
        notice_s = time.monotonic() - taken_at
        _join(threads, ends_at)
        printer.end()
        self.tell("all streams have ended")
        returned = self._await_return(directory, before, victim)
        return self._figures(calm, runs, before, after, returned, notice_s)

    def _bodies(self) -> list[dict[str, object]]:
        return questions("smollm2", STREAMS, TOKENS)

    def _serving(self, directory: ServiceDir) -> StatusAnswer:
        """In the gear of the whole pool, or of what has come of it after a while."""
        pilots = directory.pilots()
        assert pilots is not None
        gpus = sum(pilot.gpus * pilot.nodes for pilot in pilots.pilots)
        wait_for(lambda: _gpus_serving(directory) == gpus, _POOL_S, 0.25)
        answer = ask_status(directory)
        if answer.gear is None:
            raise ServiceError(f"the service does not serve: {answer.reason}", hint=_KEEP)
        return answer

    def _stream(self, status: StatusAnswer) -> list[StreamRun]:
        runs, threads = open_streams(status.endpoint, self._bodies())
        _join(threads, time.monotonic() + _STREAMS_S)
        errors = [run.error for run in runs if run.error]
        if errors:
            raise ServiceError(f"a stream failed without any disturbance: {errors[0]}", hint=_KEEP)
        return runs

    def _preempt(self, directory: ServiceDir, printer: _Printer) -> str:
        pilots = directory.pilots()
        assert pilots is not None
        victim = next(p for p in reversed(pilots.pilots) if p.gpu_type == "a100")
        said = self.cluster.preempt(victim, directory)
        printer.pause(lambda: self.tell(said))
        return victim.fragment

    def _await_shift(self, directory: ServiceDir, epoch: int, printer: _Printer) -> StatusAnswer:
        answers: list[StatusAnswer] = []

        def shifted() -> bool:
            answer = _try_status(directory)
            if answer is None or answer.state != ServiceState.SERVING or answer.epoch <= epoch:
                return False
            answers.append(answer)
            return True

        if not wait_for(shifted, 120.0):
            raise ServiceError(
                "no new gear was installed within 120 s after the preemption", hint=_KEEP
            )
        answer = answers[-1]
        assert answer.gear is not None

        def show() -> None:
            self.tell(f"epoch {answer.epoch} serves: {answer.reason}")
            assert answer.gear is not None
            click.echo(picture(answer.gear))

        printer.pause(show)
        return answer

    def _await_return(
        self, directory: ServiceDir, before: StatusAnswer, victim: str
    ) -> StatusAnswer | None:
        self.tell("whoever wanted the node is done; the pilot is requeued and comes back")
        self.cluster.give_back()
        answers: list[StatusAnswer] = []
        assert before.gear is not None

        def back() -> bool:
            answer = _try_status(directory)
            if answer is None or answer.gear is None or answer.state != ServiceState.SERVING:
                return False
            answers.append(answer)
            assert before.gear is not None
            return answer.gear.signature == before.gear.signature

        came = wait_for(back, 90.0, 0.25)
        if came and answers[-1].gear is not None:
            self.tell(f"{victim} is back, epoch {answers[-1].epoch}:")
            click.echo(picture(answers[-1].gear))
            return answers[-1]
        self.tell(f"{victim} has not come back within 90 s")
        return None

    def _figures(
        self,
        calm: list[StreamRun],
        runs: list[StreamRun],
        before: StatusAnswer,
        after: StatusAnswer,
        returned: StatusAnswer | None,
        notice_s: float,
    ) -> StoryFigures:
        assert before.gear is not None and after.gear is not None
        shift = next(s for s in after.shifts if s["epoch"] == after.epoch)
        return StoryFigures(
            cluster=self.cluster.name,
            requests=len(runs),
            completed=sum(run.finish == "length" and not run.error for run in runs),
            tokens_equal=all(a.tokens == b.tokens for a, b in zip(calm, runs, strict=True)),
            preemptions=1,
            longest_gap_s=round(max(run.longest_gap_s for run in runs), 3),
            recovery_s=round(float(shift["took_s"]), 3),
            gear_before=before.gear.layout(),
            gear_after=after.gear.layout(),
            gear_returned=(
                returned.gear.layout() if returned is not None and returned.gear else "not back"
            ),
            notice_to_serving_s=round(notice_s, 3),
            undisturbed_longest_gap_s=round(max(run.longest_gap_s for run in calm), 3),
        )

    def _clean(self, directory: ServiceDir) -> None:
        """To the end, whatever else is to end us; nobody may be left to read what we say."""
        from flexslurm.cli.stopping import stop_service

        with endings_wait():
            try:
                if directory.service.exists():
                    stop_service(directory, 0.0, 60.0, lambda _: None)
            except FlexslurmError as error:
                with contextlib.suppress(OSError):
                    self.tell(f"while stopping: {error.message}")
            finally:
                self.cluster.down()


def _run(command: list[str]) -> int:
    """Run a command of ours to its end; where we are to end first, it ends in good order too."""
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    try:
        return process.wait()
    except BaseException:
        with endings_wait(), contextlib.suppress(subprocess.TimeoutExpired):
            process.terminate()
            process.wait(_LAUNCH_ENDS_S)
        raise
    finally:
        process.kill()  # nothing where it has ended
        process.wait()


def _join(threads: Iterable[threading.Thread], until: float) -> None:
    """Wait for all streams; `until` is a time of the monotonic clock. Raises DeadlineExceeded."""
    for thread in threads:
        thread.join(max(until - time.monotonic(), 0.0))
        if thread.is_alive():
            raise DeadlineExceeded("the demo's streams do not end", hint=_KEEP)


def _gpus_serving(directory: ServiceDir) -> int:
    """GPUs of the allocation whose gear serves."""
    answer = _try_status(directory)
    if answer is None or answer.gear is None or answer.state != ServiceState.SERVING:
        return 0
    return answer.gear.signature.gpus()


def _try_status(directory: ServiceDir) -> StatusAnswer | None:
    try:
        return ask_status(directory, timeout_s=3.0)
    except FlexslurmError:
        return None


class _Printer:
    """Shows one stream's text as it comes, and lets the story speak in between."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._fresh = True

    def take(self, number: int, text: str) -> None:
        if number == 0:
            with self._lock:
                click.echo(
                    ("    │ " if self._fresh else "") + text.replace("\n", "\n    │ "), nl=False
                )
                self._fresh = False

    def pause(self, speak: Callable[[], None]) -> None:
        with self._lock:
            if not self._fresh:
                click.echo(" …")
            speak()
            self._fresh = True

    def end(self) -> None:
        with self._lock:
            if not self._fresh:
                click.echo()
            self._fresh = True
