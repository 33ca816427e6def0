"""What processes say to each other, one module per link; never behaviour, only values.

Every link is one ZeroMQ DEALER (agent, worker, command line) to the head's ROUTER, encrypted and
authenticated by CURVE. A message is a msgpack map with its type in the field `t`; unknown types and
missing fields are refused by the decoder. Durations are seconds; times never cross a link, since
clocks differ.
"""

from __future__ import annotations

from flexslurm.messages.agents import (
    AgentBeat,
    AgentBye,
    AgentHello,
    DirectoryProbed,
    GpuInfo,
    GpuReading,
    LeaveNotice,
    NodeReadings,
    PortReading,
    ProbeDirectory,
    Refused,
    ReleaseAgent,
    StartWorkers,
    StopWorkers,
    Welcome,
    WorkerDied,
    WorkerStarted,
)
from flexslurm.messages.base import (
    PROTOCOL,
    Message,
)
from flexslurm.messages.kv import (
    DataSource,
    KvParked,
    KvPulled,
    ParkKv,
    PullKv,
    UnparkKv,
)
from flexslurm.messages.operators import (
    AskDone,
    AskRefused,
    CordonAsk,
    DrainAsk,
    FragmentStatus,
    GpuStatus,
    NotifyAsk,
    ReleaseAsk,
    ServiceState,
    ShiftAnswer,
    ShiftAsk,
    StatusAnswer,
    StatusAsk,
    StopAsk,
)
from flexslurm.messages.rendezvous import (
    RendezvousAdd,
    RendezvousGet,
    RendezvousSet,
    RendezvousValue,
)
from flexslurm.messages.requests import (
    FinishReason,
    SamplingParams,
    SequenceRequest,
    StopRules,
    TokenEvent,
    TokenLogprobs,
)
from flexslurm.messages.steps import (
    Chunk,
    ChunkSampling,
    FreeBlocks,
    SampledToken,
    Step,
    StepDone,
    StepFailed,
)
from flexslurm.messages.workers import (
    Assemble,
    Assembled,
    Install,
    Installed,
    InstallFailed,
    InstallProgress,
    Pacing,
    Peer,
    Retire,
    Retired,
    WeightHolder,
    WorkerBeat,
    WorkerExit,
    WorkerHello,
    WorkerWelcome,
)

FromAgent = (
    AgentHello
    | AgentBeat
    | LeaveNotice
    | WorkerStarted
    | WorkerDied
    | AgentBye
    | DirectoryProbed
    | NodeReadings
)
FromWorker = (
    WorkerHello
    | WorkerBeat
    | InstallProgress
    | Assembled
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
FromCli = StatusAsk | StopAsk | CordonAsk | DrainAsk | ReleaseAsk | ShiftAsk | NotifyAsk
ToAgent = Welcome | Refused | StartWorkers | StopWorkers | ProbeDirectory | ReleaseAgent
ToWorker = (
    WorkerWelcome
    | Refused
    | Assemble
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

__all__ = [
    "PROTOCOL",
    "AgentBeat",
    "AgentBye",
    "AgentHello",
    "AskDone",
    "AskRefused",
    "Assemble",
    "Assembled",
    "Chunk",
    "ChunkSampling",
    "CordonAsk",
    "DataSource",
    "DirectoryProbed",
    "DrainAsk",
    "FinishReason",
    "FragmentStatus",
    "FreeBlocks",
    "FromAgent",
    "FromCli",
    "FromHead",
    "FromWorker",
    "GpuInfo",
    "GpuReading",
    "GpuStatus",
    "Install",
    "InstallFailed",
    "InstallProgress",
    "Installed",
    "KvParked",
    "KvPulled",
    "LeaveNotice",
    "Message",
    "NodeReadings",
    "NotifyAsk",
    "Pacing",
    "ParkKv",
    "Peer",
    "PortReading",
    "ProbeDirectory",
    "PullKv",
    "Refused",
    "ReleaseAgent",
    "ReleaseAsk",
    "RendezvousAdd",
    "RendezvousGet",
    "RendezvousSet",
    "RendezvousValue",
    "Retire",
    "Retired",
    "SampledToken",
    "SamplingParams",
    "SequenceRequest",
    "ServiceState",
    "ShiftAnswer",
    "ShiftAsk",
    "StartWorkers",
    "StatusAnswer",
    "StatusAsk",
    "Step",
    "StepDone",
    "StepFailed",
    "StopAsk",
    "StopRules",
    "StopWorkers",
    "ToAgent",
    "ToCli",
    "ToHead",
    "ToWorker",
    "TokenEvent",
    "TokenLogprobs",
    "UnparkKv",
    "WeightHolder",
    "Welcome",
    "WorkerBeat",
    "WorkerDied",
    "WorkerExit",
    "WorkerHello",
    "WorkerStarted",
    "WorkerWelcome",
]
