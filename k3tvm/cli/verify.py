"""`k3tvm verify`: proves that a bundle computes what the torch reference computes."""

from __future__ import annotations

import argparse
import json
from typing import Any

from k3tvm.cli.terminal import command

HELP = "compare a bundle's logits with the torch reference on the same parameters"
EPILOG = """\
Runs ids through the bundle in one go, in chunks and step by step, and through the reference in
float64 and in the bundle's own precision. The bundle passes when its error is at most twice the
error of the reference in that precision. Needs torch: pip install 'k3tvm[verify]'.

examples:
  k3tvm verify k3.bundle
  k3tvm verify k3.bundle --ids 1,2,3 --json

exit status: 0 within tolerance, 1 not
"""


def register(subparsers: Any) -> None:
    """Add the command to the parser."""
    from k3tvm.cli.logits import add_engine

    parser = command(subparsers, "verify", HELP, EPILOG)
    add_engine(parser)
    parser.add_argument("--ids", metavar="LIST", help="token ids, as 1,2,3 (random when not given)")
    parser.add_argument("--ids-file", metavar="F", help="file with ids")
    parser.add_argument("--tokens", metavar="N", type=int, default=64, help="random ids (64)")
    parser.add_argument("--seed", metavar="N", type=int, default=0, help="of the random ids (0)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Compare, print, and return 1 when out of tolerance."""
    from k3tvm.cli.logits import open_engine
    from k3tvm.cli.terminal import UsageError, parse_ids

    engine = open_engine(args)
    if args.ids is not None or args.ids_file is not None:
        ids = parse_ids(args.ids, args.ids_file)
    elif args.tokens < 1 or args.seed < 0:
        what = f"--tokens {args.tokens}, --seed {args.seed}: at least 1 and 0 are needed"
        raise UsageError(what)
    else:
        ids = random_ids(args.tokens, engine.config.vocab_size, args.seed)
    try:
        from k3tvm.compare.verify import verify
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        cure = "run: pip install 'k3tvm[verify]'"
        raise UsageError("the reference needs torch", cure=cure) from None
    verdict = verify(engine, ids)
    print(json.dumps(verdict.as_dict(), indent=2) if args.json else _text(verdict))
    return 0 if verdict.passed else 1


def random_ids(count: int, vocab: int, seed: int) -> list[int]:
    """Uniform token ids."""
    import numpy as np

    return [int(i) for i in np.random.default_rng(seed).integers(0, vocab, count)]


def _text(verdict: Any) -> str:
    from k3tvm.cli.terminal import table

    dtype = verdict.activations
    rows = [*verdict.modes.items(), (f"reference in {dtype}", verdict.yardstick)]
    lines = [
        [
            name,
            f"{a.nmse:.2e}",
            f"{a.max_error:.2e}",
            f"{a.mean_error:.2e}",
            f"{a.top1:.1%}",
            f"{a.top10:.1%}",
        ]
        for name, a in rows
    ]
    head = [f"{verdict.tokens} tokens against float64", "NMSE", "max", "mean", "top-1", "top-10"]
    answer = "within" if verdict.passed else "OUT OF"
    limit = f"{answer} tolerance: NMSE at most {verdict.limit_nmse:.2e}, twice the error of torch"
    return f"{table(lines, head)}\n{limit} in {dtype}"
