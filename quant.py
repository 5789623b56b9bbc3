# SPDX-License-Identifier: Apache-2.0
"""Quantisation-friendly layers: K and V as 1-, 2-, 4- or 8-bit codes on the GPU (TailorKV, section 4.1; KIVI, 2402.02750).

A layer that attends densely averages over thousands of tokens, so coarse codes do it little harm, while leaving tokens out does.

* Keys are grouped per channel, `group` tokens at a time, because key outliers live in channels.
* Values are grouped per token, `group` channels at a time (the last group of a head may be narrower): they have no outliers.
* Tokens age in blocks of `group`: a block is coded once all of it is older than the newest `residual` tokens, so
  `residual` to `residual + group - 1` tokens stay in 16 bits. Codes depend on positions alone, not on how tokens were
  split over calls.

Three things are better than the paper at the same code bytes, and off in its presets. A dense layer averages over so many
tokens that random errors cancel; what stays is *bias*, and all three attack it.

* `lloyd` levels: instead of the group's minimum and maximum, the levels that fit it best; at 1 bit, the means of its
  upper and lower half.
* `correct`: the mean over coded tokens of (V - decoded V), one vector a KV head, is added to the decoded values.
* `centre`: the mean of V over the first `centre` tokens is subtracted before coding and added back after. Blocks are coded
  only once those tokens are there, so that codes stay a function of positions.

Shapes: `B` batch, `N` tokens, `KV` key/value heads, `G` query heads a KV head, `D` head_dim.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

import kernels

BITS = (1, 2, 4, 8)
SHARED = 32  # elements that share an exponent in `encode_shared`


# ------------------------------------------------------------------------------------------------------------- codes


def pack(codes: Tensor, bits: int) -> Tensor:
    """uint8 codes `[..., n]` below 2^bits to bytes `[..., ceil(n * bits / 8)]`; code i starts at bit i * bits, lowest first."""
    each = 8 // bits
    codes = F.pad(codes, (0, -codes.shape[-1] % each)).unflatten(-1, (-1, each))
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=codes.device)
    return (codes << shifts).sum(-1, dtype=torch.uint8)


def unpack(packed: Tensor, bits: int, n: int) -> Tensor:
    """The inverse of `pack`: bytes to uint8 codes `[..., n]`."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device)
    return ((packed.unsqueeze(-1) >> shifts) & (2**bits - 1)).flatten(-2)[..., :n]


def tree_sum(x: Tensor, dim: int = -1) -> Tensor:
    """Sum over `dim` by adding its halves until one element is left: the same bits on every device and in every kernel.

    `sum` adds in an order of its own on each, and a mean that differs in its last bit puts an element on the other side.
    """
    x = x.movedim(dim, -1)
    x = F.pad(x, (0, (1 << (x.shape[-1] - 1).bit_length()) - x.shape[-1]))
    while x.shape[-1] > 1:
        half = x.shape[-1] // 2
        x = x[..., :half] + x[..., half:]
    return x.squeeze(-1)


def quantise(x: Tensor, bits: int, group: int, levels: str = "minmax") -> tuple[Tensor, Tensor, Tensor]:
    """Codes along the last dimension, groups of `group`, the last one as wide as what is left.

    Args:
        x: `[..., n]`, any float dtype; the range is taken in float32.
        levels: "minmax": evenly from the group's minimum to its maximum (TailorKV eq. 6-7). "lloyd": of least squared error,
            see `_fit`; at 1 bit the codes say on which side of the group's mean an element lies, and the levels are the
            means of the two sides, so that the group keeps its mean.

    Returns:
        `(codes [..., n] uint8, scale, zero)`, the last two `[..., ceil(n / group)]` float16. Codes are computed against scale
        and zero as stored, so that decoding is as exact as the storage allows. A constant group has scale 0 and code 0 and
        comes back as its float16 value.
    """
    n = x.shape[-1]
    x = x.float()
    # Repeating the last element fills the last group without moving its minimum or maximum.
    filled = torch.cat((x, x[..., -1:].expand(*x.shape[:-1], -n % group)), -1).unflatten(-1, (-1, group))
    low, high = filled.amin(-1), filled.amax(-1)
    steps = torch.full_like(low, 2**bits - 1)  # by a Python number CUDA multiplies with the rounded reciprocal
    zero, scale, mean = low, (high - low) / steps, None
    if levels == "lloyd":
        real = (torch.arange(filled.shape[-2] * group, device=x.device) < n).view(-1, group)
        mean = tree_sum(filled * real) / real.sum(-1)
        zero, scale = _fit(filled, real, mean, zero, scale, bits)
    zero, scale = zero.half(), scale.half()
    codes = _assign(filled, mean, zero.float(), scale.float(), bits)
    return codes.to(torch.uint8).flatten(-2)[..., :n], scale, zero


def _assign(x: Tensor, mean: Tensor | None, zero: Tensor, scale: Tensor, bits: int) -> Tensor:
    """Codes of `x [..., group]`, as float: the nearest level, or, given the mean, at 1 bit the side of it. mean, zero, scale `[...]`."""
    z, s = zero.unsqueeze(-1), scale.unsqueeze(-1)
    if mean is not None and bits == 1:
        codes = (x > mean.unsqueeze(-1)).float()
    else:
        codes = ((x - z) / torch.where(s == 0, 1.0, s) + 0.5).floor().clamp(0, 2**bits - 1)
    return torch.where(s == 0, 0.0, codes)


def _fit(x: Tensor, real: Tensor, mean: Tensor, zero: Tensor, scale: Tensor, bits: int, rounds: int = 4) -> tuple[Tensor, Tensor]:
    """Evenly spaced levels `zero + scale * code` for `x [..., group]`: assign codes, fit the levels to them, repeat (Lloyd, 1982).

    `real [groups, group]` marks the elements that count; mean, zero (the minimum) and scale `[...]` are where it starts.
    """
    low, count = zero, real.sum(-1)
    for _ in range(1 if bits == 1 else rounds):
        codes = _assign(x, mean, zero, scale, bits)
        average = (codes * real).sum(-1) / count
        centred = (codes - average.unsqueeze(-1)) * real
        spread = tree_sum(centred * centred)
        flat = spread == 0  # a constant group has one level, itself
        scale = torch.where(flat, 0.0, tree_sum(centred * x) / torch.where(flat, 1.0, spread))
        zero = torch.where(flat, low, mean - scale * average)
    return zero, scale


def dequantise(codes: Tensor, scale: Tensor, zero: Tensor, group: int) -> Tensor:
    """`zero + scale * code` in float32: codes `[..., n]`, scale and zero `[..., ceil(n / group)]`."""
    n = codes.shape[-1]
    padded = F.pad(codes, (0, -n % group)).unflatten(-1, (-1, group)).float()
    return torch.addcmul(zero.float().unsqueeze(-1), padded, scale.float().unsqueeze(-1)).flatten(-2)[..., :n]


def shared_range(dtype: torch.dtype) -> tuple[int, int]:
    """Exponents of `encode_shared` with which every decoded number is exact in this dtype."""
    return (-24, 9) if dtype == torch.float16 else (-120, 121)


def encode_shared(x: Tensor) -> tuple[Tensor, Tensor]:
    """8-bit integers whose power of two is shared by `SHARED` elements: what the Microscaling Formats of OCP (1.0, 2023) call MXINT8.

    Decoded, they are numbers of 7 bits, which bfloat16 and float16 hold exactly. So rounding to this format happens once: what has been
    decoded is encoded to the same bytes again. Beyond 65,024 float16 has no such number: larger ones become that.

    Args:
        x: `[..., n]`, any float dtype.

    Returns:
        `(codes [..., n] int8, exponents [..., ceil(n / 32)] int8)`. Exponent 127 marks a block with a number that is not finite; all of it decodes to NaN.
    """
    n = x.shape[-1]
    blocks = F.pad(x.float(), (0, -n % SHARED)).unflatten(-1, (-1, SHARED))
    most = (blocks.view(torch.int32) & 0x7FFFFFFF).amax(-1).clamp(max=0x7F800000)  # as integers magnitudes keep their order, and NaN is the largest
    finite = most < 0x7F800000
    # The least exponent with which the largest element rounds to at most 127: elements below 127.5 do, and 2^6 * 1.9921875 is that.
    exponent = (((most + 0x10000) >> 23) - 133).clamp(*shared_range(x.dtype))
    codes = (blocks * _power_of_two(-exponent).unsqueeze(-1)).round().clamp(-127, 127)
    codes = torch.where(finite.unsqueeze(-1), codes, 0.0).to(torch.int8)
    return codes.flatten(-2)[..., :n], torch.where(finite, exponent, 127).to(torch.int8)


def decode_shared(codes: Tensor, exponents: Tensor, dtype: torch.dtype) -> Tensor:
    """The inverse of `encode_shared`: `[..., n]`."""
    n = codes.shape[-1]
    step = torch.where(exponents == 127, float("nan"), _power_of_two(exponents.int()))
    return (F.pad(codes, (0, -n % SHARED)).unflatten(-1, (-1, SHARED)) * step.unsqueeze(-1)).flatten(-2)[..., :n].to(dtype)


def token_row(D: int, Dv: int, bits: int, dtype: torch.dtype) -> tuple[torch.dtype, int]:
    """How a token's K and V are stored, side by side: the dtype, and how many elements a row has.

    At 16 bits as they are. At 8 the codes of both, then the exponents of both (`encode_shared`), filled up to a multiple of 8 bytes.
    """
    return (dtype, D + Dv) if bits == 16 else (torch.int8, -(-(D + Dv + -(-D // SHARED) + -(-Dv // SHARED)) // 8) * 8)


def _power_of_two(exponent: Tensor) -> Tensor:
    """2^exponent in float32, -126 to 127, int32: exact, as a power need not be."""
    return ((exponent.clamp(max=121) + 127) << 23).view(torch.float32)


def decode_blocks(codes: list[Tensor], ranges: list[Tensor], first: int, last: int, bits: int, group: int, width: int) -> tuple[Tensor, Tensor]:
    """Blocks first .. last - 1 of a `QuantLayer` as float32 K and V, `[B, KV, n * group, D]` and `[B, KV, n * group, width]`."""
    blocks = slice(first, last)
    scale, zero = ranges[0][:, :, blocks].unbind(3)  # [B, KV, n, D]
    k = dequantise(unpack(codes[0][:, :, blocks], bits, group), scale.unsqueeze(-1), zero.unsqueeze(-1), group)
    scale, zero = ranges[1][:, :, blocks].unbind(3)  # [B, KV, n, group, W]
    v = dequantise(unpack(codes[1][:, :, blocks], bits, width), scale, zero, group)
    return k.transpose(3, 4).flatten(2, 3), v.flatten(2, 3)


# ------------------------------------------------------------------------------------------------- the 16-bit tail


class Ring:
    """The newest tokens of one layer in 16 bits: position p lives in slot p % size.

    GPU bytes: `B * KV * size * (D + Dv) * itemsize`.
    """

    def __init__(self, k: Tensor, v: Tensor, size: int):
        """`k`, `v`: any `[B, KV, T, D]` of the layer, for shape, dtype and device."""
        self.size = size
        self.k = k.new_zeros(*k.shape[:2], size, k.shape[3])
        self.v = v.new_zeros(*v.shape[:2], size, v.shape[3])
        self.start = 0  # the oldest position whose slot has not been overwritten
        self.companions: list[Tensor] = []  # that `save` and `roll_back` keep with it
        self._saved: tuple | None = None

    def slots(self, start: int, stop: int) -> Tensor:
        """Slots of positions start .. stop - 1, int64."""
        return torch.arange(start, stop, device=self.k.device) % self.size

    def read(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """K and V of the positions start .. stop - 1, in order, as copies."""
        slots = self.slots(start, stop)
        return self.k.index_select(2, slots), self.v.index_select(2, slots)

    def write(self, start: int, k: Tensor, v: Tensor) -> None:
        """Store `[B, KV, T, D]` at positions start .. start + T - 1; of more tokens than slots only the newest."""
        stop = start + k.shape[2]
        first = max(start, stop - self.size)
        slots = self.slots(first, stop)
        self.start = max(self.start, stop - self.size)  # first: an interrupt may come between the two copies
        self.k.index_copy_(2, slots, k[:, :, first - start :])
        self.v.index_copy_(2, slots, v[:, :, first - start :])

    def catch_up(self, length: int) -> None:
        """Kernels may have written positions below `length` without a word to the host."""
        self.start = max(self.start, length - self.size)

    def save(self, length: int) -> None:
        """Remember the content as it is at `length` tokens, before a call that may not end overwrites it."""
        self._saved = (length, self.start, [x.clone() for x in (self.k, self.v, *self.companions)])

    def roll_back(self, length: int) -> None:
        """Restore what `save(length)` remembered, if it did."""
        if self._saved is not None and self._saved[0] == length:
            _, self.start, saved = self._saved
            for held, was in zip((self.k, self.v, *self.companions), saved):
                held.copy_(was)

    def commit(self) -> None:
        self._saved = None


# -------------------------------------------------------------------------------------------------------- the layer


class QuantLayer:
    """One quantisation-friendly layer. Positions below `edge(length)` are codes, the rest is in the ring.

    GPU bytes, with P = `capacity // group` blocks held and W = `ceil(Dv / group)` value groups a token:
    codes `B * KV * P * group * (D + Dv) * bits / 8` (each head's row rounded up to a byte), ranges
    `B * KV * P * (D + group * W) * 2 * 2`, ring as there, and, with `correct` or `centre`, float32 sums and their result
    `B * KV * (P + 2) * Dv * 4`. The ring is longer than the 16-bit tail by one block, so that an interrupted decode step can
    be undone, and by `SLACK` tokens, so that cropping up to `SLACK` tokens is exact: farther back, tail tokens that exist
    only as codes are taken from them. It holds at least `centre` tokens and a block.
    """

    SLACK = 256
    CHUNK = 64  # blocks decoded at a time: bounds the working set of a step

    def __init__(self, bits: int, group: int, residual: int, levels: tuple[str, str] = ("minmax", "minmax"), correct: bool = False, centre: int = 0):
        """`levels`: of keys and of values. `centre`: tokens whose mean value is subtracted before coding; 0: none."""
        if bits not in BITS:
            raise ValueError(f"bits is {bits}; codes have {', '.join(map(str, BITS))} bits")
        self.bits, self.group, self.residual, self.levels, self.correct, self.centre = bits, group, residual, levels, correct, centre
        self.ring: Ring | None = None
        self.capacity = 0  # tokens

    def edge(self, length: int) -> int:
        """Tokens held as codes when `length` are stored: none before a step that finds the first `centre` tokens there."""
        return max(0, length - self.residual) // self.group * self.group if length > self.centre else 0

    # -- storage

    def reserve(self, k: Tensor, v: Tensor, tokens: int) -> bool:
        """Make room for `tokens` tokens like k and v `[B, KV, *, D]`; True if a buffer moved."""
        moved = self.ring is None
        if moved:
            ring = Ring(k, v, max(self.residual + self.SLACK, self.centre) + self.group)
            self.codes, self.ranges = [None, None], [None, None]  # for K and V
            self.sums: Tensor | None = None  # [B, KV, P, Dv]: of V - decoded V, a block
            if self.correct or self.centre:
                self.mean = v.new_zeros(*v.shape[:2], 1, v.shape[3], dtype=torch.float32)  # that was subtracted
                self.shift = torch.zeros_like(self.mean)  # that decoded values lack
            self.ring = ring  # last: who sees it finds the others too, whenever an interrupt came
        blocks = -(-tokens // self.group)
        if blocks * self.group > self.capacity:
            head, g, D, Dv = k.shape[:2], self.group, k.shape[3], v.shape[3]
            shapes = [(D, -(-g * self.bits // 8)), (g, -(-Dv * self.bits // 8))], [(2, D), (2, g, -(-Dv // g))]
            for held, dtype, rows in ((self.codes, torch.uint8, shapes[0]), (self.ranges, torch.float16, shapes[1])):
                for i, row in enumerate(rows):
                    grown = torch.zeros(*head, blocks, *row, dtype=dtype, device=k.device)
                    if held[i] is not None:
                        grown[:, :, : held[i].shape[2]] = held[i]
                    held[i] = grown
            if self.correct:
                grown = torch.zeros(*head, blocks, Dv, dtype=torch.float32, device=k.device)
                if self.sums is not None:
                    grown[:, :, : self.sums.shape[2]] = self.sums
                self.sums = grown
            self.capacity, moved = blocks * g, True
        return moved

    def _encode(self, first: int, k: Tensor, v: Tensor) -> None:
        """Code the block-aligned k, v `[B, KV, n * group, D]` into blocks first .. first + n - 1."""
        common = (first, self.bits, self.group)
        kernels.quant_encode(k, True, self.codes[0], self.ranges[0], *common, self.levels[0])
        mean, sums = self.mean if self.centre else None, self.sums if self.correct else None
        kernels.quant_encode(v, False, self.codes[1], self.ranges[1], *common, self.levels[1], mean, sums)

    def _advance(self, old: int, new: int, k: Tensor, v: Tensor, head: Tensor | None) -> None:
        """Code positions old .. new - 1, both edges, given as `k, v [B, KV, new - old, D]`; `head`: V's first `centre` tokens, at least."""
        if new > old:
            if self.centre and old == 0:
                self.mean.copy_(head[:, :, : self.centre].contiguous().float().mean(2, keepdim=True))
            self._encode(old // self.group, k, v)
            self._refresh(new)

    def _refresh(self, edge: int) -> None:
        """What decoded values lack when positions below `edge` are codes: the subtracted mean, and the mean error of coding."""
        if self.centre:
            self.shift.copy_(self.mean)
        if self.correct:
            error = self.sums[:, :, : edge // self.group].sum(2, keepdim=True) / max(edge, 1)
            self.shift.copy_(self.mean + error)

    def _decode(self, first: int, last: int) -> tuple[Tensor, Tensor]:
        """Blocks first .. last - 1 as float32 K and V `[B, KV, n * group, D]`.

        V has the shift added: the weights of an attention sum to 1, so each output gets it once for the mass of its coded part.
        """
        k, v = decode_blocks(self.codes, self.ranges, first, last, self.bits, self.group, self.ring.v.shape[3])
        shift = self._lacking()
        return k, v if shift is None else v + shift

    # -- prefill

    def absorb(self, k: Tensor, v: Tensor, old: int, new: int) -> None:
        """Take over tokens old .. new - 1 of a prefill call from `k, v [B, KV, new, D]`, which hold all positions in 16 bits."""
        self.ring.save(old)
        first, last = self.edge(old), self.edge(new)
        self._advance(first, last, k[:, :, first:last], v[:, :, first:last], v)
        self.ring.write(old, k[:, :, old:], v[:, :, old:])

    def history(self, k: Tensor, v: Tensor, length: int) -> None:
        """Write positions 0 .. length - 1 into `k, v [B, KV, >= length, D]`: codes decoded block by block, then the tail."""
        edge, g = self.edge(length), self.group
        for first in range(0, edge // g, self.CHUNK):
            last = min(first + self.CHUNK, edge // g)
            k[:, :, first * g : last * g], v[:, :, first * g : last * g] = self._decode(first, last)
        k[:, :, edge:length], v[:, :, edge:length] = self.ring.read(edge, length)

    # -- decode

    def age(self, length: int) -> None:
        """Before a decode step that makes it `length` tokens: code the block that leaves the tail, if one does."""
        first, last = self.edge(length - 1), self.edge(length)
        if last > first:
            self._advance(first, last, *self.ring.read(first, last), self.ring.read(0, self.centre)[1] if first == 0 else None)

    def by_kernels(self, length: int) -> bool:
        """Does a decode step run in the kernels of `kernels.py`?"""
        dtype = self.ring.k.dtype
        return kernels.usable(self.ring.k.device) and dtype == self.ring.v.dtype and kernels.decodes(dtype, self.bits, self.group)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scale: float, length: int, pos: Tensor) -> Tensor:
        """Append k, v `[B, KV, 1, D]` as position `length - 1` and attend with q `[B, H, 1, D]` over all `length` tokens.

        `pos`: int64 `[1]`, the same length less one, on the device.
        """
        if self.by_kernels(length):
            kernels.rotate_append(q, k, v, None, None, self.ring.k, self.ring.v, pos, self.ring.size)
            return self.attend_by_kernels(q, pos, scale)
        self.ring.write(length - 1, k, v)
        return kernels.quant_decode_plain(q, self.codes, self.ranges, self._lacking(), self.ring.k, self.ring.v, length - 1, scale, *self._layout())

    def attend_by_kernels(self, q: Tensor, pos: Tensor, scale: float) -> Tensor:
        """What `attend` does once the token is in the ring, with no number of the host in it, so that a CUDA graph can hold it."""
        return kernels.quant_decode(q, self.codes, self.ranges, self._lacking(), self.ring.k, self.ring.v, pos, scale, *self._layout())

    def _lacking(self) -> Tensor | None:
        return self.shift if self.correct or self.centre else None

    def _layout(self) -> tuple[int, int, int, int]:
        return self.bits, self.group, self.residual, self.centre

    # -- between calls

    def crop(self, old: int, new: int) -> None:
        """Forget positions new .. old - 1; what must be in 16 bits again and is not in the ring comes from its codes."""
        edge, missing = self.edge(new), min(self.ring.start, new)
        if edge < missing:
            first, last = edge // self.group, -(-missing // self.group)
            k, v = self._decode(first, last)
            start = self.ring.start
            self.ring.write(edge, k[:, :, : missing - edge].to(self.ring.k.dtype), v[:, :, : missing - edge].to(self.ring.v.dtype))
            self.ring.start = min(start, edge)
        self._refresh(edge)

    def roll_back(self, length: int) -> None:
        """Be again as before the call that began at `length` tokens and did not end."""
        self.ring.roll_back(length)
        self._refresh(self.edge(length))

    def tensors(self, length: int) -> dict[str, Tensor]:
        """The content at `length` tokens, for `restore`."""
        edge = self.edge(length)
        found = dict(zip(("tail.k", "tail.v"), self.ring.read(edge, length)))
        for kind, held in (("codes", self.codes), ("ranges", self.ranges)):
            found |= {f"{kind}.{name}": x[:, :, : edge // self.group] for name, x in zip("kv", held)}
        if self.centre:
            found["mean"] = self.mean if edge else torch.zeros_like(self.mean)  # what it was before a crop
        if self.correct:
            found["sums"] = self.sums[:, :, : edge // self.group]
        return found

    def restore(self, tensors: dict[str, Tensor], length: int) -> None:
        """Fill the empty layer, with room reserved, by what `tensors(length)` gave."""
        edge, device = self.edge(length), self.ring.k.device
        self.ring.write(edge, tensors["tail.k"].to(device), tensors["tail.v"].to(device))
        self.ring.start = edge
        for kind, held in (("codes", self.codes), ("ranges", self.ranges)):
            for name, x in zip("kv", held):
                x[:, :, : edge // self.group] = tensors[f"{kind}.{name}"]
        if self.centre:
            self.mean.copy_(tensors["mean"])
        if self.correct:
            self.sums[:, :, : edge // self.group] = tensors["sums"]
        self._refresh(edge)

    def nbytes(self) -> dict[str, int]:
        """GPU bytes by part."""
        if self.ring is None:
            return {}
        sums = [x for x in (self.sums, self.mean, self.shift) if x is not None] if self.correct or self.centre else []
        return {
            "quantised values' means": sum(x.nbytes for x in sums),
            "quantised codes": sum(held.nbytes for held in self.codes if held is not None),
            "quantised ranges": sum(held.nbytes for held in self.ranges if held is not None),
            "quantised tail": self.ring.k.nbytes + self.ring.v.nbytes,
        }
