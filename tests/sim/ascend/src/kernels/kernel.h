// How an operator of the simulated library is written.
//
//   KERNEL(Add, ((T, a), (T, b), (S, alpha), (T, out)), write(out, at::add(a, b, alpha)));
//
// defines aclnnAddGetWorkspaceSize, which takes the arguments the way the real one does and keeps
// what the body needs (host values are read here, once, as real tiling does), and aclnnAdd, which
// queues the body on a stream. The body runs on that stream's worker thread, in order.
#pragma once
#include <ATen/ATen.h>
#include <acl/acl_base.h>

#include <functional>
#include <string>
#include <type_traits>
#include <vector>

#include "../sim.h"

struct aclTensor {
  at::Tensor tensor;
  std::vector<int64_t> shape;  // set by kernels whose output shape depends on data
};
struct aclScalar {
  at::Scalar value;
};
struct aclIntArray {
  std::vector<int64_t> values;
};
struct aclFloatArray {
  std::vector<float> values;
};
struct aclBoolArray {
  std::vector<uint8_t> values;
};
struct aclTensorList {
  std::vector<at::Tensor> values;
};
struct aclScalarList {
  std::vector<at::Scalar> values;
};

struct aclOpExecutor {
  const char* name;
  std::function<void()> body;
  std::vector<std::pair<const void*, size_t>> ranges;  // device memory that the body may touch

  void use(const at::Tensor&);
  int launch(void* stream);
};

// Parameter types of operators.
using T = const aclTensor*;
using Shaped = aclTensor*;  // an output whose shape the kernel decides
using S = const aclScalar*;
using I = const aclIntArray*;
using L = const aclTensorList*;
using SL = const aclScalarList*;
using Text = char*;

inline at::Tensor take(aclOpExecutor& plan, T given) {
  if (!given) return {};
  plan.use(given->tensor);
  return given->tensor;
}
inline Shaped take(aclOpExecutor& plan, Shaped given) {
  plan.use(given->tensor);
  return given;
}
inline std::vector<at::Tensor> take(aclOpExecutor& plan, L given) {
  if (!given) return {};
  for (auto& tensor : given->values) plan.use(tensor);
  return given->values;
}
inline at::Scalar take(aclOpExecutor&, S given) { return given ? given->value : at::Scalar(0); }
inline std::vector<int64_t> take(aclOpExecutor&, I given) {
  return given ? given->values : std::vector<int64_t>{};
}
inline std::vector<at::Scalar> take(aclOpExecutor&, SL given) {
  return given ? given->values : std::vector<at::Scalar>{};
}
inline std::string take(aclOpExecutor&, Text given) { return given ? given : ""; }
template <class V>
  requires std::is_arithmetic_v<V>
V take(aclOpExecutor&, V given) {
  return given;
}

// A result never broadcasts into its output: a wrong shape is an error of whoever allocated it.
inline void write(const at::Tensor& out, const at::Tensor& result) {
  TORCH_CHECK(out.sizes() == result.sizes(), "result of shape ", result.sizes(),
              " for an output of shape ", out.sizes());
  const_cast<at::Tensor&>(out).copy_(result);
}

#define SIM_PARENS ()
#define SIM_EXPAND(...) SIM_EXPAND3(SIM_EXPAND3(SIM_EXPAND3(SIM_EXPAND3(__VA_ARGS__))))
#define SIM_EXPAND3(...) SIM_EXPAND2(SIM_EXPAND2(SIM_EXPAND2(SIM_EXPAND2(__VA_ARGS__))))
#define SIM_EXPAND2(...) SIM_EXPAND1(SIM_EXPAND1(SIM_EXPAND1(SIM_EXPAND1(__VA_ARGS__))))
#define SIM_EXPAND1(...) __VA_ARGS__
#define SIM_EACH(macro, ...) __VA_OPT__(SIM_EXPAND(SIM_STEP(macro, __VA_ARGS__)))
#define SIM_STEP(macro, first, ...) macro first __VA_OPT__(SIM_AGAIN SIM_PARENS(macro, __VA_ARGS__))
#define SIM_AGAIN() SIM_STEP
#define SIM_LIST(...) __VA_ARGS__
#define SIM_DECLARE(type, name) type name##_given,
#define SIM_TAKE(type, name) [[maybe_unused]] auto name = take(*plan, name##_given);

#define SIM_API extern "C" __attribute__((visibility("default")))

#define KERNEL(NAME, PARAMETERS, ...)                                                         \
  SIM_API int aclnn##NAME##GetWorkspaceSize(                                                  \
      SIM_EACH(SIM_DECLARE, SIM_LIST PARAMETERS) uint64_t* bytes, aclOpExecutor** executor) { \
    auto* plan = new aclOpExecutor{#NAME, {}, {}};                                            \
    SIM_EACH(SIM_TAKE, SIM_LIST PARAMETERS)                                                   \
    plan->body = [=]() mutable { __VA_ARGS__; };                                              \
    *bytes = 0;                                                                               \
    *executor = plan;                                                                         \
    return 0;                                                                                 \
  }                                                                                           \
  SIM_API int aclnn##NAME(void*, uint64_t, aclOpExecutor* plan, void* stream) {               \
    return plan->launch(stream);                                                              \
  }
