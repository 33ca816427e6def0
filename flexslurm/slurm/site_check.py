"""What is wrong with a site file, beside the cluster it describes; pure, asks nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from flexslurm.config.site import Partition, Site
from flexslurm.config.units import TIME
from flexslurm.slurm.client import NodeInfo, PartitionInfo, release_in
from flexslurm.slurm.discover import ClusterFacts, by_qos, window_of
from flexslurm.slurm.gpu_request import gpu_request
from flexslurm.slurm.window import compare_windows, disagreements, site_window

SHORT_WARNING_S = 15.0


@dataclass(slots=True)
class Findings:
    """Problems keep a service from running, or from what the file promises; notes do not."""

    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def check_alone(site: Site) -> Findings:
    """What the file itself shows."""
    found = Findings()
    if not site.partitions:
        found.problems.append("it names no partition: nothing can be submitted")
    for name, partition in site.partitions.items():
        window = site_window(name, site)
        if partition.gpu_types and window.preemptible and window.warning_s < SHORT_WARNING_S:
            found.notes.append(
                f"partition '{name}': {window.warning_s:g} s of warning are short for a move; "
                "what only the lost GPUs held is computed again"
            )
        if partition.gpu_types and partition.gpus_per_node is None:
            found.notes.append(f"partition '{name}': gpus_per_node is not given, nothing bounds it")
        longest, usual = partition.max_walltime, partition.default_walltime
        if longest is not None and usual is not None and usual > longest:
            found.problems.append(
                f"partition '{name}': default_walltime {TIME.show(usual)} is longer than "
                f"max_walltime {TIME.show(longest)}"
            )
    _check_head(site, found)
    _check_network(site, found)
    return found


def _check_network(site: Site, found: Findings) -> None:
    rules = [key for key in ("interface", "subnet", "suffix") if getattr(site.network, key)]
    if len(rules) > 1:
        others = " and ".join(rules[1:])
        found.notes.append(f"network.{rules[0]} counts, and not {others}: give one rule")


def _check_head(site: Site, found: Findings) -> None:
    place = site.head.partition
    if place is None:
        found.notes.append("head.partition is not given: the head's job goes to Slurm's default")
    elif place not in site.partitions:
        found.notes.append(f"head.partition '{place}' is not among 'partitions'")
    elif site.partitions[place].preemptible:
        found.problems.append(
            f"head.partition '{place}' may be preempted: all streams break when it is"
        )


def check_against(site: Site, facts: ClusterFacts) -> Findings:
    """Where the file and the cluster differ."""
    found = Findings()
    known = {info.name: info for info in facts.partitions}
    if by_qos(facts.config):
        found.notes.append("preemption is by QOS: which one a partition's 'qos' names counts")
        _check_qos(site, known, facts, found)
    else:
        found.problems += disagreements(site, facts.partitions, facts.config)
    head = site.head.partition
    if head is not None and head not in known:
        found.problems.append(f"head.partition '{head}': Slurm does not have it")
    for name, partition in site.partitions.items():
        if name in known:
            _check_partition(site, name, partition, known[name], facts.nodes, found)
    _check_users_signal(facts, found)
    return found


def _check_qos(
    site: Site, known: Mapping[str, PartitionInfo], facts: ClusterFacts, found: Findings
) -> None:
    """What each partition's QOS promises; nothing is compared where none is named."""
    there = {qos.name for qos in facts.qos}
    for name, partition in site.partitions.items():
        if name not in known:
            found.problems.append(f"partition '{name}': Slurm does not have it")
        elif partition.qos is not None and there and partition.qos not in there:
            has = ", ".join(sorted(there))
            found.problems.append(
                f"partition '{name}': Slurm has no QOS '{partition.qos}' (it has {has})"
            )
        elif partition.qos is not None and there:
            theirs = window_of(known[name], facts, partition.qos)
            found.problems += compare_windows(site_window(name, site), theirs)


def _check_partition(
    site: Site,
    name: str,
    partition: Partition,
    info: PartitionInfo,
    nodes: Sequence[NodeInfo],
    found: Findings,
) -> None:
    members = [node for node in nodes if node.name in set(info.nodes)]
    asked = {gpu_type: gpu_request(gpu_type, site) for gpu_type in partition.gpu_types}
    for gpu_type, request in asked.items():
        if not any(request.gpus_in(node.gres) for node in members):
            found.problems.append(
                f"partition '{name}': Slurm shows no '{request}' (gpu_types: {gpu_type}), "
                f"it has {_gpus_there(members)}"
            )
    counts = [
        max(sum(r.gpus_in(node.gres) for r in asked.values()), sum(node.gpus.values()))
        for node in members
    ]
    most = max(counts, default=0)
    if partition.gpus_per_node is not None and partition.gpus_per_node > most:
        found.problems.append(
            f"partition '{name}': gpus_per_node is {partition.gpus_per_node}, "
            f"Slurm's largest node has {most}"
        )
    for key in ("default_walltime", "max_walltime"):
        ours = getattr(partition, key)
        if ours is not None and info.max_time_s is not None and ours > info.max_time_s:
            found.problems.append(
                f"partition '{name}': {key} is {TIME.show(ours)}, "
                f"Slurm allows {TIME.show(info.max_time_s)}"
            )
    if members and not any(node.state.usable_now for node in members):
        states = sorted({"+".join((n.state.base, *n.state.flags)) for n in members})
        found.notes.append(f"partition '{name}': no node is usable now ({', '.join(states)})")


def _gpus_there(nodes: Sequence[NodeInfo]) -> str:
    """What could be asked for there, as --gres has it."""
    there = {
        f"{entry.name}:{entry.type}" if entry.type else f"{entry.name} without a type"
        for node in nodes
        for entry in node.gres
        if entry.name in ("gpu", "shard", "mps") and entry.count
    }
    return ", ".join(sorted(there)) or "no GPUs"


def _check_users_signal(facts: ClusterFacts, found: Findings) -> None:
    windows = [window_of(info, facts) for info in facts.partitions]
    if any(w.user_signal for w in windows):
        found.notes.append("Slurm warns with SIGUSR1 (send_user_signal): the pilots ask for it")
        return
    release = release_in(facts.config.get("SLURM_VERSION", ""))
    if release is not None and any(w.preemptible and w.grace_s > 0 for w in windows):
        found.notes.append(
            "Slurm warns with SIGTERM, which may be a cancel's and promises the kill wait alone; "
            f"with '{signal_hint(release)}' in slurm.conf the whole grace time is known at once"
        )


def signal_hint(version: tuple[int, int, int]) -> str:
    """The slurm.conf line by which a batch script hears of a preemption, in this release."""
    if version >= (23, 2, 0):
        return "PreemptParameters=send_user_signal"
    return "SlurmctldParameters=preempt_send_user_signal"
