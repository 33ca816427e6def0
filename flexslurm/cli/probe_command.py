"""`flexslurm probe`: measures the links between nodes; only asks and prints.

The ranks are `slurm.link_probe`'s, the file's form `planner.links`'.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from flexslurm.cli import shared_options as shared
from flexslurm.cli.outputs import replace_file

if TYPE_CHECKING:
    from flexslurm.planner.links import LinkRow
    from flexslurm.slurm.link_probe import ProbeResult

_TABLE_ROWS = 20


@click.command()
@shared.site("What the cluster is made of; not needed with --local.")
@click.option("--nodes", "-n", type=click.IntRange(2, 4096), default=2, show_default=True)
@click.option("--partition", help="Where the nodes are; default: Slurm's own.")
@click.option("--nodelist", metavar="NODES", help="These nodes, as a100n[1-4].")
@click.option("--local", is_flag=True, help="Between processes of this machine, by mpiexec.")
@click.option(
    "--pairs",
    type=click.IntRange(1),
    default=64,
    show_default=True,
    help="Most pairs that are measured; of more a sample.",
)
@click.option("--mpi", metavar="TYPE", help="srun's --mpi; default: what the MPI library wants.")
@click.option("--timeout", type=shared.Number(1), default=300.0, show_default=True, metavar="S")
@click.option(
    "--out",
    "path",
    type=click.Path(path_type=Path),
    default=Path("links.csv"),
    show_default=True,
    metavar="FILE",
    help="Where the measurements go, for `flexslurm plan --links`.",
)
@shared.QUIET  # fmt: skip
def probe(**options: Any) -> None:
    """Measure latency and bandwidth between nodes, for `measured.links` in the site file.

    One MPI process runs on each node, started by srun: in a job of its own, or as a step of the job
    that this runs in.
    """
    answer = _measure(options)
    rows = _write(answer, options["path"])
    click.echo(_report(rows, answer, options["path"]))


def _measure(options: dict[str, Any]) -> ProbeResult:
    from flexslurm.config.check import site_with_slurm
    from flexslurm.config.sources import load_site
    from flexslurm.slurm import probing

    started = time.monotonic()

    def say(line: str) -> None:
        if not options["quiet"]:
            click.echo(f"[{time.monotonic() - started:5.1f} s] {line}", err=True)

    file = options["site_file"]
    site = None
    if file is not None:
        site = load_site(file).value if options["local"] else site_with_slurm(file)
    asked = probing.ProbeOptions(
        nodes=options["nodes"], pairs=options["pairs"], timeout_s=options["timeout"],
        partition=options["partition"], nodelist=options["nodelist"], mpi=options["mpi"],
    )  # fmt: skip
    if options["local"]:
        return probing.on_this_machine(site, asked, say)
    if site is None:
        raise click.UsageError("--site SITE.yaml is needed (or --local)")
    return probing.on_slurm(site, asked, say)


def _write(answer: ProbeResult, path: Path) -> tuple[LinkRow, ...]:
    from flexslurm.planner.links import LinkRow, read_links, write_links

    rows = [LinkRow(t.source, t.target, t.nbytes, t.seconds) for t in answer.timings]
    text = write_links(rows, f"mpi={answer.library}")
    replace_file(path, text)
    return read_links(text, str(path))


def _report(rows: tuple[LinkRow, ...], answer: ProbeResult, path: Path) -> str:
    from flexslurm.planner.links import node_link, pair_links

    pairs = pair_links(rows)
    lines = [f"{answer.ranks} nodes, {len(pairs)} pairs, {answer.library}"]
    slowest = sorted(pairs, key=lambda pair: pair.link.bandwidth)
    for pair in slowest[:_TABLE_ROWS]:
        lines.append(
            f"  {pair.source} - {pair.target}: {pair.link.bandwidth / 1e9:.3f} GB/s, "
            f"{pair.link.latency_s * 1e6:.1f} us"
        )
    if len(pairs) > _TABLE_ROWS:
        lines.append(f"  and {len(pairs) - _TABLE_ROWS} quicker ones")
    link = node_link(rows)
    lines += [
        f"written to {path}; to plan with it, in the site file:",
        f"measured: {{links: {path}}}",
        "or its figures alone:",
        "network:",
        f"  node_link: {{bandwidth: {link.bandwidth / 1e9:.4g}GB/s, "
        f"latency: {link.latency_s * 1e6:.4g}us}}",
    ]
    return "\n".join(lines)
