#include "gpu.h"

#include <vector>

#include "errors.h"
#include "loader.h"

namespace k3tvm::vulkan {
namespace {

// The part of the device's features that kernels use; everything else stays off.
struct Wanted {
  explicit Wanted(const Physical& facts) {
    all.features.shaderInt16 = facts.core.shaderInt16;
    all.features.shaderInt64 = facts.core.shaderInt64;
    all.features.shaderFloat64 = facts.core.shaderFloat64;
    v11.storageBuffer16BitAccess = facts.v11.storageBuffer16BitAccess;
    v11.storagePushConstant16 = facts.v11.storagePushConstant16;
    v12.storageBuffer8BitAccess = facts.v12.storageBuffer8BitAccess;
    v12.storagePushConstant8 = facts.v12.storagePushConstant8;
    v12.shaderFloat16 = facts.v12.shaderFloat16;
    v12.shaderInt8 = facts.v12.shaderInt8;
    v12.shaderSubgroupExtendedTypes = facts.v12.shaderSubgroupExtendedTypes;
    v12.vulkanMemoryModel = facts.v12.vulkanMemoryModel;
    v12.vulkanMemoryModelDeviceScope = facts.v12.vulkanMemoryModelDeviceScope;
    v12.bufferDeviceAddress = VK_TRUE;
    v12.scalarBlockLayout = VK_TRUE;
    v12.timelineSemaphore = VK_TRUE;
    all.pNext = &v11;
    v11.pNext = &v12;
    matrix.cooperative_matrix = VK_TRUE;
    if (facts.Has("cooperative_matrix")) v12.pNext = &matrix;
  }

  VkPhysicalDeviceFeatures2 all{VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_FEATURES_2};
  VkPhysicalDeviceVulkan11Features v11{VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_VULKAN_1_1_FEATURES};
  VkPhysicalDeviceVulkan12Features v12{VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_VULKAN_1_2_FEATURES};
  CooperativeMatrixFeatures matrix;
};

std::vector<const char*> Extensions(const Physical& facts) {
  std::vector<const char*> wanted;
  // A driver that offers the portability subset demands that it is switched on.
  for (const char* name : {"VK_KHR_portability_subset", VK_EXT_MEMORY_BUDGET_EXTENSION_NAME}) {
    if (facts.extensions.count(name)) wanted.push_back(name);
  }
  if (facts.Has("cooperative_matrix")) wanted.push_back(kCooperativeMatrixExtension);
  return wanted;
}

}  // namespace

Gpu::Gpu(const Physical& facts) : facts(facts) {
  Wanted wanted(facts);
  std::vector<const char*> extensions = Extensions(facts);
  float priority = 1;
  VkDeviceQueueCreateInfo queue_info{VK_STRUCTURE_TYPE_DEVICE_QUEUE_CREATE_INFO};
  queue_info.queueFamilyIndex = facts.queue_family;
  queue_info.queueCount = 1;
  queue_info.pQueuePriorities = &priority;
  VkDeviceCreateInfo info{VK_STRUCTURE_TYPE_DEVICE_CREATE_INFO, &wanted.all};
  info.queueCreateInfoCount = 1;
  info.pQueueCreateInfos = &queue_info;
  info.enabledExtensionCount = static_cast<uint32_t>(extensions.size());
  info.ppEnabledExtensionNames = extensions.data();
  Check(vk.CreateDevice(facts.handle, &info, nullptr, &device), "vkCreateDevice");
  vk.GetDeviceQueue(device, facts.queue_family, 0, &queue);
}

void Gpu::Check(VkResult result, const char* what) {
  if (result == VK_SUCCESS) return;
  if (result == VK_ERROR_DEVICE_LOST) {
    State alive = State::kAlive;
    state_.compare_exchange_strong(alive, State::kLost);
    RequireAlive();
  }
  bool memory = result == VK_ERROR_OUT_OF_HOST_MEMORY || result == VK_ERROR_OUT_OF_DEVICE_MEMORY;
  Throw(memory ? kOutOfMemory : kError,
        Text(facts.Title(), ": ", what, " failed: ", ResultName(result)));
}

void Gpu::RequireAlive() const {
  switch (state_.load(std::memory_order_relaxed)) {
    case State::kAlive:
      return;
    case State::kLost:
      Throw(kDeviceLost, Text(facts.Title(), ": the device was lost (a kernel ran too long or ",
                              "touched memory that is not its own, or the driver was reset); ",
                              "start the process anew"));
    case State::kClosed:
      Throw(kError, Text(facts.Title(), ": the process is ending"));
    case State::kForked:
      Throw(kError, Text(facts.Title(), ": was opened before fork(); open it in the new process ",
                         "only, or start that with exec"));
  }
}

}  // namespace k3tvm::vulkan
