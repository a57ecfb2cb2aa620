"""The sampler's laws: joint laws of three tokens against enumeration, with drafts on and off.

The reference is written in float64 numpy from the parameters' meanings; nothing of it is shared
with the sampler. The model is a table: the logits of each prefix of a vocabulary of six.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from tightrope.engine import processors, sampler
from tightrope.engine.noise import derive_seed
from tightrope.engine.params import SamplingParams
from tightrope.engine.sampler import SamplingBatch, sample
from tightrope.engine.sampling_state import SamplingState
from tightrope.engine.types import MaskRows, Request

V, DEPTH, PROMPT = 6, 3, (1, 4)
END = 5
OUTPUTS = [o for n in range(DEPTH + 1) for o in itertools.product(range(V), repeat=n)]
INDEX = {output: i for i, output in enumerate(OUTPUTS)}
_RNG = np.random.default_rng(5)
LOGITS = _RNG.normal(0, 1.3, (len(OUTPUTS), V)).astype(np.float32)
# A grammar: each prefix allows some tokens; some prefixes allow nothing but the end.
ALLOWED = _RNG.random((len(OUTPUTS), V)) < 0.6
ALLOWED[:, END] = True
ALLOWED[INDEX[(0,)]] = ALLOWED[INDEX[(2,)]] = np.arange(V) == END


@dataclass
class Case:
    params: dict[str, Any]
    mask: bool = False
    words: tuple[tuple[int, ...], ...] = ()


CASES = {
    "plain": Case({}),
    "temperature": Case({"temperature": 0.6}),
    "hot": Case({"temperature": 1.9}),
    "top_k": Case({"top_k": 3}),
    "top_p": Case({"top_p": 0.7}),
    "min_p": Case({"min_p": 0.3}),
    "top_k top_p min_p": Case({"temperature": 1.4, "top_k": 4, "top_p": 0.85, "min_p": 0.25}),
    "presence": Case({"presence_penalty": 1.7}),
    "frequency": Case({"frequency_penalty": -1.2}),
    "repetition": Case({"repetition_penalty": 1.8}),
    "bias": Case({"logit_bias": {0: 2.0, 3: -1.5, 4: -1e30}}),
    "allowed": Case({"allowed_token_ids": [0, 2, 5]}),
    "bad words": Case({}, words=((2,), (3, 0), (0, 0, 3), (4, 3), (1, 3, 3))),
    "min_tokens": Case({"min_tokens": 2}),
    "mask": Case({}, mask=True),
    "mask min_tokens": Case({"min_tokens": 3}, mask=True),
    "everything": Case(
        {
            "temperature": 1.3,
            "top_k": 5,
            "top_p": 0.95,
            "min_p": 0.02,
            "presence_penalty": 0.4,
            "frequency_penalty": 0.8,
            "repetition_penalty": 1.3,
            "logit_bias": {0: 0.7},
            "allowed_token_ids": [0, 1, 2, 3, 5],
            "min_tokens": 1,
        },
        mask=True,
        words=((2, 1), (3,)),
    ),
    "greedy": Case({"temperature": 0.0, "repetition_penalty": 1.5}),
}


def _hard_rules(case: Case, params: SamplingParams, output: tuple[int, ...]) -> np.ndarray:
    allowed = ALLOWED[INDEX[output]].copy() if case.mask else np.ones(V, dtype=bool)
    only_end = case.mask and not allowed[np.arange(V) != END].any()
    if params.allowed_token_ids is not None:
        allowed &= np.isin(np.arange(V), list(params.allowed_token_ids))
    for word in case.words:
        if tuple(output[len(output) - len(word) + 1 :]) == word[:-1]:
            allowed[word[-1]] = False
    if len(output) < params.min_tokens and not only_end:
        allowed[END] = False
    return allowed


def law(case: Case, output: tuple[int, ...]) -> np.ndarray:
    """Probabilities [V] of the next token after PROMPT + output; None are left: all zero."""
    params = SamplingParams(**case.params)
    x = LOGITS[INDEX[output]].astype(np.float64)
    for token in set(PROMPT + output):
        r = params.repetition_penalty
        x[token] = x[token] / r if x[token] > 0 else x[token] * r
    for token in set(output):
        x[token] -= params.frequency_penalty * output.count(token) + params.presence_penalty
    for token, bias in (params.logit_bias or {}).items():
        x[token] += bias
    x[~_hard_rules(case, params, output)] = -np.inf
    if not np.isfinite(x).any():
        return np.zeros(V)
    order = sorted(range(V), key=lambda t: (-x[t], t))
    if params.temperature == 0:
        return (np.arange(V) == order[0]).astype(np.float64)
    p = np.exp((x - x.max()) / params.temperature)
    keep = np.zeros(V, dtype=bool)
    keep[order[: params.top_k or V]] = True
    p = np.where(keep, p, 0) / p[keep].sum()
    mass, nucleus = 0.0, np.zeros(V, dtype=bool)
    for token in order:
        nucleus[token] = mass < params.top_p
        mass += p[token]
    p = np.where(nucleus & (p >= params.min_p * p.max()), p, 0)
    return p / p.sum()


def joint_law(case: Case) -> np.ndarray:
    """Probabilities of all outputs of DEPTH tokens, in the order of OUTPUTS; a missing rest is
    the probability that an empty row was met."""
    found = np.ones(len(OUTPUTS))
    for output, i in INDEX.items():
        if output:
            found[i] = found[INDEX[output[:-1]]] * law(case, output[:-1])[output[-1]]
    return found[[len(o) == DEPTH for o in OUTPUTS]]


class Engine:
    """N sequences, each in its row, stepped together. Drafts are what the caller guesses."""

    def __init__(self, cases: Sequence[Case], seeds: Sequence[int]) -> None:
        n = len(seeds)
        self.state = SamplingState(n, V, "cpu")
        self.cases = cases
        self.requests: list[Request] = []
        for row, (case, seed) in enumerate(zip(cases, seeds, strict=True)):
            request = Request(
                f"r{row}",
                PROMPT,
                SamplingParams(**case.params),
                seed=seed,
                eos_token_ids=frozenset({END}),
                bad_words_token_ids=case.words,
            )
            request.row = row
            self.state.set_row(row, request)
            self.requests.append(request)
        self.masked = np.array([case.mask for case in cases])

    def run(self, guess_ND: np.ndarray | None = None, seed: int = 0) -> np.ndarray:
        """Outputs [N, DEPTH]; -1 from the first empty row on. ``guess_ND``: tokens to draft."""
        rng = np.random.default_rng(seed)
        n = len(self.requests)
        self.tokens = np.zeros((n, len(PROMPT) + 2 * DEPTH + 1), dtype=np.int64)
        self.tokens[:, : len(PROMPT)] = PROMPT
        done = np.zeros(n, dtype=np.int64)  # output tokens so far
        failed = np.zeros(n, dtype=bool)
        while (active := np.flatnonzero((done < DEPTH) & ~failed)).size:
            most = DEPTH - 1 - done[active]
            drafts = np.zeros_like(most) if guess_ND is None else rng.integers(0, most + 1)
            self._step(rng.permutation(active), drafts, guess_ND, done, failed)
        output = self.tokens[:, len(PROMPT) : len(PROMPT) + DEPTH].copy()
        output[np.arange(DEPTH) >= done[:, None]] = -1
        return output

    def _step(
        self,
        active: np.ndarray,
        num_draft: np.ndarray,
        guess_ND: np.ndarray | None,
        done: np.ndarray,
        failed: np.ndarray,
    ) -> None:
        num_draft = np.minimum(num_draft, DEPTH - 1 - done[active])
        count = num_draft + 1
        first = np.cumsum(count) - count
        row = np.repeat(active, count)
        offset = np.arange(count.sum()) - np.repeat(first, count)
        is_draft = offset < np.repeat(num_draft, count)
        place = len(PROMPT) + done[row] + offset
        if guess_ND is not None:
            self.tokens[row[is_draft], place[is_draft]] = guess_ND[
                row[is_draft], place[is_draft] - len(PROMPT)
            ]
        drafts = np.where(is_draft, self.tokens[row, place], -1)
        prefix = [
            INDEX[tuple(self.tokens[r, len(PROMPT) : end].tolist())]
            for r, end in zip(row, place, strict=True)
        ]
        rows = np.flatnonzero(self.masked[row])
        bits = (ALLOWED[prefix] @ (1 << np.arange(V))).astype(np.int32)
        masks = MaskRows(torch.from_numpy(bits[rows, None]), rows.tolist()) if rows.size else None
        as_tensor = torch.from_numpy
        batch = SamplingBatch(
            requests=[self.requests[r] for r in active],
            rows_S=as_tensor(active),
            first_row_S=as_tensor(first),
            num_draft_S=as_tensor(num_draft),
            row_R=as_tensor(row),
            offset_R=as_tensor(offset),
            position_R=as_tensor(place),
            draft_R=as_tensor(drafts),
            tokens=as_tensor(self.tokens),
            length=as_tensor(len(PROMPT) + done),
        )
        output = sample(as_tensor(LOGITS[prefix].copy()), batch, self.state, masks)
        accepted = output.num_accepted_S.numpy()
        token, empty = output.token_R.numpy(), output.empty_R.numpy()
        emitted = offset <= np.repeat(accepted, count)
        self.tokens[row[emitted], place[emitted]] = token[emitted]
        failed[active] = empty[first + accepted]
        done[active] += accepted + ~failed[active]


def chi_square_p(counts: np.ndarray, expected: np.ndarray) -> float:
    """Upper tail of Pearson's statistic; cells expected fewer than five times are pooled."""
    small = expected < 5
    counts = np.append(counts[~small], counts[small].sum())
    expected = np.append(expected[~small], expected[small].sum())
    counts, expected = counts[expected > 1e-9], expected[expected > 1e-9]
    if len(expected) < 2:
        return 1.0
    statistic = float(((counts - expected) ** 2 / expected).sum())
    half = torch.tensor([(len(expected) - 1) / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def _seeds(count: int, salt: int = 0) -> list[int]:
    return [derive_seed(salt, i) for i in range(count)]


def _noisy(output: np.ndarray, seed: int) -> np.ndarray:
    """Guesses that are often right: the output with a third of the tokens replaced."""
    rng = np.random.default_rng(seed)
    wrong = (rng.random(output.shape) < 1 / 3) | (output < 0)
    return np.where(wrong, rng.integers(0, V, output.shape), output)


@pytest.mark.parametrize("name", CASES)
def test_joint_law_with_and_without_drafts(name: str) -> None:
    case, count = CASES[name], 2000
    exact = joint_law(case)
    engine = Engine([case] * count, _seeds(count))
    plain = engine.run()
    # Drafts that know nothing, then drafts that are often right: nothing may change.
    blind = np.random.default_rng(1).integers(0, V, plain.shape)
    np.testing.assert_array_equal(engine.run(blind, seed=2), plain)
    np.testing.assert_array_equal(engine.run(_noisy(plain, 3), seed=4), plain)
    full = plain[(plain >= 0).all(1)]
    code = full @ (V ** np.arange(DEPTH)[::-1])
    counts = np.bincount(code, minlength=V**DEPTH)
    assert not counts[exact == 0].any()
    lost = np.array([count - len(full)]), np.array([(1 - exact.sum()) * count])
    assert lost[1] > 1e-6 * count or lost[0] == 0
    p = chi_square_p(np.append(counts, lost[0]), np.append(exact * count, lost[1]))
    assert p > 1e-4
    if name == "mask min_tokens":  # after token 0 or 2 the grammar has ended: the end is sampled
        assert (plain[np.isin(plain[:, 0], (0, 2)), 1] == END).all()


def test_the_chi_square_can_fail() -> None:
    """Its power: the law of a slightly wrong temperature is told apart at this sample size."""
    count = 3000
    plain = Engine([CASES["plain"]] * count, _seeds(count)).run()
    counts = np.bincount(plain @ (V ** np.arange(DEPTH)[::-1]), minlength=V**DEPTH)
    assert chi_square_p(counts, joint_law(Case({"temperature": 0.8})) * count) < 1e-8


def test_any_batch_gives_the_same_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """All cases mixed, in another order, alone, with drafts, and as a GPU computes them."""
    names = list(CASES)
    cases = [CASES[name] for name in names for _ in range(30)]
    seeds = _seeds(len(cases), 7)
    mixed = Engine(cases, seeds).run()
    order = np.random.default_rng(8).permutation(len(cases))
    shuffled = Engine([cases[i] for i in order], [seeds[i] for i in order]).run()
    np.testing.assert_array_equal(shuffled, mixed[order])
    for i in range(0, len(cases), 13):
        np.testing.assert_array_equal(Engine(cases[i : i + 1], seeds[i : i + 1]).run(), mixed[[i]])
    np.testing.assert_array_equal(Engine(cases, seeds).run(_noisy(mixed, 9), seed=10), mixed)

    def every_row(wanted_R: torch.Tensor) -> slice:
        return slice(None)

    monkeypatch.setattr(sampler, "rows_where", every_row)
    monkeypatch.setattr(processors, "rows_where", every_row)
    np.testing.assert_array_equal(Engine(cases, seeds).run(_noisy(mixed, 11), seed=12), mixed)


def test_rows_can_be_reused() -> None:
    """Nothing of a row's former request is left, while other rows use every feature."""
    cases = list(CASES.values()) * 20
    seeds = _seeds(len(cases), 20)
    used = Engine(cases, seeds)
    for shift in (1, 5, 11):
        turned = cases[shift:] + cases[:shift]
        fresh = Engine(turned, seeds)
        expected = fresh.run()
        for request in fresh.requests:
            used.state.set_row(request.row, request)
        fresh.state = used.state
        np.testing.assert_array_equal(fresh.run(), expected)
