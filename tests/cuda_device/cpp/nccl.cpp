// NCCL between the processes of one machine: a message is a file of a folder that the unique id
// names.
//
// A call whose message has not come stays in its stream, and with it all that follows there.
// Messages find each other by their order, as NCCL's do; one of another length than was expected is
// an error of the communicator.
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <map>

#include "library.h"

extern "C" int device_number();
extern "C" void device_sent(long bytes);

namespace {

enum { INVALID_ARGUMENT = 4, INVALID_USAGE = 5, REMOTE = 6, MOST_CALLS = 2048 };

struct Id {
    char folder[128];
};

struct Communicator {
    std::string folder;
    int rank, size, device;
    std::map<int, long> sent, received;  // messages to and from each rank
    std::atomic<int> aborted{0}, error{0};
};

struct Call {
    Communicator* by;
    bool sends;
    char* at;
    size_t bytes;
    int peer;
    void* stream;
    long number;

    std::string file() const {
        const int from = sends ? by->rank : peer, to = sends ? peer : by->rank;
        return by->folder + "/" + std::to_string(from) + "-" + std::to_string(to) + "-" +
               std::to_string(number);
    }
};

thread_local int depth;  // of groups
thread_local std::vector<Call> group;

void write(const std::string& name, const char* data, size_t size) {
    const std::string part = name + ".part";
    FILE* file = std::fopen(part.c_str(), "w");
    if (!file) return;
    std::fwrite(data, 1, size, file);
    std::fclose(file);
    std::rename(part.c_str(), name.c_str());  // at once: nobody reads half of it
}

bool exists(const std::string& name) { return access(name.c_str(), R_OK) == 0; }

struct Exchange {
    std::vector<Call> calls;
    bool sent = false;
};

// A message of another length than was expected: the call never ends, and the communicator says so.
bool fits(const Call& call) {
    struct stat about = {};
    stat(call.file().c_str(), &about);
    if (static_cast<size_t>(about.st_size) == call.bytes) return true;
    call.by->error = REMOTE;
    return false;
}

int is_ready(void* data) {
    auto* exchange = static_cast<Exchange*>(data);
    for (const Call& call : exchange->calls)
        if (call.sends && !exchange->sent && !call.by->aborted)
            write(call.file(), call.at, call.bytes);
    exchange->sent = true;
    for (const Call& call : exchange->calls)
        if (!call.sends && !call.by->aborted && !(exists(call.file()) && fits(call))) return 0;
    return 1;
}

void receive(void* data) {
    for (const Call& call : static_cast<Exchange*>(data)->calls) {
        if (call.sends || call.by->aborted) continue;
        FILE* file = std::fopen(call.file().c_str(), "r");
        if (!file || std::fread(call.at, 1, call.bytes, file) != call.bytes) call.by->error = REMOTE;
        if (file) std::fclose(file);
        unlink(call.file().c_str());
    }
}

int end_group() {
    if (group.size() > MOST_CALLS) {
        group.clear();
        return INVALID_USAGE;
    }
    std::map<void*, Exchange*> by_stream;
    for (Call& call : group) {
        auto& number = call.sends ? call.by->sent : call.by->received;
        call.number = number[call.peer]++;
        if (call.sends && call.peer != call.by->rank) device_sent(call.bytes);
        auto*& exchange = by_stream[call.stream];
        if (!exchange) exchange = new Exchange;
        exchange->calls.push_back(call);
    }
    group.clear();
    int error = 0;
    for (auto& [stream, exchange] : by_stream) {
        std::vector<void*> pointers;
        for (const Call& call : exchange->calls) pointers.push_back(call.at);
        const auto drop = [](void* data) { delete static_cast<Exchange*>(data); };
        if (device_give(stream, "a message of NCCL", pointers.data(), pointers.size(), is_ready,
                        receive, exchange, drop))
            error = INVALID_USAGE;
    }
    return error;
}

int add(Call call) {
    if (call.by->aborted || call.peer < 0 || call.peer >= call.by->size) return INVALID_ARGUMENT;
    group.push_back(call);
    return depth ? 0 : end_group();
}

size_t bytes_of_type(int type) {
    static const int sizes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2};
    return type < 10 ? sizes[type] : 1;
}

Communicator* communicator(void* c) { return static_cast<Communicator*>(c); }

}  // namespace

API ncclGetVersion(int* version) { return *version = 22703, 0; }

API ncclGetUniqueId(Id* id) {
    char name[] = "/dev/shm/nccl-XXXXXX";
    if (!mkdtemp(name)) return 2;
    std::memset(id, 0, sizeof *id);
    std::strcpy(id->folder, name);
    return 0;
}

extern "C" __attribute__((visibility("default"))) const char* ncclGetErrorString(int error) {
    static thread_local char text[32];
    std::snprintf(text, sizeof text, "NCCL error %d", error);
    return text;
}

// All ranks come here, and tell each other which device they have: two may not share one.
API ncclCommInitRankConfig(void** made, int size, Id id, int rank, void*) {
    auto* c = new Communicator{id.folder, rank, size, device_number()};
    const std::string mine = std::to_string(c->device);
    write(c->folder + "/device-" + std::to_string(rank), mine.data(), mine.size());
    for (int other = 0; other < size; ++other) {
        const std::string name = c->folder + "/device-" + std::to_string(other);
        while (!exists(name)) usleep(1000);
        int theirs = -1;
        if (FILE* file = std::fopen(name.c_str(), "r")) {
            if (std::fscanf(file, "%d", &theirs) != 1) theirs = -1;
            std::fclose(file);
        }
        if (other != rank && theirs == c->device) return INVALID_USAGE;
    }
    *made = c;
    return 0;
}

API ncclCommInitRank(void** made, int size, Id id, int rank) {
    return ncclCommInitRankConfig(made, size, id, rank, nullptr);
}

API ncclCommDestroy(void*) { return 0; }  // work that is queued may still name it
API ncclCommAbort(void* c) { return communicator(c)->aborted = 1, 0; }
API ncclCommGetAsyncError(void* c, int* error) { return *error = communicator(c)->error, 0; }
API ncclCommCount(void* c, int* size) { return *size = communicator(c)->size, 0; }
API ncclCommUserRank(void* c, int* rank) { return *rank = communicator(c)->rank, 0; }
API ncclCommCuDevice(void* c, int* device) { return *device = communicator(c)->device, 0; }
API ncclGroupStart() { return ++depth, 0; }
API ncclGroupEnd() {
    if (!depth) return INVALID_USAGE;
    return --depth ? 0 : end_group();
}

API ncclSend(const void* data, size_t n, int type, int peer, void* c, void* stream) {
    auto* at = static_cast<char*>(const_cast<void*>(data));
    return add({communicator(c), true, at, n * bytes_of_type(type), peer, stream, 0});
}

API ncclRecv(void* data, size_t n, int type, int peer, void* c, void* stream) {
    auto* at = static_cast<char*>(data);
    return add({communicator(c), false, at, n * bytes_of_type(type), peer, stream, 0});
}

API ncclAllGather(const void* from, void* to, size_t n, int type, void* c, void* stream) {
    const size_t bytes = n * bytes_of_type(type);
    ++depth;
    int error = 0;
    for (int rank = 0; rank < communicator(c)->size && !error; ++rank) {
        error = ncclSend(from, n, type, rank, c, stream);
        char* part = static_cast<char*>(to) + rank * bytes;
        if (!error) error = ncclRecv(part, n, type, rank, c, stream);
    }
    const int ended = --depth ? 0 : end_group();
    return error ? error : ended;
}
