// Turns a function into one that can stop in the middle: a stack of its own and a saved place.
#ifndef K3TVM_NATIVE_FIBER_H_
#define K3TVM_NATIVE_FIBER_H_

#include <cstddef>
#include <vector>

namespace k3tvm::emulate {

// Stacks for a number of fibers, each with a page below it that may not be touched.
class Stacks {
 public:
  Stacks() = default;
  ~Stacks();
  Stacks(const Stacks&) = delete;
  Stacks& operator=(const Stacks&) = delete;

  // Makes room for at least so many; all are free.
  void Reserve(size_t count);
  // The number of a free one: the one that was given back last.
  unsigned Take();
  void GiveBack(unsigned i) { free_.push_back(i); }
  // The upper end of a stack.
  char* Top(size_t i) const;
  // Whether an address is on one of them.
  bool Has(const void* address) const;

 private:
  char* memory_ = nullptr;
  size_t count_ = 0;
  std::vector<unsigned> free_;
  unsigned fresh_ = 0;  // those from here on were not taken yet
};

// Where a fiber, or the thread that runs it, goes on: its stack with the registers on it.
using Place = void*;

// A place that begins `entry` on a new stack. `entry` must not return.
Place Begin(char* top, void (*entry)());

// Saves this place and goes on at another one.
extern "C" void k3tvm_switch(Place* from, Place to);

}  // namespace k3tvm::emulate

#endif  // K3TVM_NATIVE_FIBER_H_
