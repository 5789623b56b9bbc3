# SPDX-License-Identifier: Apache-2.0
"""Host memory for sparsity-friendly layers: where K and V live, how they get there, and how rows come back ahead of need.

* `HostStore`: one layer's K, V (in 16 bits or 8) and channel rows (K transposed, in 16 bits or fewer) in slabs of host memory, pinned where there is CUDA, so that the GPU's copy
  engines can reach them. A slab is as large as the call that needs it, later ones a fortieth of what is stored: at most
  2.5 % stands empty, and growth copies nothing.
* `Prefetcher`: one background thread that gathers rows on the CPU into pinned staging buffers and copies them to the GPU on
  a stream of its own, while the GPU computes. On a machine without CUDA the same code runs without streams.
* `ZeroCopy`: kernels that read pinned host memory in place, on a side stream that a CUDA graph can hold. It may keep channel
  rows on the GPU from step to step (*resident* slots), since most critical channels were critical in the step before.

Shapes: `B` batch, `KV` key/value heads, `N` tokens stored, `D` head_dim, `C` critical channels, `K` tokens fetched.
"""

import contextlib
import functools
import math
import threading
import weakref
from queue import SimpleQueue

import torch
import torch.nn.functional as F
from torch import Tensor

import kernels
import sparse_kernels
from pinned import Pinner, alias
from quant import SHARED, decode_shared, dequantise, encode_shared, pack, quantise, token_row, unpack
from sparse_kernels import BLOCK

# ------------------------------------------------------------------------------------------------------------- tokens


def encode_tokens(k: Tensor, v: Tensor, bits: int) -> Tensor:
    """Rows `[..., T, width]` of `k [..., T, D]` and `v [..., T, Dv]`, see `quant.token_row`."""
    if bits == 16:
        return torch.cat((k, v), -1)
    if by_kernels(k, v):
        return sparse_kernels.encode_tokens(k, v)
    _, width = token_row(k.shape[-1], v.shape[-1], bits, k.dtype)
    (k, k_exponents), (v, v_exponents) = encode_shared(k), encode_shared(v)
    row = torch.cat((k, v, k_exponents, v_exponents), -1)
    return F.pad(row, (0, width - row.shape[-1]))


def decode_tokens(rows: Tensor, D: int, Dv: int, bits: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """K and V of rows `[..., width]`: at 16 bits views of them."""
    if bits == 16:
        return rows[..., :D], rows[..., D:]
    at, blocks, v_blocks = D + Dv, -(-D // SHARED), -(-Dv // SHARED)
    return decode_shared(rows[..., :D], rows[..., at : at + blocks], dtype), decode_shared(rows[..., D:at], rows[..., at + blocks : at + blocks + v_blocks], dtype)


def round_tokens(k: Tensor, v: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """What will be read once `k [B, KV, T, D]` and `v [B, KV, T, Dv]` have been stored with so many bits."""
    if bits == 16:
        return k, v
    if by_kernels(k, v):
        return sparse_kernels.round_shared(k), sparse_kernels.round_shared(v)
    return tuple(decode_shared(*encode_shared(x), x.dtype) for x in (k, v))


# ---------------------------------------------------------------------------------------------------- channel rows


def row_planes(bits: int, dtype: torch.dtype) -> list[tuple[torch.dtype, int]]:
    """How a row of the transposed keys is stored: planes of `(dtype, elements a block of 64 tokens)`.

    At 16 bits the row itself. Below, min-max codes and their ranges (scale and zero of each block), which are a fraction of
    the bytes and score as well: keys are smooth along a channel.
    """
    return [(dtype, BLOCK)] if bits == 16 else [(torch.uint8, BLOCK * bits // 8), (torch.float16, 2)]


def encode_rows(rows: Tensor, bits: int) -> list[Tensor]:
    """Planes `[..., n * elements]` of `rows [..., n * 64]`."""
    if bits == 16:
        return [rows]
    codes, scale, zero = quantise(rows, bits, BLOCK)
    return [pack(codes, bits), torch.stack((scale, zero), -1).flatten(-2)]


def encode_channels(keys: Tensor, bits: int, piece: int = 1 << 14) -> list[Tensor]:
    """`encode_rows` of the channels of `keys [..., n * 64, D]`, a piece at a time: float32 temporaries of a bounded size."""
    parts = [encode_rows(part.transpose(-1, -2).contiguous(), bits) for part in keys.split(piece, -2)]
    return [torch.cat(planes, -1) for planes in zip(*parts)]


def block_facts(k: Tensor, v: Tensor, bits: int, fast: bool) -> list[Tensor]:
    """What the host keeps of whole blocks beside `k [B, KV, n * 64, D]` and `v [B, KV, n * 64, Dv]`; `fast`: by kernels, the same.

    Returns:
        Planes of channel rows `[B, KV, D, n * elements]`, the largest |K| `[B, KV, n, D]`, the sum of V in float32 `[B, KV, n, Dv]`.
    """
    if not fast:
        return [*encode_channels(k, bits), largest(k.unflatten(-2, (-1, BLOCK))), block_sums(v)]
    planes = [k.transpose(-1, -2).contiguous()] if bits == 16 else sparse_kernels.encode_channels(k, bits)
    return [*planes, sparse_kernels.block_statistics(k, maxima=True)[0], sparse_kernels.block_statistics(v, sums=True)[1]]


def by_kernels(k: Tensor, v: Tensor) -> bool:
    """Do kernels prepare these for the host? Never in the interpreter, which knows one thread: blocks also come from the prefetcher's."""
    return k.is_cuda and sparse_kernels.summarises(k, v)


def copy_pieces(target: Tensor, source: Tensor) -> None:
    """Copy a contiguous tensor into a part of the host's memory. From CUDA piece by contiguous piece, each one DMA transfer: a strided
    copy would go through a temporary and wait."""
    if target.is_contiguous() or not source.is_cuda:
        target.copy_(source, non_blocking=True)
    else:
        for pair in zip(target, source):
            copy_pieces(*pair)


def decode_rows(planes: list[Tensor], bits: int) -> Tensor:
    """float32 rows `[..., n * 64]` from planes `[..., n * elements]`."""
    if bits == 16:
        return planes[0].float()
    scale, zero = planes[1].unflatten(-1, (-1, 2)).unbind(-1)
    return dequantise(unpack(planes[0], bits, planes[0].shape[-1] * 8 // bits), scale, zero, BLOCK)


# ------------------------------------------------------------------------------------------------------- host store


class Slab:
    """Positions start .. start + size - 1 of one layer: K, V, channel rows, and, a block, the largest |K| and the sum of V."""

    def __init__(self, pinner: Pinner, start: int, size: int, like_k: Tensor, like_v: Tensor, row_bits: int, token_bits: int = 16, later: bool = False):
        """`later`: see `Pinner.take`."""
        head, D, Dv, dtype = like_k.shape[:2], like_k.shape[3], like_v.shape[3], like_k.dtype
        self.start, self.size, self.D, self.Dv, self.bits, self.dtype = start, size, D, Dv, token_bits, dtype
        # Side by side, so that a token's K and V are one piece: read in place, they cost a GPU one walk through its page tables instead of two
        # (one H200, 1,024 tokens out of 16 GiB: 13 us instead of 42).
        take = functools.partial(pinner.take, *head, later=later)
        kind, width = token_row(D, Dv, token_bits, dtype)
        self.kv, ready_kv = take(size, width, dtype=kind)
        self.kmax, ready_kmax = take(size // BLOCK, D, dtype=dtype)
        self.vsum, ready_vsum = take(size // BLOCK, Dv, dtype=torch.float32)
        planes = [take(D, size // BLOCK * each, dtype=kind) for kind, each in row_planes(row_bits, dtype)]
        self.rows = [plane for plane, _ in planes]
        ready = [ready_kv, ready_kmax, ready_vsum, *(ready for _, ready in planes)]
        self._pinner, self._pinning = pinner, [one for one in ready if one is not None]
        self._aliases: dict[str, Tensor] | None = None

    def wait(self) -> None:
        """Until the memory is pinned, or known to stay pageable."""
        if self._pinning:
            self._pinner.now()
            for ready in self._pinning:
                ready.result()
            self._pinning = []

    def tensors(self) -> dict[str, Tensor]:
        rows = dict(zip(("channel rows", "channel ranges"), self.rows))
        return {"k and v": self.kv, **rows, "k maxima": self.kmax, "v sums": self.vsum}

    def tokens(self, first: int, last: int, device: torch.device | None = None) -> tuple[Tensor, Tensor]:
        """K and V `[B, KV, n, D]` of rows first .. last - 1, decoded on the device, if one is given."""
        return decode_tokens(self.kv[:, :, first:last].to(device or self.kv.device), self.D, self.Dv, self.bits, self.dtype)

    def facts(self, first: int, last: int) -> list[Tensor]:
        """What is kept of the blocks with rows first .. last - 1 beside K and V, in the order of `block_facts`."""
        a, b = first // BLOCK, last // BLOCK
        planes = [(plane, plane.shape[3] * BLOCK // self.size) for plane in self.rows]  # elements a block
        return [*(plane[..., a * each : b * each] for plane, each in planes), self.kmax[:, :, a:b], self.vsum[:, :, a:b]]

    def on_device(self, device: torch.device) -> dict[str, Tensor]:
        """The same memory as tensors of the device, which reads and writes it in place. It must be pinned."""
        if self._aliases is None:
            self.wait()
            self._aliases = {name: alias(tensor, device) for name, tensor in self.tensors().items()}
        return self._aliases


class HostStore:
    """One layer's K and V in host memory, positions 0 .. length - 1, always whole blocks.

    Host bytes, with S the sum of the slabs' sizes: K and V `B * KV * S * (D + Dv) * itemsize`, or at 8 bits `B * KV * S * width`, see `quant.token_row`; channel rows
    as K at 16 bits, else codes `B * KV * S * D * row_bits / 8` and ranges `B * KV * S / 64 * D * 4`; maxima `B * KV * S / 64 *
    D * itemsize`, sums of V `B * KV * S / 64 * Dv * 4`. `write` takes some 100 MiB of the GPU, for as long as it runs.
    """

    HELD = 96 << 20  # bytes on the GPU of what `write` computes at a time
    PIECE = 1 << 15  # tokens of a head whose K and V it puts side by side, or `read` takes apart, at a time

    def __init__(self, pinner: Pinner, row_bits: int = 16, token_bits: int = 16):
        self.pinner, self.row_bits, self.token_bits = pinner, row_bits, token_bits
        self.slabs: list[Slab] = []
        self._table: Tensor | None = None
        self._listed = 0  # slabs that are in it

    @property
    def capacity(self) -> int:
        return self.slabs[-1].start + self.slabs[-1].size if self.slabs else 0

    def reserve(self, length: int, like_k: Tensor, like_v: Tensor, exact: bool) -> None:
        """Make room for `length` positions (a multiple of 64): `exact`ly, for a prefill, or with some to spare for tokens to come."""
        if length > (start := self.capacity):
            size = length - start
            if not exact:
                size = max(size, 4 * BLOCK, start // 40 // BLOCK * BLOCK)
            self.slabs.append(Slab(self.pinner, start, size, like_k, like_v, self.row_bits, self.token_bits, later=exact))

    def parts(self, start: int, stop: int):
        """The slabs that hold positions start .. stop - 1: `(slab, first, last)` with rows counted inside the slab."""
        for slab in self.slabs:
            first, last = max(start - slab.start, 0), min(stop - slab.start, slab.size)
            if first < last:
                yield slab, first, last

    def write(self, start: int, k: Tensor, v: Tensor, head: int = 0) -> None:
        """Copy block-aligned `k, v [B, heads, n * 64, D]`, in any memory and rounded (`round_tokens`), to positions from `start` of the heads from `head`; on CUDA, in the current stream.

        K and V go head by head, a piece at a time, so that every copy is of contiguous memory on both sides and therefore one DMA
        transfer; what is computed of them, for as many heads at a time as `HELD` bytes allow.
        """
        fast = by_kernels(k, v)
        for slab, first, last in self.parts(start, start + k.shape[2]):
            slab.wait()
            rows = slice(slab.start + first - start, slab.start + last - start)
            facts = slab.facts(first, last)
            step = max(1, self.HELD // sum(x[:, 0].nbytes for x in facts)) if fast else 1
            for h in range(0, k.shape[1], step):
                for target, source in zip(facts, block_facts(k[:, h : h + step, rows], v[:, h : h + step, rows], self.row_bits, fast)):
                    copy_pieces(target[:, head + h : head + h + source.shape[1]], source)
            for b in range(k.shape[0]):
                for h in range(k.shape[1]):
                    pieces = (x[b : b + 1, i : i + 1].split(self.PIECE, 2) for x, i in ((slab.kv[:, :, first:last], head + h), (k[:, :, rows], h), (v[:, :, rows], h)))
                    for target, *pair in zip(*pieces):
                        target.copy_(encode_tokens(*pair, self.token_bits), non_blocking=True)

    def table(self, device: torch.device) -> Tensor:
        """The slabs as kernels need them, see `sparse_kernels`, with room for more to come: a new slab changes its content, not its place."""
        if self._table is None or len(self.slabs) >= self._table.shape[0]:
            self._table, self._listed = torch.zeros(2 * len(self.slabs) + 62, 6, dtype=torch.int64, device=device), 0
        if self._listed < len(self.slabs):
            entries = [[len(self.slabs), 0, 0, 0, 0, 0]]
            for slab in self.slabs:
                tokens, *rows = (x for name, x in slab.on_device(device).items() if name not in ("k maxima", "v sums"))
                addresses = [tokens.data_ptr(), tokens[..., slab.D :].data_ptr(), *(x.data_ptr() for x in rows)]
                entries.append([slab.start, slab.size, *addresses, *[0] * (4 - len(addresses))])
            self._table[: len(entries)] = torch.tensor(entries)
            self._listed = len(self.slabs)
        return self._table

    def write_block(self, start: int, k: Tensor, v: Tensor, largest: Tensor, total: Tensor, planes: list[Tensor]) -> None:
        """Write one block, `[B, KV, 64, D]` on the device, from position `start` on, in the current stream and in place.

        largest, total: of |K| and of V, `[B, KV, D]`. planes: of the channel rows, `[B, KV, D, elements]`.
        """
        slab = next(slab for slab in self.slabs if slab.start <= start < slab.start + slab.size)
        held, at = slab.on_device(k.device), start - slab.start
        held["k and v"][:, :, at : at + BLOCK] = encode_tokens(k, v, self.token_bits)
        held["k maxima"][:, :, at // BLOCK] = largest
        held["v sums"][:, :, at // BLOCK] = total
        for name, plane in zip(("channel rows", "channel ranges"), planes):
            each = plane.shape[3]
            held[name][..., at // BLOCK * each : (at // BLOCK + 1) * each] = plane

    def read(self, k: Tensor, v: Tensor, start: int, stop: int) -> None:
        """Copy positions start .. stop - 1 into the same positions of `k, v [B, KV, >= stop, D]`; on CUDA, in the current stream."""
        for slab, first, last in self.parts(start, stop):
            slab.wait()
            for b in range(k.shape[0]):
                for h in range(k.shape[1]):
                    for at in range(first, last, self.PIECE):
                        end = min(at + self.PIECE, last)
                        rows = slice(slab.start + at, slab.start + end)
                        both = slab.kv[b, h, at:end].to(k.device, non_blocking=True)
                        k[b, h, rows], v[b, h, rows] = decode_tokens(both, k.shape[3], v.shape[3], self.token_bits, k.dtype)

    def gather_channels(self, index: Tensor, start: int, stop: int, out: list[Tensor]) -> None:
        """Channel rows `index [B, KV, C]` of positions start .. stop - 1, whole blocks, into planes `out`, each `[B, KV, C, n]`."""
        B, KV, C = index.shape
        for slab, first, last in self.parts(start, stop):
            at = slab.start + first - start
            for source, target in zip(slab.rows, out):
                each = source.shape[3] * BLOCK // slab.size  # elements a block
                a, b, t = (x // BLOCK * each for x in (first, last, at))
                for i in range(B):
                    for h in range(KV):
                        torch.index_select(source[i, h, :, a:b], 0, index[i, h], out=target[i, h, :, t : t + b - a])

    def gather_tokens(self, index: Tensor, k: Tensor, v: Tensor) -> None:
        """Rows of K and V at ascending positions `index [B, KV, K]`, into `k, v [B, KV, K, D]`."""
        D, (kind, width) = k.shape[3], token_row(k.shape[3], v.shape[3], self.token_bits, k.dtype)
        rows = None if self.token_bits == 16 else torch.empty(*index.shape, width, dtype=kind)
        parts = [(k, slice(0, D)), (v, slice(D, width))] if rows is None else [(rows, slice(0, width))]
        for b in range(index.shape[0]):
            for h in range(index.shape[1]):
                for slab in self.slabs:  # ascending, so a slab's share is one run
                    run = slice(*torch.searchsorted(index[b, h], torch.tensor([slab.start, slab.start + slab.size])).tolist())
                    at = index[b, h, run] - slab.start
                    for target, columns in parts:
                        torch.index_select(slab.kv[b, h, :, columns], 0, at, out=target[b, h, run])
        if rows is not None:
            for target, source in zip((k, v), decode_tokens(rows, D, v.shape[3], self.token_bits, k.dtype)):
                target.copy_(source)

    def channel_maxima(self, start: int, stop: int) -> Tensor | None:
        """The largest |K| of each channel over positions start .. stop - 1, `[B, KV, D]` on the host; stop a multiple of 64, None if empty.

        Whole blocks come from their stored maxima; a block that `start` cuts (the sink's end) is read itself.
        """
        found = []
        for slab, first, last in self.parts(start, stop):
            whole = -(-first // BLOCK)
            if first % BLOCK:
                found.append(largest(slab.tokens(first, whole * BLOCK)[0]))
            if whole < last // BLOCK:
                found.append(slab.kmax[:, :, whole : last // BLOCK].amax(2))
        return torch.stack(found).amax(0) if found else None

    def value_sum(self, start: int, stop: int) -> Tensor | None:
        """The sum of V over positions start .. stop - 1, float64 `[B, KV, Dv]` on the host; stop a multiple of 64, None if empty."""
        found = []
        for slab, first, last in self.parts(start, stop):
            whole = -(-first // BLOCK)
            found.append(slab.tokens(first, whole * BLOCK)[1].sum(2, dtype=torch.float64))
            found.append(slab.vsum[:, :, whole : last // BLOCK].sum(2, dtype=torch.float64))
        return torch.stack(found).sum(0) if found else None

    def close(self) -> None:
        for slab in self.slabs:
            slab.wait()
            for tensor in (slab.kv, *slab.rows, slab.kmax, slab.vsum):
                self.pinner.release(tensor)
        self.slabs, self._table, self._listed = [], None, 0

    def nbytes(self) -> dict[str, int]:
        """Host bytes by part."""
        parts: dict[str, int] = {}
        for slab in self.slabs:
            for name, tensor in slab.tensors().items():
                parts[name] = parts.get(name, 0) + tensor.nbytes
        return parts


def block_sums(v: Tensor) -> Tensor:
    """The sum of each block of 64 tokens, `[..., n * 64, Dv]` to float32 `[..., n, Dv]`; summed in float64, so that no layout shows in it."""
    # A piece at a time, since PyTorch makes float64 copies of what it is to sum so.
    return torch.cat([piece.unflatten(-2, (-1, BLOCK)).sum(-2, dtype=torch.float64).float() for piece in v.split(256 * BLOCK, -2)], -2)


def largest(k: Tensor) -> Tensor:
    """The largest |K| of each channel, `[..., T, D]` to `[..., D]`, without a tensor of absolute values."""
    low, high = torch.aminmax(k, dim=-2)
    return torch.maximum(high, -low)


# ------------------------------------------------------------------------------------------------------- prefetcher


class Event:
    """A CUDA event, or nothing where there is no CUDA. It orders streams, and the host with them."""

    def __init__(self, device: torch.device):
        self._event = torch.cuda.Event() if device.type == "cuda" else None

    def record(self, stream=None) -> None:
        if self._event is not None:
            self._event.record(stream or torch.cuda.current_stream())

    def wait(self) -> None:
        """The current stream goes on only after what was recorded."""
        if self._event is not None:
            torch.cuda.current_stream().wait_event(self._event)

    def synchronize(self) -> None:
        """The calling thread goes on only after what was recorded."""
        if self._event is not None:
            self._event.synchronize()


class Job:
    """Work for the background thread, and what came of it: a Future from one C lock.

    A Future's Condition is Python code, and Ctrl-C inside it can leave its lock taken for ever, or come out as a RuntimeError.
    """

    def __init__(self, work, arguments: tuple):
        self._work, self._arguments = work, arguments
        self._error: BaseException | None = None
        self._running = threading.Lock()
        self._running.acquire()

    def run(self) -> None:
        try:
            self._work(*self._arguments)
        except BaseException as error:
            self._error = error
        self._work = self._arguments = None
        self._running.release()

    def exception(self) -> BaseException | None:
        """Wait; what was raised."""
        with self._running:
            return self._error

    def result(self) -> None:
        """Wait; raises what was raised."""
        if (error := self.exception()) is not None:
            raise error


def _work_off(jobs: SimpleQueue) -> None:
    while (job := jobs.get()) is not None:
        job.run()


class Prefetcher:
    """Brings rows from host stores to the GPU: critical channels ahead of need in a background thread, chosen tokens at once.

    Two buffers of channel rows take turns *by position among the sparse layers*, so that one is written while the other is
    read whatever layers lie between. Events go both ways: a reader waits for the copy, a copy for the last reader.
    Tokens of 8 bits are decoded here, on the host, and sent in 16.

    GPU bytes: two row buffers, `2 * B * KV * C * capacity * itemsize` at 16 bits, else `2 * B * KV * C * capacity * (row_bits / 8 +
    4 / 64)`; fetched tokens `B * KV * K * (D + Dv) * itemsize`. Host staging (CUDA only): the same again, tokens twice, and
    the index tables.
    """

    def __init__(self, device: torch.device, row_bits: int = 16):
        self.device, self.row_bits = device, row_bits
        self.cuda = device.type == "cuda"
        self.stream = torch.cuda.Stream(device) if self.cuda else None
        self._queue: SimpleQueue | None = None  # of the thread, which ends with a None
        self._thread: threading.Thread | None = None
        self._jobs: dict[int, Job] = {}  # layer -> its rows under way
        self.rows: list[list[Tensor]] = []  # two of planes [B, KV, C, blocks * elements]
        self.blocks = 0  # that they hold
        self.tokens: tuple[Tensor, Tensor] | None = None  # fetched K and V [B, KV, K, D]
        self.scratch: sparse_kernels.Scratch | None = None
        self._index: list[Tensor] = []  # the channels in each row buffer, for the kernels
        self._staging: dict[str, list[Tensor]] = {}
        self._turn = 0  # of the token staging

    def on_stream(self):
        """Context: CUDA work goes to the prefetcher's own stream."""
        return torch.cuda.stream(self.stream) if self.cuda else contextlib.nullcontext()

    def reserve(self, like_k: Tensor, like_v: Tensor, channels: int, positions: int, topk: int) -> bool:
        """Make room for rows of `positions` tokens, a multiple of 64; True if a buffer moved."""
        if self.rows and self.blocks * BLOCK >= positions:
            return False
        self.wait_all()
        head, dtype = like_k.shape[:2], like_k.dtype
        self.blocks = whole_chunks(max(positions // BLOCK, self.blocks * 9 // 8))
        self.topk, self.scratch = topk, None
        if kernels.usable(self.device):
            self._place = torch.arange(channels, dtype=torch.int32, device=self.device).expand(*head, -1).contiguous()
            self._index = [torch.empty(*head, channels, dtype=torch.int32, device=self.device) for _ in range(2)]
        shapes = [(kind, (*head, channels, self.blocks * each)) for kind, each in row_planes(self.row_bits, dtype)]
        self.rows = []  # the old ones are freed first
        self.rows = [[torch.empty(shape, dtype=kind, device=self.device) for kind, shape in shapes] for _ in range(2)]
        if self.tokens is None:
            self.tokens = tuple(torch.empty(*head, topk, x.shape[3], dtype=dtype, device=self.device) for x in (like_k, like_v))
            self._written, self._read, self._copied = ([Event(self.device) for _ in range(2)] for _ in range(3))
        if self.cuda:
            pinned = {"dtype": dtype, "pin_memory": True}
            self._staging = {
                "rows": [[torch.empty(shape, dtype=kind, pin_memory=True) for kind, shape in shapes] for _ in range(2)],
                "k": [torch.empty(self.tokens[0].shape, **pinned) for _ in range(2)],
                "v": [torch.empty(self.tokens[1].shape, **pinned) for _ in range(2)],
                "index": [torch.empty(*head, channels, dtype=torch.int64, pin_memory=True) for _ in range(2)],
            }
        return True

    def submit(self, work, *arguments) -> Job:
        """Run `work` in the background thread; jobs run one at a time and in order. Errors come out of the job's result()."""
        if self._thread is None:
            queue = SimpleQueue()
            thread = threading.Thread(target=_work_off, args=(queue,), name="tailorkv-prefetch", daemon=True)
            thread.start()
            weakref.finalize(self, queue.put, None)  # a prefetcher that nobody closed takes its thread with it
            self._queue, self._thread = queue, thread  # an interrupted start is forgotten, and the next one is another
        job = Job(work, arguments)
        self._queue.put(job)
        return job

    def prefetch(self, layer: int, turn: int, store: HostStore, index: Tensor, start: int, stop: int) -> None:
        """Begin to fetch channel rows `index [B, KV, C]`, the whole blocks start .. stop - 1, of `layer`; `turn`: its place among sparse layers."""
        slot = turn % 2
        if self.cuda:
            staged = self._staging["index"][slot].flatten()[: index.numel()].view(index.shape)
            staged.copy_(index, non_blocking=True)
            index = staged
        chosen = Event(self.device)
        chosen.record()
        self._jobs[layer] = self.submit(self._fetch_rows, slot, store, index, chosen, start, stop)

    def _fetch_rows(self, slot: int, store: HostStore, index: Tensor, chosen: Event, start: int, stop: int) -> None:
        chosen.synchronize()
        if not self.cuda:
            store.gather_channels(index, start, stop, self._front(self.rows[slot], index.shape[2], stop - start))
            return
        self._written[slot].synchronize()  # the copy before this one has left the staging buffer
        staged = self._front(self._staging["rows"][slot], index.shape[2], stop - start)
        store.gather_channels(index, start, stop, staged)
        with torch.cuda.stream(self.stream):
            self._read[slot].wait()
            for target, source in zip(self._front(self.rows[slot], index.shape[2], stop - start), staged):
                target.copy_(source, non_blocking=True)
            self._written[slot].record(self.stream)

    def _front(self, buffer: list[Tensor], channels: int, positions: int) -> list[Tensor]:
        """The front of a row buffer as contiguous planes for so many channels and positions, so that one transfer moves each whole."""
        shapes = [(*plane.shape[:2], channels, plane.shape[3] // self.blocks * (positions // BLOCK)) for plane in buffer]
        return [plane.flatten()[: math.prod(shape)].view(shape) for plane, shape in zip(buffer, shapes)]

    def take_rows(self, layer: int, turn: int, channels: int, positions: int) -> Tensor | None:
        """The prefetched rows, float32 `[B, KV, C, positions]`, once they are there; None if `layer` has none under way. Raises what the thread raised."""
        job = self._jobs.pop(layer, None)
        if job is None:
            return None
        job.result()
        self._written[turn % 2].wait()
        return decode_rows(self._front(self.rows[turn % 2], channels, positions), self.row_bits)

    def done_with_rows(self, turn: int) -> None:
        """The current stream has read the rows: their buffer may be written again."""
        self._read[turn % 2].record()

    def fetch_tokens(self, store: HostStore, index: Tensor) -> tuple[Tensor, Tensor]:
        """K and V rows `[B, KV, K, D]` at ascending positions `index [B, KV, K]`. The one transfer that nothing can hide.

        -1, behind the last of a head that has fewer than others: any row, which nobody is to look at.
        """
        count = index.shape[2]
        index = torch.where(index < 0, index.amax(-1, keepdim=True).clamp(min=0), index) if count else index
        k, v = (x[:, :, :count] for x in self.tokens)
        if not self.cuda:
            store.gather_tokens(index, k, v)
            return k, v
        self._turn ^= 1
        self._copied[self._turn].synchronize()  # the copy before last has left this staging buffer
        staged = [self._staging[name][self._turn][:, :, :count] for name in "kv"]
        store.gather_tokens(index.cpu(), *staged)
        for target, source in zip((k, v), staged):
            for b in range(source.shape[0]):
                for h in range(source.shape[1]):
                    target[b, h].copy_(source[b, h], non_blocking=True)
        self._copied[self._turn].record()
        return k, v

    # -- for the kernels, which score and attend in place of plain PyTorch

    def bring(self, layer: int, entry, q: Tensor, pos: Tensor, stop: int) -> None:
        """Choose channels of the `SparseLayer` `entry` by the query `[B, H, 1, D]` and begin to fetch their rows of positions below `stop`."""
        index = first_of(self._index[entry.turn % 2], entry.channels)
        entry.choose_channels(q, index, index, index)
        self.prefetch(layer, entry.turn, entry.store, index.long(), entry.begin, stop)

    def brought(self, layer: int, entry, stop: int) -> sparse_kernels.Rows | None:
        """Rows of positions below `stop` for the current stream; None if `layer` has none under way. Raises what the thread raised."""
        job = self._jobs.pop(layer, None)
        if job is None:
            return None
        job.result()
        self._written[entry.turn % 2].wait()
        planes = self._front(self.rows[entry.turn % 2], min(entry.channels, entry.kmax.shape[2]), stop - entry.begin)
        index, place = first_of(self._index[entry.turn % 2], entry.channels), self._place[:, :, : entry.channels].contiguous()
        return sparse_kernels.Rows(planes, index, place, self.row_bits, entry.begin)

    def tokens_of(self, entry, count: int, rows: sparse_kernels.Rows, pos: Tensor) -> tuple[Tensor | None, tuple[Tensor, Tensor] | None]:
        """For `sparse_kernels.gather_attention`: a slab table, or the first `count` of `entry.chosen`'s rows, fetched."""
        if entry.ahead:  # no sooner: this thread would have to wait for the rows
            entry.look(rows, pos)
        self.fetch_tokens(entry.store, entry.chosen[:, :, :count].long())
        return None, self.tokens

    def wait_all(self) -> None:
        """Until nothing is under way; what the thread raised for rows that nobody took is dropped with them."""
        for job in self._jobs.values():
            job.exception()
        self._jobs.clear()
        if self.cuda:
            self.stream.synchronize()

    def close(self) -> None:
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()
            self._thread = None
        self._jobs.clear()
        if self.cuda:
            torch.cuda.synchronize(self.device)
        self.rows, self.blocks, self.tokens, self.scratch, self._index, self._staging = [], 0, None, None, [], {}

    def nbytes(self) -> dict[str, dict[str, int]]:
        gpu = {"critical rows": sum(plane.nbytes for rows in self.rows for plane in rows), "fetched tokens": sum(x.nbytes for x in self.tokens or ())}
        gpu["scores"] = self.scratch.nbytes() if self.scratch is not None else 0
        gpu["index tables"] = sum(x.nbytes for x in self._index) + self._place.nbytes if self._index else 0
        staging = [plane for rows in self._staging.get("rows", ()) for plane in rows]
        staging += [x for name in ("k", "v", "index") for x in self._staging.get(name, ())]
        return {"gpu": gpu, "host": {"staging": sum(x.nbytes for x in staging)}}


class ZeroCopy:
    """Brings rows from host stores to the GPU by kernels that read pinned host memory in place, on a side stream.

    The same interface as `Prefetcher`, for the kernels only. With `resident` slots R for each KV head and layer, channel rows stay
    where they are until their slot, the least recently used, is needed for another channel; with R = D all of them are there and
    nothing is ever fetched. Without, two buffers take turns as in `Prefetcher`.

    With `ahead` tokens are chosen and fetched there as well, behind the rows.

    Tokens of 8 bits are always fetched to a buffer, so that attention reads 16 bits.

    GPU bytes, with P the positions of whole chunks of 1,024 and r = row_bits / 8 + 4 / 64 (itemsize at 16 bits): rows `2 * B * KV * C * P * r`, or
    `B * KV * R * P * r` and slot tables `B * KV * R * 12` a sparse layer; index tables `B * KV * C * 12` a sparse layer; `sparse_kernels.Scratch`; with
    `ahead` or 8 bits fetched tokens `B * KV * K * (D + Dv) * itemsize`, twice where a query is foreseen before the layer before has attended. Nothing on the host.
    """

    def __init__(self, device: torch.device, row_bits: int = 16, resident: int = 0, layers: int = 1, ahead: bool = False, token_bits: int = 16):
        """`layers`: how many sparse layers there are."""
        self.device, self.row_bits, self.resident, self.layers, self.ahead, self.token_bits = device, row_bits, resident, layers, ahead, token_bits
        self.cuda = device.type == "cuda"
        # What the decoder's matrices leave of the GPU is little; where both wait for room, it is this that must be ready in time.
        self.stream = torch.cuda.Stream(device, priority=-1) if self.cuda else None
        self.tokens: list[tuple[Tensor, Tensor]] = []  # with `ahead` or 8 bits: fetched K and V [B, KV, K, D]; with `ahead` pairs that layers take in turn
        self._pair: dict[int, int] = {}  # which of them each layer has, by its turn
        self._newest = 0  # which of them was taken last
        self.planes: list[list[Tensor]] = []  # of each sparse layer
        self.blocks = 0  # that they hold
        self.scratch: sparse_kernels.Scratch | None = None
        self.complete = False  # all channels are resident
        self.stale = True  # what is resident does not fit what is stored
        self._brought: set[int] = set()

    def reserve(self, like_k: Tensor, like_v: Tensor, channels: int, positions: int, topk: int) -> bool:
        """Make room for rows of `positions` tokens, a multiple of 64; True if a buffer moved."""
        if self.planes and self.blocks * BLOCK >= positions:
            return False
        self.wait_all()
        head, D, device, n = like_k.shape[:2], like_k.shape[3], self.device, self.layers
        self.blocks = whole_chunks(max(positions // BLOCK, self.blocks * 9 // 8))
        self.topk, self.complete, self.stale = topk, self.resident >= D, True
        slots = min(max(self.resident, channels), D) if self.resident else channels
        self.planes, self.scratch = [], None  # the old ones are freed first
        held = [[torch.empty(*head, slots, self.blocks * each, dtype=kind, device=device) for kind, each in row_planes(self.row_bits, like_k.dtype)] for _ in range(n if self.resident else 2)]
        ints = {"dtype": torch.int32, "device": device}
        self._index, self._slot, self._missing = ([torch.empty(*head, channels, **ints) for _ in range(n)] for _ in range(3))
        self._held, self._stamp = [None] * n, [None] * n
        if self.complete:
            self._slot = self._index  # each channel has its place
        elif self.resident:
            self._held = [torch.full((*head, slots), -1, **ints) for _ in range(n)]
            self._stamp = [torch.zeros(*head, slots, dtype=torch.int64, device=device) for _ in range(n)]
        else:
            self._slot = [None] * n  # row i is the i-th channel's
        self._written, self._fetched = ([Event(device) for _ in range(n)] for _ in range(2))
        if (self.ahead or self.token_bits < 16) and not self.tokens:
            self.tokens = [tuple(torch.empty(*head, topk, x.shape[3], dtype=x.dtype, device=device) for x in (like_k, like_v))]
        self.planes = [held[turn % len(held)] for turn in range(n)]  # last: who sees them finds the others too, whenever an interrupt came
        return True

    def settle(self, stores: list[HostStore], begin: int, stop: int) -> None:
        """Before a decode step: make what is resident fit what is stored, if it does not: positions `begin` to `stop - 1`."""
        if not self.stale:
            return
        for turn, store in enumerate(stores):
            store.table(self.device)
            if self._held[turn] is not None:
                self._held[turn].fill_(-1)
            elif self.complete:
                for slab, first, last in store.parts(begin, stop):
                    held = slab.on_device(self.device)
                    for plane, name in zip(self.planes[turn], ("channel rows", "channel ranges")):
                        each = plane.shape[3] // self.blocks
                        a, b, at = (x // BLOCK * each for x in (first, last, slab.start + first - begin))
                        plane[..., at : at + b - a] = held[name][..., a:b]
        self.stale = False

    def extend(self, turn: int, planes: list[Tensor], at: int) -> None:
        """A block has joined the host store: put its rows `[B, KV, D, elements]` behind those that are resident, as block `at`."""
        if not self.resident:
            return
        for plane, new in zip(self.planes[turn], planes):
            if self._held[turn] is not None:
                new = new.gather(2, self._held[turn].long().clamp(min=0).unsqueeze(-1).expand(-1, -1, -1, new.shape[3]))
            each = new.shape[3]
            plane[..., at * each : (at + 1) * each] = new

    def bring(self, layer: int, entry, q: Tensor, pos: Tensor, stop: int) -> None:
        """Choose channels of the `SparseLayer` `entry` by the query `[B, H, 1, D]` and begin to fetch those of their rows that are not there; with `ahead`, tokens as well."""
        turn = entry.turn
        index, slot, missing = self._tables(entry)
        if entry.ahead:
            if self._brought and len(self.tokens) == 1:  # the layer before has still to read its own
                self.tokens.append(tuple(torch.empty_like(x) for x in self.tokens[0]))
            self._pair[turn] = self._newest = (self._newest + 1) % len(self.tokens)
        self._brought.add(layer)
        if self.complete and not entry.ahead:
            entry.choose_channels(q, index, slot, missing)
            return
        ready = Event(self.device)
        ready.record()  # also behind the last reader of these rows: layers read them in turn, in the current stream
        with torch.cuda.stream(self.stream) if self.cuda else contextlib.nullcontext():
            ready.wait()
            entry.choose_channels(q, index, slot, missing, self._held[turn], self._stamp[turn], pos)
            rows = sparse_kernels.Rows(self.planes[turn], index, slot, self.row_bits, entry.begin)
            table = entry.store.table(self.device)
            if not self.complete:
                sparse_kernels.fetch_rows(table, rows, missing if self.resident else None, entry.kmax.shape[2], pos, entry.recent)
            self._written[turn].record()
            if entry.ahead:
                entry.look(rows, pos)
                sparse_kernels.fetch_tokens(table, entry.chosen, *self.tokens[self._pair[turn]], self.token_bits)
                self._fetched[turn].record()

    def _tables(self, entry) -> list[Tensor]:
        """Channels, slots and misses `[B, KV, C]` of a layer."""
        index, missing = (first_of(held[entry.turn], entry.channels) for held in (self._index, self._missing))
        if self._slot[entry.turn] is None:
            self._slot[entry.turn] = torch.arange(index.shape[2], dtype=torch.int32, device=self.device).expand(index.shape).contiguous()
        return [index, first_of(self._slot[entry.turn], entry.channels), missing]

    def brought(self, layer: int, entry, stop: int) -> sparse_kernels.Rows | None:
        """The rows for the current stream; None if `layer` has none under way."""
        if layer not in self._brought:
            return None
        self._brought.remove(layer)
        if not self.complete or entry.ahead:
            self._written[entry.turn].wait()
        index, slot, _ = self._tables(entry)
        return sparse_kernels.Rows(self.planes[entry.turn], index, slot, self.row_bits, entry.begin)

    def done_with_rows(self, turn: int) -> None:
        """Nothing to do, see `bring`."""

    def tokens_of(self, entry, count: int, rows: sparse_kernels.Rows, pos: Tensor) -> tuple[Tensor | None, tuple[Tensor, Tensor] | None]:
        """For `sparse_kernels.gather_attention`: the slab table, through which it reads the rows itself; with `ahead`, the rows, once they are there; of 8 bits, the rows."""
        if entry.ahead:
            self._fetched[entry.turn].wait()
            return None, self.tokens[self._pair[entry.turn]]
        table = entry.store.table(self.device)
        if self.token_bits == 16:
            return table, None
        sparse_kernels.fetch_tokens(table, entry.chosen, *self.tokens[0], self.token_bits)
        return None, self.tokens[0]

    def wait_all(self) -> None:
        self._brought.clear()
        if self.cuda:
            torch.cuda.synchronize(self.device)

    def close(self) -> None:
        self.wait_all()
        self.planes, self.blocks, self.tokens, self.scratch, self.stale = [], 0, [], None, True
        self._index = self._slot = self._missing = self._held = self._stamp = []

    def nbytes(self) -> dict[str, dict[str, int]]:
        if not self.planes:
            return {"gpu": {}, "host": {}}
        tables = {x.data_ptr(): x.nbytes for x in (*self._index, *self._slot, *self._missing, *self._held, *self._stamp) if x is not None}
        rows = {id(planes): sum(plane.nbytes for plane in planes) for planes in self.planes}
        scores = self.scratch.nbytes() if self.scratch is not None else 0
        fetched = sum(x.nbytes for pair in self.tokens for x in pair)
        return {"gpu": {"critical rows": sum(rows.values()), "index tables": sum(tables.values()), "fetched tokens": fetched, "scores": scores}, "host": {}}


def whole_chunks(blocks: int) -> int:
    """Blocks rounded up, since kernels read rows in whole chunks."""
    return -(-blocks * BLOCK // sparse_kernels.CHUNK) * sparse_kernels.CHUNK // BLOCK


def first_of(table: Tensor, count: int) -> Tensor:
    """The front of a table `[B, KV, n]` as one `[B, KV, count]`, or the whole of it if that is smaller."""
    B, KV, n = table.shape
    return table if count >= n else table.flatten()[: B * KV * count].view(B, KV, count)
