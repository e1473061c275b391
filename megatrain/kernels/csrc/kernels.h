// The kernels as one table of functions per instruction set; api.cpp chooses a table at run time.
//
// Every function works on the elements [begin, end) of whole arrays, so that a pool can share one
// call out in ranges. Elementwise results do not depend on how the ranges are cut.
#pragma once

#include <cstdint>

namespace megatrain {

// Elements of 8-bit states that share a scale; ranges of an update are cut at multiples of it.
constexpr int kGroup = 64;

// Scalars are what torch's fp32 kernels see: computed in fp64, rounded to fp32 once. rules.h says
// what a rule uses them for.
struct UpdateArguments {
    void* weights;              // bf16 bits with a remainder, fp32 without
    void* remainder;            // of 16 or 8 bits; null: weights are fp32
    void* exp_avg;              // fp32, bf16 bits, or int8 codes with scales; null: no state
    void* exp_avg_sq;           // fp32, bf16 bits, or uint8 codes with scales
    float* exp_avg_scale;       // of each kGroup elements; null: no codes
    float* exp_avg_sq_scale;
    const void* grad;           // bf16 bits or fp32
    float negative_step_size;   // -lr / (1 - beta1^step)
    float decay;                // 1 - lr * weight_decay
    float beta1;
    float weight1;              // 1 - beta1
    float beta2;
    float weight2;              // 1 - beta2
    float root_correction2;     // sqrt(1 - beta2^step); 1 with moments other than fp32
    float eps;                  // those have it as a factor here and in negative_step_size
    float grad_scale;
    uint64_t at;                // number of the first element, a multiple of kGroup
    uint32_t step;
};

// A rule, with what its states are made of, and the other planes; all combinations exist.
enum Rule {
    kAdamwFp32, kAdamwBf16, kAdamwInt8, kLion, kSgd, kSgdMomentum, kSgdNesterov, kDirection,
    kNumRules
};
enum Master { kMasterFp32, kRemainder16, kRemainder8, kNumMasters };
enum Type { kTypeFp32, kTypeBf16, kNumTypes };

// A checksum that goes on over a plane, lane by lane, in rows of kLanes 64-bit words: the sum of
// each lane, and what these sums have been after each row. All is modulo 2^64.
constexpr int kLanes = 8, kRow = 8 * kLanes;
struct Lanes {
    alignas(kRow) uint64_t sums[kLanes], sums_of_sums[kLanes];
};

// Of the planes of an update before and after it, in the order of UpdateArguments; scales are not
// summed here.
constexpr int kPlanes = 7;
struct PlaneSums {
    bool before;  // else only after it
    Lanes lanes[2][kPlanes];
};
// `sums` may be null; else `begin` is that of a row of each plane.
using Update = void (*)(const UpdateArguments&, int64_t begin, int64_t end, PlaneSums* sums);
// Of bytes from the beginning of a row on; what is missing of the last row is zero.
using Checksum = void (*)(const void* bytes, int64_t num_bytes, Lanes& lanes);

struct Kernels {
    const char* name;
    Update update[kNumRules][kNumMasters][kNumTypes];  // by rule, master, gradient
    // By the bytes of a remainder, less one.
    void (*split[2])(const float* master, uint16_t* weights, void* remainder, int64_t begin,
                     int64_t end);
    void (*join[2])(const uint16_t* weights, const void* remainder, float* master, int64_t begin,
                    int64_t end);
    Checksum checksum;
};

const Kernels& baseline_kernels();
#if defined(MEGATRAIN_X86)
const Kernels& avx2_kernels();
const Kernels& avx512_kernels();
const Kernels& avx512vbmi_kernels();
#endif

}  // namespace megatrain
