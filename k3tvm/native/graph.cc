#include "graph.h"

#include <tvm/ffi/any.h>
#include <tvm/ffi/container/array.h>
#include <tvm/ffi/container/shape.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/object.h>

#include <map>
#include <memory>
#include <mutex>
#include <tuple>
#include <utility>
#include <vector>

namespace k3tvm::emulate {
namespace {

namespace ffi = tvm::ffi;

// What a capture leaves behind: launches in order, memory that they use, results of the function.
struct Graph {
  std::vector<std::function<void()>> launches;
  std::vector<std::function<void()>> releases;
  ffi::Any results;

  ~Graph() {
    for (const auto& release : releases) release();
  }
};

thread_local Graph* capturing = nullptr;

// Sets the graph of this thread for as long as the captured function runs.
class Scope {
 public:
  explicit Scope(Graph* graph) { capturing = graph; }
  ~Scope() { capturing = nullptr; }
};

// A function of a virtual machine, the number TVM gave the graph in it, and the symbolic sizes.
// The weak pointer tells a function that is gone from another one at the same address.
struct Key {
  const void* function;
  int64_t index;
  std::vector<int64_t> sizes;

  bool operator<(const Key& other) const {
    return std::tie(function, index, sizes) < std::tie(other.function, other.index, other.sizes);
  }
};

template <typename T>
class Cache {
 public:
  // The entry of a key whose function is alive; entries of functions that are gone are dropped.
  std::shared_ptr<T> Find(const Key& key) {
    std::lock_guard<std::mutex> guard(lock_);
    for (auto i = entries_.begin(); i != entries_.end();) {
      i = i->second.first.expired() ? entries_.erase(i) : std::next(i);
    }
    auto found = entries_.find(key);
    return found == entries_.end() ? nullptr : found->second.second;
  }

  void Put(const Key& key, const ffi::ObjectRef& function, std::shared_ptr<T> value) {
    std::lock_guard<std::mutex> guard(lock_);
    ffi::WeakObjectPtr<ffi::Object> alive(
        ffi::details::ObjectUnsafe::ObjectPtrFromObjectRef<ffi::Object>(function));
    entries_[key] = {alive, std::move(value)};
  }

 private:
  std::mutex lock_;
  std::map<Key, std::pair<ffi::WeakObjectPtr<ffi::Object>, std::shared_ptr<T>>> entries_;
};

// Never destroyed: what it holds belongs to a runtime that may be gone by then.
Cache<Graph>& Graphs() {
  static auto* cache = new Cache<Graph>;
  return *cache;
}

Cache<ffi::Any>& Allocations() {
  static auto* cache = new Cache<ffi::Any>;
  return *cache;
}

ffi::Any Invoke(ffi::AnyView machine, const ffi::ObjectRef& function,
                const ffi::Array<ffi::Any>& arguments) {
  static const ffi::Function invoke =
      ffi::Function::GetGlobalRequired("vm.builtin.invoke_closure");
  std::vector<ffi::AnyView> all{machine, function};
  for (const ffi::Any& argument : arguments) all.push_back(argument);
  ffi::Any result;
  invoke.CallPacked(ffi::PackedArgs(all.data(), static_cast<int>(all.size())), &result);
  return result;
}

// (machine, function, arguments, index[, sizes]): captures at the first call, replays afterwards.
void RunOrCapture(ffi::PackedArgs args, ffi::Any* result) {
  auto function = args[1].cast<ffi::ObjectRef>();
  Key key{function.get(), args[3].cast<int64_t>(), {}};
  if (args.size() == 5) {
    for (int64_t size : args[4].cast<ffi::Shape>()) key.sizes.push_back(size);
  }
  if (std::shared_ptr<Graph> graph = Graphs().Find(key)) {
    for (const auto& launch : graph->launches) launch();
    *result = graph->results;
    return;
  }
  auto arguments = args[2].cast<ffi::Array<ffi::Any>>();
  auto graph = std::make_shared<Graph>();
  // As TVM does for CUDA: a first time for the results, a second one for the graph.
  Invoke(args[0], function, arguments);
  {
    Scope scope(graph.get());
    graph->results = Invoke(args[0], function, arguments);
  }
  Graphs().Put(key, function, graph);
  *result = graph->results;
}

// (machine, function, index): the memory of the graphs, which stays where it is.
void CachedAllocation(ffi::PackedArgs args, ffi::Any* result) {
  auto function = args[1].cast<ffi::ObjectRef>();
  Key key{function.get(), args[2].cast<int64_t>(), {}};
  std::shared_ptr<ffi::Any> known = Allocations().Find(key);
  if (!known) {
    known = std::make_shared<ffi::Any>(Invoke(args[0], function, {}));
    Allocations().Put(key, function, known);
  }
  *result = *known;
}

}  // namespace

bool Capturing() { return capturing != nullptr; }

void Capture(std::function<void()> launch) { capturing->launches.push_back(std::move(launch)); }

bool KeepForGraph(std::function<void()> release) {
  if (!capturing) return false;
  capturing->releases.push_back(std::move(release));
  return true;
}

void NotInGraph(const char* what) {
  if (capturing) {
    TVM_FFI_THROW(RuntimeError) << "a graph is being captured, and the function asks for " << what;
  }
}

void RegisterGraph() {
  ffi::Function::SetGlobal("vm.builtin.cuda_graph.run_or_capture",
                           ffi::Function::FromPacked(RunOrCapture), true);
  ffi::Function::SetGlobal("vm.builtin.cuda_graph.get_cached_alloc",
                           ffi::Function::FromPacked(CachedAllocation), true);
}

}  // namespace k3tvm::emulate
