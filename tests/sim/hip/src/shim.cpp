/* A libamdhip64 over the CUDA driver: HIP's names, layouts and values outside, CUDA's inside.
 *
 * With it the ROCm backend captures, replays and updates real graphs on an NVIDIA GPU, where torch
 * is the CUDA build. CUDA's types are declared here as its driver's ABI has them (cuda.h 12.3 and
 * later), so that this compiles without a CUDA toolkit.
 */
#include "hip.h"

#include <dlfcn.h>

#include <cstdio>
#include <cstring>
#include <mutex>
#include <set>
#include <tuple>
#include <vector>

namespace cuda {

typedef int Result;
typedef unsigned long long Pointer;

struct KernelParams { /* CUDA_KERNEL_NODE_PARAMS_v2 */
  void* func;
  unsigned gridX, gridY, gridZ, blockX, blockY, blockZ, sharedMemBytes;
  void **kernelParams, **extra;
  void *kern, *ctx;
};

struct MemsetParams { /* CUDA_MEMSET_NODE_PARAMS_v1 */
  Pointer dst;
  size_t pitch;
  unsigned value, elementSize;
  size_t width, height;
};

struct CopySide {
  size_t x, y, z, lod;
  int type;
  void* host;
  Pointer device;
  void *array, *reserved;
  size_t pitch, height;
};

struct CopyParams { /* CUDA_MEMCPY3D_v2 */
  CopySide src, dst;
  size_t width, height, depth;
};

struct Edge { /* CUgraphEdgeData */
  unsigned char bytes[8];
};

enum { kHost = 1, kDevice = 2, kUnified = 4 }; /* CUmemorytype */
enum { kCooperative = 2, kCluster = 4, kPreferredCluster = 11 }; /* CUlaunchAttributeID */

Result missing() { return 500; } /* CUDA_ERROR_NOT_FOUND */

void* symbol(const char* name) {
  static void* library = dlopen("libcuda.so.1", RTLD_NOW);
  void* found = library ? dlsym(library, name) : nullptr;
  if (found) return found;
  std::fprintf(stderr, "shim: the CUDA driver has no %s\n", name);
  return reinterpret_cast<void*>(&missing);
}

/* Makes the primary context current on a thread that has none. */
void context() {
  static auto get = reinterpret_cast<Result (*)(void**)>(symbol("cuCtxGetCurrent"));
  static auto set = reinterpret_cast<Result (*)(void*)>(symbol("cuCtxSetCurrent"));
  static auto retain =
      reinterpret_cast<Result (*)(void**, int)>(symbol("cuDevicePrimaryCtxRetain"));
  void* now = nullptr;
  get(&now);
  if (!now && retain(&now, 0) == 0) set(now);
}

void* current() {
  static auto get = reinterpret_cast<Result (*)(void**)>(symbol("cuCtxGetCurrent"));
  void* now = nullptr;
  get(&now);
  return now;
}

}  // namespace cuda

/* CU(name, arguments)(values): call a driver function, with a context. */
#define CU(name, ...)                                                                \
  ([]() {                                                                            \
    static auto found = reinterpret_cast<cuda::Result (*)(__VA_ARGS__)>(cuda::symbol(#name)); \
    cuda::context();                                                                 \
    return found;                                                                    \
  }())

typedef void* P;

HIP_EXPORT int hipRuntimeGetVersion(int* version) {
  *version = 71400000; /* from 7.14 on unsafe calls are reported, as CUDA does */
  return hipSuccess;
}

HIP_EXPORT const char* hipGetErrorName(int error) {
  const char* text = nullptr;
  CU(cuGetErrorName, int, const char**)(error, &text);
  return text;
}

HIP_EXPORT const char* hipGetErrorString(int error) {
  const char* text = nullptr;
  CU(cuGetErrorString, int, const char**)(error, &text);
  return text;
}

/* A function of the CUDA runtime that torch has mapped, or null. torch begins and ends captures with
 * it, and may end one that was begun here: both ends go through the same library where there is one. */
static void* runtime_symbol(const char* name) {
  for (auto* library : {"libcudart.so.13", "libcudart.so.12"})
    if (void* mapped = dlopen(library, RTLD_NOW | RTLD_NOLOAD)) return dlsym(mapped, name);
  return nullptr;
}

template <class Call>
static Call capture_call(const char* runtime_name, const char* driver_name) {
  void* found = runtime_symbol(runtime_name);
  return reinterpret_cast<Call>(found ? found : cuda::symbol(driver_name));
}

HIP_EXPORT int hipGetLastError() {
  static auto get = reinterpret_cast<int (*)()>(runtime_symbol("cudaGetLastError"));
  return get ? get() : hipSuccess;
}

HIP_EXPORT int hipStreamBeginCapture(P stream, int mode) {
  static auto begin =
      capture_call<int (*)(P, int)>("cudaStreamBeginCapture", "cuStreamBeginCapture_v2");
  cuda::context();
  return begin(stream, mode);
}

HIP_EXPORT int hipStreamEndCapture(P stream, P* graph) {
  static auto end = capture_call<int (*)(P, P*)>("cudaStreamEndCapture", "cuStreamEndCapture");
  cuda::context();
  return end(stream, graph);
}

HIP_EXPORT int hipStreamIsCapturing(P stream, int* status) {
  return CU(cuStreamIsCapturing, P, int*)(stream, status);
}

HIP_EXPORT int hipStreamGetCaptureInfo_v2(P stream, int* status, unsigned long long* id, P* graph,
                                          P** last, size_t* count) {
  const cuda::Edge* edges = nullptr;
  return CU(cuStreamGetCaptureInfo_v3, P, int*, unsigned long long*, P*, P**, const cuda::Edge**,
            size_t*)(stream, status, id, graph, last, &edges, count);
}

HIP_EXPORT int hipGraphGetNodes(P graph, P* nodes, size_t* count) {
  return CU(cuGraphGetNodes, P, P*, size_t*)(graph, nodes, count);
}

HIP_EXPORT int hipGraphGetEdges(P graph, P* from, P* to, size_t* count) {
  std::vector<cuda::Edge> edges(from ? *count : 0);
  return CU(cuGraphGetEdges_v2, P, P*, P*, cuda::Edge*, size_t*)(
      graph, from, to, from ? edges.data() : nullptr, count);
}

HIP_EXPORT int hipGraphNodeGetType(P node, unsigned* type) {
  return CU(cuGraphNodeGetType, P, unsigned*)(node, type);
}

HIP_EXPORT int hipGraphClone(P* clone, P graph) {
  return CU(cuGraphClone, P*, P)(clone, graph);
}

HIP_EXPORT int hipGraphNodeFindInClone(P* found, P node, P clone) {
  return CU(cuGraphNodeFindInClone, P*, P, P)(found, node, clone);
}

HIP_EXPORT int hipGraphDestroy(P graph) { return CU(cuGraphDestroy, P)(graph); }

HIP_EXPORT int hipGraphInstantiateWithFlags(P* exec, P graph, unsigned long long flags) {
  return CU(cuGraphInstantiateWithFlags, P*, P, unsigned long long)(exec, graph, flags);
}

HIP_EXPORT int hipGraphLaunch(P exec, P stream) { return CU(cuGraphLaunch, P, P)(exec, stream); }

HIP_EXPORT int hipGraphExecDestroy(P exec) { return CU(cuGraphExecDestroy, P)(exec); }

HIP_EXPORT int hipStreamCreateWithFlags(P* stream, unsigned flags) {
  return CU(cuStreamCreate, P*, unsigned)(stream, flags);
}

HIP_EXPORT int hipStreamSynchronize(P stream) { return CU(cuStreamSynchronize, P)(stream); }

HIP_EXPORT int hipStreamDestroy(P stream) { return CU(cuStreamDestroy_v2, P)(stream); }

HIP_EXPORT int hipStreamWaitValue32(P stream, P address, unsigned value, unsigned flags, unsigned) {
  return CU(cuStreamWaitValue32_v2, P, cuda::Pointer, unsigned, unsigned)(
      stream, reinterpret_cast<cuda::Pointer>(address), value, flags);
}

HIP_EXPORT int hipStreamWriteValue32(P stream, P address, unsigned value, unsigned flags) {
  return CU(cuStreamWriteValue32_v2, P, cuda::Pointer, unsigned, unsigned)(
      stream, reinterpret_cast<cuda::Pointer>(address), value, flags);
}

/* Kernel nodes. */

/* HIP has neither clusters nor kernels without a function, and what CUDA launches with another
 * cluster size or cooperatively is another kernel to an executable. So a hipFunction_t stands here
 * for a CUfunction together with those two. */
struct Launch {
  void* function;
  unsigned cluster[3], preferred[3];
  int cooperative;
  auto all() const {
    return std::make_tuple(function, cluster[0], cluster[1], cluster[2], preferred[0],
                           preferred[1], preferred[2], cooperative);
  }
  bool operator<(const Launch& other) const { return all() < other.all(); }
};

static const Launch* known(const Launch& launch) {
  static std::mutex lock;
  static std::set<Launch> launches; /* its nodes never move */
  std::lock_guard<std::mutex> guard(lock);
  return &*launches.insert(launch).first;
}

static void read_attribute(P node, int which, void* out, size_t size) {
  unsigned char value[64] = {}; /* CUlaunchAttributeValue */
  if (CU(cuGraphKernelNodeGetAttribute, P, int, void*)(node, which, value)) return;
  std::memcpy(out, value, size);
}

static cuda::KernelParams to_cuda(const hipKernelNodeParams* p) {
  auto* launch = static_cast<const Launch*>(p->func);
  return {launch->function, p->gridDim.x,  p->gridDim.y,      p->gridDim.z,    p->blockDim.x,
          p->blockDim.y,    p->blockDim.z, p->sharedMemBytes, p->kernelParams, p->extra,
          nullptr,          cuda::current()};
}

HIP_EXPORT int hipGraphKernelNodeGetParams(P node, hipKernelNodeParams* out) {
  cuda::KernelParams p = {};
  int error = CU(cuGraphKernelNodeGetParams_v2, P, cuda::KernelParams*)(node, &p);
  if (error) return error;
  Launch launch = {};
  launch.function = p.func;
  if (!p.func && p.kern) {
    error = CU(cuKernelGetFunction, P*, P)(&launch.function, p.kern);
    if (error) return error;
  }
  read_attribute(node, cuda::kCluster, launch.cluster, sizeof launch.cluster);
  read_attribute(node, cuda::kPreferredCluster, launch.preferred, sizeof launch.preferred);
  read_attribute(node, cuda::kCooperative, &launch.cooperative, sizeof launch.cooperative);
  std::memset(out, 0, sizeof *out);
  out->blockDim = {p.blockX, p.blockY, p.blockZ};
  out->extra = p.extra;
  out->func = const_cast<Launch*>(known(launch));
  out->gridDim = {p.gridX, p.gridY, p.gridZ};
  out->kernelParams = p.kernelParams;
  out->sharedMemBytes = p.sharedMemBytes;
  return hipSuccess;
}

HIP_EXPORT int hipGraphKernelNodeSetParams(P node, const hipKernelNodeParams* params) {
  auto p = to_cuda(params);
  return CU(cuGraphKernelNodeSetParams_v2, P, const cuda::KernelParams*)(node, &p);
}

HIP_EXPORT int hipGraphExecKernelNodeSetParams(P exec, P node, const hipKernelNodeParams* params) {
  auto p = to_cuda(params);
  return CU(cuGraphExecKernelNodeSetParams_v2, P, P, const cuda::KernelParams*)(exec, node, &p);
}

HIP_EXPORT int hipGraphKernelNodeCopyAttributes(P from, P to) {
  return CU(cuGraphKernelNodeCopyAttributes, P, P)(to, from); /* CUDA names the target first */
}

/* Copy nodes. */

static hipPitchedPtr to_hip(const cuda::CopySide& side) {
  void* address = side.type == cuda::kHost ? side.host : reinterpret_cast<void*>(side.device);
  return {address, side.pitch, side.pitch, side.height};
}

HIP_EXPORT int hipGraphMemcpyNodeGetParams(P node, hipMemcpy3DParms* out) {
  cuda::CopyParams p = {};
  int error = CU(cuGraphMemcpyNodeGetParams, P, cuda::CopyParams*)(node, &p);
  if (error) return error;
  std::memset(out, 0, sizeof *out);
  out->srcArray = p.src.array;
  out->dstArray = p.dst.array;
  out->srcPos = {p.src.x, p.src.y, p.src.z};
  out->dstPos = {p.dst.x, p.dst.y, p.dst.z};
  out->srcPtr = to_hip(p.src);
  out->dstPtr = to_hip(p.dst);
  out->extent = {p.width, p.height ? p.height : 1, p.depth ? p.depth : 1};
  if (p.src.type == cuda::kUnified || p.dst.type == cuda::kUnified)
    out->kind = hipMemcpyDefault;
  else if (p.src.type == cuda::kHost)
    out->kind = p.dst.type == cuda::kHost ? hipMemcpyHostToHost : hipMemcpyHostToDevice;
  else
    out->kind = p.dst.type == cuda::kHost ? hipMemcpyDeviceToHost : hipMemcpyDeviceToDevice;
  return hipSuccess;
}

static cuda::CopySide side_of(void* address, int type, size_t size) {
  cuda::CopySide side = {};
  side.pitch = size;
  side.height = 1;
  side.type = type;
  side.host = type == cuda::kHost ? address : nullptr;
  side.device = type == cuda::kHost ? 0 : reinterpret_cast<cuda::Pointer>(address);
  return side;
}

static cuda::CopyParams flat_copy(void* to, const void* from, size_t size, int kind) {
  auto type = [&](bool host) {
    return kind == hipMemcpyDefault ? cuda::kUnified : host ? cuda::kHost : cuda::kDevice;
  };
  cuda::CopyParams p = {};
  p.src = side_of(const_cast<void*>(from),
                  type(kind == hipMemcpyHostToHost || kind == hipMemcpyHostToDevice), size);
  p.dst = side_of(to, type(kind == hipMemcpyHostToHost || kind == hipMemcpyDeviceToHost), size);
  p.width = size;
  p.height = p.depth = 1;
  return p;
}

HIP_EXPORT int hipGraphMemcpyNodeSetParams1D(P node, P to, const void* from, size_t size,
                                             int kind) {
  auto p = flat_copy(to, from, size, kind);
  return CU(cuGraphMemcpyNodeSetParams, P, const cuda::CopyParams*)(node, &p);
}

HIP_EXPORT int hipGraphExecMemcpyNodeSetParams1D(P exec, P node, P to, const void* from,
                                                 size_t size, int kind) {
  auto p = flat_copy(to, from, size, kind);
  auto set = CU(cuGraphExecMemcpyNodeSetParams, P, P, const cuda::CopyParams*, P);
  return set(exec, node, &p, cuda::current());
}

/* Fill nodes. */

HIP_EXPORT int hipMemsetAsync(P to, int value, size_t size, P stream) {
  return CU(cuMemsetD8Async, cuda::Pointer, unsigned char, size_t, P)(
      reinterpret_cast<cuda::Pointer>(to), static_cast<unsigned char>(value), size, stream);
}

static cuda::MemsetParams to_cuda(const hipMemsetParams* p) {
  return {reinterpret_cast<cuda::Pointer>(p->dst), p->pitch, p->value, p->elementSize, p->width,
          p->height};
}

HIP_EXPORT int hipMemsetD32Async(P to, int value, size_t count, P stream) {
  return CU(cuMemsetD32Async, cuda::Pointer, unsigned, size_t, P)(
      reinterpret_cast<cuda::Pointer>(to), static_cast<unsigned>(value), count, stream);
}

HIP_EXPORT int hipGraphMemsetNodeGetParams(P node, hipMemsetParams* out) {
  cuda::MemsetParams p = {};
  int error = CU(cuGraphMemsetNodeGetParams, P, cuda::MemsetParams*)(node, &p);
  if (error) return error;
  *out = {reinterpret_cast<void*>(p.dst), p.elementSize, p.height, p.pitch, p.value, p.width};
  return hipSuccess;
}

HIP_EXPORT int hipGraphMemsetNodeSetParams(P node, const hipMemsetParams* params) {
  auto p = to_cuda(params);
  return CU(cuGraphMemsetNodeSetParams, P, const cuda::MemsetParams*)(node, &p);
}

HIP_EXPORT int hipGraphExecMemsetNodeSetParams(P exec, P node, const hipMemsetParams* params) {
  auto p = to_cuda(params);
  auto set = CU(cuGraphExecMemsetNodeSetParams, P, P, const cuda::MemsetParams*, P);
  return set(exec, node, &p, cuda::current());
}
