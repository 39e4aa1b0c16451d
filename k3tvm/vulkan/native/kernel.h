// A kernel of a loaded module: turns a call in TVM's protocol into a launch.
#ifndef K3TVM_VULKAN_KERNEL_H_
#define K3TVM_VULKAN_KERNEL_H_

#include <tvm/ffi/function.h>

#include <utility>

#include "blob.h"
#include "device.h"

namespace k3tvm::vulkan {

class Kernel {
 public:
  explicit Kernel(KernelCode code) : code_(std::move(code)) {}
  ~Kernel();  // tells the devices
  Kernel(const Kernel&) = delete;
  Kernel& operator=(const Kernel&) = delete;

  const KernelCode& code() const { return code_; }

  // Arguments: the kernel's parameters in order, then one extent for every tag. Pointers may be
  // addresses, as TVM's host code passes them, or tensors.
  void Call(tvm::ffi::PackedArgs arguments) const;

 private:
  KernelCode code_;
};

}  // namespace k3tvm::vulkan

#endif  // K3TVM_VULKAN_KERNEL_H_
