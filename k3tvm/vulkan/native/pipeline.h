// What a device needs to run a kernel, and the check that it can.
#ifndef K3TVM_VULKAN_PIPELINE_H_
#define K3TVM_VULKAN_PIPELINE_H_

#include "blob.h"
#include "gpu.h"

namespace k3tvm::vulkan {

struct Pipeline {
  VkPipelineLayout layout = VK_NULL_HANDLE;
  VkPipeline handle = VK_NULL_HANDLE;
};

// Raises unless the device has the threads, memory and features that the kernel was compiled for.
// The message has kernel, need and limit.
void CheckLimits(const KernelCode& code, const Physical& facts);

// Compiles the kernel for the device.
Pipeline MakePipeline(const KernelCode& code, Gpu* gpu, VkPipelineCache cache);

void DestroyPipeline(const Pipeline& pipeline, Gpu* gpu);

}  // namespace k3tvm::vulkan

#endif  // K3TVM_VULKAN_PIPELINE_H_
