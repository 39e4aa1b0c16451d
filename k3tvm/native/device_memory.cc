#include "device_memory.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <fstream>

#include "errors.h"
#include "guard.h"

namespace k3tvm::emulate {
namespace {

constexpr size_t kAlignment = 256;

}  // namespace

size_t AvailableBytes() {
  std::ifstream file("/proc/meminfo");
  for (std::string name, unit; file >> name;) {
    size_t value = 0;
    if (name == "MemAvailable:" && file >> value) return value * 1024;
    std::getline(file, unit);
  }
  return size_t{1} << 40;  // not told: as much as is asked for
}

DeviceMemory& DeviceMemory::Global() {
  static auto* memory = new DeviceMemory;  // never destroyed: tensors may be freed later
  return *memory;
}

void* DeviceMemory::Allocate(size_t bytes) {
  size_t room = (bytes + 2 * kGuardBytes + kAlignment - 1) / kAlignment * kAlignment;
  size_t left = AvailableBytes();
  char* memory = room < left ? static_cast<char*>(std::aligned_alloc(kAlignment, room)) : nullptr;
  if (!memory) {
    Throw(Text("emulated memory: ", bytes, " bytes were asked for, ", left, " are left"));
  }
  char* data = memory + kGuardBytes;
  PutGuard(memory);
  std::memset(data, kPoison, bytes);
  PutGuard(data + bytes);
  std::lock_guard<std::mutex> guard(lock_);
  allocations_[data] = {bytes, std::make_unique<Shadow>()};
  used_ += bytes;
  peak_ = std::max(peak_, used_);
  return data;
}

void DeviceMemory::Free(void* address) {
  auto* data = static_cast<char*>(address);
  {
    std::lock_guard<std::mutex> guard(lock_);
    auto found = allocations_.find(data);
    if (found == allocations_.end()) return;
    used_ -= found->second.bytes;
    allocations_.erase(found);
  }
  std::free(data - kGuardBytes);
}

std::string DeviceMemory::CheckGuards() {
  std::lock_guard<std::mutex> guard(lock_);
  for (const auto& [data, allocation] : allocations_) {
    char *front = data - kGuardBytes, *end = data + allocation.bytes;
    if (Whole(front) && Whole(end)) continue;
    const char* where = Whole(front) ? "past the end" : "in front";
    PutGuard(front);
    PutGuard(end);
    return Text("wrote ", where, " of a tensor of ", allocation.bytes, " bytes");
  }
  return "";
}

Tracked DeviceMemory::Find(const char* address) {
  std::lock_guard<std::mutex> guard(lock_);
  auto after = allocations_.upper_bound(const_cast<char*>(address) + kGuardBytes);
  if (after == allocations_.begin()) return {};
  auto& [data, allocation] = *std::prev(after);
  if (address >= data + allocation.bytes + kGuardBytes) return {};
  return {data, allocation.bytes, allocation.shadow.get()};
}

std::string DeviceMemory::Stats() const {
  std::lock_guard<std::mutex> guard(lock_);
  return Text("{\"dispatches\": ", launches_, ", \"submissions\": ", launches_,
              ", \"used_bytes\": ", used_, ", \"peak_bytes\": ", peak_,
              ", \"budget_bytes\": ", used_ + AvailableBytes(),
              ", \"allocations\": ", allocations_.size(), "}");
}

}  // namespace k3tvm::emulate
