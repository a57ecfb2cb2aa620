"""From a step's sampled tokens to a request's text: where generation ends.

Accepted tokens are walked one at a time, so a stop inside an accepted run ends ids, text, logprobs
and counts at the same token as plain decoding would.
"""

from __future__ import annotations

from .types import Entry, FinishReason, Request, StepResult, TokenResult

Ending = tuple[FinishReason, int | str | None]


def commit_tokens(
    request: Request, entry: Entry, output: TokenResult, result: StepResult, now: float
) -> Ending | None:
    """Append an entry's tokens to its request. Returns (finish_reason, stop_reason) at the end."""
    if request.params.prompt_logprobs is not None and not request.prompt_logprobs:
        request.prompt_logprobs.append(None)  # position 0 has no logprob
    if output.prompt_logprobs is not None:
        _add_prompt_logprobs(request, entry, output)
    if not entry.samples:
        request.metrics.num_prompt_forwards += 1
        return None
    kept: list[int] = []
    ending = None
    # An empty row sampled nothing, but the drafts accepted before it are text and may end it.
    tokens = output.tokens[:-1] if output.error else output.tokens
    for i, token in enumerate(tokens):
        request.token_ids.append(token)
        kept.append(token)
        if output.logprobs is not None:
            request.logprobs.append(output.logprobs[i])
            request.cumulative_logprob += output.logprobs[i][token].logprob
        ending = _ending(request, token)
        if ending is not None:
            break
    if output.error and ending is None:
        ending = "error", _empty_message(request)
    result.committed[request.request_id] = kept
    _count(request, entry, len(kept), len(output.tokens) - 1, now)
    return ending


def _ending(request: Request, token: int) -> Ending | None:
    params = request.params
    is_eos = token in request.eos_token_ids and not request.ignore_eos
    if is_eos or token in request.stop_token_ids:
        if request.text is not None and params.include_stop_str_in_output:
            request.text.push(token, check_stop=False)
        return "stop", (None if is_eos else token)
    if request.text is not None:
        stop = request.text.push(token, check_stop=request.num_output >= params.min_tokens)
        if stop is not None:
            return "stop", stop
    if request.num_output >= request.max_tokens:
        return "length", None
    return None


def _count(request: Request, entry: Entry, kept: int, accepted: int, now: float) -> None:
    metrics = request.metrics
    metrics.num_forwards += 1
    if entry.num_draft:
        metrics.num_drafts += 1
        metrics.num_draft_tokens += entry.num_draft
        metrics.num_accepted_tokens += min(accepted, kept)
    if not kept:
        return
    if metrics.first_token_time is None:
        metrics.first_token_time = now
    metrics.last_token_time = now


def _add_prompt_logprobs(request: Request, entry: Entry, output: TokenResult) -> None:
    """After a preemption the same positions come again."""
    assert output.prompt_logprobs is not None
    already = len(request.prompt_logprobs) - 1 - entry.start
    request.prompt_logprobs += output.prompt_logprobs[max(0, already) :]


def _empty_message(request: Request) -> str:
    """Hard rules left no token: name the rules that this request has."""
    params = request.params
    rules: list[str] = []
    if params.guide is not None:
        rules.append("the grammar (guide)")
    if params.allowed_token_ids is not None:
        rules.append("allowed_token_ids")
    if request.bad_words_token_ids:
        rules.append("bad_words")
    if params.min_tokens > request.num_output:
        rules.append("min_tokens")
    named = " and ".join(rules) if rules else "the masks of the hooks"
    return f"no token is left to sample under {named}"
