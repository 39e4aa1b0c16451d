#include "block.h"

#include <algorithm>
#include <cstdlib>

#include "loader.h"

namespace k3tvm::vulkan {
namespace {

constexpr VkMemoryPropertyFlags kLocal = VK_MEMORY_PROPERTY_DEVICE_LOCAL_BIT;
constexpr VkMemoryPropertyFlags kHost =
    VK_MEMORY_PROPERTY_HOST_VISIBLE_BIT | VK_MEMORY_PROPERTY_HOST_COHERENT_BIT;
constexpr VkMemoryPropertyFlags kCached = VK_MEMORY_PROPERTY_HOST_CACHED_BIT;
// Protected, lazily allocated and vendors' special memory needs features that are not switched on.
constexpr VkMemoryPropertyFlags kOrdinary = kLocal | kHost | kCached;

// How well a memory type serves a purpose; 0 if it does not.
int Score(VkMemoryPropertyFlags flags, Purpose purpose, bool unified) {
  if (flags & ~kOrdinary) return 0;
  bool local = flags & kLocal, host = (flags & kHost) == kHost, cached = flags & kCached;
  switch (purpose) {
    case Purpose::kTensors:
      if (unified) return 1 + 4 * local + 2 * host + (host && cached);
      return local ? 1 + !host : 0;
    case Purpose::kUpload:
      return host ? 1 + 2 * !local + !cached : 0;
    case Purpose::kReadback:
      return host ? 1 + 2 * cached + !local : 0;
    case Purpose::kArguments:
      return host ? 1 + local : 0;
  }
  return 0;
}

VkBuffer MakeBuffer(Gpu* gpu, uint64_t size) {
  VkBufferCreateInfo info{VK_STRUCTURE_TYPE_BUFFER_CREATE_INFO};
  info.size = size;
  info.usage = VK_BUFFER_USAGE_STORAGE_BUFFER_BIT | VK_BUFFER_USAGE_TRANSFER_SRC_BIT |
               VK_BUFFER_USAGE_TRANSFER_DST_BIT | VK_BUFFER_USAGE_SHADER_DEVICE_ADDRESS_BIT;
  info.sharingMode = VK_SHARING_MODE_EXCLUSIVE;
  VkBuffer buffer = VK_NULL_HANDLE;
  gpu->Check(vk.CreateBuffer(gpu->device, &info, nullptr, &buffer), "vkCreateBuffer");
  return buffer;
}

// Tries the types in order; leaves block->memory empty when all are full.
void TakeMemory(Gpu* gpu, Purpose purpose, Block* block) {
  VkMemoryRequirements needs;
  vk.GetBufferMemoryRequirements(gpu->device, block->buffer, &needs);
  VkMemoryAllocateFlagsInfo flags{VK_STRUCTURE_TYPE_MEMORY_ALLOCATE_FLAGS_INFO};
  flags.flags = VK_MEMORY_ALLOCATE_DEVICE_ADDRESS_BIT;
  VkMemoryAllocateInfo info{VK_STRUCTURE_TYPE_MEMORY_ALLOCATE_INFO, &flags};
  info.allocationSize = block->bytes = needs.size;
  for (uint32_t type : MemoryTypes(gpu->facts, purpose)) {
    if (!(needs.memoryTypeBits >> type & 1)) continue;
    info.memoryTypeIndex = type;
    VkResult result = vk.AllocateMemory(gpu->device, &info, nullptr, &block->memory);
    if (result == VK_ERROR_OUT_OF_DEVICE_MEMORY || result == VK_ERROR_OUT_OF_HOST_MEMORY) continue;
    gpu->Check(result, "vkAllocateMemory");
    block->heap = gpu->facts.memory.memoryTypes[type].heapIndex;
    VkMemoryPropertyFlags found = gpu->facts.memory.memoryTypes[type].propertyFlags;
    block->cached = found & kCached;
    if ((found & kHost) != kHost) return;
    void* host = nullptr;
    gpu->Check(vk.MapMemory(gpu->device, block->memory, 0, VK_WHOLE_SIZE, 0, &host), "vkMapMemory");
    block->host = static_cast<char*>(host);
    return;
  }
}

}  // namespace

std::vector<uint32_t> MemoryTypes(const Physical& facts, Purpose purpose) {
  std::vector<std::pair<int, uint32_t>> scored;
  for (uint32_t i = 0; i < facts.memory.memoryTypeCount; ++i) {
    int score = Score(facts.memory.memoryTypes[i].propertyFlags, purpose, facts.unified);
    if (score) scored.push_back({-score, i});
  }
  std::stable_sort(scored.begin(), scored.end());
  std::vector<uint32_t> types;
  for (auto [score, type] : scored) types.push_back(type);
  return types;
}

bool MakeBlock(Gpu* gpu, uint64_t size, Purpose purpose, Block* block) {
  block->size = size;
  block->buffer = MakeBuffer(gpu, size);
  TakeMemory(gpu, purpose, block);
  if (!block->memory) {
    vk.DestroyBuffer(gpu->device, block->buffer, nullptr);
    return false;
  }
  gpu->Check(vk.BindBufferMemory(gpu->device, block->buffer, block->memory, 0),
             "vkBindBufferMemory");
  VkBufferDeviceAddressInfo info{VK_STRUCTURE_TYPE_BUFFER_DEVICE_ADDRESS_INFO};
  info.buffer = block->buffer;
  block->address = vk.GetBufferDeviceAddress(gpu->device, &info);
  return true;
}

void FreeBlock(Gpu* gpu, const Block& block) {
  vk.DestroyBuffer(gpu->device, block.buffer, nullptr);
  vk.FreeMemory(gpu->device, block.memory, nullptr);  // which also unmaps
}

}  // namespace k3tvm::vulkan
