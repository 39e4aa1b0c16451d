// Turns a seed into the order in which threads take their turns.
#ifndef K3TVM_NATIVE_ORDER_H_
#define K3TVM_NATIVE_ORDER_H_

#include <cstdint>

namespace k3tvm::emulate {

// 0: forward. 1: backward. Others: shuffled, anew after each wait. A kernel that forgets a barrier
// gives different results in different orders, or reads what was never written.
using Seed = uint64_t;

// xorshift64*
class Random {
 public:
  Random(Seed seed, uint64_t block)
      : state_((seed + 1) * 0x9e3779b97f4a7c15u ^ (block + 1) * 0xbf58476d1ce4e5b9u) {}

  uint64_t Next() {
    state_ ^= state_ >> 12;
    state_ ^= state_ << 25;
    state_ ^= state_ >> 27;
    return state_ * 0x2545f4914f6cdd1du;
  }

 private:
  uint64_t state_;
};

// Calls `visit` with 0 ... count - 1. Shuffled is a walk with an odd step.
template <typename Visit>
void InOrder(unsigned count, Seed seed, Random* random, Visit visit) {
  if (seed < 2) {
    for (unsigned i = 0; i < count; ++i) visit(seed ? count - 1 - i : i);
    return;
  }
  unsigned size = 1;
  while (size < count) size *= 2;
  uint64_t bits = random->Next();
  auto step = static_cast<unsigned>(bits) | 1, start = static_cast<unsigned>(bits >> 32);
  for (unsigned i = 0; i < size; ++i) {
    unsigned at = (start + i * step) & (size - 1);
    if (at < count) visit(at);
  }
}

}  // namespace k3tvm::emulate

#endif  // K3TVM_NATIVE_ORDER_H_
