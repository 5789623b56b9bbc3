# SPDX-License-Identifier: Apache-2.0
"""Text to token ids and back: `tokenizer.json` or SentencePiece's `tokenizer.model`, chat templates, stop ids, streaming.

Four things go wrong without an error in programs like this one. What is done about them here:

* **BOS exactly once.** A raw prompt gets what the checkpoint's own tokenizer adds: the post-processor of tokenizer.json, or,
  for a tokenizer.model alone, what `add_bos_token` and `add_eos_token` say (absent means no). A rendered chat gets nothing,
  because its template writes special tokens itself.
* **All stop ids.** Chat models end a turn with another token than the tokenizer's eos. The stop set is the union of every
  file that names one, plus the turn ends in the vocabulary; ids only, since a string may be ordinary text.
* **A token is bytes, not text.** Characters are spread over tokens, so ids become bytes, bytes are joined and decoded as
  UTF-8. Streaming does the same with an incremental decoder: each token costs the same however long the answer, and the
  pieces concatenate to the decode of all ids by construction. At most three bytes are held back: by the fourth, or by one
  that cannot follow, UTF-8 tells a whole character from a broken one. So broken output prints U+FFFD and never stalls.
* **The space in front.** SentencePiece marks a word's space as "▁" and puts one before the first word. Where a checkpoint's
  class is `LlamaTokenizer`, transformers lets `legacy` and `add_prefix_space` in tokenizer_config.json decide, even beside a
  tokenizer.json, and so does this file. (Yi was trained without: `"add_prefix_space": false` gives what it has seen.)

Ids equal those of transformers 5.24, except where it leaves the checkpoint's own files. Given only a tokenizer.model, its
`LlamaTokenizer` ranks merges by id, not by the scores in the file, and runs of spaces become tokens that Llama 2 and Mistral
never saw there ("a    b": 4 spaces and "b" for 3 and " b"); SentencePiece itself encodes here. And for `GPT2Tokenizer` it
replaces the rules of tokenizer.json by GPT-2's, so that SmolLM2's digits no longer stand alone; here the file's rules hold.
"""

import codecs
import functools
import json
import re
from collections.abc import Callable, Iterable
from datetime import datetime
from pathlib import Path

import jinja2
import jinja2.ext
import jinja2.sandbox
import sentencepiece
import tokenizers
from tokenizers import AddedToken

# What ends a turn in ChatML (Qwen, Yi, SmolLM2), Llama 3 and 4, Gemma, OpenChat and Phi-3; the last three end a document.
# Padding, separators, role markers and "</s>", which is plain text in some vocabularies, do not belong here.
TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|eot|>", "<|eom|>", "<end_of_turn>", "<|end_of_turn|>", "<|end|>")
TURN_ENDS += ("<|endoftext|>", "<|end_of_text|>", "<｜end▁of▁sentence｜>")

# Protobuf merges messages laid end to end, and the last value of a field wins. These bytes say
# `normalizer_spec { add_dummy_prefix: false }`, for which sentencepiece has no call.
NO_DUMMY_PREFIX = b"\x1a\x02\x18\x00"


class Tokenizer:
    """A checkpoint's tokenizer.

    Attributes:
        chat_template: Jinja source, or None for a checkpoint without one.
        bos_id, eos_id: None where the checkpoint names none.
        vocab_size: one more than the highest id.
        stop_ids: generation ends at any of these.
    """

    def __init__(self, vocabulary: "_Json | _SentencePiece", names: dict[str, str], chat_template: str | None, stop_ids: Iterable[int]):
        self._vocabulary = vocabulary
        self._names = names  # "bos_token" to its text, and so on: what a chat template may ask for
        self.chat_template = chat_template
        self.bos_id, self.eos_id = (vocabulary.id(names.get(name, "")) for name in ("bos_token", "eos_token"))
        self.vocab_size: int = vocabulary.size
        self.stop_ids = frozenset(stop_ids)

    @classmethod
    def from_checkpoint(cls, path: str | Path) -> "Tokenizer":
        """Read the tokenizer of a checkpoint folder, or of the folder that a single safetensors file is in.

        Raises:
            ValueError: no tokenizer there, or a file that does not hold what its name says.
        """
        folder = Path(path).parent if Path(path).is_file() else Path(path)
        config, model = _read_json(folder / "tokenizer_config.json"), _read_json(folder / "config.json")
        names, special = _special_tokens(config, _read_json(folder / "special_tokens_map.json"))
        added, prefix = _added_tokens(folder, config, special), _llama_prefix(config, model)
        if (folder / "tokenizer.json").is_file():
            vocabulary = _Json(folder / "tokenizer.json", added, special, prefix)
        elif (folder / "tokenizer.model").is_file():
            vocabulary = _SentencePiece(folder / "tokenizer.model", added, special, prefix, config, names)
        else:
            raise ValueError(f"no tokenizer.json and no tokenizer.model in {folder}; give a checkpoint folder that has one")
        stop = {vocabulary.id(names.get("eos_token", "")), *map(vocabulary.added.get, TURN_ENDS)} - {None}
        for file in ("generation_config.json", "config.json"):
            eos = _read_json(folder / file).get("eos_token_id")
            ids = eos if isinstance(eos, list) else [] if eos is None else [eos]
            if any(type(i) is not int for i in ids):
                raise ValueError(f"{folder / file} has eos_token_id = {eos!r}; it must be an id or a list of ids")
            stop.update(ids)
        return cls(vocabulary, names, _chat_template(folder, config), stop)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of a raw prompt. Special tokens spelled out in the text become those tokens, as in transformers.

        Raises:
            ValueError: a lone surrogate in the text, which is how Python carries a byte that was not UTF-8.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"the text is not valid Unicode at character {error.start} ({error.reason})") from None
        return self._vocabulary.encode(text, add_special_tokens)

    def encode_chat(self, messages: list[dict], add_generation_prompt: bool = True) -> list[int]:
        """Ids of a conversation as its template renders it; raises as `render_chat` does."""
        return self.encode(self.render_chat(messages, add_generation_prompt), add_special_tokens=False)

    def render_chat(self, messages: list[dict], add_generation_prompt: bool = True) -> str:
        """Render messages, `{"role": …, "content": …}` each, with the checkpoint's template, in jinja2's sandbox.

        Raises:
            ValueError: there is no template, or it fails, or it refuses these messages.
        """
        if self.chat_template is None:
            raise ValueError("this checkpoint has no chat template, as a base model has none; use --raw to continue plain text")
        given = {"messages": messages, "add_generation_prompt": add_generation_prompt, "tools": None, "documents": None}
        try:
            return _jinja_environment().from_string(self.chat_template).render(self._names | given)
        except Exception as error:  # a template is a program, and can raise whatever Python can
            raise ValueError(f"the checkpoint's chat template failed: {error}") from error

    def decode(self, ids: Iterable[int]) -> str:
        """Text of ids. Special tokens and ids without a token (a model's spare rows) give nothing, broken UTF-8 gives U+FFFD."""
        return self.stream().emit(b"".join(map(self._bytes, ids)), final=True)

    def stream(self, after: Iterable[int] = ()) -> "TextStream":
        """Decode token by token. `after`: ids already printed that the stream continues, so that the first word keeps its space."""
        stream = TextStream(self._bytes, self._vocabulary.strip)
        for token_id in after:
            stream.push(token_id)
        return stream

    def _bytes(self, token_id: int) -> bytes:
        vocabulary, token_id = self._vocabulary, int(token_id)
        piece = vocabulary.piece(token_id)
        if piece is None or token_id in vocabulary.special:
            return b""
        if vocabulary.byte_level:
            alphabet = _byte_alphabet()
            # An added token is plain text: the "é" of "<é>" is a letter, where in a learned piece it spells a byte.
            spelled = piece not in vocabulary.added and alphabet.keys() >= set(piece)
            return bytes(map(alphabet.get, piece)) if spelled else piece.encode()
        if vocabulary.byte_fallback and re.fullmatch("<0x[0-9A-Fa-f]{2}>", piece):
            return bytes.fromhex(piece[3:5])
        return piece.replace("▁", " ").encode()


class TextStream:
    """Token ids in, text out; everything returned, concatenated, equals `Tokenizer.decode` of all ids."""

    def __init__(self, token_bytes: Callable[[int], bytes], strip: bool):
        self._token_bytes, self._strip = token_bytes, strip  # strip: a space in front is SentencePiece's, not the text's
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """The text that this token completes, possibly none; never a part of a character."""
        return self.emit(self._token_bytes(token_id))

    def flush(self) -> str:
        """What is left when generation ends: U+FFFD if it ended inside a character, else nothing."""
        return self.emit(b"", final=True)

    def emit(self, data: bytes, final: bool = False) -> str:
        """The text that these bytes complete; `final` says that no more will come."""
        text = self._utf8.decode(data, final)
        if text and self._strip:
            self._strip, text = False, text.removeprefix(" ")
        return text


class _Json:
    """A tokenizer.json, run by `tokenizers`."""

    def __init__(self, path: Path, added: dict[int, AddedToken], special: list[str], prefix: str | None):
        text = _read_text(path)
        try:
            tokenizer = tokenizers.Tokenizer.from_str(text)
        except Exception as error:  # the library raises no narrower class
            raise ValueError(f"{path} is not a tokenizer that can be read ({error}); download it again") from None
        tokenizer.no_truncation()  # files keep training's limits: a long prompt would lose its end without a word
        tokenizer.no_padding()
        known = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
        late = [*added.values(), *(AddedToken(name, special=True) for name in special if tokenizer.token_to_id(name) is not None)]
        tokenizer.add_tokens([token for token in late if token.content not in known])
        by_id = tokenizer.get_added_tokens_decoder()
        self.added = {token.content: i for i, token in by_id.items()}
        self.special = {i for i, token in by_id.items() if token.special}
        self.size = 1 + max(tokenizer.get_vocab().values(), default=-1)
        self.id, self.piece, self._tokenizer = tokenizer.token_to_id, tokenizer.id_to_token, tokenizer

        decoder = json.loads(tokenizer.decoder.__getstate__()) if tokenizer.decoder else {"type": "none"}
        parts = {part["type"]: part for part in decoder.get("decoders", [decoder])}
        self.byte_level, self.byte_fallback = "ByteLevel" in parts, "ByteFallback" in parts
        if not self.byte_level and not parts.keys() & {"Replace", "Metaspace"}:
            raise ValueError(f"{path} decodes by {decoder['type']!r}; only byte-level and SentencePiece vocabularies are supported")
        strip, metaspace = parts.get("Strip", {}), parts.get("Metaspace", {})
        self.strip = strip.get("start", 0) > 0 or metaspace.get("prepend_scheme", "never") != "never"
        if prefix and not self.byte_level:
            tokenizer.normalizer = tokenizers.normalizers.Sequence([])
            tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(prepend_scheme=prefix, split=False)
            self.strip = prefix != "never"

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids


class _SentencePiece:
    """A tokenizer.model, run by `sentencepiece`; text is cut at special and added tokens, which that library does not know."""

    byte_level, byte_fallback = False, True

    def __init__(self, path: Path, added: dict[int, AddedToken], special: list[str], prefix: str | None, config: dict, names: dict):
        data = path.read_bytes()
        if re.match(rb"[A-Za-z0-9+/]+=* \d+\r?\n", data):
            raise ValueError(f"{path} is in tiktoken's format, as Meta ships Llama 3; use the checkpoint that has a tokenizer.json")
        self._model = model = sentencepiece.SentencePieceProcessor()
        try:
            model.LoadFromSerializedProto(data)
        except RuntimeError as error:
            raise ValueError(f"{path} is not a SentencePiece model ({error}); download it again") from None
        dummy = model.normalize("a").startswith("▁")
        if prefix is None and dummy and not config.get("legacy", True):
            prefix = "first"
        self._prefix = prefix  # None: the model's own rule, applied to every chunk
        self.strip = dummy if prefix is None else prefix != "never"
        if prefix is not None:
            model.LoadFromSerializedProto(data + NO_DUMMY_PREFIX)

        count, unk = model.vocab_size(), model.unk_id()
        for name, i in (("bos_token", model.bos_id()), ("eos_token", model.eos_id())):
            if i >= 0 and name not in names:
                names[name] = model.id_to_piece(i)  # the caller's dict, too: the template and eos_id need them
        own = {i: model.id_to_piece(i) for i in range(count) if model.is_control(i) or i == unk}
        own |= {i: name for name in (*special, *TURN_ENDS) if (i := model.piece_to_id(name)) != unk}
        tokens = {i: AddedToken(name, special=True) for i, name in own.items()} | added  # added ones may rename a spare piece
        self.added = {token.content: i for i, token in tokens.items()}
        self.special = {i for i, token in tokens.items() if token.special or token.content in special}
        self.size = max(count, 1 + max(tokens))
        self._names = {i: token.content for i, token in tokens.items()}
        # With no vocabulary of its own, this finds added tokens by transformers' rules and passes over all other text.
        self._cutter = tokenizers.Tokenizer(tokenizers.models.BPE())
        self._cutter.add_tokens(list(tokens.values()))
        self._cut_ids = {self._cutter.token_to_id(content): i for content, i in self.added.items()}
        around = [self.id(names.get(f"{which}_token", "")) if config.get(f"add_{which}_token") else None for which in ("bos", "eos")]
        self._before, self._after = ([] if i is None else [i] for i in around)

    def id(self, token: str) -> int | None:
        i = self.added.get(token, self._model.piece_to_id(token))
        return None if i == self._model.unk_id() else i

    def piece(self, i: int) -> str | None:
        return self._names.get(i) or (self._model.id_to_piece(i) if 0 <= i < self._model.vocab_size() else None)

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        ids, done = [], 0
        found = self._cutter.encode(text)
        for cut_id, (start, end) in zip(found.ids, found.offsets):
            ids += [*self._chunk(text[done:start], done), self._cut_ids[cut_id]]
            done = end
        ids += self._chunk(text[done:], done)
        return self._before + ids + self._after if add_special_tokens else ids

    def _chunk(self, text: str, start: int) -> list[int]:
        if text and text[0] not in " ▁" and (self._prefix == "always" or (self._prefix == "first" and start == 0)):
            text = "▁" + text
        return self._model.encode(text)


def _read_text(path: Path) -> str | None:
    """A file's text, None if there is no such file; ValueError if it is not UTF-8."""
    try:
        return path.read_text(encoding="utf-8") if path.is_file() else None
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text ({error}); download it again") from None


def _read_json(path: Path) -> dict:
    """A file's JSON object, empty if there is no such file; ValueError if it holds anything else."""
    text = _read_text(path)
    try:
        values = {} if text is None else json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not valid JSON ({error}); download it again") from None
    if not isinstance(values, dict):
        raise ValueError(f"{path} holds a JSON {type(values).__name__}; it must be an object")
    return values


def _special_tokens(config: dict, token_map: dict) -> tuple[dict[str, str], list[str]]:
    """Named special tokens by name, and the texts of these and of unnamed ones.

    A token is written as its text or as an object with the text in `content`; null and "" mean none. special_tokens_map.json
    is the older file: it wins over a tokenizer_config.json without `added_tokens_decoder`, and fills gaps in a newer one.
    """

    def text(token: object) -> str:
        content = token.get("content") if isinstance(token, dict) else token
        return content if isinstance(content, str) else ""

    sources = (token_map, config) if "added_tokens_decoder" in config else (config, token_map)
    names = {key: text(value) for source in sources for key, value in source.items() if key.endswith("_token") and text(value)}
    lists = [source.get(key) or [] for source in sources for key in ("additional_special_tokens", "extra_special_tokens")]
    unnamed = [text(token) for tokens in lists for token in (tokens.values() if isinstance(tokens, dict) else tokens)]
    return names, [*names.values(), *filter(None, unnamed)]


def _added_tokens(folder: Path, config: dict, special: list[str]) -> dict[int, AddedToken]:
    """Tokens added after training by id, in its order: from tokenizer_config.json, else from the older added_tokens.json."""
    older = {} if "added_tokens_decoder" in config else _read_json(folder / "added_tokens.json")
    file = "added_tokens.json" if older else "tokenizer_config.json"
    try:
        tokens = {int(i): AddedToken(text, special=text in special, normalized=text not in special) for text, i in older.items()}
        tokens |= {int(i): AddedToken(token.pop("content"), **token) for i, token in config.get("added_tokens_decoder", {}).items()}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{folder / file} describes its added tokens in an unknown way ({error!r})") from None
    return dict(sorted(tokens.items(), key=lambda item: item[0]))


def _llama_prefix(config: dict, model: dict) -> str | None:
    """Where transformers' LlamaTokenizer puts "▁": "never", "first" (start of the text) or "always" (after special tokens too).

    None: another class, which follows the tokenizer's own file. So does Mistral, whatever class it names.
    """
    name = config.get("tokenizer_class") or model.get("tokenizer_class") or ""
    if name.removesuffix("Fast") != "LlamaTokenizer" or model.get("model_type", "llama") != "llama":
        return None
    if config.get("add_prefix_space") is False:
        return "never"
    return "always" if config.get("legacy") else "first"


def _chat_template(folder: Path, config: dict) -> str | None:
    """The first template found in chat_template.jinja, tokenizer_config.json and chat_template.json."""
    template = _read_text(folder / "chat_template.jinja")
    for source in (config, _read_json(folder / "chat_template.json")):
        found = source.get("chat_template")
        if isinstance(found, list):  # one for each use: [{"name": …, "template": …}, …]
            found = {entry.get("name"): entry.get("template") for entry in found if isinstance(entry, dict)}.get("default")
        template = found if template is None else template
    return template


class _Generation(jinja2.ext.Extension):
    """`{% generation %}`, with which templates mark what is trained on: renders as what it encloses."""

    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        return jinja2.nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def _jinja_environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    """The dialect that chat templates are written in: jinja2 plus what transformers gives them."""

    def raise_exception(message):
        raise jinja2.TemplateError(message)

    def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        # jinja2's own filter writes "<" as "\u003c", which no model was trained on.
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    extensions = [_Generation, "jinja2.ext.loopcontrols"]
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    environment.filters["tojson"] = tojson
    environment.globals |= {"raise_exception": raise_exception, "strftime_now": lambda form: datetime.now().strftime(form)}
    return environment


@functools.cache
def _byte_alphabet() -> dict[str, int]:
    """The characters that spell bytes in byte-level BPE (GPT-2): visible Latin-1 is itself, the rest follows from U+0100."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(0x100 + n): byte for n, byte in enumerate(hidden)}
