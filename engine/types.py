"""What one engine step is made of: requests, the plan of a step, and its result.

Everything is a token count. A plan grants every request a number of tokens; prompt chunks, decoding
and the verification of drafts differ only in that number. Two facts shape these types:

* The plan of step n + 1 may be made before the tokens of step n have reached the host. So a
  request's ``num_computed`` counts a step in flight at its upper bound (every draft accepted) and
  is corrected when the result is committed. Exact lengths live in the device tables (`state.py`).
* Only committed tokens are in ``Request.token_ids``; drafts live in the plan's entries.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch

if TYPE_CHECKING:
    from .params import SamplingParams

FinishReason = Literal["stop", "length", "abort", "error"]


class RequestError(Exception):
    """Fails one request and nobody else. Raised by hooks; the message reaches the user."""

    def __init__(self, request_id: str, message: str) -> None:
        super().__init__(message)
        self.request_id = request_id


class Status(Enum):
    """Where a request stands."""

    WAITING = "waiting"  # outside the batch: newly added, preempted, or waiting for a hook
    RUNNING = "running"  # owns a row and blocks
    FINISHED = "finished"


@dataclass(slots=True)
class TokenLogprob:
    """One entry of a logprobs dictionary: natural logarithm, 1-based rank, text of the token."""

    logprob: float
    rank: int
    decoded_token: str | None = None


# One position: token id -> its logprob. The sampled token is always among them.
PositionLogprobs = dict[int, TokenLogprob]


class TextStream(Protocol):
    """Turns tokens into text one at a time and watches for stop strings (`detokenizer.py`)."""

    text: str

    def push(self, token: int, *, check_stop: bool) -> str | None:
        """Append a token. Return the stop string that it completed, cutting ``text`` there."""
        ...

    def flush(self) -> None:
        """The request has ended: emit what was held back for an unfinished character."""
        ...


@dataclass(slots=True)
class RequestMetrics:
    """Times are ``time.monotonic`` seconds of this process; counts are of tokens or forwards."""

    arrival_time: float = field(default_factory=time.monotonic)
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None
    num_forwards: int = 0  # target forwards that this request took part in and that sampled
    num_prompt_forwards: int = 0  # forwards that only computed prompt tokens
    num_drafts: int = 0  # forwards that verified at least one draft token
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_preemptions: int = 0
    mask_seconds: float = 0.0

    @property
    def time_to_first_token(self) -> float | None:
        return None if self.first_token_time is None else self.first_token_time - self.arrival_time


class Request:
    """Host state of one sequence. ``n > 1`` makes one Request for each child.

    ``num_computed`` and ``num_pending`` are upper bounds while a step that holds the request is in
    flight (``in_flight``), exact otherwise.
    """

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        seed: int,
        stop_token_ids: frozenset[int] = frozenset(),
        eos_token_ids: frozenset[int] = frozenset(),
        text: TextStream | None = None,
        parent: Request | None = None,
        index: int = 0,
        max_tokens: int = 1 << 30,
        bad_words_token_ids: tuple[tuple[int, ...], ...] = (),
    ) -> None:
        self.request_id = request_id
        self.params = params
        self.seed = seed  # unsigned 64 bits: the key of every random number of this request
        self.token_ids = list(prompt_token_ids)
        self.num_prompt = len(self.token_ids)
        self.max_tokens = max_tokens  # EngineCore.add cuts it to what the context leaves
        self.stop_token_ids = stop_token_ids  # params.stop_token_ids: end the text always
        self.eos_token_ids = eos_token_ids  # of the model: end the text unless ignore_eos
        self.ignore_eos = params.ignore_eos  # a hook's admit may clear it (a grammar ends at EOS)
        self.bad_words_token_ids = bad_words_token_ids
        self.text = text
        self.parent = parent  # for n > 1: child 0, whose prompt blocks are shared
        self.index = index
        self.arrival = 0  # order of arrival, set by the scheduler
        self.status = Status.WAITING
        self.row = -1
        self.epoch = 0  # grows at every preemption: a result of an older epoch touches no counter
        self.num_computed = 0
        self.num_pending = 0
        self.in_flight: Entry | None = None
        self.device_draft: list[int] = []  # what worker extensions drafted after the last sample
        self.sampled = False  # on its present row: a worker extension may have drafted for it
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.num_cached_tokens = 0
        self.logprobs: list[PositionLogprobs] = []
        self.prompt_logprobs: list[PositionLogprobs | None] = []
        self.reports: dict[str, Any] = {}  # what hooks tell about it once it has ended
        self.cumulative_logprob = 0.0
        self.metrics = RequestMetrics()

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output(self) -> int:
        return len(self.token_ids) - self.num_prompt

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt :]

    @property
    def finished(self) -> bool:
        return self.status is Status.FINISHED

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id!r}, {self.status.value}, prompt={self.num_prompt}, "
            f"output={self.num_output}, computed={self.num_computed})"
        )


@dataclass(slots=True)
class Draft:
    """Proposed next tokens, in order. Verified one-hot: a token is kept where sampling agrees."""

    tokens: list[int]


@dataclass(slots=True, eq=False)
class Entry:
    """One request's share of a step.

    The forward computes ``num_tokens`` rows: known tokens first, then ``num_draft`` drafts. If
    ``samples``, the last ``num_draft + 1`` of them get logits rows ``first_logits_row ...``.
    """

    request: Request
    row: int
    epoch: int
    start: int  # position of the first row: exact, or an upper bound when ``ahead``
    num_tokens: int
    num_draft: int
    samples: bool
    ahead: bool = False  # launched while the step before is still in flight
    on_device: bool = False  # the drafts are already in the device's token table
    draft: Draft | None = None
    cancelled: bool = False
    first_logits_row: int = -1

    @property
    def draft_tokens(self) -> list[int]:
        """The drafts verified by this step, as far as the host knows them."""
        return [] if self.draft is None else self.draft.tokens

    @property
    def logits_rows(self) -> range:
        """Rows of the step's logits: row i follows the committed tokens and i drafts."""
        count = self.num_draft + 1 if self.samples else 0
        return range(self.first_logits_row, self.first_logits_row + count)


@dataclass(slots=True, eq=False)
class NewRow:
    """A request that enters the device tables with this step: everything is written anew."""

    request: Request
    row: int
    num_computed: int


@dataclass(slots=True, eq=False)
class StepPlan:
    """One step, from scheduling to its result. Hooks read it, and write drafts and failures."""

    step: int
    entries: list[Entry] = field(default_factory=list["Entry"])
    new_rows: list[NewRow] = field(default_factory=list["NewRow"])
    # (row, index of the first block, block ids): appended to the device's block table
    block_writes: list[tuple[int, int, list[int]]] = field(
        default_factory=list[tuple[int, int, list[int]]]
    )
    block_copies: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    freed_rows: list[int] = field(default_factory=list[int])
    preempted: list[Request] = field(default_factory=list["Request"])
    failures: dict[str, str] = field(default_factory=dict[str, str])
    num_logits_rows: int = 0
    closed: bool = False
    by_id: dict[str, Entry] = field(default_factory=dict[str, Entry])

    def add(self, entry: Entry) -> None:
        self.entries.append(entry)
        self.by_id[entry.request.request_id] = entry

    def __bool__(self) -> bool:
        return bool(self.entries)

    @property
    def num_tokens(self) -> int:
        return sum(entry.num_tokens for entry in self.entries)

    def sampling(self) -> Iterator[Entry]:
        """Entries whose tokens will be used: they sample and nobody has cancelled them."""
        return (entry for entry in self.entries if entry.samples and not entry.cancelled)

    def propose(self, entry: Entry, tokens: Sequence[int]) -> bool:
        """Write host drafts for one entry, cut to its grant. The first proposer with tokens wins.

        Returns whether the drafts were taken. May only be called from ``SchedulerHook.plan``.
        """
        if self.closed:
            raise RuntimeError("drafts can only be written in SchedulerHook.plan")
        if not tokens or entry.draft is not None or entry.on_device or not entry.num_draft:
            return False
        entry.draft = Draft(list(tokens[: entry.num_draft]))
        return True

    def fail(self, request_id: str, error: str | Exception) -> None:
        """Finish one request with ``error``; the engine applies it at the next safe moment."""
        self.failures.setdefault(request_id, str(error))

    def cancel(self, request_id: str) -> None:
        """The request has ended or was preempted: its row is computed, its result discarded."""
        entry = self.by_id.get(request_id)
        if entry is not None:
            entry.cancelled = True

    def close(self) -> None:
        """Drafts are final: give back what was granted and not used, number the logits rows."""
        for entry in self.entries:
            if not entry.on_device:
                used = len(entry.draft.tokens) if entry.draft is not None else 0
                entry.num_tokens -= entry.num_draft - used
                entry.num_draft = used
            if entry.samples:
                entry.first_logits_row = self.num_logits_rows
                self.num_logits_rows += entry.num_draft + 1
        self.closed = True


@dataclass(slots=True)
class MaskRows:
    """Packed token masks for some logits rows of a step.

    ``bitmask``: int32 ``[N, ceil(vocab / 32)]``, bit i of word j allows token ``32 j + i`` (the
    layout of xgrammar and llguidance). ``rows``: the N logits rows they belong to, strictly
    increasing. Rows that are not listed allow every token. Rows of several hooks are ANDed.
    """

    bitmask: torch.Tensor
    rows: list[int]


@dataclass(slots=True)
class TokenResult:
    """What a step produced for one entry.

    ``tokens``: accepted drafts, then one sampled token. ``error``: no token was left to sample.
    ``drafts``: what the worker extensions drafted for the next step.
    """

    tokens: list[int]
    logprobs: list[PositionLogprobs] | None = None
    prompt_logprobs: list[PositionLogprobs] | None = None
    drafts: list[int] = field(default_factory=list[int])
    error: bool = False


@dataclass(slots=True)
class StepResult:
    """Results keyed by request id; entries that did not sample are absent unless they carry
    prompt logprobs. ``committed`` is filled by the scheduler: the tokens of each request that
    became part of its text in this step (after cutting at a stop)."""

    outputs: dict[str, TokenResult]
    committed: dict[str, list[int]] = field(default_factory=dict[str, list[int]])
