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
