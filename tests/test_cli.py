"""The command line: what it prints where, and its exit codes."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tightrope import LLM, SamplingParams
from tightrope.cli import main

SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}},
    "required": ["ok"],
    "additionalProperties": False,
}


@pytest.fixture
def schema(tmp_path: Path) -> str:
    path = tmp_path / "schema.json"
    path.write_text(json.dumps(SCHEMA))
    return str(path)


@pytest.fixture
def model(tiny_checkpoint: Path) -> list[str]:
    return ["--model", str(tiny_checkpoint), "--device", "cpu"]


def one_line(capsys: pytest.CaptureFixture[str]) -> str:
    """The error: one line on stderr, nothing on stdout."""
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("tightrope: error: ")
    assert captured.err.count("\n") == 1
    return captured.err


def run(arguments: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tightrope", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        **options,
    )


def test_help_does_not_load_the_engine() -> None:
    program = (
        "import sys\nfrom tightrope.cli import main\n"
        "try: main(['--help'])\nexcept SystemExit: pass\n"
        "assert 'torch' not in sys.modules and 'rich' not in sys.modules"
    )
    start = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "demo" in done.stdout
    assert time.perf_counter() - start < 5  # a fraction of a second on idle cores


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "required: COMMAND"),
        (["dance"], "invalid choice: 'dance'"),
        (["generate"], "one of the arguments --prompt --input is required"),
        (["generate", "--prompt", "a", "--input", "b"], "not allowed with"),
        (["generate", "--prompt", "a", "--top-k", "x"], "--top-k: invalid int value: 'x'"),
    ],
)
def test_bad_arguments(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    with pytest.raises(SystemExit) as raised:
        main(arguments)
    assert raised.value.code == 2
    assert message in one_line(capsys)


def test_bad_input_is_one_line(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    model: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    broken, wrong = tmp_path / "broken.json", tmp_path / "wrong.json"
    broken.write_text("{")
    wrong.write_text('{"type": "objekt"}')
    lines = tmp_path / "lines.jsonl"
    long = {"prompt_token_ids": [5] * 257}
    cases: list[tuple[list[str], str, str]] = [
        (["--prompt", "a", "--schema", "nowhere.json"], "", "nowhere.json: No such file"),
        (["--prompt", "a", "--schema", str(broken)], "", "broken.json is not JSON"),
        (["--prompt", "a", "--schema", str(wrong)], "", "wrong.json: "),
        (["--prompt", "a", "--model", "/nowhere"], "", "model '/nowhere' not found"),
        (["--prompt", "a", "--temperature", "-1"], "", "--prompt: temperature must be 0 or more"),
        (["--input", str(lines)], "\n\n", "lines.jsonl holds no requests"),
        (["--input", str(lines)], '{"prompt": "a"}\n{', "lines.jsonl:2 is not JSON"),
        (["--input", str(lines)], "[1]", "lines.jsonl:1 must be a JSON object"),
        (["--input", str(lines)], "{}", "lines.jsonl:1 must have one of prompt, messages"),
        (["--input", str(lines)], '{"prompt": "a", "top": 1}', "lines.jsonl:1: top is unknown"),
        (["--input", str(lines)], '{"prompt": "a", "schema": 3}', "lines.jsonl:1: "),
        (["--input", str(lines)], '{"prompt": "a", "top_p": 3}', "lines.jsonl:1: top_p must be"),
        (
            ["--input", str(lines)],
            '{"prompt": "a"}\n\n' + json.dumps(long),
            "lines.jsonl:3 has 257",
        ),
        (["--input", "-"], "", "stdin holds no requests"),
    ]
    for arguments, content, message in cases:
        lines.write_text(content)
        monkeypatch.setattr(sys, "stdin", io.StringIO(content))
        assert main(["generate", *model, *arguments]) == 2, arguments
        assert message in one_line(capsys)


def test_generate_prints_the_text(
    capsys: pytest.CaptureFixture[str], model: list[str], tiny_checkpoint: Path
) -> None:
    arguments = ["generate", *model, "--temperature", "0", "--max-tokens", "9"]
    assert main([*arguments, "--prompt", "hello", "--no-chat"]) == 0
    plain = capsys.readouterr()
    assert main([*arguments, "--prompt", "hello"]) == 0
    chat = capsys.readouterr()
    assert plain.err == chat.err == ""
    params = SamplingParams(temperature=0, max_tokens=9)
    with LLM(tiny_checkpoint, device="cpu") as llm:
        assert plain.out == llm.generate("hello", params)[0].text + "\n"
        messages = [{"role": "user", "content": "hello"}]
        assert chat.out == llm.chat(messages, params)[0].text + "\n"


def test_generate_by_a_schema_from_stdin(
    capsys: pytest.CaptureFixture[str],
    model: list[str],
    schema: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n"))
    arguments = ["generate", *model, "--prompt", "-", "--schema", schema, "--temperature", "0"]
    assert main(arguments) == 0
    captured = capsys.readouterr()
    assert list(json.loads(captured.out)) == ["ok"]
    assert captured.err == ""
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n"))
    assert main([*arguments, "--max-tokens", "2"]) == 1
    captured = capsys.readouterr()
    assert captured.err == (
        "tightrope: warning: --prompt: the text does not fit the schema: "
        "it was cut after 2 tokens\n"
    )


def test_jsonl_in_and_out(
    capsys: pytest.CaptureFixture[str], model: list[str], schema: str, tmp_path: Path
) -> None:
    requests = [
        {"id": "a", "prompt": "hello"},
        {"id": 7, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 60},
        {"prompt_token_ids": [5, 6], "schema": {"enum": ["x"]}},
        {"prompt": "hello", "seed": 4, "temperature": 1.5},
    ]
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join(json.dumps(request) for request in requests) + "\n\n")
    arguments = ["generate", *model, "--input", str(source), "--schema", schema]
    assert main([*arguments, "--temperature", "0", "--output", str(target)]) == 0
    assert capsys.readouterr().out == ""
    records = [json.loads(line) for line in target.read_text().splitlines()]
    assert [record.get("id") for record in records] == ["a", 7, None, None]
    assert [record["valid"] for record in records] == [True] * 4
    assert [record["finish_reason"] for record in records] == ["stop"] * 4
    assert records[2]["text"].strip() == '"x"'
    assert records[2]["num_prompt_tokens"] == 2
    assert list(json.loads(records[0]["text"])) == ["ok"]
    assert main([*arguments, "--temperature", "0"]) == 0
    again = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert again == records


def test_demo_prints_one_object(capsys: pytest.CaptureFixture[str], model: list[str]) -> None:
    assert main(["demo", *model, "--json", "--max-tokens", "150"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    result = json.loads(captured.out)
    assert list(result) == ["model", "rows"]
    assert result["model"] == model[1]
    plain, guided, forced = result["rows"]
    assert [row["name"] for row in result["rows"]] == ["plain", "guided", "guided+forced"]
    for row in result["rows"]:
        assert list(row) == [
            "name",
            "tokens",
            "tokens_per_s",
            "forwards_per_token",
            "accepted_share",
            "valid",
            "text",
        ]
        assert row["tokens_per_s"] > 0
    assert not plain["valid"]
    assert guided["text"] == forced["text"]
    assert (guided["forwards_per_token"], guided["accepted_share"]) == (1, None)
    assert forced["forwards_per_token"] < 0.9
    assert forced["accepted_share"] == 1


def test_demo_shows_texts_and_a_table(capsys: pytest.CaptureFixture[str], model: list[str]) -> None:
    assert main(["demo", *model, "--max-tokens", "30"]) == 0
    captured = capsys.readouterr()
    for word in ("plain", "guided+forced", '"name"', "tokens/s", "forwards/token", "accepted"):
        assert word in captured.out


def test_interrupts_and_closed_pipes_are_quiet(model: list[str]) -> None:
    program = (
        "import sys\nfrom tightrope import cli\n"
        "def stop(*_): raise KeyboardInterrupt\n"
        "cli._load = stop\n"
        "sys.exit(cli.main(['generate', '--prompt', 'a']))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "tightrope", "generate", *model, "--prompt", "a"]
    done = subprocess.run(
        command, stdout=writer, stderr=subprocess.PIPE, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, b"")


def test_the_module_runs_as_a_program() -> None:
    done = run(["generate", "--prompt", "a", "--schema", "nowhere.json"])
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "tightrope: error: nowhere.json: No such file or directory\n"
