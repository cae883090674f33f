// Matrix products. The last argument of each is the precision of the cube unit, which has no
// meaning here.
#include "kernel.h"

#define PRODUCT(NAME) \
  KERNEL(NAME, ((T, a), (T, b), (T, out), (int8_t, precision)), write(out, at::matmul(a, b)))
PRODUCT(Mm)
PRODUCT(Matmul)
PRODUCT(BatchMatMul)
PRODUCT(Mv)
KERNEL(Dot, ((T, a), (T, b), (T, out)), write(out, at::dot(a, b)))

#define ADDED(NAME, f)                                                                         \
  KERNEL(NAME, ((T, c), (T, a), (T, b), (S, beta), (S, alpha), (T, out), (int8_t, precision)), \
         write(out, f(c, a, b, beta, alpha)))                                                  \
  KERNEL(Inplace##NAME, ((T, c), (T, a), (T, b), (S, beta), (S, alpha), (int8_t, precision)),  \
         write(c, f(c, a, b, beta, alpha)))
ADDED(Addmm, at::addmm)
ADDED(Baddbmm, at::baddbmm)
ADDED(Addbmm, at::addbmm)
KERNEL(Addmv, ((T, c), (T, a), (T, b), (S, alpha), (S, beta), (T, out), (int8_t, precision)),
       write(out, at::addmv(c, a, b, beta, alpha)))
