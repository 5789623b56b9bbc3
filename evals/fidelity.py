# SPDX-License-Identifier: Apache-2.0
"""How far a cache's next-token distributions are from the full cache's, on real text.

    python evals/fidelity.py --ckpt smollm2 --cache full,tailor:preset=longbench,tailor:preset=ruler
    python evals/fidelity.py --ckpt PATH_OR_HUB_ID --text book.txt --prompt-tokens 32k --texts 20 --json

Each of the texts is cut from the files at fixed offsets. Its first tokens are prefilled; then the true next tokens are decoded one
at a time (teacher forcing), so that every cache sees the same past. The prediction after the prompt is left out: prefill is exact.

* `kl`: KL(full || cache) in nats, over the whole vocabulary, in float64; a mean over steps.
* `top1`: the share of steps at which both would choose the same token.
* `ppl_ratio`: the cache's perplexity of the true tokens over the full cache's.
* `recall`: for each layer the share of exact attention, under the query that the method arrived at, that falls on the tokens it
  attended (sink, fetched and window); a mean over heads and steps. None for a layer that attends all tokens through codes, and
  for a cache that does not say what it attends.
* `fetched`: tokens fetched for a KV head and step, a mean over sparse layers, heads and steps.

Each is a mean over texts, with the 95 % interval of that mean by Student's t.
"""

import argparse
import statistics
import sys
from pathlib import Path

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # the modules are a flat folder, not an installed package

from evals import common
from generate import _Parser, parse_tokens
from tokenizer import Tokenizer

TEXTS = [ROOT / "assets" / name for name in ("paradise_lost.txt", "hamlet.txt", "areopagitica.txt")]  # verse, a play, prose


def cut(tokenizer: Tokenizer, files: list[Path], count: int, size: int) -> list[tuple[str, list[int]]]:
    """`count` pieces of `size` tokens, as evenly from the files and as evenly over each as can be: `(name, ids)`. Raises ValueError."""
    start, pieces = tokenizer.encode(""), []  # what the checkpoint puts before any text
    for number, file in enumerate(files):
        share = count // len(files) + (number < count % len(files))
        ids, room = tokenizer.encode(common.read_text(file), add_special_tokens=False), size - len(start)
        if len(ids) < share * room:
            raise ValueError(f"{file} has {len(ids):,} tokens and {share} texts of {size:,} are to be cut from it; lower --texts or --prompt-tokens, or give more --text files")
        for i in range(share):
            offset = i * (len(ids) - room) // max(1, share - 1)
            pieces.append((f"{Path(file).name}@{offset}", start + ids[offset : offset + room]))
    return pieces


def forced(subject: common.Subject, spec: str, ids: list[int], prompt: int) -> tuple[Tensor, dict]:
    """Logits `[steps, vocab]` on the CPU after each decoded token, and what was seen meanwhile: each layer's `recall`, and what was `fetched`."""
    model = subject.model
    with subject.cache(spec, len(ids)) as cache:
        model.prefill(torch.tensor([ids[:prompt]]), cache)
        noted, fetched = common.watch(cache)
        tokens = torch.tensor(ids[prompt:-1], device=model.device).view(-1, 1, 1)
        logits = torch.cat([model.decode(token, cache).float().cpu() for token in tokens])
    return logits, {"recall": [statistics.fmean(steps) if steps else None for steps in noted], "fetched": statistics.fmean(fetched) if fetched else None}


def compare(reference: Tensor, logits: Tensor, truth: list[int]) -> dict:
    """The measures of one text."""
    nll = [-x.double().log_softmax(-1).gather(1, torch.tensor(truth)[:, None]).mean() for x in (reference, logits)]
    return {
        "kl": common.kl_divergence(reference, logits).mean().item(),
        "top1": (reference.argmax(-1) == logits.argmax(-1)).double().mean().item(),
        "ppl": nll[1].exp().item(),
        "ppl_ratio": (nll[1] - nll[0]).exp().item(),
    }


def summarise(spec: str, texts: list[dict]) -> dict:
    """The row of one cache: means, intervals, and what each text gave."""
    row: dict = {"cache": spec}
    for name in ("kl", "top1", "ppl_ratio"):
        row[name], row[f"{name}_interval"] = common.summary([text[name] for text in texts])
    layers = list(zip(*(text["recall"] for text in texts)))
    row["recall"] = [None if None in layer else statistics.fmean(layer) for layer in layers]
    each = [statistics.fmean(r for r in text["recall"] if r is not None) for text in texts if any(r is not None for r in text["recall"])]
    row["recall_mean"], row["recall_mean_interval"] = common.summary(each) if each else (None, None)
    row["fetched"] = None if texts[0]["fetched"] is None else statistics.fmean(text["fetched"] for text in texts)
    return row | {"texts": texts}


def table(rows: list[dict]) -> str:
    """Fixed-width text: each mean with half the width of its interval; recall as the mean and the least of the layers that have one."""
    width = max(len(row["cache"]) for row in rows)

    def cell(row: dict, name: str) -> str:
        if row[name] is None:
            return "-"
        interval = row[f"{name}_interval"]
        return f"{row[name]:.4f}" + (f" ± {(interval[1] - interval[0]) / 2:.4f}" if interval else "")

    lines = [f"{'cache':{width}}{'KL':>19}{'top-1':>19}{'ppl ratio':>19}{'recall':>19}{'least':>8}  layer{'fetched':>9}"]
    for row in rows:
        known = [(recall, layer) for layer, recall in enumerate(row["recall"]) if recall is not None]
        least = f"{min(known)[0]:>8.4f}  {min(known)[1]:<5}" if known else f"{'-':>8}  -    "
        least += f"{'-' if row['fetched'] is None else format(row['fetched'], '.1f'):>9}"
        lines.append(f"{row['cache']:{width}}" + "".join(f"{cell(row, name):>19}" for name in ("kl", "top1", "ppl_ratio", "recall_mean")) + least)
    return "\n".join(lines)


def build_parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="fidelity.py", description=__doc__.split("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter, allow_abbrev=False)
    common.add_flags(parser, "smollm2", "full,tailor:preset=longbench,tailor:preset=ruler")
    add = parser.add_argument
    add("--text", nargs="+", type=Path, default=TEXTS, metavar="FILE", help="UTF-8 files to cut the texts from")
    add("--texts", type=int, default=10, metavar="N", help="texts in all")
    add("--prompt-tokens", type=parse_tokens, default=4000, metavar="N", help="tokens of each text that are prefilled: 4000, 32k")
    add("--steps", type=int, default=32, metavar="N", help="tokens of each text that are decoded after them")
    return parser


def run(args, specs: list[str]) -> tuple[dict, str]:
    """Returns the object and the table. Raises ValueError for bad input."""
    common.check_specs(specs, args.prompt_tokens)
    for name in ("steps", "texts"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name} is {getattr(args, name)}; it must be at least 1")
    subject = common.Subject.load(args, specs)
    size = args.prompt_tokens + args.steps + 1
    if size > subject.model.config.max_position_embeddings:
        raise ValueError(f"{size:,} tokens a text are more than the {subject.model.config.max_position_embeddings:,} that the model was trained for; lower --prompt-tokens")
    results: dict[str, list[dict]] = {spec: [] for spec in specs}
    for name, ids in cut(subject.tokenizer, args.text, args.texts, size):
        full = forced(subject, "full", ids, args.prompt_tokens)
        for spec in specs:
            logits, seen = full if spec == "full" else forced(subject, spec, ids, args.prompt_tokens)
            found = {"text": name} | compare(full[0], logits, ids[args.prompt_tokens + 1 :]) | seen
            results[spec].append(found)
            common.note("fidelity.py", f"{name}, {spec}: KL {found['kl']:.4f}, top-1 {found['top1']:.3f}, perplexity {found['ppl']:.2f}")
    rows = [summarise(spec, texts) for spec, texts in results.items()]
    about = subject.facts(args) | {"prompt_tokens": args.prompt_tokens, "steps": args.steps}
    return about | {"results": rows}, table(rows)


def main(argv: list[str] | None = None) -> int:
    """The command line. Returns the exit code: 0, 2 for bad input, 130 after Ctrl-C."""
    return common.command_line("fidelity.py", build_parser(), run, argv)


if __name__ == "__main__":
    sys.exit(main())
