"""Hooks inside the engine: order of phases, admission, masks, and faults that stay local."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import pytest
import torch

from tightrope.engine.config import EngineConfig
from tightrope.engine.executor import PendingResult
from tightrope.engine.fake import FakeCore, FakeModel
from tightrope.engine.hooks import SchedulerHook
from tightrope.engine.params import SamplingParams
from tightrope.engine.runner import Flight
from tightrope.engine.types import MaskRows, Request, RequestError, StepPlan, StepResult
from tightrope.tests.engine.scripted import EOS, VOCAB, Masks, Script, Spec, oracle

PROMPTS = {"r0": (1, 2, 3), "r1": (2, 2), "r2": (3, 1, 1, 2)}


def make_core(hooks: Sequence[SchedulerHook], **values: Any) -> FakeCore:
    config = EngineConfig(max_model_len=16, num_blocks=16, block_size=4, **values)
    return FakeCore(config, vocab_size=VOCAB, eos_token_ids=EOS, hooks=hooks)


def make_script(masked: bool = True) -> Script:
    specs = {
        name: Spec(prompt, 0.0, 0, 8, 0, (), ignore_eos=True, masked=masked)
        for name, prompt in PROMPTS.items()
    }
    return Script(random.Random(0), specs)


def add_all(core: FakeCore, script: Script) -> dict[str, Request]:
    requests = {name: spec.request(name) for name, spec in script.specs.items()}
    for request in requests.values():
        core.add(request)
    return requests


def drain(core: FakeCore) -> list[Request]:
    ended: list[Request] = []
    for _ in range(200):
        if not core.has_unfinished():
            return ended
        ended += [request for request in core.step() if request.finished]
    raise AssertionError("the engine does not come to an end")


def assert_plain(script: Script, requests: Mapping[str, Request], *names: str) -> None:
    for name in names:
        assert requests[name].finish_reason == "length"
        assert requests[name].output_token_ids == list(oracle(script.specs[name]))


class Breaking(SchedulerHook):
    """Raises in one phase, from its third call on, as long as ``r1`` is there."""

    def __init__(self, phase: str, error: Callable[[], Exception]) -> None:
        self.phase, self.error = phase, error
        self.calls = 0
        self.released: list[str] = []

    def owns(self, request: Request) -> bool:
        return request.request_id == "r1"

    def _break(self, phase: str, request_ids: Sequence[str]) -> None:
        if phase == self.phase and "r1" in request_ids:
            self.calls += 1
            if self.calls > 2 or phase == "admit":
                raise self.error()

    def admit(self, request: Request) -> None:
        self._break("admit", [request.request_id])

    def want(self, requests: Sequence[Request]) -> Mapping[str, int]:
        self._break("want", [request.request_id for request in requests])
        return {}

    def plan(self, plan: StepPlan) -> None:
        self._break("plan", [e.request.request_id for e in plan.sampling()])

    def masks(self, plan: StepPlan) -> MaskRows | None:
        self._break("masks", [e.request.request_id for e in plan.sampling()])
        return None

    def observe(self, plan: StepPlan, result: StepResult) -> None:
        self._break("observe", list(result.committed))

    def release(self, request: Request) -> None:
        self.released.append(request.request_id)


PHASES = ["admit", "want", "plan", "masks", "observe"]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("phase", PHASES)
def test_a_request_error_fails_one_request(phase: str, overlap: bool) -> None:
    script = make_script()
    hook = Breaking(phase, lambda: RequestError("r1", "no such luck"))
    hooks = [hook, Masks(script)] if phase == "observe" else [Masks(script), hook]
    core = make_core(hooks, overlap=overlap)
    requests = add_all(core, script)
    ended = drain(core)
    assert len(ended) == 3
    assert sorted(hook.released) == ["r0", "r1", "r2"]
    failed = requests["r1"]
    assert (failed.finish_reason, failed.stop_reason) == ("error", "no such luck")
    tokens = failed.output_token_ids
    assert tokens == list(oracle(script.specs["r1"]))[: len(tokens)]
    assert len(tokens) < 8
    assert_plain(script, requests, "r0", "r2")
    assert core.stats()["finished"] == {"error": 1, "length": 2}


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("phase", PHASES)
def test_any_other_exception_fails_what_the_hook_owns_and_is_logged_once(
    phase: str, overlap: bool, caplog: pytest.LogCaptureFixture
) -> None:
    script = make_script()
    hook = Breaking(phase, lambda: ZeroDivisionError("oh"))
    core = make_core([Masks(script), hook], overlap=overlap)
    with caplog.at_level(logging.ERROR, "tightrope"):
        requests = add_all(core, script)
        drain(core)
        hook.calls = 0
        again = script.specs["r1"].request("r1")
        core.add(again)
        drain(core)
    message = f"Breaking.{phase} failed: ZeroDivisionError: oh"
    assert (requests["r1"].finish_reason, requests["r1"].stop_reason) == ("error", message)
    assert (again.finish_reason, again.stop_reason) == ("error", message)
    assert [record.getMessage() for record in caplog.records] == [message]
    assert_plain(script, requests, "r0", "r2")


def test_a_hook_that_cannot_mask_fails_its_requests_and_samples_none_unmasked() -> None:
    class Stubborn(Masks):
        def masks(self, plan: StepPlan) -> MaskRows | None:
            if any(entry.request.num_output > 2 for entry in plan.entries):
                raise RequestError("r1", "still there")  # although it was cancelled
            return super().masks(plan)

    script = make_script()
    core = make_core([Stubborn(script)])
    requests = add_all(core, script)
    drain(core)
    for name, request in requests.items():
        assert request.finish_reason == "error"
        assert request.output_token_ids == list(oracle(script.specs[name]))[:3]


class Admitting(SchedulerHook):
    """Holds ``r1`` back until its future is done."""

    def __init__(self) -> None:
        self.future: Future[None] = Future()
        self.released: list[str] = []

    def admit(self, request: Request) -> Future[None] | None:
        return self.future if request.request_id == "r1" else None

    def release(self, request: Request) -> None:
        self.released.append(request.request_id)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_request_waits_for_its_admission_and_nobody_waits_with_it(overlap: bool) -> None:
    script, hook = make_script(), Admitting()
    core = make_core([Masks(script), hook], overlap=overlap)
    requests = add_all(core, script)
    for _ in range(15):
        core.step()
    assert_plain(script, requests, "r0", "r2")
    assert (requests["r1"].num_output, requests["r1"].finished) == (0, False)
    assert core.has_unfinished()
    assert core.stats()["waiting"] == 1
    hook.future.set_result(None)
    drain(core)
    assert_plain(script, requests, "r1")


def test_a_failed_admission_fails_the_request() -> None:
    script, hook = make_script(), Admitting()
    core = make_core([Masks(script), hook])
    requests = add_all(core, script)
    hook.future.set_exception(ValueError("unsatisfiable"))
    assert requests["r1"] in core.step()
    assert (requests["r1"].finish_reason, requests["r1"].stop_reason) == ("error", "unsatisfiable")
    assert hook.released == ["r1"]
    drain(core)
    assert_plain(script, requests, "r0", "r2")


def test_an_abort_cancels_the_admission() -> None:
    script, hook = make_script(), Admitting()
    core = make_core([Masks(script), hook])
    requests = add_all(core, script)
    core.abort("r1")
    assert hook.future.cancelled()
    assert (requests["r1"].finish_reason, hook.released) == ("abort", ["r1"])
    drain(core)
    assert_plain(script, requests, "r0", "r2")


def test_a_refused_request_leaves_nothing_in_the_hooks_before() -> None:
    class Refusing(SchedulerHook):
        def admit(self, request: Request) -> None:
            raise ValueError("not this one")

    script, hook = make_script(), Admitting()
    core = make_core([hook, Refusing()])
    with pytest.raises(ValueError, match="not this one"):
        core.add(script.specs["r1"].request("r1"))
    assert hook.future.cancelled()
    assert hook.released == ["r1"]
    assert not core.has_unfinished()


class Permitting(SchedulerHook):
    """Permits fixed tokens in every row behind the first ``skip`` output tokens."""

    def __init__(self, tokens: Sequence[int], skip: int = 0) -> None:
        self.tokens, self.skip = tokens, skip

    def masks(self, plan: StepPlan) -> MaskRows | None:
        rows = [
            row
            for entry in plan.sampling()
            for i, row in enumerate(entry.logits_rows)
            if entry.request.num_output + i >= self.skip
        ]
        words = [0, 0]
        for token in self.tokens:
            words[token // 32] |= 1 << token % 32
        return (
            MaskRows(torch.tensor([words] * len(rows), dtype=torch.int32), rows) if rows else None
        )


def test_masks_of_two_hooks_are_anded_row_by_row() -> None:
    script = make_script(masked=False)
    low, few = Permitting([*range(20), 32, 33], skip=1), Permitting([3, 5, 6, 21, 22, 33], skip=3)
    core = make_core([few, low])
    requests = add_all(core, script)
    drain(core)
    model = FakeModel(VOCAB)
    for request in requests.values():
        permitted = [set(range(VOCAB)), set(low.tokens), set(low.tokens) & set(few.tokens)]
        for i, token in enumerate(request.output_token_ids):
            logits = model.logits_of(request.token_ids[: request.num_prompt + i])
            choice = permitted[0 if i < 1 else 1 if i < 3 else 2]
            assert token == max(choice, key=lambda t: float(logits[t]))
        assert request.num_output == 8


def test_an_empty_row_names_the_rules_that_left_nothing() -> None:
    core = make_core([Permitting([1, 2], skip=2)])
    alone = Request("a", [1], SamplingParams(temperature=0), seed=0)
    params = SamplingParams(temperature=0, allowed_token_ids=[5, 6], min_tokens=4, guide="a guide")
    both = Request("b", [1], params, seed=0)
    last = Request("c", [1], SamplingParams(temperature=1.0, allowed_token_ids=[2, 7]), seed=0)
    last.max_tokens = 5
    for request in (alone, both, last):
        core.add(request)
    drain(core)
    assert (alone.finish_reason, both.finish_reason) == ("length", "error")
    assert both.stop_reason == (
        "no token is left to sample under the grammar (guide) and allowed_token_ids and min_tokens"
    )
    assert both.num_output == 2
    assert last.finish_reason == "length"
    assert last.output_token_ids[2:] == [2, 2, 2]


@pytest.mark.parametrize("ends", [False, True])
def test_drafts_accepted_before_an_empty_row_are_text(ends: bool) -> None:
    class Drafting(Permitting):
        def want(self, requests: Sequence[Request]) -> Mapping[str, int]:
            return {request.request_id: 2 for request in requests}

        def plan(self, plan: StepPlan) -> None:
            for entry in plan.entries:
                plan.propose(entry, expected[1:])

    model, prompt = FakeModel(VOCAB), [1, 2, 3]
    expected: list[int] = []
    for _ in range(3):
        expected.append(int(model.logits_of(prompt + expected).argmax()))
    core = make_core([Drafting([], skip=3)])  # the fourth token has no choice
    stop = frozenset(expected[2:]) if ends else frozenset[int]()
    request = Request("a", prompt, SamplingParams(temperature=0), seed=0, stop_token_ids=stop)
    core.add(request)
    drain(core)
    assert request.output_token_ids == expected
    assert request.finish_reason == ("stop" if ends else "error")
    assert request.metrics.num_forwards == 2
    assert request.metrics.num_accepted_tokens == 2


class Logging(SchedulerHook):
    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def want(self, requests: Sequence[Request]) -> Mapping[str, int]:
        self.log.append(f"{self.name}.want")
        return {}

    def plan(self, plan: StepPlan) -> None:
        self.log.append(f"{self.name}.plan {plan.step}")

    def masks(self, plan: StepPlan) -> MaskRows | None:
        self.log.append(f"{self.name}.masks {plan.step}")
        return None

    def observe(self, plan: StepPlan, result: StepResult) -> None:
        self.log.append(f"{self.name}.observe {plan.step}")


def make_logged(overlap: bool, monkeypatch: pytest.MonkeyPatch) -> tuple[FakeCore, list[str]]:
    log: list[str] = []
    core = make_core([Logging("a", log), Logging("b", log)], overlap=overlap)
    execute, sample = core.executor.execute, core.executor.sample

    def logged_execute(plan: StepPlan) -> Flight:
        log.append(f"execute {plan.step}")
        return execute(plan)

    def logged_sample(flight: Flight, masks: MaskRows | None) -> PendingResult:
        log.append(f"sample {flight.plan.step}")
        return sample(flight, masks)

    monkeypatch.setattr(core.executor, "execute", logged_execute)
    monkeypatch.setattr(core.executor, "sample", logged_sample)
    core.add(Request("r", [1, 2], SamplingParams(), seed=0))
    return core, log


def both(phase: str) -> list[str]:
    name, _, step = phase.partition(" ")
    return [f"{hook}.{name} {step}".rstrip() for hook in "ab"]


def test_phases_of_an_overlapped_step(monkeypatch: pytest.MonkeyPatch) -> None:
    core, log = make_logged(True, monkeypatch)
    core.step()
    begun = [*both("want"), *both("plan 0"), "execute 0", *both("masks 0"), "sample 0"]
    assert log == begun
    log.clear()
    core.step()
    launched = [*both("want"), *both("plan 1"), "execute 1"]
    assert log == [*launched, *both("observe 0"), *both("masks 1"), "sample 1"]


def test_phases_of_a_synchronous_step(monkeypatch: pytest.MonkeyPatch) -> None:
    core, log = make_logged(False, monkeypatch)
    core.step()
    begun = [*both("want"), *both("plan 0"), "execute 0", *both("masks 0"), "sample 0"]
    assert log == [*begun, *both("observe 0")]
