# SPDX-License-Identifier: Apache-2.0
"""Triton kernels of the decode step, each beside its plain-PyTorch twin of the same signature.

A step of one token reads every weight once and computes next to nothing, so a layer is as fast as memory is read without a
pause. What stands between the matrices (norms, residual sums, SiLU, rotation, the append to the cache) costs nothing but
launches, 2 to 4 us each even in a CUDA graph; here it is part of the kernel that needs it:

    norm_linear        q, k and v (and the next layer's predicted query) of the normed hidden state, one launch
    norm_rotate        the next layer's predicted query, where it is predicted from another hidden state, rotated
    rotate_append      rotation of q and k, and the token's row of the cache
    linear_add_        projection and residual sum
    norm_gated         norm, gate, up and SiLU
    split_attention    the full cache: attention over all of it, split along the sequence, and the join of the splits
    quant_decode       a quantised layer: attention over its packed codes and its 16-bit tail
    quant_encode       ... codes and ranges of blocks, in the twin's bytes

The twin is the specification, and what runs where Triton does not: on a CPU, on a GPU older than Ampere, or without the
package (one warning says so). `usable(device)` tells which. A sparse layer's kernels are in `sparse_kernels.py`.

All kernels can stand in a CUDA graph: nothing depends on a host number that changes from step to step. The position of the
token being decoded is read from the device (`pos`, int64 `[1]`), grids cover the capacity, and programs beyond what is stored
leave early. Work is cut into pieces of a fixed size, not a fixed number, and joined in a fixed order, so that results depend
neither on the capacity nor on the run.

Shapes: `B` batch, `H` query heads, `KV` key/value heads, `G = H // KV`, `D` head_dim, `Dv` of values. Every offset that can pass 2^31 is computed in int64.
"""

import functools
import warnings
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import quant  # as a module: it calls back into this one
from attention import causal_attention, merge_attention, small_attention

try:
    import triton
    import triton.language as tl

    ABSENT = False
except ImportError:  # a platform that Triton does not build for
    ABSENT = True

    class _Absent:
        """Stands for triton and its language while the kernels below are defined; none is called."""

        def __getattr__(self, name):
            return self

        def __call__(self, *arguments, **options):
            return arguments[0] if arguments and callable(arguments[0]) else self

    triton = tl = _Absent()

FORCE: bool | None = None  # for tests. True: kernels also where they are not chosen (Triton's interpreter on a CPU); False: twins always
PDL = True  # on Hopper, start a kernel while the one before it drains; see `_wait`
MAX_HEAD_DIM = 256  # wider heads would not fit the shared memory of split_attention


# --------------------------------------------------------------------------------------------------------- dispatch


@functools.lru_cache(maxsize=None)
def _warn_without(reason: str) -> None:
    warnings.warn(f"{reason}: decoding takes PyTorch's own operations, which are slower", stacklevel=4)


@functools.lru_cache(maxsize=None)
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


@functools.lru_cache(maxsize=None)
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


@functools.lru_cache(maxsize=None)
def _shared_memory(device: torch.device) -> int:
    """Bytes that a program may have, less what a kernel needs beside its tiles."""
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin - 2048 if device.type == "cuda" else 2**30


def usable(device: torch.device) -> bool:
    """Do the kernels run on this device? Warns once where a GPU has to do without."""
    if FORCE is not None:
        return FORCE
    if device.type != "cuda":
        return False
    if ABSENT:
        _warn_without("Triton is not installed")
    elif _capability(device) < (8, 0):
        _warn_without(f"{torch.cuda.get_device_name(device)} is older than what Triton's kernels are written for (compute capability 8.0)")
    return not ABSENT and _capability(device) >= (8, 0)


def _fits(row: Tensor, *others: Tensor | None) -> bool:
    """One row, and nothing strided or of another dtype: what the matrix kernels are written for."""
    plain = all(x is None or (x.is_contiguous() and x.dtype == row.dtype) for x in (row, *others))
    return plain and row.numel() == row.shape[-1] and usable(row.device)


def _launch(device: torch.device) -> dict:
    """Options of a kernel each of whose programs comes to a `_wait`."""
    pdl = PDL and device.type == "cuda" and _capability(device) >= (9, 0)
    return {"PDL": True, "launch_pdl": True} if pdl else {"PDL": False}


# ------------------------------------------------------------------------------------------- matrices: building blocks


class Tile(NamedTuple):
    """How a matrix kernel cuts its work. No result depends on `per_sm`, `stages` or `ahead`."""

    rows: int  # of the matrix at a time
    chunk: int  # most columns at a time; a power of two
    per_sm: int  # programs a multiprocessor, each walking over its share of the rows; 0: a program for every `rows`
    warps: int
    stages: int  # tiles under way to shared memory; 1: to registers
    ahead: int  # 128-byte lines of the program's first rows asked into the L2 while the kernel before drains; a power of two or 0


TILES = {  # by kernel; measured on an H200 at the shapes of Llama-3.1-8B
    "norm_linear": Tile(8, 16384, 1, 8, 3, 512),
    "norm_gated": Tile(4, 16384, 1, 8, 3, 512),
    "linear_add_": Tile(4, 16384, 2, 8, 3, 256),
    "linear_add_ wide": Tile(2, 16384, 1, 16, 3, 512),  # more than 8,192 columns
    "head": Tile(8, 16384, 1, 8, 3, 256),  # norm_linear with one large matrix
}


def _cut(tile: Tile, K: int, rows: list[int], device: torch.device, itemsize: int, matrices: int = 1) -> tuple[int, dict]:
    """Rows that a program walks over, and the kernel options, for matrices of `rows` rows and K columns, `matrices` of them walked over together."""
    chunk, at_once = min(triton.next_power_of_2(K), tile.chunk * 2 // itemsize), tile.rows
    # Tiles under way lie in shared memory: 227 KiB of it on an H100, 99 on a consumer card.
    while at_once > 1 and at_once * chunk * itemsize * matrices * (tile.stages - 1) > _shared_memory(device):
        at_once //= 2
    each = at_once
    if tile.per_sm:
        share = -(-sum(rows) // (tile.per_sm * _processors(device)))
        each = -(-share // at_once) * at_once
    launch = _launch(device)
    options = {"K": K, "BLOCK_K": chunk, "R": at_once, "ROWS": each, "STAGES": tile.stages, "AHEAD": tile.ahead if launch["PDL"] else 0}
    return each, options | {"num_warps": tile.warps} | launch


@triton.jit
def _wait(PDL: tl.constexpr):
    """Programmatic dependent launch: let the next kernel's programs take free places now, and wait for the one before.

    What comes before this call overlaps with the kernel before, and perhaps with the one before that: it may read weights, and what
    `_wait_first` makes sure of. Every program of every kernel waits, so that what is there after a wait are the results of all kernels before.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@triton.jit
def _wait_first(PDL: tl.constexpr):
    """`_wait` where the next kernel, before it waits itself, reads what the kernels before this one have written."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


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
def _first(h_ptr, norm_ptr, eps, K: tl.constexpr, BLOCK_K: tl.constexpr, NORM: tl.constexpr, PDL: tl.constexpr):
    """Wait for the kernel before, and take its result as input: `_input` of the first chunk and, where NORM, the norm's scale.

    The loops over a matrix do this in their first turn, because tiles of later turns are under way by then: what a loop will read, it asks for
    before it begins, and so a matrix is on its way to shared memory while the kernel before drains and its result is normed.
    """
    _wait(PDL)
    scale = 1.0
    if NORM:
        scale = _inverse_rms(h_ptr, eps, K, BLOCK_K)
    return _input(h_ptr, norm_ptr, scale, tl.arange(0, BLOCK_K), K, NORM), scale


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
    x, scale = tl.zeros([BLOCK_K], tl.float32), 0.0
    for row in tl.range(start, stop, R, num_stages=STAGES):
        if row == start:
            x, scale = _first(h_ptr, norm_ptr, eps, K, BLOCK_K, True, PDL)
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


@triton.jit
def _norm_rotate_kernel(
    h_ptr, norm_ptr, eps, out_ptr, w_ptr, b_ptr, cos_ptr, sin_ptr, N, BIAS: tl.constexpr, HALF: tl.constexpr,
    K: tl.constexpr, BLOCK_K: tl.constexpr, R: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr, AHEAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """N pairs of rows, HALF a head: a row of its first half with the one that it is rotated with."""
    start = tl.program_id(0) * ROWS
    stop = tl.minimum(start + ROWS, N)
    begin = (start + start // HALF * HALF).to(tl.int64) * K
    _ask(w_ptr + begin, (stop - start) * K, AHEAD)
    _ask(w_ptr + begin + HALF * K, (stop - start) * K, AHEAD)
    dtype = out_ptr.dtype.element_ty
    x, scale = tl.zeros([BLOCK_K], tl.float32), 0.0
    for pair in tl.range(start, stop, R, num_stages=STAGES):
        if pair == start:
            x, scale = _first(h_ptr, norm_ptr, eps, K, BLOCK_K, True, PDL)
        pairs = pair + tl.arange(0, R)
        rows, i, real = pairs + pairs // HALF * HALF, pairs % HALF, pairs < stop
        last = stop + (stop - 1) // HALF * HALF
        y1 = _products(w_ptr, rows, last, x, h_ptr, norm_ptr, scale, K, BLOCK_K, R, True)
        y2 = _products(w_ptr + HALF * K, rows, last, x, h_ptr, norm_ptr, scale, K, BLOCK_K, R, True)
        if pair < stop:  # always: nothing in a branch is asked for in advance
            if BIAS:
                y1 += tl.load(b_ptr + rows, mask=real, other=0.0).to(tl.float32)
                y2 += tl.load(b_ptr + HALF + rows, mask=real, other=0.0).to(tl.float32)
            first, second = _turned(y1.to(dtype), y2.to(dtype), cos_ptr, sin_ptr, i, HALF, real)
            tl.store(out_ptr + rows, first, mask=real)
            tl.store(out_ptr + HALF + rows, second, mask=real)


def norm_rotate(h: Tensor, norm_weight: Tensor, eps: float, weight: Tensor, bias: Tensor | None, cos: Tensor, sin: Tensor) -> Tensor:
    """RMSNorm, projection and rotation of one token: the next layer's predicted query.

    Args:
        h: `[B, 1, hidden]`; norm_weight: `[hidden]`; weight: `[H * D, hidden]`; bias: `[H * D]` or None; cos, sin: `[1, D]`.

    Returns:
        `[B, H, 1, D]`.

    Raises:
        RuntimeError: shapes that do not fit.
    """
    D, (N, K) = cos.shape[1], weight.shape
    if D % 2 or not _rows_whole(cos, sin) or not _fits(h, norm_weight, weight, bias):
        return _norm_rotate(h, norm_weight, eps, weight, bias, cos, sin)
    if h.shape[-1] != K or norm_weight.shape != (K,) or N % D:
        raise RuntimeError(f"h has {h.shape[-1]} columns, the weight is {list(weight.shape)}, the norm {list(norm_weight.shape)} and a head {D}")
    each, options = _cut(TILES["norm_gated"], K, [N // 2], h.device, h.element_size(), 2)
    out = h.new_empty(1, N // D, 1, D)
    _norm_rotate_kernel[(-(-N // 2 // each),)](h, norm_weight, eps, out, weight, weight if bias is None else bias, cos, sin, N // 2, BIAS=bias is not None, HALF=D // 2, **options)
    return out


def _norm_rotate(h, norm_weight, eps, weight, bias, cos, sin):
    q = F.linear(F.rms_norm(h, norm_weight.shape, norm_weight, eps), weight, bias)
    return rotate(q.unflatten(-1, (-1, cos.shape[1])).transpose(1, 2), cos, sin)


# ------------------------------------------------------------------------------------------------------------------ MLP


@triton.jit
def _norm_gated_kernel(
    h_ptr, norm_ptr, eps, out_ptr, gate_ptr, up_ptr, gate_bias_ptr, up_bias_ptr, N, BIAS: tl.constexpr,
    K: tl.constexpr, BLOCK_K: tl.constexpr, R: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr, AHEAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    start = tl.program_id(0) * ROWS
    stop = tl.minimum(start + ROWS, N)
    _ask(gate_ptr + start.to(tl.int64) * K, (stop - start) * K, AHEAD)
    _ask(up_ptr + start.to(tl.int64) * K, (stop - start) * K, AHEAD)
    dtype = out_ptr.dtype.element_ty
    x, scale = tl.zeros([BLOCK_K], tl.float32), 0.0
    for row in tl.range(start, stop, R, num_stages=STAGES):
        if row == start:
            x, scale = _first(h_ptr, norm_ptr, eps, K, BLOCK_K, True, PDL)
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
    each, options = _cut(TILES["norm_gated"], K, [N], h.device, h.element_size(), 2)
    out = h.new_empty(*h.shape[:-1], N)
    biases = (gate, up) if gate_bias is None else (gate_bias, up_bias)
    _norm_gated_kernel[(-(-N // each),)](h, norm_weight, eps, out, gate, up, *biases, N, BIAS=gate_bias is not None, **options)
    return out


def _norm_gated(h, norm_weight, eps, gate, up, gate_bias=None, up_bias=None):
    x = F.rms_norm(h, norm_weight.shape, norm_weight, eps)
    return F.silu(F.linear(x, gate, gate_bias), inplace=True).mul_(F.linear(x, up, up_bias))


# ---------------------------------------------------------------------------------------------- projection and residual


@triton.jit
def _linear_add_kernel(
    h_ptr, x_ptr, w_ptr, b_ptr, N, BIAS: tl.constexpr,
    K: tl.constexpr, BLOCK_K: tl.constexpr, R: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr, AHEAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    start = tl.program_id(0) * ROWS
    stop = tl.minimum(start + ROWS, N)
    _ask(w_ptr + start.to(tl.int64) * K, (stop - start) * K, AHEAD)
    x, h = tl.zeros([BLOCK_K], tl.float32), tl.zeros([R], tl.float32)
    for row in tl.range(start, stop, R, num_stages=STAGES):
        if row == start:
            x, _ = _first(x_ptr, x_ptr, 1.0, K, BLOCK_K, False, PDL)
        rows = row + tl.arange(0, R)
        if row < stop:  # always: nothing in a branch is asked for in advance, and h is not there yet
            h = tl.load(h_ptr + rows, mask=rows < stop, other=0.0).to(tl.float32)
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


@triton.jit
def _turned(first, second, cos_ptr, sin_ptr, i, half: tl.constexpr, mask):
    """Channels i and i + half of a head, rotated, and rounded as x * cos + rotated * sin is in PyTorch: after each product, and after the sum."""
    dtype = first.dtype
    x1, x2 = first.to(tl.float32), second.to(tl.float32)
    cos1, cos2 = tl.load(cos_ptr + i, mask=mask).to(tl.float32), tl.load(cos_ptr + half + i, mask=mask).to(tl.float32)
    sin1, sin2 = tl.load(sin_ptr + i, mask=mask).to(tl.float32), tl.load(sin_ptr + half + i, mask=mask).to(tl.float32)
    first = ((x1 * cos1).to(dtype).to(tl.float32) + (-x2 * sin1).to(dtype).to(tl.float32)).to(dtype)
    second = ((x2 * cos2).to(dtype).to(tl.float32) + (x1 * sin2).to(dtype).to(tl.float32)).to(dtype)
    return first, second


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
            first, second = _turned(first, second, cos_ptr, sin_ptr, i, D // 2, mask)
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
    _rotate_kernel[(heads, q.shape[0])](
        q, k, value, q if cos is None else cos, q if sin is None else sin, q if q_out is None else q_out, k_out, value_out, q if pos is None else pos, k_out.shape[2],
        q.stride(0), q.stride(1), k.stride(0), k.stride(1), value.stride(0), value.stride(1),
        q.shape[1], k.shape[1], D=k.shape[3], DV=value.shape[3], HALF=triton.next_power_of_2(k.shape[3] // 2), BLOCK_DV=triton.next_power_of_2(value.shape[3]),
        Q=q_out is not None, ROTATE=cos is not None, APPEND=v is not None, num_warps=1, enable_fp_fusion=False, **_launch(q.device),
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


def rotate_query(q: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """q `[B, H, 1, D]` rotated by `cos, sin [1, D]`, as `rotate` does, bit for bit."""
    if q.shape[2] != 1 or q.shape[3] % 2 or not usable(q.device) or not _rows_whole(q, cos, sin):
        return rotate(q, cos, sin)
    out = q.new_empty(q.shape)
    _launch_rotate(q, q, None, cos, sin, None, out, None, None)
    return out


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

SPLIT = 1024  # tokens a program; fixed, so that no sum depends on the capacity
SPLIT_TILE = (64, 4, 4)  # tokens at a time, warps, stages


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
    power, G, splits, launch = triton.next_power_of_2, H // KV, -(-slots // SPLIT), _launch(q.device)
    q = q if q.stride(-1) == 1 else q.contiguous()
    part = torch.empty(B * H, splits, Dv, dtype=torch.float32, device=q.device)
    stat = torch.empty(B * H, splits, 2, dtype=torch.float32, device=q.device)
    out = q.new_empty(B, H, 1, Dv)
    tokens, warps, stages = SPLIT_TILE
    if q.dtype == torch.float32 or max(D, Dv) > 128:  # twice the bytes a row; exactness and room, not speed
        tokens, warps, stages = 32, 8, 2
    _split_kernel[(splits, B * KV)](
        q, k_cache, v_cache, pos, part, stat, scale * 1.4426950408889634, q.stride(0), q.stride(1), KV, slots, splits,
        G=G, D=D, DV=Dv, BLOCK_G=max(16, power(G)), BLOCK_D=max(16, power(D)), BLOCK_DV=max(16, power(Dv)),
        BLOCK_N=tokens, SPLIT=SPLIT, STAGES=stages, num_warps=warps, **launch,
    )  # fmt: skip
    width = min(32, power(Dv))
    _join_kernel[(B * H, -(-Dv // width))](part, stat, pos, out, splits, DV=Dv, BLOCK_DV=width, BLOCK_S=64, SPLIT=SPLIT, num_warps=4, **launch)
    return out


def _split_attention(q, k_cache, v_cache, pos, scale=None):
    N = int(pos) + 1
    return causal_attention(q, k_cache[:, :, :N], v_cache[:, :, :N], scale)


# ----------------------------------------------------------------------------------------- quantised layers: attention


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
        BLOCKS=blocks, TILE=tile, SHIFTED=shift is not None, EXACT=exact, NATIVE=q.is_cuda, num_warps=4 if exact else warps, num_stages=stages, maxnreg=registers,
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
        *x.stride(), *codes.stride()[:4], *ranges.stride()[:3], W, rows * W, *((0, 0, 0) if sums is None else sums.stride()[:3]), first, tiles,
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
    x_b, x_h, x_t, x_d, c_b, c_h, c_p, c_r, r_b, r_h, r_p, r_r, r_z, s_b, s_h, s_p, first, tiles,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr, W: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr,
    LLOYD: tl.constexpr, KEYS: tl.constexpr, CENTRED: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    """One program: `TILE` rows of one block, one group of each. A row is a channel of K or a token of V.

    Strides of codes and ranges: batch, head, block, row; `r_z` leads from a scale to its zero.
    """
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
    into = codes + batch * c_b + head * c_h + (first + block) * c_p + row.to(tl.int64)[:, None] * c_r + byte[None, :]
    tl.store(into, tl.sum(shifted, 2).to(tl.uint8), mask=(row < ROWS)[:, None] & (byte < BYTES)[None, :])
    into = ranges + batch * r_b + head * r_h + (first + block) * r_p + row.to(tl.int64) * r_r + w
    tl.store(into, scale, mask=row < ROWS)
    tl.store(into + r_z, zero, mask=row < ROWS)
    if SUMS:
        error = values - (zero.to(tl.float32)[:, None] + scale.to(tl.float32)[:, None] * found)
        error = _tree_sum(tl.trans(tl.where(real, error, 0.0)))
        tl.store(sums + batch * s_b + head * s_h + (first + block) * s_p + within, error, mask=within < WIDTH)
