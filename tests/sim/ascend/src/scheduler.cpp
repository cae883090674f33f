// Streams: a worker thread each, tasks in order, synchronization with a timeout.
#include "sim.h"

#include <chrono>
#include <cstdarg>
#include <cstdio>
#include <stdexcept>

namespace sim {

std::mutex& mutex = *new std::mutex;
std::condition_variable& progress = *new std::condition_variable;
std::atomic<bool> tracing{false};

void trace(const char* format, ...) {
  if (!tracing) return;
  char text[512];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  fprintf(stderr, "[fakeacl] %s\n", text);
}

void perform(Device& dev, Kind kind, const std::string& name, const Work& work) {
  // A failed device drains its queues without computing, so that nothing waits for it for ever.
  if (dev.error && kind != Kind::signal && kind != Kind::host) return;
  try {
    if (kind == Kind::kernel && countdown("fail_kernel_in"))
      throw std::runtime_error("injected failure");
    work();
    if (kind == Kind::kernel) count("kernels");
  } catch (const std::exception& problem) {
    std::string what = problem.what();
    what = what.substr(0, what.find("\nException raised from"));  // without ATen's backtrace
    fail_device(dev, ACL_ERROR_RT_AICORE_EXCEPTION, name + ": " + what);
  }
}

static void run_worker(Stream* stream) {
  Device& dev = device(stream->device);
  Lock lock(mutex);
  for (;;) {
    stream->wake.wait(lock, [&] { return stream->stop || !stream->queue.empty(); });
    if (stream->queue.empty()) return;
    Task task = std::move(stream->queue.front());
    stream->queue.pop_front();
    lock.unlock();
    trace("s%d run %s", stream->id, task.name.c_str());
    perform(dev, task.kind, task.name, task.work);
    task.work = nullptr;  // what the task owned is freed before it counts as done
    lock.lock();
    stream->done++;
    progress.notify_all();
  }
}

// Older drivers say 207005 and "Alloc sq cq fail" where newer ones say 207008.
static aclError no_stream(const std::string& why) {
  auto code = (aclError)setting("fail_stream_code");
  bool old = code == ACL_ERROR_RT_RESOURCE_ALLOC_FAIL;
  return fail(code, (old ? "[SqCqManage]Alloc sq cq fail, resource alloc fail: "
                         : "driver error: no stream resource: ") +
                        why);
}

aclError take_hardware_stream(Device& dev) {
  if (countdown("fail_stream_in")) return no_stream("injected");
  if (dev.hardware_streams >= setting("streams"))
    return no_stream("all " + std::to_string(setting("streams")) + " of device " +
                     std::to_string(dev.index) + " are taken");
  dev.hardware_streams++;
  return 0;
}

static aclError create_stream(Device& dev, Stream** out) {
  Lock lock(mutex);
  if (aclError error = take_hardware_stream(dev)) return error;
  static int next_id = 1;
  auto* stream = new Stream{};
  stream->id = next_id++;
  stream->device = dev.index;
  dev.streams.push_back(stream);
  std::thread(run_worker, stream).detach();
  count("streams_created");
  *out = stream;
  return 0;
}

Stream* stream_of(aclrtStream handle) {
  if (handle) return (Stream*)handle;
  Device& dev = current_device();
  {
    Lock lock(mutex);
    if (dev.default_stream) return dev.default_stream;
  }
  create_stream(dev, &dev.default_stream);
  return dev.default_stream;
}

// Inside an update only kernels of the captured sequence are accepted, one by one.
static aclError enqueue_update(Stream* stream, Kind kind, const std::string& name, Work work) {
  auto refuse = [&](aclError code, const std::string& text) {
    stream->update_failed = true;
    return fail(code, "task update: " + text);
  };
  auto& nodes = stream->update->nodes;
  if (kind != Kind::kernel)
    return refuse(ACL_ERROR_RT_FEATURE_NOT_SUPPORT_UPDATE_OP, name + " cannot be updated");
  if (stream->updated >= nodes.size())
    return refuse(
        ACL_ERROR_RT_MODEL_UPDATE_FAILED,
        "more tasks than the " + std::to_string(nodes.size()) + " captured, the first is " + name);
  Node* node = nodes[stream->updated];
  if (node->name != name)
    return refuse(ACL_ERROR_RT_MODEL_UPDATE_FAILED,
                  "kernel " + name + " where " + node->name + " was captured");
  stream->updated++;
  auto fresh = std::make_shared<Work>(std::move(work));
  auto owner = stream->update_model;
  Device& dev = device(stream->device);
  stream->queue.push_back(Task{Kind::signal, "update " + name, [owner, node, fresh, &dev] {
                                 wait_while(dev, "hold_updates");
                                 if (int64_t delay = setting("update_delay_ms"))
                                   std::this_thread::sleep_for(std::chrono::milliseconds(delay));
                                 std::shared_ptr<Work> old;  // destroyed without the lock
                                 Lock lock(mutex);
                                 old = std::move(node->work);
                                 node->work = fresh;
                                 lock.unlock();
                                 count("task_updates");
                               }});
  return 0;
}

aclError enqueue(Stream* stream, Kind kind, std::string name, Work work) {
  Lock lock(mutex);
  if (stream->update) {
    if (aclError error = enqueue_update(stream, kind, name, std::move(work))) return error;
  } else if (stream->capture) {
    auto& model = *stream->capture;
    model.nodes.push_back(Node{kind, name, std::make_shared<Work>(std::move(work)), stream->id});
    if (stream->group) stream->group->nodes.push_back(&model.nodes.back());
    stream->captured++;
    stream->joined = stream == model.origin;
    count("captured_nodes");
    trace("s%d capture %s (model %u)", stream->id, name.c_str(), model.id);
    return 0;
  } else {
    stream->queue.push_back(Task{kind, std::move(name), std::move(work)});
  }
  stream->queued++;
  count("tasks");
  stream->wake.notify_one();
  return 0;
}

aclError launch(aclrtStream handle, const char* kernel, Work work) {
  return enqueue(stream_of(handle), Kind::kernel, kernel, std::move(work));
}

void wait_until(Lock& lock, Device& dev, const std::function<bool()>& ready) {
  progress.wait(lock, [&] { return ready() || dev.error != 0; });
}

aclError synchronize(Stream* stream, const char* what, int timeout_ms, bool skip_capturing) {
  Device& dev = device(stream->device);
  Lock lock(mutex);
  if (stream->capture && skip_capturing) return 0;
  if (stream->capture) {
    stream->capture->invalid = std::string(what) + " on a capturing stream";
    return fail(ACL_ERROR_RT_STREAM_CAPTURED,
                "not allowed to synchronize a captured stream: " + std::string(what));
  }
  uint64_t target = stream->queued;
  auto limit = std::chrono::milliseconds(timeout_ms >= 0 ? timeout_ms : setting("sync_timeout_ms"));
  if (!progress.wait_for(lock, limit, [&] { return stream->done >= target || dev.error; }))
    return fail(ACL_ERROR_RT_STREAM_SYNC_TIMEOUT, std::string(what) + " timed out: stream " +
                                                      std::to_string(stream->id) + " is blocked");
  if (dev.error) return fail(dev.error, dev.error_text);
  return 0;
}

}  // namespace sim

using namespace sim;

extern "C" {

aclError aclrtCreateStreamWithConfig(aclrtStream* out, uint32_t, uint32_t) {
  return create_stream(current_device(), (Stream**)out);
}
aclError aclrtCreateStream(aclrtStream* out) { return aclrtCreateStreamWithConfig(out, 0, 0); }

aclError aclrtDestroyStream(aclrtStream handle) {
  auto* stream = stream_of(handle);
  Device& dev = device(stream->device);
  Lock lock(mutex);
  stream->stop = true;
  dev.hardware_streams--;
  std::erase(dev.streams, stream);
  count("streams_destroyed");
  stream->wake.notify_one();
  return 0;  // the Stream itself stays: its worker may still be draining it
}
aclError aclrtDestroyStreamForce(aclrtStream handle) { return aclrtDestroyStream(handle); }

aclError aclrtSynchronizeStream(aclrtStream handle) {
  return synchronize(stream_of(handle), "aclrtSynchronizeStream", -1, false);
}
aclError aclrtSynchronizeStreamWithTimeout(aclrtStream handle, int32_t timeout_ms) {
  return synchronize(stream_of(handle), "aclrtSynchronizeStreamWithTimeout", timeout_ms, false);
}

aclError aclrtSynchronizeDeviceWithTimeout(int32_t timeout_ms) {
  if (aclError error = unsafe_call("aclrtSynchronizeDevice")) return error;
  Device& dev = current_device();
  std::vector<Stream*> streams;
  {
    Lock lock(mutex);
    streams = dev.streams;
  }
  for (auto* stream : streams)
    if (aclError error = synchronize(stream, "aclrtSynchronizeDevice", timeout_ms, true))
      return error;
  return 0;
}
aclError aclrtSynchronizeDevice() { return aclrtSynchronizeDeviceWithTimeout(-1); }

aclError aclrtStreamQuery(aclrtStream handle, aclrtStreamStatus* status) {
  auto* stream = stream_of(handle);
  Lock lock(mutex);
  if (stream->capture)
    return fail(ACL_ERROR_RT_STREAM_CAPTURED, "aclrtStreamQuery on a capturing stream");
  *status =
      stream->done >= stream->queued ? ACL_STREAM_STATUS_COMPLETE : ACL_STREAM_STATUS_NOT_READY;
  return 0;
}
aclError aclrtStreamGetId(aclrtStream handle, int32_t* id) {
  *id = stream_of(handle)->id;
  return 0;
}

// Host functions run on the stream's worker; callbacks wait for a subscribed host thread.
aclError aclrtLaunchHostFunc(aclrtStream handle, aclrtHostFunc function, void* data) {
  return enqueue(stream_of(handle), Kind::host, "HostFunc", [=] { function(data); });
}

static std::deque<Work>& reports = *new std::deque<Work>;

aclError aclrtSubscribeReport(uint64_t, aclrtStream) { return 0; }
aclError aclrtUnSubscribeReport(uint64_t, aclrtStream) { return 0; }
aclError aclrtProcessReport(int32_t timeout_ms) {
  Work work;
  {
    Lock lock(mutex);
    auto limit = std::chrono::milliseconds(timeout_ms);
    if (!progress.wait_for(lock, limit, [] { return !reports.empty(); }))
      return ACL_ERROR_RT_REPORT_TIMEOUT;
    work = std::move(reports.front());
    reports.pop_front();
  }
  work();
  return 0;
}
aclError aclrtLaunchCallback(aclrtCallback function, void* data, aclrtCallbackBlockType,
                             aclrtStream handle) {
  auto* stream = stream_of(handle);
  Device& dev = device(stream->device);
  return enqueue(stream, Kind::host, "Callback", [=, &dev] {
    auto finished = std::make_shared<bool>(false);
    Lock lock(mutex);
    reports.push_back([=] {
      function(data);
      Lock inner(mutex);
      *finished = true;
      progress.notify_all();
    });
    progress.notify_all();
    wait_until(lock, dev, [&] { return *finished; });
  });
}
}
