"""JSON schemas of Python types, through Pydantic where it is installed."""

from __future__ import annotations

import importlib.util
import sys
import typing
from types import UnionType
from typing import Any, NotRequired, Required, Union, cast, get_args, get_origin, is_typeddict


def schema_of(kind: object) -> object:
    """The JSON schema of a Pydantic model class, a dataclass, a TypedDict or a type expression.

    Raises ValueError for anything else.
    """
    if not isinstance(kind, type) and get_origin(kind) is None:
        raise ValueError(
            "schema must be a JSON schema (mapping, JSON text or true), a Pydantic model class, "
            f"a dataclass or a TypedDict, got {repr(kind)[:80]}"
        )
    if importlib.util.find_spec("pydantic") is None:
        raise ValueError("schema: Python types need pydantic (pip install pydantic)")
    from pydantic import TypeAdapter
    from pydantic.errors import PydanticUserError

    try:
        make = getattr(kind, "model_json_schema", None)
        if make is not None:
            return cast("object", make())
        adapter: TypeAdapter[object] = TypeAdapter(cast("type[object]", _readable(kind)))
        return adapter.json_schema()
    except PydanticUserError as error:
        raise ValueError(f"schema: {kind!r} has no JSON schema: {error.message}") from None


def _readable(kind: Any) -> Any:
    """Pydantic reads ``typing.TypedDict`` from Python 3.12 on; before, rebuild it as the one of
    typing_extensions, inside generics too."""
    if sys.version_info >= (3, 12):
        return kind
    if is_typeddict(kind):
        from typing_extensions import TypedDict

        fields: dict[str, Any] = {}
        for name, hint in typing.get_type_hints(kind, include_extras=True).items():
            bare = get_args(hint)[0] if get_origin(hint) in (Required, NotRequired) else hint
            presence: Any = Required if name in kind.__required_keys__ else NotRequired
            fields[name] = presence[_readable(bare)]
        made: Any = TypedDict
        rebuilt = made(kind.__name__, fields)
        rebuilt.__doc__ = kind.__doc__
        return rebuilt
    arguments = get_args(kind)
    readable = tuple(_readable(argument) for argument in arguments)
    if readable == arguments:
        return kind
    origin: Any = get_origin(kind)
    return Union[readable] if origin is UnionType else origin[readable]  # noqa: UP007
