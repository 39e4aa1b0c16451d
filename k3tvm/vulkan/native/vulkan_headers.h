// The Vulkan types, without the prototypes of its functions: those are looked up at run time.
#ifndef K3TVM_VULKAN_VULKAN_HEADERS_H_
#define K3TVM_VULKAN_VULKAN_HEADERS_H_

#define VK_NO_PROTOTYPES
#include <vulkan/vulkan.h>

namespace k3tvm::vulkan {

// VK_KHR_cooperative_matrix is younger than the Vulkan headers of several Linux releases, so what
// is needed of it is written down here.
inline constexpr char kCooperativeMatrixExtension[] = "VK_KHR_cooperative_matrix";

struct CooperativeMatrixFeatures {
  VkStructureType sType = static_cast<VkStructureType>(1000506000);
  void* pNext = nullptr;
  VkBool32 cooperative_matrix = VK_FALSE;
  VkBool32 robust_buffer_access = VK_FALSE;
};

struct CooperativeMatrixShape {
  VkStructureType sType = static_cast<VkStructureType>(1000506001);
  void* pNext = nullptr;
  uint32_t m = 0, n = 0, k = 0;
  uint32_t a_type = 0, b_type = 0, c_type = 0, result_type = 0;  // 0: float16, 1: float32
  VkBool32 saturating = VK_FALSE;
  uint32_t scope = 0;  // 3: subgroup
};

using GetCooperativeMatrixShapes = VkResult(VKAPI_PTR*)(VkPhysicalDevice, uint32_t*,
                                                        CooperativeMatrixShape*);

}  // namespace k3tvm::vulkan

#endif  // K3TVM_VULKAN_VULKAN_HEADERS_H_
