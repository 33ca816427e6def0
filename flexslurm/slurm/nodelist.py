"""Slurm's node lists (`gpu[001-003,7],login1`): expanding and compressing; asks no Slurm command.

`scontrol show hostnames` is not used: containers lack it, it waits a minute without slurm.conf, and
it accepts broken lists with exit status 0.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import product

from flexslurm.errors import SlurmError

MAX_NODES = 65536
_NOBODY = frozenset({"", "(null)", "n/a", "none", "none assigned", "unknown"})
_RANGE = re.compile(r"^(\d+)(?:-(\d+))?$", re.ASCII)
_LITERAL = re.compile(r"[^\[\]]*")
_TRAILING_NUMBER = re.compile(r"^(.*?)(\d+)$", re.ASCII | re.DOTALL)
_COUNT = re.compile(r"^(\d{1,9})(?:\(x(\d{1,9})\))?$", re.ASCII)
_SYNTAX = re.compile(r"[\[\],\s]")
_MAX_DIGITS = 18


def expand(text: str) -> list[str]:
    """The node names, each once, in the order given; empty for `(null)`, `None assigned` and such.

    Several brackets are allowed, the last varies fastest. Raises SlurmError for a broken list, for
    text after the last bracket (Slurm refuses it), and for more than 65536 names.
    """
    if text.strip().lower() in _NOBODY:
        return []
    names: dict[str, None] = {}
    for item in _items(text):
        parts = _parts(item, text)
        size = 1
        for part in parts:
            size *= len(part)
        if len(names) + size > MAX_NODES:
            raise SlurmError(f"node list '{_short(text)}' has more than {MAX_NODES} nodes")
        names.update(dict.fromkeys("".join(choice) for choice in product(*parts)))
    return list(names)


def expand_told(text: str) -> tuple[str, ...]:
    """As `expand`, for what a Slurm command printed: nothing for a list that cannot be read."""
    try:
        return tuple(expand(text))
    except SlurmError:
        return ()


def _items(text: str) -> list[str]:
    """Split at commas and blanks outside of brackets."""
    items, item, depth = [], "", 0
    for char in text:
        if depth == 0 and (char == "," or char.isspace()):
            items.append(item)
            item = ""
            continue
        depth += (char == "[") - (char == "]")
        if depth not in (0, 1):
            raise SlurmError(f"node list '{_short(text)}' has unbalanced brackets")
        item += char
    if depth:
        raise SlurmError(f"node list '{_short(text)}' has unbalanced brackets")
    return [item for item in [*items, item] if item]


def _parts(item: str, text: str) -> list[list[str]]:
    """The choices for each run of text and each bracket of one item."""
    parts: list[list[str]] = []
    rest = item
    while rest:
        literal = _LITERAL.match(rest)
        assert literal is not None
        if literal[0]:
            if parts and literal.end() == len(rest):
                raise SlurmError(
                    f"node list '{_short(text)}' has text after a closing bracket: '{literal[0]}'",
                    hint="a fast network's suffix belongs under network.suffix in the site file",
                )
            parts.append([literal[0]])
            rest = rest[literal.end() :]
        else:
            inside, _, rest = rest[1:].partition("]")
            parts.append(_numbers(inside, text))
    return parts


def _numbers(inside: str, text: str) -> list[str]:
    numbers: list[str] = []
    for piece in inside.split(","):
        match = _RANGE.match(piece.strip())
        if match is None:
            what = f"the range '{piece}'" if piece.strip() else "an empty range"
            raise SlurmError(f"node list '{_short(text)}' has {what}")
        first, last = match[1], match[2] or match[1]
        if len(last) > _MAX_DIGITS or int(last) < int(first):
            raise SlurmError(f"node list '{_short(text)}' has the range '{piece}'")
        if int(last) - int(first) >= MAX_NODES:
            raise SlurmError(f"node list '{_short(text)}' has more than {MAX_NODES} nodes")
        width = len(first)
        numbers += [f"{number:0{width}d}" for number in range(int(first), int(last) + 1)]
    return numbers


def compress(names: Iterable[str]) -> str:
    """A node list that expands to `names`, in their order, runs of numbers in brackets.

    Raises SlurmError for what cannot be a node's name.
    """
    out: list[str] = []
    prefix, numbers = "", list[str]()
    for name in names:
        if not name or _SYNTAX.search(name):
            raise SlurmError(f"'{_short(name)}' is not a node name")
        match = _TRAILING_NUMBER.match(name)
        stem, digits = (match[1], match[2]) if match else (name, "")
        if numbers and (stem != prefix or len(digits) > _MAX_DIGITS or not digits):
            out.append(_item(prefix, numbers))
            numbers = []
        if not digits or len(digits) > _MAX_DIGITS:
            out.append(name)
        else:
            prefix = stem
            numbers.append(digits)
    if numbers:
        out.append(_item(prefix, numbers))
    text = ",".join(out)
    if text.lower() in _NOBODY and text:
        raise SlurmError(f"'{text}' is how Slurm says that there is no node")
    return text


def _item(prefix: str, numbers: list[str]) -> str:
    if len(numbers) == 1:
        return prefix + numbers[0]
    ranges: list[list[str]] = []
    for digits in numbers:
        if ranges:
            first, last = ranges[-1][0], ranges[-1][-1]
            if digits == f"{int(last) + 1:0{len(first)}d}":
                ranges[-1] = [first, digits]
                continue
        ranges.append([digits])
    return f"{prefix}[{','.join('-'.join(pair) for pair in ranges)}]"


def expand_counts(text: str) -> list[int]:
    """Counts per node as in SLURM_TASKS_PER_NODE: `2(x3),1` is [2, 2, 2, 1]. Raises SlurmError."""
    counts: list[int] = []
    for piece in text.split(","):
        match = _COUNT.match(piece.strip())
        if match is None or len(counts) + int(match[2] or 1) > MAX_NODES:
            raise SlurmError(f"cannot read the counts '{_short(text)}'")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _short(text: str) -> str:
    return text if len(text) <= 80 else text[:77] + "…"
