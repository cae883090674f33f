// Reductions, scans, sorting and softmax.
#include "kernel.h"

static std::vector<int64_t> all_axes(const at::Tensor& a, std::vector<int64_t> dims) {
  if (dims.empty())
    for (int64_t axis = 0; axis < a.dim(); axis++) dims.push_back(axis);
  return dims;
}

KERNEL(ReduceSum, ((T, a), (I, dims), (bool, keep), (int, dtype), (T, out)),
       write(out, at::sum(a, all_axes(a, dims), keep, out.scalar_type())))
KERNEL(Mean, ((T, a), (I, dims), (bool, keep), (int, dtype), (T, out)),
       write(out, at::mean(a, all_axes(a, dims), keep, out.scalar_type())))
KERNEL(MeanV2, ((T, a), (I, dims), (bool, keep), (bool, noop), (T, out)),
       write(out, at::mean(a, all_axes(a, dims), keep, out.scalar_type())))
KERNEL(Prod, ((T, a), (int, dtype), (T, out)), write(out, at::prod(a, out.scalar_type())))
KERNEL(ProdDim, ((T, a), (int64_t, dim), (bool, keep), (int, dtype), (T, out)),
       write(out, at::prod(a, dim, keep, out.scalar_type())))
KERNEL(Amax, ((T, a), (I, dims), (bool, keep), (T, out)),
       write(out, at::amax(a, all_axes(a, dims), keep)))
KERNEL(Amin, ((T, a), (I, dims), (bool, keep), (T, out)),
       write(out, at::amin(a, all_axes(a, dims), keep)))
KERNEL(Max, ((T, a), (T, out)), write(out, at::max(a)))
KERNEL(Min, ((T, a), (T, out)), write(out, at::min(a)))
KERNEL(Aminmax, ((T, a), (I, dims), (bool, keep), (T, low), (T, high)), {
  write(low, at::amin(a, all_axes(a, dims), keep));
  write(high, at::amax(a, all_axes(a, dims), keep));
})
KERNEL(All, ((T, a), (I, dims), (bool, keep), (T, out)),
       write(out, at::all(a, at::OptionalIntArrayRef(all_axes(a, dims)), keep)))
KERNEL(Any, ((T, a), (I, dims), (bool, keep), (T, out)),
       write(out, at::any(a, at::OptionalIntArrayRef(all_axes(a, dims)), keep)))
KERNEL(ArgMax, ((T, a), (int64_t, dim), (bool, keep), (T, out)),
       write(out, at::argmax(a, dim, keep)))
KERNEL(ArgMin, ((T, a), (int64_t, dim), (bool, keep), (T, out)),
       write(out, at::argmin(a, dim, keep)))
KERNEL(LogSumExp, ((T, a), (I, dims), (bool, keep), (T, out)),
       write(out, at::logsumexp(a, all_axes(a, dims), keep)))
KERNEL(VarCorrection, ((T, a), (I, dims), (int64_t, correction), (bool, keep), (T, out)),
       write(out, at::var(a, all_axes(a, dims), at::Scalar(correction), keep)))
KERNEL(Std, ((T, a), (I, dims), (int64_t, correction), (bool, keep), (T, out)),
       write(out, at::std(a, all_axes(a, dims), at::Scalar(correction), keep)))
KERNEL(Norm, ((T, a), (S, p), (I, dims), (bool, keep), (T, out)),
       write(out, at::norm(a, p, all_axes(a, dims), keep)))
KERNEL(LinalgVectorNorm, ((T, a), (S, order), (I, dims), (bool, keep), (int, dtype), (T, out)),
       write(out, at::linalg_vector_norm(a, order, at::OptionalIntArrayRef(all_axes(a, dims)), keep,
                                         out.scalar_type())))
KERNEL(Median, ((T, a), (T, out)), write(out, at::median(a)))

// Functions that return values and indices.
#define PAIR(NAME, PARAMETERS, CALL)     \
  KERNEL(NAME, PARAMETERS, {             \
    auto result = CALL;                  \
    write(values, std::get<0>(result));  \
    write(indices, std::get<1>(result)); \
  })
PAIR(MaxDim, ((T, a), (int64_t, dim), (bool, keep), (T, values), (T, indices)),
     at::max(a, dim, keep))
PAIR(MinDim, ((T, a), (int64_t, dim), (bool, keep), (T, values), (T, indices)),
     at::min(a, dim, keep))
PAIR(Topk,
     ((T, a), (int64_t, k), (int64_t, dim), (bool, largest), (bool, sorted), (T, values),
      (T, indices)),
     at::topk(a, k, dim, largest, sorted))
PAIR(Sort, ((T, a), (bool, stable), (int64_t, dim), (bool, descending), (T, values), (T, indices)),
     at::sort(a, std::optional<bool>(stable), dim, descending))
PAIR(Kthvalue, ((T, a), (int64_t, k), (int64_t, dim), (bool, keep), (T, values), (T, indices)),
     at::kthvalue(a, k, dim, keep))
PAIR(MedianDim, ((T, a), (int64_t, dim), (bool, keep), (T, values), (T, indices)),
     at::median(a, dim, keep))
PAIR(Cummax, ((T, a), (int64_t, dim), (T, values), (T, indices)), at::cummax(a, dim))

KERNEL(Cumsum, ((T, a), (int64_t, dim), (int, dtype), (T, out)),
       write(out, at::cumsum(a, dim, out.scalar_type())))
KERNEL(Cumprod, ((T, a), (S, dim), (int, dtype), (T, out)),
       write(out, at::cumprod(a, dim.toLong(), out.scalar_type())))
KERNEL(Softmax, ((T, a), (int64_t, dim), (T, out)),
       write(out, at::softmax(a, dim, out.scalar_type())))
KERNEL(LogSoftmax, ((T, a), (int64_t, dim), (T, out)),
       write(out, at::log_softmax(a, dim, out.scalar_type())))
KERNEL(Bincount, ((T, a), (T, weights), (int64_t, minlength), (T, out)),
       write(out,
             at::bincount(a, weights.defined() ? std::optional<at::Tensor>(weights) : std::nullopt,
                          minlength)))
KERNEL(LayerNorm,
       ((T, a), (I, shape), (T, weight), (T, bias), (double, eps), (T, out), (T, mean), (T, rstd)),
       {
         auto result = at::native_layer_norm(
             a, shape, weight.defined() ? std::optional<at::Tensor>(weight) : std::nullopt,
             bias.defined() ? std::optional<at::Tensor>(bias) : std::nullopt, eps);
         write(out, std::get<0>(result));
         if (mean.defined()) mean.copy_(std::get<1>(result));
         if (rstd.defined()) rstd.copy_(std::get<2>(result));
       })
KERNEL(RmsNorm, ((T, a), (T, gamma), (double, eps), (T, out), (T, rstd)), {
  auto wide = a.to(at::kFloat);
  auto scale = at::rsqrt(wide.pow(2).mean(-1, true) + eps);
  write(out, (wide * scale * gamma.to(at::kFloat)).to(out.scalar_type()));
  rstd.copy_(scale.reshape(rstd.sizes()));
})
