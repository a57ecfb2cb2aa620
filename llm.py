"""`LLM`: a model, an engine and its hooks put together, behind the calls users know.

Nothing is computed here. Inputs are checked by `engine.inputs`, one engine is shared by all callers
through `engine.driver`, results are read off by `engine.outputs`; this module says what they are
made of (`LLM.__init__`) and what a call means (the rest).
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from .engine.config import EngineConfig
from .engine.core import EngineCore
from .engine.driver import Driver
from .engine.executor import InlineExecutor
from .engine.hooks import EngineContext, SchedulerHook, WorkerExtension
from .engine.inputs import InputProcessor, Message, Prompt, Tokenized
from .engine.models.tokenizer import load_tokenizer, wrap_transformers
from .engine.models.zoo import LoadedModel, from_pretrained_model, load_model, resolve
from .engine.outputs import DeltaReader, RequestOutput, StreamDelta, result_of
from .engine.params import SamplingParams
from .engine.progress import CallProgress
from .engine.worker import build_worker
from .guided import GuidedHook
from .speculative import SpeculationConfig, SpeculativeHook

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

DEFAULT_MODEL = "smollm2-135m-instruct"
DEFAULT_CPU_CACHE = 1 << 30  # bytes; pages that are never used cost nothing
CUDA_CACHE_SHARE = 0.8  # of the memory that the loaded model leaves free


class LLM:
    """A language model that generates text, guided by grammars and sped up by drafts.

    Args:
        model: the name of a built-in model, a folder, a .gguf file or a Hub id; or a transformers
            model that is loaded already, whose device and dtype are kept.
        tokenizer: for a loaded model: its tokenizer (or where to find it). Without one, prompts
            are token ids and results have no text.
        device: "auto" is CUDA where there is one.
        dtype: "auto" is float32 on the CPU, the checkpoint's own on CUDA.
        max_model_len: most tokens of prompt and output together; None is the model's context, or
            what the KV cache holds if that is less.
        max_num_seqs: requests that run at once; more wait.
        max_num_batched_tokens: tokens computed in one step; longer prompts are cut into chunks.
        block_size: tokens of one block of the KV cache.
        kv_cache_memory: bytes of the KV cache. None is 1 GiB on the CPU and most of the free
            memory on CUDA, but no more than ``max_num_seqs`` requests could ever fill.
        enable_prefix_caching: reuse the KV of prefixes that were computed before.
        seed: requests without a seed of their own derive one from it and their number.
        speculation: None, "ngram", "forced", a list of these (the first with a draft wins), or a
            mapping like ``{"proposers": [...], "num_speculative_tokens": 5}``.
        hooks: `SchedulerHook` instances of yours; they run after the built-in ones.
        extensions: `WorkerExtension` instances of yours.

    Raises:
        ValueError: a bad value, or a model that cannot be found or read; names what is allowed.
    """

    def __init__(
        self,
        model: str | Path | PreTrainedModel = DEFAULT_MODEL,
        *,
        tokenizer: PreTrainedTokenizerBase | str | Path | None = None,
        device: str | torch.device = "auto",
        dtype: str | torch.dtype = "auto",
        max_model_len: int | None = None,
        max_num_seqs: int = 64,
        max_num_batched_tokens: int = 512,
        block_size: int = 16,
        kv_cache_memory: int | None = None,
        enable_prefix_caching: bool = True,
        seed: int = 0,
        speculation: Any = None,
        hooks: Sequence[SchedulerHook] = (),
        extensions: Sequence[WorkerExtension] = (),
    ) -> None:
        _check_hooks(hooks)
        # A first look at the limits: a typing error should not cost the time of a model load.
        limits: dict[str, Any] = {
            "max_num_seqs": max_num_seqs,
            "max_num_batched_tokens": max_num_batched_tokens,
            "block_size": block_size,
        }
        EngineConfig(max_model_len=1, num_blocks=1, **limits)
        self._guided = GuidedHook()
        built_in: list[SchedulerHook] = [self._guided]
        drafts = SpeculationConfig.parse(speculation)
        if drafts is not None:
            built_in.append(SpeculativeHook(drafts, guided=self._guided))
            limits["max_num_draft"] = drafts.num_speculative_tokens
        loaded = _load(model, tokenizer, device, dtype)
        length, num_blocks = _size_cache(
            loaded, max_model_len, max_num_seqs, block_size, kv_cache_memory
        )
        self.config = EngineConfig(
            max_model_len=length,
            num_blocks=num_blocks,
            enable_prefix_caching=enable_prefix_caching,
            seed=seed,
            **limits,
        )
        self.name = loaded.name
        self.model_config = loaded.config
        self.device = loaded.device
        self.dtype = loaded.dtype
        self._bundle = loaded.tokenizer
        self._inputs = InputProcessor(loaded, max_model_len=length, seed=seed)
        context = EngineContext(
            config=self.config,
            vocab_size=loaded.config.vocab_size,
            eos_token_ids=loaded.eos_token_ids,
            tokenizer=None if loaded.tokenizer is None else loaded.tokenizer.tokenizer,
        )
        worker = build_worker(loaded.model, self.config, extensions=extensions)
        core = EngineCore(self.config, InlineExecutor(worker), [*built_in, *hooks], context)
        self._driver = Driver(core)

    # --- generating ---

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool | None = None,
    ) -> list[RequestOutput]:
        """Generate for one prompt or several; results come in their order.

        Args:
            prompts: a text, a list of token ids, ``{"prompt": text}``,
                ``{"prompt_token_ids": [...]}``, ``{"messages": [...]}`` (a chat), or a list of
                these. A text gets the model's BOS token in front, if it has one.
            params: one for all, one for each, or None: the model's generation_config decides.
            progress: show a bar on stderr. None shows one for long work on a terminal or in a
                notebook.

        Ctrl-C ends the call's requests and leaves the LLM usable.

        Raises:
            ValueError: a bad prompt or parameter, or a guide that no backend can compile, before
                anything was started.
            RuntimeError: called from a hook, or the LLM is closed.
        """
        return self._run(self._inputs.prompts(prompts), params, progress)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        progress: bool | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation, or each of several, by the model's chat template.

        ``messages``: mappings with "role" and "content". The template writes the special tokens;
        none are added to them. ``add_generation_prompt`` (begin the assistant's turn) is true
        unless ``continue_final_message`` asks to go on where the last message stops.
        ``chat_template_kwargs`` go to the template. The rest is as in `generate`.
        """
        chats = self._inputs.chats(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            chat_template_kwargs=chat_template_kwargs,
        )
        return self._run(chats, params, progress)

    def stream(
        self, prompt: Prompt | Sequence[Message], params: SamplingParams | None = None
    ) -> Generator[StreamDelta]:
        """Generate for one prompt, or one list of messages, and yield what is new as it comes.

        The prompt is checked at once; generation begins with the first delta asked for. The texts
        of all deltas joined are the final text. The last delta has the whole result in
        ``output``. Closing the generator, or Ctrl-C, aborts the request. Several streams may be
        read alternately, or from several threads.
        """
        prepared = self._inputs.prompt(prompt)
        (chosen,) = self._inputs.params(params, 1)
        self._compile_guides([chosen])
        return self._stream(prepared, chosen)

    def _compile_guides(self, params: Sequence[SamplingParams]) -> None:
        """Compile the call's guides side by side, so that a refusal is a ValueError of this call.
        Nobody else waits: other callers' steps go on, and requests find the grammars in the cache.
        """
        guides = [one.guide for one in params if one.guide is not None]
        for compilation, _ in [self._guided.compile(guide) for guide in guides]:
            compilation.result()

    def _run(
        self,
        prompts: list[Tokenized],
        params: SamplingParams | Sequence[SamplingParams] | None,
        progress: bool | None,
    ) -> list[RequestOutput]:
        chosen = self._inputs.params(params, len(prompts))
        groups = [self._inputs.requests(p, one) for p, one in zip(prompts, chosen, strict=True)]
        requests = [request for group in groups for request in group]
        self._compile_guides(chosen)
        bar = CallProgress(groups, progress)
        left = deque(requests)

        def poll() -> bool | None:
            while left and self._driver.ended(left[0]):
                left.popleft()
            bar.update()
            return None if left else True

        try:
            self._driver.submit(requests)
            self._driver.wait_for(poll)
        finally:
            bar.close()
            self._driver.abort(requests)
        detokenizer = self._inputs.detokenizer
        return [
            result_of(group, prompt.text, detokenizer)
            for group, prompt in zip(groups, prompts, strict=True)
        ]

    def _stream(self, prompt: Tokenized, params: SamplingParams) -> Generator[StreamDelta]:
        requests = self._inputs.requests(prompt, params)
        detokenizer = self._inputs.detokenizer
        readers = [DeltaReader(request) for request in requests]

        def poll() -> list[StreamDelta] | None:
            deltas: list[StreamDelta] = []
            for reader in readers:
                # An ended request is read once the hooks have reported on it.
                if not reader.request.finished or self._driver.ended(reader.request):
                    delta = reader.read(detokenizer)
                    deltas += [] if delta is None else [delta]
            return deltas or None

        try:
            self._driver.submit(requests)
            done = False
            while not done:
                deltas = self._driver.wait_for(poll)
                done = self._driver.ended(*requests)
                if done:
                    deltas[-1].output = result_of(requests, prompt.text, detokenizer)
                yield from deltas
        finally:
            self._driver.abort(requests)

    # --- the rest ---

    def stats(self) -> dict[str, Any]:
        """Counters and gauges of the engine: requests, tokens, cache, seconds by phase."""
        return self._driver.stats()

    def get_tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer as a transformers object.

        Raises:
            ValueError: the model was loaded without one.
        """
        if self._bundle is None:
            raise ValueError("this model has no tokenizer: load it with tokenizer=...")
        return self._bundle.transformers

    def get_default_params(self) -> SamplingParams:
        """What is used without params: the model's generation_config."""
        return self._inputs.default_params

    @property
    def has_chat_template(self) -> bool:
        return self._bundle is not None and bool(self._bundle.chat_template)

    def close(self) -> None:
        """Abort what runs and free the model. Later calls raise RuntimeError."""
        self._driver.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        config, dtype = self.config, str(self.dtype).removeprefix("torch.")
        return (
            f"LLM({self.name!r}, device={str(self.device)!r}, dtype={dtype!r}, "
            f"max_model_len={config.max_model_len}, max_num_seqs={config.max_num_seqs}, "
            f"kv_cache={config.num_blocks * config.block_size} tokens)"
        )


def _check_hooks(hooks: Sequence[SchedulerHook]) -> None:
    for i, hook in enumerate(cast("Sequence[object]", hooks)):
        if not isinstance(hook, SchedulerHook):
            raise ValueError(f"hooks[{i}] must be an instance of SchedulerHook, got {hook!r}")


def _load(
    model: str | Path | PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | str | Path | None,
    device: str | torch.device,
    dtype: str | torch.dtype,
) -> LoadedModel:
    if not isinstance(model, str | Path):
        if not hasattr(model, "state_dict"):
            raise ValueError(f"model must be a name, a path or a transformers model, got {model!r}")
        for name, value in (("device", device), ("dtype", dtype)):
            if value != "auto":
                raise ValueError(f"{name} must be 'auto' for a loaded model, which has its own")
        return from_pretrained_model(model, tokenizer)
    loaded = load_model(model, device=device, dtype=dtype)
    if tokenizer is not None:
        given = isinstance(tokenizer, str | Path)
        bundle = load_tokenizer(resolve(tokenizer)) if given else wrap_transformers(tokenizer)
        if bundle is None:
            raise ValueError(f"tokenizer {str(tokenizer)!r} has no tokenizer files")
        ends = loaded.eos_token_ids | bundle.eos_token_ids
        loaded = dataclasses.replace(loaded, tokenizer=bundle, eos_token_ids=ends)
    return loaded


def _size_cache(
    loaded: LoadedModel,
    max_model_len: int | None,
    max_num_seqs: int,
    block_size: int,
    kv_cache_memory: int | None,
) -> tuple[int, int]:
    """(max_model_len, KV blocks) within the memory given."""
    model = loaded.config
    context = model.max_position_embeddings
    if max_model_len is not None and not 1 <= max_model_len <= context:
        raise ValueError(
            f"max_model_len must be 1 to {context}, the model's context, got {max_model_len!r}"
        )
    if kv_cache_memory is None:
        kv_cache_memory = DEFAULT_CPU_CACHE
        if loaded.device.type == "cuda":
            kv_cache_memory = int(torch.cuda.mem_get_info(loaded.device)[0] * CUDA_CACHE_SHARE)
    elif isinstance(cast("object", kv_cache_memory), bool) or kv_cache_memory < 1:
        raise ValueError(f"kv_cache_memory must be a number of bytes, got {kv_cache_memory!r}")
    token_bytes = 2 * model.num_layers * model.num_kv_heads * model.head_dim * loaded.dtype.itemsize
    num_blocks = int(kv_cache_memory) // (token_bytes * block_size)
    if num_blocks < 1:
        raise ValueError(
            f"kv_cache_memory must hold a block of {token_bytes * block_size} bytes, "
            f"got {kv_cache_memory}"
        )
    length = min(context, num_blocks * block_size) if max_model_len is None else max_model_len
    most = max_num_seqs * ((length + block_size - 1) // block_size)
    return length, min(num_blocks, most)
