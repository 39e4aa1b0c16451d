// The order of work on a device: records commands, submits them in batches while the host goes on
// recording, puts barriers where they are needed, and knows what has been finished.
//
// Every submission has a number, counted by a timeline semaphore. Work that is being recorded will
// have the number Next(). Barriers reach across submissions, as Vulkan's order of submission does.
#ifndef K3TVM_VULKAN_STREAM_H_
#define K3TVM_VULKAN_STREAM_H_

#include <deque>
#include <vector>

#include "gpu.h"
#include "hazards.h"

namespace k3tvm::vulkan {

class Stream {
 public:
  explicit Stream(Gpu* gpu);

  // The command buffer being recorded; begins one if there is none.
  VkCommandBuffer Commands();

  // Announces what the next command touches: puts a barrier if it must wait, and marks the
  // allocations as in use by the submission being recorded.
  void Announce(const Use* uses, size_t n);
  void Barrier();

  // Ends one command: submits when enough has gathered, sooner while the device has nothing to do.
  void Recorded();
  // Submits what has been recorded.
  void Flush();

  // Number of the submission being recorded, of the last one submitted, of the last one finished.
  uint64_t Next() const { return submitted_ + 1; }
  uint64_t submitted() const { return submitted_; }
  uint64_t Finished();

  // Submits if need be, and waits until submission `number` is finished.
  void Wait(uint64_t number);
  // Waits until everything is finished.
  void Drain();
  // The same without submitting, and without touching this object: needs no lock.
  void WaitSubmitted(uint64_t number) const;

  uint64_t barriers() const { return barriers_; }

 private:
  VkCommandBuffer TakeBuffer();
  void MakeSemaphore();
  void MakePool();

  Gpu* gpu_;
  Hazards hazards_;
  VkCommandPool pool_ = VK_NULL_HANDLE;
  VkSemaphore timeline_ = VK_NULL_HANDLE;
  VkCommandBuffer recording_ = VK_NULL_HANDLE;
  uint32_t gathered_ = 0;  // commands in the buffer being recorded
  uint64_t submitted_ = 0, finished_ = 0, barriers_ = 0;
  struct Submitted {
    uint64_t number;
    VkCommandBuffer commands;
  };
  std::deque<Submitted> in_flight_;
  std::vector<VkCommandBuffer> idle_;
};

}  // namespace k3tvm::vulkan

#endif  // K3TVM_VULKAN_STREAM_H_
