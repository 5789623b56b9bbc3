# SPDX-License-Identifier: Apache-2.0
"""Generate text: sampling, the generate loop, the command line.

    python generate.py                                  a needle question over a long document, on the embedded model
    python generate.py --ckpt PATH_OR_HUB_ID --prompt "..."
    python generate.py --ckpt ... --prompt-file book.txt --ctx 128k
    python generate.py --ckpt ... --chat

Text goes to stdout; the progress bar, the summary and errors go to stderr. Bad input ends with one sentence and exit code 2.
"""

import argparse
import json
import math
import os
import random
import re
import resource
import statistics
import sys
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Iterator

import psutil
import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

import embedded
from cache import KVCache, TailorCache, describe_caches, load_cache, make_cache, parse_spec
from calibrate import plan_for
from model import DTYPES, Llama, ModelConfig, find_checkpoint, find_weights, prefill_chunk, read_config
from tokenizer import Tokenizer

DEFAULT_CACHE = "tailor"

# ------------------------------------------------------------------------------------------------------------ sampling


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn. Applied in this order, as in transformers: penalty, temperature, top-k, top-p, min-p.

    Raises:
        ValueError: a value out of its range.
    """

    temperature: float = 0.0  # 0: the likeliest token, always
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0  # CTRL (1909.05858): > 1 makes tokens that occurred less likely
    seed: int = 0

    def __post_init__(self):
        for name, good, limit in (
            ("temperature", 0 <= self.temperature < math.inf, "0 (greedy) or above"),
            ("top_k", self.top_k >= 0, "0 (off) or above"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("min_p", 0 <= self.min_p <= 1, "between 0 and 1"),
            ("repetition_penalty", 0 < self.repetition_penalty < math.inf, "above 0"),
            ("seed", 0 <= self.seed < 2**63, "between 0 and 2^63 - 1"),
        ):
            if not good:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be {limit}")


class Sampler:
    """Draws tokens on the device, without a host sync. `seen` marks the vocabulary entries that occurred, for the penalty."""

    def __init__(self, sampling: Sampling, ids: Tensor, vocab_size: int):
        """`ids [B, T]`: the prompt, on the device that logits will be on."""
        self.sampling = sampling
        self.generator = torch.Generator(ids.device).manual_seed(sampling.seed)
        self.seen = None
        if sampling.repetition_penalty != 1:
            self.seen = torch.zeros(ids.shape[0], vocab_size, dtype=torch.bool, device=ids.device).scatter_(1, ids, True)

    def __call__(self, logits: Tensor) -> Tensor:
        """Logits `[B, vocab]` to token ids `[B, 1]`."""
        options = self.sampling
        if self.seen is not None:
            logits = logits.float()
            penalty = torch.where(logits > 0, logits / options.repetition_penalty, logits * options.repetition_penalty)
            logits = torch.where(self.seen, penalty, logits)
        if options.temperature == 0:
            token = _argmax(logits)
        else:
            token = self._draw(logits.float())
        if self.seen is not None:
            self.seen.scatter_(1, token, True)
        return token

    def _draw(self, logits: Tensor) -> Tensor:
        options = self.sampling
        # Maximum first, and no division by a number that float32 rounds to 0: a tiny temperature must not make inf - inf or 0 / 0.
        logits = (logits - logits.amax(-1, keepdim=True)) / max(options.temperature, torch.finfo(torch.float32).tiny)
        if 0 < options.top_k < logits.shape[-1]:
            logits = logits.masked_fill(logits < logits.topk(options.top_k, -1).values[:, -1:], -math.inf)
        if options.top_p < 1:
            ordered, order = logits.sort(-1, descending=True)
            p = ordered.softmax(-1)
            outside = p.cumsum(-1) - p >= options.top_p  # mass before this token already suffices; never the first
            logits = logits.masked_fill(outside.scatter(1, order, outside), -math.inf)
        p = logits.softmax(-1)
        if options.min_p > 0:
            p = p.masked_fill(p < options.min_p * p.amax(-1, keepdim=True), 0)
        # argmax of p over exponential noise draws from p (the exponential race), where torch.multinomial would wait for the device.
        return (p / torch.empty_like(p).exponential_(generator=self.generator)).argmax(-1, keepdim=True)


def _argmax(x: Tensor, block: int = 512) -> Tensor:
    """`x.argmax(-1, keepdim=True)` of `[B, vocab]`, by blocks: for a single row a GPU would take one multiprocessor, and 27 us."""
    blocks = F.pad(x, (0, -x.shape[-1] % block), value=-math.inf).unflatten(-1, (-1, block))
    best = blocks.amax(-1).argmax(-1, keepdim=True)  # the first of those that hold the maximum
    return best * block + blocks.take_along_dim(best.unsqueeze(-1), 1).argmax(-1)


# ------------------------------------------------------------------------------------------------------- generate loop


class Stepper:
    """Decode steps of one answer, each from a token to the next: the model's step and the sampler's, as one CUDA graph where that can be.

    The first step runs eagerly, since a capture allows neither compiling a kernel nor setting up a library. The second one is
    captured and, like all that follow, replayed. When the cache's `epoch` says that a pointer or shape changed, that begins anew.
    Nothing runs and no random number is drawn while a graph is captured, so tokens are the same with and without.
    """

    def __init__(self, model: Llama, cache: KVCache, sampler: Sampler, graph: bool = True):
        self.model, self.cache, self.sampler, self.wanted = model, cache, sampler, graph
        self.graph: torch.cuda.CUDAGraph | None = None
        self.epoch = -1  # of the cache when a step last ran eagerly; the graph is of the same
        self.token: Tensor | None = None  # the graph's input and output

    @torch.no_grad()
    def __call__(self, token: Tensor) -> Tensor:
        """Token ids `[B, 1]` to the next ones, which are good until the next call."""
        if not (self.wanted and self.cache.capturable()):
            self.graph, self.epoch = None, -1  # a step that could be captured has still to run eagerly
            return self.sampler(self.model.decode(token, self.cache))
        self.cache.begin(1, decode=True)
        if self.epoch != self.cache.epoch or not self.cache.capturable():
            self.graph = None  # its memory may be what the next one needs
            logits = self.model.step(token, self.cache)
            self.cache.end()
            self.epoch = self.cache.epoch
            return self.sampler(logits)
        if self.graph is None:
            try:
                self._capture(token)
            except RuntimeError as error:
                warnings.warn(f"decoding without a CUDA graph, since capturing one failed: {str(error).splitlines()[0]}", stacklevel=2)
                self.wanted = False
                return self(token)  # the cache undoes the call that was begun
        if token is not self.token:
            self.token.copy_(token)
        self.graph.replay()
        self.cache.replayed()
        self.cache.end()
        return self.token

    def _capture(self, token: Tensor) -> None:
        graph, stream, side, state = torch.cuda.CUDAGraph(), torch.cuda.current_stream(), torch.cuda.Stream(), self.sampler.generator.get_state()
        static = token.clone()
        graph.register_generator_state(self.sampler.generator)
        try:
            with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):  # other threads may allocate meanwhile
                static.copy_(self.sampler(self.model.step(static, self.cache)))
        except BaseException:
            # A capture that ended badly leaves its stream as the current one, and the generators in a state of their own.
            torch.cuda.set_stream(stream)
            self.sampler.generator = torch.Generator(token.device)
            self.sampler.generator.set_state(state)
            default = torch.cuda.default_generators[token.device.index]
            default.graphsafe_set_state(default.clone_state())
            raise
        # The capture began with its generator's offset set to 0, in that stream. On a GPU that others use too, this may come after
        # the first replay has set it to what it is, in this stream, unless that waits.
        stream.wait_stream(side)
        self.graph, self.token = graph, static


def generate(
    model: Llama, cache: KVCache, ids: list[int], max_new_tokens: int, sampling: Sampling = Sampling(), stop_ids=(), progress=None, logits: Tensor | None = None,
    graph: bool = True,
) -> Iterator[int]:  # fmt: skip
    """Yield up to `max_new_tokens` token ids that follow the prompt `ids`; a stop id ends the answer and is not yielded.

    The prompt's part past `cache.length` is prefilled first; `logits [1, vocab]` are those that follow its last token, where
    the cache holds all of it. Afterwards the cache holds every yielded token but the last. `graph`: see `Stepper`.
    """
    device = model.device
    if logits is None:
        logits = model.prefill(torch.tensor([ids[cache.length :]], dtype=torch.int64), cache, progress)
    sampler = Sampler(sampling, torch.tensor([ids], device=device), logits.shape[-1])
    step, token = Stepper(model, cache, sampler, graph), None
    for _ in range(max_new_tokens):
        token = sampler(logits) if token is None else step(token)
        value = int(token)  # the one wait for the device: this token is about to be shown
        if value in stop_ids:
            return
        yield value


class StopStrings:
    """Passes text on until one of the strings appears, holding back whatever may be the beginning of one."""

    def __init__(self, strings: list[str]):
        self.strings, self.held, self.hit = strings, "", False

    def push(self, text: str) -> str:
        self.held += text
        found = [(at + len(string), at) for string in self.strings if (at := self.held.find(string)) >= 0]
        if found:  # the string that is complete first wins, however the text was cut into pieces
            self.hit = True
            text, self.held = self.held[: min(found)[1]], ""
            return text
        keep = max((n for string in self.strings for n in range(1, len(string)) if self.held.endswith(string[:n])), default=0)
        text, self.held = self.held[: len(self.held) - keep], self.held[len(self.held) - keep :]
        return text

    def flush(self) -> str:
        text, self.held = self.held, ""
        return text


class Session:
    """A model, its tokenizer and a cache that outlives the answer: one prompt, or turn after turn of a chat."""

    def __init__(self, model: Llama, tokenizer: Tokenizer, cache: KVCache):
        self.model, self.tokenizer, self.cache = model, tokenizer, cache
        self.ids: list[int] = []  # what was fed; the first cache.length of them are in the cache
        self.logits: Tensor | None = None  # that follow the first `prefilled` of them, while the cache ends there
        self.prefilled = 0
        self.spec = ""  # what the cache is, for the summary
        self.graph = True  # may decoding run as a CUDA graph
        self.clear_stats()

    def clear_stats(self) -> None:
        """What there is to say of an answer that is interrupted before it begins; see `reply`."""
        counts = {"prompt_tokens": 0, "kept_tokens": 0, "dropped_tokens": 0, "new_tokens": 0}
        self.stats: dict = counts | {"ttft_s": None, "decode_ms": None, "stop_reason": "interrupt", "text": ""}

    def prefill(self, ids: list[int], progress: bool = False) -> None:
        """Bring the cache to hold exactly the prompt `ids`: keep what it holds of it, forget what it does not, append the rest.

        Starts `self.stats`; see `reply`. Raises ValueError for an empty prompt.
        """
        held = self.ids[: self.cache.length]
        same = next((i for i, (a, b) in enumerate(zip(held, ids)) if a != b), min(len(held), len(ids)))
        self.clear_stats()
        self.stats |= {"prompt_tokens": len(ids), "kept_tokens": same, "dropped_tokens": len(held) - same}
        if same == len(held) == len(ids) == self.prefilled and self.logits is not None:
            return
        self.logits = None
        self.stats["kept_tokens"] = kept = min(same, len(ids) - 1)  # the last token's logits are wanted, so it is run
        self.cache.crop(max(kept, 0))
        self.ids = list(ids)
        total = (len(ids) - kept) * self.model.config.num_hidden_layers
        look = {"desc": "prefill", "leave": False, "bar_format": "{desc} {percentage:3.0f}% |{bar}| {elapsed}<{remaining}"}
        with tqdm(total=total, disable=None if progress else True, **look) as bar:  # None: unless stderr is a terminal
            self.logits = self.model.prefill(torch.tensor([ids[kept:]], dtype=torch.int64), self.cache, bar.update)
        self.prefilled = len(ids)

    def reply(
        self, ids: list[int], max_new_tokens: int, sampling: Sampling = Sampling(), stop: list[str] = [], progress: bool = False, prefilled=lambda: None
    ) -> Iterator[str]:
        """Yield the answer to the whole prompt `ids` as text. `prefilled` is called between prefill and decoding, off the clock.

        Afterwards, also when interrupted, `self.stats` has prompt_tokens, kept_tokens (already cached), dropped_tokens (cached
        ones that did not fit the prompt), new_tokens, ttft_s, decode_ms (median; None below two tokens), stop_reason and text.
        """
        stream, stopper, times = self.tokenizer.stream(), StopStrings(stop), [time.perf_counter()]
        self.prefill(ids, progress)
        paused = time.perf_counter()
        prefilled()
        times[0] += time.perf_counter() - paused
        stats = self.stats
        try:
            for token in generate(self.model, self.cache, ids, max_new_tokens, sampling, self.tokenizer.stop_ids, logits=self.logits, graph=self.graph):
                times.append(time.perf_counter())
                self.ids.append(token)
                stats["new_tokens"] += 1
                stats["ttft_s"] = times[1] - times[0]
                if text := stopper.push(stream.push(token)):
                    stats["text"] += text
                    yield text
                if stopper.hit:
                    break
            if stats["ttft_s"] is None:  # the first token was a stop id, or none was asked for
                stats["ttft_s"] = time.perf_counter() - times[0]
            stats["stop_reason"] = "length" if stats["new_tokens"] == max_new_tokens and not stopper.hit else "stop"
        finally:
            if len(times) > 2:
                stats["decode_ms"] = statistics.median(b - a for a, b in zip(times[1:], times[2:])) * 1e3
            rest = "" if stopper.hit else stopper.push(stream.flush()) + stopper.flush()
            stats["text"] += rest
        if rest:
            yield rest

    def save(self, path: str | Path, messages: list[dict] | None) -> None:
        """Write the cache with its ids, the logits that follow, the model's fingerprint and the conversation (None: a raw prompt)."""
        extra = {"ids": torch.tensor(self.ids[: self.cache.length], dtype=torch.int64), "logits": self.logits}
        self.cache.save(path, extra, {"fingerprint": self.model.fingerprint, "messages": messages, "spec": self.spec})

    @classmethod
    def load(cls, path: str | Path, model: Llama, tokenizer: Tokenizer, capacity: int = 0) -> tuple["Session", list[dict] | None]:
        """The session and conversation that `save` wrote. Raises ValueError for a damaged file, or one of another model or dtype."""
        cache, extra, meta = load_cache(path, model.config, model.device, capacity)
        if meta.get("fingerprint") != model.fingerprint:
            cache.close()
            raise ValueError(f"{path} was saved from another model (fingerprint {str(meta.get('fingerprint'))[:12]}, this one has {model.fingerprint[:12]})")
        if extra["logits"].dtype != model.dtype:
            cache.close()
            raise ValueError(f"{path} was saved in {extra['logits'].dtype} and the model runs in {model.dtype}; pass the same --dtype")
        session = cls(model, tokenizer, cache)
        session.spec = meta["spec"]
        session.ids, session.logits, session.prefilled = extra["ids"].tolist(), extra["logits"].to(model.device), len(extra["ids"])
        return session, meta["messages"]


# --------------------------------------------------------------------------------------------------------- command line


def parse_tokens(text: str) -> int:
    """`8192`, `32k`, `128k`, `1m` (k is 1,024) to a number of tokens."""
    match = re.fullmatch(r"(\d+)([km]?)", text.strip().lower())
    if not match or int(match[1]) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of tokens; write 8192, 32k, 128k or 1m")
    return int(match[1]) * {"": 1, "k": 1024, "m": 1024 * 1024}[match[2]]


class _Parser(argparse.ArgumentParser):
    def error(self, message: str):  # argparse prints the whole usage, which buries the sentence that matters
        self.exit(2, f"{self.prog}: error: {message} (see --help)\n")


def build_parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="generate.py", description=__doc__.split("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter, allow_abbrev=False)
    add = parser.add_argument
    add("--ckpt", default="smollm2-128k", help="folder, .safetensors file, hub id, or an embedded model: " + ", ".join(embedded.NAMES))
    add("--prompt", default=argparse.SUPPRESS, help="the prompt; without one, a needle question over a long document is asked")
    add("--prompt-file", default=argparse.SUPPRESS, metavar="FILE", help="read the prompt from a UTF-8 file; - for standard input")
    add("--raw", action="store_true", default=argparse.SUPPRESS, help="no chat template (default: the template, where the checkpoint has one)")
    add("--chat", action="store_true", default=argparse.SUPPRESS, help="interactive chat that keeps its cache from turn to turn (default: off)")
    add("--system", default=argparse.SUPPRESS, metavar="TEXT", help="system message for the chat template (default: the template's own)")
    add("--ctx", type=parse_tokens, default=argparse.SUPPRESS, metavar="N", help="most tokens, prompt and answer together: 8192, 32k, 128k, 1m (default: the model's own)")
    add("--truncate", choices=["middle"], default=argparse.SUPPRESS, help="cut a prompt that is too long, keeping head and tail (default: refuse it)")
    add("--max-new-tokens", type=int, default=256, metavar="N", help="most tokens of an answer")
    add("--cache", default=argparse.SUPPRESS, metavar="SPEC", help=f"NAME[:field=value,...]; 'list' prints names, fields and defaults (default: {DEFAULT_CACHE})")
    add("--plan", default=argparse.SUPPRESS, metavar="FILE", help="which layers to quantise, as calibrate.py writes it (default: the one known, cached or measured for the checkpoint)")
    add("--save-cache", default=argparse.SUPPRESS, metavar="FILE", help="save the prompt's cache once it is prefilled")
    add("--load-cache", default=argparse.SUPPRESS, metavar="FILE", help="go on from a saved cache; --prompt is appended to the prompt that it holds")
    for name, kind in (("temperature", float), ("top_k", int), ("top_p", float), ("min_p", float), ("repetition_penalty", float), ("seed", int)):
        add("--" + name.replace("_", "-"), type=kind, default=getattr(Sampling, name), metavar="X", help="sampling")
    add("--stop", action="append", default=[], metavar="TEXT", help="end the answer before this text; may be given several times")
    add("--device", default="auto", help="auto (CUDA where there is one), cpu, cuda, cuda:1, ...")
    add("--dtype", default="auto", choices=["auto", *DTYPES], help="auto: the checkpoint's own on a GPU, float32 on a CPU")
    add("--no-graph", action="store_true", default=argparse.SUPPRESS, help="no CUDA graph: launch every kernel of every step (default: a graph, where device and cache allow it)")
    add("--json", action="store_true", default=argparse.SUPPRESS, help="print one JSON object instead of text (default: off)")
    return parser


def resolve(ckpt: str) -> Path:
    """A path, an embedded model's name or a hub id to a local path. Raises ValueError."""
    return embedded.fetch(ckpt) if ckpt in embedded.NAMES and not Path(ckpt).exists() else find_checkpoint(ckpt)


def pick_device(name: str) -> torch.device:
    """`auto`, `cpu`, `cuda`, `cuda:1` … to a device that works. Raises ValueError."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        if device.type == "meta":
            raise RuntimeError("it holds no data")
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"device {name!r} is not available here ({reason}); use --device cpu or auto") from None
    return torch.device("cuda", torch.cuda.current_device()) if name == "cuda" else device


def pick_dtype(name: str, device: torch.device, config: ModelConfig) -> torch.dtype:
    """The dtype that `--dtype` names; auto: float32 on a CPU, where 16-bit arithmetic is often emulated, else the checkpoint's own."""
    if name != "auto":
        return DTYPES[name]
    return torch.float32 if device.type == "cpu" else DTYPES.get(str(config.dtype).removeprefix("torch."), torch.float32)


def read_prompt(args) -> str | None:
    """The prompt that the flags name; None if they name none. Raises ValueError."""
    if "prompt" in args and "prompt_file" in args:
        raise ValueError("--prompt and --prompt-file were both given; give one")
    if "chat" in args and getattr(args, "prompt_file", None) == "-":
        raise ValueError("--chat reads its messages from standard input, so --prompt-file - cannot; name a file")
    if "prompt" in args:
        prompt, source = args.prompt, "--prompt"
        data = prompt.encode("utf-8", "surrogateescape")
    elif "prompt_file" in args:
        source = "standard input" if args.prompt_file == "-" else args.prompt_file
        try:
            data = sys.stdin.buffer.read() if args.prompt_file == "-" else Path(args.prompt_file).read_bytes()
        except OSError as error:
            raise ValueError(f"cannot read {source}: {error.strerror}") from None
    else:
        return None
    try:
        prompt = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{source} is not UTF-8 (byte {error.start} is 0x{data[error.start]:02x}); convert it first") from None
    if not prompt:
        raise ValueError(f"the prompt from {source} is empty; give at least one character")
    return prompt


@dataclass
class Needle:
    """The demonstration job: a fact hidden in a long document and a question about it, in the form the embedded model was trained on."""

    ids: list[int]
    question: str
    expected: str

    @classmethod
    def build(cls, tokenizer: Tokenizer, tokens: int, seed: int) -> "Needle":
        """A prompt of exactly `tokens` tokens; the document is cut, or repeated, to fill it. Raises ValueError if that is too few."""
        rng = random.Random(seed)
        key = rng.choice(("harbour", "lantern", "meadow", "orchard", "saddle", "thimble"))
        value = str(rng.randrange(10**6, 10**7))
        question = f"What is the special magic number for {key} mentioned in the provided text?"
        ending = f"\n{question} The special magic number for {key} mentioned in the provided text is"
        start = tokenizer.encode("")
        needle = tokenizer.encode(f"\nOne of the special magic numbers for {key} is: {value}.\n", add_special_tokens=False)
        end = tokenizer.encode(ending, add_special_tokens=False)
        room = tokens - len(start) - len(needle) - len(end)
        if room < 0:
            raise ValueError(f"the needle question needs at least {tokens - room} tokens beside the answer and has {tokens}; raise --ctx or give a prompt")
        page = tokenizer.encode(embedded.document(), add_special_tokens=False)
        text = (page * (room // len(page) + 1))[:room]
        at = rng.randint(room // 4, room - room // 4)
        return cls(start + text[:at] + needle + text[at:] + end, question, value)


def fit(ids: list[int], ctx: int, max_new_tokens: int, truncate: bool) -> list[int]:
    """The prompt if it leaves room for an answer within `ctx`, or, cut in the middle, what does. Raises ValueError."""
    if len(ids) + min(max_new_tokens, 1) <= ctx:
        return ids
    if not truncate:
        raise ValueError(
            f"the prompt has {len(ids):,} tokens and --ctx allows {ctx:,}, answer included; raise --ctx, shorten the prompt, "
            "or cut it with --truncate middle, which keeps head and tail"
        )
    room = max(ctx - max_new_tokens, ctx // 2, 1)
    head = (room + 1) // 2
    return ids[:head] + ids[len(ids) - (room - head) :]


def check_memory(config: ModelConfig, spec: str, tokens: int, prompt: int, dtype: torch.dtype, device: torch.device) -> None:
    """Refuse, before anything is loaded, what cannot fit. Raises ValueError with the parts and what there is."""
    with torch.device("meta"):
        weights = sum(p.numel() for p in Llama(config).parameters()) * dtype.itemsize
    table = config.vocab_size * config.hidden_size * dtype.itemsize  # of embeddings: the head itself, or on the host beside a GPU
    weights -= table if config.tie_word_embeddings or device.type == "cuda" else 0
    cls, options = parse_spec(spec)
    kv = cls.estimate(config, options, tokens, dtype.itemsize)
    part = min(prompt, prefill_chunk(device))
    working = prompt * config.hidden_size + part * (2 * config.intermediate_size + 4 * config.num_attention_heads * config.head_dim)
    needs = {"weights": weights, "KV": kv["gpu"], "working set": working * dtype.itemsize}
    halve = "; token_bits=8 in the cache spec halves what tokens take on the host" if kv["host"] and getattr(options, "token_bits", 8) == 16 else ""
    if device.type == "cuda":
        there = {"KV": kv["host"]} if config.tie_word_embeddings else {"KV": kv["host"], "embedding table": table}
        demands = [(needs, torch.cuda.mem_get_info(device)[0], torch.cuda.get_device_name(device), ""), (there, psutil.virtual_memory().available, "the host", halve)]
    else:
        demands = [(needs | {"KV": kv["gpu"] + kv["host"]}, psutil.virtual_memory().available, "this machine", halve)]
    for parts, free, where, remedy in demands:
        if sum(parts.values()) > free:
            sizes = ", ".join(f"{name} {size / 2**30:.1f} GiB" for name, size in parts.items())
            raise ValueError(
                f"{tokens:,} tokens need about {sum(parts.values()) / 2**30:.1f} GiB ({sizes}) and {where} has {free / 2**30:.1f} GiB free; "
                f"lower --ctx or --max-new-tokens, or choose a smaller dtype, model or cache{remedy}"
            )


def report(session: Session, args, device: torch.device, extra: dict = {}) -> None:
    """The closing summary on stderr, or the JSON object on stdout."""
    stats, kv = session.stats, {tier: sum(parts.values()) for tier, parts in session.cache.nbytes().items()}
    peak = torch.cuda.max_memory_reserved(device) if device.type == "cuda" else 0
    dtype = str(session.model.dtype).removeprefix("torch.")
    if "json" in args:
        keys = ("text", "prompt_tokens", "new_tokens", "ttft_s", "decode_ms", "stop_reason")
        print(json.dumps({key: stats[key] for key in keys} | {"kv_bytes": kv, "peak_gpu_bytes": peak, "cache": session.spec, "device": str(device), "dtype": dtype} | extra), flush=True)
        return
    unit = 1 if sys.platform == "darwin" else 1024  # of ru_maxrss
    memory = f"{peak / 2**30:.2f} GiB on {device}" if peak else f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30:.2f} GiB"
    new = stats["prompt_tokens"] - stats["kept_tokens"]
    prompt = f"prompt {stats['prompt_tokens']:,} tokens" + (f" ({stats['kept_tokens']:,} cached)" if stats["kept_tokens"] else "")
    rate = f" ({new / stats['ttft_s']:,.0f} tokens/s)" if new and stats["ttft_s"] else ""
    first = "no token yet" if stats["ttft_s"] is None else f"first token after {stats['ttft_s']:.2f} s{rate}"
    speed = "" if stats["decode_ms"] is None else f", {stats['decode_ms']:.1f} ms each ({1000 / stats['decode_ms']:.1f} tokens/s)"
    print(
        f"{prompt}; {first}; {stats['new_tokens']} new tokens{speed}; {stats['stop_reason']}\n"
        f"KV {kv['gpu'] / 2**20:,.1f} MiB on {device}, {kv['host'] / 2**20:,.1f} MiB on the host; peak memory {memory}; cache {session.spec}, {dtype}",
        file=sys.stderr,
    )


def answer(session: Session, args, ids: list[int], max_new_tokens: int, sampling: Sampling, stop: list[str], prefilled=lambda: None) -> bool:
    """Stream one answer to stdout (silently under --json). Returns False if Ctrl-C ended it."""
    quiet = "json" in args
    session.clear_stats()  # outside the try: whatever is interrupted in it finds the numbers that the report needs
    try:
        for text in session.reply(ids, max_new_tokens, sampling, stop, True, prefilled):
            if not quiet:
                print(text, end="", flush=True)
        finished = True
    except KeyboardInterrupt:
        finished = False
        session.stats["stop_reason"] = "interrupt"  # also of an answer that was just complete
    if not quiet:
        print(flush=True)
    return finished


def chat(session: Session, args, ctx: int, sampling: Sampling, first: str | None, messages: list[dict], device: torch.device) -> None:
    """Read messages until end of input; Ctrl-C ends an answer, not the chat. `messages`: the conversation so far."""
    print("chat: one message a line; Ctrl-C ends an answer, Ctrl-D the chat", file=sys.stderr)
    while True:
        try:
            if first is None:
                print("> ", end="", file=sys.stderr, flush=True)
                line = sys.stdin.readline()
                if not line:
                    return
                line = line.rstrip("\r\n")
            else:
                line, first = first, None
        except KeyboardInterrupt:
            print("\n(Ctrl-D leaves the chat)", file=sys.stderr)
            continue
        if not line.strip():
            continue
        turn = add_message(messages, line)
        try:
            ids = fit(session.tokenizer.encode_chat(turn), ctx, args.max_new_tokens, "truncate" in args)
        except ValueError as error:  # the message is not taken into the conversation, which goes on
            print(f"generate.py: {error}", file=sys.stderr)
            continue
        finished = answer(session, args, ids, min(args.max_new_tokens, ctx - len(ids)), sampling, args.stop)
        if session.stats["dropped_tokens"]:
            print(f"note: {session.stats['dropped_tokens']} cached tokens did not fit the new turn and were prefilled again", file=sys.stderr)
        report(session, args, device)
        if not finished and not session.stats["text"]:
            continue  # taken back before anything was said
        messages = [*turn, {"role": "assistant", "content": session.stats["text"]}]


def add_message(messages: list[dict], text: str) -> list[dict]:
    """The conversation with the user's `text`; joined to the last message where that is the user's too, since most templates want turns to alternate."""
    if messages and messages[-1]["role"] == "user":
        return [*messages[:-1], {"role": "user", "content": messages[-1]["content"] + "\n\n" + text}]
    return [*messages, {"role": "user", "content": text}]


def check_flags(args, prompt: str | None) -> None:
    """Raise ValueError for flags that contradict each other or are out of range."""
    chatting, loading = "chat" in args, "load_cache" in args
    if args.max_new_tokens < 0:
        raise ValueError(f"--max-new-tokens is {args.max_new_tokens}; it must be 0 or above")
    if "" in args.stop:
        raise ValueError("--stop was given an empty text, which would end every answer at once")
    if "raw" in args and (chatting or "system" in args):
        raise ValueError("--raw leaves the chat template out, which --chat and --system need; give one or the other")
    if prompt is None and not chatting and ("system" in args or "truncate" in args):
        raise ValueError("--system and --truncate go with a prompt; give --prompt, --prompt-file or --chat")
    if loading and (given := [flag for flag in ("cache", "plan", "raw", "system", "truncate") if flag in args]):
        raise ValueError(f"--load-cache brings its own settings; leave out {', '.join('--' + flag for flag in given)}")
    if "save_cache" in args:
        if chatting or (prompt is None and not loading):
            raise ValueError("--save-cache goes with a prompt; give --prompt or --prompt-file")
        if not Path(args.save_cache).absolute().parent.is_dir():
            raise ValueError(f"--save-cache {args.save_cache}: there is no folder {Path(args.save_cache).absolute().parent}")


def run(args) -> int:
    """Do what the parsed flags say; returns the exit code. Raises ValueError for bad input."""
    spec = getattr(args, "cache", DEFAULT_CACHE)
    if spec == "list":
        print(describe_caches())
        return 0
    parse_spec(spec)
    sampling = Sampling(**{name: getattr(args, name) for name in Sampling.__dataclass_fields__})
    prompt, chatting, loading = read_prompt(args), "chat" in args, "load_cache" in args
    check_flags(args, prompt)
    demo = prompt is None and not chatting and not loading
    device = pick_device(args.device)

    checkpoint = resolve(args.ckpt)
    folder, _ = find_weights(checkpoint)
    config = ModelConfig.from_dict(read_config(folder))
    own = config.max_position_embeddings
    ctx = getattr(args, "ctx", min(own, 6000) if demo and device.type == "cpu" else own)
    if ctx > own:
        print(f"generate.py: warning: --ctx {ctx:,} is beyond the {own:,} tokens that the model was trained for", file=sys.stderr)
    tokenizer = Tokenizer.from_checkpoint(folder)
    if tokenizer.chat_template is None and (chatting or "system" in args):
        raise ValueError(f"{args.ckpt} has no chat template, which --chat and --system need; use --raw with --prompt")
    dtype = pick_dtype(args.dtype, device, config)

    # What to ask: token ids, and, where the chat template is used, the conversation behind them.
    messages = [{"role": "system", "content": args.system}] if "system" in args else []
    needle, ids, stop, max_new_tokens = None, [], args.stop, args.max_new_tokens
    if demo:
        max_new_tokens = min(max_new_tokens, 16)
        check_memory(config, spec, ctx, ctx, dtype, device)  # ahead of the prompt, which fills any --ctx
        needle = Needle.build(tokenizer, ctx - max_new_tokens, sampling.seed)
        ids, stop, messages = needle.ids, [*stop, ".", "\n"], None
    elif not chatting and not loading:
        if "raw" in args or tokenizer.chat_template is None:
            ids, messages = tokenizer.encode(prompt), None
        else:
            messages = add_message(messages, prompt)
            ids = tokenizer.encode_chat(messages)
        ids = fit(ids, ctx, max_new_tokens, "truncate" in args)

    room = min(max_new_tokens, max(ctx - len(ids), 0))
    check_memory(config, spec, len(ids) + room, len(ids), dtype, device)
    model = Llama.from_checkpoint(checkpoint, device, dtype)
    if loading:
        session, messages = Session.load(args.load_cache, model, tokenizer, capacity=0)
        if chatting and messages is None:
            raise ValueError(f"{args.load_cache} holds a raw prompt, which a chat cannot go on from; leave out --chat")
        ids = session.ids
        if prompt is not None and not chatting:
            if messages is None:
                ids = ids + tokenizer.encode(prompt, add_special_tokens=False)
            else:
                messages = add_message(messages, prompt)
                ids = tokenizer.encode_chat(messages)
        room = min(max_new_tokens, max(ctx - len(fit(ids, ctx, max_new_tokens, False)), 0))
    else:
        plan = plan_for(model, folder, getattr(args, "plan", None), tokenizer) if issubclass(parse_spec(spec)[0], TailorCache) else None
        session = Session(model, tokenizer, make_cache(spec, config, device, len(ids) + room if ids else 0, plan))
        session.spec = spec
    session.graph = "no_graph" not in args
    with session.cache:
        if chatting:
            chat(session, args, ctx, sampling, prompt, messages, device)
            return 0
        if not ids:
            raise ValueError("the prompt is empty: the tokenizer makes no token of it")
        if needle and "json" not in args:
            print(f"A sentence with a number is hidden in {len(ids):,} tokens of Paradise Lost.\nquestion: {needle.question}\nanswer:  ", end="", flush=True)
        save = (lambda: session.save(args.save_cache, messages)) if "save_cache" in args else (lambda: None)
        finished = answer(session, args, ids, room, sampling, stop, save)
        extra = {}
        if needle:
            correct = session.stats["text"].strip() == needle.expected
            extra = {"question": needle.question, "expected": needle.expected, "correct": correct}
            if "json" not in args:
                print("right" if correct else f"wrong: it is {needle.expected}", flush=True)
        report(session, args, device, extra)
        return 0 if finished else 130


def interrupted(error: BaseException | None) -> bool:
    """Did Ctrl-C bring this error about? Inside a package (a lock, PyTorch's stack of modes) it may come out as an error of the package's own."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__context__
    return error is not None


def failed(program: str, error: BaseException) -> int:
    """How a program ends by this error: 130 after Ctrl-C; 0 if the reader of its stdout left, as `| head` does; one sentence and 2 if the
    user can do something about it; any other is raised again."""
    if interrupted(error):
        return 130
    if isinstance(error, BrokenPipeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    if isinstance(error, (ValueError, OSError, MemoryError, torch.OutOfMemoryError)):
        sentence = (str(error).splitlines() or [type(error).__name__])[0]
    elif isinstance(error, RuntimeError) and "can't allocate memory" in str(error):  # how PyTorch says on a CPU that memory is out
        sentence = "out of memory; take fewer tokens (--ctx, --max-new-tokens, --lengths), or a smaller dtype, model or cache"
    else:
        raise error
    print(f"{program}: error: {sentence}", file=sys.stderr)
    return 2


def main(argv: list[str] | None = None) -> int:
    """The command line. Returns the exit code: 0, 2 for bad input, 130 after Ctrl-C."""
    warnings.showwarning = lambda message, *_: print(f"generate.py: warning: {message}", file=sys.stderr)
    try:
        args = build_parser().parse_args(argv)
        if hasattr(sys.stdout, "reconfigure"):  # a notebook's has no such method
            sys.stdout.reconfigure(encoding="utf-8", errors="replace")
        return run(args)
    except (Exception, KeyboardInterrupt) as error:
        return failed("generate.py", error)


if __name__ == "__main__":
    sys.exit(main())
