// Pixel values (0 to 255) as a thread of a block program works on them: several at a time, as floats.
//
// Sums and products are rounded one by one, as Pillow and numpy round them, so that results are
// equal: compile with -ffp-contract=off (NVRTC: --fmad=false). multiply_add is for the rest.
#pragma once

#include "values.h"

namespace fastaug {

typedef unsigned char byte;

// Added to a pixel value before it is truncated. A weighted sum misses an integer by about 1e-5, in
// another order by another 1e-5: without this, engines would differ by 1 in flat regions. The same as
// in fastaug/views/reference.py.
constexpr float ROUNDING_MARGIN = 0.003f;

#ifdef __CUDACC__

FASTAUG_FUNCTION float multiply_add(float a, float b, float c) { return fmaf(a, b, c); }
FASTAUG_FUNCTION float load_pixel_values(const byte* from, int) { return (float)*from; }
// The pixel value at a position.
FASTAUG_FUNCTION float take_pixel_values(const byte* from, int, const int* place) {
  return (float)from[*place];
}
// Truncated to integers.
FASTAUG_FUNCTION void store_pixel_values(byte* to, int, float x) {
  *to = (byte)fminf(fmaxf(x, 0.f) + ROUNDING_MARGIN, 255.f);
}
template <class T>
FASTAUG_FUNCTION void write_out(T* to, int there, float x) { store(to, there, x); }
FASTAUG_FUNCTION void all_written_out() {}

// Numbers of a row at a position, then three further, and so on.
template <int>
class Taken {
 public:
  FASTAUG_METHOD Taken(const float* row, const int* place) : at(row + *place) {}
  FASTAUG_METHOD float next() {
    at += 3;
    return at[-3];
  }

 private:
  const float* at;
};

#else

FASTAUG_FUNCTION float multiply_add(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
FASTAUG_FUNCTION floats multiply_add(floats a, floats b, floats c) {
#if defined(__AVX512F__)
  return _mm512_fmadd_ps(a, b, c);
#elif defined(__FMA__)
  return _mm256_fmadd_ps(a, b, c);
#elif defined(__aarch64__)
  return vfmaq_f32(c, a, b);
#else
  return a * b + c;
#endif
}

// Look up pixel values in three tables of 256 entries, one for each channel.
FASTAUG_FUNCTION void translate(byte* __restrict pixels, int there, const byte* __restrict table) {
#ifdef __AVX512VBMI__
  if (there == 64) {
    const __m512i *from = (const __m512i*)table;
    for (int part = 0; part < 3; ++part) {  // channels begin with another one in each vector
      const __m512i values = _mm512_loadu_si512(pixels + 64 * part);
      const __mmask64 high = _mm512_movepi8_mask(values);
      __m512i found = values;
      for (int c = 0; c < 3; ++c) {
        const __m512i low_half = _mm512_permutex2var_epi8(
            _mm512_loadu_si512(from + 4 * c), values, _mm512_loadu_si512(from + 4 * c + 1));
        const __m512i high_half = _mm512_permutex2var_epi8(
            _mm512_loadu_si512(from + 4 * c + 2), values, _mm512_loadu_si512(from + 4 * c + 3));
        const __mmask64 every_third = 0x9249249249249249ull;
        const int shift = (c + 2 * part) % 3;  // of the first one that is of channel c
        const __mmask64 own = every_third << shift;
        found = _mm512_mask_mov_epi8(found, own, _mm512_mask_mov_epi8(low_half, high, high_half));
      }
      _mm512_storeu_si512(pixels + 64 * part, found);
    }
    return;
  }
#endif
  const byte *red = table, *green = table + 256, *blue = table + 512;
  for (int i = 0; i < there; ++i, pixels += 3)
    pixels[0] = red[pixels[0]], pixels[1] = green[pixels[1]], pixels[2] = blue[pixels[2]];
}

// Copy the pixels that begin at `places`; a negative place stands for the fill value.
FASTAUG_FUNCTION void move_pixels(byte* __restrict to, const byte* __restrict view,
                                  const int* places, int there, byte fill) {
#ifdef __AVX512VBMI__
  if (there == LANES) {
    const __m512i at = _mm512_loadu_si512(places), filled = _mm512_set1_epi8((char)fill);
    const __mmask16 is_inside = ~_mm512_movepi32_mask(at);
    // Four bytes each, which reads one beyond the last pixel of the view.
    const __m512i found = _mm512_mask_i32gather_epi32(filled, is_inside, at, view, 1);
    alignas(64) static constexpr byte THREE_OF_FOUR[64] = {
        0,  1,  2,  4,  5,  6,  8,  9,  10, 12, 13, 14, 16, 17, 18, 20, 21, 22, 24, 25, 26, 28,
        29, 30, 32, 33, 34, 36, 37, 38, 40, 41, 42, 44, 45, 46, 48, 49, 50, 52, 53, 54, 56, 57,
        58, 60, 61, 62};
    const __m512i packed =
        _mm512_permutexvar_epi8(_mm512_load_si512((const __m512i*)THREE_OF_FOUR), found);
    _mm256_storeu_si256((__m256i*)to, _mm512_castsi512_si256(packed));
    _mm_storeu_si128((__m128i*)(to + 32), _mm512_extracti32x4_epi32(packed, 2));
    return;
  }
#endif
  for (int i = 0; i < there; ++i, to += 3)
    for (int c = 0; c < 3; ++c) to[c] = places[i] < 0 ? fill : view[places[i] + c];
}

typedef byte value_bytes __attribute__((vector_size(LANES)));

FASTAUG_FUNCTION floats load_pixel_values(const byte* from, int there) {
  value_bytes stored = {};
  if (there < LANES)
    for (int i = 0; i < there; ++i) stored[i] = from[i];
  else
    std::memcpy(&stored, from, sizeof stored);
#ifdef __AVX512F__  // faster than what compilers generate
  return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32((__m128i)stored));
#else
  return __builtin_convertvector(__builtin_convertvector(stored, ints), floats);
#endif
}

// Pixel values at LANES positions below 64; `there` of them are in the row.
FASTAUG_FUNCTION floats take_pixel_values(const byte* from, int there, const int* places) {
#ifdef __AVX512VBMI__
  const __mmask64 in_row = there < 64 ? (1ull << there) - 1 : ~0ull;
  const __m512i values = _mm512_maskz_loadu_epi8(in_row, from);
  // One byte of each integer; the other three become 0.
  const __mmask64 every_fourth = 0x1111111111111111ull;
  return _mm512_cvtepi32_ps(
      _mm512_maskz_permutexvar_epi8(every_fourth, _mm512_loadu_si512(places), values));
#else
  ints values;
  for (int i = 0; i < LANES; ++i) values[i] = from[places[i]];
  return __builtin_convertvector(values, floats);
#endif
}

// Truncated to integers.
FASTAUG_FUNCTION void store_pixel_values(byte* to, int there, floats x) {
  x = maximum(x, floats{}) + ROUNDING_MARGIN;
  x = x < 255.f ? x : floats{} + 255.f;
#ifdef __AVX512F__
  const value_bytes stored = (value_bytes)_mm512_cvtepi32_epi8(_mm512_cvttps_epi32(x));
#else
  const value_bytes stored =
      __builtin_convertvector(__builtin_convertvector(x, ints), value_bytes);
#endif
  if (there < LANES)
    for (int i = 0; i < there; ++i) to[i] = stored[i];
  else
    std::memcpy(to, &stored, sizeof stored);
}

template <class Narrow>
FASTAUG_FUNCTION void narrow_normal(floats x, Narrow* to) { narrow(x, to); }
#ifdef __AVX512BF16__
// The same for numbers that are neither NaN nor subnormal.
FASTAUG_FUNCTION void narrow_normal(floats x, ushorts* to) {
  *to = (ushorts)_mm512_cvtneps_pbh(x);
}
#endif

// Bypasses the caches: views do not fit into them, and are read much later.
template <class T>
FASTAUG_FUNCTION void write_out(T* to, int there, floats x) {
#ifdef __AVX512F__
  if (there >= LANES && (uintptr_t)to % (LANES * sizeof(T)) == 0) {
    typename Stored<T>::type stored;
    narrow_normal(x, &stored);
    if (sizeof stored == 64) _mm512_stream_si512((__m512i*)to, *(__m512i*)&stored);
    else _mm256_stream_si256((__m256i*)to, *(__m256i*)&stored);
    return;
  }
#endif
  store(to, there, x);
}
FASTAUG_FUNCTION void all_written_out() {
#ifdef __AVX512F__
  _mm_sfence();  // streaming stores are not ordered with other stores
#endif
}

// Numbers of a row at LANES positions, then three further, and so on. WINDOW: how far they reach.
// Contiguous loads with a permutation are several times faster than a gather.
//   1  all of them, with their successors, are within the next 32 numbers of the row
//   2  those of one step are     3  those of one step are within 64     0  they are anywhere
template <int WINDOW>
class Taken {
 public:
  FASTAUG_METHOD Taken(const float* row, const int* places) : row(row) {
    std::memcpy(&at, places, sizeof at);
    if (WINDOW == 1) look();
  }
  FASTAUG_METHOD floats next() {
    if (WINDOW > 1) look();
    const floats found = numbers();
    if (WINDOW == 1) at += 3;
    else row += 3;
    return found;
  }

 private:
  const float* row;
  ints at;
#if defined(__AVX512F__)
  __m512 low, high;
  FASTAUG_METHOD void look() { low = _mm512_loadu_ps(row), high = _mm512_loadu_ps(row + 16); }
  FASTAUG_METHOD floats numbers() const {
    if (!WINDOW) return _mm512_i32gather_ps((__m512i)at, row, 4);
    const __m512 found = _mm512_permutex2var_ps(low, (__m512i)at, high);
    if (WINDOW < 3) return found;
    const __m512 beyond = _mm512_permutex2var_ps(_mm512_loadu_ps(row + 32), (__m512i)at,
                                                 _mm512_loadu_ps(row + 48));
    const __mmask16 is_beyond = _mm512_test_epi32_mask((__m512i)at, _mm512_set1_epi32(32));
    return _mm512_mask_mov_ps(found, is_beyond, beyond);
  }
#else
  FASTAUG_METHOD void look() {}
  FASTAUG_METHOD floats numbers() const {
#ifdef __AVX2__
    return _mm256_i32gather_ps(row, (__m256i)at, 4);
#else
    floats found;
    for (int i = 0; i < LANES; ++i) found[i] = row[at[i]];
    return found;
#endif
  }
#endif
};

#endif

}  // namespace fastaug
