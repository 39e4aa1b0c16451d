// Decides where a barrier is needed: only between commands that touch the same allocation, at least
// one of them writing. Time is divided into epochs by the barriers; an allocation remembers the
// epochs in which it was last read and written, so a question costs two comparisons.
#ifndef K3TVM_VULKAN_HAZARDS_H_
#define K3TVM_VULKAN_HAZARDS_H_

#include "memory.h"

namespace k3tvm::vulkan {

struct Use {
  Allocation* allocation;
  bool writes;  // else it is only read
};

class Hazards {
 public:
  // Whether the use must wait for commands since the last barrier.
  bool Conflicts(const Use& use) const {
    bool written = use.allocation->written_in == epoch_;
    return written || (use.writes && use.allocation->read_in == epoch_);
  }

  void Note(const Use& use) {
    (use.writes ? use.allocation->written_in : use.allocation->read_in) = epoch_;
  }

  // A barrier stands here.
  void Barrier() { ++epoch_; }

 private:
  uint64_t epoch_ = 1;  // allocations begin with 0: never used
};

}  // namespace k3tvm::vulkan

#endif  // K3TVM_VULKAN_HAZARDS_H_
