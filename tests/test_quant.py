# SPDX-License-Identifier: Apache-2.0
"""Codes: packing, both kinds of levels, constant and partial groups, and what the corrections are worth."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quant import BITS, QuantLayer, decode_shared, dequantise, encode_shared, pack, quantise, unpack


def reference(x, bits):
    """Min-max codes of one group, in plain Python: the formula of the design, with scale and zero as float16 stores them."""
    x = [float(v) for v in x]
    zero = torch.tensor(min(x)).half().float().item()
    scale = torch.tensor((torch.tensor(max(x)) - torch.tensor(min(x))).item() / (2**bits - 1)).half().float().item()
    codes = [0 if scale == 0 else int(min(max(torch.floor((torch.tensor(v) - zero) / scale + 0.5).item(), 0), 2**bits - 1)) for v in x]
    return codes, scale, zero


@settings(max_examples=100)
@given(bits=st.sampled_from(BITS), n=st.integers(1, 200), seed=st.integers(0, 10**6))
def test_packing_is_its_own_inverse(bits, n, seed):
    """A code that is not masked to its bits smears over its neighbours."""
    codes = torch.randint(0, 2**bits, (2, 3, n), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    packed = pack(codes, bits)
    assert packed.shape == (2, 3, -(-n * bits // 8)) and packed.dtype == torch.uint8
    assert torch.equal(unpack(packed, bits, n), codes)


@settings(max_examples=100)
@given(dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float32]), n=st.integers(1, 100), seed=st.integers(0, 10**6), size=st.integers(-30, 15))
def test_a_shared_exponent_rounds_once(dtype, n, seed, size):
    """Rounded again at every crop and every save, tokens would wander off; and a block that borrows its neighbour's exponent loses its small numbers."""
    x = (torch.randn(3, n, generator=torch.Generator().manual_seed(seed)).exp() * 2.0**size * torch.tensor([[1.0], [-3.0], [1e-2]])).to(dtype)
    x = x.clamp(-60000, 60000)
    codes, exponents = encode_shared(x)
    assert codes.shape == x.shape and exponents.shape == (3, -(-n // 32)) and codes.dtype == exponents.dtype == torch.int8
    y = decode_shared(codes, exponents, dtype)
    assert y.dtype == dtype and torch.equal(decode_shared(codes, exponents, torch.float64).to(dtype).double(), decode_shared(codes, exponents, torch.float64))
    for a, b in zip(encode_shared(y), (codes, exponents)):
        assert torch.equal(a, b)
    for at in range(0, n, 32):
        block, back = (z[:, at : at + 32].double() for z in (x, y))
        # Half a step, a step being at most the largest element's 63.75th part; less than 2^-24 only float16 cannot say.
        step = block.abs().amax(-1, keepdim=True) / 63.75
        assert ((back - block).abs() <= (step / 2).clamp(min=2.0**-25 if dtype == torch.float16 else 0.0)).all()


def test_what_is_not_finite_stays_so():
    """A NaN that came back as a number would be a wrong answer in place of a visible one."""
    x = torch.randn(2, 70)
    x[0, 3], x[1, 40], x[1, 69] = float("nan"), float("inf"), -float("inf")
    y = decode_shared(*encode_shared(x), torch.float32)
    assert y[0, :32].isnan().all() and y[0, 32:].isfinite().all() and y[1, :32].isfinite().all() and y[1, 32:].isnan().all()
    for value, dtype in ((0.0, torch.bfloat16), (65504.0, torch.float16), (-65504.0, torch.float16), (3.3e38, torch.bfloat16), (1e-45, torch.float32), (127.5, torch.float32), (127.4, torch.float32)):
        x = torch.full((1, 33), value, dtype=dtype)
        y = decode_shared(*encode_shared(x), dtype)
        assert (y - x).abs().max() <= abs(value) / 127 and torch.isfinite(y).all() or value == 1e-45 and not y.any()


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("n", [1, 16, 64, 80, 96, 128, 131])
def test_codes_are_the_papers(bits, n):
    """A head of 80 or 96 channels leaves a group of 16 or 32: it needs its own range, not silence."""
    x = torch.randn(4, n, generator=torch.Generator().manual_seed(n)) * torch.tensor([[1.0], [100.0], [1e-3], [5.0]])
    codes, scale, zero = quantise(x, bits, 64)
    for row in range(4):
        for g, start in enumerate(range(0, n, 64)):
            expected = reference(x[row, start : start + 64], bits)
            assert (codes[row, start : start + 64].tolist(), scale[row, g].item(), zero[row, g].item()) == expected


@pytest.mark.parametrize("levels", ["minmax", "lloyd"])
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("value", [0.0, 1.0, -3.14159, 1000.0, 6e-8, -0.0])
def test_a_constant_group_comes_back(bits, value, levels):
    """Scale 0 divides by zero, and the NaN spreads through every later layer."""
    x = torch.full((3, 80), value)
    codes, scale, zero = quantise(x, bits, 64, levels)
    assert (codes == 0).all() and (scale == 0).all()
    assert torch.equal(dequantise(codes, scale, zero, 64), x.half().float())


@pytest.mark.parametrize("levels", ["minmax", "lloyd"])
def test_a_spread_below_float16_is_a_constant_group(levels):
    """A range that float16 stores as 0 while the codes were computed with the true one decodes to the wrong end."""
    x = 100 + torch.rand(2, 64) * 1e-7
    codes, scale, zero = quantise(x, 1, 64, levels)
    assert (codes == 0).all() and torch.isfinite(dequantise(codes, scale, zero, 64)).all()


def test_the_range_is_taken_in_float32():
    """In bf16 the difference of minimum and maximum is already rounded: codes then miss the outer levels."""
    x = torch.tensor([[300.0, 301.0, 302.0, 299.0] * 16]).bfloat16()
    codes, scale, zero = quantise(x, 2, 64)
    assert torch.equal(codes, quantise(x.float(), 2, 64)[0]) and scale.item() == ((x.float().max() - x.float().min()) / 3).half().item()


@pytest.mark.parametrize("n", [64, 80, 33])
def test_one_bit_lloyd_levels_are_the_means_of_the_halves(n):
    """The empty half of a constant group, and the padding of a narrow one, must not count."""
    x = torch.randn(5, n, generator=torch.Generator().manual_seed(n)) ** 3
    codes, scale, zero = quantise(x, 1, 64, "lloyd")
    for row in range(5):
        for g, start in enumerate(range(0, n, 64)):
            part = x[row, start : start + 64]
            side = part > part.mean()
            assert torch.equal(codes[row, start : start + 64].bool(), side)
            assert zero[row, g].item() == pytest.approx(part[~side].mean().item(), rel=2e-3, abs=1e-4)
            assert (zero[row, g].float() + scale[row, g].float()).item() == pytest.approx(part[side].mean().item(), rel=4e-3, abs=1e-3)


@pytest.mark.parametrize("bits", [1, 2, 4])
def test_lloyd_levels_fit_better(bits):
    """Fitted levels that are worse than minimum and maximum were fitted to the padding."""
    x = torch.randn(50, 80, generator=torch.Generator().manual_seed(0))
    error = {levels: (dequantise(*quantise(x, bits, 64, levels), 64) - x).square().mean().item() for levels in ("minmax", "lloyd")}
    assert error["lloyd"] < (0.5 if bits == 1 else 0.95) * error["minmax"]


def layer_error(**settings):
    """How far one layer's decode output is from exact, with values whose channels have a mean, and skewed errors."""
    generator = torch.Generator().manual_seed(0)
    k, v = torch.randn(1, 2, 3000, 64, generator=generator), torch.randn(1, 2, 3000, 64, generator=generator).exp()
    q = torch.randn(1, 6, 1, 64, generator=generator)
    layer = QuantLayer(1, 64, 128, **settings)
    layer.reserve(k, v, 3001)
    layer.absorb(k, v, 0, 3000)
    k1, v1 = torch.zeros(1, 2, 1, 64), torch.zeros(1, 2, 1, 64)
    got = layer.attend(q, k1, v1, 0.02, 3001, torch.tensor([3000]))  # nearly even attention: the layers that are quantised attend densely
    K, V = (torch.cat(x, 2).repeat_interleave(3, 1) for x in ((k, k1), (v, v1)))
    return (got - (q @ K.transpose(-1, -2) * 0.02).softmax(-1) @ V).norm().item()


def test_the_correction_removes_the_bias():
    """In a dense layer random errors cancel and a bias does not; a correction added twice, or for the whole mass, makes it worse."""
    plain, corrected, centred = layer_error(), layer_error(correct=True), layer_error(correct=True, centre=1024)
    assert corrected < 0.2 * plain and centred < 0.2 * plain


def test_bits_out_of_range_are_refused():
    """3-bit codes in a byte layout for 2 and 4 decode to noise."""
    with pytest.raises(ValueError, match="bits is 3"):
        QuantLayer(3, 64, 128)
