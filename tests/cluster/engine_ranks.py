"""Ranks of a tensor-parallel group for tests: warmed up once, forked, then told what to do.

Run: python -m tests.cluster.engine_ranks SIZE SOCKET STORE
Each rank connects to SOCKET, says its number and answers calls `(function, arguments)` in order.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from itertools import pairwise
from multiprocessing.connection import Client
from pathlib import Path
from typing import Any

import torch
from engine_harness import lines_of, run

from flexslurm.engine.arena import Arena
from flexslurm.engine.backend import warm_up
from flexslurm.engine.families import check_model
from flexslurm.engine.footprint import kv_bytes, stage_bytes
from flexslurm.engine.groups import Group, Network, start_default_world
from flexslurm.engine.stage import LoadedStage, StagePlan, build_stage

CPU = torch.device("cpu")
KEY = b"loopback tests only"


class Rank:
    """One process: its arena, the groups it has formed, and the stages it holds."""

    def __init__(self, rank: int, store: str) -> None:
        self.rank = rank
        self.store = torch.distributed.FileStore(store, -1)
        self.arena = Arena(2 << 30)
        self.groups: dict[int, Group] = {}
        self.stages: list[LoadedStage] = []
        self.weights: dict[str, torch.Tensor] = {}

    def group(self, tp: int) -> Any:
        if tp == 1:
            return None
        if tp not in self.groups:
            self.groups[tp] = Group(f"tp{tp}", self.rank, tp, Network(CPU, "127.0.0.1"))
            self.groups[tp].form(self.store)  # type: ignore[arg-type]
        return self.groups[tp].handle

    def build(self, path: str, cuts: tuple[int, ...], tp: int, dtype: str = "float64") -> None:
        self.close()
        for number, (lo, hi) in enumerate(pairwise(cuts)):
            plan = StagePlan(path, number, lo, hi, tp, self.rank, dtype, 4, 64)
            self.stages.append(build_stage(plan, self.arena, self.group(tp)))

    def answers(self, prompts: list[list[int]], wanted: int, seed: int) -> list[list[int]]:
        return run(self.stages, lines_of(prompts, wanted, 4, 64), seed=seed)

    def parts(self) -> list[tuple[int | None, str, tuple[int, ...], int | None, tuple[int, int]]]:
        """Of every part: layer, name, whole shape, dim, and this rank's range."""
        return [
            (part.layer, part.name, part.shape, part.dim, part.range(self.rank))
            for stage in self.stages
            for part in stage.spec.parts
        ]

    def sizes(self) -> dict[str, tuple[int, ...]]:
        return {
            f"{part.layer}.{part.name}": part.sizes
            for stage in self.stages
            for part in stage.spec.parts
            if part.dim is not None
        }

    def kv_heads(self) -> list[tuple[int, int]]:
        return [stage.spec.kv_heads(stage.info.head_dim) for stage in self.stages]

    def memory(self, path: str) -> list[tuple[int, int, int, int, int]]:
        """By stage: weights taken and estimated, KV taken and estimated, the arena's own figure."""
        info, found = check_model(path), []
        for stage in self.stages:
            p = stage.plan
            found.append((
                stage.weights_bytes,
                stage_bytes(info, p.lo, p.hi, p.tp, p.tp_rank, p.dtype),
                stage.kv_bytes,
                kv_bytes(info, p.lo, p.hi, p.tp, p.tp_rank, p.dtype, 4, p.kv_blocks),
                stage.used_bytes - stage.weights_bytes - stage.store.live_bytes,
            ))  # fmt: skip
        return found

    def close(self) -> int:
        for stage in self.stages:
            stage.close()
        self.stages = []
        self.arena.check_integrity()
        return self.arena.used_bytes

    def threads(self, count: int) -> int:
        """A product over several OpenMP threads, which hangs where a fork broke them."""
        torch.set_num_threads(count)
        side = torch.ones(600, 600)
        found = int((side @ side)[0, 0])
        torch.set_num_threads(1)
        return found


def serve(rank: int, socket: str, store: str) -> None:
    torch.set_num_threads(1)
    start_default_world(CPU)
    me = Rank(rank, store)
    with Client(socket, family="AF_UNIX", authkey=KEY) as link:
        link.send(rank)
        while (call := link.recv()) is not None:
            name, arguments = call
            function: Callable[..., Any] = getattr(me, name)
            try:
                link.send((True, function(*arguments)))
            except Exception:  # noqa: BLE001 - the test shows it
                link.send((False, traceback.format_exc()))


def main() -> None:
    size, socket, store = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    warm_up()
    assert len(list(Path("/proc/self/task").iterdir())) == 1, "warming up has started a thread"
    children = []
    for rank in range(size):
        child = os.fork()
        if child == 0:
            serve(rank, socket, store)
            os._exit(0)
        children.append(child)
    for child in children:
        os.waitpid(child, 0)


if __name__ == "__main__":
    main()
