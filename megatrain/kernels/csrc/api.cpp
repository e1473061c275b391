// The C interface: pointers, sizes and scalars. The Python side has checked all arguments.
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "kernels.h"
#include "pool.h"

using megatrain::UpdateArguments;
using megatrain::Kernels;
using megatrain::kPlanes;
using megatrain::Lanes;
using megatrain::parallel_for;
using megatrain::PlaneSums;

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

// Bytes of a plane with a checksum of their own, two numbers: see Checksum.
constexpr int64_t kBlockBytes = 1 << 18;

// Bytes from a plane's byte `at` to the end of its block.
int64_t bytes_left(int64_t at) { return kBlockBytes - at % kBlockBytes; }

// Adds the checksum of so many bytes, the first of which is a plane's byte `at`, to that of their
// block.
void put(const Lanes& lanes, int64_t num_bytes, uint64_t* blocks, int64_t at) {
    const uint64_t rows = uint64_t((num_bytes + megatrain::kRow - 1) / megatrain::kRow);
    uint64_t sum = 0, numbered = 0;
    for (uint64_t lane = 0; lane < megatrain::kLanes; ++lane) {
        sum += lanes.sums[lane];
        numbered += megatrain::kLanes * (rows * lanes.sums[lane] - lanes.sums_of_sums[lane]);
        numbered += lane * lanes.sums[lane];
    }
    numbered += uint64_t(at % kBlockBytes / 8) * sum;
    __atomic_fetch_add(blocks + at / kBlockBytes * 2, sum, __ATOMIC_RELAXED);
    __atomic_fetch_add(blocks + at / kBlockBytes * 2 + 1, numbered, __ATOMIC_RELAXED);
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

// Raised with every change of the signatures below; native.py refuses another number.
int megatrain_abi() { return 9; }

const char* megatrain_instruction_set() { return chosen->name; }

// For tests and benchmarks. Returns whether this machine has it.
int megatrain_use_instruction_set(const char* name) {
    const Kernels* kernels = find_kernels(name);
    if (kernels != nullptr) chosen = kernels;
    return kernels != nullptr;
}

// `rule` and `master` are numbers of megatrain::Rule and megatrain::Master; the scalars are in the
// order of UpdateArguments.
void megatrain_update(void* weights, void* remainder, void* exp_avg, void* exp_avg_sq,
                      float* exp_avg_scale, float* exp_avg_sq_scale, const void* grad, int rule,
                      int master, int grad_is_bf16, int64_t size,
                      float negative_step_size, float decay, float beta1, float weight1,
                      float beta2, float weight2, float root_correction2, float eps,
                      float grad_scale, uint64_t at, uint32_t step, int threads,
                      uint64_t* const* read, uint64_t* const* written, const int64_t* first,
                      const int64_t* item) {
    const UpdateArguments arguments = {
        weights, remainder, exp_avg, exp_avg_sq, exp_avg_scale, exp_avg_sq_scale,
        grad, negative_step_size, decay, beta1, weight1, beta2, weight2, root_correction2, eps,
        grad_scale, at, step,
    };
    const auto kernel = chosen->update[rule][master][grad_is_bf16];
    if (read == nullptr)
        return parallel_for(size, kGrain, threads, [&](int64_t begin, int64_t end) {
            kernel(arguments, begin, end, nullptr);
        });
    const void* planes[kPlanes] = {weights, remainder, exp_avg, exp_avg_sq,
                                   exp_avg_scale, exp_avg_sq_scale, grad};
    constexpr int64_t kG = megatrain::kGroup, per[kPlanes] = {1, 1, 1, 1, kG, kG, 1};
    uint64_t* const* const blocks[2] = {read, written};
    // Elements that lie in one block of each plane.
    const auto update_part = [&](int64_t begin, int64_t end) {
        PlaneSums sums = {};
        const auto for_sums = [&](int when, auto&& work) {
            for (int i = 0; i < kPlanes; ++i) {
                if (blocks[when][i] == nullptr) continue;
                const int64_t at = begin / per[i] * item[i];
                work(i, at, (end + per[i] - 1) / per[i] * item[i] - at, sums.lanes[when][i]);
            }
        };
        const auto see_scales = [&](int i, int64_t at, int64_t size, Lanes& lanes) {
            sums.before = true;
            if (per[i] > 1)
                chosen->checksum(static_cast<const char*>(planes[i]) + at, size, lanes);
        };
        for_sums(0, see_scales);
        kernel(arguments, begin, end, &sums);
        for_sums(1, see_scales);
        for (int when = 0; when < 2; ++when)
            for_sums(when, [&](int i, int64_t at, int64_t size, Lanes& lanes) {
                put(lanes, size, blocks[when][i], first[i] + at);
            });
    };
    parallel_for(size, kGrain, threads, [&](int64_t begin, int64_t end) {
        while (begin < end) {
            int64_t stop = end;
            for (int i = 0; i < kPlanes; ++i) {
                if (planes[i] == nullptr) continue;
                const int64_t at = first[i] + begin / per[i] * item[i];
                stop = std::min(stop, begin + bytes_left(at) / item[i] * per[i]);
            }
            update_part(begin, stop);
            begin = stop;
        }
    });
}

// Adds the checksums of so many bytes to those of their plane's blocks; the first byte is its `at`.
void megatrain_checksum(const void* bytes, int64_t num_bytes, uint64_t* blocks, int64_t at,
                        int threads) {
    parallel_for(num_bytes, kGrainBytes, threads, [&](int64_t begin, int64_t end) {
        while (begin < end) {
            const int64_t some = std::min(bytes_left(at + begin), end - begin);
            Lanes lanes = {};
            chosen->checksum(static_cast<const char*>(bytes) + begin, some, lanes);
            put(lanes, some, blocks, at + begin);
            begin += some;
        }
    });
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
