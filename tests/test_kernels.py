# SPDX-License-Identifier: Apache-2.0
"""The Triton kernels against their twins: at tiny odd shapes in Triton's interpreter, and, marked `gpu`, at real ones."""

import math

import pytest
import torch

import kernels
from cache import TailorCache
from offload import BLOCK, ZeroCopy, decode_rows, encode_rows
from retrieval import approximate_scores, select_tokens
from test_tailor import BEST, Driver, options, same, state

pytestmark = pytest.mark.usefixtures("kernels_everywhere")

DEVICES = [pytest.param("cpu"), pytest.param("cuda", marks=pytest.mark.gpu)]


# ------------------------------------------------------------------------------------------------- the choice of channels


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("D, C, R, G, authors", [(16, 4, 4, 1, True), (40, 6, 9, 3, False), (128, 24, 44, 4, False), (80, 8, 0, 8, True)])
def test_choose_channels(device, D, C, R, G, authors):
    """Twelve steps in a row, with ties among the channels: the same channels, slots, misses and clocks as the twin's."""
    generator = torch.Generator().manual_seed(0)
    states = []
    for twin in (False, True):
        names = ("index", "slot", "missing")
        states.append({name: torch.full((2, 2, C), -7, dtype=torch.int32, device=device) for name in names})
        states[-1]["held"] = torch.full((2, 2, R), -1, dtype=torch.int32, device=device) if R else None
        states[-1]["stamp"] = torch.zeros(2, 2, R, dtype=torch.int64, device=device) if R else None
    for step in range(12):
        q = torch.randint(-3, 4, (2, 2 * G, 1, D), generator=generator).float().to(device)
        kmax = torch.randint(1, 4, (2, 2, D), generator=generator).float().to(device)
        pos = torch.tensor([100 + step], device=device)
        kernels.choose_channels(q, kmax, authors, **states[0], pos=pos)
        kernels.choose_channels_twin(q, kmax, authors, **states[1], pos=pos)
        for name, tensor in states[0].items():
            assert tensor is None or torch.equal(tensor, states[1][name]), (step, name)
        if R:
            assert states[0]["missing"].sum() < 2 * 2 * C or step == 0 or R == C


# ---------------------------------------------------------------------------------------------------- scores, selection


def scored(bits, dtype, G, device, N=1984, D=40, KV=2, C=9, sink=5, recent=70):
    """Scores of candidates `[KV, G, M]` by the kernel, by the twin, and by plain matrix products in `dtype`; and what the kernel says of each chunk."""
    generator = torch.Generator().manual_seed(bits * 10 + G)
    random = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    keys = (random(1, KV, D, N) * random(1, KV, D, 1) * 2 + random(1, KV, D, 1)).to(dtype)
    planes = [plane.to(device) for plane in encode_rows(keys, bits)]
    # Rows are readable to the end of a chunk; what lies there is anything.
    whole = -(-N // kernels.Scratch.CHUNK) * kernels.Scratch.CHUNK
    planes = [torch.cat([p, p.new_full((*p.shape[:3], p.shape[3] * (whole - N) // N), 77)], -1) for p in planes]
    index = torch.stack([torch.randperm(D, generator=generator)[:C].sort().values for _ in range(KV)])[None].int().to(device)
    q = random(1, KV * G, 1, D).to(dtype).to(device)
    pos, scale = torch.tensor([N + recent - 8], device=device), D**-0.5
    edge = (int(pos) + 1 - recent) // BLOCK * BLOCK
    scratch = kernels.Scratch((1, KV), G, whole, 8, bits, torch.device(device))
    rows = kernels.Rows(planes, index, index, bits, 0)
    kernels.score(q, rows, pos, scale, sink, recent, False, scratch)
    n = torch.arange(whole, device=device)
    each = 8 if bits <= 4 else 16 // bits
    chunk = kernels.Scratch.CHUNK
    place = n // chunk * chunk + n % each * (chunk // each) + n % chunk // each
    mine = scratch.scores[..., place].view(KV, G, whole)
    assert torch.isneginf(mine[..., :sink]).all() and torch.isneginf(mine[..., edge:chunk * -(-edge // chunk)]).all()
    chosen = [p.gather(2, index.long()[..., None].expand(-1, -1, -1, p.shape[3])) for p in planes]
    rows = decode_rows(chosen, bits)[..., sink:edge]
    exact = approximate_scores(q, index.long(), rows, scale)[0]
    gathered = q.view(1, KV, G, D).gather(3, index.long().unsqueeze(2).expand(-1, -1, G, -1))
    plain = ((gathered @ rows.to(dtype)) * scale)[0].float()
    return mine[..., sink:edge] * math.log(2), exact, plain, scratch, edge


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("bits, dtype, G", [(4, torch.bfloat16, 4), (4, torch.float16, 1), (4, torch.float32, 3), (2, torch.bfloat16, 3), (2, torch.float16, 8), (8, torch.bfloat16, 2), (16, torch.bfloat16, 4), (16, torch.float32, 8)])
def test_scores(bits, dtype, G, device):
    """No more than twice the error of plain products in the same dtype; and each chunk's statistics are those of its scores."""
    if device == "cuda":
        mine, exact, plain, scratch, edge = scored(bits, dtype, G, device, N=70016, D=128, KV=3, C=28)
    else:
        mine, exact, plain, scratch, edge = scored(bits, dtype, G, device)
    rms = lambda x: x.square().mean().sqrt().item()  # noqa: E731
    assert rms(mine - exact) <= max(2 * rms(plain - exact), 2e-6 * rms(exact))
    high, total, weighted, mean, spread = (scratch.stats[i][0].view(*mine.shape[:2], -1).double() for i in range(5))
    for chunk in range(-(-edge // kernels.Scratch.CHUNK)):
        first, last = (max(0, min(at, mine.shape[-1])) for at in (chunk * kernels.Scratch.CHUNK - 5, (chunk + 1) * kernels.Scratch.CHUNK - 5))
        x = mine[..., first:last].double() / math.log(2)
        w = (x - high[..., chunk : chunk + 1]).exp2()
        for found, expected in ((high, x.amax(-1)), (total, w.sum(-1)), (weighted, (w * x).sum(-1) / w.sum(-1)), (mean, x.mean(-1)), (spread, (x - x.mean(-1, keepdim=True)).square().sum(-1))):
            torch.testing.assert_close(found[..., chunk], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["spread", "ties", "few", "equal"])
@pytest.mark.parametrize("K", [1, 50])
def test_select(kind, K, device):
    """The K best, ascending, ties to the lowest position, whatever the last step's threshold was; -1 where there are too few."""
    generator = torch.Generator().manual_seed(K)
    N, KV, begin = 4096 if device == "cpu" else 131072, 3, 64
    value = torch.rand(KV, N, generator=generator) ** 9
    value = {"spread": value, "ties": (value * 20).round() / 20, "few": value, "equal": torch.full_like(value, 0.25)}[kind]
    key = value.view(torch.int32).clone()  # of numbers that are not negative, the order is that of their bits
    if kind == "few":
        key[:, 37:] = -(2**31) + 1
    scratch = kernels.Scratch((1, KV), 1, N, K, 4, torch.device(device))
    scratch.importance.copy_(key[None])
    scratch.peaks.copy_(key.view(KV, -1, scratch.peak).amax(-1)[None])
    expected = select_tokens(value[:, : 37 if kind == "few" else N], K) + begin
    for guess in (0, 1, 0x3E800000, 0x7F000000, -5):
        held = torch.full((1, KV), guess, dtype=torch.int32, device=device)
        chosen = torch.empty(1, KV, K, dtype=torch.int32, device=device)
        kernels.select(scratch, begin, chosen, held, torch.tensor([N], device=device), 0, 0)
        count = expected.shape[-1]
        assert torch.equal(chosen[0, :, :count].cpu().long(), expected) and (chosen[..., count:] == -1).all(), guess
        if count == K:
            assert torch.equal((key >= held[0].cpu()[:, None]).sum(-1) >= K, torch.ones(KV, dtype=torch.bool))


# ------------------------------------------------------------------------------------------- the sparse layer as a whole


DRIVEN = {}


def drive(device, setting, plan=(0,), **shape):
    """What `driven` returns, made once for several tests: read only."""
    key = (device, setting, plan, *sorted(shape.items()), kernels.FORCE)
    if key not in DRIVEN:
        DRIVEN[key] = driven(device, setting, plan, **shape)
    return DRIVEN[key]


def driven(device, setting, plan, **shape):
    """Outputs of a prompt, decode steps, a crop, a turn and more steps across a block's edge; and the state at the end. Fewer of all in the interpreter."""
    n, steps, calls = (300, 8, [("turn", 90), ("decode", 3), ("crop", 320), ("decode", 66)]) if device == "cuda" else (182, 2, [("crop", 183), ("turn", 6), ("decode", 2)])
    driver = Driver(n=1400, **({} if device == "cuda" else {"L": 2, "KV": 1}) | shape)
    driver.q, driver.k, driver.v = (x.to(device) for x in (driver.q, driver.k, driver.v))
    with TailorCache(driver.config, plan, setting, device=device) as cache:
        out = [driver.call(cache, n)] + [driver.call(cache, 1, decode=True) for _ in range(steps)]
        for kind, number in calls:
            if kind == "crop":
                cache.crop(number)
            else:
                out += [driver.call(cache, number)] if kind == "turn" else [driver.call(cache, 1, decode=True) for _ in range(number)]
        held = {name: tensor.cpu() for name, tensor in state(cache).items()}
        return [x.float().cpu() for x in out], held, isinstance(cache.prefetcher, ZeroCopy)


SETTINGS = [
    ({}, {}),
    ({"row_bits": 4, "tail": True, "tilt": True, "aggregation": "mean"}, {"G": 3, "D": 40}),
    (BEST, {"G": 4, "D": 80, "KV": 1}),
    ({"row_bits": 2, "tail": True, "topk": 300, "dense_below": 200}, {"G": 1, "D": 64}),  # fewer candidates than topk
    ({"row_bits": 8, "sink": 70, "recent": 3, "tail": True, "tilt": True, "aggregation": "mean"}, {"G": 8, "D": 16}),
    ({"sink": 0, "recent": 64, "topk": 17, "channels": 40}, {"G": 2, "D": 40}),
    ({"row_bits": 4, "sink": 70, "tail": True, "tilt": True, "aggregation": "all"}, {"G": 3, "D": 40}),
    ({"row_bits": 4, "tail": True, "tilt": True, "aggregation": "all", "topk": 50, "dense_below": 130, "left": 0.2, "least": 3}, {"G": 4, "D": 64}),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("setting, shape", SETTINGS)
def test_kernels_equal_plain_pytorch(device, setting, shape, monkeypatch):
    """The same outputs within rounding, and the same bytes in both tiers but for the moments, whether kernels or plain PyTorch do the work."""
    ours, held, _ = drive(device, options(prefetch="uva", **setting), **shape)
    monkeypatch.setattr(kernels, "FORCE", False)
    plain, expected, _ = drive(device, options(prefetch="thread", **setting), **shape)
    for i, (a, b) in enumerate(zip(ours, plain)):
        assert (a - b).abs().max() < 1e-3, i
    held, expected = dict(held), dict(expected)
    for name in [name for name in held if name.endswith("moments")]:  # products from tensor cores; test_kernels_prefill.py has the bound
        assert (held.pop(name) - expected.pop(name)).abs().max() < 1e-3
    same(held, expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("setting, shape", SETTINGS[1:3])
def test_prefetchers_agree_bit_for_bit(device, setting, shape):
    """Thread or zero copy, rows resident or not: where the bytes come from must not show in a single bit."""
    reference, held, zero_copy = drive(device, options(prefetch="thread", **setting), **shape)
    assert not zero_copy
    channels = options(**setting).channels
    for resident in (0, channels, channels + 5, 10**4) if device == "cuda" else (0, channels + 5):
        setting_here = options(prefetch="uva", resident=resident, **setting)
        outputs, mine, zero_copy = drive(device, setting_here, **shape)
        assert zero_copy
        if resident < 10**4:  # there the true query chooses the channels
            for i, (a, b) in enumerate(zip(outputs, reference)):
                assert torch.equal(a, b), (resident, i)
        same(mine, held)


@pytest.mark.parametrize("device", DEVICES)
def test_all_rows_resident_is_the_true_querys_choice(device, monkeypatch):
    """resident = D on a GPU and on a machine that knows no resident rows: the same channels, since neither predicts them."""
    setting = {"row_bits": 4, "tail": True, "aggregation": "mean", "resident": 40}
    ours, _, _ = drive(device, options(prefetch="uva", **setting), G=2, D=40, plan=())
    monkeypatch.setattr(kernels, "FORCE", False)
    plain, _, _ = drive(device, options(prefetch="thread", **setting), G=2, D=40, plan=())
    for a, b in zip(ours, plain):
        assert (a - b).abs().max() < 1e-3


def test_uva_is_refused_where_it_cannot_be(monkeypatch):
    monkeypatch.setattr(kernels, "FORCE", None)
    with pytest.raises(ValueError, match="prefetch=uva needs a GPU with Triton"):
        TailorCache(Driver().config, (0,), options(prefetch="uva"))
