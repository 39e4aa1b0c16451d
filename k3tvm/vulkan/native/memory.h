// Hands out device memory: small allocations share blocks, large ones have a block of their own.
// Also knows which allocation an address lies in, and how much there is left.
#ifndef K3TVM_VULKAN_MEMORY_H_
#define K3TVM_VULKAN_MEMORY_H_

#include <list>
#include <map>

#include "block.h"
#include "free_list.h"

namespace k3tvm::vulkan {

struct SharedBlock {
  Block block;
  FreeList free;
};

struct Allocation {
  uint64_t address = 0;
  uint64_t size = 0;
  SharedBlock* home = nullptr;

  uint64_t last_use = 0;    // the submission that uses it last, see Stream
  uint64_t read_in = 0;     // epochs between barriers in which it was last read and written,
  uint64_t written_in = 0;  // see Hazards
  bool dead = false;        // freed by its owner, waits for the device

  uint64_t offset() const { return address - home->block.address; }
  char* host() const { return home->block.host ? home->block.host + offset() : nullptr; }
};

class Memory {
 public:
  explicit Memory(Gpu* gpu);

  // At least `size` bytes at an address that is a multiple of 256, or null when they are not to be
  // had. Sizes above what one allocation of the device can have are refused with an error.
  Allocation* Allocate(uint64_t size);
  // Gives an allocation back at once: nothing on the device may be using it.
  void Release(Allocation* allocation);
  // Gives blocks in which nothing lives back to the driver.
  void Trim();

  // The live allocation in which the address lies (one byte past its end included), or null.
  Allocation* Find(uint64_t address) const;

  // The error that ends a failed allocation, with the numbers.
  [[noreturn]] void ThrowFull(uint64_t asked) const;

  // Bytes that can be taken from the driver, over all heaps that tensors may live in.
  uint64_t Available() const;
  // All that may be used: what is in use and what is available.
  uint64_t Budget() const { return block_bytes_ + Available(); }
  // A bound on all memory that is taken from the driver; 0: only what the driver has.
  void SetLimit(uint64_t bytes) { limit_ = bytes; }

  // A block outside the sub-allocation, for rings; raises when there is no memory.
  Block Dedicated(uint64_t size, Purpose purpose);

  uint64_t used() const { return used_; }
  uint64_t peak() const { return peak_; }
  uint64_t block_bytes() const { return block_bytes_; }
  size_t live() const { return live_.size(); }
  size_t blocks() const { return blocks_.size() + dedicated_; }

 private:
  SharedBlock* AddBlock(uint64_t size);
  SharedBlock* RoomFor(uint64_t size);
  void Drop(SharedBlock* empty);

  Gpu* gpu_;
  uint64_t block_size_;
  uint64_t limit_ = 0;
  uint64_t used_ = 0, peak_ = 0, block_bytes_ = 0;
  size_t dedicated_ = 0;
  std::list<SharedBlock> blocks_;
  std::map<uint64_t, Allocation> live_;  // by address
};

}  // namespace k3tvm::vulkan

#endif  // K3TVM_VULKAN_MEMORY_H_
