// What emulated kernels are compiled with, whatever their language: threads, waits, exchanges.
//
// Small on purpose: it is read again for every file of kernels. The scheduler is elsewhere
// (k3tvm/native/block.cc) and is reached through the running thread.
#ifndef K3EMU_H_
#define K3EMU_H_

#include <stdint.h>
#include <string.h>

#include "k3emu_abi.h"

#define K3_EMULATED 1

// On AArch64 g++ knows the type in C++ from version 13 on; before, this one, whose arithmetic is
// float's and rounds once.
#if defined(__aarch64__) && !defined(__clang__) && __GNUC__ < 13
#define _Float16 __fp16
#endif

// In functions that wait: where they were called from, which tells waits apart. A line of the
// kernel holds one statement.
#define K3EMU_PLACE unsigned place = __builtin_LINE()

namespace k3emu {

inline Thread* self() { return k3emu_self; }

inline void wait(Wait kind, K3EMU_PLACE) { self()->services->wait(self(), kind, place); }

[[noreturn]] inline void fail(const char* what) {
  self()->services->fail(self(), what);
  __builtin_unreachable();
}

// An array of the block; `id` tells those of one kernel apart.
inline void* shared(unsigned id, unsigned long bytes) {
  return self()->services->shared(self(), id, bytes);
}

// Every thread of the warp gives a value and sees all of them, by lane, until its next exchange.
template <typename T>
inline const T* everyone(const T& mine, K3EMU_PLACE) {
  static_assert(sizeof(T) <= kExchange, "too much for one exchange");
  char* memory = self()->services->exchange(self());
  memcpy(memory + self()->lane * sizeof(T), &mine, sizeof(T));
  wait(Wait::kWarp, place);
  return reinterpret_cast<const T*>(memory);
}

// The value of another lane, or the own one where there is no such lane.
template <typename T>
inline T from_lane(T mine, unsigned lane, K3EMU_PLACE) {
  const T* all = everyone(mine, place);
  return all[lane < self()->warp_size ? lane : self()->lane];
}

template <typename To, typename From>
inline To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From), "bits of another size");
  To to;
  memcpy(&to, &from, sizeof(To));
  return to;
}

}  // namespace k3emu

#ifdef K3EMU_CHECKED
#include "k3emu_checked.h"
#endif

#endif  // K3EMU_H_
