#include "target_properties.h"

#include <tvm/ffi/container/array.h>
#include <tvm/ffi/string.h>

#include <functional>
#include <map>

#include "describe.h"

namespace k3tvm::vulkan {
namespace {

namespace ffi = tvm::ffi;
using Answer = std::function<ffi::Any(const Physical&)>;

constexpr int64_t kSpirv15 = 0x10500;  // what Vulkan 1.2 takes

Answer Feature(const char* name) {
  return [name](const Physical& facts) { return ffi::Any(facts.Has(name)); };
}

Answer Fixed(ffi::Any value) {
  return [value](const Physical&) { return value; };
}

Answer Limit(uint32_t VkPhysicalDeviceLimits::* limit) {
  return [limit](const Physical& facts) {
    return ffi::Any(static_cast<int64_t>(facts.base.limits.*limit));
  };
}

Answer WorkgroupSize(int dimension) {
  return [dimension](const Physical& facts) {
    return ffi::Any(static_cast<int64_t>(facts.base.limits.maxComputeWorkGroupSize[dimension]));
  };
}

std::map<std::string, Answer> Answers() {
  using Limits = VkPhysicalDeviceLimits;
  return {
      {"mattr", Fixed(ffi::Array<ffi::String>{})},
      {"supports_float16", Feature("float16")},
      {"supports_float32", Fixed(true)},
      {"supports_float64", Feature("float64")},
      {"supports_int8", Feature("int8")},
      {"supports_int16", Feature("int16")},
      {"supports_int32", Fixed(true)},
      {"supports_int64", Feature("int64")},
      {"supports_8bit_buffer", Feature("storage8")},
      {"supports_16bit_buffer", Feature("storage16")},
      {"supports_cooperative_matrix", Feature("cooperative_matrix")},
      // Buffers are addresses: what concerns descriptors is not used.
      {"supports_storage_buffer_storage_class", Fixed(true)},
      {"supports_push_descriptor", Fixed(false)},
      {"supports_dedicated_allocation", Fixed(false)},
      {"supports_integer_dot_product", Fixed(false)},
      {"supported_subgroup_operations",
       [](const Physical& f) { return ffi::Any(int64_t{f.subgroup.supportedOperations}); }},
      {"max_num_threads", Limit(&Limits::maxComputeWorkGroupInvocations)},
      {"max_threads_per_block", Limit(&Limits::maxComputeWorkGroupInvocations)},
      // TVM leaves barriers out inside what it takes for a warp; see the device attribute.
      {"thread_warp_size", Fixed(int64_t{1})},
      {"max_block_size_x", WorkgroupSize(0)},
      {"max_block_size_y", WorkgroupSize(1)},
      {"max_block_size_z", WorkgroupSize(2)},
      {"max_push_constants_size", Limit(&Limits::maxPushConstantsSize)},
      {"max_uniform_buffer_range", Limit(&Limits::maxUniformBufferRange)},
      {"max_storage_buffer_range", Limit(&Limits::maxStorageBufferRange)},
      {"max_per_stage_descriptor_storage_buffer",
       Limit(&Limits::maxPerStageDescriptorStorageBuffers)},
      {"max_shared_memory_per_block", Limit(&Limits::maxComputeSharedMemorySize)},
      {"device_type",
       [](const Physical& f) { return ffi::Any(ffi::String(TypeName(f.base.deviceType))); }},
      {"device_name", [](const Physical& f) { return ffi::Any(ffi::String(f.base.deviceName)); }},
      {"driver_name", [](const Physical& f) { return ffi::Any(ffi::String(f.driver.driverName)); }},
      {"driver_version", [](const Physical& f) { return ffi::Any(int64_t{f.base.driverVersion}); }},
      {"vulkan_api_version",
       [](const Physical& f) { return ffi::Any(int64_t{f.base.apiVersion}); }},
      {"max_spirv_version", Fixed(kSpirv15)},
  };
}

}  // namespace

ffi::Any TargetProperty(const Physical& facts, const std::string& name) {
  static const auto* answers = new std::map<std::string, Answer>(Answers());
  auto found = answers->find(name);
  return found == answers->end() ? ffi::Any() : found->second(facts);
}

}  // namespace k3tvm::vulkan
