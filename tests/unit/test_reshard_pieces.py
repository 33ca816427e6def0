"""Pieces are the parts that DeepSpeed's layers say a stage has: names, forms, ranges, bytes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from flexslurm.engine.arena import Arena
from flexslurm.engine.checkpoint import stored_names
from flexslurm.engine.families import DTYPE_BYTES, check_model
from flexslurm.engine.ownership import Holding, ShardMap
from flexslurm.engine.stage import StagePlan, build_stage
from flexslurm.engine.tiny import TINY_FAMILIES


@pytest.mark.parametrize("family", TINY_FAMILIES)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("layers", [(0, 6), (0, 2), (2, 5), (4, 6)])
def test_pieces_are_the_parts_of_a_stage(
    family: str, tied: bool, layers: tuple[int, int], tiny_models: Callable[..., Path]
) -> None:
    path = tiny_models(family, tied=True) if tied else tiny_models(family)
    info = check_model(path)
    shards = ShardMap(info, "float32", 4)
    stage = build_stage(
        StagePlan(str(path), 1, *layers, 1, 0, "float32", 4, 2), Arena(64 << 20), None
    )
    try:
        parts = {
            (
                stored_names(info, part.name, part.layer)[0],
                1 if part.transposed else 0,
                *(part.range(0) if part.dim is not None else (0, part.shape[part.transposed])),
                part.nbytes(0, DTYPE_BYTES["float32"]),
            )
            for part in stage.spec.parts
            if part.view_of is None
        }
    finally:
        stage.close()
    pieces = shards.pieces(Holding(*layers, 1, 0))
    assert {(p.tensor, p.dim, p.lo, p.hi, p.nbytes) for p in pieces} == parts
    assert len(pieces) == len(parts)
