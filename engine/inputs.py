"""From what users hold (texts, token ids, messages, parameters) to requests of the engine.

Everything is checked here, for all prompts of a call, before the first request is added: an error
names the prompt and the field, and leaves nothing behind in the engine.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import TYPE_CHECKING, Any, cast

from .detokenizer import Detokenizer
from .noise import derive_seed
from .params import SamplingParams, check_encodable, tokenize_bad_words
from .types import Request

if TYPE_CHECKING:
    from .models.zoo import LoadedModel

Message = Mapping[str, Any]
Prompt = str | Sequence[int] | Mapping[str, Any]

_NO_TOKENIZER = "this model has no tokenizer: give prompt_token_ids, or load it with tokenizer=..."
_UNBOUNDED = 1 << 30  # the engine cuts it to what the context leaves
_WORD = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Tokenized:
    """A checked prompt; ``text`` is None when it was given as token ids."""

    text: str | None
    token_ids: list[int]


def default_params(generation_config: Mapping[str, Any]) -> SamplingParams:
    """What a checkpoint's generation_config asks for. As in transformers, nothing is sampled
    unless it says ``do_sample``."""
    names = ["repetition_penalty"]
    fields: dict[str, Any] = {}
    if generation_config.get("do_sample"):
        names += ["temperature", "top_k", "top_p", "min_p"]
    else:
        fields["temperature"] = 0.0
    for name in names:
        if generation_config.get(name) is not None:
            fields[name] = generation_config[name]
    if generation_config.get("max_new_tokens") is not None:
        fields["max_tokens"] = generation_config["max_new_tokens"]
    return SamplingParams(**fields)


class InputProcessor:
    """Checks and converts the inputs of one model.

    Args:
        loaded: the model's tokenizer, end tokens and generation config.
        max_model_len: longest prompt, in tokens.
        seed: of the engine; requests without a seed of their own derive one from it.
    """

    def __init__(self, loaded: LoadedModel, *, max_model_len: int, seed: int) -> None:
        self.tokenizer = loaded.tokenizer
        self.detokenizer = None if self.tokenizer is None else Detokenizer(self.tokenizer.tokenizer)
        self.default_params = default_params(loaded.generation_config)
        self._vocab_size = loaded.config.vocab_size
        self._eos_token_ids = loaded.eos_token_ids
        self._max_model_len = max_model_len
        self._seed = seed & _WORD
        self._numbers = itertools.count()

    # --- prompts ---

    def prompts(self, prompts: Prompt | Sequence[Prompt]) -> list[Tokenized]:
        """One prompt or several, tokenized.

        Raises:
            ValueError: names the prompt by its index and what is wrong with it.
        """
        value: Any = prompts
        if hasattr(value, "tolist"):  # an array or tensor of token ids
            value = value.tolist()
        if _is_single(value):
            return [self._prompt(value, "prompt")]
        if not isinstance(value, Sequence) or isinstance(value, bytes):
            raise ValueError(f"prompts must be {_PROMPT_KINDS}, or a list of these, got {value!r}")
        return [self._prompt(prompt, f"prompts[{i}]") for i, prompt in enumerate(value)]

    def prompt(self, prompt: Prompt | Sequence[Message]) -> Tokenized:
        """Exactly one prompt, or one list of messages."""
        if is_conversation(prompt):
            return self.chats(cast("Sequence[Message]", prompt))[0]
        if isinstance(prompt, Sequence) and prompt and not _is_single(prompt):
            raise ValueError(f"prompt must be {_PROMPT_KINDS}, got a list of {len(prompt)} prompts")
        return self._prompt(prompt, "prompt")

    def _prompt(self, prompt: Any, where: str) -> Tokenized:
        text: str | None = None
        if isinstance(prompt, Mapping):
            mapping = cast("Mapping[str, Any]", prompt)
            if mapping.get("messages") is not None:
                return self._chat(mapping["messages"], where, add_generation_prompt=True)
            prompt = self._of_mapping(mapping, where)
        if hasattr(prompt, "tolist"):
            prompt = prompt.tolist()
        if isinstance(prompt, str):
            check_encodable(prompt, where)
            text, ids = prompt, self._bundle(where).encode(prompt)
        elif isinstance(prompt, Sequence) and not isinstance(prompt, bytes):
            ids = self._checked_ids(prompt, where)
        else:
            raise ValueError(f"{where} must be {_PROMPT_KINDS}, got {prompt!r}")
        return self._checked(text, ids, where)

    def _of_mapping(self, prompt: Mapping[str, Any], where: str) -> Any:
        ids, text = prompt.get("prompt_token_ids"), prompt.get("prompt")
        if isinstance(ids, str):
            raise ValueError(f"{where}: prompt_token_ids must be a list of token ids, got {ids!r}")
        if text is not None and not isinstance(text, str):
            raise ValueError(f"{where}: prompt must be a text, got {text!r}")
        if ids is None and text is None:
            raise ValueError(
                f"{where} must have the key prompt, prompt_token_ids or messages, "
                f"got {sorted(prompt)}"
            )
        return text if ids is None else ids

    def _checked_ids(self, ids: Sequence[Any], where: str) -> list[int]:
        for i, token in enumerate(ids):
            if isinstance(token, bool) or not isinstance(token, Integral):
                raise ValueError(f"{where} must hold token ids, got {token!r} at index {i}")
            if not 0 <= int(token) < self._vocab_size:
                raise ValueError(
                    f"{where} must hold ids of the model's vocabulary, 0 to "
                    f"{self._vocab_size - 1}, got {int(token)} at index {i}"
                )
        return [int(token) for token in ids]

    def _checked(self, text: str | None, ids: list[int], where: str) -> Tokenized:
        if not ids:
            raise ValueError(f"{where} is empty: it must hold at least one token")
        if len(ids) > self._max_model_len:
            raise ValueError(
                f"{where} has {len(ids)} tokens, at most max_model_len={self._max_model_len} "
                "are allowed"
            )
        return Tokenized(text, ids)

    def _bundle(self, where: str) -> Any:
        if self.tokenizer is None:
            raise ValueError(f"{where}: {_NO_TOKENIZER}")
        return self.tokenizer

    # --- chat ---

    def chats(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        *,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[Tokenized]:
        """One conversation or several through the model's chat template, tokenized.

        The template writes the special tokens, so none are added. ``add_generation_prompt`` is
        true unless the final message is to be continued.

        Raises:
            ValueError: names the conversation, or says that the model has no chat template.
        """
        if add_generation_prompt is None:
            add_generation_prompt = not continue_final_message
        elif add_generation_prompt and continue_final_message:
            raise ValueError(
                "add_generation_prompt must be False with continue_final_message: a new turn "
                "cannot begin before the last one has ended"
            )
        value: Any = messages
        if not isinstance(value, Sequence) or isinstance(value, str | bytes):
            raise ValueError(
                f"messages must be a list of messages, or a list of such lists, got {value!r}"
            )
        single = not value or isinstance(value[0], Mapping)
        return [
            self._chat(
                conversation,
                "messages" if single else f"messages[{i}]",
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                **(chat_template_kwargs or {}),
            )
            for i, conversation in enumerate([value] if single else value)
        ]

    def _chat(self, conversation: Any, where: str, **template: Any) -> Tokenized:
        _check_conversation(conversation, where)
        bundle = self._bundle(where)
        try:
            text = bundle.render_chat(conversation, **template)
        except Exception as error:  # a template is a program: it may raise anything
            raise ValueError(f"{where}: {error}") from error
        check_encodable(text, where)
        return self._checked(text, bundle.encode(text, add_special_tokens=False), where)

    # --- parameters and requests ---

    def params(
        self, params: SamplingParams | Sequence[SamplingParams] | None, count: int
    ) -> list[SamplingParams]:
        """One for each of ``count`` prompts.

        Raises:
            ValueError: wrong type or number, token ids outside the vocabulary, or a field that
                needs a tokenizer where there is none.
        """
        if params is None or isinstance(params, SamplingParams):
            chosen = [params or self.default_params] * count
        elif isinstance(cast("object", params), Sequence):
            chosen = list(params)
            if len(chosen) != count:
                raise ValueError(
                    f"params must be one SamplingParams or one for each of {count} prompts, "
                    f"got {len(chosen)}"
                )
        else:
            raise ValueError(f"params must be SamplingParams, a list of them or None: {params!r}")
        checked: set[int] = set()
        for i, one in enumerate(chosen):
            if not isinstance(cast("object", one), SamplingParams):
                raise ValueError(f"params[{i}] must be SamplingParams, got {one!r}")
            if id(one) not in checked:
                checked.add(id(one))
                one.validate_for(self._vocab_size)
                needs = "stop" if one.stop else "bad_words" if one.bad_words else None
                if needs is not None:
                    self._bundle(needs)
        return chosen

    def requests(self, prompt: Tokenized, params: SamplingParams) -> list[Request]:
        """The engine's requests for one prompt: child 0 first, one for each of ``n``."""
        number = next(self._numbers)
        seed = derive_seed(self._seed, number) if params.seed is None else params.seed & _WORD
        bad_words: tuple[tuple[int, ...], ...] = ()
        if params.bad_words:
            encode = self._bundle("bad_words").encode
            bad_words = tokenize_bad_words(
                params.bad_words, lambda word: encode(word, add_special_tokens=False)
            )
        children: list[Request] = []
        for index in range(params.n):
            text = None
            if self.detokenizer is not None:
                text = self.detokenizer.stream(
                    prompt.token_ids,
                    stop=tuple(params.stop or ()),
                    include_stop=params.include_stop_str_in_output,
                    skip_special_tokens=params.skip_special_tokens,
                )
            children.append(
                Request(
                    f"{number}.{index}" if index else str(number),
                    prompt.token_ids,
                    params,
                    seed=derive_seed(seed, index) if index else seed,
                    stop_token_ids=frozenset(params.stop_token_ids or ()),
                    eos_token_ids=self._eos_token_ids,
                    text=text,
                    parent=children[0] if index else None,
                    index=index,
                    max_tokens=_UNBOUNDED if params.max_tokens is None else params.max_tokens,
                    bad_words_token_ids=bad_words,
                )
            )
        return children


_PROMPT_KINDS = (
    'a text, a list of token ids or a mapping with "prompt", "prompt_token_ids" or "messages"'
)


def _is_single(value: object) -> bool:
    """Whether this is one prompt rather than a list of prompts."""
    if isinstance(value, str | Mapping):
        return True
    return isinstance(value, Sequence) and bool(value) and isinstance(value[0], Integral)


def is_conversation(value: object) -> bool:
    """Whether this is a list of chat messages rather than a prompt."""
    if not isinstance(value, Sequence) or isinstance(value, str | bytes) or not value:
        return False
    first: object = value[0]
    return isinstance(first, Mapping) and "role" in first


def _check_conversation(conversation: Any, where: str) -> None:
    if not isinstance(conversation, Sequence) or isinstance(conversation, str | bytes):
        raise ValueError(f"{where} must be a list of messages, got {conversation!r}")
    if not conversation:
        raise ValueError(f"{where} is empty: it must hold at least one message")
    for i, message in enumerate(cast("Sequence[object]", conversation)):
        if not isinstance(message, Mapping) or not isinstance(
            cast("Mapping[str, object]", message).get("role"), str
        ):
            raise ValueError(
                f'{where}[{i}] must be a mapping like {{"role": "user", "content": "…"}}, '
                f"got {message!r}"
            )
