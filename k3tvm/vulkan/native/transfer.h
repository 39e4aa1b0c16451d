// Moves bytes between host and device, and on the device, in order with the kernels.
#ifndef K3TVM_VULKAN_TRANSFER_H_
#define K3TVM_VULKAN_TRANSFER_H_

#include "memory.h"
#include "ring.h"
#include "stream.h"

namespace k3tvm::vulkan {

// A range of bytes inside an allocation.
struct Range {
  Allocation* allocation;
  uint64_t offset;  // from the beginning of the allocation
  uint64_t size;

  uint64_t in_buffer() const { return allocation->offset() + offset; }
  VkBuffer buffer() const { return allocation->home->block.buffer; }
};

class Transfer {
 public:
  Transfer(Memory* memory, Stream* stream);

  // Host to device. `from` may be reused at once. Memory that the host sees and nothing on the
  // device uses is written directly; else the bytes go through a ring, in order with other work.
  void Upload(const Range& to, const char* from);
  // Device to host. Returns when the bytes are there.
  void Download(const Range& from, char* to);
  // On the device. The ranges must not overlap.
  void Copy(const Range& from, const Range& to);
  // Sets every four bytes; offset and size are multiples of four.
  void Fill(const Range& to, uint32_t value);

 private:
  void UploadPiece(const Range& to, const char* from);
  Ring::Piece DownloadPiece(const Range& from);

  Stream* stream_;
  Ring upload_, readback_;
  bool direct_;  // whether the host may touch tensors' memory; off for tests of the rings
};

}  // namespace k3tvm::vulkan

#endif  // K3TVM_VULKAN_TRANSFER_H_
