// Times kernels on the device: two timestamps around every dispatch.
#ifndef K3TVM_VULKAN_PROFILER_H_
#define K3TVM_VULKAN_PROFILER_H_

#include <string>
#include <vector>

#include "gpu.h"
#include "stream.h"

namespace k3tvm::vulkan {

class Profiler {
 public:
  Profiler(Gpu* gpu, Stream* stream) : gpu_(gpu), stream_(stream) {}

  // Raises when the device has no timestamps, or times already.
  void Start();
  // Waits for the device; JSON list of [kernel, nanoseconds] in the order of dispatch.
  std::string Stop();

  // Around the recording of one dispatch. While timing, kernels run one after the other.
  void Before(const std::string& kernel) {
    if (running_) Begin(kernel);
  }
  void After() {
    if (running_) Stamp();
  }

 private:
  void Begin(const std::string& kernel);
  void Stamp();
  std::vector<uint64_t> Stamps() const;

  Gpu* gpu_;
  Stream* stream_;
  bool running_ = false;
  std::vector<std::string> kernels_;
  uint32_t stamps_ = 0;
  std::vector<VkQueryPool> pools_;  // kept for the next time
};

}  // namespace k3tvm::vulkan

#endif  // K3TVM_VULKAN_PROFILER_H_
