// CUDA C++ for the CPU, as far as our kernels use it.
#ifndef K3EMU_CUDA_H_
#define K3EMU_CUDA_H_

// C's functions without what C++ adds to them: reading that takes longer than most kernels.
#define _GLIBCXX_INCLUDE_NEXT_C_HEADERS
#include <math.h>
#undef _GLIBCXX_INCLUDE_NEXT_C_HEADERS

#include "k3emu.h"

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __align__(n) alignas(n)

#define threadIdx (k3emu::self()->index)
#define blockIdx (k3emu::self()->block)
#define blockDim (k3emu::self()->block_size)
#define gridDim (k3emu::self()->grid)

typedef unsigned int uint;
typedef unsigned char uchar;
typedef unsigned short ushort;
typedef signed char schar;
typedef long long longlong;
typedef unsigned long long ulonglong;
typedef _Float16 half;

#define K3EMU_VECTORS(type, name)                                              \
  struct alignas(2 * sizeof(type)) name##2 {                                   \
    type x, y;                                                                 \
  };                                                                           \
  struct name##3 {                                                             \
    type x, y, z;                                                              \
  };                                                                           \
  struct alignas(sizeof(type) * 4 > 16 ? 16 : sizeof(type) * 4) name##4 {      \
    type x, y, z, w;                                                           \
  };                                                                           \
  inline name##2 make_##name##2(type x, type y) { return {x, y}; }             \
  inline name##3 make_##name##3(type x, type y, type z) { return {x, y, z}; }  \
  inline name##4 make_##name##4(type x, type y, type z, type w) {              \
    return {x, y, z, w};                                                       \
  }
K3EMU_VECTORS(float, float)
K3EMU_VECTORS(double, double)
K3EMU_VECTORS(int, int)
K3EMU_VECTORS(uint, uint)
K3EMU_VECTORS(short, short)
K3EMU_VECTORS(ushort, ushort)
K3EMU_VECTORS(schar, char)
K3EMU_VECTORS(uchar, uchar)
K3EMU_VECTORS(longlong, longlong)
K3EMU_VECTORS(ulonglong, ulonglong)
#undef K3EMU_VECTORS

#define CUDART_INF_F __builtin_inff()
#define CUDART_NAN_F __builtin_nanf("")

inline void __syncthreads(K3EMU_PLACE) { k3emu::wait(k3emu::Wait::kBlock, place); }

// Our kernels have whole warps come along, and say so.
inline void k3emu_whole(unsigned mask) {
  if (mask != 0xffffffffu) k3emu::fail("an exchange among some lanes of a warp is not emulated");
}

inline void __syncwarp(unsigned mask = 0xffffffffu, K3EMU_PLACE) {
  k3emu_whole(mask);
  k3emu::wait(k3emu::Wait::kWarp, place);
}

template <typename T>
inline T __shfl_sync(unsigned mask, T value, int lane, int width = 32, K3EMU_PLACE) {
  k3emu_whole(mask);
  unsigned base = k3emu::self()->lane & ~(width - 1u);
  return k3emu::from_lane(value, base | (static_cast<unsigned>(lane) & (width - 1u)), place);
}

template <typename T>
inline T __shfl_xor_sync(unsigned mask, T value, int flip, int width = 32, K3EMU_PLACE) {
  k3emu_whole(mask);
  unsigned lane = k3emu::self()->lane, other = lane ^ static_cast<unsigned>(flip);
  return k3emu::from_lane(value, other / width == lane / width ? other : lane, place);
}

template <typename T>
inline T __shfl_down_sync(unsigned mask, T value, unsigned by, int width = 32, K3EMU_PLACE) {
  k3emu_whole(mask);
  unsigned lane = k3emu::self()->lane;
  bool within = lane % width + by < static_cast<unsigned>(width);
  return k3emu::from_lane(value, within ? lane + by : lane, place);
}

template <typename T>
inline T __shfl_up_sync(unsigned mask, T value, unsigned by, int width = 32, K3EMU_PLACE) {
  k3emu_whole(mask);
  unsigned lane = k3emu::self()->lane;
  return k3emu::from_lane(value, lane % width >= by ? lane - by : lane, place);
}

inline unsigned __ballot_sync(unsigned mask, int yes, K3EMU_PLACE) {
  k3emu_whole(mask);
  const int* all = k3emu::everyone(yes, place);
  unsigned result = 0;
  for (unsigned i = 0; i < k3emu::self()->warp_size; ++i) result |= (all[i] ? 1u : 0u) << i;
  return result;
}

inline float max(float a, float b) { return a != a ? b : (b > a ? b : a); }
inline float min(float a, float b) { return a != a ? b : (b < a ? b : a); }
inline int max(int a, int b) { return a > b ? a : b; }
inline int min(int a, int b) { return a < b ? a : b; }
inline unsigned max(unsigned a, unsigned b) { return a > b ? a : b; }
inline unsigned min(unsigned a, unsigned b) { return a < b ? a : b; }
inline int64_t max(int64_t a, int64_t b) { return a > b ? a : b; }
inline int64_t min(int64_t a, int64_t b) { return a < b ? a : b; }

inline int abs(int x) { return x < 0 ? -x : x; }
inline float abs(float x) { return fabsf(x); }

inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
inline float __uint_as_float(unsigned bits) { return k3emu::bits_as<float>(bits); }
inline unsigned __float_as_uint(float x) { return k3emu::bits_as<unsigned>(x); }
inline float __int_as_float(int bits) { return k3emu::bits_as<float>(bits); }
inline int __float_as_int(float x) { return k3emu::bits_as<int>(x); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __clz(int x) { return x ? __builtin_clz(static_cast<unsigned>(x)) : 32; }

template <typename T>
inline T __ldg(const T* p) {
  return *p;
}

namespace k3emu {

// Copies into memory of the block that a thread has asked for. None arrives before it is waited
// for, as late as hardware may have it.
struct Copies {
  static constexpr int kMost = 128;
  struct {
    void* to;
    const void* from;
    unsigned bytes;
    int group;
  } of[kMost];
  int count = 0, group = 0;
};

inline Copies& copies() { return *static_cast<Copies*>(self()->copies); }

inline void copy_later(void* to, const void* from, unsigned bytes) {
  Copies& all = copies();
  if (all.count == Copies::kMost) fail("more copies under way than the emulator has room for");
  all.of[all.count++] = {to, from, bytes, all.group};
}

inline void copies_sent() { ++copies().group; }

// Those of all groups but the newest `later` arrive.
inline void copies_done(int later) {
  Copies& all = copies();
  int left = 0;
  for (int i = 0; i < all.count; ++i) {
    if (all.of[i].group < all.group - later) {
      memcpy(all.of[i].to, all.of[i].from, all.of[i].bytes);
    } else {
      all.of[left++] = all.of[i];
    }
  }
  all.count = left;
}

template <typename... A>
struct Apply {
  Apply(void (*function)(A...), A... a) { function(a...); }
};

// Calls a kernel with a pointer to each of its arguments.
template <typename... A>
inline void call(void (*function)(A...), void** arguments) {
  Copies none;
  self()->copies = &none;
  int i = 0;
  Apply<A...>{function, *static_cast<A*>(arguments[i++])...};  // braces: from left to right
}

}  // namespace k3emu

#endif  // K3EMU_CUDA_H_
