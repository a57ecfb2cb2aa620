"""A state machine over the whole engine: whatever happens, each request gets its plain tokens.

A state machine drives a `FakeCore`, whose tokens are a hash of what the paged KV cache really
holds, against the oracle of `scripted`. It compares host, device tables and KV slots after every
step and counts the hard events it reached.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from typing import Any, ClassVar

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tightrope.engine.config import EngineConfig
from tightrope.engine.fake import FakeCore
from tightrope.engine.hooks import SchedulerHook
from tightrope.engine.noise import derive_seed
from tightrope.engine.types import Entry, MaskRows, Request, StepPlan, StepResult
from tightrope.tests.engine.scripted import (
    CONTEXT,
    EOS,
    VOCAB,
    DeviceDrafts,
    DeviceWishes,
    Faults,
    HostDrafts,
    Masks,
    Script,
    Spec,
    oracle,
)

HARD_EVENTS = (
    "preemption",
    "preemption in flight",
    "chunked prompt",
    "abort while waiting",
    "abort while running",
    "abort in flight",
    "draft accepted",
    "draft partly accepted",
    "draft rejected",
    "rejection across a block boundary",
    "prefix hit",
    "fork sharing full blocks",
    "fork copying a partial block",
    "launched ahead",
    "discarded result of an ended request",
    "host drafts sat out a step",
    "stop inside an accepted run",
    "masked row",
    "masked draft row",
    "priority overtaking",
    "failed request",
    "device drafts accepted ahead",
)


def fail_loudly(hook: SchedulerHook, phase: str, error: Exception) -> str:
    raise error


class Recorder(SchedulerHook):
    """Checks every plan and counts what happens. Runs first, so it sees grants before drafts."""

    def __init__(self, machine: EngineMachine) -> None:
        self.machine = machine
        self.events = machine.script.events
        self.grants: dict[str, tuple[int, int]] = {}
        self.released: Counter[str] = Counter()

    def plan(self, plan: StepPlan) -> None:
        self.grants = {e.request.request_id: (e.num_tokens, e.num_draft) for e in plan.entries}
        assert len({entry.row for entry in plan.entries}) == len(plan.entries)
        assert plan.num_tokens <= self.machine.config.max_num_batched_tokens
        for request in plan.preempted:
            self.events["preemption"] += 1
            self.events["preemption in flight"] += request.in_flight is not None
        for new in plan.new_rows:
            self.events["prefix hit"] += new.num_computed > 0 and new.request.parent is None
            self.events["priority overtaking"] += any(
                other.arrival < new.request.arrival
                and other.params.priority > new.request.params.priority
                for other in self.machine.core.scheduler.waiting
            )
        for request in self.machine.core.scheduler.running:
            wished = self.machine.host.wishes.get(request.request_id, 0)
            if wished and request.num_pending and request.request_id not in plan.by_id:
                self.events["host drafts sat out a step"] += 1

    def masks(self, plan: StepPlan) -> MaskRows | None:
        for entry in plan.entries:
            request_id = entry.request.request_id
            num_tokens, num_draft = self.grants[request_id]
            assert entry.num_draft <= num_draft
            assert entry.num_tokens - entry.num_draft == num_tokens - num_draft
            assert entry.start + entry.num_tokens <= CONTEXT
            assert not self.released[request_id]
            assert entry.cancelled or not entry.request.finished
            self.events["chunked prompt"] += not entry.samples
            self.events["launched ahead"] += entry.ahead
        return None

    def observe(self, plan: StepPlan, result: StepResult) -> None:
        for entry in plan.entries:
            request_id = entry.request.request_id
            assert not self.released[request_id]
            kept = result.committed.get(request_id)
            if kept is not None:
                self._count_drafts(entry, kept, len(result.outputs[request_id].tokens) - 1)
            elif entry.samples and entry.cancelled and entry.request.finished:
                self.events["discarded result of an ended request"] += 1

    def _count_drafts(self, entry: Entry, kept: list[int], accepted: int) -> None:
        events, size = self.events, self.machine.config.block_size
        events["stop inside an accepted run"] += len(kept) <= accepted
        if not entry.num_draft:
            return
        if accepted == entry.num_draft:
            events["draft accepted"] += 1
        else:
            events["draft partly accepted" if accepted else "draft rejected"] += 1
            before = entry.request.num_tokens - len(kept)
            last, written = before + accepted - 1, before + entry.num_draft - 1
            events["rejection across a block boundary"] += written // size > last // size
        if entry.ahead and entry.on_device:
            events["device drafts accepted ahead"] += accepted > 0

    def release(self, request: Request) -> None:
        self.released[request.request_id] += 1


class EngineMachine(RuleBasedStateMachine):
    events: ClassVar[Counter[str]] = Counter()

    @initialize(seed=st.integers(0, 1 << 30))
    def start(self, seed: int) -> None:
        # Drawn evenly: hypothesis likes small, repeated values, under which little happens.
        rng = random.Random(seed)
        block_size = rng.randint(1, 4)
        self.config = EngineConfig(
            max_model_len=CONTEXT,
            num_blocks=-(-CONTEXT // block_size) + rng.randint(0, 4),
            max_num_seqs=rng.randint(1, 4),
            max_num_batched_tokens=rng.randint(1, 12),
            block_size=block_size,
            enable_prefix_caching=rng.random() < 0.7,
            max_num_draft=4,
            overlap=rng.random() < 0.5,
        )
        self.masked = rng.random() < 0.5
        self.modes = [
            *rng.choice((["host"], ["device"], ["device"], ["host", "device"], [])),
            "off",
        ]
        self.script = Script(rng, events=self.events)
        self.host = HostDrafts(self.script)
        self.recorder = Recorder(self)
        hooks = [self.recorder, Masks(self.script), self.host, DeviceWishes(self.script)]
        extensions = [DeviceDrafts(self.script)] if "device" in self.modes else []
        self.core = FakeCore(
            self.config,
            vocab_size=VOCAB,
            eos_token_ids=EOS,
            hooks=[*hooks, Faults(self.script)],
            extensions=extensions,
        )
        self.core.hooks._log = fail_loudly  # pyright: ignore[reportPrivateUsage]
        self.state = self.core.worker.state
        cache = self.core.scheduler.cache
        fork = cache.fork

        def counted(parent_id: str, child_id: str, num_tokens: int) -> list[tuple[int, int]] | None:
            copies = fork(parent_id, child_id, num_tokens)
            if copies is not None:
                self.events["fork sharing full blocks"] += num_tokens >= block_size
                self.events["fork copying a partial block"] += bool(copies)
            return copies

        cache.fork = counted
        self.requests: dict[str, Request] = {}
        self.ended: dict[str, list[int]] = {}

    @precondition(lambda self: len(self.requests) - len(self.ended) < 9)
    @rule(
        prompt=st.lists(st.sampled_from([1, 1, 1, 2]), min_size=1, max_size=9).map(tuple),
        temperature=st.sampled_from([0.0, 1.0]),
        seed=st.integers(0, 3),
        max_tokens=st.integers(1, 12),
        min_tokens=st.sampled_from([0, 0, 3]),
        stops=st.sampled_from([(6, 9, 12, 15, 20, 22, 25), (7, 11)]),
        ignore_eos=st.booleans(),
        priority=st.sampled_from([0, 0, 1, -1]),
        n=st.sampled_from([1, 1, 2, 3]),
        then=st.integers(0, 4),
    )
    def add(
        self, n: int, then: int, priority: int, seed: int, min_tokens: int, **values: Any
    ) -> None:
        parent = None
        for index in range(n):
            request_id = f"r{len(self.requests)}"
            spec = Spec(
                seed=derive_seed(seed, index),
                min_tokens=min(min_tokens, values["max_tokens"]),
                masked=self.masked and bool(self.script.rng.randrange(4)),
                **values,
            )
            self.script.specs[request_id] = spec
            self.script.modes[request_id] = self.script.rng.choice(self.modes)
            request = spec.request(request_id, priority, parent=parent, index=index)
            parent = parent or request
            self.requests[request_id] = request
            self.core.add(request)
        self.advance(then)

    @precondition(lambda self: self.core.has_unfinished())
    @rule(count=st.integers(1, 6))
    def steps(self, count: int) -> None:
        self.advance(count)

    def advance(self, count: int) -> None:
        for _ in range(count):
            for request in self.core.step():
                if request.finished:
                    self.check_ended(request)
            self.check_tables()

    @precondition(lambda self: len(self.requests) - len(self.ended) > 2)
    @rule(number=st.integers(0, 20), delay=st.integers(0, 3), anywhere=st.booleans())
    def abort(self, number: int, delay: int, anywhere: bool) -> None:
        self.advance(delay)
        live = [r for name, r in self.requests.items() if name not in self.ended]
        running = self.core.scheduler.running
        live = live if anywhere or not running else running
        if not live:
            return
        request = live[number % len(live)]
        in_flight = request.in_flight is not None
        self.events[f"abort while {request.status.value}"] += not in_flight
        self.events["abort in flight"] += in_flight
        self.core.abort(request.request_id)
        assert request.finish_reason == "abort"
        self.check_ended(request)
        self.check_tables()

    @rule()
    def drain(self) -> None:
        for _ in range(1000):
            if not self.core.has_unfinished():
                break
            self.advance(1)
        assert not self.core.has_unfinished(), "livelock"
        scheduler = self.core.scheduler
        assert not scheduler.running
        assert not scheduler.waiting
        free_rows = scheduler._free_rows  # pyright: ignore[reportPrivateUsage]
        assert sorted(free_rows) == list(range(self.config.max_num_seqs))
        assert scheduler.cache.num_free_blocks == self.config.num_blocks
        assert self.ended.keys() == self.requests.keys()
        assert self.recorder.released == dict.fromkeys(self.requests, 1)
        for request_id, tokens in self.ended.items():
            assert self.requests[request_id].output_token_ids == tokens

    def check_ended(self, request: Request) -> None:
        assert request.request_id not in self.ended, "reported twice"
        tokens = self.ended[request.request_id] = request.output_token_ids
        spec = self.script.specs[request.request_id]
        expected = list(oracle(spec))
        if request.finish_reason in ("stop", "length"):
            assert tokens == expected
            eos = tokens[-1] in EOS and not spec.ignore_eos
            stopped = eos or tokens[-1] in spec.stops
            assert request.finish_reason == ("stop" if stopped else "length")
            assert request.stop_reason == (tokens[-1] if stopped and not eos else None)
            return
        assert tokens == expected[: len(tokens)]
        if request.finish_reason == "error":
            assert request.request_id in self.script.doomed
            assert str(request.stop_reason).startswith("fault in")
            self.events["failed request"] += 1

    def check_tables(self) -> None:
        """Host, device tables and KV slots agree about what is committed and computed."""
        scheduler, size = self.core.scheduler, self.config.block_size
        scheduler.cache.check_integrity({r.request_id: r.token_ids for r in scheduler.running})
        used = {request.row for request in scheduler.running}
        assert len(used) == len(scheduler.running) <= self.config.max_num_seqs
        slots = self.core.attention.slots.tolist()
        for request in scheduler.running:
            length, computed = (
                int(self.state.length[request.row]),
                int(self.state.computed[request.row]),
            )
            tokens = self.state.tokens[request.row, :length].tolist()
            assert tokens[: request.num_tokens] == request.token_ids
            if request.in_flight is None:
                assert (length, computed) == (request.num_tokens, request.num_computed)
            blocks = scheduler.cache.block_ids(request.request_id)
            assert self.state.block_table[request.row, : len(blocks)].tolist() == blocks
            kv = [slots[blocks[p // size] * size + p % size] for p in range(computed)]
            assert kv == tokens[:computed]

    def teardown(self) -> None:
        if hasattr(self, "core"):
            self.drain()


def explore(max_examples: int, steps: int, phases: Sequence[Phase]) -> Counter[str]:
    """Run the machine with fresh counters; its first failure is raised as it is."""
    counter: Counter[str] = Counter()
    machine = type("CountingMachine", (EngineMachine,), {"events": counter})
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
