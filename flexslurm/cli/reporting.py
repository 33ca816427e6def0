"""Turns whatever ends a command into lines on standard error and an exit code; never runs one.

The exit codes, for scripts:

    0    done
    1    a bug in flexslurm; the traceback is saved, and the message says where
    2    wrong usage: an unknown command or option, a missing or malformed argument
    3    a configuration file is wrong
    4    the model cannot be served
    5    no gear fits the resources
    6    Slurm said no, or did not answer
    7    the service cannot be reached, or refused
    8    this machine lacks something: a package, a file, a permission, space
    9    a deadline was reached
    129  its terminal went away (SIGHUP)
    130  interrupted (Ctrl-C)
    143  ended by SIGTERM
    141  whoever read our output went away, as `| head` does
"""

from __future__ import annotations

import difflib
import errno
import os
import platform
import sys
import tempfile
import traceback
from collections.abc import Sequence
from pathlib import Path

import click

from flexslurm import __version__
from flexslurm.cli.endings import ENDED, EndedBySignal
from flexslurm.errors import EnvironmentFault, FlexslurmError

USAGE, BUG, INTERRUPTED, PIPE_CLOSED = 2, 1, 130, 141
DEBUG_VARIABLE = "FLEXSLURM_DEBUG"
_MACHINE_IS_SHORT = (
    errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE, errno.ENOMEM,
    errno.EIO, errno.ESTALE, errno.EROFS,  # a disk or a file server gave up
)  # fmt: skip


class UnknownCommand(click.UsageError):
    """A word where a command is expected; says the nearest command, or all of them."""

    def __init__(self, word: str, legal: Sequence[str], ctx: click.Context) -> None:
        super().__init__(f"no such command '{word}'", ctx)
        near = difflib.get_close_matches(word, legal, n=1)
        self.hint = f"did you mean '{near[0]}'?" if near else f"commands: {', '.join(legal)}"


def report(error: BaseException) -> int:
    """Tell the user about `error`, in its own way for each kind; returns the exit code."""
    if debugging() and isinstance(error, Exception) and not isinstance(error, click.ClickException):
        traceback.print_exception(error)
    match error:
        case FlexslurmError():
            return _say(error.message, error.hint, error.exit_code)
        case click.ClickException():
            return _report_usage(error)
        case KeyboardInterrupt() | click.Abort():
            return _say("interrupted", None, INTERRUPTED)
        case BrokenPipeError():
            return forget_output()
        case OSError() if error.filename is not None or error.errno in _MACHINE_IS_SHORT:
            return _say(_os_words(error), None, EnvironmentFault.exit_code)
    return _report_bug(error)


def report_ending(ending: EndedBySignal) -> int:
    """Say which signal has ended us; returns the exit code."""
    return _say(f"ended by {ending.name}", None, ending.exit_code)


def debugging() -> bool:
    return os.environ.get(DEBUG_VARIABLE, "") not in ("", "0")


def _say(message: str, hint: str | None, code: int) -> int:
    lines = [f"flexslurm: error: {message}", *([f"  {hint}"] if hint else [])]
    if code > ENDED:  # not a fault
        lines = [f"flexslurm: {message}"]
    # Nobody may be left to read it, and that is no reason to fail in another way.
    try:
        text = "\n".join(lines).encode("utf-8", "replace").decode()  # bytes that were no text
        print(text, file=sys.stderr, flush=True)
    except OSError:
        return code
    return code


def _os_words(error: OSError) -> str:
    words = (error.strerror or str(error)).lower()
    return words if error.filename is None else f"{error.filename}: {words}"


def _report_usage(error: click.ClickException) -> int:
    if isinstance(error, click.exceptions.NoArgsIsHelpError):
        click.echo(error.format_message(), err=True)
        return USAGE
    hint = getattr(error, "hint", None) or _possibilities(error)
    context = getattr(error, "ctx", None)
    if hint is None and context is not None:
        hint = f"see: {context.command_path} --help"
    text = error.message if _possibilities(error) else error.format_message()
    text = text.strip().removesuffix(".")
    return _say(text[:1].lower() + text[1:], hint, USAGE)


def _possibilities(error: click.ClickException) -> str | None:
    near = getattr(error, "possibilities", None)
    return f"did you mean '{near[0]}'?" if near else None


def forget_output() -> int:
    """Point our standard output, closed or full, at nothing, or Python complains when it exits."""
    nothing = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nothing, sys.stdout.fileno())
    except (OSError, ValueError):
        return PIPE_CLOSED
    finally:
        os.close(nothing)
    return PIPE_CLOSED


def _report_bug(error: BaseException) -> int:
    what = traceback.format_exception_only(error)[-1].strip().splitlines()[0]
    message = f"this is a bug in flexslurm: {what}"
    try:
        where = _save_traceback(error)
    except OSError:
        return _say(message, f"set {DEBUG_VARIABLE}=1 to see where", BUG)
    return _say(message, f"the traceback is in {where}; {DEBUG_VARIABLE}=1 shows it here", BUG)


def _save_traceback(error: BaseException) -> Path:
    """Write the traceback to a new directory that only this user can read."""
    path = Path(tempfile.mkdtemp(prefix="flexslurm-bug-")) / "traceback.txt"
    head = f"flexslurm {__version__}, Python {platform.python_version()}, {platform.platform()}\n"
    command = f"command: {' '.join(sys.argv[1:2])}\n\n"
    path.write_text(head + command + "".join(traceback.format_exception(error)), encoding="utf-8")
    path.chmod(0o600)
    return path
