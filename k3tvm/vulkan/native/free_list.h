// The free ranges of one block of memory: best fit, neighbours merged.
#ifndef K3TVM_VULKAN_FREE_LIST_H_
#define K3TVM_VULKAN_FREE_LIST_H_

#include <cstdint>
#include <map>
#include <set>
#include <utility>

namespace k3tvm::vulkan {

class FreeList {
 public:
  // The range [begin, end) is free at first.
  FreeList(uint64_t begin, uint64_t end) : whole_(end - begin) { Insert(begin, end - begin); }

  // Whether `size` bytes fit.
  bool Fits(uint64_t size) const { return !by_size_.empty() && by_size_.rbegin()->first >= size; }
  // Whether nothing is taken.
  bool Empty() const { return by_size_.size() == 1 && by_size_.begin()->first == whole_; }

  // Takes `size` bytes, which must fit, out of the smallest range that has them; returns the
  // offset.
  uint64_t Take(uint64_t size) {
    auto best = by_size_.lower_bound({size, 0});
    auto [length, offset] = *best;
    Erase(offset, length);
    if (length > size) Insert(offset + size, length - size);
    return offset;
  }

  // Gives a range back and joins it with free neighbours.
  void Give(uint64_t offset, uint64_t size) {
    auto next = by_offset_.lower_bound(offset);
    if (next != by_offset_.end() && next->first == offset + size) {
      uint64_t length = next->second;
      Erase(offset + size, length);
      size += length;
    }
    auto after = by_offset_.lower_bound(offset);
    if (after != by_offset_.begin()) {
      auto [before, length] = *std::prev(after);
      if (before + length == offset) {
        Erase(before, length);
        offset = before;
        size += length;
      }
    }
    Insert(offset, size);
  }

 private:
  void Insert(uint64_t offset, uint64_t size) {
    by_offset_[offset] = size;
    by_size_.insert({size, offset});
  }

  void Erase(uint64_t offset, uint64_t size) {
    by_offset_.erase(offset);
    by_size_.erase({size, offset});
  }

  uint64_t whole_;
  std::map<uint64_t, uint64_t> by_offset_;
  std::set<std::pair<uint64_t, uint64_t>> by_size_;  // size, offset
};

}  // namespace k3tvm::vulkan

#endif  // K3TVM_VULKAN_FREE_LIST_H_
