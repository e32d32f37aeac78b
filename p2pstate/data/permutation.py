"""Pseudo-random permutations of 0..n-1 of which any element is computed alone.

In: n and a key. Out: element i, in time and memory independent of n and i. A format-preserving permutation: a Feistel
network over pairs (left, right) with left < a, right < b and a * b just above n, whose rounds add a keyed hash of one
half to the other (modulo its size); results of n or more are sent through again until they fall below n. That is the
"generalised Feistel" cipher with cycle walking of J. Black and P. Rogaway, Ciphers with Arbitrary Finite Domains,
CT-RSA 2002; the hash is the finaliser of D. Stafford's variant 13 of MurmurHash3, used by SplitMix64.

Invariants: every key gives a permutation; equal (n, key) give equal permutations on every machine.
Known limit: a shuffle, not a cipher: nobody may rely on its order being secret.
"""

from __future__ import annotations

import hashlib
import math

import numpy as np
from numpy.typing import NDArray

__all__ = ["Permutation", "hash_words"]

NUM_ROUNDS = 8
_MULTIPLIERS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
_SHIFTS = (np.uint64(30), np.uint64(27), np.uint64(31))


def hash_words(label: str, *numbers: int, num_words: int = 1) -> list[int]:
    """``num_words`` (at most 8) numbers of 64 bits, a function of the label and the numbers alone."""
    text = f"{label}:{':'.join(map(str, numbers))}".encode()
    digest = hashlib.blake2b(text, digest_size=8 * num_words).digest()
    return [int.from_bytes(digest[at : at + 8], "little") for at in range(0, len(digest), 8)]


class Permutation:
    """Of 0..``size``-1, one for each tuple of key numbers."""

    def __init__(self, size: int, *key: int) -> None:
        if not 1 <= size < 1 << 62:
            raise ValueError(f"a permutation of {size} elements: the size must be between 1 and 2**62 - 1")
        self.size = size
        root = math.isqrt(size - 1) + 1
        self._left_size = np.uint64(root)
        self._right_size = np.uint64(-(-size // root))
        self._keys = [np.uint64(word) for word in hash_words("permutation", *key, num_words=NUM_ROUNDS)]

    def __call__(self, elements: NDArray[np.int64]) -> NDArray[np.int64]:
        """The elements at these places. ValueError if one is not below ``size``."""
        if elements.size and not 0 <= int(elements.min()) <= int(elements.max()) < self.size:
            raise ValueError(f"elements {elements.min()} to {elements.max()} are not all within 0..{self.size - 1}")
        values = self._once(elements.astype(np.uint64))
        while (outside := values >= self.size).any():
            values[outside] = self._once(values[outside])
        return values.astype(np.int64)

    def _once(self, values: NDArray[np.uint64]) -> NDArray[np.uint64]:
        left, right = np.divmod(values, self._right_size)
        for number, key in enumerate(self._keys):
            if number % 2:
                right = (right + _mixed(left ^ key) % self._right_size) % self._right_size
            else:
                left = (left + _mixed(right ^ key) % self._left_size) % self._left_size
        result: NDArray[np.uint64] = left * self._right_size + right
        return result


def _mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    values = (values ^ (values >> _SHIFTS[0])) * _MULTIPLIERS[0]
    values = (values ^ (values >> _SHIFTS[1])) * _MULTIPLIERS[1]
    return values ^ (values >> _SHIFTS[2])
