# SPDX-License-Identifier: Apache-2.0
"""Exact attention against a dense float64 reference, at odd sizes, aligned bottom-right."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import attention
from attention import causal_attention, fused_attention, merge_attention


def dense(q, k, v, scale=None):
    """Float64, one mask, nothing clever: query t of T sees keys 0 .. N - T + t. Returns output and log-sum-exp."""
    q, k, v = q.double(), k.double(), v.double()
    T, N, G = q.shape[2], k.shape[2], q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(G, 1), v.repeat_interleave(G, 1)
    scores = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    mask = torch.arange(N, device=q.device) <= torch.arange(T, device=q.device)[:, None] + N - T
    scores = scores.masked_fill(~mask, float("-inf"))
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


def inputs(B, KV, G, T, past, D, Dv, dtype=torch.float32, device="cpu", seed=0):
    generator = torch.Generator().manual_seed(seed)
    make = lambda *shape: torch.randn(shape, generator=generator).to(device, dtype)  # noqa: E731
    # Strided as in a cache with room to spare, and poisoned past the end.
    k, v = make(B, KV, T + past + 5, D), make(B, KV, T + past + 5, Dv)
    k[:, :, T + past :] = v[:, :, T + past :] = float("nan")
    return 2 * make(B, KV * G, T, D), k[:, :, : T + past], v[:, :, : T + past]


SIZES = [
    # B, KV, G, T, past, D, Dv
    (1, 1, 1, 1, 0, 64, 64),
    (1, 3, 3, 1, 100, 64, 64),
    (2, 2, 4, 1, 37, 80, 80),
    (1, 2, 3, 17, 0, 24, 24),
    (2, 2, 3, 17, 1, 24, 24),
    (1, 2, 4, 1 + 64, 63, 80, 80),
    (1, 1, 8, 33, 200, 128, 128),
    (2, 3, 1, 40, 13, 96, 96),
    (1, 2, 2, 9, 21, 48, 32),
    (2, 2, 3, 9, 0, 32, 48),
    (1, 2, 2, 1, 21, 40, 64),
    (1, 1, 6, 300, 513, 64, 64),
    (1, 2, 2, 5, 6, 6, 10),
]


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_equals_dense_float64(size):
    """A causal flag aligned top-left (pytorch #108108), heads grouped wrongly, a value width taken for the key width."""
    q, k, v = inputs(*size)
    out = causal_attention(q, k, v)
    assert out.shape == (*q.shape[:3], v.shape[3]) and out.dtype == q.dtype
    assert (out - dense(q, k, v)[0]).abs().max() < 1e-5


@given(
    B=st.integers(1, 3), KV=st.integers(1, 3), G=st.integers(1, 5), T=st.integers(1, 70), past=st.integers(0, 140),
    D=st.sampled_from([2, 8, 24, 64, 80]), Dv=st.sampled_from([None, 4, 64]), scale=st.sampled_from([None, 0.5, 1.0]), seed=st.integers(0, 9),
)  # fmt: skip
@settings(max_examples=80)
def test_equals_dense_float64_at_any_size(B, KV, G, T, past, D, Dv, scale, seed):
    """The sizes nobody thought of."""
    q, k, v = inputs(B, KV, G, T, past, D, Dv or D, seed=seed)
    assert (causal_attention(q, k, v, scale) - dense(q, k, v, scale)[0]).abs().max() < 1e-4


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits(size, dtype):
    """The two parts joined with 16-bit weights: the error may be at most twice that of plain attention in that dtype."""
    q, k, v = inputs(*size, dtype=dtype)
    exact = dense(q, k, v)[0]
    G = q.shape[1] // k.shape[1]
    scores = q @ k.repeat_interleave(G, 1).transpose(-1, -2) * q.shape[-1] ** -0.5
    scores += torch.full((q.shape[2], k.shape[2]), float("-inf")).triu(k.shape[2] - q.shape[2] + 1)
    plain = scores.float().softmax(-1).to(dtype) @ v.repeat_interleave(G, 1)
    assert (causal_attention(q, k, v) - exact).abs().max() <= 2 * (plain - exact).abs().max() + 1e-6


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_plain_attention_equals_the_fused_path(size, causal):
    """The path for devices without a fused kernel is otherwise never run; also with its score limit cutting through the rows."""
    q, k, v = inputs(*size)
    if causal:
        k, v = k[:, :, -q.shape[2] :], v[:, :, -q.shape[2] :]
    scale = 0.3
    fused = fused_attention(q, k, v, scale, causal)
    for limit in (1 << 26, 5 * q.shape[0] * q.shape[1] * k.shape[2], 1):
        plain = attention._plain_attention(q, k, v, scale, causal, limit)
        for a, b in zip(fused, plain):
            assert a.shape == b.shape and (a - b).abs().max() < 3e-5


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_log_sum_exp(size):
    """A log-sum-exp in base 2, transposed, or of another row: parts would be joined with wrong weights."""
    q, k, v = inputs(*size)
    T = q.shape[2]
    k, v = k[:, :, -T:], v[:, :, -T:]
    o, lse = fused_attention(q, k, v, q.shape[-1] ** -0.5, causal=True)
    expected = dense(q, k, v)
    assert lse.dtype == torch.float32 and (o - expected[0]).abs().max() < 5e-6 and (lse - expected[1]).abs().max() < 3e-5


def test_merge_is_exact_far_from_balance():
    """exp() of a difference of log-sum-exps overflows; one part may hold all the mass, or none (an empty set: -inf)."""
    o1, o2 = torch.ones(1, 1, 5, 2), torch.full((1, 1, 5, 2), 3.0)
    lse1 = torch.tensor([0.0, 500.0, -500.0, 0.0, float("-inf")])[None, None]
    lse2 = torch.tensor([0.0, -500.0, 500.0, float("-inf"), 0.0])[None, None]
    o, lse = merge_attention(o1, lse1, o2, lse2)
    assert o[0, 0, :, 0].tolist() == [2.0, 1.0, 3.0, 1.0, 3.0]
    assert torch.allclose(lse[0, 0], torch.tensor([0.6931472, 500.0, 500.0, 0.0, 0.0]))


@pytest.mark.parametrize("parts", [(5, 30, 66), (1, 1, 99)])
def test_any_split_joins_to_the_whole(parts):
    """Joining more than two parts in sequence."""
    q, k, v = inputs(1, 2, 3, 4, 97, 32, 32)
    whole, whole_lse = fused_attention(q, k, v, 0.2, causal=False)
    start, o, lse = 0, None, None
    for n in parts:
        part = fused_attention(q, k[:, :, start : start + n], v[:, :, start : start + n], 0.2, causal=False)
        o, lse = part if o is None else merge_attention(o, lse, *part)
        start += n
    assert (o - whole).abs().max() < 1e-6 and (lse - whole_lse).abs().max() < 1e-5


def test_large_scores_do_not_overflow():
    """Scores of several hundred: softmax without the running maximum is inf / inf."""
    q, k, v = inputs(1, 1, 2, 20, 50, 64, 64)
    out = causal_attention(60 * q, k, v)
    assert out.isfinite().all() and (out - dense(60 * q, k, v)[0]).abs().max() < 1e-3


def test_never_builds_the_score_matrix():
    """Grouped heads in float32 dropped to a kernel that builds T x N scores: 45 GiB at 27k tokens (ComfyUI PR 15135)."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        numel = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            tensors = [x for x in (out if isinstance(out, (tuple, list)) else (out,)) if isinstance(x, torch.Tensor)]
            self.numel = max([self.numel, *(x.numel() for x in tensors)])
            return out

    q, k, v = inputs(1, 2, 3, 512, 1500, 16, 16)
    with Largest() as largest:
        causal_attention(q, k, v)
    assert largest.numel <= 6 * 2012 * 16 < 512 * 1500


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [*SIZES, (1, 2, 4, 4096, 5000, 128, 128), (1, 2, 4, 4100, 0, 128, 128), (1, 2, 2, 70, 90, 320, 320)], ids=str)
def test_gpu_equals_dense_float64(size, dtype):
    """Each of the three GPU kernels, at sizes on both sides of the choice between them."""
    q, k, v = inputs(*size, dtype=dtype, device="cuda")
    exact = dense(q, k, v)[0]
    error = (causal_attention(q, k, v) - exact).abs().max()
    assert error < {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
