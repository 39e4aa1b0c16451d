#include "errors.h"

#include <tvm/ffi/error.h>

namespace k3tvm::vulkan {

void Throw(const char* kind, const std::string& message) {
  throw tvm::ffi::Error(kind, message, TVMFFIBacktrace(__FILE__, __LINE__, __func__, 0));
}

std::string ResultName(VkResult result) {
  switch (result) {
#define K3TVM_NAME(name) \
  case name:             \
    return #name;
    K3TVM_NAME(VK_NOT_READY)
    K3TVM_NAME(VK_TIMEOUT)
    K3TVM_NAME(VK_INCOMPLETE)
    K3TVM_NAME(VK_ERROR_OUT_OF_HOST_MEMORY)
    K3TVM_NAME(VK_ERROR_OUT_OF_DEVICE_MEMORY)
    K3TVM_NAME(VK_ERROR_INITIALIZATION_FAILED)
    K3TVM_NAME(VK_ERROR_DEVICE_LOST)
    K3TVM_NAME(VK_ERROR_MEMORY_MAP_FAILED)
    K3TVM_NAME(VK_ERROR_LAYER_NOT_PRESENT)
    K3TVM_NAME(VK_ERROR_EXTENSION_NOT_PRESENT)
    K3TVM_NAME(VK_ERROR_FEATURE_NOT_PRESENT)
    K3TVM_NAME(VK_ERROR_INCOMPATIBLE_DRIVER)
    K3TVM_NAME(VK_ERROR_TOO_MANY_OBJECTS)
    K3TVM_NAME(VK_ERROR_FRAGMENTATION)
    K3TVM_NAME(VK_ERROR_INVALID_EXTERNAL_HANDLE)
    K3TVM_NAME(VK_ERROR_INVALID_SHADER_NV)
    K3TVM_NAME(VK_ERROR_UNKNOWN)
#undef K3TVM_NAME
    default:
      return Text("VkResult ", static_cast<int>(result));
  }
}

void Check(VkResult result, const char* what) {
  if (result == VK_SUCCESS) return;
  const char* kind = kError;
  if (result == VK_ERROR_DEVICE_LOST) kind = kDeviceLost;
  if (result == VK_ERROR_OUT_OF_HOST_MEMORY || result == VK_ERROR_OUT_OF_DEVICE_MEMORY) {
    kind = kOutOfMemory;
  }
  Throw(kind, Text(what, " failed: ", ResultName(result)));
}

}  // namespace k3tvm::vulkan
