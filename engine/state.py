"""Stable request rows on the device.

A request owns one row of every table from admission to its end (or preemption). A step gathers
from the rows; nothing is ever reordered. The tables hold the exact lengths: a step that was
launched ahead reads from here what the step before it accepted, without the host in between.

Row r: ``tokens[r, :length[r]]`` are committed; drafts follow from ``length[r]``; positions below
``computed[r]`` have their KV in the blocks of ``block_table[r]``.
"""

from __future__ import annotations

import numpy as np
import torch

from .config import EngineConfig
from .sampling_state import SamplingState
from .types import StepPlan


class DeviceState:
    """Tables of ``max_num_seqs`` rows, int64, on one device."""

    def __init__(self, config: EngineConfig, vocab_size: int, device: torch.device | str) -> None:
        rows = config.max_num_seqs
        self.device = torch.device(device)
        # A row may be written max_num_draft + 1 past its length before the host cuts it.
        width = config.max_model_len + config.max_num_draft + 1
        self.tokens = torch.zeros(rows, width, dtype=torch.int64, device=device)
        self.length = torch.zeros(rows, dtype=torch.int64, device=device)
        self.computed = torch.zeros(rows, dtype=torch.int64, device=device)
        self.block_table = torch.zeros(
            rows, config.max_blocks_per_seq, dtype=torch.int64, device=device
        )
        self.sampling = SamplingState(rows, vocab_size, device)

    def apply(self, plan: StepPlan) -> None:
        """Write what the host changed since the last step: new rows, new blocks, host drafts."""
        for new in plan.new_rows:
            request, row = new.request, new.row
            ids = torch.tensor(request.token_ids, dtype=torch.int64)
            self.tokens[row, : len(ids)] = ids.to(self.device, non_blocking=True)
            self.length[row] = len(ids)
            self.computed[row] = new.num_computed
            self.sampling.set_row(row, request)
        if plan.block_writes:
            rows = [row for row, _, ids in plan.block_writes for _ in ids]
            columns = [first + i for _, first, ids in plan.block_writes for i in range(len(ids))]
            values = [block for _, _, ids in plan.block_writes for block in ids]
            rows_N, columns_N, values_N = self.upload(rows, columns, values)
            self.block_table[rows_N, columns_N] = values_N
        drafted = [e for e in plan.entries if e.draft is not None and not e.on_device]
        if drafted:
            rows = [e.row for e in drafted for _ in e.draft_tokens]
            offsets = [i for e in drafted for i in range(len(e.draft_tokens))]
            values = [token for e in drafted for token in e.draft_tokens]
            rows_N, offsets_N, values_N = self.upload(rows, offsets, values)
            self.tokens[rows_N, self.length[rows_N] + offsets_N] = values_N

    def upload(self, *columns: list[int] | np.ndarray) -> torch.Tensor:
        """Equal-length host lists -> one int64 tensor [columns, N], in one copy."""
        packed = torch.from_numpy(np.array(columns, dtype=np.int64))
        if self.device.type == "cpu":
            return packed
        return packed.pin_memory().to(self.device, non_blocking=True)
