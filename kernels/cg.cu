// Block CG on k right-hand sides at once (one alpha and beta per column), in three launches:
//
//   1. apply_H        HP = H P, pHp = P . HP                                   (laplacian.cu)
//   2. cg_residual    alpha = rho / pHp, R -= alpha HP, rho' = R . R; then beta = rho' / rho,
//                     energy += alpha rho, and columns with rho' <= max(tol^2 energy, floor) freeze
//   3. cg_direction   Z += alpha P, P = R + beta P
//
// A frozen column has alpha = beta = 0, so its Z and R stand still.  A column also freezes where
// rounding leaves no step to take: pHp <= 0, or an overflow.  No scalar visits the host, which
// therefore asks for steps beyond the last: where no column of a block of threads is active, all
// three launches return at once and move k bytes.
//
// Threads: x holds N columns (16 bytes), y a row, striding down the block, so a warp reads one
// contiguous run whatever k is and alpha and beta sit in registers.  The sums over rows are per
// block in double; the last block to finish adds the blocks in order and does the k-wide scalar
// work, which saves a launch and a trip to the host.
//
// On several ranks, each with its own rows, pHp and rho' are sums over the ranks, too, and these come
// in between: launch 2 is cut into cg_descend, which leaves this rank's R . R, and cg_turn, one
// thread per column, which does the scalar work.  Both get the numbers of all ranks (`ranks` x k) and
// add them up in the order of the ranks: equal input, equal bits, on every rank.  Where there is no
// other rank, the fused launch stays.
//
// Bytes: 3 n k w in launch 2 (R, HP in; R out) and 5 n k w in launch 3 (R, P, Z in; P, Z out),
// with launch 1 10 n k w + 4 nnz + 8 n a step.  That is the bound for this order of operations:
// Z waits for launch 3 because P is in registers there anyway.

constexpr double kLargest = 1e300;  // above, or NaN, a number is no use

struct Columns {
    i64 column, row, rows;

    __device__ explicit Columns(int N)
        : column((static_cast<i64>(blockIdx.y) * blockDim.x + threadIdx.x) * N),
          row(static_cast<i64>(blockIdx.x) * blockDim.y + threadIdx.y),
          rows(static_cast<i64>(gridDim.x) * blockDim.y) {}
};

// dots <- column dots X . Y
template <int N, class T>
__device__ void dots_of(i64 n, i64 k, const T* X, const T* Y, double* partials, u32* tickets,
                        double* dots) {
    const Columns at(N);
    const bool inside = at.column < k;
    double dots_here[1][N] = {};
    auto& dot = dots_here[0];
    for (i64 row = at.row; inside && row < n; row += at.rows) {
        const Vec<T, N> x = load<N>(X + row * k + at.column), y = load<N>(Y + row * k + at.column);
        for (int i = 0; i < N; ++i) dot[i] += static_cast<double>(x.v[i]) * y.v[i];
    }
    const bool all = grid_sum(dots_here, k, at.column, partials, tickets + blockIdx.y);
    if (all && inside && threadIdx.y == 0)
        for (int i = 0; i < N; ++i) dots[at.column + i] = dot[i];
}

// What a step knows of its k columns beside their blocks.
struct Scalars {
    double* rho;
    double* energy;
    double tol;
    const double* floor;
    bool* active;
    i64* iterations;
    double* alpha;
    double* beta;

    // alpha = rho / pHp; 0 for frozen columns, and where there is no step to take.
    __device__ double step_length(i64 c, double pHp) const {
        double step = 0;
        if (active[c]) step = pHp > 0 ? rho[c] / pHp : 0.0;
        return step <= kLargest ? step : 0.0;  // overflow and NaN
    }

    // From the new ||R||^2 of column c: beta, and whether the column goes on.
    __device__ void turn(i64 c, double step, double dot) const {
        const bool going = active[c] && step > 0 && dot <= kLargest;
        alpha[c] = step;
        beta[c] = going ? dot / (rho[c] > 0 ? rho[c] : 1.0) : 0.0;
        if (!active[c]) return;
        energy[c] += step * rho[c];  // ||x||_H^2 grows by alpha rho with each step
        iterations[c] += 1;
        if (going) rho[c] = dot;
        active[c] = going && dot > max(tol * tol * energy[c], floor[c]);
    }
};

// R -= step HP; true in the threads that then have the sums over all rows of R . R in dots_here.
template <int N, class T>
__device__ bool descend(const Columns& at, i64 n, i64 k, const T* HP, T* R, const double (&step)[N],
                        double* partials, u32* tickets, double (&dots_here)[1][N]) {
    const bool inside = at.column < k;
    auto& dot = dots_here[0];
    for (i64 row = at.row; inside && row < n; row += at.rows) {
        const Vec<T, N> hp = load<N>(HP + row * k + at.column);
        Vec<T, N> r = load<N>(R + row * k + at.column);
        for (int i = 0; i < N; ++i) {
            r.v[i] -= static_cast<T>(step[i]) * hp.v[i];
            dot[i] += static_cast<double>(r.v[i]) * r.v[i];
        }
        store(R + row * k + at.column, r);
    }
    const bool all = grid_sum(dots_here, k, at.column, partials, tickets + blockIdx.y);
    return all && inside && threadIdx.y == 0;
}

template <int N, class T>
__device__ void residual(i64 n, i64 k, const T* HP, T* R, const double* pHp, const Scalars& s,
                         double* partials, u32* tickets) {
    const Columns at(N);
    const bool inside = at.column < k;
    double step[N] = {}, dots_here[1][N] = {};
    // The mask changes only after every block of these columns has taken its ticket below: all of
    // them return here, or none.
    if (!any_active<N>(s.active, at.column, k)) {
        if (inside && blockIdx.x == 0 && threadIdx.y == 0)
            for (int i = 0; i < N; ++i) s.alpha[at.column + i] = s.beta[at.column + i] = 0;
        return;
    }
    for (int i = 0; inside && i < N; ++i)
        step[i] = s.step_length(at.column + i, pHp[at.column + i]);
    // Every block has read rho and active before the last one comes here and changes them.
    if (!descend(at, n, k, HP, R, step, partials, tickets, dots_here)) return;
    for (int i = 0; i < N; ++i) s.turn(at.column + i, step[i], dots_here[0][i]);
}

// The sum of all ranks' numbers for column c, in their order.
__device__ double over_ranks(const double* x, i32 ranks, i64 k, i64 c) {
    double sum = x[c];
    for (i32 r = 1; r < ranks; ++r) sum += x[r * k + c];
    return sum;
}

// The same without the scalar work: `dots` <- R . R of this rank's rows.
template <int N, class T>
__device__ void descend_of(i64 n, i64 k, const T* HP, T* R, i32 ranks, const double* pHp,
                           double* rho, bool* active, double* partials, u32* tickets,
                           double* dots) {
    const Columns at(N);
    const bool inside = at.column < k;
    const Scalars s{rho, nullptr, 0, nullptr, active, nullptr, nullptr, nullptr};
    double step[N] = {}, dots_here[1][N] = {};
    if (!any_active<N>(active, at.column, k)) return;  // nobody reads these dots
    for (int i = 0; inside && i < N; ++i) {
        const i64 c = at.column + i;
        step[i] = s.step_length(c, over_ranks(pHp, ranks, k, c));
    }
    if (!descend(at, n, k, HP, R, step, partials, tickets, dots_here)) return;
    for (int i = 0; i < N; ++i) dots[at.column + i] = dots_here[0][i];
}

template <int N, class T>
__device__ void direction(i64 n, i64 k, const T* R, T* P, T* Z, const double* alpha,
                          const double* beta) {
    const Columns at(N);
    const bool inside = at.column < k;
    bool moves = false;
    for (int i = 0; threadIdx.y == 0 && inside && i < N; ++i)
        moves = moves || alpha[at.column + i] != 0;
    // Not the mask: a column that froze in launch 2 takes its last step here.
    if (!__syncthreads_or(moves) || !inside) return;
    T a[N], b[N];
    for (int i = 0; i < N; ++i) {
        a[i] = static_cast<T>(alpha[at.column + i]);
        b[i] = static_cast<T>(beta[at.column + i]);
    }
    for (i64 row = at.row; row < n; row += at.rows) {
        const i64 offset = row * k + at.column;
        const Vec<T, N> r = load<N>(R + offset);
        Vec<T, N> p = load<N>(P + offset), z = load<N>(Z + offset);
        for (int i = 0; i < N; ++i) {
            z.v[i] += a[i] * p.v[i];
            p.v[i] = r.v[i] + b[i] * p.v[i];
        }
        store(Z + offset, z);
        store(P + offset, p);
    }
}

#define KERNELS(T, t, N)                                                                        \
    extern "C" __global__ void __launch_bounds__(kThreads, 4) column_dots_##t##_v##N(           \
        i64 n, i64 k, const T* X, const T* Y, double* partials, u32* tickets, double* dots) {   \
        dots_of<N>(n, k, X, Y, partials, tickets, dots);                                        \
    }                                                                                           \
    extern "C" __global__ void __launch_bounds__(kThreads, 4) cg_residual_##t##_v##N(           \
        i64 n, i64 k, const T* HP, T* R, const double* pHp, double* rho, double* energy,        \
        double tol, const double* floor, bool* active, i64* iterations, double* alpha,          \
        double* beta, double* partials, u32* tickets) {                                         \
        const Scalars s{rho, energy, tol, floor, active, iterations, alpha, beta};              \
        residual<N>(n, k, HP, R, pHp, s, partials, tickets);                                    \
    }                                                                                           \
    extern "C" __global__ void __launch_bounds__(kThreads, 4) cg_descend_##t##_v##N(            \
        i64 n, i64 k, const T* HP, T* R, i32 ranks, const double* pHp, double* rho,             \
        bool* active, double* partials, u32* tickets, double* dots) {                           \
        descend_of<N>(n, k, HP, R, ranks, pHp, rho, active, partials, tickets, dots);           \
    }                                                                                           \
    extern "C" __global__ void __launch_bounds__(kThreads, 4) cg_direction_##t##_v##N(          \
        i64 n, i64 k, const T* R, T* P, T* Z, const double* alpha, const double* beta) {        \
        direction<N>(n, k, R, P, Z, alpha, beta);                                               \
    }

KERNELS(float, f32, 1)
KERNELS(float, f32, 2)
KERNELS(float, f32, 4)
KERNELS(double, f64, 1)
KERNELS(double, f64, 2)

extern "C" __global__ void __launch_bounds__(kThreads) cg_turn(
    i64 k, i32 ranks, const double* pHp, const double* dots, double* rho, double* energy, double tol,
    const double* floor, bool* active, i64* iterations, double* alpha, double* beta) {
    const Scalars s{rho, energy, tol, floor, active, iterations, alpha, beta};
    for (i64 c = grid_first(); c < k; c += grid_step()) {
        const double step = s.step_length(c, over_ranks(pHp, ranks, k, c));
        s.turn(c, step, over_ranks(dots, ranks, k, c));
    }
}
