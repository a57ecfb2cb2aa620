"""A hand-computable model and a late executor, for tests of schedulers, hooks and proposers.

The next token's logits are a hash of the whole prefix, and the prefix is read back from the paged
KV cache through the block tables. So a wrong slot, a stale block, a missed rollback or a bad prefix
hit changes the tokens, and no floating-point noise hides or fakes a difference.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .attention import AttentionBackend, AttentionBatch
from .config import EngineConfig
from .core import EngineCore
from .executor import InlineExecutor, PendingResult
from .hooks import EngineContext, SchedulerHook, WorkerExtension
from .runner import Flight
from .types import MaskRows, Request, StepResult
from .worker import Worker

_MODULUS = 1_000_003
_UNWRITTEN = -1


def prefix_hash(tokens: Sequence[int]) -> int:
    """The state after a prefix: a polynomial hash, sensitive to every token and its place."""
    state = 1
    for token in tokens:
        state = (state * 911 + token + 7) % _MODULUS
    return state


class FakeAttention:
    """A paged cache whose KV is the token id itself. `run` returns the hash of each prefix."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.slots = torch.full((num_blocks * block_size,), _UNWRITTEN, dtype=torch.int64)
        self._batch: AttentionBatch | None = None

    def plan(self, batch: AttentionBatch) -> None:
        self._batch = batch

    def run(
        self, layer: int, q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor
    ) -> torch.Tensor:
        assert self._batch is not None
        batch, size = self._batch, self.block_size
        self.slots[batch.slot_mapping_T] = v_TKD[:, 0, 0]
        hashes: list[int] = []
        for i, num_query in enumerate(batch.query_lens):
            length = int(batch.seq_lens_B[i])
            positions = torch.arange(length)
            slots = batch.block_table_BM[i, positions // size] * size + positions % size
            tokens = self.slots[slots].tolist()
            if _UNWRITTEN in tokens:
                raise AssertionError("attention reads a KV slot that was never written")
            hashes += [
                prefix_hash(tokens[:end]) for end in range(length - num_query + 1, length + 1)
            ]
        return torch.tensor(hashes, dtype=torch.int64)[:, None, None]

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        slots = self.slots.view(-1, self.block_size)
        for source, destination in pairs:
            slots[destination] = slots[source]


class FakeModel:
    """``logits_of(prefix)`` is the whole model; `forward` and `logits` read it off the cache."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def forward(
        self, input_ids_T: torch.Tensor, positions_T: torch.Tensor, attention: AttentionBackend
    ) -> torch.Tensor:
        ids = input_ids_T[:, None, None]
        return attention.run(0, ids, ids, ids)[:, 0]

    def logits(self, hidden_RD: torch.Tensor) -> torch.Tensor:
        """Distinct multiples of 1/16, so greedy decoding has no ties."""
        token_V = torch.arange(self.vocab_size)
        mixed_RV = (hidden_RD * (2 * token_V + 1) + token_V * token_V * 37) % 97
        return (mixed_RV * self.vocab_size + token_V).float() / 16 / self.vocab_size

    def logits_of(self, prefix: Sequence[int]) -> torch.Tensor:
        """[vocab_size] float32, from the prefix alone."""
        return self.logits(torch.tensor([[prefix_hash(prefix)]]))[0]


class _LatePending:
    """Its tokens may not be read in the step that sampled them."""

    def __init__(self, pending: PendingResult, executor: LateExecutor) -> None:
        self._pending = pending
        self._executor = executor
        self._step = executor.num_steps

    def wait(self) -> StepResult:
        if self._executor.num_steps == self._step:
            raise AssertionError("a result was awaited in the step that sampled it")
        return self._pending.wait()


class LateExecutor(InlineExecutor):
    """Delivers results one step late: an overlapped engine that peeks is caught."""

    def __init__(self, worker: Worker) -> None:
        super().__init__(worker)
        self.num_steps = 0

    def sample(self, flight: Flight, masks: MaskRows | None) -> PendingResult:
        return _LatePending(super().sample(flight, masks), self)


class FakeCore(EngineCore):
    """An engine on a `FakeModel`. With ``config.overlap`` its results are one step late."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        vocab_size: int = 24,
        eos_token_ids: frozenset[int] = frozenset(),
        hooks: Sequence[SchedulerHook] = (),
        extensions: Sequence[WorkerExtension] = (),
    ) -> None:
        self.model = FakeModel(vocab_size)
        self.attention = FakeAttention(config.num_blocks, config.block_size)
        self.worker = Worker(
            self.model,
            self.attention,
            config,
            vocab_size=vocab_size,
            extensions=extensions,
        )
        self.late = LateExecutor(self.worker) if config.overlap else None
        executor = self.late or InlineExecutor(self.worker)
        super().__init__(config, executor, hooks, EngineContext(config, vocab_size, eos_token_ids))

    def step(self) -> list[Request]:
        """One engine step; results of the step before may be read now."""
        if self.late is not None:
            self.late.num_steps += 1
        return super().step()
