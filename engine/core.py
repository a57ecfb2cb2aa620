"""`EngineCore.step`: the only place where the order of things is written down.

    plan the step              the scheduler grants tokens; hooks write drafts
    launch the forward         everything it needs is on the device already
    commit the step before     its tokens reach the host; stops, hashes, matchers advance
    make the masks             on the host, under the forward
    launch the sampling        head, masks, verification

With ``overlap`` the result of a step is read one step later, under the next forward. Without it the
same text runs with the result awaited at once.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, CancelledError, Future, wait
from dataclasses import dataclass, field

from .config import EngineConfig
from .executor import Executor, PendingResult
from .hook_chain import HookChain
from .hooks import EngineContext, SchedulerHook
from .scheduler import Scheduler
from .types import Draft, FinishReason, Request, StepPlan


@dataclass(slots=True)
class Launched:
    """A step whose tokens have not been read yet."""

    plan: StepPlan
    pending: PendingResult


@dataclass(slots=True)
class StepTimers:
    """Host seconds by phase, summed over steps. On a CPU ``forward`` and ``sample`` hold the
    model's own work; on a device they are launches and ``wait`` is where the device is awaited."""

    schedule: float = 0.0
    plan: float = 0.0
    forward: float = 0.0
    wait: float = 0.0
    commit: float = 0.0
    masks: float = 0.0
    sample: float = 0.0
    num_steps: int = 0


@dataclass(slots=True)
class EngineCounts:
    """Totals since the engine started."""

    requests: int = 0
    finished: dict[str, int] = field(default_factory=dict[str, int])
    preemptions: int = 0
    generated_tokens: int = 0


class EngineCore:
    """The engine's loop. Not thread-safe: one caller at a time (`LLM` holds a lock)."""

    def __init__(
        self,
        config: EngineConfig,
        executor: Executor,
        hooks: Sequence[SchedulerHook],
        context: EngineContext,
    ) -> None:
        self.config = config
        self.executor = executor
        self.hooks = HookChain(hooks, context)
        self.scheduler = Scheduler(config, executor.most_drafts)
        self.vocab_size = context.vocab_size
        self.timers = StepTimers()
        self.counts = EngineCounts()
        self._requests: dict[str, Request] = {}
        self._admitting: dict[str, list[Future[None]]] = {}
        self._previous: Launched | None = None
        self._releasing: list[Request] = []
        self._unreported: list[Request] = []

    # --- requests ---

    def add(self, request: Request) -> None:
        """Queue a request. Raises ValueError, leaving nothing behind, for what can never run."""
        if request.request_id in self._requests:
            raise ValueError(f"request_id {request.request_id!r} is already in the engine")
        if not request.token_ids:
            raise ValueError("prompt must hold at least one token")
        if request.num_prompt > self.config.max_model_len:
            raise ValueError(
                f"prompt has {request.num_prompt} tokens, at most max_model_len="
                f"{self.config.max_model_len} are allowed"
            )
        room = self.config.max_model_len - request.num_prompt
        request.max_tokens = min(request.max_tokens, room)
        futures, error = self.hooks.admit(request)
        request.arrival = self.counts.requests
        self.counts.requests += 1
        self._requests[request.request_id] = request
        if futures:
            self._admitting[request.request_id] = futures
        if error is not None:
            self._finish(request, "error", error)
        elif request.max_tokens == 0:
            self._finish(request, "length")
        elif not futures:
            self.scheduler.add(request)

    def abort(self, request_id: str) -> None:
        """End a request with ``abort``; unknown or ended ids are ignored. Between steps only."""
        request = self._requests.get(request_id)
        if request is not None:
            self._finish(request, "abort")
            # Others may have ended since the last step: the next one reports them.
            self._unreported += [other for other in self._collect_ended() if other is not request]

    def has_unfinished(self) -> bool:
        """Whether another `step` has anything to do."""
        return bool(self._requests or self._unreported) or self._previous is not None

    def _finish(self, request: Request, reason: FinishReason, detail: str | None = None) -> None:
        for future in self._admitting.pop(request.request_id, ()):
            future.cancel()
        self.scheduler.finish(request, reason, detail)
        if self._previous is not None:
            self._previous.plan.cancel(request.request_id)

    # --- one step ---

    def step(self) -> list[Request]:
        """Advance the engine. Returns the requests that got tokens or ended, each once."""
        self._let_in()
        clock = time.perf_counter
        timers, began = self.timers, clock()
        wishes = self.hooks.want(self.scheduler.running)
        self._fail(self.hooks.failures)
        plan = self.scheduler.schedule(wishes)
        scheduled = clock()
        self.hooks.plan(plan)
        plan.close()
        planned = clock()
        flight = self.executor.execute(plan) if plan else None
        self.scheduler.launched(plan)
        executed = clock()
        touched = self._commit_previous(plan)
        committed = clock()
        masks = self.hooks.masks(plan)
        masked = clock()
        if flight is not None:
            self._previous = Launched(plan, self.executor.sample(flight, masks))
        sampled = clock()
        self._fail(plan.failures)
        timers.schedule += scheduled - began
        timers.plan += planned - scheduled
        timers.forward += executed - planned
        timers.masks += masked - committed
        timers.sample += sampled - masked
        timers.num_steps += flight is not None
        if not self.config.overlap:
            touched += self._commit_previous(None)
        self.counts.preemptions += len(plan.preempted)
        touched += self._collect_ended() + self._unreported
        self._unreported = []
        return list(dict.fromkeys(touched))

    def _let_in(self) -> None:
        """Queue requests whose hooks are ready; wait a little when there is nothing else to do."""
        if not self._admitting:
            return
        scheduler = self.scheduler
        if not (scheduler.running or scheduler.waiting or scheduler.ended or self._previous):
            pending = [f for futures in self._admitting.values() for f in futures if not f.done()]
            if pending and all(not all(f.done() for f in fs) for fs in self._admitting.values()):
                wait(pending, timeout=0.05, return_when=FIRST_COMPLETED)
        for request_id, futures in list(self._admitting.items()):
            if not all(future.done() for future in futures):
                continue
            del self._admitting[request_id]
            request = self._requests[request_id]
            error = next((e for e in map(_failure, futures) if e is not None), None)
            if error is None:
                scheduler.add(request)
            else:
                self._finish(request, "error", error)

    def _commit_previous(self, current: StepPlan | None) -> list[Request]:
        """Bring the launched step's tokens in. ``current`` has been launched behind it."""
        launched, self._previous = self._previous, None
        if launched is None:
            return []
        plan = launched.plan
        began = time.perf_counter()
        result = launched.pending.wait()
        waited = time.perf_counter()
        self.scheduler.commit(plan, result)
        self.hooks.observe(plan, result)
        self._fail(plan.failures)
        for request_id, output in result.outputs.items():
            if output.drafts and request_id in self._requests:
                self._requests[request_id].device_draft = output.drafts
        if current is not None:
            self._catch_up(current)
        self.counts.generated_tokens += sum(map(len, result.committed.values()))
        self.timers.wait += waited - began
        self.timers.commit += time.perf_counter() - waited
        return [self._requests[i] for i in result.committed if i in self._requests]

    def _catch_up(self, ahead: StepPlan) -> None:
        """A plan was launched before these tokens were known: discard the rows of requests that
        have ended, tell hooks which drafts the device put into it."""
        for entry in ahead.entries:
            if entry.request.finished:
                entry.cancelled = True
            elif entry.on_device and entry.ahead:
                entry.draft = Draft(entry.request.device_draft[: entry.num_draft])

    def _fail(self, failures: dict[str, str]) -> None:
        for request_id, message in failures.items():
            request = self._requests.get(request_id)
            if request is not None and not request.finished:
                self._finish(request, "error", message)
        failures.clear()

    def _collect_ended(self) -> list[Request]:
        """Report requests that ended, and release those that no step holds any more."""
        ended, self.scheduler.ended = self.scheduler.ended, []
        for request in ended:
            self._requests.pop(request.request_id, None)
            reason = request.finish_reason or "error"
            self.counts.finished[reason] = self.counts.finished.get(reason, 0) + 1
            self.hooks.ended(request)
        still_held: list[Request] = []
        for request in [*self._releasing, *ended]:
            if request.in_flight is None:
                self.hooks.release(request)
            else:
                still_held.append(request)
        self._releasing = still_held
        return ended

    # --- the rest ---

    def stats(self) -> dict[str, float | int | dict[str, int]]:
        """Counters and gauges: requests, tokens, cache, and host seconds by phase."""
        cache = self.scheduler.cache
        return {
            "requests": self.counts.requests,
            "running": len(self.scheduler.running),
            "waiting": len(self.scheduler.waiting) + len(self._admitting),
            "finished": dict(self.counts.finished),
            "generated_tokens": self.counts.generated_tokens,
            "preemptions": self.counts.preemptions,
            "steps": self.timers.num_steps,
            "blocks": self.config.num_blocks,
            "free_blocks": cache.num_free_blocks,
            "prefix_cache_queries": cache.queries,
            "prefix_cache_hits": cache.hits,
            "prefix_cache_seconds": self.scheduler.cache_seconds,
            "schedule_seconds": self.timers.schedule,
            "forward_seconds": self.timers.forward,
            "mask_seconds": self.timers.masks,
            "sample_seconds": self.timers.sample,
            "commit_seconds": self.timers.commit,
            **self.executor.stats(),
        }

    def close(self) -> None:
        """Abort what runs, stop hooks and workers."""
        for request_id in list(self._requests):
            self.abort(request_id)
        self._previous = None
        for request in self._releasing:
            self.hooks.release(request)
        self._releasing = []
        self.hooks.close()
        self.executor.close()


def _failure(future: Future[None]) -> str | None:
    """Why an admission failed, or None."""
    try:
        error = future.exception()
    except CancelledError:
        return "cancelled"
    return None if error is None else str(error) or type(error).__name__
