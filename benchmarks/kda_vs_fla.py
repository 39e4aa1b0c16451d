"""KDA of this compiler beside flash-linear-attention on one GPU: agreement, times, ratios."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from typing import Any

from kda_inputs import Case, distance, make_inputs, recurrence

from k3tvm.errors import K3Error

LACKING = 2  # exit code: this machine cannot do it
CLOSE = {"float32": 1e-8, "bfloat16": 1e-4}  # NMSE of ours against float64
SAME = 1e-3  # NMSE between the two, of which one computes in bfloat16
LONGEST = 512  # tokens up to which the plain recurrence is waited for


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""

    def numbers(text: str) -> list[int]:
        return [int(part) for part in text.split(",")]

    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--device", choices=["cuda", "cuda-emulated"], default="cuda")
    add("--index", type=int, default=0, help="which GPU (0)")
    add("--heads", type=numbers, default=[96, 32], help="lists of heads to measure (96,32)")
    add("--tokens", type=int, default=8192, help="of the prefill of one sequence (8192)")
    add("--sequences", type=numbers, default=[1, 16, 64], help="of the decode steps (1,16,64)")
    add("--dim", type=int, default=128, help="of keys and values (128)")
    add("--act", choices=["float32", "bfloat16"], default="float32", help="of our kernels")
    add("--rounds", type=int, default=20, help="medians are over so many (20)")
    add(
        "--check", action="store_true", help="compare ours with a plain recurrence, measure nothing"
    )
    add("--alone", action="store_true", help="measure ours without fla")
    add("--json", action="store_true", help="print one JSON object")
    return parser.parse_args(arguments)


def cases(args: argparse.Namespace) -> list[Case]:
    """The prefill, and decode steps, for each number of heads."""
    return [
        case
        for heads in args.heads
        for case in (
            Case(heads, args.dim, args.tokens, 1),
            *(Case(heads, args.dim, 1, count) for count in args.sequences),
        )
    ]


def main(arguments: list[str] | None = None) -> int:
    """Measure and print; 2 with one line where something is missing."""
    args = parse(arguments)
    try:
        return _check(args) if args.check else _measure(args)
    except ModuleNotFoundError as error:
        package = {"fla": "flash-linear-attention"}.get(error.name or "", error.name)
        return _lacks(f"{error.name} is not installed: pip install {package}")
    except K3Error as error:
        return _lacks(str(error))


def _lacks(what: str) -> int:
    print(f"kda_vs_fla: {what}", file=sys.stderr)
    return LACKING


def _open(args: argparse.Namespace) -> tuple[Any, Any, str]:
    import kda_ours

    if args.device == "cuda":
        return kda_ours.open_cuda(args.index)
    return kda_ours.open_emulated()


def _check(args: argparse.Namespace) -> int:
    """Our kernels against the recurrence; 1 where they differ."""
    memory, profile, name = _open(args)
    import torch
    from kda_ours import Ours

    good = True
    for case in cases(args):
        x = make_inputs(case)
        got = Ours(case, x, memory, profile, args.act).results()
        errors = [distance(g, w) for g, w in zip(got, recurrence(torch, x), strict=True)]
        close = max(errors) <= CLOSE[args.act]
        good &= close
        said = "agrees" if close else "DIFFERS"
        outputs, states = errors
        print(f"{case.name} on {name}: {said}, NMSE {outputs:.1e}, of states {states:.1e}")
    return 0 if good else 1


def _measure(args: argparse.Namespace) -> int:
    if args.device != "cuda":
        return _lacks("an emulated device has no speed to measure; use --check")
    memory, profile, name = _open(args)
    import torch

    from k3tvm.bench.cuda_clock import Clock, copy_rate
    from k3tvm.cuda import runtime

    clock = Clock(runtime.load().library)
    copies = copy_rate(clock, memory)
    rows = [_row(args, torch, case, clock, copies, (memory, profile)) for case in cases(args)]
    facts = {"device": name, "copy_bytes_per_s": copies, "act": args.act, "rows": rows}
    print(json.dumps(facts, indent=1) if args.json else _text(facts))
    return 0 if all(row["agrees"] for row in rows) else 1


def _row(
    args: argparse.Namespace, torch: Any, case: Case, clock: Any, copies: float, device: Any
) -> dict[str, Any]:
    """Both on the same inputs: agreement first, then times in turn."""
    from cuda_timing import in_turn
    from kda_ours import Ours

    x = make_inputs(case)
    ours = Ours(case, x, *device, args.act)
    works: dict[str, Callable[[], object]] = {"ours": ours.run}
    agreement: dict[str, float] = {}
    if not args.alone:
        from kda_fla import Fla

        theirs = Fla(torch, case, x)
        works["fla"] = theirs.run
        agreement["fla"] = _worst(ours.results(), theirs.results())
    if case.tokens <= LONGEST:
        agreement["recurrence"] = _worst(ours.results(), recurrence(torch, x))
    limits = {"fla": SAME, "recurrence": CLOSE[args.act]}
    times = in_turn(clock, works, args.rounds, calls=1 if case.tokens > 1 else 20)
    least = {"ours": case.least_bytes(4), "fla": case.least_bytes(2)}
    return {
        "case": case.name,
        "nmse": agreement,
        "agrees": all(agreement[k] <= limits[k] for k in agreement),
        "microseconds": {k: t * 1e6 for k, t in times.items()},
        "least_bytes": {k: least[k] for k in times},
        "share_of_copy": {k: least[k] / t / copies for k, t in times.items()},
        "fla_over_ours": times["fla"] / times["ours"] if "fla" in times else None,
    }


def _worst(got: tuple[Any, Any], want: tuple[Any, Any]) -> float:
    return max(distance(g, w) for g, w in zip(got, want, strict=True))


def _text(facts: dict[str, Any]) -> str:
    lines = [
        f"{facts['device']}: copies {facts['copy_bytes_per_s'] / 1e9:.0f} GB/s (read and written);"
        f" our results in {facts['act']}"
    ]
    for row in facts["rows"]:
        parts = [
            f"{name} {us:.1f} us ({row['share_of_copy'][name]:.0%} of copy)"
            for name, us in row["microseconds"].items()
        ]
        ratio = row["fla_over_ours"]
        parts += [f"ours is {ratio:.2f} times as fast"] if ratio else []
        parts += [f"NMSE against {name} {e:.1e}" for name, e in row["nmse"].items()]
        parts += [] if row["agrees"] else ["RESULTS DIFFER"]
        lines.append(f"{row['case']}: {', '.join(parts)}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
