// The calls of cuBLAS that CuPy makes for this package, in float32 and float64.
#include <cmath>

#include "library.h"

extern "C" int cudaStreamSynchronize(void*);

namespace {

enum { INVALID = 7, NOT_SUPPORTED = 15 };

template <class T>
struct Matrix {
    T* at;
    int ld;
};

template <class T>
void multiply(int ta, int tb, int m, int n, int k, T alpha, Matrix<const T> A, Matrix<const T> B,
              T beta, Matrix<T> C) {
    if (beta == 0)  // then C may hold NaN, which is not multiplied
        for (int j = 0; j < n; ++j) std::fill_n(C.at + static_cast<size_t>(j) * C.ld, m, T(0));
    lapack<T>("gemm")(kTranspose[ta], kTranspose[tb], &m, &n, &k, &alpha, A.at, &A.ld, B.at, &B.ld,
                      &beta, C.at, &C.ld);
}

bool fits(int transposed, int rows, int columns, int ld) {
    return rows >= 0 && columns >= 0 && ld >= std::max(1, transposed ? columns : rows);
}

template <class T>
int gemm(void* h, int ta, int tb, int m, int n, int k, const T* alpha, const T* A, int lda,
         const T* B, int ldb, const T* beta, T* C, int ldc, int count = 1, int64_t next_A = 0,
         int64_t next_B = 0, int64_t next_C = 0) {
    if (!fits(ta, m, k, lda) || !fits(tb, k, n, ldb) || !fits(0, m, n, ldc)) return INVALID;
    const auto a = scalar(h, alpha), b = scalar(h, beta);
    return give(handle(h)->stream, "gemm", {A, B, C}, [=] {
        for (int i = 0; i < count; ++i)
            multiply<T>(ta, tb, m, n, k, a(), {A + i * next_A, lda}, {B + i * next_B, ldb}, b(),
                        {C + i * next_C, ldc});
    });
}

template <class T>
int gemv(void* h, int t, int m, int n, const T* alpha, const T* A, int lda, const T* x, int dx,
         const T* beta, T* y, int dy) {
    if (!fits(0, m, n, lda) || !dx || !dy) return INVALID;
    const auto a = scalar(h, alpha), b = scalar(h, beta);
    return give(handle(h)->stream, "gemv", {A, x, y}, [=] {
        const T p = a(), q = b();
        if (q == 0)
            for (int i = 0; i < (t ? n : m); ++i) y[static_cast<int64_t>(i) * dy] = 0;
        lapack<T>("gemv")(kTranspose[t], &m, &n, &p, A, &lda, x, &dx, &q, y, &dy);
    });
}

template <class T>
int trsm(void* h, int right, int upper, int t, int unit, int m, int n, const T* alpha, const T* A,
         int lda, T* B, int ldb) {
    const int order = right ? n : m;
    if (!fits(0, order, order, lda) || !fits(0, m, n, ldb)) return INVALID;
    const auto a = scalar(h, alpha);
    return give(handle(h)->stream, "trsm", {A, B}, [=] {
        const T p = a();
        lapack<T>("trsm")(right ? "R" : "L", upper ? "U" : "L", kTranspose[t], unit ? "U" : "N",
                          &m, &n, &p, A, &lda, B, &ldb);
    });
}

// C = alpha op(A) + beta op(B); a matrix whose factor is 0 is not read.
template <class T>
int geam(void* h, int ta, int tb, int m, int n, const T* alpha, const T* A, int lda, const T* beta,
         const T* B, int ldb, T* C, int ldc) {
    if (!fits(ta, m, n, lda) || !fits(tb, m, n, ldb) || !fits(0, m, n, ldc)) return INVALID;
    const auto a = scalar(h, alpha), b = scalar(h, beta);
    return give(handle(h)->stream, "geam", {A, B, C}, [=] {
        const T p = a(), q = b();
        for (size_t j = 0; j < static_cast<size_t>(n); ++j)
            for (size_t i = 0; i < static_cast<size_t>(m); ++i) {
                const T x = p == 0 ? T(0) : p * A[ta ? j + i * lda : i + j * lda];
                const T y = q == 0 ? T(0) : q * B[tb ? j + i * ldb : i + j * ldb];
                C[i + j * ldc] = x + y;
            }
    });
}

// A number on the device is left to the stream; for one on the host cuBLAS waits.
template <class T>
int number(void* h, const char* what, const T* x, const T* y, T* out, std::function<T()> find) {
    void* stream = handle(h)->stream;
    const bool there = handle(h)->scalars_on_device;
    const auto run = [=] { *out = find(); };
    const int error = give(stream, what, {x, y, there ? out : nullptr}, run);
    if (!error && !there) cudaStreamSynchronize(stream);
    return error;
}

template <class T>
int dot(void* h, int n, const T* x, int dx, const T* y, int dy, T* out) {
    return number<T>(h, "dot", x, y, out, [=] {
        T sum = 0;
        for (int64_t i = 0; i < n; ++i) sum += x[i * dx] * y[i * dy];
        return sum;
    });
}

template <class T>
int nrm2(void* h, int n, const T* x, int dx, T* out) {
    return number<T>(h, "nrm2", x, x, out, [=] {
        double sum = 0;
        for (int64_t i = 0; i < n; ++i) sum += static_cast<double>(x[i * dx]) * x[i * dx];
        return static_cast<T>(std::sqrt(sum));
    });
}

}  // namespace

HANDLE_CALLS(cublasCreate_v2, cublasDestroy_v2, cublasSetStream_v2, cublasGetStream_v2)
API cublasSetPointerMode_v2(void* h, int mode) { return handle(h)->scalars_on_device = mode, 0; }
API cublasGetPointerMode_v2(void* h, int* mode) { return *mode = handle(h)->scalars_on_device, 0; }
API cublasSetMathMode(void* h, int mode) { return handle(h)->math_mode = mode, 0; }
API cublasGetMathMode(void* h, int* mode) { return *mode = handle(h)->math_mode, 0; }
API cublasGetVersion_v2(void*, int* version) { return *version = 130000, 0; }
API cublasSetWorkspace_v2(void*, void*, size_t) { return 0; }

#define GEMM_ARGUMENTS(T) \
    (h, ta, tb, m, n, k, static_cast<const T*>(alpha), static_cast<const T*>(A), lda, \
     static_cast<const T*>(B), ldb, static_cast<const T*>(beta), static_cast<T*>(C), ldc

API cublasGemmEx(void* h, int ta, int tb, int m, int n, int k, const void* alpha, const void* A,
                 int type_A, int lda, const void* B, int type_B, int ldb, const void* beta, void* C,
                 int type_C, int ldc, int, int) {
    if (type_A != type_B || type_A != type_C) return unknown_types("cublasGemmEx", NOT_SUPPORTED);
    if (type_A == FLOAT32) return gemm<float> GEMM_ARGUMENTS(float));
    if (type_A == FLOAT64) return gemm<double> GEMM_ARGUMENTS(double));
    return unknown_types("cublasGemmEx", NOT_SUPPORTED);
}

API cublasSgemmEx(void* h, int ta, int tb, int m, int n, int k, const float* alpha, const void* A,
                  int type_A, int lda, const void* B, int type_B, int ldb, const float* beta,
                  void* C, int type_C, int ldc) {
    if (type_A != FLOAT32 || type_B != FLOAT32 || type_C != FLOAT32)
        return unknown_types("cublasSgemmEx", NOT_SUPPORTED);
    return gemm<float> GEMM_ARGUMENTS(float));
}

API cublasGemmStridedBatchedEx(void* h, int ta, int tb, int m, int n, int k, const void* alpha,
                               const void* A, int type_A, int lda, long long next_A, const void* B,
                               int type_B, int ldb, long long next_B, const void* beta, void* C,
                               int type_C, int ldc, long long next_C, int count, int, int) {
    if (type_A != type_B || type_A != type_C)
        return unknown_types("cublasGemmStridedBatchedEx", NOT_SUPPORTED);
    if (type_A == FLOAT32)
        return gemm<float> GEMM_ARGUMENTS(float), count, next_A, next_B, next_C);
    if (type_A == FLOAT64)
        return gemm<double> GEMM_ARGUMENTS(double), count, next_A, next_B, next_C);
    return unknown_types("cublasGemmStridedBatchedEx", NOT_SUPPORTED);
}

#define IN_BOTH_PRECISIONS(letter, T)                                                             \
    API cublas##letter##gemm_v2(void* h, int ta, int tb, int m, int n, int k, const T* alpha,     \
                                const T* A, int lda, const T* B, int ldb, const T* beta, T* C,    \
                                int ldc) {                                                        \
        return gemm<T>(h, ta, tb, m, n, k, alpha, A, lda, B, ldb, beta, C, ldc);                  \
    }                                                                                             \
    API cublas##letter##gemv_v2(void* h, int t, int m, int n, const T* alpha, const T* A,         \
                                int lda, const T* x, int dx, const T* beta, T* y, int dy) {       \
        return gemv(h, t, m, n, alpha, A, lda, x, dx, beta, y, dy);                               \
    }                                                                                             \
    API cublas##letter##trsm_v2(void* h, int right, int upper, int t, int unit, int m, int n,     \
                                const T* alpha, const T* A, int lda, T* B, int ldb) {             \
        return trsm(h, right, upper, t, unit, m, n, alpha, A, lda, B, ldb);                       \
    }                                                                                             \
    API cublas##letter##geam(void* h, int ta, int tb, int m, int n, const T* alpha, const T* A,   \
                             int lda, const T* beta, const T* B, int ldb, T* C, int ldc) {        \
        return geam(h, ta, tb, m, n, alpha, A, lda, beta, B, ldb, C, ldc);                        \
    }                                                                                             \
    API cublas##letter##dot_v2(void* h, int n, const T* x, int dx, const T* y, int dy, T* out) {  \
        return dot(h, n, x, dx, y, dy, out);                                                      \
    }                                                                                             \
    API cublas##letter##nrm2_v2(void* h, int n, const T* x, int dx, T* out) {                     \
        return nrm2(h, n, x, dx, out);                                                            \
    }
IN_BOTH_PRECISIONS(S, float)
IN_BOTH_PRECISIONS(D, double)
