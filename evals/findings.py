# SPDX-License-Identifier: Apache-2.0
"""TailorKV's findings about models, measured again on this code.

    python evals/findings.py                      all of it on the embedded base model (minutes on a GPU, long on two CPU cores)
    python evals/findings.py --only layers --json

* `layers` (section 3, table 5): the sparse error P of each layer on four texts; a layer above tau attends densely.
* `bits` (figure 9a, table 1): one layer alone at 1 bit, everything else exact. A densely attending layer should suffer least
  for what it is worth, since its errors average out.
* `static` (figure 9b): critical channels chosen anew at every step, against the ones most often critical on another text.
* `channels` (figure 9c): how many critical channels are needed.

`layers` prints P; the others KL(full || cache), top-1 agreement and recall as `fidelity.py` has them, on its texts.
"""

import argparse
import dataclasses
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # the modules are a flat folder, not an installed package

from calibrate import TEXT, classify
from evals import common, fidelity
from generate import _Parser, parse_tokens

PARTS = ("layers", "bits", "static", "channels")
PAPER = "tailor:preset=longbench"
ONE_LAYER = "tailor:preset=longbench,topk=65536,dense_below=0"  # more than there are candidates: sparse layers are exact


def measure(subject: common.Subject, spec: str, texts: list[tuple[str, list[int]]], prompt: int, full: dict) -> dict:
    """`fidelity.py`'s row for one spec; `full` keeps the full cache's logits of each text."""
    found = []
    for name, ids in texts:
        if name not in full:
            full[name] = fidelity.forced(subject, "full", ids, prompt)[0]
        logits, seen = fidelity.forced(subject, spec, ids, prompt)
        found.append({"text": name} | fidelity.compare(full[name], logits, ids[prompt + 1 :]) | seen)
    row = fidelity.summarise(spec, found)
    common.note("findings.py", f"{spec}, quantised {subject.plan.quantised if hasattr(subject.plan, 'quantised') else subject.plan}: KL {row['kl']:.4f}")
    return row


def sparse_errors(subject: common.Subject, texts: list[Path], tokens: int) -> list[dict]:
    """P of each layer, a row a text."""
    rows = []
    for file in texts:
        ids = subject.tokenizer.encode(common.read_text(file))[:tokens]
        plan = classify(subject.model, ids)
        rows.append({"text": file.name, "tokens": len(ids), "quantised": list(plan.quantised), "scores": list(plan.scores)})
        common.note("findings.py", f"P on {file.name}: layers above {plan.tau}: {list(plan.quantised)}")
    return rows


def table(found: dict) -> str:
    """Fixed-width text of all parts that were measured."""
    lines = []
    if "layers" in found:
        lines += [f"{'P, text':24}{'layer 0':>9}{'max other':>11}{'which':>7}  above tau"]
        for row in found["layers"]:
            others = [(P, layer) for layer, P in enumerate(row["scores"])][1:] or [(0.0, 0)]
            lines.append(f"{row['text']:24}{row['scores'][0]:>9.3f}{max(others)[0]:>11.3f}{max(others)[1]:>7}  {row['quantised']}")
    for part, label in (("bits", "one layer at 1 bit"), ("static", "channels"), ("channels", "channels a head")):
        if part in found:
            lines += ["", f"{label:24}{'KL':>9}{'top-1':>9}{'recall':>9}"]
            for name, row in found[part].items():
                recall = "-" if row["recall_mean"] is None else f"{row['recall_mean']:.3f}"
                lines.append(f"{name:24}{row['kl']:>9.4f}{row['top1']:>9.3f}{recall:>9}")
    return "\n".join(lines).strip("\n")


def build_parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="findings.py", description=__doc__.split("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter, allow_abbrev=False)
    common.add_flags(parser, "smollm2", PAPER)
    add = parser.add_argument
    add("--only", nargs="+", choices=PARTS, default=list(PARTS), help="parts to measure")
    add("--texts", type=int, default=3, metavar="N", help="texts for all parts but `layers`, which has four")
    add("--prompt-tokens", type=parse_tokens, default=4000, metavar="N", help="tokens of each text that are prefilled")
    add("--steps", type=int, default=32, metavar="N", help="tokens of each text that are decoded after them")
    return parser


def run(args, specs: list[str]) -> tuple[dict, str]:
    """Returns the object and the table. Raises ValueError for bad input."""
    if args.texts < 1 or args.steps < 1:
        raise ValueError(f"--texts is {args.texts} and --steps {args.steps}; both must be at least 1")
    [spec] = specs
    common.check_specs([spec], args.prompt_tokens)
    subject = common.Subject.load(args, specs)
    found: dict = {}
    if "layers" in args.only:
        found["layers"] = sparse_errors(subject, [*fidelity.TEXTS, TEXT], 4096)
    texts, full = fidelity.cut(subject.tokenizer, fidelity.TEXTS, args.texts, args.prompt_tokens + args.steps + 1), {}
    if "bits" in args.only:
        alone = [dataclasses.replace(subject, plan=(layer,)) for layer in range(subject.model.config.num_hidden_layers)]
        found["bits"] = {f"layer {one.plan[0]}": measure(one, ONE_LAYER, texts, args.prompt_tokens, full) for one in alone}
    if "static" in args.only:
        ids = subject.tokenizer.encode(common.read_text(TEXT))[:4096]
        offline = dataclasses.replace(subject, plan=classify(subject.model, ids, channels=True))
        found["static"] = {
            "dynamic": measure(subject, spec, texts, args.prompt_tokens, full),
            "static": measure(offline, f"{spec},static=true", texts, args.prompt_tokens, full),
        }
    if "channels" in args.only:
        found["channels"] = {str(C): measure(subject, f"{spec},channels={C}", texts, args.prompt_tokens, full) for C in (2, 4, 8, 12, 16)}
    about = subject.facts(args) | {"prompt_tokens": args.prompt_tokens, "steps": args.steps, "texts": args.texts}
    return about | {"results": found}, table(found)


def main(argv: list[str] | None = None) -> int:
    """The command line. Returns the exit code: 0, 2 for bad input, 130 after Ctrl-C."""
    return common.command_line("findings.py", build_parser(), run, argv)


if __name__ == "__main__":
    sys.exit(main())
