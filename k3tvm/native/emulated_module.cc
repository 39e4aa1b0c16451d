#include "emulated_module.h"

#include <dlfcn.h>
#include <sys/mman.h>
#include <tvm/ffi/function.h>
#include <tvm/runtime/c_backend_api.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "block.h"
#include "device_memory.h"
#include "errors.h"
#include "graph.h"

namespace k3tvm::emulate {
namespace {

namespace ffi = tvm::ffi;

constexpr uint32_t kFormat = 3;
std::atomic<Seed> the_seed{0};

class Reader {
 public:
  explicit Reader(const ffi::Bytes& blob) : at_(blob.data()), end_(blob.data() + blob.size()) {}

  const char* Take(size_t size) {
    if (size > static_cast<size_t>(end_ - at_)) {
      Throw("a module of emulated kernels is cut short; compile it again");
    }
    at_ += size;
    return at_ - size;
  }

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

 private:
  const char *at_, *end_;
};

// A shared library out of memory: no file is left behind.
class Library {
 public:
  explicit Library(const std::string& elf) {
    ShareSymbols();
    int file = memfd_create("k3tvm-emulated", MFD_CLOEXEC);
    if (file < 0) Throw("emulated kernels cannot be loaded: there is no memfd_create");
    for (size_t at = 0; at < elf.size();) {
      ssize_t written = write(file, elf.data() + at, elf.size() - at);
      if (written <= 0) Throw("emulated kernels cannot be loaded: no memory for them");
      at += static_cast<size_t>(written);
    }
    handle_ = dlopen(PathOf(file).c_str(), RTLD_NOW | RTLD_LOCAL);
    std::string why = handle_ ? "" : dlerror();
    close(file);
    if (!handle_) Throw(Text("emulated kernels cannot be loaded: ", why));
  }

  ~Library() { dlclose(handle_); }
  Library(const Library&) = delete;
  Library& operator=(const Library&) = delete;

  k3emu::Entry Find(const std::string& kernel) const {
    void* entry = dlsym(handle_, ("k3_entry_" + kernel).c_str());
    if (!entry) Throw(Text("kernel ", kernel, " is not in its library; compile it again"));
    return reinterpret_cast<k3emu::Entry>(entry);
  }

  // Whether the kernels tell what memory they touch.
  bool Checked() const { return dlsym(handle_, "k3emu_checked") != nullptr; }

 private:
  // Lets kernels find `k3emu_self` in this library, whoever has loaded it.
  static void ShareSymbols() {
    Dl_info mine;
    if (!dladdr(reinterpret_cast<void*>(&ShareSymbols), &mine) ||
        !dlopen(mine.dli_fname, RTLD_NOW | RTLD_NOLOAD | RTLD_GLOBAL)) {
      Throw("emulated kernels cannot be loaded: the native library is not found");
    }
  }

  // The dynamic linker takes a path that it has seen for a library that it has, and numbers of files
  // are used again: so each path is spelled in a way of its own.
  static std::string PathOf(int file) {
    static std::atomic<unsigned> count{0};
    std::string path = "/proc/self/fd";
    for (unsigned bits = ++count; bits; bits >>= 1) path += bits & 1 ? "/." : "/";
    return Text(path, "/", file);
  }

  void* handle_;
};

// Blocks of one launch, dealt out to the workers of TVM's thread pool.
struct Job {
  const Launch* launch;
  std::atomic<uint64_t> next{0};
  std::atomic<bool> failed{false};
  std::mutex lock;
  std::string error;

  void Work() {
    // A pointer: all that belongs to a thread of the CPU must fit into what the linker has left.
    static thread_local auto runner = std::make_unique<BlockRunner>();
    uint64_t count = launch->blocks();
    for (uint64_t i; !failed && (i = next++) < count;) {
      uint64_t block = launch->seed % 2 ? count - 1 - i : i;
      std::string what = runner->Run(*launch, block);
      if (what.empty()) continue;
      std::lock_guard<std::mutex> guard(lock);
      if (!failed) error = what;
      failed = true;
    }
  }
};

// Checked launches are alone: what they touched is compared.
std::string RunChecked(Launch launch) {
  static std::mutex lock;
  static auto* races = new Races;
  std::lock_guard<std::mutex> guard(lock);
  races->Clear();
  launch.races = races;
  Job job;
  job.launch = &launch;
  job.Work();
  return job.error;
}

std::string RunAll(const Launch& launch) {
  Job job;
  job.launch = &launch;
  if (launch.blocks() < 4) {
    job.Work();  // waking workers costs more
  } else {
    auto work = [](int, TVMParallelGroupEnv*, void* data) {
      static_cast<Job*>(data)->Work();
      return 0;
    };
    TVMBackendParallelLaunch(work, &job, 0);
  }
  return job.error;
}

// The values of one call: a word each, in the order of the parameters.
class Arguments {
 public:
  void Add(char kind, ffi::AnyView value) {
    uint64_t word = 0;
    if (kind == 'p' || kind == 'P') {
      auto pointer = value.cast<void*>();
      std::memcpy(&word, &pointer, sizeof(pointer));
    } else if (kind == 'f') {
      Store(static_cast<float>(value.cast<double>()), &word);
    } else if (kind == 'd') {
      Store(value.cast<double>(), &word);
    } else {
      Store(value.cast<int64_t>(), &word);  // little endian: narrower ones come first
    }
    bool pointer = kind == 'p' || kind == 'P';
    (pointer ? pointers_ : scalars_).push_back(word);
    order_.push_back(pointer);
  }

  // CUDA: a pointer to each. Metal: pointers to each address, then one to the scalars together.
  std::vector<void*> For(bool metal) {
    std::vector<void*> all;
    size_t pointer = 0, scalar = 0;
    for (bool is_pointer : order_) {
      if (is_pointer) {
        all.push_back(&pointers_[pointer++]);
      } else if (!metal) {
        all.push_back(&scalars_[scalar++]);
      }
    }
    if (metal && !scalars_.empty()) all.push_back(scalars_.data());
    return all;
  }

 private:
  template <typename T>
  static void Store(T value, uint64_t* word) {
    std::memcpy(word, &value, sizeof(T));
  }

  std::vector<uint64_t> pointers_, scalars_;
  std::vector<bool> order_;
};

struct Kernel {
  std::string name, kinds;
  std::vector<int> tags;  // 0 ... 2: blocks by axis; 3 ... 5: threads by axis
  k3emu::Dim threads;
  k3emu::Entry entry;
  bool metal, checked;
  std::shared_ptr<Library> library;

  void Call(ffi::PackedArgs args) const {
    if (static_cast<size_t>(args.size()) != kinds.size() + tags.size()) {
      Throw(Text("kernel ", name, " takes ", kinds.size() + tags.size(), " arguments, got ",
                 args.size()));
    }
    Arguments values;
    for (size_t i = 0; i < kinds.size(); ++i) values.Add(kinds[i], args[static_cast<int>(i)]);
    unsigned sizes[6] = {1, 1, 1, threads.x, threads.y, threads.z};
    for (size_t i = 0; i < tags.size(); ++i) {
      sizes[tags[i]] = static_cast<unsigned>(args[static_cast<int>(kinds.size() + i)].cast<int64_t>());
    }
    k3emu::Dim grid{sizes[0], sizes[1], sizes[2]}, block{sizes[3], sizes[4], sizes[5]};
    if (!Capturing()) return Run(values, grid, block);
    Capture([kernel = *this, values, grid, block] { kernel.Run(values, grid, block); });
  }

  void Run(Arguments values, k3emu::Dim grid, k3emu::Dim block) const {
    std::vector<void*> arguments = values.For(metal);
    Launch launch{entry, arguments.data(), grid, block, the_seed, nullptr};
    DeviceMemory::Global().CountLaunch();
    if (!launch.blocks() || !launch.threads()) return;
    std::string error = checked ? RunChecked(launch) : RunAll(launch);
    if (error.empty()) error = DeviceMemory::Global().CheckGuards();
    if (!error.empty()) Throw(Text("kernel ", name, ": ", error));
  }
};

class EmulatedModule : public ffi::ModuleObj {
 public:
  explicit EmulatedModule(const ffi::Bytes& blob) : blob_(blob) {
    Reader reader(blob);
    if (std::memcmp(reader.Take(4), "K3EM", 4) != 0 || reader.Number() != kFormat) {
      Throw("is not a module of emulated kernels of this version; compile it again");
    }
    std::string language = reader.String();
    kind_ = language + "_emulated";
    auto library = std::make_shared<Library>(reader.String());
    for (uint32_t n = reader.Number(); n > 0; --n) {
      Kernel kernel;
      kernel.name = reader.String();
      kernel.kinds = reader.String();
      kernel.tags.resize(reader.Number());
      for (int& tag : kernel.tags) tag = static_cast<uint8_t>(*reader.Take(1)) % 6;
      kernel.threads = {reader.Number(), reader.Number(), reader.Number()};
      kernel.entry = library->Find(kernel.name);
      kernel.metal = language == "metal";
      kernel.checked = library->Checked();
      kernel.library = library;
      std::string name = kernel.name;
      kernels_[name] = std::make_shared<Kernel>(std::move(kernel));
    }
  }

  const char* kind() const final { return kind_.c_str(); }
  int GetPropertyMask() const final {
    return ffi::Module::kBinarySerializable | ffi::Module::kRunnable;
  }
  ffi::Bytes SaveToBytes() const final { return blob_; }

  ffi::Optional<ffi::Function> GetFunction(const ffi::String& name) final {
    auto found = kernels_.find(name);
    if (found == kernels_.end()) return std::nullopt;
    return ffi::Function::FromPacked(
        [kernel = found->second](ffi::PackedArgs args, ffi::Any*) { kernel->Call(args); });
  }

 private:
  ffi::Bytes blob_;
  std::string kind_;
  std::unordered_map<std::string, std::shared_ptr<Kernel>> kernels_;
};

}  // namespace

ffi::Module MakeModule(const ffi::Bytes& blob) {
  return ffi::Module(ffi::make_object<EmulatedModule>(blob));
}

void SetSeed(uint64_t seed) { the_seed = seed; }

}  // namespace k3tvm::emulate
