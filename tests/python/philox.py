"""Dropout masks rebuilt from (seed, offset, b, h, i, j), without the package.

Philox4x32-10: Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

from __future__ import annotations

import math
from typing import Sequence, Tuple

import numpy as np
import torch

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (0x9E3779B9, 0xBB67AE85)
_LOW = np.uint64(0xFFFFFFFF)
_WORD = np.uint64(32)


def philox4x32(counter: Sequence, key: Sequence[int], rounds: int = 10) -> Tuple[np.ndarray, ...]:
    """Four 32-bit words (as uint64 arrays) for a counter of four words, each an integer or an array of them."""
    c0, c1, c2, c3 = np.broadcast_arrays(*(np.asarray(c, dtype=np.uint64) for c in counter))
    k0, k1 = int(key[0]), int(key[1])
    for _ in range(rounds):
        a, b = _MULTIPLIERS[0] * c0, _MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (b >> _WORD) ^ c1 ^ np.uint64(k0), b & _LOW, (a >> _WORD) ^ c3 ^ np.uint64(k1), a & _LOW
        k0, k1 = (k0 + _WEYL[0]) & 0xFFFFFFFF, (k1 + _WEYL[1]) & 0xFFFFFFFF
    return c0, c1, c2, c3


def _halves(value: int) -> Tuple[int, int]:
    return value & 0xFFFFFFFF, (value >> 32) & 0xFFFFFFFF


def random_bytes(rng_state: Sequence[int], B: int, H: int, Sq: int, Sk: int) -> np.ndarray:
    """uint8 (B,H,Sq,Sk): the byte that decides about query i and key j of head h in sequence b."""
    seed, offset = (int(x) for x in rng_state)
    subkey = [int(w) for w in philox4x32((*_halves(offset), 0, 0), _halves(seed))[:2]]
    # Of 64 keys, call c gives the 16 with j / 4 % 4 == c: word w of it those with j / 16 % 4 == w, a byte each.
    blocks = -(-Sk // 64)
    b, h, i, call = np.ogrid[:B, :H, :Sq, : 4 * blocks]
    words = np.stack(philox4x32((call, i, b, h), subkey), axis=-1).astype("<u4")
    in_key_order = words.reshape(B, H, Sq, blocks, 4, 4).swapaxes(-1, -2)
    return np.ascontiguousarray(in_key_order).view(np.uint8).reshape(B, H, Sq, blocks * 64)[..., :Sk]


def keep_mask(rng_state: Sequence[int], p: float, B: int, H: int, Sq: int, Sk: int) -> torch.Tensor:
    """bool (B,H,Sq,Sk), True = kept. Element kept iff its byte <= floor(255 * (1 - p))."""
    return torch.from_numpy(random_bytes(rng_state, B, H, Sq, Sk) <= math.floor(255 * (1 - p)))


def keep_probability(p: float) -> float:
    """The probability with which `keep_mask` keeps an element."""
    return (math.floor(255 * (1 - p)) + 1) / 256
