// CUDA C++ for g++: the language, the built-in functions and the vector types that CuPy's kernels
// and ours use.
//
// Force-included before a kernel source, which is compiled unmodified.  Ours (RawModule) are compiled
// with EMU_STRICT: they may not use float atomics, which make sums depend on chance.
#pragma once

#include <assert.h>
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <complex>
#include <cstring>
#include <functional>
#include <initializer_list>
#include <limits>
#include <tuple>
#include <type_traits>
#include <utility>

#define __CUDACC_VER_MAJOR__ 13  // CuPy's float16 asks for it
#define __global__
#define __device__  // not "inline": CuPy writes `inline __host__ __device__`
#define __host__
#define __constant__
#define __managed__
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __align__(n) __attribute__((aligned(n)))
#define __launch_bounds__(...)
#define __shared__ static  // the loader finds them by name and has them poisoned before each block

#define threadIdx emu_index[0]
#define blockIdx emu_index[1]
#define blockDim emu_index[2]
#define gridDim emu_index[3]
static const int warpSize = 32;

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
void* emu_dynamic_shared();
int emu_run(const unsigned* grid, const unsigned* block, int order, unsigned seed, long long first,
            long long last, void (*body)(void**), void** args);
}

// ---- collectives -------------------------------------------------------------------------------

#define EMU_HERE int line = __builtin_LINE()
#define EMU_ALL_LANES 0xffffffffu

inline void __syncthreads(EMU_HERE) { emu_collective(EMU_SYNC_BLOCK, 0, 0, 0, line); }

// Not instrumented: the barriers around it are the emulator's own.
__attribute__((no_sanitize("thread"))) inline int __syncthreads_count(int predicate, EMU_HERE) {
    static int emu_count;
    emu_collective(EMU_SYNC_BLOCK, 0, 0, 0, line);
    emu_count = 0;
    emu_collective(EMU_SYNC_BLOCK, 0, 0, 0, line);
    if (predicate) ++emu_count;
    emu_collective(EMU_SYNC_BLOCK, 0, 0, 0, line);
    return emu_count;
}

inline int __syncthreads_or(int predicate, EMU_HERE) {
    return __syncthreads_count(predicate, line) > 0;
}

inline int __syncthreads_and(int predicate, EMU_HERE) {
    return __syncthreads_count(!predicate, line) == 0;
}

inline void __syncwarp(unsigned mask = EMU_ALL_LANES, EMU_HERE) {
    emu_collective(EMU_SYNC_WARP, mask, 0, 0, line);
}

inline unsigned __ballot_sync(unsigned mask, int predicate, EMU_HERE) {
    return emu_collective(EMU_BALLOT, mask, predicate != 0, 0, line);
}

inline int __any_sync(unsigned mask, int predicate, EMU_HERE) {
    return __ballot_sync(mask, predicate, line) != 0;
}

inline int __all_sync(unsigned mask, int predicate, EMU_HERE) {
    return __ballot_sync(mask, !predicate, line) == 0;
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

// `width` cuts a warp into groups; a lane that would read beyond its group keeps its own value.
template <class T>
T __shfl_sync(unsigned mask, T value, int source, int width = 32, EMU_HERE) {
    return emu_shuffle(mask, value, (emu_lane() & -width) | (source & (width - 1)), line);
}

template <class T>
T __shfl_xor_sync(unsigned mask, T value, int bits, int width = 32, EMU_HERE) {
    const int lane = emu_lane(), source = lane ^ bits;
    return emu_shuffle(mask, value, source >= (lane & -width) + width ? lane : source, line);
}

template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32, EMU_HERE) {
    const int lane = emu_lane(), source = lane - static_cast<int>(delta);
    return emu_shuffle(mask, value, source < (lane & -width) ? lane : source, line);
}

template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32, EMU_HERE) {
    const int lane = emu_lane(), source = lane + static_cast<int>(delta);
    return emu_shuffle(mask, value, source > (lane & -width) + width - 1 ? lane : source, line);
}

inline void __threadfence() {}  // blocks run one after another
inline void __threadfence_block() {}
inline void __threadfence_system() {}

// ---- atomics -----------------------------------------------------------------------------------

template <class T, class F>
T emu_atomic(T* at, F f) {
    using Half = std::conditional_t<sizeof(T) == 4, unsigned, unsigned short>;
    using Bits = std::conditional_t<sizeof(T) == 8, unsigned long long, Half>;
    Bits* const bits = reinterpret_cast<Bits*>(at);
    Bits old = __atomic_load_n(bits, __ATOMIC_SEQ_CST), now;
    T was, next;
    do {
        std::memcpy(&was, &old, sizeof(T));
        next = f(was);
        std::memcpy(&now, &next, sizeof(T));
    } while (!__atomic_compare_exchange_n(bits, &old, now, false, __ATOMIC_SEQ_CST,
                                          __ATOMIC_SEQ_CST));
    return was;
}

#define EMU_ATOMIC(T, name, expression)                            \
    inline T name(T* at, T v) {                                    \
        return emu_atomic(at, [=](T x) -> T { return expression; }); \
    }
#define EMU_INTEGER_ATOMICS(T)                                              \
    EMU_ATOMIC(T, atomicExch, (void(x), v))                                 \
    EMU_ATOMIC(T, atomicMin, v < x ? v : x)                                 \
    EMU_ATOMIC(T, atomicMax, x < v ? v : x)                                 \
    EMU_ATOMIC(T, atomicAnd, x& v)                                          \
    EMU_ATOMIC(T, atomicOr, x | v)                                          \
    EMU_ATOMIC(T, atomicXor, x ^ v)                                         \
    inline T atomicAdd(T* at, T v) {                                        \
        return __atomic_fetch_add(at, v, __ATOMIC_SEQ_CST);                 \
    }                                                                       \
    inline T atomicCAS(T* at, T old, T v) {                                 \
        return emu_atomic(at, [=](T x) -> T { return x == old ? v : x; }); \
    }
EMU_INTEGER_ATOMICS(int)
EMU_INTEGER_ATOMICS(unsigned)
EMU_ATOMIC(long long, atomicMin, v < x ? v : x)
EMU_ATOMIC(long long, atomicMax, x < v ? v : x)
EMU_INTEGER_ATOMICS(unsigned long long)
EMU_ATOMIC(unsigned, atomicInc, x >= v ? 0 : x + 1)
EMU_ATOMIC(unsigned, atomicDec, x == 0 || x > v ? v : x - 1)
EMU_ATOMIC(int, atomicSub, x - v)
EMU_ATOMIC(unsigned, atomicSub, x - v)
inline unsigned short atomicCAS(unsigned short* at, unsigned short old, unsigned short v) {
    return emu_atomic(at, [=](unsigned short x) { return x == old ? v : x; });
}
#ifndef EMU_STRICT
EMU_ATOMIC(float, atomicAdd, x + v)
EMU_ATOMIC(double, atomicAdd, x + v)
EMU_ATOMIC(float, atomicExch, (void(x), v))
EMU_ATOMIC(double, atomicExch, (void(x), v))
#endif

// ---- arithmetic --------------------------------------------------------------------------------

#define EMU_TWO_NUMBERS \
    class A, class B,   \
        class = std::enable_if_t<std::is_arithmetic_v<A> && std::is_arithmetic_v<B>>

template <EMU_TWO_NUMBERS>
constexpr std::common_type_t<A, B> min(A a, B b) {
    using T = std::common_type_t<A, B>;
    if constexpr (std::is_floating_point_v<T>)
        return std::fmin(T(a), T(b));
    else
        return T(b) < T(a) ? T(b) : T(a);
}

template <EMU_TWO_NUMBERS>
constexpr std::common_type_t<A, B> max(A a, B b) {
    using T = std::common_type_t<A, B>;
    if constexpr (std::is_floating_point_v<T>)
        return std::fmax(T(a), T(b));
    else
        return T(a) < T(b) ? T(b) : T(a);
}

template <class To, class From>
To emu_cast(From x) {
    static_assert(sizeof(To) == sizeof(From));
    To y;
    std::memcpy(&y, &x, sizeof y);
    return y;
}

inline float __uint_as_float(unsigned x) { return emu_cast<float>(x); }
inline unsigned __float_as_uint(float x) { return emu_cast<unsigned>(x); }
inline float __int_as_float(int x) { return emu_cast<float>(x); }
inline int __float_as_int(float x) { return emu_cast<int>(x); }
inline double __longlong_as_double(long long x) { return emu_cast<double>(x); }
inline long long __double_as_longlong(double x) { return emu_cast<long long>(x); }
inline int __double2hiint(double x) { return emu_cast<unsigned long long>(x) >> 32; }
inline int __double2loint(double x) { return static_cast<int>(emu_cast<unsigned long long>(x)); }
inline double __hiloint2double(int high, int low) {
    const unsigned long long bits = static_cast<unsigned>(high);
    return emu_cast<double>(bits << 32 | static_cast<unsigned>(low));
}
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
    return static_cast<unsigned long long>(static_cast<unsigned __int128>(a) * b >> 64);
}
inline unsigned __umulhi(unsigned a, unsigned b) {
    return static_cast<unsigned long long>(a) * b >> 32;
}
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __clz(int x) { return x ? __builtin_clz(x) : 32; }
inline int __clzll(long long x) { return x ? __builtin_clzll(x) : 64; }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __ffsll(long long x) { return __builtin_ffsll(x); }
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selectors) {
    const unsigned long long both = static_cast<unsigned long long>(y) << 32 | x;
    unsigned found = 0;
    for (int i = 0; i < 4; ++i) {
        const unsigned byte = both >> 8 * (selectors >> 4 * i & 7) & 255;
        found |= byte << 8 * i;
    }
    return found;
}
inline double rsqrt(double x) { return 1 / std::sqrt(x); }
inline float rsqrtf(float x) { return 1 / std::sqrt(x); }
inline float rsqrt(float x) { return rsqrtf(x); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __expf(float x) { return std::exp(x); }
inline float __logf(float x) { return std::log(x); }
inline float __powf(float x, float y) { return std::pow(x, y); }
inline double sinpi(double x) { return std::sin(M_PI * x); }
inline double cospi(double x) { return std::cos(M_PI * x); }
inline void sincospi(double x, double* s, double* c) {
    *s = std::sin(M_PI * x);
    *c = std::cos(M_PI * x);
}
inline void sincospif(float x, float* s, float* c) {
    *s = static_cast<float>(std::sin(M_PI * x));
    *c = static_cast<float>(std::cos(M_PI * x));
}
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline double __fma_rn(double a, double b, double c) { return std::fma(a, b, c); }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline double __dmul_rn(double a, double b) { return a * b; }
inline double __dadd_rn(double a, double b) { return a + b; }
inline long long clock64() { return 0; }

// Loads and stores that name a cache, of which there is none here.
template <class T>
T __ldg(const T* at) {
    return *at;
}
template <class T>
T __ldcg(const T* at) {
    return *at;
}
template <class T>
T __ldcs(const T* at) {
    return *at;
}
template <class T>
void __stwb(T* at, T value) {
    *at = value;
}
template <class T>
void __stcs(T* at, T value) {
    *at = value;
}

using uchar = unsigned char;
#define EMU_VECTOR(T, N, ...)                                          \
    struct alignas(N * sizeof(T) > 16 ? 16 : N * sizeof(T)) T##N {     \
        T __VA_ARGS__;                                                 \
    };
#define EMU_VECTORS(T)                                             \
    EMU_VECTOR(T, 2, x, y)                                         \
    EMU_VECTOR(T, 4, x, y, z, w)                                   \
    struct T##3 {                                                  \
        T x, y, z;                                                 \
    };                                                             \
    inline T##2 make_##T##2(T x, T y) { return {x, y}; }           \
    inline T##3 make_##T##3(T x, T y, T z) { return {x, y, z}; }   \
    inline T##4 make_##T##4(T x, T y, T z, T w) { return {x, y, z, w}; }
EMU_VECTORS(char)
EMU_VECTORS(uchar)
EMU_VECTORS(short)
EMU_VECTORS(ushort)
EMU_VECTORS(int)
EMU_VECTORS(uint)
EMU_VECTORS(float)
EMU_VECTORS(double)
struct dim3 {
    unsigned x = 1, y = 1, z = 1;
};

// ---- what a launch sees ------------------------------------------------------------------------

// "f4", "const i8*", ...: NumPy's names, so that a launch can be checked against them; "?" for
// what is neither a number nor a pointer to some.
template <class T>
const char* emu_type() {
    if constexpr (std::is_pointer_v<T>) {
        using Target = std::remove_pointer_t<T>;
        static char name[32];
        std::strcpy(name, std::is_const_v<Target> ? "const " : "");
        std::strcat(name, emu_type<std::remove_const_t<Target>>());
        return std::strcat(name, "*");
    } else if constexpr (std::is_arithmetic_v<T>) {
        constexpr bool is_bool = std::is_same_v<T, bool>, is_float = std::is_floating_point_v<T>;
        constexpr char integer = std::is_signed_v<T> ? 'i' : 'u';
        constexpr char kind = is_bool ? 'b' : is_float ? 'f' : integer;
        static const char name[] = {kind, '0' + sizeof(T), 0};
        return name;
    } else {
        return "?";
    }
}

template <class... Args>
struct EmuKernel {
    static const char* types() {
        static char names[4096];
        names[0] = 0;
        ((std::strcat(names, emu_type<Args>()), std::strcat(names, ",")), ...);
        return names;
    }

    static const int* sizes() {
        static const int bytes[] = {static_cast<int>(sizeof(Args))..., 0};
        return bytes;
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

// A kernel as the device finds it in a module, in a table that ends with an entry without a name.
struct EmuEntry {
    const char* name;
    void (*body)(void**);
    const int* sizes;   // bytes of each argument, 0 behind the last
    const char* types;  // "f4,const i8*,"
};
#define EMU_ENTRY(label, ...)                                                              \
    {label, &decltype(emu_kernel(__VA_ARGS__))::template body<__VA_ARGS__>,                \
     decltype(emu_kernel(__VA_ARGS__))::sizes(), decltype(emu_kernel(__VA_ARGS__))::types()},
