# SPDX-License-Identifier: Apache-2.0
"""Questions about facts hidden in a long text, answered under a cache and, for the same questions, under the full cache.

    python evals/needles.py                                                  the embedded model at 2k and 8k tokens
    python evals/needles.py --lengths 8k,32k,128k --cache full,tailor:preset=ruler --haystack book.txt --seed 1 --json

A prefix holds `--facts` sentences `One of the special magic numbers for {key} is: {value}.`, each in a stretch of its own, so that
all depths are asked for, but clear of both ends, which every sparse method keeps. It is prefilled once for each cache. Then one
question after another is put to it: the cache is cropped back to the prefix, the question is prefilled, as a later turn would be,
and the answer decoded greedily. It is right if its digits are the value. Prefix, question and answer have the given length.

A question reads what was coded in quantised layers, in 16 bits: the result of prefilling prefix and question as one prompt, without
doing so for every question. `--coded-questions` reads the codes instead, as a later turn of a chat does. `--examples 1` ends the prefix with a question that
is answered already, about a fact of its own: the adapter's page asked its questions one after another, so that all but the first had one.

Answers are decoded as `generate.py` does it, on CUDA by a graph; one graph serves all questions on a prefix.

Eight facts a prefix, so 64 questions are eight prefixes with facts and haystack of their own: the embedded 128k model was trained
on 24 facts a sequence and scored on 8 (`assets/smollm2-128k`), and fewer than that would prefill the more often.

`right` counts all questions, `of_full` those that the full cache answers too: that is what a method can lose. `kl` is KL(full || cache)
in nats over the tokens of the true answer, decoded again with teacher forcing; a mean over questions, with its 95 % interval.
`tailor:topk=0` fetches nothing and attends to sink and recent tokens only: it shows that the questions cannot be answered from the window.
"""

import argparse
import random
import re
import sys
from pathlib import Path

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # the modules are a flat folder, not an installed package

from cache import KVCache
from evals import common
from generate import Sampler, Sampling, Stepper, _Parser, parse_tokens
from quant import QuantLayer
from tokenizer import Tokenizer

KEYS = (
    "anchor", "barrel", "basket", "beacon", "bridge", "candle", "canvas", "carpet", "castle", "cellar", "copper", "cradle", "dagger", "desert",
    "engine", "falcon", "feather", "forest", "garden", "hammer", "harbour", "helmet", "island", "kettle", "ladder", "lantern", "marble", "meadow",
    "mirror", "needle", "orchard", "oyster", "parrot", "pebble", "pepper", "pillow", "pocket", "ribbon", "saddle", "shovel", "silver", "spider",
    "temple", "thimble", "thunder", "ticket", "tunnel", "valley", "velvet", "violin", "wagon", "walnut", "window", "winter",
)  # fmt: skip
EDGE = 256  # tokens at both ends of a prefix that are free of facts: more than the sinks and windows of the presets


# ------------------------------------------------------------------------------------------------------------- the task


def build(tokenizer: Tokenizer, page: list[int], tokens: int, facts: int, rng: random.Random, examples: int = 0) -> tuple[list[int], list[tuple[str, str]]]:
    """A prefix of exactly `tokens` tokens and its `(key, value)` pairs. The haystack `page` is begun anywhere and repeated to fill it.

    `examples` more facts are hidden in it and asked, with their answers, at its end.

    Raises:
        ValueError: too short for the facts.
    """
    pairs = [(key, str(rng.randrange(10**6, 10**7))) for key in rng.sample(KEYS, facts + examples)]
    needles = [tokenizer.encode(f"\nOne of the special magic numbers for {key} is: {value}.\n", add_special_tokens=False) for key, value in pairs]
    shown = rng.sample(range(len(pairs)), examples)
    start, end = tokenizer.encode(""), tokenizer.encode("".join(f"{question(pairs[i][0])} {pairs[i][1]}." for i in shown), add_special_tokens=False)
    room = tokens - len(start) - len(end) - sum(map(len, needles))
    edge = min(EDGE, max(tokens, 0) // 8)
    if room < 2 * edge + len(pairs):
        raise ValueError(f"{tokens:,} tokens are too few for {facts} facts; raise --lengths or lower --facts")
    turn = rng.randrange(len(page))
    text = (page[turn:] + page * (room // len(page) + 1))[:room]
    stretch = (room - 2 * edge) // len(pairs)
    prefix, last = list(start), 0
    for i, needle in enumerate(needles):
        at = edge + i * stretch + rng.randrange(stretch)
        prefix += text[last:at] + needle
        last = at
    return prefix + text[last:] + end, [pair for i, pair in enumerate(pairs) if i not in shown]


def question(key: str) -> str:
    return f"\nWhat is the special magic number for {key} mentioned in the provided text? The special magic number for {key} mentioned in the provided text is"


def ask(tokenizer: Tokenizer, step: Stepper, key: str, value: str) -> tuple[str, Tensor]:
    """One question, put to the cache of `step`, which ends with it as it was before: the free answer, and the logits `[n, vocab]` that the true answer's tokens meet."""
    model, cache = step.model, step.cache
    prefix = cache.length
    asked = tokenizer.encode(question(key), add_special_tokens=False)
    truth = tokenizer.encode(f" {value}.", add_special_tokens=False)
    first = model.prefill(torch.tensor([asked]), cache)

    token = step.sampler(first)
    free = [int(token)]
    while len(free) < len(truth) and free[-1] not in tokenizer.stop_ids:  # as long as the truth with its full stop: one digit too many shows
        token = step(token)
        free.append(int(token))

    cache.crop(prefix + len(asked))
    forced = [first] + [model.decode(torch.tensor([[token]], device=model.device), cache) for token in truth[:-1]]
    cache.crop(prefix)
    return tokenizer.decode(free), torch.cat(forced).float().cpu()


def keep_exact(cache: KVCache) -> None:
    """From now on, let prefill calls after the first read of quantised layers what those were given then, and not the codes of it."""

    def keep(layer: QuantLayer) -> None:
        absorb, history = layer.absorb, layer.history
        given: list[Tensor] = []

        def absorb_and_keep(k: Tensor, v: Tensor, old: int, new: int) -> None:
            if old == 0:
                given[:] = [x[:, :, :new].clone() for x in (k, v)]
            absorb(k, v, old, new)

        def history_as_given(k: Tensor, v: Tensor, length: int) -> None:
            history(k, v, length)
            for x, held in zip((k, v), given):
                count = min(length, held.shape[2])
                x[:, :, :count] = held[:, :, :count]

        layer.absorb, layer.history = absorb_and_keep, history_as_given

    for layer in getattr(cache, "layers", ()):
        if isinstance(layer, QuantLayer):
            keep(layer)


def interrogate(subject: common.Subject, spec: str, prefix: list[int], pairs: list[tuple[str, str]], capacity: int, exact: bool) -> list[tuple[str, Tensor]]:
    """Every question on one prefill of the prefix; what `ask` gives for each."""
    with subject.cache(spec, capacity) as cache:
        if exact:
            keep_exact(cache)
        logits = subject.model.prefill(torch.tensor([prefix]), cache)
        step = Stepper(subject.model, cache, Sampler(Sampling(), torch.tensor([prefix], device=logits.device), logits.shape[-1]))
        return [ask(subject.tokenizer, step, *pair) for pair in pairs]


def is_right(answer: str, value: str) -> bool:
    found = re.match(r"\D*(\d+)", answer)
    return found is not None and found[1] == value


# ----------------------------------------------------------------------------------------------------------- the results


def summarise(spec: str, length: int, asked: list[dict]) -> dict:
    kl, interval = common.summary([one["kl"] for one in asked])
    full = [one for one in asked if one["full_right"]]
    return {
        "cache": spec, "length": length, "questions": len(asked), "full_right": len(full), "right": sum(one["right"] for one in asked),
        "of_full": sum(one["right"] for one in full), "kl": kl, "kl_interval": interval, "answers": asked,
    }  # fmt: skip


def table(rows: list[dict]) -> str:
    """Fixed-width text: a line a cache, for each length right of full's right, and KL."""
    lengths, width = sorted({row["length"] for row in rows}), max(len(row["cache"]) for row in rows)
    cells = {(row["cache"], row["length"]): f"{row['of_full']}/{row['full_right']}, {row['kl']:.4f}" for row in rows}
    lines = [f"{'right of those that full answers, KL':{width}}" + "".join(f"{length:>18,}" for length in lengths)]
    for spec in dict.fromkeys(row["cache"] for row in rows):
        lines.append(f"{spec:{width}}" + "".join(f"{cells[spec, length]:>18}" for length in lengths))
    questions, full = rows[0]["questions"], {row["length"]: row["full_right"] for row in rows}
    return "\n".join([*lines, f"full answers {', '.join(f'{full[length]}' for length in lengths)} of {questions}"])


# --------------------------------------------------------------------------------------------------------- command line


def parse_lengths(text: str) -> list[int]:
    return [parse_tokens(item) for item in text.split(",")]


def build_parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="needles.py", description=__doc__.split("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter, allow_abbrev=False)
    common.add_flags(parser, "smollm2-128k", "full,tailor:preset=longbench,tailor:preset=ruler,tailor:topk=0,sink=64,recent=128")
    add = parser.add_argument
    add("--lengths", type=parse_lengths, default="2k,8k", metavar="N,...", help="tokens, question and answer included: 2048, 32k, 128k")
    add("--questions", type=int, default=64, metavar="N", help="questions a length")
    add("--facts", type=int, default=8, metavar="N", help="facts, and questions, a prefix")
    add("--examples", type=int, default=0, metavar="N", help="answered questions that the prefix ends with, about facts of their own")
    add("--coded-questions", action="store_true", help="read quantised layers through their codes while a question is prefilled, as a later turn does")
    add("--haystack", type=Path, default=ROOT / "assets" / "paradise_lost.txt", metavar="FILE", help="UTF-8 text to hide the facts in")
    add("--seed", type=int, default=0, metavar="N", help="of keys, values and places")
    return parser


def run(args, specs: list[str]) -> tuple[dict, str]:
    """Returns the object and the table. Raises ValueError for bad input."""
    if args.facts < 1 or args.examples < 0 or args.facts + args.examples > len(KEYS):
        raise ValueError(f"--facts is {args.facts} and --examples {args.examples}; they must be at least 1 and 0, and {len(KEYS)} together at most")
    if args.questions < args.facts or args.questions % args.facts:
        raise ValueError(f"--questions is {args.questions}; it must be a multiple of --facts, {args.facts}")
    subject = common.Subject.load(args, specs)
    model, tokenizer = subject.model, subject.tokenizer
    page = tokenizer.encode(common.read_text(args.haystack), add_special_tokens=False)
    if not page:
        raise ValueError(f"{args.haystack} is empty")
    if (longest := max(args.lengths)) > model.config.max_position_embeddings:
        raise ValueError(f"{longest:,} tokens are more than the {model.config.max_position_embeddings:,} that the model was trained for; lower --lengths")

    asking = max(len(tokenizer.encode(f"{question(key)} 0000000.", add_special_tokens=False)) for key in KEYS)
    common.check_specs(specs, min(args.lengths) - asking)

    rows = []
    for length in args.lengths:
        asked: dict[str, list[dict]] = {spec: [] for spec in specs}
        for number in range(args.questions // args.facts):
            prefix, pairs = build(tokenizer, page, length - asking, args.facts, random.Random(f"{args.seed} {length} {number}"), args.examples)
            full = interrogate(subject, "full", prefix, pairs, length, not args.coded_questions)
            for spec in specs:
                found = full if spec == "full" else interrogate(subject, spec, prefix, pairs, length, not args.coded_questions)
                for (key, value), (answer, logits), (full_answer, reference) in zip(pairs, found, full):
                    one = {"prefix": number, "key": key, "value": value, "answer": answer, "right": is_right(answer, value)}
                    asked[spec].append(one | {"full_right": is_right(full_answer, value), "kl": common.kl_divergence(reference, logits).mean().item()})
                common.note("needles.py", f"{length:,} tokens, prefix {number}, {spec}: {sum(one['right'] for one in asked[spec][-len(pairs) :])} of {len(pairs)} right")
        rows += [summarise(spec, length, found) for spec, found in asked.items()]
    about = subject.facts(args) | {"haystack": str(args.haystack), "seed": args.seed, "facts": args.facts, "examples": args.examples, "coded_questions": args.coded_questions}
    return about | {"results": rows}, table(rows)


def main(argv: list[str] | None = None) -> int:
    """The command line. Returns the exit code: 0, 2 for bad input, 130 after Ctrl-C."""
    return common.command_line("needles.py", build_parser(), run, argv)


if __name__ == "__main__":
    sys.exit(main())
