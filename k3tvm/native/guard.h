// What stands behind memory that a kernel may write, to see whether it wrote too far.
#ifndef K3TVM_NATIVE_GUARD_H_
#define K3TVM_NATIVE_GUARD_H_

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace k3tvm::emulate {

constexpr int kPoison = 0xff;  // NaN as float16, bfloat16, float32 and float64
constexpr int kGuard = 0xa5;
constexpr size_t kGuardBytes = 256;

inline void PutGuard(char* at) { std::memset(at, kGuard, kGuardBytes); }

inline bool Whole(const char* guard) {
  uint64_t different = 0;
  for (size_t i = 0; i < kGuardBytes; i += sizeof(uint64_t)) {
    uint64_t word;
    std::memcpy(&word, guard + i, sizeof(word));
    different |= word ^ 0xa5a5a5a5a5a5a5a5u;
  }
  return different == 0;
}

}  // namespace k3tvm::emulate

#endif  // K3TVM_NATIVE_GUARD_H_
