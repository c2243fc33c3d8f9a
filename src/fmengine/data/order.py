"""The order of the data: a keyed permutation of range(n) in O(1) memory.

A balanced Feistel network over the smallest even number of bits that holds n (M. Luby and C. Rackoff,
"How to construct pseudorandom permutations from pseudorandom functions", SIAM J. Comput. 1988; any
round function gives a bijection), made a permutation of range(n) by cycle walking (J. Black and
P. Rogaway, "Ciphers with Arbitrary Finite Domains", CT-RSA 2002): a value outside is sent through
again until it falls inside, under four times on average. The round function is SplitMix64's
finalizer (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014).
"""

import hashlib

import numpy as np
from numpy.typing import NDArray

ROUNDS = 8
"""Four make a strong pseudorandom permutation when the round function is ideal; ours is a hash, so twice that."""


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64's finalizer, elementwise."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


class Permutation:
    """A bijection of range(size) that (seed, epoch) alone determines.

    Args:
        size: n, 1 <= n <= 2**62.
        seed: any int that fits 64 bits.
        epoch: pass over the data; each has its own order.
    """

    def __init__(self, size: int, seed: int, epoch: int) -> None:
        if not 1 <= size <= 1 << 62:
            raise ValueError(f"size must be in [1, 2**62], not {size}")
        self.size = size
        self._half_bits = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))
        key = hashlib.blake2b(f"{seed}/{epoch}".encode(), digest_size=8 * 8).digest()
        self._keys = np.frombuffer(key, "<u8", count=ROUNDS)

    def __call__(self, index: NDArray[np.int64]) -> NDArray[np.int64]:
        """Where each index goes: int64 [...] in range(size) -> int64 [...] in range(size)."""
        value = self._encrypt(index.astype(np.uint64))
        while (outside := value >= self.size).any():
            value[outside] = self._encrypt(value[outside])
        return value.astype(np.int64)

    def _encrypt(self, value: NDArray[np.uint64]) -> NDArray[np.uint64]:
        mask = (np.uint64(1) << self._half_bits) - np.uint64(1)
        left, right = value >> self._half_bits, value & mask
        for key in self._keys:
            left, right = right, left ^ (_mix(right + key) & mask)
        return left << self._half_bits | right
