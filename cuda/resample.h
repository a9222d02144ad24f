// Resampling of one side of a box to one side of a view: the source pixels and weights of each output
// pixel, for bilinear and bicubic filters, with and without antialiasing.
#pragma once

#include "pixels.h"

namespace fastaug {

struct Filter {
  int cubic;      // else bilinear
  int antialias;  // shrinking widens the filter, as in Pillow
};

// One side: output i is the sum over t < taps of weight(i, t) * source[first(i) + t]. Pixels beyond
// the box are its outermost ones, repeated: their weights are added to those of the edge.
struct Side {
  int source, size, taps, reach;
  bool cubic;
  double scale, widen;

  FASTAUG_METHOD Side(int source, int size, Filter filter)
      : source(source), size(size), cubic(filter.cubic) {
    scale = (double)source / size;
    widen = filter.antialias && scale > 1 ? scale : 1;
    reach = (int)ceil(2 * radius());
    if (source == size) reach = 1;  // a copy, exactly
    taps = reach < source ? reach : source;
  }

  FASTAUG_METHOD double radius() const { return cubic ? 2 * widen : widen; }

  // Keys' kernel with a = -1/2, or a triangle.
  FASTAUG_METHOD double shape(double distance) const {
    // Dividing by 1 changes nothing, but would be half of the fp64 arithmetic of a filter.
    const double x = fabs(widen == 1 ? distance : distance / widen);
    if (!cubic) return x < 1 ? 1 - x : 0;
    if (x < 1) return (1.5 * x - 2.5) * x * x + 1;
    return x < 2 ? ((-0.5 * x + 2.5) * x - 4) * x + 2 : 0;
  }

  // Writes weight(i, t) to weights[t * stride], returns first(i).
  FASTAUG_METHOD int weigh(int i, float* weights, int stride) const {
    if (source == size) {
      *weights = 1;
      return i;
    }
    const double center = (i + 0.5) * scale - 0.5;
    const int lowest = (int)floor(center - radius()) + 1;
    int first = lowest > source - taps ? source - taps : lowest;
    first = first > 0 ? first : 0;
    double sum = 0;
    FASTAUG_ROLLED
    for (int t = 0; t < reach; ++t) sum += shape(lowest + t - center);
    FASTAUG_ROLLED
    for (int t = 0; t < taps; ++t) weights[t * stride] = 0;
    FASTAUG_ROLLED
    for (int t = 0; t < reach; ++t) {
      int place = lowest + t;
      place = place < 0 ? 0 : place < source ? place : source - 1;
      weights[(place - first) * stride] += (float)(shape(lowest + t - center) / sum);
    }
    return first;
  }
};

}  // namespace fastaug
