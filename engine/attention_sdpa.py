"""Attention backend "sdpa": torch operations alone, for the CPU and as a reference elsewhere.

The cache of one layer is one row a slot, [slots, 2, K, D]: a key and its value side by side, so
that one copy writes both and one gather reads both. It is allocated untouched: pages that no token
was ever written to cost no memory.

``plan`` sorts the step's entries into few groups of like lengths. ``run`` then needs a handful of
operations a group, not a request: gather the KV of a group, padded to its longest entry, and attend
with the group's mask. Padding repeats an entry's last slot, so nothing is ever read from a slot
that was not written: what lies there may be anything, NaN included.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812

from .attention import AttentionBatch

_LONGEST_PADDED_QUERY = 16  # longer queries (prompt chunks) are groups of their own
_FREE_PADDING = 256  # KV tokens: gathering them costs about as much as one more group


@dataclass(slots=True)
class _Group:
    """Entries attended together: G of them, Q padded query rows, L padded KV slots each.

    ``tokens_X`` are the step's rows [G * Q] (short entries repeat their last row); None when the
    group is the whole step in order. ``slots_X`` are the cache rows [G * L].
    ``mask_G1QL`` is True where a query may look; None when every slot is visible to every query.
    """

    count: int
    query_len: int
    kv_len: int
    tokens_X: torch.Tensor | None
    slots_X: torch.Tensor
    mask_G1QL: torch.Tensor | None
    is_causal: bool


class SdpaBackend:
    """Holds the KV cache of all the layers of one model, [layers, blocks * block_size, 2, K, D].

    Args:
        num_blocks, block_size: the pool; slot = block id * block_size + offset.
        dtype, device: of the cache; queries, keys and values come in the same.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        num_heads: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.block_size = block_size
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.kv_cache = torch.empty(
            num_layers,
            num_blocks * block_size,
            2,
            num_kv_heads,
            head_dim,
            dtype=dtype,
            device=device,
        )
        self._keys = [layer[:, 0] for layer in self.kv_cache]
        self._values = [layer[:, 1] for layer in self.kv_cache]
        # The host's lengths may be upper bounds. On the CPU the exact ones are at hand.
        self.exact_lengths = device.type == "cpu"
        self._groups: list[_Group] = []
        self._slot_mapping_T = torch.empty(0, dtype=torch.int64, device=device)

    def plan(self, batch: AttentionBatch) -> None:
        """Group the entries and build the index tensors that all the layers share."""
        self._slot_mapping_T = batch.slot_mapping_T
        exact = self.exact_lengths
        seq_lens: list[int] = batch.seq_lens_B.tolist() if exact else batch.seq_lens
        self._groups = [
            self._plan_group(batch, members, seq_lens, exact)
            for members in group_entries(batch.query_lens, seq_lens)
        ]

    def _plan_group(
        self, batch: AttentionBatch, members: list[int], seq_lens: list[int], exact: bool
    ) -> _Group:
        device = batch.slot_mapping_T.device
        query_lens = [batch.query_lens[i] for i in members]
        query_len = max(query_lens)
        # An upper bound may lie beyond the last block.
        room = batch.block_table_BM.shape[1] * self.block_size
        kv_len = min(room, max(seq_lens[i] for i in members))
        whole = len(members) == len(batch.query_lens)
        index_G = None if whole else torch.tensor(members, device=device)

        def of_group(x: torch.Tensor) -> torch.Tensor:
            return x if index_G is None else x.index_select(0, index_G)

        lens_G1 = of_group(batch.seq_lens_B).unsqueeze(1)
        seen_L = torch.arange(kv_len, device=device)
        seen_GL = seen_L < lens_G1
        first_GM = of_group(batch.block_table_BM) * self.block_size
        in_block = torch.arange(self.block_size, device=device)
        slots_GL = (first_GM.unsqueeze(2) + in_block).flatten(1)[:, :kv_len]
        # Past an entry's end its last slot is repeated: written, hence finite, and masked.
        slots_GL = torch.where(seen_GL, slots_GL, slots_GL.gather(1, lens_G1 - 1))
        in_order = whole and min(query_lens) == query_len
        alone = exact and len(members) == 1
        is_causal = alone and query_len == kv_len and query_len > 1
        mask_G1QL = None if alone else seen_GL[:, None, None]
        tokens_X = None
        if query_len > 1 or not in_order:
            starts_G1 = of_group(batch.query_start_loc_B1[:-1]).unsqueeze(1)
            counts_G1 = of_group(batch.query_start_loc_B1.diff()).unsqueeze(1)
            rows_GQ = torch.minimum(torch.arange(query_len, device=device), counts_G1 - 1)
            tokens_X = None if in_order else (starts_G1 + rows_GQ).flatten()
            if query_len > 1 and not is_causal:
                last_GQ = lens_G1 - counts_G1 + rows_GQ
                mask_G1QL = (seen_L <= last_GQ.unsqueeze(2)).unsqueeze(1)
        return _Group(
            count=len(members),
            query_len=query_len,
            kv_len=kv_len,
            tokens_X=tokens_X,
            slots_X=slots_GL.flatten(),
            mask_G1QL=mask_G1QL,
            is_causal=is_causal,
        )

    def run(
        self, layer: int, q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor
    ) -> torch.Tensor:
        """Write this layer's keys and values, then attend causally. Returns [T, H, D]."""
        self._keys[layer].index_copy_(0, self._slot_mapping_T, k_TKD)
        self._values[layer].index_copy_(0, self._slot_mapping_T, v_TKD)
        cache = self.kv_cache[layer]
        if len(self._groups) == 1 and self._groups[0].tokens_X is None:
            return self._attend(self._groups[0], q_THD, cache)
        out_THD = torch.empty_like(q_THD, memory_format=torch.contiguous_format)
        for group in self._groups:
            assert group.tokens_X is not None
            attended_XHD = self._attend(group, q_THD.index_select(0, group.tokens_X), cache)
            out_THD.index_copy_(0, group.tokens_X, attended_XHD)
        return out_THD

    def _attend(self, group: _Group, q_XHD: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
        kv = cache.index_select(0, group.slots_X).view(
            group.count, group.kv_len, 2, self.num_kv_heads, self.head_dim
        )
        q_GQHD = q_XHD.reshape(group.count, group.query_len, self.num_heads, self.head_dim)
        attended_GHQD = F.scaled_dot_product_attention(
            q_GQHD.transpose(1, 2),
            kv[:, :, 0].transpose(1, 2),
            kv[:, :, 1].transpose(1, 2),
            attn_mask=group.mask_G1QL,
            is_causal=group.is_causal,
            enable_gqa=self.num_heads != self.num_kv_heads,
        )
        return attended_GHQD.transpose(1, 2).reshape(-1, self.num_heads, self.head_dim)

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole KV blocks (source, destination) in every layer.

        All sources are read before any destination is written.
        """
        if not pairs:
            return
        source, destination = torch.tensor(pairs, device=self.kv_cache.device).T
        blocks = self.kv_cache.unflatten(1, (-1, self.block_size))
        blocks.index_copy_(1, destination, blocks.index_select(1, source))


def group_entries(query_lens: Sequence[int], seq_lens: Sequence[int]) -> list[list[int]]:
    """Sort entries (by index) into groups that are padded to one query and one KV length.

    Queries of a group differ by less than a factor of two (a decoding row never pays for a draft);
    KV padding stays below a quarter of the group's real length plus `_FREE_PADDING`.
    """
    classes: dict[int, list[int]] = {}
    for index, length in enumerate(query_lens):
        # Prompt chunks get a class of their own: padding them would be real work.
        key = (length - 1).bit_length() if length <= _LONGEST_PADDED_QUERY else -index - 1
        classes.setdefault(key, []).append(index)
    groups: list[list[int]] = []
    for indices in classes.values():
        indices.sort(key=lambda index: seq_lens[index])
        group: list[int] = []
        real = 0
        for index in indices:
            real += seq_lens[index]
            if (len(group) + 1) * seq_lens[index] > 1.25 * real + _FREE_PADDING:
                groups.append(sorted(group))
                group, real = [], seq_lens[index]
            group.append(index)
        groups.append(sorted(group))
    return groups
