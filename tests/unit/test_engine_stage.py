"""Pipelines of stages, in one process, give exactly transformers' tokens."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from engine_harness import Line, chunk_of, lines_of, pipeline, prompts_of, reference, run, step

from flexslurm.engine.arena import Arena
from flexslurm.engine.backend import warm_up
from flexslurm.engine.batch import Batch
from flexslurm.engine.checkpoint import check_files
from flexslurm.engine.families import check_model
from flexslurm.engine.footprint import block_bytes, kv_bytes, stage_bytes
from flexslurm.engine.stage import StagePlan, build_stage
from flexslurm.engine.tiny import TINY_FAMILIES
from flexslurm.errors import CapacityError, ModelError, ProtocolError
from flexslurm.messages import Chunk
from flexslurm.planner.model_spec import aligned

TinyModels = Callable[..., Path]
LENGTHS = (1, 5, 19, 12)
WANTED = 12


@pytest.fixture(scope="module", autouse=True)
def _warm() -> None:
    warm_up()


@pytest.fixture
def arena() -> Iterator[Arena]:
    one = Arena(64 << 20)
    yield one
    one.check_integrity()
    one.close()


@pytest.fixture(scope="module")
def answers(tiny_models: TinyModels) -> Callable[[Path], tuple[list[list[int]], list[list[int]]]]:
    kept: dict[Path, tuple[list[list[int]], list[list[int]]]] = {}

    def get(path: Path) -> tuple[list[list[int]], list[list[int]]]:
        if path not in kept:
            prompts = prompts_of(240, LENGTHS)
            kept[path] = prompts, reference(path, prompts, WANTED)
        return kept[path]

    return get


@pytest.mark.parametrize("cuts", [(0, 6), (0, 2, 6), (0, 1, 4, 6)], ids=["pp1", "pp2", "pp3"])
@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_greedy_tokens_are_those_of_transformers(
    family: str, cuts: tuple[int, ...], tiny_models: TinyModels, arena: Arena, answers
) -> None:
    path = tiny_models(family)
    prompts, wanted = answers(path)
    stages = pipeline(path, cuts, arena)
    assert run(stages, lines_of(prompts, WANTED, 4, 64), seed=len(cuts)) == wanted


@pytest.mark.parametrize("family", ["llama", "opt", "gpt_neox"])
def test_tied_heads_are_loaded_wherever_they_are(
    family: str, tiny_models: TinyModels, arena: Arena, answers
) -> None:
    path = tiny_models(family, tied=True)
    prompts, wanted = answers(path)
    whole, cut = pipeline(path, (0, 6), arena), None
    assert run(whole, lines_of(prompts, WANTED, 4, 64)) == wanted
    whole[0].close()
    cut = pipeline(path, (0, 3, 6), arena)
    assert run(cut, lines_of(prompts, WANTED, 4, 64)) == wanted


@pytest.mark.parametrize("block_tokens", [1, 3, 16, 256])
def test_block_size_does_not_matter(
    block_tokens: int, tiny_model: Path, arena: Arena, answers
) -> None:
    prompts, wanted = answers(tiny_model)
    blocks = {1: 120}.get(block_tokens, 40)
    stages = pipeline(tiny_model, (0, 6), arena, block_tokens=block_tokens, kv_blocks=blocks)
    assert run(stages, lines_of(prompts, WANTED, block_tokens, blocks), most_chunk=40) == wanted


def test_logits_are_those_of_transformers_to_rounding(tiny_model: Path, arena: Arena) -> None:
    from transformers import AutoModelForCausalLM

    stages = pipeline(tiny_model, (0, 3, 6), arena)
    prompt = prompts_of(240, [23])[0]
    line = lines_of([prompt], 1, 4, 64)[0]
    step(stages, [chunk_of(line, 9)])
    batch = Batch.from_chunks([chunk_of(line, 14)], 4)
    found = stages[1].forward(batch, stages[0].forward(batch))
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float64)
    with torch.inference_mode():
        wanted = model(torch.tensor([prompt])).logits[0, -1]
    torch.testing.assert_close(found[0], wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("family", ["mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("cuts", [(0, 6), (0, 4, 6)])
def test_sliding_windows_are_kept(
    family: str, cuts: tuple[int, ...], tiny_models: TinyModels, tmp_path: Path, arena: Arena
) -> None:
    path = tmp_path / "windowed"
    shutil.copytree(tiny_models(family), path)
    config = json.loads((path / "config.json").read_text())
    config |= {"sliding_window": 6}
    if family != "mistral":
        # Layers from 3 on look back six tokens, the others at everything.
        config |= {"use_sliding_window": True, "max_window_layers": 3}
        config.pop("layer_types", None)
    (path / "config.json").write_text(json.dumps(config))
    prompts = prompts_of(240, (3, 21, 9))
    wanted = reference(path, prompts, WANTED)
    assert wanted != reference(tiny_models(family), prompts, WANTED), "the window must matter"
    for most_chunk in (4, 30):
        stages = pipeline(path, cuts, arena)
        found = run(stages, lines_of(prompts, WANTED, 4, 64), most_chunk=most_chunk)
        assert found == wanted
        for stage in stages:
            stage.close()


VARIANTS: list[tuple[str, dict[str, object]]] = [
    ("llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 12}),
    ("llama", {"rope_parameters": {
        "rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 16}}),
    ("qwen3", {"attention_bias": True, "head_dim": 16, "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0,
        "original_max_position_embeddings": 16}}),
    ("opt", {"word_embed_proj_dim": 20, "do_layer_norm_before": False, "ffn_dim": 60}),
    ("opt", {"word_embed_proj_dim": 20, "enable_bias": False, "ffn_dim": 60,
             "tie_word_embeddings": False}),
    ("opt", {"layer_norm_elementwise_affine": False, "ffn_dim": 60}),
    ("gpt_neox", {"use_parallel_residual": False, "attention_bias": False,
                  "tie_word_embeddings": True}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("family", "changes"), VARIANTS, ids=[f"{f}-{next(iter(c))}" for f, c in VARIANTS]
)
def test_variants_of_the_families(
    family: str, changes: dict[str, object], tmp_path: Path, arena: Arena
) -> None:
    """What a configuration may switch on or off: biases, projections, norms, rotary scalings."""
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {
        "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 6, "vocab_size": 256,
        "intermediate_size": 100, "num_key_value_heads": 3, "max_position_embeddings": 64,
    }  # fmt: skip
    if family in ("opt", "gpt_neox"):
        sizes.pop("num_key_value_heads")
    if family == "opt":
        sizes.pop("intermediate_size")
    torch.manual_seed(1)
    config = AutoConfig.for_model(family, **(sizes | changes))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float64)
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.4)
    model.save_pretrained(tmp_path / "m")
    info = check_model(tmp_path / "m")
    check_files(info)
    prompts = prompts_of(240, (4, 17))
    wanted = reference(tmp_path / "m", prompts, 8)
    stages = pipeline(tmp_path / "m", (0, 1, 3), arena)
    assert run(stages, lines_of(prompts, 8, 4, 64)) == wanted
    for stage, (lo, hi) in zip(stages, ((0, 1), (1, 3)), strict=True):
        assert stage.weights_bytes == stage_bytes(info, lo, hi, 1, 0, "float64")


def test_recomputing_from_tokens_goes_on_with_the_same_tokens(
    tiny_model: Path, arena: Arena, answers
) -> None:
    prompts, wanted = answers(tiny_model)
    stages = pipeline(tiny_model, (0, 6), arena)
    lines = lines_of(prompts, 5, 4, 64)
    run(stages, lines)
    for stage in stages:
        stage.close()
    again = pipeline(tiny_model, (0, 4, 6), arena)
    for line in lines:
        line.stored, line.wanted = 0, WANTED
        line.blocks = tuple(range(-(-(len(line.prompt) + WANTED) // 4)))
    for line in lines:  # one after another, over the same blocks: old contents must not show
        run(again, [line], seed=3)
    assert [line.answer for line in lines] == wanted


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [("float32", 1e-4), ("float16", 0.1), ("bfloat16", 0.3)]
)
def test_other_dtypes_load_converted(
    dtype: str, tolerance: float, tiny_model: Path, arena: Arena
) -> None:
    exact = pipeline(tiny_model, (0, 6), arena)
    line = lines_of(prompts_of(240, [17]), 1, 4, 64)[0]
    batch = Batch.from_chunks([chunk_of(line, 17)], 4)
    wanted = exact[0].forward(batch)
    exact[0].close()
    stages = pipeline(tiny_model, (0, 6), arena, dtype=dtype)
    found = stages[0].forward(batch)
    assert found.dtype == getattr(torch, dtype)
    error = (found.double() - wanted).abs().mean() / wanted.abs().mean()
    assert 0 < error < tolerance


# ------------------------------------------------------------------- memory


@pytest.mark.parametrize("family", TINY_FAMILIES)
@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
@pytest.mark.parametrize("tied", [False, True])
def test_memory_is_what_the_estimate_says_to_the_byte(
    family: str, dtype: str, tied: bool, tiny_models: TinyModels, arena: Arena
) -> None:
    path = tiny_models(family, tied=tied)
    info = check_model(path)
    stages = pipeline(path, (0, 1, 4, 6), arena, dtype=dtype, kv_blocks=5)
    pages = 0
    for stage, lo, hi in zip(stages, (0, 1, 4), (1, 4, 6), strict=True):
        assert stage.weights_bytes == stage_bytes(info, lo, hi, 1, 0, dtype)
        assert stage.kv_bytes == kv_bytes(info, lo, hi, 1, 0, dtype, 4, 5)
        assert stage.kv_bytes == aligned(5 * block_bytes(info, lo, hi, 1, 0, dtype, 4))
        assert stage.used_bytes == stage.weights_bytes
        stage.store.prepare([3, 0], [], [])
        pages += 2 * block_bytes(info, lo, hi, 1, 0, dtype, 4)
    weights = sum(stage.weights_bytes for stage in stages)
    assert arena.used_bytes == sum(stage.used_bytes for stage in stages) == weights + pages
    for stage in stages:
        used = stage.used_bytes
        assert stage.close() == used
        assert stage.close() == 0
    assert arena.used_bytes == 0


def test_blocks_take_memory_from_their_first_token_until_they_are_freed(
    tiny_model: Path, arena: Arena
) -> None:
    stage = pipeline(tiny_model, (0, 6), arena)[0]
    block = block_bytes(check_model(tiny_model), 0, 6, 1, 0, "float64", 4)
    line = Line("s", tuple(range(13)), 9, (7, 3, 5, 1, 60))
    used = []
    for _ in range(4):
        stage.forward(Batch.from_chunks([chunk_of(line, 4)], 4))
        used.append(arena.used_bytes - stage.weights_bytes)
    assert used == [block, 2 * block, 3 * block, 4 * block]
    stage.free((3, 60, 3))
    assert arena.used_bytes - stage.weights_bytes == 3 * block
    with pytest.raises(ProtocolError, match="reads block 3, which holds nothing"):
        stage.forward(
            Batch.from_chunks([Chunk(seq_id="s", tokens=(1,), start=13, blocks=line.blocks)], 4)
        )


def test_every_parameter_is_a_view_of_the_arena(tiny_model: Path, arena: Arena) -> None:
    stage = pipeline(tiny_model, (0, 6), arena)[0]
    low = arena.data.data_ptr()
    for name, parameter in stage._engine.module.named_parameters():
        assert low <= parameter.data_ptr() < low + arena.total_bytes, name
        assert not parameter.requires_grad


def test_middle_stages_hold_no_embedding(tiny_model: Path, arena: Arena) -> None:
    stages = pipeline(tiny_model, (0, 2, 4, 6), arena)
    names = [{p.name for p in s.spec.parts if p.layer is None} for s in stages]
    assert names == [{"embed.weight"}, set(), {"norm.weight", "lm_head.weight"}]
    assert [s.is_first for s in stages] == [True, False, False]
    assert [s.is_last for s in stages] == [False, False, True]


def test_row_parallel_weights_lie_transposed(tiny_model: Path, arena: Arena) -> None:
    stage = pipeline(tiny_model, (0, 6), arena)[0]
    for part in stage.spec.parts:
        weight = stage._engine.module.get_parameter(part.param)
        rows = part.name in ("self_attn.o_proj.weight", "mlp.down_proj.weight", "lm_head.weight")
        assert part.transposed == rows, part.name
        assert (weight.t() if rows else weight).is_contiguous()


def test_an_arena_too_small_says_by_how_much_and_is_left_empty(tiny_model: Path) -> None:
    info = check_model(tiny_model)
    need = stage_bytes(info, 0, 6, 1, 0, "float64") + kv_bytes(info, 0, 6, 1, 0, "float64", 4, 9)
    plan = StagePlan(str(tiny_model), 1, 0, 6, 1, 0, "float64", 4, 9)
    exact = Arena(need)
    stage = build_stage(plan, exact)
    stage.store.prepare(range(9), [], [])
    assert exact.free_bytes == 0
    exact.check_integrity()
    short = Arena(need - 256)
    with pytest.raises(CapacityError, match="256 bytes short"):
        build_stage(plan, short)
    assert short.used_bytes == 0
    exact.close()
    short.close()


# ------------------------------------------------------------------- building beside serving


def test_a_second_epoch_is_built_while_the_first_serves(
    tiny_models: TinyModels, arena: Arena, answers
) -> None:
    old, new = tiny_models("llama"), tiny_models("opt")
    prompts, wanted = answers(old)
    serving = [build_stage(StagePlan(str(old), 1, 0, 6, 1, 0, "float64", 4, 64), arena)]
    built, stop = [], threading.Event()

    def install() -> None:
        for epoch in range(2, 200):
            plan = StagePlan(str(new), epoch, 0, 6, 1, 0, "float64", 4, 64)
            built.append(build_stage(plan, arena))
            if stop.is_set():
                return
            built[-1].close()

    thread = threading.Thread(target=install)
    thread.start()
    try:
        for seed in range(6):
            assert run(serving, lines_of(prompts, WANTED, 4, 64), seed=seed) == wanted
    finally:
        stop.set()
        thread.join()
    assert len(built) > 1
    new_prompts, new_wanted = answers(new)
    assert run(built[-1:], lines_of(new_prompts, WANTED, 4, 64)) == new_wanted


def test_progress_counts_bytes_and_may_cancel(tiny_model: Path, arena: Arena) -> None:
    seen: list[tuple[str, int, int]] = []
    plan = StagePlan(str(tiny_model), 1, 0, 6, 1, 0, "float64", 4, 8)
    build_stage(plan, arena, progress=lambda *at: seen.append(at)).close()
    phases = [phase for phase, _, _ in seen]
    assert phases[0] == "build"
    assert phases[-1] == "weights"
    done = [d for phase, d, _ in seen if phase == "weights"]
    assert done == sorted(done)
    assert done[-1] == seen[-1][2]

    class Cancelled(Exception):
        pass

    def cancel(phase: str, done: int, total: int) -> None:
        if done * 2 > total > 0:
            raise Cancelled

    with pytest.raises(Cancelled):
        build_stage(plan, arena, progress=cancel)
    assert arena.used_bytes == 0


def test_nothing_is_printed(tiny_model: Path, arena: Arena, capfd: pytest.CaptureFixture) -> None:
    pipeline(tiny_model, (0, 3, 6), arena)
    out, err = capfd.readouterr()
    assert (out, err) == ("", "")


@pytest.mark.parametrize(("lo", "hi"), [(0, 7), (3, 3), (4, 2), (-1, 2)])
def test_layers_outside_the_model_are_refused(
    lo: int, hi: int, tiny_model: Path, arena: Arena
) -> None:
    with pytest.raises(ModelError, match="not a run"):
        build_stage(StagePlan(str(tiny_model), 1, lo, hi, 1, 0, "float64", 4, 8), arena)


def test_more_ranks_than_kv_heads_are_refused(tiny_model: Path, arena: Arena) -> None:
    with pytest.raises(ModelError, match="3 key/value heads, too few for 4"):
        build_stage(StagePlan(str(tiny_model), 1, 0, 6, 4, 0, "float64", 4, 8), arena)


def test_a_batch_that_samples_nothing_gives_no_logits(tiny_model: Path, arena: Arena) -> None:
    stages = pipeline(tiny_model, (0, 6), arena)
    line = Line("s", tuple(range(9)), 1, tuple(range(5)))
    batch = Batch.from_chunks([chunk_of(line, 4)], 4)
    assert stages[0].forward(batch).shape == (0, 256)
