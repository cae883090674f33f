// Only for a CUDA build of torch: its allocator and torch_npu's register options of the same names,
// and the second registration throws. This forgets the first ones while the library is loaded.
#include <string>
#include <unordered_set>

namespace c10::CachingAllocator {
class AcceleratorAllocatorConfig {
 public:
  static std::unordered_set<std::string>& getMutableKeys();
};
}  // namespace c10::CachingAllocator

__attribute__((constructor)) static void forget_options() {
  auto& keys = c10::CachingAllocator::AcceleratorAllocatorConfig::getMutableKeys();
  for (const char* name :
       {"pinned_reserve_segment_size_mb", "per_process_memory_fraction",
        "release_lock_on_hipmalloc", "release_lock_on_cudamalloc", "pinned_use_cuda_host_register",
        "pinned_use_hip_host_register", "pinned_num_register_threads", "backend",
        "throw_on_cudamalloc_oom", "graph_capture_record_stream_reuse"})
    keys.erase(name);
}
