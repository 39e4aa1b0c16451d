"""F: a benchmark that nobody could run, or that compares different things."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"
SCRIPT = FOLDER / "kda_vs_fla.py"
SMALL = ["--heads", "2", "--tokens", "70", "--dim", "16", "--sequences", "1,3"]


@pytest.fixture(scope="module", autouse=True)
def _beside_the_scripts() -> None:
    sys.path.insert(0, str(FOLDER))


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)


def has_gpu() -> bool:
    return Path("/dev/nvidiactl").exists()


@pytest.mark.skipif(has_gpu(), reason="asks what a machine without a GPU says")
def test_without_a_gpu_it_says_so_in_one_line():
    done = run()
    assert done.returncode == 2
    assert done.stdout == ""
    assert len(done.stderr.strip().splitlines()) == 1
    assert "driver" in done.stderr


@pytest.mark.parametrize("act", ["float32", "bfloat16"])
def test_our_kernels_agree_with_a_plain_recurrence(act):
    done = run("--device", "cuda-emulated", "--check", "--act", act, *SMALL)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("agrees") == 3
    assert "DIFFERS" not in done.stdout


def test_emulation_is_not_timed():
    done = run("--device", "cuda-emulated", *SMALL)
    assert done.returncode == 2
    assert "no speed" in done.stderr


def test_sizes_of_the_measurement():
    import kda_vs_fla

    found = [c.name for c in kda_vs_fla.cases(kda_vs_fla.parse([]))]
    assert found == [
        f"{kind} H={h} B={b} T={t} K=V=128"
        for h in (96, 32)
        for kind, b, t in [
            ("prefill", 1, 8192),
            ("decode", 1, 1),
            ("decode", 16, 1),
            ("decode", 64, 1),
        ]
    ]


def test_least_bytes_by_hand():
    from kda_inputs import Case

    case = Case(heads=3, dim=4, tokens=5, sequences=2)
    rows = 2 * 5 * 3
    vectors = rows * (4 * 4 + 4 * 4 + 4 * 4 + 4 * 4)  # q, k, v, out
    decay, beta, state = rows * 4 * 4, rows * 4, 2 * 3 * 4 * 4 * 4
    assert case.least_bytes(4) == vectors + decay + beta + 2 * state


def test_inputs_are_bfloat16_numbers_and_repeat():
    from kda_inputs import Case, make_inputs

    x, again = (make_inputs(Case(2, 8, 3, 1)) for _ in range(2))
    for name in ("q", "k", "v", "beta"):
        values = getattr(x, name)
        assert not (values.view(np.uint32) & 0xFFFF).any()
        assert np.array_equal(values, getattr(again, name))
    assert x.log_decay.min() >= -5
    assert x.log_decay.max() <= 0


def test_recurrence_is_that_of_the_reference():
    """The plain torch loop and the float64 reference of the operator are the same function."""
    torch = pytest.importorskip("torch")
    from kda_inputs import Case, distance, make_inputs, recurrence

    from k3tvm.relax_models.operators import KdaChunk
    from k3tvm.schedules.registry import reference_of

    case = Case(2, 8, 5, 1)
    x = make_inputs(case)
    op = KdaChunk(2, 8, 8, "float32")
    flat = [a.reshape(5, -1) for a in (x.q, x.k, x.v)]
    args = SimpleNamespace(
        qkv=np.concatenate(flat, axis=1),
        decay=np.exp(x.log_decay).reshape(5, -1),
        beta=x.beta.reshape(5, -1),
        seqs=np.array([[0, 0, 5, 0]], np.int32),
        state=x.state,
    )
    want = reference_of(op)(op, args)
    out, state = recurrence(torch, x)
    assert distance(out.reshape(5, -1), want["out"]) < 1e-12
    assert distance(state, want["state"]) < 1e-12


def test_rounds_are_taken_in_turn():
    """Each round measures every work once: ours, theirs, ours, theirs."""
    from cuda_timing import in_turn

    order: list[str] = []

    class Clock:
        def seconds(self, work, calls=1):
            for _ in range(calls):
                work()
            return len(order)

    works = {"a": lambda: order.append("a"), "b": lambda: order.append("b")}
    in_turn(Clock(), works, rounds=3, calls=1)
    assert order == ["a"] * 3 + ["b"] * 3 + ["a", "b"] * 3
