# SPDX-License-Identifier: Apache-2.0
"""Sampling, stop strings, sessions, the command line and its answers to bad input."""

import io
import json
import math
import os
import re
import shutil
import subprocess
import sys
import types

import psutil
import pytest
import torch
from conftest import ROOT, raising
from hypothesis import given, settings
from hypothesis import strategies as st

import generate as program
from cache import CACHES, FullCache
from generate import Sampler, Sampling, Session, Stepper, StopStrings, fit, generate, parse_tokens
from model import Llama, ModelConfig, read_config
from tokenizer import Tokenizer

# ------------------------------------------------------------------------------------------------------------ sampling


def distribution(sampling, logits, ids=None):
    """The probabilities that a Sampler draws from: what it races, with noise of 1."""
    seen = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "exponential_", lambda self, *args, **options: self.fill_(1.0))
        plain = torch.Tensor.argmax
        patch.setattr(torch.Tensor, "argmax", lambda self, *args, **options: (seen.append(self.clone()), plain(self, *args, **options))[1])
        Sampler(sampling, torch.zeros(logits.shape[0], 1, dtype=torch.long) if ids is None else ids, logits.shape[-1])(logits)
    return seen[-1] / seen[-1].sum(-1, keepdim=True)


def reference(sampling, logits, ids):
    """The same by transformers' processors, in the order of its generate()."""
    import transformers as tf

    if sampling.repetition_penalty != 1:
        logits = tf.RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty)(ids, logits)
    steps = [tf.TemperatureLogitsWarper(sampling.temperature)]
    steps += [tf.TopKLogitsWarper(sampling.top_k)] if sampling.top_k else []
    steps += [tf.TopPLogitsWarper(sampling.top_p)] if sampling.top_p < 1 else []
    steps += [tf.MinPLogitsWarper(sampling.min_p)] if sampling.min_p else []
    for step in steps:
        logits = step(ids, logits)
    return logits.softmax(-1)


SETTINGS = [
    {"temperature": 1.0},
    {"temperature": 0.3},
    {"temperature": 2.5},
    {"temperature": 1.0, "top_k": 1},
    {"temperature": 0.8, "top_k": 7},
    {"temperature": 1.0, "top_k": 10**6},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 1.3, "top_p": 0.31},
    {"temperature": 1.0, "top_p": 1e-6},
    {"temperature": 1.0, "min_p": 0.1},
    {"temperature": 1.0, "min_p": 1.0},
    {"temperature": 0.7, "repetition_penalty": 1.3},
    {"temperature": 0.7, "repetition_penalty": 0.7},
    {"temperature": 0.9, "top_k": 20, "top_p": 0.8, "min_p": 0.05, "repetition_penalty": 1.2},
    {"temperature": 0.9, "top_k": 3, "top_p": 0.99},
]


@pytest.mark.parametrize("options", SETTINGS, ids=str)
def test_distribution_equals_transformers(options):
    """The first token past the nucleus kept or lost, filters in another order, penalty after temperature."""
    generator = torch.Generator().manual_seed(3)
    logits = 3 * torch.randn(16, 97, generator=generator)
    ids = torch.randint(0, 97, (16, 30), generator=generator)
    sampling = Sampling(**options)
    ours, theirs = distribution(sampling, logits, ids), reference(sampling, logits, ids)
    assert torch.equal(ours > 0, theirs > 0), "another set of tokens is kept"
    assert (ours - theirs).abs().max() < 1e-5


def test_penalty_counts_drawn_tokens():
    """The penalty forgets what was generated and counts the prompt only."""
    sampler = Sampler(Sampling(repetition_penalty=10.0), torch.tensor([[0]]), 4)
    logits = torch.tensor([[9.0, 4.0, 3.0, 2.0]])
    assert [int(sampler(logits)) for _ in range(4)] == [1, 2, 3, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_temperature_zero_is_argmax(dtype):
    """nanoGPT #738: a division by zero; here also with filters set, and ties going to the lowest id."""
    logits = torch.randn(5, 300).to(dtype)
    for options in ({}, {"top_k": 3, "top_p": 0.5, "min_p": 0.2}):
        assert torch.equal(Sampler(Sampling(**options), torch.zeros(5, 1).long(), 300)(logits), logits.argmax(-1, keepdim=True))
    assert int(Sampler(Sampling(), torch.zeros(1, 1).long(), 4)(torch.tensor([[1.0, 2.0, 2.0, 0.0]]))) == 1


@pytest.mark.parametrize("vocab", [1, 511, 512, 513, 1500])
def test_argmax_by_blocks(vocab):
    """The first of equal maxima, also where they lie in several blocks, at an edge, or are all minus infinity; and NaN, as PyTorch has it."""
    x = torch.randint(0, 3, (40, vocab), generator=torch.Generator().manual_seed(vocab)).bfloat16()
    x[1], x[2], x[3, -1], x[4, vocab // 2] = -math.inf, 0, math.inf, math.nan
    x[5:, : vocab * 2 // 3] = -1
    assert torch.equal(program._argmax(x), x.argmax(-1, keepdim=True)) and torch.equal(program._argmax(x.float()), x.argmax(-1, keepdim=True))


@pytest.mark.parametrize("temperature", [1e-9, 1e-30, 1e-300, 1e30])
def test_extreme_temperatures(temperature):
    """A tiny temperature overflows to inf - inf = NaN; a huge one must be uniform, not broken."""
    logits = 50 * torch.randn(1, 50)
    p = distribution(Sampling(temperature=temperature), logits)
    assert p.isfinite().all() and abs(float(p.sum()) - 1) < 1e-5
    if temperature < 1:
        assert int(p.argmax()) == int(logits.argmax()) and float(p.max()) == 1


@pytest.mark.parametrize("options", [{"temperature": 1.0}, {"temperature": 0.7, "top_k": 6}, {"temperature": 1.5, "top_p": 0.8}, {"temperature": 1.0, "min_p": 0.2}], ids=str)
def test_frequencies(options):
    """The exponential race drawn with the wrong quotient is biased in a way that no single text shows. (Chi-square, fixed seed.)"""
    n = 40_000
    logits = torch.tensor([[2.0, 1.5, 1.0, 0.5, 0.0, -0.5, -1.0, -1.5, -2.0, -2.5]])
    p = distribution(Sampling(**options), logits)[0].double()
    drawn = Sampler(Sampling(**options, seed=7), torch.zeros(n, 1).long(), 10)(logits.expand(n, -1))
    counts = drawn.flatten().bincount(minlength=10)
    assert not counts[p == 0].any(), "a token outside the kept set was drawn"
    kept = p > 0
    chi_square = float(((counts[kept] - n * p[kept]) ** 2 / (n * p[kept])).sum())
    assert chi_square < 45, chi_square  # 9 degrees of freedom: one in a million


def test_seed():
    """Same seed, same tokens; another seed, others; and the global generator is neither used nor moved."""
    logits = torch.zeros(1, 1000)

    def draw(seed):
        sampler = Sampler(Sampling(temperature=1.0, seed=seed), torch.zeros(1, 1).long(), 1000)
        return [int(sampler(logits)) for _ in range(20)]

    state = torch.get_rng_state()
    first = draw(5)
    torch.manual_seed(99)
    assert draw(5) == first != draw(6) and len(set(first)) > 10
    torch.set_rng_state(state)


@pytest.mark.parametrize(
    "name,value",
    [("temperature", -0.1), ("temperature", math.inf), ("temperature", math.nan), ("top_k", -1), ("top_p", 0.0), ("top_p", 1.1), ("top_p", math.nan), ("min_p", -0.1), ("min_p", 1.5), ("repetition_penalty", 0.0), ("repetition_penalty", -1.0), ("repetition_penalty", math.inf), ("seed", -1), ("seed", 2**63)],
)
def test_out_of_range(name, value):
    """A value that makes no sense silently clamped, or a NaN in the middle of the answer; the message has name, value and range."""
    with pytest.raises(ValueError, match=rf"{name} is {re.escape(str(value))}; it must be"):
        Sampling(**{name: value})


def test_sampler_does_no_host_sync():
    """torch.multinomial waits for the device."""
    from test_cache import NoSync

    sampler = Sampler(Sampling(temperature=0.8, top_k=5, top_p=0.9, min_p=0.01, repetition_penalty=1.1), torch.zeros(1, 3).long(), 64)
    with NoSync():
        for _ in range(5):
            sampler(torch.randn(1, 64))


# -------------------------------------------------------------------------------------------------------- stop strings


def stopped(strings, pieces):
    stopper, out = StopStrings(strings), ""
    for piece in pieces:
        out += stopper.push(piece)
        if stopper.hit:
            return out, True
    return out + stopper.flush(), False


@given(text=st.text("ab.", max_size=30), strings=st.lists(st.text("ab.", min_size=1, max_size=5), max_size=3), cuts=st.lists(st.integers(0, 30), max_size=8))
@settings(max_examples=300)
def test_stop_strings_whatever_the_pieces(text, strings, cuts):
    """A stop string cut over two tokens is missed, its beginning printed, or text is swallowed; and token borders decide the result."""
    edges = sorted({0, len(text), *(min(cut, len(text)) for cut in cuts)})
    pieces = [text[a:b] for a, b in zip(edges, edges[1:])]
    ends = [(text.find(s) + len(s), text.find(s)) for s in strings if s in text]
    assert stopped(strings, pieces) == ((text[: min(ends)[1]], True) if ends else (text, False))


def test_stop_strings_hold_back_no_more_than_needed():
    """Streaming that waits for the whole answer because a stop string might begin."""
    stopper = StopStrings(["\n\nUser:", "."])
    assert [stopper.push(piece) for piece in ("Hi", "\n", "\nU", "nited", " a.b")] == ["Hi", "", "", "\n\nUnited", " a"]
    assert stopper.hit


# ------------------------------------------------------------------------------------------------------------- session


@pytest.fixture(scope="module")
def loaded(tiny_chat):
    return Llama.from_checkpoint(tiny_chat), Tokenizer.from_checkpoint(tiny_chat)


@pytest.fixture
def session(loaded):
    model, tokenizer = loaded
    return Session(model, tokenizer, FullCache(model.config))


def fresh(loaded):
    return Session(*loaded, FullCache(loaded[0].config))


IDS = list(range(40, 75))


def test_greedy_ids_equal_transformers_generate(loaded, tiny_chat):
    """The loop itself: the first token taken from the wrong row, a token decoded twice, the stop id yielded."""
    import transformers

    theirs = transformers.AutoModelForCausalLM.from_pretrained(tiny_chat).eval()
    model, tokenizer = loaded
    for start in range(10, 60, 10):
        ids = list(range(start, start + 25))
        with torch.no_grad():
            out = theirs.generate(torch.tensor([ids]), max_new_tokens=40, do_sample=False, eos_token_id=sorted(tokenizer.stop_ids), pad_token_id=0)[0, 25:].tolist()
        out = out[:-1] if out[-1] in tokenizer.stop_ids else out
        assert list(generate(model, FullCache(model.config), ids, 40, stop_ids=tokenizer.stop_ids)) == out


def test_stop_id_ends_and_is_not_yielded(loaded):
    """Every id that ends a turn must end it; and it may not be printed."""
    model, _ = loaded
    plain = list(generate(model, FullCache(model.config), IDS, 30))
    stop = plain[5]
    at = plain.index(stop)
    assert list(generate(model, FullCache(model.config), IDS, 30, stop_ids={stop})) == plain[:at]


@pytest.mark.parametrize("n", [0, 1, 2, 7])
def test_max_new_tokens_is_exact_and_wastes_no_step(loaded, n):
    """One token too many or too few; or a decode step whose result nobody sees."""
    model, _ = loaded
    cache = FullCache(model.config)
    out = list(generate(model, cache, IDS, n))
    assert len(out) == n and cache.length == len(IDS) + max(0, n - 1)
    assert out == list(generate(model, FullCache(model.config), IDS, 20))[:n]


class Replay:
    """Stands in for a CUDA graph on a CPU: captures nothing, and runs the step when it is replayed."""

    def __init__(self, step, token, fail):
        if fail:
            step.cache.attend(0, *(torch.zeros(1, heads, 1, 24) for heads in (4, 2, 2)))  # half of the step has been seen
            raise fail
        self.token = token.clone()
        self.replay = lambda: self.token.copy_(step.sampler(step.model.step(self.token, step.cache)))


@pytest.fixture
def capturing(monkeypatch):
    """Makes `Stepper` use `Replay`; `capturing.fail` is raised by the next capture, `capturing.epochs` are those captured."""
    state = types.SimpleNamespace(fail=None, epochs=[])

    def capture(step, token):
        fail, state.fail = state.fail, None
        step.graph = Replay(step, token, fail)
        step.token, step.epoch = step.graph.token, step.cache.epoch
        state.epochs.append(step.epoch)

    monkeypatch.setattr(Stepper, "_capture", capture)
    monkeypatch.setattr(FullCache, "capturable", lambda self: True)
    return state


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.8, seed=5, repetition_penalty=1.2)])
def test_replayed_steps_give_the_same_tokens(loaded, capturing, sampling):
    """A step run twice, a token lost between graph and loop, a graph kept although the buffers it points to were replaced."""
    model, cache = loaded[0], FullCache(loaded[0].config, capacity=len(IDS) + 12)
    plain = list(generate(model, FullCache(model.config), IDS, 120, sampling, graph=False))
    assert not capturing.epochs
    assert list(generate(model, cache, IDS, 120, sampling)) == plain and cache.length == len(IDS) + 119
    assert len(capturing.epochs) == len(set(capturing.epochs)) == 3  # one, and one for each time the cache grew


def test_a_failed_capture_falls_back(loaded, capturing):
    """A driver that cannot capture must cost speed, not the answer; and say so once."""
    model, cache = loaded[0], FullCache(loaded[0].config)
    capturing.fail = RuntimeError("operation not permitted when stream is capturing")
    with pytest.warns(UserWarning, match="without a CUDA graph.*not permitted") as caught:
        out = list(generate(model, cache, IDS, 20))
    assert out == list(generate(model, FullCache(model.config), IDS, 20, graph=False)) and len(caught) == 1 and not capturing.epochs


def test_an_interrupted_capture_has_not_happened(loaded, capturing):
    """Ctrl-C while the graph is captured, then the answer goes on."""
    model, cache = loaded[0], FullCache(loaded[0].config)
    plain = torch.tensor(list(generate(model, FullCache(model.config), IDS, 20, graph=False)))
    logits = model.prefill(torch.tensor([IDS]), cache)
    sampler = Sampler(Sampling(), torch.tensor([IDS]), logits.shape[-1])
    step, tokens = Stepper(model, cache, sampler), [sampler(logits)]
    for i in range(19):
        if i in (1, 2):
            capturing.fail = KeyboardInterrupt()
            step.graph = None
            with pytest.raises(KeyboardInterrupt):
                step(tokens[-1])
        tokens.append(step(tokens[-1]).clone())
    assert torch.equal(torch.cat(tokens, 1)[0], plain)


def test_reply_text_is_the_decoded_ids(session, loaded):
    """Pieces that do not add up to the text: characters lost or doubled at token borders."""
    pieces = list(session.reply(IDS, 50))
    model, tokenizer = loaded
    ids = list(generate(model, FullCache(model.config), IDS, 50, stop_ids=tokenizer.stop_ids))
    assert "".join(pieces) == session.stats["text"] == tokenizer.decode(ids)
    assert len(pieces) > 5 and session.ids == IDS + ids
    assert session.stats["new_tokens"] == len(ids) and session.stats["prompt_tokens"] == len(IDS)


def test_stats(session):
    """Fields of the closing summary."""
    list(session.reply(IDS, 4))
    stats = session.stats
    assert stats["stop_reason"] == "length" and stats["kept_tokens"] == stats["dropped_tokens"] == 0
    assert stats["ttft_s"] > 0 and stats["decode_ms"] > 0
    list(session.reply(IDS, 1))
    assert session.stats["decode_ms"] is None and session.stats["ttft_s"] > 0 and session.stats["stop_reason"] == "length"
    assert list(session.reply(IDS, 0)) == [] and session.stats["new_tokens"] == 0 and session.stats["stop_reason"] == "length"


def test_stop_string(session, loaded):
    """The answer ends before the stop string, and the next turn does not contain it."""
    text = "".join(session.reply(IDS, 40))
    at = len(text) // 2
    stop = text[at : at + 2]
    cut = text[: text.find(stop)]
    again = fresh(loaded)
    assert "".join(again.reply(IDS, 40, stop=["never", stop])) == cut == again.stats["text"]
    assert again.stats["stop_reason"] == "stop" and again.stats["new_tokens"] < 40


def test_later_turn_keeps_the_common_prefix(session, loaded):
    """A turn that is prefilled from scratch is slow; one that keeps too much is wrong."""
    first = list(IDS)
    list(session.reply(first, 12))
    second = session.ids + [300, 301, 302, 5, 6]
    text = "".join(session.reply(second, 12))
    assert session.stats["kept_tokens"] == len(second) - 5 - 1  # the last token of an answer was never run
    assert session.stats["dropped_tokens"] == 0
    other = fresh(loaded)
    assert "".join(other.reply(second, 12)) == text and other.stats["kept_tokens"] == 0


@pytest.mark.parametrize("change", ["same", "shorter", "diverges", "diverges at once", "answer differs", "one token"])
def test_turns_that_do_not_simply_go_on(session, loaded, change):
    """Rows of an old text left behind the new one; a prompt that is wholly cached has no token left to run."""
    list(session.reply(IDS, 12))
    held = session.cache.length
    prompt, kept = {
        "same": (IDS, len(IDS) - 1),
        "shorter": (IDS[:20], 19),
        "diverges": (IDS[:20] + [7, 8, 9], 20),
        "diverges at once": ([9, *IDS], 0),
        "answer differs": (session.ids[:38] + [9, 9, 9], 38),
        "one token": (IDS[:1], 0),
    }[change]
    text = "".join(session.reply(prompt, 12))
    assert session.stats["kept_tokens"] == kept
    same = next((i for i, (a, b) in enumerate(zip(session.ids, prompt)) if a != b), len(prompt))
    assert session.stats["dropped_tokens"] == held - min(same, {"same": 35, "shorter": 20, "one token": 1}.get(change, kept))
    other = fresh(loaded)
    assert "".join(other.reply(prompt, 12)) == text and other.ids == session.ids
    assert session.cache.length == other.cache.length


@pytest.mark.parametrize("step", [1, 2, 5])
def test_interrupt_during_the_answer(session, loaded, monkeypatch, step):
    """Ctrl-C in a decode step: what was said stays said, and the next turn is right."""
    plain, count = Llama.decode, iter(range(1, 100))

    def decode(self, ids, cache):
        if next(count) == step:
            raise KeyboardInterrupt
        return plain(self, ids, cache)

    text = ""
    with monkeypatch.context() as patch:
        patch.setattr(Llama, "decode", decode)
        with pytest.raises(KeyboardInterrupt):
            for piece in session.reply(IDS, 30):
                text += piece
    stats = session.stats
    assert stats["stop_reason"] == "interrupt" and stats["new_tokens"] == step and stats["text"].startswith(text)
    assert stats["text"] == loaded[1].decode(session.ids[len(IDS) :])
    again = session.ids + [3, 4, 5]
    other = fresh(loaded)
    assert "".join(session.reply(again, 9)) == "".join(other.reply(again, 9)) and session.stats["kept_tokens"] == len(IDS) + step - 1


def test_interrupt_during_prefill(session, loaded, monkeypatch):
    """Ctrl-C before the first token: no time to first token, nothing kept, and the session goes on."""
    with monkeypatch.context() as patch:
        patch.setattr(loaded[0].layers[1].mlp, "forward", raising(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            list(session.reply(IDS, 30))
    stats = session.stats
    assert (stats["stop_reason"], stats["new_tokens"], stats["ttft_s"], stats["text"]) == ("interrupt", 0, None, "")
    assert "".join(session.reply(IDS, 9)) == "".join(fresh(loaded).reply(IDS, 9)) and session.stats["kept_tokens"] == 0


def test_reader_that_stops_reading(session, loaded):
    """A caller that breaks out of the stream leaves a generator behind, in the middle of an answer."""
    for _ in session.reply(IDS, 30):
        break
    assert session.stats["stop_reason"] == "interrupt"
    assert "".join(session.reply(IDS, 9)) == "".join(fresh(loaded).reply(IDS, 9))


def test_same_seed_same_text_whatever_ran_before(session, loaded):
    """Random numbers carried from one answer into the next."""
    sampling = Sampling(temperature=1.0, top_p=0.95, repetition_penalty=1.1, seed=11)
    text = "".join(fresh(loaded).reply(IDS, 30, sampling))
    list(session.reply(IDS, 7, Sampling(temperature=2.0, seed=4)))
    assert "".join(session.reply(IDS, 30, sampling)) == text
    assert "".join(session.reply(IDS, 30, Sampling(temperature=1.0, top_p=0.95, repetition_penalty=1.1, seed=12))) != text


def test_penalty_counts_the_cached_turns(loaded):
    """A second turn whose penalty sees only the newly prefilled tokens gives another text than the same prompt afresh."""
    sampling = Sampling(repetition_penalty=1.8)
    session = fresh(loaded)
    list(session.reply(IDS, 10, sampling))
    second = session.ids + [9, 10]
    assert "".join(session.reply(second, 20, sampling)) == "".join(fresh(loaded).reply(second, 20, sampling))


# ----------------------------------------------------------------------------------------------------- fit, --ctx


@pytest.mark.parametrize("text,tokens", [("8192", 8192), ("32k", 32768), ("128k", 131072), ("1m", 1048576), ("128K", 131072), (" 1M ", 1048576), ("1", 1)])
def test_ctx_spellings(text, tokens):
    """128k is 131,072, not 128,000."""
    assert parse_tokens(text) == tokens


@pytest.mark.parametrize("ids,ctx,new", [(100, 50, 10), (100, 99, 256), (100, 100, 1), (100, 50, 50), (100, 1, 5), (100, 2, 1), (101, 64, 0), (7, 7, 1)])
def test_truncate_keeps_head_and_tail(ids, ctx, new):
    """A cut at the end loses the question; one at the front the instruction."""
    prompt = list(range(ids))
    cut = fit(prompt, ctx, new, True)
    assert 1 <= len(cut) <= ctx and (new == 0 or ctx == 1 or len(cut) < ctx)
    half = (len(cut) + 1) // 2
    assert cut[:half] == prompt[:half] and (len(cut) == half or cut[half:] == prompt[-(len(cut) - half) :])
    with pytest.raises(ValueError, match=f"{ids}.*{ctx}.*--truncate middle"):
        fit(prompt, ctx, new, False)


@pytest.mark.parametrize("ids,ctx,new", [(50, 50, 0), (49, 50, 1), (49, 50, 256), (1, 2, 9)])
def test_what_fits_is_not_cut(ids, ctx, new):
    """A prompt that leaves room for one token fits: the answer is just shorter."""
    assert fit(list(range(ids)), ctx, new, False) == fit(list(range(ids)), ctx, new, True) == list(range(ids))


# -------------------------------------------------------------------------------------------------------- command line


@pytest.fixture
def cli(capsys, monkeypatch):
    """`cli(*flags, stdin=b"") -> (exit code, stdout, stderr)`, in this process; with the full cache where no other is named."""

    def run(*flags, stdin=b""):
        if "--cache" not in flags:
            flags = ("--cache", "full", *flags)
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin), encoding="utf-8"))
        capsys.readouterr()
        try:
            code = program.main([str(flag) for flag in flags])
        except SystemExit as stop:
            code = stop.code
        out, err = capsys.readouterr()
        return code, out, err

    return run


FIELDS = {
    "text": str, "prompt_tokens": int, "new_tokens": int, "ttft_s": float, "decode_ms": float, "kv_bytes": dict, "peak_gpu_bytes": int,
    "cache": str, "device": str, "dtype": str, "stop_reason": str,
}  # fmt: skip


def test_prompt_goes_to_stdout_and_summary_to_stderr(cli, tiny_chat, loaded):
    """Text and numbers mixed on one stream cannot be piped."""
    code, out, err = cli("--ckpt", tiny_chat, "--prompt", "Of Man's first disobedience", "--max-new-tokens", 20, "--device", "cpu")
    assert code == 0
    session = fresh(loaded)
    ids = loaded[1].encode_chat([{"role": "user", "content": "Of Man's first disobedience"}])
    assert out == "".join(session.reply(ids, 20)) + "\n"
    assert re.search(rf"prompt {len(ids)} tokens; first token after [\d.]+ s \([\d,]+ tokens/s\); {session.stats['new_tokens']} new tokens, [\d.]+ ms each \([\d.]+ tokens/s\); length", err)
    assert re.search(r"KV [\d.]+ MiB on cpu, 0\.0 MiB on the host; peak memory [\d.]+ GiB; cache full, float32", err)


def test_json(cli, tiny_chat, loaded):
    """Every promised field, of its type, one object on one line, and nothing else on stdout."""
    code, out, err = cli("--ckpt", tiny_chat, "--prompt", "grüße 🙂", "--max-new-tokens", 9, "--json", "--device", "cpu")
    assert code == 0 and out.count("\n") == 1
    got = json.loads(out)
    assert set(got) == set(FIELDS) and all(isinstance(got[name], kind) for name, kind in FIELDS.items())
    ids = loaded[1].encode_chat([{"role": "user", "content": "grüße 🙂"}])
    assert got["prompt_tokens"] == len(ids) and got["text"] == "".join(fresh(loaded).reply(ids, 9))
    assert got["kv_bytes"]["host"] == 0 and got["kv_bytes"]["gpu"] == 2 * 3 * 2 * 24 * 4 * (len(ids) + 9) + 8
    assert (got["cache"], got["device"], got["dtype"], got["stop_reason"], got["peak_gpu_bytes"]) == ("full", "cpu", "float32", "length", 0)


def test_raw_and_system_and_files(cli, tiny_chat, tiny_base, tmp_path, loaded):
    """--raw that still uses the template, a system message that is dropped, a file read otherwise than the flag."""
    file = tmp_path / "prompt.txt"
    file.write_bytes("Täglich\r\ngrüßt  das Murmeltier \n".encode())
    text = file.read_bytes().decode()
    tokenizer = loaded[1]

    def tokens(*flags, stdin=b"", ckpt=tiny_chat):
        code, out, err = cli("--ckpt", ckpt, "--max-new-tokens", 3, "--json", *flags, stdin=stdin)
        assert code == 0, err
        return json.loads(out)

    raw = tokens("--raw", "--prompt", text)
    assert raw["prompt_tokens"] == len(tokenizer.encode(text))
    for other in (tokens("--raw", "--prompt-file", file), tokens("--raw", "--prompt-file", "-", stdin=file.read_bytes()), tokens("--prompt-file", file, ckpt=tiny_base)):
        assert other["text"] == raw["text"] and other["prompt_tokens"] == raw["prompt_tokens"]
    user = {"role": "user", "content": text}
    assert tokens("--prompt-file", file)["prompt_tokens"] == len(tokenizer.encode_chat([user]))
    assert tokens("--prompt-file", file, "--system", "Be brief.")["prompt_tokens"] == len(tokenizer.encode_chat([{"role": "system", "content": "Be brief."}, user]))


def test_ctx_shortens_the_answer(cli, tiny_chat):
    """An answer that runs past --ctx, or a refusal where a shorter answer was possible."""
    get = lambda *flags: json.loads(cli("--ckpt", tiny_chat, "--raw", "--prompt", "a b c d e f g h", "--json", *flags)[1])  # noqa: E731
    n = get("--max-new-tokens", 0)["prompt_tokens"]
    got = get("--ctx", n + 5, "--max-new-tokens", 50, "--temperature", 1.5)
    assert got["new_tokens"] == 5 and got["stop_reason"] == "length"
    assert get("--ctx", n, "--max-new-tokens", 0) | {"ttft_s": 0} == get("--max-new-tokens", 0) | {"ttft_s": 0}
    assert got["kv_bytes"]["gpu"] == 2 * 3 * 2 * 24 * 4 * (n + 5) + 8


def test_text_does_not_depend_on_max_new_tokens(cli, tiny_chat):
    """transformers #30400, through the front door."""
    get = lambda n: json.loads(cli("--ckpt", tiny_chat, "--prompt", "Sing, heavenly Muse", "--json", "--max-new-tokens", n)[1])["text"]  # noqa: E731
    texts = [get(n) for n in (60, 5, 20, 60)]
    assert texts[0] == texts[3] and all(texts[0].startswith(text.rstrip("�")) for text in texts)


def test_ctx_beyond_the_model_warns(cli, tiny_chat):
    """People do it on purpose; but they must be told."""
    code, out, err = cli("--ckpt", tiny_chat, "--prompt", "x", "--ctx", "1k", "--max-new-tokens", 2)
    assert code == 0 and "warning" in err and "1,024" in err and "256" in err
    code, out, err = cli("--ckpt", tiny_chat, "--prompt", "x", "--ctx", "256", "--max-new-tokens", 2)
    assert code == 0 and "warning" not in err


def test_truncate_middle(cli, tiny_chat, loaded):
    """--truncate middle must fit the prompt, leave room for the answer, and keep both ends."""
    text = "start " + "word " * 500 + "end"
    code, out, _ = cli("--ckpt", tiny_chat, "--raw", "--prompt", text, "--truncate", "middle", "--max-new-tokens", 30, "--json")
    got = json.loads(out)
    assert code == 0 and got["prompt_tokens"] == 256 - 30
    ids = loaded[1].encode(text)
    assert got["text"] == "".join(fresh(loaded).reply(ids[:113] + ids[-113:], 30))


def test_stop_flag(cli, tiny_chat):
    """--stop given twice; the reason is "stop"."""
    get = lambda *flags: json.loads(cli("--ckpt", tiny_chat, "--prompt", "Hail", "--json", "--max-new-tokens", 40, *flags)[1])  # noqa: E731
    text = get()["text"]
    stop = text[len(text) // 2 :][:2]
    got = get("--stop", "not in there", "--stop", stop)
    assert got["text"] == text[: text.find(stop)] and got["stop_reason"] == "stop"


def test_sampling_flags_reach_the_sampler(cli, tiny_chat):
    """A flag that is parsed and forgotten."""
    get = lambda *flags: json.loads(cli("--ckpt", tiny_chat, "--prompt", "Hail", "--json", "--max-new-tokens", 40, *flags)[1])["text"]  # noqa: E731
    greedy = get()
    hot = get("--temperature", 1)
    assert hot == get("--temperature", 1) and hot != get("--temperature", 1, "--seed", 1) and hot != greedy
    for flags in (["--top-k", 1], ["--top-p", 1e-6], ["--min-p", 1]):
        assert get("--temperature", 1, *flags) == greedy
    assert get("--repetition-penalty", 3) != greedy


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_dtype_and_file_path(cli, tiny_chat, dtype):
    """--dtype that is parsed and forgotten; a single file given as --ckpt, with its config and tokenizer beside it."""
    code, out, _ = cli("--ckpt", tiny_chat / "model.safetensors", "--prompt", "Hail", "--json", "--max-new-tokens", 3, "--dtype", dtype, "--device", "cpu")
    got = json.loads(out)
    assert code == 0 and got["dtype"] == dtype
    assert got["kv_bytes"]["gpu"] == 2 * 3 * 2 * 24 * getattr(torch, dtype).itemsize * (got["prompt_tokens"] + 3) + 8


@pytest.mark.gpu
def test_gpu_json(cli, tiny_chat):
    """The same command on a GPU: the device's name, its peak memory, and the checkpoint's own dtype."""
    code, out, err = cli("--ckpt", tiny_chat, "--prompt", "Hail", "--json", "--max-new-tokens", 9, "--device", "cuda")
    got = json.loads(out)
    cpu = json.loads(cli("--ckpt", tiny_chat, "--prompt", "Hail", "--json", "--max-new-tokens", 9, "--device", "cpu")[1])
    assert code == 0 and got["device"].startswith("cuda") and got["peak_gpu_bytes"] > 0 and got["text"] == cpu["text"], (got, err)


def test_progress_bar_and_text_on_a_terminal(tiny_chat):
    """A progress bar that stays on the screen, or mixes with the answer. None may appear where stderr is no terminal: see the exit codes below."""
    import fcntl
    import pty
    import struct
    import termios

    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    command = [sys.executable, str(ROOT / "generate.py"), "--cache", "full", "--ckpt", str(tiny_chat), "--prompt", "word " * 60, "--max-new-tokens", "3"]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=slave, stdin=subprocess.DEVNULL)
    out = child.communicate(timeout=120)[0]
    os.close(slave)
    err = b""
    while chunk := os.read(master, 65536) if len(err) < 10**6 else b"":
        err += chunk
        if b"peak memory" in chunk or b"peak memory" in err:
            break
    os.close(master)
    assert child.returncode == 0 and b"prefill" not in out and b"prefill" in err and b"%" in err
    assert err.rindex(b"prefill") < err.index(b"prompt ") and b"\r" in err


def test_cache_list(cli):
    """`--cache list` needs no checkpoint, and says what there is."""
    code, out, err = cli("--cache", "list", "--ckpt", "/nowhere")
    assert code == 0 and err == "" and all(re.search(rf"^{name}\b", out, re.M) for name in CACHES)


def test_help_states_every_default(cli):
    """A flag without its default in --help, or a default stated twice and differently."""
    code, out, _ = cli("--help")
    assert code == 0
    text = " ".join(out.split())
    for action in program.build_parser()._actions:
        if action.option_strings and action.dest != "help":
            assert action.option_strings[-1] in text
            entry = text[text.index(" " + action.option_strings[-1], text.index("options:")) :]
            assert "default:" in entry[:400] or "without one" in entry[:400] or "standard input" in entry[:400], action.dest


def test_absent_lm_head_warns_in_one_line(cli, tiny_base, copy_of, tiny_tokenizer, family):
    """Python's own form of a warning is two lines with a path and source code in it."""
    from conftest import add_tokenizer

    own = copy_of(family("llama3.2-tied")[0], tie_word_embeddings=False)
    add_tokenizer(own, tiny_tokenizer)
    code, out, err = cli("--ckpt", own, "--prompt", "\n", "--raw", "--max-new-tokens", 1)
    assert [line for line in err.splitlines() if "lm_head" in line] == [line for line in err.splitlines() if line.startswith("generate.py: warning:")] != []


# ------------------------------------------------------------------------------------------------------------ bad input


def damaged(folder, tmp_path, **files):
    own = tmp_path / "damaged"
    shutil.copytree(folder, own)
    for name, content in files.items():
        name = name.replace("__", ".")
        (own / name).unlink() if content is None else (own / name).write_bytes(content if isinstance(content, bytes) else content((own / name).read_bytes()))
    return own


def config_with(**fields):
    return lambda data: json.dumps({key: value for key, value in (json.loads(data) | fields).items() if value is not ...}).encode()


INDEX = json.dumps({"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors", "lm_head.weight": "model.safetensors"}}).encode()

# Files to damage, then what the sentence must hold: value, limit, remedy.
BAD_CHECKPOINTS = {
    "no safetensors": ({"model__safetensors": None}, ["damaged", "no .safetensors weights"]),
    "pickle only": ({"model__safetensors": None, "pytorch_model__bin": b"x"}, ["pytorch_model.bin", "pickle", "convert"]),
    "shard missing": ({"model__safetensors__index__json": INDEX}, ["model-00001-of-00002.safetensors", "download"]),
    "truncated": ({"model__safetensors": lambda data: data[:-100]}, ["model.safetensors", "download it again"]),
    "corrupt": ({"model__safetensors": b"<html>404 Not Found</html>"}, ["model.safetensors", "download it again"]),
    "no config": ({"config__json": None}, ["config.json"]),
    "config not json": ({"config__json": b"{"}, ["config.json", "not valid JSON"]),
    "config lacks a field": ({"config__json": config_with(hidden_size=...)}, ["hidden_size"]),
    "config of another shape": ({"config__json": config_with(intermediate_size=171)}, ["mlp.up_proj.weight", "171", "172"]),
    "unsupported model": ({"config__json": config_with(model_type="gpt_neox")}, ["gpt_neox", "llama"]),
    "unsupported rope": ({"config__json": config_with(rope_parameters={"rope_type": "longrope", "rope_theta": 1e4})}, ["longrope", "yarn"]),
    "quantised": ({"config__json": config_with(quantization_config={"quant_method": "gptq"})}, ["gptq", "16- or 32-bit"]),
    "sliding window": ({"config__json": config_with(model_type="mistral", sliding_window=4096)}, ["sliding_window", "4096"]),
    "no tokenizer": ({"tokenizer__json": None}, ["tokenizer.json", "tokenizer.model"]),
    "tokenizer not json": ({"tokenizer__json": b"{"}, ["tokenizer.json"]),
    "tokenizer_config not json": ({"tokenizer_config__json": b"["}, ["tokenizer_config.json"]),
    "template broken": ({"chat_template__jinja": b"{% if %}"}, ["template"]),
    "template refuses": ({"chat_template__jinja": b"{{ raise_exception('no user role') }}"}, ["no user role"]),
}


def complain(result, *words):
    """Bad input: exit code 2, nothing on stdout, one sentence on stderr."""
    code, out, err = result
    lines = [line for line in err.splitlines() if not line.startswith("generate.py: warning:")]
    assert code == 2 and out == "" and len(lines) == 1 and lines[0].startswith("generate.py: error: "), result
    for word in words:
        assert word in lines[0], (word, lines[0])


@pytest.mark.parametrize("name", BAD_CHECKPOINTS)
def test_bad_checkpoint(cli, tiny_chat, tmp_path, name):
    """A page of traceback, or half an answer, for a file that is not as it should be."""
    files, words = BAD_CHECKPOINTS[name]
    complain(cli("--ckpt", damaged(tiny_chat, tmp_path, **files), "--prompt", "hello"), *words)


LONG = "word " * 400

BAD_FLAGS = {
    "no such path": (["--ckpt", "/no/such/path", "--prompt", "x"], ["/no/such/path", "give a folder"]),
    "no such file": (["--ckpt", "no-such.safetensors", "--prompt", "x"], ["no-such.safetensors"]),
    "a file that is no checkpoint": (["--ckpt", __file__, "--prompt", "x"], ["test_generate.py", ".safetensors"]),
    "path too long": (["--ckpt", "x" * 5000, "--prompt", "x"], ["no such checkpoint"]),
    "prompt too long": (["--raw", "--prompt", LONG, "--ctx", "100"], ["100", "--ctx", "--truncate middle"]),
    "prompt too long for the model": (["--raw", "--prompt", LONG], ["256", "--truncate middle"]),
    "chat prompt too long": (["--prompt", LONG], ["256", "--truncate middle"]),
    "empty prompt": (["--prompt", ""], ["empty", "--prompt"]),
    "two prompts": (["--prompt", "a", "--prompt-file", "b"], ["--prompt", "--prompt-file"]),
    "no such prompt file": (["--prompt-file", "/no/such/file"], ["/no/such/file"]),
    "prompt file is a folder": (["--prompt-file", "/"], ["/", "directory"]),
    "prompt of broken bytes": (["--prompt", os.fsdecode(b"caf\xe9")], ["--prompt", "UTF-8", "0xe9"]),
    "system of broken bytes": (["--prompt", "x", "--system", os.fsdecode(b"caf\xe9")], ["Unicode"]),
    "ctx zero": (["--prompt", "x", "--ctx", "0"], ["'0'", "32k"]),
    "ctx negative": (["--prompt", "x", "--ctx=-5"], ["'-5'", "32k"]),
    "ctx a word": (["--prompt", "x", "--ctx", "many"], ["'many'", "32k"]),
    "ctx a fraction": (["--prompt", "x", "--ctx", "1.5k"], ["'1.5k'", "32k"]),
    "max-new-tokens negative": (["--prompt", "x", "--max-new-tokens=-1"], ["-1", "0 or above"]),
    "max-new-tokens a word": (["--prompt", "x", "--max-new-tokens", "all"], ["all"]),
    "temperature negative": (["--prompt", "x", "--temperature=-1"], ["temperature is -1", "0 (greedy) or above"]),
    "temperature nan": (["--prompt", "x", "--temperature", "nan"], ["temperature is nan"]),
    "top-k negative": (["--prompt", "x", "--top-k=-1"], ["top_k is -1", "0 (off) or above"]),
    "top-p zero": (["--prompt", "x", "--top-p", "0"], ["top_p is 0", "at most 1"]),
    "top-p above one": (["--prompt", "x", "--top-p", "1.5"], ["top_p is 1.5", "at most 1"]),
    "min-p above one": (["--prompt", "x", "--min-p", "2"], ["min_p is 2", "between 0 and 1"]),
    "penalty zero": (["--prompt", "x", "--repetition-penalty", "0"], ["repetition_penalty is 0", "above 0"]),
    "seed negative": (["--prompt", "x", "--seed=-1"], ["seed is -1"]),
    "seed too large": (["--prompt", "x", "--seed", str(2**64)], ["seed is", "2^63"]),
    "stop empty": (["--prompt", "x", "--stop", ""], ["--stop", "empty"]),
    "unknown cache": (["--prompt", "x", "--cache", "magic"], ["'magic'", "full", "--cache list"]),
    "unknown cache field": (["--prompt", "x", "--cache", "full:bits=1"], ["'bits=1'"]),
    "unknown device": (["--prompt", "x", "--device", "abacus"], ["abacus", "--device cpu"]),
    "device meta": (["--prompt", "x", "--device", "meta"], ["meta", "--device cpu"]),
    "unknown dtype": (["--prompt", "x", "--dtype", "int8"], ["int8", "bfloat16"]),
    "unknown flag": (["--prompt", "x", "--verbose"], ["--verbose", "--help"]),
    "abbreviated flag": (["--prom", "x"], ["--prom"]),
    "stray argument": (["hello"], ["hello"]),
    "truncate in another way": (["--prompt", "x", "--truncate", "left"], ["left", "middle"]),
    "raw chat": (["--raw", "--chat"], ["--raw", "--chat"]),
    "raw system": (["--raw", "--prompt", "x", "--system", "y"], ["--raw", "--system"]),
    "chat with the prompt on stdin": (["--chat", "--prompt-file", "-"], ["--chat", "--prompt-file -"]),
    "system without a prompt": (["--system", "x"], ["--system", "--prompt"]),
    "needle does not fit": (["--ctx", "20"], ["needle", "114 tokens", "has 4", "--ctx"]),
    "needle beyond all memory": (["--ctx", "9999999m"], ["GiB", "weights", "KV", "working set", "--ctx"]),
}


@pytest.mark.parametrize("name", BAD_FLAGS)
def test_bad_flags(cli, tiny_chat, name):
    """One sentence with the value, the limit and the remedy; never a traceback, never half an answer."""
    flags, words = BAD_FLAGS[name]
    complain(cli("--ckpt", tiny_chat, *flags), *words)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize("device", ["cuda", "cuda:0", "cuda:7"])
def test_cuda_without_cuda(cli, tiny_chat, device):
    """PyTorch's own words for this are an AssertionError."""
    complain(cli("--ckpt", tiny_chat, "--prompt", "x", "--device", device), f"'{device}'", "--device cpu")


def test_prompt_length_is_stated(cli, tiny_chat, loaded):
    """Both numbers: how long the prompt is and how long it may be."""
    n = len(loaded[1].encode(LONG))
    complain(cli("--ckpt", tiny_chat, "--raw", "--prompt", LONG, "--ctx", "300"), f"{n:,} tokens", "300", "--truncate middle")


def test_prompt_file_not_utf8(cli, tiny_chat, tmp_path):
    """Latin-1, UTF-16 or a binary file: say which byte."""
    for content, byte in ((b"caf\xe9", "0xe9"), ("hello".encode("utf-16"), "0xff"), (b"\x7fELF\x80", "0x80")):
        (tmp_path / "p").write_bytes(content)
        complain(cli("--ckpt", tiny_chat, "--prompt-file", tmp_path / "p"), str(tmp_path / "p"), "UTF-8", byte)
        complain(cli("--ckpt", tiny_chat, "--prompt-file", "-", stdin=content), "standard input", "UTF-8", byte)


def test_empty_prompt_file(cli, tiny_chat, tmp_path):
    """An empty file or an empty pipe."""
    (tmp_path / "p").write_bytes(b"")
    complain(cli("--ckpt", tiny_chat, "--prompt-file", tmp_path / "p"), str(tmp_path / "p"), "empty")
    complain(cli("--ckpt", tiny_chat, "--prompt-file", "-"), "standard input", "empty")


def test_too_little_memory(cli, tiny_chat, monkeypatch):
    """The process killed by the kernel without a word; the sentence must say what is needed: weights, KV, working set."""
    monkeypatch.setattr(psutil, "virtual_memory", lambda: types.SimpleNamespace(available=1_000_000))
    monkeypatch.setattr(Llama, "from_checkpoint", lambda *args: pytest.fail("the weights were loaded"))
    for flags in (["--prompt", "x"], ["--chat"], []):
        complain(cli("--ckpt", tiny_chat, *flags), "GiB", "weights", "KV", "working set", "free", "--ctx")


def test_too_little_memory_names_what_would_help(tiny_chat, monkeypatch):
    """Half the host's memory for a word in the cache spec: worth saying where it is the host that lacks."""
    config = ModelConfig.from_dict(read_config(tiny_chat))
    monkeypatch.setattr(psutil, "virtual_memory", lambda: types.SimpleNamespace(available=1_000_000))
    for spec, tokens, hint in (("tailor", 4000, True), ("tailor:token_bits=8", 4000, False), ("tailor", 100, False), ("full", 4000, False)):
        with pytest.raises(ValueError) as found:
            program.check_memory(config, spec, tokens, tokens, torch.float32, torch.device("cpu"))
        assert ("token_bits=8" in str(found.value)) is hint, spec


def test_too_little_memory_beside_a_gpu(tiny_chat, monkeypatch):
    """The embedding table is asked of the host, not of the card, unless it is the head as well."""
    raw = read_config(tiny_chat) | {"vocab_size": 2**20, "hidden_size": 256}
    free = types.SimpleNamespace(gpu=0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free.gpu, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "the card")
    monkeypatch.setattr(psutil, "virtual_memory", lambda: types.SimpleNamespace(available=1_000_000))
    for tied in (False, True):
        config, said = ModelConfig.from_dict(raw | {"tie_word_embeddings": tied}), []
        for free.gpu in (0, 2**40):
            try:
                program.check_memory(config, "full", 100, 100, torch.bfloat16, torch.device("cuda"))
                said.append("")
            except ValueError as error:
                said.append(str(error))
        assert "weights 0.5 GiB" in said[0] and "the card" in said[0]  # 2^29 bytes of head, or of table and head in one
        assert said[1] == "" if tied else "embedding table 0.5 GiB" in said[1] and "the host has" in said[1]


def test_out_of_memory_after_all(cli, tiny_chat, monkeypatch):
    """The estimate was wrong: still one sentence."""
    for error in (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nmore"), MemoryError()):
        monkeypatch.setattr(Llama, "prefill", raising(error))
        code, out, err = cli("--ckpt", tiny_chat, "--prompt", "x")
        assert code == 2 and err.count("\n") == 1 and err.startswith("generate.py: error: ")


def test_chat_needs_a_template(cli, tiny_base):
    """A base model has no turns."""
    complain(cli("--ckpt", tiny_base, "--chat"), "chat template", "--raw")
    complain(cli("--ckpt", tiny_base, "--prompt", "x", "--system", "y"), "chat template", "--raw")


def test_disk_full_is_a_sentence(cli, tiny_chat, monkeypatch):
    """Writing the embedded model on a full disk."""
    monkeypatch.setattr(program, "resolve", raising(OSError(28, "No space left on device")))
    complain(cli("--prompt", "x"), "No space left")


# ---------------------------------------------------------------------------------------------------------------- chat


def chat_turns(loaded, messages, system=None, max_new_tokens=12):
    """What each turn must say: a fresh session that is given the whole conversation."""
    history, texts = [{"role": "system", "content": system}] if system else [], []
    for message in messages:
        history.append({"role": "user", "content": message})
        texts.append("".join(fresh(loaded).reply(loaded[1].encode_chat(history), max_new_tokens)))
        history.append({"role": "assistant", "content": texts[-1]})
    return texts


MESSAGES = ["Who first seduced them?", "  grüße 🙂 ", "And then"]


@pytest.mark.parametrize("system", [None, "Answer in verse."])
def test_chat_equals_fresh_sessions_and_keeps_its_cache(cli, tiny_chat, loaded, system):
    """A kept cache that answers another question than the one on the screen; or one that keeps nothing."""
    flags = ["--system", system] if system else []
    code, out, err = cli("--ckpt", tiny_chat, "--chat", "--max-new-tokens", 12, *flags, stdin=("\n".join(MESSAGES) + "\n\n   \n").encode())
    assert code == 0 and out == "".join(text + "\n" for text in chat_turns(loaded, MESSAGES, system))
    prompts = re.findall(r"prompt (\d+) tokens(?: \((\d+) cached\))?;", err)
    assert len(prompts) == 3 and prompts[0][1] == "" and all(int(kept) > int(before[0]) - 2 for (_, kept), before in zip(prompts[1:], prompts))


def test_chat_with_a_first_prompt_and_json(cli, tiny_chat, loaded):
    """--chat --prompt: the prompt is the first message; --json prints an object a turn."""
    code, out, _ = cli("--ckpt", tiny_chat, "--chat", "--prompt", MESSAGES[0], "--max-new-tokens", 12, "--json", stdin=("\r\n".join(MESSAGES[1:])).encode())
    objects = [json.loads(line) for line in out.splitlines()]
    assert code == 0 and [entry["text"] for entry in objects] == chat_turns(loaded, MESSAGES)
    assert all(set(entry) == set(FIELDS) for entry in objects)


def test_interrupted_answer_does_not_end_the_chat(cli, tiny_chat, loaded, monkeypatch):
    """Ctrl-C ends the answer, not the program; the conversation goes on from what was said."""
    plain, count = Llama.decode, iter(range(1, 1000))

    def decode(self, ids, cache):
        if next(count) == 4:
            raise KeyboardInterrupt
        return plain(self, ids, cache)

    monkeypatch.setattr(Llama, "decode", decode)
    code, out, _ = cli("--ckpt", tiny_chat, "--chat", "--json", "--max-new-tokens", 12, stdin=b"first\nsecond\n")
    monkeypatch.undo()
    one, two = map(json.loads, out.splitlines())
    assert code == 0 and (one["stop_reason"], one["new_tokens"]) == ("interrupt", 4) and two["stop_reason"] in ("length", "stop")
    history = [{"role": "user", "content": "first"}, {"role": "assistant", "content": one["text"]}, {"role": "user", "content": "second"}]
    assert two["text"] == "".join(fresh(loaded).reply(loaded[1].encode_chat(history), 12))


def test_interrupt_at_the_prompt_does_not_end_the_chat(cli, tiny_chat, monkeypatch):
    """Ctrl-C while typing clears the line, as everywhere."""
    lines = iter([KeyboardInterrupt, "hello\n", ""])

    class Terminal:
        def readline(self):
            line = next(lines)
            if line is KeyboardInterrupt:
                raise line
            return line

    monkeypatch.setattr(io, "TextIOWrapper", lambda *args, **options: Terminal())
    code, out, err = cli("--ckpt", tiny_chat, "--chat", "--json", "--max-new-tokens", 2)
    assert code == 0 and len(out.splitlines()) == 1 and "Ctrl-D" in err


def test_interrupt_outside_a_chat(cli, tiny_chat, monkeypatch):
    """A single answer: what there is, its summary, and exit code 130."""
    monkeypatch.setattr(Llama, "decode", raising(KeyboardInterrupt))
    code, out, err = cli("--ckpt", tiny_chat, "--prompt", "x", "--json")
    got = json.loads(out)
    assert code == 130 and got["stop_reason"] == "interrupt" and got["new_tokens"] == 1
    monkeypatch.setattr(Llama, "prefill", raising(KeyboardInterrupt))
    code, out, err = cli("--ckpt", tiny_chat, "--prompt", "x", "--json")
    got = json.loads(out)
    assert code == 130 and got["ttft_s"] is None and got["text"] == "" and "Traceback" not in err


def test_an_error_that_an_interrupt_brought_about_is_an_interrupt(cli, tiny_chat, monkeypatch):
    """Ctrl-C inside a lock, or inside PyTorch's `with torch.device(...)`, comes out as a RuntimeError of theirs: exit code 130, no traceback."""
    for error in (RuntimeError("trying to pop from empty mode stack"), ValueError("x")):

        def prefill(*_, error=error):
            try:
                raise KeyboardInterrupt
            finally:
                raise error

        with monkeypatch.context() as patch:
            patch.setattr(Llama, "prefill", prefill)
            assert cli("--ckpt", tiny_chat, "--prompt", "x") == (130, "", "")
    monkeypatch.setattr(Llama, "prefill", raising(RuntimeError("a bug")))
    with pytest.raises(RuntimeError, match="a bug"):
        cli("--ckpt", tiny_chat, "--prompt", "x")


def test_message_that_does_not_fit_does_not_end_the_chat(cli, tiny_chat, loaded):
    """One message too long: a sentence, and the conversation goes on as if it had not been typed."""
    code, out, err = cli("--ckpt", tiny_chat, "--chat", "--max-new-tokens", 12, stdin=f"{MESSAGES[0]}\n{LONG}\nAnd then\n".encode())
    assert code == 0 and out == "".join(text + "\n" for text in chat_turns(loaded, [MESSAGES[0], "And then"]))
    assert err.count("--truncate middle") == 1 and "256" in err


def test_dropped_tokens_are_mentioned(cli, tiny_chat):
    """Where less than the old turns survives, the program says so."""
    code, out, err = cli("--ckpt", tiny_chat, "--chat", "--max-new-tokens", 100, "--truncate", "middle", stdin=("a b c d e f g " * 8 + "\n").encode() * 5)
    assert code == 0 and re.search(r"note: \d+ cached tokens did not fit", err)


# ------------------------------------------------------------------------------------------------- as a real process


def process(*flags, **options):
    return subprocess.run([sys.executable, str(ROOT / "generate.py"), "--cache", "full", *map(str, flags)], capture_output=True, timeout=300, **options)


def test_process_exit_codes_and_streams(tiny_chat, tmp_path):
    """What main() returns must become the exit code; run from another folder, in a locale without UTF-8."""
    env = os.environ | {"LC_ALL": "C", "LANG": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = process("--ckpt", tiny_chat, "--prompt", "grüße 🙂".encode().decode("utf-8"), "--max-new-tokens", 30, "--temperature", 1, cwd=tmp_path, env=env)
    assert done.returncode == 0 and done.stdout.decode("utf-8").strip() and b"prefill" not in done.stderr, done.stderr
    done = process("--ckpt", "/no/such/path", "--prompt", "x", cwd=tmp_path, env=env)
    assert (done.returncode, done.stdout, done.stderr.count(b"\n")) == (2, b"", 1)
    done = process("--ctx", "much", cwd=tmp_path, env=env)
    assert (done.returncode, done.stdout, done.stderr.count(b"\n")) == (2, b"", 1)


def test_process_reads_standard_input(tiny_chat):
    """`cat prompt | generate.py --prompt-file -`."""
    done = process("--ckpt", tiny_chat, "--prompt-file", "-", "--json", "--max-new-tokens", 3, input="grüße".encode())
    assert done.returncode == 0 and json.loads(done.stdout)["new_tokens"] <= 3


def test_process_survives_a_closed_pipe(tiny_chat):
    """`generate.py … | head -1` ends in a traceback, and a second one from the interpreter's own flush."""
    command = f"{sys.executable} {ROOT / 'generate.py'} --cache full --ckpt {tiny_chat} --prompt x --max-new-tokens 200 --temperature 1 2>err.txt | head -c 1 >/dev/null; echo ${{PIPESTATUS[0]}}; cat err.txt"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=300, cwd=tiny_chat.parent)
    assert "Traceback" not in done.stdout and "Exception ignored" not in done.stdout and done.stdout.startswith("0"), done.stdout


def test_process_interrupted_by_a_signal(tiny_chat):
    """A real Ctrl-C in a chat: the program must live, and end with exit code 0 at the end of input."""
    import signal

    command = [sys.executable, str(ROOT / "generate.py"), "--cache", "full", "--ckpt", str(tiny_chat), "--chat", "--ctx", "100k", "--max-new-tokens", "90000", "--stop", "never"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    child = subprocess.Popen(command, **pipes, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
    try:
        child.stdin.write(b"hello\n")
        child.stdin.flush()
        child.stdout.read(1)  # the answer has begun
        child.send_signal(signal.SIGINT)
        _, err = child.communicate(b"", timeout=60)  # the end of input
    finally:
        child.kill()
    assert child.returncode == 0 and b"Traceback" not in err and (b"; interrupt\n" in err or b"; stop\n" in err), err


# ------------------------------------------------------------------------------------------------- the embedded model


def test_needle_prompt_has_exactly_the_asked_length(loaded):
    """A document cut or repeated to the wrong length; the needle in the middle half; the question at the end."""
    tokenizer = loaded[1]
    made = {}
    for tokens, seed in ((200, 0), (200, 1), (3000, 2), (250_000, 0)):  # each reads the whole document
        made[tokens, seed] = needle = program.Needle.build(tokenizer, tokens, seed)
        text = tokenizer.decode(needle.ids)
        assert len(needle.ids) == tokens and text.count(needle.expected) == 1
        at = text.index(needle.expected) / len(text)
        assert text.endswith("mentioned in the provided text is") and needle.question in text and 0.1 < at < 0.9
    assert program.Needle.build(tokenizer, 200, 0) == made[200, 0] != made[200, 1]


def test_demonstration_job(cli):
    """`python generate.py`, shorter: the embedded model finds the needle, and the program says so."""
    torch.set_num_threads(os.cpu_count())
    try:
        code, out, err = cli("--ctx", "700", "--device", "cpu")
        assert code == 0 and out.splitlines()[-1] == "right" and "question: What is the special magic number" in out, (out, err)
        assert "first token after" in err and "prompt 684 tokens" in err
        code, out, err = cli("--ctx", "300", "--device", "cpu", "--json", "--seed", 1)
        got = json.loads(out)
    finally:
        torch.set_num_threads(1)
    assert code == 0 and set(got) == set(FIELDS) | {"question", "expected", "correct"}
    assert got["correct"] is (got["text"].strip() == got["expected"]) is True and re.fullmatch(r"\d{7}", got["expected"])
