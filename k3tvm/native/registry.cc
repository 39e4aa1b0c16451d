// Registers the library's functions with TVM's runtime when it is loaded.
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/reflection/registry.h>

#include <algorithm>
#include <cstring>

#include "artifact.h"
#include "device_memory.h"
#include "emulated_device.h"
#include "emulated_module.h"
#include "errors.h"
#include "graph.h"

#ifndef K3TVM_ABI
#error "K3TVM_ABI must be the versions of apache-tvm and apache-tvm-ffi that the headers belong to"
#endif

namespace k3tvm {
namespace {

namespace ffi = tvm::ffi;

// Readable in the file, so that a library for other versions is recognised before it is loaded.
constexpr char kStamp[] = "k3tvm-abi[" K3TVM_ABI "]";

// The bytes [offset, offset + size) of a tensor in emulated memory.
char* BytesOf(const DLTensor* tensor, int64_t offset, int64_t size) {
  if (tensor->device.device_type != kDLCUDA && tensor->device.device_type != kDLMetal) {
    Throw("a tensor that is not in an emulated device's memory");
  }
  auto whole = static_cast<int64_t>(ffi::GetDataSize(*tensor));
  if (offset < 0 || size < 0 || offset > whole || size > whole - offset) {
    Throw(Text("bytes ", offset, " to ", offset + size, " of a tensor of ", whole));
  }
  return static_cast<char*>(tensor->data) + tensor->byte_offset + offset;
}

void Fill(DLTensor* tensor, int64_t offset, int64_t size, int64_t value) {
  char* bytes = BytesOf(tensor, offset, size);
  auto word = static_cast<uint32_t>(value);
  for (int64_t at = 0; at < size; at += 4) {
    std::memcpy(bytes + at, &word, static_cast<size_t>(std::min<int64_t>(4, size - at)));
  }
}

void Copy(DLTensor* to, int64_t to_offset, DLTensor* from, int64_t from_offset, int64_t size) {
  std::memmove(BytesOf(to, to_offset, size), BytesOf(from, from_offset, size),
               static_cast<size_t>(size));
}

TVM_FFI_STATIC_INIT_BLOCK() {
  tvm::ffi::reflection::GlobalDef()
      .def("k3tvm.native.abi", [] { return ffi::String(kStamp); })
      .def("k3tvm.artifact", MakeArtifact)
      .def("k3tvm.emulate.create_module", emulate::MakeModule)
      .def("ffi.Module.load_from_bytes.cuda_emulated", emulate::MakeModule)
      .def("ffi.Module.load_from_bytes.metal_emulated", emulate::MakeModule)
      .def("k3tvm.emulate.install",
           [](const ffi::String& kind) { emulate::Install(std::string(kind)); })
      .def("k3tvm.emulate.set_seed",
           [](int64_t seed) { emulate::SetSeed(static_cast<uint64_t>(seed)); })
      .def("k3tvm.emulate.fill", Fill)
      .def("k3tvm.emulate.copy", Copy)
      .def("k3tvm.emulate.stats",
           [](int64_t) { return ffi::String(emulate::DeviceMemory::Global().Stats()); });
}

}  // namespace
}  // namespace k3tvm
