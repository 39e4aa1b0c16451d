// One device as its users see it: memory, copies, launches, waiting. Every function may be called
// from any thread; one lock per device.
#ifndef K3TVM_VULKAN_DEVICE_H_
#define K3TVM_VULKAN_DEVICE_H_

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "memory.h"
#include "pipeline.h"
#include "pipeline_cache.h"
#include "profiler.h"
#include "ring.h"
#include "stream.h"
#include "transfer.h"

namespace k3tvm::vulkan {

// One call of a kernel.
struct Launch {
  struct Pointer {
    uint64_t address;
    bool writes;
  };
  std::vector<char> arguments;    // as the kernel reads them
  std::vector<Pointer> pointers;  // those among the arguments
  uint32_t grid[3] = {1, 1, 1};
};

class Device {
 public:
  explicit Device(const Physical& facts);

  void* Allocate(size_t size);
  // Never raises: it is called while other errors are on their way.
  void Free(void* address) noexcept;

  void Upload(void* to, const void* from, size_t size);
  void Download(const void* from, void* to, size_t size);
  void Copy(const void* from, void* to, size_t size);
  void Fill(void* to, size_t size, uint32_t value);
  void Run(const KernelCode& code, const Launch& launch);
  // The kernel will not run again: its pipeline goes when the device has finished with it.
  void Forget(const KernelCode& code) noexcept;
  // Waits until everything recorded so far is finished.
  void Sync();

  void ProfileStart();
  std::string ProfileStop();
  // JSON object of counters.
  std::string Stats();
  void SetMemoryLimit(uint64_t bytes);
  uint64_t Available();

  // At the end of the process: waits, saves the pipeline cache; afterwards nothing works.
  void Close() noexcept;

  Gpu gpu;

 private:
  using Guard = std::lock_guard<std::timed_mutex>;
  Allocation* Find(uint64_t address) const;
  Range RangeOf(const void* address, size_t size, const char* what) const;
  void Finish(uint64_t number, std::function<void()> action);
  void Collect();
  void ReleaseAllFinished();
  std::vector<Use> UsesOf(const KernelCode& code, const Launch& launch) const;
  const Pipeline& PipelineOf(const KernelCode& code);
  void Record(const KernelCode& code, const Pipeline& pipeline, const Launch& launch,
              const std::vector<Use>& uses);

  std::timed_mutex lock_;
  Memory memory_;
  Stream stream_;
  Transfer transfer_;
  Ring arguments_;
  Profiler profiler_;
  PipelineCache cache_;
  std::map<const KernelCode*, Pipeline> pipelines_;
  std::multimap<uint64_t, std::function<void()>> deferred_;  // by submission
  size_t dead_ = 0;                                          // allocations among them
  uint64_t dispatches_ = 0;
};

}  // namespace k3tvm::vulkan

#endif  // K3TVM_VULKAN_DEVICE_H_
