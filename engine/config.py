"""Engine settings: frozen, validated once, shared by every layer."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Limits of one engine.

    Attributes:
        max_model_len: tokens of prompt and output together that a request may reach.
        max_num_seqs: requests that run at once (rows of the device tables).
        max_num_batched_tokens: tokens computed in one step; longer prompts are chunked.
        block_size: tokens of one KV block.
        num_blocks: KV blocks in the pool.
        enable_prefix_caching: share full blocks between requests with equal prefixes.
        max_num_draft: most draft tokens one request may have in one step.
        seed: of the engine; requests without a seed of their own derive theirs from it.
        overlap: launch step n + 1 before the tokens of step n have reached the host.
    """

    max_model_len: int
    num_blocks: int
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    block_size: int = 16
    enable_prefix_caching: bool = True
    max_num_draft: int = 16
    seed: int = 0
    overlap: bool = False

    def __post_init__(self) -> None:
        for name in (
            "max_model_len",
            "num_blocks",
            "max_num_seqs",
            "max_num_batched_tokens",
            "block_size",
        ):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name} must be a positive integer, got {value!r}")
        if self.max_num_draft < 0:
            raise ValueError(f"max_num_draft must be 0 or more, got {self.max_num_draft!r}")
        needed = (self.max_model_len + self.block_size - 1) // self.block_size
        if self.num_blocks < needed:
            raise ValueError(
                f"num_blocks={self.num_blocks} holds {self.num_blocks * self.block_size} tokens, "
                f"less than one request of max_model_len={self.max_model_len}; give the cache more "
                f"memory (kv_cache_memory) or lower max_model_len to at most "
                f"{self.num_blocks * self.block_size}"
            )

    @property
    def max_blocks_per_seq(self) -> int:
        """Columns of the block table: drafts may run up to the context limit, never past it."""
        return (self.max_model_len + self.block_size - 1) // self.block_size
