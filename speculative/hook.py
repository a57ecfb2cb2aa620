"""`SpeculativeHook`: who proposes, and how many.

Drafts are made in ``want``, when every committed token is known, so that the scheduler grants only
what will be used; ``plan`` writes them in, cut to the grant. A request whose last step is still in
flight is not asked: its drafts would continue a text that is one step old.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..engine.hooks import EngineContext, SchedulerHook
from ..engine.types import Draft, Request, StepPlan, StepResult
from ..guided.protocol import GuidedState
from .config import SpeculationConfig, request_draft_length
from .proposers import make_proposers
from .protocol import Proposer, View


@dataclass(frozen=True)
class SpeculationReport:
    """How speculation went for one request; ``CompletionOutput.speculation``.

    ``num_drafts``: target forwards that verified drafts; ``num_draft_tokens``: tokens they
    verified; ``num_accepted_tokens``: of these, how many were kept.
    """

    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int

    @property
    def acceptance(self) -> float | None:
        """Accepted share of the draft tokens in [0, 1]; None without drafts."""
        if not self.num_draft_tokens:
            return None
        return self.num_accepted_tokens / self.num_draft_tokens


class SpeculativeHook(SchedulerHook):
    """Writes the drafts of proposers into the plan. The first proposer with tokens wins, request
    by request.

    Args:
        speculation: whatever `SpeculationConfig.parse` reads; here it must name a proposer.
        guided: the guided hook, so that drafts obey the grammar and forced tokens are known.
    """

    where = "host"

    def __init__(self, speculation: object, *, guided: GuidedState | None = None) -> None:
        config = SpeculationConfig.parse(speculation)
        if config is None:
            raise ValueError("speculation must name at least one proposer")
        self.config = config
        self.proposers: list[Proposer] = make_proposers(config.proposers, config.options)
        for proposer in self.proposers:
            names = ("propose", "worth_waiting", "observe", "release")
            missing = [name for name in names if not hasattr(proposer, name)]
            if missing:
                raise ValueError(
                    f"speculation: {type(proposer).__name__} lacks {', '.join(missing)}; "
                    "subclass tightrope.speculative.Proposer"
                )
            if getattr(proposer, "where", "host") != "host":
                raise ValueError(
                    f"speculation: {type(proposer).__name__} drafts on the device; this hook "
                    "takes proposers with where='host'"
                )
        self._guided = guided
        self._limit = config.num_speculative_tokens
        self._vocab_size = 0
        self._lengths: dict[str, int] = {}
        # Drafts by request id, with the length of the text that they continue.
        self._drafts: dict[str, tuple[int, list[int]]] = {}

    def prepare(self, engine: EngineContext) -> None:
        self._vocab_size = engine.vocab_size
        self._limit = engine.config.max_num_draft

    def owns(self, request: Request) -> bool:
        return self._lengths.get(request.request_id, 0) > 0

    def admit(self, request: Request) -> None:
        length = request_draft_length(
            request.params.speculation, self.config.num_speculative_tokens
        )
        self._lengths[request.request_id] = min(length, self._limit)

    def _budget(self, request: Request) -> int:
        """Most useful drafts: one token is always sampled after the last accepted one."""
        length = self._lengths.get(request.request_id, 0)
        return min(length, request.max_tokens - request.num_output - 1)

    def want(self, requests: Sequence[Request]) -> Mapping[str, int]:
        self._drafts = {}
        budget: dict[str, int] = {}
        asked: list[Request] = []
        late: list[Request] = []
        for request in requests:
            length = self._budget(request)
            if length <= 0:
                continue
            flight = request.in_flight
            if flight is not None and flight.samples and not flight.cancelled:
                late.append(request)
            else:
                budget[request.request_id] = length
                asked.append(request)
        self._propose(asked, budget)
        wishes = {request_id: len(tokens) for request_id, (_, tokens) in self._drafts.items()}
        if late:
            view = View(late, self._guided)
            for proposer in self.proposers:
                wishes |= dict.fromkeys(proposer.worth_waiting(view), 1)
        return wishes

    def _propose(self, asked: list[Request], budget: Mapping[str, int]) -> None:
        for proposer in self.proposers:
            if not asked:
                break
            drafts = proposer.propose(View(asked, self._guided), budget)
            for request in asked:
                draft = drafts.get(request.request_id)
                tokens = self._usable(proposer, request, draft, budget)
                if tokens:
                    self._drafts[request.request_id] = (request.num_tokens, tokens)
            asked = [r for r in asked if r.request_id not in self._drafts]

    def _usable(
        self,
        proposer: Proposer,
        request: Request,
        draft: Draft | None,
        budget: Mapping[str, int],
    ) -> list[int]:
        if draft is None:
            return []
        request_id = request.request_id
        tokens = list(draft.tokens[: budget[request_id]])
        if tokens and not (min(tokens) >= 0 and max(tokens) < self._vocab_size):
            raise ValueError(
                f"{type(proposer).__name__} drafted {tokens} for {request_id!r}; token ids must "
                f"be in [0, {self._vocab_size - 1}]"
            )
        if self._guided is not None and not getattr(proposer, "obeys_grammar", False):
            tokens = tokens[: self._guided.validate(request_id, tokens)]
        return tokens

    def plan(self, plan: StepPlan) -> None:
        for entry in plan.entries:
            known = self._drafts.get(entry.request.request_id)
            # A text that has grown since (or shrunk to nothing by preemption) needs new drafts.
            if known is not None and entry.samples and known[0] == entry.request.num_tokens:
                plan.propose(entry, known[1])

    def observe(self, plan: StepPlan, result: StepResult) -> None:
        grown = [
            plan.by_id[request_id].request
            for request_id, tokens in result.committed.items()
            if tokens and request_id in plan.by_id
        ]
        if not grown:
            return
        view = View(grown, self._guided)
        for proposer in self.proposers:
            proposer.observe(view)

    def release(self, request: Request) -> None:
        self._lengths.pop(request.request_id, None)
        self._drafts.pop(request.request_id, None)
        for proposer in self.proposers:
            proposer.release(request.request_id)

    def report(self, request: Request) -> Mapping[str, Any]:
        if not self.owns(request):
            return {}
        metrics = request.metrics
        return {
            "speculation": SpeculationReport(
                metrics.num_drafts, metrics.num_draft_tokens, metrics.num_accepted_tokens
            )
        }
