// Edge scores, weighted sampling, and the sampled graph L_tilde (Algorithm 2):
//
//   l_e = ||B_S^T b_e||^2 + ||Pi_S^T b_e||^2 / lam,   b_e = sqrt(a) (s_lo delta_lo - s_hi delta_hi)
//   q_e = floor(2^x l_e), prefix sums in 64-bit integers, s draws: the edge whose share of the
//   total holds a random word; repeats are merged by counting.  factor_e = count / (s p_e).
//
// Integer sums are exact in any order, so that the same scores and seed give the same edges on
// every device, and the integer atomics of the counts cannot change a result.
//
// Edges are numbered as in Graph.edges: by row, the neighbours above the diagonal.  Rows are
// sorted, so edge (u, v) is number first_edge[u] + (place of v among u's upper neighbours), and the
// CSR of L_tilde is the old one without the entries whose edge has factor 0: no sort, no atomics.
//
// Threads: a warp per row to list edges and to filter rows (ballots give each kept entry its place;
// a hub of 10^5 is 3,000 turns of one warp, once a fit), eight lanes per edge for the scores, one
// thread per edge or draw elsewhere.
//
// Bytes: scores 8 m + 4 m k w gathered (edges sorted by lo keep half of it in L1), 8 m out; prefix
// sums 32 m against a bound of 16 m, in three plain launches; draws 8 s log2(m) gathered, mostly
// from L2; filter 2 (4 nnz + 8 nnz) and one search of a row per lower entry; bounds of pairs 4 nnz
// and 8 nnz gathered, with nothing of nnz numbers stored.

constexpr u32 kStreamSample = 2;

// ---- prefix sums --------------------------------------------------------------------------------

constexpr int kItems = 8;  // per thread
constexpr int kTile = kThreads * kItems;

// x <- inclusive prefix sums over the block; returns the total.
__device__ i64 scan_block(i64 (&x)[kItems]) {
    __shared__ i64 warp_totals[kThreads / 32];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    for (int i = 1; i < kItems; ++i) x[i] += x[i - 1];
    i64 before = x[kItems - 1];  // becomes the sum up to and with this thread
    for (int step = 1; step < 32; step *= 2) {
        const i64 left = __shfl_up_sync(kAllLanes, before, step);
        if (lane >= step) before += left;
    }
    if (lane == 31) warp_totals[warp] = before;
    __syncthreads();
    i64 offset = before - x[kItems - 1], total = 0;
    for (int w = 0; w < kThreads / 32; ++w) {
        if (w < warp) offset += warp_totals[w];
        total += warp_totals[w];
    }
    __syncthreads();  // the totals may be overwritten by the next call
    for (int i = 0; i < kItems; ++i) x[i] += offset;
    return total;
}

__device__ void load_items(i64 n, i64 first, const i64* in, i64 (&x)[kItems]) {
    for (int i = 0; i < kItems; ++i) x[i] = first + i < n ? in[first + i] : 0;
}

// 1. Prefix sums within each tile, and the tiles' totals.
extern "C" __global__ void __launch_bounds__(kThreads)
    scan_tiles(i64 n, const i64* in, i64* out, i64* totals) {
    const i64 first = blockIdx.x * static_cast<i64>(kTile) + threadIdx.x * kItems;
    i64 x[kItems];
    load_items(n, first, in, x);
    const i64 total = scan_block(x);
    for (int i = 0; i < kItems; ++i)
        if (first + i < n) out[first + i] = x[i];
    if (threadIdx.x == 0) totals[blockIdx.x] = total;
}

// 2. totals <- what stands before each tile; one block.
extern "C" __global__ void __launch_bounds__(kThreads) scan_totals(i64 tiles, i64* totals) {
    i64 carry = 0;
    for (i64 base = 0; base < tiles; base += kTile) {
        const i64 first = base + threadIdx.x * kItems;
        i64 x[kItems], own[kItems];
        load_items(tiles, first, totals, x);
        for (int i = 0; i < kItems; ++i) own[i] = x[i];
        const i64 total = scan_block(x);
        for (int i = 0; i < kItems; ++i)
            if (first + i < tiles) totals[first + i] = carry + x[i] - own[i];
        carry += total;
    }
}

// 3. Add it.
extern "C" __global__ void __launch_bounds__(kThreads)
    scan_add(i64 n, const i64* totals, i64* out) {
    for (i64 i = grid_first(); i < n; i += grid_step()) out[i] += totals[i / kTile];
}

// ---- edges --------------------------------------------------------------------------------------

// The first place in first..last of a sorted list whose entry exceeds `value`.
template <class A>
__device__ i64 upper_bound(const A* list, i64 first, i64 last, i64 value) {
    while (first < last) {
        const i64 middle = first + (last - first) / 2;
        if (list[middle] > value) last = middle;
        else first = middle + 1;
    }
    return first;
}

template <class I>
struct Edges {
    i64 n;
    const i64* indptr;
    const I* indices;
    const i64* first_edge;  // n + 1: the number of a row's first upper entry

    __device__ i64 upper(i64 row) const {  // where its upper entries begin
        return indptr[row + 1] - (first_edge[row + 1] - first_edge[row]);
    }

    // The number of the edge that CSR entry e = (u, v) stands for.
    __device__ i64 number(i64 e, i64 u, i64 v) const {
        if (v > u) return first_edge[u] + (e - upper(u));
        const i64 first = upper(v);
        return first_edge[v] + (upper_bound(indices, first, indptr[v + 1], u) - 1 - first);
    }
};

template <class I>
__device__ void count_upper(i64 n, const i64* indptr, const I* indices, i64* counts) {
    for (i64 u = grid_first(); u < n; u += grid_step())
        counts[u] = indptr[u + 1] - upper_bound(indices, indptr[u], indptr[u + 1], u);
}

template <class T, class I>
__device__ void list_edges(const Edges<I>& E, const T* weights, I* lo, I* hi, T* edge_weights) {
    const i64 step = static_cast<i64>(gridDim.x) * blockDim.y;
    for (i64 u = static_cast<i64>(blockIdx.x) * blockDim.y + threadIdx.y; u < E.n; u += step) {
        const i64 upper = E.upper(u), shift = E.first_edge[u] - upper;
        for (i64 e = upper + threadIdx.x; e < E.indptr[u + 1]; e += 32) {
            lo[shift + e] = static_cast<I>(u);
            hi[shift + e] = E.indices[e];
            if (weights) edge_weights[shift + e] = weights[e];
        }
    }
}

// This thread's share of ||S^T b_e||^2: every eighth group of N columns.
template <int N, class T>
__device__ T share(i64 k, const T* S, i64 lo, i64 hi, T s_lo, T s_hi) {
    T sum = 0;
    for (i64 c = threadIdx.x * N; c < k; c += 8 * N) {
        const Vec<T, N> x = load<N>(S + lo * k + c), y = load<N>(S + hi * k + c);
        for (int i = 0; i < N; ++i) {
            const T d = s_lo * x.v[i] - s_hi * y.v[i];
            sum += d * d;
        }
    }
    return sum;
}

template <int N, class T, class I>
__device__ void score(i64 m, i64 k, const I* lo, const I* hi, const T* weights, const T* s,
                      const T* B_S, const T* Pi_S, double lam, double* scores) {
    const i64 step = static_cast<i64>(gridDim.x) * blockDim.y;
    for (i64 base = static_cast<i64>(blockIdx.x) * blockDim.y; base < m; base += step) {
        const i64 e = base + threadIdx.y;
        double l = 0;
        if (e < m) {
            const i64 u = lo[e], v = hi[e];
            l = share<N>(k, B_S, u, v, s[u], s[v]) + share<N>(k, Pi_S, u, v, s[u], s[v]) / lam;
        }
        l = warp_sum(l, 1, 8);  // all 32 lanes come here: e may differ, base does not
        if (e < m && threadIdx.x == 0) scores[e] = weights ? weights[e] * l : l;
    }
}

// ---- draws --------------------------------------------------------------------------------------

// q <- floor(2^exponent score), at least 1 where the score is not 0.
extern "C" __global__ void __launch_bounds__(kThreads)
    integer_scores(i64 m, const double* scores, i32 exponent, i64* q) {
    for (i64 e = grid_first(); e < m; e += grid_step())
        q[e] = max(static_cast<i64>(ldexp(scores[e], exponent)), static_cast<i64>(scores[e] > 0));
}

// With replacement: draw i falls on the edge whose interval of the prefix sums holds word i.
extern "C" __global__ void __launch_bounds__(kThreads)
    draw_edges(i64 s, i64 m, const i64* prefix, u64 seed, i64* counts) {
    for (i64 i = grid_first(); i < s; i += grid_step()) {
        const i64 target = static_cast<i64>(
            __umul64hi(random_word(i, kStreamSample, seed), static_cast<u64>(prefix[m - 1])));
        atomicAdd(reinterpret_cast<u64*>(counts + upper_bound(prefix, 0, m, target)), u64{1});
    }
}

extern "C" __global__ void __launch_bounds__(kThreads)
    replacement_factors(i64 s, i64 m, const i64* counts, const i64* q, const i64* prefix,
                        double* factors) {
    const double total = static_cast<double>(prefix[m - 1]);
    for (i64 e = grid_first(); e < m; e += grid_step()) {
        const double p = static_cast<double>(q[e]) / total;
        factors[e] = counts[e] ? static_cast<double>(counts[e]) / (static_cast<double>(s) * p) : 0;
    }
}

// Without: edge e stays with probability p[e].
extern "C" __global__ void __launch_bounds__(kThreads)
    bernoulli_factors(i64 m, const double* p, u64 seed, double* factors) {
    for (i64 e = grid_first(); e < m; e += grid_step()) {
        const u64 bits = random_word(e, kStreamSample, seed) >> 11;
        factors[e] = static_cast<double>(bits) * 0x1p-53 < p[e] ? 1 / p[e] : 0;
    }
}

// ---- L_tilde ------------------------------------------------------------------------------------

// Filters row u by a warp: visit(place among the kept, entry, factor) for each kept entry.
template <class I, class Visit>
__device__ i64 filter_row(const Edges<I>& E, const double* factors, i64 u, const Visit& visit) {
    const u32 below = (1u << threadIdx.x) - 1;
    i64 kept = 0;
    for (i64 base = E.indptr[u]; base < E.indptr[u + 1]; base += 32) {
        const i64 e = base + threadIdx.x;
        const double factor =
            e < E.indptr[u + 1] ? factors[E.number(e, u, static_cast<i64>(E.indices[e]))] : 0;
        const u32 votes = __ballot_sync(kAllLanes, factor > 0);
        if (factor > 0) visit(kept + __popc(votes & below), e, factor);
        kept += __popc(votes);
    }
    return kept;
}

template <class I>
__device__ void count_kept(const Edges<I>& E, const double* factors, i64* counts) {
    const i64 step = static_cast<i64>(gridDim.x) * blockDim.y;
    for (i64 u = static_cast<i64>(blockIdx.x) * blockDim.y + threadIdx.y; u < E.n; u += step) {
        const i64 kept = filter_row(E, factors, u, [](i64, i64, double) {});
        if (threadIdx.x == 0) counts[u] = kept;
    }
}

// The rows of L_tilde's A, and their sums (A 1).
template <class T, class I>
__device__ void fill_kept(const Edges<I>& E, const T* weights, const double* factors,
                          const i64* new_indptr, I* new_indices, T* new_weights, double* row_sums) {
    const i64 step = static_cast<i64>(gridDim.x) * blockDim.y;
    for (i64 u = static_cast<i64>(blockIdx.x) * blockDim.y + threadIdx.y; u < E.n; u += step) {
        double sum = 0;
        const i64 start = new_indptr[u];
        filter_row(E, factors, u, [&](i64 place, i64 e, double factor) {
            const double w = weights ? weights[e] * factor : factor;
            new_indices[start + place] = E.indices[e];
            new_weights[start + place] = static_cast<T>(w);
            sum += w;
        });
        sum = warp_sum(sum);
        if (threadIdx.x == 0) row_sums[u] = sum;
    }
}

// bounds[u] <- the largest ratio[u] + ratio[v] of the neighbours v of u, 0 without any.  With ratio =
// diag(L) the largest of these bounds the eigenvalues of L.  A maximum has no order to keep.
template <class I>
__device__ void bound_pairs(i64 n, const i64* indptr, const I* indices, const double* ratio,
                            double* bounds) {
    const i64 step = static_cast<i64>(gridDim.x) * blockDim.y;
    for (i64 u = static_cast<i64>(blockIdx.x) * blockDim.y + threadIdx.y; u < n; u += step) {
        double largest = 0;
        for (i64 e = indptr[u] + threadIdx.x; e < indptr[u + 1]; e += 32) {
            const double pair = ratio[u] + ratio[indices[e]];
            if (pair > largest) largest = pair;
        }
        for (int bit = 1; bit < 32; bit *= 2) {
            const double other = __shfl_xor_sync(kAllLanes, largest, bit);
            if (other > largest) largest = other;
        }
        if (threadIdx.x == 0) bounds[u] = largest;
    }
}

// ---- names --------------------------------------------------------------------------------------

#define EDGES(I) i64 n, const i64 *indptr, const I *indices, const i64 *first_edge

#define INDEX_KERNELS(I, i)                                                         \
    extern "C" __global__ void __launch_bounds__(kThreads)                          \
        upper_counts_##i(i64 n, const i64* indptr, const I* indices, i64* counts) { \
        count_upper(n, indptr, indices, counts);                                    \
    }                                                                               \
    extern "C" __global__ void __launch_bounds__(kThreads)                          \
        pair_bounds_##i(i64 n, const i64* indptr, const I* indices,                 \
                        const double* ratio, double* bounds) {                      \
        bound_pairs(n, indptr, indices, ratio, bounds);                             \
    }                                                                               \
    extern "C" __global__ void __launch_bounds__(kThreads)                          \
        kept_counts_##i(EDGES(I), const double* factors, i64* counts) {             \
        count_kept(Edges<I>{n, indptr, indices, first_edge}, factors, counts);      \
    }

#define VALUE_KERNELS(T, t, I, i)                                                                 \
    extern "C" __global__ void __launch_bounds__(kThreads)                                        \
        edge_list_##t##_##i(EDGES(I), const T* weights, I* lo, I* hi, T* edge_weights) {          \
        list_edges(Edges<I>{n, indptr, indices, first_edge}, weights, lo, hi, edge_weights);      \
    }                                                                                             \
    extern "C" __global__ void __launch_bounds__(kThreads) kept_fill_##t##_##i(                   \
        EDGES(I), const T* weights, const double* factors, const i64* new_indptr, I* new_indices, \
        T* new_weights, double* row_sums) {                                                       \
        fill_kept(Edges<I>{n, indptr, indices, first_edge}, weights, factors, new_indptr,         \
                  new_indices, new_weights, row_sums);                                            \
    }

#define SCORES(T, t, I, i, N)                                                               \
    extern "C" __global__ void __launch_bounds__(kThreads, 4) edge_scores_##t##_##i##_v##N( \
        i64 m, i64 k, const I* lo, const I* hi, const T* weights, const T* s, const T* B_S, \
        const T* Pi_S, double lam, double* scores) {                                        \
        score<N>(m, k, lo, hi, weights, s, B_S, Pi_S, lam, scores);                         \
    }

#define ALL(I, i)                    \
    INDEX_KERNELS(I, i)              \
    VALUE_KERNELS(float, f32, I, i)  \
    VALUE_KERNELS(double, f64, I, i) \
    SCORES(float, f32, I, i, 1)      \
    SCORES(float, f32, I, i, 2)      \
    SCORES(float, f32, I, i, 4)      \
    SCORES(double, f64, I, i, 1)     \
    SCORES(double, f64, I, i, 2)

ALL(i32, i32)
ALL(i64, i64)
