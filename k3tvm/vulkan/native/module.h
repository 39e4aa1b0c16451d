// A compiled device module, as TVM's runtime loads it: functions by name, and back to bytes.
#ifndef K3TVM_VULKAN_MODULE_H_
#define K3TVM_VULKAN_MODULE_H_

#include <tvm/ffi/extra/module.h>

#include <memory>
#include <string>
#include <unordered_map>

#include "kernel.h"

namespace k3tvm::vulkan {

class VulkanModule : public tvm::ffi::ModuleObj {
 public:
  explicit VulkanModule(std::string blob);

  const char* kind() const final { return "vulkan"; }
  int GetPropertyMask() const final {
    return tvm::ffi::Module::kBinarySerializable | tvm::ffi::Module::kRunnable;
  }
  tvm::ffi::Bytes SaveToBytes() const final { return tvm::ffi::Bytes(blob_); }
  // The GLSL of all kernels, for readers.
  tvm::ffi::String InspectSource(const tvm::ffi::String& format) const final;
  tvm::ffi::Optional<tvm::ffi::Function> GetFunction(const tvm::ffi::String& name) final;

 private:
  std::string blob_;
  std::unordered_map<std::string, std::shared_ptr<Kernel>> kernels_;
};

tvm::ffi::Module MakeModule(const tvm::ffi::Bytes& blob);

}  // namespace k3tvm::vulkan

#endif  // K3TVM_VULKAN_MODULE_H_
