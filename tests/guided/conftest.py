"""A byte-level tokenizer with whole words and specials, and an engine context around it."""

from __future__ import annotations

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from tightrope.engine.config import EngineConfig
from tightrope.engine.hooks import EngineContext

SPECIAL = ["<|bos|>", "<|eos|>", "<|im_end|>", "<|im_start|>"]
WORDS = ["true", "false", '"name', "name", '{"', '":', '",', "    ", "\n\n", "12", "é", "日"]


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    """Specials, 256 bytes, then merges that build WORDS. Puts its begin token before a text."""
    to_chars = dict(zip(range(256), _byte_characters(), strict=True))
    vocab = {word: i for i, word in enumerate([*SPECIAL, *sorted(to_chars.values())])}
    merges: list[tuple[str, str]] = []
    for word in WORDS:
        chars = "".join(to_chars[b] for b in word.encode())
        for end in range(2, len(chars) + 1):
            pair = (chars[: end - 1], chars[end - 1])
            if pair not in merges:
                merges.append(pair)
                vocab.setdefault("".join(pair), len(vocab))
    made = Tokenizer(models.BPE(vocab, merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(word, special=True) for word in SPECIAL])
    made.post_processor = processors.TemplateProcessing(
        single="<|bos|> $A", special_tokens=[("<|bos|>", 0)]
    )
    return made


def _byte_characters() -> list[str]:
    """The printable stand-ins of GPT-2's byte-level scheme, by byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(b) if b in printable else chr(next(others)) for b in range(256)]


@pytest.fixture(scope="session")
def context(tokenizer: Tokenizer) -> EngineContext:
    """The head has rows past the tokenizer, and their number is no multiple of 32."""
    config = EngineConfig(max_model_len=512, num_blocks=512, max_num_draft=16)
    vocab_size = tokenizer.get_vocab_size() + 19
    assert vocab_size % 32
    return EngineContext(config, vocab_size, frozenset({1, 2}), tokenizer)
