"""The one table of tolerances: name -> (largest error accepted, reason). Never loosened to pass."""

from __future__ import annotations

# Relative errors are max |got - want| / max |want| unless the reason says otherwise.
TOLERANCES: dict[str, tuple[float, str]] = {
    "rms_norm": (3e-7, "a few float32 roundings of values of order one; the sum is blocked"),
    "glu": (
        1.5e-6,
        "product of a tanh, a sigmoid and a squashed factor, each a few float32 steps from exact; "
        "the argument of the sigmoid near -60 alone adds none, the tests stop there",
    ),
    "expert_combine": (1e-6, "up to 16 float32 products added in order, then the norm's roundings"),
    "attn_res_norm": (
        4e-6,
        "scores of order ten carry a few float32 steps into the exponent of the softmax; the sum "
        "of up to 20 sources and the norm add a few more",
    ),
    "router": (1e-6, "a float32 sigmoid, a sum of up to 16 of them, one division"),
    "mla_attention": (
        5e-6,
        "scores of size 10 to 100 carry float32 rounding (up to 1e-5 absolute) into an exponent",
    ),
    "sample_border": (
        2e-6,
        "of the whole mass: float32 sums of up to 163840 probabilities, in parts; a draw this near "
        "to a border between two tokens may give either",
    ),
    "sigmoid_gate": (5e-7, "a float32 sigmoid and one product"),
    "exp_ulp": (1.0, "units of the last place, not relative: one rounding and a short polynomial"),
    "sigmoid_ulp": (2.0, "units of the last place: exp, then a small correction (measured 1.7)"),
    "silu_ulp": (3.0, "units of the last place: sigmoid and one product (measured 2.4)"),
    "tanh_ulp": (2.5, "units of the last place: exp - 1, one sum, one division (measured 2.3)"),
    "softplus_ulp": (2.2, "units of the last place: exp, then a small correction (measured 2.1)"),
    "gpu_ulp": (
        0.2,
        "units of the last place, on top of the five above: compilers for GPUs add in another "
        "order than is written (measured: exp 1.03, softplus 2.24)",
    ),
    "interpolation": (2e-8, "error of a polynomial alone, a third of a float32 rounding"),
    "short_conv": (3e-7, "four float32 products and a SiLU"),
    "kda_gate": (5e-7, "float32 rounding of the argument of exp, which is of order one"),
    "gated_rms_norm": (5e-7, "a blocked float32 sum, three products and a sigmoid"),
    "kda": (
        2e-6,
        "float32 recurrence, state per slot; specification 9 has 1.4e-6 to 4.9e-6 for the chunk "
        "form in float32, here decays are multiplied instead (measured 5e-7 at every decay)",
    ),
    "kda_drift": (2e-6, "4096 float32 updates of a state that forgets slowly (measured 4e-7)"),
    "bfloat16": (
        8e-3,
        "two bfloat16 steps (2^-8) of the largest value: float32 against float64 before the "
        "rounding may land on the neighbouring bfloat16",
    ),
    "float16": (
        1e-3,
        "two float16 steps (2^-11) of the largest value, for the same reason as in bfloat16",
    ),
    "product_sum": (
        4e-7,
        "of the sum of |w| |x| and the addends, not of the result: float32 sums in slices of k, or "
        "24-bit fixed point (2^-24 of the largest of 32 x each); K from 1 to 4096. Measured 3.6e-7 "
        "where one MXFP4 group outweighs the others, 2e-7 elsewhere. No bound for all inputs: "
        "where one product dominates a sum in float32, it can be 7e-7",
    ),
    "model_ratio": (
        2.0,
        "RMS error of a whole model over that of torch in the same precision, both against float64 "
        "with the same experts: what the format costs, and as much again (measured 0.7 to 1.4)",
    ),
    "batch": (
        5e-5,
        "of the largest logit: kernels for few and for many rows sum in another order, and tiny "
        "random models amplify that (reference_float32 has the same cause; measured 1e-5)",
    ),
    "devices": (
        1e-9,
        "NMSE of two devices in float32, same experts: other orders of summation (measured 1e-11)",
    ),
    "reference_float64": (1e-12, "float64 in another order of summation, a whole model long"),
    "reference_chunk": (1e-11, "float64 chunk form: sums of log decays cancel before exp"),
    "reference_float32": (
        1e-4,
        "plain torch float32, routing pinned; random tiny models amplify rounding (measured 1e-5)",
    ),
    "reference_bfloat16": (2e-2, "NMSE of the official rounding points (measured 5e-3)"),
    "oracle_float64": (1e-24, "NMSE of two float64 programs (measured 1e-29)"),
    "oracle_float32": (1e-10, "NMSE of a float32 peer, near our own float32 (measured 1e-11)"),
    "mxfp4_encode": (
        0.2500001,
        "half a step of the group's largest value: it is scaled into [4, 8), the last code is 6",
    ),
    "example_spread": (0.03, "statistics of some 1e4 random weights (measured 0.01)"),
    "vulkan_float32": (
        2e-6,
        "operators of Relax on a Vulkan driver: sums of up to 256 products, exponentials of up to "
        "4 units of the last place",
    ),
    "vulkan_ulp": (
        6.0,
        "units of the last place: exp2 of the driver (3.3), rounding, and for sigmoid a sum and a "
        "division (measured exp 3.6, log 2, tanh 2.1, erf 2.6, sigmoid 5.6)",
    ),
    "vulkan_float16": (
        2e-3,
        "two float16 steps (2^-10): inputs and every intermediate are rounded",
    ),
}


def tolerance(name: str, act: str = "float32") -> float:
    """The bound for a check; results rounded to 16 bits share the entry of their dtype."""
    return TOLERANCES[name if act == "float32" else act][0]
