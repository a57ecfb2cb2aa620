"""What does the host cost beside the model, how much memory, how long to load?

SmolLM2, float32, two CPU cores. Expected: over 300 steps with 64 running requests and no prefix
ever shared, the prefix cache takes less than 1 % of the step and scheduling plus input preparation
less than 1 ms; a process with a 4k-token cache peaks at no more than 1.5 GB; a fresh process has
the model loaded within 6 s (imports included, the file in the page cache).
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

from ..engine.models.smollm2 import ensure_smollm2
from ..engine.params import SamplingParams
from ..llm import LLM
from .records import conclude, folder_argument, write

_LOAD = """
import time
began = time.perf_counter()
import sys
from tightrope import LLM
llm = LLM(sys.argv[1])
print(time.perf_counter() - began)
"""

_MEMORY = """
import json, sys
from tightrope import LLM, SamplingParams
llm = LLM(sys.argv[1], max_model_len=4096, kv_cache_memory=4096 * 46080)
ids = [100 + i % 40000 for i in range(4000)]
out = llm.generate([ids], SamplingParams(temperature=0, max_tokens=90, ignore_eos=True))
status = open("/proc/self/status").read().split()
tokens = llm.config.num_blocks * llm.config.block_size
peak = int(status[status.index("VmHWM:") + 1])
filled = 4000 + len(out[0].outputs[0].token_ids)
print(json.dumps({"peak_kib": peak, "cache_tokens": tokens, "filled": filled}))
"""


@dataclass(frozen=True)
class Config:
    requests: int = 64
    steps: int = 300
    loads: int = 3


def step_costs(config: Config) -> dict[str, float]:
    """Host milliseconds a step, by the timers inside it, while all requests decode."""
    prompts = [[1000 + 37 * i + j for j in range(20)] for i in range(config.requests)]
    params = SamplingParams(temperature=0, max_tokens=config.steps + 1, ignore_eos=True)
    with LLM(
        ensure_smollm2(),
        dtype="float32",
        max_model_len=512,
        max_num_seqs=config.requests,
        max_num_batched_tokens=2048,
        kv_cache_memory=1 << 31,
    ) as llm:
        before = llm.stats()
        llm.generate(prompts, params, progress=False)
        after = llm.stats()
    spent = {k: after[k] - before[k] for k in after if k.endswith("_seconds") or k == "steps"}
    steps = spent["steps"]
    phases = ("schedule", "forward", "mask", "sample", "commit")
    whole = sum(spent[f"{phase}_seconds"] for phase in phases)
    return {
        "steps": steps,
        "step_ms": whole / steps * 1e3,
        "schedule_ms": spent["schedule_seconds"] / steps * 1e3,
        "prepare_ms": spent["prepare_seconds"] / steps * 1e3,
        "commit_ms": spent["commit_seconds"] / steps * 1e3,
        "prefix_cache_hits": float(after["prefix_cache_hits"]),
        "prefix_cache_share": spent["prefix_cache_seconds"] / whole,
    }


def _fresh(script: str) -> str:
    command = [sys.executable, "-c", script, str(ensure_smollm2())]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def run(config: Config) -> dict[str, Any]:
    """Loads in fresh processes (best and all), peak memory, and the step's host costs."""
    loads = [float(_fresh(_LOAD)) for _ in range(config.loads)]
    result: dict[str, Any] = {
        "load_seconds": loads,
        **json.loads(_fresh(_MEMORY)),
        **step_costs(config),
    }
    result["holds"] = (
        min(loads) <= 6
        and result["peak_kib"] * 1024 <= 1.5e9
        and result["schedule_ms"] + result["prepare_ms"] < 1
        and result["prefix_cache_share"] < 0.01
    )
    return result


def main() -> None:
    conclude(write(folder_argument(__doc__), "p04_costs", Config(), run(Config())))


if __name__ == "__main__":
    main()
