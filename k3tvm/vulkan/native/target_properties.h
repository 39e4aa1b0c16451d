// Answers what TVM's `vulkan` target asks about a device, by the names of its attributes.
#ifndef K3TVM_VULKAN_TARGET_PROPERTIES_H_
#define K3TVM_VULKAN_TARGET_PROPERTIES_H_

#include <tvm/ffi/any.h>

#include <string>

#include "physical.h"

namespace k3tvm::vulkan {

// The value, or None for a name that is no property of a device.
tvm::ffi::Any TargetProperty(const Physical& facts, const std::string& name);

}  // namespace k3tvm::vulkan

#endif  // K3TVM_VULKAN_TARGET_PROPERTIES_H_
