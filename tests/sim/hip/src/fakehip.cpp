/* A libamdhip64 without a device: graphs of nodes on host memory, with faults to order.
 *
 * Kernels are callbacks that a test registers. Everything runs when it is launched, on the calling
 * thread, and a wait for a value blocks that thread. What real runtimes do wrong is switched on by fakehip_set (see `settings`). Graph and
 * node memory is poisoned when it is destroyed and given back much later, so that a use after that
 * is a wrong number instead of a crash.
 *
 * Compile with -DFAKEHIP_RELEASE_52 for the symbols of release 5.2, and with -DFAKEHIP_ANCIENT for
 * a runtime that lacks what devgraph cannot do without.
 */
#include "hip.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <vector>

namespace {

typedef void (*Body)(void** arguments);

struct Kernel {
  Body body;
  std::vector<size_t> sizes;
};

enum { kKernel = hipGraphNodeTypeKernel, kMemcpy = hipGraphNodeTypeMemcpy,
       kMemset = hipGraphNodeTypeMemset, kHost = hipGraphNodeTypeHost,
       kEmpty = hipGraphNodeTypeEmpty, kWait = 100, kWrite = 101 };

struct Node {
  int type = kEmpty;
  std::vector<Node*> after;
  Node* original = nullptr;
  hipKernelNodeParams kernel = {};
  std::vector<std::vector<unsigned char>> bytes; /* a kernel's argument values */
  std::vector<void*> pointers;
  hipMemsetParams fill = {};
  void *to = nullptr, *from = nullptr;
  size_t size = 0;
  int direction = hipMemcpyDeviceToDevice;
  uint32_t value = 0; /* of a wait or a write at `to` */
  unsigned compare = hipStreamWaitValueEq;

  void own_arguments(void** from_values) {
    auto* known = static_cast<Kernel*>(kernel.func);
    bytes.clear();
    pointers.clear();
    for (size_t i = 0; i < known->sizes.size(); i++) {
      auto* value = static_cast<unsigned char*>(from_values[i]);
      bytes.emplace_back(value, value + known->sizes[i]);
    }
    for (auto& value : bytes) pointers.push_back(value.data());
    kernel.kernelParams = pointers.data();
  }

  void poison() {
    for (auto& value : bytes) std::fill(value.begin(), value.end(), 0xDD);
    to = from = fill.dst = nullptr;
  }
};

struct Graph {
  std::vector<Node*> nodes;
  bool destroyed = false;

  ~Graph() {
    for (auto* node : nodes) delete node;
  }
};

struct Exec : Graph {
  std::map<Node*, Node*> by_node;
};

struct Stream {
  int status = hipStreamCaptureStatusNone;
  unsigned long long id = 0;
  Graph* graph = nullptr;
  Stream* origin = nullptr;
  std::vector<Node*> last;
  bool stuck = false; /* an end of its capture failed and left it active */
};

constexpr size_t kGraves = 300;

std::recursive_mutex lock;
std::map<std::string, long long> settings = {
    {"version", 70226015},
    {"stale", 0},            /* how many next parameter writes answer success and do nothing */
    {"refuse_write_at", 0},  /* the how-manieth next parameter write fails */
    {"refuse_instantiate", 0},
    {"fail_call_in", 0},     /* the how-manieth next call fails */
    {"borrow", 0},           /* SetParams keeps the caller's pointers, as 6.3.1 did */
    {"quiet", 1},            /* unsafe calls in a capture raise nothing, as before 7.14 */
    {"reports_copies", 1},   /* parameters of a captured copy are filled in */
    {"captures_values", 1},  /* 0: waits and writes of values run at once, captured or not */
    {"shuffle", 0},          /* hipGraphGetNodes lists nodes backwards */
    /* counters */
    {"writes", 0}, {"instantiated", 0}, {"destroyed_execs", 0}, {"live_graphs", 0},
    {"live_execs", 0}, {"leaked_slots", 0}, {"second_ends", 0}, {"second_begins", 0}, {"launches", 0},
    {"attribute_copies", 0},
};
std::set<Stream*> streams;
unsigned long long captures = 0;
int last_error = 0;

int fail(int error) { return last_error = error; }
bool fault(const char* name) { return settings[name] != 0; }

/* Begins every call of HIP whose turn to fail comes by `fail_call_in`. */
#define REFUSABLE \
  if (settings["fail_call_in"] > 0 && --settings["fail_call_in"] == 0) \
    return fail(hipErrorOutOfMemory)

bool once(const char* name) {
  auto& left = settings[name];
  if (left > 0) return left--, true;
  return left < 0;
}

bool holds(Node* node) {
  auto word = reinterpret_cast<std::atomic<uint32_t>*>(node->to)->load();
  if (node->compare == hipStreamWaitValueEq) return word == node->value;
  return int32_t(word - node->value) >= 0;
}

void run(Node* node) {
  if (node->type == kWait)
    while (!holds(node)) usleep(50);
  if (node->type == kWrite)
    reinterpret_cast<std::atomic<uint32_t>*>(node->to)->store(node->value);
  if (node->type == kKernel) {
    static_cast<Kernel*>(node->kernel.func)->body(node->kernel.kernelParams);
  } else if (node->type == kMemcpy) {
    if (node->to) std::memmove(node->to, node->from, node->size);
  } else if (node->type == kMemset && node->fill.dst) {
    std::memset(node->fill.dst, int(node->fill.value), node->fill.width * node->fill.elementSize);
  }
}

Node* copied(Node* node) {
  auto* made = new Node(*node);
  made->original = node;
  if (node->type == kKernel) {
    if (fault("borrow") && node->kernel.kernelParams != node->pointers.data()) {
      made->kernel.kernelParams = node->kernel.kernelParams;
    } else {
      made->own_arguments(node->kernel.kernelParams);
    }
  }
  return made;
}

/* Work of a stream: recorded while it captures, run at once otherwise. */
int enqueue(Stream* stream, Node* node) {
  std::unique_lock<std::recursive_mutex> guard(lock);
  bool value = node->type == kWait || node->type == kWrite;
  if (!stream || stream->status == hipStreamCaptureStatusNone ||
      (value && !fault("captures_values"))) {
    if (value) guard.unlock();
    run(node);
    delete node;
    return hipSuccess;
  }
  if (stream->status == hipStreamCaptureStatusInvalidated) {
    delete node;
    return fail(hipErrorStreamCaptureInvalidated);
  }
  node->after = stream->last;
  stream->graph->nodes.push_back(node);
  stream->last = {node};
  return hipSuccess;
}

void leave(Stream* origin) {
  for (auto* stream : streams) {
    if (stream->origin != origin) continue;
    stream->status = hipStreamCaptureStatusNone;
    stream->graph = nullptr;
    stream->origin = nullptr;
    stream->last.clear();
  }
}

/* A graph or an executable ends: its memory is kept while the next kGraves are destroyed. */
template <class Ended>
void bury(Ended* ended) {
  static std::deque<Ended*> graves;
  ended->destroyed = true;
  for (auto* node : ended->nodes) node->poison();
  graves.push_back(ended);
  if (graves.size() <= kGraves) return;
  delete graves.front();
  graves.pop_front();
}

void destroy(Graph* graph) {
  if (graph->destroyed) return;
  settings["live_graphs"]--;
  bury(graph);
}

int write_kernel(Node* node, const hipKernelNodeParams* params) {
  auto** values = params->kernelParams;
  node->kernel = *params;
  if (fault("borrow")) return hipSuccess;
  node->own_arguments(values);
  return hipSuccess;
}

int write_copy(Node* node, void* to, const void* from, size_t size, int kind) {
  node->to = to;
  node->from = const_cast<void*>(from);
  node->size = size;
  node->direction = kind;
  return hipSuccess;
}

/* What writing a node of an executable does, faults included. */
template <class Write>
int update(Exec* exec, Node* node, Write write) {
  std::lock_guard<std::recursive_mutex> guard(lock);
  auto found = exec->by_node.find(node);
  if (exec->destroyed || found == exec->by_node.end()) return fail(hipErrorInvalidValue);
  settings["writes"]++;
  settings["leaked_slots"]++;
  if (settings["refuse_write_at"] > 0 && --settings["refuse_write_at"] == 0)
    return fail(hipErrorOutOfMemory);
  if (once("stale")) return hipSuccess;
  write(found->second);
  return hipSuccess;
}

}  // namespace

/* What a test does to the fake. */

HIP_EXPORT void fakehip_set(const char* name, long long value) { settings[name] = value; }
HIP_EXPORT long long fakehip_get(const char* name) {
  auto found = settings.find(name);
  return found == settings.end() ? -1 : found->second;
}

HIP_EXPORT void* fakehip_kernel(Body body, const size_t* sizes, size_t count) {
  return new Kernel{body, std::vector<size_t>(sizes, sizes + count)};
}

HIP_EXPORT void* fakehip_stream() {
  auto* made = new Stream;
  streams.insert(made);
  return made;
}

HIP_EXPORT void fakehip_forget_stream(Stream* stream) {
  streams.erase(stream);
  delete stream;
}

HIP_EXPORT int fakehip_launch(Stream* stream, void* kernel, void** values, unsigned grid) {
  auto* node = new Node;
  node->type = kKernel;
  node->kernel.func = kernel;
  node->kernel.gridDim = {grid, 1, 1};
  node->kernel.blockDim = {64, 1, 1};
  node->own_arguments(values);
  return enqueue(stream, node);
}

HIP_EXPORT int fakehip_host_function(Stream* stream) {
  auto* node = new Node;
  node->type = kHost;
  return enqueue(stream, node);
}

/* `waiter` waits for `other` through an event: it joins the capture that `other` is part of. */
HIP_EXPORT int fakehip_wait(Stream* waiter, Stream* other) {
  REFUSABLE;
  std::lock_guard<std::recursive_mutex> guard(lock);
  if (!other || other->status == hipStreamCaptureStatusNone || !waiter) return hipSuccess;
  if (waiter->status == hipStreamCaptureStatusNone) {
    waiter->status = other->status;
    waiter->graph = other->graph;
    waiter->id = other->id;
    waiter->origin = other->origin;
  }
  for (auto* node : other->last)
    if (std::find(waiter->last.begin(), waiter->last.end(), node) == waiter->last.end())
      waiter->last.push_back(node);
  return hipSuccess;
}

/* A call that a capture does not allow, such as a synchronization. */
HIP_EXPORT int fakehip_unsafe(Stream* stream) {
  std::lock_guard<std::recursive_mutex> guard(lock);
  if (!stream || stream->status == hipStreamCaptureStatusNone || fault("quiet")) return hipSuccess;
  for (auto* other : streams)
    if (other->origin == stream->origin) other->status = hipStreamCaptureStatusInvalidated;
  return fail(hipErrorStreamCaptureUnsupported);
}

/* HIP itself. */

HIP_EXPORT int hipRuntimeGetVersion(int* version) {
  *version = int(settings["version"]);
  return hipSuccess;
}

HIP_EXPORT const char* hipGetErrorName(int error) {
  switch (error) {
    case hipSuccess: return "hipSuccess";
    case hipErrorInvalidValue: return "hipErrorInvalidValue";
    case hipErrorOutOfMemory: return "hipErrorOutOfMemory";
    case hipErrorIllegalState: return "hipErrorIllegalState";
    case hipErrorStreamCaptureUnsupported: return "hipErrorStreamCaptureUnsupported";
    case hipErrorStreamCaptureInvalidated: return "hipErrorStreamCaptureInvalidated";
    case hipErrorStreamCaptureUnjoined: return "hipErrorStreamCaptureUnjoined";
    default: return "hipErrorUnknown";
  }
}

HIP_EXPORT const char* hipGetErrorString(int error) { return hipGetErrorName(error); }

HIP_EXPORT int hipGetLastError() {
  int error = last_error;
  last_error = hipSuccess;
  return error;
}

HIP_EXPORT int hipStreamBeginCapture(Stream* stream, int) {
  REFUSABLE;
  std::lock_guard<std::recursive_mutex> guard(lock);
  if (stream && stream->stuck) settings["second_begins"]++; /* as bad as a second end */
  if (!stream || stream->status == hipStreamCaptureStatusActive) return fail(hipErrorIllegalState);
  stream->status = hipStreamCaptureStatusActive;
  stream->id = ++captures;
  stream->graph = new Graph;
  stream->origin = stream;
  stream->last.clear();
  settings["live_graphs"]++;
  return hipSuccess;
}

HIP_EXPORT int hipStreamEndCapture(Stream* stream, Graph** graph) {
  REFUSABLE;
  std::lock_guard<std::recursive_mutex> guard(lock);
  *graph = nullptr;
  if (!stream || stream->status == hipStreamCaptureStatusNone) return fail(hipErrorIllegalState);
  if (stream->stuck) {
    settings["second_ends"]++; /* the real one crashes the process here */
    return fail(hipErrorIllegalState);
  }
  if (stream->status == hipStreamCaptureStatusInvalidated) {
    destroy(stream->graph);
    leave(stream);
    stream->status = hipStreamCaptureStatusInvalidated; /* seen so on 7.2; a new begin works */
    return fail(hipErrorStreamCaptureInvalidated);
  }
  std::set<Node*> ends(stream->graph->nodes.begin(), stream->graph->nodes.end());
  for (auto* node : stream->graph->nodes)
    for (auto* before : node->after) ends.erase(before);
  for (auto* node : stream->last) ends.erase(node);
  if (!ends.empty()) {
    stream->stuck = true; /* the stream stays active, as on 7.2 */
    return fail(hipErrorStreamCaptureUnjoined);
  }
  *graph = stream->graph;
  leave(stream);
  return hipSuccess;
}

HIP_EXPORT int hipStreamIsCapturing(Stream* stream, int* status) {
  REFUSABLE;
  *status = stream ? stream->status : hipStreamCaptureStatusNone;
  return hipSuccess;
}

#ifndef FAKEHIP_ANCIENT
HIP_EXPORT int hipStreamGetCaptureInfo_v2(Stream* stream, int* status, unsigned long long* id,
                                          Graph** graph, Node*** last, size_t* count) {
  REFUSABLE;
  *status = stream ? stream->status : hipStreamCaptureStatusNone;
  if (*status != hipStreamCaptureStatusActive) return hipSuccess;
  *id = stream->id;
  *graph = stream->graph;
  *last = stream->last.data();
  *count = stream->last.size();
  return hipSuccess;
}
#endif

HIP_EXPORT int hipGraphGetNodes(Graph* graph, Node** nodes, size_t* count) {
  REFUSABLE;
  if (nodes) {
    for (size_t i = 0; i < std::min(*count, graph->nodes.size()); i++)
      nodes[i] = graph->nodes[fault("shuffle") ? graph->nodes.size() - 1 - i : i];
  }
  *count = graph->nodes.size();
  return hipSuccess;
}

HIP_EXPORT int hipGraphGetEdges(Graph* graph, Node** from, Node** to, size_t* count) {
  REFUSABLE;
  size_t at = 0;
  for (auto* node : graph->nodes) {
    for (auto* before : node->after) {
      if (from && at < *count) from[at] = before, to[at] = node;
      at++;
    }
  }
  *count = at;
  return hipSuccess;
}

HIP_EXPORT int hipGraphNodeGetType(Node* node, unsigned* type) {
  REFUSABLE;
  bool old = settings["version"] < 50300000;
  *type = unsigned(node->type + (old ? 1 : 0));
  if (old && node->type == kMemcpy) *type = 9; /* 5.2: one-dimensional copies */
  return hipSuccess;
}

HIP_EXPORT int hipGraphClone(Graph** clone, Graph* graph) {
  REFUSABLE;
  std::lock_guard<std::recursive_mutex> guard(lock);
  auto* made = new Graph;
  std::map<Node*, Node*> of;
  for (auto* node : graph->nodes) {
    made->nodes.push_back(of[node] = copied(node));
    for (auto*& before : made->nodes.back()->after) before = of[before];
  }
  settings["live_graphs"]++;
  *clone = made;
  return hipSuccess;
}

HIP_EXPORT int hipGraphNodeFindInClone(Node** found, Node* node, Graph* clone) {
  REFUSABLE;
  for (auto* candidate : clone->nodes) {
    if (candidate->original == node) {
      *found = candidate;
      return hipSuccess;
    }
  }
  return fail(hipErrorInvalidValue);
}

HIP_EXPORT int hipGraphDestroy(Graph* graph) {
  REFUSABLE;
  std::lock_guard<std::recursive_mutex> guard(lock);
  if (graph->destroyed) return fail(hipErrorIllegalState);
  destroy(graph);
  return hipSuccess;
}

HIP_EXPORT int hipGraphInstantiateWithFlags(Exec** exec, Graph* graph, unsigned long long flags) {
  REFUSABLE;
  std::lock_guard<std::recursive_mutex> guard(lock);
  if (flags != 1 || once("refuse_instantiate")) return fail(hipErrorOutOfMemory);
  auto* made = new Exec;
  for (auto* node : graph->nodes) made->nodes.push_back(made->by_node[node] = copied(node));
  settings["instantiated"]++;
  settings["live_execs"]++;
  settings["leaked_slots"] = 0;
  *exec = made;
  return hipSuccess;
}

HIP_EXPORT int hipGraphLaunch(Exec* exec, Stream* stream) {
  REFUSABLE;
  if (exec->destroyed) return fail(hipErrorInvalidValue);
  settings["launches"]++;
  if (stream && stream->status != hipStreamCaptureStatusNone)
    return fail(hipErrorStreamCaptureUnsupported);
  for (auto* node : exec->nodes) run(node);
  return hipSuccess;
}

HIP_EXPORT int hipGraphExecDestroy(Exec* exec) {
  REFUSABLE;
  std::lock_guard<std::recursive_mutex> guard(lock);
  if (exec->destroyed) return fail(hipErrorInvalidValue);
  settings["live_execs"]--;
  settings["destroyed_execs"]++;
  bury(exec);
  return hipSuccess;
}

HIP_EXPORT int hipGraphKernelNodeGetParams(Node* node, hipKernelNodeParams* params) {
  REFUSABLE;
  if (node->type != kKernel) return fail(hipErrorInvalidValue);
  *params = node->kernel;
  return hipSuccess;
}

HIP_EXPORT int hipGraphKernelNodeSetParams(Node* node, const hipKernelNodeParams* params) {
  REFUSABLE;
  return node->type == kKernel ? write_kernel(node, params) : fail(hipErrorInvalidValue);
}

HIP_EXPORT int hipGraphExecKernelNodeSetParams(Exec* exec, Node* node,
                                               const hipKernelNodeParams* params) {
  REFUSABLE;
  if (node->type != kKernel) return fail(hipErrorInvalidValue);
  return update(exec, node, [&](Node* packet) { write_kernel(packet, params); });
}

HIP_EXPORT int hipGraphMemcpyNodeGetParams(Node* node, hipMemcpy3DParms* params) {
  REFUSABLE;
  if (node->type != kMemcpy) return fail(hipErrorInvalidValue);
  std::memset(params, 0xA5, sizeof *params); /* what older runtimes leave in it */
  params->srcArray = params->dstArray = nullptr;
  if (!fault("reports_copies")) return hipSuccess;
  params->srcPtr.ptr = node->from;
  params->dstPtr.ptr = node->to;
  params->extent = {node->size, 1, 1};
  params->kind = unsigned(node->direction);
  return hipSuccess;
}

HIP_EXPORT int hipGraphMemcpyNodeSetParams1D(Node* node, void* to, const void* from, size_t size,
                                             int kind) {
  REFUSABLE;
  if (node->type != kMemcpy) return fail(hipErrorInvalidValue);
  return write_copy(node, to, from, size, kind);
}

HIP_EXPORT int hipGraphExecMemcpyNodeSetParams1D(Exec* exec, Node* node, void* to,
                                                 const void* from, size_t size, int kind) {
  REFUSABLE;
  if (node->type != kMemcpy) return fail(hipErrorInvalidValue);
  return update(exec, node, [&](Node* packet) { write_copy(packet, to, from, size, kind); });
}

HIP_EXPORT int hipGraphMemsetNodeGetParams(Node* node, hipMemsetParams* params) {
  REFUSABLE;
  if (node->type != kMemset) return fail(hipErrorInvalidValue);
  *params = node->fill;
  return hipSuccess;
}

HIP_EXPORT int hipGraphMemsetNodeSetParams(Node* node, const hipMemsetParams* params) {
  REFUSABLE;
  if (node->type != kMemset) return fail(hipErrorInvalidValue);
  node->fill = *params;
  return hipSuccess;
}

HIP_EXPORT int hipGraphExecMemsetNodeSetParams(Exec* exec, Node* node,
                                               const hipMemsetParams* params) {
  REFUSABLE;
  if (node->type != kMemset) return fail(hipErrorInvalidValue);
  return update(exec, node, [&](Node* packet) { packet->fill = *params; });
}

HIP_EXPORT int hipMemcpyAsync(void* to, const void* from, size_t size, int kind, Stream* stream) {
  REFUSABLE;
  auto* node = new Node;
  node->type = kMemcpy;
  write_copy(node, to, from, size, kind);
  return enqueue(stream, node);
}

HIP_EXPORT int hipMemsetAsync(void* to, int value, size_t size, Stream* stream) {
  REFUSABLE;
  auto* node = new Node;
  node->type = kMemset;
  node->fill = {to, 1, 1, size, unsigned(value), size};
  return enqueue(stream, node);
}

HIP_EXPORT int hipStreamCreateWithFlags(Stream** stream, unsigned) {
  REFUSABLE;
  std::lock_guard<std::recursive_mutex> guard(lock);
  *stream = static_cast<Stream*>(fakehip_stream());
  return hipSuccess;
}

HIP_EXPORT int hipStreamDestroy(Stream* stream) {
  std::lock_guard<std::recursive_mutex> guard(lock);
  fakehip_forget_stream(stream);
  return hipSuccess;
}

HIP_EXPORT int hipStreamSynchronize(Stream* stream) {
  REFUSABLE;
  return fakehip_unsafe(stream);
}

HIP_EXPORT int hipMemsetD32Async(uint32_t* to, int value, size_t count, Stream*) {
  REFUSABLE; /* streams run at once; captures of this call are not simulated */
  std::fill(to, to + count, uint32_t(value));
  return hipSuccess;
}

#ifndef FAKEHIP_ANCIENT
static int enqueue_value(Stream* stream, int type, void* address, uint32_t value, unsigned compare) {
  auto* node = new Node;
  node->type = type;
  node->to = address;
  node->value = value;
  node->compare = compare;
  return enqueue(stream, node);
}

HIP_EXPORT int hipStreamWaitValue32(Stream* stream, void* address, uint32_t value, unsigned flags,
                                    uint32_t mask) {
  REFUSABLE;
  if (mask != 0xFFFFFFFF || flags > hipStreamWaitValueEq) return fail(hipErrorInvalidValue);
  return enqueue_value(stream, kWait, address, value, flags);
}

HIP_EXPORT int hipStreamWriteValue32(Stream* stream, void* address, uint32_t value,
                                     unsigned flags) {
  REFUSABLE;
  if (flags) return fail(hipErrorInvalidValue);
  return enqueue_value(stream, kWrite, address, value, 0);
}
#endif

#if !defined(FAKEHIP_RELEASE_52) && !defined(FAKEHIP_ANCIENT)
HIP_EXPORT int hipGraphKernelNodeCopyAttributes(Node* from, Node* to) {
  REFUSABLE;
  settings["attribute_copies"]++;
  return from->type == kKernel && to->type == kKernel ? hipSuccess : fail(hipErrorInvalidValue);
}
#endif
