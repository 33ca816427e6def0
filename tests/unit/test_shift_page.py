"""The phases of a shift on pages are those of the code."""

from __future__ import annotations

from pathlib import Path

import pytest

from flexslurm.control.phase_page import diagram, state_table, with_generated
from flexslurm.control.phases import AT_DEADLINE, LEGAL, WORDS, Phase

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.mark.parametrize("name", ["docs/shift.md", "ARCHITECTURE.md"])
def test_pages_are_current(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    assert with_generated(text) == text, "run make pages"


def test_the_page_has_both() -> None:
    text = (ROOT / "docs/shift.md").read_text(encoding="utf-8")
    assert state_table() in text and diagram() in text


def test_every_phase_has_words_and_every_transition_an_arrow() -> None:
    assert set(WORDS) == set(LEGAL) == set(Phase)
    for phase, after in AT_DEADLINE.items():
        assert after in LEGAL[phase]
    assert {phase for phase in Phase if LEGAL[phase]} == set(AT_DEADLINE)
    drawn = {tuple(line.split(" : ")[0].split(" --> ")) for line in diagram().splitlines()}
    legal = {(f"    {a.name}", b.name) for a in Phase for b in LEGAL[a]}
    ends = {(f"    {a.name}", "[*]") for a in Phase if not LEGAL[a]}
    arrows = {one for one in drawn if len(one) == 2 and "[*]" not in one[0]}
    assert arrows == legal | ends


def test_a_page_that_is_out_of_date_is_seen_and_made_anew() -> None:
    page = "a\n<!-- state table -->\nsomething else\n<!-- end state table -->\nb\n"
    fresh = with_generated(page)
    assert "something else" not in fresh and state_table() in fresh
    assert fresh.startswith("a\n") and fresh.endswith("\nb\n")
    assert with_generated("nothing of it\n") == "nothing of it\n"
    with pytest.raises(ValueError, match="no '<!-- end state table -->'"):
        with_generated("<!-- state table -->\n")
