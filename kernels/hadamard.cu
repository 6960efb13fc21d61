// The SRHT of Algorithm 1:  out = scale S H R Q,  R random signs, H the Walsh-Hadamard matrix of
// order n' = 2^p >= n (Q padded with zero rows), S a choice of s rows; scale = 1 / sqrt(s) holds
// both the 1 / sqrt(n') of an orthogonal H and the sqrt(n' / s) of the sampling.
//
// H is a product of p butterflies along the rows, x, y -> x + y, x - y.  A pass does up to nine of
// them at once: a block holds 512 rows, 2^log_stride apart, times 64 bytes of columns in shared
// memory and mixes them by radix-8 steps in registers.  The first pass applies the signs, the last
// one scales and writes the chosen rows only.
//
// Threads: t owns one column and eight rows of a step.  A half-warp reads 64 neighbouring bytes,
// full sectors even at the largest stride.  A row of padding after every eighth keeps the two row
// groups of a warp in different banks.
//
// Bytes: ceil(p / 9) passes of 2 n' k w (two passes for n = 2^18), the first without reading the
// padding, the last writing s k w instead of n' k w.  Shared memory moves four times as much, with
// several times four the bandwidth, so DRAM stays the limit.

constexpr int kBlock = 512;
constexpr int kLogRows = 9;
constexpr u32 kStreamSigns = 3;

__device__ constexpr int slot(int row) { return row + row / 8; }

// 2^kLog points at distance 2^bit, for all rows of the tile.
template <int kLog, int kColumns, class T>
__device__ void butterflies(T (*tile)[kColumns], int log_rows, int bit) {
    constexpr int kPoints = 1 << kLog;
    const int items = kColumns << (log_rows - kLog);
    for (int item = threadIdx.x; item < items; item += kBlock) {
        const int column = item % kColumns, group = item / kColumns;
        const int first = (group >> bit << (bit + kLog)) | (group & ((1 << bit) - 1));
        T x[kPoints];
#pragma unroll
        for (int j = 0; j < kPoints; ++j) x[j] = tile[slot(first + (j << bit))][column];
#pragma unroll
        for (int half = 1; half < kPoints; half *= 2) {
#pragma unroll
            for (int j = 0; j < kPoints; ++j) {
                if (j & half) continue;
                const T a = x[j], b = x[j + half];
                x[j] = a + b;
                x[j + half] = a - b;
            }
        }
#pragma unroll
        for (int j = 0; j < kPoints; ++j) tile[slot(first + (j << bit))][column] = x[j];
    }
    __syncthreads();
}

template <class T>
__device__ void pass(i64 n, i64 k, i32 log_rows, i32 log_stride, i32 flip, u64 seed, const T* in,
                     T* out, const i64* place, T scale) {
    constexpr int kColumns = 64 / sizeof(T);
    __shared__ T tile[slot(1 << kLogRows)][kColumns];
    __shared__ bool negative[1 << kLogRows];

    const i64 block = blockIdx.x, stride = 1ll << log_stride;
    const i64 base = (block >> log_stride << (log_stride + log_rows)) | (block & (stride - 1));
    const i64 columns = static_cast<i64>(blockIdx.y) * kColumns;
    const int rows = 1 << log_rows;

    for (int r = threadIdx.x; r < rows; r += kBlock)
        negative[r] = flip && random_word(base + r * stride, kStreamSigns, seed) & 1;
    __syncthreads();
    for (int item = threadIdx.x; item < rows * kColumns; item += kBlock) {
        const int r = item / kColumns, c = item % kColumns;
        const i64 row = base + r * stride;
        const T x = row < n && columns + c < k ? in[row * k + columns + c] : 0;
        tile[slot(r)][c] = negative[r] ? -x : x;
    }
    __syncthreads();

    int bit = 0;
    for (; bit + 3 <= log_rows; bit += 3) butterflies<3>(tile, log_rows, bit);
    if (log_rows - bit == 2) butterflies<2>(tile, log_rows, bit);
    if (log_rows - bit == 1) butterflies<1>(tile, log_rows, bit);

    for (int item = threadIdx.x; item < rows * kColumns; item += kBlock) {
        const int r = item / kColumns, c = item % kColumns;
        const i64 row = base + r * stride, to = place ? place[row] : row;
        if (to >= 0 && columns + c < k) out[to * k + columns + c] = scale * tile[slot(r)][c];
    }
}

#define KERNELS(T, t)                                                                             \
    extern "C" __global__ void __launch_bounds__(kBlock)                                          \
        hadamard_##t(i64 n, i64 k, i32 log_rows, i32 log_stride, i32 flip, u64 seed, const T* in, \
                     T* out, const i64* place, T scale) {                                         \
        pass(n, k, log_rows, log_stride, flip, seed, in, out, place, scale);                      \
    }

KERNELS(float, f32)
KERNELS(double, f64)

// out[i] <- word i of a stream: the keys that choose the rows.
extern "C" __global__ void __launch_bounds__(kThreads)
    random_words(i64 count, u32 stream, u64 seed, u64* out) {
    for (i64 i = grid_first(); i < count; i += grid_step()) out[i] = random_word(i, stream, seed);
}
