// The arithmetic. Compiled once per instruction set with MEGATRAIN_ISA naming it, without
// contraction and without fast-math: every rounding here is one that torch's CPU kernels do.
// Plain loops, which GCC and Clang turn into vector code; no standard-library templates, whose
// copies for a newer instruction set could be linked into code for an older one.
#include "kernels.h"

#include <cmath>
#include <cstring>

#define MEGATRAIN_NAME2(isa) isa##_kernels
#define MEGATRAIN_NAME(isa) MEGATRAIN_NAME2(isa)
#define MEGATRAIN_TEXT2(isa) #isa
#define MEGATRAIN_TEXT(isa) MEGATRAIN_TEXT2(isa)

namespace megatrain {
namespace {

using bf16 = uint16_t;

inline uint32_t bits_of(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    return bits;
}

inline float float_of(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

inline float read(const bf16* values, int64_t i) { return float_of(uint32_t(values[i]) << 16); }
inline float read(const float* values, int64_t i) { return values[i]; }

// Torch fuses a multiplication and an addition exactly where the machine can.
inline float multiply_add(float a, float b, float c) {
#if defined(__FMA__) || defined(__aarch64__)
    return __builtin_fmaf(a, b, c);
#else
    return a * b + c;
#endif
}

// Both are the formulas of reference.py in 16-bit arithmetic, twice as much of it in a vector: a
// remainder with its upper bit set stands for a weight that was rounded away from zero by one.
inline float join_one(bf16 weight, int16_t remainder) {
    const uint16_t upper = uint16_t(weight + (remainder >> 15));
    return float_of(uint32_t(upper) << 16 | uint16_t(remainder));
}

inline void split_one(float master, bf16& weight, int16_t& remainder) {
    uint32_t bits = bits_of(master);
    // Rounding would turn some NaNs into infinities or zeros; quiet ones without a lower half stay.
    bits = master == master ? bits : (bits | 0x00400000u) & 0xffff0000u;
    const uint16_t upper = uint16_t(bits >> 16), lower = uint16_t(bits);
    weight = bf16(upper + (lower >> 15));
    remainder = int16_t(lower);
}

// param, exp_avg, exp_avg_sq after one update: torch/optim/adam.py, _single_tensor_adam, with the
// formulas of at::native's lerp, addcmul and addcdiv.
inline float update_one(const AdamwArguments& a, float param, float& m, float& v, float g) {
    const bool small = a.weight1 < 0.5f;
    param *= a.decay;
    const float coefficient = small ? a.weight1 : a.weight1 - 1.0f;
    m = multiply_add(coefficient, g - m, small ? m : g);
    v = multiply_add(a.weight2 * g, g, v * a.beta2);
    const float denominator = std::sqrt(v) / a.root_correction2 + a.eps;
    return param + (a.negative_step_size * m) / denominator;
}

template <typename Grad>
void adamw_split(const AdamwArguments& arguments, int64_t begin, int64_t end) {
    const AdamwArguments a = arguments;
    bf16* __restrict weights = static_cast<bf16*>(a.weights);
    int16_t* __restrict remainder = a.remainder;
    float* __restrict exp_avg = a.exp_avg;
    float* __restrict exp_avg_sq = a.exp_avg_sq;
    const Grad* __restrict grad = static_cast<const Grad*>(a.grad);
    for (int64_t i = begin; i < end; ++i) {
        float m = exp_avg[i], v = exp_avg_sq[i];
        const float param = join_one(weights[i], remainder[i]);
        const float updated = update_one(a, param, m, v, read(grad, i) * a.grad_scale);
        split_one(updated, weights[i], remainder[i]);
        exp_avg[i] = m;
        exp_avg_sq[i] = v;
    }
}

template <typename Grad>
void adamw_whole(const AdamwArguments& arguments, int64_t begin, int64_t end) {
    const AdamwArguments a = arguments;
    float* __restrict weights = static_cast<float*>(a.weights);
    float* __restrict exp_avg = a.exp_avg;
    float* __restrict exp_avg_sq = a.exp_avg_sq;
    const Grad* __restrict grad = static_cast<const Grad*>(a.grad);
    for (int64_t i = begin; i < end; ++i) {
        float m = exp_avg[i], v = exp_avg_sq[i];
        weights[i] = update_one(a, weights[i], m, v, read(grad, i) * a.grad_scale);
        exp_avg[i] = m;
        exp_avg_sq[i] = v;
    }
}

void split(const float* __restrict master, uint16_t* __restrict weights,
           int16_t* __restrict remainder, int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) split_one(master[i], weights[i], remainder[i]);
}

void join(const uint16_t* __restrict weights, const int16_t* __restrict remainder,
          float* __restrict master, int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) master[i] = join_one(weights[i], remainder[i]);
}

// Sixteen running sums whatever the vector width: the order of additions is part of the result.
// The product of two fp32 numbers is exact in fp64, so fusing would change nothing.
template <typename Value>
double squared_norm(const void* array, int64_t begin, int64_t end) {
    constexpr int kLanes = 16;
    const Value* values = static_cast<const Value*>(array);
    double sums[kLanes] = {};
    int64_t i = begin;
    for (; i + kLanes <= end; i += kLanes) {
        for (int lane = 0; lane < kLanes; ++lane) {
            const double x = read(values, i + lane);
            sums[lane] += x * x;
        }
    }
    for (int lane = 0; i < end; ++i, ++lane) {
        const double x = read(values, i);
        sums[lane] += x * x;
    }
    double total = 0;
    for (double sum : sums) total += sum;
    return total;
}

}  // namespace

const Kernels& MEGATRAIN_NAME(MEGATRAIN_ISA)() {
    static constexpr Kernels table = {
        MEGATRAIN_TEXT(MEGATRAIN_ISA),
        adamw_split<bf16>, adamw_split<float>, adamw_whole<bf16>, adamw_whole<float>,
        split, join,
        squared_norm<bf16>, squared_norm<float>,
    };
    return table;
}

}  // namespace megatrain
