"""How much warning a partition gives before Slurm takes a job, and what follows; pure.

Two sources: the site file, and what Slurm itself says (`scontrol show partition` and `config`). The
values come from several levels (cluster, partition, QOS); here they are merged per partition.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from flexslurm.config.site import Partition, Site
from flexslurm.slurm.client import PartitionInfo
from flexslurm.slurm.times import told_duration

_SECONDS = re.compile(r"^(\d{1,9})\s*(?:sec|s)?$", re.ASCII)


@dataclass(frozen=True, slots=True)
class PreemptionWindow:
    """What a pilot in a partition can count on."""

    partition: str
    preemptible: bool
    grace_s: float
    kill_wait_s: float
    exempt_s: float
    """The run that is guaranteed before it may be preempted."""
    requeued: bool
    user_signal: bool = False
    """The warning is the job's own `--signal` and not SIGTERM."""

    @property
    def warning_s(self) -> float:
        """From the first signal to SIGKILL, as far as it is promised.

        With a grace time the kill wait comes on top, after a check that Slurm makes every 30 s:
        not counted. Without one, the kill wait is all there is.
        """
        return self.grace_s if self.grace_s > 0 else self.kill_wait_s

    def in_words(self) -> str:
        if not self.preemptible:
            return f"{self.partition}: not preempted"
        parts = [f"{self.partition}: {self.warning_s:g} s from warning to end"]
        parts[0] += "" if self.grace_s > 0 else " (no grace time, only the kill wait)"
        if self.exempt_s > 0:
            parts.append(f"safe for its first {self.exempt_s:g} s")
        parts.append("then requeued" if self.requeued else "then cancelled: it does not come back")
        parts.append(f"told by {'SIGUSR1' if self.user_signal else 'SIGTERM'} to the agents")
        return ", ".join(parts)


def site_window(name: str, site: Site) -> PreemptionWindow:
    """What the site file promises."""
    entry = site.partitions.get(name, Partition())
    return PreemptionWindow(
        partition=name,
        preemptible=entry.preemptible,
        grace_s=entry.grace,
        kill_wait_s=site.kill_wait_s(name),
        exempt_s=entry.exempt,
        requeued=entry.requeue,
    )


def slurm_window(
    info: PartitionInfo, others: Sequence[PartitionInfo], config: Mapping[str, str]
) -> PreemptionWindow:
    """What Slurm says. Preemption by QOS is not seen here: then `preemptible` may be too low."""
    mode = _mode(info.preempt_mode, config)
    by_priority = config.get("PreemptType", "") == "preempt/partition_prio"
    above = any(
        other.priority_tier > info.priority_tier and set(other.nodes) & set(info.nodes)
        for other in others
    )
    return PreemptionWindow(
        partition=info.name,
        preemptible=by_priority and mode != "OFF" and above,
        grace_s=info.grace_s,
        kill_wait_s=_seconds(config.get("KillWait", "")) or 30.0,
        exempt_s=told_duration(config.get("PreemptExemptTime", "")) or 0.0,
        # Our jobs ask for --requeue, so JobRequeue does not matter.
        requeued=mode == "REQUEUE",
        user_signal=_sends_user_signal(config),
    )


def _mode(own: str, config: Mapping[str, str]) -> str:
    """A partition's mode, or the cluster's; GANG and WITHIN go beside it."""
    text = own if own.upper() not in ("", "N/A", "NONE") else config.get("PreemptMode", "OFF")
    words = [word for word in text.upper().split(",") if word not in ("GANG", "WITHIN", "PRIORITY")]
    return words[0] if words else "OFF"


def _sends_user_signal(config: Mapping[str, str]) -> bool:
    """The key moved in 23.02, where both are known."""
    words = f"{config.get('PreemptParameters', '')},{config.get('SlurmctldParameters', '')}"
    return bool({"send_user_signal", "preempt_send_user_signal"} & set(words.lower().split(",")))


def _seconds(text: str) -> float | None:
    match = _SECONDS.match(text.strip())
    return float(match[1]) if match else None


def disagreements(
    site: Site, partitions: Sequence[PartitionInfo], config: Mapping[str, str]
) -> list[str]:
    """Where the site file promises what Slurm does not: one line each, for a warning."""
    known = {info.name: info for info in partitions}
    lines = []
    for name in site.partitions:
        if name not in known:
            lines.append(f"partition '{name}': Slurm does not have it (it has {', '.join(known)})")
            continue
        ours, theirs = site_window(name, site), slurm_window(known[name], partitions, config)
        lines += compare_windows(ours, theirs)
        if not known[name].up:
            lines.append(f"partition '{name}': it is not up")
    return lines


def compare_windows(ours: PreemptionWindow, theirs: PreemptionWindow) -> list[str]:
    """Where the first promises more than the second, a line each."""
    name, lines = ours.partition, []
    if theirs.preemptible and not ours.preemptible:
        lines.append(
            f"partition '{name}': Slurm preempts jobs here; the site file says it does not"
        )
    if not (ours.preemptible and theirs.preemptible):
        return lines
    if ours.warning_s > theirs.warning_s:
        lines.append(
            f"partition '{name}': Slurm gives {theirs.warning_s:g} s of warning, "
            f"the site file says {ours.warning_s:g} s"
        )
    if ours.requeued and not theirs.requeued:
        lines.append(f"partition '{name}': Slurm cancels preempted jobs and does not requeue them")
    if ours.exempt_s > theirs.exempt_s:
        lines.append(
            f"partition '{name}': Slurm guarantees {theirs.exempt_s:g} s of run, "
            f"the site file says {ours.exempt_s:g} s"
        )
    return lines
