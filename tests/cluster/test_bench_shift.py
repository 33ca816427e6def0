"""`flexslurm bench shift` as a user runs it: real services, real shifts, a list of figures."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from flexslurm.cli.main import run

ASKED = {
    "from", "to", "tokens_equal", "longest_extra_gap_s", "decode_step_s", "bytes_moved",
    "bytes_optimal", "transfer_s", "link_bytes_per_s", "recompute_s", "cold_restart_s",
}  # fmt: skip
FURTHER = {
    "mode", "undisturbed_extra_gap_s", "gap_steps", "pause_s", "drain_s", "last_move_s",
    "expected_pause_s", "expected_transfer_s", "idle_link_bytes_per_s", "transfer_to_link",
    "gap_to_recompute", "gap_to_restart", "gap_steps_beyond_move",
}  # fmt: skip


@pytest.mark.long  # it measures: on a busy machine its streams may end before a shift does
@pytest.mark.cluster
@pytest.mark.timeout(1200)
def test_a_quick_bench_gives_every_figure_of_every_shift(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "shifts.json"
    code = run(["bench", "shift", "--quick", "--json", str(file)])
    shown = capsys.readouterr()
    assert code == 0, shown.err
    shifts = json.loads(file.read_text())
    assert [shift["mode"] for shift in shifts] == ["beside"] * 3 + ["park"] * 2
    for shift in shifts:
        assert shift.keys() == ASKED | FURTHER
        assert f"{shift['from']}  ⇒  {shift['to']}" in shown.out
        assert shift["from"] != shift["to"] and shift["tokens_equal"]
        figures = [shift[key] for key in (ASKED | FURTHER) - {"from", "to", "mode"}]
        assert all(math.isfinite(value) and value >= 0 for value in figures)
        assert 0 < shift["bytes_optimal"] == shift["bytes_moved"], "also where KV was parked"
        assert shift["longest_extra_gap_s"] < shift["cold_restart_s"]
        assert shift["decode_step_s"] > 0 and shift["link_bytes_per_s"] > 0
        parts_s = shift["drain_s"] + shift["last_move_s"]
        assert parts_s <= shift["pause_s"] + 0.001
