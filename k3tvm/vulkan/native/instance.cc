#include "instance.h"

#include <tvm/ffi/error.h>

#include <algorithm>

#include "errors.h"
#include "loader.h"
#include "validation.h"

namespace k3tvm::vulkan {
namespace {

constexpr char kPortability[] = "VK_KHR_portability_enumeration";
constexpr VkInstanceCreateFlags kListPortable = 1;  // younger than some headers, as is its name

uint32_t LoaderVersion() {
  auto ask = Global<PFN_vkEnumerateInstanceVersion>("vkEnumerateInstanceVersion");
  uint32_t version = VK_API_VERSION_1_0;
  if (ask) Check(ask(&version), "vkEnumerateInstanceVersion");
  return version;
}

std::string Create(VkInstance* instance) {
  VkApplicationInfo application{VK_STRUCTURE_TYPE_APPLICATION_INFO};
  application.pApplicationName = "k3tvm";
  application.apiVersion = std::min<uint32_t>(LoaderVersion(), VK_API_VERSION_1_3);
  if (application.apiVersion < VK_API_VERSION_1_2) return "the Vulkan loader is older than 1.2";
  VkInstanceCreateInfo info{VK_STRUCTURE_TYPE_INSTANCE_CREATE_INFO};
  info.pApplicationInfo = &application;
  std::vector<const char*> extensions;
  if (HasExtension(nullptr, kPortability)) {  // lists MoltenVK, which is not a fully conforming driver
    extensions.push_back(kPortability);
    info.flags |= kListPortable;
  }
  Validation validation;
  if (Validation::Wanted()) {
    std::string why_not = validation.Extend(&info, &extensions);
    if (!why_not.empty()) return why_not;
  }
  info.enabledExtensionCount = static_cast<uint32_t>(extensions.size());
  info.ppEnabledExtensionNames = extensions.data();
  VkResult result = Global<PFN_vkCreateInstance>("vkCreateInstance")(&info, nullptr, instance);
  if (result == VK_ERROR_INCOMPATIBLE_DRIVER) return Text("no Vulkan driver is installed", kInstall);
  Check(result, "vkCreateInstance");
  if (Validation::Wanted()) validation.Attach(*instance);
  return "";
}

std::vector<VkPhysicalDevice> List(VkInstance instance) {
  uint32_t n = 0;
  Check(vk.EnumeratePhysicalDevices(instance, &n, nullptr), "vkEnumeratePhysicalDevices");
  std::vector<VkPhysicalDevice> devices(n);
  Check(vk.EnumeratePhysicalDevices(instance, &n, devices.data()), "vkEnumeratePhysicalDevices");
  return devices;
}

std::string Open(Instance* instance) {
  std::string why_not = OpenLoader();
  if (why_not.empty()) why_not = Create(&instance->handle);
  if (!why_not.empty()) return why_not;
  std::string missing = LoadFunctions(instance->handle);
  if (!missing.empty()) return Text("the Vulkan loader has no ", missing);
  instance->devices = List(instance->handle);
  return instance->devices.empty() ? Text("no Vulkan driver offers a device", kInstall) : "";
}

}  // namespace

Instance OpenInstance() {
  Instance instance;
  try {
    instance.why_not = Open(&instance);
  } catch (const tvm::ffi::Error& error) {
    instance.why_not = error.message();
  }
  return instance;
}

}  // namespace k3tvm::vulkan
