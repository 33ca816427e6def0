"""Questions to a running head over the authenticated link; changes nothing by itself."""

from __future__ import annotations

import os
import secrets
import shlex

from flexslurm.errors import DeadlineExceeded, ServiceError, ServiceUnreachable
from flexslurm.messages import (
    AskDone,
    AskRefused,
    Message,
    ShiftAnswer,
    StatusAnswer,
    StatusAsk,
    ToCli,
)
from flexslurm.wire.service_dir import HeadAddress, ServiceDir
from flexslurm.wire.transport import HeadLink

_GONE_S = 1.0
"""How long a head is asked whose process is not seen: it may be in another container."""


def ask(
    directory: ServiceDir, question: Message, timeout_s: float
) -> AskDone | StatusAnswer | ShiftAnswer:
    """The head's answer, which comes within `timeout_s`.

    Raises ServiceUnreachable when no head answers, ServiceError when it refuses.
    """
    head = directory.head()
    if head is None and directory.stopped():
        raise ServiceUnreachable(
            f"the service in {directory.path} has been stopped",
            hint="launch it again, or remove what is left of it with: "
            f"rm -r {shlex.quote(str(directory.path))}",
        )
    if head is None:
        raise ServiceUnreachable(
            f"no head has published its address in {directory.path}",
            hint="its job may still be pending, or has ended: see 'flexslurm logs'",
        )
    gone = _seems_gone(head)
    link: HeadLink[ToCli] = HeadLink(
        head.control, directory.keys(), f"c-{secrets.token_hex(6)}", ToCli
    )
    try:
        answer = link.ask(question, min(timeout_s, _GONE_S) if gone else timeout_s)
    except DeadlineExceeded:
        raise _silent(head, gone) from None
    finally:
        link.close()
    if isinstance(answer, AskRefused):
        raise ServiceError(answer.message, hint=answer.hint)
    return answer


def _seems_gone(head: HeadAddress) -> bool:
    """Whether it would be a process of this machine, and there is none of its number."""
    if head.node != os.uname().nodename:
        return False
    try:
        os.kill(head.pid, 0)
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):
        return False
    return False


def _silent(head: HeadAddress, gone: bool) -> ServiceUnreachable:
    where = f"(process {head.pid} on {head.node})"
    if gone:
        return ServiceUnreachable(
            f"the head {where} is gone",
            hint="why: 'flexslurm logs'; launched again, the service takes its pilots over",
        )
    return ServiceUnreachable(
        f"the head at {head.control} {where} does not answer",
        hint="it may have crashed, or have other keys: see its log with 'flexslurm logs'; launched "
        "again, the service takes its pilots over",
    )


def ask_status(directory: ServiceDir, timeout_s: float = 5.0) -> StatusAnswer:
    """What the service runs on, and why. Raises as `ask` does."""
    answer = ask(directory, StatusAsk(), timeout_s)
    if not isinstance(answer, StatusAnswer):
        raise ServiceError("the head gave another answer than its status")
    return answer


def pool_is_whole(directory: ServiceDir, pilots: int) -> bool:
    """Whether all are there: a service may answer before the last has come.

    Raises as `ask` does.
    """
    here = [one.is_there for one in ask_status(directory).fragments]
    return len(here) == pilots and all(here)
