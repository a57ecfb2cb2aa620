"""The paged attention backend against a dense reference in float64."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest
import torch

from tightrope.engine.attention import AttentionBatch, make_backend
from tightrope.engine.attention_sdpa import SdpaBackend, group_entries

CPU = torch.device("cpu")


class Paged:
    """A pool with shuffled blocks, poisoned with NaN, and the dense history of every entry."""

    def __init__(
        self, *, heads: int, kv_heads: int, size: int, block_size: int, capacity: int, seed: int = 0
    ) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.shuffle = random.Random(seed)
        self.heads, self.kv_heads, self.size = heads, kv_heads, size
        self.block_size = block_size
        num_blocks = -(-capacity // block_size) + 3
        backend = make_backend(
            "sdpa",
            num_layers=2,
            num_blocks=num_blocks,
            block_size=block_size,
            num_kv_heads=kv_heads,
            head_dim=size,
            num_heads=heads,
            dtype=torch.float32,
            device=CPU,
        )
        assert isinstance(backend, SdpaBackend)
        self.backend = backend
        self.backend.kv_cache.fill_(float("nan"))
        self.free = list(range(num_blocks))
        self.shuffle.shuffle(self.free)
        self.tables: list[list[int]] = []
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator)

    def add(self) -> None:
        self.tables.append([])
        self.keys.append(torch.empty(0, self.kv_heads, self.size))
        self.values.append(torch.empty(0, self.kv_heads, self.size))

    def step(self, counts: Sequence[int], *, overestimate: int = 0) -> float:
        """Run every entry with ``counts`` new tokens in both layers; the largest error."""
        entries = [index for index, count in enumerate(counts) if count]
        slots: list[int] = []
        starts = [0]
        for index in entries:
            past = len(self.keys[index])
            table = self.tables[index]
            while len(table) * self.block_size < past + counts[index]:
                table.append(self.free.pop())
            positions = range(past, past + counts[index])
            slots += [
                table[p // self.block_size] * self.block_size + p % self.block_size
                for p in positions
            ]
            starts.append(starts[-1] + counts[index])
        seq_lens = [len(self.keys[index]) + counts[index] for index in entries]
        longest = max(len(self.tables[index]) for index in entries) + 1
        # Undefined columns hold ids that would be out of range: they must never be followed.
        table_BM = torch.full((len(entries), longest), 2**40)
        for row, index in enumerate(entries):
            table_BM[row, : len(self.tables[index])] = torch.tensor(self.tables[index])
        self.backend.plan(
            AttentionBatch(
                query_start_loc_B1=torch.tensor(starts),
                seq_lens_B=torch.tensor(seq_lens),
                block_table_BM=table_BM,
                slot_mapping_T=torch.tensor(slots),
                query_lens=[counts[index] for index in entries],
                seq_lens=[length + overestimate for length in seq_lens],
            )
        )
        q_THD = self.random(starts[-1], self.heads, self.size)
        fresh = self.random(starts[-1], 2, self.kv_heads, self.size)
        error = 0.0
        for layer, sign in ((1, -1.0), (0, 1.0)):
            # The layers hold different values: the dense history belongs to layer 0.
            out_THD = self.backend.run(layer, q_THD, fresh[:, 0] * sign, fresh[:, 1] * sign)
            assert out_THD.shape == q_THD.shape
            for row, index in enumerate(entries):
                span = slice(starts[row], starts[row + 1])
                if sign > 0:
                    self.keys[index] = torch.cat([self.keys[index], fresh[span, 0]])
                    self.values[index] = torch.cat([self.values[index], fresh[span, 1]])
                    expected = dense(q_THD[span], self.keys[index], self.values[index])
                else:
                    keys = torch.cat([-self.keys[index], -fresh[span, 0]])
                    values = torch.cat([-self.values[index], -fresh[span, 1]])
                    expected = dense(q_THD[span], keys, values)
                error = max(error, (out_THD[span].double() - expected).abs().max().item())
        return error


def dense(q_QHD: torch.Tensor, k_LKD: torch.Tensor, v_LKD: torch.Tensor) -> torch.Tensor:
    """Causal attention of the last Q of L tokens, float64, written out head by head."""
    queries, heads, size = q_QHD.shape
    length, kv_heads, _ = k_LKD.shape
    out = torch.empty(queries, heads, size, dtype=torch.float64)
    for head, query in itertools.product(range(heads), range(queries)):
        visible = length - queries + query + 1
        kv_head = head // (heads // kv_heads)
        scores = k_LKD[:visible, kv_head].double() @ q_QHD[query, head].double() / size**0.5
        out[query, head] = scores.softmax(0) @ v_LKD[:visible, kv_head].double()
    return out


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size"), [(4, 2, 16), (9, 3, 64), (2, 2, 8), (6, 1, 32)]
)
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_mixed_steps_equal_dense_attention(
    heads: int, kv_heads: int, size: int, block_size: int
) -> None:
    paged = Paged(
        heads=heads, kv_heads=kv_heads, size=size, block_size=block_size, capacity=400, seed=heads
    )
    for _ in range(6):
        paged.add()
    # Each line is one step; zeros sit it out. Prompts, chunks, decoding, verification, mixed.
    for counts in (
        [5, 0, 0, 0, 0, 0],
        [1, 0, 0, 0, 0, 0],
        [1, 37, 1, 0, 0, 0],
        [1, 1, 1, 0, 0, 0],
        [3, 6, 1, 20, 0, 0],
        [0, 1, 0, 17, 2, 0],
        [6, 1, 1, 4, 3, 70],
        [1, 1, 1, 1, 1, 1],
        [2, 2, 2, 2, 2, 2],
    ):
        assert paged.step(counts) < 1e-5


@pytest.mark.parametrize("block_size", [1, 16])
def test_long_chunk_with_decoding_and_verification(block_size: int) -> None:
    paged = Paged(heads=6, kv_heads=2, size=32, block_size=block_size, capacity=900)
    for _ in range(4):
        paged.add()
    assert paged.step([40, 9, 100, 0]) < 1e-5
    assert paged.step([300, 1, 6, 0]) < 1e-5
    assert paged.step([1, 1, 1, 300]) < 1e-5


@pytest.mark.parametrize("exact", [True, False], ids=["read", "not-read"])
def test_lengths_of_entries_launched_ahead_are_upper_bounds(exact: bool) -> None:
    paged = Paged(heads=4, kv_heads=2, size=16, block_size=4, capacity=200)
    paged.backend.exact_lengths = exact  # False: as on a device whose lengths nobody waits for
    for _ in range(3):
        paged.add()
    for counts in ([7, 0, 0], [1, 0, 0], [1, 30, 2], [1, 1, 1], [0, 1, 0], [0, 0, 20]):
        assert paged.step(counts, overestimate=5) < 1e-5


def test_groups_hold_every_entry_once_and_bound_their_padding() -> None:
    generator = random.Random(1)
    for _ in range(200):
        count = generator.randint(1, 64)
        query_lens = [generator.choice([1, 1, 1, 2, 6, 11, 16, 17, 300]) for _ in range(count)]
        seq_lens = [length + generator.choice([0, 5, 100, 3000]) for length in query_lens]
        groups = group_entries(query_lens, seq_lens)
        assert sorted(index for group in groups for index in group) == list(range(count))
        for group in groups:
            queries = [query_lens[index] for index in group]
            lengths = [seq_lens[index] for index in group]
            assert max(queries) < 2 * min(queries) or len(group) == 1
            assert len(group) == 1 or max(queries) <= 16
            assert len(group) * max(lengths) <= 1.25 * sum(lengths) + 256


def test_copied_blocks_carry_keys_and_values_of_every_layer() -> None:
    paged = Paged(heads=4, kv_heads=2, size=16, block_size=4, capacity=40)
    cache = paged.backend.kv_cache
    cache.copy_(paged.random(*cache.shape))
    before = cache.clone().unflatten(1, (-1, 4))
    paged.backend.copy_blocks([(2, 5), (5, 1)])  # block 5 is read before it is written
    after = cache.unflatten(1, (-1, 4))
    assert torch.equal(after[:, 5], before[:, 2])
    assert torch.equal(after[:, 1], before[:, 5])
    others = [index for index in range(after.shape[1]) if index not in (1, 5)]
    assert torch.equal(after[:, others], before[:, others])


def test_an_unknown_backend_is_named() -> None:
    with pytest.raises(ValueError, match=r"attention must be one of \['sdpa'\].*'flash'"):
        make_backend(
            "flash",
            num_layers=1,
            num_blocks=1,
            block_size=1,
            num_kv_heads=1,
            head_dim=2,
            num_heads=1,
            dtype=torch.float32,
            device=CPU,
        )
