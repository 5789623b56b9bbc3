# SPDX-License-Identifier: Apache-2.0
"""Kernels over packed codes against their twins: through Triton's interpreter at small odd shapes, and on a GPU at real ones."""

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import kernels
from quant import QuantLayer, decode_blocks

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
DTYPES = [torch.float32, torch.bfloat16, torch.float16]

if kernels.ABSENT:
    pytest.skip("needs Triton", allow_module_level=True)


@pytest.fixture(autouse=True)
def use_kernels(monkeypatch):
    """These tests ask for the kernels, and give them memory full of NaN to work in."""
    monkeypatch.setattr(kernels, "FORCE", True)
    empty = torch.empty

    def poisoned(*size, **options):
        made = empty(*size, **options)
        return made.fill_(float("nan")) if made.is_floating_point() else made

    monkeypatch.setattr(torch, "empty", poisoned)


def filled(n, bits=1, group=64, residual=128, centre=0, correct=False, B=1, KV=2, G=4, D=64, Dv=None, dtype=torch.float32, room=0, seed=0, levels=("lloyd", "minmax"), poison=True):
    """A layer that holds n tokens, with room for `room` more, and a query; whatever holds no token is NaN or ones."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    Dv = Dv or D
    k, v, q = (torch.randn(B, h, t, d, device=DEVICE, generator=generator) for h, t, d in ((KV, n, D), (KV, n, Dv), (KV * G, 1, D)))
    k[..., ::7] *= 5  # outlying channels
    k, v, q = (k + 1).to(dtype), (v - 0.5).to(dtype), q.to(dtype)
    layer = QuantLayer(bits, group, residual, levels, correct, centre)
    layer.reserve(k, v, n + room)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "FORCE", False)  # coding has tests of its own
        layer.absorb(k, v, 0, n)
    if poison:
        edge = layer.edge(n)
        for held in layer.codes:
            held[:, :, edge // group :] = 255
        for held in layer.ranges:
            held[:, :, edge // group :] = float("nan")
        unused = torch.ones(layer.ring.size, dtype=torch.bool, device=DEVICE)
        unused[layer.ring.slots(edge, n)] = False
        layer.ring.k[:, :, unused], layer.ring.v[:, :, unused] = float("nan"), float("nan")
    return layer, q


def decode(layer, q, n, scale=0.1, call=kernels.quant_decode):
    shift = layer.shift if layer.correct or layer.centre else None
    pos = torch.tensor([n - 1], device=DEVICE)
    return call(q, layer.codes, layer.ranges, shift, layer.ring.k, layer.ring.v, pos, scale, layer.bits, layer.group, layer.residual, layer.centre)


def dense(layer, n):
    """All n tokens as float64 K and V, codes decoded."""
    edge = layer.edge(n)
    k, v = layer.ring.read(edge, n)
    coded = decode_blocks(layer.codes, layer.ranges, 0, edge // layer.group, layer.bits, layer.group, v.shape[3])
    shift = layer.shift if layer.correct or layer.centre else 0.0
    return torch.cat((coded[0], k), 2).double(), torch.cat((coded[1] + shift, v), 2).double()


def exact(layer, q, n, scale=0.1, dtype=torch.float64):
    """Plain attention over the decoded tensors in `dtype`."""
    k, v = (x.to(dtype).repeat_interleave(q.shape[1] // x.shape[1], 1) for x in dense(layer, n))
    return (q.to(dtype) @ k.transpose(-1, -2) * scale).softmax(-1) @ v


def check(layer, q, n, scale=0.1):
    """The kernel is finite and about as near to float64 as plain PyTorch of the same dtype is."""
    got, expected = decode(layer, q, n, scale), exact(layer, q, n, scale)
    assert got.shape == (*q.shape[:3], layer.ring.v.shape[3]) and got.dtype == q.dtype and torch.isfinite(got).all()
    rms = lambda x: (x.double() - expected).square().mean().sqrt().item()  # noqa: E731
    floor = torch.finfo(q.dtype).eps * expected.square().mean().sqrt().item()
    # In float32 the zero points' part and the codes' part are summed apart, and what cancels between them stays as rounding.
    # In 16 bits each weight is rounded, by up to half an eps, and the output once more. Errors of many tokens cancel; those of a few do not, and
    # none do in Triton's interpreter, which cuts off what a GPU rounds to bfloat16: all weights are too small there, by a third of an eps on average.
    limit = 16 * floor if q.dtype == torch.float32 else (0.5 if n > 8 and CUDA else 1.0) * floor
    plain = rms(exact(layer, q, n, scale, q.dtype))  # NaN where its scores overflow
    assert rms(got) <= (max(2 * plain, limit) if plain == plain else limit)
    twin = decode(layer, q, n, scale, kernels.quant_decode_plain)
    assert (got.double() - twin.double()).abs().max() <= (64 if q.dtype == torch.float32 else 32) * floor  # in float32 four times the limit


@settings(max_examples=16 if not CUDA else 100, phases=[Phase.generate], suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    n=st.integers(1, 150),
    bits=st.sampled_from([1, 2, 4, 8]),
    group=st.sampled_from([16, 32, 64]),
    residual=st.sampled_from([0, 16, 33]),
    centre=st.sampled_from([0, 20, 100]),
    B=st.integers(1, 2),
    KV=st.integers(1, 2),
    G=st.sampled_from([1, 3, 4, 8]),
    D=st.sampled_from([16, 40, 64]),
    Dv=st.sampled_from([24, 40, 80]),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 1000),
)
def test_decode_of_any_shape(n, bits, group, residual, centre, B, KV, G, D, Dv, dtype, seed):
    """A mask that misses one edge lets NaN in, or a neighbour's token; a constant baked in is wrong for some bits or width."""
    layer, q = filled(n, bits, group, residual, centre, bool(seed % 2), B, KV, G, D, Dv, dtype, room=seed % 200, seed=seed)
    check(layer, q, n)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("D, Dv, G", [(128, 128, 4), (80, 96, 3)])
def test_decode_at_the_usual_widths(D, Dv, G, dtype):
    layer, q = filled(300, 1, 64, 64, 0, True, 1, 1, G, D, Dv, dtype)
    check(layer, q, 300)


@pytest.mark.parametrize("n", [47, 48, 49, 63, 64, 65, 79, 80, 81, 175, 176, 177])
def test_decode_at_the_edges_of_blocks(n):
    """An edge computed in the kernel that is one token off counts a block twice or not at all; 176 is a whole program of blocks."""
    layer, q = filled(n, 1, 16, 32, 0, True, B=2, KV=1, G=2, D=16)
    check(layer, q, n)


def test_decode_before_and_after_the_centre():
    """Until the first `centre` tokens are there everything is in the ring, far more than `residual`."""
    for n in (99, 100, 101, 102, 130):
        layer, q = filled(n, 1, 16, 32, 100, True, KV=1, G=1, D=16)
        assert (layer.edge(n) == 0) == (n <= 100)
        check(layer, q, n)


def test_decode_does_not_depend_on_capacity():
    """A grid or an order of summation that follows the capacity changes low bits, and so, one day, a token."""
    for n in (40, 300):
        results = [decode(*filled(n, 1, 16, 32, room=room, KV=1, G=3, D=24, dtype=torch.bfloat16), n) for room in (0, 16, 300)]
        assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


@pytest.mark.parametrize("dtype", DTYPES)
def test_decode_of_extreme_queries(dtype):
    """Queries times scales must not leave float16's range, and a query of zeros has no exponent to divide by."""
    layer, q = filled(200, 1, 16, 32, KV=1, G=4, D=16, dtype=dtype)
    for factor, scale in ((0.0, 0.1), (1e-4, 1e3), (3e3, 1e-4)):
        check(layer, (q.float() * factor).to(dtype), 200, scale)
    top = torch.full_like(layer.ranges[0][:, :, : layer.edge(200) // 16, 0], 60000.0)
    layer.ranges[0][:, :, : layer.edge(200) // 16, 0] = top
    assert torch.isfinite(decode(layer, q, 200, 1e-6)).all()
    check(layer, q.float().to(dtype), 200, 1e-6)


def test_decode_sees_a_single_attended_token():
    """Scores far apart: every other part's weight underflows, and minus infinity minus itself is NaN."""
    layer, q = filled(200, 1, 16, 32, KV=1, G=4, D=16)
    check(layer, q, 200, 50.0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_layer_decodes_the_same_with_and_without_kernels(dtype, monkeypatch):
    """Steps across a block's edge, the position from the device: the same ring bit for bit, outputs within rounding."""
    layers = [filled(78, 1, 16, 32, 50, True, B=2, KV=1, G=3, D=16, dtype=dtype, room=64, poison=False)[0] for _ in range(2)]
    generator = torch.Generator(DEVICE).manual_seed(1)
    pos = torch.tensor([77], device=DEVICE)
    for length in range(79, 82):
        q, k, v = (torch.randn(2, h, 1, 16, device=DEVICE, generator=generator).to(dtype) for h in (3, 1, 1))
        pos += 1
        outputs = []
        for layer, plain in zip(layers, (True, False)):
            layer.age(length)
            monkeypatch.setattr(kernels, "FORCE", not plain)
            outputs.append(layer.attend(q, k, v, 0.2, length, pos))
        assert (outputs[0].double() - outputs[1].double()).abs().max() <= 16 * torch.finfo(dtype).eps * outputs[0].abs().max()
        assert torch.equal(layers[0].ring.k, layers[1].ring.k) and layers[0].ring.start == layers[1].ring.start
    same = zip(layers[0].tensors(81).items(), layers[1].tensors(81).values())
    assert all(torch.equal(a, b) for (_, a), b in same)


def test_decode_refuses_what_contradicts():
    """A tensor of another layout would be read as if it were this one."""
    layer, q = filled(100, 1, 16, 32, D=16)
    with pytest.raises(ValueError, match="codes of K"):
        decode(layer, q[..., :8], 100)
    with pytest.raises(ValueError, match="ring"):
        decode(layer, q.half(), 100)
    layer.ring.k = layer.ring.k.transpose(2, 3).contiguous().transpose(2, 3)
    with pytest.raises(ValueError, match="contiguous"):
        decode(layer, q, 100)


@settings(max_examples=12 if not CUDA else 200, phases=[Phase.generate], suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    bits=st.sampled_from([1, 1, 2, 4, 8]),
    group=st.sampled_from([16, 32, 64, 128]),
    levels=st.sampled_from(["minmax", "lloyd"]),
    per_channel=st.booleans(),
    B=st.integers(1, 2),
    D=st.sampled_from([16, 40, 80, 96, 131]),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 1000),
)
def test_encode_gives_the_twins_bytes(bits, group, levels, per_channel, B, D, dtype, seed):
    """A division rounded otherwise, a sum in another order or a fused multiply-add: codes would depend on the device."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    x = torch.randn(B, 1, 2 * group, D, device=DEVICE, generator=generator).mul(torch.rand(D, device=DEVICE, generator=generator).mul(9).exp() / 50).to(dtype)
    x[:, :, : group // 2, : D // 2] = 0.5  # with constant groups, or nearly so
    if seed % 3 == 0:
        x[:, :, :, 3], x[:, :, 5] = -1.25, 3e-7
    layer, _ = filled(3 * group + 1, bits, group, 0, KV=1, G=1, B=B, D=D, dtype=dtype, poison=False)
    mean = None if per_channel or seed % 2 else torch.randn(B, 1, 1, D, device=DEVICE, generator=generator)
    found = []
    for call in (kernels.quant_encode, kernels.quant_encode_plain):
        side = 0 if per_channel else 1
        codes, ranges = layer.codes[side].clone(), layer.ranges[side].clone()
        sums = None if per_channel else torch.full((B, 1, codes.shape[2], D), -7.0, device=DEVICE)
        call(x, per_channel, codes, ranges, 1, bits, group, levels, mean, sums)
        found.append((codes, ranges.view(torch.int16), torch.zeros(1) if sums is None else sums))
    for a, b in zip(*found):
        assert torch.equal(a, b)


# ------------------------------------------------------------------------------------------------------- at real sizes


@pytest.mark.gpu
@pytest.mark.parametrize("levels", ["minmax", "lloyd"])
@pytest.mark.parametrize("bits", [1, 2, 4, 8])
@pytest.mark.parametrize("D, dtype", [(128, torch.bfloat16), (80, torch.float16)])
def test_encode_at_real_sizes(D, dtype, bits, levels, monkeypatch):
    """The same bytes from the kernel, from the twin on the GPU, and from the twin on the CPU."""
    k, v = (torch.randn(1, 4, 20_032, D, device="cuda").to(dtype) for _ in range(2))
    found = []
    for device, force in (("cuda", True), ("cuda", False), ("cpu", False)):
        monkeypatch.setattr(kernels, "FORCE", force)
        layer = QuantLayer(bits, 64, 0, (levels, levels), True)
        layer.reserve(k.to(device), v.to(device), 20_032)
        layer._encode(0, k.to(device), v.to(device))
        found.append([x.cpu().view(torch.uint8) for x in (*layer.codes, *layer.ranges, layer.sums)])
    for one in found[1:]:
        assert all(map(torch.equal, found[0], one))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [1, 2, 4, 8])
@pytest.mark.parametrize("D, Dv, G, KV", [(128, 128, 4, 8), (64, 64, 3, 3), (80, 80, 8, 2), (96, 96, 1, 4), (40, 40, 6, 1), (192, 128, 4, 2)])
def test_decode_at_real_sizes(dtype, bits, D, Dv, G, KV):
    layer, q = filled(20_011, bits, 64, 128, 1024, True, 1, KV, G, D, Dv, dtype, room=5000)
    check(layer, q, 20_011, D**-0.5)


@pytest.mark.gpu
def test_decode_past_two_to_the_31():
    """Offsets in 32 bits wrap: codes and ranges of one head here lie more than 2^31 elements behind the first's."""
    layer, q = filled(2000, 1, 64, 128, 0, True, 1, 2, 4, 128, dtype=torch.bfloat16)
    expected = decode(layer, q, 2000)
    far = 2**31 + 64
    for held in (layer.codes, layer.ranges):
        for i, x in enumerate(held):
            room = torch.zeros(far + x[0, 0].numel(), dtype=x.dtype, device=DEVICE)
            held[i] = room.as_strided(x.shape, (far, far, *x.stride()[2:]))
            held[i].copy_(x)
    assert torch.equal(decode(layer, q, 2000), expected)


@pytest.mark.gpu
def test_a_captured_step_reads_its_position_from_the_device():
    """A host number baked into the graph would append to one slot for ever."""
    layer, q = filled(4000, 1, 64, 128, 1024, True, 1, 2, 4, 128, dtype=torch.bfloat16, room=200, poison=False)
    twin, _ = filled(4000, 1, 64, 128, 1024, True, 1, 2, 4, 128, dtype=torch.bfloat16, room=200, poison=False)
    k, v = (torch.zeros(1, 2, 1, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    pos = torch.tensor([4000], device="cuda")
    layer.age(4001)
    layer.attend(q, k, v, 0.1, 4001, pos=pos)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layer.attend(q, k, v, 0.1, 4001, pos=pos)
    for length in range(4001, 4150):
        k.normal_()
        v.normal_()
        pos.fill_(length - 1)
        layer.age(length)
        graph.replay()
        twin.age(length)
        assert torch.equal(out, twin.attend(q, k, v, 0.1, length, pos))
