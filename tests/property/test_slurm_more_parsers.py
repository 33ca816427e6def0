"""The rest of what reads Slurm's words: whatever they are, an answer or an error of ours."""

from __future__ import annotations

import ast
import contextlib
import string
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

import flexslurm
from flexslurm.cli.site_commands import card_of
from flexslurm.config.schema import parse_section
from flexslurm.config.site import Site
from flexslurm.errors import FlexslurmError
from flexslurm.slurm.allocation import Component, allocated_nodes, components
from flexslurm.slurm.client import _node_info, _partition_info, release_in
from flexslurm.slurm.command import is_unavailable
from flexslurm.slurm.discover import ClusterFacts, parse_qos, site_text, window_of
from flexslurm.slurm.each_node import nodes_of_allocation
from flexslurm.slurm.hook_state import parse_triggers
from flexslurm.slurm.json_forms import read_answer
from flexslurm.slurm.mig import mig_slice
from flexslurm.slurm.nodelist import expand_told
from flexslurm.slurm.probing import choose_mpi
from flexslurm.slurm.reasons import explain, is_held, refusal
from flexslurm.slurm.records import optional
from flexslurm.slurm.serve import read_components
from flexslurm.slurm.site_check import check_against
from flexslurm.slurm.times import told_duration

PACKAGE = Path(flexslurm.__file__).parent / "slurm"
slurmish = st.text(alphabet="abgpnush019[]()-,:=/;+_*|. \tDGIX{}\"'\n", max_size=80)
anything = st.one_of(slurmish, st.text(max_size=60))
# no blanks: the records of scontrol are split at them
word = st.text(st.sampled_from(string.ascii_letters + string.digits + "[]()-,:/+_*.@"), max_size=24)
SITE = parse_section(
    Site, "name: x\ngpu_types: {a100: {}, part: {gres: shard, gres_per_gpu: 3}}", "site.yaml"
)


@given(anything)
def test_no_text_ends_in_a_traceback(text: str) -> None:
    for read in (read_components, read_answer):
        with contextlib.suppress(FlexslurmError):
            read(text)
    for told in (parse_qos, parse_triggers, mig_slice, expand_told, optional, told_duration,
                 release_in):  # fmt: skip
        told(text)
    assert isinstance(is_held(text), bool) and isinstance(is_unavailable(text), bool)
    with contextlib.suppress(FlexslurmError):
        choose_mpi(text, text)
    explain(text)
    refusal(text)
    card_of(text)


@given(anything, anything)
def test_what_a_job_holds(nodes: str, gres: str) -> None:
    component = Component(None, "7", ("n1", "n2"), (1, 2))
    for details in (nodes, f"Nodes={nodes} CPU_IDs=0 Mem=0 GRES={gres}",
                    f"Nodes=n[1-2] CPU_IDs=0 Mem=0 GRES={gres}"):  # fmt: skip
        with contextlib.suppress(FlexslurmError):
            found = allocated_nodes(component, details, SITE)
            assert all(node.gpus >= 1 and node.name in ("n1", "n2") for node in found)


VARIABLES = (
    "SLURM_JOB_ID", "SLURM_HET_SIZE", "SLURM_JOB_NODELIST", "SLURM_JOB_CPUS_PER_NODE",
    "SLURM_JOB_NUM_NODES", "SLURM_JOB_ID_HET_GROUP_0", "SLURM_JOB_NODELIST_HET_GROUP_0",
    "SLURM_JOB_NUM_NODES_HET_GROUP_0", "SLURM_JOB_CPUS_PER_NODE_HET_GROUP_0",
)  # fmt: skip
values = st.one_of(anything, st.sampled_from(["0", "1", "2", "n[1-2]", "4(x2)"]))


@given(st.dictionaries(st.sampled_from(VARIABLES), values))
def test_any_environment_of_a_job(environ: dict[str, str]) -> None:
    with contextlib.suppress(FlexslurmError):
        found = components(environ)
        assert all(len(c.cpus) == len(c.nodes) for c in found)
    with contextlib.suppress(FlexslurmError):
        assert nodes_of_allocation(environ) >= 0


records = st.lists(
    st.fixed_dictionaries(
        {"NodeName": st.sampled_from(["n1", "n2", "m[3", ""])},
        optional={"State": word, "Gres": word, "CPUTot": word, "RealMemory": word,
                  "Partitions": word, "NodeAddr": word},
    ),
    max_size=3,
)  # fmt: skip
partitions = st.lists(
    st.fixed_dictionaries(
        {"PartitionName": st.sampled_from(["p", "q", "r s"])},
        optional={"Nodes": st.one_of(word, st.just("n[1-2]")), "State": word, "PreemptMode": word,
                  "PriorityTier": word, "GraceTime": word, "MaxTime": word, "DefaultTime": word},
    ),
    max_size=3,
)  # fmt: skip
configs = st.dictionaries(
    st.sampled_from(["KillWait", "PreemptMode", "PreemptType", "PreemptExemptTime", "ClusterName",
                     "PreemptParameters", "SLURM_VERSION"]),
    st.one_of(word, st.sampled_from(["preempt/qos", "preempt/partition_prio", "REQUEUE"])),
)  # fmt: skip


@settings(max_examples=150)
@given(records, partitions, configs, anything)
def test_any_cluster_gives_a_site_file_or_a_reason(
    nodes: list[dict[str, str]],
    parts: list[dict[str, str]],
    config: dict[str, str],
    qos: str,
) -> None:
    facts = ClusterFacts(
        tuple(map(_node_info, nodes)), tuple(map(_partition_info, parts)), config,
        tuple(parse_qos(qos)),
    )  # fmt: skip
    for info in facts.partitions:
        window_of(info, facts)
    check_against(SITE, facts)
    with contextlib.suppress(FlexslurmError):
        parse_section(Site, site_text(facts, card_of), "discovered")


def test_every_reader_of_text_is_fuzzed() -> None:
    """Public functions of the package whose first argument is text, and that read it."""
    readers = set()
    for path in sorted(PACKAGE.glob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
                arguments = node.args.args
                if arguments and arguments[0].arg in ("text", "out", "words", "reason", "library"):
                    readers.add(node.name)
    fuzzed = "".join(p.read_text() for p in Path(__file__).parent.glob("test_slurm*.py"))
    assert len(readers) > 15
    assert {name for name in readers if f"{name}" not in fuzzed} == set()
