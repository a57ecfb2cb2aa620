"""Thirty schemas of many shapes with a prompt each: what the proofs of guided output run on.

Every one is written for this project. Free strings carry a ``maxLength`` where a small model at
temperature 1 would otherwise ramble on until ``max_tokens``; three do not, on purpose.
"""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]


def _object(properties: Schema, *, required: list[str] | None = None, **extra: Any) -> Schema:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties) if required is None else required,
        "additionalProperties": False,
        **extra,
    }


def _text(most: int = 24, **extra: Any) -> Schema:
    return {"type": "string", "maxLength": most, **extra}


def _integer(low: int, high: int) -> Schema:
    return {"type": "integer", "minimum": low, "maximum": high}


def _array(items: Schema, low: int, high: int) -> Schema:
    return {"type": "array", "items": items, "minItems": low, "maxItems": high}


PERSON: Schema = _object({"name": _text(30), "age": _integer(0, 120), "city": _text(30)})

_TREE: Schema = {
    "$defs": {
        "leaf": _object({"value": _integer(0, 9)}),
        "node": _object(
            {"value": _integer(0, 9), "children": _array({"$ref": "#/$defs/leaf"}, 0, 2)}
        ),
    },
    "$ref": "#/$defs/node",
}

SCHEMAS: dict[str, tuple[str, Schema]] = {
    "person": ("Make up a person as JSON.", PERSON),
    "boolean": ("Is the sky blue? Answer in JSON.", {"type": "boolean"}),
    "integer": ("Pick a number from 1 to 50.", _integer(1, 50)),
    "number": ("What is pi, roughly?", {"type": "number", "minimum": 0, "maximum": 10}),
    "enum": ("Name a primary colour.", {"enum": ["red", "yellow", "blue"]}),
    "enum mixed": ("Pick any.", {"enum": [1, "two", None, True, {"three": 3}]}),
    "const": ("Say it.", {"const": {"status": "ok", "code": 200}}),
    "null or text": ("A nickname, or nothing.", {"type": ["null", "string"], "maxLength": 20}),
    "numbers": ("List some numbers.", _array(_integer(0, 99), 3, 8)),
    "strings": ("List three fruits.", _array(_text(12, minLength=3), 3, 3)),
    "matrix": ("A small matrix.", _array(_array(_integer(-9, 9), 2, 2), 2, 2)),
    "tuple": (
        "A city and its latitude.",
        {
            "type": "array",
            "prefixItems": [_text(20), {"type": "number"}],
            "items": False,
            "minItems": 2,
        },
    ),
    "pattern": ("A date in 2024.", {"type": "string", "pattern": r"^2024-[01]\d-[0-3]\d$"}),
    "date": ("Today's date.", {"type": "string", "format": "date"}),
    "uuid": ("A fresh id.", {"type": "string", "format": "uuid"}),
    "email": (
        "A made up email address.",
        _object({"email": _text(40, pattern=r"^[a-z]{1,12}@[a-z]{1,10}\.com$")}),
    ),
    "optional": (
        "Describe a book.",
        _object(
            {"title": _text(40), "year": _integer(1500, 2030), "isbn": _text(13)},
            required=["title"],
        ),
    ),
    "any of": (
        "A contact: a phone or an email.",
        {"anyOf": [_object({"phone": _text(15)}), _object({"email": _text(30)})]},
    ),
    "nested": (
        "An order.",
        _object(
            {
                "id": _integer(1, 9999),
                "customer": _object({"name": _text(20), "vip": {"type": "boolean"}}),
                "items": _array(_object({"sku": _text(8), "count": _integer(1, 9)}), 1, 2),
            }
        ),
    ),
    "refs": (
        "A line from one point to another.",
        {
            "$defs": {"point": _object({"x": _integer(-99, 99), "y": _integer(-99, 99)})},
            **_object({"from": {"$ref": "#/$defs/point"}, "to": {"$ref": "#/$defs/point"}}),
        },
    ),
    "tree": ("A small tree.", _TREE),
    "map": (
        "Ages by name.",
        {"type": "object", "additionalProperties": _integer(0, 120), "maxProperties": 3},
    ),
    "empty object": ("Nothing at all.", _object({})),
    "unicode keys": ("Wetter in Köln.", _object({"Größe": _integer(1, 9), "天气": _text(10)})),
    "quotes": ("Quote a poet.", _object({'the "quote"': _text(60)})),
    "long choice": (
        "What is the weather like?",
        {"enum": [f"{a} and {b}" for a in ("sunny", "cold", "wet") for b in ("calm", "windy")]},
    ),
    "tool call": (
        "Look up the weather in Paris.",
        _object(
            {
                "tool": {"const": "get_weather"},
                "arguments": _object(
                    {"city": _text(20), "unit": {"enum": ["celsius", "fahrenheit"]}}
                ),
            }
        ),
    ),
    "free text": ("One sentence on the sea.", _object({"sentence": {"type": "string"}})),
    "free list": ("Some animals.", {"type": "array", "items": {"type": "string"}}),
    "review": (
        "Review a film in one line.",
        _object({"stars": _integer(1, 5), "text": {"type": "string"}}),
    ),
}
"""Name -> (prompt, schema)."""
