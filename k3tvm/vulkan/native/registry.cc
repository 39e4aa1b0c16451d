// Registers the plug-in with TVM's runtime when the library is loaded.
#include <tvm/ffi/container/array.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/reflection/registry.h>

#include <utility>

#include "describe.h"
#include "device_api.h"
#include "errors.h"
#include "module.h"
#include "runtime.h"
#include "target_properties.h"
#include "validation.h"

#ifndef K3TVM_ABI
#error "K3TVM_ABI must be the versions of apache-tvm and apache-tvm-ffi that the headers belong to"
#endif

namespace k3tvm::vulkan {
namespace {

namespace ffi = tvm::ffi;

// Readable in the file, so that a library for other versions is recognised before it is loaded.
constexpr char kStamp[] = "k3tvm-abi[" K3TVM_ABI "]";

ffi::String Abi() {
  std::string stamp = kStamp;
  size_t begin = stamp.find('[') + 1;
  return stamp.substr(begin, stamp.size() - begin - 1);
}

ffi::String Devices() {
  if (!Runtime::Get().why_not().empty()) Throw(kNoDevice, Runtime::Get().why_not());
  Json json;
  json.Open('[');
  for (const Physical& device : Runtime::Get().devices()) WritePhysical(device, &json);
  return json.Close(']').text();
}

// The bytes [offset, offset + size) of a tensor in Vulkan memory.
char* BytesOf(const DLTensor* tensor, int64_t offset, int64_t size) {
  if (tensor->device.device_type != kDLVulkan) {
    Throw(kError, "a tensor that is not in a Vulkan device's memory");
  }
  auto whole = static_cast<int64_t>(ffi::GetDataSize(*tensor));
  if (offset < 0 || size < 0 || offset > whole || size > whole - offset) {
    Throw(kError, Text("bytes ", offset, " to ", offset + size, " of a tensor of ", whole));
  }
  return static_cast<char*>(tensor->data) + tensor->byte_offset + offset;
}

void Fill(DLTensor* tensor, int64_t offset, int64_t size, int64_t value) {
  char* bytes = BytesOf(tensor, offset, size);
  if (!size) return;
  Runtime::Get().At(tensor->device.device_id).Fill(bytes, size, static_cast<uint32_t>(value));
}

void Copy(DLTensor* to, int64_t to_offset, DLTensor* from, int64_t from_offset, int64_t size) {
  char* target = BytesOf(to, to_offset, size);
  const char* source = BytesOf(from, from_offset, size);
  if (to->device.device_id != from->device.device_id) {
    Throw(kError, "a copy on the device between two devices");
  }
  if (size) Runtime::Get().At(to->device.device_id).Copy(source, target, size);
}

ffi::Array<ffi::String> ValidationMessages() {
  ffi::Array<ffi::String> messages;
  for (const std::string& message : Validation::Messages()) messages.push_back(message);
  return messages;
}

Device& At(int64_t index) { return Runtime::Get().At(static_cast<int>(index)); }

// What TVM looks up by these names. A TVM that was built with its own Vulkan has them already; this
// library is only loaded into such a process when the user prefers it.
void RegisterBackend() {
  auto set = [](const char* name, ffi::Function function) {
    ffi::Function::SetGlobal(name, std::move(function), true);
  };
  set("device_api.vulkan", ffi::Function::FromPacked([](ffi::PackedArgs, ffi::Any* result) {
        tvm::runtime::DeviceAPI* api = VulkanDeviceAPI::Global();
        *result = static_cast<void*>(api);
      }));
  set("device_api.vulkan.get_target_property",
      ffi::Function::FromTyped([](DLDevice device, const ffi::String& name) {
        return TargetProperty(Runtime::Get().FactsOf(device.device_id), std::string(name));
      }));
  set("ffi.Module.load_from_bytes.vulkan", ffi::Function::FromTyped(MakeModule));
}

void RegisterFunctions() {
  tvm::ffi::reflection::GlobalDef()
      .def("k3tvm.vulkan.create_module", MakeModule)
      .def("k3tvm.vulkan.abi", Abi)
      .def("k3tvm.vulkan.devices", Devices)
      .def("k3tvm.vulkan.stats", [](int64_t id) { return ffi::String(At(id).Stats()); })
      .def("k3tvm.vulkan.set_memory_limit",
           [](int64_t id, int64_t bytes) { At(id).SetMemoryLimit(bytes); })
      .def("k3tvm.vulkan.profile_start", [](int64_t id) { At(id).ProfileStart(); })
      .def("k3tvm.vulkan.profile_stop",
           [](int64_t id) { return ffi::String(At(id).ProfileStop()); })
      .def("k3tvm.vulkan.fill", Fill)
      .def("k3tvm.vulkan.copy", Copy)
      .def("k3tvm.vulkan.validation_messages", ValidationMessages);
}

TVM_FFI_STATIC_INIT_BLOCK() {
  RegisterBackend();
  RegisterFunctions();
}

}  // namespace
}  // namespace k3tvm::vulkan
