#include "ring.h"

#include "errors.h"

namespace k3tvm::vulkan {
namespace {

constexpr uint64_t kAlignment = 64;

}  // namespace

Ring::Piece Ring::Take(uint64_t size) {
  size = (size + kAlignment - 1) / kAlignment * kAlignment;
  if (size > size_) Throw(kError, Text("a piece of ", size, " bytes in a ring of ", size_));
  if (!block_.buffer) block_ = memory_->Dedicated(size_, purpose_);
  uint64_t begin = head_;
  if (begin % size_ + size > size_) begin += size_ - begin % size_;  // a piece does not wrap
  while (!Free(begin, size)) stream_->Wait(spans_.front().number);
  head_ = begin + size;
  uint64_t number = stream_->Next();
  if (!spans_.empty() && spans_.back().number == number) {
    spans_.back().end = head_;
  } else {
    spans_.push_back({head_, number});
  }
  uint64_t offset = begin % size_;
  return {block_.host + offset, block_.address + offset, block_.buffer, offset};
}

bool Ring::Free(uint64_t begin, uint64_t size) {
  uint64_t finished = spans_.empty() ? 0 : stream_->Finished();
  while (!spans_.empty() && spans_.front().number <= finished) {
    tail_ = spans_.front().end;
    spans_.pop_front();
  }
  if (spans_.empty()) tail_ = begin;
  return begin + size - tail_ <= size_;
}

}  // namespace k3tvm::vulkan
