"""The command line: ``tightrope demo | generate``.

Results go to stdout, everything else to stderr. Exit codes: 0 is success; 1, a text was cut before
it fitted its schema; 2, an error, told in one line; 130, interrupted. The engine is imported when a
command runs, so help and bad arguments answer at once.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TextIO, cast

if TYPE_CHECKING:
    from .engine.outputs import RequestOutput
    from .engine.params import SamplingParams
    from .guided import Guide, GuideReport
    from .llm import LLM

DEFAULT_MODEL = "smollm2-135m-instruct"


class _Parser(argparse.ArgumentParser):
    """Errors are one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"tightrope: error: {message} (see {self.prog} --help)\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    try:
        options = _parser().parse_args(argv)
        code: int = options.run(options)
        sys.stdout.flush()
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # Whoever read has seen enough. Python would complain once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except OSError as error:
        where = "" if error.filename is None else f"{error.filename}: "
        _tell(f"error: {where}{error.strerror or error}")
        return 2
    except Exception as error:
        _tell(f"error: {str(error) or type(error).__name__}")
        return 2
    return code


def _parser() -> argparse.ArgumentParser:
    from . import __version__

    parser = _Parser(
        prog="tightrope", description="Structured and speculative decoding of language models."
    )
    parser.add_argument("--version", action="version", version=f"tightrope {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    demo = commands.add_parser(
        "demo", help="write a person as JSON: plain, guided, guided with forced tokens"
    )
    demo.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    demo.add_argument("--max-tokens", type=int, default=128, metavar="N", help="default 128")
    demo.set_defaults(run=_demo)

    generate = commands.add_parser(
        "generate", help="generate text, JSON by a schema if one is given"
    )
    source = generate.add_mutually_exclusive_group(required=True)
    source.add_argument("--prompt", metavar="TEXT", help="the prompt; - reads it from stdin")
    source.add_argument(
        "--input",
        metavar="FILE",
        help="JSONL, one request a line: prompt, messages or prompt_token_ids, and optionally "
        "schema, id and sampling parameters of its own; - is stdin",
    )
    generate.add_argument("--output", metavar="FILE", help="write JSONL here; - is stdout")
    generate.add_argument("--schema", metavar="FILE", help="JSON schema that the text must fit")
    generate.add_argument(
        "--chat",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="use the model's chat template for prompts (default: if it has one)",
    )
    generate.add_argument("--temperature", type=float, metavar="T", help="0 is greedy")
    generate.add_argument("--top-p", type=float, metavar="P")
    generate.add_argument("--top-k", type=int, metavar="K")
    generate.add_argument("--max-tokens", type=int, default=512, metavar="N", help="default 512")
    generate.add_argument("--seed", type=int, metavar="N")
    generate.add_argument(
        "--stop", action="append", metavar="TEXT", help="ends the text; repeatable"
    )
    generate.set_defaults(run=_generate)

    for command in (demo, generate):
        command.add_argument(
            "--model", default=DEFAULT_MODEL, help="name, folder, .gguf file or Hub id"
        )
        command.add_argument("--device", default="auto", help="auto, cpu or cuda")
        command.add_argument("--dtype", default="auto", help="auto, float32, bfloat16 or float16")
        command.add_argument("--max-model-len", type=int, metavar="N")
    return parser


def _load(options: argparse.Namespace) -> LLM:
    from .llm import LLM

    return LLM(
        options.model,
        device=options.device,
        dtype=options.dtype,
        max_model_len=options.max_model_len,
        speculation=["forced"],
    )


def _demo(options: argparse.Namespace) -> int:
    from .demo import demo

    with _load(options) as llm:
        demo(llm, options.model, max_tokens=options.max_tokens, as_json=options.json)
    return 0


# --- generate ---


def _generate(options: argparse.Namespace) -> int:

    # Everything that can be wrong in files is found before the model is loaded.
    guide = None
    if options.schema is not None:
        guide = _guide(_read_json(Path(options.schema)), options.schema)
    if options.prompt is not None:
        text = sys.stdin.read().removesuffix("\n") if options.prompt == "-" else options.prompt
        lines: list[dict[str, Any]] = [{"prompt": text}]
        names = ["--prompt"]
    else:
        lines, names = _read_requests(options.input)
    guides: list[Guide | None] = [
        _guide(line["schema"], name) if line.get("schema") is not None else guide
        for line, name in zip(lines, names, strict=True)
    ]
    with ExitStack() as stack:
        llm = stack.enter_context(_load(options))
        params = [
            _line_params(llm, options, line, guide, name)
            for line, guide, name in zip(lines, guides, names, strict=True)
        ]
        prompts = [_prompt(llm, options.chat, line) for line in lines]
        if options.prompt is not None and options.output is None:
            return _print_stream(llm, prompts[0], params[0])
        try:
            outputs = llm.generate(prompts, params)
        except ValueError as error:  # say where in the file, not which of the prompts
            place = re.compile(r"prompts\[(\d+)\]")
            message = place.sub(lambda found: names[int(found[1])], str(error))
            raise ValueError(message) from error
        file: TextIO = sys.stdout
        if options.output not in (None, "-"):
            file = stack.enter_context(open(options.output, "w", encoding="utf-8"))
        for line, output in zip(lines, outputs, strict=True):
            print(json.dumps(_record(line, output), ensure_ascii=False), file=file)
    return _exit_code(outputs, names)


def _print_stream(llm: LLM, prompt: Any, params: SamplingParams) -> int:
    output: RequestOutput | None = None
    for delta in llm.stream(prompt, params):
        print(delta.text, end="", flush=True)
        output = delta.output
    print()
    assert output is not None
    return _exit_code([output], ["--prompt"])


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error


def _guide(schema: Any, where: str) -> Guide:
    from .guided import Guide

    try:
        return Guide.json(schema)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def _read_requests(name: str) -> tuple[list[dict[str, Any]], list[str]]:
    """The objects of a JSONL file, each with its place in it."""
    text = sys.stdin.read() if name == "-" else Path(name).read_text(encoding="utf-8")
    shown = "stdin" if name == "-" else name
    lines: list[dict[str, Any]] = []
    names: list[str] = []
    for number, raw in enumerate(text.splitlines(), start=1):
        where = f"{shown}:{number}"
        if not raw.strip():
            continue
        try:
            line: Any = json.loads(raw)
        except ValueError as error:
            raise ValueError(f"{where} is not JSON: {error}") from error
        if not isinstance(line, dict):
            raise ValueError(f"{where} must be a JSON object, got {raw.strip()[:60]}")
        _check_fields(cast("dict[str, Any]", line), where)
        lines.append(cast("dict[str, Any]", line))
        names.append(where)
    if not lines:
        raise ValueError(f"{shown} holds no requests")
    return lines, names


_PROMPT_FIELDS = ("prompt", "messages", "prompt_token_ids")
_SAMPLING_FIELDS = ("temperature", "top_p", "top_k", "max_tokens", "seed", "stop")


def _check_fields(line: dict[str, Any], where: str) -> None:
    given = [name for name in _PROMPT_FIELDS if line.get(name) is not None]
    if len(given) != 1:
        raise ValueError(f"{where} must have one of {', '.join(_PROMPT_FIELDS)}, got {given}")
    allowed = (*_PROMPT_FIELDS, *_SAMPLING_FIELDS, "schema", "id")
    unknown = [name for name in line if name not in allowed]
    if unknown:
        raise ValueError(f"{where}: {unknown[0]} is unknown; {', '.join(allowed)} are allowed")


def _line_params(
    llm: LLM, options: argparse.Namespace, line: dict[str, Any], guide: Guide | None, where: str
) -> SamplingParams:
    changes: dict[str, Any] = {"guide": guide}
    for name in _SAMPLING_FIELDS:
        value = line.get(name)
        if value is None:
            value = getattr(options, name)
        if value is not None:
            changes[name] = value
    try:
        return llm.get_default_params().replace(**changes)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def _prompt(llm: LLM, chat: bool | None, line: dict[str, Any]) -> dict[str, Any]:
    """A prompt as `LLM.generate` takes it."""
    if line.get("prompt") is None:
        return {name: line[name] for name in _PROMPT_FIELDS if line.get(name) is not None}
    if llm.has_chat_template if chat is None else chat:
        return {"messages": [{"role": "user", "content": line["prompt"]}]}
    return {"prompt": line["prompt"]}


def _record(line: dict[str, Any], output: RequestOutput) -> dict[str, Any]:
    """One line of JSONL output."""
    completion = output.outputs[0]
    record: dict[str, Any] = {} if line.get("id") is None else {"id": line["id"]}
    record |= {
        "text": completion.text,
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
        "num_prompt_tokens": len(output.prompt_token_ids),
        "num_output_tokens": len(completion.token_ids),
    }
    if completion.guide is not None:
        record["valid"] = completion.guide.valid is True
    return record


def _exit_code(outputs: Sequence[RequestOutput], names: Sequence[str]) -> int:
    """Tell what went wrong with single requests, a line each."""
    code = 0
    for output, name in zip(outputs, names, strict=True):
        completion = output.outputs[0]
        guide: GuideReport | None = completion.guide
        if completion.finish_reason == "error":
            code = 2
            _tell(f"error: {name}: {completion.stop_reason}")
        elif guide is not None and guide.valid is not True:
            code = max(code, 1)
            why = guide.error or f"it was cut after {len(completion.token_ids)} tokens"
            _tell(f"warning: {name}: the text does not fit the schema: {why}")
    return code


def _tell(message: str) -> None:
    print("tightrope:", " ".join(message.split()), file=sys.stderr)
