"""Validating finished text, in bounded time.

The verdict is made inside the engine's step, for schemas that strangers write. So nothing here may
stall: patterns run on llguidance's automata, which do not backtrack, comparisons are linear, and
jsonschema, whose references can multiply without end, meets a deadline at every keyword. Where the
deadline or a limit is met the verdict is None, never False.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from datetime import date
from fractions import Fraction
from functools import lru_cache
from typing import Any, cast

from jsonschema import FormatChecker, ValidationError, exceptions
from jsonschema.validators import Draft202012Validator, extend, validator_for
from jsonschema_specifications import REGISTRY
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

SECONDS = 0.5  # for one text; a sound one of thousands of tokens takes some milliseconds

_DATE = re.compile(r"([0-9]{4}-[0-9]{2}-[0-9]{2})[Tt]")
_TIME = re.compile(
    r"([01][0-9]|2[0-3]):([0-5][0-9]):([0-5][0-9]|60)(?:\.[0-9]+)?"
    r"(?:[Zz]|([+-])([01][0-9]|2[0-3]):([0-5][0-9]))"
)
_deadline: ContextVar[float] = ContextVar("deadline")
_lock = threading.Lock()


class _NotJsonError(ValueError):
    """What Python's parser lets through and JSON, or its readers, do not."""


class _GaveUpError(Exception):
    """The text cannot be judged; the message says why."""


def validate(source: str, text: str, *, formats: bool = False) -> tuple[bool | None, str | None]:
    """Whether ``text`` is strict JSON (no repeated keys, no NaN) that fits the schema.

    Returns (verdict, what is wrong). The verdict is None where none can be had: a pattern that
    llguidance does not read, a text nested too deeply, a number too long for Python, or more than
    `SECONDS` of work. ``formats``: also check the formats that jsonschema can check.
    """
    try:
        document = json.loads(text, object_pairs_hook=_no_repeats, parse_constant=_no_constant)
    except (json.JSONDecodeError, _NotJsonError) as error:
        return False, f"not valid JSON: {error}"
    except (ValueError, RecursionError) as error:
        return None, f"could not be validated: {type(error).__name__}: {short(error)}"
    token = _deadline.set(time.monotonic() + SECONDS)
    try:
        found = exceptions.best_match(_validator(source, formats).iter_errors(document))
        problem = None if found is None else f"{found.json_path}: {short(found.message, 300)}"
    except _GaveUpError as error:
        return None, f"could not be validated: {error}"
    except Exception as error:  # a validator's own failure must not fail the request
        return None, f"could not be validated: {type(error).__name__}: {short(error)}"
    finally:
        _deadline.reset(token)
    return problem is None, problem


def validator_class(schema: Mapping[str, Any]) -> Any:
    """jsonschema's validator for the draft that the schema names."""
    return validator_for(schema, default=Draft202012Validator)


def short(value: object, limit: int = 80) -> str:
    """A value for a message, cut."""
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _no_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = dict(pairs)
    if len(names) != len(pairs):
        seen: set[str] = set()
        repeated = next(k for k, _ in pairs if k in seen or seen.add(k))
        raise _NotJsonError(f"repeated key {repeated!r}")
    return names


def _no_constant(name: str) -> Any:
    raise _NotJsonError(f"{name} is not JSON")


@lru_cache(maxsize=64)
def _validator(source: str, formats: bool) -> Any:
    if '"unevaluatedProperties"' in source and '"patternProperties"' in source:
        # jsonschema looks for evaluated names with Python's matcher, which backtracks.
        raise _GaveUpError("unevaluatedProperties beside patternProperties")
    schema = json.loads(source)
    kind = _bounded(validator_class(schema))
    checker = FormatChecker(())
    checker.checkers = {"date-time": (_is_date_time, ValueError), "time": (_is_time, ValueError)}
    checker.checkers = {**kind.FORMAT_CHECKER.checkers, **checker.checkers}
    # The registry holds the published meta-schemas and never fetches anything.
    return kind(schema, registry=REGISTRY, format_checker=checker if formats else None)


def _is_date_time(value: object) -> bool:
    if not isinstance(value, str):
        return True
    found = _DATE.match(value)
    return bool(found and date.fromisoformat(found[1])) and _is_time(value[11:])


def _is_time(value: object) -> bool:
    """RFC 3339: with an offset, and with a leap second only before midnight in UTC."""
    if not isinstance(value, str):
        return True
    found = _TIME.fullmatch(value)
    if found is None:
        return False
    hour, minute, second, sign, off_hour, off_minute = found.groups()
    offset = int(f"{sign or ''}1") * (int(off_hour or 0) * 60 + int(off_minute or 0))
    return second != "60" or (int(hour) * 60 + int(minute) - offset) % 1440 == 1439


@lru_cache
def _bounded(kind: Any) -> Any:
    """The validator class with the deadline at every step and without unbounded checks."""

    def is_boolean(checker: Any, value: object) -> bool:
        # The search for evaluated properties recurses past the keywords, but asks this.
        _check_time()
        return isinstance(value, bool)

    checks = {name: _timed(_OWN.get(name, check)) for name, check in kind.VALIDATORS.items()}
    return extend(kind, checks, type_checker=kind.TYPE_CHECKER.redefine("boolean", is_boolean))


def _timed(check: Callable[..., Any]) -> Callable[..., Any]:
    def keyword(validator: Any, value: Any, instance: Any, schema: Any) -> Any:
        _check_time()
        return check(validator, value, instance, schema)

    return keyword


def _check_time() -> None:
    if time.monotonic() > _deadline.get():
        raise _GaveUpError(f"not done in {SECONDS} seconds")


@lru_cache(maxsize=1)
def _byte_tokenizer() -> LLTokenizer:
    return LLTokenizer("byte")


@lru_cache(maxsize=256)
def _automaton(pattern: str) -> LLMatcher:
    grammar = LLMatcher.grammar_from_json_schema(
        json.dumps({"type": "string", "pattern": pattern}), overrides={"whitespace_flexible": False}
    )
    limits = LLParserLimits(verbose_errors=False)
    return LLMatcher(_byte_tokenizer(), grammar, log_level=0, limits=limits)


def _search(pattern: str, text: str) -> bool:
    """Whether the pattern occurs in the text, in the dialect in which it is enforced."""
    _check_time()
    quoted = json.dumps(text, ensure_ascii=False).replace("\x7f", r"\u007f")
    tokens = [*quoted.encode(), _byte_tokenizer().eos_token]
    with _lock:  # the matchers are shared, and no two threads may use one at once
        matcher = _automaton(pattern).deep_copy()
    count = 0 if matcher.is_error() else matcher.validate_tokens(tokens)
    if matcher.is_error():
        reason = " ".join(matcher.get_error().split("<state>")[0].split())
        raise _GaveUpError(f"pattern {short(repr(pattern))}: {short(reason)}")
    return count == len(tokens)


def _pattern(validator: Any, pattern: str, instance: Any, _: Any) -> Iterator[ValidationError]:
    if validator.is_type(instance, "string") and not _search(pattern, instance):
        yield ValidationError(f"{short(repr(instance))} does not match {pattern!r}")


def _pattern_properties(
    validator: Any, patterns: Mapping[str, Any], instance: Any, _: Any
) -> Iterator[ValidationError]:
    if validator.is_type(instance, "object"):
        for pattern, below in patterns.items():
            for name, value in instance.items():
                if _search(pattern, name):
                    yield from validator.descend(value, below, path=name, schema_path=pattern)


def _additional_properties(
    validator: Any, below: Any, instance: Any, schema: Mapping[str, Any]
) -> Iterator[ValidationError]:
    if not validator.is_type(instance, "object"):
        return
    named, patterns = schema.get("properties", {}), schema.get("patternProperties", {})
    for name, value in instance.items():
        if name in named or any(_search(pattern, name) for pattern in patterns):
            continue
        if below is False:
            yield ValidationError(f"additional property {name!r} is not allowed")
        else:
            yield from validator.descend(value, below, path=name)


def _multiple_of(validator: Any, divisor: Any, instance: Any, _: Any) -> Iterator[ValidationError]:
    # As written, in decimal: 0.07 is a multiple of 0.01.
    if validator.is_type(instance, "number"):
        ratio = Fraction(str(instance)) / Fraction(str(divisor))
        if ratio.denominator != 1:
            yield ValidationError(f"{instance!r} is not a multiple of {divisor}")


def _unique_items(validator: Any, on: Any, instance: Any, _: Any) -> Iterator[ValidationError]:
    if on and validator.is_type(instance, "array"):
        items = cast("list[object]", instance)
        if len({_hashable(item) for item in items}) != len(items):
            yield ValidationError(f"{instance!r} has non-unique elements")


def _hashable(value: object) -> object:
    """Equal for values that JSON Schema holds equal: 1 and 1.0, but not 1 and true."""
    if isinstance(value, bool):
        return ("bool", value)
    if isinstance(value, list):
        return ("list", *map(_hashable, cast("list[object]", value)))
    if isinstance(value, dict):
        items = cast("dict[str, object]", value).items()
        return ("dict", frozenset((name, _hashable(item)) for name, item in items))
    return value


_OWN: Mapping[str, Callable[..., Any]] = {
    "pattern": _pattern,
    "patternProperties": _pattern_properties,
    "additionalProperties": _additional_properties,
    "multipleOf": _multiple_of,
    "divisibleBy": _multiple_of,
    "uniqueItems": _unique_items,
}
