"""`python -m flexslurm.head.agent_process`: the process a pilot's step runs on each node.

It joins the agent of `control` to the fork server of `engine`; it never imports torch itself.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import secrets
import sys
from collections.abc import Callable
from pathlib import Path

from flexslurm.config.site import Site
from flexslurm.control.agent import Agent, NurseryFactory
from flexslurm.control.agent_options import AgentOptions, read_site, slurm_identity
from flexslurm.control.agent_workers import WorkerEnd, WorkerNursery
from flexslurm.engine.nursery import Ended, Nursery, WorkerSpec
from flexslurm.errors import FlexslurmError
from flexslurm.head.logs import set_up_logging
from flexslurm.messages import GpuInfo
from flexslurm.wire.service_dir import HeadAddress, ServiceDir


def worker_environment(site: Site, *, virtual: bool) -> dict[str, str]:
    """The site's variables; those for NCCL go to workers on cards alone."""
    return dict(site.env) | ({} if virtual else dict(site.network.nccl_env))


class EngineNursery:
    """Implements `control.agent_workers.WorkerNursery` with the engine's fork server."""

    def __init__(
        self,
        *,
        site: Site,
        directory: ServiceDir,
        options: AgentOptions,
        address: str,
        gpus: tuple[GpuInfo, ...],
        on_end: Callable[[WorkerEnd], None],
    ) -> None:
        virtual = site.gpu_types[options.gpu_type].virtual is not None
        self._device = "cpu" if virtual else "cuda"
        self._directory, self._options = directory, options
        self._address, self._gpus = address, gpus
        self._env = worker_environment(site, virtual=virtual)
        job = options.job_id or "no-job"
        logs = directory.logs / options.fragment / f"{job}.{options.node}"
        self._on_end = on_end
        self._nursery = Nursery(
            device=self._device, log_dir=logs, on_exit=self._ended, env=self._env, threads=0
        )

    async def start(self, timeout_s: float) -> float:
        return await self._nursery.start(timeout_s=timeout_s)

    async def spawn(self, gpu: int, head: HeadAddress, agent: str) -> tuple[str, int, float]:
        card = next(info for info in self._gpus if info.index == gpu)
        env = {} if self._device == "cpu" else {"CUDA_VISIBLE_DEVICES": card.uuid or str(gpu)}
        started = await self._nursery.spawn(
            WorkerSpec(
                gpu=gpu,
                endpoint=head.control,
                keys=str(self._directory.path / "keys.json"),
                agent=agent,
                address=self._address,
                device=self._device,
                env=env,
            ),
            timeout_s=30.0,
        )
        return started.worker, started.pid, started.start_s

    def stop(self, worker: str, grace_s: float) -> None:
        self._nursery.stop(worker, grace_s=grace_s)

    async def close(self) -> None:
        await self._nursery.close(grace_s=2.0)

    def _ended(self, ended: Ended) -> None:
        self._on_end(
            WorkerEnd(
                worker=ended.worker,
                gpu=ended.gpu,
                exit_code=ended.exit_code,
                reason=ended.reason or "",
            )
        )


def _arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="flexslurm agent", description=__doc__)
    parser.add_argument("--service-dir", type=Path, required=True)
    parser.add_argument("--fragment", required=True)
    parser.add_argument("--gpu-type", required=True)
    parser.add_argument("--gpus", type=int, required=True)
    parser.add_argument("--grace", type=float, default=0.0)
    parser.add_argument("--kill-wait", type=float, default=30.0)
    parser.add_argument("--head-wait", type=float, default=3600.0)
    return parser.parse_args(argv)


def agent_command(
    directory: Path, fragment: str, gpu_type: str, gpus: int, grace_s: float, kill_wait_s: float
) -> tuple[str, ...]:
    """The command line that starts an agent."""
    return (
        sys.executable, "-P", "-m", "flexslurm.head.agent_process",
        "--service-dir", str(directory), "--fragment", fragment, "--gpu-type", gpu_type,
        "--gpus", str(gpus), "--grace", f"{grace_s:g}", "--kill-wait", f"{kill_wait_s:g}",
    )  # fmt: skip


async def _run(arguments: argparse.Namespace) -> int:
    directory = ServiceDir(arguments.service_dir)
    site = read_site(directory)
    node, job_id, restarts = slurm_identity(os.environ)
    options = AgentOptions(
        fragment=arguments.fragment,
        gpu_type=arguments.gpu_type,
        gpus=arguments.gpus,
        grace_s=arguments.grace,
        kill_wait_s=arguments.kill_wait,
        incarnation=f"a-{arguments.fragment}-{secrets.token_hex(4)}",
        node=node,
        job_id=job_id,
        restarts=restarts,
        head_wait_s=arguments.head_wait,
    )

    def make(
        address: str, gpus: tuple[GpuInfo, ...], on_end: Callable[[WorkerEnd], None]
    ) -> WorkerNursery:
        return EngineNursery(
            site=site, directory=directory, options=options, address=address, gpus=gpus,
            on_end=on_end,
        )  # fmt: skip

    factory: NurseryFactory = make
    return await Agent(options, site, directory, factory).run()


def main(argv: list[str] | None = None) -> int:
    """Run an agent until the head releases it, a job's end kills it, or no head comes."""
    set_up_logging("agent")
    try:
        return asyncio.run(_run(_arguments(sys.argv[1:] if argv is None else argv)))
    except FlexslurmError as error:
        logging.getLogger(__name__).error("%s", error)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
