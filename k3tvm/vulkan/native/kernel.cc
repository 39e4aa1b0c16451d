#include "kernel.h"

#include <tvm/ffi/container/tensor.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "errors.h"
#include "runtime.h"

namespace k3tvm::vulkan {
namespace {

using tvm::ffi::AnyView;

// Bits of the nearest float16; ties go to even.
uint16_t HalfBits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  uint32_t sign = bits >> 16 & 0x8000;
  float size = std::fabs(value);
  if (std::isnan(value)) return static_cast<uint16_t>(sign | 0x7e00);
  if (size >= 65520.0f) return static_cast<uint16_t>(sign | 0x7c00);
  if (size == 0) return static_cast<uint16_t>(sign);
  int exponent = 0;
  std::frexp(size, &exponent);
  int lowest = std::max(exponent - 11, -24);  // weight of the last bit that is kept
  auto digits = static_cast<uint32_t>(std::nearbyint(std::ldexp(size, -lowest)));
  // Digits of 2^10 and more carry into the exponent field by themselves.
  return static_cast<uint16_t>(sign | ((static_cast<uint32_t>(lowest + 24) << 10) + digits));
}

// Writes arguments one after the other, each aligned to its own size.
class Packer {
 public:
  explicit Packer(std::vector<char>* out) : out_(out) {}

  template <typename T>
  void Put(T value) {
    at_ = (at_ + sizeof(T) - 1) / sizeof(T) * sizeof(T);
    std::memcpy(out_->data() + at_, &value, sizeof(T));
    at_ += sizeof(T);
  }

  void PutInteger(uint32_t size, int64_t value) {
    if (size == 8) return Put(value);
    if (size == 4) return Put(static_cast<int32_t>(value));
    if (size == 2) return Put(static_cast<int16_t>(value));
    Put(static_cast<int8_t>(value));
  }

  void PutFloat(uint32_t size, double value) {
    if (size == 8) return Put(value);
    if (size == 4) return Put(static_cast<float>(value));
    Put(HalfBits(static_cast<float>(value)));
  }

 private:
  std::vector<char>* out_;
  size_t at_ = 0;
};

// The address of a pointer argument. A tensor also says on which device to run.
uint64_t PointerOf(const AnyView& argument, int* device) {
  if (auto tensor = argument.try_cast<DLTensor*>()) {
    if ((*tensor)->device.device_type != kDLVulkan) {
      Throw(kError, "a tensor that is not in a Vulkan device's memory was given to a kernel");
    }
    *device = (*tensor)->device.device_id;
    return reinterpret_cast<uint64_t>((*tensor)->data) + (*tensor)->byte_offset;
  }
  return reinterpret_cast<uint64_t>(argument.cast<void*>());
}

void PackArguments(const KernelCode& code, tvm::ffi::PackedArgs arguments, Launch* launch,
                   int* device) {
  launch->arguments.resize((code.argument_bytes + 7) / 8 * 8);
  Packer packer(&launch->arguments);
  for (size_t i = 0; i < code.kinds.size(); ++i) {
    char kind = code.kinds[i];
    AnyView argument = arguments[static_cast<int>(i)];
    if (kind == 'p' || kind == 'P') {
      uint64_t address = PointerOf(argument, device);
      launch->pointers.push_back({address, kind == 'P'});
      packer.Put(address);
    } else if (kind == 'h' || kind == 'f' || kind == 'd') {
      packer.PutFloat(ArgumentSize(kind), argument.cast<double>());
    } else {
      packer.PutInteger(ArgumentSize(kind), argument.cast<int64_t>());
    }
  }
}

// Reads the extents of the grid; returns whether there is anything to do.
bool ReadGrid(const KernelCode& code, tvm::ffi::PackedArgs arguments, Launch* launch) {
  bool any = true;
  for (size_t i = 0; i < code.tags.size(); ++i) {
    auto extent = arguments[static_cast<int>(code.kinds.size() + i)].cast<int64_t>();
    int tag = code.tags[i];
    if (tag >= 3) {
      if (extent == code.local[tag - 3]) continue;
      Throw(kError,
            Text("kernel ", code.name, " was launched with ", extent, " threads in dimension ",
                 "xyz"[tag - 3], ", it was compiled for ", code.local[tag - 3]));
    }
    if (extent < 0 || extent > UINT32_MAX) {
      Throw(kLimit, Text("kernel ", code.name, " was launched with ", extent, " workgroups"));
    }
    launch->grid[tag] = static_cast<uint32_t>(extent);
    any = any && extent > 0;
  }
  return any;
}

}  // namespace

Kernel::~Kernel() {
  for (Device* device : Runtime::Opened()) device->Forget(code_);
}

void Kernel::Call(tvm::ffi::PackedArgs arguments) const {
  size_t wanted = code_.kinds.size() + code_.tags.size();
  if (static_cast<size_t>(arguments.size()) != wanted) {
    Throw(kError,
          Text("kernel ", code_.name, " takes ", wanted, " arguments, got ", arguments.size()));
  }
  Launch launch;
  int device = Runtime::current();
  PackArguments(code_, arguments, &launch, &device);
  if (ReadGrid(code_, arguments, &launch)) Runtime::Get().At(device).Run(code_, launch);
}

}  // namespace k3tvm::vulkan
