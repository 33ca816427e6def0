"""Which ranks a link measurement starts, and what it says when MPI or Slurm lets it down."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from flexslurm.config.schema import parse_section
from flexslurm.config.site import Site
from flexslurm.errors import DeadlineExceeded, EnvironmentFault, SlurmError
from flexslurm.slurm import probing
from flexslurm.slurm.link_probe import ProbeResult, Timing, pairs_of
from flexslurm.slurm.probing import ProbeOptions, choose_mpi, srun_options
from flexslurm.slurm.times import format_duration

LISTED = "MPI plugin types are...\n\tpmix\n\tnone\n\tpmi2\nspecific pmix plugin versions: pmix_v4\n"
SITE = parse_section(
    Site,
    "{name: s, gpu_types: {a: {memory: 1GiB, virtual: {}}}, partitions: "
    "{batch: {gpu_types: [a], account: proj, qos: low, sbatch_args: [--comment=x]}}}",
    "site.yaml",
)
OPTIONS = ProbeOptions(nodes=4, pairs=9, timeout_s=60.0, partition="batch", nodelist="n[1-4]")


def test_each_library_gets_its_protocol() -> None:
    assert choose_mpi("MPICH", LISTED) == "pmi2"
    assert choose_mpi("Open MPI", LISTED) == "pmix"
    assert choose_mpi("MPICH", "MPI plugin types are...\n\tcray_shasta\n\tnone\n") == "cray_shasta"
    with pytest.raises(EnvironmentFault, match="MPICH"):
        choose_mpi("MPICH", "MPI plugin types are...\n\tnone\n")


def test_a_job_of_its_own_is_asked_for_as_the_site_wants() -> None:
    options = srun_options(SITE, OPTIONS, "pmi2", {})
    assert {"--mpi=pmi2", "--nodes=4", "--ntasks=4", "--nodelist=n[1-4]"} <= set(options)
    assert {"--partition=batch", "--account=proj", "--qos=low", "--comment=x"} <= set(options)
    assert f"--time={format_duration(120)}" in options
    assert not any(option.startswith("--jobid") for option in options)


def test_inside_a_job_it_is_a_step() -> None:
    options = srun_options(SITE, OPTIONS, "pmi2", {"SLURM_JOB_ID": "7"})
    assert {"--jobid=7", "--overlap"} <= set(options)
    assert not any(o.startswith(("--partition", "--account", "--time")) for o in options)


def test_all_pairs_or_a_sample_with_every_rank() -> None:
    assert pairs_of(4, 64) == [(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)]
    sample = pairs_of(40, 64)
    assert len(sample) == 64 == len(set(sample))
    assert {rank for pair in sample for rank in pair} == set(range(40))
    assert sample == pairs_of(40, 64)


def answer_of(code: str, timeout_s: float = 60.0) -> tuple[ProbeResult, list[str]]:
    said: list[str] = []
    argv = [sys.executable, "-c", code]
    return probing._answer(argv, {}, timeout_s, said.append), said


def test_the_answer_is_read_and_progress_said() -> None:
    import msgspec

    wanted = ProbeResult("MPICH", 2, (Timing("a", "b", 1, 1e-6),))
    line = msgspec.json.encode(wanted).decode()
    code = f"import time; print('\"half\"', flush=True); time.sleep(0.5); print({line!r})"
    found, said = answer_of(code)
    assert found == wanted
    assert said == ["half"]


def test_an_error_of_the_ranks_is_told_with_its_hint() -> None:
    with pytest.raises(EnvironmentFault, match="no MPI") as caught:
        answer_of("""print('{"error": "no MPI here", "hint": "get one"}')""")
    assert caught.value.hint == "get one"


def test_no_answer_gives_the_last_words() -> None:
    with pytest.raises(SlurmError, match=r"exit status 3.*invalid partition"):
        answer_of("import sys; print('srun: invalid partition', file=sys.stderr); sys.exit(3)")


def test_a_launcher_that_does_not_end_is_ended() -> None:
    with pytest.raises(DeadlineExceeded, match="did not end"):
        answer_of("import time; time.sleep(60)", timeout_s=0.5)


def test_no_mpi_at_all(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MPI4PY_LIBMPI", str(tmp_path / "libmpi.so"))
    with pytest.raises(EnvironmentFault, match="no MPI for mpi4py") as caught:
        probing.library_name()
    assert caught.value.hint is not None and "flexslurm[probe]" in caught.value.hint
