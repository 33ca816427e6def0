"""What `flexslurm plan` is given wrong: one clear message, its code, and nothing half-made."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest

from flexslurm.cli.main import run
from flexslurm.config.bounded import read_text
from flexslurm.config.whole import whole
from flexslurm.planner.files import open_table
from flexslurm.wire.files import write_atomically

BASE = ("plan", "--model", "llama-3.1-8b", "--pool", "l4:1x2")
LOAD = (*BASE, "--capacity", "rate=1/s")
PROFILE = """# model=llama-3.1-8b gpu_type=l4 tp=1 dtype=bfloat16
phase,layers,batch,context,seconds
decode,4,1,128,0.01
decode,4,8,128,0.012
prefill,4,1,128,0.02
"""
LINKS = "source,target,bytes,seconds\na,b,1,0.00001\na,b,1000000,0.001\n"
SITE = "name: t\ngpu_types:\n  l4: {model: l4}\n"
CONFIG = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 100,
}  # fmt: skip


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def refused(capsys: pytest.CaptureFixture[str], code: int, words: str, *line: str) -> None:
    """The line ends with this code and one message, which says this, and makes no file."""
    before = {path: path.stat().st_mtime_ns for path in Path().iterdir()}
    assert run(line) == code, capsys.readouterr().err
    told = capsys.readouterr().err
    assert told.count("flexslurm: error: ") == 1 and words in told, told
    assert "Errno" not in told and len(told) < 1500, told
    assert {path: path.stat().st_mtime_ns for path in Path().iterdir()} == before


# --------------------------------------------------------------------------------- the options


@pytest.mark.parametrize(
    ("line", "code", "words"),
    [
        ((*BASE[:3], "--pool", ","), 2, "--pool names no GPUs"),
        ((*BASE, "--explain", ""), 2, "--explain names no GPUs"),
        ((*BASE, "--explain", "l4:1x0"), 2, "--explain names no GPUs"),
        ((*BASE, "--what-if", "+"), 2, "--what-if names no GPUs"),
        ((*BASE, "--price", "l4=1"), 2, "--price is for the cost of --capacity"),
        ((*BASE, "--picture", "x.png"), 2, "--picture is for the curve of --capacity"),
        ((*LOAD, "--picture", "x.exe"), 2, "--picture ends in one of .png, .svg, .pdf"),
        ((*LOAD, "--picture", ""), 2, "--picture ends in one of"),
        ((*LOAD, "--picture", "no/x.png"), 8, "there is no such directory"),
        ((*LOAD, "--what-if", "+l4:1"), 2, "--capacity and --what-if cannot be given together"),
        ((*LOAD, "--explain", "l4:1"), 2, "--capacity and --explain cannot"),
        ((*LOAD, "--workload", "in=5"), 2, "--capacity and --workload cannot"),
        ((*LOAD, "--out", "x"), 2, "--capacity and --out cannot"),
        ((*LOAD, "--every"), 2, "--capacity and --every cannot"),
        ((*LOAD, "--price", "l4=1,l4=2"), 3, "'l4' is given twice"),
        ((*BASE, "--slo", "tpot=1s,tpot=2s"), 3, "--slo: 'tpot' is given twice"),
        ((*BASE, "--workload", "in=²"), 3, "must be a whole number of tokens"),
        ((*BASE, "--workload", f"in={'9' * 5000}"), 3, "must be a whole number of tokens"),
        ((*BASE, "--workload", f"rate={'9' * 400}"), 3, "cannot read the rate"),
        ((*BASE, "--workload", "rate=١"), 3, "cannot read the rate"),
        ((*BASE, "--memory-fraction", "nan"), 2, "is not a number"),
        ((*BASE[:3], "--pool", f"l4:{'9' * 5000}"), 3, "cannot read the pool item 'l4:999"),
        ((*BASE[:3], "--pool", "l4:１"), 3, "cannot read the pool item"),
        ((*BASE[:3], "--pool", "a" * 90 + ":1"), 3, "the GPU catalogue has no"),
        ((*BASE, "--out", "no/such/t"), 8, "there is no such directory"),
        ((*BASE, "--out", "."), 8, "Is a directory"),
        ((*BASE, "--profile", "."), 3, "there is no profile (*.csv) in it"),
    ],
    ids=lambda value: ascii(value)[-60:] if isinstance(value, tuple) else "",
)
def test_options_that_say_nothing_or_too_much(
    line: tuple[str, ...], code: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    refused(capsys, code, words, *line)


@pytest.mark.parametrize(
    "line",
    [
        ("profile", "m", "--minutes", "nan"),
        ("probe", "--timeout", "nan"),
        ("doctor", "--timeout", "nan"),
        ("sandbox", "up", "--timeout", "nan"),
        ("profile", "m", "--minutes", "inf"),
        ("probe", "--timeout", "inf"),
        ("sandbox", "up", "--timeout", "inf"),
    ],
    ids=lambda line: f"{line[0]} {line[-1]}",
)
def test_what_is_not_finite_is_no_number_to_any_command(
    line: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(line) == 2
    told = capsys.readouterr().err
    assert told.count("flexslurm: error: ") == 1 and "is not a number" in told, told


def test_help_tells_no_range_where_there_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(("notify", "--help")) == 0
    told = capsys.readouterr().out
    assert "--grace S" in told and "None" not in told, told


def test_a_model_larger_than_the_pool_and_than_what_is_added(
    capsys: pytest.CaptureFixture[str],
) -> None:
    line = ("plan", "--model", "llama-3.1-405b", "--pool", "l4:1")
    assert run((*line, "--what-if", "+l4:1")) == 5, "it fits neither"
    assert "bytes short" in capsys.readouterr().err
    assert run((*line, "--what-if", "+h100:8x2")) == 0, "it fits then"


# --------------------------------------------------------------------------------------- files


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("0.012", "nan", "p.csv:4: seconds must be a finite number"),
        ("0.012", "-1", "p.csv:4: seconds must be a finite number"),
        (",0.012", "", "p.csv:4: 5 values are expected, not 4"),
        ("decode,4,8", "decode,4,²", "p.csv:4: batch must be a whole number of at least 0"),
        ("decode,4,8", "decode,4," + "9" * 5000, "p.csv:4: batch must be a whole number"),
        ("decode,4,8", '"decode,4,8', "p.csv:4: not CSV"),
        ("decode,4,8", "x" * 140_000 + ",4,8", "p.csv:4: not CSV"),
        ("tp=1", "tp=²", "p.csv:1: tp must be a whole number"),
        ("gpu_type=l4", "gpu_type=nope", "no GPU type 'nope'"),
    ],
)
def test_malformed_profiles(
    old: str, new: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("p.csv").write_text(PROFILE.replace(old, new, 1), encoding="utf-8")
    refused(capsys, 3, words, *BASE, "--profile", "p.csv")


def test_a_mark_of_byte_order_is_passed_over(capsys: pytest.CaptureFixture[str]) -> None:
    Path("p.csv").write_text("\ufeff" + PROFILE.replace("\n", "\r\n"), encoding="utf-8")
    assert run((*BASE, "--profile", "p.csv")) == 0
    assert "step times measured: l4 tp1" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (LINKS.replace("a,b,1000", "c,d,1000"), "between the same two nodes"),
        (LINKS.replace("1000000", "²"), "l.csv:3: bytes must be a whole number"),
        (LINKS.replace("1000000", "9" * 5000), "l.csv:3: bytes must be a whole number"),
        (LINKS.replace("a,b,1,", '"a,b,1,'), "l.csv:2: not CSV"),
        (LINKS.replace("0.001", "nan"), "l.csv:3: seconds must be a finite number"),
    ],
)
def test_malformed_links(text: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("l.csv").write_text(text, encoding="utf-8")
    refused(capsys, 3, words, *BASE, "--links", "l.csv")


@pytest.mark.parametrize(
    ("option", "code"), [("--model", 4), ("--profile", 3), ("--links", 3), ("--site", 3)]
)
def test_a_file_without_an_end_is_not_read_to_it(
    option: str, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    refused(capsys, code, "it has more than", *BASE, option, "/dev/zero")


def test_reading_is_bounded_and_as_text(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"\xef\xbb\xbfa\r\nb\rc\n")
    assert read_text(path, 10) == "a\nb\nc\n"
    with pytest.raises(OSError, match="more than 9 bytes"):
        read_text(path, 9)


@pytest.mark.parametrize("text", ["", "-1", "+1", "1.0", "²", "١", "1e3", "9" * 19, "nan"])
def test_what_is_no_whole_number(text: str) -> None:
    assert whole(text) is None
    assert whole(" 007 ") == 7 and whole("9" * 18) == 10**18 - 1


@pytest.mark.parametrize("virtual", ["", ", virtual: {}"])
def test_no_memory_at_all_is_said_to_be_that(
    virtual: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("site.yaml").write_text(SITE.replace("model: l4", f"model: l4, memory: 0{virtual}"))
    refused(capsys, 3, "gpu_types.l4.memory: it must be above 0", *BASE, "--site", "site.yaml")


def test_a_card_too_slow_to_give_anything_is_not_said_to_be_too_small(
    capsys: pytest.CaptureFixture[str],
) -> None:
    Path("site.yaml").write_text(SITE.replace("model: l4", "model: l4, flops: 1"))
    refused(capsys, 5, "less than a thousandth of a token", *BASE, "--site", "site.yaml")


# ------------------------------------------------------------------------------- what is written


@pytest.mark.parametrize("link", [False, True])
def test_what_is_no_regular_file_is_never_replaced(
    link: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """As root, a device would be gone for everybody."""
    os.mkfifo("pipe")
    name = "pipe"
    if link:
        Path("link").symlink_to("pipe")
        name = "link"
    with pytest.raises(OSError, match="not a regular file"):
        write_atomically(Path(name), b"x")
    refused(capsys, 8, "it is not a regular file", *BASE, "--out", name)
    assert stat.S_ISFIFO(Path("pipe").stat().st_mode)
    assert {path.name for path in Path().iterdir()} == {"pipe", name}


def test_a_link_stays_and_its_file_is_replaced(place: Path) -> None:
    (place / "far").mkdir()
    (place / "far" / "t").write_bytes(b"old")
    (place / "link").symlink_to("far/t")
    assert run((*BASE, "--out", "link")) == 0
    assert (place / "link").is_symlink()
    assert len(open_table(place / "far" / "t")) == 3
    assert [path.name for path in (place / "far").iterdir()] == ["t"]


def test_a_link_into_nowhere_is_refused_before_anything_is_planned(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (place / "link").symlink_to("no/such/t")
    monkeypatch.setattr("flexslurm.planner.tabulate.make_table", lambda *_: pytest.fail("planned"))
    assert run((*BASE, "--out", "link")) == 8
    assert "there is no such directory" in capsys.readouterr().err


def test_a_link_is_written_to_where_its_own_directory_cannot_be(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (place / "far").mkdir()
    (place / "link").symlink_to("far/t")
    allowed = os.access
    monkeypatch.setattr("os.access", lambda path, mode: Path(path) != place and allowed(path, mode))
    assert run((*BASE, "--out", "link")) == 0 and len(open_table(place / "far" / "t")) == 3


def test_an_interrupted_plan_leaves_the_old_table(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (place / "t").write_bytes(b"old")

    def interrupted(*_: object) -> bytes:
        raise KeyboardInterrupt

    monkeypatch.setattr("flexslurm.planner.tabulate.make_table", interrupted)
    assert run((*BASE, "--out", "t")) == 130
    assert (place / "t").read_bytes() == b"old" and [p.name for p in place.iterdir()] == ["t"]
    assert "Traceback" not in capsys.readouterr().err


def test_a_node_of_very_many_gpus_is_planned(place: Path) -> None:
    (place / "config.json").write_text(json.dumps(CONFIG))
    assert run(("plan", "--model", "config.json", "--pool", "l4:256")) == 0


def test_a_workload_longer_than_the_model_takes_is_said_to_be_cut(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run((*BASE, "--workload", "in=999999999,out=3")) == 0
    assert "planned for 131,071 in and 1 out" in capsys.readouterr().out
    assert run((*BASE, "--workload", "in=500,out=3")) == 0
    assert "planned for" not in capsys.readouterr().out
