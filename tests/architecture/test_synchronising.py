"""The host waits for the device in named places only.

A step is launched before the one before it has reached the host, so one stray ``.item()`` on the
way serialises the engine, and on a CPU nothing shows it. Every call in the hot path that makes the
host wait is either listed here with its reason or a failure.
"""

import ast
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

HOT = (
    "runner.py",
    "batch.py",
    "state.py",
    "sampler.py",
    "noise.py",
    "logprobs.py",
    "processors.py",
    "sampling_state.py",
    "attention*.py",
)
LOADING = {"weights.py", "gguf_weights.py", "zoo.py", "tokenizer.py", "smollm2.py"}
WAITS = {"item", "tolist", "cpu", "numpy", "synchronize", "nonzero", "masked_select", "is_nonzero"}

# (file, function) -> why the host may wait, or does not wait, there.
ALLOWED: dict[tuple[str, str], str] = {
    ("engine/attention_sdpa.py", "SdpaBackend.plan"): "exact lengths, read on the CPU only",
    ("engine/batch.py", "_layout"): "lists of the host's own numpy counts",
    ("engine/logprobs.py", "TokenLogprobs.to_host"): "called once a step has been waited for",
    ("engine/processors.py", "ordered_head"): "on the CPU only: numpy sorts faster there",
    ("engine/processors.py", "rows_where"): "on the CPU only; a device keeps every row",
    ("engine/processors.py", "unpack_bitmask"): "on the CPU only: numpy unpacks faster there",
    ("engine/runner.py", "Pending._read"): "the place where a step's tokens reach the host",
    ("engine/sampler.py", "_argmax"): "on the CPU only: numpy is faster there",
    ("engine/sampler.py", "_draw_random"): "on the CPU only; a device keeps every row",
}

Found = dict[tuple[str, str], list[str]]


def hot_files(root: Path) -> list[Path]:
    engine = root / "engine"
    files = {file for pattern in HOT for file in engine.glob(pattern)}
    return sorted(files | {f for f in engine.glob("models/*.py") if f.name not in LOADING})


def calls(node: ast.AST, scope: str = "") -> Iterator[tuple[str, ast.Call]]:
    """Every call below a node with the dotted name of the function or class that holds it."""
    for child in ast.iter_child_nodes(node):
        inner = scope
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            inner = f"{scope}.{child.name}" if scope else child.name
        elif isinstance(child, ast.Call):
            yield scope, child
        yield from calls(child, inner)


def waits(call: ast.Call) -> bool:
    """Whether this call makes the host wait for the device (or may, by its name)."""
    if not isinstance(call.func, ast.Attribute):
        return False
    if call.func.attr != "to":
        return call.func.attr in WAITS
    to_cpu = any(isinstance(arg, ast.Constant) and arg.value == "cpu" for arg in call.args)
    return to_cpu and not any(keyword.arg == "non_blocking" for keyword in call.keywords)


def waiting_calls(root: Path, files: list[Path]) -> Found:
    """(file, function) -> the calls in it at which the host waits."""
    found: Found = {}
    for file in files:
        path = file.relative_to(root).as_posix()
        for function, call in calls(ast.parse(file.read_text())):
            if waits(call):
                line = f"{path}:{call.lineno}: {ast.unparse(call)}"
                found.setdefault((path, function), []).append(line)
    return found


def test_the_hot_path_waits_only_where_allowed(root: Path) -> None:
    found = waiting_calls(root, hot_files(root))
    assert [line for place, lines in found.items() if place not in ALLOWED for line in lines] == []
    assert ALLOWED.keys() - found.keys() == set(), "these entries are no longer needed"
    assert all(len(reason) > 10 for reason in ALLOWED.values())


@pytest.mark.parametrize(
    "code",
    [
        "x.item()",
        "x.tolist()",
        "x[0].cpu()",
        "x.sum().numpy()",
        "torch.cuda.synchronize()",
        "event.synchronize()",
        "torch.nonzero(x)",
        "x.to('cpu')",
    ],
)
def test_a_planted_wait_is_found(plant: Callable[[str, str], Path], code: str) -> None:
    root = plant("engine/runner.py", f"class R:\n    def go(self):\n        return [{code}]\n")
    plant("engine/models/llama.py", f"def forward():\n    def inner():\n        {code}\n")
    plant("engine/models/weights.py", code)  # loading may wait
    plant("engine/scheduler.py", code)  # the host's own lists
    plant("engine/batch.py", "x.to('cpu', non_blocking=True).to(device)")
    assert list(waiting_calls(root, hot_files(root))) == [
        ("engine/models/llama.py", "forward.inner"),
        ("engine/runner.py", "R.go"),
    ]
