// Updates of whole groups of 8-bit states of a split master with bf16 gradients, by instructions of
// Ice Lake and Zen 4: the bits of kernels.cpp's plain loops with half as many instructions, because
// bytes are looked up where the loops compute quotients.
//
// Vectors are unpacked within lanes of 128 bits and packed again the same way, which takes half of
// the instructions that keep the order: part k of a group has elements 8 L + 4 k + 0..3 in lane L
// for k = 0, 1, and those 24 behind for k = 2, 3.
#pragma once

#include <immintrin.h>

namespace megatrain {
namespace {

// What 8-bit codes stand for, and what shares of 1 / kShares, 256 by 256, become: `base` is the
// code of the first of them, and those above `second` and `third` have one and two more. 255: none
// has.
struct Tables {
    alignas(64) uint8_t value[4][128] = {};  // the bytes of fp32 numbers
    alignas(64) uint8_t base[128] = {}, second[128] = {}, third[128] = {};

    constexpr Tables() {
        for (uint32_t code = 0; code < 128; ++code) {
            const uint32_t bits = quotient(code, 254 - code);
            for (int i = 0; i < 4; ++i) value[i][code] = uint8_t(bits >> 8 * i);
        }
        for (int row = 0; row < 128; ++row) {
            base[row] = uint8_t(code_of(256 * row));
            second[row] = last_below(row, base[row] + 1);
            third[row] = last_below(row, base[row] + 2);
        }
    }

private:
    // The bits of a / b, at most 1, rounded to nearest; it is never halfway.
    static constexpr uint32_t quotient(uint64_t a, uint64_t b) {
        if (a == 0) return 0;
        uint32_t shift = 23;
        while ((a << shift) / b < 1u << 23) ++shift;
        const uint32_t digits = uint32_t((2 * (a << shift) + b) / (2 * b));
        return ((127 + 23 - shift) << 23) + (digits - (1u << 23));
    }
    static constexpr int code_of(int share) {  // never halfway either
        const int divisor = kShares + share;
        return (508 * share + divisor) / (2 * divisor);
    }
    static constexpr uint8_t last_below(int row, int code) {
        for (int low = 0; low < 256 && 256 * row + low <= kShares; ++low)
            if (code_of(256 * row + low) == code) return uint8_t(low - 1);
        return 255;
    }
};
constexpr Tables kTables;

using Floats = __m512;
using Ints = __m512i;

inline Ints load(const void* at) { return _mm512_loadu_si512(at); }
inline void store(void* at, Ints values) { _mm512_storeu_si512(at, values); }

// Elements ahead of which the cache is asked for memory: 1.15 times as fast on the host of an H200.
constexpr int kAhead = 2048;
template <typename Value>
inline void fetch_ahead(const Value* at) {
    for (size_t line = 0; line < kGroup * sizeof(Value); line += 64)
        _mm_prefetch(reinterpret_cast<const char*>(at + kAhead) + line, _MM_HINT_T0);
}

// 64 bytes in order, with those of each part's lanes in one lane, and back.
inline Ints to_lanes(Ints bytes) {
    return _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7), bytes);
}
inline Ints from_lanes(Ints bytes) {
    return _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7), bytes);
}
// Part k of bytes in lanes, as 32-bit integers from 0 to 255.
template <int k>
inline Ints part_of(Ints lanes) {
    constexpr int z = -128;
    const __m128i places = _mm_setr_epi8(4 * k, z, z, z, 4 * k + 1, z, z, z, 4 * k + 2, z, z, z,
                                         4 * k + 3, z, z, z);
    return _mm512_shuffle_epi8(lanes, _mm512_broadcast_i32x4(places));
}

inline Ints looked_up(const uint8_t* table, Ints places) {
    return _mm512_permutex2var_epi8(load(table), places, load(table + 64));
}

// code / (254 - |code|) of 64 codes.
inline void decode(const void* at, Floats* m) {
    const Ints codes = to_lanes(load(at)), places = _mm512_abs_epi8(codes);
    const Ints byte0 = looked_up(kTables.value[0], places);
    const Ints byte1 = looked_up(kTables.value[1], places);
    const Ints byte2 = looked_up(kTables.value[2], places);
    const Ints sign = _mm512_set1_epi8(-128);  // that of the code: byte3 | codes & sign
    const Ints byte3 =
        _mm512_ternarylogic_epi32(looked_up(kTables.value[3], places), codes, sign, 0xf8);
    const Ints low0 = _mm512_unpacklo_epi8(byte0, byte1), low1 = _mm512_unpackhi_epi8(byte0, byte1);
    const Ints up0 = _mm512_unpacklo_epi8(byte2, byte3), up1 = _mm512_unpackhi_epi8(byte2, byte3);
    m[0] = _mm512_castsi512_ps(_mm512_unpacklo_epi16(low0, up0));
    m[1] = _mm512_castsi512_ps(_mm512_unpackhi_epi16(low0, up0));
    m[2] = _mm512_castsi512_ps(_mm512_unpacklo_epi16(low1, up1));
    m[3] = _mm512_castsi512_ps(_mm512_unpackhi_epi16(low1, up1));
}

// The codes of first moments, as AdamwInt8::encode_first has them.
inline Ints encode_first(const Floats* m, float inverse) {
    const Floats factor = _mm512_set1_ps(inverse);
    Ints shares[4];
    for (int k = 0; k < 4; ++k) shares[k] = _mm512_cvtps_epi32(_mm512_mul_ps(m[k], factor));
    const Ints words0 = _mm512_packs_epi32(shares[0], shares[1]);
    const Ints words1 = _mm512_packs_epi32(shares[2], shares[3]);
    const __mmask64 negative = _mm512_movepi8_mask(_mm512_packs_epi16(words0, words1));
    const Ints size0 = _mm512_abs_epi16(words0), size1 = _mm512_abs_epi16(words1);
    const Ints low_byte = _mm512_set1_epi16(255);
    const Ints row =
        _mm512_packus_epi16(_mm512_srli_epi16(size0, 8), _mm512_srli_epi16(size1, 8));
    const Ints low = _mm512_packus_epi16(_mm512_and_si512(size0, low_byte),
                                         _mm512_and_si512(size1, low_byte));
    const Ints ones = _mm512_set1_epi8(-1);
    Ints codes = looked_up(kTables.base, row);
    const __mmask64 one_more = _mm512_cmpgt_epu8_mask(low, looked_up(kTables.second, row));
    const __mmask64 two_more = _mm512_cmpgt_epu8_mask(low, looked_up(kTables.third, row));
    codes = _mm512_mask_sub_epi8(codes, one_more, codes, ones);
    codes = _mm512_mask_sub_epi8(codes, two_more, codes, ones);
    codes = _mm512_mask_sub_epi8(codes, negative, _mm512_setzero_si512(), codes);
    return from_lanes(codes);
}

// The codes of second moments, as AdamwInt8::encode_second has them.
inline Ints encode_second(const Floats* root, float inverse) {
    const Floats factor = _mm512_set1_ps(inverse);
    Ints code[4];
    for (int k = 0; k < 4; ++k) code[k] = _mm512_cvtps_epi32(_mm512_mul_ps(root[k], factor));
    if (const auto packed = _mm512_packus_epi16(_mm512_packs_epi32(code[0], code[1]),
                                                _mm512_packs_epi32(code[2], code[3]));
        _mm512_testn_epi8_mask(packed, packed) == 0)
        return from_lanes(packed);
    for (int k = 0; k < 4; ++k) {  // what is not zero does not become zero
        const __mmask16 some = _mm512_cmp_ps_mask(root[k], _mm512_setzero_ps(), _CMP_GT_OQ);
        code[k] = _mm512_mask_max_epi32(code[k], some, code[k], _mm512_set1_epi32(1));
    }
    return from_lanes(_mm512_packus_epi16(_mm512_packs_epi32(code[0], code[1]),
                                          _mm512_packs_epi32(code[2], code[3])));
}

// The bits of the largest magnitudes of m, in lanes 0 and 1, and of the roots, in lanes 2 and 3.
inline Ints largest_of(const Floats* m, const Floats* root) {
    const Ints mask = _mm512_set1_epi32(0x7fffffff);
    Ints size[4], own[4];
    for (int k = 0; k < 4; ++k) size[k] = _mm512_and_si512(_mm512_castps_si512(m[k]), mask);
    for (int k = 0; k < 4; ++k) own[k] = _mm512_castps_si512(root[k]);
    const Ints first =
        _mm512_max_epi32(_mm512_max_epi32(size[0], size[1]), _mm512_max_epi32(size[2], size[3]));
    const Ints second =
        _mm512_max_epi32(_mm512_max_epi32(own[0], own[1]), _mm512_max_epi32(own[2], own[3]));
    Ints both = _mm512_max_epi32(_mm512_shuffle_i64x2(first, second, 0x44),
                                 _mm512_shuffle_i64x2(first, second, 0xee));
    both = _mm512_max_epi32(both, _mm512_shuffle_i64x2(both, both, 0xb1));
    both = _mm512_max_epi32(both, _mm512_shuffle_epi32(both, _MM_PERM_BADC));
    return _mm512_max_epi32(both, _mm512_shuffle_epi32(both, _MM_PERM_CDAB));
}

// The lower halves of the masters, as words in the order of the weights.
inline void lower_halves(const int16_t* remainder, Ints* low) {
    low[0] = load(remainder);
    low[1] = load(remainder + 32);
}
inline void lower_halves(const int8_t* remainder, Ints* low) {
    const Ints bytes = to_lanes(load(remainder));
    low[0] = _mm512_unpacklo_epi8(_mm512_setzero_si512(), bytes);
    low[1] = _mm512_unpackhi_epi8(_mm512_setzero_si512(), bytes);
}
inline void store_lower_halves(int16_t* remainder, const Ints* low) {
    store(remainder, low[0]);
    store(remainder + 32, low[1]);
}
inline void store_lower_halves(int8_t* remainder, const Ints* low) {
    store(remainder, from_lanes(_mm512_packus_epi16(_mm512_srli_epi16(low[0], 8),
                                                    _mm512_srli_epi16(low[1], 8))));
}

// Masters of a group, in parts.
template <typename Remainder>
inline void join_parts(const bf16* weights, const Remainder* remainder, Floats* param) {
    Ints low[2];
    lower_halves(remainder, low);
    for (int half = 0; half < 2; ++half) {
        const Ints sign = _mm512_srai_epi16(low[half], 15);
        const Ints up = _mm512_add_epi16(load(weights + 32 * half), sign);
        param[2 * half] = _mm512_castsi512_ps(_mm512_unpacklo_epi16(low[half], up));
        param[2 * half + 1] = _mm512_castsi512_ps(_mm512_unpackhi_epi16(low[half], up));
    }
}

inline Ints mixed(Ints x) {
    x = _mm512_mullo_epi32(_mm512_xor_si512(x, _mm512_srli_epi32(x, 16)),
                           _mm512_set1_epi32(0x7feb352d));
    x = _mm512_mullo_epi32(_mm512_xor_si512(x, _mm512_srli_epi32(x, 15)),
                           _mm512_set1_epi32(int(0x846ca68bu)));
    return _mm512_xor_si512(x, _mm512_srli_epi32(x, 16));
}

// Adds what rounds to 24 bits stochastically, as random_bytes has it; 32 bits are not rounded.
inline void add_random(const UpdateArguments& a, int64_t i, const int8_t*, Ints* bits) {
    const Ints places = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const Ints number = _mm512_add_epi32(_mm512_set1_epi32(int(group_key(a, i))), places);
    const Ints random = to_lanes(mixed(_mm512_xor_si512(number, _mm512_set1_epi32(-1))));
    bits[0] = _mm512_add_epi32(bits[0], part_of<0>(random));
    bits[1] = _mm512_add_epi32(bits[1], part_of<1>(random));
    bits[2] = _mm512_add_epi32(bits[2], part_of<2>(random));
    bits[3] = _mm512_add_epi32(bits[3], part_of<3>(random));
}
inline void add_random(const UpdateArguments&, int64_t, const int16_t*, Ints*) {}

template <typename Remainder>
inline void split_parts(const UpdateArguments& a, int64_t i, const Floats* param, bf16* weights,
                        Remainder* remainder) {
    Ints bits[4], low[2];
    for (int k = 0; k < 4; ++k) bits[k] = _mm512_castps_si512(param[k]);
    add_random(a, i, remainder, bits);
    const __mmask16 nan = _mm512_cmp_ps_mask(param[0], param[1], _CMP_UNORD_Q) |
                          _mm512_cmp_ps_mask(param[2], param[3], _CMP_UNORD_Q);
    if (nan != 0) {
        for (int k = 0; k < 4; ++k) {
            const __mmask16 mask = _mm512_cmp_ps_mask(param[k], param[k], _CMP_UNORD_Q);
            const Ints quiet =
                _mm512_or_si512(_mm512_castps_si512(param[k]), _mm512_set1_epi32(0x00400000));
            bits[k] = _mm512_mask_and_epi32(bits[k], mask, quiet, _mm512_set1_epi32(~0xffff));
        }
    }
    const Ints low_half = _mm512_set1_epi32(0xffff);
    for (int half = 0; half < 2; ++half) {
        const Ints one = bits[2 * half], other = bits[2 * half + 1];
        const Ints up =
            _mm512_packus_epi32(_mm512_srli_epi32(one, 16), _mm512_srli_epi32(other, 16));
        low[half] = _mm512_packus_epi32(_mm512_and_si512(one, low_half),
                                        _mm512_and_si512(other, low_half));
        store(weights + 32 * half, _mm512_add_epi16(up, _mm512_srli_epi16(low[half], 15)));
    }
    store_lower_halves(remainder, low);
}

// As Adamw::move: from codes to masters, and to the moment and the root that codes will be made of.
template <bool kSmall, typename Remainder>
inline __attribute__((always_inline)) void update_parts(const UpdateArguments& a, int64_t i,
                                                        Floats* m, Floats* root) {
    bf16* weights = static_cast<bf16*>(a.weights) + i;
    Remainder* remainder = static_cast<Remainder*>(a.remainder) + i;
    const int8_t* first = static_cast<const int8_t*>(a.exp_avg) + i;
    const uint8_t* second = static_cast<const uint8_t*>(a.exp_avg_sq) + i;
    const bf16* grad = static_cast<const bf16*>(a.grad) + i;
    fetch_ahead(weights), fetch_ahead(remainder), fetch_ahead(grad);
    fetch_ahead(first), fetch_ahead(second);

    const Floats scale1 = _mm512_set1_ps(a.exp_avg_scale[i / kGroup]);
    const Floats share2 = _mm512_set1_ps(a.exp_avg_sq_scale[i / kGroup] * (1.0f / 255.0f));
    Floats param[4], old[4], g[4];
    join_parts(weights, remainder, param);
    decode(first, old);
    const Ints codes2 = to_lanes(load(second));
    const Ints code2[4] = {part_of<0>(codes2), part_of<1>(codes2), part_of<2>(codes2),
                           part_of<3>(codes2)};
    for (int half = 0; half < 2; ++half) {
        const Ints words = load(grad + 32 * half), zero = _mm512_setzero_si512();
        g[2 * half] = _mm512_castsi512_ps(_mm512_unpacklo_epi16(zero, words));
        g[2 * half + 1] = _mm512_castsi512_ps(_mm512_unpackhi_epi16(zero, words));
    }
    for (int k = 0; k < 4; ++k) {
        old[k] = _mm512_mul_ps(old[k], scale1);
        const Floats old_root = _mm512_mul_ps(_mm512_cvtepi32_ps(code2[k]), share2);
        g[k] = _mm512_mul_ps(g[k], _mm512_set1_ps(a.grad_scale));
        param[k] = _mm512_mul_ps(param[k], _mm512_set1_ps(a.decay));
        m[k] = _mm512_fmadd_ps(_mm512_set1_ps(kSmall ? a.weight1 : a.weight1 - 1.0f),
                               _mm512_sub_ps(g[k], old[k]), kSmall ? old[k] : g[k]);
        const Floats v =
            _mm512_fmadd_ps(_mm512_mul_ps(_mm512_set1_ps(a.weight2), g[k]), g[k],
                            _mm512_mul_ps(_mm512_mul_ps(old_root, old_root),
                                          _mm512_set1_ps(a.beta2)));
        root[k] = _mm512_sqrt_ps(v);
        const Floats denominator = _mm512_add_ps(root[k], _mm512_set1_ps(a.eps));
        const Floats step = _mm512_mul_ps(_mm512_set1_ps(a.negative_step_size), m[k]);
        param[k] = _mm512_add_ps(param[k], _mm512_div_ps(step, denominator));
    }
    split_parts(a, i, param, weights, remainder);
}

inline void encode_parts(const UpdateArguments& a, int64_t i, const Floats* m, const Floats* root) {
    const Ints largest = largest_of(m, root);
    const int32_t largest1 = _mm512_cvtsi512_si32(largest);
    const int32_t largest2 = _mm_cvtsi128_si32(_mm512_extracti32x4_epi32(largest, 2));
    const float scale1 = scale_of(largest1), scale2 = scale_of(largest2);
    a.exp_avg_scale[i / kGroup] = scale1;
    a.exp_avg_sq_scale[i / kGroup] = scale2;
    const __mmask64 some1 = is_proper(largest1) ? ~0ull : 0;
    const __mmask64 some2 = is_proper(largest2) ? ~0ull : 0;
    store(static_cast<int8_t*>(a.exp_avg) + i,
          _mm512_maskz_mov_epi8(some1, encode_first(m, kShares / scale1)));
    store(static_cast<uint8_t*>(a.exp_avg_sq) + i,
          _mm512_maskz_mov_epi8(some2, encode_second(root, 255.0f / scale2)));
}

// Goes on with the checksums of some groups' planes: at once, so that sums are loaded and stored
// for many rows together.
template <int kRows>
inline __attribute__((always_inline)) void see_rows(const void* rows, Lanes& lanes) {
    Ints sum = load(lanes.sums), total = load(lanes.sums_of_sums);
    for (int k = 0; k < kRows; ++k) {
        sum = _mm512_add_epi64(sum, load(static_cast<const char*>(rows) + k * kRow));
        total = _mm512_add_epi64(total, sum);
    }
    store(lanes.sums, sum);
    store(lanes.sums_of_sums, total);
}
template <typename Remainder, int kGroups>
inline void see_groups(const UpdateArguments& a, int64_t i, Lanes* lanes) {
    see_rows<2 * kGroups>(static_cast<const bf16*>(a.weights) + i, lanes[0]);
    see_rows<sizeof(Remainder) * kGroups>(static_cast<const Remainder*>(a.remainder) + i, lanes[1]);
    see_rows<kGroups>(static_cast<const int8_t*>(a.exp_avg) + i, lanes[2]);
    see_rows<kGroups>(static_cast<const int8_t*>(a.exp_avg_sq) + i, lanes[3]);
}

// Updates some groups, so that none waits for another's quotients.
template <bool kSmall, typename Remainder, int kGroups>
inline void update_some(const UpdateArguments& a, int64_t i, PlaneSums* sums) {
    Floats m[kGroups][4], root[kGroups][4];
    if (sums != nullptr && sums->before) {
        see_groups<Remainder, kGroups>(a, i, sums->lanes[0]);
        see_rows<2 * kGroups>(static_cast<const bf16*>(a.grad) + i, sums->lanes[0][6]);
    }
    for (int j = 0; j < kGroups; ++j)
        update_parts<kSmall, Remainder>(a, i + j * kGroup, m[j], root[j]);
    for (int j = 0; j < kGroups; ++j) encode_parts(a, i + j * kGroup, m[j], root[j]);
    if (sums != nullptr) see_groups<Remainder, kGroups>(a, i, sums->lanes[1]);
}

// The whole groups from `begin` on; returns where they end.
template <bool kSmall, typename Remainder>
inline int64_t update_groups(const UpdateArguments& a, int64_t begin, int64_t end,
                             PlaneSums* sums) {
    constexpr int kSome = 4;
    int64_t i = begin;
    for (; i + kSome * kGroup <= end; i += kSome * kGroup)
        update_some<kSmall, Remainder, kSome>(a, i, sums);
    for (; i + kGroup <= end; i += kGroup) update_some<kSmall, Remainder, 1>(a, i, sums);
    return i;
}

}  // namespace
}  // namespace megatrain
