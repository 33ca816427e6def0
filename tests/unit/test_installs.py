"""What is said of installs while they go on, and what is left of them in the history."""

from __future__ import annotations

from flexslurm.cli.show import render_status
from flexslurm.head.installs import Installs
from flexslurm.messages import Installed, InstallFailed, InstallProgress, StatusAnswer


def progress(worker: str, phase: str, done: int, total: int, epoch: int = 3) -> InstallProgress:
    return InstallProgress(
        worker=worker, epoch=epoch, phase=phase, done_bytes=done, total_bytes=total
    )


def installed(worker: str, epoch: int = 3, **more: float) -> Installed:
    figures = {"weights_bytes": 10, "kv_blocks": 1, "load_s": 1.0, "groups_s": 0.1} | more
    return Installed(worker=worker, epoch=epoch, **figures)  # type: ignore[arg-type]


def test_the_slowest_worker_gives_the_phase_and_all_of_them_the_share() -> None:
    installs = Installs()
    assert installs.detail(["a", "b"]) == ""
    installs.take(progress("a", "probe", 4_000_000_000, 4_000_000_000))
    installs.take(progress("b", "weights", 1_000_000_000, 4_000_000_000))
    assert installs.detail(["a", "b"]) == "epoch 3: weights 60 % of 7.451 GiB"
    assert installs.detail(["c"]) == ""


def test_what_has_ended_is_no_longer_said() -> None:
    installs = Installs()
    for worker in "abc":
        installs.take(progress(worker, "groups", 0, 0))
    assert installs.detail(["a"]) == "epoch 3: groups"
    installs.take(installed("a"))
    installs.take(InstallFailed(worker="b", epoch=3, reason="x"))
    assert installs.detail(["a", "b"]) == ""
    installs.forget_all_but(["a", "c"], 4)
    assert installs.detail(["c"]) == ""


def test_figures_of_an_epoch_are_of_all_its_workers() -> None:
    installs = Installs()
    installs.take(installed("a", moved_bytes=4, kept_bytes=6, load_s=2.5))
    installs.take(installed("b", moved_bytes=1, load_s=0.5))
    found = installs.figures(3)
    assert (found.workers, found.weights_bytes, found.moved_bytes, found.kept_bytes) == (
        2,
        20,
        5,
        6,
    )
    assert found.load_s == 2.5
    assert installs.figures(4).workers == 0


def test_figures_have_a_bound() -> None:
    installs = Installs()
    for epoch in range(1000):
        installs.take(installed("a", epoch))
    assert len(installs._figures) == 100 and installs.figures(999).workers == 1


def test_the_history_shows_where_weights_came_from() -> None:
    shift: dict[str, float | str] = {
        "epoch": 3, "why": "a-1 must leave", "from": "x", "to": "y", "started_s_ago": 5.0,
        "took_s": 2.0, "outcome": "committed", "weights_bytes": 3e9, "moved_bytes": 1e9,
        "kept_bytes": 1.5e9, "load_s": 1.25, "groups_s": 0.1,
    }  # fmt: skip
    text = render_status(
        StatusAnswer(
            service="s", head="h", endpoint="http://x", state="serving", reason="r", epoch=3,
            gear=None, fragments=(), running=0, waiting=0, kv_used=0.0, finished=0,
            tokens_total=0, shifts=(shift,),
        )
    )  # fmt: skip
    assert "1.397 GiB in place, 953.7 MiB from other GPUs, 476.8 MiB from files, in 1.25 s" in text
