// Runs the `logits` entry of a bundle without Python, compiler or shader tools: with TVM's runtime
// library, and the Vulkan plug-in if the bundle is for Vulkan.
//
//   run_bundle DESCRIPTION
//
// DESCRIPTION has a line for each thing; paths stand last and go to the end of the line:
//   plugin PATH | library PATH | result PATH      device TYPE INDEX (DLPack's numbers)
//   ids N ID...                                   tensors in the order of the entry's parameters:
//   seqs ROWS NUMBER...                           token ids, rows of sequences,
//   flags DIM...                                  zeros of int32,
//   state DTYPE DIMS DIM...                       zeros,
//   array DTYPE DIMS DIM... OFFSET PATH           bytes of a file
// Writes the logits as float32 to the result path, and to stdout the files mapped into the process.
#include <dlfcn.h>
#include <tvm/ffi/container/array.h>
#include <tvm/ffi/container/shape.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/extra/module.h>
#include <tvm/ffi/function.h>

#include <cstdio>
#include <fstream>
#include <map>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

namespace ffi = tvm::ffi;

constexpr int kPooled = 2;

ffi::Function Global(const char* name) { return ffi::Function::GetGlobalRequired(name); }

DLDataType TypeOf(const std::string& name) {
  static const std::map<std::string, DLDataType> types = {
      {"float32", {kDLFloat, 32, 1}}, {"int32", {kDLInt, 32, 1}}, {"uint32", {kDLUInt, 32, 1}},
      {"uint16", {kDLUInt, 16, 1}},   {"uint8", {kDLUInt, 8, 1}},
  };
  return types.at(name);
}

struct Runner {
  DLDevice device{kDLCPU, 0};
  std::string library, result;
  ffi::Tensor ids, seqs, flags;
  ffi::Array<ffi::Any> states, weights;

  // A tensor on the device with these bytes; zeros if there are none.
  ffi::Tensor Make(const std::vector<int64_t>& shape, DLDataType type,
                   std::vector<char> bytes = {}) {
    ffi::Any made =
        Global("runtime.TVMTensorAllocWithScope")(ffi::Shape(shape), type, device, nullptr);
    auto tensor = made.cast<ffi::Tensor>();
    bytes.resize(ffi::GetDataSize(tensor));
    auto size = static_cast<int64_t>(bytes.size());
    Global("runtime.TVMTensorCopyFromBytes")(tensor, static_cast<void*>(bytes.data()), size);
    return tensor;
  }

  void Run() {
    ffi::Module code = ffi::Module::LoadFromFile(library);
    auto vm = code->GetFunction("vm_load_executable").value()().cast<ffi::Module>();
    ffi::Function start = vm->GetFunction("vm_initialization").value();
    if (device.device_type == kDLCPU) {
      start(int{kDLCPU}, 0, kPooled);
    } else {
      start(static_cast<int>(device.device_type), device.device_id, kPooled, int{kDLCPU}, 0,
            kPooled);
    }
    ffi::Any out = vm->GetFunction("logits").value()(ids, seqs, flags, states, weights);
    auto logits = out.cast<ffi::Array<ffi::Any>>()[0].cast<ffi::Tensor>();
    std::vector<char> bytes(ffi::GetDataSize(logits));
    auto size = static_cast<int64_t>(bytes.size());
    Global("runtime.TVMTensorCopyToBytes")(logits, static_cast<void*>(bytes.data()), size);
    std::ofstream(result, std::ios::binary).write(bytes.data(), size);
  }
};

std::string Rest(std::istream& in) {
  std::string path;
  std::getline(in >> std::ws, path);
  return path;
}

template <typename T>
std::vector<T> Numbers(std::istream& in, size_t n) {
  std::vector<T> numbers(n);
  for (T& number : numbers) in >> number;
  return numbers;
}

std::vector<char> Bytes(const std::vector<int32_t>& numbers) {
  auto* begin = reinterpret_cast<const char*>(numbers.data());
  return std::vector<char>(begin, begin + 4 * numbers.size());
}

ffi::Tensor ReadArray(std::istream& in, Runner* runner, bool from_file) {
  std::string type;
  size_t dims = 0, offset = 0;
  in >> type >> dims;
  auto shape = Numbers<int64_t>(in, dims);
  if (!from_file) return runner->Make(shape, TypeOf(type));
  in >> offset;
  size_t size = TypeOf(type).bits / 8;
  for (int64_t extent : shape) size *= extent;
  std::vector<char> bytes(size);
  std::ifstream file(Rest(in), std::ios::binary);
  if (!file.seekg(offset).read(bytes.data(), size)) throw std::runtime_error("a short file");
  return runner->Make(shape, TypeOf(type), std::move(bytes));
}

void ReadLine(const std::string& what, std::istream& in, Runner* runner) {
  const DLDataType integer{kDLInt, 32, 1};
  if (what == "plugin") {
    if (!dlopen(Rest(in).c_str(), RTLD_NOW)) throw std::runtime_error(dlerror());
  } else if (what == "library") {
    runner->library = Rest(in);
  } else if (what == "result") {
    runner->result = Rest(in);
  } else if (what == "device") {
    auto numbers = Numbers<int>(in, 2);
    runner->device = {static_cast<DLDeviceType>(numbers[0]), numbers[1]};
  } else if (what == "ids" || what == "seqs") {
    int64_t n = 0;
    in >> n;
    auto values = Numbers<int32_t>(in, what == "ids" ? n : 4 * n);
    if (what == "ids") runner->ids = runner->Make({n}, integer, Bytes(values));
    if (what == "seqs") runner->seqs = runner->Make({n, 4}, integer, Bytes(values));
  } else if (what == "flags") {
    runner->flags = runner->Make(Numbers<int64_t>(in, 2), integer);
  } else if (what == "state") {
    runner->states.push_back(ReadArray(in, runner, false));
  } else if (what == "array") {
    runner->weights.push_back(ReadArray(in, runner, true));
  }
}

}  // namespace

int main(int, char** argv) try {
  Runner runner;
  std::ifstream description(argv[1]);
  for (std::string line, what; std::getline(description, line);) {
    std::istringstream in(line);
    if (in >> what) ReadLine(what, in, &runner);
  }
  runner.Run();
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    if (line.find('/') != std::string::npos) std::puts(line.substr(line.find('/')).c_str());
  }
  return 0;
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
