"""`flexslurm plan`: the gears for a model and a pool of GPUs; never submits or starts anything."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from flexslurm.cli import shared_options as shared
from flexslurm.cli.outputs import check_replaceable, replace_file
from flexslurm.cli.quiet_stdout import only_ours_on_stdout
from flexslurm.errors import CapacityError, ConfigError
from flexslurm.gear import Gear, NoGear, Signature

if TYPE_CHECKING:
    from flexslurm.planner.capacity import Capacity
    from flexslurm.planner.explain import Explained
    from flexslurm.planner.model_spec import ModelSpec
    from flexslurm.planner.planner import Planner
    from flexslurm.planner.problem import StageKind
    from flexslurm.planner.profiles import Profile
    from flexslurm.planner.topology import Topology

MOST_ROWS = 200
"""Allocations that are all planned without being asked for."""
MOST_PICTURES = 8


@dataclass(frozen=True, slots=True)
class Inputs:
    """What to plan."""

    spec: ModelSpec
    topology: Topology
    pool: Signature
    from_site: bool
    profiles: Mapping[StageKind, Profile]


@dataclass(slots=True)
class Results:
    """What was planned; filled step by step."""

    planned: dict[Signature, Gear | NoGear] = field(default_factory=dict)
    gaps: dict[Signature, float] = field(default_factory=dict)
    explained: tuple[Signature, Explained] | None = None
    what_if: Gear | NoGear | None = None
    capacity: Capacity | None = None
    seconds: float = 0.0


@click.command()
@click.option("--model", required=True, help="Checkpoint directory, config.json or a known name.")
@shared.site("GPU types and links; without it the catalogue's.")
@click.option("--pool", required=True, metavar="TYPE:GPUSxNODES,…", help="As a100:4x8,l40s:2x16.")
@click.option("--workload", metavar="in=512,out=128,rate=2/s", help="Mean lengths, and a rate.")
@click.option("--slo", metavar="ttft=2s,tpot=50ms", help="Targets that estimates must meet.")
@click.option(
    "--objective", type=click.Choice(["throughput", "latency", "gpus"]), default="throughput"
)
@click.option(
    "--dtype",
    type=click.Choice(["float32", "bfloat16", "float16", "float8"]),
    default="bfloat16",
    show_default=True,
)
@click.option("--kv-dtype", type=click.Choice(["bfloat16", "float16", "float8"]))
@click.option("--block-tokens", type=click.IntRange(1), default=256, show_default=True)
@click.option("--max-batch", type=click.IntRange(1), default=64, show_default=True)
@click.option("--max-batch-tokens", type=click.IntRange(1), default=512, show_default=True)
@click.option("--max-context", type=click.IntRange(2))
@click.option("--memory-fraction", type=shared.Number(0.01, 1.0), default=0.9)
@click.option(
    "--profile",
    "profiles",
    type=shared.PATH,
    multiple=True,
    help="Measured CSV, or a directory of them.",
)
@click.option("--links", type=shared.PATH, help="What `flexslurm probe` wrote.")
@click.option("--out", type=shared.PATH, help="Write the gear table of all allocations.")
@click.option("--every", is_flag=True, help="Plan every allocation, however many.")
@click.option("--explain", metavar="ALLOCATION", help="Why its gear is as it is.")
@click.option("--what-if", metavar="+TYPE:GPUSxNODES", help="What more GPUs would bring.")
@click.option("--capacity", metavar="rate=20/s,in=…,out=…", help="The cheapest part of the pool.")
@click.option("--price", metavar="TYPE=COST,…", help="For --capacity; default: every GPU costs 1.")
@click.option("--picture", type=shared.PATH, help="For --capacity: the curve (.png, .svg, .pdf).")
@shared.JSON
def plan(**options: Any) -> None:
    """Show the gears for a model and a pool of GPUs.

    Without --site, GPU names are those of the built-in catalogue (a100-80, h100, l40s, …) and
    nodes are joined by 100 Gbit/s. What --profile and --links name comes before what the site file
    names under `measured`.
    """
    from flexslurm.planner.files import load_acted
    from flexslurm.planner.planner import Planner

    inputs = _inputs(options)
    results = Results()
    with only_ours_on_stdout():
        started = time.monotonic()
        acted = load_acted(inputs.topology, inputs.spec.dtype)
        goal = _goal(options)

        def planner_of(pool: Signature) -> Planner:
            return Planner(
                inputs.spec, inputs.topology, goal, pool, acted=acted, profiles=inputs.profiles
            )

        _plan_all(planner_of(inputs.pool), options, results)
        if options["what_if"] is not None:
            larger = _with(inputs.pool, options["what_if"])
            results.what_if = planner_of(larger).plan(larger)
        results.seconds = time.monotonic() - started
    if options["picture"] is not None and results.capacity is not None:
        from flexslurm.cli.plan_picture import save_curve

        save_curve(results.capacity, inputs.spec.name, options["picture"])
    if options["as_json"]:
        click.echo(json.dumps(_json(inputs, results), indent=2))
    else:
        click.echo("\n".join(_text(inputs, options, results)))
    _fail_if_nothing_fits(inputs.pool, results)


def _inputs(options: Mapping[str, Any]) -> Inputs:
    from flexslurm.cli.plan_inputs import check_together, read_allocation
    from flexslurm.cli.plan_picture import check_form
    from flexslurm.planner.catalogue import CATALOGUE
    from flexslurm.planner.files import load_links, load_measured, load_profiles, load_spec
    from flexslurm.planner.topology import Topology

    check_together(options)
    pool = read_allocation(options["pool"], "--pool")
    if options["explain"] is not None:
        read_allocation(options["explain"], "--explain")
    if options["out"] is not None:
        check_replaceable(options["out"])
    if options["picture"] is not None:
        check_form(options["picture"])
        check_replaceable(options["picture"], "--picture")
    spec = load_spec(options["model"], options["dtype"], kv_dtype=options["kv_dtype"])
    profiles: dict[StageKind, Profile] = {}
    if options["site_file"] is not None:
        from flexslurm.config.sources import load_site

        site = load_site(options["site_file"]).value
        figures = Topology.from_site(site, spec.dtype)
        topology, profiles = load_measured(site.measured, spec, figures)
    else:
        names = {s.gpu_type for s, _ in _with(pool, options["what_if"]).counts}
        topology = Topology.from_catalogue(tuple(sorted(names)), spec.dtype)
    if options["links"] is not None:
        topology = load_links(options["links"], topology)
    for shape, _ in _with(pool, options["what_if"]).counts:
        topology.gpu(shape.gpu_type)
    # without a site, a directory may have profiles of types that the pool has not
    known = topology if options["site_file"] else Topology.from_catalogue(tuple(CATALOGUE))
    for path in options["profiles"]:
        if path.is_dir() and not any(path.glob("*.csv")):
            raise ConfigError("there is no profile (*.csv) in it", file=str(path))
    profiles |= load_profiles(options["profiles"], spec, known)
    return Inputs(spec, topology, pool, options["site_file"] is not None, profiles)


def _goal(options: Mapping[str, Any]) -> Any:
    from flexslurm.cli.plan_inputs import read_pairs, read_slo, read_workload
    from flexslurm.planner.workload import EngineLimits, Goal, Objective

    option = "--capacity" if options["capacity"] is not None else "--workload"
    text = options["capacity"] if options["capacity"] is not None else options["workload"]
    pairs = read_pairs(text or "", option, ("in", "out", "rate"))
    if options["capacity"] is not None and "rate" not in pairs:
        raise ConfigError("--capacity needs a rate", hint="as in rate=20/s,in=1000,out=256")
    return Goal(
        read_workload(pairs, option),
        read_slo(options["slo"]),
        EngineLimits(
            block_tokens=options["block_tokens"],
            max_batch=options["max_batch"],
            max_batch_tokens=options["max_batch_tokens"],
            max_context=options["max_context"],
            memory_fraction=options["memory_fraction"],
        ),
        Objective(options["objective"]),
    )


def _with(pool: Signature, more: str | None) -> Signature:
    """The pool with the GPUs of `+TYPE:GPUSxNODES,…`."""
    if more is None:
        return pool
    from flexslurm.cli.plan_inputs import read_allocation

    added = read_allocation(more.removeprefix("+"), "--what-if")
    return Signature.of([*pool.nodes(), *added.nodes()])


def _plan_all(planner: Planner, options: Mapping[str, Any], results: Results) -> None:
    from flexslurm.planner.capacity import capacity
    from flexslurm.planner.explain import explain
    from flexslurm.planner.tabulate import pilots_of, plans

    pool, progress = planner.pool, _progress()
    if options["capacity"] is not None:
        workload = planner.problem.workload
        wanted = (workload.rate or 0.0) * workload.output_tokens
        found = plans(planner, pilots_of(pool), progress)
        results.capacity = capacity(found, wanted, _prices(options, pool))
        results.planned[results.capacity.cheapest.signature] = planner.plan(
            results.capacity.cheapest.signature
        )
        return
    _plan_pool(planner, pool, results)
    if options["out"] is not None:
        _write_table(planner, pool, options["out"], progress, results)
    elif options["every"] or _allocations(pool) <= MOST_ROWS:
        for signature, choice in plans(planner, pilots_of(pool), progress):
            results.planned[signature] = planner.gear_of(signature, choice)
            results.gaps[signature] = choice.gap if choice is not None else 0.0
    if options["explain"] is not None:
        wanted_signature = Signature.parse(options["explain"])
        if not planner.pool.covers(wanted_signature):
            raise ConfigError(
                f"--explain: {wanted_signature} is not a part of {planner.pool}",
                hint="name as many nodes as the pool has of a kind, or fewer",
            )
        why = explain(planner, wanted_signature)
        results.planned[wanted_signature] = planner.plan(wanted_signature)
        results.explained = (wanted_signature, why) if why is not None else None


def _prices(options: Mapping[str, Any], pool: Signature) -> dict[str, float]:
    from flexslurm.cli.plan_inputs import read_prices

    return read_prices(options["price"], sorted({shape.gpu_type for shape, _ in pool.counts}))


def _plan_pool(planner: Planner, pool: Signature, results: Results) -> None:
    choice = planner.choose(pool)
    results.planned[pool] = planner.gear_of(pool, choice)
    results.gaps[pool] = choice.gap if choice is not None else 0.0


def _write_table(
    planner: Planner,
    pool: Signature,
    path: Path,
    progress: Callable[[int, int], None],
    results: Results,
) -> None:
    from flexslurm.planner.table import GearTable
    from flexslurm.planner.tabulate import make_table, pilots_of

    data = make_table(planner, pilots_of(pool), progress)
    replace_file(path, data)
    table = GearTable(data, str(path))
    if len(table) <= MOST_ROWS:
        for signature in table.signatures():
            gear, entry = table.gear(signature), table.find(signature)
            assert gear is not None and entry is not None
            results.planned[signature], results.gaps[signature] = gear, entry.gap


def _allocations(pool: Signature) -> int:
    total = 1
    for _, count in pool.counts:
        total *= count + 1
    return total


def _progress() -> Callable[[int, int], None]:
    """Says how far it is on standard error, every two seconds of a long run."""
    last = time.monotonic()

    def show(done: int, total: int) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= 2.0:
            last = now
            click.echo(f"planned {done:,} of {total:,} allocations", err=True)

    return show


def _text(inputs: Inputs, options: Mapping[str, Any], results: Results) -> list[str]:
    from flexslurm.cli import plan_report as report

    used = sorted({shape.gpu_type for shape, _ in inputs.pool.counts})
    lines = [
        *report.about(inputs.spec, inputs.topology, used, inputs.from_site),
        *report.measured([kind for kind in sorted(inputs.profiles) if kind.gpu_type in used]),
        *report.cut_workload(_goal(options).workload, _longest(inputs, options)),
        "",
    ]
    if results.capacity is not None:
        lines += report.capacity_report(results.capacity, _prices(options, inputs.pool))
        if options["picture"] is not None:
            lines += ["", f"the curve is in {options['picture']}"]
    else:
        ordered = dict(sorted(results.planned.items(), key=lambda item: item[0].gpus()))
        lines += report.gear_table({s: g for s, g in ordered.items() if s.counts})
    wanted = (
        inputs.pool,
        *([results.explained[0]] if results.explained else []),
        *sorted(results.planned, key=lambda s: (-s.gpus(), s.counts)),
    )
    for gear in _different([results.planned.get(s) for s in wanted])[:MOST_PICTURES]:
        lines += ["", *report.picture(gear)]
    if results.explained is not None:
        lines += ["", *report.explained(*results.explained)]
    if results.what_if is not None:
        lines += ["", *report.compared(results.planned[inputs.pool], results.what_if)]
        if isinstance(results.what_if, Gear):
            lines += ["", *report.picture(results.what_if)]
    if options["out"] is not None:
        lines += ["", f"the gear table is in {options['out']}"]
    return [*lines, "", f"planned in {report.seconds(results.seconds)}"]


def _longest(inputs: Inputs, options: Mapping[str, Any]) -> int:
    """Tokens of the longest sequence that is served."""
    most: int | None = options["max_context"]
    return min(inputs.spec.max_context, most or inputs.spec.max_context)


def _different(gears: Sequence[Gear | NoGear | None]) -> list[Gear]:
    """One gear of each layout."""
    found: dict[str, Gear] = {}
    for gear in gears:
        if isinstance(gear, Gear):
            found.setdefault(gear.layout(), gear)
    return list(found.values())


def _json(inputs: Inputs, results: Results) -> dict[str, Any]:
    import msgspec

    from flexslurm.cli import plan_report as report

    answer: dict[str, Any] = {
        "model": inputs.spec.name,
        "parameters": inputs.spec.params,
        "weight_bytes": inputs.spec.weight_bytes(),
        "kv_bytes_per_token": inputs.spec.kv_bytes_per_token(),
        "pool": str(inputs.pool),
        "plan_seconds": results.seconds,
        "gears": report.as_json(results.planned, results.gaps),
    }
    if results.explained is not None:
        signature, why = results.explained
        answer["explain"] = {"signature": str(signature), **msgspec.to_builtins(why)}
    if results.what_if is not None:
        signature = results.what_if.signature
        answer["what_if"] = report.as_json({signature: results.what_if}, {})[0]
    if results.capacity is not None:
        found = results.capacity
        answer["capacity"] = {
            "wanted_tokens_per_s": found.wanted_tokens_per_s,
            "cheapest": report.point_json(found.cheapest),
            "stops_paying": report.point_json(found.stops_paying),
            "curve": [report.point_json(point) for point in found.curve],
        }
    return answer


def _fail_if_nothing_fits(pool: Signature, results: Results) -> None:
    gear = results.planned.get(pool)
    if isinstance(gear, NoGear) and not isinstance(results.what_if, Gear):
        raise CapacityError(
            gear.reason, hint="see what more GPUs would bring: --what-if +TYPE:GPUSxNODES"
        )
