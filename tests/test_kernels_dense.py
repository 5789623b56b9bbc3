# SPDX-License-Identifier: Apache-2.0
"""Kernels of the decode step against their twins: in Triton's interpreter at odd shapes, on CUDA at real ones."""

import pytest
import torch
import torch.nn.functional as F

import kernels
from kernels import Tile

pytest.importorskip("triton")

CUDA = torch.cuda.is_available()
DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * CUDA  # the interpreter cuts bf16 off where hardware rounds
DEVICE = "cuda" if CUDA else "cpu"


@pytest.fixture(autouse=True)
def forced(monkeypatch):
    """The kernels also on a CPU, and everything they allocate full of NaN."""
    monkeypatch.setattr(kernels, "FORCE", True)
    plain_empty, plain_new = torch.empty, torch.Tensor.new_empty
    monkeypatch.setattr(torch, "empty", lambda *a, **o: poison(plain_empty(*a, **o)))
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda self, *a, **o: poison(plain_new(self, *a, **o)))


def poison(x):
    return x.fill_(float("nan")) if x.is_floating_point() else x


def random(*shape, dtype=torch.float32, seed=0, gain=1.0):
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape))) * gain
    return x.to(DEVICE, dtype)


def close(got, plain, exact, dtype, slack=2.0):
    """Twice the plain operations' own error is the limit, or a rounding of the largest value where they are exact by luck."""
    assert got.shape == plain.shape and got.dtype == plain.dtype and not got.isnan().any()
    limit = slack * (plain.double() - exact).abs().max() + 2 * torch.finfo(dtype).eps * exact.abs().max()
    assert (got.double() - exact).abs().max() <= limit


def cut(monkeypatch, rows, chunk, per_sm):
    for name in kernels.TILES:
        monkeypatch.setitem(kernels.TILES, name, Tile(rows, chunk, per_sm, 4, 2, 64))


def normed(h, weight, eps):
    x = h.double()
    return (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.double()).to(h.dtype).double()


CUTS = [(2, 16384, 2), (4, 16, 0), (1, 32, 1)]  # a row at once; in chunks, a program a tile; in chunks, walking


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tile", CUTS)
@pytest.mark.parametrize("hidden, sizes, bias, ahead", [(33, (7, 3, 5), True, False), (32, (9,), False, False), (40, (5, 9, 3), True, True), (24, (6, 2), False, True)])
def test_norm_linear(monkeypatch, dtype, tile, hidden, sizes, bias, ahead):
    """Rows of one matrix given to another, a masked tail that leaks, a norm taken from elsewhere."""
    cut(monkeypatch, *tile)
    h, norm, other = random(1, 1, hidden, dtype=dtype, gain=3), random(hidden, dtype=dtype, seed=1), random(hidden, dtype=dtype, seed=2)
    weights = [random(n, hidden, dtype=dtype, seed=i) for i, n in enumerate(sizes)]
    biases = [random(n, dtype=dtype, seed=i) for i, n in enumerate(sizes)] if bias else None
    extra = (other, random(11, hidden, dtype=dtype, seed=9), random(11, dtype=dtype) if bias else None) if ahead else None
    got = kernels.norm_linear(h, norm, 0.02, weights, biases, extra)
    plain = kernels._norm_linear(h, norm, 0.02, weights, biases, extra)
    assert len(got) == len(plain) == len(sizes) + ahead
    jobs = [(norm, w, b) for w, b in zip(weights, biases or [None] * len(weights))] + ([extra] if ahead else [])
    for one, two, (n, w, b) in zip(got, plain, jobs):
        close(one, two, F.linear(normed(h, n, 0.02), w.double(), None if b is None else b.double()), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tile", CUTS)
@pytest.mark.parametrize("hidden, H, D, bias", [(48, 2, 8, False), (33, 3, 10, True), (16, 1, 2, False)])
def test_norm_rotate(monkeypatch, dtype, tile, hidden, H, D, bias):
    """A row rotated with another's partner: where a program's share of the rows ends inside a head, or a tile reaches into the next one."""
    cut(monkeypatch, *tile)
    h, norm, weight = random(1, 1, hidden, dtype=dtype, gain=3), random(hidden, dtype=dtype, seed=1), random(H * D, hidden, dtype=dtype, seed=2)
    b, cos, sin = random(H * D, dtype=dtype, seed=3) if bias else None, random(1, D, dtype=dtype, seed=4), random(1, D, dtype=dtype, seed=5)
    got, plain = (f(h, norm, 0.02, weight, b, cos, sin) for f in (kernels.norm_rotate, kernels._norm_rotate))
    q = F.linear(normed(h, norm, 0.02), weight.double(), None if b is None else b.double())
    close(got, plain, kernels.rotate(q.view(1, 1, H, D).transpose(1, 2), cos.double(), sin.double()), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tile", CUTS)
@pytest.mark.parametrize("hidden, intermediate, bias", [(48, 12, False), (33, 9, True)])
def test_norm_gated(monkeypatch, dtype, tile, hidden, intermediate, bias):
    cut(monkeypatch, *tile)
    h, norm = random(1, 1, hidden, dtype=dtype, gain=3), random(hidden, dtype=dtype, seed=1)
    weights = [random(intermediate, hidden, dtype=dtype, seed=i, gain=0.3) for i in range(2)]
    biases = [random(intermediate, dtype=dtype, seed=i) for i in range(2)] if bias else [None] * 2
    got, plain = (f(h, norm, 1e-5, *weights, *biases) for f in (kernels.norm_gated, kernels._norm_gated))
    gate, up = (F.linear(normed(h, norm, 1e-5), w.double(), None if b is None else b.double()) for w, b in zip(weights, biases))
    close(got, plain, F.silu(gate) * up, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tile", CUTS)
@pytest.mark.parametrize("K, N, bias", [(48, 13, False), (33, 9, True), (1, 1, False)])
def test_linear_add(monkeypatch, dtype, tile, K, N, bias):
    """A row added twice, or not at all."""
    cut(monkeypatch, *tile)
    h, x, w, b = random(1, 1, N, dtype=dtype), random(1, 1, K, dtype=dtype), random(N, K, dtype=dtype, seed=3), random(N, dtype=dtype, seed=4) if bias else None
    plain = kernels._linear_add_(h.clone(), x, w, b)
    exact = h.double() + F.linear(x.double(), w.double(), None if b is None else b.double())
    assert kernels.linear_add_(h, x, w, b) is h
    close(h, plain, exact, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("B, H, KV, D, Dv", [(1, 4, 2, 8, 8), (2, 3, 1, 12, 5), (1, 9, 3, 6, 6)])
def test_rotation_and_append_are_the_twins_bit_for_bit(dtype, B, H, KV, D, Dv):
    """A fused multiply-add, or a sum of unrounded products, makes a key that prefill would have stored otherwise."""
    slots = 7
    q, k, v = random(B, 1, H, D, dtype=dtype).transpose(1, 2), random(B, 1, KV, D, dtype=dtype, seed=1).transpose(1, 2), random(B, 1, KV, Dv, dtype=dtype, seed=2).transpose(1, 2)
    cos, sin = random(1, D, dtype=dtype, seed=3), random(1, D, dtype=dtype, seed=4)
    for a, b in zip(kernels.rotate_pair(q, k, cos, sin), (kernels.rotate(q, cos, sin), kernels.rotate(k, cos, sin))):
        assert torch.equal(a, b)
    for rotation in ((cos, sin), (None, None)):
        for position in (0, 3, 6, 7, 19):
            pos = torch.tensor([position], device=DEVICE)
            caches = [[random(B, KV, slots, n, dtype=dtype, seed=5) for n in (D, Dv)] for _ in range(2)]
            outs = [f(q, k, v, *rotation, *cache, pos, slots) for f, cache in zip((kernels.rotate_append, kernels._rotate_append), caches)]
            assert torch.equal(*outs)
            assert torch.equal(caches[0][0], caches[1][0]) and torch.equal(caches[0][1], caches[1][1])


def reference(q, k, v, N, scale):
    G = q.shape[1] // k.shape[1]
    k, v = (x[:, :, :N].double().repeat_interleave(G, 1) for x in (k, v))
    return (q.double() @ k.transpose(-1, -2) * scale).softmax(-1) @ v


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("B, KV, G, D, Dv", [(1, 2, 4, 16, 16), (2, 1, 3, 20, 12), (1, 1, 17, 8, 40)])
def test_split_attention(monkeypatch, dtype, B, KV, G, D, Dv):
    """Free rows full of NaN, splits that begin past the end, a sum that depends on the capacity."""
    monkeypatch.setattr(kernels, "SPLIT", 32)
    monkeypatch.setattr(kernels, "SPLIT_TILE", (16, 4, 2))
    q = random(B, KV * G, 1, D, dtype=dtype)
    for N in (1, 33, 70) if G < 9 else (33,):
        outs = []
        for slots in (N, 130):
            k, v = random(B, KV, 130, D, dtype=dtype, seed=1)[:, :, :slots].contiguous(), random(B, KV, 130, Dv, dtype=dtype, seed=2)[:, :, :slots].contiguous()
            k[:, :, N:], v[:, :, N:] = float("nan"), float("nan")
            outs.append(kernels.split_attention(q, k, v, torch.tensor([N - 1], device=DEVICE), 0.4))
        assert torch.equal(*outs)
        close(outs[0], kernels._split_attention(q, k, v, torch.tensor([N - 1]), 0.4), reference(q, k, v, N, 0.4), dtype)


def test_many_splits_are_joined_in_order(monkeypatch):
    """More splits than are joined at a time, with a maximum far above the others in one of the last."""
    monkeypatch.setattr(kernels, "SPLIT", 16)
    monkeypatch.setattr(kernels, "SPLIT_TILE", (16, 4, 2))
    q, k, v = random(1, 1, 1, 16), random(1, 1, 1100, 16, seed=1), random(1, 1, 1100, 16, seed=2)
    k[:, :, 1050] = 10 * q[0, 0]
    pos = torch.tensor([1099], device=DEVICE)
    close(kernels.split_attention(q, k, v, pos), kernels._split_attention(q, k, v, pos, 0.25), reference(q, k, v, 1100, 0.25), torch.float32)


def test_what_kernels_are_not_written_for_takes_the_twin(monkeypatch):
    """Two rows, a strided matrix, two dtypes, a bias here but not there: right, if not fast."""
    monkeypatch.setattr(kernels, "_norm_linear_kernel", None)
    monkeypatch.setattr(kernels, "_linear_add_kernel", None)
    h, norm, w = random(2, 1, 8), random(8), random(6, 8)
    for arguments in ((h, norm, 0.1, [w]), (h[:1], norm, 0.1, [random(8, 6).T]), (h[:1], norm, 0.1, [w, w], [random(6), None])):
        for a, b in zip(kernels.norm_linear(*arguments), kernels._norm_linear(*arguments)):
            assert torch.equal(a, b)
    assert torch.equal(kernels.linear_add_(random(2, 1, 6), h, w), kernels._linear_add_(random(2, 1, 6), h, w))
    with pytest.raises(RuntimeError):
        kernels.linear_add_(random(1, 1, 5), random(1, 1, 8), w)
    with pytest.raises(ValueError, match="3 weights"):
        kernels.norm_linear(h, norm, 0.1, [w] * 4)
    with pytest.raises(ValueError, match="do not fit"):
        x = random(1, 2, 1, 4)
        kernels.rotate_append(x, x, x, None, None, random(1, 2, 5, 4), random(1, 2, 6, 4), torch.tensor([0]), 5)


def test_twins_are_chosen_on_a_cpu(monkeypatch):
    monkeypatch.setattr(kernels, "FORCE", None)
    assert not kernels.usable(torch.device("cpu"))
    monkeypatch.setattr(kernels, "_norm_linear_kernel", None)
    h, norm, w = torch.randn(1, 1, 8), torch.randn(8), torch.randn(6, 8)
    kernels.norm_linear(h, norm, 0.1, [w])


def test_without_triton_one_warning(monkeypatch):
    """A warning a layer and step would bury the text."""
    monkeypatch.setattr(kernels, "FORCE", None)
    monkeypatch.setattr(kernels, "ABSENT", True)
    monkeypatch.setattr(kernels, "_capability", lambda device: (9, 0))
    kernels._warn_without.cache_clear()
    with pytest.warns(UserWarning, match="Triton is not installed") as caught:
        assert not any([kernels.usable(torch.device("cuda")) for _ in range(3)])
    assert len(caught) == 1
    kernels._warn_without.cache_clear()


@pytest.mark.parametrize("family", ["llama3", "qwen2", "qwen3-bias"])
def test_a_decoded_token_is_the_twins(monkeypatch, make_checkpoint, family):
    """Every kernel in its place in the layer: the right norm, bias, head; the query predicted for the next layer; odd head sizes."""
    from cache import FullCache, TailorCache, TailorConfig
    from model import Llama

    cut(monkeypatch, 16, 16384, 2)
    monkeypatch.setattr(kernels, "SPLIT", 32)
    shapes = {"llama3": ("Llama", {"num_key_value_heads": 1, "head_dim": 8}), "qwen2": ("Qwen2", {"num_key_value_heads": 2}), "qwen3-bias": ("Qwen3", {"num_key_value_heads": 2, "head_dim": 6, "attention_bias": True})}
    cls, shape = shapes[family]
    folder, _ = make_checkpoint(cls, num_attention_heads=4, hidden_size=16, intermediate_size=20, num_hidden_layers=2, vocab_size=40, pad_token_id=0, **shape)
    model, ids = Llama.from_checkpoint(folder).to(DEVICE), torch.arange(30)[None] % 40
    settings = TailorConfig.build(preset="longbench", sink=4, recent=8, topk=4, channels=2, dense_below=0)
    for make in (lambda: FullCache(model.config, device=DEVICE), lambda: TailorCache(model.config, (0,), settings, DEVICE)):
        outs = []
        for force in (False, True):
            monkeypatch.setattr(kernels, "FORCE", force)
            with make() as cache:
                model.prefill(ids[:, :29], cache)
                outs.append(model.decode(ids[:, 29:].to(DEVICE), cache))
        assert (outs[0] - outs[1]).abs().max() < 1e-4 and not torch.equal(*outs)


def test_a_head_put_in_place_of_the_own_is_called():
    """evals/ compare logits in float32; the fused step must not go past their head."""
    from cache import FullCache
    from model import Llama, ModelConfig

    raw = {"model_type": "llama", "vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "rms_norm_eps": 1e-5, "max_position_embeddings": 64, "rope_theta": 10000.0}  # fmt: skip
    model = Llama.from_config(ModelConfig.from_dict(raw)).to(DEVICE)
    model.lm_head = torch.nn.Sequential(model.lm_head, torch.nn.Softmax(-1))
    cache = FullCache(model.config, device=DEVICE)
    model.prefill(torch.tensor([[1, 2, 3]]), cache)
    assert model.decode(torch.tensor([[4]], device=DEVICE), cache).sum() == pytest.approx(1)


# --------------------------------------------------------------------------------------------------------- real shapes


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden, sizes", [(4096, (4096, 1024, 1024)), (576, (576, 192, 192)), (8192, (8192, 1024, 1024)), (20000, (100, 7)), (576, (49152,)), (4096, (128256,))])
def test_norm_linear_on_cuda(dtype, hidden, sizes):
    h, norm = random(1, 1, hidden, dtype=dtype), random(hidden, dtype=dtype, seed=1)
    weights = [random(n, hidden, dtype=dtype, seed=i, gain=hidden**-0.5) for i, n in enumerate(sizes)]
    for got, plain, w in zip(kernels.norm_linear(h, norm, 1e-5, weights), kernels._norm_linear(h, norm, 1e-5, weights), weights):
        close(got, plain, F.linear(normed(h, norm, 1e-5), w.double()), dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden, intermediate", [(4096, 14336), (576, 1536), (4096, 11008)])
def test_mlp_on_cuda(dtype, hidden, intermediate):
    h, norm = random(1, 1, hidden, dtype=dtype), random(hidden, dtype=dtype, seed=1)
    gate, up = (random(intermediate, hidden, dtype=dtype, seed=i, gain=hidden**-0.5) for i in range(2))
    down = random(hidden, intermediate, dtype=dtype, gain=intermediate**-0.5)
    x = kernels.norm_gated(h, norm, 1e-5, gate, up)
    exact = F.silu(F.linear(normed(h, norm, 1e-5), gate.double())) * F.linear(normed(h, norm, 1e-5), up.double())
    close(x, kernels._norm_gated(h, norm, 1e-5, gate, up), exact, dtype)
    exact = h.double() + F.linear(x.double(), down.double())
    plain = kernels._linear_add_(h.clone(), x, down)
    close(kernels.linear_add_(h, x, down), plain, exact, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("KV, G, D, Dv, N", [(8, 4, 128, 128, 5000), (3, 3, 64, 64, 4097), (2, 8, 80, 80, 600), (4, 1, 96, 64, 513), (1, 4, 256, 256, 1500)])
def test_split_attention_on_cuda(dtype, KV, G, D, Dv, N):
    q, k, v = random(1, KV * G, 1, D, dtype=dtype), random(1, KV, N + 900, D, dtype=dtype, seed=1), random(1, KV, N + 900, Dv, dtype=dtype, seed=2)
    k[:, :, N:], v[:, :, N:] = float("nan"), float("nan")
    pos = torch.tensor([N - 1], device=DEVICE)
    close(kernels.split_attention(q, k, v, pos), kernels._split_attention(q, k, v, pos, D**-0.5), reference(q, k, v, N, D**-0.5), dtype)


@pytest.mark.gpu
def test_offsets_past_two_to_the_31():
    """int32 offsets wrap: wrong numbers first, faults later."""
    w = torch.zeros(530_000, 4096, dtype=torch.bfloat16, device="cuda")
    w[-1] = random(4096, dtype=torch.bfloat16)
    h, norm = random(1, 1, 4096, dtype=torch.bfloat16), torch.ones(4096, dtype=torch.bfloat16, device="cuda")
    got = kernels.norm_linear(h, norm, 1e-5, [w])[0][0, 0]
    assert not got[:-1].any() and (got[-1] - kernels._norm_linear(h, norm, 1e-5, [w[-1:]])[0]).abs() < 1
    del w
    k = torch.zeros(1, 17, 2**20, 128, dtype=torch.bfloat16, device="cuda")  # the last head begins past 2^31
    q, row = random(1, 17, 1, 128, dtype=torch.bfloat16), random(1, 17, 1, 128, dtype=torch.bfloat16, seed=1)
    pos = torch.tensor([2**20 - 1], device="cuda")
    kernels.rotate_append(q, row, row, None, None, k, k, pos, 2**20)
    assert torch.equal(k[:, :, -1:], row)
    pos = torch.tensor([9], device="cuda")
    k[:, :, :10] = random(1, 17, 10, 128, dtype=torch.bfloat16, seed=2)
    close(kernels.split_attention(q, k, k, pos), kernels._split_attention(q, k, k, pos, 128**-0.5), reference(q, k, k, 10, 128**-0.5), torch.bfloat16)
