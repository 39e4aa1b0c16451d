// Reads the compiled form of a device module, as k3tvm/vulkan/module.py writes it.
#ifndef K3TVM_VULKAN_BLOB_H_
#define K3TVM_VULKAN_BLOB_H_

#include <array>
#include <cstdint>
#include <string>
#include <vector>

namespace k3tvm::vulkan {

// One compiled kernel.
struct KernelCode {
  std::string name;
  std::string kinds;      // a character for every parameter, see ArgumentSize
  bool in_block = false;  // arguments in a block by address, else in push constants
  std::vector<int> tags;  // 0..2 blockIdx.x..z, 3..5 threadIdx.x..z, as the caller passes them
  std::array<uint32_t, 3> local{};  // threads of a workgroup
  uint32_t shared_bytes = 0;
  std::vector<std::string> features;
  std::string glsl;
  std::vector<uint32_t> spirv;
  uint32_t argument_bytes = 0;  // all arguments, each aligned to its own size

  uint32_t push_bytes() const { return in_block ? 8 : (argument_bytes + 3) / 4 * 4; }
};

// Bytes of an argument of this kind.
//   p pointer that is only read, P pointer that is also written (8); b bool as int32 (4);
//   c C int8 uint8 (1); w W int16 uint16 (2); i I int32 uint32 (4); l L int64 uint64 (8);
//   h f d float16 float32 float64 (2, 4, 8)
uint32_t ArgumentSize(char kind);

// Raises an error that says where the text is damaged.
std::vector<KernelCode> ReadKernels(const std::string& blob);

}  // namespace k3tvm::vulkan

#endif  // K3TVM_VULKAN_BLOB_H_
