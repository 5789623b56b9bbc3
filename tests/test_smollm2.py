# SPDX-License-Identifier: Apache-2.0
"""A real model, SmolLM2-135M-Instruct in float32: the same greedy tokens and the same logits as transformers, raw and chat."""

import os

import pytest
import torch

import embedded
from cache import FullCache
from generate import generate
from model import Llama
from tokenizer import Tokenizer

NEW, TOLERANCE = 32, 1e-3  # logits are up to 40; rounding moves them by less than 1e-4
LONG = "chat of three turns"  # 128 tokens, for which the cache grows twice, and by the reference's own generate() as well, which takes four times as long

# Thousands of tokens are compared on a tiny model, in test_model.py.
PROMPTS = {
    "1 token": 1,
    "2 tokens": 2,
    "37 tokens": 37,
    "511 tokens": 511,  # one less than a chunk
    "1025 tokens": 1025,  # two chunks and a token
    "chat": [{"role": "user", "content": "Write a short poem about a lighthouse."}],
    "chat with system": [{"role": "system", "content": "You answer in one sentence."}, {"role": "user", "content": "Why is the sky blue?"}],
    "chat of three turns": [
        {"role": "user", "content": "Name three rivers."},
        {"role": "assistant", "content": "The Nile, the Amazon and the Danube."},
        {"role": "user", "content": "Which is the longest, and what is 17 * 3? 🙂"},
    ],
}


@pytest.fixture(scope="module")
def both():
    import transformers

    threads = torch.get_num_threads()
    torch.set_num_threads(os.cpu_count())
    folder = embedded.fetch("smollm2")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    theirs.generation_config = transformers.GenerationConfig(do_sample=False, pad_token_id=2)  # no stop ids: all tokens asked for
    yield Llama.from_checkpoint(folder, dtype=torch.float32), Tokenizer.from_checkpoint(folder), theirs
    torch.set_num_threads(threads)


@pytest.mark.parametrize("name", PROMPTS)
def test_same_greedy_tokens_as_transformers(both, name):
    """Whatever the unit tests missed: one wrong rounding too many moves the logits, changes a token, and the text from there on."""
    model, tokenizer, theirs = both
    new, rows = 128 if name == LONG else NEW, []
    prompt = PROMPTS[name]
    if isinstance(prompt, int):
        ids = tokenizer.encode(embedded.document()[2000:40_000])[:prompt]
        assert len(ids) == prompt
    else:
        ids = tokenizer.encode_chat(prompt)
    watch = model.lm_head.register_forward_hook(lambda head, given, out: rows.append(out))
    try:
        ours = list(generate(model, FullCache(model.config), ids, new))
    finally:
        watch.remove()
    with torch.no_grad():
        # Greedy tokens are equal exactly if each of ours is the reference's likeliest after all before it: one pass tells.
        logits = theirs(torch.tensor([ids + ours[:-1]]), logits_to_keep=new).logits[0]
        expected = logits.argmax(-1).tolist()
        if name == LONG:
            mask = torch.ones(1, len(ids))  # else it takes the turn ends for padding
            assert theirs.generate(torch.tensor([ids]), attention_mask=mask, max_new_tokens=new)[0, len(ids) :].tolist() == expected
    if ours != expected:  # say by how much: a tie in the last bits, or a bug
        at = next(i for i, (a, b) in enumerate(zip(ours, expected)) if a != b)
        pytest.fail(f"token {at} of the answer differs; the reference's logits of the two are {float(logits[at, expected[at]] - logits[at, ours[at]]):.2e} apart")
    assert len(rows) == new and (torch.cat(rows) - logits).abs().max() < TOLERANCE
    if not isinstance(prompt, int):
        text = tokenizer.decode(ours)
        assert text.isprintable() or text.count("\n"), "a chat answer is text"
        assert sum(character.isascii() for character in text) > 0.9 * len(text)
