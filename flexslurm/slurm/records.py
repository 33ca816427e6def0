"""Records as `scontrol show` prints them: `Key=Value` pairs whose values may hold anything."""

from __future__ import annotations

import re

# A key starts a line or follows blanks. Values hold blanks, '=' and ','; only a known form of word
# before '=' starts the next pair.
_PAIR = re.compile(r"(?:^|(?<=\s))([A-Za-z][A-Za-z0-9_/:.-]*)=")
_SETTING = re.compile(r"^(\S[^=]*?)\s*=\s?(.*)$")


def parse_records(text: str, first_key: str) -> list[dict[str, str]]:
    """All records; each begins with `first_key=`, on one line (`-o`) or on several.

    The first value of a key counts, so that free text at the end cannot overrule a field. Never
    raises: lines before the first record (banners) are left out.
    """
    starts = [m.start() for m in re.finditer(rf"(?m)^[ \t]*{re.escape(first_key)}=", text)]
    ends = [*starts[1:], len(text)] if starts else []
    return [_pairs(text[start:end]) for start, end in zip(starts, ends, strict=True)]


def _pairs(text: str) -> dict[str, str]:
    found: dict[str, str] = {}
    marks = list(_PAIR.finditer(text))
    for mark, following in zip(marks, [*marks[1:], None], strict=True):
        end = len(text) if following is None else following.start()
        found.setdefault(mark[1], text[mark.end() : end].strip())
    return found


def parse_settings(text: str) -> dict[str, str]:
    """`scontrol show config`: `Key = Value` lines."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        match = _SETTING.match(line)
        if match is not None and not line.startswith("Configuration data"):
            found.setdefault(match[1], match[2].strip())
    return found


def optional(value: str | None) -> str | None:
    """None for Slurm's several ways to say nothing."""
    if value is None or value.strip().lower() in ("", "(null)", "n/a", "none", "null"):
        return None
    return value
