// The simulated device: what the parts of the driver share.
//
// One worker thread per stream runs closures in order over host memory. A capture is a list of the
// closures that would have been queued; a replay runs the list inside one task of a stream.
#pragma once
#include <acl/acl.h>
#include <acl/acl_rt.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

namespace sim {

using Work = std::function<void()>;
using Lock = std::unique_lock<std::mutex>;

// What a task is decides what may be updated inside a task group and what a failed device still
// runs.
enum class Kind { kernel, copy, wait, signal, model, host };

struct Model;
struct Stream;

struct Node {
  Kind kind;
  std::string name;
  std::shared_ptr<Work> work;  // replaced as a whole by a task update
  int stream;
};

struct Group {
  Model* model;
  std::vector<Node*> nodes;
};

struct Model {
  uint32_t id = 0;
  int device = 0;
  aclmdlRICaptureMode mode = ACL_MODEL_RI_CAPTURE_MODE_GLOBAL;
  std::thread::id thread;  // the thread that began the capture
  Stream* origin = nullptr;
  std::set<Stream*> streams;  // joined streams; each costs one hardware stream until destruction
  std::string invalid;        // why the capture can no longer succeed
  std::deque<Node> nodes;
  std::vector<std::unique_ptr<Group>> groups;
  std::vector<std::shared_ptr<Model>> children;  // bodies of conditional nodes
  int hardware_streams = 0;
  uint64_t replays = 0;
  int running = -1;  // the stream that is executing it now
  std::atomic<int> in_flight = 0;  // replays queued or running
};

struct Task {
  Kind kind;
  std::string name;
  Work work;
};

struct Stream {
  int id;
  int device;
  std::condition_variable wake;
  std::deque<Task> queue;
  bool stop = false;
  uint64_t queued = 0, done = 0;
  std::shared_ptr<Model> capture;  // the capture that this stream takes part in
  bool joined = true;      // the origin stream waits, perhaps through others, for all its work
  size_t captured = 0;     // tasks it put into that capture
  Group* group = nullptr;  // open task group of that capture
  std::shared_ptr<Model> update_model;
  Group* update = nullptr;  // task group whose update is being issued
  size_t updated = 0;
  bool update_failed = false;
};

struct Device {
  int index = 0;
  Stream* default_stream = nullptr;
  std::vector<Stream*> streams;
  int hardware_streams = 0;  // streams plus those that captured models hold
  size_t memory = 0;
  std::atomic<aclError> error{0};  // sticky: every synchronize reports it from then on
  std::string error_text;
};

struct Event {
  uint32_t flag = 0;
  uint64_t recorded = 0, completed = 0;
  bool set = false;  // external events are a flag, not a count
  int64_t nanoseconds = 0;
  std::weak_ptr<Model>
      capture;  // recorded inside this capture, on this stream, after this many tasks
  Stream* source = nullptr;
  size_t position = 0;
};

// One lock and one condition for "something completed"; never destroyed, since workers outlive
// main.
extern std::mutex& mutex;
extern std::condition_variable& progress;
extern std::atomic<bool> tracing;

Device& device(int index);
Device& current_device();
int current_device_index();
std::vector<Device*> all_devices();

// Faults and settings; see control.cpp for the names.
int64_t setting(const char* name);
void wait_while(Device&, const char* name);  // until that setting is 0, or the device failed
bool countdown(const char* name);  // true when an armed "n-th call fails" fault fires now
void count(const char* counter, int64_t by = 1);
void report(const std::string& line);  // to stderr and to the log that the tests read
aclError fail(aclError code, const std::string& text);
std::string recent_error();
void fail_device(Device&, aclError code, const std::string& text);

Stream* stream_of(aclrtStream);
aclError take_hardware_stream(Device&);  // call with the lock held
aclError enqueue(Stream*, Kind, std::string name, Work);
aclError synchronize(Stream*, const char* what, int timeout_ms, bool skip_capturing);
aclError launch(aclrtStream, const char* kernel, Work);
void perform(Device&, Kind, const std::string& name, const Work&);
void wait_until(Lock&, Device&, const std::function<bool()>& ready);

aclError unsafe_call(const char* what);  // 107030 while a capture forbids this call on this thread
std::shared_ptr<Model> model_of(aclmdlRI);
aclError join_capture(Stream*, const Event&, const std::shared_ptr<Model>&);
std::string graphs_json();

void require_mapped(const void* address, size_t bytes, const char* what);

void trace(const char* format, ...);

}  // namespace sim
