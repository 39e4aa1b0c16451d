#include "device.h"

#include <algorithm>
#include <chrono>

#include "errors.h"
#include "json.h"
#include "loader.h"

namespace k3tvm::vulkan {
namespace {

constexpr uint64_t kArgumentBytes = 1ull << 20;
constexpr std::chrono::seconds kPatience(2);  // with other threads when the process ends

uint64_t Address(const void* pointer) { return reinterpret_cast<uint64_t>(pointer); }

}  // namespace

Device::Device(const Physical& facts)
    : gpu(facts),
      memory_(&gpu),
      stream_(&gpu),
      transfer_(&memory_, &stream_),
      arguments_(&memory_, &stream_, kArgumentBytes, Purpose::kArguments),
      profiler_(&gpu, &stream_),
      cache_(&gpu) {}

void* Device::Allocate(size_t size) {
  gpu.RequireAlive();
  Guard guard(lock_);
  Collect();
  Allocation* allocation = memory_.Allocate(size);
  if (!allocation) {
    ReleaseAllFinished();
    allocation = memory_.Allocate(size);
  }
  if (!allocation) memory_.ThrowFull(size);
  return reinterpret_cast<void*>(allocation->address);
}

// Memory that was freed while the device used it, and blocks in which nothing is left.
void Device::ReleaseAllFinished() {
  stream_.Drain();
  Collect();
  memory_.Trim();
}

void Device::Free(void* address) noexcept {
  if (!gpu.alive()) return;
  Guard guard(lock_);
  try {
    Allocation* allocation = memory_.Find(Address(address));
    if (!allocation || allocation->address != Address(address) || allocation->dead) return;
    allocation->dead = true;
    ++dead_;
    Finish(allocation->last_use, [this, allocation] {
      memory_.Release(allocation);
      --dead_;
    });
  } catch (const std::exception&) {  // the device was lost: its memory is, too
  }
}

void Device::Finish(uint64_t number, std::function<void()> action) {
  if (number <= stream_.Finished()) {
    action();
  } else {
    deferred_.emplace(number, std::move(action));
  }
}

void Device::Forget(const KernelCode& code) noexcept {
  if (!gpu.alive()) return;
  Guard guard(lock_);
  auto found = pipelines_.find(&code);
  if (found == pipelines_.end()) return;
  Pipeline pipeline = found->second;
  pipelines_.erase(found);
  try {
    stream_.Flush();  // so that its last use, wherever that is, has a number
    Finish(stream_.submitted(), [this, pipeline] { DestroyPipeline(pipeline, &gpu); });
  } catch (const std::exception&) {  // the device was lost: its pipelines are, too
  }
}

void Device::Collect() {
  if (deferred_.empty()) return;
  uint64_t finished = stream_.Finished();
  while (!deferred_.empty() && deferred_.begin()->first <= finished) {
    auto action = std::move(deferred_.begin()->second);
    deferred_.erase(deferred_.begin());
    action();
  }
}

Allocation* Device::Find(uint64_t address) const {
  Allocation* found = memory_.Find(address);
  return found && !found->dead ? found : nullptr;
}

Range Device::RangeOf(const void* pointer, size_t size, const char* what) const {
  uint64_t address = Address(pointer);
  Allocation* found = Find(address);
  if (!found)
    Throw(kError, Text(gpu.facts.Title(), ": ", what, " is not in memory of this device"));
  uint64_t end = found->address + found->size;
  if (size > end - address) {
    Throw(kError, Text(gpu.facts.Title(), ": ", what, " goes ", size - (end - address),
                       " bytes beyond its memory of ", found->size, " bytes"));
  }
  return {found, address - found->address, size};
}

void Device::Upload(void* to, const void* from, size_t size) {
  gpu.RequireAlive();
  Guard guard(lock_);
  transfer_.Upload(RangeOf(to, size, "the target of a copy"), static_cast<const char*>(from));
}

void Device::Download(const void* from, void* to, size_t size) {
  gpu.RequireAlive();
  uint64_t number = 0;
  {
    Guard guard(lock_);
    number = RangeOf(from, size, "the source of a copy").allocation->last_use;
    if (number > stream_.submitted()) stream_.Flush();
    number = std::min(number, stream_.submitted());
  }
  stream_.WaitSubmitted(number);  // other threads go on recording meanwhile
  Guard guard(lock_);
  transfer_.Download(RangeOf(from, size, "the source of a copy"), static_cast<char*>(to));
}

void Device::Copy(const void* from, void* to, size_t size) {
  gpu.RequireAlive();
  Guard guard(lock_);
  transfer_.Copy(RangeOf(from, size, "the source of a copy"),
                 RangeOf(to, size, "the target of a copy"));
}

void Device::Fill(void* to, size_t size, uint32_t value) {
  gpu.RequireAlive();
  Guard guard(lock_);
  transfer_.Fill(RangeOf(to, size, "the target of a fill"), value);
}

void Device::Run(const KernelCode& code, const Launch& launch) {
  gpu.RequireAlive();
  Guard guard(lock_);
  const uint32_t* limits = gpu.facts.base.limits.maxComputeWorkGroupCount;
  for (int i = 0; i < 3; ++i) {
    if (launch.grid[i] <= limits[i]) continue;
    Throw(kLimit,
          Text("kernel ", code.name, " was launched with ", launch.grid[i],
               " workgroups in dimension ", "xyz"[i], ", ", gpu.facts.Title(), " has ", limits[i]));
  }
  std::vector<Use> uses = UsesOf(code, launch);
  Record(code, PipelineOf(code), launch, uses);
  ++dispatches_;
}

std::vector<Use> Device::UsesOf(const KernelCode& code, const Launch& launch) const {
  std::vector<Use> uses;
  uses.reserve(launch.pointers.size());
  for (const Launch::Pointer& pointer : launch.pointers) {
    Allocation* allocation = Find(pointer.address);
    if (!allocation) {
      Throw(kError, Text("kernel ", code.name, ": pointer ", uses.size(), " of ",
                         launch.pointers.size(), " is not in memory of ", gpu.facts.Title()));
    }
    uses.push_back({allocation, pointer.writes});
  }
  return uses;
}

const Pipeline& Device::PipelineOf(const KernelCode& code) {
  auto found = pipelines_.find(&code);
  if (found != pipelines_.end()) return found->second;
  Pipeline made = MakePipeline(code, &gpu, cache_.handle());
  cache_.Changed();
  return pipelines_.emplace(&code, made).first->second;
}

void Device::Record(const KernelCode& code, const Pipeline& pipeline, const Launch& launch,
                    const std::vector<Use>& uses) {
  const char* pushed = launch.arguments.data();
  uint64_t block = 0;
  if (code.in_block) {  // first, for it may submit what has been recorded
    Ring::Piece piece = arguments_.Take(launch.arguments.size());
    std::copy(launch.arguments.begin(), launch.arguments.end(), piece.host);
    block = piece.address;
    pushed = reinterpret_cast<const char*>(&block);
  }
  stream_.Announce(uses.data(), uses.size());
  profiler_.Before(code.name);
  VkCommandBuffer commands = stream_.Commands();
  vk.CmdBindPipeline(commands, VK_PIPELINE_BIND_POINT_COMPUTE, pipeline.handle);
  if (code.push_bytes()) {
    vk.CmdPushConstants(commands, pipeline.layout, VK_SHADER_STAGE_COMPUTE_BIT, 0,
                        code.push_bytes(), pushed);
  }
  vk.CmdDispatch(commands, launch.grid[0], launch.grid[1], launch.grid[2]);
  profiler_.After();
  stream_.Recorded();
}

void Device::Sync() {
  gpu.RequireAlive();
  uint64_t number = 0;
  {
    Guard guard(lock_);
    stream_.Flush();
    number = stream_.submitted();
  }
  stream_.WaitSubmitted(number);  // other threads go on recording meanwhile
  Guard guard(lock_);
  Collect();
  cache_.SaveWhenIdle();
}

void Device::ProfileStart() {
  gpu.RequireAlive();
  Guard guard(lock_);
  profiler_.Start();
}

std::string Device::ProfileStop() {
  gpu.RequireAlive();
  Guard guard(lock_);
  return profiler_.Stop();
}

std::string Device::Stats() {
  gpu.RequireAlive();
  Guard guard(lock_);
  Collect();
  Json json;
  json.Open('{').Member("dispatches", dispatches_).Member("submissions", stream_.submitted());
  json.Member("barriers", stream_.barriers()).Member("used_bytes", memory_.used());
  json.Member("peak_bytes", memory_.peak()).Member("budget_bytes", memory_.Budget());
  json.Member("available_bytes", memory_.Available());
  json.Member("block_bytes", memory_.block_bytes()).Member("blocks", memory_.blocks());
  json.Member("allocations", memory_.live() - dead_).Member("waiting_frees", dead_);
  return json.Close('}').text();
}

void Device::SetMemoryLimit(uint64_t bytes) {
  Guard guard(lock_);
  memory_.SetLimit(bytes);
}

uint64_t Device::Available() {
  gpu.RequireAlive();
  Guard guard(lock_);
  return memory_.Available();
}

void Device::Close() noexcept {
  if (!gpu.alive()) return;
  std::unique_lock<std::timed_mutex> guard(lock_, kPatience);
  if (!guard.owns_lock()) return;  // another thread is in a call that does not end
  try {
    stream_.Drain();
    cache_.Save();
  } catch (const std::exception&) {  // nobody is left to tell
  }
  gpu.Close();
}

}  // namespace k3tvm::vulkan
