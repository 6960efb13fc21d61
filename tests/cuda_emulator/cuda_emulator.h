// CUDA C++ for g++: enough of the language to run kernels/*.cu unmodified on the CPU.
//
// Force-included before the kernels, which the loader wraps in an unnamed namespace, so that
// shared arrays of templates are local symbols that AddressSanitizer can fence.
#pragma once

#include <cmath>
#include <cstring>
#include <tuple>
#include <type_traits>
#include <utility>

#define __global__
#define __device__ inline
#define __launch_bounds__(...)
#define __shared__ static  // the loader finds them by name and has them poisoned before each block

#define threadIdx emu_index[0]
#define blockIdx emu_index[1]
#define blockDim emu_index[2]
#define gridDim emu_index[3]

struct EmuIndex {
    unsigned x, y, z;
};

extern "C" {
extern EmuIndex emu_index[4];

enum EmuOp { EMU_SYNC_BLOCK, EMU_SYNC_WARP, EMU_SHUFFLE, EMU_BALLOT };

// One collective of this thread: returns when all of `mask` (or the block) have come to it.
unsigned long long emu_collective(EmuOp op, unsigned mask, unsigned long long value, int source,
                                  int line);
int emu_lane();
void emu_fail(const char* format, ...);
int emu_run(const unsigned* grid, const unsigned* block, int order, unsigned seed, long long first,
            long long last, void (*body)(void**), void** args);
}

// ---- collectives -------------------------------------------------------------------------------

#define EMU_HERE int line = __builtin_LINE()

inline void __syncthreads(EMU_HERE) { emu_collective(EMU_SYNC_BLOCK, 0, 0, 0, line); }

// Not instrumented: the barriers around it are the emulator's own.
__attribute__((no_sanitize("thread"))) inline int __syncthreads_or(int predicate, EMU_HERE) {
    static int emu_any;
    emu_collective(EMU_SYNC_BLOCK, 0, 0, 0, line);
    emu_any = 0;
    emu_collective(EMU_SYNC_BLOCK, 0, 0, 0, line);
    if (predicate) emu_any = 1;
    emu_collective(EMU_SYNC_BLOCK, 0, 0, 0, line);
    return emu_any;
}

inline void __syncwarp(unsigned mask = 0xffffffffu, EMU_HERE) {
    emu_collective(EMU_SYNC_WARP, mask, 0, 0, line);
}

inline unsigned __ballot_sync(unsigned mask, int predicate, EMU_HERE) {
    return emu_collective(EMU_BALLOT, mask, predicate != 0, 0, line);
}

template <class T>
T emu_shuffle(unsigned mask, T value, int source, int line) {
    static_assert(sizeof(T) <= 8);
    unsigned long long bits = 0;
    std::memcpy(&bits, &value, sizeof(T));
    bits = emu_collective(EMU_SHUFFLE, mask, bits, source, line);
    std::memcpy(&value, &bits, sizeof(T));
    return value;
}

template <class T>
T __shfl_sync(unsigned mask, T value, int source, EMU_HERE) {
    return emu_shuffle(mask, value, source & 31, line);
}

template <class T>
T __shfl_xor_sync(unsigned mask, T value, int bits, EMU_HERE) {
    return emu_shuffle(mask, value, emu_lane() ^ bits, line);
}

template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, EMU_HERE) {
    const int lane = emu_lane(), source = lane - static_cast<int>(delta);
    return emu_shuffle(mask, value, source < 0 ? lane : source, line);
}

template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, EMU_HERE) {
    const int lane = emu_lane(), source = lane + static_cast<int>(delta);
    return emu_shuffle(mask, value, source > 31 ? lane : source, line);
}

// ---- atomics and arithmetic --------------------------------------------------------------------

inline void __threadfence() {}  // blocks run one after another

template <class T>
T atomicAdd(T* at, T value) {
    static_assert(std::is_integral_v<T>, "float atomics make sums depend on chance");
    return __atomic_fetch_add(at, value, __ATOMIC_SEQ_CST);
}

inline unsigned atomicInc(unsigned* at, unsigned limit) {
    unsigned old = __atomic_load_n(at, __ATOMIC_SEQ_CST);
    while (!__atomic_compare_exchange_n(at, &old, old >= limit ? 0 : old + 1, false,
                                        __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) {
    }
    return old;
}

template <class T>
T min(T a, T b) {
    return b < a ? b : a;
}

template <class T>
T max(T a, T b) {
    return a < b ? b : a;
}

inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
    return static_cast<unsigned long long>(static_cast<unsigned __int128>(a) * b >> 64);
}

inline int __popc(unsigned x) { return __builtin_popcount(x); }

inline void sincospi(double x, double* s, double* c) {
    *s = std::sin(M_PI * x);
    *c = std::cos(M_PI * x);
}

inline void sincospif(float x, float* s, float* c) {
    *s = static_cast<float>(std::sin(M_PI * x));
    *c = static_cast<float>(std::cos(M_PI * x));
}

inline float __uint_as_float(unsigned bits) {
    float x;
    std::memcpy(&x, &bits, sizeof(x));
    return x;
}

inline unsigned __float_as_uint(float x) {
    unsigned bits;
    std::memcpy(&bits, &x, sizeof(bits));
    return bits;
}

using ushort = unsigned short;
#define EMU_VECTOR(T, N, ...)            \
    struct alignas(N * sizeof(T)) T##N { \
        T __VA_ARGS__;                   \
    };
EMU_VECTOR(float, 2, x, y)
EMU_VECTOR(float, 4, x, y, z, w)
EMU_VECTOR(double, 2, x, y)
EMU_VECTOR(ushort, 2, x, y)
EMU_VECTOR(ushort, 4, x, y, z, w)

inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline double2 make_double2(double x, double y) { return {x, y}; }
inline ushort2 make_ushort2(ushort x, ushort y) { return {x, y}; }
inline ushort4 make_ushort4(ushort x, ushort y, ushort z, ushort w) { return {x, y, z, w}; }

template <class T>
void __stwb(T* at, T value) {
    *at = value;
}

template <class T>
T __ldcg(const T* at) {  // past the first cache, of which there is none here
    return *at;
}

// ---- what the loader sees ----------------------------------------------------------------------

// "f4", "const i8*", ...: NumPy's names, so that a launch can be checked against them.
template <class T>
const char* emu_type() {
    if constexpr (std::is_pointer_v<T>) {
        using Target = std::remove_pointer_t<T>;
        static char name[32];
        std::strcpy(name, std::is_const_v<Target> ? "const " : "");
        std::strcat(name, emu_type<std::remove_const_t<Target>>());
        return std::strcat(name, "*");
    } else {
        constexpr bool is_bool = std::is_same_v<T, bool>, is_float = std::is_floating_point_v<T>;
        static_assert(std::is_arithmetic_v<T>, "kernel arguments are numbers and pointers");
        constexpr char integer = std::is_signed_v<T> ? 'i' : 'u';
        constexpr char kind = is_bool ? 'b' : is_float ? 'f' : integer;
        static const char name[] = {kind, '0' + sizeof(T), 0};
        return name;
    }
}

template <class... Args>
struct EmuKernel {
    static const char* types() {
        static char names[2048];
        names[0] = 0;
        ((std::strcat(names, emu_type<Args>()), std::strcat(names, ",")), ...);
        return names;
    }

    template <void (*kernel)(Args...), std::size_t... Is>
    __attribute__((no_sanitize("thread"))) static void call(void** args,
                                                            std::index_sequence<Is...>) {
        kernel(*static_cast<Args*>(args[Is])...);
    }

    template <void (*kernel)(Args...)>
    static void body(void** args) {
        call<kernel>(args, std::index_sequence_for<Args...>());
    }
};

template <class... Args>
EmuKernel<Args...> emu_kernel(void (*)(Args...));

#define EMU_EXPORT(name)                                                                     \
    extern "C" const char* name##_types() { return decltype(emu_kernel(name))::types(); }    \
    extern "C" int name##_run(const unsigned* grid, const unsigned* block, int order,        \
                              unsigned seed, long long first, long long last, void** args) { \
        return emu_run(grid, block, order, seed, first, last,                                \
                       &decltype(emu_kernel(name))::template body<name>, args);              \
    }
