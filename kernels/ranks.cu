// out_i = X_r(i):  the rows of a block that another rank needs, one after the other, so that a message
// is one run of memory.
//
// Threads: as everywhere, x holds N columns (16 bytes) and y a row of `out`, striding down.  Bytes:
// 2 m k w for m rows, and 4 m for their numbers; each row is a coalesced run of k w bytes.

#define PACK(T, t, N)                                                                             \
    extern "C" __global__ void __launch_bounds__(kThreads) pack_rows_##t##_v##N(                  \
        i64 m, i64 k, const T* X, const i32* rows, T* out) {                                      \
        const i64 column = (static_cast<i64>(blockIdx.y) * blockDim.x + threadIdx.x) * N;         \
        if (column >= k) return;                                                                  \
        const i64 first = static_cast<i64>(blockIdx.x) * blockDim.y + threadIdx.y;                \
        const i64 step = static_cast<i64>(gridDim.x) * blockDim.y;                                \
        for (i64 i = first; i < m; i += step)                                                     \
            store(out + i * k + column, load<N>(X + static_cast<i64>(rows[i]) * k + column));     \
    }

PACK(float, f32, 1)
PACK(float, f32, 2)
PACK(float, f32, 4)
PACK(double, f64, 1)
PACK(double, f64, 2)
