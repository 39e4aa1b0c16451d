// Tensor-core products of float32 class for the KDA state, and what a warp's four-lane rows share.
//
// A float32 number times a power of two is split into two float16 parts, 22 bits together; three
// products (high high, high low, low high) of m16n8k16 add up in float32. Each function has two
// bodies: PTX, and plain C++ for emulation. All 32 lanes of a warp call them together.

#ifdef K3_EMULATED

__device__ __forceinline__ float k3_f16_value(unsigned pair, int half) {
  unsigned short bits = (unsigned short)(half ? pair >> 16 : pair & 0xffffu);
  _Float16 value;
  __builtin_memcpy(&value, &bits, 2);
  return (float)value;
}

__device__ __forceinline__ unsigned k3_f16_bits(float x) {
  _Float16 value = (_Float16)x;
  unsigned short bits;
  __builtin_memcpy(&bits, &value, 2);
  return bits;
}

// (x, y) as float16, x in the low half
__device__ __forceinline__ unsigned k3_pack_f16(float x, float y) {
  return k3_f16_bits(x) | k3_f16_bits(y) << 16;
}

// What k3_pack_f16 left over of (x, y), as float16
__device__ __forceinline__ unsigned k3_pack_f16_rest(float x, float y) {
  unsigned high = k3_pack_f16(x, y);
  return k3_pack_f16(x - k3_f16_value(high, 0), y - k3_f16_value(high, 1));
}

// c [16, 8] += a [16, 16] b [16, 8], fragments as mma.m16n8k16 has them; b: two high words, then
// two low ones
__device__ __forceinline__ void k3_mma_f16x3(float* c, const unsigned* high, const unsigned* low,
                                             const unsigned* b) {
  struct Words {
    unsigned high[4], low[4], b[4];
  } mine = {{high[0], high[1], high[2], high[3]},
            {low[0], low[1], low[2], low[3]},
            {b[0], b[1], b[2], b[3]}};
  const Words* all = k3emu::everyone(mine);
  int lane = threadIdx.x % 32, row = lane / 4, column = lane % 4 * 2;
  for (int e = 0; e < 4; ++e) {
    double sum = 0;
    int half = e / 2, n = column + e % 2;
    for (int k = 0; k < 16; ++k) {
      const Words& of_a = all[row * 4 + k % 8 / 2];
      const Words& of_b = all[n * 4 + k % 8 / 2];
      int at = half + k / 8 * 2, word = k / 8;
      float a0 = k3_f16_value(of_a.high[at], k % 2), a1 = k3_f16_value(of_a.low[at], k % 2);
      float b0 = k3_f16_value(of_b.b[word], k % 2), b1 = k3_f16_value(of_b.b[word + 2], k % 2);
      sum += (double)a0 * b1 + (double)a1 * b0 + (double)a0 * b0;
    }
    c[e] += (float)sum;
  }
}

#else

__device__ __forceinline__ unsigned k3_pack_f16(float x, float y) {
  unsigned pair;
  asm("cvt.rn.f16x2.f32 %0, %2, %1;" : "=r"(pair) : "f"(x), "f"(y));
  return pair;
}

__device__ __forceinline__ unsigned k3_pack_f16_rest(float x, float y) {
  float u, v;
  asm("{.reg .f16 p, q; mov.b32 {p, q}, %2; cvt.f32.f16 %0, p; cvt.f32.f16 %1, q;}"
      : "=f"(u), "=f"(v)
      : "r"(k3_pack_f16(x, y)));
  return k3_pack_f16(x - u, y - v);
}

__device__ __forceinline__ void k3_mma_f16_once(float* c, const unsigned* a, unsigned b0,
                                                unsigned b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ void k3_mma_f16x3(float* c, const unsigned* high, const unsigned* low,
                                             const unsigned* b) {
  k3_mma_f16_once(c, high, b[2], b[3]);
  k3_mma_f16_once(c, low, b[0], b[1]);
  k3_mma_f16_once(c, high, b[0], b[1]);
}

#endif

// The largest of the four lanes that hold a row of a fragment
__device__ __forceinline__ int k3_quad_max(int x) {
  int other = __shfl_xor_sync(0xffffffffu, x, 1);
  x = x > other ? x : other;
  other = __shfl_xor_sync(0xffffffffu, x, 2);
  return x > other ? x : other;
}

// Whether x is not zero in any lane of the warp
__device__ __forceinline__ int k3_warp_any(int x) {
  return __ballot_sync(0xffffffffu, x != 0) != 0;
}

// The number that a lane of the warp has
__device__ __forceinline__ float k3_of_lane(float x, int lane) {
  return __shfl_sync(0xffffffffu, x, lane);
}
