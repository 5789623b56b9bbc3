# SPDX-License-Identifier: Apache-2.0
"""Exact attention in memory linear in the length, for any alignment, grouped heads, and joinable over disjoint sets of keys.

Shapes: `B` batch, `T` queries, `N` keys, `H` query heads, `KV` key/value heads, `G = H // KV`, `D` head_dim.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def causal_attention(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> Tensor:
    """Exact attention of the newest T tokens over all N, memory linear in N.

    Args:
        q: `[B, H, T, D]`, the last T of N positions: query t sees keys 0 .. N - T + t (bottom-right aligned).
        k, v: `[B, KV, N, D]` and `[B, KV, N, Dv]`, never repeated to H heads.
        scale: of the scores; None: 1 / sqrt(D).

    Returns:
        `[B, H, T, Dv]`.

    The keys before the call are seen by every query, so they need no mask: their part and the causal part over the call's
    own tokens are computed apart by fused kernels and joined through their log-sum-exps (the split of FlashAttention-2,
    2307.08691, section 3.1). PyTorch's public function neither returns the log-sum-exp nor aligns `is_causal` bottom-right.
    """
    T, past = q.shape[2], k.shape[2] - q.shape[2]
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if T == 1:
        return fused_attention(q, k, v, scale, causal=False)[0]
    o, lse = fused_attention(q, k[:, :, past:], v[:, :, past:], scale, causal=True)
    if past == 0:
        return o
    o_past, lse_past = fused_attention(q, k[:, :, :past], v[:, :, :past], scale, causal=False)
    return merge_attention(o, lse, o_past, lse_past)[0]


def merge_attention(o1: Tensor, lse1: Tensor, o2: Tensor, lse2: Tensor) -> tuple[Tensor, Tensor]:
    """Join attention over two disjoint sets of keys: outputs `[B, H, T, D]`, float32 log-sum-exps `[B, H, T]`."""
    share = torch.sigmoid(lse2 - lse1)[..., None]  # of the second set, in float32: bf16 weights would cost accuracy
    return torch.lerp(o1.float(), o2.float(), share).to(o1.dtype), torch.logaddexp(lse1, lse2)


def fused_attention(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """One fused kernel's attention and its log-sum-exp: `([B, H, T, Dv], [B, H, T] float32)`.

    `causal` means T = N and the usual triangle. The kernel is chosen here and called by name: left to itself PyTorch may
    fall into one that builds the T x N scores (grouped heads in float32, say: 45 GiB at 27k tokens), or, on Hopper, into
    cuDNN for a single query, which takes 9 times as long as the split-sequence kernel does.
    """
    B, H, T, D = q.shape
    KV, N, Dv = k.shape[1], k.shape[2], v.shape[3]
    G, width = H // KV, max(D, Dv)
    aten = torch.ops.aten
    half = q.dtype in (torch.float16, torch.bfloat16)
    if q.device.type == "cuda":
        width = -(-width // 8) * 8  # the kernels' rows are whole 16-byte words
        capability = torch.cuda.get_device_capability(q.device)
    if width != D or width != Dv:  # zeros add nothing to scores, and their output columns are cut off again
        q, k, v = F.pad(q, (0, width - D)), F.pad(k, (0, width - D)), F.pad(v, (0, width - Dv))

    if q.device.type == "cuda" and half and width <= 256 and capability >= (8, 0):
        # Both take grouped heads as they are. cuDNN is 1.8 x as fast on Hopper but plans 60 ms for every new shape.
        if capability >= (9, 0) and width <= 128 and T >= 4096 and N >= 4096:
            o, lse = aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal, scale=scale)[:2]
        else:
            if not causal:  # one long query block a KV head: K and V are read once for the whole group
                q = q.reshape(B, KV, G * T, width)
            o, lse = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, scale=scale)[:2]
    elif q.device.type in ("cuda", "cpu"):
        if causal and G > 1:  # these want as many K as Q heads; the call's own tokens are few enough to repeat
            k, v = k.repeat_interleave(G, 1), v.repeat_interleave(G, 1)
        elif not causal:
            q = q.reshape(B, KV, G * T, width)
        if q.device.type == "cuda":
            o, lse = aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, causal, scale=scale)[:2]
            lse = lse[:, :, : q.shape[2]]  # the kernel pads its rows
        else:
            o, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)[:2]
    else:
        o, lse = _plain_attention(q, k, v, scale, causal)
    return o.reshape(B, H, T, width)[..., :Dv], lse.reshape(B, H, T).float()


def _plain_attention(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, limit: int = 1 << 26) -> tuple[Tensor, Tensor]:
    """`fused_attention` from elementary operations, for devices without a fused kernel; scores hold at most `limit` elements."""
    B, H, T, D = q.shape
    KV, N = k.shape[1], k.shape[2]
    step = max(1, limit // (B * H * N))
    outputs, lses = [], []
    for start in range(0, T, step):
        rows = q[:, :, start : start + step].unflatten(1, (KV, H // KV))  # [B, KV, G, t, D]
        scores = (rows @ k.transpose(-1, -2).unsqueeze(2)).float() * scale
        if causal:
            t = torch.arange(start, start + rows.shape[3], device=q.device)
            scores.masked_fill_(torch.arange(N, device=q.device) > t[:, None], float("-inf"))
        outputs.append((scores.softmax(-1).to(v.dtype) @ v.unsqueeze(2)).flatten(1, 2))
        lses.append(scores.logsumexp(-1).flatten(1, 2))
    return torch.cat(outputs, 2), torch.cat(lses, 2)


def small_attention(q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Attention of one query per head over few keys, from elementary operations in float32, with its log-sum-exp.

    Args:
        q: `[B, H, 1, D]`; k, v: `[B, KV, S, D]`, `[B, KV, S, Dv]`.
        mask: bool, broadcastable to `[B, KV, 1, S]`; False leaves a key out. With no key left, o is 0 and lse minus infinity.

    Returns:
        `([B, H, 1, Dv] float32, [B, H, 1] float32)`, ready for `merge_attention`.
    """
    B, H, _, D = q.shape
    scores = (q.reshape(B, k.shape[1], -1, D).float() @ k.float().transpose(-1, -2)) * scale  # [B, KV, G, S]
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    lse = scores.logsumexp(-1, keepdim=True)
    weights = torch.exp(scores - lse.masked_fill(lse.isinf(), 0.0))  # not softmax: it makes NaN of a row without keys
    return (weights @ v.float()).reshape(B, H, 1, v.shape[3]), lse.reshape(B, H, 1)
