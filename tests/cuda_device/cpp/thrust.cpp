// Sorting, in place of CuPy's module that holds compiled kernels of Thrust; thrust.py calls it.
#include <cmath>
#include <numeric>

#include "library.h"

namespace {

// As NumPy and CuPy sort: NaN comes last.
template <class T>
bool before(T a, T b) {
    if constexpr (std::is_floating_point_v<T>)
        if (std::isnan(b)) return !std::isnan(a);
    return a < b;
}

template <class T>
void sort_rows(T* data, int64_t* order, int64_t rows, int64_t n) {
    for (int64_t i = 0; i < rows; ++i, data += n) {
        if (!order) {
            std::stable_sort(data, data + n, before<T>);
            continue;
        }
        const std::vector<T> unsorted(data, data + n);
        std::iota(order, order + n, 0);
        std::stable_sort(order, order + n, [&](int64_t a, int64_t b) {
            return before(unsorted[a], unsorted[b]);
        });
        for (int64_t k = 0; k < n; ++k) data[k] = unsorted[order[k]];
        order += n;
    }
}

// By the last key, then by the one before it, and so on.
template <class T>
void sort_by_keys(const T* keys, int64_t* order, int64_t count, int64_t n) {
    std::iota(order, order + n, 0);
    for (int64_t k = 0; k < count; ++k, keys += n)
        std::stable_sort(order, order + n,
                         [&](int64_t a, int64_t b) { return before(keys[a], keys[b]); });
}

// Calls f with a null pointer of the type that NumPy calls by this letter; 1: unknown.
template <class F>
int by_type(char letter, F f) {
    switch (letter) {
        case '?': return f(static_cast<bool*>(nullptr));
        case 'b': return f(static_cast<int8_t*>(nullptr));
        case 'B': return f(static_cast<uint8_t*>(nullptr));
        case 'h': return f(static_cast<int16_t*>(nullptr));
        case 'H': return f(static_cast<uint16_t*>(nullptr));
        case 'i': return f(static_cast<int32_t*>(nullptr));
        case 'I': return f(static_cast<uint32_t*>(nullptr));
        case 'l': case 'q': return f(static_cast<int64_t*>(nullptr));
        case 'L': case 'Q': return f(static_cast<uint64_t*>(nullptr));
        case 'f': return f(static_cast<float*>(nullptr));
        case 'd': return f(static_cast<double*>(nullptr));
        default: return 1;
    }
}

}  // namespace

API device_sort(char type, void* data, int64_t* order, int64_t rows, int64_t n, void* stream) {
    return by_type(type, [=](auto* kind) {
        auto* typed = static_cast<decltype(kind)>(data);
        return give(stream, "sort", {data, order}, [=] { sort_rows(typed, order, rows, n); });
    });
}

API device_lexsort(char type, void* keys, int64_t* order, int64_t count, int64_t n, void* stream) {
    return by_type(type, [=](auto* kind) {
        auto* typed = static_cast<decltype(kind)>(keys);
        return give(stream, "lexsort", {keys, order},
                    [=] { sort_by_keys(typed, order, count, n); });
    });
}
