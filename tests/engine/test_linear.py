"""Linear layers: exact at every row count, packed or not, with the same bits in any company."""

from __future__ import annotations

import pytest
import torch

from tightrope.engine.models.linear import Linear, cheap_rows, head_product

CPU = torch.device("cpu")


def make_linear(bias: bool, dtype: torch.dtype = torch.float32) -> tuple[Linear, torch.Tensor]:
    """A layer of two parts with random weights, and its weight as one plain tensor."""
    layer = Linear(64, {"a": 40, "b": 56}, bias=bias, dtype=dtype, device=CPU)
    generator = torch.Generator().manual_seed(0)
    for _, view in layer.named_slices(""):
        view.copy_(torch.randn(view.shape, generator=generator))
    return layer, layer.weight_OI.clone()


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_products_equal_float64_at_every_row_count(bias: bool, packed: bool) -> None:
    layer, weight_OI = make_linear(bias)
    if packed:
        layer.pack()
        assert layer.is_packed == torch.backends.mkldnn.is_available()
    x_RI = torch.randn(140, 64, generator=torch.Generator().manual_seed(1))
    residual_RO = torch.randn(140, 96, generator=torch.Generator().manual_seed(2))
    untouched = residual_RO.clone()
    expected = x_RI.double() @ weight_OI.double().T
    if layer.bias_O is not None:
        expected += layer.bias_O.double()
    for rows in [*range(1, 40), 64, 140]:
        got = layer(x_RI[:rows])
        torch.testing.assert_close(got.double(), expected[:rows], atol=1e-4, rtol=1e-5)
        got = layer(x_RI[:rows], residual_RO[:rows])
        total = expected[:rows] + residual_RO[:rows].double()
        torch.testing.assert_close(got.double(), total, atol=1e-4, rtol=1e-5)
    assert torch.equal(residual_RO, untouched)


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="nothing is packed here")
def test_a_row_of_a_packed_product_has_the_same_bits_in_any_company() -> None:
    layer, _ = make_linear(bias=True)
    layer.pack()
    x_RI = torch.randn(70, 64, generator=torch.Generator().manual_seed(1))
    residual_RO = torch.randn(70, 96, generator=torch.Generator().manual_seed(2))
    plain, summed = layer(x_RI), layer(x_RI, residual_RO)
    for rows in range(1, 70):
        assert torch.equal(layer(x_RI[:rows]), plain[:rows])
        assert torch.equal(layer(x_RI[:rows], residual_RO[:rows]), summed[:rows])


def test_packed_weights_can_be_loaded_again() -> None:
    layer, weight_OI = make_linear(bias=False)
    layer.pack()
    slices = dict(layer.named_slices("x."))
    assert torch.equal(torch.cat([slices["x.a.weight"], slices["x.b.weight"]]), weight_OI)
    slices["x.b.weight"].fill_(0.5)
    layer.pack()
    assert torch.equal(layer(torch.ones(1, 64))[0, 40:], torch.full((56,), 32.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_head_products_equal_float64_at_every_row_count(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    weight_OI = torch.randn(96, 64, generator=generator).to(dtype)
    x_RI = torch.randn(70, 64, generator=generator).to(dtype)
    expected = x_RI.double() @ weight_OI.double().T
    tolerance = 1e-4 if dtype is torch.float32 else 0.2
    for rows in range(1, 71):
        assert rows <= cheap_rows(rows) <= rows + 7
        got = head_product(x_RI[:rows], weight_OI)
        assert got.dtype == dtype
        assert got.is_contiguous()
        torch.testing.assert_close(got.double(), expected[:rows], atol=tolerance, rtol=1e-5)


def test_head_rows_of_decoding_and_short_verification_have_equal_bits() -> None:
    """Up to four rows are one padded product, whatever the library does for others."""
    generator = torch.Generator().manual_seed(0)
    weight_OI = torch.randn(960, 576, generator=generator)
    x_RI = torch.randn(4, 576, generator=generator)
    for rows in (1, 2, 3):
        assert torch.equal(
            head_product(x_RI[:rows], weight_OI), head_product(x_RI, weight_OI)[:rows]
        )


def test_other_dtypes_are_not_packed() -> None:
    layer, weight_OI = make_linear(bias=False, dtype=torch.bfloat16)
    layer.pack()
    assert layer.weight_OI.dtype == torch.bfloat16
    assert torch.equal(layer.weight_OI, weight_OI)
