"""What llguidance reads differently from the schema's author is mended or named; nothing else is.
And what it refuses has the right kind.

Documents are fed byte by byte to the library itself, so that a new version shows here.
"""

from __future__ import annotations

import itertools
import json
from fractions import Fraction
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tightrope.guided import GrammarRefused, Guide
from tightrope.guided.backends.llguidance import LLGuidanceBackend
from tightrope.guided.backends.llguidance_schema import prepare


@pytest.fixture(scope="module")
def backend() -> LLGuidanceBackend:
    """Tokens are bytes, and the last one ends the text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate([*alphabet, "<end>"])}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<end>", special=True)])
    made = LLGuidanceBackend(tokenizer, 257, [256])
    made.encode = lambda text: [*tokenizer.encode(text).ids, 256]  # type: ignore[attr-defined]
    return made


def accepted(backend: Any, schema: Any, texts: list[str], *, lenient: bool = False) -> list[bool]:
    compiled = backend.compile(Guide.json(schema, max_whitespace=0).spec(lenient=lenient))
    return [compiled.start().accept(backend.encode(text)) for text in texts]


def named(schema: Any, *, lenient: bool = False) -> set[str]:
    return prepare(Guide.json(schema).spec().source, lenient=lenient)[1]


BIG = 1 << 53
OPEN = {"type": "object", "properties": {"a": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("schema", "keywords", "violation"),
    [
        # Integers beyond doubles.
        ({"type": "integer", "minimum": BIG + 1}, {"minimum"}, f"{BIG}"),
        ({"minimum": BIG + 1}, {"minimum"}, f"{BIG}"),
        ({"type": "integer", "maximum": -BIG - 1}, {"maximum"}, f"-{BIG}"),
        ({"type": "integer", "maximum": BIG + 3}, {"maximum"}, f"{BIG + 4}"),
        ({"type": "integer", "exclusiveMinimum": BIG + 1}, {"exclusiveMinimum"}, f"{BIG + 1}"),
        ({"type": "number", "maximum": 1 << 62}, {"maximum"}, f"{(1 << 62) + 1}"),
        ({"const": BIG + 1}, {"const"}, f"{BIG}"),
        ({"enum": ["a", [BIG + 1]]}, {"enum"}, f"[{BIG}]"),
        ({"const": {"a": -BIG - 1}}, {"const"}, f'{{"a":-{BIG}}}'),
        # Whole exclusive bounds.
        ({"type": "number", "exclusiveMinimum": 0, "maximum": 0.5}, {"exclusiveMinimum"}, "0"),
        (
            {"minimum": -3, "exclusiveMinimum": 1, "exclusiveMaximum": 1.9},
            {"exclusiveMinimum"},
            "1",
        ),
        ({"type": "number", "exclusiveMaximum": -2, "minimum": -2.5}, {"exclusiveMaximum"}, "-2"),
        (
            {
                "$schema": "http://json-schema.org/draft-04/schema#",
                "type": "number",
                "minimum": 0,
                "exclusiveMinimum": True,
                "maximum": 1e-9,
            },
            {"exclusiveMinimum"},
            "0",
        ),
        # Dates.
        ({"type": "string", "format": "date"}, {"format"}, '"2023-02-29"'),
        ({"format": "date-time"}, {"format"}, '"2023-02-29T00:00:00Z"'),
        ({"type": ["string", "null"], "format": "time"}, {"format"}, '"12:00:60Z"'),
        # Keys spelled with escapes, and repeated ones.
        (
            {**OPEN, "patternProperties": {"^x": {"type": "null"}}},
            {"properties", "patternProperties"},
            '{"\\u0078":1}',
        ),
        (
            {"type": "object", "patternProperties": {"^x": {"type": "null"}}},
            {"patternProperties"},
            '{"\\u0078":1}',
        ),
        ({"allOf": [OPEN, {"properties": {"b": {}}}]}, {"properties"}, '{"\\u0061":"x"}'),
        ({"$ref": "#/$defs/o", "$defs": {"o": OPEN}, "required": ["b"]}, {"properties"},
         '{"b":1,"\\u0061":"x"}'),
        ({"properties": {'"': {"type": "null"}}}, {"properties"}, '{"\\u0022":1}'),
        ({"type": "object", "minProperties": 2}, {"minProperties"}, '{"a":1,"a":1}'),
    ],
)  # fmt: skip
def test_what_does_not_hold_is_named(
    backend: LLGuidanceBackend, schema: dict[str, Any], keywords: set[str], violation: str
) -> None:
    compiled = backend.compile(Guide.json(schema).spec())
    assert set(compiled.unenforced) == keywords
    assert accepted(backend, schema, [violation]) == [True]
    assert Guide.json(schema).validate(violation, unenforced=compiled.unenforced)[0] is False


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "integer", "minimum": -BIG, "maximum": BIG},
        {"type": "integer", "maximum": 1 << 62},
        {"type": "integer", "maximum": (1 << 63) - 1},
        {"type": "string", "minimum": BIG + 1, "exclusiveMinimum": 0, "maximum": 0.5},
        {"type": "integer", "maximum": 10**19},
        {"type": "number", "maximum": BIG + 1},
        {"const": 1 << 62},
        {"enum": [10**22, BIG, -BIG, 0.1, "9007199254740993", True]},
        {"type": "number", "exclusiveMinimum": 0},
        {"type": "number", "exclusiveMinimum": 0, "minimum": 0.25, "maximum": 0.5},
        {"type": "number", "format": "date"},
        {"type": "string", "format": "uuid"},
        {**OPEN, "additionalProperties": False},
        {"type": "object", "minProperties": 1},
        {"type": "object", "required": ["a"], "minProperties": 2},
        {"type": "object", "patternProperties": {"^a": {"type": "null"}}, "additionalProperties": {
            "type": "null"}},
        {
            "$schema": "http://json-schema.org/draft-03/schema#",
            "properties": {"a": {"required": True, "type": ["string", {"type": "object"}]}},
        },
        OPEN,
        {"type": "array", "items": {"anyOf": [OPEN, {"allOf": [{"$ref": "#/$defs/a"}]}]},
         "$defs": {"a": OPEN}},
    ],
)  # fmt: skip
def test_what_holds_is_not_named(schema: dict[str, Any]) -> None:
    assert named(schema) == set()


def test_bounds_of_numbers_hold_or_are_named(backend: LLGuidanceBackend) -> None:
    """All pairs of bounds: a keyword is named exactly where a number shows it."""
    bounds = [None, -2, -1.5, -1, -0.5, -1e-10, 0, 0.001, 0.5, 1, 1.5, 2, 10]
    texts = ["-2", "-1.5", "-1", "-0.5", "-0", "0", "0.0005", "0.5", "1", "1.25", "1.5", "2", "10"]
    shown = 0
    for low, high, *strict in itertools.product(bounds, bounds, (0, 1), (0, 1)):
        if low is None and high is None:
            continue
        if low is not None and high is not None and low >= high:
            continue
        keys = [
            ("minimum", "exclusiveMinimum")[strict[0]],
            ("maximum", "exclusiveMaximum")[strict[1]],
        ]
        schema: dict[str, Any] = {
            key: bound for key, bound in zip(keys, (low, high), strict=True) if bound is not None
        }
        wrong: set[str] = set()
        got = accepted(backend, {"type": "number", **schema}, texts)
        for text, taken in zip(texts, got, strict=True):
            value = Fraction(text)
            above = low is None or value > Fraction(str(low)) or (value == low and not strict[0])
            below = high is None or value < Fraction(str(high)) or (value == high and not strict[1])
            if taken and not above:
                wrong.add(keys[0])
            if taken and not below:
                wrong.add(keys[1])
        assert named({"type": "number", **schema}) == wrong, schema
        shown += bool(wrong)
    assert shown >= 10


@pytest.mark.parametrize(
    "rest",
    [
        {},
        {"required": ["a"]},
        {"required": ["b"]},
        {"required": ["city", "a"]},
        {"additionalProperties": {"type": "integer"}},
        {"additionalProperties": {"type": "integer"}, "required": ["city"]},
        {"properties": {"a": {"type": "integer"}, "": {"type": "null"}, "é\n-]^b": {}, "ab": {}}},
    ],
)
def test_open_objects_hold_their_rules_however_keys_are_spelled(
    backend: LLGuidanceBackend, rest: dict[str, Any]
) -> None:
    schema = {**OPEN, "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}, **rest}
    guide = Guide.json(schema)
    assert backend.compile(guide.spec()).unenforced == ()
    keys = ["a", "b", "ab", "", "aa", "é", "é\n-]^b", "日", '"', "a\\", "\n", "/", "city", "A"]
    values = [1, "x", None]
    documents = [{}, {"a": 1, "b": "x", "city": 1, "z": 2}, {"a": 1, "city": 1}, {"b": "x"}]
    documents += [{key: value} for key in keys for value in values]
    documents += [{"a": 1, key: value} for key in keys for value in values if key != "a"]
    written = [json.dumps(d, ensure_ascii=False, separators=(",", ":")) for d in documents]
    for text, taken in zip(written, accepted(backend, schema, written), strict=True):
        valid = guide.validate(text)[0]
        assert taken <= bool(valid), text
        if "required" not in rest:  # where required keys come first, not all orders are taken
            assert taken == valid, text
    evasions = ['{"\\u0061":"x"}', '{"a":1,"\\u0061":2}', '{"city":1,"a":1,"\\u0061":"x"}']
    assert not any(accepted(backend, schema, evasions))


def test_a_count_of_keys_is_dropped_where_it_is_misread(backend: LLGuidanceBackend) -> None:
    closed = {"type": "object", "properties": {"a": {}, "b": {}}, "additionalProperties": False}
    for count, violation in [({"minProperties": 2}, '{"a":1}'), ({"maxProperties": 0}, '{"a":1}')]:
        schema = {**closed, **count}
        compiled = backend.compile(Guide.json(schema).spec(lenient=True))
        assert compiled.unenforced == tuple(count)
        assert accepted(backend, schema, [violation, '{"c":1}'], lenient=True) == [True, False]
    for count, texts in [({"minProperties": 1}, ["{}"]), ({"maxProperties": 1}, ['{"a":1,"b":1}'])]:
        schema = {**closed, **count}
        assert backend.compile(Guide.json(schema).spec(lenient=True)).unenforced == ()
        assert accepted(backend, schema, [*texts, '{"a":1}'], lenient=True) == [False, True]


@pytest.mark.parametrize(
    ("schema", "kind", "named"),
    [
        ({"type": "string", "pattern": "("}, "invalid", "regex"),
        ({"$ref": "#/$defs/none"}, "invalid", "/\\$defs/none"),
        ({"$ref": "http://example.invalid/schema"}, "invalid", "example.invalid"),
        ({"type": "string", "minLength": 5, "maxLength": 2}, "unsatisfiable", "minLength"),
        ({"allOf": [{"type": "string"}, {"type": "null"}]}, "unsatisfiable", "types"),
        ({"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}, "unsatisfiable", "no doc"),
        ({"not": {"type": "string"}}, "unsupported", "not"),
        ({"type": "array", "uniqueItems": True}, "unsupported", "uniqueItems"),
        ({"type": "string", "pattern": "^(?=a)b"}, "unsupported", "look"),
        ({"type": "string", "format": "iri"}, "unsupported", "iri"),
        # Well-formed, whatever the library says.
        ({"type": "object", "properties": {"a": {}}, "minProperties": 1}, "unsupported", "Prop"),
        ({"type": "object", "properties": {"a": {}}, "maxProperties": 1}, "unsupported", "Prop"),
        ({"type": "number", "minimum": 1e300}, "unsupported", "range"),
        ({"type": "integer", "minimum": 1 << 62}, "unsupported", "range"),
        ({"type": "string", "pattern": r"\cJ"}, "unsupported", "escape"),
        ({"type": "string", "pattern": r"\1(a)"}, "unsupported", "backreference"),
        ({"type": "string", "pattern": r"\p{Foo}"}, "unsupported", "property"),
        ({"type": "string", "pattern": r"\ud83d\ude00"}, "unsupported", "scalar"),
        ({"type": "string", "maxLength": 10**12}, "limit", "decimal"),
        ({"type": "string", "minLength": 10**20}, "limit", "minLength"),
        ({"type": "string", "pattern": "a{99999999999}"}, "limit", "decimal"),
        ({"type": "number", "multipleOf": 1e-300}, "limit", "multipleOf"),
        ({"type": "string", "pattern": "[a"}, "invalid", "unclosed"),
        ({"type": "string", "pattern": "a{2,1}"}, "invalid", "repetition"),
        ({"type": "string", "pattern": "limit)"}, "invalid", "unopened"),
        (
            {"type": "string", "pattern": "^(.*a){20}(.*b){20}$", "maxLength": 5000},
            "limit",
            "regex",
        ),
    ],
)
def test_refusals_have_a_kind(
    backend: LLGuidanceBackend, schema: dict[str, Any], kind: str, named: str
) -> None:
    with pytest.raises(GrammarRefused, match=named) as caught:
        backend.compile(Guide.json(schema).spec())
    assert caught.value.kind == kind
    assert "\n" not in str(caught.value)
