#include "validation.h"

#include <cstdlib>
#include <cstring>
#include <mutex>

#include "errors.h"
#include "loader.h"

namespace k3tvm::vulkan {
namespace {

struct Collection {
  std::mutex lock;
  std::vector<std::string> messages;
};

// Never destroyed: the layer may speak while the process ends.
Collection& Collected() {
  static auto* collection = new Collection;
  return *collection;
}

VkBool32 VKAPI_PTR Collect(VkDebugUtilsMessageSeverityFlagBitsEXT, VkDebugUtilsMessageTypeFlagsEXT,
                           const VkDebugUtilsMessengerCallbackDataEXT* data, void*) {
  std::lock_guard<std::mutex> guard(Collected().lock);
  Collected().messages.push_back(data->pMessage);
  return VK_FALSE;
}

bool HasLayer(const char* wanted) {
  auto list = Global<PFN_vkEnumerateInstanceLayerProperties>("vkEnumerateInstanceLayerProperties");
  uint32_t n = 0;
  Check(list(&n, nullptr), "vkEnumerateInstanceLayerProperties");
  std::vector<VkLayerProperties> layers(n);
  Check(list(&n, layers.data()), "vkEnumerateInstanceLayerProperties");
  for (const auto& layer : layers) {
    if (!std::strcmp(layer.layerName, wanted)) return true;
  }
  return false;
}

}  // namespace

bool Validation::Wanted() {
  const char* wanted = std::getenv("K3TVM_VULKAN_VALIDATION");
  return wanted && *wanted && std::strcmp(wanted, "0") != 0;
}

std::string Validation::Extend(VkInstanceCreateInfo* info, std::vector<const char*>* extensions) {
  if (!HasLayer(layer_)) {
    return Text("K3TVM_VULKAN_VALIDATION is set and ", layer_,
                " is not installed; apt install vulkan-validationlayers, or unset it");
  }
  info->enabledLayerCount = 1;
  info->ppEnabledLayerNames = &layer_;
  extensions->push_back(VK_EXT_DEBUG_UTILS_EXTENSION_NAME);
  messenger_.messageSeverity = VK_DEBUG_UTILS_MESSAGE_SEVERITY_WARNING_BIT_EXT |
                               VK_DEBUG_UTILS_MESSAGE_SEVERITY_ERROR_BIT_EXT;
  messenger_.messageType =
      VK_DEBUG_UTILS_MESSAGE_TYPE_GENERAL_BIT_EXT | VK_DEBUG_UTILS_MESSAGE_TYPE_VALIDATION_BIT_EXT;
  messenger_.pfnUserCallback = Collect;
  info->pNext = &messenger_;  // so that creating the instance is watched, too
  if (HasExtension(layer_, VK_EXT_VALIDATION_FEATURES_EXTENSION_NAME)) {
    extensions->push_back(VK_EXT_VALIDATION_FEATURES_EXTENSION_NAME);
    features_.enabledValidationFeatureCount = 1;
    features_.pEnabledValidationFeatures = &synchronization_;
    messenger_.pNext = &features_;
  }
  return "";
}

void Validation::Attach(VkInstance instance) const {
  auto create = reinterpret_cast<PFN_vkCreateDebugUtilsMessengerEXT>(
      vk.GetInstanceProcAddr(instance, "vkCreateDebugUtilsMessengerEXT"));
  VkDebugUtilsMessengerCreateInfoEXT info = messenger_;
  info.pNext = nullptr;
  VkDebugUtilsMessengerEXT messenger = VK_NULL_HANDLE;
  Check(create(instance, &info, nullptr, &messenger), "vkCreateDebugUtilsMessengerEXT");
}

std::vector<std::string> Validation::Messages() {
  std::lock_guard<std::mutex> guard(Collected().lock);
  return Collected().messages;
}

}  // namespace k3tvm::vulkan
