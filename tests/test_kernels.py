# SPDX-License-Identifier: Apache-2.0
"""The Triton kernels against their twins: at tiny odd shapes in Triton's interpreter, and, marked `gpu`, at real ones."""

import pytest
import torch

import kernels
from cache import TailorCache
from offload import ZeroCopy
from test_tailor import BEST, Driver, options, same, state

DEVICES = [pytest.param("cpu"), pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(autouse=True)
def everywhere(monkeypatch):
    """Kernels run on CPU tensors too, and memory that nobody wrote holds NaN."""
    monkeypatch.setattr(kernels, "FORCE", True)
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


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
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("setting, shape", SETTINGS)
def test_kernels_equal_plain_pytorch(device, setting, shape, monkeypatch):
    """The same outputs within rounding, and the same bytes in both tiers, whether kernels or plain PyTorch do the work."""
    ours, held, _ = drive(device, options(prefetch="uva", **setting), **shape)
    monkeypatch.setattr(kernels, "FORCE", False)
    plain, expected, _ = drive(device, options(prefetch="thread", **setting), **shape)
    for i, (a, b) in enumerate(zip(ours, plain)):
        assert (a - b).abs().max() < 1e-3, i
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
