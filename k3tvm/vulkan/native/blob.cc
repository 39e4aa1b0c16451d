#include "blob.h"

#include <cstring>
#include <sstream>

#include "errors.h"

namespace k3tvm::vulkan {
namespace {

constexpr uint32_t kFormat = 1;
constexpr uint32_t kSpirvMagic = 0x07230203;

class Reader {
 public:
  explicit Reader(const std::string& blob) : blob_(blob) {}

  uint8_t Byte() { return static_cast<uint8_t>(*Take(1)); }

  uint32_t Number() {  // little endian, whatever this machine is
    uint32_t value = 0;
    const char* bytes = Take(4);
    for (int i = 3; i >= 0; --i) value = value << 8 | static_cast<uint8_t>(bytes[i]);
    return value;
  }

  std::string String() {
    uint32_t size = Number();
    return std::string(Take(size), size);
  }

  [[noreturn]] void Fail(const std::string& what) const {
    Throw(kError, Text("a compiled Vulkan module is damaged at byte ", at_, ": ", what,
                       "; compile it again"));
  }

  bool AtEnd() const { return at_ == blob_.size(); }

 private:
  const char* Take(size_t size) {
    if (size > blob_.size() - at_) Fail("it ends too soon");
    at_ += size;
    return blob_.data() + at_ - size;
  }

  const std::string& blob_;
  size_t at_ = 0;
};

std::vector<std::string> Words(const std::string& text) {
  std::istringstream in(text);
  std::vector<std::string> words;
  for (std::string word; in >> word;) words.push_back(word);
  return words;
}

std::vector<uint32_t> Spirv(const Reader& reader, const std::string& bytes) {
  std::vector<uint32_t> code(bytes.size() / 4);
  if (bytes.size() % 4) reader.Fail("SPIR-V that is not made of words");
  std::memcpy(code.data(), bytes.data(), bytes.size());
  if (code.empty() || code[0] != kSpirvMagic) reader.Fail("no SPIR-V");
  return code;
}

void MeasureArguments(const Reader& reader, KernelCode* kernel) {
  for (char kind : kernel->kinds) {
    uint32_t size = ArgumentSize(kind);
    if (!size) reader.Fail(Text("a parameter of unknown kind '", kind, "'"));
    kernel->argument_bytes = (kernel->argument_bytes + size - 1) / size * size + size;
  }
}

KernelCode ReadKernel(Reader* reader) {
  KernelCode kernel;
  kernel.name = reader->String();
  kernel.kinds = reader->String();
  MeasureArguments(*reader, &kernel);
  kernel.in_block = reader->Number() != 0;
  uint32_t tags = reader->Number();
  if (tags > 6) reader->Fail("too many launch parameters");
  kernel.tags.resize(tags);
  for (int& tag : kernel.tags) {
    tag = reader->Byte();
    if (tag > 5) reader->Fail("a launch parameter of unknown kind");
  }
  for (uint32_t& extent : kernel.local) extent = reader->Number();
  kernel.shared_bytes = reader->Number();
  kernel.features = Words(reader->String());
  kernel.glsl = reader->String();
  kernel.spirv = Spirv(*reader, reader->String());
  return kernel;
}

}  // namespace

uint32_t ArgumentSize(char kind) {
  if (std::strchr("pPlLd", kind)) return 8;
  if (std::strchr("biIf", kind)) return 4;
  if (std::strchr("wWh", kind)) return 2;
  return std::strchr("cC", kind) ? 1 : 0;
}

std::vector<KernelCode> ReadKernels(const std::string& blob) {
  Reader reader(blob);
  if (blob.compare(0, 4, "K3VK") != 0) reader.Fail("it does not begin with K3VK");
  reader.Number();
  uint32_t format = reader.Number();
  if (format != kFormat) {
    Throw(kError, Text("a compiled Vulkan module has format ", format, ", this plug-in reads ",
                       kFormat, "; compile it again"));
  }
  std::vector<KernelCode> kernels;
  for (uint32_t n = reader.Number(); n > 0; --n) kernels.push_back(ReadKernel(&reader));
  if (!reader.AtEnd()) reader.Fail("more bytes than kernels");
  return kernels;
}

}  // namespace k3tvm::vulkan
