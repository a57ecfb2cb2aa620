"""Linear layers: y = x W^T (+ b), with W stored as Hugging Face stores it, [out, in]."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812


def linear(
    x_RI: torch.Tensor, weight_OI: torch.Tensor, bias_O: torch.Tensor | None = None
) -> torch.Tensor:
    """Return x W^T + b, [R, O]."""
    return F.linear(x_RI, weight_OI, bias_O)
