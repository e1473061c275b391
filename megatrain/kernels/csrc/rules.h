// The element rules of an update. `move` gives the parameter after it, and changes its states in
// place: `m` and `v` as fp32, and what int8 states keep of `v`, its root.
#pragma once

#include <cmath>

#include "kernels.h"

namespace megatrain {
namespace {

// Torch fuses a multiplication and an addition exactly where the machine can.
inline float multiply_add(float a, float b, float c) {
#if defined(__FMA__) || defined(__aarch64__)
    return __builtin_fmaf(a, b, c);
#else
    return a * b + c;
#endif
}

// torch/optim/adam.py, _single_tensor_adam, with the formulas of at::native's lerp, addcmul and
// addcdiv. Folded: the root's correction is 1, because the step size and eps have it.
template <bool kFolded>
struct Adamw {
    static float move(const UpdateArguments& a, float param, float& m, float& v, float g,
                      float& root) {
        const bool small = a.weight1 < 0.5f;
        param *= a.decay;
        const float coefficient = small ? a.weight1 : a.weight1 - 1.0f;
        m = multiply_add(coefficient, g - m, small ? m : g);
        v = multiply_add(a.weight2 * g, g, v * a.beta2);
        root = std::sqrt(v);
        const float denominator = (kFolded ? root : root / a.root_correction2) + a.eps;
        return param + (a.negative_step_size * m) / denominator;
    }
};

// Rules whose states are fp32, changed where they are: the first so many of the two.
template <int kStates>
struct InPlace {
    static constexpr int kStateBytes = 4;
    static void load(const UpdateArguments& a, int64_t i, int, float*& m, float*& v) {
        if (kStates > 0) m = static_cast<float*>(a.exp_avg) + i;
        if (kStates > 1) v = static_cast<float*>(a.exp_avg_sq) + i;
    }
    static void store(const UpdateArguments&, int64_t, int, const float*, const float*,
                      const float*) {}
};

struct AdamwFp32 : Adamw<false>, InPlace<2> {};

// A NaN has no sign, and would go unseen.
struct Lion : InPlace<1> {
    static float move(const UpdateArguments& a, float param, float& m, float&, float g, float&) {
        const float mixed = m * a.beta1 + g * a.weight1;
        m = m * a.beta2 + g * a.weight2;
        const float sign = float(int(mixed > 0) - int(mixed < 0));
        return param * a.decay + (mixed == mixed ? sign : mixed) * a.negative_step_size;
    }
};

// `decay` is what is added to the gradient of the parameter, `weight1` what is taken of that.
template <bool kMomentum, bool kNesterov>
struct Sgd : InPlace<kMomentum> {
    static float move(const UpdateArguments& a, float param, float& m, float&, float g, float&) {
        g = a.decay == 0 ? g : g + param * a.decay;
        if (kMomentum) m = m * a.beta1 + g * a.weight1;
        if (kMomentum) g = kNesterov ? g + m * a.beta1 : m;
        return param + g * a.negative_step_size;
    }
};

// What Muon does with a direction.
struct Direction : InPlace<0> {
    static float move(const UpdateArguments& a, float param, float&, float&, float g, float&) {
        return multiply_add(g, a.negative_step_size, param * a.decay);
    }
};

}  // namespace
}  // namespace megatrain
