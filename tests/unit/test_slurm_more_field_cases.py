"""More of the folder of field cases: JSON, windows, environments, networks, submissions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flexslurm.config.schema import parse_section
from flexslurm.config.site import NetworkSettings, Site
from flexslurm.control.inventory import _chosen
from flexslurm.errors import SlurmError
from flexslurm.slurm.client import PartitionInfo
from flexslurm.slurm.command import Completed as Done
from flexslurm.slurm.command import clean_env, failure
from flexslurm.slurm.gres import gpus_of, parse_gres
from flexslurm.slurm.jobids import parse_job_id
from flexslurm.slurm.jobs import job_info
from flexslurm.slurm.json_forms import (
    job_of,
    jobs_of,
    limit_s,
    node_state_of,
    nodes_of,
    read_answer,
)
from flexslurm.slurm.nodelist import expand
from flexslurm.slurm.pilot import SlurmSubmitter
from flexslurm.slurm.reasons import reason_in_words
from flexslurm.slurm.records import parse_settings
from flexslurm.slurm.script import PilotSpec, pilot_options, pilot_script
from flexslurm.slurm.site_check import signal_hint
from flexslurm.slurm.states import JobState, job_state, node_state
from flexslurm.slurm.times import parse_duration, parse_time
from flexslurm.slurm.window import site_window, slurm_window
from flexslurm.wire import address

Cases = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def cases(shared_dir: Path) -> Cases:
    listed = json.loads((shared_dir / "cases" / "slurm.json").read_text(encoding="utf-8"))
    return {case["id"]: case for case in listed}


# ------------------------------------------------------------------------------------- JSON


def test_js_02_a_list_of_states_and_an_infinite_limit(cases: Cases) -> None:
    head = cases["js-02"]["input"].partition(', "exit_code"')[0]
    record = json.loads("{" + head + "}")
    wanted = cases["js-02"]["expected"]
    assert record["job_state"] == wanted["state"] and limit_s(record) is None
    assert job_of(record, 0.0, {}).state is JobState.COMPLETING


def test_js_03_and_04_nodes_of_a_job(cases: Cases) -> None:
    new = {"job_resources": {"nodes": {"count": 1, "list": "n001", "allocation": []}}}
    assert list(nodes_of(new)) == cases["js-03"]["expected"]
    assert list(nodes_of({"job_resources": {"nodes": "n001"}})) == cases["js-03"]["expected"]
    assert list(nodes_of({"job_resources": None})) == cases["js-04"]["expected"]["nodes"]
    assert parse_job_id("21+0").het == 0


def test_js_05_more_jobs_than_were_asked_for(shared_dir: Path) -> None:
    text = (shared_dir / "cases/slurm-22.05/22.05-squeue.json").read_text(encoding="utf-8")
    answer = read_answer(text)
    assert len(answer["jobs"]) > 1
    found = jobs_of(answer, ["503"], 0.0, {})
    assert list(found) == ["503"] and found["503"].state is JobState.CANCELLED


def test_js_06_drain_is_in_the_flags(cases: Cases) -> None:
    for text in cases["js-06"]["input"].split("  |  "):
        record = json.loads(text.partition(" (")[0])
        assert node_state_of(record).usable_now is cases["js-06"]["expected"]["schedulable"]


def test_js_07_status_200_with_errors(cases: Cases) -> None:
    body = cases["js-07"]["input"].partition("body ")[2]
    with pytest.raises(SlurmError):
        read_answer(body)


def test_js_10_a_year_is_no_end(cases: Cases) -> None:
    end, start = (int(word) for word in cases["js-10"]["input"].split("(")[1][:-1].split("-"))
    record = {"job_state": "RUNNING", "start_time": start, "end_time": end, "time_limit": 525600}
    assert job_of(record, float(start), {}).end_in_s is None


# --------------------------------------------------------------------------- text of Slurm's


def test_cf_01_settings_are_asked_for(cases: Cases) -> None:
    text = "KillWait   = 8 sec\nResumeTimeout    = 450 sec\nX= \nTRES = CPU=1.0,Mem=0.2G"
    assert "ResumeTimeout" in cases["cf-01"]["input"]
    found = parse_settings(text)
    assert found["ResumeTimeout"] == "450 sec" and found["TRES"] == "CPU=1.0,Mem=0.2G"


def test_gr_15_a_slash_gets_a_hint(cases: Cases) -> None:
    with pytest.raises(SlurmError) as caught:
        parse_gres(cases["gr-15"]["input"].partition("--gres=")[2])
    assert "gpu:rtx4090:1" in str(caught.value)


def test_gr_17_shares_are_no_gpus() -> None:
    assert gpus_of(parse_gres("mps:400,shard:16,gres/mps=100,gpu:a100:2")) == {"a100": 2}
    assert gpus_of(parse_gres("gpu:1g.10gb:28(S:0-1)")) == {}


def test_gr_11_visible_devices_count_from_zero(cases: Cases) -> None:
    given = cases["gr-11"]["input"].partition("=")[2]
    chosen = _chosen(given, [f"GPU-{i}" for i in range(8)])
    wanted = cases["gr-11"]["expected"]
    assert len(chosen) == wanted["visible_devices"]
    assert [n for n, _ in enumerate(chosen)] == wanted["logical_indices"]


def test_st_04_draining_is_not_drained() -> None:
    pairs = {"draining": "draining", "drng": "draining", "drained": "drained", "drain": "drained",
             "MIXED+DRAIN": "draining", "IDLE+DRAIN": "drained"}  # fmt: skip
    assert {text: node_state(text).slurm_drain for text in pairs} == pairs


def test_pr_09_cancelled_by_root() -> None:
    assert job_state("CANCELLED by 0") is JobState.CANCELLED


def test_fs_01_the_odd_signal_is_explained() -> None:
    told = "RaisedSignal:53(Real-time_signal_19)"
    assert "directory" in reason_in_words(told) and "directory" in reason_in_words(f"({told})")
    assert "other jobs" in reason_in_words("(Priority)")


def test_tm_03_and_07_no_limit() -> None:
    for text in ("infinite", "UNLIMITED", "365-00:00:00"):
        assert parse_duration(text) is None


def test_tm_06_the_deadline_of_an_unlimited_job(cases: Cases) -> None:
    told = cases["tm-06"]["input"].split("PreemptTime=")[1].split()[0].rstrip('"')
    began = parse_time(told)
    assert began is not None
    row = {"jobid": "1", "state": "RUNNING", "preempttime": told, "endtime": "Unknown",
           "timelimit": "UNLIMITED", "partition": "low"}  # fmt: skip
    assert job_info(row, began + 5, {"low": 20.0}).preempt_in_s == 15


def test_nl_23_needs_no_scontrol(cases: Cases, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_CONF", "/nonexistent")
    monkeypatch.setenv("PATH", "/nonexistent")
    assert expand(cases["nl-23"]["input"].split()[-1]) == cases["nl-23"]["expected"]


def test_cp_02_no_accounting_is_an_error_and_not_a_silence(cases: Cases) -> None:
    words = cases["cp-02"]["input"].partition(" (")[0]
    assert not failure(Done(("sacct",), 1, "", words)).transient


# -------------------------------------------------------------------------- what we submit

SITE = """\
name: x
gpu_types: {a100: {slurm_type: H100}}
partitions:
  low: {gpu_types: [a100], sbatch_args: [--comment=key=yes]}
  once: {gpu_types: [a100], requeue: false, grace: 0s, kill_wait: 10s}
slurm: {commands: {srun: srun.tinygpu}}
"""


@pytest.fixture
def site() -> Site:
    return parse_section(Site, SITE, "site.yaml")


def pilot(partition: str) -> PilotSpec:
    return PilotSpec("p", partition, "a100", 8, 1, 3600.0, ("true",), Path("/logs"))


def test_en_the_environment_of_a_surrounding_job_stays_out(cases: Cases) -> None:
    kinds = [case for case in cases.values() if case["kind"] == "env"]
    assert len(kinds) >= 3
    inherited = dict.fromkeys(
        ["SLURM_TRES_PER_TASK", "SLURM_CPUS_PER_TASK", "SLURM_MEM_PER_CPU", "SLURM_MEM_PER_GPU",
         "SLURM_MEM_PER_NODE", "SBATCH_GRES", "SRUN_CPUS_PER_TASK"], "1"
    )  # fmt: skip
    assert clean_env(environ=inherited) == {}


def test_what_stands_in_the_script(site: Site) -> None:
    text = pilot_script(pilot("low"), site, ["agent"]).text
    for words in (
        "unset SLURM_TRES_PER_TASK",  # en-02
        "--cpus-per-task=8",  # en-05: said to srun as well
        "srun.tinygpu",  # id-07
        "--kill-on-bad-exit=0",  # nd-08
        "--overlap",  # nd-11
        "--comment=key=yes",  # pr-14
        "--requeue",  # pr-23
        "--gres=gpu:H100:8",  # gr-13: the same typed form, and none for the step
        "--mpi=none",  # mp-01
        "--ntasks-per-node=1",  # tk-04
    ):
        assert words in text, words
    step = next(line for line in text.splitlines() if line.startswith("srun"))
    assert "--cpus-per-task" in step and "--gres" not in step and "--no-kill" in step  # nd-02
    assert "--nodelist" not in text  # st-11
    # pr-20: nothing signals srun
    assert not any(line.strip().startswith(("kill", "scancel")) for line in text.splitlines())


def test_id_08_the_word_hetjob_stays_out_of_the_lines(site: Site) -> None:
    spec = PilotSpec("p", "low", "a100", 8, 1, None, ("true",), Path("/home/hetjob_runs"))
    script = pilot_script(spec, site, ["agent"])
    lines = [line for line in script.text.splitlines() if line.startswith("#SBATCH")]
    assert lines and not any("hetjob" in line for line in lines)
    assert any("hetjob_runs" in argument for argument in script.arguments)


def test_pr_11_what_a_site_without_grace_gives(site: Site) -> None:
    window = site_window("once", site)
    assert (window.warning_s, window.requeued) == (10, False)
    assert "10 s" in window.in_words() and "does not come back" in window.in_words()
    assert "--no-requeue" in pilot_options(pilot("once"), site)


def test_pr_12_values_of_several_levels_are_merged() -> None:
    low = PartitionInfo("backfill", ("n1",), True, "N/A", 1, 600.0, None, None, False)
    high = PartitionInfo("high", ("n1",), True, "OFF", 9, 0.0, None, None, False)
    config = {"PreemptMode": "CANCEL", "PreemptType": "preempt/partition_prio",
              "PreemptExemptTime": "00:30:00", "KillWait": "60 sec"}  # fmt: skip
    window = slurm_window(low, [low, high], config)
    assert (window.exempt_s, window.warning_s, window.requeued) == (1800, 600, False)
    assert not slurm_window(high, [low, high], config).preemptible


def test_pr_07_the_hint_depends_on_the_release(cases: Cases) -> None:
    assert signal_hint((22, 5, 0)) in cases["pr-07"]["expected"]


# ---------------------------------------------------------------------------------- networks


def test_nw_03_and_04_which_address(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"docker0": ["172.17.0.1"], "lo": ["127.0.0.1", "127.0.1.1"], "eth0": ["10.2.0.7"]}
    monkeypatch.setattr(address, "_ipv4_by_interface", lambda: found)
    assert address.node_address(NetworkSettings()) == "10.2.0.7"


def test_nw_05_a_suffix_of_the_site(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(address.socket, "gethostname", lambda: "gpu7.cluster")
    monkeypatch.setattr(address, "_resolve", lambda name: asked.append(name) or "10.0.0.7")
    assert address.node_address(NetworkSettings(suffix="i")) == "10.0.0.7"
    assert asked == ["gpu7i"]


def test_nw_06_an_exact_interface(root: Path) -> None:
    text = (root / "site-configs/university.yaml").read_text(encoding="utf-8")
    assert parse_section(Site, text, "s").network.nccl_env["NCCL_SOCKET_IFNAME"] == "=bond0"


def test_hooks_find_the_service_and_the_site_s_own_comment_wins(site: Site, tmp_path: Path) -> None:
    submitter = SlurmSubmitter(site, tmp_path)
    lines = submitter.preview(pilot("once")).splitlines()
    assert f"#SBATCH --comment=flexslurm:{tmp_path}" in lines
    assert f"export FLEXSLURM_SERVICE_DIR={tmp_path}" in lines
    own = [line for line in submitter.preview(pilot("low")).splitlines() if "--comment" in line]
    assert own[-1] == "#SBATCH --comment=key=yes"
