# SPDX-License-Identifier: Apache-2.0
"""Triton kernels over packed codes, each beside its plain-PyTorch twin of the same signature: the specification and the CPU's path.

Shapes: `B` batch, `H` query heads, `KV` key/value heads, `G = H // KV`, `D` and `Dv` widths of a key and a value head,
`P` blocks of `group` tokens held, `W = ceil(Dv / group)` value groups a token.
"""

import functools
import os
import types
import warnings

import torch
from torch import Tensor

import quant  # as a module: it calls back into this one
from attention import merge_attention, small_attention

try:
    import triton
    import triton.language as tl
except ImportError:  # the twins need none of it, and a decorator that does nothing keeps this file importable
    triton, tl = types.SimpleNamespace(jit=lambda function: function), types.SimpleNamespace(constexpr=None)

# Triton's interpreter runs kernels on CPU tensors; it must be chosen before this file is imported.
INTERPRETED = hasattr(triton, "__version__") and os.environ.get("TRITON_INTERPRET") == "1"
force: bool | None = None  # True: kernels wherever they run at all; False: the twins; None: kernels on a GPU or in the interpreter


@functools.cache
def _warn_once() -> None:
    warnings.warn("Triton is not installed: decoding through plain PyTorch, which is slower and cannot be captured in a graph", stacklevel=3)


def usable(device: torch.device) -> bool:
    """Whether kernels run on tensors of this device: a GPU of compute capability 8.0 or more, or any in Triton's interpreter."""
    if force is False or INTERPRETED:
        return INTERPRETED and force is not False
    if device.type != "cuda" or torch.version.hip:
        return False
    if not hasattr(triton, "__version__"):
        _warn_once()
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)


# ------------------------------------------------------------------------------------- decode attention over packed codes


def quant_decode_plain(q, codes, ranges, shift, ring_k, ring_v, pos, scale, bits, group, residual, centre):
    """The twin of `quant_decode`. It decodes 64 blocks at a time, and reads `pos`, which may be a host int here, on the host."""
    length, size = int(pos) + 1, ring_k.shape[2]
    edge = max(0, length - residual) // group * group if length > centre else 0
    slots = torch.arange(edge, length, device=q.device) % size
    o, lse = small_attention(q, ring_k.index_select(2, slots), ring_v.index_select(2, slots), scale)
    for first in range(0, edge // group, 64):
        k, v = quant.decode_blocks(codes, ranges, first, min(first + 64, edge // group), bits, group, ring_v.shape[3])
        # The weights of an attention sum to 1, so each output gets the shift once for the mass of its coded part.
        o, lse = merge_attention(o, lse, *small_attention(q, k, v if shift is None else v + shift, scale))
    return o.to(q.dtype)


def quant_decode(
    q: Tensor,
    codes: tuple[Tensor, Tensor],
    ranges: tuple[Tensor, Tensor],
    shift: Tensor | None,
    ring_k: Tensor,
    ring_v: Tensor,
    pos: Tensor,
    scale: float,
    bits: int,
    group: int,
    residual: int,
    centre: int,
) -> Tensor:
    """Attention of one query a head over all stored tokens of a `quant.QuantLayer`, without decoding them into memory.

    Args:
        q: `[B, H, 1, D]`, of the ring's dtype.
        codes: of K, uint8 `[B, KV, P, D, group * bits / 8]`, and of V, `[B, KV, P, group, ceil(Dv * bits / 8)]`; see `quant.pack`.
        ranges: float16 scale and zero of K, `[B, KV, P, 2, D]`, and of V, `[B, KV, P, 2, group, W]`.
        shift: float32 `[B, KV, 1, Dv]`, what decoded values lack; None: nothing.
        ring_k, ring_v: `[B, KV, size, D]` and `[B, KV, size, Dv]`; position p is in slot `p % size`. The query's own token is in it.
        pos: int64 `[1]` on q's device, the position of the query's token. Positions below the edge, `(pos + 1 - residual) // group *
            group`, or 0 while `pos < centre`, are codes; the others are in the ring.
        scale: of the scores.

    Returns:
        `[B, H, 1, Dv]` in q's dtype. It does not depend on P. In 16 bits the error is that of 16-bit operands accumulated in float32.

    Raises:
        ValueError: shapes, strides or dtypes that contradict each other.

    The work is split over blocks of a fixed number of tokens and joined through log-sum-exps (flash-decoding; FlashAttention-2,
    2307.08691, section 3.1). Codes times queries is the FP16 x INT1 product of TailorKV, section 4.1, here on tensor cores.
    """
    arguments = (q, codes, ranges, shift, ring_k, ring_v, pos, scale, bits, group, residual, centre)
    if not (usable(q.device) and decodes(q.dtype, bits, group)):
        return quant_decode_plain(*arguments)
    return _launch_decode(*arguments)


def decodes(dtype: torch.dtype, bits: int, group: int) -> bool:
    """Whether there is a kernel for this: `group` a power of two that a tensor core's inner dimension of 16 divides."""
    return dtype in (torch.float16, torch.bfloat16, torch.float32) and bits in (1, 2, 4, 8) and group in (16, 32, 64, 128)


def _launch_decode(q, codes, ranges, shift, ring_k, ring_v, pos, scale, bits, group, residual, centre, blocks=8, tile=32, warps=1, stages=1, combine=64, registers=None):
    """`quant_decode` by the kernels. `blocks`: coded blocks a program; `tile`: ring tokens a program."""
    B, H, T, D = q.shape
    KV, P, Dv = codes[0].shape[1], codes[0].shape[2], ring_v.shape[3]
    G, W, size = H // KV, -(-Dv // group), ring_k.shape[2]
    shapes = {
        "codes of K": (codes[0], (B, KV, P, D, group * bits // 8)),
        "codes of V": (codes[1], (B, KV, P, group, -(-Dv * bits // 8))),
        "ranges of K": (ranges[0], (B, KV, P, 2, D)),
        "ranges of V": (ranges[1], (B, KV, P, 2, group, W)),
        "ring of K": (ring_k, (B, KV, size, D)),
        "ring of V": (ring_v, (B, KV, size, Dv)),
    }
    for name, (tensor, shape) in shapes.items():
        if tensor.shape != shape or T != 1 or H % KV:
            raise ValueError(f"{name} are {list(tensor.shape)} and not {list(shape)} for queries {list(q.shape)}")
        if not tensor[0, 0, 0].is_contiguous():
            raise ValueError(f"{name}: a block's or token's content must be contiguous, and has strides {tensor[0, 0, 0].stride()}")
    if ring_k.dtype != q.dtype or ring_v.dtype != q.dtype:
        raise ValueError(f"queries are {q.dtype} and the ring {ring_k.dtype} and {ring_v.dtype}")
    if pos.dtype != torch.int64 or pos.shape != (1,):
        raise ValueError(f"pos is {pos.dtype} {list(pos.shape)} and not int64 [1]")

    power = lambda n: 1 << max(n - 1, 0).bit_length()  # noqa: E731
    exact = q.dtype == torch.float32
    q, shift = q.contiguous(), None if shift is None else shift.contiguous()
    WP, GP = power(W), power(G)
    GP = max(GP, 8 // WP)  # a tensor core's narrowest output is 8 columns
    # The tail comes first, and its share is the same at any capacity: so is the order in which parts are joined.
    tails = -(-max(centre, residual + group - 1) // tile)
    splits = tails + -(-P // blocks)
    part = torch.empty(B, H, splits, Dv, dtype=torch.float32, device=q.device)
    lse = torch.empty(B, H, splits, dtype=torch.float32, device=q.device)
    out = torch.empty(B, H, 1, Dv, dtype=q.dtype, device=q.device)
    held = (codes[0], ranges[0], codes[1], ranges[1], ring_k, ring_v)
    strides = [stride for x in held for stride in x.stride()[:3]]
    _decode_splits[(splits, KV, B)](
        q, _masks(bits, q.device), *held, q if shift is None else shift, pos, part, lse, *strides, scale * 1.4426950408889634,  # base 2: one exp2 a score
        residual, centre, size, splits, tails, P,
        G=G, D=D, DV=Dv, BITS=bits, GROUP=group, GP=GP, WP=WP, BD=max(16, power(D)), BDV=max(16, power(Dv)), VB=power(-(-Dv * bits // 8)),
        BLOCKS=blocks, TILE=tile, SHIFTED=shift is not None, EXACT=exact, NATIVE=not INTERPRETED, num_warps=4 if exact else warps, num_stages=stages, maxnreg=registers,
    )  # fmt: skip
    width = min(32, max(16, power(Dv)))
    _decode_join[(B * H, -(-Dv // width))](part, lse, out, splits, DV=Dv, WIDTH=width, SPLITS=combine, num_warps=4)
    return out


@functools.cache
def _masks(bits: int, device: torch.device) -> Tensor:
    """int16 `[8 // bits]`: where a byte holds its codes."""
    return torch.tensor([(2**bits - 1) << at for at in range(0, 8, bits)], dtype=torch.int16, device=device)


@triton.jit
def _planes(x, masks, BITS: tl.constexpr, EXACT: tl.constexpr, NATIVE: tl.constexpr):
    """Bytes `[rows, n]` to their codes, `[8 / BITS * rows, n]`: first every byte's first code, then every byte's second.

    Codes become floats without a conversion: an integer c in the low ten bits of a float16 is the subnormal c * 2^-24, which
    tensor cores honour. Code j is not even shifted down: it is left at bit j * BITS and comes out times 2^(j * BITS - 24).

    The masks come from memory, because the compiler moves what is computed here behind the exchange of bytes between threads
    only if it begins with loads: otherwise it exchanges float16 codes, 16 times as many bytes at 1 bit.
    """
    PLANES: tl.constexpr = 8 // BITS
    wide = x.to(tl.int16)[None]
    if EXACT:
        shifts = (tl.arange(0, PLANES) * BITS).to(tl.int16)
        codes = ((wide >> shifts[:, None, None]) & (2**BITS - 1)).to(tl.float32)
    else:
        wide, masks = tl.broadcast(wide, masks[:, None, None])
        if NATIVE:  # two elements of a register in one instruction: the compiler does not find that by itself, the interpreter has no assembly
            codes = tl.inline_asm_elementwise("and.b32 $0, $1, $2;", "=r,r,r", [wide, masks], dtype=tl.float16, is_pure=True, pack=2)
        else:
            codes = (wide & masks).to(tl.float16, bitcast=True)
    return tl.reshape(codes, (PLANES * x.shape[0], x.shape[1]))


@triton.jit
def _power(exponent):
    """2^exponent as float32, for an int32 exponent of -126 .. 127."""
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _decode_splits(
    q, masks, kc, kr, vc, vr, rk, rv, shift, pos, part, lse,
    kc_b, kc_h, kc_p, kr_b, kr_h, kr_p, vc_b, vc_h, vc_p, vr_b, vr_h, vr_p, rk_b, rk_h, rk_t, rv_b, rv_h, rv_t,
    scale, residual, centre, size, splits, tails, blocks_held,
    G: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr,
    GP: tl.constexpr, WP: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr, VB: tl.constexpr,
    BLOCKS: tl.constexpr, TILE: tl.constexpr, SHIFTED: tl.constexpr, EXACT: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """One program: `TILE` tokens of the ring (the first `tails` programs) or `BLOCKS` blocks of codes, for a KV head's G queries.

    part `[B, H, splits, DV]`, lse `[B, H, splits]` in base 2. A program without tokens writes minus infinity as its lse, and
    no part. Column n of a tile is query head n % GP; the queries are repeated WP times, for as many groups of V's channels.
    """
    split, head, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    row = (batch * tl.num_programs(1) + head) * G  # of the first query
    head = head.to(tl.int64)
    N: tl.constexpr = GP * WP
    n = tl.arange(0, N)
    d = tl.arange(0, BD)
    query = q + (row + n % GP)[None, :] * D + d[:, None]
    asked = (d < D)[:, None] & (n % GP < G)[None, :]

    length = tl.load(pos).to(tl.int32) + 1
    edge = tl.where(length > centre, tl.maximum(length - residual, 0) // GROUP * GROUP, 0)
    first = (split - tails) * BLOCKS
    last = tl.minimum(tl.minimum(first + BLOCKS, edge // GROUP), blocks_held)
    start = edge + split * TILE
    rows = (row + n) * splits + split

    if split < tails and start < length:
        at = start + tl.arange(0, TILE)
        here = at < length
        slot = (at % size).to(tl.int64)
        k = tl.load(rk + batch * rk_b + head * rk_h + slot[:, None] * rk_t + d[None, :], mask=here[:, None] & (d < D)[None, :], other=0.0)
        x = tl.load(query, mask=asked, other=0.0)
        if not NATIVE:  # the interpreter multiplies bfloat16 as if it were integers
            k, x = k.to(tl.float32), x.to(tl.float32)
        score = tl.dot(k, x, input_precision="ieee") * scale
        score = tl.where(here[:, None], score, float("-inf"))
        most = tl.max(score, 0)
        p = tl.exp2(score - most[None, :])
        c = tl.arange(0, BDV)
        v = tl.load(rv + batch * rv_b + head * rv_h + slot[None, :] * rv_t + c[:, None], mask=here[None, :] & (c < DV)[:, None], other=0.0)
        if not NATIVE:
            v = v.to(tl.float32)
        total = tl.sum(p, 0)
        o = tl.dot(v, p.to(v.dtype), input_precision="ieee") / total[None, :]
        tl.store(part + rows[None, :] * DV + c[:, None], o, mask=(n < G)[None, :] & (c < DV)[:, None])
        tl.store(lse + rows, most + tl.log2(total), mask=n < G)
    elif split >= tails and first < last:
        PLANES: tl.constexpr = 8 // BITS
        KB: tl.constexpr = GROUP // PLANES  # bytes of a channel's codes in a block
        V_ROW: tl.constexpr = (DV + PLANES - 1) // PLANES  # bytes of a token's codes
        W: tl.constexpr = (DV + GROUP - 1) // GROUP
        x = tl.load(query, mask=asked, other=0.0).to(tl.float32)
        # Queries below 1 in float16, by a power of two: times a float16 scale they cannot overflow.
        exponent = (tl.max(tl.abs(x), 0).to(tl.int32, bitcast=True) >> 23) - 126
        exponent = tl.minimum(tl.maximum(exponent, -125), 126)
        x = x * _power(-exponent)[None, :]
        if not EXACT:
            x = x.to(tl.float16)
        column = _power(exponent) * scale
        r = tl.arange(0, GROUP)  # rows of scores in the order of _planes
        token = r % KB * PLANES + r // KB
        plane = r // KB * BITS
        byte = tl.arange(0, KB)
        vrow = tl.arange(0, PLANES * VB)
        channel = vrow % VB * PLANES + vrow // VB
        vplane = vrow // VB * BITS
        i = tl.arange(0, VB)
        w = tl.arange(0, WP)
        bit = tl.load(masks + tl.arange(0, PLANES))
        if EXACT:
            weight, back = tl.full((GROUP,), 1.0, tl.float32), tl.full((PLANES * VB,), 1.0, tl.float32)
        else:
            weight, back = _power(24 - plane), _power(24 - vplane)
        factor = weight[:, None] * column[None, :]

        kc += batch * kc_b + head * kc_h
        kr += batch * kr_b + head * kr_h
        vc += batch * vc_b + head * vc_h
        vr += batch * vr_b + head * vr_h
        most = tl.full((N,), float("-inf"), tl.float32)
        total = tl.zeros((N,), tl.float32)
        zeros = tl.zeros((N,), tl.float32)  # what the zero points contribute: the same for all channels of a group
        acc = tl.zeros((PLANES * VB, N), tl.float32)
        for number in range(0, last - first):
            block = first.to(tl.int64) + number
            # K: sum_d q_d (z_d + s_d code_dt) = sum_d q_d z_d + sum_d (q_d s_d) code_dt.
            bytes_k = tl.load(kc + block * kc_p + d[None, :] * KB + byte[:, None], mask=(d < D)[None, :], other=0)
            s = tl.load(kr + block * kr_p + d, mask=d < D, other=0.0)
            z = tl.load(kr + block * kr_p + D + d, mask=d < D, other=0.0)
            if EXACT:
                s = s.to(tl.float32)
            zero = tl.sum(x.to(tl.float32) * z.to(tl.float32)[:, None], 0) * column
            score = tl.dot(_planes(bytes_k, bit, BITS, EXACT, NATIVE), x * s[:, None], input_precision="ieee")
            score = score * factor + zero[None, :]
            new = tl.maximum(most, tl.max(score, 0))
            alpha = tl.exp2(most - new)
            p = tl.exp2(score - new[None, :])
            most = new
            # V: sum_t p_t (z_t + s_t code_tc), tokens in the order of the scores.
            bytes_v = tl.load(vc + block * vc_p + token[None, :] * V_ROW + i[:, None], mask=(i < V_ROW)[:, None], other=0)
            at = vr + block * vr_p + token[:, None] * W + w[None, :]
            s = tl.load(at, mask=(w < W)[None, :], other=0.0)
            z = tl.load(at + GROUP * W, mask=(w < W)[None, :], other=0.0)
            s = tl.reshape(tl.broadcast_to(s[:, :, None], (GROUP, WP, GP)), (GROUP, N)).to(tl.float32)
            z = tl.reshape(tl.broadcast_to(z[:, :, None], (GROUP, WP, GP)), (GROUP, N)).to(tl.float32)
            total = total * alpha + tl.sum(p, 0)
            zeros = zeros * alpha + tl.sum(p * z, 0)
            ps = p * s
            if not EXACT:
                ps = ps.to(tl.float16)
            acc = tl.dot(_planes(bytes_v, bit, BITS, EXACT, NATIVE), ps, acc * alpha[None, :], input_precision="ieee")
        o = (acc * back[:, None] + zeros[None, :]) / total[None, :]
        o = tl.where((channel // GROUP)[:, None] == (n // GP)[None, :], o, 0.0)  # each channel's own group of the WP
        o = tl.sum(tl.reshape(o, (PLANES * VB, WP, GP)), 1)
        if SHIFTED:
            o += tl.load(shift + (batch * tl.num_programs(1) + head) * DV + channel, mask=channel < DV, other=0.0)[:, None]
        g = tl.arange(0, GP)
        tl.store(part + ((row + g) * splits + split)[None, :] * DV + channel[:, None], o, mask=(g < G)[None, :] & (channel < DV)[:, None])
        tl.store(lse + rows, most + tl.log2(total), mask=n < G)
    else:
        tl.store(lse + rows, tl.full((N,), float("-inf"), tl.float32), mask=n < G)


@triton.jit
def _decode_join(part, lse, out, splits, DV: tl.constexpr, WIDTH: tl.constexpr, SPLITS: tl.constexpr):
    """Join a query head's parts `[splits, DV]` by their base-2 lse `[splits]`, `SPLITS` at a time, in order: WIDTH channels a program."""
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    most = tl.full((), float("-inf"), tl.float32)
    total = tl.zeros((), tl.float32)
    acc = tl.zeros((WIDTH,), tl.float32)
    for first in range(0, splits, SPLITS):
        at = first + tl.arange(0, SPLITS)
        x = tl.load(lse + row * splits + at, mask=at < splits, other=float("-inf"))
        held = x > float("-inf")  # the others' parts were never written
        o = tl.load(part + (row * splits + at[:, None]) * DV + c[None, :], mask=held[:, None] & (c < DV)[None, :], other=0.0)
        new = tl.maximum(most, tl.max(x, 0))
        alpha = tl.where(most > float("-inf"), tl.exp2(most - new), 0.0)
        share = tl.where(held, tl.exp2(x - new), 0.0)
        total = total * alpha + tl.sum(share, 0)
        acc = acc * alpha + tl.sum(o * share[:, None], 0)
        most = new
    tl.store(out + row * DV + c, acc / total, mask=c < DV)


# ------------------------------------------------------------------------------------------------------ quantise and pack


def quant_encode_plain(x, per_channel, codes, ranges, first, bits, group, levels, mean=None, sums=None):
    """The twin of `quant_encode`, from `quant.quantise` and `quant.pack`, 64 blocks at a time: float32 temporaries of a bounded size."""
    for at in range(0, x.shape[2], 64 * group):
        part = x[:, :, at : at + 64 * group].float()
        part = (part if mean is None else part - mean).unflatten(2, (-1, group))
        blocks = slice(first + at // group, first + at // group + part.shape[2])
        found, scale, zero = quant.quantise(part.transpose(3, 4) if per_channel else part, bits, group, levels)
        codes[:, :, blocks] = quant.pack(found, bits)
        both = torch.stack((scale, zero), 3)  # [B, KV, n, 2, rows, groups of a row]
        ranges[:, :, blocks] = both.squeeze(-1) if per_channel else both
        if sums is not None:
            sums[:, :, blocks] = quant.tree_sum(part - quant.dequantise(found, scale, zero, group), 3)


def quant_encode(
    x: Tensor,
    per_channel: bool,
    codes: Tensor,
    ranges: Tensor,
    first: int,
    bits: int,
    group: int,
    levels: str,
    mean: Tensor | None = None,
    sums: Tensor | None = None,
) -> None:
    """Quantise and pack whole blocks of a `quant.QuantLayer` in one pass, into blocks first .. first + n - 1: the twin's bytes.

    Args:
        x: `[B, KV, n * group, D]`, K if `per_channel`, else V.
        codes, ranges: the layer's, `[B, KV, P, ...]`, of K or of V; see `quant_decode`.
        levels: "minmax" or "lloyd", see `quant.quantise`.
        mean: float32 `[B, KV, 1, D]`, subtracted from V before; None: nothing.
        sums: float32 `[B, KV, P, D]`, gets V - decoded V summed over each block; None: not wanted.

    Raises:
        ValueError: a group that is not whole in x.
    """
    if x.shape[2] % group:
        raise ValueError(f"{x.shape[2]} tokens are not whole blocks of {group}")
    B, KV, T, D = x.shape
    rows = D if per_channel else group
    stored = codes[0, 0, 0].is_contiguous() and ranges[0, 0, 0].is_contiguous() and (sums is None or sums.stride(3) == 1)
    if not (usable(x.device) and decodes(x.dtype, bits, group) and stored):
        quant_encode_plain(x, per_channel, codes, ranges, first, bits, group, levels, mean, sums)
        return
    tile = min(32, 1 << max(D - 1, 0).bit_length()) if per_channel else group  # channels a program; V's sums want all of a block's tokens
    tiles, W = -(-rows // tile), 1 if per_channel else -(-D // group)
    if T == 0:
        return
    mean = None if mean is None else mean.contiguous()
    _encode_blocks[(T // group * tiles * W, KV, B)](
        x, x if mean is None else mean, codes, ranges, x if sums is None else sums,
        *x.stride(), *codes.stride()[:3], *ranges.stride()[:3], *((0, 0, 0) if sums is None else sums.stride()[:3]), first, tiles,
        ROWS=rows, WIDTH=group if per_channel else D, TILE=tile, W=W, BITS=bits, GROUP=group, LLOYD=levels == "lloyd",
        KEYS=per_channel, CENTRED=mean is not None, SUMS=sums is not None, num_warps=4,
        enable_fp_fusion=False,  # a fused multiply-add rounds once where the twin rounds twice
    )  # fmt: skip


@triton.jit
def _tree_sum(x):
    """`quant.tree_sum` over the last dimension of `[rows, n]`, n a power of two."""
    for _ in tl.static_range(7):
        if x.shape[1] > 1:
            x = tl.sum(tl.reshape(x, (x.shape[0], 2, x.shape[1] // 2)), 1)
    return tl.reshape(x, (x.shape[0],))


@triton.jit
def _assign(x, mean, zero, scale, BITS: tl.constexpr, SIDES: tl.constexpr):
    """`quant._assign` of `x [rows, n]`, as float32."""
    flat = scale == 0
    if SIDES:
        codes = tl.where(x > mean[:, None], 1.0, 0.0)
    else:
        codes = tl.floor(tl.div_rn(x - zero[:, None], tl.broadcast_to(tl.where(flat, 1.0, scale)[:, None], x.shape)) + 0.5)
        codes = tl.minimum(tl.maximum(codes, 0.0), 2**BITS - 1.0)
    return tl.where(flat[:, None], 0.0, codes)


@triton.jit
def _encode_blocks(
    x, mean, codes, ranges, sums,
    x_b, x_h, x_t, x_d, c_b, c_h, c_p, r_b, r_h, r_p, s_b, s_h, s_p, first, tiles,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr, W: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr,
    LLOYD: tl.constexpr, KEYS: tl.constexpr, CENTRED: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    """One program: `TILE` rows of one block, one group of each. A row is a channel of K or a token of V."""
    program, head, batch = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    block, tile, w = (program // (tiles * W)).to(tl.int64), program // W % tiles, program % W
    row = tile * TILE + tl.arange(0, TILE)
    within = w * GROUP + tl.arange(0, GROUP)
    real = (row < ROWS)[:, None] & (within < WIDTH)[None, :]
    token, channel = (within[None, :], row[:, None]) if KEYS else (row[:, None], within[None, :])
    at = batch * x_b + head * x_h + (block * GROUP + token) * x_t + channel.to(tl.int64) * x_d
    values = tl.load(x + at, mask=real, other=0.0).to(tl.float32)
    if CENTRED:
        subtracted = tl.load(mean + (batch * tl.num_programs(1) + head) * WIDTH + within, mask=within < WIDTH, other=0.0)
        values = tl.where(real, values - subtracted[None, :], 0.0)

    low = tl.min(tl.where(real, values, float("inf")), 1)
    high = tl.max(tl.where(real, values, float("-inf")), 1)
    low, high = tl.where(row < ROWS, low, 0.0), tl.where(row < ROWS, high, 0.0)
    scale = tl.div_rn(high - low, tl.full((TILE,), 2**BITS - 1.0, tl.float32))
    zero, average = low, low
    if LLOYD:
        count = tl.zeros((TILE,), tl.float32) + tl.minimum(WIDTH - w * GROUP, GROUP)
        average = tl.div_rn(_tree_sum(values), count)
        for _ in tl.static_range(1 if BITS == 1 else 4):
            found = tl.where(real, _assign(values, average, zero, scale, BITS, BITS == 1), 0.0)
            centre = tl.div_rn(tl.sum(found, 1), count)  # of small integers: exact in any order
            spreads = tl.where(real, found - centre[:, None], 0.0)
            spread = _tree_sum(spreads * spreads)
            flat = spread == 0
            scale = tl.where(flat, 0.0, tl.div_rn(_tree_sum(spreads * values), tl.where(flat, 1.0, spread)))
            zero = tl.where(flat, low, average - scale * centre)
    zero, scale = zero.to(tl.float16), scale.to(tl.float16)
    found = tl.where(real, _assign(values, average, zero.to(tl.float32), scale.to(tl.float32), BITS, LLOYD and BITS == 1), 0.0)

    EACH: tl.constexpr = 8 // BITS
    shifted = tl.reshape(found.to(tl.int32), (TILE, GROUP // EACH, EACH)) << (tl.arange(0, EACH) * BITS)[None, None, :]
    BYTES: tl.constexpr = (WIDTH + EACH - 1) // EACH
    byte = w * (GROUP // EACH) + tl.arange(0, GROUP // EACH)
    into = codes + batch * c_b + head * c_h + (first + block) * c_p + row[:, None] * BYTES + byte[None, :]
    tl.store(into, tl.sum(shifted, 2).to(tl.uint8), mask=(row < ROWS)[:, None] & (byte < BYTES)[None, :])
    into = ranges + batch * r_b + head * r_h + (first + block) * r_p + row * W + w
    tl.store(into, scale, mask=row < ROWS)
    tl.store(into + ROWS * W, zero, mask=row < ROWS)
    if SUMS:
        error = values - (zero.to(tl.float32)[:, None] + scale.to(tl.float32)[:, None] * found)
        error = _tree_sum(tl.trans(tl.where(real, error, 0.0)))
        tl.store(sums + batch * s_b + head * s_h + (first + block) * s_p + within, error, mask=within < WIDTH)
