// Products of tensor cores: c [16, 8] += a [16, 16] b [16, 8] in float32, of 16-bit numbers.
//
// Fragments are those of mma.m16n8k16. Lane 4 g + t holds, two numbers a word, of a the rows g and
// g + 8 at k = 2 t, 2 t + 1 and, in the words 2 and 3, at k + 8; of b the column g at the same k; of
// c the columns 2 t, 2 t + 1 of the rows g and g + 8. All 32 lanes of a warp call together. The
// functions whose names end in _new begin a sum. Tensor cores add in an order of their own and
// truncate; the plain bodies round once.

#ifdef K3_EMULATED

__device__ __forceinline__ float k3_float_of_bits(unsigned bits) {
  float value;
  __builtin_memcpy(&value, &bits, 4);
  return value;
}

__device__ __forceinline__ float k3_float_of_bf16(unsigned bits) {
  return k3_float_of_bits(bits << 16);
}

// Float16 with its subnormals; the multiplication moves the exponent to where float32 has it
__device__ __forceinline__ float k3_float_of_f16(unsigned bits) {
  unsigned sign = (bits & 0x8000u) << 16, size = (bits & 0x7fffu) << 13;
  if (size >= 0x0f800000u) return k3_float_of_bits(sign | 0x70000000u | size);
  return k3_float_of_bits(sign) + k3_float_of_bits(size) * (sign ? -0x1p112f : 0x1p112f);
}

struct k3_mma_numbers {
  float a[8], b[4];
};

__device__ __forceinline__ void k3_mma_plain(float* c, const k3_mma_numbers& mine, bool more) {
  const k3_mma_numbers* all = k3emu::everyone(mine);
  int lane = threadIdx.x % 32;
  for (int e = 0; e < 4; ++e) {
    int row = lane / 4, column = lane % 4 * 2 + e % 2, upper = e / 2;
    double sum = more ? c[e] : 0.0;
    for (int k = 0; k < 16; ++k) {
      int of = k % 8 / 2, far = k / 8;
      float a = all[row * 4 + of].a[(upper + 2 * far) * 2 + k % 2];
      sum += (double)a * all[column * 4 + of].b[far * 2 + k % 2];
    }
    c[e] = (float)sum;
  }
}

#define K3_MMA(type)                                                                            \
  __device__ __forceinline__ void k3_mma_##type##_plain(float* c, const unsigned* a,            \
                                                        const unsigned* b, bool more) {         \
    k3_mma_numbers mine;                                                                        \
    for (int i = 0; i < 8; ++i) {                                                               \
      mine.a[i] = k3_float_of_##type(i % 2 ? a[i / 2] >> 16 : a[i / 2] & 0xffffu);              \
    }                                                                                           \
    for (int i = 0; i < 4; ++i) {                                                               \
      mine.b[i] = k3_float_of_##type(i % 2 ? b[i / 2] >> 16 : b[i / 2] & 0xffffu);              \
    }                                                                                           \
    k3_mma_plain(c, mine, more);                                                                \
  }                                                                                             \
  __device__ __forceinline__ void k3_mma_##type(float* c, const unsigned* a,                    \
                                                const unsigned* b) {                            \
    k3_mma_##type##_plain(c, a, b, true);                                                       \
  }                                                                                             \
  __device__ __forceinline__ void k3_mma_##type##_new(float* c, const unsigned* a,              \
                                                      const unsigned* b) {                      \
    k3_mma_##type##_plain(c, a, b, false);                                                      \
  }

#else

#define K3_MMA(type)                                                                            \
  __device__ __forceinline__ void k3_mma_##type(float* c, const unsigned* a,                    \
                                                const unsigned* b) {                            \
    asm("mma.sync.aligned.m16n8k16.row.col.f32." #type "." #type ".f32 {%0, %1, %2, %3}, "      \
        "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"                                         \
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])                                        \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));                    \
  }                                                                                             \
  __device__ __forceinline__ void k3_mma_##type##_new(float* c, const unsigned* a,              \
                                                      const unsigned* b) {                      \
    asm("mma.sync.aligned.m16n8k16.row.col.f32." #type "." #type ".f32 {%0, %1, %2, %3}, "      \
        "{%4, %5, %6, %7}, {%8, %9}, {%10, %10, %10, %10};"                                     \
        : "=f"(c[0]), "=f"(c[1]), "=f"(c[2]), "=f"(c[3])                                        \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "f"(0.0f));         \
  }

#endif

K3_MMA(bf16)
K3_MMA(f16)
#undef K3_MMA

// The low halves of two words, and the high halves, as one word
__device__ __forceinline__ unsigned k3_low_halves(unsigned a, unsigned b) {
#ifdef K3_EMULATED
  return (a & 0xffffu) | b << 16;
#else
  return __byte_perm(a, b, 0x5410);
#endif
}

__device__ __forceinline__ unsigned k3_high_halves(unsigned a, unsigned b) {
#ifdef K3_EMULATED
  return a >> 16 | (b & 0xffff0000u);
#else
  return __byte_perm(a, b, 0x7632);
#endif
}
