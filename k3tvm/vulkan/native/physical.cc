#include "physical.h"

#include <algorithm>
#include <cstring>

#include "describe.h"
#include "errors.h"
#include "loader.h"

namespace k3tvm::vulkan {
namespace {

void ReadExtensions(Physical* device) {
  uint32_t n = 0;
  Check(vk.EnumerateDeviceExtensionProperties(device->handle, nullptr, &n, nullptr),
        "vkEnumerateDeviceExtensionProperties");
  std::vector<VkExtensionProperties> found(n);
  Check(vk.EnumerateDeviceExtensionProperties(device->handle, nullptr, &n, found.data()),
        "vkEnumerateDeviceExtensionProperties");
  for (const auto& extension : found) device->extensions.insert(extension.extensionName);
}

void ReadProperties(Physical* device) {
  VkPhysicalDeviceMaintenance4Properties buffer{
      VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_MAINTENANCE_4_PROPERTIES};
  VkPhysicalDeviceProperties2 all{VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_PROPERTIES_2, &device->id};
  device->id.pNext = &device->subgroup;
  device->subgroup.pNext = &device->allocation;
  device->allocation.pNext = &device->driver;
  bool knows_buffers = device->base.apiVersion >= VK_API_VERSION_1_3;
  if (knows_buffers) device->driver.pNext = &buffer;
  vk.GetPhysicalDeviceProperties2(device->handle, &all);
  device->max_allocation = device->allocation.maxMemoryAllocationSize;
  if (knows_buffers)
    device->max_allocation = std::min(device->max_allocation, buffer.maxBufferSize);
  device->id.pNext = device->subgroup.pNext = nullptr;  // copies must not point into this object
  device->allocation.pNext = device->driver.pNext = nullptr;
}

void ReadMemory(Physical* device) {
  VkPhysicalDeviceMemoryProperties2 all{VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_MEMORY_PROPERTIES_2};
  vk.GetPhysicalDeviceMemoryProperties2(device->handle, &all);
  device->memory = all.memoryProperties;
  device->unified = device->base.deviceType == VK_PHYSICAL_DEVICE_TYPE_INTEGRATED_GPU ||
                    device->base.deviceType == VK_PHYSICAL_DEVICE_TYPE_CPU;
}

void ReadMatrixShapes(VkInstance instance, Physical* device) {
  auto list = reinterpret_cast<GetCooperativeMatrixShapes>(
      vk.GetInstanceProcAddr(instance, "vkGetPhysicalDeviceCooperativeMatrixPropertiesKHR"));
  uint32_t n = 0;
  if (!list || list(device->handle, &n, nullptr) != VK_SUCCESS) return;
  device->matrix_shapes.resize(n);
  Check(list(device->handle, &n, device->matrix_shapes.data()),
        "vkGetPhysicalDeviceCooperativeMatrixPropertiesKHR");
}

// The one shape that compiled kernels use: float16 times float16 plus float32, 16 by 16 by 16.
bool IsOurShape(const CooperativeMatrixShape& shape) {
  return shape.m == 16 && shape.n == 16 && shape.k == 16 && shape.a_type == 0 &&
         shape.b_type == 0 && shape.c_type == 1 && shape.result_type == 1 && shape.scope == 3;
}

void ReadFeatures(VkInstance instance, Physical* device) {
  CooperativeMatrixFeatures matrix;
  VkPhysicalDeviceFeatures2 all{VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_FEATURES_2, &device->v11};
  device->v11.pNext = &device->v12;
  bool knows_matrices = device->extensions.count(kCooperativeMatrixExtension) != 0;
  if (knows_matrices) device->v12.pNext = &matrix;
  vk.GetPhysicalDeviceFeatures2(device->handle, &all);
  device->core = all.features;
  device->v11.pNext = device->v12.pNext = nullptr;
  if (matrix.cooperative_matrix) ReadMatrixShapes(instance, device);
}

// Device features by the names that compiled kernels use.
void NameFeatures(Physical* device) {
  bool compute = device->subgroup.supportedStages & VK_SHADER_STAGE_COMPUTE_BIT;
  auto subgroup = [&](VkSubgroupFeatureFlagBits operation) {
    return compute && (device->subgroup.supportedOperations & operation);
  };
  const auto& shapes = device->matrix_shapes;
  const std::pair<const char*, bool> names[] = {
      {"float16", device->v12.shaderFloat16},
      {"int8", device->v12.shaderInt8},
      {"int16", device->core.shaderInt16},
      {"int64", device->core.shaderInt64},
      {"float64", device->core.shaderFloat64},
      {"storage8", device->v12.storageBuffer8BitAccess},
      {"storage16", device->v11.storageBuffer16BitAccess},
      {"subgroup_arithmetic", subgroup(VK_SUBGROUP_FEATURE_ARITHMETIC_BIT)},
      {"subgroup_shuffle", subgroup(VK_SUBGROUP_FEATURE_SHUFFLE_BIT)},
      {"cooperative_matrix", std::any_of(shapes.begin(), shapes.end(), IsOurShape)},
  };
  for (auto [name, present] : names) {
    if (present) device->features.insert(name);
  }
}

// Picks a queue family that computes; one with timestamps if there is any.
bool PickQueue(Physical* device) {
  uint32_t n = 0;
  vk.GetPhysicalDeviceQueueFamilyProperties(device->handle, &n, nullptr);
  std::vector<VkQueueFamilyProperties> families(n);
  vk.GetPhysicalDeviceQueueFamilyProperties(device->handle, &n, families.data());
  bool found = false;
  for (uint32_t i = 0; i < n; ++i) {
    if (!(families[i].queueFlags & VK_QUEUE_COMPUTE_BIT)) continue;
    if (found && (device->timestamp_bits || !families[i].timestampValidBits)) continue;
    device->queue_family = i;
    device->timestamp_bits = families[i].timestampValidBits;
    found = true;
  }
  return found;
}

std::string Missing(const Physical& device) {
  std::string missing;
  const std::pair<const char*, bool> needs[] = {
      {"bufferDeviceAddress", device.v12.bufferDeviceAddress},
      {"scalarBlockLayout", device.v12.scalarBlockLayout},
      {"timelineSemaphore", device.v12.timelineSemaphore},
  };
  for (auto [name, present] : needs) {
    if (!present) missing += (missing.empty() ? "" : ", ") + std::string(name);
  }
  return missing.empty() ? "" : "lacks " + missing;
}

}  // namespace

std::string Physical::Title() const { return Text("vulkan:", index, " (", base.deviceName, ")"); }

Physical::Budget Physical::ReadBudget() const {
  VkPhysicalDeviceMemoryBudgetPropertiesEXT said{
      VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_MEMORY_BUDGET_PROPERTIES_EXT};
  VkPhysicalDeviceMemoryProperties2 all{VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_MEMORY_PROPERTIES_2};
  Budget result;
  result.from_driver = extensions.count(VK_EXT_MEMORY_BUDGET_EXTENSION_NAME) != 0;
  if (result.from_driver) {
    all.pNext = &said;
    vk.GetPhysicalDeviceMemoryProperties2(handle, &all);
  }
  for (uint32_t i = 0; i < memory.memoryHeapCount; ++i) {
    uint64_t size = memory.memoryHeaps[i].size;
    result.budget.push_back(result.from_driver ? std::min(said.heapBudget[i], size) : size);
    result.used.push_back(result.from_driver ? said.heapUsage[i] : 0);
  }
  return result;
}

Physical ReadPhysical(VkInstance instance, VkPhysicalDevice handle, int index) {
  Physical device;
  device.handle = handle;
  device.index = index;
  vk.GetPhysicalDeviceProperties(handle, &device.base);
  if (device.base.apiVersion < VK_API_VERSION_1_2) {
    device.why_not = Text("has Vulkan ", Version(device.base.apiVersion), ", 1.2 is needed");
    return device;
  }
  ReadExtensions(&device);
  ReadProperties(&device);
  ReadMemory(&device);
  ReadFeatures(instance, &device);
  NameFeatures(&device);
  device.why_not = PickQueue(&device) ? Missing(device) : "has no queue that computes";
  return device;
}

}  // namespace k3tvm::vulkan
