"""The base of everything on the wire, and the version both ends must speak; no message."""

from __future__ import annotations

import msgspec

PROTOCOL = 1


class Message(msgspec.Struct, frozen=True, tag_field="t", kw_only=True, omit_defaults=True):
    """The base of everything on the wire."""
