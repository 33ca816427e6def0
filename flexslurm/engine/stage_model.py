"""The torch module of one pipeline stage, cut from transformers' model on the meta device.

Holds the embedding only on the first stage, the final norm and the head only on the last. Nothing
here allocates memory: parameters are meta tensors until the stage puts arena views in their place.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from flexslurm.engine import attention
from flexslurm.engine.backend import quiet_transformers
from flexslurm.engine.batch import Batch
from flexslurm.engine.families import Family, ModelInfo
from flexslurm.errors import ModelError


class StageModel(nn.Module):
    """Layers `[lo, hi)` of a model, with what belongs before and after on the edges.

    The module has no `device` of its own: DeepSpeed would take a whole meta model to memory.
    """

    def __init__(self, family: Family, whole: Any, first: bool, last: bool) -> None:
        super().__init__()
        trunk = getattr(whole, family.base)
        if family.trunk:
            trunk = getattr(trunk, family.trunk)
        self.config = whole.config
        self.layers: nn.ModuleList = trunk.layers
        self.embed = getattr(trunk, family.embed) if first else None
        self.positions = getattr(trunk, family.positions) if first and family.positions else None
        self.project_in = getattr(trunk, "project_in", None) if first else None
        self.norm = getattr(trunk, family.norm) if last else None
        self.project_out = getattr(trunk, "project_out", None) if last else None
        self.lm_head = whole.lm_head if last else None
        self.rotary = getattr(trunk, "rotary_emb", None)

    def forward(
        self, batch: Batch, hidden: torch.Tensor | None, step: attention.AttentionStep
    ) -> torch.Tensor:
        """`[T, hidden]` in and out; token ids in on the first stage, logits `[S, vocab]` out."""
        positions = batch.positions[None]
        if self.embed is not None:
            hidden = self._embedded(batch, positions)
        else:
            assert hidden is not None, "a stage that is not the first needs the one before"
            hidden = hidden[None]
        extra: dict[str, Any] = {"position_ids": positions, "step": step}
        if self.rotary is not None:
            extra["position_embeddings"] = self.rotary(hidden, position_ids=positions)
        for layer in self.layers:
            hidden = layer(hidden, attention_mask=None, **extra)
        if self.lm_head is None:
            return hidden[0]
        return self._logits(hidden[:, batch.sample_rows])

    def _embedded(self, batch: Batch, positions: torch.Tensor) -> torch.Tensor:
        assert self.embed is not None
        hidden: torch.Tensor = self.embed(batch.tokens[None])
        if self.project_in is not None:
            hidden = self.project_in(hidden)
        if self.positions is not None:
            hidden = hidden + self.positions(None, 0, position_ids=positions)
        return hidden

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        assert self.lm_head is not None
        if hidden.shape[1] == 0:  # a batch of prefill chunks only: nothing to compute
            return hidden.new_empty((0, self.config.vocab_size))
        if self.norm is not None:
            hidden = self.norm(hidden)
        if self.project_out is not None:
            hidden = self.project_out(hidden)
        logits: torch.Tensor = self.lm_head(hidden)[0]
        return logits


def load_config(info: ModelInfo) -> Any:
    """The configuration as transformers has it; raises ModelError where it refuses the file."""
    from transformers import AutoConfig

    try:
        with quiet_transformers():
            return AutoConfig.from_pretrained(
                info.path, local_files_only=True, trust_remote_code=False
            )
    except (OSError, ValueError, TypeError, KeyError) as error:
        reason = " ".join(str(error).split())
        raise ModelError(f"{info.path}/config.json: {reason}") from None


def meta_stage(family: Family, config: Any, lo: int, hi: int) -> StageModel:
    """The stage on the meta device, in whatever dtype: parameters get theirs from the arena.

    transformers builds only these layers, numbered from 0: what depends on a layer's number in the
    whole model (the kind of attention) is cut to the same run.
    """
    import transformers

    own = copy.deepcopy(config)
    first, last = lo == 0, hi == config.num_hidden_layers
    own.num_hidden_layers = hi - lo
    if getattr(own, "layer_types", None) is not None:
        own.layer_types = list(config.layer_types[lo:hi])
    own.use_cache = False
    own.tie_word_embeddings = False
    own._attn_implementation = attention.NAME
    transformers.AttentionInterface.register(attention.NAME, attention.paged_attention)
    causal_lm = getattr(transformers, family.causal_lm)
    with quiet_transformers(), torch.device("meta"):
        # Straight from the class: from_config would change torch's default dtype for every thread.
        whole = causal_lm(own)
    return StageModel(family, whole, first, last).eval()


def fresh_rotary(stage: StageModel, device: torch.device) -> None:
    """Compute the rotary tables anew: they are not in the checkpoint, and meta has no values.

    They stay float32 whatever the weights are, as transformers keeps them.
    """
    if stage.rotary is not None:
        stage.rotary = type(stage.rotary)(stage.config).to(device)


def tiny_meta_model(family: Family) -> StageModel:
    """A two-layer stage of a family, on meta: what `warm_up` builds."""
    from transformers import CONFIG_MAPPING

    config = CONFIG_MAPPING[family.model_type]()
    config.num_hidden_layers = 2
    if getattr(config, "layer_types", None) is not None:
        config.layer_types = list(config.layer_types[:2])
    return meta_stage(family, config, 0, 2)
