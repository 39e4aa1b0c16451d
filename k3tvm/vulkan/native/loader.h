// Opens the system's Vulkan loader when it is first needed, so that building, installing and
// compiling for Vulkan need no driver, and looks up the entry points that are used.
#ifndef K3TVM_VULKAN_LOADER_H_
#define K3TVM_VULKAN_LOADER_H_

#include <string>

#include "vulkan_headers.h"

namespace k3tvm::vulkan {

// The cure where loader or driver are missing.
inline constexpr char kInstall[] =
    "; on Debian and Ubuntu: apt install libvulkan1 mesa-vulkan-drivers";

// Every entry point, by its name without "vk".
// clang-format off
#define K3TVM_VULKAN_FUNCTIONS(X) \
  X(EnumeratePhysicalDevices) X(EnumerateDeviceExtensionProperties) \
  X(GetPhysicalDeviceProperties) X(GetPhysicalDeviceProperties2) X(GetPhysicalDeviceFeatures2) \
  X(GetPhysicalDeviceMemoryProperties2) X(GetPhysicalDeviceQueueFamilyProperties) \
  X(CreateDevice) X(GetDeviceQueue) X(DeviceWaitIdle) X(CreateBuffer) X(DestroyBuffer) \
  X(GetBufferMemoryRequirements) X(AllocateMemory) X(FreeMemory) X(BindBufferMemory) \
  X(MapMemory) X(GetBufferDeviceAddress) X(CreateCommandPool) X(AllocateCommandBuffers) \
  X(BeginCommandBuffer) X(EndCommandBuffer) X(QueueSubmit) X(CreateSemaphore) \
  X(WaitSemaphores) X(GetSemaphoreCounterValue) X(CmdBindPipeline) X(CmdPushConstants) \
  X(CmdDispatch) X(CmdPipelineBarrier) X(CmdCopyBuffer) X(CmdFillBuffer) X(CmdWriteTimestamp) \
  X(CmdResetQueryPool) X(CreateQueryPool) X(DestroyQueryPool) X(GetQueryPoolResults) \
  X(CreateShaderModule) X(DestroyShaderModule) X(CreatePipelineLayout) \
  X(DestroyPipelineLayout) X(CreateComputePipelines) X(DestroyPipeline) X(CreatePipelineCache) \
  X(GetPipelineCacheData)
// clang-format on

struct Functions {
#define K3TVM_DECLARE(name) PFN_vk##name name = nullptr;
  K3TVM_VULKAN_FUNCTIONS(K3TVM_DECLARE)
#undef K3TVM_DECLARE
  PFN_vkGetInstanceProcAddr GetInstanceProcAddr = nullptr;
};

// The table that all of the plug-in calls through; filled by LoadFunctions.
extern Functions vk;

// Opens the loader library: the one named by K3TVM_VULKAN_LOADER, else the system's. Returns why it
// cannot be opened, or nothing.
std::string OpenLoader();

// Looks up all entry points of an instance. Returns the name of one that is missing, or nothing.
std::string LoadFunctions(VkInstance instance);

// An entry point that needs no instance, by its whole name; null when the loader has none.
template <typename Function>
Function Global(const char* name) {
  return reinterpret_cast<Function>(vk.GetInstanceProcAddr(nullptr, name));
}

// Whether instances can have an extension, of a layer or (null) of the loader and its drivers.
bool HasExtension(const char* layer, const char* wanted);

}  // namespace k3tvm::vulkan

#endif  // K3TVM_VULKAN_LOADER_H_
