"""`k3tvm generate`: turns prompt ids into new ids."""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

from k3tvm.cli.terminal import command

HELP = "continue a prompt of token ids"
EPILOG = """\
Greedy by default: --temperature above 0 samples. Ends at an end-of-sequence id of the model.

examples:
  k3tvm generate k3.bundle --ids 1,2,3 --max-tokens 32
  k3tvm generate k3.bundle --ids 1,2,3 --temperature 0.8 --top-p 0.95 --seed 7 --json
"""


def register(subparsers: Any) -> None:
    """Add the command to the parser."""
    from k3tvm.cli.logits import add_engine, add_ids

    parser = command(subparsers, "generate", HELP, EPILOG)
    add = parser.add_argument
    add_engine(parser)
    add_ids(parser)
    add("--max-tokens", metavar="N", type=int, default=64, help="new ids at most (64)")
    add("--temperature", metavar="T", type=float, default=0.0, help="0: greedy (default)")
    add("--top-p", metavar="P", type=float, default=1.0, help="keep the most likely mass P (1)")
    add("--top-k", metavar="K", type=int, default=0, help="keep the K most likely ids (0: all)")
    add("--seed", metavar="N", type=int, default=0, help="of sampling (0)")
    add("--ignore-eos", action="store_true", help="go on after an end-of-sequence id")
    add("--json", action="store_true", help="print one JSON object at the end")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Generate; ids are printed as they come, or all at once as JSON."""
    from k3tvm.cli.logits import open_engine
    from k3tvm.cli.terminal import UsageError, parse_ids
    from k3tvm.runtime.generate import generate
    from k3tvm.runtime.sampling import Sampler

    ids = parse_ids(args.ids, args.ids_file)
    if args.max_tokens < 1:
        raise UsageError(f"--max-tokens {args.max_tokens}: must be at least 1")
    sampler = Sampler(args.temperature, args.top_k, args.top_p, args.seed)
    engine = open_engine(args)
    stop = () if args.ignore_eos else _stop_ids(engine.config.eos_token_id)
    made: list[int] = []
    start = time.perf_counter()
    try:
        for token in generate(engine, ids, args.max_tokens, sampler, stop):
            made.append(token)
            if not args.json:
                print(token, end=" ", flush=True)
    finally:
        if made and not args.json:  # so that an error stands on a line of its own
            print(flush=True)
    seconds = time.perf_counter() - start
    if args.json:
        reason = "stop" if made[-1] in stop else "length"
        facts = {"prompt": ids, "ids": made, "finish_reason": reason, "seconds": seconds}
        print(json.dumps(facts | {"seed": args.seed, "temperature": args.temperature}))
    return 0


def _stop_ids(eos: int | None) -> tuple[int, ...]:
    """The model's own end id; K3's tokenizer has a second one just below it (specification 6.1)."""
    if eos is None:
        return ()
    return (163586, 163585) if eos == 163586 else (eos,)
