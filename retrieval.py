# SPDX-License-Identifier: Apache-2.0
"""Sparsity-friendly layers: K and V in host memory, and for each new token only the few rows that matter (TailorKV, section 4.2).

For a decode step at layer l,
    a. while layer l - 1 runs, its incoming hidden state gives a guess of layer l's query (the decoder does that);
    b. `critical_channels`: the C channels with the largest |q| * max |K|, for each KV head;
    c. those rows of the transposed keys are prefetched from the host (`offload.Prefetcher`);
    d. at layer l, `approximate_scores` with the true query on those channels, `select_tokens` takes the K best candidates;
    e. the chosen tokens' full K and V are fetched;
    f. attention is exact over sink + fetched + window;
    g. not in the paper, and off in its presets: the *tail*. The approximate scores of some blocks (`sparse_kernels.stride`), which stand for all
       candidates, also say how much attention was not fetched. That mass goes to the candidates' mean value (the idea of SparQ Attention, 2312.04985)
       instead of being taken for zero.
    h. nor this: with `tilt`, that value follows the query. See `tail_shift`.

The sink is the first `sink` tokens. The window is the newest `recent` tokens, its old end rounded down to a multiple of 64
(`recent` to `recent + 63` tokens): behind that edge tokens live on the host, and all of them but the sink are candidates. With `token_bits` 8
they are rounded when they pass it (`quant.encode_shared`), once and for all: what is stored, scored, counted and read is the rounded token.

Where the authors' code differs from the better choice, both are here. `aggregation` "authors" averages the G queries of a group
with sign, so that opposite heads cancel; otherwise |q| is averaged for channels, and for tokens the softmaxes, over the candidates
("mean") or over sink and window too ("all"), so that a head which looks at the window has little say in what is fetched.

With `ahead`, not in the paper either, steps b to e run while layer l - 1 is in its MLP: by a query predicted from the hidden state in
front of that, which is close enough to the true one to choose what to fetch, so that no transfer is left to wait for. Attention takes
the true query, and so does the tail, which would suffer most.

With `left` K is a limit: a KV head fetches until less than this share of its approximated attention, sink and window included,
is left, and no fewer than `least` tokens. What the K best have is then known, and only what the others have estimated. Attention that is spread out asks for many, attention on few for few.

Shapes: `B` batch, `H` query heads, `KV` key/value heads, `G = H // KV`, `D` head_dim, `C` channels, `K` tokens fetched,
`M` candidates.
"""

import math

import torch
from torch import Tensor

import kernels
import sparse_kernels
from attention import merge_attention, small_attention
from offload import BLOCK, HostStore, Prefetcher, ZeroCopy, block_sums, largest, round_tokens
from pinned import Pinner
from quant import Ring

# ------------------------------------------------------------------------------------------------------- the choice


def critical_channels(q: Tensor, kmax: Tensor, channels: int, authors: bool = False) -> Tensor:
    """The channels that carry the scores (eq. 10): query `[B, H, 1, D]`, largest |K| `[B, KV, D]`; returns ascending int64 `[B, KV, C]`."""
    B, KV, D = kmax.shape
    q = q.reshape(B, KV, -1, D).float()
    size = q.mean(2).abs() if authors else q.abs().mean(2)
    return select_tokens(size * kmax.float(), min(channels, D))


def approximate_scores(q: Tensor, index: Tensor, rows: Tensor, scale: float) -> Tensor:
    """Scores from the critical channels alone, float32 `[B, KV, G, M]`.

    Args:
        q: the true query `[B, H, 1, D]`; index: `[B, KV, C]`; rows: the keys' channels `[B, KV, C, M]`.
        scale: of the exact scores.
    """
    B, KV, C = index.shape
    q = q.reshape(B, KV, -1, q.shape[3]).float()
    q = q.gather(3, index.unsqueeze(2).expand(-1, -1, q.shape[2], -1))
    return (q @ rows.float()) * scale


def importance(scores: Tensor, authors: bool = False, near: Tensor | None = None, own: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """How much each candidate matters to a KV head: scores `[B, KV, G, M]` to `[B, KV, M]`, larger is more; and the sum over all, `[B, KV, 1]`.

    near: log-sum-exp of the scores of sink and window, `[B, KV, G, 1]`; then the result is a share of all attention. own: that of the candidates'
    scores, where it is estimated; a share may then pass 1, but not 2^64.
    """
    if authors:
        return scores.mean(2), None
    own = scores.logsumexp(-1, keepdim=True) if own is None else own
    total = own if near is None else torch.logaddexp(own, near)
    return (scores - total).clamp(max=64 * math.log(2)).exp().mean(2), (own - total).exp().mean(2)


def needed(shares: Tensor, mass: Tensor, chosen: Tensor, left: float, least: int, sampled: Tensor | None = None) -> Tensor:
    """Which of the chosen candidates are worth fetching: bool like `chosen [B, KV, K]`, ascending positions of the largest shares.

    Those without which `left` or more of the attention would be left, the largest taken first, ties to the lowest position; and the
    first `least`. shares: of all attention, `[B, KV, M]`; mass: their sum, `[B, KV, 1]`, estimated from the candidates `sampled`, bool `[M]`, or (None) exact.
    """
    share, order = shares.gather(-1, chosen).sort(dim=-1, descending=True, stable=True)
    seen = share if sampled is None else share * sampled[chosen.gather(-1, order)] * (len(sampled) / sampled.sum())
    inside = (mass - seen.sum(-1, keepdim=True)).clamp(min=0) + share.sum(-1, keepdim=True)  # of what the mass is for those chosen, what they have
    left = left * (1 - mass + inside)
    rest = inside - (share.cumsum(-1) - share)  # before each is taken
    rank = torch.arange(share.shape[-1], device=share.device)
    return torch.zeros_like(rest, dtype=torch.bool).expand_as(share).scatter(-1, order, (rest >= left) | (rank < least))


def select_tokens(scores: Tensor, count: int) -> Tensor:
    """Positions of the `count` largest scores `[..., M]`, ascending, ties to the lowest position: int64 `[..., count]`.

    torch.topk leaves open which of equal scores it takes, and a result must not depend on the device or the buffer's size.
    No host sync.
    """
    M = scores.shape[-1]
    if count >= M:
        return torch.arange(M, device=scores.device).expand(*scores.shape[:-1], M).contiguous()
    if count == 0:
        return torch.empty(*scores.shape[:-1], 0, dtype=torch.int64, device=scores.device)
    threshold = scores.topk(count, -1, sorted=True).values[..., -1:]
    above, level = scores > threshold, scores == threshold
    chosen = above | (level & (level.cumsum(-1) <= count - above.sum(-1, keepdim=True)))
    place = torch.where(chosen, chosen.cumsum(-1) - 1, count)  # those not chosen share one place past the end
    positions = torch.arange(M, device=scores.device).expand_as(place)
    return positions.new_zeros(*scores.shape[:-1], count + 1).scatter_(-1, place, positions)[..., :count].contiguous()


def statistics(k: Tensor, v: Tensor, tail: bool, tilt: bool) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Of `k [B, KV, T, D]` and `v [B, KV, T, Dv]`, which end at a block's edge: the largest |K| `[B, KV, D]`, the sum of V in float64, the moments.

    `tilt` only with `tail`.
    """
    cut, whole, moments = k.shape[2] % BLOCK, None, None
    if sparse_kernels.summarises(k, v):
        most, ksum = sparse_kernels.block_statistics(k, maxima=True, sums=tilt)
        most = most.amax(2)
        if tail:
            _, vsum = sparse_kernels.block_statistics(v, sums=True)
            whole = vsum[:, :, 1:] if cut else vsum
        if tilt:
            moments = sparse_kernels.moments(k, v, (ksum, vsum))
    else:
        most = largest(k)
        if tail:
            whole = block_sums(v[:, :, cut:])
        if tilt:
            moments = moments_of(k, v)
    # The sum as the host's record has it: part of a block, then whole ones.
    total = v[:, :, :cut].sum(2, dtype=torch.float64) + whole.sum(2, dtype=torch.float64) if tail else None
    return most, total, moments


# ----------------------------------------------------------------------------------------------------------- the tail


def moments_of(k: Tensor, v: Tensor, blocks: int = 32) -> Tensor:
    """Sums over tokens of the products of `[k, 1]` and `[v, 1]`: `k [B, KV, T, D]`, `v [B, KV, T, Dv]` to float64 `[B, KV, D + 1, Dv + 1]`.

    So the last row is the sum of v, the last column that of k. Tokens end at a block's edge. Each block's sums are rounded to a
    millionth: sums of such numbers are exact in float64, so that the order in which blocks come does not show, and taking one out
    leaves what was there before it. At most `blocks` blocks are widened at a time.
    """
    if sparse_kernels.summarises(k, v):
        return sparse_kernels.moments(k, v)
    T, grid = k.shape[2], 2.0**20
    total = k.new_zeros(*k.shape[:2], k.shape[3] + 1, v.shape[3] + 1, dtype=torch.float64)
    cuts = [*range(T % BLOCK, T, blocks * BLOCK), T]  # a first block without the sink's tokens is shorter
    for start, stop in zip([0, *cuts], cuts):
        if stop > start:
            a, b = (x[:, :, start:stop].double().unflatten(2, (-1, min(BLOCK, stop - start))) for x in (k, v))
            total[..., :-1, :-1] += (a.transpose(3, 4) @ b).mul_(grid).round_().sum(2)
            total[..., :-1, -1] += a.sum(3).mul_(grid).round_().sum(2)
            total[..., -1, :-1] += b.sum(3).mul_(grid).round_().sum(2)
    total[..., -1, -1] = T * grid
    return total / grid


def tail_shift(q: Tensor, scores: Tensor, left: Tensor, covariance: Tensor, scale: float) -> Tensor:
    """How far the value of the unfetched candidates lies from the candidates' mean value: float32 `[B, H, 1, Dv]`.

    The mean would be right if weight and value were independent. But heavy tokens have keys like the query, and values go with
    keys. In the linear regression of V on K, weighting tokens by exp(score) moves their mean value along Cov(V, K) q, as far
    as it moves their mean score:

        shift = r * scale * Cov(V, K) q,    r = (mean of the unfetched scores under their softmax - mean score) / variance of scores

    the last two over all candidates given. (With Gaussian keys, and none fetched, r is 1 and this is exact.)

    Args:
        q: the true query `[B, H, 1, D]`; covariance: of K with V over the candidates, float32 `[B, KV, D, Dv]`.
        scores: approximate, of candidates that stand for all, `[B, KV, G, M]`; left: the same with minus infinity for those fetched.
    """
    B, KV, G, _ = scores.shape
    spread = scores - scores.mean(-1, keepdim=True)
    variance = spread.square().mean(-1, keepdim=True)
    moved = (left.softmax(-1).nan_to_num() * spread).sum(-1, keepdim=True)  # NaN: nothing is left
    r = torch.where(variance > 0, moved / torch.where(variance > 0, variance, 1.0), 0.0)  # [B, KV, G, 1]
    along = q.reshape(B, KV, G, -1).float() @ covariance  # [B, KV, G, Dv]
    return (r * scale * along).reshape(B, KV * G, 1, -1)


# --------------------------------------------------------------------------------------------------------- the layer


class SparseLayer:
    """One sparsity-friendly layer: sink and window in 16 bits on the GPU, everything behind the window on the host.

    GPU bytes: `B * KV * (sink + ring) * (D + Dv) * itemsize` with ring = `recent` rounded up to 64, + 64 (an interrupted
    step can be undone), and maxima `B * KV * D * itemsize`. What is prefetched and fetched is shared by all layers and
    counted by `Prefetcher`; host bytes by `HostStore`. With the tail, the sum of V `B * KV * Dv * 8`; with `tilt` as well,
    the moments `B * KV * (D + 1) * (Dv + 1) * 8`.
    """

    def __init__(
        self, sink: int, recent: int, channels: int, topk: int, aggregation: str, tail: bool, pinner: Pinner, prefetcher: Prefetcher | ZeroCopy, turn: int, tilt: bool = False,
        left: float = 0.0, least: int = 0, ahead: bool = False, token_bits: int = 16,
    ):  # fmt: skip
        """`turn`: this layer's place among the sparse layers, which decides its row buffer. For the others see `TailorConfig`."""
        self.sink_size, self.recent, self.channels, self.topk, self.tail, self.turn = sink, recent, channels, topk, tail, turn
        self.authors, self.among_all, self.left, self.least, self.ahead = aggregation == "authors", aggregation == "all", left, least, ahead
        self.store, self.prefetcher = HostStore(pinner, prefetcher.row_bits, token_bits), prefetcher
        self.tilt = tilt and tail
        self.ring: Ring | None = None
        self.static: Tensor | None = None  # [KV, C]: channels chosen offline, for the paper's ablation
        self.length = 0
        self.chosen: Tensor | None = None  # the last step's: index of fetched positions [B, KV, K], -1 where there are fewer
        self.guess: Tensor | None = None  # for the kernels: the last choice's threshold
        self._index: Tensor | None = None  # channels under way
        self._foreseen: tuple[Tensor, float] | None = None  # the predicted query, and the scale of its scores
        self.slope: Tensor | None = None  # for the kernels, with `tilt`: the covariance, float32 [B, KV, D, Dv]
        self._counted = -1  # candidates that are in it

    @property
    def begin(self) -> int:
        """The position from which on channel rows are fetched: they come in whole blocks."""
        return self.sink_size // BLOCK * BLOCK

    def by_kernels(self, length: int) -> bool:
        """Does a step that makes it `length` tokens run in the kernels of `sparse_kernels.py`? Once true it stays true while tokens are added."""
        return self.topk > 0 and self.edge(length) > self.sink_size and kernels.usable(self.kmax.device)

    def edge(self, length: int) -> int:
        """Tokens on the host when `length` are stored."""
        return max(0, length - self.recent) // BLOCK * BLOCK

    # -- storage

    def reserve(self, k: Tensor, v: Tensor, tokens: int, exact: bool) -> bool:
        """Make room for `tokens` tokens like k and v `[B, KV, *, D]`; True if a GPU buffer moved."""
        moved = self.ring is None
        if moved:
            ring = Ring(k, v, -(-self.recent // BLOCK) * BLOCK + BLOCK)
            self.sink = [x.new_zeros(*x.shape[:2], self.sink_size, x.shape[3]) for x in (k, v)]
            self.kmax = k.new_zeros(*k.shape[:2], k.shape[3])
            # float64, so that the order in which blocks arrive does not show in the mean.
            self.vsum = v.new_zeros(*v.shape[:2], v.shape[3], dtype=torch.float64) if self.tail else None
            if self.tilt:
                self.moments = v.new_zeros(*v.shape[:2], k.shape[3] + 1, v.shape[3] + 1, dtype=torch.float64)
                ring.companions = [self.moments]
            self.ring = ring  # last: who sees it finds the others too, whenever an interrupt came
        self.store.reserve(self.edge(tokens), k, v, exact)
        return moved

    def put_sink(self, start: int, k: Tensor, v: Tensor) -> None:
        """Keep of `k, v [B, KV, T, D]`, positions from `start` on, those that belong to the sink."""
        if start < self.sink_size:
            stop = min(start + k.shape[2], self.sink_size)
            for held, new in zip(self.sink, (k, v)):
                held[:, :, start:stop] = new[:, :, : stop - start]

    def refresh(self, length: int) -> None:
        """Take the largest |K| and the sum of V over the candidates from the host's record."""
        found = [(self.kmax, self.store.channel_maxima(self.sink_size, self.edge(length)))]
        if self.tail:
            found.append((self.vsum, self.store.value_sum(self.sink_size, self.edge(length))))
        for held, new in found:
            held.zero_() if new is None else held.copy_(new)

    def send(self, start: int, k: Tensor, v: Tensor) -> None:
        """Store whole blocks `k, v [B, KV, n * 64, D]`, positions from `start`, on the host, rounded to its bits, and count them as candidates.

        The sink is none of them: its keys are outliers of their own, and would decide the channels at every step.
        """
        bits, skip, found = self.store.token_bits, max(self.sink_size - start, 0), []
        step = k.shape[1] if bits == 16 else 1  # rounded tokens are copies: a head at a time
        for head in range(0, k.shape[1], step):
            pair = round_tokens(k[:, head : head + step], v[:, head : head + step], bits)
            self.store.write(start, *pair, head)
            if skip < k.shape[2]:
                found.append(statistics(*(x[:, :, skip:] for x in pair), self.tail, self.tilt))
            del pair  # before there is a next one
        if found:
            self.count(*(torch.cat(parts, 1) if parts[0] is not None else None for parts in zip(*found)))

    def count(self, most: Tensor, total: Tensor | None, moments: Tensor | None) -> None:
        """Take the `statistics` of new candidates into those of all."""
        self.kmax.copy_(torch.maximum(self.kmax, most))
        if self.tail:
            self.vsum += total
        if self.tilt:
            self.moments += moments
        self._counted = -1

    # -- prefill

    def absorb(self, k: Tensor, v: Tensor, old: int, new: int) -> None:
        """Take over tokens old .. new - 1 of a prefill call from `k, v [B, KV, new, D]`, which hold all positions.

        On CUDA it runs in the current stream, the offload stream; k and v must not be overwritten before it is through.
        """
        self.ring.save(old)
        self.put_sink(old, k[:, :, old:], v[:, :, old:])
        first, last = self.edge(old), self.edge(new)
        if last > first:
            self.send(first, k[:, :, first:last], v[:, :, first:last])
        self.ring.write(old, k[:, :, old:], v[:, :, old:])

    def history(self, k: Tensor, v: Tensor, length: int) -> None:
        """Copy positions 0 .. length - 1 into `k, v [B, KV, >= length, D]`: the host's part, the window, and the sink, which the host may have rounded."""
        edge, sink = self.edge(length), min(self.sink_size, length)
        self.store.read(k, v, 0, edge)
        k[:, :, edge:length], v[:, :, edge:length] = self.ring.read(edge, length)
        k[:, :, :sink], v[:, :, :sink] = (x[:, :, :sink] for x in self.sink)

    # -- decode

    def leaving(self, length: int) -> int | None:
        """Before a decode step that makes it `length` tokens: the first position of the block that leaves the window, if one does.

        Its K and V are `block(first)`; they are still to be counted.
        """
        first = self.edge(length - 1)
        if self.edge(length) == first:
            return None
        if self.tilt:
            self.ring.save(length - 1)  # what cannot be found again from the host's record
        return first

    def block(self, first: int) -> tuple[Tensor, Tensor]:
        """K and V `[B, KV, 64, D]` of a block in the window, where they lie: the ring holds whole blocks."""
        at = first % self.ring.size
        return self.ring.k[:, :, at : at + BLOCK], self.ring.v[:, :, at : at + BLOCK]

    def foresee(self, layer: int, q: Tensor, length: int, pos: Tensor, scale: float) -> None:
        """Choose channels for the step that makes it `length` tokens by the predicted query `[B, H, 1, D]`, and start their transfer.

        With `ahead` it chooses the tokens, too. `pos`: int64 `[1]`, the same length less one, on the device.
        """
        start, stop, q = self.sink_size, self.edge(length), q.contiguous()
        # Kept until the layer has attended: its memory would be taken by what comes next in this stream, while another stream still reads it.
        self._foreseen = (q, scale)
        if self.by_kernels(length):
            self.prefetcher.bring(layer, self, q, pos, stop)
            return
        if stop - start <= self.topk or self.topk == 0:
            return  # every candidate is fetched, or none: nothing to choose
        self._index = self.channels_for(q)
        self.prefetcher.prefetch(layer, self.turn, self.store, self._index, start // BLOCK * BLOCK, stop)

    def channels_for(self, q: Tensor) -> Tensor:
        if self.static is not None:
            return self.static.expand(q.shape[0], -1, -1).contiguous()
        return critical_channels(q, self.kmax, self.channels, self.authors)

    def choose_channels(self, q: Tensor, index: Tensor, slot: Tensor, missing: Tensor, held: Tensor | None = None, stamp: Tensor | None = None, pos: Tensor | None = None) -> None:
        """What `channels_for` does, by kernels and into their tables: see `sparse_kernels.choose_channels`. Static channels have no slots but their own."""
        if self.static is not None:
            index.copy_(self.static.expand_as(index))
        else:
            sparse_kernels.choose_channels(q, self.kmax, self.authors, index, slot, missing, held, stamp, pos)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, length: int, pos: Tensor) -> Tensor:
        """Append k, v `[B, KV, 1, D]` as position `length - 1`; attend with q `[B, H, 1, D]` over sink, the chosen candidates and the window."""
        if self.by_kernels(length):
            return self.attend_by_kernels(layer, q, k, v, scale, length, pos)
        self.put_sink(length - 1, k, v)
        self.ring.write(length - 1, k, v)
        start, stop = self.sink_size, self.edge(length)
        parts = [[x[:, :, : min(start, length)] for x in self.sink]]
        self.chosen = left_out = None
        looks, self._foreseen = self._foreseen if self.ahead and self._foreseen else (q, scale), None
        parts.append(self.ring.read(max(start, stop), length) if length > start else [x[:, :, :0] for x in (k, v)])
        keys, values = (torch.cat(x, 2) for x in zip(*parts))
        o, lse = small_attention(q, keys, values, scale)
        if stop > start and self.topk:
            near = lse
            if self.ahead and self.among_all:  # the newest token was not there
                _, near = small_attention(looks[0], keys[:, :, :-1], values[:, :, :-1], looks[1])
            self.chosen, left_out = self._choose(layer, q, scale, start, stop, near, *looks)
            fetched = self.prefetcher.fetch_tokens(self.store, self.chosen)
            o, lse = merge_attention(o, lse, *small_attention(q, *fetched, scale, (self.chosen >= 0).unsqueeze(2)))
        if left_out is not None:
            mean = (self.vsum / (stop - start)).float()  # [B, KV, Dv], for every head of its group
            mean = mean.unsqueeze(2).expand(-1, -1, q.shape[1] // mean.shape[1], -1).reshape(*o.shape)
            mass, shift = left_out
            o, _ = merge_attention(o, lse, mean + shift, mass)
        return o.to(q.dtype)

    def attend_by_kernels(self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None, scale: float, length: int, pos: Tensor) -> Tensor:
        """What `attend` does (k None: the token is in the ring already), with nothing on the device depending on the host's `length`, so that a CUDA graph can hold it."""
        if k is not None:
            kernels.rotate_append(q, k, v, None, None, self.ring.k, self.ring.v, pos, self.ring.size)
        q, stop = q.contiguous(), self.edge(length)
        rows = self.prefetcher.brought(layer, self, stop)
        if rows is None:  # not foreseen: the channels are chosen, exactly, on the spot
            self._foreseen = (q, scale)
            self.prefetcher.bring(layer, self, q, pos, stop)
            rows = self.prefetcher.brought(layer, self, stop)
        sample = self._scratch(q).attends
        if not self.ahead:
            self.choose_tokens(q, rows, pos, scale)
        table, staged = self.prefetcher.tokens_of(self, min(self.topk, stop - self.sink_size), rows, pos)
        ring = (self.ring.k, self.ring.v)
        o = sparse_kernels.gather_attention(q, self.sink, ring, table, staged, self.chosen, pos, scale, self.recent, rows, sample, self.vsum, self.slope, scores=self.ahead and self.tail)
        self.prefetcher.done_with_rows(self.turn)
        self._foreseen = None
        return o

    def _scratch(self, q: Tensor) -> sparse_kernels.Scratch:
        """What the kernels write between scoring and attention; all layers in turn have the same."""
        p, head = self.prefetcher, self.kmax.shape[:2]
        if p.scratch is None:
            near = sparse_kernels.near_blocks(self.sink_size, self.recent) if self.among_all else 0
            p.scratch = sparse_kernels.Scratch(head, q.shape[1] // head[1], p.blocks * BLOCK, p.topk, q.device, near, self.ahead)
        return p.scratch

    def choose_tokens(self, q: Tensor, rows: sparse_kernels.Rows, pos: Tensor, scale: float) -> None:
        """Have `chosen` be the candidates that matter most to q `[B, H, 1, D]`, the true or the predicted query, by kernels."""
        if self.chosen is None or self.chosen.shape != (*self.kmax.shape[:2], self.topk):
            self.chosen = torch.empty(*self.kmax.shape[:2], self.topk, dtype=torch.int32, device=q.device)
            self.guess = torch.zeros(*self.kmax.shape[:2], dtype=torch.int32, device=q.device)
        scratch, near = self._scratch(q), (self.sink[0], self.ring.k) if self.among_all else None
        if not self.authors or (self.tail and not self.ahead):
            sparse_kernels.estimate(q, rows, pos, scale, self.sink_size, self.recent, scratch.chooses, near, newest=not self.ahead)
        sparse_kernels.weigh(q, rows, pos, scale, self.sink_size, self.recent, scratch, self.authors)
        sparse_kernels.select(scratch, self.begin, self.chosen, self.guess, pos, self.sink_size, self.recent, self.left, self.least)

    def look(self, rows: sparse_kernels.Rows, pos: Tensor) -> None:
        """`choose_tokens` by the query that was foreseen."""
        self.choose_tokens(self._foreseen[0], rows, pos, self._foreseen[1])

    def settle(self, length: int) -> None:
        """Before a decode step that makes it `length` tokens: bring what the kernels read in place up to date."""
        if self.tilt and self._counted != (counted := self.edge(length) - self.sink_size) and counted > 0:
            if self.slope is None:
                self.slope = torch.empty_like(self.moments[..., :-1, :-1], dtype=torch.float32, memory_format=torch.contiguous_format)
            self.slope.copy_(self.covariance(counted))
            self._counted = counted

    def covariance(self, count: int) -> Tensor:
        """Of K with V over the `count` candidates, float32 `[B, KV, D, Dv]`."""
        mean = self.moments / count
        return (mean[..., :-1, :-1] - mean[..., :-1, -1:] * mean[..., -1:, :-1]).float()

    def _choose(self, layer: int, q: Tensor, scale: float, start: int, stop: int, near: Tensor, looks: Tensor, looks_scale: float) -> tuple[Tensor, tuple[Tensor, Tensor | float] | None]:
        """Positions `[B, KV, min(K, M)]` of the best candidates among start .. stop - 1, and, with the tail, the log-sum-exp
        `[B, H, 1]` of the other candidates' approximate scores and the shift of their value `[B, H, 1, Dv]`.

        looks: the query that chooses, q itself without `ahead`, and the scale of its scores. near: log-sum-exp of those of sink and window, `[B, H, 1]`."""
        if stop - start <= self.topk:
            B, KV = self.kmax.shape[:2]
            return torch.arange(start, stop, device=q.device).expand(B, KV, -1).contiguous(), None
        begin = start // BLOCK * BLOCK  # rows come in whole blocks
        rows = self.prefetcher.take_rows(layer, self.turn, min(self.channels, self.kmax.shape[2]), stop - begin)
        if rows is None:  # layer 0 has no layer before it: its channels are chosen, exactly, on the spot
            self._index = self.channels_for(looks)
            self.prefetcher.prefetch(layer, self.turn, self.store, self._index, begin, stop)
            rows = self.prefetcher.take_rows(layer, self.turn, min(self.channels, self.kmax.shape[2]), stop - begin)
        rows = rows[..., start - begin :]
        scores = approximate_scores(looks, self._index, rows, looks_scale)
        # Sums are estimated from some blocks, which stand for all.
        block = torch.arange(start - begin, stop - begin, device=q.device) // BLOCK
        stride = sparse_kernels.stride((stop - begin) // BLOCK)
        sampled = block % stride == stride // 2
        some = sampled.nonzero()[:, 0]
        few = math.log(len(some) / len(block))
        own = scores[..., some].logsumexp(-1, keepdim=True) - few
        shares, mass = importance(scores, self.authors, near.view(*scores.shape[:3], 1) if self.among_all else None, own)
        chosen = select_tokens(shares, self.topk)
        kept = needed(shares, mass, chosen, self.left, self.least, sampled) if self.left else torch.ones_like(chosen, dtype=torch.bool)
        taken = torch.zeros_like(shares, dtype=torch.bool).scatter(-1, chosen, kept)
        chosen = chosen + start
        if self.left:  # those that are kept, ascending, and -1 behind the last
            chosen = torch.where(kept, chosen, stop).sort(-1).values[..., : int(kept.sum(-1).max())]
            chosen = torch.where(chosen == stop, -1, chosen)
        if self.tail:
            scores = scores[..., some] if looks is q else approximate_scores(q, self._index, rows[..., some], scale)
        self.prefetcher.done_with_rows(self.turn)
        if not self.tail:
            return chosen, None
        others = scores.masked_fill(taken[..., some].unsqueeze(2), float("-inf"))
        shift = tail_shift(q, scores, others, self.covariance(stop - start), scale) if self.tilt else 0.0
        return chosen, (others.logsumexp(-1).reshape(q.shape[0], q.shape[1], 1) - few, shift)

    # -- between calls

    def crop(self, old: int, new: int) -> None:
        """Forget positions new .. old - 1; what of the window of `new` tokens had left it comes back from the host.

        Also where the ring still has it: what comes back, rounded or not, must depend on positions alone.
        """
        edge, missing = self.edge(new), min(self.edge(old), new)
        self._counted = -1
        if self.tilt:
            self._uncount(max(edge, self.sink_size), self.edge(old))
        if edge < missing:
            head, D, Dv = self.kmax.shape[:2], self.ring.k.shape[3], self.ring.v.shape[3]
            k, v = self.ring.k.new_empty(*head, missing, D), self.ring.v.new_empty(*head, missing, Dv)
            self.store.read(k, v, edge, missing)
            start = self.ring.start
            self.ring.write(edge, k[:, :, edge:], v[:, :, edge:])
            self.ring.start = min(start, edge)
        self.refresh(new)

    def _uncount(self, start: int, stop: int) -> None:
        """Take positions start .. stop - 1, which the host still has, out of the moments."""
        for k, v in self._stored(start, stop):
            self.moments -= moments_of(k, v)

    def _stored(self, start: int, stop: int):
        """K and V `[B, KV, n, D]` of positions start .. stop - 1 on the host, in bounded pieces on the device."""
        for slab, first, last in self.store.parts(start, stop):
            slab.wait()
            while first < last:
                cut = min((first // 4096 + 1) * 4096, last)
                yield slab.tokens(first, cut, self.kmax.device)
                first = cut

    def roll_back(self, length: int) -> None:
        """Be again as before the call that began at `length` tokens and did not end."""
        self.ring.roll_back(length)
        self.refresh(length)
        self._foreseen = None
        self._counted = -1

    def tensors(self, length: int) -> dict[str, Tensor]:
        """The content at `length` tokens, for `restore`; channel rows, maxima and sums are not in it."""
        edge = self.edge(length)
        found = dict(zip(("tail.k", "tail.v"), self.ring.read(edge, length)))
        found |= {f"sink.{name}": x[:, :, :length] for name, x in zip("kv", self.sink)}
        if self.tilt:
            found["moments"] = self.moments
        for i, (slab, first, last) in enumerate(self.store.parts(0, edge)):
            found |= dict(zip((f"host.k.{i}", f"host.v.{i}"), slab.tokens(first, last)))
        return found

    def restore(self, tensors: dict[str, Tensor], length: int) -> None:
        """Fill the empty layer, with room reserved, by what `tensors(length)` gave."""
        edge, device = self.edge(length), self.kmax.device
        self.ring.write(edge, tensors["tail.k"].to(device), tensors["tail.v"].to(device))
        self.ring.start = edge
        self.put_sink(0, tensors["sink.k"].to(device), tensors["sink.v"].to(device))
        at = i = 0
        while at < edge:
            k, v = tensors[f"host.k.{i}"], tensors[f"host.v.{i}"]
            self.store.write(at, k, v)
            at, i = at + k.shape[2], i + 1
        if self.tilt:
            self.moments.copy_(tensors["moments"])
        self.refresh(length)

    def nbytes(self) -> dict[str, dict[str, int]]:
        """GPU and host bytes by part."""
        gpu = {}
        if self.ring is not None:
            gpu = {
                "sink": sum(x.nbytes for x in self.sink),
                "window": self.ring.k.nbytes + self.ring.v.nbytes,
                "channel maxima": self.kmax.nbytes,
                "value sums": self.vsum.nbytes if self.tail else 0,
                "chosen tokens": self.chosen.nbytes + self.guess.nbytes if self.guess is not None else 0,
                "moments": self.moments.nbytes + (self.slope.nbytes if self.slope is not None else 0) if self.tilt else 0,
            }
        return {"gpu": gpu, "host": self.store.nbytes()}
