"""What stands before the API: keys, body size, request ids, counts; never reads what is asked."""

from __future__ import annotations

import hashlib
import hmac
import os
import stat
import uuid
from collections.abc import Collection
from pathlib import Path
from typing import Protocol

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from flexslurm.errors import ConfigError, Unauthorized
from flexslurm.gateway.problems import HttpProblem, http_error, request_error

METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
"""Counted by name; a client may write any word, and each would be a series of its own."""
OPEN_PATHS = frozenset({"/health", "/metrics", "/version"})
"""Asked by load balancers and scrapers, which have no key."""
REQUEST_ID = "flexslurm.request_id"


def load_api_keys(path: Path) -> frozenset[str]:
    """One key a line; empty lines and lines that begin with # are left out.

    Raises ConfigError if the file is missing, holds no key, or could be read by others.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise ConfigError(f"cannot open it: {error.strerror}", file=str(path)) from error
    try:
        _check_private(os.fstat(descriptor), path)
        with os.fdopen(os.dup(descriptor), "rb") as file:
            lines = file.read().splitlines()
    except OSError as error:
        raise ConfigError(f"cannot read it: {error.strerror}", file=str(path)) from error
    finally:
        os.close(descriptor)
    keys: set[str] = set()
    for number, line in enumerate(lines, 1):
        key = line.strip()
        if not key or key.startswith(b"#"):
            continue
        if not all(0x21 <= byte < 0x7F for byte in key):
            raise ConfigError(
                "a key is printable ASCII without spaces", file=str(path), line=number
            )
        keys.add(key.decode("ascii"))
    if not keys:
        raise ConfigError("it holds no key", file=str(path))
    return frozenset(keys)


def _check_private(status: os.stat_result, path: Path) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise ConfigError("not a file", file=str(path))
    if status.st_mode & 0o077:
        mode = stat.S_IMODE(status.st_mode)
        raise ConfigError(
            f"others can read these keys (mode {mode:04o})",
            file=str(path),
            hint=f"chmod 600 {path}",
        )


class KeyRing:
    """The keys, compared in a time that does not depend on how much of a guess is right."""

    def __init__(self, keys: Collection[str]) -> None:
        self._digests = tuple(_digest(key.encode()) for key in sorted(keys))

    def __bool__(self) -> bool:
        return bool(self._digests)

    def admits(self, authorization: str | None) -> bool:
        """Whether an Authorization header carries one of the keys."""
        scheme, _, key = (authorization or "").partition(" ")
        given = _digest(key.strip().encode("utf-8", "surrogateescape"))
        found = False
        for digest in self._digests:  # all of them, whichever matches
            found |= hmac.compare_digest(digest, given)
        return found and scheme.lower() == "bearer"


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


class HttpCounter(Protocol):
    """Counts requests; the metrics do."""

    def http(self, method: str, path: str, status: int) -> None: ...


class Gate:
    """ASGI middleware in front of all routes."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        keys: KeyRing,
        body_bytes: int,
        counter: HttpCounter,
        known_paths: Collection[str],
    ) -> None:
        self._app = app
        self._keys = keys
        self._body_bytes = body_bytes
        self._counter = counter
        self._known_paths = frozenset(known_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = uuid.uuid4().hex
        scope[REQUEST_ID] = request_id
        send = self._noting(scope, send, request_id)
        headers = Headers(scope=scope)
        guarded = bool(self._keys) and scope["path"] not in OPEN_PATHS
        if guarded and not self._keys.admits(headers.get("authorization")):
            refusal = Unauthorized(
                "the API key is missing or wrong",
                hint="send it in the header 'Authorization: Bearer KEY'",
            )
            await request_error(refusal)(scope, receive, send)
            return
        length = headers.get("content-length", "")
        if length.isdigit() and int(length[:20]) > self._body_bytes:
            response = http_error(self._too_large(), scope["path"], scope["method"])
            await response(scope, receive, send)
            return
        await self._app(scope, self._bounded(receive), send)

    def _too_large(self) -> HttpProblem:
        return HttpProblem(413, f"the body is larger than {self._body_bytes} bytes")

    def _bounded(self, receive: Receive) -> Receive:
        """Count what comes without a declared length, too."""
        taken = 0

        async def bounded() -> Message:
            nonlocal taken
            message = await receive()
            taken += len(message.get("body", b""))
            if taken > self._body_bytes:
                raise self._too_large()
            return message

        return bounded

    def _noting(self, scope: Scope, send: Send, request_id: str) -> Send:
        async def noting(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["x-request-id"] = request_id
                path = scope["path"] if scope["path"] in self._known_paths else "other"
                method = scope["method"] if scope["method"] in METHODS else "other"
                self._counter.http(method, path, message["status"])
            await send(message)

        return noting
