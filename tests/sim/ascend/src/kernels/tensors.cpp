// Tensors, scalars and lists as operators receive them, and the launch of an operator.
#include <c10/core/InferenceMode.h>

#include "kernel.h"

static at::ScalarType scalar_type(aclDataType type) {
  switch (type) {
    case ACL_FLOAT:
      return at::kFloat;
    case ACL_FLOAT16:
      return at::kHalf;
    case ACL_BF16:
      return at::kBFloat16;
    case ACL_DOUBLE:
      return at::kDouble;
    case ACL_INT8:
      return at::kChar;
    case ACL_UINT8:
      return at::kByte;
    case ACL_INT16:
      return at::kShort;
    case ACL_INT32:
      return at::kInt;
    case ACL_INT64:
      return at::kLong;
    case ACL_BOOL:
      return at::kBool;
    case ACL_COMPLEX64:
      return at::kComplexFloat;
    default:
      return at::ScalarType::Undefined;
  }
}

void aclOpExecutor::use(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.numel() == 0) return;
  size_t elements = 1;
  for (int64_t axis = 0; axis < tensor.dim(); axis++)
    elements += (tensor.size(axis) - 1) * tensor.stride(axis);
  ranges.emplace_back(tensor.data_ptr(), elements * tensor.element_size());
}

int aclOpExecutor::launch(void* stream) {
  std::shared_ptr<aclOpExecutor> plan(
      this);  // a captured kernel keeps its plan as long as its graph
  return sim::launch(stream, name, [plan] {
    for (auto& [address, bytes] : plan->ranges) sim::require_mapped(address, bytes, plan->name);
    c10::InferenceMode inference;  // the tensors may have been made in this mode or not
    plan->body();
  });
}

SIM_API aclTensor* aclCreateTensor(const int64_t* dims, uint64_t rank, aclDataType type,
                                   const int64_t* strides, int64_t offset, aclFormat,
                                   const int64_t*, uint64_t, void* data) {
  auto dtype = scalar_type(type);
  if (dtype == at::ScalarType::Undefined) {
    sim::report("missing: data type " + std::to_string((int)type));
    return nullptr;
  }
  char* start = (char*)data + offset * (int64_t)c10::elementSize(dtype);
  return new aclTensor{at::from_blob(start, at::IntArrayRef(dims, rank),
                                     at::IntArrayRef(strides, rank), at::TensorOptions(dtype)),
                       {}};
}

SIM_API aclScalar* aclCreateScalar(void* value, aclDataType type) {
  auto as = [&](auto typed) { return new aclScalar{at::Scalar(typed)}; };
  switch (type) {
    case ACL_FLOAT:
      return as(*(float*)value);
    case ACL_DOUBLE:
      return as(*(double*)value);
    case ACL_FLOAT16:
      return as((float)*(at::Half*)value);
    case ACL_BF16:
      return as((float)*(at::BFloat16*)value);
    case ACL_INT8:
      return as((int64_t)*(int8_t*)value);
    case ACL_UINT8:
      return as((int64_t)*(uint8_t*)value);
    case ACL_INT16:
      return as((int64_t)*(int16_t*)value);
    case ACL_INT32:
      return as((int64_t)*(int32_t*)value);
    case ACL_INT64:
      return as(*(int64_t*)value);
    case ACL_BOOL:
      return as(*(bool*)value);
    default:
      sim::report("missing: scalar type " + std::to_string((int)type));
      return nullptr;
  }
}

SIM_API aclIntArray* aclCreateIntArray(const int64_t* values, uint64_t n) {
  return new aclIntArray{{values, values + n}};
}
SIM_API aclFloatArray* aclCreateFloatArray(const float* values, uint64_t n) {
  return new aclFloatArray{{values, values + n}};
}
SIM_API aclBoolArray* aclCreateBoolArray(const bool* values, uint64_t n) {
  return new aclBoolArray{{values, values + n}};
}

SIM_API aclTensorList* aclCreateTensorList(const aclTensor* const* values, uint64_t n) {
  auto* list = new aclTensorList;
  for (uint64_t i = 0; i < n; i++)
    list->values.push_back(values[i] ? values[i]->tensor : at::Tensor());
  for (uint64_t i = 0; i < n; i++) delete values[i];  // the list owns its tensors
  return list;
}
SIM_API aclScalarList* aclCreateScalarList(const aclScalar* const* values, uint64_t n) {
  auto* list = new aclScalarList;
  for (uint64_t i = 0; i < n; i++) list->values.push_back(values[i]->value);
  for (uint64_t i = 0; i < n; i++) delete values[i];
  return list;
}

#define DESTROY(TYPE)                                \
  SIM_API int aclDestroy##TYPE(const acl##TYPE* x) { \
    delete x;                                        \
    return 0;                                        \
  }
DESTROY(Tensor)
DESTROY(Scalar)
DESTROY(IntArray)
DESTROY(FloatArray)
DESTROY(BoolArray)
DESTROY(TensorList)
DESTROY(ScalarList)
SIM_API int aclDestroyAclOpExecutor(aclOpExecutor* plan) {
  delete plan;
  return 0;
}

// The caller frees the array with delete[].
SIM_API int aclGetViewShape(const aclTensor* tensor, int64_t** dims, uint64_t* rank) {
  auto shape = tensor->shape.empty() ? tensor->tensor.sizes().vec() : tensor->shape;
  *rank = shape.size();
  *dims = new int64_t[shape.size()];
  std::copy(shape.begin(), shape.end(), *dims);
  return 0;
}
