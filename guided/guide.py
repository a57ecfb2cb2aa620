"""`Guide`: what a request's text must look like, as a small frozen value.

It is checked when it is made, so that a broken schema fails where the user wrote it, and it is
hashable, so that it is the key of the grammar cache. Whitespace is bounded by default: a model that
likes newlines would otherwise stay legally in front of a closing brace until ``max_tokens``.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

from . import schema as json_schema
from . import validation
from .protocol import GrammarSpec

Backend = Literal["auto", "llguidance"]
OnUnenforced = Literal["report", "refuse"]
MAX_WHITESPACE = 1024


@dataclass(frozen=True)
class Guide:
    """A constraint on generated text; make one with `Guide.json` or `Guide.json_object`.

    Attributes:
        kind: the language of ``source``; "json" is a JSON schema.
        source: the schema as JSON text, keys in the user's order.
        max_whitespace: longest run of optional whitespace between JSON tokens; 0 is compact.
        on_unenforced: what to do with keywords that cannot be enforced while decoding: "report"
            names them in the result and validates the finished text, "refuse" raises.
        backend: "auto" or the name of a grammar backend.
    """

    kind: Literal["json"]
    source: str
    max_whitespace: int = 16
    on_unenforced: OnUnenforced = "report"
    backend: Backend = "auto"

    def __post_init__(self) -> None:
        for name, allowed in (
            ("kind", ("json",)),
            ("on_unenforced", get_args(OnUnenforced)),
            ("backend", get_args(Backend)),
        ):
            value = getattr(self, name)
            if value not in allowed:
                raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {value!r}")
        limit = cast("object", self.max_whitespace)
        if (
            isinstance(limit, bool)
            or not isinstance(limit, int)
            or not 0 <= limit <= MAX_WHITESPACE
        ):
            raise ValueError(
                f"max_whitespace must be an integer in [0, {MAX_WHITESPACE}], got {limit!r}"
            )

    @classmethod
    def json(
        cls,
        schema: object,
        *,
        max_whitespace: int = 16,
        on_unenforced: OnUnenforced = "report",
        backend: Backend = "auto",
    ) -> Guide:
        """JSON that fits a schema.

        ``schema``: a mapping, JSON text, ``True`` (any JSON value), a Pydantic model class, a
        dataclass, a TypedDict or a type expression such as ``list[Model]``. Without ``$schema`` it
        is read as draft 2020-12. Raises ValueError naming the place of a fault in the schema.
        """
        source = json.dumps(json_schema.load(schema), ensure_ascii=False)
        return cls("json", source, max_whitespace, on_unenforced, backend)

    @classmethod
    def json_object(
        cls,
        *,
        max_whitespace: int = 16,
        backend: Backend = "auto",
    ) -> Guide:
        """Any JSON object."""
        return cls.json({"type": "object"}, max_whitespace=max_whitespace, backend=backend)

    @property
    def schema(self) -> dict[str, Any]:
        """The JSON schema."""
        return json.loads(self.source)

    def spec(self, *, lenient: bool = False) -> GrammarSpec:
        """What a backend compiles: the schema without the keywords that bind nothing."""
        source = json.dumps(json_schema.tidy(self.schema), ensure_ascii=False)
        return GrammarSpec(self.kind, source, self.max_whitespace, lenient)

    def validate(
        self, text: str, *, unenforced: tuple[str, ...] = ()
    ) -> tuple[bool | None, str | None]:
        """Whether finished text obeys the guide, and if not, why.

        Takes a bounded time; the verdict is None where none can be had. Formats count only if they
        are among the ``unenforced`` keywords.
        """
        return validation.validate(self.source, text, formats="format" in unenforced)


@dataclass(frozen=True)
class GuideReport:
    """How a request's guide was enforced; ``CompletionOutput.guide``.

    Attributes:
        backend: the grammar backend that made the masks.
        compile_seconds: time of the compilation, also when this request found it in the cache.
        cached: whether the compiled grammar was there already.
        unenforced: schema keywords that the masks did not enforce.
        valid: whether the finished text obeys the whole schema; None if the text was cut short
            (any ``finish_reason`` but "stop") or if no validator can tell.
        error: what is wrong with the text, or why the guide could not be used.
    """

    backend: str
    compile_seconds: float
    cached: bool
    unenforced: tuple[str, ...] = ()
    valid: bool | None = None
    error: str | None = None
