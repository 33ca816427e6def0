"""Has gears planned in a process of its own, one after the other; the event loop never plans."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping
from pathlib import Path

from flexslurm.gear import Gear, NoGear, Signature
from flexslurm.head.plan_process import plan_command, read_planned

log = logging.getLogger(__name__)

GEAR_S = 180.0
TABLE_S = 900.0

Answer = Gear | NoGear | None
"""None: planning failed; of a table: it is done."""

Tell = Callable[[Signature | None, Answer], None]
"""Called on the loop with an allocation and its answer, or None for the table."""


class PlanWorker:
    """What is to be planned: single gears, and beside them the table."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.memory: Callable[[], Mapping[str, int]] = dict
        """Bytes of a card by type to plan with, where that is less than the site file says."""
        self._waiting: dict[Signature | None, None] = {}
        self._wake = asyncio.Event()

    def ask(self, signature: Signature | None) -> None:
        """Plan this allocation, or the table; once, however often it is asked for meanwhile.

        Whoever asks bounds how many answers are awaited.
        """
        self._waiting.setdefault(signature)
        self._wake.set()

    async def run(self, tell: Tell) -> None:
        """Plan until cancelled; the processes under way then end with this."""
        table: asyncio.Task[None] | None = None
        try:
            while True:
                self._wake.clear()
                if None in self._waiting and (table is None or table.done()):
                    table = asyncio.create_task(self._answer(None, tell), name="plan table")
                wanted = next((s for s in self._waiting if s is not None), None)
                if wanted is not None:
                    await self._answer(wanted, tell)
                else:
                    await self._wake.wait()
        finally:
            if table is not None:
                table.cancel()
                await asyncio.gather(table, return_exceptions=True)

    async def _answer(self, wanted: Signature | None, tell: Tell) -> None:
        memory: dict[str, int] | None = None
        memory = dict(self.memory())
        answer = await self._plan(wanted, memory)
        while memory != self.memory():  # there are other cards by now
            memory = dict(self.memory())
            answer = await self._plan(wanted, memory)
        del self._waiting[wanted]
        tell(wanted, answer)

    async def _plan(self, signature: Signature | None, memory: Mapping[str, int]) -> Answer:
        what = f"the gear of {signature}" if signature is not None else "the gear table"
        log.info("planning %s", what)
        try:
            process = await asyncio.create_subprocess_exec(
                *plan_command(self._directory, signature, memory),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
            )
        except OSError as error:
            log.warning("%s cannot be planned: %s", what, error.strerror)
            return None
        try:
            limit_s = GEAR_S if signature is not None else TABLE_S
            out, _ = await asyncio.wait_for(process.communicate(), limit_s)
            if process.returncode:
                log.warning("%s could not be planned (exit code %s)", what, process.returncode)
                return None
            return read_planned(out) if signature is not None else None
        except (TimeoutError, ValueError) as error:
            log.warning("%s could not be planned: %s", what, str(error) or "it took too long")
            return None
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
