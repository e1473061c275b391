// The kernels as one table of functions per instruction set; api.cpp chooses a table at run time.
//
// Every function works on the elements [begin, end) of whole arrays, so that a pool can share one
// call out in ranges. Elementwise results do not depend on how the ranges are cut.
#pragma once

#include <cstdint>

namespace megatrain {

// Elements of 8-bit states that share a scale; ranges of an update are cut at multiples of it.
constexpr int kGroup = 64;

// All scalars are what torch's fp32 kernels see: computed in fp64, rounded to fp32 once.
struct AdamwArguments {
    void* weights;              // bf16 bits with a remainder, fp32 without
    void* remainder;            // of 16 or 8 bits; null: weights are fp32
    void* exp_avg;              // fp32, bf16 bits, or int8 codes with scales
    void* exp_avg_sq;           // fp32, bf16 bits, or uint8 codes with scales
    float* exp_avg_scale;       // of each kGroup elements; null: no codes
    float* exp_avg_sq_scale;
    const void* grad;           // bf16 bits or fp32
    float decay;                // 1 - lr * weight_decay
    float weight1;              // 1 - beta1
    float beta2;
    float weight2;              // 1 - beta2
    float root_correction2;     // sqrt(1 - beta2^step); 1 with moments other than fp32
    float eps;                  // those other moments have it here, as a factor,
    float negative_step_size;   // -lr / (1 - beta1^step), and here
    float grad_scale;
    uint64_t at;                // number of the first element, a multiple of kGroup
    uint32_t step;
};

// What the planes of an update are made of; all combinations exist.
enum States { kFp32, kBf16, kInt8, kNumStates };
enum Master { kMasterFp32, kRemainder16, kRemainder8, kNumMasters };
enum Type { kTypeFp32, kTypeBf16, kNumTypes };
using Adamw = void (*)(const AdamwArguments&, int64_t begin, int64_t end);

// Elements summed into one fp64 number; the sums of the blocks are added in order, so that a norm
// depends neither on the number of threads nor on the instruction set.
constexpr int64_t kNormBlock = 1 << 14;

struct Kernels {
    const char* name;
    Adamw adamw[kNumStates][kNumMasters][kNumTypes];  // by states, master, gradient
    // By the bytes of a remainder, less one.
    void (*split[2])(const float* master, uint16_t* weights, void* remainder, int64_t begin,
                     int64_t end);
    void (*join[2])(const uint16_t* weights, const void* remainder, float* master, int64_t begin,
                    int64_t end);
    double (*squared_norm_bf16)(const void* values, int64_t begin, int64_t end);
    double (*squared_norm_fp32)(const void* values, int64_t begin, int64_t end);
};

const Kernels& baseline_kernels();
#if defined(MEGATRAIN_X86)
const Kernels& avx2_kernels();
const Kernels& avx512_kernels();
const Kernels& avx512vbmi_kernels();
#endif

}  // namespace megatrain
