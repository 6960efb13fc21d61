// Memory of the device and pinned memory of the host, and the copies between them.
#include <cuda_runtime_api.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "device.h"

namespace device {

namespace {

constexpr size_t kHuge = 1ull << 32, kPage = 4096;

std::map<uintptr_t, std::shared_ptr<Block>> blocks;  // the live ones, by address
std::map<int, size_t> used;                          // bytes of each device
std::map<void*, std::vector<Block>> left_behind;     // uses of arrays that each stream's pool has

uintptr_t number(const void* address) { return reinterpret_cast<uintptr_t>(address); }

int allocate(void** address, size_t size, Kind kind) {
    if (broken()) return fail(broken());
    const int here = current_device();
    const long long room = kind == PINNED ? settings.pinned - ledger.pinned
                                          : settings.memory - static_cast<long long>(used[here]);
    if (static_cast<long long>(size) > room) return fail(OUT_OF_MEMORY);
    void* at = nullptr;
    std::function<void()> give_back;
    if (size > kHuge || settings.guard) {  // of a huge one only what is touched has memory
        const size_t pages = (size + kPage - 1) / kPage * kPage;
        void* whole = mmap(nullptr, pages + kPage, PROT_READ | PROT_WRITE,
                           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (whole == MAP_FAILED) return fail(OUT_OF_MEMORY);
        mprotect(static_cast<char*>(whole) + pages, kPage, PROT_NONE);
        at = static_cast<char*>(whole) + (pages - (size + 15) / 16 * 16);
        if (size <= kHuge) std::memset(at, 0xff, size);
        give_back = [whole, pages] { munmap(whole, pages + kPage); };
    } else {
        if (posix_memalign(&at, 512, std::max<size_t>(size, 1))) return fail(OUT_OF_MEMORY);
        std::memset(at, 0xff, size);  // NaN: nothing may rely on what fresh memory holds
        give_back = [at] { std::free(at); };
    }
    auto block = std::make_shared<Block>();
    block->at = static_cast<char*>(at);
    block->size = size;
    block->kind = kind;
    block->device = here;
    block->give_back = give_back;
    blocks[number(at)] = block;
    if (kind == PINNED) {
        ledger.pinned += size;
        ledger.most_pinned = std::max(ledger.most_pinned, ledger.pinned);
        ledger.largest_pinned = std::max<long>(ledger.largest_pinned, size);
    } else {
        used[here] += size;
        ledger.allocations++;
        ledger.held += size;
        ledger.peak = std::max(ledger.peak, ledger.held);
    }
    *address = at;
    return OK;
}

// The memory itself goes when the last work that uses it is done.
int release(void* address) {
    if (!address) return OK;
    const auto found = blocks.find(number(address));
    if (found == blocks.end())
        return refuse(INVALID_VALUE, "%p is freed, and was not allocated", address);
    const auto block = found->second;
    block->alive = false;
    if (block->kind == PINNED) {
        ledger.pinned -= block->size;
    } else {
        used[block->device] -= block->size;
        ledger.frees++;
        ledger.held -= block->size;
    }
    blocks.erase(found);
    return OK;
}

bool is_on_device(const void* p) {
    const auto block = block_at(p);
    return block && block->kind != PINNED;
}

bool is_pinned(const void* p) {
    const auto block = block_at(p);
    return block && block->kind == PINNED;
}

size_t hash(const void* data, size_t size) {
    return std::hash<std::string_view>()({static_cast<const char*>(data), size});
}

struct Copy {
    char* to;
    size_t to_pitch;
    const char* from;
    size_t from_pitch, width, height;
    size_t bytes() const { return width * height; }
    void run() const {
        for (size_t i = 0; i < height; ++i)
            std::memmove(to + i * to_pitch, from + i * from_pitch, width);
    }
};

void count(const Copy& copy, bool to_device, bool from_device) {
    const long bytes = copy.bytes();
    if (to_device && from_device) {
        ledger.copies_on++, ledger.bytes_on += bytes;
    } else if (to_device) {
        ledger.copies_in++, ledger.bytes_in += bytes;
    } else {
        ledger.copies_out++, ledger.bytes_out += bytes;
        ledger.largest_out = std::max(ledger.largest_out, bytes);
    }
}

// The three ways of a copy: memory of the host that is not pinned is read at once, as CUDA stages
// it; into such memory the host waits for the copy; all others happen when their turn comes.
int give_copy(Copy copy, Stream* s, bool wait, int kind) {
    if (broken()) return fail(broken());
    if (!copy.bytes()) return OK;
    const bool to = is_on_device(copy.to), from = is_on_device(copy.from);
    const bool as_said = kind == cudaMemcpyHostToDevice   ? to && !from
                         : kind == cudaMemcpyDeviceToHost ? from && !to
                         : kind == cudaMemcpyDeviceToDevice ? to && from : true;
    if (!as_said)
        return refuse(INVALID_VALUE, "a copy of kind %d from %p to %p: one of them is elsewhere",
                      kind, static_cast<const void*>(copy.from), static_cast<void*>(copy.to));
    count(copy, to, from);
    wait = wait || (!to && !is_pinned(copy.to));
    Work work{"a copy", false, {}, nullptr};
    if (const auto block = block_at(copy.from)) work.touches.push_back({block, false});
    if (const auto block = block_at(copy.to)) work.touches.push_back({block, true});
    if (!from && !is_pinned(copy.from)) {
        if (s->capture) return fail(CAPTURE_UNSUPPORTED);
        auto staged = std::make_shared<std::vector<char>>(copy.bytes());
        Copy{staged->data(), copy.width, copy.from, copy.from_pitch, copy.width, copy.height}.run();
        Copy rest = copy;
        rest.from = staged->data(), rest.from_pitch = copy.width;
        work.run = [rest, staged] { rest.run(); };
    } else if (!from && settings.lazy && copy.height == 1) {
        const size_t before = hash(copy.from, copy.width);
        work.run = [copy, before] {
            if (hash(copy.from, copy.width) != before)
                refuse(UNKNOWN, "the host changed memory that a copy had still to read");
            copy.run();
        };
    } else {
        work.run = [copy] { copy.run(); };
    }
    if (s->capture && wait) return fail(CAPTURE_UNSUPPORTED);
    const int error = give(s, std::move(work));
    if (!error && wait) host_waits(s);
    return error ? error : fail(broken());
}

int give_line(void* to, const void* from, size_t n, Stream* s, bool wait, int kind) {
    return give_copy({static_cast<char*>(to), n, static_cast<const char*>(from), n, n, 1}, s, wait,
                     kind);
}

}  // namespace

std::shared_ptr<Block> block_at(const void* address, bool or_its_end) {
    auto found = blocks.upper_bound(number(address));
    if (found == blocks.begin()) return nullptr;
    --found;
    const size_t size = std::max<size_t>(found->second->size, 1);
    return number(address) < found->first + size + or_its_end ? found->second : nullptr;
}

}  // namespace device

using namespace device;
#define CODE(x) static_cast<cudaError_t>(x)

// ---- arrays with a clock -----------------------------------------------------------------------

API int device_track(void* address, void* stream);

// One array on its own, for a stream.  It behaves as CuPy's pool does, which waits for nothing and
// gives memory that was freed to the next array of the same stream: work of another stream that may
// still use it would be a race.
API int device_allocate(void** address, size_t size, void* stream) {
    Lock lock;
    for (const Block& freed : left_behind[stream])
        if (const Use* use = unordered(stream_of(stream), freed, true))
            return refuse(UNKNOWN,
                          "race: memory is handed out again that %s on stream %d may still use",
                          use->what.c_str(), use->stream);
    left_behind[stream].clear();
    if (const int error = allocate(address, size, ON_DEVICE)) return error;
    block_at(*address)->home = stream;
    return device_track(*address, stream);
}

API int device_free(void* address) {
    Lock lock;
    const auto block = block_at(address);
    if (block) {
        Block uses;
        uses.written = block->written, uses.read = block->read;
        left_behind[block->home].push_back(uses);
    }
    return release(address);
}

// The same as CuPy's allocator of C functions calls it: for which stream comes before, how it went
// after.  Functions of Python would not do, as arrays are freed while they are being collected.
static thread_local void* stream_of_array;
static thread_local int status_of_array;

API void device_begin_array(void* stream) {
    stream_of_array = stream;
    status_of_array = OK;
}

API void* device_malloc_array(void*, size_t size, int) {
    void* address = nullptr;
    status_of_array = device_allocate(&address, size, stream_of_array);
    return status_of_array ? nullptr : address;
}

API void device_free_array(void*, void* address, int) { device_free(address); }

API int device_status_of_array() { return status_of_array; }

// Memory of another library, which calls it memory of the device.
API int device_adopt(void* address, size_t size, void* stream) {
    Lock lock;
    auto block = std::make_shared<Block>();
    block->at = static_cast<char*>(address);
    block->size = size;
    block->device = current_device();
    blocks[number(address)] = block;
    return device_track(address, stream);
}

API int device_disown(void* address) {
    Lock lock;
    finish_everything();
    return blocks.erase(number(address)) ? OK : fail(INVALID_VALUE);
}

// ---- allocations -------------------------------------------------------------------------------

API cudaError_t cudaMalloc(void** p, size_t n) {
    Lock lock;
    return CODE(allocate(p, n, ON_DEVICE));
}

API cudaError_t cudaMallocManaged(void** p, size_t n, unsigned) {
    Lock lock;
    return CODE(allocate(p, n, MANAGED));
}

API cudaError_t cudaHostAlloc(void** p, size_t n, unsigned) {
    Lock lock;
    return CODE(allocate(p, n, PINNED));
}

API cudaError_t cudaHostRegister(void* p, size_t n, unsigned) {
    Lock lock;
    auto block = std::make_shared<Block>();
    block->at = static_cast<char*>(p);
    block->size = n;
    block->kind = PINNED;
    blocks[number(p)] = block;
    ledger.pinned += n;
    return CODE(OK);
}

API cudaError_t cudaFree(void* p) {
    Lock lock;
    finish_everything();
    return CODE(release(p));
}

// Whether CUDA waits before it gives pinned memory back is not documented: the caller must.
API cudaError_t cudaFreeHost(void* p) {
    Lock lock;
    const auto found = blocks.find(number(p));
    if (found != blocks.end() && found->second.use_count() > 1)
        refuse(UNKNOWN, "pinned memory is given back that a copy has still to use");
    return cudaFree(p);
}

API cudaError_t cudaHostUnregister(void* p) { return cudaFreeHost(p); }

API cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
    Lock lock;
    *total = settings.memory;
    *free = *total - used[current_device()];
    return CODE(OK);
}

API cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* found, const void* p) {
    Lock lock;
    const auto block = block_at(p, true);
    std::memset(found, 0, sizeof *found);
    found->type = block ? static_cast<cudaMemoryType>(block->kind) : cudaMemoryTypeUnregistered;
    found->device = block ? block->device : cudaInvalidDeviceId;
    found->devicePointer = block ? const_cast<void*>(p) : nullptr;
    found->hostPointer = block && block->kind == ON_DEVICE ? nullptr : const_cast<void*>(p);
    return CODE(OK);
}

// ---- copies ------------------------------------------------------------------------------------

API cudaError_t cudaMemcpy(void* to, const void* from, size_t n, cudaMemcpyKind kind) {
    Lock lock;
    const bool stays = is_on_device(to) && is_on_device(from);
    if (!stays) ledger.waits++;
    return CODE(give_line(to, from, n, stream_of(nullptr), !stays, kind));
}

API cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t n, cudaMemcpyKind kind,
                                cudaStream_t s) {
    Lock lock;
    return CODE(give_line(to, from, n, stream_of(s), false, kind));
}

API cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch,
                                  size_t width, size_t height, cudaMemcpyKind kind,
                                  cudaStream_t s) {
    Lock lock;
    const Copy copy{static_cast<char*>(to), to_pitch, static_cast<const char*>(from), from_pitch,
                    width, height};
    return CODE(give_copy(copy, stream_of(s), false, kind));
}

API cudaError_t cudaMemsetAsync(void* p, int value, size_t n, cudaStream_t s) {
    Lock lock;
    if (!n) return CODE(OK);
    if (!is_on_device(p))
        return CODE(refuse(INVALID_VALUE, "%p is set to %d, and is not on the device", p, value));
    ledger.sets++;
    return CODE(give(stream_of(s),
                     {"a memset", false, {{block_at(p)}}, [=] { std::memset(p, value, n); }}));
}

API cudaError_t cudaMemset(void* p, int value, size_t n) {
    return cudaMemsetAsync(p, value, n, nullptr);
}
