"""Proposers by name. A proposer is one module and one line here, or any class by dotted path."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from typing import Any, cast

from ..protocol import Proposer
from .forced import ForcedProposer

PROPOSERS: Mapping[str, type[Proposer]] = {"forced": ForcedProposer}


def find_proposer(name: str) -> type[Proposer]:
    """The class behind a name of `PROPOSERS` or a path "package.module:Class" (or with a dot).

    Raises ValueError if there is none.
    """
    if name in PROPOSERS:
        return PROPOSERS[name]
    known = f"one of {', '.join(sorted(PROPOSERS))}, or a path 'package.module:Class'"
    module_name, colon, class_name = name.partition(":")
    if not colon:
        module_name, _, class_name = name.rpartition(".")
    if not module_name or not class_name:
        raise ValueError(f"speculation: a proposer must be {known}, got {name!r}")
    try:
        found: Any = importlib.import_module(module_name)
        for part in class_name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"speculation: a proposer must be {known}; {name!r} cannot be imported: {error}"
        ) from error
    if not isinstance(found, type) or not callable(getattr(found, "propose", None)):
        raise ValueError(f"speculation: {name!r} is not a class with a propose method")
    return cast("type[Proposer]", found)


def make_proposers(names: tuple[str | Proposer, ...], options: Mapping[str, Any]) -> list[Proposer]:
    """Build proposers; each option goes to every class whose constructor has a parameter of that
    name. Raises ValueError for an option that none takes."""
    made: list[Proposer] = []
    taken: set[str] = set()
    for name in names:
        if not isinstance(name, str):
            made.append(name)
            continue
        kind = find_proposer(name)
        parameters = inspect.signature(kind).parameters
        own = {key: value for key, value in options.items() if key in parameters}
        taken |= own.keys()
        made.append(kind(**own))
    unknown = sorted(set(options) - taken)
    if unknown:
        raise ValueError(
            f"speculation: unknown setting {unknown[0]!r}; allowed are proposers, "
            "num_speculative_tokens and the settings of the chosen proposers"
        )
    return made
