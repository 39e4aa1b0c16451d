// One piece of memory from the driver with one buffer over all of it.
#ifndef K3TVM_VULKAN_BLOCK_H_
#define K3TVM_VULKAN_BLOCK_H_

#include <cstdint>
#include <vector>

#include "gpu.h"

namespace k3tvm::vulkan {

// What memory is for decides which of the driver's memory types are considered, in which order.
enum class Purpose {
  kTensors,    // in the device's own memory; on unified memory also visible to the host
  kUpload,     // written by the host, read by copies
  kReadback,   // written by copies, read by the host: cached
  kArguments,  // written by the host, read by kernels
};

struct Block {
  VkBuffer buffer = VK_NULL_HANDLE;
  VkDeviceMemory memory = VK_NULL_HANDLE;
  uint64_t address = 0;  // of the buffer, on the device
  uint64_t size = 0;     // of the buffer
  uint64_t bytes = 0;    // taken from the heap
  uint32_t heap = 0;
  char* host = nullptr;  // where the host sees it (coherent), or null
  bool cached = false;   // whether the host reads it fast
};

// Memory types that serve a purpose, best first.
std::vector<uint32_t> MemoryTypes(const Physical& facts, Purpose purpose);

// Takes `size` bytes from the driver. Returns false when no memory type has them.
bool MakeBlock(Gpu* gpu, uint64_t size, Purpose purpose, Block* block);

void FreeBlock(Gpu* gpu, const Block& block);

}  // namespace k3tvm::vulkan

#endif  // K3TVM_VULKAN_BLOCK_H_
