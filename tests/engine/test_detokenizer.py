"""Text from tokens: exact for any byte sequence, and cut where a stop string ends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tightrope.engine.detokenizer import Detokenizer

SPECIAL = ["<|im_start|>", "<|im_end|>", "<ö€>"]
MERGES = [("h", "e"), ("he", "l"), ("Ã", "¶"), ("â", "Ĥ")]


def byte_level() -> Tokenizer:
    words = [
        *sorted(pre_tokenizers.ByteLevel.alphabet()),
        *(left + right for left, right in MERGES),
    ]
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, MERGES))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(word, special=True) for word in SPECIAL])
    tokenizer.add_tokens([AddedToken("🙂 plain", special=False)])
    return tokenizer


def byte_fallback() -> Tokenizer:
    """The shape of Llama 2's: spaces are U+2581, unknown characters are byte tokens."""
    words = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁he", "llo", "▁world"]
    tokenizer = Tokenizer(
        models.BPE({word: i for i, word in enumerate(words)}, [], unk_token="<unk>")
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens([AddedToken("</s>", special=True)])
    return tokenizer


BYTE_LEVEL = byte_level()
BYTE_FALLBACK = byte_fallback()
VOCAB_SIZE = BYTE_LEVEL.get_vocab_size()
TOKENS = st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=40)
# Multi-byte characters among single bytes, so that valid, split and broken ones all come up.
BYTES = st.lists(
    st.one_of(st.binary(min_size=1, max_size=3), st.sampled_from(["é", "€", "🙂", "a"])),
    max_size=15,
)


def token_of(tokenizer: Tokenizer, word: str) -> int:
    token = tokenizer.token_to_id(word)
    assert token is not None
    return token


def encode_bytes(parts: Sequence[bytes | str]) -> list[int]:
    """One token a byte."""
    data = b"".join(part.encode() if isinstance(part, str) else part for part in parts)
    of_byte = {Detokenizer(BYTE_LEVEL).token_bytes(token): token for token in range(256)}
    return [of_byte[bytes([byte])] for byte in data]


def run(
    tokens: Sequence[int],
    tokenizer: Tokenizer = BYTE_LEVEL,
    prompt: Sequence[int] = (),
    **options: Any,
) -> str:
    stream = Detokenizer(tokenizer).stream(prompt, **options)
    for token in tokens:
        stream.push(token, check_stop=True)
    stream.flush()
    return stream.text


@given(TOKENS, TOKENS, st.booleans())
def test_text_equals_full_decoding(prompt: list[int], tokens: list[int], skip: bool) -> None:
    text = run(tokens, prompt=prompt, skip_special_tokens=skip)
    assert text == BYTE_LEVEL.decode(tokens, skip_special_tokens=skip)


@given(BYTES)
def test_broken_utf8_equals_full_decoding(parts: list[bytes | str]) -> None:
    tokens = encode_bytes(parts)
    assert run(tokens) == BYTE_LEVEL.decode(tokens)


@given(BYTES)
def test_nothing_shown_is_taken_back(parts: list[bytes | str]) -> None:
    stream = Detokenizer(BYTE_LEVEL).stream(stop=["ab", "€a", "aéa"])
    shown = ""
    for token in encode_bytes(parts):
        stopped = stream.push(token, check_stop=True)
        assert stream.stable_text.startswith(shown)
        shown = stream.stable_text
        if stopped is not None:
            break
    stream.flush()
    assert stream.text.startswith(shown)


def test_a_character_split_over_tokens_is_held_back() -> None:
    stream = Detokenizer(BYTE_LEVEL).stream()
    seen: list[str] = []
    for token in encode_bytes(["a🙂b"]):
        stream.push(token)
        seen.append(stream.stable_text)
    assert seen == ["a", "a", "a", "a", "a🙂", "a🙂b"]


def test_an_unfinished_character_appears_at_the_end() -> None:
    stream = Detokenizer(BYTE_LEVEL).stream()
    for token in encode_bytes(["a", "🙂".encode()[:2]]):
        stream.push(token)
    assert stream.text == "a"
    stream.flush()
    stream.flush()
    assert stream.text == "a\N{REPLACEMENT CHARACTER}"


def test_ids_beyond_the_tokenizer_have_no_text() -> None:
    assert run([*encode_bytes(["a"]), VOCAB_SIZE + 5, *encode_bytes(["b"])]) == "ab"


@pytest.mark.parametrize(
    ("text", "stop", "include", "expected", "reason"),
    [
        ("hello world", ["lo w"], False, "hel", "lo w"),
        ("hello world", ["lo w"], True, "hello w", "lo w"),
        ("hello world", ["world", "o"], False, "hell", "o"),
        ("hello world", ["o", "llo"], False, "he", "llo"),  # both end there: the longest counts
        ("hello world", ["hello"], False, "", "hello"),
        ("hello world", ["xyz"], False, "hello world", None),
        ("a€b", ["€"], False, "a", "€"),
    ],
)
def test_stop_strings(
    text: str, stop: list[str], include: bool, expected: str, reason: str | None
) -> None:
    stream = Detokenizer(BYTE_LEVEL).stream(stop=stop, include_stop=include)
    found = None
    for token in encode_bytes([text]):
        found = stream.push(token, check_stop=True)
        if found is not None:
            break
    stream.flush()
    assert (found, stream.stop_reason, stream.text) == (reason, reason, expected)


def test_a_stop_string_may_end_inside_a_token() -> None:
    hel = token_of(BYTE_LEVEL, "hel")
    stream = Detokenizer(BYTE_LEVEL).stream(stop=["ah", "xx"])
    assert stream.push(encode_bytes(["a"])[0]) is None
    assert (stream.text, stream.stable_text) == ("a", "")
    assert stream.push(hel) == "ah"
    assert stream.push(hel) is None  # nothing is added any more
    stream.flush()
    assert stream.text == ""
    assert run([hel, hel], stop=["lh"]) == "he"


def test_stop_strings_before_min_tokens_do_not_count_later() -> None:
    stream = Detokenizer(BYTE_LEVEL).stream(stop=["ab"])
    tokens = encode_bytes(["ababab"])
    checks = [False, False, False, True, True, True]
    found = [stream.push(t, check_stop=c) for t, c in zip(tokens, checks, strict=True)]
    assert found[:4] == [None, None, None, "ab"]
    assert stream.text == "ab"


@given(st.lists(st.sampled_from(["▁", "▁he", "llo", "▁world", "</s>"]), max_size=20))
def test_other_tokenizers_keep_word_spaces(words: list[str]) -> None:
    tokens = [token_of(BYTE_FALLBACK, word) for word in words]
    prompt = [token_of(BYTE_FALLBACK, "▁he")]
    whole = BYTE_FALLBACK.decode([*prompt, *tokens])
    assert run(tokens, BYTE_FALLBACK, prompt) == whole.removeprefix("he")


@given(st.text(st.sampled_from("aé€🙂"), max_size=12))
def test_byte_tokens_make_characters(text: str) -> None:
    tokens = [token_of(BYTE_FALLBACK, f"<0x{byte:02X}>") for byte in text.encode()]
    prompt = [token_of(BYTE_FALLBACK, "▁he")]
    assert run(tokens, BYTE_FALLBACK, prompt) == text


def test_broken_byte_tokens_neither_raise_nor_hang() -> None:
    broken = [token_of(BYTE_FALLBACK, "<0xFF>")] * 50
    text = run([*broken, token_of(BYTE_FALLBACK, "▁world")], BYTE_FALLBACK)
    assert text == "\N{REPLACEMENT CHARACTER}" * 50 + " world"


def test_token_text_shows_special_tokens() -> None:
    assert Detokenizer(BYTE_LEVEL).token_text(token_of(BYTE_LEVEL, "<|im_end|>")) == "<|im_end|>"
