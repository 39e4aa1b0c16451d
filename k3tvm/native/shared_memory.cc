#include "shared_memory.h"

#include "guard.h"
#include "text.h"

namespace k3tvm::emulate {
namespace {

constexpr size_t kAlignment = 128;

}  // namespace

void SharedMemory::Clear() {
  for (Slot& slot : slots_) slot.used = false;
}

void* SharedMemory::Get(unsigned id, size_t bytes) {
  if (id >= slots_.size()) slots_.resize(id + 1);
  Slot& slot = slots_[id];
  if (slot.used) return slot.memory.get();
  size_t room = (bytes + kGuardBytes + kAlignment - 1) / kAlignment * kAlignment;
  if (room > slot.room) {
    slot.memory.reset(static_cast<char*>(std::aligned_alloc(kAlignment, room)));
    slot.room = room;
  }
  slot.bytes = bytes;
  std::memset(slot.memory.get(), kPoison, bytes);
  PutGuard(slot.memory.get() + bytes);
  slot.shadow.Clear();
  slot.used = true;
  return slot.memory.get();
}

std::string SharedMemory::CheckGuards() const {
  for (size_t id = 0; id < slots_.size(); ++id) {
    const Slot& slot = slots_[id];
    if (slot.used && !Whole(slot.memory.get() + slot.bytes)) {
      return Text("wrote past the end of shared array ", id, " of ", slot.bytes, " bytes");
    }
  }
  return "";
}

Tracked SharedMemory::Find(const void* address) {
  auto at = static_cast<const char*>(address);
  for (Slot& slot : slots_) {
    const char* data = slot.memory.get();
    if (slot.used && at >= data && at < data + slot.bytes + kGuardBytes) {
      return {slot.memory.get(), slot.bytes, &slot.shadow};
    }
  }
  return {};
}

}  // namespace k3tvm::emulate
