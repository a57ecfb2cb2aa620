"""Who is granted how many tokens. The scheduler alone: results are written by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from tightrope.engine.config import EngineConfig
from tightrope.engine.params import SamplingParams
from tightrope.engine.scheduler import Scheduler, Wishes
from tightrope.engine.types import Request, Status, StepPlan, StepResult, TokenResult

Grants = dict[str, tuple[int, int]]  # request id -> (tokens, drafts among them)


def make_scheduler(**values: Any) -> Scheduler:
    defaults: dict[str, Any] = {"max_model_len": 32, "num_blocks": 64, "block_size": 2}
    return Scheduler(EngineConfig(**(defaults | values)), most_device_drafts=16)


def add(
    scheduler: Scheduler,
    name: str,
    length: int,
    *,
    priority: int = 0,
    max_tokens: int = 20,
    parent: Request | None = None,
) -> Request:
    # Prompts differ in every token, so that no prefix is shared.
    start = 100 * (len(scheduler.waiting) + len(scheduler.running))
    prompt = parent.token_ids if parent is not None else range(start, start + length)
    request = Request(
        name,
        list(prompt),
        SamplingParams(priority=priority),
        seed=0,
        max_tokens=max_tokens,
        parent=parent,
    )
    request.arrival = len(scheduler.waiting) + len(scheduler.running)
    scheduler.add(request)
    return request


def launch(scheduler: Scheduler, drafts: int = 0, **wishes: Mapping[str, int]) -> StepPlan:
    """Schedule, draft as many tokens as granted (at most ``drafts`` on the host), launch."""
    plan = scheduler.schedule(Wishes(**wishes))
    for entry in plan.entries:
        plan.propose(entry, [7] * drafts)
    plan.close()
    scheduler.launched(plan)
    return plan


def finish(scheduler: Scheduler, plan: StepPlan, accepted: int = 0) -> None:
    """The step comes back: every sampling entry accepted so many drafts and drew a token."""
    outputs = {
        e.request.request_id: TokenResult([9] * (min(accepted, e.num_draft) + 1))
        for e in plan.entries
        if e.samples
    }
    scheduler.commit(plan, StepResult(outputs))


def grants(plan: StepPlan) -> Grants:
    return {e.request.request_id: (e.num_tokens, e.num_draft) for e in plan.entries}


@pytest.mark.parametrize(
    ("budget", "rows", "lengths", "steps"),
    [
        (8, 4, [5, 5, 5], [{"a": 5, "b": 3}, {"a": 1, "b": 2, "c": 5}, {"a": 1, "b": 1, "c": 1}]),
        (2, 4, [5, 1], [{"a": 2}, {"a": 2}, {"a": 1, "b": 1}, {"a": 1, "b": 1}]),
        (1, 4, [2, 1], [{"a": 1}, {"a": 1}, {"a": 1}]),
        (64, 1, [5, 5], [{"a": 5}, {"a": 1}]),
    ],
)
def test_one_budget_is_granted_in_order(
    budget: int, rows: int, lengths: Sequence[int], steps: Sequence[Mapping[str, int]]
) -> None:
    scheduler = make_scheduler(max_num_batched_tokens=budget, max_num_seqs=rows)
    for name, length in zip("abc", lengths, strict=False):
        add(scheduler, name, length)
    for expected in steps:
        plan = launch(scheduler)
        assert {e.request.request_id: e.num_tokens for e in plan.entries} == expected
        finish(scheduler, plan)


def test_lower_priority_numbers_are_served_first() -> None:
    scheduler = make_scheduler(max_num_seqs=2, max_num_batched_tokens=5)
    for name, priority in (("late", 1), ("first", 0), ("second", 0), ("urgent", -1)):
        add(scheduler, name, 3, priority=priority)
    plan = launch(scheduler)
    assert grants(plan) == {"urgent": (3, 0), "first": (2, 0)}
    assert [request.request_id for request in scheduler.waiting] == ["second", "late"]
    assert [request.request_id for request in scheduler.running] == ["urgent", "first"]


@pytest.mark.parametrize(
    ("wish", "budget", "max_tokens", "max_num_draft", "granted"),
    [
        (3, 64, 20, 16, 3),
        (9, 64, 20, 4, 4),  # the engine's limit
        (9, 6, 20, 16, 5),  # the budget, after the token that is known
        (9, 64, 5, 16, 3),  # one token is out, four are left, the last of them is sampled
        (9, 64, 2, 16, 0),
        (0, 64, 20, 16, 0),
    ],
)
@pytest.mark.parametrize("where", ["host", "device"])
def test_drafts_are_cut_to_what_can_be_used(
    wish: int, budget: int, max_tokens: int, max_num_draft: int, granted: int, where: str
) -> None:
    scheduler = make_scheduler(max_num_batched_tokens=budget, max_num_draft=max_num_draft)
    add(scheduler, "a", 4, max_tokens=max_tokens)
    finish(scheduler, launch(scheduler))
    plan = launch(scheduler, drafts=99, **{where: {"a": wish}})
    assert grants(plan) == {"a": (1 + granted, granted)}


def test_granted_drafts_that_nobody_writes_are_given_back() -> None:
    scheduler = make_scheduler()
    request = add(scheduler, "a", 4)
    finish(scheduler, launch(scheduler))
    plan = launch(scheduler, drafts=1, host={"a": 3})
    assert grants(plan) == {"a": (2, 1)}
    finish(scheduler, plan, accepted=1)
    assert (request.num_tokens, request.num_computed, request.num_pending) == (7, 6, 0)


def test_drafts_never_pass_the_context_limit() -> None:
    scheduler = make_scheduler(max_model_len=8, num_blocks=4)
    add(scheduler, "a", 5, max_tokens=3)
    finish(scheduler, launch(scheduler))
    plan = launch(scheduler, drafts=99, host={"a": 9})
    assert grants(plan) == {"a": (2, 1)}  # 6 tokens and a draft; the eighth is sampled
    finish(scheduler, plan, accepted=1)
    assert [(r.request_id, r.finish_reason) for r in scheduler.ended] == [("a", "length")]


def test_drafts_go_before_a_request_is_preempted() -> None:
    scheduler = make_scheduler(max_model_len=8, num_blocks=4)
    add(scheduler, "a", 3)
    add(scheduler, "b", 3)
    finish(scheduler, launch(scheduler))  # both have 4 tokens in 2 blocks: the cache is full
    plan = launch(scheduler, drafts=99, host={"a": 4, "b": 4})
    assert grants(plan) == {"a": (1, 0), "b": (1, 0)}
    finish(scheduler, plan)
    plan = launch(scheduler, drafts=99, host={"a": 2})
    assert grants(plan) == {"a": (1, 0)}  # its fifth token needs the blocks of the last request
    assert [request.request_id for request in plan.preempted] == ["b"]


def test_the_last_request_in_order_is_preempted_and_comes_back_whole() -> None:
    scheduler = make_scheduler(max_model_len=8, num_blocks=4)
    first = add(scheduler, "first", 3, max_tokens=3)
    urgent = add(scheduler, "urgent", 3, priority=-1, max_tokens=3)
    finish(scheduler, launch(scheduler))
    finish(scheduler, launch(scheduler))
    plan = launch(scheduler)
    assert plan.preempted == [first]
    assert grants(plan) == {"urgent": (1, 0)}
    assert (first.status, first.row, first.num_computed, first.epoch) == (Status.WAITING, -1, 0, 1)
    finish(scheduler, plan)
    assert urgent.finished
    plan = launch(scheduler)
    (entry,) = plan.entries
    assert (entry.request, entry.start + entry.num_tokens, entry.samples) == (first, 5, True)


def test_a_preempted_request_keeps_the_tokens_in_flight_and_no_count_of_them() -> None:
    scheduler = make_scheduler(max_model_len=8, num_blocks=4, overlap=True)
    add(scheduler, "a", 3)
    victim = add(scheduler, "b", 3)
    flight = launch(scheduler)
    finish(scheduler, flight)
    flight = launch(scheduler)
    ahead = launch(scheduler)
    assert ahead.preempted == [victim]
    assert grants(ahead) == {"a": (1, 0)}
    assert not launch(scheduler).new_rows, "it waits outside while a step holds it"
    finish(scheduler, flight)
    assert (victim.num_output, victim.num_computed, victim.num_pending) == (2, 0, 0)
    assert victim.in_flight is None


def test_device_wishes_count_only_once_the_row_has_sampled() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=3, overlap=True)
    request = add(scheduler, "a", 5)
    chunk = launch(scheduler, device={"a": 2})
    last = launch(scheduler, device={"a": 2})
    assert (grants(chunk), grants(last)) == ({"a": (3, 0)}, {"a": (2, 0)})
    ahead = launch(scheduler, device={"a": 2})
    (entry,) = ahead.entries
    assert (entry.num_draft, entry.on_device, entry.ahead, entry.draft) == (2, True, True, None)
    finish(scheduler, chunk)
    finish(scheduler, last)
    assert (request.num_tokens, request.num_pending, request.num_computed) == (6, 3, 8)
    finish(scheduler, ahead, accepted=1)
    assert (request.num_tokens, request.num_pending, request.num_computed) == (8, 0, 7)


def test_host_drafts_sit_out_a_step_in_flight() -> None:
    scheduler = make_scheduler(overlap=True)
    add(scheduler, "a", 3)
    add(scheduler, "b", 3)
    flight = launch(scheduler, host={"a": 2})
    ahead = launch(scheduler, host={"a": 2})
    assert grants(ahead) == {"b": (1, 0)}
    finish(scheduler, flight)
    assert grants(launch(scheduler, drafts=2, host={"a": 2})) == {"a": (3, 2), "b": (1, 0)}


@pytest.mark.parametrize(("max_tokens", "max_model_len"), [(1, 32), (20, 4)])
def test_nothing_is_launched_behind_a_step_that_surely_ends_the_request(
    max_tokens: int, max_model_len: int
) -> None:
    scheduler = make_scheduler(overlap=True, max_model_len=max_model_len)
    add(scheduler, "a", 3, max_tokens=min(max_tokens, max_model_len - 3))
    launch(scheduler)
    assert not launch(scheduler)


def test_upper_bounds_in_flight_stay_inside_the_context() -> None:
    scheduler = make_scheduler(overlap=True, max_model_len=8, num_blocks=4)
    request = add(scheduler, "a", 3, max_tokens=5)
    first = launch(scheduler)
    second = launch(scheduler, device={"a": 4})  # 4 tokens, 3 drafts, the eighth is sampled
    assert grants(second) == {"a": (4, 3)}
    finish(scheduler, first)
    third = launch(scheduler, device={"a": 4})  # the last position, were all accepted
    assert [(e.start, e.num_tokens) for e in third.entries] == [(7, 1)]
    finish(scheduler, second, accepted=0)
    assert (request.num_tokens, request.num_computed, request.num_pending) == (5, 5, 1)
    fourth = launch(scheduler, device={"a": 4})
    assert [(e.start, e.num_tokens, e.num_draft) for e in fourth.entries] == [(5, 2, 1)]


def test_children_wait_for_their_parent_and_then_share_its_blocks() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=4, overlap=True)
    parent = add(scheduler, "p0", 5)
    child = add(scheduler, "p1", 5, parent=parent)
    other = add(scheduler, "o", 2)
    chunk = launch(scheduler)
    assert grants(chunk) == {"p0": (4, 0)}
    finish(scheduler, chunk)
    last = launch(scheduler)
    assert grants(last) == {"p0": (1, 0), "o": (2, 0)}  # nobody waits with the child
    assert scheduler.waiting == [child]
    held = launch(scheduler)
    assert grants(held) == {"o": (1, 0)}  # never forked in flight: the parent sits out
    finish(scheduler, last)
    fork = launch(scheduler)
    assert grants(fork) == {"p0": (1, 0), "p1": (1, 0), "o": (1, 0)}
    blocks = scheduler.cache.block_ids("p0")
    assert scheduler.cache.block_ids("p1")[:2] == blocks[:2]
    assert scheduler.cache.block_ids("p1")[2] != blocks[2]
    assert not fork.block_copies, "four shared tokens are two full blocks"
    assert (child.num_cached_tokens, other.in_flight) == (4, fork.by_id["o"])


def test_rows_freed_before_an_empty_plan_reach_the_next_one() -> None:
    scheduler = make_scheduler()
    request = add(scheduler, "a", 3)
    finish(scheduler, launch(scheduler))
    row = request.row
    scheduler.finish(request, "abort")
    assert not launch(scheduler)
    add(scheduler, "b", 3)
    assert launch(scheduler).freed_rows == [row]


def test_device_wishes_are_cut_to_what_extensions_write() -> None:
    config = EngineConfig(max_model_len=32, num_blocks=64, block_size=2)
    scheduler = Scheduler(config, most_device_drafts=2)
    add(scheduler, "a", 2)
    launch(scheduler)
    ahead = launch(scheduler, device={"a": 5})
    assert ahead.entries[0].num_draft == 2
