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

// Bytes of a plane with a checksum of their own, two numbers: see Checksum.
constexpr int64_t kBlockBytes = 1 << 18;

// Checksums of one plane's blocks, to which threads add what they see.
class PlaneSums {
public:
    // `at`: where in the plane that the blocks are of the first of `bytes` is.
    PlaneSums() = default;
    PlaneSums(uint64_t* blocks, const void* bytes, int64_t at)
        : blocks_(blocks), bytes_(static_cast<const char*>(bytes)), at_(at) {}
    ~PlaneSums() { put(); }

    // Goes on, or begins elsewhere.
    void see(int64_t begin, int64_t end) {
        if (blocks_ == nullptr) return;
        while (begin < end) {
            if (begin != seen_ || begin >= until_) {
                put();
                first_ = begin;
                until_ = begin + kBlockBytes - (at_ + begin) % kBlockBytes;
            }
            const int64_t stop = std::min(end, until_);
            const int64_t rows = (stop - begin) / kRow;
            chosen->checksum(bytes_ + begin, rows, sums_, sums_of_sums_);
            begin = seen_ = begin + rows * kRow;
            if (begin == stop) continue;
            put();
            for (; begin < stop; begin += 8) {
                uint64_t word = 0;
                std::memcpy(&word, bytes_ + begin, size_t(std::min<int64_t>(8, stop - begin)));
                add(begin, word, 0);
            }
            begin = stop;
        }
    }

private:
    static constexpr int64_t kRow = 8 * megatrain::kLanes;

    void put() {
        const uint64_t rows = uint64_t((seen_ - first_) / kRow);
        uint64_t sum = 0, numbered = 0;
        for (uint64_t lane = 0; lane < megatrain::kLanes && rows > 0; ++lane) {
            sum += sums_[lane];
            numbered += megatrain::kLanes * (rows * sums_[lane] - sums_of_sums_[lane]);
            numbered += lane * sums_[lane];
            sums_[lane] = sums_of_sums_[lane] = 0;
        }
        if (rows > 0) add(first_, sum, numbered);
        first_ = seen_ = -1;
    }
    // Adds words whose first one is at a byte, and their sum weighted by their numbers from there.
    void add(int64_t byte, uint64_t sum, uint64_t weighted) {
        const uint64_t at = uint64_t(at_ + byte);
        uint64_t* block = blocks_ + at / kBlockBytes * 2;
        __atomic_fetch_add(block, sum, __ATOMIC_RELAXED);
        __atomic_fetch_add(block + 1, at % kBlockBytes / 8 * sum + weighted, __ATOMIC_RELAXED);
    }

    uint64_t* blocks_ = nullptr;
    const char* bytes_ = nullptr;
    int64_t at_ = 0, first_ = -1, seen_ = -1, until_ = -1;
    uint64_t sums_[megatrain::kLanes] = {}, sums_of_sums_[megatrain::kLanes] = {};
};

// Elements that are summed, updated and summed again while they are in the cache.
constexpr int64_t kSummed = 512;
constexpr int kPlanes = 7;  // of an update, in the order of its arguments

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
        return parallel_for(size, kGrain, threads,
                            [&](int64_t begin, int64_t end) { kernel(arguments, begin, end); });
    const void* planes[kPlanes] = {weights, remainder, exp_avg, exp_avg_sq,
                                   exp_avg_scale, exp_avg_sq_scale, grad};
    constexpr int64_t kG = megatrain::kGroup, per[kPlanes] = {1, 1, 1, 1, kG, kG, 1};
    parallel_for(size, kGrain, threads, [&](int64_t begin, int64_t end) {
        PlaneSums sums[2][kPlanes];
        for (int i = 0; i < kPlanes; ++i) {
            sums[0][i] = PlaneSums(read[i], planes[i], first[i]);
            sums[1][i] = PlaneSums(written[i], planes[i], first[i]);
        }
        const auto see = [&](int which, bool scales, int64_t start, int64_t stop) {
            for (int i = 0; i < kPlanes; ++i)
                if ((per[i] > 1) == scales)
                    sums[which][i].see(start / per[i] * item[i],
                                       (stop + per[i] - 1) / per[i] * item[i]);
        };
        const auto fetch = [&](int i, int64_t start, int64_t stop) {
            if (planes[i] == nullptr) return;
            const char* from = static_cast<const char*>(planes[i]);
            for (int64_t at = start * item[i]; at < stop * item[i]; at += 64)
                __builtin_prefetch(from + at, 0, 3);
        };
        see(0, true, begin, end);
        for (int64_t start = begin; start < end; start += kSummed) {
            const int64_t stop = std::min(start + kSummed, end);
            const int64_t next = std::min(stop + kSummed, end);
            fetch(0, stop, next);
            fetch(1, stop, next);
            see(0, false, start, stop);
            fetch(2, stop, next);
            fetch(6, stop, next);
            kernel(arguments, start, stop);
            fetch(3, stop, next);
            see(1, false, start, stop);
        }
        see(1, true, begin, end);
    });
}

// Adds the checksums of so many bytes to those of their plane's blocks; the first byte is its `at`.
void megatrain_checksum(const void* bytes, int64_t num_bytes, uint64_t* blocks, int64_t at,
                        int threads) {
    parallel_for(num_bytes, kGrainBytes, threads, [&](int64_t begin, int64_t end) {
        PlaneSums(blocks, bytes, at).see(begin, end);
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
