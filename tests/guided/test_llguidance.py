"""The llguidance backend: texts to accept and refuse, and masks that agree with the matcher."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
import pytest

from tightrope.engine.hooks import EngineContext
from tightrope.guided import Guide
from tightrope.guided.backends.llguidance import LLGuidanceBackend, LLGuidanceGrammar

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def backend(context: EngineContext) -> LLGuidanceBackend:
    return LLGuidanceBackend(context.tokenizer, context.vocab_size, sorted(context.eos_token_ids))


def start(backend: LLGuidanceBackend, schema: Any, **options: Any) -> LLGuidanceGrammar:
    return backend.compile(Guide.json(schema, **options).spec()).start()


def allowed(backend: LLGuidanceBackend, grammar: LLGuidanceGrammar) -> set[int]:
    row = np.zeros((1, backend.mask_words), np.int32)
    assert backend.fill([(grammar, 0, [])], row) == [0]
    return bits(row[0])


def bits(row: np.ndarray[Any, Any]) -> set[int]:
    unpacked = np.unpackbits(row.view(np.uint8), bitorder="little")
    return set(np.flatnonzero(unpacked).tolist())


def encode(context: EngineContext, text: str) -> list[int]:
    return context.tokenizer.encode(text, add_special_tokens=False).ids


def feed(
    backend: LLGuidanceBackend, context: EngineContext, grammar: LLGuidanceGrammar, text: str
) -> bool:
    """Whether the masks let the text be written and ended, checking them against the matcher."""
    for token in encode(context, text):
        mask = allowed(backend, grammar)
        accepts = grammar.fork().accept([token])
        # Where one token is forced the matcher takes other splits too; never the other way round.
        assert accepts == (token in mask) or (accepts and len(mask) == 1)
        if token not in mask:
            return False
        assert grammar.accept([token])
    return context.eos_token_ids <= allowed(backend, grammar)


TABLE: list[tuple[str, Any, list[str], list[str]]] = [
    (
        "object",
        PERSON,
        ['{"name":"Ada","age":36}', '{ "name" : "日é", "age":\n-1 }', '{"name":"","age":0}'],
        [
            '{"name":"Ada"}',
            '{"age":1,"name":"a"}',
            '{"name":"Adaaaa","age":1}',
            '{"name":1,"age":1}',
            '{"name":"a","age":1,"x":1}',
            '{"name":"a","age":01}',
            '{"name":"a","age":1.5}',
            "{'name':1}",
            '  {"name":"a","age":1}',
            '{"name":"a","age":1}}',
        ],
    ),
    ("boolean", {"type": "boolean"}, ["true", "false"], ["True", "nul", "truefalse", '"true"']),
    (
        "any",
        True,
        ['{"a":[1,null,"x"]}', "[]", "-1.5e3", '"é\\n"'],
        ["nul", "{'a':1}", "[1,]", '"\\q"', '"\\u12"', '"a\tb"', "NaN"],
    ),
    (
        "enum",
        {"enum": [True, None, 'say "hi"', 3, {"k": [1]}]},
        ["true", "null", '"say \\"hi\\""', "3", '{"k":[1]}'],
        ["True", "false", "4", '"say hi"', '{"k":[2]}'],
    ),
    (
        "array",
        {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 3},
        ["[1,2]", "[1, 2, 3]"],
        ["[1]", "[1,2,3,4]", "[]", '[1,"2"]'],
    ),
    (
        "recursive",
        {
            "$defs": {
                "node": {
                    "type": "object",
                    "properties": {"kids": {"type": "array", "items": {"$ref": "#/$defs/node"}}},
                    "required": ["kids"],
                    "additionalProperties": False,
                }
            },
            "$ref": "#/$defs/node",
        },
        ['{"kids":[]}', '{"kids":[{"kids":[{"kids":[]}]}]}'],
        ["{}", '{"kids":[1]}', '{"kids":[{"kids":[{}]}]}'],
    ),
    (
        "code points",
        {"type": "string", "minLength": 3, "maxLength": 3},
        ['"abc"', '"日本語"', '"a\\"b"'],
        ['"ab"', '"abcd"', '"日本"'],
    ),
    (
        "keys that need escapes",
        {
            "type": "object",
            "properties": {'he"y': {"const": 1}, "ключ": {"const": 2}},
            "required": ['he"y', "ключ"],
            "additionalProperties": False,
        },
        ['{"he\\"y":1,"ключ":2}'],
        ['{"he"y":1,"ключ":2}', '{"he\\"y":1}'],
    ),
    ("classes Python lacks", {"type": "string", "pattern": r"^\p{L}+$"}, ['"é"'], ['"1"']),
    ("pattern searches", {"type": "string", "pattern": "a+$"}, ['"baa"'], ['"ab"', '""']),
    (
        "required without properties",
        {"type": "object", "required": ["city"]},
        ['{"city":"Oslo"}'],
        ["{}", "[]", '{"zip":1}'],
    ),
    (
        "draft 4 bounds",
        {
            "$schema": "http://json-schema.org/draft-04/schema#",
            "type": "integer",
            "minimum": 5,
            "exclusiveMinimum": True,
            "maximum": 9,
        },
        ["6", "9"],
        ["5", "10"],
    ),
]


@pytest.mark.parametrize(("schema", "accept", "refuse"), [row[1:] for row in TABLE], ids=[
    row[0] for row in TABLE
])  # fmt: skip
def test_texts(
    backend: LLGuidanceBackend,
    context: EngineContext,
    schema: Any,
    accept: list[str],
    refuse: list[str],
) -> None:
    compiled = backend.compile(Guide.json(schema).spec())
    assert compiled.unenforced == ()
    for text in accept:
        assert feed(backend, context, compiled.start(), text), text
    for text in refuse:
        assert not feed(backend, context, compiled.start(), text), text


@pytest.mark.parametrize("limit", [0, 1, 3, 16])
def test_whitespace_is_bounded(
    backend: LLGuidanceBackend, context: EngineContext, limit: int
) -> None:
    compiled = backend.compile(Guide.json(PERSON, max_whitespace=limit).spec())
    for count in (0, 1, 2, 3, 4, 16, 17):
        text = '{"name":' + " " * count + '"a","age":1}'
        assert feed(backend, context, compiled.start(), text) == (count <= limit), count


def test_every_token_of_the_mask_is_accepted_and_no_other(
    backend: LLGuidanceBackend, context: EngineContext
) -> None:
    grammar = start(backend, PERSON)
    for token in encode(context, '{"name": "é","age":1}'):
        mask = allowed(backend, grammar)
        for candidate in range(context.vocab_size):
            accepts = grammar.fork().accept([candidate])
            assert accepts == (candidate in mask) or (accepts and len(mask) == 1)
        grammar.accept([token])


def test_specials_and_rows_past_the_tokenizer_are_never_text(
    backend: LLGuidanceBackend, context: EngineContext
) -> None:
    grammar = start(backend, {"type": "string"})
    grammar.accept(encode(context, '"<'))
    inside = allowed(backend, grammar)
    assert inside.isdisjoint(range(4))
    assert max(inside) < context.tokenizer.get_vocab_size()
    # The spelling of a special token is text like any other.
    assert feed(backend, context, start(backend, {"type": "string"}), '"<b|im_end|>"')
    grammar.accept(encode(context, '"'))
    assert grammar.is_finished
    assert allowed(backend, grammar) == context.eos_token_ids
    assert grammar.accept([2])
    grammar.rollback(2)
    assert allowed(backend, grammar) == inside


@pytest.mark.parametrize("special", ["<|bos|>", "<|eos|>", "<|im_end|>", "<|im_start|>"])
@pytest.mark.parametrize("place", ["const", "enum", "property", "required", "pattern"])
def test_the_spelling_of_a_special_token_is_forced_as_text(
    backend: LLGuidanceBackend, context: EngineContext, special: str, place: str
) -> None:
    spelled = f"a{special}b"
    schema, text = {
        "const": ({"const": spelled}, json.dumps(spelled)),
        "enum": ({"enum": [spelled, 7]}, json.dumps(spelled)),
        "property": (
            {"properties": {special: {"const": 1}}, "required": [special], "type": "object"},
            f'{{"{special}":1}}',
        ),
        "required": ({"required": [special], "type": "object"}, f'{{"{special}":1}}'),
        "pattern": ({"type": "string", "pattern": f"^{re.escape(special)}$"}, f'"{special}"'),
    }[place]
    grammar = start(backend, schema, max_whitespace=0)
    written = ""
    while not context.eos_token_ids & allowed(backend, grammar):
        mask = allowed(backend, grammar)
        assert mask.isdisjoint(range(4))
        # One character after the other is ordinary text, and so is what is forced.
        rest = text[len(written) :]
        tokens = grammar.forced() or encode(context, rest[0])
        assert set(tokens).isdisjoint(range(4))
        written += context.tokenizer.decode(tokens, skip_special_tokens=False)
        assert text.startswith(written)
        assert tokens[0] in mask
        assert grammar.accept(tokens)
    assert written == text


def test_draft_rows_are_the_rows_filled_one_at_a_time(
    backend: LLGuidanceBackend, context: EngineContext
) -> None:
    texts = ['{"name":"ab","age":12}', '{ "name": "日"', "["]
    schemas = [PERSON, PERSON, {"type": "array"}]
    grammars = [start(backend, schema) for schema in schemas]
    drafts = [encode(context, text) for text in texts]
    drafts[0].append(1)  # the end token
    drafts.append([])
    grammars.append(start(backend, True))
    firsts = np.cumsum([1] + [len(d) + 1 for d in drafts]).tolist()
    bitmask = np.zeros((firsts[-1] + 1, backend.mask_words), np.int32)
    counts = backend.fill(list(zip(grammars, firsts, drafts, strict=False)), bitmask)
    assert counts == [len(d) for d in drafts]
    assert not bitmask[0].any()  # rows of nobody stay as they are
    assert not bitmask[-1].any()
    for grammar, first, tokens in zip(grammars, firsts, drafts, strict=False):
        for i, token in enumerate(tokens):
            assert bits(bitmask[first + i]) == allowed(backend, grammar)
            assert grammar.accept([token])
        if 1 not in tokens:
            assert bits(bitmask[first + len(tokens)]) == allowed(backend, grammar)


@pytest.mark.parametrize("bad", ["x", -1, 10**6, 2**40, 3, "padding"])
def test_a_refused_draft_leaves_the_matcher_as_it_was(
    backend: LLGuidanceBackend, context: EngineContext, bad: Any
) -> None:
    good = encode(context, '{"name":')
    named = {"x": encode(context, "x")[0], "padding": context.vocab_size - 1}
    wrong: int = named[bad] if isinstance(bad, str) else bad
    for index in range(len(good) + 1):
        grammar = start(backend, PERSON)
        before = allowed(backend, grammar)
        drafts = [*good[:index], wrong, *good[index:]]
        bitmask = np.zeros((len(drafts) + 1, backend.mask_words), np.int32)
        assert backend.fill([(grammar, 0, drafts)], bitmask) == [index]
        assert (bitmask[index + 1 :] == -1).all()
        assert grammar.error is None
        assert allowed(backend, grammar) == before
        assert grammar.accept(good)


def test_nothing_is_valid_behind_an_end_token(
    backend: LLGuidanceBackend, context: EngineContext
) -> None:
    grammar = start(backend, {"type": "boolean"})
    drafts = [*encode(context, "true"), 2, 1, 77]
    bitmask = np.zeros((len(drafts) + 1, backend.mask_words), np.int32)
    assert backend.fill([(grammar, 0, drafts)], bitmask) == [len(drafts) - 2]


@pytest.mark.parametrize("max_whitespace", [0, 16])
def test_forced_tokens_are_single_bits_and_canonical(
    backend: LLGuidanceBackend, context: EngineContext, max_whitespace: int
) -> None:
    grammar = start(backend, PERSON, max_whitespace=max_whitespace)
    text = '{"name":"ab","age":1}'
    tokens, seen = encode(context, text), 0
    for i, token in enumerate(tokens):
        forced = grammar.forced()
        seen += len(forced) > 1
        assert forced == tokens[i : i + len(forced)]
        probe = grammar.fork()
        for one in forced:
            assert allowed(backend, probe) == {one}
            assert probe.accept([one])
        assert (len(allowed(backend, grammar)) == 1) == bool(forced)
        assert grammar.forced(1) == forced[:1]
        grammar.accept([token])
    assert seen >= 2
    assert grammar.forced() == []  # two tokens may end the text


def test_the_end_is_forced_where_one_token_ends_the_text(context: EngineContext) -> None:
    single = LLGuidanceBackend(context.tokenizer, context.vocab_size, [1])
    grammar = start(single, {"const": "name"}, max_whitespace=0)
    assert grammar.forced() == [*encode(context, '"name"'), 1]


def test_rollback_takes_tokens_back(backend: LLGuidanceBackend, context: EngineContext) -> None:
    grammar = start(backend, PERSON)
    tokens = encode(context, '{"name": "a')
    masks: list[set[int]] = []
    for token in tokens:
        masks.append(allowed(backend, grammar))
        grammar.accept([token])
    for mask in reversed(masks):
        grammar.rollback(1)
        assert allowed(backend, grammar) == mask
    with pytest.raises(ValueError, match="roll back"):
        grammar.rollback(1)


def test_errors_are_sticky_and_seen(backend: LLGuidanceBackend, context: EngineContext) -> None:
    broken, sound = start(backend, PERSON), start(backend, PERSON)
    assert not broken.accept(encode(context, "x"))
    assert broken.error
    bitmask = np.zeros((4, backend.mask_words), np.int32)
    drafts = encode(context, "{")
    assert backend.fill([(broken, 0, drafts), (sound, 2, drafts)], bitmask) == [-1, 1]
    assert (bitmask[:2] == -1).all()
    assert sound.error is None
    assert broken.forced() == []


@pytest.mark.parametrize(
    ("schema", "unenforced", "violation"),
    [
        ({"type": "array", "uniqueItems": True, "items": {"enum": [1]}}, ("uniqueItems",), "[1,1]"),
        ({"not": {"const": 1}, "type": "integer"}, ("not",), "1"),
        (
            {"type": "integer", "if": {"minimum": 5}, "then": {"maximum": 6}},
            ("if", "then"),
            "7",
        ),
        ({"type": "string", "format": "json-pointer", "maxLength": 3}, ("format",), '"a"'),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, ("oneOf",), "1"),
    ],
)
def test_lenient_names_what_it_drops(
    backend: LLGuidanceBackend,
    context: EngineContext,
    schema: dict[str, Any],
    unenforced: tuple[str, ...],
    violation: str,
) -> None:
    guide = Guide.json(schema)
    compiled = backend.compile(guide.spec(lenient=True))
    assert compiled.unenforced == unenforced
    # A document shows it: the masks let it through and the schema does not.
    assert feed(backend, context, compiled.start(), violation)
    if unenforced != ("format",):
        assert guide.validate(violation, unenforced=unenforced)[0] is False


def test_a_large_enum_and_a_union_stay_quick(
    backend: LLGuidanceBackend, context: EngineContext
) -> None:
    enum = [f"item-{i:04d}" for i in range(4000)]
    compiled = backend.compile(Guide.json({"enum": enum}).spec())
    assert feed(backend, context, compiled.start(), '"item-3999"')
    assert not feed(backend, context, compiled.start(), '"item-4000"')
    properties = {f"p{i:02d}": {"type": "integer"} for i in range(40)}
    schema = {"type": "object", "properties": properties, "additionalProperties": False}
    compiled = backend.compile(Guide.json(schema).spec())
    assert feed(backend, context, compiled.start(), json.dumps({"p03": 1, "p17": 2, "p39": 3}))
    assert not feed(backend, context, compiled.start(), '{"p40":1}')


def test_the_tokenizer_must_fit_the_head(context: EngineContext) -> None:
    with pytest.raises(ValueError, match="vocab"):
        LLGuidanceBackend(context.tokenizer, 100, [1])
    with pytest.raises(ValueError, match="end-of-sequence"):
        LLGuidanceBackend(context.tokenizer, context.vocab_size, [])
