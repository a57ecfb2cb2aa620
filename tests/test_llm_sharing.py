"""One engine for many callers: streams, threads, hooks that call back, Ctrl-C, closing."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tightrope import LLM, RequestOutput, SamplingParams, SchedulerHook, StreamDelta
from tightrope.engine.executor import InlineExecutor
from tightrope.engine.types import StepPlan

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
CONTEXT = 256


def read(stream: Iterator[StreamDelta]) -> tuple[str, list[int], RequestOutput]:
    """Everything a stream gives: joined text, joined tokens, the result."""
    deltas = list(stream)
    assert [delta.output is not None for delta in deltas] == [False] * (len(deltas) - 1) + [True]
    assert [delta.finished for delta in deltas] == [False] * (len(deltas) - 1) + [True]
    output = deltas[-1].output
    assert output is not None
    return "".join(d.text for d in deltas), [t for d in deltas for t in d.token_ids], output


# --- streaming ---


def test_stream_gives_what_generate_gives(llm: LLM) -> None:
    for params in (GREEDY, SamplingParams(seed=3, max_tokens=40, ignore_eos=True)):
        (whole,) = llm.generate("hello", params)
        text, tokens, output = read(llm.stream("hello", params))
        assert text == output.text == whole.text
        assert tokens == output.outputs[0].token_ids == whole.outputs[0].token_ids


def test_stream_holds_back_what_may_be_a_stop_string(llm: LLM) -> None:
    params = SamplingParams(seed=5, max_tokens=60, ignore_eos=True)
    (plain,) = llm.generate("hello", params)
    stop = plain.text[20:24]
    for include in (False, True):
        chosen = params.replace(stop=["\0never", stop], include_stop_str_in_output=include)
        (whole,) = llm.generate("hello", chosen)
        text, _, output = read(llm.stream("hello", chosen))
        cut = plain.text.index(stop) + (len(stop) if include else 0)
        assert text == output.text == whole.text == plain.text[:cut]
        assert (whole.outputs[0].finish_reason, whole.outputs[0].stop_reason) == ("stop", stop)


def test_closing_a_stream_aborts_it(llm: LLM) -> None:
    before = llm.stats()["finished"].get("abort", 0)
    stream = llm.stream("hello", GREEDY.replace(max_tokens=100))
    next(stream)
    assert llm.stats()["running"] == 1
    stream.close()
    assert llm.stats()["finished"]["abort"] == before + 1
    never_read = llm.stream("hello", GREEDY)
    never_read.close()


def test_an_abandoned_stream_is_aborted(llm: LLM) -> None:
    stream = llm.stream("hello", GREEDY.replace(max_tokens=100))
    next(stream)
    del stream
    gc.collect()
    assert llm.stats()["running"] == 0


def test_a_stream_checks_its_prompt_at_once(llm: LLM) -> None:
    with pytest.raises(ValueError, match="prompt is empty"):
        llm.stream({"prompt_token_ids": []}, GREEDY)
    for several in (["a", "b"], ["a"], [[1, 2]]):
        with pytest.raises(ValueError, match="got a list of"):
            llm.stream(several, GREEDY)  # pyright: ignore[reportArgumentType]


def test_interleaved_streams_share_the_engine(llm: LLM) -> None:
    prompts = ["a", "hello", "xyz"]
    alone = [output.text for output in llm.generate(prompts, GREEDY)]
    streams = [llm.stream(prompt, GREEDY) for prompt in prompts]
    texts = ["", "", ""]
    left = [0, 1, 2]
    while left:
        for i in list(left):
            delta = next(streams[i], None)
            if delta is None:
                left.remove(i)
            else:
                texts[i] += delta.text
    assert texts == alone


def test_threads_share_the_engine(llm: LLM) -> None:
    prompts = ["a", "hello", "xyz", "the end"]
    alone = [output.text for output in llm.generate(prompts, GREEDY)]
    texts: dict[int, str] = {}

    def work(i: int) -> None:
        if i % 2:
            texts[i] = read(llm.stream(prompts[i], GREEDY))[0]
        else:
            texts[i] = llm.generate(prompts[i], GREEDY)[0].text

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [texts.get(i) for i in range(4)] == alone


def test_streaming_several_outputs(llm: LLM) -> None:
    params = SamplingParams(n=3, seed=1, max_tokens=8, ignore_eos=True)
    (whole,) = llm.generate("hello", params)
    texts = ["", "", ""]
    finished: list[int] = []
    output = None
    for delta in llm.stream("hello", params):
        texts[delta.index] += delta.text
        finished += [delta.index] if delta.finished else []
        output = delta.output
    assert sorted(finished) == [0, 1, 2]
    assert output is not None
    assert texts == [c.text for c in output.outputs] == [c.text for c in whole.outputs]


# --- hooks, interrupts, closing ---


class Calling(SchedulerHook):
    """Calls into the LLM in the middle of a step."""

    llm: LLM
    errors: list[str]

    def plan(self, plan: StepPlan) -> None:
        try:
            self.llm.generate("hello", GREEDY)
        except RuntimeError as error:
            self.errors.append(str(error))
        assert self.llm.stats()["running"] == 1


class Interrupting(SchedulerHook):
    """Presses Ctrl-C in the middle of the third step."""

    steps = 0

    def plan(self, plan: StepPlan) -> None:
        self.steps += 1
        if self.steps == 3:
            os.kill(os.getpid(), signal.SIGINT)


def test_calling_the_llm_from_a_hook_is_refused(tiny_checkpoint: Path) -> None:
    hook = Calling()
    hook.errors = []
    with LLM(tiny_checkpoint, device="cpu", hooks=[hook]) as llm:
        hook.llm = llm
        (output,) = llm.generate("hello", GREEDY.replace(max_tokens=2))
    assert output.outputs[0].finish_reason == "length"
    assert "cannot be called from a hook" in hook.errors[0]


def test_interrupting_leaves_the_llm_usable(tiny_checkpoint: Path) -> None:
    for use_stream in (False, True):
        with LLM(tiny_checkpoint, device="cpu", hooks=[Interrupting()]) as llm:
            with pytest.raises(KeyboardInterrupt):
                _ = list(llm.stream("hello", GREEDY)) if use_stream else llm.generate("a", GREEDY)
            stats = llm.stats()
            assert (stats["running"], stats["waiting"]) == (0, 0)
            assert stats["free_blocks"] == stats["blocks"]
            assert llm.generate("hello", GREEDY)[0].outputs[0].finish_reason == "length"


def test_a_closed_llm_says_so(tiny_checkpoint: Path) -> None:
    llm = LLM(tiny_checkpoint, device="cpu")
    stream = llm.stream("hello", GREEDY)
    next(stream)
    llm.close()
    llm.close()
    assert [delta.finish_reason for delta in stream] == ["abort"]
    with pytest.raises(RuntimeError, match="the LLM is closed"):
        llm.generate("hello", GREEDY)


def test_a_failed_step_is_final_and_says_so(
    tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = LLM(tiny_checkpoint, device="cpu")

    def fail(*_: object) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr(InlineExecutor, "execute", fail)
    with pytest.raises(MemoryError, match="no room"):
        llm.generate("hello", GREEDY)
    with pytest.raises(RuntimeError, match=r"failed in a step \(MemoryError: no room\)"):
        llm.generate("hello", GREEDY)


def test_a_program_from_standard_input_needs_no_main_guard(tiny_checkpoint: Path) -> None:
    program = f"""
from tightrope import LLM, SamplingParams
llm = LLM({str(tiny_checkpoint)!r}, device="cpu")
(output,) = llm.generate("hello", SamplingParams(temperature=0, max_tokens=5, ignore_eos=True))
print(output.outputs[0].token_ids)
"""
    done = subprocess.run(
        [sys.executable, "-"], input=program, capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert len(json.loads(done.stdout)) == 5
