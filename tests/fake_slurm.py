"""Slurm's commands as scripts that answer from text: a cluster for site files, without daemons."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class FakeSlurm:
    """`nodes` and `partitions` by name, as `scontrol show … -o` would tell what differs."""

    nodes: Mapping[str, str]
    partitions: Mapping[str, str]
    config: Mapping[str, str] = field(default_factory=dict)
    qos: str = ""
    triggers: str = ""
    suffix: str = ""
    version: str = "slurm 23.11.4"

    def install(self, where: Path) -> Path:
        """Write the scripts; returns the directory to stand first on PATH."""
        where.mkdir(parents=True, exist_ok=True)
        for name, text in self._answers().items():
            (where / f"{name}.txt").write_text(text)

        def own(name: str) -> str:
            return f"{name}{self.suffix}"

        self._script(where, own("scontrol"), {"show node": "nodes", "show partition": "partitions",
                                         "show config": "config", "--version": "version",
                                         "ping": "ping"})  # fmt: skip
        for name in {"sacctmgr", f"sacctmgr{self.suffix}"}:  # never the machine's own
            self._script(where, name, {"show qos": "qos"})
        self._script(where, own("squeue"), {"": "jobs"})
        self._script(where, own("strigger"), {"--get": "triggers"})
        self._script(where, own("sbatch"), {})
        self._script(where, own("scancel"), {})
        self._script(where, own("srun"), {})
        return where

    def _answers(self) -> dict[str, str]:
        nodes = [
            f"NodeName={name} Arch=x86_64 {told} NodeAddr={name} NodeHostName={name}"
            for name, told in self.nodes.items()
        ]
        partitions = [f"PartitionName={name} {told}" for name, told in self.partitions.items()]
        config = {"ClusterName": "fake", "KillWait": "30 sec", "PreemptMode": "REQUEUE",
                  "PreemptType": "preempt/partition_prio", "PreemptExemptTime": "00:00:00",
                  **self.config}  # fmt: skip
        return {
            "nodes": "\n".join(nodes) + "\n",
            "partitions": "\n".join(partitions) + "\n",
            "config": "".join(f"{key:24}= {value}\n" for key, value in config.items()),
            "qos": self.qos,
            "triggers": self.triggers,
            "version": self.version + "\n",
            "ping": "Slurmctld(primary) at ctl is UP\n",
            "jobs": "",
        }

    def _script(self, where: Path, name: str, answers: Mapping[str, str]) -> None:
        cases = [
            f"  *{shlex.quote(words)}*) exec cat {shlex.quote(str(where / f'{answer}.txt'))} ;;"
            for words, answer in answers.items()
        ]
        path = where / name
        path.write_text(
            "\n".join(
                [
                    "#!/bin/sh",
                    f'echo "{name} $*" >> {shlex.quote(str(where / "calls"))}',
                    'case " $* " in',
                    *cases,
                    "esac",
                    f'echo "{name}: fake: no answer to $*" >&2',
                    "exit 1",
                    "",
                ]
            )
        )
        path.chmod(0o755)

    def calls(self, where: Path) -> Sequence[str]:
        file = where / "calls"
        return file.read_text().splitlines() if file.exists() else []


def node(gres: str, *, state: str = "IDLE", cpus: int = 64, memory_mib: int = 512_000) -> str:
    return f"CPUTot={cpus} Gres={gres or '(null)'} RealMemory={memory_mib} State={state}"


def partition(
    nodes: str, *, tier: int = 1, grace: int = 0, mode: str = "OFF", longest: str = "UNLIMITED",
    default: str = "NONE",
) -> str:  # fmt: skip
    return (
        f"AllowGroups=ALL Default=NO DefaultTime={default} GraceTime={grace} MaxTime={longest} "
        f"Nodes={nodes} PriorityTier={tier} PreemptMode={mode} State=UP"
    )
