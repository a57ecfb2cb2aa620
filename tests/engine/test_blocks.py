"""Free queue and block pool: order, costs, and every contradiction that check_integrity names."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from tightrope.engine.blocks import Block, BlockPool, FreeQueue, IntegrityError


def order(queue: FreeQueue) -> list[int]:
    return [block.block_id for block in queue]


def digest(number: int) -> bytes:
    return number.to_bytes(16, "little")


def make_pool(num_blocks: int, cached: int = 0) -> BlockPool:
    """A pool whose blocks 0 ... cached - 1 are used and cached as digest(block id)."""
    pool = BlockPool(num_blocks)
    for block_id in pool.allocate(cached) or []:
        pool.register(block_id, digest(block_id))
    return pool


def lines_executed(function: Callable[[], object]) -> int:
    """Python lines that a call runs: a measure of its cost without a clock."""
    count = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        function()
    finally:
        sys.settrace(before)
    return count


def test_queue_keeps_order_through_every_operation() -> None:
    blocks = [Block(index) for index in range(5)]
    queue = FreeQueue(blocks)
    assert order(queue) == [0, 1, 2, 3, 4]
    queue.remove(blocks[2])
    queue.remove(blocks[4])
    queue.remove(blocks[0])
    assert order(queue) == [1, 3]
    queue.append(blocks[0])
    queue.prepend(blocks[4])
    assert order(queue) == [4, 1, 3, 0]
    assert [queue.popleft().block_id for _ in range(4)] == [4, 1, 3, 0]
    assert len(queue) == 0
    assert order(queue) == []
    with pytest.raises(IndexError, match="empty"):
        queue.popleft()


def test_queue_refuses_a_block_twice_and_a_block_it_has_not() -> None:
    block = Block(0)
    queue = FreeQueue([block])
    with pytest.raises(IntegrityError, match="already in it"):
        queue.append(block)
    queue.remove(block)
    with pytest.raises(IntegrityError, match="not in it"):
        queue.remove(block)


def test_costs_do_not_depend_on_the_size_of_the_pool() -> None:
    costs: list[list[int]] = []
    for num_blocks in (16, 4096):
        pool = make_pool(num_blocks, cached=num_blocks)
        pool.free(reversed(range(num_blocks)))
        middle = num_blocks // 2
        costs.append(
            [
                lines_executed(lambda p=pool, m=middle: p.touch([m])),
                lines_executed(lambda p=pool, m=middle: p.free([m])),
                lines_executed(lambda p=pool: p.allocate(3)),
                lines_executed(lambda p=pool: p.allocate(p.num_blocks + 1)),
                lines_executed(lambda p=pool, m=middle: p.lookup(digest(m))),
            ]
        )
    assert costs[0] == costs[1]


def test_allocate_takes_all_or_nothing() -> None:
    pool = BlockPool(4)
    assert pool.allocate(0) == []
    assert pool.allocate(3) == [0, 1, 2]
    assert pool.allocate(2) is None
    assert pool.num_free == 1
    assert pool.allocate(1) == [3]
    assert pool.allocate(1) is None
    pool.check_integrity([1, 1, 1, 1])


def test_tail_of_a_sequence_is_evicted_first_and_older_sequences_before_newer() -> None:
    pool = make_pool(5, cached=5)
    pool.free([1, 0])
    pool.free([4, 3, 2])
    assert order(pool.free_queue) == [1, 0, 4, 3, 2]
    assert pool.allocate(3) == [1, 0, 4]
    assert [pool.lookup(digest(index)) for index in range(5)] == [None, None, 2, 3, None]


def test_blocks_that_cannot_be_hit_are_used_up_before_cached_ones() -> None:
    pool = make_pool(4, cached=2)
    assert pool.allocate(2) == [2, 3]
    pool.free([1, 0])
    pool.free([3, 2])
    assert pool.allocate(2) == [2, 3]
    assert pool.lookup(digest(0)) == 0


def test_a_hit_takes_a_free_block_out_of_the_queue_and_shares_a_used_one() -> None:
    pool = make_pool(3, cached=2)
    pool.free([0])
    pool.touch([0, 1])
    assert order(pool.free_queue) == [2]
    pool.check_integrity([1, 2, 0])
    pool.free([1])
    assert order(pool.free_queue) == [2]
    pool.free([1])
    assert order(pool.free_queue) == [2, 1]


def test_first_block_with_a_hash_wins() -> None:
    pool = make_pool(3, cached=1)
    assert pool.allocate(1) == [1]
    pool.register(1, digest(0))
    assert pool.lookup(digest(0)) == 0
    assert pool.blocks[1].hash is None
    pool.register(0, digest(0))
    pool.check_integrity([1, 1, 0])


def test_wrong_use_is_refused() -> None:
    pool = make_pool(2, cached=1)
    with pytest.raises(IntegrityError, match="as something else"):
        pool.register(0, digest(9))
    with pytest.raises(IntegrityError, match="only a used block"):
        pool.register(1, digest(9))
    with pytest.raises(IntegrityError, match="more often"):
        pool.free([1])
    with pytest.raises(ValueError, match="num_blocks"):
        BlockPool(0)


def test_reset_forgets_hashes_and_nothing_else() -> None:
    pool = make_pool(3, cached=2)
    pool.free([1])
    pool.reset()
    assert pool.lookup(digest(0)) is None
    assert pool.num_free == 2
    pool.check_integrity([1, 0, 0])


def _set(index: int, /, **values: object) -> Callable[[BlockPool], None]:
    def corrupt(pool: BlockPool) -> None:
        for name, value in values.items():
            setattr(pool.blocks[index], name, value)

    return corrupt


def _wrong_count(pool: BlockPool) -> None:
    pool.free_queue._count += 1  # pyright: ignore[reportPrivateUsage]


def _cycle(pool: BlockPool) -> None:
    first, second, *_ = pool.free_queue
    second.next, first.prev = first, second


def _broken_prev(pool: BlockPool) -> None:
    first, second, *_ = pool.free_queue
    second.prev = second
    assert first.next is second


def _impostor(pool: BlockPool) -> None:
    pool.blocks[3] = Block(3)


def _caching_off(pool: BlockPool) -> None:
    pool.enable_prefix_caching = False


# Blocks 0 and 1 are used and cached, 2 is free and cached, 3 and 4 are free.
CORRUPTIONS: dict[str, tuple[Callable[[BlockPool], None], str]] = {
    "used block in queue": (_set(3, ref_count=1), "in the free queue and in use"),
    "leaked block": (_set(0, ref_count=0), "held by nobody"),
    "negative count": (_set(0, ref_count=-1), "negative"),
    "wrong ref count": (_set(0, ref_count=2), "held by 1 requests"),
    "unlinked": (lambda pool: pool.free_queue.remove(pool.blocks[3]), "held by nobody"),
    "queue count": (_wrong_count, "counted"),
    "queue cycle": (_cycle, "free queue"),
    "queue prev": (_broken_prev, "prev is"),
    "not the pool's block": (_impostor, "not the pool's block"),
    "wrong id": (_set(0, block_id=1), "stands in place 0"),
    "hash lost": (_set(0, hash=None), "is mapped as"),
    "hash changed": (_set(0, hash=digest(7)), "map does not give"),
    "map lost": (lambda pool: pool.cached.clear(), "map does not give"),
    "hash twice": (_set(4, hash=digest(0)), "map does not give"),
    "mapped twice": (lambda p: p.cached.update({digest(8): p.blocks[0]}), "is mapped as"),
    "caching off": (_caching_off, "without prefix caching"),
}


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_check_integrity_names_each_contradiction(name: str) -> None:
    pool = make_pool(5, cached=3)
    pool.free([2])
    pool.check_integrity([1, 1, 0, 0, 0])
    corrupt, message = CORRUPTIONS[name]
    corrupt(pool)
    with pytest.raises(IntegrityError, match=message):
        pool.check_integrity([1, 1, 0, 0, 0])
