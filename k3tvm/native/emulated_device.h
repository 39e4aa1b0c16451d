// Lets TVM's runtime take the host's memory for a CUDA or Metal device.
#ifndef K3TVM_NATIVE_EMULATED_DEVICE_H_
#define K3TVM_NATIVE_EMULATED_DEVICE_H_

#include <string>

namespace k3tvm::emulate {

// Puts TVM's device interface of this kind ("cuda" or "metal") on emulation, for good.
void Install(const std::string& kind);

}  // namespace k3tvm::emulate

#endif  // K3TVM_NATIVE_EMULATED_DEVICE_H_
