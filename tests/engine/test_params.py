"""SamplingParams: defaults, normal forms, and a table of everything that must be refused."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest

from tightrope.engine.params import SamplingParams, tokenize_bad_words

NAN, INF = float("nan"), float("inf")

REFUSED: list[tuple[str, list[Any]]] = [
    ("temperature", [-0.1, NAN, INF, True, "1", None, 10**400]),
    ("top_k", [-2, 1.5, True, "5", None, NAN]),
    ("top_p", [0, 0.0, -0.5, 1.01, NAN, True, None]),
    ("min_p", [-0.01, 1.5, NAN, INF, False]),
    ("seed", [1.0, True, "7", 2**64, -(2**63) - 1]),
    ("n", [0, -1, 2.0, True, None]),
    ("max_tokens", [0, -1, 5.0, True]),
    ("min_tokens", [-1, 0.5, False, None]),
    ("stop", ["", ["a", ""], [1], 7, {"a": 1}, b"a"]),
    ("stop_token_ids", [[-1], [True], [1.0], "12", 3]),
    ("include_stop_str_in_output", [1, None, "yes"]),
    ("ignore_eos", [0, None]),
    ("skip_special_tokens", [1]),
    ("presence_penalty", [2.1, -2.1, NAN, True]),
    ("frequency_penalty", [2.1, -2.1, INF, "1"]),
    ("repetition_penalty", [0, -1.0, NAN, INF, True]),
    ("logit_bias", [{1: NAN}, {1: INF}, {-1: 0.0}, {1.5: 0.0}, {"x": 1}, {1: True}, [1, 2]]),
    ("allowed_token_ids", [[], [-3], ["1"], "12", 4]),
    ("bad_words", [[""], [3], "word", {"a": 1}]),
    ("logprobs", [-2, True, 1.0, "5"]),
    ("logprobs_mode", ["logits", None, 3]),
    ("prompt_logprobs", [-2, False, 2.5]),
    ("priority", [1.5, True, "high"]),
    ("speculation", [True, -1, 1.5, "ngram", {1: 2}]),
]


@pytest.mark.parametrize(
    ("field", "value"), [(field, value) for field, values in REFUSED for value in values]
)
def test_bad_values_are_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=field) as error:
        SamplingParams(**{field: value})
    assert "must" in str(error.value)
    assert ", got " in str(error.value)


def test_the_table_covers_every_field_with_a_rule() -> None:
    free = {"guide"}
    assert {field for field, _ in REFUSED} == set(SamplingParams.__dataclass_fields__) - free


def test_defaults() -> None:
    params = SamplingParams()
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (1.0, 0, 1.0, 0.0)
    assert (params.n, params.max_tokens, params.min_tokens, params.seed) == (1, None, 0, None)
    assert (params.stop, params.stop_token_ids, params.bad_words) == ((), (), ())
    assert params.allowed_token_ids is None
    assert params.logit_bias is None
    assert params.logprobs is None
    assert params.logprobs_mode == "raw"
    assert not params.greedy
    assert SamplingParams(temperature=0, n=3).greedy


def test_normal_forms() -> None:
    params = SamplingParams(
        stop="end",
        stop_token_ids=[3, 3, np.int64(4)],  # pyright: ignore[reportArgumentType]
        logit_bias={"7": 1, 8: np.float32(-2)},  # pyright: ignore[reportArgumentType]
        allowed_token_ids=range(3),
        bad_words=["a", "b", "a"],
        top_k=-1,
        speculation=4,
    )
    assert params.stop == ("end",)
    assert params.stop_token_ids == (3, 4)
    assert params.logit_bias == {7: 1.0, 8: -2.0}
    assert params.allowed_token_ids == (0, 1, 2)
    assert params.bad_words == ("a", "b")
    assert params.top_k == 0
    assert params.speculation == 4
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")
    assert SamplingParams(speculation=False).speculation is False
    assert SamplingParams(seed=-1).seed == -1


def test_min_tokens_may_not_exceed_max_tokens() -> None:
    assert SamplingParams(min_tokens=5, max_tokens=5).min_tokens == 5
    with pytest.raises(ValueError, match="min_tokens must be at most max_tokens=4"):
        SamplingParams(min_tokens=5, max_tokens=4)


def test_replace_validates_again() -> None:
    params = SamplingParams(stop="x", top_p=0.5)
    changed = params.replace(n=2)
    assert (changed.n, changed.stop, changed.top_p, params.n) == (2, ("x",), 0.5, 1)
    with pytest.raises(ValueError, match="top_p"):
        params.replace(top_p=2)
    with pytest.raises(ValueError, match="no field 'top_q'"):
        params.replace(top_q=2)


def test_it_is_a_value() -> None:
    params = SamplingParams(logit_bias={3: 1.0}, stop=["x"], speculation={"k": 2})
    assert pickle.loads(pickle.dumps(params)) == params
    assert hash(params) == hash(params.replace())


@pytest.mark.parametrize(
    ("field", "value"),
    [("stop_token_ids", [1, 10]), ("allowed_token_ids", [10]), ("logit_bias", {10: 1.0})],
)
def test_ids_outside_the_vocabulary(field: str, value: Any) -> None:
    params = SamplingParams(**{field: value})
    params.validate_for(11)
    with pytest.raises(ValueError, match=rf"{field} .*0 to 9, got 10"):
        params.validate_for(10)


def test_bad_words_are_tokenised_with_and_without_a_space() -> None:
    pieces = {"cat": [1], " cat": [2], "dog": [3, 4], " dog": [5, 4], "x": [6], " x": [6]}
    found = tokenize_bad_words(["cat", " dog", "x"], pieces.__getitem__)
    assert found == ((1,), (2,), (3, 4), (5, 4), (6,))
    assert tokenize_bad_words(None, pieces.__getitem__) == ()
    with pytest.raises(ValueError, match="bad_words"):
        tokenize_bad_words(["cat"], lambda text: [])
