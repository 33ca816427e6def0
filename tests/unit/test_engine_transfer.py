"""What is fetched is right, and ends are clean; in one process."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from types import SimpleNamespace

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transfer_sides import (
    HEADS,
    KEY,
    LAYERS,
    PAGE,
    SIZE,
    TOKENS,
    Side,
    check,
    gate_at,
    pull,
    two_sides,
    write,
)

from flexslurm.engine import faults, transfer_client
from flexslurm.engine.arena import Arena
from flexslurm.engine.faults import Point
from flexslurm.engine.kv_store import KvShape, KvStore
from flexslurm.engine.ownership import Piece
from flexslurm.engine.page_runs import PageSink, PageSource
from flexslurm.engine.tenants import Tenant
from flexslurm.engine.transfer_client import Cancel, Fetcher, Job
from flexslurm.engine.transfer_wire import (
    AskWeights,
    PieceRange,
)
from flexslurm.engine.weight_runs import WeightSink
from flexslurm.messages import DataSource, KvPulled


@pytest.fixture
def sides() -> Iterator[tuple[Side, Side]]:
    yield from two_sides()


@pytest.mark.parametrize("rate", [0.0, 3e6])
def test_pages_come_as_they_were(sides: tuple[Side, Side], rate: float) -> None:
    """Out of a table of other layers and heads, into one of others yet."""
    one, two = sides
    old, new = one.store(1, (0, 3), (0, 3)), two.store(2, (2, 4), (1, 3))
    write(old, range(40))
    pairs = [(n, 63 - n) for n in range(40)]
    began = time.monotonic()
    two.transfers.pull(
        pull(one, 1, 2, pairs, layers=(2, 3), heads=(1, 3), rate_bytes_per_s=rate)
    )  # fmt: skip
    answer = two.answer(1)
    assert answer == KvPulled(
        worker="w-two", epoch=2, ticket=1, moved_bytes=80 * PAGE, seconds=answer.seconds
    )
    check(new, pairs, (2, 3), (1, 3), origin=(2, 1))
    assert (new.cells[63 - 39 :, 1] == -1).all(), "only the part that was asked for"
    assert two.arena.used_bytes == 80 * PAGE
    if rate:
        assert time.monotonic() - began > 80 * PAGE / rate * 0.9


def test_blocks_that_are_not_there_are_told(sides: tuple[Side, Side]) -> None:
    one, two = sides
    old, new = one.store(1), two.store(2)
    write(old, range(6))
    old.free([2, 5])
    pairs = [(n, n + 10) for n in range(7)]
    two.transfers.pull(pull(one, 1, 2, pairs))
    answer = two.answer(1)
    assert set(answer.failed) == {12, 15, 16}
    assert answer.reason == "the source does not have them"
    check(new, [pair for pair in pairs if pair[1] not in answer.failed], (0, LAYERS), (0, HEADS))


WRONG: dict[str, dict[str, object]] = {
    "no such epoch here": {"epoch": 7},
    "no such epoch there": {"source": "epoch"},
    "a block that is none": {"pairs": ((0, 64),)},
    "an own block twice": {"pairs": ((0, 1), (1, 1))},
    "a source's block twice": {"pairs": ((0, 1), (0, 2))},
    "a source's block that is none": {"pairs": ((64, 1),)},
    "layers that are not here": {"layers": (3, 5)},
    "heads the wrong way round": {"heads": (2, 1)},
    "nobody there": {"source": "port"},
}


@pytest.mark.parametrize("how", WRONG)
def test_what_cannot_be_pulled_is_answered(how: str, sides: tuple[Side, Side]) -> None:
    one, two = sides
    write(one.store(1), range(3))
    two.store(2)
    changes = dict(WRONG[how])
    if changes.get("source") == "epoch":
        changes["source"] = DataSource("w-one", "127.0.0.1", one.transfers.port, 9)
    if changes.get("source") == "port":
        with socket.create_server(("127.0.0.1", 0)) as closed:
            port = closed.getsockname()[1]
        changes["source"] = DataSource("w-one", "127.0.0.1", port, 1)
    order = msgspec.structs.replace(pull(one, 1, 2, [(0, 0)]), **changes)
    two.transfers.pull(order)
    answer = two.answer(1)
    assert set(answer.failed) == {own for _, own in order.pairs}
    assert answer.reason
    assert answer.moved_bytes == 0


def test_pages_of_another_size_are_refused(sides: tuple[Side, Side]) -> None:
    one, two = sides
    write(one.store(1), range(1))
    shape = KvShape(LAYERS, HEADS, 4, 2 * TOKENS, SIZE)
    store = KvStore(shape, torch.float64, two.arena)
    two.transfers.open(Tenant(2, two.arena, store, (0, LAYERS), (0, HEADS)))
    two.transfers.pull(pull(one, 1, 2, [(0, 0)]))
    assert f"pages of {2 * PAGE} bytes are asked for; here they have {PAGE}" in two.answer(1).reason


def test_on_the_same_gpu_nothing_moves(sides: tuple[Side, Side]) -> None:
    one, _ = sides
    write(one.store(1), range(4))
    new = one.store(2, heads=(1, 3))
    used = one.arena.used_bytes
    pairs = [(0, 5), (3, 4)]
    one.transfers.pull(pull(one, 1, 2, pairs, heads=(1, 3)))
    answer = one.answer(1)
    assert (answer.moved_bytes, answer.failed) == (0, ())
    assert one.arena.used_bytes == used
    check(new, pairs, (0, LAYERS), (1, 3), origin=(0, 1))


def test_the_deadline_keeps_what_has_come(
    sides: tuple[Side, Side], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = sides
    write(one.store(1), range(40))
    new = two.store(2)
    pairs = [(n, n) for n in range(40)]
    ahead_s = [0.0]
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + ahead_s[0])
    monkeypatch.setattr(transfer_client, "time", clock)
    with gate_at(Point.CHUNK, 2) as gate:
        two.transfers.pull(pull(one, 1, 2, pairs, rate_bytes_per_s=1e6, timeout_s=600.0))
        gate.wait()
        ahead_s[0] = 601.0
    answer = two.answer(1)
    assert answer.reason == "the time was up"
    assert 0 < len(answer.failed) < 40
    check(new, [p for p in pairs if p[1] not in answer.failed], (0, LAYERS), (0, HEADS))


def test_one_link_is_shared_by_all_who_ask_for_its_rate(sides: tuple[Side, Side]) -> None:
    one, two = sides
    write(one.store(1), range(40))
    two.store(2)
    began = time.monotonic()
    for ticket in (1, 2):
        half = [(n, n) for n in range(20 * (ticket - 1), 20 * ticket)]
        two.transfers.pull(pull(one, 1, 2, half, ticket=ticket, rate_bytes_per_s=1e6))
    assert not two.answer(1).failed
    assert not two.answer(2).failed
    total = 40 * LAYERS * HEADS * PAGE
    assert time.monotonic() - began > total / 1e6 * 0.9


def test_what_comes_for_a_freed_block_goes_nowhere(sides: tuple[Side, Side]) -> None:
    one, two = sides
    write(one.store(1), range(40))
    new = two.store(2)
    with gate_at(Point.CHUNK, 2) as gate:
        two.transfers.pull(pull(one, 1, 2, [(n, n) for n in range(40)], rate_bytes_per_s=1e6))
        gate.wait()
        new.free([39])
        new.prepare([39], [], [])
        new.pool[torch.from_numpy(new.cells[39])] = 7.0
    answer = two.answer(1)
    assert answer.failed == (39,) and answer.reason == "they were freed meanwhile"
    assert (new.pool[torch.from_numpy(new.cells[39])] == 7.0).all()


def test_a_page_that_is_being_sent_is_not_used_for_anything_else() -> None:
    arena = Arena(200 * PAGE)
    store = KvStore(KvShape(1, 1, 100, TOKENS, SIZE), torch.float64, arena)
    write(store, range(2))
    source = PageSource(arena, store, [0, 1], slice(0, 1), slice(0, 1))
    with source.lend(0, source.total) as views:
        assert views is not None
        before = b"".join(views)
        assert store.free([0, 1]) == 0, "not yet"
        write(store, range(10, 60))
        assert b"".join(views) == before
        assert arena.used_bytes == 52 * PAGE
    assert arena.used_bytes == 50 * PAGE
    with source.lend(0, source.total) as views:
        assert views is None
    assert source.missing() == (0, 1)
    arena.check_integrity()
    arena.close()


@given(
    st.lists(st.integers(0, 30), min_size=1, max_size=6, unique=True),
    st.tuples(st.integers(0, 2), st.integers(1, 3)),
    st.tuples(st.integers(0, 1), st.integers(1, 3)),
    st.data(),
)
def test_any_piece_of_a_run_is_the_right_bytes(
    blocks: list[int], layers: tuple[int, int], heads: tuple[int, int], data: st.DataObject
) -> None:
    layers, heads = (layers[0], layers[0] + layers[1]), (heads[0], max(heads[1], heads[0] + 1))
    layers = (layers[0], min(layers[1], LAYERS))
    arena = Arena(2000 * PAGE)
    source, target = (
        KvStore(KvShape(LAYERS, HEADS, 31, TOKENS, SIZE), torch.float64, arena) for _ in range(2)
    )
    order = data.draw(st.permutations(range(31)))
    for block in order:
        write(source, range(block, block + 1))
    part = slice(*layers), slice(*heads)
    give = PageSource(arena, source, blocks, *part)
    target.claim(blocks, *part)
    take = PageSink(arena, target, blocks, *part)
    whole = b"".join(
        source.pool[int(source.cells[b, x, h])].numpy().tobytes()
        for b in blocks for x in range(*layers) for h in range(*heads)
    )  # fmt: skip
    assert give.total == take.total == len(whole)
    cuts = data.draw(st.lists(st.integers(1, give.total - 1), max_size=6, unique=True))
    ends = [0, *sorted(cuts), give.total]
    for lo, hi in pairwise(ends):
        with give.lend(lo, hi) as views, take.into(lo, hi) as landing:
            assert views is not None
            found = b"".join(views)
            assert found == whole[lo:hi]
            for view in landing.views:
                view[:], found = found[: view.nbytes], found[view.nbytes :]
    check(target, [(b, b) for b in blocks], layers, heads)
    arena.check_integrity()
    arena.close()


def test_what_is_under_way_is_called_back(sides: tuple[Side, Side]) -> None:
    one, two = sides
    write(one.store(1), range(40))
    new = two.store(2)
    for ticket in range(5):
        order = pull(
            one, 1, 2, [(ticket, ticket)], ticket=ticket, rate_bytes_per_s=10.0, timeout_s=600.0
        )
        two.transfers.pull(order)
    while not two.arena.used_bytes:
        time.sleep(0.001)
    assert two.transfers.close(2, 60.0), "they would go on for ten minutes"
    new.close()
    assert two.arena.used_bytes == 0
    assert not two.heard, "nobody waits for these answers"


def test_a_source_ends_what_it_sends(sides: tuple[Side, Side]) -> None:
    one, two = sides
    old = one.store(1)
    write(old, range(40))
    two.store(2)
    order = pull(
        one, 1, 2, [(n, n) for n in range(40)], rate_bytes_per_s=1e6, timeout_s=600.0
    )  # fmt: skip
    with ThreadPoolExecutor(1) as beside:
        with gate_at(Point.CHUNK, 2) as gate:
            two.transfers.pull(order)
            gate.wait()
            closing = beside.submit(one.transfers.close, 1, 60.0)
            answer = two.answer(1)
        assert closing.result()
    assert one.transfers.sent_bytes < 40 * LAYERS * HEADS * PAGE
    old.close()
    assert one.arena.used_bytes == 0
    assert answer.failed
    assert "epoch 1 is not here" in answer.reason


def test_broken_connections_cost_only_what_was_under_way(sides: tuple[Side, Side]) -> None:
    one, two = sides
    write(one.store(1), range(40))
    new = two.store(2)
    faults.arm("transfer.chunk:2:raise, transfer.chunk:4:raise, transfer.connect:2:raise")
    pairs = [(n, n) for n in range(40)]
    two.transfers.pull(pull(one, 1, 2, pairs, rate_bytes_per_s=10e6))
    answer = two.answer(1)
    assert not answer.failed
    assert answer.moved_bytes == 40 * LAYERS * HEADS * PAGE, "nothing twice"
    check(new, pairs, (0, LAYERS), (0, HEADS))


def test_a_source_without_an_end_of_faults_is_given_up(sides: tuple[Side, Side]) -> None:
    one, two = sides
    write(one.store(1), range(4))
    two.store(2)
    for fault, reason in (("chunk:1+:raise", "closed"), ("corrupt:1+:spoil", "checksum"),
                          ("connect:1+:raise", "injected")):  # fmt: skip
        faults.arm(f"transfer.{fault}")
        two.heard.clear()
        two.transfers.pull(pull(one, 1, 2, [(n, n) for n in range(4)]))
        answer = two.answer(1)
        assert set(answer.failed) == {0, 1, 2, 3}
        assert reason in answer.reason


def test_weights_come_from_segments_of_either_form(sides: tuple[Side, Side]) -> None:
    one, _ = sides
    one.store(1)
    weights, rows, columns = one.arena.weights, 12, 10
    whole = torch.arange(rows * columns, dtype=torch.float64).view(rows, columns)
    weights.open(1, "m")
    for tensor, dim, stored in (("a", 0, whole), ("b", 1, whole.t().contiguous())):
        size = stored.shape[0]
        view = weights.claim(1, Piece(tensor, dim, 0, size, size, stored[0].nbytes), "w")
        with weights.filling(view) as raw:
            raw.copy_(stored.reshape(-1).view(torch.uint8))
        weights.filled(view)
    wanted = [
        ("a", 0, 2, 5, whole[2:5]), ("a", 1, 3, 7, whole[:, 3:7].t()),
        ("b", 1, 0, 4, whole[:, :4].t()), ("b", 0, 7, 12, whole[7:]),
    ]  # fmt: skip
    pieces = [PieceRange(t, d, lo, hi, part.numel() * 8) for t, d, lo, hi, part in wanted]
    pieces.append(PieceRange("a", 0, 11, 13, 160))
    pieces.append(PieceRange("zz", 0, 0, 1, 80))
    target = Arena(1 << 16)
    places, at = [], 0
    for piece in pieces:
        places.append(at)
        at += piece.nbytes
    sink = WeightSink(target, pieces, places)

    def ask(spans: tuple[tuple[int, int], ...]) -> AskWeights:
        return AskWeights(epoch=1, item_bytes=8, pieces=tuple(pieces), spans=spans)

    job = Job(("127.0.0.1", one.transfers.port), ask, sink, time.monotonic() + 60, Cancel())
    fetcher = Fetcher(KEY)
    found = fetcher.fetch(job)
    fetcher.close()
    assert not found.left
    assert found.missing == {4, 5}
    for (_, _, _, _, part), place in zip(wanted, places, strict=False):
        got = target.data[place : place + part.numel() * 8].view(torch.float64)
        assert torch.equal(got, part.reshape(-1))
    weights.release(1)
    target.close()
