// The memory of an emulated device: the host's, with guards around and a fill of NaN.
#ifndef K3TVM_NATIVE_DEVICE_MEMORY_H_
#define K3TVM_NATIVE_DEVICE_MEMORY_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "shadow.h"

namespace k3tvm::emulate {

class DeviceMemory {
 public:
  static DeviceMemory& Global();

  void* Allocate(size_t bytes);
  void Free(void* address);
  // "" or which allocation was written past its end.
  std::string CheckGuards();
  // The allocation that has this address, or has it in a guard.
  Tracked Find(const char* address);
  // JSON: used, most used, left.
  std::string Stats() const;
  void CountLaunch() { ++launches_; }

 private:
  mutable std::mutex lock_;
  struct Allocation {
    size_t bytes;
    std::unique_ptr<Shadow> shadow;
  };
  std::map<char*, Allocation> allocations_;
  size_t used_ = 0, peak_ = 0;
  uint64_t launches_ = 0;
};

// Bytes of memory that the machine has left.
size_t AvailableBytes();

}  // namespace k3tvm::emulate

#endif  // K3TVM_NATIVE_DEVICE_MEMORY_H_
