"""Linear layers: y = x W^T (+ b), with W stored once, as Hugging Face stores it: [out, in].

On the CPU in float32 the product costs more by its row count than by its arithmetic. The library's
usual call passes W as the first operand; for few rows it is much faster to pass x first, that is to
compute the transposed product W x^T, whose result is feature-major. `cheap_rows` rounds the row
count to sizes for which that kernel has no remainder, and `linear` chooses the call.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812

_ROW_MAJOR_FROM = 128  # from here on both calls cost the same, and row-major results are handier
_NARROW = 11  # up to here the transposed product wants rows that are contiguous
_CHEAP_ROWS = (4, 4, 4, 4, 4, 5, 6, 8, 8, 9, 10, 11, 16, 16, 16, 16, 16)


def _is_special(x: torch.Tensor) -> bool:
    return x.dtype is torch.float32 and x.device.type == "cpu"


def cheap_rows(count: int, weight_OI: torch.Tensor) -> int:
    """The number of rows, ``count`` or a little more, that a product should be padded to."""
    if not _is_special(weight_OI) or count >= _ROW_MAJOR_FROM:
        return count
    return _CHEAP_ROWS[count] if count < len(_CHEAP_ROWS) else (count + 7) // 8 * 8


def pad_rows(x_RI: torch.Tensor, rows: int) -> torch.Tensor:
    """``x`` with zero rows appended up to ``rows``; ``x`` itself if it has them already."""
    missing = rows - x_RI.shape[0]
    return F.pad(x_RI, (0, 0, 0, missing)) if missing else x_RI


def linear(
    x_RI: torch.Tensor, weight_OI: torch.Tensor, bias_O: torch.Tensor | None = None
) -> torch.Tensor:
    """Return x W^T + b, [R, O]; on the CPU it may be feature-major (strides (1, R)).

    Rows are not padded here: callers pad once, with `cheap_rows`, for many layers.
    """
    rows = x_RI.shape[0]
    if rows >= _ROW_MAJOR_FROM or not _is_special(weight_OI):
        return F.linear(x_RI, weight_OI, bias_O)
    if rows <= _NARROW:
        x_RI = x_RI.contiguous()
    y_RO = torch.mm(weight_OI, x_RI.t()).t()
    return y_RO if bias_O is None else y_RO.add_(bias_O)
