"""Grammars on llguidance: an Earley parser over a derivative lexer, lazy, about a millisecond to
compile a schema.

What the library leaves to its caller, and is dealt with here:

* Nothing raises. A matcher that meets a limit or a wrong token is in error for good, silently; so
  errors are read after every compile, fill and accept.
* The batch call for drafts refuses an empty draft, overflows on negative ids, and leaves the rows
  behind a refused token or the end of the text as they were. So plain and drafted rows take two
  calls, drafts are cut at ids outside the vocabulary and behind an end token, rows are preset to
  ones, and what is valid is read from the mask's own bits.
* Where bytes are forced the mask holds the canonical token alone, but other splits of the same
  bytes would be accepted; so the masks decide, never the matcher's own validation.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer

from ..protocol import Bitmask, FillJob, GrammarRefused, GrammarSpec, RefusalKind
from .llguidance_schema import prepare

# Sets of tokens whose masks are made once: blanks, and text without quotes or escapes up to so many
# characters. The library's own steps are 10 and 30; finer ones save about a third of a mask's time
# near the end of a string with maxLength. They change no mask.
_SLICES = [
    r"[\x20\x0A\x0D\x09]+",
    *(rf'[^"\\\x00-\x1F\x7F]{{1,{most}}}' for most in (3, 6, 10, 15, 30)),
    r'[^"\\\x00-\x1F\x7F]+',
]
_UNSUPPORTED = re.compile(
    r"Unimplemented keys|(not|only) supported|Unknown format|not disjoint|unsupported"
    r"|Failed to generate regex",
    re.IGNORECASE,
)
_LIMIT = re.compile(
    r"too (large|big|many|complex|deep)|limit|fuel|exceed|Unable to determine|TooComplex"
    r"|Expected positive integer",  # it is one, but a large one
    re.IGNORECASE,
)
# Of what the library's regex dialect does not read, this is a fault in every dialect.
_BROKEN_REGEX = re.compile(
    r"error: (unclosed|unopened|repetition operator missing|invalid repetition count)"
)
_NO_TEXT = re.compile(r"Unsatisfiable|unsatisfiable|NoExtension")


def _refusal(message: str) -> GrammarRefused:
    kind: RefusalKind = "invalid"
    if message.startswith("regex parse error"):
        if "decimal literal invalid" in message:
            kind = "limit"
        elif not _BROKEN_REGEX.search(message):
            kind = "unsupported"
    elif _NO_TEXT.search(message):
        kind = "unsatisfiable"
    elif _UNSUPPORTED.search(message):
        kind = "unsupported"
    elif _LIMIT.search(message):
        kind = "limit"
    reason = " ".join(message.split("<state>")[0].split())
    if reason.startswith("NoExtension"):
        reason = "no document matches the schema"
    remote = re.search(r"Resource '([^']*)' is not present in a registry", reason)
    if remote is not None:
        reason = (
            f"$ref {remote[1]!r} leads out of the schema; only references within it are allowed"
        )
    return GrammarRefused(kind, reason[:300] or "unknown error")


def _dropped(warnings: Sequence[str]) -> tuple[str, ...]:
    """The schema keywords that warnings speak of."""
    names: list[str] = []
    for warning in warnings:
        keys = re.match(r"Unimplemented keys: (\[.*\])", warning, re.DOTALL)
        if keys:
            names += cast("list[str]", json.loads(keys[1]))
        elif warning.startswith("Unknown format"):
            names.append("format")
        elif warning.startswith("oneOf"):
            names.append("oneOf")
        else:
            names.append(warning)
    return tuple(names)


def _without_spellings(tokenizer: str) -> str:
    """The tokenizer's JSON with special tokens that no text spells.

    The library tokenizes forced text with them, and would force the special token itself where a
    constant or a key holds its spelling. Ids stay, and the library needs no more of them.
    """
    description = json.loads(tokenizer)
    names = {
        token["content"]: f"\0<special:{token['id']}>\0"  # JSON text holds no NUL
        for token in description["added_tokens"]
        if token["special"]
    }
    for token in description["added_tokens"]:
        token["content"] = names.get(token["content"], token["content"])
    model = description["model"]
    if isinstance(model["vocab"], dict):
        vocab = cast("dict[str, int]", model["vocab"])
        model["vocab"] = {names.get(word, word): i for word, i in vocab.items()}
    else:  # Unigram
        pieces = cast("list[tuple[str, float]]", model["vocab"])
        model["vocab"] = [(names.get(word, word), score) for word, score in pieces]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    return json.dumps(description)


class LLGuidanceGrammar:
    """One request's matcher."""

    def __init__(self, backend: LLGuidanceBackend, matcher: LLMatcher) -> None:
        self.backend = backend
        self.matcher = matcher

    @property
    def error(self) -> str | None:
        if not self.matcher.is_error():
            return None
        return " ".join(self.matcher.get_error().split("<state>")[0].split()) or "refused a token"

    @property
    def is_finished(self) -> bool:
        return self.matcher.is_stopped() and not self.matcher.is_error()

    def accept(self, tokens: Sequence[int]) -> bool:
        ids = list(tokens)
        if ids and not (min(ids) >= 0 and max(ids) < self.backend.vocab_size):
            return False
        # Behind a finished text the batch form refuses the end token, the single form takes it.
        end = ids.pop() if ids and ids[-1] in self.backend.eos_token_ids else None
        if ids and not self.matcher.consume_tokens(ids):
            return False
        return end is None or self.matcher.consume_token(end)

    def rollback(self, count: int) -> None:
        if not self.matcher.rollback(count):
            raise ValueError(f"cannot roll back {count} tokens: {self.error}")

    def forced(self, limit: int = 32) -> list[int]:
        if self.matcher.is_error():
            return []
        ahead = [] if self.matcher.is_stopped() else self.matcher.compute_ff_tokens()[:limit]
        if not ahead and not self.matcher.is_stopped():
            return []
        rows = np.empty((len(ahead) + 1, self.backend.mask_words), np.int32)
        self.backend.fill([(self, 0, ahead)], rows)
        return self.backend.single_tokens(rows)[:limit]

    def fork(self) -> LLGuidanceGrammar:
        return LLGuidanceGrammar(self.backend, self.matcher.deep_copy())


class LLGuidanceCompiled:
    """A compiled grammar: a pristine matcher that has already met its first mask."""

    def __init__(
        self,
        backend: LLGuidanceBackend,
        matcher: LLMatcher,
        spec: GrammarSpec,
        unenforced: set[str],
    ) -> None:
        self.backend = backend
        self.unenforced = tuple(sorted({*_dropped(matcher.get_grammar_warnings()), *unenforced}))
        self.num_bytes = 64 * 1024 + 64 * len(spec.source)
        self._matcher = matcher

    def start(self) -> LLGuidanceGrammar:
        return LLGuidanceGrammar(self.backend, self._matcher.deep_copy())


class LLGuidanceBackend:
    """Masks of one tokenizer. Special tokens never match as text; end tokens only at the end.

    Args:
        tokenizer: a ``tokenizers.Tokenizer``.
        vocab_size: rows of the model's head; ids past the tokenizer's own are never allowed.
        eos_token_ids: every id that ends the text.
    """

    name = "llguidance"

    def __init__(self, tokenizer: Any, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        if not eos_token_ids:
            raise ValueError("guide: the model has no end-of-sequence token to end a text with")
        self._tokenizer = LLTokenizer(
            _without_spellings(tokenizer.to_str()),
            n_vocab=vocab_size,
            eos_token=sorted(eos_token_ids),
            slices=_SLICES,
        )
        self.vocab_size = vocab_size
        self.mask_words = (vocab_size + 31) // 32
        self.eos_token_ids = frozenset(eos_token_ids)
        self._executor = LLExecutor(max(1, min(16, os.cpu_count() or 1)))
        self._limits = LLParserLimits(verbose_errors=False)

    def compile(self, spec: GrammarSpec) -> LLGuidanceCompiled:
        if spec.kind != "json":
            raise GrammarRefused("unsupported", f"llguidance compiles no {spec.kind!r} here")
        spaces = rf"[\x20\x0A\x0D\x09]{{0,{spec.max_whitespace}}}"
        source, unenforced = prepare(spec.source, lenient=spec.lenient)
        grammar = LLMatcher.grammar_from_json_schema(
            source,
            overrides={
                "whitespace_flexible": spec.max_whitespace > 0,
                "whitespace_pattern": spaces if spec.max_whitespace else None,
                "lenient": spec.lenient,
                "coerce_one_of": spec.lenient,
            },
        )
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=self._limits)
        if matcher.is_error():
            raise _refusal(matcher.get_error())
        # An empty language shows at the first mask only; its lexer states are then shared too.
        matcher.compute_bitmask()
        if matcher.is_error():
            raise _refusal(matcher.get_error())
        return LLGuidanceCompiled(self, matcher, spec, unenforced)

    def fill(self, jobs: Sequence[FillJob], bitmask: Bitmask) -> list[int]:
        """See `GrammarBackend.fill`; -1 stands for a matcher in error."""
        if bitmask.shape[1] != self.mask_words or not bitmask.flags.c_contiguous:
            raise ValueError(f"bitmask must be contiguous int32 [N, {self.mask_words}]")
        plain: list[tuple[LLMatcher, int]] = []
        drafted: list[tuple[LLMatcher, int, list[int]]] = []
        usable: list[list[int]] = []
        for grammar, first, drafts in jobs:
            matcher = cast("LLGuidanceGrammar", grammar).matcher
            tokens = self._usable(drafts)
            usable.append(tokens)
            if tokens:
                drafted.append((matcher, first, tokens))
            else:
                plain.append((matcher, first))
            bitmask[first : first + len(drafts) + 1] = -1
        pointer, stride, rows = bitmask.ctypes.data, bitmask.shape[1] * 4, bitmask.shape[0]
        if plain:
            self._executor.unsafe_compute_mask_ptr(cast("Any", plain), pointer, stride, rows)
        if drafted:
            self._executor.unsafe_compute_mask_ptr_with_draft_token(drafted, pointer, stride, rows)
        return self._counts(jobs, usable, bitmask)

    def _usable(self, drafts: Sequence[int]) -> list[int]:
        tokens = list(drafts)
        if not tokens:
            return tokens
        if min(tokens) < 0 or max(tokens) >= self.vocab_size:
            wrong = next(i for i, t in enumerate(tokens) if not 0 <= t < self.vocab_size)
            tokens = tokens[:wrong]
        if not self.eos_token_ids.isdisjoint(tokens):
            end = next(i for i, t in enumerate(tokens) if t in self.eos_token_ids)
            tokens = tokens[: end + 1]
        return tokens

    def _counts(
        self, jobs: Sequence[FillJob], usable: Sequence[list[int]], bitmask: Bitmask
    ) -> list[int]:
        firsts = [first for _, first, _ in jobs]
        tokens_N = np.fromiter((t for tokens in usable for t in tokens), np.int64)
        rows_N = np.fromiter(
            (
                first + i
                for first, tokens in zip(firsts, usable, strict=True)
                for i in range(len(tokens))
            ),
            np.int64,
        )
        refused_N = ((bitmask[rows_N, tokens_N >> 5] >> (tokens_N & 31)) & 1) == 0
        counts: list[int] = []
        start = 0
        for (grammar, first, drafts), tokens in zip(jobs, usable, strict=True):
            refused = refused_N[start : start + len(tokens)]
            start += len(tokens)
            count = int(refused.argmax()) if refused.any() else len(tokens)
            if cast("LLGuidanceGrammar", grammar).matcher.is_error():
                bitmask[first : first + len(drafts) + 1] = -1
                count = -1
            counts.append(count)
        return counts

    def single_tokens(self, bitmask: Bitmask) -> list[int]:
        """The tokens of the leading rows that allow exactly one."""
        words = bitmask.view(np.uint32)
        tokens: list[int] = []
        for row in words:
            (used,) = row.nonzero()
            word = int(row[used[0]]) if len(used) == 1 else 0
            if word == 0 or word & (word - 1):
                break
            tokens.append(int(used[0]) * 32 + word.bit_length() - 1)
        return tokens

    def close(self) -> None:
        """Nothing to stop: the library's threads end with the executor."""
