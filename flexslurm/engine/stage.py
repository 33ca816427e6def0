"""One installed stage on one GPU: built from a plan, fed batches; talks to no other process.

The transformers model is built on meta and cut, DeepSpeed's inference engine replaces its linears
by tensor-parallel ones over the stage's own group, and exactly the slices this rank owns are read
into the arena. Building may run in a background thread while another epoch's stage serves.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from flexslurm.engine.arena import Arena
from flexslurm.engine.attention import AttentionStep
from flexslurm.engine.backend import BUILD_LOCK, deepspeed, torch_dtype
from flexslurm.engine.batch import Batch
from flexslurm.engine.families import DTYPE_BYTES, ModelInfo, check_model, tp_degrees
from flexslurm.engine.kv_store import KvShape, KvStore
from flexslurm.engine.layout import GRAIN
from flexslurm.engine.shard import ShardSpec, read_spec, tie_head
from flexslurm.engine.stage_model import StageModel, fresh_rotary, load_config, meta_stage
from flexslurm.engine.weights import FileSource, Progress, WeightSource, fill
from flexslurm.errors import CapacityError, ModelError


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

    @property
    def owner(self) -> str:
        """Whose the arena's bytes are."""
        return f"e{self.epoch}"


class Stage:
    """A stage that takes steps.

    Invariant: all its parameters and its KV pool are views of the arena, owned by `plan.owner`,
    until `close`. One thread at a time.
    """

    def __init__(
        self, plan: StagePlan, info: ModelInfo, arena: Arena, engine: Any, spec: ShardSpec,
        store: KvStore,
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
        self.kv_bytes = arena.used_by(plan.owner) - self.weights_bytes
        self._arena = arena
        self._engine = engine

    def empty_hidden(self, tokens: int) -> torch.Tensor:
        """`[tokens, hidden_size]` to receive the stage before's output in."""
        return torch.empty((tokens, self.hidden_size), dtype=self.dtype, device=self.device)

    def forward(self, batch: Batch, hidden: torch.Tensor | None = None) -> torch.Tensor:
        """Run the batch through the layers, storing its keys and values.

        `hidden` `[T, hidden_size]`, or None on the first stage. Returns the same shape,
        contiguous, or on the last stage logits `[S, vocab]` of the sampled rows. With tensor
        parallelism every rank calls it with the same arguments, in the same order.
        """
        with torch.inference_mode():
            step = AttentionStep(self.store, batch)
            found: torch.Tensor = self._engine(batch, hidden, step)
            return found.contiguous()

    def close(self) -> int:
        """Give the arena's bytes back and return how many; idempotent."""
        self._engine = None
        return self._arena.release(self.plan.owner)


def build_stage(
    plan: StagePlan,
    arena: Arena,
    group: Any = None,
    *,
    progress: Progress | None = None,
    source: WeightSource | None = None,
) -> Stage:
    """Build, fill and return the stage; whatever is raised, the arena is as it was.

    `group`: the process group of the stage's ranks, None with one rank. `source`: where slices
    come from, the model's files by default.

    Raises ModelError (the files are at fault) and CapacityError (the arena is too small), and
    passes on what `progress` raises.
    """
    info = check_model(plan.model)
    _check_plan(plan, info)
    assert not arena.used_by(plan.owner), f"{plan.owner} is installed already"
    if source is not None:
        return _build(plan, info, arena, group, source, progress)
    with FileSource(info) as files:
        return _build(plan, info, arena, group, files, progress)


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
    plan: StagePlan, info: ModelInfo, arena: Arena, group: Any, source: WeightSource,
    progress: Progress | None,
) -> Stage:  # fmt: skip
    if progress is not None:
        progress("build", 0, 0)
    engine, model, spec = _engine(plan, info, group, arena.device)
    source.check(spec)
    built = False
    try:
        dtype = torch_dtype(plan.dtype)
        views = _take_weights(plan, spec, arena, dtype)
        first, last = spec.kv_heads(info.head_dim)
        shape = KvShape(
            plan.hi - plan.lo, last - first, plan.kv_blocks, plan.block_tokens, info.head_dim
        )
        store = KvStore(shape, dtype, arena, plan.owner)
        with _own_stream(arena.device):
            fill(spec, views, source, progress)
            _put(model, views)
            fresh_rotary(model, arena.device)
        built = True
        return Stage(plan, info, arena, engine, spec, store)
    finally:
        if not built:
            arena.release(plan.owner)


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


def _take_weights(
    plan: StagePlan, spec: ShardSpec, arena: Arena, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """A view in the arena for every parameter, in the parameter's shape."""
    views: dict[str, torch.Tensor] = {}
    for part in spec.parts:
        if part.view_of is not None:
            continue
        nbytes = part.nbytes(spec.tp_rank, dtype.itemsize)
        raw = arena.take_low(plan.owner, nbytes, f"{part.param} of layers [{plan.lo},{plan.hi})")
        view = raw.view(dtype).view(part.stored_shape(spec.tp_rank))
        views[part.param] = view.t() if part.transposed else view
    for part in spec.parts:
        if part.view_of is not None:
            start, stop = part.range(spec.tp_rank)
            dim = 0 if part.dim is None else part.dim
            views[part.param] = views[part.view_of].narrow(dim, start, stop - start)
    return views


def _put(model: StageModel, views: Mapping[str, torch.Tensor]) -> None:
    """Put the arena's views in place of the meta parameters."""
    for param, view in views.items():
        path, _, name = param.rpartition(".")
        module = model.get_submodule(path)
        setattr(module, name, nn.Parameter(view, requires_grad=False))
    left = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    assert not left, f"parameters without memory: {left}"
