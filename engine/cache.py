"""The paged KV cache, seen from the host: which request holds which blocks, and what they cache.

A request's block table is append-only and covers positions [0, slots). Its life: `match` its
tokens against the cache, `admit` it with the matched blocks, `grow` it before every step to the
positions that the step may write (drafts included), `commit` what was computed and kept, `free`.
Refused drafts need no roll-back here: their slots stay reserved and are written over.

The hash of a full block is blake2b over its parent's hash and its token ids, so one hash stands for
the whole prefix and a lookup compares nothing else (16 bytes: accidental collisions are out of
reach). Only tokens that are committed and whose KV was computed are ever hashed: a draft that is
refused later must not be found by anyone. Every request keeps its chain of hashes, so `commit`
costs O(new blocks) and `fork` inherits the chain.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from .blocks import BlockPool, IntegrityError

DIGEST_SIZE = 16  # bytes
ROOT_DIGEST = bytes(DIGEST_SIZE)


def chain_digests(token_ids: Sequence[int], block_size: int, parent: bytes) -> list[bytes]:
    """Hashes of the full blocks of ``token_ids`` that follow a block with hash ``parent``."""
    values = array("i", token_ids)
    data, stride = values.tobytes(), block_size * values.itemsize
    digests: list[bytes] = []
    for start in range(0, len(data) - stride + 1, stride):
        parent = blake2b(parent + data[start : start + stride], digest_size=DIGEST_SIZE).digest()
        digests.append(parent)
    return digests


@dataclass(frozen=True, slots=True)
class Match:
    """Cached blocks that hold the first ``num_tokens`` tokens of a prompt, with their hashes."""

    block_ids: list[int] = field(default_factory=list[int])
    digests: list[bytes] = field(default_factory=list[bytes])
    num_tokens: int = 0


@dataclass(slots=True)
class _Sequence:
    block_ids: list[int]
    digests: list[bytes]  # of its first full blocks: hashed so far
    hashing: bool = True  # False once the cache was reset under it


class KVCache:
    """Block tables of all running requests and the prefix cache behind them.

    ``queries`` and ``hits`` count tokens of admitted prompts and those of them found in the cache.
    Methods that name a request raise KeyError when it holds no place in the cache.
    """

    def __init__(
        self, num_blocks: int, block_size: int, enable_prefix_caching: bool = True
    ) -> None:
        if block_size < 1:
            raise ValueError(f"block_size must be 1 or more, got {block_size!r}")
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.pool = BlockPool(num_blocks, enable_prefix_caching)
        self.queries = 0
        self.hits = 0
        self._sequences: dict[str, _Sequence] = {}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._sequences

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be allocated, cached ones included."""
        return self.pool.num_free

    def block_ids(self, request_id: str) -> list[int]:
        """A copy of the request's block table."""
        return list(self._get(request_id).block_ids)

    def num_blocks(self, request_id: str) -> int:
        """Length of the request's block table, without copying it."""
        return len(self._get(request_id).block_ids)

    def match(self, token_ids: Sequence[int]) -> Match:
        """The longest chain of cached full blocks that is a prefix of ``token_ids``.

        It never covers the last token, which must be computed to be continued. Changes nothing.
        The match holds until the next call that allocates; `admit` notices when it is stale.
        """
        match = Match()
        if not self.pool.cached:
            return match
        size, parent = self.block_size, ROOT_DIGEST
        for start in range(0, len(token_ids) - size, size):
            # Block by block: a miss at the start of a long prompt must not cost its length.
            data = array("i", token_ids[start : start + size]).tobytes()
            parent = blake2b(parent + data, digest_size=DIGEST_SIZE).digest()
            block_id = self.pool.lookup(parent)
            if block_id is None:
                break
            match.block_ids.append(block_id)
            match.digests.append(parent)
        return Match(match.block_ids, match.digests, len(match.block_ids) * size)

    def admit(
        self, request_id: str, token_ids: Sequence[int], num_tokens: int, match: Match
    ) -> bool:
        """Give a new request the matched blocks and slots for positions [0, ``num_tokens``).

        ``match`` is what `match(token_ids)` returned. False, and no change, when blocks are short.
        Raises ValueError for a request that is already admitted, fewer positions than matched, or a
        match whose blocks have been evicted since.
        """
        self._check_new(request_id)
        if num_tokens < match.num_tokens:
            raise ValueError(f"num_tokens must be at least {match.num_tokens} (the match)")
        num_new = self._blocks_for(num_tokens) - len(match.block_ids)
        blocks = self.pool.blocks
        matched_free = 0  # they leave the free queue with this request: nobody can allocate them
        for block_id, digest in zip(match.block_ids, match.digests, strict=True):
            if blocks[block_id].hash != digest:
                raise ValueError(f"match is stale: block {block_id} was evicted since")
            matched_free += not blocks[block_id].ref_count
        if num_new > self.pool.num_free - matched_free:
            return False
        self.pool.touch(match.block_ids)
        new_ids = self.pool.allocate(num_new)
        assert new_ids is not None
        self._sequences[request_id] = _Sequence(
            [*match.block_ids, *new_ids], list(match.digests), self.enable_prefix_caching
        )
        if self.enable_prefix_caching:
            self.queries += len(token_ids)
            self.hits += match.num_tokens
        return True

    def grow(self, request_id: str, num_tokens: int) -> list[int] | None:
        """Make sure that positions [0, ``num_tokens``) have slots.

        Returns the blocks appended to the table, or None, and no change, when blocks are short.
        """
        sequence = self._get(request_id)
        num_new = self._blocks_for(num_tokens) - len(sequence.block_ids)
        if num_new <= 0:
            return []
        new_ids = self.pool.allocate(num_new)
        if new_ids is not None:
            sequence.block_ids += new_ids
        return new_ids

    def commit(self, request_id: str, token_ids: Sequence[int], num_tokens: int) -> None:
        """``token_ids[:num_tokens]`` are final and their KV is computed: cache its full blocks.

        Tokens past ``num_tokens`` are not looked at. Raises ValueError where there are fewer tokens
        or slots than that.
        """
        sequence = self._get(request_id)
        size, digests = self.block_size, sequence.digests
        first, last = len(digests), num_tokens // size
        if num_tokens > len(token_ids) or last > len(sequence.block_ids):
            raise ValueError(
                f"num_tokens={num_tokens}, but {request_id!r} has {len(token_ids)} tokens and "
                f"{len(sequence.block_ids) * size} slots"
            )
        if first >= last or not sequence.hashing:
            return
        parent = digests[-1] if digests else ROOT_DIGEST
        new = chain_digests(token_ids[first * size : last * size], size, parent)
        for block_id, digest in zip(sequence.block_ids[first:last], new, strict=True):
            self.pool.register(block_id, digest)
        digests += new

    def fork(self, parent_id: str, child_id: str, num_tokens: int) -> list[tuple[int, int]] | None:
        """Admit a child that continues the parent's first ``num_tokens`` computed tokens.

        Full blocks are shared; a partial block becomes the child's own. Returns the (source,
        destination) blocks to copy on the device, one at most, or None, and no change, when blocks
        are short. Raises ValueError for a child that exists or more tokens than the parent's slots.
        """
        parent = self._get(parent_id)
        self._check_new(child_id)
        full, rest = divmod(num_tokens, self.block_size)
        if not 0 <= num_tokens <= len(parent.block_ids) * self.block_size:
            raise ValueError(
                f"num_tokens={num_tokens}, but {parent_id!r} has "
                f"{len(parent.block_ids) * self.block_size} slots"
            )
        new_ids = self.pool.allocate(1 if rest else 0)
        if new_ids is None:
            return None
        shared = parent.block_ids[:full]
        self.pool.touch(shared)
        self._sequences[child_id] = _Sequence(
            [*shared, *new_ids], parent.digests[:full], parent.hashing
        )
        return [(parent.block_ids[full], new_id) for new_id in new_ids]

    def free(self, request_id: str) -> None:
        """The request lets go of its blocks; what they cache stays until they are allocated."""
        sequence = self._get(request_id)
        del self._sequences[request_id]
        self.pool.free(reversed(sequence.block_ids))

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes, for example because the weights have changed.

        Running requests keep their blocks, but nothing that continues them is cached any more.
        """
        self.pool.reset()
        for sequence in self._sequences.values():
            sequence.hashing = False

    def check_integrity(self, token_ids: Mapping[str, Sequence[int]] | None = None) -> None:
        """Compare requests, blocks, reference counts and hashes with each other.

        ``token_ids``: the committed tokens of requests; where given, their hashes are computed
        anew. O(blocks + tokens). Raises `IntegrityError`.
        """
        ref_counts = [0] * self.pool.num_blocks
        for request_id, sequence in self._sequences.items():
            if len(set(sequence.block_ids)) != len(sequence.block_ids):
                raise IntegrityError(f"{request_id!r} holds a block twice: {sequence.block_ids}")
            for block_id in sequence.block_ids:
                ref_counts[block_id] += 1
            self._check_hashes(request_id, sequence)
        self.pool.check_integrity(ref_counts)
        for request_id, tokens in (token_ids or {}).items():
            self._check_tokens(request_id, tokens)

    def _check_hashes(self, request_id: str, sequence: _Sequence) -> None:
        if len(sequence.digests) > len(sequence.block_ids):
            raise IntegrityError(f"{request_id!r} has more hashes than blocks")
        # A block without a hash duplicates one that was cached before it.
        for block_id, digest in zip(sequence.block_ids, sequence.digests, strict=False):
            block = self.pool.blocks[block_id]
            if block.hash is not None and block.hash != digest:
                raise IntegrityError(f"{request_id!r}: {block} is cached as something else")

    def _check_tokens(self, request_id: str, token_ids: Sequence[int]) -> None:
        sequence = self._get(request_id)
        chain = chain_digests(token_ids, self.block_size, ROOT_DIGEST)
        if sequence.digests != chain[: len(sequence.digests)]:
            raise IntegrityError(f"{request_id!r} was hashed with tokens it does not have")
        # Past the request's own hashes, another holder of a forked block may have hashed it.
        for index, block_id in enumerate(sequence.block_ids):
            digest = self.pool.blocks[block_id].hash
            if digest is not None and digest not in chain[index : index + 1]:
                raise IntegrityError(
                    f"{request_id!r}: block {block_id} is cached with tokens it does not have"
                )

    def _get(self, request_id: str) -> _Sequence:
        try:
            return self._sequences[request_id]
        except KeyError:
            raise KeyError(f"request {request_id!r} is not in the cache") from None

    def _check_new(self, request_id: str) -> None:
        if request_id in self._sequences:
            raise ValueError(f"request {request_id!r} is already in the cache")

    def _blocks_for(self, num_tokens: int) -> int:
        return (num_tokens + self.block_size - 1) // self.block_size
