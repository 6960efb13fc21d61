// Runs kernels: one fiber per CUDA thread, one block after another.
//
// Compiled without sanitizers, so that a sanitizer sees the kernels and not the scheduler.  TSan
// learns of the fibers through its fiber interface: switches do not order memory, only __syncthreads
// and __syncwarp do; a block is ordered after all earlier ones by a mark at its start and one at its
// end.

#include <sys/mman.h>

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "language.h"

extern "C" {
void* __tsan_create_fiber(unsigned) __attribute__((weak));
void __tsan_destroy_fiber(void*) __attribute__((weak));
void __tsan_switch_to_fiber(void*, unsigned) __attribute__((weak));
void* __tsan_get_current_fiber() __attribute__((weak));
void __tsan_acquire(void*) __attribute__((weak));
void __tsan_release(void*) __attribute__((weak));
void __asan_unpoison_memory_region(const volatile void*, size_t) __attribute__((weak));
void __asan_poison_memory_region(const volatile void*, size_t) __attribute__((weak));
void emu_new_block();  // of count.cpp
}

#define EMU_API __attribute__((visibility("default")))
EMU_API EmuIndex emu_index[4];

// ---- fibers ------------------------------------------------------------------------------------

#if defined(__x86_64__) && !defined(EMU_PORTABLE)

// Saves the callee-saved registers on the old stack and takes them from the new one.
using Context = void*;
extern "C" void emu_switch(Context* from, Context to);
asm(R"(
.text
.hidden emu_switch
emu_switch:
    push %rbp; push %rbx; push %r12; push %r13; push %r14; push %r15
    mov %rsp, (%rdi)
    mov %rsi, %rsp
    pop %r15; pop %r14; pop %r13; pop %r12; pop %rbx; pop %rbp
    ret
)");

static void make_context(Context* context, char* stack, size_t size, void (*entry)()) {
    void** top = reinterpret_cast<void**>(stack + size) - 2;  // the ABI's alignment at entry
    *--top = nullptr;                                         // entry never returns
    *--top = reinterpret_cast<void*>(entry);
    top -= 6;
    std::memset(top, 0, 6 * sizeof(void*));
    *context = top;
}

static void switch_context(Context* from, Context* to) { emu_switch(from, *to); }

#else

#include <ucontext.h>
using Context = ucontext_t;

static void make_context(Context* context, char* stack, size_t size, void (*entry)()) {
    getcontext(context);
    context->uc_stack.ss_sp = stack;
    context->uc_stack.ss_size = size;
    context->uc_link = nullptr;
    makecontext(context, entry, 0);
}

static void switch_context(Context* from, Context* to) { swapcontext(from, to); }

#endif

// ---- threads -----------------------------------------------------------------------------------

namespace {

constexpr size_t kStack = (128 << 10) + 4160;  // not 2^17: the cache sets of the tops differ
constexpr int kMaxThreads = 1024;
constexpr unsigned kNoSync = 1;  // for __tsan_switch_to_fiber

enum State { READY, WAITING, DONE };
const char* kOpNames[] = {"__syncthreads", "__syncwarp", "__shfl_sync", "__ballot_sync"};

struct Thread {
    Context context;
    void* fiber;
    State state;
    EmuIndex index;
    // The collective it waits for.
    EmuOp op;
    unsigned mask;
    int line, source;
    unsigned long long value, result;
    unsigned warp_turn, block_turn;
};

Thread threads[kMaxThreads];
int count, current, waiting_for_block, finished;
Context scheduler;
void* scheduler_fiber;
char* stacks;
// Addresses that TSan orders by.
char block_marks[2], warp_marks[kMaxThreads / 32][2], start_mark, end_mark;
void (*kernel_body)(void**);
void** kernel_args;
struct Range {
    char* first;
    unsigned long long bytes;
};
std::vector<Range> shared;
char* dynamic_shared;
bool failed;
bool lenient;  // CuPy's kernels leave before barriers, and name lanes that a short warp lacks
bool plain;    // the module holds no collective: its threads need no stacks of their own
char message[1024];

void to_scheduler() {
    if (__tsan_switch_to_fiber) __tsan_switch_to_fiber(scheduler_fiber, kNoSync);
    switch_context(&threads[current].context, &scheduler);
}

void run_thread(int t) {
    current = t;
    threadIdx = threads[t].index;
    if (__tsan_switch_to_fiber) __tsan_switch_to_fiber(threads[t].fiber, kNoSync);
    switch_context(&scheduler, &threads[t].context);
}

void thread_main() {
    if (__tsan_acquire) __tsan_acquire(&start_mark);
    kernel_body(kernel_args);
    threads[current].state = DONE;
    ++finished;
    if (__tsan_release) __tsan_release(&end_mark);
    to_scheduler();
    std::abort();  // a finished thread is never resumed
}

EmuIndex index_of(unsigned t) {
    return {t % blockDim.x, t / blockDim.x % blockDim.y, t / (blockDim.x * blockDim.y)};
}

void start_block() {
    finished = waiting_for_block = 0;
    emu_new_block();
    for (int t = 0; t < count; ++t) {
        Thread& thread = threads[t];
        thread.state = READY;
        thread.warp_turn = thread.block_turn = 0;
        thread.index = index_of(t);
        make_context(&thread.context, stacks + t * kStack, kStack, thread_main);
        if (__tsan_create_fiber && !thread.fiber) thread.fiber = __tsan_create_fiber(0);
    }
    if (__tsan_release) __tsan_release(&start_mark);
}

void end_block() {
    if (__tsan_acquire) __tsan_acquire(&end_mark);
    if (!failed) return;
    // Threads that stopped half-way leave marks of their frames behind.
    for (int t = 0; t < count && __tsan_destroy_fiber; ++t) {
        __tsan_destroy_fiber(threads[t].fiber);
        threads[t].fiber = nullptr;
    }
    if (__asan_unpoison_memory_region) __asan_unpoison_memory_region(stacks, kMaxThreads * kStack);
}

void release(int t, unsigned long long result) {
    threads[t].result = result;
    threads[t].state = READY;
}

bool agree(const Thread& a, const Thread& b) {
    return a.op == b.op && a.line == b.line && a.mask == b.mask;
}

// All threads of the block have come: to the same barrier, one hopes.
void finish_block_barrier() {
    for (int t = 0; t < count; ++t)
        if (!agree(threads[t], threads[0]))
            return emu_fail("divergent barrier: thread 0 at line %d, thread %d at line %d",
                            threads[0].line, t, threads[t].line);
    for (int t = 0; t < count; ++t) release(t, 0);
    waiting_for_block = 0;
}

// Finishes the warp collective of the current thread if all lanes of its mask have come.
void try_warp(int warp, unsigned mask) {
    const Thread& me = threads[current];
    unsigned ballot = 0;
    for (int lane = 0; lane < 32; ++lane) {
        if (!(mask >> lane & 1)) continue;
        const int t = 32 * warp + lane;
        if (t >= count && lenient) continue;
        if (t >= count)
            return emu_fail("%s at line %d: lane %d is in the mask but not in the block",
                            kOpNames[me.op], me.line, lane);
        if (threads[t].state == DONE)
            return emu_fail("%s at line %d: lane %d has left the kernel", kOpNames[me.op], me.line,
                            lane);
        if (threads[t].state != WAITING) return;
        if (!agree(threads[t], me))
            return emu_fail(
                "divergent warp: lane %d waits in %s at line %d, lane %d in %s at line %d",
                current % 32, kOpNames[me.op], me.line, lane, kOpNames[threads[t].op],
                threads[t].line);
        ballot |= static_cast<unsigned>(threads[t].value != 0) << lane;
    }
    for (int lane = 0; lane < 32; ++lane) {
        if (!(mask >> lane & 1) || 32 * warp + lane >= count) continue;
        const int t = 32 * warp + lane, source = threads[t].source;
        if (me.op == EMU_SHUFFLE && !(mask >> source & 1))
            return emu_fail("__shfl_sync at line %d: lane %d reads lane %d outside the mask",
                            me.line, lane, source);
        release(t, me.op == EMU_SHUFFLE ? threads[32 * warp + source].value : ballot);
    }
}

void run_block(int order, unsigned* random) {
    std::vector<int> turns(count);
    for (int t = 0; t < count; ++t) turns[t] = order == 1 ? count - 1 - t : t;
    while (finished < count && !failed) {
        if (order == 2)
            for (int t = count - 1; t > 0; --t)
                std::swap(turns[t], turns[rand_r(random) % (t + 1)]);
        int ran = 0;
        for (int t : turns) {
            if (threads[t].state != READY) continue;
            run_thread(t);
            ++ran;
            if (failed) return;
        }
        if (lenient && finished && waiting_for_block && finished + waiting_for_block == count) {
            for (int t = 0; t < count; ++t)
                if (threads[t].state == WAITING) release(t, 0);
            waiting_for_block = 0;
            continue;
        }
        if (finished && waiting_for_block)
            return emu_fail("%d threads left the kernel before the __syncthreads of the others",
                            finished);
        if (!ran) return emu_fail("deadlock: %d of %d threads wait", count - finished, count);
    }
}

void run_without_stacks(void (*body)(void**), void** args) {
    for (current = 0; current < count && !failed; ++current) {
        threadIdx = index_of(current);
        body(args);
    }
}

void poison() {
    for (const Range& range : shared) std::memset(range.first, 0xFF, range.bytes);
}

}  // namespace

extern "C" {

EMU_API int emu_lane() { return current % 32; }
int emu_warp() { return current / 32; }

// Neither shared memory, nor a stack, nor the built-in indices: for the byte counter.
bool emu_is_global(const void* at) {
    const char* p = static_cast<const char*>(at);
    auto within = [p](const void* first, const void* last) { return first <= p && p < last; };
    return !within(stacks, stacks + kMaxThreads * kStack) && !within(emu_index, emu_index + 4) &&
           std::none_of(shared.begin(), shared.end(), [&](const Range& range) {
               return within(range.first, range.first + range.bytes);
           });
}

// What the next launch needs: where its `n` shared arrays are (pairs of an address and a size), how
// many bytes of shared memory are dynamic, and the two kinds of leniency above.
EMU_API void emu_prepare(const unsigned long long* pairs, int n, unsigned long long bytes,
                         bool may_leave, bool has_no_collectives) {
    shared.clear();
    for (int i = 0; i < n; ++i)
        shared.push_back({reinterpret_cast<char*>(pairs[2 * i]), pairs[2 * i + 1]});
    std::free(dynamic_shared);
    const unsigned long long whole = (bytes + 127) & ~127ull, used = (bytes + 7) & ~7ull;
    dynamic_shared = bytes ? static_cast<char*>(std::aligned_alloc(128, whole)) : nullptr;
    if (__asan_poison_memory_region && used < whole)
        __asan_poison_memory_region(dynamic_shared + used, whole - used);
    if (dynamic_shared) shared.push_back({dynamic_shared, bytes});
    lenient = may_leave;
    plain = has_no_collectives;
}

EMU_API void* emu_dynamic_shared() { return dynamic_shared; }

void emu_fail(const char* format, ...) {
    va_list rest;
    va_start(rest, format);
    const int used = std::snprintf(message, sizeof message, "block (%u, %u, %u): ", blockIdx.x,
                                   blockIdx.y, blockIdx.z);
    std::vsnprintf(message + used, sizeof message - used, format, rest);
    va_end(rest);
    failed = true;
}

EMU_API const char* emu_message() { return message; }

EMU_API unsigned long long emu_collective(EmuOp op, unsigned mask, unsigned long long value,
                                          int source, int line) {
    Thread& me = threads[current];
    const int warp = current / 32;
    const bool block = op == EMU_SYNC_BLOCK, orders = block || op == EMU_SYNC_WARP;
    me.op = op;
    me.mask = mask;
    me.value = value;
    me.source = source;
    me.line = line;
    me.state = WAITING;
    // Two marks take turns: a fast thread must not add its next barrier to the clock of this one.
    char* mark = block ? &block_marks[me.block_turn++ & 1] : &warp_marks[warp][me.warp_turn & 1];
    if (op == EMU_SYNC_WARP) ++me.warp_turn;
    if (orders && __tsan_release) __tsan_release(mark);
    if (block) {
        if (++waiting_for_block == count) finish_block_barrier();
    } else if (!(mask >> current % 32 & 1)) {
        emu_fail("%s at line %d: lane %d calls it but is not in the mask", kOpNames[op], line,
                 current % 32);
    } else {
        try_warp(warp, mask);
    }
    if (me.state == WAITING || failed) to_scheduler();
    if (orders && __tsan_acquire) __tsan_acquire(mark);
    return me.result;
}

// Runs the blocks first <= number < last of a grid; 0, or -1 with a message.
int emu_run(const unsigned* grid, const unsigned* block, int order, unsigned seed, long long first,
            long long last, void (*body)(void**), void** args) {
    gridDim = {grid[0], grid[1], grid[2]};
    blockDim = {block[0], block[1], block[2]};
    count = block[0] * block[1] * block[2];
    kernel_body = body;
    kernel_args = args;
    failed = false;
    blockIdx = {0, 0, 0};
    if (count < 1 || count > kMaxThreads) return emu_fail("a block of %d threads", count), -1;
    if (!stacks)
        stacks = static_cast<char*>(mmap(nullptr, kMaxThreads * kStack, PROT_READ | PROT_WRITE,
                                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    if (stacks == MAP_FAILED) return stacks = nullptr, emu_fail("no memory for stacks"), -1;
    if (__tsan_get_current_fiber) scheduler_fiber = __tsan_get_current_fiber();
    const long long blocks = static_cast<long long>(grid[0]) * grid[1] * grid[2];
    for (long long b = first; b < (last < blocks ? last : blocks) && !failed; ++b) {
        const long long number = order == 1 ? (last < blocks ? last : blocks) - 1 - (b - first) : b;
        blockIdx = {static_cast<unsigned>(number % grid[0]),
                    static_cast<unsigned>(number / grid[0] % grid[1]),
                    static_cast<unsigned>(number / grid[0] / grid[1])};
        poison();
        if (plain) {
            run_without_stacks(body, args);
            continue;
        }
        start_block();
        run_block(order, &seed);
        end_block();
    }
    return failed ? -1 : 0;
}

}  // extern "C"
