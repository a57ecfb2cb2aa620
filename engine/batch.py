"""The step's gathered inputs.

Counts come from the plan (the host knows them), starts come from the device tables (the host may
not know them yet): positions, token ids and KV slots are computed on the device from both.

What follows from rows and counts alone is a `Layout`. A batch that goes on decoding has the same
one step after step, so the last is kept.

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


@dataclass(slots=True, frozen=True)
class Layout:
    """Index tensors of a step that depend on its entries' rows and counts alone; never written."""

    counts: list[int]
    query_starts: list[int]
    row_T: torch.Tensor
    offset_T: torch.Tensor
    rows_B: torch.Tensor
    counts_B: torch.Tensor
    query_start_loc_B1: torch.Tensor
    chunk_rows: torch.Tensor
    chunk_counts: torch.Tensor
    rows_S: torch.Tensor
    first_row_S: torch.Tensor
    num_draft_S: torch.Tensor
    row_R: torch.Tensor
    offset_R: torch.Tensor
    index_R: torch.Tensor
    is_draft_R: torch.Tensor


def _layout(entries: list[Entry], state: DeviceState) -> Layout:
    rows = np.array([e.row for e in entries], dtype=np.int64)
    counts = np.array([e.num_tokens for e in entries], dtype=np.int64)
    samples = np.array([e.samples for e in entries], dtype=bool)
    num_draft = np.array([e.num_draft for e in entries], dtype=np.int64)[samples]
    query_start_loc = np.zeros(len(entries) + 1, dtype=np.int64)
    np.cumsum(counts, out=query_start_loc[1:])
    offsets = np.arange(query_start_loc[-1]) - np.repeat(query_start_loc[:-1], counts)
    row_T, offset_T = state.upload(np.repeat(rows, counts), offsets)
    rows_B, counts_B = state.upload(rows, counts)
    chunk_rows, chunk_counts = state.upload(rows[~samples], counts[~samples])
    # The last num_draft + 1 rows of every sampling entry, in plan order.
    first_row = np.array([e.first_logits_row for e in entries], dtype=np.int64)[samples]
    ends = query_start_loc[1:][samples]
    logits = num_draft + 1
    offset = np.arange(int(logits.sum())) - np.repeat(first_row, logits)
    rows_S, first_row_S, num_draft_S = state.upload(rows[samples], first_row, num_draft)
    row_R, offset_R, index_R, is_draft_R = state.upload(
        np.repeat(rows[samples], logits),
        offset,
        np.repeat(ends - logits, logits) + offset,
        offset < np.repeat(num_draft, logits),
    )
    return Layout(
        counts=counts.tolist(),
        query_starts=query_start_loc.tolist(),
        row_T=row_T,
        offset_T=offset_T,
        rows_B=rows_B,
        counts_B=counts_B,
        query_start_loc_B1=state.upload(query_start_loc)[0],
        chunk_rows=chunk_rows,
        chunk_counts=chunk_counts,
        rows_S=rows_S,
        first_row_S=first_row_S,
        num_draft_S=num_draft_S,
        row_R=row_R,
        offset_R=offset_R,
        index_R=index_R,
        is_draft_R=is_draft_R.bool(),
    )


class BatchBuilder:
    """Gathers a step's inputs from the device tables."""

    def __init__(self, state: DeviceState, block_size: int) -> None:
        self._state = state
        self._block_size = block_size
        self._key: list[tuple[int, int, int, bool]] = []
        self._layout: Layout | None = None

    def build(self, plan: StepPlan) -> StepBatch:
        """Gather a closed plan's inputs. Launches device work, waits for none."""
        entries, state, block_size = plan.entries, self._state, self._block_size
        key = [(e.row, e.num_tokens, e.num_draft, e.samples) for e in entries]
        if self._layout is None or key != self._key:
            self._key, self._layout = key, _layout(entries, state)
        layout = self._layout
        positions_T = state.computed[layout.row_T] + layout.offset_T
        block_T = state.block_table[layout.row_T, positions_T // block_size]
        seq_lens = [e.start + e.num_tokens for e in entries]
        most_blocks = (max(seq_lens) + block_size - 1) // block_size
        attention = AttentionBatch(
            query_start_loc_B1=layout.query_start_loc_B1,
            seq_lens_B=state.computed[layout.rows_B] + layout.counts_B,
            block_table_BM=state.block_table[layout.rows_B, :most_blocks],
            slot_mapping_T=block_T * block_size + positions_T % block_size,
            query_lens=layout.counts,
            seq_lens=seq_lens,
        )
        return StepBatch(
            input_ids_T=state.tokens[layout.row_T, positions_T],
            positions_T=positions_T,
            attention=attention,
            logits_index_R=layout.index_R,
            sampling=_sampling_batch(entries, layout, state),
            chunk_rows=layout.chunk_rows,
            chunk_counts=layout.chunk_counts,
            query_starts=layout.query_starts,
        )


def _sampling_batch(
    entries: list[Entry], layout: Layout, state: DeviceState
) -> SamplingBatch | None:
    requests = [e.request for e in entries if e.samples]
    if not requests:
        return None
    position_R = state.length[layout.row_R] + layout.offset_R
    draft_R = torch.where(layout.is_draft_R, state.tokens[layout.row_R, position_R], -1)
    return SamplingBatch(
        requests=requests,
        rows_S=layout.rows_S,
        first_row_S=layout.first_row_S,
        num_draft_S=layout.num_draft_S,
        row_R=layout.row_R,
        offset_R=layout.offset_R,
        position_R=position_R,
        draft_R=draft_R,
        tokens=state.tokens,
        length=state.length,
    )
