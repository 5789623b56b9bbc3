# SPDX-License-Identifier: Apache-2.0
"""What a KV cache is (`KVCache`), the cache that keeps everything (`FullCache`), and TailorKV's (`TailorCache`).

Shapes: `B` batch, `T` tokens in this call, `N` tokens stored, `H` query heads, `KV` key/value heads, `G = H // KV`,
`D` head_dim; tensors are `[B, H, T, D]`.

A call, be it a prompt, a later turn or one decoded token, goes

    cache.begin(T)                       # host only: announce T tokens, make room
    for each layer:                      # T tokens in all, in one piece or in consecutive chunks
        o = cache.attend(layer, q, k, v)
    cache.pos += T                       # device only, so that a captured CUDA graph advances by itself
    cache.end()                          # host only: commit

and a call that never reaches `end` has not happened.
"""

import contextlib
import dataclasses
import glob
import json
import os
import secrets
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Callable

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from attention import causal_attention
from kernels import MAX_HEAD_DIM, rotate_append, rotate_pair, split_attention, usable
from offload import BLOCK, Event, Job, Prefetcher, ZeroCopy, block_facts, round_tokens, whole_chunks
from pinned import Pinner
from quant import BITS, QuantLayer, token_row
from retrieval import SparseLayer, statistics
from sparse_kernels import summarises

FORMAT = "tailorkv-cache-1"  # of saved files; raise the number when their content changes meaning


# ---------------------------------------------------------------------------------------------------------- contract


class KVCache:
    """The contract between a decoder and whatever remembers its K and V. One object holds all layers.

    Attributes:
        length: tokens seen, a host int, which is the next position (not the rows held: a method may evict).
        pos: int64 `[1]` on the device, the same number where kernels can read it; advanced by the decoder.
        epoch: changes when a pointer or shape that a captured CUDA graph holds did; the graph is then captured anew.
        rotary: "model": q and k arrive rotated; "cache": un-rotated, and `rotate(x, positions)` is set.
        predicts_with: the norm in front of a predicted query: the layer's "own", or that of the "previous" layer.
        predicts_from: the hidden state it is predicted from: the previous layer's "input", or its "middle", between attention and MLP.
    """

    rotary = "model"
    predicts_with = "own"
    predicts_from = "input"
    rotate: Callable[[Tensor, Tensor], Tensor] | None = None

    @dataclasses.dataclass(frozen=True)
    class Options:
        """What `--cache name:field=value,…` may set; a subclass lists its fields here."""

        @classmethod
        def build(cls, **values) -> "KVCache.Options":
            """Options with these fields set. Raises ValueError for a value out of range."""
            return cls(**values)

    def __init__(self, config, options=None, device: str | torch.device = "cpu", capacity: int = 0):
        """
        Args:
            config: of the model; only `num_hidden_layers` is read. Heads, head_dim and dtype come with the tensors, which
                tensor parallelism or latent attention may shape otherwise than the config says.
            options: an `Options`, or None for its defaults.
            device: where q, k and v will be.
            capacity: tokens to make room for at once. A hint: results never depend on it, and the cache grows past it.
        """
        self.config = config
        self.num_layers = config.num_hidden_layers
        self.options = options or self.Options.build()
        self.capacity = capacity
        self.length = 0
        self.epoch = 0
        self.pos = torch.zeros(1, dtype=torch.int64, device=device)
        self._pending = 0  # tokens announced by begin and not yet committed
        self._decoding = False
        self._seen = [0] * self.num_layers  # of those, how many each layer has been given

    # -- a call

    def begin(self, T: int, decode: bool = False) -> None:
        """Announce a call of T tokens. Host only, and needed before every call and every replay of a captured one.

        `decode` says what the call is, whatever T: a one-token turn, or a last chunk of one token, is prefill.
        A call before it that never reached `end` is rolled back.
        """
        if T < 1 or (decode and T != 1):
            raise ValueError(f"begin({T}, decode={decode}): a call holds at least one token, and a decode step exactly one")
        if self._pending:
            self._roll_back()
            self.pos.fill_(self.length)
            self.epoch += 1  # it may have moved a buffer and been interrupted before it said so
        self._seen = [0] * self.num_layers
        self._decoding = decode
        self._pending = T  # from here on an interrupt is rolled back by the next call
        self._make_room(self.length + T)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> Tensor:
        """Append k, v `[B, KV, t, D]` to `layer` and return the attention `[B, H, t, Dv]` of q `[B, H, t, D]` over all it holds.

        Causal and bottom-right aligned. t is the announced T, or less: chunks of a call come one after another.
        v's last dimension may differ from k's.

        Raises:
            ValueError: tensors that do not fit each other, the cache's device or what it holds, or more tokens than announced.
        """
        raise NotImplementedError

    def rotate_attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """`attend` of a decode step's q and k, not yet rotated, by `cos, sin [1, D]`: a cache that can rotates where it writes."""
        return self.attend(layer, *rotate_pair(q, k, cos, sin), v)

    def _watched(self, attend) -> bool:
        """Has somebody replaced or overridden `attend`, which is `attend` otherwise? Then it must be called."""
        return getattr(self.attend, "__func__", None) is not attend

    def capturable(self) -> bool:
        """May a decode step be captured in a CUDA graph, once one has run? Then it reads no host number that changes but through `epoch`."""
        return False

    def replayed(self) -> None:
        """A captured step ran in place of the `attend` calls: every layer has seen the announced token. Comes before `end`."""
        if not self._decoding or self._pending != 1:
            raise RuntimeError(f"replayed() without a decode step: {self._pending} tokens announced, decode={self._decoding}")
        self._seen = [1] * self.num_layers

    def end(self) -> None:
        """Commit the call: `length` grows by its T tokens."""
        if not self._pending or any(seen != self._pending for seen in self._seen):
            raise RuntimeError(f"end() without a whole call: {self._pending} tokens announced, layers have seen {sorted(set(self._seen))}")
        # The pair below is what an interrupt must not tear: `length` moves only together with the end of the call.
        self.length, self._pending = self.length + self._pending, 0

    # -- prediction (decode only)

    def wants(self, layer: int) -> bool:
        """Does this layer use a query predicted ahead of it? Fixed for the life of the cache; never for layer 0."""
        return False

    def foresee(self, layer: int, q: Tensor, scale: float | None = None) -> None:
        """The predicted query `[B, H, 1, D]` of `layer`, rotated at the current position; comes before `attend(layer - 1, …)`, or right after
        it, where the decoder heeds `predicts_from`. scale: as `attend` will be given it."""

    # -- between calls

    def crop(self, n: int) -> None:
        """Forget all tokens after the first n (a stop string, an answer to be regenerated, the next question on one prefill)."""
        if not 0 <= n <= self.length:
            raise ValueError(f"crop({n}): the cache holds {self.length} tokens")
        if self._pending:
            self._roll_back()
            self.epoch += 1  # as in begin
        self._pending = 1  # until all is done, so that the next call undoes or completes what an interrupt leaves
        self._forget(n)
        self.length = n
        self.pos.fill_(n)
        self._pending = 0

    def reset(self) -> None:
        """Empty the cache and keep its buffers; nothing of the old sequence stays in them."""
        raise NotImplementedError

    def close(self) -> None:
        """Stop what runs in the background and free all buffers. The cache is then empty and may be used again."""
        raise NotImplementedError

    def __enter__(self):
        return self

    def __exit__(self, *exception) -> None:
        self.close()

    def nbytes(self) -> dict[str, dict[str, int]]:
        """Bytes really held, by tier and part: `{"gpu": {part: bytes}, "host": {part: bytes}}`. "gpu" is the model's device, also on a CPU."""
        raise NotImplementedError

    @classmethod
    def estimate(cls, config, options, tokens: int, itemsize: int, batch: int = 1) -> dict[str, int]:
        """Bytes that `tokens` tokens will take, `{"gpu": …, "host": …}`: asked before anything is allocated."""
        raise NotImplementedError

    # -- on disk

    def save(self, path: str | Path, extra: dict[str, Tensor] | None = None, meta: dict | None = None) -> None:
        """Write the cache as one safetensors file, with tensors and JSON-able facts of the caller's own beside it.

        The file appears under its name whole or not at all; a temporary that a killed save left behind is removed.

        Raises:
            ValueError: the name is taken by something that is not a saved cache; another saved cache is replaced.
        """
        path = Path(path)
        if path.exists():
            try:
                with safe_open(path, framework="pt") as file:
                    taken = "about" not in (file.metadata() or {})
            except (SafetensorError, OSError):
                taken = True
            if taken:
                raise ValueError(f"{path} exists and is not a saved cache; it is left as it is, choose another name")
        if self._pending:
            self.crop(self.length)  # a call that never reached `end` has not happened
        about = {"format": FORMAT, "cache": type(self).__name__, "options": dataclasses.asdict(self.options)}
        about |= {"layers": self.num_layers, "length": self.length, **self._about(), "meta": meta or {}}
        tensors = {f"cache.{name}": tensor for name, tensor in self._tensors().items()}
        tensors |= {f"extra.{name}": tensor.clone() for name, tensor in (extra or {}).items()}
        # Committed tokens only, each tensor in storage of its own: safetensors refuses views.
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        for stale in path.parent.glob(glob.escape(f".{path.name}.") + "*.tmp"):
            shutil.rmtree(stale) if stale.is_dir() else stale.unlink(missing_ok=True)
        # A folder, because safetensors writes to a temporary of its own, of unknown name, beside the file that it is to write.
        # Its name is chosen before it is made, so that no interrupt comes between the two; nobody else has this name.
        folder = path.parent / f".{path.name}.{secrets.token_hex(8)}.tmp"
        try:
            folder.mkdir(0o700)
            save_file(tensors, folder / "whole", metadata={"about": json.dumps(about)})
            with open(folder / "whole", "rb") as file:
                os.fsync(file.fileno())  # a rename that reaches the disk before its data would leave an empty file after a power cut
            os.replace(folder / "whole", path)
        except SafetensorError as error:  # its own word for a full disk
            raise OSError(f"cannot write {path}: {error}") from None
        finally:
            try:
                _discard(folder)
            except KeyboardInterrupt:  # one that came only now
                _discard(folder)
                raise

    def load(self, path: str | Path) -> tuple[dict[str, Tensor], dict]:
        """Fill this cache from a file that `save` wrote, and return what the caller stored: `(extra, meta)`.

        Raises:
            ValueError: not such a file, damaged, of another version or cache, or made under other options; the cache is then as before.
        """
        about, stored = _read_saved(path)
        mine = {"format": FORMAT, "cache": type(self).__name__, "options": dataclasses.asdict(self.options), "layers": self.num_layers, **self._about()}
        for key, value in mine.items():
            if about.get(key) != value:
                raise ValueError(f"{path} has {key} {about.get(key)!r}, and this cache needs {value!r}")
        length = about["length"]
        self._restore({n.removeprefix("cache."): t for n, t in stored.items() if n.startswith("cache.")}, length)
        self._pending = 1  # as in crop
        self.length = length
        self.pos.fill_(length)
        self._pending = 0
        return {n.removeprefix("extra."): t for n, t in stored.items() if n.startswith("extra.")}, about["meta"]

    # -- for subclasses

    def _make_room(self, tokens: int) -> None:
        """Grow what is allocated to hold `tokens` tokens."""

    def _roll_back(self) -> None:
        """Undo whatever the unfinished call left behind."""

    def _forget(self, n: int) -> None:
        """Drop what was derived from tokens after the first n. `_roll_back` follows if it is interrupted."""

    def _about(self) -> dict:
        """What a saved file must say, beside the options, for an equal cache to be made again."""
        return {}

    def _tensors(self) -> dict[str, Tensor]:
        """All committed content, in any memory, less what can be computed from it."""
        raise NotImplementedError

    def _restore(self, tensors: dict[str, Tensor], length: int) -> None:
        """Check that these are a `_tensors()` of `length` tokens (ValueError), then replace what is held by them."""
        raise NotImplementedError

    def _accept(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> int:
        """Check a chunk and count it; returns the position of its first token."""
        t = k.shape[2]
        if q.shape[2] != t or v.shape[:3] != k.shape[:3] or q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3] or q.shape[1] % k.shape[1]:
            raise ValueError(f"q {list(q.shape)}, k {list(k.shape)} and v {list(v.shape)} do not fit each other; they are [B, H or KV, T, D]")
        if k.device != self.pos.device:
            raise ValueError(f"the cache was made for {self.pos.device} and the tensors are on {k.device}; pass device= when making it")
        seen = self._seen[layer]
        if seen + t > self._pending:
            raise ValueError(f"layer {layer} is given {seen + t} tokens, and begin() announced {self._pending}")
        self._seen[layer] = seen + t
        return self.length + seen


# -------------------------------------------------------------------------------------------------------- full cache


class FullCache(KVCache):
    """Keeps all K and V in the dtype they come in: exact, and what every method is measured against.

    GPU bytes: `2 * L * B * KV * D * capacity * itemsize`, capacity being what was asked for or, past it, grown by an eighth at a time.
    """

    def __init__(self, config, options=None, device: str | torch.device = "cpu", capacity: int = 0):
        super().__init__(config, options, device, capacity)
        self.k: list[Tensor | None] = [None] * self.num_layers  # [B, KV, capacity, D]; rows from `length` on are free
        self.v: list[Tensor | None] = [None] * self.num_layers

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> Tensor:
        if self._decoding and self._fused(k, v):
            return self._decode(layer, q, k, v, None, None, scale)
        start = self._accept(layer, q, k, v)
        self._allocate(layer, k, v)
        stop = start + k.shape[2]
        self.k[layer][:, :, start:stop] = k
        self.v[layer][:, :, start:stop] = v
        return causal_attention(q, self.k[layer][:, :, :stop], self.v[layer][:, :, :stop], scale)

    def rotate_attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        if self._fused(k, v) and not self._watched(FullCache.attend):
            return self._decode(layer, q, k, v, cos, sin, None)
        return super().rotate_attend(layer, q, k, v, cos, sin)

    def _decode(self, layer: int, q: Tensor, k: Tensor, v: Tensor, cos: Tensor | None, sin: Tensor | None, scale: float | None) -> Tensor:
        """Both kernels take the position from the device, so that a CUDA graph can hold them."""
        self._accept(layer, q, k, v)
        self._allocate(layer, k, v)
        held = self.k[layer], self.v[layer]
        q = rotate_append(q, k, v, cos, sin, *held, self.pos, held[0].shape[2])
        return split_attention(q, *held, self.pos, scale)

    def _fused(self, k: Tensor, v: Tensor) -> bool:
        return max(k.shape[3], v.shape[3]) <= MAX_HEAD_DIM and usable(k.device)

    def capturable(self) -> bool:
        pairs = zip(self.k, self.v)
        return self.pos.is_cuda and not self._watched(FullCache.attend) and all(k is not None and v is not None and self._fused(k, v) for k, v in pairs)

    def _allocate(self, layer: int, k: Tensor, v: Tensor) -> None:
        for buffers, new in ((self.k, k), (self.v, v)):
            held = buffers[layer]
            shape = (*new.shape[:2], self.capacity, new.shape[3])
            nothing_held = self.length + self._seen[layer] <= k.shape[2]
            if held is None or (nothing_held and (held.shape != shape or held.dtype != new.dtype)):
                buffers[layer] = None  # freed first: a new batch size must not hold both
                buffers[layer] = new.new_empty(shape)
                self.epoch += 1
            elif held.shape != shape or held.dtype != new.dtype:
                raise ValueError(
                    f"the cache holds tokens of {list(held.shape)} {held.dtype} and was given {list(new.shape)} {new.dtype}; reset() it first"
                )

    def _make_room(self, tokens: int) -> None:
        if tokens > self.capacity:
            self.capacity = max(tokens, self.capacity + self.capacity // 8 + 64) if self.length else tokens
        # Layer by layer, so that the peak is one layer's copy; and per layer, so that an interrupted growth goes on at the next call.
        for buffers in (self.k, self.v):
            for layer, held in enumerate(buffers):
                if held is not None and held.shape[2] < self.capacity:
                    grown = held.new_empty(*held.shape[:2], self.capacity, held.shape[3])
                    grown[:, :, : self.length] = held[:, :, : self.length]
                    buffers[layer] = grown
                    self.epoch += 1

    def reset(self) -> None:
        self.crop(0)
        for held in self.k + self.v:
            if held is not None:
                held.zero_()

    def close(self) -> None:
        self.crop(0)
        self.k, self.v = [None] * self.num_layers, [None] * self.num_layers
        self.epoch += 1

    def nbytes(self) -> dict[str, dict[str, int]]:
        size = {name: sum(held.nbytes for held in held_by if held is not None) for name, held_by in (("k", self.k), ("v", self.v))}
        return {"gpu": {**size, "pos": self.pos.nbytes}, "host": {}}

    @classmethod
    def estimate(cls, config, options, tokens: int, itemsize: int, batch: int = 1) -> dict[str, int]:
        return {"gpu": 2 * config.num_hidden_layers * batch * config.num_key_value_heads * config.head_dim * tokens * itemsize, "host": 0}

    def _tensors(self) -> dict[str, Tensor]:
        pairs = [(f"{name}.{layer}", held) for name, held_by in (("k", self.k), ("v", self.v)) for layer, held in enumerate(held_by)]
        return {name: held[:, :, : self.length] for name, held in pairs if held is not None}

    def _restore(self, tensors: dict[str, Tensor], length: int) -> None:
        names = {f"{name}.{layer}" for name in "kv" for layer in range(self.num_layers)} if length else set()
        shapes = {tuple(tensor.shape[:3]) for tensor in tensors.values()}
        if not isinstance(length, int) or length < 0 or set(tensors) != names or len(shapes) > 1 or any(shape[2:] != (length,) for shape in shapes):
            raise ValueError(f"the saved cache holds {len(tensors)} tensors of shapes {sorted(shapes)}; {self.num_layers} layers of {length} tokens were expected")
        self.reset()
        self.capacity = max(self.capacity, length)
        for name, held_by in (("k", self.k), ("v", self.v)) if length else ():
            for layer in range(self.num_layers):
                stored = tensors[f"{name}.{layer}"]
                held_by[layer] = None
                held_by[layer] = torch.empty(*stored.shape[:2], self.capacity, stored.shape[3], dtype=stored.dtype, device=self.pos.device)
                held_by[layer][:, :, :length] = stored
                self.epoch += 1


# ------------------------------------------------------------------------------------------------------ TailorKV's cache

PAPER = {
    "k_levels": "minmax", "v_levels": "minmax", "correct": False, "centre": 0,
    "row_bits": 16, "aggregation": "authors", "norm": "previous", "ahead": False, "tail": False, "tilt": False, "resident": 0,
}  # fmt: skip
PRESETS = {
    # The best found with 192 tokens attended and no more bytes over PCIe than "longbench"; evals/ingredients.py prints what each part brings.
    "best": {"bits": 2, "sink": 8, "recent": 56, "topk": 128, "channels": 28, "resident": 36},
    # As many tokens as each head needs: more where attention is spread out, 64 where it is not; hardly fewer than "best" on average, and the better text.
    "adaptive": {"bits": 2, "sink": 8, "recent": 56, "topk": 256, "left": 0.094, "channels": 28, "resident": 36},
    # The best found that fits into the GPU bytes of "longbench". The tail's covariances would not leave room for channels.
    "tiny": {"bits": 1, "sink": 8, "recent": 56, "topk": 128, "channels": 21, "centre": 384, "tilt": False, "resident": 0},
    # The paper's settings (appendix tables 5, 6 and 9); -2: two bits, as the authors' RULER and InfiniteBench scripts use.
    "longbench": {"bits": 1, "sink": 8, "recent": 56, "topk": 128, "channels": 8, **PAPER},
    "longbench-2": {"bits": 2, "sink": 8, "recent": 56, "topk": 128, "channels": 8, **PAPER},
    "ruler": {"bits": 1, "sink": 64, "recent": 64, "topk": 896, "channels": 12, **PAPER},
    "ruler-2": {"bits": 2, "sink": 64, "recent": 64, "topk": 896, "channels": 12, **PAPER},
}


@dataclasses.dataclass(frozen=True)
class TailorConfig:
    """TailorKV's settings. Presets fill in what is not given; see `PRESETS`.

    Raises:
        ValueError: a value out of range.
    """

    preset: str = "best"
    bits: int = 2  # of quantised layers' codes: 1, 2, 4 or 8
    group: int = 64  # tokens (keys) or channels (values) that share a scale; also the block in which tokens age
    residual: int = 128  # newest tokens of quantised layers that stay in 16 bits, up to group - 1 more
    sink: int = 8  # first tokens of sparse layers, always attended
    recent: int = 56  # newest tokens of sparse layers, always attended, up to 63 more
    topk: int = 128  # tokens fetched for each KV head and step
    left: float = 0.0  # with aggregation "all": fetch only until less than this share of the approximated attention is left; 0: always topk
    least: int = 64  # with left: fetch no fewer
    channels: int = 28  # critical channels for each KV head
    k_levels: str = "lloyd"  # of quantised keys: "minmax" as in the paper, or "lloyd"
    v_levels: str = "minmax"  # of quantised values
    correct: bool = True  # add the mean error of the coded values back
    centre: int = 1024  # first tokens whose mean value is subtracted before coding; 0: none
    row_bits: int = 4  # of the critical channels' rows: 2, 4, 8 or 16
    token_bits: int = 16  # of sparse layers' K and V once they have left the window: 16, or 8 (rounded; half the host's memory and of what a fetch reads)
    tail: bool = True  # give unfetched attention mass to the mean value
    tilt: bool = True  # with the tail: let that value follow the query
    aggregation: str = "all"  # "authors": average a group's queries with sign; "mean": |q| for channels, softmax for tokens; "all": that over sink and window too
    norm: str = "own"  # of the predicted query's input: the layer "previous" to it, as the authors do, or its "own"
    ahead: bool = True  # fetch tokens ahead of need, chosen by a query predicted in the middle of the previous layer; false: by the true query, and wait
    prefetch: str = "auto"  # how rows come from the host: "thread" gathers them there, "uva" reads them in place from the GPU; auto: uva where it can
    resident: int = 36  # with uva, channel rows for each KV head and layer that stay on the GPU from step to step; head_dim or more: all of them
    static: bool = False  # channels chosen offline, from the plan, instead of at each step
    dense_below: int = -1  # up to this many tokens everything stays in 16 bits and is attended; -1: sink + recent + topk

    @classmethod
    def build(cls, **values) -> "TailorConfig":
        """The preset's settings with `values` over them."""
        preset = values.get("preset", cls.preset)
        if preset not in PRESETS:
            raise ValueError(f"unknown preset {preset!r}; there is {', '.join(PRESETS)}")
        settings = PRESETS[preset] | values
        if settings["resident"]:  # more channels ask for more room, unless that is given
            settings["resident"] = values.get("resident", max(settings["resident"], settings["channels"]))
        return cls(**settings)

    def __post_init__(self):
        for name, lowest, highest in (
            ("bits", 1, 8), ("group", 8, 1024), ("residual", 1, 2**20), ("sink", 0, 2**20), ("recent", 1, 2**20),
            ("topk", 0, 2**20), ("left", 0, 1), ("least", 0, 2**20), ("channels", 1, 1024), ("centre", 0, 2**20), ("resident", 0, 2**20), ("dense_below", -1, 2**31),
        ):  # fmt: skip
            if not lowest <= getattr(self, name) <= highest:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be between {lowest} and {highest}")
        if self.bits not in BITS or self.group % 8:
            raise ValueError(f"bits is {self.bits} and group {self.group}; bits are {', '.join(map(str, BITS))}, and a group a multiple of 8")
        if 0 < self.resident < self.channels:
            raise ValueError(f"resident is {self.resident} and channels {self.channels}; a step's channels must all find a place, so it is 0 or at least that many")
        if self.left and self.aggregation != "all":
            raise ValueError(f"left is {self.left} and aggregation {self.aggregation!r}; a share of all attention is known with aggregation=all")
        levels = ("minmax", "lloyd")
        for name, choices in (("aggregation", ("authors", "mean", "all")), ("norm", ("previous", "own")), ("prefetch", ("auto", "thread", "uva")), ("k_levels", levels), ("v_levels", levels), ("row_bits", (2, 4, 8, 16)), ("token_bits", (8, 16))):
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} is {getattr(self, name)!r}; it is {' or '.join(map(str, choices))}")

    @property
    def dense(self) -> int:
        return self.sink + self.recent + self.topk if self.dense_below < 0 else self.dense_below


def make_layer(options: TailorConfig, pinner: Pinner | None = None, prefetcher: Prefetcher | ZeroCopy | None = None, turn: int = 0) -> QuantLayer | SparseLayer:
    """An empty layer with these settings: sparse if there is a prefetcher, whose `turn`-th layer it is, else quantised."""
    o = options
    if prefetcher is None:
        return QuantLayer(o.bits, o.group, o.residual, (o.k_levels, o.v_levels), o.correct, o.centre)
    return SparseLayer(o.sink, o.recent, o.channels, o.topk, o.aggregation, o.tail, pinner, prefetcher, turn, o.tilt, o.left, o.least, o.ahead, o.token_bits)


class TailorCache(KVCache):
    """TailorKV: densely attending layers as 1-bit codes on the GPU, all others in host memory, fetched row by row.

    Up to `dense_below` tokens an inner `FullCache` holds everything, bit for bit as it would alone. Beyond, each layer is a
    `QuantLayer` or a `SparseLayer`. A prefill call (a prompt, a later turn) gathers one layer's K and V at a time in a
    scratch buffer: what is stored of earlier turns, decoded or streamed back from the host, then the call's own tokens.
    Attention over it is exact. When the layer has seen its tokens, it absorbs them, on CUDA in a side stream while the next
    layer computes in the other scratch buffer.

    Bytes: the sum of what `QuantLayer`, `SparseLayer`, `HostStore` and `Prefetcher` state, plus, during a prefill call over n
    tokens in all, two scratch buffers `2 * B * KV * n * (D + Dv) * itemsize`. They are freed at its end, and what only
    decoding needs (row buffers, fetched tokens) is taken after it.
    """

    Options = TailorConfig

    def __init__(self, config, plan=None, options: TailorConfig | None = None, device: str | torch.device = "cpu", capacity: int = 0):
        """
        Args:
            plan: which layers are quantised: their indices, or an object with `quantised` (indices), perhaps `settings` (a
                dict a layer, which overrides the options' bits, channels and topk there) and, for static channels,
                `channels` (`[KV, C']` per layer, most important first); None: layer 0 alone.
        """
        super().__init__(config, options, device, capacity)
        self.quantised = tuple(sorted(set(getattr(plan, "quantised", (0,) if plan is None else plan))))
        if any(not 0 <= layer < self.num_layers for layer in self.quantised):
            raise ValueError(f"the plan quantises layers {self.quantised}, and the model has layers 0 to {self.num_layers - 1}")
        if self.options.static and getattr(plan, "channels", None) is None:
            raise ValueError("static=true needs a plan with channels; make one with calibrate.py --channels")
        self.settings = [dict(each) for each in getattr(plan, "settings", None) or [{}] * self.num_layers]
        self.predicts_with, self.predicts_from = self.options.norm, "middle" if self.options.ahead else "input"
        self._static = plan.channels if self.options.static else None
        self._cuda = self.pos.device.type == "cuda"
        self._side = torch.cuda.Stream(self.pos.device) if self._cuda else None
        self._sparse = [layer for layer in range(self.num_layers) if layer not in self.quantised]
        self.dense: FullCache | None = self._new_dense()  # there if, and only if, length <= dense_below
        self._start_over()

    def _start_over(self) -> None:
        """Layers as new: empty, without buffers or threads."""
        o, device = self.options, self.pos.device
        self.pinner, self.prefetcher = Pinner(device), self._new_prefetcher()
        self.layers: list[QuantLayer | SparseLayer] = []
        for layer in range(self.num_layers):
            o = dataclasses.replace(self.options, **self.settings[layer])
            if layer in self.quantised:
                self.layers.append(make_layer(o))
            else:
                self.layers.append(make_layer(o, self.pinner, self.prefetcher, self._sparse.index(layer)))
                if self._static is not None:
                    self.layers[layer].static = self._static[layer][:, : o.channels].sort(-1).values.to(device)
        self._like: tuple[Tensor, Tensor] | None = None  # empty K and V, for shape and dtype
        self._scratch: list[tuple[Tensor, Tensor] | None] = [None, None]
        self._ready = [Event(device) for _ in range(2)]  # the side stream is through with a scratch buffer
        self._storing: Job | None = None  # blocks on their way to the host
        self._staging: Tensor | None = None
        self._nothing_due_until = 0  # length up to which decode steps need no work on the host

    def _new_prefetcher(self, zero_copy: bool | None = None) -> Prefetcher | ZeroCopy:
        o, device = self.options, self.pos.device
        if zero_copy is None:
            zero_copy = o.prefetch != "thread" and usable(device) and (self._cuda or o.prefetch == "uva")
        if zero_copy:
            return ZeroCopy(device, o.row_bits, 0 if o.static else o.resident, len(self._sparse), o.ahead, o.token_bits)
        if o.prefetch == "uva":
            raise ValueError(f"prefetch=uva needs a GPU with Triton, and host memory that can be pinned; {device} does not offer it, prefetch=thread works anywhere")
        return Prefetcher(device, o.row_bits)

    def _new_dense(self) -> FullCache:
        dense = FullCache(self.config, device=self.pos.device, capacity=min(self.capacity, self.options.dense))
        dense.pos, self._dense_epoch = self.pos, -1
        return dense

    @property
    def _all_dense(self) -> bool:
        return self.length + self._pending <= self.options.dense

    # -- a call

    def _settle(self) -> None:
        """Free what a call needed until its commit; an interrupt may come between the two, so the next call asks for it again."""
        if self.length > self.options.dense:
            self.dense = None
        self._scratch = [None, None]
        for layer in self.layers:
            if layer.ring is not None:
                layer.ring.commit()

    def _make_room(self, tokens: int) -> None:
        if self._decoding and tokens <= self._nothing_due_until:
            return
        self._nothing_due_until = 0
        self._settle()
        if tokens <= self.options.dense:
            self.dense.begin(self._pending, self._decoding)
            return
        if self.dense is not None and self.length:
            self._leave_dense(tokens)
        if self._like is not None:
            self._reserve(tokens)
            if self._decoding and self.dense is None:
                self._move_on(tokens)
                # Work is due when an edge moves, once in 64 (or `group`) tokens.
                ahead = range(tokens + 1, tokens + 65)
                due = min((next((n for n in ahead if layer.edge(n) > layer.edge(tokens)), tokens + 65) for layer in self._kinds()), default=tokens + 65)
                self._nothing_due_until = min(due - 1, self.capacity)

    def _sparse_layers(self) -> list[SparseLayer]:
        return [self.layers[layer] for layer in self._sparse]

    def _kinds(self):
        """One layer of each kind there is: edges are the same within a kind."""
        return {type(layer): layer for layer in self.layers}.values()

    def _leave_dense(self, tokens: int) -> None:
        """Hand what the inner cache holds over to the layers. It is kept until this call has ended."""
        self.epoch += 1
        k, v = self.dense.k[0], self.dense.v[0]
        self._like = (k[:, :, :0], v[:, :, :0])
        self._reserve(tokens)
        # A decode step finds its block aged already: the window is the one that `tokens` tokens have.
        for layer, k, v in zip(self.layers, self.dense.k, self.dense.v):
            layer.absorb(k[:, :, : self.length], v[:, :, : self.length], 0, self.length)
        if self._decoding:
            self._move_on(tokens)

    def _move_on(self, tokens: int) -> None:
        """What a decode step to `tokens` tokens needs of the host, room being there."""
        sparse = self._sparse_layers()
        if isinstance(self.prefetcher, ZeroCopy) and sparse and self.prefetcher.planes:
            self.prefetcher.settle([layer.store for layer in sparse], sparse[0].begin, sparse[0].edge(self.length))
        self._age(tokens)
        for layer in sparse:
            if layer.by_kernels(tokens):
                layer.settle(tokens)

    def _reserve(self, tokens: int) -> None:
        """Room in all tiers for `tokens` tokens, or for the capacity that was asked for."""
        room, exact = max(tokens, self.capacity), not self._decoding
        if tokens > self.capacity and self._decoding:
            room = self.capacity = tokens + max(256, tokens // 25)
        for layer in self.layers:
            if isinstance(layer, QuantLayer):
                moved = layer.reserve(*self._like, room)
            else:
                # One block ahead in decoding, so that its memory is pinned before it is needed.
                moved = layer.reserve(*self._like, tokens if exact else tokens + BLOCK, exact)
            self.epoch += moved
        self.pinner.touch()
        if self._decoding and self._sparse:
            edge = self.layers[self._sparse[0]].edge(room)
            if edge > self.options.sink:
                sparse = self._sparse_layers()
                channels, topk = min(max(layer.channels for layer in sparse), self._like[0].shape[3]), max(layer.topk for layer in sparse)
                for slab in (slab for layer in sparse for slab in layer.store.slabs):
                    slab.wait()
                if isinstance(self.prefetcher, ZeroCopy) and self.pinner.refused:  # a GPU cannot read pageable memory in place
                    self.prefetcher.close()
                    self.prefetcher = self._new_prefetcher(zero_copy=False)
                    for layer in sparse:
                        layer.prefetcher = self.prefetcher
                self.epoch += self.prefetcher.reserve(*self._like, channels, edge - sparse[0].begin, topk)

    def _age(self, tokens: int) -> None:
        """Move the blocks that a decode step to `tokens` tokens pushes out of tails and windows."""
        for number in self.quantised:
            self.layers[number].age(tokens)
        sparse = self._sparse_layers()
        starts = {layer.leaving(tokens) for layer in sparse}  # the same for all
        if starts <= {None}:
            return
        start = starts.pop()
        skip = max(self.options.sink - start, 0)
        # All layers' blocks at once, since a launch takes longer than the work for one: [layers * B, KV, 64, D].
        k, v = round_tokens(*(torch.cat(x) for x in zip(*(layer.block(start) for layer in sparse))), self.options.token_bits)
        if skip < BLOCK:
            found = statistics(k[:, :, skip:], v[:, :, skip:], self.options.tail, self.options.tail and self.options.tilt)
            parts = [x.chunk(len(sparse)) if x is not None else [None] * len(sparse) for x in found]
            for layer, *mine in zip(sparse, *parts):
                layer.count(*mine)
        if isinstance(self.prefetcher, ZeroCopy):
            self._store_in_place(sparse, start, k, v)
            return
        leaving = [(layer.store, start, *pair) for layer, *pair in zip(sparse, k.chunk(len(sparse)), v.chunk(len(sparse)))]
        if self._cuda:  # through pinned memory: a copy to the host's rows directly would have to wait for each
            shape = (len(leaving), 2, *leaving[0][2].shape[:3], max(leaving[0][2].shape[3], leaving[0][3].shape[3]))
            if self._staging is None or self._staging.shape != shape:
                self._staging = torch.empty(shape, dtype=leaving[0][2].dtype, pin_memory=True)
            for i, (store, start, k, v) in enumerate(leaving):
                held = [self._staging[i, j].flatten()[: x.numel()].view(x.shape) for j, x in enumerate((k, v))]
                held[0].copy_(k, non_blocking=True)
                held[1].copy_(v, non_blocking=True)
                leaving[i] = (store, start, *held)
        arrived = Event(self.pos.device)
        arrived.record()

        def store_blocks():
            arrived.synchronize()
            for store, start, k, v in leaving:
                store.write(start, k, v)

        # Jobs run in order, so what is gathered in the thread later sees these blocks; the main thread waits before it gathers.
        self._storing = self.prefetcher.submit(store_blocks)

    def _store_in_place(self, sparse: list[SparseLayer], start: int, k: Tensor, v: Tensor) -> None:
        """Write blocks to the host, and to the rows that are resident, by kernels in the current stream: nobody waits."""
        n = len(sparse)
        facts = zip(*(x.chunk(n) for x in block_facts(k, v, self.options.row_bits, summarises(k, v))))
        for turn, (layer, keys, values, (*rows, most, total)) in enumerate(zip(sparse, k.chunk(n), v.chunk(n), facts)):
            table = layer.store._table
            self.epoch += layer.store.table(k.device) is not table  # which lists new slabs, and moves when it is full
            layer.store.write_block(start, keys, values, most[:, :, 0], total[:, :, 0], rows)
            self.prefetcher.extend(turn, rows, (start - layer.begin) // BLOCK)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> Tensor:
        start = self._accept(layer, q, k, v)
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        if self._all_dense:
            return self.dense.attend(layer, q, k, v, scale)
        self._fits(k, v)
        if self._like is None:
            self._like = (k[:, :, :0].clone(), v[:, :, :0].clone())
            self._reserve(self.length + self._pending)
        if not self._decoding:
            return self._prefill(layer, q, k, v, scale, start)
        if isinstance(self.layers[layer], QuantLayer):
            return self.layers[layer].attend(q, k, v, scale, start + 1, self.pos)
        self._stored()
        return self.layers[layer].attend(layer, q, k, v, scale, start + 1, self.pos)

    def rotate_attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        entry, length = self.layers[layer], self.length + 1
        if self._watched(TailorCache.attend) or self._all_dense or self._like is None or not entry.by_kernels(length):
            return super().rotate_attend(layer, q, k, v, cos, sin)
        self._accept(layer, q, k, v)
        self._fits(k, v)
        q = rotate_append(q, k, v, cos, sin, entry.ring.k, entry.ring.v, self.pos, entry.ring.size)
        if isinstance(entry, QuantLayer):
            return entry.attend_by_kernels(q, self.pos, q.shape[3] ** -0.5)
        self._stored()
        return entry.attend_by_kernels(layer, q, None, None, q.shape[3] ** -0.5, length, self.pos)

    def _stored(self) -> None:
        """Blocks on their way to the host, and nobody gathers from it before."""
        if self._storing is not None:
            self._storing.result()
            self._storing = None

    def _fits(self, k: Tensor, v: Tensor) -> None:
        if self._like is None:
            return
        for new, held in zip((k, v), self._like):
            if new.shape[:2] != held.shape[:2] or new.shape[3] != held.shape[3] or new.dtype != held.dtype:
                if self.length:
                    raise ValueError(f"the cache holds {self.length} tokens of {list(held.shape)} {held.dtype} and was given {list(new.shape)} {new.dtype}; reset() it first")
                pending, decoding, seen = self._pending, self._decoding, self._seen
                self.close()
                self._pending, self._decoding, self._seen = pending, decoding, seen
                return

    def _prefill(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, start: int) -> Tensor:
        slot, total = layer % 2, self.length + self._pending
        if start == self.length:
            if layer == 0:
                self._quiet()
            self._open(layer, total)
        K, V = self._scratch[slot]
        stop = start + k.shape[2]
        K[:, :, start:stop] = k
        V[:, :, start:stop] = v
        o = causal_attention(q, K[:, :, :stop], V[:, :, :stop], scale)
        if stop == total:
            computed = Event(self.pos.device)
            computed.record()
            with self._on_side():
                computed.wait()
                self.layers[layer].absorb(K, V, self.length, total)
                self._ready[slot].record(self._side)
        return o

    def _on_side(self):
        return torch.cuda.stream(self._side) if self._cuda else contextlib.nullcontext()

    def _open(self, layer: int, total: int) -> None:
        """Have this layer's scratch buffer ready, with earlier turns' K and V in it, and the next layer's on the way."""
        if layer == 0 or self._scratch[layer % 2] is None:
            self._bring(layer, total)
        self._ready[layer % 2].wait()
        if layer + 1 < self.num_layers and (self.length or self._scratch[(layer + 1) % 2] is None):
            self._bring(layer + 1, total)

    def _bring(self, layer: int, total: int) -> None:
        slot = layer % 2
        if self._scratch[slot] is None:
            self._scratch[slot] = tuple(x.new_empty(*x.shape[:2], total, x.shape[3]) for x in self._like)
            allocated = Event(self.pos.device)
            allocated.record()
            with self._on_side():
                allocated.wait()  # the memory may still be read by what held it before, in the main stream
        if self.length:
            # The side stream has absorbed this buffer's last layer before: what is queued there is in order.
            with self._on_side():
                if self.dense is None:
                    self.layers[layer].history(*self._scratch[slot], self.length)
                else:  # the call that outgrows the inner cache
                    for scratch, held in zip(self._scratch[slot], (self.dense.k[layer], self.dense.v[layer])):
                        scratch[:, :, : self.length] = held[:, :, : self.length]
                self._ready[slot].record(self._side)

    def capturable(self) -> bool:
        if self._all_dense:
            self.epoch += self.dense.epoch - self._dense_epoch  # it grows on its own
            self._dense_epoch = self.dense.epoch
            return self.dense.capturable()
        if not self._cuda or self.dense is not None or self._like is None or self._watched(TailorCache.attend):
            return False
        return isinstance(self.prefetcher, ZeroCopy) and all(layer.by_kernels(self.length + 1) for layer in self._kinds())

    def replayed(self) -> None:
        super().replayed()
        if self._all_dense:
            self.dense.replayed()

    def end(self) -> None:
        if self._all_dense:
            self.dense.end()
        elif not self._decoding and self._cuda:
            torch.cuda.current_stream().wait_stream(self._side)
        super().end()
        self._settle()

    # -- prediction

    def wants(self, layer: int) -> bool:
        if layer == 0 or layer in self.quantised:
            return False
        resident = self._like is not None and self.options.resident >= self._like[0].shape[3]  # all rows are there: without `ahead` the true query chooses
        return self.options.ahead or (self._static is None and not resident)

    def foresee(self, layer: int, q: Tensor, scale: float | None = None) -> None:
        if not self._all_dense and self._like is not None and self.layers[layer].ring is not None:
            self.layers[layer].foresee(layer, q, self.length + 1, self.pos, q.shape[-1] ** -0.5 if scale is None else scale)

    # -- between calls

    def _quiet(self) -> None:
        """Wait for everything under way; what steps on the device did is then known here, and what follows is no step."""
        self._nothing_due_until = 0
        for layer in self.layers:
            if layer.ring is not None:
                layer.ring.catch_up(self.length + (self._pending if self._decoding else 0))
        if isinstance(self.prefetcher, ZeroCopy):
            self.prefetcher.stale = True
        self.prefetcher.wait_all()
        if self._storing is not None:
            self._storing.exception()
            self._storing = None
        if self._cuda:
            self._side.synchronize()

    def _roll_back(self) -> None:
        self._quiet()
        self._scratch = [None, None]
        if self.dense is not None and self.length <= self.options.dense:
            self.dense.crop(self.length)  # it may have committed what this cache did not
            self._drop_layers()  # they hold nothing but what they were given on the way out of it, or in
            return
        self.prefetcher.close()  # a job may be at work, or a buffer half made, that nobody knows of
        for layer in self.layers:
            layer.roll_back(self.length)

    def _drop_layers(self) -> None:
        self._release()
        self._start_over()

    def _forget(self, n: int) -> None:
        self._settle()
        self._quiet()
        if self.dense is not None:
            self.length = n  # first: the inner cache can follow later, but not go back
            self.dense.crop(n)
            return
        if self.length == n:
            return
        for layer in self.layers:
            layer.ring.save(self.length)
            layer.crop(self.length, n)
        if n <= self.options.dense:
            dense = self._new_dense()
            if n:
                dense.begin(n)
                dense._seen = [n] * self.num_layers
                for number, layer in enumerate(self.layers):
                    k, v = (x.new_empty(*x.shape[:2], n, x.shape[3]) for x in self._like)
                    layer.history(k, v, n)
                    dense._allocate(number, k, v)
                    dense.k[number][:, :, :n], dense.v[number][:, :, :n] = k, v
                dense.end()
            self.dense, self.length = dense, n  # at once, as in end()
            self._drop_layers()
        self.length = n
        self._settle()

    def reset(self) -> None:
        self.close()

    def _release(self) -> None:
        self.prefetcher.close()
        for layer in self.layers:
            if isinstance(layer, SparseLayer):
                layer.store.close()
        self.pinner.close()

    def close(self) -> None:
        self._quiet()
        self._pending = 1  # as in crop
        self.dense, self.length = self._new_dense(), 0
        self._drop_layers()
        self.pos.zero_()
        self.epoch += 1
        self._pending = 0

    @classmethod
    def estimate(cls, config, options, tokens: int, itemsize: int, batch: int = 1) -> dict[str, int]:
        """With one quantised layer, the usual case; the prefill's scratch buffers are in it, since they are the peak."""
        if tokens <= options.dense:
            return FullCache.estimate(config, None, tokens, itemsize, batch)
        shape = (config.num_key_value_heads, config.head_dim, tokens, itemsize)
        quantised, sparse, bare = (layer_account(each, coded, *shape) for each, coded in ((options, True), (options, False), (dataclasses.replace(options, resident=0), False)))
        n = config.num_hidden_layers - 1
        decode = n * (sparse["gpu"] - bare["gpu"]) + sparse["rows"] + sparse["fetched"]
        prefill = 2 * 2 * config.num_key_value_heads * config.head_dim * tokens * itemsize
        return {"gpu": batch * (quantised["gpu"] + n * bare["gpu"] + max(decode, prefill)), "host": batch * n * sparse["host"]}

    # -- on disk

    def _about(self) -> dict:
        return {"quantised": list(self.quantised), "settings": self.settings if any(self.settings) else None}

    def _tensors(self) -> dict[str, Tensor]:
        self._settle()
        tensors = {f"{number}.static": channels for number, channels in enumerate(self._static or ())}
        if self.dense is not None:
            return tensors | {f"dense.{name}": tensor for name, tensor in self.dense._tensors().items()}
        self._quiet()
        for number, layer in enumerate(self.layers):
            tensors |= {f"{number}.{name}": tensor for name, tensor in layer.tensors(self.length).items()}
        return tensors

    def _restore(self, tensors: dict[str, Tensor], length: int) -> None:
        held = {name.removeprefix("dense."): tensor for name, tensor in tensors.items() if name.startswith("dense.")}
        self.close()
        self._pending = 1  # as in crop; load ends it
        if held or length == 0:
            self.dense._restore(held, length)
            self.dense.length = length
            return
        self._like = tuple(tensors[f"0.tail.{name}"][:, :, :0].to(self.pos.device) for name in "kv")
        self._reserve(length)
        for number, layer in enumerate(self.layers):
            layer.restore({name.partition(".")[2]: tensor for name, tensor in tensors.items() if name.startswith(f"{number}.")}, length)
        self.dense, self.length = None, length

    def nbytes(self) -> dict[str, dict[str, int]]:
        parts: dict[str, dict[str, int]] = {"gpu": {"pos": self.pos.nbytes}, "host": {}}
        held = [self.prefetcher.nbytes()]
        for layer in self.layers:
            held.append({"gpu": layer.nbytes()} if isinstance(layer, QuantLayer) else layer.nbytes())
        if self.dense is not None:
            held.append({"gpu": {"16-bit tokens": self.dense.nbytes()["gpu"]["k"] + self.dense.nbytes()["gpu"]["v"]}})
        held.append({"gpu": {"prefill scratch": sum(x.nbytes for pair in self._scratch if pair for x in pair)}})
        held.append({"host": {"staging": self._staging.nbytes if self._staging is not None else 0}})
        for entry in held:
            for tier, sizes in entry.items():
                for name, size in sizes.items():
                    if size:
                        parts[tier][name] = parts[tier].get(name, 0) + size
        return parts


def layer_account(options: TailorConfig, quantised: bool, kv_heads: int, head_dim: int, tokens: int, itemsize: int = 2) -> dict[str, int]:
    """Bytes of one layer at `tokens` tokens, batch 1, as `QuantLayer`, `SparseLayer` and `HostStore` state them at a capacity of exactly so many.

    "gpu" and "host" are held, "pcie" is sent to the GPU for each decoded token. What only the kernels hold is not in it: scores, tables of
    channels and slots, the covariances in float32; 25 MiB for Llama-3.1-8B at 131,072 tokens. "rows" and "fetched" are what a sparse layer needs of
    the buffers that sparse layers share.
    """
    o, D, g = options, head_dim, options.group
    if quantised:
        blocks = -(-tokens // g)
        codes = blocks * (D * -(-g * o.bits // 8) + g * -(-D * o.bits // 8))
        ranges = blocks * (2 * D + 2 * g * -(-D // g)) * 2
        means = (blocks * o.correct + 2) * D * 4 if o.correct or o.centre else 0
        ring = (max(o.residual + QuantLayer.SLACK, o.centre) + g) * 2 * D * itemsize
        return {"gpu": kv_heads * (codes + ranges + means + ring), "pcie": 0, "host": 0, "rows": 0, "fetched": 0}
    edge = max(0, tokens - o.recent) // BLOCK * BLOCK
    held = (o.sink + -(-o.recent // BLOCK) * BLOCK + BLOCK) * 2 * D * itemsize + D * itemsize
    held += o.tail * D * 8 + (o.tail and o.tilt) * (D + 1) ** 2 * 8
    block = BLOCK * itemsize if o.row_bits == 16 else BLOCK * o.row_bits // 8 + 4  # bytes of a channel's row
    blocks = max(0, edge // BLOCK - o.sink // BLOCK)
    sent, row = blocks * block, whole_chunks(blocks) * block
    rows, shared = (0 if o.resident >= D else min(o.channels, D) * sent), 2 * min(o.channels, D) * row
    if o.resident:  # at most so many bytes are sent: those of channels that are not there
        held, shared = held + min(o.resident, D) * row, 0
    token = token_row(D, D, o.token_bits, torch.uint8)[1] * (itemsize if o.token_bits == 16 else 1)
    stored = edge * token + edge // BLOCK * D * (block + itemsize + 4)  # K and V; rows, maxima, sums of V
    found = {"gpu": held, "pcie": rows + min(o.topk, edge) * token, "host": stored, "rows": shared, "fetched": o.topk * 2 * D * itemsize}
    return {name: kv_heads * size for name, size in found.items()}


def account(options: TailorConfig, layers: int, kv_heads: int, head_dim: int, tokens: int, plan=None, itemsize: int = 2) -> dict[str, int]:
    """Bytes of a `TailorCache` that decodes at `tokens` tokens, batch 1: "gpu" and "host" held, "pcie" sent to the GPU for a token.

    `plan` as there; layer 0 is quantised without one.
    """
    quantised, settings = getattr(plan, "quantised", (0,)), getattr(plan, "settings", None) or [{}] * layers
    parts = [
        layer_account(dataclasses.replace(options, **each), layer in quantised, kv_heads, head_dim, tokens, itemsize) for layer, each in enumerate(settings)
    ]
    found = {name: sum(part[name] for part in parts) for name in ("gpu", "pcie", "host")}
    return found | {"gpu": found["gpu"] + sum(max(part[name] for part in parts) for name in ("rows", "fetched"))}


# ------------------------------------------------------------------------------------------------------ specs by name

CACHES: dict[str, type[KVCache]] = {"full": FullCache, "tailor": TailorCache}


def parse_spec(spec: str) -> tuple[type[KVCache], KVCache.Options]:
    """Read a cache spec, `NAME` or `NAME:field=value,field=value`.

    Raises:
        ValueError: an unknown name or field, or a value of the wrong type; the message lists what there is.
    """
    name, _, rest = spec.partition(":")
    if name not in CACHES:
        raise ValueError(f"unknown cache {name!r}; there is {', '.join(CACHES)} (--cache list prints their fields)")
    cls = CACHES[name]
    known = {entry.name: entry for entry in dataclasses.fields(cls.Options)}
    values = {}
    for item in filter(None, rest.split(",")):
        key, equals, text = item.partition("=")
        if key not in known or not equals:
            raise ValueError(f"cache {name!r} does not understand {item!r}; its fields are {', '.join(known) or 'none'}, set as field=value")
        kind = type(known[key].default)
        try:
            values[key] = {"true": True, "false": False}[text.lower()] if kind is bool else kind(text)
        except (ValueError, KeyError):
            raise ValueError(f"cache {name!r}: {key}={text!r} is not a {kind.__name__} (default {known[key].default})") from None
    return cls, cls.Options.build(**values)


def make_cache(spec: str, config, device: str | torch.device = "cpu", capacity: int = 0, plan=None) -> KVCache:
    """The cache that `spec` describes, for a model's `config`, empty. See `parse_spec` for the form and errors.

    `plan` says which layers a `TailorCache` quantises; see there.
    """
    cls, options = parse_spec(spec)
    if cls is TailorCache:
        return cls(config, plan, options, device, capacity)
    return cls(config, options, device, capacity)


def _discard(folder: Path) -> None:
    """Remove a folder of files, or what is left of it. Not by shutil, which closes a file twice if an interrupt comes right after the first time."""
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            os.unlink(folder / name)
        os.rmdir(folder)


def _read_saved(path: str | Path) -> tuple[dict, dict[str, Tensor]]:
    """What `KVCache.save` wrote: the facts, and all tensors, memory-mapped. Raises ValueError for anything else."""
    try:
        with safe_open(path, framework="pt") as file:
            about = json.loads((file.metadata() or {}).get("about", "{}"))
            stored = {name: file.get_tensor(name) for name in file.keys()}
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} cannot be read as a saved cache: {error}") from None
    except ValueError:
        about = None
    if not isinstance(about, dict):
        raise ValueError(f"{path} cannot be read as a saved cache: its metadata is damaged")
    if about.get("cache") == "TailorCache" and isinstance(about.get("options"), dict):
        about["options"] = {"ahead": False, "token_bits": 16, **about["options"]}  # files from before there was a choice
    return about, stored


def load_cache(path: str | Path, config, device: str | torch.device = "cpu", capacity: int = 0) -> tuple[KVCache, dict[str, Tensor], dict]:
    """The cache that `KVCache.save` wrote, made and filled as the file says, with what the caller stored: `(cache, extra, meta)`.

    Raises:
        ValueError: not such a file, damaged, of another version, or of a model with another number of layers.
    """
    about, stored = _read_saved(path)
    cls = next((cls for cls in CACHES.values() if cls.__name__ == about.get("cache")), None)
    if about.get("format") != FORMAT or cls is None:
        raise ValueError(f"{path} has format {about.get('format')!r} and cache {about.get('cache')!r}, and this program reads {FORMAT}")
    if about["layers"] != config.num_hidden_layers:
        raise ValueError(f"{path} was saved from a model of {about['layers']} layers, and this one has {config.num_hidden_layers}")
    options = cls.Options(**about["options"])
    if cls is TailorCache:
        static = [stored[name] for layer in range(about["layers"]) if (name := f"cache.{layer}.static") in stored]
        cache = cls(config, SimpleNamespace(quantised=about["quantised"], settings=about.get("settings"), channels=static or None), options, device, capacity)
    else:
        cache = cls(config, options, device, capacity)
    return cache, *cache.load(path)


def describe_caches() -> str:
    """What `--cache list` prints: a line a cache, then its fields with their defaults, and TailorKV's presets."""
    lines = []
    for name, cls in CACHES.items():
        lines.append(f"{name:10} {(cls.__doc__ or '').splitlines()[0]}")
        lines += [f"    {field}={value}" for field, value in dataclasses.asdict(cls.Options.build()).items()]
    for name, values in PRESETS.items():
        lines.append(f"    preset={name}: " + ", ".join(f"{field}={value}" for field, value in values.items()))
    return "\n".join(lines)
