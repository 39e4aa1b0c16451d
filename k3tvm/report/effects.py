"""What our named device functions do: bytes through their pointers, matrix operations, results.

One row for each function of `k3tvm/cuda/device`; a thread's share of what a warp does together.
"""

from __future__ import annotations

from dataclasses import dataclass

WARP = 32
MMA = 2 * 16 * 8 * 16 // WARP  # m16n8k16
SIMDGROUP = 2 * 8 * 8 * 8 // WARP
COOPERATIVE = 2 * 16 * 16 * 16 // WARP


@dataclass(frozen=True)
class Effect:
    """reads, writes: which argument is a pointer to how many bytes. matrix, flops, integers:
    operations of a thread. known: whether the result is the number of the warp, see `expressions`.
    """

    reads: tuple[tuple[int, int], ...] = ()
    writes: tuple[tuple[int, int], ...] = ()
    matrix: int = 0
    flops: int = 0
    integers: int = 0


NOTHING = Effect()

EFFECTS: dict[str, Effect] = {
    "k3_copy16": Effect(reads=((1, 16),), writes=((0, 16),)),
    "k3_copies_sent": NOTHING,
    "k3_copies_done": NOTHING,
    "k3_mma_bf16": Effect(matrix=MMA),
    "k3_mma_bf16_new": Effect(matrix=MMA),
    "k3_mma_f16": Effect(matrix=MMA),
    "k3_mma_f16_new": Effect(matrix=MMA),
    "k3_mma_f16x3": Effect(matrix=3 * MMA),
    "k3_pack_f16": Effect(flops=2),
    "k3_pack_f16_rest": Effect(flops=4),
    "k3_quad_max": Effect(flops=2),
    "k3_warp_any": NOTHING,
    "__byte_perm": Effect(integers=1),
    "gl_NumSubgroups": NOTHING,
    "gl_SubgroupID": NOTHING,
}
