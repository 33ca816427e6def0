"""The site files that come with flexslurm are right."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from flexslurm.config.schema import load_section, parse_section
from flexslurm.config.site import Site
from flexslurm.planner.catalogue import CATALOGUE


def test_every_site_file_loads(root: Path) -> None:
    found = sorted((root / "site-configs").glob("*.yaml"))
    assert {path.name for path in found} >= {"sandbox.yaml", "example.yaml"}
    for path in found:
        site = load_section(Site, path)
        for entry in site.gpu_types.values():
            assert entry.model is None or entry.model in CATALOGUE


def test_the_page_shows_files_that_load(root: Path) -> None:
    text = (root / "site-configs" / "README.md").read_text(encoding="utf-8")
    blocks = [part.partition("```")[0] for part in text.split("```yaml\n")[1:]]
    assert blocks
    for block in blocks:
        parse_section(Site, block, "README.md")


@pytest.mark.parametrize("section", ["gpu_types", "partitions", "slurm", "head", "network"])
def test_the_example_explains_each_section(section: str, root: Path) -> None:
    text = (root / "site-configs" / "example.yaml").read_text(encoding="utf-8")
    assert section in yaml.safe_load(text)
