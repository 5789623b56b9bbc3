# SPDX-License-Identifier: Apache-2.0
"""What each ingredient of the presets brings: KL beside bytes, each switched on alone and all together.

    python evals/ingredients.py --ckpt smollm2 --text a.txt b.txt --texts 10 --plot ingredients.png

KL and top-1 agreement are measured as in `fidelity.py`, on its texts or those given. Bytes are those of one yardstick whatever is
measured: Llama-3.1-8B's shape at 131,072 tokens in 16 bits, batch 1, one quantised layer (`cache.account`, which tests
hold against what a cache says of itself): held on the GPU, sent over PCIe for each decoded token, held on the host.
"""

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # the modules are a flat folder, not an installed package

from cache import TailorCache, account, parse_spec
from evals import common, fidelity

SHAPE = {"layers": 32, "kv_heads": 8, "head_dim": 128, "tokens": 131072}  # Llama-3.1-8B
PAPER = "tailor:preset=longbench"
# Every candidate fetched: sparse layers are exact, and what remains is the quantised layer's.
EXACT = "topk=8192,dense_below=0"
ROWS = [
    ("the paper's, 1 bit", PAPER),
    ("+ 2 bits", f"{PAPER},bits=2"),
    ("+ fitted key levels", f"{PAPER},k_levels=lloyd"),
    ("+ values' mean correction and centre", f"{PAPER},correct=true,centre=1024"),
    ("+ own norm, aggregation by magnitude and softmax", f"{PAPER},norm=own,aggregation=mean"),
    ("+ 4-bit rows", f"{PAPER},row_bits=4"),
    ("+ 28 channels in 4-bit rows", f"{PAPER},row_bits=4,channels=28"),
    ("+ tail at the mean value", f"{PAPER},tail=true"),
    ("+ tail that follows the query", f"{PAPER},tail=true,tilt=true"),
    ("all: best", "tailor:preset=best"),
    ("all, without looking ahead", "tailor:preset=best,ahead=false"),
    ("best with shares of the candidates alone", "tailor:preset=best,aggregation=mean"),
    ("as many tokens as needed: adaptive", "tailor:preset=adaptive"),
    ("best with 1 bit", "tailor:preset=best,bits=1"),
    ("best with the tail at the mean value", "tailor:preset=best,tilt=false"),
    ("best without a tail", "tailor:preset=best,tail=false"),
    ("best with 8 channels", "tailor:preset=best,channels=8"),
    ("best with 16 channels", "tailor:preset=best,channels=16"),
    ("best, 448 tokens attended", "tailor:preset=best,topk=384,dense_below=192"),
    ("best with 8-bit tokens", "tailor:preset=best,token_bits=8"),
    ("tiny", "tailor:preset=tiny"),
    ("quantised layer alone, paper", f"{PAPER},{EXACT}"),
    ("quantised layer alone, best at 1 bit", f"tailor:preset=best,bits=1,{EXACT}"),
    ("quantised layer alone, best", f"tailor:preset=best,{EXACT}"),
    ("the paper's with 4 channels", f"{PAPER},channels=4"),
    ("the paper's with 16 channels", f"{PAPER},channels=16"),
]


def table(rows: list[dict]) -> str:
    """A Markdown table, as the README has it."""
    lines = ["| | KL, nats | top-1 | GPU, MiB | PCIe a token, MiB | host, GiB |", "|---|---|---|---|---|---|"]
    for row in rows:
        interval = row["kl_interval"]
        kl = f"{row['kl']:.4f}" + (f" ± {(interval[1] - interval[0]) / 2:.4f}" if interval else "")
        sizes = "- | - | -" if row["bytes"] is None else f"{row['bytes']['gpu'] / 2**20:.0f} | {row['bytes']['pcie'] / 2**20:.0f} | {row['bytes']['host'] / 2**30:.1f}"
        lines.append(f"| {row['name']} (`{row['cache'].removeprefix('tailor:')}`) | {kl} | {row['top1']:.3f} | {sizes} |")
    return "\n".join(lines)


def plot(path: Path, rows: list[dict]) -> None:
    """KL over bytes, on the GPU and over PCIe: what is the paper's, and what is ours. Raises ValueError if it cannot be written."""
    from matplotlib.figure import Figure  # without pyplot: no display is needed and no global state left

    figure = Figure(figsize=(11, 5), layout="constrained")
    for axes, (part, label) in zip(figure.subplots(1, 2, sharey=True), (("gpu", "MiB on the GPU"), ("pcie", "MiB over PCIe for a token"))):
        for color, title, wanted in (("tab:orange", "paper", ("the paper's", "+ 2 bits")), ("tab:blue", "best, adaptive and tiny", ("all: best", "best", "as many", "tiny"))):
            shown = [row for row in rows if row["bytes"] and row["name"].startswith(wanted)]
            axes.scatter([row["bytes"][part] / 2**20 for row in shown], [row["kl"] for row in shown], color=color, label=title)
            for row in shown:
                axes.annotate(row["name"], (row["bytes"][part] / 2**20, row["kl"]), (4, 0), textcoords="offset points", va="center", fontsize=6)
        axes.set(xlabel=label, yscale="log", xlim=(0, 1.7 * axes.dataLim.xmax))  # room for the names
    figure.axes[0].set_ylabel("KL, nats")
    figure.axes[0].legend()
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:  # ValueError: a suffix that is no image format
        raise ValueError(f"cannot write the plot {path}: {error}") from None


def build_parser() -> argparse.ArgumentParser:
    parser = fidelity.build_parser()
    parser.prog, parser.description = "ingredients.py", __doc__.split("\n")[0]
    parser.set_defaults(cache=",".join(spec for _, spec in ROWS))
    parser.add_argument("--plot", type=Path, default=argparse.SUPPRESS, metavar="FILE", help="also draw KL over bytes (needs matplotlib)")
    return parser


def run(args, specs: list[str]) -> tuple[dict, str]:
    """Returns the object and the table. Raises ValueError for bad input."""
    if "plot" in args:
        try:
            import matplotlib  # noqa: F401
        except ImportError:
            raise ValueError("--plot needs matplotlib, which is not installed; install it (pip install matplotlib) or leave --plot out") from None
    found, _ = fidelity.run(args, specs)
    names = {spec: name for name, spec in ROWS}
    for row in found["results"]:
        cls, options = parse_spec(row["cache"])
        row["name"] = names.get(row["cache"], row["cache"])
        # Bytes of a setting that fetches everything mean nothing.
        row["bytes"] = account(options, **SHAPE) if cls is TailorCache and EXACT not in row["cache"] else None
    if "plot" in args:
        plot(args.plot, found["results"])
    return found | {"shape": SHAPE}, table(found["results"])


def main(argv: list[str] | None = None) -> int:
    """The command line. Returns the exit code: 0, 2 for bad input, 130 after Ctrl-C."""
    return common.command_line("ingredients.py", build_parser(), run, argv)


if __name__ == "__main__":
    sys.exit(main())
