# SPDX-License-Identifier: Apache-2.0
"""Loading: which files are read, what is refused and in which words, dtypes, tied weights, the hub."""

import gc
import json
import pickle
import subprocess
import sys
import time
import types

import huggingface_hub
import pytest
import torch
from conftest import FAMILIES, ROOT
from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled, RepositoryNotFoundError
from safetensors.torch import load_file, save_file

import pinned
from cache import FullCache
from generate import generate
from model import Llama, ModelConfig, find_checkpoint, find_weights, read_config

IDS = torch.arange(3, 40)[None]


@pytest.fixture(scope="module")
def folder(family):
    return family("llama3")[0]


@pytest.fixture(scope="module")
def tied(family):
    return family("llama3.2-tied")[0]


@pytest.fixture(scope="module")
def logits(folder):
    model = Llama.from_checkpoint(folder)
    return model.prefill(IDS, FullCache(model.config))


def run(path, **options):
    model = Llama.from_checkpoint(path, **options)
    return model.prefill(IDS, FullCache(model.config))


def refused(path, *words):
    with pytest.raises(ValueError) as error:
        Llama.from_checkpoint(path)
    message = str(error.value)
    assert "\n" not in message.strip() and all(word in message for word in words), message
    return message


def shard(folder, count=3):
    """Rewrite a folder as `count` shards with an index."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    weight_map = {}
    for i in range(count):
        file = f"model-{i + 1:05d}-of-{count:05d}.safetensors"
        part = {name: tensors[name] for name in names[i::count]}
        save_file(part, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))
    return weight_map


# ------------------------------------------------------------------------------------------------------- which files


def test_sharded_and_single_and_any_name_and_file_path_are_the_same_model(folder, copy_of, logits):
    """gpt-fast #75: small models have one file and no index, others only shards; each loader knew one of them."""
    sharded, named = copy_of(folder), copy_of(folder)
    shard(sharded)
    (named / "model.safetensors").rename(named / "consolidated.safetensors")
    for path in (folder, str(folder), sharded, named, named / "consolidated.safetensors", folder / "model.safetensors"):
        assert torch.equal(run(path), logits), path


def test_sharded_by_transformers(family, tmp_path):
    """The index as transformers itself writes it."""
    _, theirs = family("qwen3")
    theirs.save_pretrained(tmp_path, max_shard_size="50KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    with torch.no_grad():
        assert (run(tmp_path) - theirs(IDS).logits[:, -1]).abs().max() <= 1e-4


def test_index_wins_over_stray_files(folder, copy_of, logits):
    """A folder that also holds the weights in another naming, or a stale file from an older download."""
    own = copy_of(folder)
    shard(own)
    save_file({"layers.0.attention.wq.weight": torch.zeros(1)}, own / "consolidated.00.safetensors")
    (own / "pytorch_model.bin").write_bytes(pickle.dumps({}))
    (own / "original").mkdir()
    assert torch.equal(run(own), logits)


def test_path_with_strange_characters_and_tilde(folder, tmp_path, monkeypatch, logits):
    """A path read as a pattern, or ~ not expanded."""
    strange = tmp_path / "ein [Ordner] ü 50%"
    strange.symlink_to(folder, target_is_directory=True)
    assert torch.equal(run(strange), logits)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert find_checkpoint("~/ein [Ordner] ü 50%") == strange


def test_several_files_and_no_index_are_refused(folder, copy_of):
    """Two files without an index: picking one loads half a model."""
    own = copy_of(folder)
    (own / "model.safetensors").rename(own / "a.safetensors")
    save_file({"x": torch.zeros(1)}, own / "b.safetensors")
    refused(own, "2 .safetensors files", "index")


def test_missing_shards_are_named(folder, copy_of):
    """A download that lost a shard must say which, all of them, before anything is read."""
    own = copy_of(folder)
    shard(own, 4)
    for n in (2, 4):
        (own / f"model-0000{n}-of-00004.safetensors").unlink()
    refused(own, "model-00002-of-00004.safetensors", "model-00004-of-00004.safetensors")


@pytest.mark.parametrize("name", ["../evil.safetensors", "/etc/evil.safetensors", "sub/x.safetensors", "model.bin", "", 7, None])
def test_index_may_not_point_elsewhere(folder, copy_of, name):
    """An index is data from a stranger: a path in it must not leave the folder, nor name a pickle file."""
    own = copy_of(folder)
    weight_map = shard(own)
    weight_map["model.norm.weight"] = name
    (own / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    refused(own, "index.json", repr(name))


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"{}", b'{"weight_map": {}}', b'{"weight_map": []}', b"\xff\xfe"])
def test_damaged_index(folder, copy_of, content):
    """A half-written index ends in a traceback."""
    own = copy_of(folder)
    (own / "model.safetensors.index.json").write_bytes(content)
    refused(own, "model.safetensors.index.json")


class Bomb:
    def __reduce__(self):
        return (pytest.fail, ("a pickle was opened",))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "model.pt"])
def test_pickles_are_never_opened(folder, copy_of, name):
    """Opening a pickle runs what it says; the error must say that this is why it is not used."""
    own = copy_of(folder)
    (own / "model.safetensors").unlink()
    (own / name).write_bytes(pickle.dumps(Bomb()))
    refused(own, name, "pickle", "never opened")
    refused(own / name, name, "pickle", "never opened")


def test_folder_without_weights(tmp_path):
    """An empty folder, or the wrong one."""
    refused(tmp_path, str(tmp_path), "no .safetensors")


@pytest.mark.parametrize("name", ["./no/such/folder", "/no/such/folder", "no-such-folder", "a/b/c", "", "~/no such", "x" * 300, "/" + "x" * 5000, "a\0b", "../x"])
def test_no_such_path(name, tmp_path, monkeypatch):
    """A mistyped path taken for a hub id, or a traceback for one that the file system does not even take."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("model._download", lambda repo: pytest.fail("went to the network"))
    refused(name)


# -------------------------------------------------------------------------------------------------------- what is in them


def test_missing_unexpected_and_misshapen_tensors_are_all_listed(folder, copy_of):
    """A loader that fills what it finds leaves uninitialised weights; one that stops at the first problem hides the rest."""
    own = copy_of(folder)
    tensors = load_file(own / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"], tensors["model.norm.weight"]
    tensors["model.layers.2.self_attn.q_proj.bias"] = torch.zeros(4)
    tensors["score.weight"] = torch.zeros(2, 2)
    tensors["model.layers.0.mlp.gate_proj.weight"] = torch.zeros(5, 96)
    tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"][:-1].clone()
    save_file(tensors, own / "model.safetensors")
    refused(
        own,
        "missing model.layers.1.mlp.up_proj.weight",
        "missing model.norm.weight",
        "unexpected model.layers.2.self_attn.q_proj.bias",
        "unexpected score.weight",
        "model.layers.0.mlp.gate_proj.weight is [5, 96] where the config says [172, 96]",
        "model.embed_tokens.weight is [210, 96] where the config says [211, 96]",
    )


def test_weights_of_another_model(folder, copy_of):
    """config.json of one model beside the weights of another."""
    refused(copy_of(folder, num_hidden_layers=4), "missing model.layers.3.")
    refused(copy_of(folder, num_hidden_layers=2), "unexpected model.layers.2.")
    refused(copy_of(folder, hidden_size=100), "where the config says")
    refused(copy_of(folder, attention_bias=True), "missing model.layers.0.self_attn.q_proj.bias")
    refused(copy_of(folder, model_type="qwen3", architectures=["Qwen3ForCausalLM"]), "missing model.layers.0.self_attn.q_norm.weight")


@pytest.mark.parametrize("keep", [0, 4, 8, 100, 2000, -1])
def test_truncated_file(folder, copy_of, keep):
    """A download cut short, at any place: in the length, in the header, in the last tensor."""
    own = copy_of(folder)
    data = (own / "model.safetensors").read_bytes()
    (own / "model.safetensors").write_bytes(data[:keep])
    refused(own, "model.safetensors", "download it again")


@pytest.mark.parametrize("damage", [b"\0" * 64, b"<!DOCTYPE html><html>404", b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n", b"\xff" * 4096])
def test_corrupt_file(folder, copy_of, damage):
    """An error page or a git-lfs pointer under the file's name: what half of all broken downloads are."""
    own = copy_of(folder)
    (own / "model.safetensors").write_bytes(damage)
    refused(own, "model.safetensors", "download it again")


def test_corrupt_header(folder, copy_of):
    """A valid length with a header that is not JSON, or names a shape that its bytes do not hold."""
    own = copy_of(folder)
    data = bytearray((own / "model.safetensors").read_bytes())
    data[20] ^= 0xFF
    (own / "model.safetensors").write_bytes(data)
    refused(own, "model.safetensors")


def test_truncated_shard_is_named(folder, copy_of):
    """Of many shards the damaged one must be named."""
    own = copy_of(folder)
    shard(own)
    file = own / "model-00002-of-00003.safetensors"
    file.write_bytes(file.read_bytes()[:-5])
    refused(own, "model-00002-of-00003.safetensors")


def test_shard_is_a_folder(folder, copy_of):
    """model.safetensors as a directory."""
    own = copy_of(folder)
    (own / "model.safetensors").unlink()
    (own / "model.safetensors").mkdir()
    refused(own, "model.safetensors")


@pytest.mark.parametrize("dtype", [torch.int8, torch.int64, torch.bool])
def test_integer_weights_are_refused(folder, copy_of, dtype):
    """Quantised codes copied into a float matrix as if they were weights."""
    own = copy_of(folder)
    tensors = load_file(own / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    tensors[name] = tensors[name].to(dtype)
    save_file(tensors, own / "model.safetensors")
    refused(own, name, "floating-point")


def test_eight_bit_float_weights_are_refused(folder, copy_of):
    """float8 weights need a scale that lies beside them; without it the values are wrong by a factor."""
    own = copy_of(folder)
    tensors = load_file(own / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    tensors[name] = tensors[name].to(torch.float8_e4m3fn)
    save_file(tensors, own / "model.safetensors")
    refused(own, name, "float8")


def test_old_inv_freq_buffers_are_ignored(folder, copy_of, logits):
    """Llama-2-era exports hold rotary tables among the weights; strictness must not refuse them."""
    own = copy_of(folder)
    tensors = load_file(own / "model.safetensors")
    tensors |= {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.full((32,), 7.0) for i in range(3)}
    save_file(tensors, own / "model.safetensors")
    assert torch.equal(run(own), logits)


def test_config_absent_or_damaged(folder, copy_of):
    """No config.json, or half of one."""
    own = copy_of(folder)
    (own / "config.json").unlink()
    refused(own, "config.json")
    for content in (b"", b'{"model_type": "lla', b"[1]", b"\xff\xfe{}"):
        (own / "config.json").write_bytes(content)
        refused(own, "config.json")


@pytest.mark.parametrize("name", ["model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "rms_norm_eps", "max_position_embeddings"])
def test_config_lacks_a_needed_field(folder, copy_of, name):
    """A missing field replaced by another family's default."""
    refused(copy_of(folder, **{name: ...}), name)


@pytest.mark.filterwarnings("ignore:config.json names no rope_theta")
def test_unsupported_config(folder, copy_of):
    """What the decoder does not do is refused before the weights are read."""
    refused(copy_of(folder, quantization_config={"quant_method": "awq"}), "awq")
    refused(copy_of(folder, model_type="mamba"), "mamba")
    refused(copy_of(folder, rope_parameters={"rope_type": "dynamic", "factor": 2.0}), "dynamic")


# ------------------------------------------------------------------------------------------------------------- dtypes


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("asked", [None, torch.float32, torch.bfloat16, torch.float16])
def test_dtypes(folder, copy_of, stored, asked):
    """Weights converted twice, or by way of the wrong dtype; `dtype=None` must mean the checkpoint's own."""
    own = copy_of(folder, dtype=str(stored).removeprefix("torch."))
    tensors = {name: tensor.to(stored) for name, tensor in load_file(own / "model.safetensors").items()}
    save_file(tensors, own / "model.safetensors")
    model = Llama.from_checkpoint(own, dtype=asked)
    for name, parameter in model.named_parameters():
        source = tensors[name if name.startswith("lm_head") else f"model.{name}"]
        assert parameter.dtype == (asked or stored) and torch.equal(parameter, source.to(asked or stored))
        assert not parameter.requires_grad and parameter.device.type == "cpu"
    assert model.inv_freq.dtype == torch.float32
    assert model.prefill(IDS, FullCache(model.config)).isfinite().all()


@pytest.mark.parametrize("spelling", [{"torch_dtype": "bfloat16", "dtype": ...}, {"dtype": "bfloat16"}, {"dtype": "torch.bfloat16"}])
def test_dtype_spellings(folder, copy_of, spelling):
    """transformers 5 writes `dtype`, older files `torch_dtype`."""
    assert Llama.from_checkpoint(copy_of(folder, **spelling)).dtype == torch.bfloat16


def test_weights_do_not_hang_on_the_file(folder, copy_of, logits):
    """A memory-mapped parameter changes, or crashes, when its file is replaced while the program runs."""
    own = copy_of(folder)
    model = Llama.from_checkpoint(own)
    data = bytearray((own / "model.safetensors").read_bytes())
    with open(own / "model.safetensors", "r+b") as file:
        file.seek(len(data) // 4)
        file.write(b"\x3f" * (len(data) // 2))
    assert torch.equal(model.prefill(IDS, FullCache(model.config)), logits)


# --------------------------------------------------------------------------------------------------- tied and lm_head


def test_tied_weights_share_storage(tied):
    """A tied head copied: 0.5 GB twice on Llama-3.2-1B."""
    assert "lm_head.weight" not in load_file(tied / "model.safetensors")
    for dtype in (None, torch.bfloat16):
        model = Llama.from_checkpoint(tied, dtype=dtype)
        assert model.lm_head.weight.data_ptr() == model.embed_tokens.weight.data_ptr()
        assert len(list(model.parameters())) == len(list(model.named_parameters(remove_duplicate=False))) - 1


def test_absent_head_of_an_untied_config_warns_and_ties(tied, copy_of):
    """sglang #2935: lm_head.weight missing without tie_word_embeddings; the embedding is the only sensible head."""
    own = copy_of(tied, tie_word_embeddings=False)
    with pytest.warns(UserWarning, match="lm_head"):
        model = Llama.from_checkpoint(own)
    assert model.lm_head.weight is model.embed_tokens.weight
    assert torch.equal(model.prefill(IDS, FullCache(model.config)), run(tied))


def test_tied_config_with_a_redundant_head(tied, copy_of):
    """A tied checkpoint that stores its head all the same: shared, not held twice."""
    own = copy_of(tied)
    tensors = load_file(own / "model.safetensors")
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, own / "model.safetensors")
    model = Llama.from_checkpoint(own)
    assert model.lm_head.weight is model.embed_tokens.weight
    assert torch.equal(model.prefill(IDS, FullCache(model.config)), run(tied))


def test_tied_config_with_a_head_of_its_own(tied, copy_of):
    """"tied" in the config beside a different lm_head.weight (a fine-tune): ignoring the trained head is silently wrong text."""
    own = copy_of(tied)
    tensors = load_file(own / "model.safetensors")
    head = torch.randn_like(tensors["model.embed_tokens.weight"])
    save_file(tensors | {"lm_head.weight": head}, own / "model.safetensors")
    model = Llama.from_checkpoint(own)
    assert torch.equal(model.lm_head.weight, head) and not torch.equal(model.embed_tokens.weight, head)


def test_tied_config_with_a_misshapen_head(tied, copy_of):
    """A head of another vocabulary must not pass because the config says tied."""
    own = copy_of(tied)
    tensors = load_file(own / "model.safetensors")
    save_file(tensors | {"lm_head.weight": torch.zeros(7, 96)}, own / "model.safetensors")
    refused(own, "lm_head.weight", "[7, 96]")


def test_no_embedding_at_all(tied, copy_of):
    """A shard without the embedding: missing, not "tied to nothing"."""
    own = copy_of(tied)
    tensors = load_file(own / "model.safetensors")
    del tensors["model.embed_tokens.weight"]
    save_file(tensors, own / "model.safetensors")
    refused(own, "missing model.embed_tokens.weight")


# -------------------------------------------------------------------------------------------------------- fingerprint


def test_fingerprint_tells_models_apart(folder, tied, copy_of):
    """A saved cache read into another model: the fingerprint must follow the weights and the config, not the path or dtype."""
    base = Llama.from_checkpoint(folder).fingerprint
    sharded = copy_of(folder)
    shard(sharded)
    assert len(base) == 64 and base == Llama.from_checkpoint(sharded).fingerprint == Llama.from_checkpoint(folder, dtype=torch.bfloat16).fingerprint
    other = copy_of(folder)
    tensors = load_file(other / "model.safetensors")
    tensors["model.layers.2.mlp.down_proj.weight"][0, 0] += 1
    save_file(tensors, other / "model.safetensors")
    scaled = copy_of(folder, rms_norm_eps=1e-4)
    assert len({base, *(Llama.from_checkpoint(path).fingerprint for path in (tied, other, scaled))}) == 4


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_loads_strictly(family, name):
    """A parameter left on "meta" or never filled."""
    model = Llama.from_checkpoint(family(name)[0])
    assert not any(p.is_meta for p in model.parameters()) and not model.inv_freq.is_meta
    assert not model.training and model.config == ModelConfig.from_dict(read_config(family(name)[0]))


# ---------------------------------------------------------------------------------------------------------------- hub


def response(status):
    request = types.SimpleNamespace(url="https://hub/api/models/org/name", method="GET", headers={})
    return types.SimpleNamespace(headers={}, request=request, status_code=status, url=request.url)


class ConnectError(Exception):
    """Stands for the HTTP library's: which library that is changed between versions of the hub client."""


@pytest.fixture
def hub(monkeypatch, tmp_path, folder, copy_of):
    """A hub that serves a copy of `folder`, counts, and can fail. `hub.snapshot` is what is cached (or None)."""
    remote = copy_of(folder)
    shard(remote)
    (remote / "pytorch_model.bin").write_bytes(b"never fetched")
    (remote / "README.md").write_text("neither")
    state = types.SimpleNamespace(remote=remote, error=None, download_error=None, snapshot=None, fetched=set())

    def model_info(self, repo, **kwargs):
        assert repo == "org/name"
        if state.error:
            raise state.error
        return types.SimpleNamespace(siblings=[types.SimpleNamespace(rfilename=p.name) for p in state.remote.iterdir()] + [types.SimpleNamespace(rfilename="original/consolidated.safetensors")])

    def snapshot_download(repo, allow_patterns=None, local_files_only=False, **kwargs):
        assert repo == "org/name" and allow_patterns
        if local_files_only:
            if state.snapshot is None:
                raise LocalEntryNotFoundError("not cached")
            return str(state.snapshot)
        if state.download_error:
            raise state.download_error
        names = {p.name for p in state.remote.iterdir() if p.name in allow_patterns}
        state.fetched |= names
        own = tmp_path / "snapshot"
        own.mkdir(exist_ok=True)
        for name in names:
            (own / name).write_bytes((state.remote / name).read_bytes())
        return str(own)

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", model_info)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    monkeypatch.chdir(tmp_path)
    return state


def test_hub_fetches_only_what_is_needed(hub, logits):
    """Twins in .bin and original/ double a 16 GB download."""
    assert torch.equal(run("org/name"), logits)
    assert "model.safetensors.index.json" in hub.fetched and "config.json" in hub.fetched
    assert len([name for name in hub.fetched if name.endswith(".safetensors")]) == 3
    assert not hub.fetched & {"pytorch_model.bin", "README.md"}


def test_hub_single_file(hub, logits, folder, copy_of):
    """A repository with one file and no index."""
    hub.remote = copy_of(folder)
    save_file({"x": torch.zeros(1)}, hub.remote / "adapter.safetensors")
    assert torch.equal(run("org/name"), logits)
    assert {name for name in hub.fetched if name.endswith(".safetensors")} == {"model.safetensors"}


def test_hub_without_safetensors(hub):
    """A pickle-only repository: say so, fetch nothing."""
    for path in hub.remote.glob("*.safetensors*"):
        path.unlink()
    assert "pickle" in refused("org/name", "org/name", "pytorch_model.bin") and not hub.fetched


@pytest.mark.parametrize(
    "error,words",
    [
        (GatedRepoError("403", response=response(403)), ("org/name", "gated", "hf auth login")),
        (RepositoryNotFoundError("404", response=response(404)), ("org/name", "neither a local path nor a repository")),
        (HfHubHTTPError("500 Server Error\nRequest ID: 1", response=response(500)), ("org/name", "500 Server Error")),
        (ConnectError("[Errno -2] Name or service not known"), ("org/name", "not in the hub's cache", "cannot be reached", "network")),
        (TimeoutError("timed out"), ("org/name", "not in the hub's cache", "cannot be reached")),
        (OfflineModeIsEnabled("offline mode"), ("org/name", "not in the hub's cache", "cannot be reached")),
    ],
    ids=["gated", "absent", "500", "no network", "timeout", "offline"],
)
@pytest.mark.parametrize("when", ["error", "download_error"])
def test_hub_failures_are_one_sentence(hub, error, words, when):
    """A page of traceback for the four things that ordinarily go wrong, whether at the listing or in the download."""
    setattr(hub, when, error)
    refused("org/name", *words)


@pytest.mark.parametrize("error", [ConnectError("x"), OfflineModeIsEnabled("x")])
def test_hub_without_network_uses_the_cached_snapshot(hub, folder, error, logits):
    """On a train, yesterday's download must still run."""
    hub.error, hub.snapshot = error, folder
    assert torch.equal(run("org/name"), logits)


def test_hub_half_downloaded_snapshot(hub, folder, copy_of):
    """A download that was interrupted, and no network to finish it: say both, and which file is missing."""
    hub.error, hub.snapshot = ConnectError("x"), copy_of(folder)
    shard(hub.snapshot)
    (hub.snapshot / "model-00003-of-00003.safetensors").unlink()
    refused("org/name", "org/name", "only in part", "model-00003-of-00003.safetensors")
    hub.snapshot = copy_of(folder)
    (hub.snapshot / "config.json").unlink()
    refused("org/name", "only in part", "config.json")


def test_hub_incomplete_snapshot_error_of_the_client(hub, folder, copy_of, monkeypatch):
    """Newer hub clients raise for a snapshot that lacks any listed file; what is there may be all that is needed."""

    def incomplete(*args, **kwargs):
        error = LocalEntryNotFoundError("incomplete")
        error.snapshot_path = str(hub.snapshot)
        raise error

    hub.error, hub.snapshot = ConnectError("x"), copy_of(folder)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", incomplete)
    assert find_checkpoint("org/name") == hub.snapshot
    (hub.snapshot / "model.safetensors").unlink()
    refused("org/name", "only in part")


def test_local_folder_wins_over_hub(hub, folder, tmp_path):
    """A relative folder that looks like a hub id must not touch the network."""
    (tmp_path / "org").mkdir()
    (tmp_path / "org" / "name").symlink_to(folder, target_is_directory=True)
    hub.error = AssertionError("went to the network")
    assert find_weights(find_checkpoint("org/name"))[1][0].name == "model.safetensors"


def test_real_hub_id_without_network_ends_quickly(tmp_path):
    """The hub client retries a listing for 23 s and prints eleven lines about it."""
    import socket

    try:
        socket.create_connection(("huggingface.co", 443), timeout=2).close()
    except OSError:
        pass
    else:
        pytest.skip("there is a network here")
    import os

    env = {key: value for key, value in os.environ.items() if not key.startswith("HF_")} | {"HF_HOME": str(tmp_path), "TRANSFORMERS_OFFLINE": "0"}
    start = time.monotonic()
    done = subprocess.run([sys.executable, ROOT / "generate.py", "--ckpt", "no-such-org/no-such-name", "--prompt", "x"], capture_output=True, text=True, env=env, timeout=120)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.count("\n") == 1 and "no-such-org/no-such-name" in done.stderr and "cannot be reached" in done.stderr
    assert time.monotonic() - start < 15


# -------------------------------------------------------------------------------------- the table beside a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("refused", [False, True], ids=["pinned", "refused"])
def test_the_embedding_table_stays_on_the_host(make_checkpoint, monkeypatch, refused):
    """A GiB of Llama-3.1-8B's weights, of which a step reads 8 KiB: the GPU reads it on the host, to the same bits, and gives it back with the model."""
    wide, _ = make_checkpoint("Llama", tie_word_embeddings=False, vocab_size=32_768, hidden_size=256, num_attention_heads=4, num_key_value_heads=2)
    ids = torch.randint(0, 32_768, (1, 300), generator=torch.Generator().manual_seed(0))
    ended = []
    close = pinned.Pinner.close
    monkeypatch.setattr(pinned.Pinner, "close", lambda self: (close(self), ended.append(len(self._registered))))
    gc.collect()
    before = torch.cuda.memory_allocated()
    if refused:
        with monkeypatch.context() as patch, pytest.warns(UserWarning, match="CUDA error 2.*; the embedding table stays on the GPU"):
            patch.setattr(torch.cuda, "cudart", lambda: types.SimpleNamespace(cudaHostRegister=lambda *_: 2))
            model = Llama.from_checkpoint(wide, "cuda", torch.bfloat16)
    else:
        model = Llama.from_checkpoint(wide, "cuda", torch.bfloat16)
    table = 32_768 * 256 * 2
    held, weights = torch.cuda.memory_allocated() - before, model.nbytes()
    assert weights == {"gpu": sum(p.nbytes for p in model.parameters()) - (0 if refused else table), "host": 0 if refused else table}
    assert weights["gpu"] <= held < weights["gpu"] + 2**20
    assert torch.equal(model.embed_tokens.weight.cpu(), load_file(wide / "model.safetensors")["model.embed_tokens.weight"].bfloat16())

    def run():
        cache = FullCache(model.config, device=model.device, capacity=320)
        logits = model.prefill(ids, cache)
        return logits, list(generate(model, cache, ids[0].tolist(), 9, logits=logits))

    logits, tokens = run()
    model.embed_tokens.weight = torch.nn.Parameter(model.embed_tokens.weight.clone(), requires_grad=False)
    gc.collect()
    assert ended == [0]  # memory was given back, either by the load that could not pin it or once nobody saw it any more
    again, same = run()
    assert torch.equal(logits, again) and tokens == same


def test_a_tied_table_and_one_beside_a_cpu_stay_where_they_are(folder, tied):
    for own in (folder, tied):
        model = Llama.from_checkpoint(own)
        assert model.nbytes() == {"gpu": sum(p.nbytes for p in model.parameters()), "host": 0}
