// Turns values into one string.
#ifndef K3TVM_NATIVE_TEXT_H_
#define K3TVM_NATIVE_TEXT_H_

#include <sstream>
#include <string>

namespace k3tvm {

// Text("kernel ", name, " needs ", n, " bytes") -> one string.
template <typename... Parts>
std::string Text(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return out.str();
}

}  // namespace k3tvm

#endif  // K3TVM_NATIVE_TEXT_H_
