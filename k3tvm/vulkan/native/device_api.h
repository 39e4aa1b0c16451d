// TVM's interface to devices, answered by the devices of this plug-in.
#ifndef K3TVM_VULKAN_DEVICE_API_H_
#define K3TVM_VULKAN_DEVICE_API_H_

#include <tvm/runtime/device_api.h>

#include <string>

namespace k3tvm::vulkan {

class VulkanDeviceAPI final : public tvm::runtime::DeviceAPI {
 public:
  static VulkanDeviceAPI* Global();

  void SetDevice(DLDevice device) final;
  void GetAttr(DLDevice device, tvm::runtime::DeviceAttrKind kind, tvm::ffi::Any* value) final;
  void GetTargetProperty(DLDevice device, const std::string& name, tvm::ffi::Any* value) final;
  void* AllocDataSpace(DLDevice device, size_t size, size_t alignment, DLDataType type) final;
  void FreeDataSpace(DLDevice device, void* address) final;
  void StreamSync(DLDevice device, TVMStreamHandle stream) final;
  // There is one stream per device.
  void SetStream(DLDevice device, TVMStreamHandle stream) final {}
  bool SupportsDevicePointerArithmeticsOnHost() final { return true; }

 protected:
  void CopyDataFromTo(const void* from, size_t from_offset, void* to, size_t to_offset, size_t size,
                      DLDevice from_device, DLDevice to_device, DLDataType type,
                      TVMStreamHandle stream) final;
};

}  // namespace k3tvm::vulkan

#endif  // K3TVM_VULKAN_DEVICE_API_H_
