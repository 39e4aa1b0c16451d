// Runs the threads of one block as fibers on this thread of the CPU.
#ifndef K3TVM_NATIVE_BLOCK_H_
#define K3TVM_NATIVE_BLOCK_H_

#include <cstdint>
#include <string>
#include <vector>

#include "../emulate/include/k3emu_abi.h"
#include "fiber.h"
#include "order.h"
#include "races.h"
#include "shared_memory.h"

namespace k3tvm::emulate {

struct Launch {
  k3emu::Entry entry;
  void** arguments;
  k3emu::Dim grid, block;
  Seed seed;
  Races* races;  // null for kernels that are not checked

  uint64_t blocks() const { return uint64_t{grid.x} * grid.y * grid.z; }
  unsigned threads() const { return block.x * block.y * block.z; }
};

class BlockRunner {
 public:
  // Runs block number `i` of a launch; "" or what went wrong.
  std::string Run(const Launch& launch, uint64_t i);

 private:
  enum class State : uint8_t { kReady, kAtBlock, kAtWarp, kDone };

  // The thread comes first, so that its address is that of the fiber.
  struct Fiber {
    k3emu::Thread thread;
    State state;
    uint8_t parity;     // which half of the warp's memory the next exchange takes
    unsigned at;        // the wait that it has come to
    unsigned stack;     // its number
    Place place;        // null before its first turn
    Interval interval;  // since its last wait; 0 before it touches memory
    BlockRunner* runner;
  };

  struct alignas(128) Warp {
    char exchange[2][k3emu::kWarp * k3emu::kExchange];
    uint32_t exchanges = 0;
  };

  static void Main();
  static void Wait(k3emu::Thread* thread, k3emu::Wait kind, unsigned place);
  static void* GetShared(k3emu::Thread* thread, unsigned id, unsigned long bytes);
  static char* GetExchange(k3emu::Thread* thread);
  static void Fail(k3emu::Thread* thread, const char* what);
  static void Access(k3emu::Thread* thread, const void* address, unsigned long bytes, bool write);
  static const k3emu::Services* TheServices();

  void Prepare(const Launch& launch, uint64_t i);
  void RunWarp(unsigned warp);
  // Lets threads go on that have all come to the same wait; false when they have not.
  bool Release(Fiber* fibers, size_t count, State state);
  void Turn(Fiber* fiber);
  std::string Stuck() const;
  std::string Accessed(Fiber* fiber, const char* address, size_t bytes, bool write);
  unsigned WarpOf(const Fiber* fiber) const;

  const Launch* launch_ = nullptr;
  uint64_t block_ = 0;
  uint32_t barriers_ = 0;
  std::vector<Fiber> fibers_;
  std::vector<Warp> warps_;
  SharedMemory shared_;
  Stacks stacks_;
  Place main_ = nullptr;
  Fiber* current_ = nullptr;
  std::string error_;
  Random random_{0, 0};
};

}  // namespace k3tvm::emulate

#endif  // K3TVM_NATIVE_BLOCK_H_
