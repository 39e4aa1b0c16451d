"""Sizes of a product on CUDA's tensor cores: what a workgroup and its warps do, and memory."""

from __future__ import annotations

from dataclasses import dataclass

from k3tvm.relax_models.operators import WeightFormat
from k3tvm.schedules.gpu.products import BLOCK
from k3tvm.schedules.gpu.products_mma_weights import FORMS
from k3tvm.schedules.gpu.products_split import STEP_WORDS, Split
from k3tvm.schedules.profile import GpuProfile

WARP = 32
COLUMNS = 8  # rows of x in a fragment
MOST_STAGES = 4
RESERVE = 1024  # bytes of shared memory beside the pool
PAD = 4  # words after the results of a row of x


@dataclass(frozen=True)
class Shape:
    """A tile: `rows` weight rows times `tokens` rows of x, by `down` x `across` warps.

    resident: workgroups that a multiprocessor is to have registers for (`grid.resident`).
    """

    rows: int
    tokens: int
    down: int
    across: int
    resident: int = 2

    @property
    def threads(self) -> int:
        """Threads of the workgroup."""
        return WARP * self.down * self.across

    @property
    def columns(self) -> int:
        """Fragments of 8 rows of x of one warp."""
        return self.tokens // COLUMNS // self.across

    @property
    def warp_rows(self) -> int:
        """Weight rows of one warp: 64, so that it has four fragments of 16."""
        return self.rows // self.down


@dataclass(frozen=True)
class Plan:
    """How products of one operator are made in one shape."""

    shape: Shape
    fmt: WeightFormat
    split: Split
    parts: int  # of x that are multiplied; the rows may have been prepared with more
    shared_bytes: int

    @property
    def x_words(self) -> int:
        """Words of a stage that hold x: [part][row][16]."""
        return self.parts * self.shape.tokens * STEP_WORDS

    @property
    def stage_words(self) -> int:
        """Words of a stage."""
        return self.x_words + self.shape.rows // BLOCK * FORMS[self.fmt].block_words

    @property
    def stages(self) -> int:
        """Steps of k in shared memory at a time."""
        return min(MOST_STAGES, (self.shared_bytes - RESERVE) // 4 // self.stage_words)

    @property
    def rounds(self) -> int:
        """Into how many parts results are divided that pass through the same memory."""
        rounds = 1
        while self.area_words(rounds) > self.stages * self.stage_words:
            rounds *= 2
        return rounds

    def area_words(self, rounds: int) -> int:
        """Words of a round's results: [row of x][weight row]."""
        return self.shape.tokens // rounds * (self.shape.rows + PAD)

    @property
    def in_place(self) -> bool:
        """Whether sums stay in the tensor cores all along k."""
        return self.parts == 1 and not self.split.scaled

    @property
    def fits(self) -> bool:
        """Whether the copies can be ahead of the products."""
        return self.stages >= 2 and self.shape.columns % self.rounds == 0


def able(p: GpuProfile, fmt: WeightFormat, most: int = 128) -> bool:
    """Whether a device multiplies weights of a format this way, by up to `most` threads."""
    return "tensor_core" in p.features and fmt in FORMS and p.threads >= most
