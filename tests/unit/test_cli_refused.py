"""What a launch says where sbatch refuses: Slurm's lines apart, and what to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from flexslurm.cli.refused import told
from flexslurm.errors import SlurmError, SlurmUnavailable
from flexslurm.slurm.command import Completed, failure

SITE = Path("my site.yaml")


def refused(*lines: str, command: str = "sbatch") -> SlurmError:
    text = "".join(f"sbatch: error: {line}\n" for line in lines)
    return told(failure(Completed((f"/usr/bin/{command}",), 1, "", text)), command, SITE)


@pytest.mark.parametrize("command", ["sbatch", "sbatch.tiny"])
def test_a_partition_that_only_the_site_file_has(command: str) -> None:
    error = refused(
        "invalid partition specified: gone",
        "Batch job submission failed: Invalid partition name specified",
        command=command,
    )
    assert str(error).splitlines() == [
        "Slurm has no such partition:",
        f"  {command}: invalid partition specified: gone",
        f"  {command}: Batch job submission failed: Invalid partition name specified",
        "  see sinfo; run: flexslurm site check 'my site.yaml'",
    ]


def test_a_line_that_slurm_says_twice_is_said_once() -> None:
    line = "Batch job submission failed: Invalid qos specification"
    assert str(refused(line, line)).count("Invalid qos") == 1


def test_what_may_pass_is_no_fault_of_the_site_file() -> None:
    error = refused("Batch job submission failed: the moon is full")
    assert "the moon is full" in error.message and error.hint is None


def test_errors_of_other_kinds_stay_as_they_are() -> None:
    silent = SlurmUnavailable("sbatch: nothing")
    other = SlurmError("scancel: error: access denied")
    assert told(silent, "sbatch", SITE) is silent
    assert told(other, "sbatch", SITE) is other
