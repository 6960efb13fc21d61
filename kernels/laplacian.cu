// Y = (I + lam L) X,  L = D^-1/2 (diag(A 1) - A) D^-1/2,  row by row:
//
//   Y_i = (1 + lam L_ii) X_i - lam s_i sum_j a_ij s_j X_j,   s = D^-1/2,  a_ij = 1 if no weights
//
// apply_H also returns the column dots X . Y that CG needs, and chebyshev turns H Z into the next
// iterate on the spot, so that neither ever reads Y again.  chebyshev_half reads neighbours from a
// copy of D^-1/2 Z in float16, made by halve: column c of it counts in units of `unit`, a power of
// two, and all sums stay in float32.
//
// residual gives some rows of R = B - H Z, computed in float64 whatever Z, B and R are stored in:
// numbers are widened in registers, and R is rounded once, when it is stored, in units of 1 / scale
// (a power of two).  Its column dots R . R and (B + R) . Z are those of the unrounded R.
//
// Threads: x holds N columns (16 bytes), y is a row.  Below eight column groups the spare lanes of
// a row share its non-zeros and add up by shuffles, so a row always has eight lanes or more.  Rows
// longer than `segment` are cut: the first `segment_blocks` blocks of the grid take their segments
// in turn, started before all others, and the last block of a row to finish adds its segments in
// order.  A hub of 10^5 neighbours is then 10^5 / segment pieces of work instead of one endless
// warp.  A residual is not linear in what a segment adds: there hub_sums leaves the sum of each long
// row in float64, in a launch before, and one thread per column finishes it like any other row.
//
// Order of sums, which `roundings` of the host code counts: a thread adds every splits-th neighbour
// of its row, the splits are added by shuffles; a segment is shared by blockDim.y times as many
// threads, and their sums, then those of the segments, are added in float64 by a tree over y.
//
// Bytes: 4 nnz + 8 n for the graph (values and self-loops implicit when unweighted), 2 n k w for X
// and Y (4 n k w for chebyshev): the lower bound.  On top come the gathers of neighbours, at most
// nnz k w, which the caches absorb as far as node order is local; each is a coalesced run of k w
// bytes, because blocks are row-major.  Nothing else is stored between reads.  residual moves 3 n k
// numbers as they are stored (12 n k bytes where Z, B and R are float32, where a product in float64
// and passes for R and three dots moved 100) and 24 n for the graph's scales, which are float64.
// chebyshev_half gathers nnz 2 k at most instead of nnz 4 k, and halve moves 6 n k before it: with
// 29 neighbours a row and k = 32, 298 instead of 484 GB a step for 1.1e8 nodes.

template <class T, class I>
struct Laplacian {
    i64 n, k;
    const i64* indptr;  // n + 1
    const I* indices;   // of A, without self-loops
    const T* weights;   // of A; null when every weight is 1
    const T* s;         // D^-1/2
    const T* diagonal;  // L_ii
    T lam;
    i32 segment;              // rows longer than this are cut
    i32 segments;             // how many pieces there are
    i32 segment_blocks;       // how many blocks of threads take them
    const i64* segment_row;   // the row of each piece
    const i32* segment_rank;  // its place within the row
    double* segment_sums;     // segments x k
    u32* tickets;             // gridDim.y x (segments + 1), zero between launches
};

// Which columns a thread holds, and which share of a row's non-zeros.
template <int N>
struct Lane {
    int lanes, splits, split;
    i64 column;
    bool inside, owner;

    __device__ explicit Lane(i64 k) {
        const int width = blockDim.x;
        const i64 groups = min(k / N, static_cast<i64>(width));
        for (lanes = 1; lanes < groups;) lanes *= 2;
        if (groups == width) lanes = width;
        splits = width / lanes;
        split = threadIdx.x / lanes;
        column = (static_cast<i64>(blockIdx.y) * width + threadIdx.x % lanes) * N;
        inside = column < k;
        owner = inside && split == 0;
    }
};

// Where neighbours are read: in X itself, times D^-1/2 on the way.
template <class S>
struct Rows {
    using Stored = S;
    const S* X;

    __device__ const S* row(i64 j, i64 k) const { return X + j * k; }
    template <class T>
    __device__ T factor(T s) const {
        return s;
    }
    template <class T>
    __device__ T total(T sum, i64) const {
        return sum;
    }
};

// Or in D^-1/2 X, kept in float16, column c in units of unit[c].
struct HalfRows {
    using Stored = u16;
    const u16* G;
    const float* unit;

    __device__ const u16* row(i64 j, i64 k) const { return G + j * k; }
    __device__ float factor(float) const { return 1; }
    __device__ float total(float sum, i64 column) const { return unit[column] * sum; }
};

__device__ float value(u16 bits) { return half_value(bits); }
__device__ float value(float x) { return x; }
__device__ double value(double x) { return x; }

// sum <- sum of a_ij s_j X_j over the non-zeros first, first + step, ... before last.
//
// Four neighbours a turn, whose numbers were read a turn before: a turn waits for memory once.  In the
// last turn the last neighbour stands for those that are not there, and is not added.  Sums in float64
// leave no registers for that: there a turn waits twice, and what is left over comes one by one.
template <int N, class T, class I, class Source>
__device__ void gather(const Laplacian<T, I>& L, const Source& from, i64 column, i64 first,
                       i64 last, int step, T (&sum)[N]) {
    constexpr int kAhead = 4;
    if constexpr (sizeof(T) == 8) {
#pragma unroll 4
        for (i64 e = first; e < last; e += step) {
            const i64 j = L.indices[e];
            const T s = L.s[j], a = L.weights ? L.weights[e] * s : s;
            const Vec<typename Source::Stored, N> x = load<N>(from.row(j, L.k) + column);
            for (int i = 0; i < N; ++i) sum[i] += a * static_cast<T>(x.v[i]);
        }
        return;
    }
    if (first >= last) return;
    int left = static_cast<int>((last - 1 - first) / step);  // neighbours after the first
    const I* at = L.indices + first;
    const T* weight = L.weights ? L.weights + first : nullptr;
    I next[kAhead];
#pragma unroll
    for (int u = 0; u < kAhead; ++u) next[u] = at[min(u, left) * step];
    for (;; left -= kAhead) {
        Vec<typename Source::Stored, N> x[kAhead];
        T a[kAhead];
#pragma unroll
        for (int u = 0; u < kAhead; ++u) {
            const i64 j = next[u];
            x[u] = load<N>(from.row(j, L.k) + column);
            a[u] = from.factor(L.s[j]);
            if (weight) a[u] = weight[min(u, left) * step] * a[u];
        }
        at += kAhead * step;
        if (weight) weight += kAhead * step;
        if (left >= kAhead) {
#pragma unroll
            for (int u = 0; u < kAhead; ++u) next[u] = at[min(u, left - kAhead) * step];
        }
#pragma unroll
        for (int u = 0; u < kAhead; ++u)
            if (u <= left)
                for (int i = 0; i < N; ++i) sum[i] += a[u] * static_cast<T>(value(x[u].v[i]));
        if (left < kAhead) return;
    }
}

// The same with the share of this thread, one of `workers` on the row, added up over the splits.
template <int N, class T, class I, class Source>
__device__ void gather_share(const Laplacian<T, I>& L, const Source& from, const Lane<N>& lane,
                             i64 first, i64 last, int worker, int workers, T (&sum)[N]) {
    for (int i = 0; i < N; ++i) sum[i] = 0;
    first += worker * lane.splits + lane.split;
    const int step = workers * lane.splits;
    if (lane.inside) gather(L, from, lane.column, first, last, step, sum);
    if (lane.splits > 1)  // the block is eight lanes wide then, so its warps are full
        for (int i = 0; i < N; ++i) sum[i] = warp_sum(sum[i], lane.lanes, blockDim.x);
    if (lane.inside)
        for (int i = 0; i < N; ++i) sum[i] = from.total(sum[i], lane.column + i);
}

// Y_i from the sum over its neighbours; adds X_i . Y_i to dot.
template <int N, class T, class I, class S, class Finish>
__device__ void finish_row(const Laplacian<T, I>& L, const S* X, const Lane<N>& lane, i64 row,
                           const T (&sum)[N], const Finish& finish, double (&dot)[N]) {
    const i64 at = row * L.k + lane.column;
    const T h = 1 + L.lam * L.diagonal[row], lam_s = L.lam * L.s[row];
    const Vec<S, N> stored = load<N>(X + at);
    Vec<T, N> x, y;
    for (int i = 0; i < N; ++i) {
        x.v[i] = stored.v[i];
        y.v[i] = h * x.v[i] - lam_s * sum[i];
        dot[i] += static_cast<double>(x.v[i]) * y.v[i];
    }
    finish(at, x, y);
}

// part <- the sum over one segment, by the whole block, in every row of threads.
template <int N, class T, class I, class Source>
__device__ void segment_sum(const Laplacian<T, I>& L, const Source& from, const Lane<N>& lane,
                            i32 piece, double (&part)[N]) {
    const i64 row = L.segment_row[piece], end = L.indptr[row + 1];
    const i64 first = L.indptr[row] + static_cast<i64>(L.segment_rank[piece]) * L.segment;
    T sum[N];
    gather_share(L, from, lane, first, min(first + L.segment, end), threadIdx.y, blockDim.y, sum);
    for (int i = 0; i < N; ++i) part[i] = sum[i];
    block_sum(part);
    if (lane.owner && threadIdx.y == 0)
        for (int i = 0; i < N; ++i) L.segment_sums[piece * L.k + lane.column + i] = part[i];
}

// True in the block that comes last to a long row: part <- the sum over all of its segments.
template <int N, class T, class I>
__device__ bool row_sum(const Laplacian<T, I>& L, const Lane<N>& lane, i32 piece,
                        double (&part)[N]) {
    const i64 row = L.segment_row[piece], first = piece - L.segment_rank[piece];
    const i64 length = L.indptr[row + 1] - L.indptr[row];
    const i32 pieces = static_cast<i32>((length + L.segment - 1) / L.segment);
    u32* ticket = L.tickets + static_cast<i64>(blockIdx.y) * (L.segments + 1) + first;
    if (!last_block(ticket, pieces)) return false;
    for (int i = 0; i < N; ++i) part[i] = 0;
    if (lane.inside)
#pragma unroll 4
        for (i32 p = threadIdx.y; p < pieces; p += blockDim.y)
            for (int i = 0; i < N; ++i)
                part[i] += __ldcg(L.segment_sums + (first + p) * L.k + lane.column + i);
    block_sum(part);
    return true;
}

// One segment of a long row; the last of them finishes the row.
template <int N, class T, class I, class Source, class S, class Finish>
__device__ void long_row(const Laplacian<T, I>& L, const Source& from, const S* X,
                         const Lane<N>& lane, i32 piece, const Finish& finish, double (&dot)[N]) {
    const i64 row = L.segment_row[piece];
    const bool writer = lane.owner && threadIdx.y == 0;
    double part[N];
    segment_sum(L, from, lane, piece, part);
    if (writer) {
        // Each segment gives its own share of X . Y: who comes last must not change the sum.
        const Vec<S, N> x = load<N>(X + row * L.k + lane.column);
        const double h = L.segment_rank[piece] == 0 ? 1 + L.lam * L.diagonal[row] : 0;
        const double lam_s = L.lam * L.s[row];
        for (int i = 0; i < N; ++i) dot[i] += x.v[i] * (h * x.v[i] - lam_s * part[i]);
    }
    if (!row_sum(L, lane, piece, part) || !writer) return;
    T sum[N];
    for (int i = 0; i < N; ++i) sum[i] = static_cast<T>(part[i]);
    double counted[N] = {};  // the dots of this row are in already
    finish_row(L, X, lane, row, sum, finish, counted);
}

// Y = H X: finish(offset, x, y) gets each piece of X and of Y once.  With `active`, columns of
// which none moves any more are left alone.
template <int N, class T, class I, class Source, class S, class Finish>
__device__ void multiply(const Laplacian<T, I>& L, const Source& from, const S* X,
                         const Finish& finish, const bool* active, double* partials,
                         double* dots) {
    const Lane<N> lane(L.k);
    double dots_here[1][N] = {};
    auto& dot = dots_here[0];
    if (active && !any_active<N>(active, lane.column, L.k)) return;
    if (static_cast<i32>(blockIdx.x) < L.segment_blocks) {
        for (i32 piece = blockIdx.x; piece < L.segments; piece += L.segment_blocks)
            long_row(L, from, X, lane, piece, finish, dot);
    } else {
        const i64 step = static_cast<i64>(gridDim.x - L.segment_blocks) * blockDim.y;
        const i64 start = static_cast<i64>(blockIdx.x - L.segment_blocks) * blockDim.y;
        for (i64 base = start; base < L.n; base += step) {  // the same turns for a whole warp
            const i64 row = base + threadIdx.y;
            const i64 first = row < L.n ? L.indptr[row] : 0;
            const i64 last = row < L.n ? L.indptr[row + 1] : 0;
            const bool mine = row < L.n && last - first <= L.segment;
            T sum[N];
            gather_share(L, from, lane, first, mine ? last : first, 0, 1, sum);
            if (mine && lane.owner) finish_row(L, X, lane, row, sum, finish, dot);
        }
    }
    if (!dots) return;
    u32* ticket = L.tickets + static_cast<i64>(blockIdx.y) * (L.segments + 1) + L.segments;
    if (grid_sum(dots_here, L.k, lane.owner ? lane.column : L.k, partials, ticket))
        if (lane.owner && threadIdx.y == 0)
            for (int i = 0; i < N; ++i) dots[lane.column + i] = dot[i];
}

// segment_sums of a row's first segment <- the sum over all neighbours of that long row.
template <int N, class I, class S>
__device__ void long_row_sums(const Laplacian<double, I>& L, const S* Z) {
    const Lane<N> lane(L.k);
    for (i32 piece = blockIdx.x; piece < L.segments; piece += L.segment_blocks) {
        double part[N];
        segment_sum(L, Rows<S>{Z}, lane, piece, part);
        if (row_sum(L, lane, piece, part) && lane.owner && threadIdx.y == 0) {
            const i64 first = piece - L.segment_rank[piece];
            for (int i = 0; i < N; ++i) L.segment_sums[first * L.k + lane.column + i] = part[i];
        }
    }
}

// The first segment of a long row: those of all rows are in order.
template <class T, class I>
__device__ i64 first_segment(const Laplacian<T, I>& L, i64 row) {
    i64 low = 0, high = L.segments;
    while (low < high) {
        const i64 middle = (low + high) / 2;
        if (L.segment_row[middle] < row)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

// Where B comes from and R goes: rows a, a + 1, ... before b, each in one of two precisions (the
// other pointer is null).  R may be B.
struct Residual {
    const float* B32;
    const double* B64;
    i64 a, b;
    const double* scale;  // of a column of R; null: 1
    float* R32;
    double* R64;

    template <int N>
    __device__ void store_row(i64 at, i64 column, const double (&r)[N]) const {
        constexpr int M = N < 2 ? N : 2;  // float64 numbers that fit into one store
        Vec<float, N> narrow;
        for (int i = 0; i < N; i += M) {
            Vec<double, M> wide;
            for (int c = 0; c < M; ++c) {
                wide.v[c] = scale ? r[i + c] * scale[column + i + c] : r[i + c];
                narrow.v[i + c] = static_cast<float>(wide.v[c]);
            }
            if (R64) store(R64 + at + i, wide);
        }
        if (R32) store(R32 + at, narrow);
    }

    template <int N>
    __device__ void load_row(i64 at, double (&b)[N]) const {
        constexpr int M = N < 2 ? N : 2;
        if (B32) {
            const Vec<float, N> narrow = load<N>(B32 + at);
            for (int i = 0; i < N; ++i) b[i] = narrow.v[i];
        } else {
            for (int i = 0; i < N; i += M) {
                const Vec<double, M> wide = load<M>(B64 + at + i);
                for (int c = 0; c < M; ++c) b[i + c] = wide.v[c];
            }
        }
    }
};

// R = B - H Z, and R . R and (B + R) . Z by column; the sums of long rows are there already.
template <int N, class I, class S>
__device__ void residual_of(const Laplacian<double, I>& L, const S* Z, const Residual& to,
                            double* partials, double* dots) {
    const Lane<N> lane(L.k);
    double dot[2][N] = {};
    const i64 step = static_cast<i64>(gridDim.x) * blockDim.y;
    const i64 start = to.a + static_cast<i64>(blockIdx.x) * blockDim.y;
    for (i64 base = start; base < to.b; base += step) {  // the same turns for a whole warp
        const i64 row = base + threadIdx.y;
        const i64 first = row < to.b ? L.indptr[row] : 0;
        const i64 last = row < to.b ? L.indptr[row + 1] : 0;
        const bool is_long = last - first > L.segment;
        double sum[N], r[N];
        gather_share(L, Rows<S>{Z}, lane, first, is_long ? first : last, 0, 1, sum);
        if (row >= to.b || !lane.owner) continue;
        if (is_long) {
            const double* known = L.segment_sums + first_segment(L, row) * L.k + lane.column;
            for (int i = 0; i < N; ++i) sum[i] = known[i];
        }
        const i64 at = row * L.k + lane.column, here = at - to.a * L.k;
        const double h = 1 + L.lam * L.diagonal[row], lam_s = L.lam * L.s[row];
        const Vec<S, N> z = load<N>(Z + at);
        to.load_row(here, r);
        for (int i = 0; i < N; ++i) {
            const double b = r[i], zi = z.v[i];
            r[i] = b - (h * zi - lam_s * sum[i]);
            dot[0][i] += r[i] * r[i];
            dot[1][i] += (b + r[i]) * zi;
        }
        to.store_row(here, lane.column, r);
    }
    if (!dots) return;
    u32* ticket = L.tickets + static_cast<i64>(blockIdx.y) * (L.segments + 1) + L.segments;
    if (grid_sum(dot, L.k, lane.owner ? lane.column : L.k, partials, ticket))
        if (lane.owner && threadIdx.y == 0)
            for (int m = 0; m < 2; ++m)
                for (int i = 0; i < N; ++i) dots[m * L.k + lane.column + i] = dot[m][i];
}

template <class T>
struct Store {
    T* Y;

    template <int N>
    __device__ void operator()(i64 at, const Vec<T, N>&, const Vec<T, N>& y) const {
        store(Y + at, y);
    }
};

// Z_prev <- Z + c1 (Z - Z_prev) + c2 (B - H Z)
template <class T>
struct Chebyshev {
    const T* B;
    T* Z_prev;
    T c1, c2;

    template <int N>
    __device__ void operator()(i64 at, const Vec<T, N>& z, const Vec<T, N>& Hz) const {
        const Vec<T, N> b = load<N>(B + at);
        Vec<T, N> next = load<N>(Z_prev + at);
        for (int i = 0; i < N; ++i)
            next.v[i] = (1 + c1) * z.v[i] - c1 * next.v[i] + c2 * (b.v[i] - Hz.v[i]);
        store(Z_prev + at, next);
    }
};

// Four blocks an SM leave a thread 64 registers.  In float64 that spills on sm_120, whose float64 units
// are so few that three blocks keep them busy.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1200
template <class T> constexpr int kBlocks = sizeof(T) == 8 ? 3 : 4;
#else
template <class T> constexpr int kBlocks = 4;
#endif

#define LAPLACIAN(T, I)                                                              \
    i64 n, i64 k, const i64 *indptr, const I *indices, const T *weights, const T *s, \
        const T *diagonal, T lam, i32 segment, i32 segments, i32 segment_blocks,     \
        const i64 *segment_row, const i32 *segment_rank, double *segment_sums, u32 *tickets

#define LAPLACIAN_FIELDS                                                                \
    {n, k, indptr, indices, weights, s, diagonal, lam, segment, segments, segment_blocks, \
     segment_row, segment_rank, segment_sums, tickets}

#define KERNELS(T, t, I, i, N)                                                                \
    extern "C" __global__ void __launch_bounds__(kThreads, kBlocks<T>)                        \
    apply_H_##t##_##i##_v##N(                                                                 \
        LAPLACIAN(T, I), const T* X, T* Y, const bool* active, double* partials,              \
        double* dots) {                                                                       \
        const Laplacian<T, I> L = LAPLACIAN_FIELDS;                                           \
        multiply<N>(L, Rows<T>{X}, X, Store<T>{Y}, active, partials, dots);                   \
    }                                                                                         \
    extern "C" __global__ void __launch_bounds__(kThreads, 4) chebyshev_##t##_##i##_v##N(     \
        LAPLACIAN(T, I), const T* Z, T* Z_prev, const T* B, T c1, T c2) {                     \
        const Laplacian<T, I> L = LAPLACIAN_FIELDS;                                           \
        const Chebyshev<T> next{B, Z_prev, c1, c2};                                           \
        multiply<N>(L, Rows<T>{Z}, Z, next, nullptr, nullptr, nullptr);                       \
    }                                                                                         \
    extern "C" __global__ void __launch_bounds__(kThreads, 4) hub_sums_##t##_##i##_v##N(      \
        LAPLACIAN(double, I), const T* Z) {                                                   \
        const Laplacian<double, I> L = LAPLACIAN_FIELDS;                                      \
        long_row_sums<N>(L, Z);                                                               \
    }                                                                                         \
    extern "C" __global__ void __launch_bounds__(kThreads, 3) residual_##t##_##i##_v##N(      \
        LAPLACIAN(double, I), const T* Z, const float* B32, const double* B64, i64 a, i64 b,  \
        const double* scale, float* R32, double* R64, double* partials, double* dots) {       \
        const Laplacian<double, I> L = LAPLACIAN_FIELDS;                                      \
        residual_of<N>(L, Z, Residual{B32, B64, a, b, scale, R32, R64}, partials, dots);      \
    }

#define HALF_STEP(I, i, N)                                                                    \
    extern "C" __global__ void __launch_bounds__(kThreads, 4) chebyshev_half_f32_##i##_v##N(  \
        LAPLACIAN(float, I), const u16* G, const float* unit, const float* Z, float* Z_prev,  \
        const float* B, float c1, float c2) {                                                 \
        const Laplacian<float, I> L = LAPLACIAN_FIELDS;                                       \
        const Chebyshev<float> next{B, Z_prev, c1, c2};                                       \
        multiply<N>(L, HalfRows{G, unit}, Z, next, nullptr, nullptr, nullptr);                \
    }

// G <- D^-1/2 Z in float16, column c times up[c].
#define HALVE(N)                                                                              \
    extern "C" __global__ void __launch_bounds__(kThreads) halve_f32_v##N(                    \
        i64 n, i64 k, const float* Z, const float* s, const float* up, u16* G) {              \
        const i64 column = (static_cast<i64>(blockIdx.y) * blockDim.x + threadIdx.x) * N;     \
        if (column >= k) return;                                                              \
        const Vec<float, N> scale = load<N>(up + column);                                     \
        const i64 step = static_cast<i64>(gridDim.x) * blockDim.y;                            \
        for (i64 row = blockIdx.x * blockDim.y + threadIdx.y; row < n; row += step) {         \
            const Vec<float, N> z = load<N>(Z + row * k + column);                            \
            Vec<u16, N> g;                                                                    \
            for (int i = 0; i < N; ++i) g.v[i] = half_bits(s[row] * z.v[i] * scale.v[i]);     \
            store(G + row * k + column, g);                                                   \
        }                                                                                     \
    }

#define WIDTHS(I, i)              \
    HALF_STEP(I, i, 1)            \
    HALF_STEP(I, i, 2)            \
    HALF_STEP(I, i, 4)            \
    KERNELS(float, f32, I, i, 1)  \
    KERNELS(float, f32, I, i, 2)  \
    KERNELS(float, f32, I, i, 4)  \
    KERNELS(double, f64, I, i, 1) \
    KERNELS(double, f64, I, i, 2)

// A module for each type of indices: graphs of 2^31 nodes are few, and compiling takes seconds.
#if !defined(WIDE) || !WIDE
WIDTHS(i32, i32)
HALVE(1)
HALVE(2)
HALVE(4)
#endif
#if !defined(WIDE) || WIDE
WIDTHS(i64, i64)
#endif
