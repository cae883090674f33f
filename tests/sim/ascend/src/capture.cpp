// Capture: which calls it forbids to whom, which streams it holds, how it ends.
#include "sim.h"

namespace sim {

static std::set<std::shared_ptr<Model>>& capturing = *new std::set<std::shared_ptr<Model>>;
static std::map<aclmdlRI, std::shared_ptr<Model>>& models =
    *new std::map<aclmdlRI, std::shared_ptr<Model>>;
static thread_local aclmdlRICaptureMode thread_mode = ACL_MODEL_RI_CAPTURE_MODE_GLOBAL;
static uint32_t next_model = 1;

std::shared_ptr<Model> model_of(aclmdlRI handle) {
  Lock lock(mutex);
  auto found = models.find(handle);
  return found == models.end() ? nullptr : found->second;
}

// A thread in global mode is stopped by its own capture and by global captures of other threads, a
// thread in thread_local mode by its own, a thread in relaxed mode by none.
static bool forbids(const Model& model) {
  if (thread_mode == ACL_MODEL_RI_CAPTURE_MODE_RELAXED ||
      model.mode == ACL_MODEL_RI_CAPTURE_MODE_RELAXED)
    return false;
  if (model.thread == std::this_thread::get_id()) return true;
  return thread_mode == ACL_MODEL_RI_CAPTURE_MODE_GLOBAL &&
         model.mode == ACL_MODEL_RI_CAPTURE_MODE_GLOBAL;
}

aclError unsafe_call(const char* what) {
  Lock lock(mutex);
  for (auto& model : capturing) {
    if (!forbids(*model)) continue;
    model->invalid = what;
    return fail(ACL_ERROR_RT_CAPTURE_MODE_NOT_SUPPORT,
                std::string(what) + ": the current capture mode does not support this operation");
  }
  return 0;
}

static void enter(Stream* stream, const std::shared_ptr<Model>& model) {
  stream->capture = model;
  stream->captured = 0;
  stream->joined = stream == model->origin;
  model->streams.insert(stream);
}

aclError join_capture(Stream* stream, const Event& event, const std::shared_ptr<Model>& model) {
  if (event.position == event.source->captured) event.source->joined = true;
  if (!stream->capture) {
    if (aclError error = take_hardware_stream(device(model->device))) {
      model->invalid = "a joining stream found no hardware stream";
      return error;
    }
    model->hardware_streams++;
    enter(stream, model);
  } else if (stream->capture != model) {
    model->invalid = stream->capture->invalid = "two captures depend on each other";
    return fail(ACL_ERROR_STREAM_CAPTURE_CONFLICT, model->invalid);
  }
  event.source->joined |= event.source == model->origin;
  if (stream != model->origin) stream->joined = false;
  return 0;
}

static void release_streams(Model& model) {
  device(model.device).hardware_streams -= model.hardware_streams;
  model.hardware_streams = 0;
}

// The reason why a capture cannot end well, if there is one.
static aclError defect(Model& model, const std::string** text) {
  static const std::string unjoined =
      "the capture contains a stream that was not joined to the original stream";
  static const std::string open_group = "a task group is still open";
  *text = &model.invalid;
  if (!model.invalid.empty()) return ACL_ERROR_RT_STREAM_CAPTURED;
  for (auto* stream : model.streams) {
    *text = &open_group;
    if (stream->group) return ACL_ERROR_STREAM_TASK_GROUP_INTR;
    *text = &unjoined;
    if (!stream->joined) return ACL_ERROR_RT_STREAM_UNJOINED;
  }
  return 0;
}

std::string graphs_json() {
  Lock lock(mutex);
  std::string out = "[";
  for (auto& [handle, model] : models) {
    if (out.size() > 1) out += ",";
    out += "{\"id\":" + std::to_string(model->id) + ",\"device\":" + std::to_string(model->device) +
           ",\"nodes\":" + std::to_string(model->nodes.size()) +
           ",\"task_groups\":" + std::to_string(model->groups.size()) +
           ",\"streams\":" + std::to_string(model->hardware_streams) +
           ",\"replays\":" + std::to_string(model->replays) + "}";
  }
  return out + "]";
}

}  // namespace sim

using namespace sim;

extern "C" {

aclError aclmdlRICaptureBegin(aclrtStream handle, aclmdlRICaptureMode mode) {
  auto* stream = stream_of(handle);
  Device& dev = device(stream->device);
  Lock lock(sim::mutex);
  if (!handle || stream == dev.default_stream)
    return fail(ACL_ERROR_RT_PARAM_INVALID, "capture on the default stream");
  if (stream->capture) return fail(ACL_ERROR_RT_STREAM_CAPTURED, "the stream is already capturing");
  if (countdown("fail_capture_in"))
    return fail((aclError)setting("fail_capture_code"), "begin capture stream failed (injected)");
  if (aclError error = take_hardware_stream(dev)) return error;
  auto model = std::make_shared<Model>();
  model->id = next_model++;
  model->device = dev.index;
  model->mode = mode;
  model->thread = std::this_thread::get_id();
  model->origin = stream;
  model->hardware_streams = 1;
  enter(stream, model);
  capturing.insert(model);
  models[model.get()] = model;
  count("captures");
  trace("capture begin s%d model %u", stream->id, model->id);
  return 0;
}

// The body of a conditional node is captured into a model that exists already.
aclError aclmdlRICaptureToModelRIBegin(aclrtStream handle, aclmdlRI child,
                                       aclmdlRICaptureMode mode) {
  auto* stream = stream_of(handle);
  auto model = model_of(child);
  Lock lock(sim::mutex);
  if (!model) return fail(ACL_ERROR_RT_INVALID_HANDLE, "unknown model");
  if (stream->capture) return fail(ACL_ERROR_RT_STREAM_CAPTURED, "the stream is already capturing");
  model->mode = mode;
  model->thread = std::this_thread::get_id();
  model->origin = stream;
  enter(stream, model);
  capturing.insert(model);
  return 0;
}

aclError aclmdlRICaptureGetInfo(aclrtStream handle, aclmdlRICaptureStatus* status, aclmdlRI* out) {
  auto* stream = handle ? stream_of(handle) : nullptr;
  Lock lock(sim::mutex);
  if (out) *out = stream ? stream->capture.get() : nullptr;
  if (!stream || !stream->capture)
    *status = ACL_MODEL_RI_CAPTURE_STATUS_NONE;
  else
    *status = stream->capture->invalid.empty() ? ACL_MODEL_RI_CAPTURE_STATUS_ACTIVE
                                               : ACL_MODEL_RI_CAPTURE_STATUS_INVALIDATED;
  return 0;
}

aclError aclmdlRICaptureEnd(aclrtStream handle, aclmdlRI* out) {
  auto* stream = stream_of(handle);
  Lock lock(sim::mutex);
  auto model = stream->capture;
  *out = nullptr;
  if (!model) return fail(ACL_ERROR_RT_STREAM_NOT_CAPTURED, "the stream is not capturing");
  if (model->origin != stream)
    return fail(ACL_ERROR_RT_STREAM_CAPTURE_UNMATCHED, "the capture began on another stream");
  if (model->thread != std::this_thread::get_id() &&
      model->mode != ACL_MODEL_RI_CAPTURE_MODE_RELAXED)
    return fail(ACL_ERROR_RT_STREAM_CAPTURE_WRONG_THREAD, "the capture began on another thread");
  const std::string* text = nullptr;
  aclError error = defect(*model, &text);
  if (!error && countdown("fail_capture_end_in")) {
    static const std::string injected = "end capture failed (injected)";
    text = &injected;
    error = (aclError)setting("fail_capture_code");
  }
  for (auto* member : model->streams) {
    member->capture.reset();
    member->group = nullptr;
  }
  model->streams.clear();
  capturing.erase(model);
  trace("capture end model %u, %zu nodes, %d", model->id, model->nodes.size(), error);
  if (error) {
    release_streams(*model);
    models.erase(model.get());
    count("captures_failed");
    return fail(error, "end capture failed: " + *text);
  }
  *out = model.get();
  return 0;
}

aclError aclmdlRICaptureThreadExchangeMode(aclmdlRICaptureMode* mode) {
  std::swap(*mode, thread_mode);
  return 0;
}

aclError aclmdlRIGetId(aclmdlRI handle, uint32_t* id) {
  auto model = model_of(handle);
  if (!model) return fail(ACL_ERROR_RT_INVALID_HANDLE, "unknown model");
  *id = model->id;
  return 0;
}

aclError aclmdlRIDestroy(aclmdlRI handle) {
  Lock lock(sim::mutex);
  auto found = models.find(handle);
  if (found == models.end()) return fail(ACL_ERROR_RT_INVALID_HANDLE, "unknown model");
  auto model = found->second;  // a replay in flight keeps it alive
  if (Device& dev = device(model->device); dev.error) return fail(dev.error, dev.error_text);
  models.erase(found);
  release_streams(*model);
  for (auto& child : model->children) models.erase(child.get());
  count("graphs_destroyed");
  // Nobody reported what a device does then; this one goes on, and counts it.
  if (model->in_flight) count("graphs_destroyed_in_flight");
  return 0;
}
}

namespace sim {
// A conditional node owns the model of its body.
std::shared_ptr<Model> make_child(const std::shared_ptr<Model>& parent) {
  Lock lock(mutex);
  auto child = std::make_shared<Model>();
  child->id = next_model++;
  child->device = parent ? parent->device : current_device_index();
  models[child.get()] = child;
  if (parent) parent->children.push_back(child);
  return child;
}
}  // namespace sim
