#include "artifact.h"

#include <string>
#include <utility>

namespace k3tvm {
namespace {

namespace ffi = tvm::ffi;

// A module that only carries the bytes of a device's code into a library: the runtime of the kind
// loads them where the device is.
class Artifact : public ffi::ModuleObj {
 public:
  Artifact(std::string kind, ffi::Bytes data) : kind_(std::move(kind)), data_(std::move(data)) {}

  const char* kind() const final { return kind_.c_str(); }
  int GetPropertyMask() const final { return ffi::Module::kBinarySerializable; }
  ffi::Bytes SaveToBytes() const final { return data_; }
  ffi::Optional<ffi::Function> GetFunction(const ffi::String&) final { return std::nullopt; }

 private:
  std::string kind_;
  ffi::Bytes data_;
};

}  // namespace

ffi::Module MakeArtifact(const ffi::String& kind, const ffi::Bytes& data) {
  return ffi::Module(ffi::make_object<Artifact>(std::string(kind), data));
}

}  // namespace k3tvm
