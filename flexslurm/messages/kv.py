"""Moves of KV pages that the head orders, and how they went; the pages never pass this link."""

from __future__ import annotations

import msgspec

from flexslurm.messages.base import Message


class DataSource(msgspec.Struct, frozen=True, array_like=True):
    """Where KV pages come from: a worker's data server and an epoch it holds (or has parked)."""

    worker: str
    address: str
    data_port: int
    epoch: int


class PullKv(Message, frozen=True, tag="head.pull_kv"):
    """Fill blocks of this epoch with pages that a source holds; answered by `KvPulled`.

    Layers and heads are the model's own numbers: `[lo, hi)` each. Where the source is the worker
    itself, pages are shared and nothing moves.
    """

    epoch: int
    ticket: int
    source: DataSource
    layers: tuple[int, int]
    heads: tuple[int, int]
    pairs: tuple[tuple[int, int], ...]
    """`(source's block, own block)`."""
    rate_bytes_per_s: float = 0.0
    timeout_s: float = 60.0
    directory: str | None = None
    """Read what the source parked there in files, whether it still lives or not."""


class ParkKv(Message, frozen=True, tag="head.park_kv"):
    """Copy these blocks' pages out of the GPU; they outlive the epoch. Answered by `KvParked`.

    Without `directory` they go to host memory and stay until `UnparkKv` or the worker's end.
    """

    epoch: int
    ticket: int
    blocks: tuple[int, ...]
    directory: str | None = None
    rate_bytes_per_s: float = 0.0
    deadline_s: float = 60.0


class UnparkKv(Message, frozen=True, tag="head.unpark_kv"):
    """Forget what was parked of an epoch."""

    epoch: int


class KvPulled(Message, frozen=True, tag="worker.kv_pulled"):
    """The answer to `PullKv`."""

    worker: str
    epoch: int
    ticket: int
    moved_bytes: int
    seconds: float
    failed: tuple[int, ...] = ()
    """Own blocks that could not be filled: their sequences must be recomputed."""
    reason: str = ""


class KvParked(Message, frozen=True, tag="worker.kv_parked"):
    """The answer to `ParkKv`."""

    worker: str
    epoch: int
    ticket: int
    parked_bytes: int
    seconds: float
    failed: tuple[int, ...] = ()
    reason: str = ""
