// Streams, events and captured graphs, and the clocks that find what nothing orders.
#include <cuda_runtime_api.h>
#include <time.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <set>

#include "device.h"

namespace device {

namespace {

std::recursive_mutex mutex;
thread_local int times_held;
std::deque<Stream> default_streams;  // one for each device
std::set<Stream*> streams;
int numbers;
Clock host, destroyed;  // what the host knows, and what streams knew that are no more
uint64_t host_version = 1;

struct Event {
    Stream* stream = nullptr;
    uint64_t place = 0;  // in the stream's work
    Clock clock;
    std::shared_ptr<double> at = std::make_shared<double>(0);
    Graph* captured = nullptr;
    unsigned flags = 0;
};

double milliseconds() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1e3 + t.tv_nsec * 1e-6;
}

void merge(Clock& into, const Clock& other) {
    for (const auto& [stream, tick] : other) {
        uint64_t& known = into[stream];
        known = std::max(known, tick);
    }
}

void host_learns(const Clock& clock) {
    merge(host, clock);
    ++host_version;
}

void learn_from_host(Stream* s) {
    if (s->host_version == host_version) return;
    merge(s->clock, host);
    s->host_version = host_version;
}

Stream* new_stream(unsigned flags, int priority) {
    auto* made = new Stream;
    made->number = ++numbers;
    made->device = current_device();
    made->flags = flags;
    made->waits_for_default = !(flags & cudaStreamNonBlocking);
    made->priority = priority;
    streams.insert(made);
    return made;
}

Stream* default_stream(int number) {
    while (default_streams.size() <= static_cast<size_t>(number)) {
        default_streams.emplace_back();
        default_streams.back().number = ++numbers;
        default_streams.back().is_default = true;
        default_streams.back().device = default_streams.size() - 1;
    }
    return &default_streams[number];
}

// Checks that work of a stream comes after the last use of each of its blocks, and notes the use.
int check_uses(Stream* s, const std::string& what, const Touches& touches) {
    learn_from_host(s);
    const uint64_t now = ++s->clock[s->number];
    for (const auto& [block, writes] : touches) {
        if (!block->alive) return refuse(UNKNOWN, "%s uses memory that was freed", what.c_str());
        if (block->kind != PINNED && block->device != s->device)
            return refuse(UNKNOWN, "%s runs on device %d and uses memory of device %d",
                          what.c_str(), s->device, block->device);
        if (!block->tracked) continue;
        if (const Use* other = unordered(s, *block, writes))
            return refuse(UNKNOWN,
                          "race: %s on stream %d and %s on stream %d use the same %zu bytes, and "
                          "nothing says which comes first",
                          other->what.c_str(), other->stream, what.c_str(), s->number, block->size);
        if (writes) {
            block->written = {s->number, now, what};
            block->read.clear();
        } else {
            block->read[s->number] = {s->number, now, what};
        }
    }
    return OK;
}

// Does what can be done; false where the next work waits for another process.
bool finish_some(Stream* s, uint64_t upto = ~0ull) {
    if (s->busy) return false;
    while (s->done < upto && !s->queue.empty()) {
        if (s->queue.front().ready && !broken()) {
            s->busy = true;
            const bool ready = s->queue.front().ready();
            s->busy = false;
            if (!ready) return false;
        }
        Work work = std::move(s->queue.front());
        s->queue.pop_front();
        if (!broken()) work.run();
        s->done++;
    }
    return true;
}

// The default stream waits for all streams that are not "non-blocking", and they for it.
int order_with_default(Stream* s) {
    if (!s->is_default) {
        if (!s->waits_for_default) return OK;
        Stream* first = default_stream(s->device);
        finish(first);
        merge(s->clock, first->clock);
        return OK;
    }
    for (Stream* other : streams) {
        if (!other->waits_for_default || other->device != s->device) continue;
        if (other->capture) return fail(CAPTURE_IMPLICIT);
        finish(other);
        merge(s->clock, other->clock);
    }
    return OK;
}

}  // namespace

Lock::Lock() {
    mutex.lock();
    ++times_held;
}

Lock::~Lock() {
    --times_held;
    mutex.unlock();
}

Stream* stream_of(void* handle) {
    const auto number = reinterpret_cast<uintptr_t>(handle);  // 1 and 2 are names of the default
    return number <= 2 ? default_stream(current_device()) : static_cast<Stream*>(handle);
}

int give(Stream* s, Work work) {
    if (broken()) return fail(broken());
    if (s->capture) {
        Graph::Node node{work.what, work.is_kernel, {}, std::move(work.run)};
        for (const auto& [block, writes] : work.touches) node.touches.push_back({block, writes});
        s->capture->nodes.push_back(std::move(node));
        return OK;
    }
    if (const int error = order_with_default(s)) return error;
    if (const int error = check_uses(s, work.what, work.touches)) return error;
    s->queue.push_back(std::move(work));
    s->given++;
    if (!settings.lazy) finish_some(s);
    return OK;
}

void finish(Stream* s, uint64_t upto) {
    while (!finish_some(s, upto)) {  // others must get to the device meanwhile, a watchdog for one
        const int times = times_held;
        for (int i = 0; i < times; ++i) mutex.unlock();
        usleep(200);
        for (int i = 0; i < times; ++i) mutex.lock();
    }
}

void finish_everything() {
    for (Stream& s : default_streams) finish(&s);
    for (Stream* s : std::set<Stream*>(streams)) finish(s);
}

const Use* unordered(Stream* s, const Block& block, bool writes) {
    learn_from_host(s);
    const auto is_before = [s](const Use& use) {
        return use.stream < 0 || s->clock[use.stream] >= use.tick;
    };
    if (!is_before(block.written)) return &block.written;
    if (writes)
        for (const auto& [_, use] : block.read)
            if (!is_before(use)) return &use;
    return nullptr;
}

void host_waits(Stream* s) {
    finish(s);
    learn_from_host(s);
    host_learns(s->clock);
}

}  // namespace device

using namespace device;
#define CODE(x) static_cast<cudaError_t>(x)

// An allocation is a use: memory that a pool hands out may still be read by its last owner's work.
API int device_track(void* address, void* stream) {
    Lock lock;
    const auto block = block_at(address);
    if (!block) return fail(INVALID_VALUE);
    block->tracked = true;
    return check_uses(stream_of(stream), "an allocation", {{block}});
}

// For the libraries: work that uses these pointers; `ready` may be null, or is asked until it is 1.
API int device_give(void* stream, const char* what, void* const* pointers, int count,
                    int (*ready)(void*), void (*run)(void*), void* data, void (*drop)(void*)) {
    Lock lock;
    ledger.library_calls++;
    const std::shared_ptr<void> held(data, drop);
    Work work{what, false, {}, [=] { run(held.get()); }};
    if (ready) work.ready = [=] { return ready(held.get()) != 0; };
    for (int i = 0; i < count; ++i) {
        if (!pointers[i]) continue;
        const auto block = block_at(pointers[i], true);
        if (!block)
            return refuse(UNKNOWN, "%s: pointer %d, %p, is no memory of the device", what, i,
                          pointers[i]);
        work.touches.push_back({block});
    }
    return give(stream_of(stream), std::move(work));
}

API int device_pending() {
    Lock lock;
    int count = 0;
    for (const Stream& s : default_streams) count += s.queue.size();
    for (const Stream* s : streams) count += s->queue.size();
    return count;
}

API int device_stream_number(void* stream) {
    Lock lock;
    return stream_of(stream)->number;
}

// ---- streams -----------------------------------------------------------------------------------

API cudaError_t cudaStreamCreateWithPriority(cudaStream_t* s, unsigned flags, int priority) {
    Lock lock;
    *s = reinterpret_cast<cudaStream_t>(new_stream(flags, priority));
    return CODE(OK);
}

API cudaError_t cudaStreamCreateWithFlags(cudaStream_t* s, unsigned flags) {
    return cudaStreamCreateWithPriority(s, flags, 0);
}

API cudaError_t cudaStreamCreate(cudaStream_t* s) { return cudaStreamCreateWithPriority(s, 0, 0); }

API cudaError_t cudaStreamGetFlags(cudaStream_t s, unsigned* flags) {
    *flags = stream_of(s)->flags;
    return CODE(OK);
}

API cudaError_t cudaStreamGetPriority(cudaStream_t s, int* priority) {
    *priority = stream_of(s)->priority;
    return CODE(OK);
}

API cudaError_t cudaStreamDestroy(cudaStream_t handle) {
    Lock lock;
    Stream* s = stream_of(handle);
    finish(s);
    if (s->waits_for_default) merge(default_stream(s->device)->clock, s->clock);
    merge(destroyed, s->clock);
    streams.erase(s);  // but not deleted: events may name it
    return CODE(OK);
}

API cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
    Lock lock;
    Stream* s = stream_of(handle);
    if (s->capture) return CODE(fail(CAPTURE_UNSUPPORTED));
    ledger.waits++;
    if (s->is_default)
        if (const int error = order_with_default(s)) return CODE(error);
    host_waits(s);
    return CODE(fail(broken()));
}

// A look does not count as a wait: a thread that looks must not hide that nobody waits.
API cudaError_t cudaStreamQuery(cudaStream_t handle) {
    Lock lock;
    Stream* s = stream_of(handle);
    if (s->capture) return CODE(fail(CAPTURE_UNSUPPORTED));
    if (s->queue.empty()) return CODE(fail(broken()));
    finish_some(s, s->done + 1);
    return CODE(s->queue.empty() ? fail(broken()) : NOT_READY);
}

API cudaError_t cudaStreamAddCallback(cudaStream_t s, cudaStreamCallback_t f, void* data,
                                      unsigned) {
    Lock lock;
    return CODE(give(stream_of(s), {"a callback", false, {}, [=] { f(s, cudaSuccess, data); }}));
}

API cudaError_t cudaLaunchHostFunc(cudaStream_t s, cudaHostFn_t f, void* data) {
    Lock lock;
    return CODE(give(stream_of(s), {"a function of the host", false, {}, [=] { f(data); }}));
}

API cudaError_t cudaDeviceSynchronize() {
    Lock lock;
    ledger.waits++;
    for (const Stream* s : streams)
        if (s->capture) return CODE(fail(CAPTURE_UNSUPPORTED));
    for (Stream& s : default_streams) host_waits(&s);
    for (Stream* s : std::set<Stream*>(streams)) host_waits(s);
    host_learns(destroyed);
    return CODE(fail(broken()));
}

// ---- events ------------------------------------------------------------------------------------

API cudaError_t cudaEventCreateWithFlags(cudaEvent_t* e, unsigned flags) {
    auto* made = new Event;
    made->flags = flags;
    *e = reinterpret_cast<cudaEvent_t>(made);
    return CODE(OK);
}

API cudaError_t cudaEventCreate(cudaEvent_t* e) { return cudaEventCreateWithFlags(e, 0); }

API cudaError_t cudaEventDestroy(cudaEvent_t e) {
    Lock lock;
    delete reinterpret_cast<Event*>(e);
    return CODE(OK);
}

API cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t handle) {
    Lock lock;
    Stream* s = stream_of(handle);
    auto* event = reinterpret_cast<Event*>(e);
    event->captured = s->capture;
    if (s->capture) return CODE(OK);
    event->at = std::make_shared<double>(0);
    const auto at = event->at;
    const int error = give(s, {"the record of an event", false, {}, [=] { *at = milliseconds(); }});
    event->stream = s;
    event->place = s->given;
    event->clock = s->clock;
    return CODE(error);
}

API cudaError_t cudaStreamWaitEvent(cudaStream_t handle, cudaEvent_t e, unsigned) {
    Lock lock;
    Stream* s = stream_of(handle);
    auto* event = reinterpret_cast<Event*>(e);
    if (event->captured) return CODE(s->capture == event->captured ? OK : fail(CAPTURE_ISOLATION));
    if (!event->stream) return CODE(OK);  // never recorded: nothing to wait for
    if (s->capture) return CODE(fail(CAPTURE_ISOLATION));
    Stream* other = event->stream;
    const uint64_t place = event->place;
    merge(s->clock, event->clock);
    if (other == s) return CODE(OK);
    Work wait{"a wait for an event", false, {}, [] {}};
    wait.ready = [=] {
        finish_some(other, place);
        return other->done >= place;
    };
    return CODE(give(s, std::move(wait)));
}

API cudaError_t cudaEventSynchronize(cudaEvent_t e) {
    Lock lock;
    auto* event = reinterpret_cast<Event*>(e);
    if (event->captured) return CODE(fail(CAPTURE_UNSUPPORTED));
    ledger.waits++;
    if (event->stream) {
        finish(event->stream, event->place);
        host_learns(event->clock);
    }
    return CODE(fail(broken()));
}

API cudaError_t cudaEventQuery(cudaEvent_t e) {
    Lock lock;
    auto* event = reinterpret_cast<Event*>(e);
    if (event->captured) return CODE(fail(CAPTURE_UNSUPPORTED));
    Stream* s = event->stream;
    if (s && s->done < event->place) finish_some(s, s->done + 1);
    return CODE(!s || s->done >= event->place ? fail(broken()) : NOT_READY);
}

API cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t a, cudaEvent_t b) {
    Lock lock;
    const Event* ends[] = {reinterpret_cast<Event*>(a), reinterpret_cast<Event*>(b)};
    for (const Event* event : ends) {
        if (event->flags & cudaEventDisableTiming || !event->stream)
            return CODE(fail(INVALID_HANDLE));
        if (event->stream->done < event->place) return CODE(NOT_READY);
    }
    *ms = *ends[1]->at - *ends[0]->at;
    return CODE(OK);
}

// ---- captured graphs ---------------------------------------------------------------------------

API cudaError_t cudaStreamBeginCapture(cudaStream_t handle, cudaStreamCaptureMode) {
    Lock lock;
    Stream* s = stream_of(handle);
    if (s->is_default) return CODE(fail(CAPTURE_UNSUPPORTED));
    if (s->capture) return CODE(fail(INVALID_VALUE));
    s->capture = new Graph;
    return CODE(OK);
}

API cudaError_t cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t* graph) {
    Lock lock;
    Stream* s = stream_of(handle);
    if (!s->capture) return CODE(fail(INVALID_VALUE));
    *graph = reinterpret_cast<cudaGraph_t>(s->capture);
    s->capture = nullptr;
    return CODE(OK);
}

API cudaError_t cudaStreamIsCapturing(cudaStream_t s, cudaStreamCaptureStatus* status) {
    const bool is = stream_of(s)->capture != nullptr;
    *status = is ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
    return CODE(OK);
}

API cudaError_t cudaGraphInstantiate(cudaGraphExec_t* made, cudaGraph_t graph,
                                     unsigned long long) {
    *made = reinterpret_cast<cudaGraphExec_t>(new Graph(*reinterpret_cast<Graph*>(graph)));
    return CODE(OK);
}

API cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
    delete reinterpret_cast<Graph*>(graph);
    return CODE(OK);
}

API cudaError_t cudaGraphExecDestroy(cudaGraphExec_t graph) {
    Lock lock;
    finish_everything();
    delete reinterpret_cast<Graph*>(graph);
    return CODE(OK);
}

API cudaError_t cudaGraphUpload(cudaGraphExec_t, cudaStream_t) { return CODE(OK); }

API cudaError_t cudaGraphLaunch(cudaGraphExec_t handle, cudaStream_t stream) {
    Lock lock;
    auto* graph = reinterpret_cast<Graph*>(handle);
    ledger.graph_launches++;
    Work work{"a captured graph", false, {}, [=] {
                  for (const auto& node : graph->nodes)
                      if (!broken()) node.run();
              }};
    for (const auto& node : graph->nodes) {
        if (node.is_kernel) ledger.kernels[node.what]++;
        for (const auto& [weak, writes] : node.touches) {
            const auto block = weak.lock();
            if (!block)
                return CODE(refuse(UNKNOWN, "a captured graph uses memory that was freed, in %s",
                                   node.what.c_str()));
            work.touches.push_back({block, writes});
        }
    }
    return CODE(give(stream_of(stream), std::move(work)));
}
