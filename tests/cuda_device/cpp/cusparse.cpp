// The calls of cuSPARSE that CuPy makes for this package, in float32 and float64.
#include <cstring>
#include <numeric>

#include "library.h"

namespace {

enum { INVALID = 3, NOT_SUPPORTED = 10, INT64 = 3, BY_COLUMNS = 1 };
enum Shape { CSR, COO, CSC, DENSE, SPARSE_VECTOR };

struct Matrix {
    Shape shape;
    int64_t rows, columns, entries, ld;
    void *first, *second, *values;  // of CSR: row pointers and columns; of COO: rows and columns
    int first_type, second_type, type, order;

    int64_t index(const void* at, int kind, int64_t i) const {
        return kind == INT64 ? static_cast<const int64_t*>(at)[i]
                             : static_cast<const int32_t*>(at)[i];
    }
    int64_t first_at(int64_t i) const { return index(first, first_type, i); }
    int64_t second_at(int64_t i) const { return index(second, second_type, i); }

    // Where (i, j) of a dense matrix is.
    int64_t place(int64_t i, int64_t j) const {
        return order == BY_COLUMNS ? i + j * ld : i * ld + j;
    }

    // Calls f(row, column, number of the entry) for each entry.
    template <class F>
    void each(F f) const {
        if (shape == COO) {
            for (int64_t e = 0; e < entries; ++e) f(first_at(e), second_at(e), e);
            return;
        }
        for (int64_t i = 0; i < (shape == CSR ? rows : columns); ++i)
            for (int64_t e = first_at(i); e < first_at(i + 1); ++e)
                shape == CSR ? f(i, second_at(e), e) : f(second_at(e), i, e);
    }
};

// Y = alpha op(A) op(X) + beta Y
template <class T>
void multiply(bool ta, bool tx, T alpha, const Matrix& A, const Matrix& X, T beta,
              const Matrix& Y) {
    const T *a = static_cast<T*>(A.values), *x = static_cast<T*>(X.values);
    T* y = static_cast<T*>(Y.values);
    for (int64_t i = 0; i < Y.rows; ++i)
        for (int64_t j = 0; j < Y.columns; ++j) {
            T& at = y[Y.place(i, j)];
            at = beta == 0 ? T(0) : beta * at;
        }
    A.each([&](int64_t i, int64_t j, int64_t e) {
        if (ta) std::swap(i, j);
        for (int64_t k = 0; k < Y.columns; ++k)
            y[Y.place(i, k)] += alpha * a[e] * x[tx ? X.place(k, j) : X.place(j, k)];
    });
}

template <class T>
int give_product(void* h, bool ta, bool tx, const void* alpha, const Matrix& A, const Matrix& X,
                 const void* beta, const Matrix& Y) {
    const auto p = scalar(h, static_cast<const T*>(alpha));
    const auto q = scalar(h, static_cast<const T*>(beta));
    return give(handle(h)->stream, "SpMM", {A.first, A.second, A.values, X.values, Y.values},
                [=] { multiply<T>(ta, tx, p(), A, X, q(), Y); });
}

int product(void* h, bool ta, bool tx, const void* alpha, const Matrix& A, const Matrix& X,
            const void* beta, const Matrix& Y, int type) {
    if (A.type != type || X.type != type || Y.type != type || !bytes_of(type))
        return unknown_types("a product of cuSPARSE", NOT_SUPPORTED);
    const bool fits = (ta ? A.columns : A.rows) == Y.rows &&
                      (ta ? A.rows : A.columns) == (tx ? X.columns : X.rows) &&
                      (tx ? X.rows : X.columns) == Y.columns;
    if (!fits) return INVALID;
    return type == FLOAT32 ? give_product<float>(h, ta, tx, alpha, A, X, beta, Y)
                           : give_product<double>(h, ta, tx, alpha, A, X, beta, Y);
}

// Sorts pairs of indices, and P along with them.
int sort_pairs(void* h, int n, int* first, int* second, int* P) {
    return give(handle(h)->stream, "coosort", {first, second, P}, [=] {
        std::vector<int> order(n), a(first, first + n), b(second, second + n), p(n);
        if (P) p.assign(P, P + n);
        std::iota(order.begin(), order.end(), 0);
        std::stable_sort(order.begin(), order.end(), [&](int i, int j) {
            return a[i] != a[j] ? a[i] < a[j] : b[i] < b[j];
        });
        for (int i = 0; i < n; ++i) {
            first[i] = a[order[i]], second[i] = b[order[i]];
            if (P) P[i] = p[order[i]];
        }
    });
}

}  // namespace

HANDLE_CALLS(cusparseCreate, cusparseDestroy, cusparseSetStream, cusparseGetStream)
API cusparseGetVersion(void*, int* version) { return *version = 12600, 0; }
API cusparseSetPointerMode(void* h, int mode) { return handle(h)->scalars_on_device = mode, 0; }
API cusparseGetPointerMode(void* h, int* mode) { return *mode = handle(h)->scalars_on_device, 0; }

// ---- descriptors -------------------------------------------------------------------------------

API cusparseCreateMatDescr(void** made) { return *made = new int, 0; }
API cusparseDestroyMatDescr(void* old) { return delete static_cast<int*>(old), 0; }
API cusparseSetMatType(void*, int) { return 0; }
API cusparseSetMatIndexBase(void*, int) { return 0; }

#define COMPRESSED(name, shape)                                                                    \
    API name(Matrix** made, int64_t rows, int64_t columns, int64_t entries, void* first,           \
             void* second, void* values, int first_type, int second_type, int, int type) {         \
        *made = new Matrix{shape, rows, columns, entries, 0, first, second, values,                \
                           first_type, second_type, type, 0};                                      \
        return 0;                                                                                  \
    }
COMPRESSED(cusparseCreateCsr, CSR)
COMPRESSED(cusparseCreateCsc, CSC)

API cusparseCreateCoo(Matrix** made, int64_t rows, int64_t columns, int64_t entries, void* first,
                      void* second, void* values, int index_type, int, int type) {
    *made = new Matrix{COO, rows, columns, entries, 0, first, second, values,
                       index_type, index_type, type, 0};
    return 0;
}

API cusparseCreateDnMat(Matrix** made, int64_t rows, int64_t columns, int64_t ld, void* values,
                        int type, int order) {
    if (ld < (order == BY_COLUMNS ? rows : columns)) return INVALID;
    *made = new Matrix{DENSE, rows, columns, rows * columns, ld, nullptr, nullptr, values,
                       0, 0, type, order};
    return 0;
}

API cusparseCreateDnVec(Matrix** made, int64_t n, void* values, int type) {
    return cusparseCreateDnMat(made, n, 1, n, values, type, BY_COLUMNS);
}

API cusparseCreateSpVec(Matrix** made, int64_t n, int64_t entries, void* indices, void* values,
                        int index_type, int, int type) {
    *made = new Matrix{SPARSE_VECTOR, n, 1, entries, 0, nullptr, indices, values,
                       0, index_type, type, 0};
    return 0;
}

API cusparseDestroySpMat(Matrix* old) { return delete old, 0; }
API cusparseDestroyDnMat(Matrix* old) { return delete old, 0; }
API cusparseDestroyDnVec(Matrix* old) { return delete old, 0; }
API cusparseDestroySpVec(Matrix* old) { return delete old, 0; }

// ---- products ----------------------------------------------------------------------------------

API cusparseSpMM_bufferSize(void*, int, int, const void*, Matrix*, Matrix*, const void*, Matrix*,
                            int, int, size_t* size) {
    return *size = 8, 0;
}

API cusparseSpMM_preprocess(void*, int, int, const void*, Matrix*, Matrix*, const void*, Matrix*,
                            int, int, void*) {
    return 0;
}

API cusparseSpMM(void* h, int ta, int tx, const void* alpha, Matrix* A, Matrix* X, const void* beta,
                 Matrix* Y, int type, int, void*) {
    return product(h, ta, tx, alpha, *A, *X, beta, *Y, type);
}

API cusparseSpMV_bufferSize(void*, int, const void*, Matrix*, Matrix*, const void*, Matrix*, int,
                            int, size_t* size) {
    return *size = 8, 0;
}

API cusparseSpMV(void* h, int ta, const void* alpha, Matrix* A, Matrix* x, const void* beta,
                 Matrix* y, int type, int, void*) {
    return product(h, ta, false, alpha, *A, *x, beta, *y, type);
}

// ---- formats -----------------------------------------------------------------------------------

API cusparseXcoo2csr(void* h, const int* rows, int entries, int n, int* pointers, int) {
    return give(handle(h)->stream, "coo2csr", {rows, pointers}, [=] {
        for (int i = 0; i <= n; ++i)
            pointers[i] = std::lower_bound(rows, rows + entries, i) - rows;
    });
}

API cusparseXcsr2coo(void* h, const int* pointers, int, int n, int* rows, int) {
    return give(handle(h)->stream, "csr2coo", {pointers, rows}, [=] {
        for (int i = 0; i < n; ++i) std::fill(rows + pointers[i], rows + pointers[i + 1], i);
    });
}

API cusparseCreateIdentityPermutation(void* h, int n, int* P) {
    return give(handle(h)->stream, "identity", {P}, [=] { std::iota(P, P + n, 0); });
}

API cusparseXcoosort_bufferSizeExt(void*, int, int, int, const int*, const int*, size_t* size) {
    return *size = 8, 0;
}

API cusparseXcoosortByRow(void* h, int, int, int n, int* rows, int* columns, int* P, void*) {
    return sort_pairs(h, n, rows, columns, P);
}

API cusparseXcoosortByColumn(void* h, int, int, int n, int* rows, int* columns, int* P, void*) {
    return sort_pairs(h, n, columns, rows, P);
}

API cusparseXcsrsort_bufferSizeExt(void*, int, int, int, const int*, const int*, size_t* size) {
    return *size = 8, 0;
}

API cusparseXcsrsort(void* h, int n, int, int, void*, const int* pointers, int* columns, int* P,
                     void*) {
    return give(handle(h)->stream, "csrsort", {pointers, columns, P}, [=] {
        for (int i = 0; i < n; ++i) {
            std::vector<std::pair<int, int>> row;
            for (int e = pointers[i]; e < pointers[i + 1]; ++e) row.push_back({columns[e], P[e]});
            std::stable_sort(row.begin(), row.end());
            for (int e = pointers[i]; e < pointers[i + 1]; ++e)
                std::tie(columns[e], P[e]) = row[e - pointers[i]];
        }
    });
}

API cusparseGather(void* h, Matrix* dense, Matrix* sparse) {
    const Matrix from = *dense, to = *sparse;
    const int width = bytes_of(to.type);
    if (!width) return unknown_types("cusparseGather", NOT_SUPPORTED);
    return give(handle(h)->stream, "gather", {from.values, to.second, to.values}, [=] {
        const auto *source = static_cast<char*>(from.values);
        auto* target = static_cast<char*>(to.values);
        for (int64_t e = 0; e < to.entries; ++e)
            std::memcpy(target + e * width, source + to.second_at(e) * width, width);
    });
}

API cusparseCsr2cscEx2_bufferSize(void*, int, int, int, const void*, const int*, const int*, void*,
                                  int*, int*, int, int, int, int, size_t* size) {
    return *size = 8, 0;
}

API cusparseCsr2cscEx2(void* h, int n, int m, int entries, const void* values, const int* pointers,
                       const int* columns, void* new_values, int* new_pointers, int* rows, int type,
                       int, int, int, void*) {
    const int width = bytes_of(type);
    if (!width) return unknown_types("cusparseCsr2cscEx2", NOT_SUPPORTED);
    const std::initializer_list<const void*> used = {values,     pointers,     columns,
                                                     new_values, new_pointers, rows};
    return give(handle(h)->stream, "csr2csc", used, [=] {
        std::vector<int> next(m + 1);
        for (int e = 0; e < entries; ++e) next[columns[e] + 1]++;
        std::partial_sum(next.begin(), next.end(), next.begin());
        std::copy(next.begin(), next.end(), new_pointers);
        for (int i = 0; i < n; ++i)
            for (int e = pointers[i]; e < pointers[i + 1]; ++e) {
                const size_t at = next[columns[e]]++;
                rows[at] = i;
                std::memcpy(static_cast<char*>(new_values) + at * width,
                            static_cast<const char*>(values) + static_cast<size_t>(e) * width,
                            width);
            }
    });
}

API cusparseSparseToDense_bufferSize(void*, Matrix*, Matrix*, int, size_t* size) {
    return *size = 8, 0;
}

API cusparseSparseToDense(void* h, Matrix* sparse, Matrix* dense, int, void*) {
    const Matrix A = *sparse, B = *dense;
    const int width = bytes_of(A.type);
    if (!width) return unknown_types("cusparseSparseToDense", NOT_SUPPORTED);
    return give(handle(h)->stream, "todense", {A.first, A.second, A.values, B.values}, [=] {
        auto* out = static_cast<char*>(B.values);
        for (int64_t i = 0; i < B.rows; ++i)
            for (int64_t j = 0; j < B.columns; ++j)
                std::memset(out + B.place(i, j) * width, 0, width);
        A.each([&](int64_t i, int64_t j, int64_t e) {
            const char* from = static_cast<char*>(A.values) + e * width;
            std::memcpy(out + B.place(i, j) * width, from, width);
        });
    });
}
