// Which device this is, its errors in words, and the ledger of what it was asked for.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "device.h"

namespace device {

Ledger ledger;

namespace {

constexpr int kMultiprocessors = 4, kThreads = 2048, kL2 = 1 << 20;
constexpr int kShared = 48 << 10, kMostShared = 163 << 10;

thread_local int last_error;
thread_local int device_here;
int broken_with;
std::string refusals, last_refusal;

const std::map<int, const char*> kNames = {
    {OK, "cudaSuccess"},
    {INVALID_VALUE, "cudaErrorInvalidValue"},
    {OUT_OF_MEMORY, "cudaErrorMemoryAllocation"},
    {INVALID_DEVICE, "cudaErrorInvalidDevice"},
    {INVALID_IMAGE, "cudaErrorNoKernelImageForDevice"},
    {INVALID_HANDLE, "cudaErrorInvalidResourceHandle"},
    {NOT_FOUND, "cudaErrorSymbolNotFound"},
    {NOT_READY, "cudaErrorNotReady"},
    {LAUNCH_FAILURE, "cudaErrorLaunchFailure"},
    {NOT_SUPPORTED, "cudaErrorNotSupported"},
    {CAPTURE_UNSUPPORTED, "cudaErrorStreamCaptureUnsupported"},
    {CAPTURE_ISOLATION, "cudaErrorStreamCaptureIsolation"},
    {CAPTURE_IMPLICIT, "cudaErrorStreamCaptureImplicit"},
    {UNKNOWN, "cudaErrorUnknown"},
};

// "8GB", "500MB" or a number of bytes.
long long bytes_of(const char* name, const char* otherwise) {
    const char* text = std::getenv(name);
    char* end;
    if (!text) text = otherwise;
    const double number = std::strtod(text, &end);
    const std::map<std::string, double> units = {
        {"", 1}, {"B", 1}, {"KB", 1 << 10}, {"MB", 1 << 20}, {"GB", 1 << 30}};
    const auto unit = units.find(end);
    if (unit == units.end()) {
        std::fprintf(stderr, "%s=%s is no size, such as 8GB\n", name, text);
        std::abort();
    }
    return static_cast<long long>(number * unit->second);
}

// 0 for the first of the words, 1 for the second, ...
long long one_of(const char* name, std::initializer_list<const char*> words) {
    const char* text = std::getenv(name);
    if (!text) return 0;
    long long at = 0;
    for (const char* word : words) {
        if (!std::strcmp(text, word)) return at;
        ++at;
    }
    std::fprintf(stderr, "%s=%s is not known\n", name, text);
    std::abort();
}

}  // namespace

Settings settings = {
    bytes_of("CUDA_DEVICE_MEMORY", "8GB"),
    bytes_of("CUDA_DEVICE_PINNED", "1000000GB"),
    bytes_of("CUDA_DEVICE_COUNT", "1"),
    one_of("CUDA_DEVICE", {"eager", "lazy"}),
    one_of("CUDA_DEVICE_ORDER", {"forward", "reverse", "random"}),
    bytes_of("CUDA_DEVICE_GUARD", "0"),
    0,
};

int fail(int code) {
    if (code) last_error = code;
    return code;
}

int refuse(int code, const char* format, ...) {
    char text[1024];
    va_list rest;
    va_start(rest, format);
    std::vsnprintf(text, sizeof text, format, rest);
    va_end(rest);
    last_refusal = text;
    refusals += last_refusal + "\n";
    return fail(code);
}

int broken() { return broken_with; }
void break_down(int code) { broken_with = code; }
int current_device() { return device_here; }

}  // namespace device

using namespace device;
#define CODE(x) static_cast<cudaError_t>(x)

// ---- what tests ask for ------------------------------------------------------------------------

// What was refused since the last call, a line each; a failed kernel is forgotten, too.
API const char* device_refusals() {
    Lock lock;
    static std::string found;
    found.swap(refusals);
    refusals.clear();
    broken_with = OK;
    return found.c_str();
}

API int device_number() { return current_device(); }

API void device_sent(long bytes) {
    Lock lock;
    ledger.bytes_sent += bytes;
}

API int device_refuse(const char* name) {
    return refuse(NOT_SUPPORTED, "%s: this device does not know it", name);
}

API long long device_setting(const char* name, long long value, int is_new) {
    Lock lock;
    if (is_new) finish_everything();
    const std::map<std::string, long long*> all = {
        {"memory", &settings.memory}, {"pinned", &settings.pinned}, {"devices", &settings.devices},
        {"lazy", &settings.lazy},     {"order", &settings.order},
        {"last_blocks", &settings.last_blocks}};
    long long& setting = *all.at(name);
    const long long before = setting;
    if (is_new) setting = value;
    return before;
}

// The ledger as JSON.
API const char* device_ledger() {
    Lock lock;
    static std::string text;
    text = "{";
    const auto add = [](const char* name, long value) {
        text += std::string("\"") + name + "\": " + std::to_string(value) + ", ";
    };
#define COUNT(name) add(#name, ledger.name);
    COUNT(launches) COUNT(copies_in) COUNT(copies_out) COUNT(copies_on)
    COUNT(bytes_in) COUNT(bytes_out) COUNT(bytes_on) COUNT(largest_out)
    COUNT(waits) COUNT(allocations) COUNT(frees) COUNT(sets)
    COUNT(library_calls) COUNT(graph_launches) COUNT(held) COUNT(peak) COUNT(pinned)
    COUNT(recordings) COUNT(largest_pinned) COUNT(most_pinned) COUNT(bytes_sent)
    const auto add_map = [](const char* title, const auto& map, auto show) {
        text += std::string("\"") + title + "\": {";
        const char* comma = "";
        for (const auto& [name, value] : map) {
            text += comma + std::string("\"");
            for (char c : name) text += (c == '"' || c == '\\' ? std::string("\\") : "") + c;
            text += "\": " + show(value);
            comma = ", ";
        }
        text += "}";
    };
    add_map("kernels", ledger.kernels, [](long count) { return std::to_string(count); });
    text += ", ";
    add_map("traffic", ledger.traffic, [](const std::array<long, 2>& moved) {
        return "[" + std::to_string(moved[0]) + ", " + std::to_string(moved[1]) + "]";
    });
    text += "}";
    return text.c_str();
}

// Begins to count anew; what is held stays held.
API void device_clear_ledger() {
    Lock lock;
    Ledger anew;
    anew.held = anew.peak = ledger.held;
    anew.pinned = anew.most_pinned = ledger.pinned;
    anew.recordings = ledger.recordings;
    ledger = anew;
}

// ---- errors ------------------------------------------------------------------------------------

API const char* cudaGetErrorName(cudaError_t code) {
    const auto found = kNames.find(code);
    return found == kNames.end() ? "an error of the device" : found->second;
}

API const char* cudaGetErrorString(cudaError_t code) {
    if (static_cast<int>(code) == OUT_OF_MEMORY) return "out of memory";
    return last_refusal.empty() ? "this device says no more" : last_refusal.c_str();
}

API cudaError_t cudaGetLastError() {
    const int code = last_error;
    last_error = OK;
    return CODE(code);
}

API cudaError_t cudaPeekAtLastError() { return CODE(last_error); }

API int cuGetErrorName(int code, const char** text) {
    *text = cudaGetErrorName(CODE(code));
    return OK;
}

API int cuGetErrorString(int code, const char** text) {
    *text = cudaGetErrorString(CODE(code));
    return OK;
}

// ---- devices -----------------------------------------------------------------------------------

API int cuInit(unsigned) { return 100; }  // no device: another library shall not take this for one
API int cuDriverGetVersion(int* version) { return *version = 13000, OK; }
API int cuDevicePrimaryCtxRelease_v2(int) { return OK; }
API int cuCtxGetCurrent(void** context) { return *context = reinterpret_cast<void*>(1), OK; }
API int cuCtxSetCurrent(void*) { return OK; }
API int cuCtxGetDevice(int* number) { return *number = current_device(), OK; }
API int cuStreamGetCtx(void*, void** context) { return cuCtxGetCurrent(context); }

API cudaError_t cudaDriverGetVersion(int* version) { return CODE(cuDriverGetVersion(version)); }
API cudaError_t cudaRuntimeGetVersion(int* version) { return CODE(cuDriverGetVersion(version)); }
API cudaError_t cudaGetDevice(int* number) { return CODE(cuCtxGetDevice(number)); }

API cudaError_t cudaSetDevice(int number) {
    if (number < 0 || number >= settings.devices) return CODE(fail(INVALID_DEVICE));
    device_here = number;
    return CODE(OK);
}

API cudaError_t cudaGetDeviceCount(int* count) { return *count = settings.devices, CODE(OK); }

API cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
    static const std::map<int, int> known = {
        {cudaDevAttrMaxThreadsPerBlock, 1024},
        {cudaDevAttrMaxBlockDimX, 1024},
        {cudaDevAttrMaxBlockDimY, 1024},
        {cudaDevAttrMaxBlockDimZ, 64},
        {cudaDevAttrMaxGridDimX, 2147483647},
        {cudaDevAttrMaxGridDimY, 65535},
        {cudaDevAttrMaxGridDimZ, 65535},
        {cudaDevAttrMaxSharedMemoryPerBlock, kShared},
        {cudaDevAttrWarpSize, 32},
        {cudaDevAttrMultiProcessorCount, kMultiprocessors},
        {cudaDevAttrL2CacheSize, kL2},
        {cudaDevAttrMaxThreadsPerMultiProcessor, kThreads},
        {cudaDevAttrComputeCapabilityMajor, 8},
        {cudaDevAttrComputeCapabilityMinor, 0},
        {cudaDevAttrMaxSharedMemoryPerBlockOptin, kMostShared},
    };
    const auto found = known.find(attribute);
    *value = found == known.end() ? 0 : found->second;
    return CODE(OK);
}

API cudaError_t cudaDeviceGetPCIBusId(char* text, int size, int number) {
    std::snprintf(text, size, "0000:%02x:00.0", number);
    return CODE(OK);
}

API cudaError_t cudaGetDeviceProperties(cudaDeviceProp* p, int) {
    *p = {};
    std::strcpy(p->name, "emulator");
    p->totalGlobalMem = settings.memory;
    p->sharedMemPerBlock = kShared;
    p->sharedMemPerBlockOptin = p->sharedMemPerMultiprocessor = kMostShared;
    p->regsPerBlock = 65536;
    p->warpSize = 32;
    p->maxThreadsPerBlock = 1024;
    for (int i = 0; i < 3; ++i) {
        p->maxThreadsDim[i] = i < 2 ? 1024 : 64;
        p->maxGridSize[i] = i ? 65535 : 2147483647;
    }
    p->major = 8;
    p->multiProcessorCount = kMultiprocessors;
    p->l2CacheSize = kL2;
    p->maxThreadsPerMultiProcessor = kThreads;
    p->unifiedAddressing = p->canMapHostMemory = p->concurrentKernels = 1;
    p->asyncEngineCount = 2;
    return CODE(OK);
}

API cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) { return *can = 0, CODE(OK); }
API cudaError_t cudaDeviceGetLimit(size_t* value, cudaLimit) { return *value = 0, CODE(OK); }

API cudaError_t cudaProfilerStart() {
    ledger.recordings++;
    return CODE(OK);
}

API cudaError_t cudaProfilerStop() {
    ledger.recordings--;
    return CODE(OK);
}
