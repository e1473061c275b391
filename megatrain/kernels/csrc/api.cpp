// The C interface: pointers, sizes and scalars. The Python side has checked all arguments.
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "kernels.h"
#include "pool.h"

using megatrain::UpdateArguments;
using megatrain::Kernels;
using megatrain::parallel_for;

namespace {

// Elements per range: large enough to hide the hand-out, small enough to balance busy cores.
constexpr int64_t kGrain = 1 << 16;
static_assert(kGrain % megatrain::kGroup == 0, "groups are not cut");
constexpr int64_t kGrainBytes = 1 << 20;

bool supported(const char* name) {
#if defined(MEGATRAIN_X86)
    __builtin_cpu_init();
    if (!std::strcmp(name, "avx512vbmi"))
        return supported("avx512") && __builtin_cpu_supports("avx512vbmi");
    if (!std::strcmp(name, "avx512"))
        return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
               __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
               __builtin_cpu_supports("fma");
    if (!std::strcmp(name, "avx2"))
        return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#endif
    return !std::strcmp(name, "baseline");
}

// Best first.
std::vector<const Kernels*> all_kernels() {
    return {
#if defined(MEGATRAIN_X86)
        &megatrain::avx512vbmi_kernels(),
        &megatrain::avx512_kernels(),
        &megatrain::avx2_kernels(),
#endif
        &megatrain::baseline_kernels(),
    };
}

const Kernels* find_kernels(const char* name) {
    for (const Kernels* kernels : all_kernels())
        if ((name == nullptr || !std::strcmp(name, kernels->name)) && supported(kernels->name))
            return kernels;
    return nullptr;
}

const Kernels* chosen = find_kernels(nullptr);

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

// Raised with every change of the signatures below; native.py refuses another number.
int megatrain_abi() { return 7; }

const char* megatrain_instruction_set() { return chosen->name; }

// For tests and benchmarks. Returns whether this machine has it.
int megatrain_use_instruction_set(const char* name) {
    const Kernels* kernels = find_kernels(name);
    if (kernels != nullptr) chosen = kernels;
    return kernels != nullptr;
}

int megatrain_set_affinity(const int* cores, int num_cores) {
    return megatrain::set_affinity(cores, num_cores);
}

// `rule` and `master` are numbers of megatrain::Rule and megatrain::Master; the scalars are in the
// order of UpdateArguments.
void megatrain_update(void* weights, void* remainder, void* exp_avg, void* exp_avg_sq,
                      float* exp_avg_scale, float* exp_avg_sq_scale, const void* grad, int rule,
                      int master, int grad_is_bf16, int64_t size,
                      float negative_step_size, float decay, float beta1, float weight1,
                      float beta2, float weight2, float root_correction2, float eps,
                      float grad_scale, uint64_t at, uint32_t step, int threads) {
    const UpdateArguments arguments = {
        weights, remainder, exp_avg, exp_avg_sq, exp_avg_scale, exp_avg_sq_scale,
        grad, negative_step_size, decay, beta1, weight1, beta2, weight2, root_correction2, eps,
        grad_scale, at, step,
    };
    const auto kernel = chosen->update[rule][master][grad_is_bf16];
    parallel_for(size, kGrain, threads,
                 [&](int64_t begin, int64_t end) { kernel(arguments, begin, end); });
}

// `pass` is a number of megatrain::Pass; the rest is in the order of FactoredArguments.
void megatrain_factored(void* weights, int16_t* remainder, const void* grad, float* row_sums,
                        float* column_sums, float* master_sums, const float* row_factors,
                        const float* column_factors, int pass, int grad_is_bf16, int64_t count,
                        int64_t rows, int64_t columns, float most, float decay, float size,
                        float grad_scale, int threads) {
    const megatrain::FactoredArguments arguments = {
        weights, remainder, grad, row_sums, column_sums, master_sums, row_factors, column_factors,
        rows, columns, most, decay, size, grad_scale,
    };
    const auto kernel = chosen->factored[pass][remainder != nullptr][grad_is_bf16];
    const int64_t blocks = count * ((rows + megatrain::kRows - 1) / megatrain::kRows);
    const int64_t grain = kGrain / (std::min<int64_t>(rows, megatrain::kRows) * columns) + 1;
    parallel_for(blocks, grain, threads,
                 [&](int64_t begin, int64_t end) { kernel(arguments, begin, end); });
}

void megatrain_split(const float* master, uint16_t* weights, void* remainder, int remainder_bytes,
                     int64_t size, int threads) {
    parallel_for(size, kGrain, threads, [&](int64_t begin, int64_t end) {
        chosen->split[remainder_bytes - 1](master, weights, remainder, begin, end);
    });
}

void megatrain_join(const uint16_t* weights, const void* remainder, float* master,
                    int remainder_bytes, int64_t size, int threads) {
    parallel_for(size, kGrain, threads, [&](int64_t begin, int64_t end) {
        chosen->join[remainder_bytes - 1](weights, remainder, master, begin, end);
    });
}

void megatrain_gather_rows(const char* table, const int64_t* row_ids, char* out, int64_t num_rows,
                           int64_t row_bytes, int threads) {
    const int64_t grain = kGrainBytes / 8 / (row_bytes + 1) + 1;
    parallel_for(num_rows, grain, threads, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i)
            std::memcpy(out + i * row_bytes, table + row_ids[i] * row_bytes, size_t(row_bytes));
    });
}

void megatrain_scatter_rows(char* table, const int64_t* row_ids, const char* rows,
                            int64_t num_rows, int64_t row_bytes, int threads) {
    const int64_t grain = kGrainBytes / 8 / (row_bytes + 1) + 1;
    parallel_for(num_rows, grain, threads, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i)
            std::memcpy(table + row_ids[i] * row_bytes, rows + i * row_bytes, size_t(row_bytes));
    });
}

void megatrain_first_touch(volatile char* bytes, int64_t size, int threads) {
    const int64_t page = sysconf(_SC_PAGESIZE);
    parallel_for(size, 64 * kGrainBytes, threads, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; i += page) bytes[i] = 0;
    });
}

void megatrain_fill_zero(char* bytes, int64_t size, int threads) {
    parallel_for(size, kGrainBytes, threads, [&](int64_t begin, int64_t end) {
        std::memset(bytes + begin, 0, size_t(end - begin));
    });
}

void megatrain_copy(char* to, const char* from, int64_t size, int threads) {
    parallel_for(size, kGrainBytes, threads, [&](int64_t begin, int64_t end) {
        std::memcpy(to + begin, from + begin, size_t(end - begin));
    });
}

}  // extern "C"
#pragma GCC visibility pop
