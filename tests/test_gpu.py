# SPDX-License-Identifier: Apache-2.0
"""What only a CUDA device can show: streams, events, pinned memory, the fused kernels chosen there, the allocator's account."""

import pytest
import torch

import kernels
import offload
import sparse_kernels
from attention import causal_attention
from cache import FullCache, TailorCache
from generate import Sampling, Stepper, generate
from test_tailor import BEST, Driver, options, same, state, tiny, tokens

pytestmark = pytest.mark.gpu


class CudaDriver(Driver):
    """The same random sequences as `Driver`, on the device; state is compared on the host."""

    def __init__(self, **shape):
        super().__init__(**shape)
        self.q, self.k, self.v = self.q.cuda(), self.k.cuda(), self.v.cuda()


def on_host(cache):
    torch.cuda.synchronize()
    return {name: tensor.cpu() for name, tensor in state(cache).items()}


@pytest.mark.parametrize("plan", [(), (0,), (1,), (0, 2), (0, 1, 2)])
@pytest.mark.parametrize("bits, token_bits", [(1, 16), (2, 16), (1, 8)])
def test_cuda_holds_the_same_bytes_as_the_cpu(plan, bits, token_bits):
    """A copy that overtakes its source, or a division rounded otherwise, shows as a byte that differs."""
    here, there = Driver(), CudaDriver()
    setting = options(bits=bits, token_bits=token_bits)
    with TailorCache(here.config, plan, setting) as cpu, TailorCache(there.config, plan, setting, device="cuda:0") as gpu:
        for T in (300, 77):
            a, b = here.call(cpu, T, chunk=50), there.call(gpu, T, chunk=50)
            assert (a - b.cpu()).abs().max() < 1e-3
            for _ in range(75):
                a, b = here.call(cpu, 1, decode=True), there.call(gpu, 1, decode=True)
                assert (a - b.cpu()).abs().max() < 1e-3
            same(state(cpu), on_host(gpu))
        gpu.crop(310)
        cpu.crop(310)
        same(state(cpu), on_host(gpu))


@pytest.mark.parametrize("plan", [(), (0,), (1,), (2, 3)])
@pytest.mark.parametrize("setting", [{"prefetch": "thread"}, {"prefetch": "uva"}, {"prefetch": "uva", "resident": 9}, {"prefetch": "thread", **BEST}, {"prefetch": "uva", **BEST}, {"prefetch": "uva", **BEST, "token_bits": 8}, {"prefetch": "uva", **BEST, "ahead": False, "token_bits": 8}])
def test_delayed_streams_change_nothing(monkeypatch, plan, setting):
    """Without an event in each direction a slow copy is read too early or overwritten too soon; a predicted query is read long after it was foreseen."""
    outputs, held = [], []
    for delay in (False, True):
        driver = CudaDriver(L=5, n=900)
        with monkeypatch.context() as patch:
            if delay:
                for name in ("write", "read"):
                    plain = getattr(offload.HostStore, name)
                    patch.setattr(offload.HostStore, name, lambda *a, plain=plain: (torch.cuda._sleep(2_000_000), plain(*a)))
                fetch = offload.Prefetcher._fetch_rows

                def slow(self, *arguments):
                    with torch.cuda.stream(self.stream):
                        torch.cuda._sleep(2_000_000)
                    fetch(self, *arguments)

                patch.setattr(offload.Prefetcher, "_fetch_rows", slow)
                for name in ("choose_channels", "fetch_rows", "weigh", "fetch_tokens"):  # in the zero-copy prefetcher's stream
                    plain = getattr(sparse_kernels, name)
                    patch.setattr(sparse_kernels, name, lambda *a, plain=plain: (torch.cuda._sleep(200_000), plain(*a)))
            with TailorCache(driver.config, plan, options(**setting), device="cuda:0") as cache:
                out = [driver.call(cache, 400, chunk=130)]
                out += [driver.call(cache, 1, decode=True) for _ in range(70)]
                out += [driver.call(cache, 90, chunk=33)]
                out += [driver.call(cache, 1, decode=True) for _ in range(70)]
                outputs.append(torch.cat(out, 3))
                held.append(on_host(cache))
    assert torch.equal(*outputs)
    same(*held)


def test_interrupted_calls_on_cuda():
    """Side streams still at work when a call is given up must not write into the next one."""
    driver, other = CudaDriver(), CudaDriver()
    with TailorCache(driver.config, (0,), options(), device="cuda:0") as cache, TailorCache(other.config, (0,), options(), device="cuda:0") as twin:
        for one in (cache, twin):
            driver.call(one, 320)
        for layer in range(4):
            driver.call(cache, 120, chunk=40, stop_at=(layer, 0))
            driver.call(cache, 1, decode=True, stop_at=(layer, 0))
            assert torch.equal(driver.call(cache, 1, decode=True), driver.call(twin, 1, decode=True))
        assert torch.equal(driver.call(cache, 50), driver.call(twin, 50))
        same(on_host(cache), on_host(twin))


def test_host_memory_is_pinned_and_released():
    """Pageable memory makes every transfer slow and half-synchronous; memory still registered when freed breaks a later one."""
    driver = CudaDriver()
    cache = TailorCache(driver.config, (0,), options(), device="cuda:0")
    driver.call(cache, 400)
    slab = cache.layers[1].store.slabs[0]
    slab.wait()
    assert slab.kv.is_pinned() and slab.rows[0].is_pinned()
    cache.close()
    assert not slab.kv.is_pinned() and not cache.pinner._registered


@pytest.mark.parametrize("spec", ["full", "tailor"])
def test_the_allocator_agrees_with_the_account(spec):
    """nbytes() is worth nothing if the card says otherwise."""
    L, KV, D, n = 4, 8, 128, 20_000
    config = Driver(L=L, n=1).config
    torch.cuda.empty_cache()
    base = torch.cuda.memory_allocated()
    cache = FullCache(config, device="cuda:0", capacity=n + 8) if spec == "full" else TailorCache(config, (0,), options(), "cuda:0", n + 8)
    with cache:
        for T, decode in ((n, False), (1, True), (1, True)):
            cache.begin(T, decode)
            for layer in range(L):
                cache.attend(layer, *(torch.randn(1, h, T, D, device="cuda", dtype=torch.bfloat16) for h in (32, KV, KV)))
            cache.end()
        account = sum(cache.nbytes()["gpu"].values())
        assert abs(torch.cuda.memory_allocated() - base - account) < 0.02 * account + 2**20


@pytest.mark.parametrize("dtype, limit", [(torch.float32, 2e-5), (torch.bfloat16, 2e-2), (torch.float16, 3e-3)])
@pytest.mark.parametrize("T, past, G, D, Dv", [(1, 5000, 4, 128, 128), (4096, 5000, 4, 128, 128), (700, 333, 3, 80, 80), (77, 0, 8, 96, 64), (1, 77, 1, 64, 64), (33, 1000, 4, 192, 128)])
def test_fused_attention_on_cuda(dtype, limit, T, past, G, D, Dv):
    """Each kernel aligns, groups and pads in its own way; all must be the same bottom-right causal attention."""
    generator = torch.Generator("cuda").manual_seed(0)
    N, KV = T + past, 2
    q, k, v = (torch.randn(1, h, n, d, device="cuda", generator=generator).to(dtype) for h, n, d in ((KV * G, T, D), (KV, N, D), (KV, N, Dv)))
    o = causal_attention(q, k, v)
    rows = torch.randint(0, T, (min(T, 64),), device="cuda", generator=generator)
    scores = q[:, :, rows].double() @ k.repeat_interleave(G, 1).double().transpose(-1, -2) * D**-0.5
    scores.masked_fill_(torch.arange(N, device="cuda") > (past + rows)[:, None], float("-inf"))
    expected = scores.softmax(-1) @ v.repeat_interleave(G, 1).double()
    assert (o[:, :, rows] - expected).norm() < limit * expected.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_never_builds_the_scores(dtype):
    """A backend that falls back to N x N scores takes 45 GiB at 27k tokens."""
    q, k, v = (torch.randn(1, h, 24_000, 64, device="cuda", dtype=dtype) for h in (8, 2, 2))
    torch.cuda.reset_peak_memory_stats()
    base = torch.cuda.memory_allocated()
    causal_attention(q, k, v)
    causal_attention(q[:, :, -5000:], k, v)
    assert torch.cuda.max_memory_allocated() - base < 6 * q.nbytes


def test_a_full_cache_decode_step_never_waits_for_the_device():
    """One .item() a layer costs more than the layer, and cannot be captured in a graph."""
    model, ids = tiny(), tokens(50).cuda()
    model = model.to("cuda")
    with FullCache(model.config, device="cuda:0", capacity=64) as cache:
        model.prefill(ids, cache)
        model.decode(ids[:, :1], cache)
        torch.cuda.set_sync_debug_mode("error")
        try:
            model.decode(ids[:, :1], cache)
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_logits_on_cuda_are_the_cpus():
    """The same text whatever the device: float32 logits within rounding, prefill, turn and decode, both caches."""
    model, ids = tiny(), tokens(400)
    with torch.no_grad():
        expected = [model.prefill(ids[:, :300], cache := FullCache(model.config)), model.prefill(ids[:, 300:399], cache), model.decode(ids[:, 399:], cache)]
        model.to("cuda")
        for make in (FullCache, lambda config, device: TailorCache(config, (), options(topk=4000, dense_below=0), device)):
            with make(model.config, device="cuda:0") as cache:
                got = [model.prefill(ids[:, :300], cache), model.prefill(ids[:, 300:399], cache), model.decode(ids[:, 399:].cuda(), cache)]
            for a, b in zip(expected, got):
                assert (a - b.cpu()).abs().max() < 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.8, seed=3), Sampling(temperature=0.8, top_k=20, top_p=0.9, repetition_penalty=1.3, seed=3)])
def test_a_graph_gives_the_tokens_of_eager_steps(monkeypatch, dtype, sampling):
    """A host number or pointer baked into the graph, a random number drawn by the capture; over two growths of the cache."""
    model, ids, captures, plain = tiny().to("cuda", dtype), tokens(50)[0].tolist(), [], Stepper._capture
    monkeypatch.setattr(Stepper, "_capture", lambda self, token: (captures.append(self.cache.epoch), plain(self, token)))
    outs = []
    for graph in (False, True, True):
        with FullCache(model.config, device="cuda:0", capacity=60) as cache:
            outs.append(list(generate(model, cache, ids, 120, sampling, graph=graph)))
            assert cache.length == 169 and cache.pos.tolist() == [169]
    assert outs[0] == outs[1] == outs[2] and len(captures) == 6
    assert len(set(outs[0])) > 5 or sampling.temperature == 0


@pytest.mark.parametrize("plan", [(), (0,), (0, 2)])
@pytest.mark.parametrize("setting", [{}, {"resident": 0}, {"resident": 9}, {"resident": 64}, {"dense_below": 340}, {"token_bits": 8}, {"token_bits": 8, "ahead": False}])
@pytest.mark.parametrize("dtype, sampling", [(torch.float32, Sampling()), (torch.bfloat16, Sampling(temperature=0.8, seed=3))])
def test_a_tailored_graph_gives_the_tokens_of_eager_steps(monkeypatch, plan, setting, dtype, sampling):
    """Side streams forked and joined inside, rows that move between slots, blocks that leave the window, and the step that leaves the dense start."""
    model, ids, captures, plain = tiny().to("cuda", dtype), tokens(300)[0].tolist(), [], Stepper._capture
    monkeypatch.setattr(Stepper, "_capture", lambda self, token: (captures.append(self.cache.epoch), plain(self, token)))
    outs, held = [], []
    for graph, capacity in ((False, 0), (True, 0), (True, 700)):
        with TailorCache(model.config, plan, options(**{"topk": 40, "dense_below": 0, **BEST, **setting}), device="cuda:0", capacity=capacity) as cache:
            outs.append(list(generate(model, cache, ids, 200, sampling, graph=graph)))
            assert cache.length == 499 and cache.pos.tolist() == [499]
            held.append(on_host(cache))
    assert outs[0] == outs[1] == outs[2] and len(captures) >= 2
    same(held[0], held[1])
    same(held[0], held[2])


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError, "sync"])
def test_a_capture_that_fails_leaves_nothing(monkeypatch, error):
    """Ctrl-C, an error, or an operation that no capture allows: stream, generator, cache and token as before it."""
    model, ids, sampling = tiny().to("cuda"), tokens(50)[0].tolist(), Sampling(temperature=0.8, seed=3)
    with FullCache(model.config, device="cuda:0") as cache:
        plain = list(generate(model, cache, ids, 30, sampling, graph=False))
    attend, stream = FullCache._decode, torch.cuda.current_stream()

    def fails(self, layer, *arguments):
        if layer == 2 and torch.cuda.is_current_stream_capturing():
            monkeypatch.setattr(FullCache, "_decode", attend)
            if error == "sync":
                self.pos.item()
            raise error("stopped")
        return attend(self, layer, *arguments)

    monkeypatch.setattr(FullCache, "_decode", fails)
    with FullCache(model.config, device="cuda:0") as cache:
        if error is KeyboardInterrupt:
            with pytest.raises(KeyboardInterrupt):
                list(generate(model, cache, ids, 30, sampling))
            cache.crop(0)
            out = list(generate(model, cache, ids, 30, sampling))
        else:
            with pytest.warns(UserWarning, match="without a CUDA graph"):
                out = list(generate(model, cache, ids, 30, sampling))
    assert torch.cuda.current_stream() == stream and out == plain
    torch.randn(2, device="cuda")  # the device's own generator takes part in every capture


def test_decoding_on_cuda_never_calls_what_is_watched_past(monkeypatch):
    """A cache whose `attend` is replaced, as the evaluations do, is asked at every layer, and not captured."""
    model, ids, seen = tiny().to("cuda"), tokens(50)[0].tolist(), []
    with FullCache(model.config, device="cuda:0") as cache:
        plain = list(generate(model, cache, ids, 10))
    with FullCache(model.config, device="cuda:0") as cache:
        attend = cache.attend
        cache.attend = lambda layer, *arguments: (seen.append(layer), attend(layer, *arguments))[1]
        assert not cache.capturable() and list(generate(model, cache, ids, 10)) == plain
    assert len(seen) == 10 * 4


@pytest.mark.parametrize("plan", [(), (0, 2)])
def test_fused_steps_are_the_plain_ones(monkeypatch, plan):
    """Every kernel in its place, the predicted query among them: float32 logits within rounding of the twins'."""
    model, ids, outs = tiny().to("cuda"), tokens(320), []
    for force in (None, False):
        monkeypatch.setattr(kernels, "FORCE", force)
        for make in (FullCache, lambda config, device: TailorCache(config, plan, options(dense_below=0), device)):
            with make(model.config, device="cuda:0") as cache:
                model.prefill(ids[:, :300], cache)
                outs.append(torch.cat([model.decode(ids[:, t : t + 1].cuda(), cache) for t in range(300, 320)]))
    assert (outs[0] - outs[2]).abs().max() < 1e-3 and (outs[1] - outs[3]).abs().max() < 1e-2
