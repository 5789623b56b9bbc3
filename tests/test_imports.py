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
import importlib, os, traceback
def facts():
    return (torch.get_num_threads(), torch.get_default_dtype(), torch.is_grad_enabled(), torch.get_rng_state().sum().item(), threading.active_count(), dict(os.environ))
for name in sys.argv[1:]:  # a fork each, so that none finds what another one imported; PyTorch alone takes longer than all of them
    child = os.fork()
    if not child:
        code = 1
        try:
            home = os.environ["HOME"] + "/" + name
            os.mkdir(home)
            os.chdir(home)
            os.environ["HOME"] = os.environ["XDG_CACHE_HOME"] = home
            for descriptor, file in ((1, "out"), (2, "err")):
                os.dup2(os.open(f"{home}.{file}", os.O_WRONLY | os.O_CREAT), descriptor)
            before = facts()
            watching = True
            module = importlib.import_module(name)
            watching = False
            after = facts()
            assert before == after, (before, after)
            assert not torch.cuda.is_initialized(), "CUDA was initialised"
            print("imported", module.__doc__.splitlines()[0], flush=True)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    os.waitpid(child, 0)
"""


@pytest.fixture(scope="module")
def imported(tmp_path_factory):
    """A folder where every module's import has left its output, its errors and a home of its own."""
    home = tmp_path_factory.mktemp("home")
    env = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1", "HOME": str(home), "XDG_CACHE_HOME": str(home)}
    done = subprocess.run([sys.executable, "-W", "error::UserWarning", "-c", GUARD, *MODULES], capture_output=True, text=True, env=env, cwd=home, timeout=300)
    assert done.returncode == 0 and done.stderr == done.stdout == "", done.stderr
    return home


@pytest.mark.parametrize("name", MODULES)
def test_import_needs_little_and_does_nothing(name, imported):
    """A download, a CUDA context, a changed global or a file at import; or a development tool that a user does not have."""
    out, err = ((imported / f"{name}.{kind}").read_text(encoding="utf-8") for kind in ("out", "err"))
    assert err == "" and out.startswith("imported ") and out.count("\n") == 1, err
    assert not list((imported / name).iterdir())
