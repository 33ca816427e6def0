"""GRES, job ids, durations, states and reasons, as Slurm writes them in its releases."""

from __future__ import annotations

import calendar

import pytest

from flexslurm.errors import SlurmError
from flexslurm.slurm.gres import Gres, gpus_of, parse_gres
from flexslurm.slurm.jobids import JobId, parse_job_id, submitted_id
from flexslurm.slurm.reasons import is_held, reason_in_words
from flexslurm.slurm.states import JobState, job_state, node_state
from flexslurm.slurm.times import format_duration, parse_duration, parse_time

# ------------------------------------------------------------------------------------- GRES


@pytest.mark.parametrize(
    ("text", "entries"),
    [
        ("gpu:8(S:0-3)", [Gres("gpu", None, 8, (), "0-3")]),
        ("gpu:a100:0(IDX:N/A)", [Gres("gpu", "a100", 0)]),
        ("gpu:h100_80:3(IDX:0,4-5)", [Gres("gpu", "h100_80", 3, (0, 4, 5))]),
        ("gpu:h100:2,gpu:1g.10gb:7", [Gres("gpu", "h100", 2), Gres("gpu", "1g.10gb", 7)]),
        ("gres:gpu:a100:2", [Gres("gpu", "a100", 2)]),
        ("gres/gpu:a100:2", [Gres("gpu", "a100", 2)]),
        ("gres/gpu:a100=4", [Gres("gpu", "a100", 4)]),
        ("gpu:a100", [Gres("gpu", "a100", 1)]),
        ("gpu", [Gres("gpu", None, 1)]),
        ("gpu:no_consume:4", [Gres("gpu", None, 4)]),
        ("craynetwork:4,nic:2", [Gres("craynetwork", None, 4), Gres("nic", None, 2)]),
        ("bandwidth:lustre:4G", [Gres("bandwidth", "lustre", 4 * 2**30)]),
        ("(null)", []),
        ("N/A", []),
        ("", []),
    ],
)
def test_gres(text: str, entries: list[Gres]) -> None:
    assert parse_gres(text) == entries


def test_a_value_cut_off_by_a_column_still_reads() -> None:
    assert parse_gres("gpu:1g.10gb:0(IDX:N/")[0].count == 0


@pytest.mark.parametrize("text", ["gpu/rtx:1", "gpu:a:b:c", "gpu::2", ":2", "gpu:a100:two"])
def test_gres_that_is_none(text: str) -> None:
    with pytest.raises(SlurmError, match="GRES"):
        parse_gres(text)


def test_a_typo_is_put_right() -> None:
    with pytest.raises(SlurmError) as caught:
        parse_gres("gpu/rtx4090:1")
    assert caught.value.hint == "write gpu:rtx4090:1"


def test_only_whole_gpus_count() -> None:
    entries = parse_gres("gpu:h100:2,gpu:1g.10gb:7,mps:400,shard:8,gpu:h100:1,gpu:3")
    assert gpus_of(entries) == {"h100": 3, None: 3}


# ------------------------------------------------------------------------------------ job ids


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("7", JobId("7")),
        ("7+1", JobId("7", het=1)),
        ("7_3", JobId("7", task="3")),
        ("7_[1-4,9%2]", JobId("7", task="1-4,9%2")),
        ("7.batch", JobId("7", step="batch")),
        ("7+1.0", JobId("7", het=1, step="0")),
        ("75168975;emmy", JobId("75168975", cluster="emmy")),
    ],
)
def test_job_ids(text: str, found: JobId) -> None:
    assert parse_job_id(text) == found


@pytest.mark.parametrize("text", ["", "x", "7;", "-1", "7 8", "7_", "7+", "٣"])
def test_no_job_ids(text: str) -> None:
    with pytest.raises(SlurmError):
        parse_job_id(text)


@pytest.mark.parametrize(
    ("out", "found"),
    [
        ("42\n", JobId("42")),
        ("42;emmy\n", JobId("42", cluster="emmy")),
        ("This job 7 will be charged to acct\n42\n", JobId("42")),
        ("sbatch: This job 7 will be charged\nSubmitted batch job 42\n", JobId("42")),
        ("Submitted batch job 42 on cluster emmy\n", JobId("42", cluster="emmy")),
        ("42\nThank you for using job 9 of 10\n", JobId("42")),
    ],
)
def test_what_sbatch_prints(out: str, found: JobId) -> None:
    assert submitted_id(out) == found


def test_sbatch_without_an_id() -> None:
    with pytest.raises(SlurmError, match="no job id"):
        submitted_id("This job 7 will be charged\n")


# -------------------------------------------------------------------------------------- times


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("30", 1800), ("30:00", 1800), ("2:00:00", 7200), ("2-12", 216000), ("14-0", 1209600),
        ("1-0:30", 88200), ("7-0:00:99", 604899), ("0:00", 0), ("1-02:03:04", 93784),
        ("UNLIMITED", None), ("infinite", None), ("365-00:00:00", None), ("NOT_SET", None),
    ],
)  # fmt: skip
def test_durations(text: str, seconds: float | None) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["1:2:3:4", "x", "-5", "1-", "1h", "٣"])
def test_no_durations(text: str) -> None:
    with pytest.raises(SlurmError, match="time limit"):
        parse_duration(text)


@pytest.mark.parametrize("seconds", [60, 90, 3600, 86399, 90061, 1])
def test_a_formatted_duration_is_never_shorter(seconds: int) -> None:
    read = parse_duration(format_duration(seconds))
    assert read is not None and seconds <= read < seconds + 60 and read >= 60


def test_points_in_time() -> None:
    stamp = calendar.timegm((2026, 11, 29, 12, 6, 35))
    assert parse_time("2026-11-29T12:06:35") == stamp
    for nothing in ("Unknown", "None", "N/A", "", "NONE", "2026-13-99T12:06:35", "0"):
        assert parse_time(nothing) is None


# ------------------------------------------------------------------------------------- states


@pytest.mark.parametrize(
    ("words", "state"),
    [
        ("RUNNING", JobState.RUNNING), ("R", JobState.RUNNING), ("PD", JobState.PENDING),
        ("CANCELLED by 0", JobState.CANCELLED), ("CANCELLED+", JobState.CANCELLED),
        (["RUNNING", "COMPLETING"], JobState.COMPLETING), (["PENDING"], JobState.PENDING),
        (["PENDING", "REQUEUED"], JobState.REQUEUED), (["RUNNING", "RESIZING"], JobState.RUNNING),
        (["RUNNING", "CONFIGURING"], JobState.CONFIGURING),
        ("REQUEUE_HOLD", JobState.REQUEUED), ("SPECIAL_EXIT", JobState.REQUEUED),
        ("NODE_FAIL", JobState.NODE_FAIL), ("PREEMPTED", JobState.PREEMPTED),
        ("OUT_OF_ME+", JobState.UNKNOWN), ("", JobState.UNKNOWN), ([], JobState.UNKNOWN),
        ("FROBNICATING", JobState.UNKNOWN), ("???", JobState.UNKNOWN),
    ],
)  # fmt: skip
def test_job_states(words: str | list[str], state: JobState) -> None:
    assert job_state(words) is state


def test_unknown_is_neither_active_nor_over() -> None:
    assert not JobState.UNKNOWN.active and not JobState.UNKNOWN.over
    for state in set(JobState) - {JobState.UNKNOWN}:
        assert state.active != state.over


@pytest.mark.parametrize(
    ("words", "base", "flags", "usable"),
    [
        ("IDLE", "IDLE", (), True),
        ("MIXED", "MIXED", (), True),
        ("IDLE+CLOUD+POWERED_DOWN", "IDLE", ("CLOUD", "POWERED_DOWN"), False),
        ("DOWN*+CLOUD", "DOWN", ("NOT_RESPONDING", "CLOUD"), False),
        ("IDLE#+CLOUD", "IDLE", ("POWERING_UP", "CLOUD"), False),
        ("mix-", "MIXED", ("PLANNED",), True),
        ("resv@", "IDLE", ("RESERVED", "REBOOT_REQUESTED"), False),
        ("IDLE+DRAIN+INVALID_REG", "IDLE", ("DRAIN", "INVALID_REG"), False),
        (["MIXED", "DRAIN"], "MIXED", ("DRAIN",), False),
        ("planned", "IDLE", ("PLANNED",), True),
        ("WOBBLY", "UNKNOWN", ("WOBBLY",), False),
        ("", "UNKNOWN", (), False),
    ],
)
def test_node_states(
    words: str | list[str], base: str, flags: tuple[str, ...], usable: bool
) -> None:
    state = node_state(words)
    assert (state.base, state.flags, state.usable_now) == (base, flags, usable)


@pytest.mark.parametrize(
    ("words", "drain"),
    [
        ("draining", "draining"), ("drng", "draining"), ("MIXED+DRAIN", "draining"),
        ("drained", "drained"), ("drain", "drained"), ("IDLE+DRAIN", "drained"), ("idle", None),
    ],
)  # fmt: skip
def test_draining_is_not_drained(words: str, drain: str | None) -> None:
    assert node_state(words).slurm_drain == drain


def test_reasons() -> None:
    assert reason_in_words("None") == ""
    assert reason_in_words("(Resources)") == "waits for nodes to become free"
    blamed = reason_in_words("ReqNodeNotAvail,_UnavailableNodes:gpu003")
    assert blamed == "a node it asked for is not available (UnavailableNodes: gpu003)"
    assert "AssocGrpGRES" in reason_in_words("AssocGrpGRES")
    assert reason_in_words("SomethingNew") == "SomethingNew"
    assert "scontrol release" in reason_in_words("launch_failed_requeued_held")
    assert is_held("launch_failed_requeued_held") and is_held("JobHeldAdmin")
    assert not is_held("Priority")
