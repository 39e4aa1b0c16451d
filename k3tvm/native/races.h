// Finds accesses to one byte that nothing orders: two threads, one writes, no barrier between them.
#ifndef K3TVM_NATIVE_RACES_H_
#define K3TVM_NATIVE_RACES_H_

#include <cstdint>
#include <string>
#include <vector>

#include "shadow.h"

namespace k3tvm::emulate {

// Who an interval belongs to, and what it has waited for: barriers of the block, exchanges of the
// warp.
struct Moment {
  uint64_t block;
  int warp, thread;  // kMany: several
  uint32_t barriers, exchanges;

  static constexpr int kMany = -1;
};

// Checked launches run one after the other, each on one thread of the CPU: see `lock`.
class Races {
 public:
  // A new launch: what was before it is over.
  void Clear();
  // The number of a new interval.
  Interval Begin(const Moment& moment);
  // An access by the interval `now`; "" or with what it collides.
  std::string Read(Shadow::Byte* byte, Interval now);
  std::string Write(Shadow::Byte* byte, Interval now);

 private:
  const Moment* Find(Interval interval) const;
  bool Collide(Interval before, Interval now) const;
  // An interval that stands for both readers.
  Interval Both(Interval before, Interval now);
  std::string Describe(const char* did, Interval before, const char* does, Interval now) const;

  std::vector<Moment> moments_;
  Interval first_ = 1;  // the number of moments_[0]
};

}  // namespace k3tvm::emulate

#endif  // K3TVM_NATIVE_RACES_H_
