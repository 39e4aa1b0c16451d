#include "module.h"

#include <utility>

namespace k3tvm::vulkan {

namespace ffi = tvm::ffi;

VulkanModule::VulkanModule(std::string blob) : blob_(std::move(blob)) {
  for (KernelCode& code : ReadKernels(blob_)) {
    std::string name = code.name;
    kernels_[name] = std::make_shared<Kernel>(std::move(code));
  }
}

ffi::String VulkanModule::InspectSource(const ffi::String&) const {
  std::string all;
  for (const auto& [name, kernel] : kernels_) all += kernel->code().glsl + "\n";
  return all;
}

ffi::Optional<ffi::Function> VulkanModule::GetFunction(const ffi::String& name) {
  auto found = kernels_.find(name);
  if (found == kernels_.end()) return std::nullopt;
  // The function keeps its kernel, so it may outlive the module.
  return ffi::Function::FromPacked(
      [kernel = found->second](ffi::PackedArgs arguments, ffi::Any*) { kernel->Call(arguments); });
}

ffi::Module MakeModule(const ffi::Bytes& blob) {
  return ffi::Module(ffi::make_object<VulkanModule>(std::string(blob.data(), blob.size())));
}

}  // namespace k3tvm::vulkan
