# SPDX-License-Identifier: Apache-2.0
"""Which layers to quantise and which to fetch from: TailorKV's offline classification (2505.19586, eq. 8), and its result, a `Plan`.

    python calibrate.py                                     the embedded model on the text shipped with the project
    python calibrate.py --ckpt PATH_OR_HUB_ID --text a.txt b.txt --out plan.json --plot layers.png
    python calibrate.py --ckpt ... --observe                the paper's other observations of a model as well
    python calibrate.py --ckpt ... --by damage --cache tailor:preset=best --budget 0.3GiB@128k --out plan.json

A layer's sparse error P is the attention mass that the 5 % largest weights of a row leave out, averaged over heads and the
last queries of a text. Where P is above tau the layer attends densely: it survives coarse codes but not a choice of tokens.
Everywhere else few tokens have nearly all the mass. P depends little on the text, so a model is classified once. It does fall
with the text's length: on SmolLM2 layers 1 and 2 have 0.15 to 0.19 at 4,096 tokens, and may pass tau at 2,048.

Three things differ from the paper or its code:

* The paper prints `n_q - sum`; the threshold only makes sense for the mean over queries, `1 - sum / n_q`, as the code has it.
* The code lets every query see all keys, later ones too. Here the causal mask holds, as in the model.
* The code looks layers up by hub id. Here a known model is recognised by its shape, and any other is measured.

The model runs unchanged: a cache that attends exactly sees every query and key, and keeps those of one layer at a time. So
131,072 tokens need the K and V of one layer, the hidden state, and a bounded piece of the scores: no N x N tensor.

P is a proxy. `--by damage` measures instead what each layer costs: the KL of the next-token distributions of a text's last tokens
when this layer alone runs as TailorKV's (`damages`), for some bits, channels and numbers of fetched tokens. Damages of layers are
taken to add up, and `choose` finds the plan of least damage within a budget of GPU bytes, or of least bytes within a damage.

Shapes: `B` batch, `T` tokens in this call, `N` tokens of the text, `L` layers, `H` query heads, `KV` key/value heads,
`G = H // KV`, `D` head_dim, `n` last queries; heads are `[B, H, T, D]`.
"""

import argparse
import dataclasses
import hashlib
import json
import math
import os
import reprlib
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

import embedded
from attention import causal_attention
from cache import FullCache, KVCache, TailorCache, TailorConfig, account, layer_account, make_layer, parse_spec
from model import DTYPES, MLP_TOKENS, Llama, ModelConfig, find_weights, read_config
from offload import Prefetcher, largest
from pinned import Pinner
from quant import BITS
from retrieval import SparseLayer, critical_channels
from tokenizer import Tokenizer

# Of generate.py only the command line's helpers are used, and they are imported where they are used: it imports this module.

FORMAT = "tailorkv-plan-1"  # of plan files; raise the number when their content changes meaning
TAU, N_Q, TOKENS = 0.2, 32, 4096
SINK = 64  # first tokens, which are no candidates for retrieval, and whose keys are outliers of their own
TEXT = embedded.ASSETS / "calibration.txt"

# What each model was found to be, by the shape that `_shape` takes from its config: model_type, layers, hidden size, query
# heads, KV heads, vocabulary, rope type, theta and factor. The first five are the paper's findings, the last two ours.
KNOWN = {
    "Llama-3.1-8B": (("llama", 32, 4096, 32, 8, 128256, "llama3", 500000.0, 8.0), (0,)),
    "Llama-2-7B-32K": (("llama", 32, 4096, 32, 32, 32000, "linear", 10000.0, 8.0), (0, 1)),
    "Yi-6B-200K": (("llama", 32, 4096, 32, 4, 64000, "default", 10000000.0, None), (0, 1)),
    "Yi-9B-200K": (("llama", 48, 4096, 32, 4, 64000, "default", 10000000.0, None), (0, 1)),
    "Mistral-7B-v0.3": (("mistral", 32, 4096, 32, 8, 32768, "default", 1000000.0, None), (0,)),
    "SmolLM2-135M": (("llama", 30, 576, 9, 3, 49152, "default", 100000.0, None), (0,)),
    "SmolLM2-135M with 128k": (("llama", 30, 576, 9, 3, 49152, "yarn", 100000.0, 16.0), (0,)),
}


# ------------------------------------------------------------------------------------------------------------- the plan


@dataclass(frozen=True)
class Plan:
    """What `TailorCache` does with each layer of a model, and what that was concluded from.

    Raises:
        ValueError: a value out of range; the message names it.
    """

    quantised: tuple[int, ...]  # layers kept as codes, ascending; all others are sparse
    scores: tuple[float | None, ...]  # P of each layer; None: not measured here
    tau: float = TAU
    n_q: int = N_Q  # queries averaged over
    k: int = 0  # weights a row that count as kept, 5 % of the tokens; 0: not measured here
    fingerprint: str = ""  # of the model
    text_sha256: tuple[str, ...] = ()  # of each text, as UTF-8, before it was cut
    channels: list[Tensor] | None = dataclasses.field(default=None, compare=False, repr=False)  # int64 [KV, C'] a layer, most important first
    settings: tuple[dict[str, int], ...] | None = None  # a layer: what overrides the cache's bits, channels and topk
    damage: tuple[float, ...] | None = None  # a layer: the KL in nats that it was measured to cost alone under its settings

    def __post_init__(self):
        def share(x) -> bool:
            return type(x) in (int, float) and 0 <= x <= 1

        def whole(x, low: int, high: float = math.inf) -> bool:
            return type(x) is int and low <= x < high

        L = len(self.scores) if isinstance(self.scores, tuple) else 0
        listed = isinstance(self.quantised, tuple) and all(whole(layer, 0, L) for layer in self.quantised)
        for name, good, wanted in (
            ("scores", L and all(P is None or share(P) for P in self.scores), "a number between 0 and 1, or null, for each layer"),
            ("quantised", listed and list(self.quantised) == sorted(set(self.quantised)), f"layers from 0 to {L - 1}, ascending"),
            ("tau", share(self.tau), "a number between 0 and 1"),
            ("n_q", whole(self.n_q, 1), "a whole number of at least 1"),
            ("k", whole(self.k, 0), "a whole number of at least 0"),
            ("fingerprint", isinstance(self.fingerprint, str), "a text"),
            ("text_sha256", isinstance(self.text_sha256, tuple) and all(isinstance(text, str) for text in self.text_sha256), "a list of texts"),
            ("settings", self.settings is None or _are_settings(self.settings, L), f"for each of {L} layers an object of bits, channels or topk, or null"),
            ("damage", self.damage is None or (isinstance(self.damage, tuple) and len(self.damage) == L and all(type(x) in (int, float) and math.isfinite(x) for x in self.damage)), "a number for each layer, or null"),
            ("channels", self.channels is None or _are_ranks(self.channels, L), f"as many different channels for every head of the {L} layers, or null"),
        ):  # fmt: skip
            if not good:
                raise ValueError(f"{name} is {reprlib.repr(getattr(self, name))}; it must be {wanted}")

    @property
    def classes(self) -> tuple[str, ...]:
        """"quantised" or "sparse", for each layer."""
        return tuple("quantised" if layer in self.quantised else "sparse" for layer in range(len(self.scores)))

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON, a field a line. The file appears under its name whole or not at all. Raises ValueError if it cannot be written."""
        path = Path(path)
        about = {"format": FORMAT, "classes": self.classes} | {entry.name: getattr(self, entry.name) for entry in dataclasses.fields(self)}
        about["channels"] = self.channels and [layer.tolist() for layer in self.channels]
        text = "{\n" + ",\n".join(f"  {json.dumps(name)}: {json.dumps(value)}" for name, value in about.items()) + "\n}\n"
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        try:
            with open(temporary, "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())  # a rename that reaches the disk before its data would leave an empty file after a power cut
            os.replace(temporary, path)
        except OSError as error:
            raise ValueError(f"cannot write the plan {path}: {error.strerror}") from None
        finally:
            temporary.unlink(missing_ok=True)

    @classmethod
    def load(cls, path: str | Path) -> "Plan":
        """Read a file that `save` wrote.

        Raises:
            ValueError: it cannot be read, is no plan, is of another version, or a field has no sense; file, value and remedy are named.
        """
        remedy = "make it again with calibrate.py"
        try:
            raw = json.loads(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise ValueError(f"cannot read the plan {path}: {error.strerror}; {remedy}") from None
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path} is not a plan, because it is not valid JSON ({error}); {remedy}") from None
        if not isinstance(raw, dict) or raw.get("format") != FORMAT:
            found = f"format {raw.get('format')!r}" if isinstance(raw, dict) else f"a {type(raw).__name__}"
            raise ValueError(f"{path} has {found} where a plan of format {FORMAT!r} belongs; {remedy}")
        names = [entry.name for entry in dataclasses.fields(cls)]
        raw = {"settings": None, "damage": None} | raw  # plans from before they could be measured have neither
        if absent := [name for name in names if name not in raw]:
            raise ValueError(f"{path} has no {', '.join(absent)}; {remedy}")
        try:
            fields = {name: tuple(raw[name]) if isinstance(raw[name], list) else raw[name] for name in names}
            plan = cls(**fields | {"channels": _tensors(raw["channels"])})
        except ValueError as error:
            raise ValueError(f"{path} is damaged: {error}; {remedy}") from None
        if raw.get("classes", list(plan.classes)) != list(plan.classes):  # one of them was edited by hand
            raise ValueError(f"{path} has classes that contradict quantised = {list(plan.quantised)}; correct one of them, or {remedy}")
        return plan


def _are_settings(settings, layers: int) -> bool:
    ranges = {"bits": BITS, "channels": range(1, 1025), "topk": range(2**20 + 1)}
    if not isinstance(settings, tuple) or len(settings) != layers or not all(isinstance(each, dict) for each in settings):
        return False
    return all(name in ranges and type(value) is int and value in ranges[name] for each in settings for name, value in each.items())


def _are_ranks(channels, layers: int) -> bool:
    """One int64 tensor `[KV, C']` a layer, all of one shape, without a repetition in a row?"""
    if not isinstance(channels, list) or len(channels) != layers:
        return False
    if any(not isinstance(x, Tensor) or x.dtype != torch.int64 or x.dim() != 2 or x.shape != channels[0].shape or not x.numel() for x in channels):
        return False
    ordered = torch.stack(channels).sort(-1).values
    return bool((ordered >= 0).all() and (ordered.diff() > 0).all())


def _tensors(lists):
    """Nested lists as tensors, one a layer; or what was given, where it cannot be one, for `Plan` to refuse by name."""
    try:
        return lists and [torch.tensor(layer) for layer in lists]
    except (TypeError, ValueError, RuntimeError):
        return lists


# -------------------------------------------------------------------------------------------------------------- probing


def weights_kept(tokens: int) -> int:
    """k of the paper: 5 % of a text's tokens, rounded down, and at least one."""
    return max(1, tokens // 20)


def sparse_error(q: Tensor, k: Tensor, kept: int, scale: float, limit: int = 1 << 24) -> float:
    """P (eq. 8): mean over heads and queries of 1 - the sum of the `kept` largest attention weights.

    Args:
        q: the last n queries `[B, H, n, D]`; k: all keys `[B, KV, N, D]`; query i sees keys 0 .. N - n + i.
        scale: of the scores. They are float32, and at most `limit` of them exist at once (or one query's).
    """
    B, H, n, D = q.shape
    KV, N = k.shape[1:3]
    G, positions = H // KV, torch.arange(N, device=k.device)
    step = max(1, limit // (B * G * N))
    total = torch.zeros((), dtype=torch.float64, device=q.device)
    for head in range(KV):
        keys = k[:, head].float().transpose(1, 2)  # [B, D, N]
        for start in range(0, n, step):
            rows = q[:, head * G : (head + 1) * G, start : start + step].float()  # [B, G, t, D]
            t = rows.shape[2]
            scores = (rows.flatten(1, 2) @ keys).unflatten(1, (G, t)).mul_(scale)  # folded: a broadcast would copy the keys G times
            last = torch.arange(N - n + start, N - n + start + t, device=k.device)
            scores.masked_fill_(positions > last[:, None], -math.inf)
            left_out = 1 - scores.softmax(-1).topk(min(kept, N), -1, sorted=False).values.sum(-1)
            total += left_out.clamp_(min=0).sum(dtype=torch.float64)
    return float(total) / (B * H * n)


class Probe(KVCache):
    """Takes one prompt, attends exactly, and looks at each layer's queries and keys before the next layer replaces them.

    Attributes, a list entry a layer:
        errors: P.
        importance: `[KV, D]`, mean |q| over the group and all queries, times max |K| over the candidates: eq. 10 averaged over a text.
    """

    def __init__(self, config, device: str | torch.device = "cpu", queries: int = N_Q):
        super().__init__(config, device=device)
        self.queries = queries
        self.errors: list[float] = [math.nan] * self.num_layers
        self.importance: list[Tensor] = [torch.empty(0)] * self.num_layers
        self._k = self._v = None  # [B, KV, N, D], of the layer that is under way

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> Tensor:
        if self.length:
            raise ValueError(f"a probe takes one prompt, whole, and has had one of {self.length} tokens; make a new one")
        start = self._accept(layer, q, k, v)
        stop = start + k.shape[2]
        if start == 0:
            self._q, self._size = q[:, :, :0], 0
            if self._k is None or self._k.shape[1:3] != (k.shape[1], self._pending):
                self._k, self._v = (x.new_empty(*x.shape[:2], self._pending, x.shape[3]) for x in (k, v))
        self._k[:, :, start:stop], self._v[:, :, start:stop] = k, v
        self._q = _newest(self._q, q, self.queries)
        self._size = self._size + q.abs().sum(2, dtype=torch.float32)  # [B, H, D]
        o = causal_attention(q, self._k[:, :, :stop], self._v[:, :, :stop], scale)
        if stop == self._pending:
            # What the last queries could fetch: neither the sink nor themselves, where the text is long enough for the distinction.
            candidates = self._k[:, :, SINK : stop - self._q.shape[2]]
            kmax = largest(candidates if candidates.shape[2] else self._k).float()  # [B, KV, D]
            size = self._size.unflatten(1, (k.shape[1], -1)).mean(2) / stop
            self.importance[layer] = (size * kmax).mean(0).cpu()
            self.errors[layer] = sparse_error(self._q, self._k, weights_kept(stop), q.shape[3] ** -0.5 if scale is None else scale)
            self.look(layer, self._q, kmax)
        return o

    def look(self, layer: int, q: Tensor, kmax: Tensor) -> None:
        """For subclasses: the layer's last queries `[B, H, n, D]` and channel maxima `[B, KV, D]`."""

    def end(self) -> None:
        super().end()
        self._k = self._v = self._q = None


class Observer(Probe):
    """A probe that also gathers, over the last queries of its prompt (batch 1), the paper's other observations.

    Attributes, a list entry a layer:
        hidden: cosine similarity of the hidden states that enter layers l - 1 and l (fig. 11); NaN for layer 0.
        predicted: that of the predicted query to the true one, by norm, {"own": [...], "previous": [...]} (fig. 11).
        top8: `[KV, D]`, the share of queries for which a channel is among the 8 critical ones of its head (fig. 2).
    """

    def __init__(self, model: Llama, queries: int = N_Q):
        super().__init__(model.config, model.device, queries)
        self.model = model
        self.hidden = [math.nan] * self.num_layers
        self.predicted = {norm: [math.nan] * self.num_layers for norm in ("own", "previous")}
        self.top8: list[Tensor] = [torch.empty(0)] * self.num_layers
        self._states: dict[int, Tensor] = {}  # layer -> the last hidden states that entered it, [1, n, hidden]

    def enter(self, module, args) -> None:
        """A hook in front of the decoder's layers, whose first arguments are the hidden states and the layer's number."""
        h, layer = args[:2]
        self._states[layer] = _newest(self._states.get(layer, h[:, :0]), h, self.queries)

    def look(self, layer: int, q: Tensor, kmax: Tensor) -> None:
        n, (KV, D) = q.shape[2], kmax.shape[1:]
        index = critical_channels(q.transpose(0, 2), kmax.expand(n, -1, -1), 8)  # queries as a batch: [n, KV, 8]
        self.top8[layer] = torch.zeros(n, KV, D, device=q.device).scatter_(2, index, 1.0).mean(0).cpu()
        if layer == 0:
            return
        before, here = self._states.pop(layer - 1), self._states[layer]
        self.hidden[layer] = float(F.cosine_similarity(before.float(), here.float(), dim=-1).mean())
        cos, sin = self.model.rope(torch.arange(self._pending - n, self._pending, device=q.device))
        for norm, found in self.predicted.items():
            guess = self.model.layers[layer - 1].predict_query(self.model.layers[layer], before, cos, sin, norm)
            found[layer] = float(F.cosine_similarity(guess.float(), q.float(), dim=-1).mean())


def _newest(held: Tensor, new: Tensor, count: int) -> Tensor:
    """The last `count` rows, next to last dimension, of `held` with `new` behind it. A copy: layers change hidden states in place."""
    return torch.cat((held, new[..., -count:, :]), -2)[..., -count:, :]


def examine(model: Llama, ids: Tensor, n_q: int = N_Q, observe: bool = False, progress=None) -> Probe:
    """Run the model over one text, `ids [1, N]`, and return the `Probe`, or `Observer`, that watched. `progress` as in `Llama.prefill`."""
    if n_q < 1:
        raise ValueError(f"n_q is {n_q}; it must be at least 1")
    probe = Observer(model, n_q) if observe else Probe(model.config, model.device, n_q)
    hooks = [layer.register_forward_pre_hook(probe.enter) for layer in model.layers] if observe else []
    try:
        model.prefill(ids, probe, progress)
    finally:
        for hook in hooks:
            hook.remove()
    return probe


def conclude(model: Llama, probes: list[Probe], tau: float = TAU, channels: bool = False, text_sha256: tuple[str, ...] = ()) -> Plan:
    """The plan that probes of one model on texts of one length lead to: P is the mean over texts, and so is the channels' rank."""
    scores = tuple(sum(errors) / len(probes) for errors in zip(*(probe.errors for probe in probes)))
    ranks = None
    if channels:  # each text's importance as shares, so that none outweighs the others
        shares = ([x / x.sum(-1, keepdim=True) for x in layer] for layer in zip(*(probe.importance for probe in probes)))
        ranks = [torch.stack(layer).mean(0).argsort(stable=True, dim=-1, descending=True) for layer in shares]
    quantised = tuple(layer for layer, P in enumerate(scores) if P > tau)
    n = probes[0].length
    return Plan(quantised, scores, tau, min(probes[0].queries, n), weights_kept(n), model.fingerprint, text_sha256, ranks)


def classify(model: Llama, ids, tau: float = TAU, n_q: int = N_Q, channels: bool = False) -> Plan:
    """Measure P on one text or several, and put every layer with P > tau among the quantised.

    Args:
        ids: token ids of a text, a list or int64 `[N]`; or several texts, a list of such or `[texts, N]`. Longer ones are
            cut to the shortest, since P depends on N a little.
        n_q: the last queries of each text, all of them if it has fewer.
        channels: also rank channels, for `static=true`.

    Raises:
        ValueError: no tokens, ids outside the vocabulary, n_q or tau out of range.
    """
    if len(ids) == 0:
        raise ValueError("there is no text to classify on; give at least one token")
    texts = [torch.as_tensor(text, dtype=torch.int64) for text in ([ids] if torch.as_tensor(ids[0]).dim() == 0 else ids)]
    shortest = min(len(text) for text in texts)
    return conclude(model, [examine(model, text[None, :shortest], n_q) for text in texts], tau, channels)


# ------------------------------------------------------------------------------------------------------------- damage


class _Trial:
    """What decoder layers attend through over the tokens after a prompt: exactly, but for one layer, which attends as an `entry` does.

    The entry is a `QuantLayer` or a `SparseLayer`, and goes token by token as in decoding, so that what is measured is the code that runs.
    """

    rotary = "model"

    def __init__(self, full: FullCache, prompt: int):
        self.full, self.prompt = full, prompt
        self.layer, self.entry, self.foreseen = -1, None, None

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> Tensor:
        n, T = self.prompt, k.shape[2]
        K, V = (x[layer][:, :, :n] for x in (self.full.k, self.full.v))
        if layer != self.layer:
            return causal_attention(q, torch.cat((K, k), 2), torch.cat((V, v), 2), scale)
        scale, entry, outputs = q.shape[3] ** -0.5 if scale is None else scale, self.entry, []
        if sparse := isinstance(entry, SparseLayer):
            room = entry.edge(n + T) - entry.begin
            entry.reserve(k, v, n + T, True)
            if room > 0:
                entry.prefetcher.reserve(k, v, min(entry.channels, k.shape[3]), room, entry.topk)
        else:
            entry.reserve(k, v, n + T)
        entry.absorb(K, V, 0, n)
        for i in range(T):
            length, one = n + i + 1, slice(i, i + 1)
            pos = torch.tensor([length - 1], device=k.device)
            if not sparse:
                entry.age(length)
                outputs.append(entry.attend(q[:, :, one], k[:, :, one], v[:, :, one], scale, length, pos))
                continue
            if (first := entry.leaving(length)) is not None:
                entry.send(first, *entry.block(first))
            if k.device.type == "cuda":
                torch.cuda.synchronize(k.device)  # the host's rows are there
            if self.foreseen is not None:
                entry.foresee(layer, self.foreseen[:, :, one], length, pos, scale)
            if entry.by_kernels(length):
                entry.settle(length)
            outputs.append(entry.attend(layer, q[:, :, one], k[:, :, one], v[:, :, one], scale, length, pos))
        return torch.cat(outputs, 2)


def tries(options: TailorConfig) -> list[tuple[bool, dict[str, int]]]:
    """What each layer is tried as, `(quantised, settings)`: 1, 2 or 4 bits; half or all of the options' channels, and half, once or twice their tokens."""
    counts = sorted({max(1, options.channels // 2), options.channels})
    fetched = sorted({options.topk // 2, options.topk, 2 * options.topk})
    return [(True, {"bits": bits}) for bits in (1, 2, 4)] + [(False, {"channels": C, "topk": K}) for C in counts for K in fetched]


@torch.no_grad()
def damages(model: Llama, ids: Tensor, options: TailorConfig, steps: int = N_Q, progress=None) -> list[list[float]]:
    """For each layer, and each of `tries(options)`: KL in nats to the exact model, if this layer alone runs so. A mean over the last `steps` tokens of `ids [1, N]`."""
    device, n = model.device, ids.shape[1] - steps
    if n <= options.dense:
        raise ValueError(f"the text has {ids.shape[1]:,} tokens; damage is measured on more than {options.dense + steps:,}, up to which everything is attended")
    full = FullCache(model.config, device=device, capacity=n)
    model.prefill(ids[:, :n], full)
    trial, entering, middle = _Trial(full, n), [], []
    cos, sin = model.rope(torch.arange(n, n + steps, device=device))

    def rest(h: Tensor, first: int) -> Tensor:
        for number in range(first, len(model.layers)):
            if trial.layer < 0:
                entering.append(h.clone())
            model.layers[number](h, number, trial, cos, sin)
        return model.lm_head(model.norm(h[0])).double().log_softmax(-1)

    assert steps <= MLP_TOKENS, "the hook below is to see each layer once"
    hooks = [layer.post_attention_layernorm.register_forward_pre_hook(lambda _, args: middle.append(args[0].clone())) for layer in model.layers]
    try:
        exact = rest(model.embed_tokens(ids[:, n:].to(device)), 0)
    finally:
        for hook in hooks:
            hook.remove()
    before = middle if options.ahead else entering  # what a layer's query is predicted from
    found = []
    for layer in range(len(model.layers)):
        trial.layer, row = layer, []
        trial.foreseen = model.layers[layer - 1].predict_query(model.layers[layer], before[layer - 1], cos, sin, options.norm) if layer else None
        for quantised, setting in tries(options):
            o, pinner, prefetcher = dataclasses.replace(options, **setting), Pinner(device), Prefetcher(device, options.row_bits)
            trial.entry = make_layer(o) if quantised else make_layer(o, pinner, prefetcher)
            try:
                other = rest(entering[layer].clone(), layer)
            finally:
                prefetcher.close()
                if not quantised:
                    trial.entry.store.close()
                pinner.close()
            row.append(float((exact.exp() * (exact - other)).sum(-1).mean().clamp(min=0)))
            if progress:
                progress(1)
        found.append(row)
    return found


def choose(damage: list[list[float]], options: TailorConfig, kv_heads: int, head_dim: int, tokens: int, itemsize: int = 2, budget: float = math.inf, loss: float = math.inf) -> Plan:
    """The plan of least damage with at most `budget` GPU bytes at `tokens` tokens, or, given a `loss`, of fewest bytes with at most that damage.

    Sparse layers fetch at most the options' topk tokens on average, so that no plan buys text with traffic. By Lagrange
    multipliers, one for bytes and one for tokens: the best plan, but for plans between two neighbouring multipliers.

    Raises:
        ValueError: no plan keeps the limit; the message says what the least is.
    """
    layers, grid = len(damage), tries(options)
    sizes = [layer_account(dataclasses.replace(options, **setting), quantised, kv_heads, head_dim, tokens, itemsize)["gpu"] for quantised, setting in grid]
    extra = [0 if quantised else setting["topk"] - options.topk for quantised, setting in grid]  # traffic over what is allowed

    def plan(picked: list[int]) -> tuple[float, int, Plan]:
        quantised = tuple(layer for layer, i in enumerate(picked) if grid[i][0])
        cost = tuple(row[i] for row, i in zip(damage, picked))
        made = Plan(quantised, (None,) * layers, settings=tuple(dict(grid[i][1]) for i in picked), damage=cost)
        return sum(cost), account(options, layers, kv_heads, head_dim, tokens, made, itemsize)["gpu"], made

    def spend(picked: list[int], usable: list[int]) -> list[int]:
        """Give tokens that no layer has taken to the sparse layers that gain most by each."""
        picked = list(picked)
        while True:
            left = -sum(extra[i] for i in picked)
            swaps = [(l, i) for l, now in enumerate(picked) for i in usable if not grid[now][0] and not grid[i][0] and damage[l][i] < damage[l][now] and 0 < extra[i] - extra[now] <= left]
            if not swaps:
                return picked
            layer, i = max(swaps, key=lambda swap: (damage[swap[0]][picked[swap[0]]] - damage[swap[0]][swap[1]]) / (extra[swap[1]] - extra[picked[swap[0]]]))
            picked[layer] = i

    found = []
    multipliers = [0.0, *(10.0 ** (x / 4) for x in range(-48, 13))]
    largest_size = max(*sizes, 1)
    for limit in sorted({setting["channels"] for quantised, setting in grid if not quantised}):  # the row buffers are as large as the largest
        usable = [i for i, (quantised, setting) in enumerate(grid) if quantised or setting["channels"] <= limit]
        for price in multipliers:  # of all bytes that a layer can take, in nats
            for fare in multipliers:  # of twice the tokens
                picked = [min(usable, key=lambda i: (row[i] + price * sizes[i] / largest_size + fare * extra[i] / max(options.topk, 1), i)) for row in damage]
                if sum(extra[i] for i in picked) <= 0:
                    found += [plan(picked), plan(spend(picked, usable))]
                    break  # a higher fare only costs
    fitting = [entry for entry in found if entry[0] <= loss and entry[1] <= budget]
    if not fitting:
        least = min(entry[1] for entry in found) if math.isfinite(budget) else min(entry[0] for entry in found)
        raise ValueError(f"no plan keeps to {budget / 2**30:.3f} GiB; the smallest takes {least / 2**30:.3f}" if math.isfinite(budget) else f"no plan keeps to a KL of {loss}; the best has {least:.4f}")
    return min(fitting, key=(lambda entry: entry[:2]) if math.isinf(loss) else (lambda entry: entry[1::-1]))[2]


def parse_budget(text: str) -> tuple[float, int]:
    """`0.6GiB@128k`: bytes, and the tokens at which they are counted. Raises argparse.ArgumentTypeError."""
    from generate import parse_tokens

    size, at, tokens = text.partition("@")
    try:
        if not at or not size.endswith(("GiB", "MiB")):
            raise ValueError
        return float(size[:-3]) * (2**30 if size.endswith("GiB") else 2**20), parse_tokens(tokens)
    except (ValueError, argparse.ArgumentTypeError):
        raise argparse.ArgumentTypeError(f"{text!r} is no budget; give bytes and a length, like 0.6GiB@128k or 50MiB@8k") from None


# ------------------------------------------------------------------------------------------------------ a plan for a model


def _shape(config: ModelConfig) -> tuple:
    rope = config.rope_parameters
    heads = (config.num_attention_heads, config.num_key_value_heads)
    return config.model_type, config.num_hidden_layers, config.hidden_size, *heads, config.vocab_size, rope["rope_type"], rope["rope_theta"], rope.get("factor")


def known_plan(model: Llama) -> Plan | None:
    """The built-in plan of a model whose shape is in `KNOWN`: the model itself or a fine-tune, wherever it is stored."""
    for shape, quantised in KNOWN.values():
        if shape == _shape(model.config):
            return Plan(quantised, (None,) * model.config.num_hidden_layers, fingerprint=model.fingerprint)
    return None


def cached_path(model: Llama) -> Path | None:
    """Where the plan of this checkpoint is kept; None for a model without a fingerprint (random weights)."""
    return embedded.cache_dir() / "plans" / f"{model.fingerprint}.json" if model.fingerprint else None


def _load_for(model: Llama, path: str | Path) -> Plan:
    """The plan at `path`, which must fit the model's layers and heads. Raises ValueError."""
    plan, config = Plan.load(path), model.config
    L, KV, D = config.num_hidden_layers, config.num_key_value_heads, config.head_dim
    if len(plan.scores) != L:
        raise ValueError(f"{path} is a plan for {len(plan.scores)} layers, and the model has {L}; make one for it with calibrate.py --out {path}")
    if plan.channels and (plan.channels[0].shape[0] != KV or max(int(layer.max()) for layer in plan.channels) >= D):
        raise ValueError(f"{path} has channels that do not fit the model's {KV} KV heads of {D} channels; make one for it with calibrate.py --channels --out {path}")
    return plan


def plan_for(model: Llama, folder_or_name: str | Path, plan_path: str | Path | None = None, tokenizer: Tokenizer | None = None) -> Plan:
    """The plan in `plan_path`, if given; else the one kept for this checkpoint, else the built-in one, else one measured now and kept.

    Args:
        folder_or_name: the model's checkpoint, as given to --ckpt: its tokenizer is read if `tokenizer` is None and needed.

    Raises:
        ValueError: a plan file that is damaged or of a model with other layers. (One of other weights is only warned of.)
    """
    if plan_path is not None:
        plan = _load_for(model, plan_path)
        if plan.fingerprint != model.fingerprint:
            warnings.warn(f"the plan {plan_path} was made for another checkpoint of this shape", stacklevel=2)
        return plan
    kept = cached_path(model)
    if kept and kept.exists():
        try:
            return _load_for(model, kept)
        except ValueError as error:  # what the user did not ask for by name must not stop the run
            warnings.warn(f"the plan kept for this checkpoint is ignored: {error}", stacklevel=2)
    if plan := known_plan(model):
        return plan

    if tokenizer is None:
        from generate import resolve

        tokenizer = Tokenizer.from_checkpoint(resolve(str(folder_or_name)))
    text = TEXT.read_text(encoding="utf-8")
    ids = tokenizer.encode(text)[: min(TOKENS, model.config.max_position_embeddings)]
    print(f"calibrate.py: no plan for {folder_or_name} yet: classifying its {model.config.num_hidden_layers} layers, once, on {len(ids):,} tokens of {TEXT.name}", file=sys.stderr)
    plan = dataclasses.replace(classify(model, ids), text_sha256=(_sha256(text),))
    if kept:
        try:
            _keep(plan, kept)
        except ValueError as error:  # a home that cannot be written must not keep anyone from generating
            warnings.warn(f"{error}; the next run will classify again", stacklevel=2)
    return plan


def _keep(plan: Plan, path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"cannot write the plan {path}: {error.strerror}") from None
    plan.save(path)


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


# --------------------------------------------------------------------------------------------------------- command line


def build_parser() -> argparse.ArgumentParser:
    from generate import _Parser, parse_tokens

    parser = _Parser(prog="calibrate.py", description=__doc__.split("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter, allow_abbrev=False)
    add = parser.add_argument
    add("--ckpt", default="smollm2-128k", help="folder, .safetensors file, hub id, or an embedded model: " + ", ".join(embedded.NAMES))
    add("--text", nargs="+", default=[str(TEXT)], metavar="FILE", help="UTF-8 text; of several, the mean counts")
    add("--tokens", type=parse_tokens, default=TOKENS, metavar="N", help="tokens of each text: 4096, 32k, 128k; fewer than 4,096 make P too large")
    add("--tau", type=float, default=TAU, metavar="X", help="a layer whose P is above it is quantised")
    add("--out", default=argparse.SUPPRESS, metavar="FILE", help=f"write the plan here (default: where generate.py looks for this checkpoint's, if it is from {TOKENS:,} tokens or more)")
    add("--plot", default=argparse.SUPPRESS, metavar="FILE", help="also draw P; with --observe, FILE is the beginning of three names (needs matplotlib)")
    add("--by", default="mass", choices=["mass", "damage"], help="what decides a layer's class: P, or the KL that it is measured to cost")
    add("--cache", default="tailor:preset=best", metavar="SPEC", help="with --by damage: the cache to plan for")
    add("--budget", type=parse_budget, default=argparse.SUPPRESS, metavar="SIZE@N", help="with --by damage: GPU bytes of the cache at N tokens in 16 bits: 0.6GiB@128k")
    add("--loss", type=float, default=argparse.SUPPRESS, metavar="X", help="with --by damage, instead: the least bytes (at 128k tokens) whose damage is at most X nats")
    add("--channels", action="store_true", default=argparse.SUPPRESS, help="also rank each layer's channels, for --cache tailor:static=true (default: off)")
    add("--observe", action="store_true", default=argparse.SUPPRESS, help="also print how alike successive layers are, and which channels are critical (default: off)")
    add("--device", default="auto", help="auto (CUDA where there is one), cpu, cuda, cuda:1, ...")
    add("--dtype", default="auto", choices=["auto", *DTYPES], help="auto: the checkpoint's own on a GPU, float32 on a CPU")
    return parser


def print_classes(plan: Plan, width: int = 40) -> None:
    """A row a layer: P, a bar with tau marked in it, and the class."""
    print(f"{'layer':>5}  {'P':>6}  {'0':{width}}1  class")
    mark = min(round(plan.tau * width), width - 1)
    for layer, (P, kind) in enumerate(zip(plan.scores, plan.classes)):
        bar = ("#" * round(P * width)).ljust(width)
        print(f"{layer:5}  {P:6.4f}  {bar[:mark] + '|' + bar[mark + 1 :]}   {kind}")


def print_observations(names: list[str], observers: list[Observer]) -> None:
    """The paper's figures 1, 11 and 2 as tables."""
    print("\nsparse error P of each text (fig. 1): " + ", ".join(f"({i}) {name}" for i, name in enumerate(names, 1)))
    print("layer" + "".join(f"{f'({i})':>9}" for i in range(1, len(names) + 1)))
    for layer, row in enumerate(zip(*(seen.errors for seen in observers))):
        print(f"{layer:5}" + "".join(f"{P:9.4f}" for P in row))
    hidden, own, previous, top8 = summarise(observers)
    print("\ncosine similarity (fig. 11): of the hidden states entering layers l-1 and l, and of the predicted to the true query, by norm")
    print(f"layer{'hidden':>9}{'own':>9}{'previous':>9}")
    for layer, row in enumerate(zip(hidden, own, previous)):
        if layer:
            print(f"{layer:5}" + "".join(f"{x:9.4f}" for x in row))
    print("\nTop-8 critical channels (fig. 2): channels that ever are, the share of places the 8 most frequent fill, and channel:share of queries")
    print("layer head ever fixed  most frequent")
    for layer, heads in enumerate(top8):
        for head, share in enumerate(heads):
            best = share.topk(min(10, len(share)))
            fixed = float(best.values[:8].sum() / share.sum())
            print(f"{layer:5}{head:5}{int((share > 0).sum()):5}{fixed:6.2f}  " + " ".join(f"{c}:{x:.2f}" for c, x in zip(best.indices.tolist(), best.values.tolist())))


def summarise(observers: list[Observer]) -> tuple[list[float], list[float], list[float], Tensor]:
    """Means over texts: hidden similarity, query similarity by own and previous norm, a number a layer each, and Top-8 shares `[L, KV, D]`."""

    def mean(rows) -> list[float]:
        return [sum(values) / len(observers) for values in zip(*rows)]

    predicted = [mean(seen.predicted[norm] for seen in observers) for norm in ("own", "previous")]
    return mean(seen.hidden for seen in observers), *predicted, torch.stack([torch.stack(seen.top8) for seen in observers]).mean(0)


def plot(path: Path, plan: Plan, names: list[str], probes: list[Probe], observe: bool) -> list[Path]:
    """Draw P by layer to `path`; with `observe`, P of each text, and beside it two more figures. Returns the files written. Raises ValueError."""
    from matplotlib.figure import Figure  # without pyplot: no display is needed and no global state left

    path = path if path.suffix else path.with_suffix(".png")
    layers, figures = range(len(plan.scores)), {}

    def axes(suffix: str = "", height: float = 3, **settings):
        figure = figures[path.with_name(path.stem + suffix + path.suffix)] = Figure(figsize=(8, height), layout="constrained")
        made = figure.subplots()
        made.set(**settings)
        return made

    errors = axes(xlabel="layer", ylabel="sparse error P", ylim=(0, 1))
    errors.bar(layers, plan.scores, alpha=0.5, color=["tab:orange" if kind == "quantised" else "tab:blue" for kind in plan.classes])
    errors.axhline(plan.tau, color="black", linewidth=0.8, linestyle="--")
    if observe:
        for name, seen in zip(names, probes):
            errors.plot(layers, seen.errors, marker=".", label=name)
        errors.legend()
        *similar, top8 = summarise(probes)
        cosine = axes("-similarity", xlabel="layer", ylabel="cosine similarity")
        for values, label in zip(similar, ("hidden state", "query, own norm", "query, previous layer's norm")):
            cosine.plot(layers, values, marker=".", label=label)
        cosine.legend()
        L, KV, _ = top8.shape
        channels = axes("-channels", 1 + 0.1 * L * KV, xlabel="channel", ylabel="layer", yticks=range(0, L * KV, KV), yticklabels=layers)
        image = channels.imshow(top8.flatten(0, 1), aspect="auto", interpolation="nearest", vmin=0, vmax=1)
        channels.figure.colorbar(image, label="share of queries in the Top-8")
    for target, figure in figures.items():
        try:
            figure.savefig(target, dpi=150)
        except (OSError, ValueError) as error:  # ValueError: a suffix that is no image format
            raise ValueError(f"cannot write the plot {target}: {error}") from None
    return list(figures)


def run(args) -> int:
    """Do what the parsed flags say; returns the exit code. Raises ValueError for bad input."""
    from generate import pick_device, pick_dtype, read_prompt, resolve

    if not 0 <= args.tau <= 1:
        raise ValueError(f"--tau is {args.tau}; P, which it is compared with, lies between 0 and 1")
    if "plot" in args:
        try:
            import matplotlib  # noqa: F401
        except ImportError:
            raise ValueError("--plot needs matplotlib, which is not installed; install it (pip install matplotlib) or leave --plot out") from None
    if args.by == "damage":
        cls, options = parse_spec(args.cache)
        if cls is not TailorCache or ("budget" in args) == ("loss" in args) or "out" not in args:
            raise ValueError("--by damage needs a tailor cache, either --budget or --loss, and --out: its plan is for that cache and limit alone")
    elif {"budget", "loss"} & set(vars(args)):
        raise ValueError("--budget and --loss need --by damage")
    for name in {"out", "plot"} & set(vars(args)):  # now, and not after minutes of work
        target = Path(getattr(args, name))
        if target.is_dir() or not target.parent.is_dir():
            raise ValueError(f"--{name} {target} " + ("is a folder; name a file" if target.is_dir() else f"cannot be written: there is no folder {target.parent}"))
    texts = [read_prompt(argparse.Namespace(prompt_file=name)) for name in args.text]
    names = [Path(name).name for name in args.text]
    device, observe = pick_device(args.device), "observe" in args

    folder, _ = find_weights(resolve(args.ckpt))
    config = ModelConfig.from_dict(read_config(folder))
    tokenizer = Tokenizer.from_checkpoint(folder)
    ids = [tokenizer.encode(text)[: args.tokens] for text in texts]
    n = min(map(len, ids))
    if n == 0:
        raise ValueError(f"the tokenizer makes no token of {args.text[ids.index([])]}")
    if n < args.tokens:
        print(f"calibrate.py: warning: {names[min(range(len(ids)), key=lambda i: len(ids[i]))]} has only {n:,} tokens, so that every text is cut to them", file=sys.stderr)
    if n > config.max_position_embeddings:
        print(f"calibrate.py: warning: {n:,} tokens are beyond the {config.max_position_embeddings:,} that the model was trained for", file=sys.stderr)

    dtype = pick_dtype(args.dtype, device, config)
    model = Llama.from_checkpoint(resolve(args.ckpt), device, dtype)
    with tqdm(total=len(ids) * n * config.num_hidden_layers, desc="classify", unit="", disable=None, leave=False, bar_format="{desc} {percentage:3.0f}% |{bar}| {elapsed}<{remaining}") as bar:
        probes = [examine(model, torch.tensor([text[:n]]), N_Q, observe, bar.update) for text in ids]
    plan = conclude(model, probes, args.tau, "channels" in args, tuple(map(_sha256, texts)))

    if args.by == "damage":
        measured = []
        with tqdm(total=len(ids) * config.num_hidden_layers * len(tries(options)), desc="damage", unit="", disable=None, leave=False) as bar:
            measured = [damages(model, torch.tensor([text[:n]]), options, progress=bar.update) for text in ids]
        mean = [[sum(values) / len(measured) for values in zip(*rows)] for rows in zip(*measured)]
        limits = {"budget": args.budget[0]} if "budget" in args else {"loss": args.loss}
        tokens = args.budget[1] if "budget" in args else 131072
        chosen = choose(mean, options, config.num_key_value_heads, config.head_dim, tokens, **limits)
        plan = dataclasses.replace(plan, quantised=chosen.quantised, settings=chosen.settings, damage=chosen.damage)

    # A quick try on a few tokens, whose P is too large, must not become what generate.py goes by from then on.
    worth_keeping = n >= min(TOKENS, config.max_position_embeddings)
    out = Path(args.out) if "out" in args else cached_path(model) if worth_keeping else None
    if out:  # before anything is printed: a reader like `| head` may end the program there
        _keep(plan, out)
    written = ([out] if out else []) + (plot(Path(args.plot), plan, names, probes, observe) if "plot" in args else [])
    print(f"P: attention mass outside the {plan.k:,} largest weights a row; {n:,} tokens of {', '.join(names)}; last {plan.n_q} queries; tau {plan.tau}")
    print_classes(plan)
    if plan.settings:
        size = account(options, config.num_hidden_layers, config.num_key_value_heads, config.head_dim, tokens, plan)["gpu"]
        print(f"by damage, for {args.cache}: KL {sum(plan.damage):.4f} if damages add up, {size / 2**30:.3f} GiB at {tokens:,} tokens")
        for layer, (kind, setting, cost) in enumerate(zip(plan.classes, plan.settings, plan.damage)):
            print(f"{layer:5}  {kind:9}  {cost:.5f}  " + " ".join(f"{name}={value}" for name, value in setting.items()))
    if observe:
        print_observations(names, probes)
    chosen = ", ".join(map(str, plan.quantised)) or "none"
    print(f"quantised: {chosen} of {config.num_hidden_layers} layers; written: {', '.join(map(str, written)) or 'nothing'}", file=sys.stderr)
    if not out:
        print(f"calibrate.py: warning: the plan is not kept, since {n:,} tokens are few; give --tokens {TOKENS} or --out", file=sys.stderr)
    return 0


def main(argv: list[str] | None = None) -> int:
    """The command line. Returns the exit code: 0, 2 for bad input, 130 after Ctrl-C."""
    warnings.showwarning = lambda message, *_: print(f"calibrate.py: warning: {message}", file=sys.stderr)
    args = build_parser().parse_args(argv)
    sys.stdout.reconfigure(encoding="utf-8", errors="replace")
    try:
        return run(args)
    except (Exception, KeyboardInterrupt) as error:
        from generate import failed  # which imports this module

        return failed("calibrate.py", error)


if __name__ == "__main__":
    sys.exit(main())
