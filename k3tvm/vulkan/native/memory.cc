#include "memory.h"

#include <algorithm>
#include <set>

#include "errors.h"

namespace k3tvm::vulkan {
namespace {

constexpr uint64_t kAlignment = 256;
constexpr uint64_t kSmallestBlock = 64ull << 20;
constexpr uint64_t kLargestBlock = 1ull << 30;
constexpr uint64_t kBlocks = 512;  // that a heap is divided into: drivers allow a few thousand

uint64_t RoundUp(uint64_t value, uint64_t unit) { return (value + unit - 1) / unit * unit; }

std::set<uint32_t> TensorHeaps(const Physical& facts) {
  std::set<uint32_t> heaps;
  for (uint32_t type : MemoryTypes(facts, Purpose::kTensors)) {
    heaps.insert(facts.memory.memoryTypes[type].heapIndex);
  }
  return heaps;
}

// Large enough that even a full heap is few blocks, small enough not to waste a small heap.
uint64_t BlockSize(const Physical& facts) {
  uint64_t heap = 0;
  for (uint32_t i : TensorHeaps(facts)) heap = std::max(heap, facts.memory.memoryHeaps[i].size);
  uint64_t size = kSmallestBlock;
  while (size < kLargestBlock && size * kBlocks < heap) size *= 2;
  while (size > kSmallestBlock / 16 && size * 16 > heap) size /= 2;
  return std::min(size, facts.max_allocation);
}

}  // namespace

Memory::Memory(Gpu* gpu) : gpu_(gpu), block_size_(BlockSize(gpu->facts)) {}

Allocation* Memory::Allocate(uint64_t size) {
  size = RoundUp(std::max<uint64_t>(size, 1), kAlignment);
  if (size > gpu_->facts.max_allocation) {
    Throw(kOutOfMemory,
          Text(gpu_->facts.Title(), ": asked for ", size,
               " bytes at once; one allocation can have ", "at most ", gpu_->facts.max_allocation,
               " on this device (", used_, " in use, ", Available(), " available)"));
  }
  SharedBlock* home = RoomFor(size);
  if (!home) return nullptr;
  uint64_t address = home->block.address + home->free.Take(size);
  Allocation& allocation = live_[address];
  allocation.address = address;
  allocation.size = size;
  allocation.home = home;
  used_ += size;
  peak_ = std::max(peak_, used_);
  return &allocation;
}

SharedBlock* Memory::RoomFor(uint64_t size) {
  bool alone = size > block_size_ / 2;
  for (SharedBlock& shared : blocks_) {
    if (!alone && shared.free.Fits(size)) return &shared;
  }
  uint64_t available = Available();
  if (size > available) return nullptr;
  SharedBlock* added = nullptr;
  if (!alone && block_size_ <= available) added = AddBlock(block_size_);
  return added ? added : AddBlock(size);
}

SharedBlock* Memory::AddBlock(uint64_t size) {
  Block block;
  if (!MakeBlock(gpu_, size, Purpose::kTensors, &block)) return nullptr;
  if (block.address % kAlignment) {
    FreeBlock(gpu_, block);
    Throw(kError, Text(gpu_->facts.Title(), ": the driver aligns buffers to less than ", kAlignment,
                       " bytes"));
  }
  block_bytes_ += block.bytes;
  blocks_.push_back({block, FreeList(0, size)});
  return &blocks_.back();
}

void Memory::Release(Allocation* allocation) {
  SharedBlock* home = allocation->home;
  home->free.Give(allocation->offset(), allocation->size);
  used_ -= allocation->size;
  live_.erase(allocation->address);
  // A large allocation's own block goes back at once. Of the shared blocks one may stay empty: it
  // is likely to be wanted again.
  if (!home->free.Empty()) return;
  bool spare = std::any_of(blocks_.begin(), blocks_.end(), [&](const SharedBlock& other) {
    return &other != home && other.free.Empty();
  });
  if (home->block.size != block_size_ || spare) Drop(home);
}

void Memory::Drop(SharedBlock* empty) {
  block_bytes_ -= empty->block.bytes;
  FreeBlock(gpu_, empty->block);
  blocks_.remove_if([empty](const SharedBlock& shared) { return &shared == empty; });
}

void Memory::Trim() {
  for (auto it = blocks_.begin(); it != blocks_.end();) {
    SharedBlock* shared = &*it++;
    if (shared->free.Empty()) Drop(shared);
  }
}

Allocation* Memory::Find(uint64_t address) const {
  auto after = live_.upper_bound(address);
  if (after == live_.begin()) return nullptr;
  auto& found = const_cast<Allocation&>(std::prev(after)->second);
  return address - found.address <= found.size ? &found : nullptr;
}

uint64_t Memory::Available() const {
  Physical::Budget budget = gpu_->facts.ReadBudget();
  uint64_t used = 0, whole = 0;
  for (uint32_t i : TensorHeaps(gpu_->facts)) {
    used += budget.used[i];
    whole += budget.budget[i];
  }
  used = std::max(used, block_bytes_);  // a driver may not tell, or tell late
  uint64_t free = whole - std::min(whole, used);
  if (!limit_) return free;
  return std::min(free, limit_ - std::min(limit_, block_bytes_));
}

void Memory::ThrowFull(uint64_t asked) const {
  Throw(kOutOfMemory,
        Text(gpu_->facts.Title(), ": out of memory: asked for ", asked, " bytes, ", used_,
             " in use, ", Available(), " available of ", Budget(), " (", block_bytes_,
             " are held, with room for copies); use fewer slots or a smaller context"));
}

Block Memory::Dedicated(uint64_t size, Purpose purpose) {
  Block block;
  if (limit_ && size > limit_ - std::min(limit_, block_bytes_)) ThrowFull(size);
  if (!MakeBlock(gpu_, size, purpose, &block)) ThrowFull(size);
  block_bytes_ += block.bytes;
  ++dedicated_;
  return block;
}

}  // namespace k3tvm::vulkan
