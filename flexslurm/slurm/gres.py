"""Slurm's GRES strings (`gpu:a100:4(IDX:0-3)`, `gres/gpu:a100=4`); asks nothing."""

from __future__ import annotations

import re
from dataclasses import dataclass

from flexslurm.errors import SlurmError

_NOTHING = frozenset({"", "(null)", "n/a", "none", "null"})
_COUNT = re.compile(r"^(\d{1,15})([KkMmGgTtPp]?)$", re.ASCII)
_SCALE = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40, "p": 2**50}
_DETAIL = re.compile(r"\(([A-Za-z_]+):([^()]*)\)")
_MIG = re.compile(r"(^|[_-])\d+[gc]\.\d+(gb|c)?", re.IGNORECASE)
_MAX_INDEX = 4096


@dataclass(frozen=True, slots=True)
class Gres:
    """Some number of one generic resource; `idx` are the devices, where they are told."""

    name: str
    type: str | None
    count: int
    idx: tuple[int, ...] = ()
    sockets: str | None = None

    @property
    def whole_gpus(self) -> int:
        """GPUs that a tensor-parallel group may take: neither MIG slices nor shares of one."""
        if self.name != "gpu" or (self.type is not None and _MIG.search(self.type)):
            return 0
        return self.count


def parse_gres(text: str) -> list[Gres]:
    """All entries of a GRES string of any release; empty for `(null)`, `N/A` and such.

    Reads `gpu:4`, `gpu:a100:4(S:0-1)`, `gpu:a100:3(IDX:0,4-5)`, `gres:gpu:a100:2`,
    `gres/gpu:a100=2` and `gpu:no_consume:4`. Raises SlurmError for anything else.
    """
    if text.strip().lower() in _NOTHING:
        return []
    return [_entry(item, text) for item in _split(text) if item.strip().lower() not in _NOTHING]


def _split(text: str) -> list[str]:
    """Split at commas outside of parentheses: those in (IDX:0,4-5) separate nothing."""
    items, item, depth = [], "", 0
    for char in text:
        depth = max(0, depth + (char == "(") - (char == ")"))
        if char == "," and depth == 0:
            items.append(item)
            item = ""
        else:
            item += char
    return [*items, item]


def _entry(item: str, text: str) -> Gres:
    details = {key.upper(): value for key, value in _DETAIL.findall(item)}
    plain = item.partition("(")[0].strip()
    for prefix in ("gres:", "gres/"):
        plain = plain.removeprefix(prefix)
    if "/" in plain:
        raise SlurmError(
            f"cannot read the GRES '{item.strip()}'",
            hint=f"write {plain.replace('/', ':')}",
        )
    body, equals, number = plain.partition("=")
    words = [word for word in body.split(":") if word != "no_consume"]
    if equals:
        words.append(number)
    elif len(words) == 1 or not _COUNT.match(words[-1]):
        words.append("1")
    count = _COUNT.match(words[-1])
    if count is None or not words[0] or len(words) > 3 or "" in words:
        raise SlurmError(f"cannot read the GRES '{item.strip()}' in '{text[:80]}'")
    return Gres(
        name=words[0],
        type=words[1] if len(words) == 3 else None,
        count=int(count[1]) * _SCALE[count[2].lower()],
        idx=_indices(details.get("IDX", "")),
        sockets=details.get("S"),
    )


def _indices(text: str) -> tuple[int, ...]:
    """`0,4-5` as numbers; empty for `N/A`, which idle nodes print, and for what is cut off."""
    found: list[int] = []
    for piece in text.split(","):
        first, _, last = piece.strip().partition("-")
        if _whole(first) and _whole(last or first):
            low, high = int(first), int(last or first)
            if high < _MAX_INDEX:
                found += range(low, high + 1)
    return tuple(found)


def _whole(text: str) -> bool:
    return text.isascii() and text.isdigit()


def gpus_of(entries: list[Gres]) -> dict[str | None, int]:
    """Whole GPUs by type."""
    total: dict[str | None, int] = {}
    for entry in entries:
        if entry.whole_gpus:
            total[entry.type] = total.get(entry.type, 0) + entry.whole_gpus
    return total
