"""What to speculate with: the engine-wide setting and the request's own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from .protocol import Proposer

NUM_SPECULATIVE_TOKENS = 8


def draft_length(value: object, name: str = "num_speculative_tokens") -> int:
    """A number of draft tokens, checked."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"speculation: {name} must be an integer of 0 or more, got {value!r}")
    return value


@dataclass(frozen=True)
class SpeculationConfig:
    """Proposers in order of preference (names, dotted paths or objects), the most draft tokens of
    one request in one step, and settings handed to the proposers."""

    proposers: tuple[str | Proposer, ...]
    num_speculative_tokens: int = NUM_SPECULATIVE_TOKENS
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @classmethod
    def parse(cls, value: object) -> SpeculationConfig | None:
        """Read ``LLM(speculation=...)``: None or False is off; a name, a proposer, a list of them,
        or a mapping with "proposers". Raises ValueError."""
        if value is None or value is False:
            return None
        if isinstance(value, SpeculationConfig):
            return value
        if isinstance(value, Mapping):
            settings = dict(cast("Mapping[str, Any]", value))
            if "proposers" not in settings:
                raise ValueError(f"speculation: a mapping needs 'proposers', got {value!r}")
            names = _names(settings.pop("proposers"))
            count = settings.pop("num_speculative_tokens", NUM_SPECULATIVE_TOKENS)
            return cls(names, draft_length(count), settings)
        return cls(_names(value))


def _names(value: object) -> tuple[str | Proposer, ...]:
    items = list(cast("Sequence[object]", value)) if isinstance(value, (list, tuple)) else [value]
    for item in items:
        is_name = isinstance(item, str) and item
        if not is_name and (isinstance(item, type) or not hasattr(item, "propose")):
            raise ValueError(
                "speculation must be None, a proposer's name, a proposer, a list of them, or a "
                f"mapping with 'proposers', got {item!r}"
            )
    if not items:
        raise ValueError("speculation: 'proposers' must not be empty")
    return tuple(cast("list[str | Proposer]", items))


def request_draft_length(setting: object, default: int) -> int:
    """Read ``SamplingParams.speculation``: None is as the engine says, False is off, an
    integer or {"num_speculative_tokens": k} is the most draft tokens a step. Raises ValueError."""
    if setting is None:
        return default
    if setting is False:
        return 0
    if isinstance(setting, Mapping):
        settings = cast("Mapping[str, object]", setting)
        unknown = [key for key in settings if key != "num_speculative_tokens"]
        if unknown:
            raise ValueError(
                f"speculation: a request may set num_speculative_tokens only, got {unknown[0]!r}"
            )
        return draft_length(settings.get("num_speculative_tokens", default))
    if isinstance(setting, int):
        return draft_length(setting, "of a request")
    raise ValueError(
        "speculation of a request must be None, False, an integer or "
        f"{{'num_speculative_tokens': k}}, got {setting!r}"
    )
