"""Relax operators with inputs and what they should give: NumPy in float64, or integers."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from k3tvm._tvm import relax

R = relax.op
Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Case:
    """build: Relax expressions -> result; inputs: its arrays; want: the same in NumPy."""

    name: str
    build: Callable[..., Any]
    inputs: tuple[Array, ...]
    want: Callable[..., Any]


_rng = np.random.default_rng(17)


def normal(*shape: int, dtype: str = "float32", scale: float = 1.0) -> Array:
    """Normal numbers."""
    return (_rng.standard_normal(shape) * scale).astype(dtype)


def positive(*shape: int, dtype: str = "float32") -> Array:
    """Numbers from 0.01 up, of order one."""
    return (np.abs(_rng.standard_normal(shape)) + 0.01).astype(dtype)


def integers(low: int, high: int, *shape: int, dtype: str = "int32") -> Array:
    """Integers in [low, high)."""
    return _rng.integers(low, high, shape).astype(dtype)


def exactly(*values: float, dtype: str = "float32") -> Array:
    """These numbers."""
    return np.array(values, dtype)


def erf(x: Array) -> Array:
    """The error function of every element."""
    return np.vectorize(math.erf)(x)


def softmax(x: Array) -> Array:
    """Along the last axis."""
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def rms_norm(x: Array, w: Array) -> Array:
    """Along the last axis."""
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * w


def layer_norm(x: Array, w: Array, b: Array) -> Array:
    """Along the last axis."""
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt((centred * centred).mean(-1, keepdims=True) + 1e-5) * w + b


def conv1d(x: Array, w: Array) -> Array:
    """Of width 3, padded by one on both sides."""
    padded = np.pad(x, ((0, 0), (0, 0), (1, 1)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, 3, axis=-1)
    return np.einsum("nclk,ock->nol", windows, w)


def sigmoid(x: Array) -> Array:
    """Without overflow."""
    return np.where(x < 0, np.exp(np.minimum(x, 0)), 1.0) / (1.0 + np.exp(-np.abs(x)))


LARGE = exactly(-100, -20, -1e-3, 0, 1e-3, 20, 100)
HALVES = exactly(-2.5, -1.5, -0.5, 0.5, 1.5, 2.5, 3.49)
SIGNED, DIVISORS = (
    integers(-50, 50, 41),
    integers(1, 9, 41) * exactly(*[1, -1] * 20, 1).astype("int32"),
)
MASK = normal(7, 33) > 0


def _elementwise() -> list[Case]:
    unary: dict[str, tuple[Any, Callable[..., Any], Array]] = {
        "exp": (R.exp, np.exp, normal(4, 33, scale=5)),
        "exp_large": (R.exp, np.exp, exactly(-80, -60, 60, 80, 88)),
        "log": (R.log, np.log, positive(33)),
        "log_near_one": (R.log, np.log, exactly(0.999, 0.9999, 1, 1.0001, 1.001)),
        "sqrt": (R.sqrt, np.sqrt, positive(7, 1)),
        "rsqrt": (R.rsqrt, lambda x: 1 / np.sqrt(x), positive(1, 33)),
        "tanh": (R.tanh, np.tanh, normal(7, 7)),
        "tanh_large": (R.tanh, np.tanh, LARGE),
        "sigmoid": (R.sigmoid, sigmoid, normal(33, 4)),
        "sigmoid_large": (R.sigmoid, sigmoid, LARGE),
        "erf": (R.erf, erf, normal(4, 40, scale=2)),
        "gelu": (R.nn.gelu, lambda x: x * (1 + erf(x / math.sqrt(2))) / 2, normal(4, 40)),
        "silu": (R.nn.silu, lambda x: x * sigmoid(x), normal(2, 33)),
        "sin": (R.sin, np.sin, normal(33)),
        "cos": (R.cos, np.cos, normal(33)),
        "abs": (R.abs, np.abs, normal(33)),
        "negative": (R.negative, np.negative, normal(33)),
        "floor": (R.floor, np.floor, normal(33, scale=3)),
        "ceil": (R.ceil, np.ceil, normal(33, scale=3)),
        "round": (R.round, np.round, HALVES),
        "sign": (R.sign, np.sign, normal(33)),
        "clip": (lambda x: R.clip(x, -0.5, 0.5), lambda x: np.clip(x, -0.5, 0.5), normal(1)),
        "relu": (R.nn.relu, lambda x: np.maximum(x, 0), normal(1, 4)),
    }
    cases = [Case(n, build, (x,), want) for n, (build, want, x) in unary.items()]
    return cases + [
        Case("add", R.add, (normal(5, 33), normal(33)), np.add),
        Case("subtract", R.subtract, (normal(1, 7), normal(5, 1)), np.subtract),
        Case("multiply", R.multiply, (normal(2, 1, 7), normal(3, 1)), np.multiply),
        Case("divide", R.divide, (normal(33), positive(33)), np.divide),
        Case("maximum", R.maximum, (normal(33), normal(33)), np.maximum),
        Case("minimum", R.minimum, (normal(33), normal(33)), np.minimum),
        Case("power", R.power, (positive(33), normal(33, scale=3)), np.power),
        Case("power_sign", R.power, (exactly(-2, -2, -3, 0, 5), exactly(2, 3, -1, 0, 0)), np.power),
        Case("where", R.where, (MASK, normal(7, 33), normal(7, 33)), np.where),
        Case("logical_and", R.logical_and, (MASK, ~MASK | (MASK[::-1])), np.logical_and),
        Case("logical_not", R.logical_not, (MASK,), np.logical_not),
        Case("less", R.less, (normal(33), normal(33)), np.less),
        Case("equal", R.equal, (integers(0, 3, 33), integers(0, 3, 33)), np.equal),
    ]


def _half() -> list[Case]:
    def half(*shape: int) -> Array:
        return normal(*shape, dtype="float16")

    tiny = exactly(1e-8, 3e-8, 6e-8, 1e-7, 6.1e-5, 65519, 65520, -1e6, 0.1)
    return [
        Case("add_f16", R.add, (half(5, 33), half(5, 33)), np.add),
        Case("silu_f16", R.nn.silu, (half(4, 40),), lambda x: x * sigmoid(x)),
        Case("tanh_f16", R.tanh, (half(33),), np.tanh),
        Case("exp_f16", R.exp, (half(33),), np.exp),
        Case("max_f16", lambda x: R.max(x, 1), (half(4, 33),), lambda x: x.max(1)),
        Case("take_f16", lambda x, i: R.take(x, i, 0), (half(20, 8), integers(0, 20, 6)), _take),
        Case("to_f32", lambda x: R.astype(x, "float32"), (half(7, 7) * np.float16(1e-7),), _same),
        Case("to_f16", lambda x: R.astype(x, "float16"), (tiny,), lambda x: x.astype("float16")),
        Case("rms_norm_f16", _rms, (half(3, 64), half(64)), rms_norm),
        Case(
            "matmul_f16",
            lambda a, b: R.matmul(a, b, out_dtype="float32"),
            (half(40, 64), half(64, 48)),
            np.matmul,
        ),
    ]


def _same(x: Array) -> Array:
    return x


def _take(x: Array, index: Array) -> Array:
    return np.take(x, index.astype("int64"), 0)


def _rms(x: Any, w: Any) -> Any:
    return R.nn.rms_norm(x, w, [-1], 1e-5)


def _integer() -> list[Case]:
    def wide(*shape: int) -> Array:
        return integers(-(2**40), 2**40, *shape, dtype="int64")

    three, seven = relax.const(3, "int32"), relax.const(7, "int32")
    bytes_ = integers(0, 256, 41, dtype="uint8")
    return [
        Case("floor_divide", R.floor_divide, (SIGNED, DIVISORS), np.floor_divide),
        Case("mod", R.mod, (SIGNED, DIVISORS), np.fmod),  # it has the sign of the dividend
        Case("floor_mod", R.floor_mod, (SIGNED, DIVISORS), np.mod),
        Case("add_i64", R.add, (wide(3, 7), wide(3, 7)), np.add),
        Case("multiply_i64", lambda x: R.multiply(x, x), (wide(9) >> 12,), lambda x: x * x),
        Case("floor_divide_i64", R.floor_divide, (wide(9), wide(9) | 1), np.floor_divide),
        Case(
            "shift_and",
            lambda x: R.bitwise_and(R.right_shift(x, three), seven),
            (integers(-(2**30), 2**30, 33),),
            lambda x: (x >> 3) & 7,
        ),
        Case("bitwise_xor", R.bitwise_xor, (SIGNED, DIVISORS), np.bitwise_xor),
        Case("add_i8", R.add, (bytes_.view("int8"), bytes_.view("int8")), np.add),
        Case("widen_u8", lambda x: R.astype(x, "float32"), (bytes_,), lambda x: x.astype("f8")),
        Case("widen_i8", lambda x: R.astype(x, "int32"), (bytes_.view("int8"),), _same),
        Case(
            "to_i8",
            lambda x: R.astype(x, "int8"),
            (normal(33, scale=40).clip(-127, 127),),
            lambda x: np.trunc(x).astype("int8"),
        ),
        Case("to_bool", lambda x: R.astype(x, "bool"), (integers(0, 2, 33),), lambda x: x != 0),
        Case("from_bool", lambda x: R.astype(x, "float32"), (MASK,), lambda x: x.astype("f8")),
        Case("sum_i32", lambda x: R.sum(x, -1), (integers(-99, 99, 5, 130),), lambda x: x.sum(-1)),
    ]


def _reductions() -> list[Case]:
    row = normal(4, 50)
    return [
        Case("sum", lambda x: R.sum(x, -1), (normal(9, 130),), lambda x: x.sum(-1)),
        Case("sum_first", lambda x: R.sum(x, 0), (normal(33, 7),), lambda x: x.sum(0)),
        Case("mean", lambda x: R.mean(x, -1), (normal(2, 33),), lambda x: x.mean(-1)),
        Case("max", lambda x: R.max(x, -1), (normal(1, 33),), lambda x: x.max(-1)),
        Case("min", lambda x: R.min(x, [0, 1]), (normal(7, 33),), lambda x: x.min()),
        Case("prod", lambda x: R.prod(x, -1), (positive(4, 7),), lambda x: x.prod(-1)),
        Case("argmax", lambda x: R.argmax(x, -1), (row,), lambda x: x.argmax(-1)),
        Case("argmin", lambda x: R.argmin(x, -1), (row,), lambda x: x.argmin(-1)),
        Case("softmax", lambda x: R.nn.softmax(x, -1), (normal(7, 100, scale=9),), softmax),
        Case("softmax_one", lambda x: R.nn.softmax(x, -1), (normal(7, 1),), softmax),
        Case("rms_norm", _rms, (normal(3, 33), normal(33)), rms_norm),
        Case("rms_norm_long", _rms, (normal(1, 2048), normal(2048)), rms_norm),
        Case(
            "layer_norm",
            lambda x, w, b: R.nn.layer_norm(x, w, b, [-1]),
            (normal(3, 64), normal(64), normal(64)),
            layer_norm,
        ),
        Case(
            "topk",
            lambda x: R.topk(x, 3)[0],
            (normal(4, 40),),
            lambda x: -np.sort(-x, -1)[:, :3],
        ),
        Case("matmul", R.matmul, (normal(2, 5, 33), normal(2, 33, 7)), np.matmul),
        Case("matmul_one", R.matmul, (normal(1, 1), normal(1, 1)), np.matmul),
        Case("matmul_tiled", R.matmul, (normal(70, 65), normal(65, 67)), np.matmul),
        Case(
            "gemv",
            lambda x, w: R.matmul(x, R.permute_dims(w)),
            (normal(1, 256), normal(129, 256)),
            lambda x, w: x @ w.T,
        ),
        Case(
            "conv1d",
            lambda x, w: R.nn.conv1d(x, w, padding=1),
            (normal(1, 4, 21), normal(7, 4, 3)),
            conv1d,
        ),
    ]


def _shapes() -> list[Case]:
    return [
        Case(
            "transpose",
            lambda x: R.permute_dims(x, [2, 0, 1]),
            (normal(4, 5, 7),),
            lambda x: x.transpose(2, 0, 1),
        ),
        Case("reshape", lambda x: R.reshape(x, (7, 20)), (normal(4, 5, 7),), _reshape),
        Case("concat", lambda a, b: R.concat([a, b], 1), (normal(3, 4), normal(3, 33)), _concat),
        Case(
            "split",
            lambda x: R.add(*[R.split(x, 3, 1)[i] for i in (0, 2)]),
            (normal(4, 33),),
            lambda x: x[:, :11] + x[:, 22:],
        ),
        Case(
            "strided_slice",
            lambda x: R.strided_slice(x, [1], [1], [9], [2]),
            (normal(3, 12),),
            lambda x: x[:, 1:9:2],
        ),
        Case("take", lambda x, i: R.take(x, i, 0), (normal(33, 4), integers(0, 33, 2, 7)), _take),
        Case("tile", lambda x: R.tile(x, (2, 3)), (normal(2, 7),), lambda x: np.tile(x, (2, 3))),
        Case(
            "broadcast",
            lambda x: R.broadcast_to(x, (4, 33)),
            (normal(1, 33),),
            lambda x: np.broadcast_to(x, (4, 33)),
        ),
        Case("triu", lambda x: R.triu(x, 1), (normal(7, 7),), lambda x: np.triu(x, 1)),
        Case("flip", lambda x: R.flip(x, 1), (normal(4, 7),), lambda x: x[:, ::-1]),
    ]


def _reshape(x: Array) -> Array:
    return x.reshape(7, 20)


def _concat(a: Array, b: Array) -> Array:
    return np.concatenate([a, b], 1)


# R.cumsum is left out: TVM's schedule of it for GPUs reads neighbours that another thread may
# already have written, with no barrier between. k3tvm has scans of its own.
CASES = _elementwise() + _half() + _integer() + _reductions() + _shapes()
