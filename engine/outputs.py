"""Results in the shape vLLM users know, built from finished requests; and deltas for streaming.

A `Request` stays the one holder of state. Results are copies taken under the engine's lock, so they
never change after they were handed out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .types import FinishReason, PositionLogprobs, Request, TokenLogprob

if TYPE_CHECKING:
    from .detokenizer import Detokenizer


@dataclass(slots=True)
class OutputMetrics:
    """How a prompt was served, summed over its outputs.

    Times are in seconds. ``time_to_first_token`` counts from arrival, ``time_per_token`` is the
    mean distance of later tokens within an output; both None without such tokens.
    ``num_forwards``: target forwards that sampled; ``num_prompt_forwards``: those that only
    computed prompt tokens. ``num_drafts``: forwards that verified draft tokens.
    ``mask_seconds``: host time spent on grammar masks.
    """

    latency: float = 0.0
    time_to_first_token: float | None = None
    time_per_token: float | None = None
    num_output_tokens: int = 0
    num_forwards: int = 0
    num_prompt_forwards: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    mask_seconds: float = 0.0

    @property
    def acceptance(self) -> float | None:
        """Accepted share of the drafted tokens; None when nothing was drafted."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else None

    @property
    def forwards_per_token(self) -> float | None:
        return self.num_forwards / self.num_output_tokens if self.num_output_tokens else None


@dataclass(slots=True)
class CompletionOutput:
    """One output of a prompt.

    ``logprobs`` has one dictionary (token id -> `TokenLogprob`) for each token when asked for;
    ``cumulative_logprob`` sums those of the chosen tokens. ``finish_reason`` is stop, length,
    abort, error, or None while it runs; ``stop_reason`` is the stop string or stop token id that
    ended it, None for the model's end token; for an error it is the message. ``guide`` and
    ``speculation`` are the reports of these features, None where they were not used.
    """

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[PositionLogprobs] | None = None
    cumulative_logprob: float | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    guide: Any = None
    speculation: Any = None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestOutput:
    """All outputs of one prompt. ``prompt`` is None for a prompt given as token ids."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[PositionLogprobs | None] | None
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int = 0
    metrics: OutputMetrics = field(default_factory=OutputMetrics)

    @property
    def text(self) -> str:
        """Text of the first output."""
        return self.outputs[0].text


@dataclass(slots=True)
class StreamDelta:
    """What became final since the last delta of output ``index``.

    The ``text`` of all deltas joined is the final text: what might yet turn out to be part of a
    stop string, and half a character, is held back, so ``text`` may be empty. ``finished`` marks
    the last delta of this output; ``output`` is the whole result, on the last delta of all.
    """

    text: str
    token_ids: list[int]
    index: int = 0
    finished: bool = False
    finish_reason: FinishReason | None = None
    logprobs: list[PositionLogprobs] | None = None
    output: RequestOutput | None = None


def completion_of(request: Request, detokenizer: Detokenizer | None = None) -> CompletionOutput:
    """A copy of one request's output as it stands; the detokenizer names logprob tokens."""
    wanted = request.params.logprobs is not None
    reports: Mapping[str, Any] = getattr(request, "reports", None) or {}
    finished = request.finish_reason is not None
    return CompletionOutput(
        index=request.index,
        text=_text_of(request, finished),
        token_ids=request.output_token_ids,
        logprobs=_named(request.logprobs, detokenizer) if wanted else None,
        cumulative_logprob=request.cumulative_logprob if wanted else None,
        finish_reason=request.finish_reason,
        stop_reason=request.stop_reason,
        guide=reports.get("guide"),
        speculation=reports.get("speculation"),
    )


def result_of(
    requests: Sequence[Request], prompt: str | None, detokenizer: Detokenizer | None = None
) -> RequestOutput:
    """The result of one prompt from its requests: child 0 first, one for each of ``n``."""
    first = requests[0]
    prompt_logprobs: list[PositionLogprobs | None] | None = None
    if first.params.prompt_logprobs is not None:
        prompt_logprobs = [
            None if position is None else _named([position], detokenizer)[0]
            for position in first.prompt_logprobs
        ]
    return RequestOutput(
        request_id=first.request_id,
        prompt=prompt,
        prompt_token_ids=first.token_ids[: first.num_prompt],
        prompt_logprobs=prompt_logprobs,
        outputs=[completion_of(request, detokenizer) for request in requests],
        finished=all(request.finish_reason is not None for request in requests),
        num_cached_tokens=first.num_cached_tokens,
        metrics=metrics_of(requests),
    )


def metrics_of(requests: Sequence[Request]) -> OutputMetrics:
    """Counts and times of several requests put together."""
    parts = [request.metrics for request in requests]
    arrival = min(part.arrival_time for part in parts)
    firsts = [part.first_token_time for part in parts if part.first_token_time is not None]
    lasts = [part.last_token_time for part in parts if part.last_token_time is not None]
    decoding, gaps = 0.0, 0
    for request, part in zip(requests, parts, strict=True):
        if part.first_token_time is not None and part.last_token_time is not None:
            decoding += part.last_token_time - part.first_token_time
            gaps += max(0, request.num_output - 1)
    return OutputMetrics(
        latency=max(lasts) - arrival if lasts else 0.0,
        time_to_first_token=min(firsts) - arrival if firsts else None,
        time_per_token=decoding / gaps if gaps else None,
        num_output_tokens=sum(request.num_output for request in requests),
        num_forwards=sum(part.num_forwards for part in parts),
        num_prompt_forwards=sum(part.num_prompt_forwards for part in parts),
        num_drafts=sum(part.num_drafts for part in parts),
        num_draft_tokens=sum(part.num_draft_tokens for part in parts),
        num_accepted_tokens=sum(part.num_accepted_tokens for part in parts),
        num_cached_tokens=sum(request.num_cached_tokens for request in requests),
        num_preemptions=sum(part.num_preemptions for part in parts),
        mask_seconds=sum(part.mask_seconds for part in parts),
    )


class DeltaReader:
    """Reads one growing request and says what is new since the last look."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self._shown = 0
        self._tokens = 0
        self._finished = False

    @property
    def has_news(self) -> bool:
        """Whether `read` would return a delta."""
        if self._finished:
            return False
        return self.request.finish_reason is not None or self.request.num_output > self._tokens

    def read(self, detokenizer: Detokenizer | None = None) -> StreamDelta | None:
        """The next delta, or None when nothing was added."""
        if not self.has_news:
            return None
        request, begin = self.request, self._tokens
        self._finished = request.finish_reason is not None
        text = _text_of(request, self._finished)
        delta = StreamDelta(
            text=text[self._shown :],
            token_ids=request.token_ids[request.num_prompt + begin :],
            index=request.index,
            finished=self._finished,
            finish_reason=request.finish_reason,
        )
        if request.params.logprobs is not None:
            delta.logprobs = _named(request.logprobs[begin:], detokenizer)
        self._shown = max(self._shown, len(text))
        self._tokens = request.num_output
        return delta


def _text_of(request: Request, finished: bool) -> str:
    if request.text is None:
        return ""
    return request.text.text if finished else getattr(request.text, "stable_text", "")


def _named(
    positions: Sequence[PositionLogprobs], detokenizer: Detokenizer | None
) -> list[PositionLogprobs]:
    """Copies whose entries carry the text of their token."""
    return [
        {
            token: TokenLogprob(
                entry.logprob,
                entry.rank,
                entry.decoded_token
                if entry.decoded_token is not None or detokenizer is None
                else detokenizer.token_text(token),
            )
            for token, entry in position.items()
        }
        for position in positions
    ]
