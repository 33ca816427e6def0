"""What hooks' messages mean for pilots."""

from __future__ import annotations

import pytest

from flexslurm.errors import SlurmError
from flexslurm.messages import NotifyAsk
from flexslurm.slurm.notices import HookEvent, Leaving, LookNow, PilotAt, PilotLost, meaning

PILOTS = [
    PilotAt("a-1", "7", ("n1", "n2"), warning_s=20.0, restarts=2),
    PilotAt("a-2", "8", ("n3",), warning_s=5.0),
    PilotAt("a-3", None),
]


def told(event: str, **rest: object) -> list[object]:
    return list(meaning(NotifyAsk(event=event, source="epilog", **rest), PILOTS))  # type: ignore[arg-type]


def test_a_leaving_job_has_the_deadline_it_was_given_or_its_partitions() -> None:
    assert told("job-leaving", job_id="7", grace_s=3.0) == [Leaving("a-1", "epilog", 3.0)]
    assert told("job-leaving", job_id="7") == [Leaving("a-1", "epilog", 20.0)]
    assert told("job-leaving", job_id="8", grace_s=-4.0) == [Leaving("a-2", "epilog", 0.0)]


def test_an_ended_job_is_gone_and_says_why() -> None:
    assert told("job-end", job_id="8;cluster", reason="exit 143") == [
        PilotLost("a-2", "job-end (epilog): exit 143")
    ]


def test_an_earlier_run_of_a_job_means_nothing() -> None:
    assert told("job-end", job_id="7", restarts=1) == []
    assert told("job-end", job_id="7", restarts=2) == [PilotLost("a-1", "job-end (epilog)")]


def test_a_node_takes_its_pilots_along() -> None:
    assert told("node-down", nodes=("n2", "n3")) == [
        PilotLost("a-1", "node-down (epilog)"), PilotLost("a-2", "node-down (epilog)")
    ]  # fmt: skip
    assert told("node-drain", nodes=("n2",)) == [LookNow("node-drain (epilog)")]


def test_what_names_none_of_ours_means_nothing() -> None:
    for event in HookEvent:
        assert told(event, job_id="99") == []
        assert told(event, nodes=("other",)) == []
        assert told(event) == []


def test_what_no_hook_sends_is_refused() -> None:
    with pytest.raises(SlurmError, match="no event"):
        told("reboot", job_id="7")
    with pytest.raises(SlurmError, match="job id"):
        told("job-end", job_id="seven")
