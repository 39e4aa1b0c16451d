// Turns bytes into a module that a library is exported with.
#ifndef K3TVM_NATIVE_ARTIFACT_H_
#define K3TVM_NATIVE_ARTIFACT_H_

#include <tvm/ffi/extra/module.h>

namespace k3tvm {

tvm::ffi::Module MakeArtifact(const tvm::ffi::String& kind, const tvm::ffi::Bytes& data);

}  // namespace k3tvm

#endif  // K3TVM_NATIVE_ARTIFACT_H_
