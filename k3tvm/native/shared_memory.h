// Arrays of a block: filled with NaN when a block first asks for one, with a guard behind each.
#ifndef K3TVM_NATIVE_SHARED_MEMORY_H_
#define K3TVM_NATIVE_SHARED_MEMORY_H_

#include <cstddef>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "shadow.h"

namespace k3tvm::emulate {

class SharedMemory {
 public:
  // A new block: nothing is in use.
  void Clear();
  // The array `id` of the block.
  void* Get(unsigned id, size_t bytes);
  // "" or which array was written past its end.
  std::string CheckGuards() const;
  // The array that has this address, or has it in its guard; null if there is none.
  Tracked Find(const void* address);

 private:
  struct Release {
    void operator()(char* memory) const { std::free(memory); }
  };
  struct Slot {
    std::unique_ptr<char, Release> memory;
    size_t bytes = 0, room = 0;
    bool used = false;  // by this block
    Shadow shadow;
  };

  std::vector<Slot> slots_;
};

}  // namespace k3tvm::emulate

#endif  // K3TVM_NATIVE_SHARED_MEMORY_H_
