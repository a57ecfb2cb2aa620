"""What llguidance reads differently in a JSON schema than its author: mended, or named.

All found by feeding the library documents, and each is a row of the tests:

* Keys outside ``properties`` may be spelled with escapes there, so ``{"\\u0061": ...}`` evades the
  rules of ``a``. Where no other schema is merged in, such objects get a pattern for other keys
  instead: keys of patterns are matched unescaped.
* Integers go through a double, and bounds of numbers through its shortest decimal.
* An exclusive bound on a whole number lets that number in where no other lies within the bounds.
* The counts of keys are of what is written, repeated keys and all, and with optional properties
  they are not supported or, in lenient mode, misread.
* Every year has a February 29, every minute a leap second, and any xn-- label is a host's.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from decimal import Decimal
from fractions import Fraction
from math import ceil, floor, inf
from typing import Any, cast

from ..schema import walk

_MAX_NAMES = 2000  # characters of property names in one pattern
_MAX_NAME = 64  # of one name, each a nested group
_LOOSE_FORMATS = ("date", "date-time", "time", "hostname")
_MERGED = frozenset(("allOf", "anyOf", "oneOf", "$ref", "$dynamicRef", "$recursiveRef"))
_UNMERGEABLE = frozenset(("if", "dependentSchemas", "dependencies", "extends"))
_OF_OBJECTS = frozenset((
    "properties", "required", "patternProperties", "additionalProperties", "minProperties",
    "maxProperties", "unevaluatedProperties",
))  # fmt: skip


def prepare(source: str, *, lenient: bool) -> tuple[str, set[str]]:
    """The schema to compile, and the keywords of which some document shows that they do not hold.

    Schemas that only ``allOf`` brings together are not looked at together.
    """
    schema = cast("dict[str, Any]", json.loads(source))
    nodes = [node for _, node in walk(schema)]
    merges = any(_merges(node) for node in nodes)
    names: set[str] = set()
    for node in nodes:
        names.update(_loose_numbers(node))
        if _takes(node, "string") and node.get("format") in _LOOSE_FORMATS:
            names.add("format")
        if _takes(node, "object"):
            names.update(_loose_counts(node, lenient))
            names.update(_escapable(node, merges))
    return json.dumps(schema, ensure_ascii=False), names


def _merges(node: Mapping[str, Any]) -> bool:
    keys = node.keys()
    merged = len(keys & _MERGED) + (len(node.get("allOf", ())) > 1)
    return bool(keys & _UNMERGEABLE) or merged > 1 or bool(merged and keys & _OF_OBJECTS)


def _takes(node: Mapping[str, Any], *kinds: str) -> bool:
    types: Any = node.get("type", kinds)
    return types in kinds if isinstance(types, str) else any(kind in types for kind in kinds)


def _required(node: Mapping[str, Any]) -> list[str]:
    names: Any = node.get("required")
    return cast("list[str]", names) if isinstance(names, list) else []  # draft 3 has a boolean


def _loose_numbers(node: Mapping[str, Any]) -> set[str]:
    names = {key for key in ("const", "enum") if not _held(node.get(key))}
    if not _takes(node, "integer", "number"):
        return names
    number = _takes(node, "number")
    low, high = -inf, inf
    exclusive: dict[str, Any] = {}
    for key, other in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
        bound, strict = node.get(key), node.get(other)
        for name, value in ((key, bound), (other, strict)):
            if not isinstance(value, (int, float)) or isinstance(value, bool):
                continue
            if key == "minimum":
                low, loose = max(low, value), _as_read(value, number=number) < value
            else:
                high, loose = min(high, value), _as_read(value, number=number) > value
            if loose:
                names.add(name)
        exclusive[other] = bound if strict is True else strict  # draft 4
    if number and low == exclusive["exclusiveMinimum"] == floor(low) >= 0 and high < low + 1:
        names.add("exclusiveMinimum")
    if number and high == exclusive["exclusiveMaximum"] == ceil(high) <= 0 and low > high - 1:
        names.add("exclusiveMaximum")
    return names


def _held(value: object) -> bool:
    """Whether the library holds all integers in a constant as they are."""
    if isinstance(value, list):
        return all(map(_held, cast("list[object]", value)))
    if isinstance(value, dict):
        return all(map(_held, cast("dict[str, object]", value).values()))
    if not isinstance(value, int) or abs(value) <= 1 << 53:
        return True
    return _as_read(value, number=abs(value) >= 1 << 63) == value


def _as_read(value: float, *, number: bool) -> Fraction | float:
    """What the library makes of an integer bound or constant."""
    if isinstance(value, float) or abs(value) >= 1 << 1023:  # which it refuses
        return value
    read = Fraction(Decimal(repr(float(value)))) if number else Fraction(float(value))
    return read if number else min(max(read, -(1 << 63)), (1 << 63) - 1)


def _loose_counts(node: dict[str, Any], lenient: bool) -> set[str]:
    required = set(_required(node))
    optional = node.get("properties", {}).keys() - required
    closed = node.get("additionalProperties") is False and "patternProperties" not in node
    names: set[str] = set()
    for key in ("minProperties", "maxProperties"):
        # One key more or less among optional ones is what the library can do.
        if lenient and optional and key in node and not (closed and node[key] == 1):
            del node[key]
            names.add(key)
    if not closed and node.get("minProperties", 0) - len(required) >= 2:
        names.add("minProperties")
    return names


def _escapable(node: dict[str, Any], merges: bool) -> set[str]:
    """Mends a schema whose rules for keys an escaped spelling evades, or names the keywords."""
    others: Any = node.get("additionalProperties", True)
    binding = {
        key
        for key in ("properties", "patternProperties")
        if any(rule not in (True, {}, others) for rule in node.get(key, {}).values())
    }
    required = _required(node)
    if others is False or not (binding or required):
        return set()
    names = {*node.get("properties", {}), *required}
    counted = not node.keys().isdisjoint(("minProperties", "maxProperties"))
    long = sum(map(len, names)) > _MAX_NAMES or max(map(len, names), default=0) > _MAX_NAME
    # A pattern that excludes a character with an escape of its own is read wrongly.
    quoted = any(not {'"', "\\", "\x7f"}.isdisjoint(name) for name in names)
    if merges or counted or long or quoted or "patternProperties" in node:
        return binding
    properties = node.setdefault("properties", {})
    for name in required:
        properties.setdefault(name, others)
    node["patternProperties"] = {f"^{_other_than(names)}$": others}
    node["additionalProperties"] = False
    return set()


def _other_than(words: Iterable[str]) -> str:
    """A regular expression for all strings but these."""
    tails: dict[str, set[str]] = {}
    choices = [""]
    for word in words:
        if word:
            tails.setdefault(word[0], set()).add(word[1:])
        else:
            choices = []
    choices += [_literal(head) + _other_than(tails[head]) for head in sorted(tails)]
    heads = "".join(map(_literal, sorted(tails)))
    choices.append(f"[^{heads}](?s:.*)" if heads else "(?s:.+)")
    return f"(?:{'|'.join(choices)})"


def _literal(char: str) -> str:
    return char if char.isascii() and char.isalnum() else f"\\x{{{ord(char):x}}}"
