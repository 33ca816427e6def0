"""Why a job does not start, or was refused, in words that say what to do."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexslurm.slurm.reasons import PendingVerdict, explain, is_held, refusal


@pytest.mark.parametrize(
    ("code", "verdict", "words"),
    [
        ("(Resources)", PendingVerdict.WAITS, "waits for nodes"),
        ("Priority", PendingVerdict.WAITS, "other jobs come first"),
        ("BadConstraints", PendingVerdict.NEVER, "gpu_type"),
        ("PartitionTimeLimit", PendingVerdict.NEVER, "shorter 'walltime'"),
        ("QOSMaxGRESPerUser", PendingVerdict.WAITS, "of the QOS is reached: GPUs of each user"),
        (
            "AssocGrpCpuLimit",
            PendingVerdict.WAITS,
            "of the account is reached: CPUs of everybody in it",
        ),
        ("AssocGrpCPUMinutesLimit", PendingVerdict.WAITS, "minutes of CPUs of everybody"),
        ("QOSMaxWallDurationPerJobLimit", PendingVerdict.NEVER, "walltime of each job"),
        ("MaxGRESPerAccount", PendingVerdict.WAITS, "GPUs of each account"),
        ("QOSMinGRES", PendingVerdict.NEVER, "least GPUs"),
        ("QOSMaxJobsPerUserLimit", PendingVerdict.WAITS, "running jobs of each user"),
        ("QOSSomethingNew", PendingVerdict.WAITS, "(QOSSomethingNew)"),
        ("JobHoldMaxRequeue", PendingVerdict.HELD, "scontrol release"),
        ("JobHeldUser", PendingVerdict.HELD, "release it"),
        ("JobHeldByTheMoon", PendingVerdict.HELD, "JobHeldByTheMoon"),
        ("SomethingSlurmLearntLater", PendingVerdict.UNKNOWN, "SomethingSlurmLearntLater"),
        (
            "ReqNodeNotAvail,_UnavailableNodes:gpu003",
            PendingVerdict.WAITS,
            "UnavailableNodes: gpu003",
        ),
        ("None", PendingVerdict.UNKNOWN, ""),
    ],
)
def test_reasons_in_words(code: str, verdict: PendingVerdict, words: str) -> None:
    found = explain(code)
    assert found.verdict is verdict
    assert words in found.sentence


@given(st.text(max_size=60))
def test_every_reason_has_an_answer_and_none_is_lost(code: str) -> None:
    found = explain(code)
    word = code.strip()
    bare = word[1:-1] if word.startswith("(") and word.endswith(")") else word
    nothing = bare.lower() in ("", "none", "null", "n/a")
    assert bool(found.sentence.strip()) == (not nothing and bool(bare.strip()))
    assert is_held(code) == (found.verdict is PendingVerdict.HELD)


@pytest.mark.parametrize(
    ("said", "lasting", "words"),
    [
        ("sbatch: error: Batch job submission failed: Invalid account or account/partition "
         "combination specified", True, "partitions.*.account"),
        ("sbatch: error: invalid partition specified: nosuch\nsbatch: error: Batch job submission "
         "failed: Invalid partition name specified", True, "no such partition"),
        ("sbatch: error: Batch job submission failed: Requested node configuration is not "
         "available", True, "no node has what is asked for"),
        ("sbatch: error: Batch job submission failed: Job violates accounting/QOS policy (job "
         "submit limit, user's size and/or time limits)", False, "limit of the account or QOS"),
        ("sbatch: error: Slurm temporarily unable to accept job, sleeping and retrying.", False,
         "takes no more jobs now"),
        ("sbatch: error: the moon is full", False, "the moon is full"),
        ("", False, "no reason was given"),
    ],
)  # fmt: skip
def test_refusals_in_words(said: str, lasting: bool, words: str) -> None:
    found = refusal(said)
    assert found.lasting is lasting
    assert words in found.sentence


@given(st.text(max_size=400))
def test_every_refusal_has_words_of_bounded_length(said: str) -> None:
    found = refusal(said)
    assert found.words and len(found.words) < 320
