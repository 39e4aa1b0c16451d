// Collects what the Khronos validation layer says, when K3TVM_VULKAN_VALIDATION=1 asks for it.
#ifndef K3TVM_VULKAN_VALIDATION_H_
#define K3TVM_VULKAN_VALIDATION_H_

#include <string>
#include <vector>

#include "vulkan_headers.h"

namespace k3tvm::vulkan {

// What an instance must be created with, so that the layer is on and its messages are collected.
class Validation {
 public:
  // Whether the environment asks for validation.
  static bool Wanted();

  // Adds layer, extensions and settings. Returns why that is not possible, or nothing. The object
  // must outlive the creation of the instance.
  std::string Extend(VkInstanceCreateInfo* info, std::vector<const char*>* extensions);

  // Messages (warnings and errors) since the process began.
  static std::vector<std::string> Messages();

  // Starts the collection for a created instance.
  void Attach(VkInstance instance) const;

 private:
  const char* layer_ = "VK_LAYER_KHRONOS_validation";
  VkValidationFeatureEnableEXT synchronization_ =
      VK_VALIDATION_FEATURE_ENABLE_SYNCHRONIZATION_VALIDATION_EXT;
  VkValidationFeaturesEXT features_{VK_STRUCTURE_TYPE_VALIDATION_FEATURES_EXT};
  VkDebugUtilsMessengerCreateInfoEXT messenger_{
      VK_STRUCTURE_TYPE_DEBUG_UTILS_MESSENGER_CREATE_INFO_EXT};
};

}  // namespace k3tvm::vulkan

#endif  // K3TVM_VULKAN_VALIDATION_H_
