"""What our named device functions do: bytes through their pointers, operations of a thread.

One row for each function that kernels call, from `k3tvm/cuda/device`, and for those of cooperative
matrices. What a warp does together is shared out to its threads.
"""

from __future__ import annotations

from dataclasses import dataclass

WARP = 32
MMA = 2 * 16 * 8 * 16 // WARP  # m16n8k16
COOPERATIVE = 2 * 16 * 16 * 16 // WARP


@dataclass(frozen=True)
class Effect:
    """reads, writes: which argument points to how many bytes. matrix, flops, integers: operations
    of a thread, by the kinds of `Traffic`.
    """

    reads: tuple[tuple[int, int], ...] = ()
    writes: tuple[tuple[int, int], ...] = ()
    matrix: int = 0
    flops: int = 0
    integers: int = 0


NOTHING = Effect()

EFFECTS: dict[str, Effect] = {
    # copy.cuh
    "k3_copy16": Effect(reads=((1, 16),), writes=((0, 16),)),
    "k3_copy4": Effect(reads=((1, 4),), writes=((0, 4),)),
    "k3_copies_sent": NOTHING,
    "k3_copies_done": NOTHING,
    # mma.cuh
    "k3_mma_bf16": Effect(matrix=MMA),
    "k3_mma_bf16_new": Effect(matrix=MMA),
    "k3_mma_f16": Effect(matrix=MMA),
    "k3_mma_f16_new": Effect(matrix=MMA),
    "k3_low_halves": Effect(integers=1),
    "k3_high_halves": Effect(integers=1),
    # kda.cuh
    "k3_mma_f16x3": Effect(matrix=3 * MMA),
    "k3_pack_f16": Effect(flops=2),
    "k3_pack_f16_rest": Effect(flops=4),
    "k3_quad_max": Effect(integers=2),
    "k3_warp_any": NOTHING,
    "k3_of_lane": Effect(integers=1),
    # mxfp4.cuh; its products are two of bytes, m16n8k32, at twice the rate of 16 bits
    "k3_pick_bytes": Effect(integers=1),
    "k3_e8m0": Effect(integers=3),
    "k3_e2m1_table": Effect(integers=2),
    "k3_e2m1_bytes": Effect(integers=14),
    "k3_e2m1_dots": Effect(matrix=2 * MMA, flops=4),
    "k3_stream16": Effect(reads=((1, 16),), writes=((0, 16),)),
    # CUDA's own
    "__byte_perm": Effect(integers=1),
    # cooperative matrices of Vulkan
    "k3_coopmat_fill": NOTHING,
    "k3_coopmat_load": NOTHING,
    "k3_coopmat_store": NOTHING,
    "k3_coopmat_mma": Effect(matrix=COOPERATIVE),
    "gl_NumSubgroups": NOTHING,
    "gl_SubgroupID": NOTHING,
}
