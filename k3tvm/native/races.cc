#include "races.h"

#include "text.h"

namespace k3tvm::emulate {
namespace {

std::string Name(const Moment& m, bool with_block) {
  std::string who = m.thread == Moment::kMany ? "several threads" : Text("thread ", m.thread);
  return with_block && m.thread != Moment::kMany ? Text(who, " of block ", m.block) : who;
}

}  // namespace

void Races::Clear() {
  first_ += static_cast<Interval>(moments_.size());
  moments_.clear();
  if (first_ > UINT32_MAX / 2) first_ = 1;  // what is older may then be found again: once in 2^31
}

Interval Races::Begin(const Moment& moment) {
  moments_.push_back(moment);
  return first_ + static_cast<Interval>(moments_.size()) - 1;
}

const Moment* Races::Find(Interval interval) const {
  bool known = interval >= first_ && interval - first_ < moments_.size();
  return known ? &moments_[interval - first_] : nullptr;
}

// Fibers run one at a time, so `before` was earlier; the question is whether it had to be.
bool Races::Collide(Interval before, Interval now) const {
  const Moment *a = Find(before), *b = Find(now);
  if (!a || before == now) return false;
  if (a->block != b->block) return true;
  if (a->barriers != b->barriers) return false;
  if (a->thread == b->thread && a->thread != Moment::kMany) return false;
  return a->warp != b->warp || a->warp == Moment::kMany || a->exchanges == b->exchanges;
}

Interval Races::Both(Interval before, Interval now) {
  const Moment a = *Find(before), b = *Find(now);
  if (a.block != b.block) return Begin({UINT64_MAX, Moment::kMany, Moment::kMany, 0, 0});
  int warp = a.warp == b.warp ? a.warp : Moment::kMany;
  Moment both{b.block, warp, Moment::kMany, b.barriers, b.exchanges};
  // The next byte often has the same readers.
  const Moment& last = moments_.back();
  bool same = last.block == both.block && last.warp == warp && last.thread == Moment::kMany &&
              last.barriers == both.barriers && last.exchanges == both.exchanges;
  return same ? first_ + static_cast<Interval>(moments_.size()) - 1 : Begin(both);
}

std::string Races::Read(Shadow::Byte* byte, Interval now) {
  if (byte->read == now) return "";
  if (Collide(byte->written, now)) return Describe("wrote", byte->written, "reads", now);
  byte->read = Collide(byte->read, now) ? Both(byte->read, now) : now;
  return "";
}

std::string Races::Write(Shadow::Byte* byte, Interval now) {
  if (Collide(byte->written, now)) return Describe("wrote", byte->written, "writes", now);
  if (Collide(byte->read, now)) return Describe("read", byte->read, "writes", now);
  byte->written = now;
  return "";
}

std::string Races::Describe(const char* did, Interval before, const char* does,
                            Interval now) const {
  const Moment *a = Find(before), *b = Find(now);
  bool blocks = a->block != b->block;
  return Text("race: ", Name(*b, blocks), " ", does, " what ", Name(*a, blocks), " ", did,
              blocks ? " in another block" : " and no barrier stands between");
}

}  // namespace k3tvm::emulate
