// The calls of cuSOLVER that CuPy makes for this package, in float32 and float64.
//
// LAPACK allocates its own work space; the one that CuPy was asked to allocate is not used.
#include "library.h"

namespace {

// Calls twice: with a length of -1 LAPACK says how much work space it wants.
template <class T>
void with_work_space(const std::function<void(T* work, int* length)>& call) {
    T wanted;
    int length = -1;
    call(&wanted, &length);
    length = static_cast<int>(wanted) + 1;
    std::vector<T> work(length);
    call(work.data(), &length);
}

template <class T>
void syevd(int vectors, int upper, int n, T* A, int lda, T* W, int* info) {
    const char *job = vectors ? "V" : "N", *part = upper ? "U" : "L";
    const auto solve = lapack<T>("syevd");
    T wanted;
    int length = -1, integers = -1, wanted_integers;
    solve(job, part, &n, A, &lda, W, &wanted, &length, &wanted_integers, &integers, info);
    length = static_cast<int>(wanted) + 1;
    integers = wanted_integers;
    std::vector<T> work(length);
    std::vector<int> integer_work(integers);
    solve(job, part, &n, A, &lda, W, work.data(), &length, integer_work.data(), &integers, info);
}

template <class T>
int gesvd(void* h, char of_U, char of_V, int m, int n, T* A, int lda, T* S, T* U, int ldu, T* V,
          int ldv, int* info) {
    if (m < n) return 3;  // as cuSOLVER
    return give(handle(h)->stream, "gesvd", {A, S, U, V, info}, [=] {
        with_work_space<T>([&](T* work, int* length) {
            lapack<T>("gesvd")(&of_U, &of_V, &m, &n, A, &lda, S, U, &ldu, V, &ldv, work, length,
                               info);
        });
    });
}

}  // namespace

HANDLE_CALLS(cusolverDnCreate, cusolverDnDestroy, cusolverDnSetStream, cusolverDnGetStream)
API cusolverDnCreateParams(void** params) { return *params = new int, 0; }
API cusolverDnDestroyParams(void* params) { return delete static_cast<int*>(params), 0; }
API cusolverGetProperty(int property, int* value) { return *value = property ? 0 : 12, 0; }
API cusolverSpCreate(void** h) { return *h = new Handle, 0; }
API cusolverSpDestroy(void* h) { return delete handle(h), 0; }
API cusolverSpSetStream(void* h, void* stream) { return handle(h)->stream = stream, 0; }

API cusolverDnXsyevd_bufferSize(void*, void*, int, int, int64_t, int, void*, int64_t, int, void*,
                                int, size_t* on_device, size_t* on_host) {
    return *on_device = *on_host = 64, 0;
}

API cusolverDnXsyevd(void* h, void*, int vectors, int upper, int64_t n, int type, void* A,
                     int64_t lda, int, void* W, int, void*, size_t, void*, size_t, int* info) {
    if (!bytes_of(type)) return unknown_types("cusolverDnXsyevd", 15);
    return give(handle(h)->stream, "syevd", {A, W, info}, [=] {
        if (type == FLOAT32)
            syevd(vectors, upper, n, static_cast<float*>(A), lda, static_cast<float*>(W), info);
        else
            syevd(vectors, upper, n, static_cast<double*>(A), lda, static_cast<double*>(W), info);
    });
}

#define IN_BOTH_PRECISIONS(L, T)                                                                  \
    API cusolverDn##L##potrf_bufferSize(void*, int, int, T*, int, int* n) { return *n = 1, 0; }   \
    API cusolverDn##L##potrf(void* h, int upper, int n, T* A, int lda, T*, int, int* info) {      \
        return give(handle(h)->stream, "potrf", {A, info},                                        \
                    [=] { lapack<T>("potrf")(upper ? "U" : "L", &n, A, &lda, info); });           \
    }                                                                                             \
    API cusolverDn##L##getrf_bufferSize(void*, int, int, T*, int, int* n) { return *n = 1, 0; }   \
    API cusolverDn##L##getrf(void* h, int m, int n, T* A, int lda, T*, int* pivots, int* info) {  \
        return give(handle(h)->stream, "getrf", {A, pivots, info},                                \
                    [=] { lapack<T>("getrf")(&m, &n, A, &lda, pivots, info); });                  \
    }                                                                                             \
    API cusolverDn##L##getrs(void* h, int t, int n, int columns, const T* A, int lda,             \
                             const int* pivots, T* B, int ldb, int* info) {                       \
        return give(handle(h)->stream, "getrs", {A, pivots, B, info}, [=] {                       \
            lapack<T>("getrs")(kTranspose[t], &n, &columns, A, &lda, pivots, B, &ldb, info);      \
        });                                                                                       \
    }                                                                                             \
    API cusolverDn##L##geqrf_bufferSize(void*, int, int, T*, int, int* n) { return *n = 1, 0; }   \
    API cusolverDn##L##geqrf(void* h, int m, int n, T* A, int lda, T* tau, T*, int, int* info) {  \
        return give(handle(h)->stream, "geqrf", {A, tau, info}, [=] {                             \
            with_work_space<T>([&](T* work, int* length) {                                        \
                lapack<T>("geqrf")(&m, &n, A, &lda, tau, work, length, info);                     \
            });                                                                                   \
        });                                                                                       \
    }                                                                                             \
    API cusolverDn##L##orgqr_bufferSize(void*, int, int, int, const T*, int, const T*, int* n) {  \
        return *n = 1, 0;                                                                         \
    }                                                                                             \
    API cusolverDn##L##orgqr(void* h, int m, int n, int k, T* A, int lda, const T* tau, T*, int,  \
                             int* info) {                                                         \
        return give(handle(h)->stream, "orgqr", {A, tau, info}, [=] {                             \
            with_work_space<T>([&](T* work, int* length) {                                        \
                lapack<T>("orgqr")(&m, &n, &k, A, &lda, tau, work, length, info);                 \
            });                                                                                   \
        });                                                                                       \
    }                                                                                             \
    API cusolverDn##L##gesvd_bufferSize(void*, int, int, int* n) { return *n = 1, 0; }            \
    API cusolverDn##L##gesvd(void* h, signed char of_U, signed char of_V, int m, int n, T* A,     \
                             int lda, T* S, T* U, int ldu, T* V, int ldv, T*, int, T*,            \
                             int* info) {                                                         \
        return gesvd(h, of_U, of_V, m, n, A, lda, S, U, ldu, V, ldv, info);                       \
    }
IN_BOTH_PRECISIONS(S, float)
IN_BOTH_PRECISIONS(D, double)
