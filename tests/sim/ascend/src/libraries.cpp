// What the simulated HCCL, a library of its own, asks of the driver.
#include "hccl/fakeacl.h"

#include "sim.h"

using namespace sim;

extern "C" {
int fakeacl_enqueue(void* stream, const char* name, void (*fn)(void*), void* arg, void (*del)(void*)) {
  std::shared_ptr<void> hold(arg, del);
  return enqueue(stream_of(stream), Kind::kernel, name, [fn, hold] { fn(hold.get()); });
}
int fakeacl_error(int code, const char* text) { return fail(code, text); }
void fakeacl_fail(void* stream, int code, const char* text) {
  fail_device(device(stream_of(stream)->device), code, text);
}
int fakeacl_failed(void* stream) { return device(stream_of(stream)->device).error; }
}
