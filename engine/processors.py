"""Changes to logits before a token is drawn: penalties and bias, hard rules, truncation.

All of it is written for many rows of many requests at once, gathers its parameters from the state
tables and never asks the device for a value. Row i of an entry sees the i drafts before it as
output: they lie in the token table, and ``position_R`` says where the row's text ends.
"""

from __future__ import annotations

import sys
from typing import Protocol

import numpy as np
import torch

from .sampling_state import SamplingState
from .types import MaskRows

_NEVER = float("-inf")


class TextRows(Protocol):
    """Where the text before each logits row lies."""

    row_R: torch.Tensor
    position_R: torch.Tensor
    tokens: torch.Tensor


def column(table: torch.Tensor, names: tuple[str, ...], name: str) -> torch.Tensor:
    """One parameter of every row, as a column ``[R, 1]``."""
    index = names.index(name)
    return table[:, index : index + 1]


def rows_where(wanted_R: torch.Tensor) -> torch.Tensor | slice:
    """The rows to work on: on the CPU only those wanted, on a GPU all of them.

    How many are wanted is a value, and asking a GPU for it would stop the host; rows that need
    nothing carry neutral parameters, so the results are the same.
    """
    if wanted_R.device.type != "cpu":
        return slice(None)
    index_N = wanted_R.nonzero().view(-1)
    return slice(None) if len(index_N) == len(wanted_R) else index_N


def apply_penalties(logits_RV: torch.Tensor, text: TextRows, state: SamplingState) -> None:
    """Repetition over prompt and output, frequency and presence over the output, in place."""
    numbers_RF = state.numbers_MF[text.row_R]
    active_R = (numbers_RF[:, 3:5] != 0).any(1) | (numbers_RF[:, 5] != 1)
    rows = rows_where(active_R)
    row_N, position_N1 = text.row_R[rows], text.position_R[rows, None]
    if not len(row_N):
        return
    numbers_NF = numbers_RF[rows].float()
    integers_NI = state.integers_MI[row_N]
    prompt_len_N1 = column(integers_NI, state.INTEGERS, "prompt_len")
    width = text.tokens.shape[1]
    if logits_RV.device.type == "cpu":
        width = int(position_N1.max())
    tokens_NL = text.tokens[row_N, :width].long().clamp_(0, logits_RV.shape[1] - 1)
    place_L = torch.arange(width, device=logits_RV.device)
    known_NL = place_L < position_N1
    logits_NV = logits_RV[rows]
    seen_NV = torch.zeros_like(logits_NV).scatter_add_(1, tokens_NL, known_NL.float())
    output_NL = (known_NL & (place_L >= prompt_len_N1)).float()
    count_NV = torch.zeros_like(logits_NV).scatter_add_(1, tokens_NL, output_NL)
    factor_N1 = column(numbers_NF, state.NUMBERS, "repetition")
    scaled_NV = torch.where(logits_NV > 0, logits_NV / factor_N1, logits_NV * factor_N1)
    logits_NV = torch.where(seen_NV > 0, scaled_NV, logits_NV)
    logits_NV -= column(numbers_NF, state.NUMBERS, "frequency") * count_NV
    logits_NV -= column(numbers_NF, state.NUMBERS, "presence") * (count_NV > 0)
    logits_RV[rows] = logits_NV


def unpack_bitmask(bitmask_NW: torch.Tensor, width: int) -> torch.Tensor:
    """Forbidden tokens, bool ``[N, width]``, of packed int32 rows; columns beyond them are too."""
    flipped_NW = ~bitmask_NW
    if flipped_NW.device.type == "cpu" and sys.byteorder == "little":
        octets = flipped_NW.contiguous().numpy().view(np.uint8)
        bits = np.unpackbits(octets, axis=-1, bitorder="little")
        forbidden_NB = torch.from_numpy(bits).view(torch.bool)
    else:
        shift_32 = torch.arange(32, dtype=torch.int32, device=flipped_NW.device)
        forbidden_NB = ((flipped_NW[:, :, None] >> shift_32) & 1).bool().flatten(1)
    if forbidden_NB.shape[1] >= width:
        return forbidden_NB[:, :width]
    extra = width - forbidden_NB.shape[1]
    return torch.nn.functional.pad(forbidden_NB, (0, extra), value=True)


def apply_mask(logits_RV: torch.Tensor, masks: MaskRows) -> tuple[torch.Tensor, torch.Tensor]:
    """Forbid what the mask rows forbid, in place. Returns what was forbidden and where: bool
    ``[N, V]``, int64 ``[N]``."""
    device = logits_RV.device
    rows_N = torch.tensor(masks.rows, dtype=torch.int64)
    if device.type == "cuda":
        rows_N = rows_N.pin_memory().to(device, non_blocking=True)
    forbidden_NV = unpack_bitmask(masks.bitmask.to(device, non_blocking=True), logits_RV.shape[1])
    if len(masks.rows) == len(logits_RV):
        # On a CPU a third of masked_fill_ time; elementwise, so it may write into its input.
        torch.where(forbidden_NV, logits_RV.new_full((), _NEVER), logits_RV, out=logits_RV)
    else:
        logits_RV[rows_N] = logits_RV[rows_N].masked_fill_(forbidden_NV, _NEVER)
    return forbidden_NV, rows_N


def apply_bans(logits_RV: torch.Tensor, text: TextRows, state: SamplingState) -> None:
    """allowed_token_ids and bad words of one token, in place."""
    if state.banned_MV is not None:
        logits_RV.masked_fill_(state.banned_MV[text.row_R], _NEVER)


def apply_bad_words(logits_RV: torch.Tensor, text: TextRows, state: SamplingState) -> None:
    """Forbid the last token of a bad word whose other tokens end the output so far, in place."""
    if state.bad_prefix_MBL is None or state.bad_last_MB is None:
        return
    prefix_RBL = state.bad_prefix_MBL[text.row_R]
    last_RB = state.bad_last_MB[text.row_R]
    length = prefix_RBL.shape[2]
    prompt_len_R1 = column(state.integers_MI[text.row_R], state.INTEGERS, "prompt_len")
    place_RL = text.position_R[:, None] - length + torch.arange(length, device=logits_RV.device)
    before_RL = text.tokens[text.row_R[:, None], place_RL.clamp(min=0)].long()
    before_RL = before_RL.masked_fill(place_RL < prompt_len_R1, -3)  # not a token, not a filler
    match_RB = ((prefix_RBL == before_RL[:, None]) | (prefix_RBL == -1)).all(-1)
    penalty_RB = torch.zeros(match_RB.shape, device=logits_RV.device).masked_fill_(match_RB, _NEVER)
    logits_RV.scatter_add_(1, last_RB, penalty_RB)


def apply_min_tokens(
    logits_RV: torch.Tensor,
    text: TextRows,
    state: SamplingState,
    mask: tuple[torch.Tensor, torch.Tensor] | None,
) -> None:
    """Forbid the ids that end a text which is still too short, in place.

    Where a mask row permits nothing but such ids, the grammar has ended and the text may too.
    """
    if state.ends_MV is None:
        return
    integers_RI = state.integers_MI[text.row_R]
    prompt_len_R1 = column(integers_RI, state.INTEGERS, "prompt_len")
    min_tokens_R1 = column(integers_RI, state.INTEGERS, "min_tokens")
    short_R1 = text.position_R[:, None] - prompt_len_R1 < min_tokens_R1
    ends_RV = state.ends_MV[text.row_R]
    if mask is not None:
        forbidden_NV, rows_N = mask
        goes_on_N1 = ~(forbidden_NV | ends_RV[rows_N]).all(-1, keepdim=True)
        short_R1[rows_N] &= goes_on_N1
    logits_RV.masked_fill_(ends_RV & short_R1, _NEVER)


def ordered_head(values_RV: torch.Tensor, count: int, token_V: torch.Tensor) -> torch.Tensor:
    """Ids int64 ``[R, count]`` of the largest values, in order; ties by the lowest id.

    Ties are frequent (bfloat16 logits) and `torch.topk` breaks them as it likes, depending on
    ``count``. So the keys are made unique: the value's bits, as integers in falling order, above
    the id. On the CPU numpy sorts integers several times faster than torch.
    """
    bits_RV = (values_RV.float() + 0.0).view(torch.int32)  # + 0.0: -0.0 is 0.0
    falling_RV = ~(bits_RV ^ ((bits_RV >> 31) & 0x7FFFFFFF))
    key_RV = (falling_RV.long() << 32) | token_V
    whole = count >= key_RV.shape[1]
    if key_RV.device.type == "cpu":
        keys = key_RV.numpy()
        keys = keys if whole else np.partition(keys, count - 1, axis=-1)[:, :count]
        key_RK = torch.from_numpy(np.sort(keys, axis=-1))
    elif whole:
        key_RK = key_RV.sort(-1).values
    else:
        key_RK = key_RV.topk(count, -1, largest=False).values
    return key_RK & 0xFFFFFFFF
