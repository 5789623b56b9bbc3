# SPDX-License-Identifier: Apache-2.0
"""A Llama-architecture decoder in one file: configuration, rotary embedding, layers, checkpoint loading.

It runs Llama 2, 3, 3.1, 3.2, Yi, Mistral, TinyLlama, SmolLM2, Qwen2/2.5 (bias on q, k, v) and Qwen3 (norm on every q and
k head). A checkpoint that needs anything else is refused by name, never run wrong.

Three things differ from the usual decoder text:

* **The cache owns the read.** A layer hands q, k and v to `cache.attend` and gets the attention output back. It never sees
  stored keys and never asks what kind of cache it talks to (`cache.py` holds the contract).
* **The embedding table is on the host** where a model is loaded to a GPU: it reads one row of it a token, in place. Not if it is the head as well.
* **Prefill is layer by layer.** All tokens of a call pass through layer l before layer l+1 starts, in chunks and in place, so
  the working set is one hidden state plus one chunk, and a cache that moves K and V elsewhere needs to hold one layer at a time.

Shapes: `B` batch, `T` tokens in this call, `H` query heads, `KV` key/value heads, `D` head_dim; heads are `[B, H, T, D]`.
"""

import hashlib
import json
import math
import re
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Callable

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from kernels import linear_add_, norm_gated, norm_linear, norm_rotate, rotate, rotate_query, usable
from pinned import on_host

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")  # Yi, TinyLlama and SmolLM2 say "llama" in their config files
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


# ---------------------------------------------------------------------------------------------------- configuration


@dataclass(frozen=True)
class ModelConfig:
    """What the decoder needs from `config.json`, under the names used there."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope_parameters: dict = field(hash=False)  # always with rope_type and rope_theta; see `rope_parameters` below
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    tie_word_embeddings: bool = False
    dtype: str | None = None  # what the checkpoint says it was saved in

    @classmethod
    def from_dict(cls, raw: dict) -> "ModelConfig":
        """Read a parsed `config.json`.

        Raises:
            ValueError: a needed field is absent or out of range, or the model needs something this decoder does not do.
        """
        model_type = raw.get("model_type")
        if model_type not in MODEL_TYPES:
            raise ValueError(f"model_type {model_type!r} is not supported; this decoder runs {', '.join(MODEL_TYPES)}")
        for name in raw.get("architectures") or ():
            if not str(name).endswith("ForCausalLM"):
                raise ValueError(f"architecture {name!r} is not a language model; this decoder runs ...ForCausalLM checkpoints")

        def integer(name: str, default: int | None = None) -> int:
            value = raw.get(name)
            value = default if value is None else value
            if value is None:
                raise ValueError(f"config.json has no {name!r}, which {model_type} needs")
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"config.json has {name} = {value!r}; it must be a whole number of at least 1")
            return value

        _refuse(raw, integer("num_hidden_layers"))
        hidden_size, heads = integer("hidden_size"), integer("num_attention_heads")
        # Qwen3's class default is 128 whatever the hidden size; everyone else divides.
        head_dim = integer("head_dim", 128 if model_type == "qwen3" else hidden_size // heads)
        # Llama-1-era files leave num_key_value_heads out and mean "as many as query heads"; Mistral's class default is 8.
        kv_heads = integer("num_key_value_heads", 8 if model_type == "mistral" else heads)
        if heads % kv_heads or head_dim % 2:
            raise ValueError(
                f"config.json has {heads} query heads, {kv_heads} key/value heads and head_dim {head_dim}; "
                "query heads must be a multiple of key/value heads and head_dim even"
            )
        eps = raw.get("rms_norm_eps")
        if not isinstance(eps, float) or not 0 < eps < 1:
            raise ValueError(f"config.json has rms_norm_eps = {eps!r}; it must be a number between 0 and 1")
        attention_bias = bool(raw.get("attention_bias", False)) and model_type in ("llama", "qwen3")
        return cls(
            model_type=model_type,
            vocab_size=integer("vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=integer("intermediate_size"),
            num_hidden_layers=integer("num_hidden_layers"),
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=head_dim,
            rms_norm_eps=eps,
            max_position_embeddings=integer("max_position_embeddings"),
            rope_parameters=rope_parameters(raw),
            qkv_bias=attention_bias or model_type == "qwen2",
            o_bias=attention_bias,
            mlp_bias=bool(raw.get("mlp_bias", False)) and model_type == "llama",
            qk_norm=model_type == "qwen3",
            tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
            dtype=raw.get("dtype") or raw.get("torch_dtype"),
        )


def _refuse(raw: dict, layers: int) -> None:
    """Raise ValueError for the options of the supported families that this decoder does not implement."""
    if quantized := raw.get("quantization_config"):
        method = quantized.get("quant_method", "unknown") if isinstance(quantized, dict) else quantized
        raise ValueError(f"quantization_config ({method}) is not supported; use a checkpoint with 16- or 32-bit weights")
    if raw.get("hidden_act", "silu") != "silu":
        raise ValueError(f"hidden_act {raw['hidden_act']!r} is not supported; this decoder computes silu")
    # Mistral's class default is a window of 4096: a file that means none says null.
    window = raw.get("sliding_window", 4096 if raw["model_type"] == "mistral" else None)
    active = window is not None and raw["model_type"] != "llama"
    if raw["model_type"].startswith("qwen"):
        # Qwen's files name a window and switch it off: by flag, or by giving it to layers the model does not have.
        first = raw.get("max_window_layers", 28)
        active = active and bool(raw.get("use_sliding_window", False)) and not (isinstance(first, int) and first >= layers)
    if active or ("sliding_attention" in str(raw.get("layer_types")) and raw.get("use_sliding_window", True)):
        raise ValueError(f"an active sliding_window ({window}) is not supported; every layer here attends to all tokens")


def rope_parameters(raw: dict) -> dict:
    """Collect the rotary settings from every spelling in use into one dict with `rope_type` and `rope_theta`.

    Files have `rope_theta` beside `rope_scaling` (whose kind is `rope_type` or, older, `type`), or one `rope_parameters`.

    Raises:
        ValueError: an unknown or unsupported type, or a type without the fields it needs.
    """
    for name in ("rope_scaling", "rope_parameters"):
        if raw.get(name) and not isinstance(raw[name], dict):
            raise ValueError(f"config.json has {name} = {raw[name]!r}; it must be an object")
    rope = dict(raw.get("rope_scaling") or raw.get("rope_parameters") or {})
    if any(isinstance(value, dict) for value in rope.values()):
        raise ValueError(f"rope_parameters per layer type ({', '.join(rope)}) are not supported; all layers here share one rotary embedding")
    kind = rope.pop("type", None)
    kind = rope.setdefault("rope_type", kind or "default")
    theta = rope.get("rope_theta") or raw.get("rope_theta") or (raw.get("rope_parameters") or {}).get("rope_theta")
    if theta is None:
        warnings.warn("config.json names no rope_theta; taking 10000, the default of this model type", stacklevel=2)
        theta = 10000.0
    rope["rope_theta"] = theta
    partial = rope.pop("partial_rotary_factor", None) or raw.get("partial_rotary_factor") or 1.0
    if partial != 1.0:
        raise ValueError(f"partial_rotary_factor {partial} is not supported; every channel is rotated here")

    needs = {
        "default": (),
        "linear": ("factor",),
        "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
        "yarn": ("factor", "original_max_position_embeddings"),
    }
    if not isinstance(kind, str) or kind not in needs:
        raise ValueError(f"rope_type {kind!r} is not supported; this decoder knows {', '.join(needs)}")
    if kind in ("llama3", "yarn"):
        # A value beside rope_scaling wins over the one inside, and the model's own length stands in for both.
        inside = rope.get("original_max_position_embeddings", raw.get("max_position_embeddings"))
        rope["original_max_position_embeddings"] = raw.get("original_max_position_embeddings", inside)
    optional = ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate") if kind == "yarn" else ()
    for name in ("rope_theta", *reversed(needs[kind])):
        if (kind, name) == ("yarn", "factor") and rope.get(name) is None:
            rope[name] = raw.get("max_position_embeddings", 0) / rope["original_max_position_embeddings"]
        value = rope.get(name)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or value <= 0:
            raise ValueError(f"rope_type {kind!r} needs {name} as a number above 0, and config.json has {value!r}")
    for name in optional:
        if name != "truncate" and not isinstance(rope.get(name), (int, float, type(None))):
            raise ValueError(f"rope_type {kind!r} has {name} = {rope[name]!r}; it must be a number")
    if unused := set(rope) - {"rope_type", "rope_theta", *needs[kind], *optional}:
        warnings.warn(f"rope settings without effect for type {kind!r}: {', '.join(sorted(unused))}", stacklevel=2)
    return rope


# ------------------------------------------------------------------------------------------------- rotary embedding


def inverse_frequencies(config: ModelConfig) -> tuple[Tensor, float]:
    """Rotation speed of each channel pair, radians per token.

    Returns `(inv_freq, scaling)`: `[D/2]` float32, and the factor that cos and sin are multiplied by. Operations are float32
    on the CPU and in the order that makes every bit equal transformers'.

    Sources: RoFormer (2104.09864); linear: Chen et al. (2306.15595); llama3: the Llama 3.1 release; YaRN (2309.00071).
    """
    rope, dim = config.rope_parameters, config.head_dim
    kind, theta, factor = rope["rope_type"], rope["rope_theta"], rope.get("factor")
    periods = theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)  # [D/2], tokens per radian
    inv_freq = 1.0 / periods
    if kind == "default":
        return inv_freq, 1.0
    if kind == "linear":
        return inv_freq / factor, 1.0
    original = rope["original_max_position_embeddings"]
    if kind == "llama3":
        # Slow channels are divided by factor, fast ones kept; in between, blended by how often they turn in `original` tokens.
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        wavelength = 2 * math.pi / inv_freq
        slowed = torch.where(wavelength > original / low, inv_freq / factor, inv_freq)
        smooth = (original / wavelength - low) / (high - low)
        blended = (1 - smooth) * slowed / factor + smooth * slowed
        between = (wavelength >= original / high) & (wavelength <= original / low)
        return torch.where(between, blended, slowed), 1.0

    def channel_of(turns: float) -> float:  # YaRN eq. 22: the (fractional) channel that turns this often in `original` tokens
        return (dim * math.log(original / (turns * 2 * math.pi))) / (2 * math.log(theta))

    def mscale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    low, high = channel_of(rope.get("beta_fast") or 32), channel_of(rope.get("beta_slow") or 1)
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    high = high + 0.001 if high == low else high
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    keep = 1 - ramp
    inv_freq = 1.0 / (factor * periods) * (1 - keep) + inv_freq * keep
    scaling = rope.get("attention_factor")
    if scaling is None:
        weight, weight_all = rope.get("mscale"), rope.get("mscale_all_dim")
        scaling = mscale(weight) / mscale(weight_all) if weight and weight_all else mscale(1)
    return inv_freq, float(scaling)


# ------------------------------------------------------------------------------------------------------ the decoder


MLP_TOKENS = 2048  # that pass through an MLP at a time: its tensors are the widest


def prefill_chunk(device: torch.device) -> int:
    """Tokens that pass through a layer at a time in prefill: enough to fill the device, few enough to bound the MLP's tensors."""
    return 4096 if device.type == "cuda" else 512


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class Attention(nn.Module):
    def __init__(self, config: ModelConfig):
        super().__init__()
        hidden, D = config.hidden_size, config.head_dim
        self.num_heads, self.num_kv_heads, self.head_dim = config.num_attention_heads, config.num_key_value_heads, D
        self.q_proj = nn.Linear(hidden, self.num_heads * D, bias=config.qkv_bias)
        self.k_proj = nn.Linear(hidden, self.num_kv_heads * D, bias=config.qkv_bias)
        self.v_proj = nn.Linear(hidden, self.num_kv_heads * D, bias=config.qkv_bias)
        self.o_proj = nn.Linear(self.num_heads * D, hidden, bias=config.o_bias)
        self.q_norm = RMSNorm(D, config.rms_norm_eps) if config.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(D, config.rms_norm_eps) if config.qk_norm else nn.Identity()

    def query(self, x: Tensor) -> Tensor:
        """`[B, T, hidden]` to un-rotated queries `[B, H, T, D]`."""
        return self.query_heads(self.q_proj(x))

    def query_heads(self, q: Tensor) -> Tensor:
        return self.q_norm(q.unflatten(-1, (self.num_heads, self.head_dim))).transpose(1, 2)

    def key_heads(self, k: Tensor) -> Tensor:
        return self.k_norm(k.unflatten(-1, (self.num_kv_heads, self.head_dim))).transpose(1, 2)

    def value_heads(self, v: Tensor) -> Tensor:
        return v.unflatten(-1, (self.num_kv_heads, self.head_dim)).transpose(1, 2)

    def forward(self, x: Tensor, layer: int, cache, cos: Tensor, sin: Tensor) -> Tensor:
        q = self.query(x)
        k, v = self.key_heads(self.k_proj(x)), self.value_heads(self.v_proj(x))
        if cache.rotary == "model":
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        o = cache.attend(layer, q, k, v)  # [B, H, T, D]
        return self.o_proj(o.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, config: ModelConfig):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x), inplace=True).mul_(self.up_proj(x)))


class DecoderLayer(nn.Module):
    def __init__(self, config: ModelConfig):
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(self, h: Tensor, layer: int, cache, cos: Tensor, sin: Tensor, following: "DecoderLayer | None" = None) -> None:
        """Add this layer's output to `h [B, T, hidden]` in place.

        following: the next layer, where the cache wants its query predicted.
        """
        ahead = cache.predicts_from if following is not None else None
        if ahead == "input":
            cache.foresee(layer + 1, self.predict_query(following, h, cos, sin, cache.predicts_with))
        h += self.self_attn(self.input_layernorm(h), layer, cache, cos, sin)
        if ahead == "middle":
            cache.foresee(layer + 1, self.predict_query(following, h, cos, sin, cache.predicts_with))
        for part in h.split(MLP_TOKENS, 1):
            part += self.mlp(self.post_attention_layernorm(part))

    def predict_query(self, following: "DecoderLayer", h: Tensor, cos: Tensor, sin: Tensor, norm: str = "own") -> Tensor:
        """The next layer's query guessed from the hidden state `h [B, T, hidden]` that enters this one (TailorKV, section 4.2), or its MLP.

        norm: the next layer's "own" input norm, or that of the "previous" layer, this one, which the authors' code reuses.
        """
        normed = (following if norm == "own" else self).input_layernorm(h)
        return rotate(following.self_attn.query(normed), cos, sin)

    def decode(self, h: Tensor, layer: int, cache, cos: Tensor, sin: Tensor, following: "DecoderLayer | None" = None) -> None:
        """`forward` of one token, `h [1, 1, hidden]`, in as many kernels as there are matrices to wait for."""
        norm, a = self.input_layernorm, self.self_attn
        first = middle = None
        if following is not None:
            other, q_proj = following if cache.predicts_with == "own" else self, following.self_attn.q_proj
            ahead = (other.input_layernorm.weight, q_proj.weight, q_proj.bias)
            first, middle = (ahead, None) if cache.predicts_from == "input" else (None, ahead)
        projections = (a.q_proj, a.k_proj, a.v_proj)
        q, k, v, *guess = norm_linear(h, norm.weight, norm.eps, [p.weight for p in projections], [p.bias for p in projections], first)
        if first is not None:
            cache.foresee(layer + 1, rotate_query(following.self_attn.query_heads(*guess), cos, sin))
        q, k, v = a.query_heads(q), a.key_heads(k), a.value_heads(v)
        o = cache.rotate_attend(layer, q, k, v, cos, sin) if cache.rotary == "model" else cache.attend(layer, q, k, v)
        linear_add_(h, o.transpose(1, 2).flatten(2), a.o_proj.weight, a.o_proj.bias)
        if middle is not None:
            weight, *projection = middle
            if type(following.self_attn.q_norm) is nn.Identity:
                guess = norm_rotate(h, weight, norm.eps, *projection, cos, sin)
            else:
                guess = rotate_query(following.self_attn.query_heads(*norm_linear(h, weight, norm.eps, projection[:1], projection[1:])), cos, sin)
            cache.foresee(layer + 1, guess)
        norm, mlp = self.post_attention_layernorm, self.mlp
        x = norm_gated(h, norm.weight, norm.eps, mlp.gate_proj.weight, mlp.up_proj.weight, mlp.gate_proj.bias, mlp.up_proj.bias)
        linear_add_(h, x, mlp.down_proj.weight, mlp.down_proj.bias)


class Llama(nn.Module):
    """The decoder. Build it with `from_checkpoint`; feed it with `prefill` (a prompt or a later turn) and `decode` (one token)."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        # from_pretrained, since the constructor would first draw random numbers, on "meta" by way of torch._dynamo and Triton.
        self.embed_tokens = nn.Embedding.from_pretrained(torch.empty(config.vocab_size, config.hidden_size), freeze=False)
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        with torch.device("cpu"):  # for the same reason
            self.inv_freq, self.rope_scaling = inverse_frequencies(config)  # float32 whatever the model's dtype
        self.fingerprint = ""  # identifies the weights; set by from_checkpoint
        self._on_host: int | None = None  # address of the embedding table, if a GPU reads it in pinned host memory

    @property
    def device(self) -> torch.device:
        return self.embed_tokens.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embed_tokens.weight.dtype

    @property
    def chunk(self) -> int:
        return prefill_chunk(self.device)

    def nbytes(self) -> dict[str, int]:
        """Bytes of the weights: on the model's device ("gpu"), and what of them it reads on the host."""
        table = self.embed_tokens.weight
        host = table.nbytes if table.data_ptr() == self._on_host else 0  # whoever copied or replaced it has it on the device
        return {"gpu": sum(p.nbytes for p in self.parameters()) - host, "host": host}

    def rope(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin `[T, D]` in the model's dtype, for int64 `positions [T]`."""
        if self.inv_freq.device != positions.device:
            self.inv_freq = self.inv_freq.to(positions.device)
        angles = positions[:, None].float() * self.inv_freq  # float32: bf16 could not tell neighbours apart past token 256
        angles = torch.cat((angles, angles), dim=-1)
        return (angles.cos() * self.rope_scaling).to(self.dtype), (angles.sin() * self.rope_scaling).to(self.dtype)

    def rotate_at(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotate `x [B, H, T, D]` to int64 `positions [T]`: what a cache with `rotary = "cache"` is given."""
        return rotate(x, *self.rope(positions))

    @torch.no_grad()
    def prefill(self, ids: Tensor, cache, progress: Callable[[int], None] | None = None) -> Tensor:
        """Append `ids [B, T]` to the cache and return the logits `[B, vocab]` that follow the last one.

        `progress` is called with the number of (token, layer) pairs done since the last call; `T * num_hidden_layers` in all.
        A call that does not return, for whatever reason, leaves the cache as it was.

        Raises:
            ValueError: no tokens, or an id outside the vocabulary.
        """
        B, T = ids.shape
        self._check(ids)
        cache.begin(T)
        cache.rotate = self.rotate_at
        h = self.embed_tokens(ids.to(self.device))  # [B, T, hidden]; layers work on slices of it in place
        cos, sin = self.rope(torch.arange(cache.length, cache.length + T, device=self.device))
        for number, layer in enumerate(self.layers):
            for start in range(0, T, self.chunk):
                part = slice(start, start + self.chunk)
                layer(h[:, part], number, cache, cos[part], sin[part])
                if progress:
                    progress(min(self.chunk, T - start))
        logits = self.lm_head(self.norm(h[:, -1]))  # the other T - 1 rows would be T x vocab for nothing
        cache.pos += T
        cache.end()
        return logits

    @torch.no_grad()
    def decode(self, ids: Tensor, cache) -> Tensor:
        """Append one token per sequence, `ids [B, 1]` (on the model's device, not checked), and return the next logits `[B, vocab]`."""
        cache.begin(1, decode=True)
        logits = self.step(ids, cache)
        cache.end()
        return logits

    def step(self, ids: Tensor, cache) -> Tensor:
        """The device's share of `decode`: no host sync, positions from `cache.pos`, so that a CUDA graph can hold it whole."""
        cache.rotate = self.rotate_at
        h = self.embed_tokens(ids)
        cos, sin = self.rope(cache.pos)
        fused = h.shape[0] == 1 and usable(h.device)
        for number, layer in enumerate(self.layers):
            predict = number + 1 < len(self.layers) and cache.wants(number + 1)
            (layer.decode if fused else layer)(h, number, cache, cos, sin, self.layers[number + 1] if predict else None)
        cache.pos += 1
        if fused and type(self.lm_head) is nn.Linear:  # evals/ put another head in its place
            return norm_linear(h[:, -1], self.norm.weight, self.norm.eps, [self.lm_head.weight])[0]
        return self.lm_head(self.norm(h[:, -1]))

    def _check(self, ids: Tensor) -> None:
        if ids.numel() == 0:
            raise ValueError("the prompt is empty; give at least one token")
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= self.config.vocab_size:
            bad = low if low < 0 else high
            raise ValueError(f"token id {bad} is outside the model's vocabulary of {self.config.vocab_size}; does the tokenizer belong to it?")

    @classmethod
    def from_config(cls, config: ModelConfig, device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32, seed: int = 0) -> "Llama":
        """A model with random weights (std 0.02, norms 1), made on the device: right for speed, memory and tests, not for text."""
        with torch.device("meta"):
            model = cls(config)
        generator = torch.Generator(device).manual_seed(seed)
        for name, parameter in list(model.named_parameters()):
            value = torch.empty(parameter.shape, dtype=dtype, device=device)
            value = value.fill_(1.0) if name.endswith("norm.weight") else value.normal_(0, 0.02, generator=generator)
            _assign(model, name, value, config.tie_word_embeddings)
        if config.tie_word_embeddings:
            model.lm_head.weight = model.embed_tokens.weight
        model.inv_freq, model.rope_scaling = inverse_frequencies(config)
        return model.eval()

    @classmethod
    def from_checkpoint(cls, path_or_hub_id: str | Path, device: str | torch.device = "cpu", dtype: torch.dtype | None = None) -> "Llama":
        """Load a checkpoint folder, one `.safetensors` file with its `config.json` beside it, or a Hugging Face hub id.

        Tensors are memory-mapped and copied one by one, so the host holds no second copy; beside a GPU it holds an untied embedding table. `dtype` None: the checkpoint's own.

        Raises:
            ValueError: no such checkpoint, an unsupported model, or files that are missing, damaged or do not fit the
                config (every missing, unexpected and misshapen tensor is named).
        """
        folder, files = find_weights(find_checkpoint(path_or_hub_id))
        raw = read_config(folder)
        config = ModelConfig.from_dict(raw)
        dtype = dtype or DTYPES.get(str(config.dtype).removeprefix("torch."), torch.float32)
        with torch.device("meta"):
            model = cls(config)
        _load_weights(model, files, torch.device(device), dtype, hashlib.sha256(json.dumps(raw, sort_keys=True).encode()))
        model.inv_freq, model.rope_scaling = inverse_frequencies(config)  # built anew: the constructor's was on "meta"
        return model.eval()


# ------------------------------------------------------------------------------------------------------ checkpoints


def find_checkpoint(path_or_hub_id: str | Path) -> Path:
    """The local path of a checkpoint: as given if it exists, else downloaded (or found cached) from the Hugging Face hub.

    Raises:
        ValueError: neither a path nor a hub id; or the hub says no (absent, gated), cannot be reached, or was left half-downloaded.
    """
    name = str(path_or_hub_id)
    try:
        path = Path(name).expanduser()
        if path.exists():
            return path
    except (OSError, RuntimeError):  # longer than the file system takes; ~ of a user that does not exist
        pass
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", name) or name.startswith((".", "/")):
        raise ValueError(f"no such checkpoint: {name}; give a folder, a .safetensors file or a hub id like HuggingFaceTB/SmolLM2-135M")
    return _download(name)


def _download(repo: str) -> Path:
    """Fetch only what is needed of a hub repository: the text files, and one set of safetensors weights."""
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, RepositoryNotFoundError

    text = ["config.json", "generation_config.json", "tokenizer.json", "tokenizer.model", "tokenizer_config.json"]
    text += ["special_tokens_map.json", "added_tokens.json", "chat_template.jinja", "chat_template.json", "model.safetensors.index.json"]
    try:
        # model_info is one request; list_repo_files would retry for 23 s before it says that there is no network.
        names = [entry.rfilename for entry in HfApi().model_info(repo, timeout=10).siblings if "/" not in entry.rfilename]
        if "model.safetensors.index.json" in names:
            folder = Path(snapshot_download(repo, allow_patterns=text))
            weights = sorted(set(_weight_map(folder / "model.safetensors.index.json").values()))
        else:
            weights = [name for name in names if name.endswith(".safetensors")]
            weights = ["model.safetensors"] if "model.safetensors" in weights else weights
            if len(weights) != 1:
                raise ValueError(_no_weights(repo, names))
        return Path(snapshot_download(repo, allow_patterns=text + weights))
    except GatedRepoError:
        raise ValueError(f"{repo} is gated on the hub: accept its terms on its page there, then log in with `hf auth login`") from None
    except (RepositoryNotFoundError, HFValidationError):
        raise ValueError(f"{repo} is neither a local path nor a repository on the hub (or it is private: log in with `hf auth login`)") from None
    except HfHubHTTPError as error:
        raise ValueError(f"the hub refused {repo}: {str(error).splitlines()[0]}") from None
    except ValueError:
        raise
    except Exception as error:  # no network: the class is the HTTP library's, which changes with the hub client's version
        reason = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        try:
            folder = Path(snapshot_download(repo, allow_patterns=text, local_files_only=True))
        except LocalEntryNotFoundError as missing:
            folder = getattr(missing, "snapshot_path", None)  # set where some of the files are there
            if folder is None:
                raise ValueError(
                    f"{repo} is not a local path, is not in the hub's cache on this machine, and the hub cannot be reached ({reason}); "
                    "check the name or the network"
                ) from None
    try:
        find_weights(Path(folder))
        read_config(Path(folder))
    except ValueError as error:
        raise ValueError(f"{repo} was downloaded only in part, and the hub cannot be reached to finish it ({reason}): {error}") from None
    return Path(folder)


def find_weights(path: Path) -> tuple[Path, list[Path]]:
    """The folder of a local checkpoint and its safetensors files: the sharded index, else `model.safetensors`, else the only one.

    Raises:
        ValueError: none, several without an index, or a shard that the index names and the folder lacks.
    """
    if path.is_file():
        if path.suffix != ".safetensors":
            raise ValueError(f"{path} is not a .safetensors file; pickle files (.bin, .pt, .pth) are never opened, since opening one can run code")
        return path.parent, [path]
    index, single = path / "model.safetensors.index.json", path / "model.safetensors"
    if index.exists():
        shards = [path / name for name in sorted(set(_weight_map(index).values()))]
        if absent := [shard.name for shard in shards if not shard.exists()]:
            raise ValueError(f"{path} lacks {', '.join(absent)}, named in {index.name}; download the checkpoint again")
        return path, shards
    if single.exists():
        return path, [single]
    found = sorted(path.glob("*.safetensors"))
    if len(found) != 1:
        raise ValueError(_no_weights(str(path), [entry.name for entry in path.iterdir()]))
    return path, found


def _no_weights(where: str, names: list[str]) -> str:
    found = [name for name in names if name.endswith(".safetensors")]
    if found:
        return f"{where} has {len(found)} .safetensors files and no model.safetensors.index.json to say which belong together"
    pickles = [name for name in names if name.endswith((".bin", ".pt", ".pth"))]
    hint = f"it has {pickles[0]}, but pickle files are never opened, since opening one can run code: convert it" if pickles else "is it the right folder?"
    return f"{where} has no .safetensors weights; {hint}"


def _weight_map(index: Path) -> dict[str, str]:
    weight_map = _read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{index} has no weight_map; download the checkpoint again")
    for name in weight_map.values():
        if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
            raise ValueError(f"{index} names the shard {name!r}; shards are .safetensors files beside it")
    return weight_map


def _read_json(path: Path) -> dict:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds a {type(content).__name__} where an object belongs")
    return content


def read_config(folder: Path) -> dict:
    """The parsed `config.json` of a checkpoint folder. Raises ValueError if it is absent or malformed."""
    return _read_json(folder / "config.json")


def _assign(model: Llama, name: str, value: Tensor, tied: bool) -> None:
    """Make `value` the parameter `name`. The embedding table leaves its GPU unless it is the head as well: a token reads one row of it."""
    if name == "embed_tokens.weight" and not tied and value.is_cuda:
        held = on_host(value, "the embedding table stays on the GPU")
        if held is not None:
            model._on_host, value = held.data_ptr(), held
    owner, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(owner), leaf, nn.Parameter(value, requires_grad=False))


def _load_weights(model: Llama, files: list[Path], device: torch.device, dtype: torch.dtype, digest) -> None:
    """Check every tensor's name and shape from the files' headers, then copy them one by one; sets `model.fingerprint`."""
    wanted = {name if name.startswith("lm_head.") else f"model.{name}": parameter for name, parameter in model.named_parameters()}
    handles, found = [], {}  # found: tensor name -> (open file, shape)
    try:
        for file in files:
            handles.append(safe_open(file, framework="pt"))
            for name in handles[-1].keys():
                if not name.endswith("rotary_emb.inv_freq"):  # a buffer that old exports saved; computed here
                    found[name] = (handles[-1], tuple(handles[-1].get_slice(name).get_shape()))
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{file} cannot be read as safetensors ({error}); it may be cut short: download it again") from None

    head, embedding = "lm_head.weight", "model.embed_tokens.weight"
    tied = model.config.tie_word_embeddings
    if head not in found:
        if not tied and embedding in found:
            warnings.warn("the checkpoint has no lm_head.weight although its config does not tie it; using the embedding", stacklevel=3)
        tied = True
    elif tied and embedding in found:
        # Files exist that say "tied" and hold a head of its own all the same; the weights win.
        tied = found[head][1] == found[embedding][1] and torch.equal(found[head][0].get_tensor(head), found[embedding][0].get_tensor(embedding))
    if tied:
        wanted.pop(head)
        found.pop(head, None)
    problems = [f"missing {name}" for name in wanted if name not in found]
    problems += [f"unexpected {name}" for name in found if name not in wanted]
    problems += [
        f"{name} is {list(found[name][1])} where the config says {list(parameter.shape)}"
        for name, parameter in wanted.items()
        if name in found and found[name][1] != tuple(parameter.shape)
    ]
    if problems:
        raise ValueError(f"the weights in {files[0].parent} do not fit its config.json: " + "; ".join(problems))

    for name in wanted:
        source = found[name][0].get_tensor(name)
        if source.dtype not in (*DTYPES.values(), torch.float64):  # integers and float8 need a scale that is not here
            raise ValueError(f"{name} is stored as {source.dtype}; only floating-point weights of 16 bits or more are supported")
        digest.update(name.encode() + source.flatten()[:1024].float().numpy().tobytes())
        _assign(model, name.removeprefix("model."), torch.empty(source.shape, dtype=dtype, device=device).copy_(source), tied)
    if tied:
        model.lm_head.weight = model.embed_tokens.weight
    model.fingerprint = digest.hexdigest()
