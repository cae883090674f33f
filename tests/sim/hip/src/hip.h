/* The part of HIP's public interface that devgraph calls, in HIP's own layouts and values.
 * tests/rocm/test_runtime.py compares it with an installed hip/hip_runtime_api.h. */
#pragma once
#include <cstddef>

typedef int hipError_t;
typedef void *hipStream_t, *hipGraph_t, *hipGraphNode_t, *hipGraphExec_t, *hipFunction_t;

enum {
  hipSuccess = 0,
  hipErrorInvalidValue = 1,
  hipErrorOutOfMemory = 2,
  hipErrorIllegalState = 401,
  hipErrorStreamCaptureUnsupported = 900,
  hipErrorStreamCaptureInvalidated = 901,
  hipErrorStreamCaptureUnjoined = 904,
  hipErrorUnknown = 999,
};

enum { hipStreamCaptureStatusNone, hipStreamCaptureStatusActive, hipStreamCaptureStatusInvalidated };

/* Values from release 5.3 on; add one for 5.2. */
enum {
  hipGraphNodeTypeKernel = 0,
  hipGraphNodeTypeMemcpy = 1,
  hipGraphNodeTypeMemset = 2,
  hipGraphNodeTypeHost = 3,
  hipGraphNodeTypeGraph = 4,
  hipGraphNodeTypeEmpty = 5,
  hipGraphNodeTypeWaitEvent = 6,
  hipGraphNodeTypeEventRecord = 7,
};

enum { hipStreamWaitValueGte = 0, hipStreamWaitValueEq = 1 };

enum {
  hipMemcpyHostToHost,
  hipMemcpyHostToDevice,
  hipMemcpyDeviceToHost,
  hipMemcpyDeviceToDevice,
  hipMemcpyDefault,
};

struct dim3 {
  unsigned x, y, z;
};

struct hipKernelNodeParams {
  dim3 blockDim;
  void** extra;
  void* func;
  dim3 gridDim;
  void** kernelParams;
  unsigned sharedMemBytes;
};

struct hipMemsetParams {
  void* dst;
  unsigned elementSize;
  size_t height;
  size_t pitch;
  unsigned value;
  size_t width;
};

struct hipPos {
  size_t x, y, z;
};

struct hipPitchedPtr {
  void* ptr;
  size_t pitch, xsize, ysize;
};

struct hipExtent {
  size_t width, height, depth;
};

struct hipMemcpy3DParms {
  void* srcArray;
  hipPos srcPos;
  hipPitchedPtr srcPtr;
  void* dstArray;
  hipPos dstPos;
  hipPitchedPtr dstPtr;
  hipExtent extent;
  unsigned kind;
};

#define HIP_EXPORT extern "C" __attribute__((visibility("default")))
