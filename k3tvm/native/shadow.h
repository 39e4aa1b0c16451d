// Remembers for each byte of some memory who wrote it and who read it last.
#ifndef K3TVM_NATIVE_SHADOW_H_
#define K3TVM_NATIVE_SHADOW_H_

#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>

namespace k3tvm::emulate {

// Between two waits of a thread, numbered over all threads; 0 is nobody.
using Interval = uint32_t;

class Shadow {
 public:
  struct Byte {
    Interval written, read;
  };

  Shadow() = default;
  ~Shadow() { Release(); }
  Shadow(Shadow&& other) noexcept
      : bytes_(std::exchange(other.bytes_, nullptr)), size_(std::exchange(other.size_, 0)) {}
  Shadow& operator=(Shadow&&) = delete;

  // That of the byte at `offset`, of memory of `size` bytes. It takes room where it is touched.
  Byte* At(size_t offset, size_t size) {
    if (size > size_) Grow(size);
    return bytes_ ? bytes_ + offset : nullptr;
  }

  // Nobody was here.
  void Clear() {
    if (bytes_) std::memset(bytes_, 0, size_ * sizeof(Byte));
  }

 private:
  void Grow(size_t size) {
    Release();
    void* memory = mmap(nullptr, size * sizeof(Byte), PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) return;
    bytes_ = static_cast<Byte*>(memory);
    size_ = size;
  }

  void Release() {
    if (bytes_) munmap(bytes_, size_ * sizeof(Byte));
    bytes_ = nullptr;
    size_ = 0;
  }

  Byte* bytes_ = nullptr;
  size_t size_ = 0;
};

// Memory that a kernel may touch; `data` is null where there is none.
struct Tracked {
  char* data = nullptr;
  size_t bytes = 0;
  Shadow* shadow = nullptr;
};

}  // namespace k3tvm::emulate

#endif  // K3TVM_NATIVE_SHADOW_H_
