// Waiting for a value in device memory. On a driver that has these two functions an external event
// is 32 bytes of memory: wait waits for 1 and writes 0 back, record writes 1, reset does nothing.
// The "flags" variant of the driver is linked without this file and so behaves like an older one.
#include "sim.h"

using namespace sim;

extern "C" {

aclError aclrtValueWait(void* address, uint64_t value, uint32_t flag, aclrtStream handle) {
  auto* stream = stream_of(handle);
  Device& dev = device(stream->device);
  return enqueue(stream, Kind::wait, "ValueWait", [address, value, flag, &dev] {
    require_mapped(address, sizeof(uint64_t), "ValueWait");
    count("value_waits");
    Lock lock(sim::mutex);
    wait_until(lock, dev, [&] {
      uint64_t word = *(volatile uint64_t*)address;
      return flag == 1 ? word == value : int64_t(word - value) >= 0;  // EQ, else GEQ
    });
  });
}

aclError aclrtValueWrite(void* address, uint64_t value, uint32_t, aclrtStream handle) {
  if (value == 1 && countdown("lose_record_in")) {
    report("fault: an external event record was lost");
    return 0;
  }
  return enqueue(stream_of(handle), Kind::signal, "ValueWrite", [address, value] {
    require_mapped(address, sizeof(uint64_t), "ValueWrite");
    Lock lock(sim::mutex);
    *(volatile uint64_t*)address = value;
    progress.notify_all();
  });
}
}
