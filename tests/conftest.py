# SPDX-License-Identifier: Apache-2.0
"""Fixtures: tiny random checkpoints of every family, saved by transformers, and a tiny tokenizer trained on the embedded text.

transformers is the reference here and only here; nothing outside tests/ and bench.py may import it.
"""

import atexit
import json
import os
import pathlib
import shutil
import sys
import tempfile

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Threads that spin while they wait make a step take five times as long on a machine that does something else as well.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# Tests read only what they wrote: transformers would otherwise ask the hub about every folder.
os.environ.setdefault("TRANSFORMERS_OFFLINE", "1")

import hypothesis
import pytest
import torch

# A busy machine is no fault of the code's: no test has to end within 200 ms.
hypothesis.settings.register_profile("patient", deadline=None)
hypothesis.settings.load_profile("patient")

if not torch.cuda.is_available():  # kernels then run in Triton's interpreter, where a test forces them; read when Triton is imported
    os.environ.setdefault("TRITON_INTERPRET", "1")

ROOT = pathlib.Path(__file__).parent.parent


def own_cache_folder() -> str:
    """A cache folder for this run, so that no test reads or leaves a layer plan in the user's; only the embedded models are shared."""
    sys.path.insert(0, str(ROOT))
    import embedded

    user = embedded.cache_dir() / f"embedded-{embedded.REVISION}"
    user.mkdir(parents=True, exist_ok=True)
    own = pathlib.Path(tempfile.mkdtemp(prefix="tailorkv-tests-"))
    atexit.register(shutil.rmtree, own, ignore_errors=True)
    (own / "tailorkv").mkdir()
    (own / "tailorkv" / user.name).symlink_to(user, target_is_directory=True)
    return str(own)


os.environ["XDG_CACHE_HOME"] = own_cache_folder()

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 10000.0}
LLAMA31 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 500000.0}

# Every family at an odd shape. Original lengths are short, so that rotary scaling matters within the tests' few tokens.
FAMILIES = {
    "llama2": ("Llama", {"num_attention_heads": 4, "num_key_value_heads": 4, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}),
    "llama3": ("Llama", {"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 64, "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}}),
    "llama3.1": ("Llama", {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 80, "rope_parameters": LLAMA31}),
    "llama3.2-tied": ("Llama", {"num_attention_heads": 4, "num_key_value_heads": 1, "tie_word_embeddings": True, "rope_parameters": LLAMA31}),
    "linear": ("Llama", {"num_attention_heads": 3, "num_key_value_heads": 1, "rope_parameters": {"rope_type": "linear", "factor": 8.0, "rope_theta": 10000.0}}),
    "yarn": ("Llama", {"num_attention_heads": 4, "num_key_value_heads": 2, "rope_parameters": YARN}),
    "bias": ("Llama", {"num_attention_heads": 4, "num_key_value_heads": 2, "attention_bias": True, "mlp_bias": True}),
    "mistral": ("Mistral", {"num_attention_heads": 4, "num_key_value_heads": 1, "sliding_window": None}),
    "qwen2": ("Qwen2", {"num_attention_heads": 6, "num_key_value_heads": 2, "hidden_size": 144}),
    "qwen2-tied-yarn": ("Qwen2", {"num_attention_heads": 4, "num_key_value_heads": 4, "tie_word_embeddings": True, "rope_parameters": YARN}),
    "qwen3": ("Qwen3", {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 40}),
    "qwen3-bias": ("Qwen3", {"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 24, "attention_bias": True, "tie_word_embeddings": True}),
}
# A large epsilon, so that one taken from elsewhere shows.
COMMON = {"rms_norm_eps": 0.02, "hidden_size": 96, "intermediate_size": 172, "num_hidden_layers": 3, "vocab_size": 211, "max_position_embeddings": 512, "bos_token_id": 1, "eos_token_id": 2}


# Tiny tensors: a second thread only waits for the first, and on a busy machine for long. test_smollm2.py takes all cores.
torch.set_num_threads(1)


def pytest_collection_modifyitems(items):
    if not torch.cuda.is_available():
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def reference(cls: str, **options):
    """A random transformers model of class `cls`, float32. Every parameter is random, biases and norms too, and large enough
    that attention is far from uniform and logits are of order 1: small weights would hide a wrong rotation."""
    import transformers

    config = getattr(transformers, f"{cls}Config")(**(COMMON | options), attn_implementation="eager")
    torch.manual_seed(sum(map(ord, cls + str(sorted(options.items())))))
    model = getattr(transformers, f"{cls}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.copy_(1 + 0.3 * torch.randn_like(parameter))
            elif name.endswith("bias"):
                parameter.copy_(0.3 * torch.randn_like(parameter))
            else:
                gain = 2.0 if "q_proj" in name or "k_proj" in name else 1.0
                parameter.copy_(gain * parameter.shape[-1] ** -0.5 * torch.randn_like(parameter))
    model.tie_weights()
    return model


def raising(error):
    """A function that takes anything and raises `error`. (`exec("raise KeyboardInterrupt")` would end the interpreter with SIGINT.)"""

    def call(*args, **options):
        raise error

    return call


@pytest.fixture
def kernels_everywhere(monkeypatch):
    """Kernels run on CPU tensors too, and memory that nobody wrote holds garbage: NaN, and the largest integers."""
    import kernels

    monkeypatch.setattr(kernels, "FORCE", True)
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="session")
def make_checkpoint(tmp_path_factory):
    """`make_checkpoint(cls, **options) -> (folder, transformers model)`; one of each is made per session. Read only."""
    made = {}

    def make(cls: str, **options):
        key = cls + json.dumps(options, sort_keys=True)
        if key not in made:
            model = reference(cls, **options)
            folder = tmp_path_factory.mktemp(cls)
            model.save_pretrained(folder)
            made[key] = folder, model
        return made[key]

    return make


@pytest.fixture(scope="session")
def family(make_checkpoint):
    """`family(name) -> (folder, transformers model)` for a name of FAMILIES."""
    return lambda name: make_checkpoint(FAMILIES[name][0], **FAMILIES[name][1])


@pytest.fixture
def copy_of(tmp_path):
    """`copy_of(folder, **config) -> Path`: a checkpoint of one's own to damage; config fields are replaced, or removed by `...`."""

    def copy(folder, **config):
        own = tmp_path / f"copy{len(list(tmp_path.iterdir()))}"
        shutil.copytree(folder, own)
        raw = json.loads((own / "config.json").read_text())
        raw = {key: value for key, value in (raw | config).items() if value is not ...}
        (own / "config.json").write_text(json.dumps(raw))
        return own

    return copy


@pytest.fixture(scope="session")
def tiny_tokenizer():
    """A byte-level BPE of 500 tokens trained on the embedded text, with ChatML's special tokens first."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    text = (ROOT / "assets" / "paradise_lost.txt").read_text(encoding="utf-8")[:100_000]
    tokenizer.train_from_iterator(text.split("\n"), trainer)
    return tokenizer


def add_tokenizer(folder, tokenizer, template: bool = True) -> None:
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "clean_up_tokenization_spaces": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(config | ({"chat_template": CHAT_TEMPLATE} if template else {})))


@pytest.fixture(scope="session")
def tiny_chat(make_checkpoint, tiny_tokenizer, tmp_path_factory):
    """Folder of a tiny random Llama with a tokenizer and a chat template; 256 tokens of context. Read only."""
    folder, _ = make_checkpoint("Llama", vocab_size=500, max_position_embeddings=256, num_attention_heads=4, num_key_value_heads=2, bos_token_id=0, eos_token_id=2)
    own = tmp_path_factory.mktemp("chat") / "tiny"
    shutil.copytree(folder, own)
    add_tokenizer(own, tiny_tokenizer)
    return own


@pytest.fixture(scope="session")
def tiny_base(tiny_chat, tiny_tokenizer, tmp_path_factory):
    """The same without a chat template."""
    own = tmp_path_factory.mktemp("base") / "tiny"
    shutil.copytree(tiny_chat, own)
    add_tokenizer(own, tiny_tokenizer, template=False)
    return own
