"""Requests through the engine core: refusals, ends, counts, logprobs, tight caches."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch

from tightrope.engine.config import EngineConfig
from tightrope.engine.fake import FakeCore, FakeModel
from tightrope.engine.hooks import SchedulerHook
from tightrope.engine.params import SamplingParams
from tightrope.engine.types import PositionLogprobs, Request, StepPlan
from tightrope.tests.engine.scripted import EOS, VOCAB, Masks, Script, Spec, oracle

PROMPT = [1, 2, 3]
GREEDY = SamplingParams(temperature=0)


def make_core(hooks: Sequence[SchedulerHook] = (), **values: Any) -> FakeCore:
    defaults: dict[str, Any] = {"max_model_len": 16, "num_blocks": 16, "block_size": 4}
    config = EngineConfig(**(defaults | values))
    return FakeCore(config, vocab_size=VOCAB, eos_token_ids=EOS, hooks=hooks)


def drain(core: FakeCore, limit: int = 200) -> list[Request]:
    ended: list[Request] = []
    for _ in range(limit):
        if not core.has_unfinished():
            assert core.scheduler.cache.num_free_blocks == core.config.num_blocks
            return ended
        ended += [request for request in core.step() if request.finished]
    raise AssertionError("the engine does not come to an end")


def greedy(prompt: Sequence[int], count: int) -> list[int]:
    model, tokens = FakeModel(VOCAB), list(prompt)
    for _ in range(count):
        tokens.append(int(model.logits_of(tokens).argmax()))
    return tokens[len(prompt) :]


class Drafting(SchedulerHook):
    """Drafts ``count`` greedy tokens, or as many that are surely wrong."""

    def __init__(self, count: int, right: bool = True) -> None:
        self.count, self.right = count, right

    def want(self, requests: Sequence[Request]) -> Mapping[str, int]:
        return {request.request_id: self.count for request in requests}

    def plan(self, plan: StepPlan) -> None:
        for entry in plan.entries:
            if entry.num_draft:
                tokens = greedy(entry.request.token_ids, entry.num_draft)
                plan.propose(entry, tokens if self.right else [t ^ 1 for t in tokens])


class Releases(SchedulerHook):
    def __init__(self) -> None:
        self.seen: list[str] = []

    def release(self, request: Request) -> None:
        self.seen.append(request.request_id)


# --- what is refused, and what has no room ---


@pytest.mark.parametrize(
    ("request_id", "prompt", "message"),
    [
        ("taken", [1], "request_id 'taken' is already in the engine"),
        ("new", [], "prompt must hold at least one token"),
        ("new", [1] * 17, "prompt has 17 tokens, at most max_model_len=16 are allowed"),
    ],
)
def test_refused_requests_leave_nothing(
    request_id: str, prompt: Sequence[int], message: str
) -> None:
    hook = Releases()
    core = make_core([hook])
    first = Request("taken", PROMPT, GREEDY, seed=0, max_tokens=4)
    core.add(first)
    with pytest.raises(ValueError, match=message):
        core.add(Request(request_id, prompt, GREEDY, seed=0))
    assert drain(core) == [first]
    assert first.output_token_ids == greedy(PROMPT, 4)
    assert core.stats()["requests"] == 1
    assert hook.seen == ["taken"]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("with_abort", [False, True])
def test_a_prompt_that_fills_the_context_gets_no_token(overlap: bool, with_abort: bool) -> None:
    hook = Releases()
    core = make_core([hook], overlap=overlap)
    full, other = (Request(n, [1] * 16, GREEDY, seed=0) for n in ("full", "other"))
    core.add(full)
    if with_abort:  # does not swallow the report of the other one
        other = Request("other", PROMPT, GREEDY, seed=0)
        core.add(other)
        core.abort("other")
    assert drain(core) == [full]
    assert (full.finish_reason, full.output_token_ids) == ("length", [])
    assert sorted(hook.seen) == (["full", "other"] if with_abort else ["full"])


def test_the_context_limit_ends_a_request() -> None:
    core = make_core()
    request = Request("r", [1] * 12, GREEDY, seed=0, max_tokens=100)
    core.add(request)
    drain(core)
    assert (request.finish_reason, request.num_tokens) == ("length", 16)


def test_an_id_can_be_used_again_once_its_request_has_ended() -> None:
    core = make_core()
    for _ in range(2):
        core.add(Request("r", PROMPT, GREEDY, seed=0, max_tokens=2))
        core.step()
        core.abort("r")
    assert core.stats()["finished"] == {"abort": 2}


def test_closing_aborts_and_releases_what_runs() -> None:
    hook = Releases()
    core = make_core([hook], overlap=True)
    request = Request("r", PROMPT, GREEDY, seed=0)
    core.add(request)
    core.step()
    core.close()
    assert (request.finish_reason, hook.seen) == ("abort", ["r"])


# --- ends inside an accepted run ---

STOPS = greedy(PROMPT, 4)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("drafts", [0, 3, 7])
@pytest.mark.parametrize(
    ("settings", "ignore_eos", "length", "reason", "stop_reason"),
    [
        ({"stop_token_ids": frozenset(STOPS[3:])}, False, 4, "stop", STOPS[3]),
        ({"eos_token_ids": frozenset(STOPS[2:3])}, False, 3, "stop", None),
        ({"eos_token_ids": frozenset(STOPS[2:3])}, True, 9, "length", None),
        ({"stop_token_ids": frozenset(STOPS[1:2])}, True, 2, "stop", STOPS[1]),
        ({"stop_token_ids": frozenset(STOPS[:1])}, False, 1, "stop", STOPS[0]),
        ({"max_tokens": 6}, False, 6, "length", None),
        ({"max_tokens": 1}, False, 1, "length", None),
    ],
)
def test_a_text_ends_where_plain_decoding_ends_it(
    settings: dict[str, Any],
    ignore_eos: bool,
    length: int,
    reason: str,
    stop_reason: int | None,
    drafts: int,
    overlap: bool,
) -> None:
    assert len(set(STOPS)) == 4
    params = SamplingParams(temperature=0, logprobs=0, ignore_eos=ignore_eos)
    values: dict[str, Any] = {"max_tokens": 9}
    request = Request("r", PROMPT, params, seed=0, **(values | settings))
    core = make_core([Drafting(drafts)], overlap=overlap)
    core.add(request)
    drain(core)
    assert request.output_token_ids == greedy(PROMPT, length)
    assert (request.finish_reason, request.stop_reason) == (reason, stop_reason)
    assert [list(position) for position in request.logprobs] == [
        [token] for token in request.output_token_ids
    ]


# --- counts ---


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(
    ("right", "forwards", "with_drafts", "drafted", "accepted"),
    [
        # The second forward has room for 2 drafts behind 2 prompt tokens, later ones for 3.
        (True, 3, 3, 2 + 3 + 1, 6),
        (False, 9, 8, 2 + 5 * 3 + 2 + 1, 0),
    ],
)
def test_forwards_and_drafts_are_counted(
    right: bool, forwards: int, with_drafts: int, drafted: int, accepted: int, overlap: bool
) -> None:
    core = make_core([Drafting(3, right)], overlap=overlap, max_num_batched_tokens=4)
    request = Request("r", [1] * 6, GREEDY, seed=0, max_tokens=9)
    core.add(request)
    drain(core)
    metrics = request.metrics
    assert metrics.num_prompt_forwards == 1  # 4 of 6 tokens
    assert metrics.num_forwards == forwards
    assert (metrics.num_drafts, metrics.num_draft_tokens) == (with_drafts, drafted)
    assert metrics.num_accepted_tokens == accepted
    assert request.output_token_ids == greedy([1] * 6, 9)
    times = [
        metrics.arrival_time,
        metrics.first_scheduled_time,
        metrics.first_token_time,
        metrics.last_token_time,
    ]
    assert times == sorted(times, key=lambda time: time or 0)
    assert core.stats()["generated_tokens"] == 9
    assert core.stats()["steps"] == forwards + 1


def test_a_repeated_prompt_is_read_from_the_prefix_cache() -> None:
    core = make_core()
    for cached in (0, 8):
        request = Request("r", [1, 2] * 5, GREEDY, seed=0, max_tokens=2)
        core.add(request)
        drain(core)
        assert request.num_cached_tokens == cached
        assert request.output_token_ids == greedy([1, 2] * 5, 2)
    assert core.stats()["prefix_cache_hits"] == 8


# --- logprobs ---


def assert_position(
    position: PositionLogprobs, prefix: Sequence[int], token: int, top: int
) -> None:
    """Teacher-forced in float64: the token itself and the ``top`` most probable ones."""
    law = FakeModel(VOCAB).logits_of(prefix).double().log_softmax(-1)
    ranked: list[int] = law.argsort(descending=True).tolist()
    assert set(position) == {token, *ranked[:top]}
    for other, found in position.items():
        assert found.logprob == pytest.approx(float(law[other]), abs=1e-5)
        assert found.rank == ranked.index(other) + 1


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logprobs_are_those_of_a_teacher_forced_pass(temperature: float, overlap: bool) -> None:
    # Chunks of 5 tokens, a cache for one request, right and wrong drafts.
    core = make_core(
        [Drafting(2)],
        overlap=overlap,
        max_num_batched_tokens=5,
        block_size=2,
        num_blocks=8,
    )
    params = SamplingParams(temperature=temperature, logprobs=2, prompt_logprobs=1)
    prompts = ([1] * 7, [1, 1, 2, 1, 1, 3], [2])
    requests = [Request(f"r{i}", p, params, seed=i, max_tokens=8) for i, p in enumerate(prompts)]
    for request in requests:
        core.add(request)
    drain(core)
    assert sum(request.metrics.num_preemptions for request in requests) > 0
    assert sum(request.metrics.num_prompt_forwards for request in requests) > 3
    assert sum(request.metrics.num_draft_tokens for request in requests) > 3
    for request in requests:
        tokens = request.token_ids
        assert len(request.logprobs) == request.num_output == 8
        assert len(request.prompt_logprobs) == request.num_prompt
        assert request.prompt_logprobs[0] is None
        for i, position in enumerate(request.prompt_logprobs[1:], 1):
            assert position is not None
            assert_position(position, tokens[:i], tokens[i], 1)
        for i, position in enumerate(request.logprobs, request.num_prompt):
            assert_position(position, tokens[:i], tokens[i], 2)
        total = sum(p[t].logprob for p, t in zip(request.logprobs, tokens[-8:], strict=True))
        assert request.cumulative_logprob == pytest.approx(total)


# --- tight caches ---


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_requests_that_each_fill_the_cache_all_finish(
    block_size: int, drafts: int, caching: bool, overlap: bool
) -> None:
    specs = {
        f"r{i}": Spec((1, 1, 1, i), i % 2, i, 12, 0, (), ignore_eos=True, masked=i > 1)
        for i in range(4)
    }
    core = make_core(
        [Masks(Script(random.Random(0), specs)), Drafting(drafts)],
        block_size=block_size,
        num_blocks=-(-16 // block_size),
        enable_prefix_caching=caching,
        overlap=overlap,
    )
    requests = {name: spec.request(name) for name, spec in specs.items()}
    for request in requests.values():
        core.add(request)
    drain(core)
    for name, request in requests.items():
        assert request.finish_reason == "length"
        assert tuple(request.output_token_ids) == oracle(specs[name])
    if block_size < 16:
        assert core.stats()["preemptions"]


def test_the_model_tells_prefixes_apart() -> None:
    model = FakeModel(VOCAB)
    laws = torch.stack([model.logits_of(p) for p in ([1], [1, 1], [2], [1, 2], [2, 1])])
    assert len({tuple(law.tolist()) for law in laws}) == 5
