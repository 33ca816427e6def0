"""A slurm.conf that the site file names and nobody can read is said before Slurm is asked."""

from __future__ import annotations

from pathlib import Path

import pytest
from settings_files import SERVICE, SITE

from flexslurm.cli.main import run
from flexslurm.config.check import site_with_slurm
from flexslurm.errors import ConfigError


@pytest.fixture
def site_file(tmp_path: Path) -> Path:
    """A site with a slurm.conf that is not there."""
    model = tmp_path / "models" / "small"
    model.mkdir(parents=True)
    (model / "config.json").write_text("{}")
    (tmp_path / "service.yaml").write_text(SERVICE)
    path = tmp_path / "site.yaml"
    path.write_text(f"{SITE}slurm:\n  conf: etc/slurm.conf\n")
    return path


@pytest.fixture(autouse=True)
def silent_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    def asked(*args: object, **kwargs: object) -> None:
        pytest.fail("Slurm was asked")

    monkeypatch.setattr("flexslurm.slurm.command.subprocess.run", asked)


@pytest.mark.parametrize(
    "words", ["launch {}/service.yaml --site {}/site.yaml", "site check {}/site.yaml",
              "doctor --site {}/site.yaml", "hooks status --site {}/site.yaml"],
)  # fmt: skip
def test_every_command_that_asks_slurm_names_the_place(
    words: str, site_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = site_file.parent
    assert run([word.format(folder) for word in words.split()]) == 3
    line = len(SITE.splitlines()) + 2
    told = capsys.readouterr().err
    assert f"{site_file}:{line}: slurm.conf: no file at {folder}/etc/slurm.conf" in told


def test_a_file_that_can_be_read_is_fine_and_a_folder_is_not(site_file: Path) -> None:
    conf = site_file.parent / "etc" / "slurm.conf"
    conf.parent.mkdir()
    conf.write_text("ClusterName=here\n")
    assert site_with_slurm(site_file).slurm.conf == str(conf)
    conf.unlink()
    conf.mkdir()
    with pytest.raises(ConfigError, match=r"slurm\.conf: .*cannot be read here"):
        site_with_slurm(site_file)


def test_a_file_alone_may_name_another_machine_s(
    site_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["site", "check", "--offline", str(site_file)]) in (0, 3)
    assert "no file at" not in capsys.readouterr().err
