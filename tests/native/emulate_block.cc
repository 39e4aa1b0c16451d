// Runs blocks of emulated threads without TVM, so that the scheduler can be tried on CPUs for which
// there is no TVM at hand. Prints what is wrong; exits 0 when nothing is.
#include <cstdio>
#include <string>

#include "block.h"
#include "device_memory.h"
#include "k3emu_cuda.h"

namespace k3tvm::emulate {

// The memory of kernels here is no device's.
DeviceMemory& DeviceMemory::Global() {
  static DeviceMemory memory;
  return memory;
}
Tracked DeviceMemory::Find(const char*) { return {}; }

}  // namespace k3tvm::emulate

namespace {

using k3tvm::emulate::BlockRunner;
using k3tvm::emulate::Launch;
constexpr unsigned kThreads = 96;
float out[kThreads];

// Sixteen numbers that must outlive a wait, more than the registers that a switch must keep.
template <typename Pause>
void Keep(Pause pause) {
  unsigned t = threadIdx.x;
  float kept[16];
  double wide[4];
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) kept[i] = static_cast<float>(t * 16 + i) * 0.5f;
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) wide[i] = t * 0.25 + i;
  pause();
  float sum = 0;
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) sum += kept[i];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) sum += static_cast<float>(wide[i]);
  out[t] = sum;
}

float Kept(unsigned t) {
  float sum = 0;
  for (unsigned i = 0; i < 16; ++i) sum += static_cast<float>(t * 16 + i) * 0.5f;
  for (unsigned i = 0; i < 4; ++i) sum += static_cast<float>(t * 0.25 + i);
  return sum;
}

void KeepOverBarrier(void**) {
  Keep([] { __syncthreads(); });
}

void KeepOverExchange(void**) {
  Keep([] { __syncwarp(); });
}

void Mirror(void**) {
  auto* cells = static_cast<float*>(k3emu::shared(0, kThreads * sizeof(float)));
  cells[threadIdx.x] = static_cast<float>(threadIdx.x);
  __syncthreads();
  out[threadIdx.x] = cells[kThreads - 1 - threadIdx.x];
}

void Shuffle(void**) {
  int t = static_cast<int>(threadIdx.x);
  int other = __shfl_xor_sync(0xffffffffu, t, 5) + __shfl_down_sync(0xffffffffu, t, 1);
  out[t] = static_cast<float>(other);
}

float Shuffled(unsigned t) { return static_cast<float>((t ^ 5) + (t % 32 < 31 ? t + 1 : t)); }

void Halves(void**) {
  out[threadIdx.x] = static_cast<float>(static_cast<half>(threadIdx.x * 0.1f + 2048.0f));
}

float Halved(unsigned t) {  // numbers of this size lie two apart, ties go to even ones
  float x = t * 0.1f;
  int low = static_cast<int>(x / 2) * 2;
  float rest = x - static_cast<float>(low);
  bool up = rest > 1 || (rest == 1 && low % 4 != 0);
  return 2048.0f + static_cast<float>(up ? low + 2 : low);
}

void Divergent(void**) {
  if (threadIdx.x < 7) __syncthreads();
}

void TooFar(void**) {
  auto* cells = static_cast<float*>(k3emu::shared(0, 16 * sizeof(float)));
  cells[threadIdx.x < 17 ? threadIdx.x : 0] = 1;
}

std::string Run(k3emu::Entry kernel, unsigned seed) {
  static BlockRunner runner;
  return runner.Run(Launch{kernel, nullptr, {4, 1, 1}, {kThreads, 1, 1}, seed, nullptr}, 2);
}

int wrong = 0;

void Expect(const char* name, k3emu::Entry kernel, unsigned seed, float (*want)(unsigned)) {
  std::string error = Run(kernel, seed);
  for (unsigned t = 0; t < kThreads; ++t) {
    if (error.empty() && out[t] == want(t)) continue;
    std::printf("%s, seed %u, thread %u: %g, not %g; %s\n", name, seed, t, out[t], want(t),
                error.c_str());
    ++wrong;
    return;
  }
}

void ExpectError(k3emu::Entry kernel, unsigned seed, const char* text) {
  std::string error = Run(kernel, seed);
  if (error.find(text) != std::string::npos) return;
  std::printf("seed %u: %s is not in '%s'\n", seed, text, error.c_str());
  ++wrong;
}

}  // namespace

int main() {
  for (unsigned seed : {0u, 1u, 7u}) {
    Expect("over a barrier", KeepOverBarrier, seed, Kept);
    Expect("over an exchange", KeepOverExchange, seed, Kept);
    Expect("mirror", Mirror, seed, [](unsigned t) { return float(kThreads - 1 - t); });
    Expect("shuffle", Shuffle, seed, Shuffled);
    Expect("halves", Halves, seed, Halved);
    ExpectError(Divergent, seed, "7 at a barrier of the block, 0 at an exchange of their warp, 89");
    ExpectError(TooFar, seed, "past the end of shared array 0 of 64 bytes (block 2, 0, 0)");
  }
  return wrong != 0;
}
