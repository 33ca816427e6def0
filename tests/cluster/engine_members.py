"""Members of process groups for tests: imports torch once, forks them, runs one case in each.

Run: python -m tests.cluster.engine_members CASE SIZE ENDPOINT KEYS
Each member prints lines of JSON: {"rank", "what", "s"}; the parent waits for all.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from flexslurm.engine import sockets
from flexslurm.engine.groups import EpochGroups, Network, start_default_world
from flexslurm.engine.prctl import die_with_parent
from flexslurm.engine.rendezvous import HeadStore, Rendezvous
from flexslurm.errors import FlexslurmError
from flexslurm.messages import RendezvousValue, ToWorker
from flexslurm.wire.keys import load_keys
from flexslurm.wire.transport import HeadLink

CPU = torch.device("cpu")


class Member:
    """One member: its rendezvous, and the groups of an epoch over all members."""

    def __init__(self, rank: int, size: int, endpoint: str, keys: Path) -> None:
        self.rank, self.size = rank, size
        self.rendezvous = Rendezvous(lambda message: self.link.send(message))
        self.link: HeadLink[Any] = HeadLink(
            endpoint, load_keys(keys), f"m{rank}", ToWorker, self._take
        )

    def _take(self, message: Any) -> None:
        assert isinstance(message, RendezvousValue)
        self.rendezvous.deliver(message)

    def groups(self, epoch: int, form_timeout_s: float = 10.0) -> EpochGroups:
        groups = EpochGroups(epoch, 0, Network(CPU, "127.0.0.1", form_timeout_s))
        store = HeadStore(self.rendezvous, epoch, form_timeout_s)
        groups.form(store, stage=0, tp_rank=self.rank, tp=self.size, rank=self.rank, size=self.size)
        return groups

    def say(self, what: str, **more: object) -> None:
        line = json.dumps({"rank": self.rank, "what": what, **more})
        os.write(1, line.encode() + b"\n")

    def timed(self, what: str, work: Callable[[], object]) -> None:
        began = time.monotonic()
        try:
            work()
            outcome = "done"
        except (RuntimeError, FlexslurmError) as error:
            outcome = type(error).__name__
        self.say(what, outcome=outcome, s=round(time.monotonic() - began, 3))


def all_reduce(groups: EpochGroups) -> float:
    assert groups.tp is not None
    tensor = torch.ones(8, dtype=torch.float64)
    torch.distributed.all_reduce(tensor, group=groups.tp.handle)
    return float(tensor[0])


def works(member: Member) -> None:
    """Two epochs at once; DeepSpeed's all-reduce; send and receive; all closed and verified."""
    from flexslurm.engine.backend import deepspeed

    start_default_world(CPU)
    quiet = len(sockets.listening())
    first, second = member.groups(1), member.groups(2)
    assert first.tp is not None and second.tp is not None
    deepspeed_sum = torch.ones(4)
    deepspeed().comm.inference_all_reduce(deepspeed_sum, group=second.tp.handle)
    right, left = (member.rank + 1) % member.size, (member.rank - 1) % member.size
    incoming = torch.empty(1 << 18)
    receiving = first.tp.irecv(incoming, left, tag=7)
    sending = first.tp.isend(torch.full((1 << 18,), float(member.rank)), right, tag=7)
    receiving.wait()
    sending.wait()
    handle = first.tp.handle
    member.say(
        "sums",
        first=all_reduce(first),
        second=float(deepspeed_sum[0]),
        received=float(incoming[-1]),
        group_rank=torch.distributed.get_rank(handle),
        group_size=torch.distributed.get_world_size(handle),
    )
    del handle, receiving, sending
    member.rendezvous.meet(1, "done", member.size, 10)
    open_first = first.close(2.0)
    member.say("closed", left=open_first, second=all_reduce(second))
    member.rendezvous.meet(2, "done", member.size, 10)
    member.say("closed both", left=second.close(2.0), ports=len(sockets.listening()) - quiet)


def _prepared(member: Member) -> EpochGroups:
    start_default_world(CPU)
    groups = member.groups(1)
    all_reduce(groups)
    member.rendezvous.meet(1, "begin", member.size, 10)
    return groups


def killed_in_all_reduce(member: Member) -> None:
    groups = _prepared(member)
    if member.rank == member.size - 1:
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    member.timed("all-reduce", lambda: all_reduce(groups))
    member.timed("close", lambda: groups.close(2.0))


def killed_in_recv(member: Member) -> None:
    """Rank 0 waits for the one that dies, rank 1 for rank 0, which gives up its groups then."""
    groups = _prepared(member)
    assert groups.tp is not None
    if member.rank == member.size - 1:
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    tensor, source = torch.empty(4), member.size - 1 if member.rank == 0 else 0
    work = groups.tp.irecv(tensor, source, tag=1)
    member.timed("recv", work.wait)
    groups.abort()
    time.sleep(1.0)  # the connections of rank 0 end by its abort, not by its exit


def stopped_in_all_reduce(member: Member) -> None:
    """A peer that hangs shows no sign; the others are told, as the head's Retire does."""
    groups = _prepared(member)
    if member.rank == member.size - 1:
        member.say("stop", pid=os.getpid())
        os.kill(os.getpid(), signal.SIGSTOP)
    threading.Timer(0.5, groups.abort).start()
    member.timed("all-reduce", lambda: all_reduce(groups))
    groups.abort()
    member.timed("again", lambda: all_reduce(groups))
    began = time.monotonic()
    left = groups.close(2.0)
    member.say("closed", left=left, s=round(time.monotonic() - began, 3))


def cancelled_while_forming(member: Member) -> None:
    """The last member never comes; the others are called back."""
    start_default_world(CPU)
    if member.rank == member.size - 1:
        return
    threading.Timer(0.4, lambda: member.rendezvous.cancel(1, "retired")).start()
    member.timed("form", lambda: member.groups(1, form_timeout_s=30.0))
    member.timed("wait", lambda: member.rendezvous.get(1, "nothing", 30.0))
    member.timed("other epoch", lambda: member.rendezvous.get(2, "nothing", 0.1))


CASES = {
    case.__name__: case
    for case in (
        works,
        killed_in_all_reduce,
        killed_in_recv,
        stopped_in_all_reduce,
        cancelled_while_forming,
    )
}


def main() -> None:
    case, size, endpoint, keys = sys.argv[1], int(sys.argv[2]), sys.argv[3], Path(sys.argv[4])
    children = []
    parent = os.getpid()
    for rank in range(size):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                die_with_parent(parent)
                torch.set_num_threads(1)
                CASES[case](Member(rank, size, endpoint, keys))
                code = 0
            except BaseException as error:
                print(f"[{rank}] {type(error).__name__}: {error}", file=sys.stderr, flush=True)
                raise
            finally:
                os._exit(code)
        children.append(pid)
    for pid in children[:-1]:
        os.waitpid(pid, 0)
    if case.startswith("stopped"):
        os.kill(children[-1], signal.SIGKILL)
    os.waitpid(children[-1], 0)


if __name__ == "__main__":
    main()
