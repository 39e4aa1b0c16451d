// The Vulkan instance: opens the loader, switches validation on, lists the physical devices.
#ifndef K3TVM_VULKAN_INSTANCE_H_
#define K3TVM_VULKAN_INSTANCE_H_

#include <string>
#include <vector>

#include "vulkan_headers.h"

namespace k3tvm::vulkan {

struct Instance {
  VkInstance handle = VK_NULL_HANDLE;
  std::vector<VkPhysicalDevice> devices;  // in the loader's order
  std::string why_not;                    // why there is no instance; empty if there is one
};

// Never raises: a machine without Vulkan is an instance with a reason.
Instance OpenInstance();

}  // namespace k3tvm::vulkan

#endif  // K3TVM_VULKAN_INSTANCE_H_
