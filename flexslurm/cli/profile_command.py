"""`flexslurm profile`: measures how long a model's layers take on a GPU type; only asks and prints.

The measuring is `engine.profiling`'s, the file's form `planner.profiles`'.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from flexslurm.cli import shared_options as shared
from flexslurm.cli.outputs import replace_file

if TYPE_CHECKING:
    from flexslurm.cli.served_trial import ServeAsk
    from flexslurm.config.site import Site
    from flexslurm.engine.trial import Run, Served, Trial, TrialOutcome
    from flexslurm.planner.problem import Problem, StageKind
    from flexslurm.planner.profiles import Profile, Row
    from flexslurm.planner.topology import Topology

SERVED_TOKENS = 32
"""Prompt and answer of the requests that are served."""
SERVED_BATCH = 16
"""At most: the streams' clients run on the same cores, which a job has few of."""
_COUNT = click.IntRange(min=1)


@click.command()
@click.argument("model", metavar="MODEL", type=click.Path(path_type=Path))
@shared.SITE
@click.option("--gpu-type", required=True, metavar="TYPE", help="A key of the site's gpu_types.")
@click.option(
    "--tp",
    "degrees",
    type=_COUNT,
    multiple=True,
    default=(1,),
    show_default=True,
    help="GPUs of a stage; several give a file each.",
)
@click.option("--local", is_flag=True, help="On this machine's GPUs, not as a Slurm job.")
@click.option("--partition", help="Where the job goes; default: Slurm's own.")
@click.option("--wait", default=600.0, show_default=True, metavar="S", help="For the job to start.")
@click.option("--dtype", default="bfloat16", show_default=True, metavar="DTYPE")
@click.option("--max-batch", type=_COUNT, default=64, show_default=True, help="Sequences.")
@click.option(
    "--max-tokens",
    type=_COUNT,
    default=512,
    show_default=True,
    help="New tokens of a step, as serving.max_batch_tokens.",
)
@click.option("--max-context", type=_COUNT, default=4096, show_default=True, help="Tokens.")
@click.option("--block-tokens", type=_COUNT, default=256, show_default=True)
@click.option("--layers", type=_COUNT, help="Layers of the trial stages; default: at most 8.")
@click.option(
    "--minutes",
    type=shared.Number(min=0.05),
    default=5.0,
    show_default=True,
    help="For the measurements of one file; what does not fit is left out.",
)
@click.option(
    "--serve/--no-serve",
    default=True,
    show_default=True,
    help="Serve the model for a while, to see what a cycle takes besides the stages.",
)
@click.option(
    "--out",
    "folder",
    type=click.Path(path_type=Path),
    default=Path("profiles"),
    show_default=True,
    metavar="DIR",
    help="Where the files go; with a job, on a shared disk.",
)
@shared.QUIET  # fmt: skip
def profile(**options: Any) -> None:
    """Measure MODEL (a checkpoint directory) on one GPU type, for `measured.profiles` of the site.

    A few layers are built as a stage of the service would be, and steps of prefill and decode are
    timed over batch and context. Each file is a CSV: phase,layers,batch,context,seconds.
    """
    from flexslurm.config.check import site_with_slurm
    from flexslurm.config.sources import load_site

    file = options["site_file"]
    site = load_site(file).value if options["local"] else site_with_slurm(file)
    for tp in options["degrees"]:
        path = profile_once(site, tp, options)
        click.echo(path)
    if not options["quiet"]:
        line = f"measured: {{profiles: {options['folder']}}}"
        click.echo(f"to plan with what was measured, write into the site file:\n{line}", err=True)


def profile_once(site: Site, tp: int, options: dict[str, Any]) -> Path:
    """Measure one degree; returns the file. Raises what is wrong as a FlexslurmError."""
    from flexslurm.cli.trials import Where, run_trial

    started = time.monotonic()

    def say(line: str) -> None:
        if not options["quiet"]:
            click.echo(f"[{time.monotonic() - started:5.1f} s] {line}", err=True)

    trial = plan_trial(site, tp, options)
    where = Where(options["local"], options["partition"], options["gpu_type"], options["wait"])
    served = plan_serving(site, tp, options, say) if options["serve"] else None
    outcome = run_trial(trial, served, site, where, options["folder"], say)
    if outcome.left_out:
        say(f"{outcome.left_out} measurements were left out: --minutes is over")
    if outcome.unserved:
        say(f"what a cycle takes besides the stages is not known: {outcome.unserved}")
    return write(outcome, site, tp, options)


def plan_trial(site: Site, tp: int, options: dict[str, Any]) -> Trial:
    """What is measured. Raises ConfigError, ModelError, CapacityError."""
    from flexslurm.engine.families import DTYPE_BYTES, check_model
    from flexslurm.engine.trial import Grid, Trial, plan
    from flexslurm.errors import ConfigError
    from flexslurm.planner.topology import Topology
    from flexslurm.planner.workload import EngineLimits

    model, dtype = options["model"].absolute(), options["dtype"]
    if dtype not in DTYPE_BYTES:
        raise ConfigError(f"no dtype '{dtype}'", hint=f"there is {', '.join(DTYPE_BYTES)}")
    info = check_model(model)
    topology = Topology.from_site(site, dtype)
    gpu = topology.gpu(options["gpu_type"])
    arena = EngineLimits().arena_bytes(gpu.memory_bytes)
    grid = Grid(
        options["max_batch"], options["max_tokens"], options["max_context"],
        options["block_tokens"],
    )  # fmt: skip
    more = {} if options["layers"] is None else {"most_layers": options["layers"]}
    runs, probes = plan(info, grid, tp=tp, dtype=dtype, arena_bytes=arena, **more)
    return Trial(
        model=str(model), dtype=dtype, tp=tp, device="cpu" if gpu.virtual else "cuda",
        block_tokens=grid.block_tokens, arena_bytes=arena,
        runs=with_pacing(runs, site, topology, options["gpu_type"], tp, str(model), dtype),
        probes=probes, budget_s=options["minutes"] * 60.0,
    )  # fmt: skip


def with_pacing(
    runs: tuple[Run, ...],
    site: Site,
    topology: Topology,
    gpu_type: str,
    tp: int,
    model: str,
    dtype: str,
) -> tuple[Run, ...]:
    """The runs with the pacing a worker of a virtual GPU would get; the send is not the layers'."""
    import msgspec

    from flexslurm.messages import Pacing
    from flexslurm.planner.files import load_acted, load_spec
    from flexslurm.planner.problem import Problem, StageKind
    from flexslurm.planner.topology import Link
    from flexslurm.planner.workload import Goal

    virtual = site.gpu_types[gpu_type].virtual
    if virtual is None:
        return runs
    if virtual.pacing != "acted":
        pacing = Pacing(speed=virtual.speed)
        return tuple(msgspec.structs.replace(run, pacing=pacing) for run in runs)
    no_send = msgspec.structs.replace(topology, node_link=Link(float("inf"), 0.0))
    problem = Problem(load_spec(model, dtype), no_send, Goal(), load_acted(topology, dtype))
    return tuple(
        msgspec.structs.replace(
            run,
            pacing=Pacing(
                acted=msgspec.to_builtins(problem.cost(StageKind(gpu_type, tp), run.lo, run.hi))
            ),
        )
        for run in runs
    )


def plan_serving(
    site: Site, tp: int, options: dict[str, Any], say: Callable[[str], None]
) -> ServeAsk | None:
    """One replica of one stage, full; None, said, where the GPUs do not hold the whole model.

    Virtual GPUs cost nothing, so that two stages are served too.
    """
    from flexslurm.cli.served_trial import ServeAsk
    from flexslurm.config.site import MeasuredSettings
    from flexslurm.planner.problem import StageKind

    problem = served_problem(site, options)
    load, limits = problem.workload, problem.limits
    blocks = int(problem.blocks(StageKind(options["gpu_type"], tp))[0, problem.layers])
    batch = min(limits.max_batch, SERVED_BATCH, blocks // problem.sequence_blocks)
    if batch < 1:
        say(f"{tp} {options['gpu_type']} do not hold the whole model: it is not served")
        return None
    alone = site.model_copy(update={"measured": MeasuredSettings()})
    return ServeAsk(
        site=alone.model_dump(mode="json"), model=str(options["model"].absolute()),
        dtype=options["dtype"], gpu_type=options["gpu_type"], tp=tp, layers=problem.layers,
        batch=batch, prompt_tokens=load.prompt_tokens, output_tokens=load.output_tokens,
        block_tokens=limits.block_tokens, max_batch_tokens=limits.max_batch_tokens,
        halves=problem.layers > 1 and batch > 1 and site.gpu_types[options["gpu_type"]].virtual
        is not None,
    )  # fmt: skip


def served_problem(
    site: Site, options: dict[str, Any], profiles: Mapping[StageKind, Profile] | None = None
) -> Problem:
    """The planner's view of the replica that is served, without what a cycle takes besides."""
    import msgspec

    from flexslurm.planner.files import load_acted, load_spec
    from flexslurm.planner.problem import Problem
    from flexslurm.planner.topology import Topology
    from flexslurm.planner.workload import EngineLimits, Goal, Workload

    spec = load_spec(str(options["model"]), options["dtype"])
    topology = msgspec.structs.replace(Topology.from_site(site, options["dtype"]), step_s=0.0)
    context = min(options["max_context"], spec.max_context)
    prompt = max(1, min(SERVED_TOKENS, options["max_tokens"], context // 2))
    goal = Goal(
        Workload(prompt, min(SERVED_TOKENS, context - prompt)),
        limits=EngineLimits(
            block_tokens=options["block_tokens"], max_batch=options["max_batch"],
            max_batch_tokens=options["max_tokens"], max_context=context,
        ),
    )  # fmt: skip
    return Problem(spec, topology, goal, load_acted(topology, options["dtype"]), profiles)


def served_rows(
    served: Served, profile: Profile, site: Site, options: dict[str, Any]
) -> tuple[list[Row], list[str]]:
    """What cycles of the replicas that were served took more than their steps; and it in words.

    Both were served one after the other: what the cycle of two stages took more than that of one,
    and their steps do not, is passing on.
    """
    from flexslurm.planner.profiles import Row

    layers, batch = served.layers, served.batch
    problem = served_problem(site, options, {profile.kind: profile})
    alone_s = float(problem.times(profile.kind, batch, 1)[0, layers])
    head_s = served.cycles.head_s(alone_s)
    rows = [Row("head", layers, batch, 0, head_s)]
    remarks = [served.cycles.words(alone_s)]
    if served.halves is not None:
        more_s = served.halves.cycle_s - served.cycles.cycle_s
        passed_s = max(0.0, more_s - (halves_s(problem, profile.kind, batch) - alone_s))
        rows.append(Row("pass", layers, batch, 0, passed_s))
        remarks.append(served.halves.words_of_halves(passed_s))
    return rows, remarks


def halves_s(problem: Problem, kind: StageKind, batch: int) -> float:
    """The steps of a cycle of two stages, as the measurements of stages alone give them."""
    from flexslurm.engine.trial import first_half

    middle = first_half(problem.layers)
    times = problem.times(kind, -(-batch // 2), 2)
    return 2 * float(max(times[0, middle], times[middle, problem.layers]))


def write(outcome: TrialOutcome, site: Site, tp: int, options: dict[str, Any]) -> Path:
    """The profile's file, read back before anybody relies on it."""
    from flexslurm.engine.trial import check_rows, rows_of
    from flexslurm.planner.files import load_spec
    from flexslurm.planner.profiles import read_profile, write_profile

    rows = rows_of(outcome.measured)
    check_rows(rows, outcome.left_out)
    gpu_type, dtype = options["gpu_type"], options["dtype"]
    name = load_spec(str(options["model"]), dtype).name
    about = {"model": name, "gpu_type": gpu_type, "tp": tp, "dtype": dtype}
    text = write_profile(about, rows)
    if outcome.served is not None:
        profile = read_profile(text, "the trial")
        more, remarks = served_rows(outcome.served, profile, site, options)
        text = write_profile(about, [*rows, *more], remarks)
    path: Path = options["folder"] / f"{name}-{gpu_type}-tp{tp}-{dtype}.csv"
    read_profile(text, str(path))
    replace_file(path, text)
    return path
