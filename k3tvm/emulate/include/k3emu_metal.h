// The Metal shading language for the CPU, as far as our kernels use it.
#ifndef K3EMU_METAL_H_
#define K3EMU_METAL_H_

#include "k3emu.h"

typedef unsigned int uint;
typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned long ulong;
typedef _Float16 half;

#define kernel
#define device
#define thread
#define constant const
#define threadgroup

#define INFINITY __builtin_inff()
#define NAN __builtin_nanf("")

inline half operator""h(long double value) { return static_cast<half>(value); }

namespace metal {

template <typename T, int n>
struct Vector;

template <typename T>
struct alignas(2 * sizeof(T)) Vector<T, 2> {
  T x, y;
  Vector() = default;
  Vector(T all) : x(all), y(all) {}
  Vector(T x, T y) : x(x), y(y) {}
  template <typename U>
  explicit Vector(const Vector<U, 2>& v) : x(static_cast<T>(v.x)), y(static_cast<T>(v.y)) {}
  T& operator[](int i) { return (&x)[i]; }
  const T& operator[](int i) const { return (&x)[i]; }
};

template <typename T>
struct alignas(4 * sizeof(T)) Vector<T, 3> {
  T x, y, z;
  Vector() = default;
  Vector(T all) : x(all), y(all), z(all) {}
  Vector(T x, T y, T z) : x(x), y(y), z(z) {}
  T& operator[](int i) { return (&x)[i]; }
  const T& operator[](int i) const { return (&x)[i]; }
};

template <typename T>
struct alignas(4 * sizeof(T)) Vector<T, 4> {
  T x, y, z, w;
  Vector() = default;
  Vector(T all) : x(all), y(all), z(all), w(all) {}
  Vector(T x, T y, T z, T w) : x(x), y(y), z(z), w(w) {}
  template <typename U>
  explicit Vector(const Vector<U, 4>& v)
      : x(static_cast<T>(v.x)),
        y(static_cast<T>(v.y)),
        z(static_cast<T>(v.z)),
        w(static_cast<T>(v.w)) {}
  T& operator[](int i) { return (&x)[i]; }
  const T& operator[](int i) const { return (&x)[i]; }
};

#define K3EMU_OPERATOR(op)                                          \
  template <typename T, int n>                                      \
  inline Vector<T, n> operator op(Vector<T, n> a, Vector<T, n> b) { \
    Vector<T, n> result;                                            \
    for (int i = 0; i < n; ++i) result[i] = a[i] op b[i];           \
    return result;                                                  \
  }                                                                 \
  template <typename T, int n>                                      \
  inline Vector<T, n> operator op(Vector<T, n> a, T b) {            \
    return a op Vector<T, n>(b);                                    \
  }                                                                 \
  template <typename T, int n>                                      \
  inline Vector<T, n> operator op(T a, Vector<T, n> b) {            \
    return Vector<T, n>(a) op b;                                    \
  }
K3EMU_OPERATOR(+)
K3EMU_OPERATOR(-)
K3EMU_OPERATOR(*)
K3EMU_OPERATOR(/)
K3EMU_OPERATOR(&)
K3EMU_OPERATOR(|)
K3EMU_OPERATOR(^)
K3EMU_OPERATOR(<<)
K3EMU_OPERATOR(>>)
#undef K3EMU_OPERATOR

#define K3EMU_VECTORS(type)     \
  typedef Vector<type, 2> type##2; \
  typedef Vector<type, 3> type##3; \
  typedef Vector<type, 4> type##4;
K3EMU_VECTORS(float)
K3EMU_VECTORS(half)
K3EMU_VECTORS(int)
K3EMU_VECTORS(uint)
K3EMU_VECTORS(short)
K3EMU_VECTORS(ushort)
K3EMU_VECTORS(char)
K3EMU_VECTORS(uchar)
K3EMU_VECTORS(long)
K3EMU_VECTORS(ulong)
K3EMU_VECTORS(bool)
#undef K3EMU_VECTORS

enum class mem_flags { mem_none, mem_device, mem_threadgroup };
inline mem_flags operator|(mem_flags a, mem_flags) { return a; }

inline void threadgroup_barrier(mem_flags, K3EMU_PLACE) {
  k3emu::wait(k3emu::Wait::kBlock, place);
}
inline void simdgroup_barrier(mem_flags, K3EMU_PLACE) {
  k3emu::wait(k3emu::Wait::kWarp, place);
}

template <typename T>
inline T simd_shuffle(T value, ushort lane, K3EMU_PLACE) {
  return k3emu::from_lane(value, lane, place);
}

template <typename T>
inline T simd_shuffle_xor(T value, ushort flip, K3EMU_PLACE) {
  return k3emu::from_lane(value, k3emu::self()->lane ^ flip, place);
}

template <typename T>
inline T simd_shuffle_down(T value, ushort by, K3EMU_PLACE) {
  return k3emu::from_lane(value, k3emu::self()->lane + by, place);
}

template <typename To, typename From>
inline To as_type(From from) {
  return k3emu::bits_as<To>(from);
}

inline float max(float a, float b) { return a != a ? b : (b > a ? b : a); }
inline float min(float a, float b) { return a != a ? b : (b < a ? b : a); }
inline int max(int a, int b) { return a > b ? a : b; }
inline int min(int a, int b) { return a < b ? a : b; }
inline uint max(uint a, uint b) { return a > b ? a : b; }
inline uint min(uint a, uint b) { return a < b ? a : b; }
inline long max(long a, long b) { return a > b ? a : b; }
inline long min(long a, long b) { return a < b ? a : b; }

#define K3EMU_FUNCTION(name, of) \
  inline float name(float x) { return of(x); }
K3EMU_FUNCTION(exp, __builtin_expf)
K3EMU_FUNCTION(exp2, __builtin_exp2f)
K3EMU_FUNCTION(log, __builtin_logf)
K3EMU_FUNCTION(log2, __builtin_log2f)
K3EMU_FUNCTION(tanh, __builtin_tanhf)
K3EMU_FUNCTION(sqrt, __builtin_sqrtf)
K3EMU_FUNCTION(floor, __builtin_floorf)
K3EMU_FUNCTION(ceil, __builtin_ceilf)
K3EMU_FUNCTION(trunc, __builtin_truncf)
K3EMU_FUNCTION(rint, __builtin_rintf)
K3EMU_FUNCTION(fabs, __builtin_fabsf)
#undef K3EMU_FUNCTION
inline float rsqrt(float x) { return 1.0f / __builtin_sqrtf(x); }
inline float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline uint popcount(uint x) { return static_cast<uint>(__builtin_popcount(x)); }
inline uint clz(uint x) { return x ? static_cast<uint>(__builtin_clz(x)) : 32; }

template <typename T>
inline T select(T no, T yes, bool which) {
  return which ? yes : no;
}

// Matrices of a SIMD group, 8 x 8: lane i holds the elements 2 i and 2 i + 1, row after row. Which
// lane holds what on a device is not defined, and not used. Loads and stores wait for nobody: between
// those of one place, and other accesses to it, stands a barrier.
template <typename T, int rows, int columns>
struct simdgroup_matrix {
  static_assert(rows == 8 && columns == 8, "matrices are 8 x 8");
  T held[2];
};
typedef simdgroup_matrix<float, 8, 8> simdgroup_float8x8;
typedef simdgroup_matrix<half, 8, 8> simdgroup_half8x8;

template <typename T, int rows, int columns>
inline simdgroup_matrix<T, rows, columns> make_filled_simdgroup_matrix(T value) {
  return {{value, value}};
}

template <typename Visit>
inline void k3emu_each_held(ulong stride, Vector<ulong, 2> origin, bool transposed, Visit visit) {
  for (int i = 0; i < 2; ++i) {
    ulong element = k3emu::self()->lane * 2 + i, row = element / 8, column = element % 8;
    if (transposed) {
      ulong swap = row;
      row = column;
      column = swap;
    }
    visit(i, (origin.y + row) * stride + origin.x + column);
  }
}

template <typename T, typename P>
inline void simdgroup_load(simdgroup_matrix<T, 8, 8>& m, const P* from, ulong stride = 8,
                           Vector<ulong, 2> origin = Vector<ulong, 2>(0), bool transposed = false) {
  k3emu_each_held(stride, origin, transposed, [&](int i, ulong at) { m.held[i] = from[at]; });
}

template <typename T, typename P>
inline void simdgroup_store(simdgroup_matrix<T, 8, 8> m, P* to, ulong stride = 8,
                            Vector<ulong, 2> origin = Vector<ulong, 2>(0),
                            bool transposed = false) {
  k3emu_each_held(stride, origin, transposed, [&](int i, ulong at) { to[at] = m.held[i]; });
}

template <typename D, typename A, typename B, typename C>
inline void simdgroup_multiply_accumulate(simdgroup_matrix<D, 8, 8>& d, simdgroup_matrix<A, 8, 8> a,
                                          simdgroup_matrix<B, 8, 8> b,
                                          simdgroup_matrix<C, 8, 8> c, K3EMU_PLACE) {
  struct Both {
    A a[2];
    B b[2];
  } mine = {{a.held[0], a.held[1]}, {b.held[0], b.held[1]}};
  const Both* all = k3emu::everyone(mine, place);
  for (int i = 0; i < 2; ++i) {
    unsigned element = k3emu::self()->lane * 2 + i, row = element / 8, column = element % 8;
    float sum = c.held[i];
    for (unsigned k = 0; k < 8; ++k) {
      unsigned of_a = row * 8 + k, of_b = k * 8 + column;
      sum += static_cast<float>(all[of_a / 2].a[of_a % 2]) *
             static_cast<float>(all[of_b / 2].b[of_b % 2]);
    }
    d.held[i] = static_cast<D>(sum);
  }
}

}  // namespace metal

namespace k3emu {

// How a parameter gets its value: addresses and the scalars' struct in order, then the place in the
// grid, then the place in the block.
template <typename A>
struct Given {
  static A get(void**, int&, int& places) {
    const Dim& at = places++ == 0 ? self()->block : self()->index;
    if constexpr (sizeof(A) == sizeof(uint)) {
      return at.x;
    } else {
      A value;
      value[0] = at.x;
      value[1] = at.y;
      if constexpr (sizeof(A) > 2 * sizeof(uint)) value[2] = at.z;
      return value;
    }
  }
};

template <typename T>
struct Given<T*> {
  static T* get(void** arguments, int& i, int&) { return *static_cast<T**>(arguments[i++]); }
};

template <typename T>
struct Given<const T&> {
  static const T& get(void** arguments, int& i, int&) {
    return *static_cast<const T*>(arguments[i++]);
  }
};

template <typename... A>
struct Apply {
  Apply(void (*function)(A...), A... a) { function(a...); }
};

template <typename... A>
inline void call(void (*function)(A...), void** arguments) {
  int i = 0, places = 0;
  Apply<A...>{function, Given<A>::get(arguments, i, places)...};  // braces: from left to right
}

}  // namespace k3emu

using namespace metal;

#endif  // K3EMU_METAL_H_
