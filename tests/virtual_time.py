"""An event loop whose clock jumps: what waits an hour is done at once, in the right order."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _Jumping(selectors.SelectSelector):
    """Nothing is awaited but timers: each wait is a jump."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> Any:
        assert timeout is not None, "nothing is left to wait for"
        self.now += max(timeout, 0.0)
        return super().select(0)


def run_virtual(main: Callable[[asyncio.AbstractEventLoop], Coroutine[Any, Any, T]]) -> T:
    """Run it to its end; `loop.time()` is the virtual clock, beginning at 0."""
    selector = _Jumping()
    loop = asyncio.SelectorEventLoop(selector)
    loop.time = lambda: selector.now  # type: ignore[method-assign]
    try:
        return loop.run_until_complete(main(loop))
    finally:
        loop.close()


async def inline(act: Callable[..., T], *arguments: Any) -> T:
    """In place of `asyncio.to_thread`: threads have no virtual time."""
    return act(*arguments)
