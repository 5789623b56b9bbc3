# SPDX-License-Identifier: Apache-2.0
"""Measure speed and memory, next to what the hardware allows and, with `--peer`, to transformers on the same weights.

    python bench.py                                                             the embedded model at 4,096 tokens
    python bench.py --ckpt PATH_OR_HUB_ID --lengths 4k,32k --peer transformers
    python bench.py --shape llama-3.1-8b --lengths 128k --json speed.json       random weights: no checkpoint needed

A language model works in two phases, and they run into different limits:

* **Prefill** reads the prompt, all tokens at once. Every weight that is fetched from memory serves thousands of tokens, so
  arithmetic is the limit. Its *floor* is the operations (2 a weight and token, and the causal half of the attention
  scores) over the rate of a large matrix product. Measured: ids on the host to first token on the host, cache included.
* **Decode** writes the answer, a token at a time. Every weight, and all K and V stored so far, are fetched for that one token,
  so memory is the limit. Its *floor* is those bytes over the bandwidth of a large copy. It is the floor of *exact* attention:
  a cache that reads less than all K and V may well fall below it. Measured: token to token, both on the host, median.

Both rates are measured first, in the same run, and `x floor` says how far above its floor a number lies. On CUDA one more
bound is measured: all linear layers of a decode step in one CUDA graph, which is what reading the weights really takes.

Machines drift, so variants take turns: run 1 of each, run 2 of each, and so on, in one process with the same threads. Medians
are printed, and `speed` is transformers' median over the row's. Each run starts with an empty allocator; on CUDA an untimed run of
the same length comes first (its prefill is the column `cold`: kernels are chosen and compiled there), on a CPU, or with
`--short-warm-up`, a short one.
Prompts are random ids: a method whose speed depends on what the text says is not seen at its best.
"""

import argparse
import dataclasses
import datetime
import gc
import importlib.metadata
import inspect
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import time
import warnings
from pathlib import Path

import torch
from torch import Tensor, nn

import embedded
from cache import CACHES, TailorCache, describe_caches, make_cache, parse_spec
from calibrate import Plan, known_plan, plan_for
from generate import Sampler, Sampling, Stepper, _Parser, check_memory, failed, parse_tokens, pick_device, pick_dtype, resolve
from model import DTYPES, Llama, ModelConfig, find_weights, read_config

_LLAMA = {"model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "rms_norm_eps": 1e-5, "torch_dtype": "bfloat16"}
_LLAMA3_ROPE = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
SHAPES = {  # the fields of each model's config.json that matter here
    "llama-3.1-8b": {**_LLAMA, "vocab_size": 128256, "intermediate_size": 14336, "num_key_value_heads": 8, "max_position_embeddings": 131072, "rope_theta": 500000.0, "rope_scaling": _LLAMA3_ROPE},
    "llama-2-7b-32k": {**_LLAMA, "vocab_size": 32000, "intermediate_size": 11008, "num_key_value_heads": 32, "max_position_embeddings": 32768, "rope_theta": 10000.0, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
    "mistral-7b": {**_LLAMA, "model_type": "mistral", "vocab_size": 32768, "intermediate_size": 14336, "num_key_value_heads": 8, "max_position_embeddings": 32768, "rope_theta": 1000000.0, "sliding_window": None},
    "yi-6b": {**_LLAMA, "vocab_size": 64000, "intermediate_size": 11008, "num_key_value_heads": 4, "max_position_embeddings": 200000, "rope_theta": 10000000.0},
    "yi-9b": {**_LLAMA, "vocab_size": 64000, "intermediate_size": 11008, "num_key_value_heads": 4, "max_position_embeddings": 200000, "rope_theta": 10000000.0, "num_hidden_layers": 48},
}
DECODE_BUDGET_S = 10.0  # a run's decode steps end after this long, three at least being made: an offloaded cache takes seconds for one


# ------------------------------------------------------------------------------------------------- the machine, its ceiling


def about(device: torch.device) -> dict:
    """What a number means nothing without: date, commit, device, driver, versions, threads."""

    def ask(*command: str) -> str | None:
        try:
            return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30, cwd=Path(__file__).parent).stdout.strip()
        except (OSError, subprocess.SubprocessError):
            return None

    def version(package: str) -> str | None:
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            return None

    commit = ask("git", "rev-parse", "HEAD") or "unknown"
    if commit != "unknown" and ask("git", "--no-optional-locks", "status", "--porcelain"):
        commit += "+dirty"
    name, driver = platform.processor() or platform.machine(), None
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        card = f"--id=GPU-{torch.cuda.get_device_properties(device).uuid}"
        driver = ask("nvidia-smi", card, "--query-gpu=driver_version,power.limit", "--format=csv,noheader")
    elif Path("/proc/cpuinfo").exists():
        name = next((line.partition(":")[2].strip() for line in open("/proc/cpuinfo", encoding="utf-8") if line.startswith("model name")), name)
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": commit,
        "device": f"{device} ({name})",
        "driver": driver,
        "threads": torch.get_num_threads(),
        "versions": {"python": platform.python_version(), "cuda": torch.version.cuda, **{name: version(name) for name in ("torch", "triton", "transformers")}},
    }


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed(work, device: torch.device, repeats: int) -> list[float]:
    """Seconds of each repetition, after two that warm up."""
    times = []
    for _ in range(repeats + 2):
        synchronize(device)
        start = time.perf_counter()
        work()
        synchronize(device)
        times.append(time.perf_counter() - start)
    return times[2:]


@torch.no_grad()
def measure_ceiling(model: Llama) -> dict:
    """Bandwidth (bytes read + written by a large copy), rate (a large matrix product in the model's dtype), linear layers in a graph."""
    device, big = model.device, model.device.type == "cuda"
    source = torch.ones(2**30 if big else 2**28, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    bandwidth = 2 * source.nbytes / min(timed(lambda: target.copy_(source), device, 10))  # of a ceiling, the best is the measure
    del source, target
    n = 8192 if big else 2048
    a = torch.randn(n, n, device=device, dtype=model.dtype)
    out = torch.empty_like(a)
    rate = 2 * n**3 / min(timed(lambda: torch.mm(a, a, out=out), device, 10 if big else 4))
    return {"bandwidth": bandwidth, "matmul_rate": rate, "linear_graph_ms": linear_graph_ms(model) if big else None}


def linear_graph_ms(model: Llama) -> float:
    """Median milliseconds of all linear layers of one decode step, one after another in one CUDA graph: the measured weights-only floor."""
    layers = [module for module in model.modules() if isinstance(module, nn.Linear)]
    inputs = {layer.in_features: torch.randn(1, layer.in_features, device=model.device, dtype=model.dtype) for layer in layers}

    def step():
        for layer in layers:
            layer(inputs[layer.in_features])

    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # cuBLAS sets itself up at the first call, which a capture does not allow
        step()
    torch.cuda.current_stream().wait_stream(stream)
    with torch.cuda.graph(graph):
        step()
    return statistics.median(timed(graph.replay, model.device, 30)) * 1e3


def floor(model: Llama, ceiling: dict, N: int) -> dict:
    """The least time that prefill of N tokens and one decode step after them can take with exact attention."""
    c, itemsize = model.config, model.dtype.itemsize
    head, table = model.lm_head.weight, model.embed_tokens.weight
    matrices = sum(module.weight.numel() for module in model.modules() if isinstance(module, nn.Linear)) - head.numel()
    flops = 2 * matrices * N + 2 * head.numel() + 2 * c.num_hidden_layers * c.num_attention_heads * c.head_dim * N**2
    # One row of the embedding table is read, unless the table is also the head.
    weights = sum(p.nbytes for p in model.parameters()) - (0 if head is table else table.nbytes)
    kv = 2 * c.num_hidden_layers * c.num_key_value_heads * c.head_dim * N * itemsize
    return {
        "prefill_s": flops / ceiling["matmul_rate"], "decode_ms": (weights + kv) / ceiling["bandwidth"] * 1e3,
        "flops": flops, "weight_bytes_read": weights, "kv_bytes_read": kv,
    }  # fmt: skip


# ------------------------------------------------------------------------------------------------------- what is measured


class Ours:
    """This repository's decoder with one of its caches."""

    def __init__(self, model: Llama, spec: str, plan: Plan | None = None, graph: bool = True):
        self.name, self.model, self.spec, self.plan, self.graph, self.cache, self.step = spec, model, spec, plan, graph, None, None

    def prefill(self, ids: Tensor, room: int) -> Tensor:
        """Ids `[1, N]` on the host to the first token `[1, 1]` on the device, in a new cache with room for more."""
        self.cache = make_cache(self.spec, self.model.config, self.model.device, ids.shape[1] + room, self.plan)
        logits = self.model.prefill(ids, self.cache)
        token = logits.argmax(-1, keepdim=True)
        self.step = Stepper(self.model, self.cache, Sampler(Sampling(), token, logits.shape[-1]), self.graph)
        return token

    def decode(self, token: Tensor) -> Tensor:
        return self.step(token)

    def kv_bytes(self) -> dict[str, int]:
        return {tier: sum(parts.values()) for tier, parts in self.cache.nbytes().items()}

    def close(self) -> None:
        if self.cache is not None:
            self.cache.close()
        self.cache = self.step = None


class Peer:
    """transformers' decoder with its dynamic cache, or the same cache offloaded to the host."""

    def __init__(self, module: nn.Module, offloading: bool):
        self.name, self.module, self.offloading, self.cache = "transformers" + " offloaded" * offloading, module, offloading, None
        # transformers 5 began with the one name and goes on with the other.
        self.argument = "cache" if "cache" in inspect.signature(module.forward).parameters else "past_key_values"

    @torch.no_grad()
    def decode(self, token: Tensor) -> Tensor:
        return self.module(token, **{self.argument: self.cache}, use_cache=True, logits_to_keep=1).logits[:, -1].argmax(-1, keepdim=True)

    def prefill(self, ids: Tensor, room: int) -> Tensor:
        from transformers import DynamicCache

        self.cache = DynamicCache(config=self.module.config, offloading=self.offloading)
        return self.decode(ids.to(self.module.device))

    def kv_bytes(self) -> dict[str, int]:
        held = [tensor for layer in self.cache.layers for tensor in (layer.keys, layer.values)]
        here = sum(tensor.nbytes for tensor in held if tensor.device == self.module.device)
        return {"gpu": here, "host": sum(tensor.nbytes for tensor in held) - here}

    def close(self) -> None:
        self.cache = None


def load_peer(model: Llama, raw: dict) -> nn.Module:
    """transformers' model for the parsed config.json `raw`, on our model's own parameters: no weight exists twice. Raises ValueError."""
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError:
        raise ValueError("--peer transformers needs transformers; pip install -r requirements-dev.txt") from None
    raw = {key: value for key, value in raw.items() if key not in ("dtype", "torch_dtype", "architectures")}
    config = AutoConfig.for_model(**raw)
    with torch.device("meta"):
        peer = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=model.dtype)
    weights = {name if name.startswith("lm_head.") else f"model.{name}": weight for name, weight in model.state_dict(keep_vars=True).items()}
    peer.load_state_dict(weights, strict=True, assign=True)
    rotary = peer.get_submodule("model.rotary_emb")  # its table is no parameter, and was made on "meta"
    peer.set_submodule("model.rotary_emb", type(rotary)(config).to(model.device))
    assert {p.data_ptr() for p in peer.parameters()} == {p.data_ptr() for p in model.parameters()}
    return peer.eval()


@torch.no_grad()
def peer_difference(model: Llama, peer: nn.Module) -> float:
    """The largest difference of the two models' logits after 64 tokens: a race is worth its result only if both run the same course."""
    ids = torch.randint(0, model.config.vocab_size, (1, 64), generator=torch.Generator().manual_seed(1))
    ours = model.prefill(ids, make_cache("full", model.config, model.device))
    return (ours - peer(ids.to(model.device), logits_to_keep=1).logits[:, -1]).abs().max().item()


def time_step(variant: Ours | Peer, token: Tensor) -> tuple[float, Tensor]:
    """One decode step: seconds from a token to the next one, which the host reads, as a program that prints it would."""
    start = time.perf_counter()
    token = variant.decode(token)
    int(token)  # waits for the device
    return time.perf_counter() - start, token


def run_once(variant: Ours | Peer, ids: Tensor, steps: int, device: torch.device) -> dict:
    """One run: prefill of `ids`, then up to `steps` decode steps. All timings, the tokens, and the bytes held at the end."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    synchronize(device)
    start = time.perf_counter()
    token = variant.prefill(ids, steps)
    tokens = [int(token)]
    prefill_s, decode_ms = time.perf_counter() - start, []
    for step in range(steps):
        if step >= 3 and sum(decode_ms) > DECODE_BUDGET_S * 1e3:
            break
        seconds, token = time_step(variant, token)
        decode_ms.append(seconds * 1e3)
        tokens.append(int(token))
    peak = driver = None
    if device.type == "cuda":  # the allocator gives nothing back in between, so what the driver counts now is its peak, CUDA's own part included
        free, total = torch.cuda.mem_get_info(device)
        peak, driver = torch.cuda.max_memory_reserved(device), total - free
    return {"prefill_s": prefill_s, "decode_ms": decode_ms, "peak_gpu_bytes": peak, "driver_bytes": driver, "kv_bytes": variant.kv_bytes(), "tokens": tokens}


FAILURES = (RuntimeError, ValueError, MemoryError)  # that cost one variant its row or its check; torch.OutOfMemoryError is a RuntimeError
SAME = "the same without a graph"


def brief(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


def eager_verdict(variant: Ours, ids: Tensor, tokens: list[int]) -> str:
    """`SAME` if a new prefill of `ids`, decoded without a graph, leads to the `tokens` of the run that `variant` has just made, and to its logits, bit for bit.

    The logits are those of the last step, taken back and made again. They see what tokens hardly show, random weights making little use of the
    context: a hidden state that differed in any layer and step is in K and V.
    """

    def last_logits() -> Tensor:
        variant.cache.crop(variant.cache.length - 1)
        return variant.model.decode(torch.tensor([tokens[-2:-1]], device=variant.model.device), variant.cache).cpu()

    graph = variant.graph
    try:
        logits = last_logits()
        variant.close()
        variant.graph = False
        token = variant.prefill(ids, len(tokens) - 1)
        for number, expected in enumerate(tokens):
            if number:
                token = variant.decode(token)
            if int(token) != expected:
                return f"another token {number} without a graph"
        return SAME if torch.equal(logits, last_logits()) else "the same tokens, but other logits, without a graph"
    except FAILURES as error:
        return f"not decoded without a graph: {brief(error)}"
    finally:
        variant.graph = graph


def measure(variants: list[Ours | Peer], N: int, runs: int, steps: int, model: Llama, least: dict, short_warm_up: bool = False, check: bool = False) -> list[dict]:
    """A row for every variant at N tokens. The variants take turns; one that fails stays out from then on, and costs the others nothing.

    check: whether the last run leads to the same without a graph.
    """
    device, cuda = model.device, model.device.type == "cuda"
    ids = torch.randint(0, model.config.vocab_size, (1, N), generator=torch.Generator().manual_seed(0))
    rows = [{"context": N, "cache": v.name, "peer": isinstance(v, Peer), "status": "ok", "floor": least, "warm_up": None, "runs": []} for v in variants]
    for turn in range(runs + 1):
        short = turn == 0 and (short_warm_up or not cuda)
        for variant, row in zip(variants, rows):
            if row["status"] != "ok":
                continue
            try:
                # Long enough, on CUDA, for kernels and graph to be those of the timed runs.
                result = run_once(variant, ids[:, : 8192 if cuda else 256] if short else ids, min(steps, 3 if cuda else 2) if short else steps, device)
                note = f"prefill {result['prefill_s']:.3f} s, decode {statistics.median(result['decode_ms']):.2f} ms"
                note += f", peak {gib(result['peak_gpu_bytes'])} GiB" if cuda else ""
                if turn:
                    row["runs"].append(result)
                elif not short:
                    row["warm_up"] = result
            except FAILURES as error:
                short_of_memory = isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "can't allocate memory" in str(error)
                note = "OOM" if short_of_memory else f"failed: {brief(error)}"
                row |= {"status": note, "runs": []}
            name = f"{N:,} tokens, {variant.name}, {f'run {turn} of {runs}' if turn else 'warm-up'}"
            print(f"{name}: {note}", file=sys.stderr)
            if check and turn == runs and row["runs"] and isinstance(variant, Ours):
                row["eager"] = eager_verdict(variant, ids, result["tokens"])
                print(f"{name}: {row['eager']}", file=sys.stderr)
            variant.close()  # not in the handler, whose traceback still holds the failed call's tensors
    done = [row for row in rows if row["runs"]]
    for row in done:
        each = [run["decode_ms"] for run in row["runs"]]
        row["prefill_s"] = statistics.median(run["prefill_s"] for run in row["runs"])
        row["decode_ms"] = statistics.median(statistics.median(steps) for steps in each)
        row["decode_ms_p90"] = sorted(sum(each, []))[len(sum(each, [])) * 9 // 10]
        row["kv_bytes"] = row["runs"][-1]["kv_bytes"]
        if cuda:
            for name in ("peak_gpu_bytes", "driver_bytes"):
                row[name] = max(run[name] for run in [row["warm_up"], *row["runs"]] if run)
            row["beyond_bytes"] = row["peak_gpu_bytes"] - model.nbytes()["gpu"] - row["kv_bytes"]["gpu"]
    if base := next((row for row in done if row["cache"] == "transformers"), None):
        for row in done:
            row |= {f"{what}_speed": base[key] / row[key] for what, key in (("prefill", "prefill_s"), ("decode", "decode_ms"))}
    return rows


# ------------------------------------------------------------------------------------------------------------ presentation


def gib(size: int | None) -> str:
    return "-" if size is None else f"{size / 2**30:.2f}"


def table(rows: list[dict]) -> str:
    """Fixed-width text; memory in GiB, `beyond`: what the peak holds beside weights and KV."""
    width = max(12, *(len(row["cache"]) for row in rows))
    heads = ["prefill s", "cold s", "x floor", "speed", "decode ms", "p90", "x floor", "speed", "KV", "host", "peak GPU", "beyond", "driver"]
    lines = [f"{'tokens':>9}  {'cache':{width}}" + "".join(f"{head:>10}" for head in heads)]
    for row in rows:
        start = f"{row['context']:>9,}  {row['cache']:{width}}"
        if row["status"] != "ok":
            lines.append(f"{start}  {row['status']}")
            continue
        speeds = [f"{row[key]:.2f}" if key in row else "-" for key in ("prefill_speed", "decode_speed")]
        cold = f"{row['warm_up']['prefill_s']:.3f}" if row["warm_up"] else "-"
        cells = [f"{row['prefill_s']:.3f}", cold, f"{row['prefill_s'] / row['floor']['prefill_s']:.2f}", speeds[0]]
        cells += [f"{row['decode_ms']:.2f}", f"{row['decode_ms_p90']:.2f}", f"{row['decode_ms'] / row['floor']['decode_ms']:.2f}", speeds[1]]
        cells += [gib(size) for size in (row["kv_bytes"]["gpu"], row["kv_bytes"]["host"], row.get("peak_gpu_bytes"), row.get("beyond_bytes"), row.get("driver_bytes"))]
        lines.append(start + "".join(f"{cell:>10}" for cell in cells))
    return "\n".join(lines)


def save(path: Path, content: dict) -> None:
    """Write JSON under its name whole or not at all; a file of that name is replaced. Raises ValueError."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(json.dumps(content, indent=1), encoding="utf-8")
        os.replace(temporary, path)
    except OSError as error:
        raise ValueError(f"cannot write {path}: {error.strerror}") from None
    finally:
        temporary.unlink(missing_ok=True)


# ------------------------------------------------------------------------------------------------------------ command line


def split_specs(text: str) -> list[str]:
    """A list of cache specs at its commas. Specs have commas of their own: only one before a cache's name begins another spec."""
    return re.split(rf",(?=(?:{'|'.join(map(re.escape, CACHES))})(?:[:,]|$))", text)


def parse_lengths(text: str) -> list[int]:
    return [parse_tokens(item) for item in text.split(",")]


def build_parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="bench.py", description=__doc__.split("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter, allow_abbrev=False)
    add = parser.add_argument
    weights = parser.add_mutually_exclusive_group()
    weights.add_argument("--ckpt", default="smollm2-128k", help="folder, .safetensors file, hub id, or an embedded model: " + ", ".join(embedded.NAMES))
    weights.add_argument("--shape", choices=SHAPES, default=argparse.SUPPRESS, help="random weights of this model's shape instead of a checkpoint")
    add("--lengths", type=parse_lengths, default="4k", metavar="N,...", help="context lengths in tokens: 4096, 32k, 128k, 1m")
    add("--cache", default="full", metavar="SPEC,...", help="NAME[:field=value,...], several apart by commas; 'list' prints names, fields and defaults")
    add("--peer", choices=["transformers"], default=argparse.SUPPRESS, help="measure transformers in the same run (default: off)")
    add("--runs", type=int, default=5, metavar="N", help="runs of each variant, in turns; medians are printed")
    add("--short-warm-up", action="store_true", default=argparse.SUPPRESS, help="warm up with at most 8,192 tokens, where a prefill takes minutes; the first timed one then plans kernels for new shapes (default: the whole length on CUDA, 256 tokens on a CPU)")
    add("--check", action="store_true", default=argparse.SUPPRESS, help="make each cache's last run once more, without CUDA graphs, and fail unless tokens and last logits are the same (default: off)")
    add("--steps", type=int, default=32, metavar="N", help=f"decode steps a run; fewer, but at least 3, where they take over {DECODE_BUDGET_S:.0f} s")
    add("--device", default="auto", help="auto (CUDA where there is one), cpu, cuda, cuda:1, ...")
    add("--dtype", default="auto", choices=["auto", *DTYPES], help="auto: the checkpoint's own on a GPU, float32 on a CPU")
    add("--no-graph", action="store_true", default=argparse.SUPPRESS, help="decode without CUDA graphs (default: with, where device and cache allow it)")
    add("--threads", type=int, default=argparse.SUPPRESS, metavar="N", help="CPU threads (default: PyTorch's choice)")
    add("--json", type=Path, default=argparse.SUPPRESS, metavar="FILE", help="also save everything, every timing included, to this file")
    return parser


def run(args) -> int:
    """Do what the parsed flags say; returns the exit code, 1 if a variant failed otherwise than for memory. Raises ValueError for bad input."""
    if args.cache == "list":
        print(describe_caches())
        return 0
    specs = split_specs(args.cache)
    for spec in specs:
        parse_spec(spec)
    for name in ("runs", "steps", "threads"):
        if name in args and getattr(args, name) < 1:
            raise ValueError(f"--{name} is {getattr(args, name)}; it must be at least 1")
    if "json" in args and (args.json.is_dir() or not os.access(args.json.absolute().parent, os.W_OK)):
        raise ValueError(f"cannot write {args.json}; name a file in a folder that exists and can be written")
    if "threads" in args:
        torch.set_num_threads(args.threads)
    device = pick_device(args.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)

    checkpoint = None if "shape" in args else resolve(args.ckpt)
    folder = find_weights(checkpoint)[0] if checkpoint else None
    raw = read_config(folder) if folder else SHAPES[args.shape]
    config = ModelConfig.from_dict(raw)
    dtype = pick_dtype(args.dtype, device, config)
    shortest = min(args.lengths)
    check_memory(config, specs[0], shortest + args.steps, shortest, dtype, device)
    if max(args.lengths) + args.steps > config.max_position_embeddings:
        print(f"bench.py: note: the model was trained for {config.max_position_embeddings:,} tokens; beyond them only speed and memory mean something", file=sys.stderr)

    facts = about(device)
    print("\n".join(f"{key:10} {value or '-'}" for key, value in facts.items() if key != "versions"))
    print("versions   " + ", ".join(f"{name} {version or '-'}" for name, version in facts["versions"].items()), flush=True)
    model = Llama.from_checkpoint(checkpoint, device, dtype) if checkpoint else Llama.from_config(config, device, dtype)
    name, kind, weights = getattr(args, "shape", args.ckpt), str(dtype).removeprefix("torch."), model.nbytes()
    apart = f" and, the embedding table, {gib(weights['host'])} on the host" if weights["host"] else ""
    print(f"model      {name}{'' if folder else ' (random weights)'}, {kind}, batch 1, weights {gib(weights['gpu'])} GiB{apart}", flush=True)

    ceiling = measure_ceiling(model)
    floors = {N: floor(model, ceiling, N) for N in args.lengths}
    print(f"ceiling    copy {ceiling['bandwidth'] / 1e9:,.1f} GB/s (read + written), matrix product {ceiling['matmul_rate'] / 1e12:,.3f} TFLOP/s")
    if ceiling["linear_graph_ms"]:
        print(f"           all linear layers of one decode step, one CUDA graph: {ceiling['linear_graph_ms']:.2f} ms (weights-only floor, measured)")
    for N, least in floors.items():
        parts = f"weights {gib(least['weight_bytes_read'])} GiB + KV {gib(least['kv_bytes_read'])} GiB"
        print(f"floor      {N:,} tokens: prefill {least['prefill_s']:.3f} s ({least['flops'] / 1e12:,.1f} TFLOP), decode {least['decode_ms']:.2f} ms ({parts})")
    print("table      x floor: times the floor above; speed: vs transformers, its median over the row's; GiB: KV on the device, host, peak GPU, its part beyond weights and KV, the driver's count", flush=True)

    plan = None
    if any(parse_spec(spec)[0] is TailorCache for spec in specs):  # random weights have nothing to classify: the built-in plan, or layer 0
        plan = plan_for(model, folder) if folder else known_plan(model)
        print(f"plan       quantised layers of tailor: {', '.join(map(str, plan.quantised if plan else [0])) or 'none'}")
    variants: list[Ours | Peer] = [Ours(model, spec, plan, "no_graph" not in args) for spec in specs]
    difference = None
    if "peer" in args:
        peer = load_peer(model, raw)
        variants += [Peer(peer, offloading) for offloading in ([False, True] if device.type == "cuda" else [False])]
        difference = peer_difference(model, peer)
        print(f"peer       transformers on the same weights; largest difference of logits after 64 tokens {difference:.1e}", flush=True)

    content = {**facts, "arguments": {flag: str(value) for flag, value in vars(args).items()}, "model": {"name": name, "random": folder is None, "dtype": kind, "config": dataclasses.asdict(config)}}
    content |= {"quantised_layers": plan and list(plan.quantised), "peer_logit_difference": difference, "ceiling": ceiling, "rows": []}
    for N, least in floors.items():
        content["rows"] += (rows := measure(variants, N, args.runs, args.steps, model, least, "short_warm_up" in args, "check" in args))
        print(f"\n{table(rows)}", flush=True)
        if "json" in args:  # after every length: an interrupted benchmark keeps what it has
            save(args.json, content)
    return 1 if any(row["status"].startswith("failed") or row.get("eager", SAME) != SAME for row in content["rows"]) else 0


def main(argv: list[str] | None = None) -> int:
    """The command line. Returns the exit code: 0, 1 if a variant failed, 2 for bad input, 130 after Ctrl-C."""
    warnings.showwarning = lambda message, *_: print(f"bench.py: warning: {message}", file=sys.stderr)
    args = build_parser().parse_args(argv)
    try:
        return run(args)
    except (Exception, KeyboardInterrupt) as error:
        return failed("bench.py", error)


if __name__ == "__main__":
    sys.exit(main())
