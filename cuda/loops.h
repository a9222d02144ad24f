// Loops over the pixel values of a view, by all threads of a block: 16 bytes at a time on a GPU
// (128-bit loads and stores), as vectors on a CPU. A view [size, size, 3] begins at a multiple of 16.
#pragma once

#include "block.h"
#include "pixels.h"

namespace fastaug {

#ifdef __CUDACC__

// Sixteen pixel values, four in each word.
struct alignas(16) Sixteen {
  unsigned words[4];
};

FASTAUG_FUNCTION int byte_of(unsigned word, int number) { return word >> 8 * number & 255; }

// Four sums over rows of an image, of values that follow each other. by_words: they are read as two
// words around them, else one by one, as many as there are.
template <class Block>
FASTAUG_FUNCTION void sum_four(Block&, const byte* from, int there, bool by_words,
                               long long row_bytes, int taps, const float* weights, float* to) {
  // A product plus -0 is that product.
  struct alignas(16) { float numbers[4]; } sums = {{-0.f, -0.f, -0.f, -0.f}};
  FASTAUG_ROLLED
  for (int t = 0; t < taps; ++t, from += row_bytes) {
    unsigned values = 0;
    if (by_words) {
      const int shift = (int)((unsigned long long)from % 4);
      const unsigned* const words = (const unsigned*)(from - shift);
      values = __funnelshift_r(words[0], words[1], 8 * shift);
    } else {
      for (int i = 0; i < 4; ++i)
        if (i < there) values |= (unsigned)from[i] << 8 * i;
    }
    for (int i = 0; i < 4; ++i)
      sums.numbers[i] = multiply_add((float)byte_of(values, i), weights[t], sums.numbers[i]);
  }
  *(decltype(sums)*)to = sums;
}

// function(value) -> value
template <class Block, class Function>
FASTAUG_FUNCTION void change_values(Block& block, byte* values, int count, Function function) {
  Sixteen* const sixteens = (Sixteen*)values;
  FASTAUG_ROLLED
  for (int i = block.thread; i < count / 16; i += block.threads) {
    Sixteen some = sixteens[i];
    for (unsigned& word : some.words) {
      unsigned changed = 0;
      for (int b = 0; b < 4; ++b) changed |= (unsigned)function(byte_of(word, b)) << 8 * b;
      word = changed;
    }
    sixteens[i] = some;
  }
  for (int i = count / 16 * 16 + block.thread; i < count; i += block.threads)
    values[i] = function(values[i]);
}

// Sixteen pixels: a channel is at the same positions in each.
struct Pixels {
  Sixteen parts[3];

  FASTAUG_METHOD int value(int i) const {
    return byte_of(parts[i / 16].words[i / 4 % 4], i % 4);
  }
  FASTAUG_METHOD void set(int i, int x) {
    unsigned& word = parts[i / 16].words[i / 4 % 4];
    word = (word & ~(255u << i % 4 * 8)) | (unsigned)x << i % 4 * 8;
  }
};

// function(value of channel 0, of 1, of 2)
template <class Block, class Function>
FASTAUG_FUNCTION void visit_pixels(Block& block, const byte* pixels, int count, Function function) {
  FASTAUG_ROLLED
  for (int i = block.thread; i < count / 16; i += block.threads) {
    const Pixels some = ((const Pixels*)pixels)[i];
    for (int p = 0; p < 48; p += 3) function(some.value(p), some.value(p + 1), some.value(p + 2));
  }
  FASTAUG_ROLLED
  for (int i = count / 16 * 16 + block.thread; i < count; i += block.threads)
    function((int)pixels[3 * i], (int)pixels[3 * i + 1], (int)pixels[3 * i + 2]);
}

// function(int (&pixel)[3]), which changes it
template <class Block, class Function>
FASTAUG_FUNCTION void change_pixels(Block& block, byte* pixels, int count, Function function) {
  FASTAUG_ROLLED
  for (int i = block.thread; i < count / 16; i += block.threads) {
    Pixels some = ((const Pixels*)pixels)[i];
    for (int p = 0; p < 48; p += 3) {
      int pixel[3] = {some.value(p), some.value(p + 1), some.value(p + 2)};
      function(pixel);
      for (int c = 0; c < 3; ++c) some.set(p + c, pixel[c]);
    }
    ((Pixels*)pixels)[i] = some;
  }
  FASTAUG_ROLLED
  for (int i = count / 16 * 16 + block.thread; i < count; i += block.threads) {
    byte* const at = pixels + 3 * i;
    int pixel[3] = {at[0], at[1], at[2]};
    function(pixel);
    for (int c = 0; c < 3; ++c) at[c] = (byte)pixel[c];
  }
}

// Look up pixel values in three tables of 256 entries, one for each channel.
template <class Block>
FASTAUG_FUNCTION void look_up(Block& block, byte* pixels, int count, const byte* table) {
  change_pixels(block, pixels, count, [=](int (&pixel)[3]) {
    for (int c = 0; c < 3; ++c) pixel[c] = table[256 * c + pixel[c]];
  });
}

// Marks the lowest and the highest value of each channel, and maybe others between them.
template <class Block, class Mark>
FASTAUG_FUNCTION void mark_range(Block& block, const byte* pixels, int count, Mark mark) {
  int low[3] = {255, 255, 255}, high[3] = {0, 0, 0};
  visit_pixels(block, pixels, count, [&](int red, int green, int blue) {
    const int pixel[3] = {red, green, blue};
    for (int c = 0; c < 3; ++c) {
      low[c] = pixel[c] < low[c] ? pixel[c] : low[c];
      high[c] = pixel[c] > high[c] ? pixel[c] : high[c];
    }
  });
  for (int c = 0; c < 3; ++c) {
    const int lowest = 255 - block.team_max(255 - low[c]), highest = block.team_max(high[c]);
    if (block.lane == 0 && lowest <= highest) {
      mark(c, lowest);
      mark(c, highest);
    }
  }
}

// normalized(value, channel) to out. Stores are 16 bytes, and coalesced, where out allows it: views
// of an odd size begin anywhere.
template <class Block, class T, class Function>
FASTAUG_FUNCTION void write_values(Block& block, const byte* values, int count, T* out,
                                   Function normalized) {
  constexpr int SOME = 16 / sizeof(T);
  struct alignas(16) Written { T values[SOME]; };
  struct alignas(SOME) Read { unsigned words[SOME / 4]; };
  const int whole = (unsigned long long)out % 16 == 0 ? count / SOME : 0;
  for (int i = block.thread; i < whole; i += block.threads) {
    const Read some = ((const Read*)values)[i];
    Written written;
    int channel = SOME * i % 3;
    for (int k = 0; k < SOME; ++k) {
      from_float(normalized((float)byte_of(some.words[k / 4], k % 4), channel), written.values + k);
      channel = channel == 2 ? 0 : channel + 1;
    }
    ((Written*)out)[i] = written;
  }
  FASTAUG_ROLLED
  for (int i = whole * SOME + block.thread; i < count; i += block.threads)
    from_float(normalized((float)values[i], i % 3), out + i);
}

// Values first to end - 1 of a view become `value`, by one team.
template <class Block>
FASTAUG_FUNCTION void fill_row(Block& block, byte* values, int first, int end, byte value) {
  for (int i = first / 4 + block.lane; 4 * i < end; i += block.lanes)
    if (4 * i >= first && 4 * i + 4 <= end) ((unsigned*)values)[i] = value * 0x1010101u;
    else
      for (int k = 4 * i; k < 4 * i + 4; ++k)
        if (k >= first && k < end) values[k] = value;
}

// Operations::sharpen for rows of whole words: a thread makes four values from nine words.
template <class Block, class Blend>
FASTAUG_FUNCTION void sharpen_words(Block& block, const byte* from, byte* to, int size,
                                    Blend blended) {
  const unsigned* const words = (const unsigned*)from;
  const int row = 3 * size / 4;  // words
  FASTAUG_ROLLED
  for (int y = block.team; y < size; y += block.teams) {
    const bool edge = y == 0 || y == size - 1;
    FASTAUG_ROLLED
    for (int i = block.lane; i < row; i += block.lanes) {
      const int at = y * row + i;
      const unsigned own = words[at];
      unsigned made = own;
      if (!edge) {
        // Of words i - 1, i, i + 1: the sums of the three rows, and the middle one. Words that are
        // not in the row are not used, only read.
        int sums[12];
        for (int w = 0; w < 3; ++w) {
          const int near = i + w - 1 < 0 ? 0 : i + w - 1 < row ? i + w - 1 : i;
          const unsigned *const middle = words + y * row + near;
          for (int b = 0; b < 4; ++b)
            sums[4 * w + b] = byte_of(middle[-row], b) + byte_of(middle[0], b) +
                              byte_of(middle[row], b);
        }
        made = 0;
        for (int b = 0; b < 4; ++b) {
          const int value = byte_of(own, b), number = 4 * i + b;
          const int sum = sums[b + 1] + sums[b + 4] + sums[b + 7] + 4 * value;
          const bool stays = number < 3 || number >= 4 * row - 3;
          const int x = stays ? value : blended((2 * sum + 13) / 26, value);  // rounded
          made |= (unsigned)x << 8 * b;
        }
      }
      ((unsigned*)to)[at] = made;
    }
  }
}

#else

template <class Block>
FASTAUG_FUNCTION void fill_row(Block& block, byte* values, int first, int end, byte value) {
  for (int i = first + block.lane; i < end; i += block.lanes) values[i] = value;
}

template <class Block, class Function>
FASTAUG_FUNCTION void change_values(Block& block, byte* values, int count, Function function) {
  for (int i = block.thread; i < count; i += block.threads) values[i] = function(values[i]);
}

// work(pixels, how many), SOME at a time, so that loops in it are vectors.
constexpr int SOME = 64;
template <class Block, class Work>
FASTAUG_FUNCTION void some_pixels(Block& block, byte* pixels, int count, Work work) {
  for (int i = SOME * block.thread; i < count; i += SOME * block.threads)
    work(pixels + 3 * i, count - i >= SOME ? SOME : count - i);
}

template <class Block, class Function>
FASTAUG_FUNCTION void visit_pixels(Block& block, const byte* pixels, int count, Function function) {
  for (int i = block.thread; i < count; i += block.threads)
    function((int)pixels[3 * i], (int)pixels[3 * i + 1], (int)pixels[3 * i + 2]);
}

template <class Block, class Function>
FASTAUG_FUNCTION void change_pixels(Block& block, byte* pixels, int count, Function function) {
  some_pixels(block, pixels, count, [=](byte* at, int there) {
    for (int i = 0; i < there; ++i, at += 3) {
      int pixel[3] = {at[0], at[1], at[2]};
      function(pixel);
      for (int c = 0; c < 3; ++c) at[c] = (byte)pixel[c];
    }
  });
}

template <class Block>
FASTAUG_FUNCTION void look_up(Block& block, byte* pixels, int count, const byte* table) {
  some_pixels(block, pixels, count, [=](byte* at, int there) { translate(at, there, table); });
}

template <class Block, class Mark>
FASTAUG_FUNCTION void mark_range(Block& block, byte* pixels, int count, Mark mark) {
  byte low[3 * SOME], high[3 * SOME];
  for (int i = 0; i < 3 * SOME; ++i) low[i] = 255, high[i] = 0;
  some_pixels(block, pixels, count, [&](const byte* at, int there) {
    if (there == SOME)
      for (int i = 0; i < 3 * SOME; ++i) {
        low[i] = at[i] < low[i] ? at[i] : low[i];
        high[i] = at[i] > high[i] ? at[i] : high[i];
      }
    else
      for (int i = 0; i < 3 * there; ++i) {
        low[i] = at[i] < low[i] ? at[i] : low[i];
        high[i] = at[i] > high[i] ? at[i] : high[i];
      }
  });
  for (int i = 0; i < 3 * SOME; ++i)
    if (low[i] <= high[i]) {
      mark(i % 3, low[i]);
      mark(i % 3, high[i]);
    }
}

#endif

}  // namespace fastaug
