// What the parts of libcuda.so.1 share: blocks of memory, streams, clocks, the ledger.
//
// The device is this process's own memory and one core.  Streams are queues.  An eager device does
// what it is given at once; a lazy one does nothing before somebody waits for it, and then only
// what that wait orders.  Written from the public headers of CUDA.
#pragma once

#include <array>
#include <cstdarg>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#define API extern "C" __attribute__((visibility("default")))

namespace device {

// Error codes of CUDA that this device gives.
enum Code {
    OK = 0,
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    INVALID_DEVICE = 101,
    INVALID_IMAGE = 209,
    INVALID_HANDLE = 400,
    NOT_FOUND = 500,
    NOT_READY = 600,
    LAUNCH_FAILURE = 719,
    NOT_SUPPORTED = 801,
    CAPTURE_UNSUPPORTED = 900,
    CAPTURE_ISOLATION = 905,
    CAPTURE_IMPLICIT = 906,
    UNKNOWN = 999,
};

// What the caller can put right, such as too little memory: notes the code and gives it back.
int fail(int code);
// What no program may do (a race, a wrong argument): notes a sentence for whoever looks, too.
int refuse(int code, const char* format, ...) __attribute__((format(printf, 2, 3)));
// A kernel or a copy failed: from now on every call says so, as on a GPU.
int broken();
void break_down(int code);

// Held by whoever is in the device.
struct Lock {
    Lock();
    ~Lock();
};

int current_device();

// What tests change while they run; the environment says how they begin.
struct Settings {
    long long memory, pinned;  // bytes of a device, and of pinned memory of the host
    long long devices, lazy;
    long long order;  // of threads and blocks: 0 forward, 1 reverse, 2 random
    long long guard;  // 1: a page that nobody may touch behind every block of memory
    // 0: all blocks run; n > 0: of our kernels only the last one of each row of the grid, and the
    // first n - 1, as when a grid is too large to run.
    long long last_blocks;
};
extern Settings settings;

// ---- clocks ------------------------------------------------------------------------------------

// How much of each stream's work is known to be done, by the numbers of streams.
using Clock = std::map<int, uint64_t>;

// A use of a block: which work of which stream.
struct Use {
    int stream = -1;
    uint64_t tick = 0;
    std::string what;
};

// ---- memory ------------------------------------------------------------------------------------

enum Kind { PINNED = 1, ON_DEVICE = 2, MANAGED = 3 };  // as cudaMemoryType numbers them

struct Block {
    char* at = nullptr;
    size_t size = 0;
    Kind kind = ON_DEVICE;
    int device = 0;
    bool tracked = false;  // one array: its uses are compared with the clocks of streams
    bool alive = true;
    Use written;              // the last time
    std::map<int, Use> read;  // since then, by streams
    void* home = nullptr;  // the stream whose array it is, in whose pool it goes back
    std::function<void()> give_back;  // to the system
    ~Block() {
        if (give_back) give_back();
    }
};

// What work does to a block.  Unless it is known to read only, it counts as writing.
struct Touch {
    std::shared_ptr<Block> block;
    bool writes = true;
};
using Touches = std::vector<Touch>;

// The live block that holds an address; null: there is none.  An empty array may begin where its
// block ends, but memory of the host may begin there, too.
std::shared_ptr<Block> block_at(const void* address, bool or_its_end = false);

// ---- streams -----------------------------------------------------------------------------------

struct Work {
    std::string what;
    bool is_kernel = false;
    Touches touches;
    std::function<void()> run;
    std::function<bool()> ready = nullptr;  // asked until it says yes; null: it is
};

struct Graph {
    struct Node {
        std::string what;
        bool is_kernel;
        std::vector<std::pair<std::weak_ptr<Block>, bool>> touches;  // and whether it writes
        std::function<void()> run;
    };
    std::vector<Node> nodes;
};

struct Stream {
    int number = 0, device = 0, priority = 0;
    unsigned flags = 0;
    bool is_default = false;
    bool waits_for_default = true;  // and the default stream for it
    std::deque<Work> queue;
    uint64_t given = 0, done = 0;
    Clock clock;
    uint64_t host_version = 0;  // of the host's clock when this one last learnt from it
    Graph* capture = nullptr;
    bool busy = false;
};

Stream* stream_of(void* handle);
// Gives work to a stream; what it may not do is refused, and not done.
int give(Stream* stream, Work work);
// Does the work of a stream now; `upto`: only what was given before that.
void finish(Stream* stream, uint64_t upto = ~0ull);
void finish_everything();
// The host waits for a stream: it knows what the stream knows.
void host_waits(Stream* stream);
// The first use of a block that a stream does not come after; null: there is none.
const Use* unordered(Stream* stream, const Block& block, bool writes);

// ---- ledger ------------------------------------------------------------------------------------

struct Ledger {
    long launches = 0, copies_in = 0, copies_out = 0, copies_on = 0;
    long bytes_in = 0, bytes_out = 0, bytes_on = 0, largest_out = 0;
    long waits = 0, allocations = 0, frees = 0, sets = 0;
    long library_calls = 0, graph_launches = 0;
    long bytes_sent = 0;  // to other processes
    long held = 0, peak = 0;      // bytes of device memory
    long pinned = 0, recordings = 0;  // bytes of pinned memory; profilers that record
    long largest_pinned = 0, most_pinned = 0;  // one block of it; all that was given since `clear`
    std::map<std::string, long> kernels;
    std::map<std::string, std::array<long, 2>> traffic;  // bytes read and written, where counted
};
extern Ledger ledger;

}  // namespace device
