# SPDX-License-Identifier: Apache-2.0
"""P against a dense computation in float64, the observations against the model itself, plans on disk, the choice of a plan, the command line."""

import dataclasses
import importlib.util
import itertools
import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import calibrate
import embedded
from cache import FullCache, TailorCache, TailorConfig, account
from calibrate import KNOWN, Plan, Probe, cached_path, choose, classify, damages, examine, known_plan, plan_for, tries
from model import Llama, ModelConfig, rotate
from tokenizer import Tokenizer

ROOT = Path(calibrate.__file__).parent


@pytest.fixture
def home(tmp_path, monkeypatch):
    """An empty cache folder for this test alone."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    return tmp_path / "home" / "tailorkv"


@pytest.fixture(scope="module")
def model(family):
    return Llama.from_checkpoint(family("llama3.1")[0])  # G 3, D 80


@pytest.fixture(scope="module")
def tiny(tiny_chat):
    return Llama.from_checkpoint(tiny_chat)


def tokens(model, n, seed=0):
    return torch.randint(0, model.config.vocab_size, (1, n), generator=torch.Generator().manual_seed(seed))


def chunked(monkeypatch, size):
    monkeypatch.setattr(Llama, "chunk", property(lambda self: size))


def dense(model, ids):
    """Per layer, of a plain forward pass in float64 with whole score matrices: input `[N, hidden]`, q `[H, N, D]`, k `[KV, N, D]`, weights `[H, N, N]`."""
    layers, N = [], ids.shape[1]
    double = Llama(model.config).double()
    double.load_state_dict(model.state_dict())
    angles = torch.arange(N, dtype=torch.float64)[:, None] * double.inv_freq.double()
    angles = torch.cat((angles, angles), -1)
    cos, sin = angles.cos() * double.rope_scaling, angles.sin() * double.rope_scaling
    later = torch.ones(N, N).triu(1).bool()
    with torch.no_grad():
        h = double.embed_tokens(ids)
        for layer in double.layers:
            start, a = h[0].clone(), layer.self_attn
            x = layer.input_layernorm(h)
            q = rotate(a.query(x), cos, sin)[0]
            k = rotate(a.k_norm(a.k_proj(x).unflatten(-1, (a.num_kv_heads, a.head_dim))).transpose(1, 2), cos, sin)[0]
            v = a.v_proj(x).unflatten(-1, (a.num_kv_heads, a.head_dim)).transpose(1, 2)[0]
            G = q.shape[0] // k.shape[0]
            weights = (q @ k.repeat_interleave(G, 0).mT * a.head_dim**-0.5).masked_fill(later, -math.inf).softmax(-1)
            o = weights @ v.repeat_interleave(G, 0)  # [H, N, D]
            h = h + a.o_proj(o.transpose(0, 1).flatten(1)[None])
            h = h + layer.mlp(layer.post_attention_layernorm(h))
            layers.append((start, q, k, weights))
    return layers


def dense_P(layers, n_q):
    k = max(1, math.floor(0.05 * layers[0][0].shape[0]))
    return [float((1 - weights[:, -n_q:].sort(-1, descending=True).values[..., :k].sum(-1)).mean()) for *_, weights in layers]


# --------------------------------------------------------------------------------------------------------------------- P


@pytest.mark.parametrize("name", ["llama2", "llama3", "llama3.1", "qwen3"])  # G 1, 4, 3, 2; D 24, 64, 80, 40
@pytest.mark.parametrize(("n", "n_q", "chunk"), [(1, 32, 512), (13, 5, 4), (19, 32, 7), (61, 32, 512), (61, 32, 13), (150, 32, 31), (150, 1, 64)])
def test_P_is_the_dense_computations(family, monkeypatch, name, n, n_q, chunk):
    """Last queries that lie in two chunks, or are all there are; texts under 20 tokens, of which 5 % is less than one weight."""
    chunked(monkeypatch, chunk)
    model = Llama.from_checkpoint(family(name)[0])
    ids = tokens(model, n)
    plan = classify(model, ids, n_q=n_q)
    assert plan.k == max(1, n // 20) and plan.n_q == min(n, n_q)
    assert plan.scores == pytest.approx(dense_P(dense(model, ids), n_q), abs=2e-6)
    assert plan.fingerprint == model.fingerprint and plan.tau == 0.2


def test_5_percent_is_rounded_down(model):
    """0.05 is no binary fraction: 0.05 * n might fall below a whole number that n / 20 is."""
    assert all(calibrate.weights_kept(n) == max(1, math.floor(0.05 * n)) for n in range(1, 140_000))


@pytest.mark.parametrize("limit", [1, 200, 5000])
def test_bounded_scores_give_the_same_P(model, limit):
    """A long text's scores come in pieces: a few queries of one KV head at a time."""
    g = torch.Generator().manual_seed(1)
    q, k = torch.randn(2, 6, 11, 16, generator=g), torch.randn(2, 2, 50, 16, generator=g)
    assert calibrate.sparse_error(q, k, 3, 0.7, limit) == pytest.approx(calibrate.sparse_error(q, k, 3, 0.7), abs=1e-7)


def test_scores_are_float32_whatever_the_model_is(model):
    """Softmax and sums over thousands of weights in bf16 would be off by more than layers differ."""
    g = torch.Generator().manual_seed(2)
    q, k = (torch.randn(1, 2, 32, 64, generator=g).bfloat16(), torch.randn(1, 2, 4000, 64, generator=g).bfloat16())
    seen = torch.arange(4000) <= torch.arange(3968, 4000)[:, None]
    weights = (q.double() @ k.double().mT / 8).masked_fill(~seen, -math.inf).softmax(-1)
    expected = float((1 - weights.topk(200, -1).values.sum(-1)).mean())
    assert calibrate.sparse_error(q, k, 200, 1 / 8) == pytest.approx(expected, abs=1e-6)


def test_the_model_runs_as_ever(model):
    """Probing must not disturb what is probed: logits are those of the full cache, and no hook stays behind."""
    ids = tokens(model, 70)
    expected = model.prefill(ids, FullCache(model.config))
    assert torch.equal(model.prefill(ids, Probe(model.config)), expected)
    examine(model, ids, observe=True)
    assert not any(layer._forward_pre_hooks for layer in model.layers)
    assert torch.equal(model.prefill(ids, FullCache(model.config)), expected)


def test_a_probe_holds_one_layer(model):
    """All layers' K and V at 131,072 tokens are what calibration must not need."""
    probe = Probe(model.config)
    held = []
    probe.look = lambda layer, q, kmax: held.append((probe._k.data_ptr(), probe._v.data_ptr(), probe._k.shape))
    model.prefill(tokens(model, 40), probe)
    assert len(held) == model.config.num_hidden_layers and len(set(held)) == 1
    assert probe._k is None and probe._v is None
    with pytest.raises(ValueError, match="one prompt"):
        model.prefill(tokens(model, 3), probe)


@pytest.mark.gpu
def test_cuda_gives_the_same_P(model):
    ids = tokens(model, 300)
    on_gpu = Llama(model.config)
    on_gpu.load_state_dict(model.state_dict())
    on_gpu = on_gpu.eval().requires_grad_(False).cuda()
    here, there = examine(model, ids, observe=True), examine(on_gpu, ids, observe=True)
    assert there.errors == pytest.approx(here.errors, abs=1e-4)
    assert there.hidden[1:] == pytest.approx(here.hidden[1:], abs=1e-4) and there.predicted["own"][1:] == pytest.approx(here.predicted["own"][1:], abs=1e-4)
    torch.testing.assert_close(there.importance, here.importance, rtol=1e-3, atol=1e-4)


@pytest.mark.gpu
def test_a_long_text_needs_little_memory():
    """32 queries of 32 heads over 131,072 keys are 512 MiB of scores in float32, and softmax and Top-K want the same again."""
    q, k = (torch.randn(1, heads, rows, 128, device="cuda", dtype=torch.bfloat16) for heads, rows in ((32, 32), (8, 131072)))
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    assert 0 < calibrate.sparse_error(q, k, 6553, 128**-0.5) < 1
    assert torch.cuda.max_memory_allocated() - before < 640 * 2**20


def test_several_texts_count_equally_and_are_cut_to_the_shortest(model):
    a, b = tokens(model, 80, 1), tokens(model, 65, 2)
    both = classify(model, [a[0].tolist(), b[0].tolist()], channels=True)
    alone = [classify(model, a[:, :65]), classify(model, b[0])]
    assert both.scores == pytest.approx([(x + y) / 2 for x, y in zip(*(plan.scores for plan in alone))], abs=1e-12)
    assert both.k == 3 and classify(model, torch.cat((a[:, :65], b))).scores == both.scores


def test_tau_divides_the_classes(model):
    ids = tokens(model, 60)
    P = classify(model, ids).scores
    middle = sorted(P)[1]
    plan = classify(model, ids, tau=middle)  # P = tau is not above it
    assert plan.quantised == tuple(i for i, x in enumerate(P) if x > middle) and len(plan.quantised) == 1
    assert plan.classes == tuple("quantised" if i in plan.quantised else "sparse" for i in range(3))
    assert classify(model, ids, tau=1.0).quantised == () and classify(model, ids, tau=0.0).quantised == (0, 1, 2)


@pytest.mark.parametrize(("ids", "options", "message"), [
    ([], {}, "no text"), ([[]], {}, "empty"), ([[5], []], {}, "empty"), ([5, 10**6], {}, "vocabulary"), ([5], {"n_q": 0}, "n_q is 0"), ([5], {"tau": 1.5}, "tau is 1.5"), ([5], {"tau": math.nan}, "tau is nan"),
])  # fmt: skip
def test_what_cannot_be_classified(model, ids, options, message):
    with pytest.raises(ValueError, match=message):
        classify(model, ids, **options)


# ---------------------------------------------------------------------------------------------- channels, observations


@pytest.mark.parametrize("chunk", [512, 19])
def test_channels_are_ranked_by_mean_query_times_largest_key(model, monkeypatch, chunk):
    chunked(monkeypatch, chunk)
    ids = tokens(model, 130)
    plan, layers = classify(model, ids, channels=True), dense(model, ids)
    for (_, q, k, _), channels in zip(layers, plan.channels):
        KV, D = k.shape[0], k.shape[2]
        importance = q.unflatten(0, (KV, -1)).abs().mean((1, 2)) * k[:, 64:98].abs().amax(1)
        ranked = importance.gather(1, channels)
        assert channels.shape == (KV, D) and channels.dtype == torch.int64
        assert (ranked.diff() <= 1e-5 * ranked[:, :1]).all()


def test_static_channels_run(model):
    """A plan with channels is what `static=true` asks for, and all channels are as good as exact scores."""
    ids = tokens(model, 300)
    plan = dataclasses.replace(classify(model, ids[:, :120], channels=True), quantised=())
    options = {"sink": 8, "recent": 56, "topk": 16, "dense_below": 64, "aggregation": "mean", "norm": "own", "channels": 80}
    outs = []
    for static in (True, False):
        with TailorCache(model.config, plan, TailorConfig.build(static=static, **options)) as cache:
            model.prefill(ids[:, :290], cache)
            outs.append([model.decode(ids[:, t : t + 1], cache) for t in range(290, 300)])
    torch.testing.assert_close(*outs)


@pytest.mark.parametrize("chunk", [512, 11])
def test_observations_are_the_models(model, monkeypatch, chunk):
    """Hidden states are changed in place and predicted queries need the right position: both would only look a little worse."""
    chunked(monkeypatch, chunk)
    ids, n = tokens(model, 130), 32
    seen, layers = examine(model, ids, n, observe=True), dense(model, ids)
    plain = classify(model, ids, n_q=n)
    assert seen.errors == list(plain.scores) and math.isnan(seen.hidden[0])
    cos, sin = model.rope(torch.arange(98, 130))
    for layer, (h, q, k, _) in enumerate(layers):
        kmax = k[:, 64:98].abs().amax(1)
        score = q[:, -n:].unflatten(0, (2, 3)).abs().mean(1) * kmax[:, None]  # [KV, n, D]
        expected = torch.zeros_like(score).scatter_(2, score.topk(8).indices, 1.0).mean(1)
        assert (seen.top8[layer] - expected).abs().sum() <= 2 / n  # at most one near tie may fall the other way
        if layer:
            before = layers[layer - 1][0][-n:]
            assert seen.hidden[layer] == pytest.approx(float(torch.cosine_similarity(before, h[-n:], dim=-1).mean()), abs=1e-5)
            for norm, at in (("own", layer), ("previous", layer - 1)):
                guess = model.layers[layer].self_attn.query(model.layers[at].input_layernorm(before.float()[None]))
                guess = rotate(guess, cos, sin)[0].double()
                assert seen.predicted[norm][layer] == pytest.approx(float(torch.cosine_similarity(guess, q[:, -n:], dim=-1).mean()), abs=1e-5)


# --------------------------------------------------------------------------------------------------------- plans on disk

PLAN = Plan((0, 2), (0.5, 0.1, 0.25), 0.2, 32, 204, "f00d", ("aa", "bb"), [torch.tensor([[3, 1], [0, 2]])] * 3)


def test_a_plan_comes_back_from_disk(tmp_path):
    PLAN.save(tmp_path / "plan.json")
    back = Plan.load(tmp_path / "plan.json")
    assert back == PLAN and all(torch.equal(a, b) for a, b in zip(back.channels, PLAN.channels, strict=True))
    assert back.classes == ("quantised", "sparse", "quantised")
    assert json.loads((tmp_path / "plan.json").read_text())["classes"] == list(back.classes)
    plain = Plan((), (None, None))
    plain.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plain and Plan.load(tmp_path / "plan.json").channels is None
    assert os.listdir(tmp_path) == ["plan.json"]


def test_a_failed_save_leaves_the_old_plan(tmp_path, monkeypatch):
    PLAN.save(tmp_path / "plan.json")
    for name, error, raised in (("replace", OSError(28, "No space left on device"), ValueError), ("fsync", KeyboardInterrupt(), KeyboardInterrupt)):

        def fail(*_, error=error):
            raise error

        monkeypatch.setattr(calibrate.os, name, fail)
        with pytest.raises(raised):
            Plan((), (None,)).save(tmp_path / "plan.json")
        monkeypatch.undo()
        assert Plan.load(tmp_path / "plan.json") == PLAN and os.listdir(tmp_path) == ["plan.json"]


@pytest.mark.parametrize(("change", "message"), [
    ("not json", "not valid JSON"), ("[" * 100_000, "not valid JSON"), ("[1]", "has a list where"), ({"format": "tailorkv-plan-0"}, "format 'tailorkv-plan-0' where"), ({"format": ...}, "format None"),
    ({"tau": ...}, "has no tau"), ({"tau": ..., "k": ...}, "has no tau, k"), ({"tau": "0.2"}, "tau is '0.2'; it must be"), ({"tau": True}, "tau is True"), ({"n_q": 0}, "n_q is 0"), ({"k": 1.5}, "k is 1.5"),
    ({"quantised": [3], "classes": ...}, r"quantised is \(3,\); it must be layers from 0 to 2"), ({"quantised": [-1]}, "quantised is"), ({"quantised": [0, 0]}, "quantised is"), ({"quantised": [2, 0]}, "quantised is"),
    ({"quantised": 0}, "quantised is 0"), ({"quantised": ["0"]}, "quantised is"), ({"quantised": [0]}, "contradict"), ({"classes": 1}, "contradict"),
    ({"scores": []}, "scores is"), ({"scores": [0.5, 0.1, 1.5]}, "scores is"), ({"scores": [0.5, 0.1, math.nan]}, "scores is"), ({"scores": {"0": 0.5}}, "scores is"), ({"scores": [0.5]}, "quantised is"),
    ({"fingerprint": 7}, "fingerprint is 7"), ({"text_sha256": "aa"}, "text_sha256 is 'aa'"), ({"text_sha256": [1]}, "text_sha256 is"),
    *(({"channels": bad}, "channels is") for bad in ("abc", 7, [], [[[0]]], [[[0]], [[0]], [[0, 1]]], [[[0, 1], [0]]] * 3, [[[0, 0]]] * 3, [[[-1]]] * 3, [[[0.5]]] * 3, [[[2**70]]] * 3, [[["a"]]] * 3, [[[]]] * 3, [[0]] * 3)),
])  # fmt: skip
def test_a_malformed_plan_is_named(tmp_path, change, message):
    path = tmp_path / "plan.json"
    PLAN.save(path)
    if isinstance(change, dict):
        raw = json.loads(path.read_text()) | change
        path.write_text(json.dumps({name: value for name, value in raw.items() if value is not ...}))
    else:
        path.write_text(change)
    with pytest.raises(ValueError, match=message) as caught:
        Plan.load(path)
    assert str(path) in str(caught.value) and "calibrate.py" in str(caught.value) and "\n" not in str(caught.value)


def test_a_plan_that_cannot_be_read(tmp_path):
    for path in (tmp_path / "absent.json", tmp_path):
        with pytest.raises(ValueError, match="cannot read the plan"):
            Plan.load(path)
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="not valid JSON"):
        Plan.load(tmp_path / "binary")
    with pytest.raises(ValueError, match="cannot write the plan"):
        PLAN.save(tmp_path / "no" / "plan.json")


# ---------------------------------------------------------------------------------------------------- a plan for a model

RAW = {"model_type": "llama", "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "max_position_embeddings": 131072}
LLAMA31 = RAW | {"rope_theta": 500000.0, "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}}
FOUND = {
    "Llama-3.1-8B": (LLAMA31, (0,)),
    "Llama-2-7B-32K": (RAW | {"vocab_size": 32000, "intermediate_size": 11008, "num_key_value_heads": 32, "rope_theta": 10000, "rope_scaling": {"type": "linear", "factor": 8.0}}, (0, 1)),
    "Yi-6B-200K": (RAW | {"vocab_size": 64000, "intermediate_size": 11008, "num_key_value_heads": 4, "rope_theta": 10000000.0, "rope_scaling": None}, (0, 1)),
    "Yi-9B-200K": (RAW | {"vocab_size": 64000, "intermediate_size": 11008, "num_key_value_heads": 4, "num_hidden_layers": 48, "rope_theta": 10000000.0}, (0, 1)),
    "Mistral-7B-v0.3": (RAW | {"model_type": "mistral", "vocab_size": 32768, "rope_theta": 1000000.0, "sliding_window": None}, (0,)),
    "SmolLM2-135M": (embedded.CONFIG, (0,)),
    "SmolLM2-135M with 128k": (embedded.CONFIG | embedded.YARN, (0,)),
}


class Shape:
    """As much of a model as the table looks at."""

    def __init__(self, raw, fingerprint=""):
        self.config, self.fingerprint = ModelConfig.from_dict(raw), fingerprint


def test_known_models_are_recognised_by_their_shape():
    assert set(FOUND) == set(KNOWN)
    for raw, quantised in FOUND.values():
        plan = known_plan(Shape(raw, "abc"))
        assert plan.quantised == quantised and len(plan.scores) == raw["num_hidden_layers"] and plan.fingerprint == "abc"
    for other in ({"num_hidden_layers": 33}, {"vocab_size": 128257}, {"rope_theta": 10000.0}, {"num_key_value_heads": 32}, {"rope_scaling": None}):
        assert known_plan(Shape(LLAMA31 | other)) is None


def test_known_models_need_no_tokenizer_and_no_run(home, capsys):
    assert plan_for(Shape(LLAMA31, "abc"), "/nowhere").quantised == (0,)
    assert capsys.readouterr().err == "" and not home.exists()


def test_an_unknown_model_is_calibrated_once(tiny, tiny_chat, home, capsys, monkeypatch):
    plan = plan_for(tiny, tiny_chat)
    line = capsys.readouterr().err
    assert line.count("\n") == 1 and "once" in line and "256 tokens of calibration.txt" in line
    assert plan.fingerprint == tiny.fingerprint and len(plan.text_sha256) == 1
    ids = Tokenizer.from_checkpoint(tiny_chat).encode(calibrate.TEXT.read_text())[:256]
    assert plan.scores == classify(tiny, ids).scores
    assert Plan.load(home / "plans" / f"{tiny.fingerprint}.json") == plan
    monkeypatch.setattr(calibrate, "classify", None)
    assert plan_for(tiny, "/nowhere") == plan and capsys.readouterr().err == ""


def test_a_kept_plan_wins_over_the_table(home):
    model = Shape(LLAMA31, "abc")
    kept = Plan((0, 1), (0.5,) * 32, fingerprint="abc")
    cached_path(model).parent.mkdir(parents=True)
    kept.save(cached_path(model))
    assert plan_for(model, "/nowhere") == kept


@pytest.mark.parametrize("content", ["{", json.dumps({"format": "tailorkv-plan-0"}), None])
def test_a_damaged_kept_plan_is_made_anew(tiny, tiny_chat, home, content):
    """A program update or a full disk must not stop generation for a file that nobody asked for by name."""
    path = cached_path(tiny)
    path.parent.mkdir(parents=True)
    if content is None:
        PLAN.save(path)
        path.write_text(path.read_text().replace("[0.5, 0.1, 0.25]", "[0.5, 0.1]").replace("[0, 2]", "[0]").replace('"sparse", "quantised"', '"sparse"'))
    else:
        path.write_text(content)
    with pytest.warns(UserWarning, match="ignored"):
        plan = plan_for(tiny, tiny_chat)
    assert Plan.load(path) == plan and len(plan.scores) == 3


def test_a_home_that_cannot_be_written_costs_only_a_warning(tiny, tiny_chat, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.warns(UserWarning, match="cannot write the plan"):
        assert len(plan_for(tiny, tiny_chat).scores) == 3


def test_random_weights_are_not_kept(tiny, tiny_chat, home):
    """Without a fingerprint every such model would share one file."""
    model = Llama.from_config(tiny.config)
    assert len(plan_for(model, tiny_chat, tokenizer=Tokenizer.from_checkpoint(tiny_chat)).scores) == 3
    assert not home.exists()


def test_a_plan_file_comes_first_and_must_fit(tiny, tmp_path, home):
    path = tmp_path / "plan.json"
    own = dataclasses.replace(PLAN, fingerprint=tiny.fingerprint)
    own.save(path)
    assert plan_for(tiny, "/nowhere", path) == own
    PLAN.save(path)
    with pytest.warns(UserWarning, match="another checkpoint"):
        assert plan_for(tiny, "/nowhere", path) == PLAN
    Plan((0,), (0.5, 0.1)).save(path)
    with pytest.raises(ValueError, match=r"plan\.json is a plan for 2 layers, and the model has 3; make one"):
        plan_for(tiny, "/nowhere", path)
    for channels in ([torch.tensor([[0]])] * 3, [torch.tensor([[0], [10**4]])] * 3):
        dataclasses.replace(own, channels=channels).save(path)
        with pytest.raises(ValueError, match="channels that do not fit"):
            plan_for(tiny, "/nowhere", path)
    with pytest.raises(ValueError, match="cannot read the plan"):
        plan_for(tiny, "/nowhere", tmp_path / "absent.json")


# ---------------------------------------------------------------------------------------------------------- command line


def call(capsys, *argv):
    code = calibrate.main([str(arg) for arg in argv])
    return (code, *capsys.readouterr())


@pytest.fixture(autouse=True)
def warnings_as_before(monkeypatch):
    monkeypatch.setattr(calibrate.warnings, "showwarning", calibrate.warnings.showwarning)


def test_cli_prints_a_row_a_layer_and_keeps_the_plan(tiny, tiny_chat, home, capsys, monkeypatch):
    code, out, err = call(capsys, "--ckpt", tiny_chat, "--tokens", 256)  # all that the model can take
    plan = Plan.load(home / "plans" / f"{tiny.fingerprint}.json")
    rows = out.splitlines()[2:]
    assert code == 0 and len(rows) == 3 and plan.channels is None
    for layer, row in enumerate(rows):
        fields = row.split()
        assert int(fields[0]) == layer and float(fields[1]) == pytest.approx(plan.scores[layer], abs=5e-5) and fields[-1] == plan.classes[layer]
        assert abs(row.count("#") - 40 * plan.scores[layer]) <= 1.5  # the bar, less the mark of tau
    monkeypatch.setattr(calibrate, "classify", None)
    assert plan_for(tiny, tiny_chat) == plan


def test_cli_does_not_keep_a_quick_try(tiny_chat, home, capsys):
    """P of a few tokens is too large: kept, it would silently quantise most layers of every later run."""
    code, out, err = call(capsys, "--ckpt", tiny_chat, "--tokens", 255)
    assert code == 0 and len(out.splitlines()) == 5 and "not kept" in err and not home.exists()


def test_cli_texts_options_and_observations(tiny, tiny_chat, tmp_path, home, capsys):
    (tmp_path / "a.txt").write_text(embedded.document()[:3000])
    (tmp_path / "b.txt").write_text("It was a dark and stormy night; " * 9)
    out = tmp_path / "plan.json"
    code, printed, err = call(capsys, "--ckpt", tiny_chat, "--text", tmp_path / "a.txt", tmp_path / "b.txt", "--tau", 0.9, "--out", out, "--channels", "--observe")
    plan = Plan.load(out)
    ids = [Tokenizer.from_checkpoint(tiny_chat).encode((tmp_path / name).read_text()) for name in ("a.txt", "b.txt")]
    assert code == 0 and f"b.txt has only {len(ids[1]):,} tokens" in err and not home.exists()
    assert plan.scores == pytest.approx(classify(tiny, ids).scores) and plan.tau == 0.9 and len(plan.text_sha256) == 2 and len(plan.channels) == 3
    for heading in ("sparse error P of each text (fig. 1): (1) a.txt, (2) b.txt", "cosine similarity (fig. 11)", "Top-8 critical channels (fig. 2)"):
        assert heading in printed


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="matplotlib is optional")
def test_cli_plots(tiny_chat, tmp_path, home, capsys):
    assert call(capsys, "--ckpt", tiny_chat, "--tokens", 100, "--plot", tmp_path / "layers.png")[0] == 0
    assert not home.exists() and (tmp_path / "layers.png").read_bytes()[:4] == b"\x89PNG"
    assert call(capsys, "--ckpt", tiny_chat, "--tokens", 100, "--observe", "--plot", tmp_path / "all")[0] == 0
    assert {f"all{kind}.png" for kind in ("", "-similarity", "-channels")} <= set(os.listdir(tmp_path))
    code, _, err = call(capsys, "--ckpt", tiny_chat, "--tokens", 100, "--plot", tmp_path / "layers.nonsense")
    assert code == 2 and "cannot write the plot" in err


@pytest.mark.parametrize(("flags", "message"), [
    (["--tau", "2"], "--tau is 2.0"), (["--tau", "nan"], "--tau is nan"), (["--text", "/no/such.txt"], "cannot read /no/such.txt"), (["--text", "{empty}"], "is empty"), (["--text", "{binary}"], "is not UTF-8"),
    (["--ckpt", "/no/such"], "no such checkpoint"), (["--out", "/no/such/plan.json"], "there is no folder /no/such"), (["--out", "{folder}"], "is a folder"), (["--device", "abacus"], "not available"),
])  # fmt: skip
def test_cli_errors_are_one_sentence(tiny_chat, tmp_path, home, capsys, flags, message):
    (tmp_path / "empty.txt").touch()
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    named = {"empty": tmp_path / "empty.txt", "binary": tmp_path / "binary", "folder": tmp_path}
    code, out, err = call(capsys, "--ckpt", tiny_chat, *(flag.format(**named) for flag in flags))
    assert code == 2 and out == "" and err.startswith("calibrate.py: error: ") and message in err and err.count("\n") == 1


def test_cli_flags_that_are_wrong(capsys):
    with pytest.raises(SystemExit) as caught:
        calibrate.main(["--tokens", "many"])
    assert caught.value.code == 2 and capsys.readouterr().err.count("\n") == 1


def test_cli_says_that_matplotlib_is_missing(tiny_chat, tmp_path, home, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, _, err = call(capsys, "--ckpt", tiny_chat, "--plot", tmp_path / "layers.png")
    assert code == 2 and "--plot needs matplotlib" in err and err.count("\n") == 1


def test_cli_in_a_process_of_its_own(tiny_chat, tmp_path):
    """As a script the module is `__main__`, and generate.py, which it takes helpers from, may import it a second time."""
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path)}
    run = subprocess.run([sys.executable, str(ROOT / "calibrate.py"), "--ckpt", str(tiny_chat), "--tokens", "300"], capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert run.returncode == 0 and len(run.stdout.splitlines()) == 5, run.stderr
    assert len(os.listdir(tmp_path / "tailorkv" / "plans")) == 1


# ----------------------------------------------------------------------------------------------------------- a real model


def seconds_of_a_product(dtype):
    a = torch.ones(768, 768, dtype=dtype)
    a @ a
    start = time.perf_counter()
    for _ in range(4):
        a @ a
    return time.perf_counter() - start


def test_smollm2_has_one_dense_layer_on_any_text():
    """The paper's finding, on a real model: layer 0 alone is above tau, for an article, a poem, a play and a speech.

    The article goes through all layers, the others through the first eight, which do not depend on those that follow: the four layers
    nearest to tau are there (1 and 2 reach 0.19, 7 reaches 0.16), and none behind them has more than 0.14 on any of the texts.
    """
    folder = embedded.fetch("smollm2")
    tokenizer = Tokenizer.from_checkpoint(folder)
    play, speech = ((embedded.ASSETS / name).read_text(encoding="utf-8") for name in ("hamlet.txt", "areopagitica.txt"))
    pieces = (calibrate.TEXT.read_text(encoding="utf-8"), embedded.document()[200_000:220_000], play[60_000:80_000], speech[:24_000])
    texts = [tokenizer.encode(piece)[:4096] for piece in pieces]
    # bf16 is several times as fast as float32 where the CPU knows it, and several times as slow where it does not; P differs by 0.0005.
    model = Llama.from_checkpoint(folder, dtype=min((torch.bfloat16, torch.float32), key=seconds_of_a_product))
    torch.set_num_threads(os.cpu_count())
    try:
        plans = [classify(model, texts[0])]
        model.layers, model.config = model.layers[:8], dataclasses.replace(model.config, num_hidden_layers=8)
        plans += [classify(model, text) for text in texts[1:]]
    finally:
        torch.set_num_threads(1)
    assert [len(plan.scores) for plan in plans] == [30, 8, 8, 8]
    for plan in plans:
        assert plan.k == 204 and plan.quantised == (0,) and plan.scores[0] > 0.45, plan


# ----------------------------------------------------------------------------------------------------------------- damage

OPTIONS = TailorConfig.build(preset="best", centre=64, topk=32, channels=8)


def test_damage_is_what_the_cache_does_to_the_predictions(model):
    """Measured one layer at a time in a pass of its own; it must be what TailorCache does when only that layer is not exact."""
    ids, steps = tokens(model, 300), 8
    found = damages(model, ids, OPTIONS, steps)
    L = model.config.num_hidden_layers
    assert len(found) == L and all(len(row) == len(tries(OPTIONS)) for row in found)

    def logits(cache):
        model.prefill(ids[:, :-steps], cache)
        return torch.cat([model.decode(token.view(1, 1), cache) for token in ids[0, -steps:]]).double().log_softmax(-1)

    exact = logits(FullCache(model.config))
    everything = {"topk": 1000}  # a sparse layer that fetches all is exact
    for layer, i in ((0, 0), (1, 0), (L - 1, 4), (1, 3)):
        quantised, setting = tries(OPTIONS)[i]
        settings = [everything] * L
        settings[layer] = setting
        plan = Plan((layer,) if quantised else (), (None,) * L, settings=tuple(settings))
        with TailorCache(model.config, plan, OPTIONS) as cache:
            expected = (exact.exp() * (exact - logits(cache))).sum(-1).mean()
        assert found[layer][i] == pytest.approx(float(expected), rel=1e-3, abs=1e-7)


def test_choose_takes_the_least_damage_within_the_budget():
    """Against all plans of three layers, one by one: within a multiplier's step of the best."""
    generator = torch.Generator().manual_seed(0)
    grid, shape = tries(OPTIONS), (2, 64, 4096)
    for _ in range(5):
        damage = torch.rand(3, len(grid), generator=generator).pow(3).tolist()
        every = []
        for picked in itertools.product(range(len(grid)), repeat=3):
            plan = Plan(tuple(l for l, i in enumerate(picked) if grid[i][0]), (None,) * 3, settings=tuple(grid[i][1] for i in picked))
            if sum(setting["topk"] - 32 for quantised, setting in (grid[i] for i in picked) if not quantised) <= 0:
                every.append((sum(damage[l][i] for l, i in enumerate(picked)), account(OPTIONS, 3, *shape, plan)["gpu"]))
        for share in (0.3, 0.7):
            sizes = sorted(size for _, size in every)
            budget = sizes[int(share * len(sizes))]
            plan = choose(damage, OPTIONS, *shape, budget=budget)
            assert account(OPTIONS, 3, *shape, plan)["gpu"] <= budget
            assert sum(plan.damage) <= 2 * min(cost for cost, size in every if size <= budget) + 0.05
            cheap = choose(damage, OPTIONS, *shape, loss=sum(plan.damage))
            assert sum(cheap.damage) <= sum(plan.damage) and account(OPTIONS, 3, *shape, cheap)["gpu"] <= budget
    for limit, message in (({"budget": 10.0}, "GiB"), ({"loss": -1.0}, "KL")):
        with pytest.raises(ValueError, match=message):
            choose(damage, OPTIONS, *shape, **limit)


@pytest.mark.parametrize("bad", [[{}], [{"bits": 3}, {}, {}], [{"nope": 1}, {}, {}], [1, {}, {}], {"bits": 1}, [{"topk": True}, {}, {}]])
def test_settings_that_no_cache_could_follow_are_refused(tmp_path, bad):
    path = tmp_path / "plan.json"
    Plan((0,), (0.5, 0.1, 0.1), settings=({"bits": 2}, {"topk": 64, "channels": 4}, {}), damage=(0.1, 0.0, 0.2)).save(path)
    assert Plan.load(path).settings[1] == {"topk": 64, "channels": 4} and Plan.load(path).damage == (0.1, 0.0, 0.2)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"settings": bad}))
    with pytest.raises(ValueError, match="settings is"):
        Plan.load(path)


def test_by_damage_end_to_end(tiny_chat, tmp_path, capsys):
    out = tmp_path / "plan.json"
    flags = ["--ckpt", str(tiny_chat), "--tokens", "400", "--by", "damage", "--cache", "tailor:preset=best,centre=64,topk=32", "--device", "cpu"]
    assert calibrate.main([*flags, "--budget", "1GiB@4k", "--out", str(out)]) == 0
    plan = Plan.load(out)
    assert "by damage" in capsys.readouterr().out and len(plan.settings) == len(plan.scores) == len(plan.damage)
    assert all(("bits" in each) == (kind == "quantised") for each, kind in zip(plan.settings, plan.classes))
    for wrong in (["--budget", "1GiB@4k"], ["--out", str(out)], ["--budget", "1GiB@4k", "--loss", "1", "--out", str(out)], ["--budget", "1KiB@4k"], ["--budget", "1MiB@4k", "--out", str(out), "--cache", "full"]):
        try:
            assert calibrate.main([*flags, *wrong]) == 2
        except SystemExit as stopped:
            assert stopped.code == 2
