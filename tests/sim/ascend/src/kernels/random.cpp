// Random numbers: a CPU generator seeded from the seed and offset that torch_npu hands over. Inside
// a graph these live in device tensors that each replay advances, and the kernel reads them when it
// runs.
#include <ATen/CPUGeneratorImpl.h>

#include "kernel.h"

static at::Generator generator(int64_t seed, int64_t offset) {
  return at::detail::createCPUGenerator((uint64_t)seed * 1000003u + (uint64_t)offset);
}
static at::Generator generator(const at::Tensor& seed, const at::Tensor& offset, int64_t within) {
  return generator(seed.item<int64_t>(), offset.item<int64_t>() + within);
}

// Each function twice: with host seeds, and with device seeds for graphs. MIDDLE are its own
// arguments and AFTER those that follow the seed.
#define RANDOM(NAME, MIDDLE, ...)                                                             \
  KERNEL(NAME, ((T, a), SIM_LIST MIDDLE(uint64_t, seed), (uint64_t, offset)), {               \
    auto random = generator((int64_t)seed, (int64_t)offset);                                  \
    __VA_ARGS__;                                                                              \
  })                                                                                          \
  KERNEL(NAME##Tensor, ((T, a), SIM_LIST MIDDLE(T, seed), (T, offset), (uint64_t, within)), { \
    auto random = generator(seed, offset, (int64_t)within);                                   \
    __VA_ARGS__;                                                                              \
  })
RANDOM(InplaceNormal, ((float, mean), (float, std), ), a.normal_(mean, std, random))
RANDOM(InplaceUniform, ((double, low), (double, high), ), a.uniform_(low, high, random))
RANDOM(InplaceRandom, ((int64_t, low), (int64_t, high), ), a.random_(low, high, random))
RANDOM(InplaceRandomWithoutFromTo, (), a.random_(random))

KERNEL(InplaceBernoulli, ((T, a), (S, p), (uint64_t, seed), (uint64_t, offset)),
       a.bernoulli_(p.toDouble(), generator((int64_t)seed, (int64_t)offset)))
KERNEL(InplaceBernoulliTensor, ((T, a), (T, p), (uint64_t, seed), (uint64_t, offset)),
       a.bernoulli_(p, generator((int64_t)seed, (int64_t)offset)))
KERNEL(SimThreadExponential,
       ((T, a), (int64_t, count), (float, lambda), (int64_t, seed), (int64_t, offset)),
       a.exponential_(lambda, generator(seed, offset)))
KERNEL(Multinomial,
       ((T, a), (int64_t, n), (bool, replacement), (int64_t, seed), (int64_t, offset), (T, out)),
       write(out, at::multinomial(a, n, replacement, generator(seed, offset))))
KERNEL(MultinomialTensor,
       ((T, a), (int64_t, n), (bool, replacement), (T, seed), (T, offset), (int64_t, within),
        (T, out)),
       write(out, at::multinomial(a, n, replacement, generator(seed, offset, within))))
KERNEL(NormalFloatFloat,
       ((float, mean), (float, std), (int64_t, seed), (int64_t, offset), (T, out)),
       out.normal_(mean, std, generator(seed, offset)))

// Dropout in two steps: a mask of bits, and its use.
static void draw_mask(const at::Tensor& out, const std::vector<int64_t>& shape, double drop,
                      at::Generator random) {
  int64_t count = 1;
  for (auto size : shape) count *= size;
  auto kept = at::rand({count}, random, at::TensorOptions()).ge(drop);
  auto* bytes = out.data_ptr<uint8_t>();
  TORCH_CHECK(out.numel() * 8 >= count, "a mask of ", out.numel(), " bytes for ", count, " values");
  std::fill_n(bytes, out.numel(), (uint8_t)0);
  auto* bits = kept.data_ptr<bool>();
  for (int64_t i = 0; i < count; i++) bytes[i / 8] |= (uint8_t)(bits[i] << (i % 8));
}
KERNEL(DropoutGenMask, ((I, shape), (double, drop), (int64_t, seed), (int64_t, offset), (T, out)),
       draw_mask(out, shape, drop, generator(seed, offset)))
KERNEL(DropoutGenMaskV2,
       ((I, shape), (double, drop), (int64_t, seed), (int64_t, offset), (int, type), (T, out)),
       draw_mask(out, shape, drop, generator(seed, offset)))
KERNEL(DropoutGenMaskV2Tensor,
       ((I, shape), (double, drop), (T, seed), (T, offset), (int64_t, within), (int, type),
        (T, out)),
       draw_mask(out, shape, drop, generator(seed, offset, within)))
KERNEL(DropoutDoMask, ((T, a), (T, mask), (double, drop), (T, out)), {
  auto* bytes = mask.data_ptr<uint8_t>();
  auto kept = at::empty({a.numel()}, at::kBool);
  for (int64_t i = 0; i < a.numel(); i++) kept.data_ptr<bool>()[i] = bytes[i / 8] >> (i % 8) & 1;
  auto scale = drop < 1 ? 1 / (1 - drop) : 0.0;
  write(out, at::where(kept.view(a.sizes()), a * scale, at::zeros({}, a.options())));
})
