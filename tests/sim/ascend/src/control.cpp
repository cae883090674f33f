// What tests see and set: settings and faults by name, counters, the report, graphs, device errors.
// Every setting can also be given as FAKEACL_<NAME> in the environment before the driver is loaded.
#include "sim.h"

#include <algorithm>
#include <cctype>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace {

using Value = std::atomic<int64_t>;

std::map<std::string, Value>& settings() {
  static auto& table = *[] {
    auto* out = new std::map<std::string, Value>;
    for (auto [name, initial] : std::initializer_list<std::pair<const char*, int64_t>>{
             {"devices", 1},       // simulated devices; fixed once torch_npu has asked
             {"memory_mb", 8192},  // device memory of each
             {"streams", 2048},  // hardware streams of each: streams, and one per stream of a graph
             {"sync_timeout_ms", 120000},  // a synchronize of a blocked stream fails after this
             {"update_delay_ms", 0},      // every task update takes this long on its stream
             {"replay_delay_ms", 0},      // every replay starts this late on its stream
             {"hold_updates", 0},         // no task update is done while this is set
             {"hold_replays", 0},         // no replay starts while this is set
             {"fail_stream_in", 0},  // the n-th hardware stream from now is refused; 0 is never
             {"fail_stream_code", 207008},
             {"fail_capture_in", 0},      // the n-th capture from now is refused at its begin
             {"fail_capture_end_in", 0},  // ... or at its end
             {"fail_capture_code", 507000},
             {"fail_malloc_in", 0},  // the n-th device allocation from now is refused
             {"fail_kernel_in", 0},  // the n-th kernel from now raises
             {"lose_record_in", 0},  // the n-th record of an external event from now does nothing
             {"log_level", 9},       // print what torch_npu logs from this level on
             {"trace", 0},
         }) {
      std::string variable = std::string("FAKEACL_") + name;
      std::transform(variable.begin(), variable.end(), variable.begin(),
                     [](unsigned char c) { return std::toupper(c); });
      const char* given = getenv(variable.c_str());
      (*out)[name] = given ? atoll(given) : initial;
    }
    sim::tracing = (*out)["trace"] != 0;
    return out;
  }();
  return table;
}

std::mutex& text_mutex = *new std::mutex;
std::map<std::string, int64_t>& counters = *new std::map<std::string, int64_t>;
std::vector<std::string>& lines = *new std::vector<std::string>;

int copy_out(const std::string& text, char* out, int room) {
  if (out && room > 0) snprintf(out, room, "%s", text.c_str());
  return (int)text.size() + 1;
}

}  // namespace

namespace sim {

int64_t setting(const char* name) { return settings().at(name); }

void wait_while(Device& dev, const char* name) {
  Lock lock(mutex);
  wait_until(lock, dev, [name] { return !setting(name); });
}

bool countdown(const char* name) {
  auto& value = settings().at(name);
  int64_t now = value;
  while (now > 0)
    if (value.compare_exchange_weak(now, now - 1)) return now == 1;
  return false;
}

void count(const char* counter, int64_t by) {
  Lock lock(text_mutex);
  counters[counter] += by;
}

void report(const std::string& line) {
  fprintf(stderr, "[fakeacl] %s\n", line.c_str());
  Lock lock(text_mutex);
  lines.push_back(line);
}

}  // namespace sim

using namespace sim;

extern "C" {

// Each returns the number of bytes that the whole text needs.
int fakeacl_counters(char* out, int room) {
  std::string text = "{";
  {
    Lock lock(text_mutex);
    for (auto& [name, value] : counters)
      text += (text.size() > 1 ? ",\"" : "\"") + name + "\":" + std::to_string(value);
  }
  int64_t held = 0;
  {
    Lock lock(sim::mutex);
    for (auto* dev : all_devices()) held += dev->hardware_streams;
  }
  return copy_out(
      text + (text.size() > 1 ? "," : "") + "\"hardware_streams\":" + std::to_string(held) + "}",
      out, room);
}

int fakeacl_report(char* out, int room) {
  std::string text;
  Lock lock(text_mutex);
  for (auto& line : lines) text += line + "\n";
  return copy_out(text, out, room);
}

int fakeacl_graphs(char* out, int room) { return copy_out(graphs_json(), out, room); }

int fakeacl_settings(char* out, int room) {
  std::string text = "{";
  for (auto& [name, value] : settings())
    text += (text.size() > 1 ? ",\"" : "\"") + name + "\":" + std::to_string(value.load());
  return copy_out(text + "}", out, room);
}

int fakeacl_set(const char* name, int64_t value) {
  auto found = settings().find(name);
  if (found == settings().end()) return -1;
  Lock lock(sim::mutex);  // else who looks at it now would miss that it changed
  found->second = value;
  progress.notify_all();
  if (!strcmp(name, "trace")) tracing = value != 0;
  return 0;
}

void fakeacl_fail_device(int index, int code, const char* text) {
  fail_device(device(index), code, text);
}

// Forget every device error, once all that was queued has drained: what waits must see the error
// before it is gone. A real device needs a new process for this.
void fakeacl_recover() {
  auto limit = std::chrono::milliseconds(setting("sync_timeout_ms"));
  Lock lock(sim::mutex);
  for (auto* dev : all_devices()) {
    if (!dev->error) continue;
    progress.wait_for(lock, limit, [dev] {
      return std::all_of(dev->streams.begin(), dev->streams.end(),
                         [](Stream* stream) { return stream->done >= stream->queued; });
    });
    dev->error = 0;
  }
}

void fakeacl_report_line(const char* line) { report(line); }

// Hold one of torch_npu's loggers for ever; `context` and `get` are its registry and its getter.
void fakeacl_keep_logger(void* context, std::shared_ptr<void> (*get)(void*, const std::string&),
                         const char* name) {
  new std::shared_ptr<void>(get(context, name));
}
}
