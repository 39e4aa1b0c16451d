// Turns the launches of a captured function into a list that is replayed: what a CUDA graph is to an
// emulated device. As on the real one, nothing runs while a graph is captured, and nothing but
// launches may be asked for.
#ifndef K3TVM_NATIVE_GRAPH_H_
#define K3TVM_NATIVE_GRAPH_H_

#include <functional>

namespace k3tvm::emulate {

// Whether this thread captures a graph. Launches then go to `Capture`, and do not run.
bool Capturing();

// Adds a launch to the graph; it is called in every replay.
void Capture(std::function<void()> launch);

// Keeps memory that the captured function gave back until the graph is gone, since replays use it
// again: `release` is called then. False when there is no capture, and nothing was kept.
bool KeepForGraph(std::function<void()> release);

// Raises an error during a capture: `what` is neither a launch nor free of effects, as in "a copy
// to the host".
void NotInGraph(const char* what);

// Puts TVM's names for CUDA graphs on this implementation.
void RegisterGraph();

}  // namespace k3tvm::emulate

#endif  // K3TVM_NATIVE_GRAPH_H_
