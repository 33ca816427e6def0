"""Rows of squeue as JobInfo: preemption, ends, orphans; what is not told stays None."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from flexslurm.slurm.jobs import (
    FIELDS,
    SEPARATOR,
    JobInfo,
    by_id,
    cut_off,
    format_option,
    job_info,
    split_rows,
)
from flexslurm.slurm.states import JobState

NOW = datetime(2026, 11, 29, 12, tzinfo=UTC).timestamp()


def row(**values: str) -> dict[str, str]:
    base = {
        "jobid": "7", "state": "RUNNING", "reason": "None", "nodelist": "gpu[001-002]",
        "batchhost": "gpu001", "partition": "low", "name": "p-0", "restartcnt": "0",
        "preempttime": "N/A", "starttime": "2026-11-29T11:00:00", "endtime": "N/A",
        "timelimit": "UNLIMITED", "hetjobid": "N/A", "hetjoboffset": "N/A", "exit_code": "0",
        "workdir": "/svc/jobs",
    }  # fmt: skip
    assert set(values) <= set(base) == {name for name, _ in FIELDS}
    return base | values


def info(grace_s: float = 20.0, **values: str) -> JobInfo:
    return job_info(row(**values), NOW, {"low": grace_s})


def test_a_running_job() -> None:
    job = info()
    assert (job.id, job.state, job.nodes) == ("7", JobState.RUNNING, ("gpu001", "gpu002"))
    assert (job.preempt_in_s, job.end_in_s, job.started_ago_s) == (None, None, 3600.0)
    assert job.known and not job.orphaned and not job.held and job.exit_code is None


def test_a_preemption_under_way_ends_after_the_grace_time() -> None:
    assert info(preempttime="2026-11-29T11:59:55").preempt_in_s == 15.0
    assert info(preempttime="2026-11-29T11:59:30").preempt_in_s == -10.0


def test_an_end_that_slurm_tells_wins_over_the_computed_one() -> None:
    job = info(
        preempttime="2026-11-29T11:59:55", endtime="2026-11-29T12:00:05", timelimit="1:00:00"
    )
    assert job.preempt_in_s == 5.0 and job.end_in_s == 5.0


def test_an_end_before_the_preemption_is_an_old_one() -> None:
    job = info(preempttime="2026-11-29T11:59:55", endtime="2026-11-29T11:30:00")
    assert job.preempt_in_s == 15.0


def test_a_partition_of_unknown_grace_promises_nothing() -> None:
    assert info(partition="other", preempttime="2026-11-29T12:00:00").preempt_in_s == 0.0


@pytest.mark.parametrize("limit", ["UNLIMITED", "365-00:00:00"])
def test_both_faces_of_unlimited_have_no_end(limit: str) -> None:
    assert info(timelimit=limit, endtime="2027-11-29T11:00:00").end_in_s is None


def test_a_pending_job() -> None:
    job = info(
        state="PENDING", reason="BeginTime", nodelist="", batchhost="n/a", restartcnt="2",
        starttime="2026-11-29T12:02:00", endtime="2026-11-29T13:02:00", timelimit="1:00:00",
    )  # fmt: skip
    assert (job.nodes, job.restarts, job.end_in_s, job.started_ago_s) == ((), 2, None, None)
    assert job.reason.startswith("requeued")


def test_a_held_job_is_told() -> None:
    assert info(state="PENDING", reason="launch_failed_requeued_held").held
    assert not info(state="RUNNING", reason="JobHeldAdmin").held


def test_a_job_whose_batch_host_is_gone_is_an_orphan() -> None:
    assert info(batchhost="gpu009").orphaned
    assert not info(state="COMPLETING", batchhost="gpu009").orphaned


@pytest.mark.parametrize(
    ("text", "code"), [("0", 0), ("256", 1), ("15", -15), ("1:0", 1), ("0:9", -9)]
)
def test_exit_codes(text: str, code: int) -> None:
    assert info(state="FAILED", exit_code=text).exit_code == code


def test_an_odd_row_is_unknown_but_known() -> None:
    job = info(state="TELEPORTING", nodelist="n[", restartcnt="many", endtime="soon")
    assert job.state is JobState.UNKNOWN and job.known and job.nodes == () and job.restarts == 0


def test_a_job_that_slurm_does_not_list_is_not_done() -> None:
    found = by_id([info()], ["7", "8"])
    assert found["7"].state is JobState.RUNNING
    assert found["8"].state is JobState.UNKNOWN and not found["8"].known
    assert not found["8"].state.over


def test_a_value_that_fills_its_field_may_be_cut() -> None:
    width = dict(FIELDS)["nodelist"]
    assert cut_off(row(nodelist="n" * width))
    assert not cut_off(row(nodelist="n" * (width - 1)))


def test_names_with_blanks_and_bars_are_one_field() -> None:
    values = row(name="my | job, 2")
    line = SEPARATOR.join(f"{values[name]:<20}" for name, _ in FIELDS) + SEPARATOR
    (read,) = split_rows(f"CLUSTER: emmy\n{line}\n\n")
    assert read == values


def test_every_field_is_asked_for_with_a_width() -> None:
    parts = format_option().split(",")
    assert parts == [f"{name}:{width}{SEPARATOR}" for name, width in FIELDS]
