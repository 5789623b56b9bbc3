# SPDX-License-Identifier: Apache-2.0
"""The `KVCache` contract, held by `FullCache`: calls, roll-back, growth, crop, bytes, files; and cache specs."""

import dataclasses
import gc
import json
import types

import pytest
import torch
from conftest import raising
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode

import cache as cache_module
from cache import FullCache, KVCache, describe_caches, make_cache, parse_spec
from model import Llama

N = 60


@pytest.fixture(scope="module")
def model(family):
    return Llama.from_checkpoint(family("llama3.1")[0])


@pytest.fixture(scope="module")
def ids(model):
    return torch.randint(0, model.config.vocab_size, (1, N), generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(Llama, "chunk", property(lambda self: 7))


def play(model, cache, ids, prompt=20, start=0):
    """Prefill `prompt` tokens, decode the rest; logits of every call, bit for bit."""
    outs = [model.prefill(ids[:, start : start + prompt], cache)]
    outs += [model.decode(ids[:, t : t + 1], cache) for t in range(start + prompt, ids.shape[1])]
    return torch.stack(outs)


@pytest.fixture(scope="module")
def undisturbed(model, ids):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Llama, "chunk", property(lambda self: 7))
        return play(model, FullCache(model.config), ids)


# ---------------------------------------------------------------------------------------------- interrupted calls, crop


@pytest.mark.parametrize("error", [KeyboardInterrupt, torch.OutOfMemoryError, RuntimeError])
@pytest.mark.parametrize("layer", [0, 1, 2])
@pytest.mark.parametrize("calls", [1, 2, 3])
def test_interrupted_prefill_has_not_happened(model, ids, undisturbed, monkeypatch, layer, calls, error):
    """Ctrl-C in layer k of a prefill leaves some layers longer than others; every later token is then wrong."""
    cache, plain = FullCache(model.config), model.layers[layer].mlp.forward
    count = iter(range(1, 100))

    def failing(x):
        if next(count) == calls:
            raise error("stop")
        return plain(x)

    monkeypatch.setattr(model.layers[layer].mlp, "forward", failing)
    with pytest.raises(error):
        model.prefill(ids[:, :20], cache)
    monkeypatch.undo()
    monkeypatch.setattr(Llama, "chunk", property(lambda self: 7))
    assert cache.length == 0
    assert torch.equal(play(model, cache, ids), undisturbed)


@pytest.mark.parametrize("layer", [0, 1, 2])
@pytest.mark.parametrize("capacity", [0, 33, 200])
def test_interrupted_decode_has_not_happened(model, ids, undisturbed, monkeypatch, layer, capacity):
    """The same for a decode step, also one that had just grown the buffers (capacity 33 and 0)."""
    cache, outs = FullCache(model.config, capacity=capacity), []
    outs.append(model.prefill(ids[:, :20], cache))
    for t in range(20, N):
        if t % 3 == 0 or t == 33:
            with monkeypatch.context() as patch:
                patch.setattr(model.layers[layer].mlp, "forward", raising(KeyboardInterrupt))
                with pytest.raises(KeyboardInterrupt):
                    model.decode((ids[:, t : t + 1] + 1) % 211, cache)  # of another token, which must leave no trace
            assert cache.length == t
        outs.append(model.decode(ids[:, t : t + 1], cache))
        assert cache.pos.tolist() == [cache.length] == [t + 1]
    assert torch.equal(torch.stack(outs), undisturbed)


@pytest.mark.parametrize("where", ["before the position", "before the commit"])
def test_interrupted_at_the_very_end(model, ids, undisturbed, monkeypatch, where):
    """Ctrl-C between the last layer and `end()`: the position on the device has, or has not, moved already."""
    cache = FullCache(model.config)
    first = model.prefill(ids[:, :20], cache)
    with monkeypatch.context() as patch:
        if where == "before the commit":
            patch.setattr(cache, "end", raising(KeyboardInterrupt))
        else:
            patch.setattr(model.norm, "forward", raising(KeyboardInterrupt))
        for call in (lambda: model.decode(ids[:, 5:6], cache), lambda: model.prefill(ids[:, :9], cache)):
            with pytest.raises(KeyboardInterrupt):
                call()
            assert cache.length == 20
    outs = [first] + [model.decode(ids[:, t : t + 1], cache) for t in range(20, N)]
    assert torch.equal(torch.stack(outs), undisturbed) and cache.pos.tolist() == [N]


def test_interrupted_call_then_another_kind_of_call(model, ids, undisturbed, monkeypatch):
    """After an interrupted prefill comes a decode step, a crop or a reset, not the same call again."""
    cache = FullCache(model.config)
    outs = [model.prefill(ids[:, :20], cache)]

    def interrupt():
        with monkeypatch.context() as patch:
            patch.setattr(model.layers[1].mlp, "forward", raising(KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                model.prefill(ids[:, 3:30], cache)

    interrupt()
    outs += [model.decode(ids[:, t : t + 1], cache) for t in range(20, 30)]
    interrupt()
    cache.crop(20)
    assert cache.length == 20 and cache.pos.tolist() == [20]
    outs = outs[:1] + [model.decode(ids[:, t : t + 1], cache) for t in range(20, 40)]
    interrupt()
    with pytest.raises(ValueError, match="crop"):
        cache.crop(41)  # only committed tokens count
    outs += [model.decode(ids[:, t : t + 1], cache) for t in range(40, N)]
    assert torch.equal(torch.stack(outs), undisturbed)
    interrupt()
    cache.reset()
    assert torch.equal(play(model, cache, ids), undisturbed)


@pytest.mark.parametrize("n", [0, 1, 19, 20, 21, 59, 60])
def test_crop_forgets(model, ids, undisturbed, n):
    """What was cropped away must not shine through: other tokens are appended, cropped, and the first text goes on as before."""
    cache = FullCache(model.config)
    play(model, cache, ids)
    cache.crop(n)
    assert cache.length == n and cache.pos.tolist() == [n]
    model.prefill((ids + 17) % 211, cache)
    cache.crop(n)
    if n >= 20:
        outs = [model.decode(ids[:, t : t + 1], cache) for t in range(n, N)]
        assert not outs or torch.equal(torch.stack(outs), undisturbed[n - 19 :])
    else:
        fresh = FullCache(model.config)
        model.prefill(ids[:, :20], fresh)  # the same chunks: a matrix product of other height may round otherwise
        fresh.crop(n)
        assert torch.equal(model.prefill(ids[:, n:40], cache), model.prefill(ids[:, n:40], fresh))


@pytest.mark.parametrize("n", [-1, 21, 10**9])
def test_crop_out_of_range(model, ids, n):
    """A negative crop counted from the end, or one beyond the end that invents tokens."""
    cache = FullCache(model.config)
    model.prefill(ids[:, :20], cache)
    with pytest.raises(ValueError, match=f"crop\\({n}\\).*20"):
        cache.crop(n)
    assert cache.length == 20


def test_many_questions_on_one_prefill(model, ids):
    """Crop back to the document before each question: the answers must not know of each other."""
    questions = [(ids[:, :9] + i) % 211 for i in range(4)]
    cache, answers = FullCache(model.config), []
    model.prefill(ids[:, :40], cache)
    for question in questions:
        cache.crop(40)
        answers.append(model.prefill(question, cache))
    for question, answer in zip(reversed(questions), reversed(answers)):
        cache.crop(40)
        assert torch.equal(model.prefill(question, cache), answer)


# ----------------------------------------------------------------------------------------------- growth, epoch, bytes


@pytest.mark.parametrize("capacity", [1, 19, 20, 21, 59, 60, 61, 1000])
def test_results_do_not_depend_on_capacity(model, ids, undisturbed, capacity):
    """rMLX PR 238: past the preset the cache dropped writes and went on from a frozen state; ktransformers #777: it crashed."""
    assert torch.equal(play(model, FullCache(model.config, capacity=capacity), ids), undisturbed)


def test_uninitialised_memory_is_never_read(model, ids, undisturbed, monkeypatch):
    """Rows past the length are uninitialised: a read of them is wrong only sometimes. Here they are NaN."""
    plain = torch.Tensor.new_empty
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda self, *shape, **options: plain(self, *shape, **options).fill_(float("nan")))
    assert torch.equal(play(model, FullCache(model.config, capacity=33), ids), undisturbed)


@pytest.mark.parametrize("capacity", [0, 25, 500])
def test_epoch_changes_exactly_when_a_buffer_does(model, ids, capacity):
    """A captured graph holds pointers: a missed change replays into freed memory, a spurious one recaptures for nothing."""
    cache = FullCache(model.config, capacity=capacity)
    buffers = lambda: [cache.pos, *cache.k, *cache.v]  # noqa: E731
    seen, changes = (buffers(), cache.epoch), 0

    def check():
        nonlocal seen, changes
        now = (buffers(), cache.epoch)
        changed = any(a is not b for a, b in zip(now[0], seen[0]))
        assert changed == (now[1] != seen[1])
        changes += changed
        seen = now

    model.prefill(ids[:, :20], cache)
    check()
    for t in range(20, N):
        model.decode(ids[:, t : t + 1], cache)
        check()
    cache.crop(30)
    check()
    cache.reset()
    check()
    model.prefill(ids[:, :50], cache)
    check()
    model.prefill(ids, cache)
    check()
    before = changes
    cache.close()
    check()
    assert changes == before + 1
    assert before == {0: 3, 25: 3, 500: 1}[capacity]


def test_growth_is_geometric(model, ids):
    """Growing by one token a step copies the whole cache at every step (transformers PR 30536)."""
    cache = FullCache(model.config)
    model.prefill(ids, cache)
    epochs = set()
    for _ in range(400):
        model.decode(ids[:, :1], cache)
        epochs.add(cache.epoch)
    assert len(epochs) <= 7 and cache.capacity < 1.5 * cache.length + 64


def tensors_of(thing, found=None):
    """Every tensor reachable from an object, by storage: what is really held."""
    found = {} if found is None else found
    if isinstance(thing, torch.Tensor):
        found[thing.untyped_storage().data_ptr()] = thing.untyped_storage().nbytes()
    elif isinstance(thing, (list, tuple)):
        [tensors_of(entry, found) for entry in thing]
    elif isinstance(thing, dict):
        [tensors_of(entry, found) for entry in thing.values()]
    elif isinstance(thing, KVCache):
        tensors_of(vars(thing), found)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("capacity", [0, 77])
def test_bytes_equal_an_independent_account(family, ids, dtype, batch, capacity):
    """KVCache-Factory #49: K and V repeated to all query heads in the cache, four times what was claimed."""
    model = Llama.from_checkpoint(family("llama3.1")[0], dtype=dtype)
    cache = FullCache(model.config, capacity=capacity)
    for step in (ids[:, :20], ids[:, 20:50], ids[:, :1]):
        model.prefill(step.expand(batch, -1), cache)
        said = cache.nbytes()
        assert set(said) == {"gpu", "host"} and sum(said["host"].values()) == 0
        assert sum(said["gpu"].values()) == sum(tensors_of(cache).values())
    assert said["gpu"]["k"] == said["gpu"]["v"] == 3 * batch * 2 * cache.capacity * 80 * dtype.itemsize  # L, B, KV, capacity, D
    estimate = FullCache.estimate(model.config, None, cache.capacity, dtype.itemsize, batch)
    assert estimate == {"gpu": said["gpu"]["k"] + said["gpu"]["v"], "host": 0}


def test_reset_leaves_no_trace(model, ids, undisturbed):
    """The next user's prompt in the same buffers; and the second prompt must not fail (candle PR 2937)."""
    cache = FullCache(model.config, capacity=100)
    play(model, cache, (ids + 5) % 211)
    cache.crop(30)
    buffers = [*cache.k, *cache.v]
    cache.reset()
    assert cache.length == 0 and cache.pos.tolist() == [0] and cache.capacity == 100
    assert all(not buffer.any() for buffer in buffers) and all(a is b for a, b in zip(buffers, [*cache.k, *cache.v]))
    assert torch.equal(play(model, cache, ids), undisturbed)


def test_close_frees_and_may_be_used_again(model, ids, undisturbed):
    """Memory that a closed cache still holds, or a close that makes the object useless."""
    with FullCache(model.config) as cache:
        play(model, cache, ids)
        storages = [buffer.untyped_storage() for buffer in cache.k]
    assert cache.length == 0 and sum(cache.nbytes()["gpu"].values()) == cache.pos.nbytes
    del storages
    gc.collect()
    assert torch.equal(play(model, cache, ids), undisturbed)
    cache.close()
    cache.close()


def test_with_closes_after_an_error(model, ids):
    """An exception in the body must not be swallowed, and must still free."""
    with pytest.raises(KeyError):
        with FullCache(model.config) as cache:
            model.prefill(ids, cache)
            raise KeyError
    assert cache.k == [None] * 3


def test_another_shape_or_dtype_only_in_an_empty_cache(model, family, ids):
    """A second batch size or dtype in a filled cache; after reset() it is welcome, and the old buffers are gone."""
    cache = FullCache(model.config)
    model.prefill(ids, cache)
    half = Llama.from_checkpoint(family("llama3.1")[0], dtype=torch.bfloat16)
    for call in (lambda: model.prefill(ids.expand(2, -1), cache), lambda: half.prefill(ids, cache)):
        with pytest.raises(ValueError, match=r"reset\(\)"):
            call()
        assert cache.length == N
    cache.reset()
    fresh = FullCache(model.config, capacity=cache.capacity)
    assert torch.equal(half.prefill(ids.expand(2, -1), cache), half.prefill(ids.expand(2, -1), fresh))
    assert cache.nbytes() == fresh.nbytes() and cache.k[0].dtype == torch.bfloat16


# ------------------------------------------------------------------------------------------------------------- misuse


def tensors(T=4, B=1, H=4, KV=2, D=8, Dv=8):
    return torch.randn(B, H, T, D), torch.randn(B, KV, T, D), torch.randn(B, KV, T, Dv)


@pytest.fixture
def bare():
    return FullCache(types.SimpleNamespace(num_hidden_layers=2))


@pytest.mark.parametrize("T,decode", [(0, False), (-1, False), (0, True), (2, True)])
def test_begin_wants_a_sensible_number(bare, T, decode):
    """A decode step of two tokens, a call of none."""
    with pytest.raises(ValueError, match="at least one token"):
        bare.begin(T, decode)
    bare.begin(1, True)


def test_attend_before_begin(bare):
    """Tokens that nobody announced would be written past the end."""
    with pytest.raises(ValueError, match="announced 0"):
        bare.attend(0, *tensors())


def test_attend_after_end(bare):
    """The announcement is used up by `end`."""
    bare.begin(4)
    for layer in range(2):
        bare.attend(layer, *tensors())
    bare.end()
    with pytest.raises(ValueError, match="announced 0"):
        bare.attend(0, *tensors())


def test_more_tokens_than_announced(bare):
    """A chunk too many runs past the room that was made."""
    bare.begin(6)
    bare.attend(0, *tensors(4))
    with pytest.raises(ValueError, match="8 tokens.*announced 6"):
        bare.attend(0, *tensors(4))


def test_replayed_stands_for_the_attend_calls(bare):
    """A replayed graph runs no `attend`: the step must be committed all the same, and only a step that was announced as one."""
    bare.begin(4)
    with pytest.raises(RuntimeError, match="without a decode step"):
        bare.replayed()
    for layer in range(2):
        bare.attend(layer, *tensors(4))
    bare.end()
    with pytest.raises(RuntimeError, match="without a decode step"):
        bare.replayed()
    bare.begin(1, decode=True)
    bare.replayed()
    bare.end()
    assert bare.length == 5 and not bare.capturable()


@pytest.mark.parametrize("given", [(), (4,), (4, 3), (3, 3)])
def test_end_of_half_a_call(bare, given):
    """A layer that was skipped, or got fewer tokens, must not be committed."""
    bare.begin(4)
    for layer, T in enumerate(given):
        bare.attend(layer, *tensors(T))
    with pytest.raises(RuntimeError, match="4 tokens announced"):
        bare.end()
    assert bare.length == 0


def test_end_without_begin(bare):
    """`end` twice would count the tokens twice."""
    with pytest.raises(RuntimeError, match="without a whole call"):
        bare.end()


@pytest.mark.parametrize("bad", ["q length", "v length", "kv heads", "head groups", "batch", "q width"])
def test_tensors_that_do_not_fit_each_other(bare, bad):
    """Broadcasting makes something of nearly anything."""
    q, k, v = tensors()
    q, k, v = {
        "q length": (q[:, :, :3], k, v),
        "v length": (q, k, v[:, :, :3]),
        "kv heads": (q, k, v[:, :1]),
        "head groups": (q[:, :3], k, v),
        "batch": (q.repeat(2, 1, 1, 1), k, v),
        "q width": (q[..., :4], k, v),
    }[bad]
    bare.begin(4)
    with pytest.raises(ValueError, match="do not fit each other"):
        bare.attend(0, q, k, v)


@pytest.mark.parametrize("change", ["batch", "width", "dtype", "v width"])
def test_chunks_of_one_call_that_do_not_fit(bare, change):
    """A second chunk of another batch, width or dtype replaced the buffer, and with it the first chunk, without a word."""
    q, k, v = tensors()
    bare.begin(8)
    bare.attend(0, q, k, v)
    q, k, v = {
        "batch": tensors(B=2),
        "width": tensors(D=16, Dv=16),
        "dtype": tuple(x.double() for x in (q, k, v)),
        "v width": tensors(Dv=4),
    }[change]
    with pytest.raises(ValueError, match=r"reset\(\)"):
        bare.attend(0, q, k, v)


def test_wrong_device(bare):
    """pos on the CPU and tensors elsewhere."""
    bare.begin(4)
    with pytest.raises(ValueError, match="made for cpu.*meta"):
        bare.attend(0, *(x.to("meta") for x in tensors()))


def test_shapes_come_from_the_tensors(bare):
    """Tensor parallelism splits heads and latent attention widens v: the config must not be asked."""
    from test_attention import dense

    q, k, v = tensors(T=9, H=6, KV=3, D=10, Dv=6)
    bare.begin(9)
    for layer in range(2):
        parts = [bare.attend(layer, *(x[:, :, a:b] for x in (q, k, v)), scale=0.7) for a, b in ((0, 4), (4, 5), (5, 9))]
        assert (torch.cat(parts, 2) - dense(q, k, v, 0.7)[0]).abs().max() < 1e-5
    bare.end()


def test_prefill_of_one_token_is_prefill(model, ids):
    """The flag says what a call is, never the shape of q: a one-token turn is prefill."""
    flags = []

    class Spy(FullCache):
        def begin(self, T, decode=False):
            super().begin(T, decode)
            flags.append((T, decode, self._decoding))

    cache = Spy(model.config)
    model.prefill(ids[:, :8], cache)  # its last chunk is one token
    model.prefill(ids[:, 8:9], cache)
    model.decode(ids[:, 9:10], cache)
    assert flags == [(8, False, False), (1, False, False), (1, True, True)]


# -------------------------------------------------------------------------------------------------------- decode step


class NoSync(TorchDispatchMode):
    """Raises where the host would have to wait for the device: `.item()`, `bool(tensor)`, `.tolist()`, nonzero, copies to the host."""

    forbidden = ("_local_scalar_dense", "item", "is_nonzero", "equal", "nonzero", "masked_select", "unique")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket.__name__ in self.forbidden:
            raise AssertionError(f"host sync in a decode step: {func}")
        return func(*args, **(kwargs or {}))


def test_decode_step_has_no_host_sync(model, ids):
    """A hidden `.item()`: the step could not be captured in a CUDA graph."""
    cache = FullCache(model.config, capacity=N)
    model.prefill(ids[:, :20], cache)
    with pytest.raises(AssertionError), NoSync():
        int(ids[0, 0])  # the guard works
    for t in range(20, 30):
        cache.begin(1, decode=True)
        with torch.no_grad(), NoSync():
            model.step(ids[:, t : t + 1], cache)
        cache.end()


def test_decode_step_allocates_nothing_that_grows(model, ids):
    """torch.cat per step holds two copies of the cache and copies all of it (transformers PR 30536)."""
    cache = FullCache(model.config, capacity=5000)
    model.prefill(ids[:, torch.arange(4000) % N], cache)
    mine = set(tensors_of(cache))
    large = []

    class Allocations(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            for x in out if isinstance(out, (tuple, list)) else (out,):
                if isinstance(x, torch.Tensor) and x.numel() > 4000 and x.untyped_storage().data_ptr() not in mine:
                    large.append((func, x.shape))
            return out

    cache.begin(1, decode=True)
    with torch.no_grad(), Allocations():
        model.step(ids[:, :1], cache)
    cache.end()
    parameters = {p.shape for p in model.parameters()} | {p.T.shape for p in model.parameters() if p.dim() == 2}
    assert not [entry for entry in large if entry[1] not in parameters]


def test_position_is_on_the_device_and_advances_by_itself(model, ids):
    """The decoder must take the position from `pos`: a replayed graph cannot see a host integer."""
    cache = FullCache(model.config, capacity=N)
    model.prefill(ids[:, :20], cache)
    pos = cache.pos
    assert pos.dtype == torch.int64 and pos.shape == (1,)
    cache.begin(1, decode=True)
    model.step(ids[:, 20:21], cache)
    assert pos.tolist() == [21] and cache.length == 20
    cache.end()
    assert cache.pos is pos and cache.length == 21
    cache.reset()
    assert cache.pos is pos


# ------------------------------------------------------------------------------------------------------------ on disk


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("capacity", [0, 100])
def test_save_and_load(family, ids, tmp_path, dtype, capacity):
    """A reloaded cache continues bit for bit, whatever the capacities were."""
    model = Llama.from_checkpoint(family("llama3.1")[0], dtype=dtype)
    cache = FullCache(model.config, capacity=64)
    model.prefill(ids[:, :40].expand(2, -1), cache)
    extra, meta = {"ids": ids, "view": ids[:, 3:9], "k": torch.ones(2)}, {"text": "grüße\n", "n": 3, "length": 7, "format": "mine"}
    cache.save(tmp_path / "c.kv", extra, meta)
    other = FullCache(model.config, capacity=capacity)
    other_extra, other_meta = other.load(tmp_path / "c.kv")
    assert other_meta == meta and set(other_extra) == set(extra)
    assert all(torch.equal(other_extra[name], extra[name]) for name in extra)
    assert other.length == 40 and other.pos.tolist() == [40]
    for t in range(40, N):
        step = ids[:, t : t + 1].expand(2, -1)
        assert torch.equal(model.decode(step, other), model.decode(step, cache))
    assert (tmp_path / "c.kv").stat().st_size < 2 * 3 * 2 * 2 * 40 * 80 * dtype.itemsize + 10_000, "rows past the length were written"


def test_load_replaces_what_was_there(model, ids, tmp_path, undisturbed):
    """Loading into a used cache, also one of another batch size, and after an interrupted call."""
    cache = FullCache(model.config)
    first = model.prefill(ids[:, :20], cache)
    cache.save(tmp_path / "c")
    used = FullCache(model.config)
    model.prefill(ids.expand(3, -1), used)
    used.begin(5)
    epoch = used.epoch
    used.load(tmp_path / "c")
    assert used.epoch != epoch
    outs = [first] + [model.decode(ids[:, t : t + 1], used) for t in range(20, N)]
    assert torch.equal(torch.stack(outs), undisturbed)


def test_save_and_load_of_an_empty_cache(model, ids, tmp_path, undisturbed):
    """Nothing is a legal content."""
    FullCache(model.config).save(tmp_path / "c", meta={"a": 1})
    cache = FullCache(model.config)
    play(model, cache, ids)
    assert cache.load(tmp_path / "c") == ({}, {"a": 1}) and cache.length == 0
    assert torch.equal(play(model, cache, ids), undisturbed)


def test_save_during_an_unfinished_call_writes_committed_tokens(model, ids, tmp_path):
    """Only what was committed is written."""
    cache = FullCache(model.config, capacity=N)
    model.prefill(ids[:, :20], cache)
    cache.begin(5)
    cache.attend(0, torch.ones(1, 6, 5, 80), torch.ones(1, 2, 5, 80), torch.ones(1, 2, 5, 80))
    cache.save(tmp_path / "c")
    assert {tensor.shape[2] for tensor in load_file(tmp_path / "c").values()} == {20}


def test_failed_save_leaves_the_old_file(model, ids, tmp_path, monkeypatch):
    """A full disk or Ctrl-C while saving must not cost the file that was there, nor leave a temporary."""
    cache = FullCache(model.config)
    model.prefill(ids[:, :20], cache)
    cache.save(tmp_path / "c")
    before = (tmp_path / "c").read_bytes()
    for error in (OSError, KeyboardInterrupt):
        with monkeypatch.context() as patch:
            patch.setattr(cache_module.os, "replace", raising(error))
            with pytest.raises(error):
                cache.save(tmp_path / "c")
        assert (tmp_path / "c").read_bytes() == before and [p.name for p in tmp_path.iterdir()] == ["c"]


def test_temporaries_of_killed_saves_are_removed(model, tmp_path):
    """A kill -9 during a save leaves gigabytes under a name nobody knows; those of other files are not ours."""
    (tmp_path / ".a[1]*.kv.xyz.tmp").write_bytes(b"half")
    (tmp_path / ".other.kv.xyz.tmp").write_bytes(b"somebody's")
    (tmp_path / ".a1b.kv.xyz.tmp").write_bytes(b"matches [1]* as a pattern")
    FullCache(model.config).save(tmp_path / "a[1]*.kv")
    assert sorted(p.name for p in tmp_path.iterdir()) == [".a1b.kv.xyz.tmp", ".other.kv.xyz.tmp", "a[1]*.kv"]


def rewrite(path, **about):
    with safe_open(path, framework="pt") as file:
        old, stored = json.loads(file.metadata()["about"]), {name: file.get_tensor(name).clone() for name in file.keys()}
    save_file(stored, path, metadata={"about": json.dumps(old | about)})


@pytest.mark.parametrize(
    "damage",
    ["absent", "a folder", "empty", "text", "truncated", "a checkpoint", "no json", "a list", "format", "cache", "options", "length", "no length", "more layers", "fewer layers", "a row short", "another layer's batch"],
)
def test_refused_files(model, ids, tmp_path, damage):
    """A file that is not whole, or not for this cache, must be refused in one sentence, and what is held must survive the attempt."""
    cache, path = FullCache(model.config), tmp_path / "c"
    model.prefill(ids[:, :20], cache)
    cache.save(path)
    if damage == "absent":
        path.unlink()
    elif damage == "a folder":
        path.unlink()
        path.mkdir()
    elif damage in ("empty", "text"):
        path.write_bytes({"empty": b"", "text": b"once upon a time, in a file far away"}[damage])
    elif damage == "truncated":
        path.write_bytes(path.read_bytes()[:-1])
    elif damage == "a checkpoint":
        save_file({"model.norm.weight": torch.ones(3)}, path)
    elif damage == "no json":
        save_file({}, path, metadata={"about": "{"})
    elif damage == "a list":
        save_file({}, path, metadata={"about": "[]"})
    elif damage in ("format", "cache", "options"):
        rewrite(path, **{damage: {"format": "tailorkv-cache-0", "cache": "OtherCache", "options": {"bits": 1}}[damage]})
    elif damage == "length":
        rewrite(path, length=21)
    elif damage == "no length":
        rewrite(path, length=None)
    else:
        with safe_open(path, framework="pt") as file:
            about, stored = file.metadata(), {name: file.get_tensor(name).clone() for name in file.keys()}
        if damage == "more layers":
            stored |= {"cache.k.3": stored["cache.k.0"].clone(), "cache.v.3": stored["cache.v.0"].clone()}
        elif damage == "fewer layers":
            del stored["cache.k.2"], stored["cache.v.2"]
        elif damage == "a row short":
            stored["cache.v.1"] = stored["cache.v.1"][:, :, :1].clone()
        else:
            stored["cache.v.1"] = stored["cache.v.1"].repeat(2, 1, 1, 1)
        save_file(stored, path, metadata=about)
    with pytest.raises(ValueError) as error:
        cache.load(path)
    assert "\n" not in str(error.value)
    assert cache.length == 20
    fresh = FullCache(model.config)
    model.prefill(ids[:, :20], fresh)
    assert torch.equal(model.decode(ids[:, 20:21], cache), model.decode(ids[:, 20:21], fresh))


# -------------------------------------------------------------------------------------------------------------- specs


def test_full_is_the_plain_spec():
    """The default spec, with and without a colon."""
    for spec in ("full", "full:"):
        assert parse_spec(spec) == (FullCache, FullCache.Options())
    assert type(make_cache("full", types.SimpleNamespace(num_hidden_layers=2), capacity=9)) is FullCache


@pytest.mark.parametrize("spec,words", [("fool", ("'fool'", "full")), ("", ("''", "full")), ("Full", ("'Full'",)), ("full:bits=1", ("'bits=1'", "none")), ("full:x", ("'x'",)), (":", ("''",))])
def test_bad_specs(spec, words):
    """A misspelt method or field silently running as something else; the message lists what there is."""
    with pytest.raises(ValueError) as error:
        parse_spec(spec)
    assert all(word in str(error.value) for word in words)


class Typed(FullCache):
    """A cache with a field of each kind.

    Not for use."""

    @dataclasses.dataclass(frozen=True)
    class Options(KVCache.Options):
        bits: int = 1
        tau: float = 0.2
        exact: bool = False
        preset: str = "ruler"

        def __post_init__(self):
            if self.bits not in (1, 2):
                raise ValueError(f"bits is {self.bits}; it must be 1 or 2")


@pytest.fixture
def typed(monkeypatch):
    monkeypatch.setitem(cache_module.CACHES, "typed", Typed)


def test_fields_are_typed(typed):
    """`exact=false` read as a non-empty, hence true, string."""
    _, options = parse_spec("typed:bits=2,tau=1e-3,exact=True,preset=a=b")
    assert options == Typed.Options(2, 0.001, True, "a=b")
    assert parse_spec("typed:exact=false")[1].exact is False
    assert isinstance(make_cache("typed:bits=2", types.SimpleNamespace(num_hidden_layers=1)).options, Typed.Options)


@pytest.mark.parametrize("spec,words", [("typed:bits=1.5", ("bits", "1.5", "int")), ("typed:tau=x", ("tau", "float")), ("typed:exact=maybe", ("exact", "bool")), ("typed:nope=1", ("nope", "bits")), ("typed:bits", ("bits",)), ("typed:bits=3", ("bits is 3",))])
def test_bad_fields(typed, spec, words):
    """The message names the field, the value and the type, or the range."""
    with pytest.raises(ValueError) as error:
        parse_spec(spec)
    assert all(word in str(error.value) for word in words)


def test_list_is_made_from_the_code(typed):
    """transformers #34718: documentation named an option that the code rejected."""
    text = describe_caches()
    for name, cls in cache_module.CACHES.items():
        assert f"\n{name} " in "\n" + text
        for field, value in dataclasses.asdict(cls.Options.build()).items():  # what the name alone means, presets included
            assert f"    {field}={value}\n" in text + "\n"
            assert parse_spec(f"{name}:{field}={value}") == parse_spec(name)


def test_a_full_disk_is_an_os_error_and_leaves_the_old_file(tmp_path, monkeypatch):
    """safetensors has an error of its own for it, which callers that handle OSError let through as a traceback."""
    cache = FullCache(types.SimpleNamespace(num_hidden_layers=1))
    cache.save(tmp_path / "c")
    before = (tmp_path / "c").read_bytes()

    def full(*_, **__):
        raise cache_module.SafetensorError("No space left on device")

    monkeypatch.setattr(cache_module, "save_file", full)
    with pytest.raises(OSError, match="No space left"):
        cache.save(tmp_path / "c")
    assert [entry.name for entry in tmp_path.iterdir()] == ["c"] and (tmp_path / "c").read_bytes() == before
