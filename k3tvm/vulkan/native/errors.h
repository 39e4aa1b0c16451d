// Turns Vulkan results into typed errors: the kind says what class of fault it is, the message has
// the numbers. Python maps the kinds to exceptions (k3tvm/vulkan/plugin.py).
#ifndef K3TVM_VULKAN_ERRORS_H_
#define K3TVM_VULKAN_ERRORS_H_

#include <sstream>
#include <string>

#include "vulkan_headers.h"

namespace k3tvm::vulkan {

inline constexpr char kError[] = "VulkanError";              // a call failed, or was wrong
inline constexpr char kOutOfMemory[] = "VulkanOutOfMemory";  // asked, in use, available
inline constexpr char kDeviceLost[] = "VulkanDeviceLost";    // for good: nothing works any more
inline constexpr char kNoDevice[] = "VulkanNoDevice";        // no such device, or not a usable one
inline constexpr char kLimit[] = "VulkanLimit";              // a kernel needs more than there is

// Raises the error as an FFI error, which crosses into Python or C++ callers.
[[noreturn]] void Throw(const char* kind, const std::string& message);

// "VK_ERROR_DEVICE_LOST" and so on; a number for results that this plug-in does not expect.
std::string ResultName(VkResult result);

// Raises unless the call succeeded; `what` is the name of the call.
void Check(VkResult result, const char* what);

// Text("kernel ", name, " needs ", n, " bytes") -> one string.
template <typename... Parts>
std::string Text(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return out.str();
}

// Bytes as lower-case hexadecimal digits.
template <size_t n>
std::string Hex(const uint8_t (&bytes)[n]) {
  std::string out;
  for (uint8_t byte : bytes) {
    out += "0123456789abcdef"[byte >> 4];
    out += "0123456789abcdef"[byte & 15];
  }
  return out;
}

}  // namespace k3tvm::vulkan

#endif  // K3TVM_VULKAN_ERRORS_H_
