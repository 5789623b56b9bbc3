# SPDX-License-Identifier: Apache-2.0
"""Triton kernels of a sparsity-friendly layer (TailorKV, section 4.2). What `kernels.py` says of its kernels holds for these, too.

    choose_channels    the critical channels, and which of their rows must be fetched
    fetch_rows         those rows, read in place from pinned host memory
    estimate, weigh    approximate scores of some candidates; how much each of all matters
    select             the K that matter most
    fetch_tokens       their K and V, read in place from the host, where there is time before they are needed
    gather_attention   attention over sink, chosen tokens (read in place from the host) and window, with the tail
    encode_channels    before all that: the channel rows of blocks on their way to the host, in the twin's bytes
    encode_tokens      ... their K and V in 8 bits (round_shared: what is left of them)
    block_statistics   their largest |K| and sums of V
    moments            and their products of K and V

Their twins are the functions of `retrieval.py` and `offload.py`, which run them one by one.

Shapes: `B` batch, `H` query heads, `KV` key/value heads, `G = H // KV`, `D` head_dim, `Dv` of values, `C` critical channels,
`K` tokens fetched.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels import _encode_blocks, _launch, _power, _wait, _wait_first, tl, triton, usable
from quant import SHARED, shared_range, token_row

BLOCK = 64  # tokens that move to the host together, and share a range of a channel row; the step in which the window's edge moves


# -------------------------------------------------------------------------------------------------------------- channels


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


# ---------------------------------------------------------------------------------------------------- rows from the host

# A slab table is int64 [1 + slabs, 2 + addresses]: its first entry says how many slabs there are; then, for each, its first
# position, its size, and the addresses, as the GPU sees them, of K, V (whose rows lie side by side, K first) and channel rows. Slabs are
# added without moving anything.


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


# -------------------------------------------------------------------------------------------------- scores and selection


GATHER_TILE = (8, 4)  # tokens and warps a program of `gather_attention`, and of `fetch_tokens`
SELECT_EACH = 512  # numbers a warp of the selection
CHUNK = 1024  # positions a program scores
FEWEST = 8  # blocks of a sample, if there are so many


class Sample:
    """Scores of the candidates of some blocks (see `stride`), one block behind the other, for all layers in turn; they stand for all `positions`.

    Attributes:
        scores: float32 `[B, H, N]`, times log2(e); minus infinity where there is no candidate; in `_place`'s order.
        stats: `[5, B, H, N / CHUNK + near]`: of each `CHUNK`, the scores' maximum, the sum of 2^(score - maximum), the mean score weighted so, the plain
            mean, and the sum of squares around it; behind them the first two of each of `near` blocks of sink and window.
    """

    def __init__(self, head: tuple[int, int], G: int, positions: int, device: torch.device, near: int = 0):
        (B, KV), self.near = head, near
        N = max(2 * FEWEST, -(-positions // BLOCK // 8) + 1) * BLOCK
        self.positions = -(-N // CHUNK) * CHUNK
        self.scores = torch.empty(B, KV * G, self.positions, dtype=torch.float32, device=device)
        self.stats = torch.empty(5, B, KV * G, self.positions // CHUNK + near, dtype=torch.float32, device=device)

    def nbytes(self) -> int:
        return self.scores.nbytes + self.stats.nbytes


class Scratch:
    """What scoring and selection write, for all layers in turn; `N` positions from the first candidate's block on, a multiple of `CHUNK`.

    Attributes:
        chooses, attends: a `Sample` by the query that chooses tokens, with sink and window, and by that which attends: with `ahead` two, else the same.
        mass: float32 `[B, KV]`, the candidates' share of all attention, a mean over the group.
        importance: `[B, KV, N]` as `ordered` integers; peaks: its maximum over each `peak` positions.
        blocks: int32 `[B, KV, K or more]`, the peaks that are looked under, for the largest K of any layer.
    """

    def __init__(self, head: tuple[int, int], G: int, positions: int, topk: int, device: torch.device, near: int = 0, ahead: bool = False):
        B, KV = head
        self.positions = N = -(-positions // CHUNK) * CHUNK
        self.chooses = Sample(head, G, positions, device, near)
        self.attends = Sample(head, G, positions, device) if ahead else self.chooses
        wide = 2 ** math.ceil(math.log2(max(topk, 1)))
        # About as many peaks as positions under the chosen peaks: the fewest numbers to look at in all.
        self.peak = min(128, max(8, 2 ** round(math.log2(max(N / wide, 1)) / 2)))
        self.mass = torch.empty(B, KV, dtype=torch.float32, device=device)
        self.importance = torch.empty(B, KV, N, dtype=torch.int32, device=device)
        self.peaks = torch.empty(B, KV, N // self.peak, dtype=torch.int32, device=device)
        self.blocks = torch.empty(B, KV, wide, dtype=torch.int32, device=device)

    def nbytes(self) -> int:
        samples = {id(sample): sample.nbytes() for sample in (self.chooses, self.attends)}
        return sum(samples.values()) + sum(x.nbytes for x in (self.mass, self.importance, self.peaks, self.blocks))


def stride(blocks: int) -> int:
    """Of so many blocks of candidates, a sample has those b with b % stride == stride // 2: at least `FEWEST` of them, stride being at most 8."""
    return next(s for s in (8, 4, 2, 1) if s == 1 or blocks >= s * FEWEST)


@triton.jit
def _sampled(edge, begin, sink, FEWEST: tl.constexpr):
    """`stride`, and the candidates' first and last + 1 among the sample's positions, which are counted from `begin` on, one block behind the other."""
    blocks = (edge - begin) // 64
    stride = tl.where(blocks >= 8 * FEWEST, 8, tl.where(blocks >= 4 * FEWEST, 4, tl.where(blocks >= 2 * FEWEST, 2, 1))).to(tl.int64)
    return stride, tl.where(stride == 1, sink - begin, 0), (blocks + stride - 1 - stride // 2) // stride * 64


@triton.jit
def _looked_at(n, stride, positions):
    """The n-th block of a sample; behind the last one, any."""
    return tl.minimum(n * stride + stride // 2, positions // 64 - 1)


@triton.jit
def _ordered(x):
    """float32 to int32 with the same order, -inf being the least of all numbers."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


LOG2E = tl.constexpr(1.4426950408889634)  # scores are in base 2: exp2 is what the hardware has
NOTHING = tl.constexpr(-(2**31) + 1)  # less than any number's image under `_ordered`: no candidate


@triton.jit
def _place(n, EACH: tl.constexpr, CHUNK: tl.constexpr):
    """Where the score of the n-th position lies: all first codes of a chunk's words, EACH codes each, together, then all second ones."""
    return n // CHUNK * CHUNK + n % EACH * (CHUNK // EACH) + n % CHUNK // EACH


@triton.jit
def _key(words, step, zero, i: tl.constexpr, BITS: tl.constexpr, EXACT: tl.constexpr, NATIVE: tl.constexpr):
    """zero + step * code of each word's i-th code, float16 (float32 if EXACT); at 16 bits the word itself."""
    if BITS == 16:
        key = words if NATIVE else words.to(tl.float32)  # the interpreter multiplies bfloat16 as if it were integers
    elif NATIVE and not EXACT:
        # Two words at a time. A code in the last bits of 1024, as a float16, is 1024 + code; a conversion from integers runs at a quarter of the rate.
        half: tl.constexpr = i * BITS // 16 if BITS == 4 else 0
        pair: tl.constexpr = f"prmt.b32 c, $1, $2, {0x5410 + half * 0x2222}; shr.u32 c, c" if BITS == 4 else "shr.u32 c, $1"
        last: tl.constexpr = "$3, $4" if BITS == 4 else "$2, $3"
        key = tl.inline_asm_elementwise(
            f"""{{
                .reg .b32 c, mask, big;
                mov.b32 mask, {(2**BITS - 1) * 65537};
                mov.b32 big, 0x64006400;
                {pair}, {i * BITS - half * 16};
                lop3.b32 c, c, mask, big, 0xEA;
                mov.b32 big, 0xE400E400;
                add.rn.f16x2 c, c, big;
                fma.rn.f16x2 $0, c, {last};
            }}""",
            "=r,r,r,r,r" if BITS == 4 else "=r,r,r,r", [words, step, zero], dtype=tl.float16, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        key = ((words.to(tl.int32) >> (i * BITS)) & (2**BITS - 1)).to(tl.float32) * step.to(tl.float32) + zero.to(tl.float32)
    return key


@triton.jit
def _critical(index, slot, head, start, C, STEP: tl.constexpr):
    """Critical channels of a KV head, STEP of them from the `start`-th on, and where their rows lie.

    Asked for before anything is known of the position, they arrive with it: while the matrices of the layer before are read, memory answers after 2 to 4 us.
    """
    c = start + tl.arange(0, STEP)
    return tl.load(index + head * C + c, mask=c < C, other=0), tl.load(slot + head * C + c, mask=c < C, other=0).to(tl.int64)


@triton.jit
def _halves(pair, NATIVE: tl.constexpr):
    """The two float16 numbers of each int32."""
    if NATIVE:  # of two neighbours at a time, as `_key` wants them
        low = tl.inline_asm_elementwise("prmt.b32 $0, $1, $2, 0x5410;", "=r,r,r", [pair], dtype=tl.float16, is_pure=True, pack=2)
        high = tl.inline_asm_elementwise("prmt.b32 $0, $1, $2, 0x7632;", "=r,r,r", [pair], dtype=tl.float16, is_pure=True, pack=2)
    else:
        low, high = (pair & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True), (pair >> 16).to(tl.int16).to(tl.float16, bitcast=True)
    return low, high


@triton.jit
def _queries(q, channel, head, start, g, D, C, G: tl.constexpr, BITS: tl.constexpr, EXACT: tl.constexpr, NATIVE: tl.constexpr):
    """Of some channels from the `start`-th on, the queries, `[STEP, columns]`."""
    real = start + tl.arange(0, channel.shape[0]) < C
    x = tl.load(q + (head * G + g)[None, :] * D + channel[:, None], mask=(g < G)[None, :] & real[:, None], other=0.0)
    if EXACT or not NATIVE:
        x = x.to(tl.float32)
    elif BITS < 16:
        x = x.to(tl.float16)
    return x


@triton.jit
def _keys(codes, ranges, row, head, word, block, code_head, code_row, range_head, range_row, BITS: tl.constexpr, EACH: tl.constexpr, NATIVE: tl.constexpr):
    """Words of some rows, `[words, STEP]`, with step and zero of their `block [blocks]`.

    The compiler puts the exchange of words between threads right behind their load, and what is loaded after them waits for them: so they come last.
    """
    STEP: tl.constexpr = row.shape[0]
    WORDS: tl.constexpr = 64 // EACH  # of a block
    BLOCKS: tl.constexpr = block.shape[0]
    if BITS < 16:
        pair = tl.load(ranges + head * range_head + row[None, :] * range_row + block[:, None])
    # Loads have no mask along the positions, which would make them two bytes at a time: rows are readable to the end of the chunk, and
    # what is read there touches no other position's score.
    words = tl.load(codes + head * code_head + row[None, :] * code_row + word[:, None])
    step, zero = words, words
    if BITS < 16:
        pair = tl.reshape(tl.broadcast_to(pair[:, None, :], [BLOCKS, WORDS, STEP]), [BLOCKS * WORDS, STEP])
        step, zero = _halves(pair, NATIVE)
    return words, step, zero


@triton.jit
def _some_scores(acc, words, step, zero, x, offset, first: tl.constexpr, PER: tl.constexpr, BITS: tl.constexpr, EXACT: tl.constexpr, NATIVE: tl.constexpr):
    """`acc [words, columns]` plus keys times queries, of the words' codes from `first` on: the j-th of PER where a column's `offset` is j."""
    for j in tl.static_range(PER):
        key = _key(words, step, zero, first + j, BITS, EXACT, NATIVE)
        mine = x if PER == 1 else tl.where((offset == j)[None, :], x, 0.0).to(x.dtype)
        acc = tl.dot(key, mine, acc, input_precision="ieee")
    return acc


@triton.jit
def _approximate(q, index, slot, codes, ranges, words, step, zero, x, head, word, block, g, offset, code_head, code_row, range_head, range_row, D, C: tl.constexpr, STEP: tl.constexpr, G: tl.constexpr, PER: tl.constexpr, BITS: tl.constexpr, EACH: tl.constexpr, EXACT: tl.constexpr, NATIVE: tl.constexpr):
    """Keys times queries, over all critical channels, of which the first operands are there: `[words, columns]`, one for each round of PER codes of a word, four at most.

    A matrix of words of 16 or 32 bits, EACH codes of a channel's row in a word, times queries. The tensor cores want words of two channels side by
    side; as words, not as codes, they are exchanged between threads, which then unpack what they multiply. A column is a query head and,
    since a product has no fewer than 8 columns, one of PER codes of the word.
    """
    ROUNDS: tl.constexpr = EACH // PER
    a0 = tl.zeros([words.shape[0], x.shape[1]], tl.float32)
    a1, a2, a3 = a0, a0, a0
    for start in tl.static_range(0, C, STEP):
        if start > 0:
            channel, row = _critical(index, slot, head, start, C, STEP)
            x = _queries(q, channel, head, start, g, D, C, G, BITS, EXACT, NATIVE)
            words, step, zero = _keys(codes, ranges, row, head, word, block, code_head, code_row, range_head, range_row, BITS, EACH, NATIVE)
        a0 = _some_scores(a0, words, step, zero, x, offset, 0, PER, BITS, EXACT, NATIVE)
        if ROUNDS > 1:
            a1 = _some_scores(a1, words, step, zero, x, offset, PER, PER, BITS, EXACT, NATIVE)
        if ROUNDS > 2:
            a2 = _some_scores(a2, words, step, zero, x, offset, 2 * PER, PER, BITS, EXACT, NATIVE)
            a3 = _some_scores(a3, words, step, zero, x, offset, 3 * PER, PER, BITS, EXACT, NATIVE)
    return a0, a1, a2, a3


@triton.jit
def _candidates(acc, column, at, offset, low, high):
    """Scores of candidates, minus infinity elsewhere; `at`: position of each word's first code."""
    past = (at[:, None] + offset[None, :] - low).to(tl.uint32)  # of the first candidate; what lies before it is a large number
    return tl.where(past < (high - low).to(tl.uint32), acc * column[None, :], float("-inf"))


@triton.jit
def _spread(score, high):
    """2^(score - high), the distance from high, their product, and the distance's square; 0 where there is no candidate."""
    off = score - high[None, :]
    weight = tl.exp2(off)
    off = tl.where(off == float("-inf"), 0.0, off)
    return weight, weight * off, off, off * off


@triton.jit
def _fold(x, PER: tl.constexpr, GP: tl.constexpr):
    return tl.sum(tl.reshape(x, [PER, GP]), 0)


@triton.jit
def _near(q, sink_k, ring_k, stats, stat, slots, chunk, tile, pos, scale, sink, ring, edge, head, D, G: tl.constexpr, GN: tl.constexpr, BLOCK_D: tl.constexpr, SINK_TILES: tl.constexpr, NEWEST: tl.constexpr, NATIVE: tl.constexpr):
    """The largest score, and the sum of exponentials, of 64 tokens of sink or window; the newest token is not there yet without NEWEST."""
    g = tl.arange(0, GN)
    i = tl.arange(0, 64)
    d = tl.arange(0, BLOCK_D)
    length = tl.load(pos).to(tl.int32) + NEWEST
    from_sink = tile < SINK_TILES
    p = tl.where(from_sink, tile * 64, tl.maximum(edge.to(tl.int32), sink) + (tile - SINK_TILES) * 64) + i
    valid = p < tl.where(from_sink, tl.minimum(sink, length), length)
    rows, held = tl.where(from_sink, sink, ring), tl.where(from_sink, p, p % ring)
    base = sink_k if from_sink else ring_k
    k = tl.load(base + (head * rows + held)[:, None] * D + d[None, :], mask=valid[:, None] & (d < D)[None, :], other=0.0)
    x = tl.load(q + (head * G + g)[None, :] * D + d[:, None], mask=(g < G)[None, :] & (d < D)[:, None], other=0.0)
    if not NATIVE:
        k, x = k.to(tl.float32), x.to(tl.float32)
    s = tl.where(valid[:, None], tl.dot(k, x, input_precision="ieee") * (scale * LOG2E), float("-inf"))
    high = tl.max(s, 0)
    total = tl.sum(tl.exp2(s - tl.where(high == float("-inf"), 0.0, high)[None, :]), 0)
    at = stats + (head * G + g) * slots + chunk
    tl.store(at, high, mask=g < G)
    tl.store(at + stat, total, mask=g < G)


@triton.jit
def _sums(stats, stat, rows, real, slots, count, SLOTS: tl.constexpr):
    """Maxima and sums of exponentials of the first `count` of each row's slots, for some heads."""
    i = tl.arange(0, SLOTS)
    at, mask = stats + rows[:, None] * slots + i[None, :], real[:, None] & (i < count)[None, :]
    return tl.load(at, mask=mask, other=float("-inf")), tl.load(at + stat, mask=mask, other=0.0)


@triton.jit
def _total(high, sums):
    """Base-2 logarithm of the sum of all exponentials; -inf if there are none."""
    top = tl.max(high, 1)
    safe = tl.where(top == float("-inf"), 0.0, top)
    return safe + tl.log2(tl.sum(tl.exp2(high - safe[:, None]) * sums, 1))


@triton.jit
def _share(acc, column, total, at, low, high, G: tl.constexpr, GP: tl.constexpr, PER: tl.constexpr, AUTHORS: tl.constexpr):
    """`retrieval.importance` as ordered integers `[words, PER]`; `at`: position of each word's first code."""
    g = tl.arange(0, GP * PER) % GP
    value = acc * column[None, :]
    if not AUTHORS:
        value = tl.where((g < G)[None, :], tl.exp2(tl.minimum(value - total[None, :], 64.0)), 0.0)
    value = tl.sum(tl.reshape(value, [acc.shape[0], PER, GP]), 2) / G
    if AUTHORS:
        value = tl.where(value == value, value, float("inf"))  # NaN is the largest, as in torch.topk
    past = (at[:, None] + tl.arange(0, PER)[None, :] - low).to(tl.uint32)
    return tl.where(past < (high - low).to(tl.uint32), _ordered(value), NOTHING)


@triton.jit
def _sample(
    q, index, slot, codes, ranges, scores, stats, pos, scale, begin, sink, recent, D, N, code_head, code_row, range_head, range_row, stat, slots, chunk, head,
    FEWEST: tl.constexpr, C: tl.constexpr, STEP: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, PER: tl.constexpr, BITS: tl.constexpr, EACH: tl.constexpr, CHUNK: tl.constexpr, EXACT: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Scores of a chunk of a sample, and their statistics."""
    channel, row = _critical(index, slot, head, 0, C, STEP)
    edge = _edge(pos, recent)
    stride, low, high = _sampled(edge, begin, sink, FEWEST)
    group = tl.arange(0, GP)
    stats += (head * G + group) * slots + chunk
    if chunk * CHUNK >= high:
        tl.store(stats, float("-inf"), mask=group < G)
        tl.store(stats + stat, 0.0, mask=group < G)
    else:
        ROUNDS: tl.constexpr = EACH // PER
        M: tl.constexpr = CHUNK // EACH
        n = tl.arange(0, GP * PER)
        g, offset = n % GP, n // GP
        m = tl.arange(0, M)
        block = _looked_at(chunk * (CHUNK // 64) + tl.arange(0, CHUNK // 64), stride, edge - begin)
        word = _looked_at(chunk * (CHUNK // 64) + m // (64 // EACH), stride, edge - begin) * (64 // EACH) + m % (64 // EACH)
        x = _queries(q, channel, head, 0, g, D, C, G, BITS, EXACT, NATIVE)
        words, step, zero = _keys(codes, ranges, row, head, word, block, code_head, code_row, range_head, range_row, BITS, EACH, NATIVE)
        a0, a1, a2, a3 = _approximate(q, index, slot, codes, ranges, words, step, zero, x, head, word, block, g, offset, code_head, code_row, range_head, range_row, D, C, STEP, G, PER, BITS, EACH, EXACT, NATIVE)
        column = tl.where(g < G, scale * LOG2E, 0.0)
        at = chunk * CHUNK + m * EACH
        to = scores + (head * G + g)[None, :] * N + chunk * CHUNK + m[:, None] + offset[None, :] * M
        real = (g < G)[None, :]
        a0 = _candidates(a0, column, at, offset, low, high)
        tl.store(to, a0, mask=real)
        most = a0
        if ROUNDS > 1:
            a1 = _candidates(a1, column, at + PER, offset, low, high)
            tl.store(to + PER * M, a1, mask=real)
            most = tl.maximum(most, a1)
        if ROUNDS > 2:
            a2 = _candidates(a2, column, at + 2 * PER, offset, low, high)
            a3 = _candidates(a3, column, at + 3 * PER, offset, low, high)
            tl.store(to + 2 * PER * M, a2, mask=real)
            tl.store(to + 3 * PER * M, a3, mask=real)
            most = tl.maximum(most, tl.maximum(a2, a3))
        count = tl.maximum(tl.minimum(high, (chunk + 1) * CHUNK) - tl.maximum(low, chunk * CHUNK), 1).to(tl.float32)
        most = tl.max(tl.reshape(tl.max(most, 0), [PER, GP]), 0)
        safe = tl.where(most == float("-inf"), 0.0, most)
        top = tl.reshape(tl.broadcast_to(safe[None, :], [PER, GP]), [PER * GP])
        weight, moved, off, square = _spread(a0, top)
        if ROUNDS > 1:
            w, x1, x2, x3 = _spread(a1, top)
            weight, moved, off, square = weight + w, moved + x1, off + x2, square + x3
        if ROUNDS > 2:
            w, x1, x2, x3 = _spread(a2, top)
            weight, moved, off, square = weight + w, moved + x1, off + x2, square + x3
            w, x1, x2, x3 = _spread(a3, top)
            weight, moved, off, square = weight + w, moved + x1, off + x2, square + x3
        weight = _fold(tl.sum(weight, 0), PER, GP)
        moved = _fold(tl.sum(moved, 0), PER, GP)
        off = _fold(tl.sum(off, 0), PER, GP)
        square = _fold(tl.sum(square, 0), PER, GP)
        # Of the chunk: the maximum, the sum of 2^(score - maximum), the mean score under those weights, the plain mean, the squares around it.
        tl.store(stats, most, mask=group < G)
        tl.store(stats + stat, weight, mask=group < G)
        tl.store(stats + 2 * stat, safe + moved / tl.maximum(weight, 1e-30), mask=group < G)
        tl.store(stats + 3 * stat, safe + off / count, mask=group < G)
        tl.store(stats + 4 * stat, tl.maximum(square - off * off / count, 0.0), mask=group < G)


@triton.jit(do_not_specialize=["slots"])
def _estimate_kernel(
    q, index, slot, codes, ranges, sink_k, ring_k, scores, stats, pos, scale, begin, sink, recent, D, N, code_head, code_row, range_head, range_row, heads, slots, near, ring,
    GN: tl.constexpr, BLOCK_D: tl.constexpr, SINK_TILES: tl.constexpr, NEWEST: tl.constexpr,
    FEWEST: tl.constexpr, C: tl.constexpr, STEP: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, PER: tl.constexpr, BITS: tl.constexpr, EACH: tl.constexpr, CHUNK: tl.constexpr, EXACT: tl.constexpr, NATIVE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A chunk of a sample; sink and window behind the last one."""
    chunk, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    _wait_first(PDL)
    stat = heads.to(tl.int64) * slots  # from one kind to the next
    if chunk >= slots - near:
        _near(q, sink_k, ring_k, stats, stat, slots, chunk, chunk - slots + near, pos, scale, sink, ring, _edge(pos, recent), head, D, G, GN, BLOCK_D, SINK_TILES, NEWEST, NATIVE)
    else:
        _sample(q, index, slot, codes, ranges, scores, stats, pos, scale, begin, sink, recent, D, N, code_head, code_row, range_head, range_row, stat, slots, chunk, head, FEWEST, C, STEP, G, GP, PER, BITS, EACH, CHUNK, EXACT, NATIVE)


@triton.jit(do_not_specialize=["slots"])
def _weigh_kernel(
    q, index, slot, codes, ranges, stats, importance, peaks, mass, pos, scale, begin, sink, recent, D, N, code_head, code_row, range_head, range_row, heads, slots, near,
    SLOTS: tl.constexpr, NEAR_SLOTS: tl.constexpr, PEAK: tl.constexpr, AUTHORS: tl.constexpr,
    FEWEST: tl.constexpr, C: tl.constexpr, STEP: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, PER: tl.constexpr, BITS: tl.constexpr, EACH: tl.constexpr, CHUNK: tl.constexpr, EXACT: tl.constexpr, NATIVE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """How much each candidate of a chunk matters: its share of the sum of all exponentials, which the sample's stand for."""
    chunk, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    if AUTHORS:
        _wait(PDL)
    channel, row = _critical(index, slot, head, 0, C, STEP)
    edge = _edge(pos, recent)
    low, high = sink - begin, edge - begin
    peaks += head * (N // PEAK) + chunk * (CHUNK // PEAK) + tl.arange(0, CHUNK // PEAK)
    if chunk * CHUNK >= high:
        if not AUTHORS:
            _wait(PDL)
        tl.store(peaks, tl.full([CHUNK // PEAK], NOTHING, tl.int32))
        return
    ROUNDS: tl.constexpr = EACH // PER
    n = tl.arange(0, GP * PER)
    g, offset = n % GP, n // GP
    m = tl.arange(0, CHUNK // EACH)
    word, block = chunk * (CHUNK // EACH) + m, chunk * (CHUNK // 64) + tl.arange(0, CHUNK // 64)
    column = tl.where(g < G, scale * LOG2E, 0.0)
    total = column
    x = _queries(q, channel, head, 0, g, D, C, G, BITS, EXACT, NATIVE)
    words, step, zero = _keys(codes, ranges, row, head, word, block, code_head, code_row, range_head, range_row, BITS, EACH, NATIVE)
    if not AUTHORS:
        _wait(PDL)  # no sooner: but for these sums, all that is read here was there before the kernel before began
        stat = heads.to(tl.int64) * slots
        highs, sums = _sums(stats, stat, head * G + g, g < G, slots, slots - near, SLOTS)
        if NEAR_SLOTS > 0:
            near_highs, near_sums = _sums(stats + slots - near, stat, head * G + g, g < G, slots, near, NEAR_SLOTS)
        _, first, last = _sampled(edge, begin, sink, FEWEST)
        own = _total(highs, sums) + tl.log2((edge - sink).to(tl.float32) / (last - first).to(tl.float32))
        total = own
        if NEAR_SLOTS > 0:
            beside = _total(near_highs, near_sums)
            top = tl.maximum(own, beside)
            total = top + tl.log2(tl.exp2(own - top) + tl.exp2(beside - top))
        if chunk == 0:
            tl.store(mass + head, tl.sum(tl.where(n < G, tl.exp2(own - total), 0.0), 0) / G)
    a0, a1, a2, a3 = _approximate(q, index, slot, codes, ranges, words, step, zero, x, head, word, block, g, offset, code_head, code_row, range_head, range_row, D, C, STEP, G, PER, BITS, EACH, EXACT, NATIVE)
    at = chunk * CHUNK + m * EACH
    importance += head * N + at[:, None] + tl.arange(0, PER)[None, :]
    key = _share(a0, column, total, at, low, high, G, GP, PER, AUTHORS)
    tl.store(importance, key)
    best = tl.max(key, 1)
    if ROUNDS > 1:
        key = _share(a1, column, total, at + PER, low, high, G, GP, PER, AUTHORS)
        tl.store(importance + PER, key)
        best = tl.maximum(best, tl.max(key, 1))
    if ROUNDS > 2:
        key = _share(a2, column, total, at + 2 * PER, low, high, G, GP, PER, AUTHORS)
        tl.store(importance + 2 * PER, key)
        best = tl.maximum(best, tl.max(key, 1))
        key = _share(a3, column, total, at + 3 * PER, low, high, G, GP, PER, AUTHORS)
        tl.store(importance + 3 * PER, key)
        best = tl.maximum(best, tl.max(key, 1))
    tl.store(peaks, tl.max(tl.reshape(best, [CHUNK // PEAK, PEAK // EACH]), 1))


@triton.jit
def _keep(x, n, into, count, limit, low, first, second, PACK: tl.constexpr):
    """Write to `into`, ascending, the n where x is among the `count` largest, ties to the first, or up to `limit` of them; never of `NOTHING`.

    Looks for a threshold that at least `count` numbers reach, and at most `limit` unless some are equal: above a `low` that `count` reach, if so many
    there are, first at `first` and `second`, from then on at thirds of what is left. The two counts go into one sum, since sums over all threads are what costs.

    Args:
        x, n: int32 `[rows, 8]`, n ascending row by row. PACK: bits for a count.

    Returns:
        The threshold.
    """
    one = tl.full([], 1, tl.int64 if PACK > 16 else tl.int32)
    high = tl.full([], 0x7F800001, tl.int32)  # more than the image of infinity
    over = tl.full([], 0, tl.int32)  # numbers that reach `high`
    reached = tl.full([], 2**30, tl.int32)
    while (reached > limit) & (high != low + 1):
        both = tl.sum(tl.where(x >= first, one, 0) + tl.where(x >= second, one << PACK, 0))
        a, b = (both & ((one << PACK) - 1)).to(tl.int32), (both >> PACK).to(tl.int32)
        if b >= count:
            low, reached = second, b
        elif a >= count:
            over = tl.where(second < high, b, over)
            low, reached, high = first, a, tl.minimum(second, high)
        else:
            over = tl.where(first < high, a, over)
            high = tl.minimum(first, high)
        step = ((high - low).to(tl.uint32) // 3).to(tl.int32) + 1
        first = low + step
        second = first + step
    # Those above the threshold, then the first of those that equal it, in one scan that counts both.
    above, level = x > low, (x == low) & (x > NOTHING)
    both = tl.where(above, one, 0) + tl.where(level, one << PACK, 0)
    rows = tl.sum(both, 1)
    both = tl.cumsum(both, 1) + (tl.cumsum(rows, 0) - rows)[:, None]
    need = tl.where(high == low + 1, limit - over, limit)
    place = ((both & ((one << PACK) - 1)) + tl.minimum(both >> PACK, need) - 1).to(tl.int32)
    tl.store(into + place, n, mask=(above | (level & (both >> PACK <= need))) & (place < limit))
    return low


@triton.jit
def _select_kernel(
    importance, peaks, blocks, chosen, guess, mass, pos, begin, sink, recent, left, least, K, N,
    PEAK: tl.constexpr, PEAKS: tl.constexpr, KP: tl.constexpr, ENOUGH: tl.constexpr, FEWEST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, KP)
    c = tl.arange(0, 8)
    i = tl.arange(0, PEAKS // 8) * 8
    j = tl.arange(0, KP * PEAK // 8) * 8
    importance += head * N
    peaks = tl.multiple_of(peaks + head * (N // PEAK), 16)
    blocks += head * KP
    chosen += head * K
    _wait(PDL)
    near = tl.maximum(tl.load(guess + head), 2**21)
    x = tl.load(peaks + i[:, None] + c[None, :], mask=(i < N // PEAK)[:, None], other=NOTHING)
    tl.store(blocks + k, -1)
    tl.store(chosen + k, -1, mask=k < K)
    tl.debug_barrier()
    # The K best positions lie under the K best peaks, since each of those stands for one position as good.
    # Where the threshold is looked for first, a tenth around the last step's, decides how long it takes, not what is found.
    low = _keep(x, i[:, None] + c[None, :], blocks, K, KP, tl.full([], NOTHING, tl.int32), near - 2**20, near + 2**20, 16 if PEAKS < 2**15 else 32)
    tl.debug_barrier()
    block = tl.load(blocks + j // PEAK)
    n = (block * PEAK + j % PEAK)[:, None] + c[None, :]
    y = tl.load(importance + n, mask=(block >= 0)[:, None], other=NOTHING)
    low = _keep(y, begin + n, chosen, K, K, low, low, tl.minimum(low, 0x7F800000 - 2**20) + 2**20, 16 if KP * PEAK < 2**15 else 32)
    tl.store(guess + head, low)
    if ENOUGH:
        tl.debug_barrier()
        edge = _edge(pos, recent)
        if edge - sink > K:
            stride, first, last = _sampled(edge, begin, sink, FEWEST)
            more = (edge - sink).to(tl.float32) / (last - first).to(tl.float32)
            _enough(importance - begin, chosen, tl.load(mass + head), stride, more, begin, left, least, K, KP)


@triton.jit
def _enough(shares, chosen, mass, stride, more, begin, left, least, K, KP: tl.constexpr):
    """`retrieval.needed`: of the chosen positions keep those without which `left` or more of the attention would be left; ascending, then -1."""
    i = tl.arange(0, KP)
    p = tl.load(chosen + i, mask=i < K, other=-1)
    key = tl.load(shares + p, mask=p >= 0, other=NOTHING)
    mine = tl.where(p >= 0, key.to(tl.float32, bitcast=True), 0.0)  # shares are positive, and their order that of their bits
    seen = tl.sum(tl.where((p - begin) // 64 % stride == stride // 2, mine, 0.0), 0) * more
    inside = tl.maximum(mass - seen, 0.0) + tl.sum(mine, 0)
    left *= 1.0 - mass + inside
    before = tl.zeros([KP], tl.float32)  # the mass of those that matter more
    rank = tl.zeros([KP], tl.int32)
    for start in range(0, KP, 16):
        j = start + tl.arange(0, 16)
        other = tl.load(chosen + j, mask=j < K, other=-1)
        theirs = tl.load(shares + other, mask=other >= 0, other=NOTHING)
        ahead = (theirs[None, :] > key[:, None]) | ((theirs[None, :] == key[:, None]) & (j[None, :] < i[:, None]))
        share = tl.where(other >= 0, theirs.to(tl.float32, bitcast=True), 0.0)
        before += tl.sum(tl.where(ahead, share[None, :], 0.0), 1)
        rank += tl.sum(ahead.to(tl.int32), 1)
    keep = (p >= 0) & ((inside - before >= left) | (rank < least))
    place = tl.cumsum(keep.to(tl.int32), 0) - 1
    tl.debug_barrier()
    tl.store(chosen + i, -1, mask=i < K)
    tl.debug_barrier()
    tl.store(chosen + place, p, mask=keep)


def estimate(q: Tensor, rows: Rows, pos: Tensor, scale: float, sink: int, recent: int, sample: Sample, near: tuple[Tensor, Tensor] | None = None, newest: bool = True) -> None:
    """Score the candidates of some blocks by the critical channels.

    Args:
        q: `[B, H, 1, D]`. pos: int64 `[1]`. scale: of the exact scores. sink, recent: see `retrieval`.
        near: K of sink and ring, `[B, KV, sink, D]` and `[B, KV, slots, D]`, where the sample has room for their sums (`near_blocks`).
        newest: the newest token is among them.
    """
    B, H, _, D = q.shape
    pointers, strides, shape = _scored(q, rows)
    sink_k, ring_k = near or (q, q)
    slots, power = sample.stats.shape[3], triton.next_power_of_2
    _estimate_kernel[(slots, rows.index.shape[1] * B)](
        q, *pointers, sink_k, ring_k, sample.scores, sample.stats, pos, scale, rows.begin, sink, recent, D, sample.positions, *strides, B * H, slots, sample.near, ring_k.shape[2],
        GN=max(8, power(shape["G"])), BLOCK_D=max(16, power(D)), SINK_TILES=_near_tiles(sink, recent, BLOCK)[0], NEWEST=newest, **shape, num_warps=4, **_launch(q.device),
    )  # fmt: skip


def weigh(q: Tensor, rows: Rows, pos: Tensor, scale: float, sink: int, recent: int, scratch: Scratch, authors: bool = False) -> None:
    """How much each candidate matters to its KV head (`retrieval.importance`), the sum of all attention being known from `scratch.chooses`; for the authors' choice none is needed."""
    B, H, _, D = q.shape
    pointers, strides, shape = _scored(q, rows)
    s, slots, near, power = scratch, scratch.chooses.stats.shape[3], scratch.chooses.near, triton.next_power_of_2
    _weigh_kernel[(s.positions // CHUNK, rows.index.shape[1] * B)](
        q, *pointers, s.chooses.stats, s.importance, s.peaks, s.mass, pos, scale, rows.begin, sink, recent, D, s.positions, *strides, B * H, slots, near,
        SLOTS=power(slots - near), NEAR_SLOTS=power(near) if near else 0, PEAK=s.peak, AUTHORS=authors, **shape, num_warps=4, **_launch(q.device),
    )  # fmt: skip


def _scored(q: Tensor, rows: Rows) -> tuple[list[Tensor], list[int], dict]:
    """For a kernel that scores: tables and planes of channel rows, their strides, and how the work is cut."""
    C, G = rows.index.shape[2], q.shape[1] // rows.index.shape[1]
    codes, ranges = rows.planes[0], rows.planes[-1]
    if rows.bits < 16:
        codes, ranges = codes.view(torch.int32 if rows.bits == 4 else torch.int16), ranges.view(torch.int32)
    # Codes of a word, and how many of them share a product: at most four rounds, and no product of fewer than 8 columns.
    GP, each, exact = triton.next_power_of_2(G), _each(rows.bits), q.dtype == torch.float32
    per = min(each, max(8 // GP, each // 4, 1))
    cut = {"GP": max(GP, 8 // per), "PER": per, "EACH": each, "CHUNK": CHUNK, "FEWEST": FEWEST, "STEP": 16 if rows.bits == 16 or exact else 32}
    strides = [codes.stride(1), codes.stride(2), ranges.stride(1), ranges.stride(2)]
    return [rows.index, rows.slot, codes, ranges], strides, {"C": C, "G": G, "BITS": rows.bits, "EXACT": exact, "NATIVE": q.is_cuda, **cut}


def _each(bits: int) -> int:
    """Codes of a word of channel rows: of 16 bits, at 4 bits of 32."""
    return 8 if bits <= 4 else 16 // bits


def _near_tiles(sink: int, recent: int, tile: int) -> tuple[int, int]:
    """How many tiles of so many tokens hold the sink, and the window at its largest: it has `recent` to `recent` + 63 tokens, the ring a block more."""
    return -(-sink // tile), -(-(recent + BLOCK - 1) // tile)


def near_blocks(sink: int, recent: int) -> int:
    """Blocks of sink and window, for `Scratch`."""
    return sum(_near_tiles(sink, recent, BLOCK))


def select(scratch: Scratch, begin: int, chosen: Tensor, guess: Tensor, pos: Tensor, sink: int, recent: int, left: float = 0.0, least: int = 0) -> None:
    """Choose the K candidates that matter most to each KV head, or, with `left`, as many of them as it needs: see `retrieval.needed`.

    Args:
        scratch: filled by `weigh`. begin: position of its first score.
        chosen: output, int32 `[B, KV, K]`: positions, ascending, ties to the lowest; -1 behind the last where there are fewer candidates.
        guess: int32 `[B, KV]`, kept from step to step, at first 0: the last choice's threshold, from which this one is found sooner.
    """
    s, launch = scratch, _launch(chosen.device)
    N, K, KP, peaks = s.positions, chosen.shape[2], s.blocks.shape[2], triton.next_power_of_2(s.positions // s.peak)
    warps = min(max(max(peaks, KP * s.peak) // SELECT_EACH, 1), 16)
    _select_kernel[(guess.numel(),)](
        s.importance, s.peaks, s.blocks, chosen, guess, s.mass, pos, begin, sink, recent, float(left), least, K, N,
        PEAK=s.peak, PEAKS=peaks, KP=KP, ENOUGH=left > 0, FEWEST=FEWEST, num_warps=warps, **launch,
    )  # fmt: skip


# --------------------------------------------------------------------------------------- tokens, and the small attention


@triton.jit
def _lean(q, covariance, along, head, part, D, DV, G: tl.constexpr, GP: tl.constexpr, BLOCK_D: tl.constexpr):
    g = tl.arange(0, GP)
    d = tl.arange(0, BLOCK_D)
    dv = part * 16 + tl.arange(0, 16)
    x = tl.load(q + (head * G + g)[:, None] * D + d[None, :], mask=(g < G)[:, None] & (d < D)[None, :], other=0.0).to(tl.float32)
    matrix = tl.load(covariance + (head * D + d)[:, None] * DV + dv[None, :], mask=(d < D)[:, None] & (dv < DV)[None, :], other=0.0)
    tl.store(along + (head * G + g)[:, None] * DV + dv[None, :], tl.sum(x[:, :, None] * matrix[None, :, :], 1), mask=(g < G)[:, None] & (dv < DV)[None, :])


@triton.jit
def _on_host(table, head, p, valid, width, TILE: tl.constexpr, WIDTH: tl.constexpr):
    """Addresses of K and V at positions p, `width` bytes both together, where they are valid."""
    at_k = tl.zeros([TILE], tl.int64)
    at_v = tl.zeros([TILE], tl.int64)
    for j in range(1, tl.load(table).to(tl.int32) + 1):
        start, rows = tl.load(table + j * WIDTH), tl.load(table + j * WIDTH + 1)
        here = valid & (p >= start) & (p < start + rows)
        row = (head * rows + p - start) * width
        at_k = tl.where(here, tl.load(table + j * WIDTH + 2) + row, at_k)
        at_v = tl.where(here, tl.load(table + j * WIDTH + 3) + row, at_v)
    return at_k, at_v


@triton.jit
def _from_shared(at, exponents, valid, D, N: tl.constexpr, SHARED: tl.constexpr, ALIGN: tl.constexpr):
    """Numbers, float32 `[tokens, N, SHARED]`, whose codes are at the addresses `at`, and whose exponents so many bytes behind them; and which of them there are."""
    block, i = tl.arange(0, N), tl.arange(0, SHARED)
    d = block[:, None] * SHARED + i[None, :]
    mask = valid[:, None, None] & (d < D)[None, :, :]
    at = tl.multiple_of(at.to(tl.pointer_type(tl.int8)), ALIGN)
    codes = tl.load(at[:, None, None] + d[None, :, :], mask=mask, other=0)
    exponent = tl.load((at + exponents)[:, None] + block[None, :], mask=valid[:, None] & (block * SHARED < D)[None, :], other=0).to(tl.int32)
    step = tl.where(exponent == 127, float("nan"), _power(tl.minimum(exponent, 121)))
    return codes.to(tl.float32) * step[:, :, None], d, mask


@triton.jit
def _fetch_tokens_kernel(
    table, chosen, k, v, K, rows, D, DV, width,
    TILE: tl.constexpr, WIDTH: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, SHARED: tl.constexpr, ALIGN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """SHARED: how many numbers share an exponent; 0: they are as attention takes them."""
    head = tl.program_id(0).to(tl.int64)
    _wait(PDL)
    kind = k.dtype.element_ty
    d, dv = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    for tile in range(tl.program_id(1), tl.cdiv(K, TILE), tl.num_programs(1)):
        n = tile * TILE + tl.arange(0, TILE).to(tl.int64)
        p = tl.load(chosen + head * K + n, mask=n < K, other=-1).to(tl.int64)
        valid = p >= 0
        at_k, at_v = _on_host(table, head, p, valid, width, TILE, WIDTH)
        to_k, to_v = k + (head * rows + n) * D, v + (head * rows + n) * DV
        if SHARED:
            new_k, at, mask_k = _from_shared(at_k, D + DV, valid, D, BLOCK_D // SHARED, SHARED, ALIGN)
            new_v, at_too, mask_v = _from_shared(at_v, DV + tl.cdiv(D, SHARED), valid, DV, BLOCK_DV // SHARED, SHARED, ALIGN)
            tl.store(to_k[:, None, None] + at[None, :, :], new_k.to(kind), mask=mask_k)
            tl.store(to_v[:, None, None] + at_too[None, :, :], new_v.to(kind), mask=mask_v)
        else:
            mask_k, mask_v = valid[:, None] & (d < D)[None, :], valid[:, None] & (dv < DV)[None, :]
            new_k = tl.load(tl.multiple_of(at_k.to(tl.pointer_type(kind)), ALIGN)[:, None] + d[None, :], mask=mask_k, other=0.0)
            new_v = tl.load(tl.multiple_of(at_v.to(tl.pointer_type(kind)), ALIGN)[:, None] + dv[None, :], mask=mask_v, other=0.0)
            tl.store(to_k[:, None] + d[None, :], new_k, mask=mask_k)
            tl.store(to_v[:, None] + dv[None, :], new_v, mask=mask_v)


def _alignment(*rows: Tensor) -> int:
    """Bytes to whose multiple every row of K and V on the host lies."""
    return math.gcd(16, *(x.shape[-1] * x.element_size() for x in rows))


def fetch_tokens(table: Tensor, chosen: Tensor, k: Tensor, v: Tensor, bits: int = 16) -> None:
    """Copy K and V of the `chosen` tokens from the host, which they are read from in place.

    Args:
        table: of slabs. chosen: int32 `[B, KV, K]`, positions, -1: none, whose row is left alone.
        k, v: outputs, `[B, KV, >= K, D]` and `[B, KV, >= K, Dv]`. bits: of the rows on the host, see `quant.token_row`.
    """
    (B, KV, K), D, DV, (tile, warps), power = chosen.shape, k.shape[3], v.shape[3], GATHER_TILE, triton.next_power_of_2
    # Not all at once: what else the GPU reads meanwhile would wait behind them.
    programs = min(max(K // tile // 8, 2), 4, -(-K // tile))
    kind, width = token_row(D, DV, bits, k.dtype)
    shared, align = (0, _alignment(k, v)) if bits == 16 else (SHARED, math.gcd(8, D))
    _fetch_tokens_kernel[(B * KV, programs)](
        table, chosen, k, v, K, k.shape[2], D, DV, width * kind.itemsize,
        TILE=tile, WIDTH=table.shape[1], BLOCK_D=max(shared, power(D)), BLOCK_DV=max(shared, power(DV)), SHARED=shared, ALIGN=align, num_warps=warps, **_launch(k.device),
    )  # fmt: skip


@triton.jit(do_not_specialize=["slots", "chunks"])
def _gather_kernel(
    q, sink_k, sink_v, ring_k, ring_v, table, staged_k, staged_v, chosen, covariance, along, part, parts, pos, scale, sink, ring, recent, K, D, DV, staged_rows, tiles,
    index, slot, codes, ranges, scores, stats, begin, N, code_head, code_row, range_head, range_row, heads, slots, chunks,
    BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, TILE: tl.constexpr, SINK_TILES: tl.constexpr, RING_TILES: tl.constexpr, WIDTH: tl.constexpr,
    STAGED: tl.constexpr, TILT: tl.constexpr, ALIGN: tl.constexpr, SAMPLE: tl.constexpr,
    FEWEST: tl.constexpr, C: tl.constexpr, STEP: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, PER: tl.constexpr, BITS: tl.constexpr, EACH: tl.constexpr, CHUNK: tl.constexpr, EXACT: tl.constexpr, NATIVE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    head, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    # Also for what comes from the side stream: in a graph the edge that leads from its last kernel to this one is such that both may overlap.
    _wait_first(PDL)
    # A few programs more, which need nothing of the others: the sample for the tail, first since they take longest, and last where the tail's value leans, 16 channels each.
    if SAMPLE:
        if tile < chunks:
            _sample(q, index, slot, codes, ranges, scores, stats, pos, scale, begin, sink, recent, D, N, code_head, code_row, range_head, range_row, heads.to(tl.int64) * slots, slots, tile, head, FEWEST, C, STEP, G, GP, PER, BITS, EACH, CHUNK, EXACT, NATIVE)
            return
        tile -= chunks
    if TILT:
        if tile >= tiles:
            _lean(q, covariance, along, head, tile - tiles, D, DV, G, BLOCK_G, BLOCK_D)
            return
    kind = ring_k.dtype.element_ty
    size: tl.constexpr = kind.primitive_bitwidth // 8
    length = tl.load(pos) + 1
    edge = _edge(pos, recent)
    i = tl.arange(0, TILE).to(tl.int64)
    g = tl.arange(0, BLOCK_G)
    # Addresses as numbers, since the rows lie in different tensors.
    if tile < SINK_TILES:
        row = tile * TILE + i
        valid = row < tl.minimum(sink, length)
        at_k = sink_k.to(tl.int64) + (head * sink + row) * D * size
        at_v = sink_v.to(tl.int64) + (head * sink + row) * DV * size
    elif tile < SINK_TILES + RING_TILES:
        p = tl.maximum(edge, sink) + (tile - SINK_TILES) * TILE + i
        valid = p < length
        at_k = ring_k.to(tl.int64) + (head * ring + p.to(tl.int32) % ring) * D * size
        at_v = ring_v.to(tl.int64) + (head * ring + p.to(tl.int32) % ring) * DV * size
    else:
        n = (tile - SINK_TILES - RING_TILES) * TILE + i
        p = tl.load(chosen + head * K + n, mask=n < K, other=-1).to(tl.int64)
        valid = p >= 0
        if STAGED:
            at_k = staged_k.to(tl.int64) + (head * staged_rows + n) * D * size
            at_v = staged_v.to(tl.int64) + (head * staged_rows + n) * DV * size
        else:
            at_k, at_v = _on_host(table, head, p, valid, (D + DV) * size, TILE, WIDTH)
    d = tl.arange(0, BLOCK_D)
    dv = tl.arange(0, BLOCK_DV)
    k = tl.load(tl.multiple_of(at_k.to(tl.pointer_type(kind)), ALIGN)[:, None] + d[None, :], mask=valid[:, None] & (d < D)[None, :], other=0.0).to(tl.float32)
    v = tl.load(tl.multiple_of(at_v.to(tl.pointer_type(kind)), ALIGN)[:, None] + dv[None, :], mask=valid[:, None] & (dv < DV)[None, :], other=0.0).to(tl.float32)
    x = tl.load(q + (head * G + g)[:, None] * D + d[None, :], mask=(g < G)[:, None] & (d < D)[None, :], other=0.0).to(tl.float32)
    s = tl.where(valid[None, :], tl.sum(x[:, None, :] * k[None, :, :], 2) * (scale * LOG2E), float("-inf"))
    high = tl.max(s, 1)
    w = tl.exp2(s - tl.where(high == float("-inf"), 0.0, high)[:, None])
    total = tl.sum(w, 1)
    o = tl.sum(w[:, :, None] * v[None, :, :], 1) / tl.where(total == 0.0, 1.0, total)[:, None]
    at = (head * G + g) * tiles + tile
    tl.store(part + at[:, None] * DV + dv[None, :], o, mask=(g < G)[:, None] & (dv < DV)[None, :])
    tl.store(parts + at, tl.where(total == 0.0, float("-inf"), high + tl.log2(total)), mask=g < G)


@triton.jit(do_not_specialize=["chunks", "slots"])
def _join_tail_kernel(
    part, parts, scores, stats, chosen, vsum, along, out, pos, scale, begin, sink, recent, K, N, tiles, chunks, slots, heads, DV,
    G: tl.constexpr, BLOCK_DV: tl.constexpr, KP: tl.constexpr, TILES: tl.constexpr, EACH: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, FEWEST: tl.constexpr, TAIL: tl.constexpr, TILT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)  # of B * H
    i = tl.arange(0, TILES)
    there = i < tiles
    dv = tl.program_id(1) * BLOCK_DV + tl.arange(0, BLOCK_DV)
    if TAIL:  # what was there before the attention began
        k = tl.arange(0, KP)
        p = tl.load(chosen + row // G * K + k, mask=k < K, other=-1).to(tl.int64)
        value = tl.load(vsum + row // G * DV + dv, mask=dv < DV, other=0.0)
        edge = _edge(pos, recent)
        # Sums are over the sample, which stands for all.
        stride, first, last = _sampled(edge, begin, sink, FEWEST)
        n = p - begin
        looked_at = (p >= 0) & (n // 64 % stride == stride // 2)
        place = _place(n // 64 // stride * 64 + n % 64, EACH, CHUNK)
    _wait(PDL)
    lse = tl.load(parts + row * tiles + i, mask=there, other=float("-inf"))
    values = tl.load(part + (row * tiles + i)[:, None] * DV + dv[None, :], mask=there[:, None] & (dv < DV)[None, :], other=0.0)
    if TAIL:
        c = tl.arange(0, CHUNKS)
        real = c < chunks
        stats += row * slots + c
        stat = heads.to(tl.int64) * slots
        highs = tl.load(stats, mask=real, other=float("-inf"))
        mass = tl.load(stats + stat, mask=real, other=0.0)
        hats = tl.load(scores + row * N + place, mask=looked_at, other=float("-inf"))
        if TILT:
            weighted = tl.load(stats + 2 * stat, mask=real, other=0.0)
            means = tl.load(stats + 3 * stat, mask=real, other=0.0)
            squares = tl.load(stats + 4 * stat, mask=real, other=0.0)
            shift = tl.load(along + row * DV + dv, mask=dv < DV, other=0.0)
    high = tl.max(lse, 0)
    if TAIL:
        high = tl.maximum(high, tl.max(highs, 0))
    weight = tl.exp2(lse - high)
    o = tl.sum(weight[:, None] * values, 0)
    total = tl.sum(weight, 0)
    if TAIL:
        count, seen = tl.maximum(edge - sink, 1).to(tl.float32), tl.maximum(last - first, 1).to(tl.float32)
        mass *= tl.exp2(highs - high)
        fetched = tl.exp2(hats - high)
        rest = tl.where(edge - sink > K, tl.maximum(tl.sum(mass, 0) - tl.sum(fetched, 0), 0.0), 0.0)
        o += rest * (value.to(tl.float32) / seen)
        total += rest * (count / seen)
        if TILT:
            # The number of candidates in each chunk, for the mean and the variance of all scores.
            each = tl.maximum(tl.minimum((c + 1) * CHUNK, last) - tl.maximum(c * CHUNK, first), 0).to(tl.float32)
            some = real & (each > 0)
            mean = tl.sum(tl.where(some, each * means, 0.0), 0) / seen
            off = tl.where(some, means - mean, 0.0)
            variance = tl.sum(tl.where(some, squares, 0.0) + each * off * off, 0) / seen
            moved = tl.sum(tl.where(some, mass * weighted, 0.0), 0) - tl.sum(tl.where(looked_at, fetched * hats, 0.0), 0)
            # Scores are times log2(e), r is of natural ones.
            r = tl.where((variance > 0.0) & (rest > 0.0), (moved - mean * rest) * LOG2E / tl.maximum(variance, 1e-30), 0.0)
            o += shift * (r * scale * (count / seen))
    tl.store(out + row * DV + dv, (o / total).to(out.dtype.element_ty), mask=dv < DV)


def gather_attention(
    q: Tensor, sink: tuple[Tensor, Tensor], ring: tuple[Tensor, Tensor], table: Tensor | None, staged: tuple[Tensor, Tensor] | None, chosen: Tensor,
    pos: Tensor, scale: float, recent: int, rows: Rows, sample: Sample, vsum: Tensor | None, covariance: Tensor | None = None, scores: bool = False,
) -> Tensor:  # fmt: skip
    """Exact attention over sink, chosen tokens and window; with `vsum`, the mass of the candidates left out goes to their mean value.

    Args:
        q: `[B, H, 1, D]`. sink, ring: K and V, `[B, KV, sink, D]` and `[B, KV, slots, D]`. chosen: int32 `[B, KV, K]`, -1: none.
        table: of slabs, whose K and V rows are read in place in host memory; or staged: the rows themselves, `[B, KV, >= K, D]`.
        rows, sample: channel rows, and a sample of their scores by q; vsum: the candidates' sum of V, float64 `[B, KV, Dv]`.
        covariance: of K with V over the candidates, float32 `[B, KV, D, Dv]`: the value follows the query, see `retrieval.tail_shift`.
        scores: fill the sample first, as `estimate` would, beside the attention and not before it.

    Returns:
        `[B, H, 1, Dv]` in q's dtype.
    """
    B, H, _, D = q.shape
    KV, K, DV = chosen.shape[1], chosen.shape[2], sink[1].shape[3]
    n_sink, G, tile, s = sink[0].shape[2], H // KV, GATHER_TILE[0], sample
    counts = [*_near_tiles(n_sink, recent, tile), -(-K // tile)]
    tiles = sum(counts)
    part = torch.empty(B * H, tiles, DV, dtype=torch.float32, device=q.device)
    parts = torch.empty(B * H, tiles, dtype=torch.float32, device=q.device)  # log-sum-exp
    staged_k, staged_v = staged or ring
    power, launch, tail, tilt = triton.next_power_of_2, _launch(q.device), vsum is not None, covariance is not None
    along = torch.empty(B * H, DV, dtype=torch.float32, device=q.device) if tilt else part
    pointers, strides, shape = _scored(q, rows)
    slots = s.stats.shape[3]
    chunks = slots - s.near
    _gather_kernel[(B * KV, scores * chunks + tiles + tilt * -(-DV // 16))](
        q, *sink, *ring, table, staged_k, staged_v, chosen, covariance, along, part, parts, pos, scale, n_sink, ring[0].shape[2], recent, K, D, DV, staged_k.shape[2], tiles,
        *pointers, s.scores, s.stats, rows.begin, s.positions, *strides, B * H, slots, chunks,
        BLOCK_G=power(G), BLOCK_D=power(D), BLOCK_DV=power(DV), TILE=tile, SINK_TILES=counts[0], RING_TILES=counts[1],
        WIDTH=table.shape[1] if table is not None else 0, STAGED=table is None, TILT=tilt, ALIGN=_alignment(*ring), SAMPLE=scores, **shape, num_warps=GATHER_TILE[1], **launch,
    )  # fmt: skip
    out = torch.empty(B, H, 1, DV, dtype=q.dtype, device=q.device)
    width = min(32, power(DV))
    _join_tail_kernel[(B * H, -(-DV // width))](
        part, parts, s.scores, s.stats, chosen, vsum, along, out, pos, scale, rows.begin, n_sink, recent, K, s.positions, tiles, chunks, slots, B * H, DV,
        G=G, BLOCK_DV=width, KP=power(K), EACH=_each(rows.bits), TILES=power(tiles), CHUNK=CHUNK, CHUNKS=power(chunks), FEWEST=FEWEST, TAIL=tail, TILT=tilt, num_warps=4, **launch,
    )  # fmt: skip
    return out


# --------------------------------------------------------------------------------------------------- the way to the host

RUN = 64  # blocks whose products one program adds up before it adds them to the others'
GRID = 2.0**20  # products are rounded to multiples of 1 / GRID, see `retrieval.moments_of`


def summarises(*tensors: Tensor) -> bool:
    """Whether the kernels below take these `[B, KV, T, D]`, one or together."""
    kinds = {x.dtype for x in tensors}
    return len(kinds) == 1 and kinds <= {torch.float16, torch.bfloat16, torch.float32} and usable(tensors[0].device)


def _rows_apart(x: Tensor) -> Tensor:
    """`x [B, KV, T, D]` with the elements of a row side by side, as the kernels below read them."""
    return x if x.stride(3) == 1 else x.contiguous()


def encode_channels(k: Tensor, bits: int) -> list[Tensor]:
    """Channel rows of whole blocks, `k [B, KV, n * 64, D]` at 2, 4 or 8 bits, in the bytes of the twin, `offload.encode_channels`.

    Returns:
        Codes, uint8 `[B, KV, D, n * 8 * bits]`, and ranges, float16 `[B, KV, D, n * 2]`: scale and zero of each block.
    """
    B, KV, T, D = k.shape
    n, tile = T // BLOCK, min(64, 1 << (D - 1).bit_length())
    codes = torch.empty(B, KV, D, n * BLOCK * bits // 8, dtype=torch.uint8, device=k.device)
    ranges = torch.empty(B, KV, D, n * 2, dtype=torch.float16, device=k.device)
    if n == 0:
        return [codes, ranges]
    tiles = -(-D // tile)
    _encode_blocks[(n * tiles, KV, B)](
        k, k, codes, ranges, k,
        *k.stride(), *codes.stride()[:2], BLOCK * bits // 8, codes.stride(2), *ranges.stride()[:2], 2, ranges.stride(2), 1, 0, 0, 0, 0, tiles,
        ROWS=D, WIDTH=BLOCK, TILE=tile, W=1, BITS=bits, GROUP=BLOCK, LLOYD=False, KEYS=True, CENTRED=False, SUMS=False, num_warps=4,
        enable_fp_fusion=False,  # as in quant_encode
    )  # fmt: skip
    return [codes, ranges]


def encode_tokens(k: Tensor, v: Tensor) -> Tensor:
    """Rows of 8 bits, `[B, KV, T, width]`, of `k [B, KV, T, D]` and `v [B, KV, T, Dv]`, in the bytes of the twin, `offload.encode_tokens`."""
    (B, KV, T, D), Dv = k.shape, v.shape[3]
    rows = torch.zeros(B, KV, T, token_row(D, Dv, 8, k.dtype)[1], dtype=torch.int8, device=k.device)
    _to_shared(k, rows, 0, D + Dv)
    _to_shared(v, rows, D, D + Dv + -(-D // SHARED))
    return rows


def round_shared(x: Tensor) -> Tensor:
    """`x [B, KV, T, D]` as it comes back from `encode_tokens`. Twin: `quant.decode_shared` of `quant.encode_shared`."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _to_shared(x, out, 0, 0)
    return out


def _to_shared(x: Tensor, out: Tensor, at: int, exponents: int) -> None:
    """at, exponents: where in a row of `out` codes and exponents begin."""
    (B, KV, T, D), x = x.shape, _rows_apart(x)
    low, high = shared_range(x.dtype)
    if T:
        _to_shared_kernel[(-(-T // 32), KV, B)](
            x, out, *x.stride()[:3], T, out.shape[3], D, at, exponents,
            N=triton.next_power_of_2(-(-D // SHARED)), SHARED=SHARED, TILE=32, LOW=low, HIGH=high, CODES=out.dtype == torch.int8, num_warps=4,
        )  # fmt: skip


@triton.jit(do_not_specialize=["T"])
def _to_shared_kernel(
    x, out, x_b, x_h, x_t, T, width, D, at, exponents, N: tl.constexpr, SHARED: tl.constexpr, TILE: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, CODES: tl.constexpr
):  # fmt: skip
    """One program: TILE tokens of a head. CODES: as `quant.encode_shared` makes them; otherwise decoded again."""
    head, batch = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    t, block, i = tl.program_id(0) * TILE + tl.arange(0, TILE), tl.arange(0, N), tl.arange(0, SHARED)
    d = block[:, None] * SHARED + i[None, :]
    mask = (t < T)[:, None, None] & (d < D)[None, :, :]
    values = tl.load(x + batch * x_b + head * x_h + t.to(tl.int64)[:, None, None] * x_t + d[None, :, :], mask=mask, other=0.0).to(tl.float32)
    most = tl.minimum(tl.max(values.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 2), 0x7F800000)
    finite = most < 0x7F800000
    exponent = tl.minimum(tl.maximum(((most + 0x10000) >> 23) - 133, LOW), HIGH)
    # Added to 1.5 * 2^23, a number keeps no fraction, and is rounded to even as the twin rounds.
    codes = (values * _power(-exponent)[:, :, None] + 12582912.0) - 12582912.0
    codes = tl.where(finite[:, :, None], tl.minimum(tl.maximum(codes, -127.0), 127.0), 0.0)
    out += ((batch * tl.num_programs(1) + head) * T + t.to(tl.int64)) * width
    if CODES:
        tl.store(out[:, None, None] + at + d[None, :, :], codes.to(tl.int8), mask=mask)
        tl.store(out[:, None] + exponents + block[None, :], tl.where(finite, exponent, 127).to(tl.int8), mask=(t < T)[:, None] & (block * SHARED < D)[None, :])
    else:
        step = tl.where(finite, _power(exponent), float("nan"))
        tl.store(out[:, None, None] + d[None, :, :], (codes * step[:, :, None]).to(out.dtype.element_ty), mask=mask)


def block_statistics(x: Tensor, maxima: bool = False, sums: bool = False) -> tuple[Tensor | None, Tensor | None]:
    """Of each block of 64 tokens of `x [B, KV, T, D]`, which ends at a block's edge (the first block may be shorter).

    Twins: `offload.largest` and `offload.block_sums`. Sums are taken in float64, where those of 16-bit values are exact in any order.

    Returns:
        The largest |x| in its dtype, and the sum in float32, both `[B, KV, ceil(T / 64), D]`; None: not wanted.
    """
    B, KV, T, D = x.shape
    blocks, width, x = -(-T // BLOCK), min(64, triton.next_power_of_2(D)), _rows_apart(x)
    most = torch.empty(B, KV, blocks, D, dtype=x.dtype, device=x.device) if maxima else None
    total = torch.empty(B, KV, blocks, D, dtype=torch.float32, device=x.device) if sums else None
    if blocks:
        tiles = -(-D // width)
        outputs = [x if out is None else out for out in (most, total)]
        _block_statistics[(blocks * tiles, KV, B)](
            x, *outputs, *x.stride()[:3], T, blocks, D=D, WIDTH=width, TILES=tiles, BLOCK=BLOCK, MAXIMA=maxima, SUMS=sums, num_warps=4
        )
    return most, total


@triton.jit(do_not_specialize=["T", "blocks"])
def _block_statistics(
    x, most, sums, x_b, x_h, x_t, T, blocks, D: tl.constexpr, WIDTH: tl.constexpr, TILES: tl.constexpr, BLOCK: tl.constexpr, MAXIMA: tl.constexpr, SUMS: tl.constexpr
):  # fmt: skip
    """One program: `WIDTH` channels of one block."""
    block, head, batch = tl.program_id(0) // TILES, tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    c = tl.program_id(0) % TILES * WIDTH + tl.arange(0, WIDTH)
    start = T - (blocks - block) * BLOCK  # below 0 in a block that begins before the first token
    t = tl.arange(0, BLOCK)
    x += batch * x_b + head * x_h + start.to(tl.int64) * x_t
    values = tl.load(x + t[:, None] * x_t + c[None, :], mask=(start + t >= 0)[:, None] & (c < D)[None, :], other=0.0)
    into = ((batch * tl.num_programs(1) + head) * blocks + block) * D + c
    if MAXIMA:
        tl.store(most + into, tl.max(tl.abs(values.to(tl.float32)), 0).to(most.dtype.element_ty), mask=c < D)
    if SUMS:
        tl.store(sums + into, tl.sum(values.to(tl.float64), 0).to(tl.float32), mask=c < D)


def moments(k: Tensor, v: Tensor, sums: tuple[Tensor, Tensor] | None = None) -> Tensor:
    """Sums over tokens of the products of `[k, 1]` and `[v, 1]`: `k [B, KV, T, D]`, `v [B, KV, T, Dv]` to float64 `[B, KV, D + 1, Dv + 1]`.

    Its twin is `retrieval.moments_of`. A block's sums come from tensor cores, in float32, and differ from the twin's by that rounding. But
    they are the same whatever blocks come with it: the order of summation is the multiplication's own, the rest is exact.

    Args:
        sums: of k and of v, by `block_statistics`, where they are there already.
    """
    B, KV, T, D = k.shape
    Dv, blocks, (k, v) = v.shape[3], -(-T // BLOCK), map(_rows_apart, (k, v))
    products = torch.zeros(B, KV, D + 1, Dv + 1, dtype=torch.int64, device=k.device)
    if blocks:
        # Without tensor cores a thread holds what it multiplies in registers, so float32 goes in smaller pieces.
        most, step = (32, 16) if torch.float32 in (k.dtype, v.dtype) else (64, BLOCK)
        high, wide = (min(most, max(16, triton.next_power_of_2(n))) for n in (D, Dv))
        down, across = -(-D // high), -(-Dv // wide)
        _moments[(-(-blocks // RUN) * down * across, KV, B)](
            k, v, products, *k.stride()[:3], *v.stride()[:3], T, blocks,
            D=D, DV=Dv, HIGH=high, WIDE=wide, DOWN=down, ACROSS=across, BLOCK=BLOCK, STEP=step, RUN=RUN, GRID=GRID, NATIVE=k.is_cuda, num_warps=4, num_stages=3,
        )  # fmt: skip
    ksum, vsum = sums or (block_statistics(x, sums=True)[1] for x in (k, v))
    total = products.double()
    total[..., :-1, -1] = ksum.double().mul_(GRID).round_().sum(2)
    total[..., -1, :-1] = vsum.double().mul_(GRID).round_().sum(2)
    total[..., -1, -1] = T * GRID
    return total / GRID


@triton.jit(do_not_specialize=["T", "blocks"])
def _moments(
    k, v, out, k_b, k_h, k_t, v_b, v_h, v_t, T, blocks,
    D: tl.constexpr, DV: tl.constexpr, HIGH: tl.constexpr, WIDE: tl.constexpr, DOWN: tl.constexpr, ACROSS: tl.constexpr,
    BLOCK: tl.constexpr, STEP: tl.constexpr, RUN: tl.constexpr, GRID: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """One program: a tile `[HIGH, WIDE]` of the products, summed over a run of blocks. Tiles of one run are neighbours and share what they read in the L2."""
    program, head, batch = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    first = program // (DOWN * ACROSS) * RUN
    t = tl.arange(0, STEP)
    d = program // ACROSS % DOWN * HIGH + tl.arange(0, HIGH)
    c = program % ACROSS * WIDE + tl.arange(0, WIDE)
    k += batch * k_b + head * k_h
    v += batch * v_b + head * v_h
    total = tl.zeros((HIGH, WIDE), tl.int64)
    for block in range(first, tl.minimum(first + RUN, blocks)):
        start = T - (blocks - block) * BLOCK  # below 0 in a block that begins before the first token
        product = tl.zeros((HIGH, WIDE), tl.float32)
        for part in tl.static_range(BLOCK // STEP):
            here = start + part * STEP + t >= 0
            at = (start + part * STEP).to(tl.int64)
            x = tl.load(k + at * k_t + t[None, :] * k_t + d[:, None], mask=here[None, :] & (d < D)[:, None], other=0.0)
            y = tl.load(v + at * v_t + t[:, None] * v_t + c[None, :], mask=here[:, None] & (c < DV)[None, :], other=0.0)
            if not NATIVE:  # the interpreter multiplies bfloat16 as if it were integers
                x, y = x.to(tl.float32), y.to(tl.float32)
            product = tl.dot(x, y, product, input_precision="ieee")
        total += tl.floor(product * GRID + 0.5).to(tl.int64)
    into = out + ((batch * tl.num_programs(1) + head) * (D + 1) + d[:, None]) * (DV + 1) + c[None, :]
    tl.atomic_add(into, total, mask=(d < D)[:, None] & (c < DV)[None, :], sem="relaxed")
