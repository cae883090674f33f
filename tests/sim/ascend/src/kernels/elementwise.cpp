// Arithmetic, comparisons, logic, selection and conversion, element by element.
#include "kernel.h"

#define UNARY(NAME, f)                               \
  KERNEL(NAME, ((T, a), (T, out)), write(out, f(a))) \
  KERNEL(Inplace##NAME, ((T, a)), write(a, f(a)))

UNARY(Abs, at::abs)
UNARY(Acos, at::acos)
UNARY(Asin, at::asin)
UNARY(Atan, at::atan)
UNARY(BitwiseNot, at::bitwise_not)
UNARY(Ceil, at::ceil)
UNARY(Cos, at::cos)
UNARY(Cosh, at::cosh)
UNARY(Erf, at::erf)
UNARY(Erfinv, at::erfinv)
UNARY(Exp, at::exp)
UNARY(Exp2, at::exp2)
UNARY(Expm1, at::expm1)
UNARY(Floor, at::floor)
UNARY(Gelu, at::gelu)
UNARY(Hardswish, at::hardswish)
UNARY(Log, at::log)
UNARY(Log1p, at::log1p)
UNARY(Log2, at::log2)
UNARY(LogicalNot, at::logical_not)
UNARY(Neg, at::neg)
UNARY(Reciprocal, at::reciprocal)
UNARY(Relu, at::relu)
UNARY(Round, at::round)
UNARY(Rsqrt, at::rsqrt)
UNARY(Sigmoid, at::sigmoid)
UNARY(Sign, at::sign)
UNARY(Silu, at::silu)
UNARY(Sin, at::sin)
UNARY(Sinh, at::sinh)
UNARY(Sqrt, at::sqrt)
UNARY(Square, at::square)
UNARY(Tan, at::tan)
UNARY(Tanh, at::tanh)
UNARY(Trunc, at::trunc)
KERNEL(IsFinite, ((T, a), (T, out)), write(out, at::isfinite(a)))
KERNEL(IsInf, ((T, a), (T, out)), write(out, at::isinf(a)))
KERNEL(IsNan, ((T, a), (T, out)), write(out, at::isnan(a)))
KERNEL(GeluV2, ((T, a), (int64_t, tanh), (T, out)), write(out, at::gelu(a, tanh ? "tanh" : "none")))
KERNEL(Softplus, ((T, a), (S, beta), (S, threshold), (T, out)),
       write(out, at::softplus(a, beta, threshold)))
KERNEL(LeakyRelu, ((T, a), (S, slope), (T, out)), write(out, at::leaky_relu(a, slope)))
KERNEL(SwiGlu, ((T, a), (int64_t, dim), (T, out)), {
  auto halves = at::chunk(a, 2, dim);
  write(out, at::silu(halves[0]) * halves[1]);
})

// a + alpha * b and its relatives.
#define SCALED(NAME, f)                                                               \
  KERNEL(NAME, ((T, a), (T, b), (S, alpha), (T, out)), write(out, f(a, b, alpha)))    \
  KERNEL(Inplace##NAME, ((T, a), (T, b), (S, alpha)), write(a, f(a, b, alpha)))       \
  KERNEL(NAME##s, ((T, a), (S, b), (S, alpha), (T, out)), write(out, f(a, b, alpha))) \
  KERNEL(Inplace##NAME##s, ((T, a), (S, b), (S, alpha)), write(a, f(a, b, alpha)))
SCALED(Add, at::add)
SCALED(Sub, at::sub)
KERNEL(AddV3, ((S, a), (T, b), (S, alpha), (T, out)), write(out, at::add(b* alpha, a)))
KERNEL(Rsub, ((T, a), (T, b), (S, alpha), (T, out)), write(out, at::rsub(a, b, alpha)))
KERNEL(Rsubs, ((T, a), (S, b), (S, alpha), (T, out)), write(out, at::rsub(a, b, alpha)))

#define BINARY(NAME, f)                                         \
  KERNEL(NAME, ((T, a), (T, b), (T, out)), write(out, f(a, b))) \
  KERNEL(Inplace##NAME, ((T, a), (T, b)), write(a, f(a, b)))
#define WITH_SCALAR(NAME, f)                                    \
  KERNEL(NAME, ((T, a), (S, b), (T, out)), write(out, f(a, b))) \
  KERNEL(Inplace##NAME, ((T, a), (S, b)), write(a, f(a, b)))
BINARY(Mul, at::mul)
WITH_SCALAR(Muls, at::mul)
BINARY(Div, at::div)
WITH_SCALAR(Divs, at::div)
BINARY(FloorDivide, at::floor_divide)
WITH_SCALAR(FloorDivides, at::floor_divide)
BINARY(RemainderTensorTensor, at::remainder)
WITH_SCALAR(RemainderTensorScalar, at::remainder)
BINARY(FmodTensor, at::fmod)
WITH_SCALAR(FmodScalar, at::fmod)
BINARY(PowTensorTensor, at::pow)
WITH_SCALAR(PowTensorScalar, at::pow)
KERNEL(PowScalarTensor, ((S, a), (T, b), (T, out)), write(out, at::pow(a, b)))
BINARY(Maximum, at::maximum)
BINARY(Minimum, at::minimum)
BINARY(Atan2, at::atan2)
BINARY(LogicalAnd, at::logical_and)
BINARY(LogicalOr, at::logical_or)
BINARY(LogicalXor, at::logical_xor)
BINARY(BitwiseAndTensor, at::bitwise_and)
WITH_SCALAR(BitwiseAndScalar, at::bitwise_and)
BINARY(BitwiseOrTensor, at::bitwise_or)
WITH_SCALAR(BitwiseOrScalar, at::bitwise_or)
BINARY(BitwiseXorTensor, at::bitwise_xor)
WITH_SCALAR(BitwiseXorScalar, at::bitwise_xor)
BINARY(LeftShift, at::bitwise_left_shift)
WITH_SCALAR(LeftShifts, at::bitwise_left_shift)
BINARY(RightShift, at::bitwise_right_shift)
KERNEL(IsClose,
       ((T, a), (T, b), (double, relative), (double, absolute), (bool, equal_nan), (T, out)),
       write(out, at::isclose(a, b, relative, absolute, equal_nan)))
KERNEL(Glu, ((T, a), (int64_t, dim), (T, out)), write(out, at::glu(a, dim)))

static at::Tensor divide(const at::Tensor& a, const at::Tensor& b, int64_t mode) {
  if (mode == 0) return at::div(a, b);
  return at::div(a, b, mode == 1 ? "trunc" : "floor");
}
static at::Tensor divide(const at::Tensor& a, const at::Scalar& b, int64_t mode) {
  return divide(a, at::scalar_tensor(b, a.options()), mode);
}
KERNEL(DivMod, ((T, a), (T, b), (int, mode), (T, out)), write(out, divide(a, b, mode)))
KERNEL(InplaceDivMod, ((T, a), (T, b), (int, mode)), write(a, divide(a, b, mode)))
KERNEL(DivMods, ((T, a), (S, b), (int, mode), (T, out)), write(out, divide(a, b, mode)))
KERNEL(InplaceDivMods, ((T, a), (S, b), (int, mode)), write(a, divide(a, b, mode)))

#define COMPARISON(NAME, f)                                             \
  KERNEL(NAME##Tensor, ((T, a), (T, b), (T, out)), write(out, f(a, b))) \
  KERNEL(NAME##Scalar, ((T, a), (S, b), (T, out)), write(out, f(a, b))) \
  KERNEL(Inplace##NAME##Tensor, ((T, a), (T, b)), write(a, f(a, b)))    \
  KERNEL(Inplace##NAME##Scalar, ((T, a), (S, b)), write(a, f(a, b)))
COMPARISON(Eq, at::eq)
COMPARISON(Ne, at::ne)
COMPARISON(Gt, at::gt)
COMPARISON(Ge, at::ge)
COMPARISON(Lt, at::lt)
COMPARISON(Le, at::le)
KERNEL(Equal, ((T, a), (T, b), (T, out)), out.fill_(at::equal(a, b)))

// Either bound may be absent: its pointer, captured beside its value, is then null.
#define BOUND(NAME) (NAME##_given ? std::optional<at::Scalar>(NAME) : std::nullopt)
KERNEL(Clamp, ((T, a), (S, low), (S, high), (T, out)),
       write(out, at::clamp(a, BOUND(low), BOUND(high))))
KERNEL(ClampMin, ((T, a), (S, low), (T, out)), write(out, at::clamp_min(a, low)))
KERNEL(ClampMax, ((T, a), (S, high), (T, out)), write(out, at::clamp_max(a, high)))
KERNEL(InplaceClampMax, ((T, a), (S, high)), write(a, at::clamp_max(a, high)))
KERNEL(ClampTensor, ((T, a), (T, low), (T, high), (T, out)), write(out, at::clamp(a, low, high)))
KERNEL(ClampMinTensor, ((T, a), (T, low), (T, out)), write(out, at::clamp_min(a, low)))
KERNEL(ClampMaxTensor, ((T, a), (T, high), (T, out)), write(out, at::clamp_max(a, high)))

KERNEL(SWhere, ((T, condition), (T, a), (T, b), (T, out)),
       write(out, at::where(condition.to(at::kBool), a, b)))
KERNEL(InplaceMaskedFillScalar, ((T, a), (T, mask), (S, value)),
       a.masked_fill_(mask.to(at::kBool), value))
KERNEL(InplaceMaskedFillTensor, ((T, a), (T, mask), (T, value)),
       a.masked_fill_(mask.to(at::kBool), value.reshape({})))
KERNEL(Addcmul, ((T, a), (T, x), (T, y), (S, value), (T, out)),
       write(out, at::addcmul(a, x, y, value)))
KERNEL(InplaceAddcmul, ((T, a), (T, x), (T, y), (S, value)), write(a, at::addcmul(a, x, y, value)))
KERNEL(Addcdiv, ((T, a), (T, x), (T, y), (S, value), (T, out)),
       write(out, at::addcdiv(a, x, y, value)))
KERNEL(InplaceAddcdiv, ((T, a), (T, x), (T, y), (S, value)), write(a, at::addcdiv(a, x, y, value)))
KERNEL(Lerp, ((T, a), (T, b), (T, weight), (T, out)), write(out, at::lerp(a, b, weight)))
KERNEL(Lerps, ((T, a), (T, b), (S, weight), (T, out)), write(out, at::lerp(a, b, weight)))

KERNEL(InplaceCopy, ((T, to), (T, from)), to.copy_(from))
KERNEL(Cast, ((T, a), (int, dtype), (T, out)), write(out, a))
KERNEL(InplaceFillScalar, ((T, a), (S, value)), a.fill_(value))
KERNEL(InplaceFillTensor, ((T, a), (T, value)), a.fill_(value.reshape({})))
KERNEL(InplaceZero, ((T, a)), a.zero_())
KERNEL(InplaceOne, ((T, a)), a.fill_(1))
KERNEL(NanToNum, ((T, a), (float, nan), (float, high), (float, low), (T, out)),
       write(out, at::nan_to_num(a, nan, high, low)))

// Lists: the same elementwise functions over several tensors in one launch.
#define EACH(NAME, PARAMETERS, ...) \
  KERNEL(Foreach##NAME, PARAMETERS, for (size_t i = 0; i < xs.size(); i++) { __VA_ARGS__; })
EACH(ZeroInplace, ((L, xs)), xs[i].zero_())
EACH(Copy, ((L, xs), (L, to)), to[i].copy_(xs[i]))
EACH(AddListV2, ((L, xs), (L, ys), (S, alpha), (L, out)),
     write(out[i], at::add(xs[i], ys[i], alpha)))
EACH(SubListV2, ((L, xs), (L, ys), (S, alpha), (L, out)),
     write(out[i], at::sub(xs[i], ys[i], alpha)))
EACH(MulList, ((L, xs), (L, ys), (L, out)), write(out[i], xs[i] * ys[i]))
EACH(DivList, ((L, xs), (L, ys), (L, out)), write(out[i], xs[i] / ys[i]))
EACH(AddScalarV2, ((L, xs), (S, value), (L, out)), write(out[i], at::add(xs[i], value)))
EACH(MulScalarV2, ((L, xs), (S, value), (L, out)), write(out[i], at::mul(xs[i], value)))
EACH(DivScalarV2, ((L, xs), (S, value), (L, out)), write(out[i], at::div(xs[i], value)))
EACH(MulScalarList, ((L, xs), (SL, values), (L, out)), write(out[i], at::mul(xs[i], values[i])))
EACH(Neg, ((L, xs), (L, out)), write(out[i], at::neg(xs[i])))
EACH(Sqrt, ((L, xs), (L, out)), write(out[i], at::sqrt(xs[i])))
