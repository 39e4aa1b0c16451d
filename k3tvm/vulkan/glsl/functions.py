"""GLSL texts of float32 functions that drivers compute too roughly, or only for some arguments.

Vulkan allows exp an error of 3 + 2|x| units of the last place, log one of 2^-21 near 1 whatever its
value, tanh what its exponentials give (NaN for large x), and has no erf. Measured on lavapipe in
units of the last place, theirs and ours: exp 64 and 4, log near 1 60000 and 2, tanh 2, erf 3.
"""

from __future__ import annotations

import math

from k3tvm.vulkan.glsl.fits import fitted, horner

# As functions of z = x^2: (tanh(x) / x - 1) / x^2 on |x| < 0.625, erf(x) / x on |x| < 1, and
# (atanh(x) / x - 1) / x^2 on |x| < 0.172. As a function of t = x - 2.5: log(erfc(x)) for x in
# [1, 4], at whose end erf is 1 in float32.
TANH_NEAR = fitted(lambda z: (math.tanh(z**0.5) / z**0.5 - 1.0) / z, 6, 1e-6, 0.391)
ERF_NEAR = fitted(lambda z: math.erf(z**0.5) / z**0.5, 8, 1e-9, 1.0)
ERF_FAR = fitted(lambda t: math.log(math.erfc(t + 2.5)), 10, -1.5, 1.5)
ATANH = fitted(lambda z: (math.atanh(z**0.5) / z**0.5 - 1.0) / z, 4, 1e-6, 0.0296)

LOG2_E = math.log2(math.e)
LOG2_E_HIGH = 2953.0 / 2048.0  # twelve bits: exact times another twelve
LN_2_HIGH = 355.0 / 512.0  # exact times any exponent
LN_2_LOW = math.log(2.0) - LN_2_HIGH

# exp2 of the rounded product, corrected by what rounding took away: x is cut into two halves whose
# products are exact, as fma need not be. Infinity and zero need no correction.
EXP = f"""float k3_exp(float x) {{
  precise float y = x * {LOG2_E:.9g};
  precise float high = uintBitsToFloat(floatBitsToUint(x) & 0xfffff000u);
  precise float rest = (high * {LOG2_E_HIGH} - y) + (x - high) * {LOG2_E_HIGH};
  float e = exp2(y), r = fma(x, {LOG2_E - LOG2_E_HIGH:.9g}, rest);
  return (e > 0.0 && e <= 3.40282347e38) ? fma(e, r * {math.log(2.0):.9g}, e) : e;
}}"""

# x = m * 2^n with m in [0.71, 1.42): n ln 2 + 2 atanh((m - 1) / (m + 1)); what is not a normal
# positive number is left to the driver.
LOG = f"""float k3_log(float x) {{
  if (!(x >= 1.17549435e-38 && x <= 3.40282347e38)) return log(x);
  int n = (floatBitsToInt(x) - 0x3f350000) >> 23;
  float f = intBitsToFloat(floatBitsToInt(x) - (n << 23)) - 1.0;
  float s = f / (2.0 + f), z = s * s, e = float(n);
  precise float small = fma(s * z, 2.0 * {horner(ATANH, "z")}, e * {LN_2_LOW:.9g});
  return fma(e, {LN_2_HIGH}, fma(s, 2.0, small));
}}"""

POW = """float k3_pow(float x, float y) {
  float size = k3_exp(y * k3_log(abs(x)));
  if (y == 0.0 || x == 1.0) return 1.0;
  if (x == 0.0) return y > 0.0 ? 0.0 : uintBitsToFloat(0x7f800000u);
  if (x > 0.0) return size;
  float odd = abs(y - 2.0 * floor(y * 0.5));
  return odd == 0.0 ? size : (odd == 1.0 ? -size : uintBitsToFloat(0x7fc00000u));
}"""

TANH = f"""float k3_tanh(float x) {{
  float a = abs(x), z = x * x;
  float near = fma(x * z, {horner(TANH_NEAR, "z")}, x);
  float far = 1.0 - 2.0 / (k3_exp(2.0 * a) + 1.0);
  return a < 0.625 ? near : (x < 0.0 ? -far : far);
}}"""

ERF = f"""float k3_erf(float x) {{
  float a = abs(x), z = x * x, t = (a > 4.0 ? 4.0 : a) - 2.5;
  float near = x * {horner(ERF_NEAR, "z")};
  float far = 1.0 - k3_exp({horner(ERF_FAR, "t")});
  return a < 1.0 ? near : (x < 0.0 ? -far : far);
}}"""

SIGMOID = "float k3_sigmoid(float x) { return 1.0 / (1.0 + k3_exp(-x)); }"
# By their bits: drivers may take it for granted that there is no NaN.
ISNAN = "bool k3_isnan(float x) { return (floatBitsToUint(x) & 0x7fffffffu) > 0x7f800000u; }"
ISINF = "bool k3_isinf(float x) { return (floatBitsToUint(x) & 0x7fffffffu) == 0x7f800000u; }"
