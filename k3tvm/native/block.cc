#include "block.h"

#include <algorithm>

#include "device_memory.h"
#include "text.h"

// The running thread, for kernels.
__attribute__((tls_model("initial-exec"))) __thread k3emu::Thread* k3emu_self = nullptr;

namespace k3tvm::emulate {
namespace {

thread_local BlockRunner* running = nullptr;

}  // namespace

const k3emu::Services* BlockRunner::TheServices() {
  static const k3emu::Services services = {Wait, GetShared, GetExchange, Fail, Access};
  return &services;
}

std::string BlockRunner::Run(const Launch& launch, uint64_t i) {
  Prepare(launch, i);
  auto warps = static_cast<unsigned>(warps_.size());
  running = this;
  do {
    InOrder(warps, launch.seed, &random_, [this](unsigned warp) { RunWarp(warp); });
    ++barriers_;
  } while (error_.empty() && Release(fibers_.data(), fibers_.size(), State::kAtBlock));
  k3emu_self = nullptr;
  if (error_.empty()) error_ = Stuck();
  if (error_.empty()) error_ = shared_.CheckGuards();
  if (error_.empty()) return "";
  const k3emu::Dim& at = fibers_[0].thread.block;
  return Text(error_, " (block ", at.x, ", ", at.y, ", ", at.z, ")");
}

void BlockRunner::Prepare(const Launch& launch, uint64_t i) {
  launch_ = &launch;
  block_ = i;
  barriers_ = 0;
  error_.clear();
  random_ = Random(launch.seed, i);
  unsigned count = launch.threads();
  const k3emu::Dim &grid = launch.grid, &size = launch.block;
  k3emu::Dim block{static_cast<unsigned>(i % grid.x), static_cast<unsigned>(i / grid.x % grid.y),
                   static_cast<unsigned>(i / grid.x / grid.y)};
  stacks_.Reserve(count);
  fibers_.resize(count);
  warps_.resize((count + k3emu::kWarp - 1) / k3emu::kWarp);
  for (Warp& warp : warps_) warp.exchanges = 0;
  k3emu::Dim index{0, 0, 0};
  for (unsigned n = 0; n < count; ++n) {
    unsigned lane = n % k3emu::kWarp, rest = count - (n - lane);
    k3emu::Thread thread{index, block, size, grid, lane, std::min(k3emu::kWarp, rest),
                         TheServices()};
    fibers_[n] = {thread, State::kReady, 0, 0, 0, nullptr, 0, this};
    if (++index.x == size.x) {
      index.x = 0;
      if (++index.y == size.y) index = {0, 0, index.z + 1};
    }
  }
  shared_.Clear();
}

void BlockRunner::RunWarp(unsigned warp) {
  Fiber* lanes = &fibers_[warp * k3emu::kWarp];
  unsigned count = lanes->thread.warp_size;
  do {
    InOrder(count, launch_->seed, &random_, [&](unsigned i) {
      if (lanes[i].state == State::kReady && error_.empty()) Turn(&lanes[i]);
    });
    ++warps_[warp].exchanges;
  } while (error_.empty() && Release(lanes, count, State::kAtWarp));
}

// A thread that does not wait gives its stack to the next one, which finds it in the cache.
void BlockRunner::Turn(Fiber* fiber) {
  if (!fiber->place) {
    fiber->stack = stacks_.Take();
    fiber->place = Begin(stacks_.Top(fiber->stack), Main);
  }
  current_ = fiber;
  k3emu_self = &fiber->thread;
  k3tvm_switch(&main_, fiber->place);
  if (fiber->state == State::kDone) stacks_.GiveBack(fiber->stack);
}

bool BlockRunner::Release(Fiber* fibers, size_t count, State state) {
  for (size_t i = 0; i < count; ++i) {
    if (fibers[i].state != state) return false;
  }
  for (size_t i = 0; i < count; ++i) {
    if (fibers[i].at != fibers[0].at) {
      error_ = state == State::kAtBlock ? "threads of a block wait at different barriers"
                                        : "threads of a warp wait at different exchanges";
      return false;
    }
    fibers[i].state = State::kReady;
    fibers[i].interval = 0;
  }
  return true;
}

std::string BlockRunner::Stuck() const {
  unsigned counts[4] = {};
  for (const Fiber& fiber : fibers_) ++counts[static_cast<int>(fiber.state)];
  if (counts[static_cast<int>(State::kDone)] == fibers_.size()) return "";
  return Text("threads wait for others that do not come: ",
              counts[static_cast<int>(State::kAtBlock)], " at a barrier of the block, ",
              counts[static_cast<int>(State::kAtWarp)], " at an exchange of their warp, ",
              counts[static_cast<int>(State::kDone)], " have ended");
}

void BlockRunner::Main() {
  Fiber* me = running->current_;
  running->launch_->entry(running->launch_->arguments);
  me->state = State::kDone;
  k3tvm_switch(&me->place, me->runner->main_);
  __builtin_unreachable();
}

void BlockRunner::Wait(k3emu::Thread* thread, k3emu::Wait kind, unsigned place) {
  auto* me = reinterpret_cast<Fiber*>(thread);
  me->state = kind == k3emu::Wait::kBlock ? State::kAtBlock : State::kAtWarp;
  me->at = place;
  k3tvm_switch(&me->place, me->runner->main_);
}

void* BlockRunner::GetShared(k3emu::Thread* thread, unsigned id, unsigned long bytes) {
  return reinterpret_cast<Fiber*>(thread)->runner->shared_.Get(id, bytes);
}

unsigned BlockRunner::WarpOf(const Fiber* fiber) const {
  return static_cast<unsigned>(fiber - fibers_.data()) / k3emu::kWarp;
}

char* BlockRunner::GetExchange(k3emu::Thread* thread) {
  auto* me = reinterpret_cast<Fiber*>(thread);
  me->parity ^= 1;
  return me->runner->warps_[me->runner->WarpOf(me)].exchange[me->parity];
}

void BlockRunner::Fail(k3emu::Thread* thread, const char* what) {
  auto* me = reinterpret_cast<Fiber*>(thread);
  me->runner->error_ = what;
  k3tvm_switch(&me->place, me->runner->main_);
}

void BlockRunner::Access(k3emu::Thread* thread, const void* address, unsigned long bytes,
                         bool write) {
  auto* me = reinterpret_cast<Fiber*>(thread);
  if (me->runner->stacks_.Has(address)) return;
  auto at = static_cast<const char*>(address);
  std::string what = me->runner->Accessed(me, at, bytes, write);
  if (!what.empty()) Fail(thread, what.c_str());
}

std::string BlockRunner::Accessed(Fiber* fiber, const char* address, size_t bytes, bool write) {
  Tracked memory = shared_.Find(address);
  const char* name = "shared array";
  if (!memory.data) {
    memory = DeviceMemory::Global().Find(address);
    name = "tensor";
  }
  if (!memory.data) return "";
  ptrdiff_t offset = address - memory.data;
  if (offset < 0 || offset + bytes > memory.bytes) {
    return Text(write ? "writes" : "reads", " byte ", offset, " of a ", name, " of ",
                memory.bytes);
  }
  Races* races = launch_->races;
  if (!fiber->interval) {
    auto warp = WarpOf(fiber);
    auto thread = static_cast<int>(fiber - fibers_.data());
    fiber->interval = races->Begin(
        {block_, static_cast<int>(warp), thread, barriers_, warps_[warp].exchanges});
  }
  Shadow::Byte* shadow = memory.shadow->At(static_cast<size_t>(offset), memory.bytes);
  for (size_t i = 0; shadow && i < bytes; ++i) {
    std::string what = write ? races->Write(shadow + i, fiber->interval)
                             : races->Read(shadow + i, fiber->interval);
    if (!what.empty()) return Text(what, " (", name, " of ", memory.bytes, " bytes)");
  }
  return "";
}

}  // namespace k3tvm::emulate
