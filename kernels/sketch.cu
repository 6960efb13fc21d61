// The Gaussian sketches of Algorithm 2, transposed, n x k, without ever storing Pi:
//
//   sketch_incidence   (Pi_1 B_hat)^T:  row u = s_u / sqrt(k) sum_v +-sqrt(a_uv) g(u, v)
//   sketch_identity    Pi_2^T:          row u = g(u) / sqrt(k)
//
// with s = D^-1/2, + for the smaller end of an edge, and g(lo, hi) in R^k the Philox normals of an
// edge.  Nodes are named, and compared, as the caller does: row u is node order[u], or u itself
// where there is no order, so that the order of storage does not change a sketch (the host puts the
// rows of Pi_2^T in order).  An edge's numbers are made again by each of its two ends: no exchange,
// no atomics, any order of work gives the same bits.
//
// Threads: x makes four columns (one Philox call), y is a row and walks its neighbours.  Rows that
// are longer than `segment` have the first blocks of the grid to themselves, all y on one row.
//
// Bytes: 4 nnz + 8 n in, n k w out, the bound for B_hat implicit.  The work is arithmetic: about
// 300 instructions for four numbers (sm_86), nnz k / 4 times, hence T's own precision throughout
// (double runs at 1/32 or 1/64 of the speed on consumer devices).

constexpr u32 kStreamIncidence = 0, kStreamIdentity = 1;

struct Place {
    u32 group;  // of four columns
    i64 column;
    bool inside;

    __device__ explicit Place(i64 k)
        : group(blockIdx.y * blockDim.x + threadIdx.x), column(4ll * group), inside(column < k) {}

    template <class T>
    __device__ void write(T* out, i64 row, i64 k, T factor, const T (&x)[4]) const {
        for (int i = 0; i < 4; ++i)
            if (column + i < k) out[row * k + column + i] = factor * x[i];
    }
};

// The caller's name of a row.
__device__ i64 node_of(const i64* order, i64 row) { return order ? order[row] : row; }

// sum <- sum over the neighbours first, first + step, ... before last of a row.
template <class T, class I>
__device__ void add_edges(const I* indices, const T* weights, const i64* order, u32 group, u64 seed,
                          i64 row, i64 first, i64 last, int step, T (&sum)[4]) {
    for (int i = 0; i < 4; ++i) sum[i] = 0;
    const i64 u = node_of(order, row);
    for (i64 e = first; e < last; e += step) {
        const i64 v = node_of(order, indices[e]);
        const u32 lo = static_cast<u32>(min(u, v)), hi = static_cast<u32>(max(u, v));
        const Vec<T, 4> g = gaussians<T>(philox(lo, hi, group, kStreamIncidence, seed));
        const T root = weights ? sqrt_of(weights[e]) : static_cast<T>(1);
        for (int i = 0; i < 4; ++i) sum[i] += (u < v ? root : -root) * g.v[i];
    }
}

template <class T, class I>
__device__ void incidence(i64 n, i64 k, const i64* indptr, const I* indices, const T* weights,
                          const T* s, const i64* order, i32 segment, i32 longs,
                          const i64* long_rows, T scale, u64 seed, T* out) {
    const Place at(k);
    T sum[4];
    if (static_cast<i32>(blockIdx.x) < longs) {
        const i64 u = long_rows[blockIdx.x], last = at.inside ? indptr[u + 1] : 0;
        const i64 first = indptr[u] + threadIdx.y;
        add_edges(indices, weights, order, at.group, seed, u, first, last, blockDim.y, sum);
        double total[4];
        for (int i = 0; i < 4; ++i) total[i] = sum[i];
        block_sum(total);
        for (int i = 0; i < 4; ++i) sum[i] = static_cast<T>(total[i]);
        if (threadIdx.y == 0) at.write(out, u, k, scale * s[u], sum);
        return;
    }
    if (!at.inside) return;
    const i64 step = static_cast<i64>(gridDim.x - longs) * blockDim.y;
    for (i64 u = static_cast<i64>(blockIdx.x - longs) * blockDim.y + threadIdx.y; u < n;
         u += step) {
        const i64 first = indptr[u], last = indptr[u + 1];
        if (last - first > segment) continue;
        add_edges(indices, weights, order, at.group, seed, u, first, last, 1, sum);
        at.write(out, u, k, scale * s[u], sum);
    }
}

template <class T>
__device__ void identity(i64 n, i64 k, T scale, u64 seed, T* out) {
    const Place at(k);
    const i64 step = static_cast<i64>(gridDim.x) * blockDim.y;
    for (i64 u = static_cast<i64>(blockIdx.x) * blockDim.y + threadIdx.y; u < n; u += step) {
        const u32 lo = static_cast<u32>(u), hi = static_cast<u32>(u >> 32);
        const Vec<T, 4> g = gaussians<T>(philox(lo, hi, at.group, kStreamIdentity, seed));
        at.write(out, u, k, scale, g.v);
    }
}

#define INCIDENCE(T, t, I, i)                                                                      \
    extern "C" __global__ void __launch_bounds__(kThreads, 4) sketch_incidence_##t##_##i(          \
        i64 n, i64 k, const i64* indptr, const I* indices, const T* weights, const T* s,           \
        const i64* order, i32 segment, i32 longs, const i64* long_rows, T scale, u64 seed,         \
        T* out) {                                                                                  \
        incidence(n, k, indptr, indices, weights, s, order, segment, longs, long_rows, scale,      \
                  seed, out);                                                                      \
    }

#define IDENTITY(T, t)                                                 \
    extern "C" __global__ void __launch_bounds__(kThreads, 4)          \
        sketch_identity_##t(i64 n, i64 k, T scale, u64 seed, T* out) { \
        identity(n, k, scale, seed, out);                              \
    }

INCIDENCE(float, f32, i32, i32)
INCIDENCE(float, f32, i64, i64)
INCIDENCE(double, f64, i32, i32)
INCIDENCE(double, f64, i64, i64)
IDENTITY(float, f32)
IDENTITY(double, f64)
