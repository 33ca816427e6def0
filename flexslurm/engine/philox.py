"""A counter-based random number generator, Philox 4x64-10, in whole numbers; keeps no state.

The number for a token depends on the request's seed and the token's position alone: not on the
device, the batch, what was sampled before, or how often the sequence was recomputed. Constants and
rounds are those of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).
"""

from __future__ import annotations

_MASK = (1 << 64) - 1
_MULTIPLY = (0xD2E7470EE14C6C93, 0xCA5A826395121157)
_WEYL = (0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B)
_ROUNDS = 10


def philox(key: tuple[int, int], counter: tuple[int, int, int, int]) -> tuple[int, int, int, int]:
    """Four 64-bit words for a 128-bit key and a 256-bit counter, each in 64-bit words."""
    k0, k1 = key
    c0, c1, c2, c3 = counter
    for _ in range(_ROUNDS):
        first, second = _MULTIPLY[0] * c0, _MULTIPLY[1] * c2
        c0, c1, c2, c3 = (
            (second >> 64) ^ c1 ^ k0,
            second & _MASK,
            (first >> 64) ^ c3 ^ k1,
            (first & _MASK),
        )
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) with 53 random bits, for the token at `position` of a sequence."""
    word = philox((seed & _MASK, (seed >> 64) & _MASK), (position & _MASK, 0, 0, 0))[0]
    return (word >> 11) * 2.0**-53
