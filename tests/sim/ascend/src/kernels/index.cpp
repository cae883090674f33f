// Making, joining, indexing and scattering.
#include "kernel.h"

KERNEL(Arange, ((S, start), (S, end), (S, step), (T, out)),
       write(out, at::arange(start, end, step, out.options())))
KERNEL(Range, ((S, start), (S, end), (S, step), (T, out)),
       write(out, at::range(start, end, step, out.options())))
KERNEL(Linspace, ((S, start), (S, end), (int64_t, steps), (T, out)),
       write(out, at::linspace(start, end, steps, out.options())))
KERNEL(Eye, ((int64_t, n), (int64_t, m), (T, out)), write(out, at::eye(n, m, out.options())))
KERNEL(Cat, ((L, tensors), (int64_t, dim), (T, out)), write(out, at::cat(tensors, dim)))
KERNEL(Stack, ((L, tensors), (int64_t, dim), (T, out)), write(out, at::stack(tensors, dim)))
KERNEL(Repeat, ((T, a), (I, repeats), (T, out)), write(out, a.repeat(repeats)))
KERNEL(Flip, ((T, a), (I, dims), (T, out)), write(out, at::flip(a, dims)))
KERNEL(Roll, ((T, a), (I, shifts), (I, dims), (T, out)), write(out, at::roll(a, shifts, dims)))
KERNEL(Permute, ((T, a), (I, dims), (T, out)), write(out, at::permute(a, dims)))
KERNEL(ConstantPadNd, ((T, a), (I, pad), (S, value), (T, out)),
       write(out, at::constant_pad_nd(a, pad, value)))
KERNEL(Tril, ((T, a), (int64_t, diagonal), (T, out)), write(out, at::tril(a, diagonal)))
KERNEL(Triu, ((T, a), (int64_t, diagonal), (T, out)), write(out, at::triu(a, diagonal)))
KERNEL(InplaceTril, ((T, a), (int64_t, diagonal)), write(a, at::tril(a, diagonal)))
KERNEL(InplaceTriu, ((T, a), (int64_t, diagonal)), write(a, at::triu(a, diagonal)))
KERNEL(RepeatInterleaveInt, ((T, a), (int64_t, n), (int64_t, size), (T, out)),
       write(out, at::repeat_interleave(a, n)))
KERNEL(RepeatInterleaveIntWithDim,
       ((T, a), (int64_t, n), (int64_t, dim), (int64_t, size), (T, out)),
       write(out, at::repeat_interleave(a, n, dim)))
KERNEL(RepeatInterleave, ((T, a), (T, n), (int64_t, size), (T, out)),
       write(out, at::repeat_interleave(a, n)))
KERNEL(RepeatInterleaveWithDim, ((T, a), (T, n), (int64_t, dim), (int64_t, size), (T, out)),
       write(out, at::repeat_interleave(a, n, dim)))
KERNEL(RepeatInterleaveTensor, ((T, n), (int64_t, size), (T, out)),
       write(out, at::repeat_interleave(n)))
KERNEL(StridedSlice,
       ((T, a), (I, begin), (I, end), (I, step), (int64_t, m1), (int64_t, m2), (int64_t, m3),
        (int64_t, m4), (int64_t, m5), (T, out)),
       {
         auto view = a;
         for (size_t axis = 0; axis < begin.size(); axis++)
           view = view.slice(axis, begin[axis], end[axis], step[axis]);
         write(out, view);
       })

KERNEL(Embedding, ((T, weight), (T, indices), (T, out)), write(out, at::embedding(weight, indices)))
KERNEL(IndexSelect, ((T, a), (int64_t, dim), (T, index), (T, out)),
       write(out, at::index_select(a, dim, index)))
KERNEL(GatherV3, ((T, a), (int64_t, dim), (T, index), (int64_t, batch), (int64_t, mode), (T, out)),
       {
         TORCH_CHECK(batch == 0, "GatherV3 with batch dimensions is not simulated");
         write(out, at::index_select(a, dim, index.reshape({-1})).reshape(out.sizes()));
       })
KERNEL(Gather, ((T, a), (int64_t, dim), (T, index), (T, out)),
       write(out, at::gather(a, dim, index.to(at::kLong))))
KERNEL(OneHot, ((T, a), (int64_t, depth), (T, on), (T, off), (int64_t, axis), (T, out)), {
  auto hit = a.unsqueeze(-1) == at::arange(depth, a.options());
  write(out, at::where(hit, on.reshape({}), off.reshape({})));
})
KERNEL(Take, ((T, a), (T, index), (T, out)), write(out, at::take(a, index)))

static c10::List<std::optional<at::Tensor>> optional_list(const std::vector<at::Tensor>& indices) {
  c10::List<std::optional<at::Tensor>> out;
  for (auto& index : indices) {
    bool given = index.defined() && !(index.numel() == 0 && index.dim() == 1 && indices.size() > 1);
    out.push_back(given ? std::optional<at::Tensor>(index) : std::nullopt);
  }
  return out;
}
KERNEL(Index, ((T, a), (L, indices), (T, out)), write(out, at::index(a, optional_list(indices))))
KERNEL(IndexPutImpl, ((T, a), (L, indices), (T, value), (bool, accumulate), (bool, unchecked)),
       at::_index_put_impl_(a, optional_list(indices), value, accumulate, false))
KERNEL(IndexAdd, ((T, a), (int64_t, dim), (T, index), (T, source), (S, alpha), (T, out)),
       write(out, at::index_add(a, dim, index, source, alpha)))
KERNEL(IndexAddV2,
       ((T, a), (int64_t, dim), (T, index), (T, source), (S, alpha), (int64_t, mode), (T, out)),
       write(out, at::index_add(a, dim, index, source, alpha)))
KERNEL(IndexCopy, ((T, a), (int64_t, dim), (T, index), (T, source), (T, out)),
       write(out, at::index_copy(a, dim, index, source)))
KERNEL(InplaceIndexCopy, ((T, a), (int64_t, dim), (T, index), (T, source)),
       a.index_copy_(dim, index, source))
KERNEL(IndexFillTensor, ((T, a), (int64_t, dim), (I, index), (S, value), (T, out)),
       write(out, at::index_fill(a, dim, at::tensor(index, at::kLong), value)))
KERNEL(InplaceIndexFillTensor, ((T, a), (int64_t, dim), (I, index), (S, value)),
       a.index_fill_(dim, at::tensor(index, at::kLong), value))
KERNEL(IndexFill, ((T, a), (int64_t, dim), (T, index), (S, value), (T, out)),
       write(out, at::index_fill(a, dim, index, value)))
KERNEL(InplaceIndexFill, ((T, a), (int64_t, dim), (T, index), (S, value)),
       a.index_fill_(dim, index, value))

// Reduction codes of scatter: 0 replaces, 1 adds, 2 multiplies.
static at::Tensor scatter(const at::Tensor& a, int64_t dim, const at::Tensor& index,
                          const at::Tensor& source, int64_t reduction) {
  auto where = index.to(at::kLong);
  if (reduction == 0) return at::scatter(a, dim, where, source);
  return at::scatter(a, dim, where, source, reduction == 1 ? "add" : "multiply");
}
static at::Tensor scatter(const at::Tensor& a, int64_t dim, const at::Tensor& index,
                          const at::Scalar& value, int64_t reduction) {
  auto where = index.to(at::kLong);
  if (reduction == 0) return at::scatter(a, dim, where, value);
  return at::scatter(a, dim, where, value, reduction == 1 ? "add" : "multiply");
}
KERNEL(Scatter, ((T, a), (int64_t, dim), (T, index), (T, source), (int64_t, reduction), (T, out)),
       write(out, scatter(a, dim, index, source, reduction)))
KERNEL(InplaceScatter, ((T, a), (int64_t, dim), (T, index), (T, source), (int64_t, reduction)),
       write(a, scatter(a, dim, index, source, reduction)))
KERNEL(ScatterValue,
       ((T, a), (int64_t, dim), (T, index), (S, value), (int64_t, reduction), (T, out)),
       write(out, scatter(a, dim, index, value, reduction)))
KERNEL(InplaceScatterValue, ((T, a), (int64_t, dim), (T, index), (S, value), (int64_t, reduction)),
       write(a, scatter(a, dim, index, value, reduction)))
KERNEL(ScatterAdd, ((T, a), (int64_t, dim), (T, index), (T, source), (T, out)),
       write(out, at::scatter_add(a, dim, index.to(at::kLong), source)))
KERNEL(InplaceMaskedScatter, ((T, a), (T, mask), (T, source)),
       a.masked_scatter_(mask.to(at::kBool), source))

static void write_shaped(Shaped out, const at::Tensor& result) {
  out->shape = result.sizes().vec();
  out->tensor.flatten().narrow(0, 0, result.numel()).copy_(result.flatten());
}
KERNEL(Nonzero, ((T, a), (Shaped, out)), write_shaped(out, at::nonzero(a)))
KERNEL(NonzeroV2, ((T, a), (Shaped, out)), write_shaped(out, at::nonzero(a).t().contiguous()))
KERNEL(MaskedSelect, ((T, a), (T, mask), (Shaped, out)),
       write_shaped(out, at::masked_select(a, mask.to(at::kBool))))
KERNEL(Unique2,
       ((T, a), (bool, sorted), (bool, with_inverse), (bool, with_counts), (Shaped, out),
        (Shaped, inverse), (Shaped, counts)),
       {
         auto [values, places, numbers] = at::_unique2(a, true, with_inverse, with_counts);
         write_shaped(out, values);
         if (with_inverse) write_shaped(inverse, places);
         if (with_counts) write_shaped(counts, numbers);
       })
KERNEL(IsInScalarTensor, ((S, a), (T, b), (bool, unique), (bool, invert), (T, out)),
       write(out, at::isin(a, b, unique, invert).reshape(out.sizes())))
KERNEL(IsInTensorScalar, ((T, a), (S, b), (bool, unique), (bool, invert), (T, out)),
       write(out, at::isin(a, b, unique, invert)))
