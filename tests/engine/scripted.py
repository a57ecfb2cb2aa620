"""Scripted requests, hooks and drafts for tests of the whole engine, and the oracle behind them.

The oracle of a greedy request is a loop over ``FakeModel.logits_of`` that knows no engine; that of
a sampled one is a run alone and without drafts. Drafts are made from the oracle: right, wrong or
both. Imported as ``tightrope.tests.engine.scripted``: the root folder is the package.
"""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch

from tightrope.engine.config import EngineConfig
from tightrope.engine.fake import FakeCore, FakeModel, prefix_hash
from tightrope.engine.hooks import Outcome, SchedulerHook, WorkerExtension
from tightrope.engine.params import SamplingParams
from tightrope.engine.types import MaskRows, Request, RequestError, StepPlan, StepResult
from tightrope.engine.worker import Worker

VOCAB = 34  # two mask words, the second almost empty
EOS = frozenset({4})
CONTEXT = 16
DEVICE_DRAFTS = 3
WRONG = 33


@dataclasses.dataclass(frozen=True)
class Spec:
    """What a request's tokens depend on, and nothing else."""

    prompt: tuple[int, ...]
    temperature: float
    seed: int
    max_tokens: int
    min_tokens: int
    stops: tuple[int, ...]
    ignore_eos: bool
    masked: bool

    def request(self, request_id: str, priority: int = 0, **more: Any) -> Request:
        params = SamplingParams(
            temperature=self.temperature,
            min_tokens=self.min_tokens,
            ignore_eos=self.ignore_eos,
            priority=priority,
        )
        return Request(
            request_id,
            self.prompt,
            params,
            seed=self.seed,
            stop_token_ids=frozenset(self.stops),
            eos_token_ids=EOS,
            max_tokens=self.max_tokens,
            **more,
        )


def allowed(prefix: Sequence[int]) -> np.ndarray:
    """The mask rule: a quarter of the tokens is forbidden, others behind every prefix."""
    return (prefix_hash(prefix) * 7 + np.arange(VOCAB) * 13) % 4 != 0


def packed(prefixes: Sequence[Sequence[int]]) -> torch.Tensor:
    bits = np.zeros((len(prefixes), 64), dtype=np.uint8)
    for i, prefix in enumerate(prefixes):
        bits[i, :VOCAB] = allowed(prefix)
    return torch.from_numpy(np.packbits(bits, axis=1, bitorder="little").view(np.int32))


@cache
def oracle(spec: Spec) -> tuple[int, ...]:
    """The request's tokens, alone and plain."""
    room = min(spec.max_tokens, CONTEXT - len(spec.prompt))
    if spec.temperature:
        config = EngineConfig(max_model_len=CONTEXT, num_blocks=1, block_size=CONTEXT)
        core = FakeCore(
            config, vocab_size=VOCAB, hooks=[Masks(Script(random.Random(0), {"alone": spec}))]
        )
        request = spec.request("alone")
        core.add(request)
        while core.has_unfinished():
            core.step()
        return tuple(request.output_token_ids)
    model, tokens = FakeModel(VOCAB), list[int]()
    ends = {*spec.stops, *EOS}
    while len(tokens) < room:
        logits = model.logits_of([*spec.prompt, *tokens])
        if spec.masked:
            logits[torch.from_numpy(~allowed([*spec.prompt, *tokens]))] = -torch.inf
        if len(tokens) < spec.min_tokens:
            logits[list(ends)] = -torch.inf
        tokens.append(int(logits.argmax()))
        if tokens[-1] in spec.stops or (tokens[-1] in EOS and not spec.ignore_eos):
            break
    return tuple(tokens)


def draft(spec: Spec, start: int, count: int, style: int) -> list[int]:
    """Drafts behind ``start`` output tokens: right, wrong, or right up to the second."""
    right = [*oracle(spec)[start : start + count], *[WRONG] * count][:count]
    if style == 0:
        return [token ^ 1 for token in right]
    return right if style > 1 else [*right[:1], *(token ^ 1 for token in right[1:])]


@dataclasses.dataclass
class Script:
    """What the scripted hooks share."""

    rng: random.Random
    specs: dict[str, Spec] = dataclasses.field(default_factory=dict[str, Spec])
    modes: dict[str, str] = dataclasses.field(default_factory=dict[str, str])  # host, device, off
    doomed: set[str] = dataclasses.field(default_factory=set[str])
    events: Counter[str] = dataclasses.field(default_factory=Counter[str])


class Masks(SchedulerHook):
    """Masks by the rule, behind its own record of what was committed."""

    def __init__(self, script: Script) -> None:
        self.specs = script.specs
        self.events = script.events
        self.texts: dict[str, list[int]] = {}

    def admit(self, request: Request) -> None:
        self.texts[request.request_id] = list(request.token_ids)

    def masks(self, plan: StepPlan) -> MaskRows | None:
        rows: list[int] = []
        prefixes: list[list[int]] = []
        for entry in plan.sampling():
            text, drafts = self.texts[entry.request.request_id], entry.draft_tokens
            assert text == entry.request.token_ids
            assert len(drafts) == entry.num_draft, "a hook must know every draft"
            if self.specs[entry.request.request_id].masked:
                rows += entry.logits_rows
                prefixes += [text + drafts[:i] for i in range(len(drafts) + 1)]
                self.events["masked row"] += 1
                self.events["masked draft row"] += entry.num_draft
        return MaskRows(packed(prefixes), rows) if rows else None

    def observe(self, plan: StepPlan, result: StepResult) -> None:
        for request_id, tokens in result.committed.items():
            self.texts[request_id] += tokens

    def release(self, request: Request) -> None:
        assert request.in_flight is None
        assert self.texts.pop(request.request_id) == request.token_ids


class HostDrafts(SchedulerHook):
    """Drafts on the host for the requests of its mode; sometimes more than was granted."""

    mode = "host"

    def __init__(self, script: Script) -> None:
        self.script = script
        self.wishes: dict[str, int] = {}

    def want(self, requests: Sequence[Request]) -> Mapping[str, int]:
        modes, rng = self.script.modes, self.script.rng
        mine = [r.request_id for r in requests if modes[r.request_id] == self.mode]
        self.wishes = {request_id: rng.choice([0, 1, 2, 3, 5]) for request_id in mine}
        return self.wishes

    def plan(self, plan: StepPlan) -> None:
        rng = self.script.rng
        for entry in plan.entries:
            request = entry.request
            if self.wishes.get(request.request_id) and rng.random() < 0.9:
                spec, count = self.script.specs[request.request_id], rng.randint(0, 5)
                tokens = draft(spec, request.num_output, count, rng.randrange(4))
                taken = plan.propose(entry, tokens)
                assert taken == (entry.num_draft > 0 and count > 0)


class DeviceWishes(HostDrafts):
    """Wishes for drafts that `DeviceDrafts` has already written."""

    where = "device"
    mode = "device"

    def want(self, requests: Sequence[Request]) -> Mapping[str, int]:
        wishes = super().want(requests)
        return {request_id: min(k, DEVICE_DRAFTS) for request_id, k in wishes.items()}

    def plan(self, plan: StepPlan) -> None:
        for entry in plan.entries:
            if entry.on_device:
                assert not plan.propose(entry, [1])


class DeviceDrafts(WorkerExtension):
    """Writes drafts behind the committed tokens, which only the device tables know for sure."""

    num_draft = DEVICE_DRAFTS

    def __init__(self, script: Script) -> None:
        self.specs = script.specs
        self.owners: dict[int, str] = {}

    def load(self, worker: Worker) -> None:
        self.state = worker.state

    def launch(self, plan: StepPlan, outcome: Outcome) -> None:
        for entry, row in zip(outcome.entries, outcome.rows_S.tolist(), strict=True):
            request = entry.request
            assert self.owners.setdefault(row, request.request_id) == request.request_id
            length = int(self.state.length[row])
            style = (length * 7 + request.arrival) % 4  # blind to values
            drafts = draft(self.specs[request.request_id], length - request.num_prompt, 3, style)
            self.state.tokens[row, length : length + DEVICE_DRAFTS] = torch.tensor(drafts)

    def forget(self, rows: Sequence[int]) -> None:
        for row in rows:
            self.owners.pop(row, None)


class Faults(SchedulerHook):
    """Fails a request now and then, in any phase, by any means."""

    def __init__(self, script: Script) -> None:
        self.script = script

    def _fail(self, phase: str, plan: StepPlan) -> None:
        rng = self.script.rng
        live = [e.request.request_id for e in plan.entries if not e.cancelled]
        if not live or rng.random() > 0.01:
            return
        request_id = rng.choice(live)
        self.script.doomed.add(request_id)
        if rng.random() < 0.5:
            raise RequestError(request_id, f"fault in {phase}")
        plan.fail(request_id, f"fault in {phase}")

    def want(self, requests: Sequence[Request]) -> Mapping[str, int]:
        if requests and self.script.rng.random() < 0.005:
            self.script.doomed.add(requests[0].request_id)
            raise RequestError(requests[0].request_id, "fault in want")
        return {}

    def plan(self, plan: StepPlan) -> None:
        self._fail("plan", plan)

    def masks(self, plan: StepPlan) -> MaskRows | None:
        self._fail("masks", plan)

    def observe(self, plan: StepPlan, result: StepResult) -> None:
        self._fail("observe", plan)
