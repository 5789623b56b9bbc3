# SPDX-License-Identifier: Apache-2.0
"""Tests of bench.py on a CPU, with a model of a few thousand weights: what it measures, prints, saves and refuses."""

import json
import pathlib
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file

import bench
from cache import CACHES, FullCache
from model import Llama, ModelConfig

ROOT = pathlib.Path(bench.__file__).parent
TINY = {
    "model_type": "llama", "vocab_size": 97, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 6,
    "num_key_value_heads": 2, "head_dim": 10, "rms_norm_eps": 1e-5, "max_position_embeddings": 300, "torch_dtype": "bfloat16", "rope_theta": 10000.0,
    "rope_scaling": {"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64},
}  # fmt: skip
KV_FLOAT32 = 2 * 2 * 2 * 10 * 4  # K and V, layers, heads, head_dim, bytes


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    """A shape named `tiny`, and ceilings that cost no time: the rates are not what is tested."""
    monkeypatch.setitem(bench.SHAPES, "tiny", TINY)
    monkeypatch.setattr(bench, "measure_ceiling", lambda model: {"bandwidth": 1e9, "matmul_rate": 1e9, "linear_graph_ms": None})
    monkeypatch.setattr(bench.gc, "collect", lambda: 0)  # a third of a second with transformers in the process


def run(capsys, *argv):
    code = bench.main([*argv])
    out, err = capsys.readouterr()
    return code, out, err


@pytest.fixture
def checkpoint(tmp_path):
    """The tiny model as a checkpoint with tied embeddings, and the fields that real files have and the decoder does not read."""
    raw = {**TINY, "tie_word_embeddings": True, "architectures": ["LlamaForCausalLM"], "transformers_version": "4.43.0", "bos_token_id": 1, "eos_token_id": [2, 3], "use_cache": True}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    state = Llama.from_config(ModelConfig.from_dict(raw)).state_dict()
    save_file({f"model.{name}": weight for name, weight in state.items() if name != "lm_head.weight"}, tmp_path / "model.safetensors")
    return tmp_path


# ----------------------------------------------------------------------------------------------------------- end to end


def test_json_holds_every_timing_and_its_circumstances(capsys, tmp_path):
    """A number without commit, device and versions cannot be compared with the next one."""
    pytest.importorskip("transformers")
    path = tmp_path / "speed.json"
    path.write_text("old")  # named by the user: replaced
    threads = torch.get_num_threads()
    try:
        code, out, err = run(capsys, "--shape", "tiny", "--lengths", "33,70", "--peer", "transformers", "--runs", "3", "--steps", "5", "--device", "cpu", "--threads", "1", "--json", str(path))
    finally:
        torch.set_num_threads(threads)
    assert code == 0
    assert out.index("versions") < out.index("ceiling") < out.index("floor") < out.index("decode ms")
    saved = json.loads(path.read_text())
    assert list(tmp_path.iterdir()) == [path]  # no temporary left
    assert saved["date"] and saved["commit"] and saved["device"].startswith("cpu (") and saved["threads"] == 1 and saved["arguments"]["steps"] == "5"
    assert saved["versions"]["torch"] == torch.__version__ and {"triton", "transformers", "python", "cuda"} <= set(saved["versions"])
    assert saved["ceiling"]["bandwidth"] == 1e9 and saved["model"]["dtype"] == "float32" and saved["model"]["config"]["hidden_size"] == 24
    assert saved["peer_logit_difference"] < 1e-5
    assert [(row["context"], row["cache"]) for row in saved["rows"]] == [(33, "full"), (33, "transformers"), (70, "full"), (70, "transformers")]
    for row in saved["rows"]:
        assert row["status"] == "ok" and [len(run["decode_ms"]) for run in row["runs"]] == [5] * 3
        assert row["prefill_s"] == sorted(run["prefill_s"] for run in row["runs"])[1] and row["decode_ms"] <= row["decode_ms_p90"]
        # transformers holds exactly what was fed, ours what it made room for: the same here.
        assert row["kv_bytes"]["gpu"] - (0 if row["peer"] else 8) == (row["context"] + 5) * KV_FLOAT32 and row["kv_bytes"]["host"] == 0
    full, peer = saved["rows"][2:]
    assert full["decode_speed"] == pytest.approx(peer["decode_ms"] / full["decode_ms"]) and peer["decode_speed"] == 1
    assert full["prefill_speed"] == pytest.approx(peer["prefill_s"] / full["prefill_s"])
    assert err.count("70 tokens, full, run") == 3


def test_checkpoint_without_peer(capsys, checkpoint):
    code, out, _ = run(capsys, "--ckpt", str(checkpoint), "--lengths", "20", "--runs", "1", "--steps", "2", "--device", "cpu")
    assert code == 0
    row = next(line for line in out.splitlines() if line.split()[:2] == ["20", "full"]).split()
    assert row[5] == row[9] == "-"  # no speed ratios without a peer


def test_tailor_beside_full(capsys, tmp_path):
    """Every cache of the registry can be measured; what it keeps on the host is counted there."""
    path = tmp_path / "speed.json"
    spec = "tailor:preset=longbench,channels=4"
    code, out, _ = run(capsys, "--shape", "tiny", "--lengths", "290", "--cache", f"full,{spec}", "--runs", "1", "--steps", "2", "--device", "cpu", "--json", str(path))
    full, tailor = json.loads(path.read_text())["rows"]
    assert code == 0 and full["cache"] == "full" and tailor["cache"] == spec
    assert tailor["status"] == "ok" and tailor["kv_bytes"]["host"] > 0 and "quantised layers of tailor: 0" in out


@pytest.mark.gpu
def test_a_warm_up_may_be_short(capsys, tmp_path):
    """Where it is, it is no cold prefill of that length, and memory is that of the timed run alone."""
    path = tmp_path / "speed.json"
    code, out, _ = run(capsys, "--shape", "tiny", "--lengths", "9000", "--short-warm-up", "--runs", "1", "--steps", "4", "--device", "cuda", "--json", str(path))
    (row,) = json.loads(path.read_text())["rows"]
    assert code == 0 and row["warm_up"] is None and len(row["runs"][0]["decode_ms"]) == 4 and row["peak_gpu_bytes"] == row["runs"][0]["peak_gpu_bytes"]
    assert next(line for line in out.splitlines() if line.split()[:2] == ["9,000", "full"]).split()[3] == "-"


def test_the_same_without_a_graph(monkeypatch, capsys, tmp_path):
    """What is timed must be what an eager step computes: a graph that reads what has moved would be fast, and wrong."""
    path = tmp_path / "speed.json"
    argv = ("--shape", "tiny", "--check", "--steps", "70", "--device", "cpu", "--json", str(path), "--runs", "2")
    # Lengths at which a step leaves the dense start, and a window's edge moves.
    code, _, err = run(capsys, *argv, "--lengths", "60,200", "--cache", "full,tailor:preset=longbench,channels=4,topk=32,dense_below=96")
    assert code == 0 and [row["eager"] for row in json.loads(path.read_text())["rows"]] == [bench.SAME] * 4 and err.count(bench.SAME) == 4

    def spoilt(spoil):
        """A run of 5 steps, behind a warm-up of two, whose fourth is spoilt."""
        calls, decode = [], bench.Ours.decode
        with monkeypatch.context() as patch:
            patch.setattr(bench.Ours, "decode", lambda self, token: (calls.append(1), spoil(self, decode(self, token)) if len(calls) == 6 else decode(self, token))[1])
            code, _, err = run(capsys, "--shape", "tiny", "--check", "--steps", "5", "--device", "cpu", "--json", str(path), "--runs", "1", "--lengths", "200")
        (row,) = json.loads(path.read_text())["rows"]
        assert row["status"] == "ok" and len(row["runs"][0]["decode_ms"]) == 5 and row["eager"] in err
        return code, row["eager"]

    assert spoilt(lambda variant, token: (token + 1) % 97) == (1, "another token 4 without a graph")

    def wrong_value(variant, token):
        variant.cache.v[0][:, :, 0] += 1e-4  # moves no token, but everything after it
        return token

    assert spoilt(wrong_value) == (1, "the same tokens, but other logits, without a graph")
    crop = FullCache.crop
    monkeypatch.setattr(FullCache, "crop", lambda self, n: crop(self, n if n == 0 else -1))
    code, verdict = spoilt(lambda variant, token: token)
    assert code == 1 and verdict.startswith("not decoded without a graph: ValueError: crop(-1)")


def test_variants_take_turns(monkeypatch, capsys):
    """Machines drift: all runs of one variant before the other's would compare two machines."""
    order = []

    def note(self, ids, room, prefill=bench.Ours.prefill):
        order.append((self.spec, ids.shape[1]))
        return prefill(self, ids, room)

    monkeypatch.setattr(bench.Ours, "prefill", note)
    monkeypatch.setitem(CACHES, "other", FullCache)
    assert run(capsys, "--shape", "tiny", "--lengths", "290", "--cache", "full,other", "--runs", "2", "--steps", "1", "--device", "cpu")[0] == 0
    assert order == [("full", 256), ("other", 256)] + [("full", 290), ("other", 290)] * 2  # warm-ups are short on a CPU


def test_measured_ceiling_is_plausible(monkeypatch):
    monkeypatch.undo()
    model = Llama.from_config(ModelConfig.from_dict(TINY))
    monkeypatch.setattr(bench, "timed", lambda work, device, repeats: work().nbytes and [0.7, 0.5, 0.6])
    ceiling = bench.measure_ceiling(model)
    assert ceiling == {"bandwidth": 2 * 2**28 / 0.5, "matmul_rate": 2 * 2048**3 / 0.5, "linear_graph_ms": None}


# ------------------------------------------------------------------------------------------------------ peer and floor


def test_peer_shares_our_weights(checkpoint):
    """A second copy of an 8B model's weights would not fit beside the first, and a copy in another dtype would be another race."""
    pytest.importorskip("transformers")
    for model, raw in (
        (Llama.from_checkpoint(checkpoint), json.loads((checkpoint / "config.json").read_text())),  # tied, bfloat16
        (Llama.from_config(ModelConfig.from_dict(TINY)), TINY),
        (Llama.from_config(ModelConfig.from_dict({**TINY, "model_type": "qwen3"})), {**TINY, "model_type": "qwen3"}),
    ):
        peer = bench.load_peer(model, raw)
        assert sum(p.nbytes for p in peer.parameters()) == sum(p.nbytes for p in model.parameters())
        assert peer.lm_head.weight.data_ptr() == model.lm_head.weight.data_ptr() and peer.dtype == model.dtype
        assert peer.config._attn_implementation == "sdpa"
        assert bench.peer_difference(model, peer) < (0.05 if model.dtype == torch.bfloat16 else 1e-5)


def test_floor_counts_what_must_be_read_and_computed():
    """Hand count for the tiny shape: the embedding table counts only when it is the head too."""
    ceiling, N = {"bandwidth": 1e9, "matmul_rate": 1e9}, 50
    layer = 2 * 24 * 60 + 2 * 24 * 20 + 3 * 24 * 40  # q and o, k and v, gate, up and down
    norms = (2 * 2 + 1) * 24
    untied = bench.floor(Llama.from_config(ModelConfig.from_dict(TINY)), ceiling, N)
    tied = bench.floor(Llama.from_config(ModelConfig.from_dict({**TINY, "tie_word_embeddings": True})), ceiling, N)
    for least in (untied, tied):
        assert least["weight_bytes_read"] == 4 * (2 * layer + norms + 97 * 24)
        assert least["kv_bytes_read"] == N * KV_FLOAT32
        assert least["flops"] == 2 * 2 * layer * N + 2 * 97 * 24 + 2 * 2 * 6 * 10 * N * N
    assert untied["decode_ms"] == pytest.approx((untied["weight_bytes_read"] + untied["kv_bytes_read"]) / 1e6)


def test_shapes_are_configs_the_decoder_accepts():
    for raw in bench.SHAPES.values():
        ModelConfig.from_dict(raw)


# ------------------------------------------------------------------------------------------------------ what goes wrong


@pytest.mark.parametrize(
    "error, status, code",
    [(torch.OutOfMemoryError("CUDA out of memory"), "OOM", 0), (RuntimeError("DefaultCPUAllocator: can't allocate memory"), "OOM", 0), (ValueError("too long\nfor it"), "failed: ValueError: too long", 1)],
    ids=["cuda-oom", "cpu-oom", "failed"],
)  # fmt: skip
def test_a_variant_that_fails_has_its_row(monkeypatch, capsys, tmp_path, error, status, code):
    """A method that runs out of memory loses the comparison in the open, and costs the others nothing."""

    class Greedy(FullCache):
        def attend(self, layer, q, k, v, scale=None):
            if k.shape[2] > 60:
                raise error
            return super().attend(layer, q, k, v, scale)

    monkeypatch.setitem(CACHES, "greedy", Greedy)
    path = tmp_path / "speed.json"
    got, out, _ = run(capsys, "--shape", "tiny", "--lengths", "32,70", "--cache", "greedy,full", "--runs", "2", "--steps", "2", "--device", "cpu", "--json", str(path))
    rows = {(row["context"], row["cache"]): row for row in json.loads(path.read_text())["rows"]}
    assert got == code
    assert {key: row["status"] for key, row in rows.items()} == {(32, "greedy"): "ok", (32, "full"): "ok", (70, "greedy"): status, (70, "full"): "ok"}
    assert rows[70, "greedy"]["runs"] == [] and len(rows[70, "full"]["runs"]) == 2
    assert any(line.split()[:2] == ["70", "greedy"] and line.endswith(status) for line in out.splitlines())


def test_slow_decode_is_cut_short(monkeypatch, capsys, tmp_path):
    """An offloaded cache at seconds a step must not turn 32 steps x 5 runs into an hour."""
    monkeypatch.setattr(bench, "time_step", lambda variant, token: (4.0, token))
    path = tmp_path / "speed.json"
    run(capsys, "--shape", "tiny", "--lengths", "32", "--runs", "1", "--steps", "9", "--device", "cpu", "--json", str(path))
    assert json.loads(path.read_text())["rows"][0]["runs"][0]["decode_ms"] == [4000.0] * 3


def test_bad_input_is_one_sentence(capsys, tmp_path):
    for argv, words in (
        (["--cache", "fool"], "unknown cache 'fool'"),
        (["--cache", "full,"], "unknown cache 'full,'"),
        (["--runs", "0"], "--runs is 0"),
        (["--steps", "-1"], "--steps is -1"),
        (["--threads", "0"], "--threads is 0"),
        (["--device", "meta"], "device 'meta' is not available"),
        (["--json", str(tmp_path)], "cannot write"),
        (["--json", str(tmp_path / "no" / "f.json")], "cannot write"),
    ):
        code, out, err = run(capsys, "--shape", "tiny", "--lengths", "16", *argv)
        assert code == 2 and out == "" and words in err and err.count("\n") == 1, (argv, err)
    assert run(capsys, "--ckpt", str(tmp_path), "--lengths", "16")[2].count("\n") == 1
    for argv in (["--lengths", "4k,x"], ["--lengths", "0"], ["--shape", "unheard-of"], ["--ckpt", "a", "--shape", "tiny"], ["--peer", "vllm"]):
        with pytest.raises(SystemExit) as stop:
            bench.main(argv)
        assert stop.value.code == 2 and capsys.readouterr().err.count("\n") == 1


def test_peer_not_installed(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "transformers", None)
    code, _, err = run(capsys, "--shape", "tiny", "--lengths", "16", "--peer", "transformers", "--device", "cpu")
    assert code == 2 and "requirements-dev.txt" in err


def test_failed_save_leaves_no_temporary_and_keeps_the_old_file(tmp_path):
    (tmp_path / "speed.json").write_text("old")
    with pytest.raises(TypeError):
        bench.save(tmp_path / "speed.json", {"rows": object()})
    assert [entry.name for entry in tmp_path.iterdir()] == ["speed.json"] and (tmp_path / "speed.json").read_text() == "old"


# ------------------------------------------------------------------------------------------------------------- details


def test_spec_lists_split_only_before_a_cache_name(monkeypatch):
    monkeypatch.setitem(CACHES, "full-er", FullCache)
    for text, specs in (
        ("full", ["full"]),
        ("full,tailor", ["full", "tailor"]),
        ("tailor:preset=longbench,channels=16,full", ["tailor:preset=longbench,channels=16", "full"]),
        ("tailor:a=1,tailor:a=2,b=full,full-er", ["tailor:a=1", "tailor:a=2,b=full", "full-er"]),
        ("tailor:full=1,fuller=2", ["tailor:full=1,fuller=2"]),
    ):
        assert bench.split_specs(text) == specs


def test_lengths():
    assert bench.parse_lengths("4096,32k,1m") == [4096, 32768, 1048576]


def test_help_and_import_need_no_transformers():
    """transformers is a development dependency, and takes seconds to import."""
    code = "import sys, bench; bench.build_parser().format_help(); assert 'transformers' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
