"""What a launch hands its head: measured files and leaf switches; what is wrong is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from flexslurm.cli.launch import LaunchPlan, plan_launch
from flexslurm.cli.launch_facts import LaunchFacts, leaf_switches
from flexslurm.config.schema import parse_section
from flexslurm.config.service import Service
from flexslurm.config.site import Site
from flexslurm.config.sources import load_site
from flexslurm.control.members import AgentRecord
from flexslurm.errors import ConfigError, SlurmUnavailable
from flexslurm.gear import Gear, Signature
from flexslurm.head.planning import ServicePlanner
from flexslurm.messages import AgentHello, GpuInfo
from flexslurm.planner.profiles import Row, write_profile
from flexslurm.planner.table import GearTable
from flexslurm.slurm.client import SlurmClient
from flexslurm.wire.service_dir import ServiceDir

LINKS = "source,target,bytes,seconds\nn1,n2,1000,0.0001\nn1,n2,1000000,0.0011\n"
TOPOLOGY = "SwitchName=l1 Nodes=n[1-2]\nSwitchName=l2 Nodes=n[3-4]\nSwitchName=top Switches=l1,l2\n"


def profile(model: str, layer_s: float = 0.01) -> str:
    rows = [Row("decode", 1, batch, 32, layer_s * batch) for batch in (1, 4, 16)]
    about = {"model": model, "gpu_type": "a100", "tp": 1, "dtype": "float64"}
    return write_profile(about, rows)


def service(model: Path) -> Service:
    text = f"""
name: tiny
model: {{path: {model}, dtype: float64, name: tiny}}
pool: [{{gpu_type: a100, gpus: 1, count: 4}}]
serving: {{block_tokens: 16, max_batch: 16, max_batch_tokens: 64, max_context: 512}}
workload: {{prompt_tokens: 32, output_tokens: 32}}
"""
    return parse_section(Service, text, "service.yaml")


def site(folder: Path, more: str = "") -> Site:
    """A site file in `folder`, beside which measured files lie."""
    path = folder / "site.yaml"
    path.write_text(f"name: s\ngpu_types: {{a100: {{memory: 900kB, virtual: {{}}}}}}\n{more}")
    return load_site(path).value


MEASURED = "measured: {profiles: profiles, links: links.csv}\n"


@pytest.fixture
def folder(tmp_path: Path, tiny_model: Path) -> Path:
    (tmp_path / "profiles").mkdir()
    (tmp_path / "profiles" / "a.csv").write_text(profile(tiny_model.name))
    (tmp_path / "profiles" / "other.csv").write_text(profile("another-model"))
    (tmp_path / "links.csv").write_text(LINKS)
    (tmp_path / "topology.conf").write_text(TOPOLOGY)
    return tmp_path


def launch(folder: Path, model: Path, more: str) -> tuple[LaunchPlan, list[str]]:
    said: list[str] = []
    directory = ServiceDir(folder / "service")
    made = plan_launch(service(model), site(folder, more), directory, "local", True, said.append)
    directory.create()
    made.facts.write(directory)
    return made, said


def test_gears_of_a_launch_are_planned_with_what_was_measured(
    folder: Path, tiny_model: Path
) -> None:
    plain = plan_launch(service(tiny_model), site(folder), ServiceDir(folder / "x"), "local", True)
    made, said = launch(folder, tiny_model, MEASURED)
    assert plain.table is not None and made.table is not None
    assert made.gear.estimates.tokens_per_s != plain.gear.estimates.tokens_per_s
    headers = [GearTable(table).header.inputs for table in (plain.table, made.table)]
    assert headers[0] != headers[1]
    assert said == []


def test_the_head_plans_with_copies_and_finds_the_table_fitting(
    folder: Path, tiny_model: Path
) -> None:
    made, _ = launch(folder, tiny_model, MEASURED)
    assert made.table is not None
    made.directory.gears.write_bytes(made.table)
    for path in (*(folder / "profiles").iterdir(), folder / "links.csv"):
        path.unlink()
    head = ServicePlanner(made.service, made.site)
    assert head.topology.node_link.bandwidth == pytest.approx(999e6)
    assert head.fitting_table(made.directory.gears)[0] is not None
    assert head.exact(made.gear.signature) == made.gear


def test_another_profile_makes_the_table_again(folder: Path, tiny_model: Path) -> None:
    made, _ = launch(folder, tiny_model, MEASURED)
    assert made.table is not None
    made.directory.gears.write_bytes(made.table)
    again, said = launch(folder, tiny_model, MEASURED)
    assert again.table is None and said == []
    (folder / "profiles" / "a.csv").write_text(profile(tiny_model.name, 0.02))
    changed, said = launch(folder, tiny_model, MEASURED)
    assert changed.table is not None and "it is made again" in said[0]


def test_profiles_of_other_models_are_said_to_say_nothing(folder: Path, tiny_model: Path) -> None:
    (folder / "profiles" / "a.csv").unlink()
    made, said = launch(folder, tiny_model, MEASURED)
    assert len(said) == 1 and f"no profile of {tiny_model.name} in float64" in said[0]
    assert made.site.measured.profiles is None and made.site.measured.links is not None


@pytest.mark.parametrize(
    ("name", "text", "line", "words"),
    [
        ("profiles/a.csv", profile("m") + "decode,1,8,32,fast\n", 6, "seconds must be a number"),
        ("profiles/a.csv", profile("m") + "decode,1,8,32,-1\n", 6, "at least 0"),
        ("links.csv", LINKS + "n1,n2,5\n", 4, "4 values are expected"),
    ],
)
def test_a_malformed_file_is_refused_with_its_line(
    folder: Path, tiny_model: Path, name: str, text: str, line: int, words: str
) -> None:
    (folder / name).write_text(text)
    with pytest.raises(ConfigError, match=words) as caught:
        launch(folder, tiny_model, MEASURED)
    assert (caught.value.file, caught.value.line) == (str(folder / name), line)
    assert not (folder / "service").exists()


@pytest.mark.parametrize(("key", "value"), [("profiles", "none"), ("links", "none.csv")])
def test_a_missing_file_is_named(folder: Path, tiny_model: Path, key: str, value: str) -> None:
    with pytest.raises(ConfigError, match=r"(?i)no such file") as caught:
        launch(folder, tiny_model, f"measured: {{{key}: {value}}}\n")
    assert caught.value.file == str(folder / value)


# ------------------------------------------------------------------------------ leaf switches


def agent(name: str) -> AgentRecord:
    hello = AgentHello(
        protocol=1, incarnation=name, fragment=name, node=name, address="127.0.0.1",
        gpu_type="a100", gpus=(GpuInfo(0, 1_700_000),),
    )  # fmt: skip
    return AgentRecord(hello, 0.0)


def test_leaves_come_from_the_sites_file(folder: Path) -> None:
    given = site(folder, "slurm: {topology: topology.conf}\n")
    assert leaf_switches(given, "local", print) == {"n1": "l1", "n2": "l1", "n3": "l2", "n4": "l2"}


def test_a_broken_topology_is_refused_with_its_line(folder: Path) -> None:
    (folder / "topology.conf").write_text("SwitchName=l1 Nodes=n[1-2]\nSwitchName=l2 Nodes=n[3-\n")
    with pytest.raises(ConfigError) as caught:
        leaf_switches(site(folder, "slurm: {topology: topology.conf}\n"), "slurm", print)
    assert (caught.value.file, caught.value.line) == (str(folder / "topology.conf"), 2)


def test_without_an_answer_placement_goes_without_leaves(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: SlurmClient) -> str:
        raise SlurmUnavailable("slurmctld does not answer")

    said: list[str] = []
    monkeypatch.setattr(SlurmClient, "topology", fail)
    assert leaf_switches(site(folder), "slurm", said.append) == {}
    assert said == ["leaf switches are not known: slurmctld does not answer"]


def test_the_head_keeps_a_replica_under_one_switch(folder: Path, tiny_model: Path) -> None:
    directory = ServiceDir(folder / "service")
    directory.create()
    LaunchFacts(leaves={"n1": "l1", "n2": "l2", "n3": "l1", "n4": "l2"}).write(directory)
    # a GPU holds no more than half of the model: every replica is two stages on two nodes
    small = parse_section(
        Site, "name: s\ngpu_types: {a100: {memory: 1700kB, virtual: {}}}\n", "site.yaml"
    )
    leaves = directory.leaf_switches()
    crossed = []
    for known in ({}, leaves):
        planner = ServicePlanner(service(tiny_model), small, leaves=known)
        gear = planner.exact(Signature.parse("a100:1x4"))
        assert isinstance(gear, Gear)
        assert [len(replica.stages) for replica in gear.replicas] == [2, 2]
        at = planner.place(gear, [agent(name) for name in ("n1", "n2", "n3", "n4")], None)
        nodes = {slot: where.agent for slot, where in at.items()}
        crossed.append(
            [len({leaves[nodes[s]] for s in nodes if s.replica == number}) for number in range(2)]
        )
    assert crossed == [[2, 2], [1, 1]]
