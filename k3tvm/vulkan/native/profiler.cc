#include "profiler.h"

#include <algorithm>

#include "errors.h"
#include "json.h"
#include "loader.h"

namespace k3tvm::vulkan {
namespace {

constexpr uint32_t kPoolStamps = 2048;  // of one query pool

}  // namespace

void Profiler::Start() {
  if (!gpu_->facts.timestamp_bits) {
    Throw(kError, gpu_->facts.Title() + ": the queue has no timestamps, kernels cannot be timed");
  }
  if (running_) Throw(kError, gpu_->facts.Title() + ": kernels are being timed already");
  running_ = true;
  kernels_.clear();
  stamps_ = 0;
}

void Profiler::Begin(const std::string& kernel) {
  kernels_.push_back(kernel);
  stream_->Barrier();  // a stamp waits only for what a barrier makes it wait for
  Stamp();
}

void Profiler::Stamp() {
  uint32_t pool = stamps_ / kPoolStamps, query = stamps_ % kPoolStamps;
  if (pool == pools_.size()) {
    VkQueryPoolCreateInfo info{VK_STRUCTURE_TYPE_QUERY_POOL_CREATE_INFO};
    info.queryType = VK_QUERY_TYPE_TIMESTAMP;
    info.queryCount = kPoolStamps;
    pools_.push_back(VK_NULL_HANDLE);
    gpu_->Check(vk.CreateQueryPool(gpu_->device, &info, nullptr, &pools_.back()),
                "vkCreateQueryPool");
  }
  VkCommandBuffer commands = stream_->Commands();
  if (query == 0) vk.CmdResetQueryPool(commands, pools_[pool], 0, kPoolStamps);
  vk.CmdWriteTimestamp(commands, VK_PIPELINE_STAGE_BOTTOM_OF_PIPE_BIT, pools_[pool], query);
  ++stamps_;
}

std::vector<uint64_t> Profiler::Stamps() const {
  std::vector<uint64_t> stamps(stamps_);
  for (uint32_t at = 0; at < stamps_; at += kPoolStamps) {
    uint32_t n = std::min(kPoolStamps, stamps_ - at);
    gpu_->Check(
        vk.GetQueryPoolResults(gpu_->device, pools_[at / kPoolStamps], 0, n, n * 8, &stamps[at], 8,
                               VK_QUERY_RESULT_64_BIT | VK_QUERY_RESULT_WAIT_BIT),
        "vkGetQueryPoolResults");
  }
  return stamps;
}

std::string Profiler::Stop() {
  if (!running_) Throw(kError, gpu_->facts.Title() + ": kernels are not being timed");
  running_ = false;
  stream_->Drain();
  std::vector<uint64_t> stamps = Stamps();
  uint32_t bits = gpu_->facts.timestamp_bits;
  uint64_t mask = bits < 64 ? (1ull << bits) - 1 : ~0ull;
  double period = gpu_->facts.base.limits.timestampPeriod;
  Json json;
  json.Open('[');
  for (size_t i = 0; i < kernels_.size(); ++i) {
    uint64_t ticks = (stamps[2 * i + 1] - stamps[2 * i]) & mask;
    json.Open('[').Value(kernels_[i]);
    json.Value(static_cast<uint64_t>(static_cast<double>(ticks) * period)).Close(']');
  }
  return json.Close(']').text();
}

}  // namespace k3tvm::vulkan
