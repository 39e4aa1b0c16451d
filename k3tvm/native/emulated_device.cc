#include "emulated_device.h"

#include <tvm/ffi/function.h>
#include <tvm/runtime/device_api.h>

#include <cstring>

#include "device_memory.h"
#include "errors.h"
#include "graph.h"

namespace k3tvm::emulate {
namespace {

namespace ffi = tvm::ffi;

class EmulatedDevice : public tvm::runtime::DeviceAPI {
 public:
  explicit EmulatedDevice(bool cuda) : cuda_(cuda) {}

  void SetDevice(DLDevice) final {}

  // The oldest hardware that the kind is compiled for.
  void GetAttr(DLDevice device, tvm::runtime::DeviceAttrKind kind, ffi::Any* value) final {
    switch (kind) {
      case tvm::runtime::kExist:
        *value = static_cast<int>(device.device_id == 0);
        break;
      case tvm::runtime::kMaxThreadsPerBlock:
        *value = int64_t{1024};
        break;
      case tvm::runtime::kWarpSize:
        *value = int64_t{32};
        break;
      case tvm::runtime::kMaxSharedMemoryPerBlock:
        *value = int64_t{cuda_ ? 49152 : 32768};
        break;
      case tvm::runtime::kComputeVersion:
        *value = ffi::String(cuda_ ? "8.0" : "");
        break;
      case tvm::runtime::kDeviceName:
        *value = ffi::String(cuda_ ? "CUDA emulated on the CPU" : "Metal emulated on the CPU");
        break;
      case tvm::runtime::kMultiProcessorCount:
        *value = int64_t{1};
        break;
      case tvm::runtime::kTotalGlobalMemory:
      case tvm::runtime::kAvailableGlobalMemory:
        *value = static_cast<int64_t>(AvailableBytes());
        break;
      default:
        break;
    }
  }

  void* AllocDataSpace(DLDevice, size_t bytes, size_t, DLDataType) final {
    NotInGraph("memory");
    return DeviceMemory::Global().Allocate(bytes);
  }

  void FreeDataSpace(DLDevice, void* address) final { DeviceMemory::Global().Free(address); }

  // Memory between the launches of one operator: replays of a graph use it again.
  void* AllocWorkspace(DLDevice, size_t bytes, DLDataType) final {
    return DeviceMemory::Global().Allocate(bytes);
  }

  void FreeWorkspace(DLDevice, void* address) final {
    auto release = [address] { DeviceMemory::Global().Free(address); };
    if (!KeepForGraph(release)) release();
  }

  void StreamSync(DLDevice, TVMStreamHandle) final { NotInGraph("a wait for the device"); }
  void SetStream(DLDevice, TVMStreamHandle) final {}
  bool SupportsDevicePointerArithmeticsOnHost() final { return true; }

 protected:
  void CopyDataFromTo(const void* from, size_t from_offset, void* to, size_t to_offset, size_t size,
                      DLDevice, DLDevice, DLDataType, TVMStreamHandle) final {
    NotInGraph("a copy");
    std::memcpy(static_cast<char*>(to) + to_offset,
                static_cast<const char*>(from) + from_offset, size);
  }

 private:
  bool cuda_;
};

}  // namespace

void Install(const std::string& kind) {
  bool cuda = kind == "cuda";
  if (!cuda && kind != "metal") Throw(Text("there is no emulation of ", kind));
  auto* api = new EmulatedDevice(cuda);  // never destroyed: tensors may be freed later
  ffi::Function::SetGlobal("device_api." + kind,
                           ffi::Function::FromPacked([api](ffi::PackedArgs, ffi::Any* result) {
                             *result = static_cast<void*>(
                                 static_cast<tvm::runtime::DeviceAPI*>(api));
                           }),
                           true);
  if (cuda) RegisterGraph();
}

}  // namespace k3tvm::emulate
