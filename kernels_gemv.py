# SPDX-License-Identifier: Apache-2.0
"""Triton kernels of a decode step, each beside its plain-PyTorch twin of the same signature.

A step of one token reads every weight once and computes next to nothing, so a layer is as fast as memory is read without a
pause. What stands between the matrices (norms, residual sums, SiLU, rotation, the append to the cache) costs nothing but
launches, 2 to 4 us each even in a CUDA graph; here it is part of the kernel that needs it:

    norm_linear       q, k and v (and the next layer's predicted query) of the normed hidden state, one launch
    rotate_append     rotation of q and k, and the token's row of the cache
    split_attention   attention over the cache, split along the sequence, and the join of the splits
    linear_add_       projection and residual sum
    norm_gated        norm, gate, up and SiLU

The twin is the specification. The kernel runs on CUDA (compute capability 8.0 and up, with Triton), for a single row; the
twin runs everywhere else. Both round where the twin's separate operations would. `FORCE` is for tests.

Shapes: `B` batch, `H` query heads, `KV` key/value heads, `G = H // KV`, `D` head_dim, `Dv` of values.
"""

import functools
import warnings
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from attention import causal_attention

try:
    import triton
    import triton.language as tl
except ImportError:  # a CPU-only machine, or a platform that Triton does not build for
    triton = None

FORCE: bool | None = None  # True: kernels also where they are not chosen (Triton's interpreter on a CPU); False: twins always
PDL = True  # on Hopper, start a kernel while the one before it drains; see `_wait`
MAX_HEAD_DIM = 256  # wider heads would not fit the shared memory of split_attention


# --------------------------------------------------------------------------------------------------------- dispatch


@functools.lru_cache(maxsize=None)
def _warn_without_triton() -> None:
    warnings.warn("Triton is not installed: decoding on CUDA takes PyTorch's own operations, which are slower", stacklevel=4)


@functools.lru_cache(maxsize=None)
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


@functools.lru_cache(maxsize=None)
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


def usable(device: torch.device) -> bool:
    """Do the kernels run on this device?"""
    if FORCE is not None:
        return FORCE
    if device.type != "cuda" or _capability(device) < (8, 0):
        return False
    if triton is None:
        _warn_without_triton()
    return triton is not None


def _fits(row: Tensor, *others: Tensor | None) -> bool:
    """One row, and nothing strided or of another dtype: what the matrix kernels are written for."""
    plain = all(x is None or (x.is_contiguous() and x.dtype == row.dtype) for x in (row, *others))
    return plain and row.numel() == row.shape[-1] and usable(row.device)


def _pdl(device: torch.device) -> bool:
    return PDL and device.type == "cuda" and _capability(device) >= (9, 0)


class Tile(NamedTuple):
    """How a matrix kernel cuts its work. No result depends on `per_sm`, `stages` or `ahead`."""

    rows: int  # of the matrix at a time
    chunk: int  # most columns at a time; a power of two
    per_sm: int  # programs a multiprocessor, each walking over its share of the rows; 0: a program for every `rows`
    warps: int
    stages: int  # tiles under way to shared memory; 1: to registers
    ahead: int  # 128-byte lines of the program's first rows asked into the L2 while the kernel before drains; a power of two or 0


TILES = {  # by kernel; measured on an H200 at the shapes of Llama-3.1-8B
    "norm_linear": Tile(2, 16384, 2, 8, 4, 256),
    "norm_gated": Tile(2, 16384, 2, 8, 3, 256),
    "linear_add_": Tile(2, 16384, 2, 8, 4, 256),
    "linear_add_ wide": Tile(1, 16384, 2, 8, 3, 256),  # more than 8,192 columns
    "head": Tile(4, 16384, 2, 8, 3, 256),  # norm_linear with one large matrix
}


def _cut(tile: Tile, K: int, rows: list[int], device: torch.device, itemsize: int) -> tuple[int, dict]:
    """Rows that a program walks over, and the kernel options, for matrices of `rows` rows and K columns."""
    chunk = min(triton.next_power_of_2(K), tile.chunk * 2 // itemsize)
    each = tile.rows
    if tile.per_sm:
        share = -(-sum(rows) // (tile.per_sm * _processors(device)))
        each = -(-share // tile.rows) * tile.rows
    pdl = _pdl(device)
    options = {"K": K, "BLOCK_K": chunk, "R": tile.rows, "ROWS": each, "STAGES": tile.stages, "AHEAD": tile.ahead if pdl else 0, "PDL": pdl}
    return each, options | ({"num_warps": tile.warps} | ({"launch_pdl": True} if pdl else {}))


# ------------------------------------------------------------------------------------------- building blocks of kernels

if triton is not None:

    @triton.jit
    def _wait(PDL: tl.constexpr):
        """Programmatic dependent launch: let the next kernel's programs take free places now, and wait for the one before.

        What comes before this call overlaps with the kernel before; it may touch nothing but weights. Every program of
        every kernel waits, so that a kernel's results are there when the kernel after the next one starts, too.
        """
        if PDL:
            tl.extra.cuda.gdc_launch_dependents()
            tl.extra.cuda.gdc_wait()

    @triton.jit
    def _ask(ptr, elements, LINES: tl.constexpr):
        """Ask the L2 for the first LINES lines of 128 bytes behind `ptr`, or as many as hold `elements` elements."""
        if LINES > 0:
            step: tl.constexpr = 1024 // ptr.dtype.element_ty.primitive_bitwidth
            address = (ptr + tl.minimum(tl.arange(0, LINES) * step, elements - 1)).to(tl.int64)
            tl.inline_asm_elementwise("prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [address], dtype=tl.int32, is_pure=False, pack=1)

    @triton.jit
    def _inverse_rms(h_ptr, eps, K: tl.constexpr, BLOCK_K: tl.constexpr):
        total = tl.zeros([BLOCK_K], tl.float32)
        for start in range(0, K, BLOCK_K):
            k = start + tl.arange(0, BLOCK_K)
            h = tl.load(h_ptr + k, mask=k < K, other=0.0).to(tl.float32)
            total += h * h
        return tl.rsqrt(tl.sum(total) / K + eps)

    @triton.jit
    def _input(h_ptr, norm_ptr, scale, k, K: tl.constexpr, NORM: tl.constexpr):
        """The input at columns k as float32, normed and rounded to the dtype where NORM."""
        x = tl.load(h_ptr + k, mask=k < K, other=0.0).to(tl.float32)
        if NORM:
            weight = tl.load(norm_ptr + k, mask=k < K, other=0.0).to(tl.float32)
            x = (x * scale * weight).to(h_ptr.dtype.element_ty).to(tl.float32)
        return x

    @triton.jit
    def _products(w_ptr, rows, N, x, h_ptr, norm_ptr, scale, K: tl.constexpr, BLOCK_K: tl.constexpr, R: tl.constexpr, NORM: tl.constexpr):
        """float32 `[R]`: rows of the matrix times the input, which is `x` where a whole row is one chunk."""
        k = tl.arange(0, BLOCK_K)
        base = w_ptr + rows.to(tl.int64)[:, None] * K
        if BLOCK_K >= K:
            w = tl.load(base + k[None, :], mask=(rows < N)[:, None] & (k < K)[None, :], other=0.0, eviction_policy="evict_first")
            result = tl.sum(w.to(tl.float32) * x[None, :], 1)
        else:
            total = tl.zeros([R, BLOCK_K], tl.float32)
            for start in range(0, K, BLOCK_K):
                at = start + k
                w = tl.load(base + at[None, :], mask=(rows < N)[:, None] & (at < K)[None, :], other=0.0, eviction_policy="evict_first")
                total += w.to(tl.float32) * _input(h_ptr, norm_ptr, scale, at, K, NORM)[None, :]
            result = tl.sum(total, 1)
        return result


# ------------------------------------------------------------------------------------------------- norm and projections

if triton is not None:

    @triton.jit(do_not_specialize=["n0", "n1", "n2", "n3", "p1", "p2", "p3"])
    def _norm_linear_kernel(
        h_ptr, norm_ptr, ahead_norm_ptr, eps, out_ptr,
        w0_ptr, w1_ptr, w2_ptr, w3_ptr, b0_ptr, b1_ptr, b2_ptr, b3_ptr, n0, n1, n2, n3, p1, p2, p3,
        COUNT: tl.constexpr, OTHER_NORM: tl.constexpr, BIAS: tl.constexpr,
        K: tl.constexpr, BLOCK_K: tl.constexpr, R: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr, AHEAD: tl.constexpr, PDL: tl.constexpr,
    ):  # fmt: skip
        program = tl.program_id(0)
        # Programs p1 and up work on matrix 1, and so on: each on one matrix.
        w_ptr, b_ptr, N, first, at = w0_ptr, b0_ptr, n0, program, program * 0
        if COUNT > 1:
            if program >= p1:
                w_ptr, b_ptr, N, first, at = w1_ptr, b1_ptr, n1, program - p1, n0
        if COUNT > 2:
            if program >= p2:
                w_ptr, b_ptr, N, first, at = w2_ptr, b2_ptr, n2, program - p2, n0 + n1
        if COUNT > 3:
            if program >= p3:
                w_ptr, b_ptr, N, first, at = w3_ptr, b3_ptr, n3, program - p3, n0 + n1 + n2
        if OTHER_NORM:  # the last matrix has its own
            if at + N == n0 + n1 + n2 + n3:
                norm_ptr = ahead_norm_ptr
        start = first * ROWS
        stop = tl.minimum(start + ROWS, N)
        _ask(w_ptr + start.to(tl.int64) * K, (stop - start) * K, AHEAD)
        _wait(PDL)
        scale = _inverse_rms(h_ptr, eps, K, BLOCK_K)
        x = _input(h_ptr, norm_ptr, scale, tl.arange(0, BLOCK_K), K, True)
        for row in tl.range(start, stop, R, num_stages=STAGES):
            rows = row + tl.arange(0, R)
            y = _products(w_ptr, rows, stop, x, h_ptr, norm_ptr, scale, K, BLOCK_K, R, True)
            if BIAS:
                y += tl.load(b_ptr + rows, mask=rows < stop, other=0.0).to(tl.float32)
            tl.store(out_ptr + at + rows, y.to(out_ptr.dtype.element_ty), mask=rows < stop)


def norm_linear(
    h: Tensor, norm_weight: Tensor, eps: float, weights: list[Tensor], biases: list[Tensor | None] | None = None,
    ahead: tuple[Tensor, Tensor, Tensor | None] | None = None,
) -> list[Tensor]:  # fmt: skip
    """RMSNorm of `h`, then one projection by each of `weights`: q, k and v of a layer, or the logits.

    Args:
        h: `[..., hidden]`; norm_weight: `[hidden]`; weights: `[out_i, hidden]` each; biases: `[out_i]` or None each.
        ahead: `(norm_weight, weight, bias)` of one more projection of the same h under another norm: the next layer's query,
            predicted from this layer's input (TailorKV, section 4.2).

    Returns:
        `[..., out_i]` for each weight, that of `ahead` last.

    Raises:
        ValueError: more than three weights beside `ahead`.
        RuntimeError: shapes that do not fit.
    """
    if len(weights) > 3:
        raise ValueError(f"norm_linear takes up to 3 weights beside `ahead`, and was given {len(weights)}")
    biases = list(biases or [None] * len(weights))
    matrices, norms = list(weights), [norm_weight]
    if ahead is not None:
        norms.append(ahead[0])
        matrices.append(ahead[1])
        biases.append(ahead[2])
    mixed = any(b is None for b in biases) and any(b is not None for b in biases)
    if mixed or not _fits(h, *norms, *matrices, *biases):
        return _norm_linear(h, norm_weight, eps, weights, biases[: len(weights)], ahead)
    K, sizes = h.shape[-1], [w.shape[0] for w in matrices]
    if any(w.shape[1] != K for w in matrices) or any(n.shape != (K,) for n in norms):
        raise RuntimeError(f"h has {K} columns, the weights are {[list(w.shape) for w in matrices]} and the norms {[list(n.shape) for n in norms]}")
    each, options = _cut(TILES["norm_linear" if sum(sizes) < 2**15 else "head"], K, sizes, h.device, h.element_size())
    programs = [-(-size // each) for size in sizes]
    starts = [sum(programs[:i]) for i in range(1, 4)]
    out = h.new_empty(*h.shape[:-1], sum(sizes))
    empty = 4 - len(matrices)
    pad = [matrices[0]] * empty
    _norm_linear_kernel[(sum(programs),)](
        h, norm_weight, norms[-1], eps, out,
        *matrices, *pad, *(matrices if biases[0] is None else biases), *pad, *sizes, *[0] * empty, *starts,
        COUNT=len(matrices), OTHER_NORM=ahead is not None, BIAS=biases[0] is not None, **options,
    )  # fmt: skip
    return list(out.split(sizes, -1))


def _norm_linear(h, norm_weight, eps, weights, biases=None, ahead=None):
    x = F.rms_norm(h, norm_weight.shape, norm_weight, eps)
    out = [F.linear(x, weight, bias) for weight, bias in zip(weights, biases or [None] * len(weights))]
    if ahead is not None:
        out.append(F.linear(F.rms_norm(h, ahead[0].shape, ahead[0], eps), ahead[1], ahead[2]))
    return out


# ------------------------------------------------------------------------------------------------------------------ MLP

if triton is not None:

    @triton.jit
    def _norm_gated_kernel(
        h_ptr, norm_ptr, eps, out_ptr, gate_ptr, up_ptr, gate_bias_ptr, up_bias_ptr, N, BIAS: tl.constexpr,
        K: tl.constexpr, BLOCK_K: tl.constexpr, R: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr, AHEAD: tl.constexpr, PDL: tl.constexpr,
    ):  # fmt: skip
        start = tl.program_id(0) * ROWS
        stop = tl.minimum(start + ROWS, N)
        _ask(gate_ptr + start.to(tl.int64) * K, (stop - start) * K, AHEAD)
        _ask(up_ptr + start.to(tl.int64) * K, (stop - start) * K, AHEAD)
        _wait(PDL)
        dtype = out_ptr.dtype.element_ty
        scale = _inverse_rms(h_ptr, eps, K, BLOCK_K)
        x = _input(h_ptr, norm_ptr, scale, tl.arange(0, BLOCK_K), K, True)
        for row in tl.range(start, stop, R, num_stages=STAGES):
            rows = row + tl.arange(0, R)
            gate = _products(gate_ptr, rows, stop, x, h_ptr, norm_ptr, scale, K, BLOCK_K, R, True)
            up = _products(up_ptr, rows, stop, x, h_ptr, norm_ptr, scale, K, BLOCK_K, R, True)
            if BIAS:
                gate += tl.load(gate_bias_ptr + rows, mask=rows < stop, other=0.0).to(tl.float32)
                up += tl.load(up_bias_ptr + rows, mask=rows < stop, other=0.0).to(tl.float32)
            gate = gate.to(dtype).to(tl.float32)
            y = (gate / (1 + tl.exp(-gate))).to(dtype).to(tl.float32) * up.to(dtype).to(tl.float32)
            tl.store(out_ptr + rows, y.to(dtype), mask=rows < stop)


def norm_gated(h: Tensor, norm_weight: Tensor, eps: float, gate: Tensor, up: Tensor, gate_bias: Tensor | None = None, up_bias: Tensor | None = None) -> Tensor:
    """`silu(x @ gate.T) * (x @ up.T)` of `x`, the RMSNorm of `h`: an MLP (SwiGLU, 2002.05202) up to its last projection.

    Args:
        h: `[..., hidden]`; norm_weight: `[hidden]`; gate, up: `[intermediate, hidden]`; biases: `[intermediate]`, both or none.

    Returns:
        `[..., intermediate]`.

    Raises:
        RuntimeError: shapes that do not fit.
    """
    if (gate_bias is None) != (up_bias is None) or not _fits(h, norm_weight, gate, up, gate_bias, up_bias):
        return _norm_gated(h, norm_weight, eps, gate, up, gate_bias, up_bias)
    N, K = gate.shape
    if up.shape != gate.shape or h.shape[-1] != K or norm_weight.shape != (K,):
        raise RuntimeError(f"h has {h.shape[-1]} columns, gate is {list(gate.shape)}, up {list(up.shape)} and the norm {list(norm_weight.shape)}")
    each, options = _cut(TILES["norm_gated"], K, [N], h.device, h.element_size())
    out = h.new_empty(*h.shape[:-1], N)
    biases = (gate, up) if gate_bias is None else (gate_bias, up_bias)
    _norm_gated_kernel[(-(-N // each),)](h, norm_weight, eps, out, gate, up, *biases, N, BIAS=gate_bias is not None, **options)
    return out


def _norm_gated(h, norm_weight, eps, gate, up, gate_bias=None, up_bias=None):
    x = F.rms_norm(h, norm_weight.shape, norm_weight, eps)
    return F.silu(F.linear(x, gate, gate_bias), inplace=True).mul_(F.linear(x, up, up_bias))


# ---------------------------------------------------------------------------------------------- projection and residual

if triton is not None:

    @triton.jit
    def _linear_add_kernel(
        h_ptr, x_ptr, w_ptr, b_ptr, N, BIAS: tl.constexpr,
        K: tl.constexpr, BLOCK_K: tl.constexpr, R: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr, AHEAD: tl.constexpr, PDL: tl.constexpr,
    ):  # fmt: skip
        start = tl.program_id(0) * ROWS
        stop = tl.minimum(start + ROWS, N)
        _ask(w_ptr + start.to(tl.int64) * K, (stop - start) * K, AHEAD)
        _wait(PDL)
        x = _input(x_ptr, x_ptr, 1.0, tl.arange(0, BLOCK_K), K, False)
        for row in tl.range(start, stop, R, num_stages=STAGES):
            rows = row + tl.arange(0, R)
            h = tl.load(h_ptr + rows, mask=rows < stop, other=0.0).to(tl.float32)  # ahead of the sum, to arrive with the matrix
            y = _products(w_ptr, rows, stop, x, x_ptr, x_ptr, 1.0, K, BLOCK_K, R, False)
            if BIAS:
                y += tl.load(b_ptr + rows, mask=rows < stop, other=0.0).to(tl.float32)
            dtype = h_ptr.dtype.element_ty
            tl.store(h_ptr + rows, (h + y.to(dtype).to(tl.float32)).to(dtype), mask=rows < stop)


def linear_add_(h: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`h += x @ weight.T + bias` in place; returns h.

    Args:
        h: `[..., out]`; x: `[..., in]`; weight: `[out, in]`; bias: `[out]`.

    Raises:
        RuntimeError: shapes that do not fit.
    """
    if not _fits(x, h, weight, bias):
        return _linear_add_(h, x, weight, bias)
    N, K = weight.shape
    if x.shape[-1] != K or h.shape[-1] != N or h.numel() != N:
        raise RuntimeError(f"h is {list(h.shape)}, x {list(x.shape)} and the weight {list(weight.shape)}")
    each, options = _cut(TILES["linear_add_" if K <= 8192 else "linear_add_ wide"], K, [N], x.device, x.element_size())
    _linear_add_kernel[(-(-N // each),)](h, x, weight, weight if bias is None else bias, N, BIAS=bias is not None, **options)
    return h


def _linear_add_(h, x, weight, bias=None):
    h += F.linear(x, weight, bias)
    return h


# --------------------------------------------------------------------------------------------------- rotation and append

if triton is not None:

    # Numbers that grow with the cache are not specialised: a kernel compiled anew while a graph is captured would break the capture.
    @triton.jit(do_not_specialize=["slots"])
    def _rotate_kernel(
        q_ptr, k_ptr, v_ptr, cos_ptr, sin_ptr, q_out_ptr, k_out_ptr, v_out_ptr, pos_ptr, slots,
        q_batch, q_head, k_batch, k_head, v_batch, v_head, H, KV, D: tl.constexpr, DV: tl.constexpr, HALF: tl.constexpr, BLOCK_DV: tl.constexpr,
        Q: tl.constexpr, ROTATE: tl.constexpr, APPEND: tl.constexpr, PDL: tl.constexpr,
    ):  # fmt: skip
        """A program for every head: H of q (where Q), KV of k, KV of v (where APPEND)."""
        head, b = tl.program_id(0), tl.program_id(1).to(tl.int64)
        _wait(PDL)
        if not Q:
            head += H
        row = b * 0
        if APPEND:
            row = tl.load(pos_ptr) % slots
        if head < H + KV:
            in_ptr, out_ptr = q_ptr + b * q_batch + head.to(tl.int64) * q_head, q_out_ptr + (b * H + head) * D
            if head >= H:
                kv = (head - H).to(tl.int64)
                in_ptr, out_ptr = k_ptr + b * k_batch + kv * k_head, k_out_ptr + ((b * KV + kv) * slots + row) * D
            i = tl.arange(0, HALF)
            mask = i < D // 2
            first, second = tl.load(in_ptr + i, mask=mask), tl.load(in_ptr + D // 2 + i, mask=mask)
            if ROTATE:
                # Rounded as x * cos + rotated * sin is in PyTorch: after each product, and after the sum.
                dtype = first.dtype
                x1, x2 = first.to(tl.float32), second.to(tl.float32)
                cos1, cos2 = tl.load(cos_ptr + i, mask=mask).to(tl.float32), tl.load(cos_ptr + D // 2 + i, mask=mask).to(tl.float32)
                sin1, sin2 = tl.load(sin_ptr + i, mask=mask).to(tl.float32), tl.load(sin_ptr + D // 2 + i, mask=mask).to(tl.float32)
                first = ((x1 * cos1).to(dtype).to(tl.float32) + (-x2 * sin1).to(dtype).to(tl.float32)).to(dtype)
                second = ((x2 * cos2).to(dtype).to(tl.float32) + (x1 * sin2).to(dtype).to(tl.float32)).to(dtype)
            tl.store(out_ptr + i, first, mask=mask)
            tl.store(out_ptr + D // 2 + i, second, mask=mask)
        else:
            value_head, dv = (head - H - KV).to(tl.int64), tl.arange(0, BLOCK_DV)
            value = tl.load(v_ptr + b * v_batch + value_head * v_head + dv, mask=dv < DV)
            tl.store(v_out_ptr + ((b * KV + value_head) * slots + row) * DV + dv, value, mask=dv < DV)


def _rows_whole(*tensors: Tensor) -> bool:
    return all(x.stride(-1) == 1 for x in tensors)


def _launch_rotate(q, k, v, cos, sin, q_out, k_out, v_out, pos) -> None:
    heads = (q.shape[1] if q_out is not None else 0) + k.shape[1] * (2 if v is not None else 1)
    value = k if v is None else v
    value_out = k_out if v_out is None else v_out
    pdl = _pdl(q.device)
    _rotate_kernel[(heads, q.shape[0])](
        q, k, value, q if cos is None else cos, q if sin is None else sin, q if q_out is None else q_out, k_out, value_out, q if pos is None else pos, k_out.shape[2],
        q.stride(0), q.stride(1), k.stride(0), k.stride(1), value.stride(0), value.stride(1),
        q.shape[1], k.shape[1], D=k.shape[3], DV=value.shape[3], HALF=triton.next_power_of_2(k.shape[3] // 2), BLOCK_DV=triton.next_power_of_2(value.shape[3]),
        Q=q_out is not None, ROTATE=cos is not None, APPEND=v is not None, PDL=pdl, num_warps=1, enable_fp_fusion=False, **({"launch_pdl": True} if pdl else {}),
    )  # fmt: skip


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the channel pairs (i, i + D/2) of `x [B, H, T, D]` by the angles behind `cos, sin [T, D]`."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def rotate_pair(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """q `[B, H, 1, D]` and k `[B, KV, 1, D]` rotated by `cos, sin [1, D]`, as `rotate` does, bit for bit."""
    if q.shape[2] != 1 or q.shape[3] % 2 or not usable(q.device) or not _rows_whole(q, k, cos, sin):
        return rotate(q, cos, sin), rotate(k, cos, sin)
    q_out, k_out = q.new_empty(q.shape), k.new_empty(k.shape)
    _launch_rotate(q, k, None, cos, sin, q_out, k_out, None, None)
    return q_out, k_out


def rotate_append(q: Tensor, k: Tensor, v: Tensor, cos: Tensor | None, sin: Tensor | None, k_cache: Tensor, v_cache: Tensor, pos: Tensor, slots: int) -> Tensor:
    """Rotate q and k of one token, write its k and v to row `pos % slots` of the cache, and return the rotated q.

    Args:
        q: `[B, H, 1, D]`; k: `[B, KV, 1, D]`; v: `[B, KV, 1, Dv]`; views with any strides but of the last dimension.
        cos, sin: `[1, D]`, both None: no rotation, and q is returned as it is.
        k_cache, v_cache: `[B, KV, slots, D]` and `[B, KV, slots, Dv]`, contiguous.
        pos: int64 `[1]`, on the device.

    Raises:
        ValueError: caches that do not fit k and v.
    """
    if k_cache.shape != (*k.shape[:2], slots, k.shape[3]) or v_cache.shape != (*v.shape[:2], slots, v.shape[3]):
        raise ValueError(f"k {list(k.shape)} and v {list(v.shape)} do not fit caches of {list(k_cache.shape)} and {list(v_cache.shape)} with {slots} slots")
    if q.shape[3] % 2 or not usable(q.device) or not _rows_whole(q, k, v) or not k_cache.is_contiguous() or not v_cache.is_contiguous():
        return _rotate_append(q, k, v, cos, sin, k_cache, v_cache, pos, slots)
    q_out = None if cos is None else q.new_empty(q.shape)
    _launch_rotate(q, k, v, cos, sin, q_out, k_cache, v_cache, pos)
    return q if q_out is None else q_out


def _rotate_append(q, k, v, cos, sin, k_cache, v_cache, pos, slots):
    if cos is not None:
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
    k_cache.index_copy_(2, pos % slots, k)
    v_cache.index_copy_(2, pos % slots, v)
    return q


# ------------------------------------------------------------------------------------------------------------- attention

SPLIT = 512  # tokens a program; fixed, so that no sum depends on the capacity
SPLIT_TILE = (64, 4, 3)  # tokens at a time, warps, stages

if triton is not None:

    @triton.jit(do_not_specialize=["slots", "splits"])
    def _split_kernel(
        q_ptr, k_ptr, v_ptr, pos_ptr, part_ptr, stat_ptr, scale, q_batch, q_head, KV, slots, splits,
        G: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
        BLOCK_N: tl.constexpr, SPLIT: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
    ):  # fmt: skip
        """Attention of a KV head's G queries over one split: sums weighted by 2^(score - maximum), the maximum, the weights' sum."""
        split, pair = tl.program_id(0), tl.program_id(1)
        _wait(PDL)
        first = split * SPLIT
        tokens = tl.minimum(tl.load(pos_ptr) + 1 - first, SPLIT).to(tl.int32)
        if tokens <= 0:
            return
        b, kv = (pair // KV).to(tl.int64), (pair % KV).to(tl.int64)
        g, d, dv, n = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV), tl.arange(0, BLOCK_N)
        q = tl.load(q_ptr + b * q_batch + (kv * G + g)[:, None] * q_head + d[None, :], mask=(g < G)[:, None] & (d < D)[None, :], other=0.0)
        begin = pair.to(tl.int64) * slots + first
        k_base, v_base = k_ptr + begin * D, v_ptr + begin * DV
        top = tl.full([BLOCK_G], float("-inf"), tl.float32)
        weight = tl.zeros([BLOCK_G], tl.float32)
        total = tl.zeros([BLOCK_G, BLOCK_DV], tl.float32)
        for start in tl.range(0, tokens, BLOCK_N, num_stages=STAGES):
            inside = start + n < tokens
            # Rows past the last token may hold anything, NaN too, and 0 * NaN is NaN: they are not read.
            k = tl.load(k_base + (start + n)[:, None] * D + d[None, :], mask=inside[:, None] & (d < D)[None, :], other=0.0)
            v = tl.load(v_base + (start + n)[:, None] * DV + dv[None, :], mask=inside[:, None] & (dv < DV)[None, :], other=0.0)
            scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
            scores = tl.where(inside[None, :], scores, float("-inf"))
            higher = tl.maximum(top, tl.max(scores, 1))
            p = tl.exp2(scores - higher[:, None])
            shrink = tl.exp2(top - higher)
            weight = weight * shrink + tl.sum(p, 1)
            total = total * shrink[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
            top = higher
        row = ((pair * G + g) * splits + split).to(tl.int64)
        tl.store(part_ptr + row[:, None] * DV + dv[None, :], total, mask=(g < G)[:, None] & (dv < DV)[None, :])
        tl.store(stat_ptr + row * 2, top, mask=g < G)
        tl.store(stat_ptr + row * 2 + 1, weight, mask=g < G)

    @triton.jit(do_not_specialize=["splits"])
    def _join_kernel(
        part_ptr, stat_ptr, pos_ptr, out_ptr, splits,
        DV: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_S: tl.constexpr, SPLIT: tl.constexpr, PDL: tl.constexpr,
    ):  # fmt: skip
        """Join a query head's splits, always in the same order."""
        head = tl.program_id(0).to(tl.int64)
        _wait(PDL)
        used = (tl.load(pos_ptr) // SPLIT + 1).to(tl.int32)
        dv = tl.program_id(1) * BLOCK_DV + tl.arange(0, BLOCK_DV)
        part_ptr += head * splits * DV
        stat_ptr += head * splits * 2
        highest = tl.full([BLOCK_S], float("-inf"), tl.float32)
        for start in range(0, used, BLOCK_S):
            s = start + tl.arange(0, BLOCK_S)
            highest = tl.maximum(highest, tl.load(stat_ptr + s * 2, mask=s < used, other=float("-inf")))
        top = tl.max(highest)
        weight = tl.zeros([BLOCK_S], tl.float32)
        total = tl.zeros([BLOCK_S, BLOCK_DV], tl.float32)
        for start in range(0, used, BLOCK_S):
            s = start + tl.arange(0, BLOCK_S)
            share = tl.exp2(tl.load(stat_ptr + s * 2, mask=s < used, other=float("-inf")) - top)
            weight += share * tl.load(stat_ptr + s * 2 + 1, mask=s < used, other=0.0)
            part = tl.load(part_ptr + s[:, None] * DV + dv[None, :], mask=(s < used)[:, None] & (dv < DV)[None, :], other=0.0)
            total += share[:, None] * part
        out = tl.sum(total, 0) / tl.sum(weight)
        tl.store(out_ptr + head * DV + dv, out.to(out_ptr.dtype.element_ty), mask=dv < DV)


def split_attention(q: Tensor, k_cache: Tensor, v_cache: Tensor, pos: Tensor, scale: float | None = None) -> Tensor:
    """Exact attention of one query per head over rows 0 .. pos of the cache; what lies beyond them is not read.

    Args:
        q: `[B, H, 1, D]`; k_cache, v_cache: `[B, KV, slots, D]` and `[B, KV, slots, Dv]`.
        pos: int64 `[1]` on the device, below slots.
        scale: of the scores; None: 1 / sqrt(D).

    Returns:
        `[B, H, 1, Dv]`.

    The grid covers all slots and splits are of a fixed size, so a captured call serves any pos, and the result is the same,
    bit for bit, whatever the capacity. (Splits along the sequence: Flash-Decoding, Dao et al., 2023.)
    """
    B, H, _, D = q.shape
    KV, slots, Dv = k_cache.shape[1], k_cache.shape[2], v_cache.shape[3]
    scale = D**-0.5 if scale is None else scale
    if max(D, Dv) > MAX_HEAD_DIM or not usable(q.device) or not k_cache.is_contiguous() or not v_cache.is_contiguous():
        return _split_attention(q, k_cache, v_cache, pos, scale)
    power, G, splits, pdl = triton.next_power_of_2, H // KV, -(-slots // SPLIT), _pdl(q.device)
    q = q if q.stride(-1) == 1 else q.contiguous()
    part = torch.empty(B * H, splits, Dv, dtype=torch.float32, device=q.device)
    stat = torch.empty(B * H, splits, 2, dtype=torch.float32, device=q.device)
    out = q.new_empty(B, H, 1, Dv)
    tokens, warps, stages = SPLIT_TILE
    if q.dtype == torch.float32 or max(D, Dv) > 128:  # twice the bytes a row; exactness and room, not speed
        tokens, warps, stages = 32, 8, 2
    launch = {"launch_pdl": True} if pdl else {}
    _split_kernel[(splits, B * KV)](
        q, k_cache, v_cache, pos, part, stat, scale * 1.4426950408889634, q.stride(0), q.stride(1), KV, slots, splits,
        G=G, D=D, DV=Dv, BLOCK_G=max(16, power(G)), BLOCK_D=max(16, power(D)), BLOCK_DV=max(16, power(Dv)),
        BLOCK_N=tokens, SPLIT=SPLIT, STAGES=stages, PDL=pdl, num_warps=warps, **launch,
    )  # fmt: skip
    width = min(32, power(Dv))
    _join_kernel[(B * H, -(-Dv // width))](part, stat, pos, out, splits, DV=Dv, BLOCK_DV=width, BLOCK_S=64, SPLIT=SPLIT, PDL=pdl, num_warps=4, **launch)
    return out


def _split_attention(q, k_cache, v_cache, pos, scale=None):
    N = int(pos) + 1
    return causal_attention(q, k_cache[:, :, :N], v_cache[:, :, :N], scale)
