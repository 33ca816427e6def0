"""The hooks' files as they are installed."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from flexslurm.cli.hooks_commands import hooks
from flexslurm.config.schema import parse_section
from flexslurm.config.site import Site
from flexslurm.errors import ConfigError, EnvironmentFault
from flexslurm.slurm.hook_files import HOOKS, hook_named, hook_text
from flexslurm.slurm.hook_state import parse_triggers
from tests.fake_slurm import FakeSlurm

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
        for packaged, _ in hook.all_files:
            text = hook_text(packaged, site, ["/opt/flex slurm/bin/flexslurm"])
            for mark in ("FLEXSLURM", "LIMITS", "HERE", "SQUEUE", "AS_OWNER", "SERVICES"):
                assert f"@{mark}@" not in text, packaged


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
    written = path.stat()
    again = run(hooks, ["install", "epilog", "--to", str(tmp_path)])
    assert again.exit_code == 0 and f"{path} is there already" in again.output
    assert path.stat().st_ino == written.st_ino, "its owner stays, too"
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


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """A cluster whose configuration says this; returns where its files are."""
    etc = tmp_path / "etc"
    etc.mkdir()

    def make(triggers: str = "", **config: str) -> Path:
        told = {"SLURM_CONF": str(etc / "slurm.conf"), **config}
        fake = FakeSlurm({}, {}, told, triggers=triggers)
        monkeypatch.setenv("PATH", f"{fake.install(tmp_path / 'bin')}:{os.environ['PATH']}")
        return etc

    return make


def states() -> dict[str, str]:
    done = CliRunner().invoke(hooks, ["status", "--json"])
    assert done.exit_code == 0, done.output
    return {name: state for name, (state, _) in json.loads(done.output).items()}


def test_status_of_a_cluster_without_hooks(cluster: Callable[..., Path]) -> None:
    cluster(JobSubmitPlugins="lua", Prolog="/site/prolog.sh", Epilog="(null)")
    assert set(states().values()) == {"not installed"} and set(states()) == set(HOOKS)


def test_status_of_a_cluster_with_all_of_them(cluster: Callable[..., Path]) -> None:
    etc = cluster()
    run = CliRunner().invoke
    for name in HOOKS:
        assert run(hooks, ["install", name, "--to", str(etc)]).exit_code == 0
    (etc / "plugstack.conf").write_text("optional flexslurm.so services=/x\n")
    (etc / "prolog.d").mkdir()
    (etc / "prolog.sh").rename(etc / "prolog.d" / "50-flexslurm.sh")
    rows = "TRIG_ID RES_TYPE RES_ID TYPE OFFSET USER FLAGS PROGRAM\n"
    rows += f"7 node * down 0 root PERM {etc}/node-down.sh\n8 job 3 fini 0 me  /home/me/own.sh\n"
    cluster(
        rows, JobSubmitPlugins="all_partitions,lua", CliFilterPlugins="cli_filter/lua",
        PlugStackConfig=str(etc / "plugstack.conf"), Prolog=f"{etc}/prolog.d/*",
        Epilog=f"/site/e.sh,{etc}/epilog.sh", PrologSlurmctld=f"{etc}/prolog_slurmctld.sh",
        **{"EpilogSlurmctld[0]": f"{etc}/epilog_slurmctld.sh"},
    )  # fmt: skip
    assert set(states().values()) == {"installed"}
    (etc / "epilog.sh").unlink()
    assert states()["epilog"] == "not installed"  # nothing says that it was ours
    (etc / "node-down.sh").unlink()
    assert states()["strigger"] == "not installed"


def test_nothing_is_removed_that_slurm_still_runs(
    cluster: Callable[..., Path], tmp_path: Path
) -> None:
    etc = cluster(Epilog=f"{tmp_path}/etc/epilog.sh")
    run = CliRunner().invoke
    run(hooks, ["install", "epilog", "--to", str(etc)])
    refused = run(hooks, ["uninstall", "epilog", "--to", str(etc)])
    assert isinstance(refused.exception, EnvironmentFault) and (etc / "epilog.sh").exists()
    assert f"take {etc}/epilog.sh out of Epilog in slurm.conf" in (refused.exception.hint or "")
    cluster(Epilog="(null)")
    gone = run(hooks, ["uninstall", "epilog", "--to", str(etc)])
    assert gone.exit_code == 0 and not (etc / "epilog.sh").exists()
    assert run(hooks, ["uninstall", "epilog", "--to", str(etc)]).exit_code == 0
    (etc / "epilog.sh").write_text("#!/bin/sh\nthe site's own\n")
    kept = run(hooks, ["uninstall", "epilog", "--to", str(etc)])
    assert isinstance(kept.exception, EnvironmentFault) and (etc / "epilog.sh").exists()


def test_without_slurm_the_state_is_not_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert set(states().values()) == {"unknown"}


@given(st.text(max_size=300))
def test_no_list_of_triggers_is_too_strange(text: str) -> None:
    parse_triggers(text)
