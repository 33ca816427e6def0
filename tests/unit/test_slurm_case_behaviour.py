"""Field cases about what is asked, started and believed, as far as no cluster is needed for it."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from flexslurm.config.schema import parse_section
from flexslurm.config.site import Site, SlurmSettings
from flexslurm.control import inventory
from flexslurm.engine.nursery import Nursery
from flexslurm.head.agent_process import agent_command
from flexslurm.slurm.allocation import components
from flexslurm.slurm.client import SlurmClient
from flexslurm.slurm.each_node import nodes_of_allocation
from flexslurm.slurm.hook_files import trigger_arguments
from flexslurm.slurm.jobs import job_info
from flexslurm.slurm.script import PilotSpec, pilot_options, pilot_script
from flexslurm.slurm.states import JobState

SITE = "name: x\ngpu_types: {a100: {}}\npartitions: {low: {gpu_types: [a100]}}\n"


@pytest.fixture
def site() -> Site:
    return parse_section(Site, SITE, "site.yaml")


def pilot(nodes: int = 2) -> PilotSpec:
    return PilotSpec("p", "low", "a100", 4, nodes, None, ("agent", "--x"), Path("/logs"))


def stand_in(where: Path, name: str, answer: str) -> None:
    path = where / name
    path.write_text(f"#!{sys.executable} -IS\nprint({answer!r})\n")
    path.chmod(0o755)


def sources(root: Path, *packages: str) -> dict[Path, str]:
    files = [p for package in packages for p in (root / "flexslurm" / package).rglob("*.py")]
    assert files
    return {path: path.read_text(encoding="utf-8") for path in files}


# ------------------------------------------------------------------------------ asking Slurm


def test_cf_03_and_04_settings_come_from_the_daemon(tmp_path: Path) -> None:
    """Neither a copy of slurm.conf with keys of other releases nor the lack of one matters."""
    stand_in(tmp_path, "scontrol", "Configuration data as of now\nKillWait                = 8 sec")
    (tmp_path / "slurm.conf").write_text("CacheGroups=1\nJobCheckpointDir=/x\nKillWait=77\n")
    for conf in ("slurm.conf", "none.conf"):
        environ = {"PATH": str(tmp_path), "SLURM_CONF": str(tmp_path / conf)}
        client = SlurmClient(SlurmSettings(), environ=environ)
        assert client.config()["KillWait"] == "8 sec"


def test_cp_05_a_node_goes_by_its_node_name(tmp_path: Path) -> None:
    stand_in(tmp_path, "scontrol", "NodeName=gpu001 NodeHostName=box7 State=IDLE CPUTot=8")
    client = SlurmClient(SlurmSettings(), environ={"PATH": str(tmp_path)})
    assert [node.name for node in client.nodes()] == ["gpu001"]


def test_cp_07_triggers_that_every_release_knows(tmp_path: Path) -> None:
    """--draining and --resume came with 23.02; what we set is known to 20.11 as well."""
    options = {word for line in trigger_arguments(tmp_path) for word in line}
    assert options >= {"--down", "--drained", "--up"}
    assert not options & {"--draining", "--resume"}


def test_st_08_no_accounting_is_believed(root: Path) -> None:
    """sacct calls a requeued job PREEMPTED; only squeue's last word counts."""
    starting = re.compile(r"""["']sacct["']""")
    found = [p for p, text in sources(root, "slurm", "head", "control").items()
             if starting.search(text)]  # fmt: skip
    assert found == []
    again = job_info({"jobid": "7", "state": "RUNNING", "restartcnt": "1"}, 0.0, {})
    assert (again.state, again.restarts) == (JobState.RUNNING, 1)


def test_pr_10_a_state_is_never_read_from_an_exit_code() -> None:
    """143 is a preemption, a time limit, or a user's own kill."""
    states = {}
    for word in ("PREEMPTED", "TIMEOUT", "OUT_OF_MEMORY", "FAILED", "CANCELLED"):
        row = {"jobid": "7", "state": word, "exit_code": str(143 << 8)}
        states[word] = job_info(row, 0.0, {})
    assert {word: str(info.state) for word, info in states.items()} == {w: w for w in states}
    assert {info.exit_code for info in states.values()} == {143}


def test_nd_05_a_node_failure_without_requeue_is_an_end() -> None:
    row = {"jobid": "7", "state": "NODE_FAIL", "reason": "NodeDown", "exit_code": "0:9"}
    info = job_info(row, 0.0, {})
    assert info.state.over and info.exit_code == -9 and info.reason


# ------------------------------------------------------------------------------ what we start


def test_gb_01_nothing_binds_a_task_to_one_gpu(site: Site) -> None:
    """One task a node, which sees all the node's GPUs; it numbers its workers itself."""
    text = pilot_script(pilot(), site, ["agent"]).text
    assert not re.search(r"--(gpus-per-task|ntasks-per-gpu|gpu-bind|tres-bind)", text)
    assert "--ntasks-per-node=1" in text


def test_tk_05_as_many_tasks_as_nodes(site: Site) -> None:
    text = pilot_script(pilot(nodes=3), site, ["agent"]).text
    step = next(line for line in text.splitlines() if line.startswith("srun"))
    assert {"--nodes=3", "--ntasks=3", "--ntasks-per-node=1"} <= set(step.split())
    assert not any(option.startswith("--ntasks=") for option in pilot_options(pilot(3), site))


def test_pr_16_and_19_the_task_is_the_program_itself(site: Site) -> None:
    """No shell, torchrun or wrapper in between: they pass no SIGUSR1 on."""
    text = pilot_script(pilot(), site, ["/venv/bin/python", "-m", "agent"]).text
    step = next(line for line in text.splitlines() if line.startswith("srun"))
    assert step.endswith(" /venv/bin/python -m agent")
    command = agent_command(Path("/svc"), "p-1", "a100", 4, 0.0, 5.0)
    assert command[0] == sys.executable and "torchrun" not in " ".join(command)


def test_pr_04_the_steps_are_signalled_and_not_the_shell(site: Site) -> None:
    options = [o for o in pilot_options(pilot(), site) if o.startswith("--signal=")]
    assert len(options) == 1 and re.fullmatch(r"--signal=USR1@\d+", options[0])


def test_pr_01_the_agents_are_a_step(site: Site) -> None:
    """Grace signals go to steps only; the batch shell stays, and waits for its step."""
    lines = pilot_script(pilot(), site, ["agent"]).text.splitlines()
    assert sum(line.startswith("srun ") for line in lines) == 1
    assert not any(line.startswith("exec ") for line in lines)


def test_pr_21_nothing_on_the_nodes_needs_slurm_s_commands(root: Path) -> None:
    """Agents and workers may live in a container; the batch script asks for the requeue."""
    command = re.compile(r"""["'](scontrol|squeue|srun|scancel|sbatch|sinfo)["']""")
    texts = sources(root, "control", "engine", "wire", "gateway")
    assert [path for path, text in texts.items() if command.search(text)] == []


def test_mp_02_no_launcher_of_deepspeed(root: Path) -> None:
    named = re.compile(r"SlurmRunner|deepspeed.launcher")
    assert [path for path, text in sources(root, ".").items() if named.search(text)] == []


def test_fs_03_workers_never_reach_for_a_hub(tmp_path: Path) -> None:
    """Whatever the user has set: no locks in a shared cache, no downloads by many at once."""
    nursery = Nursery("cpu", tmp_path, lambda ended: None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "0")
        assert nursery._environment()["HF_HUB_OFFLINE"] == "1"


def test_nw_02_no_port_is_made_of_a_job_id(root: Path) -> None:
    texts = sources(root, ".")
    assert [path for path, text in texts.items() if "MASTER_PORT" in text] == []


# --------------------------------------------------------------------------- who and where


HET = {
    "SLURM_JOB_ID": "400", "SLURM_HET_SIZE": "2", "SLURM_JOB_NODELIST": "gpu001",
    "SLURM_JOB_ID_HET_GROUP_0": "400", "SLURM_JOB_ID_HET_GROUP_1": "407",
    "SLURM_JOB_NODELIST_HET_GROUP_0": "gpu001", "SLURM_JOB_NODELIST_HET_GROUP_1": "gpu[002-003]",
    "SLURM_JOB_CPUS_PER_NODE_HET_GROUP_0": "4", "SLURM_JOB_CPUS_PER_NODE_HET_GROUP_1": "2(x2)",
}  # fmt: skip


@pytest.mark.parametrize("union", [False, True])
def test_nl_19_and_nw_09_components_by_their_own_variables(union: bool) -> None:
    """SLURM_JOB_NODELIST is the first component's or all of them; ids need not be consecutive."""
    env = HET | ({"SLURM_JOB_NODELIST": "gpu[001-003]"} if union else {})
    found = [(c.het_group, c.job_id, c.nodes) for c in components(env)]
    assert found == [(0, "400", ("gpu001",)), (1, "407", ("gpu002", "gpu003"))]


def test_tk_06_a_job_is_known_by_its_id_and_not_by_its_name() -> None:
    env = {"SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "interactive", "SLURM_JOB_NODELIST": "n[1-2]",
           "SLURM_JOB_CPUS_PER_NODE": "2(x2)"}  # fmt: skip
    assert [c.nodes for c in components(env)] == [("n1", "n2")]
    assert nodes_of_allocation({**env, "SLURM_JOB_NUM_NODES": "2"}) == 2


class FakeNvml:
    """Two cards, in the order of the bus."""

    class NVMLError(Exception):
        pass

    nvmlInit = nvmlShutdown = staticmethod(lambda: None)
    nvmlDeviceGetCount = staticmethod(lambda: 2)
    nvmlDeviceGetHandleByIndex = staticmethod(lambda i: i)
    nvmlDeviceGetMigMode = staticmethod(lambda h: (0, 0))
    nvmlDeviceGetUUID = staticmethod(lambda h: ("GPU-aaaa", "GPU-bbbb")[h])
    nvmlDeviceGetMemoryInfo = staticmethod(lambda h: type("M", (), {"total": (1 + h) * 2**30}))


@pytest.mark.parametrize(
    ("env", "uuids"),
    [
        ({"CUDA_VISIBLE_DEVICES": "GPU-bbbb,GPU-aaaa"}, ["GPU-bbbb", "GPU-aaaa"]),
        ({"CUDA_VISIBLE_DEVICES": "1"}, ["GPU-bbbb"]),
        # inside a step: SLURM_JOB_GPUS is not there, and nothing may be there
        ({"SLURM_GPUS_ON_NODE": "2"}, ["GPU-aaaa", "GPU-bbbb"]),
    ],
)
def test_gb_02_and_03_gpus_by_uuid_and_what_is_visible(
    env: Mapping[str, str], uuids: list[str], site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml)
    found = inventory.gpus_of_node("a100", site.gpu_types["a100"], len(uuids), env)
    assert [gpu.uuid for gpu in found] == uuids
    assert [gpu.index for gpu in found] == list(range(len(uuids)))
    sizes = {"GPU-aaaa": 2**30, "GPU-bbbb": 2**31}
    assert [gpu.memory_bytes for gpu in found] == [sizes[uuid] for uuid in uuids]
