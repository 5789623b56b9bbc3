# SPDX-License-Identifier: Apache-2.0
"""The Triton kernels against their twins: at tiny odd shapes in Triton's interpreter, and, marked `gpu`, at real ones."""

import math
import weakref

import pytest
import torch

import kernels
import sparse_kernels
from cache import TailorCache, layer_account
from offload import BLOCK, ZeroCopy, decode_rows, encode_rows
from retrieval import approximate_scores, importance, select_tokens
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
        sparse_kernels.choose_channels(q, kmax, authors, **states[0], pos=pos)
        sparse_kernels.choose_channels_twin(q, kmax, authors, **states[1], pos=pos)
        for name, tensor in states[0].items():
            assert tensor is None or torch.equal(tensor, states[1][name]), (step, name)
        if R:
            assert states[0]["missing"].sum() < 2 * 2 * C or step == 0 or R == C


# ---------------------------------------------------------------------------------------------------- scores, selection


def scored(bits, dtype, G, device, N=1984, D=40, KV=2, C=9, sink=5, recent=70):
    """Rows of N positions, a query, and what `sparse_kernels.estimate` makes of them; the scores of all candidates `[KV, G, M]`, exact and by plain matrix products in `dtype`."""
    generator = torch.Generator().manual_seed(bits * 10 + G)
    random = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    keys = (random(1, KV, D, N) * random(1, KV, D, 1) * 2 + random(1, KV, D, 1)).to(dtype)
    planes = [plane.to(device) for plane in encode_rows(keys, bits)]
    # Rows are readable to the end of a chunk; what lies there is anything.
    whole = -(-N // sparse_kernels.CHUNK) * sparse_kernels.CHUNK
    planes = [torch.cat([p, p.new_full((*p.shape[:3], p.shape[3] * (whole - N) // N), 77)], -1) for p in planes]
    index = torch.stack([torch.randperm(D, generator=generator)[:C].sort().values for _ in range(KV)])[None].int().to(device)
    q = random(1, KV * G, 1, D).to(dtype).to(device)
    pos, scale = torch.tensor([N + recent - 8], device=device), D**-0.5
    edge = (int(pos) + 1 - recent) // BLOCK * BLOCK
    scratch = sparse_kernels.Scratch((1, KV), G, whole, 8, torch.device(device))
    for x in (scratch.chooses.scores, scratch.chooses.stats):
        x.fill_(math.nan)
    rows = sparse_kernels.Rows(planes, index, index, bits, 0)
    arguments = (q, rows, pos, scale, sink, recent)
    sparse_kernels.estimate(*arguments, scratch.chooses)
    chosen = [p.gather(2, index.long()[..., None].expand(-1, -1, -1, p.shape[3])) for p in planes]
    held = decode_rows(chosen, bits)[..., sink:edge]
    exact = approximate_scores(q, index.long(), held, scale)[0]
    gathered = q.view(1, KV, G, D).gather(3, index.long().unsqueeze(2).expand(-1, -1, G, -1))
    plain = ((gathered @ held.to(dtype)) * scale)[0].float()
    return arguments, scratch, exact, plain, edge


SCORED = [(4, torch.bfloat16, 4), (4, torch.float16, 1), (4, torch.float32, 3), (2, torch.bfloat16, 3), (2, torch.float16, 8), (8, torch.bfloat16, 2), (16, torch.bfloat16, 4), (16, torch.float32, 8)]
LARGE = {"N": 70016, "D": 128, "KV": 3, "C": 28}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("bits, dtype, G", SCORED)
@pytest.mark.parametrize("all_blocks", [False, True])
def test_scores(monkeypatch, bits, dtype, G, device, all_blocks):
    """No more than twice the error of plain products in the same dtype, in the blocks of the sample; and each chunk's statistics are those of its scores."""
    if all_blocks:
        monkeypatch.setattr(sparse_kernels, "FEWEST", 1100 if device == "cuda" else 30)
    arguments, scratch, exact, plain, edge = scored(bits, dtype, G, device, **(LARGE if device == "cuda" else {}))
    stride, each, chunk, sample = sparse_kernels.stride(edge // BLOCK), 8 if bits <= 4 else 16 // bits, sparse_kernels.CHUNK, scratch.chooses
    assert stride == (1 if all_blocks else 8 if device == "cuda" else 2)
    seen = torch.cat([torch.arange(b * BLOCK, (b + 1) * BLOCK) for b in range(stride // 2, edge // BLOCK, stride)])
    n, low = torch.arange(len(seen)), 5 if stride == 1 else 0  # the sink lies in the first block
    place = (n // chunk * chunk + n % each * (chunk // each) + n % chunk // each).to(device)
    mine = sample.scores[0][..., place].view(*exact.shape[:2], -1)
    assert torch.isneginf(mine[..., :low]).all() and mine[..., low:].isfinite().all()
    mine, exact, plain = mine[..., low:] * math.log(2), *(x[..., seen[low:].to(device) - 5] for x in (exact, plain))
    rms = lambda x: x.square().mean().sqrt().item()  # noqa: E731
    assert rms(mine - exact) <= max(2 * rms(plain - exact), 2e-6 * rms(exact))
    high, total, weighted, mean, spread = (sample.stats[i][0].view(*mine.shape[:2], -1).double() for i in range(5))
    for c in range(-(-len(seen) // chunk)):
        first, last = (max(0, min(at, mine.shape[-1])) for at in (c * chunk - low, (c + 1) * chunk - low))
        x = mine[..., first:last].double() / math.log(2)
        w = (x - high[..., c : c + 1]).exp2()
        for found, expected in ((high, x.amax(-1)), (total, w.sum(-1)), (weighted, (w * x).sum(-1) / w.sum(-1)), (mean, x.mean(-1)), (spread, (x - x.mean(-1, keepdim=True)).square().sum(-1))):
            torch.testing.assert_close(found[..., c], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("bits, dtype, G", SCORED)
@pytest.mark.parametrize("authors", [False, True])
def test_importance(bits, dtype, G, device, authors):
    """Of every candidate, what the twin makes of exact scores and the sample's sums, as close as the scores are; of the peaks, the largest; nothing of what is no candidate."""
    arguments, scratch, exact, plain, edge = scored(bits, dtype, G, device, **(LARGE if device == "cuda" else {}))
    scratch.importance.fill_(7)
    sparse_kernels.weigh(*arguments, scratch, authors)
    key, nothing = scratch.importance[0], -(2**31) + 1
    mine = torch.where(key < 0, key ^ 0x7FFFFFFF, key).view(torch.float32)[:, 5:edge]
    block = torch.arange(5, edge, device=device) // BLOCK
    stride = sparse_kernels.stride(edge // BLOCK)
    some = block % stride == stride // 2
    own = exact[..., some].logsumexp(-1, keepdim=True) + math.log(len(some) / int(some.sum()))
    expected, mass = importance(exact[None], authors, None, own[None])
    error = 3 * (plain - exact).abs().max().item() + 1e-5
    mine = mine * math.log(2) if authors else mine  # there it is the mean score itself
    torch.testing.assert_close(mine, expected[0], rtol=0.0 if authors else 2 * error, atol=error if authors else 0.0)
    assert (key[:, :5] == nothing).all() and (key[:, edge : -(-edge // sparse_kernels.CHUNK) * sparse_kernels.CHUNK] == nothing).all()
    best = key[:, : edge // sparse_kernels.CHUNK * sparse_kernels.CHUNK].unflatten(-1, (-1, scratch.peak)).amax(-1)
    assert torch.equal(scratch.peaks[0, :, : best.shape[1]], best) and (scratch.peaks[0, :, -(-edge // sparse_kernels.CHUNK) * sparse_kernels.CHUNK // scratch.peak :] == nothing).all()
    if not authors:
        torch.testing.assert_close(scratch.mass[0], mass[0, :, 0])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["spread", "ties", "few", "equal"])
@pytest.mark.parametrize("K", [1, 50, 4000])
def test_select(kind, K, device):
    """The K best, ascending, ties to the lowest position, whatever the last step's threshold was; -1 where there are too few."""
    generator = torch.Generator().manual_seed(K)
    N, KV, begin = 4096 if device == "cpu" else 131072, 3, 64
    value = torch.rand(KV, N, generator=generator) ** 9
    value = {"spread": value, "ties": (value * 20).round() / 20, "few": value, "equal": torch.full_like(value, 0.25)}[kind]
    key = value.view(torch.int32).clone()  # of numbers that are not negative, the order is that of their bits
    if kind == "few":
        key[:, 37:] = -(2**31) + 1
    scratch = sparse_kernels.Scratch((1, KV), 1, N, K, torch.device(device))
    scratch.importance.copy_(key[None])
    scratch.peaks.copy_(key.view(KV, -1, scratch.peak).amax(-1)[None])
    expected = select_tokens(value[:, : 37 if kind == "few" else N], K) + begin
    for guess in (0, 1, 0x3E800000, 0x7F000000, -5):
        held = torch.full((1, KV), guess, dtype=torch.int32, device=device)
        chosen = torch.empty(1, KV, K, dtype=torch.int32, device=device)
        sparse_kernels.select(scratch, begin, chosen, held, torch.tensor([N], device=device), 0, 0)
        count = expected.shape[-1]
        assert torch.equal(chosen[0, :, :count].cpu().long(), expected) and (chosen[..., count:] == -1).all(), guess
        if count == K:
            assert torch.equal((key >= held[0].cpu()[:, None]).sum(-1) >= K, torch.ones(KV, dtype=torch.bool))


@pytest.mark.parametrize("device", DEVICES)
def test_nan_is_chosen_and_writes_nowhere_else(device):
    """A score that is no number, from a float16 that overflowed, say: PyTorch takes it for the largest. More of them than are wanted once went past the end."""
    arguments, scratch, _, _, _ = scored(4, torch.bfloat16, 4, device)
    q, rows, pos = arguments[:3]
    q[:, :4] = math.nan  # all queries of the first KV head
    sparse_kernels.weigh(*arguments, scratch, True)
    assert (scratch.importance[0, 0, 5:1900] == 0x7F800000).all() and (scratch.importance[0, 1] < 0x7F800000).all()
    scratch.importance[0, 0, 5:1900] = scratch.peaks[0, 0, : 1900 // scratch.peak] = 0x7FC00000  # the bits themselves: also then
    held = {name: torch.full((2 * 8 + 4096,), 7, dtype=torch.int32, device=device) for name in ("blocks", "chosen")}
    scratch.blocks, chosen = (x[:16].view(1, 2, 8) for x in held.values())
    sparse_kernels.select(scratch, 0, chosen, torch.zeros(1, 2, dtype=torch.int32, device=device), pos, 5, 70)
    assert all((x[16:] == 7).all() for x in held.values()) and chosen[0, 0].tolist() == list(range(5, 13))


# ------------------------------------------------------------------------------------------- the sparse layer as a whole


DRIVEN = {}


def drive(device, setting, plan=(0,), **shape):
    """What `driven` returns, made once for several tests: read only."""
    key = (device, setting, plan, *sorted(shape.items()), kernels.FORCE, sparse_kernels.FEWEST)
    if key not in DRIVEN:
        DRIVEN[key] = driven(device, setting, plan, **shape)
    return DRIVEN[key]


def driven(device, setting, plan, **shape):
    """Outputs of a prompt, decode steps, a crop, a turn and more steps across a block's edge; and the state at the end. Fewer of all in the interpreter."""
    n, steps, calls = (300, 8, [("turn", 90), ("decode", 3), ("crop", 320), ("decode", 66)]) if device == "cuda" else (182, 2, [("crop", 183), ("turn", 6), ("decode", 2)])
    early = shape.pop("early", False)
    driver = Driver(n=1400, **({} if device == "cuda" else {"L": 2, "KV": 1}) | shape)
    driver.early = early
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
    ({"row_bits": 4, "sink": 70, "tail": True, "tilt": True, "aggregation": "all", "ahead": True}, {"G": 3, "D": 40}),
    ({"row_bits": 4, "tail": True, "tilt": True, "aggregation": "all", "topk": 50, "dense_below": 130, "left": 0.2, "least": 3}, {"G": 4, "D": 64}),
    ({"row_bits": 4, "aggregation": "all", "topk": 50, "dense_below": 130, "left": 0.2, "ahead": True}, {"G": 2, "D": 64}),
    ({"ahead": True}, {"G": 4, "D": 40}),  # the authors' choice, without a tail
    ({**BEST, "token_bits": 8}, {"G": 2, "D": 40}),
    ({"token_bits": 8}, {"G": 2, "D": 16}),
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
    for name in [name for name in held if name.endswith("moments")]:  # products from tensor cores; test_sparse_kernels_prefill.py has the bound
        assert (held.pop(name) - expected.pop(name)).abs().max() < 1e-3
    same(held, expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("setting, shape", [SETTINGS[1], SETTINGS[2], SETTINGS[6], SETTINGS[7], SETTINGS[8]])
def test_kernels_equal_plain_pytorch_with_samples(device, setting, shape, monkeypatch):
    """The same where a sample is not all there is: one block in two or four, which long texts alone would need."""
    monkeypatch.setattr(sparse_kernels, "FEWEST", 1)
    test_kernels_equal_plain_pytorch(device, setting, shape, monkeypatch)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("setting, shape", [*SETTINGS[1:3], *SETTINGS[-2:]])
def test_prefetchers_agree_bit_for_bit(device, setting, shape):
    """Thread or zero copy, rows resident or not: where the bytes come from must not show in a single bit."""
    reference, held, zero_copy = drive(device, options(prefetch="thread", **setting), **shape)
    assert not zero_copy
    channels = options(**setting).channels
    for resident in (0, channels, channels + 5, 10**4) if device == "cuda" else (0, channels + 5):
        setting_here = options(prefetch="uva", resident=resident, **setting)
        outputs, mine, zero_copy = drive(device, setting_here, **shape)
        assert zero_copy
        if resident < 10**4 or setting.get("ahead"):  # else the true query chooses the channels there
            for i, (a, b) in enumerate(zip(outputs, reference)):
                assert torch.equal(a, b), (resident, i)
        same(mine, held)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("prefetch", ["thread", "uva"])
def test_a_query_may_be_foreseen_early(device, prefetch):
    """A decoder that predicts all queries before the layer before attends, as it must without `ahead`: tokens then come into one buffer while those of the layer before are read from another."""
    setting, shape = options(prefetch=prefetch, **BEST), {"L": 3, "KV": 1, "G": 2, "D": 16}
    for a, b in zip(drive(device, setting, **shape)[0], drive(device, setting, early=True, **shape)[0], strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("device", DEVICES)
def test_all_rows_resident_is_the_true_querys_choice(device, monkeypatch):
    """resident = D on a GPU and on a machine that knows no resident rows: the same channels, since neither predicts them."""
    setting = {"row_bits": 4, "tail": True, "aggregation": "mean", "resident": 40}
    ours, _, _ = drive(device, options(prefetch="uva", **setting), G=2, D=40, plan=())
    monkeypatch.setattr(kernels, "FORCE", False)
    plain, _, _ = drive(device, options(prefetch="thread", **setting), G=2, D=40, plan=())
    for a, b in zip(ours, plain):
        assert (a - b).abs().max() < 1e-3


def test_a_foreseen_query_may_be_a_view():
    """The kernels read a query's memory as it lies. And fetched tokens are in the account."""
    outs = []
    for view in (False, True):
        driver = Driver(n=200, L=2, KV=1)
        with TailorCache(driver.config, (0,), options(prefetch="uva", **BEST), device="cpu") as cache:
            foresee = cache.foresee
            cache.foresee = lambda layer, q: foresee(layer, torch.cat((q, q), 3)[..., : q.shape[3]] if view else q)
            driver.call(cache, 182)
            outs.append(driver.call(cache, 1, decode=True))
            assert cache.nbytes()["gpu"]["fetched tokens"] == layer_account(cache.options, False, 1, 16, 183, itemsize=4)["fetched"] == 40 * 2 * 16 * 4
    assert torch.equal(*outs)


@pytest.mark.parametrize("ahead", [False, True])
def test_a_foreseen_query_lives_until_its_layer_has_attended(ahead):
    """Another stream reads it: freed, its memory would go to what the decoder computes next. On an H200 the next layer then chose channels by another layer's query."""
    driver, alive = Driver(n=200, L=2, KV=1), []
    with TailorCache(driver.config, (0,), options(prefetch="uva", ahead=ahead), device="cpu") as cache:
        driver.call(cache, 182)
        foresee, attend = cache.foresee, cache.attend

        def noted(layer, q):
            alive.append(weakref.ref(q))
            foresee(layer, q)

        def asked(layer, *arguments):
            if layer == 1:
                assert alive[-1]() is not None
            return attend(layer, *arguments)

        cache.foresee, cache.attend = noted, asked
        driver.call(cache, 1, decode=True)
        driver.call(cache, 1, decode=True)
    assert len(alive) == 2 and not any(ref() is not None for ref in alive)


def test_uva_is_refused_where_it_cannot_be(monkeypatch):
    monkeypatch.setattr(kernels, "FORCE", None)
    with pytest.raises(ValueError, match="prefetch=uva needs a GPU with Triton"):
        TailorCache(Driver().config, (0,), options(prefetch="uva"))
