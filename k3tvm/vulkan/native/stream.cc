#include "stream.h"

#include <algorithm>

#include "loader.h"

namespace k3tvm::vulkan {
namespace {

constexpr uint32_t kFewCommands = 16;    // enough to submit when the device has nothing to do
constexpr uint32_t kManyCommands = 256;  // submitted in any case
constexpr size_t kInFlight = 16;         // submissions; then the host waits for the oldest

constexpr VkPipelineStageFlags kWork =
    VK_PIPELINE_STAGE_COMPUTE_SHADER_BIT | VK_PIPELINE_STAGE_TRANSFER_BIT;
constexpr VkAccessFlags kWrites = VK_ACCESS_SHADER_WRITE_BIT | VK_ACCESS_TRANSFER_WRITE_BIT;
constexpr VkAccessFlags kReads = VK_ACCESS_SHADER_READ_BIT | VK_ACCESS_TRANSFER_READ_BIT;

void PutBarrier(VkCommandBuffer commands, VkAccessFlags after, VkPipelineStageFlags stage) {
  VkMemoryBarrier barrier{VK_STRUCTURE_TYPE_MEMORY_BARRIER};
  barrier.srcAccessMask = kWrites;
  barrier.dstAccessMask = after;
  vk.CmdPipelineBarrier(commands, kWork, stage, 0, 1, &barrier, 0, nullptr, 0, nullptr);
}

}  // namespace

Stream::Stream(Gpu* gpu) : gpu_(gpu) {
  MakeSemaphore();
  MakePool();
}

void Stream::MakeSemaphore() {
  VkSemaphoreTypeCreateInfo type{VK_STRUCTURE_TYPE_SEMAPHORE_TYPE_CREATE_INFO};
  type.semaphoreType = VK_SEMAPHORE_TYPE_TIMELINE;
  VkSemaphoreCreateInfo info{VK_STRUCTURE_TYPE_SEMAPHORE_CREATE_INFO, &type};
  gpu_->Check(vk.CreateSemaphore(gpu_->device, &info, nullptr, &timeline_), "vkCreateSemaphore");
}

void Stream::MakePool() {
  VkCommandPoolCreateInfo info{VK_STRUCTURE_TYPE_COMMAND_POOL_CREATE_INFO};
  info.flags = VK_COMMAND_POOL_CREATE_RESET_COMMAND_BUFFER_BIT;
  info.queueFamilyIndex = gpu_->facts.queue_family;
  gpu_->Check(vk.CreateCommandPool(gpu_->device, &info, nullptr, &pool_), "vkCreateCommandPool");
}

VkCommandBuffer Stream::TakeBuffer() {
  Finished();
  if (in_flight_.size() >= kInFlight) {
    WaitSubmitted(in_flight_.front().number);
    Finished();
  }
  if (!idle_.empty()) {
    VkCommandBuffer buffer = idle_.back();
    idle_.pop_back();
    return buffer;
  }
  VkCommandBufferAllocateInfo info{VK_STRUCTURE_TYPE_COMMAND_BUFFER_ALLOCATE_INFO};
  info.commandPool = pool_;
  info.level = VK_COMMAND_BUFFER_LEVEL_PRIMARY;
  info.commandBufferCount = 1;
  VkCommandBuffer buffer = VK_NULL_HANDLE;
  gpu_->Check(vk.AllocateCommandBuffers(gpu_->device, &info, &buffer), "vkAllocateCommandBuffers");
  return buffer;
}

VkCommandBuffer Stream::Commands() {
  if (recording_) return recording_;
  gpu_->RequireAlive();
  VkCommandBuffer buffer = TakeBuffer();
  VkCommandBufferBeginInfo info{VK_STRUCTURE_TYPE_COMMAND_BUFFER_BEGIN_INFO};
  info.flags = VK_COMMAND_BUFFER_USAGE_ONE_TIME_SUBMIT_BIT;
  gpu_->Check(vk.BeginCommandBuffer(buffer, &info), "vkBeginCommandBuffer");
  gathered_ = 0;
  return recording_ = buffer;
}

void Stream::Announce(const Use* uses, size_t n) {
  bool conflict = false;
  for (size_t i = 0; i < n; ++i) conflict = conflict || hazards_.Conflicts(uses[i]);
  if (conflict) Barrier();
  for (size_t i = 0; i < n; ++i) {
    hazards_.Note(uses[i]);
    uses[i].allocation->last_use = Next();
  }
}

void Stream::Barrier() {
  PutBarrier(Commands(), kReads | kWrites, kWork);
  hazards_.Barrier();
  ++barriers_;
}

void Stream::Recorded() {
  ++gathered_;
  bool look = gathered_ % kFewCommands == 0;
  if (gathered_ >= kManyCommands || (look && Finished() == submitted_)) Flush();
}

void Stream::Flush() {
  if (!recording_) return;
  gpu_->RequireAlive();
  // The host reads and writes memory directly once the submission is finished.
  PutBarrier(recording_, VK_ACCESS_HOST_READ_BIT | VK_ACCESS_HOST_WRITE_BIT,
             VK_PIPELINE_STAGE_HOST_BIT);
  VkCommandBuffer commands = recording_;
  recording_ = VK_NULL_HANDLE;
  gpu_->Check(vk.EndCommandBuffer(commands), "vkEndCommandBuffer");
  uint64_t number = Next();
  VkTimelineSemaphoreSubmitInfo timeline{VK_STRUCTURE_TYPE_TIMELINE_SEMAPHORE_SUBMIT_INFO};
  timeline.signalSemaphoreValueCount = 1;
  timeline.pSignalSemaphoreValues = &number;
  VkSubmitInfo info{VK_STRUCTURE_TYPE_SUBMIT_INFO, &timeline};
  info.commandBufferCount = 1;
  info.pCommandBuffers = &commands;
  info.signalSemaphoreCount = 1;
  info.pSignalSemaphores = &timeline_;
  gpu_->Check(vk.QueueSubmit(gpu_->queue, 1, &info, VK_NULL_HANDLE), "vkQueueSubmit");
  submitted_ = number;
  in_flight_.push_back({number, commands});
}

uint64_t Stream::Finished() {
  if (finished_ < submitted_) {
    gpu_->Check(vk.GetSemaphoreCounterValue(gpu_->device, timeline_, &finished_),
                "vkGetSemaphoreCounterValue");
  }
  while (!in_flight_.empty() && in_flight_.front().number <= finished_) {
    idle_.push_back(in_flight_.front().commands);
    in_flight_.pop_front();
  }
  return finished_;
}

void Stream::Wait(uint64_t number) {
  if (number > submitted_) Flush();
  // A submission that failed never gets its number: nothing is to be waited for.
  number = std::min(number, submitted_);
  if (number > finished_) WaitSubmitted(number);
  Finished();
}

void Stream::Drain() {
  Flush();
  Wait(submitted_);
}

void Stream::WaitSubmitted(uint64_t number) const {
  gpu_->RequireAlive();
  VkSemaphoreWaitInfo info{VK_STRUCTURE_TYPE_SEMAPHORE_WAIT_INFO};
  info.semaphoreCount = 1;
  info.pSemaphores = &timeline_;
  info.pValues = &number;
  gpu_->Check(vk.WaitSemaphores(gpu_->device, &info, UINT64_MAX), "vkWaitSemaphores");
}

}  // namespace k3tvm::vulkan
