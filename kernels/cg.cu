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

template <int N, class T>
__device__ void residual(i64 n, i64 k, const T* HP, T* R, const double* pHp, double* rho,
                         double* energy, double tol, const double* floor, bool* active,
                         i64* iterations, double* alpha, double* beta, double* partials,
                         u32* tickets) {
    const Columns at(N);
    const bool inside = at.column < k;
    double step[N] = {}, dots_here[1][N] = {};
    auto& dot = dots_here[0];
    // The mask changes only after every block of these columns has taken its ticket below: all of
    // them return here, or none.
    if (!any_active<N>(active, at.column, k)) {
        if (inside && blockIdx.x == 0 && threadIdx.y == 0)
            for (int i = 0; i < N; ++i) alpha[at.column + i] = beta[at.column + i] = 0;
        return;
    }
    for (int i = 0; inside && i < N; ++i) {
        const i64 c = at.column + i;
        if (active[c]) step[i] = pHp[c] > 0 ? rho[c] / pHp[c] : 0.0;
        if (!(step[i] <= kLargest)) step[i] = 0.0;  // overflow and NaN: no step to take
    }
    for (i64 row = at.row; inside && row < n; row += at.rows) {
        const Vec<T, N> hp = load<N>(HP + row * k + at.column);
        Vec<T, N> r = load<N>(R + row * k + at.column);
        for (int i = 0; i < N; ++i) {
            r.v[i] -= static_cast<T>(step[i]) * hp.v[i];
            dot[i] += static_cast<double>(r.v[i]) * r.v[i];
        }
        store(R + row * k + at.column, r);
    }
    // Every block has read rho and active before the last one comes here and changes them.
    if (!grid_sum(dots_here, k, at.column, partials, tickets + blockIdx.y)) return;
    if (!inside || threadIdx.y != 0) return;
    for (int i = 0; i < N; ++i) {
        const i64 c = at.column + i;
        const bool going = active[c] && step[i] > 0 && dot[i] <= kLargest;
        alpha[c] = step[i];
        beta[c] = going ? dot[i] / (rho[c] > 0 ? rho[c] : 1.0) : 0.0;
        if (!active[c]) continue;
        energy[c] += step[i] * rho[c];  // ||x||_H^2 grows by alpha rho with each step
        iterations[c] += 1;
        if (going) rho[c] = dot[i];
        active[c] = going && dot[i] > max(tol * tol * energy[c], floor[c]);
    }
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
        residual<N>(n, k, HP, R, pHp, rho, energy, tol, floor, active, iterations, alpha, beta, \
                    partials, tickets);                                                         \
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
