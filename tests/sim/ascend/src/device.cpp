// Devices, contexts, versions, options: the small questions that torch_npu asks of a driver.
#include "sim.h"

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace sim {

static thread_local int selected = -1;
static thread_local std::string last_error;
static std::mutex& devices_mutex = *new std::mutex;
static std::map<int, Device*>& devices = *new std::map<int, Device*>;

Device& device(int index) {
  Lock lock(devices_mutex);
  auto& slot = devices[index];
  if (!slot) {
    slot = new Device;
    slot->index = index;
  }
  return *slot;
}
int current_device_index() { return selected < 0 ? 0 : selected; }
Device& current_device() { return device(current_device_index()); }
std::vector<Device*> all_devices() {
  Lock lock(devices_mutex);
  std::vector<Device*> out;
  for (auto& [index, dev] : devices) out.push_back(dev);
  return out;
}

aclError fail(aclError code, const std::string& text) {
  last_error = text + " (simulated driver)";
  trace("error %d %s", code, text.c_str());
  return code;
}
std::string recent_error() { return last_error; }

void fail_device(Device& dev, aclError code, const std::string& text) {
  {
    Lock lock(mutex);
    if (dev.error) return;  // the first error is the one that explains the rest
    dev.error_text = text;
    dev.error = code;
    progress.notify_all();
  }
  count("device_errors");
  report("device " + std::to_string(dev.index) + " failed with " + std::to_string(code) + ": " +
         text);
}

}  // namespace sim

using namespace sim;

extern "C" {

aclError aclInit(const char*) { return 0; }
aclError aclFinalize() { return 0; }

aclError aclrtGetDeviceCount(uint32_t* out) {
  *out = (uint32_t)setting("devices");
  return 0;
}
aclError aclrtSetDevice(int32_t index) {
  if (index < 0 || index >= setting("devices"))
    return fail(ACL_ERROR_RT_INVALID_DEVICEID,
                "device " + std::to_string(index) + " of " + std::to_string(setting("devices")));
  device(index);
  selected = index;
  return 0;
}
aclError aclrtGetDevice(int32_t* out) {
  if (selected < 0) return ACL_ERROR_RT_CONTEXT_NULL;
  *out = selected;
  return 0;
}
aclError aclrtResetDevice(int32_t) { return 0; }
aclError aclrtGetPrimaryCtxState(int32_t index, uint32_t* flags, int32_t* active) {
  bool used = false;
  for (auto* dev : all_devices()) used |= dev->index == index;
  if (flags) *flags = 0;
  if (active) *active = used;
  return 0;
}

// The context of a device is the device.
aclError aclrtGetCurrentContext(aclrtContext* out) {
  *out = &current_device();
  return 0;
}
aclError aclrtSetCurrentContext(aclrtContext context) {
  if (context) selected = ((Device*)context)->index;
  return 0;
}
aclError aclrtDeviceCanAccessPeer(int32_t* out, int32_t, int32_t) {
  *out = 0;
  return 0;
}

const char* aclrtGetSocName() { return "Ascend910B3"; }
aclError aclGetDeviceCapability(uint32_t, aclDeviceInfo, int64_t* out) {
  *out = 24;  // cores of each kind on this model
  return 0;
}
aclError aclrtGetDeviceInfo(uint32_t, aclrtDevAttr, int64_t* out) {
  *out = 24;
  return 0;
}
aclError aclsysGetCANNVersion(aclCANNPackageName, aclCANNPackageVersion* out) {
  memset(out, 0, sizeof *out);
  strcpy(out->version, "9.1.0");
  return 0;
}
aclError aclsysGetVersionStr(char*, char* out) {
  strcpy(out, "9.1.0");
  return 0;
}

const char* aclGetRecentErrMsg() {
  static thread_local std::string text;
  text = recent_error();
  return text.c_str();
}
void aclAppLog(aclLogLevel level, const char* function, const char*, uint32_t line,
               const char* format, ...) {
  if ((int)level < setting("log_level")) return;
  va_list arguments;
  va_start(arguments, format);
  fprintf(stderr, "[acl %d] %s:%u ", (int)level, function, line);
  vfprintf(stderr, format, arguments);
  fputc('\n', stderr);
  va_end(arguments);
}

static int64_t system_options[64];
aclError aclrtGetSysParamOpt(aclSysParamOpt option, int64_t* out) {
  *out = system_options[option & 63];
  return 0;
}
aclError aclrtSetSysParamOpt(aclSysParamOpt option, int64_t value) {
  system_options[option & 63] = value;
  return 0;
}
aclError aclrtCtxSetSysParamOpt(aclSysParamOpt option, int64_t value) {
  return aclrtSetSysParamOpt(option, value);
}

size_t aclGetCompileoptSize(int) { return 16; }
int aclGetCompileopt(int, char* out, size_t room) {
  strncpy(out, "disable", room);
  return 0;
}

// Operators that are compiled on the fly are another API; none of them is simulated.
int aclopCompileAndExecute(const char* name) {
  report(std::string("missing: graph operator ") + name);
  return fail(500001, std::string("graph operator ") + name + " has no simulated kernel");
}
int aclopCompileAndExecuteV2(const char* name) { return aclopCompileAndExecute(name); }

// Nothing to do for these on host memory, and nothing that a caller could miss.
int aclSetCompileopt(int, const char*) { return 0; }
aclError aclrtSetDeviceSatMode(aclrtFloatOverflowMode) { return 0; }
aclError aclrtSetOpExecuteTimeOut(uint32_t) { return 0; }
aclError aclrtSetOpWaitTimeout(uint32_t) { return 0; }
aclError aclrtSetStreamAttribute(aclrtStream, aclrtStreamAttr, aclrtStreamAttrValue*) { return 0; }
aclError aclrtSetStreamFailureMode(aclrtStream, uint64_t) { return 0; }
}
