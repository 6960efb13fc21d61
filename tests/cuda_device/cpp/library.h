// What the libraries share: handles with a stream, work for it, LAPACK of SciPy's wheel.
//
// Every call checks what the real library refuses, reads the scalars that are on the host at once,
// and leaves the rest to the stream of its handle.
#pragma once

#include <dlfcn.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <initializer_list>
#include <string>
#include <vector>

#define API extern "C" __attribute__((visibility("default"))) int

extern "C" int device_give(void* stream, const char* what, void* const* pointers, int count,
                           int (*ready)(void*), void (*run)(void*), void* data,
                           void (*drop)(void*));

extern "C" int device_refuse(const char* name);

namespace {

// A call of these types is not there: said aloud, and as the status of the library.
inline int unknown_types(const char* name, int status) { return device_refuse(name), status; }

using Action = std::function<void()>;

struct Handle {
    void* stream = nullptr;
    bool scalars_on_device = false;
    int math_mode = 0;
};

inline Handle* handle(void* h) { return static_cast<Handle*>(h); }

// Work on these pointers for a stream; 13 is "execution failed" in all three libraries' statuses
// that CuPy turns into an error.
inline int give(void* stream, const char* what, std::initializer_list<const void*> pointers,
                Action action) {
    std::vector<void*> used;
    for (const void* p : pointers) used.push_back(const_cast<void*>(p));
    const auto run = [](void* p) { (*static_cast<Action*>(p))(); };
    const auto drop = [](void* p) { delete static_cast<Action*>(p); };
    const int error = device_give(stream, what, used.data(), used.size(), nullptr, run,
                                  new Action(std::move(action)), drop);
    return error ? 13 : 0;
}

// A function of LAPACK or BLAS in the precision of T; CUDA_DEVICE_LAPACK names SciPy's library.
template <class T>
auto lapack(const char* name) {
    static void* library = dlopen(std::getenv("CUDA_DEVICE_LAPACK"), RTLD_NOW | RTLD_LOCAL);
    const std::string symbol = std::string("scipy_") + (sizeof(T) == 4 ? "s" : "d") + name + "_";
    void* found = library ? dlsym(library, symbol.c_str()) : nullptr;
    if (!found) {
        std::fprintf(stderr, "no %s in %s\n", symbol.c_str(), std::getenv("CUDA_DEVICE_LAPACK"));
        std::abort();
    }
    return reinterpret_cast<void (*)(...)>(found);
}

// A scalar argument: on the host it is read now, on the device when its turn comes.
template <class T>
std::function<T()> scalar(void* h, const T* at) {
    if (handle(h)->scalars_on_device) return [at] { return *at; };
    const T value = *at;
    return [value] { return value; };
}

const char* const kTranspose[] = {"N", "T", "T"};

// Types of elements, as cudaDataType numbers them.
enum { FLOAT32 = 0, FLOAT64 = 1 };
inline int bytes_of(int type) { return type == FLOAT32 ? 4 : type == FLOAT64 ? 8 : 0; }

}  // namespace

// What every library has: a handle is made and destroyed, and has a stream.
#define HANDLE_CALLS(create, destroy, set_stream, get_stream) \
    API create(void** h) {                                    \
        *h = new Handle;                                      \
        return 0;                                             \
    }                                                         \
    API destroy(void* h) {                                    \
        delete handle(h);                                     \
        return 0;                                             \
    }                                                         \
    API set_stream(void* h, void* stream) {                   \
        handle(h)->stream = stream;                           \
        return 0;                                             \
    }                                                         \
    API get_stream(void* h, void** stream) {                  \
        *stream = handle(h)->stream;                          \
        return 0;                                             \
    }
