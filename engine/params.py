"""Sampling parameters: what one request asks of the sampler, validated once, at construction.

Names, defaults and meanings are vLLM's where it has them. Every bad value is a ``ValueError`` that
names the field, the value and what is allowed; nothing is silently clamped or ignored. Values that
depend on the model (token ids) are checked by `SamplingParams.validate_for`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any, Literal, cast

LogprobsMode = Literal["raw", "processed"]


def _integer(name: str, value: object, low: int, high: int | None = None, extra: str = "") -> int:
    allowed = f"an integer of {low} or more" if high is None else f"an integer in [{low}, {high}]"
    if (
        isinstance(value, bool)
        or not isinstance(value, Integral)
        or int(value) < low
        or (high is not None and int(value) > high)
    ):
        raise ValueError(f"{name} must be {allowed}{extra}, got {value!r}")
    return int(value)


def _number(name: str, value: object, allowed: str, check: Callable[[float], bool]) -> float:
    if not isinstance(value, bool) and isinstance(value, Real):
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if math.isfinite(number) and check(number):
            return number
    raise ValueError(f"{name} must be {allowed}, got {value!r}")


def _flag(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, got {value!r}")
    return value


def _sequence(name: str, value: object, of_what: str) -> list[object]:
    """A list, tuple, set, range or array; never a string or a mapping."""
    if value is None:
        return []
    if isinstance(value, (str, bytes, Mapping)) or not hasattr(value, "__iter__"):
        raise ValueError(f"{name} must be a list of {of_what}, got {value!r}")
    return list(cast("Sequence[object]", value))


def _token_ids(name: str, value: object) -> tuple[int, ...]:
    found = (_integer(f"{name}[{i}]", v, 0) for i, v in enumerate(_sequence(name, value, "ids")))
    return tuple(dict.fromkeys(found))


def check_encodable(text: str, name: str) -> None:
    """Raise ValueError for half a surrogate pair, which no tokenizer reads."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{name} must hold text that UTF-8 can encode, got {text[error.start]!r} "
            f"(half of a surrogate pair) at index {error.start}"
        ) from None


def _strings(name: str, value: object) -> tuple[str, ...]:
    items = _sequence(name, value, "strings")
    for item in items:
        if not isinstance(item, str) or not item:
            raise ValueError(f"{name} must hold non-empty strings only, got {item!r}")
        check_encodable(item, name)
    return tuple(dict.fromkeys(cast("list[str]", items)))


def _logit_bias(value: object) -> dict[int, float] | None:
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise ValueError(f"logit_bias must map token ids to numbers, got {value!r}")
    result: dict[int, float] = {}
    for key, bias in cast("Mapping[object, object]", value).items():
        # JSON has string keys only.
        token = int(key) if isinstance(key, str) and key.isdecimal() else key
        token = _integer("logit_bias: a token id", token, 0)
        result[token] = _number(f"logit_bias[{token}]", bias, "a finite number", lambda _: True)
    return result or None


@dataclass(frozen=True)
class SamplingParams:
    """How one request's tokens are chosen and where its text ends.

    Attributes:
        temperature: 0 is greedy (argmax; ties go to the lowest id); otherwise logits are divided
            by it.
        top_k: keep the k most probable tokens; 0 or -1 keep all.
        top_p: keep the smallest set of most probable tokens whose mass reaches it, in (0, 1].
        min_p: drop tokens less probable than ``min_p`` times the most probable, in [0, 1].
        seed: 64 bits (negative values are taken modulo 2**64); None derives one from the engine's.
        n: sequences generated for the prompt, each with its own seed.
        max_tokens: most tokens generated; None is up to the context limit.
        min_tokens: stop ids cannot be sampled before this many tokens were generated.
        stop: strings that end the text; read back as a tuple.
        stop_token_ids: token ids that end the text, also under ``ignore_eos``; read as a tuple.
        include_stop_str_in_output: keep the stop string in the text.
        ignore_eos: go on after the model's end-of-sequence tokens.
        skip_special_tokens: leave special tokens out of the text.
        presence_penalty, frequency_penalty: in [-2, 2], subtracted once, or for each occurrence in
            the output.
        repetition_penalty: above 0; positive logits of tokens in prompt or output are divided by
            it, negative ones multiplied.
        logit_bias: token id -> number added to its logit.
        allowed_token_ids: only these can be sampled; read back as a tuple, or None.
        bad_words: texts that must not be generated (see `tokenize_bad_words`).
        logprobs: per generated token, the sampled one and this many most probable; 0 is the
            sampled one alone, -1 the whole vocabulary.
        logprobs_mode: "raw" is the model's own law, "processed" the law sampled from.
        prompt_logprobs: the same for the prompt's tokens; always of the model's own law.
        priority: lower runs earlier.
        guide: opaque to the engine; read by the guided hook.
        speculation: None is as the LLM says, False (or 0) is off, k is the number of drafts, a
            mapping holds settings for the speculative hook.

    Raises:
        ValueError: a value of the wrong type or out of range; names field, value and what is
            allowed.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    n: int = 1
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | None = field(default=None, hash=False)
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = None
    logprobs: int | None = None
    logprobs_mode: LogprobsMode = "raw"
    prompt_logprobs: int | None = None
    priority: int = 0
    guide: Any = field(default=None, hash=False)
    speculation: Literal[False] | int | Mapping[str, Any] | None = field(default=None, hash=False)

    def __post_init__(self) -> None:
        for name, value in (*self._checked_numbers(), *self._checked_collections()):
            object.__setattr__(self, name, value)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens must be at most max_tokens={self.max_tokens}, got {self.min_tokens}"
            )
        if self.logprobs_mode not in ("raw", "processed"):
            raise ValueError(
                f"logprobs_mode must be 'raw' or 'processed', got {self.logprobs_mode!r}"
            )

    def _checked_numbers(self) -> list[tuple[str, object]]:
        found: list[tuple[str, object]] = [
            ("temperature", _number("temperature", self.temperature, "0 or more", lambda v: v >= 0))
        ]
        top_k = _integer("top_k", self.top_k, -1, extra=" (0 or -1 keep every token)")
        found.append(("top_k", max(top_k, 0)))
        found.append(("top_p", _number("top_p", self.top_p, "in (0, 1]", lambda v: 0 < v <= 1)))
        found.append(("min_p", _number("min_p", self.min_p, "in [0, 1]", lambda v: 0 <= v <= 1)))
        for name in ("presence_penalty", "frequency_penalty"):
            value = _number(name, getattr(self, name), "in [-2, 2]", lambda v: -2 <= v <= 2)
            found.append((name, value))
        value = _number("repetition_penalty", self.repetition_penalty, "above 0", lambda v: v > 0)
        found.append(("repetition_penalty", value))
        found.append(("n", _integer("n", self.n, 1)))
        found.append(("min_tokens", _integer("min_tokens", self.min_tokens, 0)))
        found.append(("priority", _integer("priority", self.priority, -(2**63), 2**63 - 1)))
        optional = (
            ("seed", -(2**63), 2**64 - 1, ""),
            ("max_tokens", 1, None, ", or None for the context limit"),
            ("logprobs", -1, None, ", or None (-1 is the whole vocabulary)"),
            ("prompt_logprobs", -1, None, ", or None (-1 is the whole vocabulary)"),
        )
        for name, low, high, extra in optional:
            value = getattr(self, name)
            if value is not None:
                found.append((name, _integer(name, value, low, high, extra)))
        return found

    def _checked_collections(self) -> list[tuple[str, object]]:
        found: list[tuple[str, object]] = [
            (name, _flag(name, getattr(self, name)))
            for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens")
        ]
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        found.append(("stop", _strings("stop", stop)))
        found.append(("stop_token_ids", _token_ids("stop_token_ids", self.stop_token_ids)))
        found.append(("bad_words", _strings("bad_words", self.bad_words)))
        found.append(("logit_bias", _logit_bias(self.logit_bias)))
        if self.allowed_token_ids is not None:
            allowed = _token_ids("allowed_token_ids", self.allowed_token_ids)
            if not allowed:
                raise ValueError("allowed_token_ids must be None or hold at least one id, got []")
            found.append(("allowed_token_ids", allowed))
        found.append(("speculation", self._checked_speculation()))
        return found

    def _checked_speculation(self) -> Literal[False] | int | dict[str, Any] | None:
        value = cast("object", self.speculation)
        if value is None or value is False:
            return value
        if isinstance(value, Mapping):
            settings = dict(cast("Mapping[object, Any]", value))
            if all(isinstance(key, str) for key in settings):
                return cast("dict[str, Any]", settings)
        elif not isinstance(value, bool) and isinstance(value, Integral) and int(value) >= 0:
            return int(value)
        raise ValueError(
            "speculation must be None, False, a number of draft tokens (0 or more) or a mapping "
            f"of settings by name, got {value!r}"
        )

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    def replace(self, **changes: Any) -> SamplingParams:
        """A copy with some fields changed, validated again."""
        known = {spec.name for spec in dataclasses.fields(self)}
        for name in changes:
            if name not in known:
                raise ValueError(f"SamplingParams has no field {name!r}; it has {sorted(known)}")
        return dataclasses.replace(self, **changes)

    def validate_for(self, vocab_size: int) -> None:
        """Check what depends on the model: token ids must be below ``vocab_size``.

        Raises:
            ValueError: names the field and the first id outside the vocabulary.
        """
        ids: dict[str, Sequence[int]] = {
            "stop_token_ids": self.stop_token_ids or (),
            "allowed_token_ids": self.allowed_token_ids or (),
            "logit_bias": tuple(self.logit_bias or ()),
        }
        for name, tokens in ids.items():
            for token in tokens:
                if token >= vocab_size:
                    raise ValueError(
                        f"{name} must hold ids of the model's vocabulary, 0 to {vocab_size - 1}, "
                        f"got {token}"
                    )


def tokenize_bad_words(
    words: Sequence[str] | None, encode: Callable[[str], Sequence[int]]
) -> tuple[tuple[int, ...], ...]:
    """Token sequences that must not be generated, for texts that must not appear.

    Every word is encoded as it would stand at the start of a text and after a space, since most
    vocabularies have different tokens for the two. ``encode`` must add no special tokens. A word
    may still be spelled through another split of its letters; the ban is on these tokens.

    Raises:
        ValueError: a word that encodes to nothing.
    """
    found: dict[tuple[int, ...], None] = {}
    for word in words or ():
        for text in dict.fromkeys((word.lstrip() or word, " " + word.lstrip())):
            ids = tuple(int(token) for token in encode(text))
            if not ids:
                raise ValueError(f"bad_words must hold words with at least one token, got {word!r}")
            found[ids] = None
    return tuple(found)
