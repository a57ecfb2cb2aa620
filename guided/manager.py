"""`GuidedHook`: grammars as a hook of the engine.

A request waits outside the batch until its guide is compiled. Then the hook keeps one matcher for
it, on the host, which follows committed tokens and nothing else: drafts are tried and taken back
within one batch call, so refused drafts, preemption and cancelled steps need no bookkeeping. Masks
are made under the forward, into one buffer, by the grammar library's own batch call.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..engine.hooks import EngineContext, SchedulerHook
from ..engine.types import Entry, MaskRows, Request, RequestError, StepPlan, StepResult
from .backends import BACKENDS
from .compiler import Compilation, GuideCompiler
from .guide import Guide, GuideReport
from .protocol import BackendFactory, Bitmask, FillJob, Grammar, GrammarBackend

CACHE_BYTES = 256 << 20


@dataclass(slots=True)
class _Guided:
    """What the hook knows of one request."""

    request: Request
    guide: Guide
    compilation: Future[Compilation]
    cached: bool
    grammar: Grammar | None = None

    def matcher(self) -> Grammar:
        if self.grammar is None:
            self.grammar = self.compilation.result().grammar.start()
        return self.grammar

    @property
    def backend(self) -> GrammarBackend:
        return self.compilation.result().grammar.backend


class GuidedHook(SchedulerHook):
    """Constrains the requests whose ``params.guide`` is a `Guide`. Also the `GuidedState` that
    speculation asks.

    Args:
        backends: backend factories by name, in the order in which "auto" tries them.
        cache_bytes: bound on the estimated size of compiled grammars kept for later requests.
    """

    def __init__(
        self,
        *,
        backends: Mapping[str, BackendFactory] = BACKENDS,
        cache_bytes: int = CACHE_BYTES,
    ) -> None:
        self._factories = backends
        self._cache_bytes = cache_bytes
        self._guided: dict[str, _Guided] = {}
        self._context: EngineContext | None = None
        self._compiler: GuideCompiler | None = None
        self._buffer = torch.empty((0, 0), dtype=torch.int32)

    def prepare(self, engine: EngineContext) -> None:
        self._context = engine
        self._compiler = GuideCompiler(engine, self._factories, self._cache_bytes)

    def owns(self, request: Request) -> bool:
        return request.params.guide is not None

    def compile(self, guide: object) -> tuple[Future[Compilation], bool]:
        """Start compiling a guide ahead of its requests; see `GuideCompiler.compile`.

        Raises ValueError if it is no `Guide` or the engine cannot serve guides.
        """
        if not isinstance(guide, Guide):
            raise ValueError(
                f"guide must be a Guide (Guide.json(...), Guide.json_object()), got {guide!r}"
            )
        if self._context is None or self._compiler is None:
            raise RuntimeError("GuidedHook.prepare was not called")
        if self._context.tokenizer is None:
            raise ValueError("guide needs an engine with a tokenizer")
        if not self._context.eos_token_ids:
            raise ValueError("guide needs a model with an end-of-sequence token")
        return self._compiler.compile(guide)

    def admit(self, request: Request) -> Future[None] | None:
        guide: Any = request.params.guide
        if guide is None:
            return None
        compilation, cached = self.compile(guide)
        if compilation.done():
            compilation.result()  # a known refusal is raised here
        request.ignore_eos = False  # the text ends where the grammar ends
        self._guided[request.request_id] = _Guided(request, guide, compilation, cached)
        if compilation.done():
            return None
        # Its own future: whoever cancels it cannot cancel the compilation that others wait for.
        ready: Future[None] = Future()
        ready.set_running_or_notify_cancel()

        def finish(done: Future[Compilation]) -> None:
            error = None if done.cancelled() else done.exception()
            if done.cancelled():
                ready.set_exception(RuntimeError("the engine was closed"))
            elif error is not None:
                ready.set_exception(error)
            else:
                ready.set_result(None)

        compilation.add_done_callback(finish)
        return ready

    def masks(self, plan: StepPlan) -> MaskRows | None:
        start = time.perf_counter()
        jobs: list[tuple[_Guided, Entry, FillJob]] = []
        rows: list[int] = []
        for entry in plan.sampling():
            state = self._guided.get(entry.request.request_id)
            if state is None:
                continue
            drafts = entry.draft_tokens
            if len(drafts) != entry.num_draft:
                raise RequestError(
                    entry.request.request_id, "guide: drafts on the device are not known here"
                )
            jobs.append((state, entry, (state.matcher(), len(rows), drafts)))
            rows.extend(entry.logits_rows)
        if not jobs:
            return None
        bitmask = self._rows(len(rows))
        self._fill(plan, jobs, bitmask.numpy())
        share = (time.perf_counter() - start) / len(rows)
        for state, entry, _ in jobs:
            state.request.metrics.mask_seconds += share * len(entry.logits_rows)
        return MaskRows(bitmask, rows)

    def _rows(self, count: int) -> torch.Tensor:
        """The first rows of the buffer; the step that read it last is over."""
        if self._context is None:
            raise RuntimeError("GuidedHook.prepare was not called")
        if self._buffer.shape[0] < count:
            size = max(64, 1 << (count - 1).bit_length())
            self._buffer = torch.empty(
                (size, self._context.mask_words),
                dtype=torch.int32,
                pin_memory=torch.cuda.is_available(),
            )
        return self._buffer[:count]

    def _fill(
        self, plan: StepPlan, jobs: Sequence[tuple[_Guided, Entry, FillJob]], bitmask: Bitmask
    ) -> None:
        """One batch call for each backend; a matcher in error fails its request alone."""
        backends = {id(state.backend): state.backend for state, _, _ in jobs}
        for key, backend in backends.items():
            mine = [job for job in jobs if id(job[0].backend) == key]
            counts = backend.fill([job for _, _, job in mine], bitmask)
            for (state, entry, (grammar, _, _)), count in zip(mine, counts, strict=True):
                if count < 0:
                    request_id = state.request.request_id
                    plan.fail(request_id, f"guide: {state.backend.name}: {grammar.error}")
                    entry.cancelled = True

    def observe(self, plan: StepPlan, result: StepResult) -> None:
        for request_id, tokens in result.committed.items():
            state = self._guided.get(request_id)
            if state is None or not tokens or state.request.finished:
                continue
            grammar = state.matcher()
            if not grammar.accept(tokens):
                plan.fail(
                    request_id,
                    f"guide: {state.backend.name} refused a sampled token of {tokens}: "
                    f"{grammar.error or 'token out of range'}",
                )

    def release(self, request: Request) -> None:
        self._guided.pop(request.request_id, None)

    def report(self, request: Request) -> Mapping[str, Any]:
        state = self._guided.get(request.request_id)
        if state is None:
            return {}
        future = state.compilation
        if not future.done() or future.cancelled():
            return {"guide": GuideReport(state.guide.backend, 0.0, state.cached)}
        error = future.exception()
        if error is not None:
            return {"guide": GuideReport(state.guide.backend, 0.0, state.cached, error=str(error))}
        done = future.result()
        unenforced = done.grammar.unenforced
        valid, problem = None, None
        if request.finish_reason == "stop":
            valid, problem = state.guide.validate(self._text(request), unenforced=unenforced)
        return {
            "guide": GuideReport(
                done.grammar.backend.name, done.seconds, state.cached, unenforced, valid, problem
            )
        }

    def _text(self, request: Request) -> str:
        """The finished text without its end token: what the user reads."""
        if isinstance(request.stop_reason, str) and request.text is not None:
            return request.text.text  # cut at a stop string
        tokens = request.output_token_ids
        if tokens and tokens[-1] in request.eos_token_ids:
            tokens = tokens[:-1]
        if self._context is None or self._context.tokenizer is None:
            return ""
        return self._context.tokenizer.decode(tokens, skip_special_tokens=False)

    def is_guided(self, request_id: str) -> bool:
        return request_id in self._guided

    def forced(self, request_id: str, limit: int = 32) -> list[int]:
        state = self._guided.get(request_id)
        return [] if state is None else state.matcher().forced(limit)

    def validate(self, request_id: str, tokens: Sequence[int]) -> int:
        state = self._guided.get(request_id)
        if state is None or not tokens:
            return len(tokens)
        words = 0 if self._context is None else self._context.mask_words
        bitmask = np.empty((len(tokens) + 1, words), np.int32)
        (count,) = state.backend.fill([(state.matcher(), 0, tokens)], bitmask)
        return max(count, 0)

    def close(self) -> None:
        if self._compiler is not None:
            self._compiler.close()
