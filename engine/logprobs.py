"""Log-probabilities of sampled tokens and of the most probable ones, and their way to the host.

Tensors stay on the device until somebody waits for the step. A request gets as many entries as it
asked for, although the step computes as many as its most curious request wants.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .processors import ordered_head
from .types import PositionLogprobs, TokenLogprob


@dataclass(slots=True)
class TokenLogprobs:
    """For R positions: the token that stands there and the K most probable ones.

    ``token_R``, ``rank_R`` (1-based; ties rank by id), ``top_ids_RK``: int64; ``logprob_R``,
    ``top_logprobs_RK``: float32, natural logarithms, -inf for tokens that were removed.
    ``top_R``: int64, how many of the K each position wants; -1 for none, not even the token.
    """

    token_R: torch.Tensor
    logprob_R: torch.Tensor
    rank_R: torch.Tensor
    top_ids_RK: torch.Tensor
    top_logprobs_RK: torch.Tensor
    top_R: torch.Tensor

    def to_host(self) -> list[PositionLogprobs]:
        """Waits for the device. The token itself comes first in each dictionary, then the most
        probable tokens in order."""
        found: list[PositionLogprobs] = []
        ids_RK, values_RK = self.top_ids_RK.tolist(), self.top_logprobs_RK.tolist()
        rows = zip(
            self.token_R.tolist(),
            self.logprob_R.tolist(),
            self.rank_R.tolist(),
            self.top_R.tolist(),
            strict=True,
        )
        for i, (token, logprob, rank, top) in enumerate(rows):
            position: PositionLogprobs = {}
            if top >= 0:
                position[token] = TokenLogprob(logprob, rank)
            for j in range(max(top, 0)):
                if ids_RK[i][j] != token:
                    position[ids_RK[i][j]] = TokenLogprob(values_RK[i][j], j + 1)
            found.append(position)
        return found


PromptLogprobs = TokenLogprobs


def token_logprobs(
    law_RV: torch.Tensor, token_R: torch.Tensor, top_R: torch.Tensor, most: int
) -> TokenLogprobs:
    """Logprobs of ``token_R`` under log_softmax of ``law_RV`` (float32 logits; -inf is removed).

    ``most``: K, the largest of ``top_R``, which the host must know.
    """
    token_V = torch.arange(law_RV.shape[1], device=law_RV.device)
    logprobs_RV = law_RV.log_softmax(-1)
    logprobs_RV.masked_fill_(logprobs_RV.isnan(), float("-inf"))  # nothing left, or NaN logits
    own_R1 = law_RV.gather(1, token_R[:, None])
    before_RV = (law_RV > own_R1) | ((law_RV == own_R1) & (token_V < token_R[:, None]))
    top_ids_RK = token_R.new_empty(len(token_R), 0)
    if most > 0:
        top_ids_RK = ordered_head(law_RV, min(most, law_RV.shape[1]), token_V)
    return TokenLogprobs(
        token_R=token_R,
        logprob_R=logprobs_RV.gather(1, token_R[:, None])[:, 0],
        rank_R=before_RV.sum(-1) + 1,
        top_ids_RK=top_ids_RK,
        top_logprobs_RK=logprobs_RV.gather(1, top_ids_RK),
        top_R=top_R,
    )


def prompt_logprobs(logits_RV: torch.Tensor, target_R: torch.Tensor, top: int) -> TokenLogprobs:
    """Logprobs of the prompt's own tokens: row i predicted ``target_R[i]``. ``top`` as in
    `SamplingParams.prompt_logprobs` (-1: the whole vocabulary)."""
    most = logits_RV.shape[1] if top == -1 else min(top, logits_RV.shape[1])
    target_R = target_R.long()
    return token_logprobs(logits_RV.float(), target_R, torch.full_like(target_R, most), most)
