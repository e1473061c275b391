// Adafactor's three passes over matrices: factored.py says what they compute, and in which order
// they add. Work is shared out in blocks of kRows rows of a matrix.
#pragma once

namespace megatrain {
namespace {

constexpr int kHalves = 512;

// The second half is added to the first, until one number is left.
template <int kHalf>
inline float by_halves(float* values) {
    for (int j = 0; j < kHalf; ++j) values[j] += values[j + kHalf];
    if constexpr (kHalf > 1) return by_halves<kHalf / 2>(values);
    return values[0];
}
inline float sum_row(float* values, int n) {
    for (int j = n; j < kHalves; ++j) values[j] = 0;
    return by_halves<kHalves / 2>(values);
}

struct Rows {
    int64_t first, stop, matrix;

    Rows(const FactoredArguments& a, int64_t block) {
        const int64_t per_matrix = (a.rows + kRows - 1) / kRows;
        matrix = block / per_matrix;
        const int64_t end = (matrix + 1) * a.rows;
        first = matrix * a.rows + block % per_matrix * kRows;
        stop = first + kRows < end ? first + kRows : end;
    }
};

template <typename Weight, typename Grad>
void factored_sums(const FactoredArguments& arguments, int64_t begin, int64_t end) {
    const FactoredArguments a = arguments;
    float squares[kHalves], masters[kHalves];
    for (int64_t block = begin; block < end; ++block) {
        const Rows rows(a, block);
        float* __restrict column_sums = a.column_sums + block * a.columns;
        std::memset(column_sums, 0, size_t(a.columns) * sizeof(float));
        for (int64_t row = rows.first; row < rows.stop; ++row) {
            float sum = 0, master_sum = 0;
            for (int64_t at = 0; at < a.columns; at += kHalves) {
                const int n = int(a.columns - at < kHalves ? a.columns - at : kHalves);
                const int64_t i = row * a.columns + at;
                const Grad* grad = static_cast<const Grad*>(a.grad) + i;
                const Weight* weights = static_cast<const Weight*>(a.weights) + i;
                const int16_t* rest = a.remainder == nullptr ? nullptr : a.remainder + i;
                for (int j = 0; j < n; ++j) {
                    const float g = read(grad, j) * a.grad_scale;
                    squares[j] = g * g;
                }
                for (int j = 0; j < n; ++j) {
                    const float master = master_at(weights, rest, j);
                    masters[j] = master * master;
                }
                for (int j = 0; j < n; ++j) column_sums[at + j] += squares[j];
                sum += sum_row(squares, n);
                master_sum += sum_row(masters, n);
            }
            a.row_sums[row] = sum, a.master_sums[row] = master_sum;
        }
    }
}

// A NaN stays one.
inline float changed(float gradient, float row, float column, float most) {
    const float by = row * column;
    return (most < by ? most : by) * gradient;
}

template <typename Grad>
void factored_changes(const FactoredArguments& arguments, int64_t begin, int64_t end) {
    const FactoredArguments a = arguments;
    float squares[kHalves];
    for (int64_t block = begin; block < end; ++block) {
        const Rows rows(a, block);
        for (int64_t row = rows.first; row < rows.stop; ++row) {
            const float by_row = a.row_factors[row];
            float sum = 0;
            for (int64_t at = 0; at < a.columns; at += kHalves) {
                const int n = int(a.columns - at < kHalves ? a.columns - at : kHalves);
                const float* by_column = a.column_factors + rows.matrix * a.columns + at;
                const Grad* grad = static_cast<const Grad*>(a.grad) + row * a.columns + at;
                for (int j = 0; j < n; ++j) {
                    const float g = read(grad, j) * a.grad_scale;
                    const float change = changed(g, by_row, by_column[j], a.most);
                    squares[j] = change * change;
                }
                sum += sum_row(squares, n);
            }
            a.row_sums[row] = sum;
        }
    }
}

template <typename Weight, typename Grad>
void factored_move(const FactoredArguments& arguments, int64_t begin, int64_t end) {
    const FactoredArguments a = arguments;
    for (int64_t block = begin; block < end; ++block) {
        const Rows rows(a, block);
        for (int64_t row = rows.first; row < rows.stop; ++row) {
            const float by_row = a.row_factors[row];
            for (int64_t at = 0; at < a.columns; at += kBlock) {
                const int n = int(a.columns - at < kBlock ? a.columns - at : kBlock);
                const int64_t i = row * a.columns + at;
                const float* __restrict by_column =
                    a.column_factors + rows.matrix * a.columns + at;
                const Grad* __restrict grad = static_cast<const Grad*>(a.grad) + i;
                Weight* __restrict weights = static_cast<Weight*>(a.weights) + i;
                int16_t* __restrict rest = a.remainder == nullptr ? nullptr : a.remainder + i;
                for (int j = 0; j < n; ++j) {
                    const float g = read(grad, j) * a.grad_scale;
                    const float change = changed(g, by_row, by_column[j], a.most);
                    const float master = master_at(weights, rest, j) * a.decay - change * a.size;
                    set_master_at(weights, rest, j, master, nullptr);
                }
            }
        }
    }
}

}  // namespace
}  // namespace megatrain
