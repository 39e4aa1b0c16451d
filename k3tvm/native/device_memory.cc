#include "device_memory.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <fstream>

#include "errors.h"

namespace k3tvm::emulate {
namespace {

constexpr size_t kAlignment = 256;
constexpr size_t kGuardBytes = 256;  // in front and behind
constexpr int kGuard = 0xa5, kPoison = 0xff;

bool Whole(const char* guard) {
  return std::all_of(guard, guard + kGuardBytes,
                     [](char c) { return c == static_cast<char>(kGuard); });
}

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
  std::memset(memory, kGuard, kGuardBytes);
  std::memset(data, kPoison, bytes);
  std::memset(data + bytes, kGuard, kGuardBytes);
  std::lock_guard<std::mutex> guard(lock_);
  sizes_[data] = bytes;
  used_ += bytes;
  peak_ = std::max(peak_, used_);
  return data;
}

void DeviceMemory::Free(void* address) {
  auto* data = static_cast<char*>(address);
  {
    std::lock_guard<std::mutex> guard(lock_);
    auto found = sizes_.find(data);
    if (found == sizes_.end()) return;
    used_ -= found->second;
    sizes_.erase(found);
  }
  std::free(data - kGuardBytes);
}

std::string DeviceMemory::CheckGuards() {
  std::lock_guard<std::mutex> guard(lock_);
  for (const auto& [data, bytes] : sizes_) {
    if (Whole(data - kGuardBytes) && Whole(data + bytes)) continue;
    std::memset(data - kGuardBytes, kGuard, kGuardBytes);
    std::memset(data + bytes, kGuard, kGuardBytes);
    return Text("wrote past the end of a tensor of ", bytes, " bytes");
  }
  return "";
}

std::string DeviceMemory::Stats() const {
  std::lock_guard<std::mutex> guard(lock_);
  return Text("{\"dispatches\": ", launches_, ", \"submissions\": ", launches_,
              ", \"used_bytes\": ", used_, ", \"peak_bytes\": ", peak_,
              ", \"budget_bytes\": ", used_ + AvailableBytes(),
              ", \"allocations\": ", sizes_.size(), "}");
}

}  // namespace k3tvm::emulate
