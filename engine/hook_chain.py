"""Runs the hooks of an engine in list order, and keeps their faults to the requests they own."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import torch

from .hooks import EngineContext, SchedulerHook
from .scheduler import Wishes
from .types import MaskRows, Request, RequestError, StepPlan, StepResult

logger = logging.getLogger("tightrope")


class HookChain:
    """All hooks behind the phases of one engine step."""

    def __init__(self, hooks: Sequence[SchedulerHook], context: EngineContext) -> None:
        self.hooks = list(hooks)
        self.failures: dict[str, str] = {}  # of phases that have no plan; the core takes them
        self._logged: set[tuple[int, str]] = set()
        for hook in self.hooks:
            hook.prepare(context)

    def _log(self, hook: SchedulerHook, phase: str, error: Exception) -> str:
        message = f"{type(hook).__name__}.{phase} failed: {type(error).__name__}: {error}"
        if (id(hook), phase) not in self._logged:
            self._logged.add((id(hook), phase))
            logger.error(message, exc_info=error)
        return message

    def admit(self, request: Request) -> tuple[list[Future[None]], str | None]:
        """Futures to wait for, and the error that fails the request at once.

        A ValueError refuses the request: it propagates, and hooks that had let it in release it.
        """
        futures: list[Future[None]] = []
        for i, hook in enumerate(self.hooks):
            try:
                future = hook.admit(request)
            except ValueError:
                for admitted in futures:
                    admitted.cancel()
                self._release(self.hooks[:i], request)
                raise
            except RequestError as error:
                return futures, str(error)
            except Exception as error:
                message = self._log(hook, "admit", error)
                if hook.owns(request):
                    return futures, message
                continue
            if future is not None:
                futures.append(future)
        return futures, None

    def want(self, requests: Sequence[Request]) -> Wishes:
        """The largest wish for each request, host and device apart."""
        host: dict[str, int] = {}
        device: dict[str, int] = {}
        for hook in self.hooks:
            wishes = host if hook.where == "host" else device
            try:
                for request_id, count in hook.want(requests).items():
                    wishes[request_id] = max(count, wishes.get(request_id, 0))
            except RequestError as error:
                self.failures[error.request_id] = str(error)
            except Exception as error:
                message = self._log(hook, "want", error)
                self.failures |= {r.request_id: message for r in requests if hook.owns(r)}
        return Wishes(host, device)

    def _guard(self, hook: SchedulerHook, phase: str, plan: StepPlan, call: Callable[[], Any]):
        """Run one phase of one hook. A RequestError fails and cancels its request and the phase
        runs again without it; any other exception fails every request the hook owns here."""
        failed: set[str] = set()
        while True:
            try:
                return call()
            except RequestError as error:
                plan.fail(error.request_id, error)
                plan.cancel(error.request_id)
                # Raised again for the same request: the hook cannot serve the others either.
                if error.request_id not in failed and len(failed) <= len(plan.entries):
                    failed.add(error.request_id)
                    continue
                message = self._log(hook, phase, error)
            except Exception as error:
                message = self._log(hook, phase, error)
            for entry in plan.entries:
                if hook.owns(entry.request):
                    plan.fail(entry.request.request_id, message)
                    plan.cancel(entry.request.request_id)
            return None

    def plan(self, plan: StepPlan) -> None:
        """Let hooks write their drafts."""
        for hook in self.hooks:
            self._guard(hook, "plan", plan, lambda hook=hook: hook.plan(plan))

    def masks(self, plan: StepPlan) -> MaskRows | None:
        """All hooks' mask rows, ANDed where they meet."""
        made = [self._guard(h, "masks", plan, lambda h=h: h.masks(plan)) for h in self.hooks]
        masks = [m for m in made if m is not None and m.rows]
        if len(masks) <= 1:
            return masks[0] if masks else None
        rows = sorted({row for mask in masks for row in mask.rows})
        place = {row: i for i, row in enumerate(rows)}
        bitmask = torch.full((len(rows), masks[0].bitmask.shape[1]), -1, dtype=torch.int32)
        for mask in masks:
            bitmask[[place[row] for row in mask.rows]] &= mask.bitmask[: len(mask.rows)]
        return MaskRows(bitmask, rows)

    def observe(self, plan: StepPlan, result: StepResult) -> None:
        """Tell hooks what was committed. It happened once, so no call is repeated."""
        for hook in self.hooks:
            try:
                hook.observe(plan, result)
            except RequestError as error:
                plan.fail(error.request_id, error)
            except Exception as error:
                message = self._log(hook, "observe", error)
                for entry in plan.entries:
                    if hook.owns(entry.request):
                        plan.fail(entry.request.request_id, message)

    def ended(self, request: Request) -> None:
        """Collect the reports of a request that has just ended."""
        for hook in self.hooks:
            try:
                request.reports |= hook.report(request)
            except Exception as error:
                self._log(hook, "report", error)

    def release(self, request: Request) -> None:
        """No step holds the request any more."""
        self._release(self.hooks, request)

    def _release(self, hooks: Sequence[SchedulerHook], request: Request) -> None:
        for hook in hooks:
            try:
                hook.release(request)
            except Exception as error:
                self._log(hook, "release", error)

    def close(self) -> None:
        """Close hooks in reverse order."""
        for hook in reversed(self.hooks):
            hook.close()
