// RandAugment's operations on a view of uint8 pixel values, bit for bit as Pillow computes them.
#pragma once

#include "block.h"
#include "pixels.h"

namespace fastaug {

constexpr byte FILL = 128;  // pixel value outside the view

// fastaug/views/packed_plan.py reads these codes by name. OPERATIONS in fastaug/views/randaugment.py
// has the entry of each operation; rotate, shear and translate are all MOVE.
enum Operation {
  NOTHING, AUTO_CONTRAST, EQUALIZE, INVERT, MOVE, POSTERIZE, SOLARIZE, SOLARIZE_ADD, COLOR,
  CONTRAST, BRIGHTNESS, SHARPNESS, CUTOUT
};

struct Layer {
  double numbers[6];  // a move's matrix, a cutout's box, or one number
  int operation, unused;
};

// Pillow's gray value, and its blend: towards zero, clipped. Pillow's weights times 16: at 16 bits
// each, NVRTC would emit an instruction that the tests' emulator does not support.
FASTAUG_FUNCTION int gray(int red, int green, int blue) {
  return (313520 * red + 615520 * green + 119536 * blue + 0x80000) >> 20;
}
FASTAUG_FUNCTION byte blend(int from, int value, float factor) {
  const float x = (float)from + factor * (float)(value - from);
  return x > 0 ? x < 255 ? (byte)(int)x : 255 : 0;
}

// True if an operation cannot work in place, but writes to a second buffer; as in OPERATIONS.
FASTAUG_FUNCTION bool needs_second_buffer(int operation) {
  return operation == MOVE || operation == SHARPNESS;
}

template <class Block>
class Operations {
 public:
  // here: [size, size, 3], the view; other: the second buffer, if an operation needs it.
  // counts: 3 x 256 numbers, followed by 3 x 256 bytes.
  FASTAUG_METHOD Operations(Block& block, int size, byte* here, byte* other, int* counts)
      : block(block), size(size), row(3 * size), here(here), other(other), counts(counts),
        table((byte*)(counts + 3 * 256)) {}

  // Where the view is now: an operation with a second buffer changes it.
  FASTAUG_METHOD const byte* view() const { return here; }

  // The view is visible to all threads before the call and after it.
  FASTAUG_METHOD void apply(const Layer& layer) {
    const double* numbers = layer.numbers;
    const int number = (int)numbers[0];
    const float factor = (float)numbers[0];
    switch (layer.operation) {
      case AUTO_CONTRAST: return stretch();
      case EQUALIZE: return even_out();
      case INVERT: return each([](byte x) { return (byte)(255 - x); });
      case MOVE: return move(numbers);
      case POSTERIZE: return each([=](byte x) { return (byte)(x & number); });
      case SOLARIZE: return each([=](byte x) { return (byte)(x < number ? x : 255 - x); });
      case SOLARIZE_ADD:
        return each([=](byte x) {
          const int sum = x + number;
          return (byte)(x >= 128 ? x : sum < 255 ? sum : 255);
        });
      case COLOR: return color(factor);
      case CONTRAST: return contrast(factor);
      case BRIGHTNESS: return through_table([=](int x) { return blend(0, x, factor); });
      case SHARPNESS: return sharpen(factor);
      case CUTOUT: return cut_out(numbers);
    }
  }

 private:
  Block& block;
  const int size, row;
  byte *here, *other;
  int* const counts;
  byte* const table;
  static constexpr int SOME = Block::LANES > 1 ? 64 : 1;

  template <class Function>
  FASTAUG_METHOD void each(Function function) {
    byte* const values = here;
    for (int i = block.thread; i < row * size; i += block.threads) values[i] = function(values[i]);
    block.sync();
  }

  // Several pixels at a time, so that a CPU uses vectors.
  template <class Work>
  FASTAUG_METHOD void each_some(Work work) {
    for (int i = SOME * block.thread; i < size * size; i += SOME * block.threads)
      work(here + 3 * i, SOME == 1 || size * size - i >= SOME ? SOME : size * size - i);
  }

  // --- by a lookup table over the 256 pixel values ---

  template <class Function>
  FASTAUG_METHOD void through_table(Function function) {
    for (int x = block.thread; x < 256; x += block.threads)
      table[x] = table[256 + x] = table[512 + x] = function(x);
    block.sync();
    look_up();
  }

  FASTAUG_METHOD void look_up() {
    each_some([&](byte* pixels, int there) { translate(pixels, there, table); });
    block.sync();
  }

  FASTAUG_METHOD void clear_counts() {
    for (int x = block.thread; x < 3 * 256; x += block.threads) counts[x] = 0;
    block.sync();
  }

  // make(counts of a channel, its table)
  template <class Make>
  FASTAUG_METHOD void by_counts(Make make) {
    block.sync();
    for (int c = block.thread; c < 3; c += block.threads) make(counts + 256 * c, table + 256 * c);
    block.sync();
    look_up();
  }

  // The lowest value of a channel becomes 0, the highest 255. A thread counts only the lowest and
  // highest of its own pixels.
  FASTAUG_METHOD void stretch() {
    clear_counts();
    byte low[3 * SOME], high[3 * SOME];
    for (int i = 0; i < 3 * SOME; ++i) low[i] = 255, high[i] = 0;
    each_some([&](const byte* pixels, int there) {
      if (there == SOME)
        for (int i = 0; i < 3 * SOME; ++i) {
          low[i] = pixels[i] < low[i] ? pixels[i] : low[i];
          high[i] = pixels[i] > high[i] ? pixels[i] : high[i];
        }
      else
        for (int i = 0; i < 3 * there; ++i) {
          low[i] = pixels[i] < low[i] ? pixels[i] : low[i];
          high[i] = pixels[i] > high[i] ? pixels[i] : high[i];
        }
    });
    for (int i = 0; i < 3 * SOME; ++i)
      if (low[i] <= high[i]) {
        block.add(counts + 256 * (i % 3) + low[i], 1);
        block.add(counts + 256 * (i % 3) + high[i], 1);
      }
    by_counts([](const int* counts, byte* table) { stretch(counts, table); });
  }

  static FASTAUG_METHOD void stretch(const int* counts, byte* table) {
    int low = 0, high = 255;
    while (low < 255 && !counts[low]) ++low;
    while (high > 0 && !counts[high]) --high;
    const double scale = high > low ? 255.0 / (high - low) : 1.0;
    const double offset = high > low ? -low * scale : 0.0;
    FASTAUG_ROLLED
    for (int x = 0; x < 256; ++x) {
      const double y = x * scale + offset;
      table[x] = y > 0 ? y < 255 ? (byte)(int)y : 255 : 0;
    }
  }

  // All values become about equally frequent.
  FASTAUG_METHOD void even_out() {
    clear_counts();
    for (int i = block.thread; i < size * size; i += block.threads)
      for (int c = 0; c < 3; ++c) block.add(counts + 256 * c + here[3 * i + c], 1);
    by_counts([](const int* counts, byte* table) { even_out(counts, table); });
  }

  static FASTAUG_METHOD void even_out(const int* counts, byte* table) {
    int total = 0, last = 0;
    FASTAUG_ROLLED
    for (int x = 0; x < 256; ++x) {
      total += counts[x];
      last = counts[x] ? counts[x] : last;
    }
    const int step = (total - last) / 255;
    int below = step / 2;
    FASTAUG_ROLLED
    for (int x = 0; x < 256; ++x) {
      const int y = step ? below / step : x;
      table[x] = (byte)(y < 255 ? y : 255);
      below += counts[x];
    }
  }

  FASTAUG_METHOD void contrast(float factor) {
    clear_counts();
    for (int i = block.thread; i < size * size; i += block.threads) {
      const byte* pixel = here + 3 * i;
      block.add(counts + gray(pixel[0], pixel[1], pixel[2]), 1);
    }
    block.sync();
    long long sum = 0;
    FASTAUG_ROLLED
    for (int x = 0; x < 256; ++x) sum += (long long)x * counts[x];
    const long long pixels = (long long)size * size;
    const int mean = (int)((2 * sum + pixels) / (2 * pixels));  // rounded
    through_table([=](int x) { return blend(mean, x, factor); });
  }

  // --- pixel by pixel ---

  FASTAUG_METHOD void color(float factor) {
    each_some([=](byte* pixels, int there) {
      for (int i = 0; i < there; ++i, pixels += 3) {
        const int without = gray(pixels[0], pixels[1], pixels[2]);
        for (int c = 0; c < 3; ++c) pixels[c] = blend(without, pixels[c], factor);
      }
    });
    block.sync();
  }

  FASTAUG_METHOD void cut_out(const double* box) {
    const int left = inside(box[0]), top = inside(box[1]);
    const int right = inside(box[2]), bottom = inside(box[3]);
    for (int y = top + block.team; y < bottom; y += block.teams)
      for (int i = 3 * left + block.lane; i < 3 * right; i += block.lanes) here[y * row + i] = FILL;
    block.sync();
  }

  FASTAUG_METHOD int inside(double edge) const {
    return edge > 0 ? edge < size ? (int)edge : size : 0;
  }

  // Smooth with 1 1 1, 1 5 1, 1 1 1, then blend away from the result; outermost pixels stay.
  FASTAUG_METHOD void sharpen(float factor) {
    for (int y = block.team; y < size; y += block.teams) {
      const byte* const __restrict from = here + y * row;
      byte* const __restrict to = other + y * row;
      const bool edge = y == 0 || y == size - 1;
      const int first = edge ? row : 3, end = edge ? row : row - 3;
      for (int i = block.lane; i < first; i += block.lanes) to[i] = from[i];
      const byte *const above = from - row, *const below = from + row;
      for (int i = first + block.lane; i < end; i += block.lanes) {
        const unsigned short sum = above[i - 3] + above[i] + above[i + 3] + from[i - 3] +
                                   5 * from[i] + from[i + 3] + below[i - 3] + below[i] +
                                   below[i + 3];
        to[i] = (byte)((unsigned short)(2 * sum + 13) / 26);  // rounded
      }
      // A separate loop: the sums above are twice as fast in 16 bits.
      for (int i = first + block.lane; i < end; i += block.lanes)
        to[i] = blend(to[i], from[i], factor);
      for (int i = (end > first ? end : first) + block.lane; i < row; i += block.lanes)
        to[i] = from[i];
    }
    swap_buffers();
  }

  // Pixel (x, y) comes from the one at floor(a x + b y + c), floor(d x + e y + f).
  FASTAUG_METHOD void move(const double* matrix) {
    constexpr int SOME = Block::LANES;  // at a time, so that a CPU computes their places in vectors
    const double a = matrix[0], b = matrix[1], c = matrix[2];
    const double d = matrix[3], e = matrix[4], f = matrix[5];
    for (int y = block.team; y < size; y += block.teams) {
      // The row is copied from one row. Not close to an integer shift, where rounding would decide.
      const double shift = b * y + c, whole = floor(shift);
      if (a == 1 && d == 0 && shift - whole > 1e-9 && shift - whole < 1 - 1e-9) {
        move_row(other + y * row, e * y + f, whole);
        continue;
      }
      for (int x = SOME * block.lane; x < size; x += SOME * block.lanes) {
        int from[SOME];
        for (int i = 0; i < SOME; ++i) {
          const double u = a * (x + i) + b * y + c, v = d * (x + i) + e * y + f;
          const bool is_inside = u >= 0 && u < size && v >= 0 && v < size;
          from[i] = is_inside ? 3 * ((int)v * size + (int)u) : -1;
        }
        const int there = size - x < SOME ? size - x : SOME;
        move_pixels(other + y * row + 3 * x, here, from, there, FILL);
      }
    }
    swap_buffers();
  }

  // Copies row v, shifted by a number of pixels; both may be outside the view.
  FASTAUG_METHOD void move_row(byte* __restrict to, double v, double pixels) {
    const bool is_there = v >= 0 && v < size && pixels > -size && pixels < size;
    const int shift = is_there ? 3 * (int)pixels : row;
    const byte* __restrict from = here + (is_there ? (int)v * row + shift : 0);
    const int first = shift < 0 ? -shift : 0, end = shift > 0 ? row - shift : row;
    for (int i = block.lane; i < first; i += block.lanes) to[i] = FILL;
    for (int i = first + block.lane; i < end; i += block.lanes) to[i] = from[i];
    for (int i = end + block.lane; i < row; i += block.lanes) to[i] = FILL;
  }

  FASTAUG_METHOD void swap_buffers() {
    byte* const made = other;
    other = here;
    here = made;
    block.sync();
  }
};

}  // namespace fastaug
