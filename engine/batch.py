"""The step's gathered inputs.

Counts come from the plan (the host knows them), starts come from the device tables (the host may
not know them yet): positions, token ids and KV slots are computed on the device from both.

Shape suffixes: T tokens of the step, B entries, R logits rows, S sampling entries.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from .attention import AttentionBatch
from .sampler import SamplingBatch
from .state import DeviceState
from .types import Entry, StepPlan


@dataclass(slots=True)
class StepBatch:
    """Inputs of one forward and of the sampling behind it.

    ``input_ids_T``, ``positions_T``: int64. ``logits_index_R``: the forward's row of each logits
    row. ``chunk_rows`` and ``chunk_counts``: entries that only compute prompt tokens.
    """

    input_ids_T: torch.Tensor
    positions_T: torch.Tensor
    attention: AttentionBatch
    logits_index_R: torch.Tensor
    sampling: SamplingBatch | None
    chunk_rows: torch.Tensor
    chunk_counts: torch.Tensor
    query_starts: list[int]


def build_batch(plan: StepPlan, state: DeviceState, block_size: int) -> StepBatch:
    """Gather a closed plan's inputs from the tables. Launches device work, waits for none."""
    entries = plan.entries
    rows = np.array([e.row for e in entries], dtype=np.int64)
    counts = np.array([e.num_tokens for e in entries], dtype=np.int64)
    query_start_loc = np.zeros(len(entries) + 1, dtype=np.int64)
    np.cumsum(counts, out=query_start_loc[1:])
    offsets = np.arange(query_start_loc[-1]) - np.repeat(query_start_loc[:-1], counts)
    row_T, offset_T = state.upload(np.repeat(rows, counts), offsets)
    rows_B, counts_B = state.upload(rows, counts)

    positions_T = state.computed[row_T] + offset_T
    block_T = state.block_table[row_T, positions_T // block_size]
    seq_lens = [e.start + e.num_tokens for e in entries]
    most_blocks = (max(seq_lens) + block_size - 1) // block_size
    attention = AttentionBatch(
        query_start_loc_B1=state.upload(query_start_loc)[0],
        seq_lens_B=state.computed[rows_B] + counts_B,
        block_table_BM=state.block_table[rows_B, :most_blocks],
        slot_mapping_T=block_T * block_size + positions_T % block_size,
        query_lens=counts.tolist(),
        seq_lens=seq_lens,
    )
    chunks = np.array([not e.samples for e in entries], dtype=bool)
    chunk_rows, chunk_counts = state.upload(rows[chunks], counts[chunks])
    logits_index_R, sampling = _sampling_batch(entries, query_start_loc, state)
    return StepBatch(
        input_ids_T=state.tokens[row_T, positions_T],
        positions_T=positions_T,
        attention=attention,
        logits_index_R=logits_index_R,
        sampling=sampling,
        chunk_rows=chunk_rows,
        chunk_counts=chunk_counts,
        query_starts=query_start_loc.tolist(),
    )


def _sampling_batch(
    entries: list[Entry], query_start_loc: np.ndarray, state: DeviceState
) -> tuple[torch.Tensor, SamplingBatch | None]:
    """The last ``num_draft + 1`` rows of every sampling entry, in plan order."""
    sampling = [(i, e) for i, e in enumerate(entries) if e.samples]
    if not sampling:
        return torch.empty(0, dtype=torch.int64, device=state.device), None
    rows = np.array([e.row for _, e in sampling], dtype=np.int64)
    first_row = np.array([e.first_logits_row for _, e in sampling], dtype=np.int64)
    num_draft = np.array([e.num_draft for _, e in sampling], dtype=np.int64)
    counts = num_draft + 1
    ends = query_start_loc[1:][[i for i, _ in sampling]]
    offset = np.arange(int(counts.sum())) - np.repeat(first_row, counts)
    rows_S, first_row_S, num_draft_S = state.upload(rows, first_row, num_draft)
    row_R, offset_R, index_R, is_draft_R = state.upload(
        np.repeat(rows, counts),
        offset,
        np.repeat(ends - counts, counts) + offset,
        offset < np.repeat(num_draft, counts),
    )
    position_R = state.length[row_R] + offset_R
    draft_R = torch.where(is_draft_R.bool(), state.tokens[row_R, position_R], -1)
    return index_R, SamplingBatch(
        requests=[e.request for _, e in sampling],
        rows_S=rows_S,
        first_row_S=first_row_S,
        num_draft_S=num_draft_S,
        row_R=row_R,
        offset_R=offset_R,
        position_R=position_R,
        draft_R=draft_R,
        tokens=state.tokens,
        length=state.length,
    )
