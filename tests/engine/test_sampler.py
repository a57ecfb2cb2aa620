"""The sampler's parts: masks, conflicts, verification, logprobs, large vocabularies, no waiting."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from tightrope.engine.logprobs import prompt_logprobs
from tightrope.engine.noise import derive_seed
from tightrope.engine.params import SamplingParams
from tightrope.engine.processors import ordered_head, unpack_bitmask
from tightrope.engine.sampler import SampleOutput, SamplingBatch, sample, verify_one_hot
from tightrope.engine.sampling_state import SamplingState
from tightrope.engine.types import MaskRows, Request

PROMPT = (1, 2)


def make_request(row: int, *, seed: int = 0, ends: Sequence[int] = (0,), **params: Any) -> Request:
    request = Request(
        f"r{row}",
        PROMPT,
        SamplingParams(**params),
        seed=seed,
        stop_token_ids=frozenset(params.get("stop_token_ids", ())),
        eos_token_ids=frozenset(ends),
    )
    request.row = row
    return request


def make_batch(
    requests: list[Request], drafts: Sequence[Sequence[int]] | None = None, device: str = "cpu"
) -> SamplingBatch:
    """Every request right after its prompt, with its drafts behind it."""
    drafts = drafts or [[] for _ in requests]
    count = torch.tensor([len(d) + 1 for d in drafts])
    first_S = count.cumsum(0) - count
    row_R = torch.arange(len(requests)).repeat_interleave(count)
    offset_R = torch.arange(len(row_R)) - first_S.repeat_interleave(count)
    tokens = torch.zeros(len(requests), 16, dtype=torch.int64)
    tokens[:, : len(PROMPT)] = torch.tensor(PROMPT)
    for row, draft in enumerate(drafts):
        tokens[row, len(PROMPT) : len(PROMPT) + len(draft)] = torch.tensor(draft)
    return SamplingBatch(
        requests=requests,
        rows_S=torch.arange(len(requests)).to(device),
        first_row_S=first_S.to(device),
        num_draft_S=(count - 1).to(device),
        row_R=row_R.to(device),
        offset_R=offset_R.to(device),
        position_R=(offset_R + len(PROMPT)).to(device),
        draft_R=torch.tensor([t for d in drafts for t in [*d, -1]]).to(device),
        tokens=tokens.to(device),
        length=torch.full((len(requests),), len(PROMPT)).to(device),
    )


def run(
    logits_RV: torch.Tensor,
    requests: list[Request],
    drafts: Sequence[Sequence[int]] | None = None,
    masks: MaskRows | None = None,
) -> SampleOutput:
    state = SamplingState(len(requests), logits_RV.shape[1], "cpu")
    for request in requests:
        state.set_row(request.row, request)
    return sample(logits_RV.clone(), make_batch(requests, drafts), state, masks)


def pack(allowed_NV: np.ndarray) -> torch.Tensor:
    words = -(-allowed_NV.shape[1] // 32)
    packed = [
        [
            sum(int(row[i]) << (i % 32) for i in range(32 * w, min(32 * w + 32, len(row))))
            for w in range(words)
        ]
        for row in allowed_NV
    ]
    return torch.from_numpy(np.array(packed, dtype=np.uint32).view(np.int32))


@pytest.mark.parametrize("width", [1, 31, 32, 33, 64, 70, 129])
def test_unpacking(width: int) -> None:
    allowed = np.random.default_rng(width).random((5, width)) < 0.5
    packed = pack(allowed)
    np.testing.assert_array_equal(unpack_bitmask(packed, width).numpy(), ~allowed)
    wide = unpack_bitmask(packed, 160).numpy()
    np.testing.assert_array_equal(wide[:, :width], ~allowed)
    assert wide[:, width:].all()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_wider_than_the_mask(temperature: float) -> None:
    """Extra columns are forbidden in masked rows and free in others."""
    logits = torch.zeros(2, 70)
    logits[:, 65] = 50.0
    masks = MaskRows(pack(np.arange(40)[None] == 7), [1])
    requests = [make_request(i, temperature=temperature) for i in range(2)]
    assert run(logits, requests, masks=masks).token_R.tolist() == [65, 7]


def test_mask_rows_of_draft_rows() -> None:
    logits = torch.arange(8.0).repeat(5, 1)
    allowed = np.ones((3, 8), dtype=bool)
    allowed[0, 7] = allowed[1, 5:] = False
    allowed[2] = np.arange(8) == 2
    requests = [make_request(i, temperature=0) for i in range(2)]
    output = run(logits, requests, [[6, 4], [7]], MaskRows(pack(allowed), [0, 1, 4]))
    assert output.token_R.tolist() == [6, 4, 7, 7, 2]
    assert output.num_accepted_S.tolist() == [2, 1]


CONFLICTS: list[tuple[str, dict[str, Any], list[int], int | None]] = [
    # parameters, tokens the mask allows, token sampled (None: empty)
    ("grammar at its end overrides min_tokens", {"min_tokens": 4}, [0], 0),
    ("stop ids are ends too", {"min_tokens": 4, "stop_token_ids": [5]}, [0, 5], 5),
    ("min_tokens bans ends elsewhere", {"min_tokens": 4}, [0, 3], 3),
    ("stop ids banned", {"min_tokens": 4, "stop_token_ids": [5]}, [0, 3, 5], 3),
    ("min_tokens reached", {"min_tokens": 0}, [0], 0),
    ("allowed ids against the mask", {"allowed_token_ids": [1, 2]}, [3, 4], None),
    ("allowed ids and the mask", {"allowed_token_ids": [1, 3]}, [3, 4], 3),
    ("allowed ids leave the end", {"allowed_token_ids": [0, 1], "min_tokens": 2}, [0, 3], None),
    ("an empty mask", {}, [], None),
    ("bias does not revive", {"logit_bias": {4: 1e9}}, [1, 2], 2),
]


@pytest.mark.parametrize("temperature", [0.0, 0.01])
@pytest.mark.parametrize(
    ("params", "allowed", "token"), [c[1:] for c in CONFLICTS], ids=[c[0] for c in CONFLICTS]
)
def test_conflicts(
    params: dict[str, Any], allowed: list[int], token: int | None, temperature: float
) -> None:
    masks = MaskRows(pack(np.isin(np.arange(6), allowed)[None]), [0])
    request = make_request(0, temperature=temperature, top_p=0.9, **params)
    output = run(torch.arange(6.0)[None], [request], masks=masks)
    assert output.empty_R.tolist() == [token is None]
    assert output.token_R.tolist() == [token or 0]


def test_an_empty_row_accepts_nothing() -> None:
    """Its token is 0, and so is the draft; the row still stops the run."""
    masks = MaskRows(torch.tensor([[-1], [0]], dtype=torch.int32), [0, 1])
    output = run(torch.arange(6.0).repeat(3, 1), [make_request(0, temperature=0)], [[5, 0]], masks)
    assert output.empty_R.tolist() == [False, True, False]
    assert output.num_accepted_S.tolist() == [1]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    "params",
    [{"temperature": 0}, {}, {"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.5}, {"logprobs": 2}],
    ids=str,
)
def test_logits_that_are_not_numbers(bad: float, params: dict[str, Any]) -> None:
    """Never an id outside the vocabulary, and never a masked one."""
    for logits in (
        torch.full((1, 40), bad),
        torch.zeros(1, 40).index_fill_(1, torch.tensor(3), bad),
    ):
        for allowed in (range(40), [3], [4, 5]):
            masks = MaskRows(pack(np.isin(np.arange(40), list(allowed))[None]), [0])
            output = run(logits, [make_request(0, **params)], masks=masks)
            output.logprobs_to_host()
            token = int(output.token_R[0])
            assert token in allowed or (output.empty_R[0] and token == 0)


def test_verification_against_a_loop() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        drafts = [rng.integers(0, 2, rng.integers(0, 6)).tolist() for _ in range(9)]
        batch = make_batch([make_request(i) for i in range(9)], drafts)
        token_R = torch.from_numpy(rng.integers(0, 2, len(batch.row_R)))
        empty_R = torch.from_numpy(rng.random(len(token_R)) < 0.1)
        expected: list[int] = []
        for first, draft in zip(batch.first_row_S.tolist(), drafts, strict=True):
            accepted = 0
            while accepted < len(draft) and token_R[first + accepted] == draft[accepted]:
                if empty_R[first + accepted]:
                    break
                accepted += 1
            expected.append(accepted)
        assert verify_one_hot(token_R, empty_R, batch).tolist() == expected


def test_ties_go_to_the_lowest_id() -> None:
    logits = torch.zeros(1, 50)
    logits[0, [20, 30, 40]] = 2.0
    assert run(logits, [make_request(0, temperature=0)]).token_R.tolist() == [20]
    for seed in range(20):
        assert run(logits, [make_request(0, seed=seed, top_k=1)]).token_R.tolist() == [20]
        assert run(logits, [make_request(0, seed=seed, top_p=1e-9)]).token_R.tolist() == [20]
        two = run(logits, [make_request(0, seed=seed, top_k=2, temperature=9.0)])
        assert two.token_R.tolist()[0] in (20, 30)


@pytest.mark.parametrize("count", [1, 3, 17, 400])
def test_ordered_head(count: int) -> None:
    values = torch.randint(-5, 5, (4, 400)).float() * 0.5
    values[0, :9] = torch.tensor([0.0, -0.0, math.inf, -math.inf, 1e-40, -1e-40, 0.0, 3e38, -3e38])
    expected = values.sort(dim=-1, descending=True, stable=True).indices[:, :count]
    assert torch.equal(ordered_head(values, count, torch.arange(400)), expected)


@pytest.mark.parametrize("spread", [0.05, 1.0, 4.0])
@pytest.mark.parametrize(
    "params",
    [{"top_p": 0.9}, {"top_k": 40}, {"top_k": 3000, "top_p": 0.99}, {"min_p": 0.2}],
    ids=str,
)
def test_large_vocabularies(params: dict[str, Any], spread: float) -> None:
    """Candidate heads of every size keep exactly the set that float64 says."""
    size, num = 12_000, 10
    generator = torch.Generator().manual_seed(int(spread * 100))
    logits_V = torch.randn(size, generator=generator) * spread
    requests = [
        make_request(i, seed=derive_seed(3, i), logprobs=0, logprobs_mode="processed", **params)
        for i in range(num)
    ]
    output = run(logits_V.repeat(num, 1), requests)
    x = logits_V.double()
    order = x.argsort(descending=True, stable=True)
    p = x[order].exp()
    p[params.get("top_k") or size :] = 0
    p /= p.sum()
    p[p.cumsum(0) - p >= params.get("top_p", 1)] = 0
    p[p < params.get("min_p", 0) * p[0]] = 0
    law = torch.zeros(size, dtype=torch.float64).scatter_(0, order, p / p.sum())
    assert output.logprobs is not None
    expected = law[output.token_R].log()
    torch.testing.assert_close(output.logprobs.logprob_R.double(), expected, atol=2e-5, rtol=0)
    assert len(set(output.token_R.tolist())) > 1 or law.max() > 0.8


def test_extreme_parameters_stay_finite() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, -5.0]])
    assert run(logits, [make_request(0, temperature=5e-324)]).token_R.tolist() == [1]
    assert run(logits * 1e30, [make_request(0, temperature=1e-9)]).token_R.tolist() == [1]
    seen = {
        int(run(logits, [make_request(0, seed=s, temperature=1e300)]).token_R[0]) for s in range(40)
    }
    assert seen == {0, 1, 2, 3}
    assert not run(logits, [make_request(0, repetition_penalty=1e300)]).empty_R[0]


def test_logprobs_raw_and_processed() -> None:
    logits = torch.tensor([[0.5, 2.0, 1.0, -1.0, 1.5]]).repeat(4, 1)
    common: dict[str, Any] = {"logit_bias": {1: -9.0}, "temperature": 0.5, "top_k": 2}
    requests = [
        make_request(0, logprobs=2, **common),
        make_request(1, logprobs=-1, logprobs_mode="processed", **common),
        make_request(2, logprobs=0, logprobs_mode="processed", temperature=0),
        make_request(3, temperature=0),
    ]
    output = run(logits, requests)
    host = output.logprobs_to_host()
    assert host is not None
    raw = logits[0].double().log_softmax(0)
    token = int(output.token_R[0])
    assert token in (2, 4)
    assert next(iter(host[0])) == token
    assert set(host[0]) == {1, 4, token}
    assert {t: e.rank for t, e in host[0].items()} == {1: 1, 4: 2} | {token: {4: 2, 2: 3}[token]}
    assert all(e.logprob == pytest.approx(float(raw[t]), abs=1e-6) for t, e in host[0].items())
    kept = torch.tensor([1.5, 1.0], dtype=torch.float64).div(0.5).log_softmax(0).tolist()
    assert {t: e.logprob for t, e in host[1].items()} == pytest.approx(
        {4: kept[0], 2: kept[1], 0: -math.inf, 1: -math.inf, 3: -math.inf}, abs=1e-6
    )
    assert host[2] == {1: host[2][1]}
    assert host[2][1].logprob == pytest.approx(float(raw[1]), abs=1e-6)
    assert host[2][1].rank == 1
    assert host[3] == {}
    assert run(logits, [make_request(i) for i in range(4)]).logprobs_to_host() is None


def test_prompt_logprobs() -> None:
    logits = torch.randn(3, 7, generator=torch.Generator().manual_seed(1))
    host = prompt_logprobs(logits, torch.tensor([4, 0, 6]), 2).to_host()
    exact = logits.double().log_softmax(-1)
    for row, token in enumerate([4, 0, 6]):
        order = exact[row].argsort(descending=True).tolist()
        assert set(host[row]) == {token, *order[:2]}
        for t, entry in host[row].items():
            assert entry.rank == order.index(t) + 1
            assert entry.logprob == pytest.approx(float(exact[row, t]), abs=1e-6)
    assert len(prompt_logprobs(logits, torch.tensor([4, 0, 6]), -1).to_host()[0]) == 7
    assert len(prompt_logprobs(logits, torch.tensor([4, 0, 6]), 0).to_host()[0]) == 1


def test_nothing_waits_for_the_device() -> None:
    """Meta tensors have no values: any question to the device raises here."""
    everything: dict[str, Any] = {
        "top_p": 0.9,
        "min_p": 0.1,
        "presence_penalty": 1,
        "repetition_penalty": 1.1,
        "logit_bias": {1: 2.0},
        "allowed_token_ids": [1, 2, 3],
        "min_tokens": 3,
        "logprobs": 3,
    }
    variant: dict[str, Any] = everything | {"logprobs_mode": "processed", "top_k": 5}
    for params in (everything, variant):
        state = SamplingState(2, 100, "meta")
        requests = [make_request(0, **params), make_request(1, temperature=0, logprobs=1)]
        requests[0].bad_words_token_ids = ((3,), (4, 5))
        for request in requests:
            state.set_row(request.row, request)
        batch = make_batch(requests, [[1, 2], [3]], device="meta")
        masks = MaskRows(torch.ones(2, 4, dtype=torch.int32), [0, 3])
        output = sample(torch.empty(5, 100, device="meta"), batch, state, masks)
        assert output.token_R.shape == (5,)
        assert output.num_accepted_S.shape == (2,)
