"""Pilots as steps of one heterogeneous allocation, from inside its batch step."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from submitter_suite import TASK, Diary, wait

from flexslurm.slurm.client import SlurmClient
from flexslurm.slurm.sandbox import Sandbox

BATCH = """\
import json, os, sys, time
from pathlib import Path
from flexslurm.config.schema import load_section
from flexslurm.config.site import Site
from flexslurm.errors import CapacityError
from flexslurm.slurm.allocation import AllocationSubmitter
from flexslurm.slurm.script import HeadSpec, PilotSpec

where, site_file, task = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
site = load_section(Site, site_file)
submitter = AllocationSubmitter(site, where / "svc")
say = {"pool": [(f.gpu_type, f.gpus, f.count) for f in submitter.pool()], "jobs": []}

def spec(name, gpu_type, gpus):
    command = (sys.executable, "-IS", task, str(where / "diary"), "stay")
    env = {"GREETING": name}
    return PilotSpec(name, None, gpu_type, gpus, 1, None, command, where / "logs", env)

for pilot in (spec("p-1", "a100", 2), spec("p-2", "l40s", 1), spec("p-3", "l40s", 1)):
    say["jobs"].append(submitter.submit(pilot))
try:
    submitter.submit(spec("p-4", "a100", 2))
except CapacityError as error:
    say["refused"] = error.message
ask = f"echo $SLURM_JOB_ID $SLURM_HET_SIZE $SLURM_MEM_PER_CPU > {where}/head; sleep 3"
head = submitter.submit(HeadSpec("head", ("sh", "-c", ask), where / "logs", {}))
(where / "said.json.part").write_text(json.dumps(say))
(where / "said.json.part").rename(where / "said.json")
info = submitter.wait(head, every_s=0.1)
say["head"] = str(info.state)
say["states"] = {job: str(i.state) for job, i in submitter.states(say["jobs"]).items()}
submitter.cancel(say["jobs"])
say["ends"] = [str(submitter.wait(job, every_s=0.1).state) for job in say["jobs"]]
(where / "end.json.part").write_text(json.dumps(say))
(where / "end.json.part").rename(where / "end.json")
"""


@pytest.mark.slow
def test_pilots_in_a_heterogeneous_job(
    slurm_sandbox: Sandbox, slurm: SlurmClient, root: Path, tmp_path: Path
) -> None:
    (tmp_path / "batch.py").write_text(BATCH)
    (tmp_path / "task.py").write_text(TASK)
    script = tmp_path / "het.sh"
    script.write_text(
        "#!/bin/bash\n"
        f"#SBATCH --output={tmp_path}/out.log\n"
        "#SBATCH --nodes=1 --gres=gpu:a100:2 --partition=scavenge\n"
        "#SBATCH hetjob\n"
        "#SBATCH --nodes=2 --gres=gpu:l40s:1 --partition=scavenge\n"
        f"export PYTHONPATH={root}\n"
        f"exec {sys.executable} {tmp_path}/batch.py {tmp_path} {slurm_sandbox.site_file} "
        f"{tmp_path}/task.py\n"
    )
    job_id = slurm.submit(script).base
    diary = Diary(tmp_path / "diary")
    wait(lambda: (tmp_path / "said.json").exists(), 30, "the batch step has started its pilots")
    wait(lambda: len(diary.of("start")) == 3, 20, "three tasks run")
    said = json.loads((tmp_path / "said.json").read_text())
    assert said["pool"] == [["a100", 2, 1], ["l40s", 1, 2]]
    assert "no free node for p-4" in said["refused"]
    started = {(line["env"], str(line["node"])[:-1]) for line in diary.of("start")}
    assert started == {("p-1", "a100n"), ("p-2", "l40n"), ("p-3", "l40n")}
    assert len({line["node"] for line in diary.of("start")}) == 3
    assert job_id in {line["job"] for line in diary.of("start")}
    wait(lambda: (tmp_path / "end.json").exists(), 30, "the batch step ends")
    end = json.loads((tmp_path / "end.json").read_text())
    assert end["head"] == "COMPLETED" and set(end["states"].values()) == {"RUNNING"}
    assert (tmp_path / "head").read_text() == f"{job_id} 2\n"
    assert end["ends"] == ["CANCELLED"] * 3


def test_serve_sh_is_one_heterogeneous_job(
    slurm_sandbox: Sandbox, slurm: SlurmClient, root: Path, tmp_path: Path
) -> None:
    """Slurm takes the script as it is; a stand-in for flexslurm notes how it is called."""
    stand_in = tmp_path / "flexslurm"
    stand_in.write_text(f'#!/bin/sh\necho "$SLURM_HET_SIZE $@" > {tmp_path}/called\n')
    stand_in.chmod(0o755)
    slurm.env["PATH"] = f"{tmp_path}:{slurm.env['PATH']}"
    script = root / "sbatch" / "serve.sh"
    done = slurm.call("sbatch", "--parsable", str(script), "my service.yaml", cwd=tmp_path)
    job_id = done.out.strip()
    wait(lambda: slurm.jobs([job_id])[job_id].state.over, 30, "it ends")
    wanted = "2 launch my service.yaml --cluster allocation\n"
    assert (tmp_path / "called").read_text() == wanted
