"""Attention behind a plan()/run() seam: ``plan`` once a step on the host, ``run`` once a layer.

Prompt chunks, decoding and verification are one call that differs only in lengths. (The seam is
FlashInfer's; see DESIGN in the README.)

Shape suffixes: T tokens of the step, B entries, H query heads, K KV heads, D head size, N blocks,
S slots of a block, M most blocks of an entry.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(slots=True)
class AttentionBatch:
    """Where the tokens of a step lie. Tensors are on the model's device, int64.

    ``query_start_loc_B1`` [B + 1]: cumulated token counts. ``seq_lens_B`` [B]: KV length of each
    entry with this step's tokens. ``block_table_BM``: block ids; columns past an entry's length are
    undefined. ``slot_mapping_T``: block id * block_size + offset, where each token's KV is written.
    ``query_lens`` and ``seq_lens``: the same on the host; ``seq_lens`` is an upper bound for
    entries that were launched ahead.
    """

    query_start_loc_B1: torch.Tensor
    seq_lens_B: torch.Tensor
    block_table_BM: torch.Tensor
    slot_mapping_T: torch.Tensor
    query_lens: list[int]
    seq_lens: list[int]


class AttentionBackend(Protocol):
    """One instance holds the KV cache of all layers of one model."""

    def plan(self, batch: AttentionBatch) -> None:
        """Prepare everything that the layers of this step share."""
        ...

    def run(
        self, layer: int, q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor
    ) -> torch.Tensor:
        """Write this layer's KV, then attend causally. Returns [T, H, D]."""
        ...

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole KV blocks (source, destination) in every layer."""
        ...
