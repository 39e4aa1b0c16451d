#include "describe.h"

#include <vector>

#include "errors.h"

namespace k3tvm::vulkan {
namespace {

void WriteLimits(const VkPhysicalDeviceLimits& limits, const Physical& device, Json* json) {
  json->Member("max_threads", limits.maxComputeWorkGroupInvocations);
  json->List("max_threads_dim", limits.maxComputeWorkGroupSize);
  json->List("max_grid", limits.maxComputeWorkGroupCount);
  json->Member("shared_bytes", limits.maxComputeSharedMemorySize);
  json->Member("push_bytes", limits.maxPushConstantsSize);
  json->Member("max_storage_buffer_range", limits.maxStorageBufferRange);
  json->Member("max_allocation_bytes", device.max_allocation);
  json->Member("max_allocations", limits.maxMemoryAllocationCount);
  json->Member("timestamps", device.timestamp_bits != 0);
}

void WriteHeaps(const Physical& device, Json* json) {
  Physical::Budget budget = device.ReadBudget();
  json->Key("heaps").Open('[');
  for (uint32_t i = 0; i < device.memory.memoryHeapCount; ++i) {
    const VkMemoryHeap& heap = device.memory.memoryHeaps[i];
    json->Open('{').Member("bytes", heap.size).Member("budget_bytes", budget.budget[i]);
    json->Member("used_bytes", budget.used[i]);
    json->Member("device_local", (heap.flags & VK_MEMORY_HEAP_DEVICE_LOCAL_BIT) != 0).Close('}');
  }
  json->Close(']').Member("budget_from_driver", budget.from_driver);
}

void WriteMatrixShapes(const Physical& device, Json* json) {
  json->Key("cooperative_matrix_shapes").Open('[');
  for (const auto& s : device.matrix_shapes) {
    json->Open('{').List("mnk", std::vector<uint32_t>{s.m, s.n, s.k});
    json->List("types", std::vector<uint32_t>{s.a_type, s.b_type, s.c_type, s.result_type});
    json->Member("scope", s.scope).Close('}');
  }
  json->Close(']');
}

}  // namespace

const char* TypeName(VkPhysicalDeviceType type) {
  switch (type) {
    case VK_PHYSICAL_DEVICE_TYPE_INTEGRATED_GPU:
      return "integrated";
    case VK_PHYSICAL_DEVICE_TYPE_DISCRETE_GPU:
      return "discrete";
    case VK_PHYSICAL_DEVICE_TYPE_VIRTUAL_GPU:
      return "virtual";
    case VK_PHYSICAL_DEVICE_TYPE_CPU:
      return "cpu";
    default:
      return "other";
  }
}

std::string Version(uint32_t version) {
  return Text(VK_API_VERSION_MAJOR(version), ".", VK_API_VERSION_MINOR(version), ".",
              VK_API_VERSION_PATCH(version));
}

void WritePhysical(const Physical& device, Json* json) {
  json->Open('{').Member("index", device.index).Member("name", device.base.deviceName);
  json->Member("usable", device.why_not.empty()).Member("why_not", device.why_not);
  json->Member("type", TypeName(device.base.deviceType));
  json->Member("vendor", device.base.vendorID).Member("device", device.base.deviceID);
  json->Member("api_version", Version(device.base.apiVersion));
  json->Member("driver_name", device.driver.driverName);
  json->Member("driver_info", device.driver.driverInfo);
  json->Member("driver_version", device.base.driverVersion);
  json->Member("driver_id", static_cast<int>(device.driver.driverID));
  json->Member("uuid", Hex(device.id.deviceUUID));
  json->Key("limits").Open('{');
  WriteLimits(device.base.limits, device, json);
  json->Close('}').Member("subgroup", device.subgroup.subgroupSize);
  json->Member("subgroup_operations", device.subgroup.supportedOperations);
  json->List("features", device.features).Member("unified", device.unified);
  WriteHeaps(device, json);
  WriteMatrixShapes(device, json);
  json->Close('}');
}

}  // namespace k3tvm::vulkan
