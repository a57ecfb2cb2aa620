"""A short smoke test of the real model; `make proof` has the long ones.

Skipped where the model has not been fetched (`make model`).
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tightrope import LLM, Guide, SamplingParams
from tightrope.engine.models.smollm2 import find_smollm2
from tightrope.experiments import p01_identity
from tightrope.experiments.p03_schemas import is_valid
from tightrope.experiments.schemas import PERSON, SCHEMAS

pytestmark = pytest.mark.skipif(find_smollm2() is None, reason="run `make model` first")

GREEDY = SamplingParams(temperature=0, max_tokens=60)


@pytest.fixture(scope="module")
def smollm2() -> Iterator[LLM]:
    with LLM("smollm2-135m-instruct", max_model_len=512, speculation="forced") as llm:
        yield llm


def test_tokens_are_transformers() -> None:
    result = p01_identity.run(p01_identity.Config(num_prompts=4, num_tokens=12))
    assert result["holds"], result


def test_a_person_fits_the_schema_with_and_without_forced_drafts(smollm2: LLM) -> None:
    messages = [{"role": "user", "content": "Make up a person as JSON."}]
    guided = GREEDY.replace(guide=Guide.json(PERSON, max_whitespace=1))
    forced, plain = smollm2.chat([messages] * 2, [guided, guided.replace(speculation=False)])
    assert forced.outputs[0].finish_reason == "stop"
    assert is_valid(PERSON, forced.text)
    assert forced.outputs[0].token_ids == plain.outputs[0].token_ids
    assert forced.metrics.num_forwards < plain.metrics.num_forwards
    assert 0 < forced.metrics.num_accepted_tokens == forced.metrics.num_draft_tokens


def test_special_tokens_stay_out_of_strings(smollm2: LLM) -> None:
    _, schema = SCHEMAS["free text"]
    special = set(smollm2.get_tokenizer().all_special_ids)
    # Biased towards special tokens: only the end of the text may ever be one.
    pushed = dict.fromkeys(special, 30.0)
    params = [
        GREEDY.replace(guide=Guide.json(schema), logit_bias=pushed, max_tokens=30),
        GREEDY.replace(guide=Guide.json(schema), logit_bias=pushed, temperature=1.0, seed=3),
    ]
    for output in smollm2.generate(["Write:", "Write:"], params):
        ids = output.outputs[0].token_ids
        assert not special & set(ids[:-1])


def test_stream_and_seeds(smollm2: LLM) -> None:
    params = SamplingParams(temperature=1, seed=7, max_tokens=12)
    alone = smollm2.generate("The capital of France is", params)[0]
    streamed = "".join(d.text for d in smollm2.stream("The capital of France is", params))
    assert streamed == alone.text
    together = smollm2.generate(["Hello", "The capital of France is", "One, two,"], params)
    assert together[1].outputs[0].token_ids == alone.outputs[0].token_ids


def test_the_first_script_of_the_readme_runs_as_it_stands(tmp_path: Path) -> None:
    """As saved anywhere: it raises if the person does not validate."""
    readme = Path(__file__).resolve().parents[1] / "README.md"
    found = re.search(r"## A first script\n\n```python\n(.*?)```", readme.read_text("utf-8"), re.S)
    assert found is not None
    script = tmp_path / "first.py"
    script.write_text(found[1], encoding="utf-8")
    command = [sys.executable, str(script)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert re.match(r"name='.*' age=\d+ city='.*'\nGuideReport\(.*valid=True", done.stdout)
