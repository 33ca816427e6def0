"""One installed stage on one GPU: built from a plan, fed batches; talks to no other process.

The transformers model is built on meta and cut, DeepSpeed's inference engine replaces its linears
by tensor-parallel ones over the stage's own group, and exactly the slices this rank owns are read
into the arena. Building may run in a background thread while another epoch's stage serves.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from flexslurm.engine.arena import Arena
from flexslurm.engine.attention import AttentionStep
from flexslurm.engine.backend import BUILD_LOCK, deepspeed, torch_dtype
from flexslurm.engine.batch import Batch
from flexslurm.engine.families import DTYPE_BYTES, ModelInfo, check_model, tp_degrees
from flexslurm.engine.footprint import page_bytes
from flexslurm.engine.kv_store import KvShape, KvStore
from flexslurm.engine.shard import Part, ShardSpec, read_spec, tie_head
from flexslurm.engine.stage_model import StageModel, fresh_rotary, load_config, meta_stage
from flexslurm.engine.weight_store import WeightStore, WeightView
from flexslurm.engine.weights import FileSource, Filled, Need, Progress, WeightFiller
from flexslurm.errors import CapacityError, ModelError
from flexslurm.planner.model_spec import GRAIN, aligned

_PATIENCE_S = 5.0
_LOOK_AGAIN_S = 0.01


class HandOver(Protocol):
    """Weights of an epoch that is closed are given up as those of the new one are taken."""

    def turns(self, parts: Sequence[Part]) -> list[list[Part]]:
        """What is filled one after another; as many turns on every worker."""
        ...

    def taken(self, turn: int) -> None:
        """This turn's are filled here. Returns when they are everywhere."""
        ...


@dataclass(frozen=True, slots=True)
class StagePlan:
    """What to build: one rank of one stage of one epoch."""

    model: str
    """Checkpoint directory."""
    epoch: int
    lo: int
    hi: int
    tp: int
    tp_rank: int
    dtype: str
    block_tokens: int
    kv_blocks: int


class LoadedStage:
    """A stage that takes steps.

    Invariant: until `close` all its parameters are views of segments in the arena, which other
    epochs may use too, and its pages lie in the arena's pool. One thread at a time.
    """

    def __init__(
        self, plan: StagePlan, info: ModelInfo, arena: Arena, engine: Any, spec: ShardSpec,
        store: KvStore, kept_bytes: int, filled: Filled,
    ) -> None:  # fmt: skip
        self.plan = plan
        self.info = info
        self.spec = spec
        self.store = store
        self.dtype = torch_dtype(plan.dtype)
        self.device = arena.device
        self.hidden_size = info.hidden_size
        self.is_first = plan.lo == 0
        self.is_last = plan.hi == info.num_layers
        self.weights_bytes = spec.weights_bytes(DTYPE_BYTES[plan.dtype])
        """What its weights take of an arena when they share nothing."""
        self.kv_bytes = aligned(store.shape.pages * store.page_bytes)
        """What its pages take when every block is in use."""
        self.kept_bytes = kept_bytes
        """Of the weights, what was on this GPU already."""
        self.filled = filled
        """Where the other weights came from."""
        self.arena = arena
        self._engine = engine

    @property
    def used_bytes(self) -> int:
        """What its weights and live pages take of the arena now, shared ones too."""
        return self.arena.weights.used_by(self.plan.epoch) + self.store.live_bytes

    def empty_hidden(self, tokens: int) -> torch.Tensor:
        """`[tokens, hidden_size]` to receive the stage before's output in."""
        return torch.empty((tokens, self.hidden_size), dtype=self.dtype, device=self.device)

    def forward(self, batch: Batch, hidden: torch.Tensor | None = None) -> torch.Tensor:
        """Run the batch through the layers, storing its keys and values.

        `hidden` `[T, hidden_size]`, or None on the first stage. Returns the same shape,
        contiguous, or on the last stage logits `[S, vocab]` of the sampled rows. With tensor
        parallelism every rank calls it with the same arguments, in the same order.

        Raises CapacityError where there is no memory for new blocks, and ProtocolError where the
        batch reads blocks that hold nothing.
        """
        self.store.prepare(batch.opened_blocks, batch.continued_blocks, batch.read_blocks)
        with self.arena.gate, torch.inference_mode():
            step = AttentionStep(self.store, batch)
            found: torch.Tensor = self._engine(batch, hidden, step)
            return found.contiguous()

    @property
    def heads(self) -> tuple[int, int]:
        """This rank's KV heads `[first, last)`, the model's own numbers."""
        return self.spec.kv_heads(self.info.head_dim)

    def free(self, blocks: Sequence[int]) -> None:
        """These blocks hold nothing any more."""
        self.store.free(blocks)

    def close(self, *, keep_weights: bool = False) -> int:
        """Give back what no other epoch uses, and return how many bytes; idempotent.

        `keep_weights`: these stay until the arena's store is told that the epoch has them no more.
        """
        self._engine = None
        return _let_go(self.arena, self.plan.epoch, self.store, keep_weights=keep_weights)


def _let_go(arena: Arena, epoch: int, store: KvStore | None, *, keep_weights: bool = False) -> int:
    freed = 0 if store is None else store.close() * store.page_bytes
    freed += 0 if keep_weights else arena.weights.release(epoch)
    if freed and not keep_weights:  # else streams wait, and what follows takes the memory anyway
        arena.settle()
    return freed


def build_stage(
    plan: StagePlan,
    arena: Arena,
    group: Any = None,
    *,
    progress: Progress | None = None,
    filler: WeightFiller | None = None,
    hand_over: Callable[[], HandOver | None] | None = None,
) -> LoadedStage:
    """Build, fill and return the stage; whatever is raised, the arena is as it was.

    `group`: the process group of the stage's ranks, None with one rank. `filler`: where slices
    that are not here come from, the model's files by default. `hand_over`: asked before memory is
    taken, for which it may wait; where it gives one, weights are filled layer by layer.

    Raises ModelError (the files are at fault) and CapacityError (the arena is too small), and
    passes on what `progress` raises.
    """
    info = check_model(plan.model)
    _check_plan(plan, info)
    if filler is not None:
        return _build(plan, info, arena, group, filler, progress, hand_over)
    with FileSource(info) as files:
        return _build(plan, info, arena, group, files, progress, hand_over)


def _check_plan(plan: StagePlan, info: ModelInfo) -> None:
    if not 0 <= plan.lo < plan.hi <= info.num_layers:
        raise ModelError(
            f"{plan.model} has layers [0,{info.num_layers}); a stage of [{plan.lo},{plan.hi}) is "
            "not a run of them"
        )
    if plan.tp not in tp_degrees(info, plan.tp):
        raise ModelError(
            f"{plan.model} has {info.num_kv_heads} key/value heads, too few for {plan.tp} "
            "tensor-parallel ranks"
        )
    assert 0 <= plan.tp_rank < plan.tp
    assert plan.dtype in DTYPE_BYTES, plan.dtype
    if plan.kv_blocks < 1:
        raise CapacityError(f"stage [{plan.lo},{plan.hi}) is given no KV blocks")


def _build(
    plan: StagePlan, info: ModelInfo, arena: Arena, group: Any, filler: WeightFiller,
    progress: Progress | None, hand_over: Callable[[], HandOver | None] | None,
) -> LoadedStage:  # fmt: skip
    if progress is not None:
        progress("build", 0, 0)
    engine, model, spec = _engine(plan, info, group, arena.device)
    filler.check(spec)
    handed = None if hand_over is None else hand_over()
    store: KvStore | None = None
    built = False
    arena.weights.open(plan.epoch, f"{Path(plan.model).resolve()} {plan.dtype}")
    try:
        dtype = torch_dtype(plan.dtype)
        first, last = spec.kv_heads(info.head_dim)
        shape = KvShape(
            plan.hi - plan.lo, last - first, plan.kv_blocks, plan.block_tokens, info.head_dim
        )
        _check_bound(
            plan, spec, arena, shape.pages * page_bytes(info, plan.dtype, plan.block_tokens)
        )
        store = KvStore(shape, dtype, arena)
        views, filled = _fill(plan, info, spec, arena, filler, progress, handed)
        _put(model, spec, arena, views, dtype)
        fresh_rotary(model, arena.device)
        kept = sum(view.piece.nbytes for _, view in views if not view.fresh)
        built = True
        kept += filled.copied_bytes
        return LoadedStage(plan, info, arena, engine, spec, store, kept, filled)
    finally:
        if not built:
            _let_go(arena, plan.epoch, store)


def _check_bound(plan: StagePlan, spec: ShardSpec, arena: Arena, kv_bytes: int) -> None:
    """What the head may fill must fit, once nothing else is here."""
    need = spec.weights_bytes(DTYPE_BYTES[plan.dtype]) + kv_bytes
    if need > arena.total_bytes:
        raise CapacityError(
            f"the arena of {arena.total_bytes} bytes is {need - arena.total_bytes} bytes short: "
            f"layers [{plan.lo},{plan.hi}) take {need - kv_bytes}, {plan.kv_blocks} KV blocks "
            f"{kv_bytes}"
        )


@contextmanager
def _own_stream(device: torch.device) -> Iterator[None]:
    """On CUDA, copy on a stream of our own: the serving thread's steps go on meanwhile."""
    if device.type != "cuda":
        yield
        return
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        yield
    stream.synchronize()


def _engine(
    plan: StagePlan, info: ModelInfo, group: Any, device: torch.device
) -> tuple[Any, StageModel, ShardSpec]:
    """DeepSpeed's engine over the meta stage, the stage itself, and what this rank owns of it."""
    ds = deepspeed(device.type)
    with BUILD_LOCK, torch.no_grad():
        model = meta_stage(info.family, load_config(info), plan.lo, plan.hi)
        rows = _row_parallel(model)
        settings: dict[str, Any] = {
            "tensor_parallel": {"tp_size": plan.tp, "tp_grain_size": GRAIN},
            # Meta parameters have no values to cast: theirs is the dtype of the arena's views.
            "dtype": torch.float32,
            "replace_with_kernel_inject": False,
            "keep_module_on_host": True,
        }
        if plan.tp > 1:
            assert group is not None, "tensor parallelism needs the stage's group"
            unit = _ModelParallelUnit(group, plan.tp_rank, plan.tp)
            settings["tensor_parallel"] |= {"tp_group": group, "mpu": unit}
        engine = ds.init_inference(model, config=settings)
        spec = read_spec(model, plan.lo, plan.hi, plan.tp, plan.tp_rank, rows)
    if info.tied and plan.lo == 0 and plan.hi == info.num_layers:
        spec = tie_head(spec)
    return engine.eval(), model, spec


def _row_parallel(model: StageModel) -> frozenset[str]:
    """Names below a layer of the linears that DeepSpeed makes row-parallel, at any degree."""
    from deepspeed.module_inject.auto_tp import AutoTP

    found = [name for _, names in AutoTP.tp_parser(model) for name in names]
    return frozenset(str(name).removeprefix(".") for name in found)


class _ModelParallelUnit:
    """What init_inference asks for besides the group; without it, it makes groups of its own."""

    def __init__(self, group: Any, tp_rank: int, tp: int) -> None:
        self._group, self._rank, self._size = group, tp_rank, tp

    def get_model_parallel_group(self) -> Any:
        return self._group

    def get_model_parallel_rank(self) -> int:
        return self._rank

    def get_model_parallel_world_size(self) -> int:
        return self._size


def _fill(
    plan: StagePlan, info: ModelInfo, spec: ShardSpec, arena: Arena, filler: WeightFiller,
    progress: Progress | None, hand_over: HandOver | None,
) -> tuple[list[tuple[Part, WeightView]], Filled]:  # fmt: skip
    """Take places in the arena and fill those that hold nothing yet, all at once or in turns."""
    parts = [part for part in spec.parts if part.view_of is None]
    turns = [parts] if hand_over is None else hand_over.turns(parts)
    views: list[tuple[Part, WeightView]] = []
    filled = Filled()
    for number, turn in enumerate(turns):
        claimed = _claim_weights(plan, info, spec, arena, turn, patient=hand_over is not None)
        views += claimed
        needs = [
            Need(part, spec.tp_rank, torch_dtype(plan.dtype), view)
            for part, view in claimed
            if view.fresh
        ]
        with _own_stream(arena.device):
            filled += filler.fill(arena.weights, needs, progress)
        if hand_over is not None:
            hand_over.taken(number)
    return views, filled


def _claim_weights(
    plan: StagePlan, info: ModelInfo, spec: ShardSpec, arena: Arena, parts: Sequence[Part],
    *, patient: bool,
) -> list[tuple[Part, WeightView]]:  # fmt: skip
    """A place in the arena for each of these parts; `patient`: what is in the way may yet go."""
    item = DTYPE_BYTES[plan.dtype]
    layers = f"layers [{plan.lo},{plan.hi})"
    deadline = time.monotonic() + (_PATIENCE_S if patient else 0.0)
    found = []
    for part in parts:
        piece, what = part.piece(spec.tp_rank, info, item), f"{part.param} of {layers}"
        while True:
            try:
                found.append((part, arena.weights.claim(plan.epoch, piece, what)))
                break
            except CapacityError:  # others take from what lies in the way: it cannot be moved
                if time.monotonic() >= deadline:
                    raise
                time.sleep(_LOOK_AGAIN_S)
    return found


def _put(
    model: StageModel, spec: ShardSpec, arena: Arena, views: list[tuple[Part, WeightView]],
    dtype: torch.dtype,
) -> None:  # fmt: skip
    """Put views of the arena in place of the meta parameters, and keep them right."""
    by_param = {part.param: (part, view) for part, view in views}
    with arena.lock:
        for part in spec.parts:
            base, view = by_param[part.view_of or part.param]
            need = Need(base, spec.tp_rank, dtype, view)
            find = partial(_tensor, arena.weights, need, part)
            path, _, name = part.param.rpartition(".")
            parameter = nn.Parameter(find(), requires_grad=False)
            setattr(model.get_submodule(path), name, parameter)
            view.on_move(partial(_repoint, parameter, find))
    left = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    assert not left, f"parameters without memory: {left}"


def _tensor(weights: WeightStore, need: Need, part: Part) -> torch.Tensor:
    """Where a part's values are now; `need` is of the part itself, or of what it is a view of."""
    piece = need.piece
    whole = need.shaped(weights.bytes_of(need.view), piece.lo, piece.hi)
    if part.view_of is None:
        return whole
    start, stop = part.range(need.tp_rank)
    return whole.narrow(0 if part.dim is None else part.dim, start, stop - start)


def _repoint(parameter: nn.Parameter, find: Callable[[], torch.Tensor]) -> None:
    parameter.data = find()
