// The driver's compiled kernels on disk, so that a second process need not compile them again.
#ifndef K3TVM_VULKAN_PIPELINE_CACHE_H_
#define K3TVM_VULKAN_PIPELINE_CACHE_H_

#include <chrono>
#include <string>

#include "gpu.h"

namespace k3tvm::vulkan {

class PipelineCache {
 public:
  // Reads the file of this device and driver. One that is damaged, or of another device or driver,
  // counts as absent.
  explicit PipelineCache(Gpu* gpu);

  VkPipelineCache handle() const { return handle_; }

  // A pipeline was made; the file is out of date.
  void Changed() { changed_ = true; }

  // Writes the file if it is out of date. Where it cannot be written nothing happens.
  void Save();
  // The same, but not more often than every few seconds.
  void SaveWhenIdle();

 private:
  Gpu* gpu_;
  std::string path_;  // empty: nowhere
  VkPipelineCache handle_ = VK_NULL_HANDLE;
  bool changed_ = false;
  std::chrono::steady_clock::time_point saved_ = std::chrono::steady_clock::now();
};

// Where this plug-in may keep files: $K3TVM_CACHE, else k3tvm in $XDG_CACHE_HOME or in the user's
// cache folder; empty if there is none.
std::string CacheFolder();

}  // namespace k3tvm::vulkan

#endif  // K3TVM_VULKAN_PIPELINE_CACHE_H_
