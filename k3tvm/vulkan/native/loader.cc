#include "loader.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <vector>

#ifdef _WIN32
#include <windows.h>
#else
#include <dlfcn.h>
#endif

#include "errors.h"

namespace k3tvm::vulkan {

Functions vk;

namespace {

#ifdef _WIN32
void* Open(const std::string& name) { return LoadLibraryA(name.c_str()); }
void* Symbol(void* library, const char* name) {
  return reinterpret_cast<void*>(GetProcAddress(static_cast<HMODULE>(library), name));
}
#else
void* Open(const std::string& name) { return dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL); }
void* Symbol(void* library, const char* name) { return dlsym(library, name); }
#endif

std::vector<std::string> LoaderNames() {
  const char* chosen = std::getenv("K3TVM_VULKAN_LOADER");
  if (chosen && *chosen) return {chosen};
#if defined(_WIN32)
  return {"vulkan-1.dll"};
#elif defined(__APPLE__)
  return {"libvulkan.1.dylib", "libvulkan.dylib", "libMoltenVK.dylib"};
#else
  return {"libvulkan.so.1", "libvulkan.so"};
#endif
}

}  // namespace

std::string OpenLoader() {
  std::string tried;
  for (const std::string& name : LoaderNames()) {
    tried += (tried.empty() ? "" : ", ") + name;
    void* library = Open(name);
    if (!library) continue;
    void* entry = Symbol(library, "vkGetInstanceProcAddr");
    if (!entry) return name + " is no Vulkan loader";
    vk.GetInstanceProcAddr = reinterpret_cast<PFN_vkGetInstanceProcAddr>(entry);
    return "";
  }
  return Text("no Vulkan loader on this system (", tried, ")", kInstall);
}

std::string LoadFunctions(VkInstance instance) {
#define K3TVM_LOAD(name)                                                                  \
  vk.name = reinterpret_cast<PFN_vk##name>(vk.GetInstanceProcAddr(instance, "vk" #name)); \
  if (!vk.name) return "vk" #name;
  K3TVM_VULKAN_FUNCTIONS(K3TVM_LOAD)
#undef K3TVM_LOAD
  return "";
}

bool HasExtension(const char* layer, const char* wanted) {
  auto list =
      Global<PFN_vkEnumerateInstanceExtensionProperties>("vkEnumerateInstanceExtensionProperties");
  uint32_t n = 0;
  Check(list(layer, &n, nullptr), "vkEnumerateInstanceExtensionProperties");
  std::vector<VkExtensionProperties> found(n);
  Check(list(layer, &n, found.data()), "vkEnumerateInstanceExtensionProperties");
  return std::any_of(found.begin(), found.end(), [wanted](const VkExtensionProperties& extension) {
    return !std::strcmp(extension.extensionName, wanted);
  });
}

}  // namespace k3tvm::vulkan
