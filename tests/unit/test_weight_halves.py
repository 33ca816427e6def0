"""What comes from one worker over two connections: all of it, each byte once, about half each."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from flexslurm.engine.transfer_wire import PieceRange
from flexslurm.engine.weight_pull import _HALVED_BYTES, _halves


def pieces_of(sizes: list[int]) -> list[PieceRange]:
    return [PieceRange(f"t{n}", 0, 0, 1, size) for n, size in enumerate(sizes)]


@given(st.lists(st.integers(1, _HALVED_BYTES), min_size=1, max_size=20))
def test_two_parts_are_all_of_it_and_differ_by_no_more_than_the_largest_piece(
    sizes: list[int],
) -> None:
    pieces = pieces_of(sizes)
    parts = _halves(pieces)
    assert [piece for part in parts for piece in part] == pieces
    if sum(sizes) < _HALVED_BYTES or len(sizes) < 2:
        assert parts == [pieces]
        return
    first, second = (sum(piece.nbytes for piece in part) for part in parts)
    assert first and second and abs(first - second) <= 2 * max(sizes)


def test_little_comes_over_one_connection() -> None:
    pieces = pieces_of([1000] * 40)
    assert _halves(pieces) == [pieces]
