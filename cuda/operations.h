// RandAugment's operations on a view of uint8 pixel values, bit for bit as Pillow computes them.
#pragma once

#include "block.h"
#include "loops.h"
#include "moves.h"
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
      case AUTO_CONTRAST:
        stretch();
        break;
      case EQUALIZE:
        even_out();
        break;
      case CONTRAST:
        contrast(factor);
        break;
      case BRIGHTNESS:
        fill_table([=](int x) { return blend(0, x, factor); });
        break;
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
      case SHARPNESS: return sharpen(factor);
      case CUTOUT: return cut_out(numbers);
      default: return;
    }
    // Those that did not return have filled the tables.
    block.sync();
    look_up(block, here, size * size, table);
    block.sync();
  }

 private:
  Block& block;
  const int size, row;
  byte *here, *other;
  int* const counts;
  byte* const table;

  template <class Function>
  FASTAUG_METHOD void each(Function function) {
    change_values(block, here, row * size, function);
    block.sync();
  }

  // --- by a lookup table over the 256 pixel values ---

  template <class Function>
  FASTAUG_METHOD void fill_table(Function function) {
    for (int x = block.thread; x < 256; x += block.threads)
      table[x] = table[256 + x] = table[512 + x] = function(x);
  }

  FASTAUG_METHOD void clear_counts() {
    for (int x = block.thread; x < 3 * 256; x += block.threads) counts[x] = 0;
    block.sync();
  }

  // make(counts of a channel, its table, first, end): by one team, each of its threads from its
  // first value to its end.
  template <class Make>
  FASTAUG_METHOD void by_counts(Make make) {
    block.sync();
    const int some = (255 + block.lanes) / block.lanes;
    const int first = some * block.lane < 256 ? some * block.lane : 256;
    const int end = first + some < 256 ? first + some : 256;
    FASTAUG_ROLLED
    for (int c = block.team; c < 3; c += block.teams)
      make(counts + 256 * c, table + 256 * c, first, end);
  }

  // The lowest value of a channel becomes 0, the highest 255.
  FASTAUG_METHOD void stretch() {
    clear_counts();
    mark_range(block, here, size * size, [&](int c, int x) { block.add(counts + 256 * c + x, 1); });
    by_counts([&](const int* counts, byte* table, int first, int end) {
      int low = first, high = end - 1;
      FASTAUG_ROLLED
      while (low < end && !counts[low]) ++low;
      FASTAUG_ROLLED
      while (high >= first && !counts[high]) --high;
      low = 255 - block.team_max(low < end ? 255 - low : 0);
      high = block.team_max(high < first ? 0 : high);
      const double scale = high > low ? 255.0 / (high - low) : 1.0;
      const double offset = high > low ? -low * scale : 0.0;
      FASTAUG_ROLLED
      for (int x = first; x < end; ++x) {
        const double y = x * scale + offset;
        table[x] = y > 0 ? y < 255 ? (byte)(int)y : 255 : 0;
      }
    });
  }

  // All values become about equally frequent.
  FASTAUG_METHOD void even_out() {
    clear_counts();
    visit_pixels(block, here, size * size, [&](int red, int green, int blue) {
      block.add(counts + red, 1);
      block.add(counts + 256 + green, 1);
      block.add(counts + 512 + blue, 1);
    });
    by_counts([&](const int* counts, byte* table, int first, int end) {
      int own = 0, highest = 0;
      FASTAUG_ROLLED
      for (int x = first; x < end; ++x) {
        own += counts[x];
        highest = counts[x] ? x : highest;
      }
      const int last = counts[block.team_max(highest)];
      const int step = (block.team_sum(own) - last) / 255;
      int below = step / 2 + block.team_sum_before(own);
      FASTAUG_ROLLED
      for (int x = first; x < end; ++x) {
        const int y = step ? below / step : x;
        table[x] = (byte)(y < 255 ? y : 255);
        below += counts[x];
      }
    });
  }

  FASTAUG_METHOD void contrast(float factor) {
    clear_counts();
    visit_pixels(block, here, size * size, [&](int red, int green, int blue) {
      block.add(counts + gray(red, green, blue), 1);
    });
    block.sync();
    long long sum = 0;
    FASTAUG_ROLLED
    for (int x = block.lane; x < 256; x += block.lanes) sum += (long long)x * counts[x];
    sum = block.team_sum(sum);
    const long long pixels = (long long)size * size;
    const int mean = (int)((2 * sum + pixels) / (2 * pixels));  // rounded
    fill_table([=](int x) { return blend(mean, x, factor); });
  }

  // --- pixel by pixel ---

  FASTAUG_METHOD void color(float factor) {
    change_pixels(block, here, size * size, [=](int (&pixel)[3]) {
      const int without = gray(pixel[0], pixel[1], pixel[2]);
      for (int c = 0; c < 3; ++c) pixel[c] = blend(without, pixel[c], factor);
    });
    block.sync();
  }

  FASTAUG_METHOD void cut_out(const double* box) {
    const int left = inside(box[0]), top = inside(box[1]);
    const int right = inside(box[2]), bottom = inside(box[3]);
    for (int y = top + block.team; y < bottom; y += block.teams)
      fill_row(block, here, y * row + 3 * left, y * row + 3 * right, FILL);
    block.sync();
  }

  FASTAUG_METHOD int inside(double edge) const {
    return edge > 0 ? edge < size ? (int)edge : size : 0;
  }

  // Smooth with 1 1 1, 1 5 1, 1 1 1, then blend away from the result; outermost pixels stay.
  FASTAUG_METHOD void sharpen(float factor) {
    if constexpr (Block::LANES == 1) {
      if (size % 4 == 0) {
        sharpen_words(block, here, other, size,
                      [=](int smooth, int value) { return blend(smooth, value, factor); });
        return swap_buffers();
      }
    }
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

  FASTAUG_METHOD void move(const double* matrix) {
    move_view(block, here, other, size, matrix, FILL);
    swap_buffers();
  }

  FASTAUG_METHOD void swap_buffers() {
    byte* const made = other;
    other = here;
    here = made;
    block.sync();
  }
};

}  // namespace fastaug
