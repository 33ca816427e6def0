"""A replica without a model: its tokens depend on every token that its KV cache holds.

The cache is played cell by cell, through the block tables of the steps. A sequence whose blocks
were given to another, whose recompute left a gap or whose position slipped, gets another token than
`undisturbed` says.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence

from flexslurm.engine.driver import Driver, Hooks
from flexslurm.gear import Replica, Stage
from flexslurm.messages import (
    Chunk,
    FinishReason,
    FreeBlocks,
    Message,
    SampledToken,
    SamplingParams,
    SequenceRequest,
    Step,
    StepDone,
    StopRules,
    TokenEvent,
)

VOCABULARY = 23


def make_replica(
    *,
    pp: int = 1,
    tp: int = 1,
    kv_blocks: int = 64,
    max_batch: int = 8,
    max_batch_tokens: int = 32,
    max_context: int = 64,
) -> Replica:
    stages = tuple(
        Stage(gpu_type="v", tp=tp, lo=s, hi=s + 1, kv_blocks=kv_blocks, node=0) for s in range(pp)
    )
    return Replica(
        stages=stages,
        max_batch=max_batch,
        max_batch_tokens=max_batch_tokens,
        max_context=max_context,
    )


def make_request(
    seq_id: str = "r/0",
    prompt: Iterable[int] = (1, 2, 3),
    max_tokens: int = 4,
    *,
    arrival: int = 0,
    min_tokens: int = 0,
    stop: tuple[int, ...] = (),
    seed: int = 0,
    penalty: float = 0.0,
) -> SequenceRequest:
    return SequenceRequest(
        seq_id=seq_id,
        prompt=tuple(prompt),
        sampling=SamplingParams(seed=seed, presence_penalty=penalty),
        stop=StopRules(max_tokens=max_tokens, min_tokens=min_tokens, stop_token_ids=stop),
        arrival=arrival,
    )


def next_token(prefix: tuple[int, ...], seed: int, suppress: Sequence[int]) -> int:
    token = hash((seed, *prefix)) % VOCABULARY
    while token in suppress:
        token = (token + 1) % VOCABULARY
    return token


def undisturbed(request: SequenceRequest) -> tuple[list[int], FinishReason]:
    """The answer as one uninterrupted run gives it."""
    answer: list[int] = []
    rules = request.stop
    while True:
        suppress = rules.stop_token_ids if len(answer) < rules.min_tokens else ()
        token = next_token((*request.prompt, *answer), request.sampling.seed, suppress)
        answer.append(token)
        if token in rules.stop_token_ids and len(answer) > rules.min_tokens:
            return answer, FinishReason.STOP
        if len(answer) == rules.max_tokens:
            return answer, FinishReason.LENGTH


class FakeReplica:
    """Does micro-batches, and refuses those that break the protocol."""

    def __init__(self, replica: Replica, block_tokens: int) -> None:
        self.replica = replica
        self.block_tokens = block_tokens
        self.cells: dict[tuple[int, int], int] = {}

    def free(self, blocks: Sequence[int]) -> None:
        """Forget what these blocks hold, so that nobody can read it by mistake."""
        assert len(set(blocks)) == len(blocks)
        for cell in [cell for cell in self.cells if cell[0] in set(blocks)]:
            del self.cells[cell]

    def pull(self, source: FakeReplica, pairs: Sequence[tuple[int, int]]) -> None:
        """Take blocks of another replica as they are now: (its block, our block)."""
        assert source.block_tokens == self.block_tokens
        for theirs, ours in pairs:
            assert not any(block == ours for block, _ in self.cells), f"block {ours} is in use"
            for (block, offset), token in list(source.cells.items()):
                if block == theirs:
                    self.cells[ours, offset] = token

    def run(self, chunks: Sequence[Chunk], freed: Sequence[int] = ()) -> tuple[SampledToken, ...]:
        self.free(freed)
        ids = [chunk.seq_id for chunk in chunks]
        assert len(set(ids)) == len(ids) <= self.replica.max_batch
        assert 0 < sum(len(chunk.tokens) for chunk in chunks) <= self.replica.max_batch_tokens
        tables = [block for chunk in chunks for block in chunk.blocks]
        assert len(set(tables)) == len(tables), "a block with two owners"
        assert all(0 <= block < self.replica.kv_blocks for block in tables)
        return tuple(token for chunk in chunks for token in self._chunk(chunk))

    def _chunk(self, chunk: Chunk) -> list[SampledToken]:
        assert chunk.tokens
        for offset, token in enumerate(chunk.tokens):
            self.cells[self._cell(chunk, chunk.start + offset)] = token
        if chunk.sample is None:
            return []
        end = chunk.start + len(chunk.tokens)
        prefix = tuple(self.cells[self._cell(chunk, position)] for position in range(end))
        sample = chunk.sample
        history = (*sample.prompt, *sample.output)
        assert history == (prefix if sample.params.needs_history else ())
        if history:
            assert sample.position == len(sample.output)
        token = next_token(prefix, sample.params.seed, sample.suppress)
        return [SampledToken(seq_id=chunk.seq_id, token=token)]

    def _cell(self, chunk: Chunk, position: int) -> tuple[int, int]:
        return chunk.blocks[position // self.block_tokens], position % self.block_tokens


class FakeWorkers:
    """The workers of one replica behind a Driver; steps wait until they are answered."""

    def __init__(
        self,
        epoch: int,
        index: int,
        replica: Replica,
        block_tokens: int,
        emit: Callable[[TokenEvent], None],
        now: Callable[[], float] = lambda: 0.0,
        *,
        paused: bool = False,
        seat: int | None = None,
    ) -> None:
        self.epoch, self.index = epoch, index
        self.engine = FakeReplica(replica, block_tokens)
        self.names = tuple(f"w{epoch}.{index}.{n}" for n in range(replica.gpus))
        self.inboxes: dict[str, list[Message]] = {name: [] for name in self.names}
        self.pending: deque[Step | FreeBlocks] = deque()
        self.broken: list[str] = []
        self.unsendable: Exception | None = None
        """Raised by whatever is to be sent, where it is set."""
        self.driver = Driver(
            epoch,
            index,
            replica,
            block_tokens,
            self.names,
            Hooks(send=self._send, emit=emit, broken=self.broken.append, now=now),
            paused=paused,
            seat=seat,
        )

    def _send(self, workers: tuple[str, ...], message: Message) -> None:
        assert isinstance(message, Step | FreeBlocks) and message.epoch == self.epoch
        assert message.replica == self.index and workers == self.names
        if self.unsendable is not None:
            raise self.unsendable
        for worker in workers:
            self.inboxes[worker].append(message)
        self.pending.append(message)

    def answer(self) -> bool:
        """Do the oldest step that waits; whether there was one."""
        while self.pending:
            step = self.pending.popleft()
            if isinstance(step, Step):
                self.driver.on_step_done(self.done(step))
                return True
            self.engine.free(step.blocks)
        return False

    def done(self, step: Step) -> StepDone:
        return StepDone(
            worker=self.names[-1],
            epoch=self.epoch,
            replica=self.index,
            step=step.step,
            tokens=self.engine.run(step.chunks, step.freed),
            compute_s=0.001,
        )


class Answers:
    """Collects events and checks that they are in order and end once."""

    def __init__(self) -> None:
        self.tokens: dict[str, list[int]] = {}
        self.finish: dict[str, FinishReason] = {}

    def take(self, event: TokenEvent) -> None:
        seen = self.tokens.setdefault(event.seq_id, [])
        assert event.seq_id not in self.finish, f"{event} after the end"
        assert event.position == len(seen), f"{event} after {len(seen)} tokens"
        if event.token is not None:
            seen.append(event.token)
        if event.finish is not None:
            self.finish[event.seq_id] = event.finish

    def check(self, request: SequenceRequest) -> None:
        """It ended as the undisturbed run does."""
        got = self.tokens[request.seq_id], self.finish[request.seq_id]
        assert got == undisturbed(request), request.seq_id

    def check_begun(self, request: SequenceRequest) -> None:
        """What there is of it is the beginning of the undisturbed run."""
        got = self.tokens.get(request.seq_id, [])
        assert got == undisturbed(request)[0][: len(got)], request.seq_id


class FakeGear:
    """Some replicas of one epoch, attached to a ledger."""

    def __init__(
        self,
        epoch: int,
        replicas: Sequence[Replica],
        block_tokens: int,
        emit: Callable[[TokenEvent], None],
        now: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self.workers = [
            FakeWorkers(epoch, index, replica, block_tokens, emit, now)
            for index, replica in enumerate(replicas)
        ]

    @property
    def drivers(self) -> list[Driver]:
        return [workers.driver for workers in self.workers]

    def answer(self) -> bool:
        """Do one step of each replica; whether there was any."""
        answered = [workers.answer() for workers in self.workers]
        return any(answered)

    def run(self) -> None:
        while self.answer():
            pass
