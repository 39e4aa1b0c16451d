// Facts of a physical device: limits, the features that kernels may ask for by name, and whether
// this plug-in can use it. Reading them opens nothing.
#ifndef K3TVM_VULKAN_PHYSICAL_H_
#define K3TVM_VULKAN_PHYSICAL_H_

#include <set>
#include <string>
#include <vector>

#include "vulkan_headers.h"

namespace k3tvm::vulkan {

struct Physical {
  VkPhysicalDevice handle = VK_NULL_HANDLE;
  int index = 0;
  std::string why_not;  // why it is not usable; empty if it is

  VkPhysicalDeviceProperties base{};
  VkPhysicalDeviceIDProperties id{VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_ID_PROPERTIES};
  VkPhysicalDeviceSubgroupProperties subgroup{
      VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_SUBGROUP_PROPERTIES};
  VkPhysicalDeviceMaintenance3Properties allocation{
      VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_MAINTENANCE_3_PROPERTIES};
  VkPhysicalDeviceDriverProperties driver{VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_DRIVER_PROPERTIES};
  VkPhysicalDeviceMemoryProperties memory{};

  VkPhysicalDeviceFeatures core{};
  VkPhysicalDeviceVulkan11Features v11{VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_VULKAN_1_1_FEATURES};
  VkPhysicalDeviceVulkan12Features v12{VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_VULKAN_1_2_FEATURES};
  std::set<std::string> extensions;
  std::set<std::string> features;  // by the names that compiled kernels use
  std::vector<CooperativeMatrixShape> matrix_shapes;

  uint32_t queue_family = 0;
  uint32_t timestamp_bits = 0;  // 0: the queue has no timestamps
  uint64_t max_allocation = 0;  // bytes of one allocation
  bool unified = false;         // the device works in the host's memory

  // "vulkan:1 (NAME)", as messages call the device.
  std::string Title() const;
  bool Has(const std::string& feature) const { return features.count(feature) != 0; }

  // Bytes that each heap can still take, and whether the driver said so (VK_EXT_memory_budget) or
  // it is only the size of the heap.
  struct Budget {
    std::vector<uint64_t> budget, used;
    bool from_driver = false;
  };
  Budget ReadBudget() const;
};

// Reads everything about one device; what is missing ends up in `why_not`.
Physical ReadPhysical(VkInstance instance, VkPhysicalDevice handle, int index);

}  // namespace k3tvm::vulkan

#endif  // K3TVM_VULKAN_PHYSICAL_H_
