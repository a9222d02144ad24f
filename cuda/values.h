// What a thread of a block program works on at a time: a float on a GPU, a vector of floats on a CPU.
// So the same source compiles for both, and it needs no CUDA or torch headers.
#pragma once

#ifdef __CUDACC__
#define FASTAUG_METHOD __device__ __forceinline__
#define FASTAUG_ROLLED _Pragma("unroll 1")
#define FASTAUG_BY_THREES _Pragma("unroll 3")
#else
#include <cmath>
#include <cstdint>
#include <cstring>
#if defined(__F16C__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif
#define FASTAUG_METHOD inline __attribute__((always_inline))
#define FASTAUG_ROLLED
#define FASTAUG_BY_THREES
#endif
#define FASTAUG_FUNCTION static FASTAUG_METHOD
// FASTAUG_ROLLED: before a short loop that runs once. Unrolled for a GPU, such loops were a quarter
// of all instructions. FASTAUG_BY_THREES: before a loop over taps after the first. Bicubic filters
// have three more; with the compiler's own unrolling, registers would spill.

namespace fastaug {

// Half-precision numbers are only stored; all arithmetic is in fp32.
struct bf16 { unsigned short bits; };
struct f16 { unsigned short bits; };

// exp(x) - 1 = x + x^2 g(x) where |x| <= SMALL = ln(2)/2; relative error 2.5e-8 before rounding.
constexpr float SMALL = 0.3465f;
template <class V>
FASTAUG_FUNCTION V small_expm1(V x) {
  V g = x * 1.39261977e-3f + 8.36319033e-3f;
  g = g * x + 4.16665545e-2f;
  g = g * x + 1.66665769e-1f;
  g = g * x + 0.5f;
  return g * (x * x) + x;
}

#ifdef __CUDACC__

// The same pointer, which the compiler then knows to point to global memory.
template <class T>
FASTAUG_FUNCTION T* in_global_memory(T* pointer) {
  unsigned long long place;
  asm("cvta.to.global.u64 %0, %1;" : "=l"(place) : "l"(pointer));
  return (T*)__cvta_global_to_generic(place);
}

FASTAUG_FUNCTION float infinite() { return __int_as_float(0x7f800000); }
FASTAUG_FUNCTION float not_a_number() { return __int_as_float(0x7fc00000); }
FASTAUG_FUNCTION float exponential(float x) { return expf(x); }
FASTAUG_FUNCTION float logarithm(float x) { return logf(x); }
FASTAUG_FUNCTION float maximum(float a, float b) { return a > b ? a : b; }  // NaN if b is
FASTAUG_FUNCTION float magnitude(float x) { return fabsf(x); }
FASTAUG_FUNCTION float to_float(float x) { return x; }
FASTAUG_FUNCTION float to_float(bf16 x) { return __uint_as_float((unsigned)x.bits << 16); }
FASTAUG_FUNCTION float to_float(f16 x) {
  float wide;
  asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(x.bits));
  return wide;
}
FASTAUG_FUNCTION void from_float(float x, float* to) { *to = x; }
FASTAUG_FUNCTION void from_float(float x, f16* to) {
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(to->bits) : "f"(x));
}
// To nearest, ties to even, in integers: the instruction for it needs sm_80.
FASTAUG_FUNCTION void from_float(float x, bf16* to) {
  const unsigned bits = __float_as_uint(x);
  const unsigned rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  to->bits = (unsigned short)(x == x ? rounded : 0x7fc0);
}

// 16 bytes of numbers to a multiple of 16 bytes in global memory, by one instruction: from a struct,
// compilers store them word by word.
FASTAUG_FUNCTION unsigned word_of(const float* numbers) { return __float_as_uint(*numbers); }
template <class T>
FASTAUG_FUNCTION unsigned word_of(const T* halves) {
  return halves[0].bits | (unsigned)halves[1].bits << 16;
}
template <class T>
FASTAUG_FUNCTION void store_pack(T* to, const T* numbers) {
  constexpr int IN_WORD = 4 / sizeof(T);
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(to)),
               "r"(word_of(numbers)), "r"(word_of(numbers + IN_WORD)),
               "r"(word_of(numbers + 2 * IN_WORD)), "r"(word_of(numbers + 3 * IN_WORD))
               : "memory");
}

FASTAUG_FUNCTION float lane_sum(float x) { return x; }
FASTAUG_FUNCTION float lane_max(float x) { return x; }
template <class V>
FASTAUG_FUNCTION V numbered(int first, int number, int end, float there, float other) {
  return first == number ? there : first < end ? other : 0.f;
}
template <class T>
FASTAUG_FUNCTION float load(const T* from, int, float) { return to_float(*from); }
template <class T>
FASTAUG_FUNCTION void store(T* to, int, float x) { from_float(x, to); }

#else

#if defined(__AVX512F__)
#define FASTAUG_LANE_NUMBERS 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15
#elif defined(__AVX__)
#define FASTAUG_LANE_NUMBERS 0, 1, 2, 3, 4, 5, 6, 7
#else
#define FASTAUG_LANE_NUMBERS 0, 1, 2, 3
#endif
constexpr int LANES = sizeof((int[]){FASTAUG_LANE_NUMBERS}) / sizeof(int);
typedef float floats __attribute__((vector_size(4 * LANES)));
typedef int ints __attribute__((vector_size(4 * LANES)));
constexpr ints LANE = {FASTAUG_LANE_NUMBERS};
typedef unsigned unsigneds __attribute__((vector_size(4 * LANES)));
typedef unsigned short ushorts __attribute__((vector_size(2 * LANES)));
#ifdef __aarch64__  // g++ has no _Float16 there before version 13
typedef __fp16 halves __attribute__((vector_size(2 * LANES)));
#else
typedef _Float16 halves __attribute__((vector_size(2 * LANES)));
#endif

template <class T>
FASTAUG_FUNCTION T* in_global_memory(T* pointer) { return pointer; }

FASTAUG_FUNCTION float infinite() { return __builtin_huge_valf(); }
FASTAUG_FUNCTION float not_a_number() { return __builtin_nanf(""); }
FASTAUG_FUNCTION float maximum(float a, float b) { return a > b ? a : b; }  // NaN if b is
FASTAUG_FUNCTION floats magnitude(floats x) { return (floats)((ints)x & 0x7fffffff); }

// Compilers do not find these instructions by themselves; the fallback takes a few more.
#ifdef __AVX512F__
FASTAUG_FUNCTION floats maximum(floats a, floats b) { return _mm512_max_ps(a, b); }
FASTAUG_FUNCTION floats times_power_of_two(floats x, floats n, floats) {
  return _mm512_scalef_ps(x, n);
}
FASTAUG_FUNCTION float lane_sum(floats x) { return _mm512_reduce_add_ps(x); }
FASTAUG_FUNCTION float lane_max(floats x) { return _mm512_reduce_max_ps(x); }
#else
FASTAUG_FUNCTION floats maximum(floats a, floats b) { return a > b ? a : b; }
FASTAUG_FUNCTION floats times_power_of_two(floats x, floats, floats shifted) {
  return x * (floats)(((ints)shifted << 23) + (127 << 23));  // shifted: n in its low bits
}
FASTAUG_FUNCTION float lane_sum(floats x) {
  float sum = 0;
  for (int i = 0; i < LANES; ++i) sum += x[i];
  return sum;
}
FASTAUG_FUNCTION float lane_max(floats x) {
  float top = x[0];
  for (int i = 1; i < LANES; ++i) top = maximum(top, x[i]);
  return top;
}
#endif

// For x <= 88. Results below the smallest normal number, 1.2e-38, become that number.
FASTAUG_FUNCTION floats exponential(floats x) {
  x = maximum(floats{} - 87.3f, x);
  constexpr float SHIFT = 12582912.f;  // adding it rounds to an integer, in the low bits
  const floats shifted = x * 1.44269504f + SHIFT;
  const floats n = shifted - SHIFT;
#ifdef __FMA__
  const floats f = x - n * 0.693147181f;
#else
  const floats f = (x - n * 0.693359375f) + n * 2.12194440e-4f;  // ln 2 in two parts
#endif
  return times_power_of_two(small_expm1(f) + 1.f, n, shifted);
}

// For normal x > 0: x = 2^n (1 + f), f in [sqrt(1/2) - 1, sqrt(2) - 1); relative error below 1e-7.
// NaN for NaN, by x - x.
FASTAUG_FUNCTION floats logarithm(floats x) {
  const ints n = ((ints)x - 0x3f3504f3) >> 23;
  const floats f = (floats)((ints)x - (n << 23)) - 1.f;
  floats g = f * 8.78726549e-2f - 1.41596470e-1f;
  g = g * f + 1.48347868e-1f;
  g = g * f - 1.65884885e-1f;
  g = g * f + 1.99720497e-1f;
  g = g * f - 2.50011477e-1f;
  g = g * f + 3.33336706e-1f;
  g = g * f - 4.99999971e-1f;
  return (g * f * f + (f + (x - x))) + __builtin_convertvector(n, floats) * 0.693147181f;
}

template <class V>
FASTAUG_FUNCTION V numbered(int first, int number, int end, float there, float other) {
  const ints column = LANE + first;
  return column == number ? V{} + there : column < end ? V{} + other : V{};
}

FASTAUG_FUNCTION floats widen(floats x) { return x; }
FASTAUG_FUNCTION floats widen(ushorts x) {
  return (floats)(__builtin_convertvector(x, unsigneds) << 16);
}
FASTAUG_FUNCTION floats widen(halves x) {
#if defined(__AVX512F__)  // compilers before AVX512-FP16 convert one number at a time
  return (floats)_mm512_cvtph_ps((__m256i)x);
#elif defined(__F16C__)
  return (floats)_mm256_cvtph_ps((__m128i)x);
#elif defined(__aarch64__)
  return vcvt_f32_f16(x);
#else
  return __builtin_convertvector(x, floats);
#endif
}
FASTAUG_FUNCTION void narrow(floats x, floats* to) { *to = x; }
FASTAUG_FUNCTION void narrow(floats x, halves* to) {
#if defined(__AVX512F__)
  *to = (halves)_mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT);
#elif defined(__F16C__)
  *to = (halves)_mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT);
#elif defined(__aarch64__)
  *to = vcvt_f16_f32(x);
#else
  *to = __builtin_convertvector(x, halves);
#endif
}
FASTAUG_FUNCTION void narrow(floats x, ushorts* to) {  // to nearest, ties to even
  const unsigneds bits = (unsigneds)x;
  const unsigneds rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  const unsigneds kept = x == x ? rounded : unsigneds{} + 0x7fc0;
  *to = __builtin_convertvector(kept, ushorts);
}

template <class T> struct Stored;  // LANES numbers as stored in memory
template <> struct Stored<float> { typedef floats type; };
template <> struct Stored<bf16> { typedef ushorts type; };
template <> struct Stored<f16> { typedef halves type; };

// The first `there` of LANES numbers, at the end of a row. Not by one memcpy: with a length that is
// unknown at compile time, it is a function call, which would dominate short rows.
template <class T>
FASTAUG_FUNCTION typename Stored<T>::type load_some(const T* from, int there) {
  typename Stored<T>::type stored = {};
  for (int i = 0; i < there; ++i) std::memcpy((T*)&stored + i, from + i, sizeof(T));
  return stored;
}
template <class T>
FASTAUG_FUNCTION void store_some(T* to, int there, typename Stored<T>::type stored) {
  for (int i = 0; i < there; ++i) std::memcpy(to + i, (const T*)&stored + i, sizeof(T));
}
#ifdef __AVX512F__
FASTAUG_FUNCTION floats load_some(const float* from, int there) {
  return _mm512_maskz_loadu_ps((__mmask16)((1u << there) - 1), from);
}
FASTAUG_FUNCTION void store_some(float* to, int there, floats x) {
  _mm512_mask_storeu_ps(to, (__mmask16)((1u << there) - 1), x);
}
#endif

// Numbers beyond the row are `filler`.
template <class T>
FASTAUG_FUNCTION floats load(const T* from, int there, float filler) {
  if (there < LANES) return LANE < there ? widen(load_some(from, there)) : floats{} + filler;
  typename Stored<T>::type stored;
  std::memcpy(&stored, from, sizeof stored);
  return widen(stored);
}
template <class T>
FASTAUG_FUNCTION void store(T* to, int there, floats x) {
  typename Stored<T>::type stored;
  narrow(x, &stored);
  if (there < LANES) store_some(to, there, stored);
  else std::memcpy(to, &stored, sizeof stored);
}

#endif

}  // namespace fastaug
