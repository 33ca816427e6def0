"""The service file: which model, on which pieces of the cluster, for which load."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from flexslurm.config.schema import Section, misfit
from flexslurm.config.units import Fraction, Seconds

MAX_POOL_NODES = 4096
"""Over all pilots; more than one head watches well."""


class ModelSettings(Section):
    """The model that is served."""

    path: str = Field(description="Checkpoint directory: config.json, safetensors, tokenizer.")
    name: str | None = Field(None, description="Name in the API; default: the directory's name.")
    dtype: Literal["float64", "float32", "bfloat16", "float16"] = Field(
        "bfloat16", description="What weights and KV cache are held and computed in."
    )
    chat_template: str | None = Field(None, description="A file; default: the tokenizer's own.")


class Fragment(Section):
    """An entry of the pool: like pilots, each one Slurm job holding some GPUs of one type."""

    partition: str | None = Field(None, description="Slurm partition; not used by cluster: local.")
    gpu_type: str = Field(description="A key of the site's gpu_types.")
    gpus: int = Field(ge=1, le=1024, description="GPUs on each node of the pilot.")
    nodes: int = Field(1, ge=1, le=65536, description="Nodes of the pilot.")
    count: int = Field(1, ge=1, le=65536, description="Pilots of this kind.")
    walltime: Seconds | None = Field(None, description="Default: the partition's.")


class ServingSettings(Section):
    """Limits of the engine and of the queue."""

    block_tokens: int = Field(256, ge=1, le=65536, description="Tokens per KV block.")
    max_batch: int = Field(64, ge=1, le=65536, description="Sequences at once in a replica.")
    max_batch_tokens: int = Field(512, ge=1, le=2**20, description="New tokens in one micro-batch.")
    max_context: int | None = Field(
        None, ge=2, le=2**31, description="Most tokens of prompt and answer; default: the model's."
    )
    max_waiting: int = Field(
        1024, ge=0, le=2**20, description="Queue bound; beyond it requests get 429."
    )
    wait_for_gpus: Seconds = Field(
        600.0, description="How long requests wait when nothing fits before they get 503."
    )
    memory_fraction: Fraction = Field(0.9, description="Share of GPU memory for our arena.")
    heartbeat: Seconds = Field(0.5, gt=0.01, description="Between signs of life of every process.")
    lost_after: Seconds = Field(5.0, gt=0, description="Silence that means lost.")
    install_timeout: Seconds = Field(300.0, gt=0, description="Bound of one install of a gear.")

    @model_validator(mode="after")
    def _beats_fit(self) -> ServingSettings:
        if self.lost_after < 3 * self.heartbeat:
            raise misfit("it must be at least three heartbeats", "lost_after")
        return self


class GatewaySettings(Section):
    """The HTTP server."""

    host: str = Field(
        "0.0.0.0",  # noqa: S104 - clients are on other nodes; api_keys_file guards it
        description="Address to listen on.",
    )
    port: int = Field(0, ge=0, le=65535, description="0: any free port, published in head.json.")
    api_keys_file: str | None = Field(None, description="One key a line, file mode 0600.")


class WorkloadSettings(Section):
    """What the planner plans for."""

    prompt_tokens: int = Field(512, ge=1, description="Mean length of a prompt.")
    output_tokens: int = Field(128, ge=1, description="Mean length of an answer.")
    rate: float | None = Field(None, gt=0, description="Requests per second; None: as many as fit.")


class SloSettings(Section):
    """The latencies aimed at."""

    ttft: Seconds | None = Field(None, description="Time to first token aimed at.")
    tpot: Seconds | None = Field(None, description="Time per output token aimed at.")


class HeadPlace(Section):
    """Where controller and gateway run."""

    place: Literal["job", "here"] = Field("job", description="A Slurm job, or this shell.")


class ProfilingSettings(Section):
    """How the load is measured."""

    interval_sec: float = Field(10, gt=0, description="Seconds between samples.")
    window_minutes: float = Field(5, gt=0, description="Minutes that averages and P95 look back.")


class DecisionSettings(Section):
    """When a gear is left for a better one without need."""

    min_action_gap_sec: float = Field(180, ge=0, description="Least seconds between such shifts.")
    migration_benefit_ratio: float = Field(
        1.3, ge=1, description="Least ratio of tokens after the shift to tokens without."
    )
    eviction_risk_weight: float = Field(
        0.8, ge=0, description="Weight of losses that may come; 0 ignores them."
    )


class SchedulingSettings(Section):
    """Which gears may be used, by name; by default the gear table decides."""

    plans: list[str] | None = Field(None, description="The only gears that may be installed.")
    default_plan: str | None = Field(None, description="Preferred wherever it fits.")
    fallback_plan: str | None = Field(None, description="Taken when no other fits.")


class ExecutorSettings(Section):
    """How a shift is carried out."""

    bandwidth_limit_mbps: float | None = Field(
        None, gt=0, description="MB/s that transfers may take; default: 60 % of the link."
    )
    checkpoint_dir: str | None = Field(None, description="Where the light checkpoint is written.")
    kvcache_chunk_size: int = Field(
        256, ge=1, le=65536, description="Another name of serving.block_tokens, which wins."
    )
    health_probe_tokens: int = Field(16, ge=0, description="Tokens of the probe before a cut-over.")
    drain_timeout_sec: float = Field(60, ge=0, description="Seconds that running work has to end.")


class Service(Section):
    """One model served under one name."""

    name: str = Field(
        pattern=r"^[a-z0-9][a-z0-9-]{0,30}$", description="Lower-case letters, digits and dashes."
    )
    model: ModelSettings
    pool: list[Fragment] = Field(min_length=1)
    serving: ServingSettings = Field(default_factory=ServingSettings)
    gateway: GatewaySettings = Field(default_factory=GatewaySettings)
    workload: WorkloadSettings = Field(default_factory=WorkloadSettings)
    slo: SloSettings = Field(default_factory=SloSettings)
    head: HeadPlace = Field(default_factory=HeadPlace)
    profiling: ProfilingSettings = Field(default_factory=ProfilingSettings)
    decisions: DecisionSettings = Field(default_factory=DecisionSettings)
    scheduling: SchedulingSettings = Field(default_factory=SchedulingSettings)
    executor: ExecutorSettings = Field(default_factory=ExecutorSettings)

    @model_validator(mode="after")
    def _pool_is_bounded(self) -> Service:
        nodes = sum(entry.nodes * entry.count for entry in self.pool)
        if nodes > MAX_POOL_NODES:
            raise misfit(f"{nodes} nodes in all; at most {MAX_POOL_NODES} can be asked for", "pool")
        return self
