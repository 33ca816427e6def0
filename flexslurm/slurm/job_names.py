"""What the jobs of a service are called, so that they are found again by their names."""

from __future__ import annotations

UNSENT = ""
"""The job id of what is about to be submitted: written before, replaced after."""


def pilot_job(service: str, fragment: str) -> str:
    return f"{service}.{fragment}"


def head_job(service: str) -> str:
    return f"{service}.head"
