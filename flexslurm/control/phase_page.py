"""The phases of a shift as a table and a diagram in Markdown, from the code's own tables.

Writes no file.
"""

from __future__ import annotations

from collections.abc import Iterator

from flexslurm.control.phases import AT_DEADLINE, LEGAL, WORDS, Phase


def state_table() -> str:
    """One row a phase: what happens, what the old gear does, and what may follow."""
    rows = [
        "| phase | what happens | the old gear | ends when | too late | next |",
        "|---" * 6 + "|",
    ]
    for phase in Phase:
        words = WORDS[phase]
        late = AT_DEADLINE.get(phase)
        cells = (
            _name(phase),
            words.happens,
            words.old_gear,
            words.ends or "-",
            _name(late) if late is not None else "-",
            ", ".join(_name(one) for one in Phase if one in LEGAL[phase]) or "-",
        )
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def diagram() -> str:
    """All legal transitions in Mermaid; what follows a deadline is marked."""
    return "\n".join(("```mermaid", "stateDiagram-v2", *_arrows(), "```"))


def _arrows() -> Iterator[str]:
    yield f"    [*] --> {_name(Phase.PREPARE)}"
    for phase in Phase:
        for after in Phase:
            if after in LEGAL[phase]:
                late = " : failed, or too late" if after is Phase.ABORT else ""
                if AT_DEADLINE.get(phase) is after and after is not Phase.ABORT:
                    late = " : done, or too late"
                yield f"    {_name(phase)} --> {_name(after)}{late}"
        if not LEGAL[phase]:
            yield f"    {_name(phase)} --> [*]"


def _name(phase: Phase) -> str:
    return phase.name


def with_generated(page: str) -> str:
    """The page with what stands between its `<!-- NAME -->` and `<!-- end NAME -->` made anew.

    Raises ValueError where a beginning has no end.
    """
    for name, text in (("state table", state_table()), ("state diagram", diagram())):
        before, mark, rest = page.partition(f"<!-- {name} -->\n")
        if not mark:
            continue
        _, end, after = rest.partition(f"<!-- end {name} -->")
        if not end:
            raise ValueError(f"'<!-- {name} -->' has no '<!-- end {name} -->'")
        page = f"{before}{mark}{text}\n{end}{after}"
    return page
