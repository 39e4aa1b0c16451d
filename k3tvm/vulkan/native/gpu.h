// An opened device: the Vulkan handles that everything else of a device works with.
#ifndef K3TVM_VULKAN_GPU_H_
#define K3TVM_VULKAN_GPU_H_

#include <atomic>
#include <string>

#include "physical.h"

namespace k3tvm::vulkan {

class Gpu {
 public:
  // Creates the logical device with every feature that a kernel may ask for. The device is never
  // destroyed: at the end of a process the driver may be gone before us.
  explicit Gpu(const Physical& facts);
  Gpu(const Gpu&) = delete;
  Gpu& operator=(const Gpu&) = delete;

  // Raises unless the call succeeded, naming the device; remembers a lost device.
  void Check(VkResult result, const char* what);

  // Raises if the device was lost, or may not be used any more (fork, end of the process).
  void RequireAlive() const;
  bool alive() const { return state_.load(std::memory_order_relaxed) == State::kAlive; }
  void Close() { state_ = State::kClosed; }  // the process ends
  void Forked() { state_ = State::kForked; }

  const Physical& facts;
  VkDevice device = VK_NULL_HANDLE;
  VkQueue queue = VK_NULL_HANDLE;

 private:
  enum class State { kAlive, kLost, kClosed, kForked };
  std::atomic<State> state_{State::kAlive};
};

}  // namespace k3tvm::vulkan

#endif  // K3TVM_VULKAN_GPU_H_
