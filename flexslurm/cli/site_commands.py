"""`flexslurm site`: writes a site file from a live cluster, or checks one; changes no cluster."""

from __future__ import annotations

import itertools
import json
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

import click

from flexslurm.cli import shared_options as shared
from flexslurm.cli.main import CommandGroup
from flexslurm.cli.outputs import check_free, put_text

if TYPE_CHECKING:
    from flexslurm.config.site import Site, SlurmSettings
    from flexslurm.config.sources import Loaded
    from flexslurm.slurm.client import SlurmClient
    from flexslurm.slurm.discover import ClusterFacts, QosInfo
    from flexslurm.slurm.discover_gpus import CardFigures
    from flexslurm.slurm.sandbox_config import SandboxConfig
    from flexslurm.slurm.site_check import Findings


@click.group(cls=CommandGroup)
def site() -> None:
    """Write a site file from a live cluster, or check one."""


@site.command()
@shared.TO_FILE
@shared.FORCE
@click.option("--cluster", metavar="NAME", help="One of several clusters, as for sbatch -M.")
@click.option(
    "--command",
    "commands",
    metavar="NAME=OTHER",
    multiple=True,
    help="The site's own name of a command: --command squeue=squeue.tiny.",
)
def discover(
    target: Path | None, force: bool, cluster: str | None, commands: tuple[str, ...]
) -> None:
    """Ask Slurm, and this machine, what the cluster is made of."""
    from flexslurm.config.schema import parse_section
    from flexslurm.config.site import Site
    from flexslurm.slurm.discover import site_text

    settings = _settings(cluster, commands)
    check_free(target, force)
    text = site_text(facts_of(settings), card_of)
    parse_section(Site, text, "the discovered site")
    if put_text(text, target):
        click.echo(f"wrote {target}; check it with: flexslurm site check {target}")


def _settings(cluster: str | None, commands: tuple[str, ...]) -> SlurmSettings:
    from flexslurm.config.schema import nearest_hint
    from flexslurm.config.site import COMMANDS, SlurmSettings
    from flexslurm.errors import ConfigError

    names = {}
    for entry in commands:
        name, equals, other = entry.partition("=")
        if not equals or not name or not other:
            raise click.UsageError(f"--command takes NAME=OTHER, not '{entry}'")
        if name not in COMMANDS:
            hint = nearest_hint(name, COMMANDS)
            raise ConfigError(f"--command: Slurm has no command '{name}'", hint=hint)
        names[name] = other
    return SlurmSettings(cluster=cluster, commands=names, conf=os.environ.get("SLURM_CONF"))


def catalogue_name(slurm_type: str) -> str | None:
    """The catalogue's card for a GRES type such as `nvidia_a100-sxm4-80gb`; None: not sure."""
    from flexslurm.planner.catalogue import ALIASES, CATALOGUE, find

    exact = find(slurm_type)
    if exact is not None:
        return exact.name
    words = re.split(r"[^a-z0-9]+", slurm_type.lower())
    names = {*CATALOGUE, *ALIASES}
    joined = {"".join(pair) for pair in itertools.pairwise(words)}
    memory = next((m[1] for w in words if (m := re.fullmatch(r"(\d+)gb?", w))), None)
    for word in [*words, *sorted(joined)]:
        if memory is not None and f"{word}-{memory}" in names:
            return find(f"{word}-{memory}").name  # type: ignore[union-attr]
        if word in names:
            return find(word).name  # type: ignore[union-attr]
    return None


def card_of(slurm_type: str) -> CardFigures | None:
    """The catalogue's figures for a GRES type; None: not sure which card it is."""
    from flexslurm.planner.catalogue import find
    from flexslurm.slurm.discover_gpus import CardFigures

    name = catalogue_name(slurm_type)
    gpu = None if name is None else find(name)
    if gpu is None:
        return None
    flops = gpu.flops.get("bfloat16", 0.0)
    return CardFigures(gpu.name, gpu.memory_bytes, gpu.memory_bandwidth, flops)


def facts_of(settings: SlurmSettings) -> ClusterFacts:
    """Some calls of scontrol, one of sacctmgr where there is one. Raises SlurmError."""
    from flexslurm.slurm.client import SlurmClient
    from flexslurm.slurm.discover import ClusterFacts
    from flexslurm.slurm.fabric import fabric_ports

    client = SlurmClient(settings)
    config = client.config()
    return ClusterFacts(
        nodes=tuple(client.nodes()),
        partitions=tuple(client.partitions()),
        config=config,
        qos=tuple(_qos(client)),
        fabric=tuple(fabric_ports()),
        switches=tuple(_switches(client)),
        conf=settings.conf,
        commands=settings.commands,
        cluster=settings.cluster,
        sandbox=_sandbox(config),
    )


def _qos(client: SlurmClient) -> list[QosInfo]:
    """Empty where there is no accounting: preemption by QOS needs it."""
    from flexslurm.errors import FlexslurmError
    from flexslurm.slurm.discover import parse_qos

    fields = "format=name,gracetime,preemptmode,preempt,preemptexempttime"
    try:
        return parse_qos(client.call("sacctmgr", "-nP", "show", "qos", fields).out)
    except FlexslurmError:
        return []


def _switches(client: SlurmClient) -> list[str]:
    from flexslurm.errors import FlexslurmError
    from flexslurm.slurm.records import parse_records

    try:
        records = parse_records(client.call("scontrol", "show", "topology").out, "SwitchName")
    except FlexslurmError:
        return []
    leaves = [record for record in records if record.get("Level", "0") == "0"]
    return [f"{record['SwitchName']} {record.get('Nodes', '')}".strip() for record in leaves]


def _sandbox(config: dict[str, str]) -> SandboxConfig | None:
    """The sandbox's own record beside its slurm.conf, which says what its GPUs play."""
    from flexslurm.slurm.sandbox_config import SandboxConfig

    path = Path(config.get("SLURM_CONF", "")).parent / "sandbox.json"
    if config.get("ClusterName") != "sandbox":
        return None
    try:
        return SandboxConfig.model_validate(json.loads(path.read_text())["config"])
    except (OSError, ValueError, KeyError):
        return None


# -------------------------------------------------------------------------------------- check


@site.command()
@click.argument("site_file", metavar="SITE.yaml", type=shared.PATH)
@click.option("--offline", is_flag=True, help="Look at the file alone; ask no Slurm.")
@shared.JSON
def check(site_file: Path, offline: bool, as_json: bool) -> None:
    """Say what is wrong with a site file, and how much warning each partition gives."""
    from flexslurm.config.check import check_slurm_conf
    from flexslurm.config.sources import load_site
    from flexslurm.errors import ConfigError

    loaded = load_site(site_file)
    if not offline:
        check_slurm_conf(loaded)
    found = findings_of(loaded, offline)
    click.echo(_as_json(loaded.value, found) if as_json else _as_text(loaded.value, found))
    if found.problems:
        count = len(found.problems)
        raise ConfigError(f"{count} problem{'s' * (count != 1)}", file=str(site_file))


def findings_of(loaded: Loaded[Site], offline: bool) -> Findings:
    """What is wrong with a site file, by itself and, unless `offline`, beside the live cluster.

    Raises SlurmError where Slurm is to be asked and does not answer.
    """
    from flexslurm.errors import FlexslurmError
    from flexslurm.planner.topology import Topology
    from flexslurm.slurm.site_check import check_against, check_alone
    from flexslurm.wire.address import node_address

    site = loaded.value
    found = check_alone(site)
    try:
        Topology.from_site(site, "bfloat16")
    except FlexslurmError as error:
        found.problems.append(str(error))
    if offline:
        return found
    asked = check_against(site, facts_of(site.slurm))
    found.problems += asked.problems
    found.notes += asked.notes
    try:
        node_address(site.network)
    except FlexslurmError as error:
        found.notes.append(f"on this machine: {error.message}")
    shared = site.paths.shared_dir
    if shared is not None and not os.access(shared, os.W_OK):
        found.problems.append(f"paths.shared_dir: {shared} is not there, or not writable here")
    return found


def _as_text(site: Site, found: Findings) -> str:
    from flexslurm.slurm.window import site_window

    lines = [f"problem: {line}" for line in found.problems]
    lines += [f"note: {line}" for line in found.notes]
    lines += [site_window(name, site).in_words() for name in site.partitions]
    return "\n".join([*lines, f"{site.name}: {'not fit' if found.problems else 'fine'}"])


def _as_json(site: Site, found: Findings) -> str:
    from flexslurm.slurm.window import site_window

    windows = {}
    for name in site.partitions:
        window = site_window(name, site)
        windows[name] = {
            "preemptible": window.preemptible,
            "warning_s": window.warning_s if window.preemptible else None,
            "exempt_s": window.exempt_s,
            "requeued": window.requeued,
        }
    data = {"problems": found.problems, "notes": found.notes, "partitions": windows}
    return json.dumps(data, indent=2)
