#include "fiber.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>
#include <new>

// Registers that a function must keep for its caller go onto the stack, and come from the other one.
#if defined(__x86_64__)
asm(R"(
.text
.globl k3tvm_switch
.hidden k3tvm_switch
.type k3tvm_switch, @function
k3tvm_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size k3tvm_switch, . - k3tvm_switch
)");
#elif defined(__aarch64__)
asm(R"(
.text
.globl k3tvm_switch
.hidden k3tvm_switch
.type k3tvm_switch, %function
k3tvm_switch:
  sub sp, sp, #160
  stp x19, x20, [sp, #0]
  stp x21, x22, [sp, #16]
  stp x23, x24, [sp, #32]
  stp x25, x26, [sp, #48]
  stp x27, x28, [sp, #64]
  stp x29, x30, [sp, #80]
  stp d8, d9, [sp, #96]
  stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]
  stp d14, d15, [sp, #144]
  mov x9, sp
  str x9, [x0]
  mov sp, x1
  ldp x19, x20, [sp, #0]
  ldp x21, x22, [sp, #16]
  ldp x23, x24, [sp, #32]
  ldp x25, x26, [sp, #48]
  ldp x27, x28, [sp, #64]
  ldp x29, x30, [sp, #80]
  ldp d8, d9, [sp, #96]
  ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]
  ldp d14, d15, [sp, #144]
  add sp, sp, #160
  ret
.size k3tvm_switch, . - k3tvm_switch
)");
#else
#error "emulation knows how to switch stacks on x86-64 and AArch64"
#endif

namespace k3tvm::emulate {
namespace {

constexpr size_t kStack = 128 << 10;

size_t Page() {
  static const auto size = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  return size;
}

size_t Stride() { return kStack + Page(); }

}  // namespace

Stacks::~Stacks() {
  if (memory_) munmap(memory_, count_ * Stride());
}

void Stacks::Reserve(size_t count) {
  free_.clear();
  fresh_ = 0;
  if (count <= count_) return;
  void* memory = mmap(nullptr, count * Stride(), PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  if (memory_) munmap(memory_, count_ * Stride());
  memory_ = static_cast<char*>(memory);
  count_ = count;
  for (size_t i = 0; i < count; ++i) mprotect(memory_ + i * Stride(), Page(), PROT_NONE);
}

unsigned Stacks::Take() {
  if (free_.empty()) return fresh_++;
  unsigned i = free_.back();
  free_.pop_back();
  return i;
}

bool Stacks::Has(const void* address) const {
  auto at = static_cast<const char*>(address);
  return at >= memory_ && at < memory_ + count_ * Stride();
}

char* Stacks::Top(size_t i) const {
  // Equal distances would put all stacks into the same sets of the cache.
  return memory_ + (i + 1) * Stride() - i % 61 * 192;
}

Place Begin(char* top, void (*entry)()) {
  auto** at = reinterpret_cast<void**>(reinterpret_cast<uintptr_t>(top) & ~uintptr_t{15});
#if defined(__x86_64__)
  *--at = nullptr;  // where a caller's address would be: keeps calls aligned as they must be
  *--at = reinterpret_cast<void*>(entry);
  at -= 6;
  std::memset(at, 0, 6 * sizeof(void*));
#else
  at -= 20;
  std::memset(at, 0, 20 * sizeof(void*));
  at[11] = reinterpret_cast<void*>(entry);  // x30: where the switch returns to
#endif
  return at;
}

}  // namespace k3tvm::emulate
