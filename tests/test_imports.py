# SPDX-License-Identifier: Apache-2.0
"""Every module imports with the runtime requirements alone, and does nothing else."""

import os
import subprocess
import sys

import pytest
from conftest import ROOT

MODULES = sorted(path.stem for path in ROOT.glob("*.py"))

# What requirements.txt does not install, and what exists only beside a GPU or on Linux.
GUARD = """
import sys, threading
class Forbid:
    names = {"transformers", "pytest", "_pytest", "hypothesis", "triton", "gguf", "accelerate", "matplotlib"}
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in self.names:
            raise ModuleNotFoundError(f"{name} is not among the runtime requirements", name=name)
sys.meta_path.insert(0, Forbid())
def audit(event, args):
    if event in ("socket.connect", "socket.getaddrinfo", "subprocess.Popen", "os.system", "os.mkdir", "os.rename", "os.remove") and watching:
        raise RuntimeError(f"import did {event} {args}")
    if event == "open" and watching and isinstance(args[1], str) and set(args[1]) & set("wax+"):
        raise RuntimeError(f"import wrote {args}")
watching = False
sys.addaudithook(audit)
import torch, safetensors.torch, tokenizers, sentencepiece, jinja2, jinja2.ext, jinja2.sandbox, tqdm
before = (torch.get_num_threads(), torch.get_default_dtype(), torch.is_grad_enabled(), torch.get_rng_state().sum().item(), threading.active_count(), dict(__import__("os").environ))
watching = True
import MODULE
watching = False
after = (torch.get_num_threads(), torch.get_default_dtype(), torch.is_grad_enabled(), torch.get_rng_state().sum().item(), threading.active_count(), dict(__import__("os").environ))
assert before == after, (before, after)
assert not torch.cuda.is_initialized(), "CUDA was initialised"
print("imported", MODULE.__doc__.splitlines()[0])
"""


@pytest.mark.parametrize("name", MODULES)
def test_import_needs_little_and_does_nothing(name, tmp_path):
    """A download, a CUDA context, a changed global or a file at import; or a development tool that a user does not have."""
    env = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1", "HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-W", "error::UserWarning", "-c", GUARD.replace("MODULE", name)], capture_output=True, text=True, env=env, cwd=tmp_path, timeout=120)
    assert done.returncode == 0 and done.stderr == "" and done.stdout.startswith("imported ") and done.stdout.count("\n") == 1, done.stderr
    assert not list(tmp_path.iterdir())
