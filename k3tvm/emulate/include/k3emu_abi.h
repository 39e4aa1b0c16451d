// What the scheduler and the compiled kernels of an emulated device know of each other.
#ifndef K3EMU_ABI_H_
#define K3EMU_ABI_H_

namespace k3emu {

constexpr unsigned kWarp = 32;       // threads that exchange values
constexpr unsigned kExchange = 128;  // bytes that a thread can give to the others at once

struct Dim {
  unsigned x, y, z;
};

enum class Wait : int { kBlock, kWarp };

struct Thread;

// What a kernel asks the scheduler for; `thread` is always the one that asks.
struct Services {
  // Returns when all threads of the block, or of the warp, have come here. `place` tells waits of a
  // kernel apart: all must come to the same one.
  void (*wait)(Thread* thread, Wait kind, unsigned place);
  // Memory of the block: array `id` of so many bytes. Filled with 0xff, which is NaN, at its start.
  void* (*shared)(Thread* thread, unsigned id, unsigned long bytes);
  // Memory of the warp for one exchange; the one before may still be read.
  char* (*exchange)(Thread* thread);
  // Ends the launch with an error. Does not return.
  void (*fail)(Thread* thread, const char* what);
  // Memory is about to be read or written; only checked kernels tell.
  void (*access)(Thread* thread, const void* address, unsigned long bytes, bool write);
};

struct Thread {
  Dim index, block, block_size, grid;
  unsigned lane;       // in the warp
  unsigned warp_size;  // of this warp: the last one of a block may be shorter
  const Services* services;
  void* copies;  // the kernel's own: those that have not arrived
};

// A kernel: `arguments` has a pointer to each.
using Entry = void (*)(void** arguments);

}  // namespace k3emu

// The running thread, for the scheduler sets it at each turn. One variable in the scheduler's
// library serves all kernels: there is little room for those of libraries that are loaded later.
extern "C" __attribute__((visibility("default"), tls_model("initial-exec"))) __thread
    k3emu::Thread* k3emu_self;

#endif  // K3EMU_ABI_H_
