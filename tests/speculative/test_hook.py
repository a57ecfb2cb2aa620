"""`SpeculativeHook` driven by hand-made plans, with toy proposers by dotted path."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import pytest

from tightrope.engine.config import EngineConfig
from tightrope.engine.hooks import EngineContext
from tightrope.engine.params import SamplingParams
from tightrope.engine.types import Entry, Request, StepPlan, StepResult
from tightrope.speculative import (
    Draft,
    ForcedProposer,
    Proposer,
    SpeculationConfig,
    SpeculativeHook,
    View,
    find_proposer,
)


class Counting(Proposer):
    """Drafts the numbers after the last token, for texts of even length."""

    def __init__(self, step: int = 1, length: int = 20) -> None:
        self.step, self.length = step, length
        self.seen: list[str] = []
        self.released: list[str] = []

    def propose(self, view: View, budget: Mapping[str, int]) -> Mapping[str, Draft]:
        return {
            r.request_id: Draft([(r.token_ids[-1] + self.step * i) % 100
                                 for i in range(1, self.length + 1)])
            for r in view.requests
            if r.num_tokens % 2 == 0
        }  # fmt: skip

    def observe(self, view: View) -> None:
        self.seen += [r.request_id for r in view.requests]

    def release(self, request_id: str) -> None:
        self.released.append(request_id)


class Constant(Counting):
    """Drafts one token for everybody."""

    def propose(self, view: View, budget: Mapping[str, int]) -> Mapping[str, Draft]:
        return {r.request_id: Draft([99]) for r in view.requests}


class Broken(Counting):
    def propose(self, view: View, budget: Mapping[str, int]) -> Mapping[str, Draft]:
        return {r.request_id: Draft([1, 100]) for r in view.requests}


class NoMethods:
    def propose(self, view: View, budget: Mapping[str, int]) -> Mapping[str, Draft]:
        return {}


@pytest.fixture
def toys(monkeypatch: pytest.MonkeyPatch) -> str:
    module = ModuleType("toy_proposers")
    for kind in (Counting, Constant, Broken, NoMethods):
        setattr(module, kind.__name__, kind)
    module.number = 3  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "toy_proposers", module)
    return module.__name__


def prepared(hook: SpeculativeHook, max_num_draft: int = 16) -> SpeculativeHook:
    config = EngineConfig(max_model_len=256, num_blocks=64, max_num_draft=max_num_draft)
    hook.prepare(EngineContext(config, 100, frozenset({0})))
    return hook


def request(
    hook: SpeculativeHook, request_id: str, length: int = 2, max_tokens: int = 64, **params: Any
) -> Request:
    made = Request(
        request_id,
        list(range(1, length + 1)),
        SamplingParams(**params),
        seed=0,
        max_tokens=max_tokens,
    )
    hook.admit(made)
    return made


def plan_of(*grants: tuple[Request, int]) -> StepPlan:
    plan = StepPlan(0)
    for row, (made, grant) in enumerate(grants):
        plan.add(Entry(made, row, 0, made.num_tokens - 1, 1 + grant, grant, True))
    return plan


def test_drafts_are_wished_for_granted_and_cut(toys: str) -> None:
    hook = prepared(SpeculativeHook([f"{toys}:Counting", f"{toys}.Constant"]))
    even, odd = request(hook, "even", 4), request(hook, "odd", 3)
    short = request(hook, "short", 4, max_tokens=4)
    assert hook.want([even, odd, short]) == {"even": 8, "odd": 1, "short": 3}
    plan = plan_of((even, 5), (odd, 1), (short, 3))
    hook.plan(plan)
    assert [e.draft_tokens for e in plan.entries] == [[5, 6, 7, 8, 9], [99], [5, 6, 7]]
    plan.close()
    assert [e.num_draft for e in plan.entries] == [5, 1, 3]


def test_a_text_that_has_grown_gets_no_stale_draft(toys: str) -> None:
    hook = prepared(SpeculativeHook(f"{toys}:Constant"))
    made = request(hook, "r")
    assert hook.want([made]) == {"r": 1}
    made.token_ids.append(5)
    plan = plan_of((made, 1))
    hook.plan(plan)
    assert plan.entries[0].draft is None


def test_prompt_chunks_get_no_draft(toys: str) -> None:
    hook = prepared(SpeculativeHook(f"{toys}:Constant"))
    made = request(hook, "r")
    hook.want([made])
    plan = plan_of((made, 1))
    plan.entries[0].samples = False
    hook.plan(plan)
    assert plan.entries[0].draft is None


def test_a_request_in_flight_is_not_asked(toys: str) -> None:
    hook = prepared(SpeculativeHook(f"{toys}:Constant"))
    flying, still, chunk = (request(hook, name) for name in ("flying", "still", "chunk"))
    flying.in_flight = plan_of((flying, 0)).entries[0]
    chunk.in_flight = plan_of((chunk, 0)).entries[0]
    chunk.in_flight.samples = False
    assert hook.want([flying, still, chunk]) == {"still": 1, "chunk": 1}


class Forcing:
    """A guided state with one forced run and one allowed set."""

    def __init__(self, run: list[int]) -> None:
        self.run = run

    def is_guided(self, request_id: str) -> bool:
        return request_id == "guided"

    def forced(self, request_id: str, limit: int = 32) -> list[int]:
        return self.run[:limit] if self.is_guided(request_id) else []

    def validate(self, request_id: str, tokens: Any) -> int:
        limit = 2 if self.is_guided(request_id) else len(tokens)
        return min(limit, len(tokens))


def test_forced_tokens_come_first_and_other_drafts_obey_the_grammar(toys: str) -> None:
    state = Forcing([11, 12, 13])
    hook = prepared(SpeculativeHook(["forced", f"{toys}:Counting"], guided=state))
    guided, plain = request(hook, "guided"), request(hook, "plain")
    assert hook.want([guided, plain]) == {"guided": 3, "plain": 8}
    plan = plan_of((guided, 8), (plain, 8))
    hook.plan(plan)
    assert plan.entries[0].draft_tokens == [11, 12, 13]
    state.run = []
    assert hook.want([guided, plain]) == {"guided": 2, "plain": 8}


@pytest.mark.parametrize(("num_draft", "run", "waits"), [
    (0, 3, True), (0, 2, False), (2, 5, True), (2, 4, False), (0, 0, False)
])  # fmt: skip
def test_ahead_only_forced_runs_are_waited_for(num_draft: int, run: int, waits: bool) -> None:
    hook = prepared(SpeculativeHook("forced", guided=Forcing(list(range(run)))))
    made = request(hook, "guided")
    made.in_flight = plan_of((made, num_draft)).entries[0]
    assert hook.want([made]) == ({"guided": 1} if waits else {})
    hook.plan(plan_of((made, 1)))  # and no draft is left over from before


@pytest.mark.parametrize(("setting", "length"), [
    (None, 8), (False, 0), (0, 0), (3, 3), (40, 16), ({"num_speculative_tokens": 2}, 2),
    ({}, 8),
])  # fmt: skip
def test_a_request_may_set_its_own_length(toys: str, setting: Any, length: int) -> None:
    hook = prepared(SpeculativeHook(f"{toys}:Counting"))
    made = request(hook, "r", speculation=setting)
    assert hook.want([made]) == ({"r": length} if length else {})
    assert hook.owns(made) is (length > 0)


@pytest.mark.parametrize(
    "setting", [-1, 1.5, "on", [3], True, {"k": 3}, {"num_speculative_tokens": True}]
)
def test_a_bad_request_setting_is_refused(setting: Any) -> None:
    hook = prepared(SpeculativeHook("forced"))
    with pytest.raises(ValueError, match="speculation"):
        request(hook, "r", speculation=setting)


@pytest.mark.parametrize(
    "setting",
    [
        None, False, 3, "", [], "nothing", "no.such.module:Thing", "toy_proposers:Missing",
        "toy_proposers:number", ["toy_proposers:NoMethods"], Counting,
        {"num_speculative_tokens": 3},
        {"proposers": "forced", "num_speculative_tokens": -1}, {"proposers": "forced", "depth": 2},
        {"proposers": []},
    ],
)  # fmt: skip
def test_bad_engine_settings_are_refused(toys: str, setting: Any) -> None:
    with pytest.raises(ValueError, match="speculation"):
        SpeculativeHook(setting)


def test_unknown_names_list_the_known() -> None:
    with pytest.raises(ValueError, match="forced"):
        find_proposer("medusa")
    assert find_proposer("forced") is ForcedProposer


def test_settings_reach_the_proposers_that_take_them(toys: str) -> None:
    hook = SpeculativeHook(
        {"proposers": ["forced", f"{toys}:Counting"], "num_speculative_tokens": 5, "step": 2}
    )
    counting = hook.proposers[1]
    assert isinstance(counting, Counting)
    assert counting.step == 2
    assert hook.config.num_speculative_tokens == 5
    assert SpeculationConfig.parse(None) is None is SpeculationConfig.parse(False)
    assert SpeculativeHook(Counting()).proposers  # an object serves as well as a name


def test_a_draft_outside_the_vocabulary_names_its_proposer(toys: str) -> None:
    hook = prepared(SpeculativeHook(f"{toys}:Broken"))
    with pytest.raises(ValueError, match="Broken"):
        hook.want([request(hook, "r")])


def test_proposers_observe_and_release(toys: str) -> None:
    proposer = Counting()
    hook = prepared(SpeculativeHook(proposer))
    made, other = request(hook, "a"), request(hook, "b")
    hook.observe(plan_of((made, 0), (other, 0)), StepResult({}, committed={"a": [4], "b": []}))
    assert proposer.seen == ["a"]
    hook.release(made)
    assert proposer.released == ["a"]
    assert hook.want([made]) == {}


def test_the_report_counts() -> None:
    hook = prepared(SpeculativeHook("forced"))
    made, off = request(hook, "a"), request(hook, "b", speculation=False)
    report = hook.report(made)["speculation"]
    assert report.acceptance is None
    made.metrics.num_drafts, made.metrics.num_draft_tokens = 2, 8
    made.metrics.num_accepted_tokens = 6
    report = hook.report(made)["speculation"]
    assert (report.num_drafts, report.num_draft_tokens, report.acceptance) == (2, 8, 0.75)
    assert hook.report(off) == {}
