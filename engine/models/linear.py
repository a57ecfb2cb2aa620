"""Linear layers: y = x W^T (+ b), with the weight stored once, in the layout its products like.

On two x86-64 cores (AVX2), float32, one step of SmolLM2's products (30 layers and the head) takes,
in milliseconds, by the number of rows and by how the weight is stored and passed:

======================== ===== ===== ===== ===== ===== ===== ===== ===== =====
rows                         1     2     4     6     8    12    16    32    64
======================== ===== ===== ===== ===== ===== ===== ===== ===== =====
``F.linear``, [out, in]     37    75    75    77    68    72    80   112   175
``mm``, stored [in, out]    28    52    80    80    83    82    89   126   198
``mm(W, x^T)``, [out, in]    38    35    36    64    64    82    67    91   138
oneDNN's packed weight      33    33    38    50    45    51    55    88   139
one product a row           38    66   104   152   203
======================== ===== ===== ===== ===== ===== ===== ===== ===== =====

(``python -m tightrope.experiments.e00_linear_rows`` measures it anew; the record also holds how
busy the machine was.) Only a single row is cheaper otherwise, stored [in, out], which costs twice
as much from four rows on. So `Linear` packs its weight
once it is loaded. Packed for sixteen rows, one layout serves every row count, and a row's result
has the same bits whatever the number of rows beside it: decoding and verification agree exactly.

A tied head has to keep plain rows, because the embedding looks them up. `head_product` passes x as
the first operand and rounds the row count to sizes for which that kernel has no remainder. There a
row has the same bits for 1 to 11 rows, and for 12 and more.

Where oneDNN is missing, in other dtypes and on other devices all of this is ``F.linear``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
import torch.nn.functional as F  # noqa: N812

NamedSlices = Iterator[tuple[str, torch.Tensor]]

_PACKED_FOR = 16  # rows; a pack for one row is slow with more, this one is best or near it for all
_CHEAP_ROWS = (4, 4, 4, 4, 4, 5, 6, 8, 8, 9, 10, 11, 16, 16, 16, 16, 16)


def is_tuned(weight: torch.Tensor) -> bool:
    """Whether the measured choices above hold for a weight: float32 on the CPU."""
    return weight.dtype is torch.float32 and weight.device.type == "cpu"


class Linear:
    """One product that holds the weights of several linear layers with the same input.

    ``parts`` maps each layer's name to its number of output features, in order. Weights are
    undefined until they are copied into `named_slices`; `pack` then makes products fast.
    """

    def __init__(
        self,
        in_features: int,
        parts: Mapping[str, int],
        *,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        out_features = sum(parts.values())
        self.parts = dict(parts)
        self.weight_OI = torch.empty(out_features, in_features, dtype=dtype, device=device)
        self.bias_O = torch.empty(out_features, dtype=dtype, device=device) if bias else None

    @property
    def is_packed(self) -> bool:
        return self.weight_OI.layout is not torch.strided

    def __call__(self, x_TI: torch.Tensor, residual_TO: torch.Tensor | None = None) -> torch.Tensor:
        """x W^T + b, plus ``residual_TO`` where it is given; a new tensor [T, O]."""
        if self.is_packed:
            product = torch.ops.mkldnn._linear_pointwise
            if residual_TO is None:
                return product.default(x_TI, self.weight_OI, self.bias_O, "none", [], "")
            return product.binary(x_TI, residual_TO, self.weight_OI, self.bias_O, "add")
        y_TO = F.linear(x_TI, self.weight_OI, self.bias_O)
        return y_TO if residual_TO is None else y_TO.add_(residual_TO)

    def pack(self) -> None:
        """Replace the weight by its packed form, where there is one."""
        if not self.is_packed and is_tuned(self.weight_OI) and torch.backends.mkldnn.is_available():
            self.weight_OI = torch.ops.mkldnn._reorder_linear_weight(self.weight_OI, _PACKED_FOR)

    def named_slices(self, prefix: str) -> NamedSlices:
        """Every part's weight and bias as views to copy into. A packed weight is unpacked."""
        if self.is_packed:
            self.weight_OI = self.weight_OI.to_dense()
        start = 0
        for name, size in self.parts.items():
            yield f"{prefix}{name}.weight", self.weight_OI[start : start + size]
            if self.bias_O is not None:
                yield f"{prefix}{name}.bias", self.bias_O[start : start + size]
            start += size


def cheap_rows(count: int) -> int:
    """The number of rows, ``count`` or up to seven more, that `head_product` computes."""
    return _CHEAP_ROWS[count] if count < len(_CHEAP_ROWS) else (count + 7) // 8 * 8


def head_product(x_RI: torch.Tensor, weight_OI: torch.Tensor) -> torch.Tensor:
    """x W^T for a plain weight, contiguous [R, O]."""
    if not is_tuned(weight_OI):
        return F.linear(x_RI, weight_OI)
    rows = x_RI.shape[0]
    padded_PI = F.pad(x_RI, (0, 0, 0, cheap_rows(rows) - rows))
    return torch.mm(weight_OI, padded_PI.t())[:, :rows].t().contiguous()
