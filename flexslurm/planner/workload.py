"""What a gear is planned for: lengths, targets and the engine's limits; only values."""

from __future__ import annotations

import math
from enum import StrEnum
from typing import NamedTuple

import msgspec

from flexslurm.config.service import Service
from flexslurm.planner.model_spec import ALIGNMENT_BYTES


class Workload(msgspec.Struct, frozen=True):
    """A steady stream of requests of one mean shape."""

    prompt_tokens: int = 512
    output_tokens: int = 128
    rate: float | None = None
    """Requests per second; None: as many as fit."""

    @classmethod
    def from_service(cls, service: Service) -> Workload:
        load = service.workload
        return cls(load.prompt_tokens, load.output_tokens, load.rate)

    def clipped(self, max_context: int) -> Workload:
        """The same within the longest sequence that can be served."""
        prompt = max(1, min(self.prompt_tokens, max_context - 1))
        return msgspec.structs.replace(
            self, prompt_tokens=prompt, output_tokens=min(self.output_tokens, max_context - prompt)
        )

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.output_tokens


class Slo(msgspec.Struct, frozen=True):
    """Targets; None: none."""

    ttft_s: float | None = None
    tpot_s: float | None = None

    @classmethod
    def from_service(cls, service: Service) -> Slo:
        return cls(service.slo.ttft, service.slo.tpot)


class EngineLimits(msgspec.Struct, frozen=True):
    """The engine's settings that bound a gear."""

    block_tokens: int = 256
    max_batch: int = 64
    """Sequences of one replica over all its micro-batches."""
    max_batch_tokens: int = 512
    """New tokens of one micro-batch."""
    max_context: int | None = None
    memory_fraction: float = 0.9

    @classmethod
    def from_service(cls, service: Service) -> EngineLimits:
        serving = service.serving
        return cls(
            block_tokens=serving.block_tokens,
            max_batch=serving.max_batch,
            max_batch_tokens=serving.max_batch_tokens,
            max_context=serving.max_context,
            memory_fraction=serving.memory_fraction,
        )

    def arena_bytes(self, memory_bytes: int) -> int:
        """The part of a GPU's memory that weights and KV pages share."""
        return math.floor(memory_bytes * self.memory_fraction) // ALIGNMENT_BYTES * ALIGNMENT_BYTES


class Objective(StrEnum):
    """What a gear is best at."""

    THROUGHPUT = "throughput"
    """Most output tokens per second within the targets."""
    LATENCY = "latency"
    """Shortest requests, then throughput."""
    GPUS = "gpus"
    """Fewest GPUs that keep up with the workload's rate."""


class Goal(msgspec.Struct, frozen=True):
    """All that a plan is made for, besides the model and the GPUs."""

    workload: Workload = Workload()
    slo: Slo = Slo()
    limits: EngineLimits = EngineLimits()
    objective: Objective = Objective.THROUGHPUT

    @classmethod
    def from_service(cls, service: Service) -> Goal:
        return cls(
            Workload.from_service(service),
            Slo.from_service(service),
            EngineLimits.from_service(service),
        )


class SlotLoad(NamedTuple):
    """What a slot adds to a step, or all slots together."""

    new_tokens: float
    context_tokens: float
    sampled: float
    pairs: float
    sequences: float


class StepLoad(msgspec.Struct, frozen=True):
    """What one slot of a batch adds to a mean step, to one of decoding, to one full of prefill.

    A request of P prompt and O output tokens holds its slot for `chunks` steps of prefill, the last
    of which gives the first token, and O-1 steps of decoding.
    """

    new_tokens: float
    context_tokens: float
    pairs: float
    sampled: float
    """Tokens given per step of the slot: O over the steps it is held."""
    chunks: int
    prompt_tokens: int
    prefills: float
    """Share of its steps in which a slot brings a chunk of prefill."""
    decode: SlotLoad
    prefill: SlotLoad

    def with_prefill(self, slots: int) -> SlotLoad:
        """A step of a micro-batch in which some slot brings prefill, in the mean."""
        share = self.prefills / self.prefill_share(slots)
        return SlotLoad(
            *(
                slots * ((1.0 - share) * one + share * other)
                for one, other in zip(self.decode, self.prefill, strict=True)
            )
        )

    def without_prefill(self, slots: int) -> SlotLoad:
        """A step of a micro-batch in which every slot decodes."""
        return SlotLoad(*(slots * one for one in self.decode))

    def prefill_share(self, slots: int) -> float:
        """How often at least one of so many slots brings prefill; above 0."""
        return 1.0 - (1.0 - self.prefills) ** slots

    @classmethod
    def of(cls, workload: Workload, max_batch_tokens: int) -> StepLoad:
        prompt, output = workload.prompt_tokens, workload.output_tokens
        chunks = -(-prompt // max_batch_tokens)
        steps = output - 1 + chunks
        decode_context = prompt + output / 2
        chunk = prompt / chunks
        prefill_context = (prompt + chunk) / 2
        return cls(
            new_tokens=(prompt + output - 1) / steps,
            context_tokens=((output - 1) * decode_context + chunks * prefill_context) / steps,
            pairs=((output - 1) * decode_context + prompt * prefill_context) / steps,
            sampled=output / steps,
            chunks=chunks,
            prompt_tokens=prompt,
            prefills=chunks / steps,
            decode=SlotLoad(1.0, decode_context, 1.0, decode_context, 1.0),
            prefill=SlotLoad(chunk, prefill_context, 1.0 / chunks, chunk * prefill_context, 1.0),
        )
