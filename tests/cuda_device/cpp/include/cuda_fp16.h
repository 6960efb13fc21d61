// half for g++: what CuPy's header for float16 asks of CUDA's header of this name.
#pragma once

struct __half_raw {
    unsigned short x;
};

struct __half {
    unsigned short bits;
    __half() = default;
    __half(const __half_raw& raw) : bits(raw.x) {}
    template <class T, class = std::enable_if_t<std::is_arithmetic_v<T>>>
    __half(T value) : bits(emu_cast<unsigned short>(static_cast<_Float16>(value))) {}
    operator float() const { return static_cast<float>(emu_cast<_Float16>(bits)); }
    operator __half_raw() const { return {bits}; }
};

using half = __half;
inline unsigned short __half_as_ushort(__half h) { return h.bits; }
inline __half __ushort_as_half(unsigned short bits) { return __half_raw{bits}; }
inline __half __float2half(float x) { return x; }
inline float __half2float(__half h) { return h; }
