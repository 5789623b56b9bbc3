# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C and kill at any moment: of a save, of a call, of the program.

`Interrupter` raises KeyboardInterrupt at a chosen one of the points where CPython runs signal handlers;
the tests with real signals show that these are the points that matter.
"""

import dis
import importlib
import json
import os
import random
import select
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections import defaultdict
from pathlib import Path

import pytest
import torch
from conftest import ROOT
from safetensors.torch import load_file, save_file
from tqdm import tqdm

import attention
import cache as cache_module
import generate as program
import offload
import pinned
import quant
import retrieval
from cache import FullCache, TailorCache, load_cache
from test_tailor import BEST, Driver, options, same, state, tiny, tokens

# ---------------------------------------------------------------------------------------- every point of a call, one by one

SOURCES = {module.__file__ for module in (attention, cache_module, offload, pinned, quant, retrieval)}
CHECKS = ("CALL", "RESUME", "JUMP_BACKWARD")  # after these instructions CPython looks for signals, and nowhere else


class Interrupter:
    """A trace function that raises KeyboardInterrupt at point number `at` (None: nowhere), counting and noting the points."""

    def __init__(self, at: int | None = None):
        self.at, self.points, self._last = at, [], {}

    def __call__(self, frame, event, argument):
        if frame.f_code.co_filename not in SOURCES:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._inside

    def _inside(self, frame, event, argument):
        if event == "return":
            self._last.pop(frame, None)
        elif event == "opcode":
            code, last = frame.f_code, self._last.get(frame)
            self._last[frame] = frame.f_lasti
            if last is not None and dis.opname[code.co_code[last]].startswith(CHECKS):
                self.points.append((Path(code.co_filename).name, code.co_name, frame.f_lineno, frame.f_lasti))
                if len(self.points) == self.at:
                    raise KeyboardInterrupt
        return self._inside

    def run(self, call) -> bool:
        """Run `call`; True if it was interrupted."""
        before = sys.gettrace()
        sys.settrace(self)
        try:
            call()
        except KeyboardInterrupt:
            return True
        finally:
            sys.settrace(before)
            self._last.clear()
        return False


DRIVER = Driver(KV=1, D=8)
AGES = 311  # the decode step after so many tokens moves a block in every layer
KINDS = {"full": None, "()": ((), {}), "(0,)": ((0,), {}), "(0, 2)": ((0, 2), {}), "best (0,)": ((0,), BEST)}  # plan and options


def make(kind: str, config=DRIVER.config, **values):
    if kind == "full":
        return FullCache(config)
    plan, more = KINDS[kind]
    return TailorCache(config, plan, options(**values, **more))


def do(cache, step):
    """One step of a scenario: `("prefill", T)`, `("decode",)`, or a method of the cache with its arguments."""
    name, *arguments = step
    if name == "prefill":
        return DRIVER.call(cache, *arguments, chunk=40)
    if name == "decode":
        return DRIVER.call(cache, 1, decode=True)
    getattr(cache, name)(*arguments)


MOST = 40  # places a test; TAILORKV_EVERY_POINT=1 in the environment takes all, which is eight minutes


def sampled(points: list[tuple], seed: int) -> list[int]:
    """For every place in the source, or `MOST` of them, one of the points, counted from 1, at which it is reached."""
    reached = defaultdict(list)
    for number, point in enumerate(points, 1):
        reached[point].append(number)
    rng = random.Random(seed)
    chosen = [rng.choice(numbers) for numbers in reached.values()]
    return sorted(chosen if os.environ.get("TAILORKV_EVERY_POINT") else rng.sample(chosen, min(MOST, len(chosen))))


THEN = [("prefill", 3), ("decode",)]  # what follows shows what an interrupt left behind


class Undisturbed:
    """What a cache of this kind holds and returns before, in and after a step that nothing interrupts."""

    def __init__(self, kind: str, before: list, step):
        self.kind, self.steps, self.step = kind, before, step
        with self.prepared() as cache:
            self.before, self.start = state(cache), cache.length
            self.out = do(cache, step)
            self.after, self.stop = state(cache), cache.length
            self.later = [do(cache, one) for one in THEN]
            self.end = state(cache)

    def prepared(self):
        cache = make(self.kind, residual=120)
        for one in self.steps:
            do(cache, one)
        return cache

    def points(self) -> list[tuple]:
        with self.prepared() as cache:
            tracer = Interrupter()
            tracer.run(lambda: do(cache, self.step))
            return tracer.points

    def check(self, cache) -> None:
        """`cache`, whose step was interrupted: the step has not happened, or it has; then all goes on as if nothing had been."""
        cache.nbytes()  # the program reports it after an interrupt, whatever was half made
        happened = cache.length == self.stop != self.start
        # A load that is given up may have lost what was there before.
        assert happened or cache.length == self.start or (cache.length == 0 and self.step[0] == "load"), f"length {cache.length}"
        if not happened:
            out = do(cache, self.step)
            assert out is None or torch.equal(out, self.out), "outputs differ"
        if not happened or self.out is not None:  # a crop that has happened may still leave its last lines to the next call
            same(state(cache), self.after)
        for one, expected in zip(THEN, self.later):
            assert torch.equal(do(cache, one), expected), f"{one} differs"
        same(state(cache), self.end)


def interrupt_everywhere(undisturbed: Undisturbed, seed: int = 0, between=lambda cache, undisturbed, rng: None) -> None:
    """Interrupt the step at every place; `between` does something to the cache before the step is repeated and compared."""
    points, failures = undisturbed.points(), []
    assert points
    for at in sampled(points, seed):
        with undisturbed.prepared() as cache:
            tracer = Interrupter(at)
            assert tracer.run(lambda: do(cache, undisturbed.step)), "the run that counted the points took another path"
            try:
                between(cache, undisturbed, random.Random(at))
                undisturbed.check(cache)
            except Exception as error:
                line = traceback.extract_tb(error.__traceback__)[-1].lineno
                failures.append(f"interrupted in {tracer.points[-1]}: {type(error).__name__} {error} (line {line})")
    assert not failures, "\n".join([f"{len(failures)} places", *failures[:20]])


CALLS = {
    "a prompt": ([], ("prefill", 200)),
    "a turn that outgrows dense_below": ([("prefill", 60)], ("prefill", 130)),
    "a step that outgrows dense_below": ([("prefill", 104)], ("decode",)),
    "a first step, with a block that ages": ([("prefill", AGES)], ("decode",)),
    "a later step, with a block that ages": ([("prefill", AGES - 1), ("decode",)], ("decode",)),
    "a later turn": ([("prefill", AGES), ("decode",)], ("prefill", 75)),
    "a step below dense_below": ([("prefill", 20)], ("decode",)),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("kind", ["full", "(0,)", "best (0,)"])
def test_every_point_of_a_call(kind, call):
    """A buffer made but not yet known, a commit torn in two, a window half overwritten: places no random moment hits twice."""
    interrupt_everywhere(Undisturbed(kind, *CALLS[call]))


@pytest.mark.parametrize("call", ["a turn that outgrows dense_below", "a first step, with a block that ages", "a later turn"])
@pytest.mark.parametrize("kind", ["()", "(0, 2)"])
def test_every_point_of_a_call_and_then_of_its_undoing(kind, call):
    """A second Ctrl-C, while the first one's traces are removed: undoing must itself be undone or completed."""

    def again(cache, undisturbed, rng):
        if cache.length == undisturbed.start:
            Interrupter(rng.randint(1, 150)).run(lambda: do(cache, undisturbed.step))

    interrupt_everywhere(Undisturbed(kind, *CALLS[call]), 1, again)


@pytest.mark.parametrize("call", ["a turn that outgrows dense_below", "a first step, with a block that ages", "a later turn"])
def test_every_point_of_a_call_and_then_something_else(call, tmp_path):
    """After Ctrl-C the user does not repeat the call: the cache is cropped or saved, and must be what it was before the call."""

    def other(cache, undisturbed, rng):
        if cache.length == undisturbed.start:
            if rng.random() < 0.5:
                cache.crop(cache.length)
                same(state(cache), undisturbed.before)
            else:
                cache.save(tmp_path / "c")
                with load_cache(tmp_path / "c", DRIVER.config)[0] as loaded:
                    same(state(loaded), undisturbed.before)

    interrupt_everywhere(Undisturbed("(0, 2)", *CALLS[call]), 2, other)


CROPS = {
    "within a window's reach": ([("prefill", 500), ("decode",)], ("crop", 300)),
    "into 16 bits": ([("prefill", 300), ("decode",)], ("crop", 90)),
    "in 16 bits": ([("prefill", 80), ("decode",)], ("crop", 50)),
}


@pytest.mark.parametrize("crop", CROPS)
@pytest.mark.parametrize("kind", ["full", "(0, 2)", "best (0,)"])
def test_every_point_of_a_crop(kind, crop):
    """A crop that is given up half-way: some layers at the old length, some at the new, or the position at neither."""
    def given_up(cache, undisturbed, rng):
        if cache.length == undisturbed.start and rng.random() < 0.5:
            same(state(cache), undisturbed.before)

    interrupt_everywhere(Undisturbed(kind, *CROPS[crop]), 3, given_up)


def test_an_interrupted_crop_and_then_another():
    """The user of a crop that was given up wants another length: the window for it must not be gone."""

    def another(cache, undisturbed, rng):
        if cache.length == undisturbed.start:
            n = rng.randint(430, cache.length)
            cache.crop(n)
            with undisturbed.prepared() as twin:
                twin.crop(n)
                same(state(cache), state(twin))
            while cache.length < undisturbed.start:
                do(cache, ("decode",))

    interrupt_everywhere(Undisturbed("()", *CROPS["within a window's reach"]), 4, another)


@pytest.mark.parametrize("length", [70, 300])
@pytest.mark.parametrize("kind", ["full", "(0,)"])
def test_every_point_of_a_load_and_of_a_close(kind, length, tmp_path):
    """Half a document under the name of a whole one, or a cache that can neither be used nor closed."""
    with make(kind, residual=120) as cache:
        do(cache, ("prefill", length))
        cache.save(tmp_path / "c")

    def usable(cache, undisturbed, rng):
        if cache.length == 0:
            with make(kind, residual=120) as fresh:
                assert torch.equal(do(cache, ("prefill", 150)), do(fresh, ("prefill", 150)))
                same(state(cache), state(fresh))
            cache.close()

    for before in ([], [("prefill", AGES), ("decode",)]):
        for step in (("load", tmp_path / "c"), ("close",)):
            interrupt_everywhere(Undisturbed(kind, before, step), 5, usable if step[0] == "load" else lambda *_: None)


def test_every_point_of_a_save(tmp_path):
    """Ctrl-C right after the temporary is made, or while it is removed, leaves a hidden gigabyte behind."""
    path = tmp_path / "c"
    with make("(0,)") as cache:
        do(cache, ("prefill", 150))
        cache.save(path)
        before, counter = path.read_bytes(), Interrupter()
        counter.run(lambda: cache.save(path, {"ids": torch.arange(9)}, {"note": "new"}))
        after = path.read_bytes()
        assert "_discard" in {point[1] for point in counter.points} and before != after
        for at in sampled(counter.points, 7):
            path.write_bytes(before)
            tracer = Interrupter(at)
            assert tracer.run(lambda: cache.save(path, {"ids": torch.arange(9)}, {"note": "new"}))
            assert os.listdir(tmp_path) == ["c"] and path.read_bytes() in (before, after), tracer.points[-1]


def test_an_interrupted_call_changes_the_epoch():
    """The one buffer that moves does, Ctrl-C comes before the epoch says so, and a captured graph is replayed into freed memory."""
    driver = Driver(L=1, KV=1, D=8)

    def prepared():
        cache = TailorCache(driver.config, (0,), options())
        driver.call(cache, 320)
        return cache, cache.epoch

    counter, (cache, epoch) = Interrupter(), prepared()
    counter.run(lambda: driver.call(cache, 1, decode=True))
    assert cache.epoch == epoch + 1
    for at in sampled(counter.points, 6):
        cache, epoch = prepared()
        assert Interrupter(at).run(lambda: driver.call(cache, 1, decode=True))
        if cache.length == 320:
            driver.call(cache, 1, decode=True)
        assert cache.epoch > epoch


# ------------------------------------------------------------------------------------------------- random moments of calls

# What becomes of a KeyboardInterrupt, about once in a thousand, inside CPython's Condition (which is Python code) and PyTorch's C++.
FOREIGN = ("release unlocked lock", "cannot release un-acquired lock", "object type 'torch.storage.UntypedStorage'")


@pytest.fixture
def alarm():
    """`alarm(seconds, call) -> (result or None, interrupted)`: a real signal that comes so many seconds after the call began."""

    def interrupted(seconds, call):
        try:
            try:
                signal.setitimer(signal.ITIMER_REAL, seconds)
                return call(), False
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
        except (KeyboardInterrupt, RuntimeError) as error:
            signal.setitimer(signal.ITIMER_REAL, 0)
            if isinstance(error, RuntimeError) and not str(error).endswith(FOREIGN):
                raise
            return None, True

    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    yield interrupted
    signal.signal(signal.SIGALRM, before)
    torch.set_grad_enabled(True)  # an interrupt inside no_grad() may leave it off


STEPS = [(90, False), *[(1, True)] * 17, (69, False), *[(1, True)] * 10, (122, False), *[(1, True)] * 8]  # over 104, over blocks' edges


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # a Ctrl-C inside a weakref's callback is lost
@pytest.mark.parametrize("kind", KINDS)
def test_random_moments_of_prefill_and_decode(kind, alarm):
    """Real signals, some inside PyTorch and waits for the thread: each call can be repeated, to the same logits and bytes."""
    model, ids, rng, hits = tiny(G=1, D=16), tokens(330), random.Random(kind), 0
    with make(kind, model.config) as cache, make(kind, model.config) as twin:
        for T, decode in STEPS:
            start = cache.length
            part = ids[:, start : start + T]
            call = lambda cache: (model.decode if decode else model.prefill)(part, cache)  # noqa: E731
            began = time.perf_counter()
            expected = call(twin)
            took = time.perf_counter() - began
            got, hit = alarm(rng.uniform(1e-6, 1.2 * took), lambda: call(cache))
            hits += hit
            if cache.length == start:
                if rng.random() < 0.3:
                    cache.crop(start)
                got = call(cache)
            assert cache.length == start + T
            assert got is None or torch.equal(got, expected)  # None: the call was committed, and its logits were lost
            same(state(cache), state(twin))
    assert hits >= 10  # of about 25; 50 in all


# -------------------------------------------------------------------------------------------------- random kills of a save


def apart(function: str, *arguments) -> dict:
    """Call a function of this file in a process of its own, which may fork: it has no threads. Returns what it returns."""
    code = f"import json, sys, test_signals; print(json.dumps(test_signals.{function}(*json.loads(sys.argv[1]))))"
    env = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code, json.dumps(arguments)], capture_output=True, text=True, env=env, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def kill(number: int, moment: float, job) -> tuple[str, int]:
    """Fork a child that does `job(began)` and send it a signal `moment` seconds after it called `began` (below 0: about when it is
    forked), or when it is done.

    Returns what it got to, of "s" (began), "d" (done) and "i" (KeyboardInterrupt), and its exit code, negative for a signal.
    """
    reader, writer = os.pipe()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.close(reader)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
            time.sleep(0.002)
            code = job(lambda: os.write(writer, b"s"))
            os.write(writer, b"d")
            time.sleep(60)  # for the signal that comes after
        except KeyboardInterrupt:
            os.write(writer, b"i")
        finally:
            os._exit(code)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    os.close(writer)
    got = os.read(reader, 1) if moment >= 0 else b""
    select.select([reader], [], [], moment) if moment >= 0 else time.sleep(-moment)
    os.kill(pid, number)
    while part := os.read(reader, 9):
        got += part
    os.close(reader)
    return got.decode(), os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def kill_saves(folder: str, times: int, seed: int) -> list[dict]:
    """Kill `times` saves over an existing file at random moments, SIGINT and SIGKILL in turn."""
    torch.set_num_threads(1)
    driver, target, rng = Driver(n=900, D=64), Path(folder) / "c", random.Random(seed)
    caches = [TailorCache(driver.config, (0,), options()) for _ in range(2)]
    extras, contents = [{"ids": torch.arange(500_000) + i} for i in range(2)], []
    for cache, extra, n in zip(caches, extras, (700, 900)):
        driver.call(cache, n)
        cache.save(target, extra)
        contents.append(target.read_bytes())
    held, took, outcomes = 1, 0.0, []
    for _ in range(3):

        def timed(began):
            start = time.perf_counter()
            began()
            caches[1].save(target, extras[1])
            (Path(folder) / "took").write_text(str(time.perf_counter() - start))
            return 0

        assert kill(signal.SIGKILL, 60.0, timed)[0] == "sd"
        took = max(took, float((Path(folder) / "took").read_text()))
    for i in range(times):
        number = (signal.SIGINT, signal.SIGKILL)[i % 2]
        moment = rng.uniform(-0.2, 1.3) * took
        new = 1 - held
        got, _ = kill(number, max(moment, -0.003), lambda began: began() and caches[new].save(target, extras[new]) or 0)
        if moment > 0:  # a busy machine makes a save take longer or shorter than it did: keep about a third of the moments behind its end
            took *= 0.9 if "d" in got else 1.05
        content = target.read_bytes()
        loaded, extra, _ = load_cache(target, driver.config)
        outcome = {"signal": number.name, "got": got, "content": "old" if content == contents[held] else "new" if content == contents[new] else "torn"}
        outcome |= {"loads": loaded.length == (700, 900)[int(extra["ids"][0])], "temporaries": len(list(Path(folder).glob(".*")))}
        loaded.close()
        if outcome["content"] == "new":
            held = new
        if outcome["temporaries"]:
            caches[held].save(target, extras[held])
            outcome["left"] = len(list(Path(folder).glob(".*")))
        outcomes.append(outcome)
    return outcomes


def test_random_kills_of_a_save(tmp_path):
    """A document's prefill is hours of work: under its name stands the old file or the new one, whole, whatever ended the save."""
    outcomes = apart("kill_saves", str(tmp_path), 100, 0)
    stages = {stage: [outcome for outcome in outcomes if outcome["got"] in gots] for stage, gots in {"before": ("", "i"), "during": ("s", "si"), "after": ("sd", "sdi")}.items()}
    assert sum(map(len, stages.values())) == len(outcomes) == 100
    assert all(outcome["content"] != "torn" and outcome["loads"] for outcome in outcomes)
    assert {outcome["content"] for outcome in stages["before"]} == {"old"} and {outcome["content"] for outcome in stages["after"]} == {"new"}
    assert len(stages["before"]) >= 3 and len(stages["during"]) >= 20 and len(stages["after"]) >= 3
    # A Ctrl-C takes its temporary along; what a kill leaves, the next save removes.
    assert all(outcome.get("left", 0) == 0 for outcome in outcomes)
    left = {name: [outcome for outcome in outcomes if outcome["temporaries"] and outcome["signal"] == name] for name in ("SIGINT", "SIGKILL")}
    assert not left["SIGINT"] and len(left["SIGKILL"]) >= 5


# ----------------------------------------------------------------------------------------------------------- the program


@pytest.fixture(scope="module")
def endless(tiny_chat, tmp_path_factory):
    """A checkpoint whose greedy answers never stop: the logits of its special tokens are 0, which is never the largest."""
    folder = tmp_path_factory.mktemp("endless") / "tiny"
    folder.mkdir()
    for file in tiny_chat.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"][:3] = 0
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


PROMPT = "Of Man's first disobedience, and the fruit of that forbidden tree whose mortal taste brought death into the world"
SPARSE = ["--cache", "tailor:preset=longbench,topk=8", "--device", "cpu"]  # beyond 72 tokens


def flags(checkpoint, *more) -> list[str]:
    return ["--ckpt", str(checkpoint), "--prompt", PROMPT, *SPARSE, *map(str, more)]


def interrupt_programs(folder: str, argv: list[str], times: int, seed: int) -> list[dict]:
    """Run generate.py's main in forks, plainly and with --json in turn, and send SIGINT at random moments after a mark; the first four go undisturbed."""
    torch.set_num_threads(1)
    rng, out, err, results = random.Random(seed), Path(folder) / "out", Path(folder) / "err", []
    program.main(argv)  # whatever is imported at first use: interrupting that is testing other people's packages
    # Half of the moments count from the beginning, half from the first token on: a busy machine makes loading long, and would leave few for the answer.
    marks, took = {"run": program.run, "Sampler": program.Sampler}, {"run": 100.0, "Sampler": 100.0}

    def job(began):
        for path, stream in ((out, sys.stdout), (err, sys.stderr)):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), stream.fileno())
        code, start = 1, time.perf_counter()

        def reached(*given):
            nonlocal start
            start = time.perf_counter()
            return began() and marks[mark](*given)

        setattr(program, mark, reached)
        tqdm.set_lock(threading.RLock())  # its own is shared by all forks: one that is interrupted and exits with it would stop those that follow
        try:
            code = program.main(argv + ["--json"] * (i % 2))
        except BaseException:
            traceback.print_exc()
        finally:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            sys.stdout.flush()
            sys.stderr.flush()
            (Path(folder) / "done").write_text(f"{code} {time.perf_counter() - start}")
            os._exit(0)

    for i in range(-4, times):
        mark = ("run", "Sampler")[i // 2 % 2]
        (Path(folder) / "done").unlink(missing_ok=True)
        if kill(signal.SIGINT, rng.uniform(0, 1.1) * took[mark] if i >= 0 else 100.0, job)[0] == "si":
            continue  # after main
        code, seconds = (Path(folder) / "done").read_text().split()
        if i < 0:
            took[mark] = min(took[mark], float(seconds))
        results.append({"json": i % 2 == 1, "code": int(code), "out": out.read_text("utf-8"), "err": err.read_text("utf-8")})
    return results


def test_random_moments_of_the_program(endless, tmp_path):
    """Ctrl-C while loading, prefilling, decoding, reporting: never a traceback, and the text so far is that of the whole answer."""
    results = apart("interrupt_programs", str(tmp_path), flags(endless, "--max-new-tokens", 25), 60, 0)
    (whole, _), *results = results[0]["out"].rsplit("\n", 1), *results[1:]
    whole_json, *results = results
    assert whole_json["code"] == 0
    whole_json, answered = json.loads(whole_json["out"]), 0
    assert whole_json["stop_reason"] == "length" and whole == whole_json["text"]
    for result in results:
        if result["code"] and FOREIGN[-1] in result["err"]:  # no word of the interrupt: nothing tells it from a bug
            continue
        assert result["code"] in (0, 130) and "Traceback" not in result["err"], result
        if result["json"] and result["out"]:
            got = json.loads(result["out"])
            assert (got["stop_reason"] == "interrupt" or got["new_tokens"] == 25) and set(got) == set(whole_json), result
            assert whole.startswith(got["text"].rstrip("\ufffd")), result
            answered += got["new_tokens"] < 25
        elif not result["json"]:
            assert whole.startswith(result["out"].removesuffix("\n")), result
            assert result["code"] == 0 or "; interrupt" in result["err"] or "KV" not in result["err"] or "25 new tokens" in result["err"], result
            answered += "; interrupt" in result["err"]
    assert answered >= 5 and sum(result["out"] == "" for result in results) >= 3


def start(*arguments) -> subprocess.Popen:
    """generate.py as a shell would start it in the foreground: with SIGINT not ignored, whatever runs the tests."""
    command = [sys.executable, str(ROOT / "generate.py"), *map(str, arguments)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "encoding": "utf-8"}
    return subprocess.Popen(command, **pipes, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL), env=os.environ | {"OMP_NUM_THREADS": "1"})


def test_real_processes_end_with_130(endless, tmp_path):
    """What the shell sees: exit code 130, the text so far, the summary; with --json one object; while loading, nothing at all."""
    answer = flags(endless, "--max-new-tokens", 50_000, "--ctx", "100k")
    prefilled, deadline = tmp_path / "c", time.monotonic() + 120
    plain, as_json, loading = start(*answer), start(*answer, "--json", "--save-cache", prefilled), start(*answer)
    try:
        assert "--ctx" in loading.stderr.readline()  # a warning, and then the tokenizer and the weights are read
        loading.send_signal(signal.SIGINT)
        first = plain.stdout.read(20)
        plain.send_signal(signal.SIGINT)
        while not prefilled.exists() and time.monotonic() < deadline:  # it prints nothing before it ends
            time.sleep(0.02)
        time.sleep(0.2)
        as_json.send_signal(signal.SIGINT)
        outputs = [child.communicate(timeout=60) for child in (plain, as_json, loading)]
    finally:
        for child in (plain, as_json, loading):
            child.kill()
    assert [child.returncode for child in (plain, as_json, loading)] == [130, 130, 130]
    (out, err), (json_out, json_err), quiet = outputs
    assert out.endswith("\n") and "; interrupt\n" in err and "first token after" in err and "Traceback" not in err + json_err
    got = json.loads(json_out)
    both = min(len(first), len(text := got["text"].rstrip("\ufffd")))
    assert got["stop_reason"] == "interrupt" and text[:both] == first[:both] and quiet == ("", "")


@pytest.mark.parametrize("program", ["generate", "bench", "calibrate", "evals.fidelity", "evals.needles", "evals.findings", "evals.ingredients"])
def test_ctrl_c_that_comes_out_as_another_error(monkeypatch, capsys, program):
    """Inside a package an interrupt can end as the package's own error: still 130, and no traceback. An error of ours stays one."""
    module = importlib.import_module(program)

    def interrupted(*arguments):
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt:
            raise RuntimeError("mode stack is empty")

    monkeypatch.setattr(module, "run", interrupted)
    assert module.main([]) == 130 and not capsys.readouterr().err

    def broken(*arguments):
        raise RuntimeError("mode stack is empty")

    monkeypatch.setattr(module, "run", broken)
    with pytest.raises(RuntimeError, match="mode stack"):
        module.main([])
