"""`LLM`: what calls mean, what they refuse, and that one engine serves many callers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from tightrope import LLM, Guide, RequestOutput, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
CONTEXT = 256


@pytest.fixture(scope="module")
def tokenizer(tiny_checkpoint: Path) -> Tokenizer:
    return Tokenizer.from_file(str(tiny_checkpoint / "tokenizer.json"))


def streamed(llm: LLM, prompt: Any, params: SamplingParams) -> RequestOutput:
    """The result that comes with a stream's last delta."""
    *_, last = llm.stream(prompt, params)
    assert last.output is not None
    return last.output


# --- prompts and results ---


def test_results_come_in_prompt_order(llm: LLM, tokenizer: Tokenizer) -> None:
    prompts = ["a", "hello", "the end", "xyz"] * 5  # more than run at once
    lengths = [3, 20, 5, 9] * 5
    params = [GREEDY.replace(max_tokens=length) for length in lengths]
    outputs = llm.generate(prompts, params)
    assert [output.prompt for output in outputs] == prompts
    for output, length in zip(outputs, lengths, strict=True):
        (completion,) = output.outputs
        assert output.finished
        assert completion.finish_reason == "length"
        assert len(completion.token_ids) == length
        assert completion.text == tokenizer.decode(completion.token_ids)
        assert output.metrics.num_output_tokens == length
    assert outputs[0].outputs[0].token_ids[:3] == outputs[8].outputs[0].token_ids[:3]
    assert outputs[1].outputs[0].token_ids[:3] != outputs[3].outputs[0].token_ids[:3]


def test_prompt_forms_are_the_same_prompt(llm: LLM, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("hello").ids  # with the begin token in front
    assert ids[0] == 0
    forms: list[Any] = ["hello", ids, {"prompt_token_ids": ids}, {"prompt": "hello"}]
    alone = [llm.generate(form, GREEDY)[0] for form in forms]
    together = llm.generate(forms, GREEDY)
    for output in [*alone, *together]:
        assert output.prompt_token_ids == ids
        assert output.outputs[0].token_ids == alone[0].outputs[0].token_ids
    assert [output.prompt for output in together] == ["hello", None, None, "hello"]
    assert llm.generate([], GREEDY) == []


def test_without_params_the_generation_config_decides(llm: LLM) -> None:
    params = llm.get_default_params()
    assert (params.temperature, params.top_p, params.max_tokens) == (0.7, 0.9, None)
    (output,) = llm.generate([5] * (CONTEXT - 10))
    assert len(output.outputs[0].token_ids) <= 10


def test_a_prompt_of_the_context_length_gets_no_token(llm: LLM) -> None:
    (output,) = llm.generate([5] * CONTEXT, GREEDY)
    (completion,) = output.outputs
    assert (completion.token_ids, completion.text) == ([], "")
    assert (completion.finish_reason, output.finished) == ("length", True)
    assert streamed(llm, [5] * CONTEXT, GREEDY).text == ""


@pytest.mark.parametrize(
    ("prompts", "params", "message"),
    [
        (["a", [5] * (CONTEXT + 1)], GREEDY, r"prompts\[1\] has 257 tokens.*max_model_len=256"),
        (["a", []], GREEDY, r"prompts\[1\] is empty"),
        ({"prompt_token_ids": []}, GREEDY, "prompt is empty"),
        (["a", [1, 272]], GREEDY, r"prompts\[1\].*0 to 271, got 272 at index 1"),
        ([1, -1], GREEDY, "prompt.*got -1 at index 1"),
        ([1, "x"], GREEDY, "prompt must hold token ids, got 'x' at index 1"),
        (["a", 7], GREEDY, r"prompts\[1\] must be a text, a list"),
        (7, GREEDY, "prompts must be a text, a list"),
        ({"text": "a"}, GREEDY, "prompt must have the key prompt,.*text"),
        (
            {"prompt_token_ids": "a"},
            GREEDY,
            "prompt_token_ids must be a list of token ids, got 'a'",
        ),
        ({"prompt": [5]}, GREEDY, r"prompt must be a text, got \[5\]"),
        (["a", "b\ud800"], GREEDY, r"prompts\[1\] must hold text that UTF-8.*at index 1"),
        ({"prompt": "\udc00"}, GREEDY, "prompt must hold text that UTF-8.*at index 0"),
        (["a", "b"], [GREEDY], "one for each of 2 prompts, got 1"),
        (["a", "b"], [GREEDY, None], r"params\[1\] must be SamplingParams, got None"),
        ("a", {"temperature": 0}, "params must be SamplingParams"),
        ("a", GREEDY.replace(stop_token_ids=[272]), "stop_token_ids.*0 to 271, got 272"),
        (["a", "b"], [GREEDY, GREEDY.replace(guide="x")], "guide must be a Guide"),
    ],
)
def test_every_error_comes_before_any_work(
    llm: LLM, prompts: Any, params: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        llm.generate(prompts, params)
    stats = llm.stats()
    assert (stats["running"], stats["waiting"]) == (0, 0)


# --- chat ---


def test_chat_writes_special_tokens_once(llm: LLM) -> None:
    messages = [{"role": "user", "content": "hi"}]
    (output,) = llm.chat(messages, GREEDY)
    assert output.prompt == ("<|endoftext|><|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    ids = output.prompt_token_ids
    assert (ids.count(0), ids.count(1), ids.count(2)) == (1, 2, 1)
    both = llm.chat([messages, messages], GREEDY)
    assert [o.outputs[0].token_ids for o in both] == [output.outputs[0].token_ids] * 2
    (same,) = llm.generate({"messages": messages}, GREEDY)
    assert same.outputs[0].token_ids == output.outputs[0].token_ids
    # A rendered chat given as text does not get a second begin token.
    (same,) = llm.generate(output.prompt, GREEDY)
    assert same.prompt_token_ids == ids
    assert streamed(llm, messages, GREEDY).prompt_token_ids == ids


def test_chat_continues_the_final_message(llm: LLM) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Sure, "}]
    (output,) = llm.chat(messages, GREEDY, continue_final_message=True)
    assert output.prompt is not None
    assert output.prompt.rstrip().endswith("assistant\nSure,")
    (output,) = llm.chat(messages, GREEDY, add_generation_prompt=False)
    assert output.prompt is not None
    assert output.prompt.endswith("Sure, <|im_end|>\n")


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "messages is empty"),
        ([[{"role": "user", "content": "a"}], []], r"messages\[1\] is empty"),
        ([{"content": "a"}], r"messages\[0\] must be a mapping like"),
        ([{"role": "user", "content": "\ud800"}], "messages must hold text that UTF-8"),
        ("hi", "messages must be a list of messages"),
    ],
)
def test_chat_refuses(llm: LLM, messages: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        llm.chat(messages, GREEDY)


# --- seeds and several outputs ---


def test_children_have_seeds_of_their_own(llm: LLM) -> None:
    params = SamplingParams(n=4, seed=11, max_tokens=16, ignore_eos=True)
    (output,) = llm.generate("hello", params)
    children = [tuple(child.token_ids) for child in output.outputs]
    assert [child.index for child in output.outputs] == [0, 1, 2, 3]
    assert len(set(children)) == 4
    (first,) = llm.generate("hello", params.replace(n=1))
    assert tuple(first.outputs[0].token_ids) == children[0]
    (again,) = llm.generate("hello", params)
    assert [tuple(child.token_ids) for child in again.outputs] == children


def test_the_engine_seed_decides_without_seeds(tiny_checkpoint: Path) -> None:
    params = SamplingParams(max_tokens=16, ignore_eos=True)

    def sample(seed: int) -> list[list[int]]:
        with LLM(tiny_checkpoint, device="cpu", seed=seed) as llm:
            return [o.outputs[0].token_ids for o in llm.generate(["hello"] * 2, params)]

    first = sample(1)
    assert first[0] != first[1]
    assert sample(1) == first
    assert sample(2) != first


# --- what results say ---


def test_logprobs_name_their_tokens(llm: LLM, tokenizer: Tokenizer) -> None:
    params = GREEDY.replace(logprobs=2, prompt_logprobs=0, max_tokens=5)
    (output,) = llm.generate("hello", params)
    (completion,) = output.outputs
    assert completion.logprobs is not None
    assert len(completion.logprobs) == 5
    for token, position in zip(completion.token_ids, completion.logprobs, strict=True):
        assert len(position) == 2
        assert position[token].rank == 1  # greedy
        text = tokenizer.decode([token], skip_special_tokens=False)
        assert position[token].decoded_token == text
    total = sum(
        p[t].logprob for t, p in zip(completion.token_ids, completion.logprobs, strict=True)
    )
    assert completion.cumulative_logprob == pytest.approx(total)
    assert output.prompt_logprobs is not None
    assert len(output.prompt_logprobs) == len(output.prompt_token_ids)
    assert output.prompt_logprobs[0] is None
    (plain,) = llm.generate("hello", GREEDY)
    assert (plain.outputs[0].logprobs, plain.prompt_logprobs) == (None, None)


def test_metrics_count(llm: LLM) -> None:
    prompt = list(range(3, 3 + 40))
    llm.generate(prompt, GREEDY)
    (output,) = llm.generate(prompt, GREEDY)
    assert output.num_cached_tokens == 32  # two full blocks
    metrics = output.metrics
    assert (metrics.num_output_tokens, metrics.num_forwards) == (12, 12)
    assert metrics.forwards_per_token == 1
    assert metrics.acceptance is None
    assert metrics.time_to_first_token is not None
    assert metrics.time_per_token is not None
    assert 0 < metrics.time_to_first_token <= metrics.latency
    assert metrics.latency == pytest.approx(
        metrics.time_to_first_token + 11 * metrics.time_per_token
    )


def test_progress_is_shown_on_stderr_when_asked(
    llm: LLM, capsys: pytest.CaptureFixture[str]
) -> None:
    llm.generate(["a", "hello"], GREEDY)
    assert capsys.readouterr() == ("", "")
    llm.generate(["a", "hello"], GREEDY, progress=True)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "2/2" in captured.err
    assert "tokens/s" in captured.err


def test_end_tokens_end_the_text(llm: LLM) -> None:
    force = GREEDY.replace(ignore_eos=False, logit_bias={2: 1000.0})
    (output,) = llm.generate("hello", force)
    (completion,) = output.outputs
    assert (completion.token_ids, completion.text) == ([2], "")
    assert (completion.finish_reason, completion.stop_reason) == ("stop", None)
    (output,) = llm.generate("hello", force.replace(ignore_eos=True, stop_token_ids=[2]))
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", 2)
    shown = force.replace(ignore_eos=True, skip_special_tokens=False, max_tokens=2)
    assert llm.generate("hello", shown)[0].text == "<|im_end|><|im_end|>"


def test_bad_words_do_not_appear(llm: LLM) -> None:
    (plain,) = llm.generate("hello", GREEDY)
    word = '":'  # one token of the tiny vocabulary
    assert plain.text.startswith(word)
    (output,) = llm.generate("hello", GREEDY.replace(bad_words=[word]))
    assert plain.outputs[0].token_ids[0] not in output.outputs[0].token_ids


# --- guides and drafts ---

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 4}, "ok": {"type": "boolean"}},
    "required": ["name", "ok"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    "schema", [{"type": "array", "minItems": 2, "maxItems": 1}, {"$ref": "http://nowhere/x.json"}]
)
def test_a_guide_that_cannot_be_compiled_is_a_value_error_of_the_call(
    llm: LLM, schema: dict[str, Any]
) -> None:
    params = [GREEDY, GREEDY.replace(guide=Guide.json(schema))]
    for _ in range(2):  # the second time the refusal is known already
        with pytest.raises(ValueError, match=r"unsatisfiable|\$ref"):
            llm.generate(["a", "b"], params)
        with pytest.raises(ValueError, match=r"unsatisfiable|\$ref"):
            llm.stream("a", params[1])


def test_guided_text_fits_and_forced_drafts_change_nothing(llm: LLM, tiny_checkpoint: Path) -> None:
    params = SamplingParams(
        temperature=0, max_tokens=100, guide=Guide.json(SCHEMA, max_whitespace=0)
    )
    guided, plain = llm.generate(["hello", "hello"], [params, GREEDY])
    value = json.loads(guided.text)
    assert sorted(value) == ["name", "ok"]
    assert guided.outputs[0].guide.valid is True
    assert guided.outputs[0].finish_reason == "stop"
    assert plain.outputs[0].guide is None
    with LLM(tiny_checkpoint, device="cpu", speculation=["forced"]) as drafting:
        output = streamed(drafting, "hello", params)
    assert output.outputs[0].token_ids == guided.outputs[0].token_ids
    assert output.text == guided.text
    assert output.outputs[0].speculation.num_accepted_tokens > 5
    assert output.metrics.num_forwards < guided.metrics.num_forwards


def test_a_refused_guide_is_an_error_before_any_work(llm: LLM) -> None:
    with pytest.raises(ValueError, match="guide must be a Guide"):
        llm.generate(["a", "b"], [GREEDY, GREEDY.replace(guide={"type": "object"})])


# --- making an LLM ---


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs must be a positive integer"),
        ({"max_model_len": 257}, "max_model_len must be 1 to 256"),
        ({"kv_cache_memory": 100}, "kv_cache_memory must hold a block of 8192 bytes"),
        ({"kv_cache_memory": 10 * 8192, "max_model_len": 256}, "num_blocks=10 holds 160 tokens"),
        ({"hooks": [object()]}, r"hooks\[0\] must be an instance of SchedulerHook"),
        ({"device": "tpu"}, "device 'tpu' is unknown"),
        ({"dtype": "int8"}, "dtype 'int8' is unknown"),
        ({"speculation": 3}, "speculation must be None"),
        ({"model": "/nowhere"}, "model '/nowhere' not found"),
        ({"model": 3}, "model must be a name, a path or a transformers model"),
    ],
)
def test_bad_arguments_are_named(
    tiny_checkpoint: Path, arguments: dict[str, Any], message: str
) -> None:
    chosen: dict[str, Any] = {"model": tiny_checkpoint, "device": "cpu", **arguments}
    with pytest.raises(ValueError, match=message):
        LLM(**chosen)


def test_the_cache_is_no_larger_than_needed(tiny_checkpoint: Path) -> None:
    with LLM(tiny_checkpoint, device="cpu", max_num_seqs=2) as llm:
        assert llm.config.num_blocks == 2 * CONTEXT // 16
        assert repr(llm).endswith("max_model_len=256, max_num_seqs=2, kv_cache=512 tokens)")
    with LLM(tiny_checkpoint, device="cpu", kv_cache_memory=10 * 8192) as llm:
        assert (llm.config.num_blocks, llm.config.max_model_len) == (10, 160)


def test_a_loaded_model_with_and_without_tokenizer(tiny_checkpoint: Path, llm: LLM) -> None:
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(tiny_checkpoint)
    expected = llm.generate("hello", GREEDY)[0]
    ids = expected.prompt_token_ids
    with LLM(model, tokenizer=llm.get_tokenizer()) as loaded:
        assert loaded.generate("hello", GREEDY)[0].text == expected.text
    with LLM(model) as bare:
        (output,) = bare.generate(ids, GREEDY)
        assert output.outputs[0].token_ids == expected.outputs[0].token_ids
        assert output.text == ""
        assert streamed(bare, ids, GREEDY).outputs[0].token_ids == expected.outputs[0].token_ids
        for prompt, params in (("a", GREEDY), ([5], GREEDY.replace(stop=["a"]))):
            with pytest.raises(ValueError, match="has no tokenizer"):
                bare.generate(prompt, params)


@pytest.mark.parametrize("name", ["stop", "bad_words"])
def test_words_that_utf8_cannot_encode_are_named(name: str) -> None:
    words: dict[str, Any] = {name: ["a", "\ud800"]}
    with pytest.raises(ValueError, match=f"{name} must hold text that UTF-8 can encode"):
        SamplingParams(**words)
