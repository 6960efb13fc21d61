// What every kernel file uses.  Its text is prepended to theirs: NVRTC from pip finds no headers,
// and a compile cache sees the text it is given but not what that text includes.
//
// Blocks of threads are two-dimensional: x runs over groups of N neighbouring columns of a
// row-major n x k block, y over rows.  Neighbouring threads thus touch neighbouring addresses for
// every k, and each thread keeps its own columns for good.  Sums never use float atomics: their
// order is fixed, so equal input gives equal bits.

using u16 = unsigned short;
using i32 = int;
using i64 = long long;
using u32 = unsigned int;
using u64 = unsigned long long;

constexpr int kThreads = 256;  // the most threads of a block, unless a kernel says otherwise
enum : u32 { kAllLanes = 0xffffffffu };

// N values that move in one load or store instruction (16 bytes at most).
template <class T, int N>
struct alignas(sizeof(T) * N) Vec {
    T v[N];
};

template <int N, class T>
__device__ Vec<T, N> load(const T* at) {
    return *reinterpret_cast<const Vec<T, N>*>(at);
}

// Stores by name: a plain assignment of a Vec can end up as N store instructions.
template <class T>
__device__ void store(T* at, const Vec<T, 1>& x) {
    *at = x.v[0];
}
__device__ void store(float* at, const Vec<float, 2>& x) {
    __stwb(reinterpret_cast<float2*>(at), make_float2(x.v[0], x.v[1]));
}
__device__ void store(float* at, const Vec<float, 4>& x) {
    __stwb(reinterpret_cast<float4*>(at), make_float4(x.v[0], x.v[1], x.v[2], x.v[3]));
}
__device__ void store(double* at, const Vec<double, 2>& x) {
    __stwb(reinterpret_cast<double2*>(at), make_double2(x.v[0], x.v[1]));
}
__device__ void store(u16* at, const Vec<u16, 2>& x) {
    __stwb(reinterpret_cast<ushort2*>(at), make_ushort2(x.v[0], x.v[1]));
}
__device__ void store(u16* at, const Vec<u16, 4>& x) {
    __stwb(reinterpret_cast<ushort4*>(at), make_ushort4(x.v[0], x.v[1], x.v[2], x.v[3]));
}

// ---- float16 -----------------------------------------------------------------------------------

// Without a header there is no type for it: its bits are u16, and they are taken apart by hand.
// The value of float16 bits; where they are taken apart, a NaN is not one.
__device__ float half_value(u16 bits) {
#ifdef __CUDA_ARCH__
    float x;  // one instruction for what takes three below
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
    return x;
#else
    const u32 signed_bits = static_cast<u32>(static_cast<i32>(static_cast<short>(bits)));
    return __uint_as_float(signed_bits << 13 & 0x8fffe000u) * 0x1p112f;
#endif
}

// The bits of the nearest float16, ties to even; beyond its range, of the largest there is.
__device__ u16 half_bits(float x) {
    const u32 sign = __float_as_uint(x) >> 16 & 0x8000u;
    const float a = fabsf(x);
    if (!(a <= 65504.0f)) return static_cast<u16>(sign | (a > 65504.0f ? 0x7bffu : 0x7e00u));
    const u32 exponent = max(__float_as_uint(a) >> 23, 113u);  // 2^-14 is the smallest
    // The last place of a float 2^13 times larger is that of float16: the sum rounds to it.
    const u32 base = (exponent + 13) << 23;
    const u32 units = __float_as_uint(a + __uint_as_float(base)) - base;
    return static_cast<u16>(sign | (((exponent - 113) << 10) + units));
}

// The first index and the stride of a one-dimensional grid-stride loop.
__device__ i64 grid_first() { return static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x; }
__device__ i64 grid_step() { return static_cast<i64>(gridDim.x) * blockDim.x; }

// ---- sums ------------------------------------------------------------------------------------

// Sum over the lanes of a warp that differ in the bits from `low` up to below `high`; all get it.
template <class T>
__device__ T warp_sum(T x, int low = 1, int high = 32) {
    for (int bit = low; bit < high; bit *= 2) x += __shfl_xor_sync(kAllLanes, x, bit);
    return x;
}

// v[i] <- its sum over the rows (threadIdx.y) of the block, by a fixed tree; all threads get it.
template <int N>
__device__ void block_sum(double (&v)[N]) {
    __shared__ double tile[N][kThreads];
    const int thread = threadIdx.y * blockDim.x + threadIdx.x;
    for (int i = 0; i < N; ++i) tile[i][thread] = v[i];
    __syncthreads();
    for (int rows = blockDim.y; rows > 1; rows = (rows + 1) / 2) {
        const int half = (rows + 1) / 2;
        if (static_cast<int>(threadIdx.y) < rows - half)
            for (int i = 0; i < N; ++i) tile[i][thread] += tile[i][thread + half * blockDim.x];
        __syncthreads();
    }
    for (int i = 0; i < N; ++i) v[i] = tile[i][threadIdx.x];
    __syncthreads();  // the tile may be used again at once
}

// True in the last of `count` blocks that come here, which then sees what the others have stored.
// One thread fences for its whole block: the barriers before and after it carry the order over to
// the others, and a fence of every warp would wait for as many.  The ticket wraps to 0, so it is
// ready for the next launch.
__device__ bool last_block(u32* ticket, u32 count) {
    __shared__ bool last;
    __syncthreads();
    if (threadIdx.x == 0 && threadIdx.y == 0) {
        __threadfence();
        last = atomicInc(ticket, count - 1) == count - 1;
        __threadfence();
    }
    __syncthreads();
    return last;
}

// v[m][i] <- its sum over all rows of the grid, M numbers for each of the columns column + i of k.
// True in the one block that has it; partials holds gridDim.x * M * k numbers, and there is one
// ticket per blockIdx.y.  The last block is alone on the device: its loads are unrolled, so that a
// thread waits for eight rows of partials at once, in the order in which it adds them.
template <int M, int N>
__device__ bool grid_sum(double (&v)[M][N], i64 k, i64 column, double* partials, u32* ticket) {
    const bool inside = column < k;
    for (int m = 0; m < M; ++m) block_sum(v[m]);
    if (inside && threadIdx.y == 0)
        for (int m = 0; m < M; ++m)
            for (int i = 0; i < N; ++i)
                partials[(static_cast<i64>(blockIdx.x) * M + m) * k + column + i] = v[m][i];
    if (!last_block(ticket, gridDim.x)) return false;
    for (int m = 0; m < M; ++m) {
        const double* from = partials + m * k + column;
        for (int i = 0; i < N; ++i) v[m][i] = 0;
        if (inside)
#pragma unroll 8
            for (i64 block = threadIdx.y; block < gridDim.x; block += blockDim.y)
                for (int i = 0; i < N; ++i) v[m][i] += __ldcg(from + block * M * k + i);
        block_sum(v[m]);
    }
    return true;
}

// Whether any column of this block of threads, column + i of k in each thread, still moves.
template <int N>
__device__ bool any_active(const bool* active, i64 column, i64 k) {
    bool here = false;  // one row of threads looks for all
    for (int i = 0; threadIdx.y == 0 && column < k && i < N; ++i) here = here || active[column + i];
    return __syncthreads_or(here);
}

// ---- random numbers ----------------------------------------------------------------------------

struct Words {
    u32 w[4];
};

// Philox-4x32-10 (Salmon et al., SC 2011): a counter in, four random words out, nothing stored.
__device__ Words philox(u32 c0, u32 c1, u32 c2, u32 c3, u64 seed) {
    u32 k0 = static_cast<u32>(seed), k1 = static_cast<u32>(seed >> 32);
    for (int round = 0; round < 10; ++round) {
        const u64 p0 = static_cast<u64>(c0) * 0xD2511F53u, p1 = static_cast<u64>(c2) * 0xCD9E8D57u;
        c0 = static_cast<u32>(p1 >> 32) ^ c1 ^ k0;
        c1 = static_cast<u32>(p1);
        c2 = static_cast<u32>(p0 >> 32) ^ c3 ^ k1;
        c3 = static_cast<u32>(p0);
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    return {{c0, c1, c2, c3}};
}

// Word number `index` of a stream, 64 bits.
__device__ u64 random_word(u64 index, u32 stream, u64 seed) {
    const Words r = philox(static_cast<u32>(index), static_cast<u32>(index >> 32), 0, stream, seed);
    return static_cast<u64>(r.w[1]) << 32 | r.w[0];
}

__device__ void sincospi_of(float x, float* s, float* c) { sincospif(x, s, c); }
__device__ void sincospi_of(double x, double* s, double* c) { sincospi(x, s, c); }
__device__ float log_of(float x) { return logf(x); }
__device__ double log_of(double x) { return log(x); }
__device__ float sqrt_of(float x) { return sqrtf(x); }
__device__ double sqrt_of(double x) { return sqrt(x); }

// Four standard normals: Box-Muller on 24-bit uniforms, which float holds exactly, so that every
// backend and every precision starts from the same bits.
template <class T>
__device__ Vec<T, 4> gaussians(const Words& r) {
    constexpr T unit = static_cast<T>(1.0 / (1 << 24));
    Vec<T, 4> g;
    for (int pair = 0; pair < 4; pair += 2) {
        const T u1 = static_cast<T>((r.w[pair] >> 8) + 1) * unit;
        const T u2 = static_cast<T>(r.w[pair + 1] >> 8) * unit;
        const T radius = sqrt_of(-2 * log_of(u1));
        T s, c;
        sincospi_of(2 * u2, &s, &c);
        g.v[pair] = radius * c;
        g.v[pair + 1] = radius * s;
    }
    return g;
}
