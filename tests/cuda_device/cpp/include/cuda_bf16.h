// bfloat16 for g++: what CuPy's header for it asks of CUDA's header of this name.
#pragma once

struct __nv_bfloat16 {
    unsigned short bits;
    __nv_bfloat16() = default;
    template <class T, class = std::enable_if_t<std::is_arithmetic_v<T>>>
    __nv_bfloat16(T value) {
        const unsigned wide = emu_cast<unsigned>(static_cast<float>(value));
        const bool nan = (wide & 0x7fffffffu) > 0x7f800000u;
        // To the nearest, ties to even.
        const unsigned rounded = (wide + 0x7fffu + (wide >> 16 & 1)) >> 16;
        bits = nan ? 0x7fff : static_cast<unsigned short>(rounded);
    }
    operator float() const { return emu_cast<float>(static_cast<unsigned>(bits) << 16); }
};

inline unsigned short __bfloat16_as_ushort(__nv_bfloat16 b) { return b.bits; }
inline __nv_bfloat16 __ushort_as_bfloat16(unsigned short bits) {
    __nv_bfloat16 b;
    b.bits = bits;
    return b;
}
