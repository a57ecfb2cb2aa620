"""``tightrope demo``: one person as JSON at temperature 0, plain, guided, and with forced tokens.

The text is streamed as it comes; green pieces are several tokens of one target forward, accepted
drafts among them. Then a table, or everything as one JSON object.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from .engine.params import SamplingParams
from .guided import Guide

if TYPE_CHECKING:
    from .engine.outputs import RequestOutput
    from .llm import LLM

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "occupation": {"enum": ["doctor", "teacher", "engineer", "farmer"]},
        "email": {"type": "string", "pattern": "^[a-z.]{1,20}@example\\.com$"},
        "address": {
            "type": "object",
            "properties": {
                "street": {"type": "string", "maxLength": 40},
                "city": {"type": "string", "maxLength": 30},
                "postal_code": {"type": "string", "pattern": "^[0-9]{5}$"},
            },
            "required": ["street", "city", "postal_code"],
            "additionalProperties": False,
        },
        "languages": {"type": "array", "items": {"type": "string", "maxLength": 20}, "maxItems": 3},
    },
    "required": ["name", "age", "occupation", "email", "address", "languages"],
    "additionalProperties": False,
}
PERSON_PROMPT = (
    "Write a person as JSON with name, age, occupation, email, address (street, city, "
    "postal_code) and languages."
)


def demo(llm: LLM, model: str, *, max_tokens: int, as_json: bool) -> None:
    """Run the three and print. ``model`` is the name it was asked for by."""
    guide = Guide.json(PERSON)
    base = SamplingParams(temperature=0, max_tokens=max_tokens, speculation=False)
    runs = {
        "plain": base,
        "guided": base.replace(guide=guide),
        "guided+forced": base.replace(guide=guide, speculation=None),
    }
    console = None if as_json else Console(highlight=False)
    rows: list[dict[str, Any]] = []
    message = {"role": "user", "content": PERSON_PROMPT}
    prompt: Any = [message] if llm.has_chat_template else PERSON_PROMPT
    if console is not None:
        console.print(f"[bold]{llm.name}[/] on {llm.device}: {PERSON_PROMPT}")
    # Every run then finds the prompt in the cache and the grammar compiled.
    list(llm.stream(prompt, base.replace(guide=guide, max_tokens=2)))
    for name, params in runs.items():
        rows.append(_demo_row(name, guide, _show(llm, prompt, params, name, console)))
    if console is None:
        print(json.dumps({"model": model, "rows": rows}, ensure_ascii=False))
    else:
        console.print(_demo_table(rows))


def _show(
    llm: LLM, prompt: Any, params: SamplingParams, name: str, console: Console | None
) -> RequestOutput:
    """Run one request, streaming its text to the console; several tokens at once are green."""
    output: RequestOutput | None = None
    if console is not None:
        console.rule(name)
    for delta in llm.stream(prompt, params):
        if console is not None:
            style = "bold green" if len(delta.token_ids) > 1 else ""
            console.print(Text(delta.text, style), end="", soft_wrap=True)
        output = delta.output
    if console is not None:
        console.print()
    assert output is not None
    if output.outputs[0].finish_reason == "error":
        raise RuntimeError(str(output.outputs[0].stop_reason))
    return output


def _demo_row(name: str, guide: Guide, output: RequestOutput) -> dict[str, Any]:
    completion, metrics = output.outputs[0], output.metrics
    finished = completion.finish_reason == "stop"
    return {
        "name": name,
        "tokens": metrics.num_output_tokens,
        "tokens_per_s": metrics.num_output_tokens / max(metrics.latency, 1e-9),
        "forwards_per_token": metrics.forwards_per_token,
        "accepted_share": metrics.acceptance,
        "valid": finished and guide.validate(completion.text)[0] is True,
        "text": completion.text,
    }


def _demo_table(rows: Sequence[dict[str, Any]]) -> Any:
    table = Table(title="one person as JSON, temperature 0")
    table.add_column("")
    for heading in ("tokens", "tokens/s", "forwards/token", "accepted", "valid"):
        table.add_column(heading, justify="right")
    for row in rows:
        share = row["accepted_share"]
        table.add_row(
            row["name"],
            str(row["tokens"]),
            f"{row['tokens_per_s']:.1f}",
            f"{row['forwards_per_token']:.2f}",
            "-" if share is None else f"{share:.0%}",
            "yes" if row["valid"] else "no",
        )
    return table
