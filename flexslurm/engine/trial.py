"""What a short trial of a model's layers measures, and what its times mean; never runs anything.

Four stages are held side by side: the *body*, some layers without ends; an *inner* layer alone; the
*first* layer with the embedding; the *last* with the head. Every step is done by the inner one and
another in turn. What the body takes more is its further layers'; what the inner one takes beyond
one layer is every stage's own; what the ends take more is the embedding's and the head's. A model
of three layers or fewer has no inner one: the first stands for it, the embedding counts with what
every stage takes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from flexslurm.engine.families import ModelInfo, tp_degrees
from flexslurm.engine.footprint import block_bytes, stage_bytes
from flexslurm.engine.served_cycles import Cycles
from flexslurm.errors import CapacityError, ConfigError, DeadlineExceeded, ModelError
from flexslurm.messages import Chunk, ChunkSampling, Pacing, SamplingParams
from flexslurm.planner.profiles import Row

BODY, INNER, FIRST, LAST = "body", "inner", "first", "last"
MOST_LAYERS = 8
"""Enough that what a step costs besides its layers counts for little; few load quickly."""
_FEWEST_WITH_INNER = 3
_OPEN_AT_ONCE = 256
_GREEDY = ChunkSampling(params=SamplingParams(), position=0)


class TrialLoad(msgspec.Struct, frozen=True):
    """What one step of the trial holds: sequences that are all alike."""

    batch: int
    new: int
    """New tokens of each sequence."""
    context: int
    """Tokens that each sequence has after the step."""
    sampled: bool = False

    @property
    def new_tokens(self) -> int:
        return self.batch * self.new

    @property
    def phase(self) -> str:
        return "decode" if self.new == 1 else "prefill"

    def blocks(self, block_tokens: int) -> int:
        return self.batch * -(-self.context // block_tokens)


class Probe(msgspec.Struct, frozen=True):
    """A step of one stage, done in turn with the same step of the stage of one layer."""

    role: str
    load: TrialLoad
    """The last stage's logits are wanted; the others have none."""


class Run(msgspec.Struct, frozen=True):
    """One stage of the trial."""

    role: str
    lo: int
    hi: int
    kv_blocks: int
    pacing: Pacing | None = None

    @property
    def layers(self) -> int:
        return self.hi - self.lo


class Grid(msgspec.Struct, frozen=True):
    """How far the measurements reach."""

    max_batch: int = 64
    max_tokens: int = 512
    """New tokens of one step."""
    max_context: int = 4096
    block_tokens: int = 256


class Trial(msgspec.Struct, frozen=True):
    """All that the measuring process is told."""

    model: str
    dtype: str
    tp: int
    device: str
    """`cpu` or `cuda`."""
    block_tokens: int
    arena_bytes: int
    runs: tuple[Run, ...]
    probes: tuple[Probe, ...]
    budget_s: float
    """Measurements that have not begun by then are left out."""
    step_timeout_s: float = 120.0


class Measurement(msgspec.Struct, frozen=True):
    """Seconds of one step on one stage, or of building it."""

    role: str
    layers: int
    seconds: float
    load: TrialLoad | None = None
    """None: building the stage."""
    one_s: float = 0.0
    """What the stage of one layer took for the same step."""


class Served(msgspec.Struct, frozen=True):
    """A replica as it served: each of `batch` sequences got a token a cycle."""

    layers: int
    batch: int
    prompt_tokens: int
    output_tokens: int
    cycles: Cycles
    """Of one stage that has all layers."""
    halves: Cycles | None = None
    """Of two stages that have half of them each; None: there were no GPUs for them."""


def first_half(layers: int) -> int:
    """Layers of the first of two stages: the last has the head."""
    return -(-layers // 2)


class TrialOutcome(msgspec.Struct, frozen=True):
    """What the measuring process leaves: measurements, or why there are none."""

    measured: tuple[Measurement, ...] = ()
    left_out: int = 0
    """Measurements for which there was no time."""
    served: Served | None = None
    unserved: str = ""
    """Why it could not be served."""
    error: str = ""
    hint: str | None = None
    kind: str = ""
    """Name of the error's class in `flexslurm.errors`."""


# ------------------------------------------------------------------------------------ planning


def plan(
    info: ModelInfo,
    grid: Grid,
    *,
    tp: int,
    dtype: str,
    arena_bytes: int,
    most_layers: int = MOST_LAYERS,
) -> tuple[tuple[Run, ...], tuple[Probe, ...]]:
    """The stages to try and the steps to time, the quick ones first.

    Steps whose KV does not fit are left out. Raises ModelError for a degree the heads do not allow,
    CapacityError where not even one layer fits.
    """
    if tp not in tp_degrees(info, tp):
        raise ModelError(
            f"{info.path} has {info.num_kv_heads} key/value heads, too few for {tp} "
            "tensor-parallel ranks"
        )
    cuts, free = _cuts_that_fit(info, most_layers, tp, dtype, arena_bytes)
    block = sum(
        max(block_bytes(info, lo, hi, tp, rank, dtype, grid.block_tokens) for rank in range(tp))
        for lo, hi in cuts.values()
    )
    probes = tuple(
        probe
        for probe in probes_of(grid, info.max_context)
        if (probe.role != FIRST or INNER in cuts)
        and probe.load.blocks(grid.block_tokens) * block <= free
    )
    blocks = max((probe.load.blocks(grid.block_tokens) for probe in probes), default=1)
    return tuple(Run(role, lo, hi, blocks) for role, (lo, hi) in cuts.items()), probes


def _cuts_that_fit(
    info: ModelInfo, most: int, tp: int, dtype: str, arena_bytes: int
) -> tuple[dict[str, tuple[int, int]], int]:
    """The runs of layers and the bytes they leave: half of the memory where it can be."""
    total = info.num_layers
    inner = total > _FEWEST_WITH_INNER
    for layers in range(max(1, min(total - 2 if inner else total - 1, most)), 0, -1):
        lo = 1 if inner else 0
        cuts = {BODY: (lo, lo + layers), FIRST: (0, 1), LAST: (total - 1, total)}
        if inner and layers > 1:  # one layer tells nothing apart
            cuts[INNER] = (1, 2)
        weights = sum(
            max(stage_bytes(info, lo, hi, tp, rank, dtype) for rank in range(tp))
            for lo, hi in cuts.values()
        )
        if weights <= (arena_bytes // 2 if layers > 1 else arena_bytes):
            return cuts, arena_bytes - weights
    raise CapacityError(
        f"one layer of {info.path}, its embedding and its head take {weights:,} bytes; this GPU "
        f"has {arena_bytes:,} bytes for them and is {weights - arena_bytes:,} bytes short"
    )


def probes_of(grid: Grid, model_context: int) -> tuple[Probe, ...]:
    """What is measured, the quick ones first; without an inner stage the first's are left out.

    Raises ConfigError for a grid that holds no step.
    """
    context = min(grid.max_context, model_context)
    if min(grid.max_batch, grid.max_tokens, grid.block_tokens) < 1 or context < 2:
        raise ConfigError("a profile needs at least one sequence and two tokens of context")
    batches = _steps(1, max(2, min(grid.max_batch, grid.max_tokens)), 4)
    contexts = _steps(min(32, context), context, 4)
    tokens = _steps(min(8, grid.max_tokens, context), min(grid.max_tokens, context), 4)
    loads = [TrialLoad(b, 1, c) for c in contexts for b in batches]
    loads += [TrialLoad(1, n, n) for n in tokens if n > 1]
    loads += [TrialLoad(4, n // 4, n // 4) for n in tokens if n >= 16 and grid.max_batch >= 4]
    layers = sorted(loads, key=lambda load: (load.blocks(1), load.batch))
    heads = [TrialLoad(b, 1, contexts[0], sampled=True) for b in batches]
    embeds = [TrialLoad(1, 1, contexts[0]), TrialLoad(1, tokens[-1], tokens[-1])]
    return (
        *(Probe(LAST, load) for load in heads),
        *(Probe(FIRST, load) for load in embeds),
        *(Probe(BODY, load) for load in layers),
    )


def _steps(least: int, most: int, factor: int) -> tuple[int, ...]:
    """`least`, and by `factor` on, to `most`."""
    found = [least]
    while found[-1] * factor < most:
        found.append(found[-1] * factor)
    return tuple(found) if found[-1] == most else (*found, most)


# ---------------------------------------------------------------------------------- the steps


def opening(kv_blocks: int) -> Iterator[tuple[Chunk, ...]]:
    """Steps that put a token into every block, so that all may be read."""
    for at in range(0, kv_blocks, _OPEN_AT_ONCE):
        yield tuple(
            Chunk(seq_id=f"open-{block}", tokens=(1,), start=0, blocks=(block,))
            for block in range(at, min(at + _OPEN_AT_ONCE, kv_blocks))
        )


def chunks_of(load: TrialLoad, block_tokens: int, vocab: int) -> tuple[Chunk, ...]:
    """The step's sequences, each with blocks of its own."""
    own = -(-load.context // block_tokens)
    return tuple(
        Chunk(
            seq_id=f"s{n}",
            tokens=tuple((7 * n + 13 * i) % vocab for i in range(load.new)),
            start=load.context - load.new,
            blocks=tuple(range(n * own, (n + 1) * own)),
            sample=_GREEDY if load.sampled else None,
        )
        for n in range(load.batch)
    )


# ------------------------------------------------------------------------------- the profile


def rows_of(measured: Sequence[Measurement]) -> list[Row]:
    """The rows of a profile; see the module's first lines for what is taken from what."""
    return [row for m in measured for row in _rows(m)]


def _rows(m: Measurement) -> list[Row]:
    load = m.load
    if load is None:
        return [Row("load", m.layers, 0, 0, m.seconds)] if m.role == BODY else []
    more_s = max(0.0, m.seconds - m.one_s)
    if m.role == LAST:
        return [Row("last", 1, load.batch, 0, more_s)]
    if m.role == FIRST:
        return [Row("first", 1, load.new_tokens, 0, more_s)]
    if m.layers == 1:  # nothing can be told apart: all of it is the layer's
        return [Row(load.phase, 1, load.batch, load.context, m.seconds)]
    layer_s = more_s / (m.layers - 1)
    return [
        Row(load.phase, m.layers, load.batch, load.context, layer_s * m.layers),
        Row("step", 1, load.new_tokens, 0, max(0.0, m.one_s - layer_s)),
    ]


def check_rows(rows: Sequence[Row], left_out: int) -> None:
    """Raises what was lacking, where the rows are too few for a profile."""
    if len({row.batch for row in rows if row.phase == "decode"}) >= 2:
        return
    what = "too little was measured: a profile needs decode steps of two batch sizes at least"
    if left_out:
        raise DeadlineExceeded(
            f"{what}; there was no time for {left_out} measurements", hint="give it more --minutes"
        )
    raise CapacityError(
        f"{what}, and their KV cache did not fit",
        hint="a smaller --max-context or --block-tokens makes smaller steps",
    )
