// A view from its plan: sampled from the decoded image, augmented in the same memory, normalized and
// written once. A block program (block.h): one block makes one view.
#pragma once

#include "block.h"
#include "loops.h"
#include "operations.h"
#include "resample.h"

namespace fastaug {

// Pixels beyond the image, where a box reaches beyond it.
enum Border { REFLECT, MIRROR, EDGE, CONSTANT };  // mirror: with the edge pixel

struct View {
  const byte* pixels;   // the image: [height, width, 3]
  long long row_bytes;  // from one of its rows to the next
  int height, width;
  int top, left, box_height, box_width;
  int flip, unused;
};

// Settings that all views of a call share.
struct Form {
  int size, layers, border;
  Filter filter;
  float mean[3], factor[3];  // a pixel value x becomes (x - mean) * factor
};

FASTAUG_FUNCTION int rounded_up(int n, int unit) { return (n + unit - 1) / unit * unit; }

// Offsets in the scratch memory of a block, in 4-byte numbers. fastaug/views/launch.py computes the
// same size.
struct Layout {
  int elements;  // of a row of the view, in whole vectors
  int row;       // of a row of the box, with room for reads of Taken beyond it
  int places, bases, across, means, factors, firsts, down, strip, size;

  FASTAUG_METHOD Layout(int side, int lanes, const Side& x, const Side& y, int strip_rows) {
    const int unit = lanes > 1 ? lanes : 4;  // a thread of a GPU stores four numbers at a time
    elements = rounded_up(3 * side, unit);
    row = rounded_up(3 * x.source + (lanes > 1 ? 64 : 0), unit);
    places = 0;
    across = places + elements;
    means = across + x.taps * elements;
    factors = means + elements;
    strip = factors + elements;
    // The operations' tables reuse the memory of the strip.
    const int tables = 3 * 256 + 3 * 256 / 4;
    bases = strip + rounded_up(strip_rows * row > tables ? strip_rows * row : tables, unit);
    firsts = bases + (lanes > 1 ? elements / lanes : 0);
    down = firsts + side;
    size = down + y.taps * side;
  }
};

FASTAUG_FUNCTION bool is_inside(const View& view) {
  return view.top >= 0 && view.left >= 0 && view.top + view.box_height <= view.height &&
         view.left + view.box_width <= view.width;
}

// A box of the view's size that reaches beyond a small image (CIFAR's crop): each pixel of the view
// is then a pixel of the image, which the tables give.
FASTAUG_FUNCTION bool is_folded(const View& view, const Form& form) {
  return !is_inside(view) && view.box_height == form.size && view.box_width == form.size &&
         view.width <= form.size && form.border != CONSTANT;
}

// Bytes that a view needs besides the scratch memory: a buffer for operations, a second one if an
// operation cannot work in place, and a copy of a box that reaches beyond the image.
struct Room {
  int first, second;
  long long box;

  FASTAUG_METHOD Room(const View& view, const Layer* layers, const Form& form) {
    const int values = 3 * form.size * form.size + 1;  // move_pixels reads one more
    first = form.layers ? values : 0;
    second = 0;
    for (int i = 0; i < form.layers; ++i)
      if (needs_second_buffer(layers[i].operation)) second = values;
    const bool is_copied = !is_inside(view) && !is_folded(view, form);
    box = is_copied ? 3LL * view.box_height * view.box_width : 0;
  }
};

// The position in 0..n-1 that any position i maps to, or -1 for the constant.
FASTAUG_FUNCTION int place_of(int i, int n, int border) {
  if (i >= 0 && i < n) return i;
  if (border == CONSTANT) return -1;
  if (border == EDGE || n == 1) return i < 0 ? 0 : n - 1;
  const int period = border == REFLECT ? 2 * (n - 1) : 2 * n;
  i %= period;
  i += i < 0 ? period : 0;
  return i < n ? i : period - i - (border == MIRROR);
}

// Which rows and columns a thread works on: a team takes a row; if there are more teams than rows,
// several teams share a row.
struct Share {
  int row, rows, column, columns;  // the first one, and the step to the next

  template <class Block>
  FASTAUG_METHOD Share(const Block& block, int strip_rows) {
    const int together = block.teams > strip_rows ? block.teams / strip_rows : 1;
    row = block.team / together;
    rows = block.teams / together;
    column = block.team % together * block.lanes + block.lane;
    columns = together * block.lanes;
  }
};

template <class Block, class T>
class ViewProgram {
 public:
  // scratch: Layout::size numbers, aligned to a vector; first, second, box: as Room says.
  FASTAUG_METHOD ViewProgram(Block& block, const View& view, const Layer* layers, const Form& form,
                             float* scratch, byte* first, byte* second, byte* box, int strip_rows)
      : block(block), view(view), layers(layers), form(form),
        x(view.box_width, form.size, form.filter), y(view.box_height, form.size, form.filter),
        at(form.size, LANES, x, y, strip_rows), strip_rows(strip_rows), scratch(scratch),
        first(first), second(second), box(box), folded(is_folded(view, form)) {}

  // out: [size, size, 3]
  FASTAUG_METHOD void run(T* out) {
    fill_tables();
    if (box) copy_box();
    const long long corner = folded ? 0 : view.top * view.row_bytes + 3 * view.left;
    const byte* const pixels = box ? box : in_global_memory(view.pixels) + corner;
    const long long row_bytes = box ? 3LL * view.box_width : view.row_bytes;
    block.sync();
    if (x.source == x.size && y.source == y.size) copy_pixels(pixels, row_bytes, out);
    else resample(pixels, row_bytes, out);
    if (form.layers) apply_operations(out);
    all_written_out();
  }

 private:
  typedef typename Block::Value V;
  static constexpr int LANES = Block::LANES;

  Block& block;
  const View& view;
  const Layer* const layers;
  const Form& form;
  const Side x, y;
  const Layout at;
  const int strip_rows;
  float* const scratch;
  byte *const first, *const second, *const box;
  const bool folded;

  FASTAUG_METHOD int* integers(int offset) const { return (int*)scratch + offset; }

  FASTAUG_METHOD void fill_tables() {
    int* const places = integers(at.places);
    FASTAUG_ROLLED  // one side after the other: both at once would need too many registers
    for (int i = block.thread; i < form.size; i += block.threads) {
      const int row = y.weigh(i, scratch + at.down + i * y.taps, 1);
      integers(at.firsts)[i] = folded ? place_of(view.top + row, view.height, form.border) : row;
    }
    FASTAUG_ROLLED
    for (int i = block.thread; i < form.size; i += block.threads) {
      // A flipped view takes the weights of the opposite column.
      const int column = view.flip ? form.size - 1 - i : i;
      float* const weights = scratch + at.across + 3 * i;
      int place = x.weigh(column, weights, at.elements);
      place = 3 * (folded ? place_of(view.left + place, view.width, form.border) : place);
      for (int c = 0; c < 3; ++c) {
        for (int t = 0; t < x.taps; ++t) weights[t * at.elements + c] = weights[t * at.elements];
        places[3 * i + c] = place + c;
        scratch[at.means + 3 * i + c] = form.mean[c];
        scratch[at.factors + 3 * i + c] = form.factor[c];
      }
    }
    if (LANES > 1) set_bases(places);
  }

  // On a CPU, places are relative to the lowest of their vector. One thread fills all tables.
  FASTAUG_METHOD void set_bases(int* places) {
    block.sync();
    const int end = 3 * form.size;
    for (int i = LANES * block.thread; i < at.elements; i += LANES * block.threads) {
      int lowest = places[i];
      for (int j = i + 1; j < i + LANES && j < end; ++j)
        lowest = places[j] < lowest ? places[j] : lowest;
      const int base = lowest - lowest % 3;
      integers(at.bases)[i / LANES] = base;
      for (int j = i; j < i + LANES; ++j) places[j] = j < end ? places[j] - base : 0;
      for (int j = end; j < i + LANES; ++j) {
        scratch[at.means + j] = scratch[at.factors + j] = 0;
        for (int t = 0; t < x.taps; ++t) scratch[at.across + t * at.elements + j] = 0;
      }
    }
  }

  FASTAUG_METHOD void copy_box() {
    for (int i = block.team; i < view.box_height; i += block.teams) {
      const int row = place_of(view.top + i, view.height, form.border);
      byte* to = box + 3LL * i * view.box_width;
      for (int j = block.lane; j < view.box_width; j += block.lanes) {
        const int column = place_of(view.left + j, view.width, form.border);
        const bool outside = row < 0 || column < 0;
        const byte* from = in_global_memory(view.pixels) + (outside ? 0 : row * view.row_bytes + 3 * column);
        for (int c = 0; c < 3; ++c) to[3 * j + c] = outside ? FILL : from[c];
      }
    }
  }

  // For a box of the view's size: writes the view, or stores it for the operations.
  FASTAUG_METHOD void copy_pixels(const byte* pixels, long long row_bytes, T* out) {
    const int width = 3 * form.size, there = 3 * (folded ? view.width : view.box_width);
    for (int i = block.team; i < form.size; i += block.teams) {
      const byte* const from = pixels + integers(at.firsts)[i] * row_bytes;
      for (int j = LANES * block.lane; j < width; j += LANES * block.lanes) {
        const int base = LANES > 1 ? integers(at.bases)[j / LANES] : 0;
        const V values = take_pixel_values(from + base, there - base, integers(at.places) + j);
        const long long to = (long long)i * width + j;
        if (form.layers) store_pixel_values(first + to, width - j, values);
        else write(out + to, j, values);
      }
    }
    block.sync();
  }

  FASTAUG_METHOD void resample(const byte* pixels, long long row_bytes, T* out) {
    for (int top = 0; top < form.size; top += strip_rows) {
      const int end = top + strip_rows < form.size ? top + strip_rows : form.size;
      sum_rows(pixels, row_bytes, top, end);
      block.sync();
      sum_columns(top, end, out);
      block.sync();
    }
  }

  // Rows of the box to rows of the view, still as wide as the box.
  FASTAUG_METHOD void sum_rows(const byte* pixels, long long row_bytes, int top, int end) {
    const int width = 3 * view.box_width;
    const Share share(block, strip_rows);
    for (int i = top + share.row; i < end; i += share.rows) {
      const byte* const from = pixels + integers(at.firsts)[i] * row_bytes;
      const float* const weights = scratch + at.down + i * y.taps;
      float* const to = scratch + at.strip + (i - top) * at.row;
      if constexpr (LANES == 1) {
        sum_fours(from, row_bytes, weights, to, share);
        continue;
      }
      // The hardware prefetches within a row, but not the next row.
      const int later = i + 3 < form.size ? i + 3 : form.size - 1;
      const byte* const soon = pixels + (integers(at.firsts)[later] + y.taps - 1) * row_bytes;
      for (int j = 0; j < width; j += 64) block.will_read(soon + j);
      const auto sum_some = [&](int j, int there) {
        const byte* value = from + j;
        V sum = load_pixel_values(value, there) * weights[0];
        FASTAUG_BY_THREES
        for (int t = 1; t < y.taps; ++t) {
          value += row_bytes;
          sum = multiply_add(load_pixel_values(value, there), V{} + weights[t], sum);
        }
        store(to + j, LANES, sum);
      };
      int j = LANES * share.column;
      for (; j + LANES <= width; j += LANES * share.columns) sum_some(j, LANES);
      if (j < width) sum_some(j, width - j);
    }
  }

  // A row on a GPU: a thread sums four neighbors at a time. It reads them as words, unless these
  // would begin before the image or end behind it.
  FASTAUG_METHOD void sum_fours(const byte* from, long long row_bytes, const float* weights,
                                float* to, const Share& share) {
    const byte* const first = box ? box : in_global_memory(view.pixels);
    const long long bytes = box ? 3LL * view.box_height * view.box_width
                                : (view.height - 1) * view.row_bytes + 3LL * view.width;
    const int width = 3 * view.box_width;
    // Where all words that are read are within the image.
    const long long before = from - first, after = bytes - before - (y.taps - 1) * row_bytes - 8;
    const int lowest = before < 3 ? 3 - (int)before : 0;
    const int highest = after < width ? (int)after : width;
    FASTAUG_ROLLED
    for (int j = 4 * share.column; j < width; j += 4 * share.columns) {
      const byte* value = from + j;
      const bool by_words = j >= lowest && j <= highest;
      const int there = by_words ? 4 : width - j < 4 ? width - j : 4;
      sum_four(block, value, there, by_words, row_bytes, y.taps, weights, to + j);
    }
  }

  // Columns of the box to columns of the view: writes the view, or stores it for the operations.
  FASTAUG_METHOD void sum_columns(int top, int end, T* out) {
    if (LANES == 1) return sum_columns<0>(top, end, out);
    // A vector covers at most (LANES + 1) / 3 + 1 columns; reach is how far their sources are apart.
    const int reach = 3 * ((int)ceil((LANES + 1) / 3 * x.scale) + 1);
    if (reach + 3 * (x.taps - 1) <= 32) sum_columns<1>(top, end, out);
    else if (reach <= 32) sum_columns<2>(top, end, out);
    else if (reach <= 64) sum_columns<3>(top, end, out);
    else sum_columns<0>(top, end, out);
  }

  template <int WINDOW>
  FASTAUG_METHOD void sum_columns(int top, int end, T* out) {
    const int width = 3 * form.size;
    const Share share(block, strip_rows);
    for (int i = top + share.row; i < end; i += share.rows) {
      const float* const row = scratch + at.strip + (i - top) * at.row;
      for (int j = LANES * share.column; j < width; j += LANES * share.columns) {
        Taken<WINDOW> taken(row + (LANES > 1 ? integers(at.bases)[j / LANES] : 0),
                            integers(at.places) + j);
        const float* weights = scratch + at.across + j;
        V sum = taken.next() * load(weights, LANES, 0);
        FASTAUG_BY_THREES
        for (int t = 1; t < x.taps; ++t) {
          weights += at.elements;
          sum = multiply_add(taken.next(), load(weights, LANES, 0), sum);
        }
        const long long to = (long long)i * width + j;
        if (form.layers) store_pixel_values(first + to, width - j, sum);
        else write(out + to, j, sum);
      }
    }
  }

  FASTAUG_METHOD void apply_operations(T* out) {
    Operations<Block> operations(block, form.size, first, second, (int*)(scratch + at.strip));
    FASTAUG_ROLLED
    for (int i = 0; i < form.layers; ++i) operations.apply(layers[i]);
    normalize(operations.view(), out);
    block.sync();
  }

  FASTAUG_METHOD void write(T* to, int j, V values) {
    const V mean = load(scratch + at.means + j, LANES, 0);
    const V factor = load(scratch + at.factors + j, LANES, 0);
    write_out(to, 3 * form.size - j, (values - mean) * factor);
  }

  FASTAUG_METHOD void normalize(const byte* values, T* out) {
    const int width = 3 * form.size;
    if constexpr (LANES == 1) {
      const auto of_channel = [](const float (&numbers)[3], int channel) {
        return channel == 0 ? numbers[0] : channel == 1 ? numbers[1] : numbers[2];
      };
      return write_values(block, values, width * form.size, out, [&](float x, int channel) {
        return (x - of_channel(form.mean, channel)) * of_channel(form.factor, channel);
      });
    }
    for (int i = block.team; i < form.size; i += block.teams)
      for (int j = LANES * block.lane; j < width; j += LANES * block.lanes) {
        const long long to = (long long)i * width + j;
        write(out + to, j, load_pixel_values(values + to, width - j));
      }
  }
};

}  // namespace fastaug
