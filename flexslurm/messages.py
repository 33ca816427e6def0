"""What processes say to each other, one section per link; never behaviour, only values.

Every link is one ZeroMQ DEALER (agent, worker, command line) to the head's ROUTER, encrypted and
authenticated by CURVE. A message is a msgpack map with its type in the field `t`; unknown types and
missing fields are refused by the decoder. Durations are seconds; times never cross a link, since
clocks differ.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from flexslurm.gear import Gear, Replica, Slot

PROTOCOL = 1


class Message(msgspec.Struct, frozen=True, tag_field="t", kw_only=True, omit_defaults=True):
    """The base of everything on the wire."""


# --------------------------------------------------------------- requests: gateway ↔ driver (head)


class SamplingParams(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """How the tokens of one sequence are chosen; the defaults are greedy."""

    temperature: float = 0.0
    """0 is greedy."""
    top_k: int = 0
    """0 is off."""
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] | None = None
    seed: int = 0
    """With the position, all that a token's random number depends on."""
    logprobs: int = -1
    """-1: none; n: the chosen token's log probability and the n best."""

    @property
    def needs_history(self) -> bool:
        """Whether the sampler must know the tokens so far."""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )


class StopRules(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """When a sequence ends by its tokens; stop strings are the gateway's."""

    max_tokens: int
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    """End-of-sequence tokens included, unless the request ignores them."""


class SequenceRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence to generate; a request with n choices is n of these."""

    seq_id: str
    """`REQUEST_ID/CHOICE`; unique in the life of the service."""
    prompt: tuple[int, ...]
    sampling: SamplingParams
    stop: StopRules
    arrival: int = 0
    """Order of acceptance: older first, everywhere. Given by the head."""


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log probabilities at one position: the chosen token's, and the best `(token, logprob)`."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class TokenEvent(msgspec.Struct, frozen=True, kw_only=True):
    """One token of a sequence, or its end, or both; the last event has `finish`."""

    seq_id: str
    token: int | None
    position: int
    """0 for the first generated token: strictly rising by one, whatever happens below."""
    logprobs: TokenLogprobs | None = None
    finish: FinishReason | None = None
    error: str | None = None
    code: str | None = None
    """With `error`: the `code` of the RequestError it stands for, such as `no_capacity`."""


# ------------------------------------------------------------------------------- agent → head


class GpuInfo(msgspec.Struct, frozen=True, array_like=True):
    index: int
    memory_bytes: int
    uuid: str = ""


class AgentHello(Message, frozen=True, tag="agent.hello"):
    """First message of an agent, repeated until `Welcome`."""

    protocol: int
    incarnation: str
    fragment: str
    """The pilot's name, as the launcher gave it; the same after a requeue."""
    node: str
    address: str
    """Address other nodes' workers reach this node at."""
    gpu_type: str
    gpus: tuple[GpuInfo, ...]
    job_id: str | None = None
    restarts: int = 0
    pid: int = 0
    walltime_s: float | None = None
    """Seconds left until Slurm ends the job, where it says so."""


class AgentBeat(Message, frozen=True, tag="agent.beat"):
    incarnation: str
    number: int


class LeaveNotice(Message, frozen=True, tag="agent.leave"):
    """These GPUs will be taken: by a signal, by walltime, by an operator."""

    incarnation: str
    source: str
    """What told: `SIGTERM`, `SIGUSR1`, `walltime`, `cancel`."""
    grace_s: float
    """Seconds in which the agent still answers; 0 where none is promised."""


class LeaveCancelled(Message, frozen=True, tag="agent.stay"):
    incarnation: str
    reason: str


class WorkerStarted(Message, frozen=True, tag="agent.worker_started"):
    incarnation: str
    gpu: int
    worker: str
    """The worker's own incarnation."""
    pid: int
    start_s: float


class WorkerDied(Message, frozen=True, tag="agent.worker_died"):
    incarnation: str
    gpu: int
    worker: str
    exit_code: int | None
    """Negative: the signal, as in `subprocess`."""
    reason: str = ""


class DirectoryProbed(Message, frozen=True, tag="agent.directory_probed"):
    """The answer to `ProbeDirectory`."""

    incarnation: str
    path: str
    reason: str = ""
    """What is wrong with it, as seen from the agent's node; empty: nothing."""


class AgentBye(Message, frozen=True, tag="agent.bye"):
    incarnation: str
    reason: str


# ------------------------------------------------------------------------------- head → agent


class Welcome(Message, frozen=True, tag="head.welcome"):
    head: str
    beat_s: float
    """Send an AgentBeat this often."""
    lost_s: float
    """Silence after which either side takes the other for lost."""


class Refused(Message, frozen=True, tag="head.refused"):
    """The hello is not acceptable: protocol version, unknown GPU type; the agent ends."""

    reason: str


class StartWorkers(Message, frozen=True, tag="head.start_workers"):
    """Have one worker running on each of these GPUs; those that run already stay."""

    gpus: tuple[int, ...]


class StopWorkers(Message, frozen=True, tag="head.stop_workers"):
    """End these GPUs' workers: SIGTERM, then SIGKILL after `grace_s`."""

    gpus: tuple[int, ...]
    grace_s: float = 2.0


class ProbeDirectory(Message, frozen=True, tag="head.probe_directory"):
    """Find out whether a shared directory can be used from the agent's node."""

    path: str
    token: str
    """What the head wrote there."""


class ReleaseAgent(Message, frozen=True, tag="head.release"):
    """Stop the workers and end: the pilot is no longer wanted, or it must leave and is empty."""

    reason: str
    give_back: bool = False
    """The job shall be requeued, so that the pilot comes back when Slurm has room again."""


# ------------------------------------------------------------------------------ worker → head


class WorkerHello(Message, frozen=True, tag="worker.hello"):
    protocol: int
    worker: str
    agent: str
    """Incarnation of the agent that started it."""
    gpu: int
    pid: int
    device: str
    data_port: int = 0
    """Where its data server listens, on the node's address; 0: it has none."""


class WorkerBeat(Message, frozen=True, tag="worker.beat"):
    """Proof that the control thread runs, with the arena's figures."""

    worker: str
    arena_used_bytes: int = 0


class InstallProgress(Message, frozen=True, tag="worker.progress"):
    worker: str
    epoch: int
    phase: str
    done_bytes: int = 0
    total_bytes: int = 0


class Installed(Message, frozen=True, tag="worker.installed"):
    """The stage is built, filled and its groups are up; steps of this epoch may come."""

    worker: str
    epoch: int
    weights_bytes: int
    kv_blocks: int
    load_s: float
    groups_s: float
    moved_bytes: int = 0
    """Weights that came from other workers."""
    kept_bytes: int = 0
    """Weights that were on this GPU already."""


class InstallFailed(Message, frozen=True, tag="worker.install_failed"):
    worker: str
    epoch: int
    reason: str
    fatal: bool = False
    """The same install would fail anywhere: the model's files are at fault, not this GPU."""


class Retired(Message, frozen=True, tag="worker.retired"):
    """The epoch's groups are closed and its memory is free."""

    worker: str
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


class SampledToken(msgspec.Struct, frozen=True, array_like=True):
    seq_id: str
    token: int
    logprobs: TokenLogprobs | None = None


class StepDone(Message, frozen=True, tag="worker.step_done"):
    """From tp_rank 0 of the last stage: the tokens of one micro-batch."""

    worker: str
    epoch: int
    replica: int
    step: int
    tokens: tuple[SampledToken, ...]
    compute_s: float = 0.0
    """Time the last stage computed."""


class StepFailed(Message, frozen=True, tag="worker.step_failed"):
    """A step could not be done: a peer is gone, or memory ran out. The epoch is broken."""

    worker: str
    epoch: int
    step: int
    reason: str


class RendezvousSet(Message, frozen=True, tag="rdv.set"):
    """Publish a value under a key of an epoch's store; keys are `EPOCH/GROUP/…`."""

    epoch: int
    key: str
    value: bytes


class RendezvousGet(Message, frozen=True, tag="rdv.get"):
    """Ask for the value of a key; answered at once if set, else when it is."""

    epoch: int
    key: str
    ask: int


class RendezvousAdd(Message, frozen=True, tag="rdv.add"):
    epoch: int
    key: str
    amount: int
    ask: int


class RendezvousValue(Message, frozen=True, tag="rdv.value"):
    """The head's answer to `RendezvousGet` and `RendezvousAdd` (a decimal number)."""

    epoch: int
    key: str
    ask: int
    value: bytes


# ------------------------------------------------------------------------------ head → worker


class Peer(msgspec.Struct, frozen=True, array_like=True):
    """Who fills a slot of the replica, and where."""

    slot: Slot
    worker: str
    address: str


class WeightHolder(msgspec.Struct, frozen=True, array_like=True):
    """A worker that holds the weights of a slot now, and where it gives them out."""

    worker: str
    node: str
    address: str
    data_port: int
    epoch: int
    lo: int
    hi: int
    tp: int
    tp_rank: int


class DataSource(msgspec.Struct, frozen=True, array_like=True):
    """Where KV pages come from: a worker's data server and an epoch it holds (or has parked)."""

    worker: str
    address: str
    data_port: int
    epoch: int


class Pacing(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How a virtual GPU spends time; see `config.site.VirtualGpu`."""

    speed: float = 1.0
    """As it comes: a step takes its CPU time divided by this; 1 adds nothing."""
    acted: dict[str, float] | None = None
    """Acted: coefficients of a step's seconds for this stage, see `engine.pacing`."""


class WorkerWelcome(Message, frozen=True, tag="head.worker_welcome"):
    head: str
    beat_s: float
    lost_s: float


class Install(Message, frozen=True, tag="head.install"):
    """Build one stage of an epoch beside what is installed; answered by Installed or Failed."""

    epoch: int
    model: str
    """Checkpoint directory, as seen from the node."""
    dtype: str
    block_tokens: int
    slot: Slot
    replica: Replica
    peers: tuple[Peer, ...]
    """All slots of this replica, in slot order; the rank in the replica's group is the index."""
    arena_bytes: int
    """The GPU's whole budget; weights and KV pages must fit in it."""
    timeout_s: float
    pacing: Pacing | None = None
    holders: tuple[WeightHolder, ...] = ()
    """Who may be asked for weights before the checkpoint is read."""
    rate_bytes_per_s: float = 0.0
    """Bound on what one source sends to this worker; 0: none."""


class ChunkSampling(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """What the sampler needs for one sequence beyond its logits."""

    params: SamplingParams
    position: int
    """Index of the token to be sampled in the answer: 0 for the first."""
    suppress: tuple[int, ...] = ()
    """Tokens that may not be chosen here (end-of-sequence before `min_tokens`)."""
    prompt: tuple[int, ...] = ()
    """Given only where `params.needs_history`."""
    output: tuple[int, ...] = ()


class Chunk(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """The new tokens of one sequence in one micro-batch."""

    seq_id: str
    tokens: tuple[int, ...]
    start: int
    """Position of the first of `tokens` in the sequence."""
    blocks: tuple[int, ...]
    """The sequence's block table: block i holds positions [i*block_tokens, (i+1)*block_tokens)."""
    sample: ChunkSampling | None = None
    """None for a prefill chunk that is not the last."""


class Step(Message, frozen=True, tag="head.step"):
    """One micro-batch, sent to all workers of a replica at once; done in order of `step`."""

    epoch: int
    replica: int
    step: int
    chunks: tuple[Chunk, ...]
    freed: tuple[int, ...] = ()
    """Blocks that hold nothing any more; they may be among this step's own, for another use."""


class FreeBlocks(Message, frozen=True, tag="head.free_blocks"):
    """As `Step.freed`, between steps."""

    epoch: int
    replica: int
    blocks: tuple[int, ...]


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


class Retire(Message, frozen=True, tag="head.retire"):
    """Close the epoch's groups and free its memory; steps of it that wait are dropped."""

    epoch: int


class WorkerExit(Message, frozen=True, tag="head.worker_exit"):
    """End the process."""

    reason: str


# --------------------------------------------------------------------------- command line ↔ head


class StatusAsk(Message, frozen=True, tag="ask.status"):
    pass


class StopAsk(Message, frozen=True, tag="ask.stop"):
    """End the service: refuse new requests, let running ones end for `drain_s`, release pilots."""

    drain_s: float = 0.0


class CordonAsk(Message, frozen=True, tag="ask.cordon"):
    """Take a fragment out of planning (or back in), without ending it."""

    fragment: str
    cordon: bool = True


class NotifyAsk(Message, frozen=True, tag="ask.notify"):
    """What one of Slurm's hooks has seen; `slurm.notices` says what it means for the pilots."""

    event: str
    """A word of `slurm.notices.HookEvent`."""
    source: str
    """Which hook: `epilog`, `strigger`, …"""
    job_id: str | None = None
    nodes: tuple[str, ...] = ()
    grace_s: float | None = None
    """Seconds until the end, where the hook knows."""
    restarts: int | None = None
    """Which run of the job, as SLURM_RESTART_COUNT counts; None: the hook was not told."""
    reason: str = ""


class DrainAsk(Message, frozen=True, tag="ask.drain"):
    """Cordon a fragment, and end it once nothing of it is used."""

    fragment: str


class ShiftAsk(Message, frozen=True, tag="ask.shift"):
    """Go into a gear and stay there until members change; answered by `ShiftAnswer`."""

    to: str
    """An allocation's name, a layout, or `best`: what the policy would choose."""
    dry_run: bool = False


class ShiftAnswer(Message, frozen=True, tag="answer.shift"):
    """The plan of the shift."""

    to: str
    """The gear's layout."""
    lines: tuple[str, ...] = ()
    epoch: int = 0
    """It will be tried under; 0: it will not."""


class AskRefused(Message, frozen=True, tag="answer.refused"):
    message: str
    hint: str | None = None


class AskDone(Message, frozen=True, tag="answer.done"):
    message: str = ""


class GpuStatus(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    worker: str | None
    slot: str | None
    pid: int = 0
    """Of the worker, on its node; 0: none runs."""


class FragmentStatus(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    job_id: str | None
    node: str | None
    gpu_type: str
    state: str
    """`pending`, `joining`, `ready`, `serving`, `leaving`, `lost`, `cordoned`."""
    detail: str
    gpus: tuple[GpuStatus, ...]


class StatusAnswer(Message, frozen=True, tag="answer.status"):
    service: str
    head: str
    endpoint: str
    state: str
    """`starting`, `serving`, `shifting`, `waiting` (nothing fits), `stopping`."""
    reason: str
    """Why the present gear, in the words of the decision."""
    epoch: int
    gear: Gear | None
    fragments: tuple[FragmentStatus, ...]
    running: int
    waiting: int
    kv_used: float
    """Share of the block pool in use, 0 to 1."""
    finished: int
    tokens_total: int
    shifts: tuple[dict[str, float | str], ...] = ()
    """The last shifts: `epoch`, `why`, `from`, `to`, `started_s_ago`, `took_s`, `outcome`; of the
    weights, `weights_bytes`, of which `moved_bytes` came from other GPUs and `kept_bytes` were in
    place, `load_s` and `groups_s` of the slowest worker; of the KV, `mode`, `sequences_moved`,
    `sequences_recomputed`, `kv_bytes`, `transfer_s`, and `pause_s` with the steps awaited in it."""
    uptime_s: float = 0.0
    judgement: str = ""
    """The three figures of the shifts so far, in words."""


FromAgent = (
    AgentHello
    | AgentBeat
    | LeaveNotice
    | LeaveCancelled
    | WorkerStarted
    | WorkerDied
    | AgentBye
    | DirectoryProbed
)
FromWorker = (
    WorkerHello
    | WorkerBeat
    | InstallProgress
    | Installed
    | InstallFailed
    | Retired
    | KvPulled
    | KvParked
    | StepDone
    | StepFailed
    | RendezvousSet
    | RendezvousGet
    | RendezvousAdd
)
FromCli = StatusAsk | StopAsk | CordonAsk | DrainAsk | ShiftAsk | NotifyAsk
ToAgent = Welcome | Refused | StartWorkers | StopWorkers | ProbeDirectory | ReleaseAgent
ToWorker = (
    WorkerWelcome
    | Refused
    | Install
    | Step
    | FreeBlocks
    | PullKv
    | ParkKv
    | UnparkKv
    | Retire
    | WorkerExit
    | RendezvousValue
)
ToCli = AskRefused | AskDone | StatusAnswer | ShiftAnswer
ToHead = FromAgent | FromWorker | FromCli
FromHead = ToAgent | ToWorker | ToCli
