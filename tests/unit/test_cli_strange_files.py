"""Whatever lies where a file is named: one message, a code of the table, and no traceback."""

from __future__ import annotations

from pathlib import Path

import pytest

from flexslurm.cli.main import run

SITE = """\
name: here
gpu_types: {card: {memory: 64MiB, virtual: {speed: 1.0}}}
partitions: {main: {gpu_types: [card], gpus_per_node: 2}}
"""
STRANGE = {
    "empty": b"",
    "bytes": bytes(range(256)) * 20,
    "nul": b"name: x\0y\n",
    "list": b"- 1\n- 2\n",
    "number": b"5\n",
    "doubling": b"a: &a [1]\n"
    + b"".join(b"%c: &%c [*%c, *%c]\n" % (n + 1, n + 1, n, n) for n in range(97, 108)),
    "twice": b"name: a\nname: b\n",
    "deep": b"a: " + b"[" * 700 + b"\n",
    "python": b"!!python/object/apply:os.system ['exit 1']\n",
    "utf16": "name: x\n".encode("utf-16"),
    "tabs": b"name:\tx\n\tfoo: 1\n",
    "long": b"name: " + b"x" * 100_000 + b"\n",
}
NAMED = ("directory", "loop", "dangling", "none", "/dev/null", "/proc/self/mem", "\udcff", "")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    """All of them, and a service, a site and a model as they should be."""
    where = tmp_path_factory.mktemp("strange")
    for name, data in STRANGE.items():
        (where / name).write_bytes(data)
    (where / "directory").mkdir()
    (where / "loop").symlink_to("loop")
    (where / "dangling").symlink_to("nowhere")
    (where / "site.yaml").write_text(SITE)
    (where / "service.yaml").write_text(
        f"name: t\nmodel: {{path: {tiny_model}, dtype: float64}}\n"
        "pool: [{partition: main, gpu_type: card, gpus: 2}]\n"
        "serving: {block_tokens: 16, max_context: 64}\n"
    )
    return where


def command_lines(strange: str, model: str) -> list[list[str]]:
    """Every way to name a file or a directory of ours."""
    launch = ["launch", "service.yaml", "--site", "site.yaml", "--cluster", "local", "--dry-run"]
    return [
        ["launch", strange, *launch[2:]],
        [*launch[:3], strange, *launch[4:]],
        *([*launch, "--set", f"{key}={strange}"] for key in (
            "model.path", "model.chat_template", "gateway.api_keys_file",
            "site.measured.links", "site.measured.profiles",
        )),
        ["config", "show", "--service", strange],
        ["config", "show", "--site", strange],
        ["config", "check", "--service", "service.yaml", "--site", strange],
        ["plan", "--model", strange, "--site", "site.yaml", "--pool", "card:1"],
        ["plan", "--model", model, "--site", strange, "--pool", "card:1"],
        ["plan", "--model", model, "--site", "site.yaml", "--pool", strange],
        ["model", "check", strange],
        ["model", "prepare", strange, "--out", "made"],
        ["site", "check", strange, "--offline"],
        ["script", strange, "--site", "site.yaml"],
        ["sandbox", "up", "--config", strange, "--dir", "sandbox"],
        ["status", "--service-dir", strange],
        ["logs", "--service-dir", strange],
        ["stop", "--service-dir", strange],
        ["hooks", "show", strange],
    ]  # fmt: skip


@pytest.mark.parametrize("name", [*STRANGE, *NAMED], ids=ascii)
def test_one_message_and_a_code_of_the_table(
    name: str, place: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(place)
    before = set(place.iterdir())
    for words in command_lines(name, str(tiny_model)):
        code = run(words)
        told = capsys.readouterr()
        assert code in (0, 2, 3, 4, 5, 7, 8), (words, told.err)
        if code:
            assert told.err.count("flexslurm: error: ") == 1, (words, told.err)
            assert "Errno" not in told.err and len(told.err) < 2000, (words, told.err)
        assert set(place.iterdir()) == before, words  # nothing half-made
