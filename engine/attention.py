"""Attention behind a plan()/run() seam: ``plan`` once a step on the host, ``run`` once a layer.

Prompt chunks, decoding and verification are one call that differs only in lengths. (The seam is
FlashInfer's; see DESIGN in the README.)

`make_backend` builds one by name; a new backend is one file and one line there.

Shape suffixes: T tokens of the step, B entries, H query heads, K KV heads, D head size, N blocks,
S slots of a block, M most blocks of an entry.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
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


BACKENDS = {"sdpa": ".attention_sdpa:SdpaBackend"}
"""Name -> module and class. Imported when it is asked for: one may need what is not installed."""


def make_backend(
    name: str,
    *,
    num_layers: int,
    num_blocks: int,
    block_size: int,
    num_kv_heads: int,
    head_dim: int,
    num_heads: int,
    dtype: torch.dtype,
    device: torch.device,
) -> AttentionBackend:
    """Build the attention backend ``name`` with a KV cache for ``num_layers`` layers.

    Raises:
        ValueError: there is no backend of that name.
    """
    if name not in BACKENDS:
        raise ValueError(f"attention must be one of {sorted(BACKENDS)}, got {name!r}")
    module, _, attribute = BACKENDS[name].partition(":")
    return getattr(import_module(module, __package__), attribute)(
        num_layers=num_layers,
        num_blocks=num_blocks,
        block_size=block_size,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        num_heads=num_heads,
        dtype=dtype,
        device=device,
    )
