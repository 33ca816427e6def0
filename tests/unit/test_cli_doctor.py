"""The doctor's probe among several nodes, and what it makes of their words."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from flexslurm.cli.doctor_fabric import nccl_names
from flexslurm.cli.doctor_probe import _gpus, facts, meet
from flexslurm.cli.doctor_verdicts import judge_meeting, judge_node, table
from flexslurm.cli.doctor_words import CheckVerdict, Result
from flexslurm.errors import EnvironmentFault
from flexslurm.slurm.each_node import nodes_of_allocation
from tests.fake_node import FakeNvml


def node(name: str = "n1", **changes: Any) -> dict[str, Any]:
    """A node on which all is well."""
    return {
        "node": name, "python": "3.11.7", "executable": "/p",
        "packages": {"torch": "2.6", "nvidia-nccl-cu12": "2.21"},
        "memory_free_bytes": 2**36, "model": {"files": 3, "seconds": 0.1},
        "address": {"address": "10.0.0.1"},
        "gpus": {"wanted": 2, "names": ["A", "A"], "driver": "550", "used_share": [0.0, 0.0]},
        "fabric": [port()], "interfaces": ["ib0", "lo"], "slurm": {"version": "22.05.08"},
        "network": {"nccl_env": {"NCCL_IB_HCA": "=mlx5_0:1", "NCCL_SOCKET_IFNAME": "=ib0"},
                    "gbit_per_s": 200.0},
        "met": {"seen": 2, "wanted": 2, "peers": {"n2": {"way_s": 0.001, "clock_s": 0.0}}},
        **changes,
    }  # fmt: skip


def port(**changes: Any) -> dict[str, Any]:
    return {"device": "mlx5_0", "port": 1, "active": True, "gbit_per_s": 200.0, "errors": {},
            "infiniband": True, "interface": "ib0", **changes}  # fmt: skip


def bad(verdicts: list[CheckVerdict], result: Result = Result.FAIL) -> list[str]:
    assert all(v.mend for v in verdicts if v.result is Result.FAIL)
    return [v.check for v in verdicts if v.result is result]


def test_where_all_is_well_nothing_fails() -> None:
    nodes = [node("n1"), node("n2")]
    assert bad(judge_meeting(nodes, 2)) == []
    assert bad(judge_node(nodes[0], virtual=False)) == []


@pytest.mark.parametrize(
    ("changes", "check"),
    [
        ({"address": {"problem": "no ib0"}}, "address"),
        ({"gpus": {"wanted": 2, "names": ["A"], "driver": "5", "used_share": [0.0]}}, "gpus"),
        ({"gpus": {"wanted": 2, "problem": "driver mismatch"}}, "gpus"),
        ({"fabric": [port(active=False)], "network": {}}, "fabric"),
        ({"model": {"problem": "/m: Permission denied"}}, "model"),
        ({"network": {"nccl_env": {"NCCL_IB_HCA": "=mlx5_0:1,mlx5_4"}}}, "nccl"),
        ({"network": {"nccl_env": {"NCCL_SOCKET_IFNAME": "=ib"}}}, "nccl"),
        (
            {
                "fabric": [port(), port(device="mlx5_1", active=False)],
                "network": {"nccl_env": {"NCCL_IB_HCA": "=mlx5_0,mlx5_1"}},
            },
            "nccl",
        ),
    ],
)
def test_a_node_s_trouble_is_a_failure_with_a_mend(changes: dict[str, Any], check: str) -> None:
    assert bad(judge_node(node(**changes), virtual=False)) == [check]


@pytest.mark.parametrize(
    ("changes", "check"),
    [
        ({"memory_free_bytes": 2**20}, "memory"),
        ({"address": {"address": "127.0.1.1"}}, "address"),
        ({"fabric": [port(), port(device="mlx5_1", active=False)]}, "fabric"),
        ({"fabric": [port(errors={"symbol_error": 9})]}, "fabric"),
        ({"fabric": [port(), port(device="mlx5_1", gbit_per_s=100.0)]}, "fabric"),
        ({"network": {"gbit_per_s": 400.0}}, "fabric"),
        ({"slurm": {"problem": "no scontrol"}}, "slurm"),
        ({"gpus": {"wanted": None, "names": ["A"], "driver": "5", "used_share": [0.9]}}, "gpus"),
    ],
)
def test_what_may_be_is_a_note(changes: dict[str, Any], check: str) -> None:
    verdicts = judge_node(node(**changes), virtual=False)
    assert bad(verdicts) == [] and check in bad(verdicts, Result.NOTE)


def test_virtual_gpus_need_no_driver() -> None:
    me = node(gpus={"wanted": 4, "problem": "no driver"})
    assert bad(judge_node(me, virtual=True)) == []


def test_trouble_between_nodes() -> None:
    lonely = {"seen": 1, "wanted": 2, "peers": {}}
    deaf = {"seen": 2, "wanted": 2, "peers": {"n2": {"problem": "refused"}}}
    early = {"seen": 2, "wanted": 2, "peers": {"n2": {"way_s": 0.001, "clock_s": -300.0}}}
    for met, check in ((lonely, "shared directory"), (deaf, "ports"), (early, "clock")):
        assert bad(judge_meeting([node(met=met), node("n2")], 2)) == [check]
    assert bad(judge_meeting([node()], 2)) == ["nodes"]
    assert bad(judge_meeting([node(), node("n2", python="3.12.1")], 2)) == ["python"]
    assert bad(judge_meeting([node(), node("n2", packages={})], 2)) == ["packages"]
    assert bad(judge_meeting([node(), node("n2", slurm={"version": "23.02.1"})], 2)) == ["slurm"]
    three = [node("n1"), node("n2"), node("n3", fabric=[port(gbit_per_s=100.0)])]
    slow = [v for v in judge_meeting(three, 3) if v.check == "fabric"]
    assert [(v.where, v.result) for v in slow] == [("n3", Result.NOTE)]
    other = {**node()["gpus"], "driver": "535"}
    assert bad(judge_meeting([node(), node("n2", gpus=other)], 2)) == ["driver"]


def test_the_table_has_the_mend_below_its_failure() -> None:
    lines = table(judge_node(node(address={"problem": "no ib0"}), virtual=False)).splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("FAIL"))
    assert "no ib0" in lines[at] and "->" in lines[at + 1]
    assert sum("->" in line for line in lines) == 1


def test_nodes_meet(tmp_path: Path) -> None:
    met: dict[str, Any] = {}

    def be(name: str) -> None:
        me = {"node": name, "address": {"address": "127.0.0.1"}}
        met[name] = meet(tmp_path, me, 3, timeout_s=60)

    threads = [threading.Thread(target=be, args=(name,)) for name in ("a", "b", "c")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert {name: set(found["peers"]) for name, found in met.items()} == {
        "a": {"b", "c"}, "b": {"a", "c"}, "c": {"a", "b"}
    }  # fmt: skip
    for found in met.values():
        assert all(abs(peer["clock_s"]) < 30 for peer in found["peers"].values())


def test_a_node_alone_says_so(tmp_path: Path) -> None:
    me = {"node": "a", "address": {"address": "127.0.0.1"}}
    assert meet(tmp_path, me, 2, timeout_s=0.1)["seen"] == 1
    assert "problem" in meet(tmp_path / "missing", me, 2, timeout_s=0.1)


def test_the_facts_of_this_machine() -> None:
    me = facts(None, "/nonexistent/model")
    assert me["packages"]["pyzmq"] and me["memory_free_bytes"] > 0
    assert "No such file" in me["model"]["problem"]
    assert bad(judge_node(me, virtual=True)) == ["model"]


def test_how_many_nodes_a_job_has() -> None:
    assert nodes_of_allocation({"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "3"}) == 3
    het = {
        "SLURM_JOB_ID": "7", "SLURM_HET_SIZE": "2", "SLURM_JOB_NUM_NODES": "1",
        "SLURM_JOB_NUM_NODES_HET_GROUP_0": "1", "SLURM_JOB_NUM_NODES_HET_GROUP_1": "2",
    }  # fmt: skip
    assert nodes_of_allocation(het) == 3
    with pytest.raises(EnvironmentFault, match="not inside"):
        nodes_of_allocation({})


def test_names_as_nccl_reads_them() -> None:
    assert nccl_names("=mlx5_0:1,mlx5_1") == (True, False, ["mlx5_0:1", "mlx5_1"])
    assert nccl_names("^docker0,lo") == (False, True, ["docker0", "lo"])
    assert nccl_names("^=eth0") == (True, True, ["eth0"])
    assert nccl_names("mlx5") == (False, False, ["mlx5"])


def test_cards_as_the_driver_tells_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", "2")
    card = {"uuid": "GPU-a", "memory": 2**34, "used": 2**33}
    for driver, told in (
        (FakeNvml(card), {"wanted": 2, "driver": "550.54", "names": ["NVIDIA A100"],
                          "used_share": [0.5]}),
        (FakeNvml(broken=True), {"wanted": 2, "problem": "Driver/library version mismatch"}),
    ):  # fmt: skip
        monkeypatch.setitem(sys.modules, "pynvml", driver)  # type: ignore[arg-type]
        assert _gpus() == told
    monkeypatch.setitem(sys.modules, "pynvml", None)  # type: ignore[arg-type]
    assert "pynvml" in _gpus()["problem"]
