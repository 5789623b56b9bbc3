# SPDX-License-Identifier: Apache-2.0
"""Tokenizer against transformers, on vocabularies trained here and on a file of nasty text; no downloads."""

import io
import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
import sentencepiece
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers

from tokenizer import NO_DUMMY_PREFIX, Tokenizer

# Bytes, since reading as text would turn \r\n into \n.
NASTY = (Path(__file__).parent / "data" / "nasty.txt").read_bytes().decode("utf-8")
TEXTS = [NASTY, *NASTY.split("\n"), *NASTY.splitlines(keepends=True), "", " ", "  x", "<s>x", "x</s>", "a <s> b", "<|im_end|>\n"]
CHAT = ["<|im_start|>", "<|im_end|>"]
LLAMA = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True}

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3 = (
    "{%- if strftime_now is defined %}{%- set today = strftime_now('%Y') %}{%- endif %}{{- bos_token }}\n"
    "{%- for m in messages %}\n    {{- '<|start|>' + m.role + '<|stop|>\n\n' + m.content | trim + '<|eot_id|>' }}\n{%- endfor %}\n"
    "{%- if add_generation_prompt %}\n    {{- '<|start|>assistant<|stop|>\n\n' }}\n{%- endif %}\n"
)
LLAMA2 = (
    "{% if messages[0].role == 'system' %}{% set first = '<<SYS>>\n' + messages[0].content + '\n<</SYS>>\n\n' %}"
    "{% set rest = messages[1:] %}"
    "{% else %}{% set first = '' %}{% set rest = messages %}{% endif %}"
    "{% for m in rest %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% if m.role == 'user' %}{{ bos_token + '[INST] ' + (first if loop.first else '') + m.content.strip() + ' [/INST]' }}"
    "{% else %}{{ ' ' + m.content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
)
MESSAGES = [
    {"role": "system", "content": "You are terse. <tag> & 'quotes'"},
    {"role": "user", "content": "  Hello 😀  wörld\n\n    indented <s> "},
    {"role": "assistant", "content": "Hi."},
    {"role": "user", "content": "日本?"},
]


def reference(folder: Path):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("google.protobuf")
    return transformers.AutoTokenizer.from_pretrained(str(folder))


def write(folder: Path, **files) -> Path:
    """Files by name with "." written as "__"; strings and bytes as they are, everything else as JSON."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        content = content if isinstance(content, (str, bytes)) else json.dumps(content)
        (folder / name.replace("__", ".")).write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder


@pytest.fixture(scope="module")
def byte_level() -> str:
    """A tokenizer.json like Llama 3's: byte-level BPE, a splitting regex, BOS from the post-processor."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    split = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    regex = pre_tokenizers.Split(tokenizers.Regex(split), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([regex, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(NASTY.split("\n") * 3, trainer)
    tokenizer.add_special_tokens(["<s>", "</s>", *CHAT, "<|eot_id|>", "<|start|>", "<|stop|>"])
    tokenizer.add_tokens([AddedToken("<é>", normalized=False), AddedToken("<tool>", normalized=False)])
    bos = ("<s>", tokenizer.token_to_id("<s>"))
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", pair="<s> $A <s> $B", special_tokens=[bos])
    return tokenizer.to_str()


@pytest.fixture(scope="module")
def spm() -> bytes:
    """A tokenizer.model like Llama 2's: BPE, byte fallback, text left as it is, dummy prefix."""
    return train_spm()


def train_spm(**settings) -> bytes:
    out = io.BytesIO()
    settings = {"add_dummy_prefix": True, "byte_fallback": True, "split_digits": True, **settings}
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter((NASTY.replace("\r", "").split("\n") + ["a gap of  two,   three,    four"]) * 3),
        model_writer=out,
        model_type="bpe",
        vocab_size=700,
        character_coverage=0.98,  # the rarer characters fall back to bytes
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
        minloglevel=2,
        **settings,
    )
    return out.getvalue()


@pytest.fixture(scope="module")
def both(byte_level, spm, tmp_path_factory) -> list[Tokenizer]:
    root = tmp_path_factory.mktemp("both")
    return [
        Tokenizer.from_checkpoint(write(root / "json", tokenizer__json=byte_level)),
        Tokenizer.from_checkpoint(write(root / "spm", tokenizer__model=spm, tokenizer_config__json=LLAMA)),
    ]


def assert_same_ids(folder: Path, texts=TEXTS):
    ours, theirs = Tokenizer.from_checkpoint(folder), reference(folder)
    for text in texts:
        for add_special_tokens in (True, False):
            assert ours.encode(text, add_special_tokens) == theirs.encode(text, add_special_tokens=add_special_tokens), repr(text)
    return ours, theirs


# ------------------------------------------------------------------------------------------------------------------ ids


def test_nasty_text_is_nasty():
    """An editor or git that normalises line ends or strips trailing spaces would leave a test that tests nothing."""
    assert "\r\n" in NASTY and "spaces   " in NASTY and NASTY.endswith("   ") and "\u200d" in NASTY and "\x0b" in NASTY


@pytest.mark.parametrize("cls", [None, "PreTrainedTokenizerFast", "LlamaTokenizerFast"])
def test_byte_level_ids(byte_level, tmp_path, cls):
    """Ids that differ from transformers' on digits, emoji, CRLF, look-alikes: wrong text without any error."""
    config = {"tokenizer_class": cls, "eos_token": "</s>"} if cls else {}
    folder = write(tmp_path, tokenizer__json=byte_level, tokenizer_config__json=config, config__json={"model_type": "llama"})
    ours, theirs = assert_same_ids(folder)
    assert ours.vocab_size == len(theirs)
    plain = [line for line in NASTY.split("\n") if not any(token in line for token in theirs.get_added_vocab())]
    for text in plain:
        assert ours.decode(ours.encode(text)) == text == theirs.decode(theirs.encode(text), skip_special_tokens=True)


@pytest.mark.parametrize("flags", [{"add_bos_token": False}, {"add_bos_token": True, "add_eos_token": True}])
def test_bos_flags_beside_a_tokenizer_json(byte_level, tmp_path, flags):
    """`add_bos_token: false` beside a post-processor that adds BOS: transformers 5 follows the post-processor."""
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>", **flags}
    folder = write(tmp_path, tokenizer__json=byte_level, tokenizer_config__json=config)
    ours, _ = assert_same_ids(folder, ["Hello", ""])
    assert ours.encode("Hello").count(ours.bos_id) == 1 and ours.eos_id not in ours.encode("Hello")


@pytest.mark.parametrize("legacy", [None, False, True])
@pytest.mark.parametrize("prefix", [None, False, True])
@pytest.mark.parametrize("bos, eos", [(None, None), (True, False), (False, True), (True, True)])
def test_sentencepiece_ids_of_llama(spm, tmp_path, legacy, prefix, bos, eos):
    """A space more or less after a special token or in front, a BOS missing or doubled, for any flags a checkpoint may ship."""
    flags = {"legacy": legacy, "add_prefix_space": prefix, "add_bos_token": bos, "add_eos_token": eos}
    config = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>"}
    config |= {key: value for key, value in flags.items() if value is not None}
    texts = TEXTS if bos and not eos else TEXTS[-7:]
    folder = write(tmp_path, tokenizer__model=spm, tokenizer_config__json=config, config__json={"model_type": "llama"})
    ours, theirs = assert_same_ids(folder, texts)
    for text in texts:
        ids = theirs.encode(text)
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("config", [None, {"tokenizer_class": "LlamaTokenizer", "legacy": False}, LLAMA])
@pytest.mark.parametrize("dummy", [True, False])
def test_sentencepiece_ids_of_other_classes(tmp_path, config, dummy):
    """Mistral and folders without a tokenizer_config.json follow the model's own prefix rule, not LlamaTokenizer's."""
    model = train_spm(add_dummy_prefix=dummy)
    files = {"config__json": {"model_type": "mistral"}, **({"tokenizer_config__json": config} if config else {})}
    ours, _ = assert_same_ids(write(tmp_path, tokenizer__model=model, **files))
    text = NASTY.replace("<s>", "").replace("</s>", "").replace("<unk>", "")
    if not (config and "legacy" in config):
        assert ours.encode(text, False) == sentencepiece.SentencePieceProcessor(model_proto=model).encode(text)


def decoder_entry(content: str, **flags) -> dict:
    return {"content": content, "lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True, **flags}


@pytest.mark.parametrize("source", ["added_tokens_decoder", "added_tokens.json"])
@pytest.mark.parametrize("cls, legacy", [("LlamaTokenizer", False), ("LlamaTokenizer", True), ("PreTrainedTokenizerFast", True)])
def test_sentencepiece_with_added_chat_tokens(spm, tmp_path, source, cls, legacy):
    """Chat tokens beside a tokenizer.model cut into "<", "|", "im", … because sentencepiece does not know them."""
    texts = [*TEXTS, "a  <|im_start|>  b <|im_end|>c", "<tool><tool> x <tool>\n  y", "word<w>word <w> x", "▁<|im_end|>▁"]
    config = {**LLAMA, "tokenizer_class": cls, "legacy": legacy}
    files = {"tokenizer__model": spm, "config__json": {"model_type": "llama"}}
    if source == "added_tokens.json":
        files["added_tokens__json"] = {"<|im_end|>": 701, "<|im_start|>": 700, "<tool>": 702, "<w>": 703}
        files["special_tokens_map__json"] = {"additional_special_tokens": CHAT}
    else:
        late = [decoder_entry(CHAT[0]), decoder_entry(CHAT[1], lstrip=True), decoder_entry("<tool>", rstrip=True, special=False)]
        late = {str(700 + i): entry for i, entry in enumerate([*late, decoder_entry("<w>", single_word=True, special=False)])}
        first = {str(i): decoder_entry(token) for i, token in enumerate(["<unk>", "<s>", "</s>"])}
        config["added_tokens_decoder"] = first | late
    folder = write(tmp_path, tokenizer_config__json=config, **files)
    ours, theirs = assert_same_ids(folder, texts)
    assert ours.encode("<|im_end|>", False) == [701] and ours.vocab_size == len(theirs) == 704
    assert ours.decode([700, 702, 701]) == "<tool>"
    if source == "added_tokens_decoder":  # from the older pair of files transformers 5 takes chat tokens for text and prints them
        assert theirs.decode([700, 702, 701], skip_special_tokens=True) == "<tool>"


def test_added_token_renames_a_spare_piece(tmp_path):
    """Yi-6B-Chat's tokens sit on ids inside the model: appended at the end instead, they would be past the embedding."""
    model = train_spm(control_symbols=["<spare0>", "<spare1>"])
    config = {**LLAMA, "tokenizer_class": "PreTrainedTokenizerFast", "added_tokens_decoder": {"4": decoder_entry("<|im_end|>")}}
    ours = Tokenizer.from_checkpoint(write(tmp_path, tokenizer__model=model, tokenizer_config__json=config))
    assert ours.encode("<|im_end|>", False) == [4] and ours.vocab_size == 700 and ours.stop_ids == {2, 4}


def test_turn_ends_of_the_model_itself(tmp_path):
    """Chat tokens that the model was trained with, which no other file lists, and an eos listed as if it were text."""
    model = train_spm(user_defined_symbols=CHAT)
    config = LLAMA | {"eos_token": "<eos>", "added_tokens_decoder": {"700": decoder_entry("<eos>", special=False)}}
    folder = write(tmp_path, tokenizer__model=model, tokenizer_config__json=config)
    ours, theirs = assert_same_ids(folder, [*TEXTS, "x<eos>y"])
    assert ours.stop_ids == {700, *ours.encode("<|im_end|>", False)} and len(ours.stop_ids) == 2
    assert ours.decode([700]) == "" == theirs.decode([700], skip_special_tokens=True)


def test_merges_follow_scores(spm, tmp_path):
    """Llama 2 and Mistral score runs of spaces last; merging by id puts the last space of a run in the wrong token."""
    pb2 = pytest.importorskip("sentencepiece.sentencepiece_model_pb2")
    model = pb2.ModelProto.FromString(spm)
    for piece in model.pieces:
        if set(piece.piece) == {"▁"}:
            piece.score = -1e9
    data, text = model.SerializeToString(), "a    gap of   four,\n    indented"
    own = sentencepiece.SentencePieceProcessor(model_proto=data)
    folder = write(tmp_path, tokenizer__model=data, tokenizer_config__json=LLAMA)
    assert Tokenizer.from_checkpoint(folder).encode(text, False) == own.encode(text)
    assert own.encode(text) != sentencepiece.SentencePieceProcessor(model_proto=spm).encode(text)
    folder = write(tmp_path / "base", tokenizer__model=data, config__json={"model_type": "llama"})
    assert_same_ids(folder, [text, *TEXTS])


def test_dummy_prefix_can_be_switched_off(spm):
    """The appended field must still mean what it is meant to mean in the installed sentencepiece."""
    plain, without = (sentencepiece.SentencePieceProcessor(model_proto=spm + more) for more in (b"", NO_DUMMY_PREFIX))
    for text in filter(None, TEXTS):
        assert plain.encode(text) == without.encode("▁" + text)


@pytest.mark.parametrize("flags", [{}, {"legacy": False}, {"legacy": True}, {"add_prefix_space": False}])
@pytest.mark.parametrize("model_type", ["llama", "mistral"])
@pytest.mark.parametrize("cls", ["LlamaTokenizer", "LlamaTokenizerFast"])
def test_llama_prefix_rules_beside_a_tokenizer_json(spm, tmp_path, flags, model_type, cls):
    """`<s>[INST]` and `<|im_end|>` + newline with a "▁" between that transformers does not put there, or without one it does."""
    backend = reference(write(tmp_path / "model", tokenizer__model=spm, config__json={"model_type": "llama"})).backend_tokenizer
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.pre_tokenizer = None
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 1)])
    folder = write(tmp_path / "json", tokenizer__json=backend.to_str(), config__json={"model_type": model_type})
    write(folder, tokenizer_config__json=LLAMA | flags | {"tokenizer_class": cls})
    ours, theirs = assert_same_ids(folder)
    for text in TEXTS:
        assert ours.decode(ours.encode(text)) == theirs.decode(ours.encode(text), skip_special_tokens=True)


def test_tokenizer_json_wins(byte_level, spm, tmp_path):
    """Reading tokenizer.model although a tokenizer.json is there loses what was added later."""
    assert Tokenizer.from_checkpoint(write(tmp_path, tokenizer__json=byte_level, tokenizer__model=spm)).vocab_size != 700


def test_late_tokens_of_the_config_join_a_tokenizer_json(byte_level, tmp_path):
    """A fine-tune that lists its tokens in tokenizer_config.json only: they would be cut into letters."""
    size = tokenizers.Tokenizer.from_str(byte_level).get_vocab_size()
    newer = {"tokenizer_config__json": {"added_tokens_decoder": {str(size): decoder_entry("<|end|>")}}}
    older = {"added_tokens__json": {"<|end|>": size}, "special_tokens_map__json": {"eos_token": "<|end|>"}}
    for files in (newer, older):
        folder = write(tmp_path / str(files is newer), tokenizer__json=byte_level, config__json={"model_type": "llama"}, **files)
        ours, theirs = assert_same_ids(folder, ["a<|end|>b", *TEXTS])
        assert ours.encode("<|end|>", False) == [size] and size in ours.stop_ids
        assert ours.decode([size]) == "" == theirs.decode([size], skip_special_tokens=True)


def test_long_prompts_are_not_truncated(byte_level, tmp_path):
    """A tokenizer.json saved with training's truncation and padding would cut a long prompt, or pad a short one, silently."""
    tokenizer = tokenizers.Tokenizer.from_str(byte_level)
    tokenizer.enable_truncation(8)
    tokenizer.enable_padding(length=8)
    folder = write(tmp_path, tokenizer__json=tokenizer.to_str())
    ours, _ = assert_same_ids(folder)
    assert len(ours.encode("x" * 100)) > 8 and len(ours.encode("x", False)) == 1


def test_single_file_stands_for_its_folder(byte_level, tmp_path):
    """`model.safetensors` given as the checkpoint: the tokenizer is beside it."""
    folder = write(tmp_path, tokenizer__json=byte_level, model__safetensors=b"")
    for path in (folder, str(folder), folder / "model.safetensors"):
        assert Tokenizer.from_checkpoint(path).vocab_size > 256


def test_lone_surrogate_is_a_user_error(both):
    """A prompt argument with a byte that is not UTF-8 must not end in a TypeError from a compiled library."""
    for tokenizer in both:
        with pytest.raises(ValueError, match="character 1"):
            tokenizer.encode("a\udcffb")


def test_text_of_an_added_token_is_verbatim(byte_level, tmp_path):
    """Undoing byte-level spelling in an added token turns its "é" into a broken byte."""
    ours = Tokenizer.from_checkpoint(write(tmp_path, tokenizer__json=byte_level))
    assert ours.decode(ours.encode("x<é>y<tool>")) == "x<é>y<tool>"


def test_added_token_of_spaces(tmp_path):
    """A SentencePiece vocabulary that lists runs of spaces as added tokens would print "▁▁"."""
    tokenizer = tokenizers.Tokenizer(models.BPE({"▁": 0, "a": 1}, []))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse()])
    tokenizer.add_tokens(["▁▁"])
    assert Tokenizer.from_checkpoint(write(tmp_path, tokenizer__json=tokenizer.to_str())).decode([2, 1, 0, 1]) == "  a a"


# ------------------------------------------------------------------------------------------------------------ streaming


def test_stream_equals_decode(both):
    """Emoji and CJK streamed token by token come out as U+FFFD, words lose their spaces, or text comes twice."""
    for tokenizer in both:
        for text in TEXTS:
            ids = tokenizer.encode(text)
            whole, stream, shown = tokenizer.decode(ids), tokenizer.stream(), ""
            for token_id in ids:
                shown += stream.push(token_id)
                assert whole.startswith(shown)
            assert shown + stream.flush() == whole and ("\ufffd" in whole) == ("\ufffd" in text)


def test_stream_equals_decode_for_any_ids(both):
    """Ids that no text encodes to (a small model at high temperature): broken UTF-8, ids past the vocabulary."""
    rng = random.Random(0)
    for tokenizer in both:
        for _ in range(300):
            ids = [rng.randrange(rng.choice((260, tokenizer.vocab_size + 3))) for _ in range(rng.randrange(20))]
            stream = tokenizer.stream()
            assert "".join(map(stream.push, ids)) + stream.flush() == tokenizer.decode(ids)


def byte_ids(tokenizer: Tokenizer, data: bytes) -> list[int]:
    """Ids of single-byte tokens."""
    by_bytes = {tokenizer._bytes(i): i for i in reversed(range(tokenizer.vocab_size))}
    return [by_bytes[bytes([byte])] for byte in data]


def test_broken_utf8_does_not_stall(both):
    """Holding text back while it ends in U+FFFD waits for ever on bytes that nothing can complete."""
    for tokenizer in both:
        for broken in (b"\xff", b"\xc3", b"\xe2\x82", b"\xf0\x9f\x98", b"\x80" * 9, b"\xed\xa0\x80", b"\xf0\x9f" * 9):
            stream, data = tokenizer.stream(), b"x" + broken + b"ok"
            pieces = [stream.push(i) for i in byte_ids(tokenizer, data)]
            assert pieces[-1] == "k" and pieces[-2].endswith("o") and "".join(pieces) == data.decode("utf-8", "replace")


def test_a_character_appears_with_its_last_byte(both):
    """A character cut off by max_new_tokens is shown by the flush, and a genuine U+FFFD is not taken for a broken one."""
    for tokenizer in both:
        stream = tokenizer.stream()
        assert [stream.push(i) for i in byte_ids(tokenizer, "😀é\ufffd".encode())] == ["", "", "", "😀", "", "é", "", "", "\ufffd"]
        assert stream.flush() == ""
        assert [stream.push(i) for i in byte_ids(tokenizer, "😀".encode()[:3])] == ["", "", ""] and stream.flush() == "\ufffd"


def test_stream_decodes_every_token_once(both):
    """Decoding the whole answer at every step makes a long answer quadratic."""
    for tokenizer in both:
        stream, seen = tokenizer.stream(), []
        inner = stream._token_bytes
        stream._token_bytes = lambda token_id: seen.append(token_id) or inner(token_id)
        ids = tokenizer.encode(NASTY)
        for token_id in ids:
            stream.push(token_id)
        assert seen == ids


def test_continuation_keeps_its_first_space(both):
    """A raw prompt printed before its continuation: "of France is" + "Paris" would lose the space between."""
    for tokenizer in both:
        ids = tokenizer.encode("The capital of France is Paris")
        for cut in range(len(ids) + 1):
            stream = tokenizer.stream(after=ids[:cut])
            rest = "".join(map(stream.push, ids[cut:])) + stream.flush()
            assert tokenizer.decode(ids[:cut]) + rest == "The capital of France is Paris"


# ----------------------------------------------------------------------------------------------------------------- chat


@pytest.mark.parametrize("template", [CHATML, LLAMA3, LLAMA2], ids=["chatml", "llama3", "llama2"])
@pytest.mark.parametrize("kind", ["json", "spm", "spm-legacy"])
@pytest.mark.parametrize("prompt", [True, False])
def test_chat_ids(byte_level, spm, tmp_path, template, kind, prompt):
    """A template that writes BOS, encoded with specials on, starts with two; and spaces around turns differ from training."""
    config = {**LLAMA, "legacy": kind == "spm-legacy"} | ({"tokenizer_class": "PreTrainedTokenizerFast"} if kind == "json" else {})
    files = {"tokenizer__json": byte_level} if kind == "json" else {"tokenizer__model": spm, "added_tokens__json": {"<|im_end|>": 700}}
    folder = write(tmp_path, tokenizer_config__json=config | {"chat_template": template}, **files)
    ours, theirs = Tokenizer.from_checkpoint(folder), reference(folder)
    for messages in (MESSAGES, MESSAGES[1:2]):
        ids = ours.encode_chat(messages, prompt)
        assert ids == theirs.apply_chat_template(messages, add_generation_prompt=prompt, return_dict=False)
        assert ours.render_chat(messages, prompt) == theirs.apply_chat_template(messages, add_generation_prompt=prompt, tokenize=False)
        assert template == CHATML or ids[:2].count(ours.bos_id) == 1


def chat(folder: Path, byte_level: str, template, **config) -> Tokenizer:
    return Tokenizer.from_checkpoint(write(folder, tokenizer__json=byte_level, tokenizer_config__json={"chat_template": template, **config}))


def test_template_dialect(byte_level, tmp_path):
    """Templates use what transformers gives them; without it they fail, or escape HTML that the model never saw escaped."""
    template = (
        "{% for m in messages %}\n  {% if loop.index0 == 1 %}\n{% continue %}\n{% endif %}{{ m.content }}{% endfor %}\n"
        "{% generation %}in{% endgeneration %}|{{ messages[0] | tojson }}|{{ strftime_now('%Y') | length }}|"
        "{{ tools is none and documents is none }}|{{ bos_token }}{{ eos_token }}{{ unk_token }}{{ image_token }}|{{ nothing }}"
    )
    config = {"bos_token": {"__type": "AddedToken", "content": "<s>"}, "eos_token": "</s>", "unk_token": None, "image_token": "<img>"}
    messages = [{"role": "user", "content": "é<&>'"}, {"role": "user", "content": "skipped"}]
    expected = "é<&>'in|" + json.dumps(messages[0], ensure_ascii=False) + "|4|True|<s></s><img>|"
    ours = chat(tmp_path, byte_level, template, **config)
    assert ours.render_chat(messages) == expected
    assert reference(tmp_path).apply_chat_template(messages, tokenize=False) == expected


@pytest.mark.parametrize(
    "attack",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ raise_exception.__globals__ }}",
        "{{ messages.__class__ }}",
        "{{ strftime_now.__code__ }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{{ '{0.__class__}'.format(messages) }}",
        "{% set _ = messages.append({}) %}",
        "{% set x = namespace() %}{{ x.__init__.__globals__ }}",
        "{% for i in range(999999999) %}{% endfor %}",
    ],
)
def test_template_cannot_leave_the_sandbox(byte_level, tmp_path, attack):
    """A chat template comes with the download: reaching Python's internals from it would run a stranger's code."""
    ours = chat(tmp_path, byte_level, attack)
    try:  # jinja2 gives nothing for an internal attribute that is only printed, and raises when it is used
        assert ours.render_chat([{"role": "user", "content": "x"}]) == ""
    except ValueError as error:
        assert "chat template failed" in str(error)


@pytest.mark.parametrize(
    "template, message",
    [("{{ raise_exception('use turns') }}", "use turns"), ("{% if %}", "failed"), ("{{ 1 / 0 }}", "zero"), ("{{ a.b.c }}", "undefined")],
)
def test_template_errors_are_user_errors(byte_level, tmp_path, template, message):
    """A template's refusal (two user turns in a row) shown as a jinja2 traceback, or without what it says."""
    with pytest.raises(ValueError, match=message):
        chat(tmp_path, byte_level, template).encode_chat([{"role": "user", "content": "x"}])


def test_no_template_points_to_raw(byte_level, tmp_path):
    """A base model asked to chat: the way out must be in the message."""
    ours = Tokenizer.from_checkpoint(write(tmp_path, tokenizer__json=byte_level))
    assert ours.chat_template is None
    with pytest.raises(ValueError, match="--raw"):
        ours.encode_chat([{"role": "user", "content": "x"}])


def test_template_sources(byte_level, tmp_path):
    """Newer checkpoints keep the template in a file of its own, older ones in a list of named ones; a stale copy must not win."""
    several = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "named"}]
    assert chat(tmp_path, byte_level, several).chat_template == "named"
    assert chat(tmp_path, byte_level, several[:1]).chat_template is None
    write(tmp_path, chat_template__json={"chat_template": "processor"})
    assert chat(tmp_path, byte_level, None).chat_template == "processor"
    assert chat(tmp_path, byte_level, "config").chat_template == "config"
    write(tmp_path, chat_template__jinja="file é")
    assert chat(tmp_path, byte_level, "config").chat_template == "file é"


# ------------------------------------------------------------------------------------------------- special tokens, stops


def test_special_tokens_from_every_file(byte_level, tmp_path):
    """BOS written as an object, or named only by the older special_tokens_map.json, which wins over a file of its age."""
    names = {"bos_token": {"content": "<s>"}, "eos_token": "</s>"}
    folder = write(tmp_path / "config", tokenizer__json=byte_level, tokenizer_config__json=names)
    ours = Tokenizer.from_checkpoint(folder)
    bos, eos, im_end = (ours.encode(token, False)[0] for token in ("<s>", "</s>", "<|im_end|>"))
    assert (ours.bos_id, ours.eos_id) == (bos, eos)
    folder = write(tmp_path / "map", tokenizer__json=byte_level, special_tokens_map__json=names)
    assert Tokenizer.from_checkpoint(folder).bos_id == bos
    write(folder, tokenizer_config__json={"bos_token": "", "eos_token": "<|im_end|>"})
    ours = Tokenizer.from_checkpoint(folder)
    assert (ours.bos_id, ours.eos_id) == (bos, eos) and reference(folder).eos_token_id == eos
    write(folder, tokenizer_config__json={"bos_token": None, "eos_token": "<|im_end|>", "added_tokens_decoder": {}})
    ours = Tokenizer.from_checkpoint(folder)
    assert (ours.bos_id, ours.eos_id) == (bos, im_end)
    assert Tokenizer.from_checkpoint(write(tmp_path / "none", tokenizer__json=byte_level)).bos_id is None


def test_stop_ids_from_every_source(byte_level, tmp_path):
    """Llama-3-Instruct never stops: the tokenizer names one eos, generation_config.json the list."""
    folder = write(tmp_path, tokenizer__json=byte_level)
    ours = Tokenizer.from_checkpoint(folder)
    turn_ends = {ours.encode(token, False)[0] for token in ("<|im_end|>", "<|eot_id|>")}
    assert ours.stop_ids == turn_ends and isinstance(ours.stop_ids, frozenset)
    write(folder, tokenizer_config__json={"eos_token": "</s>"})
    ours = Tokenizer.from_checkpoint(folder)
    assert ours.stop_ids == turn_ends | {ours.eos_id}
    write(folder, config__json={"eos_token_id": 5}, generation_config__json={"eos_token_id": [7, 8]})
    assert Tokenizer.from_checkpoint(folder).stop_ids == turn_ends | {ours.eos_id, 5, 7, 8}
    write(folder, config__json={"eos_token_id": [5, 6]}, generation_config__json={"eos_token_id": 0})
    assert Tokenizer.from_checkpoint(folder).stop_ids == turn_ends | {ours.eos_id, 5, 6, 0}
    write(folder, config__json={"eos_token_id": None}, generation_config__json={})
    assert Tokenizer.from_checkpoint(folder).stop_ids == turn_ends | {ours.eos_id}


def test_ordinary_text_is_no_stop(tmp_path):
    """A vocabulary in which "<|end|>" is a merged word of the corpus must not stop at it."""
    vocab = {token: i for i, token in enumerate(["<|end|>", *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    assert Tokenizer.from_checkpoint(write(tmp_path, tokenizer__json=tokenizer.to_str())).stop_ids == frozenset()


@pytest.mark.parametrize("value", ["</s>", 2.0, True, [2, "x"], {"id": 2}])
@pytest.mark.parametrize("file", ["config", "generation_config"])
def test_eos_of_a_wrong_type(byte_level, tmp_path, value, file):
    """A stop set with a string in it never matches an id, and the answer never ends."""
    write(tmp_path, tokenizer__json=byte_level, **{f"{file}__json": {"eos_token_id": value}})
    with pytest.raises(ValueError, match=rf"[\\/]{file}.json has eos_token_id"):
        Tokenizer.from_checkpoint(tmp_path)


# ---------------------------------------------------------------------------------------------------------------- errors

JSON_FILES = ("tokenizer_config", "special_tokens_map", "added_tokens", "config", "generation_config", "chat_template")


@pytest.mark.parametrize("content", [b"{", b"", b"[1]", b"null", b'{"a": "\xff"}', b"\x80\x04pickle"])
@pytest.mark.parametrize("file", JSON_FILES)
def test_malformed_json_names_the_file(spm, tmp_path, file, content):
    """A download that broke off: the message must say which of seven files to fetch again."""
    write(tmp_path, tokenizer__model=spm, **{f"{file}__json": content})
    with pytest.raises(ValueError, match=rf"[\\/]{file}\.json "):
        Tokenizer.from_checkpoint(tmp_path)


@pytest.mark.parametrize("content", [b"{", b"", b"{}", b"\xff\xfe", b"version https://git-lfs.github.com/spec/v1\n"])
@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer.model"])
def test_corrupt_tokenizer_names_the_file(tmp_path, file, content):
    """The libraries' own errors do not say which file they mean; an empty model even loads in sentencepiece."""
    write(tmp_path, **{file.replace(".", "__"): content})
    with pytest.raises(ValueError, match=rf"[\\/]{file} is not"):
        Tokenizer.from_checkpoint(tmp_path)


def test_truncated_sentencepiece_model(spm, tmp_path):
    """A download that broke off in the middle of the vocabulary."""
    with pytest.raises(ValueError, match="tokenizer.model is not a SentencePiece model"):
        Tokenizer.from_checkpoint(write(tmp_path, tokenizer__model=spm[: len(spm) // 2]))


def test_template_file_that_is_not_utf8(byte_level, tmp_path):
    """A template saved in another encoding."""
    with pytest.raises(ValueError, match="chat_template.jinja is not UTF-8"):
        Tokenizer.from_checkpoint(write(tmp_path, tokenizer__json=byte_level, chat_template__jinja=b"\xe9"))


def test_tiktoken_model_is_recognised(tmp_path):
    """Meta's original Llama 3 has a tokenizer.model that is no SentencePiece model: say so, and where to go."""
    with pytest.raises(ValueError, match="tiktoken.*tokenizer.json"):
        Tokenizer.from_checkpoint(write(tmp_path, tokenizer__model=b"IQ== 0\nIg== 1\nIw== 2\n"))


@pytest.mark.parametrize("path", ["", "absent", "model.safetensors"])
def test_no_tokenizer(tmp_path, path):
    """A folder with weights alone, or a wrong path: what was looked for and where."""
    write(tmp_path, model__safetensors=b"")
    with pytest.raises(ValueError, match="no tokenizer.json and no tokenizer.model in .*; give"):
        Tokenizer.from_checkpoint(tmp_path / path)


@pytest.mark.parametrize("entries", [{"x": decoder_entry("<a>")}, {"700": "<a>"}, {"700": {"text": "<a>"}}, []])
def test_added_tokens_of_an_unknown_form(spm, tmp_path, entries):
    """An entry that is skipped is a token that is cut into letters."""
    with pytest.raises(ValueError, match="tokenizer_config.json describes its added tokens"):
        Tokenizer.from_checkpoint(write(tmp_path, tokenizer__model=spm, tokenizer_config__json={"added_tokens_decoder": entries}))


def test_other_kinds_of_vocabulary_are_refused(tmp_path):
    """WordPiece text put together by byte-level or SentencePiece rules would be garbled, not refused."""
    tokenizer = tokenizers.Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    for decoder in (decoders.WordPiece(), None):
        if decoder:
            tokenizer.decoder = decoder
        with pytest.raises(ValueError, match="decodes by"):
            Tokenizer.from_checkpoint(write(tmp_path, tokenizer__json=tokenizer.to_str()))


def test_import_is_light():
    """`import tokenizer` must not pull in torch or transformers, which a tool that only counts tokens has no use for."""
    code = "import sys, tokenizer; sys.exit(any(name in sys.modules for name in ('torch', 'transformers', 'numpy')))"
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parent.parent).returncode == 0
