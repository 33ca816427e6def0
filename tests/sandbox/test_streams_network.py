"""Nodes as hosts of their own: a link that is cut is noticed in time, and its side is fenced."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from submitter_suite import wait

from flexslurm.config.schema import parse_section
from flexslurm.errors import EnvironmentFault
from flexslurm.slurm import processes, sandbox_network
from flexslurm.slurm.sandbox import Sandbox
from flexslurm.slurm.sandbox_config import SandboxConfig
from tests.sandbox.stream_kit import World, world

HOSTS = """\
nodes:
  s: {gpu_type: a100, gpus: 1}
  p: {gpu_type: a100, gpus: 1}
  c: {}
gpu_types: {a100: {}}
partitions:
  keep: {nodes: [s], default: true}
  away: {nodes: [p]}
  cpu: {nodes: [c]}
head_partition: cpu
kill_wait: 4s
network: namespaces
"""
KEPT, CUT = "a100-1", "a100-2"
LOST_AFTER_S, BEAT_S = 3.0, 0.3
Report = Callable[[str, object], None]

possible = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("ip") is None, reason="namespaces need root and iproute2"
)


def left_behind(home: Path) -> list[str]:
    key = sandbox_network._key(home)
    links = [path.name for path in Path("/sys/class/net").glob(f"{key}*")]
    return links + [path.name for path in Path("/run/netns").glob(f"{key}*")]


@possible
@pytest.mark.slow
def test_each_node_is_a_host_and_nothing_is_left(tmp_path: Path) -> None:
    box = Sandbox(tmp_path / "box", parse_section(SandboxConfig, HOSTS, "s.yaml"))
    box.up()
    try:
        script = "hostname; cat /proc/net/fib_trie | grep -c 32.host; getent hosts p1 s1"
        out = tmp_path / "out"
        argv = ["srun", "--partition=away", f"--output={out}", "sh", "-c", script]
        assert box.run(argv) == 0
        said = out.read_text().split("\n")
        assert said[0] == "p1"
        addresses = {line.split()[1]: line.split()[0] for line in said[2:] if line}
        assert addresses.keys() == {"p1", "s1"} and len(set(addresses.values())) == 2
        box.cut("p1")
        assert box.run(["timeout", "2", "srun", "-p", "away", "true"]) != 0
        box.mend("p1")
        # as after a crash: the processes and the state are gone, the namespaces are not
        processes.end_all(box._members, term_s=0.0, kill_s=8.0)
        (box.home / "sandbox.json").unlink()
        assert left_behind(box.home)
    finally:
        box.down()
    assert left_behind(box.home) == [] and not box.home.exists()


@pytest.mark.slow
def test_without_the_right_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And leaves nothing, as any start that fails."""

    def refuse(nodes: int) -> None:
        raise EnvironmentFault("network namespaces need root", hint="set 'network: host'")

    monkeypatch.setattr(sandbox_network, "check", refuse)
    box = Sandbox(tmp_path / "box", parse_section(SandboxConfig, HOSTS, "s.yaml"))
    with pytest.raises(EnvironmentFault, match="need root") as caught:
        box.up()
    assert caught.value.hint is not None and "network: host" in caught.value.hint
    assert not box.home.exists()


@pytest.mark.slow
def test_a_shared_network_has_no_links_to_cut(tmp_path: Path) -> None:
    text = HOSTS.replace("network: namespaces", "network: host")
    box = Sandbox(tmp_path / "box", parse_section(SandboxConfig, text, "s.yaml"))
    box.up()
    try:
        with pytest.raises(EnvironmentFault, match="share the machine's network"):
            box.cut("p1")
        with pytest.raises(EnvironmentFault, match="no 'x1'"):
            box.kill("x1")
    finally:
        box.down()


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[World]:
    home = tmp_path_factory.mktemp("hosts")
    pool = [("keep", "a100"), ("away", "a100")]
    times = {"lost_after": f"{LOST_AFTER_S}s", "heartbeat": f"{BEAT_S}s"}
    with world(home, tiny_model, HOSTS, pool, memory="4MiB", **times) as made:
        yield made


@possible
@pytest.mark.slow
@pytest.mark.shared_service
@pytest.mark.timeout(600)
def test_a_link_is_cut_and_comes_back(here: World, record_property: Report) -> None:
    """Nobody is told: only silence tells. What comes back is another member, with new workers."""
    here.ready(KEPT, CUT)
    node = here.node_of(CUT)
    agent = here.service.process(f"--fragment {CUT} ")
    workers = {g.pid for f in here.service.status().fragments if f.name == CUT for g in f.gpus}
    assert workers and all(workers)
    heard = here.act(
        "link of a node cut", CUT, lambda: here.box.cut(node), record_property,
        events=("lost",), within_s=LOST_AFTER_S + 5.0,
    )  # fmt: skip
    assert "silent" in heard["why"], heard
    here.load.start()
    try:
        here.load.in_the_middle()
        here.box.mend(node)
        here.ready(KEPT, CUT)
        here.load.one_more_each()
    finally:
        here.load.finish()
    # the same process, fenced: its workers of before the cut have ended
    assert here.service.process(f"--fragment {CUT} ") == agent
    assert [pid for pid in workers if processes.look(pid) is not None] == []
    logs = "".join(p.read_text() for p in (here.service.directory.logs / CUT).glob("*.log"))
    assert "comes again as" in logs


@possible
@pytest.mark.slow
@pytest.mark.shared_service
@pytest.mark.timeout(600)
def test_a_short_cut_is_no_loss(here: World) -> None:
    """Shorter than the bound: the streams wait, and go on with the same members."""
    here.ready(KEPT, CUT)
    node = here.node_of(CUT)
    before = len(here.journal())
    here.load.start()
    try:
        here.load.in_the_middle()
        here.box.cut(node)
        time.sleep(LOST_AFTER_S / 3)
        here.box.mend(node)
        here.load.one_more_each()
    finally:
        here.load.finish()
    assert [r for r in here.journal()[before:] if r["event"] == "lost"] == []
    wait(lambda: here.state_of(here.service.status(), CUT) != "lost", 1, "it is there")
