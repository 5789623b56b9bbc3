# SPDX-License-Identifier: Apache-2.0
"""What the evaluations share: flags, loading, caches by spec, and the measures.

Quality is measured on the code that generates: the decoder, its prefill and decode, and a cache made from the spec that
generate.py takes. Nothing here knows a method, except for the recall, which has to ask which tokens were attended.
"""

import argparse
import dataclasses
import json
import math
import statistics
import sys
import warnings
from pathlib import Path
from typing import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import embedded
from bench import about, split_specs
from cache import FullCache, KVCache, TailorCache, describe_caches, make_cache, parse_spec
from calibrate import Plan, plan_for
from generate import failed, pick_device, pick_dtype, resolve
from model import DTYPES, Llama, ModelConfig, find_weights, read_config
from retrieval import SparseLayer
from tokenizer import Tokenizer

# ------------------------------------------------------------------------------------------------------------- measures


def kl_divergence(reference: Tensor, other: Tensor) -> Tensor:
    """KL(reference || other) in nats of two sets of logits `[n, vocab]`, in float64: `[n]`."""
    p, q = (F.log_softmax(logits.double(), -1) for logits in (reference, other))
    return (p.exp() * (p - q)).sum(-1)


def attended_mass(q: Tensor, k: Tensor, attended: Tensor) -> Tensor:
    """The share of exact attention that falls on some of the tokens: `[B, H]`.

    Args:
        q: `[B, H, 1, D]`; k: all keys `[B, KV, N, D]`.
        attended: bool `[B, KV, N]`.
    """
    B, KV, N, D = k.shape
    scores = q.reshape(B, KV, -1, D).float() @ k.float().transpose(-1, -2) * D**-0.5  # [B, KV, G, N]
    return (scores.softmax(-1) * attended.unsqueeze(2)).sum(-1).flatten(1)


def summary(values: list[float]) -> tuple[float, list[float] | None]:
    """The mean and its 95 % interval over texts (Student's t); no interval for a single text."""
    mean, n = statistics.fmean(values), len(values)
    if n < 2:
        return mean, None
    from scipy.stats import t

    half = float(t.ppf(0.975, n - 1)) * statistics.stdev(values) / math.sqrt(n)
    return mean, [mean - half, mean + half]


def watch(cache: KVCache) -> tuple[list[list[float]], list[float]]:
    """From now on, note at each decode step how much of each layer's exact attention falls on the tokens it attends, a mean over heads.

    Under the query that the method itself arrived at. The lists, one a layer, fill as the cache is used. A layer that
    attends everything through codes, or a cache that does not say what it attends, notes nothing. The second list: tokens fetched for
    each KV head, a mean over heads, an entry for each sparse layer and step.
    """
    noted: list[list[float]] = [[] for _ in range(cache.num_layers)]
    fetched: list[float] = []
    attend = cache.attend

    def watched(layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> Tensor:
        o = attend(layer, q, k, v, scale)
        if not cache._decoding:
            return o
        entry, length = getattr(cache, "layers", [None] * cache.num_layers)[layer], cache.length + 1
        if isinstance(cache, FullCache):
            noted[layer].append(1.0)
        elif isinstance(entry, SparseLayer):
            keys, values = (x.new_empty(*x.shape[:2], length, x.shape[3]) for x in (k, v))
            entry.history(keys, values, length)
            attended = torch.zeros(keys.shape[:3], dtype=torch.bool, device=k.device)
            attended[:, :, : entry.sink_size] = True
            attended[:, :, entry.edge(length) :] = True
            if entry.chosen is not None:
                attended.scatter_(2, entry.chosen.long().clamp(min=0), True)  # -1: fewer candidates than there is room for
            noted[layer].append(attended_mass(q, keys, attended).mean().item())
            fetched.append((entry.chosen >= 0).sum(-1).double().mean().item() if entry.chosen is not None else 0.0)
        return o

    cache.attend = watched
    return noted, fetched


# -------------------------------------------------------------------------------------------------------------- loading


class Float32Head(nn.Module):
    """The output layer in float32 whatever the model's dtype.

    16-bit logits near 20 are 0.125 apart in bf16, which by itself makes a KL of about 0.001 between two methods.
    """

    def __init__(self, head: nn.Linear):
        super().__init__()
        self.weight = head.weight.float()

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x.float(), self.weight)


@dataclasses.dataclass
class Subject:
    """What is evaluated: a model with logits in float32, its tokenizer, and the plan of the caches that follow one."""

    model: Llama
    tokenizer: Tokenizer
    plan: Plan | None

    @classmethod
    def load(cls, args, specs: list[str]) -> "Subject":
        """As the flags say. Raises ValueError."""
        planned = any(issubclass(parse_spec(spec)[0], TailorCache) for spec in specs)
        device = pick_device(args.device)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        folder, _ = find_weights(resolve(args.ckpt))
        dtype = pick_dtype(args.dtype, device, ModelConfig.from_dict(read_config(folder)))
        tokenizer = Tokenizer.from_checkpoint(folder)
        model = Llama.from_checkpoint(resolve(args.ckpt), device, dtype)
        plan = plan_for(model, args.ckpt, getattr(args, "plan", None), tokenizer) if planned else None
        if dtype != torch.float32:
            model.lm_head = Float32Head(model.lm_head)
        return cls(model, tokenizer, plan)

    def cache(self, spec: str, capacity: int) -> KVCache:
        return make_cache(spec, self.model.config, self.model.device, capacity, self.plan)

    def facts(self, args) -> dict:
        """What the numbers mean nothing without."""
        dtype, quantised = str(self.model.dtype).removeprefix("torch."), self.plan and list(self.plan.quantised)
        return {**about(self.model.device), "ckpt": args.ckpt, "fingerprint": self.model.fingerprint, "dtype": dtype, "quantised_layers": quantised}


def check_specs(specs: list[str], tokens: int) -> None:
    """Refuse methods that do nothing at this length. Raises ValueError."""
    for spec in specs:
        dense = getattr(parse_spec(spec)[1], "dense", 0)
        if tokens <= dense:
            raise ValueError(f"{spec} attends everything up to {dense:,} tokens, so that {tokens:,} would measure nothing; use longer prompts or a lower dense_below")


def read_text(path: str | Path) -> str:
    """A UTF-8 file. Raises ValueError."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 (byte {error.start}); convert it first") from None


# --------------------------------------------------------------------------------------------------------- command line


def add_flags(parser: argparse.ArgumentParser, ckpt: str, cache: str) -> None:
    add = parser.add_argument
    add("--ckpt", default=ckpt, help="folder, .safetensors file, hub id, or an embedded model: " + ", ".join(embedded.NAMES))
    add("--cache", default=cache, metavar="SPEC,...", help="NAME[:field=value,...], several apart by commas; 'list' prints names, fields and defaults")
    add("--plan", default=argparse.SUPPRESS, metavar="FILE", help="which layers to quantise, as calibrate.py writes it (default: the one known, cached or measured for the checkpoint)")
    add("--device", default="auto", help="auto (CUDA where there is one), cpu, cuda, cuda:1, ...")
    add("--dtype", default="auto", choices=["auto", *DTYPES], help="auto: the checkpoint's own on a GPU, float32 on a CPU")
    add("--json", action="store_true", default=argparse.SUPPRESS, help="print one JSON object instead of a table (default: off)")


def note(name: str, text: str) -> None:
    print(f"{name}: {text}", file=sys.stderr, flush=True)


def command_line(name: str, parser: argparse.ArgumentParser, run: Callable[[argparse.Namespace, list[str]], tuple[dict, str]], argv: list[str] | None) -> int:
    """Parse, run, print `run`'s object or its table. Returns the exit code: 0, 2 for bad input, 130 after Ctrl-C."""
    warnings.showwarning = lambda message, *_: note(name, f"warning: {message}")
    args = parser.parse_args(argv)
    try:
        if args.cache == "list":
            print(describe_caches())
            return 0
        found, table = run(args, split_specs(args.cache))
        print(json.dumps(found) if "json" in args else table, flush=True)
        return 0
    except (Exception, KeyboardInterrupt) as error:
        return failed(name, error)
