"""Tokenizers as the engine needs them: a `tokenizers.Tokenizer` and the few facts around it.

transformers takes seconds to import and is needed only for chat templates and for users who ask
for its tokenizer object, so it is imported when one of them is asked for. The object is built
around the same `tokenizers.Tokenizer`, so both give the same ids.

A GGUF holds vocabulary and merges but only the *name* of the pre-tokenizer (how text is split
before merging). The names known here cover the supported architectures; another name is an error,
because a wrong split gives plausible and wrong tokens. Building takes 0.2 s, as long as parsing a
saved tokenizer.json would, so nothing is cached.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tokenizers
from tokenizers import AddedToken, Regex, Tokenizer, normalizers, pre_tokenizers
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing

from .gguf_weights import GGUFFile
from .weights import read_json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token")
# Any of these in a folder means that it has a tokenizer.
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# tokenizer.ggml.pre -> the expressions that split the text, each applied to the pieces so far
_SPLITS: dict[str, tuple[str, ...]] = {
    "smollm": (r"\p{N}", _GPT2),
    "gpt-2": (_GPT2,),
    "llama-bpe": (_CL100K % "{1,3}",),
    "qwen2": (_CL100K % "",),
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"),
}
# Token types of GGUF: normal 1, unknown 2, control 3, user-defined 4, unused 5, byte 6.
_SPECIAL_TYPES = (2, 3)
_USER_DEFINED = 4


@dataclass(eq=False)
class TokenizerBundle:
    """A tokenizer and what the model's files say about using it.

    Attributes:
        tokenizer: the Rust tokenizer; its own ``encode`` may or may not add a BOS token.
        special_tokens: texts of bos_token, eos_token, unk_token, pad_token, where there are any.
        eos_token_ids: ids that end a text, as far as the tokenizer's files say.
        add_bos: whether ``encode`` puts the BOS token in front of a prompt.
        chat_template: Jinja source, or None.
    """

    tokenizer: Tokenizer
    special_tokens: Mapping[str, str] = field(default_factory=dict[str, str])
    eos_token_ids: frozenset[int] = frozenset()
    add_bos: bool = False
    chat_template: str | None = None
    given: PreTrainedTokenizerBase | None = None  # a transformers tokenizer that was there first

    @property
    def vocab_size(self) -> int:
        """Number of ids with a text; the model's logits may be wider."""
        return self.tokenizer.get_vocab_size(with_added_tokens=True)

    @property
    def bos_token_id(self) -> int | None:
        token = self.special_tokens.get("bos_token")
        return None if token is None else self.tokenizer.token_to_id(token)

    @cached_property
    def special_token_ids(self) -> frozenset[int]:
        """Ids that ``decode(skip_special_tokens=True)`` leaves out."""
        added = self.tokenizer.get_added_tokens_decoder()
        return frozenset(token_id for token_id, token in added.items() if token.special)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of ``text``. Special tokens written in the text become their ids.

        The BOS token is added if the model wants one, ``add_special_tokens`` is true, and the text
        does not begin with it already (a rendered chat template often does).
        """
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        bos = self.bos_token_id
        if add_special_tokens and self.add_bos and bos is not None and ids[:1] != [bos]:
            return [bos, *ids]
        return ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return self.tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)

    @cached_property
    def transformers(self) -> PreTrainedTokenizerBase:
        """The same tokenizer as a transformers object (imports transformers: seconds)."""
        if self.given is not None:
            return self.given
        from transformers import PreTrainedTokenizerFast

        hf = PreTrainedTokenizerFast(
            # A copy: transformers sets padding and truncation on the object that it is given.
            tokenizer_object=Tokenizer.from_str(self.tokenizer.to_str()),
            clean_up_tokenization_spaces=False,
            **self.special_tokens,
        )
        hf.chat_template = self.chat_template
        return hf

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        **kw: Any,
    ) -> str:
        """Render the chat template. Encode the result with ``add_special_tokens=False``.

        ``kw`` goes to the template (``tools=...`` and whatever else it reads).

        Raises:
            ValueError: the model has no chat template.
        """
        hf = self.transformers
        if not hf.chat_template:
            raise ValueError(
                "the model has no chat template; give generate() a prompt, or chat a model with one"
            )
        rendered = hf.apply_chat_template(
            [dict(message) for message in messages],
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            **kw,
        )
        assert isinstance(rendered, str)
        return rendered


def load_tokenizer(source: str | Path | GGUFFile) -> TokenizerBundle | None:
    """The tokenizer of a checkpoint folder or a GGUF file; None where there is none.

    Raises:
        ValueError: unreadable files, or a GGUF tokenizer of a kind that is not supported.
    """
    if isinstance(source, GGUFFile):
        return _from_gguf(source)
    path = Path(source)
    return _from_folder(path) if path.is_dir() else _from_gguf(GGUFFile(path))


def wrap_transformers(hf: PreTrainedTokenizerBase) -> TokenizerBundle:
    """A bundle around a transformers tokenizer, which must be a fast one (ValueError)."""
    backend = getattr(hf, "backend_tokenizer", None)
    if not isinstance(backend, Tokenizer):
        raise ValueError(
            f"tokenizer {type(hf).__name__} is not a fast tokenizer; "
            "only those with a backend_tokenizer are allowed"
        )
    named = {name: getattr(hf, name, None) for name in SPECIAL_NAMES}
    special = {name: str(token) for name, token in named.items() if token is not None}
    template = hf.chat_template
    return TokenizerBundle(
        _plain(Tokenizer.from_str(backend.to_str())),
        special,
        _ids(backend, special.get("eos_token")),
        add_bos=bool(special.get("bos_token")) and hf("").input_ids[:1] == [hf.bos_token_id],
        chat_template=template if isinstance(template, str) else None,
        given=hf,
    )


def _from_folder(folder: Path) -> TokenizerBundle | None:
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        return None
    file = folder / "tokenizer.json"
    if not file.is_file():
        return _by_transformers(folder)
    try:
        tokenizer = _plain(Tokenizer.from_file(str(file)))
    except Exception as error:  # the library raises bare Exception
        raise ValueError(f"{file} is not a readable tokenizer: {error}") from error
    settings_file = folder / "tokenizer_config.json"
    settings = read_json(settings_file) if settings_file.is_file() else {}
    special: dict[str, str] = {}
    for name in SPECIAL_NAMES:
        token = settings.get(name)
        token = token.get("content") if isinstance(token, dict) else token
        if isinstance(token, str) and tokenizer.token_to_id(token) is not None:
            special[name] = token
    add_bos = settings.get("add_bos_token")
    if add_bos is None:
        first = tokenizer.encode("").ids[:1]
        add_bos = bool(first) and first == sorted(_ids(tokenizer, special.get("bos_token")))
    return TokenizerBundle(
        tokenizer,
        special,
        _ids(tokenizer, special.get("eos_token")),
        add_bos=bool(add_bos),
        chat_template=_folder_template(folder, settings),
    )


def _by_transformers(folder: Path) -> TokenizerBundle:
    from transformers import AutoTokenizer

    try:
        hf = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except Exception as error:  # transformers raises many kinds, ImportError among them
        raise ValueError(f"transformers cannot load the tokenizer in {folder}: {error}") from error
    return wrap_transformers(hf)


def _folder_template(folder: Path, settings: Mapping[str, Any]) -> str | None:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = settings.get("chat_template")
    if isinstance(template, list):  # the older form: several, by name
        named = {entry.get("name"): entry.get("template") for entry in template}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _from_gguf(file: GGUFFile) -> TokenizerBundle | None:
    kind = file.get("tokenizer.ggml.model", "none")
    pre = file.get("tokenizer.ggml.pre", "default")
    if kind == "none":
        return None
    if kind != "gpt2":
        raise ValueError(f"{file.path} has tokenizer.ggml.model={kind!r}; 'gpt2' is allowed")
    if pre not in _SPLITS:
        raise ValueError(
            f"{file.path} has tokenizer.ggml.pre={pre!r}; {', '.join(_SPLITS)} are allowed"
        )
    tokens: list[str] = file.get("tokenizer.ggml.tokens", [])
    parts: list[list[str]] = [merge.split(" ") for merge in file.get("tokenizer.ggml.merges", [])]
    if any(len(pair) != 2 for pair in parts):
        raise ValueError(f"{file.path} has a merge that is not two tokens separated by a space")
    merges = [(left, right) for left, right in parts]
    tokenizer = _byte_level_bpe(file, tokens, merges, pre)
    special: dict[str, str] = {}
    for name, key in zip(SPECIAL_NAMES, ("bos", "eos", "unknown", "padding"), strict=True):
        token = file.get(f"tokenizer.ggml.{key}_token_id")
        if token is not None and token < len(tokens):
            special[name] = tokens[token]
    ends = (file.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom"))
    add_bos = bool(file.get("tokenizer.ggml.add_bos_token", pre == "llama-bpe"))
    if add_bos and "bos_token" in special:
        bos = special["bos_token"]
        tokenizer.post_processor = TemplateProcessing(
            single=f"{bos}:0 $A:0", special_tokens=[(bos, tokenizer.token_to_id(bos))]
        )
    return TokenizerBundle(
        tokenizer,
        special,
        frozenset(int(token) for token in ends if token is not None),
        add_bos=add_bos,
        chat_template=file.get("tokenizer.chat_template"),
    )


def _byte_level_bpe(
    file: GGUFFile, tokens: list[str], merges: list[tuple[str, str]], pre: str
) -> Tokenizer:
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    if not tokens or len(vocabulary) != len(tokens):
        raise ValueError(f"{file.path} has no vocabulary, or the same token twice")
    try:
        # llama 3 takes a piece that is a token as it is, whatever the merges would make of it.
        model = BPE(vocabulary, merges, ignore_merges=pre == "llama-bpe")
    except Exception as error:  # the library raises bare Exception
        raise ValueError(f"{file.path} has unusable merges: {error}") from error
    tokenizer = Tokenizer(model)
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(split), "isolated") for split in _SPLITS[pre]]
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, to_bytes])
    tokenizer.decoder = ByteLevelDecoder()
    types: list[int] = file.get("tokenizer.ggml.token_type", [1] * len(tokens))
    typed = list(zip(tokens, types, strict=True))
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True) for token, kind in typed if kind in _SPECIAL_TYPES]
    )
    tokenizer.add_tokens(
        [AddedToken(token, normalized=False) for token, kind in typed if kind == _USER_DEFINED]
    )
    return tokenizer


def _plain(tokenizer: Tokenizer) -> Tokenizer:
    """Without the padding and truncation that a training run left in the file."""
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def _ids(tokenizer: tokenizers.Tokenizer, token: str | None) -> frozenset[int]:
    token_id = None if token is None else tokenizer.token_to_id(token)
    return frozenset() if token_id is None else frozenset({token_id})
