# SPDX-License-Identifier: Apache-2.0
"""TailorCache: the invariants of the design, on random tiny models and on random q, k, v given to the cache directly."""

import dataclasses
import gc
import json
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file

import offload
from attention import causal_attention
from cache import FullCache, TailorCache, TailorConfig, load_cache, make_cache
from model import Llama, ModelConfig
from offload import BLOCK
from quant import QuantLayer, decode_shared, encode_shared
from retrieval import approximate_scores, critical_channels, importance, moments_of, needed, select_tokens, tail_shift


def options(**values) -> TailorConfig:
    """Small enough that a few hundred tokens exercise everything."""
    return TailorConfig.build(**{"preset": "longbench", "sink": 8, "recent": 56, "topk": 40, "channels": 6} | values)


PHASES = (Phase.explicit, Phase.reuse, Phase.generate)  # shrinking a failure takes many times as long as finding it

BEST = {"k_levels": "lloyd", "correct": True, "centre": 200, "row_bits": 4, "tail": True, "tilt": True, "aggregation": "mean", "norm": "own", "ahead": True}


def tiny(G=3, D=64, L=4, seed=0) -> Llama:
    raw = {
        "model_type": "llama", "vocab_size": 97, "hidden_size": 40, "intermediate_size": 56, "num_hidden_layers": L,
        "num_attention_heads": 2 * G, "num_key_value_heads": 2, "head_dim": D, "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
    }  # fmt: skip
    model = Llama.from_config(ModelConfig.from_dict(raw), seed=seed)
    for name, parameter in model.named_parameters():
        if "norm" not in name:
            parameter.data.mul_(8)  # logits that differ from token to token
    return model


def tokens(n, seed=1, B=1):
    return torch.randint(0, 97, (B, n), generator=torch.Generator().manual_seed(seed))


def teacher_forced(model, cache, ids, prompt):
    """Logits after the prompt and after each further token, `[B, n, vocab]`."""
    out = [model.prefill(ids[:, :prompt], cache)]
    out += [model.decode(ids[:, i : i + 1], cache) for i in range(prompt, ids.shape[1])]
    return torch.stack(out, 1)


class Driver:
    """Gives a cache the q, k, v of fixed random sequences, so that layers do not depend on each other's outputs."""

    def __init__(self, L=3, KV=2, G=2, D=16, n=700, seed=0, dtype=torch.float32):
        generator = torch.Generator().manual_seed(seed)
        self.L = L
        self.q = torch.randn(L, 1, KV * G, n, D, generator=generator, dtype=dtype)
        self.k = torch.randn(L, 1, KV, n, D, generator=generator, dtype=dtype) * torch.rand(L, 1, KV, 1, D, generator=generator).mul(3).to(dtype)
        self.v = torch.randn(L, 1, KV, n, D, generator=generator, dtype=dtype)
        self.config = SimpleNamespace(num_hidden_layers=L, num_key_value_heads=KV, head_dim=D)
        self.drift, self.early = 0.3, False  # of predicted queries: how far they are from the true ones, and whether they always come before the layer before

    def foresee(self, cache, layer, start):
        """A query near the true one, as another layer's is."""
        q = self.q[layer][:, :, start : start + 1]
        cache.foresee(layer, q + self.drift * self.q[layer - 1][:, :, start : start + 1])

    def call(self, cache, T, decode=False, chunk=10**9, stop_at=None):
        """One call of T tokens; outputs per layer. `stop_at=(layer, chunks)`: give up after so many chunks of that layer."""
        start, outputs = cache.length, []
        cache.begin(T, decode)
        for layer in range(self.L):
            wanted = decode and layer + 1 < self.L and cache.wants(layer + 1)
            if wanted and (self.early or cache.predicts_from == "input"):
                self.foresee(cache, layer + 1, start)
            parts = []
            for i, at in enumerate(range(start, start + T, chunk)):
                if stop_at == (layer, i):
                    return None
                part = slice(at, min(at + chunk, start + T))
                parts.append(cache.attend(layer, *(x[layer][:, :, part] for x in (self.q, self.k, self.v))))
            outputs.append(torch.cat(parts, 2))
            if wanted and not self.early and cache.predicts_from == "middle":
                self.foresee(cache, layer + 1, start)
        cache.pos += T
        if stop_at == (self.L, 0):
            return None
        cache.end()
        return torch.stack(outputs)


def state(cache):
    """Everything a cache holds, derived rows included, in a form that can be compared bit for bit."""
    if cache._pending:
        cache.crop(cache.length)  # as save() does: what an unfinished call has written is not content
    held = {name: tensor.clone() for name, tensor in cache._tensors().items() if tensor.numel()}
    if isinstance(cache, TailorCache) and cache.dense is None:
        for number, layer in enumerate(cache.layers):
            if not isinstance(layer, QuantLayer):
                held[f"{number}.maxima"] = layer.kmax.clone()
                if layer.tail:
                    held[f"{number}.sum"] = layer.vsum.float()
                for i, (slab, first, last) in enumerate(layer.store.parts(0, layer.edge(cache.length))):
                    for j, plane in enumerate(slab.rows):
                        each = plane.shape[3] * BLOCK // slab.size
                        held[f"{number}.rows{j}.{i}"] = plane[..., first // BLOCK * each : last // BLOCK * each].clone()
                    held[f"{number}.vsum.{i}"] = slab.vsum[:, :, first // BLOCK : last // BLOCK].clone()
                    held[f"{number}.kmax.{i}"] = slab.kmax[:, :, first // BLOCK : last // BLOCK].clone()
    # Slabs are cut where calls ended; what counts is their content.
    joined = {}
    for name in sorted(held, key=lambda name: (name.rsplit(".", 1)[0], len(name), name)):
        stem = name.rsplit(".", 1)[0] if any(mark in name for mark in (".host.", ".rows", ".kmax.", ".vsum.")) else name
        dim = 3 if ".rows" in name else 2
        joined[stem] = torch.cat((joined[stem], held[name]), dim) if stem in joined else held[name]
    return joined | {"length": torch.tensor(cache.length), "pos": cache.pos.clone()}


def same(a, b):
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].shape == b[name].shape, name
        assert torch.equal(a[name], b[name]), name


# ------------------------------------------------------------------------------------------------------ equality with full


@pytest.mark.parametrize("G, D, prompt", [(1, 64, 1), (3, 80, 103), (4, 96, 104), (8, 128, 60), (3, 64, 103)])
def test_short_sequences_are_bitwise_the_full_cache(G, D, prompt):
    """Sparsity that sets in below the budget changes short answers for nothing."""
    model, ids = tiny(G, D), tokens(104)
    full = teacher_forced(model, FullCache(model.config), ids, prompt)
    with TailorCache(model.config, (0, 3), options()) as cache:
        assert torch.equal(teacher_forced(model, cache, ids, prompt), full)
        assert cache.options.dense == 104 and cache.dense is not None


@pytest.mark.parametrize("prompt", [1, 103, 104, 105, 127, 128, 129, 300])
@pytest.mark.parametrize("G, D", [(1, 80), (3, 64)])
def test_fetching_every_candidate_is_exact(G, D, prompt):
    """A token lost or attended twice between sink, candidates and window shows as a difference from dense attention."""
    aggregation = ("mean", "authors")[(prompt + G // 3) % 2]  # each with both shapes, and with prompts on both sides of an edge
    model, ids = tiny(G, D), tokens(max(260, prompt + 20))  # blocks leave the window at 120, 184, 248 and 312
    full = teacher_forced(model, FullCache(model.config), ids, prompt)
    with TailorCache(model.config, (), options(topk=4000, dense_below=60, aggregation=aggregation)) as cache:
        assert (teacher_forced(model, cache, ids, prompt) - full).abs().max() < 2e-4


@pytest.mark.parametrize("quantised", [(0,), (1,), (0, 3), (0, 1, 2, 3)])
def test_eight_bit_layers_stay_close(quantised):
    """A scale or a block applied to the wrong tokens is far off even at 8 bits."""
    model, ids = tiny(4, 96), tokens(420)
    full = teacher_forced(model, FullCache(model.config), ids, 250)
    with TailorCache(model.config, quantised, options(topk=4000, bits=8, dense_below=0)) as cache:
        got = teacher_forced(model, cache, ids, 250)
    assert (got - full).abs().max() < 0.02 * full.abs().max()


@pytest.mark.parametrize("aggregation", ["mean", "authors"])
def test_all_channels_choose_the_exact_top_k(aggregation):
    """With C = D the approximate scores are the exact ones, so the choice must be theirs, at any step and slab."""
    driver = Driver(L=2)
    with TailorCache(driver.config, (), options(channels=16, aggregation=aggregation, dense_below=0)) as cache:
        driver.call(cache, 333, chunk=50)
        for n in range(334, 520):
            driver.call(cache, 1, decode=True)
            for number, layer in enumerate(cache.layers):
                q = driver.q[number][:, :, n - 1 : n].reshape(1, 2, 2, 16)
                start, stop = 8, layer.edge(n)
                q = q.mean(2, keepdim=True) if aggregation == "authors" else q
                exact = q @ driver.k[number][:, :, start:stop].transpose(-1, -2) / 4
                exact = exact.squeeze(2) if aggregation == "authors" else exact.softmax(-1).mean(2)
                assert set(layer.chosen[0, 0].tolist()) == set((exact[0, 0].topk(40).indices + start).tolist())
                assert set(layer.chosen[0, 1].tolist()) == set((exact[0, 1].topk(40).indices + start).tolist())


def test_exactly_sink_window_and_k_tokens_are_attended():
    """A budget that is quietly exceeded makes every comparison unfair."""
    driver = Driver(L=1)
    with TailorCache(driver.config, (), options(dense_below=0)) as cache:
        driver.call(cache, 300)
        for n in range(301, 460):
            o = driver.call(cache, 1, decode=True)[0]
            layer = cache.layers[0]
            stop = layer.edge(n)
            assert 56 <= n - stop <= 56 + 63 and stop % 64 == 0
            assert layer.chosen.shape == (1, 2, 40) and (layer.chosen.diff(dim=-1) > 0).all()
            assert layer.chosen.min() >= 8 and layer.chosen.max() < stop
            for h in range(2):
                seen = torch.cat((torch.arange(8), layer.chosen[0, h], torch.arange(stop, n)))
                k, v = driver.k[0][:, h : h + 1, seen], driver.v[0][:, h : h + 1, seen]
                q = driver.q[0][:, 2 * h : 2 * h + 2, n - 1 : n]
                expected = (q @ k.transpose(-1, -2) / 4).softmax(-1) @ v
                assert torch.allclose(o[:, 2 * h : 2 * h + 2], expected, atol=1e-5)


# --------------------------------------------------------------------------------------------- layout and how calls are split


@settings(max_examples=25, suppress_health_check=list(HealthCheck), phases=PHASES)
@given(st.data())
def test_layout_does_not_depend_on_how_tokens_came(data):
    """Codes, host rows, maxima and window are functions of the positions: prompt, turns, decode steps and chunks leave the same bytes."""
    driver = Driver()
    n = data.draw(st.sampled_from([100, 104, 105, 128, 191, 192, 193, 256, 257, 449, 450]) | st.integers(1, 450))
    better = data.draw(st.sampled_from([{}, BEST, {**BEST, "row_bits": 2, "v_levels": "lloyd"}, {**BEST, "token_bits": 8}]))
    setting = options(bits=data.draw(st.sampled_from([1, 2, 4])), dense_below=data.draw(st.sampled_from([0, 64, 104])), **better)
    plan = data.draw(st.sampled_from([(), (0,), (1,), (0, 2), (0, 1, 2)]))
    with TailorCache(driver.config, plan, setting) as once, TailorCache(driver.config, plan, setting) as split:
        driver.call(once, n)
        while split.length < n:
            left = n - split.length
            if data.draw(st.booleans()):
                for _ in range(min(left, data.draw(st.integers(1, 70)))):
                    driver.call(split, 1, decode=True)
            else:
                T = data.draw(st.integers(1, left))
                driver.call(split, T, chunk=data.draw(st.sampled_from([1000, 64, 37])))
        same(state(once), state(split))


@pytest.mark.parametrize("turn", [1, 5, 64, 200])
@pytest.mark.parametrize("first", [90, 104, 191, 320])
def test_later_turns_attend_exactly_to_everything_on_sparse_layers(first, turn):
    """A turn that sees only window and sink answers without its document."""
    driver = Driver()
    with TailorCache(driver.config, (1,), options()) as cache:
        driver.call(cache, first, chunk=77)
        for _ in range(70):
            driver.call(cache, 1, decode=True)
        n = cache.length
        o = driver.call(cache, turn, chunk=50)
        for layer in (0, 2):
            for at in range(n, n + turn, 50):
                stop = min(at + 50, n + turn)
                expected = causal_attention(driver.q[layer][:, :, at:stop], driver.k[layer][:, :, :stop], driver.v[layer][:, :, :stop])
                assert torch.equal(o[layer][:, :, at - n : stop - n], expected)


def test_whole_model_prefill_is_the_full_caches_at_any_chunk(monkeypatch):
    """Chunks that see too little of their own call, or a scratch buffer handed on too early, change the logits."""
    model, ids = tiny(), tokens(700)
    full = model.prefill(ids, FullCache(model.config))
    for chunk in (13, 64, 256, 5000):
        monkeypatch.setattr(Llama, "chunk", chunk)
        with TailorCache(model.config, (0,), options()) as cache:
            assert (model.prefill(ids, cache) - full).abs().max() < 1e-4


def test_results_do_not_depend_on_capacity():
    """A greedy answer that changes with max_new_tokens: buffers' sizes must not reach the arithmetic."""
    driver, outputs = Driver(), []
    for capacity in (0, 350, 1000):
        with TailorCache(driver.config, (0,), options(), capacity=capacity) as cache:
            driver.call(cache, 300)
            outputs.append(torch.cat([driver.call(cache, 1, decode=True) for _ in range(150)], 3))
    assert torch.equal(outputs[0], outputs[1]) and torch.equal(outputs[0], outputs[2])


# ----------------------------------------------------------------------------------------------- interrupts, crop, save, load


@settings(max_examples=30, suppress_health_check=list(HealthCheck), phases=PHASES)
@given(st.data())
def test_an_interrupted_call_has_not_happened(data):
    """Ctrl-C in any layer, chunk or step: the cache goes on from where the call began, to the same bytes and outputs."""
    driver = Driver()
    better = data.draw(st.sampled_from([{}, BEST, {**BEST, "token_bits": 8}]))
    setting, plan = options(dense_below=data.draw(st.sampled_from([0, 104])), **better), data.draw(st.sampled_from([(), (0,), (0, 2)]))
    with TailorCache(driver.config, plan, setting) as cache, TailorCache(driver.config, plan, setting) as twin:
        first = data.draw(st.integers(1, 300))
        for one in (cache, twin):
            driver.call(one, first)
        for _ in range(data.draw(st.integers(1, 4))):
            for _ in range(data.draw(st.integers(0, 66))):
                assert torch.equal(driver.call(cache, 1, decode=True), driver.call(twin, 1, decode=True))
            before = state(cache)
            if data.draw(st.booleans()):
                driver.call(cache, 1, decode=True, stop_at=(data.draw(st.integers(0, 3)), 0))
            else:
                driver.call(cache, data.draw(st.integers(1, 130)), chunk=40, stop_at=(data.draw(st.integers(0, 3)), 0))
            if data.draw(st.booleans()):
                cache.crop(cache.length)
                same(state(cache), before)
        T = data.draw(st.integers(1, 80))
        assert torch.equal(driver.call(cache, T), driver.call(twin, T))
        same(state(cache), state(twin))


@settings(max_examples=30, suppress_health_check=list(HealthCheck), phases=PHASES)
@given(n=st.integers(1, 460), back=st.integers(0, 300), decoded=st.integers(0, 80), plan=st.sampled_from([(), (0,), (0, 2)]), better=st.sampled_from([{}, BEST]))
def test_crop_leaves_what_a_shorter_prompt_would(n, back, decoded, plan, better):
    """Maxima that keep a forgotten token's outlier, or a window that lost its older half, change the next answer."""
    driver = Driver()
    setting = options(**better)
    with TailorCache(driver.config, plan, setting) as cache, TailorCache(driver.config, plan, setting) as fresh:
        driver.call(cache, n)
        for _ in range(decoded):
            driver.call(cache, 1, decode=True)
        keep = max(0, cache.length - min(back, QuantLayer.SLACK if plan else back))
        if plan and cache.length > setting.dense >= keep or plan and cache.length > setting.centre >= keep:
            keep = cache.length  # 16 bits that became codes do not come back
        cache.crop(keep)
        if keep:
            driver.call(fresh, keep)
        same(state(cache), state(fresh))
        assert torch.equal(driver.call(cache, 1, decode=True), driver.call(fresh, 1, decode=True))


@settings(max_examples=30, suppress_health_check=list(HealthCheck), phases=PHASES)
@given(n=st.integers(105, 460), decoded=st.integers(0, 150), between=st.integers(0, 150), interrupted=st.booleans(), sink=st.sampled_from([8, 70]))
def test_crop_of_8_bit_tokens(n, decoded, between, interrupted, sink):
    """What had left the window comes back rounded, and nothing else is changed: by the positions alone, whatever else had happened."""
    driver, setting = Driver(), options(**BEST, token_bits=8, sink=sink, dense_below=104)
    with TailorCache(driver.config, (), setting) as cache, TailorCache(driver.config, (), setting) as fresh:
        driver.call(cache, n)
        for _ in range(decoded):
            driver.call(cache, 1, decode=True)
        if interrupted:
            driver.call(cache, 1, decode=True, stop_at=(1, 0))
        cache.crop(n + min(between, decoded))
        cache.crop(n)
        driver.call(fresh, n)
        held, expected, layer = state(cache), state(fresh), cache.layers[0]
        count = max(0, min(layer.edge(n + decoded), n) - layer.edge(n))  # tokens of the window that had left it
        for name in [name for name in held if name.endswith(("tail.k", "tail.v"))]:
            mine, exact = held.pop(name), expected.pop(name)
            assert torch.equal(mine[:, :, :count], decode_shared(*encode_shared(exact[:, :, :count]), torch.float32)) and torch.equal(mine[:, :, count:], exact[:, :, count:])
        same(held, expected)


def test_the_sink_stays_exact_in_8_bits():
    """The GPU has it in 16, and its keys are outliers: a later turn must not read them rounded, nor must they come back so by way of the dense start."""
    driver, setting = Driver(), options(**BEST, token_bits=8)
    with TailorCache(driver.config, (), setting) as cache, TailorCache(driver.config, (), setting) as fresh:
        driver.call(cache, 300)
        K, V = (x[0][:, :, :300].new_empty(1, 2, 300, 16) for x in (driver.k, driver.v))
        cache.layers[0].history(K, V, 300)
        for x, exact in ((K, driver.k[0]), (V, driver.v[0])):
            assert torch.equal(x[:, :, :8], exact[:, :, :8]) and torch.equal(x[:, :, 192:], exact[:, :, 192:300]) and not torch.equal(x[:, :, 8:192], exact[:, :, 8:192])
        cache.crop(100)
        driver.call(cache, 200)
        driver.call(fresh, 300)
        same(state(cache), state(fresh))


@pytest.mark.parametrize("plan", [(), (0,)])
def test_8_bits_a_token_are_nearly_16(plan):
    """Half the host's memory, for an error that attention to rounded tokens explains, and none of window and sink."""
    driver, outputs = Driver(dtype=torch.float32), []
    for bits in (16, 8):
        with TailorCache(driver.config, plan, options(**BEST, token_bits=bits, topk=400, dense_below=0)) as cache:  # all are fetched: nothing to choose otherwise
            driver.call(cache, 300)
            outputs.append(torch.cat([driver.call(cache, 1, decode=True) for _ in range(20)], 3))
    error = (outputs[0] - outputs[1]).norm() / outputs[0].norm()
    assert 0 < error < 0.02


def test_crop_beyond_the_slack_takes_codes():
    """Far back the tail exists only as codes: it must come from them, and not from another token's slot."""
    driver = Driver()
    with TailorCache(driver.config, (0, 1, 2), options(bits=8)) as cache, TailorCache(driver.config, (0, 1, 2), options(bits=8)) as fresh:
        driver.call(cache, 690)
        cache.crop(250)
        driver.call(fresh, 250)
        got, expected = driver.call(cache, 1, decode=True), driver.call(fresh, 1, decode=True)
        assert (got - expected).abs().max() < 0.05


@pytest.mark.parametrize("better", [{}, BEST])
@pytest.mark.parametrize("n, decoded", [(50, 3), (300, 0), (300, 90), (104, 1), (150, 0)])
def test_a_saved_cache_goes_on_elsewhere(tmp_path, n, decoded, better):
    """A document's prefill is worth saving only if the loaded cache gives the same next tokens, bit for bit."""
    driver = Driver()
    with TailorCache(driver.config, (0,), options(bits=2, **better)) as cache:
        driver.call(cache, n)
        for _ in range(decoded):
            driver.call(cache, 1, decode=True)
        cache.save(tmp_path / "c", {"ids": torch.arange(n)}, {"note": "é"})
        other, extra, meta = load_cache(tmp_path / "c", driver.config)
        with other:
            same(state(cache), state(other))
            assert torch.equal(extra["ids"], torch.arange(n)) and meta == {"note": "é"}
            assert other.options == cache.options and other.quantised == (0,)
            for _ in range(80):
                assert torch.equal(driver.call(cache, 1, decode=True), driver.call(other, 1, decode=True))
            assert torch.equal(driver.call(cache, 33), driver.call(other, 33))


def test_load_refuses_another_plan_and_other_options(tmp_path):
    """Codes read as rows of another layout give fluent nonsense."""
    driver = Driver()
    with TailorCache(driver.config, (0,), options()) as cache:
        driver.call(cache, 300)
        cache.save(tmp_path / "c")
    for plan, setting in (((1,), options()), ((0,), options(bits=2))):
        with TailorCache(driver.config, plan, setting) as other, pytest.raises(ValueError, match="quantised|options"):
            other.load(tmp_path / "c")
    with pytest.raises(ValueError, match="layers"):
        load_cache(tmp_path / "c", SimpleNamespace(num_hidden_layers=5))


def test_load_reads_files_from_before_there_was_a_choice(tmp_path):
    """Of when tokens are fetched, and in how many bits: their options lack the words; what they hold means the same."""
    driver = Driver()
    with TailorCache(driver.config, (0,), options()) as cache:
        driver.call(cache, 300)
        cache.save(tmp_path / "new")
        with safe_open(tmp_path / "new", "pt") as file:
            about = json.loads(file.metadata()["about"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}
        assert about["options"].pop("ahead") is False and about["options"].pop("token_bits") == 16
        save_file(tensors, tmp_path / "old", metadata={"about": json.dumps(about)})
        other, _, _ = load_cache(tmp_path / "old", driver.config)
        with other:
            assert other.options == cache.options
            assert torch.equal(driver.call(cache, 1, decode=True), driver.call(other, 1, decode=True))


def test_the_newest_token_is_always_attended():
    with pytest.raises(ValueError, match="recent is 0; it must be between 1 and"):
        options(recent=0)
    with pytest.raises(ValueError, match="residual is 0; it must be between 1 and"):  # a block would be coded before its last token is there
        options(residual=0)


# ------------------------------------------------------------------------------------------------------------------- memory


@pytest.mark.parametrize("plan, n, decoded", [((0,), 300, 5), ((0, 2), 640, 0), ((), 449, 70), ((0, 1, 2), 500, 3), ((1,), 80, 2)])
@pytest.mark.parametrize("bits, D, B, better", [(1, 16, 1, {}), (2, 80, 1, BEST), (4, 96, 2, {"row_bits": 8}), (1, 64, 1, {"tail": True, "correct": True}), (2, 80, 1, {**BEST, "token_bits": 8})])
def test_nbytes_is_the_account(plan, n, decoded, bits, D, B, better):
    """A part that nobody counted is how a compressed cache ends up larger than the one it replaces."""
    L, KV, item = 3, 2, 2
    config = SimpleNamespace(num_hidden_layers=L)
    setting = options(bits=bits, **better)
    with TailorCache(config, plan, setting) as cache:
        generator = torch.Generator().manual_seed(0)
        for T, decode in [(n, False)] + [(1, True)] * decoded:
            cache.begin(T, decode)
            for layer in range(L):
                q, k, v = (torch.randn(B, h, T, D, generator=generator).bfloat16() for h in (4, KV, KV))
                cache.attend(layer, q, k, v)
            cache.end()
        gpu, host = cache.nbytes()["gpu"], cache.nbytes()["host"]
        length = n + decoded
        if length <= setting.dense:
            rows = n if not decoded else max(n + 1, n + n // 8 + 64)
            assert gpu == {"pos": 8, "16-bit tokens": 2 * L * B * KV * rows * D * item} and not host
            return
        Q, S = len(plan), L - len(plan)
        room = n if not decoded else n + 1 + max(256, (n + 1) // 25)
        blocks = -(-room // 64)
        expected = {"pos": 8}
        if Q:
            expected["quantised codes"] = Q * B * KV * blocks * (D * 64 * bits // 8 + 64 * -(-D * bits // 8))
            expected["quantised ranges"] = Q * B * KV * blocks * (2 * D + 2 * 64 * -(-D // 64)) * 2
            expected["quantised tail"] = Q * B * KV * (128 + 64 + 256) * 2 * D * item
            if setting.correct or setting.centre:
                expected["quantised values' means"] = Q * B * KV * (blocks * setting.correct + 2) * D * 4
        if S:
            expected["sink"] = S * B * KV * 8 * 2 * D * item
            expected["window"] = S * B * KV * 128 * 2 * D * item
            expected["channel maxima"] = S * B * KV * D * item
            if setting.tail:
                expected["value sums"] = S * B * KV * D * 8
            if setting.tail and setting.tilt:
                expected["moments"] = S * B * KV * (D + 1) ** 2 * 8
            if decoded:
                rows = -(-((room - 56) // 64) // 16) * 16  # whole chunks of 1,024 positions
                each = 64 * item if setting.row_bits == 16 else 8 * setting.row_bits + 4
                expected["critical rows"] = 2 * B * KV * 6 * rows * each
                expected["fetched tokens"] = B * KV * 40 * 2 * D * item
        assert gpu == expected
        slabs = (n - 56) // 64 * 64
        if decoded and (n + decoded + 64 - 56) // 64 * 64 > slabs:
            slabs += 256
        sizes = {"k and v": S * B * KV * slabs * (2 * D * item if setting.token_bits == 16 else 168)}  # 2 * 80 codes and 2 * 3 exponents, in eights
        if setting.row_bits == 16:
            sizes["channel rows"] = sizes["k and v"] // 2
        else:
            sizes |= {"channel rows": S * B * KV * slabs * D * setting.row_bits // 8, "channel ranges": S * B * KV * slabs // 64 * D * 4}
        sizes |= {"k maxima": S * B * KV * slabs // 64 * D * item, "v sums": S * B * KV * slabs // 64 * D * 4}
        assert host == (sizes if S else {})


def test_gpu_part_stays_bounded_while_text_grows():
    """A buffer per generated token on the GPU is what the method is there to avoid."""
    driver = Driver(L=2, KV=1, G=1, D=8, n=2400)  # two whole chunks of rows, and a third
    with TailorCache(driver.config, (), options(dense_below=0)) as cache:
        driver.call(cache, 200)
        parts = None
        for _ in range(2150):
            driver.call(cache, 1, decode=True)
            gpu = dict(cache.nbytes()["gpu"])
            assert gpu.pop("critical rows", 0) <= 2 * 6 * (cache.length * 1.15 + 400 + 1024) * 4  # whole chunks
            parts = parts or gpu
            assert gpu == parts
        # What left the window is on the host, and at most 2.5 % of the host's slabs stand empty.
        stored = sum(slab.size for slab in cache.layers[0].store.slabs)
        assert cache.layers[0].edge(cache.length) <= stored <= cache.length * 1.025 + 256
        assert torch.equal(torch.cat([slab.tokens(0, slab.size)[0] for slab in cache.layers[1].store.slabs], 2)[:, :, :2150], driver.k[1][:, :, :2150])


# ------------------------------------------------------------------------------------------------------------ the choice


@settings(max_examples=200)
@given(st.lists(st.sampled_from([-1.0, 0.0, 0.5, 0.5, 2.0, float("-inf")]), min_size=1, max_size=60), st.integers(0, 70))
def test_selection_breaks_ties_to_the_lowest_position(scores, count):
    """torch.topk picks any of equal scores, so the same prompt could give other tokens on another device."""
    scores = torch.tensor([scores])
    expected = torch.sort(scores, descending=True, stable=True).indices[:, :count].sort(-1).values
    assert torch.equal(select_tokens(scores, count), expected)


def test_opposite_heads_do_not_cancel_unless_asked():
    """The authors' code averages a group's queries with sign: two heads that look for opposite things then look for nothing."""
    q = torch.zeros(1, 2, 1, 4)
    q[0, 0, 0, 0], q[0, 1, 0, 0], q[0, :, 0, 1] = 5, -5, 1
    kmax = torch.ones(1, 1, 4)
    assert critical_channels(q, kmax, 1).item() == 0
    assert critical_channels(q, kmax, 1, authors=True).item() == 1
    rows = torch.tensor([[[[1.0, -1.0, 0.0]]]])
    index = torch.zeros(1, 1, 1, dtype=torch.int64)
    scores = approximate_scores(q, index, rows, 1.0)
    assert importance(scores, authors=True)[0].abs().max() == 0
    best, _ = importance(scores)
    assert best[0, 0, 0] == best[0, 0, 1] > best[0, 0, 2]


def test_importance_among_all_attention():
    """A head that looks at the window has little say; without a window the shares are those among the candidates."""
    scores = torch.tensor([[[[3.0, 0.0, 1.0], [0.0, 3.0, 1.0]]]])
    near = torch.tensor([[[[-1e9], [20.0]]]])  # the second head attends to the window
    shares, mass = importance(scores, near=near)
    assert shares[0, 0].argmax() == 0 and shares.sum().item() == pytest.approx(0.5, rel=1e-4) == mass.item()
    assert torch.allclose(importance(scores, near=torch.full((1, 1, 2, 1), -1e9))[0], importance(scores)[0])


def test_needed_tokens():
    """One after another, the largest share first, until less than `left` is left; ties to the lowest position; at least `least`."""
    shares = torch.tensor([[[0.05, 0.3, 0.0625, 0.2, 0.0625, 0.05]], [[0.0] * 5 + [0.5]]])
    for left, least in [(0.1, 0), (0.11, 0), (0.2, 0), (0.4, 0), (0.4, 3), (2.0, 0), (1e-9, 0)]:
        chosen = select_tokens(shares, 4)
        expected = torch.zeros_like(chosen, dtype=torch.bool)
        for b in range(2):
            order = sorted(chosen[b, 0].tolist(), key=lambda n: (-shares[b, 0, n].item(), n))
            rest = shares[b, 0].double().sum().item()
            for rank, n in enumerate(order):
                if rest >= left or rank < least:
                    expected[b, 0, chosen[b, 0].tolist().index(n)] = True
                rest -= shares[b, 0, n].item()
        assert torch.equal(needed(shares, shares.sum(-1, keepdim=True), chosen, left, least), expected), (left, least)


@pytest.mark.parametrize("heavy, least, fetched", [([700], 0, 1), ([260], 64, 64), (range(1000, 1100), 64, 98)])
def test_needed_tokens_where_the_sum_is_a_sample_s(heavy, least, fetched):
    """A passage that the sample misses, or counts eight times, is known once it is chosen: a head fetches as many tokens as with the exact sum."""
    N, heavy = 4096, list(heavy)
    sampled = torch.arange(N) // 64 % 8 == 4
    shares = torch.rand(1, 1, N, generator=torch.Generator().manual_seed(0)) * 2 * 0.05 / N  # 5 %, thinly spread
    shares[0, 0, heavy] = torch.linspace(0.9, 1.1, len(heavy)) * 0.85 / len(heavy)  # the rest is the window's
    own = shares[..., sampled].sum(-1, keepdim=True) * 8
    mass, among_all = own / (own + 0.1), shares / (own + 0.1)
    chosen = select_tokens(shares, 256)
    mine = needed(among_all, mass, chosen, 0.094, least, sampled)
    exact = needed(shares, shares.sum(-1, keepdim=True), chosen, 0.094, least)
    assert abs(int(mine.sum()) - int(exact.sum())) <= 1 and int(exact.sum()) == pytest.approx(fetched, abs=12)
    if len(heavy) > 1 or sampled[heavy[0]]:
        assert needed(among_all, mass, chosen, 0.094, least).sum() != exact.sum(), "a case that the estimated sum alone gets wrong"


@pytest.mark.parametrize("left, least", [(0.3, 2), (0.05, 5), (1.0, 7)])
def test_as_many_tokens_as_a_head_needs(left, least):
    """Each head fetches its largest candidates, until less than `left` of its approximated attention is left; the tail takes the rest."""
    driver = Driver(L=1, KV=2, G=2, D=40, n=500)
    setting = options(aggregation="all", topk=60, left=left, least=least, row_bits=16, channels=40, tail=True, dense_below=130)
    with TailorCache(driver.config, (), setting) as cache, TailorCache(driver.config, (), dataclasses.replace(setting, left=0.0)) as fixed:
        driver.call(cache, 400)
        driver.call(fixed, 400)
        for N in range(401, 406):
            driver.call(cache, 1, decode=True)
            driver.call(fixed, 1, decode=True)
            entry, q, k = cache.layers[0], driver.q[0][:, :, N - 1 : N], driver.k[0][:, :, :N]
            weights = (q.unflatten(1, (2, 2)) @ k.unsqueeze(2).transpose(3, 4) * 40**-0.5).softmax(-1)[:, :, :, 0].mean(2)  # all channels: exact
            shares = weights[:, :, 8 : entry.edge(N)]
            for h in range(2):
                mine = entry.chosen[0, h][entry.chosen[0, h] >= 0]
                everyone = fixed.layers[0].chosen[0, h]
                assert least <= len(mine) <= 60 and set(mine.tolist()) <= set(everyone.tolist())
                rest = shares[0, h].sum() - weights[0, h][mine].sum()
                assert rest < left or len(mine) == 60
                if len(mine) > least:
                    assert rest + weights[0, h][mine].min() >= left - 1e-6  # one fewer would not have been enough
    counts = (entry.chosen >= 0).sum(-1)
    assert left < 1.0 or (counts == least).all()


def test_a_share_of_all_attention_needs_all():
    with pytest.raises(ValueError, match="aggregation=all"):
        options(left=0.1, aggregation="mean")
    with pytest.raises(ValueError, match="between 0 and 1"):
        options(left=1.5, aggregation="all")


def test_moments_do_not_show_in_which_pieces_tokens_came():
    """A mean taken out again must leave what was there before: questions on one prefill are cropped away."""
    k, v = torch.randn(2, 1, 2, 300, 8, generator=torch.Generator().manual_seed(0))
    whole = moments_of(k, v)  # 300 = 44 + 4 * 64
    parts = [moments_of(k[:, :, a:b], v[:, :, a:b]) for a, b in ((0, 108), (108, 172), (172, 300))]
    assert torch.equal(parts[2] + (parts[0] + parts[1]), whole) and torch.equal(whole - parts[2], parts[1] + parts[0])
    one = torch.ones(1, 2, 300, 1)
    torch.testing.assert_close(whole, torch.cat((k, one), 3).double().transpose(2, 3) @ torch.cat((v, one), 3).double(), atol=1e-5, rtol=0)


@given(seed=st.integers(0, 2**20), G=st.sampled_from([1, 3]))
def test_the_tail_is_exact_where_values_are_linear_in_scores(seed, G):
    """Then the regression has no residual: mean value and shift are the softmax's own average."""
    generator = torch.Generator().manual_seed(seed)
    k, q = torch.randn(1, 2, 200, 8, generator=generator), torch.randn(1, 2 * G, 1, 8, generator=generator)
    if G == 1:  # v a function of this query's scores
        v = (k @ q.transpose(2, 3)) @ torch.randn(1, 2, 1, 5, generator=generator) + torch.randn(1, 2, 1, 5, generator=generator)
    else:  # constant: no shift for any query
        v = torch.randn(1, 2, 1, 5, generator=generator).expand(-1, -1, 200, -1)
    scores = (q.view(1, 2, G, 8) @ k.transpose(2, 3)) * 8**-0.5
    left = scores.masked_fill(torch.rand(1, 2, 1, 200, generator=generator) < 0.3, float("-inf"))
    mean = moments_of(k.double(), v.double()) / 200
    covariance = (mean[..., :-1, :-1] - mean[..., :-1, -1:] * mean[..., -1:, :-1]).float()
    value = v.mean(2).repeat_interleave(G, 1).unsqueeze(2) + tail_shift(q, scores, left, covariance, 8**-0.5)
    torch.testing.assert_close(value, (left.softmax(-1) @ v).view(1, 2 * G, 1, 5), atol=1e-3, rtol=1e-3)


def test_the_sink_is_not_in_the_maxima():
    """The first tokens' keys are outliers of their own: with them every step picks their channels."""
    driver = Driver(L=1)
    driver.k[0][:, :, :8] *= 1000
    with TailorCache(driver.config, (), options()) as cache:
        driver.call(cache, 400)
        assert torch.equal(cache.layers[0].kmax, driver.k[0][:, :, 8:320].abs().amax(2))


def test_static_channels_come_from_the_plan():
    """The paper's ablation: channels that were chosen once."""
    driver = Driver(L=2)
    plan = SimpleNamespace(quantised=(), channels=[torch.tensor([[3, 1, 2, 0, 9, 5, 4], [8, 7, 6, 5, 4, 3, 2]])] * 2)
    with TailorCache(driver.config, plan, options(static=True)) as cache:
        driver.call(cache, 300)
        driver.call(cache, 1, decode=True)
        assert cache.layers[1]._index.tolist() == [[[0, 1, 2, 3, 5, 9], [3, 4, 5, 6, 7, 8]]]
        assert not cache.wants(1)
    with pytest.raises(ValueError, match="channels"):
        TailorCache(driver.config, (), options(static=True))


# ------------------------------------------------------------------------------------------------------------ the thread


@pytest.mark.parametrize("plan", [(), (0,), (1,), (0, 3), (2, 3), (1, 2, 4)])
def test_slow_copies_change_nothing(monkeypatch, plan):
    """Two buffers taken by layer parity instead of by turn, or reused too early, mix two layers' rows."""
    driver, outputs = Driver(L=5), []
    gather = offload.HostStore.gather_channels
    delays = iter([0, 0.003, 0.001, 0, 0.002] * 2000)
    for slow in (False, True):
        if slow:
            monkeypatch.setattr(offload.HostStore, "gather_channels", lambda *a: (time.sleep(next(delays)), gather(*a)))
        with TailorCache(driver.config, plan, options()) as cache:
            driver.call(cache, 300)
            outputs.append(torch.cat([driver.call(cache, 1, decode=True) for _ in range(40)], 3))  # a block leaves at 312
    assert torch.equal(*outputs)


def test_a_failure_in_the_thread_surfaces(monkeypatch):
    """A thread that dies in silence leaves the last step's rows to be read as this one's."""
    driver = Driver()
    with TailorCache(driver.config, (0,), options()) as cache, TailorCache(driver.config, (0,), options()) as twin:
        driver.call(cache, 300)
        driver.call(twin, 300)
        with monkeypatch.context() as patch:
            patch.setattr(offload.HostStore, "gather_channels", lambda *a: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                driver.call(cache, 1, decode=True)
        assert torch.equal(driver.call(cache, 1, decode=True), driver.call(twin, 1, decode=True))


def test_leaving_stops_the_thread_and_frees_the_memory():
    """A with-block that is left by an exception must not leave a thread or gigabytes of slabs behind."""
    driver, before = Driver(), set(threading.enumerate())
    with pytest.raises(KeyboardInterrupt), TailorCache(driver.config, (0,), options()) as cache:
        driver.call(cache, 300)
        driver.call(cache, 1, decode=True)
        driver.call(cache, 100, stop_at=(1, 0))
        raise KeyboardInterrupt
    assert set(threading.enumerate()) <= before
    assert cache.nbytes() == {"gpu": {"pos": 8}, "host": {}} and cache.length == 0
    same(state(cache), state(TailorCache(driver.config, (0,), options())))
    driver.call(cache, 200)  # and it can be used again
    cache.close()


def test_a_cache_that_nobody_closed_takes_its_thread_with_it():
    """A thread per forgotten cache, each holding gigabytes alive, until the process ends."""
    driver, before = Driver(), set(threading.enumerate())
    cache = TailorCache(driver.config, (0,), options())
    driver.call(cache, 300)
    driver.call(cache, 1, decode=True)
    [thread] = set(threading.enumerate()) - before
    del cache
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()


def test_reset_leaves_nothing_of_the_old_sequence():
    """A second document must not find the first one's maxima or rows."""
    driver, other = Driver(), Driver(seed=5)
    with TailorCache(driver.config, (0,), options()) as cache, TailorCache(driver.config, (0,), options()) as fresh:
        driver.call(cache, 400)
        driver.call(cache, 1, decode=True)
        cache.reset()
        for one in (cache, fresh):
            other.call(one, 300)
        same(state(cache), state(fresh))
        assert torch.equal(other.call(cache, 1, decode=True), other.call(fresh, 1, decode=True))


# ------------------------------------------------------------------------------------------------------------- misuse


def test_a_sequence_of_another_batch_size_is_refused():
    """Ragged or changed batches would read each other's rows."""
    driver = Driver()
    with TailorCache(driver.config, (0,), options()) as cache:
        driver.call(cache, 300)
        cache.begin(1, True)
        with pytest.raises(ValueError, match="reset"):
            cache.attend(0, *(x[0][:, :, :1].repeat(2, 1, 1, 1) for x in (driver.q, driver.k, driver.v)))


def test_batches_are_independent():
    """Groups, maxima or chosen tokens that cross sequences make an answer depend on its neighbour."""
    model, ids = tiny(), tokens(320, B=2)
    together = None
    with TailorCache(model.config, (0,), options()) as cache:
        together = teacher_forced(model, cache, ids, 260)
    for b in range(2):
        with TailorCache(model.config, (0,), options()) as cache:
            assert torch.allclose(teacher_forced(model, cache, ids[b : b + 1], 260), together[b : b + 1], atol=1e-4)


@pytest.mark.parametrize(
    "spec", ["tailor:preset=nope", "tailor:bits=3", "tailor:topk=-1", "tailor:channels=0", "tailor:norm=x", "tailor:aggregation=max", "tailor:group=12"]
)
def test_settings_out_of_range_are_refused(spec):
    """A setting that is accepted and ignored is worse than an error."""
    with pytest.raises(ValueError, match=spec.split("=")[0].split(":")[1]):
        make_cache(spec, SimpleNamespace(num_hidden_layers=2))


def test_presets_are_the_papers():
    """The comparison row must be the paper's setting."""
    chosen = {name: make_cache(f"tailor:preset={name}", SimpleNamespace(num_hidden_layers=2)).options for name in ("longbench", "longbench-2", "ruler", "ruler-2")}
    assert [(o.bits, o.sink, o.recent, o.topk, o.channels) for o in chosen.values()] == [(1, 8, 56, 128, 8), (2, 8, 56, 128, 8), (1, 64, 64, 896, 12), (2, 64, 64, 896, 12)]
    assert all(o.norm == "previous" and o.aggregation == "authors" and (o.group, o.residual) == (64, 128) for o in chosen.values())
    assert make_cache("tailor:preset=longbench,channels=16,topk=256", SimpleNamespace(num_hidden_layers=2)).options.topk == 256
