"""SIGTERM and SIGHUP end a command as Ctrl-C does, so that it cleans up; decides nothing else.

A command runs inside `endings_raise`; what must not be cut in two, such as the cleaning up itself,
inside `endings_wait`. Signals that were ignored when we were started (`nohup`) stay ignored.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


ENDED = 128
"""As shells do, a process that a signal ended has this and the signal's number for its code."""


class EndedBySignal(SystemExit):
    """A signal has told the command to end."""

    def __init__(self, number: int) -> None:
        self.exit_code = ENDED + number
        self.name = signal.Signals(number).name
        super().__init__(self.exit_code)


class _Raise:
    """Raises where the command is, once."""

    def __init__(self) -> None:
        self._told = False

    def __call__(self, number: int, _: object) -> None:
        if self._told:
            return
        self._told = True
        raise KeyboardInterrupt if number == signal.SIGINT else EndedBySignal(number)


class _Note:
    """Remembers what came."""

    def __init__(self) -> None:
        self.came: list[int] = []

    def __call__(self, number: int, _: object) -> None:
        self.came.append(number)


@contextmanager
def endings_raise() -> Iterator[None]:
    """Have the first of these signals raise where the command is, in the main thread.

    KeyboardInterrupt for SIGINT, EndedBySignal for others. Later ones are passed over, since the
    command is ending already. Inside of another one, or of `endings_wait`, it does nothing.
    """
    if any(isinstance(signal.getsignal(number), (_Raise, _Note)) for number in ENDING):
        yield
        return
    with _handled(_Raise()):
        yield


@contextmanager
def endings_wait() -> Iterator[None]:
    """In the main thread: these signals wait until the block is over."""
    noted = _Note()
    with _handled(noted):
        yield
    if noted.came:
        signal.raise_signal(noted.came[0])


@contextmanager
def scratch_directory(prefix: str, *, keep: bool = False) -> Iterator[Path]:
    """A new private directory, gone at the end whatever ends us, unless it is to be kept."""
    import shutil
    import tempfile

    made: Path | None = None
    try:
        with endings_wait():
            made = Path(tempfile.mkdtemp(prefix=prefix))
        yield made
    finally:
        with endings_wait():
            if made is not None and not keep:
                shutil.rmtree(made, ignore_errors=True)


@contextmanager
def _handled(handler: Callable[[int, object], None]) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    taken = [n for n in ENDING if signal.getsignal(n) not in (signal.SIG_IGN, None)]
    before = {number: signal.signal(number, handler) for number in taken}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)
