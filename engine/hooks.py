"""The two halves through which features enter the engine.

A `SchedulerHook` lives beside the scheduler, on the host: it may hold requests back, wish for
drafts, write them into a plan, mask logits rows and watch what was committed. A `WorkerExtension`
lives beside the model, on the device: it may keep tensors of its own and draft after every sample.

Order within a step (see `core.EngineCore.step`): ``want``, ``plan``, *the forward is launched*,
``observe`` of the step before, ``masks``, *sampling is launched*. Hooks run in list order in each
phase.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch

from .config import EngineConfig
from .types import Entry, MaskRows, Request, StepPlan, StepResult

if TYPE_CHECKING:
    from .worker import Worker


@dataclass(frozen=True)
class EngineContext:
    """What a hook may know about the engine it serves.

    ``tokenizer`` is a ``tokenizers.Tokenizer`` or None (an engine driven with token ids alone).
    ``mask_words`` = ceil(vocab_size / 32); ``vocab_size`` counts the rows of the model's head.
    """

    config: EngineConfig
    vocab_size: int
    eos_token_ids: frozenset[int]
    tokenizer: Any = None

    @property
    def mask_words(self) -> int:
        return (self.vocab_size + 31) // 32


class SchedulerHook:
    """Host half of a feature. Subclass it and override what you need; every default does nothing.

    Raising `RequestError` (or calling ``plan.fail``) fails one request. Any other exception fails
    the requests that the hook owns in that plan, is logged once, and the engine goes on.
    """

    where: Literal["host", "device"] = "host"
    """Where the drafts come from. Rows that expect ``host`` drafts are never launched ahead."""

    def prepare(self, engine: EngineContext) -> None:
        """Called once, before the first request."""

    def owns(self, request: Request) -> bool:
        """Whether a failure of this hook must fail the request."""
        return True

    def admit(self, request: Request) -> Future[None] | None:
        """A request has arrived. While the returned future runs it waits outside the batch; its
        exception fails the request."""
        return None

    def want(self, requests: Sequence[Request]) -> Mapping[str, int]:
        """Draft tokens wished for, by request id. Called before scheduling, with every running
        request; a request whose last step is still in flight may be among them."""
        return {}

    def plan(self, plan: StepPlan) -> None:
        """Write drafts with ``plan.propose``; an entry's ``num_draft`` is its grant."""

    def masks(self, plan: StepPlan) -> MaskRows | None:
        """Masks for this plan's logits rows; runs under the forward. Skip cancelled entries."""
        return None

    def observe(self, plan: StepPlan, result: StepResult) -> None:
        """A step was committed. ``result.committed[request_id]`` are its new tokens.

        Fail one request with ``plan.fail``: the call is never repeated, so raising leaves the
        requests behind it unobserved."""

    def release(self, request: Request) -> None:
        """The request has ended and no step holds it any more."""

    def report(self, request: Request) -> Mapping[str, Any]:
        """Facts for the request's result, by field of CompletionOutput (``guide``,
        ``speculation``). Called once when it ends, before ``release``."""
        return {}

    def close(self) -> None:
        """The engine is closing: stop threads and processes."""


@dataclass
class Outcome:
    """What a step sampled, still on the device. S = sampling entries, in plan order.

    ``rows_S``: int64 state rows; ``num_accepted_S``: int64 accepted drafts;
    ``hidden_RD``: final hidden states of the R logits rows; ``first_row_S``: int64, each entry's
    first logits row, so ``hidden_RD[first_row_S + num_accepted_S]`` predicted the newest token.
    The state tables already hold the new tokens and lengths.
    """

    entries: list[Entry]
    rows_S: torch.Tensor
    first_row_S: torch.Tensor
    num_accepted_S: torch.Tensor
    hidden_RD: torch.Tensor


class WorkerExtension:
    """Device half of a feature, built in every worker. Every default does nothing."""

    num_draft: int = 0
    """Tokens it writes for each sampled row after every launch."""

    def load(self, worker: Worker) -> None:
        """Load weights, allocate tables. ``worker`` gives the model, the state and the config."""

    def launch(self, plan: StepPlan, outcome: Outcome) -> None:
        """Draft the next tokens: write ``state.tokens[row, length : length + num_draft]`` for every
        sampled row. Must not wait for the device."""

    def forget(self, rows: Sequence[int]) -> None:
        """These state rows no longer belong to their requests."""
