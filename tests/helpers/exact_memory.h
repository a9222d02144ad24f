// Memory of exactly the size that the view kernel may touch: under a sanitizer, any access beyond it
// is a report.
#pragma once

#include <cstring>
#include <new>

#include "views.h"

// Not a vector: its capacity may be more than its size, and what is written beyond would not show.
template <class T>
struct Exactly {
  explicit Exactly(size_t count) : count(count), data(new(std::align_val_t(64)) T[count]) {}
  Exactly(Exactly&& other) : count(other.count), data(other.data) { other.data = nullptr; }
  ~Exactly() { ::operator delete[](data, std::align_val_t(64)); }
  const size_t count;
  T* data;
};

// Runs make(scratch, first, second, box), each part of a block's memory allocated by itself: the
// product puts them into one piece, where running over into the next would not show.
template <class Make>
void with_exact_memory(const fastaug::View& view, const fastaug::Layer* layers,
                       const fastaug::Form& form, int strip, Make make) {
  using namespace fastaug;
  const Side x(view.box_width, form.size, form.filter), y(view.box_height, form.size, form.filter);
  const Room room(view, layers, form);
  Exactly<float> scratch(Layout(form.size, OneThread::LANES, x, y, strip).size);
  Exactly<byte> first(room.first), second(room.second), box(room.box);
  std::memset((void*)scratch.data, 0xff, 4 * scratch.count);  // not a number, if it is ever used
  make(scratch.data, first.data, second.data, room.box ? box.data : nullptr);
}
