"""`k3tvm compile`: turns a checkpoint into a bundle."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

from k3tvm.cli.terminal import command

HELP = "compile a checkpoint into a bundle: library, parameters, manifest"
EPILOG = """\
targets:
  cpu            this machine's vector instructions
  cpu:avx512     x86-64 with AVX-512 (with VNNI and VBMI: Ice Lake, Zen 4 and newer)
  cpu:avx2       x86-64 with AVX2 and FMA
  cpu:portable   any x86-64
  vulkan         GPUs of every vendor
  vulkan:NAME    GPUs of one kind: see 'k3tvm doctor --help' (nvidia, amd, intel, ...)
  cuda           NVIDIA GPUs from Ampere on: code for sm_80, 86, 89, 90a, 100a and 120
  cuda:ARCHS     some of them or others, such as cuda:sm_86 or cuda:sm_80+sm_90a
  metal          Apple silicon with macOS; metal:apple8, metal:apple9 for newer families
  metal:ios      a static library for apps
  cuda-emulated, metal-emulated
                 the same kernels made to run on the CPU: to check results, not for use
  cpu,vulkan     both in one bundle, with one set of parameters; the first is the default device

--dtype is that of activations between kernels; weights keep their stored form (MXFP4, BF16, F32).
float32 is exact to single precision; bfloat16 rounds where the official model does, float16 at the
same points (finer, but nothing above 65504).

An interrupted run is resumed: parameter files that it finished are recognised by their hashes.

examples:
  k3tvm compile Kimi-K3-0.40B --target cpu -o k3.bundle
  k3tvm compile Kimi-K3-0.40B --target vulkan:nvidia --dtype float16
  k3tvm compile Kimi-K3/config.json --target cpu --no-weights -o code.bundle
"""


def register(subparsers: Any) -> None:
    """Add the command to the parser."""
    parser = command(subparsers, "compile", HELP, EPILOG)
    add = parser.add_argument
    add("path", metavar="PATH", help="checkpoint folder (or config.json with --no-weights)")
    add("--target", metavar="T", required=True, help="see below")
    add("-o", "--output", metavar="BUNDLE", help="folder to write; NAME.bundle when not given")
    add(
        "--dtype", choices=["float32", "bfloat16", "float16"], default="float32", help="activations"
    )
    add("--context", metavar="N", type=int, help="tokens per sequence (4096, or the model's)")
    add("--slots", metavar="N", type=int, default=1, help="sequences at once (1)")
    add("--no-weights", action="store_true", help="compile code only")
    add(
        "--allow-spills",
        metavar="NAMES",
        help="CUDA kernels that may keep registers in memory: names or patterns, with commas",
    )
    add(
        "--report",
        metavar="FILE",
        help="write what each GPU kernel moves, computes and takes (.md, .json, else text)",
    )
    add("--dump", metavar="DIR", help="write the module after each phase of the pipeline")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Compile, with progress, and say what was made."""
    from k3tvm.cli.terminal import Bar, UsageError
    from k3tvm.compiler.compile import Options, compile_checkpoint
    from k3tvm.report.table import write_report

    start = time.monotonic()
    path = Path(args.path)
    name = path.resolve().parent.name if path.is_file() else path.resolve().name
    out = Path(args.output or f"{name}.bundle")
    options = Options(
        target=args.target,
        activations=args.dtype,
        context=args.context,
        slots=args.slots,
        weights=not args.no_weights,
        dump=Path(args.dump) if args.dump else None,
        allow_spills=tuple(p.strip() for p in (args.allow_spills or "").split(",") if p.strip()),
    )
    _check_uses(args)
    report = Path(args.report) if args.report else None
    if report and not report.absolute().parent.is_dir():
        raise UsageError(f"--report {report}: its folder does not exist")
    manifest = compile_checkpoint(path, out, options, Bar())
    if report:
        write_report(manifest, report)
    files = (*(c.file for c in manifest.code), *manifest.params)
    kernels = " and ".join(
        f"{len(c.device_kernels or c.kernels)} kernels for {c.target}" for c in manifest.code
    )
    print(
        f"wrote {out}: {sum(f.bytes for f in files) / 1e6:,.1f} MB, {kernels},"
        f" {manifest.activations} activations, context {manifest.context},"
        f" {manifest.slots} slot{'s' if manifest.slots != 1 else ''},"
        f" in {time.monotonic() - start:.1f} s"
    )
    return 0


def _check_uses(args: argparse.Namespace) -> None:
    """UsageError for an option that is of no use to any of the targets."""
    from k3tvm.cli.terminal import UsageError
    from k3tvm.compiler.targets import profile_of, split_targets
    from k3tvm.schedules.profile import GpuProfile

    profiles = [profile_of(t) for t in split_targets(args.target)]
    shipped = [p for p in profiles if isinstance(p, GpuProfile) and not p.emulated]
    if args.report and not shipped:
        raise UsageError(
            f"--report: {args.target} has no kernels for a GPU", cure="add a target such as cuda"
        )
    if args.allow_spills and not any(p.kind == "cuda" for p in shipped):
        raise UsageError(f"--allow-spills: it is for CUDA, and the target is {args.target}")
