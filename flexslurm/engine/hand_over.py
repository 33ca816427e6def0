"""Kept weights of a closed epoch go as the new epoch's workers take them; fills nothing itself.

Where both gears do not fit, a layer's old owner keeps it until every new owner has it: the workers
meet after each turn, which is some layers, and what was kept of these is free then.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from flexslurm.engine.arena import Arena
from flexslurm.engine.ownership import Holding, ShardMap
from flexslurm.engine.shard import Part
from flexslurm.engine.turns import turns_of


class LayersInTurn:
    """Implements `stage.HandOver`: so many layers at a time, the edges with the last ones.

    `kept`: epochs that are closed and have weights in this arena. `meet` returns when all workers
    have come to a point of that name, and may raise.
    """

    def __init__(
        self,
        shards: ShardMap,
        arena: Arena,
        kept: Collection[int],
        turn_layers: int,
        meet: Callable[[str], None],
    ) -> None:
        assert turn_layers > 0
        self._shards, self._arena, self._kept, self._meet = shards, arena, kept, meet
        self._turns = turns_of(shards.info.num_layers, turn_layers)

    def turns(self, parts: Sequence[Part]) -> list[list[Part]]:
        return [
            [part for part in parts if part.layer in layers or (part.layer is None and edges)]
            for layers, edges in self._turns
        ]

    def taken(self, turn: int) -> None:
        self._meet(f"layers-{turn}")
        layers, edges = self._turns[turn]
        whole = Holding(0, self._shards.info.num_layers, 1, 0)
        tensors = {p.tensor for n in layers for p in self._shards.layer_pieces(n, whole)}
        if edges:
            tensors |= {piece.tensor for piece in self._shards.edge_pieces(whole)}
        for epoch in self._kept:
            self._arena.weights.release_part(epoch, tensors)
