# SPDX-License-Identifier: Apache-2.0
"""What a sparse layer's prefill computes for the host, by kernels against the twins: in Triton's interpreter at small odd shapes, on a GPU at real ones."""

import pytest
import torch

import kernels
import offload
import sparse_kernels
from offload import BLOCK, HostStore, block_facts, block_sums, largest
from pinned import Pinner
from retrieval import moments_of, statistics

pytestmark = pytest.mark.usefixtures("kernels_everywhere")

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
SHAPES = [(64, 64, 3), (80, 96, 1), (96, 80, 3), (128, 128, 1)]  # D, Dv, KV

if kernels.ABSENT:
    pytest.skip("needs Triton", allow_module_level=True)


@pytest.fixture
def plain(monkeypatch):
    """`plain(call, *arguments)`: what the twins make of it."""

    def run(call, *arguments):
        with monkeypatch.context() as patch:
            patch.setattr(kernels, "FORCE", False)
            return call(*arguments)

    return run


def pair(T, D, Dv, KV, dtype, B=1, seed=0, room=64):
    """K with outlying channels, a constant one and one of a single sign, and V; both a part of a larger buffer whose rest is NaN."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    found = []
    for width in (D, Dv):
        x = torch.randn(B, KV, T, width, device=DEVICE, generator=generator) * torch.rand(width, device=DEVICE, generator=generator).mul(5).exp() / 20
        x[..., 3], x[..., 5] = -1.25, -x[..., 5].abs()
        whole = torch.full((B, KV, T + room, width), float("nan"), device=DEVICE, dtype=dtype)
        whole[:, :, :T] = x
        found.append(whole[:, :, :T])
    return found


def equal_bytes(ours, theirs):
    return all(a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)) for a, b in zip(ours, theirs, strict=True))


def bound(k, v):
    """How far moments by kernels may lie from the twin's: two roundings to the grid a block, and float32 sums of 64 products, every
    step rounded (or cut off, as tensor cores do): 64 * 2^-23 of the products' absolute sum."""
    products = moments_of(k.double().abs(), v.double().abs())
    return -(-k.shape[2] // BLOCK) * 2.0**-19 + 64 * 2.0**-23 * products


# ------------------------------------------------------------------------------------------------------ each kernel alone


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("D, Dv, KV", SHAPES)
def test_facts_are_the_twins_bytes(D, Dv, KV, dtype, plain):
    """Rows in another layout, a neighbour's range or a maximum across a block's edge would be wrong for the whole life of the cache."""
    k, v = pair(3 * BLOCK, D, Dv, KV, dtype, B=2 if D == 80 else 1)
    for bits in (2, 4, 8, 16) if D in (64, 80) else (4,):
        ours, theirs = (plain(block_facts, k, v, bits, False) if twin else block_facts(k, v, bits, True) for twin in (False, True))
        assert equal_bytes(ours, theirs), bits


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("D, Dv, KV", [*SHAPES, (17, 33, 2)])
def test_8_bit_tokens_are_the_twins_bytes(D, Dv, KV, dtype, plain):
    """A row one byte off, or a number rounded the other way, stays on the host for good."""
    k, v = pair(75, D, Dv, KV, dtype, B=2 if D == 80 else 1)
    k[:, :, 3, 2], v[:, :, 5, -1], v[:, :, 6, 1], k[:, :, 9] = float("nan"), float("inf"), -float("inf"), 0
    k[:, :, 10], k[:, :, 11, 0] = 127.5, 63.75
    ours, theirs = sparse_kernels.encode_tokens(k, v), plain(offload.encode_tokens, k, v, 8)
    assert equal_bytes([ours], [theirs])
    decoded = offload.decode_tokens(theirs, D, Dv, 8, dtype)
    for x, expected in zip((k, v), decoded):
        assert torch.equal(sparse_kernels.round_shared(x).nan_to_num(7), expected.nan_to_num(7)) and expected.isnan().any()
    assert equal_bytes([sparse_kernels.encode_tokens(*decoded)], [theirs])
    turned = k.transpose(2, 3).contiguous().transpose(2, 3)
    assert equal_bytes([sparse_kernels.encode_tokens(turned, v)], [theirs])


def test_any_stride_is_read():
    """A view of another order, read as if its rows lay side by side, would give other tokens' numbers."""
    k, v = (x.transpose(2, 3).contiguous().transpose(2, 3) for x in pair(2 * BLOCK, 64, 80, 2, torch.float16))
    assert equal_bytes(block_facts(k, v, 4, True), block_facts(k.contiguous(), v.contiguous(), 4, True))
    assert torch.equal(moments_of(k, v), moments_of(k.contiguous(), v.contiguous()))


@pytest.mark.parametrize("T", [1, 63, 64, 65, 180])
def test_statistics_where_the_sink_cuts_the_first_block(T, plain):
    """Blocks are counted from the end: a first block of T % 64 tokens must not borrow from before the first token."""
    k, v = pair(T, 80, 64, 2, torch.bfloat16)
    most, total, moments = statistics(k, v, True, True)
    expected = plain(statistics, k, v, True, True)
    assert torch.equal(most, expected[0]) and torch.equal(total, expected[1])
    assert ((moments - expected[2]).abs() <= bound(k, v)).all()
    assert statistics(k, v, False, False)[1:] == (None, None)
    most, sums = sparse_kernels.block_statistics(k, maxima=True, sums=True)
    assert torch.equal(most[:, :, 0], largest(k[:, :, : T % BLOCK or BLOCK]))
    if T > BLOCK:
        assert torch.equal(sums[:, :, 1 if T % BLOCK else 0 :], block_sums(k[:, :, T % BLOCK :]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("D, Dv, KV", SHAPES)
def test_moments_are_the_twins_within_float32(D, Dv, KV, dtype, plain):
    k, v = pair(2 * BLOCK + 9, D, Dv, KV, dtype)
    ours, theirs = moments_of(k, v), plain(moments_of, k, v)
    assert ours.shape == theirs.shape and ours.dtype == torch.float64 and torch.equal(ours * 2.0**20, (ours * 2.0**20).round())
    assert ((ours - theirs).abs() <= bound(k, v)).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_moments_do_not_show_in_which_pieces_tokens_came(dtype, monkeypatch):
    """What is taken out again must leave exactly what was there; two blocks a run, so that runs are joined, too."""
    monkeypatch.setattr(sparse_kernels, "RUN", 2)
    k, v = pair(5 * BLOCK + 44, 64, 80, 2, dtype)
    whole, cuts = moments_of(k, v), [0, 44, 44 + BLOCK, 44 + 4 * BLOCK, 44 + 5 * BLOCK]
    parts = [moments_of(k[:, :, a:b].clone(), v[:, :, a:b].clone()) for a, b in zip(cuts, cuts[1:])]
    assert torch.equal(parts[3] + parts[0] + (parts[2] + parts[1]), whole)
    assert torch.equal(whole - parts[2] - parts[0], parts[1] + parts[3])


def test_no_tokens_are_no_launch():
    k, v = pair(0, 64, 64, 1, torch.float16)
    assert not moments_of(k, v).any() and sparse_kernels.block_statistics(k, True, True)[0].shape == (1, 1, 0, 64)
    assert [x.shape[3] for x in sparse_kernels.encode_channels(k, 4)] == [0, 0]


def test_what_no_kernel_takes_goes_to_the_twins():
    """float64, or K and V of two kinds."""
    k, v = pair(BLOCK, 16, 16, 1, torch.float32)
    assert sparse_kernels.summarises(k, v) and not sparse_kernels.summarises(k, v.half()) and not sparse_kernels.summarises(k.double(), v.double())
    assert torch.isfinite(moments_of(k.double(), v.double())).all()


# --------------------------------------------------------------------------------------------------------- the host store


def stored(k, v, bits, cuts, token_bits=16):
    """A store that was given k and v in the pieces between `cuts`, its content afterwards, and the bytes that copies moved."""
    pinner = Pinner(k.device)
    store = HostStore(pinner, bits, token_bits)
    store.reserve(cuts[-1], k, v, True)
    for a, b in zip(cuts, cuts[1:]):
        store.write(a, k[:, :, a:b], v[:, :, a:b])
    if k.is_cuda:
        torch.cuda.synchronize()
    held = [x.clone() for x in (store.slabs[0].kv, *store.slabs[0].facts(0, cuts[-1]))]
    store.close()
    pinner.close()
    return held


@pytest.mark.parametrize("cuts", [(0, 4 * BLOCK), (0, BLOCK, 4 * BLOCK)])
@pytest.mark.parametrize("bits, token_bits", [(4, 16), (16, 16), (4, 8)])
def test_a_store_holds_the_same_written_by_kernels(bits, token_bits, cuts, monkeypatch, plain):
    """Heads in groups, pieces of a head: whatever the temporaries' bounds, every byte at its place."""
    k, v = pair(4 * BLOCK, 40, 24, 3, torch.bfloat16, B=2)
    expected = plain(stored, k, v, bits, cuts, token_bits)
    monkeypatch.setattr(offload, "by_kernels", sparse_kernels.summarises)
    for held, piece in ((1, 64), (30_000, 100), (1 << 30, 1 << 30)):
        monkeypatch.setattr(HostStore, "HELD", held)
        monkeypatch.setattr(HostStore, "PIECE", piece)
        assert equal_bytes(stored(k, v, bits, cuts, token_bits), expected)


def test_interpreted_kernels_stay_in_one_thread():
    """Blocks come to the store from the prefetcher's thread as well, and the interpreter knows one."""
    assert offload.by_kernels(*pair(BLOCK, 16, 16, 1, torch.float16)) == CUDA


def test_pieces_are_as_large_as_contiguous_memory_allows(monkeypatch):
    target, moved = torch.zeros(2, 3, 8), []
    source = torch.arange(24.0).view(2, 3, 4)
    copy = torch.Tensor.copy_
    monkeypatch.setattr(torch.Tensor, "is_cuda", True, raising=False)
    monkeypatch.setattr(torch.Tensor, "copy_", lambda self, other, **options: (moved.append(self.shape), copy(self, other))[1])
    offload.copy_pieces(target[..., 2:6], source)
    offload.copy_pieces(torch.zeros(2, 3, 4), source)
    assert moved == [(4,)] * 6 + [(2, 3, 4)]
    assert torch.equal(target[..., 2:6], source) and not target[..., :2].any() and not target[..., 6:].any()


# ------------------------------------------------------------------------------------------------------- at real sizes


@pytest.mark.gpu
@pytest.mark.parametrize("D, dtype", [(128, torch.bfloat16), (80, torch.float16), (256, torch.bfloat16), (64, torch.float32)])
def test_facts_at_real_sizes(D, dtype, plain):
    """The same bytes as the twin's on the GPU and on the CPU."""
    k, v = pair(20_032, D, D, 3, dtype)
    for bits in (2, 4, 8, 16):
        ours = [x.cpu() for x in block_facts(k, v, bits, True)]
        assert equal_bytes(ours, [x.cpu() for x in plain(block_facts, k, v, bits, False)])
        assert equal_bytes(ours, plain(block_facts, k.cpu(), v.cpu(), bits, False))


@pytest.mark.gpu
@pytest.mark.parametrize("D, dtype", [(128, torch.bfloat16), (80, torch.float16), (256, torch.bfloat16), (64, torch.float32)])
def test_moments_at_real_sizes(D, dtype, plain):
    """Near the twin's, and the same bits a block at a time, in two calls, in other memory, and time after time."""
    k, v = pair(64 * 200 + 56, D, D, 3, dtype)
    whole = moments_of(k, v)
    assert ((whole - plain(moments_of, k, v)).abs() <= bound(k, v)).all()
    assert all(torch.equal(moments_of(k, v), whole) for _ in range(5))
    rest = whole.clone()
    for a, b in [(0, 56), (56, 56 + 64 * 70), *((56 + 64 * i, 56 + 64 * i + 64) for i in range(70, 200))]:
        rest -= moments_of(k[:, :, a:b].clone(), v[:, :, a:b].clone())
    assert not rest.any()


@pytest.mark.gpu
def test_a_layer_of_131072_tokens(plain):
    """A prefill's layer whole: the host's bytes are the twins', the GPU's temporaries within what is stated, and it takes about a millisecond."""
    k, v = pair(131_072, 128, 128, 8, torch.bfloat16, room=0)
    pinner = Pinner(DEVICE)
    stores = [HostStore(pinner, 4) for _ in range(2)]
    for store in stores:
        store.reserve(k.shape[2], k, v, True)
        store.slabs[0].wait()
    stores[0].write(0, k, v)  # compiles
    statistics(k, v, True, True)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    stores[0].write(0, k, v)
    found = statistics(k[:, :, 8:], v[:, :, 8:], True, True)
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before < 128 << 20
    plain(stores[1].write, 0, k, v)
    torch.cuda.synchronize()
    a, b = (store.slabs[0] for store in stores)
    assert equal_bytes([a.kv, *a.facts(0, a.size)], [b.kv, *b.facts(0, b.size)])
    expected = plain(statistics, k[:, :, 8:], v[:, :, 8:], True, True)
    assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])
    assert ((found[2] - expected[2]).abs() <= bound(k[:, :, 8:], v[:, :, 8:])).all()

    def facts():
        block_facts(k, v, 4, True)
        statistics(k[:, :, 8:], v[:, :, 8:], True, True)

    facts()
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    facts()
    stop.record()
    torch.cuda.synchronize()
    print(f"rows, maxima, sums and moments: {start.elapsed_time(stop):.2f} ms")
    for store in stores:
        store.close()
    pinner.close()
