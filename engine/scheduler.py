"""Who computes how many tokens in the next step.

There is no prefill and no decode: each running request has tokens that are known and not computed,
plus the drafts a hook wished for, and is granted a part of one token budget. First come, first
served within a priority (lower is served earlier). When blocks run out, drafts go first, then the
last request in that order is preempted: its blocks are freed and it recomputes later.

A step in flight counts at its upper bound (see `types.py`), so the plan of step n + 1 can be made
before the tokens of step n are known.
"""

from __future__ import annotations

import bisect
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from .cache import KVCache
from .config import EngineConfig
from .output import commit_tokens
from .types import Draft, Entry, FinishReason, NewRow, Request, Status, StepPlan, StepResult


@dataclass(slots=True)
class Wishes:
    """Drafts wished for by request id: from the host (written in ``plan``) or on the device."""

    host: Mapping[str, int] = field(default_factory=dict[str, int])
    device: Mapping[str, int] = field(default_factory=dict[str, int])


def _order(request: Request) -> tuple[int, int]:
    return (request.params.priority, request.arrival)


class Scheduler:
    """Owns the queues, the rows and the block tables' host side."""

    def __init__(self, config: EngineConfig, most_device_drafts: int = 0) -> None:
        """``most_device_drafts``: what worker extensions write behind a sampled token."""
        self.config = config
        self.most_device_drafts = most_device_drafts
        self.cache = KVCache(config.num_blocks, config.block_size, config.enable_prefix_caching)
        self.waiting: list[Request] = []  # both lists are kept in serving order
        self.running: list[Request] = []
        self.ended: list[Request] = []  # since the core last looked
        self.cache_seconds = 0.0  # spent in the prefix cache: hashing and matching
        self._free_rows = list(range(config.max_num_seqs - 1, -1, -1))
        self._freed_rows: list[int] = []
        self._num_steps = 0

    # --- requests come and go ---

    def add(self, request: Request) -> None:
        """Queue a request whose ``arrival`` is set."""
        bisect.insort(self.waiting, request, key=_order)

    def finish(
        self, request: Request, reason: FinishReason, stop_reason: int | str | None = None
    ) -> None:
        """End a request now, wherever it is. Its row and blocks may be reused by the next plan: a
        step in flight that still writes to them comes earlier in stream order."""
        if request.finished:
            return
        if request.status is Status.RUNNING:
            self.running.remove(request)
            self._release(request)
        elif request in self.waiting:
            self.waiting.remove(request)
        request.status = Status.FINISHED
        request.finish_reason = reason
        request.stop_reason = stop_reason
        if request.text is not None:
            request.text.flush()
        self.ended.append(request)

    def _release(self, request: Request) -> None:
        self.cache.free(request.request_id)
        self._free_rows.append(request.row)
        self._freed_rows.append(request.row)
        request.row = -1

    def _preempt(self, request: Request, plan: StepPlan) -> None:
        self.running.remove(request)
        self._release(request)
        request.status = Status.WAITING
        request.epoch += 1
        request.num_computed = 0
        request.num_pending = 0
        request.sampled = False
        request.metrics.num_preemptions += 1
        plan.preempted.append(request)
        self.add(request)

    # --- planning ---

    def schedule(self, wishes: Wishes) -> StepPlan:
        """Grant the next step's tokens. The caller lets hooks write drafts, closes the plan, and
        reports it back with `launched`."""
        plan = StepPlan(self._num_steps)
        self._num_steps += 1
        budget = self.config.max_num_batched_tokens
        held = self._parents_to_hold()
        for request in tuple(self.running):
            if budget == 0:
                break
            if request.status is not Status.RUNNING or request.request_id in held:
                continue
            budget -= self._schedule_running(request, wishes, budget, plan)
        if not plan.preempted:
            self._admit_waiting(wishes, budget, plan)
        if plan:  # an empty plan reaches no worker: its extensions would never forget these rows
            plan.freed_rows, self._freed_rows = self._freed_rows, []
        return plan

    def _schedule_running(
        self, request: Request, wishes: Wishes, budget: int, plan: StepPlan
    ) -> int:
        """Grant tokens to a running request, preempting later ones for its blocks."""
        num_tokens, num_draft = self._grant(request, wishes, budget)
        if num_tokens == 0:
            return 0
        first = self.cache.num_blocks(request.request_id)
        request_id, start = request.request_id, request.num_computed
        blocks = self.cache.grow(request_id, start + num_tokens)
        if blocks is None and num_draft:
            num_tokens, num_draft = num_tokens - num_draft, 0
            blocks = self.cache.grow(request_id, start + num_tokens)
        while blocks is None:
            victim = self.running[-1]
            self._preempt(victim, plan)
            if victim is request:
                return 0
            blocks = self.cache.grow(request_id, start + num_tokens)
        if blocks:
            plan.block_writes.append((request.row, first, blocks))
        self._enter(request, num_tokens, num_draft, wishes, plan)
        return num_tokens

    def _grant(self, request: Request, wishes: Wishes, budget: int) -> tuple[int, int]:
        """(tokens, drafts among them) for the next step; (0, 0) sits it out."""
        request_id = request.request_id
        wish = wishes.host.get(request_id, 0)
        # Its last step samples and has not come back: host drafts would be one step late, and a
        # request that surely ends with that step needs no other.
        if request.num_pending and (wish or request.num_output + 1 >= request.max_tokens):
            return 0, 0
        if not wish and request.sampled:
            wish = min(wishes.device.get(request_id, 0), self.most_device_drafts)
        known = request.num_tokens + request.num_pending
        remaining = known - request.num_computed
        if remaining > budget:
            return budget, 0
        left = request.max_tokens - (known - request.num_prompt)
        room = min(budget - remaining, left - 1, self.config.max_num_draft)
        num_draft = max(0, min(wish, room))
        # A step in flight at its upper bound may already reach the context limit.
        if request.num_computed + remaining > self.config.max_model_len:
            return 0, 0
        return remaining + num_draft, num_draft

    def _enter(
        self, request: Request, num_tokens: int, num_draft: int, wishes: Wishes, plan: StepPlan
    ) -> None:
        known = request.num_tokens + request.num_pending
        on_host = wishes.host.get(request.request_id, 0) > 0
        on_device = num_draft > 0 and not on_host
        ahead = request.num_pending > 0
        drafted = on_device and not ahead
        plan.add(
            Entry(
                request=request,
                row=request.row,
                epoch=request.epoch,
                start=request.num_computed,
                num_tokens=num_tokens,
                num_draft=num_draft,
                samples=request.num_computed + num_tokens - num_draft == known,
                ahead=ahead,
                on_device=on_device,
                draft=Draft(request.device_draft[:num_draft]) if drafted else None,
            )
        )

    def _admit_waiting(self, wishes: Wishes, budget: int, plan: StepPlan) -> None:
        """Let waiting requests in, in order, while rows, blocks and budget last."""
        index = 0
        while budget and index < len(self.waiting) and self._free_rows:
            request = self.waiting[index]
            if request.in_flight is not None or self._waits_for_parent(request):
                index += 1
                continue
            copies: list[tuple[int, int]] = []
            if self._can_fork(request):
                admitted = self._fork(request, copies)
            else:
                admitted = self._admit(request, budget)
            if not admitted:
                break
            num_tokens, num_draft = self._grant(request, wishes, budget)
            end = request.num_computed + num_tokens
            if num_draft and self.cache.grow(request.request_id, end) is None:
                num_tokens, num_draft = num_tokens - num_draft, 0
            self.waiting.pop(index)
            self._start(request, plan)
            plan.block_copies += copies
            self._enter(request, num_tokens, num_draft, wishes, plan)
            budget -= num_tokens

    def _admit(self, request: Request, budget: int) -> bool:
        began = time.perf_counter()
        # Prompt logprobs need every position's logits, so nothing of the prompt may be skipped.
        usable = [] if request.params.prompt_logprobs is not None else request.token_ids
        match = self.cache.match(usable)
        self.cache_seconds += time.perf_counter() - began
        end = min(request.num_tokens, match.num_tokens + budget)
        if not self.cache.admit(request.request_id, request.token_ids, end, match):
            return False
        request.num_computed = match.num_tokens
        if request.epoch == 0:
            request.num_cached_tokens = match.num_tokens
        return True

    def _start(self, request: Request, plan: StepPlan) -> None:
        request.status = Status.RUNNING
        request.row = self._free_rows.pop()
        bisect.insort(self.running, request, key=_order)
        if request.metrics.first_scheduled_time is None:
            request.metrics.first_scheduled_time = time.monotonic()
        plan.new_rows.append(NewRow(request, request.row, request.num_computed))
        blocks = self.cache.block_ids(request.request_id)
        plan.block_writes.append((request.row, 0, list(blocks)))

    # --- forks: children of n > 1 share the prompt's blocks ---

    def _is_fresh_child(self, request: Request) -> bool:
        return request.parent is not None and request.num_output == 0 and request.epoch == 0

    def _parents_to_hold(self) -> set[str]:
        """Parents in flight that a child waits for: they sit out a step, because no sequence is
        forked while a step holds it."""
        if not self.config.overlap or not self._free_rows:
            return set()
        return {
            r.parent.request_id
            for r in self.waiting
            if r.parent is not None and self._is_fresh_child(r) and r.parent.in_flight is not None
        }

    def _waits_for_parent(self, request: Request) -> bool:
        parent = request.parent
        if parent is None or not self._is_fresh_child(request) or parent.finished:
            return False
        return parent.in_flight is not None or parent.num_computed < parent.num_prompt

    def _can_fork(self, request: Request) -> bool:
        parent = request.parent
        if parent is None or not self._is_fresh_child(request):
            return False
        shares = request.num_prompt > 1 and request.params.prompt_logprobs is None
        return shares and parent.status is Status.RUNNING

    def _fork(self, request: Request, copies: list[tuple[int, int]]) -> bool:
        """Share all but the last prompt token: its row gives the child's first logits."""
        assert request.parent is not None
        shared = request.num_prompt - 1
        made = self.cache.fork(request.parent.request_id, request.request_id, shared)
        if made is None:
            return False
        if self.cache.grow(request.request_id, request.num_prompt) is None:
            self.cache.free(request.request_id)
            return False
        copies += made
        request.num_computed = shared
        request.num_cached_tokens = shared
        return True

    # --- after the launch, after the result ---

    def launched(self, plan: StepPlan) -> None:
        """The closed plan has been launched: count it at its upper bound."""
        for entry in plan.entries:
            request = entry.request
            request.in_flight = entry
            if request.epoch != entry.epoch or request.finished:
                continue
            request.num_computed += entry.num_tokens
            if entry.samples:
                request.num_pending += entry.num_draft + 1
                request.sampled = True

    def commit(self, plan: StepPlan, result: StepResult) -> None:
        """Bring a result in: append tokens, roll rejected drafts back, hash what is committed."""
        now = time.monotonic()
        for entry in plan.entries:
            request = entry.request
            if request.in_flight is entry:
                request.in_flight = None
            if entry.cancelled or request.finished:
                continue
            output = result.outputs.get(request.request_id)
            current = request.epoch == entry.epoch
            reason = None
            if output is not None:
                if current and entry.samples:
                    request.num_computed -= entry.num_draft - (len(output.tokens) - 1)
                    request.num_pending -= entry.num_draft + 1
                reason = commit_tokens(request, entry, output, result, now)
            else:
                request.metrics.num_prompt_forwards += 1
            if current:
                self._hash(request, entry)
            if reason is not None:
                self.finish(request, *reason)

    def _hash(self, request: Request, entry: Entry) -> None:
        """Hash full blocks of committed, computed tokens; never a draft."""
        began = time.perf_counter()
        computed = request.num_tokens - 1 if entry.samples else entry.start + entry.num_tokens
        self.cache.commit(request.request_id, request.token_ids, computed)
        self.cache_seconds += time.perf_counter() - began
