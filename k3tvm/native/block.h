// Runs the threads of one block as fibers on this thread of the CPU.
#ifndef K3TVM_NATIVE_BLOCK_H_
#define K3TVM_NATIVE_BLOCK_H_

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "../emulate/include/k3emu_abi.h"
#include "fiber.h"

namespace k3tvm::emulate {

// In which order the threads of a block take their turns, and the blocks of a grid: forward for 0,
// backward for 1, else shuffled, anew after each barrier. A kernel that forgets a barrier gives
// different results in different orders, or reads what was never written.
using Seed = uint64_t;

struct Launch {
  k3emu::Entry entry;
  void** arguments;
  k3emu::Dim grid, block;
  Seed seed;

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
    uint8_t parity;  // which half of the warp's memory the next exchange takes
    Place place;
    BlockRunner* runner;
  };

  struct Release {
    void operator()(char* memory) const { std::free(memory); }
  };

  // An array of the block, and a guard behind it that must stay as it is.
  struct Shared {
    std::unique_ptr<char, Release> memory;
    size_t bytes = 0;
    bool used = false;  // by this block
  };

  struct alignas(128) Exchange {
    char bytes[2][k3emu::kWarp * k3emu::kExchange];
  };

  static void Main();
  static void Wait(k3emu::Thread* thread, k3emu::Wait kind);
  static void* GetShared(k3emu::Thread* thread, unsigned id, unsigned long bytes);
  static char* GetExchange(k3emu::Thread* thread);
  static void Fail(k3emu::Thread* thread, const char* what);
  static const k3emu::Services* TheServices();

  void Prepare(const Launch& launch, uint64_t i);
  void RunWarp(unsigned warp);
  // Lets threads go on that have all come to the same point; false when nothing can go on.
  bool GoOn();
  void Turn(Fiber* fiber);
  std::string Stuck() const;
  void CheckGuards();
  uint64_t Random();
  unsigned Warps() const;

  const Launch* launch_ = nullptr;
  std::vector<Fiber> fibers_;
  std::vector<Exchange> exchanges_;
  std::vector<Shared> shared_;
  Stacks stacks_;
  Place main_ = nullptr;
  Fiber* current_ = nullptr;
  std::string error_;
  uint64_t random_ = 0;
};

}  // namespace k3tvm::emulate

#endif  // K3TVM_NATIVE_BLOCK_H_
