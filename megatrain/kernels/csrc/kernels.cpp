// The arithmetic. Compiled once per instruction set with MEGATRAIN_ISA naming it, without
// contraction and without fast-math: every rounding here is one that torch's CPU kernels do.
// Plain loops, which GCC and Clang turn into vector code; no standard-library templates, whose
// copies for a newer instruction set could be linked into code for an older one.
#include "kernels.h"
#include "rules.h"

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

#if defined(__AVX512F__) || defined(__aarch64__)
// a / b, rounded, where `scale * b` is from 1 to 2, for the few quotients of codes, which would
// wait for the divider: a polynomial and a step of Halley's give the inverse of b, and what a
// quotient by it leaves of a, which one fused operation gives exactly, corrects it (Markstein
// 1990). The tests compare every quotient there is.
inline float code_divided(float a, float b, float scale) {
    const float first = multiply_add(0.327278f * (scale * scale * scale), b,
                                     -1.467845f * (scale * scale));
    const float inverse = multiply_add(first, b, 2.131848f * scale);
    const float left = multiply_add(-b, inverse, 1.0f);
    const float better = multiply_add(multiply_add(left, left, left), inverse, inverse);
    const float quotient = a * better;
    return multiply_add(multiply_add(-b, quotient, a), better, quotient);
}
#else
inline float code_divided(float a, float b, float) { return a / b; }
#endif

// Both are the formulas of reference.py in 16-bit arithmetic, twice as much of it in a vector: a
// remainder with its upper bit set stands for a weight that was rounded away from zero by one.
inline float join_one(bf16 weight, int16_t remainder) {
    const uint16_t upper = uint16_t(weight + (remainder >> 15));
    return float_of(uint32_t(upper) << 16 | uint16_t(remainder));
}
inline float join_one(bf16 weight, int8_t remainder) {
    return join_one(weight, int16_t(remainder * 256));
}

// Rounding would turn some NaNs into infinities or zeros; quiet ones without a lower half stay.
inline uint32_t quiet_bits(uint32_t bits) { return (bits | 0x00400000u) & 0xffff0000u; }

inline void split_one(float master, bf16& weight, int16_t& remainder, uint32_t) {
    uint32_t bits = bits_of(master);
    bits = master == master ? bits : quiet_bits(bits);
    const uint16_t upper = uint16_t(bits >> 16), lower = uint16_t(bits);
    weight = bf16(upper + (lower >> 15));
    remainder = int16_t(lower);
}
// To 24 bits: up, away from zero, where the other eight and `added` are 256 or more.
inline void split_one(float master, bf16& weight, int8_t& remainder, uint32_t added) {
    uint32_t bits = bits_of(master);
    bits = master == master ? bits + added : quiet_bits(bits);
    weight = bf16((bits >> 16) + (bits >> 15 & 1));
    remainder = int8_t(bits >> 8);
}

// Random numbers for each element and step: states.py has the formulas.
inline uint32_t mixed(uint32_t x) {
    x = (x ^ x >> 16) * 0x7feb352du;
    x = (x ^ x >> 15) * 0x846ca68bu;
    return x ^ x >> 16;
}
inline uint32_t group_key(const UpdateArguments& a, int64_t i) {
    const uint64_t at = a.at + uint64_t(i);
    return mixed(mixed(a.step) + uint32_t(at >> 32)) + uint32_t(at);
}

// Stochastic rounding: up or down, so that the mean is the value; NaN, infinity and zero stay.
inline bf16 stochastic_round(float value, uint32_t random16) {
    const uint32_t bits = bits_of(value);
    return bf16((value == value ? bits + random16 : bits | 0x00400000u) >> 16);
}

// A group's scale by the bits of its largest magnitude: none below 2^-110, and NaN if anything in
// it is not finite. Only a proper scale has codes other than zero.
constexpr int32_t kSmallest = (127 - 110) << 23, kInfinity = 0x7f800000;
inline bool is_proper(int32_t largest) { return largest >= kSmallest && largest < kInfinity; }
inline float scale_of(int32_t largest) {
    return is_proper(largest) ? float_of(uint32_t(largest)) : largest < kSmallest ? 0.0f : NAN;
}
constexpr int kShares = 32767;  // in what parts of the scale a first moment is counted
inline int32_t magnitude(float value) { return int32_t(bits_of(value) & 0x7fffffffu); }
inline int smaller(int a, int b) { return a < b ? a : b; }
inline int32_t larger(int32_t a, int32_t b) { return a > b ? a : b; }

// Adding this to a small number rounds it to an integer, ties to even, in the lowest bits.
constexpr float kRounder = 12582912.0f;  // 1.5 * 2^23

// Elements whose every stage of an update is a loop of its own over what stays in the first-level
// cache: loops that the compiler makes vectors of, long enough that no stage waits for the last.
constexpr int kBlock = 1024;

// AdamW's other states. As of InPlace, `load` gives those of up to kBlock elements from `i` on as
// fp32, and `store` takes them; `m` and `v` point to room for them.
struct AdamwBf16 : Adamw<true> {
    static constexpr int kStateBytes = 2;
    static void load(const UpdateArguments& a, int64_t i, int n, float*& m, float*& v) {
        const bf16* first = static_cast<bf16*>(a.exp_avg) + i;
        const bf16* second = static_cast<bf16*>(a.exp_avg_sq) + i;
        for (int j = 0; j < n; ++j) m[j] = read(first, j);
        for (int j = 0; j < n; ++j) v[j] = read(second, j);
    }
    static void store(const UpdateArguments& a, int64_t i, int n, const float* m, const float* v,
                      const float*) {
        bf16* __restrict first = static_cast<bf16*>(a.exp_avg) + i;
        bf16* __restrict second = static_cast<bf16*>(a.exp_avg_sq) + i;
        for (int group = 0; group < n; group += kGroup) {
            const uint32_t key = group_key(a, i + group);
            for (int j = group; j < smaller(group + kGroup, n); ++j) {
                const uint32_t random = mixed(key + uint32_t(j - group));
                first[j] = stochastic_round(m[j], random >> 16);
                second[j] = stochastic_round(v[j], random & 0xffff);
            }
        }
    }
};

struct AdamwInt8 : Adamw<true> {
    static constexpr int kStateBytes = 1;
    static void load(const UpdateArguments& a, int64_t i, int n, float*& m, float*& v) {
        for (int group = 0; group < n; group += kGroup) {
            const int8_t* first = static_cast<int8_t*>(a.exp_avg) + i + group;
            const uint8_t* second = static_cast<uint8_t*>(a.exp_avg_sq) + i + group;
            const float scale1 = a.exp_avg_scale[(i + group) / kGroup];
            const float share2 = a.exp_avg_sq_scale[(i + group) / kGroup] * (1.0f / 255.0f);
            const int size = smaller(kGroup, n - group);
            for (int j = 0; j < size; ++j) {
                const float code = first[j], divisor = 254.0f - std::fabs(code);
                m[group + j] = code_divided(code, divisor, 1.0f / 128.0f) * scale1;
                const float root = second[j] * share2;
                v[group + j] = root * root;
            }
        }
    }
    static void store(const UpdateArguments& a, int64_t i, int n, const float* m, const float*,
                      const float* root) {
        int32_t largest1[kBlock / kGroup], largest2[kBlock / kGroup];
        for (int group = 0; group < n; group += kGroup) {
            largest1[group / kGroup] = largest(m + group, smaller(kGroup, n - group));
            largest2[group / kGroup] = largest(root + group, smaller(kGroup, n - group));
        }
        for (int group = 0; group < n; group += kGroup) {
            const int64_t at = i + group;
            const int size = smaller(kGroup, n - group);
            a.exp_avg_scale[at / kGroup] = encode_first(
                m + group, size, largest1[group / kGroup], static_cast<int8_t*>(a.exp_avg) + at);
            a.exp_avg_sq_scale[at / kGroup] = encode_second(
                root + group, size, largest2[group / kGroup],
                static_cast<uint8_t*>(a.exp_avg_sq) + at);
        }
    }

private:
    // The bits of the largest magnitude; those of a NaN are larger than any other.
    static int32_t largest(const float* values, int n) {
        int32_t found = 0;
        for (int j = 0; j < n; ++j) found = larger(found, magnitude(values[j]));
        return found;
    }
    static float encode_first(const float* m, int n, int32_t largest, int8_t* __restrict codes) {
        const float scale = scale_of(largest), inverse = kShares / scale;
        if (!is_proper(largest)) {
            std::memset(codes, 0, size_t(n));
            return scale;
        }
        for (int j = 0; j < n; ++j) {
            const float share = (std::fabs(m[j]) * inverse + kRounder) - kRounder;
            const float code = code_divided(254.0f * share, kShares + share, 1.0f / kShares);
            codes[j] = int8_t(bits_of(std::copysign(code, m[j]) + kRounder));
        }
        return scale;
    }
    static float encode_second(const float* root, int n, int32_t largest,
                               uint8_t* __restrict codes) {
        const float scale = scale_of(largest), inverse = 255.0f / scale;
        if (!is_proper(largest)) {
            std::memset(codes, 0, size_t(n));
            return scale;
        }
        for (int j = 0; j < n; ++j) {
            const int32_t code = bits_of(root[j] * inverse + kRounder) & 255;
            codes[j] = uint8_t(larger(code, root[j] > 0));
        }
        return scale;
    }
};

#if defined(__AVX512F__)
constexpr int kVector = 8;
#elif defined(__AVX2__)
constexpr int kVector = 4;
#else
constexpr int kVector = 2;
#endif
typedef uint64_t Words __attribute__((vector_size(8 * kVector)));
constexpr int kVectors = kLanes / kVector;  // of a row

inline Words words_at(const void* from, int64_t i) {
    Words words;
    std::memcpy(&words, static_cast<const char*>(from) + i * int64_t(sizeof words), sizeof words);
    return words;
}

inline __attribute__((always_inline)) void add_rows(const void* bytes, int64_t num_bytes, Lanes& lanes) {
    const char* from = static_cast<const char*>(bytes);
    Words sum[kVectors], total[kVectors];
    std::memcpy(sum, lanes.sums, kRow);
    std::memcpy(total, lanes.sums_of_sums, kRow);
    int64_t at = 0;
    for (; at + kRow <= num_bytes; at += kRow)
        for (int k = 0; k < kVectors; ++k) total[k] += sum[k] += words_at(from + at, k);
    if (at < num_bytes) {
        char last[kRow] = {};
        std::memcpy(last, from + at, size_t(num_bytes - at));
        for (int k = 0; k < kVectors; ++k) total[k] += sum[k] += words_at(last, k);
    }
    std::memcpy(lanes.sums, sum, kRow);
    std::memcpy(lanes.sums_of_sums, total, kRow);
}

void checksum(const void* bytes, int64_t num_bytes, Lanes& lanes) {
    add_rows(bytes, num_bytes, lanes);
}

// Sums the planes of an update that are not scales, of n elements, while they are in the cache.
template <typename Rule, typename Weight, typename Remainder>
inline __attribute__((always_inline)) void see(const UpdateArguments& a, int64_t i, int n, Lanes* lanes) {
    const auto plane = [&](int number, const void* values,
                           int64_t item) __attribute__((always_inline)) {
        if (values != nullptr)
            add_rows(static_cast<const char*>(values) + i * item, n * item, lanes[number]);
    };
    plane(0, a.weights, sizeof(Weight));
    plane(1, a.remainder, sizeof(Remainder));
    plane(2, a.exp_avg, Rule::kStateBytes);
    plane(3, a.exp_avg_sq, Rule::kStateBytes);
}
template <typename Rule, typename Weight, typename Remainder, typename Grad>
inline __attribute__((always_inline)) void see_before(const UpdateArguments& a, int64_t i, int n,
                                                      PlaneSums* sums) {
    if (sums == nullptr || !sums->before) return;
    see<Rule, Weight, Remainder>(a, i, n, sums->lanes[0]);
    add_rows(static_cast<const Grad*>(a.grad) + i, n * int(sizeof(Grad)), sums->lanes[0][6]);
}

}  // namespace
}  // namespace megatrain

#if defined(__AVX512VBMI__)
#include "codes_avx512.h"
#endif

namespace megatrain {
namespace {

template <typename Remainder>
inline float master_at(const bf16* weights, const Remainder* remainder, int j) {
    return join_one(weights[j], remainder[j]);
}
template <typename Remainder>
inline float master_at(const float* weights, const Remainder*, int j) {
    return weights[j];
}
template <typename Remainder>
inline void set_master_at(float* weights, Remainder*, int j, float master, const uint8_t*) {
    weights[j] = master;
}
inline void set_master_at(bf16* weights, int16_t* remainder, int j, float master, const uint8_t*) {
    split_one(master, weights[j], remainder[j], 0);
}
inline void set_master_at(bf16* weights, int8_t* remainder, int j, float master,
                          const uint8_t* random) {
    split_one(master, weights[j], remainder[j], random[j]);
}

// What rounds the masters of n elements to 24 bits stochastically; of whole groups.
inline void random_bytes(const UpdateArguments& a, int64_t i, int n, uint8_t* random) {
    static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the first byte is the lowest");
    for (int group = 0; group < n; group += kGroup) {
        const uint32_t key = group_key(a, i + group);
        uint32_t words[kGroup / 4];
        for (uint32_t j = 0; j < kGroup / 4; ++j) words[j] = mixed(~(key + j));
        std::memcpy(random + group, words, kGroup);
    }
}

template <typename Rule, typename Weight, typename Remainder, typename Grad>
inline __attribute__((always_inline)) void update_block(const UpdateArguments& a, int64_t i,
                                                        int n) {
    float room1[kBlock], room2[kBlock], root[kBlock];
    float *first = room1, *second = room2;
    Rule::load(a, i, n, first, second);
    float* __restrict m = first;
    float* __restrict v = second;
    Weight* __restrict weights = static_cast<Weight*>(a.weights) + i;
    Remainder* __restrict remainder =
        a.remainder == nullptr ? nullptr : static_cast<Remainder*>(a.remainder) + i;
    const Grad* __restrict grad = static_cast<const Grad*>(a.grad) + i;
    uint8_t random[kBlock];
    if (sizeof(Remainder) == 1) random_bytes(a, i, n, random);
    for (int j = 0; j < n; ++j) {
        const float param = master_at(weights, remainder, j);
        const float g = read(grad, j) * a.grad_scale;
        const float updated = Rule::move(a, param, m[j], v[j], g, root[j]);
        set_master_at(weights, remainder, j, updated, random);
    }
    Rule::store(a, i, n, m, v, root);
}

// Updates whole groups from `begin` on, where there is a way of their own; returns where they end.
template <typename Rule, typename Weight, typename Remainder, typename Grad>
struct Groups {
    static int64_t update(const UpdateArguments&, int64_t begin, int64_t, PlaneSums*) {
        return begin;
    }
};
#if defined(__AVX512VBMI__)
template <typename Remainder>
struct Groups<AdamwInt8, bf16, Remainder, bf16> {
    static int64_t update(const UpdateArguments& a, int64_t begin, int64_t end, PlaneSums* sums) {
        return a.weight1 < 0.5f ? update_groups<true, Remainder>(a, begin, end, sums)
                                : update_groups<false, Remainder>(a, begin, end, sums);
    }
};
#endif

// Asks the cache for n values of a plane from `i` on.
inline void fetch(const void* plane, int64_t i, int n, int64_t item) {
    const char* from = static_cast<const char*>(plane) + i * item;
    for (int64_t at = 0; at < n * item; at += 64) __builtin_prefetch(from + at, 0, 3);
}

// Updates blocks of n elements from `begin` on with sums; returns where they end. What is written is
// summed one block later, when it has left the store buffer: a load that spans two stores would wait
// for it. Where sums of what is read do not go through memory first, the cache is asked ahead.
template <int n, typename Rule, typename Weight, typename Remainder, typename Grad>
int64_t update_summed(const UpdateArguments& a, int64_t begin, int64_t end, PlaneSums* sums) {
    constexpr int kAhead = 256;
    int64_t i = begin;
    for (; i + n <= end; i += n) {
        if (!sums->before) {
            fetch(a.weights, i + kAhead, n, sizeof(Weight));
            fetch(a.remainder, i + kAhead, n, sizeof(Remainder));
            fetch(a.exp_avg, i + kAhead, n, Rule::kStateBytes);
            fetch(a.exp_avg_sq, i + kAhead, n, Rule::kStateBytes);
            fetch(a.grad, i + kAhead, n, sizeof(Grad));
        }
        see_before<Rule, Weight, Remainder, Grad>(a, i, n, sums);
        update_block<Rule, Weight, Remainder, Grad>(a, i, n);
        if (i > begin) see<Rule, Weight, Remainder>(a, i - n, n, sums->lanes[1]);
    }
    if (i > begin) see<Rule, Weight, Remainder>(a, i - n, n, sums->lanes[1]);
    return i;
}

template <typename Rule, typename Weight, typename Remainder, typename Grad>
void update(const UpdateArguments& arguments, int64_t begin, int64_t end, PlaneSums* sums) {
    const UpdateArguments a = arguments;
    int64_t i = Groups<Rule, Weight, Remainder, Grad>::update(a, begin, end, sums);
    // With sums fewer at a time, which go beside the quotients; codes have longer stages.
    constexpr int kSummed = Rule::kStateBytes == 4 ? kGroup : kBlock / 2;
    if (sums != nullptr)
        i = update_summed<kSummed, Rule, Weight, Remainder, Grad>(a, i, end, sums);
    for (int n; i < end; i += n) {
        n = end - i < kBlock ? int(end - i) : kBlock;
        if (n == kBlock) {
            update_block<Rule, Weight, Remainder, Grad>(a, i, kBlock);
            continue;
        }
        see_before<Rule, Weight, Remainder, Grad>(a, i, n, sums);
        update_block<Rule, Weight, Remainder, Grad>(a, i, n);
        if (sums != nullptr) see<Rule, Weight, Remainder>(a, i, n, sums->lanes[1]);
    }
}

template <typename Remainder>
void split(const float* __restrict master, uint16_t* __restrict weights, void* remainder,
           int64_t begin, int64_t end) {
    Remainder* __restrict rest = static_cast<Remainder*>(remainder);
    for (int64_t i = begin; i < end; ++i) split_one(master[i], weights[i], rest[i], 0x80);
}

template <typename Remainder>
void join(const uint16_t* __restrict weights, const void* remainder, float* __restrict master,
          int64_t begin, int64_t end) {
    const Remainder* __restrict rest = static_cast<const Remainder*>(remainder);
    for (int64_t i = begin; i < end; ++i) master[i] = join_one(weights[i], rest[i]);
}

}  // namespace

// By master and gradient.
#define MEGATRAIN_UPDATE(...)                                                                   \
    {{update<__VA_ARGS__, float, int16_t, float>, update<__VA_ARGS__, float, int16_t, bf16>},   \
     {update<__VA_ARGS__, bf16, int16_t, float>, update<__VA_ARGS__, bf16, int16_t, bf16>},     \
     {update<__VA_ARGS__, bf16, int8_t, float>, update<__VA_ARGS__, bf16, int8_t, bf16>}}

const Kernels& MEGATRAIN_NAME(MEGATRAIN_ISA)() {
    static constexpr Kernels table = {
        MEGATRAIN_TEXT(MEGATRAIN_ISA),
        {MEGATRAIN_UPDATE(AdamwFp32), MEGATRAIN_UPDATE(AdamwBf16), MEGATRAIN_UPDATE(AdamwInt8),
         MEGATRAIN_UPDATE(Lion), MEGATRAIN_UPDATE(Sgd<false, false>),
         MEGATRAIN_UPDATE(Sgd<true, false>), MEGATRAIN_UPDATE(Sgd<true, true>),
         MEGATRAIN_UPDATE(Direction)},
        {split<int8_t>, split<int16_t>},
        {join<int8_t>, join<int16_t>},
        checksum,
    };
    return table;
}

}  // namespace megatrain
