// Moves of pixels: pixel (x, y) comes from the one at floor(u), floor(v), with u = a x + b y + c and
// v = d x + e y + f in fp64, each product and sum rounded, as in the reference.
#pragma once

#include "block.h"
#include "pixels.h"

namespace fastaug {

// u and v without fp64, which most GPUs compute at 1/64 of the rate of fp32: in 64-bit integers, in
// units of 2^-32 pixels.
//
// Entries of the matrix are truncated, each by less than one unit, so that a x + b y + c differs from
// the exact sum by less than x + y + 1 <= 2 size - 1 units. The three roundings of fp64 are off by at
// most 3 * 2^-53 of a sum below 2^16 pixels, 0.1 units. So where u is 2 size units or more from an
// integer, its floor is that of fp64. Where it is closer, for one of 5 million positions at 224 px,
// is_close says so, and fp64 decides.
struct FixedMatrix {
  long long a, b, c, d, e, f;
  int size;
  bool fits;  // in the range for which the above holds

  FASTAUG_METHOD FixedMatrix(const double* matrix, int size) : size(size), fits(true) {
    a = fixed(matrix[0]), b = fixed(matrix[1]), c = fixed(matrix[2]);
    d = fixed(matrix[3]), e = fixed(matrix[4]), f = fixed(matrix[5]);
    fits = fits && is_small(a, b, c) && is_small(d, e, f);
  }

  FASTAUG_METHOD long long u(int x, int y) const { return a * x + b * y + c; }
  FASTAUG_METHOD long long v(int x, int y) const { return d * x + e * y + f; }
  FASTAUG_METHOD bool is_close(long long u) const {
    return (unsigned)u + 2u * size < 4u * size;
  }
  // Of the first value of the source, or -1 outside the view.
  FASTAUG_METHOD int place(long long u, long long v) const {
    const int column = (int)(u >> 32), row = (int)(v >> 32);
    return (unsigned)column < (unsigned)size && (unsigned)row < (unsigned)size
               ? 3 * (row * size + column)
               : -1;
  }

 private:
  FASTAUG_METHOD long long fixed(double x) {
#ifdef __CUDACC__
    const long long bits = __double_as_longlong(x);
#else
    long long bits;
    std::memcpy(&bits, &x, sizeof bits);
#endif
    const int exponent = (int)(bits >> 52 & 0x7ff) - 1023, shift = 20 - exponent;
    if (exponent > 14) fits = false;  // infinity and NaN too
    const long long digits = (bits & 0xfffffffffffffll) | 0x10000000000000ll;
    const long long units = shift < 0 || shift > 63 ? 0 : digits >> shift;
    return bits < 0 ? -units : units;
  }
  FASTAUG_METHOD bool is_small(long long a, long long b, long long c) const {
    return (magnitude(a) + magnitude(b)) * size + magnitude(c) < 1ll << 48;
  }
  static FASTAUG_METHOD long long magnitude(long long x) { return x < 0 ? -x : x; }
};

// In fp64.
FASTAUG_FUNCTION int exact_place(const double* matrix, int x, int y, int size) {
  const double u = matrix[0] * x + matrix[1] * y + matrix[2];
  const double v = matrix[3] * x + matrix[4] * y + matrix[5];
  const bool is_inside = u >= 0 && u < size && v >= 0 && v < size;
  return is_inside ? 3 * ((int)v * size + (int)u) : -1;
}

#ifdef __CUDACC__

// SOME: pixels of a thread at a time. Four are three words, if rows are whole words.
template <int SOME, class Block>
FASTAUG_FUNCTION void move_view(Block& block, const byte* from, byte* to, int size,
                                const double* matrix, byte fill) {
  const FixedMatrix fixed(matrix, size);
  const auto pixel = [&](int place) -> unsigned {
    if (place < 0) return fill * 0x10101u;
    if (SOME == 1) return from[place] | from[place + 1] << 8 | from[place + 2] << 16;
    const unsigned* const words = (const unsigned*)from;
    return __funnelshift_r(words[place / 4], words[(place + 2) / 4], place % 4 * 8) & 0xffffff;
  };
  const auto write = [&](int x, int y, const unsigned* pixels) {
    byte* const at = to + 3 * (y * size + x);
    if (SOME == 1) {
      for (int c = 0; c < 3; ++c) at[c] = (byte)(pixels[0] >> 8 * c);
    } else {
      unsigned* const words = (unsigned*)at;
      words[0] = pixels[0] | pixels[1] << 24;
      words[1] = pixels[1] >> 8 | pixels[2] << 16;
      words[2] = pixels[2] >> 16 | pixels[3] << 8;
    }
  };
  FASTAUG_ROLLED
  for (int y = block.team; y < size; y += block.teams) {
    bool again = !fixed.fits;
    if (fixed.fits) {
      FASTAUG_ROLLED
      for (int x = SOME * block.lane; x < size; x += SOME * block.lanes) {
        long long u = fixed.u(x, y), v = fixed.v(x, y);
        unsigned pixels[SOME];
        for (int i = 0; i < SOME; ++i, u += fixed.a, v += fixed.d) {
          again |= fixed.is_close(u) || fixed.is_close(v);
          pixels[i] = pixel(fixed.place(u, v));
        }
        write(x, y, pixels);
      }
    }
    if (again) {
      FASTAUG_ROLLED
      for (int x = SOME * block.lane; x < size; x += SOME * block.lanes) {
        unsigned pixels[SOME];
        for (int i = 0; i < SOME; ++i) pixels[i] = pixel(exact_place(matrix, x + i, y, size));
        write(x, y, pixels);
      }
    }
  }
}

template <class Block>
FASTAUG_FUNCTION void move_view(Block& block, const byte* from, byte* to, int size,
                                const double* matrix, byte fill) {
  if (size % 4 == 0) move_view<4>(block, from, to, size, matrix, fill);
  else move_view<1>(block, from, to, size, matrix, fill);
}

#else

// Copies row v, shifted by a number of pixels; both may be outside the view.
template <class Block>
FASTAUG_FUNCTION void move_row(Block& block, const byte* __restrict from, byte* __restrict to,
                               int size, double v, double pixels, byte fill) {
  const int row = 3 * size;
  const bool is_there = v >= 0 && v < size && pixels > -size && pixels < size;
  const int shift = is_there ? 3 * (int)pixels : row;
  from += is_there ? (int)v * row + shift : 0;
  const int first = shift < 0 ? -shift : 0, end = shift > 0 ? row - shift : row;
  for (int i = block.lane; i < first; i += block.lanes) to[i] = fill;
  for (int i = first + block.lane; i < end; i += block.lanes) to[i] = from[i];
  for (int i = end + block.lane; i < row; i += block.lanes) to[i] = fill;
}

// A CPU computes places in vectors of fp64.
template <class Block>
FASTAUG_FUNCTION void move_view(Block& block, const byte* from, byte* to, int size,
                                const double* matrix, byte fill) {
  constexpr int SOME = Block::LANES;
  const double a = matrix[0], b = matrix[1], c = matrix[2];
  const double d = matrix[3], e = matrix[4], f = matrix[5];
  for (int y = block.team; y < size; y += block.teams) {
    byte* const row = to + 3 * y * size;
    // The row is copied from one row. Not close to an integer shift, where rounding would decide.
    const double shift = b * y + c, whole = floor(shift);
    if (a == 1 && d == 0 && shift - whole > 1e-9 && shift - whole < 1 - 1e-9) {
      move_row(block, from, row, size, e * y + f, whole, fill);
      continue;
    }
    for (int x = SOME * block.lane; x < size; x += SOME * block.lanes) {
      int places[SOME];
      for (int i = 0; i < SOME; ++i) {
        const double u = a * (x + i) + b * y + c, v = d * (x + i) + e * y + f;
        const bool is_inside = u >= 0 && u < size && v >= 0 && v < size;
        places[i] = is_inside ? 3 * ((int)v * size + (int)u) : -1;
      }
      const int there = size - x < SOME ? size - x : SOME;
      move_pixels(row + 3 * x, from, places, there, fill);
    }
  }
}

#endif

}  // namespace fastaug
