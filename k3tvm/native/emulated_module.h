// Kernels of an emulated device: a shared library in a blob, and how to call what is in it.
//
// The blob, little endian; str is a u32 length and bytes:
//   "K3EM" | u32 format | str language | str library (ELF) | u32 kernels | per kernel:
//   str name | str kinds | u32 tags, u8 per tag | u32 threads x, y, z
// kinds and tags are those of k3tvm/emulate/module.py.
#ifndef K3TVM_NATIVE_EMULATED_MODULE_H_
#define K3TVM_NATIVE_EMULATED_MODULE_H_

#include <tvm/ffi/extra/module.h>

#include <cstdint>

namespace k3tvm::emulate {

tvm::ffi::Module MakeModule(const tvm::ffi::Bytes& blob);

// The order of threads (block.h) in all launches from now on.
void SetSeed(uint64_t seed);

}  // namespace k3tvm::emulate

#endif  // K3TVM_NATIVE_EMULATED_MODULE_H_
