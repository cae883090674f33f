// Captured graphs after their capture: replay, task groups and their update, conditional nodes,
// dump.
#include "sim.h"

#include <cstdio>
#include <stdexcept>

namespace sim {

std::shared_ptr<Model> make_child(const std::shared_ptr<Model>& parent);

static void run_nodes(Model& model) {
  Device& dev = device(model.device);
  for (auto& node : model.nodes) {
    std::shared_ptr<Work> work;
    {
      Lock lock(mutex);
      work = node.work;
    }
    trace("  replay m%u %s", model.id, node.name.c_str());
    perform(dev, node.kind, node.name, *work);
  }
}

static void replay(Model& model, int stream) {
  wait_while(device(model.device), "hold_replays");
  if (int64_t delay = setting("replay_delay_ms"))
    std::this_thread::sleep_for(std::chrono::milliseconds(delay));
  {
    Lock lock(mutex);
    if (model.running >= 0)
      throw std::runtime_error("model " + std::to_string(model.id) +
                               " is still running on stream " + std::to_string(model.running));
    model.running = stream;
    model.replays++;
  }
  count("replays");
  run_nodes(model);
  Lock lock(mutex);
  model.running = -1;
}

static std::map<aclrtTaskGrp, std::weak_ptr<Model>>& groups =
    *new std::map<aclrtTaskGrp, std::weak_ptr<Model>>;

}  // namespace sim

using namespace sim;

extern "C" {

aclError aclmdlRIExecuteAsync(aclmdlRI handle, aclrtStream stream_handle) {
  auto model = model_of(handle);
  if (!model) return fail(ACL_ERROR_RT_INVALID_HANDLE, "execution of an unknown model");
  auto* stream = stream_of(stream_handle);
  {
    Lock lock(sim::mutex);
    if (stream->capture) {
      stream->capture->invalid = "a graph was executed inside the capture";
      return fail(ACL_ERROR_RT_STREAM_CAPTURED, stream->capture->invalid);
    }
  }
  int id = stream->id;
  model->in_flight++;
  // Counted down when the task goes away, whether it ran or the device failed before.
  std::shared_ptr<Model> flight(model.get(), [model](Model* m) { m->in_flight--; });
  return enqueue(stream, Kind::model, "ExecuteModel", [flight, id] { replay(*flight, id); });
}

aclError aclmdlRICaptureTaskGrpBegin(aclrtStream handle) {
  auto* stream = stream_of(handle);
  Lock lock(sim::mutex);
  if (!stream->capture)
    return fail(ACL_ERROR_RT_STREAM_NOT_CAPTURED, "a task group outside a capture");
  if (stream->group)
    return fail(ACL_ERROR_STREAM_TASK_GROUP_STATUS, "a task group is open already");
  auto& model = *stream->capture;
  model.groups.push_back(std::make_unique<Group>(Group{&model, {}}));
  stream->group = model.groups.back().get();
  groups[(aclrtTaskGrp)stream->group] = stream->capture;
  count("task_groups");
  return 0;
}

aclError aclmdlRICaptureTaskGrpEnd(aclrtStream handle, aclrtTaskGrp* out) {
  auto* stream = stream_of(handle);
  Lock lock(sim::mutex);
  if (!stream->group) return fail(ACL_ERROR_STREAM_TASK_GROUP_STATUS, "no task group is open");
  *out = (aclrtTaskGrp)stream->group;
  trace("task group of %zu nodes", stream->group->nodes.size());
  stream->group = nullptr;
  return 0;
}

aclError aclmdlRICaptureTaskUpdateBegin(aclrtStream handle, aclrtTaskGrp group) {
  auto* stream = stream_of(handle);
  Lock lock(sim::mutex);
  if (stream->update)
    return fail(ACL_ERROR_STREAM_TASK_GROUP_STATUS, "a task update is open already");
  auto found = groups.find(group);
  auto model = found == groups.end() ? nullptr : found->second.lock();
  if (!model)
    return fail(ACL_ERROR_RT_INVALID_HANDLE, "the graph of this task group was destroyed");
  if (stream->capture)
    return fail(ACL_ERROR_RT_STREAM_CAPTURED, "a task update on a capturing stream");
  stream->update_model = model;
  stream->update = (Group*)group;
  stream->updated = 0;
  stream->update_failed = false;
  return 0;
}

aclError aclmdlRICaptureTaskUpdateEnd(aclrtStream handle) {
  auto* stream = stream_of(handle);
  Lock lock(sim::mutex);
  auto* group = stream->update;
  if (!group) return fail(ACL_ERROR_STREAM_TASK_GROUP_STATUS, "no task update is open");
  size_t captured = group->nodes.size();
  stream->update = nullptr;
  stream->update_model.reset();
  if (stream->update_failed)
    return fail(ACL_ERROR_RT_MODEL_UPDATE_FAILED, "task update: a task of it was refused");
  if (stream->updated != captured)
    return fail(ACL_ERROR_RT_MODEL_UPDATE_FAILED,
                "task update: " + std::to_string(stream->updated) + " tasks where " +
                    std::to_string(captured) + " were captured");
  count("group_updates");
  return 0;
}

// The value of a condition lives in device memory, where the graph's own tasks write it.
aclError aclmdlRICondHandleCreate(aclmdlRI, uint32_t initial, aclmdlRICondHandleFlag,
                                  aclmdlRICondHandle* out) {
  void* value = nullptr;
  if (aclError error = aclrtMalloc(&value, sizeof(uint64_t), ACL_MEM_MALLOC_NORMAL_ONLY))
    return error;
  *(uint64_t*)value = initial;
  *out = (aclmdlRICondHandle)value;
  return 0;
}
aclError aclmdlRICondHandleGetCondPtr(aclmdlRICondHandle handle, uint64_t** out) {
  *out = (uint64_t*)handle;
  return 0;
}
aclError aclmdlRIAddCondTask(aclmdlRICondTaskParams parameters, aclrtStream handle, uint32_t) {
  auto* stream = stream_of(handle);
  auto child = make_child(stream->capture);
  parameters.modelRIArray[0] = child.get();
  auto* condition = (volatile uint64_t*)parameters.handle;
  return enqueue(stream, Kind::model, "CondIf", [=] {
    if (*condition) run_nodes(*child);
  });
}

aclError aclmdlRIDebugJsonPrint(aclmdlRI handle, const char* path, uint32_t) {
  auto model = model_of(handle);
  if (!model) return fail(ACL_ERROR_RT_INVALID_HANDLE, "dump of an unknown model");
  FILE* file = fopen(path, "w");
  if (!file) return fail(ACL_ERROR_RT_FILE_OPEN, std::string("cannot write ") + path);
  const char* separator = "[";
  int position = 0;
  for (auto& node : model->nodes) {
    fprintf(file,
            "%s{\"name\":\"%s\",\"ph\":\"X\",\"pid\":\"aclGraph\",\"tid\":\"stream%d\",\"ts\":%d,"
            "\"dur\":1,\"args\":{}}",
            separator, node.name.c_str(), node.stream, position++);
    separator = ",";
  }
  fprintf(file, position ? "]" : "[]");
  fclose(file);
  return 0;
}
}
