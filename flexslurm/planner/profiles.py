"""Measured step times in place of the formula: reads CSV text, fits it, answers for any load.

A profile is of one model on one stage kind. Its rows are `phase,layers,batch,context,seconds`:

    decode   `batch` sequences with one new token each, `context` tokens of context each
    prefill  `batch` sequences with `context` new tokens each and none before them
    step     what every stage's step costs whatever its depth, for `batch` new tokens
    first    what a stage adds that holds the embedding, for `batch` new tokens
    last     what a stage adds that holds the head, for `batch` tokens whose logits are wanted
    load     reading the weights of `layers` layers
    head     what a served cycle of `batch` sequences takes besides the stage's step
    pass     what each further stage of a pipeline adds to that

A line `# model=NAME gpu_type=TYPE tp=N dtype=DTYPE` before them says of what. Decode and prefill
rows are of `layers` layers without the ends, all-reduces included.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from flexslurm.config.whole import shown, whole
from flexslurm.errors import ConfigError
from flexslurm.planner.csv_lines import cells_of
from flexslurm.planner.problem import StageKind

COLUMNS = ("phase", "layers", "batch", "context", "seconds")
PHASES = ("decode", "prefill", "step", "first", "last", "load", "head", "pass")


class Row(NamedTuple):
    """One measurement."""

    phase: str
    layers: int
    batch: int
    context: int
    seconds: float


class Ramp(msgspec.Struct, frozen=True):
    """A function that never falls: straight between its points and beyond the last."""

    at: tuple[float, ...]
    value: tuple[float, ...]

    def __call__(self, x: float) -> float:
        if not self.at:
            return 0.0
        if x <= self.at[-1] or len(self.at) == 1:
            return float(np.interp(x, self.at, self.value))
        slope = (self.value[-1] - self.value[-2]) / (self.at[-1] - self.at[-2])
        return self.value[-1] + slope * (x - self.at[-1])


class Profile(msgspec.Struct, frozen=True):
    """Fitted times of one model on one stage kind, in seconds."""

    model: str
    gpu_type: str
    tp: int
    dtype: str
    layer: Ramp
    """One layer of a step, by new tokens, without context."""
    context_s: float
    """One layer, for each token of context read."""
    pair_s: float
    """One layer, for each pair of a new token and one it attends to."""
    sequence_s: float
    """One layer, for each sequence in the step."""
    step: Ramp
    first: Ramp
    last: Ramp
    load_layer_s: float
    head: Ramp | None
    """By sequences: from the stage's token to its next step; None: not measured."""
    passing: Ramp
    """By sequences: what each further stage adds to a cycle besides its step."""
    new_tokens: tuple[float, float]
    """The range measured."""
    context_tokens: tuple[float, float]

    @property
    def kind(self) -> StageKind:
        return StageKind(self.gpu_type, self.tp)

    def layer_s(
        self, new_tokens: float, context_tokens: float, pairs: float, sequences: float
    ) -> float:
        """One layer of a step; arguments as of `StageCost.step_s`."""
        read = context_tokens * self.context_s + pairs * self.pair_s
        return self.layer(new_tokens) + read + sequences * self.sequence_s

    def covers(self, new_tokens: float, context_tokens: float) -> bool:
        """Whether such a step lies within what was measured."""
        low, high = self.new_tokens
        return low <= new_tokens <= high and context_tokens <= self.context_tokens[1]


def read_profile(text: str, file: str) -> Profile:
    """Read and fit a profile; raises ConfigError naming file and line."""
    about, rows = _parse(text, file)
    decode = [row for row in rows if row.phase in ("decode", "prefill")]
    if len({row.batch for row in decode if row.phase == "decode"}) < 2:
        raise ConfigError("decode rows with at least two batch sizes are needed", file=file)
    layer, (context_s, pair_s, sequence_s) = _fit_layer(decode)
    loads = [row.seconds / row.layers for row in rows if row.phase == "load"]
    points = [_load_of(row) for row in decode]
    heads = [row for row in rows if row.phase == "head"]
    return Profile(
        model=about["model"],
        gpu_type=about["gpu_type"],
        tp=int(about["tp"]),
        dtype=about["dtype"],
        layer=layer,
        context_s=context_s,
        pair_s=pair_s,
        sequence_s=sequence_s,
        step=_ramp([row for row in rows if row.phase == "step"]),
        first=_ramp([row for row in rows if row.phase == "first"]),
        last=_ramp([row for row in rows if row.phase == "last"]),
        load_layer_s=float(np.median(loads)) if loads else 0.0,
        head=_ramp(heads) if heads else None,
        passing=_ramp([row for row in rows if row.phase == "pass"]),
        new_tokens=(min(p[0] for p in points), max(p[0] for p in points)),
        context_tokens=(min(p[1] for p in points), max(p[1] for p in points)),
    )


def write_profile(
    about: Mapping[str, object], rows: Iterable[Row], remarks: Iterable[str] = ()
) -> str:
    """Rows as CSV text that `read_profile` reads; remarks, without `=`, are for people."""
    head = " ".join(f"{key}={about[key]}" for key in ("model", "gpu_type", "tp", "dtype"))
    lines = [f"# {head}", ",".join(COLUMNS)]
    lines += [f"{r.phase},{r.layers},{r.batch},{r.context},{r.seconds:.9g}" for r in rows]
    lines += [f"# {remark}" for remark in remarks]
    return "\n".join(lines) + "\n"


def _parse(text: str, file: str) -> tuple[dict[str, str], list[Row]]:
    about: dict[str, str] = {}
    rows: list[Row] = []
    header = False
    for number, line in enumerate(text.splitlines(), start=1):
        if line.startswith("#"):
            about |= dict(part.split("=", 1) for part in line[1:].split() if "=" in part)
        elif not line.strip():
            continue
        elif not header:
            if tuple(cell.strip() for cell in line.split(",")) != COLUMNS:
                raise ConfigError(
                    f"the columns must be {','.join(COLUMNS)}", file=file, line=number
                )
            header = True
        else:
            rows.append(_row(cells_of(line, file, number), file, number))
    missing = [key for key in ("model", "gpu_type", "tp", "dtype") if key not in about]
    if missing:
        raise ConfigError(
            f"the profile does not say its {' and '.join(missing)}",
            file=file,
            line=1,
            hint="a first line like: # model=llama-3.1-8b gpu_type=a100 tp=1 dtype=bfloat16",
        )
    if not whole(about["tp"]):
        raise ConfigError(f"tp must be a whole number, not {shown(about['tp'])}", file=file, line=1)
    return about, rows


def _row(cells: Sequence[str], file: str, line: int) -> Row:
    def fail(message: str) -> ConfigError:
        return ConfigError(message, file=file, line=line)

    if len(cells) != len(COLUMNS):
        raise fail(f"{len(COLUMNS)} values are expected, not {len(cells)}")
    phase = cells[0].strip()
    if phase not in PHASES:
        raise fail(f"unknown phase {shown(phase)}; legal: {', '.join(PHASES)}")
    numbers = []
    for name, cell in zip(COLUMNS[1:4], cells[1:4], strict=True):
        number = whole(cell)
        if number is None:
            raise fail(f"{name} must be a whole number of at least 0, not {shown(cell)}")
        numbers.append(number)
    layers, batch, context = numbers
    try:
        seconds = float(cells[4])
    except ValueError:
        raise fail(f"seconds must be a number, not {shown(cells[4])}") from None
    if not math.isfinite(seconds) or seconds < 0:
        raise fail(f"seconds must be a finite number of at least 0, not {seconds}")
    needed = {"decode": (layers, batch), "prefill": (layers, batch, context), "load": (layers,)}
    if min(needed.get(phase, (batch,))) < 1:
        raise fail(f"a {phase} row needs layers, batch and context above 0 where it has them")
    return Row(phase, layers, batch, context, seconds)


def _load_of(row: Row) -> tuple[float, float, float, float]:
    """New tokens, context tokens, pairs and sequences of a decode or prefill row."""
    if row.phase == "decode":
        context = row.batch * max(1, row.context)
        return row.batch, context, context, row.batch
    new = row.batch * row.context
    return new, new, row.batch * row.context * (row.context + 1) / 2, row.batch


def _fit_layer(rows: Sequence[Row]) -> tuple[Ramp, tuple[float, float, float]]:
    """Non-negative least squares of relative errors: steps up from knot to knot, and slopes.

    The slopes are seconds for each token of context, each pair and each sequence.

    All parts being non-negative, the sum never falls with any argument.
    """
    from scipy.optimize import nnls

    points = np.array([_load_of(row) for row in rows])
    seconds = np.array([row.seconds / row.layers for row in rows])
    floor = max(float(seconds.max()), 1e-12) * 1e-6
    weight = 1.0 / np.maximum(seconds, floor)
    knots = np.unique(points[:, 0])
    rises = [
        np.clip((points[:, 0] - low) / (high - low), 0.0, 1.0)
        for low, high in itertools.pairwise(knots)
    ]
    basis = np.stack([np.ones(len(points)), *rises, *points[:, 1:].T], axis=1)
    scale = np.maximum(np.abs(basis).max(axis=0), 1e-300)
    found, _ = nnls(basis / scale * weight[:, None], seconds * weight)
    found = found / scale
    values = np.cumsum(found[: len(knots)])
    context_s, pair_s, sequence_s = (float(slope) for slope in found[len(knots) :])
    return Ramp(tuple(knots.tolist()), tuple(values.tolist())), (context_s, pair_s, sequence_s)


def _ramp(rows: Sequence[Row]) -> Ramp:
    """Means by batch, made to never fall."""
    by_batch: dict[int, list[float]] = {}
    for row in rows:
        by_batch.setdefault(row.batch, []).append(row.seconds)
    at = sorted(by_batch)
    means = [float(np.mean(by_batch[batch])) for batch in at]
    return Ramp(tuple(float(x) for x in at), tuple(itertools.accumulate(means, max)))
