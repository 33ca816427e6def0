"""Our hooks in a real Slurm: what they add, what they refuse, and that they delay no job."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from submitter_suite import wait

from flexslurm.cli.main import run
from flexslurm.config.schema import load_section, parse_section
from flexslurm.config.site import Site
from flexslurm.messages import AskDone, Message, NotifyAsk
from flexslurm.slurm.client import SlurmClient
from flexslurm.slurm.hook_files import HOOKS, hook_text, trigger_arguments
from flexslurm.slurm.sandbox import Sandbox
from flexslurm.slurm.sandbox_config import SandboxConfig
from flexslurm.wire.service_dir import HeadAddress, ServiceDir
from flexslurm.wire.transport import HeadSocket
from tests.sandbox.hook_ground import (
    LIMITS,
    SANDBOX,
    best_s,
    delay_s,
    refusal,
    run_s,
    script,
    tellers,
    told,
)

HEADERS = Path("/usr/include/slurm/spank.h")


@pytest.fixture(scope="module")
def hooks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All hooks as installed; in place of flexslurm, a program that notes what it is told.

    It hangs where there is a file `hang`, and goes on as flexslurm where there is one `real`; a
    file `patient` gives that one as long as a slow machine takes, beyond the five seconds after
    which the hooks end it.
    """
    where = tmp_path_factory.mktemp("hooks")
    teller = where / "teller"
    program = "from flexslurm.cli.main import main; main()"
    teller.write_text(
        f'#!/bin/sh\necho "$@" >>{where}/told\n[ ! -e {where}/hang ] || sleep 60\n'
        f'beyond=\n[ ! -e {where}/patient ] || {{ set -- "$@" --within 60; beyond="setsid -f"; }}\n'
        f'[ ! -e {where}/real ] || exec $beyond {sys.executable} -c "{program}" "$@"\n'
    )
    teller.chmod(0o755)
    site = parse_section(Site, LIMITS, "limits.yaml")
    for hook in HOOKS.values():
        for packaged, installed in hook.all_files:
            path = where / installed
            path.write_text(hook_text(packaged, site, [str(teller)], str(where)))
            path.chmod(0o755 if hook.executable else 0o644)
    return where


@pytest.fixture(scope="module")
def plugin(hooks: Path) -> Path | None:
    """The SPANK plugin, built as its page says; None where it cannot be built here."""
    if not HEADERS.is_file() or shutil.which("make") is None or shutil.which("cc") is None:
        return None
    subprocess.run(["make", "-C", str(hooks)], check=True, capture_output=True)
    return hooks / "flexslurm.so"


@pytest.fixture(scope="module")
def box(
    hooks: Path, plugin: Path | None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Sandbox]:
    spank = "" if plugin is None else f"optional {plugin} services={hooks}/services"
    text = SANDBOX.format(hooks=hooks, plugstack=spank)
    box = Sandbox(tmp_path_factory.mktemp("box"), parse_section(SandboxConfig, text, "s.yaml"))
    box.up()
    yield box
    box.down()


@pytest.fixture
def client(box: Sandbox) -> Iterator[SlurmClient]:
    client = SlurmClient(load_section(Site, box.site_file).slurm)
    yield client
    client.call("scancel", f"--user={os.geteuid()}")
    wait(lambda: not client.call("squeue", "-h").out.strip(), 20, "all jobs are gone")


@pytest.fixture
def needs_spank(plugin: Path | None) -> None:
    if plugin is None:
        pytest.skip("building the SPANK plugin needs Debian's packages libslurm-dev gcc make")


def test_status_says_what_this_cluster_has(
    box: Sandbox, client: SlurmClient, hooks: Path, plugin: Path | None,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setenv("SLURM_CONF", str(box.conf))
    assert run(["hooks", "status", "--json"]) == 0
    states = {name: state for name, (state, _) in json.loads(capsys.readouterr().out).items()}
    wanted = dict.fromkeys(HOOKS, "installed") | {"strigger": "not installed"}
    assert states == wanted | ({} if plugin else {"spank": "not installed"})
    assert run(["hooks", "uninstall", "prolog", "--to", str(hooks)]) == 8
    assert (hooks / "prolog.sh").exists() and "out of Prolog" in capsys.readouterr().err
    # triggers are set, seen and cleared again
    for arguments in trigger_arguments(hooks):
        client.call("strigger", *arguments)
    assert run(["hooks", "status", "strigger"]) == 0
    assert f"installed      {hooks}/node-" in capsys.readouterr().out
    texts = {path: path.read_text() for path in hooks.glob("node-*.sh")}
    assert run(["hooks", "uninstall", "strigger", "--to", str(hooks), "--register"]) == 0
    assert capsys.readouterr().out.count("cleared: trigger") == 3
    assert not client.call("strigger", "--get", "--noheader").out.strip()
    for path, text in texts.items():
        path.write_text(text)
        path.chmod(0o755)


def test_a_job_of_ours_gets_what_it_needs(client: SlurmClient, tmp_path: Path) -> None:
    options = ("--output=/dev/null", "--job-name=flexslurm-x")
    job = client.submit(script(tmp_path), *options, "--partition=low")
    record = client.job_record(job.base)
    assert record["Requeue"] == "1" and record["Comment"] == "flexslurm"
    once = client.submit(script(tmp_path), *options, "--partition=once")
    assert client.job_record(once.base)["Requeue"] == "0"
    # the signal and the open mode are not in scontrol's words, but in sbatch's
    shown = client._try(
        "sbatch", "--test-only", "-vv", "--partition=low", *options, str(script(tmp_path))
    )
    words = " ".join(shown.err.lower().split())
    assert "open-mode" in words and "signal" in words, shown.err


def test_what_a_user_chose_stays(client: SlurmClient, tmp_path: Path) -> None:
    job = client.submit(
        script(tmp_path), "--output=/dev/null", "--job-name=flexslurm-x", "--no-requeue",
        "--comment=mine",
    )  # fmt: skip
    record = client.job_record(job.base)
    assert (record["Requeue"], record["Comment"]) == ("0", "mine")


def test_other_jobs_are_left_alone(client: SlurmClient, tmp_path: Path) -> None:
    job = client.submit(
        script(tmp_path), "--output=/dev/null", "--partition=low", "--time=600", "--gres=gpu:4"
    )
    record = client.job_record(job.base)
    assert record["Requeue"] == "0" and "Comment" not in record


def test_the_site_file_s_limits(client: SlurmClient, tmp_path: Path) -> None:
    path = script(tmp_path)
    ours = ("--job-name=flexslurm-x", "--partition=low")
    assert "at most 2 GPUs" in refusal(client, path, *ours, "--gres=gpu:a100:4")
    assert "has no GPU type 'h100'" in refusal(client, path, *ours, "--gres=gpu:h100:1")
    assert "allows 120 minutes" in refusal(client, path, *ours, "--time=3:00:00")
    assert "--gres=gpu:rtx4090:1" in refusal(client, path, *ours, "--gres=gpu/rtx4090:1")
    client.submit(path, *ours, "--gres=gpu:a100:2", "--time=2:00:00", "--output=/dev/null")


def test_the_controller_refuses_alone(client: SlurmClient, box: Sandbox, tmp_path: Path) -> None:
    """Known by the script's line; the client's filter, which knows no scripts, lets it through."""
    path = script(tmp_path, f"\nexport FLEXSLURM_SERVICE_DIR={tmp_path}/svc\nsleep 30\n")
    assert "allows 120 minutes" in refusal(client, path, "--partition=low", "--time=3:00:00")
    job = client.submit(path, "--partition=low", "--output=/dev/null")
    assert client.job_record(job.base)["Comment"] == f"flexslurm:{tmp_path}/svc"


def test_prolog_and_epilog_tell_and_delay_nobody(
    client: SlurmClient, hooks: Path, tmp_path: Path
) -> None:
    """With a service that hangs: the job runs and ends as fast as without."""
    (hooks / "hang").touch()
    try:
        before = len(told(hooks))
        ours = f"--comment=flexslurm:{tmp_path}"
        assert best_s(lambda: delay_s(run_s(client), run_s(client, ours))) < 1.0
        wait(lambda: len(told(hooks)) >= before + 4, 10, "all four scripts have told")
        words = {line.split()[1] for line in told(hooks)[before:]}
        assert words == {"job-start", "job-end"}
        nodes = client.nodes()
        assert [node.state.base for node in nodes] == ["IDLE"]
    finally:
        (hooks / "hang").unlink()
        wait(lambda: not tellers(hooks), 15, "the tellers have ended")


def test_a_head_hears_of_its_job(client: SlurmClient, hooks: Path, tmp_path: Path) -> None:
    """From the hooks through `flexslurm notify` to the service's own port, proved by its keys."""
    service = ServiceDir(tmp_path / "svc")
    service.create()
    heard: list[Message] = []

    def receive(sender: str, message: Message) -> None:
        heard.append(message)
        head.send(sender, AskDone())

    async def listen() -> None:
        nonlocal head
        head = HeadSocket(service.keys(), receive, host="127.0.0.1")
        try:
            service.publish_head(
                HeadAddress("h", f"tcp://127.0.0.1:{head.port}", "http://127.0.0.1:1", "n", 1)
            )
            await asyncio.to_thread(run_s, client, f"--comment=flexslurm:{service.path}")
            async with asyncio.timeout(100):
                while len(heard) < 4:
                    await asyncio.sleep(0.05)
        finally:
            head.close()

    head: HeadSocket
    (hooks / "patient").touch()
    (hooks / "real").touch()
    try:
        asyncio.run(listen())
        (hooks / "patient").unlink()
        told = {(m.event, m.source) for m in heard if isinstance(m, NotifyAsk)}
        assert told == {
            ("job-start", "prolog"), ("job-start", "prolog-slurmctld"),
            ("job-end", "epilog"), ("job-end", "epilog-slurmctld"),
        }  # fmt: skip
        assert len({m.job_id for m in heard if isinstance(m, NotifyAsk)}) == 1
        # and when nobody listens any more, nobody waits
        ours = f"--comment=flexslurm:{service.path}"
        assert best_s(lambda: delay_s(run_s(client), run_s(client, ours))) < 1.0
    finally:
        (hooks / "patient").unlink(missing_ok=True)
        (hooks / "real").unlink()
        wait(lambda: not tellers(hooks), 15, "the tellers have ended")


def _life_s(client: SlurmClient, where: Path, *options: str) -> tuple[float, float]:
    """Seconds that sbatch took, and until the job had ended and its node was idle again."""
    began = time.monotonic()
    job = client.submit(script(where, "true\n"), "--output=/dev/null", *options)
    submitted = time.monotonic()
    while True:
        info = client.jobs([job.base])[job.base]
        states = [node.state for node in client.nodes(info.nodes)] if info.nodes else []
        if info.state.over and [state.base for state in states] == ["IDLE"]:
            return submitted - began, time.monotonic() - began
        assert time.monotonic() < submitted + 60, (info, states)
        time.sleep(0.05)


@pytest.mark.usefixtures("needs_spank")
def test_all_hooks_together_delay_no_job_of_a_dead_service(
    client: SlurmClient,
    hooks: Path,
    slurm_sandbox: Sandbox,
    tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> None:
    """Beside a Slurm without any hook: submission, step, and the whole life of a job."""
    service = ServiceDir(tmp_path / "svc")
    service.create()
    service.keys()
    dead = HeadAddress("h", "tcp://127.0.0.1:9", "http://127.0.0.1:9", "n", 1)
    service.publish_head(dead)
    plain = SlurmClient(load_section(Site, slurm_sandbox.site_file).slurm)
    name = f"--flexslurm-service={service.path}"
    rows: list[tuple[float, ...]] = []

    def most_delay_s() -> float:
        rows.clear()
        for who, options in ((plain, ()), (client, (name, "--job-name=flexslurm-x"))):
            began = time.monotonic()
            who.call("srun", *options, "true")
            step_s = time.monotonic() - began
            rows.append((*_life_s(who, tmp_path, *options), step_s))
        return max(delay_s(*one) for one in zip(*rows, strict=True))

    (hooks / "real").touch()
    try:
        most_s = best_s(most_delay_s)
    finally:
        (hooks / "real").unlink()
        wait(lambda: not tellers(hooks), 15, "the tellers have ended")
    for what, without_s, with_s in zip(("sbatch", "life of a job", "srun"), *rows, strict=True):
        told = f"hooks, service dead: {what:<14} {without_s:5.2f} s without, {with_s:5.2f} s with"
        record_property("slurm-act", told)
    assert most_s < 1.0, rows


@pytest.mark.parametrize("name", ["prolog", "epilog", "prolog_slurmctld", "epilog_slurmctld"])
def test_a_script_returns_at_once(hooks: Path, tmp_path: Path, name: str) -> None:
    (hooks / "hang").touch()
    try:
        env = {"SLURM_JOB_ID": "7", "SLURM_JOB_COMMENT": f"flexslurm:{tmp_path}"}

        def once_s() -> float:
            began = time.monotonic()
            subprocess.run([str(hooks / f"{name}.sh")], env=env, check=True, timeout=200)
            return time.monotonic() - began

        assert best_s(once_s) < 1.0
    finally:
        (hooks / "hang").unlink()
        wait(lambda: not tellers(hooks), 15, "the tellers have ended")


def test_a_trigger_tells_of_a_node(client: SlurmClient, hooks: Path, tmp_path: Path) -> None:
    """Slurm looks for triggers every 15 s."""
    for arguments in trigger_arguments(hooks):
        client.call("strigger", *arguments)
    job = client.submit(
        script(tmp_path), "--output=/dev/null", f"--comment=flexslurm:{tmp_path}/svc"
    )
    before = len(told(hooks))
    client.call("scontrol", "update", "nodename=g1", "state=down", "reason=test")
    try:
        wait(
            lambda: any(line.startswith("notify node-down") for line in told(hooks)[before:]),
            40, "the trigger has told",
        )  # fmt: skip
        line = next(line for line in told(hooks)[before:] if "node-down" in line)
        assert f"--nodes g1 --service-dir {tmp_path}/svc --uid {os.geteuid()}" in line
    finally:
        client._try("scontrol", "update", "nodename=g1", "state=resume")  # it may be back already
        client.cancel([job.base])
        client.call("strigger", "--clear", f"--user={os.geteuid()}")


@pytest.mark.usefixtures("needs_spank")
def test_the_steps_know_their_service(client: SlurmClient, hooks: Path) -> None:
    service = ServiceDir(hooks / "services" / "chat")
    service.create()
    service.site.write_text("name: x\n")
    service.publish_head(HeadAddress("h", "tcp://10.0.0.7:4001", "http://10.0.0.7:80", "n", 1))
    wanted = {
        "FLEXSLURM_SERVICE_DIR": str(service.path),
        "FLEXSLURM_SITE": str(service.site),
        "FLEXSLURM_CONTROL": "tcp://10.0.0.7:4001",
        "FLEXSLURM_API": "http://10.0.0.7:80",
    }
    for given in ("chat", str(service.path)):
        out = client.call("srun", f"--flexslurm-service={given}", "env").out
        lines = dict(line.split("=", 1) for line in out.splitlines() if "=" in line)
        told = {k: v for k, v in lines.items() if k in wanted}
        assert told == wanted


@pytest.mark.usefixtures("needs_spank")
def test_a_service_that_is_not_there_hurts_nobody(client: SlurmClient, hooks: Path) -> None:
    out = client.call("srun", "--flexslurm-service=nobody", "env").out
    assert f"FLEXSLURM_SERVICE_DIR={hooks}/services/nobody" in out
    assert "FLEXSLURM_CONTROL" not in out
    pipe = ServiceDir(hooks / "services" / "pipe")
    pipe.create()
    os.mkfifo(pipe.path / "head.json")
    assert "FLEXSLURM_CONTROL" not in client.call("srun", "--flexslurm-service=pipe", "env").out
    assert "takes a service's name" in refusal(
        client, script(hooks), "--flexslurm-service=two words"
    )


@pytest.mark.usefixtures("needs_spank")
def test_the_prolog_finds_the_service_of_the_option(
    client: SlurmClient, hooks: Path, tmp_path: Path
) -> None:
    before = len(told(hooks))
    client.call("srun", f"--flexslurm-service={tmp_path}/svc", "true")
    wait(lambda: len(told(hooks)) >= before + 4, 10, "all four scripts have told")
    assert {line.split()[line.split().index("--source") + 1] for line in told(hooks)[before:]} == {
        "prolog", "epilog", "prolog-slurmctld", "epilog-slurmctld"
    }  # fmt: skip
    assert all(f"--service-dir {tmp_path}/svc" in line for line in told(hooks)[before:])
