# SPDX-License-Identifier: Apache-2.0
"""Memory of the host that a GPU reads and writes in place.

* `Pinner`: pins memory ahead of need, in threads of its own; where K and V go.
* `alias`: pinned memory as a tensor of the CUDA device.
* `on_host`: a tensor of the CUDA device that lies in the host's memory: a weight of which little is read at a time.
"""

import contextlib
import math
import mmap
import threading
import warnings
import weakref
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue
from typing import Callable

import torch
from torch import Tensor


class _Gate:
    """An event. `threading.Event` is Python code: Ctrl-C inside it can leave its lock taken, and whoever waits then waits for ever."""

    def __init__(self):
        self._queue = SimpleQueue()

    def open(self) -> None:
        self._queue.put(None)

    def wait(self) -> None:
        self._queue.put(self._queue.get())  # for the next one who waits


class Pinner:
    """Pins host memory ahead of need, in threads of its own.

    Memory is plain and then registered with CUDA: PyTorch's own pinned allocator rounds up to powers of two, up to twice
    the bytes. Registering untouched pages takes 0.4 s a GiB, one thread at a time, and no kernel can be launched meanwhile:
    the driver holds a lock while the kernel finds and clears the pages. So they are touched first, in parallel, and are
    huge pages where the system has them; registering is then 0.03 s a GiB (one H200, 16 cores). It still keeps kernels from
    being launched. At the start of a prefill, when the GPU has nothing queued, it would wait for that, so what a prefill
    will need is registered only once somebody asks for the first of it: the GPU then has a layer's work before it. Where
    registering fails (limits on locked memory, some virtual machines) the memory stays pageable and works, slower, after
    one warning. That happens in a thread of its own for another reason, too: CUDA reports a failure once more at the same
    thread's next launch.
    """

    def __init__(self, device: torch.device, threads: int = 8, otherwise: str = "transfers will be slower"):
        """`otherwise`: what the warning says of memory that stays pageable."""
        self.device, self.active, self.otherwise = device, device.type == "cuda", otherwise
        self._touching = ThreadPoolExecutor(threads, "tailorkv-touch") if self.active else None
        self._pinning = ThreadPoolExecutor(1, "tailorkv-pin") if self.active else None
        self._may_touch, self._may_pin = _Gate(), _Gate()  # what was taken for later
        self._registered: dict[int, Tensor] = {}  # address -> the tensor, kept alive while CUDA knows its pages
        self._lock = threading.Lock()
        self.refused = False  # memory stays pageable

    def take(self, *shape: int, dtype: torch.dtype, later: bool = False) -> tuple[Tensor, Future | None]:
        """An uninitialised host tensor, and a future that is done when it is pinned (None: nothing to wait for).

        later: not pinned before the next `now`, not touched before the next `touch`.
        """
        size = math.prod(shape) * dtype.itemsize
        if not self.active or size == 0:
            return torch.empty(*shape, dtype=dtype), None
        pages = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # the tensor below keeps it mapped
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # a kernel without huge pages
                pages.madvise(mmap.MADV_HUGEPAGE)
        tensor = torch.frombuffer(pages, dtype=dtype).view(*shape)
        touched = self._touching.submit(self._touch, tensor, self._may_touch if later else None)
        return tensor, self._pinning.submit(self._pin, tensor, touched, self._may_pin if later else None)

    def touch(self) -> None:
        """Begin to touch what was taken for later, once all of it is: a mapping would wait for the page faults of those before it."""
        self._may_touch.open()  # first: an interrupt behind it costs nothing
        self._may_touch = _Gate()

    def now(self) -> None:
        """Whatever was taken for later is needed now."""
        self.touch()
        self._may_pin.open()
        self._may_pin = _Gate()

    @staticmethod
    def _touch(tensor: Tensor, gate: _Gate | None) -> None:
        if gate is not None:
            gate.wait()
        tensor.view(-1).view(torch.uint8)[:: mmap.PAGESIZE].fill_(0)

    def _pin(self, tensor: Tensor, touched: Future, gate: _Gate | None) -> None:
        touched.result()
        if gate is not None:
            gate.wait()
        if self.refused:  # one failure tends to mean that all fail, and asking again can hurt the driver
            return
        with torch.cuda.device(self.device):  # a new thread starts on the first card and would take memory there
            code = int(torch.cuda.cudart().cudaHostRegister(tensor.data_ptr(), tensor.nbytes, 0))
        if code == 0:
            with self._lock:
                self._registered[tensor.data_ptr()] = tensor
        else:
            self.refused = True
            warnings.warn(f"pinning {tensor.nbytes / 2**20:.0f} MiB of host memory failed (CUDA error {code}); {self.otherwise}", stacklevel=2)

    def release(self, tensor: Tensor) -> None:
        """Unregister; must precede the end of the tensor's memory, and no copy from or to it may be under way."""
        with self._lock:
            known = self._registered.pop(tensor.data_ptr(), None)
        if known is not None:
            torch.cuda.cudart().cudaHostUnregister(known.data_ptr())

    def stop(self) -> None:
        """End the threads; what is pinned stays so."""
        self.now()
        if self.active:
            self._pinning.shutdown(wait=True, cancel_futures=True)
            self._touching.shutdown(wait=True, cancel_futures=True)

    def close(self) -> None:
        self.stop()
        for tensor in list(self._registered.values()):
            self.release(tensor)


class _Interface:
    """Shows memory to PyTorch through the CUDA array interface, and keeps it alive while PyTorch holds it."""

    def __init__(self, tensor: Tensor):
        self.tensor = tensor
        self.__cuda_array_interface__ = {"shape": (tensor.nbytes,), "typestr": "|u1", "data": (tensor.data_ptr(), False), "version": 3}


def alias(tensor: Tensor, device: torch.device, end: Callable[[], None] | None = None) -> Tensor:
    """Pinned host memory as a tensor of the CUDA device; on a CPU, and where there is nothing to show, the tensor itself.

    end: what to do once the last such tensor of the CUDA device is gone, while the memory is still there.
    """
    if device.type != "cuda" or tensor.numel() == 0:
        return tensor.to(device)
    interface = _Interface(tensor)
    if end is not None:
        weakref.finalize(interface, end).atexit = False  # a process that ends gives everything back anyway
    return torch.as_tensor(interface, device=device).view(tensor.dtype).view(tensor.shape)


def on_host(tensor: Tensor, otherwise: str) -> Tensor | None:
    """A copy of a tensor of a CUDA device in pinned host memory, which the device reads in place.

    Returns None where there is no memory that can be pinned, after a warning that says what happens `otherwise`.
    """
    device = tensor.device
    pinner = Pinner(device, 1, otherwise)

    def end() -> None:  # must not know `tensor`, which would live as long
        try:
            torch.cuda.synchronize(device)
        finally:
            pinner.close()

    try:
        copy, pinned = pinner.take(*tensor.shape, dtype=tensor.dtype)
        pinned.result()
        pinner.stop()
        if not pinner.refused:
            return alias(copy.copy_(tensor), device, end)
    except OSError as error:  # not even that much memory
        warnings.warn(f"the host has no {tensor.nbytes / 2**20:.0f} MiB ({error}); {otherwise}", stacklevel=2)
    except BaseException:
        pinner.close()
        raise
    pinner.close()
    return None
