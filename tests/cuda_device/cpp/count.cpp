// Counts the bytes that kernels move: the hooks that -fsanitize=thread inserts, without TSan.
//
// Kernels of the variant "count" call them; where TSan is loaded, its own come first.
// Shared memory and the stacks of the threads are not global memory and do not count.  An address
// counts once per warp of a block: lanes that load the same word share one transaction.  Between
// warps nothing is shared, as if there were no caches.

#include <cstddef>
#include <cstdint>
#include <unordered_set>

static unsigned long long moved[2];
static std::unordered_set<std::uintptr_t> seen;  // (address, warp, kind) in this block

#pragma GCC visibility push(default)
extern "C" {

bool emu_is_global(const void* at);
int emu_warp();

void emu_traffic(unsigned long long* counts) {
    for (int i = 0; i < 2; ++i) counts[i] = moved[i], moved[i] = 0;
}

static void count(int write, const void* at, std::size_t bytes) {
    if (!emu_is_global(at)) return;
    const auto key = reinterpret_cast<std::uintptr_t>(at) << 6 | emu_warp() << 1 | write;
    if (seen.insert(key).second) moved[write] += bytes;
}

void emu_new_block() { seen.clear(); }

#define HOOKS(n)                                                 \
    void __tsan_read##n(void* at) { count(0, at, n); }           \
    void __tsan_write##n(void* at) { count(1, at, n); }          \
    void __tsan_unaligned_read##n(void* at) { count(0, at, n); } \
    void __tsan_unaligned_write##n(void* at) { count(1, at, n); }
HOOKS(1)
HOOKS(2)
HOOKS(4)
HOOKS(8)
HOOKS(16)

void __tsan_read_range(void* at, std::size_t n) { count(0, at, n); }
void __tsan_write_range(void* at, std::size_t n) { count(1, at, n); }
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_init() {}
void __tsan_vptr_update(void**, void*) {}

#define ATOMICS(bits, T)                                                                           \
    T __tsan_atomic##bits##_fetch_add(volatile T* at, T value, int) {                              \
        count(0, const_cast<T*>(at), sizeof(T));                                                   \
        count(1, const_cast<T*>(at), sizeof(T));                                                   \
        return __atomic_fetch_add(at, value, __ATOMIC_SEQ_CST);                                    \
    }                                                                                              \
    T __tsan_atomic##bits##_load(const volatile T* at, int) {                                      \
        return __atomic_load_n(at, __ATOMIC_SEQ_CST);                                              \
    }                                                                                              \
    int __tsan_atomic##bits##_compare_exchange_strong(volatile T* at, T* old, T value, int, int) { \
        count(0, const_cast<T*>(at), sizeof(T));                                                   \
        count(1, const_cast<T*>(at), sizeof(T));                                                   \
        return __atomic_compare_exchange_n(at, old, value, false, __ATOMIC_SEQ_CST,                \
                                           __ATOMIC_SEQ_CST);                                      \
    }
ATOMICS(32, unsigned)
ATOMICS(64, unsigned long long)

}  // extern "C"
#pragma GCC visibility pop
