"""Counter-based random numbers: a function of (seed, position, stream) and token id, no state.

The noise of a token does not depend on the batch, the step or the device that computes it, so a
request's output is the same in any company, with or without drafts, and a preempted request goes on
as if nothing had happened. The generator is the finaliser of SplitMix64 (Steele, Lea, Flood 2014:
"Fast Splittable Pseudorandom Number Generators") applied to each part of the key in turn, then to
the sum of the key and the finalised token id; every number has passed it at least twice after
any of its inputs entered. Everything is int64 arithmetic that wraps, with logical shifts made of
arithmetic ones and masks, hence the same bits on the CPU and on a GPU.

Streams keep the uses apart: TARGET draws tokens, DRAFT draws drafts, ACCEPT decides on drafts,
RECOVERY draws after a refusal.
"""

from __future__ import annotations

import torch

TARGET = 0
DRAFT = 1
ACCEPT = 2
RECOVERY = 3

_WORD = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15  # 2**64 / golden ratio: SplitMix64's increment
_MULTIPLY_1 = 0xBF58476D1CE4E5B9
_MULTIPLY_2 = 0x94D049BB133111EB
_TOKEN_SALT = 0xD1B54A32D192ED03  # keeps hashed tokens apart from hashed key parts
_CHILD_SALT = 0x8CB92BA72F3D8DD7  # keeps derived seeds apart from noise keys


def signed(word: int) -> int:
    """An unsigned 64-bit word as the int64 with the same bits."""
    word &= _WORD
    return word - (1 << 64) if word >> 63 else word


def mix_word(word: int) -> int:
    """SplitMix64's finaliser on an unsigned 64-bit word: a bijection."""
    word &= _WORD
    word = ((word ^ (word >> 30)) * _MULTIPLY_1) & _WORD
    word = ((word ^ (word >> 27)) * _MULTIPLY_2) & _WORD
    return word ^ (word >> 31)


def derive_seed(parent: int, *parts: int) -> int:
    """An unsigned 64-bit seed for a child of ``parent``: the ``parts``-th request, the n-th
    sequence, ... Different parts give unrelated seeds."""
    word = mix_word((parent ^ _CHILD_SALT) + _GOLDEN)
    for part in parts:
        word = mix_word(word + mix_word((part + 1) * _GOLDEN))
    return word


def _mix_(x: torch.Tensor) -> torch.Tensor:
    """`mix_word` on every element of an int64 tensor, in place."""
    for shift, factor in ((30, _MULTIPLY_1), (27, _MULTIPLY_2), (31, None)):
        high = x >> shift
        x ^= high.bitwise_and_((1 << (64 - shift)) - 1)
        if factor is not None:
            x *= signed(factor)
    return x


def noise_key(seed_R: torch.Tensor, *parts: torch.Tensor | int) -> torch.Tensor:
    """Keys int64 ``[R]`` from seeds int64 ``[R]`` and parts: positions int64 ``[R]``, a stream."""
    key_R = _mix_(seed_R + signed(_GOLDEN))
    for part in parts:
        if isinstance(part, int):
            key_R = _mix_(key_R + signed(mix_word((part + 1) * _GOLDEN)))
        else:
            key_R = _mix_(key_R + _mix_((part + 1) * signed(_GOLDEN)))
    return key_R


def token_hash(tokens: torch.Tensor) -> torch.Tensor:
    """What token ids (int64, any shape) add to a key. Worth keeping for a whole vocabulary."""
    return _mix_(tokens * signed(_GOLDEN) + signed(_TOKEN_SALT))


def uniform(key: torch.Tensor, token: torch.Tensor | int = 0) -> torch.Tensor:
    """Uniform float64 in (0, 1), both ends excluded, of 52 bits.

    ``key``: int64, from `noise_key`; ``token``: from `token_hash`; they broadcast.
    """
    bits = _mix_(key + token)
    # Odd multiples of 2**-53: neither 0 nor 1, and each is a float64.
    return (bits >> 12).bitwise_and_((1 << 52) - 1).double().add_(0.5).mul_(2.0**-52)


def gumbel(key: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
    """Standard Gumbel noise, float32, finite: the argmax of logits + noise is a draw from softmax.

    The inner logarithm is taken in float64: near 1 a uniform number needs all of its bits.
    """
    return uniform(key, token).log_().neg_().float().log_().neg_()
