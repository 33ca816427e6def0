"""Every line of the admin's page, in its order, on a real Slurm."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from flexslurm.slurm.client import SlurmClient
from flexslurm.slurm.command import clean_env
from flexslurm.slurm.sandbox import Sandbox

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
# Lines that install, or set a user's shell: this installation stands for them.
NOT_HERE = ("python3 -m venv", "/opt/flexslurm/bin/pip", "export ")


def blocks(page: str) -> Iterator[str]:
    """The console blocks, without the lines that are not for here."""
    for block in re.findall(r"^```console\n(.*?)^```", page, re.MULTILINE | re.DOTALL):
        lines = [line for line in block.splitlines() if not line.startswith(NOT_HERE)]
        if lines:
            yield "\n".join(lines) + "\n"


def table_commands(page: str) -> Iterator[str]:
    """The installations of the hooks' table; the triggers wait for a SlurmUser's shell."""
    for line in re.findall(r"^\| .*? \| ([^|]*hooks install[^|]*) \|", page, re.MULTILINE):
        found = re.search(r"`(flexslurm hooks install [^`]*)`", line)
        if found is not None:
            yield found[1]


def test_the_page_works_as_it_stands(
    slurm_sandbox: Sandbox, slurm: SlurmClient, tiny_model: Path, tmp_path: Path, root: Path
) -> None:
    bin_dir = tmp_path / "opt" / "bin"
    bin_dir.mkdir(parents=True)
    program = "from flexslurm.cli.main import main; main()"
    wrapper = bin_dir / "flexslurm"
    wrapper.write_text(f'#!/bin/sh\nexec {sys.executable} -c "{program}" "$@"\n')
    wrapper.chmod(0o755)
    env = {
        **clean_env(str(slurm_sandbox.conf)), "PATH": f"{bin_dir}:{os.environ['PATH']}",
        "FLEXSLURM_SERVICES": str(tmp_path / "services"), "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(root), "FLEXSLURM_SITE": str(tmp_path / "site.yaml"),
    }  # fmt: skip
    told = {
        "/opt/flexslurm/bin": str(bin_dir), "/shared/models/SmolLM2-135M-Instruct": str(tiny_model),
        "partition: spare": "partition: scavenge", "/etc/slurm": str(tmp_path / "etc"),
        "/tmp/flexslurm-spank": str(tmp_path / "spank"),
        "}\npool:": ", dtype: float32}\nserving: {block_tokens: 16, max_context: 256}\npool:",
    }  # fmt: skip

    def run(script: str) -> str:
        for theirs, here in told.items():
            script = script.replace(theirs, here)
        done = subprocess.run(
            ["bash", "-ec", script], env=env, cwd=tmp_path, capture_output=True, text=True,
            timeout=150, check=False,
        )  # fmt: skip
        assert done.returncode == 0, script + done.stdout + done.stderr
        return done.stdout

    page = (root / "docs" / "admin.md").read_text(encoding="utf-8")
    outs = [run(block) for block in blocks(page)]
    for words in ("flexslurm", "wrote site.yaml", "fine", "ok ", "nothing was submitted"):
        assert any(words in out for out in outs), words
    assert "serves at http" in "".join(outs)
    assert "first" in run("flexslurm status first; flexslurm stop first")
    assert "#SBATCH" in run("flexslurm script service.yaml --site site.yaml")
    assert "kill_wait" in run("flexslurm config show --site $FLEXSLURM_SITE")
    installs = list(table_commands(page))
    assert len(installs) == 5
    for command in installs:
        assert "wrote" in run(command.replace(" --register", ""))
    assert "spank" in run("flexslurm hooks status")
