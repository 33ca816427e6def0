"""The hooks' files as they are installed."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner

from flexslurm.cli.hooks_commands import hooks
from flexslurm.config.schema import parse_section
from flexslurm.config.site import Site
from flexslurm.errors import ConfigError
from flexslurm.slurm.hook_files import HOOKS, hook_named, hook_text

SITE = """\
name: x
gpu_types: {a100: {slurm_type: nvidia_a100}, l40s: {}}
partitions:
  low: {gpu_types: [a100, l40s], gpus_per_node: 4, max_walltime: 90min}
  once: {requeue: false}
slurm: {commands: {squeue: squeue.tiny}}
"""


def test_the_limits_of_the_site_file() -> None:
    text = hook_text("job_submit.lua", parse_section(Site, SITE, "s"), ["flexslurm"])
    assert (
        '["low"] = {types = {"nvidia_a100", "l40s"}, requeue = true, max_minutes = 90, '
        "gpus_per_node = 4}," in text
    )
    assert '["once"] = {types = {}, requeue = false},' in text


@pytest.mark.parametrize("site", [None, parse_section(Site, SITE, "s")])
def test_nothing_is_left_to_fill_in(site: Site | None) -> None:
    for hook in HOOKS.values():
        for packaged, _ in hook.files:
            text = hook_text(packaged, site, ["/opt/flex slurm/bin/flexslurm"])
            for mark in ("@FLEXSLURM@", "@LIMITS@", "@HERE@", "@SQUEUE@"):
                assert mark not in text, packaged


@pytest.mark.parametrize("name", [n for n, hook in HOOKS.items() if hook.executable])
def test_scripts_are_right_for_sh_and_say_nothing_without_a_service(
    name: str, tmp_path: Path
) -> None:
    for packaged, installed in HOOKS[name].files:
        path = tmp_path / installed
        path.write_text(hook_text(packaged, None, ["/nonexistent/flexslurm"]))
        path.chmod(0o755)
        subprocess.run(["sh", "-n", str(path)], check=True)
        for comment in ("", "mine", "flexslurm", "flexslurm:/nonexistent"):
            env = {"SLURM_JOB_ID": "7", "SLURM_JOB_COMMENT": comment}
            done = subprocess.run([path, "n1"], env=env, capture_output=True, check=False)
            assert (done.returncode, done.stdout) == (0, b"")


def test_installing_keeps_what_is_there(tmp_path: Path) -> None:
    run = CliRunner().invoke
    first = run(hooks, ["install", "epilog", "--to", str(tmp_path)])
    assert first.exit_code == 0 and f"Epilog={tmp_path}/epilog.sh" in first.output
    path = tmp_path / "epilog.sh"
    assert os.access(path, os.X_OK) and "--source epilog" in path.read_text()
    assert run(hooks, ["install", "epilog", "--to", str(tmp_path)]).exit_code == 0
    path.write_text("the site's own\n")
    second = run(hooks, ["install", "epilog", "--to", str(tmp_path)])
    assert second.exit_code != 0 and path.read_text() == "the site's own\n"
    assert run(hooks, ["install", "epilog", "--to", str(tmp_path), "--force"]).exit_code == 0
    assert "--source epilog" in path.read_text()


def test_an_unknown_hook() -> None:
    assert hook_named("job-submit").name == "job_submit"
    with pytest.raises(ConfigError, match="no hook 'prologue'"):
        hook_named("prologue")


def test_show_prints_each(root: Path) -> None:
    for name in HOOKS:
        shown = CliRunner().invoke(
            hooks, ["show", name, "--site", str(root / "site-configs/sandbox.yaml")]
        )
        assert shown.exit_code == 0 and "==>" in shown.output
