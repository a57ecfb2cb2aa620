"""JSON schemas: reading, checking and tidying.

The schema is checked before any grammar library sees it: libraries report broken schemas late,
differently, or not at all, and huge ones can hold a compiler for minutes. Keywords that no document
can violate (``"uniqueItems": false``, an array rule on a string) are removed before compiling, so
that they are neither refused nor reported as unenforced.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, cast

from jsonschema import FormatChecker, exceptions

from .python_types import schema_of
from .validation import short, validator_class

MAX_DEPTH = 96  # nested JSON containers; validators recurse several frames a level
MAX_ENUM = 50_000  # values of one enum
MAX_BYTES = 4 << 20  # of JSON text

_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
_SINGLES = (
    "items",
    "additionalItems",
    "additionalProperties",
    "not",
    "if",
    "then",
    "else",
    "contains",
    "propertyNames",
    "unevaluatedItems",
    "unevaluatedProperties",
)
# Rules that only bind one type.
_BINDS = {
    "uniqueItems": "array",
    "contains": "array",
    "minContains": "array",
    "maxContains": "array",
    "unevaluatedItems": "array",
    "propertyNames": "object",
    "dependencies": "object",
    "dependentRequired": "object",
    "dependentSchemas": "object",
    "unevaluatedProperties": "object",
}
_COUNTS = frozenset(
    f"{most}{what}"
    for most in ("min", "max")
    for what in ("Length", "Items", "Properties", "Contains")
)
# Formats that JSON Schema defines. Others are annotations: no document can violate them.
# fmt: off
STANDARD_FORMATS = frozenset((
    "date-time", "date", "time", "duration", "email", "idn-email", "hostname", "idn-hostname",
    "ipv4", "ipv6", "uri", "uri-reference", "iri", "iri-reference", "uuid", "uri-template",
    "json-pointer", "relative-json-pointer", "regex",
))
# fmt: on


def load(schema: object) -> dict[str, Any]:
    """Read what users hold as a schema into a mapping, checked. Raises ValueError."""
    value: object
    if isinstance(schema, str):
        if len(schema) > MAX_BYTES:
            raise ValueError(f"schema must be at most {MAX_BYTES} bytes, got {len(schema)}")
        try:
            value = json.loads(schema)
        except RecursionError:
            raise ValueError(f"schema must nest at most {MAX_DEPTH} levels") from None
        except ValueError as error:
            raise ValueError(f"schema is not valid JSON: {error}") from None
    elif isinstance(schema, (bool, Mapping)):
        value = cast("object", schema)
    else:
        value = schema_of(schema)
    if value is False:
        raise ValueError("schema must not be false: no document matches it")
    if value is True:
        value = {}
    if not isinstance(value, Mapping):
        raise ValueError(f"schema must be a JSON object or true, got {short(value)}")
    return _check(cast("Mapping[str, Any]", value))


def _check(schema: Mapping[str, Any]) -> dict[str, Any]:
    _check_depth(schema)
    try:
        text = json.dumps(schema, ensure_ascii=False, allow_nan=False)
        size = len(text.encode())
    except (TypeError, ValueError) as error:
        raise ValueError(f"schema cannot be written as JSON: {error}") from None
    if size > MAX_BYTES:
        raise ValueError(f"schema must be at most {MAX_BYTES} bytes, got {size}")
    plain = cast("dict[str, Any]", json.loads(text))
    try:
        # Without format checks: a pattern's dialect is the grammar's affair, not Python's.
        validator_class(plain).check_schema(plain, format_checker=FormatChecker(()))
    except exceptions.SchemaError as error:
        raise ValueError(
            f"schema is invalid at {error.json_path}: {short(error.message, 300)}"
        ) from None
    except RecursionError:
        raise ValueError(f"schema must nest at most {MAX_DEPTH} levels") from None
    for path, node in walk(plain):
        enum = node.get("enum")
        if isinstance(enum, list):
            count = len(cast("list[object]", enum))
            if not 1 <= count <= MAX_ENUM:
                raise ValueError(
                    f"schema at {path}.enum must have 1 to {MAX_ENUM} values, got {count}"
                )
    return plain


def _check_depth(schema: object) -> None:
    """Without recursion, and before anything that recurses."""
    level = [schema]
    for _ in range(MAX_DEPTH + 1):
        below: list[object] = []
        for node in level:
            if isinstance(node, Mapping):
                below.extend(cast("Mapping[object, object]", node).values())
            elif isinstance(node, (list, tuple)):
                below.extend(cast("list[object]", node))
        if not below:
            return
        level = below
    raise ValueError(f"schema must nest at most {MAX_DEPTH} levels")


def walk(schema: Mapping[str, Any], path: str = "$") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every subschema that is an object, with its JSON path, the root first."""
    yield path, cast("dict[str, Any]", schema)
    for key, value in list(schema.items()):
        items: list[tuple[str, Any]] = []
        if key in _MAPS or key == "dependencies":
            if isinstance(value, dict):
                items = [(f"{path}.{key}.{k}", v) for k, v in cast("dict[str, Any]", value).items()]
        elif key in _LISTS or (key == "items" and isinstance(value, list)):
            if isinstance(value, list):
                items = [(f"{path}.{key}[{i}]", v) for i, v in enumerate(cast("list[Any]", value))]
        elif key in _SINGLES:
            items = [(f"{path}.{key}", value)]
        for where, node in items:
            if isinstance(node, dict):
                yield from walk(cast("dict[str, Any]", node), where)


def tidy(schema: Mapping[str, Any]) -> dict[str, Any]:
    """A copy without the keywords that no document can violate, and with counts as integers."""
    copy = cast("dict[str, Any]", json.loads(json.dumps(schema)))
    copy.pop("x-guidance", None)  # would switch compiler options behind the user's back
    for _, node in walk(copy):
        for key in _vacuous(node):
            del node[key]
        for key in _COUNTS & node.keys():
            if isinstance(node[key], float):
                node[key] = int(node[key])  # 2.0 is a count too
    return copy


def _vacuous(node: Mapping[str, Any]) -> list[str]:
    kinds: Any = node.get("type")
    types: list[Any] = [kinds] if isinstance(kinds, str) else list(kinds or ())  # or schemas
    keys: list[str] = [k for k, t in _BINDS.items() if k in node and types and t not in types]
    everything = (True, {})
    tests = {
        "uniqueItems": node.get("uniqueItems") is False,
        "not": node.get("not", True) is False,
        "unevaluatedItems": node.get("unevaluatedItems") in everything,
        "unevaluatedProperties": node.get("unevaluatedProperties") in everything,
        "propertyNames": node.get("propertyNames") in everything,
        "dependencies": node.get("dependencies") == {},
        "dependentRequired": node.get("dependentRequired") == {},
        "dependentSchemas": node.get("dependentSchemas") == {},
        "if": "then" not in node and "else" not in node,
        "then": "if" not in node,
        "else": "if" not in node,
        "minContains": "contains" not in node,
        "maxContains": "contains" not in node,
        "format": node.get("format") not in STANDARD_FORMATS,
    }
    return list(dict.fromkeys(keys + [k for k, vacuous in tests.items() if k in node and vacuous]))
