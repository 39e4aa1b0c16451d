#include "runtime.h"

#include <cstdlib>

#ifndef _WIN32
#include <pthread.h>
#endif

#include "errors.h"
#include "instance.h"

namespace k3tvm::vulkan {
namespace {

thread_local int current_device = 0;
std::atomic<bool> exists{false};  // whether somebody asked for devices yet

}  // namespace

Runtime& Runtime::Get() {
  static auto* runtime = new Runtime;
  return *runtime;
}

Runtime::Runtime() {
  Instance instance = OpenInstance();
  why_not_ = instance.why_not;
  for (VkPhysicalDevice handle : instance.devices) {
    devices_.push_back(ReadPhysical(instance.handle, handle, static_cast<int>(devices_.size())));
    opened_.emplace_back(nullptr);
  }
  exists = true;
}

bool Runtime::Usable(int index) const {
  return index >= 0 && static_cast<size_t>(index) < devices_.size() &&
         devices_[index].why_not.empty() && !forked_;
}

const Physical& Runtime::FactsOf(int index) const {
  if (!why_not_.empty()) {
    Throw(kNoDevice, Text("vulkan:", index, " is not available: ", why_not_));
  }
  if (index < 0 || static_cast<size_t>(index) >= devices_.size()) {
    std::string list;
    for (const Physical& device : devices_) list += (list.empty() ? "" : ", ") + device.Title();
    Throw(kNoDevice, Text("vulkan:", index, " is not available: there is ", list));
  }
  return devices_[index];
}

Device& Runtime::At(int index) {
  if (index >= 0 && static_cast<size_t>(index) < opened_.size()) {
    Device* device = opened_[index].load(std::memory_order_acquire);
    if (device) return *device;
  }
  return Open(index);
}

Device& Runtime::Open(int index) {
  const Physical& facts = FactsOf(index);
  if (!facts.why_not.empty()) {
    Throw(kNoDevice, Text(facts.Title(), " cannot be used: it ", facts.why_not));
  }
  if (forked_) Throw(kNoDevice, "Vulkan was opened before fork(); start the new process with exec");
  std::lock_guard<std::mutex> guard(opening_);
  Device* device = opened_[index].load();
  if (device) return *device;
  bool first = Opened().empty();
  device = new Device(facts);
  opened_[index].store(device, std::memory_order_release);
  if (first) {
    // Registered now, after the driver's own handlers, and so run before them.
    std::atexit(AtExit);
#ifndef _WIN32
    pthread_atfork(nullptr, nullptr, AfterFork);
#endif
  }
  return *device;
}

std::vector<Device*> Runtime::Opened() {
  std::vector<Device*> found;
  if (!exists) return found;
  for (const auto& slot : Get().opened_) {
    if (Device* device = slot.load(std::memory_order_acquire)) found.push_back(device);
  }
  return found;
}

int Runtime::current() { return current_device; }

void Runtime::SetCurrent(int index) { current_device = index; }

void Runtime::AtExit() {
  for (Device* device : Opened()) device->Close();
}

void Runtime::AfterFork() {
  Get().forked_ = true;
  for (Device* device : Opened()) device->gpu.Forked();
}

}  // namespace k3tvm::vulkan
