"""KVCache as a whole: a state machine against a model without hashes, and planted bugs.

The model names a cached block by its whole prefix (a tuple of tokens) and keeps the free queue as a
list. A dictionary plays the device: it remembers for each slot which prefix its KV was computed
from, so sharing, reuse or caching that would corrupt anybody's attention is seen as such.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tightrope.engine import cache
from tightrope.engine.blocks import Block, BlockPool, FreeQueue
from tightrope.engine.cache import KVCache, Match

Prefix = tuple[int, ...]
HARD_EVENTS = (
    "eviction of a cached block",
    "hit on a free block",
    "hit on a used block",
    "fork with a partial block",
    "fork of full blocks",
    "fork refused",
    "growth refused",
    "admission refused",
    "admission refused for its own hits",
    "duplicate hash",
    "refused drafts filled a block",
    "cached blocks freed in LRU order",
    "reset under running requests",
)
NUMBER = st.integers(0, 9)
BACK = st.sampled_from([0, 0, 0, 1, 2])
TOKEN = st.sampled_from([0, 0, 0, 1])  # few contents, so that many agree


@dataclass
class Held:
    """What the model knows about a request."""

    tokens: list[int]
    blocks: list[int]
    computed: int
    hashed: int  # full blocks
    hashing: bool = True


class CacheMachine(RuleBasedStateMachine):
    events: ClassVar[Counter[str]] = Counter()

    @initialize(block_size=st.sampled_from([2, 3, 1]), num_blocks=st.integers(5, 10))
    def start(self, block_size: int, num_blocks: int) -> None:
        self.size = block_size
        self.cache = KVCache(num_blocks, block_size)
        self.requests: dict[str, Held] = {}
        self.free_blocks = list(range(num_blocks))  # head first
        self.refs = [0] * num_blocks
        self.cached: dict[Prefix, int] = {}
        self.device: dict[tuple[int, int], Prefix] = {}
        self.texts: list[list[int]] = []  # of the newest requests
        self.queries = self.hits = self.next_id = 0

    def prefix_of(self, block: int) -> Prefix | None:
        return next((prefix for prefix, other in self.cached.items() if other == block), None)

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.size)

    def take(self, count: int) -> list[int]:
        taken, self.free_blocks = self.free_blocks[:count], self.free_blocks[count:]
        for block in taken:
            prefix = self.prefix_of(block)
            if prefix is not None:
                del self.cached[prefix]
                self.events["eviction of a cached block"] += 1
            self.refs[block] = 1
        return taken

    def hold(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            if block in self.free_blocks:
                self.free_blocks.remove(block)
            self.refs[block] += 1

    def expected_match(self, prompt: Sequence[int]) -> list[int]:
        blocks: list[int] = []
        for end in range(self.size, len(prompt), self.size):
            if tuple(prompt[:end]) not in self.cached:
                break
            blocks.append(self.cached[tuple(prompt[:end])])
        return blocks

    def pick(self, number: int) -> str:
        return list(self.requests)[number % len(self.requests)]

    def make_room(self) -> None:
        """The refusal changed nothing; then the oldest request ends."""
        self.agrees_with_the_model()
        if self.requests:
            self.release(self.pick(0))

    def new_id(self) -> str:
        self.next_id += 1
        return f"r{self.next_id}"

    def commit(self, request_id: str, text: Sequence[int]) -> None:
        """``text`` may run past what is committed and computed, as a verified draft does."""
        sequence = self.requests[request_id]
        self.cache.commit(request_id, text, sequence.computed)
        if not sequence.hashing:
            return
        if len(text) // self.size > sequence.computed // self.size:
            self.events["refused drafts filled a block"] += text != sequence.tokens
        for index in range(sequence.hashed, sequence.computed // self.size):
            prefix = tuple(text[: (index + 1) * self.size])
            block = sequence.blocks[index]
            self.events["duplicate hash"] += self.cached.setdefault(prefix, block) != block
            sequence.hashed += 1

    @rule(
        known=NUMBER,
        keep=NUMBER,
        rest=st.lists(TOKEN, min_size=1, max_size=4),
        chunk=NUMBER,
        drafts=st.sampled_from([0, 0, 0, 1, 2, None]),
    )
    def admit(self, known: int, keep: int, rest: list[int], chunk: int, drafts: int | None) -> None:
        """A prompt that often starts as an earlier one. Without drafts: as many slots as there
        are free blocks, which is too much where the match itself lies in free blocks."""
        prompt = (self.texts[known % len(self.texts)][:keep] if self.texts else []) + rest
        match = self.cache.match(prompt)
        blocks = self.expected_match(prompt)
        assert match.block_ids == blocks
        assert match.num_tokens == len(blocks) * self.size < len(prompt)
        for position in range(match.num_tokens):
            slot = (blocks[position // self.size], position % self.size)
            assert self.device[slot] == tuple(prompt[: position + 1])
        if drafts is None:
            num_tokens = (len(blocks) + len(self.free_blocks)) * self.size
        else:
            num_tokens = min(match.num_tokens + chunk, len(prompt)) + drafts
        needed = self.blocks_for(num_tokens) - len(blocks)
        hits_free = sum(not self.refs[block] for block in blocks)
        fits = needed <= len(self.free_blocks) - hits_free
        request_id = self.new_id()
        assert self.cache.admit(request_id, prompt, num_tokens, match) == fits
        if not fits:
            self.events["admission refused"] += 1
            self.events["admission refused for its own hits"] += needed <= len(self.free_blocks)
            return self.make_room()
        self.events["hit on a free block"] += hits_free > 0
        self.events["hit on a used block"] += hits_free < len(blocks)
        self.hold(blocks)
        blocks = blocks + self.take(needed)
        self.requests[request_id] = Held(
            list(prompt), blocks, match.num_tokens, len(match.block_ids)
        )
        self.texts = [*self.texts[-4:], prompt]
        self.queries += len(prompt)
        self.hits += match.num_tokens

    @precondition(lambda self: self.requests)
    @rule(
        number=NUMBER,
        chunk=st.integers(1, 6),
        drafts=st.lists(TOKEN, max_size=4),
        accepted=st.integers(0, 4),
        sampled=TOKEN,
    )
    def step(self, number: int, chunk: int, drafts: list[int], accepted: int, sampled: int) -> None:
        """One engine step: a prompt chunk, or the known rest and drafts, some of them accepted."""
        request_id = self.pick(number)
        sequence = self.requests[request_id]
        known = len(sequence.tokens)
        samples = sequence.computed + chunk >= known
        text = sequence.tokens + (drafts if samples else [])
        end = len(text) if samples else sequence.computed + chunk
        needed = max(0, self.blocks_for(end) - len(sequence.blocks))
        grown = self.cache.grow(request_id, end)
        if needed > len(self.free_blocks):
            assert grown is None
            self.events["growth refused"] += 1
            return self.make_room()
        new = self.take(needed)
        assert grown == new
        sequence.blocks += new
        for position in range(sequence.computed, end):
            slot = (sequence.blocks[position // self.size], position % self.size)
            self.device[slot] = tuple(text[: position + 1])
        if samples:
            kept = min(accepted, len(drafts))
            sequence.tokens = [*text[: known + kept], sampled]
            sequence.computed = known + kept
        else:
            sequence.computed = end
        self.commit(request_id, text)

    @precondition(lambda self: self.requests)
    @rule(number=NUMBER, children=st.integers(1, 2), back=BACK, sampled=TOKEN)
    def fork(self, number: int, children: int, back: int, sampled: int) -> None:
        partial = [name for name, seq in self.requests.items() if seq.computed % self.size]
        parent_id = partial[number % len(partial)] if partial else self.pick(number)
        num_tokens = max(0, self.requests[parent_id].computed - back)
        for _ in range(children):
            if parent_id in self.requests:
                self.fork_once(parent_id, num_tokens, sampled)

    def fork_once(self, parent_id: str, num_tokens: int, sampled: int) -> None:
        parent = self.requests[parent_id]
        full, rest = divmod(num_tokens, self.size)
        child_id = self.new_id()
        copies = self.cache.fork(parent_id, child_id, num_tokens)
        if rest and not self.free_blocks:
            assert copies is None
            self.events["fork refused"] += 1
            return self.make_room()
        own = self.take(1 if rest else 0)
        assert copies == [(parent.blocks[full], block) for block in own]
        for source, target in copies or []:
            for offset in range(self.size):
                if (source, offset) in self.device:
                    self.device[target, offset] = self.device[source, offset]
        self.hold(parent.blocks[:full])
        self.events["fork with a partial block"] += bool(rest)
        self.events["fork of full blocks"] += full > 0
        self.requests[child_id] = Held(
            tokens=[*parent.tokens[:num_tokens], sampled],
            blocks=parent.blocks[:full] + own,
            computed=num_tokens,
            hashed=min(parent.hashed, full),
            hashing=parent.hashing,
        )

    @precondition(lambda self: self.requests)
    @rule(number=NUMBER, dice=NUMBER)
    def free(self, number: int, dice: int) -> None:
        if dice == 5:
            self.reset()
        self.release(self.pick(number))

    def release(self, request_id: str) -> None:
        self.cache.free(request_id)
        cached, sequence = 0, self.requests.pop(request_id)
        self.texts = [*self.texts[-4:], sequence.tokens]
        for block in reversed(sequence.blocks):
            self.refs[block] -= 1
            if self.refs[block]:
                continue
            if self.prefix_of(block) is None:
                self.free_blocks.insert(0, block)
            else:
                self.free_blocks.append(block)
                cached += 1
        self.events["cached blocks freed in LRU order"] += cached > 1

    def reset(self) -> None:
        self.cache.reset_prefix_cache()
        self.events["reset under running requests"] += 1
        self.cached.clear()
        for sequence in self.requests.values():
            sequence.hashing = False

    @invariant()
    def agrees_with_the_model(self) -> None:
        cache, pool = self.cache, self.cache.pool
        cache.check_integrity({name: seq.tokens for name, seq in self.requests.items()})
        assert [block.block_id for block in pool.free_queue] == self.free_blocks
        assert cache.num_free_blocks == len(self.free_blocks)
        assert [block.ref_count for block in pool.blocks] == self.refs
        assert {block.block_id for block in pool.cached.values()} == set(self.cached.values())
        assert (cache.queries, cache.hits) == (self.queries, self.hits)
        for request_id, sequence in self.requests.items():
            assert cache.block_ids(request_id) == sequence.blocks
            for position in range(sequence.computed):
                slot = (sequence.blocks[position // self.size], position % self.size)
                assert self.device[slot] == tuple(sequence.tokens[: position + 1])

    def teardown(self) -> None:
        for request_id in list(getattr(self, "requests", ())):
            self.release(request_id)
            self.agrees_with_the_model()


def explore(max_examples: int, steps: int, phases: Sequence[Phase]) -> Counter[str]:
    """Run the machine with fresh counters; its first failure is raised as it is."""
    counter: Counter[str] = Counter()
    machine = type("CountingMachine", (CacheMachine,), {"events": counter})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=max_examples,
            stateful_step_count=steps,
            derandomize=True,
            suppress_health_check=[HealthCheck.too_slow],  # the clock of a busy machine
            deadline=None,
            phases=phases,
            report_multiple_bugs=False,
        ),
    )
    return counter


def test_cache_agrees_with_its_model_and_reaches_every_hard_event() -> None:
    counter = explore(200, 50, [Phase.generate, Phase.shrink])
    print(dict(counter))
    assert {name: counter[name] for name in HARD_EVENTS if counter[name] < 50} == {}


# Planted bugs: the same machine must find each of them. A bug replaces one function; it is called
# with the original before the arguments.


def _hash_uncommitted(
    original: Any, self: KVCache, request_id: str, token_ids: Sequence[int], num_tokens: int
) -> None:
    slots = len(self.block_ids(request_id)) * self.block_size
    original(self, request_id, token_ids, min(len(token_ids), slots))


def _hit_without_reference(original: Any, self: BlockPool, block_ids: Iterable[int]) -> None:
    original(self, [index for index in block_ids if not self.blocks[index].ref_count])


def _evicted_block_stays_mapped(original: Any, self: BlockPool, count: int) -> list[int] | None:
    before = dict(self.cached)
    block_ids = original(self, count)
    self.cached.update(before)
    return block_ids


def _refused_admission_keeps_hits(
    original: Any, self: KVCache, request_id: str, tokens: list[int], count: int, match: Match
) -> bool:
    admitted = original(self, request_id, tokens, count, match)
    if not admitted:
        self.pool.touch(match.block_ids)
    return admitted


def _partial_block_shared(
    original: Any, self: KVCache, parent_id: str, child_id: str, num_tokens: int
) -> list[tuple[int, int]] | None:
    whole = -(-num_tokens // self.block_size) * self.block_size
    return original(self, parent_id, child_id, whole)


def _hash_ignores_the_prefix(original: Any, data: bytes, *, digest_size: int) -> Any:
    return original(data[digest_size:], digest_size=digest_size)


def _leaked_block(original: Any, self: BlockPool, block_ids: Iterable[int]) -> None:
    original(self, list(block_ids)[1:])


def _newest_evicted_first(original: Any, self: FreeQueue, block: Block) -> None:
    self.prepend(block)


BUGS: list[tuple[object, str, Callable[..., Any]]] = [
    (KVCache, "commit", _hash_uncommitted),
    (KVCache, "admit", _refused_admission_keeps_hits),
    (KVCache, "fork", _partial_block_shared),
    (cache, "blake2b", _hash_ignores_the_prefix),
    (BlockPool, "free", _leaked_block),
    (BlockPool, "touch", _hit_without_reference),
    (BlockPool, "allocate", _evicted_block_stays_mapped),
    (FreeQueue, "append", _newest_evicted_first),
]


@pytest.mark.parametrize(
    ("owner", "name", "bug"), BUGS, ids=[bug.__name__.strip("_") for _, _, bug in BUGS]
)
def test_machine_finds_planted_bug(
    owner: object, name: str, bug: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    original = getattr(owner, name)

    def planted(*args: Any, **kwargs: Any) -> Any:
        return bug(original, *args, **kwargs)

    monkeypatch.setattr(owner, name, planted)
    with pytest.raises(AssertionError):  # IntegrityError is one
        explore(100, 50, [Phase.generate])
