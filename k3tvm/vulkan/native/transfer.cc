#include "transfer.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "errors.h"
#include "loader.h"

namespace k3tvm::vulkan {
namespace {

constexpr uint64_t kRingBytes = 16ull << 20;
constexpr uint64_t kPieceBytes = 4ull << 20;  // several pieces of a large copy are under way

bool StagingOnly() {
  const char* value = std::getenv("K3TVM_VULKAN_STAGING");
  return value && *value && std::strcmp(value, "0") != 0;
}

Range Part(const Range& range, uint64_t begin, uint64_t size) {
  return {range.allocation, range.offset + begin, size};
}

void RecordCopy(VkCommandBuffer commands, VkBuffer from, uint64_t from_offset, VkBuffer to,
                uint64_t to_offset, uint64_t size) {
  VkBufferCopy region{from_offset, to_offset, size};
  vk.CmdCopyBuffer(commands, from, to, 1, &region);
}

}  // namespace

Transfer::Transfer(Memory* memory, Stream* stream)
    : stream_(stream),
      upload_(memory, stream, kRingBytes, Purpose::kUpload),
      readback_(memory, stream, kRingBytes, Purpose::kReadback),
      direct_(!StagingOnly()) {}

void Transfer::Upload(const Range& to, const char* from) {
  char* host = to.allocation->host();
  if (direct_ && host && to.allocation->last_use <= stream_->Finished()) {
    std::memcpy(host + to.offset, from, to.size);
    return;
  }
  for (uint64_t at = 0; at < to.size; at += kPieceBytes) {
    UploadPiece(Part(to, at, std::min(kPieceBytes, to.size - at)), from + at);
  }
}

void Transfer::UploadPiece(const Range& to, const char* from) {
  Ring::Piece piece = upload_.Take(to.size);
  std::memcpy(piece.host, from, to.size);
  Use use{to.allocation, true};
  stream_->Announce(&use, 1);
  RecordCopy(stream_->Commands(), piece.buffer, piece.offset, to.buffer(), to.in_buffer(), to.size);
  stream_->Recorded();
}

void Transfer::Download(const Range& from, char* to) {
  // Memory that is not cached by the host is read many times slower than it is copied.
  char* host = from.allocation->home->block.cached ? from.allocation->host() : nullptr;
  if (direct_ && host) {
    stream_->Wait(from.allocation->last_use);
    std::memcpy(to, host + from.offset, from.size);
    return;
  }
  // One piece is copied on the device while the host reads the one before.
  struct Pending {
    Ring::Piece piece;
    uint64_t number, at, size;
  };
  Pending last{};
  auto finish = [&] {
    if (!last.size) return;
    stream_->Wait(last.number);
    std::memcpy(to + last.at, last.piece.host, last.size);
  };
  for (uint64_t at = 0; at < from.size; at += kPieceBytes) {
    uint64_t size = std::min(kPieceBytes, from.size - at);
    Ring::Piece piece = DownloadPiece(Part(from, at, size));
    uint64_t number = stream_->submitted();
    finish();
    last = {piece, number, at, size};
  }
  finish();
}

Ring::Piece Transfer::DownloadPiece(const Range& from) {
  Ring::Piece piece = readback_.Take(from.size);
  Use use{from.allocation, false};
  stream_->Announce(&use, 1);
  RecordCopy(stream_->Commands(), from.buffer(), from.in_buffer(), piece.buffer, piece.offset,
             from.size);
  stream_->Flush();
  return piece;
}

void Transfer::Copy(const Range& from, const Range& to) {
  if (from.allocation == to.allocation) {
    if (from.offset == to.offset) return;
    uint64_t low = std::min(from.offset, to.offset), high = std::max(from.offset, to.offset);
    if (high - low < from.size) Throw(kError, "a copy on the device whose ranges overlap");
  }
  Use uses[] = {{from.allocation, false}, {to.allocation, true}};
  stream_->Announce(uses, 2);
  RecordCopy(stream_->Commands(), from.buffer(), from.in_buffer(), to.buffer(), to.in_buffer(),
             from.size);
  stream_->Recorded();
}

void Transfer::Fill(const Range& to, uint32_t value) {
  if ((to.in_buffer() | to.size) % 4) {
    Throw(kError, Text("a fill needs multiples of four bytes, got offset ", to.offset, " and size ",
                       to.size));
  }
  Use use{to.allocation, true};
  stream_->Announce(&use, 1);
  vk.CmdFillBuffer(stream_->Commands(), to.buffer(), to.in_buffer(), to.size, value);
  stream_->Recorded();
}

}  // namespace k3tvm::vulkan
