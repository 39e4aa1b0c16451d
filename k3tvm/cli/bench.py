"""`k3tvm bench`: measures a bundle against the limits of the machine it runs on."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from k3tvm.cli.terminal import command

HELP = "measure prefill and decode speed, as shares of the machine's own limits"
EPILOG = """\
The limits are measured in the same run: sequential reads with as many streams as threads, and
single precision matrix products of NumPy's BLAS in a process of its own. On a GPU reads are those
of a kernel, times of kernels are the device's own timestamps (on CUDA those of events around an
operator, in which a slow host counts, too), and there is no BLAS beside it. Metal devices cannot be
measured yet. Only bytes that a token must touch are counted: all weights, but of the experts only
the chosen ones and of the embedding one row. Shares are fractions of 1. Where the bundle knows what
a kernel moves (see docs/report.md), its share of the bandwidth is given: of reads, on CUDA of
copies.

examples:
  k3tvm bench k3.bundle
  k3tvm bench k3.bundle --threads 1 --json
  k3tvm bench k3.bundle --device vulkan
"""


def register(subparsers: Any) -> None:
    """Add the command to the parser."""
    from k3tvm.cli.logits import add_engine

    parser = command(subparsers, "bench", HELP, EPILOG)
    add = parser.add_argument
    add_engine(parser)
    add("--prompt", metavar="N", type=int, default=512, help="tokens of the prefill (512)")
    add("--tokens", metavar="N", type=int, default=64, help="tokens to decode after it (64)")
    add("--rounds", metavar="N", type=int, default=5, help="rounds; medians are reported (5)")
    add("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure and print."""
    from k3tvm.bench.bench import Plan, bench
    from k3tvm.cli.logits import open_engine
    from k3tvm.cli.terminal import Bar, UsageError

    plan = Plan(args.prompt, args.tokens, args.rounds)
    if min(args.prompt, args.tokens, args.rounds) < 1:
        raise UsageError("--prompt, --tokens and --rounds must be at least 1")
    args.context = args.context or max(512, args.prompt + args.tokens)
    engine = open_engine(args, slots=1)
    facts = bench(engine, plan, Bar().step)
    print(json.dumps(facts, indent=2) if args.json else _text(facts))
    sys.stdout.flush()
    return 0


def _text(facts: dict[str, Any]) -> str:
    from k3tvm.cli.terminal import table

    p, d, m, limits = facts["prefill"], facts["decode"], facts["memory"], facts["machine"]
    where = facts["device"]
    where += f", {facts['threads']} threads" if where == "cpu" else ""
    share = f": {p['share_of_sgemm_peak']:.1%} of sgemm" if limits["sgemm_flops"] else ""
    sgemm = f", sgemm {limits['sgemm_flops'] / 1e9:.1f} GFLOP/s" if limits["sgemm_flops"] else ""
    held = "" if where.startswith("cpu") else f" in tensors, {m['held_bytes'] / 1e6:.0f} MB taken"
    lines = [
        f"{where}, {facts['target']}; limits measured in this run:"
        f" read {limits['read_bytes_per_s'] / 1e9:.1f} GB/s{sgemm}",
        f"prefill  {p['tokens_per_s']:.1f} tokens/s ({p['prompt_tokens']} tokens),"
        f" {p['flops'] / 1e9:.1f} GFLOP/s{share}",
        f"decode   {d['tokens_per_s']:.1f} tokens/s, {d['bytes_per_token'] / 1e6:.1f} MB a token,"
        f" {d['bytes_per_s'] / 1e9:.1f} GB/s: {d['share_of_read_bandwidth']:.1%} of reads;"
        f" {facts['dispatches_per_token']} kernels a token",
        f"memory   {m['peak_bytes'] / 1e6:.0f} MB at most{held};"
        f" parameters {m['parameter_bytes'] / 1e6:.0f} MB, state {m['state_bytes'] / 1e6:.1f} MB",
        "",
    ]
    rows = []
    for entry in ("decode", "prefill"):
        times = [k for k in facts["kernels"] if k["entry"] == entry]
        total = sum(k["microseconds"] for k in times)
        rows += [
            [
                k["kernel"],
                entry,
                str(k["calls"]),
                f"{k['microseconds']:.0f}",
                f"{k['microseconds'] / total:.1%}",
                "" if k["share_of_bandwidth"] is None else f"{k['share_of_bandwidth']:.1%}",
            ]
            for k in times[:12]
        ]
    head = ["kernel", "entry", "calls", "us", "share"]
    if any(row[-1] for row in rows):
        head.append("of copies" if limits["copy_bytes_per_s"] else "of reads")
    return "\n".join(lines) + table([row[: len(head)] for row in rows], head)
