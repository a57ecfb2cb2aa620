"""Tokens to text, one token at a time, and where a stop string ends the text.

A byte-level tokenizer (GPT-2, Llama 3, Qwen, SmolLM2) maps every token to bytes, so its text is an
incremental UTF-8 decoding: exact for any token sequence, constant work a token, and a character
split over tokens is simply held back until it is whole. Every other tokenizer is decoded through a
short window of tokens, primed with the end of the prompt, because its decoder looks at neighbours
(the leading space of a word, runs of byte tokens).

Three texts must not be confused. ``text`` is everything decoded so far, cut at a stop string.
``stable_text`` is the part of it that no later token can take back: what streaming may show. What
is held back (half a character) is in neither until `flush`.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any, Protocol

from tokenizers import Tokenizer, decoders

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_PRIMER = 6  # prompt tokens that prime a window: enough context for any decoder's look-behind
_MOST_HELD = 4  # tokens of an unfinished character: UTF-8 has at most four bytes


def _byte_of_char() -> dict[str, int]:
    """GPT-2's alphabet: printable bytes stand for themselves, the others for U+0100 onwards."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    table.update({chr(0x100 + i): byte for i, byte in enumerate(others)})
    return table


_BYTE_OF_CHAR = _byte_of_char()


class _Decoder(Protocol):
    def push(self, token: int) -> str: ...
    def flush(self) -> str: ...


class _ByteLevelDecoder:
    def __init__(self, detokenizer: Detokenizer, skip: frozenset[int]) -> None:
        self._token_bytes = detokenizer.token_bytes
        self._skip = skip
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        return "" if token in self._skip else self._utf8.decode(self._token_bytes(token))

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


class _WindowDecoder:
    """Decodes ``ids``, of which the first ``known`` have already given ``before``."""

    def __init__(
        self, tokenizer: Tokenizer, prompt: Sequence[int], skip: frozenset[int], skip_special: bool
    ) -> None:
        self._tokenizer = tokenizer
        self._skip = skip
        self._skip_special = skip_special
        self._ids = list(prompt[-_PRIMER:])
        self._advance()

    def push(self, token: int) -> str:
        if token in self._skip:
            return ""
        self._ids.append(token)
        text = self._decode(self._ids)
        held = len(self._ids) - self._known
        if text.endswith(_REPLACEMENT) and held < _MOST_HELD:
            return ""
        if not text.startswith(self._before):
            # The decoder rewrote what was shown; the new tokens alone are the best continuation.
            text, self._before = self._decode(self._ids[self._known :]), ""
        piece = text[len(self._before) :]
        if piece or held >= _MOST_HELD:
            self._ids = self._ids[self._known :]
            self._advance()
        return piece

    def flush(self) -> str:
        text = self._decode(self._ids)
        if not text.startswith(self._before):
            text, self._before = self._decode(self._ids[self._known :]), ""
        piece = text[len(self._before) :]
        self._advance()
        return piece

    def _advance(self) -> None:
        self._known = len(self._ids)
        self._before = self._decode(self._ids)

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip_special)


class OutputText:
    """The text of one request as it grows (implements `types.TextStream`).

    Attributes:
        text: decoded so far; cut at the stop string once one was completed.
        stop_reason: the stop string that ended the text, or None.
    """

    def __init__(self, decoder: _Decoder, stop: Sequence[str], include_stop: bool) -> None:
        self.text = ""
        self.stop_reason: str | None = None
        self._decoder = decoder
        self._stop = tuple(stop)
        self._include_stop = include_stop
        self._longest = max(map(len, self._stop), default=0)
        self._ended = False

    def push(self, token: int, *, check_stop: bool = True) -> str | None:
        """Append a token's text; return the stop string it completed, cutting ``text`` there.

        Of several stop strings the one that ends first counts (of these the longest), as if the
        text had come one character at a time. With ``check_stop=False`` (fewer than ``min_tokens``
        so far) stop strings that end in this token are ignored, now and later.
        """
        if self._ended:
            return None
        piece = self._decoder.push(token)
        if not piece:
            return None
        old = len(self.text)
        self.text += piece
        if check_stop and self._stop:
            return self._check_stop(old)
        return None

    def flush(self) -> None:
        """The request has ended: half a character comes out as U+FFFD. Later tokens are ignored."""
        if not self._ended:
            self.text += self._decoder.flush()
            self._ended = True

    @property
    def stable_length(self) -> int:
        """Characters of ``text`` that are final: all but a tail that may begin a stop string."""
        if self._ended or not self._stop or self._include_stop:
            return len(self.text)
        tail = self.text[max(0, len(self.text) - self._longest + 1) :]
        for start in range(len(tail)):
            if any(stop.startswith(tail[start:]) for stop in self._stop):
                return len(self.text) - len(tail) + start
        return len(self.text)

    @property
    def stable_text(self) -> str:
        """What may be shown already: never part of a stop string, never half a character."""
        return self.text[: self.stable_length]

    def _check_stop(self, old: int) -> str | None:
        best: tuple[int, int, str] | None = None
        for stop in self._stop:
            start = self.text.find(stop, max(0, old - len(stop) + 1))
            if start >= 0:
                found = (start + len(stop), start, stop)
                best = found if best is None else min(best, found)
        if best is None:
            return None
        end, start, self.stop_reason = best
        self.text = self.text[: end if self._include_stop else start]
        self._ended = True
        return self.stop_reason


class Detokenizer:
    """Makes the text streams of one tokenizer and keeps what they share (bytes of tokens)."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        decoder: Any = tokenizer.decoder
        self._byte_level = isinstance(decoder, decoders.ByteLevel)
        self._special = frozenset(
            token for token, added in tokenizer.get_added_tokens_decoder().items() if added.special
        )
        self._bytes: dict[int, bytes] = {}
        self._texts: dict[int, str] = {}

    def stream(
        self,
        prompt_token_ids: Sequence[int] = (),
        *,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        skip_special_tokens: bool = True,
    ) -> OutputText:
        """The text of one new output after ``prompt_token_ids`` (which are not part of it)."""
        skip = self._special if skip_special_tokens else frozenset[int]()
        decoder: _Decoder
        if self._byte_level:
            decoder = _ByteLevelDecoder(self, skip)
        else:
            decoder = _WindowDecoder(self.tokenizer, prompt_token_ids, skip, skip_special_tokens)
        return OutputText(decoder, stop, include_stop)

    def token_bytes(self, token: int) -> bytes:
        """Bytes of one token of a byte-level tokenizer; none for an id that it does not know."""
        known = self._bytes.get(token)
        if known is None:
            word = self.tokenizer.id_to_token(token) or ""
            try:
                known = bytes(_BYTE_OF_CHAR[char] for char in word)
            except KeyError:  # an added token outside the alphabet is its own text
                known = word.encode("utf-8", "replace")
            self._bytes[token] = known
        return known

    def token_text(self, token: int) -> str:
        """One token shown alone (for logprobs), special tokens included."""
        text = self._texts.get(token)
        if text is None:
            text = self.tokenizer.decode([token], skip_special_tokens=False)
            self._texts[token] = text
        return text
