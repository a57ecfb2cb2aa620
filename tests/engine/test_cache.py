"""KVCache by hand-made cases: edges, refusals, forks, stale matches, and what hashing costs."""

from __future__ import annotations

import time

import pytest

from tightrope.engine.blocks import IntegrityError
from tightrope.engine.cache import ROOT_DIGEST, KVCache, Match, chain_digests


def run(cache: KVCache, request_id: str, tokens: list[int]) -> Match:
    """Admit a prompt with all its slots and compute it in one step."""
    match = cache.match(tokens)
    assert cache.admit(request_id, tokens, len(tokens), match)
    cache.commit(request_id, tokens, len(tokens))
    cache.check_integrity({request_id: tokens})
    return match


def state(cache: KVCache) -> object:
    pool = cache.pool
    return (
        [(block.ref_count, block.hash) for block in pool.blocks],
        [block.block_id for block in pool.free_queue],
        {digest: block.block_id for digest, block in pool.cached.items()},
        (cache.queries, cache.hits),
    )


def test_second_prompt_shares_the_full_blocks_of_the_first() -> None:
    cache = KVCache(8, 4)
    run(cache, "a", list(range(10)))
    match = run(cache, "b", [*range(8), 99, 98, 97])
    assert (match.block_ids, match.num_tokens) == (cache.block_ids("a")[:2], 8)
    assert cache.block_ids("b")[:2] == cache.block_ids("a")[:2]
    assert cache.num_free_blocks == 8 - 4
    assert (cache.queries, cache.hits) == (21, 8)


@pytest.mark.parametrize(("length", "matched"), [(0, 0), (1, 0), (4, 0), (5, 4), (8, 4), (9, 8)])
def test_match_leaves_the_last_token_to_be_computed(length: int, matched: int) -> None:
    cache = KVCache(8, 4)
    run(cache, "a", list(range(12)))
    assert cache.match(list(range(length))).num_tokens == matched


def test_same_block_after_another_prefix_is_not_a_hit() -> None:
    cache = KVCache(8, 2)
    run(cache, "a", [1, 2, 3, 4])
    assert cache.match([9, 9, 3, 4, 5]).num_tokens == 0
    assert cache.match([3, 4, 3, 4, 5]).num_tokens == 0


def test_block_size_one() -> None:
    cache = KVCache(4, 1)
    run(cache, "a", [7, 8])
    assert cache.match([7, 8, 9]).block_ids == cache.block_ids("a")
    assert cache.match([7]).num_tokens == 0
    assert cache.fork("a", "b", 1) == []
    assert cache.block_ids("b") == cache.block_ids("a")[:1]


def test_request_without_slots_grows_later() -> None:
    cache = KVCache(3, 4)
    assert cache.admit("a", [1, 2], 0, Match())
    assert cache.block_ids("a") == []
    cache.commit("a", [1, 2], 0)
    assert cache.grow("a", 0) == []
    assert cache.grow("a", 5) == [0, 1]
    assert cache.grow("a", 8) == []
    before = state(cache)
    assert cache.grow("a", 13) is None
    assert state(cache) == before
    assert cache.block_ids("a") == [0, 1]
    assert cache.num_blocks("a") == 2


def test_prompt_shorter_than_a_block_is_never_cached() -> None:
    cache = KVCache(2, 16)
    run(cache, "a", [1, 2, 3])
    cache.free("a")
    assert cache.match([1, 2, 3, 4]) == Match()
    assert not cache.pool.cached


def test_prefix_caching_off() -> None:
    cache = KVCache(4, 2, enable_prefix_caching=False)
    run(cache, "a", [1, 2, 3, 4])
    assert cache.match([1, 2, 3, 4, 5]) == Match()
    assert (cache.queries, cache.hits, len(cache.pool.cached)) == (0, 0, 0)
    assert cache.fork("a", "b", 3) == [(1, 2)]
    cache.free("a")
    cache.free("b")
    assert cache.num_free_blocks == 4


def test_tokens_past_num_tokens_are_not_hashed() -> None:
    cache = KVCache(4, 2)
    assert cache.admit("a", [1, 2, 3, 4], 4, Match())
    cache.commit("a", [1, 2, 3, 4], 3)
    assert cache.match([1, 2, 3, 4, 5]).num_tokens == 2
    cache.commit("a", [1, 2, 3, 9], 4)  # the 4 was a draft and was refused
    assert cache.match([1, 2, 3, 4, 5]).num_tokens == 2
    assert cache.match([1, 2, 3, 9, 5]).num_tokens == 4


def test_hits_that_lie_in_the_free_queue_are_not_free_for_allocation() -> None:
    cache = KVCache(4, 2)
    run(cache, "a", [1, 2, 3, 4])
    cache.free("a")
    prompt = [1, 2, 3, 4, 5]
    match = cache.match(prompt)
    before = state(cache)
    assert not cache.admit("b", prompt, 10, match)  # 2 hits + 3 new > 4, though 4 are free
    assert state(cache) == before
    assert cache.admit("b", prompt, 8, match)
    assert cache.num_free_blocks == 0


def test_stale_match_is_refused() -> None:
    cache = KVCache(2, 2)
    run(cache, "a", [1, 2])
    cache.free("a")
    match = cache.match([1, 2, 3])
    run(cache, "b", [5, 6, 7, 8])
    with pytest.raises(ValueError, match="stale"):
        cache.admit("c", [1, 2, 3], 2, match)


def test_fork_shares_full_blocks_and_copies_the_partial_one() -> None:
    cache = KVCache(6, 2)
    tokens = [1, 2, 3, 4, 5]
    run(cache, "a", tokens)
    assert cache.fork("a", "b", 5) == [(2, 3)]
    assert cache.block_ids("b") == [0, 1, 3]
    cache.commit("b", [*tokens, 6], 6)
    cache.commit("a", [*tokens, 7], 6)
    cache.check_integrity({"a": [*tokens, 7], "b": [*tokens, 6]})
    assert cache.match([*tokens, 6, 0]).block_ids == [0, 1, 3]
    assert cache.match([*tokens, 7, 0]).block_ids == [0, 1, 2]
    assert cache.fork("a", "c", 4) == []
    assert cache.fork("a", "d", 0) == []
    cache.free("a")
    assert cache.num_free_blocks == 6 - 3


def test_fork_is_refused_as_a_whole_when_blocks_are_short() -> None:
    cache = KVCache(2, 2)
    run(cache, "a", [1, 2, 3])
    before = state(cache)
    assert cache.fork("a", "b", 3) is None
    assert state(cache) == before
    assert "b" not in cache
    assert cache.fork("a", "b", 2) == []


def test_forked_block_hashed_by_the_child_first() -> None:
    cache = KVCache(4, 2)
    assert cache.admit("a", [1, 2, 3], 3, Match())
    assert cache.fork("a", "b", 2) == []
    cache.commit("b", [1, 2, 9], 2)
    cache.free("b")
    cache.check_integrity({"a": [1, 2, 3]})
    cache.commit("a", [1, 2, 3], 3)
    cache.check_integrity({"a": [1, 2, 3]})
    assert cache.match([1, 2, 3]).block_ids == [0]


def test_duplicates_keep_their_own_blocks_and_the_first_is_found() -> None:
    cache = KVCache(6, 2)
    tokens = [1, 2, 3]
    assert cache.admit("a", tokens, 3, Match())
    assert cache.admit("b", tokens, 3, Match())
    cache.commit("b", tokens, 3)
    cache.commit("a", tokens, 3)
    cache.check_integrity({"a": tokens, "b": tokens})
    assert cache.match(tokens).block_ids == cache.block_ids("b")[:1]
    assert cache.block_ids("a")[0] != cache.block_ids("b")[0]


def test_nothing_old_is_found_after_a_reset() -> None:
    cache = KVCache(8, 2)
    run(cache, "old", [1, 2, 3, 4])
    cache.reset_prefix_cache()
    assert cache.grow("old", 6) == [2]
    cache.commit("old", [1, 2, 3, 4, 5, 6], 6)
    run(cache, "new", [1, 2, 3, 4])  # makes the chain that a stale third block would continue
    assert cache.match([1, 2, 3, 4, 5, 6, 7]).block_ids == cache.block_ids("new")


def test_unknown_and_repeated_requests_are_errors() -> None:
    cache = KVCache(4, 2)
    run(cache, "a", [1, 2])
    for call in (cache.free, cache.block_ids, cache.num_blocks):
        with pytest.raises(KeyError, match="'x'"):
            call("x")
    with pytest.raises(KeyError, match="'x'"):
        cache.grow("x", 1)
    with pytest.raises(ValueError, match="already"):
        cache.admit("a", [1], 1, Match())
    with pytest.raises(ValueError, match="already"):
        cache.fork("a", "a", 1)
    with pytest.raises(ValueError, match="num_tokens=3"):
        cache.fork("a", "b", 3)
    with pytest.raises(ValueError, match="num_tokens=3"):
        cache.commit("a", [1, 2], 3)
    with pytest.raises(ValueError, match="the match"):
        cache.admit("b", [1, 2, 3], 1, cache.match([1, 2, 3]))
    with pytest.raises(ValueError, match="block_size"):
        KVCache(4, 0)
    cache.free("a")
    with pytest.raises(KeyError, match="'a'"):
        cache.free("a")


def test_check_integrity_compares_requests_with_blocks() -> None:
    cache = KVCache(6, 2)
    run(cache, "a", [1, 2, 3, 4])
    with pytest.raises(IntegrityError, match="does not have"):
        cache.check_integrity({"a": [1, 2, 3, 5]})
    with pytest.raises(IntegrityError, match="does not have"):
        cache.check_integrity({"a": [1, 2, 3]})
    cache.pool.touch([0])
    with pytest.raises(IntegrityError, match="held by 1 requests"):
        cache.check_integrity()


def test_chain_depends_on_every_token_before() -> None:
    chain = chain_digests([1, 2, 3, 4, 5], 2, ROOT_DIGEST)
    assert len(chain) == 2
    assert chain_digests([1, 2, 3, 4], 2, ROOT_DIGEST) == chain
    assert chain_digests([3, 4], 2, chain[0]) == chain[1:]
    assert chain_digests([0, 2, 3, 4], 2, ROOT_DIGEST)[1] != chain[1]
    assert chain_digests([], 2, ROOT_DIGEST) == []


def test_print_what_hashing_costs() -> None:
    """Printed, not asserted (run with -s): microseconds, best of 20."""
    size, count = 16, 256
    tokens = list(range(1000, 1000 + size * count + 1))
    other = tokens[1:]
    best: dict[str, float] = {}

    def lap(name: str, start: float, calls: int) -> None:
        best[name] = min(best.get(name, 1e9), (time.perf_counter() - start) / calls * 1e6)

    for _ in range(20):
        cache = KVCache(count + 1, size)
        assert cache.admit("a", tokens, len(tokens), Match())
        start = time.perf_counter()
        cache.commit("a", tokens, len(tokens))
        lap("commit a block", start, count)
        start = time.perf_counter()
        assert cache.match(tokens).num_tokens == size * count
        lap("match a hit block", start, count)
        start = time.perf_counter()
        assert cache.match(other).num_tokens == 0
        lap("miss", start, 1)
        start = time.perf_counter()
        for _ in range(count):
            cache.commit("a", tokens, len(tokens))
        lap("idle commit", start, count)
    print({name: round(value, 2) for name, value in best.items()}, "us")
