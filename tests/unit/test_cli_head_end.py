"""A head that ends before it serves is told in its own words, with its own exit code."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from flexslurm.cli.head_end import ended_early
from flexslurm.errors import EnvironmentFault, ServiceError

STAMP = "2026-11-29 21:07:04.231 head"


def test_its_last_error_is_the_message_and_the_rest_the_hint() -> None:
    log = [
        f"{STAMP} I starts",
        f"{STAMP} E cannot bind the API to 0.0.0.0:8000: Address already in use",
        "  gateway.port: 0 takes any free port",
    ]
    error = ended_early(log, 8, "chat")
    assert isinstance(error, EnvironmentFault)
    assert str(error).splitlines() == [
        "the head has ended before it served: "
        "cannot bind the API to 0.0.0.0:8000: Address already in use",
        "  gateway.port: 0 takes any free port",
        "  the whole log: flexslurm logs chat head",
    ]


@pytest.mark.parametrize(
    ("code", "exit_code"),
    [(3, 3), (4, 4), (5, 5), (6, 6), (7, 7), (8, 8), (1, 7), (None, 7), (-9, 7), (137, 7)],
)
def test_codes_of_the_table_are_kept(code: int | None, exit_code: int) -> None:
    assert ended_early([f"{STAMP} E x"], code, "chat").exit_code == exit_code


@pytest.mark.parametrize(
    "log",
    [
        [],
        ["slurmstepd: error: no memory"],
        [f"{STAMP} E once", f"{STAMP} I went on", "Killed"],
        [f"{STAMP} E a bug", "Traceback (most recent call last):", "ValueError"],
    ],
)
def test_without_a_last_word_the_log_speaks(log: list[str]) -> None:
    error = ended_early(log, 8, "chat")
    assert type(error) is ServiceError
    assert all(f"  {line}" in error.message.splitlines() for line in log or ["(no output)"])


def test_what_a_head_logs_is_understood(tmp_path: Path) -> None:
    """A real head process, whose service directory is empty: its own log and exit code."""
    done = subprocess.run(
        [sys.executable, "-P", "-m", "flexslurm.head.main", "--service-dir", str(tmp_path)],
        capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    error = ended_early(done.stderr.splitlines(), done.returncode, "chat")
    assert error.exit_code == done.returncode == 7
    assert str(tmp_path) in error.message and "\n" not in error.message
