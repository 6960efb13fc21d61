// The driver API: modules, which are shared libraries that g++ made, and their launches.
#include <dlfcn.h>

#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <set>
#include <sstream>

#include "device.h"
#include "language.h"

extern "C" {
void emu_prepare(const unsigned long long* pairs, int n, unsigned long long bytes, bool may_leave,
                 bool has_no_collectives);
const char* emu_message();
void emu_traffic(unsigned long long* counts);  // of count.cpp
}

namespace device {

namespace {

constexpr unsigned kShared = 48 << 10, kMostShared = 163 << 10;  // bytes, of an sm_80

struct Module;

struct Function {
    Module* module;
    const EmuEntry* entry;
    std::vector<std::string> types;
    unsigned most_shared = kShared;
};

struct Module {
    const EmuEntry* entries;
    bool is_cupys, is_plain;
    std::vector<unsigned long long> shared;  // addresses and sizes of its shared arrays
    std::map<std::string, Function> functions;
    // Bytes of its largest shared array; which kernel has which of them is not known here.
    unsigned long long shared_bytes() const {
        unsigned long long most = 0;
        for (size_t i = 1; i < shared.size(); i += 2) most = std::max(most, shared[i]);
        return most;
    }
};

// The arguments of a launch, copied as CUDA copies them.
struct Arguments {
    std::vector<std::max_align_t> storage;
    std::vector<void*> at;
    Arguments(const int* sizes, void** given) {
        constexpr size_t unit = sizeof(std::max_align_t);
        size_t units = 0;
        for (const int* size = sizes; *size; ++size) units += (*size + unit - 1) / unit;
        storage.resize(units);
        auto* to = storage.data();
        for (; *sizes; ++sizes, ++given) {
            std::memcpy(to, *given, *sizes);
            at.push_back(to);
            to += (*sizes + unit - 1) / unit;
        }
    }
};

// Some blocks of a grid: first <= number < last, counted along x first.
bool run_blocks(const Function* f, const unsigned* grid, const unsigned* block, long long first,
                long long last, void** args) {
    if (!emu_run(grid, block, settings.order, 7, first, last, f->entry->body, args)) return true;
    refuse(LAUNCH_FAILURE, "%s: %s", f->entry->name, emu_message());
    break_down(LAUNCH_FAILURE);
    return false;
}

void run(const Function* f, const unsigned* grid, const unsigned* block, unsigned shared,
         void** args) {
    const Module* m = f->module;
    unsigned long long moved[2];
    emu_traffic(moved);  // begins to count anew
    emu_prepare(m->shared.data(), m->shared.size() / 2, shared, m->is_cupys, m->is_plain);
    const long long x = grid[0], all = x * grid[1] * grid[2], some = settings.last_blocks;
    if (m->is_cupys || !some || all <= some) {
        run_blocks(f, grid, block, 0, all, args);
    } else {
        bool goes_on = run_blocks(f, grid, block, 0, some - 1, args);
        for (long long end : std::set<long long>{x, all})
            goes_on = goes_on && run_blocks(f, grid, block, std::max(end - 1, some - 1), end, args);
    }
    emu_traffic(moved);
    if (m->is_cupys || (!moved[0] && !moved[1])) return;
    auto& total = ledger.traffic[f->entry->name];
    for (int i = 0; i < 2; ++i) total[i] += moved[i];
}

// The blocks that the pointers of a launch fall into.  Of our kernels the type of each argument is
// known; a struct of CuPy's is searched for what looks like an address of the device.
int find_touches(const Function* f, const Arguments& args, Touches& found) {
    for (size_t i = 0; i < args.at.size(); ++i) {
        const bool pointer = f->types[i].back() == '*', other = f->types[i] == "?";
        for (int at = 0; (pointer || other) && at + 8 <= f->entry->sizes[i]; at += 8) {
            void* address;
            std::memcpy(&address, static_cast<char*>(args.at[i]) + at, sizeof address);
            if (!address) continue;
            const auto block = block_at(address, true);
            if (block && block->kind != PINNED) {
                found.push_back({block, f->types[i].compare(0, 6, "const ") != 0});
            } else if (pointer) {
                return refuse(INVALID_VALUE, "%s, argument %zu: %s %p is no memory of the device",
                              f->entry->name, i, f->types[i].c_str(), address);
            }
        }
    }
    return OK;
}

int check_shape(const Function* f, const unsigned* grid, const unsigned* block, unsigned shared) {
    const unsigned most_grid[] = {2147483647u, 65535u, 65535u}, most_block[] = {1024u, 1024u, 64u};
    bool fits = block[0] * static_cast<unsigned long long>(block[1]) * block[2] <= 1024;
    for (int i = 0; i < 3; ++i)
        fits = fits && grid[i] && grid[i] <= most_grid[i] && block[i] && block[i] <= most_block[i];
    if (!fits)
        return refuse(INVALID_VALUE, "%s: a grid of (%u, %u, %u) blocks of (%u, %u, %u) threads",
                      f->entry->name, grid[0], grid[1], grid[2], block[0], block[1], block[2]);
    const unsigned long long bytes = shared + f->module->shared_bytes();
    if (shared > f->most_shared || f->module->shared_bytes() > kShared || bytes > kMostShared)
        return refuse(INVALID_VALUE, "%s: %llu bytes of shared memory", f->entry->name, bytes);
    return OK;
}

}  // namespace

}  // namespace device

using namespace device;

// "cuda_device <library> <is CuPy's> <is plain> <address of emu_entries> (<address> <bytes>)*", as
// compiler.py writes it; the addresses are those of shared arrays within the library.
API int cuModuleLoadData(void** made, const void* image) {
    Lock lock;
    std::istringstream text(static_cast<const char*>(image));
    std::string magic, path;
    int is_cupys, is_plain;
    unsigned long long base, address, bytes;
    text >> magic >> path >> is_cupys >> is_plain >> base;
    if (!text || magic != "cuda_device")
        return refuse(INVALID_IMAGE, "a module that g++ has not compiled");
    void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (!library) return refuse(INVALID_IMAGE, "%s", dlerror());
    auto* m = new Module;
    m->entries = static_cast<const EmuEntry*>(dlsym(library, "emu_entries"));
    m->is_cupys = is_cupys;
    m->is_plain = is_plain;
    const auto loaded = reinterpret_cast<uintptr_t>(m->entries) - base;
    while (text >> address >> bytes) {
        m->shared.push_back(loaded + address);
        m->shared.push_back(bytes);
    }
    *made = m;
    return OK;
}

API int cuModuleUnload(void*) { return OK; }  // functions of it may still be queued

API int cuModuleGetFunction(void** found, void* handle, const char* name) {
    Lock lock;
    auto* m = static_cast<Module*>(handle);
    for (const EmuEntry* entry = m->entries; entry->name; ++entry) {
        if (std::strcmp(entry->name, name)) continue;
        Function& f = m->functions[name];
        if (!f.entry) {
            f = {m, entry, {}};
            std::istringstream types(entry->types);
            for (std::string type; std::getline(types, type, ',');) f.types.push_back(type);
        }
        *found = &f;
        return OK;
    }
    return fail(NOT_FOUND);
}

API int cuModuleGetGlobal_v2(void**, size_t*, void*, const char* name) {
    return refuse(NOT_FOUND, "the address of %s: this device has no global variables", name);
}

API int cuLaunchKernel(void* function, unsigned gx, unsigned gy, unsigned gz, unsigned bx,
                       unsigned by, unsigned bz, unsigned shared, void* stream, void** params,
                       void**) {
    Lock lock;
    const auto* f = static_cast<Function*>(function);
    const std::array<unsigned, 3> grid{gx, gy, gz}, block{bx, by, bz};
    if (const int error = check_shape(f, grid.data(), block.data(), shared)) return error;
    const auto args = std::make_shared<Arguments>(f->entry->sizes, params);
    Work work{f->entry->name, true, {}, [=] {
                  run(f, grid.data(), block.data(), shared, args->at.data());
              }};
    if (const int error = find_touches(f, *args, work.touches)) return error;
    Stream* s = stream_of(stream);
    if (!s->capture) {
        ledger.launches++;
        ledger.kernels[f->entry->name]++;
    }
    return give(s, std::move(work));
}

// The types of a kernel's arguments, for whoever checks a launch of it: "f4,const i8*,".
API const char* device_types(void* function) {
    return static_cast<Function*>(function)->entry->types;
}

API int cuFuncGetAttribute(int* value, int attribute, void* function) {
    const auto* f = static_cast<Function*>(function);
    switch (attribute) {
        case 0: *value = 1024; break;                             // threads of a block
        case 1: *value = f->module->shared_bytes(); break;        // of static shared memory
        case 4: *value = 32; break;                               // registers
        case 8: *value = f->most_shared; break;                   // dynamic shared memory
        default: *value = 0;
    }
    return OK;
}

API int cuFuncSetAttribute(void* function, int attribute, int value) {
    if (attribute != 8) return OK;
    if (value > static_cast<int>(kMostShared))
        return refuse(INVALID_VALUE, "%d bytes of dynamic shared memory", value);
    static_cast<Function*>(function)->most_shared = value;
    return OK;
}

API int cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, void*, int threads, size_t) {
    *blocks = 2048 / threads;
    return OK;
}

API int cuOccupancyMaxPotentialBlockSize(int* grid, int* block, void*, void*, size_t, int) {
    *grid = 8, *block = 1024;
    return OK;
}
