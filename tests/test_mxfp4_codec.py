"""MXFP4 codecs: nibble order, scales, exactness, the policy for scale 255 (F13, F14)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from k3tvm.checkpoint import mxfp4
from k3tvm.errors import CheckpointError
from tests.tolerances import tolerance

# Written out by hand from the format: sign, two exponent bits, one fraction bit.
E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]


def codes_0_to_15_twice() -> np.ndarray:
    return np.tile(np.arange(16, dtype=np.uint8), 2)


def test_nibble_order_of_the_checkpoint_F13() -> None:
    """Byte j holds element 2j low and 2j+1 high: codes 0..15 twice are 10 32 54 76 98 BA DC FE."""
    packed = mxfp4.pack(codes_0_to_15_twice())
    assert packed.tobytes().hex() == "1032547698badcfe" * 2
    assert (mxfp4.unpack(packed) == codes_0_to_15_twice()).all()


def test_nibble_order_of_ggml_F13() -> None:
    """Byte j of a block holds element j low and j+16 high: the same codes are 00 11 .. FF."""
    packed, scale = mxfp4.pack(codes_0_to_15_twice()), np.array([130], np.uint8)
    block = mxfp4.to_ggml_blocks(packed, scale)
    assert block.shape == (1, 17) and block[0, 0] == 130
    assert block[0, 1:].tobytes().hex() == "00112233445566778899aabbccddeeff"


def test_reading_ggml_order_as_ours_is_noticed_F13() -> None:
    block = mxfp4.to_ggml_blocks(mxfp4.pack(codes_0_to_15_twice()), np.array([127], np.uint8))
    wrong = mxfp4.decode(block[0, 1:], np.array([127], np.uint8))
    assert not np.array_equal(wrong, np.array(E2M1 * 2, np.float32))


def test_ggml_round_trip_is_exact_F13() -> None:
    generator = np.random.default_rng(1)
    packed = generator.integers(0, 256, (5, 3, 48), np.uint8)
    scale = generator.integers(0, 255, (5, 3, 3), np.uint8)
    back = mxfp4.from_ggml_blocks(mxfp4.to_ggml_blocks(packed, scale))
    assert np.array_equal(back[0], packed) and np.array_equal(back[1], scale)


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_all_scales_and_codes_against_a_table_F14(dtype: type) -> None:
    """256 scale bytes x 16 codes: 2^(byte-127), not the byte as a number; 255 is NaN."""
    scale = np.arange(256, dtype=np.uint8)[:, None]
    packed = np.tile(mxfp4.pack(codes_0_to_15_twice()), (256, 1))
    with np.errstate(over="ignore"):
        table = np.array(
            [[value * 2.0 ** (byte - 127) for value in E2M1 * 2] for byte in range(255)]
        )
        expected: NDArray[Any] = table.astype(dtype)
    got = mxfp4.decode(packed, scale, dtype)
    assert got.dtype == dtype and np.array_equal(got[:255], expected)
    assert np.array_equal(np.signbit(got[:255]), np.signbit(expected))
    assert np.isnan(got[255]).all()


def test_float32_reaches_infinity_only_at_the_two_largest_scales_F14() -> None:
    scale = np.arange(255, dtype=np.uint8)[:, None]
    packed = np.tile(mxfp4.pack(codes_0_to_15_twice()), (255, 1))
    infinite = ~np.isfinite(mxfp4.decode(packed, scale)).all(axis=1)
    assert np.flatnonzero(infinite).tolist() == [253, 254]


def test_scale_0_is_a_subnormal_and_not_zero_F14() -> None:
    one = mxfp4.decode(mxfp4.pack(np.full(32, 2, np.uint8)), np.zeros(1, np.uint8))
    assert (one == np.float32(2.0**-127)).all() and (one > 0).all()


def test_scale_255_is_refused_with_name_and_count_F14() -> None:
    scale = np.array([[1, 255, 3], [255, 254, 0]], np.uint8)
    with pytest.raises(CheckpointError, match=r"experts\.3\.w1\.weight_scale: 2 scales are 255"):
        mxfp4.check_scales(scale, "experts.3.w1.weight_scale")
    mxfp4.check_scales(scale[:, 2:], "fine")
    mxfp4.check_scales(np.zeros((0, 3), np.uint8), "empty")


def test_encoding_representable_values_is_exact() -> None:
    """Any codes whose group uses the full range come back as they were."""
    generator = np.random.default_rng(2)
    codes = generator.integers(0, 16, (7, 96), np.uint8)
    codes[:, ::32] = 7
    packed, scale = mxfp4.pack(codes), generator.integers(0, 250, (7, 3), np.uint8)
    back = mxfp4.encode(mxfp4.decode(packed, scale))
    assert np.array_equal(back[0], packed) and np.array_equal(back[1], scale)


def test_encoding_takes_the_nearest_value_and_ties_to_even() -> None:
    values = np.zeros(32, np.float32)
    values[:10] = [4.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, -2.5, 5.0, 0.26]
    packed, scale = mxfp4.encode(values)
    assert scale.tolist() == [127]
    got = mxfp4.decode(packed, scale)[:10]
    assert got.tolist() == [4.0, 0.0, 1.0, 1.0, 2.0, 2.0, 4.0, -2.0, 4.0, 0.5]


def test_encoding_error_is_that_of_the_format() -> None:
    values = np.random.default_rng(3).standard_normal((64, 512), np.float32)
    got = mxfp4.decode(*mxfp4.encode(values))
    error = np.abs(got - values).reshape(-1, 32).max(axis=1)
    assert (error / np.abs(values).reshape(-1, 32).max(axis=1)).max() < tolerance("mxfp4_encode")


def test_encoding_zeros_and_tiny_values_stays_finite() -> None:
    values = np.zeros((2, 32), np.float32)
    values[1] = 2.0**-140
    got = mxfp4.decode(*mxfp4.encode(values))
    assert np.isfinite(got).all() and (got[0] == 0).all()
