// Raises typed errors, which cross into Python or C++ callers; Python maps the kinds to exceptions
// (k3tvm/native/__init__.py).
#ifndef K3TVM_NATIVE_ERRORS_H_
#define K3TVM_NATIVE_ERRORS_H_

#include <tvm/ffi/error.h>

#include <string>

#include "text.h"

namespace k3tvm {

inline constexpr char kEmulationError[] = "EmulationError";

[[noreturn]] inline void Throw(const std::string& message) {
  throw tvm::ffi::Error(kEmulationError, message,
                        TVMFFIBacktrace(__FILE__, __LINE__, __func__, 0));
}

}  // namespace k3tvm

#endif  // K3TVM_NATIVE_ERRORS_H_
