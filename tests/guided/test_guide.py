"""Guides are checked where they are made: every fault is a ValueError that names its place."""

from __future__ import annotations

import dataclasses
import json
from typing import Any, TypedDict

import pydantic
import pytest

from tightrope.guided import Guide
from tightrope.guided.schema import MAX_DEPTH, MAX_ENUM, tidy


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return schema


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        ("not json", "not valid JSON"),
        ("", "not valid JSON"),
        (False, "false"),
        ("false", "false"),
        (None, "NoneType|None"),
        ([1], "mapping"),
        ("[1]", "JSON object"),
        ({"type": "strin"}, r"\$\.type"),
        ({"type": {"a": 1}}, r"\$\.type"),
        ({"type": "object", "properties": {"a": "string"}}, r"\$\.properties\.a"),
        ({"type": "object", "properties": []}, r"\$\.properties"),
        ({"type": "object", "required": "a"}, r"\$\.required"),
        ({"type": "array", "minItems": -1}, r"\$\.minItems"),
        ({"properties": {"level": {"enum": []}}}, r"\$\.properties\.level\.enum"),
        ({"minimum": 5, "exclusiveMinimum": True}, "exclusiveMinimum"),
        ({"const": float("nan")}, "JSON"),
        ({"const": {1, 2}}, "JSON"),
        ({"const": "\ud800"}, "JSON"),
        (nested(3000), f"{MAX_DEPTH} levels"),
        ('{"items":' * 3000 + "{}" + "}" * 3000, f"{MAX_DEPTH} levels"),
        ({"enum": list(range(MAX_ENUM + 1))}, f"{MAX_ENUM}"),
        ({"description": "x" * (5 << 20)}, "bytes"),
    ],
)
def test_a_broken_schema_is_refused_by_name(schema: object, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        Guide.json(schema)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_whitespace", -1),
        ("max_whitespace", True),
        ("max_whitespace", 10**6),
        ("max_whitespace", "4"),
        ("on_unenforced", "ignore"),
        ("backend", "magic"),
    ],
)
def test_a_bad_field_is_refused_by_name(field: str, value: object) -> None:
    arguments: dict[str, Any] = {field: value}
    with pytest.raises(ValueError, match=field):
        Guide.json({}, **arguments)


class Model(pydantic.BaseModel):
    name: str
    age: int


@dataclasses.dataclass
class Data:
    name: str
    age: int


class Typed(TypedDict):
    name: str
    age: int


@pytest.mark.parametrize("kind", [Model, Data, Typed])
def test_python_types_become_schemas(kind: type) -> None:
    schema = Guide.json(kind).schema
    assert schema["required"] == ["name", "age"]
    assert list(schema["properties"]) == ["name", "age"]
    assert schema["properties"]["age"]["type"] == "integer"


def test_a_type_expression_is_a_schema_and_an_instance_is_not() -> None:
    assert Guide.json(list[Model]).schema["type"] == "array"
    nested_type = Guide.json(list[Typed] | None).schema
    assert nested_type["anyOf"][0]["type"] == "array"
    with pytest.raises(ValueError, match="schema"):
        Guide.json(Model(name="a", age=1))
    with pytest.raises(ValueError, match="schema"):
        Guide.json(type("Plain", (), {}))


def test_a_guide_is_a_value() -> None:
    text = '{"type":"object","properties":{"z":{},"a":{}}}'
    guide = Guide.json(text)
    assert guide == Guide.json(json.loads(text))
    assert hash(guide) == hash(Guide.json(json.loads(text)))
    assert list(guide.schema["properties"]) == ["z", "a"]  # the user's order
    assert guide != Guide.json(text, max_whitespace=0)
    assert Guide.json(True).schema == {} == Guide.json("true").schema
    assert Guide.json_object() == Guide.json({"type": "object"})


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"uniqueItems": False, "type": "array"}, {"type": "array"}),
        ({"uniqueItems": True, "type": "array"}, {"uniqueItems": True, "type": "array"}),
        ({"uniqueItems": True, "type": "string"}, {"type": "string"}),
        ({"uniqueItems": True}, {"uniqueItems": True}),
        ({"not": False}, {}),
        ({"not": {}}, {"not": {}}),
        ({"if": {"type": "null"}}, {}),
        ({"then": {"type": "null"}}, {}),
        ({"format": "password"}, {}),
        ({"format": "email"}, {"format": "email"}),
        ({"unevaluatedProperties": True}, {}),
        ({"x-guidance": {"lenient": True}, "not": {}}, {"not": {}}),
        # Names of properties and values are not keywords.
        ({"properties": {"not": {"const": 1}}}, {"properties": {"not": {"const": 1}}}),
        ({"const": {"if": 1}}, {"const": {"if": 1}}),
        ({"maxLength": 2.0, "minItems": 1.0}, {"maxLength": 2, "minItems": 1}),
        ({"items": {"minProperties": 1.0}}, {"items": {"minProperties": 1}}),
        (
            {"maximum": 2.0, "const": {"maxLength": 2.0}},
            {"maximum": 2.0, "const": {"maxLength": 2.0}},
        ),
        ({"items": {"anyOf": [{"not": False}]}}, {"items": {"anyOf": [{}]}}),
    ],
)
def test_only_keywords_that_bind_nothing_are_dropped(
    before: dict[str, Any], after: dict[str, Any]
) -> None:
    assert json.dumps(tidy(before)) == json.dumps(after)  # 2 and 2.0 are not the same text
