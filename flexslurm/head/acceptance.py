"""Whether a request can be answered at all, as far as it says itself; knows no other request."""

from __future__ import annotations

import msgspec

from flexslurm.errors import InvalidRequest
from flexslurm.gateway.router import check_context
from flexslurm.messages import SequenceRequest


def check_request(request: SequenceRequest, model_context: int, gear_context: int | None) -> None:
    """Raise InvalidRequest or ContextTooLong, whose messages say what does not fit.

    `gear_context`: tokens that the largest replica holds for one sequence; None: none serves.
    """
    prompt, answer = len(request.prompt), request.stop.max_tokens
    if prompt < 1:
        raise InvalidRequest("the prompt has no tokens", param="prompt")
    if answer < 1:
        raise InvalidRequest("at least one token must be asked for", param="max_tokens")
    check_context(prompt, answer, model_context, whose="the model")
    if gear_context is not None:
        check_context(prompt, answer, gear_context)
    _check_sendable(request)


def _check_sendable(request: SequenceRequest) -> None:
    """What cannot be encoded would stop the replica it is given to, and every other sequence there.

    The gateway bounds the numbers it reads; this is what holds for every caller.
    """
    try:
        msgspec.msgpack.encode(request)
    except (OverflowError, TypeError, ValueError) as error:
        raise InvalidRequest(f"the request has a value that cannot be sent: {error}") from error
