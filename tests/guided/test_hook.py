"""`GuidedHook` driven by hand-made plans: masks, commits, refusals, reports."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any, cast

import numpy as np
import pytest

from tightrope.engine.hooks import EngineContext
from tightrope.engine.params import SamplingParams
from tightrope.engine.types import Draft, Entry, MaskRows, Request, StepPlan, StepResult
from tightrope.guided import GrammarRefused, Guide, GuidedHook, GuideReport
from tightrope.guided.backends.llguidance import LLGuidanceBackend, LLGuidanceCompiled
from tightrope.guided.protocol import GrammarSpec

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture
def hook(context: EngineContext) -> Iterator[GuidedHook]:
    made = GuidedHook()
    made.prepare(context)
    yield made
    made.close()


def request(guide: object, request_id: str = "r") -> Request:
    params = SamplingParams(guide=guide, ignore_eos=True, max_tokens=64)
    return Request(request_id, [7, 8], params, seed=0, eos_token_ids=frozenset({1, 2}))


def admit(hook: GuidedHook, made: Request) -> Request:
    future = hook.admit(made)
    if future is not None:
        future.result(timeout=20)
    return made


def plan_of(*shares: tuple[Request, Sequence[int]]) -> StepPlan:
    """A closed plan in which every request samples behind its drafts."""
    plan = StepPlan(0)
    for row, (made, drafts) in enumerate(shares):
        entry = Entry(made, row, 0, made.num_tokens - 1, 1 + len(drafts), len(drafts), True)
        entry.draft = Draft(list(drafts)) if drafts else None
        plan.add(entry)
    plan.close()
    return plan


def masks(hook: GuidedHook, plan: StepPlan) -> tuple[list[int], list[set[int]]]:
    made = hook.masks(plan)
    assert isinstance(made, MaskRows)
    array = made.bitmask.numpy()
    assert array.shape[0] == len(made.rows)
    unpacked = np.unpackbits(array.view(np.uint8), axis=1, bitorder="little")
    return made.rows, [set(np.flatnonzero(row).tolist()) for row in unpacked]


def commit(hook: GuidedHook, plan: StepPlan, made: Request, tokens: Sequence[int]) -> None:
    made.token_ids.extend(tokens)
    hook.observe(plan, StepResult({}, committed={made.request_id: list(tokens)}))


def encode(context: EngineContext, text: str) -> list[int]:
    return context.tokenizer.encode(text, add_special_tokens=False).ids


def decode(context: EngineContext, tokens: set[int]) -> set[str]:
    return {context.tokenizer.decode([token]) for token in tokens}


def test_plain_requests_are_left_alone(hook: GuidedHook) -> None:
    plain = request(None)
    assert hook.admit(plain) is None
    assert plain.ignore_eos
    assert not hook.owns(plain)
    assert hook.masks(plan_of((plain, []))) is None
    assert hook.report(plain) == {}
    assert hook.forced("r") == []
    assert hook.validate("r", [5, 6]) == 2


def test_only_guided_rows_are_masked(hook: GuidedHook, context: EngineContext) -> None:
    draft = encode(context, '{"name":')
    guided = admit(hook, request(Guide.json(PERSON), "g"))
    boolean = admit(hook, request(Guide.json({"type": "boolean"}), "b"))
    plain, cancelled = request(None, "p"), admit(hook, request(Guide.json(PERSON), "c"))
    assert not guided.ignore_eos
    plan = plan_of((plain, [9]), (guided, draft), (cancelled, draft), (boolean, []))
    plan.cancel("c")
    rows, allowed = masks(hook, plan)
    first = len(draft) + 1
    assert rows == [*range(2, 2 + first), 2 + 2 * first]
    assert decode(context, allowed[0]) == {"{", '{"'}
    assert decode(context, allowed[-1]) == {"t", "tr", "tru", "true", "f", "fa", "fal", "fals",
                                            "false"}  # fmt: skip
    for i, token in enumerate(draft):
        assert token in allowed[i]
    assert guided.metrics.mask_seconds > 0 == cancelled.metrics.mask_seconds


def test_the_matcher_follows_committed_tokens_only(
    hook: GuidedHook, context: EngineContext
) -> None:
    """Drafts refused at every index: the masks are those of a request that saw no drafts."""
    document = encode(context, '{"name":"ab","age":12}')
    wrong = encode(context, "x")[0]
    speculated = admit(hook, request(Guide.json(PERSON), "s"))
    reference = admit(hook, request(Guide.json(PERSON), "r"))
    done = 0
    for accepted in [0, 1, 2, 3, 0, 2, 1, 0]:
        rest = document[done:]
        drafts = [*rest[:accepted], wrong, *rest[accepted : accepted + 1]]
        plan = plan_of((speculated, drafts), (reference, []))
        _, allowed = masks(hook, plan)
        assert allowed[0] == allowed[-1]
        assert plan.failures == {}
        commit(hook, plan, speculated, rest[: accepted + 1])
        commit(hook, plan, reference, rest[: accepted + 1])
        done += accepted + 1
    assert done >= len(document) - 1


def test_children_have_matchers_of_their_own(hook: GuidedHook, context: EngineContext) -> None:
    first = admit(hook, request(Guide.json(PERSON), "0"))
    second = admit(hook, request(Guide.json(PERSON), "1"))
    plan = plan_of((first, []), (second, []))
    _, before = masks(hook, plan)
    commit(hook, plan, first, encode(context, "{"))
    _, after = masks(hook, plan)
    assert before[1] == after[1] != after[0]


def test_a_refused_committed_token_fails_that_request_alone(
    hook: GuidedHook, context: EngineContext
) -> None:
    bad = admit(hook, request(Guide.json(PERSON), "bad"))
    good = admit(hook, request(Guide.json(PERSON), "good"))
    plan = plan_of((bad, []), (good, []))
    masks(hook, plan)
    commit(hook, plan, bad, encode(context, "x"))
    assert list(plan.failures) == ["bad"]
    assert "refused" in plan.failures["bad"]
    # The broken matcher stays broken, and is noticed at the next masks too.
    plan = plan_of((bad, []), (good, []))
    _, allowed = masks(hook, plan)
    assert list(plan.failures) == ["bad"]
    assert plan.by_id["bad"].cancelled
    assert len(allowed[0]) > context.vocab_size - 1  # everything: no empty row reaches the sampler
    assert decode(context, allowed[1]) == {"{", '{"'}


@pytest.mark.parametrize("guide", ["text", {"type": "object"}, 3, False])
def test_what_is_no_guide_is_a_value_error(hook: GuidedHook, guide: object) -> None:
    with pytest.raises(ValueError, match="guide must be a Guide"):
        hook.admit(request(guide))


def test_an_engine_without_tokenizer_or_end_cannot_guide(context: EngineContext) -> None:
    for lacking in (
        EngineContext(context.config, context.vocab_size, context.eos_token_ids),
        EngineContext(context.config, context.vocab_size, frozenset(), context.tokenizer),
    ):
        hook = GuidedHook()
        hook.prepare(lacking)
        with pytest.raises(ValueError, match="guide needs"):
            hook.admit(request(Guide.json(True)))
        hook.close()


def test_a_refusal_reaches_the_future_and_then_every_other_user(hook: GuidedHook) -> None:
    guide = Guide.json({"allOf": [{"type": "string"}, {"type": "null"}]})
    first = request(guide, "a")
    future = hook.admit(first)
    assert future is not None
    with pytest.raises(GrammarRefused, match="unsatisfiable") as caught:
        future.result(timeout=20)
    assert caught.value.kind == "unsatisfiable"
    assert hook.report(first)["guide"].error == str(caught.value)
    with pytest.raises(GrammarRefused, match="unsatisfiable"):
        hook.admit(request(guide, "b"))


def test_unenforced_keywords_are_reported_or_refused(
    hook: GuidedHook, context: EngineContext
) -> None:
    schema = {"type": "array", "items": {"enum": [1, 2]}, "uniqueItems": True}
    for text, valid in [("[1,2]", True), ("[1,1]", False)]:
        made = admit(hook, request(Guide.json(schema), text))
        plan = plan_of((made, []))
        commit(hook, plan, made, [*encode(context, text), 2])
        assert plan.failures == {}
        made.finish_reason = "stop"
        report = cast("GuideReport", hook.report(made)["guide"])
        assert (report.backend, report.unenforced) == ("llguidance", ("uniqueItems",))
        assert report.valid is valid
        assert (report.error is None) is valid
    strict = hook.admit(request(Guide.json(schema, on_unenforced="refuse"), "s"))
    assert strict is not None
    with pytest.raises(GrammarRefused, match="uniqueItems") as caught:
        strict.result(timeout=20)
    assert caught.value.kind == "unsupported"


@pytest.mark.parametrize(
    ("schema", "text", "keyword", "valid"),
    [
        ({"type": "string", "format": "date"}, '"2023-02-29"', "format", False),
        ({"type": "string", "format": "date"}, '"2024-02-29"', "format", True),
        ({"type": "integer", "minimum": 2**53 + 1}, str(2**53), "minimum", False),
    ],
)
def test_what_a_strict_grammar_lets_through_is_reported_or_refused(
    hook: GuidedHook, context: EngineContext, schema: Any, text: str, keyword: str, valid: bool
) -> None:
    made = admit(hook, request(Guide.json(schema)))
    commit(hook, plan_of((made, [])), made, [*encode(context, text), 2])
    made.finish_reason = "stop"
    report = cast("GuideReport", hook.report(made)["guide"])
    assert (report.unenforced, report.valid) == ((keyword,), valid)
    strict = hook.admit(request(Guide.json(schema, on_unenforced="refuse"), "s"))
    assert strict is not None
    with pytest.raises(GrammarRefused, match=keyword):
        strict.result(timeout=20)


def test_a_hostile_schema_does_not_stall_the_report(
    hook: GuidedHook, context: EngineContext
) -> None:
    made = admit(hook, request(Guide.json({"not": {"type": "string", "pattern": "^(a+)+$"}})))
    commit(hook, plan_of((made, [])), made, [*encode(context, f'"{"a" * 40}!"'), 2])
    made.finish_reason = "stop"
    start = time.process_time()
    report = cast("GuideReport", hook.report(made)["guide"])
    assert time.process_time() - start < 1
    assert report.valid is True


def test_text_cut_short_is_not_judged(hook: GuidedHook, context: EngineContext) -> None:
    made = admit(hook, request(Guide.json(PERSON)))
    commit(hook, plan_of((made, [])), made, encode(context, '{"name":'))
    made.finish_reason = "length"
    report = cast("GuideReport", hook.report(made)["guide"])
    assert (report.valid, report.error, report.cached) == (None, None, False)
    assert report.compile_seconds > 0


def test_the_cache_shares_compilations_and_is_bounded(context: EngineContext) -> None:
    hook = GuidedHook(cache_bytes=1)
    hook.prepare(context)
    guides = [Guide.json({"const": i}) for i in range(3)]
    for guide in guides:
        hook.compile(guide)[0].result(timeout=20)
    future, cached = hook.compile(guides[-1])
    assert cached
    assert future is hook.compile(guides[-1])[0]
    assert not hook.compile(guides[0])[1]
    hook.close()
    roomy = GuidedHook()
    roomy.prepare(context)
    admit(roomy, request(guides[0], "a"))
    assert roomy.admit(request(guides[0], "b")) is None
    assert [roomy.report(request(None, name))["guide"].cached for name in "ab"] == [False, True]
    roomy.close()


class SlowBackend(LLGuidanceBackend):
    """Compiles schemas that hold "slow" only when it is let go."""

    gate = threading.Event()

    def compile(self, spec: GrammarSpec) -> LLGuidanceCompiled:
        if "slow" in spec.source:
            assert self.gate.wait(20)
        return super().compile(spec)


def test_a_slow_schema_holds_its_own_request_only(context: EngineContext) -> None:
    SlowBackend.gate.clear()
    hook = GuidedHook(backends={"llguidance": SlowBackend})
    hook.prepare(context)
    slow = hook.admit(request(Guide.json({"const": "slow"}), "slow"))
    assert slow is not None
    quick = admit(hook, request(Guide.json(PERSON), "quick"))
    assert not slow.done()
    assert hook.masks(plan_of((quick, []))) is not None
    assert not slow.cancel()  # an abort must not take the compilation from others
    hook.release(request(None, "slow"))
    SlowBackend.gate.set()
    slow.result(timeout=20)
    hook.close()


def test_the_guided_state_for_speculation(hook: GuidedHook, context: EngineContext) -> None:
    made = admit(hook, request(Guide.json(PERSON, max_whitespace=0)))
    assert hook.is_guided("r")
    assert not hook.is_guided("other")
    start = encode(context, '{"name":')
    assert hook.forced("r") == start
    assert hook.forced("r", 2) == start[:2]
    assert hook.validate("r", [*start, *encode(context, '"abcdef')]) == len(start) + 6
    assert hook.validate("r", []) == 0
    assert hook.forced("r") == start  # asking changes nothing
    hook.release(made)
    assert not hook.is_guided("r")


def test_masks_of_many_requests_grow_the_buffer(hook: GuidedHook, context: EngineContext) -> None:
    many = [admit(hook, request(Guide.json(PERSON), str(i))) for i in range(70)]
    rows, allowed = masks(hook, plan_of(*((made, []) for made in many)))
    assert rows == list(range(70))
    assert len({frozenset(row) for row in allowed}) == 1


def test_unknown_device_drafts_fail_their_request(hook: GuidedHook) -> None:
    made: Any = admit(hook, request(Guide.json(PERSON)))
    plan = plan_of((made, [5, 6]))
    plan.entries[0].draft = None
    with pytest.raises(Exception, match="drafts") as caught:
        hook.masks(plan)
    assert json.dumps(caught.value.request_id) == '"r"'  # type: ignore[attr-defined]
