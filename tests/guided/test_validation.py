"""Finished text is judged rightly, or not at all, and always soon."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from tightrope.guided import Guide
from tightrope.guided.validation import validate


@pytest.mark.parametrize(
    ("schema", "text", "verdict", "named"),
    [
        ({"type": "integer"}, "3", True, None),
        ({"type": "integer"}, '"3"', False, "integer"),
        ({}, '{"a":1,"a":2}', False, "repeated key 'a'"),
        ({}, '{"a":1,"\\u0061":2}', False, "repeated key 'a'"),
        ({}, "NaN", False, "NaN"),
        ({}, '{"a":', False, "not valid JSON"),
        ({"not": {"type": "string"}}, '"a"', False, "not"),
        ({"properties": {"a": {"maximum": 1}}}, '{"a":2}', False, r"$.a"),
        # Patterns, in the dialect of the masks.
        ({"pattern": r"^\p{L}+$"}, '"é"', True, None),
        ({"pattern": r"^\p{L}+$"}, '"1"', False, "does not match"),
        ({"pattern": "a+$"}, '"baa"', True, None),
        ({"pattern": "^a$"}, '"a\\n"', False, "does not match"),
        ({"pattern": "^.$"}, '"\\u007f"', True, None),
        ({"pattern": r"^[\\u0000-\"]{3}$".replace("\\\\", "\\")}, '"\\u0001\\t!"', True, None),
        ({"pattern": "^日$"}, '"\\u65e5"', True, None),
        ({"pattern": "a"}, "1", True, None),
        ({"pattern": "^(?=a)b"}, '"a"', None, "could not be validated: pattern"),
        ({"pattern": "a"}, '"\\ud800"', None, "could not be validated"),
        ({"patternProperties": {"^a": {"type": "null"}}}, '{"b":1,"ab":2}', False, "$.ab"),
        (
            {"properties": {"b": {}}, "patternProperties": {"^a": {}}, "additionalProperties": {
                "type": "null"}},
            '{"b":1,"ab":2,"c":null}', True, None,
        ),
        (
            {"patternProperties": {"^a": {}}, "additionalProperties": False},
            '{"ab":2,"ba":1}', False, "'ba'",
        ),
        ({"additionalProperties": {"type": "null"}}, '{"c":1}', False, "$.c"),
        (
            {"unevaluatedProperties": False, "patternProperties": {"^(a+)+$": {}}},
            "{}", None, "unevaluatedProperties beside",
        ),
        ({"unevaluatedProperties": False, "properties": {"a": {}}}, '{"b":1}', False, "'b'"),
        # Numbers as written.
        *(({"multipleOf": 0.01}, f"{i / 100}", True, None) for i in range(30)),
        ({"multipleOf": 0.01}, "0.075", False, "multiple"),
        ({"multipleOf": 0.01}, "1e300", True, None),
        ({"multipleOf": 1e-300}, "3", True, None),
        ({"multipleOf": 3}, "9007199254740993", True, None),
        ({"multipleOf": 2.0}, "3", False, "multiple"),
        ({"multipleOf": 2}, '"3"', True, None),
        ({"uniqueItems": True}, '[1,true,"1",[1],[true],{"a":1},{"a":2},{}]', True, None),
        ({"uniqueItems": True}, '[{"a":[1],"b":2},{"b":2.0,"a":[1]}]', False, "unique"),
        ({"uniqueItems": False}, "[1,1]", True, None),
        ({"uniqueItems": True}, "3", True, None),
        # What Python cannot hold is not thereby wrong.
        ({"type": "integer"}, "1" * 5000, None, "could not be validated: ValueError"),
        ({"type": "array"}, "[" * 5000 + "]" * 5000, None, "could not be validated: Recursion"),
        ({"type": "integer"}, "1" * 5000 + "x", None, None),
        ({"$ref": "#"}, "1", None, "could not be validated: Recursion"),
    ],
)  # fmt: skip
def test_finished_text_is_validated(
    schema: dict[str, Any], text: str, verdict: bool | None, named: str | None
) -> None:
    valid, error = validate(json.dumps(schema), text)
    assert valid is verdict, error
    if valid:
        assert error is None
    elif named is not None:
        assert named in (error or "")


@pytest.mark.parametrize(
    ("kind", "text", "verdict"),
    [
        ("date", "2023-02-29", False),
        ("date", "2024-02-29", True),
        ("date-time", "2023-02-29T00:00:00Z", False),
        ("date-time", "2024-02-29t00:00:00.25z", True),
        ("date-time", "2023-W05-1T00:00:00Z", False),
        ("date-time", "2023-01-01 00:00:00Z", False),
        ("date-time", "2016-12-31T23:59:60Z", True),
        ("time", "12:00:60Z", False),
        ("time", "01:29:60+01:30", True),
        ("time", "22:29:60-01:30", True),
        ("time", "23:59:60+01:30", False),
        ("time", "24:00:00Z", False),
        ("time", "12:00:00", False),
        ("email", "a", False),
    ],
)
def test_formats_count_where_they_are_not_enforced(kind: str, text: str, verdict: bool) -> None:
    guide = Guide.json({"items": {"format": kind}})
    document = json.dumps([text, 1])
    assert guide.validate(document, unenforced=("format",))[0] is verdict
    assert guide.validate(document)[0] is True


def chain(length: int, link: Any) -> dict[str, Any]:
    """Definitions each of which asks for the next one twice."""
    following = [{"$ref": f"#/$defs/n{i + 1}"} for i in range(length)]
    defs = {f"n{i}": link(ref) for i, ref in enumerate(following)}
    return {"$defs": {**defs, f"n{length}": {"type": "object"}}, "$ref": "#/$defs/n0"}


def both(ref: Any) -> Any:
    return {"allOf": [ref, ref]}


def dependent(ref: Any) -> Any:
    return {"dependentSchemas": {"a": ref, "b": ref}}


def nest(ref: Any) -> Any:
    return {"type": "array", "items": ref, "contains": ref}


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"pattern": "^(a+)+$"}, json.dumps("a" * 40 + "!")),
        ({"pattern": "(x+x+)+y"}, json.dumps("x" * 60)),
        ({"pattern": "^(([a-z])+.)+[A-Z]([a-z])+$"}, json.dumps("a" * 20_000)),
        ({"pattern": "^(.*a){12}(.*b){12}$"}, json.dumps("ab" * 10_000)),
        ({"patternProperties": {"^(a+)+$": False}}, json.dumps({"a" * 40 + "!": 1})),
        (
            {"patternProperties": {"^(a+)+$": {}}, "additionalProperties": False},
            json.dumps({"a" * 40 + "!": 1}),
        ),
        (
            {"patternProperties": {f"^(a|b){{{i}}}$": {} for i in range(2000)}},
            json.dumps({f"k{i}": 1 for i in range(3000)}),
        ),
        (chain(30, both), "{}"),
        ({**chain(30, both), "unevaluatedProperties": False}, "{}"),
        ({**chain(30, dependent), "unevaluatedProperties": False}, '{"a":1,"b":2}'),
        (chain(30, nest), "[" * 30 + "]" * 30),
        ({"uniqueItems": True}, json.dumps([{"a": i} for i in range(8000)])),
        ({"items": {"enum": [f"{i}" for i in range(50_000)]}}, json.dumps([1] * 8000)),
        (
            {"$defs": {"a": {"items": {"$ref": "#/$defs/a"}}}, "$ref": "#/$defs/a"},
            "[" * 900 + "]" * 900,
        ),
        ({"format": "regex"}, json.dumps("(" * 9000)),
    ],
)  # fmt: skip
def test_nothing_stalls_the_step(schema: dict[str, Any], text: str) -> None:
    guide = Guide.json(schema)
    start = time.process_time()
    verdict, error = guide.validate(text, unenforced=("format",))
    assert time.process_time() - start < 1
    assert (verdict is None) <= (error is not None)
