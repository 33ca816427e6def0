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


class PilotShape(Section):
    """What one pilot holds."""

    gpus: int = Field(ge=1, le=1024, description="GPUs on each node of the pilot.")
    nodes: int = Field(1, ge=1, le=65536, description="Nodes of the pilot.")


class Fragment(Section):
    """An entry of the pool: like pilots, each one Slurm job holding some GPUs of one type."""

    partition: str | None = Field(None, description="Slurm partition; not used by cluster: local.")
    gpu_type: str = Field(description="A key of the site's gpu_types.")
    gpus: int = Field(ge=1, le=1024, description="GPUs on each node of the pilot.")
    nodes: int = Field(1, ge=1, le=65536, description="Nodes of the pilot.")
    count: int = Field(1, ge=1, le=65536, description="Pilots of this kind.")
    min_count: int | None = Field(
        None, ge=0, description="Fewest that are kept when the load is low; default: count."
    )
    max_count: int | None = Field(
        None, ge=1, description="Most that the load may ask for; default: count."
    )
    shapes: list[PilotShape] = Field(
        default_factory=list,
        description="Asked for instead where Slurm does not give the first, the liked ones first.",
    )
    preemptible: bool | None = Field(
        None,
        description="false: only a partition whose jobs Slurm does not take will do. Default: any.",
    )
    walltime: Seconds | None = Field(None, description="Default: the partition's.")
    handover: Seconds | None = Field(
        None,
        description="How long before the walltime a pilot's successor is submitted; default: as "
        "long as pilots have waited and started so far.",
    )

    @property
    def most(self) -> int:
        """Pilots there can be."""
        return self.count if self.max_count is None else self.max_count

    @property
    def all_shapes(self) -> tuple[PilotShape, ...]:
        """In the order of preference."""
        return (PilotShape(gpus=self.gpus, nodes=self.nodes), *self.shapes)

    @model_validator(mode="after")
    def _bounds_hold_the_count(self) -> Fragment:
        if (self.min_count or 0) > self.count:
            raise misfit(f"it must not be above count, which is {self.count}", "min_count")
        if self.most < self.count:
            raise misfit(f"it must not be below count, which is {self.count}", "max_count")
        return self


class KeepingSettings(Section):
    """How the pool is kept as it was asked for."""

    enabled: bool = Field(True, description="Pilots that ended are submitted again.")
    retry: Seconds = Field(
        15.0, ge=1, description="Wait before the next try after one that came to nothing; doubles."
    )
    retry_most: Seconds = Field(900.0, ge=1, description="The longest of these waits.")
    quick_death: Seconds = Field(
        60.0, ge=0, description="A pilot that ends by itself within this time has died at once."
    )
    failures: int = Field(
        3, ge=1, le=1000, description="Such deaths in a row after which a shape is given up."
    )
    give_up_for: Seconds = Field(
        3600.0, ge=1, description="A shape that was given up or refused is tried again after this."
    )
    waiting: Seconds = Field(
        1800.0, ge=1, description="A pilot that Slurm lets wait longer gives way to another shape."
    )
    high_load: Fraction = Field(0.9, description="Share of batch or KV in use that asks for more.")
    high_for: Seconds = Field(60.0, ge=0, description="How long it must last, or requests wait.")
    low_load: Fraction = Field(0.3, description="Share in use below which pilots are released.")
    low_for: Seconds = Field(900.0, ge=1, description="How long the load must be low before.")
    backfill: bool = Field(
        False,
        description="Pilots above min_count are short jobs, shaped to holes in Slurm's schedule.",
    )
    backfill_least: Seconds = Field(600.0, ge=60, description="The shortest job worth a hole.")
    backfill_most: Seconds = Field(14400.0, ge=60, description="The longest job put in a hole.")

    @model_validator(mode="after")
    def _in_order(self) -> KeepingSettings:
        for low, high in (
            ("retry", "retry_most"),
            ("low_load", "high_load"),
            ("backfill_least", "backfill_most"),
        ):
            if getattr(self, low) > getattr(self, high):
                raise misfit(f"it must not be below {low}", high)
        return self


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

    interval_sec: float = Field(10, ge=0.1, description="Seconds between samples.")
    window_minutes: float = Field(5, gt=0, description="Minutes that averages and P95 look back.")

    @model_validator(mode="after")
    def _window_has_samples(self) -> ProfilingSettings:
        if self.interval_sec > 60 * self.window_minutes:
            raise misfit("it must be no longer than the window", "interval_sec")
        return self


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
        pattern=r"^[a-z0-9][a-z0-9-]{0,30}$",
        description="Lower-case letters, digits and dashes, at most 31.",
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
    keeping: KeepingSettings = Field(default_factory=KeepingSettings)

    @model_validator(mode="after")
    def _pool_is_bounded(self) -> Service:
        nodes = sum(e.most * max(shape.nodes for shape in e.all_shapes) for e in self.pool)
        if nodes > MAX_POOL_NODES:
            raise misfit(f"{nodes} nodes in all; at most {MAX_POOL_NODES} can be asked for", "pool")
        return self
