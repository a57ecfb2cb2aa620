"""Sampling and one-hot verification of a step.

A step has R logits rows: for each sampling request one row behind its committed tokens and one
behind each of its drafts. Every row is processed as if the drafts before it were output and gets
the token that plain decoding would have sampled there, because noise is a function of (seed,
absolute position, token). A draft is accepted where it equals that token: rows up to the first
difference are what decoding without drafts would have produced, whoever proposed, however many.

Order: penalties and bias; hard rules (mask, allowed ids, bad words, minimum length); temperature;
top-k; top-p; min-p; then the argmax of logits plus Gumbel noise, which is a draw from their
softmax. Truncation keeps exact counts: ties go to the lowest id, as they do for greedy.

Nothing here waits for a GPU. On the CPU, where looking at a value is free, rows that do not need
some work are left out of it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .logprobs import TokenLogprobs, token_logprobs
from .noise import TARGET, gumbel, noise_key
from .processors import (
    apply_bad_words,
    apply_bans,
    apply_mask,
    apply_min_tokens,
    apply_penalties,
    column,
    ordered_head,
    rows_where,
)
from .sampling_state import SMALL_TOP_K, Feature, SamplingState, top_logprobs
from .types import MaskRows, PositionLogprobs, Request

_NEVER = float("-inf")
_HEADS = (1024, 8192)  # how many candidates the CPU tries for top-p before it sorts everything
_NOISE_ELEMENTS = 1 << 23  # noise made at once: bounds temporary memory to a few 64 MiB tensors


@dataclass(slots=True)
class SamplingBatch:
    """The logits rows of a step. S sampling requests, R = S + all their drafts.

    ``rows_S``, ``first_row_S``, ``num_draft_S``: int64 state row, first logits row and number of
    drafts of each request. ``row_R``: state row; ``offset_R``: drafts before the row within its
    entry; ``position_R``: absolute position of the token the row samples; ``draft_R``: the draft
    to compare with, -1 in each entry's last row. All int64. ``tokens``: the token table
    ``[max_num_seqs, width]``, drafts included; ``length``: committed tokens before this step.
    """

    requests: list[Request]
    rows_S: torch.Tensor
    first_row_S: torch.Tensor
    num_draft_S: torch.Tensor
    row_R: torch.Tensor
    offset_R: torch.Tensor
    position_R: torch.Tensor
    draft_R: torch.Tensor
    tokens: torch.Tensor
    length: torch.Tensor


@dataclass(slots=True)
class SampleOutput:
    """``token_R``: int64; ``empty_R``: bool, no token was left (or the logits were not numbers):
    nothing was sampled and the token is 0; ``num_accepted_S``: int64 leading drafts that agree.

    Entry s emits ``token_R[first_row_S : first_row_S + num_accepted_S + 1]``.
    """

    token_R: torch.Tensor
    empty_R: torch.Tensor
    num_accepted_S: torch.Tensor
    logprobs: TokenLogprobs | None = None

    def logprobs_to_host(self) -> list[PositionLogprobs] | None:
        """One dictionary for each of the R rows (empty where none were asked for). Waits."""
        return None if self.logprobs is None else self.logprobs.to_host()


def sample(
    logits_RV: torch.Tensor,
    batch: SamplingBatch,
    state: SamplingState,
    masks: MaskRows | None = None,
) -> SampleOutput:
    """Sample every row and verify the drafts.

    ``logits_RV``: float32, V = ``state.vocab_size``; modified in place. ``masks``: see `MaskRows`.
    """
    features = state.features(batch.requests)
    raw_RV = logits_RV.clone() if features & Feature.RAW_LOGPROBS else None
    _process(logits_RV, batch, state, masks, features)
    token_R = _argmax(logits_RV)
    best_R = logits_RV.gather(1, token_R[:, None])[:, 0]
    law_RV = logits_RV
    if features & Feature.RANDOM:
        wants_law = bool(features & Feature.PROCESSED_LOGPROBS)
        law_RV = _draw_random(logits_RV, token_R, best_R, batch, state, features, wants_law)
    empty_R = ~(best_R > _NEVER)  # NaN compares false
    token_R.masked_fill_(empty_R, 0)
    accepted_S = verify_one_hot(token_R, empty_R, batch)
    logprobs = _logprobs(raw_RV, law_RV, token_R, batch, state, features)
    return SampleOutput(token_R, empty_R, accepted_S, logprobs)


def _argmax(logits_RV: torch.Tensor) -> torch.Tensor:
    """The first largest entry of each row, int64 ``[R]``; a NaN counts as the largest."""
    if logits_RV.device.type == "cpu":  # NumPy's takes a tenth of torch's time on rows this long
        return torch.from_numpy(logits_RV.numpy().argmax(-1))
    return logits_RV.argmax(-1)


def verify_one_hot(
    token_R: torch.Tensor, empty_R: torch.Tensor, batch: SamplingBatch
) -> torch.Tensor:
    """Accepted drafts of each entry, int64 ``[S]``: rows before the first whose token differs."""
    num_rows = len(token_R)
    index_R = torch.arange(num_rows, device=token_R.device)
    agrees_R = (token_R == batch.draft_R) & ~empty_R
    # The next row, from each row on, that disagrees; the last row of an entry always does.
    stop_R = torch.where(agrees_R, num_rows, index_R).flip(0).cummin(0).values.flip(0)
    return torch.minimum(stop_R[batch.first_row_S] - batch.first_row_S, batch.num_draft_S)


def _process(
    logits_RV: torch.Tensor,
    batch: SamplingBatch,
    state: SamplingState,
    masks: MaskRows | None,
    features: int,
) -> None:
    """Penalties, bias and hard rules, in place."""
    if features & Feature.PENALTIES:
        apply_penalties(logits_RV, batch, state)
    if features & Feature.BIAS and state.bias_MV is not None:
        logits_RV += state.bias_MV[batch.row_R]
    mask = None
    if masks is not None and masks.rows:
        mask = apply_mask(logits_RV, masks)
    if features & Feature.BANS:
        apply_bans(logits_RV, batch, state)
    if features & Feature.BAD_WORDS:
        apply_bad_words(logits_RV, batch, state)
    if features & Feature.MIN_TOKENS:
        apply_min_tokens(logits_RV, batch, state, mask)


def _draw_random(
    logits_RV: torch.Tensor,
    token_R: torch.Tensor,
    best_R: torch.Tensor,
    batch: SamplingBatch,
    state: SamplingState,
    features: int,
    wants_law: bool,
) -> torch.Tensor:
    """Replace the greedy tokens (and best values) of rows with a temperature by drawn ones.

    Returns the logits of the law drawn from, where wanted: after temperature and truncation for
    random rows, as given for greedy ones.
    """
    random_R = state.numbers_MF[batch.row_R, 0] > 0
    rows = rows_where(random_R)
    numbers_NF = state.numbers_MF[batch.row_R[rows]]
    integers_NI = state.integers_MI[batch.row_R[rows]]
    temperature_N1 = column(numbers_NF, state.NUMBERS, "temperature").float()
    temperature_N1 = torch.where(temperature_N1 > 0, temperature_N1, 1)
    seed_N = column(integers_NI, state.INTEGERS, "seed")[:, 0]
    key_N1 = noise_key(seed_N, batch.position_R[rows], TARGET)[:, None]
    # Relative to the best logit nothing overflows, however small the temperature.
    scaled_NV = (logits_RV[rows] - best_R[rows, None]).div_(temperature_N1)

    law_NV = scaled_NV
    drawn_N = torch.empty_like(token_R[rows])
    value_N = torch.empty_like(best_R[rows])
    if features & (Feature.TOP_K | Feature.TOP_P):
        cut_N = (column(integers_NI, state.INTEGERS, "top_k")[:, 0] < state.vocab_size) | (
            column(numbers_NF, state.NUMBERS, "top_p")[:, 0] < 1
        )
        some = rows_where(cut_N)
        ids_CK, kept_CK = _truncate(
            scaled_NV[some], numbers_NF[some], integers_NI[some], state, features
        )
        drawn_N[some], value_N[some] = _draw(kept_CK, key_N1[some], state.token_hash_V, ids_CK)
        if wants_law:
            law_NV = scaled_NV.clone()
            law_NV[some] = torch.full_like(law_NV[some], _NEVER).scatter_(1, ids_CK, kept_CK)
        rest = None if isinstance(some, slice) else (~cut_N).nonzero().view(-1)
    else:
        rest = slice(None)
    if rest is not None:
        whole_NV = scaled_NV[rest]
        if features & Feature.MIN_P:
            floor_N1 = column(numbers_NF, state.NUMBERS, "min_p")[rest].log().float()
            whole_NV = whole_NV.masked_fill(whole_NV < floor_N1, _NEVER)
        drawn_N[rest], value_N[rest] = _draw(whole_NV, key_N1[rest], state.token_hash_V, None)
        if wants_law and features & Feature.MIN_P:
            law_NV = law_NV.clone()
            law_NV[rest] = whole_NV
    picked_N = random_R[rows]
    token_R[rows] = torch.where(picked_N, drawn_N, token_R[rows])
    best_R[rows] = torch.where(picked_N, value_N, best_R[rows])
    if not wants_law:
        return logits_RV
    law_RV = logits_RV.clone()
    law_RV[rows] = torch.where(picked_N[:, None], law_NV, logits_RV[rows])
    return law_RV


def _draw(
    values_NK: torch.Tensor,
    key_N1: torch.Tensor,
    hash_V: torch.Tensor,
    ids_NK: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Argmax of values plus noise: token ids int64 ``[N]`` and the winning sums float32 ``[N]``.

    ``ids_NK``: the candidates' token ids; None where column is id.
    """
    tokens: list[torch.Tensor] = []
    sums: list[torch.Tensor] = []
    step = max(1, _NOISE_ELEMENTS // max(1, values_NK.shape[1]))
    for start in range(0, max(len(values_NK), 1), step):
        part = slice(start, start + step)
        hash_NK = hash_V if ids_NK is None else hash_V[ids_NK[part]]
        score_NK = gumbel(key_N1[part], hash_NK).add_(values_NK[part])
        index_N1 = score_NK.argmax(-1, keepdim=True)
        sums.append(score_NK.gather(1, index_N1)[:, 0])
        tokens.append((index_N1 if ids_NK is None else ids_NK[part].gather(1, index_N1))[:, 0])
    return torch.cat(tokens), torch.cat(sums)


def _truncate(
    scaled_NV: torch.Tensor,
    numbers_NF: torch.Tensor,
    integers_NI: torch.Tensor,
    state: SamplingState,
    features: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Candidates in order of probability, ids int64 ``[N, K]`` and logits float32 ``[N, K]``, with
    -inf for what top-k, top-p or min-p remove.

    ``scaled_NV``: logits over temperature, relative to the largest. K is as small as is safe.
    """
    top_k_N1 = column(integers_NI, state.INTEGERS, "top_k")
    top_p_N1 = column(numbers_NF, state.NUMBERS, "top_p")
    floor_N1 = column(numbers_NF, state.NUMBERS, "min_p").log().float()
    # Sums in float64: their rounding, which depends on the order of summation, decides nothing.
    all_N1 = torch.zeros_like(top_p_N1)
    if features & Feature.WIDE:
        all_N1 = scaled_NV.exp().sum(-1, keepdim=True, dtype=torch.float64)
    vocab_size = scaled_NV.shape[1]
    sizes = [vocab_size] if features & Feature.WIDE else [min(SMALL_TOP_K, vocab_size)]
    if scaled_NV.device.type == "cpu" and vocab_size > _HEADS[-1] and len(scaled_NV):
        largest = max(1, int(top_k_N1.max()))
        sizes = [largest] if largest <= SMALL_TOP_K else [*_HEADS, vocab_size]
    ids_NK, kept_NK = scaled_NV, scaled_NV
    for size in sizes:
        ids_NK = ordered_head(scaled_NV, size, state.token_V)
        values_NK = scaled_NV.gather(1, ids_NK)
        within_NK = torch.arange(size, device=scaled_NV.device) < top_k_N1
        weight_NK = values_NK.exp().double().mul_(within_NK)
        total_N1 = torch.where(top_k_N1 <= size, weight_NK.sum(-1, keepdim=True), all_N1)
        until_NK = weight_NK.cumsum(-1)
        wanted_N1 = torch.where(top_p_N1 < 1, top_p_N1 * total_N1, torch.inf)
        if size != sizes[-1]:
            # The mass under a top_k beyond this head is not known yet.
            known_N1 = top_k_N1 >= vocab_size
            enough_N1 = (top_k_N1 <= size) | (known_N1 & (until_NK[:, -1:] >= wanted_N1))
            if not bool(enough_N1.all()):
                continue
        kept = within_NK & (until_NK - weight_NK < wanted_N1) & (values_NK >= floor_N1)
        kept_NK = values_NK.masked_fill(~kept, _NEVER)
        break
    return ids_NK, kept_NK


def _logprobs(
    raw_RV: torch.Tensor | None,
    law_RV: torch.Tensor,
    token_R: torch.Tensor,
    batch: SamplingBatch,
    state: SamplingState,
    features: int,
) -> TokenLogprobs | None:
    if not features & (Feature.RAW_LOGPROBS | Feature.PROCESSED_LOGPROBS):
        return None
    integers_RI = state.integers_MI[batch.row_R]
    if raw_RV is not None and features & Feature.PROCESSED_LOGPROBS:
        processed_R1 = column(integers_RI, state.INTEGERS, "processed").bool()
        law_RV = torch.where(processed_R1, law_RV, raw_RV)
    elif raw_RV is not None:
        law_RV = raw_RV
    top_R = column(integers_RI, state.INTEGERS, "logprobs")[:, 0]
    most = max(top_logprobs(r.params.logprobs, state.vocab_size) for r in batch.requests)
    return token_logprobs(law_RV, token_R, top_R, most)
