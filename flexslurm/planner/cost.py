"""The time of one step of one stage, as coefficients; arithmetic only, used by workers too.

A step of a stage takes max(memory, compute) plus fixed and link times (the roofline: Williams,
Waterman, Patterson, CACM 2009; its terms for transformers as in Pope et al., "Efficiently Scaling
Transformer Inference", 2022):

- memory: every weight of the stage is read once per step, of experts those the tokens choose, and
  K and V once for each token of context;
- compute: two FLOPs per multiply-add of each new token, four per attended pair and query number;
- two all-reduces per layer over a ring of p ranks: 2(p-1) messages each and 2(p-1)/p of the
  activations' bytes (Patarasuk & Yuan 2009);
- one send of the activations to the next stage.
"""

from __future__ import annotations

import itertools

import msgspec
import numpy as np
import numpy.typing as npt

from flexslurm.planner.model_spec import DTYPE_BYTES, ModelSpec
from flexslurm.planner.topology import GpuFigures, Link


class StageCost(msgspec.Struct, frozen=True):
    """Seconds of a stage's step; every field is a number, so it travels as `Pacing.acted`."""

    weights_s: float
    """Reading the weights once."""
    experts_s: float
    """Reading all routed experts once."""
    expert_share: float
    """Share of the experts that one token uses; 0 without experts."""
    context_s: float
    """Reading K and V of one token of context."""
    token_s: float
    """Computing one new token."""
    pair_s: float
    """Attending from one new token to one token of context."""
    sampled_s: float
    """The head on one token whose logits are wanted."""
    fixed_s: float
    """What each step costs whatever it holds: launches, latency of all-reduces and of the send."""
    link_token_s: float
    """All-reduces and send of one new token."""

    def step_s(
        self,
        new_tokens: float,
        context_tokens: float,
        sampled_tokens: float | None = None,
        pairs: float | None = None,
    ) -> float:
        """Seconds of a step with `new_tokens` over all its sequences.

        `context_tokens`: for each sequence the tokens whose K and V it attends to, summed.
        `sampled_tokens`: tokens whose logits are wanted; default all new ones.
        `pairs`: new tokens times the context each attends to, summed; default `context_tokens`,
        which is right for one new token a sequence.
        """
        sampled = new_tokens if sampled_tokens is None else sampled_tokens
        attended = context_tokens if pairs is None else pairs
        read = self.experts_s
        if self.expert_share > 0.0:
            read *= 1.0 - (1.0 - self.expert_share) ** new_tokens
        memory = self.weights_s + read + context_tokens * self.context_s
        compute = new_tokens * self.token_s + attended * self.pair_s + sampled * self.sampled_s
        return max(memory, compute) + self.fixed_s + new_tokens * self.link_token_s


def step_times(
    coefficients: npt.NDArray[np.float64],
    new_tokens: float,
    context_tokens: float,
    sampled_tokens: float,
    pairs: float,
) -> npt.NDArray[np.float64]:
    """As `StageCost.step_s` for many stages: `coefficients[field, ...]` in its fields' order."""
    weights, experts, share, context, token, pair, sampled, fixed, link = coefficients
    read = experts * (1.0 - (1.0 - share) ** new_tokens) if share.any() else experts
    memory = weights + read + context_tokens * context
    compute = new_tokens * token + pairs * pair + sampled_tokens * sampled
    result: npt.NDArray[np.float64] = np.maximum(memory, compute) + fixed + new_tokens * link
    return result


class LayerSums:
    """Prefix sums of a model's layers at one TP degree: what the layers `[0, n)` weigh and do.

    Each is the figure of the rank that has the most of it, which the others wait for.
    """

    def __init__(self, spec: ModelSpec, tp: int) -> None:
        self.spec, self.tp = spec, tp
        ranks = range(tp)
        per_kind = []
        for index in range(len(spec.kinds)):
            kind_layer = spec.layer_kinds.index(index) if index in spec.layer_kinds else None
            if kind_layer is None:
                per_kind.append((0, 0, 0, 0.0))
                continue
            experts = sum(
                w.shard_params(spec.kv_heads, tp, 0) * DTYPE_BYTES[spec.dtype]
                for w in spec.kinds[index].weights
                if w.copies > 1
            )
            most = max(spec.layer_bytes(kind_layer, tp, rank) for rank in ranks)
            multiplied = max(spec.layer_multiplied(kind_layer, tp, rank) for rank in ranks)
            share = max(
                (w.active / w.copies for w in spec.kinds[index].weights if w.copies > 1),
                default=0.0,
            )
            per_kind.append((most - experts, experts, multiplied, share))
        rows = [per_kind[index] for index in spec.layer_kinds]
        self.weights = _prefix([row[0] for row in rows])
        self.experts = _prefix([row[1] for row in rows])
        self.multiplied = _prefix([row[2] for row in rows])
        self.expert_share = max((row[3] for row in rows), default=0.0)
        self.kv_token = max(spec.kv_bytes_per_token_layer(tp, rank) for rank in ranks)
        self.first = max(spec.first_bytes(tp, rank) for rank in ranks)
        self.last = max(spec.last_bytes(tp, rank) for rank in ranks)
        self.last_multiplied = max(spec.last_multiplied(tp, rank) for rank in ranks)


def _prefix(values: list[int]) -> list[float]:
    return [float(value) for value in itertools.accumulate(values, initial=0)]


def _between(sums: list[float], lo: float, hi: float) -> float:
    return _at(sums, hi) - _at(sums, lo)


def _at(sums: list[float], layer: float) -> float:
    whole = min(int(layer), len(sums) - 1)
    rest = layer - whole
    return sums[whole] if rest == 0.0 else sums[whole] + rest * (sums[whole + 1] - sums[whole])


def stage_cost(
    sums: LayerSums,
    gpu: GpuFigures,
    node_link: Link,
    lo: int,
    hi: int,
    *,
    served_layers: int | None = None,
) -> StageCost:
    """Coefficients of the stage `[lo, hi)` on `sums.tp` GPUs of one node.

    `served_layers`: the stage is of a model with that many layers which acts out the model of
    `sums`; its layers then stand for `num_layers / served_layers` of the larger one's each.
    """
    spec, tp = sums.spec, sums.tp
    served = served_layers or spec.num_layers
    scale = spec.num_layers / served
    a, b = lo * scale, hi * scale
    first, last = lo == 0, hi == served
    layers = b - a
    weights = _between(sums.weights, a, b) + (sums.last if last else 0.0)
    activation = spec.activation_bytes
    hops = 2 * (tp - 1)
    reduce_latency = 2 * layers * hops * gpu.link.latency_s
    reduce_token = 2 * layers * (hops / tp) * activation / gpu.link.bandwidth
    send_latency, send_token = (0.0, 0.0) if last else (
        node_link.latency_s,
        activation / node_link.bandwidth,
    )  # fmt: skip
    heads = -(-spec.kv_heads // tp) / spec.kv_heads
    return StageCost(
        weights_s=weights / gpu.memory_bandwidth,
        experts_s=_between(sums.experts, a, b) / gpu.memory_bandwidth,
        expert_share=sums.expert_share,
        context_s=layers * sums.kv_token / gpu.memory_bandwidth,
        token_s=2 * _between(sums.multiplied, a, b) / gpu.flops,
        pair_s=4 * layers * spec.attention_dim * heads / gpu.flops,
        sampled_s=2 * sums.last_multiplied / gpu.flops if last else 0.0,
        fixed_s=layers * gpu.layer_s + reduce_latency + send_latency,
        link_token_s=reduce_token
        + send_token
        + (activation / gpu.memory_bandwidth if first else 0),
    )
