// Fused attention with sequence lengths from the host: npu_fused_infer_attention_score, first and
// second version. The lengths are read when the operator is prepared, as real tiling reads them, so
// a replay keeps them until a task update prepares the operator anew.
#include "kernel.h"

#include <algorithm>
#include <limits>

namespace {

struct Request {
  at::Tensor query, key, value;  // batched as the layout says
  at::Tensor mask, table;        // optional: true hides; block table of a paged cache
  std::vector<int64_t> query_lengths, key_lengths;
  double scale;
  std::string layout;
  int64_t heads, key_heads, sparse_mode, block_size;
};

bool packed(const std::string& layout) {
  return layout.rfind("TND", 0) == 0 || layout.rfind("NTD", 0) == 0;
}

// One sequence's rows as [heads, length, size], a view of the argument.
at::Tensor heads_first(const at::Tensor& whole, const std::string& layout, int64_t heads,
                       int64_t item, int64_t begin, int64_t end) {
  if (layout == "BNSD") return whole[item].slice(1, begin, end);
  if (layout == "BSND") return whole[item].slice(0, begin, end).transpose(0, 1);
  if (layout == "BSH")
    return whole[item].slice(0, begin, end).unflatten(-1, {heads, -1}).transpose(0, 1);
  if (layout == "TND") return whole.slice(0, begin, end).transpose(0, 1);
  if (layout == "NTD") return whole.slice(1, begin, end);
  TORCH_CHECK(false, "attention layout ", layout, " is not simulated");
}

// A paged cache: [blocks, block_size, heads * size] or [blocks, heads, block_size, size].
at::Tensor gather_pages(const at::Tensor& cache, const at::Tensor& table, int64_t item,
                        int64_t length, int64_t heads) {
  int64_t block_size = cache.dim() == 3 ? cache.size(1) : cache.size(2);
  int64_t pages = (length + block_size - 1) / block_size;
  auto used = cache.index_select(0, table[item].slice(0, 0, pages).to(at::kLong));
  auto rows = cache.dim() == 3 ? used.flatten(0, 1).unflatten(-1, {heads, -1}).transpose(0, 1)
                               : used.transpose(0, 1).flatten(1, 2);
  return rows.slice(1, 0, length);
}

// Modes 2 and 3 mask causally without looking at the mask's values; 3 aligns the last rows.
at::Tensor causal(int64_t rows, int64_t columns, int64_t mode) {
  int64_t diagonal = mode == 3 ? columns - rows : 0;
  return at::ones({rows, columns}, at::kBool).triu(diagonal + 1);
}

at::Tensor hidden(const Request& request, int64_t item, int64_t rows, int64_t columns) {
  if (request.sparse_mode == 2 || request.sparse_mode == 3)
    return causal(rows, columns, request.sparse_mode);
  TORCH_CHECK(request.sparse_mode == 0 || request.sparse_mode == 1, "sparse mode ",
              request.sparse_mode, " is not simulated");
  if (!request.mask.defined()) return {};
  auto mask = request.mask.to(at::kBool);
  while (mask.dim() > 2) mask = mask.size(0) == 1 ? mask[0] : mask[item];
  return mask.slice(0, 0, rows).slice(1, 0, columns);
}

void attend_one(const at::Tensor& query, at::Tensor key, at::Tensor value, const at::Tensor& hide,
                double scale, at::Tensor out, at::Tensor log_sum) {
  int64_t repeat = query.size(0) / key.size(0);
  auto wide = [&](at::Tensor t) { return t.to(at::kFloat).repeat_interleave(repeat, 0); };
  auto scores = at::matmul(query.to(at::kFloat), wide(key).transpose(-1, -2)) * scale;
  if (hide.defined()) scores = scores.masked_fill(hide, -std::numeric_limits<float>::infinity());
  auto weights = key.size(1) ? at::softmax(scores, -1).nan_to_num(0)
                             : scores;  // a row with nothing to see is zero
  out.copy_(at::matmul(weights, wide(value)));
  if (log_sum.defined()) log_sum.copy_(at::logsumexp(scores, -1).unsqueeze(-1));
}

void attend(const Request& r, at::Tensor out, at::Tensor log_sum) {
  std::string in = r.layout, result = r.layout;
  if (auto underscore = in.find('_'); underscore != std::string::npos) {
    result = in.substr(underscore + 1);
    in = in.substr(0, underscore);
  }
  int64_t key_heads = r.key_heads ? r.key_heads : r.heads;
  bool pack = packed(in), paged = r.table.defined();
  int64_t items = pack ? (int64_t)r.query_lengths.size() : r.query.size(0);
  int64_t sequence_axis = in == "BNSD" ? 2 : 1;
  auto length = [](const std::vector<int64_t>& all, int64_t item, int64_t whole) {
    return all.empty() ? whole : all[all.size() == 1 ? 0 : item];
  };
  for (int64_t item = 0; item < items; item++) {
    // Packed layouts give running totals of the query lengths, and of the key lengths unless paged.
    int64_t begin = pack && item ? r.query_lengths[item - 1] : 0;
    int64_t end = pack ? r.query_lengths[item]
                       : std::min(length(r.query_lengths, item, r.query.size(sequence_axis)),
                                  r.query.size(sequence_axis));
    int64_t key_begin = pack && !paged && item ? r.key_lengths[item - 1] : 0;
    int64_t key_end = pack || paged ? length(r.key_lengths, item, 0)
                                    : length(r.key_lengths, item, r.key.size(sequence_axis));
    if (end <= begin) continue;
    auto query = heads_first(r.query, in, r.heads, item, begin, end);
    auto key = paged ? gather_pages(r.key, r.table, item, key_end, key_heads)
                     : heads_first(r.key, in, key_heads, item, key_begin, key_end);
    auto value = paged ? gather_pages(r.value, r.table, item, key_end, key_heads)
                       : heads_first(r.value, in, key_heads, item, key_begin, key_end);
    TORCH_CHECK(key.size(1) == key_end - key_begin, "key length ", key_end - key_begin,
                " exceeds the ", key.size(1), " rows there are");
    auto target = heads_first(out, result, r.heads, item, begin, end);
    at::Tensor sums;
    if (log_sum.defined() && log_sum.numel())
      sums =
          pack ? log_sum.slice(0, begin, end).transpose(0, 1) : log_sum[item].slice(1, begin, end);
    attend_one(query, key, value, hidden(r, item, end - begin, key.size(1)), r.scale, target, sums);
  }
}

}  // namespace

#define ATTENTION_INPUTS                                                                           \
  (T, query), (L, keys), (L, values), (T, shift), (T, mask), (I, query_lengths), (I, key_lengths), \
      (T, q1), (T, q2), (T, q3), (T, q4), (T, q5), (T, q6), (T, q7), (T, table),                   \
      (T, query_padding), (T, key_padding), (T, k1), (T, k2), (T, v1), (T, v2), (T, shared_key),   \
      (T, shared_value), (I, shared_length), (T, query_rope), (T, key_rope), (T, rope_scale)
#define ATTENTION_OPTIONS                                                                      \
  (int64_t, heads), (double, scale), (int64_t, before), (int64_t, after), (Text, layout),      \
      (int64_t, key_heads), (int64_t, sparse_mode), (int64_t, precise), (int64_t, block_size), \
      (int64_t, antiquant), (bool, with_sums), (int64_t, key_mode), (int64_t, value_mode)
#define ATTENTION_BODY                                                                        \
  {                                                                                           \
    for (auto& other : {shift, q1, q2, q3, q4, q5, q6, q7, shared_key, query_rope, key_rope}) \
      TORCH_CHECK(!other.defined(),                                                           \
                  "quantised, rotary or shared-prefix attention is not simulated");           \
    Request request{query,         keys.at(0),  values.at(0), mask,   table,                  \
                    query_lengths, key_lengths, scale,        layout, heads,                  \
                    key_heads,     sparse_mode, block_size};                                  \
    attend(request, out, with_sums ? sums : at::Tensor());                                    \
  }

KERNEL(FusedInferAttentionScoreV3, (ATTENTION_INPUTS, ATTENTION_OPTIONS, (T, out), (T, sums)),
       ATTENTION_BODY)
KERNEL(FusedInferAttentionScoreV4,
       (ATTENTION_INPUTS, (T, query_scale), (T, sink), ATTENTION_OPTIONS, (int64_t, query_mode),
        (T, out), (T, sums)),
       ATTENTION_BODY)

// The largest workspace for any length. Real operators return what their tiling may need.
#define MAX_WORKSPACE(NAME, PARAMETERS)                                                       \
  SIM_API int aclnn##NAME##GetMaxWorkspaceSize(                                               \
      SIM_EACH(SIM_DECLARE, SIM_LIST PARAMETERS) uint64_t* bytes, aclOpExecutor** executor) { \
    *bytes = 1024;                                                                            \
    *executor = new aclOpExecutor{#NAME, {}, {}};                                             \
    return 0;                                                                                 \
  }
MAX_WORKSPACE(FusedInferAttentionScoreV3,
              (ATTENTION_INPUTS, ATTENTION_OPTIONS, (T, out), (T, sums)))
MAX_WORKSPACE(FusedInferAttentionScoreV4,
              (ATTENTION_INPUTS, (T, query_scale), (T, sink), ATTENTION_OPTIONS,
               (int64_t, query_mode), (T, out), (T, sums)))

// What torch's scaled_dot_product_attention becomes: no lengths, a mask whose true elements are
// hidden.
KERNEL(FlashAttentionScore,
       ((T, query), (T, key), (T, value), (T, shift), (T, drop), (T, padding), (T, mask),
        (I, prefix), (double, scale), (double, keep), (int64_t, before), (int64_t, after),
        (int64_t, heads), (Text, layout), (int64_t, precise), (int64_t, sparse_mode), (T, row_max),
        (T, row_sum), (T, weights), (T, out)),
       {
         TORCH_CHECK(!shift.defined() && !drop.defined() && keep == 1.0,
                     "attention with dropout or shift is not simulated");
         int64_t key_heads = layout == "BNSD" ? key.size(1) : layout == "BSND" ? key.size(2) : 0;
         Request request{query, key,    value, mask,      {},          {}, {},
                         scale, layout, heads, key_heads, sparse_mode, 0};
         attend(request, out, {});
       })
