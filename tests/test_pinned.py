# SPDX-License-Identifier: Apache-2.0
"""Pinning: in which order memory is mapped, touched, registered and given back. CUDA's part is played here; the real one is seen by `test_gpu.py` and `test_checkpoint.py`."""

import contextlib
import mmap
import threading
import types

import pytest
import torch

import pinned
from conftest import raising
from pinned import Pinner, on_host

SIZE = 1 << 22


def threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith(("tailorkv-touch", "tailorkv-pin"))}


@pytest.fixture
def runtime(monkeypatch):
    """What was asked of CUDA; `answers` holds the codes that registering returns, 0 once there are none left. No thread may be left behind."""
    asked, before = types.SimpleNamespace(registered=[], unregistered=[], answers=[], waited=0), threads()

    def register(address, size, flags):
        asked.registered.append((address, size))
        return asked.answers.pop(0) if asked.answers else 0

    def unregister(address):
        asked.unregistered.append(address)

    def synchronize(device):
        asked.waited += 1

    monkeypatch.setattr(torch.cuda, "cudart", lambda: types.SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=unregister))
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    yield asked
    assert threads() == before


def test_what_is_taken_for_later_waits_to_be_touched_and_to_be_pinned(runtime, monkeypatch):
    """Memory touched while more is mapped: every mapping waited for page faults, 0.1 s of a prefill; registered too early, kernels waited."""
    touched, plain = threading.Semaphore(0), Pinner._touch
    monkeypatch.setattr(Pinner, "_touch", staticmethod(lambda *args: (plain(*args), touched.release())))
    pinner = Pinner(torch.device("cuda"))
    pairs = [pinner.take(SIZE, dtype=torch.uint8, later=True) for _ in range(12)]  # more than there are threads
    assert not touched.acquire(timeout=0.2)
    pinner.touch()
    for _ in pairs:
        assert touched.acquire(timeout=30)
    assert not runtime.registered and not any(ready.done() for _, ready in pairs)
    pinner.now()
    for tensor, ready in pairs:
        ready.result(30)
        assert (tensor.data_ptr(), SIZE) in runtime.registered
    late, ready = pinner.take(SIZE, dtype=torch.uint8, later=True)
    assert not touched.acquire(timeout=0.2)  # told once, for what there was
    pinner.now()  # needed at once: touched as well
    ready.result(30)
    pinner.close()
    assert sorted(runtime.unregistered) == sorted(tensor.data_ptr() for tensor, _ in [*pairs, (late, None)])


def test_what_is_needed_now_does_not_wait_for_later(runtime):
    """A block that leaves the window while an interrupted prefill's memory still waits: all threads are taken."""
    pinner = Pinner(torch.device("cuda"))
    held = [pinner.take(SIZE, dtype=torch.uint8, later=True) for _ in range(12)]
    tensor, ready = pinner.take(SIZE, dtype=torch.uint8)
    pinner.now()  # what whoever waits says first
    ready.result(30)
    assert (tensor.data_ptr(), SIZE) in runtime.registered and len(held) == 12
    pinner.close()


def test_closed_while_something_waits(runtime):
    """A cache given up before its first layer: a thread that waits for ever keeps the process from ending."""
    pinner = Pinner(torch.device("cuda"))
    for _ in range(12):
        pinner.take(SIZE, dtype=torch.uint8, later=True)
    pinner.close()
    assert {address for address, _ in runtime.registered} == set(runtime.unregistered)


def test_refused_once_is_refused_for_all(runtime):
    """A limit on locked memory: one warning, memory that works, and nothing to undo."""
    runtime.answers = [2]
    pinner = Pinner(torch.device("cuda"), otherwise="it will be slow")
    with pytest.warns(UserWarning, match=r"pinning 4 MiB of host memory failed \(CUDA error 2\); it will be slow"):
        taken = [pinner.take(SIZE, dtype=torch.uint8) for _ in range(3)]
        for tensor, ready in taken:
            ready.result(30)
            tensor.fill_(1)
    assert pinner.refused and len(runtime.registered) == 1
    pinner.close()
    assert not runtime.unregistered


def test_nothing_is_asked_of_a_cpu(runtime):
    pinner = Pinner(torch.device("cpu"))
    tensor, ready = pinner.take(3, 5, dtype=torch.float16)
    assert tensor.shape == (3, 5) and ready is None
    pinner.touch()
    pinner.close()
    assert not runtime.registered


class OnCard(torch.Tensor):
    device = torch.device("cuda", 0)


class Seen:
    """What PyTorch makes of the CUDA array interface: it holds the interface for as long as it lives."""

    def __init__(self, interface, device):
        self.interface = interface

    def view(self, *_):
        return self


@pytest.fixture
def table(runtime, monkeypatch):
    monkeypatch.setattr(torch, "as_tensor", Seen)
    return torch.arange(SIZE / 4).as_subclass(OnCard)


def test_a_tensor_on_the_host_gives_its_memory_back(runtime, table):
    seen = on_host(table, "")
    held = seen.interface.tensor
    assert torch.equal(held, torch.arange(SIZE / 4)) and runtime.registered == [(held.data_ptr(), SIZE)]
    assert not runtime.unregistered and not runtime.waited
    del held, seen
    assert runtime.unregistered == [runtime.registered[0][0]] and runtime.waited == 1  # what the device still reads must be read


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("fails", ["waiting", "copying", "the device"])
def test_memory_is_given_back_whatever_fails(runtime, table, monkeypatch, fails):
    """Memory still registered when it is freed breaks whoever registers those addresses next."""
    if fails == "the device":
        monkeypatch.setattr(torch.cuda, "synchronize", raising(RuntimeError("an illegal memory access was encountered")))
        seen = on_host(table, "")
        del seen
    elif fails == "copying":
        monkeypatch.setattr(torch.Tensor, "copy_", raising(RuntimeError("an illegal memory access was encountered")))
        with pytest.raises(RuntimeError):
            on_host(table, "")
    else:
        wait = pinned.Future.result
        monkeypatch.setattr(pinned.Future, "result", lambda self: (wait(self), threading.current_thread() is threading.main_thread() and raising(KeyboardInterrupt)()))
        with pytest.raises(KeyboardInterrupt):
            on_host(table, "")
    assert runtime.unregistered == [address for address, _ in runtime.registered] != []


def test_no_memory_for_a_tensor_on_the_host(runtime, table, monkeypatch):
    """Neither to pin nor at all: whoever asked keeps what he has."""
    runtime.answers = [2]
    with pytest.warns(UserWarning, match="CUDA error 2.*; it stays"):
        assert on_host(table, "it stays") is None
    monkeypatch.setattr(mmap, "mmap", raising(OSError(12, "Cannot allocate memory")))
    with pytest.warns(UserWarning, match="the host has no 4 MiB .*Cannot allocate memory.*; it stays"):
        assert on_host(table, "it stays") is None
    assert not runtime.unregistered
