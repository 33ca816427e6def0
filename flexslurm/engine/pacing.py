"""How long a step of a virtual GPU takes; arithmetic and an injected sleep, never a model.

*As it comes*: a step with t seconds of this thread's CPU time takes t / speed, what it waited for a
core or a peer included. CPU time, because several virtual GPUs share the cores of one machine and
waiting for a core is nobody's speed; below full speed there is time for it.

*Acted*: a step takes the seconds that `planner.cost.StageCost` gives for its tokens, its link
times included; what was really computed meanwhile is part of them. A step that finds its input
waiting begins, on the virtual clock, when the one before it ended: what the real machine spends
between two steps is not the virtual GPU's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from flexslurm.errors import ProtocolError
from flexslurm.messages import Chunk, Pacing
from flexslurm.planner.cost import StageCost

_CATCH_UP_S = 0.05
"""What a virtual GPU may lag behind its own clock and make good in later steps."""


@dataclass(frozen=True, slots=True)
class StepWork:
    """What a step's time depends on."""

    new_tokens: int
    context_tokens: int
    """For each sequence the tokens it attends to, summed."""
    sampled_tokens: int
    pairs: int
    """For each new token the tokens it attends to, itself included, summed."""

    @classmethod
    def of(cls, chunks: Sequence[Chunk]) -> StepWork:
        new = context = sampled = pairs = 0
        for chunk in chunks:
            count = len(chunk.tokens)
            new += count
            context += chunk.start + count
            sampled += chunk.sample is not None
            pairs += count * chunk.start + count * (count + 1) // 2
        return cls(new, context, sampled, pairs)


class Pacer:
    """Spends what a step should take beyond what it took; one thread, one stage.

    `sleep` takes seconds and may return early when the stage is to end.
    """

    def __init__(
        self,
        pacing: Pacing | None,
        sleep: Callable[[float], object],
        *,
        cpu: Callable[[], float] = time.thread_time,
        wall: Callable[[], float] = time.monotonic,
    ) -> None:
        self._sleep, self._cpu, self._wall = sleep, cpu, wall
        self._speed = 1.0
        self._cost: StageCost | None = None
        self._cpu_began = self._began = 0.0
        self._ended: float | None = None
        if pacing is None:
            return
        if pacing.acted is not None:
            self._cost = _read_cost(pacing.acted)
        elif not 0.0 < pacing.speed <= 1.0:
            raise ProtocolError(f"a virtual GPU's speed is in (0, 1], not {pacing.speed}")
        else:
            self._speed = pacing.speed

    def begin(self, *, waited: bool) -> None:
        """The step's input is there; `waited`: the GPU was idle before."""
        now = self._wall()
        self._cpu_began = self._cpu()
        self._began = now
        if self._ended is not None and not waited:
            self._began = max(self._ended, now - _CATCH_UP_S)

    def end(self, load: StepWork) -> float:
        """The step is computed: wait until a step of this load would be.

        Returns the seconds it took by the virtual GPU's clock.
        """
        if self._cost is None:
            if self._speed < 1.0:
                whole_s = (self._cpu() - self._cpu_began) / self._speed
                self._wait(self._began + whole_s - self._wall())
            return self._wall() - self._began
        step_s = self._cost.step_s(
            load.new_tokens, load.context_tokens, load.sampled_tokens, load.pairs
        )
        self._ended = self._began + step_s
        self._wait(self._ended - self._wall())
        return step_s

    def _wait(self, seconds: float) -> None:
        if seconds > 0.0:
            self._sleep(seconds)


def _read_cost(fields: dict[str, float]) -> StageCost:
    try:
        return msgspec.convert(fields, StageCost)
    except msgspec.ValidationError as error:
        raise ProtocolError(f"the acted pacing is no stage cost: {error}") from error
