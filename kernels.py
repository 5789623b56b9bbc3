# SPDX-License-Identifier: Apache-2.0
"""Triton kernels of the decode step, each beside its plain-PyTorch twin of the same signature.

The twin is the specification, and what runs where Triton does not: on a CPU, on a GPU older than Ampere, or without the
package (one warning says so). `usable(device)` tells which. With `TRITON_INTERPRET=1` in the environment and `on_cpu = True` the
kernels run on CPU tensors, which is how they are tested without a GPU.

All of them can stand in a CUDA graph: nothing depends on a host number that changes from step to step. The position of the
token being decoded is read from the device (`pos`, int64 `[1]`), grids cover the capacity, and programs beyond what is stored
leave early. Work is cut into pieces of a fixed size, not a fixed number, and joined in a fixed order, so that results depend
neither on the capacity nor on the run.

Shapes: `B` batch, `H` query heads, `KV` key/value heads, `G = H // KV`, `D` head_dim, `C` critical channels, `K` tokens
fetched, `M` candidates. Every offset that can pass 2^31 is computed in int64.
"""

import math
import warnings
from dataclasses import dataclass

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl

    ABSENT = False
except ImportError:
    ABSENT = True

    class _Absent:
        """Stands for triton and its language while the kernels below are defined; none is called."""

        def __getattr__(self, name):
            return self

        def __call__(self, function):
            return function

    triton = tl = _Absent()

BLOCK = 64  # tokens that share a range of a channel row; also the step in which the window's edge moves
on_cpu = False  # tests set it, to run the kernels on CPU tensors through Triton's interpreter; slow
_warned = False


def usable(device: torch.device) -> bool:
    """Do the kernels run on this device? Warns once where a GPU has to do without."""
    global _warned
    if device.type != "cuda":
        return on_cpu
    reason = "the package triton is missing" if ABSENT else None
    if reason is None and torch.cuda.get_device_capability(device) < (8, 0):
        reason = f"{torch.cuda.get_device_name(device)} is older than Ampere (compute capability 8.0)"
    if reason and not _warned:
        _warned = True
        warnings.warn(f"Triton kernels are off, {reason}; plain PyTorch does the same, slower", stacklevel=2)
    return reason is None


# -------------------------------------------------------------------------------------------- sparse layers: the choice


@dataclass
class Rows:
    """Channel rows where the GPU reads them, and which of them count in this step.

    Attributes:
        planes: as `offload.row_planes` has them, `[B, KV, S, blocks * elements]`, S slots, of the blocks from `begin` on.
        index: int32 `[B, KV, C]`, the critical channels, ascending. slot: int32 `[B, KV, C]`, where each one's row lies.
        bits: of the planes' codes; 16: plain rows. begin: position of the first block, a multiple of 64.
    """

    planes: list[Tensor]
    index: Tensor
    slot: Tensor
    bits: int
    begin: int


@triton.jit
def _edge(pos, recent):
    """Tokens behind the window when the token at `pos` is the newest: a multiple of 64."""
    return tl.maximum(tl.load(pos) + 1 - recent, 0) // 64 * 64


@triton.jit
def _choose_kernel(q, kmax, index, slot, missing, held, stamp, pos, C, R, D, G: tl.constexpr, AUTHORS: tl.constexpr, LRU: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr):
    head = tl.program_id(0)
    d = tl.arange(0, BLOCK_D)
    total = tl.zeros([BLOCK_D], tl.float32)
    for g in tl.static_range(G):
        x = tl.load(q + (head * G + g) * D + d, mask=d < D, other=0.0).to(tl.float32)
        total += x if AUTHORS else tl.abs(x)
    size = tl.where(d < D, tl.abs(total) / G * tl.load(kmax + head * D + d, mask=d < D, other=0.0).to(tl.float32), -1.0)
    before = (size[:, None] > size[None, :]) | ((size[:, None] == size[None, :]) & (d[:, None] < d[None, :]))
    chosen = tl.sum(before.to(tl.int32), 0) < C
    place = tl.cumsum(chosen.to(tl.int32), 0) - 1
    tl.store(index + head * C + place, d, mask=chosen)
    if LRU:
        r = tl.arange(0, BLOCK_R)
        real = r < R
        channel = tl.load(held + head * R + r, mask=real, other=-1)
        used = tl.load(stamp + head * R + r, mask=real, other=0)
        match = (channel[:, None] == d[None, :]) & chosen[None, :]  # [R, D]
        hit = tl.sum(match.to(tl.int32), 1) > 0
        there = tl.sum(match.to(tl.int32), 0) > 0
        at = tl.sum(tl.where(match, r[:, None], 0), 0)
        # The n-th channel that is missing goes to the n-th slot of those not used in this step, least recently used first.
        free = real & (hit == 0)
        older = (used[:, None] < used[None, :]) | ((used[:, None] == used[None, :]) & (r[:, None] < r[None, :]))
        order = tl.sum((older & free[:, None]).to(tl.int32), 0)
        absent = chosen & (there == 0)
        turn = tl.cumsum(absent.to(tl.int32), 0) - 1
        given = (order[:, None] == turn[None, :]) & free[:, None] & absent[None, :]  # [R, D]
        at += tl.sum(tl.where(given, r[:, None], 0), 0)
        taken = tl.sum(given.to(tl.int32), 1) > 0
        tl.store(held + head * R + r, tl.where(taken, tl.sum(tl.where(given, d[None, :], 0), 1), channel), mask=real)
        tl.store(stamp + head * R + r, tl.where(hit | taken, tl.load(pos) + 1, used), mask=real)
        tl.store(slot + head * C + place, at, mask=chosen)
        tl.store(missing + head * C + place, absent.to(tl.int32), mask=chosen)


def choose_channels(q: Tensor, kmax: Tensor, authors: bool, index: Tensor, slot: Tensor, missing: Tensor, held: Tensor | None = None, stamp: Tensor | None = None, pos: Tensor | None = None) -> None:
    """The critical channels (TailorKV eq. 10), and where their rows lie among `R` resident slots a KV head.

    Args:
        q: `[B, H, 1, D]`; kmax: the largest |K| over the candidates `[B, KV, D]`; authors: see `retrieval`.
        index, slot, missing: outputs, int32 `[B, KV, C]`: channels ascending, their slots, and 1 where the row must be fetched.
        held, stamp: int32 and int64 `[B, KV, R]`, R >= C: the channel in each slot (-1: none) and the step of its last use, both brought up
            to date: missing channels take the place of those least recently used. None: slot and missing are left alone.
        pos: int64 `[1]`, the clock of `stamp`.
    """
    B, KV, D = kmax.shape
    C, R = index.shape[2], held.shape[2] if held is not None else 0
    if not usable(q.device):
        return choose_channels_twin(q, kmax, authors, index, slot, missing, held, stamp, pos)
    G = q.shape[1] // KV
    _choose_kernel[(B * KV,)](
        q.contiguous(), kmax, index, slot, missing, held, stamp, pos, C, R, D, G=G, AUTHORS=authors, LRU=held is not None,
        BLOCK_D=triton.next_power_of_2(D), BLOCK_R=triton.next_power_of_2(max(R, 2)), num_warps=4,
    )  # fmt: skip


def choose_channels_twin(q, kmax, authors, index, slot, missing, held=None, stamp=None, pos=None) -> None:
    """See `choose_channels`."""
    from retrieval import critical_channels

    index.copy_(critical_channels(q, kmax, index.shape[2], authors))
    if held is None:
        return
    for b in range(index.shape[0]):
        for h in range(index.shape[1]):
            wanted, slots, used = index[b, h].tolist(), held[b, h].tolist(), stamp[b, h].tolist()
            free = sorted((r for r in range(len(slots)) if slots[r] not in wanted), key=lambda r: (used[r], r))
            for i, channel in enumerate(wanted):
                missing[b, h, i] = int(channel not in slots)
                r = free.pop(0) if missing[b, h, i] else slots.index(channel)
                held[b, h, r], stamp[b, h, r], slot[b, h, i] = channel, int(pos) + 1, r


# --------------------------------------------------------------------------------------- sparse layers: rows from the host

# A slab table is int64 [1 + slabs, 2 + addresses]: its first entry says how many slabs there are; then, for each, its first
# position, its size, and the addresses of its tensors as the GPU sees them. Slabs are added without moving anything.


@triton.jit
def _fetch_rows_kernel(
    table, index, slot, missing, target0, target1, pos, recent, begin, C, R, D, blocks, WIDTH: tl.constexpr,
    W0: tl.constexpr, W1: tl.constexpr, ALL: tl.constexpr, STEP: tl.constexpr, BLOCK_W0: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1)  # of B * KV * C
    wanted = True if ALL else tl.load(missing + row) != 0
    edge = _edge(pos, recent)
    first = tl.program_id(0) * STEP
    if wanted and begin + first * 64 < edge:
        head = (row // C).to(tl.int64)
        channel = tl.load(index + row).to(tl.int64)
        target = head * R + (row % C if ALL else tl.load(slot + row))
        block = first + tl.arange(0, STEP)
        inside = begin + block * 64 < edge
        for i in range(1, tl.load(table).to(tl.int32) + 1):
            start, size = tl.load(table + i * WIDTH), tl.load(table + i * WIDTH + 1)
            at = (begin + block * 64 - start) // 64
            here = inside & (begin + block * 64 >= start) & (at < size // 64)
            w = tl.arange(0, BLOCK_W0)
            source = tl.multiple_of(tl.load(table + i * WIDTH + 4), 16).to(tl.pointer_type(tl.int64)) + (head * D + channel) * (size // 64) * W0
            mask = here[:, None] & (w < W0)[None, :]
            words = tl.load(source + at[:, None] * W0 + w[None, :], mask=mask)
            tl.store(target0 + (target * blocks + block)[:, None] * W0 + w[None, :], words, mask=mask)
            if W1 > 0:
                source = tl.multiple_of(tl.load(table + i * WIDTH + 5), 16).to(tl.pointer_type(tl.int32)) + (head * D + channel) * (size // 64)
                tl.store(target1 + target * blocks + block, tl.load(source + at, mask=here), mask=here)


def fetch_rows(table: Tensor, rows: Rows, missing: Tensor | None, channels: int, pos: Tensor, recent: int) -> None:
    """Copy channel rows from host memory, read in place, to the planes of `rows`.

    Args:
        table: of slabs, on the device. rows: `index` says which, `slot` whereto; missing: int32 `[B, KV, C]`, only where it is 1; None: all,
            the i-th to slot i. channels: D, rows that a slab has for each KV head.
    """
    B, KV, C = rows.index.shape
    R, step = rows.planes[0].shape[2], 64
    each = rows.planes[0].element_size() * rows.planes[0].shape[3]
    words = [plane.view(torch.int64 if i == 0 else torch.int32) for i, plane in enumerate(rows.planes)]
    blocks = words[1].shape[3] if rows.bits < 16 else each // (BLOCK * rows.planes[0].element_size())
    W0 = words[0].shape[3] // blocks
    _fetch_rows_kernel[(triton.cdiv(blocks, step), B * KV * C)](
        table, rows.index, rows.slot, missing, words[0], words[-1], pos, recent, rows.begin, C, R, channels, blocks, WIDTH=table.shape[1],
        W0=W0, W1=len(words) - 1, ALL=missing is None, STEP=step, BLOCK_W0=triton.next_power_of_2(W0), num_warps=4,
    )  # fmt: skip


# ------------------------------------------------------------------------------------- sparse layers: scores and selection


@dataclass
class Scratch:
    """What scoring and selection write, for all layers in turn; `N` positions from the first candidate's block on, a multiple of `CHUNK`.

    Attributes:
        scores: float32 `[B, KV, N, G]`, times log2(e); minus infinity where there is no candidate. largest, mass: of each `CHUNK`, their
            maximum and the sum of their exponentials (base 2) over it, `[B, H, N / CHUNK]`.
        importance: `[B, KV, N]` as `ordered` integers; peaks: its maximum over each `PEAK` positions.
        blocks: int32 `[B, KV, K or more]`, peaks that are looked under.
    """

    CHUNK = 512

    def __init__(self, head: tuple[int, int], G: int, positions: int, topk: int, device: torch.device):
        B, KV = head
        N = -(-positions // self.CHUNK) * self.CHUNK
        self.positions, self.topk, self.G = N, topk, G
        # About as many peaks as positions under the chosen peaks: the fewest numbers to look at in all.
        self.peak = min(64, max(8, 2 ** round(math.log2(max(N / max(topk, 1), 1)) / 2)))
        self.scores = torch.empty(B, KV, N, G, dtype=torch.float32, device=device)
        self.largest, self.mass = (torch.empty(B, KV * G, N // self.CHUNK, dtype=torch.float32, device=device) for _ in range(2))
        self.importance = torch.empty(B, KV, N, dtype=torch.int32, device=device)
        self.peaks = torch.empty(B, KV, N // self.peak, dtype=torch.int32, device=device)
        self.slots = 2 ** math.ceil(math.log2(max(topk, 1)))
        self.blocks = torch.empty(B, KV, self.slots, dtype=torch.int32, device=device)

    def nbytes(self) -> int:
        return sum(x.nbytes for x in (self.scores, self.largest, self.mass, self.importance, self.peaks, self.blocks))


@triton.jit
def _ordered(x):
    """float32 to int32 with the same order, -inf being the least of all numbers."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


LOG2E = tl.constexpr(1.4426950408889634)  # scores are in base 2: exp2 is what the hardware has
NOTHING = tl.constexpr(-(2**31) + 1)  # less than any number's image under `_ordered`: no candidate


@triton.jit
def _codes(words, BITS: tl.constexpr):
    """Bytes `[C, n]` to their codes `[C, n * 8 / BITS]`, lowest bits first."""
    if BITS == 4:
        words = tl.reshape(tl.join(words & 15, words >> 4), [words.shape[0], words.shape[1] * 2])
    elif BITS == 2:
        even, odd = tl.join(words & 3, (words >> 4) & 3), tl.join((words >> 2) & 3, words >> 6)
        words = tl.reshape(tl.join(even, odd), [words.shape[0], words.shape[1] * 4])
    return words


@triton.jit
def _scores_kernel(
    q, index, slot, codes, ranges, scores, largest, mass, importance, peaks, pos, scale, begin, sink, recent, C, D, N, code_head, code_row, range_head, range_row,
    G: tl.constexpr, GP: tl.constexpr, CP: tl.constexpr, BITS: tl.constexpr, CHUNK: tl.constexpr, PEAK: tl.constexpr, AUTHORS: tl.constexpr,
):  # fmt: skip
    chunk, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    edge = _edge(pos, recent)
    g = tl.arange(0, GP)
    chunks = N // CHUNK
    if begin + chunk * CHUNK >= edge:
        tl.store(largest + (head * G + g) * chunks + chunk, float("-inf"), mask=g < G)
        tl.store(mass + (head * G + g) * chunks + chunk, 0.0, mask=g < G)
        if AUTHORS:
            i = tl.arange(0, CHUNK // PEAK)
            tl.store(peaks + head * (N // PEAK) + chunk * (CHUNK // PEAK) + i, tl.full([CHUNK // PEAK], NOTHING, tl.int32))
        return
    c = tl.arange(0, CP)
    row = tl.load(slot + head * C + c, mask=c < C, other=0).to(tl.int64)
    channel = tl.load(index + head * C + c, mask=c < C, other=0)
    x = tl.load(q + (head * G + g)[None, :] * D + channel[:, None], mask=(g < G)[None, :] & (c < C)[:, None], other=0.0).to(tl.float32) * (scale * LOG2E)
    n = chunk * CHUNK + tl.arange(0, CHUNK)
    unit = tl.full([GP], 1.0, tl.float32)
    # Loads have no mask along the positions, which would make them byte by byte: rows are readable to the end of the chunk, and what is
    # read there touches no other position's score.
    if BITS == 16:
        k = tl.load(codes + head * code_head + row[:, None] * code_row + n[None, :], mask=(c < C)[:, None], other=0.0)
        if k.dtype != tl.float32:
            unit = tl.exp2(tl.ceil(tl.log2(tl.maximum(tl.max(tl.abs(x), 0), 1e-30))))
            x = (x / unit[None, :]).to(k.dtype)
    else:
        byte = chunk * (CHUNK * BITS // 8) + tl.arange(0, CHUNK * BITS // 8)
        words = tl.load(codes + head * code_head + row[:, None] * code_row + byte[None, :], mask=(c < C)[:, None], other=0)
        block = chunk * (CHUNK // 64) + tl.arange(0, CHUNK // 64)
        pair = ranges + head * range_head + row[:, None] * range_row + block[None, :] * 2
        step, zero = tl.load(pair, mask=(c < C)[:, None], other=0.0), tl.load(pair + 1, mask=(c < C)[:, None], other=0.0)
        code = _codes(words, BITS).to(tl.int16)
        if q.dtype.element_ty == tl.float32:
            k = tl.reshape(code, [CP, CHUNK // 64, 64]).to(tl.float32) * step.to(tl.float32)[:, :, None] + zero.to(tl.float32)[:, :, None]
        else:
            # float16: its ten bits hold the codes, and their ranges are stored in it. 0x6400 is 1024, whose last bit counts ones; a
            # conversion from integers runs at a quarter of the rate. Queries are brought below 1 by a power of two.
            unit = tl.exp2(tl.ceil(tl.log2(tl.maximum(tl.max(tl.abs(x), 0), 1e-30))))
            x = (x / unit[None, :]).to(tl.float16)
            k = ((code | 0x6400).to(tl.float16, bitcast=True) - 1024.0).to(tl.float16)
            k = tl.reshape(k, [CP, CHUNK // 64, 64]) * step[:, :, None] + zero[:, :, None]
        k = tl.reshape(k, [CP, CHUNK])
    score = tl.dot(tl.trans(k), x, input_precision="ieee") * unit[None, :]  # [CHUNK, G]
    candidate = (begin + n < edge) & (begin + n >= sink)
    score = tl.where(candidate[:, None], score, float("-inf"))
    tl.store(scores + (head * N + n)[:, None] * G + g[None, :], score, mask=(g < G)[None, :])
    high = tl.max(score, 0)
    total = tl.sum(tl.exp2(score - tl.where(high == float("-inf"), 0.0, high)[None, :]), 0)
    tl.store(largest + (head * G + g) * chunks + chunk, high, mask=g < G)
    tl.store(mass + (head * G + g) * chunks + chunk, total, mask=g < G)
    if AUTHORS:
        value = tl.where(candidate, _ordered(tl.sum(tl.where((g < G)[None, :], score, 0.0), 1) / G), NOTHING)
        tl.store(importance + head * N + n, value)
        tl.store(peaks + head * (N // PEAK) + chunk * (CHUNK // PEAK) + tl.arange(0, CHUNK // PEAK), tl.max(tl.reshape(value, [CHUNK // PEAK, PEAK]), 1))


@triton.jit
def _total(largest, mass, row, chunks, CHUNKS: tl.constexpr):
    """Base-2 logarithm of the sum of a row of `(largest, mass)` pairs; -inf if all are empty."""
    i = tl.arange(0, CHUNKS)
    high = tl.load(largest + row * chunks + i, mask=i < chunks, other=float("-inf"))
    top = tl.max(high, 0)
    safe = tl.where(top == float("-inf"), 0.0, top)
    return safe + tl.log2(tl.sum(tl.exp2(high - safe) * tl.load(mass + row * chunks + i, mask=i < chunks, other=0.0), 0))


@triton.jit
def _importance_kernel(scores, largest, mass, importance, peaks, pos, begin, recent, N, chunks, G: tl.constexpr, STEP: tl.constexpr, CHUNK: tl.constexpr, PEAK: tl.constexpr, CHUNKS: tl.constexpr):
    part, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    edge = _edge(pos, recent)
    if begin + part * STEP >= edge:
        i = tl.arange(0, STEP // PEAK)
        tl.store(peaks + head * (N // PEAK) + part * (STEP // PEAK) + i, tl.full([STEP // PEAK], NOTHING, tl.int32), mask=part * (STEP // PEAK) + i < N // PEAK)
        return
    n = part * STEP + tl.arange(0, STEP)
    there = (n < N) & (begin + n // CHUNK * CHUNK < edge)  # chunks beyond the edge were not written
    value = tl.zeros([STEP], tl.float32)
    nothing = n < 0
    for g in tl.static_range(G):
        score = tl.load(scores + (head * N + n) * G + g, mask=there, other=float("-inf"))
        value += tl.exp2(score - _total(largest, mass, head * G + g, chunks, CHUNKS))
        nothing = score == float("-inf")
    key = tl.where(nothing, NOTHING, _ordered(value / G))
    tl.store(importance + head * N + n, key, mask=n < N)
    i = tl.arange(0, STEP // PEAK)
    tl.store(peaks + head * (N // PEAK) + part * (STEP // PEAK) + i, tl.max(tl.reshape(key, [STEP // PEAK, PEAK]), 1), mask=part * (STEP // PEAK) + i < N // PEAK)


@triton.jit
def _threshold(x, count, limit):
    """`(low, reached)`: a threshold that `reached` of the int32 x reach, at least `count`, and at most `limit` unless values are equal.

    Two bits at a time, from the top, until the limit holds: float32 scores need about ten rounds of the sixteen.
    """
    low = tl.full([], -(2**31), tl.int32)
    reached = tl.full([], 2**30, tl.int32)
    shift = tl.full([], 30, tl.int32)
    one = tl.full([], 1, tl.int64)
    while (shift >= 0) & (reached > limit):
        step = tl.full([], 1, tl.int32) << shift
        first = low + step
        second = first + step
        third = second + step
        # Three counts, below 2^20 each, in one sum.
        counts = tl.sum(tl.where(x >= first, one, 0) + tl.where(x >= second, one << 20, 0) + tl.where(x >= third, one << 40, 0), 0)
        a = (counts & 0xFFFFF).to(tl.int32)
        b = ((counts >> 20) & 0xFFFFF).to(tl.int32)
        c = (counts >> 40).to(tl.int32)
        if a >= count:
            low = first
            reached = a
        if b >= count:
            low = second
            reached = b
        if c >= count:
            low = third
            reached = c
        shift -= 2
    return low, reached


@triton.jit
def _pick(x, count, limit):
    """Flags of the `count` largest of the int32 x, ties to the first, or of up to `limit` of the largest; never of `NOTHING`."""
    low, reached = _threshold(x, count, limit)
    low = tl.maximum(low, NOTHING)
    flags = (x >= low) & (x > NOTHING)
    if reached > limit:  # equal values at the threshold
        above = x > low
        level = flags & (x == low)
        flags = above | (level & (tl.cumsum(level.to(tl.int32), 0) <= count - tl.sum(above.to(tl.int32), 0)))
    return flags


@triton.jit
def _select_kernel(importance, peaks, blocks, chosen, begin, K, N, PEAK: tl.constexpr, PEAKS: tl.constexpr, KP: tl.constexpr):
    head = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, PEAKS)
    x = tl.load(peaks + head * (N // PEAK) + i, mask=i < N // PEAK, other=NOTHING)
    # The K best positions lie under the K best peaks: each of those stands for one position as good.
    flags = _pick(x, K, KP)
    k = tl.arange(0, KP)
    tl.store(blocks + head * KP + k, -1)
    tl.store(chosen + head * K + k, -1, mask=k < K)
    tl.debug_barrier()
    tl.store(blocks + head * KP + tl.cumsum(flags.to(tl.int32), 0) - 1, i, mask=flags)
    tl.debug_barrier()
    block = tl.load(blocks + head * KP + k)
    n = tl.reshape(block[:, None] * PEAK + tl.arange(0, PEAK)[None, :], [KP * PEAK])
    y = tl.load(importance + head * N + n, mask=n >= 0, other=NOTHING)
    flags = _pick(y, K, K)
    tl.store(chosen + head * K + tl.cumsum(flags.to(tl.int32), 0) - 1, begin + n, mask=flags)


def score_and_select(q: Tensor, rows: Rows, pos: Tensor, scale: float, sink: int, recent: int, authors: bool, scratch: Scratch, chosen: Tensor) -> None:
    """Score all candidates by the critical channels and choose the K best for each KV head.

    Args:
        q: the true query `[B, H, 1, D]`. pos: int64 `[1]`. scale: of the exact scores. sink, recent, authors: see `retrieval`.
        scratch: its scores and their log-sum-exps are filled too, for the tail.
        chosen: output, int32 `[B, KV, K]`: positions, ascending, ties to the lowest; -1 behind the last where there are fewer candidates.
    """
    B, H, _, D = q.shape
    KV, C = rows.index.shape[1:]
    s, G = scratch, H // KV
    N, chunks = s.positions, s.positions // s.CHUNK
    codes, ranges = rows.planes[0], rows.planes[-1]
    _scores_kernel[(chunks, B * KV)](
        q, rows.index, rows.slot, codes, ranges, s.scores, s.largest, s.mass, s.importance, s.peaks, pos, scale, rows.begin, sink, recent, C, D, N,
        codes.stride(1), codes.stride(2), ranges.stride(1), ranges.stride(2),
        G=G, GP=max(8, triton.next_power_of_2(G)), CP=max(16, triton.next_power_of_2(C)), BITS=rows.bits, CHUNK=s.CHUNK, PEAK=s.peak, AUTHORS=authors, num_warps=4,
    )  # fmt: skip
    if not authors:
        step = 4 * s.CHUNK
        _importance_kernel[(triton.cdiv(N, step), B * KV)](s.scores, s.largest, s.mass, s.importance, s.peaks, pos, rows.begin, recent, N, chunks, G=G, STEP=step, CHUNK=s.CHUNK, PEAK=s.peak, CHUNKS=triton.next_power_of_2(chunks), num_warps=4)
    KP, peaks = s.slots, triton.next_power_of_2(N // s.peak)
    warps = min(max(max(KP * s.peak, peaks) // 512, 1), 16)
    _select_kernel[(B * KV,)](s.importance, s.peaks, s.blocks, chosen, rows.begin, s.topk, N, PEAK=s.peak, PEAKS=peaks, KP=KP, num_warps=warps)


# -------------------------------------------------------------------------------------- sparse layers: the small attention


@triton.jit
def _gather_kernel(
    q, sink_k, sink_v, ring_k, ring_v, table, staged_k, staged_v, chosen, scores, part, lse, left, pos, scale, begin, sink, ring, recent, K, N, D, DV,
    G: tl.constexpr, GP: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, TILE: tl.constexpr, SINK_TILES: tl.constexpr, RING_TILES: tl.constexpr, WIDTH: tl.constexpr,
    STAGED: tl.constexpr, TAIL: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    head, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    kind = ring_k.dtype.element_ty
    size: tl.constexpr = kind.primitive_bitwidth // 8
    length = tl.load(pos) + 1
    edge = _edge(pos, recent)
    i = tl.arange(0, TILE).to(tl.int64)
    g = tl.arange(0, GP)
    hat = tl.full([GP], float("-inf"), tl.float32)
    # Addresses as numbers, since the rows lie in different tensors.
    if tile < SINK_TILES:
        row = tile * TILE + i
        valid = row < tl.minimum(sink, length)
        at_k = sink_k.to(tl.int64) + (head * sink + row) * D * size
        at_v = sink_v.to(tl.int64) + (head * sink + row) * DV * size
    elif tile < SINK_TILES + RING_TILES:
        p = tl.maximum(edge, sink) + (tile - SINK_TILES) * TILE + i
        valid = p < length
        at_k = ring_k.to(tl.int64) + (head * ring + p % ring) * D * size
        at_v = ring_v.to(tl.int64) + (head * ring + p % ring) * DV * size
    else:
        n = (tile - SINK_TILES - RING_TILES) * TILE + i
        p = tl.load(chosen + head * K + n, mask=n < K, other=-1).to(tl.int64)
        valid = p >= 0
        if STAGED:
            at_k = staged_k.to(tl.int64) + (head * K + n) * D * size
            at_v = staged_v.to(tl.int64) + (head * K + n) * DV * size
        else:
            at_k = tl.zeros([TILE], tl.int64)
            at_v = tl.zeros([TILE], tl.int64)
            for j in range(1, tl.load(table).to(tl.int32) + 1):
                start, rows = tl.load(table + j * WIDTH), tl.load(table + j * WIDTH + 1)
                here = valid & (p >= start) & (p < start + rows)
                row = head * rows + p - start
                at_k = tl.where(here, tl.load(table + j * WIDTH + 2) + row * D * size, at_k)
                at_v = tl.where(here, tl.load(table + j * WIDTH + 3) + row * DV * size, at_v)
        if TAIL:
            hats = tl.load(scores + (head * N + p - begin)[None, :] * G + g[:, None], mask=(g < G)[:, None] & valid[None, :], other=float("-inf"))
            high = tl.max(hats, 1)
            safe = tl.where(high == float("-inf"), 0.0, high)
            hat = safe + tl.log2(tl.sum(tl.exp2(hats - safe[:, None]), 1))
    d = tl.arange(0, BLOCK_D)
    dv = tl.arange(0, BLOCK_DV)
    k = tl.load(tl.multiple_of(at_k, ALIGN).to(tl.pointer_type(kind))[:, None] + d[None, :], mask=valid[:, None] & (d < D)[None, :], other=0.0).to(tl.float32)
    v = tl.load(tl.multiple_of(at_v, ALIGN).to(tl.pointer_type(kind))[:, None] + dv[None, :], mask=valid[:, None] & (dv < DV)[None, :], other=0.0).to(tl.float32)
    x = tl.load(q + (head * G + g)[:, None] * D + d[None, :], mask=(g < G)[:, None] & (d < D)[None, :], other=0.0).to(tl.float32)
    s = tl.where(valid[None, :], tl.sum(x[:, None, :] * k[None, :, :], 2) * (scale * LOG2E), float("-inf"))
    high = tl.max(s, 1)
    w = tl.exp2(s - tl.where(high == float("-inf"), 0.0, high)[:, None])
    total = tl.sum(w, 1)
    o = tl.sum(w[:, :, None] * v[None, :, :], 1) / tl.where(total == 0.0, 1.0, total)[:, None]
    at = (head * G + g) * tl.num_programs(1) + tile
    tl.store(part + at[:, None] * DV + dv[None, :], o, mask=(g < G)[:, None] & (dv < DV)[None, :])
    tl.store(lse + at, tl.where(total == 0.0, float("-inf"), high + tl.log2(total)), mask=g < G)
    if TAIL:
        tl.store(left + at, hat, mask=g < G)


@triton.jit
def _join_kernel(part, lse, left, largest, mass, vsum, out, pos, sink, recent, K, tiles, chunks, DV, G: tl.constexpr, BLOCK_DV: tl.constexpr, TILES: tl.constexpr, CHUNKS: tl.constexpr, TAIL: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)  # of B * H
    i = tl.arange(0, TILES)
    dv = tl.arange(0, BLOCK_DV)
    weight = tl.load(lse + row * tiles + i, mask=i < tiles, other=float("-inf"))
    high = tl.max(weight, 0)
    if TAIL:
        everything = _total(largest, mass, row, chunks, CHUNKS)
        high = tl.maximum(high, everything)
    weight = tl.exp2(weight - high)
    o = tl.sum(weight[:, None] * tl.load(part + (row * tiles + i)[:, None] * DV + dv[None, :], mask=(i < tiles)[:, None] & (dv < DV)[None, :], other=0.0), 0)
    total = tl.sum(weight, 0)
    if TAIL:
        count = _edge(pos, recent) - sink
        fetched = tl.sum(tl.exp2(tl.load(left + row * tiles + i, mask=i < tiles, other=float("-inf")) - high), 0)
        rest = tl.where(count > K, tl.maximum(tl.exp2(everything - high) - fetched, 0.0), 0.0)
        mean = (tl.load(vsum + row // G * DV + dv, mask=dv < DV, other=0.0) / tl.maximum(count, 1)).to(tl.float32)
        o += rest * mean
        total += rest
    tl.store(out + row * DV + dv, (o / total).to(out.dtype.element_ty), mask=dv < DV)


def gather_attention(
    q: Tensor, sink: tuple[Tensor, Tensor], ring: tuple[Tensor, Tensor], table: Tensor | None, staged: tuple[Tensor, Tensor] | None, chosen: Tensor,
    pos: Tensor, scale: float, recent: int, begin: int, scratch: Scratch, vsum: Tensor | None,
) -> Tensor:  # fmt: skip
    """Exact attention over sink, chosen tokens and window; with `vsum`, the mass of the candidates left out goes to their mean value.

    Args:
        q: `[B, H, 1, D]`. sink, ring: K and V, `[B, KV, sink, D]` and `[B, KV, slots, D]`. chosen: int32 `[B, KV, K]`, -1: none.
        table: of slabs, whose K and V rows are read in place in host memory; or staged: the rows themselves, `[B, KV, K, D]`.
        begin: position of the first score. vsum: the candidates' sum of V, float64 `[B, KV, Dv]`.

    Returns:
        `[B, H, 1, Dv]` in q's dtype.
    """
    B, H, _, D = q.shape
    KV, K, DV = chosen.shape[1], chosen.shape[2], sink[1].shape[3]
    n_sink, slots, G, tile, s = sink[0].shape[2], ring[0].shape[2], H // KV, 16, scratch
    # The window holds `recent` to recent + 63 tokens, and the ring a block more.
    counts = [-(-n_sink // tile), -(-(recent + BLOCK - 1) // tile), -(-K // tile)]
    tiles = sum(counts)
    part = torch.empty(B * H, tiles, DV, dtype=torch.float32, device=q.device)
    lse, left = (torch.empty(B * H, tiles, dtype=torch.float32, device=q.device) for _ in range(2))
    staged_k, staged_v = staged or ring
    _gather_kernel[(B * KV, tiles)](
        q, *sink, *ring, table, staged_k, staged_v, chosen, s.scores, part, lse, left, pos, scale, begin, n_sink, slots, recent, K, s.positions, D, DV,
        G=G, GP=triton.next_power_of_2(G), BLOCK_D=triton.next_power_of_2(D), BLOCK_DV=triton.next_power_of_2(DV), TILE=tile,
        SINK_TILES=counts[0], RING_TILES=counts[1], WIDTH=table.shape[1] if table is not None else 0, STAGED=table is None, TAIL=vsum is not None,
        ALIGN=math.gcd(16, D * q.element_size(), DV * q.element_size()), num_warps=4,
    )  # fmt: skip
    out = torch.empty(B, H, 1, DV, dtype=q.dtype, device=q.device)
    chunks = s.largest.shape[2]
    _join_kernel[(B * H,)](
        part, lse, left, s.largest, s.mass, vsum, out, pos, n_sink, recent, K, tiles, chunks, DV,
        G=G, BLOCK_DV=triton.next_power_of_2(DV), TILES=triton.next_power_of_2(tiles), CHUNKS=triton.next_power_of_2(chunks), TAIL=vsum is not None, num_warps=4,
    )  # fmt: skip
    return out


# ------------------------------------------------------------------------------------------------------------- appending


@triton.jit
def _append_kernel(k, v, held_k, held_v, pos, slots, k_stride, v_stride, D, DV, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr):
    head = tl.program_id(0).to(tl.int64)
    at = head * slots + tl.load(pos) % slots
    d, dv = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    tl.store(held_k + at * D + d, tl.load(k + head * k_stride + d, mask=d < D), mask=d < D)
    tl.store(held_v + at * DV + dv, tl.load(v + head * v_stride + dv, mask=dv < DV), mask=dv < DV)


def append(k: Tensor, v: Tensor, held_k: Tensor, held_v: Tensor, pos: Tensor) -> None:
    """Write k, v `[B, KV, 1, D]` to row `pos % slots` of `held_k, held_v [B, KV, slots, D]`."""
    if not usable(k.device):
        at = pos % held_k.shape[2]
        held_k.index_copy_(2, at, k)
        held_v.index_copy_(2, at, v)
        return
    B, KV, _, D = k.shape
    k, v = (x if x.stride(3) == 1 and (B == 1 or x.stride(0) == KV * x.stride(1)) else x.contiguous() for x in (k, v))
    _append_kernel[(B * KV,)](k, v, held_k, held_v, pos, held_k.shape[2], k.stride(1), v.stride(1), D, v.shape[3], BLOCK_D=triton.next_power_of_2(D), BLOCK_DV=triton.next_power_of_2(v.shape[3]), num_warps=1)
