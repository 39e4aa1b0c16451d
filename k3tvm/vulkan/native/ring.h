// A host-visible buffer that is handed out piece by piece, round and round; a piece comes free when
// the submission that uses it is finished.
#ifndef K3TVM_VULKAN_RING_H_
#define K3TVM_VULKAN_RING_H_

#include <deque>

#include "memory.h"
#include "stream.h"

namespace k3tvm::vulkan {

class Ring {
 public:
  Ring(Memory* memory, Stream* stream, uint64_t size, Purpose purpose)
      : memory_(memory), stream_(stream), size_(size), purpose_(purpose) {}

  struct Piece {
    char* host;
    uint64_t address;
    VkBuffer buffer;
    uint64_t offset;
  };

  // `size` bytes (at most the ring's size) for commands that will be recorded next; waits for older
  // submissions when the ring is full. The memory itself is taken at the first call.
  Piece Take(uint64_t size);

  uint64_t size() const { return size_; }

 private:
  bool Free(uint64_t begin, uint64_t size);

  Memory* memory_;
  Stream* stream_;
  uint64_t size_;
  Purpose purpose_;
  Block block_;
  // Positions count on for ever; the place in the buffer is the position modulo the size.
  uint64_t head_ = 0, tail_ = 0;
  struct Span {
    uint64_t end;     // position behind the pieces
    uint64_t number;  // of the submission that uses them
  };
  std::deque<Span> spans_;
};

}  // namespace k3tvm::vulkan

#endif  // K3TVM_VULKAN_RING_H_
