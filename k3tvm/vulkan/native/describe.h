// Describes a physical device for people and for Python.
#ifndef K3TVM_VULKAN_DESCRIBE_H_
#define K3TVM_VULKAN_DESCRIBE_H_

#include <string>

#include "json.h"
#include "physical.h"

namespace k3tvm::vulkan {

// "1.3.204" of a packed version number.
std::string Version(uint32_t version);

// "discrete", "integrated", "virtual", "cpu" or "other".
const char* TypeName(VkPhysicalDeviceType type);

// One JSON object with all facts.
void WritePhysical(const Physical& device, Json* json);

}  // namespace k3tvm::vulkan

#endif  // K3TVM_VULKAN_DESCRIBE_H_
