"""The parsers against the folder of field cases, where a checkout has it beside it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flexslurm.errors import SlurmError
from flexslurm.slurm.command import clean_env, is_unavailable
from flexslurm.slurm.gres import parse_gres
from flexslurm.slurm.jobids import submitted_id
from flexslurm.slurm.nodelist import expand, expand_counts
from flexslurm.slurm.reasons import is_held, reason_in_words
from flexslurm.slurm.records import parse_records, parse_settings
from flexslurm.slurm.states import job_state, node_state
from flexslurm.slurm.times import parse_duration

Cases = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def cases(shared_dir: Path) -> Cases:
    listed = json.loads((shared_dir / "cases" / "slurm.json").read_text(encoding="utf-8"))
    return {case["id"]: case for case in listed}


@pytest.fixture(scope="module")
def printed(shared_dir: Path) -> dict[str, str]:
    folder = shared_dir / "cases" / "slurm-22.05"
    return {path.name: path.read_text(encoding="utf-8") for path in folder.glob("*.txt")}


def test_node_lists(cases: Cases) -> None:
    plain = [c for c in cases.values() if c["kind"] == "nodelist" and "=" not in c["input"]]
    assert plain
    for case in plain:
        assert expand(case["input"]) == case["expected"], case["id"]


def test_bad_node_lists(cases: Cases) -> None:
    bad = [c for c in cases.values() if c["kind"] == "nodelist-bad"]
    assert bad
    for case in bad:
        if isinstance(case["expected"], list):
            assert expand(case["input"]) == case["expected"], case["id"]
        else:
            with pytest.raises(SlurmError):
                expand(case["input"])


def test_gres(cases: Cases) -> None:
    seen = 0
    for case in cases.values():
        if case["kind"] not in ("gres", "tres-per-node") or isinstance(case["expected"], str):
            continue
        wanted = case["expected"] if isinstance(case["expected"], list) else [case["expected"]]
        for text in case["input"].split("   |   "):
            if "Used=" in text:
                text = text.split("GresUsed=")[1].split()[0]
                wanted = [{"count": case["expected"]["gpu_used"]}]
            entries = parse_gres(text.split("   (")[0])
            assert len(entries) == len(wanted), case["id"]
            pairs = zip(entries, wanted, strict=True)
            assert [{k: _field(entry, k) for k in w} for entry, w in pairs] == wanted, case["id"]
            seen += 1
    assert seen >= 6


def _field(entry: object, key: str) -> object:
    value = getattr(entry, key)
    return list(value) if isinstance(value, tuple) else value


def test_rows_of_sinfo(cases: Cases) -> None:
    case = cases["gr-12"]
    for line, wanted in zip(case["input"].splitlines(), case["expected"], strict=True):
        name, *_, gres, used = line.split()
        assert name == wanted["node"]
        assert sum(entry.count for entry in parse_gres(gres)) == wanted["gpus"]
        entries = parse_gres(used)
        assert sum(entry.count for entry in entries) == wanted["used"]
        assert [i for entry in entries for i in entry.idx] == wanted.get("used_idx", [])


def test_ids(cases: Cases) -> None:
    for key in ("id-01", "id-02", "id-03"):
        wanted = cases[key]["expected"].split()[0]
        assert submitted_id(cases[key]["input"]).base == wanted


def test_times(cases: Cases) -> None:
    for text, seconds in cases["tm-02"]["expected"].items():
        assert parse_duration(text) == seconds
    assert parse_duration("infinite") is None
    assert parse_duration(cases["tm-04"]["input"].partition("=")[2]) == 604899


def test_node_states(cases: Cases) -> None:
    for key in ("st-01", "st-02", "st-03"):
        state = node_state(cases[key]["input"])
        wanted = cases[key]["expected"]
        assert state.base == wanted.get("base", state.base)
        assert list(state.flags) == wanted.get("flags", list(state.flags))
        assert state.usable_now == wanted.get("usable_now", state.usable_now)
    for text in cases["st-06"]["input"].replace(",", " ").split():
        assert node_state(text).base != "UNKNOWN", text


def test_reasons(cases: Cases) -> None:
    blamed = cases["st-11"]["input"].partition("Reason=")[2]
    assert "gpu003" in reason_in_words(blamed) and not is_held(blamed)
    assert is_held(cases["st-10"]["input"].partition("Reason=")[2].split()[0])


def test_tasks_per_node(cases: Cases) -> None:
    assert expand_counts(cases["tk-01"]["input"].partition("=")[2]) == cases["tk-01"]["expected"]


def test_nobody_answered(cases: Cases) -> None:
    assert is_unavailable(cases["cp-01"]["input"])
    assert not is_unavailable(cases["cp-02"]["input"])


def test_variables_that_change_answers(cases: Cases) -> None:
    names = cases["id-06"]["expected"].removeprefix("unset ").partition(" in ")[0].split(", ")
    assert "SQUEUE_FORMAT" in names
    environ = dict.fromkeys([*names, "SLURM_TRES_PER_TASK", "SLURM_MEM_PER_CPU"], "x")
    kept = clean_env(environ={**environ, "SLURM_CONF": "/c", "PATH": "/bin"})
    assert set(kept) == {"SLURM_CONF", "PATH"}


def test_what_scontrol_prints(printed: dict[str, str]) -> None:
    jobs = parse_records(printed["22.05-scontrol_jobs_detail.txt"], "JobId")
    assert [job["JobId"] for job in jobs][:3] == ["500", "501", "502"]
    assert jobs[1]["Reason"] == "ReqNodeNotAvail,_UnavailableNodes:gpu003"
    assert job_state(jobs[2]["JobState"]).value == "NODE_FAIL"
    het = parse_records(printed["22.05-scontrol_jobs-hetjob-running.txt"], "JobId")
    assert [(job["JobId"], job["HetJobOffset"]) for job in het] == [("400", "0"), ("401", "1")]
    assert het[1]["Power"] == ""
    nodes = parse_records(printed["22.05-scontrol_nodes_oneline.txt"], "NodeName")
    assert [node["NodeName"] for node in nodes] == ["gpu001", "gpu002", "gpu003", "login1"]
    assert nodes[1]["Reason"].startswith('bad, ECC | "x"')
    assert node_state(nodes[1]["State"]).slurm_drain == "draining"
    settings = parse_settings(printed["22.05-scontrol_config.txt"])
    assert settings["AuthInfo"] == "cred_expire=5" and settings["KillWait"] == "8 sec"
