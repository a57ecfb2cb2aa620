"""KV blocks: reference counts, an O(1) free queue, and the map from hash to cached block.

A block is in exactly one of two states. *Used*: ``ref_count`` requests hold it. *Free*: nobody
holds it and it is linked in the free queue. A free block keeps its hash, and so can still be hit,
until `BlockPool.allocate` takes it from the head of the queue: then it is evicted.

The queue is a circular doubly linked list through the blocks themselves around one sentinel, so a
hit removes a block from the middle without a search and nothing is allocated on the way. Freed
blocks that carry a hash are appended: among cached blocks the head is the least recently used.
Freed blocks without a hash can never be hit, so they go to the head and are used up first.

One block at most carries a given hash: the first. A second block with the same content stays
without a hash; block tables are append-only, so its holder is not moved to the first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence


class IntegrityError(AssertionError):
    """The block pool contradicts itself: a bug of the engine, never of its input."""


class Block:
    """One KV block of the device cache. A block that is in no queue is linked to itself."""

    __slots__ = ("block_id", "hash", "next", "prev", "ref_count")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_count = 0
        self.hash: bytes | None = None
        self.prev: Block = self
        self.next: Block = self

    def __repr__(self) -> str:
        digest = None if self.hash is None else self.hash.hex()[:8]
        return f"Block({self.block_id}, ref_count={self.ref_count}, hash={digest})"


class FreeQueue:
    """Free blocks in the order in which they will be evicted. Every operation but iteration is
    O(1)."""

    def __init__(self, blocks: Iterable[Block] = ()) -> None:
        self._sentinel = Block(-1)
        self._count = 0
        for block in blocks:
            self.append(block)

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Block]:
        """From the head (evicted first) to the tail. Checks every link on the way.

        Raises `IntegrityError` where links or the count do not agree.
        """
        left, seen = self._sentinel, 0
        while left.next is not self._sentinel:
            block = left.next
            if block.prev is not left:
                raise IntegrityError(f"free queue: {block}.prev is {block.prev}, not {left}")
            if block is left or seen == self._count:
                raise IntegrityError(f"free queue: more links than its {self._count} blocks")
            seen += 1
            yield block
            left = block
        if self._sentinel.prev is not left or seen != self._count:
            raise IntegrityError(f"free queue: {seen} blocks linked, {self._count} counted")

    def append(self, block: Block) -> None:
        self._insert(block, self._sentinel.prev, self._sentinel)

    def prepend(self, block: Block) -> None:
        self._insert(block, self._sentinel, self._sentinel.next)

    def popleft(self) -> Block:
        """Raises IndexError when the queue is empty."""
        if not self._count:
            raise IndexError("the free queue is empty")
        block = self._sentinel.next
        self.remove(block)
        return block

    def remove(self, block: Block) -> None:
        """Raises `IntegrityError` when the block is in no queue."""
        if block.next is block:
            raise IntegrityError(f"free queue: {block} is not in it")
        block.prev.next = block.next
        block.next.prev = block.prev
        block.prev = block.next = block
        self._count -= 1

    def _insert(self, block: Block, left: Block, right: Block) -> None:
        if block.next is not block:
            raise IntegrityError(f"free queue: {block} is already in it")
        block.prev, block.next = left, right
        left.next = right.prev = block
        self._count += 1


class BlockPool:
    """All KV blocks of an engine, named by ids 0 ... ``num_blocks`` - 1."""

    def __init__(self, num_blocks: int, enable_prefix_caching: bool = True) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks must be 1 or more, got {num_blocks!r}")
        self.blocks = [Block(block_id) for block_id in range(num_blocks)]
        self.enable_prefix_caching = enable_prefix_caching
        self.free_queue = FreeQueue(self.blocks)
        self.cached: dict[bytes, Block] = {}

    @property
    def num_blocks(self) -> int:
        return len(self.blocks)

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated, cached ones included."""
        return len(self.free_queue)

    def allocate(self, count: int) -> list[int] | None:
        """Take ``count`` blocks, evicting what they cached. None, and no change, when short."""
        if count > self.num_free:
            return None
        block_ids: list[int] = []
        for _ in range(count):
            block = self.free_queue.popleft()
            if block.hash is not None:
                del self.cached[block.hash]
                block.hash = None
            block.ref_count = 1
            block_ids.append(block.block_id)
        return block_ids

    def touch(self, block_ids: Iterable[int]) -> None:
        """One more request holds these blocks; free ones leave the queue and keep their hash."""
        for block_id in block_ids:
            block = self.blocks[block_id]
            if not block.ref_count:
                self.free_queue.remove(block)
            block.ref_count += 1

    def free(self, block_ids: Iterable[int]) -> None:
        """One request fewer holds these blocks.

        Give them in reverse order of the sequence: then its tail is evicted before its head, which
        more requests can share. Raises `IntegrityError` when nobody holds a block.
        """
        for block_id in block_ids:
            block = self.blocks[block_id]
            if block.ref_count < 1:
                raise IntegrityError(f"{block} was freed more often than it was taken")
            block.ref_count -= 1
            if not block.ref_count:
                if block.hash is None:
                    self.free_queue.prepend(block)
                else:
                    self.free_queue.append(block)

    def lookup(self, digest: bytes) -> int | None:
        """Id of the block that caches ``digest``, used or free."""
        block = self.cached.get(digest)
        return None if block is None else block.block_id

    def register(self, block_id: int, digest: bytes) -> None:
        """The used block's content is final and has this hash. Does nothing when another block
        caches the same content, or without prefix caching."""
        if not self.enable_prefix_caching:
            return
        block = self.blocks[block_id]
        if block.hash is not None and block.hash != digest:
            raise IntegrityError(f"{block} is already cached as something else")
        if block.ref_count < 1:
            raise IntegrityError(f"{block} is free; only a used block can be cached")
        if self.cached.setdefault(digest, block) is block:
            block.hash = digest

    def reset(self) -> None:
        """Forget every cached block; who holds which block does not change."""
        for block in self.cached.values():
            block.hash = None
        self.cached.clear()

    def check_integrity(self, ref_counts: Sequence[int] | None = None) -> None:
        """Compare everything that is stored twice. O(num_blocks).

        ``ref_counts``: how many requests hold each block, where the caller knows. Raises
        `IntegrityError` with the first contradiction.
        """
        free = set[int]()
        for block in self.free_queue:
            if block.block_id in free:
                raise IntegrityError(f"{block} is in the free queue twice")
            free.add(block.block_id)
            if block is not self.blocks[block.block_id]:
                raise IntegrityError(f"{block} in the free queue is not the pool's block")
        for block_id, block in enumerate(self.blocks):
            self._check_block(block_id, block, block_id in free)
            if ref_counts is not None and block.ref_count != ref_counts[block_id]:
                raise IntegrityError(f"{block} is held by {ref_counts[block_id]} requests")
        used = sum(block.ref_count > 0 for block in self.blocks)
        if len(free) + used != self.num_blocks:
            raise IntegrityError(f"{len(free)} free + {used} used blocks, not {self.num_blocks}")
        for digest, block in self.cached.items():
            if block.hash != digest or block is not self.blocks[block.block_id]:
                raise IntegrityError(f"{block} is mapped as {digest.hex()[:8]}")
        if self.cached and not self.enable_prefix_caching:
            raise IntegrityError(f"{len(self.cached)} blocks are cached without prefix caching")

    def _check_block(self, block_id: int, block: Block, is_free: bool) -> None:
        if block.block_id != block_id:
            raise IntegrityError(f"{block} stands in place {block_id} of the pool")
        if block.ref_count < 0:
            raise IntegrityError(f"{block} has a negative reference count")
        if is_free and block.ref_count:
            raise IntegrityError(f"{block} is in the free queue and in use")
        if not is_free and not block.ref_count:
            raise IntegrityError(f"{block} is held by nobody and missing from the free queue")
        if block.hash is not None and self.cached.get(block.hash) is not block:
            raise IntegrityError(f"{block} has a hash that the map does not give to it")
