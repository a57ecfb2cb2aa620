"""What the sampler keeps on the device for every state row, and what a step needs of it.

A request's parameters are written once, when it enters a row, and gathered by row in each step, so
no step copies parameters to the device. Lists of token ids become dense rows over the vocabulary
(bias float32, bans bool): a gather and one pass, whatever their length, and no ragged work. The
dense tables exist only once some request uses them. Everything that changes with the text
(penalties, minimum length, bad words) is computed from the token table, which already holds the
drafts: drafts, preemption and resumption need no further state.

The host remembers which features each request uses, so a step without one skips it entirely.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntFlag

import torch

from .noise import signed, token_hash
from .types import Request


class Feature(IntFlag):
    """Work that a step has to do for at least one of its requests."""

    RANDOM = 1  # temperature above 0
    TOP_K = 2
    TOP_P = 4
    MIN_P = 8
    PENALTIES = 16
    BIAS = 32
    BANS = 64  # allowed_token_ids, bad words of one token
    BAD_WORDS = 128  # of several tokens
    MIN_TOKENS = 256
    WIDE = 512  # random without a small top_k: candidates are the whole vocabulary
    RAW_LOGPROBS = 1024
    PROCESSED_LOGPROBS = 2048


SMALL_TOP_K = 256
"""Up to here the k largest are selected, beyond it everything is sorted."""

# Values that float32 arithmetic on logits survives.
_TEMPERATURE = (1e-30, 1e30)
_REPETITION = (1e-10, 1e10)
_BIAS = 1e10


class SamplingState:
    """Tables of ``max_num_seqs`` (M) rows; V = ``vocab_size`` = columns of the logits.

    ``numbers_MF`` float64: temperature, top_p, min_p, presence, frequency, repetition.
    ``integers_MI`` int64: top_k (V where off), prompt length, min_tokens, seed (two's
    complement), logprobs (-1 where not asked for, at most V), whether they are processed ones.
    ``bias_MV`` float32, ``banned_MV`` and ``ends_MV`` bool: None until used. ``ends_MV`` marks the
    stop ids that min_tokens bans. ``bad_prefix_MBL`` int64: all but the last token of each bad
    word, aligned right, -1 before it, -2 where there is no word; ``bad_last_MB`` the last token.
    """

    NUMBERS = ("temperature", "top_p", "min_p", "presence", "frequency", "repetition")
    INTEGERS = ("top_k", "prompt_len", "min_tokens", "seed", "logprobs", "processed")

    def __init__(self, max_num_seqs: int, vocab_size: int, device: torch.device | str) -> None:
        self.max_num_seqs = max_num_seqs
        self.vocab_size = vocab_size
        self.device = torch.device(device)
        neutral = torch.tensor([0, 1, 0, 0, 0, 1], dtype=torch.float64, device=self.device)
        self.numbers_MF = neutral.repeat(max_num_seqs, 1)
        self.integers_MI = torch.zeros(
            max_num_seqs, len(self.INTEGERS), dtype=torch.int64, device=self.device
        )
        self.bias_MV: torch.Tensor | None = None
        self.banned_MV: torch.Tensor | None = None
        self.ends_MV: torch.Tensor | None = None
        self.bad_prefix_MBL: torch.Tensor | None = None
        self.bad_last_MB: torch.Tensor | None = None
        self.token_V = torch.arange(vocab_size, device=self.device)
        self.token_hash_V = token_hash(self.token_V)
        self._features: dict[int, tuple[str, int]] = {}  # row -> request id, Feature bits

    def set_row(self, row: int, request: Request) -> None:
        """Write everything that sampling needs to know of a request; the row's past is gone."""
        self._features[row] = (request.request_id, features_of(request))
        params = request.params
        clamped_t = min(max(params.temperature, _TEMPERATURE[0]), _TEMPERATURE[1])
        numbers = [
            clamped_t if params.temperature > 0 else 0.0,
            params.top_p,
            params.min_p,
            params.presence_penalty,
            params.frequency_penalty,
            min(max(params.repetition_penalty, _REPETITION[0]), _REPETITION[1]),
        ]
        top_k = params.top_k if params.top_k > 0 else self.vocab_size
        integers = [
            min(top_k, self.vocab_size),
            request.num_prompt,
            params.min_tokens,
            signed(request.seed),
            top_logprobs(params.logprobs, self.vocab_size),
            int(params.logprobs_mode == "processed"),
        ]
        self.numbers_MF[row].copy_(self._staged(numbers, torch.float64), non_blocking=True)
        self.integers_MI[row].copy_(self._staged(integers, torch.int64), non_blocking=True)
        self._set_bias(row, request)
        self._set_bans(row, request)
        self._set_ends(row, request)
        self._set_bad_words(row, [word for word in request.bad_words_token_ids if len(word) > 1])

    def features(self, requests: Iterable[Request]) -> int:
        """Union of the features (`Feature` bits) of a step's requests."""
        union = 0
        for request in requests:
            name, bits = self._features.get(request.row, ("", 0))
            if name != request.request_id:  # cancelled: its row is gone, its logits rows are not
                bits = features_of(request)
            # The committed length is a lower bound when a step is in flight: at worst work in vain.
            if bits & Feature.MIN_TOKENS and request.num_output >= request.params.min_tokens:
                bits &= ~Feature.MIN_TOKENS.value
            union |= bits
        return union

    def _staged(self, values: list[float] | list[int], dtype: torch.dtype) -> torch.Tensor:
        """Host values in memory from which the device copies without waiting."""
        tensor = torch.tensor(values, dtype=dtype)
        return tensor.pin_memory() if self.device.type == "cuda" else tensor

    def _ids(self, tokens: Iterable[int]) -> torch.Tensor:
        return self._staged(list(tokens), torch.int64).to(self.device, non_blocking=True)

    def _dense(self, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(self.max_num_seqs, self.vocab_size, dtype=dtype, device=self.device)

    def _set_bias(self, row: int, request: Request) -> None:
        bias = request.params.logit_bias
        if bias and self.bias_MV is None:
            self.bias_MV = self._dense(torch.float32)
        if self.bias_MV is not None:
            self.bias_MV[row].zero_()
        if bias and self.bias_MV is not None:
            values = [min(max(value, -_BIAS), _BIAS) for value in bias.values()]
            staged = self._staged(values, torch.float32).to(self.device, non_blocking=True)
            self.bias_MV[row].index_copy_(0, self._ids(bias), staged)

    def _set_bans(self, row: int, request: Request) -> None:
        allowed = request.params.allowed_token_ids
        single = [word[0] for word in request.bad_words_token_ids if len(word) == 1]
        used = allowed is not None or bool(single)
        if used and self.banned_MV is None:
            self.banned_MV = self._dense(torch.bool)
        if self.banned_MV is None:
            return
        self.banned_MV[row].fill_(allowed is not None)
        if allowed is not None:
            self.banned_MV[row].index_fill_(0, self._ids(allowed), False)
        if single:
            self.banned_MV[row].index_fill_(0, self._ids(single), True)

    def _set_ends(self, row: int, request: Request) -> None:
        ends = request.stop_token_ids | request.eos_token_ids
        used = request.params.min_tokens > 0 and bool(ends)
        if used and self.ends_MV is None:
            self.ends_MV = self._dense(torch.bool)
        if self.ends_MV is not None:
            self.ends_MV[row].zero_()
            if used:
                self.ends_MV[row].index_fill_(0, self._ids(sorted(ends)), True)

    def _set_bad_words(self, row: int, words: list[tuple[int, ...]]) -> None:
        if words:
            self._reserve_bad_words(len(words), max(len(word) for word in words) - 1)
        if self.bad_prefix_MBL is None or self.bad_last_MB is None:
            return
        self.bad_prefix_MBL[row].fill_(-2)
        self.bad_last_MB[row].zero_()
        if words:
            length = self.bad_prefix_MBL.shape[2]
            prefixes = [[-1] * (length + 1 - len(word)) + list(word[:-1]) for word in words]
            flat = self._ids(token for prefix in prefixes for token in prefix)
            self.bad_prefix_MBL[row, : len(words)] = flat.view(len(words), length)
            self.bad_last_MB[row, : len(words)] = self._ids(word[-1] for word in words)

    def _reserve_bad_words(self, count: int, length: int) -> None:
        """Room for ``count`` words with ``length`` tokens before the last one, in every row."""
        old, old_last = self.bad_prefix_MBL, self.bad_last_MB
        if old is not None and old.shape[1] >= count and old.shape[2] >= length:
            return
        if old is not None:
            count, length = max(count, old.shape[1]), max(length, old.shape[2])
        shape = (self.max_num_seqs, count, length)
        new = torch.full(shape, -2, dtype=torch.int64, device=self.device)
        last = torch.zeros(shape[:2], dtype=torch.int64, device=self.device)
        if old is not None and old_last is not None:
            exists_MB = old[:, :, -1] != -2
            pad = length - old.shape[2]
            new[:, : old.shape[1], pad:] = old
            new[:, : old.shape[1], :pad] = torch.where(exists_MB, -1, -2)[:, :, None]
            last[:, : old_last.shape[1]] = old_last
        self.bad_prefix_MBL, self.bad_last_MB = new, last


def top_logprobs(wanted: int | None, vocab_size: int) -> int:
    """Entries beside the sampled token's: -1 where no logprobs are wanted at all."""
    if wanted is None:
        return -1
    return vocab_size if wanted == -1 else min(wanted, vocab_size)


def features_of(request: Request) -> int:
    """`Feature` bits that a request's parameters call for."""
    params = request.params
    random = params.temperature > 0
    small_k = 0 < params.top_k <= SMALL_TOP_K
    words = request.bad_words_token_ids
    ends = request.stop_token_ids | request.eos_token_ids
    logprobs = params.logprobs is not None
    used = {
        Feature.RANDOM: random,
        Feature.TOP_K: random and params.top_k > 0,
        Feature.TOP_P: random and params.top_p < 1,
        Feature.MIN_P: random and params.min_p > 0,
        Feature.WIDE: random and not small_k,
        Feature.PENALTIES: params.presence_penalty != 0
        or params.frequency_penalty != 0
        or params.repetition_penalty != 1,
        Feature.BIAS: bool(params.logit_bias),
        Feature.BANS: params.allowed_token_ids is not None or any(len(w) == 1 for w in words),
        Feature.BAD_WORDS: any(len(word) > 1 for word in words),
        Feature.MIN_TOKENS: params.min_tokens > 0 and bool(ends),
        Feature.RAW_LOGPROBS: logprobs and params.logprobs_mode == "raw",
        Feature.PROCESSED_LOGPROBS: logprobs and params.logprobs_mode == "processed",
    }
    return sum(feature.value for feature, on in used.items() if on)
