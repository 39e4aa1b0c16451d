#include "device_api.h"

#include <algorithm>
#include <vector>

#include "errors.h"
#include "runtime.h"
#include "target_properties.h"

namespace k3tvm::vulkan {
namespace {

namespace ffi = tvm::ffi;

constexpr size_t kAlignment = 256;            // of every allocation
constexpr size_t kBounceBytes = 16ull << 20;  // of a copy from device to device

std::string Extents(const uint32_t (&extents)[3]) {
  return Text("[", extents[0], ", ", extents[1], ", ", extents[2], "]");
}

int64_t DeviceBytes(const Physical& facts) {
  int64_t bytes = 0;
  for (uint32_t i = 0; i < facts.memory.memoryHeapCount; ++i) {
    const VkMemoryHeap& heap = facts.memory.memoryHeaps[i];
    if (heap.flags & VK_MEMORY_HEAP_DEVICE_LOCAL_BIT) bytes += static_cast<int64_t>(heap.size);
  }
  return bytes;
}

// Between two devices there is no common memory: through the host, piece by piece.
void CopyAcross(const char* from, char* to, size_t size, int from_device, int to_device) {
  std::vector<char> bounce(std::min(size, kBounceBytes));
  for (size_t at = 0; at < size; at += bounce.size()) {
    size_t n = std::min(bounce.size(), size - at);
    Runtime::Get().At(from_device).Download(from + at, bounce.data(), n);
    Runtime::Get().At(to_device).Upload(to + at, bounce.data(), n);
  }
}

}  // namespace

VulkanDeviceAPI* VulkanDeviceAPI::Global() {
  static auto* api = new VulkanDeviceAPI;  // never destroyed: tensors may be freed later
  return api;
}

void VulkanDeviceAPI::SetDevice(DLDevice device) { Runtime::SetCurrent(device.device_id); }

void VulkanDeviceAPI::GetAttr(DLDevice device, tvm::runtime::DeviceAttrKind kind, ffi::Any* value) {
  if (kind == tvm::runtime::kExist) {
    *value = static_cast<int>(Runtime::Get().Usable(device.device_id));
    return;
  }
  const Physical& facts = Runtime::Get().FactsOf(device.device_id);
  const VkPhysicalDeviceLimits& limits = facts.base.limits;
  switch (kind) {
    case tvm::runtime::kMaxThreadsPerBlock:
      *value = static_cast<int64_t>(limits.maxComputeWorkGroupInvocations);
      break;
    case tvm::runtime::kWarpSize:
      *value = int64_t{1};  // TVM leaves barriers out inside what it takes for a warp
      break;
    case tvm::runtime::kMaxSharedMemoryPerBlock:
      *value = static_cast<int64_t>(limits.maxComputeSharedMemorySize);
      break;
    case tvm::runtime::kDeviceName:
      *value = ffi::String(facts.base.deviceName);
      break;
    case tvm::runtime::kMaxThreadDimensions:
      *value = ffi::String(Extents(limits.maxComputeWorkGroupSize));
      break;
    case tvm::runtime::kApiVersion:
      *value = static_cast<int64_t>(facts.base.apiVersion);
      break;
    case tvm::runtime::kDriverVersion:
      *value = static_cast<int64_t>(facts.base.driverVersion);
      break;
    case tvm::runtime::kTotalGlobalMemory:
      *value = DeviceBytes(facts);
      break;
    case tvm::runtime::kAvailableGlobalMemory:
      *value = static_cast<int64_t>(Runtime::Get().At(device.device_id).Available());
      break;
    default:  // clock rate, registers and such: Vulkan does not tell
      break;
  }
}

void VulkanDeviceAPI::GetTargetProperty(DLDevice device, const std::string& name, ffi::Any* value) {
  *value = TargetProperty(Runtime::Get().FactsOf(device.device_id), name);
}

void* VulkanDeviceAPI::AllocDataSpace(DLDevice device, size_t size, size_t alignment, DLDataType) {
  if (alignment > kAlignment) {
    Throw(kError, Text("memory aligned to ", alignment, " bytes was asked for, it is aligned to ",
                       kAlignment));
  }
  return Runtime::Get().At(device.device_id).Allocate(size);
}

void VulkanDeviceAPI::FreeDataSpace(DLDevice device, void* address) {
  Runtime::Get().At(device.device_id).Free(address);
}

void VulkanDeviceAPI::StreamSync(DLDevice device, TVMStreamHandle) {
  Runtime::Get().At(device.device_id).Sync();
}

void VulkanDeviceAPI::CopyDataFromTo(const void* from, size_t from_offset, void* to,
                                     size_t to_offset, size_t size, DLDevice from_device,
                                     DLDevice to_device, DLDataType, TVMStreamHandle) {
  if (!size) return;
  const char* source = static_cast<const char*>(from) + from_offset;
  char* target = static_cast<char*>(to) + to_offset;
  bool from_us = from_device.device_type == kDLVulkan, to_us = to_device.device_type == kDLVulkan;
  if (from_us && to_us && from_device.device_id != to_device.device_id) {
    CopyAcross(source, target, size, from_device.device_id, to_device.device_id);
  } else if (from_us && to_us) {
    Runtime::Get().At(to_device.device_id).Copy(source, target, size);
  } else if (to_us && from_device.device_type == kDLCPU) {
    Runtime::Get().At(to_device.device_id).Upload(target, source, size);
  } else if (from_us && to_device.device_type == kDLCPU) {
    Runtime::Get().At(from_device.device_id).Download(source, target, size);
  } else {
    Throw(kError, "a Vulkan device copies only to and from the CPU and Vulkan devices");
  }
}

}  // namespace k3tvm::vulkan
