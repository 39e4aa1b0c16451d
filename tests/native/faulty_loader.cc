// A Vulkan loader that passes everything on to the real one, except for the faults that FAULTS
// names:
//   two            every device is listed twice
//   old            devices have Vulkan 1.1
//   no_address     devices lack bufferDeviceAddress
//   no_float16     devices lack shaderFloat16
//   no_timestamps  queues have no timestamps
//   discrete       256 MiB of the device's own memory, apart from the host's
//   lost=N         the device is lost at submission N
//   full           the driver has no memory, whatever its budget says
#include <dlfcn.h>

#include <cstdlib>
#include <cstring>
#include <string>

#define VK_NO_PROTOTYPES
#include <vulkan/vulkan.h>

namespace {

constexpr VkDeviceSize kOwnMemory = 256ull << 20;

bool Has(const std::string& fault) {
  const char* faults = std::getenv("FAULTS");
  return (" " + std::string(faults ? faults : "") + " ").find(" " + fault + " ") !=
         std::string::npos;
}

int LostAt() {
  const char* faults = std::getenv("FAULTS");
  const char* at = faults ? std::strstr(faults, "lost=") : nullptr;
  return at ? std::atoi(at + 5) : 0;
}

PFN_vkGetInstanceProcAddr Real() {
  static auto real = reinterpret_cast<PFN_vkGetInstanceProcAddr>(
      dlsym(dlopen("libvulkan.so.1", RTLD_NOW | RTLD_LOCAL), "vkGetInstanceProcAddr"));
  return real;
}

VkInstance instance = VK_NULL_HANDLE;

template <typename Function>
Function Next(const char* name) {
  return reinterpret_cast<Function>(Real()(instance, name));
}
#define NEXT(name) Next<PFN_##name>(#name)

template <typename Struct>
Struct* Chained(void* chain, VkStructureType type) {
  for (auto* link = static_cast<VkBaseOutStructure*>(chain); link; link = link->pNext) {
    if (link->sType == type) return reinterpret_cast<Struct*>(link);
  }
  return nullptr;
}

VkResult EnumeratePhysicalDevices(VkInstance handle, uint32_t* n, VkPhysicalDevice* out) {
  if (!Has("two")) return NEXT(vkEnumeratePhysicalDevices)(handle, n, out);
  uint32_t real = 0;
  VkResult result = NEXT(vkEnumeratePhysicalDevices)(handle, &real, nullptr);
  if (out) result = NEXT(vkEnumeratePhysicalDevices)(handle, &real, out);
  for (uint32_t i = 0; out && i < real; ++i) out[real + i] = out[i];
  *n = 2 * real;
  return result;
}

void Change(VkPhysicalDeviceProperties* properties) {
  if (Has("old")) properties->apiVersion = VK_API_VERSION_1_1;
  if (Has("discrete")) properties->deviceType = VK_PHYSICAL_DEVICE_TYPE_DISCRETE_GPU;
}

void GetProperties(VkPhysicalDevice device, VkPhysicalDeviceProperties* out) {
  NEXT(vkGetPhysicalDeviceProperties)(device, out);
  Change(out);
}

void GetProperties2(VkPhysicalDevice device, VkPhysicalDeviceProperties2* out) {
  NEXT(vkGetPhysicalDeviceProperties2)(device, out);
  Change(&out->properties);
}

void GetFeatures2(VkPhysicalDevice device, VkPhysicalDeviceFeatures2* out) {
  NEXT(vkGetPhysicalDeviceFeatures2)(device, out);
  auto* features = Chained<VkPhysicalDeviceVulkan12Features>(
      out->pNext, VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_VULKAN_1_2_FEATURES);
  if (features && Has("no_address")) features->bufferDeviceAddress = VK_FALSE;
  if (features && Has("no_float16")) features->shaderFloat16 = VK_FALSE;
}

void GetQueues(VkPhysicalDevice device, uint32_t* n, VkQueueFamilyProperties* out) {
  NEXT(vkGetPhysicalDeviceQueueFamilyProperties)(device, n, out);
  for (uint32_t i = 0; out && Has("no_timestamps") && i < *n; ++i) out[i].timestampValidBits = 0;
}

// The real driver's only type of memory, shown as two.
void GetMemory2(VkPhysicalDevice device, VkPhysicalDeviceMemoryProperties2* out) {
  NEXT(vkGetPhysicalDeviceMemoryProperties2)(device, out);
  if (!Has("discrete")) return;
  VkPhysicalDeviceMemoryProperties& memory = out->memoryProperties;
  VkDeviceSize all = memory.memoryHeaps[0].size;
  memory = {};
  memory.memoryTypeCount = memory.memoryHeapCount = 2;
  memory.memoryHeaps[0] = {kOwnMemory, VK_MEMORY_HEAP_DEVICE_LOCAL_BIT};
  memory.memoryHeaps[1] = {all, 0};
  if (auto* budget = Chained<VkPhysicalDeviceMemoryBudgetPropertiesEXT>(
          out->pNext, VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_MEMORY_BUDGET_PROPERTIES_EXT)) {
    budget->heapBudget[0] = kOwnMemory;
    budget->heapUsage[0] = 0;
  }
  memory.memoryTypes[0] = {VK_MEMORY_PROPERTY_DEVICE_LOCAL_BIT, 0};
  memory.memoryTypes[1] = {VK_MEMORY_PROPERTY_HOST_VISIBLE_BIT |
                               VK_MEMORY_PROPERTY_HOST_COHERENT_BIT |
                               VK_MEMORY_PROPERTY_HOST_CACHED_BIT,
                           1};
}

void GetRequirements(VkDevice device, VkBuffer buffer, VkMemoryRequirements* out) {
  NEXT(vkGetBufferMemoryRequirements)(device, buffer, out);
  if (Has("discrete")) out->memoryTypeBits = 3;
}

VkResult AllocateMemory(VkDevice device, const VkMemoryAllocateInfo* info,
                        const VkAllocationCallbacks* callbacks, VkDeviceMemory* out) {
  if (Has("full")) return VK_ERROR_OUT_OF_DEVICE_MEMORY;
  VkMemoryAllocateInfo changed = *info;
  if (Has("discrete")) changed.memoryTypeIndex = 0;
  return NEXT(vkAllocateMemory)(device, &changed, callbacks, out);
}

VkResult QueueSubmit(VkQueue queue, uint32_t n, const VkSubmitInfo* infos, VkFence fence) {
  static int submissions = 0;
  if (LostAt() && ++submissions >= LostAt()) return VK_ERROR_DEVICE_LOST;
  return NEXT(vkQueueSubmit)(queue, n, infos, fence);
}

VkResult CreateInstance(const VkInstanceCreateInfo* info, const VkAllocationCallbacks* callbacks,
                        VkInstance* out) {
  VkResult result = NEXT(vkCreateInstance)(info, callbacks, out);
  if (result == VK_SUCCESS) instance = *out;
  return result;
}

struct Wrapped {
  const char* name;
  PFN_vkVoidFunction function;
};

#define WRAP(name, function) {name, reinterpret_cast<PFN_vkVoidFunction>(function)}
const Wrapped kWrapped[] = {
    WRAP("vkCreateInstance", CreateInstance),
    WRAP("vkEnumeratePhysicalDevices", EnumeratePhysicalDevices),
    WRAP("vkGetPhysicalDeviceProperties", GetProperties),
    WRAP("vkGetPhysicalDeviceProperties2", GetProperties2),
    WRAP("vkGetPhysicalDeviceFeatures2", GetFeatures2),
    WRAP("vkGetPhysicalDeviceQueueFamilyProperties", GetQueues),
    WRAP("vkGetPhysicalDeviceMemoryProperties2", GetMemory2),
    WRAP("vkGetBufferMemoryRequirements", GetRequirements),
    WRAP("vkAllocateMemory", AllocateMemory),
    WRAP("vkQueueSubmit", QueueSubmit),
};

}  // namespace

extern "C" __attribute__((visibility("default"))) PFN_vkVoidFunction
vkGetInstanceProcAddr(VkInstance handle, const char* name) {
  for (const Wrapped& wrapped : kWrapped) {
    if (!std::strcmp(wrapped.name, name)) return wrapped.function;
  }
  return Real()(handle, name);
}
