"""Every failure as an answer in OpenAI's form; never shows a traceback or a path of ours."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from flexslurm.errors import FlexslurmError, RequestError
from flexslurm.gateway.responses import ErrorAnswer, ErrorBody, encode

log = logging.getLogger(__name__)

RETRY_AFTER_S = 5
MAX_MESSAGE_CHARS = 2000
INTERNAL = ErrorBody("an internal error; the server's log has it", "server_error", None, "internal")

_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error"}
_CODES = {404: "not_found", 405: "method_not_allowed", 413: "body_too_large"}


class HttpProblem(HTTPException):
    """An error of HTTP itself, found where no FlexslurmError can be raised."""

    def __init__(self, status: int, message: str, *, code: str | None = None) -> None:
        super().__init__(status, message)
        self.code = code


def clean(text: str) -> str:
    """Bounded, and without lone surrogates, which JSON cannot carry."""
    text = text if len(text) <= MAX_MESSAGE_CHARS else text[:MAX_MESSAGE_CHARS] + "…"
    return text.encode("utf-8", "replace").decode()


def error_body(error: RequestError) -> ErrorBody:
    """An error as OpenAI's API tells it, its hint included."""
    message = error.message if error.hint is None else f"{error.message} ({error.hint})"
    param = None if error.param is None else clean(error.param)
    return ErrorBody(clean(message), error.error_type, param, error.code)


def answer(body: ErrorBody, status: int, headers: Mapping[str, str] | None = None) -> Response:
    return Response(
        encode(ErrorAnswer(body)), status, dict(headers or {}), media_type="application/json"
    )


def request_error(error: RequestError) -> Response:
    """The response to a request that is refused, with the headers its kind asks for."""
    headers: dict[str, str] = {}
    if error.transient:
        headers["Retry-After"] = str(RETRY_AFTER_S)
    if error.http_status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return answer(error_body(error), error.http_status, headers)


def http_error(error: HTTPException, path: str, method: str) -> Response:
    """The response to what the framework refuses: no such path or method, no JSON."""
    status = error.status_code
    message = str(error.detail)
    if status == 404 and message == "Not Found":
        message = f"there is nothing at {path}"
    elif status == 405:
        message = f"{path} does not take {method}"
    elif status == 400 and "parsing the body" in message:
        message = "the body is not JSON in UTF-8, or is nested too deeply"
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    code = getattr(error, "code", None) or _CODES.get(status)
    return answer(ErrorBody(clean(message), kind, None, code), status, error.headers)


def validation_error(details: Sequence[Mapping[str, Any]]) -> Response:
    """From pydantic's list of errors: the first, and how many more."""
    first = details[0]
    loc = [part for part in first["loc"] if part != "body"]
    kind, message = str(first["type"]), str(first["msg"])
    param = _param(loc)
    if kind == "json_invalid":
        reason = first.get("ctx", {}).get("error", "")
        param, message = None, f"the body is not valid JSON: {reason} at character {loc[-1]}"
    elif not loc:
        message = "a JSON object is expected as the body, with Content-Type: application/json"
    elif kind == "missing":
        message = "this field is required"
    else:
        message = message.removeprefix("Value error, ")
    if param is not None:
        message = f"{param}: {message}"
    if len(details) > 1:
        message += f" (and {len(details) - 1} more)"
    return answer(ErrorBody(clean(message), "invalid_request_error", param, None), 400)


def _param(loc: Sequence[Any]) -> str | None:
    """`messages[0].role` from pydantic's location; names of union branches are left out."""
    name = ""
    for part in loc:
        if isinstance(part, int):
            name += f"[{part}]"
        elif str(part).isidentifier() and part not in ("str", "int"):
            name += f".{part}" if name else str(part)
    return clean(name) or None


def install(app: FastAPI) -> None:
    """Register the handlers of everything that can go wrong."""

    async def on_request_error(_: Request, error: Exception) -> Response:
        assert isinstance(error, RequestError)
        return request_error(error)

    async def on_own_error(_: Request, error: Exception) -> Response:
        log.error("a request failed: %s", error)
        return answer(INTERNAL, 500)

    async def on_http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return http_error(error, request.url.path, request.method)

    async def on_validation_error(_: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return validation_error(error.errors())

    async def on_bug(_: Request, __: Exception) -> Response:
        return answer(INTERNAL, 500)

    app.add_exception_handler(RequestError, on_request_error)
    app.add_exception_handler(FlexslurmError, on_own_error)
    app.add_exception_handler(HTTPException, on_http_error)
    app.add_exception_handler(RequestValidationError, on_validation_error)
    app.add_exception_handler(Exception, on_bug)
