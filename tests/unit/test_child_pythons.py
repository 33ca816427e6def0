"""Every Python that the product starts finds flexslurm where it is installed, not where it runs."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import flexslurm
from flexslurm.head.main import head_command

PACKAGE = Path(flexslurm.__file__).parent


def starts(tree: ast.AST) -> Iterator[tuple[int, str | None]]:
    """The line of every command with options for this Python, and the first of the options."""
    for node in ast.walk(tree):
        if isinstance(node, ast.List | ast.Tuple):
            for this, after in zip(node.elts, node.elts[1:], strict=False):
                if ast.unparse(this) == "sys.executable":
                    value = after.value if isinstance(after, ast.Constant) else None
                    yield node.lineno, value if isinstance(value, str) else None


def test_no_child_puts_its_working_directory_on_its_path() -> None:
    found = [
        (f"{path.relative_to(PACKAGE)}:{line}", option)
        for path in sorted(PACKAGE.rglob("*.py"))
        for line, option in starts(ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert len(found) > 10
    assert [place for place, option in found if option != "-P"] == []


def test_the_rule_sees_a_start_without_the_option() -> None:
    tree = ast.parse('a = [sys.executable, "-m", "x"]; b = (sys.executable, "-P", "-c", c)')
    assert [option for _, option in starts(tree)] == ["-m", "-P"]


def test_a_head_starts_beside_a_folder_of_that_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "flexslurm").mkdir()
    monkeypatch.delenv("PYTHONPATH", raising=False)
    argv = [*head_command(tmp_path), "--help"]
    assert argv[0] == sys.executable
    done = subprocess.run(
        argv, cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0 and "--service-dir" in done.stdout, done.stderr
