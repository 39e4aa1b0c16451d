#include "block.h"

#include <algorithm>
#include <cstring>

#include "errors.h"

namespace k3tvm::emulate {
namespace {

constexpr int kPoison = 0xff;        // NaN as float16, bfloat16, float32 and float64
constexpr int kGuard = 0xa5;         // behind every shared array
constexpr size_t kGuardBytes = 256;
constexpr size_t kAlignment = 128;

thread_local BlockRunner* running = nullptr;

// Numbers 0 ... count - 1 in the order of a seed: forward, backward, or a walk with an odd step.
class Order {
 public:
  Order(unsigned count, Seed seed, uint64_t random) : count_(count), seed_(seed) {
    while (size_ < count) size_ *= 2;
    step_ = static_cast<unsigned>(random) | 1;
    start_ = static_cast<unsigned>(random >> 32);
  }

  template <typename Visit>
  void Each(Visit visit) const {
    if (seed_ > 1) {
      for (unsigned i = 0; i < size_; ++i) {
        unsigned at = (start_ + i * step_) & (size_ - 1);
        if (at < count_) visit(at);
      }
      return;
    }
    for (unsigned i = 0; i < count_; ++i) visit(seed_ ? count_ - 1 - i : i);
  }

 private:
  unsigned count_, size_ = 1, step_, start_;
  Seed seed_;
};

}  // namespace

const k3emu::Services* BlockRunner::TheServices() {
  static const k3emu::Services services = {Wait, GetShared, GetExchange, Fail};
  return &services;
}

std::string BlockRunner::Run(const Launch& launch, uint64_t i) {
  Prepare(launch, i);
  BlockRunner* before = running;
  running = this;
  do {
    Order(Warps(), launch.seed, Random()).Each([this](unsigned warp) { RunWarp(warp); });
  } while (error_.empty() && GoOn());
  running = before;
  if (error_.empty()) CheckGuards();
  if (error_.empty()) return "";
  const k3emu::Dim& at = fibers_[0].thread.block;
  return Text(error_, " (block ", at.x, ", ", at.y, ", ", at.z, ")");
}

void BlockRunner::Prepare(const Launch& launch, uint64_t i) {
  launch_ = &launch;
  error_.clear();
  random_ = (launch.seed + 1) * 0x9e3779b97f4a7c15u ^ (i + 1) * 0xbf58476d1ce4e5b9u;
  unsigned count = launch.threads();
  const k3emu::Dim &grid = launch.grid, &size = launch.block;
  k3emu::Dim block{static_cast<unsigned>(i % grid.x), static_cast<unsigned>(i / grid.x % grid.y),
                   static_cast<unsigned>(i / grid.x / grid.y)};
  stacks_.Reserve(count);
  fibers_.resize(count);
  exchanges_.resize((count + k3emu::kWarp - 1) / k3emu::kWarp);
  for (unsigned n = 0; n < count; ++n) {
    k3emu::Dim index{n % size.x, n / size.x % size.y, n / size.x / size.y};
    unsigned first = n / k3emu::kWarp * k3emu::kWarp;
    k3emu::Thread thread{index,
                         block,
                         size,
                         grid,
                         n - first,
                         std::min(k3emu::kWarp, count - first),
                         TheServices()};
    fibers_[n] = {thread, State::kReady, 0, Begin(stacks_.Top(n), Main), this};
  }
  for (Shared& array : shared_) array.used = false;
}

unsigned BlockRunner::Warps() const { return static_cast<unsigned>(exchanges_.size()); }

// xorshift64*
uint64_t BlockRunner::Random() {
  random_ ^= random_ >> 12;
  random_ ^= random_ << 25;
  random_ ^= random_ >> 27;
  return random_ * 0x2545f4914f6cdd1du;
}

void BlockRunner::RunWarp(unsigned warp) {
  Fiber* lanes = &fibers_[warp * k3emu::kWarp];
  unsigned count = lanes->thread.warp_size;
  for (bool again = true; again && error_.empty();) {
    Order(count, launch_->seed, Random()).Each([&](unsigned i) {
      if (lanes[i].state == State::kReady && error_.empty()) Turn(&lanes[i]);
    });
    again = std::all_of(lanes, lanes + count,
                        [](const Fiber& f) { return f.state == State::kAtWarp; });
    if (again) std::for_each(lanes, lanes + count, [](Fiber& f) { f.state = State::kReady; });
  }
}

void BlockRunner::Turn(Fiber* fiber) {
  current_ = fiber;
  k3tvm_switch(&main_, fiber->place);
}

bool BlockRunner::GoOn() {
  auto in = [this](State state) {
    return std::all_of(fibers_.begin(), fibers_.end(),
                       [state](const Fiber& f) { return f.state == state; });
  };
  if (in(State::kDone)) return false;
  if (!in(State::kAtBlock)) {
    error_ = Stuck();
    return false;
  }
  for (Fiber& fiber : fibers_) fiber.state = State::kReady;
  return true;
}

std::string BlockRunner::Stuck() const {
  unsigned counts[4] = {};
  for (const Fiber& fiber : fibers_) ++counts[static_cast<int>(fiber.state)];
  return Text("threads wait for others that do not come: ", counts[1], " at a barrier of the block, ",
              counts[2], " at an exchange of their warp, ", counts[3], " have ended");
}

void BlockRunner::CheckGuards() {
  for (size_t id = 0; id < shared_.size(); ++id) {
    const Shared& array = shared_[id];
    if (!array.used) continue;
    const char* end = array.memory.get() + array.bytes;
    bool whole = std::all_of(end, end + kGuardBytes,
                             [](char c) { return c == static_cast<char>(kGuard); });
    if (!whole) {
      error_ = Text("wrote past the end of shared array ", id, " of ", array.bytes, " bytes");
    }
  }
}

void BlockRunner::Main() {
  Fiber* me = running->current_;
  running->launch_->entry(&me->thread, running->launch_->arguments);
  me->state = State::kDone;
  k3tvm_switch(&me->place, me->runner->main_);
  __builtin_unreachable();
}

void BlockRunner::Wait(k3emu::Thread* thread, k3emu::Wait kind) {
  auto* me = reinterpret_cast<Fiber*>(thread);
  me->state = kind == k3emu::Wait::kBlock ? State::kAtBlock : State::kAtWarp;
  k3tvm_switch(&me->place, me->runner->main_);
}

void* BlockRunner::GetShared(k3emu::Thread* thread, unsigned id, unsigned long bytes) {
  BlockRunner* runner = reinterpret_cast<Fiber*>(thread)->runner;
  if (id >= runner->shared_.size()) runner->shared_.resize(id + 1);
  Shared& array = runner->shared_[id];
  if (array.used) return array.memory.get();
  if (array.bytes != bytes) {
    size_t room = (bytes + kGuardBytes + kAlignment - 1) / kAlignment * kAlignment;
    array.memory.reset(static_cast<char*>(std::aligned_alloc(kAlignment, room)));
    array.bytes = bytes;
  }
  std::memset(array.memory.get(), kPoison, bytes);
  std::memset(array.memory.get() + bytes, kGuard, kGuardBytes);
  array.used = true;
  return array.memory.get();
}

char* BlockRunner::GetExchange(k3emu::Thread* thread) {
  auto* me = reinterpret_cast<Fiber*>(thread);
  size_t warp = static_cast<size_t>(me - me->runner->fibers_.data()) / k3emu::kWarp;
  me->parity ^= 1;
  return me->runner->exchanges_[warp].bytes[me->parity];
}

void BlockRunner::Fail(k3emu::Thread* thread, const char* what) {
  auto* me = reinterpret_cast<Fiber*>(thread);
  me->runner->error_ = what;
  k3tvm_switch(&me->place, me->runner->main_);
}

}  // namespace k3tvm::emulate
