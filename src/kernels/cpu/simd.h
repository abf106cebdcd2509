// Sixteen fp32 lanes for the CPU kernels, written once and compiled for several instruction sets.
//
// GCC's and clang's vector types compile to what the flags of the translation unit allow; the order
// of every reduction is that of sixteen lanes on all instruction sets. Only kernel code includes
// this header: no torch header and no library but the intrinsics, which are inlined, so that the
// linker cannot pick anything compiled with wide instructions for common use. Next: tables.h.
#pragma once

#ifdef __AVX2__
#include <immintrin.h>
#endif

#include "kernels/cpu/tables.h"

namespace tessera::kernels::cpu::TESSERA_CPU_ISA {

#define TESSERA_LANES_INLINE inline __attribute__((always_inline))

constexpr long kLanes = 16;
using Lanes = float __attribute__((vector_size(64)));
using IntLanes = int __attribute__((vector_size(64)));
using WordLanes = unsigned __attribute__((vector_size(64)));
using HalfWords = unsigned short __attribute__((vector_size(32)));
using Eight = float __attribute__((vector_size(32)));
using IntEight = int __attribute__((vector_size(32)));
using Four = float __attribute__((vector_size(16)));

TESSERA_LANES_INLINE Lanes all(float value) { return value - Lanes{}; }

TESSERA_LANES_INLINE Eight low_half(Lanes value) {
  return __builtin_shufflevector(value, value, 0, 1, 2, 3, 4, 5, 6, 7);
}
TESSERA_LANES_INLINE Eight high_half(Lanes value) {
  return __builtin_shufflevector(value, value, 8, 9, 10, 11, 12, 13, 14, 15);
}
TESSERA_LANES_INLINE Four low_half(Eight value) {
  return __builtin_shufflevector(value, value, 0, 1, 2, 3);
}
TESSERA_LANES_INLINE Four high_half(Eight value) {
  return __builtin_shufflevector(value, value, 4, 5, 6, 7);
}
TESSERA_LANES_INLINE Lanes join(Eight low, Eight high) {
  return __builtin_shufflevector(low, high, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
}

TESSERA_LANES_INLINE Lanes widen(HalfWords bits) {
  const WordLanes words = __builtin_convertvector(bits, WordLanes) << 16;
  return reinterpret_cast<Lanes>(words);
}

/// Rounds to the nearest bf16, ties to even; NaN stays NaN.
TESSERA_LANES_INLINE HalfWords narrow(Lanes value) {
  const auto words = reinterpret_cast<WordLanes>(value);
  const WordLanes rounded = (words + 0x7FFFU + ((words >> 16) & 1U)) >> 16;
  const WordLanes kept = value == value ? rounded : WordLanes{} + 0x7FC0U;
  return __builtin_convertvector(kept, HalfWords);
}

TESSERA_LANES_INLINE Lanes load(const float* from) {
  Lanes value;
  __builtin_memcpy(&value, from, sizeof(value));
  return value;
}
TESSERA_LANES_INLINE Lanes load(const BFloat16* from) {
  HalfWords bits;
  __builtin_memcpy(&bits, from, sizeof(bits));
  return widen(bits);
}
TESSERA_LANES_INLINE void store(float* to, Lanes value) {
  __builtin_memcpy(to, &value, sizeof(value));
}
TESSERA_LANES_INLINE void store(BFloat16* to, Lanes value) {
  const HalfWords bits = narrow(value);
  __builtin_memcpy(to, &bits, sizeof(bits));
}

/// Loads the first `count` lanes; the others are `rest`.
template <class T>
TESSERA_LANES_INLINE Lanes load(const T* from, long count, float rest = 0.0F) {
  if (count == kLanes) return load(from);
  T padded[kLanes];
  store(padded, all(rest));
  __builtin_memcpy(padded, from, static_cast<unsigned long>(count) * sizeof(T));
  return load(padded);
}
template <class T>
TESSERA_LANES_INLINE void store(T* to, Lanes value, long count) {
  if (count == kLanes) return store(to, value);
  T padded[kLanes];
  store(padded, value);
  __builtin_memcpy(to, padded, static_cast<unsigned long>(count) * sizeof(T));
}

// The same with masks, where the instruction set has them: a copy through memory waits for the
// store before it. Lanes beyond `count` are neither read nor written.
#if defined(__AVX512BW__) && defined(__AVX512VL__)
TESSERA_LANES_INLINE unsigned short first_lanes(long count) {
  return static_cast<unsigned short>((1U << count) - 1U);
}
TESSERA_LANES_INLINE Lanes load(const float* from, long count, float rest = 0.0F) {
  if (count == kLanes) return load(from);
  return _mm512_mask_loadu_ps(all(rest), first_lanes(count), from);
}
TESSERA_LANES_INLINE void store(float* to, Lanes value, long count) {
  if (count == kLanes) return store(to, value);
  _mm512_mask_storeu_ps(to, first_lanes(count), value);
}
TESSERA_LANES_INLINE Lanes load(const BFloat16* from, long count, float rest = 0.0F) {
  if (count == kLanes) return load(from);
  const auto others = reinterpret_cast<__m256i>(narrow(all(rest)));
  return widen(
      reinterpret_cast<HalfWords>(_mm256_mask_loadu_epi16(others, first_lanes(count), from)));
}
TESSERA_LANES_INLINE void store(BFloat16* to, Lanes value, long count) {
  if (count == kLanes) return store(to, value);
  _mm256_mask_storeu_epi16(to, first_lanes(count), reinterpret_cast<__m256i>(narrow(value)));
}
#elif defined(__AVX2__)
TESSERA_LANES_INLINE __m256i first_lanes(long count) {
  const IntEight place = {0, 1, 2, 3, 4, 5, 6, 7};
  return reinterpret_cast<__m256i>(place < static_cast<int>(count));
}
TESSERA_LANES_INLINE Lanes load(const float* from, long count, float rest = 0.0F) {
  if (count == kLanes) return load(from);
  const __m256i low = first_lanes(count), high = first_lanes(count - kLanes / 2);
  const __m256 others = _mm256_set1_ps(rest);
  const auto lanes_of = [&](const float* half, __m256i lanes) __attribute__((always_inline)) {
    return _mm256_blendv_ps(others, _mm256_maskload_ps(half, lanes),
                            reinterpret_cast<__m256>(lanes));
  };
  return join(lanes_of(from, low), lanes_of(from + kLanes / 2, high));
}
TESSERA_LANES_INLINE void store(float* to, Lanes value, long count) {
  if (count == kLanes) return store(to, value);
  _mm256_maskstore_ps(to, first_lanes(count), low_half(value));
  _mm256_maskstore_ps(to + kLanes / 2, first_lanes(count - kLanes / 2), high_half(value));
}
#endif

struct LanePairs {
  Lanes even, odd;
};

/// Loads the first `count` pairs of neighbours; the others are 0.
template <class T>
TESSERA_LANES_INLINE LanePairs load_pairs(const T* from, long count) {
  const long first = 2 * count < kLanes ? 2 * count : kLanes;
  const Lanes low = load(from, first);
  const Lanes high = load(from + first, 2 * count - first);
  return {
      __builtin_shufflevector(low, high, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30),
      __builtin_shufflevector(low, high, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29,
                              31)};
}
template <class T>
TESSERA_LANES_INLINE void store_pairs(T* to, const LanePairs& pairs, long count) {
  const long first = 2 * count < kLanes ? 2 * count : kLanes;
  store(to,
        __builtin_shufflevector(pairs.even, pairs.odd, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6,
                                22, 7, 23),
        first);
  store(to + first,
        __builtin_shufflevector(pairs.even, pairs.odd, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29,
                                14, 30, 15, 31),
        2 * count - first);
}

/// Calls body(begin, count) over [0, size) in steps of sixteen, the last one shorter.
template <class Body>
TESSERA_LANES_INLINE void for_lanes(long size, const Body& body) {
  long begin = 0;
  for (; begin + kLanes <= size; begin += kLanes) body(begin, kLanes);
  if (begin < size) body(begin, size - begin);
}

/// Works on vectors, lane by lane, and on numbers.
template <class V>
TESSERA_LANES_INLINE V max(V a, V b) {
  return a > b ? a : b;
}

/// Adds pairs of lanes that are 8, 4, 2, 1 apart, in this order on every machine.
TESSERA_LANES_INLINE float sum(Lanes value) {
  const Eight eight = low_half(value) + high_half(value);
  const Four four = low_half(eight) + high_half(eight);
  return (four[0] + four[2]) + (four[1] + four[3]);
}
/// Returns any lane where one of them is NaN.
TESSERA_LANES_INLINE float greatest(Lanes value) {
  const Eight eight = max(low_half(value), high_half(value));
  const Four four = max(low_half(eight), high_half(eight));
  return max(max(four[0], four[2]), max(four[1], four[3]));
}

/// Returns e^x within 2 units in the last place for x in [-87, 87], and the value of the nearer end
/// outside (nothing here depends on numbers beyond 1e38); NaN stays NaN.
TESSERA_LANES_INLINE Lanes exp(Lanes x) {
  constexpr float kEnd = 87.0F;
  // x = n ln 2 + r, |r| <= ln 2 / 2. Adding 1.5 * 2^23 leaves the rounded n in the low bits.
  constexpr float kShift = 12582912.0F;
  const Lanes low = x < -kEnd ? all(-kEnd) : x;
  const Lanes bounded = low > kEnd ? all(kEnd) : low;
  const Lanes shifted = bounded * 1.44269504F + kShift;
  const Lanes n = shifted - kShift;
  Lanes r = bounded - n * 0.693145752F;
  r = r - n * 1.42860677e-6F;
  Lanes series = all(1.0F / 5040);
  series = series * r + 1.0F / 720;
  series = series * r + 1.0F / 120;
  series = series * r + 1.0F / 24;
  series = series * r + 1.0F / 6;
  series = series * r + 0.5F;
  series = series * r + 1.0F;
  series = series * r + 1.0F;
  // Times 2^n: n is added to the exponent.
  const WordLanes scaled =
      reinterpret_cast<WordLanes>(series) + (reinterpret_cast<WordLanes>(shifted) << 23);
  return x == x ? reinterpret_cast<Lanes>(scaled) : x;
}

TESSERA_LANES_INLINE Lanes sigmoid(Lanes x) { return 1.0F / (1.0F + exp(-x)); }

}  // namespace tessera::kernels::cpu::TESSERA_CPU_ISA
