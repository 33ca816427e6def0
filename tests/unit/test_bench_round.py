"""What the bench of shifts makes of tokens' times, and of what the head wrote down."""

from __future__ import annotations

import pytest

from flexslurm.cli.bench_commands import summary, table
from flexslurm.cli.bench_least import moved_bytes
from flexslurm.cli.bench_round import Round, calm_extra_gap_s, same_tokens
from flexslurm.cli.bench_shift import FULL, QUICK, ShiftFigures, part_of
from flexslurm.cli.demo_streams import StreamRun
from flexslurm.errors import ServiceError
from flexslurm.messages import ServiceState, StatusAnswer

STEP = 0.02


def run(*times: float, tokens: tuple[int, ...] = ()) -> StreamRun:
    return StreamRun({}, tokens=list(tokens), times=list(times))


def steady(begin: float, count: int, step: float = STEP) -> list[float]:
    return [begin + n * step for n in range(count)]


def status() -> StatusAnswer:
    return StatusAnswer(
        service="s", head="h", endpoint="", state=ServiceState.SERVING, reason="", epoch=1,
        gear=None, fragments=(), running=0, waiting=0, kv_used=0.0, finished=0, tokens_total=0,
        shifts=(), uptime_s=0.0,
    )  # fmt: skip


def round_of(*runs: StreamRun, asked_at: float = 1.0, cut_at: float = 2.0) -> Round:
    return Round(
        runs=list(runs), before=status(), after=status(), line={}, planned={}, switched={},
        asked_at=asked_at, cut_at=cut_at, link_bytes_per_s=1e8,
    )  # fmt: skip


def test_the_longest_gap_of_any_stream_counts_less_a_step_of_the_slower_gear() -> None:
    calm = run(*steady(0.5, 25), *steady(1.0, 50), *steady(2.0, 30))
    slow_after = run(*steady(0.5, 76), *steady(2.31, 24, 0.05))
    found = round_of(calm, slow_after)
    assert found.step_s == pytest.approx((0.02 + 0.05) / 2, rel=0.2)
    assert found.extra_gap_s == pytest.approx(0.31 - found.step_s, abs=1e-6)


def test_gaps_before_the_shift_do_not_count() -> None:
    late = run(0.1, *steady(0.9, 90))
    found = round_of(late)
    assert found.extra_gap_s is not None and found.extra_gap_s < STEP


def test_streams_that_did_not_live_through_tell_nothing() -> None:
    found = round_of(run(*steady(0.5, 40)), run())
    assert found.lived == [] and found.extra_gap_s is None


def test_tokens_that_come_in_one_read_do_not_halve_the_step() -> None:
    pairs = sorted(steady(0.5, 13, 0.04) * 2)
    tail = sorted(steady(2.02, 12, 0.04) * 2)
    assert round_of(run(*pairs, *tail)).step_s == pytest.approx(STEP, rel=0.15)


def test_streams_that_were_ended_early_are_compared_as_far_as_they_go() -> None:
    whole = [[1, 2, 3, 4], [5, 6, 7]]
    assert same_tokens([[1, 2], [5, 6, 7]], whole)
    assert same_tokens([[], []], whole)
    assert not same_tokens([[1, 3], [5]], whole)
    assert not same_tokens([[1, 2, 3, 4, 5], [5]], whole), "more than there is"


def test_bytes_are_those_from_elsewhere() -> None:
    line = {"moved_bytes": 5, "read_bytes": 7, "kv_bytes": 11, "kept_bytes": 1000}
    assert moved_bytes(line) == 23


def test_the_walk_is_what_is_asked_for() -> None:
    """PP 1→2→3→1, TP 1→2→3→1, PP x TP 2x1→1x2→3x1, replicas 1→2→1, an uneven split, a tight one."""
    walk = FULL.walk
    assert len(walk) == len(set(walk)) == 13
    assert any("2x(" in after for _, after in walk) and any("2x(" in before for before, _ in walk)
    assert any("[0,8)" in after and "tp2" in after and "→" in after for _, after in walk)
    assert any("l40s" in after for _, after in walk)
    assert len(QUICK.walk) == 5


def test_a_part_of_the_walk_is_named_by_words_of_its_gears() -> None:
    part = part_of(FULL, "l40s")
    assert 0 < len(part.walk) < len(FULL.walk) and set(part.walk) < set(FULL.walk)
    assert all("l40s" in start and "l40s" in to for start, to in part.walk)
    with pytest.raises(ServiceError, match="from or to 'h100'"):
        part_of(FULL, "h100")


def test_what_the_machine_does_to_calm_streams_is_known() -> None:
    runs = [run(*steady(0.0, 100)), run(*steady(0.0, 50), *steady(1.5, 50))]
    assert calm_extra_gap_s(runs) == pytest.approx(1.5 - 49 * STEP - STEP, abs=0.01)
    assert calm_extra_gap_s([run(*steady(0.0, 100))]) == pytest.approx(0.0, abs=1e-9)
    assert calm_extra_gap_s([run(1.0), run()]) == 0.0


def figures(gap_s: float | None, pause_s: float, mode: str = "beside") -> ShiftFigures:
    return ShiftFigures(
        before="a", after="b", mode=mode, tokens_equal=True, longest_extra_gap_s=gap_s,
        decode_step_s=STEP, undisturbed_extra_gap_s=0.01,
        gap_steps=None if gap_s is None else gap_s / STEP,
        gap_steps_beyond_move=None if gap_s is None else (gap_s - 0.01) / STEP,
        pause_s=pause_s, drain_s=0.0, last_move_s=0.0, expected_pause_s=0.02, bytes_moved=2 << 20,
        bytes_optimal=1 << 20,
        transfer_s=0.1, expected_transfer_s=0.1, link_bytes_per_s=5e8, idle_link_bytes_per_s=1e9,
        transfer_to_link=1.2, recompute_s=None, cold_restart_s=10.0, gap_to_recompute=None,
        gap_to_restart=None if gap_s is None else gap_s / 10.0,
    )  # fmt: skip


def test_shifts_are_printed_side_by_side_and_in_sum() -> None:
    shown = table([figures(0.04, 0.01), figures(0.10, 0.03), figures(None, 0.5, "park")])
    rows = shown.splitlines()
    assert rows[1].split()[:2] == ["mode", "tokens"]
    assert sum(row == "a  ⇒  b" for row in rows) == 3
    [beside, park, transfers, link] = summary([figures(0.04, 0.01), figures(0.10, 0.03),
                                    figures(None, 0.5, "park")])  # fmt: skip
    assert "2 beside: pause 0.020 s in the median, 0.030 s at most" in beside
    assert "3.5 decode steps in the median, 5.0 at most, 4.5 beyond the moves in it; at" in beside
    assert "at most 0.0100 of" in beside and "3 of 3 transfers took at most 1.5" in transfers
    assert park.startswith("1 park: pause 0.500 s") and "500 to 500 MB/s beside" in link
    assert all(line in shown for line in (beside, park, transfers, link))
