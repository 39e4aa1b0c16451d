// Products of MXFP4 codes with 8-bit digits on integer tensor cores: exact sums of 32 products.
//
// A word holds eight codes, one in each nibble: three bits of magnitude and a sign. PTX's prmt takes
// the nibbles as they are for selectors: their lower bits pick one of eight bytes, their upper bit
// has its sign repeated instead (__byte_perm clears that bit). So one permutation gives the numbers
// without sign and zero for the others, and one with the signs turned round the numbers below zero,
// and -1 for the others that are not zero, which the first makes up for. Bytes are twice the values
// of the codes; the sum of both is the number.
//
// Fragments are those of mma.m16n8k32: lane 4 g + t has the rows g and g + 8 of the codes, eight
// each, and column g of the digits at the same k; which eight of 32 k that are is free. Sums are
// where k3_mma_bf16 has them. All 32 lanes of a warp call together.

#ifdef K3_EMULATED

__device__ __forceinline__ unsigned k3_pick_bytes(unsigned low, unsigned high, unsigned codes) {
  unsigned picked = 0;
  for (int i = 0; i < 4; ++i) {
    unsigned code = codes >> 4 * i, of = code & 4u ? high : low;
    unsigned byte = of >> 8 * (code & 3u) & 0xffu;
    if (code & 8u) byte = byte & 0x80u ? 0xffu : 0u;
    picked |= byte << 8 * i;
  }
  return picked;
}

#else

__device__ __forceinline__ unsigned k3_pick_bytes(unsigned low, unsigned high, unsigned codes) {
  unsigned picked;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(picked) : "r"(low), "r"(high), "r"(codes));
  return picked;
}

#endif

// 2^(byte - 127), exact for all bytes 0 to 254, of byte `which` of a word
__device__ __forceinline__ float k3_e8m0(unsigned word, int which) {
  int byte = (int)k3_pick_bytes(word, 0u, 0x4440u | (unsigned)which);
  int bits = byte << 23;
  return __int_as_float(bits > 0x00400000 ? bits : 0x00400000);
}

// The bytes of the four small magnitudes, without sign and with. What is added is zero, since our
// kernels have one dimension of threads; compilers do not know, and keep the two in registers instead
// of moving them there at every use
__device__ __forceinline__ void k3_e2m1_table(unsigned* small) {
  small[0] = 0x04030200u + threadIdx.y;
  small[1] = 0xfdfeff00u + threadIdx.y;
}

// The codes 0 4 1 5 | 2 6 3 7 of the two rows' words: a[0 ... 3] what has no sign, a[4 ... 7] the rest
__device__ __forceinline__ void k3_e2m1_bytes(unsigned* a, const unsigned* small, unsigned lower,
                                              unsigned upper) {
  unsigned words[2] = {lower, upper};
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    unsigned far = words[i] >> 16;
    a[i] = k3_pick_bytes(small[0], 0x0d090705u, words[i]);
    a[i + 2] = k3_pick_bytes(small[0], 0x0d090705u, far);
    a[i + 4] = k3_pick_bytes(small[1], 0xf4f8fafcu, words[i] ^ 0x88888888u);
    a[i + 6] = k3_pick_bytes(small[1], 0xf4f8fafcu, far ^ 0x8888u);
  }
}

#ifdef K3_EMULATED

__device__ __forceinline__ void k3_e2m1_dots(float* sums, const unsigned* a, const unsigned* b) {
  struct Bytes {
    signed char a[4][4], b[2][4];
  } mine;
  const signed char* codes = (const signed char*)a;
  for (int i = 0; i < 16; ++i) mine.a[i / 4][i % 4] = (signed char)(codes[i] + codes[i + 16]);
  __builtin_memcpy(mine.b, b, 8);
  const Bytes* all = k3emu::everyone(mine);
  int lane = threadIdx.x % 32, row = lane / 4;
  for (int e = 0; e < 4; ++e) {
    int column = lane % 4 * 2 + e % 2, upper = e / 2, sum = 0;
    for (int of = 0; of < 4; ++of) {
      const Bytes &left = all[row * 4 + of], &right = all[column * 4 + of];
      for (int k = 0; k < 8; ++k) sum += left.a[upper + k / 4 * 2][k % 4] * right.b[k / 4][k % 4];
    }
    sums[e] = (float)sum;
  }
}

#else

// c += a b, of signed bytes
__device__ __forceinline__ void k3_mma_s8(int* c, const unsigned* a, const unsigned* b) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// The sums, below 2^16, begin as the bits of 1.5 x 2^23, whose last place is worth one: no
// conversion
__device__ __forceinline__ void k3_e2m1_dots(float* sums, const unsigned* a, const unsigned* b) {
  int c[4] = {0x4b400000, 0x4b400000, 0x4b400000, 0x4b400000};
  k3_mma_s8(c, a, b);
  k3_mma_s8(c, a + 4, b);
#pragma unroll
  for (int i = 0; i < 4; ++i) sums[i] = __int_as_float(c[i]) - 12582912.0f;
}

#endif
