"""The warning a partition gives, from the site file and from Slurm's own words."""

from __future__ import annotations

from pathlib import Path

import pytest

from flexslurm.config.schema import parse_section
from flexslurm.config.site import Site
from flexslurm.slurm.client import PartitionInfo
from flexslurm.slurm.records import parse_settings
from flexslurm.slurm.window import disagreements, site_window, slurm_window


def site(partition: str, rest: str = "") -> Site:
    text = f"name: x\ngpu_types: {{a: {{}}}}\npartitions: {{low: {{{partition}}}}}\n{rest}"
    return parse_section(Site, text, "site.yaml")


def part(
    name: str = "low", tier: int = 1, mode: str = "REQUEUE", grace: float = 20
) -> PartitionInfo:
    return PartitionInfo(name, ("n1", "n2"), True, mode, tier, grace, None, None, False)


CONFIG = {"PreemptType": "preempt/partition_prio", "KillWait": "30 sec", "PreemptMode": "REQUEUE"}
HIGH = part("high", 10, "OFF", 0)


def test_grace_time_or_kill_wait() -> None:
    with_grace = site_window("low", site("grace: 20s"))
    assert with_grace.warning_s == 20 and "20 s from warning to end" in with_grace.in_words()
    without = site_window("low", site("", "slurm: {kill_wait: 10s}"))
    assert without.warning_s == 10 and "only the kill wait" in without.in_words()
    assert site_window("low", site("preemptible: false")).in_words() == "low: not preempted"


def test_no_grace_no_requeue_short_kill_wait() -> None:
    window = slurm_window(part(mode="CANCEL", grace=0), [HIGH], CONFIG | {"KillWait": "10 sec"})
    assert window.warning_s == 10 and not window.requeued
    assert "does not come back" in window.in_words()


def test_values_from_several_levels_are_merged() -> None:
    config = CONFIG | {"PreemptExemptTime": "30:00", "PreemptMode": "CANCEL", "KillWait": "60 sec"}
    window = slurm_window(part(mode="N/A", grace=600), [HIGH], config)
    assert (window.exempt_s, window.warning_s, window.requeued) == (1800, 600, False)
    assert "safe for its first 1800 s" in window.in_words()


@pytest.mark.parametrize(
    ("info", "others", "config", "preemptible"),
    [
        (part(), [HIGH], {}, True),
        (part(mode="OFF"), [HIGH], {}, False),
        (part(mode="GANG,SUSPEND"), [HIGH], {}, True),
        (part(), [part("same", 1)], {}, False),
        (part(), [HIGH], {"PreemptType": "preempt/none"}, False),
        (part(), [PartitionInfo("far", ("n9",), True, "OFF", 9, 0, None, None, False)], {}, False),
    ],
)
def test_who_is_preempted(
    info: PartitionInfo, others: list[PartitionInfo], config: dict[str, str], preemptible: bool
) -> None:
    assert slurm_window(info, [info, *others], CONFIG | config).preemptible is preemptible


@pytest.mark.parametrize(
    "config",
    [
        {"PreemptParameters": "youngest_first,send_user_signal"},
        {"SlurmctldParameters": "preempt_send_user_signal,enable_configless"},
    ],
)
def test_sites_that_send_the_jobs_own_signal(config: dict[str, str]) -> None:
    assert slurm_window(part(), [HIGH], CONFIG | config).user_signal
    assert "SIGUSR1" in slurm_window(part(), [HIGH], CONFIG | config).in_words()
    assert not slurm_window(part(), [HIGH], CONFIG).user_signal


def test_promises_that_slurm_does_not_keep_are_told() -> None:
    slurm = [part(), HIGH]
    assert disagreements(site("grace: 20s"), slurm, CONFIG) == []
    assert disagreements(site("grace: 5s"), slurm, CONFIG) == []
    (less,) = disagreements(site("grace: 60s"), slurm, CONFIG)
    assert "Slurm gives 20 s of warning, the site file says 60 s" in less
    (safe,) = disagreements(site("preemptible: false"), slurm, CONFIG)
    assert "Slurm preempts jobs here" in safe
    (gone,) = disagreements(site("grace: 20s"), [part(mode="CANCEL"), HIGH], CONFIG)
    assert "does not requeue" in gone
    (missing,) = disagreements(site("grace: 20s"), [HIGH], CONFIG)
    assert missing == "partition 'low': Slurm does not have it (it has high)"
    (exempt,) = disagreements(site("grace: 20s, exempt: 1h"), slurm, CONFIG)
    assert "guarantees 0 s of run" in exempt


def test_a_real_configuration(shared_dir: Path) -> None:
    path = shared_dir / "cases" / "slurm-22.05" / "22.05-scontrol_config.txt"
    config = parse_settings(path.read_text(encoding="utf-8"))
    window = slurm_window(part(), [HIGH], config)
    assert window.kill_wait_s == 8 and window.preemptible
