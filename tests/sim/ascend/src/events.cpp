// Events. An ordinary event counts its records; an external one (ACL_EVENT_EXTERNAL) is a flag that
// may be waited for before it is recorded, the way task updates order a replay.
#include "sim.h"

#include <chrono>
#include <cstring>

using namespace sim;

static std::map<aclrtEvent, std::shared_ptr<Event>>& table =
    *new std::map<aclrtEvent, std::shared_ptr<Event>>;

static std::shared_ptr<Event> event_of(aclrtEvent handle) {
  Lock lock(sim::mutex);
  auto found = table.find(handle);
  return found == table.end() ? nullptr : found->second;
}

static int64_t now() {
  return std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1);
}

static aclError record_external(const std::shared_ptr<Event>& event, Stream* stream) {
  if (countdown("lose_record_in")) {
    report("fault: an external event record was lost");
    return 0;
  }
  return enqueue(stream, Kind::signal, "EventRecord", [event] {
    Lock lock(sim::mutex);
    event->set = true;
    progress.notify_all();
  });
}

extern "C" {

aclError aclrtCreateEventWithFlag(aclrtEvent* out, uint32_t flag) {
  auto event = std::make_shared<Event>();
  event->flag = flag;
  *out = event.get();
  Lock lock(sim::mutex);
  table[*out] = event;
  count("events_created");
  return 0;
}
aclError aclrtCreateEventExWithFlag(aclrtEvent* out, uint32_t flag) {
  return aclrtCreateEventWithFlag(out, flag);
}

aclError aclrtDestroyEvent(aclrtEvent handle) {
  Lock lock(sim::mutex);
  count("events_destroyed");
  return table.erase(handle)
             ? 0
             : fail(ACL_ERROR_RT_PARAM_INVALID, "aclrtDestroyEvent of an unknown event");
}

aclError aclrtRecordEvent(aclrtEvent handle, aclrtStream stream_handle) {
  auto event = event_of(handle);
  auto* stream = stream_of(stream_handle);
  if (!event) return fail(ACL_ERROR_RT_PARAM_INVALID, "aclrtRecordEvent of an unknown event");
  if (event->flag & ACL_EVENT_EXTERNAL) return record_external(event, stream);
  uint64_t turn;
  {
    Lock lock(sim::mutex);
    event->capture.reset();
    if (stream->capture) {
      event->capture = stream->capture;
      event->source = stream;
      event->position = stream->captured;
      return 0;
    }
    turn = ++event->recorded;
  }
  return enqueue(stream, Kind::signal, "EventRecord", [event, turn] {
    Lock lock(sim::mutex);
    if (turn > event->completed) event->completed = turn;
    event->nanoseconds = now();
    progress.notify_all();
  });
}

aclError aclrtStreamWaitEvent(aclrtStream stream_handle, aclrtEvent handle) {
  auto event = event_of(handle);
  auto* stream = stream_of(stream_handle);
  if (!event) return fail(ACL_ERROR_RT_PARAM_INVALID, "aclrtStreamWaitEvent of an unknown event");
  Device& dev = device(stream->device);
  if (event->flag & ACL_EVENT_EXTERNAL)
    return enqueue(stream, Kind::wait, "EventWait", [event, &dev] {
      Lock lock(sim::mutex);
      wait_until(lock, dev, [&] { return event->set; });
    });
  uint64_t turn;
  {
    Lock lock(sim::mutex);
    if (auto model = event->capture.lock()) return join_capture(stream, *event, model);
    if (stream->capture) {
      stream->capture->invalid = "a wait for an event that was recorded outside the capture";
      return fail(ACL_ERROR_RT_CAPTURE_DEPENDENCY, stream->capture->invalid);
    }
    turn = event->recorded;
  }
  return enqueue(stream, Kind::wait, "EventWait", [event, turn, &dev] {
    Lock lock(sim::mutex);
    wait_until(lock, dev, [&] { return event->completed >= turn; });
  });
}

aclError aclrtResetEvent(aclrtEvent handle, aclrtStream stream) {
  auto event = event_of(handle);
  if (!event) return fail(ACL_ERROR_RT_PARAM_INVALID, "aclrtResetEvent of an unknown event");
  return enqueue(stream_of(stream), Kind::signal, "EventReset", [event] {
    Lock lock(sim::mutex);
    event->set = false;
  });
}

aclError aclrtSynchronizeEvent(aclrtEvent handle) {
  if (aclError error = unsafe_call("aclrtSynchronizeEvent")) return error;
  auto event = event_of(handle);
  if (!event) return fail(ACL_ERROR_RT_PARAM_INVALID, "aclrtSynchronizeEvent of an unknown event");
  Device& dev = current_device();
  Lock lock(sim::mutex);
  if (event->capture.lock())
    return fail(ACL_ERROR_RT_EVENT_CAPTURED, "the event belongs to a capture");
  uint64_t turn = event->recorded;
  auto limit = std::chrono::milliseconds(setting("sync_timeout_ms"));
  if (!progress.wait_for(lock, limit, [&] { return event->completed >= turn || dev.error; }))
    return fail(ACL_ERROR_RT_EVENT_SYNC_TIMEOUT, "aclrtSynchronizeEvent timed out");
  return dev.error ? fail(dev.error, dev.error_text) : 0;
}

aclError aclrtQueryEventStatus(aclrtEvent handle, aclrtEventRecordedStatus* status) {
  auto event = event_of(handle);
  if (!event) return fail(ACL_ERROR_RT_PARAM_INVALID, "aclrtQueryEventStatus of an unknown event");
  Lock lock(sim::mutex);
  bool complete = event->completed >= event->recorded || current_device().error;
  *status = complete ? ACL_EVENT_RECORDED_STATUS_COMPLETE : ACL_EVENT_RECORDED_STATUS_NOT_READY;
  return 0;
}
aclError aclrtQueryEventWaitStatus(aclrtEvent, aclrtEventWaitStatus* status) {
  *status = ACL_EVENT_WAIT_STATUS_COMPLETE;
  return 0;
}
aclError aclrtEventElapsedTime(float* milliseconds, aclrtEvent first, aclrtEvent second) {
  auto a = event_of(first), b = event_of(second);
  if (!a || !b)
    return fail(ACL_ERROR_RT_PARAM_INVALID, "aclrtEventElapsedTime of an unknown event");
  *milliseconds = (b->nanoseconds - a->nanoseconds) / 1e6f;
  return 0;
}
aclError aclrtEventGetTimestamp(aclrtEvent handle, uint64_t* microseconds) {
  auto event = event_of(handle);
  if (!event) return fail(ACL_ERROR_RT_PARAM_INVALID, "aclrtEventGetTimestamp of an unknown event");
  *microseconds = event->nanoseconds / 1000;
  return 0;
}
}
