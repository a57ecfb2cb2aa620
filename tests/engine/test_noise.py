"""Noise: the tensor code against plain integers, and statistics that a weak mixer fails."""

from __future__ import annotations

import math

import pytest
import torch

from tightrope.engine.noise import (
    ACCEPT,
    DRAFT,
    RECOVERY,
    TARGET,
    derive_seed,
    gumbel,
    noise_key,
    signed,
    token_hash,
    uniform,
)

WORD = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15


def splitmix64(state: int) -> tuple[int, int]:
    """One step of the published generator: the new state and its output."""
    state = (state + GOLDEN) & WORD
    z = state
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & WORD
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & WORD
    return state, z ^ (z >> 31)


def finalise(word: int) -> int:
    return splitmix64((word - GOLDEN) & WORD)[1]


def reference_uniform(seed: int, position: int, stream: int, token: int) -> float:
    key = splitmix64(seed)[1]
    for part in (position, stream):
        key = finalise(key + finalise((part + 1) * GOLDEN))
    bits = finalise(key + finalise(token * GOLDEN + 0xD1B54A32D192ED03))
    return ((bits >> 12) + 0.5) / 2**52


def test_the_finaliser_is_the_published_one() -> None:
    """First outputs of SplitMix64 from state 0, as printed with its reference implementation."""
    state, first = splitmix64(0)
    _, second = splitmix64(state)
    assert (first, second) == (0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4)


def test_tensors_agree_with_plain_integers() -> None:
    seeds = [0, 1, 2**63 - 1, 2**63, WORD, 0x0123456789ABCDEF]
    positions, tokens = [0, 1, 17, 131_071], [0, 1, 31, 49_151, 262_143]
    hashes = token_hash(torch.tensor(tokens))
    for seed in seeds:
        seed_R = torch.full((len(positions),), signed(seed))
        for stream in (TARGET, DRAFT, ACCEPT, RECOVERY):
            key_R1 = noise_key(seed_R, torch.tensor(positions), stream)[:, None]
            expected = [
                [reference_uniform(seed, position, stream, token) for token in tokens]
                for position in positions
            ]
            assert uniform(key_R1, hashes).tolist() == expected


def test_numbers_are_open_at_both_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the smallest and the largest word a mixer can return."""
    monkeypatch.setattr("tightrope.engine.noise._mix_", lambda x: x)  # pyright: ignore
    ends = uniform(torch.tensor([0, -1]))
    assert ends.tolist() == [2.0**-53, 1 - 2.0**-53]
    noise = gumbel(torch.tensor([0, -1]), torch.tensor(0))
    assert noise.isfinite().all()
    assert noise.tolist() == pytest.approx([-math.log(53 * math.log(2)), 53 * math.log(2)])


def _grid(seeds: int, positions: int, tokens: int) -> torch.Tensor:
    """Uniform numbers [seeds, positions, streams, tokens] of neighbouring keys."""
    key = torch.stack(
        [
            noise_key(
                torch.arange(seeds).repeat_interleave(positions),
                torch.arange(positions).repeat(seeds),
                stream,
            ).view(seeds, positions)
            for stream in (TARGET, DRAFT, ACCEPT, RECOVERY)
        ],
        dim=2,
    )
    return uniform(key[..., None], token_hash(torch.arange(tokens)))


def _z_of_chi_square(counts: torch.Tensor, expected: float) -> float:
    """Standard score of Pearson's statistic over equal cells (Wilson and Hilferty)."""
    statistic = float(((counts - expected) ** 2 / expected).sum())
    spread = 2 / (9 * (counts.numel() - 1))
    return ((statistic / (counts.numel() - 1)) ** (1 / 3) - 1 + spread) / math.sqrt(spread)


def test_uniformity_of_high_and_low_bits() -> None:
    u = _grid(32, 32, 256)
    for scale in (1, 2**20, 2**40):  # leading bits, middle bits, bits 41 to 48
        cells = ((u * scale) % 1 * 256).long()
        counts = torch.bincount(cells.view(-1), minlength=256).double()
        assert abs(_z_of_chi_square(counts, u.numel() / 256)) < 4.5


@pytest.mark.parametrize("axis", [0, 1, 2, 3], ids=["seed", "position", "stream", "token"])
def test_neighbours_are_independent(axis: int) -> None:
    """Pairs of neighbours along each part of the key fall evenly into a 16 by 16 table, and the
    sum over a line has the variance of independent numbers."""
    u = _grid(32, 32, 128)
    n = u.shape[axis]
    cells = (u * 16).long()
    pairs = cells.narrow(axis, 0, n - 1) * 16 + cells.narrow(axis, 1, n - 1)
    counts = torch.bincount(pairs.flatten(), minlength=256).double()
    assert abs(_z_of_chi_square(counts, pairs.numel() / 256)) < 4.5
    sums = (u - 0.5).sum(axis)
    assert float(sums.square().mean()) == pytest.approx(n / 12, rel=6 * math.sqrt(2 / sums.numel()))


def test_gumbel_argmax_draws_from_softmax() -> None:
    logits = torch.tensor([0.3, -1.0, 1.2, 0.0, -2.5])
    count = 200_000
    key_N1 = noise_key(torch.arange(count), torch.full((count,), 9), TARGET)[:, None]
    drawn = (logits + gumbel(key_N1, token_hash(torch.arange(5)))).argmax(1)
    frequency = torch.bincount(drawn, minlength=5) / count
    exact = logits.softmax(0)
    sigma = (exact * (1 - exact) / count).sqrt()
    assert ((frequency - exact).abs() < 4.5 * sigma).all()


def test_derived_seeds_are_distinct_words() -> None:
    seeds = {derive_seed(parent, *parts) for parent in range(50) for parts in [(), (0,), (1,)]}
    seeds |= {derive_seed(parent, a, b) for parent in range(10) for a in range(5) for b in range(5)}
    assert len(seeds) == 150 + 250
    assert all(0 <= seed <= WORD for seed in seeds)
    assert derive_seed(7, 3) == derive_seed(7, 3)
    ones = sum(bin(seed).count("1") for seed in seeds) / len(seeds)
    assert ones == pytest.approx(32, abs=5 * 4 / math.sqrt(len(seeds)))
