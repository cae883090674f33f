// Device memory is host memory, poisoned when it is allocated and tracked so that a task that
// touches freed memory fails by name instead of corrupting something.
#include "sim.h"

#include <sys/mman.h>

#include <cstdlib>
#include <cstring>
#include <stdexcept>

namespace {
struct Block {
  size_t bytes;
  int device;
};
std::mutex& table_mutex = *new std::mutex;
std::map<uintptr_t, Block>& table = *new std::map<uintptr_t, Block>;

const std::pair<const uintptr_t, Block>* find_block(const void* address) {
  auto after = table.upper_bound((uintptr_t)address);
  if (after == table.begin()) return nullptr;
  auto& block = *std::prev(after);
  return (uintptr_t)address < block.first + block.second.bytes ? &block : nullptr;
}

void* host_allocate(size_t bytes) { return aligned_alloc(512, (bytes + 1023) / 512 * 512); }

// Large blocks are mapped, so that they are given back when they are freed: the heap would keep
// them, and grow when they are freed in another order than they were taken.
constexpr size_t mapped_from = 1 << 20;

void* device_allocate(size_t bytes) {
  if (bytes < mapped_from) return host_allocate(bytes);
  void* out = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  return out == MAP_FAILED ? nullptr : out;
}

void device_free(void* address, size_t bytes) {
  if (bytes < mapped_from)
    free(address);
  else
    munmap(address, bytes);
}
}  // namespace

namespace sim {

void require_mapped(const void* address, size_t bytes, const char* what) {
  if (bytes == 0) return;
  Lock lock(table_mutex);
  auto* block = find_block(address);
  if (!block || (uintptr_t)address + bytes > block->first + block->second.bytes)
    throw std::runtime_error(std::string(what) + " touches " + std::to_string(bytes) +
                             " bytes that are not device memory (freed, or host memory)");
}

}  // namespace sim

using namespace sim;

static aclError allocate(void** out, size_t bytes) {
  Device& dev = current_device();
  Lock lock(table_mutex);
  if (countdown("fail_malloc_in") || dev.memory + bytes > (size_t)setting("memory_mb") << 20)
    return fail(ACL_ERROR_RT_MEMORY_ALLOCATION, "device memory: " + std::to_string(bytes) +
                                                    " bytes asked, " + std::to_string(dev.memory) +
                                                    " in use");
  *out = device_allocate(bytes);
  if (!*out)
    return fail(ACL_ERROR_RT_MEMORY_ALLOCATION,
                "the host has no memory left for the simulated device");
  memset(*out, 0xFF, bytes);  // NaN in every float format, -1 in every integer
  table[(uintptr_t)*out] = Block{bytes, dev.index};
  dev.memory += bytes;
  count("device_bytes", (int64_t)bytes);
  count("mallocs");
  return 0;
}

extern "C" {

aclError aclrtMalloc(void** out, size_t bytes, aclrtMemMallocPolicy) {
  return allocate(out, bytes);
}
aclError aclrtMallocAlign32(void** out, size_t bytes, aclrtMemMallocPolicy) {
  return allocate(out, bytes);
}

aclError aclrtFree(void* address) {
  if (aclError error = unsafe_call("aclrtFree")) return error;
  size_t bytes;
  {
    Lock lock(table_mutex);
    auto found = table.find((uintptr_t)address);
    if (found == table.end())
      return fail(ACL_ERROR_RT_PARAM_INVALID, "aclrtFree of an unknown address");
    bytes = found->second.bytes;
    device(found->second.device).memory -= bytes;
    count("device_bytes", -(int64_t)bytes);
    table.erase(found);
  }
  device_free(address, bytes);
  return 0;
}

aclError aclrtMallocHost(void** out, size_t bytes) {
  *out = host_allocate(bytes);
  return *out ? 0 : ACL_ERROR_RT_MEMORY_ALLOCATION;
}
aclError aclrtMallocHostWithCfg(void** out, uint64_t bytes, aclrtMallocConfig*) {
  return aclrtMallocHost(out, bytes);
}
aclError aclrtFreeHost(void* address) {
  free(address);
  return 0;
}

aclError aclrtPointerGetAttributes(const void* address, aclrtPtrAttributes* out) {
  memset(out, 0, sizeof *out);
  Lock lock(table_mutex);
  out->location.type =
      find_block(address) ? ACL_MEM_LOCATION_TYPE_DEVICE : ACL_MEM_LOCATION_TYPE_UNREGISTERED;
  return 0;
}

aclError aclrtGetMemInfo(aclrtMemAttr, size_t* available, size_t* total) {
  *total = (size_t)setting("memory_mb") << 20;
  size_t used = current_device().memory;
  *available = used < *total ? *total - used : 0;
  return 0;
}

aclError aclrtMemcpy(void* to, size_t, const void* from, size_t bytes, aclrtMemcpyKind) {
  if (aclError error = unsafe_call("aclrtMemcpy")) return error;
  memcpy(to, from, bytes);
  return 0;
}
aclError aclrtMemset(void* to, size_t, int32_t value, size_t bytes) {
  if (aclError error = unsafe_call("aclrtMemset")) return error;
  memset(to, value, bytes);
  return 0;
}

aclError aclrtMemcpyAsync(void* to, size_t, const void* from, size_t bytes, aclrtMemcpyKind kind,
                          aclrtStream stream) {
  return enqueue(stream_of(stream), Kind::copy, "MemcpyAsync", [=] {
    if (kind == ACL_MEMCPY_DEVICE_TO_DEVICE || kind == ACL_MEMCPY_DEVICE_TO_HOST)
      require_mapped(from, bytes, "MemcpyAsync");
    if (kind == ACL_MEMCPY_DEVICE_TO_DEVICE || kind == ACL_MEMCPY_HOST_TO_DEVICE)
      require_mapped(to, bytes, "MemcpyAsync");
    memmove(to, from, bytes);
  });
}
aclError aclrtMemcpyAsyncWithCondition(void* to, size_t room, const void* from, size_t bytes,
                                       aclrtMemcpyKind kind, aclrtStream stream) {
  return aclrtMemcpyAsync(to, room, from, bytes, kind, stream);
}
aclError aclrtMemsetAsync(void* to, size_t, int32_t value, size_t bytes, aclrtStream stream) {
  return enqueue(stream_of(stream), Kind::copy, "MemsetAsync", [=] {
    require_mapped(to, bytes, "MemsetAsync");
    memset(to, value, bytes);
  });
}
}
