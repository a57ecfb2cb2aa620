"""The whole engine under random load, and the same machine against planted bugs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import Phase

from tightrope.engine import scheduler
from tightrope.engine.blocks import BlockPool
from tightrope.engine.cache import KVCache
from tightrope.engine.core import EngineCore
from tightrope.engine.fake import FakeAttention
from tightrope.engine.hook_chain import HookChain
from tightrope.engine.runner import Flight, Pending, Runner
from tightrope.engine.scheduler import Scheduler
from tightrope.engine.types import Entry, MaskRows, Request, StepPlan, StepResult
from tightrope.tests.engine.machine import HARD_EVENTS, explore


def test_requests_get_their_plain_tokens_and_every_hard_event_is_reached() -> None:
    counter: Counter[str] = Counter()
    # What hypothesis draws depends on the modules that are imported, so how rare an event is varies
    # with the tests that ran before: go on until each was met often enough.
    for steps in (40, 41, 42, 43):
        counter += explore(120, steps, [Phase.generate, Phase.shrink])
        if all(counter[name] >= 50 for name in HARD_EVENTS):
            break
    print(dict(counter))
    assert {name: counter[name] for name in HARD_EVENTS if counter[name] < 50} == {}


# Planted bugs: the same machine must find each of them. A bug replaces one function; it is called
# with the original before the arguments.


def _hash_drafts_at_launch(original: Any, self: Scheduler, plan: StepPlan) -> None:
    original(self, plan)
    for entry in plan.entries:
        request, cache = entry.request, self.cache
        tokens = request.token_ids + entry.draft_tokens
        count = min(len(tokens), request.num_computed)
        if request.request_id in cache and entry.samples:
            cache.commit(request.request_id, tokens, count)


def _rejected_drafts_stay_computed(
    original: Any, self: Scheduler, plan: StepPlan, result: StepResult
) -> None:
    for entry in plan.entries:
        output = result.outputs.get(entry.request.request_id)
        if output is not None and entry.samples and entry.epoch == entry.request.epoch:
            entry.request.num_computed += entry.num_draft + 1 - len(output.tokens)
    original(self, plan, result)


def _device_keeps_rejected_drafts(
    original: Any, self: Runner, flight: Flight, masks: MaskRows | None
) -> Pending:
    pending = original(self, flight, masks)
    if pending.output is not None:
        sampling = flight.batch.sampling
        assert sampling is not None
        rejected = sampling.num_draft_S - pending.output.num_accepted_S
        self.state.computed[sampling.rows_S] += rejected
    return pending


def _leaked_block(original: Any, self: BlockPool, block_ids: Sequence[int]) -> None:
    original(self, list(block_ids)[1:])


def _row_leaked_by_abort(original: Any, self: Scheduler, request: Request, *reason: Any) -> None:
    row = request.row
    original(self, request, *reason)
    if reason[0] == "abort" and row >= 0:
        self._free_rows.remove(row)  # pyright: ignore[reportPrivateUsage]


def _fork_without_copy(original: Any, self: FakeAttention, pairs: Sequence[Any]) -> None:
    original(self, [])


def _partial_block_shared(
    original: Any, self: KVCache, parent_id: str, child_id: str, num_tokens: int
) -> list[tuple[int, int]] | None:
    whole = -(-num_tokens // self.block_size) * self.block_size
    return original(self, parent_id, child_id, whole)


def _stale_result_counts(
    original: Any, self: Scheduler, plan: StepPlan, result: StepResult
) -> None:
    for entry in plan.entries:
        entry.epoch = entry.request.epoch
    original(self, plan, result)


def _mask_rows_off_by_one(original: Any, self: HookChain, plan: StepPlan) -> MaskRows | None:
    masks = original(self, plan)
    return None if masks is None else MaskRows(masks.bitmask.roll(1, 0), masks.rows)


def _ahead_drafts_untold(original: Any, self: EngineCore, ahead: StepPlan) -> None:
    original(self, StepPlan(0, [e for e in ahead.entries if e.request.finished]))


def _ended_rows_not_cancelled(original: Any, self: EngineCore, ahead: StepPlan) -> None:
    original(self, StepPlan(0, [e for e in ahead.entries if not e.request.finished]))


def _stop_only_at_the_end_of_a_run(
    original: Any, request: Request, entry: Entry, *rest: Any
) -> Any:
    stops, last = request.stop_token_ids, frozenset(rest[0].tokens[-1:])
    request.stop_token_ids = stops & last
    ending = original(request, entry, *rest)
    request.stop_token_ids = stops
    return ending


BUGS: list[tuple[object, str, Callable[..., Any]]] = [
    (Scheduler, "launched", _hash_drafts_at_launch),
    (Scheduler, "commit", _rejected_drafts_stay_computed),
    (Runner, "sample", _device_keeps_rejected_drafts),
    (BlockPool, "free", _leaked_block),
    (Scheduler, "finish", _row_leaked_by_abort),
    (FakeAttention, "copy_blocks", _fork_without_copy),
    (KVCache, "fork", _partial_block_shared),
    (Scheduler, "commit", _stale_result_counts),
    (HookChain, "masks", _mask_rows_off_by_one),
    (EngineCore, "_catch_up", _ahead_drafts_untold),
    (EngineCore, "_catch_up", _ended_rows_not_cancelled),
    (scheduler, "commit_tokens", _stop_only_at_the_end_of_a_run),
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
    with pytest.raises((AssertionError, IndexError, KeyError, ValueError, RuntimeError)):
        explore(100, 40, [Phase.generate])
