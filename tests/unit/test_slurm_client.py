"""The client against stand-ins for Slurm's commands: what is run, and how answers are read."""

from __future__ import annotations

import json
import os
import random
import stat
import sys
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import pytest

from flexslurm.config.site import SlurmSettings
from flexslurm.errors import EnvironmentFault, SlurmError, SlurmUnavailable
from flexslurm.slurm.client import SlurmClient
from flexslurm.slurm.command import backoff_s, clean_env, run
from flexslurm.slurm.jobs import FIELDS, SEPARATOR
from flexslurm.slurm.states import JobState

MakeClient = Callable[..., SlurmClient]


@pytest.fixture
def commands(tmp_path: Path) -> Path:
    (tmp_path / "bin").mkdir()
    return tmp_path / "bin"


@pytest.fixture
def client(commands: Path) -> MakeClient:
    def make(**settings: object) -> SlurmClient:
        environ = {"PATH": str(commands), "SLURM_CONF": "/c", "SLURM_JOB_ID": "1"}
        return SlurmClient(SlurmSettings.model_validate(settings), environ=environ)

    return make


def stand_in(where: Path, name: str, body: str) -> None:
    """A command that notes its arguments and environment, then does `body` (Python)."""
    path = where / name
    path.write_text(
        f"#!{sys.executable} -IS\nimport json, os, sys\n"
        f"open({str(where / (name + '.args'))!r}, 'a').write(json.dumps(sys.argv[1:]) + '\\n')\n"
        f"open({str(where / (name + '.env'))!r}, 'w').write('\\n'.join(sorted(os.environ)))\n"
        f"{body}\n"
    )
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def calls(where: Path, name: str) -> list[list[str]]:
    text = (where / f"{name}.args").read_text()
    return [json.loads(line) for line in text.splitlines()]


def squeue_rows(*rows: dict[str, str]) -> str:
    lines = [SEPARATOR.join(r.get(n, "N/A").ljust(20) for n, _ in FIELDS) + SEPARATOR for r in rows]
    return "\n".join(lines) + "\n"


def test_jobs_are_asked_for_in_one_call(commands: Path, client: MakeClient) -> None:
    rows = squeue_rows(
        {"jobid": "7", "state": "RUNNING", "nodelist": "n[1-2]"},
        {"jobid": "9", "state": "PENDING", "reason": "Priority"},
    )
    stand_in(commands, "squeue", f"sys.stderr.write('warning: x\\n'); print({rows!r}, end='')")
    found = client().jobs(["7", "8"])
    assert found["7"].nodes == ("n1", "n2") and found["8"].state is JobState.UNKNOWN
    assert list(found) == ["7", "8"]
    (args,) = calls(commands, "squeue")
    assert f"--user={os.geteuid()}" in args and "--states=all" in args


def test_no_jobs_no_call(client: MakeClient) -> None:
    assert client().jobs([]) == {}
    client().cancel([])


def test_a_cut_value_is_asked_for_again(commands: Path, client: MakeClient) -> None:
    wide = "n" * dict(FIELDS)["nodelist"]
    rows = squeue_rows({"jobid": "7", "state": "RUNNING", "nodelist": wide})
    stand_in(commands, "squeue", f"print({rows!r}, end='')")
    stand_in(commands, "scontrol", "print('JobId=7 JobName=x NodeList=n[1-3] Power=')")
    assert client().jobs(["7"])["7"].nodes == ("n1", "n2", "n3")


@pytest.mark.parametrize(
    "text",
    [
        "squeue: error: slurm_load_jobs error: Socket timed out on send/recv operation",
        "slurm_load_jobs error: Unable to contact slurm controller (connect failure)",
        "squeue: error: Slurm controller not responding, sleeping and retrying.",
    ],
)
def test_no_answer_is_no_answer(text: str, commands: Path, client: MakeClient) -> None:
    stand_in(commands, "squeue", f"sys.exit({text!r})")
    with pytest.raises(SlurmUnavailable) as caught:
        client().jobs(["7"])
    assert caught.value.transient


def test_a_refusal_is_an_error_with_slurms_words(commands: Path, client: MakeClient) -> None:
    stand_in(commands, "sbatch", "sys.exit('sbatch: error: invalid partition specified: x')")
    with pytest.raises(SlurmError, match="invalid partition") as caught:
        client().submit(Path("/x.sh"))
    assert not isinstance(caught.value, SlurmUnavailable)


def test_a_command_that_hangs_is_no_answer(commands: Path, client: MakeClient) -> None:
    stand_in(commands, "scontrol", "import time; time.sleep(60)")
    with pytest.raises(SlurmUnavailable, match=r"within 0\.5 s"):
        client(command_timeout=0.5).config()


def test_a_command_that_is_not_there(client: MakeClient) -> None:
    with pytest.raises(EnvironmentFault, match="'squeue' is not on this machine"):
        client().jobs(["7"])
    assert not client().available()


def test_names_cluster_and_environment(commands: Path, client: MakeClient) -> None:
    stand_in(commands, "sbatch.tiny", "print('banner of job 3'); print('42;tiny')")
    tiny = client(commands={"sbatch": "sbatch.tiny"}, cluster="tiny", conf="/other")
    assert tiny.submit(Path("/a b.sh"), "--comment=hetjob x").base == "42"
    wanted = ["--clusters=tiny", "--parsable", "--comment=hetjob x", "/a b.sh"]
    assert calls(commands, "sbatch.tiny") == [wanted]
    environ = (commands / "sbatch.tiny.env").read_text().split()
    assert "TZ" not in environ
    assert "SLURM_CONF" in environ and "SLURM_JOB_ID" not in environ
    assert tiny.env["SLURM_CONF"] == "/other" and tiny.available()


def test_cancelling_what_has_ended_is_no_error(commands: Path, client: MakeClient) -> None:
    gone = "scancel: error: Kill job error on job id 7: Invalid job id specified"
    stand_in(commands, "scancel", f"sys.exit({gone!r})")
    client().cancel(["7"])
    stand_in(commands, "scancel", f"sys.exit({gone!r} + '\\nscancel: error: access denied')")
    with pytest.raises(SlurmError, match="access denied"):
        client().cancel(["7", "8"])


def test_ids_from_outside_are_checked(client: MakeClient) -> None:
    for call in (client().cancel, lambda ids: client().requeue(ids[0])):
        with pytest.raises(SlurmError, match="not a Slurm job id"):
            call(["--all"])


def test_nodes_partitions_version(commands: Path, client: MakeClient) -> None:
    stand_in(
        commands,
        "scontrol",
        "what = sys.argv[2] if len(sys.argv) > 2 else sys.argv[1]\n"
        "print({'node': 'NodeName=n1 CPUTot=4 Gres=gpu:a:2 RealMemory=10 State=IDLE+DRAIN "
        "Partitions=low,high Reason=it is = odd [x]\\nNodeName=n2 Gres=??? State=idle~',"
        "'partition': 'PartitionName=low Default=YES DefaultTime=NONE GraceTime=20 MaxTime=1:00:00 "
        "Nodes=n[1-2] PreemptMode=REQUEUE PriorityTier=3 State=UP',"
        "'--version': 'slurm-wlm 22.05.8', 'config': 'KillWait = 30 sec'}[what])",
    )
    one, two = client().nodes()
    assert one.gpus == {"a": 2} and one.memory_bytes == 10 * 2**20 and one.cpus == 4
    assert one.state.slurm_drain == "drained" and one.partitions == ("low", "high")
    assert one.reason == "it is = odd [x]" and two.gpus == {} and not two.state.usable_now
    (low,) = client().partitions()
    assert (low.nodes, low.grace_s, low.max_time_s) == (("n1", "n2"), 20.0, 3600.0)
    assert low.default and low.up and low.default_time_s is None
    assert client().version() == (22, 5, 8)
    assert client().config() == {"KillWait": "30 sec"}


def test_output_that_is_not_text(commands: Path, client: MakeClient) -> None:
    stand_in(
        commands, "scontrol", "sys.stdout.buffer.write(b'NodeName=n1 OS=\\xff\\xfe State=IDLE')"
    )
    (node,) = client().nodes()
    assert node.state.usable_now


def test_clean_environment() -> None:
    environ = {
        "SLURM_MEM_PER_CPU": "1", "SBATCH_PARTITION": "x", "SRUN_DEBUG": "1", "PATH": "/bin",
        "SQUEUE_FORMAT2": "x", "SLURM_CONF": "/c", "SLURMD_NODENAME": "n", "HOME": "/h",
        "SUBMITIT_FOLDER": "f", "SINFO_FORMAT": "x", "SLURMISH": "kept",
    }  # fmt: skip
    kept = clean_env(environ=environ)
    assert kept == {
        "PATH": "/bin", "SLURM_CONF": "/c", "HOME": "/h", "SLURMISH": "kept",
    }  # fmt: skip
    assert clean_env("/d", environ)["SLURM_CONF"] == "/d"


def test_run_keeps_output_apart(tmp_path: Path) -> None:
    code = "import sys; print('out'); print('err', file=sys.stderr); sys.exit(3)"
    done = run([sys.executable, "-IS", "-c", code], env={}, timeout_s=60)
    assert (done.code, done.out, done.err) == (3, "out\n", "err\n")
    with pytest.raises(EnvironmentFault, match="cannot start"):
        run([str(tmp_path)], env={}, timeout_s=1)


def test_back_off_doubles_to_its_cap_with_jitter() -> None:
    waits = list(islice(backoff_s(1.0, 8.0, random.Random(1)), 12))
    for wait, full in zip(waits, [1, 2, 4, 8, 8, 8, 8, 8, 8, 8, 8, 8], strict=True):
        assert full / 2 <= wait <= full
    assert len(set(waits)) == 12


# ------------------------------------------------------------------------------- for the pool


def test_a_survey_is_one_call_and_tells_services_of_one_name_apart(
    commands: Path, client: MakeClient, tmp_path: Path
) -> None:
    """Home directories are often links: sbatch notes the real one."""
    (tmp_path / "real" / "jobs").mkdir(parents=True)
    (tmp_path / "home").symlink_to(tmp_path / "real")
    real, mine = str(tmp_path / "real" / "jobs"), tmp_path / "home" / "jobs"
    rows = squeue_rows(
        {"jobid": "7", "state": "RUNNING", "name": "chat.a-1", "workdir": real},
        {"jobid": "8", "state": "FAILED", "name": "chat.a-2", "workdir": real},
        {"jobid": "9", "state": "RUNNING", "name": "chat.a-1", "workdir": "/elsewhere/jobs"},
    )
    stand_in(commands, "squeue", f"print({rows!r}, end='')")
    infos, ours = client().survey(["8", "10"], mine, {})
    assert infos["8"].state is JobState.FAILED and not infos["10"].known
    assert [job.id for job in ours] == ["7"]
    assert len(calls(commands, "squeue")) == 1


def test_what_shows_the_holes(commands: Path, client: MakeClient) -> None:
    node = "NodeName=n1 CPUTot=8 Gres=gpu:a100:4 GresUsed=gpu:a100:1(IDX:0) State=MIXED"
    plan = "ReservationName=r StartTime=2026-11-29T12:00:00 Nodes=n[1-2] Users=root"
    stand_in(
        commands, "scontrol",
        f"print({node!r} + ' Partitions=p,q' if sys.argv[2] == 'node' else {plan!r})",
    )  # fmt: skip
    rows = SEPARATOR.join(["2026-11-29T13:00:00 ", "n[3-4]  ", ""]) + "\n"
    stand_in(commands, "squeue", f"print('CLUSTER: x'); print({rows!r}, end='')")
    (room,) = client().rooms()
    assert (room.name, room.partitions, room.usable) == ("n1", ("p", "q"), True)
    assert (room.has[0].count, room.used[0].count) == (4, 1)
    assert client().reservations()[0]["Nodes"] == "n[1-2]"
    assert client().starts() == [("2026-11-29T13:00:00", "n[3-4]")]
    stand_in(commands, "scontrol", "print('No reservations in the system')")
    assert client().reservations() == []


def test_a_job_is_made_smaller_and_slurms_script_for_it_is_removed(
    commands: Path, client: MakeClient, tmp_path: Path
) -> None:
    body = "open('slurm_job_7_resize.sh', 'w').close(); open('slurm_job_7_resize.csh', 'w')"
    stand_in(commands, "scontrol", body)
    client().resize("7", ("n1", "n2"), tmp_path)
    assert calls(commands, "scontrol") == [["update", "JobId=7", "NodeList=n1,n2"]]
    assert not list(tmp_path.glob("slurm_job_*"))
