"""What `flexslurm status` prints of decisions and of the throughput that shifts kept."""

from __future__ import annotations

from flexslurm.cli.show import render_status
from flexslurm.messages import ServiceState, StatusAnswer

SHIFT: dict[str, float | str] = {
    "epoch": 4, "why": "load", "from": "a", "to": "b", "started_s_ago": 61.0, "took_s": 1.5,
    "outcome": "committed",
}  # fmt: skip


def status(**more: object) -> str:
    known: dict[str, object] = {
        "service": "s", "head": "h", "endpoint": "http://x", "state": ServiceState.SERVING,
        "reason": "because", "epoch": 4, "gear": None, "fragments": (), "running": 1, "waiting": 0,
        "kv_used": 0.5, "finished": 3, "tokens_total": 100, **more,
    }  # fmt: skip
    return render_status(StatusAnswer(**known))  # type: ignore[arg-type]


def test_the_last_three_decisions_are_shown_the_others_not() -> None:
    made = tuple(
        {"s_ago": 300.0 * (5 - n), "verdict": "stay", "reason": f"reason {n}"} for n in range(5)
    )
    shown = status(decisions=made)
    assert "last decisions:\n  15 min 0 s ago, stay: reason 2" in shown
    assert "5 min 0 s ago, stay: reason 4" in shown and "reason 1" not in shown
    assert "last decisions" not in status()


def test_a_shift_s_line_says_what_throughput_it_kept_as_far_as_it_is_known() -> None:
    assert "throughput kept" not in status(shifts=(SHIFT,))
    during = status(shifts=({**SHIFT, "kept_during": 0.934},))
    assert "throughput kept: 93% during\n" in during + "\n"
    one = status(shifts=({**SHIFT, "sequences_moved": 1.0},))
    assert "KV: 1 sequence moved" in one
    after = status(shifts=({**SHIFT, "kept_after": 0.4},))
    assert "throughput kept: - during, 40% after" in after
    both = status(shifts=({**SHIFT, "kept_during": 0.934, "kept_after": 1.2},))
    assert "throughput kept: 93% during, 120% after" in both
