// All devices of the process: the instance is opened when somebody first asks for a device, a
// device when somebody first uses it.
#ifndef K3TVM_VULKAN_RUNTIME_H_
#define K3TVM_VULKAN_RUNTIME_H_

#include <atomic>
#include <deque>
#include <mutex>
#include <string>
#include <vector>

#include "device.h"

namespace k3tvm::vulkan {

class Runtime {
 public:
  // Never destroyed: tensors and modules may be freed after static objects are.
  static Runtime& Get();

  // All devices of the system in the loader's order, usable or not.
  const std::deque<Physical>& devices() const { return devices_; }
  // Why there are none; empty if there are.
  const std::string& why_not() const { return why_not_; }

  bool Usable(int index) const;
  // The device, opened if need be; raises an error that says what there is instead.
  Device& At(int index);
  // Its facts, without opening it; raises as At does.
  const Physical& FactsOf(int index) const;
  // The devices that are open; opens nothing, not even the instance.
  static std::vector<Device*> Opened();

  // The device that kernels of this thread run on, as TVM's host code sets it.
  static int current();
  static void SetCurrent(int index);

 private:
  Runtime();
  Device& Open(int index);
  static void AtExit();
  static void AfterFork();

  std::deque<Physical> devices_;
  std::string why_not_;
  std::mutex opening_;
  std::deque<std::atomic<Device*>> opened_;
  std::atomic<bool> forked_{false};
};

}  // namespace k3tvm::vulkan

#endif  // K3TVM_VULKAN_RUNTIME_H_
