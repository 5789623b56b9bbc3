# SPDX-License-Identifier: Apache-2.0
"""The decoder against transformers in float32: logits, rotary tables, every spelling of the configuration."""

import copy
import itertools
import json

import pytest
import torch
from conftest import FAMILIES
from hypothesis import given, settings
from hypothesis import strategies as st

import kernels
import model as model_module
from cache import FullCache
from model import Llama, ModelConfig, inverse_frequencies

TOLERANCE = 1e-4
T = 83


@pytest.fixture(scope="module")
def pair(family):
    """`pair(name) -> (our model, ids [2, T], transformers' logits [2, T, vocab])`."""
    made = {}

    def make(name):
        if name not in made:
            folder, theirs = family(name)
            ids = torch.randint(0, theirs.config.vocab_size, (2, T), generator=torch.Generator().manual_seed(1))
            with torch.no_grad():
                logits = theirs(ids).logits
            made[name] = Llama.from_checkpoint(folder), ids, logits
        return made[name]

    return make


def close(ours, theirs):
    assert ours.dtype == theirs.dtype == torch.float32
    assert theirs.abs().max() > 0.5, "the reference's logits are too flat to prove anything"
    assert (ours - theirs).abs().max() <= TOLERANCE


@pytest.fixture
def chunk(monkeypatch):
    return lambda size: monkeypatch.setattr(Llama, "chunk", property(lambda self: size))


# -------------------------------------------------------------------------------------------------------------- logits


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("length", [1, 2, 31, T])
def test_logits_one_shot(pair, name, length):
    """A family computed wrong: bias dropped, q/k norm after the rotation, scaling ignored, heads grouped in the wrong order."""
    model, ids, logits = pair(name)
    close(model.prefill(ids[:1, :length], FullCache(model.config)), logits[:1, length - 1])


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("size", [1, 7, 32, T - 1])
def test_logits_chunked(pair, name, size, chunk):
    """Chunked prefill under-attends when the causal flag is aligned top-left, or rotates every chunk from position 0."""
    model, ids, logits = pair(name)
    chunk(size)
    close(model.prefill(ids[:1], FullCache(model.config)), logits[:1, -1])


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_token_by_token(pair, name):
    """Decode drifts from prefill: a position off by one, or a cached key rotated twice."""
    model, ids, logits = pair(name)
    cache = FullCache(model.config)
    close(model.prefill(ids[:1, :1], cache), logits[:1, 0])
    for t in range(1, T):
        close(model.decode(ids[:1, t : t + 1], cache), logits[:1, t])
    assert cache.length == T and cache.pos.tolist() == [T]


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_over_three_turns(pair, name, chunk):
    """A later turn prefilled onto a cache that decode has grown: wrong offset, or attention to the new tokens only."""
    model, ids, logits = pair(name)
    chunk(5)
    cache = FullCache(model.config)
    t = 0
    for prompt, answer in ((17, 6), (1, 4), (23, 9)):
        close(model.prefill(ids[:1, t : t + prompt], cache), logits[:1, t + prompt - 1])
        t += prompt
        for _ in range(answer):
            close(model.decode(ids[:1, t : t + 1], cache), logits[:1, t])
            t += 1


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_batch_of_two(pair, name, chunk):
    """Batch rows mixed up when heads are folded into the query axis."""
    model, ids, logits = pair(name)
    chunk(9)
    cache = FullCache(model.config)
    close(model.prefill(ids[:, :20], cache), logits[:, 19])
    close(model.prefill(ids[:, 20:41], cache), logits[:, 40])
    for t in range(41, 50):
        close(model.decode(ids[:, t : t + 1], cache), logits[:, t])


@pytest.mark.parametrize("group,head_dim", list(itertools.product((1, 3, 4), (24, 64, 80))))
def test_logits_of_odd_shapes(make_checkpoint, group, head_dim, chunk):
    """A head size or group size baked in: 64 only, powers of two only, hidden = heads * head_dim only."""
    folder, theirs = make_checkpoint("Llama", num_attention_heads=2 * group, num_key_value_heads=2, head_dim=head_dim, num_hidden_layers=2)
    model = Llama.from_checkpoint(folder)
    ids = torch.randint(0, theirs.config.vocab_size, (1, 41), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        logits = theirs(ids).logits
    chunk(13)
    cache = FullCache(model.config)
    close(model.prefill(ids[:, :30], cache), logits[:, 29])
    for t in range(30, 41):
        close(model.decode(ids[:, t : t + 1], cache), logits[:, t])


SPLIT = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 30), st.booleans(), st.none() | st.floats(0, 1)), min_size=1, max_size=12)


@given(steps=SPLIT, capacity=st.sampled_from([0, 1, 40, 200]))
@settings(max_examples=40)
def test_logits_do_not_depend_on_how_a_text_is_split(pair, steps, capacity):
    """Any mixture of prefill calls, chunk sizes, decode steps and crops is the same text."""
    model, ids, logits = pair("llama3.1")
    model = copy.copy(model)
    model.__class__ = type("Chunked", (Llama,), {"chunk": property(lambda self: size)})
    cache, t = FullCache(model.config, capacity=capacity), 0
    for size, tokens, decode, crop in steps:
        tokens = min(tokens, T - t)
        if decode and t and tokens:
            for t in range(t + 1, t + tokens + 1):
                close(model.decode(ids[:1, t - 1 : t], cache), logits[:1, t - 1])
        elif tokens:
            t += tokens
            close(model.prefill(ids[:1, t - tokens : t], cache), logits[:1, t - 1])
        if crop is not None:
            t = int(t * crop)
            cache.crop(t)


def test_logits_with_sdpa_reference(family):
    """The reference itself: transformers' two attention paths agree with each other and with us."""
    folder, theirs = family("llama3")
    theirs = copy.deepcopy(theirs)
    theirs.set_attn_implementation("sdpa")
    ids = torch.arange(60)[None]
    model = Llama.from_checkpoint(folder)
    with torch.no_grad():
        close(model.prefill(ids, FullCache(model.config)), theirs(ids).logits[:, -1])


def test_logits_after_thousands_of_tokens(family):
    """Twelve of the chunks that are really used, positions of four digits: a scratch buffer reused too early, an angle in too few bits."""
    folder, theirs = family("llama3.1")
    theirs = copy.deepcopy(theirs)
    theirs.set_attn_implementation("sdpa")
    model, cache = Llama.from_checkpoint(folder), FullCache(theirs.config)
    ids = torch.randint(0, theirs.config.vocab_size, (1, 6010), generator=torch.Generator().manual_seed(4))
    with torch.no_grad():
        logits = theirs(ids, logits_to_keep=11).logits
    close(model.prefill(ids[:, :6000], cache), logits[:, 0])
    for t in range(10):
        close(model.decode(ids[:, 6000 + t : 6001 + t], cache), logits[:, t + 1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bit_error_is_no_larger_than_the_references(pair, family, dtype):
    """A step done in 16 bits that must not be (norms, rotary angles, softmax): twice the reference's own error is the limit."""
    folder, theirs = family("llama3")
    _, ids, logits = pair("llama3")
    model = Llama.from_checkpoint(folder, dtype=dtype)
    cache = FullCache(model.config)
    out = model.prefill(ids[:1, :-1], cache)
    assert out.dtype == dtype and cache.k[0].dtype == dtype
    ours = (model.decode(ids[:1, -1:], cache).float() - logits[:1, -1]).abs().mean()
    with torch.no_grad():
        reference = (copy.deepcopy(theirs).to(dtype)(ids[:1]).logits[:, -1].float() - logits[:1, -1]).abs().mean()
    assert ours <= 2 * reference


def test_prefill_builds_no_large_tensor(pair, monkeypatch, chunk):
    """Logits for every position (33 GB at 128k x 128256 in bf16), an MLP over all tokens, or N x N scores."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        numel = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            for tensor in out if isinstance(out, (tuple, list)) else (out,):
                if isinstance(tensor, torch.Tensor):
                    self.numel = max(self.numel, tensor.numel())
            return out

    model, _, _ = pair("qwen2")
    chunk(64)
    ids = torch.randint(0, 211, (1, 3000))
    with Largest() as largest:
        model.prefill(ids, FullCache(model.config, capacity=3000))
    c = model.config
    assert largest.numel <= 3000 * max(c.hidden_size, c.head_dim * c.num_key_value_heads)


def test_progress_adds_up(pair, chunk):
    """A progress bar that ends at 97 % or 110 %."""
    model, ids, _ = pair("llama2")
    chunk(32)
    done = []
    model.prefill(ids, FullCache(model.config), done.append)
    assert sum(done) == T * model.config.num_hidden_layers and min(done) > 0


@pytest.mark.parametrize("bad,word", [(-1, "-1"), (211, "211"), (10**6, "1000000")])
def test_ids_outside_the_vocabulary_are_refused(pair, bad, word):
    """On a GPU an out-of-range embedding row is a device assert that kills the process; the cache must stay usable."""
    model, ids, logits = pair("llama2")
    cache = FullCache(model.config)
    model.prefill(ids[:1, :10], cache)
    with pytest.raises(ValueError, match=f"{word}.*211"):
        model.prefill(torch.tensor([[5, bad]]), cache)
    close(model.prefill(ids[:1, 10:20], cache), logits[:1, 19])


def test_empty_prompt_is_refused(pair):
    """An empty call that leaves the cache announced and unfinished."""
    model, ids, logits = pair("llama2")
    cache = FullCache(model.config)
    with pytest.raises(ValueError, match="empty"):
        model.prefill(torch.empty(1, 0, dtype=torch.long), cache)
    close(model.prefill(ids[:1], cache), logits[:1, -1])


def test_greedy_text_does_not_depend_on_capacity_or_history(pair):
    """transformers #30400: the text changed with max_new_tokens, and with what ran before in the process."""
    model, ids, _ = pair("llama3.1")

    def greedy(n, cache):
        token, out = model.prefill(ids[:1, :21], cache).argmax(-1, keepdim=True), []
        for _ in range(n):
            out.append(int(token))
            token = model.decode(token, cache).argmax(-1, keepdim=True)
        return out

    long = greedy(60, FullCache(model.config, capacity=81))
    used = FullCache(model.config)
    model.prefill(ids[:1, 5:60], used)
    used.reset()
    assert greedy(20, FullCache(model.config, capacity=41)) == long[:20]
    assert greedy(40, FullCache(model.config)) == long[:40]
    assert greedy(60, used) == long


def test_random_model_is_seeded_and_shaped():
    """from_config serves speed and memory tests: it must be the config's shape, tied where it says so, and repeatable."""
    raw = json.loads(json.dumps(RAW | {"tie_word_embeddings": True}))
    one, two, other = (Llama.from_config(ModelConfig.from_dict(raw), seed=seed) for seed in (3, 3, 4))
    assert torch.equal(one.layers[0].mlp.up_proj.weight, two.layers[0].mlp.up_proj.weight)
    assert not torch.equal(one.layers[0].mlp.up_proj.weight, other.layers[0].mlp.up_proj.weight)
    assert one.lm_head.weight is one.embed_tokens.weight
    assert one.norm.weight.unique().tolist() == [1.0] and 0.015 < one.embed_tokens.weight.std() < 0.025
    assert one.prefill(torch.tensor([[1, 2, 3]]), FullCache(one.config)).isfinite().all()


@pytest.mark.parametrize("place", ["input", "middle"])
def test_predicted_query_is_rotated_at_the_current_position(pair, monkeypatch, place):
    """TailorKV's predicted query: of the next layer's weights and its own norm, at the position being decoded; by kernels the same within rounding."""
    model, ids, _ = pair("qwen3")
    asked, foreseen = [], {}

    class Spy(FullCache):
        predicts_from = place

        def wants(self, layer):
            asked.append(layer)
            return layer == 2

        def foresee(self, layer, q):
            assert self._seen[layer - 1] == (place == "middle"), "from the input, foresee comes before attend(layer - 1), else after it"
            foreseen[layer] = q.clone()

    cache = Spy(model.config)
    model.prefill(ids[:1, :20], cache)
    assert not foreseen and not asked, "prediction is for decode only"
    before = {}
    module = model.layers[1] if place == "input" else model.layers[1].post_attention_layernorm
    hook = module.register_forward_pre_hook(lambda module, args: before.update(h=args[0].clone()))
    model.decode(ids[:1, 20:21], cache)
    hook.remove()
    assert set(asked) == {1, 2} and list(foreseen) == [2]
    layer = model.layers[2]
    expected = model.rotate_at(layer.self_attn.query(layer.input_layernorm(before["h"])), torch.tensor([20]))
    assert torch.equal(foreseen[2], expected) and foreseen[2].shape == (1, 4, 1, 40)
    cache.crop(20)
    monkeypatch.setattr(kernels, "FORCE", True)
    model.decode(ids[:1, 20:21], cache)
    torch.testing.assert_close(foreseen[2], expected)


def test_cache_that_rotates_gets_unrotated_keys(pair):
    """`rotary = "cache"`: q and k must arrive un-rotated with a rotation that works at any position."""
    model, ids, logits = pair("yarn")

    class Rotating(FullCache):
        rotary = "cache"

        def attend(self, layer, q, k, v, scale=None):
            start = self.length + self._seen[layer]
            positions = torch.arange(start, start + k.shape[2])
            return super().attend(layer, self.rotate(q, positions), self.rotate(k, positions), v, scale)

    cache = Rotating(model.config)
    close(model.prefill(ids[:1, :50], cache), logits[:1, 49])
    close(model.decode(ids[:1, 50:51], cache), logits[:1, 50])


# -------------------------------------------------------------------------------------------------------------- rotary

RAW = {
    "model_type": "llama",
    "vocab_size": 99,
    "hidden_size": 256,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 4096,
    "rope_theta": 10000.0,
}
FIVE = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192, "rope_type": "llama3"}
LONG = {"max_position_embeddings": 131072}

# As the files of well-known checkpoints spell it, then the corners of each type.
SPELLINGS = {
    "Llama-3.1-8B": LONG | {"rope_theta": 500000.0, "rope_scaling": FIVE, "head_dim": 128},
    "Llama-3.2-1B": LONG | {"rope_theta": 500000.0, "rope_scaling": FIVE | {"factor": 32.0}, "head_dim": 64},
    "llama3 in rope_parameters": LONG | {"rope_theta": ..., "rope_parameters": FIVE | {"rope_theta": 500000.0}},
    "llama3 with type": LONG | {"rope_theta": 500000.0, "rope_scaling": {key: value for key, value in FIVE.items() if key != "rope_type"} | {"type": "llama3"}},
    "llama3 with both names": LONG | {"rope_theta": 500000, "rope_scaling": FIVE | {"type": "llama3"}},
    "Llama-2-7B-32K": {"max_position_embeddings": 32768, "rope_theta": ..., "rope_scaling": {"factor": 8.0, "type": "linear"}, "head_dim": 128},
    "linear in rope_parameters": {"rope_theta": ..., "rope_parameters": {"rope_type": "linear", "factor": 2.5, "rope_theta": 1e6}},
    "Yi-6B-200K": {"max_position_embeddings": 200000, "rope_theta": 5000000.0, "head_dim": 128},
    "TinyLlama": {"max_position_embeddings": 2048, "rope_scaling": None, "head_dim": 64},
    "Llama-3-8B": {"max_position_embeddings": 8192, "rope_theta": 500000.0, "rope_scaling": None},
    "Mistral-7B-v0.3": {"model_type": "mistral", "sliding_window": None, "rope_theta": 1000000.0, "max_position_embeddings": 32768},
    "default in rope_parameters": {"rope_theta": ..., "rope_parameters": {"rope_type": "default", "rope_theta": 250000.0}},
    "theta beside rope_parameters": {"rope_theta": 70000.0, "rope_parameters": {"rope_type": "default"}},
    "theta inside wins": {"rope_theta": 70000.0, "rope_parameters": {"rope_type": "default", "rope_theta": 80000.0}},
    "rope_scaling wins over rope_parameters": {"rope_scaling": {"type": "linear", "factor": 3.0}, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    "empty rope_scaling": {"rope_scaling": {}, "rope_theta": 12345.0},
    "no theta": {"rope_theta": ...},
    "integer theta and factor": {"rope_theta": 10000, "rope_scaling": {"type": "linear", "factor": 4}},
    "Qwen2.5 yarn": {"model_type": "qwen2", "max_position_embeddings": 32768, "rope_theta": 1000000.0, "rope_scaling": {"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"}},
    "Qwen3 yarn": LONG | {"model_type": "qwen3", "head_dim": 128, "rope_theta": 1000000, "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}},
    "Yarn-Llama-2-7b-128k": LONG | {"rope_scaling": {"factor": 32.0, "original_max_position_embeddings": 4096, "type": "yarn", "finetuned": True}, "head_dim": 128},
    "yarn, no original": LONG | {"rope_scaling": {"type": "yarn", "factor": 4.0}},
    "yarn, original beside": LONG | {"original_max_position_embeddings": 16384, "rope_scaling": {"type": "yarn", "factor": 8.0}},
    "yarn, original beside wins": LONG | {"original_max_position_embeddings": 16384, "rope_scaling": {"type": "yarn", "factor": 8.0, "original_max_position_embeddings": 2048}},
    "yarn, factor null": LONG | {"rope_scaling": {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 8192}},
    "yarn, betas": LONG | {"rope_scaling": {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 8192, "beta_fast": 20.0, "beta_slow": 2}},
    "yarn, betas null": LONG | {"rope_scaling": {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 8192, "beta_fast": None, "beta_slow": None}},
    "yarn, mscale": LONG | {"rope_scaling": {"rope_type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "mscale": 0.707, "mscale_all_dim": 1.0}},
    "yarn, mscale alone": LONG | {"rope_scaling": {"rope_type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "mscale": 0.707}},
    "yarn, mscale zero": LONG | {"rope_scaling": {"rope_type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "mscale": 0.707, "mscale_all_dim": 0}},
    "yarn, attention_factor": LONG | {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768, "attention_factor": 1.5}},
    "yarn, attention_factor wins": LONG | {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768, "attention_factor": 1.25, "mscale": 2.0, "mscale_all_dim": 1.0}},
    "yarn, not truncated": LONG | {"rope_scaling": {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False}},
    "yarn, factor below one": {"rope_scaling": {"rope_type": "yarn", "factor": 0.5, "original_max_position_embeddings": 4096}},
    "yarn, tiny original": {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}},
    "yarn, equal betas": LONG | {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096, "beta_fast": 3.0, "beta_slow": 3.0, "truncate": False}},
    "llama3, no original": LONG | {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}},
}


@pytest.fixture
def spelled(tmp_path):
    """`spelled(overrides) -> (our config, transformers' config)`, both read from the same config.json."""
    import transformers

    def read(overrides):
        raw = {key: value for key, value in (RAW | overrides).items() if value is not ...}
        (tmp_path / "config.json").write_text(json.dumps(raw))
        return ModelConfig.from_dict(json.loads(json.dumps(raw))), transformers.AutoConfig.from_pretrained(tmp_path)

    return read


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", SPELLINGS)
def test_rotary_tables_equal_transformers(spelled, name):
    """Scaling dropped, theta hidden in a default, or a spelling not read: fine on short input, gibberish past it."""
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    ours, theirs = spelled(SPELLINGS[name])
    rotary = LlamaRotaryEmbedding(theirs)
    inv_freq, scaling = inverse_frequencies(ours)
    assert inv_freq.dtype == torch.float32 and torch.equal(inv_freq, rotary.inv_freq), "not bit-equal"
    assert scaling == rotary.attention_scaling
    with torch.device("meta"):
        model = Llama(ours)
    model.inv_freq, model.rope_scaling = inverse_frequencies(ours)
    model.embed_tokens = torch.nn.Embedding(1, 1)  # device and dtype come from here
    positions = torch.tensor([0, 1, 255, 8191, 131071, 200000])
    cos, sin = model.rope(positions)
    their_cos, their_sin = rotary(torch.zeros(1, dtype=torch.float32), positions[None])
    assert (cos - their_cos[0]).abs().max() <= 1e-6 and (sin - their_sin[0]).abs().max() <= 1e-6


def test_spellings_differ(recwarn):
    """A comparison of defaults with defaults proves nothing: each spelling must change the table it should change."""
    tables = [inverse_frequencies(ModelConfig.from_dict({k: v for k, v in (RAW | overrides).items() if v is not ...})) for overrides in SPELLINGS.values()]
    assert len({(tuple(inv_freq.tolist()), scaling) for inv_freq, scaling in tables}) >= 25


def test_missing_theta_warns():
    """gpt-fast #179: theta quietly 10000 where the checkpoint needs 500000 is gibberish at 2,000 tokens."""
    raw = {key: value for key, value in RAW.items() if key != "rope_theta"}
    with pytest.warns(UserWarning, match="rope_theta.*10000"):
        assert ModelConfig.from_dict(raw).rope_parameters["rope_theta"] == 10000


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", ["Llama-3.1-8B", "Yi-6B-200K", "Qwen2.5 yarn", "yarn, mscale", "default in rope_parameters", "llama3 with both names"])
def test_ordinary_files_do_not_warn(name):
    """Warnings that everybody sees are read by nobody."""
    ModelConfig.from_dict({key: value for key, value in (RAW | SPELLINGS[name]).items() if value is not ...})


def test_settings_without_effect_warn():
    """A misspelt setting (`beta-fast`) silently ignored."""
    with pytest.warns(UserWarning, match="beta_fats"):
        ModelConfig.from_dict(RAW | {"rope_scaling": {"type": "yarn", "factor": 2.0, "beta_fats": 3}})


def test_reading_does_not_change_the_file_content():
    """The fingerprint is taken over the raw config: reading must not edit it."""
    raw = RAW | {"rope_scaling": {"type": "linear", "factor": 2.0}}
    before = json.dumps(raw)
    ModelConfig.from_dict(raw)
    assert json.dumps(raw) == before


REFUSED = {
    "dynamic": ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "dynamic"),
    "longrope": ({"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}}, "longrope"),
    "su": ({"rope_scaling": {"type": "su"}}, "su"),
    "mrope": ({"model_type": "qwen2", "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}}, "mrope"),
    "unknown type": ({"rope_scaling": {"rope_type": "spiral", "factor": 2.0}}, "spiral"),
    "unknown type in rope_parameters": ({"rope_parameters": {"rope_type": "proportional", "rope_theta": 1e4}}, "proportional"),
    "partial rotary": ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
    "partial rotary inside": ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25}}, "partial_rotary_factor 0.25"),
    "per layer type": ({"rope_parameters": {"full_attention": {"rope_type": "default"}, "sliding_attention": {"rope_type": "default"}}}, "full_attention"),
    "linear without factor": ({"rope_scaling": {"type": "linear"}}, "factor"),
    "linear, factor zero": ({"rope_scaling": {"type": "linear", "factor": 0}}, "factor"),
    "linear, factor a text": ({"rope_scaling": {"type": "linear", "factor": "8"}}, "factor"),
    "llama3 without low_freq_factor": ({"rope_scaling": {key: value for key, value in FIVE.items() if key != "low_freq_factor"}}, "low_freq_factor"),
    "yarn without factor": ({"rope_scaling": {"type": "yarn", "original_max_position_embeddings": "x"}}, "original_max_position_embeddings|factor"),
    "yarn, beta a text": ({"rope_scaling": {"type": "yarn", "factor": 2.0, "beta_fast": "32"}}, "beta_fast"),
    "rope_scaling a text": ({"rope_scaling": "linear"}, "rope_scaling"),
    "rope_scaling a list": ({"rope_scaling": [8.0]}, "rope_scaling"),
    "rope_type a list": ({"rope_scaling": {"rope_type": ["yarn"], "factor": 2.0}}, "rope_type"),
    "theta a text": ({"rope_theta": "10000"}, "rope_theta"),
    "theta negative": ({"rope_theta": -1.0}, "rope_theta"),
    "mistral window": ({"model_type": "mistral", "sliding_window": 4096}, "sliding_window.*4096"),
    "mistral, no word of a window": ({"model_type": "mistral"}, "sliding_window"),
    "qwen2 window on": ({"model_type": "qwen2", "sliding_window": 512, "use_sliding_window": True, "max_window_layers": 1}, "sliding_window.*512"),
    "qwen3 layer types": ({"model_type": "qwen3", "sliding_window": 512, "use_sliding_window": True, "max_window_layers": 99, "layer_types": ["full_attention", "sliding_attention"]}, "sliding_window"),
    "gpt2": ({"model_type": "gpt2"}, "gpt2"),
    "mixtral": ({"model_type": "mixtral"}, "mixtral"),
    "gemma": ({"model_type": "gemma2"}, "gemma2"),
    "phi3": ({"model_type": "phi3"}, "phi3"),
    "no model_type": ({"model_type": ...}, "model_type"),
    "classifier": ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
    "gelu": ({"hidden_act": "gelu"}, "gelu"),
    "gptq": ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "gptq"),
    "quantization_config a text": ({"quantization_config": "int4"}, "quantization_config"),
    "heads do not divide": ({"num_attention_heads": 4, "num_key_value_heads": 3}, "4.*3"),
    "odd head_dim": ({"head_dim": 25}, "25"),
    "hidden size zero": ({"hidden_size": 0}, "hidden_size = 0"),
    "layers a text": ({"num_hidden_layers": "2"}, "num_hidden_layers = '2'"),
    "layers a text, qwen": ({"model_type": "qwen2", "use_sliding_window": True, "num_hidden_layers": "2"}, "num_hidden_layers = '2'"),
    "eps a text": ({"rms_norm_eps": "1e-5"}, "rms_norm_eps"),
    **{f"no {name}": ({name: ...}, name) for name in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "rms_norm_eps", "max_position_embeddings")},
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_supported_is_refused_by_name(name):
    """A model that needs something else runs wrong without a word; or a strange file ends in a traceback."""
    overrides, words = REFUSED[name]
    with pytest.raises(ValueError, match=words) as error:
        ModelConfig.from_dict({key: value for key, value in (RAW | overrides).items() if value is not ...})
    assert "\n" not in str(error.value)


ACCEPTED = {
    "qwen2 names a window and switches it off": {"model_type": "qwen2", "sliding_window": 32768, "use_sliding_window": False, "max_window_layers": 28},
    "qwen2 says nothing": {"model_type": "qwen2", "sliding_window": 131072},
    "qwen2 gives it to layers that do not exist": {"model_type": "qwen2", "sliding_window": 32768, "use_sliding_window": True, "max_window_layers": 2},
    "qwen3 null": {"model_type": "qwen3", "sliding_window": None, "use_sliding_window": False, "layer_types": ["full_attention"] * 2},
    "mistral null": {"model_type": "mistral", "sliding_window": None},
    "llama does not know windows": {"sliding_window": 4096},
    "partial factor one": {"partial_rotary_factor": 1.0},
    "key/value heads absent": {"num_key_value_heads": ...},
    "architectures null": {"architectures": None},
    "quantization_config null": {"quantization_config": None},
    "hidden_act absent": {"hidden_act": ...},
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_inactive_options_are_accepted(name):
    """Qwen's files name a sliding window that is off: refusing them would refuse the family."""
    config = ModelConfig.from_dict({key: value for key, value in (RAW | ACCEPTED[name]).items() if value is not ...})
    assert config.num_key_value_heads == (4 if name == "key/value heads absent" else 2)


def test_class_defaults_are_the_families_own(spelled):
    """Fields that a file leaves out mean what transformers' class of that family says, not what Llama's says."""
    for overrides in ({"model_type": "mistral", "num_key_value_heads": ..., "num_attention_heads": 8, "sliding_window": None}, {"model_type": "qwen3"}, {"model_type": "llama"}):
        ours, theirs = spelled(overrides)
        assert ours.head_dim == (getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads)
        assert ours.num_key_value_heads == theirs.num_key_value_heads
        assert ours.tie_word_embeddings == theirs.tie_word_embeddings


def test_rotation_pairs_halves_not_neighbours():
    """Interleaved and half-split rotary layouts look alike in every shape; weights of one are gibberish in the other."""
    x = torch.zeros(1, 1, 1, 4)
    x[..., 1] = 1.0
    angle = torch.tensor([[0.3, 0.7, 0.3, 0.7]])
    expected = torch.tensor([0.0, torch.tensor(0.7).cos(), 0.0, torch.tensor(0.7).sin()])
    assert torch.allclose(model_module.rotate(x, angle.cos(), angle.sin())[0, 0, 0], expected)


# ----------------------------------------------------------------------------------------------------------------- GPU


@pytest.mark.gpu
@pytest.mark.parametrize("name", FAMILIES)
def test_gpu_logits_equal_cpu(family, pair, name, chunk):
    """The GPU's kernels (memory-efficient in float32) compute something else than the CPU's."""
    folder, _ = family(name)
    _, ids, logits = pair(name)
    chunk(19)
    model = Llama.from_checkpoint(folder, device="cuda")
    cache = FullCache(model.config, device="cuda")
    close(model.prefill(ids[:, :60], cache).cpu(), logits[:, 59])
    for t in range(60, 66):
        close(model.decode(ids[:, t : t + 1].cuda(), cache).cpu(), logits[:, t])


@pytest.mark.gpu
def test_gpu_decode_step_has_no_host_sync(family, pair):
    """A hidden .item() in the step: it could not be captured in a CUDA graph, and every layer would wait for the device."""
    folder, _ = family("llama3")
    _, ids, logits = pair("llama3")
    model = Llama.from_checkpoint(folder, device="cuda")
    cache = FullCache(model.config, device="cuda", capacity=T)
    model.prefill(ids[:1, :40], cache)
    token = ids[:1, 40:41].cuda()
    cache.begin(1, decode=True)
    torch.cuda.set_sync_debug_mode("error")
    try:
        out = model.step(token, cache)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    cache.end()
    close(out.cpu(), logits[:1, 40])
